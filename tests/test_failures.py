"""The flight recorder, which records a failed step for replay."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax import core
from programs.acts import then_fail
from test_nonfinite import RegressionStep, batches

import jaxloop
from jaxloop import checkpoint


def make(kind=RegressionStep, seed=0, **options):
    return kind(jax.random.key(seed), nn.Dense(2), optax.sgd(0.1, momentum=0.9), train=True, **options)


STEP = make()


def fail(directory, step, data, error: type[Exception] = FloatingPointError, *, actions=(), **options):
    """Trains until an error; returns it, and the outer loop."""
    train_loop = jaxloop.TrainLoop(step, end_actions=actions, nan_policy="raise")
    outer_loop = jaxloop.OuterLoop(train_loop, workdir=directory, **options)
    with pytest.raises(error) as raised:
        outer_loop(step.initialize_model([1, 3]), data, 200)
    return raised.value, outer_loop


def noted_in(folder):
    return json.loads((folder / "failure.json").read_text())


def test_failed_step_is_replayed_from_a_checkpoint(tmp_path, logs):
    save = jaxloop.CheckpointAction(tmp_path / "checkpoints", interval=jaxloop.every(steps=10))
    error, _ = fail(tmp_path, STEP, batches(40, {33}), actions=[save])
    folder = tmp_path / "failures" / "33"
    assert any(f"jaxloop.replay({str(folder)!r}, step)" in note for note in error.__notes__)
    noted = noted_in(folder)
    assert noted["state_step"] == 30 and sorted(noted["batches"]) == ["31", "32", "33"]
    other = make()  # As in a new process.
    other.initialize_model([1, 3])
    for path in (tmp_path, folder):
        after, outputs = jaxloop.replay(path, other)
        assert int(after.step) == 33 and np.isnan((outputs or {})["loss"]) and np.isnan(after.params["kernel"]).any()
    assert "NaN or infinity in outputs/loss, params/bias, params/kernel" in logs.text


class OverflowStep(RegressionStep):
    def run(self, state, batch):
        self.was_traced = isinstance(state.step, core.Tracer)
        state, outputs = super().run(state, batch)
        return state, {**outputs, "loss": jnp.where(batch["divisor"][0] > 0, (outputs or {})["loss"], jnp.inf)}


@pytest.mark.parametrize("devices", [1, 8])
def test_replay_matches_the_run(devices, data_parallel, tmp_path, assert_same):
    step = make(OverflowStep, **({} if devices == 1 else {"partitioner": data_parallel(8)}))
    data = batches(5)
    data[4]["divisor"][:] = 0  # An infinite loss, but finite parameters.
    seen, _ = jaxloop.TrainLoop(step, nan_policy="ignore")(step.initialize_model([1, 3]), data, num_steps=5)
    fail(tmp_path, step, data)
    after, outputs = jaxloop.replay(tmp_path, step)
    assert_same(after.params, seen.params)
    assert np.isinf((outputs or {})["loss"])
    if devices == 1:
        eager, outputs = jaxloop.replay(tmp_path / "failures" / "5", step, eagerly=True)
        np.testing.assert_allclose(eager.params["kernel"], seen.params["kernel"], rtol=1e-5)
        assert np.isinf((outputs or {})["loss"]) and not step.was_traced


class FailingStep(RegressionStep):
    def begin(self, state, batch):
        if batch["x"][0, 0] == 100:
            raise RuntimeError("what is this?")
        return state, batch

    def end(self, state, outputs):
        if int(state.step) == self.fails_at_end_of:
            raise RuntimeError("what is this?")
        return state, outputs

    fails_at_end_of = None


@pytest.mark.parametrize("saves", [True, False])
def test_error_in_a_step_is_recorded_with_its_state(saves, tmp_path, assert_same):
    step, data, options = make(FailingStep), batches(6), {} if saves else {"checkpoint_spec": None}
    data[3]["x"][0, 0] = 100
    error, outer_loop = fail(tmp_path, step, data, RuntimeError, **options)
    folder = tmp_path / "failures" / "4"
    assert str(error) == "what is this?" and any("jaxloop.replay" in note for note in error.__notes__)
    noted = noted_in(folder)
    directory = folder / "state" if noted["checkpoint_dir"] is None else noted["checkpoint_dir"]
    restored = checkpoint.restore(directory, 3, step.initialize_model([1, 3]))
    assert_same(restored.params, outer_loop.rescued_state.params)
    assert list(noted["batches"]) == ["4"] and (noted["checkpoint_dir"] is None) == (not saves)
    with pytest.raises(RuntimeError, match="what is this"):
        jaxloop.replay(tmp_path, step)


def test_error_after_run_is_recorded_as_one_of_that_step(tmp_path):
    step = make(FailingStep)
    step.fails_at_end_of = 4
    _, outer_loop = fail(tmp_path, step, batches(6), RuntimeError)
    assert int(outer_loop.rescued_state.step) == 4  # `run` had completed.
    (folder,) = (path for path in (tmp_path / "failures").iterdir() if path.is_dir())
    assert folder.name == "4" and list(noted_in(folder)["batches"])[-1] == "4"


def test_failures_of_the_first_step_and_of_the_dataset_are_not_recorded(tmp_path):
    data = batches(2)
    data[0]["x"][0, 0] = 100
    fail(tmp_path, make(FailingStep), data, RuntimeError, checkpoint_spec=None)
    fail(tmp_path, STEP, then_fail(batches(3)), OSError, checkpoint_spec=None)
    assert not (tmp_path / "failures").exists()
    with pytest.raises(FileNotFoundError, match="No failure is recorded"):
        jaxloop.replay(tmp_path, STEP)


def test_at_most_five_failures_are_kept(tmp_path):
    for bad in range(1, 7):
        fail(tmp_path, STEP, batches(8, {bad}))
    assert sorted(path.name for path in (tmp_path / "failures").iterdir()) == ["2", "3", "4", "5", "6"]


def test_failure_to_record_does_not_hide_the_error(tmp_path, logs):
    (tmp_path / "failures").write_text("in the way")
    error, _ = fail(tmp_path, STEP, batches(4, {2}))
    assert not any("replay" in note for note in getattr(error, "__notes__", ()))
    assert "could not be recorded" in logs.text


def test_replay_error_names_what_is_missing(tmp_path):
    fail(tmp_path, STEP, batches(160, {150}))
    with pytest.raises(ValueError, match="the state of step .* is not available; the given one is of step 0"):
        jaxloop.replay(tmp_path, STEP)
    state, _ = jaxloop.TrainLoop(STEP, nan_policy="raise")(STEP.initialize_model([1, 3]), batches(160), num_steps=149)
    after, _ = jaxloop.replay(tmp_path, STEP, state=state)
    assert int(after.step) == 150 and int(state.step) == 149
    with pytest.raises(ValueError, match="PRNG keys .* differ from those"):
        jaxloop.replay(tmp_path, make(seed=1))
    with pytest.raises(ValueError, match=r"initialize_model\(...\)"):
        jaxloop.replay(tmp_path, make())
