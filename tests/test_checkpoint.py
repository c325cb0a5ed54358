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


@pytest.mark.parametrize(
    "make",
    [
        lambda directory: orbax_checkpoint.CheckpointManager(directory),
        lambda directory: orbax_checkpoint.CheckpointManager(
            directory, orbax_checkpoint.Checkpointer(orbax_checkpoint.PyTreeCheckpointHandler())
        ),
    ],
    ids=["present style", "older style"],
)
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
