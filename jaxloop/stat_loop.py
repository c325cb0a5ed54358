"""A loop that measures itself."""

import time
from collections.abc import Callable, Sequence
from typing import Any, final

import jax
from absl import logging

from jaxloop import checks, cost, metrics, timing, types
from jaxloop.loop import Loop
from jaxloop.step import Step

STAT_NUM_PARAMS = "jaxloop/num_params"
"""The number of parameters."""
STAT_NUM_FLOPS = "jaxloop/num_flops"
"""Floating-point operations of one `run`, as XLA counts them before it optimizes."""
STAT_MFU = "jaxloop/model_flops_utilization"
"""`STAT_NUM_FLOPS` a second over what the devices could do at most, from 0 to 1: `StatLoop.peak_flops_per_sec`."""
STAT_INIT_TIME = "jaxloop/init_time"
"""When the loop was made, in seconds since the epoch."""
STAT_BEGIN_TIME = "jaxloop/begin_time"
"""When this call began, in seconds since the epoch."""
STAT_LIFE_TIME_SECS = "jaxloop/life_time_secs"
"""Seconds from when the loop was made to the end of this call."""
STAT_LOOP_TIME_SECS = "jaxloop/loop_time_secs"
"""Seconds that this call took, until the device had finished; for an action, those since its last call."""
STAT_STEPS_PER_SEC = "jaxloop/steps_per_sec"
"""Steps over the same seconds, without those of evaluations and checkpoints."""
STAT_EXAMPLES_PER_SEC = "jaxloop/examples_per_sec"
"""Examples over the same seconds."""
STAT_DATA_TIME_SECS = "jaxloop/data_time_secs"
"""Of `STAT_LOOP_TIME_SECS`, those spent waiting for the next batch."""
STAT_DEVICE_TIME_SECS = "jaxloop/device_time_secs"
"""Those spent waiting for the devices."""
STAT_ACTION_TIME_SECS = "jaxloop/action_time_secs"
"""Those spent in actions other than checkpoints."""
STAT_EVAL_TIME_SECS = "jaxloop/eval_time_secs"
"""Those spent in evaluations."""
STAT_CHECKPOINT_TIME_SECS = "jaxloop/checkpoint_time_secs"
"""Those spent in saving checkpoints, as far as the loop waits for that."""

# Those that cost nothing, and that make a curve.
DEFAULT_STATS = (
    STAT_NUM_PARAMS,
    STAT_LIFE_TIME_SECS,
    STAT_LOOP_TIME_SECS,
    STAT_STEPS_PER_SEC,
    STAT_EXAMPLES_PER_SEC,
)
TIME_STATS = (
    STAT_DATA_TIME_SECS,
    STAT_DEVICE_TIME_SECS,
    STAT_ACTION_TIME_SECS,
    STAT_EVAL_TIME_SECS,
    STAT_CHECKPOINT_TIME_SECS,
)
ALL_STATS = (*DEFAULT_STATS, *TIME_STATS, STAT_NUM_FLOPS, STAT_MFU, STAT_INIT_TIME, STAT_BEGIN_TIME)


@final
class Statistics:
    """Measures the intervals of a loop.

    Args:
      step: what happens to one batch.
      stopwatch: counts the steps of the loop, and what its time goes to.
      names: the statistics to return.
      global_batch_size: examples in a batch; None to count them.

    Attributes:
      peak_flops_per_sec: see `StatLoop`.
    """

    def __init__(
        self, step: Step, stopwatch: timing.Stopwatch, names: Sequence[str] | None, global_batch_size: int | None
    ):
        for name in names or ():
            if name not in ALL_STATS:
                raise ValueError(f"stat_names holds {name!r}, which is none of {', '.join(ALL_STATS)}.")
        checks.check_positive("global_batch_size", global_batch_size, optional=True)
        self._step, self._stopwatch, self._global_batch_size = step, stopwatch, global_batch_size
        self._names = DEFAULT_STATS if names is None else tuple(names)
        self._init = time.time(), stopwatch.clock()
        self._begin = self._init[0], stopwatch.spent()
        self._example: tuple[types.Batch] | None = None  # For the count of operations.
        self._has_said_peak = False
        self.peak_flops_per_sec: float | None = None

    def begin_loop(self) -> None:
        """Begins the interval of a loop."""
        self._begin = time.time(), self._stopwatch.spent()

    def observers(self) -> list[Callable[[types.Batch], None]]:
        """Returns what has to see the batches, for their operations to be counted."""
        counts = self._step.num_flops is None and not {STAT_NUM_FLOPS, STAT_MFU}.isdisjoint(self._names)
        return [self._keep_example] if counts else []

    def _keep_example(self, batch: types.Batch) -> None:
        if self._example is None:
            self._example = (batch,)

    def of(self, state: Any, spent: timing.Spent | None = None, *, updates: int = 1) -> dict[str, Any]:
        """Returns the statistics of an interval, by name.

        Args:
          state: the state at its end.
          spent: what the time went to; None for the interval of the loop.
          updates: by how much a batch advances the count of steps.
        """
        step, begin_time = self._step, self._begin[0]
        spent = self._stopwatch.spent() - self._begin[1] if spent is None else spent
        seconds, batches = max(spent.training, 1e-9), spent.steps // updates
        examples = batches * self._global_batch_size if self._global_batch_size else spent.samples
        num_params = step.num_params
        if num_params is None and hasattr(state, "params"):
            num_params = step.compute_num_params(state)
        if self._example is not None and step.num_flops is None:
            step.compute_num_flops(state, *self._example)
        stats = {
            STAT_NUM_PARAMS: num_params,
            STAT_NUM_FLOPS: step.num_flops,
            STAT_MFU: self._utilization(batches / seconds) if STAT_MFU in self._names else None,
            STAT_INIT_TIME: self._init[0],
            STAT_BEGIN_TIME: begin_time,
            STAT_LIFE_TIME_SECS: self._stopwatch.clock() - self._init[1],
            STAT_LOOP_TIME_SECS: spent.total,
            STAT_STEPS_PER_SEC: spent.steps / seconds,
            STAT_EXAMPLES_PER_SEC: examples / seconds,
            STAT_DATA_TIME_SECS: spent.data,
            STAT_DEVICE_TIME_SECS: spent.device,
            STAT_ACTION_TIME_SECS: spent.actions,
            STAT_EVAL_TIME_SECS: spent.evals,
            STAT_CHECKPOINT_TIME_SECS: spent.checkpoints,
        }
        return {name: stats[name] for name in self._names if stats[name] is not None}

    def _utilization(self, batches_per_sec: float) -> float | None:
        mesh = self._step.partitioner.mesh
        devices = jax.local_devices()[:1] if mesh is None else list(mesh.devices.flat)
        peak = self.peak_flops_per_sec or cost.peak_flops_per_sec(devices[0].device_kind)
        if peak is None and self._names != ALL_STATS and not self._has_said_peak:
            self._has_said_peak = True
            logging.warning(
                "%s is left out: what a device of kind %r could do at most is not known here. Set "
                "loop.peak_flops_per_sec.",
                STAT_MFU,
                devices[0].device_kind,
            )
        if peak is None or self._step.num_flops is None:
            return None
        return self._step.num_flops * batches_per_sec / (peak * len(devices))


class StatLoop(Loop):
    """Adds statistics to the outputs, plain numbers under their names.

    Hooks:
      end: see `Loop`; call that of `super()`, which measures.
      begin, run, update_outputs, _get_next_batch, _run_one_step: see `Loop`.

    >>> from jaxloop import examples
    >>> step, state, batches = examples.tiny_regression()
    >>> state, outputs = StatLoop(step, stat_names=[STAT_NUM_PARAMS])(state, batches, num_steps=3)
    >>> outputs[STAT_NUM_PARAMS]
    4

    Args:
      step: what happens to one batch.
      stat_names: which, an empty list for none. None for `DEFAULT_STATS`: the number of parameters, the seconds in
        all, and the speed. `ALL_STATS` has besides what the time went to, two moments in time, and the operations,
        which have to be counted in a trace of their own.
      global_batch_size: examples in a batch, for `STAT_EXAMPLES_PER_SEC`; None to count them.
      clock: tells the time in seconds, for durations.
      max_steps_in_flight: see `Loop`.
    """

    def __init__(
        self,
        step: Step,
        stat_names: Sequence[str] | None = None,
        global_batch_size: int | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
        max_steps_in_flight: int | None = None,
    ):
        super().__init__(step, clock=clock, max_steps_in_flight=max_steps_in_flight)
        self._statistics = Statistics(step, self.engine.progress.stopwatch, stat_names, global_batch_size)
        self.engine.moments.statistics = self._statistics

    @property
    def peak_flops_per_sec(self) -> float | None:
        """What one device could do at most, for `STAT_MFU`; to be set.

        None to look it up, in bfloat16, for known GPUs and TPUs.
        """
        return self._statistics.peak_flops_per_sec

    @peak_flops_per_sec.setter
    def peak_flops_per_sec(self, value: float | None) -> None:
        self._statistics.peak_flops_per_sec = value

    def end(self, state: Any, outputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        # The outputs are on the host, so the device has finished; without outputs, wait for the state.
        if not outputs:
            with self.engine.progress.stopwatch.counting("device"):
                metrics.wait(state)
        outputs.update(self.engine.moments.measure(state))
        return super().end(state, outputs)
