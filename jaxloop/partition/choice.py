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
    """Chooses a partitioner for the available devices, and logs the reason.

    If there are several devices, the batch is split across all of them. The state is replicated if the state and its
    gradients (which are as large as the parameters) need at most half of a device's memory; otherwise, the state is
    split too. A single-process run uses only one device if a batch's rows can't be divided evenly across the devices.

    Args:
      state: The train state, or its shapes as returned by `jax.eval_shape`.
      rows: The number of rows in each batch of this process; None if unknown.

    Raises:
      ValueError: If, in a multi-process job, the rows of a batch can't be divided evenly among the devices.
    """
    devices = jax.devices()
    if len(devices) == 1:
        return SingleDevicePartitioner()
    rows = rows and rows * jax.process_count()
    if jax.process_count() > 1 and (rows is None or rows % len(devices)):
        raise ValueError(
            f"partitioner='auto' splits a batch over the {len(devices)} devices of {jax.process_count()} processes, "
            f"but the batch has {'no common number of' if rows is None else rows} rows in total. Batch in each process "
            f"to a multiple of {jax.local_device_count()}."
        )
    if rows is None or rows % len(devices):
        logging.warning(
            "partitioner='auto' uses one of %d devices, because a batch has %s rows, which can't be divided evenly "
            "among them. Batch to a multiple of %d.",
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
    of = "of unknown memory" if memory is None else f"of {readable(memory)} each"
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
    """Returns the size of a device's memory in bytes; None for a CPU, or if the device doesn't report it."""
    return None if device.platform == "cpu" else (device.memory_stats() or {}).get("bytes_limit")
