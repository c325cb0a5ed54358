"""The end actions of a loop, and how far each has read the outputs."""

from collections.abc import Callable, Mapping
from typing import Any, final

from jaxloop import encoding, metrics, timing
from jaxloop.actions.action import Action
from jaxloop.actions.action_list import ActionList
from jaxloop.ledger import Ledger, Series
from jaxloop.schedules import Elapsed, Schedule


@final
class Slot:
    """An end action of a loop, and how far it has read the ledger.

    Attributes:
      called_at: the step after which it was called last.
      spent_before: what the loop had spent then.
      cursor: up to which position in the ledger it has seen the outputs.
    """

    def __init__(self, actions: ActionList, index: int, cursor: int = 0):
        self.actions: ActionList = actions
        self.index: int = index
        self.action: Action = actions.actions[index]
        self.is_scheduled: bool = isinstance(self.action.interval, Schedule)
        self.reads_outputs: bool = self.action.uses_outputs and self.action.waits_for_outputs
        self.saves: bool = self.action.time_goes_to == "checkpoints"
        self.called_at: int | None = None
        self.spent_before: timing.Spent = timing.Spent()
        self.cursor: int = cursor

    def forget(self, spent: timing.Spent) -> None:
        """Begins anew."""
        self.cursor, self.called_at, self.spent_before = 0, None, spent

    def state_dict(self) -> dict[str, Any]:
        """Returns what the action remembers, as JSON can hold it."""
        return {**remembered(self.action), "called_at": self.called_at, "cursor": self.cursor}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` of a slot with such an action returned."""
        self.action.load_state_dict(encoding.decode(state_dict["state"]))
        self.called_at, self.cursor = state_dict["called_at"], state_dict["cursor"]

    def is_due(self, now: Elapsed, count: int | None) -> bool:
        """Whether it is called now, at the end of the loop of this number; None inside a loop."""
        if count is None and not self.is_scheduled:
            return False
        return self.called_at != now.steps and self.actions.is_due(self.index, count or 0, now)

    def reads(self, ledger: Ledger) -> Series | None:
        """Returns the part of the ledger that the action reads; None if it doesn't wait for outputs."""
        if not self.reads_outputs:
            return None
        return ledger.parts if self.is_scheduled else ledger.loops

    def outputs(
        self, ledger: Ledger, ended: metrics.LoopOutputs, newest: Callable[[], dict[str, Any]] | None
    ) -> metrics.LoopOutputs:
        """Returns what the action is to see now.

        Args:
          ledger: what it may read.
          ended: the outputs of the loop that ended last, for an action that doesn't read; at the end of a loop.
          newest: returns the newest values that are there, for such an action inside a loop.
        """
        series = self.reads(ledger)
        if series is not None:
            return series.since(self.cursor)
        if newest is not None:
            return metrics.LoopOutputs(newest() if self.action.uses_outputs else None)
        return metrics.LoopOutputs(metrics.newest_scalars(ended)) if self.action.uses_outputs else ended


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
