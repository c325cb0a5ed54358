"""The measurement behind `steps_per_dispatch="auto"`: one step or several in one dispatch?"""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging

from jaxloop import metrics
from jaxloop.engine.feed import Feed
from jaxloop.engine.program import Program, Ran
from jaxloop.processes.interrupt import Interruptible
from jaxloop.step import FusingError, Step

STEPS_TRIED = 32
"""The number of steps per dispatch that "auto" compares with 1."""

_ROUNDS = 5  # The fastest one counts, because other programs may be using the machine.
# If dispatching takes less than this share of a step's time, fusing steps isn't worth measuring.
_MIN_DISPATCH_SHARE = 0.04


def find_steps_per_dispatch(step: Step, state: Any, feed: Feed, *, evaluates: bool) -> int | None:
    """Times steps on copies of the state. Returns the faster number of steps per dispatch, 1 or 32; None if unknown.

    Args:
      step: The step that runs each batch. The measurement makes extra calls to its `preprocess_batch` and `begin`.
      state: A state prepared by the step. It isn't donated.
      feed: The next batches. They are put back.
      evaluates: Whether to measure evaluation steps.
    """
    batches = feed.take(STEPS_TRIED)

    def singly(state: Any, number: int = STEPS_TRIED) -> Any:
        ran = Ran(state, 0, [])
        program.run(ran, Feed(iter(batches)), number, Interruptible())
        return ran.state, ran.outputs

    def one(state: Any) -> Any:
        return singly(state, 1)

    def fused(state: Any) -> Any:
        result = program.dispatch_fused(state, batches)
        if result is None:
            raise FusingError("The batches differ in shape.")
        return result[0], result[1].outputs

    try:
        if len(batches) < STEPS_TRIED:
            return 1 if evaluates else None  # Later evaluations read the same data.
        program = Program(step, evaluates=evaluates)
        _ = program.fused
        _secs(one, state)  # Compiles.
        dispatching = min(_secs(one, state)[0] for _ in range(_ROUNDS))
        secs, number = {singly: _secs(singly, state)[1]}, 1
        if dispatching > _MIN_DISPATCH_SHARE * secs[singly] / STEPS_TRIED:
            _secs(fused, state)  # Compiles.
            rounds = [{run: _secs(run, state)[1] for run in (singly, fused)} for _ in range(_ROUNDS)]
            secs = {run: min(each[run] for each in rounds) for run in (singly, fused)}
            number = STEPS_TRIED if secs[fused] < 0.97 * secs[singly] else 1
        told = [f"{value / STEPS_TRIED * 1e6:,.0f} us {run.__name__}" for run, value in secs.items()]
        logging.info("steps_per_dispatch='auto' uses %d for %r: a step takes %s.", number, step, ", ".join(told))
        return number
    except FusingError as error:
        logging.info("steps_per_dispatch='auto' uses 1. %s", error)
    except Exception as error:  # A step that fails will fail again when it really runs, with its usual note.
        logging.warning("steps_per_dispatch='auto' uses 1, because the measurement failed: %r", error)
    finally:
        feed.put_back(batches)
    return 1


def _secs(run: Callable[[Any], Any], state: Any) -> tuple[float, float]:
    """Returns the seconds until a function of a copy of the state returns, and until its result is computed."""
    copied = metrics.wait(jax.tree.map(jnp.copy, state))
    began = time.perf_counter()
    result = run(copied)
    returned = time.perf_counter()
    metrics.wait(result)
    return returned - began, time.perf_counter() - began
