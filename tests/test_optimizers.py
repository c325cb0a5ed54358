"""Averages of the parameters, frozen parameters, and optimizers by path."""

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import Mesh
from programs.acts import saving

import jaxloop
from jaxloop import checkpoint, every, last, optimizers, partition

pytestmark = pytest.mark.usefixtures("compile_fast")

X = np.random.default_rng(0).normal(size=[64, 4]).astype(np.float32)
Y = (X.sum(-1) > 0).astype(np.int32)
BATCHES = [{"x": X[i : i + 16], "label": Y[i : i + 16]} for i in range(0, 64, 16)]


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2, name="head")(nn.relu(nn.Dense(8, name="body")(x)))


class NNX(nnx.Module):
    def __init__(self, rngs):
        self.body, self.head = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.body(x)))


def loss(logits, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])


MODELS = {"Linen": Linen(), "NNX": NNX(nnx.Rngs(0))}
MOMENTUM = optax.sgd(0.05, momentum=0.9)


def make_step(model=MODELS["Linen"], optimizer=MOMENTUM, train=True, **options):
    return jaxloop.LossStep(jax.random.key(0), model, optimizer, train=train, loss=loss, **options)


def initial_state(**options):
    return make_step(**options).initialize_model([1, 4])


def train(step, steps=8, state=None):
    state = step.initialize_model([1, 4]) if state is None else state
    return jaxloop.TrainLoop(step)(state, jaxloop.from_index(lambda n: BATCHES[n % 4]), steps)[0]


def bits(tree):
    return [(leaf.dtype, leaf.shape, leaf.tobytes()) for leaf in map(np.asarray, jax.tree.leaves(tree))]


def evaluated(state, **options):
    """Returns the mean loss of a state."""
    _, outputs = jaxloop.EvalLoop(make_step(train=False, **options))(state, BATCHES)
    return float(jaxloop.summarize(outputs)["loss"])


def expected_average(decay, steps=8, **options):
    """Returns the average, computed on the host in float64."""
    step = make_step(**options)
    state = step.initialize_model([1, 4])
    average = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), state.params)
    for count in range(steps):
        state, _ = step(state, BATCHES[count % 4])
        rate = 1 - (decay(count) if callable(decay) else decay)
        average = jax.tree.map(lambda old, new, rate=rate: old + rate * (np.asarray(new) - old), average, state.params)
    return average


@pytest.mark.parametrize(
    ("kind", "decay"), [("NNX", 0.9), ("Linen", 1), ("Linen", lambda count: (1 + count) / (10 + count))]
)
def test_the_average_includes_the_parameters_after_each_update(kind, decay, assert_close):
    model = MODELS[kind]
    state = train(make_step(model, ema=decay))
    assert_close(optimizers.ema_params(state), expected_average(decay, model=model), atol=1e-6)
    assert bits(state.params) == bits(train(make_step(model)).params)  # The updates are the same.


def test_half_precision_parameters_are_averaged_in_float32():
    params = {"w": jnp.ones(3, jnp.bfloat16), "n": jnp.arange(3)}
    optimizer = optimizers.ema(0.999)
    state = optimizer.init(params)
    assert {name: leaf.dtype for name, leaf in state.params_ema.items()} == {"w": jnp.float32, "n": jnp.int32}
    updates = {"w": jnp.full(3, 0.5, jnp.bfloat16), "n": jnp.ones(3, jnp.int32)}
    for _ in range(3):
        _, state = optimizer.update(updates, state, params)
    np.testing.assert_allclose(state.params_ema["w"], 1.5 - 0.5 * 0.999**3, rtol=1e-6)  # bfloat16 would stay at 1.
    assert state.params_ema["n"].tolist() == [1, 2, 3]


def test_evaluations_predictions_and_exports_use_the_average(tmp_path):
    state = train(make_step(ema=0.9))
    averaged = state.replace(params=optimizers.ema_params(state))
    ours, plain = make_step(train=False, ema=0.9, use_ema=True), make_step(train=False)
    assert evaluated(state, ema=0.9, use_ema=True) == evaluated(averaged) != evaluated(state)
    assert bits(ours.predict(state, BATCHES)) == bits(plain.predict(averaged, BATCHES))
    jaxloop.export(ours, state, [1, 4], tmp_path / "model", platforms=["cpu"])
    exported = jax.export.deserialize(bytearray((tmp_path / "model").read_bytes()))
    np.testing.assert_allclose(exported.call(X), plain.predict(averaged, BATCHES), rtol=1e-6)


def test_the_average_has_the_layout_of_the_parameters():
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    step = make_step(partitioner=partition.FSDPPartitioner(mesh, "data", min_size=1), ema=0.9)
    state = train(step)
    layouts = [jax.tree.map(lambda leaf: leaf.sharding, tree) for tree in (state.params, state.opt_state[1].params_ema)]
    assert layouts[0] == layouts[1]
    assert any(not leaf.is_fully_replicated for leaf in jax.tree.leaves(layouts[1]))


@pytest.mark.parametrize(("kind", "accumulate"), [("Linen", 2), ("NNX", 1)])
def test_a_frozen_parameter_stays_bit_identical_and_has_no_optimizer_state(kind, accumulate):
    optimizer = optax.chain(optax.add_decayed_weights(0.1), MOMENTUM)
    step = make_step(MODELS[kind], optimizer, trainable=["head/kernel", "head/bias"], ema=0.9, accumulate=accumulate)
    state = step.initialize_model([1, 4])
    is_body = lambda path: "body" in jax.tree_util.keystr(path)
    special = np.array([-0.0, 1e-40, -3e38, 3.0, 0.0, -1e-45, 1.0, -2.0], np.float32)
    of_body = lambda path, leaf: jnp.array(special) if is_body(path) and leaf.ndim == 1 else leaf
    state = state.replace(params=jax.tree_util.tree_map_with_path(of_body, state.params))
    before = bits(state.params["body"]), bits(state.params["head"])
    moments = [path for path, _ in jax.tree_util.tree_leaves_with_path(state.opt_state[0])]
    assert len(moments) == 2 and not any(map(is_body, moments))
    state = train(step, state=state)
    assert bits(state.params["body"]) == before[0]
    assert all(one != other for one, other in zip(bits(state.params["head"]), before[1], strict=True))


def test_the_first_matching_pattern_selects_the_optimizer():
    optimizer = optimizers.by_path({"*/bias": optax.sgd(1.0), "head/**": optax.sgd(0.1), "**": None})
    step = make_step(optimizer=optimizer)
    state = step.initialize_model([1, 4])
    grads = jax.tree.map(jnp.ones_like, state.params)
    change = jax.tree.map(lambda new, old: new - old, state.apply_gradients(grads=grads).params, state.params)
    moved = {name: {key: round(float(leaf.mean()), 6) for key, leaf in layer.items()} for name, layer in change.items()}
    assert moved == {"body": {"bias": -1.0, "kernel": 0.0}, "head": {"bias": -1.0, "kernel": -0.1}}


def test_patterns_with_the_same_transformation_share_its_norm():
    grads = {"a": jnp.array([3.0]), "b": jnp.array([4.0]), "c": jnp.array([100.0])}
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    optimizer = optimizers.by_path({"a": clipped, "b": clipped, "c": None})
    updates, _ = optimizer.update(grads, optimizer.init(grads), grads)
    np.testing.assert_allclose(jax.tree.leaves(updates), [[-0.6], [-0.8], [0.0]], rtol=1e-6)


def saved(tmp_path, **options):
    state = train(make_step(**options))
    with contextlib.closing(checkpoint.CheckpointWriter(tmp_path)) as writer:
        writer.save(8, state)
    return state


@pytest.mark.parametrize("kind", MODELS)
def test_the_average_is_loaded_without_the_parameters(tmp_path, kind):
    state = saved(tmp_path, model=MODELS[kind], ema=0.9)
    loaded = checkpoint.load_params(tmp_path, into=state.params, ema=True)
    assert bits(loaded) == bits(optimizers.ema_params(state)) != bits(state.params)


def test_an_evaluation_without_an_optimizer_restores_the_average(tmp_path):
    state = saved(tmp_path, ema=0.9)
    step = jaxloop.LossStep(jax.random.key(1), Linen(), loss=loss, ema=0.9, use_ema=True)
    restored = step.restore_model(step.initialize_model([1, 4]), tmp_path)
    assert bits(optimizers.ema_params(restored)) == bits(optimizers.ema_params(state))
    assert bits(step.predict(restored, BATCHES)) == bits(make_step(train=False, use_ema=True).predict(state, BATCHES))


def test_the_average_begins_at_the_parameters_with_which_the_run_begins():
    loaded = train(make_step()).params
    step, evaluating = make_step(ema=0.9), make_step(train=False, use_ema=True)
    state = step.initialize_model([1, 4]).replace(params=loaded)
    assert bits(optimizers.ema_params(state)) == bits(loaded) == bits(evaluating.params_to_evaluate(state))
    before = np.asarray(loaded["head"]["bias"])
    state, _ = step(state, BATCHES[0])
    expected = 0.9 * before + 0.1 * np.asarray(state.params["head"]["bias"])
    np.testing.assert_allclose(optimizers.ema_params(state)["head"]["bias"], expected, rtol=1e-5)


def test_an_unsaved_average_starts_from_the_restored_parameters(tmp_path):
    state = saved(tmp_path)
    with pytest.raises(ValueError, match="has no average of the parameters"):
        checkpoint.load_params(tmp_path, ema=True)
    step = make_step(optimizer=optax.sgd(0.1), ema=0.9)
    restored = step.restore_model(step.initialize_model([1, 4]), tmp_path)
    assert bits(optimizers.ema_params(restored)) == bits(state.params)
    train(step, state=restored)  # The average and the parameters are donated, so they must not share memory.


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: initial_state(trainable="tail/**"), r"'tail/\*\*' matches no parameter.*body/bias"),
        (
            lambda: initial_state(optimizer=optimizers.by_path({"head/**": optax.sgd(1.0)})),
            r"No pattern of 'head/\*\*' matches these parameters.*body/bias",
        ),
        (lambda: make_step(ema=1.5), "a number from 0 to 1, such as 0.999"),
        (lambda: make_step(ema=0.9, use_ema=True), "use_ema=True is for evaluations"),
        (lambda: optimizers.ema_params(initial_state()), "has no averages"),
        (lambda: optimizers.ema(0.9).update({}, optimizers.ema(0.9).init({})), "needs the parameters"),
    ],
)
def test_errors_explain_what_to_do(make, message):
    with pytest.raises(ValueError, match=re.compile(message, re.DOTALL)):
        make()


SCHEDULE_FREE = optax.contrib.schedule_free_sgd(0.05, b1=0.5)


def fit(eval_batches=None, **options):
    return jaxloop.fit(Linen(), BATCHES, eval_batches, loss=loss, progress=None, **options)


def test_a_schedule_free_optimizer_is_evaluated_with_its_averages():
    state, history = fit(BATCHES, optimizer=SCHEDULE_FREE, train_epochs=2, trainable="head/**")
    free = state.opt_state.inner_states["0"].inner_state
    head = optax.contrib.schedule_free_eval_params(free._replace(z=free.z["head"]), state.params["head"])
    averaged = state.replace(params={**state.params, "head": head}, opt_state=())
    assert history.collect("eval.loss")[-1] == pytest.approx(evaluated(averaged), rel=1e-5)
    assert bits(head) != bits(state.params["head"])


@pytest.mark.parametrize(("kind", "trainable"), [("Linen", "head/**"), ("NNX", None)])
def test_a_schedule_free_optimizer_starts_from_loaded_parameters(kind, trainable):
    step = make_step(MODELS[kind], SCHEDULE_FREE, trainable=trainable)
    first = step.initialize_model([1, 4])
    loaded = jax.tree.map(lambda leaf: leaf + 1, first.params)
    given = first.replace(params=loaded)
    created = given.replace(opt_state=first.tx.init(loaded))
    assert bits(step.params_to_evaluate(given)) == bits(loaded)
    states = [train(step, steps=3, state=jax.tree.map(jnp.copy, state)) for state in (given, created)]
    assert bits(states[0].params) == bits(states[1].params)
    assert bits(step.params_to_evaluate(states[0])) == bits(step.params_to_evaluate(states[1]))


def test_restoring_a_schedule_free_checkpoint_without_its_optimizer_is_warned_about(tmp_path, warnings_logged):
    fit(optimizer=SCHEDULE_FREE, train_total_steps=4, workdir=tmp_path)
    step = make_step(train=False)
    step.restore_model(step.initialize_model([1, 4]), tmp_path / "checkpoints")
    assert any("Give the evaluation's step the same optimizer" in text for text in warnings_logged())


def test_fit_evaluates_the_average_and_freezes_the_rest():
    options = {"optimizer": optax.sgd(0.1), "train_epochs": 2}
    state, history = fit(BATCHES, **options, ema=0.9, trainable="head/**")
    averaged = state.replace(params=optimizers.ema_params(state))
    assert history.collect("eval.loss")[-1] == pytest.approx(evaluated(averaged), rel=1e-6)
    plain, _ = fit(**options)
    assert bits(state.params["head"]) != bits(plain.params["head"])
    assert bits(state.params["body"]) == bits(initial_state().params["body"])  # fit's seed is also 0.


class Adapted(nnx.Module):
    def __init__(self, rngs):
        self.body, self.head = (nnx.LoRALinear(*sizes, lora_rank=2, rngs=rngs) for sizes in ((4, 8), (8, 2)))

    def __call__(self, x):
        return self.head(nnx.relu(self.body(x)))


class LoRAStep(jaxloop.Step):
    """Trains adapters of an NNX model, whose frozen parameters are passed to `run` with the batch."""

    frozen = nnx.split_state(nnx.state(Adapted(nnx.Rngs(7)), nnx.Param), nnx.LoRAParam, ...)[1]

    def make_state(self, spec=None, **init_kwargs):
        state = super().make_state(spec, **init_kwargs)
        adapters, _ = nnx.split_state(state.params, nnx.LoRAParam, ...)
        return state.replace(params=adapters, opt_state=self.optimizer.init(adapters))

    def shard_batch(self, batch):
        return super().shard_batch(batch), self.frozen

    def run(self, state, batch):
        batch, frozen = batch

        def loss_fn(adapters):
            model = state.apply_fn(nnx.merge_state(frozen, adapters), state.batch_stats, state.collections)
            return loss(model(batch["x"])[0], batch).mean()

        value, grads = jax.value_and_grad(loss_fn)(state.params)
        return (state.apply_gradients(grads=grads) if self.train else state), {"loss": value}


def test_adapter_checkpoints_contain_only_adapters_and_resume_exactly(tmp_path):
    def run(directory, total):
        step = LoRAStep(jax.random.key(0), Adapted, optax.sgd(0.1, momentum=0.9), train=True, nnx_model_args=())
        return saving(directory, every(steps=2) | last(), step)(step.initialize_model(None), BATCHES * 3, total)[0]

    whole = run(tmp_path / "whole", 9)
    run(tmp_path / "resumed", 5)
    assert bits(run(tmp_path / "resumed", 9)) == bits(whole)
    saved_params = checkpoint.load_params(tmp_path / "resumed")
    assert sorted(saved_params) == ["body", "head"]
    assert all(list(layer) == ["lora"] for layer in saved_params.values())
