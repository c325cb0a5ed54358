"""The status of a run, as determined from the files in its work directory."""

import contextlib
import dataclasses
import os
import socket
import time
from collections.abc import Callable, Iterable
from typing import Any, final

from etils import epath

from jaxloop import checkpoint
from jaxloop.base.text import printable
from jaxloop.base.timing import duration
from jaxloop.runs import run_log


@final
@dataclasses.dataclass(frozen=True)
class Status:
    """The status of a run.

    Attributes:
      workdir: The work directory.
      state: "running" or "killed", or "silent" if the run was started on a different host, so that it could be either.
        If the run has recorded why it ended, that reason: "finished", "stopped", "stopped by EarlyStoppingAction",
        "SIGTERM", "error: ..."; or "no step was taken" if it finished without running a step or reaching `total_steps`.
      step: The number of completed updates; None if the run hasn't reached its first step since it was last started.
      total_steps: The planned number of updates; None if only the data or a schedule determines when the run ends.
      steps_per_sec: The speed between the last two log points; None if unknown.
      secs_left: The estimated time until the end, in seconds; None if unknown.
      metrics: For each path in the history, a pair of the step and the newest value: `{"test.accuracy": (100, 0.9)}`.
      checkpoint: The step of the newest checkpoint; None if there is none.
      best_checkpoint: The step of the best checkpoint, if `CheckpointAction(best=...)` keeps one; otherwise None.
      starts: The number of times that the run has been started.
      quiet_secs: The time since the last sign of life, in seconds.
    """

    workdir: str
    state: str
    step: int | None
    total_steps: int | None
    steps_per_sec: float | None
    secs_left: float | None
    metrics: dict[str, tuple[int, Any]]
    checkpoint: int | None
    best_checkpoint: int | None
    starts: int
    quiet_secs: float | None

    def __str__(self) -> str:
        shown: dict[str, str] = {}
        if self.step is not None:
            of = "" if self.total_steps is None else f" of {self.total_steps:,}"
            speed = "" if self.steps_per_sec is None else f", {self.steps_per_sec:,.1f} steps/s"
            left = "" if self.secs_left is None else f", {duration(self.secs_left)} left"
            shown["step"] = f"{self.step:,}{of}{speed}{left}"
        best = "" if self.best_checkpoint is None else f", best step {self.best_checkpoint:,}"
        shown["checkpoint"] = "none" if self.checkpoint is None else f"step {self.checkpoint:,}{best}"
        for name, (step, value) in self.metrics.items():
            number = f"{value:.4g}" if isinstance(value, float) else printable(value)
            shown[printable(name)] = f"{number} at step {step:,}"
        if self.quiet_secs is not None:
            starts = "1 start" if self.starts == 1 else f"{self.starts:,} starts"
            shown["last sign"] = f"{duration(self.quiet_secs)} ago, in {starts}"
        width = max(map(len, shown))
        lines = [f"  {name:<{width}}  {text}" for name, text in shown.items()]
        return "\n".join([f"{printable(self.workdir)}: {printable(self.state)}", *lines])


def status(workdir: epath.PathLike) -> Status:
    """Returns the status of the run in a work directory, during the run or afterwards. Doesn't change any files.

    Raises:
      FileNotFoundError: If the directory has no run log.
    """
    attempts = run_log.read(workdir)
    newest, now = attempts[-1], time.time()
    seen_at, step = newest.last
    total = newest.described.get("total_steps")
    total = total if type(total) is int else None
    newest_values = {name: (at, value) for at, row in run_log.read_history(workdir) for name, value in row.items()}
    speed = _speed(newest, (seen_at, step))
    state = _state(newest, total)
    return Status(
        workdir=os.fspath(workdir),
        state=state,
        step=step if newest.points else None,
        total_steps=total,
        steps_per_sec=speed,
        secs_left=(total - step) / speed if state == "running" and total is not None and speed else None,
        metrics=dict(sorted(newest_values.items())),
        checkpoint=_newest_of(checkpoint.all_steps, newest.described.get("checkpoints")),
        best_checkpoint=_newest_of(_best_steps, newest.described.get("checkpoints")),
        starts=len(attempts),
        quiet_secs=max(now - seen_at, 0.0),
    )


def _state(attempt: run_log.Attempt, total_steps: int | None) -> str:
    if attempt.reason is not None:
        steps = [step for _, step, _ in attempt.points]
        took_none = bool(steps) and steps[0] == steps[-1] != total_steps
        return "no step was taken" if took_none and attempt.reason == "finished" else attempt.reason
    if attempt.described.get("host") != socket.gethostname():
        return "silent"
    return "running" if attempt.is_alive() else "killed"


def _newest_of(find: Callable[[str], Iterable[int]], directories: Any) -> int | None:
    steps: list[int] = []
    for directory in directories if isinstance(directories, list) else ():
        with contextlib.suppress(OSError, TypeError, ValueError, checkpoint.CheckpointError):
            steps += find(directory)
    return max(steps, default=None)


def _best_steps(directory: str) -> Iterable[int]:
    best = checkpoint.best_step(directory)
    return () if best is None else (best,)


def _speed(attempt: run_log.Attempt, last: tuple[float, int]) -> float | None:
    """Returns the steps per second since the second-to-last log point."""
    points = [(when, step) for when, step, _ in attempt.points[-2:]]
    if not points or last[1] <= points[0][1] or last[0] <= points[0][0]:
        return None
    return (last[1] - points[0][1]) / (last[0] - points[0][0])
