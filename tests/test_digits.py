"""Tests that the demo learns, shows a finished run again, and reaches a test accuracy of 97.5%."""

import contextlib
import functools
import io
import os
import re
import subprocess
import sys

import jax
import pytest

import jaxloop
from jaxloop.examples import digits

run_short = functools.partial(digits.run, train_steps=30, batch_size=16, learning_rate=2e-3, seed=0)


pytestmark = pytest.mark.usefixtures("compile_fast")


@pytest.fixture(scope="module", autouse=True)
def evaluate_every_10_steps():
    # Optax raises floats to integer powers, which strict dtype promotion rejects.
    with pytest.MonkeyPatch.context() as patch, jax.numpy_dtype_promotion("standard"):
        patch.setattr(digits, "WHEN_TO_TEST", jaxloop.every(steps=10) | jaxloop.last())
        yield


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A short uninterrupted run: its directory, state and printed text."""
    workdir = tmp_path_factory.mktemp("unbroken")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        state, _ = run_short(workdir)
    return workdir, state, printed.getvalue()


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


def test_rerunning_a_finished_run_shows_its_result_and_curves_again(uninterrupted, capsys, assert_same):
    workdir, state, printed = uninterrupted
    curves = workdir / "learning_curves.png"
    drawn = curves.read_bytes()
    curves.unlink()
    again, accuracy = run_short(workdir)
    assert_same((again.step, again.params, again.opt_state), (state.step, state.params, state.opt_state))
    shown = capsys.readouterr()
    assert "Resumed at step 30." in shown.out
    assert "31/" not in shown.err
    line = f"test accuracy    {accuracy:.2%}"
    assert line in shown.out
    assert line in printed
    assert drawn.startswith(b"\x89PNG")
    assert curves.read_bytes() == drawn


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
