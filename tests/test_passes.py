"""The order of the batches in each pass over a dataset, including after a resume."""

import itertools
import random
import re
import sys
import types

import numpy as np
import pytest
from programs.acts import Do, Fail, Record
from programs.fakes import Tensor
from programs.tiny import BATCHES, EVAL_STEP, STATE, STEP, experiment, make_step

import jaxloop
from jaxloop import CheckpointSpec, OuterLoop, TrainLoop, data, every, functional, last
from jaxloop.data import sources
from jaxloop.data.position import DatasetPosition, PositionedIterator, prove

PASSES = 2


def resumed(make, again=None, used=2, passes=0):
    """Returns the rest of a pass, and what a run that was killed in this pass gets after a resume."""
    dataset, again = make(), again or make
    for _ in range(passes):
        list(PositionedIterator(dataset))
    iterator = PositionedIterator(dataset)
    values(iterator, used)
    iterator.mark()
    next_batch = values(iterator, 1)  # A run reads it before it saves.
    saved = through_json(iterator.position(used))
    whole = next_batch + values(iterator)
    iterator = PositionedIterator(again())
    iterator.seek(saved)
    return whole, values(iterator)


def values(iterator, number=None):
    return [np.asarray(batch["x"]).tolist() for batch in itertools.islice(iterator, number)]


def through_json(saved):
    arrays = {}
    return DatasetPosition.from_dict(saved.to_dict(arrays), arrays)


def assert_later_passes_are_the_same(make, opened=PositionedIterator):
    """Checks that a seek to any position yields the same rest of the pass and the same later passes."""
    dataset, passes, positions = make(), [], {}
    for number in range(PASSES):
        iterator, passes_so_far = opened(dataset), len(passes)
        positions[passes_so_far, 0], batches = iterator.position(), []
        while batch := values(iterator, 1):
            batches += batch
            positions[number, len(batches)] = iterator.position()
        passes.append(batches)
    for (number, count), saved in positions.items():
        dataset = make()
        iterator = opened(dataset)
        iterator.seek(through_json(saved))
        assert values(iterator) == passes[number][count:], (number, count)
        assert [values(opened(dataset)) for _ in range(number + 1, PASSES)] == passes[number + 1 :], (number, count)
    return passes


# tf.data ---------------------------------------------------------------------------------------------


def rows():
    tf = pytest.importorskip("tensorflow")
    return tf.data.Dataset.from_tensor_slices({"x": np.arange(12)})


SHUFFLED = {
    "shuffle": lambda: rows().shuffle(12, seed=1).batch(3),
    "prefetch": lambda: rows().shuffle(5, seed=1).batch(3).prefetch(2),
    "the same order": lambda: rows().shuffle(12, seed=1, reshuffle_each_iteration=False).batch(3).prefetch(2),
}


@pytest.mark.parametrize("name", SHUFFLED)
def test_a_resumed_tf_data_shuffle_has_the_same_later_passes(name):
    make = SHUFFLED[name]
    passes = assert_later_passes_are_the_same(make, data.batches if name == "prefetch" else PositionedIterator)
    assert (passes[0] == passes[1]) == (name == "the same order")
    assert PositionedIterator(make()).resume_warning() is None


def test_a_repeated_shuffle_is_one_pass_with_exact_positions():
    make = lambda: rows().shuffle(12, seed=1).repeat(3).batch(3).prefetch(2)
    iterator, positions = PositionedIterator(make()), []
    assert iterator.resume_warning() is None
    everything = []
    while batch := values(iterator, 1):
        everything += batch
        positions.append(iterator.position())
    for count, saved in enumerate(positions, start=1):
        again = PositionedIterator(make())
        again.seek(through_json(saved))
        assert values(again) == everything[count:]


def test_tf_data_whose_state_cannot_be_saved_warns_before_the_first_batch():
    tf = pytest.importorskip("tensorflow")
    generate = lambda: ({"x": np.ones(2, np.float32)} for _ in range(3))
    dataset = tf.data.Dataset.from_generator(generate, output_signature={"x": tf.TensorSpec((2,), tf.float32)})
    warning = PositionedIterator(dataset.shuffle(2, seed=1)).resume_warning()
    assert re.search("PyFunc is stateful.*not continue at the right batch", warning)


# PyTorch ---------------------------------------------------------------------------------------------


class Generator:
    """A stand-in for torch.Generator, and for the global generator."""

    def __init__(self, seed):
        self.number = seed

    def get_state(self):
        return Tensor(np.asarray([self.number]), place="cpu", has_gradient=False)

    def set_state(self, state):
        self.number = int(state.array[0])

    def draw(self):
        self.number += 1
        return self.number


class Sampler:
    __module__ = "torch.utils.data.sampler"

    def __init__(self, generator):
        self.generator = generator


class Loader:
    """A stand-in for a shuffling DataLoader, which draws each pass's order from its own or the global generator."""

    __module__ = "torch.utils.data.dataloader"

    def __init__(self, generator=None):
        self.dataset, self.batch_sampler, self.sampler = BATCHES, None, Sampler(generator)

    def __iter__(self):
        seed = (self.sampler.generator or sys.modules["torch"].default).draw()
        return iter([{"x": row} for row in np.random.default_rng(seed).permutation(5)].__iter__().__next__, None)


class StatefulLoader(Loader):
    """A stand-in for StatefulDataLoader, which draws an order from the generator and skips what it has yielded."""

    __module__ = "torchdata.stateful_dataloader"
    count, skip = 0, 0

    def __iter__(self):
        iterator, self.count, self.skip = super().__iter__(), self.skip, 0
        for _ in range(self.count):
            next(iterator)
        return map(self.give, iterator)

    def give(self, batch):
        self.count += 1
        return batch

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state_dict):
        self.skip = state_dict["count"]


class RandomCrops(StatefulLoader):
    """Draws a random number for each batch that it yields, but not for those that it skips."""

    def give(self, batch):
        return super().give({"x": batch["x"] + sys.modules["torch"].default.draw()})


class CountingLoader(Loader):
    """Seeds each pass's order with the epoch, which a sampler inside of two others counts."""

    def __init__(self, generator=None):
        super().__init__(generator)
        self.counter, self.batch_sampler = Sampler(None), Sampler(None)
        self.counter.epoch, self.batch_sampler.batch_sampler = 0, Sampler(None)
        self.batch_sampler.batch_sampler.sampler = self.counter

    def __iter__(self):
        self.counter.epoch += 1
        rows = np.random.default_rng(self.counter.epoch).permutation(5)
        return ({"x": row} for row in rows)


@pytest.fixture
def torch(monkeypatch):
    module = type(sys)("torch")
    module.default, module.from_numpy = Generator(5), Tensor
    module.get_rng_state = lambda: module.default.get_state()
    module.set_rng_state = lambda state: module.default.set_state(state)
    monkeypatch.setitem(sys.modules, "torch", module)
    return module


@pytest.mark.parametrize("kind", [Loader, StatefulLoader, RandomCrops, CountingLoader])
@pytest.mark.parametrize("has_generator", [False, True])
def test_a_resumed_shuffling_loader_has_the_same_later_passes(torch, kind, has_generator):
    def make():
        torch.default.number = 5
        return kind(Generator(70) if has_generator else None)

    passes = assert_later_passes_are_the_same(make)
    assert passes[0] != passes[1]
    assert PositionedIterator(make()).resume_warning() is None


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it.
@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize("shuffled", [{"shuffle": True}, {"shuffle": True, "generator": 5}, {"shuffle": False}])
def test_resumed_pytorch_loaders_have_the_same_later_passes(stateful, shuffled):
    torch = pytest.importorskip("torch")
    loaders = pytest.importorskip("torchdata.stateful_dataloader") if stateful else torch.utils.data

    def make():
        torch.manual_seed(0)
        options = dict(shuffled)
        if "generator" in options:
            options["generator"] = torch.Generator().manual_seed(options["generator"])
        kind = loaders.StatefulDataLoader if stateful else loaders.DataLoader
        return kind([{"x": np.float32(row)} for row in range(12)], 3, **options)

    passes = assert_later_passes_are_the_same(make, data.batches)
    assert (passes[0] == passes[1]) == (not shuffled["shuffle"])


class Drawing(Loader):
    """Draws from NumPy's and Python's global generators for each example, as `__getitem__` may."""

    num_workers = 0

    def __iter__(self):
        rows = super().__iter__()
        return ({"x": batch["x"] + np.random.random() + random.random()} for batch in rows)


def test_a_loader_that_draws_from_the_generators_of_numpy_and_python_is_resumed_exactly(torch):
    def make():
        torch.default.number = 5
        np.random.seed(3)
        random.seed(4)
        return Drawing()

    passes = assert_later_passes_are_the_same(make)
    assert passes[0] != passes[1]


class PersistentWorkers(Loader):
    """Draws from the generator of a worker process, which lives for several passes."""

    def __init__(self):
        super().__init__(Generator(70))
        self.worker = np.random.default_rng(9)

    def __iter__(self):
        rows = super().__iter__()
        return ({"x": batch["x"] + self.worker.random()} for batch in rows)


class OwnOrder(Loader):
    """Has a sampler that shuffles by the number of its passes."""

    passes = 0

    def __iter__(self):
        self.passes += 1
        return iter([{"x": row} for row in np.random.default_rng(self.passes).permutation(9)].__iter__().__next__, None)


@pytest.mark.parametrize(("make", "passes"), [(PersistentWorkers, 1), (OwnOrder, 0)])
def test_a_loader_with_a_state_that_is_not_saved_is_found_out(torch, make, passes, warnings_logged):
    assert "won't continue at the right batch" in prove(make())
    whole, rest = resumed(make, passes=passes)
    assert whole != rest and len(warnings_logged()) == 1
    assert re.search(r"number 3, is not the one .*\n  batch\['x'\]: .*checksum", warnings_logged()[0])


class DrawingInEvaluation(Loader):
    """Draws from all generators when it is iterated over."""

    def __iter__(self):
        for draw in (sys.modules["torch"].default.draw, self.sampler.generator.draw, np.random.random, random.random):
            draw()
        return iter(BATCHES)


def test_an_evaluation_does_not_advance_any_generator(torch):
    before, eval_data = (np.random.get_state()[1:3], random.getstate()), DrawingInEvaluation(Generator(70))
    outer_loop = OuterLoop(eval_loops=[jaxloop.EvalLoop(EVAL_STEP)])
    outer_loop(STATE, eval_specs=[jaxloop.EvalSpec(eval_data, num_steps=2)])
    assert torch.default.number == 5 and eval_data.sampler.generator.number == 70
    np.testing.assert_equal((np.random.get_state()[1:3], random.getstate()), before)


# Whole runs ------------------------------------------------------------------------------------------


class Numbered(list):
    """Batches of consecutive numbers."""

    def __init__(self, first, number=60):
        super().__init__({"x": np.full([2, 3], first + row, np.float32)} for row in range(number))


def numbers(directory, dataset, total_steps=None, **options):
    """Returns the number of each batch of a run that saves at every fifth step and resumes."""
    run_options = {name: options.pop(name) for name in ("train_epochs", "eval_specs") if name in options}
    options = {"checkpoint_spec": CheckpointSpec(directory, **options), "log_interval": every(1)}
    options |= {"evals": [[] for _ in run_options.get("eval_specs", ())], "eval_step": make_step(Numbers, train=False)}
    outer_loop = experiment(step=make_step(Numbers), directory=directory, saves=every(5), **options)
    outer_loop(STATE, dataset, total_steps, **run_options)
    return [int(number) for number in outer_loop.history.collect("train.number")]


def test_batches_are_left_out_after_an_epoch_that_an_iterator_gave(tmp_path, warnings_logged):
    for dataset, epochs, skip in ((iter(Numbered(1, 5)), 1, [3]), (Numbered(1, 5), 2, [3, 7])):
        outer_loop = experiment(step=make_step(Numbers), workdir=tmp_path, skip=skip, log_interval=every(1))
        outer_loop(STATE, dataset, train_epochs=epochs)
    assert outer_loop.history.collect("train.number") == [1, 2, 4, 5, 1, 3, 4, 5] and warnings_logged() == []


class Numbers(jaxloop.Step):
    """Reports the number of its batch."""

    def run(self, state, batch):
        return state.replace(step=state.step + int(self.train)), {"number": batch["x"].mean()}


def test_new_data_begin_once_and_are_then_resumed(tmp_path):
    numbers(tmp_path, Numbered(0), 12)
    for total_steps in (17, 22, 27):
        found = numbers(tmp_path, Numbered(1000), total_steps, restore_data=False)
    assert found == [*range(10), *range(1000, 1017)]
    assert numbers(tmp_path, Numbered(1000), 29)[25:] == [*range(1015, 1019)]
    for _ in range(2):  # It is the caller's task to move an iterator.
        found = numbers(tmp_path, iter(Numbered(2000)), 32, restore_data=False)
    assert found[30:] == [2000, 2001]


class OneBuffer:
    """Overwrites each batch with the next one."""

    def __iter__(self):
        buffer = np.zeros([8, 3], np.float32)
        for number in range(5):
            buffer[:] = number
            yield {"x": buffer, "y": buffer[:, :1]}


def test_check_finds_a_dataset_that_overwrites_its_batches(tmp_path):
    report = OuterLoop(TrainLoop(STEP), workdir=tmp_path).check(STATE, data.skippable(OneBuffer()), 3)
    assert any("changes each batch when it returns the next one" in problem.text for problem in report.problems)
    assert prove([BATCHES[0]] * 3) is None


def test_changed_data_warn_or_raise(tmp_path, warnings_logged):
    numbers(tmp_path, Numbered(0), 12)
    with pytest.raises(ValueError, match=r"(?s)number 11, .*batch\['x'\]: float32\[2, 3\], checksum .* -> float32"):
        numbers(tmp_path, Numbered(1000), 20, on_changed_data="raise")
    found = numbers(tmp_path, Numbered(0, 70), 17, on_changed_data="raise")  # The next batch is the same.
    assert found == [*range(17)] and warnings_logged() == []
    assert numbers(tmp_path, Numbered(1000), 20)[15:] == [*range(1015, 1020)]
    assert "number 16, is not the one" in warnings_logged()[0]
    with pytest.raises(ValueError, match='on_changed_data must be "warn" or "raise"'):
        CheckpointSpec(tmp_path, on_changed_data="ignore")


def test_changed_data_raise_after_an_epoch_too(tmp_path):
    numbers(tmp_path, Numbered(0, 5), train_epochs=3, total_steps=12)
    with pytest.raises(ValueError, match=r"(?s)number 1, .*batch\['x'\]: float32\[2, 3\], checksum .* -> float32"):
        numbers(tmp_path, Numbered(1000, 5), train_epochs=3, on_changed_data="raise")
    found = numbers(tmp_path, Numbered(0, 5), train_epochs=3, on_changed_data="raise")
    assert found == [*range(5)] * 3


def test_changed_data_raise_after_a_failed_action_too(tmp_path):
    def run(first, *actions):
        spec = CheckpointSpec(tmp_path, on_changed_data="raise")
        outer_loop = experiment(*actions, directory=tmp_path, saves=every(steps=2), checkpoint_spec=spec)
        return outer_loop(STATE, BATCHES[first:], 9)

    with pytest.raises(OSError, match="the disk is gone"):
        run(0, Fail(jaxloop.at(steps=5), uses_outputs=True))
    with pytest.raises(ValueError, match=r"(?s)number 6, .*batch\['x'\]: float32\[8, 3\], checksum"):
        run(1)
    assert int(run(0)[0].step) == 9


def test_an_epoch_that_cannot_begin_ends_the_run_after_the_actions_of_the_one_before(tmp_path):
    def read():
        if next(passes) > 0:
            raise OSError("The disk is gone.")
        yield from BATCHES[:2]

    passes, seen = itertools.count(), Record()
    outer_loop = experiment(seen, directory=tmp_path, saves=1)
    with pytest.raises(OSError, match="The disk is gone"):
        outer_loop(STATE, data.skippable(read), train_epochs=2)
    assert seen.seen == outer_loop.history.collect("steps") == jaxloop.checkpoint.all_steps(tmp_path) == [2]


def test_a_run_whose_evaluation_reads_a_generator_resumes_with_a_warning(tmp_path, warnings_logged):
    for total_steps in (12, 20):
        generated = (batch for batch in Numbered(0))
        spec = jaxloop.EvalSpec(None, dataset_iterator=generated, num_steps=2, interval=every(steps=5))
        found = numbers(tmp_path, Numbered(0), total_steps, eval_specs=[spec])
    assert found == [*range(20)]
    assert "a generator can't report its position" in warnings_logged()[0]
    assert "The run continues with the next batch that the iterator of the evaluation" in warnings_logged()[1]


class Reshuffled:
    """A stand-in for a Hugging Face `IterableDataset`, whose state doesn't contain its shuffle buffer."""

    buffer_size = 1
    epoch = 0
    place = start = None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        rng, buffer = np.random.default_rng(self.epoch), []
        order = [{"x": np.full([2, 3], row)} for row in rng.permutation(12)]
        start = self.start["place"] if self.start and self.start["epoch"] == self.epoch else 0
        for self.place in range(start + 1, 13):
            buffer.append(order[self.place - 1])
            if len(buffer) == self.buffer_size:
                yield buffer.pop(0)
        yield from buffer

    def state_dict(self):
        return {"place": self.place, "epoch": self.epoch}

    def load_state_dict(self, state):
        self.start = state


@pytest.fixture
def hugging_face(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(IterableDataset=Reshuffled))
    monkeypatch.setattr(sources, "check_format", lambda data: None)


def test_a_hugging_face_dataset_is_reshuffled_in_each_epoch(hugging_face, tmp_path):
    dataset = Reshuffled()
    whole = numbers(tmp_path / "whole", dataset, train_epochs=3)
    assert dataset.epoch == 0  # Each epoch reads a copy.
    epochs = [whole[:12], whole[12:24], whole[24:]]
    assert [sorted(epoch) for epoch in epochs] == [[*range(12)]] * 3 and len(set(map(tuple, epochs))) == 3
    for stop in (5, 12, 19, 36):
        numbers(tmp_path / "killed", Reshuffled(), stop, train_epochs=3)
    assert numbers(tmp_path / "killed", Reshuffled(), train_epochs=3) == whole


def test_a_shuffle_buffer_that_is_not_saved_is_found_out(hugging_face, monkeypatch, warnings_logged):
    monkeypatch.setattr(Reshuffled, "buffer_size", 4)
    whole, rest = resumed(Reshuffled)
    assert rest != whole and "number 3, is not the one" in warnings_logged()[0]
    assert "won't continue at the right batch. The next batch of a Reshuffled" in prove(Reshuffled())


# When a batch is read --------------------------------------------------------------------------------


def test_the_next_batch_is_read_before_the_actions_but_is_not_part_of_the_position(tmp_path):
    events = []
    look = Do(lambda step_num, elapsed, **_: events.append(("action", step_num, elapsed.is_last)), every(2) | last())

    def read():
        for number in range(5):
            events.append(("read", number + 1))
            yield BATCHES[number]

    experiment(look, directory=tmp_path, saves=every(2))(STATE, data.skippable(read))
    actions = [event for event in events if event[0] == "action"]
    assert actions == [("action", 2, False), ("action", 4, False), ("action", 5, True)]
    for step in (2, 4):
        assert events.index(("read", step + 1)) < events.index(("action", step, False))
        position = jaxloop.checkpoint.Checkpoint.at(tmp_path, step).run()["parts"]["data"]["positions"][0]["data"]
        assert position["count"] == step


def test_a_functional_loop_warns_at_the_start_that_resuming_is_not_exact(tmp_path, warnings_logged):
    tasks = {every(1): STEP, every(2): functional.checkpoint(tmp_path, resume=True)}
    functional.loop(STATE, (batch for batch in BATCHES), tasks, stop=3)
    assert "can't report its position" in str(warnings_logged()) and "right batch" in str(warnings_logged())
