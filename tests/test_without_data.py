"""Tests of runs without data and steps without a model."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import struct

import jaxloop
import jaxloop.functional as jf
from jaxloop import partition, types


class Environment(struct.PyTreeNode):
    position: jax.Array
    key: jax.Array


class PlayerState(types.TrainState):
    environment: Environment = None


class Player(jaxloop.Step):
    """Learns to walk to 3 in an environment that is part of the state, without a model or data."""

    def make_state(self, spec=None):
        environment = Environment(jnp.zeros([4]), jax.random.key_data(self.base_prng))
        params = {"to": jnp.zeros([])}
        return PlayerState.create(apply_fn=None, params=params, tx=self.optimizer, environment=environment)

    def run(self, state, batch):
        assert batch is None
        environment = state.environment
        key, noise = jax.random.split(jax.random.wrap_key_data(environment.key))
        noise = 0.1 * jax.random.normal(noise, [4])

        def loss_fn(params):
            position = 0.5 * environment.position + 0.5 * params["to"] + noise
            return ((position - 3) ** 2).mean(), position

        (loss, position), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        environment = Environment(jax.lax.stop_gradient(position), jax.random.key_data(key))
        return state.apply_gradients(grads=grads, environment=environment), {"loss": loss}


OPTIMIZER = optax.sgd(0.1)


def new_step(partitioner=None):
    partitioner = partitioner or partition.SingleDevicePartitioner()
    return Player(jax.random.key(0), None, OPTIMIZER, partitioner, train=True)


@pytest.fixture(scope="module")
def uninterrupted():
    step = new_step()
    return jaxloop.TrainLoop(step)(step.initialize_model(), None, num_steps=12)


def outer_loop(directory=None, partitioner=None, **options):
    actions = [] if directory is None else [jaxloop.CheckpointAction(directory, interval=jaxloop.every(steps=4))]
    loop = jaxloop.TrainLoop(new_step(partitioner), end_actions=actions, **options)
    return jaxloop.OuterLoop(loop, checkpoint_spec=directory and jaxloop.CheckpointSpec(directory)), loop.step


def test_a_step_without_a_model_trains_without_data(uninterrupted):
    state, outputs = uninterrupted
    assert int(state.step) == 12 and outputs["loss"][-1] < outputs["loss"][0]
    assert outputs.num_examples == [1] * 12


@pytest.mark.parametrize("steps_per_dispatch", [1, 3])
@pytest.mark.parametrize(
    "partitioner", [None, partition.DataParallelPartitioner(partition.create_mesh(data=-1), "data")]
)
def test_an_outer_loop_without_data_gives_the_same_result(uninterrupted, steps_per_dispatch, partitioner, assert_same):
    run, step = outer_loop(partitioner=partitioner, steps_per_dispatch=steps_per_dispatch)
    state = step.initialize_model()
    report = run.check(state, None, 12, 6)
    assert report.ok and not report.problems, str(report)
    state, outputs = run(state, None, train_total_steps=12, train_loop_steps=6)
    np.testing.assert_allclose(outputs["loss"], uninterrupted[1]["loss"][6:], rtol=1e-5)
    if partitioner is None and steps_per_dispatch == 1:
        assert_same(state, uninterrupted[0])


def test_a_run_without_data_resumes_bit_for_bit(tmp_path, uninterrupted, logs, assert_same):
    seen = []
    for total in (5, 12):
        run, step = outer_loop(tmp_path / "run")
        state, _ = run(step.initialize_model(), None, stop=jaxloop.at(steps=total))
        seen.append(int(state.step))
    assert seen == [5, 12] and any("Resumed at step" in message for message in logs.messages)
    assert_same(state, uninterrupted[0])


def test_an_evaluation_needs_no_data():
    step = new_step()
    _, outputs = jaxloop.EvalLoop(step)(step.initialize_model(), None, num_steps=3)
    assert len(outputs["loss"]) == 3


def test_jf_loop_needs_no_data(tmp_path):
    def count(state, batch, elapsed):
        assert batch is None and elapsed.samples == elapsed.steps
        return {"count": state}, state + 1

    tasks = lambda: {jaxloop.every(1): count, jaxloop.every(2): jf.checkpoint(tmp_path / "run", resume=True)}
    jf.loop(jnp.zeros([]), None, tasks(), stop=3)
    state, history, elapsed = jf.loop(jnp.zeros([]), None, tasks(), stop=7)
    assert int(state) == 7 and elapsed.steps == 7
    assert [row.elapsed.steps for row in history.rows] == [*range(1, 8)]


@pytest.mark.parametrize(
    ("run", "match"),
    [
        (lambda step: jaxloop.TrainLoop(step)(step.initialize_model(), None), "nothing ends it. Give num_steps"),
        (lambda step: jaxloop.OuterLoop(jaxloop.TrainLoop(step))(step.initialize_model()), "train_total_steps or stop"),
        (
            lambda step: jaxloop.OuterLoop(jaxloop.TrainLoop(step))(step.initialize_model(), None, 5, train_epochs=2),
            "train_epochs=2 without a train_dataset",
        ),
        (lambda step: jf.loop(0, None, {jaxloop.every(1): lambda: None}), "no dataset, so nothing ends it. Give stop"),
    ],
    ids="loop,experiment,epochs,jf".split(","),
)
def test_an_endless_run_without_data_raises(run, match):
    with pytest.raises(ValueError, match=match):
        run(new_step())


def test_a_step_without_a_model_must_override_make_state():
    with pytest.raises(TypeError, match=r"no model to initialize.*override of make_state"):
        jaxloop.Step(jax.random.key(0), None).initialize_model()
