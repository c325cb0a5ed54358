"""PeriodicAction with real clu objects, which import TensorFlow."""

import subprocess
import sys
import threading
import warnings

import jax
import numpy as np
import pytest

from jaxloop.actions import LogWriter, PeriodicAction, is_periodic
from jaxloop.schedules import Elapsed


@pytest.fixture(scope="module")
def periodic_actions():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # From TensorFlow.
        return pytest.importorskip("clu.periodic_actions")


def run(action, first_step, last_step):
    for step in range(first_step, last_step + 1):
        assert action.interval(Elapsed(step))
        action(None, {"loss": 1.0}, step_num=step, elapsed=Elapsed(step), history=None, total_steps=last_step)


def test_clu_objects_are_recognized_without_importing_clu(periodic_actions):
    class Mine(periodic_actions.PeriodicCallback):
        pass

    for make in (periodic_actions.PeriodicCallback, Mine):
        assert is_periodic(make(every_steps=1, callback_fn=print))
    assert is_periodic(periodic_actions.ReportProgress()) and is_periodic(periodic_actions.Profile(logdir="/tmp"))
    assert not is_periodic(PeriodicAction) and not is_periodic(print) and not is_periodic(None)
    program = (
        "import sys; from jaxloop.actions import is_periodic; is_periodic(3);"
        "print([name for name in sys.modules if name.startswith(('clu.periodic', 'tensorflow'))])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_callback_receives_the_step_and_the_time(periodic_actions):
    calls = []
    callback = periodic_actions.PeriodicCallback(every_steps=10, callback_fn=lambda step, t: calls.append((step, t)))
    action = PeriodicAction(callback)
    run(action, 1, 35)
    action.close()
    assert [step for step, _ in calls] == [10, 20, 30] and all(isinstance(t, float) for _, t in calls)
    assert not PeriodicAction.uses_outputs


def test_progress_is_reported_and_written(periodic_actions):
    class Writer(LogWriter):
        written: list = []  # noqa: RUF012

        def write_scalars(self, step, scalars):
            self.written.append((step, *scalars))

    report = periodic_actions.ReportProgress(num_train_steps=40, every_steps=20, every_secs=None, writer=Writer())
    run(PeriodicAction(report), 1, 40)
    assert Writer.written == [(20, "steps_per_sec"), (20, "uptime"), (40, "steps_per_sec"), (40, "uptime")]


@pytest.mark.parametrize("first_step", [1, 4001, 36, 35])
def test_another_run_may_start_at_any_step(first_step, periodic_actions):
    """clu itself raises an error if a step doesn't follow the previous one."""
    steps = []
    callback = periodic_actions.PeriodicCallback(every_steps=10, callback_fn=lambda step, t: steps.append(step))
    action = PeriodicAction(callback)
    run(action, 1, 35)
    steps.clear()
    run(action, first_step, first_step + 19)
    np.testing.assert_array_equal(np.mod(steps, 10), 0)
    assert len(steps) == 2


def test_close_writes_a_profile_that_is_still_being_recorded(tmp_path, periodic_actions):
    action = PeriodicAction(periodic_actions.Profile(logdir=tmp_path, first_profile=5))
    run(action, 1, 6)
    action.close()
    assert list(tmp_path.glob("plugins/profile/*/*.xplane.pb"))
    jax.profiler.start_trace(str(tmp_path))  # No other trace is running.
    jax.profiler.stop_trace()


def test_close_waits_for_an_asynchronous_callback_and_raises_its_error(periodic_actions):
    may_end = threading.Event()

    def fails(step, t):
        assert may_end.wait(10)
        raise IndexError("out of range")

    action = PeriodicAction(periodic_actions.PeriodicCallback(every_steps=5, callback_fn=fails, execute_async=True))
    action.close()  # Before the first call.
    run(action, 1, 5)
    may_end.set()
    with pytest.raises(IndexError, match="out of range"):
        action.close()


def test_other_objects_are_rejected(periodic_actions):
    with pytest.raises(TypeError, match=r"takes an object of clu.periodic_actions, such as ReportProgress\(\), got 3"):
        PeriodicAction(3)
    assert repr(PeriodicAction(periodic_actions.ReportProgress())) == "PeriodicAction(ReportProgress)"
