"""How each kind of dataset says where an iterator is in it: Grain, tf.data, sequences, PyTorch, or a plain iterator."""

import contextlib
import dataclasses
import itertools
import operator
import pathlib
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any, final

import jax
import numpy as np

from jaxloop import checks, encoding, types

KINDS = ("state", "state_dict", "tf.data", "torch", "sequence", "index", "skip", "unknown")
OR_SKIPPABLE = (
    "or, if it gives the same batches in the same order in every pass, jaxloop.data.skippable(dataset): a resumed run "
    "then reads the batches of the pass again and drops them"
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


@final
@dataclasses.dataclass(frozen=True)
class IndexedBatches(Iterable[types.Batch]):
    """What `from_index` returns."""

    make_batch: Callable[[int], types.Batch]
    num_batches: int | None

    def __iter__(self) -> IndexIterator:
        return IndexIterator(self.make_batch, self.num_batches)

    @property
    def is_endless(self) -> bool:
        """Whether a pass has no end."""
        return self.num_batches is None

    def __len__(self) -> int:
        if self.num_batches is None:
            raise TypeError("from_index(make_batch) without num_batches has no length: it has no end.")
        return self.num_batches


NO_DATA = IndexedBatches(lambda index: None, None)
"""The dataset of a run that is given None: batches that are None, without end. The position is their number."""


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

    def read_start(self) -> Any:
        """Returns the state before the first batch, encoded; None if reading it takes long and nothing needs it."""
        return self.read() if self.is_cheap else None

    def restore(self, state: Any) -> Iterator[types.Batch]:
        """Goes to a state; returns the iterator to go on with."""
        raise NotImplementedError

    def doubt(self, *, several_passes: bool) -> str | None:
        """Returns why a resumed run may see another order, and what makes it exact; None if it is exact."""
        return None

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
            return self._encode(self._get())
        except Exception as error:
            reason = re.sub(r"\{\{.*?\}\} | \[Op:.*", "", str(error).partition("\n")[0])
            self.problem = (
                f"its state can't be saved ({type(error).__name__}: {reason}). Build it of parts that can be, "
                f"{OR_SKIPPABLE}."
            )
        return None

    def _encode(self, state: Any) -> Any:
        return encoding.encode(state)

    def restore(self, state: Any) -> Iterator[types.Batch]:
        return self._restore(encoding.decode(state))


class _TensorFlow(_Stateful):
    """An iterator of tf.data, whose checkpoint says where it is in its pass.

    The order of the next pass is that of the shuffle's generator of seeds, which all iterators of a dataset share.
    Restoring an iterator sets that generator only while the shuffle still has elements, and creating the iterator
    advanced it. So the state from before the first batch is kept too: an iterator that is restored from it sets the
    generator to what it was when the pass began.
    """

    def __init__(self, dataset: Any, iterator: Any):
        super().__init__("tf.data", lambda: _save_tf(self._iterator), self._restored)
        self._iterator, self._dataset, self._is_given = iterator, iterator._dataset, dataset is iterator
        self._start: Any = None
        if not self._is_given and _has_one_order_a_pass(self._dataset):
            self._start = super().read()

    def read_start(self) -> Any:
        return self._with_start(self._start) if self._start else None

    def read(self) -> Any:
        state = super().read()
        return self._with_start(state) if state and self._start else state

    def _with_start(self, state: Any) -> Any:
        return {"dict": {"start": self._start, "now": state}}

    def _encode(self, state: Any) -> Any:
        return {"dict": state}  # The megabytes of tf.data stay bytes until it is known where they go.

    def restore(self, state: Any) -> Iterator[types.Batch]:
        items = state["dict"]
        if not {"start", "now"} <= items.keys():
            return super().restore(state)
        iterator, self._start = super().restore(items["now"]), items["start"]
        _restore_tf(self._new_iterator(), encoding.decode(self._start))
        return iterator

    def _restored(self, state: dict[str, bytes]) -> Any:
        if not self._is_given:  # TensorFlow can't restore every iterator that has given a batch.
            self._iterator = self._new_iterator()
        return _restore_tf(self._iterator, state)

    def _new_iterator(self) -> Any:
        return type(self._iterator)(self._dataset)

    def doubt(self, *, several_passes: bool) -> str | None:
        return _doubt_of_tf(self._dataset, several_passes)


class _Torch(_Stateful):
    """A pass of a PyTorch loader, whose order and random numbers are those of PyTorch's generators when it began.

    Args:
      loader: the loader.
      iterator: the pass.
      start: what `random_state(loader)` returned before the iterator was made.
    """

    def __init__(self, loader: Any, iterator: Any, start: Any):
        self._loader, self._iterator, self._start = loader, iterator, start
        self._has_state = _has(loader, "state_dict", "load_state_dict")
        self._has_begun = False
        super().__init__("state_dict" if self._has_state else "torch", self._read_now, self._go_to)

    def read(self) -> Any:
        # Without a state of its own, a pass is read again from its start.
        return super().read() if self._has_state else None

    def read_start(self) -> Any:
        return super().read()

    def _read_now(self) -> Any:
        state = {"start": self._start}
        if self._has_state:
            state |= {"now": random_state(self._loader), "loader": self._loader.state_dict()}
        return _without_tensors(state)

    def _go_to(self, state: Any) -> Iterator[types.Batch]:
        state = _with_tensors(state)
        if "start" not in state:  # Of an earlier version.
            self._loader.load_state_dict(state)
            return iter(self._loader)
        self._start = state["start"]
        _set_random_state(self._loader, self._start)
        if "loader" in state:
            self._loader.load_state_dict(state["loader"])
        self._iterator = iter(self._loader)
        if "now" in state:
            _set_random_state(self._loader, state["now"])
        return self._iterator

    def doubt(self, *, several_passes: bool) -> str | None:
        reason = _unknown_order_reason(self._loader)
        return reason and f"{name_of(self._loader)} may come in another order after a resume: {reason}. {_TORCH_REMEDY}"


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


def _has(value: Any, *methods: str) -> bool:
    return all(callable(getattr(value, name, None)) for name in methods)


def source_of(dataset: Any, iterator: Any, start: Any = None) -> Source:
    """How an iterator of a dataset says where it is.

    >>> source_of([], iter([])).kind
    'sequence'

    Args:
      dataset: the dataset.
      iterator: the iterator made from it.
      start: what `random_state(dataset)` returned before the iterator was made.
    """
    tensorflow = sys.modules.get("tensorflow")
    if isinstance(iterator, _SEQUENCE_ITERATORS):
        return _Sequence(iterator)
    if isinstance(iterator, IndexIterator):
        return _Index(iterator)
    if tensorflow and isinstance(iterator, (tensorflow.data.Iterator, tensorflow.data.NumpyIterator)):
        return _TensorFlow(dataset, iterator)
    if _is_loader(dataset) and (_has(dataset, "state_dict", "load_state_dict") or not _unknown_order_reason(dataset)):
        return _Torch(dataset, iterator, start)
    if _has(iterator, "get_state", "set_state"):
        return _Stateful("state", iterator.get_state, lambda state: (iterator, iterator.set_state(state))[0])
    # A loader may have them itself; the iterator made next goes to the state.
    keeper = dataset if _has(dataset, "state_dict", "load_state_dict") else iterator
    if _has(keeper, "state_dict", "load_state_dict"):
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


# Parts of a tf.data pipeline that make their input's iterator at once, and each pass once.
_MADE_AT_ONCE = set("Batch ParallelBatch PaddedBatch Map ParallelMap Prefetch Filter Take Skip Zip Options".split())
# Parts between a shuffle and a repeat whose iterator is saved until its input has ended.
_SAVED_TO_THE_END = {"Batch", "PaddedBatch", "Map", "Shuffle"}


def _random_parts(dataset: Any, above: tuple[str, ...] = ()) -> list[tuple[Any, tuple[str, ...]]]:
    """Returns the parts of a tf.data pipeline that have a seed, each with the kinds of the parts that read from it."""
    found = [(dataset, above)] if hasattr(dataset, "_seed2") else []
    inputs = dataset._inputs() if _has(dataset, "_inputs") else []
    kind = type(dataset).__name__.strip("_").removesuffix("Dataset")
    return found + [each for one in inputs for each in _random_parts(one, (*above, kind))]


def _changes(part: Any) -> bool:
    """Whether a part of a tf.data pipeline gives another order in each pass."""
    is_shuffle = "Shuffle" in type(part).__name__
    return getattr(part, "_reshuffle_each_iteration", is_shuffle) is not False or bool(
        getattr(part, "_rerandomize", False)
    )


def _orders(parts: list[tuple[Any, tuple[str, ...]]]) -> list[tuple[str, ...]]:
    """Returns, for each part that gives another order in each pass, what reads from it."""
    return [above for part, above in parts if _changes(part)]


def _has_one_order_a_pass(dataset: Any) -> bool:
    """Whether the order of a pass is made when its iterator is, by one part of a tf.data pipeline."""
    orders = _orders(_random_parts(dataset))
    return len(orders) == 1 and _MADE_AT_ONCE.issuperset(orders[0])


def _doubt_of_tf(dataset: Any, several_passes: bool) -> str | None:
    """Returns why a pipeline of tf.data may come in another order after a resume, and what to do."""
    parts = _random_parts(dataset)
    orders = _orders(parts)
    repeats = [above[above.index("Repeat") + 1 :] for above in orders if "Repeat" in above]
    is_repeated = several_passes or any("Repeat" in above for _, above in parts)
    because = "this tf.data pipeline may come in another order after a resume: "
    if is_repeated and any(not int(part._seed) and not int(part._seed2) for part, _ in parts):
        return f"{because}it shuffles without a seed. Write dataset.shuffle(size, seed=...)."
    if several_passes and orders and not _has_one_order_a_pass(dataset):
        return (
            f"{because}it shuffles anew in each pass, and not once, or before a part such as repeat, cache or "
            "concatenate. Shuffle once and after these parts, or write shuffle(..., reshuffle_each_iteration=False)."
        )
    if any(not _SAVED_TO_THE_END.issuperset(between) for between in repeats):
        return (
            f"{because}it repeats a shuffle with other parts between. Write dataset.shuffle(size, seed=...).repeat()."
        )
    return None


def reshuffles(dataset: Any) -> bool:
    """Whether a dataset is of tf.data, and shuffles anew each time it is iterated over."""
    dataset = getattr(dataset, "_data", dataset)
    return library(dataset) == "tensorflow" and any(_changes(part) for part, _ in _random_parts(dataset))


# PyTorch's loaders -----------------------------------------------------------------------------------

_TORCH_REMEDY = (
    "Give a DataLoader over a dataset with __getitem__, in the order of PyTorch's own samplers (shuffle=True is one), "
    "or a StatefulDataLoader of torchdata whose sampler and IterableDataset have state_dict and load_state_dict"
)


def _is_loader(dataset: Any) -> bool:
    return library(dataset) == "torch" and hasattr(dataset, "batch_sampler")


def _samplers(loader: Any) -> list[Any]:
    """Returns a loader and the samplers in it, each once."""
    found, more = {}, [loader]
    while more:
        part = more.pop(0)
        if part is not None and id(part) not in found:
            found[id(part)] = part
            more += [getattr(part, "sampler", None), getattr(part, "batch_sampler", None)]
    return list(found.values())


def _unknown_order_reason(loader: Any) -> str | None:
    """Returns what may order a loader's examples other than PyTorch's generators; None if nothing does."""
    has_state = lambda value: _has(loader, "state_dict") and _has(value, "state_dict", "load_state_dict")
    is_iterable = any(base.__name__ == "IterableDataset" for base in type(loader.dataset).__mro__)
    if is_iterable and not has_state(loader.dataset):
        return f"its dataset, {name_of(loader.dataset)}, orders its examples itself"
    for sampler in _samplers(loader)[1:]:
        if type(sampler).__module__.partition(".")[0] not in ("torch", "torchdata") and not has_state(sampler):
            return f"its sampler, {name_of(sampler)}, is not one of PyTorch's"
    if getattr(loader, "in_order", True) is False:
        return "in_order=False takes what comes first"
    return None


def random_state(dataset: Any) -> Any:
    """Returns the states of the random number generators that a PyTorch loader uses; None for other data."""
    if not _is_loader(dataset):
        return None
    parts = _samplers(dataset)
    return {
        "torch": sys.modules["torch"].get_rng_state(),
        "generators": [generator.get_state() for generator in _generators(parts)],
        "epochs": [getattr(part, "epoch", None) for part in parts],
    }


def _generators(parts: list[Any]) -> list[Any]:
    found = [getattr(part, "generator", None) for part in parts]
    return list({id(each): each for each in found if _has(each, "get_state", "set_state")}.values())


def _set_random_state(loader: Any, state: Any) -> None:
    parts = _samplers(loader)
    sys.modules["torch"].set_rng_state(state["torch"])
    for generator, each in zip(_generators(parts), state["generators"], strict=True):
        generator.set_state(each)
    for part, epoch in zip(parts, state["epochs"], strict=True):
        if epoch is not None:
            part.epoch = epoch


@contextlib.contextmanager
def keeping_random_state(dataset: Any) -> Iterator[None]:
    """Leaves the random number generators that a PyTorch loader uses as they were, so that training is the same."""
    loader = getattr(dataset, "_data", dataset)
    state = random_state(loader)
    try:
        yield
    finally:
        if state is not None:
            _set_random_state(loader, state)


# A state of PyTorch's holds tensors: those of random number generators.
_TENSOR = "torch.Tensor"


def _without_tensors(state: Any) -> Any:
    return jax.tree.map(lambda leaf: {_TENSOR: leaf.cpu().numpy()} if library(leaf) == "torch" else leaf, state)


def _with_tensors(state: Any) -> Any:
    is_tensor = lambda node: isinstance(node, dict) and set(node) == {_TENSOR}
    back = lambda leaf: sys.modules["torch"].from_numpy(leaf[_TENSOR]) if is_tensor(leaf) else leaf
    return jax.tree.map(back, state, is_leaf=is_tensor)


def unknown_reason(dataset: Any) -> str:
    """Why an iterator of a dataset can't say where it is, and what to do."""
    give = "a list, a Grain dataset, a tf.data.Dataset, or jaxloop.data.from_index(function)"
    packages = {base.__module__.partition(".")[0] for base in type(dataset).__mro__}
    if "tensorflow_datasets" in packages:
        give = "the tf.data.Dataset itself, or its as_numpy_iterator()"
    elif "torch" in packages:
        reason = _unknown_order_reason(dataset) if _is_loader(dataset) else None
        because = f": {reason}" if reason else ""
        return f"{name_of(dataset)} can't say where it is{because}. {_TORCH_REMEDY}, {OR_SKIPPABLE}."
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
        raise TypeError(f"A dataset must be an iterator or an iterable of batches, got {what}. {_REMEDY}{hint}")


def _describe(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if _is_tensor(value) else checks.describe(value)


def _is_tensor(value: Any) -> bool:
    return library(value) is not None and hasattr(value, "shape") and hasattr(value, "numpy")
