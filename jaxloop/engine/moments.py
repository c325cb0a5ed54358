"""The moments of a run: what happens between two steps, in its order."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

from absl import logging

from jaxloop import agreement, metrics
from jaxloop.actions.action import Action
from jaxloop.actions.action_list import ActionList
from jaxloop.engine.agenda import Agenda, Slot
from jaxloop.engine.progress import Progress
from jaxloop.engine.stepper import Stepper
from jaxloop.history import History
from jaxloop.schedules import Elapsed, Goal, Schedule
from jaxloop.timing import Spent


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


@final
class Moments:
    """Calls what is due between two steps: actions, evaluations, what comes last.

    Args:
      stepper: takes the steps.
      progress: counts them.
      job: the processes that train together.

    Attributes:
      statistics: measures intervals, a `stat_loop.Statistics`; None in a loop without.
      agenda: the end actions.
      beginnings: the begin actions.
      last_beginning: when they were asked last.
      run: what is known of the run; None for a loop on its own.
      stop_requested: whether an action, or an evaluation, has asked for the end of the run.
    """

    def __init__(self, stepper: Stepper, progress: Progress, job: agreement.Job):
        self._stepper, self._progress, self._job = stepper, progress, job
        self.statistics: Any = None
        self.agenda: Agenda = Agenda(ActionList(None, unit="loops"))
        self.beginnings: ActionList = ActionList(None, unit="loops")
        self.last_beginning: Elapsed = Elapsed()
        self.run: Run | None = None
        self.stop_requested: bool = False
        self._spent_before = progress.stopwatch.spent()

    def attach(self, action: Action) -> None:
        """Adds an end action, called before the others, until `detach_all`. An `OuterLoop` keeps its history so."""
        self.agenda.attach(action, self._stepper.ledger.position)

    def detach_all(self) -> None:
        """Takes the attached actions away."""
        self.agenda.detach_all()

    # When ----------------------------------------------------------------------------------------------

    @property
    def elapsed(self) -> Elapsed:
        """How far the training is, see `Loop.elapsed`."""
        newest, progress = self._progress.last_elapsed, self._progress
        return newest if (newest.steps, newest.loops) == (progress.steps, progress.loops) else self.look()

    def look(self, loops: int | None = None) -> Elapsed:
        """Returns how far the training is. Schedules in terms of time are asked from one look to the next."""
        if self.run is None or self.run.elapsed is None:
            return self._progress.look(loops)
        return dataclasses.replace(self.run.elapsed, previous=self._progress.last_elapsed.without_previous())

    def now(self, *, ends_loop: bool = False) -> Elapsed:
        """Returns how far the training is, with `is_last` where the run ends here.

        Args:
          ends_loop: whether a loop ends at this step.
        """
        call, run = self._stepper.call, self.run
        now = self.look(self._progress.loops + ends_loop)
        self._spent_before = self._progress.stopwatch.spent()
        if run is None:
            is_last = ends_loop and not call.was_interrupted
        elif run.elapsed is not None:
            is_last = run.elapsed.is_last
        else:
            is_last = now.steps == run.total_steps
            is_last |= run.ends_with_data and call.data_ended and ends_loop
            is_last |= run.stop is not None and run.stop.stops(now.previous or now, now)
        return dataclasses.replace(now, is_last=True) if is_last else now

    def goal(self) -> Goal:
        """Returns up to where nothing is due: no action, no evaluation, and not the stop of the run."""
        now, run = self._progress.last_elapsed, self.run
        if now.steps != self._progress.steps:  # Before the first step.
            now = self.look()
        others = () if run is None else (*run.eval_intervals, *(() if run.stop is None else (run.stop,)))
        return self.agenda.next(now, others)

    def next(self) -> tuple[int, float]:
        """Returns the step, and the time by the stopwatch, up to which a loop may go on freely."""
        goal = self.goal()
        # A hair too early, for rounding not to be too late.
        return goal.step, self._progress.secs_at(goal.time) - 1e-9

    def due(self, now: Elapsed, *, at_end: bool = False) -> list[Slot]:
        """Returns the actions that are due and were not called at this step."""
        # An evaluation counts its own loops.
        loop = now.loops if self._stepper.call.trains else self._progress.loops + self._progress.is_inside
        return self.agenda.due(now, loop if at_end else None)

    # What ----------------------------------------------------------------------------------------------

    def begin_call(self) -> None:
        """Begins a call of the loop."""
        self.stop_requested = False
        for slot in self.agenda.slots:
            slot.is_postponed = False
            if not self._stepper.call.trains:  # Each call sees the same step again.
                slot.called_at = None

    def call_beginnings(self, state: Any) -> None:
        """Calls the begin actions that are due."""
        if not self.beginnings.actions:
            return
        now = self.look()
        asked = dataclasses.replace(now, loops=now.loops + 1, previous=self.last_beginning)
        for index in range(len(self.beginnings.actions)):
            if self.beginnings.is_due(index, self._progress.loops + 1, asked):
                with self._progress.stopwatch.counting("actions"):
                    self.beginnings.call(index, state, None, now)
        self.last_beginning = asked.without_previous()

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
        self.stop_requested &= is_last  # What has asked for the end is known to a checkpoint of the last step.
        is_last |= self.now().is_last
        now = dataclasses.replace(now, is_last=is_last, previous=now.previous or now)
        due = [slot for slot in self.due(now, at_end=at_end) if saves or not slot.saves]
        self.call_due(due, state, now, runs_last=False)
        self._evaluate(state, now, at_end)
        self.call_due(due, state, now, runs_last=True)
        return not self.stop_requested

    def hold_inside(self, state: Any, now: Elapsed) -> bool:
        """Calls what is due inside a loop; returns whether the loop goes on."""
        self._progress.last_elapsed, stepper = now, self._stepper
        due = self.due(now)
        reads = any(slot.reads_outputs for slot in due)
        if reads or any(slot.saves for slot in due):
            stepper.fetch(keep_sums=not reads)
            if not stepper.ledger.loop:
                with self._progress.stopwatch.counting("device"):
                    metrics.wait(state)
        self.call_due(due, state, now, runs_last=False, newest=stepper.newest_scalars)
        return self.follow(due, state, now, newest=stepper.newest_scalars)

    def follow(
        self, due: Sequence[Slot], state: Any, now: Elapsed, *, at_end: bool = False, newest: Any = None
    ) -> bool:
        """Evaluates after the actions of a moment, and calls what comes last; returns whether the run goes on."""
        self._evaluate(state, now, at_end)
        if not self._job.requests.requested:  # Else the evaluation, of which a checkpoint may tell, is not complete.
            self.call_due(due, state, now, runs_last=True, newest=newest, ends_run=self.run is not None)
        return not (self.stop_requested or self._job.requests.requested)

    def _evaluate(self, state: Any, now: Elapsed, at_end: bool) -> None:
        goes_on = self.run is None or self.run.evaluate(state, now, at_end)
        self.stop_requested |= not (goes_on or self._job.requests.requested)  # A signal asks for no end of the run.

    def call_last(self, state: Any) -> bool:
        """Calls the actions of the end of a loop that come last; returns whether the run goes on."""
        now = self._progress.last_elapsed
        self.call_due(self.due(now, at_end=True), state, now, runs_last=True)
        return not self.stop_requested

    def call_due(
        self,
        due: Sequence[Slot],
        state: Any,
        now: Elapsed,
        *,
        runs_last: bool,
        newest: Callable[[], dict[str, Any]] | None = None,
        ends_run: bool = False,
    ) -> None:
        """Calls those of the due actions that come last, or those that don't; what saves is called after the others.

        With `ends_run`, where one of them has asked for the end of the run, what saves is postponed to the last moment
        of the run, which follows at this step: the checkpoint is to have the last row and the last evaluation in it.
        """
        ledger = self._stepper.ledger
        if not runs_last and any(slot.reads_outputs for slot in due):  # A reading ends the sums of `clu.metrics`.
            ledger.end_part()
        called = [slot for slot in due if slot.action.runs_last == runs_last]
        for slot in called:
            if not slot.saves:
                self._call_action(slot, state, now, newest)
        if called:
            self.stop_requested = self._job.any_stops(self.stop_requested)
        # A checkpoint is of the run after all else, also of what early stopping remembers.
        for slot in called:
            slot.is_postponed = slot.saves and ends_run and self.stop_requested
            if slot.saves and not slot.is_postponed:
                self._call_action(slot, state, now, newest)
        self.agenda.trim(ledger)

    def _call_action(self, slot: Slot, state: Any, now: Elapsed, newest: Callable[[], dict[str, Any]] | None) -> None:
        spent, run, ledger = self._spent_before, self.run or Run(), self._stepper.ledger
        outputs, since = slot.outputs(ledger, newest), spent - slot.spent_before
        if slot.reads_outputs and now.steps:  # Before the first step there is nothing to measure.
            outputs.update(self.measure(state, since))
        counting = self._progress.stopwatch.counting(slot.action.time_category)
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
        slot.called_at, slot.spent_before, slot.cursor = now.steps, spent, ledger.position
        if outputs.asks_to_stop:
            self.stop_requested = True

    @contextlib.contextmanager
    def _telling_failure(self, slot: Slot) -> Iterator[None]:
        """Tells the other processes where an action raises: they stop at the same step, and save."""
        try:
            yield
        except (Exception, SystemExit) as error:
            if self._job.is_shared and not slot.saves:  # To save is to wait for the others, who would wait there.
                agreement.tell_failure(error)
            raise

    def measure(self, state: Any, spent: Spent | None = None) -> dict[str, Any]:
        """Returns the statistics of an interval, by name; None for that of the loop."""
        if self.statistics is None:
            return {}
        stepper = self._stepper
        return {**self.statistics.of(state, spent, updates=stepper.call.updates), **stepper.guard.measure()}

    def saves_at(self, now: Elapsed) -> bool:
        """Returns whether an action saves the run at a moment inside a loop."""
        return any(slot.saves and slot.is_due(now, None) for slot in self.agenda.slots)

    def flush(self, *, raise_errors: bool) -> None:
        """Waits for what the actions of a loop on its own have begun."""
        for slot in self.agenda.slots if self.run is None else ():
            try:
                slot.action.flush()
            except Exception:
                if raise_errors:
                    raise
                logging.exception("%r could not be flushed.", slot.action)
