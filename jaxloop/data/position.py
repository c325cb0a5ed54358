"""Iterators that track their position in a dataset and can return to a saved position."""

import contextlib
import dataclasses
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, final

import jax
import numpy as np
from absl import logging

from jaxloop import types
from jaxloop.base import checks, encoding
from jaxloop.data.fingerprint import END, fingerprint
from jaxloop.data.reader import Reader
from jaxloop.data.sources import (
    NUMBERS,
    OR_SKIPPABLE,
    Wrapper,
    check_is_dataset,
    is_function,
    keeping_random_state,
    name_of,
    num_batches,
    pass_of,
    random_state,
    source_of,
)
from jaxloop.data.tensors import numpy_batch

# The maximum length in bytes of a byte string that stays in the JSON rather than being stored as an array.
_MAX_INLINE = 1024
_ARRAY_KEY = "jaxloop/beside"


class PositionUnknownError(ValueError):
    """Raised if the position of an iterator is unknown or can't be restored."""


@final
@dataclasses.dataclass(frozen=True)
class DatasetPosition:
    """The position of an iterator in its dataset, with everything that is needed to return to that position.

    >>> position = DatasetPosition("state", count=5, state={"dict": {"next_index": 3}}, skip=2)
    >>> DatasetPosition.from_dict(position.to_dict()) == position
    True

    Attributes:
      kind: The form of the saved position:

        - "state": The result of `get_state`, which `set_state` restores.
        - "state_dict": The result of `state_dict`, which `load_state_dict` restores.
        - "tf.data": A tf.data checkpoint of the iterator.
        - "torch": The state of the random number generators at the start of the epoch.
        - "sequence" and "index": The index of the next batch.
        - "skip": No state. The order of the batches is the same each time, so the consumed batches are read again and
          skipped.
        - "unknown": No state, and no way to return to the position.
      count: The number of batches consumed since the start of the epoch, including batches that were left out (see
        `PositionedIterator.left_out`).
      state: The encoded state of the source at the position or at a mark before it (see `PositionedIterator.mark`). May
        contain raw bytes. For "sequence" and "index", the index of the next batch. For "skip" and "unknown", None.
      skip: The number of batches to read and skip after restoring `state`. If `state` is None, these are the first
        batches of the epoch.
      next: The `fingerprint` of the next batch, or None if that batch hasn't been read. After returning to the
        position, a resumed run compares this fingerprint with that of the batch it reads next.
    """

    kind: str
    count: int
    state: Any = None
    skip: int = 0
    next: Mapping[str, Any] | None = None

    def to_dict(self, arrays: dict[str, np.ndarray] | None = None) -> dict[str, Any]:
        """Returns the position as a JSON-serializable dict. Byte strings are encoded as base64.

        Args:
          arrays: A dict that receives byte strings longer than 1 KiB as named uint8 arrays, to keep them out of the
            JSON. For example, the checkpoint of a tf.data iterator with a shuffle buffer takes up megabytes. If
            `arrays` is None, all byte strings are part of the JSON.
        """

        def extract(leaf: Any) -> Any:
            if not isinstance(leaf, bytes):
                return leaf
            if arrays is None or len(leaf) <= _MAX_INLINE:
                return encoding.encode(leaf)
            name = f"bytes_{len(arrays)}"
            arrays[name] = np.frombuffer(leaf, np.uint8)
            return {_ARRAY_KEY: name}

        return {**dataclasses.asdict(self), "state": jax.tree.map(extract, self.state)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], arrays: Mapping[str, Any] | None = None) -> "DatasetPosition":
        """Restores a position from the result of `to_dict` and the arrays that `to_dict` extracted."""

        def insert(node: Any) -> Any:
            return np.asarray((arrays or {})[node[_ARRAY_KEY]], np.uint8).tobytes() if is_array(node) else node

        is_array = lambda node: isinstance(node, dict) and _ARRAY_KEY in node
        return cls(**{**values, "state": jax.tree.map(insert, values["state"], is_leaf=is_array)})


@final
class PositionedIterator(Wrapper, Iterator[types.Batch]):
    """A batch iterator that tracks the position after the last batch that it returned, even if it reads ahead.

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
    `position(count)`. In Grain datasets, sequences, and the results of `from_index`, `seek` jumps directly to a
    position. For tf.data, it restores a checkpoint of the tf.data iterator. If the last mark comes before the position,
    the batches in between are read and skipped.

    Args:
      dataset: An iterator or iterable of batches. If it is a `PositionedIterator`, or if iterating over it creates one,
        the constructor returns that `PositionedIterator`.
      prefetch: The number of batches that a background thread reads ahead, or 0 for no thread.
      skippable: Whether the dataset yields the same batches in the same order each time it is read.
      to_numpy: Whether to convert tensors to NumPy arrays; see `numpy_batch`.

    Attributes:
      count: The number of batches read since the start of the epoch, up to and including the last one returned.
      left_out: The numbers (counting from 1) of the batches in this epoch that are read but not returned. `seek` resets
        this attribute to an empty collection.

    Raises:
      TypeError: If the dataset is a single batch or isn't iterable.
    """

    _skippable: bool
    _to_numpy: bool

    def __new__(
        cls, dataset: Any, *, prefetch: int = 0, skippable: bool = False, to_numpy: bool = False
    ) -> "PositionedIterator":
        check_is_dataset(dataset)
        start = random_state(dataset)  # Read it first: creating the iterator advances the generator.
        iterator = _iterate(dataset, to_numpy)
        if not isinstance(iterator, PositionedIterator):
            self = super().__new__(cls)
            self.inner = dataset
            self._skippable, self._to_numpy = skippable, to_numpy
            self._open(iterator, start, prefetch)
            return self
        self, reader = iterator, iterator._reader  # Two iterators would have two positions.
        self._skippable |= skippable
        self._to_numpy |= to_numpy
        if prefetch:
            if self.count or reader.peeked or reader.prefetch:
                raise ValueError(
                    f"prefetch={prefetch} needs data from which no batch was read or prefetched yet, got {self!r}. "
                    "Give the dataset itself."
                )
            self._reader = Reader(reader.source, reader.batches, *reader.marks[-1], prefetch)
        return self

    def _open(self, iterator: Iterator[types.Batch], start: Any, prefetch: int) -> None:
        """Starts reading from a new iterator over the dataset.

        Args:
          iterator: The iterator.
          start: The dataset's random state before the iterator was created.
          prefetch: The number of batches to read ahead.
        """
        source = source_of(self.inner, iterator, start)
        state = source.read() if source.start is None else source.start
        self._reader, self._length = Reader(source, iterator, 0, state, prefetch), num_batches(self.inner)
        self.count: int = 0
        self.left_out: Collection[int] = ()

    def __next__(self) -> types.Batch:
        reader = self._reader  # Calling a function here would slow down every step.
        while True:
            try:
                batch = reader.peeked.pop() if reader.peeked else next(reader.batches)
            except StopIteration:
                reader.has_ended = True
                raise
            reader.recent.append(batch)
            self.count += 1
            if self.count not in self.left_out:
                return numpy_batch(batch) if self._to_numpy else batch

    def __repr__(self) -> str:
        return f"{type(self).__name__}({name_of(self.inner)}, after {self.count} batches)"

    def __length_hint__(self) -> int:
        if self._length is None:
            return NotImplemented
        left_out = sum(self.count < number <= self._length for number in self.left_out)
        return max(self._length - self.count, 0) - left_out

    @property
    def kind(self) -> str:
        """The kind of position that this iterator saves; see `DatasetPosition`."""
        source = self._reader.source
        return source.kind if not source.problem else "skip" if self._skippable else "unknown"

    @property
    def problem(self) -> str | None:
        """A message that explains why a position can't be restored and what to do, or None if no problem is known."""
        return self._reader.source.problem if self.kind == "unknown" else None

    def resume_warning(self) -> str | None:
        """Returns a message that explains why resuming won't be exact and what to do, or None if no problem is known.

        Call this method before the first batch is read, because the method may peek at that batch.
        """
        source = self._reader.source
        if source.kind == "tf.data" and not self._reader.prefetch:  # Some states can't be saved after the first batch.
            with contextlib.suppress(StopIteration):
                self.peek()
            source.read()
        return self.problem and f"{self.problem} Until then, a resumed run will not continue at the right batch."

    def begin_pass(self, number: int) -> None:
        """Moves to the start of pass `number`, counting from 0; see `sources.pass_of`.

        Does nothing if all passes over the dataset are the same.
        """
        dataset = pass_of(self.inner, number)
        if dataset is not self.inner:
            self.inner = dataset
            self._restart()

    def peek(self) -> types.Batch:
        """Returns the next batch without consuming it. If reading it fails, the next read raises the same error.

        Raises:
          StopIteration: If there are no more batches.
        """
        self.mark()
        batch = self._reader.peek()
        return numpy_batch(batch) if self._to_numpy else batch

    def close(self) -> None:
        """Stops the prefetch thread and ends the iterator, or does nothing if there is no thread."""
        self._reader.close()

    # Positions ---------------------------------------------------------------------------------------

    def mark(self, *, if_cheap: bool = False) -> None:
        """Stores the current state of the source as a mark, from which later positions can be reached.

        A position consists of the latest mark before it and the number of batches to skip after that mark. Call this
        method when all batches read so far have been used. Storing the state takes microseconds for Grain, milliseconds
        for tf.data, and no time for sources whose position is a number. A prefetch thread stores marks itself, but only
        if doing so takes microseconds.

        Args:
          if_cheap: Whether to store the state only if doing so takes no more than a few microseconds.
        """
        if self._reader.source.is_cheap or not if_cheap:
            self._reader.mark(self.count)

    def position(self, count: int | None = None) -> DatasetPosition:
        """Returns the position after the first `count` batches of this epoch (by default, after all returned batches).

        Raises:
          ValueError: If `count` is larger than the number of batches read, or if the position comes before the oldest
            stored mark.
        """
        count = self.count if count is None else count
        if count == self.count:
            self.mark()
        marks, source = self._reader.marks.copy(), self._reader.source  # The thread may add marks.
        marked, state = next((mark for mark in reversed(marks) if mark[0] <= count), (None, None))
        if marked is None or count > self.count:
            raise ValueError(
                f"A position is available after {marks[0][0]} to {self.count} batches, from the oldest stored mark to "
                f"the last batch returned, got count={count}."
            )
        kind, skip = self.kind, count - marked
        if state is None or source.problem:
            kind, state, skip = "skip" if self._skippable else "unknown", None, count
        elif isinstance(source.start, int):
            state, skip = state + skip, 0
        return DatasetPosition(kind, count, state, skip, self._reader.fingerprint(self.count - count))

    def seek(self, saved: DatasetPosition, *, raises: bool = False) -> None:
        """Moves to a position that was saved by an iterator over the same dataset, in this process or another one.

        If batches have to be skipped, logs their number. If the position contains a fingerprint of the next batch,
        checks that this iterator's next batch has the same fingerprint.

        Args:
          saved: The position.
          raises: Whether to raise an error if the next batch has a different fingerprint. If False, a warning that
            lists the differences is logged instead.

        Raises:
          PositionUnknownError: If the source can't return to the position.
          ValueError: If the position was saved by a different kind of dataset or with a different batch size, if the
            dataset ends before the position, or if the next batch has a different fingerprint and `raises` is True.
        """
        check_kind(saved.kind, self)
        self.left_out, source, prefetch = (), self._reader.source, self._reader.prefetch
        if saved.state is not None:
            self.close()  # Stops the thread before the source is changed.
            marked = saved.count - saved.skip
            self._reader = Reader(source, source.go_to(saved.state), marked, saved.state, prefetch)
            self.count = marked
        elif saved.count and not self._skippable:
            raise PositionUnknownError(
                f"The position after {saved.count} batches of {name_of(self.inner)} can't be restored: "
                + (self.problem or "batches were read ahead of it without a mark. Call mark() before reading ahead.")
            )
        elif self.count:
            self._restart()
        skip_to(self, saved.count)
        if saved.next is not None:
            _compare_next(self, saved.next, raises)

    def _restart(self) -> None:
        start = random_state(self.inner)
        iterator = _iterate(self.inner, self._to_numpy)
        if iterator is self.inner:
            raise PositionUnknownError(
                f"{self!r} has already been read from, and can't go back. Make a new iterator to go to a position."
            )
        self.close()
        self._open(iterator, start, self._reader.prefetch)


def _iterate(dataset: Any, to_numpy: bool) -> Iterator[types.Batch]:
    if to_numpy and hasattr(dataset, "as_numpy_iterator"):
        return dataset.as_numpy_iterator()
    return dataset if hasattr(dataset, "__next__") else iter(dataset)


def skip_to(iterator: PositionedIterator, count: int) -> None:
    """Reads and discards batches until `count` batches have been read since the start of the epoch."""
    if iterator.count < count:
        logging.info("Reading and skipping %d batches of %s.", count - iterator.count, name_of(iterator.inner))
    while iterator.count < count:
        try:
            next(iterator)
        except StopIteration:
            raise ValueError(
                f"The dataset, {name_of(iterator.inner)}, ended after {iterator.count} batches, before the position "
                f"after {count}. Build it as it was when the position was saved."
            ) from None


def _compare_next(iterator: PositionedIterator, saved: Mapping[str, Any], raises: bool) -> None:
    """Checks that the next batch has the saved fingerprint.

    If the fingerprints differ, raises an error (if `raises` is True) or logs a warning. If the position is stored as a
    batch count, a different batch size always raises an error.
    """
    try:
        now = fingerprint(iterator.peek())
    except StopIteration:
        now = END
    lines = checks.change_lines(checks.changes(saved["leaves"], now["leaves"]))
    if not lines:
        return
    text = (
        f"The next batch of {name_of(iterator.inner)}, number {iterator.count + 1}, is not the one that came next when "
        "the position was saved. Differences (saved -> now):\n" + "\n".join(lines) + "\n"
    )
    if iterator.kind in NUMBERS and None not in (saved["rows"], now["rows"]) and saved["rows"] != now["rows"]:
        raise ValueError(f"{text}The position is a number of batches, so their size must stay the same.")
    text += (
        "If the dataset has changed, build it as it was. Otherwise, the dataset doesn't return exactly to a saved "
        f"position. Take its randomness from seeds or from generators whose states are saved, {OR_SKIPPABLE}."
    )
    if raises:
        raise ValueError(text)
    logging.warning("%s", text)


def check_kind(saved: str, source: PositionedIterator) -> None:
    """Raises a `ValueError` if a position of the kind `saved` can't belong to the dataset of the iterator `source`."""
    if saved not in ("skip", "unknown", source.kind):
        raise ValueError(
            f"The position in the data was saved from a different dataset: it is of the kind {saved!r}, and the "
            f"positions in {name_of(source.inner)} are of the kind {source.kind!r}. Build the same dataset, or start a "
            "new run in another directory."
        )


def number_before(number: int, before: int, left_out: Collection[int]) -> int:
    """Counts back from batch `number` by `before` used batches, and returns the number of the batch reached.

    Batches are numbered from 1. All batches except those in `left_out` are used. If batch `number` itself is left out,
    counting begins at the last used batch before it. Returns 0 if there are too few used batches.

    >>> [number_before(number, 0, [2, 3, 5]) for number in range(8)]
    [0, 1, 1, 1, 4, 4, 6, 7]
    >>> [number_before(7, before, [2, 3, 5]) for before in range(5)]
    [7, 6, 4, 1, 0]
    """
    while number > 0 and (before > 0 or number in left_out):
        before -= number not in left_out
        number -= 1
    return number


@final
@dataclasses.dataclass(frozen=True)
class DataWithOptions(Wrapper, Iterable[types.Batch]):
    """A dataset with options for its iterators. Each call to `iter` starts a new epoch."""

    inner: Any
    prefetch: int = 0
    skippable: bool = False

    def __iter__(self) -> PositionedIterator:
        data = self.inner() if is_function(self.inner) else self.inner
        return PositionedIterator(data, prefetch=self.prefetch, skippable=self.skippable)

    def __len__(self) -> int:
        return len(self.inner)


def with_options(data: Any, **options: Any) -> Iterable[types.Batch]:
    """Attaches options for `PositionedIterator` to a dataset.

    Returns an iterator if the dataset is an iterator; otherwise a dataset.
    """
    if isinstance(data, DataWithOptions):
        return dataclasses.replace(data, **options)
    if hasattr(data, "__next__"):
        return PositionedIterator(data, **options)
    if not is_function(data):
        check_is_dataset(data)
    return DataWithOptions(data, **options)


def skippable(data: Any) -> Iterable[types.Batch]:
    """Declares that a dataset yields the same batches in the same order each time it is read.

    Some datasets, such as generators or the result of `tfds.as_numpy`, can't save their position. With this
    declaration, a resumed run reads and skips the batches that were already used, and logs their number. The
    declaration has no effect on a dataset that can save its position.

    With `train_epochs`, the dataset is read again in each epoch, and its batches must come in the same order every
    time. This rules out data whose order changes with each epoch, such as a PyTorch `DataLoader` that shuffles. Pass
    such data as a single endless generator, together with `train_total_steps`, or use `from_index`.

    >>> iterator = iter(skippable(lambda: ({"x": number} for number in range(5))))
    >>> next(iterator), iterator.position().kind
    ({'x': 0}, 'skip')

    Args:
      data: An iterator or iterable of batches, or a function without arguments that returns one.

    Returns:
      An iterator if `data` is an iterator; otherwise an iterable.
    """
    return with_options(data, skippable=True)


def prove(data: Any) -> str | None:
    """Checks that a new iterator over a dataset can return to a saved position. Returns a message if it can't.

    The check reads two batches, saves the position, moves a second iterator to that position, and compares the next
    batches of the two iterators. The message explains the differences and what to do. A message is also returned if
    reading the second batch overwrites the first one. Returns None if no problem is found, if the dataset is an
    iterator, or if positions in the dataset can't be saved.

    >>> prove([1, 2, 3, 4]) is None
    True
    """
    if hasattr(data, "__next__"):
        return None
    with keeping_random_state(data):
        with contextlib.closing(PositionedIterator(data)) as first:
            read = [(batch, fingerprint(batch)) for batch in itertools.islice(first, 2)]
            if any(fingerprint(batch) != found for batch, found in read):
                return (
                    "It changes each batch when it returns the next one, so a run that reads ahead, or several steps "
                    "in one dispatch, would use a wrong batch. Yield new arrays."
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
