"""Topologies of TPUs that aren't attached to this machine. JAX can compile programs for such TPUs, but not run them."""

import contextlib
import functools
import importlib.util
import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxloop.base.text import printable
from jaxloop.step import cost

_EXAMPLES = '"v5e:16x16", "v6e:2x4", "v5p:2x2x1" or "tpu7x:2x2x1"'
# Otherwise, libtpu asks Google Cloud's metadata server about this machine, and logs that it didn't get an answer.
_ENVIRONMENT = {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_ACCELERATOR_TYPE": "v5litepod-8"}


def devices_of(topology: str) -> Sequence[Any]:
    """Returns the devices of a topology, such as "v5e:2x4". Only the compiler can use these devices.

    Raises:
      ImportError: If libtpu, the compiler for TPUs, is not installed.
      ValueError: If the topology doesn't exist.
    """
    if not isinstance(topology, str) or ":" not in topology:
        raise ValueError(f"topology must be a TPU and its grid of chips, such as {_EXAMPLES}, got {topology!r}.")
    if importlib.util.find_spec("libtpu") is None:
        raise ImportError(f"To compile for {printable(topology)} on this machine, run: pip install libtpu")
    from jax.experimental import topologies

    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    except Exception as error:
        raise ValueError(
            f"libtpu has no topology {printable(topology)!r}: {printable(str(error))}. Give a TPU and its grid of "
            f"chips, such as {_EXAMPLES}. There is no compiler for GPUs without a GPU of that kind: run the check on a "
            "machine that has one."
        ) from error


@functools.lru_cache(maxsize=16)
def memory_of(device: Any) -> int | None:
    """Returns the number of bytes that a program can use on one device of a topology, or None if it is unknown.

    The function compiles a program that is too large for any device, because the resulting error reports the memory
    size.
    """
    huge = jax.ShapeDtypeStruct((2**20, 2**20), np.float32, sharding=SingleDeviceSharding(device))
    with contextlib.suppress(Exception):
        try:
            cost.compiled(jax.jit(lambda x: x + 1).lower(huge))
        except cost.DeviceMemoryError as error:
            return error.available_bytes
    return None
