"""Saving the train state."""

from typing import Any

from etils import epath

from jaxloop import checkpoint, types
from jaxloop.actions.action import Action


class CheckpointAction(Action):
    """Saves the train state under its step.

    Args:
      ckpt_manager: a directory, or an Orbax `CheckpointManager` for single items, of the present or the older style.
        When a run ends, the last save is committed and the manager closed; with a directory, the next run opens it
        again.
      interval: see `Action`.
      keep: with a directory, how many checkpoints to keep; None for all. A manager has options of its own.

    Raises:
      OSError: a directory that can't be written.
    """

    uses_outputs = False

    def __init__(self, ckpt_manager: Any, interval: int = 1, *, keep: int | None = 3):
        super().__init__(interval)
        self._writer = checkpoint.CheckpointWriter(ckpt_manager, keep)
        checkpoint.prepare_directory(self.directory)

    @property
    def directory(self) -> epath.Path:
        """The directory with one subdirectory a step."""
        return self._writer.directory

    def __repr__(self) -> str:
        return f"CheckpointAction({str(self.directory)!r}, interval={self.interval})"

    def __call__(self, state: Any, outputs: types.Output, *, step_num: int, **kwargs: Any) -> None:
        self.save(step_num, state, outputs)

    def save(self, step: int, state: Any, outputs: types.Output) -> bool:
        """Saves a state now, asynchronously. The state stays usable: it is copied before this returns.

        Call `flush` or `close` before the program ends.

        Returns:
          Whether a save began: not for a step that is there already, nor where the manager's own policy says no.
        """
        return self._writer.save(step, state)

    def flush(self) -> None:
        self._writer.wait()

    def close(self) -> None:
        self._writer.close()
