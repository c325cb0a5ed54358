"""Counts the device reads, waits and live arrays of a run."""

import gc
import itertools
import pathlib
import sys

import jax
import numpy as np
import pytest
from programs import tiny
from programs.acts import Do, lengths
from programs.models import squares
from programs.tiny import BATCHES, STATE, STEP

import jaxloop
from jaxloop import every, examples, metrics
from jaxloop.schedules import never


def long_run(steps, log, **options):
    """Trains for `steps` steps, with a log point every `log` steps."""
    loop = jaxloop.TrainLoop(STEP, **options)
    run = jaxloop.OuterLoop(loop, log_interval=every(steps=log))
    return run(STATE, itertools.cycle(BATCHES), steps, log_train_total_steps=False), run


@pytest.mark.parametrize(
    ("steps", "log", "options"), [(1000, 100, {}), (3000, 300, {"steps_per_dispatch": 32}), (3000, 1000, {})]
)
def test_run_reads_device_values_only_at_log_points(steps, log, options, reads):
    _, run = long_run(steps, log, **options)
    assert len(run.history) == steps / log
    assert reads.count("fetch") <= steps / log + 5


@pytest.mark.parametrize(("log_interval", "most"), [(never(), 20), (100, 20), (1, 210)])
def test_end_of_a_loop_reads_device_values_only_if_something_is_due(log_interval, most, reads):
    run = jaxloop.OuterLoop(jaxloop.TrainLoop(STEP), log_interval=log_interval)
    run(STATE, itertools.cycle(BATCHES), 2000, 10, log_train_total_steps=False)
    assert reads.count("fetch") <= most


def test_number_of_live_arrays_does_not_grow():
    alive = {}

    def count(step_num, **_):
        if step_num in (100, 2000):
            gc.collect()
            alive[step_num] = len(jax.live_arrays())

    long_run(2000, 100, end_actions=[Do(count, every(steps=100))])
    assert alive[2000] == alive[100]


@pytest.mark.parametrize(("most", "reports"), [(1, False), (7, True)])
def test_max_steps_in_flight_limits_how_far_the_host_runs_ahead(most, reports, monkeypatch):
    started, done, ahead = 0, 0, []
    waited_at, wait = [0], metrics.wait
    monkeypatch.setattr(metrics, "wait", lambda tree: waited_at.append(started) or wait(tree))

    class Counted(jaxloop.Step):
        def run(self, state, batch):
            jax.debug.callback(note_done)
            return state.replace(step=state.step + 1), {"x": batch["x"].mean()} if reports else None

    def note_done():
        nonlocal done
        done += 1

    def batches():
        nonlocal started
        for _ in range(200):
            ahead.append(started - done)
            started += 1
            yield {"x": np.ones(3, np.float32)}

    example, state, _ = examples.tiny_regression()
    step = Counted(jax.random.key(0), example.model, train=False)
    jaxloop.loop.Loop(step, max_steps_in_flight=most)(state, batches())
    jax.effects_barrier()
    assert done == 200 and max(ahead) <= most
    # A CPU may keep up with the host, so also check the waits, which enforce the limit.
    assert max(after - before for before, after in itertools.pairwise(waited_at)) <= most
    assert waited_at[-1] > 200 - most


@pytest.mark.parametrize("bad", [0, 1.5])
def test_max_steps_in_flight_must_be_a_positive_int(bad):
    for loop in (jaxloop.loop.Loop, jaxloop.TrainLoop, jaxloop.EvalLoop):
        with pytest.raises((TypeError, ValueError), match="max_steps_in_flight must be a positive int or None"):
            loop(STEP, max_steps_in_flight=bad)


# Calls ------------------------------------------------------------------------------------------------

PACKAGE = str(pathlib.Path(jaxloop.__file__).parent)
# Functions only in some versions of Python.
COMPREHENSIONS = {"<listcomp>", "<dictcomp>", "<setcomp>"}


@pytest.fixture
def calls():
    """Counts the calls of the package's functions between two marks: `calls(start)`, `calls(stop)`."""
    counted, is_on = [], False

    def profile(frame, event, arg):
        code = frame.f_code
        if is_on and event == "call" and code.co_filename.startswith(PACKAGE) and code.co_name not in COMPREHENSIONS:
            counted.append(code.co_qualname)

    def switch(on):
        nonlocal is_on
        is_on = on
        sys.setprofile(profile)
        return len(counted)

    yield switch
    sys.setprofile(None)


def marked(batches, marks, calls):
    """Yields batches, and starts or stops counting when those with the given numbers are read."""
    for number, batch in enumerate(itertools.cycle(batches)):
        if number in marks:
            marks[number] = calls(marks[number])
        yield batch


LOSS_STEP = tiny.make_step(jaxloop.LossStep, loss=squares, inputs="x", batch_size=8)


@pytest.mark.parametrize(("step", "most"), [(STEP, 430), (LOSS_STEP, 2350)], ids=["Step", "LossStep"])
def test_64_batches_with_nothing_due_take_few_calls(step, most, calls):
    marks = {640: True, 704: False}
    run = jaxloop.OuterLoop(jaxloop.TrainLoop(step), log_interval=every(steps=1000))
    run(step.initialize_model([1, 3]), marked(BATCHES, marks, calls), 900)
    assert 64 * 4 < marks[704] <= most, marks


def test_a_batch_with_a_row_and_an_action_takes_few_calls(calls):
    look = lengths(every(steps=1))
    marks = {30: True, 31: False}
    run = jaxloop.OuterLoop(jaxloop.TrainLoop(STEP, end_actions=[look]), log_interval=every(steps=1))
    run(STATE, marked(BATCHES, marks, calls), 40)
    assert look.seen == [(number, 1) for number in range(1, 41)]
    assert 20 < marks[31] <= 165, marks
