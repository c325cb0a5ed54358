import _thread
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from programs import tiny
from programs.acts import Fail, Record
from programs.tiny import BATCHES, STATE, STEP

from jaxloop import every, examples, types
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


@pytest.mark.parametrize("num_steps", [None, 100])
def test_an_exhausted_dataset_ends_the_loop(num_steps):
    loop = Loop(STEP)
    state, outputs = loop(STATE, BATCHES[:7], num_steps)
    assert (int(state.step), loop.step_num, len(outputs["loss"])) == (7, 7, 7)
    state, outputs = loop(state, iter([]), num_steps)
    assert (int(state.step), outputs) == (7, {})


@pytest.mark.parametrize(("num_steps", "error"), [(0, ValueError), (1.5, TypeError), (True, TypeError)])
def test_num_steps_must_be_positive(num_steps, error):
    with pytest.raises(error, match="num_steps must be a positive int or None, got"):
        Loop(STEP)(STATE, BATCHES, num_steps)
    Loop(STEP)(STATE, BATCHES, 1)  # Nothing was lost.


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
    step, state, batches = examples.tiny_regression()

    def begin(state, batch):
        if batch is batches[3]:
            raise RuntimeError("a bad batch")
        return state, batch

    step.begin, loop = begin, Loop(step)
    with pytest.raises(RuntimeError, match="a bad batch") as caught:
        loop(state, batches)
    assert caught.value.__notes__ == [f"in {step!r}, after step 3, in Loop({step!r})"]
    assert int(loop.rescued_state.step) == 3


def test_the_error_for_a_donated_state_names_the_loop():
    loop = TrainLoop(STEP)
    state, _ = loop(STATE, BATCHES, 3)
    loop(state, BATCHES, 3)
    with pytest.raises(ValueError, match=r"(?s)TrainLoop\(.*\), which began at step 3.*jnp.copy"):
        loop(state, BATCHES, 3)


def test_outputs_that_are_leaves_of_the_state_are_read_before_donation():
    class Leaves(tiny.Regression):
        def end(self, state, outputs):
            return state, {"step": state.step, "bias": state.params["bias"]}

    _, outputs = Loop(tiny.make_step(Leaves))(STATE, BATCHES)
    assert outputs["step"] == list(range(1, 101))


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


def test_repeated_ctrl_c_ends_a_python_loop_over_loops():
    def interrupted():
        for batch in BATCHES[:3]:
            _thread.interrupt_main()
            yield batch

    loop, state, calls = Loop(STEP), STATE, 0
    with pytest.raises(KeyboardInterrupt):
        for _ in range(10):
            state, outputs = loop(state, interrupted())
            calls += 1
            assert outputs[types.STOP_LOOP] is True and loop.was_interrupted
    assert calls < 10


def test_stop_iteration_in_a_step_is_not_the_end_of_the_data():
    step, state, batches = examples.tiny_regression()
    step.begin = lambda state, batch: (state, next(iter([])))
    with pytest.raises(RuntimeError, match="The step raised StopIteration") as caught:
        Loop(step)(state, batches)
    assert "after step 0" in caught.value.__notes__[0]


class Regression(tiny.Traced):
    def run(self, state, batch):
        new_state, outputs = super().run(state, {"x": batch["x"], "y": batch["y"].astype(float)})
        return new_state, {**outputs, "step": state.step}


def odd_batches(kind):
    """Returns 40 batches, of which the 36th differs from the others."""
    batches = [{"x": batch["x"], "y": np.ones([8, 1], np.float32)} for batch in BATCHES[:40]]
    if kind == "too large":
        batches = [{"x": batch["x"], "y": np.ones([8, 1], np.int64)} for batch in batches]
    batches[35] = tiny.odd_batches(**batches[35])[kind]
    return batches


def train_on(kind, as_data, end_actions=(), **hooks):
    step = tiny.make_step(type("Regression", (Regression,), hooks))
    loop = TrainLoop(step, end_actions=end_actions, stat_names=[])
    try:
        state, outputs = loop(step.initialize_model([1, 3]), as_data(odd_batches(kind)))
        told = {name: [float(value) for value in values] for name, values in outputs.items()}
        params = jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), state.params)
        return params, told, outputs.num_examples, step.traces
    except Exception as error:
        rescued = loop.rescued_state
        assert rescued is not None and int(rescued.step) == 35
        return type(error), str(error), error.__notes__, step.traces


@pytest.mark.parametrize("kind", "nothing,short,dtype,another leaf,no array,no dict,wrong,too large".split(","))
def test_skipping_checks_for_similar_batches_changes_no_result(kind):
    """A loop skips checks for batches like the previous ones, unless the step has a hook for each batch."""
    detector = str(train_on(kind, list, begin=lambda self, state, batch: (state, batch)))
    assert str(train_on(kind, lambda batches: (each for each in batches))) == detector
    assert str(train_on(kind, list, [Fail(every(time=1e6), uses_outputs=True)])) == detector


@pytest.mark.parametrize(
    ("devices", "nest"),
    [
        (8, lambda x, y, mask: ((x, mask), y)),
        (None, lambda x, y, mask: [[x, mask], y]),
        (8, lambda x, y, mask: {"both": [x, mask], "y": y}),
    ],
)
def test_any_pytree_of_arrays_can_be_a_batch(devices, nest, data_parallel):
    class Nested(Regression):
        def run(self, state, batch):
            x, _, y = jax.tree.leaves(batch)
            return super().run(state, {"x": x, "y": y})

    step = tiny.make_step(Nested, partitioner=data_parallel(devices))
    batches = [nest(batch["x"], batch["y"], np.ones([8, 2], np.float32)) for batch in odd_batches("nothing")]
    state, outputs = TrainLoop(step)(step.initialize_model([1, 3]), batches)
    assert int(state.step) == 40 and outputs.num_examples == [8] * 40


def test_a_signal_ends_a_loop():
    class Interrupting(tiny.Regression):
        def run(self, state, batch):
            jax.debug.callback(lambda step: int(step) == 40 and signal.raise_signal(signal.SIGINT), state.step)
            return super().run(state, batch)

    step, state, batches = tiny.make_step(Interrupting), STATE, BATCHES * 10
    loop = TrainLoop(step)
    state, outputs = loop(state, batches)
    assert loop.was_interrupted and 40 < int(state.step) == len(outputs["loss"]) < 200


def test_a_train_loop_counts_on_after_it_evaluated_another_state():
    _, other, _ = examples.tiny_regression()
    loop = TrainLoop(STEP)
    state, _ = loop(STATE, BATCHES, 5)
    loop(other, BATCHES, 2, return_state_from_step=False)
    state, _ = loop(state, BATCHES, 5)
    assert int(state.step) == loop.step_num == loop.elapsed.steps == 10
