"""Builds batches from examples that are read by index."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxloop import types
from jaxloop.base import checks
from jaxloop.base.text import suggests
from jaxloop.data.sources import IndexedBatches, check_int, is_hugging_face, made_by


@suggests(batch_size="size", shuffle="seed", epochs="num_epochs", drop_last="drop_remainder", collate_fn="collate")
def batched(
    rows: Any,
    size: int,
    *,
    seed: int | None = None,
    num_epochs: int | None = None,
    drop_remainder: bool = False,
    collate: Callable[[list[Any]], types.Batch] | None = None,
) -> IndexedBatches:
    """Returns a dataset that groups examples into batches. A resumed run jumps directly to its position in the dataset.

    Within a pass over the dataset, epochs follow each other without a gap: a batch can contain the last examples of one
    epoch and the first examples of the next. Only the last batch of a pass can be short. Each epoch contains every
    example exactly once, unless `drop_remainder` drops some of them.

    >>> rows = {"x": np.arange(5), "y": np.arange(5) ** 2}
    >>> [batch["x"].tolist() for batch in batched(rows, 3, num_epochs=2)]
    [[0, 1, 2], [3, 4, 0], [1, 2, 3], [4]]

    Args:
      rows: The examples: an array, a dict or tuple of arrays (with one row per example), a Hugging Face `Dataset` in
        any format, a list, or any other object with `__len__` and `__getitem__`, such as a Grain `MapDataset`.
      size: The number of examples per batch.
      seed: A non-negative int that seeds the shuffling. Each epoch has a different order. If None, the examples aren't
        shuffled. Shuffling keeps the orders of up to two epochs in memory. Each order takes 8 bytes per example.
      num_epochs: The number of epochs in the dataset, or None to repeat the examples endlessly. With `train_epochs=N`,
        a run makes N passes over the dataset, each of which consists of `num_epochs` epochs (by default, one). An
        evaluation without `num_steps` makes one pass.
      drop_remainder: Whether to drop the last batch of a pass if it is short.
      collate: A function that combines a list of examples (read one at a time) into a batch. If None, the examples are
        stacked.

    Raises:
      TypeError: If the examples can't be read by index, or if another argument has the wrong type.
      ValueError: If there are no examples, if `size` is not positive, or if `drop_remainder` would leave no batches.
    """
    checks.check_positive("batched(..., size)", size)
    checks.check_positive("batched(..., num_epochs)", num_epochs, optional=True)
    length, take = _stream(rows, seed, collate)
    if drop_remainder and size > length * (num_epochs or 1):
        raise ValueError(
            f"batched(..., drop_remainder=True) leaves no batch: there are {length} examples, and size={size}."
        )
    return _batches(take, length, int(size), drop_remainder, num_epochs)


def _batches(
    take: "_Take", length: int, size: int, drop_remainder: bool, num_epochs: int | None, number_of_pass: int = 0
) -> IndexedBatches:
    """Returns the dataset for one pass. It has `num_epochs` epochs, or is endless if `num_epochs` is None.

    Passes are numbered from 0. Each pass continues where the previous one ended.
    """
    make_pass = functools.partial(_batches, take, length, size, drop_remainder, num_epochs or 1)
    if num_epochs is None:
        endless = lambda number: take(np.arange(number * size, (number + 1) * size))
        return IndexedBatches(endless, None, make_pass)
    total = num_epochs * length
    offset = number_of_pass * total
    num_batches = total // size if drop_remainder else -(-total // size)

    def make_batch(number: int) -> types.Batch:
        return take(offset + np.arange(number * size, min((number + 1) * size, total)))

    return IndexedBatches(make_batch, num_batches, make_pass)


# The examples ----------------------------------------------------------------------------------------------

_Take = Callable[[np.ndarray], types.Batch]
"""A function that returns the examples at the given indices as a batch."""
_Collate = Callable[[list[Any]], types.Batch]


def _stream(rows: Any, seed: int | None, collate: _Collate | None) -> tuple[int, _Take]:
    """Returns the number of examples, and a function that returns the examples at given positions as a batch.

    The positions refer to an endless stream of examples, in which one epoch follows another.
    """
    length, take = _access(rows, collate)
    if length == 0:
        raise ValueError("batched(rows) has no examples.")
    if seed is None:
        return length, lambda places: take(places % length)
    check_int("batched(..., seed)", seed, "or None")

    @functools.lru_cache(maxsize=2)  # A batch may contain examples of two epochs.
    def order(epoch: int) -> np.ndarray:
        return np.random.default_rng([seed, 0, epoch]).permutation(length)

    def take_shuffled(places: np.ndarray) -> types.Batch:
        epochs, indices = np.divmod(places, length)
        for epoch in range(int(epochs.min()), int(epochs.max()) + 1):
            chosen = epochs == epoch
            indices[chosen] = order(epoch)[indices[chosen]]
        return take(indices)

    return length, take_shuffled


def _access(rows: Any, collate: _Collate | None) -> tuple[int, _Take]:
    """Returns the number of examples, and a function that returns the examples at given indices as a batch."""
    is_array = lambda leaf: hasattr(leaf, "shape") and hasattr(leaf, "dtype") and len(leaf.shape) > 0
    if isinstance(rows, dict | tuple) or is_array(rows):
        leaves, length = jax.tree.leaves(rows), checks.num_examples(rows)
        if not leaves or length is None or not all(map(is_array, leaves)):
            raise ValueError(
                "batched(rows) must be arrays with a common leading axis, one row per example, got "
                f"{checks.batch_in_words(rows)}."
            )
        take = lambda indices: jax.tree.map(lambda leaf: leaf[indices], rows)
        return length, take if collate is None else lambda indices: collate([take(index) for index in indices])
    if isinstance(rows, str | bytes) or not hasattr(rows, "__len__") or not hasattr(rows, "__getitem__"):
        raise TypeError(
            f"batched(rows) must be examples that can be read by their index, got {checks.describe(rows)}. Give "
            "arrays, a list or a Grain MapDataset. For a function of the index, write from_index."
        )
    if is_hugging_face(rows) and collate is None:
        if rows.format["type"] not in ("numpy", "custom"):  # Custom formats transform the rows.
            kept = {name: rows.format[name] for name in ("columns", "output_all_columns")}
            rows = rows.with_format("numpy", **kept)
        as_array = lambda column: np.stack([np.asarray(each) for each in column]) if type(column) is list else column
        return len(rows), lambda indices: {name: as_array(column) for name, column in rows[indices.tolist()].items()}
    make_batch = collate or _stacked
    return len(rows), lambda indices: make_batch([made_by(rows.__getitem__, index) for index in indices.tolist()])


def _stacked(examples: Sequence[Any]) -> types.Batch:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *examples)
