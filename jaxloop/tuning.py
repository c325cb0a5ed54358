"""How many steps to take in one dispatch, found out by trying."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
from absl import logging

from jaxloop import metrics, types
from jaxloop.step import FusingError, Step

STEPS_TRIED = 32
# More rounds where they take little time: others may be using the machine. The least time of each counts.
_ROUNDS, _MOST_ROUNDS, _SECS = 3, 20, 0.2
# Where the host needs less than this share of a step to start it, one dispatch for many can't save more.
_WORTH_SAVING = 0.04


@final
@dataclasses.dataclass(frozen=True)
class Tried:
    """How long a step took, in seconds: one by one, and of several in one dispatch, if that was tried."""

    one_by_one: float
    fused: float | None

    @property
    def steps_per_dispatch(self) -> int:
        """The faster."""
        return STEPS_TRIED if self.fused is not None and self.fused < 0.97 * self.one_by_one else 1

    def __str__(self) -> str:
        text = f"one by one a step takes {self.one_by_one * 1e6:,.0f} us"
        if self.fused is None:
            return f"{text}, and next to nothing of that is for starting it"
        return f"{text}, {STEPS_TRIED} in one dispatch {self.fused * 1e6:,.0f} us each"


def find_steps_per_dispatch(step: Step, state: Any, batches: Sequence[types.Batch], *, evaluates: bool = False) -> int:
    """Takes steps on copies of the state, one by one and in one dispatch, and returns what is faster, 1 or 32.

    Args:
      step: what happens to one batch; its `preprocess_batch` and `begin` are called, more often than in training.
      state: a state that the step has prepared; it stays usable.
      batches: 32, of which the steps are taken.
      evaluates: whether it is for evaluations.
    """
    try:
        take, take_group = step.quick_step(evaluates=evaluates), step.fused_step(evaluates=evaluates)
    except FusingError as error:
        logging.info("steps_per_dispatch='auto' is 1. %s", error)
        return 1
    if take is None:
        return 1
    tried = _try(take, take_group, state, batches)
    if tried is None:
        return 1
    logging.info("steps_per_dispatch='auto' is %d for %r: %s.", tried.steps_per_dispatch, step, tried)
    return tried.steps_per_dispatch


def _try(take: Callable, take_group: Callable, state: Any, batches: Sequence[types.Batch]) -> Tried | None:
    """None where the batches can't be taken in one dispatch."""

    def one_by_one() -> float:
        newest, outputs, began = jax.tree.map(jnp.copy, state), None, time.perf_counter()
        for batch in batches:
            newest, outputs, _ = take(newest, batch)
        metrics.wait((newest, outputs))
        return (time.perf_counter() - began) / len(batches)

    def fused() -> float | None:
        newest, began = jax.tree.map(jnp.copy, state), time.perf_counter()
        taken = take_group(newest, batches)
        metrics.wait(taken)
        return None if taken is None else (time.perf_counter() - began) / len(batches)

    def start() -> float:
        newest = metrics.wait(jax.tree.map(jnp.copy, state))
        began = time.perf_counter()
        taken = take(newest, batches[0])
        seconds = time.perf_counter() - began
        metrics.wait(taken[:2])
        return seconds

    start()  # Compiles.
    to_start = min(start() for _ in range(_ROUNDS))
    single = one_by_one()
    if to_start < _WORTH_SAVING * single:
        return Tried(single, None)
    try:
        if fused() is None:  # Compiles.
            return None
    except FusingError as error:
        logging.info("steps_per_dispatch='auto' is 1. %s", error)
        return None
    rounds, began = [], time.perf_counter()
    while len(rounds) < _ROUNDS or (len(rounds) < _MOST_ROUNDS and time.perf_counter() - began < _SECS):
        rounds.append((one_by_one(), fused()))
    singles, groups = zip(*rounds, strict=True)
    return Tried(min(singles), min(groups))
