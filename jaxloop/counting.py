"""Batches, and how far a run is with each: for loops written by hand, and those whose state may be anything."""

import dataclasses
import numbers
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

from absl import logging

from jaxloop import checks, timing, types
from jaxloop.feed import as_iterator
from jaxloop.schedules import NEVER, Elapsed, Schedule, at, goal_of


def elapse(
    dataset: Any,
    *,
    stop: Schedule | int | None = None,
    start: Elapsed | None = None,
    num_examples: Callable[[types.Batch], int] | None = None,
    stopwatch: timing.Stopwatch | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[tuple[Elapsed, types.Batch]]:
    """Counts along while you iterate: for loops written by hand.

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
      dataset: the batches.
      stop: after which step to end; an int counts steps. None for as long as there is data. Data that ends before is
        said in the log.
      start: how far an earlier run was.
      num_examples: counts the examples of a batch; None for the length of its leading axis, and 1 where there is none.
      stopwatch: counts the time, where some of it is not training. None to count all.
      clock: tells the time in seconds; not asked where there is a stopwatch.

    Yields:
      `(elapsed, batch)`, where `elapsed` counts this batch too: within the first, `elapsed.steps == 1`.
    """
    stopwatch = stopwatch or timing.Stopwatch(clock)
    return _elapse(Counting(as_iterator(dataset), as_stop(stop), start or Elapsed(), stopwatch, num_examples))


def as_stop(stop: Any) -> Schedule | None:
    """The schedule of what a user gives as the stop of a run; an int counts steps."""
    if isinstance(stop, numbers.Integral) and not isinstance(stop, bool):
        return at(steps=int(stop))
    if stop is not None and not isinstance(stop, Schedule):
        raise TypeError(f"stop must be a number of steps, or a Schedule such as at(steps=10_000), got {stop!r}.")
    return stop


def _elapse(counting: "Counting") -> Iterator[tuple[Elapsed, types.Batch]]:
    with counting.stopwatch.counting("rest"):
        while (drawn := counting.draw()) is not None:
            yield drawn


@final
class Counting:
    """Draws the batches of a run, and counts along: what `elapse` does, for loops that may draw some themselves.

    Args:
      iterator: the batches.
      stop: after which step to end; None for as long as there is data.
      start: how far an earlier run was.
      stopwatch: counts the time; it counts for "rest" when `draw` is called.
      num_examples: see `elapse`.

    Attributes:
      newest: how far the run is with the batch drawn last, without what was before.
    """

    def __init__(
        self,
        iterator: Iterator[types.Batch],
        stop: Schedule | None,
        start: Elapsed,
        stopwatch: timing.Stopwatch,
        num_examples: Callable[[types.Batch], int] | None = None,
    ):
        if num_examples is not None and not callable(num_examples):
            raise TypeError(f"num_examples must be a function of a batch, or None, got {num_examples!r}.")
        self.iterator: Iterator[types.Batch] = iterator
        self.stopwatch: timing.Stopwatch = stopwatch
        self.newest: Elapsed = start.without_previous()
        self._stop, self._start, self._num_examples = stop, start, num_examples
        self._offset = start.time - stopwatch.training_secs()
        self._is_over = stop is not None and stop.stops(start.previous or start, start)
        if self._is_over:
            logging.warning("Nothing is left to do: the run is at step %d, where stop=%r ends it.", start.steps, stop)

    def draw(self) -> tuple[Elapsed, types.Batch] | None:
        """The next batch, and how far the run is with it; None where it is over."""
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
        """The number of examples of a batch.

        Raises:
          TypeError: the user's function returned no whole number.
        """
        if self._num_examples is None:
            return checks.num_examples(batch) or 1
        count = checks.whole_number(found := self._num_examples(batch))
        if count is None:
            raise TypeError(f"num_examples must return a whole number, how many examples a batch has, got {found!r}.")
        return count

    def end_by(self, error: BaseException) -> None:
        """Ends the run where the iterator has raised: without another word, if that is what ends its data."""
        if not isinstance(error, StopIteration):
            error.add_note(f"in the dataset, after step {self.newest.steps}")
            raise error
        self._is_over = True
        _warn_of_early_end(self._start, self.newest, self._stop)

    def count(self, samples: int, came: float) -> Elapsed:
        """Counts a batch of so many examples, which was there when the clock showed `came`."""
        before, self.stopwatch.steps = self.newest, self.stopwatch.steps + 1
        self.stopwatch.samples += samples
        elapsed = before.advance(samples=samples, time=self._offset + self.stopwatch.training_at(came))
        self.newest = elapsed.without_previous()
        self._is_over = self._stop is not None and self._stop.stops(before, elapsed)
        return dataclasses.replace(elapsed, is_last=True) if self._is_over else elapsed

    def count_all(self, seen: Sequence[tuple[int, float]]) -> list[Elapsed]:
        """Counts several batches, each of so many examples, and there when the clock showed so much.

        The run can end after none of them but the last, and what was before is kept of that alone.
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
        """How many of the next steps come before the one that `stop` may end the run with."""
        if self._is_over:
            return 0
        goal = goal_of([] if self._stop is None else [self._stop], self.newest)
        return goal.step - self.newest.steps - 1 if goal.time == NEVER[1] else 0


def _warn_of_early_end(start: Elapsed, elapsed: Elapsed, stop: Schedule | None) -> None:
    if elapsed.steps == start.steps:
        logging.warning(
            "The dataset had no batch, so no step was run. An iterator gives its batches only once: make a new one for "
            "each loop, or give a list."
        )
    elif stop is not None:
        logging.warning(
            "The dataset ended at step %d, before stop=%r. Repeat it, or leave stop out.", elapsed.steps, stop
        )
