import concurrent.futures
import importlib.util
import pathlib
import signal
import subprocess
import sys
import time

import pytest
from programs import stubborn
from programs.acts import in_a_thread
from programs.clock import Clock

import jaxloop.distributed.interrupt
from jaxloop.distributed.interrupt import Interruptible

SIGNALS = [signal.SIGINT, signal.SIGTERM]


def handlers():
    return [signal.getsignal(signum) for signum in SIGNALS]


def press_ctrl_c():
    signal.raise_signal(signal.SIGINT)


def terminate():
    signal.raise_signal(signal.SIGTERM)


@pytest.fixture
def handle():
    """Installs a signal handler until the end of the test."""
    before = handlers()
    yield signal.signal
    for signum, handler in zip(SIGNALS, before, strict=True):
        signal.signal(signum, handler)


@pytest.fixture
def interactive(monkeypatch):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)


def test_in_an_interactive_session_the_first_ctrl_c_is_recorded_and_the_second_raises(interactive):
    with Interruptible() as interrupt:
        assert not interrupt.requested and interrupt.signal_name is None
        press_ctrl_c()
        assert interrupt.requested and interrupt.signal_name == "Ctrl-C"
        with pytest.raises(KeyboardInterrupt):
            press_ctrl_c()
    assert handlers() == [signal.default_int_handler, signal.SIG_DFL]


def test_nested_contexts_share_the_request():
    with Interruptible() as outer:
        with Interruptible() as inner:
            press_ctrl_c()
            assert inner.requested
        assert outer.requested
        with Interruptible() as second:
            assert second.requested and second.signal_name == "Ctrl-C"


@pytest.mark.parametrize(("seconds", "raises"), [(1.9, True), (2.1, False)])
def test_ctrl_c_soon_after_the_previous_run_took_one_raises(seconds, raises, monkeypatch):
    clock, interrupt = Clock(), Interruptible()
    monkeypatch.setattr(time, "monotonic", clock)
    with interrupt:
        press_ctrl_c()
    clock.now += seconds
    try:
        with interrupt:
            press_ctrl_c()
            assert interrupt.requested and not raises
    except KeyboardInterrupt:
        assert raises
    assert handlers() == [signal.default_int_handler, signal.SIG_DFL]


def test_after_sigterm_only_the_outermost_context_exits_with_143(warnings_logged):
    reached = []
    with pytest.raises(SystemExit) as exit_, Interruptible() as outer:
        with Interruptible() as inner:
            terminate()
            assert inner.requested and inner.signal_name == "SIGTERM"
        reached.append(outer.signal_name)
    assert exit_.value.code == 143 and reached == ["SIGTERM"]
    assert handlers() == [signal.default_int_handler, signal.SIG_DFL]
    (warning,) = warnings_logged()
    assert warning.startswith("SIGTERM: the run stops after this step, saves, and exits with 143. A second one ends it")


def test_an_immediately_repeated_sigterm_counts_once(monkeypatch):
    monkeypatch.setattr(time, "monotonic", Clock())
    with pytest.raises(SystemExit), Interruptible():
        terminate()
        terminate()


def test_sigterm_soon_after_ctrl_c_in_the_previous_run_counts_as_the_first():
    interrupt = Interruptible()
    with interrupt:
        press_ctrl_c()
    with pytest.raises(SystemExit), interrupt:
        terminate()


def test_an_exception_propagates_with_a_note_about_sigterm():
    with pytest.raises(OSError, match="the disk is full") as error, Interruptible():
        terminate()
        raise OSError("the disk is full")
    (note,) = error.value.__notes__
    assert note == "SIGTERM was received. Without this error, the process would have exited with 143."


@pytest.mark.parametrize(
    ("own", "ours", "handler"),
    [(*SIGNALS, lambda *_: None), (*SIGNALS[::-1], signal.SIG_IGN)],
    ids=["SIGINT", "SIGTERM"],
)
def test_only_signals_that_the_program_handles_itself_are_left_alone(own, ours, handler, handle):
    handle(own, handler)
    before = handlers()
    seen = []
    try:
        with Interruptible() as outer, Interruptible() as inner:
            signal.raise_signal(own)
            seen.append(outer.requested)
            signal.raise_signal(ours)
            seen.append(inner.requested)
    except SystemExit:
        assert ours == signal.SIGTERM
    assert seen == [False, True] and handlers() == before


def test_a_handler_installed_during_a_run_is_kept(handle):
    handler = lambda *_: None
    with Interruptible():
        handle(signal.SIGTERM, handler)
    assert handlers() == [signal.default_int_handler, handler]


def test_other_threads_install_no_handlers():
    before, seen = handlers(), []

    def work():
        with Interruptible() as interrupt:
            seen.append((handlers(), interrupt.requested))

    in_a_thread(work)
    assert seen == [(before, False)]


def test_a_run_in_another_thread_shares_the_request_and_does_not_exit():
    ended = []

    def work():
        with Interruptible() as inner:
            ended.append(inner.signal_name)
        ended.append("quietly")

    with pytest.raises(SystemExit), Interruptible():
        terminate()
        in_a_thread(work)
    assert ended == ["SIGTERM", "quietly"]


# Whole processes --------------------------------------------------------------------------------------

# Loads only the module, because importing jaxloop takes seconds.
LOAD = """
import importlib.util, os, signal, sys, time

spec = importlib.util.spec_from_file_location("interrupt", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
say = lambda *words: print(*words, flush=True)
"""

RUN = """
try:
    with module.Interruptible() as outer:
        with module.Interruptible() as interrupt:
            try:
                say("working")
                while not interrupt.requested:
                    time.sleep(0.01)
                say("asked")
                if sys.argv[2] != "at once":
                    time.sleep(30)
            finally:
                say("saved")
    say("returned")
finally:
    say("closed")
"""


@pytest.fixture
def start():
    """Starts the program and sends each signal after the program has printed another line."""
    processes = []

    def run(how, *signals):
        command = [sys.executable, "-c", LOAD + RUN, jaxloop.distributed.interrupt.__file__, how]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        processes.append(process)
        said = []
        for signum in signals:
            said.append(process.stdout.readline().strip())
            if len(said) > 1:
                time.sleep(0.15)  # So that it doesn't count as the same signal sent twice.
            process.send_signal(signum)
        rest, errors = process.communicate(timeout=20)
        return process.returncode, [*said, *rest.split()], errors

    yield run
    for process in processes:
        process.kill()
        process.wait()


WITH_A_WORKER = """
import subprocess

def fail(*_):  # As PyTorch does if a worker has ended.
    raise RuntimeError("a worker is killed by signal: Terminated")

signal.signal(signal.SIGCHLD, fail)
with module.Interruptible() as interrupt:
    worker = subprocess.Popen(["sleep", "60"])
    os.killpg(0, signal.SIGTERM)
    worker.wait()
    say("saved")
"""


def test_a_worker_that_the_signal_has_ended_does_not_raise_in_the_main_thread():
    command = [sys.executable, "-c", LOAD + WITH_A_WORKER, jaxloop.distributed.interrupt.__file__]
    run = subprocess.run(command, capture_output=True, text=True, timeout=20, start_new_session=True)
    assert (run.returncode, run.stdout) == (143, "saved\n"), run.stderr


@pytest.mark.parametrize(
    ("how", "signals", "code", "words"),
    [
        ("at once", [signal.SIGTERM], 143, "working asked saved closed"),
        ("at once", [signal.SIGINT], 0, "working asked saved returned closed"),
        # The second signal ends the process without cleanup, which could delay it.
        ("slowly", [signal.SIGTERM, signal.SIGTERM], 143, "working asked"),
        ("slowly", [signal.SIGINT, signal.SIGINT], 130, "working asked"),
    ],
    ids=["SIGTERM", "Ctrl-C", "SIGTERM twice", "Ctrl-C twice"],
)
def test_exit_code_and_output_of_an_interrupted_process(how, signals, code, words, start):
    returncode, said, errors = start(how, *signals)
    assert (returncode, said) == (code, words.split()), errors


FORK = """
with module.Interruptible() as interrupt:
    reader, writer = os.pipe()
    worker = os.fork()
    if worker == 0:
        os.write(writer, b"!")
        time.sleep(20)
        os._exit(0)
    os.read(reader, 1)
    os.kill(worker, signal.SIGINT)  # As a terminal does. The run still needs the worker.
    time.sleep(0.1)
    os.kill(worker, signal.SIGTERM)
    say(os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]), interrupt.requested)
"""


def test_a_worker_forked_during_a_run_can_be_terminated():
    command = [sys.executable, "-c", LOAD + FORK, jaxloop.distributed.interrupt.__file__]
    run = subprocess.run(command, capture_output=True, text=True, timeout=25)
    assert run.stdout == "-15 False\n", run.stderr


def test_a_signal_confirmed_by_other_processes_counts_once():
    with Interruptible(defers=True) as interrupt:
        interrupt.confirm(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # Arrives later, as in a cluster.
        assert interrupt.requested and interrupt.signal_name == "Ctrl-C"


@pytest.mark.skipif(not pathlib.Path("/proc").exists(), reason="looks for workers in /proc")
def test_the_second_signal_ends_a_stuck_run(tmp_path):
    """The main thread is stuck in native code, or in data with worker processes. `chaos.py` has more such runs."""
    kinds = ["native", "workers"] if importlib.util.find_spec("grain") else ["native"]
    runs = [stubborn.Stubborn(tmp_path / kind, kind) for kind in kinds]
    problems = {}
    with concurrent.futures.ThreadPoolExecutor() as threads:
        for run in runs:
            problems[run.kind] = threads.submit(run.problems, [signal.SIGTERM] * 2)
    assert {kind: found.result() for kind, found in problems.items()} == {kind: [] for kind in kinds}
