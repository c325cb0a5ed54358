"""What is due when: the end actions of a loop, in their order, and how far each has read the outputs."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, final

from absl import logging

from jaxloop import encoding, metrics, timing
from jaxloop.actions.action import Action
from jaxloop.actions.action_list import ActionList
from jaxloop.engine.ledger import Ledger, Series
from jaxloop.schedules import Elapsed, Goal, Schedule, goal_of


@final
class Slot:
    """An end action of a loop, and how far it has read the ledger.

    Attributes:
      called_at: the step after which it was called last.
      is_postponed: whether it was due at this step, and is to be called at the last moment of the run.
      spent_before: what the loop had spent then.
      cursor: up to which position in the ledger it has seen the outputs.
    """

    def __init__(self, actions: ActionList, index: int, cursor: int = 0):
        self.actions: ActionList = actions
        self.index: int = index
        self.action: Action = actions.actions[index]
        self.is_scheduled: bool = isinstance(self.action.interval, Schedule)
        self.reads_outputs: bool = self.action.uses_outputs and self.action.needs_all_outputs
        self.saves: bool = self.action.time_category == "checkpoints"
        self.called_at: int | None = None
        self.is_postponed: bool = False
        self.spent_before: timing.Spent = timing.Spent()
        self.cursor: int = cursor

    def forget(self, spent: timing.Spent) -> None:
        """Begins anew."""
        self.cursor, self.called_at, self.spent_before, self.is_postponed = 0, None, spent, False

    def state_dict(self) -> dict[str, Any]:
        """Returns what the action remembers, as JSON can hold it."""
        return {**remembered(self.action), "called_at": self.called_at, "cursor": self.cursor}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` of a slot with such an action returned."""
        self.action.load_state_dict(encoding.decode(state_dict["state"]))
        self.called_at, self.cursor = state_dict["called_at"], state_dict["cursor"]

    def is_due(self, now: Elapsed, loop: int | None) -> bool:
        """Returns whether it is called now, at the end of the loop of this number; None inside a loop."""
        if self.is_postponed:
            return True
        if loop is None and not self.is_scheduled:
            return False
        return self.called_at != now.steps and self.actions.is_due(self.index, loop or 0, now)

    def reads(self, ledger: Ledger) -> Series | None:
        """Returns the part of the ledger that the action reads; None if it doesn't wait for outputs."""
        if not self.reads_outputs:
            return None
        return ledger.parts if self.is_scheduled else ledger.loops

    def outputs(self, ledger: Ledger, newest: Callable[[], dict[str, Any]] | None) -> metrics.LoopOutputs:
        """Returns what the action is to see now.

        Args:
          ledger: what it may read.
          newest: returns the newest scalars that have arrived, for an action that doesn't wait; None at the end of a
            loop.
        """
        series = self.reads(ledger)
        if series is not None:
            return series.since(self.cursor)
        if not self.action.uses_outputs:
            return metrics.LoopOutputs()
        return metrics.LoopOutputs(metrics.newest_scalars(ledger.ended) if newest is None else newest())


@final
class Agenda:
    """The end actions of a loop in the order in which they are called, and when each is due.

    Args:
      actions: the actions.

    Attributes:
      actions: as given.
      slots: the actions, those first that were attached.
    """

    def __init__(self, actions: ActionList):
        self.actions: ActionList = actions
        self._own = [Slot(actions, index) for index in range(len(actions.actions))]
        self.detach_all()

    def attach(self, action: Action, cursor: int) -> None:
        """Adds an action before the others, which reads the ledger from a position on."""
        self._set_slots([Slot(ActionList([action], unit="loops"), 0, cursor), *self.slots])

    def detach_all(self) -> None:
        """Takes the attached actions away."""
        self._set_slots(self._own)

    def _set_slots(self, slots: Sequence[Slot]) -> None:
        self.slots: list[Slot] = list(slots)
        readers = [slot for slot in slots if slot.reads_outputs]
        self._readers = [[slot for slot in readers if slot.is_scheduled is kind] for kind in (True, False)]

    @property
    def series_read(self) -> tuple[bool, bool]:
        """Whether an action reads the parts of a ledger, and whether one reads its loops."""
        of_parts, of_loops = self._readers
        return bool(of_parts), bool(of_loops)

    def next(self, now: Elapsed, others: Iterable[int | Schedule] = ()) -> Goal:
        """Returns up to where a run may go on freely; `others` are the intervals of what else may be due."""
        return goal_of([*(slot.action.interval for slot in self.slots), *others], now)

    def due(self, now: Elapsed, loop: int | None = None) -> list[Slot]:
        """Returns what is due and was not called at this step: at the end of the loop of this number, or inside one."""
        return [slot for slot in self.slots if slot.is_due(now, loop)]

    def trim(self, ledger: Ledger) -> None:
        """Drops what all have read."""
        for series, readers in zip((ledger.parts, ledger.loops), self._readers, strict=True):
            series.keep_for([slot.cursor for slot in readers])

    def forget(self, spent: timing.Spent) -> None:
        """Begins anew."""
        for slot in self.slots:
            slot.forget(spent)

    def state_dict(self) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Returns what the actions remember, as JSON can hold it; and, by name, the states that they keep."""
        slots = self.slots
        kept = {str(index): slot.action.kept_state for index, slot in enumerate(slots)}
        return [slot.state_dict() for slot in slots], {name: state for name, state in kept.items() if state is not None}

    def load_state_dict(
        self, state_dicts: Sequence[Mapping[str, Any]], kept_states: Mapping[str, Any], who: Any
    ) -> None:
        """Takes over what `state_dict` of such an agenda returned; `who` is the loop, for a warning."""
        numbered = [{**kept, "name": str(index)} for index, kept in enumerate(state_dicts)]
        for slot, kept in matched(self.slots, numbered, lambda slot: slot.action, who):
            slot.load_state_dict(kept)
            if kept["name"] in kept_states:
                slot.action.kept_state = kept_states[kept["name"]]


def matched(
    mine: Sequence[Any], kept: Sequence[Mapping[str, Any]], action_of: Callable[[Any], Action], who: Any
) -> Iterator[tuple[Any, Mapping[str, Any]]]:
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
                who,
            )


def remembered(action: Action) -> dict[str, Any]:
    """Has an action write what it has begun; returns what it remembers, as JSON can hold it, and its class."""
    try:
        action.before_checkpoint()
        return {"action": class_name(action), "state": encoding.encode(action.state_dict())}
    except Exception as error:
        error.add_note(f"in {action!r}, before a checkpoint")
        raise


def class_name(action: Action) -> str:
    """By which a checkpoint knows an action again, with its place among those of its class."""
    return type(action).__qualname__
