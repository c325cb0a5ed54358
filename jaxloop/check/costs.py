"""Functions that estimate the cost of a step on this machine's devices or on the TPUs of a topology."""

import bisect
import copy
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxloop import types
from jaxloop.base import checks
from jaxloop.check import topology as topologies
from jaxloop.step import Step, forward
from jaxloop.step.cost import Cost, DeviceMemoryError

_MOST = 2**20


def cost_analysis(step: Step, state: Any, batch: types.BatchSpec, topology: str | None = None) -> Cost:
    """Compiles a training step and returns its FLOPs and memory use.

    >>> from jaxloop import examples
    >>> step, state, batches = examples.tiny_regression()
    >>> cost_analysis(step, state, batches[0]).flops > 0
    True

    Args:
      step: The step to compile.
      state: A state, or the result of `step.abstract_state`. A state is not donated.
      batch: A batch or its shapes; see `Step.compile`. If a topology is given, this is the global batch, with the
        examples for all devices of the topology.
      topology: The TPUs to compile for, such as "v5e:16x16". They don't have to be attached to this machine. The
        partitioner's data axis is resized to use all of these TPUs. If None, the devices of the step's partitioner are
        used.

    Raises:
      jaxloop.step.cost.DeviceMemoryError: If the step needs more memory than a device in the topology has.
      ImportError: If a topology is given but libtpu is not installed.
      ValueError: If the topology doesn't exist.
    """
    step, state, _ = on_devices(step, state, topology)
    step.compile(state, batch)
    return step._runner.programs.cost


def largest_batch(step: Step, state: Any, batch: types.BatchSpec, topology: str | None = None) -> int:
    """Returns the largest per-device batch size (in rows) for which a training step fits in device memory.

    Searches by bisection, compiling the step for each batch size that it tries. Nothing is allocated on the devices.

    Args:
      step: The step.
      state: The state, or its shapes from `step.abstract_state`.
      batch: A batch or its shapes; see `Step.compile`. The number of rows doesn't matter.
      topology: See `cost_analysis`. If None, the devices of the step's partitioner are used. These devices must report
        the size of their memory.

    Returns:
      The number of rows per device, at most 2**20. It is 0 if not even one row fits.

    Raises:
      ValueError: If the size of the devices' memory is unknown.
    """
    step, state, memory = on_devices(step, jax.tree.map(checks.shape_of, state), topology)
    shards, example = step.partitioner.shards, forward.example_batch(batch)

    def fits(rows: int) -> bool:
        resize = lambda leaf: np.broadcast_to(leaf[:1], (rows * shards, *leaf.shape[1:]))
        resized = jax.tree.map(lambda leaf: resize(leaf) if np.ndim(leaf) else leaf, example)
        return _fits(step, state, resized, memory)

    return _largest(fits)


def largest_ensemble(
    make: Callable[[int], tuple[Step, Any]], batch: types.BatchSpec, topology: str | None = None
) -> int:
    """Returns the largest number of members for which a training step of a `jaxloop.Ensemble` fits in device memory.

    Searches by bisection, like `largest_batch`. For example::

        def make(number):
            ensemble = jaxloop.Ensemble(step, seeds=range(number))
            return ensemble, ensemble.abstract_state([1, 28, 28, 1])

        jaxloop.check.largest_ensemble(make, batch, "v5e:1x1")

    Args:
      make: A function that takes a number and returns a pair `(ensemble, state)`. The ensemble must have this number of
        members or, if it has a mesh, this number of members per device. `state` is the ensemble's state, or the result
        of `ensemble.abstract_state`.
      batch: A batch or its shapes; see `Step.compile`.
      topology: See `largest_batch`.

    Returns:
      The largest number for which the step fits in memory, at most 2**20. It is 0 if not even one member fits.

    Raises:
      ValueError: If the size of the devices' memory is unknown.
    """

    def fits(number: int) -> bool:
        step, state = make(number)
        step, state, memory = on_devices(step, jax.tree.map(checks.shape_of, state), topology)
        return _fits(step, state, batch, memory)

    return _largest(fits)


def _fits(step: Step, state: Any, batch: types.BatchSpec, memory: int | None) -> bool:
    """Returns True if a training step needs at most `memory` bytes on each device."""
    if memory is None:
        kind = jax.devices()[0].device_kind
        raise ValueError(f'The memory of {kind} is unknown, so what fits is, too. Give a topology, such as "v5e:2x4".')
    step = _copied(step, step.partitioner)  # A new copy each time, so no step counts these batch shapes.
    try:
        step.compile(state, batch)
        return step._runner.programs.cost.peak_bytes <= memory
    except DeviceMemoryError:
        return False


def _largest(fits: Callable[[int], bool]) -> int:
    """Returns the largest number up to `_MOST` for which `fits` returns True, or 0 if there is none."""
    high = 1
    while high <= _MOST and fits(high):
        high *= 2
    sizes = range(high // 2 + 1, min(high, _MOST + 1))
    return high // 2 + bisect.bisect(sizes, False, key=lambda number: not fits(number))


def moved_to(step: Step, devices: Sequence[Any]) -> Step:
    """Returns a copy of a step for the given devices; see `Partitioner.moved_to`."""
    return _copied(step, step.partitioner.moved_to(devices))


def _copied(step: Step, partitioner: Any) -> Step:
    """Returns a copy of a step that uses the given partitioner and has no compiled programs."""
    moved, runner = copy.copy(step), step._runner
    moved._partitioner = partitioner
    moved._runner = type(runner)(moved, Step, *runner.action_lists)
    moved._runner.programs.jit_kwargs = runner.programs.jit_kwargs
    return moved


def on_devices(step: Step, state: Any, topology: str | None) -> tuple[Step, Any, int | None]:
    """Returns three values: a copy of the step for a topology, the shapes of the state, and the memory of one device.

    The shapes have shardings for the topology. The memory is in bytes, or None if it is unknown.

    Args:
      step: The step.
      state: The state, or its shapes.
      topology: The TPUs to compile for. If None, the first two values are `step` and `state` themselves, and the third
        is the memory of one of the devices that the step uses.
    """
    if topology is None:
        mesh = step.partitioner.mesh
        device = mesh.local_devices[0] if mesh is not None else next(iter(step.partitioner.sharding.device_set))
        return step, state, memory_of(device)
    devices = topologies.devices_of(topology)
    moved = moved_to(step, devices)
    return moved, moved.partitioner.layout_of(jax.tree.map(checks.shape_of, state)), topologies.memory_of(devices[0])


def memory_of(device: Any) -> int | None:
    """Returns the size of a device's memory in bytes, or None if the device is a CPU or doesn't report the size."""
    return None if device.platform == "cpu" else (device.memory_stats() or {}).get("bytes_limit")
