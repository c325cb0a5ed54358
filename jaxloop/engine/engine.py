"""The engine: the loop over loops, and the loop over steps."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, final

import numpy as np
from absl import logging

from jaxloop import metrics, partition, types
from jaxloop.actions.action import Action
from jaxloop.base import checks, timing
from jaxloop.base.timing import Spent
from jaxloop.data.sources import indexed
from jaxloop.engine.agenda import ActionItem, Ended, Moment, Rank
from jaxloop.engine.auto import STEPS_TRIED, find_steps_per_dispatch
from jaxloop.engine.feed import Feed, as_iterator
from jaxloop.engine.plan import Plan
from jaxloop.engine.program import Program, Ran
from jaxloop.engine.run import Run
from jaxloop.metrics import LoopOutputs
from jaxloop.processes import agreement, interrupt
from jaxloop.schedules import NEVER, Elapsed, Goal
from jaxloop.step import nonfinite

# If one of these is overridden, each loop has its own call to `run`.
_HOOKS = ("begin", "run", "end", "update_outputs", "_get_next_batch")
_ENDLESS = Goal(NEVER[0], math.inf, NEVER[0])


@final
@dataclasses.dataclass
class Options:
    """How a loop runs its steps. See `TrainLoop`.

    Attributes:
      steps_per_dispatch: The number of steps in one dispatch; None until "auto" has measured it.
      nan_policy: What to do about NaN and infinity.
      max_in_flight: The maximum number of steps by which the host may run ahead; None for the default.
      evaluates: True if the loop never changes the state.
      checks_count: Whether to check that `state.step` counts the updates.
    """

    steps_per_dispatch: int | None = 1
    nan_policy: nonfinite.NanPolicy = "ignore"
    max_in_flight: int | None = None
    evaluates: bool = False
    checks_count: bool = False


@final
@dataclasses.dataclass
class Call:
    """One call of an engine and, afterwards, its outcome.

    Attributes:
      step_num: The number of updates, counted on the host.
      updates: The number of updates per batch; 0 if the call evaluates.
      program: The program that runs the steps; None after the call.
      guard: The object that looks for NaN and infinity; None if they are ignored.
      state: The state after the last completed step; None after the call.
      place: What is running, for the note on an exception.
      weights: The number of examples in each step of the current loop.
      data_ended: True if the data have ended.
      is_interrupted: True if a signal came before all steps of a loop had run.
      failed_step: The number of the step that raised an exception; None if no step did.
      ran: The steps that are running now; None between them.
      rescued: After an exception, the state and None, or None and the reason why there is no state.
    """

    step_num: int = 0
    updates: int = 1
    program: Program | None = None
    guard: nonfinite.Guard | None = None
    state: Any = None
    place: Any = "the dataset"
    weights: Sequence[int] = ()
    data_ended: bool = False
    is_interrupted: bool = False
    failed_step: int | None = None
    ran: Ran | None = None
    rescued: tuple[Any, str | None] = (None, None)


@final
class Engine:
    """Runs the loops of one `Loop` object, and calls its hooks.

    Args:
      loop: The loop.
      max_in_flight: See `Options`.

    Attributes:
      options: How the steps run.
      job: The processes that train together.
      run: Everything that lasts from call to call.
      plan: What an experiment adds to the loop.
      begin_actions: The loop's begin actions.
      end_actions: The loop's end actions.
      statistics: The object that measures intervals; None if nothing is measured.
      observers: Functions to call with each batch.
      call: The current call, or the last one.
    """

    def __init__(self, loop: Any, max_in_flight: int | None):
        self._loop, self._runner = loop, loop.step._runner
        self.options: Options = Options(max_in_flight=max_in_flight)
        self.job: agreement.Job = agreement.Job(agreement.is_shared(loop.step.partitioner.mesh))
        self.run: Run = Run(self.job, self.measure)
        self.plan: Plan = Plan(is_alone=True)
        self.begin_actions: Sequence[ActionItem] = ()
        self.end_actions: Sequence[ActionItem] = ()
        self.statistics: Any = None
        self.observers: list[Callable[[types.Batch], None]] = []
        self.call: Call = Call()
        self._feed = Feed(iter(()))
        self._known_count: tuple[Any, int] = (None, 0)  # A `state.step`, and its value.
        self._has_checked_count = False

    @property
    def requests(self) -> interrupt.Interruptible:
        """The signals that have arrived."""
        return self.job.requests

    def set_actions(self, begin: Sequence[Action], end: Sequence[Action]) -> None:
        """Sets the loop's actions."""
        context = lambda now: self.plan.context(now)
        self.begin_actions = [ActionItem(each, context) for each in begin]
        self.end_actions = [ActionItem(each, context) for each in end]
        self.set_plan(None)

    def set_plan(self, plan: Plan | None) -> None:
        """Sets what an experiment adds to the loop; None after the experiment."""
        self.plan, agenda = plan or Plan(is_alone=True), self.run.agenda
        for item in self.plan.items:
            if item not in agenda.items:
                item.reset(self.run.stopwatch.spent(), self.run.outputs.position)
        agenda.items = sorted([*self.plan.items, *self.end_actions], key=lambda item: item.rank)
        agenda.keeps_loops = any(checks.is_user_defined(self._loop, name) for name in ("update_outputs", "end"))
        no_context = lambda now: {}
        of_step = (action for each in self._runner.action_lists for action in each.actions)
        agenda.others = [*self.begin_actions, *(ActionItem(action, no_context) for action in of_step)]

    def description(self) -> list[str]:
        """Returns lines that describe the loop. They must be identical in all processes of a job."""
        head = [repr(self._loop), f"  {self._loop.step!r}", f"  max_steps_in_flight={self.max_in_flight}"]
        return [*head, *(f"  {item.name}, interval {item.interval!r}" for item in self.run.agenda.all_items)]

    # The loop over loops -------------------------------------------------------------------------------

    def loops(
        self, state: Any, data: Callable[[], Any], steps: Callable[[], int | None], *, trains: bool = True
    ) -> tuple[Any, LoopOutputs]:
        """Runs one loop or, in an experiment, one after another.

        Args:
          state: The state.
          data: A function that returns the data of the next loop.
          steps: A function that returns the number of steps of the next loop; None for all of its data.
          trains: False if the call evaluates.

        Returns:
          The state, and the last loop's outputs.
        """
        loop, run, requests, outputs = self._loop, self.run, self.requests, LoopOutputs()
        policy = self.options.nan_policy if trains else "ignore"
        with self._runner.programs.watched(policy, run.stopwatch):
            call = self._begin_call(state, trains)
            try:
                with requests, run.stopwatch.counting("dispatch"):
                    while True:
                        state, iterator = self._begin_loop(call.state, data())
                        state, outputs = self._checked(loop.run(state, iterator, steps()))
                        if not run.batches:
                            if not self._continues_without_batches(state):
                                break
                        elif call.is_interrupted and not (trains and self.plan.is_alone):
                            if trains:  # Another call continues the loop.
                                now, spent = run.at_moment(run.now.loops), run.stopwatch.spent()
                                run.agenda.hold(state, now, spent, may_end=True)
                                outputs.update(self.measure(state))
                            break
                        else:
                            state, outputs = self._end_loop(state, outputs)
                            if self.plan.is_alone or not trains or self._is_over:
                                break
                    if requests.outermost is requests:
                        self.job.any_stops()  # Detects signals that arrived after the last batch.
            except BaseException as error:
                call.rescued = self._rescue(error)
                raise
            finally:
                if trains:
                    self._known_count = getattr(call.state, "step", None), call.step_num
                call.state = call.program = None
                if not trains and run.batches:
                    run.drop_loop()  # What was measured in an interrupted evaluation.
                if run.wraps_data and (self.plan.is_alone or not trains):
                    self.forget_batches()
        if requests.requested or run.agenda.wants_stop:
            outputs[types.STOP_LOOP] = True
        return state, outputs

    def _begin_call(self, state: Any, trains: bool) -> Call:
        run, step, plan, options = self.run, self._loop.step, self.plan, self.options
        state = self._runner.states.prepare(state)
        step_num = self.step_num_of(state)
        if trains:
            if step_num != run.now.steps:  # Not the state that the last call returned.
                run.begin(Elapsed(step_num, loops=run.loops))
            checks.mark_donated(state, f"{self._loop!r}, which began at step {step_num}")
        elif plan.is_alone:
            run.now = dataclasses.replace(run.now, steps=step_num)
        if plan.is_alone:
            run.batches = 0
            if not trains:  # The same state may be evaluated again.
                for item in run.agenda.items:
                    item.called_at = None
        run.agenda.begin_call()
        updates, place, guard = step.updates_per_step if trains else 0, run.outputs.position, None
        if trains and options.nan_policy != "ignore":
            names = self._runner.programs.detector(options.nan_policy).names
            number_of = lambda at: step_num + (at - place + 1) * updates
            guard = nonfinite.Guard(options.nan_policy, names, number_of)
        observers = [*self.observers, *(self.statistics.observers() if self.statistics else ())]
        custom = self._run_custom if self._calls_step(trains) else None
        program = Program(step, evaluates=not trains, custom=custom, observers=observers)
        self.call = call = Call(step_num, updates, program, guard, state)
        self._set_up_outputs(guard)
        return call

    def _set_up_outputs(self, guard: nonfinite.Guard | None) -> None:
        outputs, has_update = self.run.outputs, checks.is_user_defined(self._loop, "update_outputs")
        outputs.set_limit(self.max_in_flight, keeps=not has_update)
        outputs.update = self._loop.update_outputs if has_update else None
        outputs.guard = guard

    @property
    def step_num(self) -> int:
        """The number of completed updates, including those that have not been counted yet."""
        ran = self.call.ran
        return self.call.step_num + (0 if ran is None else len(ran.examples) * self.call.updates)

    def step_num_of(self, state: Any) -> int:
        """Returns the number of completed updates: `state.step`, or the loop's own count if the state has no `step`."""
        count, (known, number) = getattr(state, "step", None), self._known_count
        if count is None:
            return self.call.step_num
        return number if count is known else int(metrics.fetch(count))  # Reading waits for the devices.

    def _begin_loop(self, state: Any, dataset: Any) -> tuple[Any, Iterator[types.Batch]]:
        """Calls the `begin` hook. In a loop that is continued, only if it wraps the data, and its state is ignored."""
        run = self.run
        if run.batches == 0:
            run.outputs.cut()
            run.outputs.begin_loop()
            run.ended = None
            if self.begin_actions:
                self._call_begin_actions(state)
        if self.statistics is not None:
            self.statistics.begin_loop()
        if run.batches and not run.wraps_data:
            return state, as_iterator(dataset)
        new_state, iterator = self._loop.begin(state, dataset)
        run.wraps_data = iterator is not dataset
        return (state if run.batches else new_state), iterator

    def _call_begin_actions(self, state: Any) -> None:
        run, plan = self.run, self.plan
        now = dataclasses.replace(run.now, time=run.time(), is_last=False) if plan.at is None else plan.at
        asked = dataclasses.replace(now, loops=now.loops + 1, previous=run.began_at)
        for item in self.begin_actions:
            item.called_at = None
            if item.is_due(asked, run.loops + 1):
                spent = run.stopwatch.spent()
                with run.stopwatch.counting(item.action.time_category):
                    item.call(Moment(state, now, None, spent - item.spent))
                item.calls, item.spent = item.calls + 1, spent
        run.began_at = asked.without_previous()

    def _end_loop(self, state: Any, outputs: LoopOutputs) -> tuple[Any, LoopOutputs]:
        """Calls the `end` hook, and then everything that is due at the end of the loop."""
        run, call, hook = self.run, self.call, f"{type(self._loop).__name__}.end"
        state, found = checks.check_result(self._loop.end(state, outputs), hook)
        outputs, start = LoopOutputs(found, outputs.num_examples), run.outputs.loop_start
        if call.updates:
            call.state = state
        run.agenda.wants_stop |= outputs.asks_to_stop
        run.end_loop()  # Before the calls, so that a checkpoint that one of them saves is one at the end of a loop.
        spent = run.stopwatch.spent()  # Without the time to read ahead.
        run.now = now = self._now_at_end()
        call.place = "the actions"
        run.ended = Ended(outputs.copy(), start, run.loops)
        run.now = run.agenda.hold(state, now, spent, run.ended)
        return state, outputs

    def _now_at_end(self) -> Elapsed:
        run, plan = self.run, self.plan
        if plan.is_alone:
            return run.at_moment(run.loops, is_last=not self.call.is_interrupted)
        if plan.at is not None:
            return dataclasses.replace(plan.at, previous=run.now.without_previous())
        now = run.at_moment(run.now.loops + 1)
        is_last = run.agenda.wants_stop or plan.ends_at(now)
        if not is_last and not self.requests.requested and not self._has_more(now, ends_loop=True):
            is_last = not plan.next_data()
        return dataclasses.replace(now, is_last=is_last)

    def _continues_without_batches(self, state: Any) -> bool:
        """Handles a loop without batches: the data ended with the last loop. Returns True if there is more data."""
        run, plan = self.run, self.plan
        if plan.is_alone or plan.at is not None or not self.call.data_ended:
            return False
        if plan.next_data():
            return True
        if run.now.previous is not None and not self.requests.requested:  # The last step was the last of the run.
            run.now = run.agenda.hold(state, run.at_moment(run.now.loops, is_last=True), run.stopwatch.spent())
        return False

    @property
    def _is_over(self) -> bool:
        return self.run.now.is_last or self.run.agenda.wants_stop or self.requests.requested

    # The loop over steps -------------------------------------------------------------------------------

    def advance(self, state: Any, dataset: Iterator[types.Batch], num_steps: int | None) -> tuple[Any, Any]:
        """Runs steps up to the end of a loop. Between them, calls what is due. The default of `Loop.run`."""
        call, run, plan, step = self.call, self.run, self.plan, self._loop.step
        limit = None if num_steps is None else num_steps // max(call.updates, 1)
        feed, goal = self._feed_of(dataset, limit), self._goal()
        call.state = self._runner.states.prepare(state)
        call.place, left = "the dataset", NEVER[0] if limit is None else limit
        until = run.now.steps + left * call.updates
        try:
            while left > 0:
                try:
                    left -= self._run_some(feed, min(left, self._room(goal)), goal)
                except BaseException:
                    self._pass_ends(also_here=run.now.steps < min(goal.step, until))
                    raise
                self._pass_ends()
                if feed.has_ended:
                    call.data_ended = True
                    break
                if self.requests.requested:
                    ends_here = plan.ends_loop(run.now.steps) or plan.ends_at(run.now)
                    call.is_interrupted = left > 0 and not ends_here
                    break
                is_reached = left > 0 and self._is_reached(goal)
                if left > 0 and plan.ends_loop(run.now.steps) and (is_reached or not self._pass_loop_end()):
                    break
                if is_reached:
                    now, spent = run.at_moment(run.now.loops), run.stopwatch.spent()
                    if plan.ends_at(now) or not self._has_more(now):
                        break  # The loop ends here, and its `end` comes first.
                    call.place = "the actions"
                    checks.mark_donated(call.state, repr(self._loop))  # The next step donates it.
                    run.now = run.agenda.hold(call.state, now, spent)
                    if run.agenda.wants_stop or self.requests.requested:
                        call.is_interrupted = self.requests.requested
                        break
                    goal = self._goal()
                call.place = "the dataset"
            call.place = step
            if not (call.is_interrupted and call.updates and not plan.is_alone):
                run.outputs.cut()
            found = run.outputs.loop()
            if call.guard is not None:
                call.guard.report(repr(self._loop))
            call.weights = found.num_examples
            return call.state, found
        except BaseException as error:
            if call.guard is None or error is not call.guard.error:
                error.add_note(f"in {call.place}, after step {call.step_num}, in {self._loop!r}")
            raise
        finally:
            if call.program is not None and call.program.custom is None and call.state is not None:
                self._runner.states.remember(call.state)  # An `end` hook may return any state.

    def check_schedules(self) -> None:
        """Raises an error if a schedule doesn't return a later step."""
        self.run.agenda.goal(self.run.now, self.plan.schedules)

    def _goal(self) -> Goal:
        return self.run.agenda.goal(self.run.now, self.plan.schedules) if self.call.updates else _ENDLESS

    def _is_reached(self, goal: Goal) -> bool:
        """Returns True if something may be due now."""
        if self.run.now.steps >= goal.step or self.requests.outermost.pauses:
            return self.call.updates > 0
        return goal.time < math.inf and self.run.time() >= goal.time

    def _room(self, goal: Goal) -> int:
        """Returns the number of batches up to the goal or, unless nothing needs it, the next end of a loop."""
        now, updates, loop_steps = self.run.now.steps, self.call.updates, self.plan.loop_steps
        if not updates:
            return NEVER[0]
        room = -(-(goal.step - now) // updates)
        if loop_steps is None or (goal.time == math.inf and self.run.outputs.are_plain):
            return room
        return min(room, (loop_steps - now % loop_steps) // updates)

    def _run_some(self, feed: Feed, room: int, goal: Goal) -> int:
        """Runs some steps, counts them, and takes over their outputs. Returns their number of batches."""
        call, run, outputs = self.call, self.run, self.run.outputs
        program, requests = call.program, self.requests.outermost
        assert program is not None
        by_clock, deadline = goal.time < math.inf, math.inf
        if by_clock and not self.job.is_shared:
            deadline = run.deadline(goal.time)
        room = 1 if program.custom is not None or (by_clock and self.job.is_shared) else room
        if self.options.steps_per_dispatch is None and room >= STEPS_TRIED:
            self._find_steps_per_dispatch(feed)
        size = self.options.steps_per_dispatch or 1
        call.ran = ran = Ran(call.state, call.step_num, outputs.newest)
        try:
            if not (1 < size <= room and program.run_fused(ran, feed, size)) and not feed.has_ended:
                program.run(ran, feed, min(room, outputs.room), requests, deadline)
        except BaseException as error:
            if ran.is_in_step and isinstance(error, Exception):
                call.failed_step = call.step_num + (len(ran.examples) + 1) * max(call.updates, 1)
            if ran.is_in_step or not self.requests.supersedes(error):
                raise
        finally:
            run.stopwatch.move(ran.in_data, "data")
            call.state, number = ran.state, len(ran.examples)
            call.place = self._loop.step if ran.is_in_step else call.place
            if feed.joint is not None and number:
                ran.examples, times = map(list, zip(*feed.joint.counted(number), strict=True))
                run.agreed = times[-1]
            run.count(ran.examples, call.updates)
            outputs.account(ran.examples)
            call.ran, call.step_num = None, call.step_num + number * call.updates
            is_undone = ran.is_in_step and self._loop.step.rescued_state is None
            self.plan.consumed(feed.num_ahead + is_undone)
        if number:
            if run.agenda.owes_trim:
                run.agenda.trim()
            call.place = self._loop.step
            outputs.push(number, ran.state)
            self._check_count()
        return number

    def _pass_ends(self, *, also_here: bool = False) -> None:
        """Ends the loops that the latest steps completed without a stop, except for one that ends at the last of them.

        With `also_here`, ends that one, too.
        """
        run, updates, loop_steps = self.run, self.call.updates, self.plan.loop_steps
        if updates and loop_steps is not None and run.batches * updates > run.now.steps % loop_steps:
            has_passed = run.pass_ends(loop_steps, updates, also_here=also_here)
            if has_passed and self.statistics is not None:
                self.statistics.begin_loop()

    def _pass_loop_end(self) -> bool:
        """Ends a loop at whose end nothing is due. Returns False if something ends the run here."""
        run = self.run
        if not self._has_more(run.now) or self.requests.requested:
            return False
        run.outputs.cut()
        if run.outputs.may_stop and run.outputs.loop().asks_to_stop:
            return False
        run.end_loop()
        run.now, run.ended = dataclasses.replace(run.now, loops=run.now.loops + 1), None
        if self.statistics is not None:
            self.statistics.begin_loop()
        return True

    def loop_end(self, step_num: int) -> int | None:
        """Returns the number of steps to the next end of a loop at which something may be due."""
        plan, run = self.plan, self.run
        ends = [] if plan.total is None else [plan.total - step_num]
        if plan.loop_steps is not None:
            first, idle = plan.loop_steps - step_num % plan.loop_steps, 0
            can_pass = not self.begin_actions and self.call.guard is None
            if can_pass and not any(checks.is_user_defined(self._loop, name) for name in _HOOKS):
                idle = run.agenda.goal(run.now, plan.schedules).loop - run.now.loops - 1
            ends.append(min(first + idle * plan.loop_steps, NEVER[0]))
        return min(ends, default=None)

    def _has_more(self, now: Elapsed, *, ends_loop: bool = False) -> bool:
        """Returns True if there is another batch, which is then read ahead."""
        feed, plan, call = self._feed, self.plan, self.call
        call.place = "the dataset"
        if self.run.wraps_data and ends_loop and not feed.has_ended:
            return True  # The next loop wraps the data anew, and a batch that is read ahead here would be lost.
        saves = any(item.rank == Rank.SAVE and item.is_due(now, now.loops) for item in self.run.agenda.items)
        if saves and not feed.num_ahead:
            plan.mark()
        with self.run.stopwatch.counting("data"):
            has_more = feed.has_more()
        call.data_ended |= not has_more
        plan.consumed(feed.num_ahead)
        return has_more

    def hold_now(self, state: Any, *, is_last: bool = False, at_end: bool = False, only_saves: bool = False) -> bool:
        """Calls what is due at a moment between two calls. Returns False if any of it asks the run to stop.

        There are two such moments: before the first step and, in a resumed run, at the step of the checkpoint. Nothing
        is called twice at the same step.

        Args:
          state: The state.
          is_last: Whether the run ends here.
          at_end: Whether a loop ends here.
          only_saves: Whether to call only the actions that save checkpoints.
        """
        run, agenda = self.run, self.run.agenda
        self.call.updates = 0 if self.options.evaluates else self._loop.step.updates_per_step
        with self.requests, run.stopwatch.counting("dispatch"):
            now = dataclasses.replace(run.now, is_last=is_last or self.plan.ends_at(run.now))
            now = dataclasses.replace(now, previous=now.previous or now.without_previous())
            agenda.wants_stop &= is_last
            had_stopped = agenda.wants_stop
            ended = run.ended or Ended(LoopOutputs(), run.outputs.loop_start, run.loops) if at_end else None
            agenda.hold(state, now, run.stopwatch.spent(), ended, only_saves=only_saves)
        return had_stopped or not agenda.wants_stop

    # Steps -----------------------------------------------------------------------------------------------

    def _calls_step(self, trains: bool) -> bool:
        has_work = self._runner.work_for_each_step(evaluates=not trains) is not None
        return has_work or checks.is_user_defined(self._loop, "_run_one_step")

    def _run_custom(self, state: Any, batch: types.Batch, number: int) -> tuple[Any, types.Output]:
        return self._loop._run_one_step(state, batch, self.run.batches + number)

    def run_one_step(self, state: Any, batch: types.Batch, number: int) -> tuple[Any, types.Output]:
        """Runs one step with all of its hooks and actions. The default of `Loop._run_one_step`."""
        step, run, elapsed, joint = self._loop.step, self.run, None, self._feed.joint
        if not self.call.updates:
            return state, step.evaluate(state, batch, number)
        if self._runner.has_schedules:
            samples = self._runner.count_examples(batch) if joint is None else joint.next_examples
            elapsed = run.now.advance(samples=samples, time=run.time(), steps=self.call.updates)
        return step(state, batch, number, elapsed=elapsed)

    @property
    def max_in_flight(self) -> int:
        """The number of steps by which the host may run ahead."""
        mesh, options = self._loop.step.partitioner.mesh, self.options
        return options.max_in_flight or partition.max_steps_in_flight(mesh, options.steps_per_dispatch or 1)

    def set_steps_per_dispatch(self, value: int | Literal["auto"]) -> None:
        """Sets the number of steps in one dispatch. Raises an error if they can't run in one."""
        name = type(self._loop).__name__
        if value == "auto":  # The measurements of several processes would differ.
            self.options.steps_per_dispatch = 1 if self.job.is_shared else None
            return
        checks.check_positive(f"{name}.steps_per_dispatch", value)
        if value > 1 and checks.is_user_defined(self._loop, "_run_one_step"):
            raise ValueError(
                f"{name} overrides _run_one_step, which is called once per step. Use steps_per_dispatch=1, or don't "
                "override it."
            )
        if value > 1:
            Program(self._loop.step, evaluates=self.options.evaluates).check_fuses()
        self.options.steps_per_dispatch = int(value)

    def _find_steps_per_dispatch(self, feed: Feed) -> None:
        """Determines the faster number of steps per dispatch on copies of the state, and puts the batches back."""
        call, options = self.call, self.options
        with self.run.stopwatch.counting("data"):
            batches = feed.take(STEPS_TRIED)
        try:
            if len(batches) == STEPS_TRIED:
                options.steps_per_dispatch = find_steps_per_dispatch(
                    self._loop.step, call.state, batches, evaluates=not call.updates
                )
            elif not call.updates:  # Later evaluations read the same data.
                options.steps_per_dispatch = 1
        except Exception as error:  # A step that fails will fail again when it really runs, with its usual note.
            logging.warning("steps_per_dispatch='auto' uses 1, because the measurement failed: %r", error)
            options.steps_per_dispatch = 1
        finally:
            feed.put_back(batches)
        self._set_up_outputs(call.guard)

    def compile(self, state: Any, batch: types.BatchSpec) -> None:
        """Compiles everything needed to run steps on batches like this one; see `Loop.compile`."""
        options, dataset = self.options, indexed(batch)
        batches = [batch] if dataset is None else dataset.first_of_each_size()
        numbers = sorted({options.steps_per_dispatch or STEPS_TRIED, 1}, reverse=True)
        with self._runner.programs.watched(options.nan_policy):
            for each, number in itertools.product(batches, numbers):
                self._loop.step.compile(state, each, evaluates=options.evaluates, steps_per_dispatch=number)

    # Data ------------------------------------------------------------------------------------------------

    def _feed_of(self, dataset: Iterator[types.Batch], num_batches: int | None) -> Feed:
        """Returns an iterator's feed. It is reused for the same iterator, so that batches read ahead aren't lost."""
        if self._feed.dataset is not dataset:
            self._open(dataset)
        if self.job.is_shared and not self._feed.num_ahead:
            self.plan.mark()  # From here on, batches are read ahead, and some sources lose track of their position.
        self._feed.begin(num_batches)
        self.plan.consumed(self._feed.num_ahead)
        if not self.call.updates:
            self._loop.step.begin_evaluation()
        return self._feed

    def _open(self, dataset: Iterator[types.Batch]) -> None:
        read = self._loop._get_next_batch if checks.is_user_defined(self._loop, "_get_next_batch") else None
        self._feed = Feed(dataset, read, self._join if self.job.is_shared else None)
        if not self.options.evaluates:
            found = indexed(dataset)
            self._runner.batch_watch.declared_sizes = () if found is None else found.batch_sizes

    def _join(self, read: Callable[[], types.Batch]) -> agreement.JointReader:
        """Returns a reader that reads batches jointly with the other processes."""
        runner, stopwatch = self._runner, self.run.stopwatch

        def timed() -> types.Batch:
            began = timing.clock()
            try:
                return read()
            finally:
                stopwatch.secs_reading += timing.clock() - began

        return agreement.JointReader(
            repr(self._loop),
            timed,
            before_reading=lambda: self.plan.mark(if_cheap=True),
            count=runner.count_examples,
            requests=self.requests,
            secs=stopwatch.training_secs,
            on_difference=runner.batch_watch.expect_differences,
            fill_to=runner.filler(),
            until_all_processes_end=not self.call.updates,
        )

    def next_batch(self, dataset: Iterator[types.Batch]) -> types.Batch:
        """Returns the batch that the next step would receive."""
        if self._feed.dataset is not dataset:
            self._open(dataset)
        return self._feed.reader()()

    def forget_batches(self) -> None:
        """Drops the batches that were read ahead."""
        self._feed = Feed(iter(()))

    def batches_ahead(self, source: Any) -> int:
        """Returns the number of batches that were read from a source but not used."""
        return self._feed.num_ahead if self._feed.dataset is source else 0

    # Saving and resuming ---------------------------------------------------------------------------------

    def resume(self, elapsed: Elapsed, batches: int = 0) -> None:
        """Sets the loop's counters to the progress of an earlier run, so that counting continues from there.

        Args:
          elapsed: The progress of the earlier run.
          batches: The number of batches of the current loop that the earlier run used.
        """
        self.run.begin(elapsed, batches)
        self.call.step_num = elapsed.steps

    def state_dict(self, *, in_moment: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns what a checkpoint stores about the loop: JSON values, and the train states that actions keep.

        Args:
          in_moment: True if some items may have to be called again after a resume.
        """
        saved, kept = self.run.state_dict(in_moment=in_moment)
        return {**saved, "steps_per_dispatch": self.options.steps_per_dispatch}, kept

    def load_state_dict(self, saved: Mapping[str, Any], kept: Mapping[str, Any]) -> None:
        """Restores a `state_dict`."""
        self.run.load_state_dict(saved, kept)
        self.call.step_num = self.run.now.steps
        if self.options.steps_per_dispatch is None:  # A different number could change the last bits of the results.
            self.options.steps_per_dispatch = saved["steps_per_dispatch"]

    # Checks and measures -----------------------------------------------------------------------------------

    def _checked(self, result: Any) -> tuple[Any, LoopOutputs]:
        state, found = checks.check_pair(result, f"{type(self._loop).__name__}.run", "(state, outputs)")
        outputs = found if isinstance(found, LoopOutputs) else LoopOutputs(found)
        outputs.num_examples = list(self.call.weights)
        return state, outputs

    def measure(self, state: Any, spent: Spent | None = None) -> dict[str, Any]:
        """Returns the statistics of an interval; by default, of the current loop."""
        if self.statistics is None:
            return {}
        found = self.statistics.of(state, spent, updates=max(self.call.updates, 1))
        guard = self.call.guard
        return found if guard is None else found | guard.measure(self.run.outputs.loop_start)

    def _check_count(self) -> None:
        """Raises an error if `state.step` would overflow or, after the first steps, differs from the loop's count."""
        call, options = self.call, self.options
        if not (options.checks_count and call.updates) or not hasattr(call.state, "step"):
            return
        count, step_num = call.state.step, call.step_num
        most = np.iinfo(getattr(count, "dtype", np.int64)).max
        if step_num > most:
            raise ValueError(
                f"state.step ({checks.describe(count)}) can't count beyond {most}, but step {step_num} was reached. "
                "Begin with a smaller state.step."
            )
        if self._has_checked_count:
            return
        step, number, counted = self._loop.step, self.run.batches, int(metrics.fetch(count))
        if counted != step_num:
            raise ValueError(
                f"{step!r} ran on {number} batch{'es' if number > 1 else ''} from state.step "
                f"{step_num - number * call.updates}, and state.step is now {counted}, not {step_num}. "
                f"{checks.counting_hint(step)}"
            )
        self._has_checked_count = number > 0

    def _rescue(self, error: BaseException) -> tuple[Any, str | None]:
        """Determines whether the state after the last completed step can be used after an exception."""
        call, guard, problem, bad = self.call, self.call.guard, None, "it has values that are not finite"
        if isinstance(error, nonfinite.NonFiniteError) and guard is not None and error is guard.error:
            call.failed_step = error.step_num
            return None, bad
        try:
            self.run.outputs.fetch()
        except nonfinite.NonFiniteError as other:
            call.failed_step = other.step_num
            error.add_note(f"before that: {other}")
            return None, bad
        except Exception as other:
            logging.exception("The outputs of the last steps before an exception could not be read.")
            problem = str(other)
        if not checks.is_alive(call.state):
            return None, "it was donated to the step that failed"
        try:
            self._check_count()
        except Exception as other:  # Includes device errors, which are raised when the count is read.
            problem = str(other)
        return (call.state, None) if problem is None else (None, problem)
