"""Functions and classes that save and restore positions in sequences and in Grain, tf.data and PyTorch datasets."""

import contextlib
import copy
import dataclasses
import functools
import itertools
import operator
import pathlib
import random
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast, final

import jax
import numpy as np

from jaxloop import types
from jaxloop.base import checks, encoding
from jaxloop.data.tensors import library

NUMBERS = ("torch", "sequence", "index", "skip")
"""The kinds of positions that are valid only if the batch size stays the same, because they count batches."""
OR_SKIPPABLE = (
    "or, if every epoch has the same batches in the same order, jaxloop.data.skippable(dataset): a resumed run then "
    "reads the batches of the epoch again and skips them"
)
_ENDLESS = 2**48
"""A dataset that reports at least this many batches counts as endless."""
_ADDRESS = re.compile(rb" at 0x[0-9a-f]+")
_SEQUENCE_ITERATORS = (type(iter([])), type(iter(())), type(iter(range(0))))


def made_by(function: Callable[[int], Any], index: int) -> Any:
    """Returns the result of `function(index)`, which is a batch or an example.

    Raises:
      RuntimeError: If the function raises `StopIteration`.
    """
    try:
        return function(index)
    except StopIteration as error:
        raise RuntimeError(
            f"{getattr(function, '__qualname__', function)} raised StopIteration for the index {index}. Only the "
            "number of batches can end the data. Does it read from an iterator that has ended?"
        ) from error


class Wrapper:
    """The base class of jaxloop's datasets and iterators that wrap another dataset or iterator.

    Hooks:
      __length_hint__: Returns the number of remaining batches, or `NotImplemented` if it is unknown.

    Attributes:
      inner: The dataset or iterator that the batches are read from.
    """

    inner: Any

    def __length_hint__(self) -> int:
        number = num_batches(self.inner)
        return NotImplemented if number is None else number


@final
class IndexIterator(Wrapper, Iterator[types.Batch]):
    """An iterator over the batches of an `IndexedBatches`, in order."""

    def __init__(self, dataset: "IndexedBatches"):
        self.inner: IndexedBatches = dataset
        self.next_index: int = 0

    def __next__(self) -> types.Batch:
        if self.inner.num_batches is not None and self.next_index >= self.inner.num_batches:
            raise StopIteration
        batch = made_by(self.inner.make_batch, self.next_index)
        self.next_index += 1
        return batch

    def go_to(self, index: int) -> "IndexIterator":
        """Moves to the batch at the given index and returns this iterator."""
        self.next_index = index
        return self

    def __length_hint__(self) -> int:
        number = self.inner.num_batches
        return NotImplemented if number is None else max(number - self.next_index, 0)


@final
@dataclasses.dataclass(frozen=True)
class IndexedBatches(Iterable[types.Batch]):
    """A dataset whose batches are created by index. Returned by `from_index` and `batched`.

    Attributes:
      make_batch: A pure function that returns the batch at a given index.
      num_batches: The number of batches in an epoch, or None for an endless dataset.
      make_pass: None if all passes are the same. Otherwise, a function that takes the number of a pass (counting from
        0) and returns the dataset for that pass. The returned dataset has the same `make_pass`.
    """

    make_batch: Callable[[int], types.Batch]
    num_batches: int | None
    make_pass: Callable[[int], "IndexedBatches"] | None = None

    def __iter__(self) -> IndexIterator:
        return IndexIterator(self)

    @property
    def is_endless(self) -> bool:
        """True if the dataset is endless."""
        return self.num_batches is None

    def __len__(self) -> int:
        if self.num_batches is None:
            raise TypeError("from_index(make_batch) without num_batches is endless and has no length.")
        return self.num_batches


NO_DATA = IndexedBatches(lambda index: None, None)
"""The dataset of a run with `train_dataset=None`: every batch is None, and the position is the next batch's index."""


def pass_of(data: Any, number: int = 0) -> Any:
    """Returns the dataset for pass `number`, counting from 0, with the options of the original dataset.

    Only two kinds of datasets differ from pass to pass: Hugging Face `IterableDataset`s, and the results of `batched`.
    Other datasets are returned unchanged.
    """
    if isinstance(data, IndexedBatches):
        return data if data.make_pass is None else data.make_pass(number)
    if is_hugging_face(data) and hasattr(data, "set_epoch"):
        data = copy.copy(data)  # Each pass has its own state.
        data.set_epoch(number)
        return data
    if not isinstance(data, Wrapper) or hasattr(data, "__next__"):
        return data
    inner = pass_of(data.inner, number)
    return data if inner is data.inner else dataclasses.replace(cast(Any, data), inner=inner)


def _innermost(data: Any) -> Any:
    """Removes all of jaxloop's wrappers from a dataset or iterator. Returns the innermost dataset or iterator."""
    while isinstance(data, Wrapper):
        data = data.inner
    return data


@dataclasses.dataclass(eq=False)
class Source:
    """Saves and restores the position of an iterator.

    Attributes:
      kind: The kind of position, as in `DatasetPosition`, or an empty string if the position is unknown.
      get: A function that returns the state of the iterator in encoded form, or None if there is no state to read.
      go_to: A function that restores a saved state and returns the iterator to continue with.
      start: The encoded state before the first batch. It is an int if the state is the index of the next batch, and
        None if `get` must be called to read the state.
      problem: A message that explains why the state can't be saved and what to do, or None if there is no problem.

    Hooks:
      read: Reads the current state. Called before the first batch is read (if `start` is None), and later whenever a
        checkpoint may be saved. If `is_cheap` is True, also called after each batch that is read ahead.
    """

    kind: str
    get: Callable[[], Any] | None = None
    go_to: Callable[[Any], Any] = lambda state: None
    start: Any = None
    problem: str | None = None

    @property
    def is_cheap(self) -> bool:
        """True if the state can be read after each batch, because reading it takes only microseconds."""
        return self.kind in ("state", "state_dict")

    def read(self) -> Any:
        """Returns the current state in encoded form, or None if it is unknown."""
        if self.get is None:
            return None
        self.problem = None
        try:
            return self.get()
        except Exception as error:
            reason = re.sub(r"\{\{.*?\}\} | \[Op:.*", "", str(error).partition("\n")[0])
            self.problem = (
                f"its state can't be saved ({type(error).__name__}: {reason}). Use only parts whose state can be "
                f"saved, {OR_SKIPPABLE}."
            )
        return None


class _TensorFlow(Source):
    """The position of a tf.data iterator, saved as a checkpoint of the iterator.

    If the dataset is shuffled, a seed generator determines the order of the next epoch. All iterators over the dataset
    share this generator, and creating an iterator advances it. Restoring an iterator restores the generator only if the
    shuffle has elements left. Therefore, the state before the first batch is saved too: restoring an iterator from that
    state resets the generator to its state at the start of the epoch. The state before the first batch is not saved if
    a `repeat` or `cache` follows a shuffle, because resetting the generator would then be wrong.

    Args:
      iterator: The iterator.
      is_given: Whether the user passed this iterator instead of a dataset. If so, no other iterator can be created.
    """

    def __init__(self, iterator: Any, *, is_given: bool):
        # A state may take megabytes, so it stays as bytes until it is stored.
        super().__init__("tf.data", lambda: {"dict": _save_tf(self._iterator)}, self._restore)
        self._iterator, self._dataset, self._is_given = iterator, iterator._dataset, is_given
        self._start: Any = None if is_given or _repeats_a_shuffle(self._dataset) else super().read()

    def read(self) -> Any:
        state = super().read()
        return state and {"start": self._start, "now": state}

    def _restore(self, state: Any) -> Iterator[types.Batch]:
        self._start = state["start"]
        if not self._is_given:  # TensorFlow can't restore some iterators after their first batch.
            self._iterator = type(self._iterator)(self._dataset)
        _restore_tf(self._iterator, encoding.decode(state["now"]))
        if self._start:
            _restore_tf(type(self._iterator)(self._dataset), encoding.decode(self._start))
        return self._iterator


class _Torch(Source):
    """The position in a PyTorch loader, whose batches depend on the random state at the start of the epoch.

    If the loader has no `state_dict` method, a resumed run reads the epoch again from the start and skips the batches
    that were already used.

    Args:
      loader: The loader.
      start: The result that `random_state(loader)` returned before the iterator was created.
    """

    def __init__(self, loader: Any, start: Any):
        has_state = _has(loader, "state_dict", "load_state_dict")
        kind, get = ("state_dict", self._get) if has_state else ("torch", None)
        super().__init__(kind, get, self._restart, start=_encode({"start": start}))
        self._loader, self._start = loader, start

    def _get(self) -> Any:
        now = {"now": random_state(self._loader), "loader": self._loader.state_dict()}
        return _encode({"start": self._start, **now})

    def _restart(self, state: Any) -> Iterator[types.Batch]:
        state = _decode(state)
        self._start = state["start"]
        _set_random_state(self._loader, self._start)
        if "loader" in state:
            self._loader.load_state_dict(state["loader"])
        iterator = iter(self._loader)
        if "now" in state:
            _set_random_state(self._loader, state["now"])
        return iterator


def num_batches(data: Any) -> int | None:
    """Returns the number of batches in one epoch of a dataset, or None if the number is unknown or infinite.

    For an iterator, returns the number of remaining batches.

    >>> num_batches([1, 2, 3]), num_batches(iter([1, 2])), num_batches(each for each in [1])
    (3, 2, None)
    """
    found = _length(data)
    return found if 0 <= found < _ENDLESS else None


def _length(data: Any) -> int:
    try:
        return operator.length_hint(data, -1)
    except Exception:  # A tf.data pipeline of unknown length raises an error.
        return -1


def is_endless(data: Any) -> bool:
    """Returns True if a dataset is known to be endless. A dataset can declare this with an `is_endless` attribute.

    >>> is_endless(itertools.cycle([1])), is_endless([1])
    (True, False)
    """
    data = _innermost(data)
    if isinstance(reported := getattr(data, "is_endless", None), bool):
        return reported
    if isinstance(data, itertools.cycle | itertools.count | itertools.repeat):
        return operator.length_hint(data, -1) == -1  # `repeat` with a number of repetitions has a length.
    if library(data) == "tensorflow" and hasattr(data, "cardinality"):
        return int(data.cardinality()) == -1  # tf.data.INFINITE_CARDINALITY
    return _length(data) >= _ENDLESS  # Grain reports such a length for `.repeat()`.


def is_hugging_face(data: Any) -> bool:
    """Returns True if `data` is a dataset from Hugging Face's `datasets`. Doesn't import that library.

    >>> is_hugging_face([])
    False
    """
    module = sys.modules.get("datasets")
    kinds = tuple(getattr(module, name) for name in ("Dataset", "IterableDataset") if hasattr(module, name))
    return isinstance(data, kinds)


def _has(value: Any, *methods: str) -> bool:
    return all(callable(getattr(value, name, None)) for name in methods)


def source_of(dataset: Any, iterator: Any, start: Any = None) -> Source:
    """Returns a `Source` that saves and restores the position of an iterator over a dataset.

    >>> source_of([], iter([])).kind
    'sequence'

    Args:
      dataset: The dataset.
      iterator: The iterator that was created from the dataset.
      start: The result that `random_state(dataset)` returned before the iterator was created.
    """
    tensorflow = sys.modules.get("tensorflow")
    if isinstance(iterator, _SEQUENCE_ITERATORS):
        reduced: Any = iterator.__reduce__()
        _, (items,), *index = reduced  # An exhausted iterator has no index.
        return Source("sequence", None, lambda index: itertools.islice(items, index, None), (*index, 0)[0] or 0)
    if isinstance(iterator, IndexIterator):
        return Source("index", None, iterator.go_to, iterator.next_index)
    if tensorflow and isinstance(iterator, (tensorflow.data.Iterator, tensorflow.data.NumpyIterator)):
        return _TensorFlow(iterator, is_given=dataset is iterator)
    if _is_loader(dataset):
        return _Torch(dataset, start)
    if _has(iterator, "get_state", "set_state"):
        get = lambda: encoding.encode(iterator.get_state())
        current = lambda state: _with_current_addresses(encoding.decode(state), iterator.get_state())
        return Source("state", get, lambda state: (iterator.set_state(current(state)), iterator)[1])
    # If the loader has these methods itself, the next iterator that it creates continues from the loaded state.
    owner = dataset if _has(dataset, "state_dict", "load_state_dict") else iterator
    if _has(owner, "state_dict", "load_state_dict"):
        load = lambda state: owner.load_state_dict(_decode(state))
        go_to = lambda state: (load(state), iterator if owner is iterator else iter(dataset))[1]
        return Source("state_dict", lambda: _encode(owner.state_dict()), go_to)
    give = "a list, a Grain dataset, a DataLoader, a tf.data.Dataset (not tfds.as_numpy)"
    remedy = f"Give {give}, or jaxloop.data.from_index(function), {OR_SKIPPABLE}."
    return Source("", problem=f"{name_of(dataset)} can't report its position. {remedy}")


def _with_current_addresses(state: Any, now: Any) -> Any:
    """Replaces the memory addresses in a saved state with those in the current state `now`.

    Grain compares the saved `repr` of a loader's data source with the current one. By default, a `repr` contains the
    address of the object.
    """
    if not isinstance(state, bytes) or not isinstance(now, bytes):
        return state
    found = iter(_ADDRESS.findall(now))
    return _ADDRESS.sub(lambda address: next(found, address[0]), state)


def _save_tf(iterator: Any) -> dict[str, bytes]:
    """Returns the contents of a tf.data iterator's checkpoint files, keyed by file name suffix."""
    with tempfile.TemporaryDirectory() as directory:
        sys.modules["tensorflow"].train.Checkpoint(iterator=iterator).write(f"{directory}/state")
        return {path.name.removeprefix("state."): path.read_bytes() for path in pathlib.Path(directory).iterdir()}


def _restore_tf(iterator: Any, state: dict[str, bytes]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        for ending, content in state.items():
            (pathlib.Path(directory) / pathlib.Path(f"state.{ending}").name).write_bytes(content)
        checkpoint = sys.modules["tensorflow"].train.Checkpoint(iterator=iterator)
        checkpoint.read(f"{directory}/state").assert_consumed()


def stages(dataset: Any) -> Iterator[Any]:
    """Yields a tf.data or Grain dataset, followed by all datasets that it reads from."""
    yield dataset
    for each in dataset._inputs() if hasattr(dataset, "_inputs") else getattr(dataset, "_parents", ()):
        yield from stages(each)


def _repeats_a_shuffle(dataset: Any) -> bool:
    repeated = [each for each in stages(dataset) if re.search("Repeat|Cache", type(each).__name__)]
    return any("Shuffle" in type(part).__name__ for each in repeated for part in stages(each))


# PyTorch's loaders -----------------------------------------------------------------------------------


def _is_loader(dataset: Any) -> bool:
    return library(dataset) == "torch" and hasattr(dataset, "batch_sampler")


def _parts(part: Any) -> Iterator[Any]:
    """Yields a loader and all of its samplers. The same sampler may be yielded twice."""
    if part is not None:
        yield part
        yield from _parts(getattr(part, "sampler", None))
        yield from _parts(getattr(part, "batch_sampler", None))


def _random_states(loader: Any) -> list[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """Returns a getter and a setter for each random state that a PyTorch loader's batches may depend on."""
    torch, parts = sys.modules["torch"], list(_parts(loader))
    generators: list[Any] = [getattr(part, "generator", None) for part in parts]
    set_epoch = lambda part: functools.partial(setattr, part, "epoch")
    return [
        (torch.get_rng_state, torch.set_rng_state),
        (np.random.get_state, np.random.set_state),
        (random.getstate, random.setstate),
        *((each.get_state, each.set_state) for each in generators if _has(each, "get_state", "set_state")),
        *((functools.partial(getattr, part, "epoch"), set_epoch(part)) for part in parts if hasattr(part, "epoch")),
    ]


def random_state(dataset: Any) -> Any:
    """Returns the states of the random number generators that a PyTorch loader may use, or None for other datasets."""
    return [get() for get, _ in _random_states(dataset)] if _is_loader(dataset) else None


def _set_random_state(loader: Any, state: Any) -> None:
    for (_, set_state), each in zip(_random_states(loader), state, strict=True):
        set_state(each)


@contextlib.contextmanager
def keeping_random_state(dataset: Any) -> Iterator[None]:
    """Returns a context manager that, on exit, resets a PyTorch loader's random state to its value on entry.

    It does nothing for other datasets. Evaluations run in this context.
    """
    loader = _innermost(dataset)
    state = random_state(loader)
    try:
        yield
    finally:
        if state is not None:
            _set_random_state(loader, state)


# The key that marks an array that was a tensor in a PyTorch state, such as the state of a generator.
_TENSOR = "torch.Tensor"


def _encode(state: Any) -> Any:
    """Encodes a state that may contain PyTorch tensors, so that it can be stored in JSON."""
    without = lambda leaf: {_TENSOR: leaf.cpu().numpy()} if library(leaf) == "torch" else leaf
    return encoding.encode(jax.tree.map(without, state))


def _decode(state: Any) -> Any:
    is_tensor = lambda node: isinstance(node, dict) and set(node) == {_TENSOR}
    back = lambda leaf: sys.modules["torch"].from_numpy(leaf[_TENSOR]) if is_tensor(leaf) else leaf
    return jax.tree.map(back, encoding.decode(state), is_leaf=is_tensor)


def name_of(dataset: Any) -> str:
    """Returns the name of a dataset's class, preceded by "a" or "an", for use in messages."""
    name = type(dataset).__name__
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


# Checks ----------------------------------------------------------------------------------------------


def check_int(name: str, value: Any, otherwise: str) -> None:
    """Raises an error unless `value` is a non-negative int. `otherwise` is text for the message, such as "or None"."""
    is_int = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_int or value < 0:
        raise (ValueError if is_int else TypeError)(f"{name} must be a non-negative int, {otherwise}, got {value!r}.")


def is_function(data: Any) -> bool:
    """Returns True if `data` is a function that returns a dataset, that is, if it is callable but not iterable.

    >>> is_function(lambda: []), is_function([])
    (True, False)
    """
    return callable(data) and not hasattr(data, "__iter__") and not hasattr(data, "__next__")


def check_is_dataset(data: Any) -> None:
    """Raises a `TypeError` if `data` is a single batch or isn't iterable.

    >>> check_is_dataset([{"x": np.ones(2)}])
    """
    check_format(data)
    is_array = lambda leaf: (
        isinstance(leaf, np.ndarray | jax.Array) or (library(leaf) is not None and hasattr(leaf, "shape"))
    )
    is_batch = isinstance(data, dict) or is_array(data)
    # A list of arrays is probably a list of batches, but a tuple of arrays is probably one batch.
    is_batch |= isinstance(data, tuple) and len(data) > 0 and all(map(is_array, data))
    if is_batch or isinstance(data, str | bytes) or not (hasattr(data, "__iter__") or hasattr(data, "__next__")):
        raise TypeError(
            f"A dataset must be an iterator or an iterable of batches, got {checks.describe(data)}. For a single "
            "batch, write [batch]. For whole arrays, write jaxloop.data.batched(arrays, 64, seed=0). For a function "
            "without arguments that returns a dataset, write jaxloop.skippable(function)."
        )


def check_format(data: Any) -> None:
    """Raises a `TypeError` if `data` is a Hugging Face dataset in a format whose rows aren't arrays or tensors."""
    if not is_hugging_face(data):
        return
    # An `IterableDataset` has no public format.
    kind = data.format["type"] if hasattr(data, "format") else data._formatting and data._formatting.format_type
    if kind not in ("numpy", "jax", "torch", "tensorflow", "custom"):
        raise TypeError(
            f"A Hugging Face {type(data).__name__} in the {kind or 'python'} format does not yield batches of arrays. "
            'Write dataset.with_format("numpy").batch(32), without .batch(32) if its rows are batches already. For a '
            "Dataset of examples in any format, write jaxloop.data.batched(dataset, 32)."
        )
