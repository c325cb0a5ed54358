"""The steps of a loop: their batches are drawn, they are taken and counted, and their outputs are collected."""

import math
from collections.abc import Callable, Iterator
from typing import Any, Literal, final

import numpy as np
from absl import logging

from jaxloop import agreement, checks, metrics, nonfinite, partition, types
from jaxloop.engine.ledger import Ledger
from jaxloop.engine.program import STEPS_TRIED, Dispatches, Program, find_steps_per_dispatch
from jaxloop.engine.progress import Progress
from jaxloop.feed import Feed
from jaxloop.output_queue import Arrived, OutputQueue
from jaxloop.schedules import NEVER, Elapsed
from jaxloop.step import Step

# Of how many steps the devices keep scalars until somebody asks for them.
_MOST_STEPS_HELD = 1024


@final
class Call:
    """One call of a loop.

    Args:
      state: the state to begin with.
      consumed: what the source of the batches had counted before.
      trains: whether the steps change the state.
      updates: by how much a batch advances the count of steps.

    Attributes:
      state: the state as of the last whole step; None when the call is over.
      trains: as given, as `updates`.
      consumed: what the source had counted when the last whole step was done.
      program: takes the steps; None before the first.
      queue: takes their outputs to the host; likewise.
      num_examples: of each step of the loop, how many examples it had.
      counted: how many of these have been counted in the progress.
      settled: how many of these have been counted in the ledger.
      passed: how many batches were taken since `run` was called that belong to loops before this one.
      silent_ends: the steps at which a loop ends inside the present `run`, where nothing is due.
      has_passed_end: whether the end of the last loop was passed, and nobody has heard of it.
      place: where an exception comes from: the step, or words.
      was_interrupted: whether a signal ended it amid a loop.
      data_ended: whether the data have.
      made_iterator: whether the iterator of the data was made in it.
      is_failing: whether an exception is ending it.
      failed_step: the step that raised, if one has.
      before_step: how far the training was after the newest step, for the step's own actions.
      examples_at_hand: how many examples the step under way has, if it is taken by `_run_one_step`.
    """

    def __init__(self, state: Any, consumed: int = 0, *, trains: bool = True, updates: int = 1):
        self.state: Any = state
        self.trains: bool = trains
        self.updates: int = updates
        self.consumed: int = consumed
        self.program: Program | None = None
        self.queue: OutputQueue | None = None
        self.place: Any = ""
        self.was_interrupted: bool = False
        self.data_ended: bool = False
        self.made_iterator: bool = False
        self.failed_step: int | None = None
        self.silent_ends: range = range(0)
        self.is_failing: bool = False
        self.has_passed_end: bool = False
        self.before_step: Elapsed | None = None
        self.examples_at_hand: int = 0
        self.begin_loop()

    def begin_loop(self) -> None:
        """Begins a loop."""
        self.num_examples: list[int] = []
        self.counted: int = 0
        self.settled: int = 0
        self.passed: int = 0

    def begin_next_loop(self, num_batches: int) -> None:
        """Begins a loop of which so many batches were taken already, with those of the loop before."""
        passed = len(self.num_examples) - num_batches
        del self.num_examples[:passed]
        self.counted, self.settled, self.passed = self.counted - passed, self.settled - passed, self.passed + passed

    def left(self, num_batches: int | None) -> int:
        """Returns how many batches are left of so many that are to be taken."""
        return NEVER[0] if num_batches is None else num_batches - self.passed - len(self.num_examples)

    @property
    def uncounted(self) -> int:
        """The number of steps that were taken and are not in the progress yet."""
        return len(self.num_examples) - self.counted


@final
class Stepper:
    """Takes the steps of a loop.

    Args:
      loop: whose hooks `_get_next_batch`, `_run_one_step` and `update_outputs` are called.
      step: what happens to one batch.
      progress: counts the steps.
      job: the processes that train together.
      max_steps_in_flight: see `Loop`.

    Attributes:
      call: the call under way, or the last one.
      ledger: the outputs of the steps.
      source: counts the batches that are drawn.
      guard: finds bad numbers.
      evaluates: whether no call changes the state.
      checks_count: whether `state.step` must be what is counted here.
      steps_per_dispatch: how many steps are taken in one dispatch; None until that is found out.
      readers: returns whether somebody reads the parts, and the loops, of the ledger.
    """

    def __init__(self, loop: Any, step: Step, progress: Progress, job: agreement.Job, max_steps_in_flight: int | None):
        self._loop, self._step, self._progress, self._job = loop, step, progress, job
        self._given_max_in_flight = max_steps_in_flight
        self.call: Call = Call(None, updates=step.updates_per_step)
        self.ledger: Ledger = Ledger()
        self.source: Any = _Uncounted()
        self.guard: nonfinite.Guard = nonfinite.Guard(None)
        self.evaluates: bool = False
        self.checks_count: bool = False
        self.steps_per_dispatch: int | None = 1
        self.readers: Callable[[], tuple[bool, bool]] = lambda: (False, False)
        self._feed = Feed(iter(()))
        self._known_step: Any = None  # The `state.step` array whose value has been counted.
        self._max_steps: int | None = None  # What `state.step` can count to; None until the first steps were counted.

    @property
    def max_in_flight(self) -> int:
        """How many steps the host may be ahead of the devices."""
        mesh, at_once = self._step.partitioner.mesh, self.steps_per_dispatch or 1
        return self._given_max_in_flight or partition.max_steps_in_flight(mesh, at_once)

    @property
    def step_num(self) -> int:
        """The number of completed updates, those included that are not in the progress yet."""
        return self._progress.steps + (self.call.uncounted * self.call.updates if self.call.trains else 0)

    def read_step_num(self, state: Any) -> int:
        """Returns the number of completed updates of a state; of one without `step`, that of the loop."""
        count = getattr(state, "step", None)
        if count is None or count is self._known_step:
            return self._progress.steps  # Reading it would wait for the device.
        return int(metrics.fetch(count))

    def compile(self, state: Any, batch: types.BatchSpec) -> None:
        """Compiles all ahead that steps on such batches will need, see `Loop.compile`."""
        at_once = STEPS_TRIED if self.steps_per_dispatch is None else self.steps_per_dispatch
        with self._step.watched(self.guard.watch):
            for number in sorted({at_once, 1}, reverse=True):
                self._step.compile(state, batch, evaluates=self.evaluates, steps_per_dispatch=number)

    # A call ------------------------------------------------------------------------------------------

    def begin_call(self, state: Any, *, trains: bool) -> Call:
        """Begins a call of the loop."""
        state, updates = self._step.prepare_state(state), self._step.updates_per_step if trains else 1
        self.call = Call(state, self.source.count, trains=trains, updates=updates)
        self.guard.bad = None
        return self.call

    def begin_loop(self) -> None:
        """Begins a loop of the call."""
        self.call.begin_loop()
        self._progress.begin_loop()
        self.guard.begin_loop()

    def end_call(self, state: Any) -> None:
        """Ends a call with the state that it returns."""
        self._known_step = getattr(state, "step", None)

    def begin(self, dataset: Iterator[types.Batch], num_batches: int | None) -> None:
        """Begins to draw at most so many batches from an iterator."""
        call, feed = self.call, self._feed_of(dataset)
        feed.begin(num_batches)
        if self._job.is_shared and not feed.num_ahead:
            self.source.mark()  # From here on batches are drawn ahead, so that some sources can't say where they are.
        call.consumed, call.place = self.source.count - feed.num_ahead, "the dataset"
        if not call.trains:
            self._step.begin_evaluation()

    def prepare(self, state: Any, observers: Callable[[], list[Callable[[types.Batch], None]]]) -> Any:
        """Makes ready to take steps; returns the state as the step wants it.

        Args:
          state: the state.
          observers: returns what is called with each batch of the call.
        """
        state = self._step.prepare_state(state)
        if self.call.program is None:
            own = self._run_overridden if self.calls_step else None
            self.call.program = Program(self._step, evaluates=not self.call.trains, own=own)
            self.call.program.observers = observers()
            # An `update_outputs` of somebody's own may want to see them soon.
            max_kept = None if checks.is_user_defined(self._loop, "update_outputs") else _MOST_STEPS_HELD
            self.call.queue = OutputQueue(self.max_in_flight, max_kept, self._progress.stopwatch, self.ledger.sums)
        return state

    # Steps -------------------------------------------------------------------------------------------

    def take(self, state: Any, step: int, secs: float, left: int) -> tuple[Any, int]:
        """Takes some steps, and counts them.

        Args:
          state: the state.
          step: the step at which something is due.
          secs: the time by the stopwatch at which something is due.
          left: how many batches are left.

        Returns:
          The newest state, and how many steps were taken.
        """
        call, stopwatch = self.call, self._progress.stopwatch
        program, queue, feed = call.program, call.queue, self._feed
        assert program is not None and queue is not None
        clock_is_shared = self._job.is_shared and secs < math.inf  # It goes on step by step.
        if program.own is not None or clock_is_shared:
            room = 1
        else:
            room = min(left, -(-(step - self._progress.steps) // call.updates))
        if self.steps_per_dispatch is None and room >= STEPS_TRIED:
            self._find_steps_per_dispatch(state, feed)
            queue.max_steps_in_flight = self.max_in_flight
        interrupt = self._job.requests.outermost
        dispatches = Dispatches(state, queue.newest, call.num_examples, stopwatch.clock, self.step_num, interrupt)
        if not self._job.is_shared:
            dispatches.deadline = stopwatch.reading_at(secs)
        try:
            at_once = self.steps_per_dispatch or 1
            was_fused = 1 < at_once <= room and program.run_group(dispatches, feed, at_once)
            if not was_fused and not feed.has_ended:
                program.take(dispatches, feed, min(room, queue.room))
        except BaseException as error:
            self._end_by(error, dispatches)
            raise
        stopwatch.move(dispatches.secs_in_data, "data")
        self._progress.secs_before = stopwatch.training_at(dispatches.before)
        call.state, call.place = dispatches.state, self._step
        return dispatches.state, self._count()

    def _end_by(self, error: BaseException, dispatches: Dispatches) -> None:
        """Counts what was done before an exception of the dataset or of a step."""
        call = self.call
        call.state = dispatches.state
        self._count(undone=dispatches.is_in_step)
        if not dispatches.is_in_step:
            return
        call.place = self._step
        if isinstance(error, Exception):
            call.failed_step = self._progress.steps + call.updates
        if isinstance(error, StopIteration):  # To a caller that is a generator it would be the end of its data.
            raise RuntimeError("The step raised StopIteration, as next() of an empty iterator does.") from error

    def count_rescued_step(self) -> None:
        """Counts the step whose update was done, where only what came after that has failed."""
        if self._step.rescued_state is not None:
            self.call.state = self._step.rescued_state
            self.call.num_examples.append(self.call.examples_at_hand)
            self._count()

    def _count(self, *, undone: bool = False) -> int:
        """Counts the steps whose numbers of examples have been added; returns how many those are.

        Args:
          undone: whether another batch was drawn, whose step was not done.
        """
        call, progress = self.call, self._progress
        new = call.num_examples[call.counted :]
        if self._feed.joint is not None and new:
            new, times = zip(*self._feed.joint.counted(len(new)), strict=True)
            call.num_examples[call.counted :] = new
            progress.secs_before, progress.agreed_secs = (progress.agreed_secs or 0.0, *times)[-2:]
        call.counted += len(new)
        progress.count(new, call.updates, trains=call.trains)
        call.consumed = self.source.count - self._feed.num_ahead - undone
        return len(new)

    @property
    def calls_step(self) -> bool:
        """Whether `_run_one_step` is called for each batch: there is more to do than to give it to the devices."""
        has_work = self._step.work_after_run(evaluates=not self.call.trains) is not None
        return has_work or checks.is_user_defined(self._loop, "_run_one_step")

    def _run_overridden(self, state: Any, batch: types.Batch) -> tuple[Any, types.Output, int]:
        """Takes one step by `_run_one_step`."""
        call = self.call
        call.examples_at_hand = num_examples = self._step.count_examples(batch)
        number = self._progress.batches_before + len(call.num_examples)
        state, outputs = self._loop._run_one_step(state, batch, number)
        return state, outputs, num_examples

    def run_one_step(self, state: Any, batch: types.Batch, per_loop_step_number: int) -> tuple[Any, types.Output]:
        """Takes one step with all of its hooks and actions."""
        if self.call.trains:
            elapsed = self._elapsed_after(batch) if self._step.has_schedules else None
            return self._step(state, batch, per_loop_step_number, elapsed=elapsed)
        return state, self._step.evaluate(state, batch, per_loop_step_number)

    def _elapsed_after(self, batch: types.Batch) -> Elapsed:
        """Returns how far the training is after the step on this batch, for the step's own actions."""
        call, progress, before = self.call, self._progress, self.call.before_step
        if before is None or (before.steps, before.loops) != (progress.steps, progress.loops):
            before = progress.look()
        joint = self._feed.joint
        samples = self._step.count_examples(batch) if joint is None else joint.next_examples
        call.before_step = before.advance(samples=samples, time=progress.time(), steps=call.updates)
        return call.before_step

    # Several steps in one dispatch --------------------------------------------------------------------

    def set_steps_per_dispatch(self, value: int | Literal["auto"]) -> None:
        """Has several steps taken in one dispatch, from the next call on; says why that can't be."""
        name = type(self._loop).__name__
        if value == "auto":
            # Each process would find something else.
            self.steps_per_dispatch = 1 if self._job.is_shared else None
            return
        checks.check_positive(f"{name}.steps_per_dispatch", value)
        if value > 1 and checks.is_user_defined(self._loop, "_run_one_step"):
            raise ValueError(
                f"{name} has a _run_one_step of its own, which is called for each step: leave steps_per_dispatch at 1."
            )
        if value > 1:
            Program(self._step, evaluates=self.evaluates).check_fuses()
        self.steps_per_dispatch = int(value)

    def _find_steps_per_dispatch(self, state: Any, feed: Feed) -> None:
        """Tries how many steps are best taken in one dispatch, on copies, with batches that are given back."""
        with self._progress.stopwatch.counting("data"):
            batches = feed.take(STEPS_TRIED)
        try:
            evaluates = not self.call.trains
            if len(batches) == STEPS_TRIED:
                self.steps_per_dispatch = find_steps_per_dispatch(self._step, state, batches, evaluates=evaluates)
            elif evaluates:  # Each time it is the same data.
                self.steps_per_dispatch = 1
        except Exception as error:  # A step that fails does so when it is its turn, with all that belongs to it.
            logging.warning("steps_per_dispatch='auto' is 1, because to try has failed: %r", error)
            self.steps_per_dispatch = 1
        finally:
            feed.put_back(batches)

    # The data ----------------------------------------------------------------------------------------

    def _feed_of(self, dataset: Iterator[types.Batch]) -> Feed:
        """Draws from an iterator; the same one for each call with it, for no batch to be lost that was drawn ahead."""
        if self._feed.dataset is not dataset:
            draw = self._loop._get_next_batch if checks.is_user_defined(self._loop, "_get_next_batch") else None
            self._feed = Feed(dataset, draw, self._join if self._job.is_shared else None)
        return self._feed

    def _join(self, draw: Callable[[], types.Batch]) -> agreement.JointReader:
        """Returns what draws batches together with the other processes."""
        return agreement.JointReader(
            repr(self._loop),
            draw,
            before_reading=lambda: self.source.mark(if_cheap=True),
            count=self._step.count_examples,
            requests=self._job.requests,
            secs=self._progress.stopwatch.training_secs,
            fill_to=self._step.filler(),
            until_all_processes_end=not self.call.trains,
        )

    def has_ended(self) -> bool:
        """Returns whether the data have."""
        return self._feed.has_ended

    def has_more(self, before_reading: Callable[[], None]) -> bool:
        """Returns whether there is another batch, which is drawn ahead; what is given is called before that."""
        self.call.place = "the dataset"
        if not self._feed.ahead:
            before_reading()
        with self._progress.stopwatch.counting("data"):
            return self._feed.has_more()

    def read_from(self, source: Any) -> None:
        """Has the next call count its batches by a source, from where that stands; None for no source."""
        self.source = source
        self.call.consumed = 0 if source is None else source.count - self.batches_ahead(source)

    def batches_ahead(self, source: Any) -> int:
        """Returns how many batches were drawn from a source, and not taken."""
        return self._feed.num_ahead if self._feed.dataset is source else 0

    def forget_batches(self) -> None:
        """Drops what was drawn ahead, and what it was drawn from, which is at another place since, or at its end."""
        self._feed, self.source, self.call.consumed = Feed(iter(())), _Uncounted(), 0

    # Outputs -----------------------------------------------------------------------------------------

    def push(self, state: Any, num_steps: int) -> None:
        """Sends the outputs of the newest steps to the host, and takes in those that have arrived."""
        if num_steps:
            assert self.call.queue is not None
            self._receive(self.call.queue.push(num_steps, state))
        self._check_count(state)
        self._check_batches(self.guard.look(state, in_step=self._job.is_shared))

    def fetch(self, *, keep_sums: bool = False) -> None:
        """Waits for the outputs of all steps so far, and takes them in; ends their sums, unless they go on."""
        if self.call.queue is not None:
            arrived, sums = self.call.queue.drain(keep_sums=keep_sums)
            self._receive(arrived)
            self.ledger.sums.update(sums)
        self.count_weights()

    def _receive(self, arrived: Arrived) -> None:
        """Takes in the outputs of steps that have reached the host."""
        update = self._loop.update_outputs if checks.is_user_defined(self._loop, "update_outputs") else None
        keeps_parts, keeps_loops = self.readers()
        self.ledger.take(arrived, update, keeps_parts=keeps_parts, keeps_loops=keeps_loops)

    def newest_scalars(self) -> dict[str, Any]:
        """Returns the newest scalars that are there; waits for none."""
        return (self.call.queue and self.call.queue.newest_scalars()) or metrics.newest_scalars(self.ledger.loop)

    def count_weights(self) -> None:
        """Counts the newest steps in the ledger, and how many examples their values stand for."""
        call = self.call
        self._check_batches(self.guard.read(call.state))
        if new := self.guard.newly_skipped():
            logging.warning(
                "%r left out %d step%s whose numbers were not finite, the first of them step %d: %s.",
                self._loop,
                len(new),
                "s" if len(new) > 1 else "",
                self._step_at(new[0].index),
                ", ".join(new[0].names[:6]),
            )
        self.ledger.count(self.guard.weights(call.num_examples)[call.settled :])
        call.settled = len(call.num_examples)

    # What is wrong with a state ------------------------------------------------------------------------

    def _check_batches(self, bad: nonfinite.Found | None) -> None:
        if bad is not None and self.guard.bad is None:
            self.guard.bad = nonfinite.NonFiniteError(self._step_at(bad.index), bad.names)
            self.call.failed_step = self.guard.bad.step_num
            if not self.call.is_failing:
                raise self.guard.bad

    def _step_at(self, index: int) -> int:
        """Returns the step number after a batch of the loop."""
        return self._progress.steps - (len(self.call.num_examples) - 1 - index) * self.call.updates

    def _check_count(self, state: Any) -> None:
        """Raises where `state.step` is not what the loop has counted; reads it after the first steps alone."""
        if not self.checks_count or not self.call.trains or not hasattr(state, "step"):
            return
        step_num, batches = self._progress.steps, len(self.call.num_examples)
        most_steps = self._max_steps or np.iinfo(getattr(state.step, "dtype", np.int64)).max
        if step_num > most_steps:
            raise ValueError(
                f"state.step, {checks.describe(state.step)}, counts to {most_steps}, and should be {step_num} by now. "
                "Begin with a smaller state.step."
            )
        if self._max_steps is not None:
            return
        count = int(metrics.fetch(state.step))
        if count != step_num:
            begin = step_num - batches * self.call.updates
            raise ValueError(
                f"{self._step!r} ran on {batches} batch{'es' if batches > 1 else ''} from state.step {begin}, and "
                f"state.step is now {count}, not {step_num}. {checks.counting_hint(self._step)}"
            )
        self._max_steps = int(most_steps) if batches else None

    def rescue_outputs(self, error: BaseException) -> None:
        """Takes in the outputs of the steps before an exception that ends a loop inside."""
        if error is self.guard.bad or not self.call.trains:
            return
        self.call.is_failing = True
        try:
            self.fetch(keep_sums=True)
        except Exception:
            logging.exception("The outputs of the last steps before an exception could not be read.")
        if self.guard.bad is not None:
            error.add_note(f"before that: {self.guard.bad}")

    def not_rescued_reason(self) -> str | None:
        """Says why no run may resume from the state as of the last whole step; None if one may."""
        if self.guard.bad is not None:
            return "its numbers are bad"
        if not checks.is_alive(self.call.state):
            return "the step that failed had taken it over"
        try:
            self._check_count(self.call.state)
        except Exception as error:  # Also what the devices raise when the count is read.
            return str(error)
        return None


class _Uncounted:
    """In the place of a source, for a loop on its own."""

    count = 0

    def mark(self, *, if_cheap: bool = False) -> None:
        pass
