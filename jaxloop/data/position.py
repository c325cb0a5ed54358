"""Iterators that track their position in a dataset and can return to a saved position."""

import bisect
import contextlib
import dataclasses
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
    KINDS,
    NUMBERS,
    OR_SKIPPABLE,
    Source,
    check_is_dataset,
    doubt_of_order,
    is_endless,
    is_function,
    keeping_random_state,
    name_of,
    num_batches,
    pass_of,
    random_state,
    source_of,
    unknown_reason,
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
        if self.kind not in KINDS:
            raise ValueError(f"DatasetPosition.kind must be one of {', '.join(KINDS)}, got {self.kind!r}.")
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
        names = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(values, Mapping) or not {"kind", "count"} <= set(values) <= names:
            got = sorted(values) if isinstance(values, Mapping) else checks.describe(values)
            raise ValueError(
                f"DatasetPosition.from_dict needs a result of to_dict, with keys {sorted(names)}, got {got}."
            )
        return cls(**{**values, "state": _insert_arrays(values.get("state"), arrays or {})})


def _applied(convert: Callable[[types.Batch], types.Batch] | None, read: Callable[[], types.Batch]) -> Any:
    return read if convert is None else lambda: convert(read())


UNPROVEN = (
    "the dataset doesn't return exactly to a saved position. Take its randomness from seeds or from generators whose "
    f"states are saved, {OR_SKIPPABLE}."
)

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
class PositionedIterator(Iterator[types.Batch]):
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

    _dataset: Any
    _iterate: Callable[[Any], Any]
    _prefetch: int
    _skippable: bool
    _source: Source
    _convert: Callable[[types.Batch], types.Batch] | None
    _ahead: ReadAhead | None
    _left_out: Sequence[int]
    _number_of_pass: int | None

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
            if prefetch:
                iterator._read_ahead_of(prefetch)
            return iterator
        self = super().__new__(cls)
        self._dataset, self._iterate, self._prefetch, self._skippable = dataset, iterate, prefetch, skippable
        self._source = source_of(dataset, iterator, start)
        self._convert = None
        self._ahead = None
        self._left_out = ()
        self._number_of_pass = None
        self._start_reading(iterator)
        return self

    def _start_reading(self, iterator: Iterator[types.Batch], count: int = 0, state: Any = None) -> None:
        """Starts reading from an iterator that has returned `count` batches. `state` is the source's state then."""
        self.close()
        self._iterator, self._count = iterator, count
        self._peeked: list[types.Batch] = []  # At most one batch.
        self._recent: deque[types.Batch] = deque(maxlen=1)  # The latest batches returned.
        self._has_ended = False
        self._marks: deque[tuple[int, Any]] = deque([(count, state or self._source.read_start())], _MAX_MARKS)
        self._reader: Callable[[], types.Batch] = iterator.__next__
        if self._prefetch:
            self._ahead = ReadAhead(
                iterator, self._prefetch, self._source.read, always_reads_state=self._source.is_cheap
            )
            self._reader = _make_reader(self._ahead, self._marks, count)
        self._read_batch: Callable[[], types.Batch] = _applied(self._convert, self._reader)

    def _read_ahead_of(self, prefetch: int) -> None:
        if self._count or self._peeked or self._prefetch:
            raise ValueError(
                f"prefetch={prefetch} needs data from which no batch was read or prefetched yet, got {self!r}. Give "
                "the dataset itself."
            )
        self._prefetch = prefetch
        self._start_reading(self._iterator, *self._marks[-1])

    def __next__(self) -> types.Batch:
        while True:
            try:
                batch = self._peeked.pop() if self._peeked else self._read_batch()
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
        return f"{type(self).__name__}({name_of(self._dataset)}, after {self._count} batches)"

    @property
    def count(self) -> int:
        """The number of batches returned since the start of the epoch, not counting those left out."""
        return self._count - bisect.bisect_right(self._left_out, self._count)

    @property
    def num_read(self) -> int:
        """The number of batches in this epoch up to and including the last one returned, counting those left out."""
        return self._count

    @property
    def is_endless(self) -> bool:
        """True if the dataset is known to be endless."""
        return is_endless(self._dataset)

    @property
    def inner(self) -> Any:
        """The dataset or iterator from which the batches are read."""
        return self._dataset

    def __length_hint__(self) -> int:
        if self._iterator is self._dataset:
            if self._prefetch:  # The thread has read an unknown number of batches ahead.
                return NotImplemented
            left = num_batches(self._iterator)
            left = None if left is None else left + len(self._peeked)
        else:
            whole = num_batches(self._dataset)
            left = None if whole is None else max(whole - self._count, 0)
        if left is None:
            return NotImplemented
        return left - sum(self._count < number <= self._count + left for number in self._left_out)

    @property
    def kind(self) -> str:
        """The form in which the source saves its position; see `DatasetPosition`."""
        return self._source.kind if self._source.kind and not self._source.problem else self._kind_without_state

    @property
    def _kind_without_state(self) -> str:
        return "skip" if self._skippable else "unknown"

    @property
    def problem(self) -> str | None:
        """A message that explains why a position can't be restored and how to fix it; None if no problem is known."""
        return (self._source.problem or unknown_reason(self._dataset)) if self.kind == "unknown" else None

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
            return doubt_of_order(self._dataset, several_passes)
        return self.problem and f"{self.problem} Until then, a resumed run will not continue at the right batch."

    # Batches -----------------------------------------------------------------------------------------

    def begin_pass(self, number: int) -> None:
        """Goes to the start of a pass over the dataset, unless the iterator is already in this pass.

        See `sources.pass_of`. Passes are numbered from 0.
        """
        dataset = pass_of(self._dataset, number)
        if dataset is not self._dataset and number != self._number_of_pass:
            self._number_of_pass, self._dataset = number, dataset
            self._start_reading(self._fresh_iterator())

    def converted_by(self, convert: Callable[[types.Batch], types.Batch]) -> "PositionedIterator":
        """Makes the iterator apply a function to each batch that it returns. Returns the iterator itself."""
        if self._convert is not convert:
            self._convert, self._read_batch = convert, _applied(convert, self._reader)
            self._peeked = [convert(batch) for batch in self._peeked]
        return self

    def peek(self) -> types.Batch:
        """Returns the next batch without consuming it.

        Raises:
          StopIteration: If there are no more batches.
        """
        if not self._peeked:
            if self._count > self._marks[-1][0]:
                self.mark()
            try:
                self._peeked.append(self._read_batch())
            except StopIteration:
                self._has_ended = True
                raise
        return self._peeked[0]

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
                    f"The dataset, {name_of(self._dataset)}, ended after {self._count} batches, before the position "
                    f"after {target}. Build it as it was when the position was saved."
                ) from None
        if num_batches:
            secs = time.perf_counter() - start
            logging.info("Skipped %d batches of %s in %.1f s.", num_batches, name_of(self._dataset), secs)

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
            self._ahead.request_state()
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
        if self._source.start is not None:
            return DatasetPosition(self.kind, count, self._source.start + count, 0, following)
        if state is not None and not self._source.problem:
            return DatasetPosition(self._source.kind, count, state, count - marked, following)
        return DatasetPosition(self._kind_without_state if count else self.kind, count, None, count, following)

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
        self._go_to(saved)
        lines, sizes = _changes(saved, self)
        if not lines:
            return
        text = (
            f"The next batch of {name_of(self._dataset)}, number {saved.count + 1}, is not the one that came next when "
            "the position was saved. Differences (saved -> now):\n" + "\n".join(lines) + "\n"
        )
        if self.kind in NUMBERS and None not in sizes and sizes[0] != sizes[1]:
            raise ValueError(f"{text}The position is a number of batches, so their size must stay the same.")
        text += f"If the dataset has changed, build it as it was. Otherwise, {UNPROVEN}"
        if raises:
            raise ValueError(text)
        logging.warning("%s", text)

    def _go_to(self, saved: DatasetPosition) -> None:
        check_kind(saved.kind, self)
        self._left_out = ()
        if saved.state is None and saved.count and not self._skippable:
            raise PositionUnknownError(
                f"The position after {saved.count} batches of {name_of(self._dataset)} can't be restored: "
                + (self.problem or "batches were read ahead of it without a mark. Call mark() before reading ahead.")
            )
        if saved.state is not None:
            self.close()  # Stops the thread before the source is changed.
            self._start_reading(self._source.restore(saved.state), saved.count - saved.skip, saved.state)
        elif self._count:
            self._start_reading(self._fresh_iterator())
        self.skip(saved.skip)

    def get_state(self) -> dict[str, Any]:
        """Returns the position as a dict, like the `get_state` method of Grain's iterators."""
        return self.position().to_dict()

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Moves to a position that `get_state` returned."""
        self.seek(DatasetPosition.from_dict(state))

    def _fresh_iterator(self) -> Iterator[types.Batch]:
        start = random_state(self._dataset)
        iterator = self._iterate(self._dataset)
        if iterator is self._dataset:
            raise PositionUnknownError(
                f"{self!r} has already been read from, and can't go back. Make a new iterator to go to a position."
            )
        self.close()
        self._source = source_of(self._dataset, iterator, start)
        return iterator


def check_kind(saved: str, source: PositionedIterator) -> None:
    """Raises a `ValueError` if a saved position is of another kind than the positions of an iterator."""
    if saved not in ("skip", "unknown", source.kind):
        raise ValueError(
            f"The position in the data was saved from a different dataset: it is of the kind {saved!r}, and the "
            f"positions in {name_of(source.inner)} are of the kind {source.kind!r}. Build the same dataset, or start a "
            "new run in another directory."
        )


def _changes(saved: DatasetPosition, source: PositionedIterator) -> tuple[list[str], tuple[int | None, int | None]]:
    """Returns a line for each leaf in which the next batch differs from the saved one, and the sizes of both."""
    if saved.next is None:
        return [], (None, None)
    try:
        now = fingerprint(source.peek())
    except StopIteration:
        now = END
    lines = checks.change_lines(checks.changes(saved.next["leaves"], now["leaves"]))
    return lines, (saved.next["rows"], now["rows"])


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


def _iterate(dataset: Any) -> Iterator[types.Batch]:
    return dataset if hasattr(dataset, "__next__") else iter(dataset)


def _make_reader(ahead: ReadAhead, marks: deque[tuple[int, Any]], start: int) -> Callable[[], types.Batch]:
    """Returns a function that takes batches from a prefetch thread.

    The function is not a method, because a reference cycle would then keep the iterator and its thread alive for too
    long.
    """

    def read() -> types.Batch:
        taken = ahead.take()
        if taken.error is not None:
            raise taken.error
        if taken.state is not None:
            marks.append((start + taken.number, taken.state))
        return taken.batch

    return read


@final
@dataclasses.dataclass(frozen=True)
class DataWithOptions(Iterable[types.Batch]):
    """A dataset with options for the iterators over it. Each iteration starts a new epoch."""

    data: Any
    prefetch: int = 0
    skippable: bool = False

    def __iter__(self) -> PositionedIterator:
        data = self.data() if is_function(self.data) else self.data
        return PositionedIterator(data, prefetch=self.prefetch, skippable=self.skippable)

    @property
    def is_endless(self) -> bool:
        """True if an epoch is known to be endless."""
        return is_endless(self.data)

    @property
    def inner(self) -> Any:
        """The dataset without the options."""
        return self.data

    def with_inner(self, data: Any) -> "DataWithOptions":
        """Returns another dataset with the same options."""
        return dataclasses.replace(self, data=data)

    def __len__(self) -> int:
        return len(self.data)


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

    Returns a message that explains how the third batch differs and what to do. Returns None if it is the same, or if
    the dataset has no positions or is an iterator.

    >>> prove([1, 2, 3, 4]) is None
    True
    """
    if hasattr(data, "__next__"):
        return None
    with keeping_random_state(data):
        first = PositionedIterator(data)
        for _ in itertools.islice(first, 2):
            pass
        with contextlib.suppress(StopIteration):
            first.peek()
        saved = first.position()
        first.close()
        if saved.kind == "unknown":
            return None
        again = PositionedIterator(data)
        again._go_to(saved)
        lines, _ = _changes(saved, again)
        again.close()
    if not lines:
        return None
    return (
        f"A resumed run won't continue at the right batch of {name_of(first.inner)}: after a return to the position "
        f"after {saved.count} batches, the next one differs (before -> after):\n"
        + "\n".join(lines)
        + f"\nNote that {UNPROVEN}"
    )
