"""The schedules: when each evaluation and each action comes, and which never does."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import final

from jaxloop import checkpoint, metrics
from jaxloop.actions.action import Action
from jaxloop.forecast import Calls, Course
from jaxloop.preflight.course import course_in_words
from jaxloop.preflight.experiment import Begin, Experiment, Part
from jaxloop.preflight.findings import Findings
from jaxloop.schedules import Schedule, is_never
from jaxloop.specs import EvalSpec

# Evaluations and the history ----------------------------------------------------------------------------


def when_evaluated(spec: EvalSpec, experiment: Experiment, course: Course) -> Calls:
    """When an evaluation comes."""
    if experiment.train_loop is None:
        if experiment.checkpoint_spec is None:
            return Calls((course.start.steps,))
        return Calls(tuple(checkpoint.all_steps(experiment.checkpoint_spec.checkpoint_dir)), is_all=False)
    calls = course.loops(spec.eval_loop_interval or 1) if spec.schedule is None else course.calls(spec.schedule)
    return calls if spec.should_eval_fn is None else dataclasses.replace(calls, at_most=True)


def say_if_never_evaluated(where: str, spec: EvalSpec, calls: Calls, course: Course, found: Findings) -> None:
    """Says where an evaluation never comes."""
    if calls.is_never and not course.is_over:
        found.warn(where, f"It would never run: {spec.when}, and {course_in_words(course)}.")


def look_at_log_interval(interval: int | Schedule, course: Course, found: Findings) -> None:
    """Says where no metric of the training comes into the history."""
    calls = course.calls(interval) if isinstance(interval, Schedule) else course.loops(interval)
    if calls.is_never and not course.is_over and not is_never(interval):
        text = f"log_interval={interval!r} never comes, so the history would have no row of the training"
        found.warn("OuterLoop", f"{text}: {course_in_words(course)}.")


# Actions ------------------------------------------------------------------------------------------------


@final
@dataclasses.dataclass(frozen=True)
class CalledAction:
    """An action of a loop, or of its step, and when it comes.

    Attributes:
      action: itself.
      part: the loop.
      at: whether it is called as a loop begins ("begin"), where it ends ("end"), or as part of a step ("step").
      calls: after which steps of the training.
    """

    action: Action
    part: Part
    at: str
    calls: Calls

    @property
    def where(self) -> str:
        """Where a problem of it is."""
        return f"{self.action!r} of {self.part.where}"

    @property
    def outputs(self) -> metrics.LoopOutputs | None:
        """Like those that it is called with; None where nobody knows them, and where there are none."""
        return None if self.at == "begin" else self.part.outputs


def called_actions(parts: Sequence[Part], begin: Begin, course: Course) -> Iterator[CalledAction]:
    """The actions of all loops; those of a step that two loops share, once."""
    told = set()
    for part in parts:
        for each in part.loop.action_lists:
            if id(each) in told:
                continue
            told.add(id(each))
            at = "step" if each.unit != "loops" else "begin" if each is part.loop.action_lists[0] else "end"
            for action in each.actions:
                yield CalledAction(action, part, at, _when_called(action, part, at, begin, course))


def _when_called(action: Action, part: Part, at: str, begin: Begin, course: Course) -> Calls:
    if part.trains:
        return calls_in_training(action, course, at=at)
    interval = action.interval
    if at == "step" or (at == "begin" and isinstance(interval, Schedule)):
        return Calls(is_all=False)  # Nobody counts the steps of an evaluation here.
    if isinstance(interval, Schedule):
        return course.calls_among(part.calls, interval)
    before = begin.evaluations.get(part.name, part.loop.loop_count)
    return dataclasses.replace(part.calls, steps=part.calls.steps[interval - 1 - before % interval :: interval])


def calls_in_training(action: Action, course: Course, *, at: str) -> Calls:
    """When an action of the train loop, or of its step, is called."""
    interval = action.interval
    if at == "begin":
        return course.beginnings(interval)
    if isinstance(interval, Schedule):
        return course.calls(interval, within_step=at == "step")
    if at == "end":
        return course.loops(interval)
    longest = course.steps_of_longest_loop
    return Calls(is_all=longest is not None and longest // course.updates_per_step < interval)


def say_if_never_called(called: CalledAction, course: Course, found: Findings) -> None:
    """Says where an action never comes, though its loop does."""
    interval, part = called.action.interval, called.part
    if part.calls.is_never and not part.trains:
        return
    if called.calls.is_never and not course.is_over and not is_never(interval):
        counts = f"interval={interval!r}"
        if not isinstance(interval, Schedule):
            counts += f" counts {'steps within the loop' if called.at == 'step' else 'loops'}"
        found.warn(called.where, f"It would never be called: {counts}, and {course_in_words(course)}.")
