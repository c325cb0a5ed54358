import contextlib
import errno
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile

import pytest
from etils import epath
from programs.acts import in_a_thread, raising

import jaxloop.distributed.lock
from jaxloop.distributed.lock import DirectoryInUseError, DirectoryLostError, check, locked

# Loads only the module, because importing jaxloop takes seconds.
LOAD = """
import importlib.util, os, sys, time, types

package = sys.modules["jaxloop"] = types.ModuleType("jaxloop")
package.__path__ = [os.path.dirname(os.path.dirname(sys.argv[1]))]
spec = importlib.util.spec_from_file_location("lock", sys.argv[1])
lock = importlib.util.module_from_spec(spec)
spec.loader.exec_module(lock)
directory = sys.argv[2]
"""

HOLD = """
with lock.locked(directory):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def start():
    """Starts a program that can use the module as `lock`, and waits for its first line."""
    processes = []

    def run(program, directory):
        command = [sys.executable, "-c", LOAD + program, jaxloop.distributed.lock.__file__, str(directory)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        return process, process.stdout.readline().strip()

    yield run
    for process in processes:
        process.kill()
        process.communicate()


LOCK = ".trainer.lock"


def is_free(directory):
    with contextlib.suppress(DirectoryInUseError), locked(directory):
        return True
    return False


def acquire(directory):
    """Acquires a lock, and releases it."""
    with locked(directory):
        pass


def acquire_error(directory, match="is in use by"):
    """Returns the error of acquiring a lock that is held."""
    with pytest.raises(DirectoryInUseError, match=match) as caught:
        acquire(directory)
    return str(caught.value)


def move(path):
    path.rename(path.with_name("elsewhere"))


HELD = (
    "{} is in use by process {} on {}, since SINCE...). Two runs in one directory would overwrite each other's "
    "checkpoints. Give this run another directory, or end the other one."
)


def test_a_second_process_is_refused_until_the_first_ends(start, tmp_path):
    process, _ = start(HOLD, tmp_path)
    error, (start_of_error, end_of_error) = acquire_error(tmp_path), HELD.split("SINCE")
    assert error.startswith(start_of_error.format(tmp_path, process.pid, socket.gethostname()))
    assert error.endswith(end_of_error) and "-c" in error and len(error) < 600
    process.communicate()
    assert process.returncode == 0 and is_free(tmp_path)


# Two children outlive it: a forked one, and a different program that inherited every file descriptor it can.
HOLD_WITH_CHILDREN = """
import subprocess

held = lock.locked(directory)
held.__enter__()
child = os.fork()
if child == 0:
    time.sleep(20)
    os._exit(0)
print(child, subprocess.Popen(["sleep", "20"], close_fds=False).pid, flush=True)
time.sleep(20)
"""


def test_the_lock_of_a_killed_process_is_taken_over_while_its_children_live(start, tmp_path):
    process, children = start(HOLD_WITH_CHILDREN, tmp_path)
    try:
        assert not is_free(tmp_path)
        process.kill()
        process.wait()
        with locked(tmp_path):
            assert (tmp_path / LOCK).read_text().startswith(f"process {os.getpid()} on ")
    finally:
        for child in children.split():
            os.kill(int(child), signal.SIGKILL)  # Both were alive.


@pytest.mark.parametrize(
    ("content", "holder"), [(b"\xff", "another process"), (b"process 7\n\x1b[31m", r"process 7\n\x1b[31m")]
)
def test_the_description_of_the_holder_is_untrusted(content, holder, tmp_path):
    with locked(tmp_path):
        (tmp_path / LOCK).write_bytes(content)
        error = acquire_error(tmp_path, re.escape(f"is in use by {holder}. Two runs"))
    assert error.isprintable()


def test_another_thread_is_refused_until_the_first_releases_the_lock(tmp_path):
    with locked(tmp_path):
        assert f"is in use by process {os.getpid()} on" in in_a_thread(acquire_error, tmp_path)
    assert in_a_thread(is_free, tmp_path)


@pytest.mark.parametrize("path", ["run", "link", "~/run"])
def test_paths_to_the_same_directory_share_a_lock(path, tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    with locked(tmp_path / "run"):
        acquire_error(epath.Path(path))
    acquire(path)


LOSSES = {
    "moved": move,
    "replaced": lambda run: (move(run), run.mkdir()),
    "deleted": shutil.rmtree,
    "the file deleted": lambda run: (run / LOCK).unlink(),
    "the file replaced": lambda run: (move(run / LOCK), (run / LOCK).touch()),
}


@pytest.mark.parametrize("lose", LOSSES.values(), ids=LOSSES)
def test_check_detects_a_moved_replaced_or_deleted_directory(lose, tmp_path):
    check(tmp_path / "run")  # Not locked yet.
    with locked(tmp_path / "run"):
        check(tmp_path / "run")
        lose(tmp_path / "run")
        with pytest.raises(DirectoryLostError, match="run is no longer the one that this run locked: it was moved"):
            check(tmp_path / "run")
    check(tmp_path / "run")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/full")])
def test_anything_but_a_regular_file_is_rejected_and_left_alone(make, tmp_path):
    make(tmp_path / LOCK)
    with pytest.raises(OSError, match="Can't write to .*: Expected a regular file, .*. Remove it"):
        acquire(tmp_path)
    assert os.listdir(tmp_path) == [LOCK]


FULL = r"No space left on device\). Use a different directory, or free space and inodes"


@pytest.mark.parametrize(
    ("function", "error", "match"),
    [
        ("jaxloop.distributed.lock._this_process", errno.ENOSPC, FULL),
        ("fcntl.flock", errno.EIO, r"\(Input/output error\). Use a different directory, or make this one"),
        ("jaxloop.distributed.lock._this_process", KeyboardInterrupt("stop"), "stop"),
    ],
)
def test_a_failed_acquire_explains_the_error_and_frees_the_directory(function, error, match, tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises((OSError, KeyboardInterrupt), match=match) as caught:
        patch.setattr(function, raising(error))
        acquire(tmp_path / "run")
    assert getattr(caught.value, "errno", error) == error
    assert is_free(tmp_path / "run")


@pytest.fixture
def read_only():
    """A directory that this process can't write to, even if it runs as root."""
    directory, user = tempfile.mkdtemp(), os.geteuid()
    os.chmod(directory, 0o555)
    os.seteuid(user or 65534)
    yield directory
    os.seteuid(user)
    os.rmdir(directory)


def test_a_read_only_directory_raises_a_clear_error(read_only):
    for directory, name in [(read_only, LOCK), (os.path.join(read_only, "run"), "")]:
        with pytest.raises(PermissionError) as caught:
            acquire(directory)
        path = os.path.join(directory, name).rstrip("/")
        text = caught.value.strerror
        assert text.startswith(f"Can't write to the directory {directory} ({path}: Permission denied). Use a different")


@pytest.mark.parametrize("directory", ["gs://bucket/run", epath.Path("gs://bucket/run")], ids=["str", "epath"])
def test_a_remote_directory_is_not_locked(directory, warnings_logged):
    with locked(directory):
        (line,) = warnings_logged()
        assert line.startswith("gs://bucket/run can't be locked: make sure")
