"""Tests that each batch adds `updates_per_step` to `state.step`, and that this is checked."""

import numpy as np
import pytest
from programs import tiny
from programs.acts import Record, saving
from programs.tiny import BATCHES, STATE

import jaxloop
from jaxloop import checkpoint, schedules


class Repeated(tiny.Regression):
    """Makes several updates per batch."""

    updates_per_step = 4
    makes = 4

    def run(self, state, batch):
        for _ in range(self.makes):
            state, outputs = super().run(state, batch)
        return state, outputs


class Uncounted(tiny.Regression):
    def run(self, state, batch):
        return state.replace(params=super().run(state, batch)[0].params), {}


class CountsDouble(Repeated):
    updates_per_step, makes = 1, 2


class CountsLess(Repeated):
    makes = 3


STEP = tiny.make_step(Repeated)  # Compiled once for most tests.


def calls(interval):
    """Records when an action is called, and the number of outputs."""

    def what(state, outputs, step_num, elapsed, **_):
        return step_num, int(state.step), elapsed.samples, len(outputs["loss"])

    return Record(interval, what)


def experiment(directory, step=STEP, *actions, **options):
    return saving(directory, schedules.every(40), step, *actions, stat_names=[], **options)


@pytest.mark.parametrize(
    ("cls", "message", "adds"),
    [
        (Uncounted, r"state.step is now 0, not \d+. Each run must add 1 to it", "returns state.step unchanged"),
        (CountsDouble, r"state.step is now \d+, not \d+. .*or correct updates_per_step", "adds 2 to"),
        (CountsLess, r"now 3, not 4. Each run must add 4 to it, the value of CountsLess.updates_per_s", "adds 3 to"),
    ],
)
def test_a_miscounting_run_raises_early_and_saves_nothing(cls, message, adds, tmp_path):
    seen = calls(schedules.always())
    outer_loop = saving(tmp_path, schedules.always(), tiny.make_step(cls), seen)
    with pytest.raises(ValueError, match=message):
        outer_loop(STATE, BATCHES, 40)
    assert checkpoint.all_steps(tmp_path) == [] and seen.seen == [] and outer_loop.rescued_state is None
    (problem,) = outer_loop.check(STATE, BATCHES, 40).errors
    assert problem.where == "the train loop" and adds in problem.text and "Each run must add" in problem.text


@pytest.mark.parametrize("options", [{}, {"steps_per_dispatch": 5}], ids=["", "fused"])
def test_steps_are_updates_everywhere(options, tmp_path):
    seen = calls(schedules.every(10))
    outer_loop = experiment(tmp_path, STEP, seen, **options)
    assert outer_loop.check(STATE, BATCHES, 120, 24).ok
    state, outputs = outer_loop(STATE, BATCHES, 120, 24)
    assert int(state.step) == 120 and len(outputs["loss"]) == 6  # 24 steps in the last loop.
    # The first counts at or after each multiple of 10. A batch has 8 examples.
    steps = [12, 20, 32, 40, 52, 60, 72, 80, 92, 100, 112, 120]
    assert [call[:3] for call in seen.seen] == [(step, step, step // 4 * 8) for step in steps]
    assert sum(call[3] for call in seen.seen) == 30 and checkpoint.all_steps(tmp_path) == [40, 80, 120]
    assert outer_loop.history.collect("steps") == [24, 48, 72, 96, 120]
    assert "120 steps" in str(outer_loop.spent)


@pytest.mark.parametrize("stop", [20, 60])
def test_a_run_interrupted_after_any_batch_resumes_bit_for_bit(stop, tmp_path, assert_same, interrupted):
    whole, _ = experiment(tmp_path / "whole")(STATE, BATCHES, 80, 40)
    data = lambda number: jaxloop.skippable(lambda: interrupted(BATCHES, number))
    broken, _ = experiment(tmp_path / "broken")(STATE, data(stop // 4 - 1), 80, 40)
    assert int(broken.step) == stop and stop in checkpoint.all_steps(tmp_path / "broken")
    resumed, _ = experiment(tmp_path / "broken")(STATE, data(None), 80, 40)
    assert int(resumed.step) == 80
    assert_same(resumed, whole)


def test_a_loop_counts_updates():
    loop = jaxloop.TrainLoop(STEP, stat_names=[])
    state, outputs = loop(STATE, BATCHES, num_steps=12)
    assert int(state.step) == loop.step_num == 12 and len(outputs["loss"]) == 3
    eval_loop = jaxloop.EvalLoop(tiny.make_step(Repeated, train=False), stat_names=[])
    _, outputs = eval_loop(state, BATCHES, num_steps=3)
    assert len(outputs["loss"]) == 3  # An evaluation makes no updates: it counts batches.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((BATCHES, 30), r"train_total_steps=30 is not a multiple of 4, .* \(Repeated.updates_per_step\)"),
        ((BATCHES, 40, 3), "train_loop_steps=3 is not a multiple of 4"),
    ],
)
def test_totals_must_be_multiples_of_updates_per_step(arguments, message, tmp_path):
    outer_loop = experiment(tmp_path)
    with pytest.raises(ValueError, match=message):
        outer_loop(STATE, *arguments)
    assert outer_loop.check(STATE, *arguments).errors[0].where == "the arguments"
    with pytest.raises(ValueError, match="num_steps=6 is not a multiple of 4"):
        jaxloop.TrainLoop(STEP)(STATE, BATCHES, num_steps=6)
    with pytest.raises(ValueError, match="state.step=2 is not a multiple of 4"):
        outer_loop(STATE.replace(step=np.int32(2)), BATCHES, 40)


@pytest.mark.parametrize("value", [0, 1.5])
def test_updates_per_step_must_be_a_positive_int(value):
    with pytest.raises((TypeError, ValueError), match="Repeated.*updates_per_step must be a positive int"):
        tiny.make_step(type("Repeated", (Repeated,), {"updates_per_step": value}))


def test_a_checkpoint_whose_step_differs_from_its_name_raises(tmp_path):
    run = lambda total: experiment(tmp_path, tiny.STEP)(STATE, BATCHES, total)
    run(40)
    (tmp_path / "40").rename(tmp_path / "30")
    message = r"(?s)No run can resume from checkpoint 30 in .* its state.step is 40\..*Remove the checkpoint"
    with pytest.raises(ValueError, match=message):
        run(40)


def test_a_train_loop_requires_train_true():
    message = r"TrainLoop got Repeated\(.*train=False.* Make it with Repeated\(..., train=True"
    with pytest.raises(ValueError, match=message):
        jaxloop.TrainLoop(tiny.make_step(Repeated, train=False))


def test_a_failed_step_with_several_updates_can_be_replayed(tmp_path):
    bad = {**BATCHES[3], "x": np.full_like(BATCHES[3]["x"], np.nan)}
    with pytest.raises(FloatingPointError, match="Step 16 is the first"):
        outer_loop = jaxloop.OuterLoop(jaxloop.TrainLoop(STEP, nan_policy="raise"), workdir=tmp_path)
        outer_loop(STATE, [*BATCHES[:3], bad, *BATCHES[4:]], 20)
    state, outputs = jaxloop.replay(tmp_path, STEP, state=STATE)
    assert int(state.step) == 16 and np.isnan(outputs["loss"])
