"""The list of actions of a loop or a step."""

from collections.abc import Sequence
from typing import Any, final

from jaxloop import types
from jaxloop.actions.action import Action
from jaxloop.schedules import Elapsed, Schedule


@final
class ActionList:
    """A list of actions, in the order in which they are called.

    Args:
      actions: The actions, or None if there are none.
    """

    def __init__(self, actions: Sequence[Action] | None):
        self.actions: tuple[Action, ...] = tuple(map(as_action, actions or ()))

    @property
    def has_schedules(self) -> bool:
        """True if the interval of any action is a schedule."""
        return any(isinstance(action.interval, Schedule) for action in self.actions)

    def is_due(self, index: int, count: int, elapsed: Elapsed) -> bool:
        """Returns True if the action at `index` is due at the end of the `count`-th loop (or step)."""
        interval = self.actions[index].interval
        return interval(elapsed) if isinstance(interval, Schedule) else count % interval == 0

    def call(self, index: int, state: Any, outputs: types.Output, elapsed: Elapsed, **context: Any) -> None:
        """Calls the action at `index`. If it raises an exception, adds a note that names the action and the step."""
        try:
            self.actions[index](state, outputs, step_num=elapsed.steps, elapsed=elapsed, **context)
        except BaseException as error:
            error.add_note(f"in {self.actions[index]!r}, after step {elapsed.steps}")
            raise


def as_action(action: Any) -> Action:
    """Returns the given object unchanged, or raises a `TypeError` if it isn't an `Action`."""
    if not isinstance(action, Action):
        raise TypeError(f"An action must be a jaxloop.Action, got {action!r}. Write a subclass.")
    return action
