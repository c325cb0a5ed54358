import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from jaxloop import types
from jaxloop.models.loss_step import LossStep
from jaxloop.step import forward

pytestmark = pytest.mark.usefixtures("compile_fast")

KEY = jax.random.key(0)
X = np.arange(12, dtype=np.float32).reshape(4, 3)


def make(model, spec=(1, 3), **options):
    step = LossStep(KEY, model, optax.sgd(0.1), loss=lambda outputs, batch: jnp.mean(outputs), **options)
    return step.initialize_model(spec)


def call(state, train, rngs=KEY):
    return jax.jit(lambda state, rngs: forward.forward(state, state.params, X, train=train, rngs=rngs))(state, rngs)


# Training flags ---------------------------------------------------------------------------------------


class TakesTrain(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        return x + train


class TakesTraining(nn.Module):
    @nn.compact
    def __call__(self, x, *, training: bool = False):
        return x + training


class TakesDeterministic(nn.Module):
    @nn.compact
    def __call__(self, x, deterministic=False):
        return x + (not deterministic)


class NNXTakesIsTraining(nnx.Module):
    def __call__(self, x, is_training=False):
        return x + is_training


def apply_takes_train(params, x, train):
    return x + train


@pytest.mark.parametrize(
    "model",
    [TakesTrain(), TakesTraining(), TakesDeterministic(), NNXTakesIsTraining(), (lambda key, x: {}, apply_takes_train)],
    ids=["linen train", "training", "deterministic", "nnx is_training", "pair"],
)
def test_a_model_receives_its_training_flag(model):
    with jax.numpy_dtype_promotion("standard"):
        state = make(model)
        for train in (True, False):
            np.testing.assert_array_equal(call(state, train)[0], X + train)


class NNXNet(nnx.Module):
    def __init__(self, *, rngs):
        self.linear = nnx.Linear(3, 50, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.linear(x))


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        return nn.Dropout(0.5, deterministic=not train)(nn.Dense(50)(x))


@pytest.mark.parametrize("model", [LinenNet(), NNXNet(rngs=nnx.Rngs(0))], ids=["linen", "nnx"])
def test_dropout_applies_only_in_training(model):
    state = make(model)
    zeros = lambda outputs: int(np.sum(np.asarray(outputs) == 0))
    outputs, _ = call(state, train=True)
    assert 60 < zeros(outputs) < 140  # Of 200.
    assert len({tuple(row == 0) for row in np.asarray(outputs)}) == 4  # Each example has a different mask.
    assert zeros(call(state, train=False)[0]) == 0


def test_a_linen_model_receives_keys_under_all_names():
    class Shows(nn.Module):
        @nn.compact
        def __call__(self, x):
            return [jax.random.key_data(self.make_rng(name)).tolist() for name in ("dropout", "noise")]

    state = types.TrainState.create(apply_fn=Shows().apply, params={}, tx=optax.identity())
    dropout, noise = forward.forward(state, {}, X, train=True, rngs=KEY)[0]
    assert dropout != noise
    assert dropout == Shows().apply({}, X, rngs={"dropout": KEY, "params": KEY})[0]
    names = {"dropout": jax.random.key(1), "noise": KEY}
    by_name = forward.forward(state, {}, X, train=True, rngs=names)[0]
    assert by_name == Shows().apply({}, X, rngs=names) and by_name[0] != dropout


class NNXShows(nnx.Module):
    def __call__(self, x, *, rngs):
        return rngs.dropout()


APPLIES = [lambda params, x, rng: rng, lambda params, x, key: key, lambda params, x, rngs: rngs["dropout"]]


@pytest.mark.parametrize("apply", [None, *APPLIES], ids=["nnx", "rng", "key", "rngs"])
def test_every_kind_of_model_receives_the_dropout_key(apply):
    state = make(NNXShows() if apply is None else (lambda key, x: {}, apply))
    shown = lambda rngs: jax.random.key_data(forward.forward(state, state.params, X, train=True, rngs=rngs)[0]).tolist()
    assert shown(KEY) == shown({"dropout": KEY, "a": jax.random.key(1)}) != shown({"dropout": jax.random.key(1)})


# Changes in a forward pass --------------------------------------------------------------------------


class LinenNorm(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        calls = self.variable("counters", "calls", lambda: jnp.zeros((), jnp.int32))
        if train:
            calls.value += 1
        return nn.BatchNorm(use_running_average=not train)(x)


class NNXNorm(nnx.Module):
    def __init__(self, *, rngs):
        self.norm = nnx.BatchNorm(3, rngs=rngs)

    def __call__(self, x):
        return self.norm(x)


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_batch_statistics_change_only_in_training(kind):
    with jax.numpy_dtype_promotion("standard"):
        state = make({"linen": LinenNorm(), "nnx": NNXNorm(rngs=nnx.Rngs(0))}[kind])
        # Otherwise, the second step would recompile.
        assert not any(leaf.weak_type for leaf in jax.tree.leaves(state))
        outputs, updates = call(state, train=True)
        np.testing.assert_allclose(np.mean(outputs, axis=0), 0, atol=1e-5)
        after = state.update_variables(updates)
        variables = lambda state: (state.batch_stats, state.collections)
        assert jax.tree.structure(variables(state)) == jax.tree.structure(variables(after))
        assert not all(map(np.array_equal, *map(jax.tree.leaves, map(variables, (state, after)))))
        assert call(after, train=False)[1] is None


@pytest.mark.parametrize("model", [NNXNet, NNXNorm])
def test_a_state_returns_its_nnx_module_with_variables_of_its_own(model):
    state = make(model(rngs=nnx.Rngs(0)))
    state = state.update_variables(call(state, train=True)[1]).apply_gradients(grads=state.params)
    expected, _ = call(state, train=False)
    module = state.module()
    jax.tree.map(lambda leaf: leaf.delete(), state)  # As donation would.
    assert isinstance(module, model)
    np.testing.assert_array_equal(module(X), expected)
    with pytest.raises(TypeError, match=r"module\(\) is for NNX models. .*module.apply\(state.variables, inputs\)"):
        make(LinenNet()).module()


def test_a_linen_model_without_a_training_flag_may_mix_examples_in_evaluations():
    assert forward.mixes_examples(make(nn.Sequential([nn.BatchNorm(use_running_average=False)])), train=False)


# Initial parameters ------------------------------------------------------------------------------------


def test_a_model_with_parameters_stays_usable_after_donation():
    traces = []

    def loss(outputs, batch):
        traces.append(1)
        return jnp.mean((outputs if not isinstance(outputs, dict) else outputs["w"]) ** 2)

    nnx_net, params = NNXNet(rngs=nnx.Rngs(0)), {"w": jnp.ones(3), "b": 0.5}
    for model in (nnx_net, params):
        traces.clear()
        step = LossStep(KEY, model, optax.sgd(0.1), train=True, loss=loss)
        finals = []
        for _ in range(2):
            state, _ = step(step.initialize_model(), {"x": X})
            finals.append([np.array(leaf) for leaf in jax.tree.leaves(state.params)])
        jax.tree.map(np.testing.assert_array_equal, *finals)
        assert step.model is model and len(traces) == 1
    assert np.isfinite(nnx_net.linear.kernel[...]).all() and params["w"].sum() == 3


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Dense, "a Linen module.*got <class 'flax.linen.linear.Dense'>"),
        (eqx.nn.MLP(3, 1, 4, 1, key=KEY), r"got <.* in activation. For an Equinox module: .*eqx.partition"),
        (lambda x: x, "a pair of functions .* or a pytree of floating-point parameters, got <function"),
        ("net", "got 'net'"),
        ({}, "got {}"),
        ({"w": np.ones(3), "n": np.arange(3)}, r"got array\(\[0, 1, 2\]\) in n"),
    ],
)
def test_an_unsupported_model_is_rejected(model, message):
    with pytest.raises(TypeError, match=message):
        forward.adapt(model)
