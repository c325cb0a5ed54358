"""What is due when: the items of a run, and the one place where they are called."""

import contextlib
import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, final

from absl import logging

from jaxloop import metrics
from jaxloop.actions.action import Action
from jaxloop.actions.action_list import as_action
from jaxloop.base import encoding
from jaxloop.base.timing import Spent, Stopwatch
from jaxloop.engine.outputs import Outputs
from jaxloop.metrics import LoopOutputs
from jaxloop.processes.agreement import Job, report_failure
from jaxloop.schedules import Elapsed, Goal, Schedule, goal_of


@final
class Rank(enum.IntEnum):
    """The order of the items that are due at the same step."""

    COMMAND = 0
    ROW = 1
    ACTION = 2
    EVALUATION = 3
    AFTER_EVALUATIONS = 4
    SAVE = 5


@final
class Moment(NamedTuple):
    """What an item is called with.

    Attributes:
      state: The train state. The next step donates it.
      now: The progress of the run.
      outputs: The outputs since the item's last call, with statistics, if it reads them. None when a loop begins.
      spent: The time report since the item's last call.
    """

    state: Any
    now: Elapsed
    outputs: LoopOutputs | None
    spent: Spent


@final
class Ended(NamedTuple):
    """A loop that has just ended.

    Attributes:
      outputs: What its `end` hook returned.
      start: The position in the outputs at which it began.
      number: The number of loops that have ended, including this one.
    """

    outputs: LoopOutputs
    start: int
    number: int


class Item:
    """Something that a run calls when it is due: a history row, an action, an evaluation, a checkpoint.

    Hooks:
      name: The name under which a checkpoint stores its state.
      interval: A schedule, or a number of loops.
      call: Called when the item is due. Returns False if it was interrupted, and must be called again after a resume.
      state_dict, load_state_dict, kept_state: See `Action`.

    Args:
      rank: The place among the items that are due at the same step.
      reads: "all" to wait for the outputs of all steps, "newest" for the newest that have arrived, or "nothing".

    Attributes:
      cursor: The position in the outputs up to which the item has read.
      called_at: The step after which it was last called; None before the first call.
      is_requested: True if it is due at the next moment, whatever its interval.
      calls: The number of calls.
      spent: The time report at its last call.
    """

    name: str = ""
    time_category: str | None = None
    kept_state: Any = None

    def __init__(self, rank: Rank, reads: Literal["all", "newest", "nothing"] = "nothing"):
        self.rank: Rank = rank
        self.reads: Literal["all", "newest", "nothing"] = reads
        self.calls: int = 0
        self.reset(Spent())

    def reset(self, spent: Spent, cursor: int = 0) -> None:
        """Forgets all calls."""
        self.cursor: int = cursor
        self.called_at: int | None = None
        self.is_requested: bool = False
        self.spent: Spent = spent

    @property
    def interval(self) -> int | Schedule:
        """A schedule, or a number of loops."""
        raise NotImplementedError

    def call(self, moment: Moment) -> bool:
        """Does what is due. Returns False if it was interrupted."""
        raise NotImplementedError

    def is_due(self, now: Elapsed, loop: int | None) -> bool:
        """Returns True if the item is due. `loop` is the number of the loop that ends here; None inside a loop."""
        if self.is_requested or self.called_at == now.steps:
            return self.is_requested
        interval = self.interval
        if isinstance(interval, Schedule):
            return interval(now)
        return loop is not None and loop % interval == 0

    def state_dict(self) -> Mapping[str, Any]:
        """Returns what a checkpoint stores: numbers, strings, arrays, lists and dicts."""
        return {}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restores a `state_dict`."""

    def saved(self) -> dict[str, Any]:
        """Returns everything that a checkpoint stores about the item, as JSON values."""
        state = encoding.encode(self.state_dict())
        return {"name": self.name, "called_at": self.called_at, "cursor": self.cursor, "state": state}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Restores the result of `saved`."""
        self.load_state_dict(encoding.decode(saved["state"]))
        self.called_at, self.cursor = saved["called_at"], saved["cursor"]


@final
class ActionItem(Item):
    """An action of a loop.

    Args:
      action: The action.
      context: A function `(progress) -> further keyword arguments for the action`.
      rank: The place among the items that are due at the same step; by default, that of an action of this kind.

    Attributes:
      next_interval: The interval that takes effect after the next call; None to keep the current one.
    """

    def __init__(self, action: Action, context: Callable[[Elapsed], Mapping[str, Any]], rank: Rank | None = None):
        self.action: Action = as_action(action)
        self.next_interval: Schedule | None = None
        self._context = context
        self.time_category: str | None = self.action.time_category
        self.name: str = type(self.action).__qualname__
        last = Rank.SAVE if self.time_category == "checkpoints" else Rank.AFTER_EVALUATIONS
        rank = rank if rank is not None else last if self.action.runs_last else Rank.ACTION
        uses, waits = self.action.uses_outputs, self.action.needs_all_outputs
        super().__init__(rank, "nothing" if not uses else "all" if waits else "newest")

    @property
    def interval(self) -> int | Schedule:
        return self.action.interval

    @property
    def kept_state(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.action.kept_state

    @kept_state.setter
    def kept_state(self, state: Any) -> None:
        self.action.kept_state = state

    def call(self, moment: Moment) -> bool:
        state, now, outputs, spent = moment
        try:
            self.action(state, outputs, step_num=now.steps, elapsed=now, spent=spent, **self._context(now))
        except BaseException as error:
            error.add_note(f"in {self.action!r}, after step {now.steps}")
            raise
        if self.next_interval is not None:
            self.reschedule(self.next_interval)
        return True

    def reschedule(self, interval: Schedule) -> None:
        """Replaces the action's interval."""
        self.action.reschedule(interval)
        self.next_interval = None

    def state_dict(self) -> Mapping[str, Any]:
        try:
            self.action.before_checkpoint()
            return self.action.state_dict()
        except Exception as error:
            error.add_note(f"in {self.action!r}, before a checkpoint")
            raise

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self.action.load_state_dict(saved)


@final
class Agenda:
    """Calls items when they are due.

    Args:
      outputs: The outputs that the items read.
      stopwatch: Tracks how the time is spent.
      job: The processes that train together, with their signals. After a signal, no evaluation and nothing that saves
        is called.
      measure: A function `(state, spent) -> statistics`, which are added to the outputs of items that read all.

    Attributes:
      items: The items, by rank.
      others: Items that are called elsewhere, but saved and restored here.
      wants_stop: True if something has asked the run to stop.
      stopped_by: The item that asked; None if none did.
      owes_trim: True if `trim` must be called unless a loop has ended at the step of the last moment.
      keeps_loops: True if hooks of the loop may change its outputs, so that items with an int interval get what `end`
        returned for each loop.
      loops: The ended loops that such items have still to read, if `keeps_loops` is True.
    """

    def __init__(
        self,
        outputs: Outputs,
        stopwatch: Stopwatch,
        job: Job,
        measure: Callable[[Any, Spent], Mapping[str, Any]],
    ):
        self._outputs, self._stopwatch, self._job, self._measure = outputs, stopwatch, job, measure
        self.items: Sequence[Item] = ()
        self.others: Sequence[Item] = ()
        self.owes_trim: bool = False
        self.keeps_loops: bool = False
        self.loops: list[Ended] = []
        self.begin_call()

    def begin_call(self) -> None:
        """Forgets what was asked for in the last call."""
        self.wants_stop: bool = False
        self.stopped_by: Item | None = None
        for item in self.items:
            item.is_requested = False

    @property
    def all_items(self) -> list[Item]:
        """All items, whether they are called here or elsewhere."""
        return [*self.items, *self.others]

    def add(self, item: Item) -> None:
        """Adds an item, which is called before the others of its rank."""
        self.items = sorted([item, *self.items], key=lambda each: each.rank)

    def goal(self, now: Elapsed, others: Sequence[Schedule]) -> Goal:
        """Returns the next step, time and loop at which something may be due."""
        return goal_of([*(item.interval for item in self.items), *others], now)

    def hold(
        self,
        state: Any,
        now: Elapsed,
        spent: Spent,
        ended: Ended | None = None,
        *,
        only_saves: bool = False,
        may_end: bool = False,
    ) -> Elapsed:
        """Calls everything that is due and was not called at this step.

        If something asks to stop at the end of a loop, this moment becomes the last one, and what is due then is
        called, too. Inside a loop, the loop ends first, and its saves follow.

        Args:
          state: The state.
          now: The progress.
          spent: The time report.
          ended: The loop that ends at this step; None inside a loop.
          only_saves: Whether to call only what saves checkpoints.
          may_end: True if an interruption keeps the run from knowing whether a loop ends here.

        Returns:
          The progress, which now tells whether this is the end of the run.
        """
        loop, stopped, saves = None if ended is None else ended.number, lambda: self._job.requests.requested, True
        while not only_saves:
            was_called = False
            for item in self.items:
                is_possible = item.rank < Rank.EVALUATION or (item.rank < Rank.SAVE and not stopped())
                if is_possible and item.is_due(now, loop):
                    self._call(item, state, now, spent, ended)
                    was_called = True
            if was_called:
                self.wants_stop = self._job.any_stops(self.wants_stop)
            if not self.wants_stop or stopped() or now.is_last:
                break
            if ended is None:
                saves = False
                break
            now = dataclasses.replace(now, is_last=True)
        if ended is not None and self.keeps_loops and ended.number not in [each.number for each in self.loops]:
            self.loops.append(ended)
        self.owes_trim = may_end or (self.owes_trim and ended is None)
        if not self.owes_trim:  # Before the saves, because a resumed run must merge the same sums in the same order.
            self.trim()
        if saves and not stopped():
            for item in self.items:
                if item.rank == Rank.SAVE and item.is_due(now, loop):
                    self._call(item, state, now, spent, ended)
        return now

    def _call(self, item: Item, state: Any, now: Elapsed, spent: Spent, ended: Ended | None) -> None:
        outputs, since = self._outputs_for(item, ended), spent - item.spent
        if item.reads == "all" and now.steps:  # There is nothing to measure before the first step.
            outputs.update(self._measure(state, since))
        if item.rank == Rank.SAVE:  # A checkpoint contains that it was saved.
            self._mark(item, now, spent)
        category = item.time_category
        counting = contextlib.nullcontext() if category is None else self._stopwatch.counting(category)
        try:
            with counting:
                is_done = item.call(Moment(state, now, outputs, since))
        except (Exception, SystemExit) as error:
            if self._job.is_shared and item.rank < Rank.SAVE:  # The other processes may be waiting inside a save.
                report_failure(error)
            raise
        if is_done:
            item.calls += 1
            self._mark(item, now, spent)
            if outputs.asks_to_stop:
                self.wants_stop, self.stopped_by = True, item

    def _mark(self, item: Item, now: Elapsed, spent: Spent) -> None:
        item.called_at, item.is_requested, item.spent, item.cursor = now.steps, False, spent, self._outputs.position

    def _outputs_for(self, item: Item, ended: Ended | None) -> LoopOutputs:
        """Returns the outputs since an item's last call. An int interval gets what the `end` hook returned."""
        outputs = self._outputs
        if item.reads == "nothing":
            if item.rank == Rank.SAVE:
                outputs.fetch()  # Before the save, because this finds NaN and infinity.
            return LoopOutputs()
        if item.reads == "newest":
            return LoopOutputs(outputs.newest_scalars() if ended is None else metrics.newest_scalars(ended.outputs))
        outputs.cut()
        if ended is not None and not isinstance(item.interval, Schedule) and item.cursor <= ended.start:
            loops = [each for each in self.loops if item.cursor <= each.start < ended.start]
            earlier = LoopOutputs() if self.keeps_loops else outputs.since(item.cursor, ended.start)
            for each in (*loops, ended):
                earlier.extend(each.outputs.copy())
            return earlier
        found = outputs.since(item.cursor)
        if ended is not None:
            found.update({name: value for name, value in ended.outputs.items() if not isinstance(value, list)})
        return found

    def trim(self) -> None:
        """Drops the outputs that everything has read."""
        self.owes_trim = False
        self._outputs.trim(self.cursors)
        of_loops = [item for item in self.items if item.reads == "all" and not isinstance(item.interval, Schedule)]
        least = min((item.cursor for item in of_loops), default=self._outputs.position)
        self.loops = [each for each in self.loops if each.start >= least]

    @property
    def cursors(self) -> list[int]:
        """The positions up to which the items have read."""
        return [item.cursor for item in self.items if item.reads == "all"]

    # Saving ------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forgets all calls."""
        self.loops = []
        for item in self.items:
            item.reset(self._stopwatch.spent(), self._outputs.position)

    def kept_states(self) -> dict[str, Any]:
        """Returns the train states that items keep."""
        kept = {str(index): item.kept_state for index, item in enumerate(self.all_items)}
        return {index: state for index, state in kept.items() if state is not None}

    def state_dict(self) -> list[dict[str, Any]]:
        """Returns everything about the items but the kept states, as JSON values."""
        return [item.saved() for item in self.all_items]

    def load_state_dict(self, saved: Sequence[Mapping[str, Any]], kept: Mapping[str, Any]) -> None:
        """Restores a `state_dict` and the kept states."""
        left = dict(enumerate(saved))
        for item in self.all_items:
            index = next((index for index, each in left.items() if each["name"] == item.name), None)
            if index is not None:
                item.load(left.pop(index))
                if str(index) in kept:
                    item.kept_state = kept[str(index)]
            elif item.state_dict():
                text = "%r was not part of the run when the checkpoint was saved, so it starts fresh."
                logging.warning(text, getattr(item, "action", item))
        for each in left.values():
            if each["state"] != encoding.encode({}):
                logging.warning(
                    "The checkpoint contains the state of an action of class %s, but this run has no such action. The "
                    "state was dropped.",
                    each["name"],
                )
