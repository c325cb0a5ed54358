"""The status of a run, which is read from the files in the run's work directory."""

import dataclasses
import os
import time
from typing import Any, final

from etils import epath

from jaxloop import checkpoint, metrics
from jaxloop.base.text import printable, table
from jaxloop.base.timing import duration
from jaxloop.runs import run_log


@final
@dataclasses.dataclass(frozen=True)
class Status:
    """The status of a run.

    Attributes:
      workdir: The work directory.
      state: The reason why the run ended, if one was recorded, such as "finished", "stopped by EarlyStoppingAction",
        "SIGTERM" or "error: ...". Otherwise, "running", "killed", or "silent" (if the run was started on another host,
        so that its state is unknown).
      step: The number of completed updates, which is the largest number found in the run log, the checkpoints and the
        history. None if no progress has been logged since the run was last started.
      total_steps: The planned number of updates, or None if only the data or a schedule determines when the run ends.
      steps_per_sec: The speed between the last two lines of the run log, or None if it is unknown.
      secs_left: The estimated time until the end of the run, in seconds, or None if it is unknown.
      metrics: A dict that maps each path in the history to a pair: the step of the newest value, and that value, as in
        `{"test.accuracy": (100, 0.9)}`.
      checkpoint: The step of the newest checkpoint, or None if there is none.
      starts: The number of times that the run has been started. Each detour (a return to an earlier checkpoint) counts
        as a start.
      quiet_secs: The time since the last recorded activity, in seconds.
    """

    workdir: str
    state: str
    step: int | None
    total_steps: int | None
    steps_per_sec: float | None
    secs_left: float | None
    metrics: dict[str, tuple[int, Any]]
    checkpoint: int | None
    starts: int
    quiet_secs: float | None

    def __str__(self) -> str:
        shown: dict[str, str] = {}
        if self.step is not None:
            of = "" if self.total_steps is None else f" of {self.total_steps:,}"
            speed = "" if self.steps_per_sec is None else f", {self.steps_per_sec:,.1f} steps/s"
            left = "" if self.secs_left is None else f", {duration(self.secs_left)} left"
            shown["step"] = f"{self.step:,}{of}{speed}{left}"
        shown["checkpoint"] = "none" if self.checkpoint is None else f"step {self.checkpoint:,}"
        for name, (step, value) in self.metrics.items():
            number = f"{value:.4g}" if isinstance(value, float) else value
            shown[name] = f"{number} at step {step:,}"
        if self.quiet_secs is not None:
            starts = "1 start" if self.starts == 1 else f"{self.starts:,} starts"
            shown["last sign"] = f"{duration(self.quiet_secs)} ago, in {starts}"
        lines = table(("", name, text) for name, text in shown.items())
        return f"{printable(self.workdir)}: {printable(self.state)}\n{lines}"


def status(workdir: epath.PathLike) -> Status:
    """Returns the status of the run in a work directory, during the run or afterwards. Doesn't change any files.

    Raises:
      FileNotFoundError: If the directory has no run log.
    """
    *earlier, newest = run_log.read(workdir)
    seen_at, step, _ = newest.points[-1] if newest.points else (newest.started, 0, {})
    saved = [step for each in newest.described.get("checkpoints", ()) for step in checkpoint.all_steps(each)]
    history = run_log.read_history(workdir)
    paths = [path for path in history.paths() if not metrics.is_of_members(path)]
    measured = [(path, *last) for path in paths if (last := history.last(path)) is not None]
    # The run log may lag behind by a second.
    step = max([step, *saved, *(elapsed.steps for _, elapsed, _ in measured)])
    speed, state, total = _speed(newest), newest.state, newest.described.get("total_steps")
    return Status(
        workdir=os.fspath(workdir),
        state=state,
        step=step if newest.points else None,
        total_steps=total,
        steps_per_sec=speed,
        secs_left=(total - step) / speed if state == "running" and total is not None and speed else None,
        metrics={path: (elapsed.steps, value) for path, elapsed, value in sorted(measured)},
        checkpoint=max(saved, default=None),
        starts=len(earlier) + 1,
        quiet_secs=max(time.time() - seen_at, 0.0),
    )


def _speed(attempt: run_log.Attempt) -> float | None:
    """Returns the steps per second between the last two lines of the run log, or None if the speed is unknown."""
    if len(attempt.points) < 2:
        return None
    (before, first, _), (now, last, _) = attempt.points[-2:]
    return (last - first) / (now - before) if last > first and now > before else None
