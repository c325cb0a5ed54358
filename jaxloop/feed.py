"""Batches on their way from a dataset into the steps of a loop."""

from collections.abc import Callable, Iterator
from typing import Any, final

import jax
import numpy as np

from jaxloop import checks, types
from jaxloop.agreement import JointDraw
from jaxloop.sources import NO_DATA, is_function


def as_iterator(dataset: Any) -> Iterator[Any]:
    """Returns the iterator of a dataset, or of what a dataset function returns; None gives batches that are None.

    Raises:
      TypeError: there is none; the error says what to give.
    """
    if dataset is None:
        dataset = NO_DATA
    if is_function(dataset):
        dataset = dataset()
    if hasattr(dataset, "__next__"):
        return dataset
    if isinstance(dataset, str | bytes | dict | np.ndarray | jax.Array) or not hasattr(dataset, "__iter__"):
        raise TypeError(
            f"A dataset is an iterator of batches, or an iterable, got {checks.describe(dataset)}. Give, for example, "
            "dataset.as_numpy_iterator(), or a list of dicts of arrays."
        )
    return iter(dataset)


@final
class Feed(Iterator[types.Batch]):
    """Draws batches, one or several at a time, and keeps those that were drawn before their step may be run.

    An exception of the dataset comes out after the last batch before it, whoever met it.

    >>> feed = Feed(iter([1, 2, 3]))
    >>> feed.has_more(), feed.take(2), feed.take(2), feed.has_more()
    (True, [1, 2], [3], False)

    Args:
      dataset: an iterator of batches.
      draw: draws the next batch from it; None for `next(dataset)`.
      join: where several processes are to draw together, makes what does so from what draws in this one.

    Attributes:
      dataset: the iterator.
      joint: what draws in several processes together; None in one.
      ahead: batches that were drawn, and not taken.
      has_ended: whether the end of the data has come out.
    """

    def __init__(
        self,
        dataset: Iterator[types.Batch],
        draw: Callable[[Any], types.Batch] | None = None,
        join: Callable[[Callable[[], types.Batch]], JointDraw] | None = None,
    ):
        self.dataset = dataset
        self.ahead: list[types.Batch] = []
        self.has_ended: bool = False
        self._draw = dataset.__next__ if draw is None else lambda: draw(dataset)
        self.joint: JointDraw | None = join and join(self._draw)
        if self.joint is not None:
            self._draw = self.joint
        self._error: Exception | SystemExit | None = None

    @property
    def num_ahead(self) -> int:
        """How many batches were drawn from the dataset, and not taken."""
        return len(self.ahead) + (0 if self.joint is None else self.joint.held)

    def begin(self, limit: int | None) -> None:
        """Begins a series of at most so many batches."""
        self.has_ended = False
        if self.joint is not None:
            self.joint.begin(limit, len(self.ahead))

    def drawer(self) -> Callable[[], types.Batch]:
        """What draws the next batch, as long as nobody calls another method. It raises what the dataset raises."""
        return self._draw if not self.ahead and self._error is None else self._next

    def __iter__(self) -> Iterator[types.Batch]:
        return self

    def __next__(self) -> types.Batch:
        return self._next()

    def _next(self) -> types.Batch:
        if self.ahead:
            return self.ahead.pop(0)
        self._raise_error()
        return self._draw()

    def take(self, number: int) -> list[types.Batch]:
        """The next batches, fewer where the data end. Raises what the dataset raises where there is none before."""
        batches = self.ahead[:number]
        del self.ahead[:number]
        if self._error is None:
            draw, add = self._draw, batches.append
            try:
                for _ in range(number - len(batches)):
                    add(draw())
            except (Exception, SystemExit) as error:
                self._error = error
        if not batches:
            self.has_ended = isinstance(self._error, StopIteration)
            if not self.has_ended:
                self._raise_error()
        return batches

    def put_back(self, batches: list[types.Batch]) -> None:
        """Gives back what was taken last."""
        self.ahead[:0] = batches

    def has_more(self) -> bool:
        """Draws a batch ahead, unless there is one: whether there was one, or an exception to come out."""
        if not self.ahead and self._error is None:
            try:
                self.ahead.append(self._draw())
            except (Exception, SystemExit) as error:
                self._error = error
        self.has_ended = not self.ahead and isinstance(self._error, StopIteration)
        return not self.has_ended

    def _raise_error(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error
