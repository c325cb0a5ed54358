"""Functions that create, prefetch, shard and iterate over datasets of any kind."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, final

import jax
import numpy as np

from jaxloop import types
from jaxloop.base import checks
from jaxloop.data.position import PositionedIterator, with_options
from jaxloop.data.sources import IndexedBatches, Wrapper, check_int, is_function, pass_of, stages
from jaxloop.data.tensors import library


def batches(data: Any) -> PositionedIterator:
    """Returns an iterator over the batches in one epoch of a dataset. Converts tensors to NumPy arrays.

    Args:
      data: A list, a generator, a `tf.data.Dataset`, the result of `tfds.as_numpy`, a torch `DataLoader`, a Grain
        dataset or `DataLoader`, or any other iterable of batches. A function that takes no arguments and returns one of
        these is also accepted. A batch is a pytree of arrays or tensors.

    Returns:
      An iterator whose position in the dataset can be saved in a checkpoint.

    >>> [int(batch["x"].sum()) for batch in batches(lambda: ({"x": np.ones(n)} for n in (1, 2)))]
    [1, 2]

    Raises:
      TypeError: If `data` is a single batch or isn't iterable.
    """
    data = data() if is_function(data) else data
    return PositionedIterator(data, to_numpy=True)


@final
@dataclasses.dataclass(eq=False, repr=False)
class Passes(Wrapper):
    """A dataset that can be iterated over several times.

    Each call to `iter(...)` uses `batches` to create a new iterator over one epoch.

    >>> passes = Passes(lambda: ({"x": np.ones(n)} for n in (1, 2)))
    >>> passes.first()["x"].shape, [len(list(passes)) for _ in range(2)]
    ((1,), [2, 2])

    Attributes:
      inner: The dataset that was passed to the constructor.
    """

    inner: Any
    _next_pass: PositionedIterator | None = dataclasses.field(default=None, init=False)

    def __iter__(self) -> PositionedIterator:
        ahead, self._next_pass = self._next_pass, None
        return batches(self.inner) if ahead is None else ahead

    def first(self) -> types.Batch:
        """Returns the first batch of the next epoch without consuming it.

        Raises:
          ValueError: If the dataset has no batches.
        """
        batch, self._next_pass = peek(iter(self))
        return batch


def is_one_pass(data: Any) -> bool:
    """Returns True if a dataset is an iterator, which can be read only once.

    >>> is_one_pass([{"x": 1}]), is_one_pass(iter([{"x": 1}])), is_one_pass(lambda: iter([{"x": 1}]))
    (False, True, False)
    """
    return hasattr(data, "__next__")


def peek(iterator: Iterable[types.Batch]) -> tuple[types.Batch, PositionedIterator]:
    """Returns the first batch of a dataset and an iterator that begins with this batch.

    The iterator's position doesn't advance until the first batch is read from the iterator itself.

    >>> first, iterator = peek(iter([1, 2, 3]))
    >>> first, list(iterator)
    (1, [1, 2, 3])

    Raises:
      ValueError: If the dataset has no batches.
    """
    ahead = PositionedIterator(iterator, to_numpy=True)
    try:
        return ahead.peek(), ahead
    except StopIteration:
        raise ValueError(
            "The dataset yielded no batches. An iterator can be read only once: give a list, a dataset, or a "
            "function that returns a new iterator."
        ) from None


# Prefetching, and batches by index ----------------------------------------------------------------------


def prefetch(data: Any, size: int = 2) -> Iterable[types.Batch]:
    """Reads up to `size` batches ahead in a background thread.

    Prefetching helps if creating a batch takes a long time and releases the GIL. File access, network access and NumPy
    computations release the GIL. Prefetching costs a few microseconds per batch. Even without prefetching, batches are
    created while the devices compute, because steps are dispatched asynchronously. Grain, tf.data and torch
    `DataLoader`s do their own prefetching, so they don't need this function.

    If reading a batch fails, the iterator raises the same error when that batch is requested. The thread stops at the
    end of the dataset, after an error, or when the iterator is closed (with `close`) or garbage-collected. A checkpoint
    stores the position after the last batch that was returned. For a tf.data dataset, use its own `.prefetch` instead:
    with this function, a resumed run reads all earlier batches of the epoch again.

    >>> list(prefetch([1, 2, 3], size=2))
    [1, 2, 3]

    Args:
      data: Any dataset that `batches` accepts.
      size: The maximum number of batches to read ahead. If it is 0, no thread is started.

    Returns:
      An iterator if `data` is an iterator; otherwise an iterable.
    """
    check_int("prefetch(..., size)", size, "0 for none")
    return with_options(data, prefetch=int(size))


def from_index(make_batch: Callable[[int], types.Batch], num_batches: int | None = None) -> IndexedBatches:
    """Returns a dataset whose `i`-th batch is `make_batch(i)`, so a resumed run doesn't need to reread earlier batches.

    >>> draw = lambda index: {"x": np.random.default_rng(index).integers(10, size=3)}
    >>> len(list(from_index(draw, num_batches=4)))
    4

    Args:
      make_batch: A pure function of the batch index, which starts at 0. Use the index to seed any random number
        generator.
      num_batches: The number of batches in an epoch, or None for an endless dataset.
    """
    if not callable(make_batch):
        raise TypeError(
            f"from_index takes a function of the batch's number, got {checks.describe(make_batch)}. A list of batches "
            "is already a dataset."
        )
    checks.check_positive("from_index(..., num_batches)", num_batches, optional=True)
    return IndexedBatches(make_batch, num_batches)


# Several processes ---------------------------------------------------------------------------------------


def shard_for_process(data: Any, *, process_index: int | None = None, process_count: int | None = None) -> Any:
    """Returns the part of a dataset that this process reads in a multi-process job.

    A single process reads the whole dataset. If there are several processes, the parts that they read don't overlap and
    together make up the whole dataset. If the global batch size stays the same, each global batch contains the same
    examples regardless of the number of processes. A run can therefore resume with a different number of processes.

    - From a dataset of examples (a Grain `MapDataset` or a `tf.data.Dataset`), each of n processes reads every n-th
      example, beginning with the example whose index is the process index. Call this function before you batch the
      dataset (and, with tf.data, before you shuffle it), and then use the per-process batch size.
    - From a dataset of batches (a list, a tuple, or the result of `from_index`), each process reads its share of the
      rows in every batch.

    >>> batches = [{"x": np.arange(4)}, {"x": np.arange(4, 8)}]
    >>> shard_for_process(batches, process_index=1, process_count=2)
    [{'x': array([2, 3])}, {'x': array([6, 7])}]

    Args:
      data: A dataset of one of the kinds listed above. The results of `batched` are treated like those of
        `from_index`.
      process_index: The index of the process, or None to use `jax.process_index()`.
      process_count: The number of processes, or None to use `jax.process_count()`.

    Raises:
      TypeError: If the dataset is of a kind that isn't listed above. The message explains what to do.
      ValueError: If a dataset of examples is already batched, or if the rows of a batch can't be divided evenly among
        the processes.
    """
    place = jax.process_index() if process_index is None else process_index
    count = jax.process_count() if process_count is None else process_count
    checks.check_positive("process_count", count)
    if not 0 <= place < count:
        raise ValueError(f"process_index must be from 0 to {count - 1}, got {place}.")
    if count == 1:
        return data
    if isinstance(data, IndexedBatches):
        share = functools.partial(shard_for_process, process_index=place, process_count=count)
        make_batch = lambda index: _rows_of_process(data.make_batch(index), place, count)
        make_pass = lambda number: share(pass_of(data, number))
        return dataclasses.replace(data, make_batch=make_batch, make_pass=data.make_pass and make_pass)
    if isinstance(data, list | tuple):
        return type(data)(_rows_of_process(batch, place, count) for batch in data)
    kinds = {base.__name__ for base in type(data).__mro__}
    is_grain, is_tensorflow = "MapDataset" in kinds, library(data) == "tensorflow" and hasattr(data, "shard")
    if not is_grain and not is_tensorflow:
        raise TypeError(
            "shard_for_process takes a Grain MapDataset, a tf.data.Dataset, the result of from_index, or a list of "
            f"batches, got {checks.describe(data)}. For a Grain IterDataset, shard the MapDataset it is made of. For a "
            "Grain DataLoader, give its sampler shard_options=grain.sharding.ShardByJaxProcess(). For files, read "
            "files[jax.process_index()::jax.process_count()]."
        )
    if any("Batch" in type(stage).__name__ for stage in stages(data)):
        raise ValueError(
            f"shard_for_process takes a {type(data).__name__} of examples, but this one is batched already, so its "
            "batches would differ from those of one process. Shard first, and then batch by the rows of one process."
        )
    return data[place::count] if is_grain else data.shard(count, place)


def _rows_of_process(batch: types.Batch, place: int, count: int) -> types.Batch:
    rows = checks.num_examples(batch)
    if rows is None or rows % count:
        raise ValueError(
            f"A batch of {checks.batch_in_words(batch)} can't be divided evenly among {count} processes: its leaves "
            f"need a common leading axis whose length is a multiple of {count}."
        )
    mine = slice(place * rows // count, (place + 1) * rows // count)
    return jax.tree.map(lambda leaf: leaf[mine] if np.ndim(leaf) else leaf, batch)
