"""The flight recorder, which records a failed step for replay."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax import core
from test_nonfinite import RegressionStep, batches, make

import jaxloop
from jaxloop import checkpoint


def fail(outer_loop, state, data, error: type[Exception] = FloatingPointError, **options):
    with pytest.raises(error) as raised:
        outer_loop(state, train_dataset=data, train_total_steps=len(data), **options)
    return raised.value


def test_failed_step_is_replayed_from_a_checkpoint(data_parallel, tmp_path, logs):
    step, state = make(1, data_parallel)
    data = batches(40, {33})
    action = jaxloop.CheckpointAction(tmp_path / "checkpoints", interval=jaxloop.every(steps=10))
    outer_loop = jaxloop.OuterLoop(jaxloop.TrainLoop(step, end_actions=[action], nan_policy="raise"), workdir=tmp_path)
    error = fail(outer_loop, state, data)
    folder = tmp_path / "failures" / "33"
    assert any(f"jaxloop.replay({str(folder)!r}, step)" in note for note in error.__notes__)
    noted = json.loads((folder / "failure.json").read_text())
    assert noted["state_step"] == 30 and sorted(noted["batches"]) == ["31", "32", "33"]
    other = make(1, data_parallel)[0]  # As in a new process.
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
    placed = {} if devices == 1 else {"partitioner": data_parallel(8)}
    step = OverflowStep(jax.random.key(0), nn.Dense(2), optax.sgd(0.1, momentum=0.9), train=True, **placed)
    data = batches(5)
    data[4]["divisor"][:] = 0  # An infinite loss, but finite parameters.
    seen, _ = jaxloop.TrainLoop(step, nan_policy="ignore")(step.initialize_model([1, 3]), data, num_steps=5)
    loop = jaxloop.TrainLoop(step, nan_policy="raise")
    fail(jaxloop.OuterLoop(loop, workdir=tmp_path), step.initialize_model([1, 3]), data)
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


@pytest.mark.parametrize("saves", [True, False])
def test_error_in_a_step_is_recorded_with_its_state(saves, tmp_path, assert_same):
    step = FailingStep(jax.random.key(0), nn.Dense(2), optax.sgd(0.1), train=True)
    data = batches(6)
    data[3]["x"][0, 0] = 100
    train_loop, options = jaxloop.TrainLoop(step, nan_policy="raise"), {} if saves else {"checkpoint_spec": None}
    outer_loop = jaxloop.OuterLoop(train_loop, workdir=tmp_path, **options)
    error = fail(outer_loop, step.initialize_model([1, 3]), data, RuntimeError)
    folder = tmp_path / "failures" / "4"
    assert str(error) == "what is this?" and any("jaxloop.replay" in note for note in error.__notes__)
    noted = json.loads((folder / "failure.json").read_text())
    directory = folder / "state" if noted["checkpoint_dir"] is None else noted["checkpoint_dir"]
    restored = checkpoint.restore(directory, 3, step.initialize_model([1, 3]))
    assert_same(restored.params, outer_loop.rescued_state.params)
    assert list(noted["batches"]) == ["4"] and (noted["checkpoint_dir"] is None) == (not saves)
    with pytest.raises(RuntimeError, match="what is this"):
        jaxloop.replay(tmp_path, step)


def test_error_after_run_is_recorded_as_one_of_that_step(tmp_path):
    class FailsAtEnd(RegressionStep):
        def end(self, state, outputs):
            if int(state.step) == 4:
                raise RuntimeError("what is this?")
            return state, outputs

    step = FailsAtEnd(jax.random.key(0), nn.Dense(2), optax.sgd(0.1), train=True)
    outer_loop = jaxloop.OuterLoop(jaxloop.TrainLoop(step, nan_policy="raise"), workdir=tmp_path)
    fail(outer_loop, step.initialize_model([1, 3]), batches(6), RuntimeError)
    assert int(outer_loop.rescued_state.step) == 4  # `run` had completed.
    (folder,) = (path for path in (tmp_path / "failures").iterdir() if path.is_dir())
    assert folder.name == "4" and list(json.loads((folder / "failure.json").read_text())["batches"])[-1] == "4"


def test_failures_of_the_first_step_and_of_the_dataset_are_not_recorded(data_parallel, tmp_path):
    def failing():
        yield from batches(3)
        raise OSError("gone")

    step = FailingStep(jax.random.key(0), nn.Dense(2), optax.sgd(0.1), train=True)
    data = batches(2)
    data[0]["x"][0, 0] = 100
    fail(
        jaxloop.OuterLoop(jaxloop.TrainLoop(step, nan_policy="raise"), workdir=tmp_path, checkpoint_spec=None),
        step.initialize_model([1, 3]),
        data,
        RuntimeError,
    )
    with pytest.raises(OSError, match="gone"):
        outer_loop = jaxloop.OuterLoop(
            jaxloop.TrainLoop(step, nan_policy="raise"), workdir=tmp_path, checkpoint_spec=None
        )
        outer_loop(step.initialize_model([1, 3]), train_dataset=failing(), train_total_steps=9)
    assert not (tmp_path / "failures").exists()
    with pytest.raises(FileNotFoundError, match="No failure is recorded"):
        jaxloop.replay(tmp_path, step)


def test_at_most_five_failures_are_kept(data_parallel, tmp_path):
    step, _ = make(1, data_parallel)
    for bad in range(1, 7):
        fail(
            jaxloop.OuterLoop(jaxloop.TrainLoop(step, nan_policy="raise"), workdir=tmp_path),
            step.initialize_model([1, 3]),
            batches(8, {bad}),
        )
    assert sorted(path.name for path in (tmp_path / "failures").iterdir()) == ["2", "3", "4", "5", "6"]


def test_failure_to_record_does_not_hide_the_error(data_parallel, tmp_path, logs):
    step, state = make(1, data_parallel)
    (tmp_path / "failures").write_text("in the way")
    error = fail(
        jaxloop.OuterLoop(jaxloop.TrainLoop(step, nan_policy="raise"), workdir=tmp_path), state, batches(4, {2})
    )
    assert (
        not any("replay" in note for note in getattr(error, "__notes__", ())) and "could not be recorded" in logs.text
    )


def test_replay_error_names_what_is_missing(data_parallel, tmp_path):
    step, state = make(1, data_parallel)
    fail(jaxloop.OuterLoop(jaxloop.TrainLoop(step, nan_policy="raise"), workdir=tmp_path), state, batches(160, {150}))
    with pytest.raises(ValueError, match="the state of step .* is not available; the given one is of step 0"):
        jaxloop.replay(tmp_path, step)
    state, _ = jaxloop.TrainLoop(step, nan_policy="raise")(step.initialize_model([1, 3]), batches(160), num_steps=149)
    after, _ = jaxloop.replay(tmp_path, step, state=state)
    assert int(after.step) == 150 and int(state.step) == 149
    other = RegressionStep(jax.random.key(1), nn.Dense(2), optax.sgd(0.1), train=True)
    with pytest.raises(ValueError, match="PRNG keys .* differ from those"):
        jaxloop.replay(tmp_path, other)
    with pytest.raises(ValueError, match=r"initialize_model\(...\)"):
        jaxloop.replay(tmp_path, RegressionStep(jax.random.key(0), nn.Dense(2), optax.sgd(0.1), train=True))
