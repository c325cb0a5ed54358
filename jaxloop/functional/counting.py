"""Counts steps, examples and time in hand-written loops and in the functional API."""

import dataclasses
import numbers
from collections.abc import Callable, Iterator
from typing import Any

from absl import logging

from jaxloop import types
from jaxloop.base import checks, timing
from jaxloop.engine.feed import as_iterator
from jaxloop.schedules import Elapsed, Schedule, at


def elapse(
    dataset: Any,
    *,
    stop: Schedule | int | None = None,
    start: Elapsed | None = None,
    num_examples: Callable[[types.Batch], int] | None = None,
) -> Iterator[tuple[Elapsed, types.Batch]]:
    """Yields each batch together with the run's progress, for use in hand-written loops.

    >>> from jaxloop import every, examples
    >>> step, state, batches = examples.tiny_regression()
    >>> eval_period = every(steps=50)
    >>> for elapsed, batch in elapse(batches, stop=at(100)):
    ...     state, outputs = step(state, batch)
    ...     if eval_period(elapsed):
    ...         print(elapsed.steps, elapsed.samples)
    50 400
    100 800

    Args:
      dataset: The batches.
      stop: The total number of steps (including those counted in `start`), or a schedule that ends the run. If None,
        the dataset is read to its end. A warning is logged if the dataset ends before `stop`.
      start: The progress of an earlier run, from which counting continues.
      num_examples: A function that returns the number of examples in a batch. If None, the number is the length of
        the leading axis of the batch's arrays, or 1 if the arrays are scalars or their leading axes differ in length.

    Yields:
      `(elapsed, batch)`, where `elapsed` includes this batch: for the first batch, `elapsed.steps == 1`.
    """
    stop, count, iterator = as_stop(stop), counter(num_examples), as_iterator(dataset)
    start = now = (start or Elapsed()).without_previous()
    is_last, offset = is_over(stop, start), start.time - timing.clock()
    while not is_last:
        try:
            batch = next(iterator)
        except StopIteration:
            return warn_of_early_end(start, now, stop)
        now = now.advance(samples=count(batch), time=offset + timing.clock())
        is_last = stop is not None and stop.stops(now.previous or start, now)
        yield dataclasses.replace(now, is_last=is_last), batch


def as_stop(stop: Any) -> Schedule | None:
    """Converts a `stop` argument to a schedule. An int is interpreted as a number of steps, and None stays None."""
    if isinstance(stop, numbers.Integral) and not isinstance(stop, bool):
        stop = at(steps=int(stop))
    if stop is not None and not isinstance(stop, Schedule):
        raise TypeError(f"stop must be a number of steps, or a Schedule such as at(steps=10_000), got {stop!r}.")
    return stop


def counter(num_examples: Callable[[types.Batch], int] | None) -> Callable[[types.Batch], int]:
    """Returns a function that counts the examples in a batch.

    If `num_examples` is given, the function calls it and checks that the result is a whole number. Otherwise, the
    function returns the length of the leading axis of the batch's arrays, or 1 if the arrays are scalars or their
    leading axes differ in length.
    """
    if num_examples is None:
        return lambda batch: checks.num_examples(batch) or 1
    if not callable(num_examples):
        raise TypeError(f"num_examples must be a function of a batch, or None, got {num_examples!r}.")

    def count(batch: types.Batch) -> int:
        number = checks.whole_number(found := num_examples(batch))
        if number is None:
            raise TypeError(f"num_examples must return a whole number, got {found!r}.")
        return number

    return count


def is_over(stop: Schedule | None, start: Elapsed) -> bool:
    """Returns True, and logs a warning, if a run that begins at `start` has already reached `stop`."""
    has_ended = stop is not None and stop.stops(start.previous or start, start)
    if has_ended:
        logging.warning("Nothing is left to train: step %d has reached stop=%r.", start.steps, stop)
    return has_ended


def warn_of_early_end(start: Elapsed, elapsed: Elapsed, stop: Schedule | None) -> None:
    """Logs a warning if the dataset was empty or ended before `stop`. Called when the dataset ends.

    Args:
      start: The progress of the run before it read the dataset.
      elapsed: The progress of the run at the end of the dataset.
      stop: The schedule that ends the run, or None if the run ends with the dataset.
    """
    if elapsed.steps == start.steps:
        logging.warning("The dataset yielded no batches. An iterator can be read only once. Give each loop a new one.")
    elif stop is not None:
        logging.warning(
            "The dataset ended at step %d, before stop=%r. Repeat it, or leave stop out.", elapsed.steps, stop
        )
