"""Where the batches of a loop come from."""

from collections.abc import Callable, Iterator
from typing import Any, final

from jaxloop import types
from jaxloop.base import checks, timing
from jaxloop.data.sources import indexed
from jaxloop.engine.feed import Feed
from jaxloop.engine.plan import Source
from jaxloop.processes import agreement


@final
class LoopData:
    """Opens iterators for a loop, and keeps the batches that were read ahead from the latest one.

    Args:
      loop: The loop.
      job: The processes that train together.
      stopwatch: Tracks how the time is spent.

    Attributes:
      feed: The feed of the latest iterator.
      source: What is told about the batches that are read from it.
      is_wrapped: True if the `begin` hook of the current loop wraps the data.
    """

    def __init__(self, loop: Any, job: agreement.Job, stopwatch: timing.Stopwatch):
        self._loop, self._job, self._stopwatch = loop, job, stopwatch
        self.feed: Feed = Feed(iter(()))
        self.source: Source = Source()
        self.is_wrapped: bool = False

    def begin(self, dataset: Iterator[types.Batch], num_batches: int | None, *, evaluates: bool) -> Feed:
        """Returns an iterator's feed. It is reused for the same iterator, so that batches read ahead aren't lost.

        Args:
          dataset: The iterator.
          num_batches: The maximum number of batches to read; None for all.
          evaluates: Whether an evaluation reads them.
        """
        if self.feed.dataset is not dataset:
            self.open(dataset, evaluates=evaluates)
        if self._job.is_shared and not self.feed.num_ahead:
            self.source.mark()  # From here on, batches are read ahead, and some sources lose track of their position.
        self.feed.begin(num_batches)
        self.source.consumed(self.feed.num_ahead)
        return self.feed

    def open(self, dataset: Iterator[types.Batch], *, evaluates: bool = False) -> None:
        """Makes a feed for an iterator."""
        loop = self._loop
        read = loop._get_next_batch if checks.is_user_defined(loop, "_get_next_batch") else None
        join = lambda read: self._join(read, evaluates)
        self.feed = Feed(dataset, read, join if self._job.is_shared else None)
        if not evaluates:
            found = indexed(dataset)
            loop.step._runner.batch_watch.declared_sizes = () if found is None else found.batch_sizes

    def _join(self, read: Callable[[], types.Batch], evaluates: bool) -> agreement.JointReader:
        """Returns a reader that reads batches jointly with the other processes."""
        runner, stopwatch = self._loop.step._runner, self._stopwatch

        def timed() -> types.Batch:
            began = timing.clock()
            try:
                return read()
            finally:
                stopwatch.secs_reading += timing.clock() - began

        return agreement.JointReader(
            repr(self._loop),
            timed,
            before_reading=lambda: self.source.mark(if_cheap=True),
            count=runner.count_examples,
            requests=self._job.requests,
            secs=stopwatch.training_secs,
            on_difference=runner.batch_watch.expect_differences,
            fill_to=runner.filler(),
            until_all_processes_end=evaluates,
        )

    def next_batch(self, dataset: Iterator[types.Batch]) -> types.Batch:
        """Returns the batch that the next step would receive."""
        if self.feed.dataset is not dataset:
            self.open(dataset)
        return self.feed.reader()()

    def forget(self) -> None:
        """Drops the batches that were read ahead."""
        self.feed = Feed(iter(()))
