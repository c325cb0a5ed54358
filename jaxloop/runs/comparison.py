"""A table that compares runs by the best value of a metric, and shows the notes that differ between the runs."""

import dataclasses
import math
import os
from collections.abc import Sequence
from typing import Any, final

from etils import epath

from jaxloop.actions.monitor import Monitor
from jaxloop.base import checks
from jaxloop.base.text import printable, table
from jaxloop.base.timing import duration
from jaxloop.runs import accounts, run_log


@final
@dataclasses.dataclass(frozen=True)
class Comparison:
    """A comparison of runs by the best value of a metric, best run first. `str` returns it as a table.

    Attributes:
      by: The path of the metric in the history.
      mode: "max" if larger values are better, or "min" if smaller values are better.
      runs: One dict per run. Its keys are `workdir`, `best` (the best value), `step` (the step at which that value was
        reached), `std` (the standard deviation of the metric over the members of a `jaxloop.Ensemble` at that step, or
        None without an ensemble), `secs` (the wall time in seconds), `productive` (the fraction of the wall time that
        was spent on new steps) and `notes` (the notes with which the run was last started, as a dict). `best` and
        `step` are None if the metric was never finite.
    """

    by: str
    mode: str
    runs: list[dict[str, Any]]

    def __str__(self) -> str:
        names = _differing([run["notes"] for run in self.runs])
        head = ["run", f"best {self.by}", "step", "time", "productive", *names]
        rows = [
            [
                run["workdir"],
                ("" if run["best"] is None else f"{run['best']:.4g}")
                + ("" if run["std"] is None else f" ± {run['std']:.2g}"),
                "" if run["step"] is None else f"{run['step']:,}",
                duration(run["secs"]),
                f"{run['productive']:.0%}",
                *(str(run["notes"].get(name, "")) for name in names),
            ]
            for run in self.runs
        ]
        return table([head, *rows])


def compare(workdirs: Sequence[epath.PathLike], by: str, mode: str = "auto") -> Comparison:
    """Compares runs by the best value of a metric in their histories.

    Args:
      workdirs: The runs' work directories.
      by: The path of the metric in the history, such as "test.accuracy".
      mode: "max", "min", or "auto" to infer the mode from the metric's name; see `jaxloop.actions.Monitor`.

    Raises:
      FileNotFoundError: If a directory has no run log.
      ValueError: If no run has a finite value of the metric.
    """
    monitor = Monitor(by, mode)
    runs = [_run(workdir, monitor) for workdir in workdirs]
    if all(run["best"] is None for run in runs):
        there = sorted({path for each in workdirs for path in run_log.read_history(each).paths()})
        text = f"No history has a finite value of {printable(by)!r}. Available: {checks.listed(there)}."
        raise ValueError(f"{text} Give one of these.")
    sign = -1.0 if monitor.mode == "max" else 1.0
    runs.sort(key=lambda run: math.inf if run["best"] is None else sign * run["best"])
    return Comparison(by, monitor.mode, runs)


def _run(workdir: epath.PathLike, monitor: Monitor) -> dict[str, Any]:
    attempts = run_log.read(workdir)
    spent = accounts.of_attempts(attempts)
    best, step, std = _best(workdir, monitor)
    return {
        "workdir": os.fspath(workdir),
        "best": best,
        "step": step,
        "std": std,
        "secs": spent.total,
        "productive": spent.parts.get("productive", 0.0) / max(spent.total, 1e-9),
        "notes": attempts[-1].described.get("notes", {}),
    }


def _best(workdir: epath.PathLike, monitor: Monitor) -> tuple[float | None, int | None, float | None]:
    """Returns a tuple `(best, step, std)` for a metric in a run.

    `best` is the best finite value of the metric, and `step` is the first step at which the metric had this value.
    `std` is the standard deviation of the metric over the members of an ensemble at that step, or None without an
    ensemble. All three are None if the metric was never finite.
    """
    name, sign = monitor.name.replace("/", "."), -1.0 if monitor.mode == "max" else 1.0
    history = run_log.read_history(workdir)
    pairs = zip(*history.collect(name, "steps"), strict=True) if name in history.paths() else ()
    finite = [(value, step) for value, step in pairs if isinstance(value, int | float) and math.isfinite(value)]
    best, step = min(finite, key=lambda pair: sign * pair[0], default=(None, None))
    spread = f"{name}.members.std"
    stds = dict(zip(*history.collect("steps", spread), strict=True)) if spread in history.paths() else {}
    return best, step, stds.get(step)


def _differing(notes: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the names of the notes whose values differ between runs, given the notes of each run."""
    names = dict.fromkeys(name for each in notes for name in each)
    return [name for name in names if len({str(each.get(name)) for each in notes}) > 1]
