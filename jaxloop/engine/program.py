"""A step as a loop repeats it. The only code that repeats steps."""

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
"""How many steps are tried in one dispatch."""

# More rounds where they take little time: others may be using the machine. The least time of each counts.
_ROUNDS, _MOST_ROUNDS, _SECS = 3, 20, 0.2
# Where the host needs less than this share of a step to start it, one dispatch for many can't save more.
_WORTH_SAVING = 0.04


@final
@dataclasses.dataclass
class Dispatches:
    """Some steps in a row, as far as they were taken.

    Attributes:
      state: the newest state.
      outputs: receives the outputs of each step, or those of one dispatch as a `Block`.
      num_examples: receives the number of examples of each step.
      clock: tells the time in seconds.
      step_num: the number of updates before them.
      interrupt: ends the dispatches when a signal has come; None to heed none.
      deadline: ends it when the clock shows this; at most a step too late.
      before: when the batch before the newest came, by the clock.
      secs_in_data: seconds that went to waiting for batches.
      is_in_step: whether a batch was drawn whose step is not done; after an exception.
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
    """Takes batches through the hooks of a step, and to the devices, one at a time or several in one dispatch.

    Args:
      step: a step with nothing to do on the host after `run`, see `Step.work_after_run`; for any other, give `own`.
      evaluates: keeps the state.
      own: takes one step, `(state, batch) -> (state, outputs, number of examples)`, in the place of all else.

    Attributes:
      step: the step.
      own: as given.
      observers: are called with each batch: before its step, or once the dispatch of several was begun.
    """

    def __init__(
        self,
        step: Step,
        *,
        evaluates: bool = False,
        own: Callable[[Any, types.Batch], tuple[Any, types.Output, int]] | None = None,
    ):
        self.step: Step = step
        self._evaluates = evaluates
        self.own: Callable[[Any, types.Batch], tuple[Any, types.Output, int]] | None = own
        self._compiled, self._call = step.dispatcher(evaluates=evaluates)
        has_own = lambda name: checks.is_overridden(step, name, Step)
        self._begins, self._preprocesses = has_own("begin"), has_own("preprocess_batch")
        self._reads_state, self._batch_watch = step.begin_reads_state, step.batch_watch
        self._counts = evaluates or self._begins or self._preprocesses or has_own("num_examples")
        self._places = evaluates or step.places_batches or has_own("place")
        self.observers: Sequence[Callable[[types.Batch], None]] = ()
        self._has_failed = False  # Whether a dispatch of several steps has.

    def take(self, dispatches: Dispatches, feed: Feed, room: int) -> None:
        """Takes up to `room` steps, with nothing between them but to draw a batch.

        Ends sooner with the data, at the deadline, and when a signal has come. Each step of a run goes through these
        lines and `_run_one`: they are what a loop costs.
        """
        clock, draw, interrupt, deadline = dispatches.clock, feed.reader_fn(), dispatches.interrupt, dispatches.deadline
        observers, add_outputs, add_number = self.observers, dispatches.outputs.append, dispatches.num_examples.append
        take_one, enter, leave = self._run_one, self._compiled.enter, self._compiled.leave
        if self.own is not None:
            take_one, enter, leave = self.own, _identity, _identity
        if jax.profiler.TraceAnnotation.is_enabled():
            take_one, draw = self._marked(take_one, dispatches.step_num), _named("jaxloop: waiting for data", draw)
        before = came = clock()
        in_data, is_in_step, carry = 0.0, False, enter(dispatches.state)
        try:
            for _ in range(room):
                began = clock()
                batch = draw()
                is_in_step = True
                before, came = came, clock()
                in_data += came - began
                for observe in observers:
                    observe(batch)
                carry, outputs, num_examples = take_one(carry, batch)
                add_outputs(outputs)
                add_number(num_examples)
                is_in_step = False
                if came >= deadline or (interrupt is not None and interrupt.signum is not None):
                    break
        except StopIteration:
            if is_in_step:
                raise
            feed.has_ended = True
        finally:
            dispatches.state, dispatches.before, dispatches.secs_in_data = leave(carry), before, in_data
            dispatches.is_in_step = is_in_step

    def _marked(self, take_one: Callable[..., Any], step_num: int) -> Callable[..., Any]:
        """Returns a function that marks each step in the profile being recorded, for tools that group by step."""
        updates = 1 if self._evaluates else self.step.updates_per_step
        numbers = itertools.count(step_num + updates, updates)

        def marked(carry: Any, batch: types.Batch) -> Any:
            with jax.profiler.StepTraceAnnotation(self._marker, step_num=next(numbers)):
                return take_one(carry, batch)

        return marked

    @property
    def _marker(self) -> str:
        return "eval" if self._evaluates else "train"

    def _run_one(self, carry: Any, batch: types.Batch) -> tuple[Any, types.Output, int]:
        """Takes one step."""
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
        """Takes a batch through the hooks before `run`; counts its examples, unless `Step.check_batches` will."""
        step, num_examples = self.step, None
        if self._counts:
            num_examples = step.count_examples(batch)
        if self._begins:
            state = self._compiled.leave(carry) if self._reads_state else None
            new_state, batch = step.before_run(state, batch)
            if new_state is not state:
                carry = self._compiled.enter(new_state)
        elif self._preprocesses:
            batch = step.preprocessed(batch)
        return carry, batch, num_examples

    # Several steps in one dispatch ---------------------------------------------------------------------

    def run_group(self, dispatches: Dispatches, feed: Feed, size: int) -> bool:
        """Takes so many steps in one dispatch; returns False, and takes none, where that can't be done.

        Raises:
          FusingError: the step is one that can't be.
        """
        if self._has_failed:
            return False
        before = dispatches.before = dispatches.clock()
        batches = feed.take(size)
        dispatches.secs_in_data = dispatches.clock() - before
        taken = None
        if len(batches) == size:
            dispatches.is_in_step = True
            try:
                with jax.profiler.StepTraceAnnotation(self._marker, step_num=dispatches.step_num + size):
                    taken = self.dispatch_group(dispatches.state, batches)
            except BaseException as error:
                is_final = isinstance(error, FusingError) or not checks.is_alive(dispatches.state)
                if is_final or not isinstance(error, Exception):
                    feed.put_back(batches[1:])  # The first is the one whose step is not done.
                    raise
                # Taken one by one, the step that fails does so with all that belongs to it.
                self._has_failed = True
                logging.warning(
                    "%r: %d steps in one dispatch have failed, and are taken one by one: %r", self.step, size, error
                )
            dispatches.is_in_step = False
        if taken is None:
            feed.put_back(batches)
            return False
        dispatches.state, block, num_examples = taken
        for observe in self.observers:
            for batch in batches:
                observe(batch)
        dispatches.outputs.append(block)
        dispatches.num_examples += num_examples
        return True

    def dispatch_group(self, state: Any, batches: Sequence[types.Batch]) -> tuple[Any, Block, list[int]] | None:
        """Returns the new state, the outputs, and the numbers of examples; None where the batches differ in shape."""
        compiled, call = self._fused
        carry, prepared, numbers = compiled.enter(state), [], []
        for batch in batches:
            new_carry, ready, num_examples = self._prepare(carry, batch)
            if new_carry is not carry:
                raise FusingError(
                    f"{type(self.step).__name__}.begin returned another state, so that several steps can't be taken "
                    "in one dispatch. Change the state in run, or leave steps_per_dispatch at 1."
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
        """Raises where something is to be done between two steps, on the host.

        Raises:
          FusingError: says what.
        """
        if work := self.step.work_after_run(evaluates=self._evaluates):
            raise FusingError(f"{self.step!r} can't take several steps in one dispatch: {work}.")


def _identity(state: Any) -> Any:
    return state


def _named(name: str, function: Callable[[], Any]) -> Callable[[], Any]:
    """Returns a function that shows under a name in the profile that is being recorded."""

    def named() -> Any:
        with jax.profiler.TraceAnnotation(name):
            return function()

    return named


# Trying ---------------------------------------------------------------------------------------------------


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
    # The flags of steps that are only tried are nobody's.
    watch = step.watch and nonfinite.Watch(step.watch.policy)
    try:
        with step.watched(watch):
            tried = _try(Program(step, evaluates=evaluates), state, batches)
    except FusingError as error:
        logging.info("steps_per_dispatch='auto' is 1. %s", error)
        return 1
    if tried is None:
        return 1
    logging.info("steps_per_dispatch='auto' is %d for %r: %s.", tried.steps_per_dispatch, step, tried)
    return tried.steps_per_dispatch


def _try(program: Program, state: Any, batches: Sequence[types.Batch]) -> Tried | None:
    """Returns None where the batches can't be taken in one dispatch."""

    def take(number: int) -> tuple[Dispatches, float]:
        dispatches = Dispatches(metrics.wait(jax.tree.map(jnp.copy, state)), [], [], time.perf_counter)
        began = time.perf_counter()
        program.take(dispatches, Feed(iter(batches)), number)
        return dispatches, began

    def one_by_one() -> float:
        dispatches, began = take(len(batches))
        metrics.wait((dispatches.state, dispatches.outputs))
        return (time.perf_counter() - began) / len(batches)

    def fused() -> float | None:
        newest, began = jax.tree.map(jnp.copy, state), time.perf_counter()
        taken = program.dispatch_group(newest, batches)
        if taken is None:
            return None
        metrics.wait((taken[0], taken[1].outputs))
        return (time.perf_counter() - began) / len(batches)

    def start() -> float:
        dispatches, began = take(1)
        seconds = time.perf_counter() - began
        metrics.wait((dispatches.state, dispatches.outputs))
        return seconds

    program.check_fuses()
    start()  # Compiles.
    to_start = min(start() for _ in range(_ROUNDS))
    single = one_by_one()
    if to_start < _WORTH_SAVING * single:
        return Tried(single, None)
    if fused() is None:  # Compiles.
        return None
    rounds, began = [], time.perf_counter()
    while len(rounds) < _ROUNDS or (len(rounds) < _MOST_ROUNDS and time.perf_counter() - began < _SECS):
        rounds.append((one_by_one(), fused()))
    singles, groups = zip(*rounds, strict=True)
    return Tried(min(singles), min(groups))
