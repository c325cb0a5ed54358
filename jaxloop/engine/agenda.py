"""A loop's end actions: when they are due, in what order they run, and which outputs each one has read."""

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
    """An end action of a loop, with its position in the ledger.

    Attributes:
      called_at: The step after which the action was last called; None before the first call.
      is_requested: True if the action is due at the next moment regardless of its interval, either because a command
        requested it or because its call was postponed to the last moment of the run.
      next_interval: The interval that takes effect after the next call; None to keep the current one.
      spent_before: The loop's time report up to the last call.
      cursor: The position in the ledger up to which the action has read the outputs.
    """

    def __init__(self, actions: ActionList, index: int, cursor: int = 0):
        self.actions: ActionList = actions
        self.index: int = index
        self.action: Action = actions.actions[index]
        self.is_scheduled: bool = isinstance(self.action.interval, Schedule)
        self.reads_outputs: bool = self.action.uses_outputs and self.action.needs_all_outputs
        self.saves: bool = self.action.time_category == "checkpoints"
        self.called_at: int | None = None
        self.is_requested: bool = False
        self.next_interval: Schedule | None = None
        self.spent_before: timing.Spent = timing.Spent()
        self.cursor: int = cursor

    def reset(self, spent: timing.Spent) -> None:
        """Resets the slot for a new run, in which the action hasn't been called and hasn't read any outputs."""
        self.cursor, self.called_at, self.spent_before, self.is_requested = 0, None, spent, False

    def reschedule(self, interval: Schedule) -> None:
        """Replaces the action's interval."""
        self.action.reschedule(interval)
        self.is_scheduled, self.next_interval = True, None

    def state_dict(self) -> dict[str, Any]:
        """Returns the states of the action and its slot as JSON-serializable values."""
        return {**saved_state(self.action), "called_at": self.called_at, "cursor": self.cursor}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores a `state_dict` returned by a slot whose action had the same class."""
        self.action.load_state_dict(encoding.decode(state_dict["state"]))
        self.called_at, self.cursor = state_dict["called_at"], state_dict["cursor"]

    def is_due(self, now: Elapsed, loop: int | None) -> bool:
        """Returns True if the action is due now. `loop` is the number of the loop that ends now; None inside a loop."""
        if self.is_requested:
            return True
        if loop is None and not self.is_scheduled:
            return False
        return self.called_at != now.steps and self.actions.is_due(self.index, loop or 0, now)

    def reads(self, ledger: Ledger) -> Series | None:
        """Returns the ledger series that the action reads, or None if it doesn't wait for outputs."""
        if not self.reads_outputs:
            return None
        return ledger.parts if self.is_scheduled else ledger.loops

    def outputs(self, ledger: Ledger, newest: Callable[[], dict[str, Any]] | None) -> metrics.LoopOutputs:
        """Returns the outputs to pass to the action.

        Args:
          ledger: The outputs of the steps.
          newest: A function that returns the latest scalars on the host, for an action that doesn't wait for outputs.
            None at the end of a loop, where the action receives that loop's scalars.
        """
        series = self.reads(ledger)
        if series is not None:
            outputs = series.since(self.cursor)
            if self.is_requested and series is ledger.loops:
                outputs.extend(ledger.whole_loop())  # Empty at the end of a loop.
            return outputs
        if not self.action.uses_outputs:
            return metrics.LoopOutputs()
        return metrics.LoopOutputs(metrics.newest_scalars(ledger.ended) if newest is None else newest())


@final
class Agenda:
    """A loop's end actions, in the order in which they are called.

    Attributes:
      actions: The loop's own actions.
      slots: The slots of the attached actions, followed by the slots of the loop's own actions.
    """

    def __init__(self, actions: ActionList):
        self.actions: ActionList = actions
        self._own = [Slot(actions, index) for index in range(len(actions.actions))]
        self.detach_all()

    def attach(self, action: Action, cursor: int) -> None:
        """Adds an action that runs before the others and reads the outputs after the ledger position `cursor`."""
        self._set_slots([Slot(ActionList([action], unit="loops"), 0, cursor), *self.slots])

    def detach_all(self) -> None:
        """Removes the attached actions."""
        self._set_slots(self._own)

    def keep_only(self, action: Action) -> None:
        """Until `detach_all` is called, suspends all actions except the given attached action."""
        self._set_slots([slot for slot in self.slots if slot.action is action])

    def reschedule(self, slot: Slot, interval: Schedule) -> None:
        """Replaces an action's interval."""
        slot.reschedule(interval)
        self._set_slots(self.slots)

    def _set_slots(self, slots: Sequence[Slot]) -> None:
        self.slots: list[Slot] = list(slots)
        readers = [slot for slot in slots if slot.reads_outputs]
        self._readers = [[slot for slot in readers if slot.is_scheduled is kind] for kind in (True, False)]

    @property
    def has_readers(self) -> tuple[bool, bool]:
        """A pair of bools: whether any action reads the ledger's `parts`, and whether any action reads its `loops`."""
        of_parts, of_loops = self._readers
        return bool(of_parts), bool(of_loops)

    def next(self, now: Elapsed, others: Iterable[int | Schedule] = ()) -> Goal:
        """Returns the next point when an action may be due or an interval in `others` may fire."""
        return goal_of([*(slot.action.interval for slot in self.slots), *others], now)

    def due(self, now: Elapsed, loop: int | None = None) -> list[Slot]:
        """Returns the slots of the actions that are due; see `Slot.is_due`."""
        return [slot for slot in self.slots if slot.is_due(now, loop)]

    def trim(self, ledger: Ledger) -> None:
        """Drops the outputs that every action has already read."""
        for series, readers in zip((ledger.parts, ledger.loops), self._readers, strict=True):
            series.keep_for([slot.cursor for slot in readers])

    def reset(self, spent: timing.Spent) -> None:
        """Resets all slots."""
        for slot in self.slots:
            slot.reset(spent)

    def state_dict(self) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Returns the slots' states as JSON-serializable values, and a dict of the train states kept by actions."""
        slots = self.slots
        kept = {str(index): slot.action.kept_state for index, slot in enumerate(slots)}
        return [slot.state_dict() for slot in slots], {name: state for name, state in kept.items() if state is not None}

    def load_state_dict(
        self, state_dicts: Sequence[Mapping[str, Any]], kept_states: Mapping[str, Any], who: Any
    ) -> None:
        """Restores the states returned by `state_dict`. `who` identifies the loop in warnings."""
        numbered = [{**kept, "name": str(index)} for index, kept in enumerate(state_dicts)]
        for slot, kept in paired_with_saved(self.slots, numbered, lambda slot: slot.action, who):
            slot.load_state_dict(kept)
            if kept["name"] in kept_states:
                slot.action.kept_state = kept_states[kept["name"]]


def paired_with_saved(
    mine: Sequence[Any], kept: Sequence[Mapping[str, Any]], action_of: Callable[[Any], Action], who: Any
) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    """Pairs each action with its saved state: the n-th action of a class with the n-th saved state for that class."""
    left = list(kept)
    for each in mine:
        found = next((one for one in left if one["action"] == class_name(action_of(each))), None)
        if found is not None:
            left.remove(found)
            yield each, found
        elif action_of(each).state_dict():
            logging.warning(
                "%r was not part of the run when the checkpoint was saved, so it starts fresh.", action_of(each)
            )
    for one in left:
        if one["state"] != encoding.encode({}):
            logging.warning(
                "The checkpoint contains the state of an action of class %s, but %r has no such action. The state was "
                "dropped.",
                one["action"],
                who,
            )


def saved_state(action: Action) -> dict[str, Any]:
    """Calls an action's `before_checkpoint`, and returns a dict with its class name and its JSON-serializable state."""
    try:
        action.before_checkpoint()
        return {"action": class_name(action), "state": encoding.encode(action.state_dict())}
    except Exception as error:
        error.add_note(f"in {action!r}, before a checkpoint")
        raise


def class_name(action: Action) -> str:
    """Returns the class name under which a checkpoint stores an action's state.

    Actions of the same class are distinguished by their order.
    """
    return type(action).__qualname__
