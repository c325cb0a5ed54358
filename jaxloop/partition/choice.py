"""The function that chooses a partitioner for `partitioner="auto"`."""

from typing import Any

import jax
from absl import logging

from jaxloop.base import checks
from jaxloop.partition.laid_out import FSDPPartitioner
from jaxloop.partition.layout import bytes_of, readable
from jaxloop.partition.mesh_partitioner import DataParallelPartitioner
from jaxloop.partition.meshes import create_mesh
from jaxloop.partition.partitioner import Partitioner, SingleDevicePartitioner

# The fraction of a device's memory that the state may use; the steps need the rest.
_SHARE_FOR_STATE = 0.5


def choose(state: Any, rows: int | None) -> Partitioner:
    """Chooses a partitioner for the available devices and logs the reason.

    If there are several devices, the batch is split across all of them. The state is replicated if it and the gradients
    fit in half of a device's memory, or if the memory size is unknown. Otherwise, the state is also split.

    Args:
      state: The train state, or its shapes as returned by `jax.eval_shape`.
      rows: The number of rows in each of this process's batches, or None if the number is unknown.

    Raises:
      ValueError: If there are several devices, and `rows` is None or can't be divided evenly among them.
    """
    devices = jax.devices()
    if len(devices) == 1:
        return SingleDevicePartitioner()
    if rows is None or rows % jax.local_device_count():
        raise ValueError(
            f"partitioner='auto' splits a batch over {jax.local_device_count()} devices of each process, but it has "
            f"{'no common number of' if rows is None else rows} rows. Batch to a multiple of this number, or leave out "
            "the partitioner to use one device."
        )
    leaves = checks.leaves_by_path(state)
    needed = sum(bytes_of(leaf) * (2 if path.startswith("params") else 1) for path, leaf in leaves.items())
    memory = memory_of(devices[0])
    mesh = create_mesh(data=-1)
    fits = memory is None or needed <= _SHARE_FOR_STATE * memory
    chosen = DataParallelPartitioner(mesh, "data") if fits else FSDPPartitioner(mesh)
    text = "partitioner='auto' chose %s for %d devices. The state, with its gradients, is %s."
    logging.info(text, type(chosen).__name__, len(devices), readable(needed))
    return chosen


def memory_of(device: Any) -> int | None:
    """Returns the size of a device's memory in bytes, or None for a CPU or a device that doesn't report it."""
    return None if device.platform == "cpu" else (device.memory_stats() or {}).get("bytes_limit")
