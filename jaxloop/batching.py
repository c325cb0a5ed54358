"""Builds batches, of fixed or scheduled sizes, from examples that are read by index, and mixes datasets."""

import bisect
import dataclasses
import functools
import hashlib
import itertools
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, final

import jax
import numpy as np

from jaxloop import checks, types
from jaxloop.sources import IndexedBatches, is_endless, is_function, is_hugging_face, made_by

_RESOLUTION = 2**20
"""The common denominator to which weights are rounded, so that example counts are exact integers."""


def batched(
    rows: Any, size: int | Mapping[int, int], *, seed: int | None = None, num_epochs: int | None = None
) -> IndexedBatches:
    """Returns a dataset that groups examples into batches. A resumed run jumps directly to its position.

    Epochs follow each other without a gap: a batch can contain the last examples of one epoch and the first examples of
    the next. Each epoch contains every example exactly once, and only the very last batch can be short.

    A schedule of batch sizes is a dict that maps batch numbers (starting at 0) to sizes. `{0: 32, 1000: 64}` means 32
    examples per batch at first, and 64 from batch 1000 on. (If each batch causes one update, step 1001 uses batch
    1000.) The step is compiled once per size, without a warning. To compile it ahead of time, call `Loop.compile(state,
    dataset)`.

    >>> rows = {"x": np.arange(5), "y": np.arange(5) ** 2}
    >>> [batch["x"].tolist() for batch in batched(rows, {0: 2, 2: 3}, num_epochs=2)]
    [[0, 1], [2, 3], [4, 0, 1], [2, 3, 4]]

    Args:
      rows: The examples: an array, a dict or tuple of arrays (with one row per example), a Hugging Face `Dataset` in
        any format, a list, or any other object with `__len__` and `__getitem__`, such as a Grain `MapDataset`. For an
        endless dataset, pass a function that maps an index (starting at 0) to an example.
      size: The number of examples per batch, or a schedule.
      seed: A non-negative int to shuffle the examples differently in each epoch, or None to keep them in order.
        Shuffling uses up to 16 bytes of memory per example: 8 for each of two epochs.
      num_epochs: The number of epochs, or None to repeat the examples endlessly. With `train_epochs=N`, a run makes N
        passes over these epochs (over one epoch if None), each pass in new shuffled orders. An evaluation without
        `num_steps` makes one pass.

    Raises:
      TypeError: If the examples can't be read by index, or if another argument has the wrong type.
      ValueError: If there are no examples, if a size is not positive, if a schedule doesn't begin at batch 0, or if
        `seed` or `num_epochs` is given for an endless dataset.
    """
    source = _Source("batched(rows)", rows, seed, 0)
    checks.check_positive("batched(..., num_epochs)", num_epochs, optional=True)
    if num_epochs is not None and source.length is None:
        raise ValueError("batched(..., num_epochs) needs a known number of examples, but a function has no length.")
    make_pass = None
    if source.length is not None:
        make_pass = lambda number: _batches(source, size, seed, num_epochs or 1, number)
    return dataclasses.replace(_batches(source, size, seed, num_epochs), make_pass=make_pass)


def _batches(
    source: "_Source", size: Any, seed: int | None, num_epochs: int | None, number_of_pass: int = 0
) -> IndexedBatches:
    """Returns the batches of a pass: `num_epochs` epochs, after those of the earlier passes."""
    sizes = _Sizes("batched(..., size)", size)
    total = None if num_epochs is None or source.length is None else num_epochs * source.length
    offset = number_of_pass * (total or 0)

    def make_batch(number: int) -> types.Batch:
        begin, end = sizes.total(number), sizes.total(number + 1)
        return source.take(offset + np.arange(begin, end if total is None else min(end, total)))

    num_batches = None if total is None else sizes.number_after(total)
    if total is None or num_batches is None:
        firsts = sizes.firsts(None)
    else:
        last = num_batches - 1  # It may be short.
        firsts = {total - sizes.total(last): last, **sizes.firsts(last)}
    name = _name("batched", source=source.length, size=sizes.pieces, seed=seed, num_epochs=num_epochs)
    return IndexedBatches(make_batch, num_batches, tuple(sorted(firsts.items())), sizes.total, name)


def mixture(
    sources: Mapping[str, Any],
    weights: Mapping[str, float] | Mapping[int, Mapping[str, float]],
    size: int | Mapping[int, int] | None = None,
    *,
    seed: int | None = None,
) -> IndexedBatches:
    """Returns an endless dataset that mixes several datasets, with weights that may follow a schedule.

    The composition of each batch depends only on the batch number. At any point, the number of examples taken from a
    source differs from its exact share by less than the number of sources. Each source is repeated as often as
    necessary, and each pass over it contains every example exactly once.

    Like the sizes in `batched`, weights can change at given batch numbers: `{0: {"web": 0.9, "code": 0.1}, 1000:
    {"web": 0.5, "code": 0.5}}`.

    >>> sources = {"even": np.arange(0, 100, 2), "odd": np.arange(1, 100, 2)}
    >>> weights = {0: {"even": 3, "odd": 1}, 2: {"even": 0, "odd": 1}}
    >>> batches = iter(mixture(sources, weights, size=4))
    >>> [next(batches).tolist() for _ in range(3)]
    [[0, 2, 1, 4], [6, 8, 3, 10], [5, 7, 9, 11]]

    Args:
      sources: A dict that maps names to datasets. If `size` is given, these are datasets of examples, as in `batched`.
        Their examples must all have the same structure, shapes and dtypes. Otherwise, they are datasets of batches:
        those returned by `from_index` or `batched`, Grain `MapDataset`s, or lists of batches.
      weights: A dict that maps names to weights, or a schedule of such dicts. Only the ratios of the weights matter.
        Weights are rounded to about six decimal places, but a positive weight never becomes 0.
      size: The number of examples per batch, or a schedule. Each batch can mix examples from all sources. If the
        sources contain batches, pass None. In that case, each batch comes from a single source.
      seed: See `batched`. Each source is shuffled in its own order.

    Raises:
      TypeError: If a source can't be read by index, or if another argument has the wrong type.
      ValueError: If the names of the weights and the sources differ, if a weight is negative or not finite, if all
        weights are 0, or if a schedule doesn't begin at batch 0.
    """
    if not isinstance(sources, Mapping) or not sources:
        raise TypeError(f"mixture takes a dict of datasets by name, got {checks.describe(sources)}.")
    names = sorted(sources)
    members = [_Source(f"mixture(sources[{name!r}])", sources[name], seed, place) for place, name in enumerate(names)]
    sizes = _Sizes("mixture(..., size)", 1 if size is None else size)
    shares = _shares(weights, names)
    pieces = _mixed_pieces(sizes, shares)

    def make_batch(number: int) -> types.Batch:
        piece = pieces[bisect.bisect_right(pieces, number, key=lambda each: each.start) - 1]
        drawn = piece.draw(number)
        if size is None:
            ((member, indices),) = ((members[k], indices) for k, (_, indices) in drawn.items())
            return member.one(int(indices[0]))
        return _interleaved({names[k]: (places, members[k].take(rows)) for k, (places, rows) in drawn.items()})

    name = _name(
        "mixture",
        sources={name: member.length for name, member in zip(names, members, strict=True)},
        weights=dict(zip(shares[0], shares[1], strict=True)),
        size=None if size is None else sizes.pieces,
        seed=seed,
    )
    firsts = () if size is None else tuple(sorted(sizes.firsts(None).items()))
    return IndexedBatches(make_batch, None, firsts, None if size is None else sizes.total, name)


# Schedules of values ---------------------------------------------------------------------------------------


def _schedule(name: str, schedule: Mapping[Any, Any]) -> dict[int, Any]:
    """Returns a schedule with its keys in ascending order. Raises an error unless the schedule begins at batch 0."""
    for key in schedule:
        if isinstance(key, bool) or not isinstance(key, int | np.integer):
            raise TypeError(f"{name} must be a dict whose keys are batch numbers, which are ints, got the key {key!r}.")
    if not schedule or min(schedule) != 0:
        got = f"begins at batch {min(schedule)}" if schedule else "is empty"
        raise ValueError(f"{name} must begin at batch 0, as in {{0: ..., 1000: ...}}, but it {got}.")
    return {int(key): schedule[key] for key in sorted(schedule)}


@final
class _Sizes:
    """A schedule of batch sizes."""

    def __init__(self, name: str, size: Any):
        self.pieces = _schedule(name, size if isinstance(size, Mapping) else {0: size})
        for value in self.pieces.values():
            checks.check_positive(name, value, instead="a dict such as {0: 32, 1000: 64}")
        self._starts, self._sizes = list(self.pieces), [int(value) for value in self.pieces.values()]
        lengths = [(after - start) for start, after in itertools.pairwise(self._starts)]
        self._before = [0, *itertools.accumulate(n * size for n, size in zip(lengths, self._sizes, strict=False))]

    def at(self, number: int) -> int:
        return self._sizes[bisect.bisect_right(self._starts, number) - 1]

    def total(self, number: int) -> int:
        """Returns the number of examples in all batches before batch `number`."""
        place = bisect.bisect_right(self._starts, number) - 1
        return self._before[place] + (number - self._starts[place]) * self._sizes[place]

    def number_after(self, total: int) -> int:
        """Returns the smallest number of batches that together contain at least `total` examples."""
        place = bisect.bisect_left(self._before, total) - 1
        return self._starts[place] + -(-(total - self._before[place]) // self._sizes[place])

    def firsts(self, num_batches: int | None) -> dict[int, int]:
        """Returns a dict that maps each size among the first `num_batches` batches to its first batch number."""
        starts = [start for start in self._starts if num_batches is None or start < num_batches]
        return {size: start for start, size in reversed(list(zip(starts, self._sizes, strict=False)))}


def _shares(weights: Any, names: Sequence[str]) -> tuple[list[int], list[list[int]]]:
    """Returns the batch numbers at which the weights change, and the new integer weights, in the order of `names`."""
    name = "mixture(..., weights)"
    if not isinstance(weights, Mapping):
        raise TypeError(f"{name} must be a dict of weights by name, or a schedule of such dicts, got {weights!r}.")
    is_schedule = bool(weights) and all(isinstance(value, Mapping) for value in weights.values())
    pieces = _schedule(name, weights if is_schedule else {0: weights})
    return list(pieces), [_integers(f"{name} at batch {start}", each, names) for start, each in pieces.items()]


def _integers(name: str, weights: Mapping[str, Any], names: Sequence[str]) -> list[int]:
    if set(weights) != set(names):
        got = checks.listed(map(str, weights)) or "no names"
        raise ValueError(f"{name} must have the names of the sources, {checks.listed(names)}, got {got}.")
    for key, value in weights.items():
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise TypeError(f"{name} must be numbers, got {value!r} for {key!r}.")
        if not math.isfinite(value) or value < 0:
            raise ValueError(f"{name} must be finite and not negative, got {value} for {key!r}.")
    whole = math.fsum(weights.values())
    if not 0 < whole < math.inf:
        raise ValueError(f"{name} must have a positive, finite sum, got {whole}.")
    share = lambda value: max(1, round(float(value) / whole * _RESOLUTION)) if value else 0
    return [share(weights[each]) for each in names]


# The sources -----------------------------------------------------------------------------------------------


@final
class _Source:
    """The endless stream of a source's examples, epoch after epoch.

    Args:
      name: The name of the source, for use in messages.
      rows: See `batched`.
      seed: See `batched`.
      place: A number that distinguishes the sources of one mixture, so that each is shuffled in its own order.
    """

    def __init__(self, name: str, rows: Any, seed: int | None, place: int):
        if seed is not None:
            if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
                raise TypeError(f"seed must be a non-negative int or None, got {seed!r}.")
            if seed < 0:
                raise ValueError(f"seed must be a non-negative int or None, got {seed}.")
        self._name = name
        self.length, self._take, self._one = _access(name, rows)
        if self.length == 0:
            raise ValueError(f"{name} has no examples.")
        if seed is not None and self.length is None:
            raise ValueError(f"{name} has no known number of examples, so it can't be shuffled with seed={seed}.")
        # Two epochs, because a batch may contain examples of both.
        self._order = None if seed is None else functools.lru_cache(maxsize=2)(self._shuffled(int(seed), place))

    def _shuffled(self, seed: int, place: int) -> Callable[[int], np.ndarray]:
        return lambda epoch: np.random.default_rng([seed, place, epoch]).permutation(self.length or 0)

    def take(self, places: np.ndarray) -> types.Batch:
        """Returns the examples at these places in the stream, as a batch."""
        return self._take(self._rows_at(places))

    def one(self, place: int) -> Any:
        """Returns the element at this place in the stream."""
        return _present(self._name, self._one(int(self._rows_at(np.asarray([place]))[0])))

    def _rows_at(self, places: np.ndarray) -> np.ndarray:
        if self.length is None:
            return places
        epochs, rows = np.divmod(places, self.length)
        if self._order is not None:
            for epoch in range(int(epochs.min()), int(epochs.max()) + 1):
                chosen = epochs == epoch
                rows[chosen] = self._order(epoch)[rows[chosen]]
        return rows


def _access(name: str, rows: Any) -> tuple[int | None, Callable[[np.ndarray], types.Batch], Callable[[int], Any]]:
    """Returns the number of examples (None if unknown), and functions to read several examples and a single one."""
    if is_hugging_face(rows) and hasattr(rows, "__len__"):
        if rows.format["type"] not in ("numpy", "custom"):  # Custom formats transform the rows.
            kept = {name: rows.format[name] for name in ("columns", "output_all_columns")}
            rows = rows.with_format("numpy", **kept)
        as_array = lambda column: np.stack([np.asarray(each) for each in column]) if type(column) is list else column
        take = lambda indices: {name: as_array(column) for name, column in rows[indices.tolist()].items()}
        return len(rows), take, rows.__getitem__
    if isinstance(rows, IndexedBatches) or is_function(rows):
        one = functools.partial(made_by, rows.make_batch if isinstance(rows, IndexedBatches) else rows)
        return getattr(rows, "num_batches", None), lambda indices: _stacked(name, map(one, indices.tolist())), one
    is_array = lambda leaf: hasattr(leaf, "shape") and hasattr(leaf, "dtype") and len(leaf.shape) > 0
    if isinstance(rows, dict | tuple) or is_array(rows):
        leaves, length = jax.tree.leaves(rows), checks.num_examples(rows)
        if not leaves or length is None or not all(map(is_array, leaves)):
            raise ValueError(
                f"{name} must be arrays with a common leading axis, one row per example, got "
                f"{checks.batch_in_words(rows)}."
            )
        take = lambda index: jax.tree.map(lambda leaf: leaf[index], rows)
        return length, take, take
    if isinstance(rows, str | bytes) or not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")):
        raise TypeError(
            f"{name} must be examples that can be read by their index, got {checks.describe(rows)}. Give arrays, a "
            "list, a Grain MapDataset, or a function of the index."
        )
    one = functools.partial(made_by, rows.__getitem__)
    length = None if is_endless(rows) else len(rows)
    return length, lambda indices: _stacked(name, map(one, indices.tolist())), one


def _present(name: str, element: Any) -> Any:
    if element is None:  # Grain's `MapDataset.filter` leaves holes.
        raise ValueError(f"{name} has no element at one of its indices. Don't filter a dataset that is read by index.")
    return element


def _stacked(name: str, examples: Iterable[Any]) -> types.Batch:
    present = [_present(name, example) for example in examples]
    try:
        return jax.tree.map(lambda *leaves: np.stack(leaves), *present)
    except ValueError as error:
        error.add_note(f"in {name}, whose examples must have the same structure and shapes to form a batch")
        raise


def _interleaved(drawn: Mapping[str, tuple[np.ndarray, types.Batch]]) -> types.Batch:
    """Merges batches from several sources into one batch, with each row at its given place."""
    if len(drawn) == 1:
        ((_, batch),) = drawn.values()
        return batch
    form = lambda batch: [jax.tree.structure(batch), *((x.shape[1:], x.dtype) for x in jax.tree.leaves(batch))]
    forms = {name: form(batch) for name, (_, batch) in drawn.items()}
    first = next(iter(drawn))
    for name, (_, batch) in drawn.items():
        if forms[name] != forms[first]:
            raise ValueError(
                "The sources of a mixture must have examples with the same structure, shapes and dtypes, got "
                f"{checks.batch_in_words(drawn[first][1])} from {first!r} and {checks.batch_in_words(batch)} from "
                f"{name!r}."
            )
    order = np.argsort(np.concatenate([places for places, _ in drawn.values()]))
    join = lambda *leaves: np.concatenate(leaves)[order]
    return jax.tree.map(join, *(batch for _, batch in drawn.values()))


# The shares of a mixture -----------------------------------------------------------------------------------


@final
class _Piece(NamedTuple):
    """A span of a mixture in which the batch size and the weights are constant.

    The first source provides `(n * weight + offset) // sum(weights)` of the piece's first `n` examples. The next source
    provides its share of the remainder in the same way, and so on. Each example comes from exactly one source, because
    these counts are integers that increase by at most 1 per example.

    Attributes:
      start: The number of the first batch.
      size: The number of examples per batch.
      weights: The weights of the sources.
      offsets: The fraction of an example that the previous pieces owe to each source, multiplied by the sum of that
        source's weight and all later weights.
      used: The number of examples from each source before this piece.
    """

    start: int
    size: int
    weights: Sequence[int]
    offsets: Sequence[int]
    used: Sequence[int]

    def counts(self, examples: Any) -> list[Any]:
        """Returns the number of examples from each source among the first `examples` examples of this piece."""
        found, rest = [], examples
        for place, (weight, offset) in enumerate(zip(self.weights, self.offsets, strict=True)):
            whole = sum(self.weights[place:])
            found.append((rest * weight + offset) // whole if whole else 0 * rest)
            rest = rest - found[-1]
        return found

    def draw(self, number: int) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """Maps each source to two arrays: the places of its rows in a batch, and their places in its stream."""
        begin = (number - self.start) * self.size
        drawn = {}
        for source, counts in enumerate(self.counts(np.arange(begin, begin + self.size + 1))):
            places = np.flatnonzero(np.diff(counts))
            if len(places):
                drawn[source] = (places, self.used[source] + counts[places])
        return drawn

    def next(self, start: int, size: int, weights: Sequence[int]) -> "_Piece":
        """Returns the piece that follows this one."""
        rest = (start - self.start) * self.size
        counts, offsets = self.counts(rest), []
        for place, (weight, offset) in enumerate(zip(self.weights, self.offsets, strict=True)):
            whole, new_whole = sum(self.weights[place:]), sum(weights[place:])
            owed = (rest * weight + offset) % whole / whole if whole else 0.5
            offsets.append(min(int(owed * new_whole), max(new_whole - 1, 0)))
            rest -= counts[place]
        used = [before + count for before, count in zip(self.used, counts, strict=True)]
        return _Piece(start, size, weights, offsets, used)


def _mixed_pieces(sizes: _Sizes, shares: tuple[list[int], list[list[int]]]) -> list[_Piece]:
    starts, weights = shares
    begin = weights[0]
    halves = [sum(begin[place:]) // 2 for place in range(len(begin))]
    pieces = [_Piece(0, sizes.at(0), begin, halves, [0] * len(begin))]
    for start in sorted({*sizes.pieces, *starts} - {0}):
        pieces.append(pieces[-1].next(start, sizes.at(start), weights[bisect.bisect_right(starts, start) - 1]))
    return pieces


def _name(function: str, **arguments: Any) -> str:
    """Describes a dataset for the fingerprint of a position. A long description is truncated and ends with its hash."""
    text = ", ".join(f"{name}={value}" for name, value in arguments.items())
    if len(text) > 300:
        text = f"{text[:100]}..., sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]}"
    return f"{function}({text})"
