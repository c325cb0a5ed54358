"""Ensembles: each member is like a single run, and nothing that happens to a member changes the others."""

import contextlib
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from programs import ensembles
from programs.ensembles import Model, batches, sgd, squared_error

import jaxloop
from jaxloop import checkpoint, every
from jaxloop.runs import comparison

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


EVALUATION = [*batches(2, seed=1), *batches(1, rows=3, seed=2)]


def run(step, eval_step, data, *, eval_actions=(), eval_every=None, log_every=25, **options):
    """Trains with evaluations of ragged batches; returns the state and the history."""
    eval_loop = jaxloop.EvalLoop(eval_step, end_actions=eval_actions)
    outer_loop = jaxloop.OuterLoop(jaxloop.TrainLoop(step, **options), [eval_loop], log_interval=every(log_every))
    spec = jaxloop.EvalSpec(EVALUATION, interval=every(eval_every or len(data) // 2), name="test")
    state, _ = outer_loop(step.initialize_model([1, 3]), data, len(data), eval_specs=[spec])
    return state, outer_loop.history


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
    seed, rate = ensemble.members[6]["seed"], ensemble.members[6]["learning_rate"]
    single, single_eval = make_step(kind, seed=seed, rate=rate), make_step(kind, seed=seed, train=False)
    expected, rows = run(single, single_eval, batches(200), **fused)
    found = ensemble.member(state, 6)
    assert type(found) is type(expected)
    assert_close((found.params, found.batch_stats), (expected.params, expected.batch_stats))
    for name in ("train.loss", "test.loss"):
        assert_close(ensemble.collect(history, name)[:, 6], np.array(rows.collect(name)))


def test_a_resumed_ensemble_equals_an_uninterrupted_one(tmp_path):
    whole = ensembles.run(tmp_path / "whole", save=12)
    assert whole["frozen"][4:] == [True, True] and any(whole["frozen"][:4])  # Some diverged, others stopped early.
    ensembles.run(tmp_path / "resumed", save=12, total=26)
    assert ensembles.run(tmp_path / "resumed", save=12) == whole


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


def test_the_run_ends_when_all_members_have_diverged(logs):
    ensemble = jaxloop.Ensemble(make_step(), seeds=range(2))
    data = batches(20)
    data[4] = {**data[4], "x": data[4]["x"] * np.nan}
    summaries = jaxloop.SummaryAction(Writer(), every(5))
    train_loop = jaxloop.TrainLoop(ensemble, end_actions=[summaries], nan_policy="skip")
    state, outputs = jaxloop.OuterLoop(train_loop)(ensemble.initialize_model([1, 3]), data, 20, 5)
    assert int(state.step) == 5 and (outputs or {})[jaxloop.STOP_LOOP] and state.frozen.all()
    assert "Stopped at step 5 by outputs['jaxloop/stop_loop']" in logs.text  # Not by the action that read them.


def test_a_member_that_stops_early_is_frozen_and_the_run_ends_when_all_are():
    rates = {"learning_rate": [0.0, 0.02]}
    ensemble, single = jaxloop.Ensemble(make_step(), hyperparams=rates), make_step(rate=0.02)
    stopping = ensemble.early_stopping("test/loss", patience=2, min_delta=0.01)
    evaluation = ensemble.for_evaluation(make_step(train=False))
    state, history = run(ensemble, evaluation, batches(60), eval_every=6, eval_actions=stopping)
    assert 18 < int(state.step) < 60 and state.frozen[0] and not state.diverged.any()
    early = jaxloop.EarlyStoppingAction("test/loss", patience=2, min_delta=0.01)
    expected, rows = run(single, make_step(train=False), batches(60), eval_every=6, eval_actions=[early])
    assert int(expected.step) == int(state.step)
    assert_close(ensemble.member(state, 1).params, expected.params)
    assert_close(ensemble.collect(history, "test.loss")[:, 1], np.array(rows.collect("test.loss")))
    assert len(set(ensemble.collect(history, "test.loss")[:, 0])) == 1  # It still counts in evaluations.


def test_stopped_members_train_further_with_more_patience(tmp_path):
    def train(patience):
        ensemble = jaxloop.Ensemble(make_step(), hyperparams={"learning_rate": [0.0, 0.02]})
        stopping = ensemble.early_stopping("test/loss", patience, min_delta=0.01)
        eval_loop = jaxloop.EvalLoop(ensemble.for_evaluation(make_step(train=False)), end_actions=stopping)
        outer_loop = jaxloop.OuterLoop(jaxloop.TrainLoop(ensemble), [eval_loop], workdir=tmp_path)
        spec = jaxloop.EvalSpec(EVALUATION, interval=every(6), name="test")
        return outer_loop(ensemble.initialize_model([1, 3]), batches(60), 60, eval_specs=[spec])[0]

    before, after = train(2), train(50)
    assert int(before.step) < 60 and before.frozen[0]
    assert int(after.step) == 60 and not after.frozen.any()


# Metrics ------------------------------------------------------------------------------------------------


class Reporting(jaxloop.LossStep):
    def loss(self, outputs, batch):
        error = squared_error(outputs, batch)
        image = jaxloop.MetricWithMetadata(jnp.ones([2, 4, 4, 1]) * error[0], jaxloop.MetricType.IMAGE)
        return error, {"pooled": jaxloop.Weighted(error, batch["x"][:, 0] > 0), "image": image}


class Writer:
    def __init__(self):
        self.scalars, self.images = {}, {}

    def write_scalars(self, step, scalars):
        self.scalars |= scalars

    def write_images(self, step, images):
        self.images |= images

    def flush(self):
        pass


def test_a_metric_has_one_value_per_member(tmp_path):
    options = {"cls": Reporting, "loss": None}
    ensemble = jaxloop.Ensemble(make_step(**options), seeds=[3, 4], hyperparams={"learning_rate": [0.02, 0.01]})
    evaluation, writer, each = ensemble.for_evaluation(make_step(train=False, **options)), Writer(), Writer()
    summaries = [jaxloop.SummaryAction(writer), jaxloop.SummaryAction(each, members=True)]
    state, history = run(ensemble, evaluation, batches(10), eval_actions=summaries, log_every=5)
    single = make_step(train=False, **options)
    for index in range(4):
        _, outputs = jaxloop.EvalLoop(single)(ensemble.member(state, index), EVALUATION)
        for name, value in jaxloop.summarize(outputs).items():
            if not name.startswith("jaxloop/"):
                assert ensemble.collect(history, f"test.{name}")[-1, index] == pytest.approx(value, rel=1e-6)
    values = ensemble.collect(history, "test.loss")
    assert values.shape == (2, 4)
    steps, means = history.collect("steps", "test.loss")
    assert steps == [5, 10] and means == pytest.approx(values.mean(axis=1))
    assert history.collect("test.loss.members.min") == values.min(axis=1).tolist()
    assert history.collect("test.loss.members.std") == pytest.approx(values.std(axis=1, ddof=1).tolist())
    assert ensemble.best(history, "test.loss") == np.argmin(values[-1])
    assert ensemble.best(history, "test.loss", mode="max") == np.argmax(values[-1])
    names = {name for name in writer.scalars if not name.startswith("jaxloop/")}
    spread = {f"{name}/members/{end}" for name in ("loss", "pooled") for end in ("min", "max", "std")}
    assert names == {"loss", "pooled", *spread}
    assert {name for name in each.scalars if name[-1].isdigit()} == {
        f"{name}/members/{index}" for name in ("loss", "pooled") for index in range(4)
    }
    assert writer.images["image"].shape == (8, 4, 4, 1)
    figure = history.plot()
    assert [axes.get_ylabel() for axes in figure.axes] == ["loss", "pooled"]
    assert len(figure.axes[0].collections) == 2  # The bands of train and test.


class Batches(jaxloop.Step):
    """Reports the sum of each batch."""

    def make_state(self, spec=None, **init_kwargs):
        return jaxloop.TrainState.create(apply_fn=None, params={"w": jnp.zeros(1)}, tx=optax.identity())

    def run(self, state, batch):
        return state, {"sum": batch["x"].sum()}


def test_means_of_members_are_as_exact_as_in_float64():
    values = (1e4 + np.random.default_rng(0).random([1000, 2])).astype(np.float32)
    ensemble = jaxloop.Ensemble(Batches(jax.random.key(0), None), seeds=[0, 1], data="own")
    state, data = ensemble.initialize_model(), [{"x": each[:, None]} for each in values]
    _, outputs = jaxloop.EvalLoop(ensemble)(state, data)
    means = jaxloop.summarize(outputs)
    expected = values.astype(np.float64).mean(axis=0)
    assert [means["sum/members/0"], means["sum/members/1"]] == pytest.approx(expected, rel=1e-12)


# States ---------------------------------------------------------------------------------------------------


def test_members_are_combinations():
    rates = {"learning_rate": [0.02, 0.01], "momentum": [0.9, 0.5]}
    product = jaxloop.Ensemble(make_step(), seeds=[3, 4], hyperparams=rates)
    assert len(product.members) == 8
    assert product.members[1] == {"learning_rate": 0.02, "momentum": 0.9, "seed": 4}
    state = product.initialize_model([1, 3])
    assert state.opt_state.hyperparams["momentum"].tolist() == pytest.approx([0.9, 0.9, 0.5, 0.5] * 2)
    assert jaxloop.Ensemble(make_step(), seeds=2).members == [{"seed": 0}, {"seed": 1}]
    zipped = jaxloop.Ensemble(make_step(), seeds=[3, 4], hyperparams=rates, combine="zip")
    assert [tuple(each.values()) for each in zipped.members] == [(0.02, 0.9, 3), (0.01, 0.5, 4)]


def test_keys_are_those_of_a_single_run():
    model = (lambda key, x: {"w": jax.random.normal(key, [3])}, lambda params, x: x @ params["w"])
    for key in (jax.random.key(7, impl="rbg"), jax.random.PRNGKey(7)):
        make = lambda key: jaxloop.LossStep(key, model, train=False, loss=lambda outputs, batch: outputs)
        found = jaxloop.Ensemble(make(key), seeds=[7]).initialize_model([1, 3]).params["w"][0]
        assert_same(found, make(key).initialize_model([1, 3]).params["w"])
    keys = {"params": jax.random.key(0), "noise": jax.random.key(1)}
    found = jaxloop.Ensemble(make(keys), seeds=[7]).initialize_model([1, 3]).params["w"][0]
    expected = {name: jax.random.fold_in(key, 7) for name, key in keys.items()}
    assert_same(found, make(expected).initialize_model([1, 3]).params["w"])


def test_a_member_of_a_checkpoint_can_be_loaded_and_used(tmp_path):
    ensemble, single = jaxloop.Ensemble(make_step(), seeds=range(3)), make_step(train=False)
    state = ensemble.initialize_model([1, 3])
    with contextlib.closing(checkpoint.CheckpointWriter(tmp_path)) as writer:
        writer.save(0, state)
    assert_same(checkpoint.load_params(tmp_path, member=2), jax.tree.map(lambda leaf: leaf[2], state.params))
    with pytest.raises(ValueError, match="has 3 members, got member=3"):
        checkpoint.load_params(tmp_path, member=3)
    with pytest.raises(ValueError, match="either member or into"):
        checkpoint.load_params(tmp_path, member=0, into=state.params)
    with pytest.raises(IndexError, match="The members are 0 to 2, got 3"):
        ensemble.member(state, 3)
    restored = ensemble.restore_model(ensemble.initialize_model([1, 3]), tmp_path)
    assert single.predict(ensemble.member(restored, 1), batches(1)).shape == (8, 1)
    jaxloop.export(single, ensemble.member(state, 1), [1, 3], tmp_path / "model", platforms=["cpu"])


def test_members_on_several_devices_equal_those_on_one_and_do_not_communicate():
    one = jaxloop.Ensemble(make_step(), seeds=range(8))
    mesh = jax.make_mesh((4,), ("members",))
    several = jaxloop.Ensemble(make_step(), seeds=range(8), mesh=mesh)
    states = []
    for ensemble in (one, several):
        evaluation = ensemble.for_evaluation(make_step(train=False))
        states.append(run(ensemble, evaluation, batches(6))[0])
    assert_close(states[0].params, states[1].params)
    assert "members" in str(jax.tree.leaves(states[1].params)[0].sharding.spec)
    lowered = jax.jit(several.run).lower(states[1], several.begin(states[1], batches(1)[0])[1])
    text = str(lowered.compile().as_text())
    assert "all-gather" not in text and "all-to-all" not in text and "collective-permute" not in text
    with pytest.raises(ValueError, match="can't be divided evenly"):
        jaxloop.Ensemble(make_step(), seeds=range(6), mesh=mesh).initialize_model([1, 3])


def test_fit_trains_an_ensemble(tmp_path):
    options = {"loss": squared_error, "optimizer": optax.sgd(0.02), "train_epochs": 2, "progress": None}
    data = [*batches(3), *batches(1, rows=5)]
    state, history = jaxloop.fit(Model(), data, EVALUATION, seeds=2, workdir=tmp_path, **options)
    expected, rows = jaxloop.fit(Model(), data, EVALUATION, seed=1, **options)
    assert_close(jax.tree.map(lambda leaf: leaf[1], state.params), expected.params)
    assert history.collect("eval.loss.members.1") == pytest.approx(rows.collect("eval.loss"), rel=1e-5)
    compared = str(comparison.compare([tmp_path], "eval.loss"))
    assert f"{min(history.collect('eval.loss')):.4g} ± " in compared
    report = jaxloop.fit(Model(), data, EVALUATION, seeds=[0, 1], dry_run=True, **options)
    assert not report.errors, report


# Mistakes -----------------------------------------------------------------------------------------------


class Ending(jaxloop.LossStep):
    def end(self, state, outputs):
        return state, outputs


class Beginning(jaxloop.LossStep):
    def begin(self, state, batch):
        return super().begin(state.replace(step=state.step), batch)


class Holding(jaxloop.LossStep):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.noise_key = jax.random.key(0)


def mistyped(value) -> Any:
    return value


def train_once(**options):
    ensemble = jaxloop.Ensemble(make_step(**options), seeds=[0, 1])
    ensemble(ensemble.initialize_model([1, 3]), batches(1)[0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: jaxloop.Ensemble(make_step()), "needs seeds, hyperparams or both"),
        (lambda: jaxloop.Ensemble(make_step(), seeds=[]), "got 0 of 'seed'"),
        (lambda: jaxloop.Ensemble(make_step(), seeds=[1, 2, 1]), "Two members would be the same run"),
        (
            lambda: jaxloop.Ensemble(make_step(), seeds=range(3), hyperparams={"learning_rate": [1]}, combine="zip"),
            "got 1 of 'learning_rate', 3 of 'seed'",
        ),
        (lambda: jaxloop.Ensemble(make_step(), seeds=[1], combine=mistyped("grid")), "'product' or 'zip', got 'grid'"),
        (lambda: jaxloop.Ensemble(make_step(), seeds=[1], data=mistyped("owned")), "'shared' or 'own', got 'owned'"),
        (lambda: jaxloop.Ensemble(make_step(cls=Ending), seeds=[1]), "it has its own `end`"),
        (lambda: jaxloop.Ensemble(make_step(cls=Holding), seeds=[1]), "share the key 'noise_key'"),
        (
            lambda: jaxloop.Ensemble(
                jaxloop.LossStep(
                    jax.random.key(0), Normalized(2, rngs=nnx.Rngs(0)), sgd(), train=True, loss=squared_error
                ),
                seeds=[1, 2],
            ),
            "start with the parameters of .* NNX class",
        ),
        (lambda: jaxloop.Ensemble(jaxloop.Ensemble(make_step(), seeds=[1]), seeds=[1]), "the step of a single run"),
        (
            lambda: jaxloop.Ensemble(make_step(), hyperparams={"decay": [1]}).initialize_model([1, 3]),
            "must set 'decay' once.*sets learning_rate, momentum",
        ),
        (lambda: train_once(cls=Beginning), "`begin` changes the state"),
        (
            lambda: jaxloop.Ensemble(make_step(), seeds=[1]).member(make_step().initialize_model([1, 3]), 0),
            "single run",
        ),
        (
            lambda: jaxloop.Ensemble(make_step(), seeds=[1, 2], data="own").num_examples(batches(1)[0]),
            r"batch\['x'\] needs a leading axis of 2 members, got float32\[8, 3\]",
        ),
        (
            lambda: jaxloop.Ensemble(
                make_step(partitioner=jaxloop.DataParallelPartitioner(jax.make_mesh((8,), ("data",)), "data")),
                seeds=[1],
            ),
            "Give the mesh to the Ensemble",
        ),
    ],
)
def test_mistakes_are_explained(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()
