"""The moments of a run: everything that happens between steps, in a fixed order."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

from absl import logging

from jaxloop import agreement, metrics
from jaxloop.actions.action import Action
from jaxloop.actions.action_list import ActionList
from jaxloop.commands import Commands
from jaxloop.engine.agenda import Agenda, Slot
from jaxloop.engine.progress import Progress
from jaxloop.engine.stepper import Stepper
from jaxloop.history import History
from jaxloop.schedules import Elapsed, Goal, Schedule
from jaxloop.timing import Spent


@final
@dataclasses.dataclass
class Run:
    """The run to which a loop belongs. An `OuterLoop` sets it on each of its loops; a standalone loop doesn't have one.

    Attributes:
      history: The values measured so far.
      total_steps: The total number of updates; None if it is unknown.
      loop_steps: The number of steps per loop; None if it is unknown. Loops end at multiples of this number.
      elapsed: For an eval loop, the training progress; None for a train loop, which counts its own progress.
      stop: An additional schedule that ends the run.
      eval_intervals: The intervals of the evaluations, in the same form as `Action.interval`.
      evaluate: A function that runs the evaluations that are due. Its arguments are the state, the progress, and a flag
        that is True if a loop ended at this step. It returns True if the run continues.
      end_data: A function to call when the data ends, after the last step of the epoch; None if no other loop may
        follow.
      snapshot: A function that returns the contents of a checkpoint (except the state) as keyword arguments for
        `CheckpointAction.save`.
      can_resume: True if a loop that was interrupted by a signal may be continued by a later call or by another
        process.
      keeps_batches: True if a train loop keeps its most recent batches, so that a failure can be recorded.
      ends_with_data: True if the run ends when the data ends.
      commands: The commands sent to the run; None if the run doesn't accept commands.
      detour: A function that begins a detour; see `WholeRun.detour`. None if the run can't return to a checkpoint.
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
    commands: Commands | None = None
    detour: Callable[..., None] | None = None

    @property
    def intervals(self) -> Sequence[int | Schedule]:
        """All intervals in the run other than those of actions."""
        others = (self.stop, None if self.commands is None else self.commands.replay)
        return [*self.eval_intervals, *(each for each in others if each is not None)]


@final
class Moments:
    """Runs everything that is due between steps: first actions, then evaluations, then actions with `runs_last`.

    Args:
      stepper: The `Stepper` that runs the steps.
      progress: The `Progress` that counts the steps.
      job: The processes that train together.

    Attributes:
      statistics: The `stat_loop.Statistics` that measures intervals; None in a loop without statistics.
      agenda: The end actions, and when they are due.
      begin_actions: The begin actions.
      last_beginning: The progress when the begin actions were last checked.
      run: The run to which the loop belongs; None for a standalone loop.
      stop_requested: True if an action or an evaluation has asked the run to stop.
      stopped_by: The action that asked the run to stop; None if no action did.
    """

    def __init__(self, stepper: Stepper, progress: Progress, job: agreement.Job):
        self._stepper, self._progress, self._job = stepper, progress, job
        self.statistics: Any = None
        self.agenda: Agenda = Agenda(ActionList(None, unit="loops"))
        self.begin_actions: ActionList = ActionList(None, unit="loops")
        self.last_beginning: Elapsed = Elapsed()
        self.run: Run | None = None
        self.stop_requested: bool = False
        self.stopped_by: Action | None = None
        self._spent_before = progress.stopwatch.spent()

    def attach(self, action: Action) -> None:
        """Adds an end action, which runs before the others until `detach_all` is called.

        An `OuterLoop` records its history with such an action.
        """
        self.agenda.attach(action, self._stepper.ledger.position)

    def detach_all(self) -> None:
        """Removes all actions that were added with `attach`."""
        self.agenda.detach_all()

    # Due times -----------------------------------------------------------------------------------------

    @property
    def elapsed(self) -> Elapsed:
        """The training progress. See `Loop.elapsed`."""
        newest, progress = self._progress.last_elapsed, self._progress
        return newest if (newest.steps, newest.loops) == (progress.steps, progress.loops) else self.elapsed_now()

    def elapsed_now(self, loops: int | None = None) -> Elapsed:
        """Returns the current training progress. Time-based schedules compare its `time` with `previous.time`."""
        if self.run is None or self.run.elapsed is None:
            return self._progress.elapsed_now(loops)
        return dataclasses.replace(self.run.elapsed, previous=self._progress.last_elapsed.without_previous())

    def now(self, *, ends_loop: bool = False) -> Elapsed:
        """Returns the training progress at this moment, with `is_last` set if the run ends here.

        Args:
          ends_loop: True if a loop ends at this step.
        """
        call, run = self._stepper.call, self.run
        now = self.elapsed_now(self._progress.loops + ends_loop)
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
        """Returns the next point when an action or an evaluation may be due, or when the run may end."""
        now, run = self._progress.last_elapsed, self.run
        if now.steps != self._progress.steps:  # Before the first step.
            now = self.elapsed_now()
        return self.agenda.next(now, () if run is None else run.intervals)

    def next(self) -> tuple[int, float]:
        """Returns the next step and the next stopwatch time at which something may be due."""
        goal = self.goal()
        # Slightly early, so that rounding doesn't make it late.
        return goal.step, self._progress.secs_at(goal.time) - 1e-9

    def execute_commands(self) -> bool:
        """Executes commands sent to the run. Returns True if there may have been any."""
        commands = None if self.run is None or not self._stepper.call.trains else self.run.commands
        if commands is None or not commands.are_due(self._progress.steps):
            return False
        commands.execute(self.elapsed_now())
        return True

    def due(self, now: Elapsed, *, at_end: bool = False) -> list[Slot]:
        """Returns the slots of the actions that are due at this moment."""
        # The actions of an eval loop count that loop's own executions.
        loop = now.loops if self._stepper.call.trains else self._progress.loops + self._progress.is_inside
        return self.agenda.due(now, loop if at_end else None)

    # Calls ---------------------------------------------------------------------------------------------

    def begin_call(self) -> None:
        """Prepares for a new call to the loop."""
        self.stop_requested, self.stopped_by = False, None
        for slot in self.agenda.slots:
            slot.is_requested = False
            if not self._stepper.call.trains:  # Several evaluations may run at the same step.
                slot.called_at = None

    def call_begin_actions(self, state: Any) -> None:
        """Calls the begin actions that are due."""
        if not self.begin_actions.actions:
            return
        now = self.elapsed_now()
        asked = dataclasses.replace(now, loops=now.loops + 1, previous=self.last_beginning)
        for index in range(len(self.begin_actions.actions)):
            if self.begin_actions.is_due(index, self._progress.loops + 1, asked):
                with self._progress.stopwatch.counting("actions"):
                    self.begin_actions.call(index, state, None, now)
        self.last_beginning = asked.without_previous()

    def run_moment(self, state: Any, at_end: bool = False, *, is_last: bool = False, only_saves: bool = False) -> bool:
        """Runs everything that is due at a moment outside a loop, and returns True if the run continues.

        There are three such moments: before the first step; after a step that only later turns out to be the last one;
        and, in a resumed run, at the step where the earlier run was interrupted. Nothing is called twice at the same
        step.

        Args:
          state: The state.
          at_end: True if a loop ended at this step.
          is_last: True if this step was the last one.
          only_saves: Whether to call only the actions that save checkpoints.
        """
        now = self.elapsed
        self.stop_requested &= is_last  # A checkpoint saved at the last step records the request to stop.
        is_last |= self.now().is_last
        now = dataclasses.replace(now, is_last=is_last, previous=now.previous or now)
        due = [slot for slot in self.due(now, at_end=at_end) if slot.saves or not only_saves]
        self.call_due(due, state, now, runs_last=False)
        if not only_saves:
            self._evaluate(state, now, at_end)
        self.call_due(due, state, now, runs_last=True)
        return not self.stop_requested

    def run_moment_in_loop(self, state: Any, now: Elapsed) -> bool:
        """Runs everything that is due at a moment inside a loop, and returns True if the loop continues."""
        self._progress.last_elapsed, stepper = now, self._stepper
        due = self.due(now)
        reads = any(slot.reads_outputs for slot in due)
        if reads or any(slot.saves for slot in due):
            stepper.fetch(keep_sums=not reads)
            if not stepper.ledger.loop:
                with self._progress.stopwatch.counting("device"):
                    metrics.wait(state)
        self.call_due(due, state, now, runs_last=False, newest=stepper.newest_scalars)
        return self.evaluate_and_call_last(due, state, now, newest=stepper.newest_scalars)

    def evaluate_and_call_last(
        self, due: Sequence[Slot], state: Any, now: Elapsed, *, at_end: bool = False, newest: Any = None
    ) -> bool:
        """Runs due evaluations, then calls due actions with `runs_last`. Returns True if the run continues."""
        self._evaluate(state, now, at_end)
        if not self._job.requests.requested:  # Otherwise, a checkpoint would contain an interrupted evaluation.
            self.call_due(due, state, now, runs_last=True, newest=newest, ends_run=self.run is not None)
        return not (self.stop_requested or self._job.requests.requested)

    def _evaluate(self, state: Any, now: Elapsed, at_end: bool) -> None:
        continues = self.run is None or self.run.evaluate(state, now, at_end)
        # A signal interrupts the run, but doesn't end it.
        self.stop_requested |= not (continues or self._job.requests.requested)

    def call_last(self, state: Any) -> bool:
        """Calls due actions with `runs_last` at the end of a loop, and returns True if the run continues."""
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
        """Calls the due actions that have the given value of `runs_last`. Those that save are called last.

        With `ends_run`, saves are postponed to the run's last moment if an action has asked the run to stop. That
        moment follows at the same step, so the checkpoint contains the last history row and the last evaluation.
        """
        ledger = self._stepper.ledger
        if not runs_last and any(slot.reads_outputs for slot in due):  # `clu.metrics` sums start again after a read.
            ledger.end_part()
        called = [slot for slot in due if slot.action.runs_last == runs_last]
        for slot in called:
            if not slot.saves:
                self._call_action(slot, state, now, newest)
        if called:
            self.stop_requested = self._job.any_stops(self.stop_requested)
        # Saves come last: a checkpoint contains everything else at its step, including the state of early stopping.
        for slot in called:
            slot.is_requested = slot.saves and ends_run and self.stop_requested
            if slot.saves and not slot.is_requested:
                self._call_action(slot, state, now, newest)
        self.agenda.trim(ledger)

    def _call_action(self, slot: Slot, state: Any, now: Elapsed, newest: Callable[[], dict[str, Any]] | None) -> None:
        spent, run, ledger = self._spent_before, self.run or Run(), self._stepper.ledger
        outputs, since = slot.outputs(ledger, newest), spent - slot.spent_before
        if slot.reads_outputs and now.steps:  # There is nothing to measure before the first step.
            outputs.update(self.measure(state, since))
        counting = self._progress.stopwatch.counting(slot.action.time_category)
        with counting, self._reporting_failure(slot):
            slot.actions.call(
                slot.index,
                state,
                outputs,
                now,
                history=run.history,
                total_steps=run.total_steps,
                spent=since,
                snapshot=run.snapshot,
                detour=run.detour and functools.partial(run.detour, now, updates=self._stepper.call.updates),
            )
        slot.called_at, slot.spent_before, slot.cursor = now.steps, spent, ledger.position
        if slot.next_interval is not None:
            self.agenda.reschedule(slot, slot.next_interval)
        if outputs.asks_to_stop:
            self.stop_requested, self.stopped_by = True, slot.action

    @contextlib.contextmanager
    def _reporting_failure(self, slot: Slot) -> Iterator[None]:
        """Reports an action's exception to the other processes, which then stop at the same step and save."""
        try:
            yield
        except (Exception, SystemExit) as error:
            if self._job.is_shared and not slot.saves:  # The other processes may be waiting inside the save.
                agreement.report_failure(error)
            raise

    def measure(self, state: Any, spent: Spent | None = None) -> dict[str, Any]:
        """Returns the statistics by name. `spent` is the interval's time report; None to cover the whole loop."""
        if self.statistics is None:
            return {}
        stepper = self._stepper
        return {**self.statistics.of(state, spent, updates=stepper.call.updates), **stepper.guard.measure()}

    def saves_at(self, now: Elapsed) -> bool:
        """Returns True if any action is due to save at this moment inside a loop."""
        return any(slot.saves and slot.is_due(now, None) for slot in self.agenda.slots)

    def flush(self, *, raise_errors: bool) -> None:
        """Waits until the actions of a standalone loop have finished their pending work."""
        for slot in self.agenda.slots if self.run is None else ():
            try:
                slot.action.flush()
            except Exception:
                if raise_errors:
                    raise
                logging.exception("%r could not be flushed.", slot.action)
