"""Timing: contestants take turns, and are compared within a round.

The speed of a machine changes for seconds or minutes at a time. So every contestant runs once per round, in an order
that shifts by one from round to round, and times are only compared within a round. The result is the median of these
ratios over the rounds, with their minimum and maximum.
"""

import dataclasses
import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.contestants import Absent, Contestant, Trained
from benchmarks.workloads import Workload


class Spread(NamedTuple):
    """The median, minimum and maximum of some values."""

    median: float
    least: float
    greatest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(statistics.median(values), min(values), max(values))


@dataclasses.dataclass
class Comparison:
    """The times of several contestants, round by round.

    Attributes:
      name: The name of the workload or operation.
      title: A short description.
      reference: The contestant that the others are compared with.
      seconds: For each contestant, the time in each round, per step or per repetition.
      absent: For each contestant that was not run, the reason.
      unit: The unit of the times in tables, a key of `UNITS`.
      figures: Other measured values, by a name that includes the unit.
      cpu_seconds: Like `seconds`, the CPU time of the process over all threads; empty if it was not measured.
    """

    name: str
    title: str
    reference: str
    seconds: dict[str, list[float]]
    absent: dict[str, str] = dataclasses.field(default_factory=dict)
    unit: str = "us a step"
    figures: dict[str, float] = dataclasses.field(default_factory=dict)
    cpu_seconds: dict[str, list[float]] = dataclasses.field(default_factory=dict)

    def ratios(self, name: str, reference: str | None = None) -> list[float]:
        """Returns the ratio in each round: a contestant's time over that of the reference, or of another contestant."""
        others = self.seconds[reference or self.reference]
        return [own / other for own, other in zip(self.seconds[name], others, strict=True)]

    def times(self, name: str) -> Spread:
        """Returns the spread of the times of a contestant, in seconds."""
        return Spread.of(self.seconds[name])


UNITS = {"us a step": 1e6, "us": 1e6, "ms a step": 1e3, "ms": 1e3, "s": 1.0}


def take_turns(
    contestants: Mapping[str, Callable[[], Any]],
    num_rounds: int,
    num_warmup: int = 1,
    check: Callable[[dict[str, Any]], object] = lambda results: None,
) -> list[dict[str, Any]]:
    """Calls each contestant once per round, in a rotating order; returns the results of each round.

    Args:
      contestants: Functions without arguments, by name.
      num_rounds: The number of rounds that count.
      num_warmup: The number of rounds before them, which compile programs and fill file caches.
      check: Receives the results of each round, by name, and raises if they are wrong.
    """
    names, rounds = list(contestants), []
    for number in range(num_warmup + num_rounds):
        shift = number % len(names)
        results = {}
        for name in names[shift:] + names[:shift]:
            gc.collect()  # So that no contestant spends time on the garbage of another.
            results[name] = contestants[name]()
        check(results)
        if number >= num_warmup:
            rounds.append(results)
    return rounds


def compare(
    workload: Workload, contestants: Mapping[str, Contestant], num_rounds: int, num_steps: int | None = None
) -> Comparison:
    """Trains a workload with each contestant, and compares their times. The first one is the reference.

    Raises:
      AssertionError: A contestant reached a different loss than the reference in the same round, so its training was
        different.
    """
    num_steps = num_steps or workload.num_steps
    trains, absent = {}, {}
    for name, contestant in contestants.items():
        try:
            trains[name] = contestant(workload)
        except Absent as reason:
            absent[name] = str(reason)
    reference = next(iter(trains))

    def check(results: dict[str, Trained]) -> None:
        expected = workload.final_loss(results[reference].params)
        for name, result in results.items():
            text = f"{name} does not train {workload.name} as {reference} does: their losses differ"
            np.testing.assert_allclose(workload.final_loss(result.params), expected, rtol=1e-3, err_msg=text)

    # The default argument binds `train` now; otherwise all lambdas would call the last one.
    calls = {name: lambda train=train: train(num_steps) for name, train in trains.items()}
    rounds = take_turns(calls, num_rounds, check=check)
    seconds = {name: [results[name].secs_per_step for results in rounds] for name in trains}
    cpu_seconds = {name: [results[name].cpu_secs_per_step for results in rounds] for name in trains}
    return Comparison(workload.name, workload.title, reference, seconds, absent, cpu_seconds=cpu_seconds)
