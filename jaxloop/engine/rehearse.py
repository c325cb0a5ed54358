"""Simulates the progress of a run to predict when its items will be due.

Times, the lengths of some datasets, and the results of user functions can't be predicted.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import final

from jaxloop.engine.agenda import Item, Rank
from jaxloop.engine.run import Plan
from jaxloop.schedules import NEVER, Elapsed, Schedule, goal_of

END = NEVER[0]
"""A placeholder for the last step of a run, used if that step is unknown."""

_OPEN = "at further steps"

Moments = Iterator[tuple[Elapsed, int | None]]
"""An iterator over the moments of a run.

Each moment is a pair of the run's progress and the number of loops that have ended (None inside a loop).
"""


@final
@dataclasses.dataclass(frozen=True)
class Calls:
    """The predicted calls to an action or an evaluation.

    >>> at_steps = lambda *steps: [Elapsed(step) for step in steps]
    >>> print(Calls(at_steps(100, 200, 300, 400)))
    4 times, at steps 100, 200, ..., 400
    >>> print(Calls(at_steps(100), rest="by the clock"))
    at step 100 and by the clock
    >>> print(Calls())
    never

    Attributes:
      moments: The run's progress at each call.
      rest: A phrase that describes further calls whose steps are unknown. Empty if there are none.
    """

    moments: Sequence[Elapsed] = ()
    rest: str = ""

    @property
    def steps(self) -> Sequence[int]:
        """The steps after which the calls happen. Omits a call at the end of the run if the last step is unknown."""
        return [now.steps for now in self.moments if now.steps != END]

    @property
    def is_never(self) -> bool:
        """True if it is certain that there will be no calls."""
        return not self.moments and not self.rest

    def may_coincide(self, other: "Calls") -> bool:
        """Returns True if one of these calls may occur at the same step as a call in `other`."""
        steps, others = ({now.steps for now in calls.moments} for calls in (self, other))
        return bool(self.rest or other.rest) or not steps.isdisjoint(others)

    def __str__(self) -> str:
        number, shown = len(self.moments), [f"{step:,}" for step in self.steps]
        parts = ["at the end"] * (number > len(shown)) + [self.rest] * bool(self.rest)
        if len(shown) > 3:
            shown[2:] = [] if self.rest else ["...", shown[-1]]
        if shown:
            parts.insert(0, f"at step{'s' if len(shown) > 1 else ''} {', '.join(shown)}")
        times = "" if self.rest or not number else "once, " if number == 1 else f"{number:,} times, "
        return times + " and ".join(parts) or "never"


@final
@dataclasses.dataclass(frozen=True)
class Course:
    """The predicted course of a run: its end, its loops, and the calls to its items.

    >>> from jaxloop.schedules import at, every, last
    >>> course = Course(Plan(total=1000, loop_steps=400))
    >>> print(course.loops)
    3 times, at steps 400, 800, 1,000
    >>> course.batches_of_longest_loop
    400
    >>> print(course.calls(every(300) | last()), course.calls(at(5000)), sep="; ")
    4 times, at steps 300, 600, ..., 1,000; never

    Attributes:
      plan: The plan of the run.
      epochs: The number of epochs, or None if the data is read only once.
      batches_in_pass: The number of batches in an epoch, or None if it is unknown.
      rows: The number of examples in a batch.
      updates: The number of optimizer updates per batch.
      start: The run's progress when it begins or resumes.
      passes: The number of epochs completed before `start`.
      batches: The number of batches used before `start` in the epoch that is in progress at `start`.
      has_stopped: True if the run was asked to stop before `start`.
      most_moments: The maximum number of points in the run at which to check whether an item is due.
    """

    plan: Plan = dataclasses.field(default_factory=Plan)
    epochs: int | None = None
    batches_in_pass: int | None = None
    rows: int = 1
    updates: int = 1
    start: Elapsed = dataclasses.field(default_factory=Elapsed)
    passes: int = 0
    batches: int = 0
    has_stopped: bool = False
    most_moments: int = 5_000

    def end_of_pass(self, number: int) -> int:
        """Returns the step at which an epoch ends, or `END` if the length of an epoch is unknown.

        Args:
          number: The number of the epoch: 1 for the epoch that is in progress at `start`.
        """
        if self.batches_in_pass is None:
            return END
        return self.start.steps + (number * self.batches_in_pass - self.batches) * self.updates

    @functools.cached_property
    def end(self) -> int:
        """The step at which the run ends. If `epochs` is None, assumes that there is data for `plan.total` steps."""
        if self.has_stopped:
            return self.start.steps
        total, epochs = self.plan.total, self.epochs
        data_end = self.end_of_pass(1 if epochs is None else max(epochs - self.passes, 0))
        end = data_end if total is None else total if epochs is None else min(data_end, total)
        if self.plan.stop is None:
            return end
        moments = itertools.islice(self._moments(self.plan.stop, end), self.most_moments)
        tested = itertools.chain([self.start], (now for now, _ in moments))
        return next((now.steps for now in tested if self.plan.ends_at(now)), end)

    @property
    def is_over(self) -> bool:
        """True if there are no steps left to run."""
        return self.start.steps >= self.end

    @functools.cached_property
    def loops(self) -> Calls:
        """The points at which loops are predicted to end."""
        return self.calls(1)

    @property
    def is_one_loop(self) -> bool:
        """True if the run starts at step 0 and is a single loop that isn't known to have only one batch."""
        is_new = self.start.steps == 0 and self.batches_of_longest_loop != 1
        return is_new and not self.loops.rest and len(self.loops.moments) == 1

    @property
    def batches_of_longest_loop(self) -> int | None:
        """The number of batches in the longest loop, or None if it is unknown."""
        ends = [self.start.steps, *self.loops.steps]
        return max(((later - earlier) // self.updates for earlier, later in itertools.pairwise(ends)), default=None)

    def __str__(self) -> str:
        begin = f"from step {self.start.steps:,} " if self.start.steps else ""
        return f"the run goes {begin}to {'the end of its data' if self.end == END else f'step {self.end:,}'}"

    def calls(self, interval: int | Schedule, *, in_step: bool = False) -> Calls:
        """Returns the predicted calls to an action or evaluation with the given interval.

        Args:
          interval: The interval, in any form that an action accepts.
          in_step: Whether the action belongs to a step. If so, schedules that depend on the end of a loop or of the run
            never fire.
        """
        if in_step and not isinstance(interval, Schedule):  # An int counts the steps of each loop.
            longest = self.batches_of_longest_loop
            return Calls(rest="" if longest is not None and longest < interval else _OPEN)
        moments = self._moments(interval, self.end)
        if in_step:
            without_ends = lambda now: dataclasses.replace(now, loops=now.previous.loops, is_last=False)
            moments = ((without_ends(now), None) for now, _ in moments if now.steps > self.start.steps)
        is_open = self.epochs not in (None, 1) and self.batches_in_pass is None
        return self._rehearsed(interval, moments, _OPEN if is_open else "")

    def calls_in_evaluation(self, interval: int | Schedule, evaluated: Calls) -> Calls:
        """Returns the predicted calls to an action of an eval loop.

        Args:
          interval: The interval of the action. An int is a number of evaluations.
          evaluated: The predicted calls to the evaluation.
        """
        if self.start.steps:  # Earlier evaluations count, too.
            return Calls(rest=_OPEN)
        moments, last = [], self.start
        for number, now in enumerate(evaluated.moments, start=1):
            last = dataclasses.replace(now, previous=last.without_previous())
            moments.append((last, number))
        if moments and self.plan.at is None:
            moments.append((dataclasses.replace(last, is_last=True), None))  # The end of training.
        return self._rehearsed(interval, iter(moments), evaluated.rest)

    def _rehearsed(self, interval: int | Schedule, moments: Moments, rest: str) -> Calls:
        """Returns the predicted calls to an item with the given interval.

        Args:
          interval: The interval.
          moments: The moments at which the engine checks whether the item is due.
          rest: A phrase that describes the calls after the last of these moments. Empty if there are no such calls.
        """
        item, called = Item(Rank.ACTION), []
        item.interval = interval
        for now, loop in itertools.islice(moments, self.most_moments):
            if item.is_due(now, loop):
                item.called_at = now.steps
                called.append(now)
        rest = rest if next(moments, None) is None else _OPEN
        is_by_clock = goal_of([interval], self.start).time < NEVER[1]
        return Calls(called, rest or ("by the clock" if is_by_clock else ""))

    def _moments(self, interval: int | Schedule, end: int) -> Moments:
        """Yields the moments at which the engine checks whether an item with the given interval is due.

        Assumes that the training time doesn't advance: every moment has the training time of `start`.
        """
        now, updates, rows = dataclasses.replace(self.start, previous=self.start), self.updates, self.rows
        length, origin = self.plan.loop_steps or END, 0
        if self.epochs is not None and self.batches_in_pass is not None:
            length, origin = self.batches_in_pass * updates, self.end_of_pass(0)
        if now.steps == 0 and end > 0:
            yield now, None
        while now.steps < end:
            loop_end = min(end, now.steps + length - (now.steps - origin) % length)
            step = min(loop_end, goal_of([interval], now).step)
            step = min(loop_end, now.steps - (now.steps - step) // updates * updates)
            samples = self.start.samples + (step - self.start.steps) // updates * rows
            before = Elapsed(step - updates, samples - rows, now.time, now.loops)
            loops = now.loops + (step == loop_end)
            now = Elapsed(step, samples, now.time, loops, step == end, before)
            yield now, loops if step == loop_end else None
