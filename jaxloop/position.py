"""Iterators that know where they are in their data, and go there again."""

import contextlib
import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, final

import jax
import numpy as np
from absl import logging

from jaxloop import checks, encoding, types
from jaxloop.fingerprint import check_same, describe_batch, describe_source
from jaxloop.read_ahead import ReadAhead
from jaxloop.sources import (
    KINDS,
    Source,
    check_is_dataset,
    is_endless,
    is_function,
    name_of,
    num_batches,
    random_state,
    source_of,
    why_unknown,
)

# How many marks are kept: a consumer that draws ahead asks for a position that is at most a few marks old.
_MAX_MARKS = 16
# How long a byte string may be that stays in the JSON where there is a place beside it.
_MAX_INLINE = 1024


class PositionUnknownError(ValueError):
    """The source of an iterator can't say where it is, or can't go there."""


@final
@dataclasses.dataclass(frozen=True)
class DatasetPosition:
    """The position of an iterator in its data: how many batches of this pass were consumed, and how to get there.

    >>> position = DatasetPosition("state", count=5, state={"dict": {"next_index": 3}}, skip=2)
    >>> DatasetPosition.from_dict(position.to_dict()) == position
    True

    Attributes:
      kind: how the source says where it is: "state" (`get_state`, `set_state`), "state_dict" (`state_dict`,
        `load_state_dict`), "tf.data" (the iterator's checkpoint), "torch" (PyTorch's random number generators at the
        start of the pass), "sequence" and "index" (a number), "skip" (it can't, and comes in the same order each time),
        "unknown" (it can't).
      count: batches consumed since the start of the pass.
      state: the source's own state at the newest mark, by `jaxloop.encoding`, or with bytes as they are; None for the
        start of the pass.
      skip: batches consumed since that mark.
      fingerprint: what identifies the data, as lines: "source" for the parts of the pipeline, "batch" for the leaves of
        the first batch, once there was one.
    """

    kind: str
    count: int
    state: Any = None
    skip: int = 0
    fingerprint: Mapping[str, list[str]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"DatasetPosition.kind must be one of {', '.join(KINDS)}, got {self.kind!r}.")
        if not 0 <= self.skip <= self.count:
            raise ValueError(f"A DatasetPosition needs 0 <= skip <= count, got skip={self.skip}, count={self.count}.")

    def to_dict(self, arrays: dict[str, np.ndarray] | None = None) -> dict[str, Any]:
        """Returns it as JSON has it: numbers, strings, lists and dicts; bytes are in base64.

        Args:
          arrays: takes the state's files of tf.data, as uint8 arrays by name, in the place of the JSON, where they have
            more than 1 KiB: with a shuffle buffer they have megabytes.
        """
        return {**dataclasses.asdict(self), "state": _put_aside(self.state, arrays)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], arrays: Mapping[str, Any] | None = None) -> "DatasetPosition":
        """The position that `to_dict` wrote, with the arrays that it put aside."""
        names = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(values, Mapping) or not {"kind", "count"} <= set(values) <= names:
            got = sorted(values) if isinstance(values, Mapping) else checks.describe(values)
            raise ValueError(f"A DatasetPosition is read from what to_dict wrote, keys {sorted(names)}, got {got}.")
        return cls(**{**values, "state": _put_back(values.get("state"), arrays or {})})


_BESIDE = "jaxloop/beside"


def _put_aside(state: Any, arrays: dict[str, np.ndarray] | None) -> Any:
    """The state as JSON has it; of its byte strings the long ones go to the arrays."""

    def put(leaf: Any) -> Any:
        if not isinstance(leaf, bytes):
            return leaf
        if arrays is None or len(leaf) <= _MAX_INLINE:
            return encoding.encode(leaf)
        name = f"bytes_{len(arrays)}"
        arrays[name] = np.frombuffer(leaf, np.uint8)
        return {_BESIDE: name}

    return jax.tree.map(put, state)


def _put_back(state: Any, arrays: Mapping[str, Any]) -> Any:
    """The state whose long byte strings are in the arrays."""
    is_beside = lambda node: isinstance(node, dict) and _BESIDE in node
    back = lambda node: np.asarray(arrays[node[_BESIDE]], np.uint8).tobytes() if is_beside(node) else node
    try:
        return jax.tree.map(back, state, is_leaf=is_beside)
    except KeyError as error:
        raise ValueError(f"The array {error} of a position in the data is missing: give those of to_dict.") from None


@final
class PositionedIterator(Iterator[types.Batch]):
    """Draws batches and knows its position: that of the batch which was handed out, with any look-ahead.

    >>> batches = [{"x": number} for number in range(5)]
    >>> iterator = PositionedIterator(batches)
    >>> [next(iterator)["x"] for _ in range(3)]
    [0, 1, 2]
    >>> saved = iterator.position().to_dict()
    >>> again = PositionedIterator(batches)
    >>> again.seek(DatasetPosition.from_dict(saved))
    >>> next(again)
    {'x': 3}

    A consumer that draws ahead of what it uses calls `mark` when it has used all that it drew, and later asks for
    `position(count)`. Grain, sequences and index functions go to a position at once, tf.data by the checkpoint of its
    iterator; the batches between the newest mark and the position are drawn and skipped.

    Args:
      dataset: an iterator of batches, or an iterable. If it is, or makes, a `PositionedIterator`, that one is returned.
      iterate: makes the iterator of the dataset.
      prefetch: how many batches a thread draws ahead; 0 for no thread.
      skippable: whether the dataset gives the same batches in the same order each time.

    Raises:
      TypeError: the dataset is one batch, or nothing that can be iterated over.
    """

    _dataset: Any
    _iterate: Callable[[Any], Any]
    _prefetch: int
    _skippable: bool
    _source: Source
    _fingerprint: dict[str, list[str]]
    _convert: Callable[[types.Batch], types.Batch]
    _ahead: ReadAhead | None

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
        start = random_state(dataset)  # Before the iterator is made, which takes numbers from it.
        iterator = iterate(dataset)
        if isinstance(iterator, PositionedIterator):  # There is one position.
            iterator._skippable |= skippable
            if prefetch:
                iterator._draw_ahead(prefetch)
            return iterator
        self = super().__new__(cls)
        self._dataset, self._iterate, self._prefetch, self._skippable = dataset, iterate, prefetch, skippable
        self._source = source_of(dataset, iterator, start)
        self._fingerprint = {"source": describe_source(dataset)}
        self._convert = lambda batch: batch
        self._ahead = None
        self._begin(iterator, 0, self._source.read_start())
        return self

    def _begin(self, iterator: Iterator[types.Batch], count: int, state: Any) -> None:
        """Goes on with an iterator that stands after `count` batches, where the source had the state, if known."""
        self.close()
        self._iterator, self._count = iterator, count
        self._has_begun = False  # Whether a batch was drawn since.
        self._held: list[types.Batch] = []  # One at most, which was looked at.
        self._sought: DatasetPosition | None = None  # Until the first batch after it was looked at.
        self._marks: deque[tuple[int, Any]] = deque([(count, state)], _MAX_MARKS)
        self._draw: Callable[[], types.Batch] = iterator.__next__
        if self._prefetch:
            self._ahead = ReadAhead(iterator, self._prefetch, self._source.read, reads_always=self._source.is_cheap)
            self._draw = _taker(self._ahead, self._marks, count)

    def _draw_ahead(self, prefetch: int) -> None:
        if self._count or self._held or self._prefetch:
            raise ValueError(
                f"prefetch={prefetch} takes data from which nothing was drawn, by a thread neither, got {self!r}. Give "
                "it the dataset itself."
            )
        self._prefetch = prefetch
        self._begin(self._iterator, *self._marks[-1])

    def __next__(self) -> types.Batch:
        batch = self._held.pop() if self._held else self._next()
        self._count += 1
        return batch

    def __repr__(self) -> str:
        return f"{type(self).__name__}({name_of(self._dataset)}, after {self._count} batches)"

    @property
    def count(self) -> int:
        """Batches handed out since the start of the pass."""
        return self._count

    @property
    def fingerprint(self) -> list[str]:
        """The description of the pipeline, a line for each of its parts, see `fingerprint.describe_source`."""
        return self._fingerprint["source"]

    @property
    def is_endless(self) -> bool:
        """True if the data are known to have no end."""
        return is_endless(self._dataset)

    def __length_hint__(self) -> int:
        if self._prefetch:  # A thread has drawn some of them.
            return NotImplemented
        if self._iterator is self._dataset:
            left = num_batches(self._iterator)
            return NotImplemented if left is None else left + len(self._held)
        whole = num_batches(self._dataset)
        return NotImplemented if whole is None else max(whole - self._count, 0)

    @property
    def kind(self) -> str:
        """The way in which the source says where it is, see `DatasetPosition`."""
        return self._source.kind if self._source.kind and not self._source.problem else self._kind_of_plain

    @property
    def _kind_of_plain(self) -> str:
        return "skip" if self._skippable else "unknown"

    @property
    def problem(self) -> str | None:
        """The reason why a position here can't be restored, and what to do; None if it can, as far as is known.

        That a tf.data pipeline can't be saved is known after the first `mark`.
        """
        return (self._source.problem or why_unknown(self._dataset)) if self.kind == "unknown" else None

    def resume_warning(self, *, several_passes: bool = False) -> str | None:
        """Returns why a run that is resumed from here will not be exact, and what makes it so; None if it is.

        Call it before the first batch: it may have to read that, and to try whether the state can be saved then.

        Args:
          several_passes: whether the run makes more than one pass over the dataset.
        """
        if self._source.kind == "tf.data" and self._ahead is None:
            with contextlib.suppress(StopIteration):
                self.peek()
            self._source.read()
        if self.kind == "unknown":
            return f"{self.problem} A resumed run trains on what the data give then, which is not exact."
        return self._source.doubt(several_passes=several_passes)

    # Batches -----------------------------------------------------------------------------------------

    def converted_by(self, convert: Callable[[types.Batch], types.Batch]) -> "PositionedIterator":
        """Has each batch go through a function on its way out; returns the iterator itself."""
        if self._convert is not convert:
            self._convert = convert
            self._held = [convert(batch) for batch in self._held]
        return self

    def peek(self) -> types.Batch:
        """The next batch, which stays there. Raises `StopIteration` at the end."""
        if not self._held:
            if self._count > self._marks[-1][0]:
                self.mark()
            self._held.append(self._next())
        return self._held[0]

    def skip(self, num_batches: int) -> None:
        """Draws so many batches and drops them, and says so in the log.

        Raises:
          ValueError: the dataset ends before.
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
        secs = time.perf_counter() - start
        logging.info("Skipped %d batches of %s in %.1f s.", num_batches, name_of(self._dataset), secs)

    def close(self) -> None:
        """Ends the thread that draws ahead, if there is one: then the data have ended."""
        if self._ahead is not None:
            self._ahead.close()

    def _next(self) -> types.Batch:
        """Draws the next batch."""
        if self._has_begun:
            return self._convert(self._draw())
        if self._marks[-1][1] is None and (self._ahead is None or not self._ahead.has_begun):
            self._marks[-1] = (self._count, self._source.read())  # Whoever draws ahead is past it from here on.
        batch = self._draw()
        if self._count == 0:
            self._fingerprint["batch"] = describe_batch(batch)
        if self._sought is not None:
            # What is drawn again from the start must be the same; after a state, another batch may be shorter, say.
            is_drawn_again = self._count == 0 and self._sought.count > 0
            check_same(self._sought.fingerprint.get("batch"), describe_batch(batch), sizes=is_drawn_again)
            self._sought = None
        self._has_begun = True
        return self._convert(batch)

    # Positions ---------------------------------------------------------------------------------------

    def mark(self, *, if_cheap: bool = False) -> None:
        """Notes the source's own state, for positions from this batch on. Call it where all that was drawn is used.

        It takes microseconds for Grain, milliseconds for tf.data, and nothing where a number says it all. With a
        thread that draws ahead, the state is that after the next batch which the thread draws.

        Args:
          if_cheap: only where it takes microseconds.
        """
        if if_cheap and not self._source.is_cheap:
            return
        marked, state = self._marks[-1]
        if self._ahead is not None and self._ahead.has_begun:
            self._ahead.request_state()
        elif not self._held and (marked < self._count or state is None):
            state = self._source.read()
            if state is not None:
                self._marks.append((self._count, state))

    def position(self, count: int | None = None) -> DatasetPosition:
        """Returns the position of the data after `count` batches of this pass; None for all that were handed out.

        Raises:
          ValueError: so many were not handed out, or it is too long ago.
        """
        if count is None or count == self._count:
            self.mark()
        count = self._count if count is None else count
        marked, state = next((mark for mark in reversed(self._marks) if mark[0] <= count), (None, None))
        if marked is None or count > self._count:
            raise ValueError(
                f"A position is told for {self._marks[0][0]} to {self._count} batches, from the oldest mark that is "
                f"kept to what was handed out, got count={count}."
            )
        fingerprint = {name: list(lines) for name, lines in self._fingerprint.items()}
        if self._source.start is not None:
            return DatasetPosition(self.kind, count, self._source.start + count, 0, fingerprint)
        if state is not None and not self._source.problem:
            return DatasetPosition(self._source.kind, count, state, count - marked, fingerprint)
        return DatasetPosition(self._kind_of_plain if count else self.kind, count, None, count, fingerprint)

    def seek(self, saved: DatasetPosition) -> None:
        """Goes to a position that an iterator over the same data told, in this process or another.

        Batches that have to be skipped are said in the log.

        Raises:
          PositionUnknownError: the source can't go there.
          ValueError: the position is that of another dataset, or this one ends before it.
        """
        self._check_same_source(saved)
        if saved.state is None and saved.count and not self._skippable:
            self.mark()  # Finds out why, for tf.data.
            raise PositionUnknownError(
                f"The position after {saved.count} batches of {name_of(self._dataset)} can't be restored: "
                + (self.problem or "batches were drawn ahead, and no mark was made before. Call mark() there.")
            )
        first = self._source.first()
        if first is not None:
            check_same(saved.fingerprint.get("batch"), describe_batch(first))
        if saved.state is not None:
            self.close()  # Before the source is touched.
            self._begin(self._source.restore(saved.state), saved.count - saved.skip, saved.state)
        elif self._count:
            self._begin(self._fresh_iterator(), 0, None)
        elif self._held and saved.count:
            check_same(saved.fingerprint.get("batch"), self._fingerprint["batch"])
        self._sought = None if self._held else saved
        if saved.skip:
            self.skip(saved.skip)
        else:
            with contextlib.suppress(StopIteration):
                self.peek()
        if "batch" in saved.fingerprint:
            self._fingerprint["batch"] = list(saved.fingerprint["batch"])

    def get_state(self) -> dict[str, Any]:
        """The position as JSON has it, for those who ask an iterator for it in this way."""
        return self.position().to_dict()

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes to the position of `get_state`."""
        self.seek(DatasetPosition.from_dict(state))

    def _check_same_source(self, saved: DatasetPosition) -> None:
        before, now, kind = saved.fingerprint.get("source"), self._fingerprint["source"], self._source.kind or "skip"
        if saved.kind not in ("skip", "unknown"):
            check_same([*(before or now), f"kind {saved.kind!r}"], [*now, f"kind {kind!r}"])
        elif before and before[0].split()[0] == now[0].split()[0]:
            check_same(before, now)  # Else a generator, say, has become a list, of which so many are skipped.

    def _fresh_iterator(self) -> Iterator[types.Batch]:
        start = random_state(self._dataset)
        iterator = self._iterate(self._dataset)
        if iterator is self._dataset:
            raise PositionUnknownError(
                f"{self!r} has been drawn from, and can't go back: make a new iterator to go to a position."
            )
        self.close()
        self._source = source_of(self._dataset, iterator, start)
        return iterator


def _iterate(dataset: Any) -> Iterator[types.Batch]:
    return dataset if hasattr(dataset, "__next__") else iter(dataset)


def _taker(ahead: ReadAhead, marks: deque[tuple[int, Any]], start: int) -> Callable[[], types.Batch]:
    """Draws from what a thread has drawn. (No method: an iterator in a circle would keep its thread for long.)"""

    def take() -> types.Batch:
        drawn = ahead.take()
        if drawn.error is not None:
            raise drawn.error
        if drawn.state is not None:
            marks.append((start + drawn.number, drawn.state))
        return drawn.batch

    return take


@final
@dataclasses.dataclass(frozen=True)
class DataWithOptions(Iterable[types.Batch]):
    """Data that start anew each time, and how a pass over them is made."""

    data: Any
    prefetch: int = 0
    skippable: bool = False

    def __iter__(self) -> PositionedIterator:
        data = self.data() if is_function(self.data) else self.data
        return PositionedIterator(data, prefetch=self.prefetch, skippable=self.skippable)

    @property
    def is_endless(self) -> bool:
        """True if a pass is known to have no end."""
        return is_endless(self.data)

    def __len__(self) -> int:
        return len(self.data)


def with_options(data: Any, **options: Any) -> Iterable[types.Batch]:
    """Data with options of `PositionedIterator`, beside those that they have: an iterator where they are one."""
    if isinstance(data, DataWithOptions):
        return dataclasses.replace(data, **options)
    if hasattr(data, "__next__"):
        return PositionedIterator(data, **options)
    if not is_function(data):
        check_is_dataset(data)
    return DataWithOptions(data, **options)


def skippable(data: Any) -> Iterable[types.Batch]:
    """Says of data that they give the same batches in the same order each time they are made.

    A run that is started again may then draw and skip the batches it had, where the data can't say where they are:
    generators, what `tfds.as_numpy` returns. The log says how many were skipped, and how long that took. It changes
    nothing for data that can say it. With `train_epochs` each pass is made anew: data that come in another order in
    each pass, as those of a PyTorch `DataLoader` that shuffles, are not the same. Give those as one generator without
    an end, and `train_total_steps`; or take `from_index`.

    >>> iterator = iter(skippable(lambda: ({"x": number} for number in range(5))))
    >>> next(iterator), iterator.position().kind
    ({'x': 0}, 'skip')

    Args:
      data: an iterator of batches, an iterable, or a function without arguments that returns one.

    Returns:
      An iterable; of an iterator, an iterator.
    """
    return with_options(data, skippable=True)
