"""The measurement behind `steps_per_dispatch="auto"`: one step or several in one dispatch?"""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
from absl import logging

from jaxloop import metrics, types
from jaxloop.engine.feed import Feed
from jaxloop.engine.program import Program, Ran
from jaxloop.processes.interrupt import Interruptible
from jaxloop.step import FusingError, Step

STEPS_TRIED = 32
"""The number of steps per dispatch that "auto" compares with 1."""

# The minimum and maximum number of rounds to measure, and the time after which no round beyond the minimum begins.
# The fastest round counts, because other programs may be using the machine.
_MIN_ROUNDS, _MAX_ROUNDS, _SECS = 3, 20, 0.2
# If dispatching takes less than this share of a step's time, fusing steps isn't worth measuring.
_MIN_DISPATCH_SHARE = 0.04


@final
@dataclasses.dataclass(frozen=True)
class StepTimes:
    """Measured seconds per step, with one step per dispatch and with several steps (None if not measured)."""

    one_by_one: float
    fused: float | None

    @property
    def steps_per_dispatch(self) -> int:
        """The faster number of steps per dispatch."""
        return STEPS_TRIED if self.fused is not None and self.fused < 0.97 * self.one_by_one else 1

    def __str__(self) -> str:
        text = f"a step takes {self.one_by_one * 1e6:,.0f} us on its own"
        if self.fused is None:
            return f"{text}, almost none of it for dispatching"
        return f"{text}, and {self.fused * 1e6:,.0f} us in a dispatch of {STEPS_TRIED}"


def find_steps_per_dispatch(step: Step, state: Any, feed: Feed, *, evaluates: bool) -> int | None:
    """Times steps on copies of the state. Returns the faster number of steps per dispatch, 1 or 32; None if unknown.

    Args:
      step: The step that runs each batch. The measurement makes extra calls to its `preprocess_batch` and `begin`.
      state: A state prepared by the step. It isn't donated.
      feed: The next batches. They are put back.
      evaluates: Whether to measure evaluation steps.
    """
    batches = feed.take(STEPS_TRIED)
    try:
        if len(batches) < STEPS_TRIED:
            return 1 if evaluates else None  # Later evaluations read the same data.
        times = _measure(Program(step, evaluates=evaluates), state, batches)
    except FusingError as error:
        logging.info("steps_per_dispatch='auto' uses 1. %s", error)
    except Exception as error:  # A step that fails will fail again when it really runs, with its usual note.
        logging.warning("steps_per_dispatch='auto' uses 1, because the measurement failed: %r", error)
    else:
        if times is not None:
            logging.info("steps_per_dispatch='auto' uses %d for %r: %s.", times.steps_per_dispatch, step, times)
            return times.steps_per_dispatch
    finally:
        feed.put_back(batches)
    return 1


def _measure(program: Program, state: Any, batches: Sequence[types.Batch]) -> StepTimes | None:
    """Times steps on copies of the state. Returns None if the batches can't be stacked for a single dispatch."""

    def run_first(number: int) -> tuple[Ran, float]:
        ran = Ran(metrics.wait(jax.tree.map(jnp.copy, state)), 0, [])
        began = time.perf_counter()
        program.run(ran, Feed(iter(batches)), number, Interruptible())
        return ran, began

    def one_by_one() -> float:
        ran, began = run_first(len(batches))
        metrics.wait((ran.state, ran.outputs))
        return (time.perf_counter() - began) / len(batches)

    def fused() -> float | None:
        newest, began = jax.tree.map(jnp.copy, state), time.perf_counter()
        result = program.dispatch_fused(newest, batches)
        if result is None:
            return None
        metrics.wait((result[0], result[1].outputs))
        return (time.perf_counter() - began) / len(batches)

    def dispatch_one() -> float:
        ran, began = run_first(1)
        seconds = time.perf_counter() - began
        metrics.wait((ran.state, ran.outputs))
        return seconds

    program.check_fuses()
    dispatch_one()  # Compiles.
    dispatch_secs = min(dispatch_one() for _ in range(_MIN_ROUNDS))
    single = one_by_one()
    if dispatch_secs < _MIN_DISPATCH_SHARE * single:
        return StepTimes(single, None)
    if fused() is None:  # Compiles.
        return None
    rounds, began = [], time.perf_counter()
    while len(rounds) < _MIN_ROUNDS or (len(rounds) < _MAX_ROUNDS and time.perf_counter() - began < _SECS):
        rounds.append((one_by_one(), fused()))
    singles, groups = zip(*rounds, strict=True)
    return StepTimes(min(singles), min(groups))
