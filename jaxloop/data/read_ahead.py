"""Prefetching: a background thread that reads batches before they are needed."""

import collections
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, final

from jaxloop import types


@final
class ReadBatch(NamedTuple):
    """The result of one read in the background thread.

    Attributes:
      batch: The batch; None if the read raised an error.
      error: The error that the read raised; None if there is a batch.
      number: The sequence number of the read, starting at 1; 0 after the end.
      state: The state of the source after the read; None if it was not requested.
    """

    batch: types.Batch
    error: BaseException | None
    number: int
    state: Any


@final
class ReadAhead:
    """Reads up to `size` batches ahead in a background thread, which the first call to `take` starts.

    >>> ahead = ReadAhead(iter([1, 2]), size=1)
    >>> [ahead.take().batch for _ in range(2)], type(ahead.take().error).__name__
    ([1, 2], 'StopIteration')

    Once the thread has started, nothing else may use the source. The thread ends when the source ends or raises an
    error, when `close` is called, or when this object is garbage-collected.

    Args:
      iterator: The source.
      size: The maximum number of batches in the buffer, including the one that is being read.
      read_state: A function that reads the state of the source.
      always_reads_state: Whether to read the state after every batch, because it is cheap. Otherwise, the state is read
        only after a call to `request_state`.
    """

    def __init__(
        self,
        iterator: Iterator[types.Batch],
        size: int,
        read_state: Callable[[], Any] = lambda: None,
        always_reads_state: bool = False,
    ):
        self._buffer = _Buffer(iterator, size, read_state, always_reads_state)
        self._thread = threading.Thread(target=self._buffer.fill, name="jaxloop-prefetch", daemon=True)
        self.close: weakref.finalize[..., Any] = weakref.finalize(self, self._buffer.close, self._thread)
        """Stops the thread, and waits up to a second for it to finish the batch that it is reading."""

    @property
    def has_begun(self) -> bool:
        """True if the thread has started and owns the source."""
        return self._thread.ident is not None

    def take(self) -> ReadBatch:
        """Waits for the next read and returns it. After an error or `close`, all reads contain a `StopIteration`."""
        buffer = self._buffer
        if not self.has_begun and not buffer.is_closed:
            self._thread.start()
        with buffer.changed:
            buffer.changed.wait_for(lambda: buffer.batches or buffer.is_closed)
            if not buffer.batches:
                return ReadBatch(None, StopIteration(), 0, None)
            batch = buffer.batches.popleft()
            buffer.is_closed |= batch.error is not None
            buffer.changed.notify_all()
        return batch

    def request_state(self) -> None:
        """Makes the thread read the source's state after the next batch that it reads."""
        self._buffer.is_state_wanted = True


class _Buffer:
    """The state shared by the thread and the consumer.

    The thread must not hold a reference to the `ReadAhead`. Otherwise, the `ReadAhead` would never be
    garbage-collected, and the thread would never end.
    """

    def __init__(
        self, iterator: Iterator[types.Batch], size: int, read_state: Callable[[], Any], always_reads_state: bool
    ):
        self._iterator, self._size = iterator, size
        self._read_state, self._always_reads_state = read_state, always_reads_state
        self.batches: collections.deque[ReadBatch] = collections.deque()
        self.changed = threading.Condition()
        self.is_closed = self.is_state_wanted = False

    def fill(self) -> None:
        """Reads from the source until it ends, or until this buffer is closed. The thread runs this method."""
        for number in itertools.count(1):
            with self.changed:
                self.changed.wait_for(lambda: len(self.batches) < self._size or self.is_closed)
                if self.is_closed:
                    return
            batch = self._read(number)
            with self.changed:
                if not self.is_closed:
                    self.batches.append(batch)
                self.changed.notify_all()
            if batch.error is not None:
                return
            del batch  # While the thread waits, only the consumer should have a reference.

    def _read(self, number: int) -> ReadBatch:
        try:
            batch = next(self._iterator)
            if not self._always_reads_state and not self.is_state_wanted:
                return ReadBatch(batch, None, number, None)
            self.is_state_wanted = False
            return ReadBatch(batch, None, number, self._read_state())
        except BaseException as error:
            return ReadBatch(None, error, number, None)

    def close(self, thread: threading.Thread) -> None:
        """Stops the thread, and waits up to a second for it."""
        with self.changed:
            self.is_closed = True
            self.batches.clear()
            self.changed.notify_all()
        if thread.ident is not None and thread is not threading.current_thread():
            thread.join(timeout=1)
