"""The partitioner for one device."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
from jax.sharding import Sharding

from jaxloop import types
from jaxloop.base import checks
from jaxloop.base.flat_state import compile_donating
from jaxloop.partition.partitioner import Partitioner


class SingleDevicePartitioner(Partitioner):
    """Places everything on JAX's default device.

    Batches stay on the host until they are passed to the jitted call. This is several times faster than calling
    `jax.device_put` first.

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
        return jax.sharding.SingleDeviceSharding(self._device or _default_device())

    @property
    def places_batches(self) -> bool:
        return type(self).shard_batch is not SingleDevicePartitioner.shard_batch

    @property
    def takes_any_tree(self) -> bool:
        return not checks.is_user_defined(self, "partition")

    def shard_init_fn(self, init_fn: Callable[..., Any]) -> Callable[..., Any]:
        return jax.jit(init_fn)

    def shard_batch(self, batch: types.Batch) -> types.Batch:
        return batch

    def shard_stacked_batches(self, batches: types.Batch) -> types.Batch:
        return batches

    def partition(self, fn: Callable[..., Any], **jit_kwargs: Any) -> Callable[..., Any]:
        return compile_donating(fn, **jit_kwargs)


def _default_device() -> Any:
    device = getattr(jax.config, "jax_default_device", None)
    return device if isinstance(device, jax.Device) else jax.local_devices(backend=device)[0]
