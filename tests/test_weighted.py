"""Tests of weighted values, such as means over tokens, in every API."""

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import jaxloop
from jaxloop import every
from jaxloop import functional as jf
from jaxloop.metrics import LoopOutputs, summarize
from jaxloop.types import MetricType, MetricWithMetadata, Weighted

pytestmark = pytest.mark.usefixtures("compile_fast")

RNG = np.random.default_rng(0)
# Batches of 32, 32 and 7 rows with 5 tokens each. Only some of the tokens count.
BATCHES = [
    {"x": RNG.normal(size=[rows, 4]).astype(np.float32), "counts": RNG.random([rows, 5]) < 0.1 + 0.4 * number}
    for number, rows in enumerate([32, 32, 7])
]
NETWORK = nn.Dense(5)


def token_mean(params, batches=BATCHES):
    """Returns the mean over all tokens that count, in float64."""
    losses = [np.float64(NETWORK.apply({"params": params}, batch["x"])) ** 2 for batch in batches]
    counts = [batch["counts"] for batch in batches]
    return sum((a * b).sum() for a, b in zip(losses, counts, strict=True)) / sum(each.sum() for each in counts)


def losses_of(state, batch):
    return Weighted(state.apply_fn({"params": state.params}, batch["x"]) ** 2, batch["counts"])


class TokenStep(jaxloop.Step):
    def run(self, state, batch):
        def loss_fn(params):
            loss = losses_of(state.replace(params=params), batch)
            return loss.value, loss

        (_, loss), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return (state.apply_gradients(grads=grads) if self.train else state), {"loss": loss}


class TokenLoss(jaxloop.LossStep):
    def loss(self, outputs, batch):
        return Weighted(outputs**2, batch["counts"]), {"size": Weighted(jnp.abs(outputs), batch["counts"])}


def token_step(kind=TokenStep, **options):
    return kind(jax.random.key(0), NETWORK, optax.sgd(0.1), **options)


# Weighted ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "weight", "mean", "total"),
    [
        ([1.0, 2.0, 9.0], [1, 1, 0], 1.5, 2.0),
        ([[1.0, 5.0], [3.0, 7.0]], [[1.0], [0.5]], 11 / 3, 3.0),
        (3.0, 7, 3.0, 7.0),
        ([np.nan, 2.0], [0, 4], 2.0, 4.0),
        ([1.0, 2.0], [0, 0], 0.0, 0.0),
        ([1.0, 2.0], [np.nan, 1], np.nan, np.nan),
    ],
)
def test_value_is_the_weighted_mean(value, weight, mean, total):
    found = Weighted(np.float32(value) if np.ndim(value) else value, np.array(weight))
    np.testing.assert_allclose([found.value, found.weight], [mean, total], rtol=1e-6)


def test_weights_with_a_different_shape_raise():
    with pytest.raises(ValueError, match=r"broadcast to the value's shape \(3, 5\), got \(3,\)"):
        Weighted(jnp.zeros([3, 5]), jnp.ones([3]))


def test_half_precision_means_are_summed_in_float32():
    found = Weighted(jnp.full([4096], 1.5, jnp.bfloat16), jnp.ones([4096], jnp.bfloat16))
    assert (found.value, found.weight, found.value.dtype) == (1.5, 4096, jnp.float32)


def test_summarize_weights_the_value_of_each_step():
    pairs = [(np.float32(1), np.float32(10)), (np.float32(4), np.float32(20)), (np.float32(np.nan), np.float32(0))]
    outputs = LoopOutputs({"loss": [Weighted(*pair) for pair in pairs]}, num_examples=[1, 1, 1000])
    assert summarize(outputs) == {"loss": 3.0}
    assert summarize({"loss": [Weighted(1.0, 0.0)]}) == {}
    assert np.isnan(summarize({"loss": [Weighted(1.0, 1.0), Weighted(1.0, np.nan)]})["loss"])


# Steps ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options"), [(TokenStep, {"steps_per_dispatch": 2}), (TokenLoss, {})], ids=["fused", "one by one"]
)
def test_an_evaluation_is_the_mean_over_all_tokens(kind, options):
    step = token_step(kind)
    state = step.initialize_model([1, 4])
    _, outputs = jaxloop.EvalLoop(step, **options)(state, BATCHES)
    np.testing.assert_allclose(summarize(outputs)["loss"], token_mean(state.params), rtol=1e-6)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_the_gradient_is_of_the_mean_over_all_tokens(accumulate):
    step = token_step(TokenLoss, train=True, accumulate=accumulate)
    first = step.initialize_model([1, 4])
    expected = jax.grad(lambda params: losses_of(first.replace(params=params), BATCHES[0]).value)(first.params)
    state, outputs = step(jax.tree.map(jnp.copy, first), BATCHES[0])
    for name in expected:
        np.testing.assert_allclose(state.params[name], first.params[name] - 0.1 * expected[name], atol=1e-6)
    np.testing.assert_allclose(outputs["loss"].value, token_mean(first.params, BATCHES[:1]), rtol=1e-6)
    assert float(outputs["loss"].weight) == BATCHES[0]["counts"].sum()


def test_history_summaries_and_early_stopping_support_weighted_values(writer):
    stopping = jaxloop.EarlyStoppingAction("loss", patience=2, interval=every(steps=3))
    step, actions = token_step(train=True), [jaxloop.SummaryAction(writer, interval=every(steps=3)), stopping]
    outer_loop = jaxloop.OuterLoop(jaxloop.TrainLoop(step, end_actions=actions))
    _, outputs = outer_loop(step.initialize_model([1, 4]), BATCHES * 2, train_total_steps=6, train_loop_steps=3)
    rows = outer_loop.history.collect("train.loss")
    assert [value for _, value in writer.scalars("loss")] == rows and len(rows) == 2
    weights = [each.weight for each in outputs["loss"]]
    assert weights == [batch["counts"].sum() for batch in BATCHES]
    values = [float(each.value) for each in outputs["loss"]]
    np.testing.assert_allclose(rows[-1], np.average(values, weights=weights), rtol=1e-12)


# jaxloop.functional -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [jf.step, lambda fn: fn], ids=["jf.step", "a function"])
def test_functional_loop_weights_means_by_tokens(wrap, writer):
    log = wrap(lambda state, batch: jf.logs().add_metric("loss", losses_of(state, batch)))
    state = token_step().initialize_model([1, 4])
    evaluate = jf.inner_loop("test", lambda state: jf.loop(state, BATCHES, {jf.every(1): log}))
    _, history, _ = jf.loop(state, BATCHES, {jf.every(1): log, jf.every(3): [jaxloop.SummaryAction(writer), evaluate]})
    expected = token_mean(state.params)
    found = [writer.scalars("loss")[0][1], history.collect("test.loss")[-1]]
    np.testing.assert_allclose(found, [expected] * 2, rtol=1e-6)
    assert history.collect("metrics.loss (weight)") == [batch["counts"].sum() for batch in BATCHES]
    total = sum(batch["counts"].sum() for batch in BATCHES)
    assert history.collect("test.loss (weight)") == [total]


def test_functional_train_step_differentiates_the_mean_over_tokens_or_examples():
    first = token_step().initialize_model([1, 4])
    by_tokens = jf.train_step(lambda state, batch: jf.logs().add_loss("loss", losses_of(state, batch)))
    logs, state = by_tokens(jax.tree.map(jnp.copy, first), BATCHES[0])
    np.testing.assert_allclose(logs.losses["loss"], token_mean(first.params, BATCHES[:1]), rtol=1e-6)
    expected, _ = token_step(TokenLoss, train=True)(jax.tree.map(jnp.copy, first), BATCHES[0])
    np.testing.assert_allclose(state.params["kernel"], expected.params["kernel"], atol=1e-6)

    per_example = lambda state, batch: (state.apply_fn({"params": state.params}, batch["x"]) ** 2).mean(-1)
    by_examples = jf.train_step(lambda state, batch: jf.logs().add_loss("loss", per_example(state, batch)))
    logs, _ = by_examples(jax.tree.map(jnp.copy, first), BATCHES[0])
    np.testing.assert_allclose(logs.losses["loss"], per_example(first, BATCHES[0]).mean(), rtol=1e-6)


# Metrics of any class ---------------------------------------------------------------------------------------


@flax.struct.dataclass
class LargestError:
    """A metric that isn't derived from a class of clu."""

    error: jax.Array

    def merge(self, other):
        return LargestError(jnp.maximum(self.error, other.error))

    def compute(self):
        return {"largest": self.error}


class LargestStep(jaxloop.Step):
    def run(self, state, batch):
        return state, {"error": LargestError(jnp.abs(state.apply_fn({"params": state.params}, batch["x"])).max())}


def test_any_class_with_merge_and_compute_is_a_metric():
    step = token_step(LargestStep)
    state = step.initialize_model([1, 4])
    _, outputs = jaxloop.EvalLoop(step, steps_per_dispatch=2)(state, BATCHES)
    largest = max(np.abs(NETWORK.apply({"params": state.params}, batch["x"])).max() for batch in BATCHES)
    np.testing.assert_allclose(summarize(outputs)["error/largest"], largest, rtol=1e-6)
    assert len(outputs["error"]) == 1  # The states are merged on the device.


# Micro-batches, skipped steps and spikes --------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 4])
def test_micro_batches_weight_each_metric_separately(accumulate):
    batch = {"x": np.float32([1, 2, 3, 4]), "counts": np.float32([0, 1, 0, 0])}
    loss = lambda params, batch: (Weighted(params["w"] * batch["x"], batch["counts"]), {"in_loss": batch["x"]})
    options = {"train": True, "accumulate": accumulate, "metrics": {"mean": lambda params, batch: batch["x"]}}
    step = jaxloop.LossStep(jax.random.key(0), {"w": np.ones(1, np.float32)}, optax.sgd(0.1), loss=loss, **options)
    state, outputs = step(step.initialize_model(), batch)
    assert (float(outputs["loss"]), float(outputs["mean"]), float(outputs["in_loss"])) == (2.0, 2.5, 2.5)
    np.testing.assert_allclose(state.params["w"], [0.8], rtol=1e-6)


def test_skipped_steps_have_no_weight_and_a_nan_loss_is_named():
    broken = {**BATCHES[0], "x": np.full_like(BATCHES[0]["x"], np.nan)}
    loop = jaxloop.TrainLoop(token_step(train=True), nan_policy="skip")
    _, outputs = loop(loop.step.initialize_model([1, 4]), [BATCHES[0], broken, BATCHES[1]])
    assert outputs["loss"][1].weight == 0 and np.isfinite(summarize(outputs)["loss"])
    loop = jaxloop.TrainLoop(token_step(train=True), nan_policy="raise")
    with pytest.raises(FloatingPointError, match="outputs/loss/value"):
        loop(loop.step.initialize_model([1, 4]), [broken])


def test_a_spike_guard_ignores_steps_without_weight():
    guard = jaxloop.SpikeGuard("loss", sigmas=3, window=4, at_most=1)
    values = [Weighted.of(0.0, 0.0), *(Weighted.of(loss, 5.0) for loss in (9.0, 9.1, 9.2))] * 4
    guard(None, {"loss": values}, step_num=16)
    with pytest.raises(jaxloop.TurnBack, match="loss was 12 in steps 17 to 17, above the limit of 9"):
        guard(None, {"loss": [Weighted.of(12.0, 5.0)]}, step_num=17)


# Losses per example --------------------------------------------------------------------------------------------


class PerExampleStep(jaxloop.Step):
    def run(self, state, batch):
        def loss_fn(params):
            losses = (state.apply_fn({"params": params}, batch["x"]) ** 2).mean(-1)
            return losses.mean(), losses

        (_, losses), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        outputs = {"loss": losses, "scores": losses, "all_losses": MetricWithMetadata(losses, MetricType.HISTOGRAM)}
        return (state.apply_gradients(grads=grads) if self.train else state), outputs


def example_mean(params):
    losses = [np.float64(NETWORK.apply({"params": params}, batch["x"])) ** 2 for batch in BATCHES]
    return np.concatenate(losses).mean()


@pytest.mark.parametrize("fused", [1, 2])
def test_a_step_that_returns_a_loss_per_example_reports_the_mean(fused, tmp_path):
    step = PerExampleStep(jax.random.key(0), NETWORK, optax.sgd(1e-3), train=True)
    evaluation = jaxloop.EvalLoop(PerExampleStep(jax.random.key(0), NETWORK), steps_per_dispatch=fused)
    stop = jaxloop.EarlyStoppingAction("loss", patience=2)
    train_loop = jaxloop.TrainLoop(step, steps_per_dispatch=fused, end_actions=[stop])
    outer_loop = jaxloop.OuterLoop(train_loop, [evaluation], log_interval=every(steps=2))
    state = step.initialize_model([1, 4])
    state, outputs = outer_loop(state, BATCHES, eval_specs=[jaxloop.EvalSpec(BATCHES, name="test")])
    assert outer_loop.history.collect("test.loss") == [pytest.approx(example_mean(state.params), rel=1e-6)]
    assert len(outer_loop.history.collect("train.loss")) == 1
    assert [np.shape(each) for each in outputs["loss"]] == [()] * 3
    assert [each.shape for each in outputs["scores"]] == [(32,), (32,), (7,)]
    assert [each.value.shape for each in outputs["all_losses"]] == [(32,), (32,), (7,)]


def test_per_example_losses_with_a_custom_num_examples_are_not_averaged():
    step = PerExampleStep(jax.random.key(0), NETWORK, optax.sgd(1e-3), train=True)
    step.num_examples = lambda batch: 5
    _, outputs = step(step.initialize_model([1, 4]), BATCHES[0])
    assert outputs["loss"].shape == (32,)


# Steps without data -----------------------------------------------------------------------------------------


class TwoTasks(jaxloop.LossStep):
    def loss(self, outputs, batch):
        return outputs[:, 0] ** 2, {"b_loss": Weighted(outputs[:, 0] ** 2, batch["is_b"])}


def test_a_metric_without_data_in_an_interval_is_not_measured_there(writer, warnings_logged):
    batches = [{"x": np.ones([8, 4], np.float32), "is_b": np.full([8], step // 10 % 2 == 1)} for step in range(60)]
    step = TwoTasks(jax.random.key(0), NETWORK, optax.sgd(0.01), train=True)
    when = every(steps=10)
    stopping = jaxloop.EarlyStoppingAction("b_loss", patience=5, interval=when)
    guard = jaxloop.EarlyStoppingAction("train/b_loss", patience=5, interval=when)
    loop = jaxloop.TrainLoop(step, end_actions=[jaxloop.SummaryAction(writer, when), stopping, guard])
    outer_loop = jaxloop.OuterLoop(loop, log_interval=when)
    state, _ = outer_loop(step.initialize_model([1, 4]), batches)
    steps, values = outer_loop.history.collect("steps", "train.b_loss")
    assert steps == [20, 40, 60] and np.isfinite(values).all() and sorted(values, reverse=True) == values
    assert writer.scalars("b_loss") == list(zip(steps, values, strict=True))
    assert int(state.step) == 60 and warnings_logged() == []


def test_a_loop_of_functions_skips_values_without_data(warnings_logged):
    @jf.step
    def train(state, batch):
        return jf.logs().add_metric("b_loss", Weighted(jnp.ones(3) * state, jnp.full(3, state % 2))), state + 1

    batches, test = [BATCHES[0]] * 100, lambda state: jf.loop(state, BATCHES[:1], {every(1): train})
    state, history, _ = jf.loop(jnp.float32(0), batches, {every(1): [train, jf.early_stopping("b_loss", patience=3)]})
    assert history.collect("steps", "b_loss") == ([2, 4, 6, 8], [1.0, 3.0, 5.0, 7.0])  # Every second step has weight 0.
    assert [row["steps"] for row in history.to_records() if "metrics.b_loss" in row] == [2, 4, 6, 8]
    assert float(state) == 8 and warnings_logged() == []
    _, history, _ = jf.loop(jnp.float32(0), BATCHES[:1], {every(1): jf.inner_loop("test", test)})
    assert history.to_records()[0].keys() >= {"steps"} and "test.b_loss" not in history.to_records()[0]
