import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from clu import metrics as clu_metrics
from flax import linen as nn
from flax import nnx
from programs.fakes import Tensor
from programs.models import NNXNoisy, Noisy, squares

import jaxloop
from jaxloop import functional as jf
from jaxloop.models.loss_step import LossStep
from jaxloop.step import forward

pytestmark = pytest.mark.usefixtures("compile_fast")

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
W = RNG.normal(size=(3, 1)).astype(np.float32)


def rows(count, seed=0):
    """Returns a batch for a linear regression."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 3)).astype(np.float32)
    return {"x": x, "y": (x @ W + rng.normal(size=(count, 1))).astype(np.float32)}


def linear(params, batch):
    """A loss of bare parameters, which compiles quickly."""
    return squares(batch["x"] @ params["w"], batch)


def linear_step(loss=linear, **options):
    return LossStep(KEY, {"w": np.zeros([3, 1], np.float32)}, optax.sgd(0.1), loss=loss, **options)


def train(step, batches, **spec):
    """Trains from the initial state and returns the final state and the losses."""
    state, losses = step.initialize_model(**spec), []
    for number, batch in enumerate(batches):
        state, outputs = step(state, batch, number)
        losses.append(float(outputs["loss"]))
    return state, losses


# Model libraries --------------------------------------------------------------------------------------


def two_layers():
    """Returns the same network as six kinds of models, each with the arguments of its step."""
    rng = np.random.default_rng(1)
    w1, w2 = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ([3, 4], [4, 1]))
    network = lambda w1, w2, x: jnp.tanh(x @ w1) @ w2

    class Linen(nn.Module):
        @nn.compact
        def __call__(self, x):
            return network(self.param("w1", lambda key: w1), self.param("w2", lambda key: w2), x)

    class NNX(nnx.Module):
        def __init__(self, *, rngs):
            self.w1, self.w2 = nnx.Param(w1), nnx.Param(w2)

        def __call__(self, x):
            return network(self.w1[...], self.w2[...], x)

    class Equinox(eqx.Module):
        w1: jax.Array
        w2: jax.Array

        def __call__(self, x):
            return network(self.w1, self.w2, x)

    apply = lambda params, x: network(params["w1"], params["w2"], x)
    return {
        "Linen": (Linen(), {}),
        "NNX class": (NNX, {"nnx_model_args": ()}),
        "NNX instance": (NNX(rngs=nnx.Rngs(0)), {}),
        "(init, apply)": ((lambda key, x: {"w1": w1, "w2": w2}, apply), {}),
        "parameters": ({"w1": w1, "w2": w2}, {"loss": lambda params, batch: squares(apply(params, batch["x"]), batch)}),
        "Equinox": (Equinox(w1, w2), {"loss": lambda module, batch: squares(jax.vmap(module)(batch["x"]), batch)}),
    }


def test_the_same_network_trains_the_same_in_every_library():
    batches = [rows(8, seed) for seed in range(5)]
    found = {}
    for name, (model, options) in two_layers().items():
        step = LossStep(KEY, model, optax.sgd(0.05, momentum=0.9), train=True, **{"loss": squares, **options})
        state, found[name] = train(step, batches, spec=step.input_spec(batches[0]))
        assert int(state.step) == 5 and step.num_params == 16
        np.testing.assert_allclose(found[name], found["Linen"], rtol=1e-6, err_msg=name)
    assert found["Linen"][-1] < found["Linen"][0]


# The loss ------------------------------------------------------------------------------------------------


class Regression(LossStep):
    def loss(self, outputs, batch):
        error = outputs - batch["y"]
        return jnp.mean(error**2, axis=-1), {"off": jnp.abs(error[:, 0]) > 1, "constant": 3}


def test_the_loss_can_be_a_method_or_an_argument():
    batch, found = rows(8), []
    options = {"train": True, "metrics": {"mae": lambda outputs, batch: jnp.abs(outputs - batch["y"]).mean(-1)}}
    by_argument = {"loss": lambda outputs, batch: Regression.loss(None, outputs, batch)}
    for kind, more in ((Regression, {}), (LossStep, by_argument)):
        step = kind(KEY, nn.Dense(1), optax.sgd(0.1), **options, **more)
        state = step.initialize_model([1, 3])
        error = batch["x"] @ np.asarray(state.params["kernel"]) - batch["y"]
        found.append(step(state, batch)[1])
        assert sorted(found[-1]) == ["constant", "loss", "mae", "off"]
        np.testing.assert_allclose(found[-1]["loss"], np.mean(error**2), rtol=1e-5)
        np.testing.assert_allclose(found[-1]["off"], np.mean(np.abs(error) > 1), rtol=1e-5)
        np.testing.assert_allclose(found[-1]["mae"], np.mean(np.abs(error)), rtol=1e-5)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("loss", "error", "message"),
    [
        (lambda o, b: (o - b["y"]) ** 2, ValueError, r"The loss is float32\[8, 1\] for 8 examples; it must be per"),
        (lambda o, b: o[:, None] * b["x"][:, None], ValueError, r"float32\[8, 1, 3\].*return jaxloop.Weighted\("),
        (lambda o, b: jnp.mean(o, keepdims=True), ValueError, r"float32\[1, 1\] for 8 examples.*without keepdims=True"),
        (lambda o, b: {"loss": o}, TypeError, r"an array \[batch\].*\(losses, metrics\), got dict"),
        (lambda o, b: o[:, 0] > 0, TypeError, r"floating-point losses .*, got bool\[8\]"),
        (lambda o, b: (squares(o, b), o), TypeError, r"or \(losses, metrics\), got \(float32\[8\], float32\[8, 1"),
        (lambda o, b: (squares(o, b), {"loss": o}), ValueError, "Two values are named 'loss'"),
        (lambda o, b: (squares(o, b), {"m": o}), ValueError, r"The metric 'm' is float32\[8, 1\] for 8 examples"),
        (lambda o, b: (squares(o, b), {"mae": 0.0}), ValueError, "Two values are named 'mae'.*metrics= holds 'mae'"),
    ],
)
def test_a_malformed_loss_is_rejected(loss, error, message):
    step = LossStep(KEY, nn.Dense(1), loss=loss, metrics={"mae": lambda o, b: 0.0})
    with pytest.raises(error, match=message):
        jax.eval_shape(step.run, jax.eval_shape(lambda: step.initialize_model([1, 3])), rows(8))


@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        (LossStep, {}, TypeError, "LossStep needs one loss: .* It got neither"),
        (Regression, {"loss": squares}, TypeError, "Regression needs one loss: .* It got both"),
        (LossStep, {"loss": 1.0}, TypeError, "loss must be a function of .*got loss=1.0"),
        (Regression, {"metrics": {"m": 1.0}}, TypeError, "metrics a dict of such functions, got .*{'m': 1.0}"),
        (Regression, {"accumulate": 0}, ValueError, "accumulate must be a positive int, got 0"),
        (Regression, {"batch_size": 1.5}, TypeError, "batch_size must be a positive int or None, got 1.5"),
        (Regression, {"compute_dtype": jnp.int8}, ValueError, "compute_dtype must be a floating-point type"),
        (Regression, {"optimiser": 1}, TypeError, "'optimiser'. Did you mean 'optimizer'"),
        (linear_step, {"inputs": "x"}, ValueError, "got inputs, which is for a forward pass, and a dict is a pyt"),
        (linear_step, {"compute_dtype": jnp.bfloat16}, ValueError, "got compute_dtype, which is for a forward pass"),
    ],
)
def test_wrong_arguments_are_rejected(make, options, error, message):
    arguments = () if make is linear_step else (KEY, nn.Dense(1))
    with pytest.raises(error, match=message):
        make(*arguments, **options)


# The inputs ----------------------------------------------------------------------------------------------

A, B = np.zeros([4, 2], np.float32), np.zeros([4, 3])


@pytest.mark.parametrize(
    ("batch", "inputs", "shape"),
    [
        ({"x": A, "y": B}, None, (1, 2)),
        ({"image": A, "label": B}, None, (1, 2)),
        ({"tokens": A, "x": B}, "tokens", (1, 2)),
        ((A, B), None, (1, 2)),
        ([A, B], None, (1, 2)),
        ((A, B), 1, (1, 3)),
        (A, None, (1, 2)),
        ({"x": {"a": A}}, lambda batch: batch["x"]["a"], (1, 2)),
    ],
)
def test_inputs_are_found_in_the_batch(batch, inputs, shape):
    spec = LossStep(KEY, nn.Dense(1), loss=squares, inputs=inputs).input_spec(batch)
    assert (spec.shape, spec.dtype) == (shape, np.float32)


class LinenPair(nn.Module):
    @nn.compact
    def __call__(self, x, scale, train=False):
        return nn.Dense(1)(x * scale)


class NNXPair(nnx.Module):
    def __init__(self, *, rngs):
        self.dense = nnx.Linear(3, 1, rngs=rngs)

    def __call__(self, x, scale):
        return self.dense(x * scale)


PAIRS = {
    "by position": (LinenPair(), lambda batch: (batch["x"], batch["scale"])),
    "by name": (NNXPair(rngs=nnx.Rngs(0)), lambda batch: {"scale": batch["scale"], "x": batch["x"]}),
}


@pytest.mark.parametrize(("model", "inputs"), PAIRS.values(), ids=PAIRS)
def test_a_model_can_take_several_inputs_by_position_or_by_name(model, inputs):
    batches = [{**rows(4), "scale": rows(4)["x"] ** 2}] * 3
    step = LossStep(KEY, model, optax.sgd(0.01), loss=squares, train=True, inputs=inputs)
    _, outputs = jaxloop.TrainLoop(step)(step.initialize_model(step.input_spec(batches[0])), batches)
    assert outputs["loss"][2] < outputs["loss"][0]


@pytest.mark.parametrize(
    ("batch", "inputs", "message"),
    [
        ({"a": A, "b": B}, None, "has the keys 'a', 'b'. Name their key, inputs="),
        ({"x": A, "image": B}, None, "has the keys 'x', 'image'.*under exactly one of"),
        ({"x": A}, "tokens", "inputs='tokens'.* has the keys 'x'"),
        ((A, B), 2, "inputs=2.* has tuple"),
        ((), None, "has tuple"),
    ],
)
def test_missing_or_ambiguous_inputs_are_rejected(batch, inputs, message):
    with pytest.raises(ValueError, match=message):
        LossStep(KEY, nn.Dense(1), loss=squares, inputs=inputs).input_spec(batch)


def test_tensors_from_other_libraries_are_accepted():
    step, batch = linear_step(), rows(4)
    state = step.initialize_model()
    outputs = step.evaluate(state, jax.tree.map(Tensor, batch))
    assert outputs == step.evaluate(state, batch)


# Keys, statistics, types --------------------------------------------------------------------------------


def test_a_loss_step_matches_a_handwritten_step(assert_close):
    class ByHand(jaxloop.Step):
        def run(self, state, batch):
            def loss_fn(params):
                options = {"rngs": {"dropout": self.prng_key(state.step)}, "mutable": ["batch_stats"]}
                variables = {**state.variables, "params": params}
                outputs, updates = state.apply_fn(variables, batch["x"], train=True, **options)
                return jnp.mean(squares(outputs, batch)), updates

            (loss, updates), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
            return state.apply_gradients(grads=grads).update_variables(updates), {"loss": loss}

    scalar = lambda outputs, batch: jnp.mean(squares(outputs, batch))
    states = []
    for make in (ByHand, lambda *args, **options: LossStep(*args, loss=scalar, **options)):
        step = make(KEY, Noisy(), optax.sgd(0.1), train=True)
        state = step.initialize_model([1, 3])
        for seed in range(2):
            state, _ = step(state, rows(8, seed))
        states.append(state)
    assert int(states[1].step) == 2
    assert_close(*states, rtol=1e-6)


@pytest.mark.parametrize("model", [Noisy(rate=0), NNXNoisy(rngs=nnx.Rngs(0))], ids=["linen", "nnx"])
def test_statistics_change_with_each_micro_batch_only_in_training(model):
    keys = {"params": KEY, "dropout": jax.random.key(1)}
    make = lambda **options: LossStep(keys, model, optax.sgd(0.1), loss=squares, accumulate=2, **options)
    step = make(train=True)
    before = step.initialize_model([1, 3])
    kept = jax.tree.map(jnp.copy, before)
    state, _ = step(before, rows(8))
    assert not np.allclose(jax.tree.leaves(state.batch_stats)[0], jax.tree.leaves(kept.batch_stats)[0])
    if isinstance(model, NNXNoisy):
        assert int(state.collections["dropout"]["rngs"]["count"][...]) == 2
    else:  # Adjacent examples are in different micro-batches.
        first, second = (rows(8)["x"][number::2].mean(axis=0) for number in (0, 1))
        mean = state.batch_stats["BatchNorm_0"]["mean"]
        np.testing.assert_allclose(mean, 0.99 * 0.01 * first + 0.01 * second, rtol=1e-4)
    evaluation = make()
    assert evaluation.evaluate(state, rows(8)) == evaluation.evaluate(state, rows(8))


def test_compute_dtype_applies_only_to_the_forward_pass():
    seen = {}

    class Looks(nn.Module):
        @nn.compact
        def __call__(self, x):
            kernel = self.param("kernel", nn.initializers.ones, (3, 1))
            statistics = nn.BatchNorm(use_running_average=True)(x)
            seen.update(x=x.dtype, kernel=kernel.dtype, normed=statistics.dtype)
            return x @ kernel

    def loss(outputs, batch):
        seen.update(outputs=outputs.dtype, y=batch["y"].dtype)
        return squares(outputs, batch)

    options = {"train": True, "loss": loss, "compute_dtype": jnp.bfloat16}
    step = LossStep(KEY, Looks(), optax.sgd(0.1, momentum=0.9), **options)
    with jax.numpy_dtype_promotion("standard"):
        state = step.initialize_model([1, 3])
        state, outputs = step(state, {**rows(8), "count": np.arange(8)})
    assert {str(seen.pop(name)) for name in ("x", "kernel")} == {"bfloat16"} and seen.pop("normed")
    assert {str(dtype) for dtype in seen.values()} == {"float32"}
    floating = [leaf for leaf in jax.tree.leaves(state) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert {str(leaf.dtype) for leaf in floating} == {"float32"} and outputs["loss"].dtype == jnp.float32


# Micro-batches --------------------------------------------------------------------------------------------


def reference_update(batch, mask):
    """Returns the parameters after one step of gradient descent from zero, and the mean loss, in float64."""
    x, y = batch["x"][mask].astype(np.float64), batch["y"][mask].astype(np.float64)
    return 0.1 * 2 * x.T @ y / max(len(x), 1), np.mean(y**2) if len(x) else 0.0


@pytest.mark.parametrize("count", [1, 5, 8])
def test_micro_batches_match_the_update_of_the_whole_batch(count):
    batch = rows(count, seed=count)
    step = linear_step(train=True, accumulate=4)
    first, numbers = step.initialize_model(), np.arange(count)
    for mask in (numbers < count, numbers % 3 != 1, numbers < 1, numbers < 0):
        given = {**batch, "mask": mask.astype(np.float32)}
        state, outputs = step(jax.tree.map(jnp.copy, first), given)
        params, loss = reference_update(batch, mask)
        np.testing.assert_allclose(state.params["w"], params, atol=1e-6)
        np.testing.assert_allclose(outputs["loss"], loss, atol=1e-6)
        assert step.num_examples(given) == mask.sum()


@pytest.mark.parametrize(("devices", "count", "masked"), [(2, 7, False), (8, 40, True)])
def test_micro_batches_on_a_mesh_match_the_whole_batch(devices, count, masked, data_parallel):
    mask = np.arange(count) % 5 != 2 if masked else np.ones(count, bool)
    batch = {**rows(count), "mask": mask} if masked else rows(count)
    step = linear_step(train=True, accumulate=4, metrics={"again": linear}, partitioner=data_parallel(devices))
    state, outputs = step(step.initialize_model(), batch)
    params, loss = reference_update(batch, mask)
    np.testing.assert_allclose(state.params["w"], params, atol=1e-6)
    np.testing.assert_allclose([outputs["loss"], outputs["again"]], loss, atol=1e-6)


def test_micro_batches_keep_rows_on_their_devices(data_parallel):
    step = linear_step(train=True, accumulate=4, partitioner=data_parallel(8))
    state, batch = step.begin(step.initialize_model(), rows(40))
    compiled = step.partitioner.partition(step.run).trace(state, step.shard_batch(batch)).lower().compile().as_text()
    assert "all-reduce(" in compiled
    for exchange in ("all-gather(", "all-to-all(", "collective-permute("):
        assert exchange not in compiled


def test_micro_batches_need_a_scalar_loss_with_its_weight():
    def loss(params, batch):
        losses, mask = linear(params, batch), batch["mask"]
        average = clu_metrics.Average.from_model_output(losses, mask=mask)
        return jaxloop.Weighted(losses, mask), {"mean": jaxloop.Weighted(losses, mask), "sum": average}

    batch = {**rows(8), "mask": np.array([1, 1, 1, 0, 1, 0, 1, 1], np.float32)}
    step = linear_step(loss, train=True, accumulate=2)
    state, outputs = step(step.initialize_model(), batch)
    params, mean = reference_update(batch, batch["mask"] > 0)
    np.testing.assert_allclose(state.params["w"], params, atol=1e-6)
    with jax.numpy_dtype_promotion("standard"):  # clu needs it.
        values = [outputs["loss"].value, outputs["mean"].value, outputs["sum"].compute()]
        np.testing.assert_allclose(values, mean, rtol=1e-6)
    message = "of 5 unmasked rows to 8, .* a multiple of the devices and micro-.*several examples: 'loss', 'mean'"
    with pytest.raises(ValueError, match=message):
        step(state, jax.tree.map(lambda leaf: leaf[:7], batch))


def test_micro_batches_need_values_with_their_weights():
    total = lambda params, batch: linear(params, batch).sum()
    with_metadata = lambda params, batch: jaxloop.MetricWithMetadata(total(params, batch))
    in_loss = lambda params, batch: (linear(params, batch), {"total": total(params, batch)})
    message = r"is a scalar, .* combines the values of 2 micro-batches.*Weighted\(mean, rows\)"
    for name, options in (
        ("The loss", {"loss": total}),
        ("The metric 'total'", {"loss": in_loss}),
        ("The metric 'total'", {"metrics": {"total": with_metadata}}),
    ):
        step = linear_step(**options, train=True, accumulate=2)
        with pytest.raises(ValueError, match=f"{name} {message}"):
            step(step.initialize_model(), rows(8))


def test_micro_batches_with_batch_normalization_are_traced_once():
    traces = []
    loss = lambda outputs, batch: traces.append(1) or squares(outputs, batch)
    step = LossStep(KEY, Noisy(rate=0), optax.sgd(0.1), train=True, loss=loss, accumulate=2)
    step(step.initialize_model([1, 3]), rows(4))
    assert len(traces) == 1


def test_images_come_from_the_first_micro_batch():
    image = lambda params, batch: jaxloop.MetricWithMetadata(batch["image"], jaxloop.MetricType.IMAGE)
    step = linear_step(train=True, accumulate=2, metrics={"image": image})
    _, outputs = step(step.initialize_model(), {**rows(4), "image": np.arange(4.0).reshape(4, 1, 1, 1)})
    assert outputs["image"].value.ravel().tolist() == [0, 2]


# Evaluation -------------------------------------------------------------------------------------------------


def summary(loop, state, batches):
    return jaxloop.summarize(loop(state, batches)[1])


@pytest.mark.parametrize("devices", [1, 8])
def test_an_evaluation_is_exact_and_compiles_once(devices, data_parallel):
    traces = []
    loss = lambda outputs, batch: traces.append(1) or squares(outputs, batch)
    mae = lambda outputs, batch: jnp.abs(outputs - batch["y"])[:, 0]
    step = LossStep(KEY, nn.Dense(1), partitioner=data_parallel(devices), loss=loss, metrics={"mae": mae})
    loop = jaxloop.EvalLoop(step, stat_names=[])
    state = step.initialize_model([1, 3])
    kernel, bias = (np.asarray(state.params[name], np.float64) for name in ("kernel", "bias"))
    data = rows(24)
    for count in (1, 7, 8, 9, 24):
        batches = [jax.tree.map(lambda leaf, i=i, n=count: leaf[i : min(i + 8, n)], data) for i in range(0, count, 8)]
        traces.clear()
        found = summary(loop, state, batches)
        error = data["x"][:count].astype(np.float64) @ kernel + bias[None] - data["y"][:count]
        np.testing.assert_allclose(
            [found["loss"], found["mae"]], [np.mean(error**2), np.mean(np.abs(error))], rtol=1e-6
        )
        assert len(traces) == (count <= 8)


@pytest.mark.parametrize("kind", ["scalar", "scalar metric", "clu"])
def test_evaluations_that_cannot_be_masked_are_exact(kind):
    sizes = []

    def loss(params, batch):
        losses = linear(params, batch)
        sizes.append(len(losses))
        metrics = {"scalar": losses.mean()} if kind == "scalar metric" else {}
        if kind == "clu":
            metrics = {"scalar": clu_metrics.Average.from_model_output(losses)}
        return losses.mean() if kind == "scalar" else losses, metrics

    step, data = linear_step(loss), rows(11)
    batches = [jax.tree.map(lambda leaf: leaf[:8], data), jax.tree.map(lambda leaf: leaf[8:], data)]
    with jax.numpy_dtype_promotion("standard"):  # clu needs it.
        found = summary(jaxloop.EvalLoop(step, stat_names=[]), step.initialize_model(), batches)
    np.testing.assert_allclose(list(found.values()), np.mean(data["y"] ** 2), rtol=1e-6)
    assert sizes == [8, 3]


# Short batches in training ------------------------------------------------------------------------------------


def test_short_batches_are_padded_to_the_batch_size_unless_that_would_change_a_mean():
    def trained(batches, loss=linear, model=None, **options):
        """Returns the losses, and the batch sizes for which `run` was traced."""
        sizes = []
        model = {"w": np.zeros([3, 1], np.float32)} if model is None else model
        traced = lambda outputs, batch: sizes.append(len(batch["y"])) or loss(outputs, batch)
        step = LossStep(KEY, model, optax.sgd(0.1), train=True, loss=traced, **options)
        return train(step, batches, spec=[1, 3])[1], sizes

    batches = [rows(3, 0), rows(8, 1), rows(5, 2)]
    losses, sizes = trained(batches)
    assert sizes == [3, 8, 5]
    same_losses, sizes = trained(batches, batch_size=8)
    assert set(sizes) == {8}
    np.testing.assert_allclose(same_losses, losses, rtol=1e-6)
    mean = lambda params, batch: linear(params, batch).mean()
    for options in ({"model": Noisy(rate=0), "loss": squares}, {"loss": mean}):
        assert trained(batches[1:], batch_size=8, **options)[1] == [8, 5]


def test_a_step_does_not_depend_on_earlier_batches(assert_same):
    # Otherwise, a run resumed before a short batch would differ.
    step, other = linear_step(train=True), linear_step(train=True)
    state, _ = step(step.initialize_model(), rows(8))
    kept = jax.tree.map(jnp.copy, state)
    assert_same(step(state, rows(3, 1)), other(kept, rows(3, 1)))


def test_batches_on_a_mesh_are_padded_to_a_multiple_of_the_devices(data_parallel):
    batches = [rows(11, 0), rows(3, 1)]
    state, losses = train(linear_step(train=True), batches)
    for accumulate in (1, 4):
        options = {"partitioner": data_parallel(8), "accumulate": accumulate}
        same, same_losses = train(linear_step(train=True, **options), batches)
        np.testing.assert_allclose(same.params["w"], state.params["w"], atol=1e-6)
        np.testing.assert_allclose(same_losses, losses, rtol=1e-6)
    scalar = linear_step(lambda params, batch: linear(params, batch).mean(), train=True, partitioner=data_parallel(8))
    with pytest.raises(ValueError, match=r"fill up a batch of 11 rows to 16, .*several examples: 'loss'. Drop the rem"):
        train(scalar, batches)


# Masked rows --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "real", "accumulate"), [("x", 0, 1), ("y", 5, 1), ("x", 5, 2), ("y", 0, 2)])
def test_nan_in_masked_rows_does_not_change_the_update(name, real, accumulate):
    mask, kept = np.arange(8) < real, jax.tree.map(lambda leaf: leaf[:real], rows(8))
    batch = {**rows(8), "mask": mask}
    batch[name] = np.where(mask[:, None], batch[name], np.nan)
    distance = lambda params, batch: jnp.sqrt(linear(params, batch))  # Its gradient at 0 is NaN.
    step = linear_step(distance, train=True, accumulate=accumulate)
    first = step.initialize_model()
    expected = jax.grad(lambda params: distance(params, kept).mean())(first.params) if real else {"w": np.zeros([3, 1])}
    state, _ = step(first, batch)
    np.testing.assert_allclose(state.params["w"], -0.1 * expected["w"], atol=1e-6)


@pytest.mark.parametrize("model", [Noisy(rate=0), NNXNoisy(rate=0, rngs=nnx.Rngs(0))], ids=["linen", "nnx"])
def test_masked_rows_do_not_change_batch_statistics(model, assert_same):
    step = LossStep(KEY, model, optax.sgd(0.1), loss=squares, train=True)
    spec, mask = [1, 3], np.arange(8) % 2 == 0
    batch = jax.tree.map(lambda leaf: np.where(mask[:, None], leaf, np.nan), rows(8))
    short = jax.tree.map(lambda leaf: leaf[::2], rows(8))
    state, outputs = jaxloop.TrainLoop(step)(step.initialize_model(spec), [{**batch, "mask": mask}])
    expected, same_outputs = jaxloop.TrainLoop(step)(step.initialize_model(spec), [short])
    assert_same((state.params, state.batch_stats), (expected.params, expected.batch_stats))
    assert outputs["loss"] == same_outputs["loss"]
    before = jax.tree.map(np.array, state.batch_stats)
    state, _ = step(state, {**jax.tree.map(lambda leaf: leaf * np.nan, rows(8)), "mask": np.zeros(8, bool)})
    assert_same(state.batch_stats, before)


def test_rows_that_the_devices_cannot_divide_raise(data_parallel):
    batches = [{**rows(32), "mask": np.arange(32) < 32 - number} for number in range(4)]
    step = LossStep(KEY, Noisy(rate=0), optax.sgd(0.1), loss=squares, train=True, partitioner=data_parallel(4))
    with pytest.raises(ValueError, match="31 unmasked rows to 32.*mixes the exam"):
        jaxloop.TrainLoop(step)(step.initialize_model([1, 3]), batches)


@pytest.mark.parametrize(
    ("loss", "checked"),
    [(linear, 8), (lambda params, batch: jaxloop.MetricWithMetadata(contrastive(params, {"x": batch["x"]})), 5)],
    ids=["per example", "in batch"],
)
def test_a_nan_metric_does_not_hide_or_repeat_the_check_for_masked_rows(loss, checked):
    sizes = []

    def traced(params, batch):
        jax.debug.callback(lambda size: sizes.append(int(size)), len(batch["x"]))
        return loss(params, batch), {"log": jnp.full(len(batch["x"]), jnp.nan)}

    step = LossStep(KEY, {"w": np.ones([3, 1], np.float32)}, loss=traced)
    jaxloop.EvalLoop(step)(step.initialize_model(), [{**rows(8, seed), "mask": np.arange(8) < 5} for seed in range(4)])
    jax.effects_barrier()
    assert sizes == [8, 8, *[checked] * 4]


def contrastive(params, batch):
    """An InfoNCE loss, in which the other examples of the batch are negatives."""
    z = batch["x"] @ params["w"]
    similarities = -((z - z.T) ** 2) / 10 + jnp.eye(len(z))
    if "mask" in batch:
        similarities = jnp.where(batch["mask"][None], similarities, -jnp.inf)
    return -jnp.diagonal(jax.nn.log_softmax(similarities))


@pytest.mark.parametrize("train", [True, False])
def test_padding_never_becomes_a_negative_of_an_in_batch_loss(train):
    params, data = {"w": np.ones([3, 1], np.float32)}, rows(11)
    batches = [jax.tree.map(lambda leaf: leaf[:8], data), jax.tree.map(lambda leaf: leaf[8:], data)]
    expected = [float(contrastive(params, batch).mean()) for batch in batches]
    loop, shapes = jaxloop.TrainLoop if train else jaxloop.EvalLoop, set()
    loss = lambda params, batch: shapes.add(len(batch["x"])) or contrastive(params, batch)
    masked = [{**batch, "mask": np.ones(len(batch["x"]), bool)} for batch in batches]
    for given, compiled in ((masked, {8}), (batches, {3, 8})):
        shapes.clear()
        step = LossStep(KEY, params, optax.sgd(0.0), loss=loss, train=train, batch_size=8)
        outputs = loop(step)(step.initialize_model(), given)[1]
        np.testing.assert_allclose(outputs["loss"], expected, rtol=1e-5)
        assert shapes == compiled


def test_padding_is_checked_again_after_a_batch_whose_loss_is_nan():
    short = rows(3)
    damaged = {**short, "x": np.full_like(short["x"], np.nan)}
    params = {"w": np.ones([3, 1], np.float32)}
    step = LossStep(KEY, params, loss=contrastive)
    outputs = jaxloop.EvalLoop(step)(step.initialize_model(), [rows(8), damaged, short])[1]
    np.testing.assert_allclose(outputs["loss"][-1], contrastive(params, short).mean(), rtol=1e-5)


def test_padding_of_boolean_inputs_is_found_too():
    share = lambda seen: seen.astype(np.float32).mean() * jnp.ones(len(seen))
    loss = lambda params, batch: params["w"][0, 0] * share(batch["seen"])
    batches = [{"seen": np.array(seen, bool)} for seen in ([1, 0, 1, 1], [1, 0, 0])]
    step = LossStep(KEY, {"w": np.ones([1, 1], np.float32)}, loss=loss)
    outputs = jaxloop.EvalLoop(step)(step.initialize_model(), batches)[1]
    np.testing.assert_allclose(outputs["loss"], [3 / 4, 1 / 3], rtol=1e-6)


def test_a_mask_must_contain_zeros_and_ones():
    step = linear_step()
    with pytest.raises(ValueError, match=r"batch\['mask'\] is float64\[2\] with values other than 0 and 1"):
        step.num_examples({**rows(2), "mask": np.array([0.5, 1.0])})
    assert step.num_examples({**rows(2), "mask": np.ones([2, 5])}) == 2  # A different mask, for the loss alone.


def test_leaves_of_different_lengths_require_a_scalar_loss(warnings_logged):
    batch = {**rows(8), "centers": np.zeros(5)}
    step = linear_step(lambda params, batch: linear(params, batch).mean())
    state = step.initialize_model()
    assert float(step.evaluate(state, batch)["loss"]) == pytest.approx(np.mean(batch["y"] ** 2), rel=1e-6)
    with pytest.raises(ValueError, match=r"float32\[8\], but the leaves of the batch share no leading axis"):
        linear_step().evaluate(state, batch)
    with pytest.raises(ValueError, match="accumulate=2, and can't split a batch whose leaves share no leading axis"):
        linear_step(train=True, accumulate=2)(state, batch)


@pytest.mark.parametrize("as_batch", [dict, lambda batch: tuple(batch.values())], ids=["dict", "tuple"])
def test_a_loop_and_its_step_count_the_same_examples(as_batch):
    """Includes masked and short batches among those for which a loop skips checks."""
    loss = lambda params, batch: linear(params, batch if isinstance(batch, dict) else {"x": batch[0], "y": batch[1]})
    steps = [linear_step(loss, train=True, batch_size=8) for _ in range(2)]
    batches = [as_batch(rows(8, seed)) for seed in range(60)]
    batches[20] = batches[50] = as_batch(rows(5, 20))
    if as_batch is dict:
        for place in (10, 30, 31, 45):
            batches[place]["mask"] = np.arange(8) < 3
    state, losses = train(steps[0], batches)
    same, outputs = jaxloop.TrainLoop(steps[1])(steps[1].initialize_model(), batches)
    assert outputs["loss"] == losses and np.array_equal(same.params["w"], state.params["w"])
    assert outputs.num_examples == [steps[0].num_examples(batch) for batch in batches]


# Complex parameters, sown losses, and optimizers that need the loss --------------------------------------------


def test_complex_parameters_move_towards_the_minimum():
    far = lambda params, batch: jnp.abs(params["w"] - (1 + 2j)) ** 2 * jnp.ones(len(batch))
    options = {"train": True, "loss": far, "accumulate": 2}
    step = LossStep(KEY, {"w": np.complex64(0)}, optax.sgd(0.5), **options)
    state, _ = step(step.initialize_model(), np.ones([2, 1], np.float32))
    assert complex(state.params["w"]) == 1 + 2j


class LinenSows(nn.Module):
    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.ones, (3, 1))
        self.sow("losses", "size", (w**2).sum())
        self.sow("intermediates", "x", x)
        return x @ w


class NNXSows(nnx.Module):
    def __init__(self, *, rngs):
        self.w = nnx.Param(jnp.ones((3, 1)))

    def __call__(self, x):
        self.sow("losses", "size", (self.w[...] ** 2).sum())
        self.sow(nnx.Intermediate, "x", x)
        return x @ self.w[...]


SOWS = {
    "linen, weighted": (LinenSows(), lambda loss: jaxloop.Weighted(loss, 1)),
    "nnx": (NNXSows(rngs=nnx.Rngs(0)), lambda loss: loss),
    "linen, with metadata": (LinenSows(), jaxloop.MetricWithMetadata),
}


@pytest.mark.parametrize(("model", "wrap"), SOWS.values(), ids=SOWS)
def test_sown_losses_are_added_to_the_loss(model, wrap):
    loss = lambda outputs, batch: wrap(squares(outputs, batch))
    batch, w = rows(8), np.ones((3, 1))
    error = batch["x"] @ w - batch["y"]
    expected = np.mean(error**2) + 3
    step = LossStep(KEY, model, optax.sgd(0.1), train=True, loss=loss)
    state = step.initialize_model([1, 3])
    assert forward.mixes_examples(state, train=True) is False
    evaluated = LossStep(KEY, model, loss=loss).evaluate(state, batch)
    state, outputs = jaxloop.TrainLoop(step)(state, [batch, batch])
    number = lambda value: float(getattr(value, "value", value))
    np.testing.assert_allclose([number(outputs["loss"][0]), number(evaluated["loss"])], expected, rtol=1e-5)
    after = w - 0.1 * (2 * batch["x"].T @ error / 8 + 2 * w)
    expected = np.mean((batch["x"] @ after - batch["y"]) ** 2) + np.sum(after**2)
    np.testing.assert_allclose(number(outputs["loss"][1]), expected, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:Using 'Module.sow")
@pytest.mark.parametrize("model", [LinenSows(), NNXSows(rngs=nnx.Rngs(0))], ids=["linen", "nnx"])
def test_call_model_returns_sown_losses_that_the_state_does_not_store(model):
    class OwnStep(jaxloop.Step):
        def run(self, state, batch):
            _, updates = self.call_model(state, state.params, batch["x"])
            return state.update_variables(updates), {"sown": sum(forward.sown_losses(updates))}

    if isinstance(model, nnx.Module):
        model(jnp.ones([1, 3]))  # Outside of `nnx.capture`, this changes the instance.
    step = OwnStep(KEY, model, optax.identity(), train=True)
    state = step.initialize_model([1, 3])
    for _ in range(2):
        state, outputs = step(state, rows(8))
        assert outputs["sown"] == step.evaluate(state, rows(8))["sown"] == 3


OPTIMIZERS = {
    "reduce_on_plateau": optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(0.5, 1)),
    "line search": optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(3)),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizers_that_need_the_loss_receive_it(optimizer, warnings_logged):
    batch = rows(8)
    params = {"w": jnp.zeros([3, 1])}
    mean = lambda params: linear(params, batch).mean()

    @jf.train_step
    def train_step(state, batch):
        return jf.logs().add_loss("loss", linear(state.params, batch))

    with jax.numpy_dtype_promotion("standard"):
        expected, opt_state = params, optimizer.init(params)
        update = jax.jit(lambda *args: optimizer.update(*args[:3], value=args[3], grad=args[0], value_fn=mean))
        for _ in range(3):
            value, grads = jax.value_and_grad(mean)(expected)
            updates, opt_state = update(grads, opt_state, expected, value)
            expected = optax.apply_updates(expected, updates)
        step = LossStep(KEY, params, optax.chain(optimizer), train=True, loss=linear, ema=0.9)
        state, _ = jaxloop.TrainLoop(step)(step.initialize_model(), [batch] * 3)
        by_function = LossStep(KEY, params, optimizer, train=True, loss=linear).initialize_model()
        by_function, _, _ = jf.loop(by_function, [batch] * 3, {jf.every(1): train_step})
    np.testing.assert_allclose(state.params["w"], expected["w"], rtol=1e-4)
    np.testing.assert_allclose(by_function.params["w"], expected["w"], rtol=1e-4)
    assert not warnings_logged()
