import contextlib
import gc
import itertools
import json
import re
import threading
import time

import numpy as np
import pytest
from programs.acts import then_fail

import jaxloop
from jaxloop import data, examples
from jaxloop.data.fingerprint import END
from jaxloop.data.position import DatasetPosition, PositionedIterator, PositionUnknownError, prove, skippable
from jaxloop.outer_loop.data import go_to

LENGTH = 12
BATCHES = [{"x": np.full((2, 3), number, np.float32)} for number in range(LENGTH)]


class Counter:
    """An iterator over the batches; subclasses expose its state."""

    number = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.number == LENGTH:
            raise StopIteration
        self.number += 1
        return BATCHES[self.number - 1]


class WithState(Counter):
    def get_state(self):
        return {"number": np.int64(self.number), "more": (b"\xff", float("inf"), np.arange(3))}

    def set_state(self, state):
        assert state["more"][:2] == (b"\xff", float("inf")) and state["more"][2].tolist() == [0, 1, 2]
        self.number = int(state["number"])


class WithMixedKeys(WithState):
    def get_state(self):
        return {"number": 1, 0: 1}


class WithStateDict(Counter):
    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state_dict):
        self.number = state_dict["number"]


def generate():
    yield from BATCHES


def grain_map(seed=3, batch_size=4, length=48):
    grain = pytest.importorskip("grain")
    source = grain.MapDataset.source(np.arange(length)).shuffle(seed=seed)
    return source.map(lambda number: {"x": number}).batch(batch_size)


def grain_iter():
    grain = pytest.importorskip("grain")
    dataset = grain_map().to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    shuffled = grain.experimental.WindowShuffleIterDataset(dataset, window_size=3, seed=1)
    return grain.experimental.ThreadPrefetchIterDataset(shuffled, prefetch_buffer_size=2)


def grain_loader():
    grain = pytest.importorskip("grain")
    return grain.DataLoader(
        data_source=[{"x": number} for number in range(48)],
        sampler=grain.samplers.IndexSampler(48, grain.sharding.NoSharding(), shuffle=True, seed=3, num_epochs=1),
        operations=[grain.transforms.Batch(4)],
        worker_count=0,
    )


def tf_data(seed=1, batch_size=4, length=48):
    tf = pytest.importorskip("tensorflow")
    dataset = tf.data.Dataset.from_tensor_slices({"x": np.arange(length)})
    return dataset.shuffle(20, seed=seed, reshuffle_each_iteration=False).batch(batch_size).prefetch(2)


def tfds_numpy():
    return pytest.importorskip("tensorflow_datasets").as_numpy(tf_data())


SOURCES = {
    "list": (lambda: BATCHES, "sequence"),
    "range": (lambda: range(LENGTH), "sequence"),
    "index": (lambda: data.from_index(lambda number: BATCHES[number], LENGTH), "index"),
    "get_state": (WithState, "state"),
    "state_dict": (WithStateDict, "state_dict"),
    "generator function": (lambda: skippable(generate), "skip"),
    "passes": (lambda: data.Passes(skippable(generate)), "skip"),
    "grain map": (grain_map, "state"),
    "grain iter": (grain_iter, "state"),
    "grain loader": (grain_loader, "state"),
    "tf.data": (tf_data, "tf.data"),
    "tf.data batches": (lambda: data.batches(tf_data()), "tf.data"),
    "tfds.as_numpy": (lambda: skippable(tfds_numpy()), "skip"),
}


def values(iterator, number=None):
    """Returns the values of the remaining batches, at most `number` of them."""
    rest = itertools.islice(iterator, number)
    return [np.asarray(batch["x"] if isinstance(batch, dict) else batch).tolist() for batch in rest]


def through_json(saved):
    return DatasetPosition.from_dict(json.loads(json.dumps(saved.to_dict(), allow_nan=False)))


SLOW = {"grain iter", "grain loader", "tf.data", "tf.data batches", "tfds.as_numpy"}
CASES = [(name, prefetch) for name in SOURCES for prefetch in ((0,) if name in SLOW else (0, 1, 2))]


def opened(name, prefetch=0):
    make, _ = SOURCES[name]
    if prefetch and name == "passes":
        return PositionedIterator(iter(make()), prefetch=prefetch)
    return PositionedIterator(data.prefetch(make(), prefetch) if prefetch else make())


@pytest.mark.parametrize(("name", "prefetch"), CASES)
def test_seeking_to_any_position_yields_the_remaining_batches(name, prefetch):
    make, kind = SOURCES[name]
    iterator = opened(name, prefetch)
    positions, everything = [iterator.position()], []
    for number in range(LENGTH):
        everything += values(iterator, 1)
        assert iterator.count == number + 1
        positions.append(iterator.position())
    assert values(iterator) == [] and len(everything) == LENGTH
    for count in (0, 5, LENGTH) if name in SLOW else range(LENGTH + 1):
        saved = through_json(positions[count])
        assert (saved.count, saved.kind) == (count, kind)
        assert saved.skip == 0 or kind in ("tf.data", "skip")
        again = opened(name, prefetch)
        again.seek(saved)
        assert again.count == count
        assert values(again) == everything[count:] and again.count == LENGTH
        if not data.is_one_pass(make()) and kind != "skip" and count == 5:
            again.seek(saved)  # Also in an exhausted iterator.
            assert values(again) == everything[count:]


@pytest.mark.parametrize("name", SOURCES)
def test_a_consumer_that_reads_ahead_gets_the_position_of_what_it_used(name):
    iterator, positions, everything = opened(name), [], []
    for count in range(LENGTH):
        iterator.mark()
        everything += values(iterator, 1)  # Read, but not used.
        positions.append(through_json(iterator.position(count)))
    for count in (0, 5, LENGTH - 1) if name in SLOW else range(LENGTH):
        again = opened(name)
        again.seek(positions[count])
        assert values(again) == everything[count:]


@pytest.mark.parametrize("name", ["list", "index"])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_the_number_of_remaining_batches_is_known(name, prefetch):
    iterator = opened(name, prefetch)
    iterator.left_out = {4, 12}
    assert data.num_batches(iterator) == LENGTH - 2
    values(iterator, 5)
    saved = iterator.position()
    assert iterator.count == 6 and data.num_batches(iterator) == LENGTH - 7
    again = opened(name, prefetch)
    again.seek(saved)
    assert data.num_batches(again) == LENGTH - 6


def test_peek_does_not_change_the_position():
    for name in ("list", "get_state", "passes", "grain map", "tf.data"):
        make, _ = SOURCES[name]
        everything = values(PositionedIterator(make()))
        for count in (0, 3):
            iterator = data.batches(make())
            values(iterator, count)
            iterator.peek()
            saved = through_json(iterator.position())
            assert saved.count == count and values(iterator) == everything[count:]
            again = data.batches(make())
            again.peek()  # As `fit` does before it seeks to a position.
            again.seek(saved)
            assert values(again) == everything[count:]


def test_two_wrappers_of_an_iterator_share_one_position():
    first = data.batches(BATCHES)
    second = PositionedIterator(first)
    next(first), next(second)
    assert first.count == second.count == 2 and values(second, 1) == [BATCHES[2]["x"].tolist()]
    with pytest.raises(ValueError, match="prefetch=2 needs data from which no batch was read"):
        PositionedIterator(first, prefetch=2)


@pytest.mark.parametrize("make", [lambda: iter(BATCHES), lambda: iter(data.from_index(BATCHES.__getitem__, LENGTH))])
def test_an_iterator_from_which_batches_were_read_can_be_resumed_twice(make):
    used = make()
    next(used)
    iterator = PositionedIterator(used)
    start = iterator.position()
    for number in (1, 2, 3):
        assert values(iterator, 1) == values(BATCHES[number : number + 1])
        saved = iterator.position()
        iterator = PositionedIterator(make())
        iterator.seek(saved)
    iterator.seek(start)
    assert values(PositionedIterator(iterator)) == values(BATCHES[1:])


class StartsOver(Counter):
    def __iter__(self):
        self.number = 0
        return self


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_iterator_is_read_without_starting_over(prefetch):
    iterator = StartsOver()
    next(iterator), next(iterator)
    assert values(PositionedIterator(iterator, prefetch=prefetch)) == values(BATCHES)[2:]


def test_an_error_of_a_batch_that_is_read_ahead_is_raised_in_its_place():
    def read():
        number = next(numbers)
        if number == 1:
            raise KeyError("broken")
        return np.full(3, number)

    numbers = itertools.count()
    iterator = PositionedIterator(type("Reader", (), {"__next__": lambda self: read()})())
    assert next(iterator).tolist() == [0, 0, 0]
    for _ in range(2):
        with pytest.raises(KeyError, match="broken"):
            iterator.peek()
    with pytest.raises(KeyError, match="broken"):
        next(iterator)
    assert [next(iterator).tolist() for _ in range(2)] == [[2, 2, 2], [3, 3, 3]]


def test_the_state_of_tf_data_is_stored_outside_the_json():
    iterator = PositionedIterator(tf_data())
    values(iterator, 2)
    saved, arrays = iterator.position(), {}
    text = json.dumps(saved.to_dict(arrays))
    assert len(text) < 2000 and {array.dtype for array in arrays.values()} == {np.dtype(np.uint8)}
    again = PositionedIterator(tf_data())
    again.seek(DatasetPosition.from_dict(json.loads(text), arrays))
    assert values(again) == values(iterator)
    with pytest.raises(KeyError, match="bytes_0"):
        DatasetPosition.from_dict(json.loads(text))


# Iterators without a position ------------------------------------------------------------------------


def tf_generator():
    tf = pytest.importorskip("tensorflow")
    return tf.data.Dataset.from_generator(generate, output_signature={"x": tf.TensorSpec((2, 3), tf.float32)})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (generate, "a generator can't report its position. Give a list, .*from_index.*, or, .*skippable"),
        (tf_generator, r"its state can't be saved \(FailedPreconditionError: PyFunc is stateful.\).*skippable"),
        (WithMixedKeys, r"its state can't be saved \(TypeError: .*dicts with string keys"),
    ],
)
def test_data_without_a_position_raises_and_explains_what_to_do(make, message):
    everything = values(PositionedIterator(make()))
    iterator = PositionedIterator(make())
    start = through_json(iterator.position())
    values(iterator, 5)
    saved = through_json(iterator.position())
    assert (saved.kind, iterator.kind) == ("unknown", "unknown")
    again = PositionedIterator(make())
    with pytest.raises(PositionUnknownError, match=f"The position after 5 batches of .* can't be restored: {message}"):
        again.seek(saved)
    assert again.problem is not None and again.problem == iterator.problem
    again = PositionedIterator(skippable(make()))
    again.seek(saved)
    assert values(again) == everything[5:] and again.problem is None
    again = PositionedIterator(make())
    again.seek(start)  # There is nothing to skip.
    assert values(again) == everything


def test_skipped_batches_are_logged(logs):
    iterator = PositionedIterator(skippable(generate))
    values(iterator, 5)
    PositionedIterator(skippable(generate)).seek(iterator.position())
    assert "Reading and skipping 5 batches of a generator." in logs.text


def test_the_position_of_a_generator_can_be_restored_in_a_skippable_list():
    iterator = PositionedIterator(generate())
    values(iterator, 5)
    again = PositionedIterator(skippable(BATCHES))
    again.seek(iterator.position())
    assert values(again) == values(iterator)
    with pytest.raises(PositionUnknownError):
        PositionedIterator(BATCHES).seek(iterator.position())


def test_an_iterator_cannot_go_back():
    iterator = PositionedIterator(skippable(generate()))
    values(iterator, 5)
    with pytest.raises(PositionUnknownError, match="after 5 batches.* has already been read from, and can't go back"):
        iterator.seek(iterator.position())


def test_a_dataset_that_ends_before_the_position_raises():
    iterator = PositionedIterator(skippable(generate))
    values(iterator, 5)
    with pytest.raises(ValueError, match="a generator, ended after 3 batches, before the position after 5"):
        PositionedIterator(skippable(batch for batch in BATCHES[:3])).seek(iterator.position())


# A different dataset ---------------------------------------------------------------------------------


def ones(size, dtype=np.float32):
    return {"x": np.ones(size, dtype)}


def saved_before_the_next_batch(dataset, used=3):
    iterator = PositionedIterator(dataset)
    values(iterator, used)
    iterator.mark()
    list(itertools.islice(iterator, 1))
    return through_json(iterator.position(used))


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        (BATCHES, BATCHES[1:], r"number 4, .*batch\['x'\]: float32\[2, 3\], checksum \w+ -> float32\[2, 3\], checksum"),
        (BATCHES, BATCHES[:3], r"batch\['x'\]: .* -> \(none\)"),
        ([ones(2)] * 9, [ones(2, np.int32)] * 9, r"float32\[2\].* -> .*int32\[2\]"),
        ([ones(2)] * 9, [{"y": np.ones(2)}] * 9, r"batch\['x'\].* -> \(none\)\n  batch\['y'\]: \(none\) -> "),
        (skippable(BATCHES), skippable(lambda: iter(BATCHES[1:])), "number 4"),
        (grain_map, lambda: grain_map(batch_size=6), r"int64\[4\].* -> int64\[6\]"),
    ],
)
def test_a_next_batch_that_has_changed_warns_or_raises(before, now, message, warnings_logged):
    before, now = (make() if callable(make) else make for make in (before, now))
    saved = saved_before_the_next_batch(before)
    again = PositionedIterator(now)
    again.seek(saved)
    assert again.count == 3 and re.search(f"(?s){message}.*build it as it was", warnings_logged()[0])
    with pytest.raises(ValueError, match=f"(?s){message}.*build it as it was"):
        again.seek(saved, raises=True)


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        (BATCHES, data.from_index(lambda i: BATCHES[i]), "the kind 'sequence', .* of the kind 'index'"),
        (WithState, lambda: skippable(WithStateDict()), "the kind 'state', .* the kind 'state_dict'"),
        (data.from_index(lambda i: ones(2)), data.from_index(lambda i: ones(4)), "so their size must"),
        (skippable([ones(2)] * 9), skippable(lambda: iter([ones(4)] * 9)), "so their size must"),
    ],
)
def test_a_position_in_another_kind_of_dataset_or_batches_is_rejected(before, now, message):
    before, now = (make() if callable(make) else make for make in (before, now))
    with pytest.raises(ValueError, match=f"(?s){message}"):
        PositionedIterator(now).seek(saved_before_the_next_batch(before))


@pytest.mark.parametrize("name", SOURCES)
def test_an_unchanged_dataset_is_recognized(name, warnings_logged):
    make, _ = SOURCES[name]
    saved = saved_before_the_next_batch(make())
    assert saved.next["rows"] is not None or name == "range"
    PositionedIterator(make()).seek(saved, raises=True)
    assert warnings_logged() == [] and prove(make()) is None


def test_a_peek_at_the_end_notes_the_end():
    iterator = PositionedIterator(BATCHES)
    values(iterator, LENGTH)
    with pytest.raises(StopIteration):
        iterator.peek()
    assert iterator.position().next == END


# Prefetching -----------------------------------------------------------------------------------------


THREADS_BEFORE = set()  # Threads of other tests in the same process.


@pytest.fixture(autouse=True)
def record_threads_before():
    THREADS_BEFORE.clear()
    THREADS_BEFORE.update(threading.enumerate())


def prefetch_threads():
    threads = set(threading.enumerate()) - THREADS_BEFORE
    return [thread for thread in threads if thread.name == "jaxloop-prefetch" and thread.is_alive()]


def eventually(condition):
    deadline = time.monotonic() + 5
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    return condition()


@pytest.mark.parametrize("size", [0, 1, 3])
def test_at_most_size_batches_are_read_ahead(size):
    drawn = []
    iterator = iter(data.prefetch((drawn.append(number) or number for number in range(LENGTH)), size))
    assert drawn == [] and not prefetch_threads()
    next(iterator)
    assert eventually(lambda: len(drawn) == 1 + size)
    time.sleep(0.01)
    assert len(drawn) == 1 + size and len(prefetch_threads()) == (size > 0)
    assert list(iterator) == list(range(1, LENGTH))
    assert eventually(lambda: not prefetch_threads())


def test_errors_are_raised_in_place_of_their_batches():
    iterator = iter(data.prefetch(then_fail([0, 1], KeyError("broken")), 2))
    assert [next(iterator), next(iterator)] == [0, 1]
    with pytest.raises(KeyError, match="broken") as error:
        next(iterator)
    assert error.traceback[-1].name == "then_fail"
    assert list(iterator) == [] and eventually(lambda: not prefetch_threads())


def test_the_thread_ends_when_it_is_no_longer_needed():
    endless = data.prefetch(data.from_index(lambda number: number), 2)
    iterator = iter(endless)
    assert [next(iterator) for _ in range(3)] == [0, 1, 2] and prefetch_threads()
    iterator.close()
    assert not prefetch_threads() and list(iterator) == []
    for iterator in endless:
        if iterator == 3:
            break
    gc.collect()
    assert eventually(lambda: not prefetch_threads())


@pytest.mark.parametrize("fails", [False, True])
def test_prefetch_threads_end_with_the_run(fails):
    def make_batch(number):
        if fails and number > 25:
            raise RuntimeError("the disk is gone")
        return batches[number % 100]

    step, state, batches = examples.tiny_regression()
    endless = data.prefetch(data.from_index(make_batch), 2)
    train_loop, eval_loop = jaxloop.TrainLoop(step), jaxloop.EvalLoop(type(step)(step.base_prng, step.model))
    for loop in (train_loop, jaxloop.OuterLoop(train_loop, [eval_loop])):
        specs = {} if loop is train_loop else {"eval_specs": [jaxloop.EvalSpec(endless, num_steps=3)]}
        with pytest.raises(RuntimeError, match="the disk is gone") if fails else contextlib.nullcontext():
            state, _ = loop(state, endless, 100, **specs)
        if fails:
            state = loop.rescued_state
        gc.collect()
        assert eventually(lambda: not prefetch_threads())


# Bad inputs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: data.from_index([1, 2]), TypeError, "from_index takes a function of the batch's number, got list"),
        (lambda: data.from_index(ones, 0), ValueError, "num_batches.* must be a positive int or None, got 0"),
        (lambda: len(data.from_index(ones)), TypeError, "has no length"),
        (lambda: data.prefetch(BATCHES, -1), ValueError, "0 for none.*got -1"),
        (lambda: data.prefetch(BATCHES, True), TypeError, "0 for none.*got True"),
        (lambda: data.peek(data.prefetch([], 2)), ValueError, "The dataset yielded no batches"),
        (lambda: PositionedIterator(BATCHES).seek(DatasetPosition("here", 1)), ValueError, "is of the kind 'here'"),
    ],
)
def test_bad_arguments_are_rejected(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_partly_read_iterator_is_read_on_if_the_number_of_processes_has_changed():
    iterator = PositionedIterator(iter(range(9)))
    assert list(itertools.islice(iterator, 2)) == [0, 1]
    go_to(iterator, DatasetPosition("index", 5, 5), is_own=False)
    assert list(iterator) == [5, 6, 7, 8]
    with pytest.raises(PositionUnknownError, match="is past it. Give unread data"):
        go_to(iterator, DatasetPosition("index", 5, 5), is_own=False)


def test_a_peeked_batch_is_converted_too():
    tf = pytest.importorskip("tensorflow")
    iterator = PositionedIterator([tf.constant(number) for number in (1, 2)])
    assert tf.is_tensor(iterator.peek())
    assert [type(batch) for batch in data.batches(iterator)] == [np.int32, np.int32]


def test_a_position_in_tf_data_that_a_thread_reads_is_reached_by_skipping():
    iterator = PositionedIterator(tf_data(), prefetch=1)
    values(iterator, 5)
    iterator.mark()
    saved, rest = through_json(iterator.position()), values(iterator)
    assert (saved.count, saved.skip) == (5, 5)
    again = PositionedIterator(tf_data(), prefetch=1)
    again.seek(saved)
    assert values(again) == rest
