"""The base class of the partitioners that split the state."""

import abc
from collections.abc import Callable
from typing import Any

import jax
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxloop.base import checks
from jaxloop.partition.mesh_partitioner import MeshPartitioner


class _LaidOutPartitioner(MeshPartitioner):
    """Stores the layout of a state: a pytree of shardings, which is known once a state has been initialized."""

    def __init__(self, mesh: Mesh, data_axis: str):
        super().__init__(mesh, data_axis)
        self._sharding: Any = None

    @property
    def sharding(self) -> Any:
        """A pytree of `NamedSharding`s with the structure of the state.

        Available once a state has been initialized.
        """
        if self._sharding is None:
            raise ValueError(
                f"{type(self).__name__}.sharding is known only after the state was initialized. Call "
                "step.initialize_model(...) of a step with this partitioner first."
            )
        return self._sharding

    def moved_to(self, devices):
        moved = super().moved_to(devices)
        moved._sharding = None
        return moved

    def layout_of(self, state: Any) -> Any:
        spec_of = lambda leaf: leaf.sharding.spec if isinstance(leaf.sharding, NamedSharding) else PartitionSpec()
        self._hold(jax.tree.map(lambda leaf: NamedSharding(self._mesh, spec_of(leaf)), state))
        return super().layout_of(state)

    def _sharding_of_leaf(self, path, leaf):
        return checks.leaves_by_path(self.sharding)[path]

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
    """Lays out the state leaf by leaf, based on each leaf's path and shape. Subclasses implement `_spec_of`."""

    @abc.abstractmethod
    def _spec_of(self, path: str, leaf: Any) -> PartitionSpec:
        """Returns the `PartitionSpec` of a leaf."""

    def shard_init_fn(self, init_fn: Callable[..., Any]) -> Callable[..., Any]:
        init_unboxed = unboxing(init_fn)

        def sharded_init(*args, **kwargs):
            with self._naming_explicit_partitioner():
                self._lay_out(jax.eval_shape(init_unboxed, *args, **kwargs))
            return jax.jit(init_unboxed, out_shardings=self._sharding)(*args, **kwargs)

        return sharded_init

    def place_state(self, state: Any) -> Any:
        self._lay_out(state)
        return super().place_state(state)

    def layout_of(self, state: Any) -> Any:
        self._lay_out(state)
        return MeshPartitioner.layout_of(self, state)

    def _lay_out(self, state: Any) -> None:
        of_leaf = lambda path, leaf: self._sharding_of_leaf(checks.path_name(path), leaf)
        self._hold(jax.tree_util.tree_map_with_path(of_leaf, state))

    def _sharding_of_leaf(self, path, leaf):
        return NamedSharding(self._mesh, self._spec_of(path, leaf))


def _is_box(leaf: Any) -> bool:
    return isinstance(leaf, nn.meta.AxisMetadata)


def boxes_of(tree: Any) -> list[Any]:
    """Returns those leaves of a pytree that carry Linen annotations."""
    return [leaf for leaf in jax.tree.leaves(tree, is_leaf=_is_box) if _is_box(leaf)]


def unboxing(init_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function to remove Linen's annotations from its result, without looking up the names in them."""
    value = lambda leaf: leaf.value if isinstance(leaf, nn.Partitioned) else nn.meta.unbox(leaf)
    return lambda *args, **kwargs: jax.tree.map(value, init_fn(*args, **kwargs), is_leaf=_is_box)
