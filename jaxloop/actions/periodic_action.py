"""The action that wraps the periodic actions of clu."""

import concurrent.futures
import contextlib
from typing import Any, final

from jaxloop import types
from jaxloop.actions.action import Action
from jaxloop.schedules import always

# Importing it would import TensorFlow.
_CLU_MODULE = "clu.periodic_actions"


def is_periodic(obj: Any) -> bool:
    """Returns whether an object is one of `clu.periodic_actions`, or of a subclass."""
    return any((kind.__module__, kind.__name__) == (_CLU_MODULE, "PeriodicAction") for kind in type(obj).__mro__)


@final
class PeriodicAction(Action):
    """Calls an object of `clu.periodic_actions`, such as `Profile` or `ReportProgress`, after every step.

    A loop wraps such objects among its actions:
    `TrainLoop(step, end_actions=[periodic_actions.ReportProgress(num_train_steps=10_000)])`.

    The object's own arguments, such as `every_steps`, decide when it does something. It is called with the number of
    completed updates only, so the callback of a `PeriodicCallback` receives `step` and `t` but no state; write an
    `Action` if you need one. The object's clock starts with the first step of each run.

    The end of a run waits for the result of an asynchronous callback, and writes a profile that is still being
    recorded.

    Args:
      periodic: The object.
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
            # A new run. Without this, clu would refuse the gap in the steps, and its steps per second would be wrong.
            self._periodic._previous_step = None
        self._last_step = step_num
        self._periodic(step_num)

    def close(self) -> None:
        super().close()
        if getattr(self._periodic, "_session_running", False):  # A Profile has no public method for this.
            from clu import profiler

            self._periodic._end_session(profiler.stop())
        result = None
        if hasattr(self._periodic, "get_last_callback_result"):
            with contextlib.suppress(IndexError):  # The callback was not called yet.
                result = self._periodic.get_last_callback_result()
        if isinstance(result, concurrent.futures.Future):
            result.result()
