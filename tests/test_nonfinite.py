"""Non-finite values are found in the compiled step, named, and kept out of checkpoints."""

import json
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from clu import metrics as clu_metrics
from flax import linen as nn
from programs.acts import Do, Record

import jaxloop
from jaxloop import checkpoint, metrics
from jaxloop.models.function_step import FunctionStep
from jaxloop.step import nonfinite


class RegressionStep(jaxloop.Step):
    reports_metrics = False

    def run(self, state, batch):
        def loss_fn(params):
            predicted = state.apply_fn({"params": params}, batch["x"])
            return jnp.mean((predicted - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        outputs = {"loss": loss, "ratio": 0.0 / batch["divisor"][0]}
        if self.reports_metrics:
            outputs["mean"] = clu_metrics.Average.from_model_output(loss)
        return state.apply_gradients(grads=grads), outputs


def make(devices, data_parallel, **options):
    placed = {} if devices == 1 else {"partitioner": data_parallel(devices)}
    step = RegressionStep(jax.random.key(0), nn.Dense(2), optax.sgd(0.1, momentum=0.9), train=True, **placed, **options)
    return step, step.initialize_model([1, 3])


def batches(number, bad=()):
    """Returns batches, of which those for the steps in `bad` contain a NaN."""
    rng = np.random.default_rng(0)
    made = []
    for step_num in range(1, number + 1):
        x = rng.normal(size=(8, 3)).astype(np.float32)
        if step_num in bad:
            x[0, 0] = np.nan
        made.append({"x": x, "y": np.ones([8, 2], np.float32), "divisor": np.ones([8], np.float32)})
    return made


NAMES = ("outputs/loss", "params/bias", "params/kernel")


@pytest.fixture(scope="module")
def made():
    """A cache of steps, so that each is compiled once for all tests."""
    return {}


@pytest.mark.parametrize(("devices", "bad"), [(1, 1), (1, 5), (1, 32), (1, 33), (1, 70), (1, 75), (8, 6), (8, 75)])
def test_raise_names_the_first_bad_step_and_its_bad_values(devices, bad, data_parallel, made):
    if devices not in made:
        made[devices] = make(devices, data_parallel)[0]
    step = made[devices]
    loop = jaxloop.TrainLoop(step, nan_policy="raise")
    message = rf"Step {bad} is the first.*outputs/loss.*nan_policy='skip'"
    with pytest.raises(nonfinite.NonFiniteError, match=message) as e:
        loop(step.initialize_model([1, 3]), iter(batches(75, {bad, bad + 3})), num_steps=75)
    assert (e.value.step_num, e.value.names) == (bad, NAMES)
    assert isinstance(e.value, FloatingPointError) and loop.rescued_state is None


def test_nan_with_a_weight_of_zero_is_named_as_a_cause_of_nan_gradients(warnings_logged):
    def loss(params, batch, labels):
        return jaxloop.Weighted((batch["x"] @ params["w"] - labels) ** 2, batch["is_real"])

    as_they_are = lambda params, batch: loss(params, batch, batch["y"])
    replaced = lambda params, batch: loss(params, batch, jnp.where(batch["is_real"], batch["y"], 0))
    batch = {"x": np.ones([4, 3], np.float32), "y": np.float32([1, 2, np.nan, 4]), "is_real": np.arange(4) != 2}
    params = {"w": np.zeros(3, np.float32)}
    make_step = lambda loss: jaxloop.LossStep(jax.random.key(0), params, optax.sgd(0.1), train=True, loss=loss)
    step = make_step(as_they_are)
    loop = jaxloop.TrainLoop(step, nan_policy="raise")
    message = r"infinity: params/w, but no loss\. .* labels = jnp\.where\(mask, labels, 0\)"
    with pytest.raises(nonfinite.NonFiniteError, match=message):
        loop(step.initialize_model(), [batch])
    jaxloop.OuterLoop(jaxloop.TrainLoop(step))(step.initialize_model(), [batch] * 3)  # By default, a warning follows.
    assert any("NaN in its last loop: loss. TrainLoop(nan_policy='raise')" in text for text in warnings_logged())
    step = make_step(replaced)
    state, _ = jaxloop.TrainLoop(step, nan_policy="raise")(step.initialize_model(), [batch] * 3)
    assert np.isfinite(state.params["w"]).all()


@pytest.mark.parametrize("devices", [1, 8])
def test_skip_discards_the_update_and_counts_it(devices, data_parallel, assert_same, warnings_logged):
    step, state = make(devices, data_parallel)
    step.reports_metrics = devices == 1
    bad = {3, 40, 45}
    data = batches(45, bad)
    state, outputs = jaxloop.TrainLoop(step, nan_policy="skip")(state, iter(data), num_steps=45)
    assert int(state.step) == 45 and outputs["jaxloop/skipped_steps"] == 3
    told = [text for text in warnings_logged() if "skipped" in text]
    assert len(told) == 1 and "skipped 3 steps" in told[0] and "step 3: outputs/loss" in told[0]
    assert [i + 1 for i, n in enumerate(outputs.num_examples) if n == 0] == sorted(bad)
    good = [batch for number, batch in enumerate(data, 1) if number not in bad]
    other_state = step.initialize_model([1, 3])
    other_state, others = jaxloop.TrainLoop(step, nan_policy="skip")(other_state, iter(good), num_steps=42)
    assert_same((state.params, state.opt_state), (other_state.params, other_state.opt_state))
    assert "jaxloop/skipped_steps" not in others
    one, two = metrics.summarize(outputs), metrics.summarize(others)
    assert one["loss"] == two["loss"] and one.get("mean") == pytest.approx(two.get("mean"))


def test_a_skipped_step_changes_only_the_step_count(data_parallel, assert_same):
    step, state = make(1, data_parallel)
    loop = jaxloop.TrainLoop(step, nan_policy="skip")
    state, _ = loop(state, batches(2), num_steps=2)
    state = state.replace(collections={"key": jax.random.key(1), "small": jnp.float32(-0.0)})
    before = jax.tree.map(jnp.copy, state)
    after, outputs = loop(state, batches(1, {1}), num_steps=1)
    assert_same(jax.tree.map(_data, before.replace(step=after.step)), jax.tree.map(_data, after))
    assert int(after.step) == 3 and np.isnan(outputs["loss"][0]) and state.params["bias"].is_deleted()


def _data(leaf):
    return np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf).tobytes()


def test_loops_with_different_policies_can_share_a_step(data_parallel):
    step, state = make(1, data_parallel)
    for policy in ("skip", "ignore", "skip"):
        state, _ = jaxloop.TrainLoop(step, nan_policy=policy)(state, batches(2), num_steps=2)
    with pytest.raises(FloatingPointError):
        jaxloop.TrainLoop(step, nan_policy="raise")(state, batches(2, {2}), num_steps=2)
    _, outputs = step(step.initialize_model([1, 3]), batches(1, {1})[0])
    assert sorted(outputs or {}) == ["loss", "ratio"]


def test_outputs_other_than_losses_may_be_nan(data_parallel):
    step, state = make(1, data_parallel)
    data = batches(3)
    data[1]["divisor"][:] = 0
    _, outputs = jaxloop.TrainLoop(step, nan_policy="raise")(state, data, num_steps=3)
    assert np.isnan(outputs["ratio"][1])


def test_another_error_mentions_the_bad_state_and_does_not_save_it(data_parallel, tmp_path):
    def failing():
        yield from batches(9, {8})
        raise OSError("the disk is gone")

    step, state = make(1, data_parallel)
    action = jaxloop.CheckpointAction(tmp_path, interval=jaxloop.every(steps=5))
    outer_loop = jaxloop.OuterLoop(jaxloop.TrainLoop(step, end_actions=[action], nan_policy="raise"))
    with pytest.raises(OSError, match="disk") as raised:
        outer_loop(state, train_dataset=failing(), train_total_steps=20)
    assert checkpoint.all_steps(tmp_path) == [5] and outer_loop.rescued_state is None
    assert any("Step 8 is the first" in note for note in raised.value.__notes__)


def test_the_check_costs_one_read_per_chunk(data_parallel, monkeypatch):
    def count(policy):
        step, state = make(1, data_parallel)
        loop = jaxloop.TrainLoop(step, nan_policy=policy)
        state, _ = loop(state, batches(1), num_steps=1)
        reads, fetch = [], metrics.fetch
        with monkeypatch.context() as patched:
            patched.setattr(metrics, "fetch", lambda tree: reads.append(tree) or fetch(tree))
            loop(state, iter(batches(100)), num_steps=100)
        return len(reads)

    assert count("ignore") == 1  # At the end.
    assert count("raise") == count("skip") <= 1 + 100 / 32 + 1


@pytest.mark.parametrize("steps_per_dispatch", [1, 16])
def test_raise_comes_within_96_steps_even_if_nothing_is_due(steps_per_dispatch, data_parallel):
    read, made = [], batches(41, bad=[41])

    def data():
        while True:
            read.append(1)
            yield made[min(len(read), 41) - 1]

    step, state = make(1, data_parallel)
    options = {"steps_per_dispatch": steps_per_dispatch, "max_steps_in_flight": 64}
    loop = jaxloop.TrainLoop(step, nan_policy="raise", stat_names=[], **options)
    with pytest.raises(FloatingPointError) as raised:
        jaxloop.OuterLoop(loop, log_interval=jaxloop.schedules.never())(state, data(), 2000)
    assert raised.value.step_num == 41 and len(read) <= 41 + 96


def test_an_unknown_policy_is_rejected(data_parallel):
    with pytest.raises(ValueError, match="nan_policy must be one of 'raise', 'skip' and 'ignore', got 'stop'"):
        jaxloop.TrainLoop(make(1, data_parallel)[0], nan_policy="stop")  # pyright: ignore


# Whole runs -------------------------------------------------------------------------------------------


def run_whole(step, directory, policy, data, total=12, actions=()):
    actions = [jaxloop.CheckpointAction(directory, interval=jaxloop.every(steps=5)), *actions]
    train_loop = jaxloop.TrainLoop(step, end_actions=actions, nan_policy=policy)
    outer_loop = jaxloop.OuterLoop(train_loop, checkpoint_spec=jaxloop.CheckpointSpec(directory))
    try:
        state, outputs = outer_loop(step.initialize_model([1, 3]), data, total, train_loop_steps=6)
    except nonfinite.NonFiniteError as error:
        return None, error
    return state, outputs


@pytest.mark.parametrize("policy", ["raise", "skip", "ignore"])
@pytest.mark.parametrize("bad", [1, 6, 10])
def test_each_policy_at_three_moments_of_a_run(bad, policy, tmp_path, data_parallel, made, assert_same):
    step = made.setdefault(1, make(1, data_parallel)[0])
    data = batches(12, {bad})
    state, came = run_whole(step, tmp_path, policy, data)
    saved = checkpoint.all_steps(tmp_path)
    if policy == "raise":
        assert (came.step_num, came.names) == (bad, NAMES)
        assert saved == [5, 10][: (bad - 1) // 5]
        for number in saved:
            assert np.isfinite(
                checkpoint.restore(tmp_path, number, step.initialize_model([1, 3])).params["kernel"]
            ).all()
    elif policy == "skip":
        assert int(state.step) == 12 and came.get("jaxloop/skipped_steps", 0) == (bad > 6)
        others, _ = jaxloop.TrainLoop(step)(step.initialize_model([1, 3]), data[: bad - 1] + data[bad:], num_steps=11)
        assert_same((state.params, state.opt_state), (others.params, others.opt_state))
    else:
        assert int(state.step) == 12 and np.isnan(state.params["kernel"]).all()


@pytest.mark.parametrize("interrupted_at", [5, 8, 10])
def test_a_resumed_run_with_skips_matches_an_uninterrupted_one(
    interrupted_at, tmp_path, data_parallel, made, assert_same
):
    step, data = made.setdefault(1, make(1, data_parallel)[0]), batches(12, {4, 7, 10})
    whole, _ = run_whole(step, tmp_path / "whole", "skip", data)
    broken, _ = run_whole(
        step,
        tmp_path / "resumed",
        "skip",
        data,
        actions=[Do(lambda **_: signal.raise_signal(signal.SIGINT), jaxloop.at(steps=interrupted_at))],
    )
    assert int(broken.step) == interrupted_at
    resumed, _ = run_whole(step, tmp_path / "resumed", "skip", data)
    assert_same(whole, resumed)
    rows = [(tmp_path / name / "history.jsonl").read_text() for name in ("whole", "resumed")]
    losses = [[json.loads(row)["logs"]["train"]["loss"] for row in each.splitlines()] for each in rows]
    assert losses[0][-1] == losses[1][-1] and np.isfinite(losses[0]).all()


# Detection --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("size", [1, 64, 200])
def test_one_bad_value_is_found_at_any_position(size, value, dtype, made):
    """The largest finite values are accepted; a bad value is found at the start, middle and end."""
    name = size, jnp.dtype(dtype).name

    def add(state, batch):
        return {"big": state["big"] + batch["x"], "step": state["step"] + 1}, None

    if name not in made:
        made[name] = FunctionStep(add, train=True)
    loop = lambda *args: jaxloop.TrainLoop(made[name], nan_policy="raise")(*args)
    zeros, most = np.zeros(size, np.float32), np.full(size, float(jnp.finfo(dtype).max))
    zeros, most = zeros.astype(dtype), most.astype(dtype)
    loop({"big": zeros, "step": 0}, [{"x": most}, {"x": (-2 * (most / 2)).astype(dtype)}, {"x": zeros}], 3)
    for position in {0, size // 2, size - 1}:
        x = zeros.copy()
        x[position] = value
        with pytest.raises(nonfinite.NonFiniteError) as raised:
            loop({"big": zeros, "step": 0}, [{"x": zeros}, {"x": x}], 2)
        assert (raised.value.step_num, raised.value.names) == (2, ("big",))


def test_the_bad_leaf_among_many_is_named():
    def add(state, batch):
        return {**state, "p77": state["p77"] + batch["x"]}, None

    step = FunctionStep(add, train=True)
    state = {f"p{i}": jnp.zeros([2]) for i in range(100)}
    with pytest.raises(nonfinite.NonFiniteError) as raised:
        jaxloop.TrainLoop(step, nan_policy="raise")(state, [{"x": np.full([2], np.inf, np.float32)}], num_steps=1)
    assert raised.value.names == ("p77",)


def loss_step(data_parallel):
    loss = lambda outputs, batch: jnp.mean((outputs - batch["y"]) ** 2, axis=-1)
    return jaxloop.LossStep(jax.random.key(0), nn.Dense(2), optax.sgd(0.1), train=True, loss=loss)


def annotated_step(data_parallel):
    init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    placed = jaxloop.partition.SPMDPartitioner(mesh, "data")
    return RegressionStep(jax.random.key(0), nn.Dense(2, kernel_init=init), optax.sgd(0.1), placed, train=True)


@pytest.mark.parametrize("make_step", [loss_step, annotated_step])
def test_other_steps_and_layouts_are_checked_too(make_step, data_parallel, assert_same):
    step = make_step(data_parallel)
    new_state = lambda: step.initialize_model([1, 3])
    with pytest.raises(nonfinite.NonFiniteError) as raised:
        jaxloop.TrainLoop(step, nan_policy="raise")(new_state(), batches(5, {3}), num_steps=5)
    assert raised.value.step_num == 3 and "outputs/loss" in raised.value.names
    state, outputs = jaxloop.TrainLoop(step, nan_policy="skip")(new_state(), batches(5, {3}), num_steps=5)
    data = batches(5)
    others, _ = jaxloop.TrainLoop(step)(new_state(), data[:2] + data[3:], num_steps=4)
    assert outputs["jaxloop/skipped_steps"] == 1
    assert_same(state.params, others.params)


def test_skipped_steps_are_counted_since_the_last_call_of_an_action(data_parallel):
    skipped = lambda step_num, outputs, **_: (step_num, outputs.get("jaxloop/skipped_steps", 0))
    record = Record(jaxloop.every(steps=20), skipped)
    step, state = make(1, data_parallel)
    loop = jaxloop.TrainLoop(step, end_actions=[record], nan_policy="skip")
    jaxloop.OuterLoop(loop)(state, iter(batches(60, {3, 23, 38, 41})), 60, 10)
    assert record.seen == [(20, 1), (40, 2), (60, 1)]
