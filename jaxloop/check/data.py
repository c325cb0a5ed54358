"""Checks of a run's datasets and length."""

import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple, final

import numpy as np

from jaxloop import types
from jaxloop.base import checks
from jaxloop.check.experiment import Checked, Part
from jaxloop.check.report import Findings
from jaxloop.data import is_endless, is_one_pass, num_batches
from jaxloop.data.position import PositionedIterator
from jaxloop.data.sources import NO_DATA
from jaxloop.engine.feed import as_iterator
from jaxloop.engine.rehearse import END, Course
from jaxloop.engine.run import Plan
from jaxloop.outer_loop.specs import EvalSpec
from jaxloop.schedules import Elapsed

# Training data ----------------------------------------------------------------------------------------------


@final
class TrainData(NamedTuple):
    """The opened training dataset.

    Attributes:
      source: The iterator over the dataset, or None if the dataset can't be opened or the run doesn't train.
      first: A list with the first batch, or an empty list if no batch was read. In a run without data, the list is
        `[None]`.
      num_batches: The number of batches in an epoch or, for an iterator, the number of remaining batches. None if this
        number is unknown.
    """

    source: PositionedIterator | None = None
    first: Sequence[types.Batch] = ()
    num_batches: int | None = None


def open_train_data(checked: Checked, found: Findings) -> TrainData:
    """Opens the training dataset and peeks at its first batch."""
    experiment = checked.experiment
    dataset, opened = experiment.spec.data, TrainData()
    if experiment.train_loop is None:
        return opened
    with found.at("the train data"):
        source = checked.sources.open(dataset)
        if experiment.spec.epochs is not None and not experiment.spec.has_iterator:
            source.begin_pass(0)
        opened = TrainData(source)
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


def course_of(checked: Checked, data: TrainData) -> Course:
    """Returns the predicted course of a run that starts at step 0."""
    experiment = checked.experiment
    spec, train_loop = experiment.spec, experiment.train_loop
    stop = None if spec.stop is None else spec.stop.as_stop()
    updates, at = (1, Elapsed()) if train_loop is None else (train_loop.step.updates_per_step, None)
    plan = Plan(total=spec.total_steps, loop_steps=spec.loop_steps, stop=stop, at=at)
    rows, most = checks.num_examples(data.first[0]) or 1 if data.first else 1, 5_000
    if checked.is_starting:  # The batch size is unknown, so assume that any number of examples is reached at once.
        plan, rows, most = dataclasses.replace(plan, total=spec.last_step, stop=None), 2**30, 100
    return Course(plan, spec.epochs, data.num_batches, rows, updates, most_moments=most)


def check_length(here: Findings, checked: Checked, course: Course, data: TrainData, state: Any) -> None:
    """Checks the number of steps in a run and warns if this number is probably unintended."""
    experiment = checked.experiment
    spec, start, end = experiment.spec, course.start.steps, course.end
    here.plan["train"] = f"{course}; loops end {course.loops}"
    if course.is_over:
        text = f"the run is at step {start}, and ends at step {end}"
        if course.has_stopped:
            text = f"an evaluation or an action stopped the run at step {start}, unless its patience is longer now"
        here.warn(f"Nothing is left to train: {text}.")
    counter: Any = getattr(state, "step", None)
    if hasattr(counter, "dtype") and END > end > np.iinfo(counter.dtype).max:
        text = f"state.step, {checks.describe(counter)}, counts to {np.iinfo(counter.dtype).max}"
        here.error(f"{text}, and the run goes to step {end}. Make it an int32.")
    data_end = course.end_of_pass(1)
    if spec.epochs is None and data_end < end:
        here.at("the train data").warn(
            f"They end at step {data_end}, after {data.num_batches} batches, and train_total_steps={spec.total_steps}. "
            "Repeat the dataset (train_epochs says how often), or lower train_total_steps."
        )
    is_generator = inspect.isgenerator(spec.train_dataset) and not checked.is_starting  # It may end.
    if spec.epochs is None and spec.stop is None and end == END and (is_generator or is_endless(spec.data)):
        ending = "its dataset is endless" if not is_generator else "a generator doesn't say whether it ends"
        here.warn(
            f"Nothing ends the run: {ending}, and there is neither train_total_steps nor stop. Give one of them, if no "
            "action is to stop it."
        )


# Evaluation data --------------------------------------------------------------------------------------------


def first_eval_batch(part: Part, spec: EvalSpec, checked: Checked) -> tuple[Sequence[types.Batch], str]:
    """Returns a list with the first batch of an evaluation, and a phrase that describes the number of batches.

    The list is empty if the run is about to start (see `Checked`), or if reading a batch would consume it.
    """
    if spec.dataset_iterator is not None:
        try:
            first = [] if checked.is_starting else [checked.sources.open(spec.dataset_iterator).peek()]
        except StopIteration:
            raise spec.empty() from None
        return first, f"{spec.num_steps} batches each time"
    if is_one_pass(spec.dataset):
        runs_again = len(part.calls.moments) > 1 or part.calls.rest
        if runs_again and spec.num_steps is None and spec.should_eval_fn is None:
            part.here.error(
                f"It will run more than once, and its dataset is {checks.describe(spec.dataset)}, an iterator, which "
                "yields its batches only once. Give an iterable that can be read again (a list, a tf.data.Dataset), or "
                "use EvalSpec(None, dataset_iterator=..., num_steps=...) to continue where the last evaluation stopped."
            )
        return (), "batches of an iterator"
    number = _check_number(part.here, spec, is_starting=checked.is_starting)
    if checked.is_starting:
        return (), number
    batches: Any = as_iterator(spec.data)
    try:
        return [next(batches)], number
    except StopIteration:
        raise spec.empty() from None
    finally:
        if hasattr(batches, "close"):
            batches.close()


def _check_number(here: Findings, spec: EvalSpec, *, is_starting: bool) -> str:
    """Checks the number of batches that an evaluation reads. Returns a phrase that describes this number."""
    known = num_batches(spec.data)
    if spec.num_steps is not None:
        if known is not None and known < spec.num_steps and not is_starting:  # Otherwise, the run warns.
            text = f"num_steps={spec.num_steps}, but its dataset has only {known} batches, so it will read no more."
            here.warn(f"{text} Lower num_steps, or leave it out.")
        return f"{spec.num_steps} batches"
    if is_endless(spec.data):
        text = "Its dataset has no end, so the evaluation would never end."
        here.error(f"{text} Set num_steps in its EvalSpec, or give a finite dataset.")
        return "endless batches"
    return "batches" if known is None else f"{known} batch{'es' if known > 1 else ''}"
