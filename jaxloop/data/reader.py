"""The class that reads batches from an iterator and keeps the states that are needed to save a position."""

import functools
import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any, final

from jaxloop import types
from jaxloop.data.fingerprint import END, fingerprint
from jaxloop.data.read_ahead import ReadAhead
from jaxloop.data.sources import Source

# The number of marks to keep. A consumer that reads ahead needs a position at most a few marks back.
_MAX_MARKS = 16


@final
class Reader:
    """Reads batches from an iterator, possibly in a background thread. Keeps the iterator's recent states as marks.

    Args:
      source: The `Source` that reads the state of the iterator.
      iterator: An iterator that has already returned `count` batches.
      count: The number of batches that have already been read.
      state: The state of the source after `count` batches.
      prefetch: The number of batches that a thread reads ahead, or 0 for no thread.

    Attributes:
      source, prefetch: The arguments of the same names.
      batches: The iterator that the batches are read from.
      marks: The latest marks, as pairs `(count, state)`. In each pair, `state` is the state of the source after `count`
        batches.
      peeked: A list that holds the batch read by `peek` until that batch is returned.
      recent: The most recently returned batches.
      has_ended: True if there are no more batches.
    """

    def __init__(self, source: Source, iterator: Iterator[types.Batch], count: int, state: Any, prefetch: int):
        self.source: Source = source
        self.prefetch: int = prefetch
        self.marks: deque[tuple[int, Any]] = deque([(count, state)], _MAX_MARKS + prefetch)
        self.peeked: list[types.Batch] = []
        self.recent: deque[types.Batch] = deque(maxlen=1)
        self.has_ended: bool = False
        # Unlike `map`, this doesn't call `iter(iterator)`, which might start over.
        self.batches: Iterator[types.Batch] = itertools.starmap(iterator.__next__, itertools.repeat(()))
        if prefetch:
            # The thread must not refer to this object: a reference cycle would keep the thread alive for too long.
            marked = map(functools.partial(_marked, source, self.marks), self.batches, itertools.count(count + 1))
            self.batches = ReadAhead(marked, prefetch)

    def peek(self) -> types.Batch:
        """Returns the next batch without consuming it. If reading it fails, the next read raises the same error."""
        if not self.peeked:
            try:
                self.peeked.append(next(self.batches))
            except Exception as error:
                self.has_ended = isinstance(error, StopIteration)
                if not self.has_ended:  # A generator, for example, would just end at the next read.
                    self.batches = itertools.chain(map(_raise, [error]), self.batches)
                raise
        return self.peeked[0]

    def mark(self, count: int) -> None:
        """Stores the source's current state as the mark after `count` batches.

        Does nothing if there is already a mark after `count` or more batches, if `peek` has read a later batch, or if
        there is a prefetch thread, which stores its own marks.
        """
        is_at_source = not self.peeked and not self.prefetch  # The source has returned no later batch.
        if count > self.marks[-1][0] and is_at_source and (state := self.source.read()) is not None:
            self.marks.append((count, state))

    def fingerprint(self, num_back: int) -> dict[str, Any] | None:
        """Returns the fingerprint of a recent batch or of the next one.

        Returns `END` if the next batch is requested but the data has ended. Returns None if the requested batch hasn't
        been read yet or is no longer available. If it is no longer available, the reader keeps the last `num_back`
        batches from then on.

        Args:
          num_back: The requested batch: 0 for the next batch, 1 for the batch that was returned last, 2 for the batch
            before that, and so on.
        """
        if num_back == 0:
            return fingerprint(self.peeked[0]) if self.peeked else END if self.has_ended else None
        if num_back <= len(self.recent):
            return fingerprint(self.recent[-num_back])
        self.recent = deque(self.recent, num_back)  # A job of several processes reads this far ahead.
        return None

    def close(self) -> None:
        """Stops the prefetch thread and ends the iterator, or does nothing if there is no thread."""
        if isinstance(self.batches, ReadAhead):
            self.batches.close()


def _raise(error: Exception) -> types.Batch:
    raise error


def _marked(source: Source, marks: deque[tuple[int, Any]], batch: types.Batch, count: int) -> types.Batch:
    """Stores the source's current state as the mark after `count` batches, if `source.is_cheap`. Returns `batch`."""
    if source.is_cheap and (state := source.read()) is not None:
        marks.append((count, state))
    return batch
