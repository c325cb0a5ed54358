"""How each kind of dataset says where an iterator is in it: Grain, tf.data, sequences, PyTorch, or a plain iterator."""

import itertools
import operator
import pathlib
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, final

import jax
import numpy as np

from jaxloop import checks, encoding, types

KINDS = ("state", "state_dict", "tf.data", "sequence", "index", "skip", "unknown")
OR_SKIPPABLE = (
    "or, if it gives the same batches in the same order each time, jaxloop.data.skippable(dataset): then those that "
    "were used are drawn again and skipped"
)
_ENDLESS = 2**48
"""Data that say they have so many batches have no end."""
_SEQUENCE_ITERATORS = (type(iter([])), type(iter(())), type(iter(range(0))))


def library(value: Any) -> str | None:
    """The library, TensorFlow or PyTorch, that a value is of, also where its class is a subclass from elsewhere.

    >>> library(np.ones(2)) is None
    True
    """
    if isinstance(value, np.ndarray | np.generic | jax.Array | int | float):
        return None
    packages = {base.__module__.partition(".")[0] for base in type(value).__mro__}
    return next((name for name in ("tensorflow", "torch") if name in packages), None)


@final
class IndexIterator(Iterator[types.Batch]):
    """The batches `make_batch(0)`, `make_batch(1)`, ..., see `jaxloop.data.from_index`."""

    def __init__(self, make_batch: Callable[[int], types.Batch], num_batches: int | None):
        self.make_batch: Callable[[int], types.Batch] = make_batch
        self.num_batches: int | None = num_batches
        self.next_index: int = 0

    def __next__(self) -> types.Batch:
        if self.num_batches is not None and self.next_index >= self.num_batches:
            raise StopIteration
        batch = self.make_batch(self.next_index)
        self.next_index += 1
        return batch

    @property
    def is_endless(self) -> bool:
        """Whether it has no end."""
        return self.num_batches is None

    def __length_hint__(self) -> int:
        return NotImplemented if self.num_batches is None else max(self.num_batches - self.next_index, 0)

    def get_state(self) -> dict[str, int]:
        return {"next_index": self.next_index}

    def set_state(self, state: dict[str, int]) -> None:
        self.next_index = state["next_index"]


class Source:
    """Where an iterator is in its data, and how it gets there. This one can't say.

    Hooks:
      read: where `is_cheap`, after each batch; else where a checkpoint may be saved.
      restore: when a run goes on from a checkpoint.
      first: before that, to see whether the data are the same.

    Attributes:
      kind: as in `DatasetPosition`; empty for none.
      start: where a number says it all, that of the first batch.
      is_cheap: whether the state may be read at each batch.
      problem: why the state could not be read, and what to do.
    """

    kind: str = ""
    start: int | None = None
    is_cheap: bool = False
    problem: str | None = None

    def read(self) -> Any:
        """The state now, encoded; None where it can't be told."""
        return None

    def restore(self, state: Any) -> Iterator[types.Batch]:
        """Goes to a state; returns the iterator to go on with."""
        raise NotImplementedError

    def first(self) -> types.Batch | None:
        """The first batch, where it can be had without drawing."""
        return None


class _Sequence(Source):
    kind = "sequence"

    def __init__(self, iterator: Any):
        _, (self._items,), *index = iterator.__reduce__()
        self.start = (index[0] if index else 0) or 0  # An iterator at its end has let go of its list.

    def restore(self, state: int) -> Iterator[types.Batch]:
        iterator: Any = iter(self._items)
        iterator.__setstate__(state)
        return iterator

    def first(self) -> types.Batch | None:
        return self._items[0] if len(self._items) else None


class _Index(Source):
    kind = "index"

    def __init__(self, iterator: IndexIterator):
        self._iterator, self.start = iterator, iterator.next_index

    def restore(self, state: int) -> Iterator[types.Batch]:
        self._iterator.next_index = state
        return self._iterator

    def first(self) -> types.Batch | None:
        return self._iterator.make_batch(0)


class _Stateful(Source):
    def __init__(self, kind: str, get: Callable[[], Any], restore: Callable[[Any], Iterator[types.Batch]]):
        self.kind, self._get, self._restore = kind, get, restore
        self.is_cheap = kind != "tf.data"

    def read(self) -> Any:
        self.problem = None
        try:
            state = self._get()
            # The megabytes of tf.data stay bytes until it is known where they go.
            return {"dict": state} if self.kind == "tf.data" else encoding.encode(state)
        except Exception as error:
            reason = re.sub(r"\{\{.*?\}\} | \[Op:.*", "", str(error).partition("\n")[0])
            self.problem = (
                f"its state can't be saved ({type(error).__name__}: {reason}). Build it of parts that can be, "
                f"{OR_SKIPPABLE}."
            )
        return None

    def restore(self, state: Any) -> Iterator[types.Batch]:
        return self._restore(encoding.decode(state))


def num_batches(data: Any) -> int | None:
    """How many batches there are in a pass over the data, or left in an iterator; None where nobody knows.

    >>> num_batches([1, 2, 3]), num_batches(iter([1, 2])), num_batches(each for each in [1])
    (3, 2, None)
    """
    try:
        found = operator.length_hint(data, -1)
    except Exception:  # Such as a tf.data pipeline raises, whose length is not known.
        return None
    return found if 0 <= found < _ENDLESS else None


def is_endless(data: Any) -> bool:
    """Whether data are known to have no end; they may say so by an attribute of this name.

    >>> is_endless(itertools.cycle([1])), is_endless([1])
    (True, False)
    """
    if isinstance(said := getattr(data, "is_endless", None), bool):
        return said
    if isinstance(data, itertools.cycle | itertools.count):
        return True
    if isinstance(data, itertools.repeat):
        return operator.length_hint(data, -1) == -1  # The one without a number of times has no length.
    if library(data) == "tensorflow" and hasattr(data, "cardinality"):
        return int(data.cardinality()) == -1  # tf.data.INFINITE_CARDINALITY
    try:
        return len(data) >= _ENDLESS  # As Grain says of `.repeat()`.
    except Exception:
        return False


def source_of(dataset: Any, iterator: Any) -> Source:
    """How an iterator of a dataset says where it is.

    >>> source_of([], iter([])).kind
    'sequence'
    """
    has = lambda value, *names: all(callable(getattr(value, name, None)) for name in names)
    tensorflow = sys.modules.get("tensorflow")
    if isinstance(iterator, _SEQUENCE_ITERATORS):
        return _Sequence(iterator)
    if isinstance(iterator, IndexIterator):
        return _Index(iterator)
    if tensorflow and isinstance(iterator, (tensorflow.data.Iterator, tensorflow.data.NumpyIterator)):
        return _Stateful("tf.data", lambda: _save_tf(iterator), lambda state: _restore_tf(iterator, state))
    if has(iterator, "get_state", "set_state"):
        return _Stateful("state", iterator.get_state, lambda state: (iterator, iterator.set_state(state))[0])
    # PyTorch's StatefulDataLoader has them itself; the iterator made next goes to the state.
    keeper = dataset if has(dataset, "state_dict", "load_state_dict") else iterator
    if has(keeper, "state_dict", "load_state_dict"):
        load = lambda state: keeper.load_state_dict(_with_tensors(state))
        restore = lambda state: (load(state), iterator if keeper is iterator else iter(dataset))[1]
        return _Stateful("state_dict", lambda: _without_tensors(keeper.state_dict()), restore)
    return Source()


def _save_tf(iterator: Any) -> dict[str, bytes]:
    """The files of the checkpoint of a tf.data iterator, by the ends of their names."""
    with tempfile.TemporaryDirectory() as directory:
        sys.modules["tensorflow"].train.Checkpoint(iterator=iterator).write(f"{directory}/state")
        return {path.name.removeprefix("state."): path.read_bytes() for path in pathlib.Path(directory).iterdir()}


def _restore_tf(iterator: Any, state: dict[str, bytes]) -> Any:
    with tempfile.TemporaryDirectory() as directory:
        for ending, content in state.items():
            (pathlib.Path(directory) / pathlib.Path(f"state.{ending}").name).write_bytes(content)
        checkpoint = sys.modules["tensorflow"].train.Checkpoint(iterator=iterator)
        checkpoint.read(f"{directory}/state").assert_consumed()
    return iterator


# A state of PyTorch's holds tensors: those of random number generators.
_TENSOR = "torch.Tensor"


def _without_tensors(state: Any) -> Any:
    return jax.tree.map(lambda leaf: {_TENSOR: leaf.cpu().numpy()} if library(leaf) == "torch" else leaf, state)


def _with_tensors(state: Any) -> Any:
    is_tensor = lambda node: isinstance(node, dict) and set(node) == {_TENSOR}
    back = lambda leaf: sys.modules["torch"].from_numpy(leaf[_TENSOR]) if is_tensor(leaf) else leaf
    return jax.tree.map(back, state, is_leaf=is_tensor)


def why_unknown(dataset: Any) -> str:
    """Why an iterator of a dataset can't say where it is, and what to do."""
    give = "a list, a Grain dataset, a tf.data.Dataset, or jaxloop.data.from_index(function)"
    packages = {base.__module__.partition(".")[0] for base in type(dataset).__mro__}
    if "tensorflow_datasets" in packages:
        give = "the tf.data.Dataset itself, or its as_numpy_iterator()"
    elif "torch" in packages:
        give = "torchdata's StatefulDataLoader in its place"
    return f"{name_of(dataset)} can't say where it is. Give {give}, {OR_SKIPPABLE}."


def name_of(dataset: Any) -> str:
    """What a message calls a dataset."""
    name = type(dataset).__name__
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


# What is a dataset -----------------------------------------------------------------------------------

_REMEDY = (
    "Give an iterable of batches: a list of dicts of arrays, a tf.data.Dataset, a DataLoader, or, of a function "
    "without arguments that returns one, jaxloop.skippable(function)."
)


def is_function(data: Any) -> bool:
    """Whether data are a function that returns them, and nothing to iterate over itself.

    >>> is_function(lambda: []), is_function([])
    (True, False)
    """
    return callable(data) and not hasattr(data, "__iter__") and not hasattr(data, "__next__")


def check_is_dataset(data: Any) -> None:
    """Raises a `TypeError` where data is one batch, or nothing that can be iterated over.

    >>> check_is_dataset([{"x": np.ones(2)}])
    """
    is_array = lambda leaf: isinstance(leaf, np.ndarray | jax.Array) or _is_tensor(leaf)
    is_batch = isinstance(data, dict) or is_array(data)
    # A list of arrays may well be a list of batches; nobody writes a tuple of them for that.
    is_batch |= isinstance(data, tuple) and len(data) > 0 and all(map(is_array, data))
    if is_batch or isinstance(data, str | bytes) or not (hasattr(data, "__iter__") or hasattr(data, "__next__")):
        what = _describe(data)
        if isinstance(data, tuple):
            what = f"a {what} of arrays, ({', '.join(map(_describe, data))})"
        hint = " For the one batch that this is, write [batch]." if is_batch else ""
        raise TypeError(f"A dataset is an iterator of batches, or an iterable, got {what}. {_REMEDY}{hint}")


def _describe(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if _is_tensor(value) else checks.describe(value)


def _is_tensor(value: Any) -> bool:
    return library(value) is not None and hasattr(value, "shape") and hasattr(value, "numpy")
