"""Data as it comes: one pass over any dataset, as an iterator of NumPy batches."""

from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from jaxloop import checks, types

_REMEDY = (
    "Give an iterable of batches: a list of dicts of arrays, a tf.data.Dataset, a DataLoader, or a function without "
    "arguments that returns one."
)


def numpy_batch(batch: types.Batch) -> types.Batch:
    """Turns the `tf.Tensor`s and `torch.Tensor`s in a batch into NumPy arrays; leaves all else as it is.

    A bfloat16 tensor becomes an array of that dtype. Neither library is imported.

    >>> numpy_batch({"name": "a", "x": np.zeros(3)})
    {'name': 'a', 'x': array([0., 0., 0.])}
    """
    return jax.tree.map(_numpy_leaf, batch)


def _numpy_leaf(leaf: Any) -> Any:
    match _library(leaf):
        case "tensorflow" if hasattr(leaf, "numpy"):
            return leaf.numpy()
        case "torch":
            leaf = leaf.detach().cpu()
            if str(leaf.dtype) == "torch.bfloat16":  # NumPy has no such type of its own, and torch does not know JAX's.
                return leaf.float().numpy().astype(jax.numpy.bfloat16)
            return leaf.numpy()
    return leaf


def _library(value: Any) -> str | None:
    """The library whose tensor a value is, also where its class is a subclass from elsewhere."""
    if isinstance(value, np.ndarray | np.generic | jax.Array | int | float):
        return None
    packages = {base.__module__.partition(".")[0] for base in type(value).__mro__}
    return next((name for name in ("tensorflow", "torch") if name in packages), None)


def batches(data: Any) -> Iterator[types.Batch]:
    """One pass over the data, from its start, as an iterator of NumPy batches.

    Args:
      data: a list, a generator, a `tf.data.Dataset`, what `tfds.as_numpy` returns, a torch `DataLoader`, a Grain
        dataset or `DataLoader`, any other iterable of batches, or a function without arguments that returns one.
        A batch is a pytree of arrays or tensors.

    Returns:
      An iterator. It has `get_state` and `set_state` if the data's own iterator has, as Grain's have.

    >>> [int(batch["x"].sum()) for batch in batches(lambda: ({"x": np.ones(n)} for n in (1, 2)))]
    [1, 2]

    Raises:
      TypeError: the data is one batch, or nothing that can be iterated over.
    """
    if not hasattr(data, "__iter__") and not hasattr(data, "__next__") and callable(data):
        returned = data()
        if callable(returned) and not hasattr(returned, "__iter__"):
            name = getattr(data, "__name__", type(data).__name__)
            raise TypeError(f"The dataset function {name} must return batches, got {checks.describe(returned)}.")
        return batches(returned)
    _check_is_no_batch(data)
    if hasattr(data, "as_numpy_iterator"):
        return _wrap(data.as_numpy_iterator())
    return _wrap(iter(data))


def _check_is_no_batch(data: Any) -> None:
    is_array = lambda leaf: isinstance(leaf, np.ndarray | jax.Array) or _is_tensor(leaf)
    is_batch = isinstance(data, dict) or is_array(data)
    # A list of arrays may well be a list of batches; nobody writes a tuple of them for that.
    is_batch |= isinstance(data, tuple) and len(data) > 0 and all(map(is_array, data))
    if is_batch or isinstance(data, str | bytes) or not hasattr(data, "__iter__"):
        what = _describe(data)
        if isinstance(data, tuple):
            what = f"a {what} of arrays, ({', '.join(map(_describe, data))})"
        hint = " For the one batch that this is, write [batch]." if is_batch else ""
        raise TypeError(f"A dataset is an iterator of batches, or an iterable, got {what}. {_REMEDY}{hint}")


def _describe(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if _is_tensor(value) else checks.describe(value)


def _is_tensor(value: Any) -> bool:
    return _library(value) is not None and hasattr(value, "shape") and hasattr(value, "numpy")


class Passes:
    """Data of which each iteration is one pass, by `batches`.

    >>> passes = Passes(lambda: ({"x": np.ones(n)} for n in (1, 2)))
    >>> passes.first()["x"].shape, [len(list(passes)) for _ in range(2)]
    ((1,), [2, 2])
    """

    def __init__(self, data: Any):
        self._data = data
        self._next_pass: Iterator[types.Batch] | None = None

    def __iter__(self) -> Iterator[types.Batch]:
        ahead, self._next_pass = self._next_pass, None
        return batches(self._data) if ahead is None else ahead

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


def peek(iterator: Iterable[types.Batch]) -> tuple[types.Batch, Iterator[types.Batch]]:
    """Looks at the first batch; returns it and an iterator that begins with it.

    The iterator's `get_state`, where there is one, stands before the first batch until that is drawn.

    >>> first, iterator = peek(iter([1, 2, 3]))
    >>> first, list(iterator)
    (1, [1, 2, 3])

    Raises:
      ValueError: there is no batch.
    """
    ahead = iterator if isinstance(iterator, _Batches) else _wrap(iter(iterator))
    try:
        return ahead.peek(), ahead
    except StopIteration:
        raise ValueError(
            "The dataset has no batch. An iterator that was run through before is empty: give a list, a dataset, or a "
            "function that returns a new iterator."
        ) from None


def _wrap(iterator: Any) -> "_Batches":
    resumable = hasattr(iterator, "get_state") and hasattr(iterator, "set_state")
    return _ResumableBatches(iterator) if resumable else _Batches(iterator)


class _Batches(Iterator[types.Batch]):
    """Turns batches into NumPy on their way, and can look one ahead."""

    def __init__(self, iterator: Any):
        self._iterator = iterator
        self._ahead: list[types.Batch] = []

    def __next__(self) -> types.Batch:
        return self._ahead.pop() if self._ahead else numpy_batch(next(self._iterator))

    def peek(self) -> types.Batch:
        if not self._ahead:
            self._ahead.append(numpy_batch(next(self._iterator)))
        return self._ahead[0]


class _ResumableBatches(_Batches):
    """With the position in the data that the iterator itself keeps."""

    def __init__(self, iterator: Any):
        super().__init__(iterator)
        self._state_before: Any = None

    def peek(self) -> types.Batch:
        if not self._ahead:
            self._state_before = self._iterator.get_state()
        return super().peek()

    def get_state(self) -> Any:
        return self._state_before if self._ahead else self._iterator.get_state()

    def set_state(self, state: Any) -> None:
        self._ahead.clear()
        self._iterator.set_state(state)
