"""Batches of examples that are read by index, and batches made from the state."""

import itertools
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import jaxloop
from jaxloop import at, data

ROWS = 100
X = np.random.default_rng(0).normal(size=[ROWS, 3]).astype(np.float32)
DATASET = {"x": X, "y": X.sum(axis=-1, keepdims=True), "row": np.arange(ROWS, dtype=np.int32)}
OPTIMIZER = optax.sgd(0.05)


class Regression(jaxloop.Step):
    """Reports a number that identifies the rows of its batch, and records the batch sizes it was traced for."""

    def __init__(self):
        super().__init__(jax.random.key(0), nn.Dense(1), OPTIMIZER, train=True)
        self.traced = []

    def run(self, state, batch):
        self.traced.append(len(batch["x"]))

        def loss_fn(params):
            return ((state.apply_fn({"params": params}, batch["x"]) - batch["y"]) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss, "rows": (batch["row"] + 1).sum()}


def shuffled():
    return data.batched(DATASET, 8, seed=3)


def rows_of(batches, number=None):
    return [batch["row"].tolist() for batch in itertools.islice(batches, number)]


# Resuming -------------------------------------------------------------------------------------------------


def test_position_is_only_the_number_of_the_next_batch():
    iterator = data.batches(shuffled())
    everything = rows_of(iterator, 9)
    saved = iterator.position()
    assert (saved.kind, saved.state) == ("index", 9)
    again = data.batches(shuffled())
    again.seek(data.batches(shuffled()).position())
    assert rows_of(again, 9) == everything
    asked = []
    far = data.batches(data.from_index(lambda number: asked.append(number) or shuffled().make_batch(number)))
    far.seek(data.DatasetPosition("index", 10**9, 10**9))
    assert len(next(far)["row"]) and set(asked) <= {0, 10**9}


# Epochs ---------------------------------------------------------------------------------------------------


def rows_of_epochs(dataset, num_epochs, directory=None, api="OuterLoop", stop=None):
    """Returns the rows of each batch of a run over several epochs. The run may end early, and then resumes."""
    seen = []

    class Record(Regression):
        def preprocess_batch(self, batch):
            seen.append(batch["row"].tolist())
            return batch

    if api == "fit":
        options = {"loss": lambda weight, batch: weight * batch["x"].mean(-1), "optimizer": optax.sgd(0.0)}
        jaxloop.fit(np.float32(0), dataset, train_epochs=num_epochs, workdir=directory, progress=None, **options)
        return seen
    step = Record()
    outer_loop = jaxloop.OuterLoop(jaxloop.TrainLoop(step), workdir=directory)
    outer_loop(step.initialize_model([1, 3]), dataset, train_epochs=num_epochs, stop=stop)
    return seen


@pytest.mark.parametrize(
    ("num_epochs", "wrap"), [(None, lambda dataset: dataset), (1, data.prefetch), (2, data.skippable)]
)
def test_each_epoch_of_batched_is_one_pass_in_a_new_order(num_epochs, wrap, tmp_path):
    make = lambda: wrap(data.batched(DATASET, 40, seed=0, num_epochs=num_epochs))
    whole = rows_of_epochs(make(), 3)
    in_pass = ROWS * (num_epochs or 1)
    passes = np.concatenate(whole).reshape(3, in_pass)
    assert all(sorted(each) == sorted([*range(ROWS)] * (num_epochs or 1)) for each in passes)
    orders = {tuple(each[:ROWS]) for each in passes}
    assert len(orders) == 3
    rest, resumed = len(whole), []
    for steps in (2, 3, 5, rest):  # The second run ends after an epoch, if there are three batches in it.
        resumed += rows_of_epochs(make(), 3, tmp_path, stop=at(steps))
    assert resumed == whole


def test_the_epochs_of_batched_follow_the_seed_alone_whatever_the_api(monkeypatch):
    seen, take = [], np.random.default_rng

    def record(seed):
        seen.append(seed)
        return take(seed)

    monkeypatch.setattr(np.random, "default_rng", record)
    for api in ("OuterLoop", "fit"):
        seen.clear()
        rows_of_epochs(data.batched(DATASET, 50, seed=7), 3, api=api)
        assert [number for number, _ in itertools.groupby(seen)] == [[7, 0, 0], [7, 0, 1], [7, 0, 2]]


@pytest.mark.parametrize("wrap", [lambda dataset: dataset, data.prefetch])
def test_an_evaluation_of_endless_batches_is_one_pass(wrap):
    step = Regression()
    outer_loop = jaxloop.OuterLoop(eval_loops=[jaxloop.EvalLoop(step)])
    state, spec = step.initialize_model([1, 3]), jaxloop.EvalSpec(wrap(data.batched(DATASET, 40)))
    assert outer_loop.check(state, eval_specs=[spec]).plan["eval 'eval'"].endswith("; 3 batches")
    _, outputs = outer_loop(state, eval_specs=[spec])
    assert outputs.num_examples == [40, 40, 20]


def test_an_iterator_goes_to_another_pass():
    both = rows_of(data.batched(DATASET, ROWS, seed=0), 2)
    iterator = data.batches(data.batched(DATASET, 40, seed=0))
    for number in (0, 1, 0):
        iterator.begin_pass(number)
        assert np.concatenate(rows_of(iterator)).tolist() == both[number]


def test_an_epoch_of_an_iterator_is_what_is_left_of_it():
    iterator = data.batches(data.batched(DATASET, 40, seed=0, num_epochs=1))
    first = rows_of(iterator, 1)
    assert sorted(np.concatenate([*first, *rows_of_epochs(iterator, 1)])) == [*range(ROWS)]


def test_epochs_of_endless_data_raise():
    with pytest.raises(ValueError, match="train_epochs=3 needs a train_dataset that ends, got an IndexedBatches"):
        rows_of_epochs(data.from_index(shuffled().make_batch), 3)


@pytest.mark.parametrize(
    "make",
    [
        lambda broken: data.from_index(broken, num_batches=10),
        lambda broken: data.batched(type("Rows", (ByIndex,), {"__getitem__": lambda self, row: broken(row)})(), 1),
    ],
)
def test_stop_iteration_in_a_batch_function_does_not_end_the_data(make):
    def broken(index):
        return {name: leaf[: index + 1] if index < 2 else next(iter([])) for name, leaf in DATASET.items()}

    step = Regression()
    with pytest.raises(RuntimeError, match="(broken|lambda>) raised StopIteration for the index 2"):
        jaxloop.TrainLoop(step)(step.initialize_model([1, 3]), make(broken), 5)


# Sizes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 7, 100, 250])
@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("num_epochs", [1, 3])
def test_each_epoch_contains_each_example_once(size, seed, num_epochs):
    dataset = data.batched(DATASET, size, seed=seed, num_epochs=num_epochs)
    rows = rows_of(dataset)
    assert len(rows) == len(dataset) == data.num_batches(dataset)
    flat = list(itertools.chain(*rows))
    epochs = [flat[begin : begin + ROWS] for begin in range(0, len(flat), ROWS)]
    assert len(epochs) == num_epochs and all(sorted(epoch) == list(range(ROWS)) for epoch in epochs)
    if seed is not None:
        assert len(set(map(tuple, epochs))) == num_epochs
    assert set(map(len, rows[:-1])) <= {size} and 0 < len(rows[-1]) <= size  # The last batch may be short.


@pytest.mark.parametrize("num_epochs", [None, 1, 2])
def test_a_short_last_batch_can_be_dropped(num_epochs):
    dataset = data.batched(DATASET, 30, seed=1, num_epochs=num_epochs, drop_remainder=True)
    seen = rows_of_epochs(dataset, 2)
    assert {len(rows) for rows in seen} == {30} and len(seen) == 2 * (ROWS * (num_epochs or 1) // 30)
    kept = rows_of_epochs(data.batched(DATASET, 30, seed=1, num_epochs=num_epochs), 2)
    assert seen == [rows for rows in kept if len(rows) == 30]


def test_examples_are_collated_by_a_function():
    pad = lambda rows: {"row": np.stack([np.pad(row, (0, 5 - len(row))) for row in rows])}
    ragged = [np.arange(1, length + 1) for length in (1, 5, 2, 3)]
    for row in data.batched(ragged, 2, num_epochs=1, collate=pad):
        assert row["row"].shape == (2, 5)
    sums = lambda rows: {"row": np.array([row["row"] for row in rows])}
    assert rows_of(data.batched(DATASET, 6, seed=2, collate=sums), 9) == rows_of(data.batched(DATASET, 6, seed=2), 9)


class ByIndex:
    """A sequence that is not a list, like many datasets of examples."""

    def __len__(self):
        return ROWS

    def __getitem__(self, row):
        return {name: leaf[row] for name, leaf in DATASET.items()}


def grain_rows():
    return pytest.importorskip("grain").MapDataset.source(ByIndex())


@pytest.mark.parametrize(
    "make",
    [lambda: [ByIndex()[row] for row in range(ROWS)], ByIndex, grain_rows, lambda: jax.tree.map(jnp.asarray, DATASET)],
    ids="list,sequence,grain,jax".split(","),
)
def test_batched_accepts_many_kinds_of_examples(make):
    expected = list(itertools.islice(data.batched(DATASET, 6), 16))
    jax.tree.map(np.testing.assert_array_equal, list(itertools.islice(data.batched(make(), 6), 16)), expected)


def test_each_process_reads_its_share_of_each_batch():
    parts = [data.shard_for_process(shuffled(), process_index=place, process_count=2) for place in (0, 1)]
    both = zip(*(rows_of(part, 10) for part in parts), strict=True)
    assert [one + two for one, two in both] == rows_of(shuffled(), 10)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: data.batched(DATASET, 0), ValueError, r"size\) must be a positive int, got 0"),
        (lambda: data.batched(DATASET, True), TypeError, "got True"),
        (lambda: data.batched(DATASET, 4, num_epochs=0), ValueError, "num_epochs.*got 0"),
        (lambda: data.batched(DATASET, 4, seed=-1), ValueError, r"seed\) must be a non-negative int, or None, got -1"),
        (lambda: data.batched(DATASET, 4, seed=0.0), TypeError, r"seed\) must be .* got 0.0"),
        (lambda: data.batched(DATASET, 4, seed=jax.random.key(0)), TypeError, r"seed\) must be .* got Array"),
        (lambda: data.batched([], 4), ValueError, "has no examples"),
        (lambda: data.batched({}, 4), ValueError, "arrays with a common leading axis"),
        (lambda: data.batched({"x": X, "y": X[:3]}, 4), ValueError, "common leading axis.*float32.3, 3."),
        (lambda: data.batched(iter([1]), 4), TypeError, "read by their index, got list_iterator"),
        (lambda: data.batched(lambda row: row, 4), TypeError, "For a function of the index, write from_index"),
        (lambda: data.batched(DATASET, 101, drop_remainder=True, num_epochs=1), ValueError, "leaves no batch: .* 100"),
        (lambda: next(iter(data.batched([np.ones(2), np.ones(3)], 2))), ValueError, "same shape"),
    ],
)
def test_invalid_examples_and_sizes_raise(make, error, message):
    with pytest.raises(error, match=message):
        make()


# Hugging Face datasets ------------------------------------------------------------------------------------


class Rows:
    """The parts of a Hugging Face dataset that `batched` uses, for tests without the library."""

    def __init__(self, kind=None, columns=("x", "text")):
        self.format = {"type": kind, "columns": columns, "output_all_columns": False}

    def with_format(self, kind, columns, output_all_columns):
        return Rows(kind, columns)

    def __len__(self):
        return ROWS

    def __iter__(self):
        return iter([self[[row]] for row in range(ROWS)])

    def __getitem__(self, rows):
        assert self.format["type"] == "numpy" and type(rows) is list
        return {"x": X[rows]}


def test_format_decides_whether_a_hugging_face_dataset_is_accepted(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(Dataset=Rows))
    np.testing.assert_array_equal(next(iter(data.batched(Rows("pandas"), 5)))["x"], X[:5])
    for kind in (None, "pandas", "polars"):
        with pytest.raises(TypeError, match=rf"in the {kind or 'python'} format"):
            data.batches(Rows(kind))
    data.batches(Rows("numpy"))


# Batches from the state -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tf.data", "grain"])
def test_sharding_data_that_were_batched_before_another_stage_raises(kind):
    if kind == "tf.data":
        dataset = pytest.importorskip("tensorflow").data.Dataset.range(8).batch(2).prefetch(1)
    else:
        dataset = pytest.importorskip("grain").MapDataset.range(8).batch(2).map(lambda batch: batch)
    with pytest.raises(ValueError, match="this one is batched already"):
        data.shard_for_process(dataset, process_index=0, process_count=2)
