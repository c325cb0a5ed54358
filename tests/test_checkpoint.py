import contextlib
import errno
import json
import math
import os
import pathlib
import random
import shutil
import tempfile
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn
from flax import nnx
from flax.training import train_state
from programs import tiny
from programs.acts import limit_file_size, raising

from jaxloop import CheckpointSpec, LossStep, TrainLoop, checkpoint, examples
from jaxloop.actions import CheckpointAction
from jaxloop.base import checks, files
from jaxloop.checkpoint import seal
from jaxloop.distributed.lock import locked
from jaxloop.history import History
from jaxloop.schedules import Elapsed, every
from jaxloop.step import Step


def save(directory, *steps_and_states):
    writer = checkpoint.CheckpointWriter(directory)
    for step, state in steps_and_states:
        writer.save(step, state)
    writer.close()


def test_restore_model_restores_the_newest_or_the_given_step(tmp_path, assert_same):
    save(tmp_path, (0, tiny.STATE))
    state, _ = tiny.STEP(tiny.STATE, tiny.BATCHES[0])
    save(tmp_path, (1, state))
    assert_same(tiny.STEP.restore_model(tiny.STATE, tmp_path), state)
    assert_same(tiny.STEP.restore_model(tiny.STATE, tmp_path, step=0), tiny.STATE)
    assert int(tiny.STATE.step) == 0  # Still usable.


def test_restoring_without_checkpoints_raises(tmp_path, logs):
    for number in (None, 3):
        with pytest.raises(FileNotFoundError, match="No checkpoint in "):
            tiny.STEP.restore_model(tiny.STATE, tmp_path / "nowhere", number)
        assert tiny.STEP.restore_model(tiny.STATE, tmp_path / "nowhere", number, missing_ok=True) is tiny.STATE
    assert f"No checkpoint found in {tmp_path / 'nowhere'}" in logs.messages


def test_restore_model_skips_a_damaged_checkpoint_without_moving_it(tmp_path, warnings_logged):
    save(tmp_path, *((number, tiny.STATE.replace(step=number)) for number in (1, 2)))
    (tmp_path / "2" / "default" / "_METADATA").unlink()
    assert int(tiny.STEP.restore_model(tiny.STATE, tmp_path).step) == 1
    assert checkpoint.all_steps(tmp_path) == [1, 2] and "_METADATA is missing" in warnings_logged()[-1]
    with pytest.raises(checkpoint.CheckpointError, match="_METADATA is missing"):
        tiny.STEP.restore_model(tiny.STATE, tmp_path, step=2)


METADATA = {"elapsed": Elapsed(3, 96, 1.5, 2).to_dict(), "actions": [{"best": 0.5, "name": None}], "on": True}


@pytest.mark.parametrize("handlers", [(), (ocp.Checkpointer(ocp.PyTreeCheckpointHandler()),)], ids=["new", "old"])
def test_managers_of_both_styles_save_the_state_and_the_metadata(tmp_path, handlers, assert_same):
    writer = checkpoint.CheckpointWriter(ocp.CheckpointManager(tmp_path, *handlers))
    writer.save(3, tiny.STATE, metadata=METADATA, run={"a": 1}, trees={"b": {"c": np.ones(1)}})
    writer.save(4, tiny.STATE)
    writer.close()
    assert_same(checkpoint.restore_newest(tmp_path, tiny.STATE), (tiny.STATE, 4))
    saved, later = (checkpoint.Checkpoint.at(tmp_path, step) for step in (3, 4))
    assert (saved.metadata(), saved.run(), later.metadata()) == (METADATA, {}, {})


def test_checkpoint_of_plain_orbax_and_flax_is_restored(tmp_path):
    model = nn.Dense(1)
    params = model.init(jax.random.key(5), jnp.ones([1, 3]))["params"]
    plain = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.1, momentum=0.9))
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(10, args=ocp.args.PyTreeSave(plain.replace(step=jnp.int32(10))))
    step = Step(jax.random.key(0), model, optax.sgd(0.1, momentum=0.9))
    restored = step.restore_model(step.initialize_model([1, 3]), tmp_path)
    assert int(restored.step) == 10 and checkpoint.Checkpoint.at(tmp_path, 10).metadata() == {}
    np.testing.assert_array_equal(restored.params["kernel"], params["kernel"])


def test_restoring_a_different_model_lists_the_mismatched_leaves(tmp_path):
    save(tmp_path, (3, Step(jax.random.key(0), nn.Dense(2), optax.sgd(0.1, momentum=0.9)).initialize_model([1, 3])))
    other = Step(jax.random.key(0), nn.Dense(4, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16), optax.sgd(0.1))
    state = other.initialize_model([1, 3])
    with pytest.raises(ValueError, match="does not fit this state") as caught:
        other.restore_model(state, tmp_path)
    lines = str(caught.value).splitlines()
    assert "  params/kernel: float32[3, 2] -> bfloat16[3, 4]" in lines
    assert "  opt_state/0/trace/kernel: float32[3, 2] -> (none)" in lines
    assert jnp.isfinite(state.params["kernel"]).all()  # Still usable.


def test_transforms_rename_optimizer_state_and_nnx_leaves(tmp_path, assert_same):
    class Model(nnx.Module):
        def __init__(self, *names, rngs):
            for name in names:
                setattr(self, name, nnx.Linear(2, 2, rngs=rngs))

    make = lambda seed, *names: Step(jax.random.key(seed), Model, optax.adam(0.1), nnx_model_args=names)
    original, step = make(0, "first", "second").initialize_model(), make(1, "second", "third")
    original = original.replace(opt_state=jax.tree.map(lambda leaf: leaf + 5, original.opt_state))
    save(tmp_path, (3, original))
    transforms = {"**/first/*": "**/second/*", "**/second/*": "**/third/*"}  # Applied at once, not one after the other.
    restored = step.restore_model(step.initialize_model(), tmp_path, transforms=transforms)
    values = checks.leaves_by_path(original)
    renamed = {path.replace("second", "third").replace("first", "second"): leaf for path, leaf in values.items()}
    assert_same(checks.leaves_by_path(restored), renamed)


class Named(nn.Module):
    names: tuple[str, ...]

    @nn.compact
    def __call__(self, x):
        return sum(nn.Dense(1, name=name)(x) for name in self.names)


@pytest.mark.parametrize(
    ("old", "new", "transforms"),
    [
        (("old",), ("new",), {"**/old/**": "**/new/**"}),
        (("a", "b"), ("b", "a"), {"**/a/**": "**/b/**", "**/b/**": "**/a/**"}),
    ],
    ids=["renamed", "swapped"],
)
def test_a_run_with_transforms_can_be_restarted(tmp_path, assert_same, old, new, transforms):
    def run(names, total_steps, transforms=None):
        loss = lambda outputs, batch: ((outputs - batch["y"]) ** 2).mean(axis=-1)
        optimizer = optax.sgd(0.1, momentum=0.9)  # Its state is renamed, too.
        step = LossStep(jax.random.key(0), Named(names), optimizer, train=True, loss=loss)
        spec = CheckpointSpec(tmp_path, transforms=transforms)
        outer_loop = tiny.experiment(step=step, directory=tmp_path, saves=every(steps=1), checkpoint_spec=spec)
        return outer_loop(step.initialize_model([1, 3]), examples.tiny_regression()[2], total_steps)[0].params

    before = run(old, 1)
    after = run(new, 1, transforms)  # Nothing is left to train.
    assert_same({new: before[old] for old, new in zip(old, new, strict=True)}, after)
    trained = run(new, 2, transforms)
    assert_same(run(new, 2, transforms), trained)
    if old == ("old",):  # Also without a record of the transforms.
        run(new, 3)
        run(new, 4, transforms)


def test_transforms_that_do_not_fit_the_state_raise(tmp_path):
    save(tmp_path, (1, tiny.STATE))
    for wrong, error, text in [
        ({"params/kernel": "params/weights"}, ValueError, r"params/kernel: \(none\) -> float32\[3, 1\]"),
        ({"(.*)old": ocp.Transform()}, TypeError, r"such as \{'\*\*/Dense/\*\*': '\*\*/output/\*\*'\}"),
    ]:
        with pytest.raises(error, match=text):
            checkpoint.restore_newest(tmp_path, tiny.STATE, transforms=wrong)
    assert checkpoint.all_steps(tmp_path) == [1]


@pytest.mark.parametrize(("before", "after"), [(8, 1), (2, 8)])
def test_checkpoint_is_restored_onto_a_different_mesh(tmp_path, data_parallel, assert_same, before, after):
    _, state, _ = examples.tiny_regression(partitioner=data_parallel(before))
    save(tmp_path, (3, state))
    step, template, batches = examples.tiny_regression(partitioner=data_parallel(after))
    restored = step.restore_model(template, tmp_path)
    assert_same(restored, state)
    assert restored.params["kernel"].sharding == data_parallel(after).sharding
    step(restored, batches[0])


class Network(nnx.Module):
    def __init__(self, *, rngs):
        self.dense = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)


def test_nnx_state_with_typed_keys_is_restored(tmp_path, data_parallel):
    partitioner = data_parallel(8)
    step = Step(jax.random.key(7), Network, optax.sgd(0.1), partitioner, nnx_model_args=())
    state = step.initialize_model([1, 3])
    save(tmp_path, (3, state))
    other = Step(jax.random.key(8), Network, optax.sgd(0.1), partitioner, nnx_model_args=())
    restored = other.restore_model(other.initialize_model([1, 3]), tmp_path)
    key, restored_key = (s.collections["dropout"]["rngs"]["key"][...] for s in (state, restored))
    assert jnp.issubdtype(restored_key.dtype, jax.dtypes.prng_key) and restored_key == key
    np.testing.assert_array_equal(restored.params["dense"]["kernel"][...], state.params["dense"]["kernel"][...])


# The best checkpoint ----------------------------------------------------------------------------------


STATE = {"step": jnp.int32(0)}


def save_with(action, values):
    """Saves at steps 100, 200, ..., with these test accuracies (None: not measured)."""
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
        ("test/accuracy", [0.9, 0.9, 0.3, 0.2, 0.1], [200, 400, 500], 200),  # The newest of equal values.
        (("test.accuracy", "min"), [0.1, 0.9, 0.3, 0.2], [100, 300, 400], 100),
        (("test/accuracy", "max"), [0.1, 0.2, 0.3], [200, 300], 300),
        ("test/accuracy", [0.1, 0.9, None, None], [200, 300, 400], 200),
        ("test/accuracy", [math.nan, -1.0, math.inf, -2.0, math.nan], [200, 400, 500], 200),
        ("test/accuracy", [None, None, None], [200, 300], None),
    ],
    ids=repr,
)
def test_best_checkpoint_is_kept_along_with_the_newest(tmp_path, best, values, kept, best_step):
    action = CheckpointAction(tmp_path, keep=2, best=best)
    save_with(action, values)
    action.close()
    assert checkpoint.all_steps(tmp_path) == kept
    assert action.best_step == checkpoint.best_step(tmp_path) == best_step


def test_a_second_action_can_keep_some_checkpoints_forever(tmp_path):
    newest = CheckpointAction(tmp_path / "newest", every(steps=4), keep=1)
    forever = CheckpointAction(tmp_path / "forever", every(steps=5), keep=None)
    TrainLoop(tiny.STEP, end_actions=[newest, forever])(tiny.STATE, tiny.BATCHES, 14)
    assert [checkpoint.all_steps(action.directory) for action in (newest, forever)] == [[12], [5, 10]]


def test_train_metric_can_select_the_best(tmp_path):
    action = CheckpointAction(tmp_path, keep=1, best="loss")
    for step, losses in [(1, [3.0, 2.0]), (2, [1.0, 2.0]), (3, [9.0, 0.0])]:
        action(STATE, {"loss": losses}, step_num=step)
    assert action.best_step == 2  # Even while a save is in progress.
    action.close()
    assert checkpoint.all_steps(tmp_path) == [2, 3]
    assert action.uses_outputs and not CheckpointAction(tmp_path).uses_outputs


def test_best_step_reads_the_metrics_of_an_orbax_manager(tmp_path):
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["score"])
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        for step, score in [(1, 3.0), (2, 5.0), (3, 4.0)]:
            manager.save(step, args=ocp.args.PyTreeSave({"a": jnp.ones(1)}), metrics={"score": score})
    assert checkpoint.best_step(tmp_path, ("score", "max")) == 2
    assert checkpoint.best_step(tmp_path, ("score", "min")) == 1
    assert checkpoint.best_step(tmp_path) is None
    assert checkpoint.best_step(tmp_path / "nowhere") is None


def test_best_metric_that_was_never_measured_warns(tmp_path, warnings_logged):
    action = CheckpointAction(tmp_path, best="test/accuracy", interval=every(steps=100))
    save_with(action, [math.nan, math.nan])
    action.finish(STATE)
    action.close()
    (warning,) = warnings_logged()
    assert "at its saves, test/accuracy was not measured, or not finite" in warning
    assert "coincide with the evaluations" in warning


def test_best_requires_a_directory_and_a_metric_name(tmp_path):
    with pytest.raises(ValueError, match="`best` needs a directory.*whose options say"):
        CheckpointAction(ocp.CheckpointManager(tmp_path), best="loss")
    with pytest.raises(TypeError, match=r"best must be the name of a metric or a pair .*, got \('loss',\)"):
        CheckpointAction(tmp_path, best=("loss",))
    with pytest.raises(ValueError, match="keep must be a positive int or None, got 0"):
        CheckpointAction(tmp_path, keep=0)


# Metadata ---------------------------------------------------------------------------------------------


def test_values_that_are_too_large_to_be_read_again_raise(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_BYTES", 100)
    with pytest.raises(ValueError, match="run of a checkpoint must have at most 100 bytes, got 2,0"):
        checkpoint.CheckpointWriter(tmp_path).save(1, STATE, run={"text": "x" * 2000})


# Runs and trees -----------------------------------------------------------------------------------------


def make_run(seed):
    """The state, `run`, `trees` and metadata of a small run."""
    rng = np.random.default_rng(seed)
    state = {"w": jnp.asarray(rng.standard_normal([64, 8]), jnp.float32), "key": jax.random.key(seed)}
    loop = {"sum": rng.standard_normal(3), "n": np.float32(seed), "key": jax.random.key(seed + 1)}
    best = optax.adam(0.1).init({"w": jnp.asarray(rng.standard_normal([4, 2]), jnp.bfloat16)})
    trees = {"loop/0": {**loop, "none": None, "empty": {}}, "best": best, "nothing": ()}
    return state, {"seed": seed, "list": list(range(50))}, trees, {"elapsed": seed}


def save_runs(directory, *steps, **options):
    writer = checkpoint.CheckpointWriter(directory, **options)
    for step in steps:
        state, run, trees, metadata = make_run(step)
        writer.save(step, state, {"accuracy": step / 10}, metadata, run=run, trees=trees)
    writer.close()


def values(tree):
    """Converts the leaves of a tree to NumPy arrays, and typed keys to their data."""
    is_key = lambda leaf: isinstance(leaf, jax.Array) and "key<" in str(leaf.dtype)
    return jax.tree.map(lambda leaf: np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf), tree)


def assert_is_run(directory, step, state):
    """Checks that the state, and everything read from the directory, is what was saved for the step."""
    saved = make_run(step)
    whole, arrays = (checkpoint.Checkpoint.at(directory, step, *item) for item in ((), ("trees",)))
    read = state, whole.run(), arrays.trees(make_run(0)[2]), {"elapsed": whole.metadata()["elapsed"]}
    assert jax.tree.structure(read) == jax.tree.structure(saved)
    for one, two in zip(jax.tree.leaves(values(read)), jax.tree.leaves(values(saved)), strict=True):
        assert one.dtype == two.dtype and one.tobytes() == two.tobytes()


def test_run_round_trips_bit_for_bit(tmp_path):
    save_runs(tmp_path, 3, 4)
    for step in (3, 4):
        assert_is_run(tmp_path, step, checkpoint.restore(tmp_path, step, make_run(0)[0]))
    read = checkpoint.Checkpoint.at(tmp_path, 4, "trees").trees({"best": make_run(0)[2]["best"], "nothing": {}})
    assert list(read) == ["best", "nothing"] and read["best"][0].mu["w"].dtype == jnp.bfloat16


def test_saved_values_can_be_changed_and_donated_once_save_returns(tmp_path):
    writer, run = checkpoint.CheckpointWriter(tmp_path), {"list": [1]}
    state, tree = {"w": jnp.full([500_000], 1.0)}, {"mine": np.full([500_000], 2.0)}
    writer.save(1, state, run=run, trees={"a": tree})
    jax.jit(lambda state: jax.tree.map(lambda leaf: leaf * 0, state), donate_argnums=0)(state)
    tree["mine"][:] = 0
    run["list"].append(2)
    assert state["w"].is_deleted()
    writer.close()
    assert (checkpoint.restore(tmp_path, 1, {"w": jnp.zeros([500_000])})["w"] == 1).all()
    assert (checkpoint.Checkpoint.at(tmp_path, 1, "trees").trees({"a": tree})["a"]["mine"] == 2).all()
    assert checkpoint.Checkpoint.at(tmp_path, 1).run() == {"list": [1]}


def test_dtype_is_never_cast_silently(tmp_path):
    save(tmp_path, (1, {"old": jnp.ones([2], jnp.float32)}))
    with pytest.raises(ValueError, match=r"new: float32\[2\] -> bfloat16\[2\]"):
        checkpoint.restore(tmp_path, 1, {"new": jnp.zeros([2], jnp.bfloat16)}, transforms={"old": "new"})


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_plain_manager_restores_a_checkpoint_of_the_writer(tmp_path):
    save_runs(tmp_path, 3, best=("accuracy", "max"))
    with ocp.CheckpointManager(tmp_path) as manager:
        assert manager.all_steps() == [3]
        for args in (ocp.args.PyTreeRestore(), None):
            np.testing.assert_array_equal(manager.restore(3, args=args)["w"], make_run(3)[0]["w"])


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"run": {"a": np.float32(1)}}, TypeError, "run of a checkpoint must consist of numbers"),
        ({"metadata": {"a": {"x"}}}, TypeError, "metadata of a checkpoint must consist of numbers, .*: .*set"),
        ({"metadata": {"a": {(1, 2): 3}}}, TypeError, "metadata of a checkpoint .*keys must be str"),
        ({"trees": {"a": {"b": "x"}}}, TypeError, "state/b is str"),
        ({"trees": {"a": {"x.y": np.ones(1), "x": {"y": np.ones(1)}}}}, ValueError, r"leaves a/x/y and a/x\.y: one of"),
        ({"trees": {"a/b": np.ones(1), "a": {"b": np.ones(1)}}}, ValueError, "two leaves a/b and a/b"),
    ],
)
def test_values_that_do_not_round_trip_raise(tmp_path, given, error, message):
    with pytest.raises(error, match=message):
        checkpoint.CheckpointWriter(tmp_path).save(1, STATE, **given)


# Damage -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved_runs(tmp_path_factory):
    """A directory with the checkpoints of steps 1 and 2, for tests to copy."""
    directory = tmp_path_factory.mktemp("runs")
    save_runs(directory, 1, 2, best=("accuracy", "max"))
    return directory


@pytest.fixture
def runs(saved_runs, tmp_path):
    return pathlib.Path(shutil.copytree(saved_runs, tmp_path / "runs"))


def flip_a_bit(path, rng):
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def test_step_of_a_damaged_checkpoint_can_be_saved_again(runs):
    for name in ("2", "2-2", "2-3"):
        flip_a_bit(runs / "2" / "run" / "metadata", random.Random(0))
        state, step = checkpoint.restore_newest(runs, make_run(0)[0])
        assert step == 1 and (runs / "damaged" / name / "default").exists()
        save_runs(runs, 2, best=("accuracy", "max"))
        assert checkpoint.all_steps(runs) == [1, 2] and checkpoint.best_step(runs) == 2
    state, step = checkpoint.restore_newest(runs, make_run(0)[0])
    assert_is_run(runs, 2, state)
    with ocp.CheckpointManager(runs) as manager:
        assert manager.all_steps() == [1, 2]


def test_restoring_a_damaged_step_raises_and_lists_the_files(runs, saved_runs):
    template = make_run(0)[0]
    (runs / "2" / "default" / "_METADATA").unlink()
    flip_a_bit(runs / "2" / "trees" / "manifest.ocdbt", random.Random(0))
    with pytest.raises(checkpoint.CheckpointError) as caught:
        checkpoint.restore(runs, 2, template)
    assert caught.value.steps == (2,) and caught.value.directory == runs
    lines = str(caught.value).splitlines()
    assert f"The checkpoint {runs}/2 is damaged:" == lines[0] and "  default/_METADATA is missing" in lines
    assert any(line.startswith("  trees/manifest.ocdbt has changed") for line in lines)
    with pytest.raises(checkpoint.CheckpointError, match="trees/manifest"):
        checkpoint.Checkpoint.at(runs, 2, "trees").trees(make_run(0)[2])
    assert checkpoint.Checkpoint.at(runs, 2, "run").run() == make_run(2)[1]  # This item is intact.
    assert (template["w"] == make_run(0)[0]["w"]).all()
    assert checkpoint.all_steps(runs) == [1, 2] and not (runs / "damaged").exists()  # Only restore_newest moves them.


def test_nothing_is_restored_or_moved_if_all_checkpoints_are_damaged(runs):
    for step in (1, 2):
        (runs / str(step) / "run" / "metadata").write_text("")
    with pytest.raises(checkpoint.CheckpointError, match="All checkpoints in .* are damaged") as caught:
        checkpoint.restore_newest(runs, make_run(0)[0])
    assert caught.value.steps == (2, 1) and str(caught.value).count("run/metadata has 0 bytes") == 2
    assert checkpoint.all_steps(runs) == [1, 2]


def test_checkpoint_of_a_different_model_is_not_damaged(runs):
    with pytest.raises(ValueError, match=r"w: float32\[64, 8\] -> float32\[4\]"):
        checkpoint.restore_newest(runs, {"w": jnp.zeros([4]), "key": jax.random.key(0)})
    assert checkpoint.all_steps(runs) == [1, 2] and checkpoint.restore_newest(runs, make_run(0)[0])[1] == 2
    assert checkpoint.restore_newest(runs / "nowhere", STATE) is None


@pytest.mark.parametrize("name", ["0003", "\u0663", "ckpt_3"])  # `int` reads the first two.
def test_directory_whose_name_is_not_exactly_a_step_is_no_checkpoint(runs, name):
    shutil.copytree(runs / "2", runs / name)
    assert checkpoint.all_steps(runs) == [1, 2]
    assert_is_run(runs, 2, checkpoint.restore_newest(runs, make_run(0)[0])[0])
    save_runs(runs, 4, keep=1)
    assert checkpoint.all_steps(runs) == [4] and (runs / name).exists()


def test_file_that_breaks_a_checkpoint_from_outside_is_named_and_nothing_is_moved(runs):
    (runs / "2" / "default" / "checkpoint").write_text("{}, a file that Orbax would read")
    with pytest.raises(ValueError, match=r"match their checksums. If there are others, remove them"):
        checkpoint.restore_newest(runs, make_run(0)[0])
    assert checkpoint.all_steps(runs) == [1, 2]


def test_checkpoint_without_read_permission_is_not_set_aside(runs):
    directory, user = pathlib.Path(tempfile.mkdtemp()), os.geteuid()
    shutil.copytree(runs, directory, dirs_exist_ok=True)
    (directory / "2" / "default" / "_METADATA").chmod(0)
    for path in [directory, *directory.rglob("*")] if user == 0 else []:
        os.chown(path, 65534, -1)
    os.seteuid(user or 65534)
    try:
        with pytest.raises(PermissionError, match=r"2/default/_METADATA") as caught:
            checkpoint.restore_newest(directory, make_run(0)[0])
    finally:
        os.seteuid(user)
    assert "Change its owner or its permissions" in caught.value.__notes__[0]
    assert checkpoint.all_steps(directory) == [1, 2]


def test_damaged_metrics_raise(runs):
    (runs / "1" / "metrics" / "metrics").write_text("{")
    with pytest.raises(checkpoint.CheckpointError, match="metrics/metrics has 1 bytes"):
        checkpoint.best_step(runs, ("accuracy", "max"))


def test_checkpoint_without_metrics_does_not_stop_a_run(runs, warnings_logged):
    shutil.rmtree(runs / "1" / "metrics")  # As if its deletion had been killed halfway.
    save_runs(runs, 3, best=("accuracy", "max"), keep=1)
    assert checkpoint.all_steps(runs) == [3] and checkpoint.best_step(runs) == 3
    assert len(warnings_logged()) == 1 and "damaged/1. A killed run may have been deleting it." in warnings_logged()[0]


def test_unreadable_unsealed_files_raise_from_the_orbax_error(tmp_path):
    for step in (1, 2):
        save(ocp.CheckpointManager(tmp_path), (step, STATE))
    (tmp_path / "2" / "default" / "manifest.ocdbt").write_text("")
    with pytest.raises(checkpoint.CheckpointError, match="default can't be read") as caught:
        checkpoint.restore(tmp_path, 2, STATE)
    assert caught.value.__cause__ is not None
    (tmp_path / "2" / "_CHECKPOINT_METADATA").write_text("{")
    with pytest.raises(checkpoint.CheckpointError, match="_CHECKPOINT_METADATA can't be read"):
        checkpoint.Checkpoint.at(tmp_path, 2).metadata()
    assert checkpoint.restore_newest(tmp_path, STATE)[1] == 1


# Failed saves -----------------------------------------------------------------------------------------


LARGE = {"w": jnp.asarray(np.random.default_rng(0).standard_normal(50_000), jnp.float32)}
SMALL = {"w": jnp.zeros([50_000])}
TOO_MUCH = {
    "state": {"state": LARGE},
    "run": {"state": SMALL, "run": {"text": "long " * 40_000}},
    "trees": {"state": SMALL, "trees": {"a": LARGE}},
    "metadata": {"state": SMALL, "metadata": {"text": "long " * 40_000}},
}


@pytest.mark.parametrize(
    ("kept", "surfaces_in"),
    [*[(kept, "wait") for kept in TOO_MUCH.values()], (TOO_MUCH["state"], "close"), (TOO_MUCH["state"], "save")],
    ids=[*TOO_MUCH, "raised by close", "raised by the next save"],
)
def test_failed_save_raises_once_and_can_be_retried(tmp_path, kept, surfaces_in):
    writer = checkpoint.CheckpointWriter(tmp_path)
    writer.save(1, SMALL)
    writer.wait()
    with limit_file_size(100_000), pytest.raises(checkpoint.CheckpointError) as caught:
        writer.save(2, **kept)
        writer.save(3, SMALL) if surfaces_in == "save" else getattr(writer, surfaces_in)()
    assert caught.value.steps == (2,) and caught.value.directory == tmp_path
    assert "Saving the checkpoint of step 2" in str(caught.value) and "File too large" in str(caught.value)
    assert {path.name for path in tmp_path.iterdir()} == {"1"}  # No leftovers.
    writer.wait()
    assert writer.save(2, **kept)
    writer.close()
    assert checkpoint.all_steps(tmp_path) == [1, 2] and seal.problems(tmp_path / "2") == []
    np.testing.assert_array_equal(checkpoint.restore(tmp_path, 2, SMALL)["w"], kept["state"]["w"])


@pytest.mark.parametrize("asynchronous", [True, False])
def test_failed_save_of_a_manager_names_the_step(tmp_path, asynchronous):
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=asynchronous)
    writer = checkpoint.CheckpointWriter(ocp.CheckpointManager(tmp_path, options=options))
    with limit_file_size(100_000), pytest.raises(checkpoint.CheckpointError, match="File too large") as caught:
        writer.save(2, LARGE)
        writer.wait()
    assert caught.value.steps == (2,)
    writer.save(2, LARGE)
    writer.close()
    np.testing.assert_array_equal(checkpoint.restore(tmp_path, 2, SMALL)["w"], LARGE["w"])


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_save_to_an_unwritable_directory_fails_at_once_and_leaks_no_thread(tmp_path, monkeypatch, code):
    writer = checkpoint.CheckpointWriter(tmp_path)
    writer.save(1, STATE)
    writer.wait()
    threads = threading.active_count()
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", raising(code))
        with pytest.raises(checkpoint.CheckpointError, match=f"step 2 in .*{os.strerror(code)}") as caught:
            writer.save(2, STATE)
        assert caught.value.steps == (2,)
    assert threading.active_count() <= threads
    writer.save(2, STATE)
    writer.close()
    assert checkpoint.all_steps(tmp_path) == [1, 2]


def move(directory):
    directory.rename(directory.parent / "moved")


def replace(directory):
    move(directory)
    (directory / "7").mkdir(parents=True)
    (directory / "7" / "_CHECKPOINT_METADATA").touch()


@pytest.mark.parametrize(
    ("lose", "surfaces_in"), [(move, "save"), (replace, "close"), (replace, "save"), (shutil.rmtree, "close")]
)
def test_nothing_is_saved_once_the_locked_directory_is_lost(tmp_path, lose, surfaces_in):
    directory, moved = tmp_path / "run", tmp_path / "moved"
    writer = checkpoint.CheckpointWriter(directory)
    with locked(directory):
        writer.save(1, STATE)
        writer.wait()
        lose(directory)
        with pytest.raises(checkpoint.CheckpointError, match="was moved, deleted or replaced") as caught:
            writer.save(2, STATE) if surfaces_in == "save" else writer.close()
    assert caught.value.steps == ({"save": 2, "close": 1}[surfaces_in],)
    assert checkpoint.all_steps(directory) == ([7] if lose is replace else [])
    assert checkpoint.all_steps(moved) == ([] if lose is shutil.rmtree else [1])


def test_directory_lost_during_a_save_is_detected_before_the_commit(tmp_path, monkeypatch):
    write = seal.write
    lose_it = lambda *args: (write(*args), (tmp_path / ".trainer.lock").unlink())
    monkeypatch.setattr(seal, "write", lose_it)
    writer = checkpoint.CheckpointWriter(tmp_path)
    with locked(tmp_path), pytest.raises(checkpoint.CheckpointError, match="was moved, deleted or replaced"):
        writer.save(1, STATE)
        writer.close()
    assert checkpoint.all_steps(tmp_path) == []


def test_prepare_directory_raises_on_a_full_disk(tmp_path):
    # As on a full disk, empty files can still be created.
    with limit_file_size(0), pytest.raises(OSError, match="Can't write to the directory"):
        files.prepare_directory(tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_next_save_removes_unfinished_ones(runs):
    # As late as possible: everything is written, and only the commit is missing.
    options = ocp.options.AsyncOptions(post_finalization_callback=raising(SystemExit()))
    options = ocp.CheckpointManagerOptions(async_options=options)
    manager = ocp.CheckpointManager(runs, options=options)
    manager.save(3, args=ocp.args.PyTreeSave(STATE))
    with pytest.raises(SystemExit):
        manager.wait_until_finished()
    manager.close()
    left = [path.name for path in runs.iterdir() if not path.name.isdigit()]
    assert len(left) == 1 and checkpoint.all_steps(runs) == [1, 2]
    save_runs(runs, 4)
    assert sorted(path.name for path in runs.iterdir()) == ["1", "2", "4"]


def test_a_link_named_like_an_unfinished_save_is_not_followed(runs):
    (runs / "3.orbax-checkpoint-tmp").symlink_to(runs / "2")
    with contextlib.suppress(checkpoint.CheckpointError):
        save_runs(runs, 3)
    assert_is_run(runs, 2, checkpoint.restore(runs, 2, make_run(0)[0]))


def test_a_writer_keeps_what_another_has_saved_in_its_directory(tmp_path, warnings_logged):
    one, two = (contextlib.closing(checkpoint.CheckpointWriter(tmp_path)) for _ in range(2))
    with one as one, two as two:
        for step in (1, 2):
            assert one.save(step, {"w": jnp.ones(2)})
            one.wait()
            assert not two.save(step, {"w": jnp.zeros(2)})
        assert one.save(3, {"w": jnp.ones(2)})  # A writer that has saved nothing deletes no save that is in progress.
        assert not two.save(1, {"w": jnp.zeros(2)})
    assert checkpoint.all_steps(tmp_path) == [1, 2, 3]
    told = [text for text in warnings_logged() if "already has" in text]  # Orbax warns if a save takes long.
    assert [text.split(",")[0][-1] for text in told] == ["1", "2", "1"]
    np.testing.assert_array_equal(checkpoint.restore(tmp_path, 2, {"w": jnp.zeros(2)})["w"], np.ones(2))


def test_write_probe_of_a_killed_process_is_removed_by_the_next(tmp_path, monkeypatch):
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(type(files.absolute(tmp_path)), "unlink", raising(KeyboardInterrupt()))
        files.prepare_directory(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    files.prepare_directory(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_state_with_different_empty_subtrees_is_restored(tmp_path):
    """For example, the optimizer may have an additional transformation without a state."""
    params = {"w": jnp.ones(3)}
    state = {"params": params, "nothing": {}, "opt_state": optax.adam(0.1).init(params)}
    action = CheckpointAction(tmp_path)
    action.save(1, state, None)
    action.close()
    other = {**state, "opt_state": (*state["opt_state"], optax.EmptyState())}
    for like in (state, other):
        np.testing.assert_array_equal(checkpoint.restore(tmp_path, 1, like)["params"]["w"], np.ones(3))


def test_states_of_different_structures_are_saved_by_one_writer(tmp_path):
    first, second = {"w": jnp.ones(2)}, {"w": jnp.ones(2), "v": {"x": jnp.zeros(3)}}
    save(tmp_path, (1, first), (2, second), (3, first))
    for step, state in ((1, first), (2, second), (3, first)):
        np.testing.assert_array_equal(checkpoint.restore(tmp_path, step, state)["w"], np.ones(2))
    with pytest.raises(ValueError, match=r"v/x: float32\[3\] -> \(none\)"):
        checkpoint.restore(tmp_path, 2, first)
    with contextlib.closing(checkpoint.CheckpointWriter(tmp_path)) as writer:
        writer.save(4, first)
        with pytest.raises(ValueError, match=r"the state .* two leaves v/x and v\.x: one of them would be lost"):
            writer.save(5, {"w": jnp.ones(2), "v": {"x": jnp.ones(1)}, "v.x": jnp.ones(1)})


PARTS_OF_A_CHECKPOINT = ("SEAL", "_CHECKPOINT_METADATA", "default", "run")


def short_run(directory, total=20):
    outer_loop = tiny.experiment(directory=directory, saves=every(steps=10), log_interval=every(steps=5))
    return outer_loop(tiny.STATE, tiny.BATCHES, train_total_steps=total, train_loop_steps=10)[0]


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole") / "run"
    return directory, short_run(directory)


@pytest.fixture
def copied_run(finished_run, tmp_path):
    return pathlib.Path(shutil.copytree(finished_run[0], tmp_path / "copy"))


@pytest.mark.parametrize("missing", [*((name,) for name in PARTS_OF_A_CHECKPOINT), PARTS_OF_A_CHECKPOINT], ids="+".join)
def test_checkpoint_with_a_missing_part_is_damaged(missing, finished_run, copied_run, assert_same):
    directory, state = copied_run, finished_run[1]
    for name in missing:
        path = directory / "20" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    template = examples.tiny_regression()[1]
    with pytest.raises(checkpoint.CheckpointError, match="is damaged"):
        checkpoint.restore(directory, 20, template)
    assert checkpoint.restore_newest(directory, template, quarantines=False)[1] == 10
    assert_same(short_run(directory), state)
    assert (directory / "damaged" / "20").exists() and checkpoint.all_steps(directory) == [10, 20]


def change_metadata(path, change):
    """Changes the metadata of a checkpoint, and seals it again."""
    about = json.loads((path / "SEAL").read_text().partition("\n")[2])["about"]
    change(about)
    seal.write(path, about, ["_CHECKPOINT_METADATA"])


def change_run(path, change):
    file = path / "run" / "metadata"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    change_metadata(path, lambda noted: None)


def test_checkpoint_of_a_different_format_raises_with_both_versions(copied_run):
    change_metadata(copied_run / "20", lambda noted: noted.update({"jaxloop/format": 99, "jaxloop/version": "9.9.9"}))
    expected = r"saved by jaxloop 9\.9\.9, does not contain what jaxloop \S+ expects .*the format 5 rather than 99"
    with pytest.raises(checkpoint.CheckpointError, match=expected):
        short_run(copied_run)
    # The state alone can be restored.
    assert checkpoint.restore_newest(copied_run, examples.tiny_regression()[1])[1] == 20


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda noted: noted["elapsed"].update(more=1), change_metadata),
        (lambda noted: noted.update(previous=[]), change_metadata),
        (lambda run: run["parts"]["data"].pop("passes"), change_run),
        (lambda run: run["parts"]["train"]["agenda"].pop("items"), change_run),
        (lambda run: run.update(kept_states=None), change_run),
    ],
)
def test_malformed_checkpoint_content_raises_checkpoint_error(change, where, copied_run):
    where(copied_run / "20", change)
    expected = r"saved by jaxloop \S+, does not contain what jaxloop \S+ exp"
    with pytest.raises(checkpoint.CheckpointError, match=expected):
        short_run(copied_run)
    if where is change_metadata:
        with pytest.raises(checkpoint.CheckpointError, match=expected):
            checkpoint.Checkpoint.at(copied_run, 20).elapsed()


def test_resuming_from_a_state_of_a_plain_manager_warns(tmp_path, warnings_logged):
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=ocp.args.PyTreeSave(tiny.STATE))
    short_run(tmp_path)
    assert any("contains only a train state" in text for text in warnings_logged())
