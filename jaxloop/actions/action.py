"""The base of all actions."""

import abc
from collections.abc import Sequence
from typing import Any

from jaxloop import checks, types


class Action(abc.ABC):
    """A side effect at chosen moments. Subclass it and write `__call__`.

    A loop calls its actions in their order, `begin_actions` with `outputs=None`. An exception in one ends the run.

    Args:
      interval: as a loop's action, every how many loops it is called (2: at the end of the 2nd, 4th, ... loop); as a
        step's action, every how many steps within the loop.

    >>> class Announce(Action):
    ...     def __call__(self, state, outputs, *, step_num, **kwargs):
    ...         print(f"step {step_num}: {outputs}")
    >>> Announce(interval=2)(None, {"loss": [0.5]}, step_num=10)
    step 10: {'loss': [0.5]}
    """

    uses_outputs = True
    """Whether it reads the outputs. If not, a loop keeps none for it, and it gets those of the last loop."""

    def __init__(self, interval: int = 1):
        checks.check_positive(f"{type(self).__name__}.interval", interval)
        self._interval = interval

    @property
    def interval(self) -> int:
        """Every how many loops (or steps, as a step's action) it is called."""
        return self._interval

    def __repr__(self) -> str:
        return f"{type(self).__name__}(interval={self._interval})"

    @abc.abstractmethod
    def __call__(self, state: Any, outputs: types.Output, **kwargs: Any) -> None:
        """Called by a loop, or a step, when the interval says.

        Args:
          state: the train state. The next step takes it over (donates it): copy what is to be kept.
          outputs: as a loop's action the `LoopOutputs` since its last call, on the host; as a step's action the step's
            outputs, still on the devices. `outputs[STOP_LOOP] = True` ends the experiment.
          **kwargs: `step_num`, the number of completed updates; more names may come.
        """

    def flush(self) -> None:  # noqa: B027 (to override, or not)
        """Waits until what was begun is written. Called after each call by a loop on its own, without an OuterLoop."""

    def close(self) -> None:
        """Flushes, and lets resources go; called when an OuterLoop's run ends, however it ends."""
        self.flush()


class ActionList:
    """Actions in their order, each called when its interval says. How loops and steps keep theirs.

    Args:
      actions: the actions, or None for none.
      unit: what their int intervals count, as a warning words it: "loops".
    """

    def __init__(self, actions: Sequence[Action] | None, unit: str):
        self.actions = tuple(actions or ())
        self.unit = unit
        self.calls = [0] * len(self.actions)
        for action in self.actions:
            if not isinstance(action, Action):
                raise TypeError(f"An action must be a jaxloop.actions.Action, got {action!r}. Subclass it.")

    def is_due(self, index: int, count: int) -> bool:
        """Whether an action is called at the end of the loop (or step) of this number, counted from one."""
        return count % self.actions[index].interval == 0

    def call(self, index: int, state: Any, outputs: types.Output, step_num: int) -> None:
        """Calls an action; an exception in it goes on with a note of which and when."""
        try:
            self.actions[index](state, outputs, step_num=step_num)
        except BaseException as error:
            error.add_note(f"in {self.actions[index]!r}, after step {step_num}")
            raise
        self.calls[index] += 1
