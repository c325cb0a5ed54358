"""The background thread that prefetches batches."""

import queue
import threading
import weakref
from collections.abc import Iterator
from typing import Any, final


@final
class ReadAhead(Iterator[Any]):
    """Reads up to `size` items ahead in a background thread. The first call to `next` starts the thread.

    >>> list(ReadAhead(iter([1, 2]), size=1))
    [1, 2]

    If reading an item fails, the same error is raised when that item is requested. Once the thread has started, no
    other code may use the source. The thread ends when the source ends or raises an error, when `close` is called, or
    when this object is garbage-collected.

    Args:
      iterator: The source to read from.
      size: The maximum number of items in the buffer, including the one that is being read.
    """

    def __init__(self, iterator: Iterator[Any], size: int):
        self._reads: _Reads = queue.SimpleQueue()
        self._room, self._is_closed = threading.Semaphore(size), threading.Event()
        shared = self._reads, self._room, self._is_closed
        self._thread = threading.Thread(target=_fill, args=(iterator, *shared), name="jaxloop-prefetch", daemon=True)
        self.close: weakref.finalize[..., Any] = weakref.finalize(self, _close, self._thread, *shared)
        """Ends the iterator and the thread. Waits up to a second for the thread to finish reading its current item."""

    def __next__(self) -> Any:
        if self._is_closed.is_set():
            raise StopIteration
        if self._thread.ident is None:
            self._thread.start()
        item, error = self._reads.get()
        if error is not None:
            self.close()
            raise error
        self._room.release()
        return item


_Reads = queue.SimpleQueue[tuple[Any, BaseException | None]]


def _fill(iterator: Iterator[Any], reads: _Reads, room: threading.Semaphore, is_closed: threading.Event) -> None:
    """Reads items until the source ends or raises an error, or until the `ReadAhead` is closed. Runs in the thread.

    This function must not hold a reference to the `ReadAhead`. Otherwise, the `ReadAhead` would never be
    garbage-collected, and the thread would never end.
    """
    error = None
    while error is None and room.acquire() and not is_closed.is_set():
        item = None
        try:
            item = next(iterator)
        except BaseException as caught:
            error = caught
        reads.put((item, error))
        del item  # While the thread waits, only the consumer should have a reference.


def _close(thread: threading.Thread, reads: _Reads, room: threading.Semaphore, is_closed: threading.Event) -> None:
    is_closed.set()
    room.release()
    reads.put((None, StopIteration()))  # For a consumer that is waiting in another thread.
    if thread.ident is not None and thread is not threading.current_thread():
        thread.join(timeout=1)
