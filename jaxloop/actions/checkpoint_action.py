"""Saving the run."""

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import logging
from etils import epath

from jaxloop import checkpoint, checks, files, types
from jaxloop.actions.action import Action
from jaxloop.actions.monitor import Monitor
from jaxloop.history import History
from jaxloop.schedules import Elapsed, Schedule
from jaxloop.text import printable

_LONG_WAIT_SECS = 1.0
"""How long a save may wait for the one before without it being worth a word."""


class CheckpointAction(Action):
    """Saves the run under its step, after the evaluations of that step: the train state, and what it takes to go on.

    A save goes on in the background once the arrays are copied to the host, and a run holds still only until then. One
    save is under way at a time: one that is due before the last is on disk waits for that first. Where two in a row
    have waited for more than a second each, that is said, once, with what to do about it; `last_stall_secs` and
    `last_wait_secs` tell of the last save, `Spent.checkpoints` of all.

    Hooks:
      __call__, close: see `Action`; call those of `super()`.
      save: by `__call__`, with the state and what else belongs to the run.

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
      ckpt_manager: a directory, or an Orbax `CheckpointManager` for single items, of the present or the older style.
        When a run ends, the last save is committed and the manager closed; with a directory, the next run opens it
        again.
      interval: see `Action`.
      keep: with a directory, how many checkpoints to keep, the newest; None for all. A manager has options of its own.
      best: with a directory, the name of a metric, or the name and a mode as in `("test/accuracy", "max")`, see
        `Monitor`. The best checkpoint is kept beside the newest, over restarts of the program too; of equal ones it is
        the newest. It is one of those whose metric was measured at the very step that is saved, so let the interval
        coincide with the evaluations. A train metric is its mean since the last save.
      clock: tells the time in seconds.

    Raises:
      OSError: a directory that can't be written.
    """

    uses_outputs: bool = False  # With `best`, an attribute of the object says otherwise.
    comes_last = True
    time_goes_to = "checkpoints"

    def __init__(
        self,
        ckpt_manager: Any,
        interval: int | Schedule = 1,
        *,
        keep: int | None = 3,
        best: str | tuple[str, str] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        super().__init__(interval)
        checks.check_positive("CheckpointAction.keep", keep, optional=True)
        self._monitor = _monitor_of(best)
        self.uses_outputs = self._monitor is not None
        name_and_mode = None if self._monitor is None else (self._monitor.name, self._monitor.mode)
        self._writer = checkpoint.CheckpointWriter(ckpt_manager, keep, name_and_mode, clock=clock)
        self._best = name_and_mode
        self._keep = keep if isinstance(ckpt_manager, str | os.PathLike) else None
        self._saves = self._saves_measured = 0
        self._last_step: int | None = None  # That was saved.
        self._has_waited = self._has_said_that_it_waits = False
        files.prepare_directory(self.directory)

    @property
    def monitors(self) -> Sequence[str]:
        return () if self._monitor is None else (self._monitor.name,)

    @property
    def keep(self) -> int | None:
        """How many checkpoints are kept, the newest ones; None for all, or where a manager decides."""
        return self._keep

    @property
    def directory(self) -> epath.Path:
        """The directory with one subdirectory a step."""
        return self._writer.directory

    @property
    def best_step(self) -> int | None:
        """The step of the best checkpoint, those of earlier runs included; waits for the save under way.

        None where no metric tells. `checkpoint.best_step(directory)` reads the same without an action.
        """
        if self._best is None:
            return None
        self.flush()
        return checkpoint.best_step(self.directory, self._best)

    @property
    def last_stall_secs(self) -> float | None:
        """How long the last save held the run up; None before the first."""
        return self._writer.last_stall_secs

    @property
    def last_wait_secs(self) -> float | None:
        """How much of `last_stall_secs` it waited for the save before to be on disk."""
        return self._writer.last_wait_secs

    def __repr__(self) -> str:
        return f"CheckpointAction({str(self.directory)!r}, interval={self.interval})"

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
        if self._monitor is not None:
            value = self._monitor.measured(outputs, history, elapsed)
            values = {} if value is None or not math.isfinite(value) else {self._monitor.name: value}
        kept = {"metadata": {"elapsed": elapsed.to_dict()}} if snapshot is None else snapshot()
        if self.save(step_num, state, outputs, metrics=values or None, **kept):
            self._saves += 1
            self._saves_measured += bool(values)

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
        """Saves a state now, asynchronously. The state stays usable: it is copied before this returns.

        Waits until the save before is on disk.

        Call `flush` or `close` before the program ends.

        Args:
          step: the step it is saved under.
          state: the state.
          outputs: not saved.
          metrics: how good the state is: with `best`, a dict with that metric.
          metadata: what is to be noted with it, as numbers, strings, lists and dicts; `checkpoint.metadata` reads it.
          run: more of the same kind, of any length; `checkpoint.run` reads it. With a directory only, as is `trees`.
          trees: more trees of arrays, by name; `checkpoint.trees` reads them.

        Returns:
          Whether a save began: not for a step that is there already, nor where the manager's own policy says no.
        """
        has_begun = self._writer.save(step, state, metrics, metadata, run=run, trees=trees)
        if has_begun:
            self._warn_of_waiting(step)
            self._last_step = step
        return has_begun

    def _warn_of_waiting(self, step: int) -> None:
        waited = self.last_wait_secs or 0.0
        if waited > _LONG_WAIT_SECS and self._has_waited and not self._has_said_that_it_waits:
            self._has_said_that_it_waits = True
            logging.warning(
                "The save of step %d waited %.1f s for that of step %d to be on disk, as the save before had waited, "
                "and the run held still. Save less often than interval=%r, or to a faster disk.",
                step,
                waited,
                self._last_step,
                self.interval,
            )
        self._has_waited = waited > _LONG_WAIT_SECS

    def before_checkpoint(self) -> None:
        """Does nothing: a save waits for the one before by itself."""

    def flush(self) -> None:
        self._writer.wait()

    def close(self) -> None:
        self._writer.close()
        if self._monitor is not None and self._saves and not self._saves_measured:
            logging.warning(
                "%r saved no checkpoint that can be the best: %s was measured at none of its %d saves. Let its "
                "interval coincide with the evaluations: interval=every(steps=500) here, and schedule=every(steps=500) "
                "in the EvalSpec.",
                self,
                printable(self._monitor.name),
                self._saves,
            )
        self._saves = self._saves_measured = 0  # The next run counts its own.


def _monitor_of(best: str | tuple[str, str] | None) -> Monitor | None:
    if best is None or isinstance(best, str):
        return None if best is None else Monitor(best)
    if isinstance(best, tuple | list) and len(best) == 2:
        return Monitor(*best)
    raise TypeError(
        f"CheckpointAction.best must be the name of a metric or a pair such as ('test/accuracy', 'max'), got {best!r}."
    )
