import itertools
import random
import subprocess
import sys
import threading

import numpy as np
import pytest
from programs.acts import Do
from programs.tiny import BATCHES, STATE, STEP

from jaxloop import actions, at, every
from jaxloop.actions import writer_queue
from jaxloop.train_loop import TrainLoop


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

    def open_gate(**_):
        assert writer.has_begun.wait(10) and writer.rows == []
        writer.gate.set()

    summaries = actions.SummaryAction(writer, every(steps=1))
    TrainLoop(STEP, end_actions=[summaries, Do(open_gate, at(50))])(STATE, BATCHES, num_steps=60)
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


# Errors -----------------------------------------------------------------------------------------------


def test_an_error_is_raised_at_the_next_call_and_no_row_is_lost():
    writer = GatedWriter(fails=[2])
    summaries = actions.SummaryAction(writer)
    call(summaries, [1, 2])
    summaries.state_dict()  # Waits, so that step 2 has failed.
    with pytest.raises(OSError, match="the disk is full") as caught:
        call(summaries, [3])
    assert "in SummaryAction(interval=1), after step 2: write_scalars of loss" in caught.value.__notes__[0]
    assert "in the background" in caught.value.__notes__[1]
    assert "write_scalars" in [entry.name for entry in caught.traceback]
    call(summaries, [3])
    summaries.close()
    assert [row[0] for row in writer.rows] == [1, 2, 3]


def test_an_error_is_raised_once_at_the_end_and_written_rows_are_flushed():
    writer = GatedWriter(fails=[2])
    summaries, another = (actions.SummaryAction(writer) for _ in range(2))
    call(summaries, [1, 2])
    with pytest.raises(OSError, match="the disk is full") as caught:
        summaries.close()
    assert "after step 2" in caught.value.__notes__[0] and writer.flushes == 1
    another.close()
    assert writer.flushes == 2 and [row[0] for row in writer.rows] == [1]


def test_unwritten_rows_are_saved_and_written_first_after_a_resume():
    broken, whole = GatedWriter(fails=[2]), GatedWriter()
    one, two = (actions.SummaryAction(broken, prefix=prefix) for prefix in ("one/", "two/"))
    call(one, [1])
    one.flush()
    broken.gate.clear()
    call(one, [2])
    image = np.arange(2.0).reshape([1, 1, 2, 1])
    call(two, [3], loss=1.0, image=image)
    image[:] = -1  # It was copied.
    call(one, [4])
    broken.gate.set()
    kept = [each.state_dict() for each in (one, two)]
    with pytest.raises(OSError):
        one.close()
    two.close()
    assert broken.rows == [(1, "one/loss")]
    one, two = (actions.SummaryAction(whole, prefix=prefix) for prefix in ("one/", "two/"))
    for action, state_dict in zip((one, two), kept, strict=True):
        action.load_state_dict(state_dict)
        assert action.state_dict() == state_dict  # Nothing is written before the run begins.
    one.begin_run(4, can_resume=True)
    two.begin_run(4, can_resume=True)
    call(two, [5])
    assert one.state_dict() == two.state_dict() == {}  # Everything is written.
    assert whole.rows == [
        (4, "resume"),  # First, because it hides the rows before it.
        (2, "one/loss"),
        (3, "two/loss"),
        (3, {"two/image": [[[[0.0], [1.0]]]]}),
        (4, "one/loss"),
        (5, "two/loss"),
    ]
    two.close()


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


def test_rows_saved_in_a_checkpoint_are_not_written_twice_by_the_same_process():
    writer = GatedWriter(fails=[1])
    before = actions.SummaryAction(writer)
    call(before, [1])
    kept = before.state_dict()
    with pytest.raises(OSError):
        before.close()
    after = actions.SummaryAction(writer)
    after.load_state_dict(kept)
    call(after, [2])
    after.close()
    assert writer.rows == [(1, "loss"), (2, "loss")]


@pytest.mark.parametrize("seed", range(4))
def test_each_row_is_written_once_and_in_order_whenever_a_writer_fails(seed):
    """Calls, saves and restores actions at random, with a writer that fails at random."""
    rng, steps, written = random.Random(seed), list(range(1, 30)), []
    fails = [step for step in steps if rng.random() < 0.2]
    make = lambda writer: [actions.SummaryAction(writer, prefix=f"{name}/") for name in "ab"]
    writer = GatedWriter(fails=fails)
    pair = make(writer)
    for step, action in itertools.product(steps, range(2)):
        while True:
            try:
                call(pair[action], [step])
                break
            except OSError:  # The run ends, and resumes from the saved state.
                kept = [each.state_dict() for each in pair]
                for each in pair:
                    each.close()
                written, fails = [*written, *writer.rows], writer.fails
                writer = GatedWriter(fails=fails)
                pair = make(writer)
                for each, state_dict in zip(pair, kept, strict=True):
                    each.load_state_dict(state_dict)
        if rng.random() < 0.3:
            [each.state_dict() for each in pair]
    while True:
        try:
            pair[0].close()
            break
        except OSError:
            call(pair[0], [0])  # Retries the remaining rows.
    assert len(writer.threads) == 1  # The two actions share it.
    written = [row for row in [*written, *writer.rows] if row[0]]
    assert written == [(step, f"{name}/loss") for step in steps for name in "ab"]


# The end ----------------------------------------------------------------------------------------------


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


FORK = "import os, sys\nif os.fork() == 0:\n    sys.exit()\ndel summaries\nraise KeyError('x')"


@pytest.mark.parametrize(
    ("end", "code", "fails", "left", "message"),
    [
        ("", 0, [5], 5, "Summaries could not be written"),
        (FORK, 1, [], 20, "KeyError: 'x'"),  # The child writes nothing.
    ],
    ids=["after an error", "an exception after a fork"],
)
def test_pending_rows_are_written_when_a_program_ends(end, code, fails, left, message):
    program = PROGRAM.format(end=end, fails=fails)
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert run.returncode == code and message in run.stderr, run.stderr
    assert [int(line) for line in run.stdout.splitlines()] == list(range(left))
    assert ("the disk is full" in run.stderr) == (left < 20)
