"""A loop with actions before, inside and after it."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, final

from absl import logging

from jaxloop import agreement, checks, encoding, metrics, types
from jaxloop.actions.action import Action
from jaxloop.actions.action_list import ActionList
from jaxloop.history import History
from jaxloop.ledger import Ledger
from jaxloop.output_queue import OutputQueue
from jaxloop.schedules import NEVER, Elapsed, Schedule, earliest
from jaxloop.slots import Slot, class_name, remembered
from jaxloop.stat_loop import StatLoop
from jaxloop.step import Step
from jaxloop.text import printable

# Of a subclass: with one of them, each loop is a call.
_HOOKS = ("__call__", "begin", "run", "end", "update_outputs", "_get_next_batch")


@final
@dataclasses.dataclass
class Run:
    """What a loop knows of the run it is part of. An `OuterLoop` gives it to its loops; one on its own has none.

    Attributes:
      history: what was measured so far.
      total_steps: updates in all; None if nobody knows.
      elapsed: for an evaluation, how far the training is; None for a train loop, which knows by itself.
      stop: where the run ends besides.
      eval_schedules: when an evaluation may be due inside the loop.
      evaluate: evaluates, with a state and an `Elapsed`, what is due; says whether the run goes on.
      snapshot: makes what a checkpoint keeps beside the state, as `CheckpointAction.save` takes it.
      can_resume: whether another call, or process, may go on with a loop that a signal cut short.
      keeps_batches: whether a train loop keeps its last batches, for the record of a failure.
      quiet_ends: where loops end, by step, in the next call before its own end; nothing is to be done there.
      ends_with_data: whether the run ends where the data of the next call end.
    """

    history: History | None = None
    total_steps: int | None = None
    elapsed: Elapsed | None = None
    stop: Schedule | None = None
    eval_schedules: Sequence[Schedule] = ()
    evaluate: Callable[[Any, Elapsed], bool] = lambda state, elapsed: True
    snapshot: Callable[[], dict[str, Any]] | None = None
    can_resume: bool = False
    keeps_batches: bool = False
    quiet_ends: range = range(0)
    ends_with_data: bool = False

    @property
    def schedules(self) -> Sequence[Schedule]:
        """When something happens inside the loop besides its actions."""
        return (*self.eval_schedules, *(() if self.stop is None else (self.stop,)))


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
        self._attached: list[Slot] = []
        self._slots = [Slot(self._end_actions, index) for index in range(len(self.end_actions))]
        self._loop_count = self._count = 0  # The loops that have ended; the number of the one that runs or ran last.
        self._is_ending = False  # Whether the end actions have what they are to see, and not all were called.
        self._last_beginning = Elapsed()
        self._stop_asked = False
        self._spent_at_look = self.spent
        self._loops_passed = self._steps_passed = 0  # Of the loops that have ended inside the call.
        self._ended = metrics.LoopOutputs()  # Of the loop that has ended last.
        self._is_failing = False
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
        self._attached.append(Slot(ActionList([action], unit="loops"), 0, self._ledger.position))

    def detach_all(self) -> None:
        """Takes the attached actions away."""
        self._attached.clear()

    @property
    def loop_count(self) -> int:
        """How many loops have ended. Set it to go on with the intervals of an earlier run."""
        return self._loop_count

    @loop_count.setter
    def loop_count(self, value: int) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"loop_count must be a non-negative int, got {value!r}.")
        if value != self._loop_count:  # What the actions have not seen yet belongs to another run.
            self._forget()
        self._loop_count = self._count = value
        self._looked = dataclasses.replace(self._looked, loops=value)

    def resume(self, elapsed: Elapsed) -> None:
        super().resume(elapsed)
        self._loop_count = self._count = elapsed.loops
        self._last_beginning = elapsed.without_previous()
        self._forget()

    def _forget(self) -> None:
        self.steps_before, self._is_ending, self._has_begun = 0, False, False
        self._ledger, self._ended = Ledger(), metrics.LoopOutputs()
        for slot in self._all_slots():
            slot.forget(self.spent)

    def _all_slots(self) -> list[Slot]:
        return [*self._attached, *self._slots]

    def _loops_ended(self) -> int:
        return self._loop_count

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

    def _flush_actions(self, raise_errors: bool) -> None:
        """Waits for what the actions have begun, at the end of a loop on its own."""
        for slot in self._all_slots() if self.run_info is None else ():
            try:
                slot.action.flush()
            except Exception:
                if raise_errors:
                    raise
                logging.exception("%r could not be flushed.", slot.action)

    def _prepare_call(self) -> None:
        has_begun = self._has_begun or self.steps_before > 0
        super()._prepare_call()
        if self._count == self._loop_count:
            self._has_begun = has_begun
        else:  # An exception ended the last call: this is another loop.
            self.steps_before = 0
            if self._returns_new_state:
                self._ledger.read()
        self._stop_asked = self._is_failing = self._is_ending = False
        self._loops_passed = self._steps_passed = 0
        if not self._returns_new_state:  # Each call sees the same step again.
            for slot in self._all_slots():
                slot.called_at = None
        self._count = self._loop_count + 1

    def begin(self, state: Any, dataset: Any) -> tuple[Any, Iterator[types.Batch]]:
        state, iterator = super().begin(state, dataset)
        if self._has_begun:
            return state, iterator
        now = self._look(self._loop_count)
        asked = dataclasses.replace(now, loops=now.loops + 1, previous=self._last_beginning)
        for index in range(len(self.begin_actions)):
            if self._begin_actions.is_due(index, self._count, asked):
                with self._stopwatch.counting("actions"):
                    self._begin_actions.call(index, state, None, now)
        self._last_beginning = asked.without_previous()
        return state, iterator

    def end(self, state: Any, outputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        state, outputs = super().end(state, outputs)
        if self.run_info is not None and self._step_num in self.run_info.quiet_ends:
            self._was_interrupted = False  # Not amid a loop.
        self._pass_quiet_ends(self._step_num - 1)
        if self._is_broken_off():
            # Here is no end of a loop, only a step of one that goes on in a later call.
            self._looked = now = self._look(self._loop_count)
            due = self._due(now, at_end=False)
            self._read_for(due)
            self._call_actions(due, state, now, comes_last=False)
            self.steps_before, self._count = self._steps_in_loop(), self._loop_count
            return state, outputs
        self._looked = now = self._now(self._loop_count + 1)
        self._ended = self._without_passed(outputs)
        self._ledger.end_loop(self._ended)
        self._is_ending = True
        self._call_actions(self._due(now, at_end=True), state, now, comes_last=False)
        self._loop_count, self._is_ending, self._has_begun = self._count, False, False
        self.steps_before = 0
        if self.run_info is None:
            self.call_actions_that_come_last(state)
        if self._stop_asked:
            outputs[types.STOP_LOOP] = True
        return state, outputs

    def _steps_in_loop(self) -> int:
        return self.steps_before + len(self.num_examples) - self._steps_passed

    def _is_broken_off(self) -> bool:
        """Whether a later call, or process, goes on with this loop amid its steps."""
        can_go_on = self.run_info is not None and self.run_info.can_resume and self._returns_new_state
        return can_go_on and (self.was_interrupted or self._is_failing)

    def _without_passed(self, outputs: dict[str, Any]) -> metrics.LoopOutputs:
        """Returns the outputs of a call without those of the loops that have ended inside it."""
        whole = metrics.LoopOutputs(outputs)
        whole.num_examples = getattr(outputs, "num_examples", [])
        return whole.split(self._steps_passed)[1] if self._steps_passed else whole

    def call_actions_that_come_last(self, state: Any) -> bool:
        """Calls the actions of the loop's end that come last; returns whether the run goes on.

        An `OuterLoop` calls it after the evaluations of the same step.
        """
        now = self._looked
        self._call_actions(self._due(now, at_end=True), state, now, comes_last=True)
        return not self._stop_asked

    def call_actions_before_the_first_step(self, state: Any, *, comes_last: bool) -> bool:
        """Calls the actions whose schedule fires before the first update, with empty outputs.

        An `OuterLoop` calls it twice: for those that come last after the evaluations, and before for the others.
        Returns whether the run continues.
        """
        now, self._stop_asked, self._spent_at_look = self._look(self._loop_count), False, self.spent
        self._consumed = self.source.count - self.batches_ahead(self.source)
        self._call_actions(self._due(now, at_end=False), state, now, comes_last=comes_last)
        return not self._stop_asked

    def call_actions_of_the_last_step(self, state: Any, *, comes_last: bool) -> None:
        """Calls the actions whose schedule waits for the last step of a run, which has ended.

        An `OuterLoop` calls it twice: for those that come last after the evaluations, and before for the others.
        """
        now = dataclasses.replace(self.elapsed, is_last=True)
        self._call_actions(self._due(now, at_end=False), state, now, comes_last=comes_last)

    def ask_to_stop(self) -> None:
        """Has the run end here, as an evaluation after the loop has asked: its checkpoint shall know."""
        self._stop_asked = True

    # Going on in a later process -----------------------------------------------------------------------

    def state_dict(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What the loop and its actions remember: with the train state, the run up to now.

        To be called between two steps, as an action is.

        Returns:
          What JSON can hold; and, by name, the states that actions keep.
        """
        slots = self._all_slots()
        # What an evaluation has done by half is done again.
        is_inside = self._count != self._loop_count and self._returns_new_state
        self._trim()
        keeps_loop = self._returns_new_state and any(slot.reads(self._ledger) is self._ledger.loops for slot in slots)
        state_dict = {
            "elapsed": self.elapsed.to_dict(),
            "previous": (self.elapsed.previous or self.elapsed).to_dict(),
            "loop_count": self._loop_count,
            "is_ending": self._is_ending and not self._returns_new_state,
            "has_stopped": self._stop_asked and not self._interrupt.requested,
            "steps_in_loop": self._steps_in_loop() if is_inside else self.steps_before,
            "has_begun": self._has_begun and self._returns_new_state,
            "wraps_dataset": self._wraps_dataset,
            "last_beginning": self._last_beginning.to_dict(),
            "steps_per_dispatch": self._steps_at_once,
            "ledger": self._ledger.state_dict(self._encode, keeps_loop=keeps_loop),
            "slots": [slot.state_dict() for slot in slots],
            "others": [remembered(action) for action in self._other_actions()],
        }
        kept = {str(index): slot.action.kept_state for index, slot in enumerate(slots)}
        return state_dict, {name: state for name, state in kept.items() if state is not None}

    def load_state_dict(self, state_dict: Mapping[str, Any], kept_states: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` of a loop with the same actions returned, in this process or another."""
        self.resume(Elapsed(**state_dict["elapsed"]))
        self._looked = Elapsed(**state_dict["elapsed"], previous=Elapsed(**state_dict["previous"]))
        self._loop_count = self._count = state_dict["loop_count"]
        self._is_ending = state_dict["is_ending"]
        self.steps_before: int = state_dict["steps_in_loop"]
        self._has_begun = state_dict.get("has_begun", self.steps_before > 0)
        self._wraps_dataset = state_dict.get("wraps_dataset", False)
        self._last_beginning = Elapsed(**state_dict["last_beginning"])
        if self._steps_at_once is None:  # What was found out then: otherwise the last bits might differ.
            self._steps_at_once = state_dict.get("steps_per_dispatch")
        self._ledger = Ledger.of(state_dict["ledger"])
        numbered = [{**kept, "name": str(index)} for index, kept in enumerate(state_dict["slots"])]
        for slot, kept in self._matched(self._all_slots(), numbered, lambda slot: slot.action):
            slot.load_state_dict(kept)
            if kept["name"] in kept_states:
                slot.action.kept_state = kept_states[kept["name"]]
        for action, kept in self._matched(self._other_actions(), state_dict["others"], lambda action: action):
            action.load_state_dict(encoding.decode(kept["state"]))

    def call_missed_actions(self, state: Any, *, comes_last: bool) -> bool:
        """After `load_state_dict`, calls the actions that were due at this step and did not come to it.

        A run may end, by a signal or an exception, before it has done all that belongs to a step. Returns whether the
        run goes on.
        """
        now, self._stop_asked, self._spent_at_look = self._now(self._loop_count), False, self.spent
        now = dataclasses.replace(now, previous=self._looked.previous)  # No step has been run since.
        loop_has_ended = not self.steps_before and now.previous is not None and now.loops > now.previous.loops
        due = [slot for slot in self._due(now, at_end=loop_has_ended) if not slot.saves]
        self._read_for(due)
        self._call_actions(due, state, now, comes_last=comes_last)
        return not self._stop_asked

    @property
    def is_ending(self) -> bool:
        """Whether the last call, an evaluation, ended by an exception in an end action, after all of its steps."""
        return self._is_ending

    def end_again(self, state: Any) -> bool:
        """Calls the end actions that were not come to, of one that `is_ending`; returns whether the run goes on."""
        now, self._stop_asked, self._count = self._now(self._loop_count + 1), False, self._loop_count + 1
        self._call_actions(self._due(now, at_end=True), state, now, comes_last=False)
        self._loop_count, self._is_ending = self._count, False
        self._looked = now
        return self.call_actions_that_come_last(state)

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

    def _matched(self, mine: Sequence[Any], kept: Sequence[Mapping[str, Any]], action_of: Callable[[Any], Any]):
        """Pairs what is here with what was kept, by the classes of the actions in their order."""
        left = list(kept)
        for each in mine:
            found = next((one for one in left if one["action"] == class_name(action_of(each))), None)
            if found is not None:
                left.remove(found)
                yield each, found
            elif action_of(each).state_dict():
                logging.warning("%r was not part of the run when it was saved: it begins anew.", action_of(each))
        for one in left:
            if one["state"] != encoding.encode({}):
                logging.warning(
                    "The checkpoint has the state of an action of class %s, and %r has none: it is dropped.",
                    one["action"],
                    self,
                )

    # Inside the loop ---------------------------------------------------------------------------------

    def _before_drawing_ahead(self, now: Elapsed) -> None:
        if any(slot.saves for slot in self._due(now, at_end=False)):
            self.source.mark()

    def _rescue_outputs(self, queue: OutputQueue, error: BaseException) -> None:
        if not self._returns_new_state:
            return
        self._is_failing = True
        try:
            self._settle(queue)
        except Exception:
            logging.exception("The outputs of the last steps before an exception could not be read.")
        self._pass_quiet_ends(self._step_num)

    # Loops at whose end nothing is due are run in one call: to end a call is to wait for its last step.

    @property
    def loops_passed(self) -> int:
        """How many loops have ended inside the last call, at its `Run.quiet_ends`."""
        return self._loops_passed

    @property
    def steps_passed(self) -> int:
        """The number of batches of the last call that were in those."""
        return self._steps_passed

    def next_due(self) -> tuple[int, int]:
        """Before which step nothing is due inside a loop, and before which loop nothing at an end.

        To be asked between two calls. Where a clock or a hook of a subclass is to be asked at each end, it is the next.
        """
        next_step, next_time = self._next_event()
        has_hooks = any(checks.is_of_user(self, name) for name in _HOOKS) or self._calls_step
        if has_hooks or next_time < NEVER[1] or self.begin_actions:
            return self._step_num + 1, self._loop_count + 1
        now, stop = self._looked, self.run_info and self.run_info.stop
        lists = [self._end_actions, *(slot.actions for slot in self._attached), *([] if stop is None else [stop])]
        return next_step, earliest([NEVER[0], *(each.next_loop(now) for each in lists)])

    def _pass_quiet_ends(self, step_num: int) -> None:
        """Ends the loops that have their end up to a step; of what there is so far, their actions take theirs."""
        ends = range(0) if self.run_info is None else self.run_info.quiet_ends
        passed = sum(end <= step_num for end in ends)
        if not passed:
            return
        self._loops_passed = passed
        self._steps_passed = len(self.num_examples) - (self._step_num - ends[passed - 1]) // self._updates
        self._ledger.pass_loops(self._steps_passed)
        self._loop_count += passed
        self._count = self._loop_count + 1
        if ends[passed - 1] < self._step_num:
            self._looked = dataclasses.replace(self._looked, loops=self._loop_count)
        else:  # This very step has ended one.
            now = self._look(self._loop_count)
            before = dataclasses.replace(now.previous or now, loops=self._loop_count - 1)
            self._looked = dataclasses.replace(now, previous=before)

    def _next_event(self) -> tuple[int, float]:
        now, run = self._looked, self.run_info
        if now.steps != self._step_num:  # Before the first step.
            now = self._look(self._loop_count)
        schedules = [self._end_actions, *(slot.actions for slot in self._attached), *(run.schedules if run else ())]
        step = earliest(schedule.next_step(now) for schedule in schedules)
        time = earliest(schedule.next_time(now) for schedule in schedules)
        # A hair too early, for rounding not to be too late.
        return NEVER[0] if step is None else step, NEVER[1] if time is None else time - self._time_offset - 1e-9

    def _at_event(self, now: Elapsed, state: Any, queue: OutputQueue) -> bool:
        self._looked = now
        due = self._due(now, at_end=False)
        reads = any(slot.reads_outputs for slot in due)
        if reads or any(slot.saves for slot in due):
            self._settle(queue, reads=reads)
            if not self._ledger.loop:
                metrics.wait(state)
        newest = lambda: queue.newest_scalars() or metrics.newest_scalars(self._ledger.loop)
        self._call_actions(due, state, now, comes_last=False, newest=newest)
        if self.run_info is not None and not self.run_info.evaluate(state, now):
            self._stop_asked = True
        if not self._interrupt.requested:  # Else the evaluation, of which a checkpoint may tell, is not complete.
            self._call_actions(due, state, now, comes_last=True, newest=newest)
        return not (self._stop_asked or self._interrupt.requested)

    def _look(self, loops: int) -> Elapsed:
        run = self.run_info
        if run is None or run.elapsed is None:
            return super()._look(loops)
        return dataclasses.replace(run.elapsed, previous=self._looked.without_previous())

    def _now(self, loops: int) -> Elapsed:
        now, run = self._look(loops), self.run_info
        self._spent_at_look = self.spent
        if run is None:
            is_last = loops > self._loop_count and not self.was_interrupted
        elif run.elapsed is not None:
            is_last = run.elapsed.is_last
        else:
            is_last = now.steps == run.total_steps
            is_last |= run.ends_with_data and self._feed.has_ended and loops > self._loop_count
            is_last |= run.stop is not None and run.stop.stops(now.previous or now, now)
        return dataclasses.replace(now, is_last=True) if is_last else now

    def _due(self, now: Elapsed, *, at_end: bool) -> list[Slot]:
        return [slot for slot in self._all_slots() if slot.is_due(now, self._count if at_end else None)]

    def _call_actions(
        self,
        due: Sequence[Slot],
        state: Any,
        now: Elapsed,
        *,
        comes_last: bool,
        newest: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        """Calls those of the actions that come last, or that don't."""
        called = [slot for slot in due if slot.action.comes_last == comes_last]
        # A checkpoint is of the run after all else, also of what early stopping remembers.
        for slot in called:
            if not slot.saves:
                self._call_action(slot, state, now, newest)
        if called:
            self._stop_asked = self._job.any_stops(self._stop_asked)
        for slot in called:
            if slot.saves:
                self._call_action(slot, state, now, newest)
        self._trim()

    def _call_action(self, slot: Slot, state: Any, now: Elapsed, newest: Callable[[], dict[str, Any]] | None) -> None:
        spent, run = self._spent_at_look, self.run_info or Run()
        outputs, since = slot.outputs(self._ledger, self._ended, newest), spent - slot.spent_before
        if slot.reads_outputs and now.steps:  # Before the first step there is nothing to measure.
            outputs.update(self._stats(state, since))
        counting = self._stopwatch.counting(slot.action.time_goes_to)
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
        if outputs.get(types.STOP_LOOP):
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

    @property
    def _reads_parts(self) -> bool:
        return any(slot.reads(self._ledger) is self._ledger.parts for slot in self._all_slots())

    def _read_for(self, due: Sequence[Slot]) -> None:
        """Ends the sums of `clu.metrics` where somebody is to read them."""
        if any(slot.reads_outputs for slot in due):
            self._ledger.read()

    def _trim(self) -> None:
        """Drops what all have read."""
        for series in (self._ledger.parts, self._ledger.loops):
            series.keep_for([slot.cursor for slot in self._all_slots() if slot.reads(self._ledger) is series])
