"""Which partitioner to take where nobody says."""

from typing import Any

import jax
from absl import logging

from jaxloop import checks
from jaxloop.layout import bytes_of, readable
from jaxloop.partition.data_parallel import DataParallelPartitioner
from jaxloop.partition.fsdp import FSDPPartitioner
from jaxloop.partition.meshes import create_mesh
from jaxloop.partition.partitioner import Partitioner
from jaxloop.partition.single_device import SingleDevicePartitioner

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
