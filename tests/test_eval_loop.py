import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clu import metrics as clu_metrics
from programs import tiny
from programs.models import batch_of
from programs.tiny import BATCHES, STATE, STEP

from jaxloop import examples, metrics
from jaxloop.eval_loop import EvalLoop
from jaxloop.step import Step


class ErrorStep(Step):
    """Reports the mean error of a batch twice: as a scalar, and as a clu metric."""

    def run(self, state, batch):
        error = ((state.apply_fn({"params": state.params}, batch["x"]) - batch["y"]) ** 2)[:, 0]
        return state, {"error": error.mean(), "clu": clu_metrics.Average.from_model_output(error)}


@pytest.mark.parametrize(("devices", "num_examples"), [(1, 13), (2, 7), (8, 1), (8, 17), (8, 24)])
def test_mean_is_exact_with_a_short_last_batch(devices, num_examples, data_parallel):
    tiny, state, _ = examples.tiny_regression(partitioner=data_parallel(devices))
    data = batch_of(1, num_examples)
    batches = [{name: leaf[begin : begin + 8] for name, leaf in data.items()} for begin in range(0, num_examples, 8)]
    kernel, bias = (np.asarray(state.params[name], np.float64) for name in ("kernel", "bias"))
    expected = np.mean((data["x"].astype(np.float64) @ kernel + bias - data["y"]) ** 2)

    step = ErrorStep(tiny.base_prng, tiny.model, partitioner=tiny.partitioner)
    _, outputs = EvalLoop(step, stat_names=[])(state, batches)
    summary = metrics.summarize(outputs)
    assert summary["error"] == pytest.approx(expected, rel=1e-6)
    assert summary["clu"] == pytest.approx(expected, rel=1e-6)


def test_evaluation_does_not_change_the_state():
    _, state, _ = examples.tiny_regression()
    before = jax.device_get(state)
    same_state, _ = EvalLoop(STEP)(state, BATCHES)  # The step's `run` makes an update.
    assert same_state is state
    jax.tree.map(np.testing.assert_array_equal, state, before)


class RowsStep(Step):
    """Reports the first column of a batch, after passing it through `convert`."""

    def run(self, state, batch):
        return state, {"rows": self.convert(batch["x"][:, 0])}


CONVERSIONS = {
    "shapes that differ": lambda rows: rows,
    "dtypes that differ": lambda rows: rows[:3] if len(rows) > 3 else rows.astype("int32"),
    "keys": lambda rows: jax.random.key(rows[0].astype("int32")),
}


@pytest.mark.parametrize("convert", CONVERSIONS.values(), ids=CONVERSIONS)
def test_each_step_keeps_its_output(convert):
    """There are more steps than a loop reads at once."""
    batches = [{"x": np.full([3 + index % 2, 3], index, np.float32)} for index in range(150)]
    step = RowsStep(STEP.base_prng, STEP.model)
    step.convert = convert
    _, outputs = EvalLoop(step, stat_names=[])(STATE, batches)
    plain = lambda each: jax.random.key_data(each) if jnp.issubdtype(each.dtype, jax.dtypes.prng_key) else each
    found = [plain(each) for each in outputs["rows"]]
    expected = [plain(convert(batch["x"][:, 0])) for batch in batches]
    assert [(each.dtype, each.tolist()) for each in found] == [(each.dtype, each.tolist()) for each in expected]


def test_return_state_from_step_raises():
    with pytest.raises(ValueError, match="an evaluation can't change the state"):
        EvalLoop(STEP)(STATE, BATCHES, return_state_from_step=True)


def test_step_in_training_mode_warns(warnings_logged):
    EvalLoop(tiny.make_step(ErrorStep))
    assert "a step with train=True" in warnings_logged()[0]
