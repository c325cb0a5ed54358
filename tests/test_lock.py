import concurrent.futures
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

# Loads the module alone: jaxloop takes seconds.
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
    """Starts a program that has the module as `lock`, and waits for its first line."""
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


def is_free(directory):
    try:
        with DirectoryLock(directory):
            return True
    except DirectoryInUseError:
        return False


def test_a_second_process_is_refused_with_the_id_of_the_first_until_that_ends(start, tmp_path):
    process, _ = start(HOLD, tmp_path)
    with pytest.raises(DirectoryInUseError) as caught:
        DirectoryLock(tmp_path).acquire()
    holder = caught.value.holder
    assert (holder.pid, holder.host, caught.value.directory) == (process.pid, socket.gethostname(), str(tmp_path))
    assert str(caught.value) == (
        f"{tmp_path} is in use by process {process.pid} on {holder.host}, since {holder.since} "
        f"({printable(holder.command)}). Two runs in one directory would overwrite each other's checkpoints. Give this "
        f"run another directory, or end the other one (on {holder.host}: kill {process.pid})."
    )
    assert len(holder.command) < 210 and "-c" in holder.command
    process.communicate()
    assert process.returncode == 0 and not os.listdir(tmp_path)
    assert is_free(tmp_path)


# Its children live on: one forked, and one that runs another program and was given whatever can be inherited.
HOLD_WITH_CHILDREN = """
import subprocess
import warnings

lock.DirectoryLock(directory).acquire()
child = os.fork()
if child == 0:
    time.sleep(20)
    os._exit(0)
print(child, subprocess.Popen(["sleep", "20"], close_fds=False).pid, flush=True)
time.sleep(20)
"""


def test_the_lock_of_a_killed_process_is_taken_over_also_while_its_children_live(start, tmp_path, logs):
    process, children = start(HOLD_WITH_CHILDREN, tmp_path)
    try:
        assert not is_free(tmp_path)
        process.kill()
        process.wait()
        assert os.listdir(tmp_path) == [".trainer.lock"]
        with DirectoryLock(tmp_path):
            assert json.loads((tmp_path / ".trainer.lock").read_text())["pid"] == os.getpid()
    finally:
        for child in children.split():
            os.kill(int(child), signal.SIGKILL)  # Both were alive.
    (line,) = [record.getMessage() for record in logs.records]
    assert line.startswith(f"{tmp_path}: took over the lock of process {process.pid} on ")
    assert line.endswith(", which ended without releasing it.")


# A forked child gives up nothing of its parent's, and can't take it either.
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


def test_a_forked_child_neither_releases_nor_holds_the_lock_of_its_parent(start, tmp_path):
    process, code = start(FORK, tmp_path)
    assert code == "7" and not is_free(tmp_path)
    process.communicate()
    assert is_free(tmp_path)


def test_a_lock_from_another_host_is_taken_over_with_a_warning(tmp_path, warnings_logged):
    holder = {"pid": 7, "host": "elsewhere", "since": "2026-01-31T09:30:00+01:00", "command": "python train.py"}
    (tmp_path / ".trainer.lock").write_text(json.dumps(holder))
    assert is_free(tmp_path)
    assert warnings_logged() == [
        f"{tmp_path}: took over the lock of {Holder(**holder)}, which ended without releasing it. "
        "Or does it still run, on a host whose locks can't be seen here? Then end one."
    ]


ODD = {"pid": 7, "host": "here", "since": ["now"], "command": "train"}


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": 1}', json.dumps(ODD), "[" * 50_000_000])
def test_a_file_that_tells_nothing_is_taken_over_too(content, tmp_path):
    (tmp_path / ".trainer.lock").write_text(content)
    assert is_free(tmp_path) and not os.listdir(tmp_path)


def test_a_process_that_has_not_named_itself_yet_is_another_process(tmp_path):
    with open(tmp_path / ".trainer.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(DirectoryInUseError, match="is in use by another process. Two runs") as caught:
            DirectoryLock(tmp_path).acquire()
    assert caught.value.holder is None
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_the_text_of_the_file_reaches_no_terminal_unescaped(tmp_path):
    holder = {"pid": 7, "host": "a\nb", "since": "now\r", "command": "train \x1b[31m\x9b"}
    with open(tmp_path / ".trainer.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        json.dump(holder, file)
        file.flush()
        with pytest.raises(DirectoryInUseError, match="kill 7") as caught:
            DirectoryLock(tmp_path).acquire()
    assert str(caught.value).isprintable() and caught.value.holder == Holder(**holder)


def in_a_thread(function):
    """Calls a function in another thread; returns what it returns or raises."""
    with concurrent.futures.ThreadPoolExecutor(1, "other") as pool:
        return pool.submit(function).result()


def test_another_thread_of_the_process_is_refused_until_the_first_has_released_it(tmp_path):
    with DirectoryLock(tmp_path), pytest.raises(DirectoryInUseError) as caught:
        in_a_thread(DirectoryLock(tmp_path).acquire)
    assert (caught.value.thread, caught.value.holder) == (threading.current_thread().name, None)
    assert f"is in use by the thread {caught.value.thread!r} of this process. Two runs" in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert in_a_thread(lambda: is_free(tmp_path))


def test_within_a_thread_it_is_held_until_each_has_released_it(tmp_path):
    first, second = DirectoryLock(tmp_path), DirectoryLock(tmp_path)
    with first:
        with second, first:
            pass
        second.acquire()
    assert os.listdir(tmp_path) == [".trainer.lock"]
    second.release()
    assert not os.listdir(tmp_path)
    with pytest.raises(RuntimeError, match="is not held: release"):
        second.release()


def test_two_names_of_a_directory_are_one(tmp_path, monkeypatch):
    run = tmp_path / "run"
    (tmp_path / "link").symlink_to(run)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    with DirectoryLock(run), DirectoryLock("run"), DirectoryLock("link"), DirectoryLock(epath.Path("~/run")):
        assert os.listdir(tmp_path / "link") == [".trainer.lock"]
    assert not os.listdir(run)


def test_directories_and_names_are_apart(tmp_path):
    with DirectoryLock(tmp_path / "one"), DirectoryLock(tmp_path / "two"), DirectoryLock(tmp_path / "two", ".eval"):
        assert sorted(os.listdir(tmp_path / "two")) == [".eval", ".trainer.lock"]


def test_a_file_deleted_between_opening_and_locking_is_not_taken_for_the_lock(tmp_path, monkeypatch):
    path, flock, calls = tmp_path / ".trainer.lock", fcntl.flock, []

    def delete_and_lock(descriptor, operation):
        calls.append(operation)
        if len(calls) == 1:  # As the process does that has held it until now.
            path.unlink()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", delete_and_lock)
    with DirectoryLock(tmp_path):
        assert len(calls) == 2 and json.loads(path.read_text())["pid"] == os.getpid()


def test_a_directory_deleted_meanwhile_is_no_error(tmp_path):
    with DirectoryLock(tmp_path / "run"):
        shutil.rmtree(tmp_path / "run")
    assert not os.listdir(tmp_path)


def lose_by_moving(directory):
    directory.rename(directory.parent / "elsewhere")


def lose_by_moving_and_making_another(directory):
    lose_by_moving(directory)
    directory.mkdir()


def lose_by_deleting_the_file(directory):
    (directory / ".trainer.lock").unlink()


def lose_to_another_trainer(directory):
    lose_by_deleting_the_file(directory)
    (directory / ".trainer.lock").touch()


LOSSES = [lose_by_moving, lose_by_moving_and_making_another, shutil.rmtree, lose_by_deleting_the_file]


@pytest.mark.parametrize("lose", [*LOSSES, lose_to_another_trainer])
def test_a_directory_that_is_no_longer_the_locked_one_is_noticed(lose, tmp_path):
    lock = DirectoryLock(tmp_path / "run")
    lock.check()  # It is not locked.
    with lock:
        DirectoryLock(tmp_path / "run").check()
        lose(tmp_path / "run")
        with pytest.raises(DirectoryLostError, match="run is no longer the one that this run has locked: it was moved"):
            DirectoryLock(tmp_path / "run").check()


def test_a_file_that_can_not_be_deleted_does_not_hide_the_error_that_ended_the_run(
    tmp_path, monkeypatch, warnings_logged
):
    def refuse(path):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError), DirectoryLock(tmp_path):
        patch.setattr(os, "unlink", refuse)
        raise ZeroDivisionError
    assert warnings_logged() == [
        f"{tmp_path}/.trainer.lock is unlocked, but could not be deleted: Read-only file system."
    ]
    assert is_free(tmp_path)


def make_symlink(path):
    path.symlink_to(path.parent / "target")


def make_link_to_full_device(path):
    path.symlink_to("/dev/full")


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (os.mkfifo, "a FIFO"),
        (os.mkdir, "a directory"),
        (make_symlink, "a symbolic link"),
        (make_link_to_full_device, "a symbolic link"),
    ],
)
def test_what_is_no_regular_file_is_refused_and_left_alone(make, kind, tmp_path):
    make(tmp_path / ".trainer.lock")
    with pytest.raises(OSError, match=f"can't be written to: Expected a regular file and found {kind}. Remove it"):
        DirectoryLock(tmp_path).acquire()
    assert os.listdir(tmp_path) == [".trainer.lock"]


@pytest.mark.parametrize("function", ["open", "pwrite"])
def test_a_full_disk_is_refused_in_words(function, tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, function, refuse)
    with pytest.raises(OSError, match="No space left on device. Give another directory, or free space and inodes") as e:
        DirectoryLock(tmp_path).acquire()
    assert e.value.errno == errno.ENOSPC


def test_checkpoints_beside_it_are_found(tmp_path):
    with DirectoryLock(tmp_path):
        assert checkpoint.all_steps(tmp_path) == []
        (tmp_path / "10").mkdir()
        (tmp_path / "10" / "_CHECKPOINT_METADATA").touch()
        assert checkpoint.all_steps(tmp_path) == [10]


@pytest.fixture
def read_only():
    """A directory in which this process may not write, even if it is root's."""
    directory = tempfile.mkdtemp()
    os.chmod(directory, 0o555)
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    yield directory
    if is_root:
        os.seteuid(0)
    os.rmdir(directory)


def test_a_read_only_directory_is_refused_in_words(read_only):
    for directory, what in [(read_only, "written to"), (os.path.join(read_only, "run"), "made")]:
        with pytest.raises(PermissionError) as caught:
            DirectoryLock(directory).acquire()
        assert str(caught.value) == (
            f"The directory {directory}, which a run writes to, can't be {what}: Permission denied. "
            "Give another directory, or the right to write there."
        )


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOTSUP])
def test_a_file_system_without_locks_is_said_once(code, tmp_path, monkeypatch, warnings_logged):
    def refuse(descriptor, operation):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with DirectoryLock(tmp_path), DirectoryLock(tmp_path):
        pass
    assert warnings_logged() == [
        f"{tmp_path} can't be locked ({os.strerror(code)}): take care that no other run writes there at the same time."
    ]


@pytest.mark.parametrize("directory", ["gs://bucket/run", epath.Path("gs://bucket/run")], ids=["str", "epath"])
def test_a_remote_directory_is_not_locked(directory, warnings_logged):
    with DirectoryLock(directory):
        (line,) = warnings_logged()
        assert line.startswith("gs://bucket/run can't be locked (there are none on remote file systems")


def test_windows_has_no_lock(tmp_path, monkeypatch, warnings_logged):
    monkeypatch.setattr(jaxloop.lock, "fcntl", None)
    with DirectoryLock(tmp_path):
        assert len(warnings_logged()) == 1
