"""The end actions of a loop, and what each has not seen yet."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

from jaxloop import encoding, metrics, timing
from jaxloop.actions.action import Action
from jaxloop.actions.action_list import ActionList
from jaxloop.schedules import Elapsed, Schedule


@final
class Slot:
    """An end action, and what it has not seen yet.

    Attributes:
      called_at: the step after which it was called last.
      spent_before: what the loop had spent then.
      unseen: what it is to see.
      unseen_without: what `unseen` has without the sums that the loop goes on with, of their names.
    """

    def __init__(self, actions: ActionList, index: int):
        self.actions: ActionList = actions
        self.index: int = index
        self.action: Action = actions.actions[index]
        self.is_scheduled: bool = isinstance(self.action.interval, Schedule)
        self.reads_outputs: bool = self.action.uses_outputs and self.action.waits_for_outputs
        self.takes_pieces: bool = self.is_scheduled and self.reads_outputs
        self.takes_whole_loops: bool = self.reads_outputs and not self.is_scheduled
        self.saves: bool = self.action.time_goes_to == "checkpoints"
        self.called_at: int | None = None
        self.spent_before: timing.Spent = timing.Spent()
        self.unseen: metrics.LoopOutputs = metrics.LoopOutputs()
        self.unseen_without: metrics.LoopOutputs = metrics.LoopOutputs()

    def forget(self, spent: timing.Spent) -> None:
        """Begins anew."""
        self.unseen, self.called_at, self.spent_before = metrics.LoopOutputs(), None, spent

    def state_dict(self, encode: Callable[[metrics.LoopOutputs], dict[str, Any]]) -> dict[str, Any]:
        """What the action remembers, and what it has not seen, as `encode` makes it what JSON can hold."""
        unseen = self.unseen if self.reads_outputs else metrics.LoopOutputs()
        without = self.unseen_without if self.reads_outputs else metrics.LoopOutputs()
        own = {"called_at": self.called_at, "unseen": encode(unseen), "unseen_without": encode(without)}
        return {**remembered(self.action), **own}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` of a slot with such an action returned."""
        self.action.load_state_dict(encoding.decode(state_dict["state"]))
        self.called_at = state_dict["called_at"]
        self.unseen = metrics.LoopOutputs.decode(state_dict["unseen"])
        self.unseen_without = metrics.LoopOutputs.decode(state_dict["unseen_without"])

    def is_due(self, now: Elapsed, count: int | None) -> bool:
        """Whether it is called now, at the end of the loop of this number; None inside a loop."""
        if count is None and not self.is_scheduled:
            return False
        return self.called_at != now.steps and self.actions.is_due(self.index, count or 0, now)

    def take_piece(self, piece: metrics.LoopOutputs) -> None:
        """Takes the outputs of steps inside the loop."""
        if self.takes_pieces:
            self.unseen.extend(piece)

    def take_loop(self, whole: metrics.LoopOutputs) -> None:
        """Takes the outputs of a loop that has ended."""
        if self.takes_pieces:  # What `end` has added to those of the steps.
            self.unseen.update({name: value for name, value in whole.items() if not isinstance(value, list)})
        elif not self.action.uses_outputs:
            self.unseen = whole
        elif not self.action.waits_for_outputs:
            self.unseen = metrics.LoopOutputs(metrics.newest_scalars(whole))
        else:
            self.unseen.extend(whole)

    @contextlib.contextmanager
    def keeping(self, outputs: metrics.LoopOutputs) -> Iterator[None]:
        """Takes what was handed over back where the action raises: it has not been dealt with."""
        try:
            yield
        except BaseException:
            if self.reads_outputs:
                self.unseen = outputs
            raise

    def hand_over(self, newest: Callable[[], dict[str, Any]] | None) -> metrics.LoopOutputs:
        """What the action is to see now; inside a loop, where it doesn't wait, the newest values that are there."""
        if newest is not None and not self.takes_pieces:
            return metrics.LoopOutputs(newest() if self.action.uses_outputs else None)
        unseen, self.unseen = self.unseen, metrics.LoopOutputs()
        return unseen


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
