"""The items of a run, such as actions and evaluations, and the agenda that calls them when they are due."""

import contextlib
import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, final

from absl import logging

from jaxloop import metrics, types
from jaxloop.actions.action import Action, as_action, call_action
from jaxloop.actions.checkpoint_action import CheckpointAction
from jaxloop.base import encoding
from jaxloop.base.timing import Spent, Stopwatch
from jaxloop.distributed.agreement import Job, report_failure
from jaxloop.engine.outputs import Outputs
from jaxloop.metrics import LoopOutputs
from jaxloop.schedules import Elapsed, Goal, Schedule, goal_of


@final
class Rank(enum.IntEnum):
    """The order in which items are called if they are due at the same step.

    `ELSEWHERE` is for items that are called by the step, or by the engine when a loop begins. An agenda saves and
    restores these items, but doesn't call them.
    """

    ELSEWHERE = -1
    COMMAND = 0
    ROW = 1
    ACTION = 2
    EVALUATION = 3
    AFTER_EVALUATIONS = 4
    SAVE = 5


@final
class Moment(NamedTuple):
    """The information that an item receives when it is called.

    Attributes:
      state: The train state. The next step donates it.
      now: The run's progress.
      outputs: The outputs that the item reads; see `Item`. An item that reads all outputs receives the outputs of all
        steps since its last call. It also receives statistics, unless it adds a row to the history. `outputs` is
        None for a begin action of a loop.
      spent: The time spent since the item's last call.
    """

    state: Any
    now: Elapsed
    outputs: LoopOutputs | None
    spent: Spent


@final
class Ended(NamedTuple):
    """A loop that has just ended.

    Attributes:
      outputs: The outputs that the loop's `end` hook returned.
      start: The position in the outputs at which the loop began.
      number: The number of loops that have ended, including this one.
      is_changed: True if the loop has user-defined hooks that may have changed the outputs.
    """

    outputs: LoopOutputs
    start: int
    number: int
    is_changed: bool


class Item:
    """The base class of the items that a run calls when they are due, such as actions, evaluations and commands.

    Hooks:
      name: The name under which a checkpoint stores the item's state.
      time_category: The field of `Spent` to which the time spent in `call` is added. If None, this time isn't counted
        separately.
      interval: A schedule or a number of loops. If None, the item is due only if a call has been requested or if
        an override of `is_due` returns True.
      call: Called when the item is due. Returns False if the call was interrupted and must be repeated after a resume.
      state_dict, load_state_dict: See `Action`.

    Args:
      rank: The item's place among the items that are due at the same step.
      reads: The outputs that the item reads: "all" for the outputs of all steps, for which it waits; "newest" for the
        newest scalars that can be read without waiting; or "nothing".

    Attributes:
      cursor: A position in the outputs. The item has already read all outputs before this position, except for those in
        `unread`.
      unread: The outputs that the `end` hooks of earlier loops returned and that the item hasn't read yet. If no hook
        can have changed the outputs, this is None. If the interval is an int, `unread` contains all outputs before
        `cursor` that the item hasn't read. If the interval is a schedule, `unread` contains only single values, such
        as statistics that a hook added, because lists with one value per step are read from the run's outputs.
      called_at: The step after which the item was last called, or None before the first call.
      is_requested: True if a call has been requested. The item is then due at once, regardless of its interval.
      spent: The run's time report (a `Spent`) at the item's last call.
    """

    name = ""
    time_category = None
    interval: int | Schedule | None = None
    cursor, unread, called_at, is_requested, spent = 0, None, None, False, Spent()  # Before the first `reset`.

    def __init__(self, rank: Rank, reads: Literal["all", "newest", "nothing"] = "nothing"):
        self.rank: Rank = rank
        self.reads: Literal["all", "newest", "nothing"] = reads

    def reset(self, spent: Spent, cursor: int = 0) -> None:
        """Resets the item, as if it had never been called."""
        self.cursor: int = cursor
        self.unread: LoopOutputs | None = None
        self.called_at: int | None = None
        self.is_requested: bool = False
        self.spent: Spent = spent

    def mark(self, now: Elapsed, spent: Spent, cursor: int) -> None:
        """Records that the item was called and has read all outputs before the position `cursor`."""
        self.called_at, self.is_requested, self.spent = now.steps, False, spent
        self.cursor, self.unread = cursor, None

    def call(self, moment: Moment) -> bool:
        """Performs the item's work. Returns False if it was interrupted."""
        raise NotImplementedError

    def is_due(self, now: Elapsed, loop: int | None) -> bool:
        """Returns True if the item is due. `loop` is the number of loops that have ended, or None inside a loop."""
        if self.is_requested or self.called_at == now.steps:
            return self.is_requested
        interval = self.interval
        if isinstance(interval, Schedule):
            assert now.previous is not None
            return interval.fires(now.previous, now)
        return loop is not None and interval is not None and loop % interval == 0

    def unread_in(self, outputs: Outputs, ended: Ended | None) -> LoopOutputs:
        """Returns the outputs that the item would receive if it were called now.

        An item that reads all outputs receives the outputs of all steps since its last call. If the item's interval is
        an int, the item receives exactly the outputs that the loops' `end` hooks returned.

        Args:
          outputs: The outputs of the run.
          ended: The loop that has just ended, or None inside a loop.
        """
        if self.reads == "nothing":
            if self.rank == Rank.SAVE:
                outputs.fetch()  # Before the save, because this finds NaN and infinity.
            return LoopOutputs()
        if self.reads == "newest":
            return LoopOutputs(outputs.newest_scalars() if ended is None else metrics.newest_scalars(ended.outputs))
        outputs.cut()
        if ended is not None and not isinstance(self.interval, Schedule) and self.cursor <= ended.start:
            found = outputs.since(self.cursor, ended.start, after=self.unread)
            found.extend(ended.outputs.copy())
            return found
        found = outputs.since(self.cursor, after=self.unread)
        if ended is not None:
            found.update(_plain(ended.outputs))
        return found

    def keep_unread(self, outputs: Outputs, ended: Ended) -> None:
        """Keeps the outputs returned by a loop's `end` hook until the item's next call.

        Does nothing if the item doesn't read all outputs, or if it has just been called.
        """
        if self.reads != "all" or self.cursor == outputs.position:
            return
        if isinstance(self.interval, Schedule):
            plain = _plain(ended.outputs)
            self.unread = LoopOutputs() if self.unread is None else self.unread
            self.unread.update({name: value for name, value in plain.items() if name != types.STOP_LOOP})
        elif self.cursor <= ended.start:
            self.unread, self.cursor = self.unread_in(outputs, ended), outputs.position

    def state_dict(self) -> Mapping[str, Any]:
        """Returns the item's state for a checkpoint: a dict of numbers, strings, arrays, lists and dicts."""
        return {}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restores the item from the result of `state_dict`."""

    def saved(self, encode: Callable[[LoopOutputs], Any]) -> dict[str, Any]:
        """Returns the item's entry in a checkpoint: a dict of JSON values that includes the item's state.

        Args:
          encode: A function that encodes outputs as JSON values.
        """
        unread = None if self.unread is None else encode(self.unread)
        read = {"called_at": self.called_at, "cursor": self.cursor, "unread": unread}
        return {"name": self.name, "state": encoding.encode(self.state_dict()), **read}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Restores the item from a dict returned by the `saved` method."""
        self.load_state_dict(encoding.decode(saved["state"]))
        self.called_at, self.cursor = saved["called_at"], saved["cursor"]
        self.unread = saved["unread"] and LoopOutputs.decode(saved["unread"])


class ActionItem(Item):
    """An item that calls an action.

    Hooks:
      name, interval, call, state_dict, load_state_dict: See `Item`.

    Args:
      action: The action.
      rank: The item's place among the items that are due at the same step. If None, the rank depends on the kind of
        action.

    Attributes:
      context: Additional keyword arguments for the action.
    """

    def __init__(self, action: Action, context: Mapping[str, Any], rank: Rank | None = None):
        self.action: Action = as_action(action)
        self.context: Mapping[str, Any] = context
        self.time_category: str | None = self.action.time_category
        self.name: str = type(self.action).__qualname__
        last = Rank.SAVE if isinstance(self.action, CheckpointAction) else Rank.AFTER_EVALUATIONS
        rank = rank if rank is not None else last if self.action.runs_last else Rank.ACTION
        uses, waits = self.action.uses_outputs, self.action.needs_all_outputs
        reads = uses and rank != Rank.ELSEWHERE
        super().__init__(rank, "nothing" if not reads else "all" if waits else "newest")

    @property
    def interval(self) -> int | Schedule:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.action.interval

    def call(self, moment: Moment) -> bool:
        state, now, outputs, spent = moment
        call_action(self.action, state, outputs, now, spent=spent, **self.context)
        return True

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
    """Calls the items of a run when they are due.

    Args:
      outputs: The outputs that the items read.
      stopwatch: The stopwatch that tracks how the time is spent.
      job: The processes that train together. After one of them receives a signal, no evaluation is started, and no
        checkpoint is saved while an evaluation is still due.

    Attributes:
      job: The processes that train together.
      items: The items, sorted by rank.
      statistics: The object that computes statistics, or None.
      ended: The loop that ended last, or None once the next loop has begun.
      stopped_by: The item that asked the run to stop, or a description of the request. None if there was no request.
      owes_trim: True if `trim` was postponed because the run was interrupted at a step at which a loop may have ended.
        The outputs are trimmed after the next steps, or as soon as it is known that the loop ended at that step.
    """

    def __init__(self, outputs: Outputs, stopwatch: Stopwatch, job: Job):
        self._outputs, self._stopwatch = outputs, stopwatch
        self.job: Job = job
        self.items: Sequence[Item] = ()
        self.statistics: Any = None
        self.ended: Ended | None = None
        self.owes_trim: bool = False
        self.begin_call()

    def begin_call(self) -> None:
        """Clears the requests made during the previous call to the engine."""
        self.stopped_by: Any = None
        for item in self.items:
            item.is_requested = False

    @property
    def wants_stop(self) -> bool:
        """True if the run has been asked to stop."""
        return self.stopped_by is not None

    @property
    def called_here(self) -> list[Item]:
        """The items that the agenda calls. The step or the engine calls the other items."""
        return [item for item in self.items if item.rank > Rank.ELSEWHERE]

    def goal(self, now: Elapsed, stop: Schedule | None) -> Goal:
        """Returns the `Goal`: the next points at which an item may be due or the schedule `stop` may end the run."""
        intervals = [interval for item in self.called_here if (interval := item.interval) is not None]
        return goal_of(intervals if stop is None else [*intervals, stop], now)

    def hold(
        self, state: Any, now: Elapsed, spent: Spent, ended: Ended | None = None, *, may_end: bool = False
    ) -> Elapsed:
        """Calls all items that are due and haven't been called at the current step yet.

        If an item that is called at the end of a loop asks the run to stop, the current step becomes the last step of
        the run. The items that are due at the end of a run are then called, too. If an item that is called inside a
        loop asks the run to stop, the loop ends at the current step, and checkpoints are saved only after that.

        Args:
          state: The state.
          now: The run's progress.
          spent: The run's time report.
          ended: The loop that ends at this step, or None inside a loop.
          may_end: Whether the run was interrupted at this step, so that it is unknown whether a loop ends here.

        Returns:
          The run's progress, with `is_last` set if the run ends at this step.
        """
        is_done = self._call_due(state, now, spent, ended, may_end)
        if self.stopped_by is not None and ended is not None and not (now.is_last or self.job.requests.requested):
            now = dataclasses.replace(now, is_last=True)
            is_done = self._call_due(state, now, spent, ended, may_end)
        if ended is not None and ended.is_changed:
            for item in self.called_here:
                item.keep_unread(self._outputs, ended)
        self.owes_trim = may_end or (self.owes_trim and ended is None)
        if not self.owes_trim:  # Before the saves, because a resumed run must merge the same sums in the same order.
            self.trim()
        if is_done and not may_end and (self.stopped_by is None or now.is_last):
            for item in self.items:
                if item.rank == Rank.SAVE and item.is_due(now, ended and ended.number):
                    self._call(item, state, now, spent, ended)
        return now

    def _call_due(self, state: Any, now: Elapsed, spent: Spent, ended: Ended | None, may_end: bool) -> bool:
        """Calls all items that are due, except those that save checkpoints.

        Returns False if a signal interrupted one of these items or prevented it from being called.
        """
        is_done = True
        for item in self.items:
            if not Rank.ELSEWHERE < item.rank < Rank.SAVE or not item.is_due(now, ended and ended.number):
                continue
            # After a signal, no evaluation begins, and what follows waits for the evaluations that are due.
            waits = item.rank == Rank.EVALUATION or (may_end and item.rank > Rank.EVALUATION)
            is_done = not (waits and self.job.requests.requested) and self._call(item, state, now, spent, ended)
            if not is_done:
                break
        if self.job.is_shared and self.job.any_stops(self.stopped_by is not None):
            self.stopped_by = self.stopped_by or "another process"
        return is_done

    def _call(self, item: Item, state: Any, now: Elapsed, spent: Spent, ended: Ended | None) -> bool:
        """Calls an item. Returns False if it was interrupted."""
        outputs, since = item.unread_in(self._outputs, ended), spent - item.spent
        if item.reads == "all" and item.rank != Rank.ROW and now.steps:  # Nothing was measured before the first step.
            outputs.update(self.measure(state, since, item.cursor))
        if item.rank == Rank.SAVE:  # The checkpoint records that it was saved.
            item.mark(now, spent, self._outputs.position)
        category = item.time_category
        counting = contextlib.nullcontext() if category is None else self._stopwatch.counting(category)
        stopped_by = "the step" if types.STOP_LOOP in outputs and outputs.asks_to_stop else item
        try:
            with counting:
                is_done = item.call(Moment(state, now, outputs, since))
        except (Exception, SystemExit) as error:
            if self.job.is_shared and item.rank < Rank.SAVE:  # The other processes may be waiting inside a save.
                report_failure(error)
            raise
        if is_done:
            item.mark(now, spent, self._outputs.position)
            if outputs.asks_to_stop:
                self.stopped_by = self.stopped_by or stopped_by
        return is_done

    def measure(self, state: Any, spent: Spent | None = None, cursor: int | None = None) -> dict[str, Any]:
        """Returns statistics for the current loop, or for the time since an item's last call.

        Args:
          state: The state.
          spent: The time spent since the item's last call, or None for the current loop.
          cursor: The item's cursor, or None for the current loop.
        """
        found, guard = {} if self.statistics is None else self.statistics.of(state, spent), self._outputs.guard
        return found if guard is None else found | guard.measure(self._outputs.loop_start if cursor is None else cursor)

    def trim(self) -> None:
        """Drops outputs that have been read by every item that needs them."""
        self.owes_trim = False
        self._outputs.trim(self.cursors)

    @property
    def cursors(self) -> list[int]:
        """The cursors of the items that read all outputs."""
        return [item.cursor for item in self.items if item.reads == "all"]

    # Saving ------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Resets the items that the agenda calls, as if none of them had been called yet."""
        self.ended = None
        spent, position = self._stopwatch.spent(), self._outputs.position
        for item in self.called_here:
            item.reset(spent, position)

    def state_dict(self, step_num: int, *, in_moment: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the agenda's part of a checkpoint as two dicts.

        The first dict contains JSON values. The second dict contains the train states that actions keep, keyed by the
        index of the action's item.

        Args:
          step_num: The number of completed updates.
          in_moment: Whether there may be items that are due at this step but haven't been called yet.
        """
        encode, ended = self._outputs.encode, self.ended if in_moment else None
        actions = [(str(index), item.action) for index, item in enumerate(self.items) if isinstance(item, ActionItem)]
        items = [item.saved(encode) for item in self.items]
        if not in_moment:  # Everything that was due has been called, even if its interval changes at a resume.
            for item, each in zip(self.items, items, strict=True):
                each["called_at"] = step_num if Rank.ELSEWHERE < item.rank < Rank.SAVE else each["called_at"]
        saved = {
            "owes_trim": self.owes_trim,
            "ended": ended and [encode(ended.outputs), *ended[1:]],
            "items": items,
        }
        return saved, {index: action.kept_state for index, action in actions if action.kept_state is not None}

    def load_state_dict(self, saved: Mapping[str, Any], kept: Mapping[str, Any], step_num: int) -> None:
        """Restores the agenda from the two dicts that `state_dict` returned.

        Items that were not part of the run when the dicts were saved won't be called at step `step_num`.
        """
        self.reset()
        self.owes_trim = saved["owes_trim"]
        self.ended = saved["ended"] and Ended(LoopOutputs.decode(saved["ended"][0]), *saved["ended"][1:])
        left = dict(enumerate(saved["items"]))
        for item in self.items:
            if found := [index for index, each in left.items() if each["name"] == item.name]:
                item.load(left.pop(found[0]))
                if isinstance(item, ActionItem) and str(found[0]) in kept:
                    item.action.kept_state = kept[str(found[0])]
                continue
            item.called_at = step_num
            if item.state_dict():
                text = "%r was not part of the run when the checkpoint was saved, so it starts fresh."
                logging.warning(text, getattr(item, "action", item.name))
        for each in left.values():
            if each["state"] != encoding.encode({}):
                logging.warning(
                    "The checkpoint contains the state of %s, which is not part of this run. The state was dropped.",
                    each["name"],
                )


def _plain(outputs: LoopOutputs) -> dict[str, Any]:
    return {name: value for name, value in outputs.items() if not isinstance(value, list)}
