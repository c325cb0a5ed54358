"""Where arrays live: on one device, replicated over a mesh, or laid out by the model's annotations."""

import abc
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from jaxloop import checks, types
from jaxloop.types import nnx


def is_cpu_mesh(mesh: Mesh | None) -> bool:
    """Whether several devices are one CPU."""
    return mesh is not None and mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"


def max_steps_in_flight(mesh: Mesh | None) -> int:
    """How many steps the devices may have before them: enough for them never to wait for the host.

    Where several devices are one CPU, the collectives of many steps would compete for the same threads.
    """
    return 8 if is_cpu_mesh(mesh) else 64


class Partitioner(abc.ABC):
    """Places the state and the batches of a `Step`, and compiles its `run` for that placement.

    A Step calls `shard_init_fn` once, then `shard_batch` and the compiled function for each batch.
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

    def place_state(self, state: Any) -> Any:
        """Moves a state that was made elsewhere to where this partitioner keeps it. By default leaves it to jit."""
        return state

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

    def shard_init_fn(self, init_fn):
        return jax.jit(init_fn)

    def shard_batch(self, batch):
        return batch

    def shard_stacked_batches(self, batches):
        return batches

    def partition(self, fn, **jit_kwargs):
        return jax.jit(fn, **{"donate_argnums": 0, **jit_kwargs})


def _default_device() -> Any:
    device = getattr(jax.config, "jax_default_device", None)
    return device if isinstance(device, jax.Device) else jax.local_devices(backend=device)[0]


class MeshPartitioner(Partitioner):
    """What the partitioners over a mesh share: batches are split on their leading axis over `data_axis`.

    Subclasses give `sharding` and `shard_init_fn`.

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

    @property
    def mesh(self) -> Mesh:
        return self._mesh

    @property
    def data_axis(self) -> str:
        return self._data_axis

    @property
    def places_batches(self) -> bool:
        return self._mesh.size > 1 or type(self).shard_batch is not MeshPartitioner.shard_batch

    def shard_batch(self, batch):
        """Splits a batch on its leading axis over `data_axis`; scalars are replicated.

        Raises:
          ValueError: the rows of a leaf do not divide over the devices of the axis.
        """
        if self._mesh.size == 1:
            return batch  # The jitted call takes host arrays faster than device_put does.
        self._check_divides(batch, axis=0)
        return jax.device_put(batch, jax.tree.map(self._leaf_sharding, batch))

    def shard_stacked_batches(self, batches):
        self._check_divides(batches, axis=1)
        split = NamedSharding(self._mesh, PartitionSpec(None, self._data_axis))
        place = lambda leaf: split if np.ndim(leaf) > 1 else self._replicated
        return batches if self._mesh.size == 1 else jax.device_put(batches, jax.tree.map(place, batches))

    def _check_divides(self, batch, axis):
        shards = self._mesh.shape[self._data_axis]
        for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
            shape = np.shape(leaf)[axis:]
            if shape and shape[0] % shards:
                raise ValueError(
                    f"{checks.batch_leaf_name(path)} has {shape[0]} rows, which do not divide over the {shards} "
                    f"devices of mesh axis {self._data_axis!r}. Batch to a multiple of {shards}, or drop the remainder."
                )

    def shard_short_batch(self, batch):
        shards = self._mesh.shape[self._data_axis]
        if any(np.ndim(leaf) and np.shape(leaf)[0] % shards for leaf in jax.tree.leaves(batch)):
            return jax.device_put(batch, self._replicated)
        return self.shard_batch(batch)

    def _leaf_sharding(self, leaf: Any) -> NamedSharding:
        return self._split if np.ndim(leaf) else self._replicated

    def place_state(self, state):
        return jax.device_put(state, self.sharding)

    def partition(self, fn, **jit_kwargs):
        @functools.wraps(fn)
        def with_mesh(*args, **kwargs):
            # Lets `fn` use with_sharding_constraint(x, PartitionSpec(...)); costs nothing after tracing.
            with jax.sharding.use_abstract_mesh(self._mesh.abstract_mesh):
                return fn(*args, **kwargs)

        # None: the outputs go where the compiler likes.
        return jax.jit(with_mesh, **{"donate_argnums": 0, "out_shardings": (self.sharding, None), **jit_kwargs})


class DataParallelPartitioner(MeshPartitioner):
    """The state on every device, the batch split over `data_axis`.

    >>> mesh = jax.make_mesh((1,), ("data",))
    >>> DataParallelPartitioner(mesh, "data").sharding.spec
    P()
    """

    @property
    def sharding(self) -> NamedSharding:
        return self._replicated

    def shard_init_fn(self, init_fn):
        return jax.jit(init_fn, out_shardings=self._replicated)


class SPMDPartitioner(MeshPartitioner):
    """The state laid out by the model's Flax partitioning metadata, the batch split over `data_axis`.

    Reads `nn.with_partitioning(init, (None, "model"))` of Linen modules and
    `nnx.with_partitioning(init, (None, "model"))` of NNX modules, whose names are axes of the mesh. Leaves without
    metadata are replicated. The state comes out unboxed: its leaves are plain arrays.
    """

    def __init__(self, mesh: Mesh, data_axis: str):
        super().__init__(mesh, data_axis)
        self._sharding: Any = None

    @property
    def sharding(self) -> Any:
        """A tree of `NamedSharding` shaped like the state; known once the state has been initialised."""
        if self._sharding is None:
            raise ValueError(
                "SPMDPartitioner.sharding is read from the model's metadata when the state is initialised. "
                "Call step.initialize_model(...) of a step with this partitioner first."
            )
        return self._sharding

    def shard_init_fn(self, init_fn):
        def init_unboxed(*args, **kwargs):
            return nn.meta.unbox(init_fn(*args, **kwargs))

        def sharded_init(*args, **kwargs):
            # NNX makes annotated variables only where it can see a mesh.
            with jax.sharding.use_abstract_mesh(self._mesh.abstract_mesh):
                annotated = jax.eval_shape(init_fn, *args, **kwargs)
                is_spec = lambda leaf: isinstance(leaf, PartitionSpec)
                # Each of the two knows its own annotations.
                of = nn if _has_boxes(annotated) else nnx
                specs = of.get_partition_spec(annotated)
                sharding = jax.tree.map(self._sharding_of, specs, is_leaf=is_spec)
                if self._sharding is not None and jax.tree.structure(sharding) != jax.tree.structure(self._sharding):
                    raise ValueError(
                        "This SPMDPartitioner holds the layout of another state already: initialize one model, with "
                        "one optimizer, and give that state to all steps; or give each model a partitioner of its own."
                    )
                self._sharding = sharding
                return jax.jit(init_unboxed, out_shardings=self._sharding)(*args, **kwargs)

        return sharded_init

    def _sharding_of(self, spec: PartitionSpec | None) -> NamedSharding:
        return NamedSharding(self._mesh, spec if spec is not None else PartitionSpec())


def _has_boxes(tree: Any) -> bool:
    is_box = lambda leaf: isinstance(leaf, nn.meta.AxisMetadata)
    return any(is_box(leaf) for leaf in jax.tree.leaves(tree, is_leaf=is_box))
