"""A loop with actions before, inside and after it."""

import bisect
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, final

from absl import logging

from jaxloop import agreement, checks, encoding, metrics, types
from jaxloop.actions.action import Action
from jaxloop.actions.action_list import ActionList
from jaxloop.agenda import Agenda, Slot, class_name, matched, remembered
from jaxloop.history import History
from jaxloop.ledger import Ledger
from jaxloop.program import Stretch
from jaxloop.schedules import NEVER, Elapsed, Goal, Schedule, earliest
from jaxloop.stat_loop import StatLoop
from jaxloop.step import Step
from jaxloop.text import printable


@final
@dataclasses.dataclass
class Run:
    """What a loop knows of the run it is part of. An `OuterLoop` gives it to its loops; one on its own has none.

    Attributes:
      history: what was measured so far.
      total_steps: updates in all; None if nobody knows.
      elapsed: for an evaluation, how far the training is; None for a train loop, which knows by itself.
      stop: where the run ends besides.
      loop_steps: loops end at the multiples of so many steps; None where nobody knows.
      eval_intervals: when an evaluation may be due, as the intervals of actions.
      evaluate: evaluates, with a state and an `Elapsed`, what is due; the third argument says whether a loop has ended.
        Returns whether the run goes on.
      end_data: called where the data end, after the step that was the last; None where no other loop may follow.
      snapshot: makes what a checkpoint keeps beside the state, as `CheckpointAction.save` takes it.
      can_resume: whether another call, or process, may go on with a loop that a signal cut short.
      keeps_batches: whether a train loop keeps its last batches, for the record of a failure.
      ends_with_data: whether the run ends where the data end.
    """

    history: History | None = None
    total_steps: int | None = None
    loop_steps: int | None = None
    elapsed: Elapsed | None = None
    stop: Schedule | None = None
    eval_intervals: Sequence[int | Schedule] = ()
    evaluate: Callable[[Any, Elapsed, bool], bool] = lambda state, elapsed, at_end: True
    end_data: Callable[[], None] | None = None
    snapshot: Callable[[], dict[str, Any]] | None = None
    can_resume: bool = False
    keeps_batches: bool = False
    ends_with_data: bool = False


class ActionLoop(StatLoop):
    """Calls actions when the loop begins, when it ends, and inside it where their schedule says so.

    Hooks:
      begin, end: see `Loop`; call those of `super()`, which measure, and call the actions.
      run, update_outputs, _get_next_batch, _run_one_step: see `Loop`.

    >>> import jaxloop
    >>> from jaxloop import examples
    >>> class Report(Action):
    ...     def __call__(self, state, outputs, *, step_num, **kwargs):
    ...         print(f"step {step_num}: {len(outputs['loss'])} losses")
    >>> step, state, batches = examples.tiny_regression()
    >>> loop = ActionLoop(step, end_actions=[Report(interval=2)])
    >>> for _ in range(4):
    ...     state, outputs = loop(state, batches, num_steps=3)
    step 6: 6 losses
    step 12: 6 losses
    >>> loop = ActionLoop(step, end_actions=[Report(interval=jaxloop.every(steps=10))])
    >>> state, outputs = loop(state, batches, num_steps=20)
    step 20: 8 losses
    step 30: 10 losses

    Args:
      step: what happens to one batch.
      begin_actions: called in their order when the loop begins, with `outputs=None`. An int interval counts loops; a
        schedule is asked then, whether it fired since the last beginning.
      end_actions: called with the outputs since their last call. An int interval counts loops, and they are called
        when the loop ends; with a schedule they are called after exactly that step. Those that come last
        (`Action.comes_last`, as checkpoints do) follow the others, and the evaluations of an `OuterLoop`.
      stat_names: see `StatLoop`, as all that follows.

    Attributes:
      run_info: what the loop knows of the run it is part of, see `Run`. None for a loop on its own, where each call is
        a run: its end waits for what the actions have begun, such as an asynchronous save.
    """

    def __init__(
        self,
        step: Step,
        begin_actions: Sequence[Action] | None = None,
        end_actions: Sequence[Action] | None = None,
        stat_names: Sequence[str] | None = None,
        global_batch_size: int | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
        max_steps_in_flight: int | None = None,
    ):
        super().__init__(step, stat_names, global_batch_size, clock=clock, max_steps_in_flight=max_steps_in_flight)
        self._begin_actions = ActionList(begin_actions, unit="loops")
        self._end_actions = ActionList(end_actions, unit="loops")
        self._agenda = Agenda(self._end_actions)
        self._last_beginning = Elapsed()
        self._is_inside = False  # Whether a loop has begun, and was not ended or broken off.
        self._is_ending = False  # Whether the end actions have what they are to see, and not all were called.
        self._stop_asked = False
        self._spent_at_look = self.spent
        self._said_left_out: set[str] = set()
        self.run_info: Run | None = None

    @property
    def begin_actions(self) -> Sequence[Action]:
        """The actions when the loop begins."""
        return self._begin_actions.actions

    @property
    def end_actions(self) -> Sequence[Action]:
        """The actions after the steps."""
        return self._end_actions.actions

    @property
    def action_lists(self) -> Sequence[ActionList]:
        """All actions, the step's too, and how often each has been called."""
        return (self._begin_actions, self._end_actions, *self.step.action_lists)

    @property
    def actions(self) -> Sequence[Action]:
        """All actions, the step's too, each of them once."""
        return list({id(action): action for each in self.action_lists for action in each.actions}.values())

    def description(self) -> list[str]:
        actions = [
            f"  {class_name(action)}, interval {action.interval!r}"
            for each in self.action_lists
            for action in each.actions
        ]
        return [*super().description(), *actions]

    def attach(self, action: Action) -> None:
        """Adds an end action, called before the others, until `detach_all`. An `OuterLoop` keeps its history so."""
        self._agenda.attach(action, self._ledger.position)

    def detach_all(self) -> None:
        """Takes the attached actions away."""
        self._agenda.detach_all()

    @property
    def loop_count(self) -> int:
        """How many loops have ended. Set it to go on with the intervals of an earlier run."""
        return self._progress.loops

    @loop_count.setter
    def loop_count(self, value: int) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"loop_count must be a non-negative int, got {value!r}.")
        if value != self._progress.loops:  # What the actions have not seen yet belongs to another run.
            self._forget()
        self._is_inside = False
        self._progress.loops = value
        self._progress.newest = dataclasses.replace(self._progress.newest, loops=value)

    def resume(self, elapsed: Elapsed) -> None:
        super().resume(elapsed)
        self._last_beginning = elapsed.without_previous()
        self._forget()

    def _forget(self) -> None:
        self.steps_before, self._is_ending, self._is_inside, self._began = 0, False, False, None
        self._ledger = Ledger()
        self._agenda.forget(self.spent)

    # A call of the loop ------------------------------------------------------------------------------

    def __call__(
        self,
        state: Any,
        dataset_iterator: Iterable[types.Batch] | None,
        num_steps: int | None = None,
        return_state_from_step: bool = True,
    ) -> tuple[Any, metrics.LoopOutputs]:
        try:
            result = super().__call__(state, dataset_iterator, num_steps, return_state_from_step)
        except BaseException:
            self._flush_actions(raise_errors=False)
            raise
        self._flush_actions(raise_errors=True)
        return result

    def train(
        self, state: Any, dataset: Iterator[types.Batch], steps_of_loop: Callable[[], int | None]
    ) -> tuple[Any, metrics.LoopOutputs]:
        """Runs loop after loop, as part of a run, to the end of it, or of the data.

        Args:
          state: see `__call__`.
          dataset: likewise.
          steps_of_loop: returns how many steps the next loop has at most; None for no limit.
        """
        return self._run_loops(state, dataset, lambda: self._with_silent_loops(steps_of_loop()), trains=True)

    @property
    def data_have_ended(self) -> bool:
        """Whether the data of the last call have."""
        return self._call.data_ended

    def _flush_actions(self, raise_errors: bool) -> None:
        """Waits for what the actions have begun, at the end of a loop on its own."""
        for slot in self._agenda.slots if self.run_info is None else ():
            try:
                slot.action.flush()
            except Exception:
                if raise_errors:
                    raise
                logging.exception("%r could not be flushed.", slot.action)

    def _prepare_call(self) -> None:
        if self._is_inside:  # An exception ended the last call: this is another loop.
            self.steps_before, self._began = 0, None
            if self._trains:
                self._ledger.end_part()
        if self._began is None and not self.steps_before:
            self._ledger.begin_loop()
        self._stop_asked = self._is_ending = False
        for slot in self._agenda.slots:
            slot.is_left = False
            if not self._trains:  # Each call sees the same step again.
                slot.called_at = None

    def _begin_loop(self) -> None:
        super()._begin_loop()
        self._is_inside = True

    def begin(self, state: Any, dataset: Any) -> tuple[Any, Iterator[types.Batch]]:
        state, iterator = super().begin(state, dataset)
        if self._began is not None or not self.begin_actions:
            return state, iterator
        now = self._look()
        asked = dataclasses.replace(now, loops=now.loops + 1, previous=self._last_beginning)
        for index in range(len(self.begin_actions)):
            if self._begin_actions.is_due(index, self._progress.loops + 1, asked):
                with self.stopwatch.counting("actions"):
                    self._begin_actions.call(index, state, None, now)
        self._last_beginning = asked.without_previous()
        return state, iterator

    def _outputs_of_loop(self) -> metrics.LoopOutputs:
        """Returns the outputs of a loop after its last step; none where nobody is to hear of its end."""
        end = self._now(self._progress.loops + 1)
        if not self._call.num_examples or self._is_heard(end):
            return super()._outputs_of_loop()
        self._call.end = end
        return metrics.LoopOutputs()

    def _is_heard(self, now: Elapsed) -> bool:
        """Whether somebody wants the outputs of the loop that ends now, or is called at its end."""
        run, call = self.run_info, self._call
        if run is None or run.end_data is None or call.data_ended or self._interrupt.requested or self._stop_asked:
            return True
        if call.queue is None or not call.queue.are_plain() or self._hears_all_ends():
            return True
        goal = self._goal(self._progress.newest)
        return now.is_last or now.steps >= goal.step or now.loops >= goal.loop or now.time >= goal.time

    def _hears_all_ends(self) -> bool:
        """Whether somebody may do something at each end of a loop that nobody knows of in advance."""
        program = self._call.program
        calls_step = program is None or program.own is not None
        return calls_step or any(checks.is_of_user(self, name) for name in ("run", "end", "update_outputs"))

    def _with_silent_loops(self, num_steps: int | None) -> int | None:
        """Returns the steps of the next loop, and of those after it up to an end that somebody is to hear of.

        The ends between, `Call.silent_ends`, are passed without a halt: to halt takes as long as a small step.
        """
        run, call, progress = self.run_info, self._call, self._progress
        call.silent_ends, queue = range(0), call.queue
        has_hooks = any(checks.is_of_user(self, name) for name in ("begin", "_get_next_batch"))
        size = None if run is None or self.begin_actions or has_hooks else run.loop_steps
        if not num_steps or size is None or queue is None or not queue.are_plain():
            return num_steps
        goal = self._goal(progress.newest)
        if run is None or goal.time < NEVER[1] or self._hears_all_ends():
            return num_steps
        first, end = progress.steps + num_steps, earliest([goal.step, run.total_steps])
        call.silent_ends = range(first, min(end, NEVER[0] - size), size)[: max(goal.loop - progress.loops - 1, 0)]
        return earliest([first + len(call.silent_ends) * size, run.total_steps]) - progress.steps

    def _count_steps(self, *, undone: bool = False) -> int:
        number = super()._count_steps(undone=undone)
        if self._call.silent_ends:
            self._pass_silent_ends()
        if self._call.num_examples and self._began is None:  # Another loop has begun without a halt.
            self._is_inside, self._began = True, False
        return number

    def _end_by(self, error: BaseException, stretch: Stretch) -> None:
        super()._end_by(error, stretch)
        if self._began is None:  # The end of the loop before was passed, and it is in this one that something failed.
            self._is_inside, self._began = True, False

    def _pass_silent_ends(self) -> None:
        """Ends the loops whose ends were passed with the newest steps."""
        call, progress, ends = self._call, self._progress, self._call.silent_ends
        passed = bisect.bisect_right(ends, progress.steps)
        if passed:
            last, size = ends[passed - 1], ends.step
            since = (progress.steps - last) // self._updates
            self._count_weights()
            before = len(call.num_examples) - since if passed == 1 else size // self._updates
            self._ledger.pass_ends(None if passed == 1 else before, since)
            progress.count_loop(before)
            progress.loops_run += passed - 1
            call.begin_next_loop(since)
            progress.newest = dataclasses.replace(progress.newest, loops=progress.loops + passed - (since == 0))
            if not since:
                progress.newest = self._now(progress.loops + passed)
            self._count_loops(passed, are_heard=False)
            call.silent_ends = ends[passed:]
            self._statistics.begin_loop()

    def _end_loop(self, state: Any, outputs: metrics.LoopOutputs) -> tuple[Any, metrics.LoopOutputs]:
        if self._call.end is not None:
            self._count_weights()
            self._ledger.pass_ends()
            self._progress.newest = self._call.end
            self._count_loops(are_heard=False)
            return state, outputs
        state, outputs = super()._end_loop(state, outputs)
        run = self.run_info
        is_heard_of = run is not None or self._agenda.slots
        if self._is_inside and is_heard_of and not self._interrupt.requested:  # Else an evaluation has no end.
            name = f"{type(self).__name__}.end"
            raise ValueError(f"{name} must call super().end(state, outputs), which measures and calls the actions.")
        self._call.state = state
        if self._is_inside or self._is_broken_off() or run is None or run.end_data is None or self._interrupt.requested:
            return state, outputs
        # A checkpoint of this moment has to know it.
        self._stop_asked = self._job.any_stops(self._stop_asked or outputs.asks_to_stop)
        if self._call.data_ended and not self._stop_asked:
            run.end_data()
        now = self._progress.newest
        if not self._follow(self._due(now, at_end=True), state, now, at_end=True):
            outputs[types.STOP_LOOP] = True
        return state, outputs

    def _count_loops(self, number: int = 1, *, are_heard: bool = True) -> None:
        """Counts loops that have ended."""
        self._progress.loops += number
        self.steps_before, self._is_inside, self._began, self._call.has_passed_end = 0, False, None, not are_heard

    def _goes_on(self, outputs: metrics.LoopOutputs) -> bool:
        run, newest = self.run_info, self._progress.newest
        if run is None or run.end_data is None or self._interrupt.requested or self._is_inside:
            return False
        return not (outputs.asks_to_stop or newest.is_last or self._call.data_ended)

    def end(self, state: Any, outputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        state, outputs = super().end(state, outputs)
        if not self._steps_in_loop():  # It was counted before, and is the last.
            return state, outputs
        if self._is_broken_off():
            # Here is no end of a loop, only a step of one that goes on in a later call.
            self._progress.newest = now = self._look()
            self._call_due(self._due(now), state, now, comes_last=False)
            self.steps_before, self._is_inside = self._steps_in_loop(), False
            return state, outputs
        self._progress.newest = now = self._now(self._progress.loops + 1)
        ended = metrics.LoopOutputs(outputs, getattr(outputs, "num_examples", ()))
        self._ledger.end_loop(ended)
        self._is_ending = True
        self._call_due(self._due(now, at_end=True), state, now, comes_last=False)
        self._is_ending = False
        self._count_loops()
        if self.run_info is None:
            self.call_last(state)
        if self._stop_asked:
            outputs[types.STOP_LOOP] = True
        return state, outputs

    def _steps_in_loop(self) -> int:
        return self.steps_before + len(self.num_examples)

    def _is_broken_off(self) -> bool:
        """Whether a later call, or process, goes on with this loop amid its steps."""
        can_go_on = self.run_info is not None and self.run_info.can_resume and self._trains
        return can_go_on and (self.was_interrupted or self._call.is_failing)

    # Moments -----------------------------------------------------------------------------------------

    def hold(self, state: Any, *, at_end: bool = False, is_last: bool = False, saves: bool = True) -> bool:
        """Calls what is due outside of a call: actions, evaluations, what comes last; returns whether the run goes on.

        It calls nothing twice at one step. It is for the moment before the first step, for the last step, when only
        later the run is known to have ended, and for what a run that is resumed has missed.

        Args:
          state: the state.
          at_end: whether a loop has ended at this step.
          is_last: whether it was the last.
          saves: whether actions that save are called too.
        """
        now = self.elapsed
        self._stop_asked &= is_last  # What has asked for the end is known to a checkpoint of the last step.
        is_last |= self._now(self._progress.loops).is_last
        now = dataclasses.replace(now, is_last=is_last, previous=now.previous or now)
        due = [slot for slot in self._due(now, at_end=at_end) if saves or not slot.saves]
        self._call_due(due, state, now, comes_last=False)
        self._evaluate(state, now, at_end)
        self._call_due(due, state, now, comes_last=True)
        return not self._stop_asked

    def _due(self, now: Elapsed, *, at_end: bool = False) -> list[Slot]:
        """Returns the actions that are due and were not called at this step."""
        # An evaluation counts its own loops.
        loop = now.loops if self._trains else self._progress.loops + self._is_inside
        return self._agenda.due(now, loop if at_end else None)

    def _follow(
        self, due: Sequence[Slot], state: Any, now: Elapsed, *, at_end: bool = False, newest: Any = None
    ) -> bool:
        """Evaluates after the actions of a moment, and calls what comes last; returns whether the run goes on."""
        self._evaluate(state, now, at_end)
        if not self._interrupt.requested:  # Else the evaluation, of which a checkpoint may tell, is not complete.
            self._call_due(due, state, now, comes_last=True, newest=newest, ends_run=self.run_info is not None)
        return not (self._stop_asked or self._interrupt.requested)

    def _evaluate(self, state: Any, now: Elapsed, at_end: bool) -> None:
        goes_on = self.run_info is None or self.run_info.evaluate(state, now, at_end)
        self._stop_asked |= not (goes_on or self._interrupt.requested)  # A signal asks for no end of the run.

    def _at_moment(self, now: Elapsed, state: Any) -> bool:
        self._progress.newest = now
        due = self._due(now)
        reads = any(slot.reads_outputs for slot in due)
        if reads or any(slot.saves for slot in due):
            self._fetch(keep_sums=not reads)
            if not self._ledger.loop:
                with self.stopwatch.counting("device"):
                    metrics.wait(state)
        queue = self._call.queue
        newest = lambda: (queue and queue.newest_scalars()) or metrics.newest_scalars(self._ledger.loop)
        self._call_due(due, state, now, comes_last=False, newest=newest)
        return self._follow(due, state, now, newest=newest)

    def _call_due(
        self,
        due: Sequence[Slot],
        state: Any,
        now: Elapsed,
        *,
        comes_last: bool,
        newest: Callable[[], dict[str, Any]] | None = None,
        ends_run: bool = False,
    ) -> None:
        """Calls those of the due actions that come last, or those that don't; what saves is called after the others.

        With `ends_run`, where one of them has asked for the end of the run, what saves is left to the last moment of
        the run, which follows at this step: the checkpoint is to have the last row and the last evaluation in it.
        """
        if not comes_last and any(slot.reads_outputs for slot in due):  # A reading ends the sums of `clu.metrics`.
            self._ledger.end_part()
        called = [slot for slot in due if slot.action.comes_last == comes_last]
        for slot in called:
            if not slot.saves:
                self._call_action(slot, state, now, newest)
        if called:
            self._stop_asked = self._job.any_stops(self._stop_asked)
        # A checkpoint is of the run after all else, also of what early stopping remembers.
        for slot in called:
            slot.is_left = slot.saves and ends_run and self._stop_asked
            if slot.saves and not slot.is_left:
                self._call_action(slot, state, now, newest)
        self._agenda.trim(self._ledger)

    def _call_action(self, slot: Slot, state: Any, now: Elapsed, newest: Callable[[], dict[str, Any]] | None) -> None:
        spent, run = self._spent_at_look, self.run_info or Run()
        outputs, since = slot.outputs(self._ledger, newest), spent - slot.spent_before
        if slot.reads_outputs and now.steps:  # Before the first step there is nothing to measure.
            outputs.update(self._stats(state, since))
        counting = self.stopwatch.counting(slot.action.time_goes_to)
        with counting, self._telling_failure(slot):
            slot.actions.call(
                slot.index,
                state,
                outputs,
                now,
                history=run.history,
                total_steps=run.total_steps,
                spent=since,
                snapshot=run.snapshot,
            )
        slot.called_at, slot.spent_before, slot.cursor = now.steps, spent, self._ledger.position
        if outputs.asks_to_stop:
            self._stop_asked = True

    @contextlib.contextmanager
    def _telling_failure(self, slot: Slot) -> Iterator[None]:
        """Tells the other processes where an action raises: they stop at the same step, and save."""
        try:
            yield
        except (Exception, SystemExit) as error:
            if self._job.is_shared and not slot.saves:  # To save is to wait for the others, who would wait there.
                agreement.tell_failure(error)
            raise

    def _next_moment(self) -> tuple[int, float]:
        now = self._progress.newest
        if now.steps != self._progress.steps:  # Before the first step.
            now = self._look()
        goal = self._goal(now)
        # A hair too early, for rounding not to be too late.
        return goal.step, self._progress.secs_at(goal.time) - 1e-9

    def _goal(self, now: Elapsed) -> Goal:
        """Returns up to where nothing is due: no action, no evaluation, and not the stop of the run."""
        run = self.run_info
        others = () if run is None else (*run.eval_intervals, *(() if run.stop is None else (run.stop,)))
        return self._agenda.next(now, others)

    def _before_drawing_ahead(self, now: Elapsed) -> None:
        if any(slot.saves and slot.is_due(now, None) for slot in self._agenda.slots):
            self.source.mark()

    def _look(self, loops: int | None = None) -> Elapsed:
        run = self.run_info
        if run is None or run.elapsed is None:
            return super()._look(loops)
        return dataclasses.replace(run.elapsed, previous=self._progress.newest.without_previous())

    def _now(self, loops: int) -> Elapsed:
        now, run = self._look(loops), self.run_info
        self._spent_at_look = self.spent
        ends_loop = loops > self._progress.loops
        if run is None:
            is_last = ends_loop and not self.was_interrupted
        elif run.elapsed is not None:
            is_last = run.elapsed.is_last
        else:
            is_last = now.steps == run.total_steps
            is_last |= run.ends_with_data and self._call.data_ended and ends_loop
            is_last |= run.stop is not None and run.stop.stops(now.previous or now, now)
        return dataclasses.replace(now, is_last=True) if is_last else now

    def _series_read(self) -> tuple[bool, bool]:
        return self._agenda.series_read

    def _rescue_outputs(self, error: BaseException) -> None:
        if not self._trains:
            return
        self._call.is_failing = True
        try:
            self._fetch(keep_sums=True)
        except Exception:
            logging.exception("The outputs of the last steps before an exception could not be read.")

    # Going on in a later process -----------------------------------------------------------------------

    def state_dict(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What the loop and its actions remember: with the train state, the run up to now.

        To be called between two steps, as an action is.

        Returns:
          What JSON can hold; and, by name, the states that actions keep.
        """
        ledger = self._ledger
        # What an evaluation has done by half is done again.
        is_inside = self._is_inside and self._trains
        self._agenda.trim(ledger)
        slots, kept = self._agenda.state_dict()
        state_dict = {
            "elapsed": self.elapsed.to_dict(),
            "previous": (self.elapsed.previous or self.elapsed).to_dict(),
            "loop_count": self._progress.loops,
            "is_ending": self._is_ending and not self._trains,
            "has_stopped": self._stop_asked,
            "steps_in_loop": self._steps_in_loop() if is_inside else self.steps_before,
            "has_begun": self._began is not None and self._trains,
            "wraps_dataset": bool(self._began),
            "last_beginning": self._last_beginning.to_dict(),
            "steps_per_dispatch": self._steps_at_once,
            "ledger": ledger.state_dict(self._encode, keeps_loop=self._trains and self._agenda.series_read[1]),
            "slots": slots,
            "others": [remembered(action) for action in self._other_actions()],
        }
        return state_dict, kept

    def load_state_dict(self, state_dict: Mapping[str, Any], kept_states: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` of a loop with the same actions returned, in this process or another."""
        elapsed = Elapsed(**state_dict["elapsed"])
        self.resume(elapsed)
        previous = Elapsed(**state_dict["previous"])
        self._progress.newest = dataclasses.replace(elapsed, previous=previous)
        self._progress.loops = state_dict["loop_count"]
        self._is_ending = state_dict["is_ending"]
        self.steps_before: int = state_dict["steps_in_loop"]
        self._began = state_dict["wraps_dataset"] if state_dict["has_begun"] or self.steps_before else None
        self._last_beginning = Elapsed(**state_dict["last_beginning"])
        if self._steps_at_once is None:  # What was found out then: otherwise the last bits might differ.
            self._steps_at_once = state_dict["steps_per_dispatch"]
        self._ledger = Ledger.of(state_dict["ledger"])
        self._agenda.load_state_dict(state_dict["slots"], kept_states, self)
        for action, kept in matched(self._other_actions(), state_dict["others"], lambda action: action, self):
            action.load_state_dict(encoding.decode(kept["state"]))

    @property
    def is_ending(self) -> bool:
        """Whether the last call, an evaluation, ended by an exception in an end action, after all of its steps."""
        return self._is_ending

    def end_again(self, state: Any) -> bool:
        """Calls the end actions that were not come to, of one that `is_ending`; returns whether the run goes on."""
        self._call.trains, self._is_inside = False, True
        now, self._stop_asked = self._now(self._progress.loops + 1), False
        self._call_due(self._due(now, at_end=True), state, now, comes_last=False)
        self._progress.newest, self._is_ending = now, False
        self._count_loops()
        return self.call_last(state)

    def call_last(self, state: Any) -> bool:
        """Calls the actions of the end of a loop that come last; returns whether the run goes on."""
        now = self._progress.newest
        self._call_due(self._due(now, at_end=True), state, now, comes_last=True)
        return not self._stop_asked

    def _other_actions(self) -> list[Action]:
        return [action for each in self.action_lists if each is not self._end_actions for action in each.actions]

    def _encode(self, outputs: metrics.LoopOutputs) -> dict[str, Any]:
        encoded, left_out = outputs.encode()
        if set(left_out) - self._said_left_out:
            self._said_left_out.update(left_out)
            logging.warning(
                "%r has outputs that a checkpoint can't keep: %s. After a resume, an action that is called once in "
                "many steps sees only those of the steps after it.",
                self,
                ", ".join(map(printable, left_out)),
            )
        return encoded
