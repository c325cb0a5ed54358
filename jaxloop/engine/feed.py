"""Functions and classes that supply a loop with batches."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, final

from jaxloop import types
from jaxloop.base import checks, timing
from jaxloop.data.sources import NO_DATA, check_is_dataset, is_function
from jaxloop.distributed.agreement import Job, JointReader, OwnBatches


def as_iterator(dataset: Any) -> Iterator[Any]:
    """Returns an iterator over a dataset.

    If the dataset is a function, calls the function and iterates over the result. If the dataset is None, the iterator
    yields None forever. If the dataset is an iterator, returns the dataset itself.

    Raises:
      TypeError: If the dataset is neither an iterator nor an iterable of batches.
    """
    if dataset is None:
        dataset = NO_DATA
    if is_function(dataset):
        dataset = dataset()
    if hasattr(dataset, "__next__"):
        return dataset
    check_is_dataset(dataset)
    return iter(dataset)


@final
class Feed(Iterator[types.Batch]):
    """Reads one or several batches at a time and buffers the batches that were read ahead.

    If the dataset raises an exception while batches are read ahead, `Feed` first returns the batches in its buffer, and
    then raises the exception.

    >>> feed = Feed(iter([1, 2, 3]))
    >>> feed.has_more(), feed.take(2), feed.take(2), feed.has_more()
    (True, [1, 2], [3], False)

    Args:
      dataset: An iterator of batches.
      read: A function that reads the next batch from the dataset. If None, `next(dataset)` is used.
      joint: In a multi-process job, a reader that is used instead of `read` and that makes all processes read the same
        number of batches. Otherwise None.

    Attributes:
      dataset: The iterator.
      joint: The argument of the same name.
      ahead: The batches that have been read but not used yet.
      examples: In a multi-process job, a list with the number of examples in each batch, summed over all processes. The
        list covers the batches taken from the feed since the last call to `count`, and those in `ahead`.
      has_ended: True if the dataset has ended and all of its batches have been used.
    """

    def __init__(
        self,
        dataset: Iterator[types.Batch],
        read: Callable[[], types.Batch] | None = None,
        joint: JointReader | None = None,
    ):
        self.dataset: Iterator[types.Batch] = dataset
        self.joint: JointReader | None = joint
        self.ahead: list[types.Batch] = []
        self.has_ended: bool = False
        self.examples: list[int] = []
        self._read = read or dataset.__next__ if joint is None else self._read_jointly
        self._error: Exception | SystemExit | None = None

    @property
    def num_ahead(self) -> int:
        """The number of batches that have been read from the dataset but not used yet."""
        return len(self.ahead) + (0 if self.joint is None else self.joint.held)

    def begin(self, limit: int | None) -> None:
        """Prepares for a loop that reads at most `limit` batches, or all batches if `limit` is None."""
        self.has_ended = False
        if self.joint is not None:
            self.joint.begin((math.inf if limit is None else limit) - len(self.ahead))

    def _read_jointly(self) -> types.Batch:
        assert self.joint is not None
        batch, examples = self.joint()
        self.examples.append(examples)
        return batch

    def count(self, number: int) -> list[int]:
        """Returns the number of examples in each of the first `number` batches taken since the last call to `count`.

        If more than `number` batches were taken, the numbers for the excess batches are discarded.
        """
        counted = self.examples[:number]
        del self.examples[: len(self.examples) - len(self.ahead)]
        return counted

    def reader(self) -> Callable[[], types.Batch]:
        """Returns a function that reads the next batch. Calling another method of the feed invalidates the function."""
        return self._read if not self.ahead and self._error is None else self.__next__

    def __next__(self) -> types.Batch:
        if self.ahead:
            return self.ahead.pop(0)
        self._raise_error()
        return self._read()

    def take(self, number: int) -> list[types.Batch]:
        """Returns the next `number` batches, or fewer if the dataset ends or raises an exception.

        If no batches are left, raises the dataset's exception or, if the dataset has ended, returns an empty list.

        Args:
          number: The number of batches to return.
        """
        self._read_ahead(number)
        batches = self.ahead[:number]
        del self.ahead[:number]
        if not batches:
            self.has_ended = isinstance(self._error, StopIteration)
            if not self.has_ended:
                self._raise_error()
        return batches

    def put_back(self, batches: list[types.Batch]) -> None:
        """Puts unused batches back at the front of the buffer."""
        self.ahead[:0] = batches

    def has_more(self) -> bool:
        """Returns True if there is another batch. If the buffer is empty, reads a batch ahead.

        Also returns True if reading the batch raises an exception. That exception is raised when the batch is taken.
        """
        self._read_ahead(1)
        self.has_ended = not self.ahead and isinstance(self._error, StopIteration)
        return not self.has_ended

    def _read_ahead(self, number: int) -> None:
        """Reads until the buffer contains `number` batches, or until the dataset ends or raises an exception."""
        read, add, missing = self._read, self.ahead.append, number - len(self.ahead)
        try:
            for _ in range(missing if self._error is None else 0):
                add(read())
        except (Exception, SystemExit) as error:
            self._error = error

    def _raise_error(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error


@final
class Source(NamedTuple):
    """Functions that an experiment uses to track a loop's data.

    Attributes:
      next_pass: Called when the data ends, to begin the next epoch. Returns True if there is data for another loop.
      mark: Called before batches are read ahead, to mark the current position in the data.
      consumed: Called whenever batches may have been used or read ahead. Receives the number of batches that have been
        read but not used yet.
      observers: Functions to call with each batch. They are called before the batch's step or, if several steps are
        fused, after the dispatch of these steps.
    """

    next_pass: Callable[[], bool] = lambda: False
    mark: Callable[..., None] = lambda **options: None
    consumed: Callable[[int], None] = lambda ahead: None
    observers: Sequence[Callable[[types.Batch], None]] = ()


@final
class LoopData:
    """Creates a feed for each iterator that a loop reads, and keeps the latest feed, which may hold unused batches.

    Args:
      loop: The loop.
      job: The processes that train together.
      stopwatch: The stopwatch that tracks how the time is spent.

    Attributes:
      feed: The feed of the latest iterator.
      source: The functions that track the data.
      is_wrapped: True if the current loop's `begin` hook replaced the iterator that was passed to it.
    """

    def __init__(self, loop: Any, job: Job, stopwatch: timing.Stopwatch):
        self._loop, self._job, self._stopwatch = loop, job, stopwatch
        self.feed: Feed = Feed(iter(()))
        self.source: Source = Source()
        self.is_wrapped: bool = False

    def begin(self, dataset: Iterator[types.Batch], num_batches: int | None, *, evaluates: bool) -> None:
        """Prepares to read a loop's batches from an iterator.

        If the previous loop read from the same iterator, that loop's feed is reused, so that batches that were read
        ahead aren't lost.

        Args:
          dataset: The iterator.
          num_batches: The maximum number of batches to read, or None to read all.
          evaluates: Whether the batches are read for an evaluation.
        """
        if self.feed.dataset is not dataset:
            self.open(dataset, evaluates=evaluates)
        if self._job.is_shared and not self.feed.num_ahead:
            self.source.mark()  # From here on, batches are read ahead, and some sources lose track of their position.
        self.feed.begin(num_batches)
        self.source.consumed(self.feed.num_ahead)

    def open(self, dataset: Iterator[types.Batch], *, evaluates: bool = False) -> None:
        """Replaces the current feed with a new feed for an iterator."""
        loop, read, joint = self._loop, dataset.__next__, None
        runner = loop.step._runner
        if checks.is_user_defined(loop, "_get_next_batch"):
            read = lambda: loop._get_next_batch(dataset)
        if self._job.is_shared:
            own = OwnBatches(read, runner, self._stopwatch)
            joint = JointReader(repr(loop), own, self._job, until_all_end=evaluates)
        self.feed = Feed(dataset, read, joint)

    def next_batch(self, dataset: Iterator[types.Batch]) -> types.Batch:
        """Reads and returns the batch that the next step would receive."""
        if self.feed.dataset is not dataset:
            self.open(dataset)
        return self.feed.reader()()

    def forget(self) -> None:
        """Drops the batches that were read ahead."""
        self.feed = Feed(iter(()))
