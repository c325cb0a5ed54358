"""Data as they come: one pass over any dataset, as an iterator of NumPy batches that knows its position."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, final

import jax
import numpy as np

from jaxloop import checks, types
from jaxloop.fingerprint import describe_source
from jaxloop.position import PositionedIterator, skippable, with_options
from jaxloop.sources import IndexedBatches, is_endless, is_function, library, num_batches

__all__ = [
    "Passes",
    "batches",
    "from_index",
    "is_endless",
    "is_one_pass",
    "num_batches",
    "numpy_batch",
    "peek",
    "prefetch",
    "shard_for_process",
    "skippable",
]

_NUMPY_ALONE = {np.ndarray}


def numpy_batch(batch: types.Batch) -> types.Batch:
    """Turns the `tf.Tensor`s and `torch.Tensor`s in a batch into NumPy arrays; leaves all else as it is.

    A bfloat16 tensor becomes an array of that dtype. Neither library is imported.

    >>> numpy_batch({"name": "a", "x": np.zeros(3)})
    {'name': 'a', 'x': array([0., 0., 0.])}
    """
    leaves = batch.values() if type(batch) is dict else batch if type(batch) in (tuple, list) else ()
    if {*map(type, leaves)} == _NUMPY_ALONE:
        return batch
    return jax.tree.map(_numpy_leaf, batch)


def _numpy_leaf(leaf: Any) -> Any:
    match library(leaf):
        case "tensorflow" if hasattr(leaf, "numpy"):
            return leaf.numpy()
        case "torch":
            leaf = leaf.detach().cpu()
            if str(leaf.dtype) == "torch.bfloat16":  # NumPy has no such type of its own, and torch does not know JAX's.
                return leaf.float().numpy().astype(jax.numpy.bfloat16)
            return leaf.numpy()
    return leaf


def batches(data: Any) -> PositionedIterator:
    """One pass over the data, from its start, as an iterator of NumPy batches.

    Args:
      data: a list, a generator, a `tf.data.Dataset`, what `tfds.as_numpy` returns, a torch `DataLoader`, a Grain
        dataset or `DataLoader`, any other iterable of batches, or a function without arguments that returns one.
        A batch is a pytree of arrays or tensors.

    Returns:
      An iterator that knows its position in the data.

    >>> [int(batch["x"].sum()) for batch in batches(lambda: ({"x": np.ones(n)} for n in (1, 2)))]
    [1, 2]

    Raises:
      TypeError: the data is one batch, or nothing that can be iterated over.
    """
    if is_function(data):
        returned = data()
        if callable(returned) and not hasattr(returned, "__iter__"):
            name = getattr(data, "__name__", type(data).__name__)
            raise TypeError(f"The dataset function {name} must return batches, got {checks.describe(returned)}.")
        return batches(returned)
    return PositionedIterator(data, _iterate).converted_by(numpy_batch)


def _iterate(data: Any) -> Iterator[types.Batch]:
    return data.as_numpy_iterator() if hasattr(data, "as_numpy_iterator") else iter(data)


@final
class Passes:
    """Data of which each iteration is one pass, by `batches`.

    >>> passes = Passes(lambda: ({"x": np.ones(n)} for n in (1, 2)))
    >>> passes.first()["x"].shape, [len(list(passes)) for _ in range(2)]
    ((1,), [2, 2])
    """

    def __init__(self, data: Any):
        self._data = data
        self._next_pass: PositionedIterator | None = None

    def __iter__(self) -> PositionedIterator:
        ahead, self._next_pass = self._next_pass, None
        return batches(self._data) if ahead is None else ahead

    def __length_hint__(self) -> int:
        found = num_batches(self._data)
        return NotImplemented if found is None else found

    @property
    def is_endless(self) -> bool:
        """Whether a pass is known to have no end."""
        return is_endless(self._data)

    def first(self) -> types.Batch:
        """The first batch of the next pass, which stays there.

        Raises:
          ValueError: there is no batch.
        """
        batch, self._next_pass = peek(iter(self))
        return batch


def is_one_pass(data: Any) -> bool:
    """Whether a second pass over the data would be empty, or begin where the first ended: it is an iterator.

    >>> is_one_pass([{"x": 1}]), is_one_pass(iter([{"x": 1}])), is_one_pass(lambda: iter([{"x": 1}]))
    (False, True, False)
    """
    return hasattr(data, "__next__")


def peek(iterator: Iterable[types.Batch]) -> tuple[types.Batch, PositionedIterator]:
    """Looks at the first batch; returns it and an iterator that begins with it.

    The iterator's position stays before the first batch until that is drawn.

    >>> first, iterator = peek(iter([1, 2, 3]))
    >>> first, list(iterator)
    (1, [1, 2, 3])

    Raises:
      ValueError: there is no batch.
    """
    ahead = iterator if isinstance(iterator, PositionedIterator) else PositionedIterator(iterator)
    ahead.converted_by(numpy_batch)
    try:
        return ahead.peek(), ahead
    except StopIteration:
        raise ValueError(
            "The dataset has no batch. An iterator that was run through before is empty: give a list, a dataset, or a "
            "function that returns a new iterator."
        ) from None


# Made by number, and drawn ahead -----------------------------------------------------------------------


def prefetch(data: Any, size: int = 2) -> Iterable[types.Batch]:
    """Has one thread draw up to `size` batches ahead of their use, on the host.

    It helps where a batch takes long to make, and the making waits for files or the network, or is done in NumPy or
    other code that lets Python go on meanwhile. It does not help to overlap the making of a batch with the computation
    on the device: steps are dispatched asynchronously, so they overlap without it. Nor with Grain, tf.data and torch
    `DataLoader`s, which draw ahead themselves. It costs some microseconds a batch.

    An error in the data is raised where its batch would have come. The thread ends with the data, with an error, with
    the iterator's `close`, and when the iterator is no longer used. Positions are those of the batches handed out. For
    tf.data they are by the batches since the state of the position told before, which are drawn again: give tf.data its
    own `.prefetch` instead.

    >>> list(prefetch([1, 2, 3], size=2))
    [1, 2, 3]

    Args:
      data: what `batches` takes.
      size: how many; 0 for no thread.

    Returns:
      An iterable; of an iterator, an iterator.
    """
    if isinstance(size, bool) or not isinstance(size, int | np.integer):
        raise TypeError(f"prefetch takes a number of batches as its size, 0 for none, got {size!r}.")
    if size < 0:
        raise ValueError(f"prefetch takes a number of batches as its size, 0 for none, got {size}.")
    return with_options(data, prefetch=int(size))


def from_index(make_batch: Callable[[int], types.Batch], num_batches: int | None = None) -> IndexedBatches:
    """Data whose batch number `i` is `make_batch(i)`: any position in them is gone to at once.

    >>> draw = lambda index: {"x": np.random.default_rng(index).integers(10, size=3)}
    >>> len(list(from_index(draw, num_batches=4)))
    4

    Args:
      make_batch: a function of the batch's number, from 0, and of nothing that changes: take random numbers from a
        generator that it is the seed of.
      num_batches: how many batches a pass has; None for no end.
    """
    if not callable(make_batch):
        raise TypeError(
            f"from_index takes a function of the batch's number, got {checks.describe(make_batch)}. Batches in a list "
            "are a dataset as they are."
        )
    checks.check_positive("from_index(..., num_batches)", num_batches, optional=True)
    return IndexedBatches(make_batch, num_batches)


# Each process its part -----------------------------------------------------------------------------------


def shard_for_process(data: Any, *, process_index: int | None = None, process_count: int | None = None) -> Any:
    """The part of the data that this process is to feed in a job of several; in one process, all of it.

    The parts don't overlap, and together are all the data. In each step the batches of all processes together hold the
    same examples, however many processes there are, as long as they add up to the same size: so a run may go on with
    another number of them.

    - Of examples, in a Grain `MapDataset` or a `tf.data.Dataset`, every n-th, for n processes. Shard first (before
      you shuffle with tf.data), then batch by the rows of one process.
    - Of batches, in what `from_index` returns, a list or a tuple, the rows of this process in each.

    >>> batches = [{"x": np.arange(4)}, {"x": np.arange(4, 8)}]
    >>> shard_for_process(batches, process_index=1, process_count=2)
    [{'x': array([2, 3])}, {'x': array([6, 7])}]

    Args:
      data: as said above.
      process_index: which process; None for `jax.process_index()`.
      process_count: of how many; None for `jax.process_count()`.

    Raises:
      TypeError: data of another kind; the error says what to do.
      ValueError: the examples were batched already, or the rows of a batch don't divide.
    """
    place = jax.process_index() if process_index is None else process_index
    count = jax.process_count() if process_count is None else process_count
    checks.check_positive("process_count", count)
    if not 0 <= place < count:
        raise ValueError(f"process_index must be from 0 to {count - 1}, got {place}.")
    if count == 1:
        return data
    if isinstance(data, IndexedBatches):
        make_batch = lambda index: _rows_of_process(data.make_batch(index), place, count)
        return IndexedBatches(make_batch, data.num_batches)
    if isinstance(data, list | tuple):
        return type(data)(_rows_of_process(batch, place, count) for batch in data)
    kinds = {base.__name__ for base in type(data).__mro__}
    is_grain, is_tensorflow = "MapDataset" in kinds, library(data) == "tensorflow" and hasattr(data, "shard")
    if not is_grain and not is_tensorflow:
        raise TypeError(
            "shard_for_process takes a Grain MapDataset, a tf.data.Dataset, what from_index returns, or a list of "
            f"batches, got {checks.describe(data)}. Of a Grain IterDataset, shard the MapDataset it is made of; a "
            "Grain DataLoader takes shard_options=grain.sharding.ShardByJaxProcess() in its sampler; of files, read "
            "files[jax.process_index()::jax.process_count()]."
        )
    if any("Batch" in line.split("(")[0] for line in describe_source(data)):
        raise ValueError(
            f"shard_for_process takes {type(data).__name__} of examples, and these were batched before: the n-th batch "
            "would be another one than in one process. Shard first, and then batch by the rows of one process."
        )
    return data[place::count] if is_grain else data.shard(count, place)


def _rows_of_process(batch: types.Batch, place: int, count: int) -> types.Batch:
    rows = checks.num_examples(batch)
    if rows is None or rows % count:
        raise ValueError(
            f"A batch of {checks.batch_in_words(batch)} does not divide over {count} processes: its leaves need a "
            f"common leading axis, of a multiple of {count}."
        )
    mine = slice(place * rows // count, (place + 1) * rows // count)
    return jax.tree.map(lambda leaf: leaf[mine] if np.ndim(leaf) else leaf, batch)
