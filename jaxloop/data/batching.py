"""Builds batches from examples that are read by index."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, final

import jax
import numpy as np

from jaxloop import types
from jaxloop.base import checks
from jaxloop.base.text import suggests
from jaxloop.data.sources import IndexedBatches, is_endless, is_function, is_hugging_face, made_by


@suggests(batch_size="size", shuffle="seed", epochs="num_epochs")
def batched(rows: Any, size: int, *, seed: int | None = None, num_epochs: int | None = None) -> IndexedBatches:
    """Returns a dataset that groups examples into batches. A resumed run jumps directly to its position.

    Epochs follow each other without a gap: a batch can contain the last examples of one epoch and the first examples of
    the next. Each epoch contains every example exactly once, and only the very last batch can be short.

    >>> rows = {"x": np.arange(5), "y": np.arange(5) ** 2}
    >>> [batch["x"].tolist() for batch in batched(rows, 3, num_epochs=2)]
    [[0, 1, 2], [3, 4, 0], [1, 2, 3], [4]]

    Args:
      rows: The examples: an array, a dict or tuple of arrays (with one row per example), a Hugging Face `Dataset` in
        any format, a list, or any other object with `__len__` and `__getitem__`, such as a Grain `MapDataset`. For an
        endless dataset, pass a function that maps an index (starting at 0) to an example.
      size: The number of examples per batch.
      seed: A non-negative int to shuffle the examples differently in each epoch, or None to keep them in order.
        Shuffling uses up to 16 bytes of memory per example: 8 for each of two epochs.
      num_epochs: The number of epochs, or None to repeat the examples endlessly. With `train_epochs=N`, a run makes N
        passes over these epochs (over one epoch if None), each pass in new shuffled orders. An evaluation without
        `num_steps` makes one pass.

    Raises:
      TypeError: If the examples can't be read by index, or if another argument has the wrong type.
      ValueError: If there are no examples, if `size` is not positive, or if `seed` or `num_epochs` is given for an
        endless dataset.
    """
    source = _Source("batched(rows)", rows, seed)
    checks.check_positive("batched(..., size)", size)
    checks.check_positive("batched(..., num_epochs)", num_epochs, optional=True)
    if num_epochs is not None and source.length is None:
        raise ValueError("batched(..., num_epochs) needs a known number of examples, but a function has no length.")
    make_pass = None
    if source.length is not None:
        make_pass = lambda number: _batches(source, int(size), seed, num_epochs or 1, number)
    return dataclasses.replace(_batches(source, int(size), seed, num_epochs), make_pass=make_pass)


def _batches(
    source: "_Source", size: int, seed: int | None, num_epochs: int | None, number_of_pass: int = 0
) -> IndexedBatches:
    """Returns the batches of a pass: `num_epochs` epochs, after those of the earlier passes."""
    total = None if num_epochs is None or source.length is None else num_epochs * source.length
    offset = number_of_pass * (total or 0)

    def make_batch(number: int) -> types.Batch:
        end = (number + 1) * size
        return source.take(offset + np.arange(number * size, end if total is None else min(end, total)))

    firsts, num_batches = {size: 0}, None
    if total is not None:
        num_batches = -(-total // size)
        last = num_batches - 1  # It may be short.
        firsts = {total - last * size: last, **({size: 0} if last else {})}
    name = f"batched(source={source.length}, size={size}, seed={seed}, num_epochs={num_epochs})"
    return IndexedBatches(make_batch, num_batches, tuple(sorted(firsts.items())), name)


# The sources -----------------------------------------------------------------------------------------------


@final
class _Source:
    """The endless stream of a source's examples, epoch after epoch.

    Args:
      name: The name of the source, for use in messages.
      rows: See `batched`.
      seed: See `batched`.
    """

    def __init__(self, name: str, rows: Any, seed: int | None):
        if seed is not None:
            if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
                raise TypeError(f"seed must be a non-negative int or None, got {seed!r}.")
            if seed < 0:
                raise ValueError(f"seed must be a non-negative int or None, got {seed}.")
        self._name = name
        self.length, self._take = _access(name, rows)
        if self.length == 0:
            raise ValueError(f"{name} has no examples.")
        if seed is not None and self.length is None:
            raise ValueError(f"{name} has no known number of examples, so it can't be shuffled with seed={seed}.")
        # Two epochs, because a batch may contain examples of both.
        self._order = None if seed is None else functools.lru_cache(maxsize=2)(self._shuffled(int(seed)))

    def _shuffled(self, seed: int) -> Callable[[int], np.ndarray]:
        return lambda epoch: np.random.default_rng([seed, 0, epoch]).permutation(self.length or 0)

    def take(self, places: np.ndarray) -> types.Batch:
        """Returns the examples at these places in the stream, as a batch."""
        return self._take(self._rows_at(places))

    def _rows_at(self, places: np.ndarray) -> np.ndarray:
        if self.length is None:
            return places
        epochs, rows = np.divmod(places, self.length)
        if self._order is not None:
            for epoch in range(int(epochs.min()), int(epochs.max()) + 1):
                chosen = epochs == epoch
                rows[chosen] = self._order(epoch)[rows[chosen]]
        return rows


def _access(name: str, rows: Any) -> tuple[int | None, Callable[[np.ndarray], types.Batch]]:
    """Returns the number of examples (None if unknown), and a function that reads several examples as a batch."""
    if is_hugging_face(rows) and hasattr(rows, "__len__"):
        if rows.format["type"] not in ("numpy", "custom"):  # Custom formats transform the rows.
            kept = {name: rows.format[name] for name in ("columns", "output_all_columns")}
            rows = rows.with_format("numpy", **kept)
        as_array = lambda column: np.stack([np.asarray(each) for each in column]) if type(column) is list else column
        return len(rows), lambda indices: {name: as_array(column) for name, column in rows[indices.tolist()].items()}
    is_array = lambda leaf: hasattr(leaf, "shape") and hasattr(leaf, "dtype") and len(leaf.shape) > 0
    if isinstance(rows, dict | tuple) or is_array(rows):
        leaves, length = jax.tree.leaves(rows), checks.num_examples(rows)
        if not leaves or length is None or not all(map(is_array, leaves)):
            raise ValueError(
                f"{name} must be arrays with a common leading axis, one row per example, got "
                f"{checks.batch_in_words(rows)}."
            )
        return length, lambda indices: jax.tree.map(lambda leaf: leaf[indices], rows)
    if isinstance(rows, IndexedBatches):
        length, one = rows.num_batches, rows.make_batch
    elif is_function(rows):
        length, one = None, rows
    elif not isinstance(rows, str | bytes) and hasattr(rows, "__len__") and hasattr(rows, "__getitem__"):
        length, one = None if is_endless(rows) else len(rows), rows.__getitem__
    else:
        raise TypeError(
            f"{name} must be examples that can be read by their index, got {checks.describe(rows)}. Give arrays, a "
            "list, a Grain MapDataset, or a function of the index."
        )
    return length, lambda indices: _stacked(name, [made_by(one, index) for index in indices.tolist()])


def _stacked(name: str, examples: Sequence[Any]) -> types.Batch:
    if any(example is None for example in examples):  # Grain's `MapDataset.filter` leaves holes.
        raise ValueError(f"{name} has no element at one of its indices. Don't filter a dataset that is read by index.")
    try:
        return jax.tree.map(lambda *leaves: np.stack(leaves), *examples)
    except ValueError as error:
        error.add_note(f"in {name}, whose examples must have the same structure and shapes to form a batch")
        raise
