"""Counting of steps, examples and time, batch by batch, for hand-written loops and the functional API."""

import dataclasses
import numbers
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

from absl import logging

from jaxloop import types
from jaxloop.base import checks, timing
from jaxloop.engine.feed import as_iterator
from jaxloop.processes.interrupt import Interruptible
from jaxloop.schedules import NEVER, Elapsed, Schedule, at, goal_of


def elapse(
    dataset: Any,
    *,
    stop: Schedule | int | None = None,
    start: Elapsed | None = None,
    num_examples: Callable[[types.Batch], int] | None = None,
    stopwatch: timing.Stopwatch | None = None,
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
      stop: The number of steps, or a schedule that ends the run. If None, the dataset is read to its end. A warning is
        logged if the dataset ends before `stop`.
      start: The progress of an earlier run, from which counting continues.
      num_examples: A function that returns the number of examples in a batch. If None, the length of the leading
        axis is used (or 1 if the batch has no axes).
      stopwatch: A stopwatch whose training time is used as the run's time. If None, all time is counted.

    Yields:
      `(elapsed, batch)`, where `elapsed` includes this batch: for the first batch, `elapsed.steps == 1`.
    """
    stopwatch = stopwatch or timing.Stopwatch()
    return _elapse(Counting(as_iterator(dataset), as_stop(stop), start or Elapsed(), stopwatch, num_examples))


def as_stop(stop: Any) -> Schedule | None:
    """Converts a `stop` argument to a schedule. An int is interpreted as a number of steps."""
    if isinstance(stop, numbers.Integral) and not isinstance(stop, bool):
        return at(steps=int(stop))
    if stop is not None and not isinstance(stop, Schedule):
        raise TypeError(f"stop must be a number of steps, or a Schedule such as at(steps=10_000), got {stop!r}.")
    return stop


def _elapse(counting: "Counting") -> Iterator[tuple[Elapsed, types.Batch]]:
    with counting.stopwatch.counting("dispatch"):
        while (read := counting.read()) is not None:
            yield read


@final
class Counting:
    """Reads and counts a run's batches, like `elapse`, for loops that read some batches themselves.

    Args:
      iterator: The batches.
      stop: A schedule that ends the run; None to read to the end of the dataset.
      start: The progress of an earlier run, from which counting continues.
      stopwatch: The stopwatch that tracks how time is spent. It must be set to "dispatch" when `read` is called.
      num_examples: See `elapse`.
      interruptible: The object that knows whether a signal has ended the run; None if there is none.

    Attributes:
      newest: The progress up to and including the latest batch, with `previous` unset.
    """

    def __init__(
        self,
        iterator: Iterator[types.Batch],
        stop: Schedule | None,
        start: Elapsed,
        stopwatch: timing.Stopwatch,
        num_examples: Callable[[types.Batch], int] | None = None,
        interruptible: Interruptible | None = None,
    ):
        if num_examples is not None and not callable(num_examples):
            raise TypeError(f"num_examples must be a function of a batch, or None, got {num_examples!r}.")
        self.iterator: Iterator[types.Batch] = iterator
        self.stopwatch: timing.Stopwatch = stopwatch
        self.newest: Elapsed = start.without_previous()
        self._stop, self._start, self._num_examples = stop, start, num_examples
        self._interruptible = interruptible
        self._offset = start.time - stopwatch.training_secs()
        self._is_over = stop is not None and stop.stops(start.previous or start, start)
        if self._is_over:
            logging.warning("Nothing is left to train: step %d has reached stop=%r.", start.steps, stop)

    def read(self) -> tuple[Elapsed, types.Batch] | None:
        """Returns the progress and the next batch, or None at the end of the run."""
        if self._is_over:
            return None
        stopwatch = self.stopwatch
        began = stopwatch.clock()
        try:
            batch = next(self.iterator)
        except BaseException as error:
            return self.end_by(error)
        finally:
            came = stopwatch.clock()
            stopwatch.move(came - began, "data")
        return self.count(self.num_examples(batch), came), batch

    def num_examples(self, batch: types.Batch) -> int:
        """Returns the number of examples in a batch.

        Raises:
          TypeError: If the user's `num_examples` function doesn't return a whole number.
        """
        if self._num_examples is None:
            return checks.num_examples(batch) or 1
        count = checks.whole_number(found := self._num_examples(batch))
        if count is None:
            raise TypeError(f"num_examples must return a whole number, got {found!r}.")
        return count

    def end_by(self, error: BaseException) -> None:
        """Ends the run after the iterator has raised an exception.

        The exception is re-raised unless it is a `StopIteration` or a signal came first.
        """
        if isinstance(error, StopIteration):
            _warn_of_early_end(self._start, self.newest, self._stop)
        elif self._interruptible is None or not self._interruptible.supersedes(error):
            error.add_note(f"in the dataset, after step {self.newest.steps}")
            raise error
        self._is_over = True

    def count(self, samples: int, came: float) -> Elapsed:
        """Counts a batch of `samples` examples that arrived at the clock time `came`."""
        before, self.stopwatch.steps = self.newest, self.stopwatch.steps + 1
        self.stopwatch.samples += samples
        elapsed = before.advance(samples=samples, time=self._offset + self.stopwatch.training_at(came))
        self.newest = elapsed.without_previous()
        self._is_over = self._stop is not None and self._stop.stops(before, elapsed)
        return dataclasses.replace(elapsed, is_last=True) if self._is_over else elapsed

    def count_all(self, seen: Sequence[tuple[int, float]]) -> list[Elapsed]:
        """Counts several batches, each given as its number of examples and arrival time. Returns their progress.

        Only the last batch may end the run, and only its progress has a `previous`.
        """
        newest, elapsed = self.newest, list[Elapsed]()
        for samples, came in seen[:-1]:
            time = self._offset + self.stopwatch.training_at(came)
            newest = Elapsed(newest.steps + 1, newest.samples + samples, time, newest.loops)
            elapsed.append(newest)
            self.stopwatch.samples += samples
        self.newest, self.stopwatch.steps = newest, self.stopwatch.steps + len(elapsed)
        return [*elapsed, self.count(*seen[-1])]

    def room(self) -> int:
        """Returns the number of steps that can run before the one at which `stop` may end the run."""
        if self._is_over:
            return 0
        goal = goal_of([] if self._stop is None else [self._stop], self.newest)
        return goal.step - self.newest.steps - 1 if goal.time == NEVER[1] else 0


def _warn_of_early_end(start: Elapsed, elapsed: Elapsed, stop: Schedule | None) -> None:
    if elapsed.steps == start.steps:
        logging.warning(
            "The dataset yielded no batches, so no step ran. An iterator can be read only once: make a new one for "
            "each loop, or give a list."
        )
    elif stop is not None:
        logging.warning(
            "The dataset ended at step %d, before stop=%r. Repeat it, or leave stop out.", elapsed.steps, stop
        )
