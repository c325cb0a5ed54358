"""Non-finite values are found in the compiled step, named, and kept out of checkpoints."""

import itertools
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from clu import metrics as clu_metrics
from programs import tiny
from programs.acts import Do, Record, saving

import jaxloop
from jaxloop import checkpoint, metrics
from jaxloop.models.function_step import FunctionStep
from jaxloop.step import nonfinite


class RegressionStep(tiny.Regression):
    def run(self, state, batch):
        state, outputs = super().run(state, batch)
        mean = clu_metrics.Average.from_model_output(outputs["loss"])
        return state, {**outputs, "ratio": 0.0 / batch["divisor"][0], "mean": mean}


STEP = tiny.make_step(RegressionStep)


def new_state(step=STEP):
    return step.initialize_model([1, 3])


def make(devices, data_parallel):
    """Returns a new step and its state."""
    step = tiny.make_step(RegressionStep, **({} if devices == 1 else {"partitioner": data_parallel(devices)}))
    return step, new_state(step)


def batches(number, bad=()):
    """Returns batches, of which those for the steps in `bad` contain a NaN."""
    copied = map(lambda batch: jax.tree.map(np.copy, batch), itertools.islice(itertools.cycle(tiny.BATCHES), number))
    made = [{**batch, "divisor": np.ones(8, np.float32)} for batch in copied]
    for step_num in bad:
        made[step_num - 1]["x"][0, 0] = np.nan
    return made


NAMES = ("outputs/loss", "params/bias", "params/kernel")


@pytest.mark.parametrize(("devices", "bad"), [(1, 1), (1, 32), (1, 33), (1, 75), (8, 6)])
def test_raise_names_the_first_bad_step_and_its_bad_values(devices, bad, data_parallel):
    step, state = make(devices, data_parallel)
    loop = jaxloop.TrainLoop(step, nan_policy="raise")
    message = rf"Step {bad} is the first.*outputs/loss.*nan_policy='skip'"
    with pytest.raises(nonfinite.NonFiniteError, match=message) as e:
        loop(state, iter(batches(78, {bad, bad + 3})), num_steps=75)
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
    loop, bad = jaxloop.TrainLoop(step, nan_policy="skip"), {3, 40, 45}
    data = batches(45, bad)
    state, outputs = loop(state, iter(data), num_steps=45)
    assert int(state.step) == 45 and outputs["jaxloop/skipped_steps"] == 3
    told = [text for text in warnings_logged() if "skipped" in text]
    assert len(told) == 1 and "skipped 3 steps" in told[0] and "step 3: outputs/loss" in told[0]
    assert [i + 1 for i, n in enumerate(outputs.num_examples) if n == 0] == sorted(bad)
    good = [batch for number, batch in enumerate(data, 1) if number not in bad]
    other_state, others = jaxloop.TrainLoop(step, nan_policy="skip")(new_state(step), iter(good), num_steps=42)
    assert_same((state.params, state.opt_state), (other_state.params, other_state.opt_state))
    assert "jaxloop/skipped_steps" not in others
    one, two = metrics.summarize(outputs), metrics.summarize(others)
    assert one["loss"] == two["loss"] and one["mean"] == pytest.approx(two["mean"])


def test_a_skipped_step_changes_only_the_step_count(assert_same):
    loop = jaxloop.TrainLoop(STEP, nan_policy="skip")
    state, _ = loop(new_state(), batches(2), num_steps=2)
    state = state.replace(collections={"key": jax.random.key(1), "small": jnp.float32(-0.0)})
    before = jax.tree.map(jnp.copy, state)
    after, outputs = loop(state, batches(1, {1}), num_steps=1)
    assert_same(jax.tree.map(_data, before.replace(step=after.step)), jax.tree.map(_data, after))
    assert int(after.step) == 3 and np.isnan(outputs["loss"][0]) and state.params["bias"].is_deleted()


def _data(leaf):
    return np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf).tobytes()


def test_outputs_other_than_losses_may_be_nan():
    data = batches(3)
    data[1]["divisor"][:] = 0
    _, outputs = jaxloop.TrainLoop(STEP, nan_policy="raise")(new_state(), data, num_steps=3)
    assert np.isnan(outputs["ratio"][1])
    _, outputs = STEP(new_state(), data[0])
    assert sorted(outputs or {}) == ["loss", "mean", "ratio"]  # Without the flags of the loop.


def test_another_error_mentions_the_bad_state_and_does_not_save_it(tmp_path):
    def failing():
        yield from batches(9, {8})
        raise OSError("the disk is gone")

    outer_loop = saving(tmp_path, jaxloop.every(steps=5), STEP, nan_policy="raise")
    with pytest.raises(OSError, match="disk") as raised:
        outer_loop(new_state(), train_dataset=failing(), train_total_steps=20)
    assert checkpoint.all_steps(tmp_path) == [5] and outer_loop.rescued_state is None
    assert any("Step 8 is the first" in note for note in raised.value.__notes__)


@pytest.mark.parametrize(("policy", "most"), [("ignore", 1), ("raise", 5), ("skip", 5)])
def test_the_check_costs_one_read_per_32_steps(policy, most, reads):
    loop = jaxloop.TrainLoop(STEP, nan_policy=policy)
    state, _ = loop(new_state(), batches(1), num_steps=1)
    reads.clear()
    loop(state, iter(batches(100)), num_steps=100)
    assert reads.count("fetch") <= most


@pytest.mark.parametrize("steps_per_dispatch", [1, 16])
def test_raise_comes_within_96_steps_even_if_nothing_is_due(steps_per_dispatch):
    read, made = [], batches(41, bad=[41])

    def data():
        while True:
            read.append(1)
            yield made[min(len(read), 41) - 1]

    options = {"steps_per_dispatch": steps_per_dispatch, "max_steps_in_flight": 64}
    loop = jaxloop.TrainLoop(STEP, nan_policy="raise", stat_names=[], **options)
    with pytest.raises(FloatingPointError) as raised:
        jaxloop.OuterLoop(loop, log_interval=jaxloop.schedules.never())(new_state(), data(), 2000)
    assert raised.value.step_num == 41 and len(read) <= 41 + 96


def test_an_unknown_policy_is_rejected():
    with pytest.raises(ValueError, match="nan_policy must be one of 'raise', 'skip' and 'ignore', got 'stop'"):
        jaxloop.TrainLoop(STEP, nan_policy="stop")  # pyright: ignore


# Whole runs -------------------------------------------------------------------------------------------


def run_whole(directory, policy, data, *more_actions):
    outer_loop = saving(directory, jaxloop.every(steps=5), STEP, *more_actions, nan_policy=policy)
    return outer_loop(new_state(), data, 12, train_loop_steps=6)


@pytest.mark.parametrize("bad", [1, 6, 10])
def test_raise_keeps_the_checkpoints_before_the_bad_step(bad, tmp_path):
    with pytest.raises(nonfinite.NonFiniteError) as caught:
        run_whole(tmp_path, "raise", batches(12, {bad}))
    assert (caught.value.step_num, caught.value.names) == (bad, NAMES)
    saved = checkpoint.all_steps(tmp_path)
    assert saved == [5, 10][: (bad - 1) // 5]
    restored = [checkpoint.restore(tmp_path, number, new_state()) for number in saved]
    assert all(np.isfinite(state.params["kernel"]).all() for state in restored)


@pytest.mark.parametrize("bad", [6, 10])
def test_skip_continues_after_the_bad_step_and_ignore_spoils_the_state(bad, tmp_path, assert_same):
    data = batches(12, {bad})
    state, outputs = run_whole(tmp_path / "skip", "skip", data)
    assert int(state.step) == 12 and outputs.get("jaxloop/skipped_steps", 0) == (bad > 6)
    others, _ = jaxloop.TrainLoop(STEP)(new_state(), data[: bad - 1] + data[bad:], num_steps=11)
    assert_same((state.params, state.opt_state), (others.params, others.opt_state))
    state, _ = run_whole(tmp_path / "ignore", "ignore", data)
    assert int(state.step) == 12 and np.isnan(state.params["kernel"]).all()


@pytest.mark.parametrize("interrupted_at", [5, 8])
def test_a_resumed_run_with_skips_matches_an_uninterrupted_one(interrupted_at, tmp_path, assert_same):
    data, interrupt = batches(12, {4, 7, 10}), lambda **_: signal.raise_signal(signal.SIGINT)
    whole, _ = run_whole(tmp_path / "whole", "skip", data)
    broken, _ = run_whole(tmp_path / "resumed", "skip", data, Do(interrupt, jaxloop.at(steps=interrupted_at)))
    assert int(broken.step) == interrupted_at
    resumed, _ = run_whole(tmp_path / "resumed", "skip", data)
    assert_same(whole, resumed)
    rows = [jaxloop.History.load(tmp_path / name / "history.jsonl") for name in ("whole", "resumed")]
    losses = [each.collect("train.loss") for each in rows]
    assert losses[0][-1] == losses[1][-1] and np.isfinite(losses[0]).all()


# Detection --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "value", "size"),
    [(jnp.float32, np.nan, 200), (jnp.float32, -np.inf, 1), (jnp.bfloat16, np.inf, 64), (jnp.bfloat16, np.nan, 1)],
)
def test_one_bad_value_is_found_at_any_position(size, value, dtype):
    """The largest finite values are accepted; a bad value is found at the start, middle and end."""

    def add(state, batch):
        return {**state, "big": state["big"] + batch["x"], "step": state["step"] + 1}, None

    step, others = FunctionStep(add, train=True), {f"a{number}": np.zeros(2) for number in range(99)}
    loop = lambda *args: jaxloop.TrainLoop(step, nan_policy="raise")(*args)
    zeros, most = np.zeros(size, np.float32), np.full(size, float(jnp.finfo(dtype).max))
    zeros, most = zeros.astype(dtype), most.astype(dtype)
    loop({**others, "big": zeros, "step": 0}, [{"x": most}, {"x": (-2 * (most / 2)).astype(dtype)}, {"x": zeros}], 3)
    for position in {0, size // 2, size - 1}:
        x = zeros.copy()
        x[position] = value
        with pytest.raises(nonfinite.NonFiniteError) as raised:
            loop({**others, "big": zeros, "step": 0}, [{"x": zeros}, {"x": x}], 2)
        assert (raised.value.step_num, raised.value.names) == (2, ("big",))


def test_skipped_steps_are_counted_since_the_last_call_of_an_action():
    skipped = lambda step_num, outputs, **_: (step_num, outputs.get("jaxloop/skipped_steps", 0))
    record = Record(jaxloop.every(steps=20), skipped)
    loop = jaxloop.TrainLoop(STEP, end_actions=[record], nan_policy="skip")
    jaxloop.OuterLoop(loop)(new_state(), iter(batches(60, {3, 23, 38, 41})), 60, 10)
    assert record.seen == [(20, 1), (40, 2), (60, 1)]
