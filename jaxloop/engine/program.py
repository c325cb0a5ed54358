"""Programs, which run a loop's steps. No other code loops over steps."""

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
from absl import logging

from jaxloop import checks, metrics, nonfinite, types
from jaxloop.compiled import stacked
from jaxloop.feed import Feed
from jaxloop.interrupt import Interruptible
from jaxloop.output_queue import Block
from jaxloop.step import FusingError, Step

STEPS_TRIED = 32
"""The number of steps per dispatch that "auto" compares with 1."""

# The minimum and maximum number of rounds to measure, and the time after which no round beyond the minimum begins.
# The fastest round counts, because other programs may be using the machine.
_MIN_ROUNDS, _MAX_ROUNDS, _SECS = 3, 20, 0.2
# If dispatching takes less than this share of a step's time, fusing steps isn't worth measuring.
_MIN_DISPATCH_SHARE = 0.04


@final
@dataclasses.dataclass
class Dispatches:
    """A sequence of steps and its progress.

    Attributes:
      state: The latest state.
      outputs: A list to which each step's outputs are appended, or one `Block` for several steps in one dispatch.
      num_examples: A list to which the number of examples in each step is appended.
      clock: A function that returns the time in seconds.
      step_num: The number of updates completed before the sequence.
      interrupt: The object that ends the sequence when a signal arrives; None to ignore signals.
      deadline: The clock time at which the sequence ends. It may end up to one step late.
      before: The clock time at which the second-to-last batch arrived.
      secs_in_data: The time spent waiting for batches, in seconds.
      is_in_step: True if an exception occurred after a batch was read but before its step completed.
    """

    state: Any
    outputs: list[Any]
    num_examples: list[int]
    clock: Callable[[], float]
    step_num: int = 0
    interrupt: Interruptible | None = None
    deadline: float = math.inf
    before: float = 0.0
    secs_in_data: float = 0.0
    is_in_step: bool = False


@final
class Program:
    """Passes batches through a step's hooks and dispatches them, either one at a time or several in one dispatch.

    Args:
      step: A step that doesn't need any work on the host after `run` (see `Step.work_for_each_step`). For any other
        step, also pass `custom_step`.
      evaluates: Whether to run the steps as an evaluation, without donating the state.
      custom_step: A function that runs each step instead: `(state, batch) -> (state, outputs, number of examples)`.

    Attributes:
      step: The step.
      custom_step: See the argument.
      observers: Functions to call with each batch: before its step or, if several steps are dispatched together, after
        the dispatch.
    """

    def __init__(
        self,
        step: Step,
        *,
        evaluates: bool = False,
        custom_step: Callable[[Any, types.Batch], tuple[Any, types.Output, int]] | None = None,
    ):
        self.step: Step = step
        self._evaluates = evaluates
        self.custom_step: Callable[[Any, types.Batch], tuple[Any, types.Output, int]] | None = custom_step
        self._compiled, self._call = step.dispatcher(evaluates=evaluates)
        has_own = lambda name: checks.is_overridden(step, name, Step)
        self._begins, self._preprocesses = has_own("begin"), has_own("preprocess_batch")
        self._batch_watch = step.batch_watch
        self._counts = evaluates or self._begins or self._preprocesses or has_own("num_examples")
        self._places = evaluates or step.places_batches or has_own("place")
        self.observers: Sequence[Callable[[types.Batch], None]] = ()
        self._has_failed = False  # True if a dispatch of several steps failed.

    def run_steps(self, dispatches: Dispatches, feed: Feed, room: int) -> None:
        """Runs up to `room` steps, one per dispatch. Between steps, it only reads batches.

        It stops early when the data ends, at the deadline, or after a signal or a request to pause. Every step runs
        through this method and `_run_one`, so these two determine a loop's overhead.
        """
        clock, interrupt, deadline = dispatches.clock, dispatches.interrupt, dispatches.deadline
        read = feed.reader_fn()
        observers, add_outputs, add_number = self.observers, dispatches.outputs.append, dispatches.num_examples.append
        run_one, enter, leave = self._run_one, self._compiled.enter, self._compiled.leave
        if self.custom_step is not None:
            run_one, enter, leave = self.custom_step, _identity, _identity
        if jax.profiler.TraceAnnotation.is_enabled():
            run_one, read = self._marked(run_one, dispatches.step_num), _named("jaxloop: waiting for data", read)
        before = came = clock()
        in_data, is_in_step, carry = 0.0, False, enter(dispatches.state)
        try:
            for _ in range(room):
                began = clock()
                batch = read()
                is_in_step = True
                before, came = came, clock()
                in_data += came - began
                for observe in observers:
                    observe(batch)
                carry, outputs, num_examples = run_one(carry, batch)
                add_outputs(outputs)
                add_number(num_examples)
                is_in_step = False
                if came >= deadline or (interrupt is not None and (interrupt.signum is not None or interrupt.pauses)):
                    break
        except StopIteration:
            if is_in_step:
                raise
            feed.has_ended = True
        finally:
            dispatches.state, dispatches.before, dispatches.secs_in_data = leave(carry), before, in_data
            dispatches.is_in_step = is_in_step

    def _marked(self, run_one: Callable[..., Any], step_num: int) -> Callable[..., Any]:
        """Wraps `run_one` to mark each step in the profile being recorded, for tools that group events by step."""
        updates = 1 if self._evaluates else self.step.updates_per_step
        numbers = itertools.count(step_num + updates, updates)

        def marked(carry: Any, batch: types.Batch) -> Any:
            with jax.profiler.StepTraceAnnotation(self._marker, step_num=next(numbers)):
                return run_one(carry, batch)

        return marked

    @property
    def _marker(self) -> str:
        return "eval" if self._evaluates else "train"

    def _run_one(self, carry: Any, batch: types.Batch) -> tuple[Any, types.Output, int]:
        """Runs one step."""
        carry, batch, num_examples = self._prepare(carry, batch)
        rows = 0 if self._evaluates else self.step.check_batches(batch)
        num_examples = rows if num_examples is None else num_examples
        try:
            placed = self.step.place(batch, evaluates=self._evaluates) if self._places else batch
            carry, outputs = self._call(carry, placed, self._batch_watch.form)
        except Exception as error:
            self.step.explain(error, batch)
            raise
        return carry, outputs, num_examples

    def _prepare(self, carry: Any, batch: types.Batch) -> tuple[Any, types.Batch, int | None]:
        """Passes a batch through the hooks before `run`. Counts its examples unless `Step.check_batches` does so."""
        step, num_examples = self.step, None
        if self._counts:
            num_examples = step.count_examples(batch)
        if self._begins:
            state = self._compiled.leave(carry) if step.begin_reads_state(batch) else None
            with jax.profiler.TraceAnnotation("jaxloop: begin"):
                new_state, batch = step.before_run(state, batch)
            if new_state is not state:
                carry = self._compiled.enter(new_state)
        elif self._preprocesses:
            with jax.profiler.TraceAnnotation("jaxloop: preprocess_batch"):
                batch = step.preprocessed(batch)
        return carry, batch, num_examples

    # Several steps in one dispatch ---------------------------------------------------------------------

    def run_fused(self, dispatches: Dispatches, feed: Feed, size: int) -> bool:
        """Runs `size` steps in one dispatch. Returns True if it ran them.

        It doesn't run any steps if too few batches are left, if the batches differ in shape, or if an earlier dispatch
        of several steps failed.

        Raises:
          FusingError: If the step can't be fused.
        """
        if self._has_failed:
            return False
        before = dispatches.before = dispatches.clock()
        batches = feed.take(size)
        dispatches.secs_in_data = dispatches.clock() - before
        result = None
        if len(batches) == size and not self._batch_watch.may_differ:  # Else, the processes compare them one by one.
            dispatches.is_in_step = True
            try:
                with jax.profiler.StepTraceAnnotation(self._marker, step_num=dispatches.step_num + size):
                    result = self.dispatch_fused(dispatches.state, batches)
            except BaseException as error:
                is_final = isinstance(error, FusingError) or not checks.is_alive(dispatches.state)
                if is_final or not isinstance(error, Exception):
                    feed.put_back(batches[1:])  # The step on the first batch did not complete.
                    raise
                # When the steps are dispatched one at a time, the failing one raises its own error, with a note.
                self._has_failed = True
                logging.warning(
                    "%r: a dispatch of %d steps failed, so they run one at a time: %r", self.step, size, error
                )
            dispatches.is_in_step = False
        if result is None:
            feed.put_back(batches)
            return False
        dispatches.state, block, num_examples = result
        for observe in self.observers:
            for batch in batches:
                observe(batch)
        dispatches.outputs.append(block)
        dispatches.num_examples += num_examples
        return True

    def dispatch_fused(self, state: Any, batches: Sequence[types.Batch]) -> tuple[Any, Block, list[int]] | None:
        """Runs a step on each batch in one dispatch. Returns None if the batches differ in shape.

        Otherwise, returns the new state, the outputs and the number of examples in each batch.
        """
        compiled, call = self._fused
        carry, prepared, numbers = compiled.enter(state), [], []
        for batch in batches:
            new_carry, ready, num_examples = self._prepare(carry, batch)
            if new_carry is not carry:
                raise FusingError(
                    f"{type(self.step).__name__}.begin returned another state, so several steps can't run in one "
                    "dispatch. Change the state in run instead, or use steps_per_dispatch=1."
                )
            prepared.append(ready)
            numbers.append(num_examples)
        whole = stacked(prepared)
        if whole is None:
            return None
        rows = 0 if self._evaluates else self.step.check_batches(*prepared)
        numbers = [rows if number is None else number for number in numbers]
        try:
            carry, outputs = call(carry, self.step.place_stacked(whole), self._batch_watch.form)
        except Exception as error:
            self.step.explain(error, prepared[0])
            raise
        return compiled.leave(carry), Block(outputs, len(batches)), numbers

    @functools.cached_property
    def _fused(self) -> Any:
        self.check_fuses()
        return self.step.dispatcher(evaluates=self._evaluates, fuses=True)

    def check_fuses(self) -> None:
        """Checks that the host doesn't have any work to do between steps.

        Raises:
          FusingError: If the host has work to do between steps. The message describes it.
        """
        if work := self.step.work_for_each_step(evaluates=self._evaluates):
            raise FusingError(f"{self.step!r} can't run several steps in one dispatch: {work}.")


def _identity(state: Any) -> Any:
    return state


def _named(name: str, function: Callable[[], Any]) -> Callable[[], Any]:
    """Wraps a function so that it appears under the given name in the profile being recorded."""

    def named() -> Any:
        with jax.profiler.TraceAnnotation(name):
            return function()

    return named


# Measuring ------------------------------------------------------------------------------------------------


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


def find_steps_per_dispatch(step: Step, state: Any, batches: Sequence[types.Batch], *, evaluates: bool = False) -> int:
    """Times steps on copies of the state, and returns the faster number of steps per dispatch: 1 or 32.

    Args:
      step: The step that runs each batch. The measurement makes extra calls to its `preprocess_batch` and `begin`.
      state: A state prepared by the step. It isn't donated.
      batches: 32 batches to run.
      evaluates: Whether to measure evaluation steps.
    """
    # A separate watch: the flags of these steps don't belong to the run.
    watch = step.watch and nonfinite.Watch(step.watch.policy)
    try:
        with step.watched(watch):
            times = _measure(Program(step, evaluates=evaluates), state, batches)
    except FusingError as error:
        logging.info("steps_per_dispatch='auto' uses 1. %s", error)
        return 1
    if times is None:
        return 1
    logging.info("steps_per_dispatch='auto' uses %d for %r: %s.", times.steps_per_dispatch, step, times)
    return times.steps_per_dispatch


def _measure(program: Program, state: Any, batches: Sequence[types.Batch]) -> StepTimes | None:
    """Times steps on copies of the state. Returns None if the batches can't be stacked for a single dispatch."""

    def run_first(number: int) -> tuple[Dispatches, float]:
        dispatches = Dispatches(metrics.wait(jax.tree.map(jnp.copy, state)), [], [], time.perf_counter)
        began = time.perf_counter()
        program.run_steps(dispatches, Feed(iter(batches)), number)
        return dispatches, began

    def one_by_one() -> float:
        dispatches, began = run_first(len(batches))
        metrics.wait((dispatches.state, dispatches.outputs))
        return (time.perf_counter() - began) / len(batches)

    def fused() -> float | None:
        newest, began = jax.tree.map(jnp.copy, state), time.perf_counter()
        result = program.dispatch_fused(newest, batches)
        if result is None:
            return None
        metrics.wait((result[0], result[1].outputs))
        return (time.perf_counter() - began) / len(batches)

    def dispatch_one() -> float:
        dispatches, began = run_first(1)
        seconds = time.perf_counter() - began
        metrics.wait((dispatches.state, dispatches.outputs))
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
