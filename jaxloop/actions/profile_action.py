"""The action that profiles a few steps."""

from typing import Any, final

import jax
from absl import logging
from etils import epath

from jaxloop import metrics, types
from jaxloop.actions.action import Action
from jaxloop.base import checks, files
from jaxloop.schedules import at


@final
class ProfileAction(Action):
    """Records a profile of a few steps for TensorBoard's Profile plugin, XProf or Perfetto.

    The trace contains only whole steps: the action synchronizes with the devices before the trace starts and before it
    stops. If the run ends early, the trace contains the steps completed by then.

    >>> import tempfile
    >>> ProfileAction(tempfile.mkdtemp(), first_step=100, num_steps=5).interval
    at(steps=99) | at(steps=104)

    Args:
      logdir: The directory for the traces, which are written to its subdirectory `plugins/profile/`.
      first_step: The first step to trace. It must be at least 2, because the first step of a run includes compilation.
      num_steps: The number of steps to trace. A few steps are enough; longer traces produce large files.

    Raises:
      OSError: If the directory can't be written to.
    """

    uses_outputs = False

    def __init__(self, logdir: epath.PathLike, first_step: int = 10, num_steps: int = 5):
        checks.check_positive("ProfileAction.first_step", first_step)
        checks.check_positive("ProfileAction.num_steps", num_steps)
        if first_step < 2:
            raise ValueError(f"ProfileAction.first_step must be at least 2, because step 1 compiles, got {first_step}.")
        super().__init__(at(first_step - 1) | at(first_step - 1 + num_steps))
        self._logdir = files.prepare_directory(logdir)
        self._first_step, self._num_steps = first_step, num_steps
        self._running_since: int | None = None  # The step before the first traced one.

    def __repr__(self) -> str:
        return f"ProfileAction({str(self._logdir)!r}, first_step={self._first_step}, num_steps={self._num_steps})"

    def __call__(self, state: Any, outputs: types.Output, *, step_num: int, **kwargs: Any) -> None:
        if self._running_since is not None:
            metrics.wait(state)  # Pending work belongs to these steps.
            self._stop(step_num)
        elif step_num == self._first_step - 1:
            metrics.wait(state)  # Pending work belongs to earlier steps.
            try:
                jax.profiler.start_trace(str(self._logdir))
                self._running_since = step_num
            except RuntimeError as error:
                logging.warning("%r could not profile step %d: %s", self, step_num + 1, error)

    def _stop(self, step_num: int | None) -> None:
        """Ends the trace. `step_num` is None if the last traced step is unknown."""
        first, self._running_since = self._running_since, None
        if first is not None:
            jax.profiler.stop_trace()
            steps = f"the steps from {first + 1} on" if step_num is None else f"steps {first + 1} to {step_num}"
            logging.info("The profile of %s is in %s. View it with tensorboard --logdir.", steps, self._logdir)

    def finish(self, state: Any) -> Any:
        if self._running_since is not None:
            metrics.wait(state)
        return state

    def close(self) -> None:
        super().close()
        self._stop(None)
