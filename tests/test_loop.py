import _thread
import itertools
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from clu import metrics as clu_metrics
from flax import linen as nn
from programs import tiny
from programs.acts import Fail, Record
from programs.tiny import BATCHES, STATE, STEP

from jaxloop import every, examples, metrics, partition, types
from jaxloop.action_loop import ActionLoop
from jaxloop.loop import Loop
from jaxloop.step import Step
from jaxloop.train_loop import TrainLoop


def test_a_loop_matches_a_handwritten_loop(assert_same):
    step, state, batches = examples.tiny_regression()
    expected = []
    for batch in batches[:70]:
        state, outputs = step(state, batch)
        expected.append(float(outputs["loss"]))

    step, same_state, _ = examples.tiny_regression()
    same_state, outputs = Loop(step)(same_state, iter(batches), num_steps=70)
    assert outputs["loss"] == expected
    assert outputs.num_examples == [8] * 70
    assert all(isinstance(loss, np.float32) for loss in outputs["loss"])
    assert_same(same_state, state)


def test_the_next_loop_continues_the_iterator():
    iterator, loop = iter(BATCHES), Loop(STEP)
    state, _ = loop(STATE, iterator, num_steps=3)
    state, outputs = loop(state, iterator, num_steps=3)
    _, expected = Loop(STEP)(STATE, iter(BATCHES), num_steps=6)
    assert outputs["loss"] == expected["loss"][3:]


@pytest.mark.parametrize("num_steps", [None, 100])
def test_an_exhausted_dataset_ends_the_loop(num_steps):
    loop = Loop(STEP)
    state, outputs = loop(STATE, BATCHES[:7], num_steps)
    assert (int(state.step), loop.step_num, len(outputs["loss"])) == (7, 7, 7)
    state, outputs = loop(state, iter([]), num_steps)
    assert (int(state.step), outputs) == (7, {})


@pytest.mark.parametrize(
    ("num_steps", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError), ("3", TypeError)]
)
def test_num_steps_must_be_positive(num_steps, error):
    with pytest.raises(error, match="num_steps must be a positive int or None, got"):
        Loop(STEP)(STATE, BATCHES, num_steps)
    Loop(STEP)(STATE, BATCHES, 1)  # Nothing was lost.


@pytest.mark.parametrize("dataset", ["train", 5, {"x": np.zeros(3)}, np.zeros([3, 3])])
def test_a_value_that_is_not_a_dataset_is_rejected(dataset):
    with pytest.raises(TypeError, match="A dataset must be an iterator or an iterable of batches, got"):
        Loop(STEP)(STATE, dataset, 1)


def test_return_state_from_step_false_leaves_the_state_usable():
    _, state, _ = examples.tiny_regression()
    before = jax.device_get(state)
    same_state, outputs = Loop(STEP)(state, BATCHES, num_steps=5, return_state_from_step=False)
    assert len(outputs["loss"]) == 5
    jax.tree.map(np.testing.assert_array_equal, same_state, before)
    Loop(STEP)(state, BATCHES, num_steps=1)


def failing_dataset(batches, after):
    yield from batches[:after]
    raise OSError("the disk is gone")


def test_an_error_in_the_iterator_loses_nothing():
    _, state, _ = examples.tiny_regression()
    loop = Loop(STEP)
    with pytest.raises(OSError, match="the disk is gone") as caught:
        loop(state, failing_dataset(BATCHES, after=5), num_steps=10)
    assert "in the dataset, after step 5" in caught.value.__notes__[0]
    assert int(loop.rescued_state.step) == 5
    with pytest.raises(ValueError, match="donated"):  # Passing the old state again doesn't lose the rescued one.
        loop(state, iter(BATCHES), 1)
    rescued, _ = loop(loop.rescued_state, iter(BATCHES), 1)
    assert int(rescued.step) == 6 and loop.rescued_state is None


def test_an_error_in_a_step_loses_nothing():
    class Fails(Step):
        def begin(self, state, batch):
            if batch["x"][0] == 3:
                raise RuntimeError("a bad batch")
            return state, batch

        def run(self, state, batch):
            return state.replace(step=state.step + 1), {}

    step = Fails(jax.random.key(0), nn.Dense(1))
    loop = Loop(step)
    with pytest.raises(RuntimeError, match="a bad batch") as caught:
        loop(step.initialize_model([1, 1]), ({"x": np.full(2, i)} for i in range(9)))
    assert caught.value.__notes__ == ["in Fails(model=Dense, train=False), after step 3, in Loop(" + repr(step) + ")"]
    assert int(loop.rescued_state.step) == 3


@pytest.mark.parametrize("loop_class", [Loop, ActionLoop])
def test_loops_other_than_train_loops_accept_steps_without_updates(loop_class):
    class Looks(Step):
        def run(self, state, batch):
            return state, {"largest": batch["x"].max()}

    step = Looks(jax.random.key(0), nn.Dense(1))
    state, outputs = loop_class(step, **{} if loop_class is Loop else {"stat_names": []})(
        step.initialize_model([1, 1]), [{"x": np.full(2, float(number))} for number in range(3)]
    )
    assert outputs["largest"] == [0, 1, 2] and int(state.step) == 0


def test_a_state_rescued_by_an_earlier_call_is_not_rescued_again():
    class FailsAtTheEnd(Counts):
        def end(self, state, outputs):
            if int(state.step) == 3:
                raise RuntimeError("after the update")
            return state, outputs

    step = FailsAtTheEnd(jax.random.key(0), nn.Dense(1))
    loop, batch = Loop(step), {"x": np.ones([8, 1], np.float32)}
    with pytest.raises(RuntimeError, match="after the update"):
        loop(step.initialize_model([1, 1]), [batch] * 5)
    assert int(loop.rescued_state.step) == 3
    with pytest.raises(OSError, match="the disk is gone"):
        loop(step.initialize_model([1, 1]), failing_dataset([], after=0))
    assert (int(loop.rescued_state.step), loop.step_num) == (0, 0)


def test_the_error_for_a_donated_state_names_the_loop():
    loop = TrainLoop(STEP)
    state, _ = loop(STATE, BATCHES, 3)
    loop(state, BATCHES, 3)
    with pytest.raises(ValueError, match=r"(?s)TrainLoop\(.*\), which began at step 3.*jnp.copy"):
        loop(state, BATCHES, 3)


def test_a_second_loop_does_not_read_the_step_from_the_device(monkeypatch):
    loop = TrainLoop(STEP)
    state, _ = loop(STATE, BATCHES, 3)
    reads = []
    fetch = metrics.fetch
    monkeypatch.setattr(metrics, "fetch", lambda tree: reads.append(tree) or fetch(tree))
    loop(state, BATCHES, 3)
    assert len(reads) == 1 and loop.step_num == 6  # A single read, for the outputs.


def test_a_train_step_must_increment_the_step():
    class Stuck(Step):
        def run(self, state, batch):
            return state, {"loss": jnp.ones(())}

    step = Stuck(jax.random.key(0), nn.Dense(1), train=True, optimizer=optax.sgd(0.1))
    loop = TrainLoop(step)
    with pytest.raises(
        ValueError, match=r"ran on \d+ batch(es)? from state.step 0, and state.step is now 0, not \d+.*add 1 to it"
    ):
        loop(step.initialize_model([1, 3]), [{"x": np.ones(3)}] * 3)


class Counts(Step):
    """Increments the step; subclasses define other outputs."""

    def run(self, state, batch):
        return state.replace(step=state.step + 1), {"loss": batch["x"].mean()}


def counting_loop(step_class, loop_class=Loop, num_steps=100, devices=None):
    partitioner = devices or partition.SingleDevicePartitioner()
    step = step_class(jax.random.key(0), nn.Dense(1), optax.sgd(0.1), partitioner, train=True)
    dataset = [{"x": np.full([8, 1], i, np.float32)} for i in range(num_steps)]
    return loop_class(step)(step.initialize_model([1, 1]), dataset)


def test_outputs_that_are_leaves_of_the_state_are_read_before_donation():
    class Leaves(Counts):
        def end(self, state, outputs):
            return state, {"step": state.step, "bias": state.params["bias"]}

    _, outputs = counting_loop(Leaves)
    assert outputs["step"] == list(range(1, 101))


@pytest.mark.parametrize("kind", ["scalars", "metrics", "host values", "nothing"])
@pytest.mark.parametrize(("devices", "chunk"), [(1, 64), (8, 4)])
def test_the_host_is_never_more_than_two_chunks_ahead(kind, devices, chunk, monkeypatch, data_parallel):
    """Whatever a step outputs, the loop waits for the devices before it gets two chunks ahead of them."""

    class Kind(Counts):
        def run(self, state, batch):
            state, outputs = super().run(state, batch)
            average = clu_metrics.Average.from_model_output(outputs["loss"])
            return state, {"scalars": outputs, "metrics": {"mean": average}}.get(kind)

        def end(self, state, outputs):
            return state, {"note": 1} if kind == "host values" else outputs

    waits = []
    wait = metrics.wait
    monkeypatch.setattr(metrics, "wait", lambda tree: waits.append(bool(jax.tree.leaves(tree))) or wait(tree))
    counting_loop(Kind, num_steps=320, devices=data_parallel(devices))
    assert sum(waits) >= 320 / (chunk + 1) - 1


def test_any_pytree_can_be_a_state():
    class Plain(Step):
        def run(self, state, batch):
            return {"w": state["w"] + batch["x"].sum()}, {"w": state["w"]}

    note = Record()
    step = Plain(jax.random.key(0), nn.Dense(1), train=True)
    loop = TrainLoop(step, end_actions=[note])
    state = {"w": jnp.zeros(())}
    for _ in range(2):
        state, outputs = loop(state, [{"x": np.ones(3, np.float32)}] * 4)
    assert float(state["w"]) == 24 and outputs["w"] == [12, 15, 18, 21] and note.seen == [4, 8]


def test_end_is_not_called_without_a_step():
    class Last(TrainLoop):
        def end(self, state, outputs):
            return super().end(state, {**outputs, "last": outputs["loss"][-1]})

    _, outputs = counting_loop(Counts, Last, num_steps=0)
    assert outputs == {}


def test_repeated_ctrl_c_ends_a_python_loop_over_loops():
    def interrupted():
        for _ in range(3):
            _thread.interrupt_main()
            yield {"x": np.ones([8, 1], np.float32)}

    step = Counts(jax.random.key(0), nn.Dense(1))
    loop, state = Loop(step), step.initialize_model([1, 1])
    calls = 0
    with pytest.raises(KeyboardInterrupt):
        for _ in range(10):
            state, outputs = loop(state, interrupted())
            calls += 1
            assert outputs[types.STOP_LOOP] is True and loop.was_interrupted
    assert calls < 10


def test_a_hook_must_return_a_pair():
    class Wrong(Counts):
        def begin(self, state, batch):
            return batch

    with pytest.raises(TypeError, match=r"Wrong.begin must return \(state, batch\), a pair, got dict"):
        counting_loop(Wrong)


def test_a_loop_requires_a_step():
    with pytest.raises(TypeError, match="TrainLoop takes a jaxloop Step, got <function"):
        TrainLoop(lambda state, batch: None)


def test_stop_iteration_in_a_step_is_not_the_end_of_the_data():
    class Careless(type(examples.tiny_regression()[0])):
        def begin(self, state, batch):
            return state, next(iter([]))

    step, state, batches = examples.tiny_regression()
    step = Careless(step.base_prng, step.model, step.optimizer)
    with pytest.raises(RuntimeError, match="The step raised StopIteration") as caught:
        Loop(step)(state, batches)
    assert "after step 0" in caught.value.__notes__[0]


class Regression(Step):
    traces = 0

    def run(self, state, batch):
        self.traces += 1
        loss = lambda params: ((state.apply_fn({"params": params}, batch["x"]) - batch["y"].astype(float)) ** 2).mean()
        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), {"loss": value, "step": state.step}


def odd_batches(kind):
    """Returns 40 batches, of which the 36th differs from the others."""
    batches = [{"x": batch["x"], "y": np.ones([8, 1], np.float32)} for batch in BATCHES[:40]]
    if kind == "too large":
        batches = [{"x": batch["x"], "y": np.ones([8, 1], np.int64)} for batch in batches]
    batches[35] = tiny.odd_batches(**batches[35])[kind]
    return batches


def train_on(kind, as_data, end_actions=(), **hooks):
    step = type("Regression", (Regression,), hooks)(jax.random.key(0), nn.Dense(1), optax.sgd(0.1), train=True)
    loop = TrainLoop(step, end_actions=end_actions, stat_names=[])
    try:
        state, outputs = loop(step.initialize_model([1, 3]), as_data(odd_batches(kind)))
        told = {name: [float(value) for value in values] for name, values in outputs.items()}
        return (
            jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), state.params),
            told,
            outputs.num_examples,
            step.traces,
        )
    except Exception as error:
        rescued = loop.rescued_state
        assert rescued is not None and int(rescued.step) == 35
        return type(error), str(error), error.__notes__, step.traces


@pytest.mark.parametrize(
    "kind", "nothing,short,one leaf,dtype,another leaf,order,no array,no dict,wrong,strings,too large".split(",")
)
def test_skipping_checks_for_similar_batches_changes_no_result(kind):
    """A loop skips checks for batches like the previous ones, unless the step has a hook for each batch."""
    detector = str(train_on(kind, list, begin=lambda self, state, batch: (state, batch)))
    for as_data in (list, lambda batches: (each for each in batches)):
        assert str(train_on(kind, as_data)) == detector
    assert str(train_on(kind, list, [Fail(every(time=1e6), uses_outputs=True)])) == detector


@pytest.mark.parametrize("devices", [None, 8])
@pytest.mark.parametrize(
    "nest",
    [
        lambda x, y, mask: ((x, mask), y),
        lambda x, y, mask: [[x, mask], y],
        lambda x, y, mask: {"both": [x, mask], "y": y},
    ],
)
def test_any_pytree_of_arrays_can_be_a_batch(devices, nest, data_parallel):
    class Nested(Regression):
        def run(self, state, batch):
            x, _, y = jax.tree.leaves(batch)
            return super().run(state, {"x": x, "y": y})

    step = Nested(jax.random.key(0), nn.Dense(1), optax.sgd(0.1), data_parallel(devices), train=True)
    batches = [nest(batch["x"], batch["y"], np.ones([8, 2], np.float32)) for batch in odd_batches("nothing")]
    state, outputs = TrainLoop(step)(step.initialize_model([1, 3]), batches)
    assert int(state.step) == 40 and outputs.num_examples == [8] * 40


@pytest.mark.parametrize("as_data", [list, itertools.chain])
def test_a_signal_ends_a_loop_over_any_data(as_data):
    class Interrupting(Counts):
        def run(self, state, batch):
            jax.debug.callback(lambda step: int(step) == 40 and signal.raise_signal(signal.SIGINT), state.step)
            return super().run(state, batch)

    step = Interrupting(jax.random.key(0), nn.Dense(1), train=True)
    loop = TrainLoop(step)
    state, outputs = loop(step.initialize_model([1, 3]), as_data([{"x": np.ones(3)}] * 1000))
    assert loop.was_interrupted and 40 < int(state.step) == len(outputs["loss"]) < 200


@pytest.mark.parametrize("devices", [None, 1])
def test_a_custom_partitioner_places_each_batch(devices):
    class Placing:
        placed = 0

        def shard_batch(self, batch):
            self.placed += 1
            return super().shard_batch(batch)

    if devices is None:
        partitioner = type("Own", (Placing, partition.SingleDevicePartitioner), {})()
    else:
        mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
        partitioner = type("Own", (Placing, partition.DataParallelPartitioner), {})(mesh, "data")
    step = Regression(jax.random.key(0), nn.Dense(1), optax.sgd(0.1), train=True, partitioner=partitioner)
    TrainLoop(step)(step.initialize_model([1, 3]), odd_batches("nothing"))
    assert partitioner.placed == 40


def test_a_train_loop_counts_on_after_it_evaluated_another_state():
    _, other, _ = examples.tiny_regression()
    loop = TrainLoop(STEP)
    state, _ = loop(STATE, BATCHES, 5)
    loop(other, BATCHES, 2, return_state_from_step=False)
    state, _ = loop(state, BATCHES, 5)
    assert int(state.step) == loop.step_num == loop.elapsed.steps == 10
