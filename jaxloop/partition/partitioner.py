"""The base class for all partitioners, and the partitioner for a single device."""

import abc
import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding

from jaxloop import types
from jaxloop.base import checks
from jaxloop.base.structures import compile_donating
from jaxloop.partition.layout import Layout, LeafLayout, dtype_of

Rules = Iterable[tuple[str, Any]]
"""Pairs of a logical axis name and mesh axes, or pairs of a regular expression for paths and a `PartitionSpec`."""


class Partitioner(abc.ABC):
    """Places the state and the batches of a `Step` on devices, and compiles the step's `run` for that placement.

    A `Step` calls `shard_init_fn` once. For each batch, it then calls `shard_batch` and the function that `partition`
    compiled.

    Hooks:
      shard_init_fn: Called by `Step.initialize_model` to compile the function that creates the initial state.
      partition: Called to compile `run` when `run` is first needed.
      shard_batch: Called for each batch, before the compiled `run` is called.
      shard_short_batch: Called instead of `shard_batch` for each batch of an evaluation.
      shard_stacked_batches: Called instead of `shard_batch` for each dispatch of several steps, with the stacked
        batches of these steps.
      place_state: Called with each state that the step didn't create itself, such as a restored one.
      mesh, data_axis, sharding, output_sharding, local_shards, places_batches: Properties that the methods above use.
    """

    @property
    @abc.abstractmethod
    def mesh(self) -> Mesh | None:
        """The device mesh, or None on a single device. Its axes are automatic, except in an `ExplicitPartitioner`."""

    @property
    @abc.abstractmethod
    def data_axis(self) -> str | None:
        """The mesh axis over which batches are split, or None on a single device."""

    @property
    @abc.abstractmethod
    def sharding(self) -> Any:
        """The sharding of the state: a single sharding for all leaves, or a pytree with the structure of the state."""

    @property
    def output_sharding(self) -> Sharding | None:
        """The sharding of a step's outputs, or None to let the compiler choose."""
        return None

    @property
    def shards(self) -> int:
        """The number of parts into which a batch is split: the size of the data axis, or 1 if there is none."""
        return 1 if self.mesh is None or self.data_axis is None else self.mesh.shape[self.data_axis]

    @property
    def local_shards(self) -> int:
        """The number of shards that this process contributes to each batch."""
        return self.shards

    @property
    def places_batches(self) -> bool:
        """True if `shard_batch` places batches on the devices; False if they stay on the host until `run` is called."""
        return True

    @abc.abstractmethod
    def shard_init_fn(self, init_fn: Callable[..., Any]) -> Callable[..., Any]:
        """Compiles `init_fn` so that each leaf of its result is created directly on the devices that will hold it."""

    @abc.abstractmethod
    def shard_batch(self, batch: types.Batch) -> types.Batch:
        """Places a host batch on the devices, or returns it unchanged if `places_batches` is False."""

    def shard_short_batch(self, batch: types.Batch) -> types.Batch:
        """Places an evaluation batch on the devices. By default, calls `shard_batch`.

        In a single-process job, mesh partitioners replicate a batch if its number of rows isn't divisible by `shards`.
        """
        return self.shard_batch(batch)

    def shard_stacked_batches(self, batches: types.Batch) -> types.Batch:
        """Places the stacked batches of a dispatch on the devices. The leading axis of each leaf is the step axis."""
        raise NotImplementedError(f"{type(self).__name__} needs shard_stacked_batches(batches) for steps_per_dispatch.")

    def shardings_of(self, state: Any) -> Any:
        """Returns a pytree with the sharding of each leaf of a state."""
        shardings = self.sharding
        return jax.tree.map(lambda _: shardings, state) if isinstance(shardings, Sharding) else shardings

    def place_state(self, state: Any) -> Any:
        """Moves a state to this partitioner's devices. Called for states that the step didn't create itself.

        The default implementation returns the state unchanged. `jax.jit` then moves the state when `run` is called.
        """
        return state

    def report(self, state: Any) -> Layout:
        """Returns the layout of a state: the placement and the size of each leaf. `str` returns it as a table.

        >>> from jaxloop import examples
        >>> step, state, _ = examples.tiny_regression()
        >>> layout = step.partitioner.report(state)
        >>> layout.bytes_per_device == layout.bytes
        True

        Args:
          state: The state, or its shapes as returned by `jax.eval_shape`.
        """
        shardings = checks.leaves_by_path(self.shardings_of(state))
        return Layout(
            LeafLayout(path, np.shape(leaf), dtype_of(leaf), shardings[path])
            for path, leaf in checks.leaves_by_path(state).items()
        )

    def moved_to(self, devices: Sequence[Any]) -> "Partitioner":
        """Returns an equivalent partitioner for other devices, such as those of a TPU topology.

        Raises:
          ValueError: If the mesh can't be built from the given devices.
        """
        raise NotImplementedError(f"{type(self).__name__} needs moved_to(devices) for check(topology=...).")

    def layout_of(self, state: Any) -> Any:
        """Returns a pytree of `jax.ShapeDtypeStruct`s that describe a state as placed by this partitioner.

        The shapes and dtypes are those of the given state, which may be on any devices.
        """
        place = lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        return jax.tree.map(place, state, self.shardings_of(state))

    @abc.abstractmethod
    def partition(self, fn: Callable[..., Any], **jit_kwargs: Any) -> Callable[..., Any]:
        """Returns a compiled version of `fn(state, batch)` that donates the state.

        Args:
          fn: A pure function that returns a pair `(state, outputs)`. The returned state gets the layout of the given
            state. For a function that returns anything else, pass `out_shardings=None` and `donate_argnums=()`.
          **jit_kwargs: Arguments for `jax.jit`. Implementations must let these arguments take precedence over the
            partitioner's own, as in `jax.jit(fn, **{"donate_argnums": 0, **jit_kwargs})`. For an evaluation,
            `donate_argnums=()` is passed.
        """


class SingleDevicePartitioner(Partitioner):
    """Places everything on JAX's default device.

    Batches stay on the host until they are passed to the jitted function. Passing them directly is several times faster
    than calling `jax.device_put` first.

    Hooks:
      shard_batch, place_state, partition: See `Partitioner`.

    >>> SingleDevicePartitioner().mesh is None
    True
    """

    def __init__(self):
        self._device: Any = None  # None for JAX's default device.

    def moved_to(self, devices: Sequence[Any]) -> Self:
        """Returns a partitioner for the first of the given devices."""
        moved = copy.copy(self)
        moved._device = devices[0]
        return moved

    @property
    def mesh(self) -> None:
        return None

    @property
    def data_axis(self) -> None:
        return None

    @property
    def sharding(self) -> Sharding:
        return jax.sharding.SingleDeviceSharding(self._device) if self._device else jnp.zeros(()).sharding

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
        return compile_donating(fn, **jit_kwargs)
