"""The run log, which records each start of a run, the run's progress, and the reason why it ended."""

import contextlib
import dataclasses
import json
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

from absl import logging
from etils import epath

from jaxloop.actions.action import Action
from jaxloop.base import files
from jaxloop.base.text import printable
from jaxloop.base.timing import Spent
from jaxloop.engine.agenda import Item
from jaxloop.history import HISTORY_FILE, History
from jaxloop.outer_loop.extension import Experiment, Extension
from jaxloop.schedules import Elapsed

FILE = "goodput.jsonl"
"""The file name of the run log in a work directory."""

_LINE_SECS = 1.0  # At most one log line per second, however short the loops are.
_KINDS = tuple(field.name for field in dataclasses.fields(Spent) if field.name not in ("steps", "samples"))
_has_claimed_start = False  # True once a run has counted the time since this process started.


@final
class RunLog(Extension):
    """Writes the run log of an `OuterLoop` with a train loop and a local work directory.

    Each time the run starts, one line is added immediately. A second line is added once the step at which training
    starts or resumes is known. After that, at most one line per second is added. When the run ends, a last line is
    added. If a run is killed, its last line shows the run's last known progress.

    The log never stops a run: if it can't be written, a single warning is logged, and the run continues without a log.

    Args:
      notes: See `OuterLoop`. The program's Git commit is added to the notes.
    """

    name = "run log"

    def __init__(self, notes: Mapping[str, Any] | None = None):
        self._notes = _checked(notes)
        self._actions: Sequence[Action] | None = None  # The actions that haven't received the notes yet.
        self._spent: Callable[[], Spent] = Spent
        self._path: epath.Path | None = None  # None if no log is written.
        self._newest_line = -math.inf

    def begin(self, experiment: Experiment) -> Sequence[Item]:
        loop, workdir = experiment.train_loop, experiment.local_workdir
        if loop is None:
            return ()
        self._actions, before = experiment.actions, loop.spent
        self._spent = lambda: loop.spent - before
        if workdir is None or not loop.engine.job.is_first:
            return ()
        now, self._path = time.time(), workdir / FILE
        self._notes = _commit() | self._notes
        self._write(
            "start",
            now,
            since=_started_at(now),
            pid=os.getpid(),
            host=socket.gethostname(),
            total_steps=experiment.spec.total_steps,
            checkpoints=[os.fspath(action.directory) for action in experiment.savers],
            notes=self._notes,
        )
        return ()

    def moment(self, now: Elapsed) -> None:
        if self._actions is not None:
            for action in self._actions:
                action.write_notes(self._notes)
            self._actions = None
            self._line("log", now.steps)
        elif time.time() - self._newest_line >= _LINE_SECS:
            self._line("log", now.steps)

    def end(self, now: Elapsed, reason: str, error: BaseException | None) -> None:
        self._line("end", now.steps, reason=reason)
        self._path = None

    def _line(self, event: str, step: int, **others: Any) -> None:
        spent = self._spent()
        seconds = {kind: round(getattr(spent, kind), 6) for kind in _KINDS if getattr(spent, kind)}
        self._write(event, time.time(), step=step, spent=seconds, **others)

    def _write(self, event: str, when: float, **others: Any) -> None:
        if self._path is None:
            return
        self._newest_line, line = when, {"event": event, "time": round(when, 6)} | others
        try:
            with files.open_file(self._path, "a") as file:
                file.write(f"\n{json.dumps(line)}")  # A killed process may have left an incomplete line.
        except OSError as error:
            logging.warning("The run continues without its log, which can't be written: %s", error)
            self._path = None


@final
@dataclasses.dataclass
class Attempt:
    """One attempt at a run, as recorded in the run log: a call to the `OuterLoop`, or a detour within a call.

    Attributes:
      started: The time when the call or the detour started, in seconds since the Unix epoch.
      since: The time when the process started, in seconds since the Unix epoch. Equal to `started` in notebooks, and
        for later starts in the same process.
      described: The values in the log line that records the start: `pid`, `host`, `total_steps`, `notes` and others.
      points: The later log lines, each as `(time, step, seconds by kind of work)`. The first one records the step
        at which training starts or resumes.
      reason: Why the run ended: `"finished"`, `"stopped"` (by a step), `"stopped by ..."` (an action or a
        command), `"Ctrl-C"`, `"SIGTERM"`, `"error: ..."`, or `"a detour"` (the run returned to an earlier checkpoint).
        None if the run was killed or is still running.
    """

    started: float
    since: float
    described: dict[str, Any]
    points: list[tuple[float, int, dict[str, float]]] = dataclasses.field(default_factory=list)
    reason: str | None = None

    @property
    def state(self) -> str:
        """The reason why the run ended, if known; otherwise "running", "killed" or "silent".

        "silent" means that the run was started on another host, so its state can't be determined.
        """
        if self.reason is not None:
            return self.reason
        if self.described.get("host") != socket.gethostname():
            return "silent"
        return "running" if _is_running(self.described.get("pid"), self.started) else "killed"


def read_lines(path: epath.Path) -> Iterator[dict[str, Any]]:
    """Yields the JSON objects in the lines of a file. Skips malformed lines. Yields nothing if the file doesn't exist.

    Raises:
      OSError: If the file is not a regular file, or can't be read.
      ValueError: If the file is too large.
    """
    for line in files.read_bytes(path).splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            if isinstance(found := files.parse_json(line), dict):
                yield found


def read_history(workdir: epath.PathLike) -> History:
    """Returns the history in a work directory. If the directory has no history file, the history is empty."""
    path = files.absolute(workdir) / HISTORY_FILE
    return History.load(path) if path.exists() else History()


def read(workdir: epath.PathLike) -> list[Attempt]:
    """Reads the run log in a work directory. Returns a record of each start of the run, in chronological order.

    Raises:
      FileNotFoundError: If the directory has no run log.
      OSError: If the log is not a regular file, or can't be read.
      ValueError: If the log is too large.
    """
    attempts: list[Attempt] = []
    for line in read_lines(files.absolute(workdir) / FILE):
        with contextlib.suppress(ValueError, TypeError, LookupError, AttributeError):
            _take(line, attempts)
    if not attempts:
        raise FileNotFoundError(
            f"{printable(workdir)} has no run log ({FILE}). Give the work directory of an OuterLoop."
        )
    return attempts


def _take(line: Mapping[str, Any], attempts: list[Attempt]) -> None:
    """Adds the content of a log line to `attempts`.

    A line that records a start adds a new attempt. Any other line is added to the last attempt. If the line is
    malformed, this function raises a `ValueError`, `TypeError`, `LookupError` or `AttributeError`.
    """
    event, when = line["event"], float(line["time"])
    if event == "start":
        if not isinstance(line.get("notes", {}), dict) or not isinstance(line.get("checkpoints", []), list):
            raise TypeError("The notes or the checkpoints are malformed.")
        attempts.append(Attempt(when, min(float(line["since"]), when), dict(line)))
        return
    attempt, step = attempts[-1], line["step"]
    seconds = {kind: float(line["spent"].get(kind, 0.0)) for kind in _KINDS}
    if type(step) is not int or not 0 <= step < 2**63 or not math.isfinite(when + sum(seconds.values())):
        raise ValueError("The step or a time is not a valid number.")
    attempt.points.append((when, step, seconds))
    if event == "end":
        attempt.reason = str(line["reason"])


def _checked(notes: Mapping[str, Any] | None) -> dict[str, Any]:
    """Converts a run's notes to JSON values. Raises a `TypeError` if a note can't be converted."""
    try:
        return json.loads(json.dumps(notes or {}, allow_nan=False, default=lambda value: value.item()))
    except (AttributeError, TypeError, ValueError) as error:
        raise TypeError(
            f"OuterLoop.notes takes strings, finite numbers and booleans, got {notes!r}: {error}"
        ) from error


def _commit() -> dict[str, str]:
    """Returns a dict with the program's Git commit under the key `commit`, or an empty dict if there is none."""
    directory = os.path.dirname(os.path.abspath(sys.argv[0] if sys.argv and sys.argv[0] else "."))
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["git", "-C", directory, "rev-parse", "--short=12", "HEAD"]
        found = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
        return {"commit": found.stdout.strip()}
    return {}


def _started_at(now: float) -> float:
    """Returns the time to record as the start of this process, in seconds since the Unix epoch.

    For the first run in a process, this is the time at which the process started. For later runs in the process, the
    result is `now`. It is also `now` in interactive sessions and notebooks, and if the system doesn't report the start
    time.
    """
    global _has_claimed_start
    is_first, _has_claimed_start = not _has_claimed_start, True
    if not is_first or hasattr(sys, "ps1") or "ipykernel" in sys.modules:
        return now
    return _began_at(os.getpid()) or now


def _is_running(pid: Any, started: float) -> bool:
    """Returns True if process `pid`, which called an `OuterLoop` at time `started`, is still running on this machine.

    Returns False if `pid` now belongs to a process that started later.
    """
    try:
        os.kill(pid, 0)
    except PermissionError:  # It belongs to another user.
        pass
    except (OSError, TypeError, OverflowError):
        return False
    return (_began_at(pid) or 0.0) <= started + 1.0  # Otherwise, another process has this PID now.


def _began_at(pid: int) -> float | None:
    """Returns a process's start time in seconds since the Unix epoch, or None if the system doesn't report it."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat, open("/proc/uptime", "rb") as uptime:
            ticks = int(stat.read().rpartition(b")")[2].split()[19])
            return time.time() - max(0.0, float(uptime.read().split()[0]) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):  # Not Linux.
        return None
