"""Loading only parameters, into any layout and under other names."""

import contextlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn
from flax import nnx

import jaxloop
from jaxloop import checkpoint

pytestmark = pytest.mark.usefixtures("compile_fast")


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        self.variable("cache", "calls", lambda: jnp.zeros([], jnp.int32))
        x = nn.BatchNorm(use_running_average=not train, name="norm")(nn.Dense(8, name="body")(x))
        return nn.Dense(2, name="head")(x)


class NNX(nnx.Module):
    def __init__(self, rngs):
        self.body, self.norm = nnx.Linear(4, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
        self.head = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x):
        return self.head(self.norm(self.body(x)))


def loss(outputs, batch):
    return (outputs**2).mean(-1)


def make_step(model=None, optimizer=None, **options):
    model = Linen() if model is None else model
    return jaxloop.LossStep(jax.random.key(0), model, optimizer or optax.adam(0.1), train=True, loss=loss, **options)


@pytest.fixture(scope="module", params=[Linen, NNX])
def saved(request, tmp_path_factory):
    """A directory with checkpoints of steps 1 and 2, and their states."""
    is_linen = request.param is Linen
    step = make_step(Linen()) if is_linen else make_step(NNX, nnx_model_args=())
    directory, states = tmp_path_factory.mktemp("saved"), {}
    state = step.initialize_model([1, 4])
    with contextlib.closing(checkpoint.CheckpointWriter(directory, best=("loss", "min"))) as writer:
        for number in (1, 2):
            with jax.numpy_dtype_promotion("standard"):  # Optax's Adam needs it.
                state, _ = step(state, np.random.default_rng(number).normal(size=[8, 4]).astype(np.float32))
            states[number] = jax.tree.map(jnp.copy, state)
            writer.save(number, state, metrics={"loss": float(number)})
    return directory, states


@pytest.fixture
def linen_directory(tmp_path):
    step = make_step()
    with contextlib.closing(checkpoint.CheckpointWriter(tmp_path)) as writer:
        writer.save(1, step.initialize_model([1, 4]))
    return tmp_path


def assert_equal(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.mark.parametrize(("which", "number"), [("newest", 2), ("best", 1), (1, 1), (2, 2)])
def test_the_params_of_a_step_are_loaded_into_a_tree(saved, which, number):
    directory, states = saved
    assert_equal(checkpoint.load_params(directory, which, into=states[1].params), states[number].params)


def test_abstract_params_are_enough_and_keep_their_shardings(saved):
    directory, states = saved
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("data",))
    split = jax.sharding.NamedSharding(mesh, jax.P("data"))
    shapes = lambda **kwargs: jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, **(kwargs if leaf.shape[0] % 4 == 0 else {})),
        states[2].params,
    )
    on_mesh = checkpoint.load_params(directory, into=shapes(sharding=split))
    assert_equal(on_mesh, states[2].params)
    assert {leaf.sharding for leaf in jax.tree.leaves(on_mesh) if leaf.shape[0] % 4 == 0} == {split}
    assert_equal(checkpoint.load_params(directory, into=shapes()), states[2].params)


def test_params_loaded_without_a_tree_are_dicts_that_the_model_accepts(saved):
    directory, states = saved
    params = checkpoint.load_params(directory)
    assert set(params) == {"body", "norm", "head"}
    np.testing.assert_array_equal(jax.tree.leaves(params["head"])[0], jax.tree.leaves(states[2].params["head"])[0])
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(params))


def test_a_step_without_an_optimizer_restores_all_variables_without_a_warning(saved, warnings_logged):
    directory, states = saved
    model = NNX if isinstance(states[2].params, nnx.State) else Linen()
    options = {"nnx_model_args": ()} if model is NNX else {}
    step = jaxloop.LossStep(jax.random.key(1), model, loss=loss, **options)
    restored = step.restore_model(step.initialize_model([1, 4]), directory)
    for name in ("params", "batch_stats", "collections"):
        assert_equal(getattr(restored, name), getattr(states[2], name))
    assert not warnings_logged()


def test_patterns_load_some_params_under_other_names(saved):
    directory, states = saved
    backbone = {"encoder": states[1].params["body"], "new_head": {"bias": jnp.zeros(7)}}
    loaded = checkpoint.load_params(directory, into=backbone, paths={"body/**": "encoder/**"})
    assert_equal(loaded["encoder"], states[2].params["body"])
    np.testing.assert_array_equal(loaded["new_head"]["bias"], np.zeros(7))


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ({"bodi/**": "encoder/**"}, "The pattern 'bodi/\\*\\*' matches no path(.|\n)*body/kernel"),
        ({"*/kernel": "encoder/kernel"}, "same wildcards"),
        ({"body/kernel": "encoder/kernel", "head/kernel": "encoder/kernel"}, "A leaf is renamed to .encoder/kernel."),
        ({"body/*": "encoder/*"}, "encoder/bias: float32\\[8\\] -> \\(none\\)"),
        ({"head/kernel": "encoder/kernel"}, "encoder/kernel: float32\\[8, 2\\] -> float32\\[4, 8\\]"),
    ],
)
def test_patterns_that_do_not_fit_raise_an_error(linen_directory, paths, message):
    with pytest.raises(ValueError, match=message):
        checkpoint.load_params(linen_directory, into={"encoder": {"kernel": jnp.zeros([4, 8])}}, paths=paths)


def test_a_leaf_without_a_value_needs_a_pattern(linen_directory):
    into = {"encoder": {"kernel": jnp.zeros([4, 8])}, "head": jax.ShapeDtypeStruct([3], jnp.float32)}
    with pytest.raises(ValueError, match="to head, for which `into` has only a shape"):
        checkpoint.load_params(linen_directory, into=into, paths={"body/kernel": "encoder/kernel"})


def test_a_checkpoint_without_parameters_raises_an_error(tmp_path):
    with contextlib.closing(checkpoint.CheckpointWriter(tmp_path)) as writer:
        writer.save(1, {"weights": jnp.zeros(3)})
    with pytest.raises(ValueError, match="has no parameters. It contains weights"):
        checkpoint.load_params(tmp_path)


def test_a_step_that_is_missing_or_not_a_step_raises_an_error(linen_directory, tmp_path_factory):
    with pytest.raises(FileNotFoundError, match="No checkpoint of step 7"):
        checkpoint.load_params(linen_directory, 7)
    with pytest.raises(FileNotFoundError, match="known to be the best"):
        checkpoint.load_params(linen_directory, "best")
    with pytest.raises(FileNotFoundError, match="No checkpoint of step latest"):
        checkpoint.load_params(linen_directory, "latest")
    with pytest.raises(FileNotFoundError, match="No checkpoint in"):
        checkpoint.load_params(tmp_path_factory.mktemp("empty"))


def test_damaged_checkpoints_are_skipped_with_a_warning_and_kept(saved, tmp_path, logs):
    directory, states = saved
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    saved_files = [path for path in (tmp_path / "2" / "default").rglob("*") if path.is_file()]
    damaged = max(saved_files, key=lambda path: path.stat().st_size)
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert_equal(checkpoint.load_params(tmp_path, into=states[1].params), states[1].params)
    assert "Step 1 was restored instead." in logs.text
    assert checkpoint.all_steps(tmp_path) == [1, 2]
    with pytest.raises(checkpoint.CheckpointError, match="damaged"):
        checkpoint.load_params(tmp_path, 2)


def test_orbax_checkpoints_are_read_without_their_optimizer_state(tmp_path):
    state = make_step().initialize_model([1, 4])
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False)  # One directory per leaf.
    manager = ocp.CheckpointManager(tmp_path, item_handlers=handler)
    manager.save(3, args=ocp.args.PyTreeSave(state))
    manager.close()
    chunks = [path for path in (tmp_path / "3" / "default").glob("opt_state.*/*") if path.name[0] in "0123456789"]
    for chunk in chunks:
        chunk.write_bytes(b"damaged")
    assert len(chunks) > 10
    assert_equal(checkpoint.load_params(tmp_path, into=state.params), state.params)


def test_a_state_with_a_different_optimizer_keeps_its_opt_state_with_a_warning(linen_directory, logs):
    saved_state = make_step().restore_model(make_step().initialize_model([1, 4]), linen_directory)
    step = make_step(optimizer=optax.sgd(0.1, momentum=0.9))
    fresh = step.initialize_model([1, 4])
    momentum = jax.tree.map(jnp.ones_like, fresh.opt_state)
    for which in (None, 1):
        logs.clear()
        restored = step.restore_model(fresh.replace(opt_state=momentum), linen_directory, which)
        assert_equal(restored.params, saved_state.params)
        assert_equal(restored.opt_state, momentum)
        assert "without its opt_state, because the optimizers differ" in logs.text
        assert "opt_state/0/mu/head/kernel: float32[8, 2] -> (none)" in logs.text


def test_a_different_model_raises(linen_directory):
    other = make_step(nn.Dense(3), optax.sgd(0.1))
    with pytest.raises(ValueError, match="does not fit this state"):
        other.restore_model(other.initialize_model([1, 4]), linen_directory)
