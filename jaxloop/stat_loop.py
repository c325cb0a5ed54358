"""A loop that measures itself."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxloop import checks, metrics, types
from jaxloop.loop import Loop
from jaxloop.step import Step

STAT_NUM_PARAMS = "jaxloop/num_params"
"""The number of parameters."""
STAT_NUM_FLOPS = "jaxloop/num_flops"
"""Floating-point operations of one step, as XLA counts them before it optimizes."""
STAT_INIT_TIME = "jaxloop/init_time"
"""When the loop was made, in seconds since the epoch."""
STAT_BEGIN_TIME = "jaxloop/begin_time"
"""When this call began, in seconds since the epoch."""
STAT_LIFE_TIME_SECS = "jaxloop/life_time_secs"
"""Seconds from when the loop was made to the end of this call."""
STAT_LOOP_TIME_SECS = "jaxloop/loop_time_secs"
"""Seconds that this call took, until the device had finished."""
STAT_STEPS_PER_SEC = "jaxloop/steps_per_sec"
"""Steps of this call over `STAT_LOOP_TIME_SECS`."""
STAT_EXAMPLES_PER_SEC = "jaxloop/examples_per_sec"
"""Examples of this call over `STAT_LOOP_TIME_SECS`."""

# Those that cost nothing, and that make a curve.
DEFAULT_STATS = (
    STAT_NUM_PARAMS,
    STAT_LIFE_TIME_SECS,
    STAT_LOOP_TIME_SECS,
    STAT_STEPS_PER_SEC,
    STAT_EXAMPLES_PER_SEC,
)
ALL_STATS = (*DEFAULT_STATS, STAT_NUM_FLOPS, STAT_INIT_TIME, STAT_BEGIN_TIME)


class StatLoop(Loop):
    """Adds statistics to the outputs, plain numbers under their names.

    >>> from jaxloop import examples
    >>> step, state, batches = examples.tiny_regression()
    >>> state, outputs = StatLoop(step, stat_names=[STAT_NUM_PARAMS])(state, batches, num_steps=3)
    >>> outputs[STAT_NUM_PARAMS]
    4

    Args:
      step: what happens to one batch.
      stat_names: which, an empty list for none. None for `DEFAULT_STATS`: all but the two moments in time, and the
        operations, which have to be counted in a trace of their own.
      global_batch_size: examples in a batch, for `STAT_EXAMPLES_PER_SEC`; None to count them.
      clock: tells the time in seconds, for durations.
    """

    def __init__(
        self,
        step: Step,
        stat_names: Sequence[str] | None = None,
        global_batch_size: int | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ):
        super().__init__(step)
        for name in stat_names or ():
            if name not in ALL_STATS:
                raise ValueError(f"stat_names holds {name!r}, which is none of {', '.join(ALL_STATS)}.")
        checks.check_positive("global_batch_size", global_batch_size, optional=True)
        self._stat_names = DEFAULT_STATS if stat_names is None else tuple(stat_names)
        self._global_batch_size = global_batch_size
        self._clock = clock
        self._init_time, self._init_clock = time.time(), clock()
        self._begin_time, self._begin_clock = self._init_time, self._init_clock

    def begin(self, state: Any, dataset: Any) -> tuple[Any, Iterator[types.Batch]]:
        self._begin_time, self._begin_clock = time.time(), self._clock()
        return super().begin(state, dataset)

    def _run_one_step(self, state: Any, batch: types.Batch, per_loop_step_number: int) -> tuple[Any, types.Output]:
        if per_loop_step_number == 0 and self.step.num_flops is None and STAT_NUM_FLOPS in self._stat_names:
            self.step.compute_num_flops(state, batch)
        return super()._run_one_step(state, batch, per_loop_step_number)

    def end(self, state: Any, outputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        # The outputs are on the host, so the device has finished; without outputs, wait for the state.
        if not outputs:
            metrics.wait(state)
        stats = self._stats(state)
        outputs.update({name: stats[name] for name in self._stat_names if stats[name] is not None})
        return super().end(state, outputs)

    def _stats(self, state: Any) -> dict[str, Any]:
        now = self._clock()
        seconds = max(now - self._begin_clock, 1e-9)
        steps = len(self.num_examples)
        examples = steps * self._global_batch_size if self._global_batch_size else sum(self.num_examples)
        num_params = self.step.num_params
        if num_params is None and hasattr(state, "params"):
            num_params = self.step.compute_num_params(state)
        return {
            STAT_NUM_PARAMS: num_params,
            STAT_NUM_FLOPS: self.step.num_flops,
            STAT_INIT_TIME: self._init_time,
            STAT_BEGIN_TIME: self._begin_time,
            STAT_LIFE_TIME_SECS: now - self._init_clock,
            STAT_LOOP_TIME_SECS: now - self._begin_clock,
            STAT_STEPS_PER_SEC: steps / seconds,
            STAT_EXAMPLES_PER_SEC: examples / seconds,
        }
