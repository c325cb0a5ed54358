"""Tests of skipped batches, detours and rewinding."""

import itertools
import json
import random

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from programs.acts import Do, Fail

import jaxloop
from jaxloop import at, checkpoint, every

ROWS = 8


EVERY_5, EVERY_10 = every(steps=5), every(steps=10)


class Noisy(nn.Module):
    """A model with dropout."""

    @nn.compact
    def __call__(self, x, *, train):
        return nn.Dense(1)(nn.Dropout(0.2, deterministic=not train)(nn.Dense(16)(x)))


def batch_of(number, factor=1.0):
    rng = np.random.default_rng(number)
    x = rng.normal(size=(ROWS, 4)).astype(np.float32)
    y = x.sum(axis=-1, keepdims=True) + rng.normal(size=(ROWS, 1)).astype(np.float32)
    return {"x": x, "y": (factor * y).astype(np.float32), "id": np.full([ROWS], number, np.int32)}


def data(spikes=(), value=1e3, left_out=()):
    """Returns an endless dataset of batches numbered from 1, some of which may spike or be left out."""

    def make(index):
        number = next(itertools.islice((n for n in itertools.count(1) if n not in left_out), index, None))
        return batch_of(number, value if number in spikes else 1.0)

    return jaxloop.from_index(make)


def make_step():
    loss = lambda outputs, batch: ((outputs - batch["y"]) ** 2).mean(axis=-1)
    return jaxloop.LossStep(jax.random.key(0), Noisy(), optax.sgd(1e-2, momentum=0.9), train=True, loss=loss)


class Experiment:
    """A run with checkpoints at every 10th step."""

    def __init__(self, workdir, *actions, skip=(), fused=1, log_interval=EVERY_5, save=EVERY_10, keep=3):
        self.workdir = workdir
        self.step = make_step()
        self.state = self.step.initialize_model([1, 4])
        saving = jaxloop.CheckpointAction(workdir / "checkpoints", save | at(0), keep=keep)
        self.loop = jaxloop.TrainLoop(self.step, end_actions=[*actions, saving], steps_per_dispatch=fused)
        spec = jaxloop.CheckpointSpec(workdir / "checkpoints")
        options = {"log_interval": log_interval, "skip": skip}
        self.outer_loop = jaxloop.OuterLoop(self.loop, checkpoint_spec=spec, workdir=workdir, **options)

    def __call__(self, dataset, total=100, **options):
        state, _ = self.outer_loop(self.state, dataset, total, **options)
        return jax.device_get(state)

    def rows(self, name="train"):
        rows = self.outer_loop.history.rows
        return [(row.elapsed.steps, row.elapsed.samples, row.logs[name]) for row in rows if name in row.logs]

    def left_out(self):
        ranges = [range(detour["first_batch"], detour["last_batch"] + 1) for *_, detour in self.rows("detour")]
        return [number for each in ranges for number in each]


# Skipped batches ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [1, 4])
def test_skipping_batches_equals_training_on_data_without_them(tmp_path, fused, assert_same):
    left_out = [1, 7, 8, 9, 33, 90]
    skipped = Experiment(tmp_path / "a", skip=left_out, fused=fused)
    other = Experiment(tmp_path / "b", fused=fused)
    assert_same(skipped(data()), other(data(left_out=left_out)))
    assert skipped.rows() == other.rows()


def test_a_run_that_skips_batches_can_be_resumed_around_them(tmp_path, assert_same):
    left_out, ends = [3, 4, 12, 13], (1, 2, 3, 9, 10, 11)
    whole = Experiment(tmp_path / "whole", skip=left_out)(data(), 14)
    for end in ends:
        first = Experiment(tmp_path / str(end), skip=left_out, save=every(steps=1))
        first(data(), end)
        second = Experiment(tmp_path / str(end), skip=left_out, save=every(steps=1))
        assert_same(second(data(), 14), whole)


def test_batches_are_numbered_across_epochs(tmp_path, assert_same):
    rows = [batch_of(number) for number in range(1, 11)]
    run = Experiment(tmp_path / "a", skip=[10, 13, 21])
    state = run(rows, None, train_epochs=3)
    assert int(state.step) == 27
    kept = [each for number, each in enumerate(3 * rows, 1) if number not in (10, 13, 21)]
    assert_same(state, Experiment(tmp_path / "b")(kept, None))


def test_warns_if_batches_to_skip_are_already_used(tmp_path, caplog):
    Experiment(tmp_path)(data(), 20)
    Experiment(tmp_path, skip=[7])(data(), 30)
    assert "has used the batches 7 before step 20, so it can no longer leave them out" in caplog.text


@pytest.mark.parametrize(("skip", "error"), [([0], ValueError), ([1.5], TypeError), ([True], TypeError)])
def test_an_invalid_skip_raises(tmp_path, skip, error):
    with pytest.raises(error, match=r"OuterLoop\.skip must be a positive int"):
        Experiment(tmp_path, skip=skip)


# Spikes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "fused"), [(1e3, 4), (np.nan, 1), (np.inf, 4)])
def test_spike_guard_skips_the_batches_of_a_spike(tmp_path, value, fused, assert_same):
    guarded = Experiment(tmp_path / "a", jaxloop.SpikeGuard("loss", window=16), fused=fused)
    state = guarded(data(spikes=[38, 71], value=value))
    left_out = guarded.left_out()
    assert {38, 71} <= set(left_out)
    other = Experiment(tmp_path / "b", fused=fused)
    assert_same(state, other(data(spikes=[38, 71], value=value, left_out=left_out)))
    assert guarded.rows() == other.rows()
    detours = guarded.rows("detour")
    assert len(detours) == 2 and all(step < detour["first_step"] for step, _, detour in detours)
    assert "loss was nan" in detours[0][2]["reason"] or np.isfinite(value)
    spent = jaxloop.goodput(tmp_path / "a")
    assert (spent.steps, spent.repeated_steps) == (100, sum(each["step"] - step for step, _, each in detours))


def test_a_killed_run_repeats_its_detours(tmp_path, assert_same):
    """The second process resumes within and after the steps that a detour repeats."""
    make = lambda directory, save: Experiment(tmp_path / directory, jaxloop.SpikeGuard("loss", window=16), save=save)
    whole = make("whole", every(steps=10))
    state = whole(data(spikes=[38]), 60)
    for end in (36, 40):
        directory = f"to {end}"
        make(directory, every(steps=10))(data(spikes=[38]), end)
        resumed = make(directory, every(steps=10))
        assert_same(resumed(data(spikes=[38]), 60), state)
        assert resumed.left_out() == whole.left_out() != [] and len(resumed.rows("detour")) == 1


def test_checkpoints_after_a_spike_are_abandoned(tmp_path):
    run = Experiment(tmp_path, jaxloop.SpikeGuard("loss", window=16), save=every(steps=2), keep=30)
    run(data(spikes=[33]), 50)
    abandoned = sorted(int(path.name) for path in (tmp_path / "checkpoints" / "abandoned").iterdir())
    assert abandoned == [34, 36, 38]
    assert checkpoint.all_steps(tmp_path / "checkpoints")[-1] == 50


def test_too_many_spikes_raise_and_keep_an_earlier_checkpoint(tmp_path):
    spikes = [33, 43, 53]
    for _ in range(2):  # A restarted run raises again.
        run = Experiment(tmp_path, jaxloop.SpikeGuard("loss", window=16, at_most=2))
        with pytest.raises(RuntimeError, match=r"loss was .* in steps .*turned back 2 times already"):
            run(data(spikes=spikes))
        assert checkpoint.all_steps(tmp_path / "checkpoints")[-1] == 30 and run.outer_loop.rescued_state is None


def test_a_spike_before_the_first_checkpoint_raises(tmp_path):
    step = make_step()
    actions = [jaxloop.SpikeGuard("loss"), jaxloop.CheckpointAction(tmp_path, every(steps=50))]
    spec = jaxloop.CheckpointSpec(tmp_path)
    outer_loop = jaxloop.OuterLoop(jaxloop.TrainLoop(step, end_actions=actions), checkpoint_spec=spec)
    with pytest.raises(RuntimeError, match="must return to a checkpoint before step 7, and there is none"):
        outer_loop(step.initialize_model([1, 4]), data(spikes=[7], value=np.nan), 100)
    assert not checkpoint.all_steps(tmp_path)


def test_spike_guard_requires_checkpoints_and_one_value_per_step(tmp_path):
    step = make_step()
    state = step.initialize_model([1, 4])
    outer_loop = jaxloop.OuterLoop(jaxloop.TrainLoop(step, end_actions=[jaxloop.SpikeGuard("loss")]))
    with pytest.raises(ValueError, match="needs checkpoints to return to, but this run has none"):
        outer_loop(state, data(), 100)
    run = Experiment(tmp_path, jaxloop.SpikeGuard("los"))
    with pytest.raises(ValueError, match="needs an output 'los' with a number for each step.*Available: loss"):
        run(data())
    with pytest.raises(ValueError, match="sigmas must be positive"):
        jaxloop.SpikeGuard("loss", sigmas=0)


def test_a_detour_raises_if_the_iterator_cannot_go_back(tmp_path):
    run = Experiment(tmp_path, jaxloop.SpikeGuard("loss", window=16))
    with pytest.raises(ValueError, match="can't be restored|can't go back"):
        run(iter(batch_of(number, 1e3 if number == 38 else 1.0) for number in range(1, 200)))


# Rewinding ------------------------------------------------------------------------------------------------


def record_states(states):
    """Returns an action that records the state after each step in a dict."""
    return Do(lambda state, step_num, **_: states.update({step_num: jax.device_get(state)}), every(steps=1) | at(0))


def shuffled_epochs():
    for epoch in itertools.count():
        order = np.random.default_rng(epoch).permutation(10)
        yield from (batch_of(int(number)) for number in order)


@pytest.mark.parametrize("fused", [1, 4])
def test_rewind_reproduces_any_step_bit_for_bit(tmp_path, fused, assert_same):
    options, states = {"train_loop_steps": 12}, {}
    dataset = lambda: jaxloop.skippable(shuffled_epochs)
    run = Experiment(tmp_path / "b", skip=[44], fused=fused, keep=30)
    run(dataset(), 89, **options)
    numbers = [n for n in range(1, 91) if n != 44]
    Experiment(tmp_path / "c", record_states(states), skip=[44])(dataset(), 89, **options)
    batches = list(itertools.islice(shuffled_epochs(), 90))
    fresh = Experiment(tmp_path / "b", skip=[44], fused=fused, keep=30)
    for step_num in random.Random(fused).sample(range(1, 90), 12):
        before = jaxloop.rewind(tmp_path / "b", fresh.outer_loop, step_num, train_dataset=dataset(), **options)
        assert_same(jax.device_get(before.state), states[step_num - 1])
        np.testing.assert_array_equal(before.batch["id"], batches[numbers[step_num - 1] - 1]["id"])
        assert before.keys == fresh.step.prng_key(step_num - 1)
        after, _ = fresh.step(before.state, before.batch)
        assert_same(jax.device_get(after), states[step_num])


def test_rewind_reproduces_steps_of_all_epochs_after_a_detour(tmp_path, assert_same):
    rows = [batch_of(number, 1e3 if number == 8 else 1.0) for number in range(10)]
    options = {"train_epochs": 6}
    guard = lambda: jaxloop.SpikeGuard("loss", sigmas=20, window=5, at_most=9)
    make, states = lambda *actions: Experiment(tmp_path, *actions, guard(), keep=30), {}
    state = make(record_states(states))(rows, None, **options)
    last = int(state.step)
    assert last < 60
    for step_num in (1, 10, 11, 25, 31, last):
        before = jaxloop.rewind(tmp_path, make().outer_loop, step_num, train_dataset=rows, **options)
        assert_same(jax.device_get(before.state), states[step_num - 1])
    with pytest.raises(ValueError, match=f"The run has no step {last + 2}: its data end at step {last}"):
        jaxloop.rewind(tmp_path, make().outer_loop, last + 2, train_dataset=rows, **options)


def test_rewind_changes_no_files_and_calls_no_actions(tmp_path):
    Experiment(tmp_path)(data())
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    fresh = Experiment(tmp_path, Fail(every(steps=1)))
    before = jaxloop.rewind(tmp_path, fresh.outer_loop, 98, train_dataset=data())
    assert int(before.state.step) == 97 and before.num_verified == 1
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == files


def test_rewind_raises_if_a_repeated_step_differs_from_the_history(tmp_path):
    Experiment(tmp_path)(data())
    history = tmp_path / "history.jsonl"
    lines = [json.loads(line) for line in history.read_text().splitlines()]
    assert [line["elapsed"]["steps"] for line in lines][-2] == 95
    lines[-2]["logs"]["train"]["loss"] += 1e-6
    history.write_text("".join(json.dumps(line) + "\n" for line in lines))
    fresh = Experiment(tmp_path)
    with pytest.raises(RuntimeError, match=r"repeated step 95 has loss=.*and the history has"):
        jaxloop.rewind(tmp_path, fresh.outer_loop, 98, train_dataset=data())
    before = jaxloop.rewind(tmp_path, fresh.outer_loop, 98, train_dataset=data(), verify=False)
    assert int(before.state.step) == 97


def test_rewind_without_an_earlier_checkpoint_starts_from_the_given_state(tmp_path, assert_same):
    run, states = Experiment(tmp_path), {}
    Experiment(tmp_path / "other", record_states(states))(data(), 20)
    run(data())
    before = jaxloop.rewind(tmp_path, run.outer_loop, 15, make_step().initialize_model([1, 4]), data())
    assert_same(jax.device_get(before.state), states[14])
    late = run.state.replace(step=jnp.int32(50))
    with pytest.raises(FileNotFoundError, match="no checkpoint of step 14 or earlier in"):
        jaxloop.rewind(tmp_path, run.outer_loop, 15, late, data())
    with pytest.raises(ValueError, match="has no step 101: it ends at train_total_steps=100"):
        jaxloop.rewind(tmp_path, run.outer_loop, 101, None, data(), 100)
    with pytest.raises(ValueError, match="step_num must be a positive int"):
        jaxloop.rewind(tmp_path, run.outer_loop, 0, train_dataset=data())
