"""Reads batches from a dataset for the steps of a loop."""

from collections.abc import Callable, Iterator
from typing import Any, final

from jaxloop import types
from jaxloop.data.sources import NO_DATA, check_is_dataset, is_function
from jaxloop.processes.agreement import JointReader


def as_iterator(dataset: Any) -> Iterator[Any]:
    """Returns an iterator over a dataset, which may also be given as a function that returns it.

    If the dataset is None, the iterator yields None forever.

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
    """Reads one or several batches at a time, and buffers those that no step needs yet.

    If the dataset raises an exception, `Feed` returns all batches read before it, and only then raises the exception.

    >>> feed = Feed(iter([1, 2, 3]))
    >>> feed.has_more(), feed.take(2), feed.take(2), feed.has_more()
    (True, [1, 2], [3], False)

    Args:
      dataset: An iterator of batches.
      read: A function that reads the next batch from the dataset; None to use `next(dataset)`.
      join: In a multi-process job, a function that turns this process's reader into one shared by all processes.

    Attributes:
      dataset: The iterator.
      joint: The reader shared by all processes; None if there is only one process.
      ahead: The batches that have been read but not used yet.
      has_ended: True if the dataset has ended and all of its batches have been used.
    """

    def __init__(
        self,
        dataset: Iterator[types.Batch],
        read: Callable[[Any], types.Batch] | None = None,
        join: Callable[[Callable[[], types.Batch]], JointReader] | None = None,
    ):
        self.dataset = dataset
        self.ahead: list[types.Batch] = []
        self.has_ended: bool = False
        self._read = dataset.__next__ if read is None else lambda: read(dataset)
        self.joint: JointReader | None = join and join(self._read)
        if self.joint is not None:
            self._read = self.joint
        self._error: Exception | SystemExit | None = None

    @property
    def num_ahead(self) -> int:
        """The number of batches that have been read from the dataset but not used yet."""
        return len(self.ahead) + (0 if self.joint is None else self.joint.held)

    def begin(self, limit: int | None) -> None:
        """Begins a loop that reads at most `limit` batches. If `limit` is None, there is no limit."""
        self.has_ended = False
        if self.joint is not None:
            self.joint.begin(limit, len(self.ahead))

    def reader(self) -> Callable[[], types.Batch]:
        """Returns a function that reads the next batch. The function stays valid until another method is called."""
        return self._read if not self.ahead and self._error is None else self._next

    def __iter__(self) -> Iterator[types.Batch]:
        return self

    def __next__(self) -> types.Batch:
        return self._next()

    def _next(self) -> types.Batch:
        if self.ahead:
            return self.ahead.pop(0)
        self._raise_error()
        return self._read()

    def take(self, number: int) -> list[types.Batch]:
        """Returns the next `number` batches, or fewer if the dataset ends. If none are left, raises any pending error.

        Args:
          number: The number of batches to return.
        """
        batches = self.ahead[:number]
        del self.ahead[:number]
        if self._error is None:
            read, add = self._read, batches.append
            try:
                for _ in range(number - len(batches)):
                    add(read())
            except (Exception, SystemExit) as error:
                self._error = error
        if not batches:
            self.has_ended = isinstance(self._error, StopIteration)
            if not self.has_ended:
                self._raise_error()
        return batches

    def put_back(self, batches: list[types.Batch]) -> None:
        """Puts unused batches back at the front of the buffer."""
        self.ahead[:0] = batches

    def has_more(self) -> bool:
        """Returns True if there is another batch or a pending error. If the buffer is empty, reads a batch ahead."""
        if not self.ahead and self._error is None:
            try:
                self.ahead.append(self._read())
            except (Exception, SystemExit) as error:
                self._error = error
        self.has_ended = not self.ahead and isinstance(self._error, StopIteration)
        return not self.has_ended

    def _raise_error(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error
