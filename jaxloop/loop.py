"""A bounded series of steps over one dataset."""

import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, final

from absl import logging

from jaxloop import agreement, checks, interrupt, metrics, partition, timing, types
from jaxloop.feed import Feed, as_iterator
from jaxloop.ledger import Ledger
from jaxloop.output_queue import Arrived, OutputQueue
from jaxloop.program import STEPS_TRIED, Program, Stretch, find_steps_per_dispatch
from jaxloop.progress import Progress
from jaxloop.schedules import NEVER, Elapsed
from jaxloop.step import Step
from jaxloop.types import Batch as Batch
from jaxloop.types import BatchSpec as BatchSpec
from jaxloop.types import Output as Output
from jaxloop.types import State as State

# Of how many steps the devices keep scalars until somebody asks for them.
_MOST_STEPS_HELD = 1024


class Loop:
    """Runs a step on one batch after another.

    A call goes `begin -> run -> end`.

    Hooks:
      begin: before the first step of a loop, once; returns the state and the iterator to draw batches from. A run that
        resumes inside a loop calls it again only if it had returned another iterator than it was given, and then drops
        the state that it returns.
      run: then; to take the steps is its work, so call that of `super()`.
      end: after the last step, with the outputs on the host; not where the data had no batch.
      update_outputs: for each step, in order, when its outputs have reached the host, which is some steps later.
      _get_next_batch: `(dataset)`, for each batch, to draw it.
      _run_one_step: `(state, batch, per_loop_step_number)`, for each batch, to take its step; with one of its own, a
        loop takes none of the shorter ways.

    >>> from jaxloop import examples
    >>> step, state, batches = examples.tiny_regression()
    >>> state, outputs = Loop(step)(state, iter(batches), num_steps=3)
    >>> int(state.step), len(outputs["loss"])
    (3, 3)

    Args:
      step: what happens to one batch.
      clock: tells the time in seconds, for durations.
      max_steps_in_flight: how many steps the host may be ahead of the devices; then it waits for them. None for 64, on
        a CPU for 4 dispatches where those are more, and for 8 where several devices are one CPU.

    Attributes:
      steps_before: how many batches of the next loop an earlier run has trained on; the next call resumes after them.
      source: what counts the batches that are drawn in its `count`; an `OuterLoop`, which keeps the position in the
        data, sets it.
    """

    def __init__(
        self, step: Step, *, clock: Callable[[], float] = time.perf_counter, max_steps_in_flight: int | None = None
    ):
        if not isinstance(step, Step):
            raise TypeError(f"{type(self).__name__} takes a jaxloop Step, got {step!r}.")
        checks.check_positive("max_steps_in_flight", max_steps_in_flight, optional=True)
        self._given_max_in_flight = max_steps_in_flight
        self._step = step
        self._steps_at_once: int | None = 1  # None until it is found out.
        self._evaluates = False  # Whether no call of it changes the state.
        is_shared = agreement.is_shared(step.partitioner.mesh)
        self._interrupt = interrupt.Interruptible(defers=is_shared)
        self._job = agreement.Job(is_shared, self._interrupt)
        self._progress = Progress(clock, is_shared=is_shared)
        self._ledger = Ledger()
        self._feed = Feed(iter(()))
        self._call = Call(None)
        self._rescue: tuple[Any, str | None] = (None, None)
        self._began: bool | None = None  # None before `begin`; then, whether it has returned another iterator.
        self._known_step: Any = None  # The `state.step` array whose value has been counted.
        self.steps_before: int = 0
        self.source: Any = _Uncounted()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._step!r})"

    @property
    def step(self) -> Step:
        """What happens to one batch."""
        return self._step

    @property
    def step_num(self) -> int:
        """The number of completed updates (`state.step`) as of the last step, counted on the host.

        For a state without `step`, the number of steps that this loop has run.
        """
        return self._progress.steps + self._call.uncounted * self._updates if self._trains else self._progress.steps

    @property
    def _trains(self) -> bool:
        return self._call.trains

    @property
    def _updates(self) -> int:
        """By how much a batch advances the count: an evaluation counts batches."""
        return self._step.updates_per_step if self._trains else 1

    @property
    def num_examples(self) -> list[int]:
        """How many examples each step of the last loop had."""
        return self._call.num_examples

    @property
    def elapsed(self) -> Elapsed:
        """How far the training is, with `previous` a step earlier. Its `time` is what this loop has spent on training.

        A state that is not the one this loop returned last begins anew: samples and time are zero then. Call `resume`
        to go on with those of an earlier run.
        """
        newest = self._progress.newest
        same = (newest.steps, newest.loops) == (self._progress.steps, self._progress.loops)
        return newest if same else self._look()

    @property
    def progress(self) -> Progress:
        """What counts its steps."""
        return self._progress

    @property
    def spent(self) -> timing.Spent:
        """What this loop has spent its time on, in all its calls."""
        return self.stopwatch.spent()

    @property
    def stopwatch(self) -> timing.Stopwatch:
        """What counts `spent`: for time that goes to something else inside, and to evaluations between two calls."""
        return self._progress.stopwatch

    @property
    def _max_in_flight(self) -> int:
        mesh, at_once = self._step.partitioner.mesh, self._steps_at_once or 1
        return self._given_max_in_flight or partition.max_steps_in_flight(mesh, at_once)

    def description(self) -> list[str]:
        """What must be the same in all processes of a job, a line each."""
        return [repr(self), f"  {self._step!r}", f"  max_steps_in_flight={self._max_in_flight}"]

    def compile(self, state: Any, batch: types.BatchSpec) -> None:
        """Compiles ahead all that this loop will run on batches like this one: its first step then waits for nothing.

        >>> from jaxloop import examples
        >>> step, state, batches = examples.tiny_regression()
        >>> loop = Loop(step)
        >>> loop.compile(state, batches[0])
        >>> state, outputs = loop(state, batches, num_steps=3)

        Args:
          state: a state such as the loop will be called with; it stays usable.
          batch: as the dataset gives it, or its shapes, see `Step.compile`.
        """
        at_once = STEPS_TRIED if self._steps_at_once is None else self._steps_at_once
        for number in sorted({at_once, 1}, reverse=True):
            self._step.compile(state, batch, evaluates=self._evaluates, steps_per_dispatch=number)

    def resume(self, elapsed: Elapsed) -> None:
        """Goes on counting from where an earlier run, in this process or another, left off."""
        self._progress.resume(elapsed)

    @property
    def was_interrupted(self) -> bool:
        """Whether Ctrl-C, or SIGTERM, cut the last call short: it would have had more steps to do."""
        return self._call.was_interrupted

    @property
    def batches_consumed(self) -> int:
        """What `source` had counted when the last whole step was done."""
        return self._call.consumed

    @property
    def rescued_state(self) -> Any:
        """The state as of the last whole step of a call that an exception ended; None after other calls.

        None too where the failing step had taken the state over already.
        """
        return self._rescue[0]

    @property
    def rescue_problem(self) -> str | None:
        """The reason why `rescued_state` is None, if an exception ended the last call."""
        return self._rescue[1]

    # A call ------------------------------------------------------------------------------------------

    def __call__(
        self,
        state: Any,
        dataset_iterator: Iterable[types.Batch] | None,
        num_steps: int | None = None,
        return_state_from_step: bool = True,
    ) -> tuple[Any, metrics.LoopOutputs]:
        """Runs at most `num_steps` batches; a dataset that ends before ends the loop.

        So does Ctrl-C, after the step in flight; then `outputs[STOP_LOOP]` is True. A second one within two seconds
        raises `KeyboardInterrupt`. Of a dataset without a batch comes an empty dict, and `end` is not called.

        Args:
          state: the train state. It is donated, unless `return_state_from_step` is False.
          dataset_iterator: the batches; an iterable is run through from its start. None for a step that needs no data:
            `run` gets None as its batch, and `num_steps` ends the loop.
          num_steps: how many steps, that is updates, see `Step.updates_per_step`; None for all batches there are.
          return_state_from_step: False to give every step the same state, and to return that: then the steps can't
            change it.

        Returns:
          `(state, outputs)`, where `outputs[name]` is the list of that output's values, one per step, on the host.

        Raises:
          Whatever a hook, an action or the dataset raises, with a note of where and after which step. The state as of
          the last whole step is then in `rescued_state`.
        """
        checks.check_positive("num_steps", num_steps, optional=True)
        if dataset_iterator is None and num_steps is None:
            raise ValueError(f"{type(self).__name__} got no data, so nothing ends it: give num_steps.")
        if return_state_from_step:
            checks.check_multiple("num_steps", num_steps, self._step)
        return self._run_loops(state, dataset_iterator, lambda: num_steps, trains=return_state_from_step)

    def _run_loops(
        self, state: Any, dataset: Any, steps_of_loop: Callable[[], int | None], *, trains: bool
    ) -> tuple[Any, metrics.LoopOutputs]:
        """Runs loops, one after the other as long as `_goes_on` says; returns the outputs of the last one.

        Args:
          state: see `__call__`.
          dataset: likewise.
          steps_of_loop: returns how many steps the next loop has at most; None for no limit.
          trains: whether the steps change the state.
        """
        self._call = call = Call(self._step.prepare_state(state), self.source.count, trains=trains)
        self._rescue = (None, None)
        self._begin_counting(call.state)
        outputs = metrics.LoopOutputs()
        try:
            with self._interrupt, self.stopwatch.counting("rest"):
                self._prepare_call()
                while True:
                    self._begin_loop()
                    state, iterator = self._begin(call.state, dataset)
                    state, found = self.run(state, iterator, steps_of_loop())
                    self._progress.count_loop(len(call.num_examples))
                    if call.num_examples or self.steps_before:  # Else there was no batch: there is nothing to end.
                        state, outputs = self._end_loop(state, found)
                    elif call.has_passed_end:  # It turns out that this was the last one.
                        call.was_interrupted = False  # It was not amid a loop.
                        state, outputs = self._end_by_hook(state, self._ledger.ended)
                    call.state = state
                    if not self._goes_on(outputs):
                        break
                if self._interrupt.outermost is self._interrupt:
                    self._job.any_stops()  # Of a signal that came since the last batch.
        except BaseException as error:
            if not call.is_failing:  # Between two loops: else it was done where the loop has failed.
                self._rescue_outputs(error)
            problem = self._why_not_rescued()
            self._rescue = (call.state if problem is None else None, problem)
            raise
        finally:
            call.state = None  # It is the caller's.
            if call.made_iterator:  # Nobody goes on from here: what draws ahead may end.
                self.forget_batches()
        self._known_step = getattr(state, "step", None)
        if self._interrupt.requested:
            outputs[types.STOP_LOOP] = True
        return state, outputs

    def _begin_counting(self, state: Any) -> None:
        """Counts on from where a state is; anew, where it is not the one that this loop has returned."""
        step_num = self._read_step_num(state)
        if step_num != self._progress.steps and self._trains:
            self.resume(Elapsed(step_num, loops=self._progress.loops))
        self._progress.steps = step_num
        if self._trains:
            checks.mark_taken(state, f"{self!r}, which began at step {step_num},")

    def _prepare_call(self) -> None:
        """Called before the hooks of each call."""
        self._began = None
        self._ledger.begin_loop()

    def _begin_loop(self) -> None:
        """Called before the hooks of each loop."""
        self._call.begin_loop()
        self._progress.begin_loop()

    def _goes_on(self, outputs: metrics.LoopOutputs) -> bool:
        """Returns whether another loop follows in this call."""
        return False

    def _begin(self, state: Any, dataset: Any) -> tuple[Any, Iterator[types.Batch]]:
        """Begins a loop, unless an earlier call has begun it."""
        if self._began is not None:
            begin = self.begin if self._began else functools.partial(Loop.begin, self)
            return state, begin(state, dataset)[1]
        state, iterator = self.begin(state, dataset)
        self._began = hasattr(dataset, "__next__") and iterator is not dataset
        return state, iterator

    def begin(self, state: Any, dataset: Any) -> tuple[Any, Iterator[types.Batch]]:
        """Runs before the first step of a loop; returns the state and the iterator to draw batches from."""
        iterator = as_iterator(dataset)
        self._call.made_iterator = iterator is not dataset
        return state, iterator

    def _end_loop(self, state: Any, outputs: metrics.LoopOutputs) -> tuple[Any, metrics.LoopOutputs]:
        """Ends a loop with its outputs."""
        return self._end_by_hook(state, _weighted(outputs, self._ledger.weights))

    def _end_by_hook(self, state: Any, outputs: metrics.LoopOutputs) -> tuple[Any, metrics.LoopOutputs]:
        weights = list(outputs.num_examples)
        state, ended = checks.check_result(self.end(state, outputs), f"{type(self).__name__}.end")
        return state, _weighted(ended, weights)

    def end(self, state: Any, outputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Runs after the last step, with the `LoopOutputs` on the host."""
        return state, outputs

    def update_outputs(self, loop_outputs: metrics.LoopOutputs, step_outputs: types.Output) -> metrics.LoopOutputs:
        """Adds the outputs of one step, in order, to those of the loop; returns the latter.

        Called some steps later than the step itself ran, when its values have reached the host, and without
        `clu.metrics`, which are merged on the device.
        """
        for name, value in (step_outputs or {}).items():
            loop_outputs.setdefault(name, []).append(value)
        return loop_outputs

    # The steps of a loop -----------------------------------------------------------------------------

    def run(self, state: Any, dataset: Iterator[types.Batch], num_steps: int | None) -> tuple[Any, Any]:
        """Repeats the step; returns the newest state and the outputs of all steps.

        Of a loop of whose end nobody is to hear there are none; and loops before the last one may have ended inside.
        """
        call = self._call
        num_batches = None if num_steps is None else num_steps // self._updates
        feed = self._begin_drawing(dataset, num_batches)
        if not self._trains:
            self._step.begin_evaluation()
        try:
            state = self._step.prepare_state(state)
            if call.program is None:
                call.program, call.queue = self._new_program(), self._new_queue()
            step, secs = self._next_moment() if self._trains else NEVER
            while call.left(num_batches):
                state = self._take_up_to(step, secs, call.left(num_batches), state, feed)
                if feed.has_ended:
                    call.data_ended = True
                    break
                if self._interrupt.requested:
                    call.was_interrupted = call.left(num_batches) > 0
                    break
                if call.left(num_batches) and self._has_come(step, secs):
                    now = self._now(self._progress.loops)
                    # The loop goes on only if there is a batch. After its last step, `end` does what is to be done.
                    if now.is_last or not self._has_more(feed, now):
                        call.data_ended = feed.has_ended
                        break
                    call.place = "the actions"
                    checks.mark_taken(state, repr(self))  # Somebody may keep this state, which the next step takes.
                    if not self._at_moment(now, state):
                        call.was_interrupted = self._interrupt.requested
                        break
                    step, secs = self._next_moment()
                call.place = "the dataset"
            call.place = self._step
            return state, self._outputs_of_loop()
        except BaseException as error:
            self._rescue_outputs(error)
            self._count_rescued_step()
            error.add_note(f"in {call.place}, after step {self._progress.steps}, in {self!r}")
            raise
        finally:
            if call.program is not None and call.state is not None:
                self._step.remember(call.state)

    def _outputs_of_loop(self) -> metrics.LoopOutputs:
        """Returns the outputs of a loop after its last step."""
        self._fetch()
        return self._ledger.whole_loop()

    def _begin_drawing(self, dataset: Iterator[types.Batch], num_batches: int | None) -> Feed:
        feed = self._feed_of(dataset)
        feed.begin(num_batches)
        if self._job.is_shared and not feed.num_ahead:
            self.source.mark()  # From here on batches are drawn ahead, so that some sources can't say where they are.
        self._call.consumed = self.source.count - feed.num_ahead
        self._call.place = "the dataset"
        return feed

    def _has_come(self, step: int, secs: float) -> bool:
        """Returns whether a step, or a time by the stopwatch, has come."""
        return self._progress.steps >= step or (secs < math.inf and self._progress.secs() >= secs)

    def _has_more(self, feed: Feed, now: Elapsed) -> bool:
        """Returns whether there is another batch, which is drawn ahead."""
        self._call.place = "the dataset"
        if not feed.ahead:
            self._before_drawing_ahead(now)
        with self.stopwatch.counting("data"):
            return feed.has_more()

    def _take_up_to(self, step: int, secs: float, left: int, state: Any, feed: Feed) -> Any:
        """Takes some of the steps that are left, up to where something is due; returns the newest state."""
        call = self._call
        program, queue = call.program, call.queue
        assert program is not None and queue is not None
        clock_is_shared = self._job.is_shared and secs < math.inf  # It goes on step by step.
        if program.own is not None or clock_is_shared:
            room = 1
        else:
            room = min(left, -(-(step - self._progress.steps) // self._updates))
        if self._steps_at_once is None and room >= STEPS_TRIED:
            self._find_steps_at_once(state, feed)
            queue.max_steps_in_flight = self._max_in_flight
        stretch = Stretch(state, queue.newest, call.num_examples, self.stopwatch.clock, self._interrupt.outermost)
        if not self._job.is_shared:
            stretch.deadline = self.stopwatch.reading_at(secs)
        try:
            at_once = self._steps_at_once or 1
            has_taken = 1 < at_once <= room and program.take_group(stretch, feed, at_once)
            if not has_taken and not feed.has_ended:
                program.take(stretch, feed, min(room, queue.room))
        except BaseException as error:
            self._end_by(error, stretch)
            raise
        self.stopwatch.move(stretch.secs_in_data, "data")
        self._progress.secs_before = self.stopwatch.training_at(stretch.before)
        self._push(stretch.state, self._count_steps())
        return stretch.state

    def _new_program(self) -> Program:
        """Returns what takes the steps of a call."""
        program = Program(self._step, evaluates=not self._trains, own=self._take_own if self._calls_step else None)
        program.observers = self._observers()
        return program

    def _new_queue(self) -> OutputQueue:
        # An `update_outputs` of somebody's own may want to see them soon.
        most_held = None if checks.is_overridden(self, "update_outputs", Loop) else _MOST_STEPS_HELD
        return OutputQueue(self._max_in_flight, most_held, self.stopwatch, self._ledger.sums)

    @property
    def _calls_step(self) -> bool:
        """Whether `_run_one_step` is called for each batch: there is more to do than to give it to the devices."""
        has_work = self._step.work_after_run(evaluates=not self._trains) is not None
        return has_work or checks.is_of_user(self, "_run_one_step")

    def _take_own(self, state: Any, batch: types.Batch) -> tuple[Any, types.Output, int]:
        """Takes one step by `_run_one_step`."""
        call = self._call
        call.examples_at_hand = num_examples = self._step.count_examples(batch)
        state, outputs = self._run_one_step(state, batch, self.steps_before + len(call.num_examples))
        return state, outputs, num_examples

    def _get_next_batch(self, dataset: Iterator[types.Batch]) -> types.Batch:
        return next(dataset)

    def _run_one_step(self, state: Any, batch: types.Batch, per_loop_step_number: int) -> tuple[Any, types.Output]:
        if self._trains:
            elapsed = self._elapsed_after(batch) if self._step.has_schedules else None
            return self._step(state, batch, per_loop_step_number, elapsed=elapsed)
        return state, self._step.evaluate(state, batch, per_loop_step_number)

    def _observers(self) -> list[Callable[[types.Batch], None]]:
        """Returns what is called with each batch."""
        return []

    def _count_steps(self, *, undone: bool = False) -> int:
        """Counts the steps whose numbers of examples have been added; returns how many those are.

        Args:
          undone: whether another batch was drawn, whose step was not done.
        """
        call, progress = self._call, self._progress
        new = call.num_examples[call.counted :]
        if self._feed.joint is not None and new:
            new, times = zip(*self._feed.joint.counted(len(new)), strict=True)
            call.num_examples[call.counted :] = new
            progress.secs_before, progress.agreed_secs = (progress.agreed_secs or 0.0, *times)[-2:]
        call.counted += len(new)
        progress.count(new, self._updates, trains=self._trains)
        call.consumed = self.source.count - self._feed.num_ahead - undone
        return len(new)

    def _push(self, state: Any, num_steps: int) -> None:
        """Sends the outputs of the newest steps to the host, and takes in those that have arrived."""
        call = self._call
        call.state, call.place = state, self._step
        if num_steps:
            assert call.queue is not None
            self._take(call.queue.push(num_steps, state))

    # Several steps in one dispatch --------------------------------------------------------------------

    def _set_steps_per_dispatch(self, value: int | Literal["auto"]) -> None:
        """Has several steps taken in one dispatch, from the next call on; says why that can't be."""
        if value == "auto":
            # Each process would find something else.
            self._steps_at_once = 1 if self._job.is_shared else None
            return
        checks.check_positive(f"{type(self).__name__}.steps_per_dispatch", value)
        if value > 1 and checks.is_of_user(self, "_run_one_step"):
            raise ValueError(
                f"{type(self).__name__} has a _run_one_step of its own, which is called for each step: leave "
                "steps_per_dispatch at 1."
            )
        if value > 1:
            Program(self._step, evaluates=self._evaluates).check_fuses()
        self._steps_at_once = int(value)

    def _find_steps_at_once(self, state: Any, feed: Feed) -> None:
        """Tries how many steps are best taken in one dispatch, on copies, with batches that are given back."""
        with self.stopwatch.counting("data"):
            batches = feed.take(STEPS_TRIED)
        try:
            evaluates = not self._trains
            if len(batches) == STEPS_TRIED:
                self._steps_at_once = find_steps_per_dispatch(self._step, state, batches, evaluates=evaluates)
            elif evaluates:  # Each time it is the same data.
                self._steps_at_once = 1
        except Exception as error:  # A step that fails does so when it is its turn, with all that belongs to it.
            logging.warning("steps_per_dispatch='auto' is 1, because to try has failed: %r", error)
            self._steps_at_once = 1
        finally:
            feed.put_back(batches)

    # The data ----------------------------------------------------------------------------------------

    def _feed_of(self, dataset: Iterator[types.Batch]) -> Feed:
        """Draws from an iterator; the same one for each call with it, for no batch to be lost that was drawn ahead."""
        if self._feed.dataset is not dataset:
            draw = self._get_next_batch if checks.is_overridden(self, "_get_next_batch", Loop) else None
            self._feed = Feed(dataset, draw, self._join if self._job.is_shared else None)
        return self._feed

    def _join(self, draw: Callable[[], types.Batch]) -> agreement.JointDraw:
        """Returns what draws batches together with the other processes."""
        return agreement.JointDraw(
            repr(self),
            draw,
            before_drawing=lambda: self.source.mark(if_cheap=True),
            count=self._step.count_examples,
            requests=self._interrupt,
            secs=self.stopwatch.training_secs,
            fill_to=self._step.filler(),
            until_all_end=not self._trains,
        )

    def draw_from(self, source: Any) -> None:
        """Has the next call count its batches by a source, from where that stands; None for no source."""
        self.source = source
        self._call.consumed = 0 if source is None else source.count - self.batches_ahead(source)

    def batches_ahead(self, source: Any) -> int:
        """How many batches were drawn from a source, and not taken."""
        return self._feed.num_ahead if self._feed.dataset is source else 0

    def forget_batches(self) -> None:
        """Drops what was drawn ahead, and what it was drawn from, which is at another place since, or at its end."""
        self._feed, self.source, self._call.consumed = Feed(iter(())), _Uncounted(), 0

    # Failures ----------------------------------------------------------------------------------------

    def _end_by(self, error: BaseException, stretch: Stretch) -> None:
        """Counts what was done before an exception of the dataset or of a step."""
        self._call.state = stretch.state
        self._count_steps(undone=stretch.is_in_step)
        if not stretch.is_in_step:
            return
        self._call.place = self._step
        if isinstance(error, Exception):
            self._call.failed_step = self._progress.steps + self._updates
        if isinstance(error, StopIteration):  # To a caller that is a generator it would be the end of its data.
            raise RuntimeError("The step raised StopIteration, as next() of an empty iterator does.") from error

    def _count_rescued_step(self) -> None:
        """Counts the step whose update was done, where only what came after that has failed."""
        if self._step.rescued_state is not None:
            self._call.state = self._step.rescued_state
            self._call.num_examples.append(self._call.examples_at_hand)
            self._count_steps()

    def _rescue_outputs(self, error: BaseException) -> None:
        """Called with an exception that ends a loop inside, for the outputs of the steps before."""

    def _why_not_rescued(self) -> str | None:
        """Says why no run may resume from the state as of the last whole step; None if one may."""
        return None if checks.is_alive(self._call.state) else "the step that failed had taken it over"

    # Moments: filled in by `ActionLoop` ----------------------------------------------------------------

    def _look(self, loops: int | None = None) -> Elapsed:
        """Returns how far the training is. Schedules in terms of time are asked from one look to the next."""
        return self._progress.look(loops)

    def _elapsed_after(self, batch: types.Batch) -> Elapsed:
        """Returns how far the training is after the step on this batch, for the step's own actions."""
        call, before = self._call, self._call.before_step
        if before is None or (before.steps, before.loops) != (self._progress.steps, self._progress.loops):
            before = self._look()
        joint = self._feed.joint
        samples = self._step.count_examples(batch) if joint is None else joint.next_examples
        call.before_step = before.advance(samples=samples, time=self._progress.time(), steps=self._updates)
        return call.before_step

    def _next_moment(self) -> tuple[int, float]:
        """Returns the step, and the time by the stopwatch, from which on `_at_moment` wants to be called."""
        return NEVER

    def _now(self, loops: int) -> Elapsed:
        """Returns what `_look` does, and whether this is the last step of the run."""
        return self._look(loops)

    def _before_drawing_ahead(self, now: Elapsed) -> None:
        """Called at a moment, while `source` stands after the batch of that step."""

    def _at_moment(self, now: Elapsed, state: Any) -> bool:
        """Called at a moment inside a loop; returns whether the loop goes on."""
        raise NotImplementedError

    # Outputs -----------------------------------------------------------------------------------------

    def _weights(self) -> list[int]:
        """Returns for each step of the loop how many examples its values stand for."""
        return self._call.num_examples

    def _take(self, arrived: Arrived) -> None:
        """Takes in the outputs of steps that have reached the host."""
        update = self.update_outputs if checks.is_overridden(self, "update_outputs", Loop) else None
        keeps_parts, keeps_loops = self._series_read()
        self._ledger.take(arrived, update, keeps_parts=keeps_parts, keeps_loops=keeps_loops)

    def _series_read(self) -> tuple[bool, bool]:
        """Returns whether somebody reads the parts, and the loops, of the ledger."""
        return False, False

    def _count_weights(self) -> None:
        call = self._call
        self._ledger.count(self._weights()[call.settled :])
        call.settled = len(call.num_examples)

    def _fetch(self, *, keep_sums: bool = False) -> None:
        """Waits for the outputs of all steps so far, and takes them in; ends their sums, unless they go on."""
        if self._call.queue is not None:
            arrived, sums = self._call.queue.drain(keep_sums=keep_sums)
            self._take(arrived)
            self._ledger.sums.update(sums)
        self._count_weights()

    def _read_step_num(self, state: Any) -> int:
        count = getattr(state, "step", None)
        if count is None or count is self._known_step:
            return self._progress.steps  # Reading it would wait for the device.
        return int(metrics.fetch(count))


@final
class Call:
    """One call of a loop.

    Attributes:
      state: the state as of the last whole step; None when the call is over.
      trains: whether the steps change the state.
      consumed: what the source had counted when the last whole step was done.
      program: takes the steps; None before the first.
      queue: takes their outputs to the host; likewise.
      num_examples: of each step of the loop, how many examples it had.
      counted: how many of these have been counted in the progress.
      settled: how many of these have been counted in the ledger.
      passed: how many batches were taken since `run` was called that belong to loops before this one.
      silent_ends: where loops end, by step, among those that `run` takes now, and nobody is to hear of it.
      has_passed_end: whether the end of the last loop was passed, and nobody has heard of it.
      end: how far the training was at that end.
      place: where an exception comes from: the step, or words.
      was_interrupted: whether a signal ended it amid a loop.
      data_ended: whether the data have.
      made_iterator: whether the iterator of the data was made in it.
      is_failing: whether an exception is ending it.
      failed_step: the step that raised, if one has.
      before_step: how far the training was after the newest step, for the step's own actions.
      examples_at_hand: how many examples the step under way has, if it is taken by `_run_one_step`.
    """

    def __init__(self, state: Any, consumed: int = 0, *, trains: bool = True):
        self.state: Any = state
        self.trains: bool = trains
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
        self.end: Elapsed | None = None

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


def _weighted(outputs: Any, weights: list[int]) -> metrics.LoopOutputs:
    """Returns what a hook has made of the outputs of a loop as outputs with these weights."""
    if not isinstance(outputs, metrics.LoopOutputs):
        outputs = metrics.LoopOutputs(outputs)
    outputs.num_examples = list(weights)
    return outputs


class _Uncounted:
    """In the place of a source, for a loop on its own."""

    count = 0

    def mark(self, *, if_cheap: bool = False) -> None:
        pass
