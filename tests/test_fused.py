"""Several steps per dispatch give the same results as single steps, and actions and errors keep their exact step."""

import itertools
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from clu import metrics as clu_metrics
from flax import linen as nn
from programs import whole_run
from programs.acts import Record, saving
from programs.models import batch_of
from programs.whole_run import assert_resumed_exactly, copy_until

import jaxloop
from jaxloop import every
from jaxloop.engine import program
from jaxloop.step import nonfinite

pytestmark = pytest.mark.usefixtures("compile_fast")


class FusableStep(jaxloop.Step):
    """A noisy regression that reports outputs of every kind and counts how often `run` is traced."""

    traces = 0

    def begin(self, state, batch):
        return state, {"x": batch["x"] * np.float32(2), "y": batch["y"]}

    def run(self, state, batch):
        self.traces += 1
        noise = 0.1 * jax.random.normal(self.prng_key(state.step), batch["y"].shape)
        loss_fn = lambda params: ((state.apply_fn({"params": params}, batch["x"]) - batch["y"] + noise) ** 2).mean()
        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        outputs = {
            "loss": loss,
            "step": state.step,
            "rows": batch["x"][:, 0],
            "nested": {"norm": optax.tree.norm(grads)},
            "mean": clu_metrics.Average.from_model_output(batch["x"][:, 0]),
            "seen": clu_metrics.CollectingMetric.from_outputs(("y",)).from_model_output(y=batch["y"]),
        }
        return state.apply_gradients(grads=grads), outputs


def make_step(partitioner=None, cls=FusableStep, **options):
    placed = {} if partitioner is None else {"partitioner": partitioner}
    return cls(jax.random.key(0), nn.Dense(1), optax.sgd(0.01, momentum=0.9), train=True, **placed, **options)


def train(steps_per_dispatch, data, num_steps=None, step=None, interval=None, **options):
    step = step or make_step()
    what = lambda state, outputs, step_num, **_: (step_num, int(state.step), outputs["step"], outputs.num_examples)
    note = Record(every(steps=7) if interval is None else interval, what)
    loop = jaxloop.TrainLoop(step, end_actions=[note], steps_per_dispatch=steps_per_dispatch, **options)
    state, outputs = loop(step.initialize_model([1, 3]), data, num_steps)
    return state, outputs, note.seen, step


@pytest.mark.parametrize(("at_once", "devices"), [(5, 1), (32, 8)])
def test_fused_steps_match_single_steps(at_once, devices, data_parallel):
    placed = None if devices == 1 else data_parallel(devices)
    data = [batch_of(number) for number in range(75)]
    one, outputs, noted, _ = train(1, data, 70, make_step(placed))
    other, fused_outputs, fused_noted, step = train(at_once, data, 70, make_step(placed))
    assert fused_noted == noted and [step for step, *_ in noted] == list(range(7, 71, 7))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), one.params, other.params)
    assert list(fused_outputs) == list(outputs) and fused_outputs.num_examples == outputs.num_examples == [8] * 70
    assert [int(n) for n in fused_outputs["step"]] == list(range(70))
    assert {type(loss) for loss in fused_outputs["loss"]} == {np.float32}
    np.testing.assert_allclose(fused_outputs["loss"], outputs["loss"], rtol=1e-4)
    np.testing.assert_array_equal(fused_outputs["rows"], outputs["rows"])
    assert [*fused_outputs["nested"][3]] == ["norm"]
    one_mean, other_mean = (jaxloop.summarize({"mean": each["mean"]}) for each in (outputs, fused_outputs))
    assert one_mean == other_mean  # Bit-identical.
    np.testing.assert_array_equal(
        fused_outputs["seen"][0].compute()["y"], np.concatenate([batch["y"] for batch in data[:70]])
    )
    assert step.traces == (2 if at_once < 7 else 1)  # Once for fused steps and once for a single step.


@pytest.fixture
def dispatches(monkeypatch):
    """The names of the compiled functions called during the test."""
    names, partition = [], jaxloop.SingleDevicePartitioner.partition

    def counting(self, fn, **kwargs):
        compiled = partition(self, fn, **kwargs)
        return lambda *args: names.append(fn.__name__) or compiled(*args)

    monkeypatch.setattr(jaxloop.SingleDevicePartitioner, "partition", counting)
    return names


def test_fused_steps_take_one_dispatch(dispatches):
    train(32, (batch_of(number) for number in range(200)), 100, interval=every(steps=50))
    assert len(dispatches) == 2 * (1 + 50 - 32) and dispatches.count("fused") == 2


@pytest.mark.parametrize("number_of_batches", [0, 31, 32, 70])
def test_the_dataset_may_end_anywhere(number_of_batches):
    data = (batch_of(number) for number in range(number_of_batches))
    state, outputs, _, _ = train(32, data, interval=every(steps=1000))
    assert int(state.step) == number_of_batches == len(outputs.get("loss", ()))


def test_the_dataset_may_end_where_a_time_schedule_fires(set_clock):
    set_clock(itertools.count(0.0, 1.0).__next__)
    state, outputs, noted, _ = train(8, (batch_of(number) for number in range(13)), interval=every(time=1))
    assert int(state.step) == 13 == len(outputs["loss"]) and noted[-1][0] == 13


def test_a_batch_with_a_different_shape_runs_alone():
    sizes = [4 if number in (9, 30) else 8 for number in range(40)]
    state, outputs, noted, step = train(4, [batch_of(number, rows) for number, rows in enumerate(sizes)])
    assert int(state.step) == 40 and outputs.num_examples == sizes and step.traces == 3
    assert [step for step, *_ in noted] == [7, 14, 21, 28, 35]


@pytest.mark.parametrize(("place", "fails_at"), [("data", 0), ("begin", 8), ("data", 21)])
def test_an_exception_is_raised_at_its_step(place, fails_at):
    def data():
        for number in range(100):
            if place == "data" and number == fails_at:
                raise OSError("the disk is gone")
            yield {**batch_of(number), "number": np.full([8], number)}

    class Failing(FusableStep):
        def begin(self, state, batch):
            if place == "begin" and batch["number"][0] == fails_at:
                raise OSError("the disk is gone")
            return super().begin(state, batch)

    step = make_step(cls=Failing)
    loop = jaxloop.TrainLoop(step, steps_per_dispatch=8)
    iterator = data()
    with pytest.raises(OSError, match="the disk is gone") as caught:
        loop(step.initialize_model([1, 3]), iterator, 50)
    assert f"after step {fails_at}" in caught.value.__notes__[-1]
    assert int(loop.rescued_state.step) == fails_at  # pyright: ignore[reportOptionalMemberAccess]


@pytest.mark.parametrize(("policy", "bad"), [("raise", 20), ("raise", 33), ("skip", 32)])
def test_non_finite_values_are_found_at_their_step(bad, policy):
    data = [batch_of(number) for number in range(64)]
    data[bad - 1]["x"][0, 0] = np.nan
    if policy == "raise":
        with pytest.raises(nonfinite.NonFiniteError) as caught:
            train(32, data, interval=every(steps=40), nan_policy=policy)
        assert caught.value.step_num == bad and "outputs/loss" in caught.value.names
    else:
        state, outputs, _, _ = train(32, data, interval=every(steps=40), nan_policy=policy)
        assert outputs["jaxloop/skipped_steps"] == 1 and outputs.num_examples[bad - 1] == 0
        assert np.isfinite(state.params["kernel"]).all() and int(state.step) == 64


def test_resuming_from_any_checkpoint_matches_an_uninterrupted_run(tmp_path):
    options = {"source": "list", "program": whole_run.make_program(), "steps_per_dispatch": 3}
    options |= {"loop_steps": None, "save": 5, "total": 12}
    whole = whole_run.run(tmp_path / "whole", **options)
    assert int(whole["step"]) == 12 or whole["history"]
    for step in (5, 10):
        resumed = whole_run.run(copy_until(step, tmp_path / "whole", tmp_path / str(step)), **options, saves=False)
        assert_resumed_exactly(resumed, whole, step)


@pytest.mark.xfail(jax.__version_info__ < (0, 10), reason="XLA rounded differently inside a scan.")
def test_ctrl_c_ends_a_run_after_the_dispatch_and_resuming_is_bit_identical(tmp_path):
    options = {"source": "index", "program": whole_run.make_program(), "steps_per_dispatch": 3, "save": 100}
    options |= {"loop_steps": None, "total": 20}
    whole = whole_run.run(tmp_path / "whole", **options)

    def watch(place, number):
        if (place, number) == ("step", 4):
            signal.raise_signal(signal.SIGINT)

    broken = whole_run.run(tmp_path / "broken", watch=watch, more_actions=(), **options)
    assert broken["step"] == 5
    resumed = whole_run.run(tmp_path / "broken", **options)
    assert (resumed["state"], resumed["ids"]) == (whole["state"], whole["ids"][5:])


class WithEnd(FusableStep):
    def end(self, state, outputs):
        return state, outputs


def test_steps_that_cannot_be_fused_raise():  # More of them are in test_hooks.py.
    with pytest.raises(ValueError, match="WithEnd.*it has its own `end`"):
        jaxloop.EvalLoop(make_step(cls=WithEnd), steps_per_dispatch=4)
    with pytest.raises(ValueError, match="it has actions, which are called for each step"):
        jaxloop.TrainLoop(make_step(end_actions=[Record()]), steps_per_dispatch=4)
    for bad in (0, -1, 1.5, True, "auto"):
        with pytest.raises((TypeError, ValueError), match="steps_per_dispatch must be a positive int"):
            jaxloop.TrainLoop(make_step(), steps_per_dispatch=bad)  # pyright: ignore


# Evaluations ------------------------------------------------------------------------------------------


def test_fused_evaluations_match_unfused_ones(data_parallel):
    step = make_step(data_parallel(8))
    state = step.initialize_model([1, 3])
    data = [batch_of(number, 4 if number in (5, 41) else 8) for number in range(42)]  # The last one is short.
    one, other = (jaxloop.EvalLoop(step, stat_names=[], steps_per_dispatch=n)(state, data)[1] for n in (1, 4))
    assert list(one) == list(other) and one.num_examples == other.num_examples
    one, other = (jaxloop.summarize({name: each[name] for name in ("loss", "mean")}) for each in (one, other))
    assert one == pytest.approx(other, rel=1e-6) and one["mean"] == other["mean"]


class ChangesState(FusableStep):
    def begin(self, state, batch):
        changes = bool((batch["x"] == batch_of(20)["x"]).all())
        state = state.replace(params=jax.tree.map(jnp.copy, state.params)) if changes else state
        return super().begin(state, batch)


def test_a_step_that_turns_out_to_be_unfusable_loses_no_batch(tmp_path):
    def run(at_once):
        step = make_step(cls=ChangesState)
        outer_loop = saving(tmp_path, 1, step, steps_per_dispatch=at_once)
        return outer_loop(step.initialize_model([1, 3]), jaxloop.from_index(batch_of), 40)[0]

    with pytest.raises(program.FusingError, match="begin returned another state"):
        run(at_once=8)
    resumed = run(at_once=1)
    whole = train(1, map(batch_of, range(40)), step=make_step(cls=ChangesState))[0]
    np.testing.assert_allclose(resumed.params["kernel"], whole.params["kernel"], rtol=1e-5)  # XLA rounding may differ.


def test_a_failed_fused_dispatch_falls_back_to_single_steps_with_one_warning(warnings_logged, monkeypatch):
    def fails(self, state, batches):
        raise RuntimeError("RESOURCE_EXHAUSTED")

    monkeypatch.setattr(program.Program, "dispatch_fused", fails)
    state, *_ = train(8, map(batch_of, range(128)), interval=every(steps=64))
    assert int(state.step) == 128
    (told,) = warnings_logged()
    assert "a dispatch of 8 steps failed, so they run one at a time: RuntimeError('RESOURCE_EXHAUSTED')" in told


class Counting(jaxloop.Step):
    begun = 0

    def begin(self, state, batch):
        self.begun += 1
        return state, batch

    def run(self, state, batch):
        return state.replace(step=state.step + 1), {"step": state.step}


def test_steps_without_data_are_fused_with_a_nan_policy():
    step = make_step(cls=Counting)
    loop = jaxloop.TrainLoop(step, steps_per_dispatch=8, nan_policy="raise")
    loop(step.initialize_model([1, 3]), None, 32)
    assert step.begun == 32  # Once per step: no fused dispatch was attempted in vain.
