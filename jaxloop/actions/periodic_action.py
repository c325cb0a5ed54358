"""An action that wraps clu's periodic actions."""

import concurrent.futures
from typing import Any, final

from jaxloop import types
from jaxloop.actions.action import Action
from jaxloop.schedules import always

# Not imported, because that would import TensorFlow.
_CLU_MODULE = "clu.periodic_actions"


def is_periodic(obj: Any) -> bool:
    """Returns True if an object is a `PeriodicAction` from `clu.periodic_actions`."""
    return any((kind.__module__, kind.__name__) == (_CLU_MODULE, "PeriodicAction") for kind in type(obj).__mro__)


@final
class PeriodicAction(Action):
    """Calls one of clu's periodic actions, such as `Profile` or `ReportProgress`, after every step.

    A loop automatically wraps the periodic actions in its list of actions:
    `TrainLoop(step, end_actions=[periodic_actions.ReportProgress(num_train_steps=10_000)])`.

    The periodic action's own arguments, such as `every_steps`, determine when it acts. It receives only the number of
    completed updates, so the callback of a `PeriodicCallback` gets `step` and `t` but no state. If you need the state,
    write an `Action`. The periodic action's clock starts at the first step of each run.

    At the end of a run, the action waits for the result of any asynchronous callback, and writes any profile that is
    still being recorded.

    Args:
      periodic: The periodic action to call.
    """

    uses_outputs = False

    def __init__(self, periodic: Any):
        super().__init__(always())
        if not is_periodic(periodic):
            raise TypeError(
                f"PeriodicAction takes an object of clu.periodic_actions, such as ReportProgress(), got {periodic!r}."
            )
        self._periodic = periodic
        self._last_step: int | None = None

    def __repr__(self) -> str:
        return f"PeriodicAction({type(self._periodic).__name__})"

    def __call__(self, state: Any, outputs: types.Output, *, step_num: int, **kwargs: Any) -> None:
        if self._last_step is not None and step_num != self._last_step + 1:
            # A new run. Without this, clu would reject the gap in the steps, and its steps per second would be wrong.
            self._periodic._previous_step = None
        self._last_step = step_num
        self._periodic(step_num)

    def close(self) -> None:
        if getattr(self._periodic, "_session_running", False):  # A Profile has no public method for this.
            from clu import profiler

            self._periodic._end_session(profiler.stop())
        for result in getattr(self._periodic, "_cb_results", ()):
            if isinstance(result, concurrent.futures.Future):
                result.result()
