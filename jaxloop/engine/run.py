"""The plan, the progress and the execution of a run."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, final

from jaxloop import metrics
from jaxloop.base import checks
from jaxloop.base.timing import Stopwatch
from jaxloop.distributed.agreement import Job
from jaxloop.engine.agenda import Agenda, Item, Rank
from jaxloop.engine.call import Call, Options
from jaxloop.engine.feed import LoopData, Source
from jaxloop.engine.outputs import Outputs
from jaxloop.engine.program import Ran
from jaxloop.schedules import NEVER, Elapsed, Goal, Schedule

_NO_CONTEXT = {"history": None, "total_steps": None, "snapshot": None}


@final
@dataclasses.dataclass(frozen=True)
class Plan:
    """The items, limits and data functions that an experiment adds to a loop.

    Attributes:
      is_alone: True if no experiment runs the loop. In that case, each call runs a single loop.
      total: The total number of updates, or None if it isn't limited.
      loop_steps: The number of updates per loop, or None if it isn't limited. Loops end at multiples of this number.
      stop: A schedule that ends the run, or None.
      items: Items other than the actions of the loop and its step, such as evaluations, commands and the recorder of
        history rows.
      context: Additional keyword arguments for actions.
      source: The functions that mark positions in the data, begin the next epoch and observe the batches.
      at: In an evaluation, the progress of the training run; otherwise None.
    """

    is_alone: bool = False
    total: int | None = None
    loop_steps: int | None = None
    stop: Schedule | None = None
    items: Sequence[Item] = ()
    context: Mapping[str, Any] = dataclasses.field(default_factory=lambda: _NO_CONTEXT)
    source: Source = dataclasses.field(default_factory=Source)
    at: Elapsed | None = None

    def ends_at(self, now: Elapsed) -> bool:
        """Returns True if the run ends at the step that `now` describes, even if there is more data."""
        return now.steps == self.total or (self.stop is not None and self.stop.stops(now.previous or now, now))

    def ends_loop(self, step_num: int) -> bool:
        """Returns True if a loop reaches its planned length at the given step."""
        return self.loop_steps is not None and step_num % self.loop_steps == 0


@final
class Clock:
    """The training time of a run, including the time before the run was resumed.

    Args:
      stopwatch: The stopwatch that tracks how the time is spent in this process.
      is_shared: Whether several processes have to agree on the time.

    Attributes:
      stopwatch: The argument of the same name.
      agreed: The first process's training time, as last shared with all processes. None if there is only one process.
      moment: The training time, in seconds, when the run last checked which items were due. Everything that was due by
        then has been called.
    """

    def __init__(self, stopwatch: Stopwatch, *, is_shared: bool):
        self.stopwatch: Stopwatch = stopwatch
        self.agreed: float | None = 0.0 if is_shared else None
        self.moment: float = 0.0
        self._offset = 0.0  # The training time of earlier processes, minus the stopwatch's reading at the resume.

    def begin(self, time: float) -> None:
        """Sets the training time to `time` seconds."""
        self._offset, self.moment = 0.0, time
        self._offset = time - self.time()

    def time(self) -> float:
        """Returns the training time in seconds."""
        return self._offset + (self.stopwatch.training_secs() if self.agreed is None else self.agreed)

    def deadline(self, time: float) -> float:
        """Returns the reading of `timing.clock` at which the training time reaches `time`.

        Subtracts a nanosecond, so that a rounding error can't move the deadline to a later time.
        """
        return self.stopwatch.reading_at(time - self._offset - 1e-9)


@final
class Run:
    """Holds the progress of a run, the outputs that some items haven't read yet, and the items to call.

    Args:
      job: The processes that train together.

    Attributes:
      stopwatch: The stopwatch that tracks how the time is spent.
      clock: The clock that measures the training time.
      outputs: The outputs of the steps.
      agenda: The agenda, which contains the items and calls them.
      now: The run's progress after the latest step. `now.previous` is the progress one batch earlier, but
        `now.previous.time` is the training time when the run last checked which items were due.
      loops: The number of loops that the `Loop` object has completed.
      batches: The number of batches used in the current loop so far, including those used before a resume.
      began_at: The run's progress when the engine last checked whether begin actions were due.
    """

    def __init__(self, job: Job):
        self.stopwatch: Stopwatch = Stopwatch()
        self.clock: Clock = Clock(self.stopwatch, is_shared=job.is_shared)
        self.outputs: Outputs = Outputs(self.stopwatch)
        self.agenda: Agenda = Agenda(self.outputs, self.stopwatch, job)
        self.begin(Elapsed())

    def begin(self, now: Elapsed) -> None:
        """Sets the counters to the given progress, discards all outputs, and resets the items."""
        self.now: Elapsed = now.without_previous()
        self.loops: int = now.loops
        self.batches: int = 0
        self.began_at: Elapsed = self.now
        self.clock.begin(now.time)
        self.outputs.reset()
        self.agenda.reset()

    def count(self, examples: Sequence[int], updates: int) -> None:
        """Counts completed steps. `updates` is the number of updates per batch, or 0 for an evaluation."""
        now, number, total, stopwatch = self.now, len(examples), sum(examples), self.stopwatch
        self.batches += number
        stopwatch.steps += number * max(updates, 1)
        stopwatch.samples += total
        if not number or not updates:
            return
        steps, samples = now.steps + number * updates, now.samples + total
        before = Elapsed(steps - updates, samples - examples[-1], self.clock.moment, now.loops)
        self.now = Elapsed(steps, samples, self.clock.time(), now.loops, previous=before)

    def at_moment(self, loops: int, *, is_last: bool = False) -> Elapsed:
        """Updates and returns the run's progress. Called at each point where items may be due."""
        now, before = self.now, self.now.previous or self.now.without_previous()
        self.clock.moment = time = self.clock.time()
        self.now = Elapsed(now.steps, now.samples, time, loops, is_last, before)
        return self.now

    def end_loop(self) -> None:
        """Ends the current loop at the current position."""
        self.outputs.cut()
        self.outputs.begin_loop()
        self.loops, self.batches = self.loops + 1, 0

    def pass_ends(self, loop_steps: int | None, updates: int, *, also_here: bool) -> None:
        """Counts the loops that ended during the latest steps without a pause, because no item was due at their ends.

        For example, if the latest steps were 7 to 25 and a loop has 10 steps, the loops that end at steps 10 and 20 are
        counted.

        Args:
          loop_steps: The number of updates per loop, or None for a single loop.
          updates: The number of updates per batch, or 0 for an evaluation.
          also_here: Whether to also count a loop that ends at the latest step.
        """
        if not updates or loop_steps is None:
            return
        now, before, newest = self.now, self.now.steps - self.batches * updates, self.now.steps - (not also_here)
        passed = newest // loop_steps - before // loop_steps
        if passed <= 0:
            return
        since = (now.steps - newest // loop_steps * loop_steps) // updates
        self.loops, self.batches = self.loops + passed, since
        self.outputs.begin_loop(self.outputs.position - since)
        self.agenda.ended = None
        if self.agenda.statistics is not None:
            self.agenda.statistics.begin_loop(updates)
        before_now = now.previous.loops + passed - (also_here and since == 0) if now.previous else 0
        previous = now.previous and dataclasses.replace(now.previous, loops=before_now)
        self.now = dataclasses.replace(now, loops=now.loops + passed, previous=previous)

    def drop_loop(self) -> None:
        """Forgets the current loop and its outputs."""
        self.outputs.drop_loop()
        self.batches = 0

    # Saving ------------------------------------------------------------------------------------------

    def state_dict(self, *, in_moment: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the run's part of a checkpoint as two dicts.

        The first dict contains JSON values, and the second contains the train states that actions keep.

        Args:
          in_moment: Whether there may be items that are due at this step but haven't been called yet.
        """
        agenda, kept = self.agenda.state_dict(self.now.steps, in_moment=in_moment)
        saved = {
            "elapsed": self.now.to_dict(),
            "previous": (self.now.previous or self.now).to_dict(),
            "loops": self.loops,
            "steps_in_loop": self.batches,
            "began_at": self.began_at.to_dict(),
            "agenda": agenda,
            "outputs": self.outputs.state_dict(self.agenda.cursors),
        }
        return saved, kept

    def load_state_dict(self, saved: Mapping[str, Any], kept: Mapping[str, Any]) -> None:
        """Restores the run from the two dicts that `state_dict` returned."""
        self.now = Elapsed(**saved["elapsed"], previous=Elapsed(**saved["previous"]))
        self.loops, self.batches, self.began_at = saved["loops"], saved["steps_in_loop"], Elapsed(**saved["began_at"])
        self.clock.begin(self.now.time)
        self.outputs.load_state_dict(saved["outputs"])
        self.agenda.load_state_dict(saved["agenda"], kept, self.now.steps)


@final
class Steps:
    """Runs the steps of a loop, pausing only where an item may be due.

    Args:
      loop: The loop.
      call: The engine's current call.
      run: The run's progress, outputs and items.
      plan: The plan that an experiment adds to the loop.
      options: The options that determine how the steps run.
      data: The object that reads the loop's batches.
    """

    def __init__(self, loop: Any, call: Call, run: Run, plan: Plan, options: Options, data: LoopData):
        self._loop, self._call, self._run, self._plan = loop, call, run, plan
        self._options, self._data = options, data
        self._requests = run.agenda.job.requests.outermost

    def __call__(self, num_batches: int | None) -> None:
        """Runs at most `num_batches` steps. If `num_batches` is None, the number of steps is not limited.

        Stops early when the data ends, after a signal, or when an item asks the run to stop. Also stops at the end of a
        loop, unless nothing has to be called there.
        """
        run, updates, loop_steps = self._run, self._call.updates, self._plan.loop_steps
        left = NEVER[0] if num_batches is None else num_batches
        until = run.now.steps + left * updates
        goal = self._next_goal() if left > 0 else None
        while goal is not None:
            self._call.place = "the dataset"
            try:
                left -= self._run_stretch(min(left, self._room(goal)), goal)
            except BaseException:
                run.pass_ends(loop_steps, updates, also_here=run.now.steps < min(goal.step, until))
                raise
            run.pass_ends(loop_steps, updates, also_here=False)
            goal = self._call_what_is_due(goal, left)

    # What is due -------------------------------------------------------------------------------------

    def _next_goal(self) -> Goal:
        return self._run.agenda.goal(self._run.now, self._plan.stop) if self._call.updates else Goal()

    def _call_what_is_due(self, goal: Goal, left: int) -> Goal | None:
        """Calls the items that are due after the latest steps, unless the loop ends or is interrupted there.

        Returns the next `Goal`, or None if no more steps should run in the current call to `Steps`.

        Args:
          goal: The goal that limited the latest steps.
          left: The number of batches that may still be used in this call.
        """
        call, run, plan, requests = self._call, self._run, self._plan, self._requests
        ends_loop = plan.ends_loop(run.now.steps)
        if self._data.feed.has_ended:
            call.outcome.data_ended = True
            return None
        if requests.signum is not None:
            call.outcome.is_interrupted = left > 0 and not ends_loop and not plan.ends_at(run.now)
            return None
        if left == 0:
            return None
        is_reached = run.now.steps >= goal.step or requests.pauses
        is_reached = call.updates > 0 if is_reached else goal.time < math.inf and run.clock.time() >= goal.time
        if ends_loop and (is_reached or not self._passes_end()):
            return None
        if not is_reached:
            return goal
        now, spent = run.at_moment(run.now.loops), run.stopwatch.spent()
        if plan.ends_at(now) or not self.has_more(now):
            return None  # The loop ends here, and its `end` hook runs before the items.
        call.place = "the actions"
        checks.mark_donated(call.state, self._loop)  # The next step donates it.
        run.now = run.agenda.hold(call.state, now, spent)
        call.outcome.is_interrupted = requests.signum is not None
        return None if call.outcome.is_interrupted or run.agenda.wants_stop else self._next_goal()

    def has_more(self, now: Elapsed, *, ends_loop: bool = False) -> bool:
        """Returns True if there is another batch. If the buffer is empty, reads a batch ahead.

        Also returns True, without reading a batch, if the next loop's `begin` hook will return a new iterator.

        Args:
          now: The run's progress.
          ends_loop: Whether a loop ends at the current step.
        """
        self._call.place = "the dataset"
        savers = [item for item in self._run.agenda.items if item.rank == Rank.SAVE]
        pauses = self._requests.pauses  # A command may ask for a save.
        saves = pauses or any([item.is_due(now, now.loops) for item in savers])
        feed, source = self._data.feed, self._data.source
        if self._data.is_wrapped and ends_loop and not feed.has_ended:
            return True  # The next loop wraps the data again, and a batch that is read ahead here would be lost.
        if saves and not feed.num_ahead:
            source.mark()
        with self._run.stopwatch.counting("data"):
            has_more = feed.has_more()
        source.consumed(feed.num_ahead)
        self._call.outcome.data_ended |= not has_more
        return has_more

    def _passes_end(self) -> bool:
        """Ends a loop without calling any hook or item, and returns True.

        If the run may end here, returns False without ending the loop.
        """
        run = self._run
        if not self.has_more(run.now) or self._requests.signum is not None:
            return False
        run.outputs.cut()
        if run.outputs.pending.may_stop and run.outputs.loop().asks_to_stop:
            return False
        run.pass_ends(self._plan.loop_steps, self._call.updates, also_here=True)
        return True

    # Stretches ---------------------------------------------------------------------------------------

    def _room(self, goal: Goal) -> int:
        """Returns the number of batches to process without a pause.

        This is the number of batches until the goal or the end of the loop, whichever comes first. The end of the loop
        is ignored if the outputs are plain (see `Pending`) and nothing is scheduled by time. In an evaluation, the
        number is unlimited.
        """
        now, updates, loop_steps = self._run.now.steps, self._call.updates, self._plan.loop_steps
        if not updates:
            return NEVER[0]
        room = -(-(goal.step - now) // updates)
        if loop_steps is None or (goal.time == math.inf and self._run.outputs.pending.are_plain):
            return room
        return min(room, (loop_steps - now % loop_steps) // updates)

    def _run_stretch(self, room: int, goal: Goal) -> int:
        """Runs at most `room` steps, counts them, and stores their outputs. Returns the number of steps that ran."""
        call, run, feed, pending = self._call, self._run, self._data.feed, self._run.outputs.pending
        program, requests = call.program, self._requests
        assert program is not None
        step = program.step
        by_clock = goal.time < math.inf
        deadline = run.clock.deadline(goal.time) if by_clock and feed.joint is None else math.inf
        room = 1 if program.custom is not None or (by_clock and feed.joint is not None) else room
        size = self._options.steps_per_dispatch
        if feed.joint is not None:
            self._data.source.mark(if_cheap=True)
        call.ran = ran = Ran(call.state, run.now.steps, pending.newest)
        try:
            if not (1 < size <= room and program.run_fused(ran, feed, size)) and not feed.has_ended:
                program.run(ran, feed, min(room, pending.room), requests, deadline)
        except BaseException as error:
            if ran.is_in_step and isinstance(error, Exception | SystemExit):
                failed = len(ran.examples) + (step.rescued_state is None)  # A rescued step has been counted.
                failed = run.now.steps + failed * max(call.updates, 1)
                call.outcome.failure = call.outcome.failure._replace(step_num=failed)
            if ran.is_in_step or not requests.supersedes(error):
                raise
        finally:
            run.stopwatch.move(ran.in_data, "data")
            call.state, call.ran, number = ran.state, None, len(ran.examples)
            call.place = step if ran.is_in_step else call.place
            if feed.joint is not None:
                ran.examples, run.clock.agreed = feed.count(number), feed.joint.secs or run.clock.agreed
            run.count(ran.examples, call.updates)
            pending.account(ran.examples)
            is_undone = ran.is_in_step and step.rescued_state is None
            self._data.source.consumed(feed.num_ahead + is_undone)
        if number:
            if run.agenda.owes_trim:
                run.agenda.trim()
            call.place = step
            if due := pending.push(number, ran.state):
                run.outputs.fetch(due)
            if self._options.checks_count:
                self.check_count()
        return number

    def check_count(self) -> None:
        """Raises an error if `state.step` doesn't match the run's step count.

        Does nothing once the check has passed.
        """
        step, run, updates = self._loop.step, self._run, self._call.updates
        count = getattr(self._call.state, "step", None)
        if not (self._options.checks_count and updates and run.batches) or count is None:
            return
        step_num, number, counted = run.now.steps, run.batches, int(metrics.fetch(count))
        if counted != step_num:
            raise ValueError(
                f"{step!r} ran on {number} batch{'es' if number > 1 else ''} from state.step "
                f"{step_num - number * updates}, and state.step is now {counted}, not {step_num}. "
                f"{checks.counting_hint(step)}"
            )
        self._options.checks_count = False
