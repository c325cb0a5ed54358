"""The data: the first batch of each dataset, and how many there are."""

import dataclasses
import time
from collections.abc import Iterator
from typing import Any, final

from jaxloop import checks, types
from jaxloop.data import is_endless, is_one_pass, num_batches
from jaxloop.feed import as_iterator
from jaxloop.forecast import Calls
from jaxloop.position import PositionedIterator
from jaxloop.preflight.experiment import Experiment
from jaxloop.preflight.findings import Findings
from jaxloop.sources import NO_DATA
from jaxloop.specs import EvalSpec

# So long, and so many batches, an evaluation's data without a length are looked at for their end.
_LOOK_SECS, _LOOK_BATCHES = 0.5, 10_000


@final
@dataclasses.dataclass(frozen=True)
class TrainData:
    """The train data, opened.

    Attributes:
      source: draws from them; None where it can't, or where nothing is trained.
      batch: the first; None where there is none, and in a run without data.
      has_batch: whether there is one; in a run without data, None is one.
      num_batches: in a pass; of an iterator, how many are left. None where nobody knows.
    """

    source: PositionedIterator | None = None
    batch: types.Batch | None = None
    has_batch: bool = False
    num_batches: int | None = None


def open_train_data(experiment: Experiment, found: Findings) -> TrainData:
    """Opens the train data, and draws the first batch, which comes first in the run."""
    dataset, opened = experiment.train_dataset, TrainData()
    with found.finding("the train data"):
        source = experiment.open_train_data()
        opened = TrainData(source)
        try:
            batch = source.peek()
        except StopIteration:
            raise checks.empty_dataset(dataset) from None
        known = num_batches(source if is_one_pass(dataset) else dataset)
        opened = TrainData(source, batch, True, known)
        if dataset is NO_DATA:
            found.plan["train data"] = "none: run gets None as its batch"
            return opened
        count = f"{known:,} batches" if known is not None else "endless batches" if is_endless(source) else "batches"
        found.plan["train data"] = f"{count} of {checks.batch_in_words(batch)}"
    return opened


def close_train_data(experiment: Experiment, opened: TrainData) -> None:
    """Closes what was opened; an iterator stays open, for the run to go on with."""
    if opened.source is not None and not is_one_pass(experiment.train_dataset):
        opened.source.close()


def first_eval_batch(
    where: str, spec: EvalSpec, calls: Calls, experiment: Experiment, found: Findings
) -> tuple[types.Batch | None, str]:
    """The first batch of an evaluation that comes so often, and how many there are, in words.

    The batch is None where to draw it would be to lose it.
    """
    if spec.dataset_iterator is not None:
        source = experiment.open_eval_data(spec.dataset_iterator)
        _look_at_amount(where, spec, num_batches(source), calls, found)
        try:
            return source.peek(), f"{spec.num_steps} batches each time"
        except StopIteration:
            raise spec.empty() from None
    if is_one_pass(spec.dataset):
        _look_at_amount(where, spec, num_batches(spec.dataset), calls, found)
        _look_at_repeats(where, spec, calls, found)
        return None, "batches of an iterator"
    batches: Any = as_iterator(spec.dataset)
    try:
        first = next(batches, None)
        if first is None:
            raise spec.empty()
        return first, _count_in_words(where, spec, batches, found)
    finally:
        if hasattr(batches, "close"):
            batches.close()


def _look_at_amount(where: str, spec: EvalSpec, there: int | None, calls: Calls, found: Findings) -> None:
    """Says where an iterator has fewer batches than its evaluations draw."""
    needed = (spec.num_steps or 0) * len(calls.steps)
    if there is not None and there < needed and not calls.at_most:
        found.add(
            where,
            f"Its {len(calls.steps)} evaluations draw num_steps={spec.num_steps} batches each, and its iterator has "
            f"{there}. Give one that has enough of them, or a dataset that starts anew each time.",
        )


def _look_at_repeats(where: str, spec: EvalSpec, calls: Calls, found: Findings) -> None:
    """Says where an iterator would be used up by the first of several evaluations."""
    if spec.num_steps is None and not calls.at_most and (len(calls.steps) > 1 or not calls.is_all):
        found.add(
            where,
            f"It will run more than once, and its dataset is {checks.describe(spec.dataset)}, an iterator, which gives "
            "its batches only once. Give an iterable that starts anew each time (a list, a tf.data.Dataset), or "
            "EvalSpec(None, dataset_iterator=..., num_steps=...) to go on with it.",
        )


def _count_in_words(where: str, spec: EvalSpec, batches: Iterator[Any], found: Findings) -> str:
    """How many batches a dataset gives to an evaluation, of which the first is drawn."""
    known = num_batches(spec.dataset)
    if spec.num_steps is not None:
        if known is not None and known < spec.num_steps:
            text = f"num_steps={spec.num_steps}, and its dataset has {known} batches: those are all it will see."
            found.warn(where, f"{text} Lower num_steps, or leave it out.")
        return f"{spec.num_steps} batches"
    if is_endless(spec.dataset):
        text = "Its dataset has no end, so it would never end either."
        found.add(where, f"{text} Set num_steps in its EvalSpec, or give data that end.")
        return "endless batches"
    return _look_for_end(where, batches, found) if known is None else _batches_in_words(known)


def _look_for_end(where: str, batches: Iterator[Any], found: Findings) -> str:
    """Draws batches for a moment; says how many there are."""
    count, began = 1, time.perf_counter()
    while time.perf_counter() - began < _LOOK_SECS and count < _LOOK_BATCHES:
        if next(batches, None) is None:
            return _batches_in_words(count)
        count += 1
    if count == _LOOK_BATCHES:
        found.warn(
            where,
            f"Its dataset has not ended after {count:,} batches. If it repeats without end, set num_steps in its "
            "EvalSpec, or give data that end.",
        )
    return f"at least {count:,} batches"


def _batches_in_words(count: int) -> str:
    return f"{count} batch{'es' if count > 1 else ''}"
