import itertools
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest

from jaxloop import actions, every, examples
from jaxloop.actions import writer_queue
from jaxloop.outer_loop import OuterLoop
from jaxloop.train_loop import TrainLoop
from jaxloop.types import MetricType, MetricWithMetadata


class GatedWriter:
    """Writes rows once its gate is open, and records the threads. Raises once for each step in `fails`."""

    def __init__(self, *, is_open=True, fails=()):
        self.gate, self.has_begun = threading.Event(), threading.Event()
        self.rows, self.threads, self.fails, self.flushes = [], set(), list(fails), 0
        if is_open:
            self.gate.set()

    def write_scalars(self, step, scalars):
        self.has_begun.set()
        self.threads.add(threading.current_thread().name)
        assert self.gate.wait(10)
        if step in self.fails:
            self.fails.remove(step)
            raise OSError("the disk is full")
        self.rows.append((step, *scalars))

    def write_images(self, step, arrays, num_buckets=None):
        assert self.gate.wait(10)
        self.rows.append((step, {name: array.tolist() for name, array in arrays.items()}))

    write_histograms = write_images

    def resume(self, step, position):
        self.rows.append((step, "resume"))

    def flush(self):
        self.flushes += 1


def call(action, steps, **outputs):
    for step in steps:
        action(None, outputs or {"loss": 1.0}, step_num=step)


# Writing in the background ----------------------------------------------------------------------------


def test_a_loop_continues_while_the_writer_blocks():
    writer = GatedWriter(is_open=False)

    class Open(actions.Action):
        def __call__(self, state, outputs, *, step_num, **kwargs):
            if step_num == 50:
                assert writer.has_begun.wait(10) and writer.rows == []
                writer.gate.set()

    step, state, batches = examples.tiny_regression()
    summaries = actions.SummaryAction(writer, every(steps=1))
    TrainLoop(step, end_actions=[summaries, Open(every(steps=1))])(state, batches, num_steps=60)
    assert [row[0] for row in writer.rows] == list(range(1, 61)) and len(writer.threads) == 1


def test_the_number_of_pending_rows_is_limited():
    writer, done = GatedWriter(is_open=False), []
    summaries = actions.SummaryAction(writer)

    def write():
        for step in range(writer_queue.MOST_PENDING + 10):
            call(summaries, [step])
            done.append(step)

    thread = threading.Thread(target=write)
    thread.start()
    assert writer.has_begun.wait(10)
    thread.join(0.1)
    assert len(done) == writer_queue.MOST_PENDING and thread.is_alive()
    writer.gate.set()
    thread.join()
    summaries.flush()
    assert [row[0] for row in writer.rows] == list(range(writer_queue.MOST_PENDING + 10))


def test_actions_that_share_a_writer_share_a_thread_and_keep_their_order():
    writer = GatedWriter(is_open=False)
    summaries = [actions.SummaryAction(writer, prefix=f"{name}/") for name in "abc"]
    for step, summary in itertools.product(range(5), summaries):
        call(summary, [step])
    writer.gate.set()
    summaries[0].flush()
    assert len(writer.threads) == 1
    assert writer.rows == [(step, f"{name}/loss") for step in range(5) for name in "abc"]


def test_arrays_can_be_modified_after_a_call():
    writer, images, weights = GatedWriter(is_open=False), np.zeros([1, 1, 2, 1]), np.zeros([2])
    summaries = actions.SummaryAction(writer)
    call(summaries, [1], images=images, weights=MetricWithMetadata(weights, MetricType.HISTOGRAM))
    images[:] = weights[:] = -1
    writer.gate.set()
    summaries.flush()
    assert writer.rows == [(1, {"images": [[[[0.0], [0.0]]]]}), (1, {"weights": [0.0, 0.0]})]


# Errors -----------------------------------------------------------------------------------------------


def test_an_error_is_raised_at_the_next_call():
    writer = GatedWriter(fails=[2])
    summaries = actions.SummaryAction(writer)
    call(summaries, [1, 2])
    summaries.state_dict()  # Waits, so that step 2 has failed.
    with pytest.raises(OSError, match="the disk is full") as caught:
        call(summaries, [3])
    assert "in SummaryAction(interval=1), after step 2, writing loss: write_scalars" in caught.value.__notes__[0]
    assert "in the background" in caught.value.__notes__[1]
    assert "write_scalars" in [entry.name for entry in caught.traceback]
    call(summaries, [4])
    summaries.close()
    assert [row[0] for row in writer.rows] == [1, 4]


@pytest.mark.parametrize("end", ["flush", "close"])
def test_an_error_is_raised_once_at_the_end_and_written_rows_are_flushed(end):
    writer = GatedWriter(fails=[2])
    summaries, another = (actions.SummaryAction(writer) for _ in range(2))
    call(summaries, [1, 2])
    with pytest.raises(OSError, match="the disk is full") as caught:
        getattr(summaries, end)()
    assert "after step 2" in caught.value.__notes__[0] and writer.flushes == 1
    another.close()
    assert writer.flushes == 2 and [row[0] for row in writer.rows] == [1]


def test_a_run_hides_rows_of_earlier_processes_only():
    writer = GatedWriter()
    one, two = (actions.SummaryAction(writer) for _ in range(2))
    for step in (0, 1):  # The second run does not resume.
        one.begin_run(step, can_resume=True)
        two.begin_run(step, can_resume=True)
        call(one, [step + 1])
    one.flush()
    assert writer.rows == [(0, "resume"), (1, "loss"), (2, "loss")]
    two.load_state_dict({})
    two.begin_run(2, can_resume=True)
    two.flush()
    assert writer.rows[3:] == [(2, "resume")]
    other = GatedWriter()
    action = actions.SummaryAction(other)
    call(action, [1])  # A standalone loop.
    action.begin_run(1, can_resume=True)
    action.flush()
    assert other.rows == [(1, "loss")]


def test_only_the_first_process_writes(monkeypatch):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    writer = GatedWriter()
    action = actions.SummaryAction(writer)
    action.begin_run(0, can_resume=True)
    call(action, [1])
    assert action.state_dict() == {}
    action.flush()
    assert writer.rows == []


def test_the_state_of_a_different_action_raises():
    action = actions.SummaryAction(GatedWriter())
    with pytest.raises(ValueError, match=r"in its state_dict, got \['best'\]\. Was it saved by a different action\?"):
        action.load_state_dict({"best": 1.0})


# The end ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["the end", "an exception", "Ctrl-C"])
def test_everything_is_written_when_a_run_ends(how, interrupted):
    def failing(batches):
        yield from batches[:25]
        raise ZeroDivisionError

    writer = GatedWriter()
    step, state, batches = examples.tiny_regression()
    data = {"the end": batches, "an exception": failing(batches), "Ctrl-C": interrupted(batches, 25)}[how]
    outer_loop = OuterLoop(TrainLoop(step, end_actions=[actions.SummaryAction(writer, every(steps=1))]))
    if how == "an exception":
        with pytest.raises(ZeroDivisionError):
            outer_loop(state, data, 30, 10)
    else:
        outer_loop(state, data, 30, 10)
    assert writer.flushes == 1
    done = {"the end": 30, "an exception": 25, "Ctrl-C": 25}[how]
    assert [row[0] for row in writer.rows] == list(range(1, done + 1))


PROGRAM = """
import time
from jaxloop import actions

class Writer:
    fails = {fails}
    def write_scalars(self, step, scalars):
        time.sleep(0.01)
        if step in self.fails:
            self.fails.remove(step)
            raise OSError("the disk is full")
        print(step, flush=True)
    def flush(self):
        pass

summaries = actions.SummaryAction(Writer())
for step in range(20):
    summaries(None, {{"loss": 1.0}}, step_num=step)
{end}
"""


@pytest.mark.parametrize(
    ("end", "code", "fails", "left", "message"),
    [
        ("", 0, [], 20, ""),
        ("", 0, [5], 20, "Summaries could not be written"),
        ("del summaries\nraise KeyError('x')", 1, [], 20, "KeyError: 'x'"),
        ("import os, sys\nif os.fork() == 0:\n    sys.exit()\nos.wait()", 0, [], 20, ""),  # The child writes nothing.
    ],
    ids=["normally", "after an error", "an exception", "a fork"],
)
def test_pending_rows_are_written_when_a_program_ends(end, code, fails, left, message):
    program = PROGRAM.format(end=end, fails=fails)
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert run.returncode == code and message in run.stderr, run.stderr
    assert [int(line) for line in run.stdout.splitlines()] == [step for step in range(left) if step not in fails]
    assert ("the disk is full" in run.stderr) == bool(fails)
