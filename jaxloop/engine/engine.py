"""The engine, which runs one loop after another."""

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, final

from absl import logging

from jaxloop import metrics, types
from jaxloop.actions.action import Action
from jaxloop.base import checks
from jaxloop.distributed import agreement
from jaxloop.engine.agenda import ActionItem, Ended, Moment, Rank
from jaxloop.engine.call import Call, Failure, Options, Outcome
from jaxloop.engine.feed import LoopData, as_iterator
from jaxloop.engine.program import Program
from jaxloop.engine.run import Plan, Run, Steps
from jaxloop.metrics import LoopOutputs
from jaxloop.schedules import NEVER, Elapsed
from jaxloop.step import nonfinite

# If one of these is overridden, each loop has its own call to `run`.
_HOOKS = {"begin", "run", "end", "update_outputs", "_get_next_batch"}


@final
class LoopActions(NamedTuple):
    """The begin actions and the end actions of a loop."""

    begin: Sequence[ActionItem] = ()
    end: Sequence[ActionItem] = ()


@final
class Engine:
    """Runs the loops of a `Loop` object and calls the object's hooks.

    Args:
      loop: The loop.
      max_in_flight: See `Options`.

    Attributes:
      options: The options that determine how the steps run.
      run: The run's progress, outputs and items, which are kept between calls.
      data: The object that reads the loop's batches.
      plan: The items and limits that an experiment adds to the loop.
      actions: The loop's actions.
      call: The current call or, between calls, the last one.
    """

    def __init__(self, loop: Any, max_in_flight: int | None):
        self._loop = loop
        job = agreement.Job(agreement.is_shared(loop.step.partitioner.mesh))
        self.options: Options = Options(max_in_flight=max_in_flight)
        self.run: Run = Run(job)
        self.data: LoopData = LoopData(loop, job, self.run.stopwatch)
        self.plan: Plan = Plan(is_alone=True)
        self.actions: LoopActions = LoopActions()
        self.call: Call = Call()

    @functools.cached_property
    def job(self) -> agreement.Job:
        """The processes that train together."""
        return self.run.agenda.job

    @property
    def outcome(self) -> Outcome:
        """The outcome of the latest call."""
        return self.call.outcome

    def set_actions(self, begin: Sequence[Action], end: Sequence[Action]) -> None:
        """Sets the loop's actions."""
        of_begin = [ActionItem(each, {}, Rank.ELSEWHERE) for each in begin]
        self.actions = LoopActions(of_begin, [ActionItem(each, {}) for each in end])
        self.set_plan(None)

    def set_plan(self, plan: Plan | None) -> None:
        """Sets the plan that an experiment adds to the loop. Pass None once the experiment has ended."""
        self.plan, agenda = plan or Plan(is_alone=True), self.run.agenda
        self.data.source = self.plan.source
        spent, position = self.run.stopwatch.spent(), self.run.outputs.position
        for item in self.plan.items:
            if item not in agenda.items:
                item.reset(spent, position)
        for item in (*self.actions.begin, *self.actions.end):
            item.context = self.plan.context
        step = self._loop.step
        of_step = [ActionItem(action, {}, Rank.ELSEWHERE) for action in (*step.begin_actions, *step.end_actions)]
        items = [*self.plan.items, *self.actions.begin, *self.actions.end, *of_step]
        agenda.items = sorted(items, key=operator.attrgetter("rank"))
        agenda.begin_call()

    def description(self) -> list[str]:
        """Returns lines of text that describe the loop. They must be identical in all processes of a job."""
        step = self._loop.step
        head = [repr(self._loop), f"  {step!r}", f"  max_steps_in_flight={self.options.in_flight(step)}"]
        return [*head, *(f"  {item.name}, interval {item.interval!r}" for item in self.run.agenda.items)]

    # The loop over loops -------------------------------------------------------------------------------

    def loops(
        self, state: Any, data: Callable[[], Any], steps: Callable[[], int | None], *, trains: bool = True
    ) -> tuple[Any, LoopOutputs]:
        """Runs a single loop or, in an experiment, one loop after another.

        Args:
          state: The state.
          data: A function that returns the data for the next loop.
          steps: A function that returns the number of steps in the next loop. The function returns None if the loop
            uses all of the data.
          trains: Whether the loops train rather than evaluate.

        Returns:
          The state and the last loop's outputs.
        """
        loop, run, requests, outputs = self._loop, self.run, self.job.requests, LoopOutputs()
        policy, runner = self.options.nan_policy if trains else "ignore", loop.step._runner
        with contextlib.ExitStack() as flushes, runner.programs.watched(policy, run.stopwatch):
            for item in reversed(self.actions.end if self.plan.is_alone else ()):
                flushes.callback(item.action.flush)
            call = self._begin_call(state, trains)
            try:
                with requests, run.stopwatch.counting("dispatch"):
                    self._steps = Steps(self._loop, call, run, self.plan, self.options, self.data)
                    while True:
                        state, iterator = self._begin_loop(call.state, data())
                        state, found = self._checked(loop.run(state, iterator, steps()))
                        outputs = found if run.batches else outputs
                        if not run.batches:
                            if not self._continues_without_batches(state):
                                break
                        elif call.outcome.is_interrupted and not (trains and self.plan.is_alone):
                            if trains:  # Another call continues the loop.
                                now, spent = run.at_moment(run.now.loops), run.stopwatch.spent()
                                run.agenda.hold(state, now, spent, may_end=True)
                                outputs.update(run.agenda.measure(state))
                            break
                        else:
                            state, outputs = self._end_loop(state, outputs)
                            if self.plan.is_alone or not trains or self._is_over:
                                break
                    if requests.outermost is requests:
                        self.job.any_stops()  # Detects signals that arrived after the last batch.
            except BaseException as error:
                call.outcome.failure = self._failure(error)
                raise
            finally:
                if trains:
                    call.count = getattr(call.state, "step", None), run.now.steps
                call.state = call.program = None
                if not trains and run.batches:
                    run.drop_loop()  # The outputs of an interrupted evaluation.
                if self.data.is_wrapped and (self.plan.is_alone or not trains):
                    self.data.forget()
        if requests.requested or run.agenda.wants_stop:
            outputs[types.STOP_LOOP] = True
        return state, outputs

    def _begin_call(self, state: Any, trains: bool) -> Call:
        run, plan = self.run, self.plan
        state = self._loop.step._runner.states.prepare(state)
        (known, step_num), count = self.call.count, getattr(state, "step", None)
        if count is None or count is not known:
            step_num = self.step_num if count is None else int(metrics.fetch(count))  # Reading waits for the devices.
        if trains:
            if step_num != run.now.steps:  # Not the state that the last call returned.
                run.begin(Elapsed(step_num, loops=run.loops))
            checks.mark_donated(state, f"{self._loop!r}, which began at step {step_num}")
        elif plan.is_alone:
            run.now = dataclasses.replace(run.now, steps=step_num)
        if plan.is_alone:
            run.batches = 0
            run.agenda.begin_call()
            if not trains:  # The same state may be evaluated again.
                for item in run.agenda.items:
                    item.called_at = None
        updates = self._loop.step.updates_per_step if trains else 0
        own_hooks = {name for name in _HOOKS if checks.is_user_defined(self._loop, name)}
        self.call = call = Call(updates, self._program(trains), state, own_hooks=own_hooks)
        self._set_up_outputs(step_num)
        return call

    def _program(self, trains: bool) -> Program:
        step, observers = self._loop.step, self.plan.source.observers
        has_work = step._runner.work_for_each_step(evaluates=not trains) is not None
        calls_step = has_work or checks.is_user_defined(self._loop, "_run_one_step")
        custom = (lambda *args: self._loop._run_one_step(*args[:2], self.run.batches + args[2])) if calls_step else None
        if (statistics := self.run.agenda.statistics) is not None:
            observers = [*observers, *statistics.observers()]
        return Program(step, evaluates=not trains, custom=custom, observers=observers)

    def _set_up_outputs(self, step_num: int) -> None:
        """Prepares the outputs for a call that begins at the given step."""
        outputs, updates, policy = self.run.outputs, self.call.updates, self.options.nan_policy
        outputs.update = self._loop.update_outputs if "update_outputs" in self.call.own_hooks else None
        outputs.hooks_read = self.call.changes_outputs
        outputs.pending.in_flight.set_limit(self.options.in_flight(self._loop.step))
        outputs.guard = None
        if updates and policy != "ignore":
            place, names = outputs.position, self._loop.step._runner.programs.detector(policy).names
            outputs.guard = nonfinite.Guard(policy, names, lambda at: step_num + (at - place + 1) * updates)

    @property
    def step_num(self) -> int:
        """The number of completed updates. Unlike `Run.now`, it includes each step as soon as the step is completed."""
        ran, steps = self.call.ran, self.run.now.steps if self.plan.at is None else self.plan.at.steps
        return steps + (0 if ran is None else len(ran.examples) * self.call.updates)

    def _begin_loop(self, state: Any, dataset: Any) -> tuple[Any, Iterator[types.Batch]]:
        """Begins or continues a loop. Returns the state and the iterator to read batches from.

        The `begin` hook is called when a loop begins. When an interrupted loop is continued, the hook is called again
        only if its first call replaced the iterator. The state that the second call returns is ignored.
        """
        run = self.run
        if run.batches == 0:
            run.outputs.cut()
            run.outputs.begin_loop()
            run.agenda.ended = None
            if self.actions.begin:
                self._call_begin_actions(state)
        if run.agenda.statistics is not None:
            run.agenda.statistics.begin_loop(max(self.call.updates, 1))
        if run.batches and not self.data.is_wrapped:
            return state, as_iterator(dataset)
        new_state, iterator = self._loop.begin(state, dataset)
        self.data.is_wrapped = iterator is not dataset
        return (state if run.batches else new_state), iterator

    def _call_begin_actions(self, state: Any) -> None:
        run, plan = self.run, self.plan
        now = dataclasses.replace(run.now, time=run.clock.time(), is_last=False) if plan.at is None else plan.at
        asked = dataclasses.replace(now, loops=now.loops + 1, previous=run.began_at)
        for item in self.actions.begin:
            item.called_at = None
            if item.is_due(asked, run.loops + 1):
                spent = run.stopwatch.spent()
                with run.stopwatch.counting(item.action.time_category):
                    item.call(Moment(state, now, None, spent - item.spent))
                item.spent = spent
        run.began_at = asked.without_previous()

    def _end_loop(self, state: Any, outputs: LoopOutputs) -> tuple[Any, LoopOutputs]:
        """Calls the `end` hook, and then all items that are due at the end of the loop."""
        run, call, hook = self.run, self.call, f"{type(self._loop).__name__}.end"
        state, found = checks.check_result(self._loop.end(state, outputs), hook)
        outputs, start = LoopOutputs(found, outputs.num_examples), run.outputs.loop_start
        if call.updates:
            call.state = state
        if outputs.asks_to_stop:
            run.agenda.stopped_by = run.agenda.stopped_by or f"outputs[{types.STOP_LOOP!r}]"
        run.end_loop()  # Before the calls, one of which may save a checkpoint: the loop must have ended by then.
        spent = run.stopwatch.spent()  # Without the time to read ahead.
        run.now = now = self._now_at_end()
        call.place = "the actions"
        run.agenda.ended = ended = Ended(outputs.copy(), start, run.loops, call.changes_outputs)
        run.now = run.agenda.hold(state, now, spent, ended)
        return state, outputs

    def _now_at_end(self) -> Elapsed:
        run, plan = self.run, self.plan
        if plan.is_alone:
            return run.at_moment(run.loops, is_last=not self.outcome.is_interrupted)
        if plan.at is not None:
            return dataclasses.replace(plan.at, previous=run.now.without_previous())
        now = run.at_moment(run.now.loops + 1)
        is_last = run.agenda.wants_stop or plan.ends_at(now)
        if not is_last and not self.job.requests.requested and not self._steps.has_more(now, ends_loop=True):
            is_last = not plan.source.next_pass()
        return dataclasses.replace(now, is_last=is_last)

    def _continues_without_batches(self, state: Any) -> bool:
        """Handles a loop that received no batches. Returns True if there is data for another loop.

        If a training run is out of data, calls the items that are due at the end of the run.
        """
        run, plan = self.run, self.plan
        if plan.is_alone or plan.at is not None or not self.outcome.data_ended:
            return False
        if plan.source.next_pass():
            return True
        if run.now.previous is not None and not self.job.requests.requested:  # The last step was the last of the run.
            run.now = run.agenda.hold(state, run.at_moment(run.now.loops, is_last=True), run.stopwatch.spent())
        return False

    @property
    def _is_over(self) -> bool:
        return self.run.now.is_last or self.run.agenda.wants_stop or self.job.requests.requested

    # The loop over steps -------------------------------------------------------------------------------

    def advance(self, state: Any, dataset: Iterator[types.Batch], num_steps: int | None) -> tuple[Any, Any]:
        """Runs steps until the loop ends, calling items when they are due. The default implementation of `Loop.run`."""
        call, outputs, step = self.call, self.run.outputs, self._loop.step
        limit = None if num_steps is None else num_steps // max(call.updates, 1)
        self.data.begin(dataset, limit, evaluates=not call.updates)
        if not call.updates:
            step.begin_evaluation()
        call.state, call.place = step._runner.states.prepare(state), "the dataset"
        try:
            self._steps(limit)
            call.place = step
            if not (call.outcome.is_interrupted and call.updates and not self.plan.is_alone):
                outputs.cut()
            found = outputs.loop()
            if outputs.guard is not None:
                outputs.guard.report(repr(self._loop))
            call.outcome.num_examples = found.num_examples
            return call.state, found
        except BaseException as error:
            if outputs.guard is None or error is not outputs.guard.error:
                error.add_note(f"in {call.place}, after step {self.step_num}, in {self._loop!r}")
            raise
        finally:
            if call.program is not None and call.program.custom is None and call.state is not None:
                step._runner.states.remember(call.state)  # An `end` hook may return any state.

    def run_one_step(self, state: Any, batch: types.Batch, number: int) -> tuple[Any, types.Output]:
        """Runs one step with all of its hooks and actions. The default implementation of `Loop._run_one_step`."""
        step, run, elapsed, feed = self._loop.step, self.run, None, self.data.feed
        if not self.call.updates:
            return state, step.evaluate(state, batch, number)
        if step._runner.has_schedules:
            samples = step._runner.count_examples(batch) if feed.joint is None else feed.examples[0]
            elapsed = run.now.advance(samples=samples, time=run.clock.time(), steps=self.call.updates)
        return step(state, batch, number, elapsed=elapsed)

    def loop_end(self, step_num: int) -> int | None:
        """Returns the number of updates in the next call to `Loop.run`, which begins at step `step_num`.

        The call ends at the planned end of the run, or at the next loop end at which hooks or items may have to be
        called, whichever comes first. Returns None if neither is planned.
        """
        plan, run = self.plan, self.run
        ends = [] if plan.total is None else [plan.total - step_num]
        if plan.loop_steps is not None:
            first, idle = plan.loop_steps - step_num % plan.loop_steps, 0
            can_pass = not self.actions.begin and self.options.nan_policy == "ignore"
            if can_pass and not self.call.own_hooks:
                idle = run.agenda.goal(run.now, plan.stop).loop - run.now.loops - 1
            ends.append(min(first + idle * plan.loop_steps, NEVER[0]))
        return min(ends, default=None)

    def hold_now(self, state: Any, *, is_last: bool = False, at_end: bool = False) -> bool:
        """Calls the items that are due now. Must not be called while a loop is running.

        Returns False if one of these items asked the run to stop, or if a signal prevented an item from being called.

        For a train loop, this method is called at the start of a new or resumed run. For an eval loop, it is called at
        the end of training. It is also called if an earlier interruption prevented the eval loop's actions from being
        called. No item is called twice at the same step.

        Args:
          state: The state.
          is_last: Whether the run ends at the current step.
          at_end: Whether a loop ends at the current step.
        """
        run, agenda = self.run, self.run.agenda
        with self.job.requests, run.stopwatch.counting("dispatch"):
            run.now = now = dataclasses.replace(run.now, is_last=is_last or self.plan.ends_at(run.now))
            now = dataclasses.replace(now, previous=now.previous or now.without_previous())
            had_stopped, ended = agenda.wants_stop, agenda.ended if at_end else None
            if at_end and ended is None:
                ended = Ended(LoopOutputs(), run.outputs.loop_start, run.loops, False)
            agenda.hold(state, now, run.stopwatch.spent(), ended)
            left = [item for item in agenda.called_here if item.called_at != now.steps]
            is_owed = self.job.requests.requested and any(item.is_due(now, ended and ended.number) for item in left)
        return not is_owed and (had_stopped or not agenda.wants_stop)

    # Options --------------------------------------------------------------------------------------------

    def set_steps_per_dispatch(self, value: int) -> None:
        """Sets the number of steps in one dispatch. Raises an error if the loop can't fuse its steps."""
        name = type(self._loop).__name__
        checks.check_positive(f"{name}.steps_per_dispatch", value)
        if value > 1 and checks.is_user_defined(self._loop, "_run_one_step"):
            raise ValueError(
                f"{name} overrides _run_one_step, which is called once per step. Use steps_per_dispatch=1, or don't "
                "override it."
            )
        if value > 1:
            _ = Program(self._loop.step, evaluates=self.options.evaluates).fused
        self.options.steps_per_dispatch = int(value)

    def compile(self, state: Any, batch: types.BatchSpec) -> None:
        """Compiles the loop for batches with the shapes of the given batch; see `Loop.compile`."""
        options = self.options
        with self._loop.step._runner.programs.watched(options.nan_policy):
            for number in sorted({options.steps_per_dispatch, 1}, reverse=True):
                self._loop.step.compile(state, batch, evaluates=options.evaluates, steps_per_dispatch=number)

    # Saving and resuming ---------------------------------------------------------------------------------

    def batches_ahead(self, source: Any) -> int:
        """Returns the number of batches that have been read from a source but not used yet."""
        return self.data.feed.num_ahead if self.data.feed.dataset is source else 0

    def state_dict(self, *, in_moment: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the loop's part of a checkpoint as two dicts.

        The first dict contains JSON values, and the second contains the train states that actions keep.

        Args:
          in_moment: Whether there may be items that are due at this step but haven't been called yet.
        """
        saved, kept = self.run.state_dict(in_moment=in_moment)
        return saved | {"has_stopped": self.run.agenda.wants_stop, "wraps_data": self.data.is_wrapped}, kept

    def load_state_dict(self, saved: Mapping[str, Any], kept: Mapping[str, Any]) -> None:
        """Restores the engine from the two dicts that `state_dict` returned."""
        self.run.load_state_dict(saved, kept)
        self.run.agenda.stopped_by = "an earlier run" if saved["has_stopped"] else None
        self.data.is_wrapped = saved["wraps_data"]

    # Checks ------------------------------------------------------------------------------------------------

    def _checked(self, result: Any) -> tuple[Any, LoopOutputs]:
        state, found = checks.check_pair(result, f"{type(self._loop).__name__}.run", "(state, outputs)")
        outputs = found if isinstance(found, LoopOutputs) else LoopOutputs(found)
        outputs.num_examples = list(self.outcome.num_examples)
        return state, outputs

    def _failure(self, error: BaseException) -> Failure:
        """Returns the information to keep after an exception: the latest state, or the reason why it is unusable."""
        call, outputs, problem, bad = self.call, self.run.outputs, None, "it has values that are not finite"
        failure = call.outcome.failure
        if isinstance(error, nonfinite.NonFiniteError) and outputs.guard is not None and error is outputs.guard.error:
            return Failure(error.step_num, None, bad)
        try:
            outputs.fetch()
        except nonfinite.NonFiniteError as other:
            error.add_note(f"before that: {other}")
            return Failure(other.step_num, None, bad)
        except Exception as other:
            logging.exception("The outputs of the last steps before an exception could not be read.")
            problem = str(other)
        if checks.deleted_leaves(call.state):
            return failure._replace(reason="it was donated to the step that failed")
        try:
            self._steps.check_count()
        except Exception as other:  # Includes device errors, which are raised when the count is read.
            problem = str(other)
        return failure._replace(state=call.state) if problem is None else failure._replace(reason=problem)
