"""Checks of the datasets and the length of the run."""

import dataclasses
import inspect
import time
from collections.abc import Iterator, Sequence
from typing import Any, final

import numpy as np

from jaxloop import types
from jaxloop.base import checks
from jaxloop.check.experiment import Experiment, Part
from jaxloop.check.forecast import Begin, Course
from jaxloop.check.report import Findings
from jaxloop.data import is_endless, is_one_pass, num_batches
from jaxloop.data.position import PositionedIterator
from jaxloop.data.sources import NO_DATA, fork_warning, indexed
from jaxloop.engine.feed import as_iterator
from jaxloop.experiment.specs import EvalSpec

# The limits for reading an eval dataset of unknown length to its end.
_LOOK_SECS, _LOOK_BATCHES = 0.5, 10_000

# Training data ----------------------------------------------------------------------------------------------


@final
@dataclasses.dataclass(frozen=True)
class TrainData:
    """The opened training dataset.

    Attributes:
      source: The iterator over the dataset; None if it can't be opened, or if the run doesn't train.
      first: A list with the first batch; empty if there is none. In a run without data, the batch is None.
      num_batches: The number of batches in an epoch or, for an iterator, the number of remaining batches. None if
        unknown.
    """

    source: PositionedIterator | None = None
    first: Sequence[types.Batch] = ()
    num_batches: int | None = None

    @property
    def to_compile(self) -> Sequence[types.Batch]:
        """The batches to compile the step for: the first one, or the first of each size that the dataset declares."""
        declared = indexed(self.source)
        if declared is None or not declared.firsts or not self.first:
            return self.first
        return declared.first_of_each_size()


def open_train_data(experiment: Experiment, found: Findings) -> TrainData:
    """Opens the training dataset, and peeks at its first batch."""
    dataset, opened = experiment.spec.data, TrainData()
    if experiment.train_loop is None:
        return opened
    with found.at("the train data"):
        source = experiment.source_of(dataset)
        if experiment.spec.epochs is not None:
            source.begin_pass(0)
        opened = TrainData(source)
        if warning := fork_warning(source):
            found.at("the train data").warn(warning)
        try:
            batch = source.peek()
        except StopIteration:
            raise checks.empty_dataset(dataset) from None
        known = num_batches(source)
        count = f"{known:,} batches" if known is not None else "endless batches" if is_endless(source) else "batches"
        shown = f"{count} of {checks.batch_in_words(batch)}"
        found.plan["train data"] = "none: run gets None as its batch" if dataset is NO_DATA else shown
        return TrainData(source, [batch], known)
    return opened


def course_of(
    experiment: Experiment, begin: Begin, data: TrainData, *, rows: int | None = None, most_moments: int = 20_000
) -> Course:
    """Predicts the course of the run from the point where it begins.

    `rows` is the number of examples per batch if no batch was read; see `Course.most_moments`.
    """
    spec, train_loop = experiment.spec, experiment.train_loop
    size = checks.num_examples(data.first[0]) if data.first else rows
    updates = 1 if train_loop is None else train_loop.step.updates_per_step
    course = Course(spec, begin, data.num_batches, size or 1, updates, most_moments=most_moments)
    return course if spec.stop is None else course.ended_by(spec.stop)


def check_length(here: Findings, experiment: Experiment, course: Course, data: TrainData, state: Any) -> None:
    """Checks the length of the training, and warns about lengths that are probably unintended."""
    spec, start, end = experiment.spec, course.start.steps, course.end
    here.plan["train"] = f"{course}; loops end {course.loops}"
    if course.is_over:
        text = f"the run is at step {start}, and ends at step {end}"
        if course.begin.has_stopped:
            text = f"an evaluation or an action stopped the run at step {start}, unless its patience is longer now"
        here.warn(f"Nothing is left to train: {text}.")
    counter: Any = getattr(state, "step", None)
    if hasattr(counter, "dtype") and end is not None and end > np.iinfo(counter.dtype).max:
        text = f"state.step, {checks.describe(counter)}, counts to {np.iinfo(counter.dtype).max}"
        here.error(f"{text}, and the run goes to step {end}. Make it an int32.")
    data_end = course.end_of_pass(1)
    if spec.epochs is None and data_end is not None and end is not None and data_end < end:
        here.at("the train data").warn(
            f"They end at step {data_end}, after {data.num_batches} batches, and train_total_steps={spec.total_steps}. "
            "Repeat the dataset (train_epochs says how often), or lower train_total_steps."
        )
    is_generator = inspect.isgenerator(spec.train_dataset) and not experiment.is_starting  # It may end.
    if spec.epochs is None and spec.stop is None and end is None and (is_generator or is_endless(spec.data)):
        ending = "its data have no end" if not is_generator else "a generator does not say whether its data end"
        here.warn(
            f"Nothing ends the run: {ending}, and there is neither train_total_steps nor stop. Give one of them, if no "
            "action is to stop it."
        )


# Evaluation data --------------------------------------------------------------------------------------------


def first_eval_batch(part: Part, spec: EvalSpec, experiment: Experiment) -> tuple[Sequence[types.Batch], str]:
    """Returns a list with the first batch of an evaluation, and a phrase that describes the number of batches.

    The list is empty if the batch can't be read without consuming it.
    """
    if spec.dataset_iterator is not None:
        source = experiment.source_of(spec.dataset_iterator)
        left = num_batches(source)
        _check_iterator(part, spec, left + source.num_read if left is not None and experiment.is_starting else left)
        try:
            return [] if experiment.is_starting else [source.peek()], f"{spec.num_steps} batches each time"
        except StopIteration:
            raise spec.empty() from None
    if is_one_pass(spec.dataset):
        _check_iterator(part, spec, num_batches(spec.dataset))
        return (), "batches of an iterator"
    if experiment.is_starting:
        return (), _check_number(part.here, spec)
    batches: Any = as_iterator(spec.data)
    try:
        first = next(batches, None)
        if first is None:
            raise spec.empty()
        return [first], _check_number(part.here, spec, batches)
    finally:
        if hasattr(batches, "close"):
            batches.close()


def _check_iterator(part: Part, spec: EvalSpec, there: int | None) -> None:
    """Checks that an iterator has enough batches for the evaluations that read from it."""
    calls, number = part.calls, len(part.calls.steps)
    if there is not None and there < (spec.num_steps or 0) * number and not calls.at_most:
        part.here.error(
            f"Its {number} evaluations read num_steps={spec.num_steps} batches each, but its iterator has only "
            f"{there}. Give an iterator that has enough batches, or a dataset that can be read again each time."
        )
    if spec.num_steps is None and (number > 1 or not calls.is_all) and not calls.at_most:
        part.here.error(
            f"It will run more than once, and its dataset is {checks.describe(spec.dataset)}, an iterator, which "
            "yields its batches only once. Give an iterable that can be read again (a list, a tf.data.Dataset), or use "
            "EvalSpec(None, dataset_iterator=..., num_steps=...) to continue where the last evaluation stopped."
        )


def _check_number(here: Findings, spec: EvalSpec, batches: Iterator[Any] | None = None) -> str:
    """Checks and describes the number of batches that an evaluation reads.

    If the number is unknown, it counts `batches`, from which the first one has already been read.
    """
    known = num_batches(spec.data)
    if spec.num_steps is not None:
        if known is not None and known < spec.num_steps and batches is not None:  # Otherwise, the run warns.
            text = f"num_steps={spec.num_steps}, but its dataset has only {known} batches, so it will read no more."
            here.warn(f"{text} Lower num_steps, or leave it out.")
        return f"{spec.num_steps} batches"
    if is_endless(spec.data):
        text = "Its dataset has no end, so the evaluation would never end."
        here.error(f"{text} Set num_steps in its EvalSpec, or give a finite dataset.")
        return "endless batches"
    if known is None:
        if batches is None:
            return "batches"
        known, has_ended = _count(batches)
        if not has_ended:
            if known == _LOOK_BATCHES:
                text = f"Its dataset has not ended after {known:,} batches. If it repeats without end, set num_steps"
                here.warn(f"{text} in its EvalSpec, or give a finite dataset.")
            return f"at least {known:,} batches"
    return f"{known} batch{'es' if known > 1 else ''}"


def _count(batches: Iterator[Any]) -> tuple[int, bool]:
    """Reads further batches for a short time. Returns the total number read, and whether the data ended."""
    count, began = 1, time.perf_counter()
    while time.perf_counter() - began < _LOOK_SECS and count < _LOOK_BATCHES:
        if next(batches, None) is None:
            return count, True
        count += 1
    return count, False
