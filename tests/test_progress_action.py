import contextlib
import io
import logging
import os
import re
import sys
import termios
import types

import jax
import numpy as np
import pytest
import tqdm
from programs.clock import Clock

from jaxloop.actions import ProgressAction
from jaxloop.base import timing
from jaxloop.history import History
from jaxloop.metrics import LoopOutputs
from jaxloop.schedules import Elapsed
from jaxloop.types import MetricWithMetadata


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def clock(set_clock, monkeypatch):
    clock = set_clock(Clock(1000.0))
    monkeypatch.setattr("tqdm.std.time", clock)
    return clock


class Run:
    """A simulated run whose steps take `seconds` each, with a progress action."""

    def __init__(self, *, stream=None, seconds=1.0, total=None, **options):
        self.stream = stream or io.StringIO()
        self.clock, self.seconds, self.total = timing.clock, seconds, total
        self.history = History()
        self.elapsed = Elapsed()
        self.action = ProgressAction(stream=self.stream, **options)

    def steps(self, number, outputs=None):
        for _ in range(number):
            self.clock.now += self.seconds
            self.elapsed = self.elapsed.advance(samples=32, time=self.clock.now)
            step = self.elapsed.steps
            logs = {"loss": np.float32(1 / step)} if outputs is None else outputs
            context = {"elapsed": self.elapsed, "history": self.history, "total_steps": self.total}
            self.action(None, LoopOutputs(logs), step_num=step, **context)
        return self

    def evaluation(self, **logs):
        self.history.commit(self.elapsed, {"train": {"loss": 1.0}})
        self.history.commit(self.elapsed, logs)
        return self

    def close(self):
        self.action.close()
        return self

    @property
    def text(self):
        return self.stream.getvalue()

    @property
    def lines(self):
        """The lines that a terminal shows at the end."""
        return [line.rsplit("\r", 1)[-1].rstrip() for line in self.text.rstrip("\n").split("\n")]


# Terminals and notebooks ------------------------------------------------------------------------------


def test_tqdm_shows_steps_time_and_metrics_on_a_terminal():
    run = Run(stream=Terminal(), total=40, min_seconds=0).steps(10)
    assert re.search(r"\r 25%\|.*\| 10/40 \[.*steps/s, loss=0.1000\]$", run.text)
    run.evaluation(test={"accuracy": 0.5}).steps(30).close()
    assert run.lines[0] == "step 10  test: accuracy 0.5000"
    assert re.match(r"100%\|[█#]+\| 40/40 \[.*loss=0.0250\]$", run.lines[1]) and len(run.lines) == 2


def test_a_bar_fits_the_terminal():
    columns = 40
    master, slave = os.openpty()
    termios.tcsetwinsize(slave, (columns // 2, columns))
    with open(slave, "w") as stream:
        Run(stream=stream, total=400).steps(3, {"a_long_name_of_a_metric": 0.5, "another": 0.25}).close()
    text = b""
    with open(master, "rb", buffering=0) as shown, contextlib.suppress(OSError):  # Raised at the end of the data.
        while part := shown.read(4096):
            text += part
    drawn = [line for line in re.split("[\r\n]+", text.decode()) if line.strip()]
    assert "3/400" in drawn[-1] and max(map(len, drawn)) <= columns


def test_log_lines_are_written_above_the_bar(warnings_logged):
    run = Run(stream=Terminal(), total=40).steps(3)
    assert not run.text.endswith(" \r")
    logging.warning("the disk is slow")
    assert run.text.rstrip("\r").endswith(" ")  # The bar was cleared before.
    run.steps(1).close()
    assert run.lines[-1].startswith(" 10%|")
    length = len(run.text)
    logging.warning("after the run")
    assert len(run.text) == length


@pytest.mark.parametrize("bar", ["tqdm", "plain"])
def test_announces_compilation(bar):
    run = Run(stream=Terminal(), bar=bar, total=40)
    run.action.begin_run(7, can_resume=False)
    rest = "" if bar == "plain" else r": 7 steps \[.*"
    assert re.fullmatch(f"compiling the first step{rest}", run.lines[-1].strip())
    run.steps(1).close()
    assert "compiling" not in run.lines[-1] and "1/40" in run.lines[-1]


def test_a_notebook_gets_a_bar_in_its_output(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))
    action = ProgressAction(9, min_seconds=0)
    for step in range(1, 10):
        action(None, {"loss": 0.5}, step_num=step)
    action.close()
    shown = capsys.readouterr()
    assert shown.out.count("\r") >= 8 and shown.out.rstrip().endswith("loss=0.5000]")
    assert shown.err == ""


# Files ------------------------------------------------------------------------------------------------


def test_plain_lines():
    run = Run(total=10_000, seconds=0.5).steps(4650, {"loss": 0.0718, "accuracy": 0.9779, "jaxloop/x": 3.0})
    assert run.lines[0] == "0/10000 [00:00<?, ? steps/s]"
    assert re.match(r"21/10000 \[00:10<1:\d\d:\d\d,  2.\d\d steps/s, accuracy=0.9779, loss=0.0718\]$", run.lines[1])
    run.close()
    assert run.lines[-1].startswith("4650/10000 [38:44<") and len(run.lines) < 300


@pytest.mark.parametrize(("total", "seconds"), [(10_000, 0.02), (None, 60.0)])
def test_a_log_stays_small(total, seconds):
    run = Run(total=total, seconds=seconds).steps(10_000).close()
    drawings = [part for part in re.split("[\r\n]+", run.text) if part.strip()]
    assert 20 <= len(drawings) <= 500
    assert drawings[0].startswith("0/") and drawings[-1].startswith("10000/")


def test_evaluation_results_are_separate_lines():
    run = Run(total=100, seconds=0.2).steps(5)
    run.evaluation(test={"loss": 0.0713, "accuracy": 0.98123, "jaxloop/steps_per_sec": 3.0, "note": "hello"})
    run.evaluation(**{"valid/loss": 2e-4, "lr": 0.5, "jaxloop/x": 1.0}).steps(3)
    assert run.lines[1:] == ["step 5  test: accuracy 0.9812  loss 0.0713", "step 5  valid: loss 2.0000e-04"]
    run.evaluation(test={"loss": 0.05}).close()  # After the last step.
    assert run.lines[3] == "step 8  test: loss 0.0500"
    assert run.lines[4].startswith("8/100") and len(run.lines) == 5


@pytest.mark.parametrize("bar", ["tqdm", "plain"])
def test_a_resumed_run_restarts_its_timer_and_omits_old_results(bar):
    run = Run(bar=bar, total=5000, seconds=2.0)
    run.elapsed = Elapsed(4000)
    run.evaluation(test={"accuracy": 0.5})
    run.action.begin_run(4000, can_resume=True)
    run.steps(11).close()
    assert "test" not in run.text
    assert re.match(r"( 80%\|.*\| )?4011/5000 \[00:22<", run.lines[-1])


def test_reading_results_does_not_wait_for_train_metrics(monkeypatch):
    run = Run(total=100).steps(5)
    run.evaluation(test={"accuracy": 0.1}).steps(1)
    run.history.commit(run.elapsed, {"train": {"loss": jax.numpy.ones(())}})
    monkeypatch.setattr(History, "flush", lambda self: pytest.fail("It waits."))
    run.steps(5)


# Metrics ----------------------------------------------------------------------------------------------


def test_shows_scalars_only():
    outputs = {"images": np.zeros([2, 3]), "lr": MetricWithMetadata(np.float32(0.5)), "mean": [1.0, 3.0], "no": [None]}
    assert Run(total=9).steps(1, outputs).close().lines[-1].endswith("lr=0.5000, mean=2.0000]")
    assert not ProgressAction.needs_all_outputs and ProgressAction.uses_outputs


@pytest.mark.parametrize("bar", ["tqdm", "plain"])
def test_a_run_inside_another_bar_keeps_that_bar(bar):
    stream = Terminal()
    for _ in tqdm.tqdm(range(1), file=stream, desc="outer"):
        run = Run(stream=stream if bar == "tqdm" else None, bar=bar, total=20, min_seconds=0).steps(10)
        run.evaluation(test={"loss": 0.5}).steps(10).close()
    before, _, after = run.text.partition("step 10  test: loss 0.5000\n")
    if bar == "tqdm":
        assert before.endswith("\r\x1b[A") and after.startswith("\router:")  # The line takes the outer bar's place.
    else:
        assert after and "\x1b" not in run.text


def test_total_steps_overrides_the_total_of_the_run():
    assert Run(total_steps=8, total=100).steps(2).close().lines[-1].startswith("2/8")
    assert Run(total=100).steps(2).close().lines[-1].startswith("2/100")
    assert Run().steps(2).close().lines[-1].startswith("2/?")


def test_only_the_first_process_shows_progress(monkeypatch):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert Run(total=10).steps(10).evaluation(test={"loss": 1.0}).close().text == ""


# Several runs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bar", ["tqdm", "plain"])
def test_an_action_can_be_reused(bar):
    run = Run(stream=Terminal(), bar=bar, total=20).steps(20).close()
    assert run.text.endswith("\n")
    first = len(run.text)
    run.close()
    assert len(run.text) == first
    run.total = 30
    run.steps(10).close()
    assert re.search(r"\b30/30\b", run.lines[-1])


@pytest.mark.parametrize("bar", ["tqdm", "plain"])
def test_a_rewound_run_shows_repeated_steps_and_results(bar):
    run = Run(stream=Terminal(), bar=bar, total=20, min_seconds=0).steps(15).evaluation(test={"loss": 0.5}).steps(1)
    run.elapsed, run.history = Elapsed(10), History()
    run.steps(5).evaluation(test={"loss": 0.25}).steps(1).close()
    results = [line for line in run.lines if "test" in line]
    assert results == ["step 15  test: loss 0.5000", "step 15  test: loss 0.2500"]
    assert re.search(r"\b16/20\b", run.lines[-1])
