"""Where arrays live: on one device, or over a mesh, by one of several rules."""

import abc
import contextlib
import functools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from flax import linen as nn
from jax import make_array_from_process_local_data
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from jaxloop import checks, types
from jaxloop.layout import Layout, LeafLayout, bytes_of, dtype_of, readable
from jaxloop.types import nnx

Rules = Iterable[tuple[str, Any]]
"""Names, or patterns of names, and how what they stand for is split."""

# A leaf of fewer elements is not worth splitting, nor a word about it.
_SMALL = 2**12


def create_mesh(*, devices: Sequence[Any] | None = None, **axes: int) -> Mesh:
    """A mesh with named axes, of all devices: `create_mesh(data=-1, model=2)`.

    >>> create_mesh(data=-1).axis_names
    ('data',)

    Args:
      devices: those of the mesh; None for all that there are, on all hosts.
      **axes: by name, how many devices are along an axis. One of them may be -1: it takes what is left.

    Raises:
      ValueError: the axes don't take all devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    shown = ", ".join(f"{name}={size}" for name, size in axes.items())
    if not axes or any(isinstance(size, bool) or not isinstance(size, int | np.integer) for size in axes.values()):
        raise TypeError(f"create_mesh takes sizes by the names of axes, such as data=-1, model=2, got ({shown}).")
    if list(axes.values()).count(-1) > 1 or any(size < 1 and size != -1 for size in axes.values()):
        raise ValueError(
            f"The sizes of a mesh's axes are positive, and one of them may be -1, got create_mesh({shown})."
        )
    known = math.prod(size for size in axes.values() if size != -1)
    if len(devices) % known or (-1 not in axes.values() and known != len(devices)):
        some = f", or give some of them: devices=jax.devices()[:{known}]" if known < len(devices) else ""
        raise ValueError(
            f"create_mesh({shown}) can't be made of {len(devices)} devices: the sizes multiply to {known}. Change them"
            f"{some}."
        )
    sizes = tuple(len(devices) // known if size == -1 else size for size in axes.values())
    types_of_axes = (AxisType.Auto,) * len(axes)
    return jax.make_mesh(sizes, tuple(axes), axis_types=types_of_axes, devices=devices)


def is_cpu_mesh(mesh: Mesh | None) -> bool:
    """Whether several devices are one CPU."""
    return mesh is not None and mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"


def max_steps_in_flight(mesh: Mesh | None) -> int:
    """How many steps the devices may have before them: enough for them never to wait for the host.

    Where several devices are one CPU, the collectives of many steps would compete for the same threads.
    """
    return 8 if is_cpu_mesh(mesh) else 64


def constrain(value: jax.Array, *axes: Any) -> jax.Array:
    """Says inside `run`, or a model, how a value is split: its leading axes over these axes of the mesh.

    The compiler finds that out by itself, and not always well: a transformer whose parameters are split does best to be
    told that its activations are split as the batch is, `x = constrain(x, "data")`. On one device it does nothing.

    >>> constrain(jnp.zeros([8, 3]), "data").shape
    (8, 3)

    Args:
      value: an array.
      *axes: for its axes, from the first, the name of a mesh axis, a tuple of several, or None for none; names that the
        mesh does not have are none.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return value
    known = [tuple(name for name in _names_of(entry) if name in mesh.axis_names) or None for entry in axes]
    return jax.lax.with_sharding_constraint(value, PartitionSpec(*known))


class Partitioner(abc.ABC):
    """Places the state and the batches of a `Step`, and compiles its `run` for that placement.

    A Step calls `shard_init_fn` once, then `shard_batch` and the compiled function for each batch.

    Hooks:
      shard_init_fn: by `Step.initialize_model`, to compile what makes the first state.
      partition: to compile `run`, when it is first needed.
      shard_batch: for each batch, before the compiled function is called.
      shard_short_batch: likewise, in an evaluation.
      shard_stacked_batches: likewise, where several steps are one dispatch.
      place_state: with each state that the step has not made itself, one of a checkpoint, say.
      mesh, data_axis, sharding, output_sharding, local_shards, places_batches: asked by all of these.
    """

    @property
    @abc.abstractmethod
    def mesh(self) -> Mesh | None:
        """The device mesh; None on a single device. Its axes are automatic (GSPMD)."""

    @property
    @abc.abstractmethod
    def data_axis(self) -> str | None:
        """The mesh axis over which batches are split; None on a single device."""

    @property
    @abc.abstractmethod
    def sharding(self) -> Any:
        """Where the state lives: one sharding for all leaves, or a tree of them shaped like the state."""

    @property
    def output_sharding(self) -> Sharding | None:
        """Where the outputs of a step go; None for where the compiler likes."""
        return None

    @property
    def shards(self) -> int:
        """Over how many parts of the data axis a batch is split."""
        return 1 if self.mesh is None or self.data_axis is None else self.mesh.shape[self.data_axis]

    @property
    def local_shards(self) -> int:
        """Over how many of them this process splits what it has of a batch."""
        return self.shards

    @property
    def places_batches(self) -> bool:
        """Whether `shard_batch` does anything: False where the jitted call takes host arrays as they are."""
        return True

    @abc.abstractmethod
    def shard_init_fn(self, init_fn: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `init_fn` compiled, so that each leaf of its result is made where it belongs."""

    @abc.abstractmethod
    def shard_batch(self, batch: types.Batch) -> types.Batch:
        """Places a host batch, all of its rows, on the devices."""

    def shard_short_batch(self, batch: types.Batch) -> types.Batch:
        """As `shard_batch`, for an evaluation's last batch, which may not divide over the devices."""
        return self.shard_batch(batch)

    def shard_stacked_batches(self, batches: types.Batch) -> types.Batch:
        """As `shard_batch`, of batches that were stacked on a new leading axis, for steps in one dispatch."""
        raise NotImplementedError(
            f"{type(self).__name__} does not say how to place several batches at once, which steps_per_dispatch needs: "
            "define shard_stacked_batches(batches), or leave steps_per_dispatch at 1."
        )

    def shardings_of(self, state: Any) -> Any:
        """Where each leaf of a state lives: a tree of shardings shaped like it."""
        shardings = self.sharding
        return jax.tree.map(lambda _: shardings, state) if isinstance(shardings, Sharding) else shardings

    def place_state(self, state: Any) -> Any:
        """Moves a state that was made elsewhere to where this partitioner keeps it. By default leaves it to jit."""
        return state

    def report(self, state: Any) -> Layout:
        """Where each leaf of a state lives, and how many bytes that takes. It prints as a table.

        >>> from jaxloop import examples
        >>> step, state, _ = examples.tiny_regression()
        >>> layout = step.partitioner.report(state)
        >>> layout.bytes_per_device == layout.bytes
        True

        Args:
          state: arrays; or `jax.ShapeDtypeStruct`s, as `jax.eval_shape` returns them, for where they would live.
        """
        return Layout(self._leaf_layout(*each) for each in checks.leaves_by_path(state).items())

    def plot(self, state: Any, pattern: str = "") -> None:
        """Prints pictures of how the leaves of a state are split, see `Layout.plot`."""
        self.report(state).plot(pattern)

    def _leaf_layout(self, path: str, leaf: Any) -> LeafLayout:
        sharding = leaf.sharding if self._holds(leaf) else self._sharding_of_leaf(path, leaf)
        is_whole = sharding.is_fully_replicated
        reason = self._why_whole(path, leaf) if is_whole and np.size(leaf) >= _SMALL else ""
        return LeafLayout(path, tuple(np.shape(leaf)), dtype_of(leaf), sharding, reason)

    def _holds(self, leaf: Any) -> bool:
        """Whether a leaf is an array that is placed already."""
        return isinstance(leaf, jax.Array)

    def _sharding_of_leaf(self, path: str, leaf: Any) -> Any:
        """Where a leaf will live."""
        return self.sharding

    def _why_whole(self, path: str, leaf: Any) -> str:
        """Why a large leaf is whole on each device; nothing where there is one alone."""
        return ""

    @abc.abstractmethod
    def partition(self, fn: Callable[..., Any], **jit_kwargs: Any) -> Callable[..., Any]:
        """Compiles `fn(state, batch) -> (state, outputs)`, which takes over (donates) the state.

        Args:
          fn: a pure function.
          **jit_kwargs: arguments of `jax.jit`, which must replace the partitioner's own, as in
            `jax.jit(fn, **{"donate_argnums": 0, **jit_kwargs})`: an evaluation gives `donate_argnums=()`.
        """


class SingleDevicePartitioner(Partitioner):
    """Everything on JAX's default device.

    Batches stay on the host until the jitted call takes them, which is several times faster than `jax.device_put`.

    Hooks:
      shard_batch, place_state, partition: see `Partitioner`.

    >>> SingleDevicePartitioner().mesh is None
    True
    """

    @property
    def mesh(self) -> None:
        return None

    @property
    def data_axis(self) -> None:
        return None

    @property
    def sharding(self) -> Sharding:
        return jax.sharding.SingleDeviceSharding(_default_device())

    @property
    def places_batches(self) -> bool:
        return type(self).shard_batch is not SingleDevicePartitioner.shard_batch

    def shard_init_fn(self, init_fn: Callable[..., Any]) -> Callable[..., Any]:
        return jax.jit(init_fn)

    def shard_batch(self, batch: types.Batch) -> types.Batch:
        return batch

    def shard_stacked_batches(self, batches: types.Batch) -> types.Batch:
        return batches

    def partition(self, fn: Callable[..., Any], **jit_kwargs: Any) -> Callable[..., Any]:
        return jax.jit(fn, **{"donate_argnums": 0, **jit_kwargs})


def _default_device() -> Any:
    device = getattr(jax.config, "jax_default_device", None)
    return device if isinstance(device, jax.Device) else jax.local_devices(backend=device)[0]


class MeshPartitioner(Partitioner):
    """What the partitioners over a mesh share: batches are split on their leading axis over `data_axis`.

    Hooks:
      sharding, shard_init_fn: see `Partitioner`; to be given by subclasses.
      shard_batch, place_state, partition: see `Partitioner`.

    Args:
      mesh: from `jax.make_mesh` or `jax.sharding.Mesh`. Axes that are explicit are made automatic (as
        `jax.sharding.Mesh` has them), so that `Step.run` is written as for one device.
      data_axis: the name of one of its axes. The other axes hold copies of the batch.
    """

    def __init__(self, mesh: Mesh, data_axis: str):
        if data_axis not in mesh.axis_names:
            raise ValueError(
                f"data_axis {data_axis!r} is no axis of the mesh; those are {', '.join(map(repr, mesh.axis_names))}."
            )
        self._mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
        self._data_axis = data_axis
        self._replicated = NamedSharding(self._mesh, PartitionSpec())
        self._split = NamedSharding(self._mesh, PartitionSpec(data_axis))
        along = np.moveaxis(mesh.devices, mesh.axis_names.index(data_axis), 0)
        is_here = lambda device: device.process_index == jax.process_index()
        self._local_shards = sum(any(map(is_here, each)) for each in along.reshape(len(along), -1))

    @property
    def mesh(self) -> Mesh:
        return self._mesh

    @property
    def data_axis(self) -> str:
        return self._data_axis

    @property
    def local_shards(self) -> int:
        return self._local_shards

    @property
    def output_sharding(self) -> Sharding | None:
        return self._replicated if self._mesh.is_multi_process else None  # What others hold nobody could read.

    @property
    def places_batches(self) -> bool:
        return self._mesh.size > 1 or type(self).shard_batch is not MeshPartitioner.shard_batch

    def shard_batch(self, batch: types.Batch) -> types.Batch:
        """Splits a batch on its leading axis over `data_axis`; scalars are replicated.

        Raises:
          ValueError: the rows of a leaf do not divide over the devices of the axis.
        """
        if self._mesh.size == 1:
            return batch  # The jitted call takes host arrays faster than device_put does.
        self._check_divides(batch, axis=0)
        return self._put(batch, jax.tree.map(self._leaf_sharding, batch))

    def shard_stacked_batches(self, batches: types.Batch) -> types.Batch:
        self._check_divides(batches, axis=1)
        split = NamedSharding(self._mesh, PartitionSpec(None, self._data_axis))
        place = lambda leaf: split if np.ndim(leaf) > 1 else self._replicated
        return batches if self._mesh.size == 1 else self._put(batches, jax.tree.map(place, batches))

    def _check_axes(self, entry: Any, who: str) -> None:
        """Raises where an entry of a `PartitionSpec` names what is no axis of the mesh."""
        for name in _names_of(entry):
            if name not in self._mesh.axis_names:
                axes = ", ".join(map(repr, self._mesh.axis_names))
                raise ValueError(f"{who} {name!r}, which is no axis of the mesh; those are {axes}.")

    def _holds(self, leaf):
        return isinstance(leaf, jax.Array) and getattr(leaf.sharding, "mesh", None) == self._mesh

    def _put(self, batch: Any, shardings: Any) -> Any:
        """Places what this process has of a batch: in a job of many, each has its own part."""
        if not self._mesh.is_multi_process:
            return jax.device_put(batch, shardings)
        return jax.tree.map(lambda leaf, sharding: make_array_from_process_local_data(sharding, leaf), batch, shardings)

    def _check_divides(self, batch, axis):
        shards = self._local_shards
        for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
            shape = np.shape(leaf)[axis:]
            if shape and shape[0] % shards:
                raise ValueError(
                    f"{checks.batch_leaf_name(path)} has {shape[0]} rows, which do not divide over the {shards} "
                    f"devices of mesh axis {self._data_axis!r}. Batch to a multiple of {shards}, or drop the remainder."
                )

    def shard_short_batch(self, batch: types.Batch) -> types.Batch:
        shards = self._local_shards
        if self._mesh.is_multi_process:
            return self.shard_batch(batch)  # Of rows that differ from process to process there is no copy for all.
        if any(np.ndim(leaf) and np.shape(leaf)[0] % shards for leaf in jax.tree.leaves(batch)):
            return jax.device_put(batch, self._replicated)
        return self.shard_batch(batch)

    def _leaf_sharding(self, leaf: Any) -> NamedSharding:
        return self._split if np.ndim(leaf) else self._replicated

    def place_state(self, state: Any) -> Any:
        if not self._mesh.is_multi_process:
            return jax.device_put(state, self.sharding)
        return jax.tree.map(_place_in_all_processes, state, self.shardings_of(state))

    def partition(self, fn: Callable[..., Any], **jit_kwargs: Any) -> Callable[..., Any]:
        @functools.wraps(fn)
        def with_mesh(*args, **kwargs):
            # Lets `fn` use with_sharding_constraint(x, PartitionSpec(...)); costs nothing after tracing.
            with jax.sharding.use_abstract_mesh(self._mesh.abstract_mesh):
                return fn(*args, **kwargs)

        return jax.jit(
            with_mesh, **{"donate_argnums": 0, "out_shardings": (self.sharding, self.output_sharding), **jit_kwargs}
        )


def _place_in_all_processes(leaf: Any, sharding: NamedSharding) -> Any:
    """Moves a leaf of which each process has the same copy to devices of all processes."""
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return jax.device_put(leaf, sharding)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = _place_in_all_processes(jax.random.key_data(leaf), NamedSharding(sharding.mesh, PartitionSpec()))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    host = np.asarray(leaf)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


class DataParallelPartitioner(MeshPartitioner):
    """The state on every device, the batch split over `data_axis`.

    Hooks:
      shard_batch, place_state, partition: see `Partitioner`.

    >>> mesh = jax.make_mesh((1,), ("data",))
    >>> DataParallelPartitioner(mesh, "data").sharding.spec
    P()
    """

    @property
    def sharding(self) -> NamedSharding:
        return self._replicated

    def shard_init_fn(self, init_fn: Callable[..., Any]) -> Callable[..., Any]:
        return jax.jit(init_fn, out_shardings=self._replicated)

    def _why_whole(self, path, leaf):
        return "data parallel: the state is on every device" if self._mesh.size > 1 else ""


class _LaidOutPartitioner(MeshPartitioner):
    """Holds the layout of one state: a tree of shardings, known once there is a state."""

    def __init__(self, mesh: Mesh, data_axis: str):
        super().__init__(mesh, data_axis)
        self._sharding: Any = None

    @property
    def sharding(self) -> Any:
        """A tree of `NamedSharding` shaped like the state; known once the state has been initialised."""
        if self._sharding is None:
            raise ValueError(
                f"{type(self).__name__}.sharding is known when the state is initialised. Call "
                "step.initialize_model(...) of a step with this partitioner first."
            )
        return self._sharding

    def _hold(self, sharding: Any) -> None:
        by_path = checks.leaves_by_path
        # Of the same model and optimizer made anew, as in a notebook's cell, the layout is the same.
        if self._sharding is not None and by_path(sharding) != by_path(self._sharding):
            raise ValueError(
                f"This {type(self).__name__} holds the layout of another state already: initialize one model, with "
                "one optimizer, and give that state to all steps; or give each model a partitioner of its own."
            )
        self._sharding = sharding


class _LeafPartitioner(_LaidOutPartitioner):
    """Lays the state out leaf by leaf, by the path and the shape of each: subclasses say how in `_spec_of`."""

    @abc.abstractmethod
    def _spec_of(self, path: str, leaf: Any) -> PartitionSpec:
        """How a leaf is split."""

    def shard_init_fn(self, init_fn: Callable[..., Any]) -> Callable[..., Any]:
        init_unboxed = _unboxing(init_fn)

        def sharded_init(*args, **kwargs):
            self._lay_out(jax.eval_shape(init_unboxed, *args, **kwargs))
            return jax.jit(init_unboxed, out_shardings=self._sharding)(*args, **kwargs)

        return sharded_init

    def place_state(self, state: Any) -> Any:
        self._lay_out(state)
        return super().place_state(state)

    def _lay_out(self, state: Any) -> None:
        of_leaf = lambda path, leaf: self._sharding_of_leaf(checks.path_name(path), leaf)
        self._hold(jax.tree_util.tree_map_with_path(of_leaf, state))

    def _sharding_of_leaf(self, path, leaf):
        return NamedSharding(self._mesh, self._spec_of(path, leaf))


@final
class FSDPPartitioner(_LeafPartitioner):
    """Parameters and optimizer state split over `data_axis`, as the batch is: each device has a part of each.

    What a step needs of them in whole the devices gather from each other. Per device the state takes 1/n of the bytes
    on n devices, but for small leaves and those that don't divide; `report` says which.

    >>> mesh = create_mesh(data=-1)
    >>> FSDPPartitioner(mesh).mesh.shape["data"] == jax.device_count()
    True

    Args:
      mesh: see `MeshPartitioner`.
      data_axis: likewise. The other axes hold copies.
      min_size: a leaf of fewer elements is whole on each device.
    """

    def __init__(self, mesh: Mesh, data_axis: str = "data", min_size: int = _SMALL):
        super().__init__(mesh, data_axis)
        checks.check_positive("min_size", min_size)
        self._min_size = min_size

    def _spec_of(self, path, leaf):
        axis = self._axis_to_split(leaf)
        return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, self._data_axis)

    def _axis_to_split(self, leaf: Any) -> int | None:
        shape = np.shape(leaf)
        axes = [axis for axis, size in enumerate(shape) if size and size % self.shards == 0]
        if self.shards == 1 or np.size(leaf) < self._min_size or not axes:
            return None
        return max(axes, key=lambda axis: (shape[axis], -axis))

    def _why_whole(self, path, leaf):
        if self.shards == 1:
            return ""
        if np.size(leaf) < self._min_size:
            return f"smaller than min_size={self._min_size}"
        return f"none of its axes divides by the {self.shards} devices of {self._data_axis!r}"


@final
class RulesPartitioner(_LeafPartitioner):
    r"""The state laid out by rules: patterns of paths, for models without metadata.

    A rule is a regular expression, looked for anywhere in the path of a leaf, and a `PartitionSpec`, whose names are
    axes of the mesh. The first one that matches counts. Paths are those of the whole state, so that what matches
    `params/Dense_0/kernel` by `Dense_0/kernel` matches the optimizer's moments of it too.

    >>> mesh = create_mesh(data=-1, model=1)
    >>> partitioner = RulesPartitioner(mesh, "data", rules=[(r"Dense_\d+/kernel", PartitionSpec(None, "model"))])

    Leaves that no rule matches are whole on each device; of large ones that is said, and so is a rule that matches
    nothing.

    Args:
      mesh: see `MeshPartitioner`.
      data_axis: likewise.
      rules: pairs of a pattern and a `PartitionSpec`.

    Raises:
      ValueError: a rule names an axis that the mesh does not have. Once there is a state: a rule splits an axis of a
        parameter that does not divide, or that it does not have.
    """

    def __init__(self, mesh: Mesh, data_axis: str, rules: Rules):
        super().__init__(mesh, data_axis)
        self._rules = [(re.compile(pattern), PartitionSpec(*(spec or ()))) for pattern, spec in rules]
        for pattern, spec in self._rules:
            for entry in spec:
                self._check_axes(entry, f"The rule {pattern.pattern!r} splits over")

    def _lay_out(self, state):
        leaves, is_known = checks.leaves_by_path(state), self._sharding is not None
        super()._lay_out(state)
        if is_known:  # Once is enough.
            return
        for pattern, spec in self._rules:
            if not any(pattern.search(path) for path in leaves):
                logging.warning("The rule (%r, %s) matches no leaf of the state.", pattern.pattern, spec)
        large = [path for path, leaf in leaves.items() if np.size(leaf) >= _SMALL and self._rule_for(path) is None]
        if large:
            logging.warning(
                "No rule matches %s: each device has the whole of it. To mean that, add the rule ('', P()) at the end.",
                checks.listed(large, show=6),
            )

    def _rule_for(self, path: str) -> tuple[re.Pattern[str], PartitionSpec] | None:
        return next(((pattern, spec) for pattern, spec in self._rules if pattern.search(path)), None)

    def _spec_of(self, path, leaf):
        rule = self._rule_for(path)
        if rule is None:
            return PartitionSpec()
        pattern, spec = rule
        shape = np.shape(leaf)
        problem = self._problem_of(spec, shape)
        # The state of an optimizer may have less of a leaf than the parameter has.
        if problem and path.startswith("opt_state"):
            return PartitionSpec()
        if problem:
            raise ValueError(
                f"The rule ({pattern.pattern!r}, {spec}) can't be applied to {path}, {checks.describe(leaf)}: "
                f"{problem}. Change the rule, put one before it for this leaf, or change the sizes of the model or the "
                "mesh."
            )
        return spec

    def _problem_of(self, spec: PartitionSpec, shape: tuple[int, ...]) -> str:
        if len(spec) > len(shape):
            return f"it has {len(shape)} axes, and the rule speaks of {len(spec)}"
        for axis, (size, names) in enumerate(zip(shape, spec, strict=False)):
            shards = math.prod(self._mesh.shape[name] for name in _names_of(names))
            if size % shards:
                return f"its axis {axis} of size {size} does not divide over the {shards} devices of {names!r}"
        return ""

    def _why_whole(self, path, leaf):
        rule = self._rule_for(path)
        if rule is None:
            return "no rule matches it"
        problem = self._problem_of(rule[1], np.shape(leaf))
        return f"the rule {rule[0].pattern!r}" + (f": {problem}" if problem else " says so")


def _names_of(entry: Any) -> tuple[str, ...]:
    """The mesh axes of one entry of a `PartitionSpec`."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


@final
class SPMDPartitioner(_LaidOutPartitioner):
    """The state laid out by the model's Flax partitioning metadata, the batch split over `data_axis`.

    Reads `nn.with_partitioning(init, (None, "model"))` of Linen modules and
    `nnx.with_partitioning(init, (None, "model"))` of NNX modules, whose names are axes of the mesh. Logical names,
    which have rules, are those of Linen's `nn.with_logical_partitioning` and of NNX's `nnx.with_partitioning`. Leaves
    without metadata are replicated. The state comes out unboxed: its leaves are plain arrays.

    >>> rules = [("embed", None), ("hidden", "model")]
    >>> partitioner = SPMDPartitioner(create_mesh(data=-1, model=1), "data", logical_axis_rules=rules)

    Args:
      mesh: see `MeshPartitioner`.
      data_axis: likewise.
      logical_axis_rules: pairs of a logical name and the mesh axis that it stands for, a tuple of several, or None for
        none. Inside `run`, `nn.with_logical_constraint` goes by them too.

    Raises:
      ValueError: a rule names an axis that the mesh does not have. Once there is a state: the model names an axis that
        the mesh does not have, and there is no rule for it.
    """

    def __init__(self, mesh: Mesh, data_axis: str, logical_axis_rules: Rules = ()):
        super().__init__(mesh, data_axis)
        self._rules = tuple((name, axes) for name, axes in logical_axis_rules)
        for logical_name, axes in self._rules:
            self._check_axes(axes, f"The logical axis rule ({logical_name!r}, {axes!r}) stands for")

    def partition(self, fn: Callable[..., Any], **jit_kwargs: Any) -> Callable[..., Any]:
        @functools.wraps(fn)
        def with_rules(*args, **kwargs):
            with self._with_rules():
                return fn(*args, **kwargs)

        return super().partition(with_rules, **jit_kwargs)

    def shard_init_fn(self, init_fn: Callable[..., Any]) -> Callable[..., Any]:
        init_unboxed = _unboxing(init_fn)

        def sharded_init(*args, **kwargs):
            # NNX makes annotated variables only where it can see a mesh.
            with jax.sharding.use_abstract_mesh(self._mesh.abstract_mesh), self._with_rules():
                try:
                    annotated = jax.eval_shape(init_fn, *args, **kwargs)
                except ValueError as error:  # NNX looks at the names when it makes a variable.
                    if unknown := re.search(r"Resource axis: (\S+) of .* is not found in mesh", str(error)):
                        raise self._unknown_axis(unknown[1]) from error
                    raise
                is_spec = lambda leaf: isinstance(leaf, PartitionSpec)
                # Each of the two knows its own annotations.
                of = nn if _has_boxes(annotated) else nnx
                specs = of.get_partition_spec(annotated)
                self._hold(jax.tree.map(self._sharding_of, specs, is_leaf=is_spec))
                return jax.jit(init_unboxed, out_shardings=self._sharding)(*args, **kwargs)

        return sharded_init

    def _sharding_of(self, spec: PartitionSpec | None) -> NamedSharding:
        entries, used = [], set[str]()
        for entry in spec or ():
            axes = [axis for name in _names_of(entry) for axis in self._axes_of(name, used)]
            used.update(axes)
            entries.append(tuple(axes) if len(axes) > 1 else axes[0] if axes else None)
        return NamedSharding(self._mesh, PartitionSpec(*entries))

    def _axes_of(self, name: str, used: set[str]) -> tuple[str, ...]:
        """The mesh axes that a name stands for: those of the first of its rules whose axes are free."""
        rules = [_names_of(axes) for logical_name, axes in self._rules if logical_name == name]
        if not rules and name not in self._mesh.axis_names:
            raise self._unknown_axis(name)
        return next((axes for axes in rules if not used.intersection(axes)), ()) if rules else (name,)

    def _with_rules(self) -> contextlib.AbstractContextManager[None]:
        return nn.logical_axis_rules(self._rules) if self._rules else contextlib.nullcontext()

    def _unknown_axis(self, name: str) -> ValueError:
        if name in dict(self._rules):
            return ValueError(
                f"The model names the logical axis {name!r} by nn.with_partitioning, which takes axes of the mesh. "
                "Annotate it by nn.with_logical_partitioning."
            )
        return ValueError(
            f"The model names an axis {name!r}, which is none of the mesh's "
            f"({', '.join(map(repr, self._mesh.axis_names))}), and there is no rule for it. Add ({name!r}, ...) to "
            "logical_axis_rules, with the mesh axis that it stands for, or None."
        )

    def _sharding_of_leaf(self, path, leaf):
        return checks.leaves_by_path(self.sharding)[path]

    def _why_whole(self, path, leaf):
        return "the model does not annotate it" if self._mesh.size > 1 else ""


def _is_box(leaf: Any) -> bool:
    return isinstance(leaf, nn.meta.AxisMetadata)


def _has_boxes(tree: Any) -> bool:
    return any(map(_is_box, jax.tree.leaves(tree, is_leaf=_is_box)))


def _unboxing(init_fn: Callable[..., Any]) -> Callable[..., Any]:
    """The same without Linen's annotations, which would constrain the leaves by names that only rules know."""
    value = lambda leaf: leaf.value if isinstance(leaf, nn.Partitioned) else nn.meta.unbox(leaf)
    return lambda *args, **kwargs: jax.tree.map(value, init_fn(*args, **kwargs), is_leaf=_is_box)


# What to take ----------------------------------------------------------------------------------------

# Of a device's memory; the rest is for what the steps need besides.
_SHARE_FOR_STATE = 0.5


def choose(state: Any, rows: int | None) -> Partitioner:
    """The partitioner for all devices that a training wants, who does not say; says in the log why.

    On one device there is nothing to choose. On several, the batch is split over all of them; the state is on each one
    as long as it takes, with gradients of the size of its parameters, at most half of the memory of a device, and is
    split too where it takes more.

    Args:
      state: the train state, or its shapes, as `jax.eval_shape` returns them.
      rows: how many rows a batch of this process has; None where nobody knows.
    """
    devices = jax.devices()
    if len(devices) == 1:
        return SingleDevicePartitioner()
    rows = rows and rows * jax.process_count()
    if jax.process_count() > 1 and (rows is None or rows % len(devices)):
        raise ValueError(
            f"partitioner='auto' splits a batch over the {len(devices)} devices of {jax.process_count()} processes, "
            f"and together those have {'no common number of' if rows is None else rows} rows. Batch in each process to "
            f"a multiple of {jax.local_device_count()}."
        )
    if rows is None or rows % len(devices):
        logging.warning(
            "partitioner='auto' takes one of %d devices, because a batch has %s rows, which do not divide over them. "
            "Batch to a multiple of %d.",
            len(devices),
            "no common number of" if rows is None else rows,
            len(devices),
        )
        return SingleDevicePartitioner()
    leaves = checks.leaves_by_path(state)
    needed = sum(bytes_of(leaf) * (2 if path.startswith("params") else 1) for path, leaf in leaves.items())
    memory = memory_of(devices[0])
    mesh = create_mesh(data=-1)
    fits = memory is None or needed <= _SHARE_FOR_STATE * memory
    of = "of which nobody knows the memory" if memory is None else f"of {readable(memory)} each"
    logging.info(
        "partitioner='auto': on %d devices %s, the batch is split over all of them, and the state, with its gradients "
        "%s, is %s.",
        len(devices),
        of,
        readable(needed),
        "on each one (DataParallelPartitioner)" if fits else "split too (FSDPPartitioner)",
    )
    return DataParallelPartitioner(mesh, "data") if fits else FSDPPartitioner(mesh)


def memory_of(device: Any) -> int | None:
    """The bytes that a device has; None where it doesn't say."""
    return None if device.platform == "cpu" else (device.memory_stats() or {}).get("bytes_limit")
