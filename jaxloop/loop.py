"""A bounded series of steps over one dataset. The only place that repeats steps."""

import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

from absl import logging

from jaxloop import agreement, checks, interrupt, metrics, partition, timing, types
from jaxloop.feed import Feed, as_iterator
from jaxloop.ledger import Ledger
from jaxloop.output_queue import Arrived, OutputQueue
from jaxloop.program import STEPS_TRIED, Program, Stretch, find_steps_per_dispatch
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
        self._returns_new_state = True
        self._step_num = 0
        self._samples = 0
        self._stopwatch = timing.Stopwatch(clock)
        self._time_offset = 0.0  # Training time of earlier runs, less what the stopwatch had counted then.
        self._time_before_step = 0.0  # By the stopwatch.
        self._feed = Feed(iter(()))
        self._looked = Elapsed()  # How far the training was at the last look.
        self._before_step = Elapsed()  # For the step's own actions: how far it was after the step before.
        self._num_examples: list[int] = []
        self._counted = 0  # Of these.
        self._ledger = Ledger()
        self._settled = 0  # How many steps of the call it has counted.
        self._known_step: Any = None  # The `state.step` array whose value is `_step_num`.
        self._newest_state: Any = None  # During a call, the state as of the last whole step.
        self._rescued_state: Any = None
        self._rescue_problem: str | None = None
        self._has_begun = False  # Whether `begin` was called for the loop that the next call runs.
        self._wraps_dataset = False  # Whether it returned another iterator than it was given.
        is_shared = agreement.is_shared(step.partitioner.mesh)
        self._agreed_secs = 0.0  # With other processes: what the stopwatch of the first has counted.
        self._interrupt = interrupt.Interruptible(defers=is_shared)
        self._job = agreement.Job(is_shared, self._interrupt)
        self._was_interrupted = self._made_iterator = False
        self._consumed = 0
        self._steps_at_once: int | None = 1  # None until it is found out.
        self._evaluates = False  # Whether no call of it changes the state.
        self._place = self._step_name = ""  # Where an exception has come from.
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
        taken = len(self._num_examples) - self._counted if self._returns_new_state else 0
        return self._step_num + taken * self._updates

    @property
    def _updates(self) -> int:
        """By how much a batch advances the count: an evaluation counts batches."""
        return self._step.updates_per_step if self._returns_new_state else 1

    @property
    def num_examples(self) -> list[int]:
        """How many examples each step of the last call had."""
        return self._num_examples

    @property
    def elapsed(self) -> Elapsed:
        """How far the training is, with `previous` a step earlier. Its `time` is what this loop has spent on training.

        A state that is not the one this loop returned last begins anew: samples and time are zero then. Call `resume`
        to go on with those of an earlier run.
        """
        looked = self._looked
        same = (looked.steps, looked.loops) == (self._step_num, self._loops_ended())
        return looked if same else self._look(self._loops_ended())

    @property
    def spent(self) -> timing.Spent:
        """What this loop has spent its time on, in all its calls."""
        return self._stopwatch.spent()

    @property
    def stopwatch(self) -> timing.Stopwatch:
        """What counts `spent`: for time that goes to something else inside, and to evaluations between two calls."""
        return self._stopwatch

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
        self._step_num, self._samples = elapsed.steps, elapsed.samples
        self._time_offset = elapsed.time - self._clock_secs()
        self._looked = elapsed.without_previous()

    @property
    def was_interrupted(self) -> bool:
        """Whether Ctrl-C, or SIGTERM, cut the last call short: it would have had more steps to do."""
        return self._was_interrupted

    @property
    def data_have_ended(self) -> bool:
        """Whether the last call asked its data for another batch, and there was none."""
        return self._feed.has_ended

    @property
    def batches_consumed(self) -> int:
        """What `source` had counted when the last whole step was done."""
        return self._consumed

    @property
    def rescued_state(self) -> Any:
        """The state as of the last whole step of a call that an exception ended; None after other calls.

        None too where the failing step had taken the state over already.
        """
        return self._rescued_state

    @property
    def rescue_problem(self) -> str | None:
        """The reason why `rescued_state` is None, if an exception ended the last call."""
        return self._rescue_problem

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
        self._returns_new_state = return_state_from_step
        if return_state_from_step:
            checks.check_multiple("num_steps", num_steps, self._step)
        self._num_examples, self._counted, self._settled = [], 0, 0
        self._rescued_state = None
        self._was_interrupted = self._made_iterator = False
        self._consumed = self.source.count
        self._newest_state = self._step.prepare_state(state)
        step_num = self._read_step_num(self._newest_state)
        if step_num != self._step_num and return_state_from_step:
            self.resume(Elapsed(step_num, loops=self._loops_ended()))
        self._step_num = step_num
        if return_state_from_step:
            checks.mark_taken(self._newest_state, f"{self!r}, which began at step {self._step_num},")
        try:
            with self._interrupt, self._stopwatch.counting("rest"):
                self._prepare_call()
                state, dataset = self._begin(self._newest_state, dataset_iterator)
                state, outputs = self.run(state, dataset, num_steps)
                weights = list(self._ledger.weights)
                outputs = _weighted(outputs, weights)
                if self._num_examples or self.steps_before:  # Else the dataset was empty: there is nothing to end.
                    state, outputs = checks.check_result(self.end(state, outputs), f"{type(self).__name__}.end")
                if self._interrupt.outermost is self._interrupt:
                    self._job.any_stops()  # Of a signal that came since the last batch.
        except BaseException:
            self._rescue_problem = self._why_not_rescued()
            self._rescued_state = self._newest_state if self._rescue_problem is None else None
            raise
        finally:
            self._newest_state = None  # It is the caller's.
            if self._made_iterator:  # Nobody goes on from here: what draws ahead may end.
                self.forget_batches()
        self._known_step = getattr(state, "step", None)
        outputs = _weighted(outputs, weights)
        if self._interrupt.requested:
            outputs[types.STOP_LOOP] = True
        return state, outputs

    def _prepare_call(self) -> None:
        """Called before the hooks of each call."""
        self._has_begun = False

    def _begin(self, state: Any, dataset: Any) -> tuple[Any, Iterator[types.Batch]]:
        """Begins a call, and a loop, unless an earlier call has begun it."""
        if self._has_begun:
            begin = self.begin if self._wraps_dataset else functools.partial(Loop.begin, self)
            return state, begin(state, dataset)[1]
        self._ledger.begin_loop()
        state, iterator = self.begin(state, dataset)
        self._has_begun, self._wraps_dataset = True, hasattr(dataset, "__next__") and iterator is not dataset
        return state, iterator

    def begin(self, state: Any, dataset: Any) -> tuple[Any, Iterator[types.Batch]]:
        """Runs before the first step of a loop; returns the state and the iterator to draw batches from."""
        iterator = as_iterator(dataset)
        self._made_iterator = iterator is not dataset
        return state, iterator

    def run(self, state: Any, dataset: Iterator[types.Batch], num_steps: int | None) -> tuple[Any, metrics.LoopOutputs]:
        """Repeats the step; returns the newest state and the outputs of all steps."""
        num_batches = num_steps and num_steps // self._updates
        queue, feed, program = self._new_queue(), self._begin_drawing(dataset, num_batches), None
        due = self._next_event() if self._returns_new_state else NEVER
        if not self._returns_new_state:
            self._step.begin_evaluation()
        try:
            state = self._step.prepare_state(state)
            program = self._program()
            while len(self._num_examples) != num_batches:
                left = NEVER[0] if num_batches is None else num_batches - len(self._num_examples)
                state, arrived = self._take_up_to(due, left, program, state, feed, queue)
                self._take(arrived)
                if feed.has_ended:
                    break
                if self._interrupt.requested:
                    self._was_interrupted = len(self._num_examples) != num_batches
                    break
                if len(self._num_examples) != num_batches and self._has_come(due):
                    now = self._now(self._loops_ended())
                    # The loop goes on only if there is a batch. After its last step, `end` does what is to be done.
                    if now.is_last or not self._has_more(feed, now):
                        break
                    self._place = "the actions"
                    checks.mark_taken(state, repr(self))  # Somebody may keep this state, which the next step takes.
                    if not self._at_event(now, state, queue):
                        self._was_interrupted = self._interrupt.requested
                        break
                    due = self._next_event()
                self._place = "the dataset"
            self._place = self._step_name
            self._settle(queue)
        except BaseException as error:
            self._rescue_outputs(queue, error)
            self._count_rescued_step()
            error.add_note(f"in {self._place}, after step {self._step_num}, in {self!r}")
            raise
        finally:
            if program is not None and self._newest_state is not None:
                self._step.remember(self._newest_state)
        return state, self._ledger.whole_loop()

    def _begin_drawing(self, dataset: Iterator[types.Batch], num_batches: int | None) -> Feed:
        feed = self._feed_of(dataset)
        feed.begin(num_batches)
        if self._job.is_shared and not feed.num_ahead:
            self.source.mark()  # From here on batches are drawn ahead, so that some sources can't say where they are.
        self._consumed = self.source.count - feed.num_ahead
        self._place, self._step_name = "the dataset", repr(self._step)
        return feed

    def _has_come(self, due: tuple[int, float]) -> bool:
        """Whether a step, or a time by the stopwatch, has come."""
        step, time = due
        return self._step_num >= step or (time < math.inf and self._clock_secs() >= time)

    def _has_more(self, feed: Feed, now: Elapsed) -> bool:
        """Whether there is another batch, which is drawn ahead."""
        self._place = "the dataset"
        if not feed.ahead:
            self._before_drawing_ahead(now)
        with self._stopwatch.counting("data"):
            return feed.has_more()

    # The steps between two moments at which something else happens ---------------------------------------

    def _take_up_to(
        self, due: tuple[int, float], left: int, program: Program, state: Any, feed: Feed, queue: OutputQueue
    ) -> tuple[Any, Arrived]:
        """Takes some of the steps that are left, up to where something is due."""
        next_step, next_time = due
        if self._job.is_shared and next_time < math.inf:
            room, next_time = 1, math.inf  # All have one clock, which goes on from batch to batch.
        else:
            room = 1 if self._calls_step else min(left, -(-(next_step - self._step_num) // self._updates))
        if self._steps_at_once is None and room >= STEPS_TRIED:
            self._find_steps_at_once(state, feed)
            queue.max_steps_in_flight = self._max_in_flight
        stretch = Stretch(state, queue.newest, self._num_examples, self._stopwatch.clock, self._interrupt.outermost)
        stretch.deadline = self._stopwatch.reading_at(next_time)
        try:
            has_taken = 1 < (self._steps_at_once or 1) <= room and program.take_group(
                stretch, feed, self._steps_at_once or 1
            )
            if not has_taken and not feed.has_ended:
                program.take(stretch, feed, min(room, queue.room))
        except BaseException as error:
            self._end_by(error, stretch)
            raise
        self._stopwatch.move(stretch.secs_in_data, "data")
        self._time_before_step = self._stopwatch.training_at(stretch.before)
        return stretch.state, self._push(stretch.state, queue, self._count_steps())

    def _program(self) -> Program:
        """Returns what takes the steps of a call."""
        evaluates = not self._returns_new_state
        program = Program(self._step, evaluates=evaluates, own=self._take_own if self._calls_step else None)
        program.observers = self._observers()
        return program

    @property
    def _calls_step(self) -> bool:
        """Whether `_run_one_step` is called for each batch: there is more to do than to give it to the devices."""
        has_work = self._step.work_after_run(evaluates=not self._returns_new_state) is not None
        return has_work or checks.is_of_user(self, "_run_one_step")

    def _take_own(self, state: Any, batch: types.Batch) -> tuple[Any, types.Output, int]:
        """Takes one step by `_run_one_step`."""
        self._examples_at_hand = num_examples = self._step.count_examples(batch)
        number = self.steps_before + len(self._num_examples)
        state, outputs = self._run_one_step(state, batch, number)
        return state, outputs, num_examples

    def _end_by(self, error: BaseException, stretch: Stretch) -> None:
        """Counts what was done before an exception of the dataset or of a step."""
        self._newest_state = stretch.state
        self._count_steps(undone=stretch.is_in_step)
        if not stretch.is_in_step:
            return
        self._place = self._step_name
        if isinstance(error, Exception):
            self._note_failed_step()
        if isinstance(error, StopIteration):  # To a caller that is a generator it would be the end of its data.
            raise RuntimeError("The step raised StopIteration, as next() of an empty iterator does.") from error

    def _count_rescued_step(self) -> None:
        """Counts the step whose update was done, where only what came after that has failed."""
        if self._step.rescued_state is not None:
            self._newest_state = self._step.rescued_state
            self._num_examples.append(self._examples_at_hand)
            self._count_steps()

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

    def _feed_of(self, dataset: Iterator[types.Batch]) -> Feed:
        """Draws from an iterator; the same one for each call with it, for no batch to be lost that was drawn ahead."""
        if self._feed.dataset is not dataset:
            draw = self._get_next_batch if checks.is_overridden(self, "_get_next_batch", Loop) else None
            self._feed = Feed(dataset, draw, self._join if self._job.is_shared else None)
        return self._feed

    def _join(self, draw: Callable[[], types.Batch]) -> agreement.JointDraw:
        """What draws batches together with the other processes."""
        return agreement.JointDraw(
            repr(self),
            draw,
            before_drawing=lambda: self.source.mark(if_cheap=True),
            count=self._step.count_examples,
            requests=self._interrupt,
            secs=self._stopwatch.training_secs,
            fill_to=self._step.filler(),
            until_all_end=not self._returns_new_state,
        )

    def batches_ahead(self, source: Any) -> int:
        """How many batches were drawn from a source, and not taken."""
        return self._feed.num_ahead if self._feed.dataset is source else 0

    def forget_batches(self) -> None:
        """Drops what was drawn ahead, and what it was drawn from, which is at another place since, or at its end."""
        self._feed, self.source, self._consumed = Feed(iter(())), _Uncounted(), 0

    def _new_queue(self) -> OutputQueue:
        # An `update_outputs` of somebody's own may want to see them soon.
        most_held = None if checks.is_overridden(self, "update_outputs", Loop) else _MOST_STEPS_HELD
        return OutputQueue(self._max_in_flight, most_held, self._stopwatch, self._ledger.sums)

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
        with self._stopwatch.counting("data"):
            batches = feed.take(STEPS_TRIED)
        try:
            evaluates = not self._returns_new_state
            if len(batches) == STEPS_TRIED:
                self._steps_at_once = find_steps_per_dispatch(self._step, state, batches, evaluates=evaluates)
            elif evaluates:  # Each time it is the same data.
                self._steps_at_once = 1
        except Exception as error:  # A step that fails does so when it is its turn, with all that belongs to it.
            logging.warning("steps_per_dispatch='auto' is 1, because to try has failed: %r", error)
            self._steps_at_once = 1
        finally:
            feed.put_back(batches)

    def _observers(self) -> list[Callable[[types.Batch], None]]:
        """Returns what is called with each batch."""
        return []

    def _note_failed_step(self) -> None:
        """Called where a step has raised, before it was counted."""

    def _count_steps(self, *, undone: bool = False) -> int:
        """Counts the steps whose numbers of examples have been added; returns how many those are.

        Args:
          undone: whether another batch was drawn, whose step was not done.
        """
        new = self._num_examples[self._counted :]
        if self._feed.joint is not None and new:
            new, times = zip(*self._feed.joint.counted(len(new)), strict=True)
            self._num_examples[self._counted :] = new
            self._time_before_step, self._agreed_secs = (self._agreed_secs, *times)[-2:]
        self._counted += len(new)
        samples = sum(new)
        self._samples += samples
        self._stopwatch.steps += len(new) * self._updates
        self._stopwatch.samples += samples
        self._consumed = self.source.count - self._feed.num_ahead - undone
        if self._returns_new_state:
            self._step_num += len(new) * self._updates
        return len(new)

    def _push(self, state: Any, queue: OutputQueue, num_steps: int) -> Arrived:
        """Sends the outputs of the newest steps to the host; returns those that have arrived."""
        self._newest_state, self._place = state, self._step_name
        if not num_steps:
            return Arrived()
        return queue.push(num_steps, state)

    # When something happens inside the loop: what the layers above fill in ------------------------------

    def _loops_ended(self) -> int:
        return 0

    def _look(self, loops: int) -> Elapsed:
        """How far the training is now. Schedules in terms of time are asked from one look to the next."""
        earlier = self._looked
        if self._num_examples and self._returns_new_state:
            steps, samples = self._step_num - self._updates, self._samples - self._num_examples[-1]
            # What passed since then in actions, say, belongs to this step.
            time = earlier.time if earlier.steps == steps else self._time_offset + self._time_before_step
            earlier = Elapsed(steps, samples, time, earlier.loops)
        return Elapsed(self._step_num, self._samples, self._training_secs(), loops, previous=earlier.without_previous())

    def _training_secs(self) -> float:
        return self._time_offset + self._clock_secs()

    def _clock_secs(self) -> float:
        """The seconds of training by the stopwatch; with other processes, by that of the first."""
        return self._agreed_secs if self._job.is_shared else self._stopwatch.training_secs()

    def _elapsed_after(self, batch: types.Batch) -> Elapsed:
        """How far the training is after the step on this batch; for the step's own actions."""
        before = self._before_step
        if before.steps != self._step_num or before.loops != self._loops_ended():
            before = self._look(self._loops_ended())
        joint = self._feed.joint
        samples = self._step.count_examples(batch) if joint is None else joint.next_examples
        self._before_step = before.advance(samples=samples, time=self._training_secs(), steps=self._updates)
        return self._before_step

    def _next_event(self) -> tuple[int, float]:
        """The `step_num` from which on `_at_event` wants to be asked, and the time by the stopwatch."""
        return NEVER

    def _now(self, loops: int) -> Elapsed:
        """As `_look`, and whether this is the last step of the run."""
        return self._look(loops)

    def _before_drawing_ahead(self, now: Elapsed) -> None:
        """Called after a step that is an event, while `source` stands after the batch of that step."""

    def _rescue_outputs(self, queue: OutputQueue, error: BaseException) -> None:
        """Called with the outputs of the steps up to an exception."""

    def _why_not_rescued(self) -> str | None:
        """The reason why no run may resume from the state as of the last whole step; None if one may."""
        return None if checks.is_alive(self._newest_state) else "the step that failed had taken it over"

    def _weights(self) -> list[int]:
        """For each step of the call how many examples its values stand for."""
        return self._num_examples

    def _at_event(self, now: Elapsed, state: Any, queue: OutputQueue) -> bool:
        """Called after a step that is an event; returns whether the loop goes on."""
        raise NotImplementedError

    @property
    def _reads_parts(self) -> bool:
        """Whether somebody reads what was reported inside a loop."""
        return False

    def _take(self, arrived: Arrived) -> None:
        """Takes in the outputs of steps that have reached the host."""
        if arrived:
            update = self.update_outputs if checks.is_overridden(self, "update_outputs", Loop) else None
            self._ledger.take(arrived, update, keeps_unread=self._reads_parts)

    def _settle(self, queue: OutputQueue, *, reads: bool = False) -> None:
        """Waits for the outputs of all steps so far, and takes them in; ends their sums if they are to be read."""
        self._fetch(queue, keep_sums=not reads)
        self._ledger.count(self._weights()[self._settled :])
        self._settled = len(self._num_examples)
        if reads:
            self._ledger.read()

    def _fetch(self, queue: OutputQueue, *, keep_sums: bool) -> None:
        arrived, merged = queue.drain(keep_sums=keep_sums)
        self._take(arrived)
        self._ledger.sums.update(merged)

    def _get_next_batch(self, dataset: Iterator[types.Batch]) -> types.Batch:
        return next(dataset)

    def _run_one_step(self, state: Any, batch: types.Batch, per_loop_step_number: int) -> tuple[Any, types.Output]:
        if self._returns_new_state:
            elapsed = self._elapsed_after(batch) if self._step.has_schedules else None
            return self._step(state, batch, per_loop_step_number, elapsed=elapsed)
        return state, self._step.evaluate(state, batch, per_loop_step_number)

    def _read_step_num(self, state: Any) -> int:
        count = getattr(state, "step", None)
        if count is None:
            return self._step_num
        if count is not self._known_step:
            return int(metrics.fetch(count))
        return self._step_num  # Reading it would wait for the device.


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
