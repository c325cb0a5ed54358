"""How contestants are timed: in turns, and compared within a round.

A machine is now faster, now slower, for seconds or minutes on end. So all take a turn in each round, in an order that
shifts by one from round to round, and what counts is the ratio of two times in the same round: the median of these
ratios over the rounds, and the least and the greatest.
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
    """The median of some values, the least and the greatest."""

    median: float
    least: float
    greatest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(statistics.median(values), min(values), max(values))


@dataclasses.dataclass
class Comparison:
    """Who took how long, round by round.

    Attributes:
      name: of the workload, or of whatever was compared.
      title: what it is.
      reference: whom all are compared with.
      seconds: by contestant, the time of each round; of a step or of whatever is repeated.
      absent: by contestant, why it did not take part.
      unit: of the times in tables, a key of `UNITS`.
      figures: what else was measured, by a name that says the unit.
      cpu_seconds: as `seconds`, the CPU time of the process, with all of its threads; empty where it was not measured.
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
        """The times of a contestant over those of the reference, or of another, in the same rounds."""
        others = self.seconds[reference or self.reference]
        return [own / other for own, other in zip(self.seconds[name], others, strict=True)]

    def times(self, name: str) -> Spread:
        """The times of a contestant in seconds."""
        return Spread.of(self.seconds[name])


UNITS = {"us a step": 1e6, "us": 1e6, "ms a step": 1e3, "ms": 1e3, "s": 1.0}


def take_turns(
    contestants: Mapping[str, Callable[[], Any]],
    num_rounds: int,
    num_warmup: int = 1,
    check: Callable[[dict[str, Any]], object] = lambda results: None,
) -> list[dict[str, Any]]:
    """Calls each contestant once a round, in an order that shifts; returns their results, round by round.

    Args:
      contestants: functions without arguments, by name.
      num_rounds: how many rounds count.
      num_warmup: how many come before them, in which programs are compiled and files get into caches.
      check: called with the results of each round, by name; raises where they are not what they should be.
    """
    names, rounds = list(contestants), []
    for number in range(num_warmup + num_rounds):
        shift = number % len(names)
        results = {}
        for name in names[shift:] + names[:shift]:
            gc.collect()  # What others left is not to be collected on this one's time.
            results[name] = contestants[name]()
        check(results)
        if number >= num_warmup:
            rounds.append(results)
    return rounds


def compare(
    workload: Workload, contestants: Mapping[str, Contestant], num_rounds: int, num_steps: int | None = None
) -> Comparison:
    """Has contestants train a workload, the reference being the first of them.

    Raises:
      AssertionError: one of them has come to another loss than the reference in the same round: it did not do the same.
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
            text = f"{name} does not train {workload.name} as {reference} does: the loss differs"
            np.testing.assert_allclose(workload.final_loss(result.params), expected, rtol=1e-3, err_msg=text)

    # The default argument is what `train` is at this turn of the comprehension.
    calls = {name: lambda train=train: train(num_steps) for name, train in trains.items()}
    rounds = take_turns(calls, num_rounds, check=check)
    seconds = {name: [results[name].secs_per_step for results in rounds] for name in trains}
    cpu_seconds = {name: [results[name].cpu_secs_per_step for results in rounds] for name in trains}
    return Comparison(workload.name, workload.title, reference, seconds, absent, cpu_seconds=cpu_seconds)
