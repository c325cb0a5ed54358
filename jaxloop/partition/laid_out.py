"""Partitioners that split the state across devices."""

import abc
import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any, final

import jax
import numpy as np
from absl import logging
from flax import linen as nn
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxloop.base import checks
from jaxloop.partition.mesh_partitioner import MeshPartitioner
from jaxloop.partition.meshes import mesh_for_tracing, names_of
from jaxloop.partition.partitioner import Rules
from jaxloop.types import nnx


class _LaidOutPartitioner(MeshPartitioner):
    """The base class of partitioners that store a layout: a pytree with the sharding of each leaf of the state.

    The layout is known once a state has been initialized with the partitioner. A `_LeafPartitioner` also determines it
    when it places a state.
    """

    def __init__(self, mesh: Mesh, data_axis: str):
        super().__init__(mesh, data_axis)
        self._sharding: Any = None

    @property
    def sharding(self) -> Any:
        """A pytree of `NamedSharding`s with the structure of the state.

        Reading this property raises a `ValueError` until a state has been initialized with this partitioner.
        """
        if self._sharding is None:
            raise ValueError(
                f"{type(self).__name__}.sharding is known only after the state was initialized. Call "
                "step.initialize_model(...) of a step with this partitioner first."
            )
        return self._sharding

    def shard_init_fn(self, init_fn: Callable[..., Any]) -> Callable[..., Any]:
        init_unboxed = _unboxing(init_fn)

        def sharded_init(*args: Any, **kwargs: Any) -> Any:
            with self._tracing():
                self._lay_out_result(init_fn, *args, **kwargs)
                return jax.jit(init_unboxed, out_shardings=self._sharding)(*args, **kwargs)

        return sharded_init

    def _tracing(self) -> contextlib.AbstractContextManager[None]:
        """Returns the context manager in which `shard_init_fn` traces the function that creates the state."""
        return mesh_for_tracing(self._mesh)

    @abc.abstractmethod
    def _lay_out_result(self, init_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Determines the layout of the state that `init_fn` returns for the given arguments, and stores the layout.

        The state itself isn't created.
        """

    def moved_to(self, devices):
        moved = super().moved_to(devices)
        moved._sharding = None
        return moved

    def layout_of(self, state: Any) -> Any:
        spec_of = lambda leaf: leaf.sharding.spec if isinstance(leaf.sharding, NamedSharding) else PartitionSpec()
        self._hold(jax.tree.map(lambda leaf: NamedSharding(self._mesh, spec_of(leaf)), state))
        return super().layout_of(state)

    def _hold(self, sharding: Any) -> None:
        by_path = checks.leaves_by_path
        # Rerunning a notebook cell creates the same model and optimizer again, with the same layout.
        if self._sharding is not None and by_path(sharding) != by_path(self._sharding):
            raise ValueError(
                f"This {type(self).__name__} already holds the layout of another state. Initialize one model with one "
                "optimizer and give that state to all steps, or make a separate partitioner for each model."
            )
        self._sharding = sharding


class _LeafPartitioner(_LaidOutPartitioner):
    """The base class of partitioners that determine the layout of each leaf from its path and shape."""

    @abc.abstractmethod
    def _spec_of(self, path: str, leaf: Any) -> PartitionSpec:
        """Returns the `PartitionSpec` of the leaf at a path in the state.

        `leaf` is the leaf itself, or a `jax.ShapeDtypeStruct` that describes it.
        """

    def _tracing(self):
        return contextlib.nullcontext()

    def _lay_out_result(self, init_fn, *args, **kwargs):
        self._lay_out(jax.eval_shape(_unboxing(init_fn), *args, **kwargs))

    def place_state(self, state: Any) -> Any:
        self._lay_out(state)
        return super().place_state(state)

    def layout_of(self, state: Any) -> Any:
        self._lay_out(state)
        return MeshPartitioner.layout_of(self, state)

    def shardings_of(self, state: Any) -> Any:
        of_leaf = lambda path, leaf: NamedSharding(self._mesh, self._spec_of(checks.path_name(path), leaf))
        return jax.tree_util.tree_map_with_path(of_leaf, state)

    def _lay_out(self, state: Any) -> None:
        self._hold(self.shardings_of(state))


@final
class FSDPPartitioner(_LeafPartitioner):
    """Implements FSDP (ZeRO-3): shards the parameters and the optimizer state over `data_axis`, like the batch.

    Each of the n devices along `data_axis` stores 1/n of each leaf of the state. Leaves that are small or can't be
    divided evenly are replicated instead. During a step, each device gathers the missing parts of the parameters from
    the other devices when it needs them.

    >>> from jaxloop.partition import create_mesh
    >>> FSDPPartitioner(create_mesh(data=-1)).data_axis
    'data'

    Args:
      mesh: See `MeshPartitioner`.
      data_axis: See `MeshPartitioner`. The state is replicated over the other axes.
      min_size: The minimum number of elements for a leaf to be split. Smaller leaves are replicated.
    """

    def __init__(self, mesh: Mesh, data_axis: str = "data", min_size: int = 2**12):
        super().__init__(mesh, data_axis)
        checks.check_positive("min_size", min_size)
        self._min_size = min_size

    def _spec_of(self, path, leaf):
        shape = np.shape(leaf)
        axes = [axis for axis, size in enumerate(shape) if size and size % self.shards == 0]
        if self.shards == 1 or np.size(leaf) < self._min_size or not axes:
            return PartitionSpec()
        largest = max(axes, key=lambda axis: shape[axis])
        return PartitionSpec(*[None] * largest, self._data_axis)


@final
class RulesPartitioner(_LeafPartitioner):
    r"""Shards a state by rules that match the paths of its leaves, for models without partitioning metadata.

    A rule is a pair of a regular expression and a `PartitionSpec` of mesh axes. A rule matches a leaf if the regular
    expression is found in the leaf's path. The first matching rule applies. Paths start at the root of the state, so
    the rule `Dense_0/kernel` matches `params/Dense_0/kernel`, and also the optimizer's moment estimates for that
    parameter.

    >>> from jaxloop.partition import create_mesh
    >>> mesh = create_mesh(data=-1, model=1)
    >>> partitioner = RulesPartitioner(mesh, "data", rules=[(r"Dense_\d+/kernel", PartitionSpec(None, "model"))])

    Leaves without a matching rule are replicated. A warning is logged for each rule that doesn't match any leaf.

    Args:
      mesh: See `MeshPartitioner`.
      data_axis: See `MeshPartitioner`.
      rules: Pairs of a regular expression and a `PartitionSpec`.

    Raises:
      ValueError: If a rule names an axis that isn't in the mesh. Laying out a state also raises this error if the
        `PartitionSpec` for a leaf has more entries than the leaf has axes, or splits an axis that can't be divided
        evenly among the devices. In the optimizer state, such leaves are replicated instead.
    """

    def __init__(self, mesh: Mesh, data_axis: str, rules: Rules):
        super().__init__(mesh, data_axis)
        self._rules = [(re.compile(pattern), PartitionSpec(*(spec or ()))) for pattern, spec in rules]
        for _, spec in self._rules:
            NamedSharding(self._mesh, spec)  # Raises an error for an unknown axis.

    def _lay_out(self, state):
        is_known = self._sharding is not None
        super()._lay_out(state)
        for pattern, spec in () if is_known else self._rules:
            if not any(pattern.search(path) for path in checks.leaves_by_path(state)):
                logging.warning("The rule (%r, %s) matches no leaf of the state.", pattern.pattern, spec)

    def _spec_of(self, path, leaf):
        rule = next((rule for rule in self._rules if rule[0].search(path)), None)
        if rule is None:
            return PartitionSpec()
        pattern, spec = rule
        try:
            NamedSharding(self._mesh, spec).shard_shape(np.shape(leaf))
        except (IndexError, ValueError) as error:
            if path.startswith("opt_state"):  # Here, a parameter's leaf may have fewer axes.
                return PartitionSpec()
            raise ValueError(
                f"The rule ({pattern.pattern!r}, {spec}) can't be applied to {path}, {checks.describe(leaf)}: it has "
                f"too few axes, or one that can't be divided evenly among the devices of {dict(self._mesh.shape)}. "
                "Change the rule, add one for this leaf before it, or change the sizes of the model or the mesh."
            ) from error
        return spec


@final
class SPMDPartitioner(_LaidOutPartitioner):
    """Splits the state according to the model's Flax partitioning metadata, and the batch over `data_axis`.

    In Linen modules, the names in `nn.with_partitioning(init, (None, "model"))` must be axes of the mesh, whereas those
    in `nn.with_logical_partitioning` are logical names. In NNX modules, `nnx.with_partitioning(init, (None, "model"))`
    accepts both kinds of names. `logical_axis_rules` maps logical names to axes of the mesh. Leaves without metadata
    are replicated. The initialized state is unboxed: its leaves are plain arrays.

    >>> from jaxloop.partition import create_mesh
    >>> rules = [("embed", None), ("hidden", "model")]
    >>> partitioner = SPMDPartitioner(create_mesh(data=-1, model=1), "data", logical_axis_rules=rules)

    Args:
      mesh: See `MeshPartitioner`.
      data_axis: See `MeshPartitioner`.
      logical_axis_rules: Pairs `(logical name, axes)`, where `axes` is a mesh axis, a tuple of mesh axes, or None.
        Inside `run`, `nn.with_logical_constraint` uses these rules, too.

    Raises:
      ValueError: If a rule names an axis that isn't in the mesh. Laying out a state also raises this error if
        the model uses a name that isn't an axis of the mesh and for which there is no rule.
    """

    def __init__(self, mesh: Mesh, data_axis: str, logical_axis_rules: Rules = ()):
        super().__init__(mesh, data_axis)
        self._rules = tuple((name, axes) for name, axes in logical_axis_rules)
        for _, axes in self._rules:
            NamedSharding(self._mesh, PartitionSpec(axes))  # Raises an error for an unknown axis.

    def partition(self, fn: Callable[..., Any], **jit_kwargs: Any) -> Callable[..., Any]:
        @functools.wraps(fn)
        def with_rules(*args, **kwargs):
            with self._with_rules():
                return fn(*args, **kwargs)

        return super().partition(with_rules, **jit_kwargs)

    @contextlib.contextmanager
    def _tracing(self) -> Iterator[None]:
        with super()._tracing(), self._with_rules():  # NNX creates annotated variables only if a mesh is set.
            yield

    def _lay_out_result(self, init_fn, *args, **kwargs):
        annotated = jax.eval_shape(init_fn, *args, **kwargs)
        is_spec = lambda leaf: isinstance(leaf, PartitionSpec)
        # Linen and NNX each read their own annotations.
        is_linen = any(map(_is_box, jax.tree.leaves(annotated, is_leaf=_is_box)))
        specs = (nn if is_linen else nnx).get_partition_spec(annotated)
        self._hold(jax.tree.map(self._sharding_of, specs, is_leaf=is_spec))

    def _sharding_of(self, spec: PartitionSpec | None) -> NamedSharding:
        entries, used = [], set[str]()
        for entry in spec or ():
            axes = [axis for name in names_of(entry) for axis in self._axes_of(name, used)]
            used.update(axes)
            entries.append(tuple(axes) if len(axes) > 1 else axes[0] if axes else None)
        return NamedSharding(self._mesh, PartitionSpec(*entries))

    def _axes_of(self, name: str, used: set[str]) -> tuple[str, ...]:
        """Returns the mesh axes over which to split an axis that has the given name in the model's metadata.

        `used` contains the mesh axes over which earlier axes of the same leaf are split. If there are rules for the
        name, the first rule that has no axis in `used` determines the result. If every rule for the name has an axis
        in `used`, the result is empty. A name without rules must be an axis of the mesh.
        """
        rules = [names_of(axes) for logical_name, axes in self._rules if logical_name == name]
        if not rules and name not in self._mesh.axis_names:
            raise ValueError(
                f"The model uses the axis {name!r}, which is not an axis of the mesh "
                f"({', '.join(map(repr, self._mesh.axis_names))}), and there is no rule for it. Add ({name!r}, ...) to "
                "logical_axis_rules, with a mesh axis or None."
            )
        return next((axes for axes in rules if not used.intersection(axes)), ()) if rules else (name,)

    def _with_rules(self) -> contextlib.AbstractContextManager[None]:
        return nn.logical_axis_rules(self._rules) if self._rules else contextlib.nullcontext()


@final
class ExplicitPartitioner(_LaidOutPartitioner):
    """Makes all axes of a mesh explicit, so that shardings are part of array types.

    The model determines how its arrays are split. Use this partitioner for models that use `out_sharding=`. Pass it a
    mesh from `jax.make_mesh`. While the model is initialized and while `run` is traced, the mesh is the current one, as
    if set by `jax.set_mesh`. The state keeps its initial layout: leaves are replicated unless the model splits them.
    The leading axis of the batch is split over `data_axis`.

    JAX raises a `ShardingTypeError` if it can't determine how a result is split. A contraction over the batch axis,
    such as a hand-written gradient `x.T @ errors`, needs an explicit sharding for its result:
    `jnp.einsum("bi,bo->io", x, errors, out_sharding=PartitionSpec())`. Gradients from `jax.grad` have the same sharding
    as the parameters. In evaluations, the number of rows of each batch must be divisible by the size of `data_axis`.
    For models with Linen annotations, use `SPMDPartitioner` instead.

    >>> import jax
    >>> mesh = jax.make_mesh((1,), ("data",))
    >>> ExplicitPartitioner(mesh, "data").mesh.axis_types == (jax.sharding.AxisType.Explicit,)
    True

    Args:
      mesh: See `MeshPartitioner`. Automatic axes are made explicit.
      data_axis: See `MeshPartitioner`.
    """

    _axis_type = AxisType.Explicit

    def _lay_out_result(self, init_fn, *args, **kwargs):
        self._hold(jax.tree.map(self._sharding_of, jax.eval_shape(_unboxing(init_fn), *args, **kwargs)))

    def _sharding_of(self, shape: jax.ShapeDtypeStruct) -> NamedSharding:
        spec = shape.sharding.spec if isinstance(shape.sharding, NamedSharding) else PartitionSpec()
        return NamedSharding(self._mesh, spec)


def _is_box(leaf: Any) -> bool:
    return isinstance(leaf, nn.meta.AxisMetadata)


def _unboxing(init_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that calls `init_fn` and removes Linen's partitioning annotations from the result.

    The axis names in the annotations are ignored, so they don't have to be names of mesh axes.
    """
    value = lambda leaf: leaf.value if isinstance(leaf, nn.Partitioned) else nn.meta.unbox(leaf)
    return lambda *args, **kwargs: jax.tree.map(value, init_fn(*args, **kwargs), is_leaf=_is_box)
