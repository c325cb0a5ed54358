"""Ensembles: each member is like a single run, and nothing that happens to a member changes the others."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from programs import ensembles
from programs.ensembles import Model, batches, sgd, squared_error

import jaxloop
from jaxloop import every

pytestmark = pytest.mark.usefixtures("compile_fast")

RATES = np.geomspace(1e-3, 3e-2, 8)


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        h = nn.Dense(8)(x[..., None])
        h = h + nn.MultiHeadDotProductAttention(2, dropout_rate=0.1, deterministic=not train)(nn.LayerNorm()(h))
        return nn.Dense(1)(nn.LayerNorm()(h).mean(axis=1))


class Normalized(nnx.Module):
    def __init__(self, width, *, rngs):
        self.first, self.last = nnx.Linear(3, width, rngs=rngs), nnx.Linear(width, 1, rngs=rngs)
        self.norm, self.dropout = nnx.BatchNorm(width, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))


MODELS = {"mlp": (Model(), {}), "transformer": (Transformer(), {}), "nnx": (Normalized, {"nnx_model_args": (4,)})}


def make_step(kind="mlp", *, seed=0, train=True, rate=0.02, cls=jaxloop.LossStep, **options):
    model, arguments = MODELS[kind]
    optimizer = sgd(rate) if train else None
    options = {"loss": squared_error, **options}
    return cls(jax.random.key(seed), model, optimizer, train=train, **arguments, **options)


def run(step, eval_step, data, *, actions=(), eval_actions=(), state=None, **options):
    """Trains with an evaluation of ragged batches; returns the state and the history."""
    state = step.initialize_model([1, 3]) if state is None else state
    train_loop = jaxloop.TrainLoop(step, end_actions=list(actions), **options)
    outer_loop = jaxloop.OuterLoop(
        train_loop, [jaxloop.EvalLoop(eval_step, end_actions=list(eval_actions))], log_interval=every(25)
    )
    evaluation = [*batches(2, seed=1), *batches(1, rows=3, seed=2)]
    spec = jaxloop.EvalSpec(evaluation, interval=every(len(data) // 2), name="test")
    state, _ = outer_loop(state, data, len(data), eval_specs=[spec])
    return state, outer_loop.history


@functools.cache
def shared(policy="ignore"):
    """Returns an ensemble of four members, its state after some steps, and its history."""
    ensemble = jaxloop.Ensemble(make_step(), seeds=[3, 4], hyperparams={"learning_rate": [0.02, 0.01]})
    state, history = run(ensemble, ensemble.for_evaluation(make_step(train=False)), batches(10))
    return ensemble, state, history


def assert_close(one, other):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), one, other)


def assert_same(one, other):
    is_key = lambda leaf: jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    data = lambda leaf: jax.random.key_data(leaf) if is_key(leaf) else leaf
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(data(a), data(b)), one, other)


# Members are single runs --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MODELS)
def test_a_member_equals_the_single_run(kind):
    hyperparams = {"learning_rate": RATES}
    ensemble = jaxloop.Ensemble(make_step(kind), seeds=range(8), hyperparams=hyperparams, combine="zip")
    fused = {"steps_per_dispatch": 25}
    state, history = run(ensemble, ensemble.for_evaluation(make_step(kind, train=False)), batches(200), **fused)
    assert state.step.shape == () and int(state.step) == 200
    for index in (0, 6):
        seed, rate = ensemble.members[index]["seed"], ensemble.members[index]["learning_rate"]
        single = make_step(kind, seed=seed, rate=rate)
        expected, rows = run(single, make_step(kind, seed=seed, train=False), batches(200), **fused)
        found = ensemble.member(state, index)
        assert type(found) is type(expected)
        assert_close(found.params, expected.params)
        assert_close(found.batch_stats, expected.batch_stats)
        for name in ("train.loss", "test.loss"):
            assert_close(ensemble.collect(history, name)[:, index], np.array(rows.collect(name)))


def test_a_resumed_ensemble_equals_an_uninterrupted_one(tmp_path):
    whole = ensembles.run(tmp_path / "whole")
    assert whole["frozen"][4:] == [True, True] and any(whole["frozen"][:4])  # Some diverged, others stopped early.
    ensembles.run(tmp_path / "resumed", total=26)
    assert ensembles.run(tmp_path / "resumed") == whole


def own_batches(number, members=8):
    return [jax.tree.map(lambda leaf: np.stack([leaf] * members), batch) for batch in batches(number)]


def test_a_poisoned_member_is_frozen_and_the_others_do_not_notice():
    ensemble = jaxloop.Ensemble(make_step(), seeds=range(8), data="own")
    evaluation = ensemble.for_evaluation(make_step(train=False))
    state, history = run(ensemble, evaluation, own_batches(75), nan_policy="skip")
    poisoned = own_batches(75)
    poisoned[49]["x"][3] = np.nan
    other, rows = run(ensemble, evaluation, poisoned, nan_policy="skip")
    before, _ = run(ensemble, evaluation, own_batches(49), nan_policy="skip")
    assert np.flatnonzero(other.frozen).tolist() == [3] and int(other.step) == 75
    for index in range(8):
        expected = before if index == 3 else state
        found, expected = ensemble.member(other, index), ensemble.member(expected, index)
        assert_same(found.replace(step=state.step), expected.replace(step=state.step))
    healthy = [0, 1, 2, 4, 5, 6, 7]
    for name in ("train.loss", "test.loss"):
        values, expected = ensemble.collect(rows, name), ensemble.collect(history, name)
        assert_same(values[:, healthy], expected[:, healthy])
        assert not np.isnan(values[:-1, 3]).any()
    assert np.isnan(ensemble.collect(rows, "train.loss")[-1, 3])  # No step of the last row counts.
    assert rows.collect("train.frozen") == [0.0, pytest.approx(1 / 25), 1.0]


def test_the_run_ends_when_all_members_have_diverged():
    ensemble = jaxloop.Ensemble(make_step(), seeds=range(2))
    data = batches(20)
    data[4] = {**data[4], "x": data[4]["x"] * np.nan}
    train_loop = jaxloop.TrainLoop(ensemble, nan_policy="skip")
    state, outputs = jaxloop.OuterLoop(train_loop)(ensemble.initialize_model([1, 3]), data, 20, 5)
    assert int(state.step) == 5 and (outputs or {})[jaxloop.STOP_LOOP] and state.frozen.all()


def test_members_that_stop_early_are_frozen():
    ensemble = jaxloop.Ensemble(make_step(), hyperparams={"learning_rate": [0.0, 0.02]})
    evaluation = ensemble.for_evaluation(make_step(train=False))
    start = jax.tree.map(np.array, ensemble.initialize_model([1, 3]))
    actions = ensemble.early_stopping("test/loss", patience=1)
    with pytest.raises(TypeError, match="begin_actions"):
        actions[0](start, None, step_num=1)
    state, history = run(ensemble, evaluation, batches(4), eval_actions=actions)
    assert state.frozen.tolist() == [False, False]  # It stopped at the last step.
    ensemble = jaxloop.Ensemble(make_step(), hyperparams={"learning_rate": [0.0, 0.0]}, seeds=[1, 2], combine="zip")
    evaluation = ensemble.for_evaluation(make_step(train=False))
    state, history = run(ensemble, evaluation, batches(60), eval_actions=ensemble.early_stopping("loss", patience=1))
    assert int(state.step) == 60 and len(history.collect("test.loss")) == 2
