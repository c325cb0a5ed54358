"""Tests that the demo learns, resumes bit for bit, and reaches a test accuracy of 97.5%."""

import contextlib
import functools
import io
import os
import re
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from sklearn import datasets, model_selection

import jaxloop
from jaxloop import checkpoint
from jaxloop.examples import digits

run_short = functools.partial(digits.run, train_steps=30, batch_size=16, learning_rate=2e-3, seed=0)


pytestmark = pytest.mark.usefixtures("compile_fast")


@pytest.fixture(scope="module", autouse=True)
def evaluate_every_10_steps():
    # Optax raises floats to integer powers, which strict dtype promotion rejects.
    with pytest.MonkeyPatch.context() as patch, jax.numpy_dtype_promotion("standard"):
        patch.setattr(digits, "WHEN_TO_TEST", jaxloop.every(steps=10) | jaxloop.last())
        yield


def fail():
    raise OSError("the disk has gone")


def press_ctrl_c():
    signal.raise_signal(signal.SIGINT)


def digits_interrupted_at(step, callback):
    """Returns a loader of the digits that calls `callback` when the batch after a step is read."""

    def load(batch_size, seed):
        data = load_digits(batch_size, seed)

        def batch_of(number):
            if number == step:
                callback()
            return data.train_batches.make_batch(number)

        return data._replace(train_batches=jaxloop.from_index(batch_of))

    load_digits = digits.load_digits
    return load


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A short uninterrupted run: its directory, state and printed text."""
    workdir = tmp_path_factory.mktemp("unbroken")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        state, _ = run_short(workdir)
    return workdir, state, printed.getvalue()


def assert_same_training(state, expected):
    """Compares the step, parameters and optimizer state bit for bit."""
    for one, other in [
        (state.step, expected.step),
        (state.params, expected.params),
        (state.opt_state, expected.opt_state),
    ]:
        assert jax.tree.structure(one) == jax.tree.structure(other)
        jax.tree.map(np.testing.assert_array_equal, one, other)


def test_short_run_learns_and_writes_checkpoints_events_and_history(uninterrupted):
    workdir, state, printed = uninterrupted
    history = jaxloop.History.load(workdir / "history.jsonl")
    assert history.collect("steps", "train.loss")[0] == [1, 10, 20, 30]
    steps, losses = history.collect("steps", "test.loss")
    assert steps == [10, 20, 30]
    assert losses == sorted(losses, reverse=True)
    assert state.step == 30
    assert {path.name for path in (workdir / "checkpoints").iterdir()} == {".trainer.lock", "10", "20", "30", "STOPPED"}
    assert list(workdir.glob("events.out.tfevents.*"))
    assert re.search(r"^30 steps in .* compiling, .*\.$", printed, re.MULTILINE)


def test_rerunning_a_finished_run_shows_its_result_and_curves_again(uninterrupted, capsys):
    workdir, state, printed = uninterrupted
    curves = workdir / "learning_curves.png"
    drawn = curves.read_bytes()
    curves.unlink()
    again, accuracy = run_short(workdir)
    assert_same_training(again, state)
    shown = capsys.readouterr()
    assert "Resumed at step 30." in shown.out
    assert "31/" not in shown.err
    line = f"test accuracy    {accuracy:.2%}"
    assert line in shown.out
    assert line in printed
    assert drawn.startswith(b"\x89PNG")
    assert curves.read_bytes() == drawn


def test_run_interrupted_twice_matches_an_uninterrupted_one(uninterrupted, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(digits, "load_digits", digits_interrupted_at(0, press_ctrl_c))
        with pytest.raises(SystemExit, match="130"):
            run_short(tmp_path)
    # The first batch is read before the first step.
    assert "Stopped at step 0 of 30. Run the same command again to resume." in capsys.readouterr().out
    with monkeypatch.context() as patch, pytest.raises(OSError, match="the disk has gone"):
        patch.setattr(digits, "load_digits", digits_interrupted_at(17, fail))
        run_short(tmp_path)
    assert "Resumed" not in capsys.readouterr().out

    state, _ = run_short(tmp_path)

    assert "Resumed at step 17." in capsys.readouterr().out
    assert_same_training(state, uninterrupted[1])


def test_split_matches_the_scikit_learn_example():
    images, labels = datasets.load_digits(return_X_y=True)
    _, images, _, labels = model_selection.train_test_split(images, labels, test_size=0.5, shuffle=False)
    (batch,) = digits.load_digits(batch_size=32, seed=0).test_batches
    np.testing.assert_array_equal(batch["image"].reshape(len(images), -1) * 16, images)
    np.testing.assert_array_equal(batch["label"], labels)


def test_ctrl_c_ends_the_command_with_one_message_and_exit_code_130(tmp_path):
    command = [sys.executable, "-m", "jaxloop.examples.digits", f"--workdir={tmp_path}", "--train_steps=100000"]
    env = {name: value for name, value in os.environ.items() if name != "NPROC"}
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        while process.poll() is None and not checkpoint.all_steps(tmp_path / "checkpoints"):
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        printed, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    last_step = checkpoint.all_steps(tmp_path / "checkpoints")[-1]
    assert printed.endswith(f"\nStopped at step {last_step} of 100000. Run the same command again to resume.\n")


def test_command_reaches_the_documented_accuracy(tmp_path):
    command = [sys.executable, "-m", "jaxloop.examples.digits", "--workdir=runs/digits"]
    # Without NPROC, the number of threads that the tests set for their eight devices.
    env = {name: value for name, value in os.environ.items() if name != "NPROC"}
    finished = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    table = dict(re.findall(r"^  (\w+(?: \w+)*)  +(\S.*)$", finished.stdout, re.MULTILINE))
    assert float(table["test accuracy"].rstrip("%")) >= 97.5
    (seconds,) = re.findall(r"^600 steps in (\d+\.\d) s ", finished.stdout, re.MULTILINE)
    assert float(seconds) < 60
    for step in ("500", "550", "600", table["best at step"]):
        assert (tmp_path / "runs/digits/checkpoints" / step).is_dir()
    assert (tmp_path / table["learning curves"]).is_file()
    assert list((tmp_path / "runs/digits").glob("events.out.tfevents.*"))
    assert "600/600" in finished.stderr
