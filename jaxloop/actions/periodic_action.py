"""The periodic actions of clu, as actions of a loop."""

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
    """Calls a `clu.periodic_actions` object after every step, as it wants it: `Profile`, `ReportProgress`, and more.

    A loop makes this of the objects among its actions by itself:
    `TrainLoop(step, end_actions=[periodic_actions.ReportProgress(num_train_steps=10_000)])`.

    The object decides by its own arguments, such as `every_steps`, when it does something, and is called with the
    number of completed updates alone. So the callback of a `PeriodicCallback` gets `step` and `t`, and no state: write
    an `Action` for what needs one. The object's clock starts with the first step of each run.

    When a run ends, the result of an asynchronous callback is waited for, and a profile that is still being recorded is
    written.

    Args:
      periodic: the object.
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
            # Another run. To clu steps are missing, which it refuses, and its steps per second would be nonsense.
            self._periodic._previous_step = None
        self._last_step = step_num
        self._periodic(step_num)

    def close(self) -> None:
        super().close()
        if getattr(self._periodic, "_session_running", False):  # Of a Profile, which has no method for it.
            from clu import profiler

            self._periodic._end_session(profiler.stop())
        result = None
        if hasattr(self._periodic, "get_last_callback_result"):
            with contextlib.suppress(IndexError):  # The callback was not called yet.
                result = self._periodic.get_last_callback_result()
        if isinstance(result, concurrent.futures.Future):
            result.result()
