"""How a run will go: at which steps its loops end and its schedules fire, told before it begins.

What nobody can know in advance stays open: the time, data without a length, what a user's function will say.
"""

import bisect
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import final

from jaxloop.schedules import NEVER, Elapsed, Schedule, earliest, goal_of

# At so many moments a schedule is asked; a run that has more is foreseen up to there.
_MOST_MOMENTS = 20_000


@final
@dataclasses.dataclass(frozen=True)
class Calls:
    """When something will be called.

    >>> print(Calls((100, 200, 300, 400)))
    4 times, at steps 100, 200, ..., 400
    >>> print(Calls((100,), is_all=False))
    at step 100 and further steps
    >>> print(Calls())
    never

    Attributes:
      steps: after which steps.
      is_all: whether it is called after no others.
      at_end: whether it is called at the end of the run, too, where nobody knows at which step that is.
      by_clock: whether it may be called at other steps, for the time that has passed.
      at_most: whether it may be called after some of the steps only, as a function of the user will say.
    """

    steps: Sequence[int] = ()
    is_all: bool = True
    at_end: bool = False
    by_clock: bool = False
    at_most: bool = False

    @property
    def is_never(self) -> bool:
        """Whether it is certain that it will not be called."""
        return not self.steps and self.is_all and not self.at_end and not self.by_clock

    def may_meet(self, other: "Calls") -> bool:
        """Whether the two may come at the same step."""
        is_open = [calls.by_clock or not calls.is_all for calls in (self, other)]
        return any(is_open) or (self.at_end and other.at_end) or not set(self.steps).isdisjoint(other.steps)

    def __str__(self) -> str:
        steps = self.steps
        shown = ", ".join(f"{step:,}" for step in (steps if len(steps) < 4 else steps[:2]))
        shown += f", ..., {steps[-1]:,}" if len(steps) > 3 and self.is_all else ""
        parts = [f"step{'s' if len(steps) > 1 else ''} {shown}"] if steps else []
        parts += ["further steps"] * (not self.is_all) + ["the end"] * self.at_end
        text = ("at " if parts else "") + " and ".join(parts)
        if self.is_all and steps:
            times = "once" if len(steps) == 1 else f"{len(steps):,} times"
            text = f"{'at most ' if self.at_most else ''}{times}, {text}"
        if self.by_clock:
            text = f"{text}{', and ' if text else ''}by the clock"
        return text or "never"


@final
@dataclasses.dataclass(frozen=True)
class Course:
    """How far a run goes, and where its train loops end.

    >>> course = Course(end=1000, loop_steps=400)
    >>> print(course.loops())
    3 times, at steps 400, 800, 1,000
    >>> course.steps_of_longest_loop
    400
    >>> from jaxloop.schedules import at, every, last
    >>> print(course.calls(every(300) | last()), course.calls(at(5000)), sep="; ")
    4 times, at steps 300, 600, ..., 1,000; never

    Attributes:
      start: how far it is when it begins.
      end: the step at which it ends; None if nobody knows.
      loop_steps: a loop ends at its multiples; None for no such end.
      pass_steps: as many steps in a pass over the data, at the end of which a loop ends; None if nobody knows.
      pass_begins: the step before which the pass under way began.
      rows: examples in a batch.
      updates_per_step: how many steps a batch counts for, see `Step.updates_per_step`.
      knows_loops: whether no loop ends anywhere else.
      tells_end: whether the run knows of its last step when it comes to it; not where the data end with a loop of
        `loop_steps`, which is known only afterwards.
    """

    start: Elapsed = dataclasses.field(default_factory=Elapsed)
    end: int | None = None
    loop_steps: int | None = None
    pass_steps: int | None = None
    pass_begins: int = 0
    rows: int = 1
    updates_per_step: int = 1
    knows_loops: bool = True
    tells_end: bool = True

    def ended_by(self, stop: Schedule) -> "Course":
        """The course of a run that this schedule ends, as the stop of a run."""
        stop = stop.as_stop()
        if stop.stops(self.start, self.start):
            return dataclasses.replace(self, end=self.start.steps, tells_end=True)
        stopped = self._first(self._moments(stop), lambda now: stop.stops(now.previous or now, now), most=1)
        return dataclasses.replace(self, end=stopped.steps[0], tells_end=True) if stopped.steps else self

    def loops(self, interval: int = 1) -> Calls:
        """Where loops end, or every so many of them."""
        found = self._first(self._moments(None), lambda now: now.loops % interval == 0)
        # Of a single loop, to the end of data whose length nobody knows, the number is known.
        is_single = self.loop_steps is None and self.pass_steps is None and self.knows_loops
        at_end = self.end is None and (not is_single or (self.start.loops + 1) % interval == 0)
        return dataclasses.replace(found, at_end=at_end)

    def beginnings(self, schedule_or_interval: Schedule | int) -> Calls:
        """After which steps a loop begins, and this fires, as the interval of an action that is called then."""
        ends = self.loops()
        begins = [self.start.steps, *(step for step in ends.steps if step != self.end)]
        called, last = [], self.start.without_previous()
        for number, step in enumerate(begins, start=self.start.loops + 1):
            asked = Elapsed(step, self._samples_at(step), 0.0, number, previous=last)
            is_due = (
                schedule_or_interval(asked)
                if isinstance(schedule_or_interval, Schedule)
                else number % schedule_or_interval == 0
            )
            called += [step] if is_due else []
            last = asked.without_previous()
        return Calls(tuple(called), ends.is_all)

    def calls(self, schedule: Schedule, *, within_step: bool = False) -> Calls:
        """Where a schedule fires.

        Args:
          schedule: asked at each step, and at the ends of loops.
          within_step: whether it is asked as part of a step, which knows neither of the end of a loop nor of the run.
        """
        fires = lambda now: (
            schedule(now) or (self._ends_untold(now) and schedule(dataclasses.replace(now, is_last=True)))
        )
        found = self._first(self._moments(schedule, within_step=within_step), schedule if within_step else fires)
        return self._with_the_open(schedule, found, knows_last=not within_step)

    def calls_among(self, moments: Calls, schedule: Schedule) -> Calls:
        """Where a schedule fires that is asked at some moments only, each time for all since the last."""
        ends, steps, last = self.loops().steps, [], self.start.without_previous()
        for step in moments.steps:
            loops = self.start.loops + bisect.bisect_right(ends, step)
            now = Elapsed(step, self._samples_at(step), 0.0, loops, step == self.end, last)
            steps += [step] if schedule(now) else []
            last = now.without_previous()
        is_end = Elapsed(self.end or 0, is_last=True)
        if moments.steps and self.end is not None and self.end not in steps and schedule.fires(is_end, is_end):
            steps.append(self.end)  # What waits for the last step is called there, with the newest evaluation.
        found = self._with_the_open(schedule, Calls(tuple(steps), moments.is_all), knows_last=True)
        if moments.at_end:  # With the evaluation at the end, for all since the one before.
            return dataclasses.replace(found, is_all=False, at_most=moments.at_most)
        return dataclasses.replace(found, at_end=found.at_end and moments.at_end, at_most=moments.at_most)

    @property
    def is_over(self) -> bool:
        """Whether there is nothing left to run."""
        return self.end is not None and self.start.steps >= self.end

    @property
    def steps_of_longest_loop(self) -> int | None:
        """How many steps the longest of its loops has; None if nobody knows."""
        ends = [self.start.steps, *self.loops().steps]
        return max((later - earlier for earlier, later in itertools.pairwise(ends)), default=None)

    def _ends_untold(self, now: Elapsed) -> bool:
        return now.steps == self.end and not self.tells_end

    def _with_the_open(self, schedule: Schedule, found: Calls, *, knows_last: bool) -> Calls:
        """With what nobody can know in advance."""
        far = Elapsed(2**40, 2**40, math.inf, 2**40)
        last = dataclasses.replace(far, steps=2**40 + 1, is_last=True, previous=far)
        at_end = self.end is None and knows_last and schedule(last)
        return dataclasses.replace(found, at_end=at_end, by_clock=schedule.next_time(self.start) is not None)

    def _moments(self, schedule: Schedule | None, *, within_step: bool = False) -> Iterator[Elapsed]:
        """The steps at which a schedule may fire, and the ends of loops; of None these alone."""
        now = self.start
        if schedule is not None and not within_step and now.steps == 0:
            yield now
        while self.end is None or now.steps < self.end:
            loop_end = self._next_loop_end(now.steps)
            step = earliest([loop_end, goal_of([] if schedule is None else [schedule], now).step])
            if step == NEVER[0]:
                return
            updates = self.updates_per_step
            step = now.steps + -(-(step - now.steps) // updates) * updates
            earlier, is_last = step - updates, step == self.end
            before = Elapsed(earlier, self._samples_at(earlier), 0.0, now.loops)
            is_last &= self.tells_end
            now = Elapsed(step, self._samples_at(step), 0.0, now.loops + (step == loop_end), is_last, before)
            yield dataclasses.replace(now, loops=before.loops, is_last=False) if within_step else now

    def _samples_at(self, step: int) -> int:
        return self.start.samples + (step - self.start.steps) // self.updates_per_step * self.rows

    def _next_loop_end(self, step: int) -> int | None:
        ends = [self.end]
        for size, begin in ((self.loop_steps, 0), (self.pass_steps, self.pass_begins)):
            if size is not None:
                ends.append(begin + ((step - begin) // size + 1) * size)
        return earliest(ends)

    def _first(self, moments: Iterator[Elapsed], is_one: Callable[[Elapsed], bool], most: int | None = None) -> Calls:
        """Those moments at which something is, as far as they are foreseen."""
        foreseen = _MOST_MOMENTS if self.end is not None else _MOST_MOMENTS // 10
        steps: list[int] = []
        for now in itertools.islice(moments, foreseen):
            if is_one(now):
                steps.append(now.steps)
                if len(steps) == most:
                    break
        return Calls(tuple(steps), is_all=self.knows_loops and next(moments, None) is None)
