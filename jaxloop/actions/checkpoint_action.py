"""The action that saves checkpoints."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import logging
from etils import epath

from jaxloop import checkpoint, types
from jaxloop.actions.action import Action
from jaxloop.actions.monitor import Monitor
from jaxloop.base import checks, files
from jaxloop.base.text import printable
from jaxloop.history import History
from jaxloop.schedules import Elapsed, Schedule


class CheckpointAction(Action):
    """Saves the train state and everything else that is needed to resume the run.

    If evaluations are due at the same step, they run before the checkpoint is saved. Normally, a save blocks the run
    only while the arrays are copied to the host; the files are written in the background. Only one save runs at a time:
    if the previous save is not on disk yet, the next save blocks the run until it is. `last_stall_secs` is the number
    of seconds for which the last save blocked the run. `Spent.checkpoints` is the total for all saves in the period
    that the `Spent` describes.

    Hooks:
      __call__, begin_run, finish, close: See `Action`. Overrides must call `super()`.
      save: Called by `__call__` with the state and everything else to be saved.

    >>> import tempfile
    >>> from jaxloop import examples
    >>> _, state, _ = examples.tiny_regression()
    >>> action = CheckpointAction(tempfile.mkdtemp(), keep=1, best="test/accuracy")
    >>> for step, accuracy in [(100, 0.97), (200, 0.99), (300, 0.98), (400, 0.96)]:
    ...     action(state, {"test/accuracy": accuracy}, step_num=step)
    >>> action.close()
    >>> checkpoint.all_steps(action.directory), action.best_step
    ([200, 400], 200)

    Args:
      directory: A directory, or an Orbax `CheckpointManager` (from Orbax's current or older API) that saves a single
        item. Your program must close the manager. With a manager, only the train state and the `metadata` passed to
        `save` are saved, without checksums.
      interval: See `Action`.
      keep: The number of recent checkpoints to keep, or None to keep all. Used only with a directory, because a manager
        has its own option that determines which checkpoints to keep.
      best: The metric that determines which checkpoint is best. Pass its name, or its name and mode, as in
        `("test/accuracy", "max")`; see `Monitor`. Requires a directory. The best checkpoint is kept in addition to the
        recent ones, even across restarts. If several checkpoints are equally good, the newest one is considered the
        best. A checkpoint is considered only if the metric was measured at its step, so choose an interval at which
        evaluations are also due. A train metric is averaged over the steps since the last save.
      ckpt_manager: Another name for `directory`.

    Attributes:
      monitor: The `Monitor` for the metric that `best` names, or None if `best` is None.
      keep: The number of recent checkpoints to keep. None if all are kept, or if an Orbax manager decides which to
        keep.

    Raises:
      OSError: If the directory can't be written to.
    """

    uses_outputs: bool = False  # Instances with `best` set this to True.
    runs_last = True
    time_category = "checkpoints"

    def __init__(
        self,
        directory: Any = None,
        interval: int | Schedule = 1,
        *,
        keep: int | None = 3,
        best: str | tuple[str, str] | None = None,
        ckpt_manager: Any = None,
    ):
        super().__init__(interval)
        checks.check_positive("CheckpointAction.keep", keep, optional=True)
        place = checks.only_one("CheckpointAction", directory=directory, ckpt_manager=ckpt_manager)
        self.monitor: Monitor | None = monitor_of("CheckpointAction.best", best)
        self.uses_outputs = self.monitor is not None
        name_and_mode = None if self.monitor is None else (self.monitor.name, self.monitor.mode)
        self._writer = checkpoint.CheckpointWriter(place, keep, name_and_mode)
        self.keep: int | None = keep if isinstance(place, str | os.PathLike) else None
        files.prepare_directory(self.directory)

    def begin_run(self, step_num: int, *, can_resume: bool) -> None:
        if self.monitor is not None:
            self.monitor.begin_run()

    @property
    def monitors(self) -> Sequence[str]:
        return () if self.monitor is None else (self.monitor.name,)

    @property
    def directory(self) -> epath.Path:
        """The directory that contains one subdirectory per checkpoint."""
        return self._writer.directory

    @property
    def best_step(self) -> int | None:
        """The step of the best checkpoint of this run and all earlier runs in the directory, or None.

        It is None if the argument `best` is None, or if no checkpoint contains the metric.

        Reading this property waits for any pending save. To get the step without an action, call
        `checkpoint.best_step(directory)`.
        """
        if self._writer.best is None:
            return None
        self.flush()
        return checkpoint.best_step(self.directory, self._writer.best)

    @property
    def last_stall_secs(self) -> float | None:
        """The number of seconds for which the last save blocked the run, or None before the first save."""
        return self._writer.last_stall_secs

    def __repr__(self) -> str:
        best = "" if self._writer.best is None else f", best={self._writer.best!r}"
        return f"CheckpointAction({str(self.directory)!r}, interval={self.interval}{best})"

    def __call__(
        self,
        state: Any,
        outputs: types.Output,
        *,
        step_num: int,
        elapsed: Elapsed | None = None,
        history: History | None = None,
        snapshot: Callable[[], Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> None:
        elapsed = Elapsed(step_num) if elapsed is None else elapsed
        values = {}
        if self.monitor is not None:
            value = self.monitor.measured(outputs, history, elapsed)
            if value is not None and math.isfinite(value):
                values = {self.monitor.name: value}
        kept = {"metadata": {"elapsed": elapsed.to_dict()}} if snapshot is None else snapshot()
        self.save(step_num, state, outputs, metrics=values or None, **kept)

    def save(
        self,
        step: int,
        state: Any,
        outputs: types.Output,
        *,
        metrics: Mapping[str, float] | None = None,
        metadata: Mapping[str, Any] | None = None,
        run: Mapping[str, Any] | None = None,
        trees: Mapping[str, Any] | None = None,
    ) -> bool:
        """Waits until the previous save is on disk, and then starts saving a state in the background.

        The state is copied before this method returns, so you can donate `state` afterwards. Call `flush` or
        `close` before the program ends.

        Args:
          step: The step number, which becomes the name of the checkpoint.
          state: The state to save.
          outputs: Ignored.
          metrics: A dict that maps the name of the metric in `best` to its value, or None if there is no value.
          metadata: Numbers, strings, lists and dicts to store in the checkpoint. Read them with `Checkpoint.metadata`.
          run: Like `metadata`, but for values of any size. Read them with `Checkpoint.run`. Saved only if the action
            was created with a directory.
          trees: Additional pytrees of arrays, by name. Read them with `Checkpoint.trees`. Saved only if the action was
            created with a directory.

        Returns:
          True if a save was started; False if the checkpoint already exists, or if the policy of an Orbax manager
          skips this step.
        """
        return self._writer.save(step, state, metrics, metadata, run=run, trees=trees)

    def before_checkpoint(self) -> None:
        """Does nothing, because each save waits for the previous one anyway."""

    def flush(self) -> None:
        self._writer.wait()

    def close(self) -> None:
        self._writer.close()

    def finish(self, state: Any) -> Any:
        if self.monitor is not None and self.best_step is None:
            self.monitor.check_was_measured()
            logging.warning(
                "%r saved no checkpoint that can be the best: at its saves, %s was not measured, or not finite. Make "
                "its interval coincide with the evaluations.",
                self,
                printable(self.monitor.name),
            )
        return state


def monitor_of(argument: str, best: str | tuple[str, str] | None) -> Monitor | None:
    """Returns the `Monitor` for a metric, given its name or a pair `(name, mode)`. Returns None if `best` is None.

    Error messages use `argument` as the name of `best`, as in "CheckpointAction.best".
    """
    if best is None or isinstance(best, str):
        return None if best is None else Monitor(best)
    if isinstance(best, tuple | list) and len(best) == 2:
        return Monitor(*best)
    raise TypeError(
        f"{argument} must be the name of a metric or a pair such as ('test/accuracy', 'max'), got {best!r}."
    )
