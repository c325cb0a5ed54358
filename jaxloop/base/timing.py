"""Time reports, which show how a run spent its time."""

import contextlib
import dataclasses
import operator
import time
from collections.abc import Callable, Iterator
from typing import Any, final

import jax

NAMES = {
    "data": "waiting for data",
    "device": "waiting for the devices",
    "compiling": "compiling",
    "dispatch": "dispatching steps",
    "actions": "in actions",
    "evals": "in evaluations",
    "checkpoints": "in checkpoints",
    "restores": "restoring checkpoints",
}
"""The description of each kind of work. The kinds are fields of `Spent`."""

clock: Callable[[], float] = time.perf_counter
"""A function that returns the current time in seconds, for measuring durations."""

_NOT_TRAINING = ("evals", "checkpoints", "restores")


@final
@dataclasses.dataclass(frozen=True)
class Spent:
    """A breakdown of how a run spent its time. `str` formats it as a sentence.

    Attributes:
      data: Seconds spent waiting for the next batch.
      device: Seconds spent waiting for the devices, either because something read a value or because the host was too
        far ahead of the devices.
      compiling: Seconds spent tracing and compiling the train step.
      dispatch: Seconds spent running the step's hooks and dispatching the step to the devices.
      actions: Seconds spent in actions, except for saving checkpoints.
      evals: Seconds spent in evaluations, including the time spent compiling them.
      checkpoints: Seconds for which checkpoint saves blocked the run.
      restores: Seconds spent restoring a checkpoint to resume from.
      steps: The number of steps that ran.
      samples: The number of examples in the batches of these steps.

    >>> print(Spent(data=6.3, device=1.0, compiling=2.0, dispatch=0.7, steps=500, samples=16_000))
    500 steps in 10.0 s (50.0 steps/s in training): 63% waiting for data, 20% compiling, 10% waiting for the devices,
    7% dispatching steps.
    """

    data: float = 0.0
    device: float = 0.0
    compiling: float = 0.0
    dispatch: float = 0.0
    actions: float = 0.0
    evals: float = 0.0
    checkpoints: float = 0.0
    restores: float = 0.0
    steps: int = 0
    samples: int = 0

    @property
    def total(self) -> float:
        """The total time, in seconds."""
        return self.training + self.evals + self.checkpoints + self.restores

    @property
    def training(self) -> float:
        """The training time, in seconds. It excludes evaluations, checkpoints and restores."""
        return self.data + self.device + self.compiling + self.dispatch + self.actions

    @property
    def steps_per_sec(self) -> float:
        """Steps per second of training time."""
        return self.steps / max(self.training, 1e-9)

    def __sub__(self, earlier: "Spent") -> "Spent":
        return Spent(*map(operator.sub, _values_of(self), _values_of(earlier)))

    def __str__(self) -> str:
        total = max(self.total, 1e-9)
        shares = sorted(((getattr(self, kind) / total, name) for kind, name in NAMES.items()), reverse=True)
        listed = ", ".join(f"{share:.0%} {name}" for share, name in shares if share >= 0.005)
        head = f"{self.steps:,} steps in {duration(self.total)} ({self.steps_per_sec:,.1f} steps/s in training)"
        return f"{head}: {listed}." if listed else f"{head}."


_values_of = operator.attrgetter(*(field.name for field in dataclasses.fields(Spent)))


def duration(seconds: float) -> str:
    """Formats a duration given in seconds.

    >>> duration(9.98), duration(61.2), duration(7300)
    ('10.0 s', '1 min 1 s', '2 h 1 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"


@final
class Stopwatch:
    """Measures the time spent on each kind of work. Each kind is named after its field in `Spent`.

    >>> stopwatch = Stopwatch()
    >>> with stopwatch.counting("dispatch"):
    ...     with stopwatch.counting("data"):
    ...         pass
    >>> stopwatch.spent().data > 0 and stopwatch.spent().dispatch > 0
    True
    """

    def __init__(self):
        self.clock = clock
        self._seconds = dict.fromkeys(NAMES, 0.0)
        self.kind: str | None = None
        """The kind of work that is currently being timed, or None."""
        self._since = 0.0
        self.steps = self.samples = 0
        self.training: float = 0.0
        """The value of `spent().training` as of the last call to `switch`."""
        self.first_step: Any = None
        """`state.step` after the first dispatch of the most recently compiled program.

        Once this value has been computed, the program has run.
        """

    def switch(self, kind: str | None) -> str | None:
        """Starts timing a different kind of work, or stops timing if `kind` is None. Returns the previous kind."""
        now = self.clock()
        before = self.kind
        if before is not None:
            self._seconds[before] += now - self._since
            if before not in _NOT_TRAINING:
                self.training += now - self._since
        self.kind, self._since = kind, now
        return before

    def move(self, seconds: float, kind: str) -> None:
        """Moves `seconds` of the recorded time from the current kind of work to `kind`.

        This method is cheaper than `switch` if the caller has already measured the time.
        """
        if self.kind is not None:
            self._seconds[self.kind] -= seconds
            self._seconds[kind] += seconds

    def reading_at(self, training: float) -> float:
        """Returns the clock reading at which `spent().training` will reach `training` seconds.

        This assumes that the current kind of work counts as training time and continues until then.
        """
        return self._since + (training - self.training)

    @contextlib.contextmanager
    def counting(self, kind: str) -> Iterator[None]:
        """Returns a context manager that times the body of a `with` statement as the given kind of work.

        The body is also labeled in profiles.
        """
        before = self.switch(kind)
        try:
            with jax.profiler.TraceAnnotation(f"jaxloop: {NAMES[kind]}"):
                yield
        finally:
            self.switch(before)

    def spent(self) -> Spent:
        """Returns a report on the time spent so far."""
        self.switch(self.kind)
        return Spent(**self._seconds, steps=self.steps, samples=self.samples)

    def training_secs(self) -> float:
        """Returns the current value of `spent().training` without building the report."""
        is_training = self.kind is not None and self.kind not in _NOT_TRAINING
        return self.training + (self.clock() - self._since if is_training else 0.0)
