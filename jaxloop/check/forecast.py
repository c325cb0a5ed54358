"""Predicts the plan of a run from its schedules: where loops end, and when actions and evaluations are called.

Times, the lengths of some datasets, and the results of user functions can't be predicted.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, final

from jaxloop.engine.agenda import Item, Rank
from jaxloop.experiment.specs import RunSpec
from jaxloop.schedules import NEVER, Elapsed, Schedule, earliest, every, goal_of, never

# The maximum number of moments to predict if the end of the run is unknown.
_MOST_IF_OPEN = 2_000

At = Literal["begin", "end", "step"]
"""The place of a call: at the beginning of a loop, inside a loop or at its end, or as part of a step."""

Moments = Iterator[tuple[Elapsed, int | None]]
"""Moments of a run, each with the number of the loop that ends there (None inside a loop)."""


@final
@dataclasses.dataclass(frozen=True)
class Calls:
    """The predicted calls of an action or an evaluation.

    >>> at_steps = lambda *steps: [Elapsed(step) for step in steps]
    >>> print(Calls(at_steps(100, 200, 300, 400)))
    4 times, at steps 100, 200, ..., 400
    >>> print(Calls(at_steps(100), is_all=False))
    at step 100 and further steps
    >>> print(Calls())
    never

    Attributes:
      moments: The progress of the run at each call.
      is_all: True if `moments` contains all calls; False if there may be more at later steps.
      at_end: True if there is also a call when the run ends, at an unknown step.
      by_clock: True if a time-based schedule may cause additional calls at other steps.
      at_most: True if a user function may skip some of the calls.
    """

    moments: Sequence[Elapsed] = ()
    is_all: bool = True
    at_end: bool = False
    by_clock: bool = False
    at_most: bool = False

    @property
    def steps(self) -> Sequence[int]:
        """The steps after which the calls happen."""
        return [now.steps for now in self.moments]

    @property
    def number(self) -> int:
        """The number of predicted calls, including the one at an unknown end."""
        return len(self.moments) + self.at_end

    @property
    def is_never(self) -> bool:
        """True if there definitely won't be any calls."""
        return not self.number and self.is_all and not self.by_clock

    def may_coincide(self, other: "Calls") -> bool:
        """Returns True if one of these calls and one of `other` may occur at the same step."""
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
class Begin:
    """The point at which a run begins or resumes.

    Attributes:
      elapsed: The progress of the run.
      passes: The number of completed epochs.
      batches: The number of batches used in the current epoch.
      has_stopped: True if the run was told to stop when it reached this point.
      last_beginning: The progress when the last loop began; None to use `elapsed`.
      evaluations: A dict that maps the name of each evaluation to a pair: how many times it has run, and the progress
        when it last ran.
    """

    elapsed: Elapsed = dataclasses.field(default_factory=Elapsed)
    passes: int = 0
    batches: int = 0
    has_stopped: bool = False
    last_beginning: Elapsed | None = None
    evaluations: Mapping[str, tuple[int, Elapsed]] = dataclasses.field(default_factory=dict)


@final
@dataclasses.dataclass(frozen=True)
class Course:
    """The predicted course of a run: its end, its loops, and its calls.

    >>> from jaxloop.schedules import at, last
    >>> course = Course(RunSpec(total_steps=1000, loop_steps=400))
    >>> print(course.loops)
    3 times, at steps 400, 800, 1,000
    >>> course.batches_of_longest_loop
    400
    >>> print(course.calls(every(300) | last()), course.calls(at(5000)), sep="; ")
    4 times, at steps 300, 600, ..., 1,000; never

    Attributes:
      spec: The arguments of the run, including its length.
      begin: The point at which the run begins.
      batches_in_pass: The number of batches in an epoch; None if it is unknown.
      rows: The number of examples in a batch.
      updates_per_step: The number of optimizer updates per batch, as in `Step.updates_per_step`.
      stopped_at: The step at which the schedule `stop` ends the run; None if it can't be predicted.
      most_moments: The maximum number of moments to predict.
    """

    spec: RunSpec
    begin: Begin = dataclasses.field(default_factory=Begin)
    batches_in_pass: int | None = None
    rows: int = 1
    updates_per_step: int = 1
    stopped_at: int | None = None
    most_moments: int = 20_000

    @property
    def start(self) -> Elapsed:
        """The progress of the run when it begins."""
        return self.begin.elapsed

    def end_of_pass(self, number: int) -> int | None:
        """Returns the step at which the given epoch ends, or None if it is unknown. The current epoch is number 1."""
        if self.batches_in_pass is None:
            return None
        return self.start.steps + (number * self.batches_in_pass - self.begin.batches) * self.updates_per_step

    @functools.cached_property
    def end(self) -> int | None:
        """The step at which the run ends, assuming there is enough data for `total_steps`; None if it is unknown."""
        epochs, total_steps = self.spec.epochs, self.spec.total_steps
        data_end = self.end_of_pass(1 if epochs is None else max(epochs - self.begin.passes, 0))
        ends = [self.stopped_at, total_steps, data_end if epochs is not None or total_steps is None else None]
        return self.start.steps if self.begin.has_stopped else earliest(ends)

    @property
    def is_over(self) -> bool:
        """True if there are no steps left to run."""
        return self.end is not None and self.start.steps >= self.end

    @functools.cached_property
    def loops(self) -> Calls:
        """The predicted ends of the loops."""
        return self.calls(1)

    @property
    def _num_predicted(self) -> int:
        return self.most_moments if self.end is not None else min(self.most_moments, _MOST_IF_OPEN)

    @property
    def is_one_loop(self) -> bool:
        """True if the run is a single loop of several steps."""
        is_new = self.start.steps == 0 and self.batches_of_longest_loop != 1
        return is_new and self.loops.is_all and self.loops.number == 1

    @functools.cached_property
    def batches_of_longest_loop(self) -> int | None:
        """The number of batches in the longest loop; None if it is unknown."""
        ends = [self.start.steps, *self.loops.steps]
        sizes = [(later - earlier) // self.updates_per_step for earlier, later in itertools.pairwise(ends)]
        return max(sizes, default=None)

    def __str__(self) -> str:
        begin = f"from step {self.start.steps:,} " if self.start.steps else ""
        return f"the run goes {begin}to {'the end of its data' if self.end is None else f'step {self.end:,}'}"

    def ended_by(self, stop: Schedule) -> "Course":
        """Returns the course of the run with this schedule as its `stop`, as far as it can be predicted."""
        stop = stop.as_stop()
        moments = itertools.islice(self._moments(stop), self._num_predicted)
        tested = itertools.chain([self.start], (now for now, _ in moments))
        ends = (now.steps for now in tested if stop.stops(now.previous or now, now))
        return dataclasses.replace(self, stopped_at=next(ends, None))

    def calls(self, interval: int | Schedule, at: At = "end") -> Calls:
        """Returns the predicted calls of an action or evaluation with this interval.

        Args:
          interval: The interval, in any form that an action accepts.
          at: "end" for calls inside loops and at their ends; "begin" for calls at the beginning of loops; "step" for
            the actions of a step, which don't know when a loop or the run ends.
        """
        moments = self._moments(interval)
        if at == "begin":
            moments = self._beginnings()
        elif at == "step" and not isinstance(interval, Schedule):  # An int counts the steps of each loop.
            longest = self.batches_of_longest_loop
            return Calls(is_all=longest is not None and longest < interval)
        elif at == "step":
            in_step = lambda now: dataclasses.replace(now, loops=now.previous.loops, is_last=False)
            moments = ((in_step(now), None) for now, _ in moments if now.steps > self.start.steps)
        at_end = at == "end" and self.end is None and _may_fire_at_end(self, interval)
        return self._simulated(interval, moments, Calls(at_end=at_end))

    def calls_in_evaluation(self, interval: int | Schedule, evaluated: Calls, name: str) -> Calls:
        """Returns the predicted calls of an evaluation's action.

        Args:
          interval: The interval of the action. An int counts evaluations.
          evaluated: The predicted calls of the evaluation itself.
          name: The name of the evaluation.
        """
        if isinstance(interval, Schedule) and evaluated.at_end:
            evaluated = dataclasses.replace(evaluated, is_all=False, at_end=_may_fire_at_end(self, interval))
        return self._simulated(interval, _ends_of_evaluation(self, evaluated.moments, name), evaluated)

    def _simulated(self, interval: int | Schedule, moments: Moments, known: Calls) -> Calls:
        """Returns `known`, completed with the moments at which the engine would call an action with this interval."""
        item, called = _Probe(interval), []
        for now, loop in itertools.islice(moments, self._num_predicted):
            if item.is_due(now, loop):
                item.called_at = now.steps
                called.append(now)
        knows_loops = self.spec.epochs in (None, 1) or self.batches_in_pass is not None
        is_all = known.is_all and knows_loops and next(moments, None) is None
        by_clock = known.by_clock or _as_schedule(interval).next_time(self.start) is not None
        return dataclasses.replace(known, moments=called, is_all=is_all, by_clock=by_clock)

    # The moments of the run ------------------------------------------------------------------------------

    def _moments(self, interval: int | Schedule) -> Moments:
        """Yields the moments at which the engine checks an interval, assuming that no time passes."""
        now, updates = dataclasses.replace(self.start, previous=self.start), self.updates_per_step
        if self.is_over:
            return
        if now.steps == 0:
            yield now, None
        while self.end is None or now.steps < self.end:
            loop_end = self._next_loop_end(now.steps)
            step = earliest([loop_end, goal_of([interval], now).step])
            if step == NEVER[0]:
                return
            step = now.steps + math.ceil((step - now.steps) / updates) * updates
            before, ends_loop = self._elapsed_at(step - updates, now.loops), step == loop_end
            now = self._elapsed_at(step, now.loops + ends_loop, before, is_last=step == self.end)
            yield now, now.loops if ends_loop else None

    def _beginnings(self) -> Moments:
        """Yields the moments at which loops begin, with the loop numbers."""
        last = self.begin.last_beginning or self.start
        for now, loop in itertools.chain([(self.start, self.start.loops)], self._moments(never())):
            if loop is not None and not now.is_last and not self.is_over:
                last = dataclasses.replace(now, loops=now.loops + 1, previous=last.without_previous())
                yield last, last.loops

    def _next_loop_end(self, step: int) -> int | None:
        steps_left, ends = self.spec.steps_of_next_loop(step), [self.end]
        if steps_left is not None:
            ends.append(step + steps_left)
        if self.spec.epochs is not None and self.batches_in_pass is not None:
            steps_in_pass = self.batches_in_pass * self.updates_per_step
            ends.append(step + steps_in_pass - (step - (self.end_of_pass(0) or 0)) % steps_in_pass)
        return earliest(ends)

    def _elapsed_at(self, step: int, loops: int, previous: Elapsed | None = None, *, is_last: bool = False) -> Elapsed:
        batches = (step - self.start.steps) // self.updates_per_step
        return Elapsed(step, self.start.samples + batches * self.rows, self.start.time, loops, is_last, previous)


class _Probe(Item):
    """An item that does nothing, for simulating when an interval fires."""

    def __init__(self, interval: int | Schedule):
        super().__init__(Rank.ACTION)
        self._interval = interval

    @property
    def interval(self) -> int | Schedule:
        return self._interval


def _as_schedule(interval: int | Schedule) -> Schedule:
    return interval if isinstance(interval, Schedule) else every(loops=interval)


def _ends_of_evaluation(course: Course, moments: Sequence[Elapsed], name: str) -> Moments:
    """Yields the end and the number of each run of an evaluation, and finally the end of training if it is known."""
    number_before, last = course.begin.evaluations.get(name, (0, course.start))
    for number, now in enumerate(moments, start=number_before + 1):
        last = dataclasses.replace(now, previous=last.without_previous())
        yield last, number
    if moments and course.end is not None:
        yield dataclasses.replace(last, is_last=True), None


def _may_fire_at_end(course: Course, interval: int | Schedule) -> bool:
    """Returns True if an interval may fire at the end of a run whose last step is unknown."""
    schedule, far = _as_schedule(interval), 2**40
    before = Elapsed(far, far, math.inf, far)
    # The number of the loop is known if there is only one.
    is_single = course.spec.loop_steps is None and course.spec.epochs in (None, 1)
    loop = course.start.loops + 1 if is_single else schedule.next_loop(before) or far
    before = dataclasses.replace(before, loops=loop - 1)
    return schedule(Elapsed(far + 1, far, math.inf, loop, is_last=True, previous=before))
