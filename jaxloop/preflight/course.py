"""The length of the run: how far it goes, what ends it, and where nothing does."""

import inspect
from typing import Any

import numpy as np

from jaxloop import checks
from jaxloop.data import is_endless
from jaxloop.forecast import Course
from jaxloop.preflight.data import TrainData
from jaxloop.preflight.experiment import TRAIN, Begin, Experiment
from jaxloop.preflight.findings import Findings
from jaxloop.schedules import Schedule, earliest


def course_of(experiment: Experiment, begin: Begin, data: TrainData) -> Course:
    """How far the run goes; where its data end before `train_total_steps`, which is said, up to that."""
    start, epochs, updates = begin.elapsed, experiment.epochs, experiment.updates_per_step
    known = data.num_batches and data.num_batches * updates
    pass_begins, end = start.steps - begin.batches * updates, experiment.total_steps
    if known is not None and epochs is not None:
        end = earliest([end, pass_begins + known * max(epochs - begin.passes, 0)])
    elif known is not None and end is None:
        end = pass_begins + known
    course = Course(
        start,
        start.steps if begin.has_stopped else end,
        experiment.loop_steps,
        known if epochs is not None else None,
        pass_begins,
        checks.num_examples(data.batch) or 1,
        updates,
        knows_loops=epochs in (None, 1) or known is not None,
        tells_end=end == experiment.total_steps
        or not experiment.loop_steps
        or bool((end or 0) % experiment.loop_steps),
    )
    return course.ended_by(experiment.stop) if isinstance(experiment.stop, Schedule) else course


def course_in_words(course: Course) -> str:
    """From where to where the run goes."""
    begin = f"from step {course.start.steps:,} " if course.start.steps else ""
    if course.end is None:
        return f"the run goes {begin}to the end of its data"
    return f"the run goes {begin}to step {course.end:,}"


def look_at_length(
    experiment: Experiment, course: Course, begin: Begin, data: TrainData, state: Any, found: Findings
) -> None:
    """Says how far the training goes, and where that is hardly meant."""
    found.plan["train"] = f"{course_in_words(course)}; loops end {course.loops()}"
    _look_for_nothing_left(course, begin, found)
    _look_at_counter(course, state, found)
    if data.has_batch:
        _look_at_end_of_data(experiment, course, begin, data, found)


def _look_for_nothing_left(course: Course, begin: Begin, found: Findings) -> None:
    step = course.start.steps
    if begin.has_stopped:
        text = f"the run of step {step} was asked to stop there, by an evaluation or an action"
        found.warn(TRAIN, f"Nothing is left to train: {text}.")
    elif course.is_over:
        found.warn(TRAIN, f"Nothing is left to train: the run is at step {step}, and ends at step {course.end}.")


def _look_at_counter(course: Course, state: Any, found: Findings) -> None:
    """Says where `state.step` can't count so far."""
    step = getattr(state, "step", None)
    if step is not None and course.end is not None and course.end > np.iinfo(step.dtype).max:
        text = f"state.step, {checks.describe(step)}, counts to {np.iinfo(step.dtype).max}"
        found.add(TRAIN, f"{text}, and the run goes to step {course.end}. Make it an int32.")


def _look_at_end_of_data(
    experiment: Experiment, course: Course, begin: Begin, data: TrainData, found: Findings
) -> None:
    """Says where the data end before the run, or neither of them ends."""
    total_steps, known, updates = experiment.total_steps, data.num_batches, experiment.updates_per_step
    if experiment.epochs is not None:
        return
    data_end = None if known is None else course.start.steps + (known - begin.batches) * updates
    if total_steps is not None and data_end is not None and data_end < (course.end or 0):
        found.add(
            "the train data",
            f"They end at step {data_end}, after {known} batches, and train_total_steps={total_steps}. Repeat the "
            "dataset (train_epochs says how often), or lower train_total_steps.",
            is_error=experiment.on_exhausted == "raise",
        )
    if experiment.stop is not None or course.end is not None:
        return
    is_generator = inspect.isgenerator(experiment.train_dataset)
    if is_endless(data.source) or is_generator:
        ending = "its data have no end" if not is_generator else "a generator does not say whether its data end"
        found.warn(
            TRAIN,
            f"Nothing ends the run: {ending}, and there is neither train_total_steps nor stop. Give one of them, if no "
            "action is to stop it.",
        )
