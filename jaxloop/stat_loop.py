"""A loop that adds statistics to its outputs."""

import time
from collections.abc import Callable, Sequence
from typing import Any, final

from jaxloop import metrics, types
from jaxloop.base import checks, timing
from jaxloop.loop import Loop
from jaxloop.step import Step

STAT_NUM_PARAMS = "jaxloop/num_params"
"""The number of parameters."""
STAT_NUM_FLOPS = "jaxloop/num_flops"
"""The number of FLOPs in one call to `run`, summed over all devices; see `Step.compute_num_flops`."""
STAT_MFU = "jaxloop/model_flops_utilization"
"""Achieved FLOPs per second, as a fraction (0 to 1) of the devices' peak. Requires `StatLoop.peak_flops_per_sec`."""
STAT_INIT_TIME = "jaxloop/init_time"
"""The time when the loop was constructed, in seconds since the Unix epoch."""
STAT_BEGIN_TIME = "jaxloop/begin_time"
"""The time when the call to the loop began, in seconds since the Unix epoch."""
STAT_LIFE_TIME_SECS = "jaxloop/life_time_secs"
"""Seconds from the construction of the loop to the end of the call."""
STAT_LOOP_TIME_SECS = "jaxloop/loop_time_secs"
"""Seconds from the start of the call until the devices finish (for an action: since the action's previous call)."""
STAT_STEPS_PER_SEC = "jaxloop/steps_per_sec"
"""Steps per second of training time, which excludes evaluations and checkpoints."""
STAT_EXAMPLES_PER_SEC = "jaxloop/examples_per_sec"
"""Examples per second of training time."""

DEFAULT_STATS = (STAT_STEPS_PER_SEC, STAT_EXAMPLES_PER_SEC)
ALL_STATS = (
    STAT_NUM_PARAMS,
    STAT_LIFE_TIME_SECS,
    STAT_LOOP_TIME_SECS,
    *DEFAULT_STATS,
    STAT_NUM_FLOPS,
    STAT_INIT_TIME,
    STAT_BEGIN_TIME,
)


@final
class Statistics:
    """Computes the statistics of a loop.

    Args:
      loop: The loop.
      names: The names of the statistics to return. If None, `DEFAULT_STATS` is used.
      global_batch_size: The number of examples in a batch. If None, the examples are counted.
    """

    def __init__(self, loop: "StatLoop", names: Sequence[str] | None, global_batch_size: int | None):
        for name in names or ():
            if name not in (*ALL_STATS, STAT_MFU):
                known = ", ".join((*ALL_STATS, STAT_MFU))
                raise ValueError(f"stat_names contains {name!r}, which is not one of {known}.")
        checks.check_positive("global_batch_size", global_batch_size, optional=True)
        self._loop, self._global_batch_size = loop, global_batch_size
        self._step, self._stopwatch = loop.step, loop.engine.run.stopwatch
        self._names = DEFAULT_STATS if names is None else tuple(names)
        self._init = time.time(), self._stopwatch.clock()
        self.begin_loop(updates=1)
        self._example: tuple[types.Batch] | None = None  # To count the FLOPs of a step.

    def begin_loop(self, updates: int) -> None:
        """Starts the time interval over which a loop's statistics are measured.

        Args:
          updates: The number of updates per batch. Each update counts as a step.
        """
        self._begin = time.time(), self._stopwatch.spent(), updates

    def observers(self) -> list[Callable[[types.Batch], None]]:
        """Returns the functions to call with each batch. The list is empty unless a batch is needed to count the FLOPs.

        Raises:
          ValueError: If `STAT_MFU` is one of the statistics, but the loop has no `peak_flops_per_sec`.
        """
        if STAT_MFU in self._names and self._loop.peak_flops_per_sec is None:
            raise ValueError(
                f"stat_names contains {STAT_MFU!r}, which requires the peak performance of a device. Before the call, "
                "set the loop's peak_flops_per_sec, for example to 989e12 for bfloat16 on an H100."
            )
        counts = self._step.num_flops is None and not {STAT_NUM_FLOPS, STAT_MFU}.isdisjoint(self._names)
        return [self._keep_example] if counts else []

    def _keep_example(self, batch: types.Batch) -> None:
        if self._example is None:
            self._example = (batch,)

    def of(self, state: Any, spent: timing.Spent | None = None) -> dict[str, Any]:
        """Returns a dict that maps names of statistics to their values for a time interval.

        Args:
          state: The state at the end of the interval.
          spent: The time, steps and examples of the interval. If None, the interval extends from the most recent
            `begin_loop` call until now.
        """
        begin_time, before, updates = self._begin
        spent = self._stopwatch.spent() - before if spent is None else spent
        seconds, batches = max(spent.training, 1e-9), spent.steps // updates
        examples = batches * self._global_batch_size if self._global_batch_size else spent.samples
        if self._example is not None and self._step.num_flops is None:
            self._step.compute_num_flops(state, *self._example)
        value_of: dict[str, Callable[[], Any]] = {
            STAT_NUM_PARAMS: lambda: self._num_params(state),
            STAT_NUM_FLOPS: lambda: self._step.num_flops,
            STAT_MFU: lambda: self._utilization(batches / seconds),
            STAT_INIT_TIME: lambda: self._init[0],
            STAT_BEGIN_TIME: lambda: begin_time,
            STAT_LIFE_TIME_SECS: lambda: self._stopwatch.clock() - self._init[1],
            STAT_LOOP_TIME_SECS: lambda: spent.total,
            STAT_STEPS_PER_SEC: lambda: spent.steps / seconds,
            STAT_EXAMPLES_PER_SEC: lambda: examples / seconds,
        }
        found = {name: value_of[name]() for name in self._names}
        return {name: value for name, value in found.items() if value is not None}

    def _num_params(self, state: Any) -> int | None:
        known = self._step.num_params
        return self._step.compute_num_params(state) if known is None and hasattr(state, "params") else known

    def _utilization(self, batches_per_sec: float) -> float | None:
        flops, peak, mesh = self._step.num_flops, self._loop.peak_flops_per_sec, self._step.partitioner.mesh
        if flops is None or peak is None:
            return None
        return flops * batches_per_sec / (peak * (1 if mesh is None else mesh.size))


class StatLoop(Loop):
    """A loop that adds named statistics, as plain numbers, to its outputs.

    Hooks:
      end: See `Loop`. An override must call `super().end(...)`, which adds the statistics.
      begin, run, update_outputs, _get_next_batch, _run_one_step: See `Loop`.

    >>> from jaxloop import examples
    >>> step, state, batches = examples.tiny_regression()
    >>> state, outputs = StatLoop(step, stat_names=[STAT_NUM_PARAMS])(state, batches, num_steps=3)
    >>> outputs[STAT_NUM_PARAMS]
    4

    Args:
      step: The step to run on each batch.
      stat_names: The names of the statistics to add. If None, `DEFAULT_STATS` are added: steps and examples per second.
        If empty, nothing is added. `ALL_STATS` also includes the number of parameters, the FLOPs of a step, the times
        at which the loop was constructed and called, and the seconds since each of these times. Counting the FLOPs
        requires tracing the step once more.
      global_batch_size: The number of examples in a batch, used for `STAT_EXAMPLES_PER_SEC`. If None, the examples are
        counted.
      max_steps_in_flight: See `Loop`.

    Attributes:
      peak_flops_per_sec: The peak FLOPs per second of one device, from its data sheet. Required by `STAT_MFU`.
    """

    def __init__(
        self,
        step: Step,
        stat_names: Sequence[str] | None = None,
        global_batch_size: int | None = None,
        *,
        max_steps_in_flight: int | None = None,
    ):
        super().__init__(step, max_steps_in_flight=max_steps_in_flight)
        self.engine.run.agenda.statistics = Statistics(self, stat_names, global_batch_size)
        self.peak_flops_per_sec: float | None = None

    def end(self, state: Any, outputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        # If there are outputs on the host, the devices have finished. Otherwise, wait for the state.
        if not outputs:
            with self.engine.run.stopwatch.counting("device"):
                metrics.wait(state)
        outputs.update(self.engine.run.agenda.measure(state))
        return super().end(state, outputs)
