"""Schedules, which decide when something happens, and `Elapsed`, which describes a run's progress.

A schedule is immutable and stateless: whether it fires at a step depends only on the run's progress.

>>> schedule = every(100) | at(250)
>>> [step for step in range(1, 401) if schedule(Elapsed(step))]
[100, 200, 250, 300, 400]
"""

import abc
import dataclasses
import math
import numbers
import sys
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Literal, NamedTuple, final

import jax
import numpy as np

from jaxloop.base.text import suggests

Unit = Literal["steps", "samples", "time", "loops"]
_MOST_IN_32_BITS = 2**31 - 1
NEVER = (sys.maxsize, math.inf)  # A step and a time that no run reaches.


@final
@dataclasses.dataclass(frozen=True, init=False)
class Elapsed:
    """The progress of a run. An `Elapsed` is a pytree whose leaves are its attributes, so jitted functions accept it.

    Attributes:
      steps: The number of completed updates. Callbacks that run after the first update receive 1.
      samples: The number of examples in all batches so far.
      time: The training time in seconds, excluding evaluations and checkpoints. In a resumed run, it includes the
        training time before the run was interrupted.
      loops: The number of completed train loops.
      is_last: True if the current step is known to be the last one of the run.
      previous: The progress one batch earlier, or None if it wasn't kept.

    >>> elapsed = Elapsed(steps=10_000, samples=320_000, time=12.5)
    >>> elapsed
    Elapsed(steps=10000, samples=320000, time=12.5, loops=0)
    """

    steps: int = 0
    samples: int = 0
    time: float = 0.0
    loops: int = 0
    is_last: bool = dataclasses.field(default=False, repr=False, compare=False)
    previous: "Elapsed | None" = dataclasses.field(default=None, repr=False, compare=False)

    def __init__(
        self,
        steps: int = 0,
        samples: int = 0,
        time: float = 0.0,
        loops: int = 0,
        is_last: bool = False,
        previous: "Elapsed | None" = None,
    ):
        own = vars(self)  # More than twice as fast as a frozen dataclass; there may be one object per step.
        own["steps"], own["samples"], own["time"], own["loops"] = steps, samples, time, loops
        own["is_last"], own["previous"] = is_last, previous

    def advance(self, *, samples: int, time: float, steps: int = 1) -> "Elapsed":
        """Returns the run's progress after one more batch.

        Args:
          samples: The number of examples in that batch.
          time: The run's training time at the end of that batch, in seconds.
          steps: The number of updates that were made with that batch; see `Step.updates_per_step`.
        """
        return Elapsed(self.steps + steps, self.samples + samples, time, self.loops, previous=self.without_previous())

    def without_previous(self) -> "Elapsed":
        """Returns a copy without `previous`, so that the copy doesn't keep earlier `Elapsed` objects alive."""
        if self.previous is None:
            return self
        known = self.__dict__.get("_without_previous")  # This method is called several times per step.
        if known is None:
            known = Elapsed(self.steps, self.samples, self.time, self.loops, self.is_last)
            self.__dict__["_without_previous"] = known
        return known

    def to_dict(self) -> dict[str, Any]:
        """Returns the counts and the time as a dict of plain numbers, which can be written to a file.

        `Elapsed(**elapsed.to_dict())` recreates the object, except for `is_last` and `previous`.
        """
        return {"steps": self.steps, "samples": self.samples, "time": self.time, "loops": self.loops}

    def _leaves(self) -> list[Any]:
        counts = [_as_leaf(self.steps), _as_leaf(self.samples), self.time, _as_leaf(self.loops)]
        return [*counts, self.is_last, self.previous]


def _as_leaf(count: Any) -> Any:
    """Converts a count to a type that JAX accepts. Counts that are too large for int32 become float64 scalars."""
    return np.float64(count) if type(count) is int and count > _MOST_IN_32_BITS else count


def _from_leaves(_: None, leaves: Iterable[Any]) -> Elapsed:
    fields: list[Any] = [int(leaf) if type(leaf) is np.float64 else leaf for leaf in leaves]
    return Elapsed(*fields)


_LEAVES = [jax.tree_util.GetAttrKey(field.name) for field in dataclasses.fields(Elapsed)]
jax.tree_util.register_pytree_with_keys(
    Elapsed,
    lambda elapsed: (list(zip(_LEAVES, elapsed._leaves(), strict=True)), None),
    _from_leaves,
    lambda elapsed: (elapsed._leaves(), None),
)


@final
class Goal(NamedTuple):
    """The next points in a run at which something may be due. `Goal()` means that nothing is ever due.

    Attributes:
      step: The next step after which something may be due, even in the middle of a loop.
      time: The next training time, in seconds, at which something may be due. From then on, something may be due at
        any step.
      loop: The next loop after which something may be due, for example because an interval counts loops.
    """

    step: int = NEVER[0]
    time: float = NEVER[1]
    loop: int = NEVER[0]


class Schedule(abc.ABC):
    """A rule that decides when something happens.

    Create schedules with `every`, `at`, `after` and similar functions, and combine them with `|`, `&` and `~`.

    Schedules are hashed by identity, so two schedules with the same arguments are different dictionary keys.

    Hooks:
      fires: Called after each step at which the schedule may fire; see `Schedule.fires`. Must be pure.
      as_stop: Called at the start of a run whose `stop` is this schedule. Returns the schedule that stops the run.
      stops: Called at the start of a run whose `stop` is this schedule, and then after each step at which the schedule
        may fire.

    >>> every(steps=100) | last()
    every(steps=100) | last()
    >>> (every(100) & ~at(200)).fires(Elapsed(199), Elapsed(200))
    False
    """

    @abc.abstractmethod
    def fires(self, before: Elapsed, now: Elapsed) -> bool:
        """Returns True if the schedule fires between `before` (exclusive) and `now` (inclusive).

        A loop calls this method after each step, with the progress after the previous step as `before`. There are two
        exceptions. First, the loop skips the call after steps at which a built-in schedule can't fire. If a custom
        schedule is combined with a built-in one by `&`, the custom schedule isn't called after these steps either.
        Second, if a run begins at step 0, the method is also called before the first update, with both arguments equal
        to `Elapsed()`.

        If `before` is several steps before `now`, `a & b` fires if `a` and `b` have both fired in this interval, even
        at different steps. Similarly, `~a` fires if `a` hasn't fired in this interval.
        """

    def _goal(self, now: Elapsed) -> Goal:
        """Returns the next points at which the schedule can fire.

        The default implementation returns the next step and the next loop. For `last()`, the result is `Goal()`
        (never), because all schedules are checked at the end of a run anyway.
        """
        return Goal(step=now.steps + 1, loop=now.loops + 1)

    def stops(self, before: Elapsed, now: Elapsed) -> bool:
        """Returns True if a run whose `stop` is this schedule ends at `now`. For `before`, see `fires`."""
        return self.fires(before, now)

    def as_stop(self) -> "Schedule":
        """Returns the schedule that determines when a run stops if `self` is passed to the run as `stop`.

        By default, returns `self`. For `at(...)`, returns `after(...)` with the same argument, so that a run that is
        already past the given point also stops.
        """
        return self

    def __call__(self, elapsed: Elapsed) -> bool:
        """Returns True if the schedule fires at the current step. For hand-written loops: `if schedule(elapsed)`."""
        before = elapsed.previous or dataclasses.replace(elapsed, steps=max(elapsed.steps - 1, 0))
        return self.fires(before, elapsed)

    def __bool__(self) -> bool:
        raise TypeError(
            f"{self!r} is neither true nor false. Join schedules with |, & and ~ instead of or, and, not: "
            "every(100) | last(). In a hand-written loop, call it: if schedule(elapsed)."
        )

    def __or__(self, other: "Schedule") -> "Schedule":
        return _Or(self, _checked(other, "|"))

    def __and__(self, other: "Schedule") -> "Schedule":
        return _And(self, _checked(other, "&"))

    def __invert__(self) -> "Schedule":
        return _Not(self)


def _checked(other: Any, operator: str) -> Schedule:
    if not isinstance(other, Schedule):
        raise TypeError(
            f"A schedule can be joined by {operator} only with another schedule, such as every(steps=100) or last(), "
            f"got {other!r}."
        )
    return other


_suggests_loops = suggests(
    epochs="loops (with train_epochs, each epoch is one loop)", seconds="time", secs="time", examples="samples"
)


@_suggests_loops
def every(
    steps: int | None = None,
    *,
    samples: int | None = None,
    time: float | None = None,
    loops: int | None = None,
) -> Schedule:
    """Returns a schedule that fires whenever a count or the training time reaches or passes a multiple of an interval.

    Takes exactly one argument.

    >>> every(100), every(time=600)
    (every(steps=100), every(time=600.0))
    >>> every(samples=100).fires(Elapsed(steps=3, samples=96), Elapsed(steps=4, samples=128))
    True

    Args:
      steps: The interval in completed updates.
      samples: The interval in examples. The schedule fires at each step at which the number of examples reaches or
        passes a multiple.
      time: The interval in seconds of training time. The schedule fires at the first step after each multiple.
      loops: The interval in train loops.
    """
    return _Every(*_only_one("every", steps, samples, time, loops, least=1))


@_suggests_loops
def at(
    steps: int | None = None,
    *,
    samples: int | None = None,
    time: float | None = None,
    loops: int | None = None,
) -> "Schedule":
    """Returns a schedule that fires once, at the step that reaches a given point.

    If the schedule is passed as `stop`, the run ends at that point. `at(0)` fires before the first update of a run that
    begins at step 0, but not after a resume.

    Takes exactly one argument, like `every`.

    >>> [step for step in range(1, 1000) if at(250)(Elapsed(step))]
    [250]
    """
    return _At(*_only_one("at", steps, samples, time, loops, least=0))


@_suggests_loops
def after(
    steps: int | None = None,
    *,
    samples: int | None = None,
    time: float | None = None,
    loops: int | None = None,
) -> Schedule:
    """Returns a schedule that fires at every step from a given point onward. Takes exactly one argument, like `every`.

    >>> [step for step in range(1, 6) if after(3)(Elapsed(step))]
    [3, 4, 5]
    """
    return _After(*_only_one("after", steps, samples, time, loops, least=0))


def first() -> Schedule:
    """Returns `at(1)`, a schedule that fires at the first step of a run, but not at the first step after a resume."""
    return at(1)


def last() -> Schedule:
    """Returns a schedule that fires after the last step of a run.

    It also fires if the run ends because its dataset is exhausted or because an action stops it. `last()` doesn't fire
    after Ctrl-C or an exception, because such a run can resume. If both parts of `every(1000) | last()` are due at the
    same step, the combined schedule fires only once.

    >>> last().fires(Elapsed(599), Elapsed(600, is_last=True))
    True
    """
    return _Last()


def always() -> Schedule:
    """Returns `every(1)`, a schedule that fires at every step."""
    return every(1)


def never() -> Schedule:
    """Returns a schedule that never fires."""
    return _Never()


def is_always(schedule: Schedule) -> bool:
    """Returns True if a schedule is `always()`, which is the same as `every(1)`."""
    return isinstance(schedule, _Every) and (schedule.unit, schedule.value) == ("steps", 1)


def is_never(schedule: Any) -> bool:
    """Returns True if a value is `never()`."""
    return isinstance(schedule, _Never)


def goal_of(intervals: Iterable["int | Schedule"], now: Elapsed) -> Goal:
    """Returns the next step, time and loop at which anything with one of the given intervals may be due.

    The run doesn't need to check the intervals before it reaches the first of these points.

    Args:
      intervals: The intervals, as schedules or as ints that count loops.
      now: The current progress of the run.

    >>> goal_of([every(30), every(100), 4], Elapsed(steps=70, loops=2))
    Goal(step=90, time=inf, loop=4)
    """
    goals = [
        each._goal(now) if isinstance(each, Schedule) else Goal(loop=(now.loops // each + 1) * each)
        for each in intervals
    ]
    return _first_of(goals)


def _first_of(goals: Iterable[Goal]) -> Goal:
    steps, times, loops = zip(Goal(), *goals, strict=True)
    return Goal(min(steps), min(times), min(loops))


def earliest(found: Iterable[Any]) -> Any:
    """Returns the earliest of several steps or times, where None means never. Returns None if all of them are None."""
    return min((each for each in found if each is not None), default=None)


def planned_steps(stop: Any, start: Elapsed) -> int | None:
    """Returns the step at which `stop` ends a run that begins at `start`, or None if `stop` doesn't determine the step.

    >>> planned_steps(at(steps=50), Elapsed()), planned_steps(at(time=60), Elapsed())
    (50, None)
    """
    step = stop._goal(start).step if getattr(stop, "unit", None) == "steps" else NEVER[0]
    return None if step == NEVER[0] else step


def _only_one(name: str, steps: Any, samples: Any, time: Any, loops: Any, *, least: int) -> tuple[Unit, float]:
    """Returns the unit and the value of the only argument that was given.

    Raises an error unless exactly one argument was given and its value is valid. Zero is valid only if `least` is 0.
    """
    options = {"steps": steps, "samples": samples, "time": time, "loops": loops}
    given: dict[Any, Any] = {unit: value for unit, value in options.items() if value is not None}
    if len(given) != 1:
        got = ", ".join(f"{unit}={value!r}" for unit, value in given.items()) or "none of them"
        raise ValueError(
            f"{name}(...) takes one of steps, samples, time and loops, got {got}. Join two schedules with |, as in "
            "every(steps=100) | every(time=60)."
        )
    ((unit, value),) = given.items()
    allowed, kind = ("seconds", numbers.Real) if unit == "time" else (f"a number of {unit}", numbers.Integral)
    if isinstance(value, bool) or not isinstance(value, kind):
        raise TypeError(f"{name}({unit}=...) takes {allowed}, got {value!r}.")
    value = float(value) if unit == "time" else int(value)  # pyright: ignore[reportArgumentType]
    if not value > 0 and not value == least:
        raise ValueError(
            f"{name}({unit}=...) takes {allowed}, {'positive' if least else 'not negative'}, got {value!r}."
        )
    return unit, value


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class _Counted(Schedule):
    """A schedule that is defined by a unit, such as steps, and a number of units."""

    unit: Unit
    value: float

    def __repr__(self) -> str:
        return f"{type(self).__name__.lstrip('_').lower()}({self.unit}={self.value})"

    @abc.abstractmethod
    def _next(self, now: Elapsed) -> Any:
        """Returns the next count or time at which the schedule can fire, or None if it can't fire again."""

    def _goal(self, now: Elapsed) -> Goal:
        following = self._next(now)
        if following is None:
            return Goal()
        match self.unit:
            case "steps":
                return Goal(step=following)
            case "samples":  # Any step may reach this number of examples.
                return Goal(step=now.steps + 1)
            case "time":
                return Goal(time=following)
            case "loops":
                return Goal(loop=following)


class _Every(_Counted):
    def fires(self, before: Elapsed, now: Elapsed) -> bool:
        return getattr(now, self.unit) // self.value > getattr(before, self.unit) // self.value

    def _next(self, now: Elapsed) -> Any:
        return (getattr(now, self.unit) // self.value + 1) * self.value


class _Point(_Counted):
    """The base class of `at` and `after` schedules, which are defined by a single point in the run."""

    def _reached(self, now: Elapsed) -> bool:
        return getattr(now, self.unit) >= self.value

    def _next(self, now: Elapsed) -> Any:
        return None if self._reached(now) else self.value

    def stops(self, before: Elapsed, now: Elapsed) -> bool:
        return self._reached(now)


class _At(_Point):
    def fires(self, before: Elapsed, now: Elapsed) -> bool:
        return self._reached(now) and (
            not self._reached(before) or getattr(now, self.unit) == 0 or now.steps == now.samples == 0
        )

    def as_stop(self) -> Schedule:
        return _After(self.unit, self.value)


class _After(_Point):
    def fires(self, before: Elapsed, now: Elapsed) -> bool:
        return self._reached(now) and now.steps > before.steps

    def _goal(self, now: Elapsed) -> Goal:
        return Goal(step=now.steps + 1) if self._reached(now) else super()._goal(now)


class _Last(Schedule):
    def __repr__(self) -> str:
        return f"{type(self).__name__.lstrip('_').lower()}()"

    def fires(self, before: Elapsed, now: Elapsed) -> bool:
        return now.is_last

    def _goal(self, now: Elapsed) -> Goal:
        return Goal()


class _Never(_Last):
    def fires(self, before: Elapsed, now: Elapsed) -> bool:
        return False


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class _Pair(Schedule):
    """The base class of the schedules that `|` and `&` create from two other schedules."""

    one: Schedule
    other: Schedule

    _join: ClassVar[Callable[[Iterable[bool]], bool]]

    def fires(self, before: Elapsed, now: Elapsed) -> bool:
        return self._join(each.fires(before, now) for each in (self.one, self.other))

    def stops(self, before: Elapsed, now: Elapsed) -> bool:
        return self._join(each.stops(before, now) for each in (self.one, self.other))

    def as_stop(self) -> Schedule:
        return type(self)(self.one.as_stop(), self.other.as_stop())

    def _goal(self, now: Elapsed) -> Goal:
        return _first_of([self.one._goal(now), self.other._goal(now)])


class _Or(_Pair):
    _join = staticmethod(any)

    def __repr__(self) -> str:
        return f"{self.one!r} | {self.other!r}"


class _And(_Pair):
    _join = staticmethod(all)

    def __repr__(self) -> str:
        return " & ".join(f"({each!r})" if isinstance(each, _Or) else repr(each) for each in (self.one, self.other))

    def _goal(self, now: Elapsed) -> Goal:
        one, other = self.one._goal(now), self.other._goal(now)
        steps = [max(one.step, other.step)]
        # One schedule may fire because of its step while the other fires because of its time.
        if other.time != NEVER[1]:
            steps.append(one.step)
        if one.time != NEVER[1]:
            steps.append(other.step)
        # The earlier time, although the pair may fire later: from then on, the progress one step before is known.
        return _first_of([one, other])._replace(step=min(steps))


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class _Not(Schedule):
    schedule: Schedule

    def __repr__(self) -> str:
        return f"~({self.schedule!r})" if isinstance(self.schedule, _Or | _And) else f"~{self.schedule!r}"

    def fires(self, before: Elapsed, now: Elapsed) -> bool:
        return now.steps > before.steps and not self.schedule.fires(before, now)
