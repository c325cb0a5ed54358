"""A loop's stepper, which reads batches, runs and counts steps, and collects their outputs."""

import itertools
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
from jaxloop.sources import indexed
from jaxloop.step import Step

# The scalars of at most this many steps stay on the devices until something reads them.
_MAX_STEPS_ON_DEVICES = 1024


@final
class Call:
    """One call to a loop.

    Args:
      state: The initial state.
      consumed: The number of batches counted by the source before the call.
      trains: True if the steps change the state.
      updates: The number of optimizer updates per batch.

    Attributes:
      state: The state after the last completed step; None after the call.
      trains: See the argument.
      updates: See the argument.
      consumed: The number of batches counted by the source when the last step completed.
      program: The program that runs the steps; None before the first step.
      queue: The queue that moves the outputs of the steps to the host; None before the first step.
      num_examples: A list with the number of examples in each step of the loop.
      counted: The number of steps that have been added to the progress.
      settled: The number of steps that have been added to the ledger.
      passed: The number of batches that have run since `run` was called but belong to earlier loops.
      idle_ends: The steps within the current call to `run` where a loop ends but nothing is due.
      has_passed_end: True if the last loop ended at one of these steps, so its `end` was not called.
      place: The part of the loop that is running (a `Step` or a string), for the note that is added to an exception.
      was_interrupted: True if a signal ended the call inside a loop.
      data_ended: True if the data ended.
      made_iterator: True if this call created the iterator over the data.
      is_failing: True if an exception is ending the call.
      failed_step: The number of the step that raised an exception; None if no step did.
      before_step: The training progress after the latest step, for the step's own actions.
      current_examples: The number of examples in the current step, if `_run_one_step` runs it.
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
        self.idle_ends: range = range(0)
        self.is_failing: bool = False
        self.has_passed_end: bool = False
        self.before_step: Elapsed | None = None
        self.current_examples: int = 0
        self.begin_loop()

    def begin_loop(self) -> None:
        """Begins a loop that has no batches yet."""
        self.num_examples: list[int] = []
        self.counted: int = 0
        self.settled: int = 0
        self.passed: int = 0

    def begin_next_loop(self, num_batches: int) -> None:
        """Begins a loop whose first `num_batches` batches have already run along with those of the previous loop."""
        passed = len(self.num_examples) - num_batches
        del self.num_examples[:passed]
        self.counted, self.settled, self.passed = self.counted - passed, self.settled - passed, self.passed + passed

    def left(self, num_batches: int | None) -> int:
        """Returns how many of `num_batches` batches haven't run yet."""
        return NEVER[0] if num_batches is None else num_batches - self.passed - len(self.num_examples)

    @property
    def uncounted(self) -> int:
        """The number of completed steps that haven't been added to the progress yet."""
        return len(self.num_examples) - self.counted


@final
class Stepper:
    """Runs the steps of a loop.

    Args:
      loop: The loop. Its hooks `_get_next_batch`, `_run_one_step` and `update_outputs` are called.
      step: The step that runs each batch.
      progress: The object that counts the steps.
      job: The processes that train together.
      max_steps_in_flight: See `Loop`.

    Attributes:
      call: The current or last call.
      ledger: The outputs of the steps.
      source: The source of the batches, which counts how many have been read.
      guard: The object that detects NaN and infinity.
      evaluates: True if the stepper only evaluates, in which case its calls never change the state.
      checks_count: Whether to check `state.step` against the number of steps that the stepper counted.
      steps_per_dispatch: The number of steps per dispatch; None until "auto" has measured it.
      readers: A function that returns two bools: whether any action reads the ledger's `parts`, and whether any action
        reads its `loops`.
    """

    def __init__(self, loop: Any, step: Step, progress: Progress, job: agreement.Job, max_steps_in_flight: int | None):
        self._loop, self._step, self._progress, self._job = loop, step, progress, job
        self._given_max_in_flight = max_steps_in_flight
        self.call: Call = Call(None, updates=step.updates_per_step)
        self.ledger: Ledger = Ledger()
        self.source: Any = _NoSource()
        self.guard: nonfinite.Guard = nonfinite.Guard(None)
        self.evaluates: bool = False
        self.checks_count: bool = False
        self.steps_per_dispatch: int | None = 1
        self.readers: Callable[[], tuple[bool, bool]] = lambda: (False, False)
        self._feed = Feed(iter(()))
        self._known_step: Any = None  # A `state.step` array that is known to equal `Progress.steps`.
        self._max_steps: int | None = None  # The largest possible `state.step`; None until the first check.

    @property
    def max_in_flight(self) -> int:
        """The maximum number of steps that the host may run ahead of the devices."""
        mesh, at_once = self._step.partitioner.mesh, self.steps_per_dispatch or 1
        return self._given_max_in_flight or partition.max_steps_in_flight(mesh, at_once)

    @property
    def step_num(self) -> int:
        """The number of completed updates, including those that haven't been added to the progress yet."""
        return self._progress.steps + (self.call.uncounted * self.call.updates if self.call.trains else 0)

    def read_step_num(self, state: Any) -> int:
        """Returns the number of completed updates: `state.step`, or the loop's own count if the state has no `step`."""
        count = getattr(state, "step", None)
        if count is None or count is self._known_step:
            return self._progress.steps  # Reading the array would synchronize with the device.
        return int(metrics.fetch(count))

    def compile(self, state: Any, batch: types.BatchSpec) -> None:
        """Compiles everything needed to run steps on batches like this one; see `Loop.compile`."""
        at_once = STEPS_TRIED if self.steps_per_dispatch is None else self.steps_per_dispatch
        dataset = indexed(batch)
        batches = [batch] if dataset is None else dataset.first_of_each_size()
        with self._step.watched(self.guard.watch):
            for each, number in itertools.product(batches, sorted({at_once, 1}, reverse=True)):
                self._step.compile(state, each, evaluates=self.evaluates, steps_per_dispatch=number)

    # A call ------------------------------------------------------------------------------------------

    def begin_call(self, state: Any, *, trains: bool) -> Call:
        """Begins a call to the loop."""
        state, updates = self._step.prepare_state(state), self._step.updates_per_step if trains else 1
        self.call = Call(state, self.source.count, trains=trains, updates=updates)
        self.guard.bad = None
        return self.call

    def begin_loop(self) -> None:
        """Begins the next loop within the current call."""
        self.call.begin_loop()
        self._progress.begin_loop()
        self.guard.begin_loop()

    def end_call(self, state: Any) -> None:
        """Ends a call that returns the given state."""
        self._known_step = getattr(state, "step", None)

    def begin(self, dataset: Iterator[types.Batch], num_batches: int | None) -> None:
        """Prepares to read at most `num_batches` batches (or all batches, if None) from an iterator."""
        call, feed = self.call, self._feed_of(dataset)
        feed.begin(num_batches)
        if self._job.is_shared and not feed.num_ahead:
            self.source.mark()  # From here on, batches are read ahead, and some sources lose track of their position.
        call.consumed, call.place = self.source.count - feed.num_ahead, "the dataset"
        if not call.trains:
            self._step.begin_evaluation()

    def prepare(self, state: Any, observers: Callable[[], list[Callable[[types.Batch], None]]]) -> Any:
        """Prepares the state for running steps (for example, by placing it on the step's devices), and returns it.

        Args:
          state: The state.
          observers: A function that returns the functions to call with each batch.
        """
        state = self._step.prepare_state(state)
        if self.call.program is None:
            custom_step = self._run_overridden if self.calls_step else None
            self.call.program = Program(self._step, evaluates=not self.call.trains, custom_step=custom_step)
            self.call.program.observers = observers()
            # An overridden `update_outputs` may need the outputs soon.
            max_kept = None if checks.is_user_defined(self._loop, "update_outputs") else _MAX_STEPS_ON_DEVICES
            self.call.queue = OutputQueue(self.max_in_flight, max_kept, self._progress.stopwatch, self.ledger.sums)
        return state

    # Steps -------------------------------------------------------------------------------------------

    def run_steps(self, state: Any, step: int, secs: float, left: int) -> tuple[Any, int]:
        """Runs and counts the next steps.

        Args:
          state: The state.
          step: The next step at which something is due.
          secs: The next stopwatch time, in seconds, at which something is due.
          left: The number of remaining batches.

        Returns:
          The latest state, and the number of steps run.
        """
        call, stopwatch = self.call, self._progress.stopwatch
        program, queue, feed = call.program, call.queue, self._feed
        assert program is not None and queue is not None
        clock_is_shared = self._job.is_shared and secs < math.inf  # Runs step by step.
        if program.custom_step is not None or clock_is_shared:
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
            was_fused = 1 < at_once <= room and program.run_fused(dispatches, feed, at_once)
            if not was_fused and not feed.has_ended:
                program.run_steps(dispatches, feed, min(room, queue.room))
        except BaseException as error:
            if dispatches.is_in_step or not self._job.requests.supersedes(error):
                self._count_before_error(error, dispatches)
                raise
        stopwatch.move(dispatches.secs_in_data, "data")
        self._progress.secs_before = stopwatch.training_at(dispatches.before)
        call.state, call.place = dispatches.state, self._step
        return dispatches.state, self._count()

    def _count_before_error(self, error: BaseException, dispatches: Dispatches) -> None:
        """Counts the steps that were completed before the dataset or a step raised an exception."""
        call = self.call
        call.state = dispatches.state
        self._count(undone=dispatches.is_in_step)
        if not dispatches.is_in_step:
            return
        call.place = self._step
        if isinstance(error, Exception):
            call.failed_step = self._progress.steps + call.updates
        if isinstance(error, StopIteration):  # An iterator that calls this would mistake it for the end of its data.
            raise RuntimeError(
                "The step raised StopIteration, which next() raises for an empty iterator. Use next(iterator, "
                "default), or catch it."
            ) from error

    def count_rescued_step(self) -> None:
        """Counts the failed step if its update was completed before the failure."""
        if self._step.rescued_state is not None:
            self.call.state = self._step.rescued_state
            self.call.num_examples.append(self.call.current_examples)
            self._count()

    def _count(self, *, undone: bool = False) -> int:
        """Counts the steps that are new in `num_examples`, and returns their number.

        Args:
          undone: True if one more batch was read but its step did not complete.
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
        """True if `_run_one_step` must run each batch, because it is overridden or the host works between batches."""
        has_work = self._step.work_for_each_step(evaluates=not self.call.trains) is not None
        return has_work or checks.is_user_defined(self._loop, "_run_one_step")

    def _run_overridden(self, state: Any, batch: types.Batch) -> tuple[Any, types.Output, int]:
        """Runs one step by calling the `_run_one_step` hook."""
        call = self.call
        call.current_examples = num_examples = self._step.count_examples(batch)
        number = self._progress.batches_before + len(call.num_examples)
        state, outputs = self._loop._run_one_step(state, batch, number)
        return state, outputs, num_examples

    def run_one_step(self, state: Any, batch: types.Batch, per_loop_step_number: int) -> tuple[Any, types.Output]:
        """Runs one step, including all of its hooks and actions."""
        if self.call.trains:
            elapsed = self._elapsed_after(batch) if self._step.has_schedules else None
            return self._step(state, batch, per_loop_step_number, elapsed=elapsed)
        return state, self._step.evaluate(state, batch, per_loop_step_number)

    def _elapsed_after(self, batch: types.Batch) -> Elapsed:
        """Returns what the training progress will be after the step on this batch, for the step's own actions."""
        call, progress, before = self.call, self._progress, self.call.before_step
        if before is None or (before.steps, before.loops) != (progress.steps, progress.loops):
            before = progress.elapsed_now()
        joint = self._feed.joint
        samples = self._step.count_examples(batch) if joint is None else joint.next_examples
        call.before_step = before.advance(samples=samples, time=progress.time(), steps=call.updates)
        return call.before_step

    # Several steps in one dispatch --------------------------------------------------------------------

    def set_steps_per_dispatch(self, value: int | Literal["auto"]) -> None:
        """Sets `steps_per_dispatch` for later calls. Raises an error if the steps can't be fused."""
        name = type(self._loop).__name__
        if value == "auto":
            # The measurements of the processes would differ.
            self.steps_per_dispatch = 1 if self._job.is_shared else None
            return
        checks.check_positive(f"{name}.steps_per_dispatch", value)
        if value > 1 and checks.is_user_defined(self._loop, "_run_one_step"):
            raise ValueError(
                f"{name} overrides _run_one_step, which is called once per step. Use steps_per_dispatch=1, or don't "
                "override it."
            )
        if value > 1:
            Program(self._step, evaluates=self.evaluates).check_fuses()
        self.steps_per_dispatch = int(value)

    def _find_steps_per_dispatch(self, state: Any, feed: Feed) -> None:
        """Determines the faster number of steps per dispatch on copies of the state, and puts the batches back."""
        with self._progress.stopwatch.counting("data"):
            batches = feed.take(STEPS_TRIED)
        try:
            evaluates = not self.call.trains
            if len(batches) == STEPS_TRIED:
                self.steps_per_dispatch = find_steps_per_dispatch(self._step, state, batches, evaluates=evaluates)
            elif evaluates:  # Later evaluations read the same data.
                self.steps_per_dispatch = 1
        except Exception as error:  # A step that fails will fail again when it really runs, with its usual note.
            logging.warning("steps_per_dispatch='auto' uses 1, because the measurement failed: %r", error)
            self.steps_per_dispatch = 1
        finally:
            feed.put_back(batches)

    # The data ----------------------------------------------------------------------------------------

    def _feed_of(self, dataset: Iterator[types.Batch]) -> Feed:
        """Returns an iterator's feed. It is reused for the same iterator, so that batches read ahead aren't lost."""
        if self._feed.dataset is not dataset:
            read = self._loop._get_next_batch if checks.is_user_defined(self._loop, "_get_next_batch") else None
            self._feed = Feed(dataset, read, self._join if self._job.is_shared else None)
            if not self.evaluates:
                found = indexed(dataset)
                self._step.batch_watch.declared_sizes = () if found is None else found.batch_sizes
        return self._feed

    def _join(self, read: Callable[[], types.Batch]) -> agreement.JointReader:
        """Returns a reader that reads batches jointly with the other processes."""
        stopwatch = self._progress.stopwatch

        def timed() -> types.Batch:
            began = stopwatch.clock()
            try:
                return read()
            finally:
                stopwatch.secs_reading += stopwatch.clock() - began

        return agreement.JointReader(
            repr(self._loop),
            timed,
            before_reading=lambda: self.source.mark(if_cheap=True),
            count=self._step.count_examples,
            requests=self._job.requests,
            secs=self._progress.stopwatch.training_secs,
            on_difference=self._step.batch_watch.expect_differences,
            fill_to=self._step.filler(),
            until_all_processes_end=not self.call.trains,
        )

    def has_ended(self) -> bool:
        """Returns True if the end of the data has been reached."""
        return self._feed.has_ended

    def has_more(self, before_reading: Callable[[], None]) -> bool:
        """Tries to read the next batch in advance, after calling `before_reading`. Returns True if there is one."""
        self.call.place = "the dataset"
        if not self._feed.ahead:
            before_reading()
        with self._progress.stopwatch.counting("data"):
            return self._feed.has_more()

    def next_batch(self, dataset: Iterator[types.Batch], state: Any) -> types.Batch:
        """Returns the batch that the next step would receive if it ran on this state."""
        return self._feed_of(dataset).reader_fn()()

    def set_source(self, source: Any) -> None:
        """Sets the source that counts the next call's batches. Pass None if there is no source.

        Counting continues from the source's current count.
        """
        self.source = source
        self.call.consumed = 0 if source is None else source.count - self.batches_ahead(source)

    def batches_ahead(self, source: Any) -> int:
        """Returns the number of batches that have been read from a source but not yet used."""
        return self._feed.num_ahead if self._feed.dataset is source else 0

    def forget_batches(self) -> None:
        """Drops the batches that were read ahead, together with their iterator.

        Call this when the iterator has ended or was moved to a different position.
        """
        self._feed, self.source, self.call.consumed = Feed(iter(())), _NoSource(), 0

    # Outputs -----------------------------------------------------------------------------------------

    def push(self, state: Any, num_steps: int) -> None:
        """Starts copying the latest steps' outputs to the host, and collects the outputs that have arrived."""
        if num_steps:
            assert self.call.queue is not None
            self._receive(self.call.queue.push(num_steps, state))
        self._check_count(state)
        self._check_batches(self.guard.look(state, in_step=self._job.is_shared))

    def fetch(self, *, keep_sums: bool = False) -> None:
        """Waits for the outputs of all steps so far.

        Unless `keep_sums` is True, the sums of `clu.metrics` are then reset.
        """
        if self.call.queue is not None:
            arrived, sums = self.call.queue.drain(keep_sums=keep_sums)
            self._receive(arrived)
            self.ledger.sums.update(sums)
        self.count_weights()

    def _receive(self, arrived: Arrived) -> None:
        """Adds outputs to the ledger once they have arrived on the host."""
        update = self._loop.update_outputs if checks.is_user_defined(self._loop, "update_outputs") else None
        keeps_parts, keeps_loops = self.readers()
        self.ledger.add(arrived, update, keeps_parts=keeps_parts, keeps_loops=keeps_loops)

    def newest_scalars(self) -> dict[str, Any]:
        """Returns the latest scalars that have already been computed. Never blocks."""
        return (self.call.queue and self.call.queue.newest_scalars()) or metrics.newest_scalars(self.ledger.loop)

    def count_weights(self) -> None:
        """Counts the latest steps in the ledger, weighting each by its number of examples."""
        call = self.call
        self._check_batches(self.guard.read(call.state))
        if new := self.guard.newly_skipped():
            logging.warning(
                "%r skipped %d step%s with values that are not finite, the first of them step %d: %s.",
                self._loop,
                len(new),
                "s" if len(new) > 1 else "",
                self._step_at(new[0].index),
                ", ".join(new[0].names[:6]),
            )
        self.ledger.count(self.guard.weights(call.num_examples)[call.settled :])
        call.settled = len(call.num_examples)

    # Checks of the state -------------------------------------------------------------------------------

    def _check_batches(self, bad: nonfinite.Found | None) -> None:
        if bad is not None and self.guard.bad is None:
            self.guard.bad = nonfinite.NonFiniteError(self._step_at(bad.index), bad.names)
            self.call.failed_step = self.guard.bad.step_num
            if not self.call.is_failing:
                raise self.guard.bad

    def _step_at(self, index: int) -> int:
        """Returns the step number after the loop's batch with this index."""
        return self._progress.steps - (len(self.call.num_examples) - 1 - index) * self.call.updates

    def _check_count(self, state: Any) -> None:
        """Raises an error if `state.step` would overflow or, after the first steps, differs from the loop's count."""
        if not self.checks_count or not self.call.trains or not hasattr(state, "step"):
            return
        step_num, batches = self._progress.steps, len(self.call.num_examples)
        most_steps = self._max_steps or np.iinfo(getattr(state.step, "dtype", np.int64)).max
        if step_num > most_steps:
            raise ValueError(
                f"state.step ({checks.describe(state.step)}) can't count beyond {most_steps}, but step {step_num} was "
                "reached. Begin with a smaller state.step."
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
        """Collects the outputs of the steps that were completed before an exception ended the loop."""
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
        """Returns the reason why the state after the last completed step can't be used, or None if it can be used."""
        if self.guard.bad is not None:
            return "it has values that are not finite"
        if not checks.is_alive(self.call.state):
            return "it was donated to the step that failed"
        try:
            self._check_count(self.call.state)
        except Exception as error:  # Includes device errors, which are raised when the count is read.
            return str(error)
        return None


class _NoSource:
    """A stand-in for the source in a standalone loop. It doesn't count anything."""

    count = 0

    def mark(self, *, if_cheap: bool = False) -> None:
        pass
