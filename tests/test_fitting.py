import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from programs.acts import Fail

import jaxloop
from jaxloop import at, every
from jaxloop import functional as jf
from jaxloop.models import fit as fitting
from jaxloop.models.fit import fit

pytestmark = pytest.mark.usefixtures("compile_fast")

RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 3)).astype(np.float32)
Y = X @ np.array([[1.0], [-2.0], [0.5]], np.float32)
PAIRS = [(X[i : i + 8], Y[i : i + 8]) for i in range(0, 60, 8)]  # The last batch has four rows.
DICTS = [{"x": x, "y": y} for x, y in PAIRS]


def squared(outputs, batch):
    y = batch["y"] if isinstance(batch, dict) else batch[1]
    return jnp.mean((outputs - y) ** 2, axis=-1)


def fit_linear(train_dataset=DICTS, eval_dataset=None, **options):
    amount = {} if "train_total_steps" in options else {"train_epochs": 2}
    defaults = {"loss": squared, "optimizer": optax.sgd(0.1), "progress": None, **amount}
    return fit(nn.Dense(1), train_dataset, eval_dataset, **{**defaults, **options})


def test_fit_trains_and_evaluates_each_epoch():
    state, history = fit_linear(eval_dataset=DICTS[:3], train_epochs=5)
    assert int(state.step) == 40
    assert history.collect("steps", "train.loss")[0] == [8, 16, 24, 32, 40]
    steps, losses = history.collect("steps", "eval.loss")
    assert steps == [8, 16, 24, 32, 40]
    assert losses[-1] < 0.1 * losses[0]


@pytest.fixture
def recorded(monkeypatch, writer):
    """Records what `fit` would write to event files."""
    writer.hparams = []
    writer.write_hparams = writer.hparams.append
    writer.close = lambda: None
    monkeypatch.setattr(fitting, "default_writer", lambda workdir: writer)
    return writer


@pytest.mark.parametrize(
    "data",
    [PAIRS, lambda: iter(DICTS), [[x, y] for x, y in PAIRS], iter(DICTS * 2)],
    ids=["pairs", "a generator function", "lists", "an iterator"],
)
def test_all_kinds_of_data_train_alike(data, assert_same):
    expected, _ = fit_linear()
    state, _ = fit_linear(data, train_total_steps=16)
    assert_same(state.params, expected.params)


def test_train_total_steps_repeats_the_data():
    state, history = fit_linear(train_total_steps=20, eval_dataset=DICTS[:1], eval_interval=every(7))
    assert int(state.step) == 20
    assert history.collect("steps", "eval.loss")[0] == [7, 14, 20]
    assert history.collect("steps", "train.loss")[0] == list(range(1, 21))


def test_the_three_apis_give_the_same_parameters(assert_same):
    """Trains the same model on the same data with `fit`, with objects and with functions."""
    by_call, _ = fit_linear(train_epochs=3)

    step = jaxloop.LossStep(jax.random.key(0), nn.Dense(1), optax.sgd(0.1), train=True, loss=squared, batch_size=8)
    state = step.initialize_model([1, 3])
    by_objects, _ = jaxloop.OuterLoop(jaxloop.TrainLoop(step))(state, train_dataset=DICTS, train_epochs=3)

    state, epochs = step.initialize_model([1, 3]), DICTS * 3
    by_functions, history, _ = jf.loop(state, epochs, {jf.every(1): step})
    assert_same(by_call.params, by_objects.params)
    assert_same(by_call.params, by_functions.params)
    assert len(history) == 24


def test_workdir_contains_events_history_and_checkpoints(tmp_path, recorded):
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=optax.linear_schedule(0.1, 0.0, 32))
    options = {"train_epochs": 4, "optimizer": optimizer, "log_interval": every(9)}
    with jax.numpy_dtype_promotion("standard"):
        _, history = fit_linear(DICTS, DICTS, workdir=tmp_path, keep=2, hparams={"width": 1}, **options)
    assert recorded.hparams == [{"width": 1}]
    assert [step for step, _ in recorded.scalars("train/loss")] == [9, 18, 27, 32]
    assert recorded.scalars("eval/loss")[-1] == (32, history.last("eval.loss")[1])
    assert jaxloop.History.load(tmp_path / "history.jsonl").rows == history.rows
    assert jaxloop.checkpoint.all_steps(tmp_path / "checkpoints") == [24, 32]  # The newest is the best.


class Killed(BaseException):
    """An exception that nothing handles, like SIGKILL."""


@pytest.mark.parametrize(("amount", "killed_at"), [({"train_epochs": 4}, 7), ({"train_total_steps": 32}, 16)])
def test_same_call_resumes_after_a_kill(killed_at, amount, tmp_path, recorded, assert_same):
    whole, history = fit_linear(eval_dataset=DICTS, **amount)
    with pytest.raises(Killed):
        fit_linear(eval_dataset=DICTS, workdir=tmp_path, actions=[Fail(at(killed_at), Killed())], **amount)
    resumed, same = fit_linear(eval_dataset=DICTS, workdir=tmp_path, **amount)
    assert_same(whole, resumed)
    assert same.collect("steps", "eval.loss") == history.collect("steps", "eval.loss")
    again, _ = fit_linear(eval_dataset=DICTS, workdir=tmp_path, **amount)  # Nothing is left to do.
    assert_same(whole, again)


NNX_OPTIMIZER = nnx.Optimizer(nnx.Linear(3, 1, rngs=nnx.Rngs(0)), optax.sgd(0.1), wrt=nnx.Param)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"train_epochs": None}, ValueError, "either train_epochs.*or train_total_steps.*it got neither"),
        ({"train_epochs": 2, "train_total_steps": 5}, ValueError, "it got train_epochs=2 and train_total_steps=5"),
        ({"train_epochs": 0}, ValueError, "train_epochs must be a positive int or None, got 0"),
        ({"eval_interval": 0}, ValueError, "eval_interval must be a positive int"),
        ({"train_dataset": iter(DICTS)}, ValueError, "train_epochs=2 needs a train_dataset that can be read more"),
        ({"eval_dataset": iter(DICTS)}, ValueError, "Each evaluation reads eval_dataset from its start"),
        ({"train_dataset": DICTS[0]}, TypeError, "write .batch."),
        ({"loss": lambda outputs, batch: outputs}, (TypeError, ValueError), r"\[8, 1\]"),
        ({"optimizer": NNX_OPTIMIZER}, TypeError, "must be an Optax transformation"),
        ({"optimizer": 0.1}, TypeError, "must be an Optax transformation such as optax.adam.*got 0.1"),
        ({"progress": "bars"}, ValueError, "'auto', 'tqdm', 'plain', got 'bars'"),
        ({"monitor": "eval/loss"}, ValueError, "without a workdir there is none"),
        ({"hparams": {"width": 1}}, ValueError, "without a workdir there is none"),
        ({"eval_interval": 2}, ValueError, "fit got eval_interval=2 without eval_dataset"),
    ],
)
def test_invalid_arguments_raise(options, error, message):
    with pytest.raises(error, match=message):
        fit_linear(**options)


def test_unknown_monitor_raises_and_lists_the_metrics(tmp_path, recorded):
    with pytest.raises(ValueError, match="No metric named 'eval/acuracy' is measured. Available: .*eval/loss"):
        fit_linear(eval_dataset=DICTS, workdir=tmp_path, monitor=("eval/acuracy", "max"))
    with pytest.raises(ValueError, match=r"pass the pair \('eval/iuo', 'max'\)"):
        fit_linear(eval_dataset=DICTS, workdir=tmp_path / "new", monitor="eval/iuo")
    assert not (tmp_path / "new").exists()


def test_progress_is_shown_on_request_and_no_file_is_written_without_a_workdir(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fit_linear(eval_dataset=DICTS, progress=True)
    shown = capsys.readouterr().err
    assert "16/16 [" in shown and "eval: loss" in shown and not list(tmp_path.iterdir())


def test_best_checkpoint_is_saved_for_any_eval_interval(tmp_path, recorded):
    """The best evaluation is at step 21, after which the learning rate is far too high."""
    rate = optax.piecewise_constant_schedule(0.1, {21: 100.0})
    options = {"train_total_steps": 40, "eval_dataset": DICTS, "eval_interval": every(7), "workdir": tmp_path}
    with jax.numpy_dtype_promotion("standard"):  # Needed by Optax.
        _, history = fit_linear(optimizer=optax.sgd(rate), **options)
    steps, losses = history.collect("steps", "eval.loss")
    assert steps[int(np.nanargmin(losses))] == 21
    assert jaxloop.checkpoint.all_steps(tmp_path / "checkpoints") == [21, 40]


def test_single_examples_in_place_of_batches_are_named():
    rows = [{"x": np.ones(3, np.float32), "y": np.float32(1)}] * 4
    with pytest.raises(Exception) as raised:
        fit_linear(rows, loss=lambda outputs, batch: outputs[..., 0] - batch["y"], inputs="x")
    note = "If the dataset yields examples instead of batches, write jaxloop.data.batched(dataset, 64, seed=0)"
    assert note in "".join(raised.value.__notes__)
