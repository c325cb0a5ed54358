"""What a run spends its time on."""

import contextlib
import dataclasses
import operator
from collections.abc import Callable, Iterator
from typing import final

_NAMES = {
    "data": "waiting for data",
    "device": "waiting for the devices",
    "rest": "starting the steps",
    "actions": "in actions",
    "evals": "in evaluations",
    "checkpoints": "in checkpoints",
}
_NOT_TRAINING = ("evals", "checkpoints")


@final
@dataclasses.dataclass(frozen=True)
class Spent:
    """Seconds by what they were spent on, and what they brought. As a text, one sentence.

    Attributes:
      data: waiting for the next batch.
      device: waiting for values from the devices, because somebody asked for them or the host was far ahead.
      actions: in actions, other than checkpoints.
      evals: in evaluations.
      checkpoints: in saving checkpoints, as far as the loop waits for that.
      rest: all else: the hooks of the step, compiling it and giving it to the devices.
      steps: steps that were run.
      samples: examples in them.

    >>> print(Spent(data=6.3, device=3.0, rest=0.7, steps=500, samples=16_000))
    500 steps in 10.0 s (50.0 a second of training): 63% of the time was spent waiting for data, 30% waiting for the
    devices, 7% starting the steps.
    """

    data: float = 0.0
    device: float = 0.0
    actions: float = 0.0
    evals: float = 0.0
    checkpoints: float = 0.0
    rest: float = 0.0
    steps: int = 0
    samples: int = 0

    @property
    def total(self) -> float:
        """All seconds."""
        return sum(getattr(self, kind) for kind in _NAMES)

    @property
    def training(self) -> float:
        """All seconds but those of evaluations and checkpoints."""
        return self.data + self.device + self.actions + self.rest

    @property
    def steps_per_sec(self) -> float:
        """Steps over the seconds of training."""
        return self.steps / max(self.training, 1e-9)

    def __sub__(self, earlier: "Spent") -> "Spent":
        return Spent(*map(operator.sub, _values_of(self), _values_of(earlier)))

    def __str__(self) -> str:
        total = max(self.total, 1e-9)
        shares = sorted(((getattr(self, kind) / total, name) for kind, name in _NAMES.items()), reverse=True)
        told = [f"{share:.0%} {name}" for share, name in shares if share >= 0.005]
        head = f"{self.steps:,} steps in {_readable(self.total)} ({self.steps_per_sec:,.1f} a second of training)"
        if not told:
            return f"{head}."
        first, *others = told
        share, _, name = first.partition(" ")
        return ", ".join([f"{head}: {share} of the time was spent {name}", *others]) + "."


_values_of = operator.attrgetter(*(field.name for field in dataclasses.fields(Spent)))


def _readable(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"


@final
class Stopwatch:
    """Counts each second for one thing at a time.

    >>> import itertools
    >>> stopwatch = Stopwatch(clock=itertools.count().__next__)
    >>> with stopwatch.counting("rest"):
    ...     with stopwatch.counting("data"):
    ...         pass
    >>> stopwatch.spent().data, stopwatch.spent().rest
    (1.0, 2.0)

    Args:
      clock: tells the time in seconds.
    """

    def __init__(self, clock: Callable[[], float]):
        self.clock = clock
        self._seconds = dict.fromkeys(_NAMES, 0.0)
        self._kind: str | None = None
        self._since = 0.0
        self.steps = 0
        self.samples = 0
        self.training: float = 0.0
        """`spent().training` as of the last switch."""

    def switch(self, kind: str | None) -> str | None:
        """Counts for another thing from now on, for nothing with None; returns for what it counted before."""
        now = self.clock()
        before = self._kind
        if before is not None:
            self._seconds[before] += now - self._since
            if before not in _NOT_TRAINING:
                self.training += now - self._since
        self._kind, self._since = kind, now
        return before

    def move(self, seconds: float, kind: str) -> None:
        """Counts for another thing what goes to the present one: for whoever times a part of it himself, for less."""
        if self._kind is not None:
            self._seconds[self._kind] -= seconds
            self._seconds[kind] += seconds

    def training_at(self, reading: float) -> float:
        """`spent().training` when the clock shows this, as long as what is counted now is training."""
        return self.training + (reading - self._since)

    def reading_at(self, training: float) -> float:
        """What the clock shows when `spent().training` comes to this, as long as what is counted now is training."""
        return self._since + (training - self.training)

    @contextlib.contextmanager
    def counting(self, kind: str) -> Iterator[None]:
        """Counts for a thing while the context is open."""
        before = self.switch(kind)
        try:
            yield
        finally:
            self.switch(before)

    def spent(self) -> Spent:
        """All up to now."""
        self.switch(self._kind)
        return Spent(**self._seconds, steps=self.steps, samples=self.samples)

    def training_secs(self) -> float:
        """`spent().training`, for less."""
        self.switch(self._kind)
        return self.training
