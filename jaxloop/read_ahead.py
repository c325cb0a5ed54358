"""Batches drawn ahead of their use, in a thread."""

import collections
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, final

from jaxloop import types


@final
class Drawn(NamedTuple):
    """A batch, or the error that came in its place; its number, from 1; and the source's state after it, if read."""

    batch: types.Batch
    error: BaseException | None
    number: int
    state: Any


@final
class ReadAhead:
    """Draws up to `size` batches ahead, in one thread that begins with the first call of `take`.

    >>> ahead = ReadAhead(iter([1, 2]), size=1)
    >>> [ahead.take().batch for _ in range(2)], type(ahead.take().error).__name__
    ([1, 2], 'StopIteration')

    From then on the thread alone touches the source. It ends with the source, with its first error, on `close`, and
    when nobody holds this object any more.

    Args:
      iterator: the source.
      size: how many batches may wait, the one being drawn included.
      read_state: reads the state of the source.
      reads_always: whether it is so cheap that it shall be read after each batch; else only where `request_state` asks.
    """

    def __init__(
        self,
        iterator: Iterator[types.Batch],
        size: int,
        read_state: Callable[[], Any] = lambda: None,
        reads_always: bool = False,
    ):
        self._buffer = _Buffer(iterator, size, read_state, reads_always)
        self._thread = threading.Thread(target=self._buffer.fill, name="jaxloop-prefetch", daemon=True)
        self.close: weakref.finalize[..., Any] = weakref.finalize(self, self._buffer.close, self._thread)
        """Ends the thread, and waits a second for it: it may have to end the drawing of a batch before."""

    @property
    def has_begun(self) -> bool:
        """Whether the thread has the source."""
        return self._thread.ident is not None

    def take(self) -> Drawn:
        """The next batch; waits for it. After an error, and after `close`, the data have ended."""
        buffer = self._buffer
        if not self.has_begun and not buffer.is_closed:
            self._thread.start()
        with buffer.changed:
            buffer.changed.wait_for(lambda: buffer.drawn or buffer.is_closed)
            if not buffer.drawn:
                return Drawn(None, StopIteration(), 0, None)
            drawn = buffer.drawn.popleft()
            buffer.is_closed |= drawn.error is not None
            buffer.changed.notify_all()
        return drawn

    def request_state(self) -> None:
        """Has the state read after the next batch that is drawn."""
        self._buffer.is_state_wanted = True


class _Buffer:
    """What the thread shares with the consumer. The thread must not hold the `ReadAhead`, whose end is its own."""

    def __init__(self, iterator: Iterator[types.Batch], size: int, read_state: Callable[[], Any], reads_always: bool):
        self._iterator, self._size, self._read_state, self._reads_always = iterator, size, read_state, reads_always
        self.drawn: collections.deque[Drawn] = collections.deque()
        self.changed = threading.Condition()
        self.is_closed = self.is_state_wanted = False

    def fill(self) -> None:
        """Draws from the source until it ends, or this is closed; what the thread runs."""
        for number in itertools.count(1):
            with self.changed:
                self.changed.wait_for(lambda: len(self.drawn) < self._size or self.is_closed)
                if self.is_closed:
                    return
            drawn = self._draw(number)
            with self.changed:
                if not self.is_closed:
                    self.drawn.append(drawn)
                self.changed.notify_all()
            if drawn.error is not None:
                return
            del drawn  # While the thread waits for room, the consumer alone has the batch.

    def _draw(self, number: int) -> Drawn:
        try:
            batch = next(self._iterator)
            if not self._reads_always and not self.is_state_wanted:
                return Drawn(batch, None, number, None)
            self.is_state_wanted = False
            return Drawn(batch, None, number, self._read_state())
        except BaseException as error:
            return Drawn(None, error, number, None)

    def close(self, thread: threading.Thread) -> None:
        """Has the thread end, and waits for it."""
        with self.changed:
            self.is_closed = True
            self.drawn.clear()
            self.changed.notify_all()
        if thread.ident is not None and thread is not threading.current_thread():
            thread.join(timeout=1)
