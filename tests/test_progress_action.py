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
def clock(set_clock):
    return set_clock(Clock(1000.0))


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


BARS = ("auto", "tqdm", "plain")


# Terminals and notebooks ------------------------------------------------------------------------------


@pytest.mark.parametrize("bar", ["auto", "tqdm"])
def test_tqdm_shows_steps_time_and_metrics_on_a_terminal(bar):
    run = Run(stream=Terminal(), bar=bar, total=40).steps(10)
    assert re.search(r"\r 25%\|.*\| 10/40 \[.*steps/s, loss=0.1000\]$", run.text)
    run.evaluation(test={"accuracy": 0.5}).steps(30).close()
    assert run.lines[0] == "step 10  test: accuracy 0.5000"
    assert re.match(r"100%\|[█#]+\| 40/40 \[.*loss=0.0250\]$", run.lines[1]) and len(run.lines) == 2


def test_tqdm_without_a_total_counts_steps():
    run = Run(stream=Terminal(), bar="tqdm").steps(10).close()
    assert re.match(r"10 steps \[.*loss=0.1000\]$", run.lines[-1])


@pytest.mark.parametrize(("columns", "rows", "longest"), [(0, 0, 100), (40, 20, 40), (60, 20, 60)])
def test_a_bar_fits_terminals_of_known_and_unknown_size(columns, rows, longest):
    master, slave = os.openpty()
    termios.tcsetwinsize(slave, (rows, columns))
    with open(slave, "w") as stream:
        Run(stream=stream, total=400).steps(3, {"a_long_name_of_a_metric": 0.5, "another": 0.25}).close()
    text = b""
    with open(master, "rb", buffering=0) as shown, contextlib.suppress(OSError):  # Raised at the end of the data.
        while part := shown.read(4096):
            text += part
    drawn = [line for line in re.split("[\r\n]+", text.decode()) if line.strip()]
    assert "3/400" in drawn[-1] and max(map(len, drawn[:-1])) <= longest
    assert drawn[-1].endswith("a_long_name_of_a_metric=0.5000, another=0.2500]")  # The last line is shown in full.


def test_log_lines_are_written_above_the_bar(warnings_logged):
    run = Run(stream=Terminal(), total=40).steps(3)
    assert not run.text.endswith("\r\x1b[K")
    logging.warning("the disk is slow")
    assert run.text.endswith("\r\x1b[K")  # The bar was cleared before.
    run.steps(1).close()
    assert run.lines[-1].startswith(" 10%|")
    length = len(run.text)
    logging.warning("after the run")
    assert len(run.text) == length


@pytest.mark.parametrize("bar", ["tqdm", "plain"])
def test_announces_compilation_and_leaves_no_bar_on_failure(bar):
    run = Run(stream=Terminal(), bar=bar, total=40)
    run.action.begin_run(7, can_resume=False)
    assert "step 7: compiling the first step" in run.text
    run.steps(1)
    assert " 1/40" in run.text or "step 1 of 40" in run.text
    failed = Run(stream=Terminal(), bar=bar, total=40)
    failed.action.begin_run(0, can_resume=False)
    failed.close()
    assert not any("/40" in line or "of 40" in line for line in failed.lines)  # No bar remains.


def test_a_bar_in_a_notebook_is_redrawn_on_stdout(monkeypatch, capsys):
    """The bar also works without ipywidgets, and without the warning that tqdm would print."""
    shell = types.SimpleNamespace(kernel=True)
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
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
    assert run.lines[0] == "step 1 of 10,000 (0%)  accuracy 0.9779  loss 0.0718"
    assert run.lines[1] == "step 21 of 10,000 (0%)  2.0 steps/s  1:23:10 left  accuracy 0.9779  loss 0.0718"
    run.close()
    assert run.lines[-1] == "step 4,650 of 10,000 (46%)  2.0 steps/s  took 38 min 44 s  accuracy 0.9779  loss 0.0718"


@pytest.mark.parametrize("bar", BARS)
@pytest.mark.parametrize("total", [10_000, None])
@pytest.mark.parametrize("seconds", [0.02, 60.0])
def test_a_log_stays_small(bar, total, seconds):
    metrics = {f"metric_{index}": 0.5 for index in range(6)}
    run = Run(bar=bar, total=total, seconds=seconds).steps(10_000, metrics).close()
    assert len(run.text.encode()) < 20_000
    drawings = [part for part in re.split("[\r\n]+", run.text) if part.strip()]
    assert 3 <= len(drawings) <= 110
    assert re.match(r"(step 1\b|\s*0%.* 1/|1 steps)", drawings[0])
    assert re.search(r"(10,000|10000)", drawings[-1])


def test_evaluation_results_are_separate_lines():
    run = Run(total=100, seconds=0.2).steps(5)
    run.evaluation(test={"loss": 0.0713, "accuracy": 0.98123, "jaxloop/steps_per_sec": 3.0, "note": "hello"})
    run.evaluation(**{"valid/loss": 2e-4, "lr": 0.5, "jaxloop/x": 1.0}).steps(3)
    assert run.lines[1:] == ["step 5  test: accuracy 0.9812  loss 0.0713", "step 5  valid: loss 2.0000e-04"]
    run.evaluation(test={"loss": 0.05}).close()  # After the last step.
    assert run.lines[3] == "step 8  test: loss 0.0500"
    assert run.lines[4].startswith("step 8 of 100 (8%)") and len(run.lines) == 5


@pytest.mark.parametrize("bar", BARS)
def test_a_resumed_run_restarts_its_timer_and_omits_old_results(bar):
    run = Run(bar=bar, total=5000, seconds=2.0)
    run.elapsed = Elapsed(4000)
    run.evaluation(test={"accuracy": 0.5})
    run.steps(11).close()
    assert "test" not in run.text
    line = r" 80%\|.*\| 4011/5000" if bar == "tqdm" else r"step 4,011 of 5,000 \(80%\)  2.0 s/step  took 20.0 s"
    assert re.match(line, run.lines[-1])


def test_a_result_before_the_first_step_is_shown():
    run = Run(total=100).evaluation(test={"accuracy": 0.1}).steps(1)
    assert run.lines[0] == "step 0  test: accuracy 0.1000"


def test_reading_results_does_not_wait_for_train_metrics(monkeypatch):
    run = Run(total=100).steps(5)
    run.evaluation(test={"accuracy": 0.1}).steps(1)
    run.history.commit(run.elapsed, {"train": {"loss": jax.numpy.ones(())}})
    monkeypatch.setattr(History, "flush", lambda self: pytest.fail("It waits."))
    run.steps(5)


# Metrics ----------------------------------------------------------------------------------------------


def test_names_select_and_order_the_metrics(warnings_logged):
    run = Run(names=["loss", "accuracy", "jaxloop/x", "los"], total=9)
    run.steps(3, {"accuracy": 0.5, "other": 1.0, "jaxloop/x": 3.0}).steps(1, {"loss": 0.25}).close()
    assert run.lines[-1].endswith("took 3.0 s  loss 0.2500  accuracy 0.5000  jaxloop/x 3.0000")
    assert warnings_logged() == [
        "ProgressAction showed no los, because no output has that name. There were: accuracy, jaxloop/x, loss, other."
    ]


def test_does_not_read_values_from_devices(monkeypatch):
    class OnDevice:
        def __array__(self):
            raise AssertionError("It was read.")

    outputs = {"loss": jax.numpy.ones(()), "images": np.zeros([2, 3]), "lr": MetricWithMetadata(np.float32(0.5))}
    run = Run(total=9).steps(1, {**outputs, "mean": [1.0, 3.0], "lost": [OnDevice()], "no": [None]})
    assert run.lines == ["step 1 of 9 (11%)  lr 0.5000  mean 2.0000"]
    assert not ProgressAction.needs_all_outputs and ProgressAction.uses_outputs


def test_total_steps_overrides_the_total_of_the_run():
    assert Run(total_steps=8, total=100).steps(2).lines[0].startswith("step 1 of 8 (12%)")
    assert Run(total=100).steps(2).lines[0].startswith("step 1 of 100 (1%)")
    assert Run().steps(2).lines[0] == "step 1  loss 1.0000"


def test_draws_at_most_once_per_min_seconds():
    run = Run(stream=Terminal(), total=10_000, seconds=0.001, min_seconds=0.5).steps(1000)
    assert run.text.count("loss=") == 2
    run.steps(9000)
    assert run.text.count("loss=") == 2 + 18 + 1  # Plus the last step.


def test_only_the_first_process_shows_progress(monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert Run(total=10).steps(10).evaluation(test={"loss": 1.0}).close().text == ""


# Several runs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bar", BARS)
def test_an_action_can_be_reused(bar):
    run = Run(stream=Terminal(), bar=bar, total=20).steps(20).close()
    assert run.text.endswith("\n")
    first = len(run.text)
    run.close()
    assert len(run.text) == first
    run.total = 30
    run.steps(10).close()
    assert re.search(r"\b30(/30| of 30)\b", run.lines[-1])


def test_a_new_run_closes_an_unclosed_one():
    run = Run(total=20).steps(15)
    run.elapsed, run.clock.now = Elapsed(), 5000.0
    run.steps(3).close()
    assert [line.split("  loss")[0] for line in run.lines[2:]] == [
        "step 15 of 20 (75%)  1.0 steps/s  took 14.0 s",  # Without the time between the runs.
        "step 1 of 20 (5%)",
        "step 3 of 20 (15%)  1.0 steps/s  took 2.0 s",
    ]


def test_a_standalone_loop_ends_the_bar_at_its_last_step():
    run = Run(bar="plain").steps(5)
    run.action.flush()
    assert len(run.lines) == 1
    run.action(None, {}, step_num=6, elapsed=Elapsed(6, is_last=True))
    run.action.flush()
    assert run.lines[1].startswith("step 6")


# Arguments --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"bar": "keras"}, ValueError, "one of 'auto', 'tqdm', 'plain', got 'keras'. Write bar='tqdm' for a bar"),
        ({"total_steps": 0}, ValueError, "total_steps must be a positive int or None, got 0"),
        ({"min_seconds": -1}, ValueError, "min_seconds must not be negative, got -1"),
        ({"names": "loss"}, TypeError, r"names takes a list of names, got 'loss'. Write \['loss'\]"),
    ],
)
def test_invalid_options_raise(options, error, message):
    with pytest.raises(error, match=message):
        ProgressAction(**options)


def test_stderr_is_looked_up_when_a_run_begins(capsys):
    action = ProgressAction(bar="plain", total_steps=3)
    action(None, {"loss": 0.5}, step_num=1)
    action.close()
    assert capsys.readouterr().err == "step 1 of 3 (33%)  loss 0.5000\n"
