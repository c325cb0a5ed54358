"""Iterators that track their position in a dataset and can return to a saved position."""

import bisect
import contextlib
import dataclasses
import functools
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, final

import jax
import numpy as np
from absl import logging

from jaxloop import types
from jaxloop.base import checks, encoding
from jaxloop.data.fingerprint import END, fingerprint
from jaxloop.data.read_ahead import ReadAhead
from jaxloop.data.sources import (
    NUMBERS,
    OR_SKIPPABLE,
    Source,
    Wrapper,
    check_is_dataset,
    doubt_of_order,
    is_function,
    keeping_random_state,
    name_of,
    num_batches,
    pass_of,
    random_state,
    source_of,
)

# The number of marks to keep. A consumer that reads ahead asks for a position at most a few marks back.
_MAX_MARKS = 16
# The maximum length in bytes of a byte string that stays in the JSON rather than being stored as an array.
_MAX_INLINE = 1024


class PositionUnknownError(ValueError):
    """Raised if the position of an iterator is unknown or can't be restored."""


@final
@dataclasses.dataclass(frozen=True)
class DatasetPosition:
    """The position of an iterator in its dataset: the number of batches consumed, and how to return to that point.

    >>> position = DatasetPosition("state", count=5, state={"dict": {"next_index": 3}}, skip=2)
    >>> DatasetPosition.from_dict(position.to_dict()) == position
    True

    Attributes:
      kind: The form in which the source saves its position:

        - "state": `get_state` and `set_state`.
        - "state_dict": `state_dict` and `load_state_dict`.
        - "tf.data": A checkpoint of the iterator.
        - "torch": The state of the random number generators at the start of the epoch.
        - "sequence" and "index": The index of the next batch.
        - "skip": No state. The order is the same each time, so the consumed batches are read again and skipped.
        - "unknown": No state, and no way to return to the position.
      count: The number of batches consumed since the start of the epoch, including those left out.
      state: The state of the source at the last mark, encoded by `jaxloop.base.encoding` or containing raw bytes; None
        for the start of the epoch.
      skip: The number of batches consumed since that mark.
      next: The `fingerprint` of the next batch, by which a resumed run recognizes it; None if it hasn't been read.
    """

    kind: str
    count: int
    state: Any = None
    skip: int = 0
    next: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.skip <= self.count:
            raise ValueError(f"A DatasetPosition needs 0 <= skip <= count, got skip={self.skip}, count={self.count}.")

    def to_dict(self, arrays: dict[str, np.ndarray] | None = None) -> dict[str, Any]:
        """Returns the position as a JSON-serializable dict. Byte strings are encoded as base64.

        Args:
          arrays: A dict that receives byte strings longer than 1 KiB as named uint8 arrays, to keep them out of the
            JSON. For example, the checkpoint of a tf.data iterator with a shuffle buffer takes up megabytes.
        """
        return {**dataclasses.asdict(self), "state": _extract_arrays(self.state, arrays)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], arrays: Mapping[str, Any] | None = None) -> "DatasetPosition":
        """Restores a position from the result of `to_dict` and the arrays that it extracted."""
        try:
            return cls(**{**values, "state": _insert_arrays(values.get("state"), arrays or {})})
        except TypeError as error:
            raise ValueError(f"DatasetPosition.from_dict needs a result of to_dict, got {values!r:.200}.") from error


_ARRAY_KEY = "jaxloop/beside"


def _extract_arrays(state: Any, arrays: dict[str, np.ndarray] | None) -> Any:
    """Returns the state in JSON-compatible form, with its long byte strings moved to `arrays`."""

    def extract(leaf: Any) -> Any:
        if not isinstance(leaf, bytes):
            return leaf
        if arrays is None or len(leaf) <= _MAX_INLINE:
            return encoding.encode(leaf)
        name = f"bytes_{len(arrays)}"
        arrays[name] = np.frombuffer(leaf, np.uint8)
        return {_ARRAY_KEY: name}

    return jax.tree.map(extract, state)


def _insert_arrays(state: Any, arrays: Mapping[str, Any]) -> Any:
    """Reverses `_extract_arrays`: returns the state with its long byte strings restored from `arrays`."""
    is_reference = lambda node: isinstance(node, dict) and _ARRAY_KEY in node
    insert = lambda node: np.asarray(arrays[node[_ARRAY_KEY]], np.uint8).tobytes() if is_reference(node) else node
    try:
        return jax.tree.map(insert, state, is_leaf=is_reference)
    except KeyError as error:
        raise ValueError(
            f"The array {error} of a position in the data is missing. Pass the arrays that to_dict extracted."
        ) from None


@final
class PositionedIterator(Wrapper, Iterator[types.Batch]):
    """A batch iterator that tracks the position after the last batch it returned, even if it reads ahead.

    >>> batches = [{"x": number} for number in range(5)]
    >>> iterator = PositionedIterator(batches)
    >>> [next(iterator)["x"] for _ in range(3)]
    [0, 1, 2]
    >>> saved = iterator.position().to_dict()
    >>> again = PositionedIterator(batches)
    >>> again.seek(DatasetPosition.from_dict(saved))
    >>> next(again)
    {'x': 3}

    A consumer that reads ahead calls `mark` whenever it has used all batches read so far, and later calls
    `position(count)`. Grain datasets, sequences, and index functions can return to a position directly. For tf.data, a
    checkpoint of the iterator is restored. If the last mark lies before the position, the batches between the two are
    read and skipped.

    Args:
      dataset: An iterator or iterable of batches. If this is a `PositionedIterator`, or if iterating over it creates
        one, the constructor returns that iterator.
      iterate: A function that creates an iterator over the dataset; None to use `iter`.
      prefetch: The number of batches that a background thread reads ahead; 0 for no thread.
      skippable: True if the dataset yields the same batches in the same order each time.

    Raises:
      TypeError: If the dataset is a single batch, or is not iterable.
    """

    def __new__(
        cls,
        dataset: Any,
        iterate: Callable[[Any], Iterator[types.Batch]] | None = None,
        *,
        prefetch: int = 0,
        skippable: bool = False,
    ) -> "PositionedIterator":
        check_is_dataset(dataset)
        iterate = _iterate if iterate is None else iterate
        start = random_state(dataset)  # Read it first: creating the iterator advances the generator.
        iterator = iterate(dataset)
        if isinstance(iterator, PositionedIterator):  # Two iterators would have two positions.
            iterator._skippable |= skippable
            if prefetch and (iterator._count or iterator._peeked or iterator._prefetch):
                raise ValueError(
                    f"prefetch={prefetch} needs data from which no batch was read or prefetched yet, got {iterator!r}. "
                    "Give the dataset itself."
                )
            if prefetch:
                iterator._prefetch = prefetch
                iterator._start_reading(iterator._iterator, *iterator._marks[-1])
            return iterator
        self = super().__new__(cls)
        self._set_up(dataset, iterate, prefetch, skippable)
        self._open(iterator, start)
        return self

    def _set_up(self, dataset: Any, iterate: Callable[[Any], Any], prefetch: int, skippable: bool) -> None:
        self.inner: Any = dataset
        self._iterate, self._prefetch, self._skippable = iterate, prefetch, skippable
        self._convert: Callable[[types.Batch], types.Batch] | None = None
        self._ahead: ReadAhead | None = None
        self._left_out: Sequence[int] = ()
        self._number_of_pass: int | None = None

    def _open(self, iterator: Iterator[types.Batch], start: Any) -> None:
        """Begins with a new iterator over the dataset. `start` is the dataset's random state before it was created."""
        self.close()
        self._source: Source = source_of(self.inner, iterator, start)
        self._length = num_batches(self.inner)
        self._start_reading(iterator, 0, self._source.read_start())

    def _start_reading(self, iterator: Iterator[types.Batch], count: int, state: Any) -> None:
        """Starts reading from an iterator that has returned `count` batches. `state` is the source's state then."""
        # Unlike `map`, this doesn't call `iter(iterator)`, which might start over.
        self._iterator, self._count = itertools.starmap(iterator.__next__, itertools.repeat(())), count
        self._peeked: list[types.Batch] = []  # At most one batch.
        self._recent: deque[types.Batch] = deque(maxlen=1)  # The latest batches returned.
        self._has_ended = False
        self._marks: deque[tuple[int, Any]] = deque([(count, state)], _MAX_MARKS)
        if self._prefetch:
            # Neither function may refer to this iterator: a reference cycle would keep the thread alive for too long.
            self._ahead = ReadAhead(map(functools.partial(_with_state, self._source), self._iterator), self._prefetch)
            self._iterator = map(functools.partial(_noted, self._marks), self._ahead, itertools.count(count + 1))
        self._batches = self._iterator if self._convert is None else map(self._convert, self._iterator)

    def __next__(self) -> types.Batch:
        while True:
            try:
                batch = self._peeked.pop() if self._peeked else next(self._batches)
            except StopIteration:
                self._has_ended = True
                raise
            self._count += 1
            self._recent.append(batch)
            if not self._left_out or self._count not in self._left_out:
                return batch

    def leave_out(self, numbers: Iterable[int]) -> None:
        """Leaves out some batches of this epoch: they are read, but not returned.

        >>> iterator = PositionedIterator([{"x": number} for number in range(5)])
        >>> iterator.leave_out([2, 4])
        >>> [batch["x"] for batch in iterator], iterator.count, iterator.position().count
        ([0, 2, 4], 3, 5)

        Args:
          numbers: The numbers of the batches to leave out. Batches are numbered from 1 in each epoch. If some of them
            have already been read, the caller must make sure that those were left out too. `seek` clears the numbers.
        """
        self._left_out = tuple(sorted(set(numbers)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({name_of(self.inner)}, after {self._count} batches)"

    @property
    def count(self) -> int:
        """The number of batches returned since the start of the epoch, not counting those left out."""
        return self._count - bisect.bisect_right(self._left_out, self._count)

    @property
    def num_read(self) -> int:
        """The number of batches in this epoch up to and including the last one returned, counting those left out."""
        return self._count

    def __length_hint__(self) -> int:
        if self._length is None:
            return NotImplemented
        left_out = sum(self._count < number <= self._length for number in self._left_out)
        return max(self._length - self._count, 0) - left_out

    @property
    def kind(self) -> str:
        """The form in which the source saves its position; see `DatasetPosition`."""
        return self._source.kind if not self._source.problem else "skip" if self._skippable else "unknown"

    @property
    def problem(self) -> str | None:
        """A message that explains why a position can't be restored and how to fix it; None if no problem is known."""
        return self._source.problem if self.kind == "unknown" else None

    def resume_warning(self, *, several_passes: bool = False) -> str | None:
        """Returns a message that explains why a resume won't be exact and how to fix that; None if no reason is known.

        Call this method before the first batch is read, because it may peek at that batch.

        Args:
          several_passes: True if the run trains for more than one epoch.
        """
        if self._source.kind == "tf.data" and self._ahead is None:  # Some states can't be saved after the first batch.
            with contextlib.suppress(StopIteration):
                self.peek()
            self._source.read()
        if self._source.kind == "tf.data" and not self.problem:
            return doubt_of_order(self.inner, several_passes)
        return self.problem and f"{self.problem} Until then, a resumed run will not continue at the right batch."

    # Batches -----------------------------------------------------------------------------------------

    def begin_pass(self, number: int) -> None:
        """Goes to the start of a pass over the dataset, unless the iterator is already in this pass.

        See `sources.pass_of`. Passes are numbered from 0.
        """
        dataset = pass_of(self.inner, number)
        if dataset is not self.inner and number != self._number_of_pass:
            self._number_of_pass, self.inner = number, dataset
            self._restart()

    def converted_by(self, convert: Callable[[types.Batch], types.Batch]) -> "PositionedIterator":
        """Makes the iterator apply a function to each batch that it returns. Returns the iterator itself."""
        if self._convert is not convert:
            self._convert, self._peeked = convert, [convert(batch) for batch in self._peeked]
            self._batches = map(convert, self._iterator)
        return self

    def peek(self) -> types.Batch:
        """Returns the next batch without consuming it.

        Raises:
          StopIteration: If there are no more batches.
        """
        if not self._peeked:
            if self._count > self._marks[-1][0]:
                self.mark()
            self._peeked.extend(itertools.islice(self._batches, 1))
            self._has_ended = not self._peeked
        return next(iter(self._peeked))

    def read_ahead(self) -> None:
        """Reads the next batch without consuming it. If that fails, the next read raises the error."""
        try:
            self.peek()
        except Exception as error:  # A generator, for example, would just end.
            self._batches = itertools.chain(map(_raise, [error]), self._batches)

    def skip(self, num_batches: int) -> None:
        """Reads and discards `num_batches` batches. If there are any, logs their number and how long this took.

        Raises:
          ValueError: If the dataset ends before that many batches have been read.
        """
        start, target = time.perf_counter(), self._count + num_batches
        while self._count < target:
            try:
                next(self)
            except StopIteration:
                raise ValueError(
                    f"The dataset, {name_of(self.inner)}, ended after {self._count} batches, before the position "
                    f"after {target}. Build it as it was when the position was saved."
                ) from None
        if num_batches:
            secs = time.perf_counter() - start
            logging.info("Skipped %d batches of %s in %.1f s.", num_batches, name_of(self.inner), secs)

    def close(self) -> None:
        """Stops the prefetch thread, if there is one. Doing so ends the iterator."""
        if self._ahead is not None:
            self._ahead.close()

    # Positions ---------------------------------------------------------------------------------------

    def mark(self, *, if_cheap: bool = False) -> None:
        """Stores the source's state as the basis for later positions.

        Call this once every batch that was read has been used. A mark takes microseconds for Grain and milliseconds for
        tf.data, and is free for sources whose position is a number. If a thread reads ahead, the mark is set after the
        next batch that the thread reads.

        Args:
          if_cheap: If True, the state is stored only if doing so takes no more than a few microseconds.
        """
        if if_cheap and not self._source.is_cheap:
            return
        marked, state = self._marks[-1]
        if self._ahead is not None and self._ahead.has_begun:
            self._source.is_requested = True
        elif not self._peeked and (marked < self._count or state is None):
            state = self._source.read()
            if state is not None:
                self._marks.append((self._count, state))

    def position(self, count: int | None = None) -> DatasetPosition:
        """Returns the position after the first `count` batches returned in this epoch, or after all of them if None.

        Raises:
          ValueError: If `count` is larger than the number of batches returned, or if the position lies before the
            oldest stored mark.
        """
        count = self._count if count is None else number_of(count, self._left_out)
        if count == self._count:
            self.mark()
        marked, state = next((mark for mark in reversed(self._marks) if mark[0] <= count), (None, None))
        if marked is None or count > self._count:
            raise ValueError(
                f"A position is available after {self._marks[0][0]} to {self._count} batches, from the oldest stored "
                f"mark to the last batch returned, got count={count}."
            )
        following = self._next_fingerprint(count)
        if state is not None and self._source.start is not None:
            return DatasetPosition(self.kind, count, state + count - marked, 0, following)
        if state is not None and not self._source.problem:
            return DatasetPosition(self.kind, count, state, count - marked, following)
        return DatasetPosition("skip" if self._skippable else "unknown", count, None, count, following)

    def _next_fingerprint(self, count: int) -> dict[str, Any] | None:
        """Returns the fingerprint of the batch after the first `count`; None if that batch hasn't been read."""
        recent = [*self._recent, *self._peeked]
        ahead = self._count + len(self._peeked) - count
        if ahead == 0:
            return END if self._has_ended else None
        if ahead <= len(recent):
            return fingerprint(recent[-ahead])
        self._recent = deque(self._recent, ahead)  # A job of several processes reads this far ahead.
        return None

    def seek(self, saved: DatasetPosition, *, raises: bool = False) -> None:
        """Moves to a position that was saved by an iterator over the same dataset, in this process or another one.

        If batches have to be skipped, logs how many there were and how long this took. If it is known which batch came
        next when the position was saved, compares it with the next batch.

        Args:
          saved: The position.
          raises: Whether to raise an error if the next batch differs. Otherwise, logs a warning that lists its leaves.

        Raises:
          PositionUnknownError: If the source can't return to the position.
          ValueError: If the position was saved by another kind of dataset or one with another batch size, if the
            dataset ends before the position, or if the next batch differs and `raises` is True.
        """
        check_kind(saved.kind, self)
        self._left_out = ()
        if saved.state is None and saved.count and not self._skippable:
            raise PositionUnknownError(
                f"The position after {saved.count} batches of {name_of(self.inner)} can't be restored: "
                + (self.problem or "batches were read ahead of it without a mark. Call mark() before reading ahead.")
            )
        if saved.state is not None:
            self.close()  # Stops the thread before the source is changed.
            self._start_reading(self._source.go_to(saved.state), saved.count - saved.skip, saved.state)
        elif self._count:
            self._restart()
        self.skip(saved.skip)
        if saved.next is not None:
            self._compare_next(saved.next, raises)

    def _compare_next(self, saved: Mapping[str, Any], raises: bool) -> None:
        """Compares the next batch with the fingerprint of the one that came next when a position was saved."""
        try:
            now = fingerprint(self.peek())
        except StopIteration:
            now = END
        lines = checks.change_lines(checks.changes(saved["leaves"], now["leaves"]))
        if not lines:
            return
        text = (
            f"The next batch of {name_of(self.inner)}, number {self._count + 1}, is not the one that came next when "
            "the position was saved. Differences (saved -> now):\n" + "\n".join(lines) + "\n"
        )
        if self.kind in NUMBERS and None not in (saved["rows"], now["rows"]) and saved["rows"] != now["rows"]:
            raise ValueError(f"{text}The position is a number of batches, so their size must stay the same.")
        text += (
            "If the dataset has changed, build it as it was. Otherwise, the dataset doesn't return exactly to a saved "
            f"position. Take its randomness from seeds or from generators whose states are saved, {OR_SKIPPABLE}."
        )
        if raises:
            raise ValueError(text)
        logging.warning("%s", text)

    def get_state(self) -> dict[str, Any]:
        """Returns the position as a dict, like the `get_state` method of Grain's iterators."""
        return self.position().to_dict()

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Moves to a position that `get_state` returned."""
        self.seek(DatasetPosition.from_dict(state))

    def _restart(self) -> None:
        """Goes to the start of the dataset."""
        start = random_state(self.inner)
        iterator = self._iterate(self.inner)
        if iterator is self.inner:
            raise PositionUnknownError(
                f"{self!r} has already been read from, and can't go back. Make a new iterator to go to a position."
            )
        self._open(iterator, start)


def _iterate(dataset: Any) -> Iterator[types.Batch]:
    return dataset if hasattr(dataset, "__next__") else iter(dataset)


def _raise(error: Exception) -> types.Batch:
    raise error


def _with_state(source: Source, batch: types.Batch) -> tuple[types.Batch, Any]:
    """Returns a batch and the source's state after it, or None if it isn't needed. The prefetch thread calls this."""
    if not source.is_cheap and not source.is_requested:
        return batch, None
    source.is_requested = False
    return batch, source.read()


def _noted(marks: deque[tuple[int, Any]], read: tuple[types.Batch, Any], count: int) -> types.Batch:
    """Returns the batch of a pair made by `_with_state`, and adds the state, if there is one, to the marks."""
    batch, state = read
    if state is not None:
        marks.append((count, state))
    return batch


def check_kind(saved: str, source: PositionedIterator) -> None:
    """Raises a `ValueError` if a saved position is of another kind than the positions of an iterator."""
    if saved not in ("skip", "unknown", source.kind):
        raise ValueError(
            f"The position in the data was saved from a different dataset: it is of the kind {saved!r}, and the "
            f"positions in {name_of(source.inner)} are of the kind {source.kind!r}. Build the same dataset, or start a "
            "new run in another directory."
        )


def number_of(count: int, left_out: Sequence[int]) -> int:
    """Returns the number, in the dataset, of the `count`-th batch that isn't left out; 0 if `count` is 0.

    The numbers in `left_out` must be in ascending order.

    >>> [number_of(count, [2, 3, 5]) for count in range(5)]
    [0, 1, 4, 6, 7]
    """
    for number in left_out:
        if number > count:
            break
        count += 1
    return count


@final
@dataclasses.dataclass(frozen=True)
class DataWithOptions(Wrapper, Iterable[types.Batch]):
    """A dataset with options for the iterators over it. Each iteration starts a new epoch."""

    inner: Any
    prefetch: int = 0
    skippable: bool = False

    def __iter__(self) -> PositionedIterator:
        data = self.inner() if is_function(self.inner) else self.inner
        return PositionedIterator(data, prefetch=self.prefetch, skippable=self.skippable)

    def __len__(self) -> int:
        return len(self.inner)


def with_options(data: Any, **options: Any) -> Iterable[types.Batch]:
    """Adds `PositionedIterator` options to a dataset. Returns an iterator if the dataset is one."""
    if isinstance(data, DataWithOptions):
        return dataclasses.replace(data, **options)
    if hasattr(data, "__next__"):
        return PositionedIterator(data, **options)
    if not is_function(data):
        check_is_dataset(data)
    return DataWithOptions(data, **options)


def skippable(data: Any) -> Iterable[types.Batch]:
    """Declares that a dataset yields the same batches in the same order each time it is created.

    Some datasets, such as generators or the result of `tfds.as_numpy`, can't save their position. With this
    declaration, a resumed run reads and skips the batches that were already used, and logs how many there were and how
    long this took. The declaration has no effect on a dataset that can save its position.

    With `train_epochs`, the dataset is created again for each epoch, and its batches must have the same order every
    time. This rules out data whose order changes with each epoch, such as a PyTorch `DataLoader` that shuffles. Pass
    such data as one endless generator with `train_total_steps`, or use `from_index`.

    >>> iterator = iter(skippable(lambda: ({"x": number} for number in range(5))))
    >>> next(iterator), iterator.position().kind
    ({'x': 0}, 'skip')

    Args:
      data: An iterator or iterable of batches, or a function without arguments that returns one.

    Returns:
      An iterable of batches; an iterator if `data` is an iterator.
    """
    return with_options(data, skippable=True)


def prove(data: Any) -> str | None:
    """Checks that a fresh iterator over a dataset can return to a position, by reading three batches twice.

    Returns a message that explains how the third batch differs and what to do, or that the second batch has overwritten
    the first one. Returns None if neither is the case, or if the dataset has no positions or is an iterator.

    >>> prove([1, 2, 3, 4]) is None
    True
    """
    if hasattr(data, "__next__"):
        return None
    with keeping_random_state(data):
        with contextlib.closing(PositionedIterator(data)) as first:
            kept = list(itertools.islice(first, 1))
            found = list(map(fingerprint, kept))
            for _ in itertools.islice(first, 1):
                if list(map(fingerprint, kept)) != found:
                    return (
                        "It changes each batch when it returns the next one, so a run that reads ahead, or several "
                        "steps in one dispatch, would use a wrong batch. Yield new arrays."
                    )
            with contextlib.suppress(StopIteration):
                first.peek()
            saved = first.position()
        if saved.kind == "unknown":
            return None
        with contextlib.closing(PositionedIterator(data)) as again:
            try:
                again.seek(saved, raises=True)
            except ValueError as error:
                return f"A resumed run won't continue at the right batch. {error}"
    return None
