import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training import train_state
from orbax import checkpoint as orbax_checkpoint

from jaxloop import checkpoint, examples, partition
from jaxloop.actions import CheckpointAction
from jaxloop.history import History
from jaxloop.schedules import Elapsed, every
from jaxloop.step import Step


def save(directory, *steps_and_states):
    writer = checkpoint.CheckpointWriter(directory)
    for step, state in steps_and_states:
        writer.save(step, state)
    writer.close()


def test_the_newest_checkpoint_is_restored_or_the_one_asked_for(tmp_path, assert_same):
    step, state, batches = examples.tiny_regression()
    first, _ = step.step(state, batches[0])
    first_values = jax.device_get(first)
    save(tmp_path, (1, first))
    second, _ = step.step(first, batches[1])
    save(tmp_path, (2, second))
    fresh, template, _ = examples.tiny_regression()
    assert_same(fresh.restore_model(template, tmp_path), second)
    assert_same(fresh.restore_model(template, tmp_path, step=1), first_values)
    assert int(template.step) == 0  # Still usable.


def test_step_zero_means_step_zero(tmp_path):
    step, state, batches = examples.tiny_regression()
    save(tmp_path, (0, state))
    state, _ = step.step(state, batches[0])
    save(tmp_path, (1, state))
    assert int(step.restore_model(state, tmp_path, step=0).step) == 0


@pytest.mark.parametrize("exists", [True, False])
def test_no_checkpoint_is_said_and_the_state_returned(tmp_path, logs, exists):
    directory = tmp_path if exists else tmp_path / "nowhere"
    step, state, _ = examples.tiny_regression()
    assert step.restore_model(state, directory) is state
    assert f"No checkpoint found in {directory}" in logs.messages


def test_a_step_that_is_not_there_is_refused_with_those_that_are(tmp_path):
    step, state, _ = examples.tiny_regression()
    save(tmp_path, (3, state), (5, state))
    with pytest.raises(FileNotFoundError, match="No checkpoint of step 4 in .*, which holds steps 3, 5"):
        step.restore_model(state, tmp_path, step=4)


def test_a_relative_directory_is_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    step, state, _ = examples.tiny_regression()
    save("runs/first", (3, state))
    assert checkpoint.all_steps("runs/first") == [3]
    step.restore_model(state, "runs/first")


MANAGERS = {
    "present style": lambda directory: orbax_checkpoint.CheckpointManager(directory),
    "older style": lambda directory: orbax_checkpoint.CheckpointManager(
        directory, orbax_checkpoint.Checkpointer(orbax_checkpoint.PyTreeCheckpointHandler())
    ),
}


@pytest.mark.parametrize("make", MANAGERS.values(), ids=MANAGERS)
def test_managers_of_both_styles_are_written_and_read(tmp_path, make, assert_same):
    step, state, _ = examples.tiny_regression()
    save(make(tmp_path), (3, state))
    assert_same(step.restore_model(state, tmp_path), state)


def test_what_plain_orbax_and_plain_flax_wrote_is_read(tmp_path):
    model = nn.Dense(1)
    params = model.init(jax.random.key(5), jnp.ones([1, 3]))["params"]
    plain = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.1, momentum=0.9))
    with orbax_checkpoint.CheckpointManager(tmp_path) as manager:
        manager.save(10, args=orbax_checkpoint.args.PyTreeSave(plain.replace(step=jnp.int32(10))))
    step = Step(jax.random.key(0), model, optax.sgd(0.1, momentum=0.9))
    restored = step.restore_model(step.initialize_model([1, 3]), tmp_path)
    assert int(restored.step) == 10
    np.testing.assert_array_equal(restored.params["kernel"], params["kernel"])


def test_python_and_numpy_leaves_of_a_state_are_restored(tmp_path):
    step, state, _ = examples.tiny_regression()
    odd = state.replace(step=np.int32(7), batch_stats={"scale": 0.5})
    save(tmp_path, (7, odd))
    restored = step.restore_model(odd.replace(step=0, batch_stats={"scale": 1.0}), tmp_path)
    assert int(restored.step) == 7 and float(restored.batch_stats["scale"]) == 0.5


def test_another_model_is_refused_leaf_by_leaf(tmp_path):
    save(tmp_path, (3, Step(jax.random.key(0), nn.Dense(2), optax.sgd(0.1, momentum=0.9)).initialize_model([1, 3])))
    other = Step(jax.random.key(0), nn.Dense(4, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16), optax.sgd(0.1))
    state = other.initialize_model([1, 3])
    with pytest.raises(ValueError, match="does not fit this state") as caught:
        other.restore_model(state, tmp_path)
    lines = str(caught.value).splitlines()
    assert "  params/kernel: float32[3, 2] -> bfloat16[3, 4]" in lines
    assert "  opt_state/0/trace/kernel: float32[3, 2] -> (none)" in lines
    assert jnp.isfinite(state.params["kernel"]).all()  # Still usable.


def test_transforms_map_old_names_onto_new_ones(tmp_path):
    class Renamed(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(2, name="new")(x)

    class Original(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(2, name="old")(x)

    original = Step(jax.random.key(3), Original()).initialize_model([1, 3])
    save(tmp_path, (3, original))
    step = Step(jax.random.key(0), Renamed())
    transforms = {r"(.*)new(.*)": orbax_checkpoint.Transform(original_key=r"\1old\2")}
    restored = step.restore_model(step.initialize_model([1, 3]), tmp_path, transforms=transforms)
    np.testing.assert_array_equal(restored.params["new"]["kernel"], original.params["old"]["kernel"])


@pytest.mark.parametrize(("before", "after"), [(1, 8), (8, 2), (4, 1)])
def test_a_checkpoint_is_restored_onto_another_mesh(tmp_path, data_parallel, assert_same, before, after):
    _, state, _ = examples.tiny_regression(partitioner=data_parallel(before))
    save(tmp_path, (3, state))
    step, template, batches = examples.tiny_regression(partitioner=data_parallel(after))
    restored = step.restore_model(template, tmp_path)
    assert_same(restored, state)
    assert restored.params["kernel"].sharding == data_parallel(after).sharding
    step.step(restored, batches[0])


class Network(nnx.Module):
    def __init__(self, *, rngs):
        self.dense = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)


@pytest.mark.parametrize("partitioner", [partition.SingleDevicePartitioner(), "mesh"])
def test_an_nnx_state_with_typed_keys_comes_back(tmp_path, partitioner, data_parallel):
    partitioner = data_parallel(8) if partitioner == "mesh" else partitioner
    step = Step(jax.random.key(7), Network, optax.sgd(0.1), partitioner, nnx_model_args=())
    state = step.initialize_model([1, 3])
    save(tmp_path, (3, state))
    other = Step(jax.random.key(8), Network, optax.sgd(0.1), partitioner, nnx_model_args=())
    restored = other.restore_model(other.initialize_model([1, 3]), tmp_path)
    key, restored_key = (s.collections["dropout"]["rngs"]["key"][...] for s in (state, restored))
    assert jnp.issubdtype(restored_key.dtype, jax.dtypes.prng_key) and restored_key == key
    np.testing.assert_array_equal(restored.params["dense"]["kernel"][...], state.params["dense"]["kernel"][...])


# The best ---------------------------------------------------------------------------------------------


STATE = {"step": jnp.int32(0)}


def save_with(action, values):
    """Saves at the steps 100, 200, ..., at which these were measured."""
    history = History()
    for index, value in enumerate(values):
        elapsed = Elapsed((index + 1) * 100, samples=index)
        history.commit(elapsed, {"train": {"loss": 1.0}})
        if value is not None:
            history.commit(elapsed, {"test": {"accuracy": value}})
        action(STATE, {"loss": [1.0]}, step_num=elapsed.steps, elapsed=elapsed, history=history)


@pytest.mark.parametrize(
    ("best", "values", "kept", "best_step"),
    [
        ("test/accuracy", [0.9, 0.9, 0.3, 0.2, 0.1], [200, 400, 500], 200),  # The newest of equal ones.
        (("test.accuracy", "min"), [0.1, 0.9, 0.3, 0.2], [100, 300, 400], 100),
        (("test/accuracy", "max"), [0.1, 0.2, 0.3], [200, 300], 300),
        ("test/accuracy", [0.1, 0.9, None, None], [200, 300, 400], 200),
        ("test/accuracy", [math.nan, -1.0, math.inf, -2.0, math.nan], [200, 400, 500], 200),
        ("test/accuracy", [None, None, None], [200, 300], None),
    ],
    ids=repr,
)
def test_the_best_checkpoint_is_kept_beside_the_newest(tmp_path, best, values, kept, best_step):
    action = CheckpointAction(tmp_path, keep=2, best=best)
    save_with(action, values)
    action.close()
    assert checkpoint.all_steps(tmp_path) == kept
    assert action.best_step == checkpoint.best_step(tmp_path) == best_step


def test_the_best_survives_restarts(tmp_path):
    for values in ([0.9, 0.4], [0.9, 0.4, 0.5, None], [0.9, 0.4, 0.5, None, 0.7]):
        action = CheckpointAction(tmp_path, keep=1, best="test/accuracy")
        save_with(action, values)
        action.close()
    assert checkpoint.all_steps(tmp_path) == [100, 500]
    assert checkpoint.best_step(tmp_path) == 100


def test_a_train_metric_can_tell_the_best(tmp_path):
    action = CheckpointAction(tmp_path, keep=1, best="loss")
    for step, losses in [(1, [3.0, 2.0]), (2, [1.0, 2.0]), (3, [9.0, 0.0])]:
        action(STATE, {"loss": losses}, step_num=step)
    assert action.best_step == 2  # While it is saved, too.
    action.close()
    assert checkpoint.all_steps(tmp_path) == [2, 3]
    assert action.uses_outputs and not CheckpointAction(tmp_path).uses_outputs


def test_what_was_best_for_an_orbax_manager_is_found(tmp_path):
    options = orbax_checkpoint.CheckpointManagerOptions(best_fn=lambda metrics: metrics["score"])
    with orbax_checkpoint.CheckpointManager(tmp_path, options=options) as manager:
        for step, score in [(1, 3.0), (2, 5.0), (3, 4.0)]:
            manager.save(step, args=orbax_checkpoint.args.PyTreeSave({"a": jnp.ones(1)}), metrics={"score": score})
    assert checkpoint.best_step(tmp_path, ("score", "max")) == 2
    assert checkpoint.best_step(tmp_path, ("score", "min")) == 1
    assert checkpoint.best_step(tmp_path) is None
    assert checkpoint.best_step(tmp_path / "nowhere") is None


def test_a_best_that_was_never_measured_is_said(tmp_path, warnings_logged):
    action = CheckpointAction(tmp_path, best="test/accuracy", interval=every(steps=100))
    save_with(action, [None, None])
    action.close()
    assert len(warnings_logged()) == 1 and "test/accuracy was measured at none of its 2 saves" in warnings_logged()[0]
    assert "coincide with the evaluations" in warnings_logged()[0]
    action.close()
    assert len(warnings_logged()) == 1


def test_best_needs_a_directory_and_a_name(tmp_path):
    with pytest.raises(ValueError, match="options of its own.*`best` goes with a directory"):
        CheckpointAction(orbax_checkpoint.CheckpointManager(tmp_path), best="loss")
    with pytest.raises(TypeError, match=r"best must be the name of a metric or a pair .*, got \('loss',\)"):
        CheckpointAction(tmp_path, best=("loss",))
    with pytest.raises(ValueError, match="keep must be a positive int or None, got 0"):
        CheckpointAction(tmp_path, keep=0)


def test_checkpoints_come_last():
    assert CheckpointAction.comes_last and CheckpointAction.time_goes_to == "checkpoints"


# Metadata ---------------------------------------------------------------------------------------------

NOTED = {"elapsed": Elapsed(3, 96, 1.5, 2).to_dict(), "actions": [{"best": 0.5, "waits": 2, "name": None}], "on": True}


@pytest.mark.parametrize("make", MANAGERS.values(), ids=MANAGERS)
def test_what_is_noted_with_a_checkpoint_is_read_again(tmp_path, make):
    writer = checkpoint.CheckpointWriter(make(tmp_path))
    writer.save(3, STATE, metadata=NOTED)
    writer.save(4, STATE)
    writer.close()
    assert checkpoint.metadata(tmp_path, 3) == NOTED
    assert checkpoint.metadata(tmp_path, 4) == {}


def test_the_action_notes_how_far_the_run_is(tmp_path):
    action = CheckpointAction(tmp_path, best="loss")
    action(STATE, {"loss": 1.0}, step_num=3, elapsed=Elapsed(3, 96, 1.5, 2), metadata={"more": [1]})
    action.save(4, STATE, None, metadata={"more": [2]})
    action.close()
    noted = checkpoint.metadata(tmp_path, 3)
    assert Elapsed(**noted["elapsed"]) == Elapsed(3, 96, 1.5, 2) and noted["more"] == [1]
    assert checkpoint.metadata(tmp_path, 4)["more"] == [2]


def test_checkpoints_of_plain_orbax_have_no_metadata(tmp_path):
    for name, make in MANAGERS.items():
        with make(tmp_path / name) as manager:
            manager.save(1, args=orbax_checkpoint.args.PyTreeSave({"a": jnp.ones(1)}))
        assert checkpoint.metadata(tmp_path / name, 1) == {}
        (tmp_path / name / "1" / "_CHECKPOINT_METADATA").unlink()  # As those of long ago.
        assert checkpoint.metadata(tmp_path / name, 1) == {}


def test_metadata_of_no_checkpoint_are_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="No checkpoint of step 3 in .*, which holds none"):
        checkpoint.metadata(tmp_path, 3)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"a": {"b": [1, np.float32(2)]}}, r"metadata\['a'\]\['b'\]\[1\] of a checkpoint must be a number, a string"),
        ({"a": {3: 1}}, r"metadata\['a'\] of a checkpoint must have strings as keys, got 3"),
    ],
)
def test_metadata_that_json_would_change_are_refused(tmp_path, metadata, message):
    with pytest.raises(TypeError, match=message):
        checkpoint.CheckpointWriter(tmp_path).save(1, STATE, metadata=metadata)
