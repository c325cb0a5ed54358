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
        self._buffer = _Buffer(size)
        self._thread = threading.Thread(
            target=_fill, args=(self._buffer, iterator, read_state, reads_always), name="jaxloop-prefetch", daemon=True
        )
        self.close: weakref.finalize[..., Any] = weakref.finalize(self, _close, self._buffer, self._thread)
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

    def __init__(self, size: int):
        self.size = size
        self.drawn: collections.deque[Drawn] = collections.deque()
        self.changed = threading.Condition()
        self.is_closed = self.is_state_wanted = False


def _fill(buffer: _Buffer, iterator: Iterator[types.Batch], read_state: Callable[[], Any], reads_always: bool) -> None:
    for number in itertools.count(1):
        with buffer.changed:
            buffer.changed.wait_for(lambda: len(buffer.drawn) < buffer.size or buffer.is_closed)
            if buffer.is_closed:
                return
        drawn = _draw(buffer, number, iterator, read_state, reads_always)
        with buffer.changed:
            if not buffer.is_closed:
                buffer.drawn.append(drawn)
            buffer.changed.notify_all()
        if drawn.error is not None:
            return
        del drawn  # While the thread waits for room, the consumer alone has the batch.


def _draw(
    buffer: _Buffer, number: int, iterator: Iterator[types.Batch], read_state: Callable[[], Any], reads_always: bool
) -> Drawn:
    try:
        batch = next(iterator)
        if not reads_always and not buffer.is_state_wanted:
            return Drawn(batch, None, number, None)
        buffer.is_state_wanted = False
        return Drawn(batch, None, number, read_state())
    except BaseException as error:
        return Drawn(None, error, number, None)


def _close(buffer: _Buffer, thread: threading.Thread) -> None:
    with buffer.changed:
        buffer.is_closed = True
        buffer.drawn.clear()
        buffer.changed.notify_all()
    if thread.ident is not None and thread is not threading.current_thread():
        thread.join(timeout=1)
