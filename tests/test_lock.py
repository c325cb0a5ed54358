import concurrent.futures
import contextlib
import errno
import fcntl
import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading

import pytest
from etils import epath

import jaxloop.lock
from jaxloop import checkpoint
from jaxloop.lock import DirectoryInUseError, DirectoryLock, DirectoryLostError, Holder
from jaxloop.text import printable

# Loads only the module, because importing jaxloop takes seconds.
LOAD = """
import importlib.util, os, sys, time, types

package = sys.modules["jaxloop"] = types.ModuleType("jaxloop")
package.__path__ = [os.path.dirname(sys.argv[1])]
spec = importlib.util.spec_from_file_location("lock", sys.argv[1])
lock = importlib.util.module_from_spec(spec)
spec.loader.exec_module(lock)
directory = sys.argv[2]
"""

HOLD = """
with lock.DirectoryLock(directory):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def start():
    """Starts a program that can use the module as `lock`, and waits for its first line."""
    processes = []

    def run(program, directory):
        command = [sys.executable, "-c", LOAD + program, jaxloop.lock.__file__, str(directory)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        return process, process.stdout.readline().strip()

    yield run
    for process in processes:
        process.kill()
        process.communicate()


LOCK = ".trainer.lock"


def is_free(directory):
    with contextlib.suppress(DirectoryInUseError), DirectoryLock(directory):
        return True
    return False


def acquire_error(directory, match="is in use by"):
    """Returns the error of acquiring a lock that is held."""
    with pytest.raises(DirectoryInUseError, match=match) as caught:
        DirectoryLock(directory).acquire()
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    return caught.value


def fails(error):
    """Returns a function that raises the given exception, or an OSError with the given code."""

    def fail(*args, **kwargs):
        raise OSError(error, os.strerror(error)) if isinstance(error, int) else error

    return fail


def move(path):
    path.rename(path.with_name("elsewhere"))


def test_a_second_process_is_refused_until_the_first_ends(start, tmp_path):
    process, _ = start(HOLD, tmp_path)
    holder = (error := acquire_error(tmp_path)).holder
    assert (holder.pid, holder.host, error.directory) == (process.pid, socket.gethostname(), str(tmp_path))
    assert str(error) == (
        f"{tmp_path} is in use by process {process.pid} on {holder.host}, since {holder.since} "
        f"({printable(holder.command)}). Two runs in one directory would overwrite each other's checkpoints. Give this "
        f"run another directory, or end the other one (on {holder.host}: kill {process.pid})."
    )
    assert len(holder.command) < 210 and "-c" in holder.command
    process.communicate()
    assert process.returncode == 0 and not os.listdir(tmp_path)
    assert is_free(tmp_path)


# Two children outlive it: a forked one, and a different program that inherited every file descriptor it can.
HOLD_WITH_CHILDREN = """
import subprocess

lock.DirectoryLock(directory).acquire()
child = os.fork()
if child == 0:
    time.sleep(20)
    os._exit(0)
print(child, subprocess.Popen(["sleep", "20"], close_fds=False).pid, flush=True)
time.sleep(20)
"""


def test_the_lock_of_a_killed_process_is_taken_over_while_its_children_live(start, tmp_path, logs):
    process, children = start(HOLD_WITH_CHILDREN, tmp_path)
    try:
        assert not is_free(tmp_path)
        process.kill()
        process.wait()
        assert os.listdir(tmp_path) == [LOCK]
        with DirectoryLock(tmp_path):
            assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    finally:
        for child in children.split():
            os.kill(int(child), signal.SIGKILL)  # Both were alive.
    (line,) = [record.getMessage() for record in logs.records]
    assert line.startswith(f"{tmp_path}: took over the lock of process {process.pid} on ")
    assert line.endswith(", which ended without releasing it.")


# A forked child can neither release its parent's lock nor acquire it.
FORK = """
outer = lock.DirectoryLock(directory)
with outer:
    child = os.fork()
    if child == 0:
        outer.release()
        try:
            lock.DirectoryLock(directory).acquire()
        except lock.DirectoryInUseError as error:
            os._exit(7 if error.holder.pid == os.getppid() else 1)
        os._exit(2)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    sys.stdin.read()
"""


def test_a_forked_child_can_neither_release_nor_acquire_its_parents_lock(start, tmp_path):
    process, code = start(FORK, tmp_path)
    assert code == "7" and not is_free(tmp_path)
    process.communicate()
    assert is_free(tmp_path)


def test_a_lock_from_another_host_is_taken_over_with_a_warning(tmp_path, warnings_logged):
    holder = {"pid": 7, "host": "elsewhere", "since": "2026-01-31T09:30:00+01:00", "command": "python train.py"}
    (tmp_path / LOCK).write_text(json.dumps(holder))
    assert is_free(tmp_path)
    assert warnings_logged() == [
        f"{tmp_path}: took over the lock of {Holder(**holder)}, which ended without releasing it. "
        "If it still runs on its host, the two hosts don't share locks: end one of the runs."
    ]


ODD = {"pid": 7, "host": "here", "since": ["now"], "command": "train"}
ESCAPES = {"pid": 7, "host": "a\nb", "since": "now\r", "command": "train \x1b[31m\x9b"}


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": 1}', json.dumps(ODD), "[" * 50_000_000])
def test_a_lock_file_without_a_holder_is_taken_over(content, tmp_path):
    (tmp_path / LOCK).write_text(content)
    assert is_free(tmp_path) and not os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("content", "holder"), [("", None), (json.dumps(ODD), None), (json.dumps(ESCAPES), Holder(**ESCAPES))]
)
def test_the_content_of_a_locked_file_is_untrusted(content, holder, tmp_path):
    with open(tmp_path / LOCK, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(content)
        file.flush()
        error = acquire_error(tmp_path, "is in use by another process. Two runs" if holder is None else "kill 7")
    assert str(error).isprintable() and error.holder == holder
    assert (tmp_path / LOCK).read_text() == content


def in_a_thread(function):
    """Returns the result of calling a function in another thread."""
    with concurrent.futures.ThreadPoolExecutor(1, "other") as pool:
        return pool.submit(function).result()


def test_another_thread_is_refused_until_the_first_releases_the_lock(tmp_path):
    with DirectoryLock(tmp_path):
        error = in_a_thread(lambda: acquire_error(tmp_path))
    assert (error.thread, error.holder) == (threading.current_thread().name, None)
    assert f"is in use by the thread {error.thread!r} of this process. Two runs" in str(error)
    assert in_a_thread(lambda: is_free(tmp_path))


def test_the_lock_is_reentrant_within_a_thread(tmp_path):
    first, second = DirectoryLock(tmp_path), DirectoryLock(tmp_path)
    with first:
        with second, first:
            pass
        second.acquire()
    assert os.listdir(tmp_path) == [LOCK]
    second.release()
    assert not os.listdir(tmp_path)
    with pytest.raises(RuntimeError, match="is not held: release"):
        second.release()


def test_paths_to_the_same_directory_share_a_lock(tmp_path, monkeypatch):
    run = tmp_path / "run"
    (tmp_path / "link").symlink_to(run)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    with DirectoryLock(run), DirectoryLock("run"), DirectoryLock("link"), DirectoryLock(epath.Path("~/run")):
        assert os.listdir(tmp_path / "link") == [LOCK]
    assert not os.listdir(run)


def test_different_directories_or_names_have_separate_locks(tmp_path):
    with DirectoryLock(tmp_path / "one"), DirectoryLock(tmp_path / "two"), DirectoryLock(tmp_path / "two", ".eval"):
        assert sorted(os.listdir(tmp_path / "two")) == [".eval", ".trainer.lock"]


@pytest.mark.parametrize("lose", [os.unlink, move])
def test_a_file_lost_between_opening_and_locking_is_not_used(lose, tmp_path, monkeypatch):
    path, flock, calls = tmp_path / LOCK, fcntl.flock, []

    def lose_and_lock(descriptor, operation):
        calls.append(operation)
        if len(calls) == 1:  # As the previous holder does when it releases the lock.
            lose(path)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", lose_and_lock)
    with DirectoryLock(tmp_path):
        assert len(calls) == 2 and json.loads(path.read_text())["pid"] == os.getpid()


# What happens to a locked directory, and the files that are left after the release.
LOSSES = {
    "moved": (move, [f"elsewhere/{LOCK}"]),
    "replaced": (lambda run: (move(run), run.mkdir()), [f"elsewhere/{LOCK}"]),
    "deleted": (shutil.rmtree, []),
    "the file deleted": (lambda run: (run / LOCK).unlink(), []),
    "the file replaced": (lambda run: (move(run / LOCK), (run / LOCK).touch()), [f"run/{LOCK}", "run/elsewhere"]),
}


@pytest.mark.parametrize(("lose", "left"), LOSSES.values(), ids=LOSSES)
def test_check_detects_a_moved_replaced_or_deleted_directory(lose, left, tmp_path):
    lock = DirectoryLock(tmp_path / "run")
    lock.check()  # Not locked yet.
    with lock:
        DirectoryLock(tmp_path / "run").check()
        lose(tmp_path / "run")
        with pytest.raises(DirectoryLostError, match="run is no longer the one that this run locked: it was moved"):
            DirectoryLock(tmp_path / "run").check()
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()) == left


def test_a_directory_that_replaces_a_locked_one_has_a_separate_lock(tmp_path):
    with DirectoryLock(tmp_path / "run"):
        move(tmp_path / "run")
        with DirectoryLock(tmp_path / "run"):
            assert os.listdir(tmp_path / "run") == os.listdir(tmp_path / "elsewhere") == [LOCK]


@pytest.mark.parametrize(
    ("function", "warnings"),
    [("unlink", ["{}/.trainer.lock is unlocked, but could not be deleted: Read-only file system."]), ("close", [])],
)
def test_a_failed_release_does_not_hide_the_error_of_the_run(
    function, warnings, tmp_path, monkeypatch, warnings_logged
):
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError), DirectoryLock(tmp_path):
        patch.setattr(os, function, fails(errno.EROFS))
        raise ZeroDivisionError
    assert warnings_logged() == [text.format(tmp_path) for text in warnings]
    assert is_free(tmp_path)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (os.mkfifo, "a FIFO"),
        (os.mkdir, "a directory"),
        (lambda path: path.symlink_to(path.parent / "target"), "a symbolic link"),
        (lambda path: path.symlink_to("/dev/full"), "a symbolic link"),
    ],
)
def test_anything_but_a_regular_file_is_rejected_and_left_alone(make, kind, tmp_path):
    make(tmp_path / LOCK)
    with pytest.raises(OSError, match=f"Can't write to .*: Expected a regular file, but found {kind}. Remove it"):
        DirectoryLock(tmp_path).acquire()
    assert os.listdir(tmp_path) == [LOCK]


FULL = r"No space left on device\). Use a different directory, or free space and inodes"


@pytest.mark.parametrize(
    ("function", "error", "match"),
    [
        ("os.open", errno.ENOSPC, FULL),
        ("os.pwrite", errno.ENOSPC, FULL),
        ("fcntl.flock", errno.EIO, r"\(Input/output error\). Use a different directory, or make this one"),
        ("os.pwrite", KeyboardInterrupt("stop"), "stop"),
    ],
)
def test_a_failed_acquire_explains_the_error_and_frees_the_directory(function, error, match, tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises((OSError, KeyboardInterrupt), match=match) as caught:
        patch.setattr(function, fails(error))
        DirectoryLock(tmp_path / "run").acquire()
    assert getattr(caught.value, "errno", error) == error
    assert is_free(tmp_path / "run")


def test_checkpoints_next_to_a_lock_file_are_found(tmp_path):
    with DirectoryLock(tmp_path):
        assert checkpoint.all_steps(tmp_path) == []
        (tmp_path / "10").mkdir()
        (tmp_path / "10" / "_CHECKPOINT_METADATA").touch()
        assert checkpoint.all_steps(tmp_path) == [10]


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
            DirectoryLock(directory).acquire()
        assert caught.value.strerror == (
            f"Can't write to the directory {directory} ({os.path.join(directory, name).rstrip('/')}: Permission "
            "denied). Use a different directory, or make this one writable"
        )


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_without_locks_causes_one_warning(code, tmp_path, monkeypatch, warnings_logged):
    monkeypatch.setattr(fcntl, "flock", fails(code))
    with DirectoryLock(tmp_path), DirectoryLock(tmp_path):
        assert "of this process" in str(in_a_thread(lambda: acquire_error(tmp_path)))
    assert warnings_logged() == [
        f"{tmp_path} can't be locked ({os.strerror(code)}): make sure that no other run writes there at the same time."
    ]


@pytest.mark.parametrize("directory", ["gs://bucket/run", epath.Path("gs://bucket/run")], ids=["str", "epath"])
def test_a_remote_directory_is_not_locked(directory, warnings_logged):
    with DirectoryLock(directory):
        (line,) = warnings_logged()
        assert line.startswith("gs://bucket/run can't be locked (remote file systems")
