"""Tests that a run resumes exactly after any fault. `make chaos` runs the same faults at length."""

import contextlib
import dataclasses
import functools
import signal
import sys

import chaos
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import whole_run
from programs.whole_run import assert_resumed_exactly, copy_until, once

import jaxloop
from jaxloop import checkpoint
from jaxloop.checkpoint import seal
from jaxloop.outer_loop import data as training_data
from jaxloop.outer_loop import whole_run as wholes

PROGRAM = functools.cache(whole_run.make_program)  # Initialized and compiled once.


def run(directory, **options):
    return whole_run.run(directory, **{"program": PROGRAM(), "source": "index", **options})


def uninterrupted_run(tmp_path_factory, **options):
    """Returns the directory and result of an uninterrupted run that keeps a checkpoint of every step."""
    directory = tmp_path_factory.mktemp("whole")
    return directory, run(directory, **options)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return uninterrupted_run(tmp_path_factory)


class BrokenError(Exception):
    pass


def fail():
    raise BrokenError("broken")


def press_ctrl_c():
    signal.raise_signal(signal.SIGINT)


# Resumes at odd moments -------------------------------------------------------------------------------


def test_repeated_resumes_match_the_uninterrupted_run(uninterrupted, tmp_path):
    directory, expected = uninterrupted
    for number, step in enumerate([2, 5, 8]):
        target = copy_until(step, directory, tmp_path / str(number))
        assert_resumed_exactly(run(target), expected, step)
        directory = target


def test_ctrl_c_before_the_first_step_ends_the_run_after_that_step(uninterrupted, tmp_path):
    ended = run(tmp_path, watch=once("opened", 0, press_ctrl_c))
    assert checkpoint.all_steps(tmp_path / "checkpoints") == [1] and ended["step"] == 1 and ended["ids"] == [0]
    assert_resumed_exactly(run(tmp_path), uninterrupted[1], 1)


def test_data_error_before_the_first_step_saves_nothing(uninterrupted, tmp_path):
    with pytest.raises(BrokenError):
        run(tmp_path, watch=once("data", 0, fail))
    assert checkpoint.all_steps(tmp_path / "checkpoints") == []  # The program makes the state of step 0 again.
    assert_resumed_exactly(run(tmp_path), uninterrupted[1], 0)


def test_run_resumes_from_a_checkpoint_of_step_0(uninterrupted, tmp_path):
    writer = checkpoint.CheckpointWriter(tmp_path / "checkpoints")
    with contextlib.closing(writer):
        writer.save(0, PROGRAM().state)
    assert_resumed_exactly(run(tmp_path, saves=False), uninterrupted[1], 0)


def test_finished_run_makes_no_update_and_returns_the_same_state(uninterrupted, tmp_path):
    run(tmp_path)
    again = run(tmp_path)
    assert_resumed_exactly(again, uninterrupted[1], 10)
    assert again["ids"] == [] and again["written"] == []
    assert (tmp_path / "checkpoints" / "STOPPED").exists()


def test_run_resumes_on_a_different_number_of_devices(tmp_path):
    programs = [whole_run.make_program(devices=devices) for devices in (4, 2)]
    expected = run(tmp_path / "whole", program=programs[0], save=5)
    resumed = run(copy_until(5, tmp_path / "whole", tmp_path / "resumed"), program=programs[1], save=5)
    assert resumed["ids"] == expected["ids"][5:]
    directories = [tmp_path / name / "checkpoints" for name in ("whole", "resumed")]
    states = [checkpoint.restore(directory, 10, programs[0].state) for directory in directories]
    for one, two in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5)
    losses = [[row[1]["test"]["loss"] for row in each["history"] if "test" in row[1]] for each in (expected, resumed)]
    np.testing.assert_allclose(*losses, rtol=1e-5)


# Tampering, to show that these tests can fail ----------------------------------------------------------


def without_position(monkeypatch):
    kind, open_data = training_data.TrainingData, training_data.TrainingData.open
    monkeypatch.setattr(kind, "open", lambda *args, **kw: open_data(*args, **kw | {"restores": False}))


def with_other_keys(monkeypatch):
    monkeypatch.setattr(wholes, "check_keys", lambda *args: None)
    other = dataclasses.replace(whole_run.make_program(seed=4), state=PROGRAM().state)
    monkeypatch.setattr(sys.modules[__name__], "PROGRAM", lambda: other)


def with_state_changed_by(change):
    def tamper(monkeypatch):
        restore = checkpoint.Checkpoint.restore
        changed = lambda self, state, **options: change(restore(self, state, **options))
        monkeypatch.setattr(checkpoint.Checkpoint, "restore", changed)

    return tamper


def without_sums(monkeypatch):
    load = checkpoint.Checkpoint.run

    def without(self):
        loaded = load(self)
        nothing = jaxloop.metrics.LoopOutputs().encode()[0]
        outputs = loaded["parts"]["train"]["outputs"]
        outputs |= {"sums": nothing, "segments": [[first, nothing] for first, _ in outputs["segments"]]}
        return loaded

    monkeypatch.setattr(checkpoint.Checkpoint, "run", without)


TAMPERINGS = {
    "data position": without_position,
    "keys": with_other_keys,
    "step counter": with_state_changed_by(lambda state: state.replace(step=state.step - 1)),
    "optimizer state": with_state_changed_by(
        lambda state: state.replace(opt_state=jax.tree.map(jnp.zeros_like, state.opt_state))
    ),
    "metric sums": without_sums,
}


@pytest.mark.parametrize("tamper", TAMPERINGS.values(), ids=TAMPERINGS)
def test_missing_part_of_a_checkpoint_is_detected(uninterrupted, tmp_path, monkeypatch, tamper):
    directory, expected = uninterrupted
    copied = copy_until(5, directory, tmp_path / "run")
    tamper(monkeypatch)
    if tamper is TAMPERINGS["step counter"]:
        with pytest.raises(ValueError, match="No run can resume from checkpoint 5 in .* its state.step is 4"):
            run(copied, saves=False)
        return
    resumed = run(copied, saves=False)
    with pytest.raises(AssertionError):
        assert_resumed_exactly(resumed, expected, 5)


# Ends of a run ----------------------------------------------------------------------------------------


# Place, number, fault, raised exception, saved step (None: a later one), and words in the exception's notes.
ENDS = {
    "the end": ("nowhere", 0, fail, None, 8, []),
    "the step": ("step", 6, fail, BrokenError, 6, ["NoisyStep", "after step 6", "TrainLoop"]),
    "the data": ("data", 6, fail, BrokenError, 6, ["in the dataset, after step 6", "TrainLoop"]),
    "an action": ("action", 6, fail, BrokenError, 6, ["in ReportSteps", "after step 6", "TrainLoop"]),
    "an evaluation": ("eval", 101, fail, BrokenError, 4, ["NoisyStep", "after step 4", "EvalLoop"]),
    "a writer": ("writer", 6, fail, BrokenError, None, ["in SummaryAction(interval=every(steps=3)), after step 6"]),
    "Ctrl-C": ("step", 6, press_ctrl_c, None, 7, []),
    "sys.exit": ("step", 6, lambda: sys.exit(3), SystemExit, 6, ["NoisyStep", "after step 6", "TrainLoop"]),
}


@pytest.mark.parametrize(("place", "number", "do", "error", "saved", "words"), ENDS.values(), ids=ENDS)
def test_run_is_saved_and_resumes_however_it_ends(uninterrupted, tmp_path, place, number, do, error, saved, words):
    happened = []
    watch = once(place, number, lambda: happened.append(place) or do())
    writer = whole_run.Writer(watch)
    with contextlib.nullcontext() if error is None else pytest.raises(error) as caught:
        run(tmp_path, watch=watch, writer=writer, save=4)
    assert happened == ([] if place == "nowhere" else [place])
    notes = "\n".join(caught.value.__notes__) if caught else ""
    assert [word for word in words if word not in notes] == []
    directory = tmp_path / "checkpoints"
    saved = newest_step_after_writer_error(directory, number) if saved is None else saved
    assert checkpoint.all_steps(directory)[-1] == saved and seal.problems(directory / str(saved)) == []
    assert int(checkpoint.restore(directory, saved, PROGRAM().state).step) == saved
    assert writer.flushes > 0 and chaos.leftovers(tmp_path) == []
    assert (directory / "STOPPED").exists() == (place == "nowhere")
    assert_ends_like(uninterrupted[1], run(tmp_path, save=4), saved, () if place == "nowhere" else writer.written)


def newest_step_after_writer_error(directory, step):
    """Returns the newest saved step of a run whose writer failed in the background, for a row of `step`."""
    newest = checkpoint.all_steps(directory)[-1]
    assert newest >= step
    return newest


def assert_ends_like(expected, resumed, step, written):
    """Compares with an uninterrupted run. `written` are the rows from before the resume, or () to skip them."""
    assert resumed["state"] == expected["state"] and resumed["history"] == expected["history"]
    assert resumed["ids"] == expected["ids"][step:]
    after = [row for row in expected["written"] if row[0] > step]
    assert [*written, *resumed["written"]] == (expected["written"] if written else after)


@pytest.mark.parametrize("steps", [(6, 7), (15, 24)], ids=["inside a loop", "at the end of the data"])
def test_metric_sums_are_bit_identical_after_two_interruptions(steps, tmp_path):
    options = {"source": "list", "total": None, "epochs": 2, "loop_steps": None, "save": 5}
    uninterrupted, written, done = run(tmp_path / "whole", **options), [], [0]
    for step in steps:
        writer = whole_run.Writer()

        def watch(place, number, step=step):
            done[0] += place == "step"
            if place == "step" and done[0] == step:
                press_ctrl_c()

        assert run(tmp_path / "broken", watch=watch, writer=writer, **options)["step"] == step
        written += writer.written
    assert_ends_like(uninterrupted, run(tmp_path / "broken", **options), steps[-1], written)


def test_metric_sums_do_not_depend_on_the_checkpoint_interval(uninterrupted, tmp_path):
    assert run(tmp_path, save=7)["history"] == uninterrupted[1]["history"]


class BadWriter(whole_run.Writer):
    """Raises once, for a row of a step that is not one of the first `spared`."""

    def __init__(self, step, spared):
        super().__init__()
        self.step, self.spared, self.calls = step, spared, 0

    def write_scalars(self, step, scalars):
        if step == self.step:
            self.spared -= 1
            if self.spared < 0:
                self.calls += 1
                fail()
        super().write_scalars(step, scalars)


@pytest.mark.parametrize(("step", "spared"), [(6, 0), (8, 0), (8, 1)], ids=["inside", "at the end", "of an evaluation"])
def test_writer_error_ends_the_run_without_lost_or_repeated_rows(uninterrupted, tmp_path, step, spared):
    writer = BadWriter(step, spared)
    with pytest.raises(BrokenError) as caught:
        run(tmp_path, writer=writer, save=3)
    assert writer.calls == 1 and f"after step {step}" in caught.value.__notes__[0]
    saved = newest_step_after_writer_error(tmp_path / "checkpoints", step)
    assert_ends_like(uninterrupted[1], run(tmp_path, save=3), saved, writer.written)


# In separate processes --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def arena(tmp_path_factory):
    with contextlib.closing(chaos.Arena(tmp_path_factory.mktemp("arena"))) as arena:
        yield arena


@pytest.mark.parametrize(("fault", "count"), [("sigkill", 8), ("signals", 12), ("two_trainers", 2), ("damaged", 20)])
def test_runs_survive_faults(arena, fault, count):
    done = 0
    for faults, problems in chaos.PARTS[fault][0](arena, count, seed=0):
        assert problems == []
        done += faults
    assert done == count
