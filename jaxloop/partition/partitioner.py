"""What every partitioner does."""

import abc
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, Sharding

from jaxloop import checks, types
from jaxloop.layout import Layout, LeafLayout, dtype_of

Rules = Iterable[tuple[str, Any]]
"""Names, or patterns of names, and how what they stand for is split."""

SMALL = 2**12
"""A leaf of fewer elements is not worth splitting, nor a word about it."""


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
      mesh, data_axis, sharding, output_sharding, local_shards, places_batches, takes_any_tree: asked by all of these.
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

    @property
    def takes_any_tree(self) -> bool:
        """Whether `partition` compiles a function of a state of any structure, with the same leaves, all the same."""
        return False

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
        reason = self._why_whole(path, leaf) if is_whole and np.size(leaf) >= SMALL else ""
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
        """Compiles `fn(state, batch)`, which donates the state.

        Args:
          fn: a pure function, which may return anything. If it returns a pair, and the first has the structure of the
            state, that is laid out as the state is. JAX warns if no result can use the donated memory: then give
            `donate_argnums=()`.
          **jit_kwargs: arguments of `jax.jit`, which must replace the partitioner's own, as in
            `jax.jit(fn, **{"donate_argnums": 0, **jit_kwargs})`: an evaluation gives `donate_argnums=()`.
        """
