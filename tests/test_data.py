import collections

import jax.numpy as jnp
import numpy as np
import pytest
from programs.fakes import Tensor

from jaxloop import data
from jaxloop.data.fingerprint import fingerprint

BATCHES = [{"x": np.full((2, 3), number, np.float32), "y": np.arange(2)} for number in range(3)]
Pair = collections.namedtuple("Pair", ["left", "right"])


class Parameter(Tensor):
    """A subclass defined outside torch."""

    __module__ = "user"


class DataLoader:
    """Like a torch DataLoader: each iteration starts over, and batches are lists of tensors."""

    def __iter__(self):
        return iter([[Tensor(batch["x"]), Tensor(batch["y"])] for batch in BATCHES])


def assert_equal(one, two):
    assert type(one) is type(two)
    np.testing.assert_equal(one, two)


@pytest.mark.parametrize("make", [Tensor, Parameter])
def test_torch_tensors_become_numpy_arrays(make):
    x, y = np.ones(3), np.arange(3)
    batch = {"a": make(x), "b": [make(y), (make(y), "text", None, 1)], "c": Pair(make(x), y)}
    assert_equal(data.numpy_batch(batch), {"a": x, "b": [y, (y, "text", None, 1)], "c": Pair(x, y)})


def test_bfloat16_tensors_keep_their_dtype():
    converted = data.numpy_batch(Tensor(np.ones(3, np.float32), "torch.bfloat16"))
    assert converted.dtype == jnp.bfloat16 and converted.tolist() == [1, 1, 1]


def test_a_tensor_has_the_fingerprint_of_its_array():
    assert fingerprint({"x": Tensor(np.ones(3))}) == fingerprint({"x": np.ones(3)})
    halves = Tensor(np.ones(3, np.float32), "torch.bfloat16")
    assert fingerprint(halves) == fingerprint(np.ones(3, jnp.bfloat16))


def test_other_leaves_are_unchanged():
    batch = {"device": jnp.ones(2), "host": np.ones(2), "number": 1.5, "object": object(), "set": {1}}
    converted = data.numpy_batch(batch)
    assert all(converted[name] is value for name, value in batch.items())


def test_batches_accepts_any_iterable():
    generate = lambda: (batch for batch in BATCHES)
    for dataset in (BATCHES, tuple(BATCHES), iter(BATCHES), generate(), lambda: BATCHES, generate):
        assert list(data.batches(dataset)) == BATCHES


def test_batches_accepts_tensorflow_datasets():
    tf = pytest.importorskip("tensorflow")
    tfds = pytest.importorskip("tensorflow_datasets")
    dataset = tf.data.Dataset.from_tensor_slices({"x": np.arange(5, dtype=np.float32), "y": np.arange(5)}).batch(2)
    rows = [np.arange(first, min(first + 2, 5)) for first in (0, 2, 4)]
    expected = [{"x": each.astype(np.float32), "y": each} for each in rows]
    for make in (lambda: dataset, lambda: tfds.as_numpy(dataset), lambda: iter(dataset), lambda: lambda: dataset):
        assert_equal(list(data.batches(make())), expected)
    assert not data.is_one_pass(dataset) and data.is_one_pass(iter(dataset))
    assert data.numpy_batch(tf.constant([1], tf.bfloat16)).dtype == jnp.bfloat16
    with pytest.raises(TypeError, match=r"got float32\[3\].*write \[batch\]"):
        data.batches(tf.ones(3))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (BATCHES[0], r"got dict\. .*write \[batch\].* For whole arrays, write jaxloop\.data\.batched\(arrays, 64"),
        (np.ones([8, 3]), r"got float64\[8, 3\].*write \[batch\]"),
        (Tensor(np.ones(3)), r"write \[batch\]"),
        (Pair(np.ones(2), Tensor(np.ones(2))), "got Pair"),
        ("/data/train", "got str. For a single batch"),
        (None, "got NoneType. For a single batch"),
        (lambda: BATCHES[0], r"got dict.*write \[batch\]"),
    ],
)
def test_non_dataset_raises(given, message):
    with pytest.raises(TypeError, match=f"(?s)A dataset must be an iterator or an iterable of batches, .*{message}"):
        data.batches(given)


@pytest.mark.parametrize(
    ("source", "expected"),
    [(BATCHES, False), (iter(BATCHES), True), (lambda: iter(BATCHES), False), (DataLoader(), False)],
)
def test_is_one_pass(source, expected):
    assert data.is_one_pass(source) is expected


def test_peek_loses_no_batch():
    read = []
    source = (read.append(number) or number for number in range(3))
    first, iterator = data.peek(source)
    assert (first, read) == (0, [0])
    again, same = data.peek(iterator)
    assert again == 0 and same is iterator and read == [0]
    assert list(iterator) == [0, 1, 2]


def test_peek_at_an_empty_dataset_raises():
    with pytest.raises(ValueError, match="The dataset yielded no batches. An iterator can be read only once"):
        data.peek(iter([]))
