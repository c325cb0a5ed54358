"""A breakdown of the wall time of a run, from its first start through all restarts."""

import dataclasses
from collections.abc import Mapping
from typing import final

from etils import epath

from jaxloop.base.text import table
from jaxloop.base.timing import duration
from jaxloop.runs import run_log

# The parts of the wall time, each with its name in the table.
_PARTS = {
    "productive": "productive steps",
    "repeated": "repeated steps",
    "compiling": "compiling",
    "data": "waiting for data",
    "actions": "actions",
    "evals": "evaluations",
    "checkpoints": "checkpoints",
    "restores": "restores",
    "startup": "start-up",
    "downtime": "between processes",
    "unknown": "unknown",
}


@final
@dataclasses.dataclass(frozen=True)
class Goodput:
    """A breakdown of the wall time of a run.

    The parts of a run's wall time add up to the time between the first start of the run and its last recorded activity.
    `str` returns the parts as a table.

    >>> print(Goodput({"productive": 90.0, "data": 9.0, "startup": 1.0}, steps=1000, starts=1))
    productive steps   90.0%  1 min 30 s  1,000 steps
    waiting for data    9.0%       9.0 s
    start-up            1.0%       1.0 s
    total             100.0%  1 min 40 s  1 start

    Attributes:
      parts: A dict from the name of each part to its time in seconds. `productive`: dispatching new steps, and waiting
        for the devices to run them. `repeated`: running steps again because the run resumed from an earlier checkpoint.
        `compiling`: tracing and compiling the train step. `data`: waiting for the next batch. `actions`: actions other
        than saving checkpoints. `evals`: evaluations, including their compilation. `checkpoints`: the time for which
        checkpoint saves blocked the loop. `restores`: restoring checkpoints. `startup`: from the start of a process to
        its call to the `OuterLoop`. `downtime`: from the last log line of a process to the start of the next process;
        if a process is killed, this includes the time between its last log line and its end. `unknown`: anything else.
      steps: The number of updates between the first start and the last log line, not counting repeated updates.
      repeated_steps: The number of updates that were repeated after they had been logged.
      starts: The number of calls to the `OuterLoop`, plus the number of detours (returns to an earlier checkpoint).
    """

    parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    steps: int = 0
    repeated_steps: int = 0
    starts: int = 0

    @property
    def total(self) -> float:
        """The total wall time, in seconds."""
        return sum(self.parts.values())

    def __str__(self) -> str:
        counts = {"productive": f"{self.steps:,} steps", "repeated": f"{self.repeated_steps:,} steps"}
        rows = [(name, self.parts.get(part, 0.0), counts.get(part, "")) for part, name in _PARTS.items()]
        rows = [row for row in rows if abs(row[1]) >= 0.0005 * self.total]
        rows.append(("total", self.total, "1 start" if self.starts == 1 else f"{self.starts:,} starts"))
        share = lambda seconds: f"{seconds / max(self.total, 1e-9):.1%}"
        cells = [(name, share(seconds), duration(max(seconds, 0.0)), count) for name, seconds, count in rows]
        return table(cells, right=(1, 2))


def goodput(workdir: epath.PathLike) -> Goodput:
    """Returns a breakdown of the wall time of a run, which may still be in progress.

    The times are read from the run log, `goodput.jsonl`. Every `OuterLoop` with a local work directory appends to this
    log when a run starts, at most once per second during the run, and when the run ends.

    >>> import tempfile, jaxloop
    >>> from jaxloop import examples
    >>> step, state, batches = examples.tiny_regression()
    >>> workdir = tempfile.mkdtemp()
    >>> _ = jaxloop.OuterLoop(jaxloop.TrainLoop(step), workdir=workdir)(state, batches)
    >>> spent = jaxloop.goodput(workdir)
    >>> spent.steps, spent.repeated_steps, spent.starts
    (100, 0, 1)

    Raises:
      FileNotFoundError: If the directory has no run log.
    """
    return of_attempts(run_log.read(workdir))


def of_attempts(attempts: list[run_log.Attempt]) -> Goodput:
    """Returns a breakdown of a run's wall time. `attempts` contains a record of each start, oldest first."""
    parts = dict.fromkeys(_PARTS, 0.0)
    most, repeated_steps, first, end = 0, 0, None, None
    for attempt in attempts:
        since = attempt.since if end is None else max(attempt.since, end)
        started = max(attempt.started, since)
        parts["downtime"] += 0.0 if end is None else since - end
        parts["startup"] += started - since
        when, at, before = started, None, {}
        reached = most
        for now, step, spent in attempt.points:
            now = max(now, when)
            at = step if at is None else at
            first = step if first is None else first
            count = max(step - at, 0)
            again = min(max(min(step, most) - at, 0), count)
            seconds, before = {kind: spent[kind] - before.get(kind, 0.0) for kind in spent}, spent
            in_steps = seconds.pop("device") + seconds.pop("dispatch")
            share = again / count if count else 0.0
            parts["repeated"] += share * in_steps
            parts["productive"] += (1.0 - share) * in_steps
            for kind, value in seconds.items():
                parts[kind] += value
            parts["unknown"] += now - when - in_steps - sum(seconds.values())
            repeated_steps += again
            when, at, reached = now, max(at, step), max(reached, step)
        most, end = reached, when
    return Goodput(parts, most - (first or 0), repeated_steps, starts=len(attempts))
