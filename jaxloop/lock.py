"""One trainer per directory: a second one is refused, and the lock of a killed one is taken over."""

import contextlib
import dataclasses
import datetime
import errno
import json
import os
import shlex
import socket
import sys
import threading
import time
from typing import Any, final

from absl import logging
from etils import epath

from jaxloop import files
from jaxloop.text import printable

try:
    import fcntl
except ImportError:  # Windows.
    fcntl = None

# From file systems without locks, or whose lock server can't be reached.
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
TRAINER, EVALUATOR = ".trainer.lock", ".evaluator.lock"
"""The names of a directory's lock files: of a run that trains, and of a run that only evaluates."""

_COMMAND_LENGTH = 200
_MOST_BYTES = 10_000  # Of the file, which is untrusted.
_SIGNING_SECS = 0.1  # More than enough to write the holder into a file that was just locked.


@final
@dataclasses.dataclass(frozen=True)
class Holder:
    """The process that holds a lock, as it is written in the lock file.

    >>> print(Holder(123, "gpu7", "2026-01-31T09:30:00+01:00", "python train.py"))
    process 123 on gpu7, since 2026-01-31T09:30:00+01:00 (python train.py)
    """

    pid: int
    host: str
    since: str
    command: str

    def __str__(self) -> str:
        return printable(f"process {self.pid} on {self.host}, since {self.since} ({self.command})")


class DirectoryInUseError(RuntimeError):
    """Another process, or another thread of this one, holds the lock of a directory.

    Attributes:
      directory: the directory.
      holder: the other process; None if it has not written its name yet, or if it is this process.
      thread: the name of the thread of this process that holds the lock; None if another process does.
    """

    def __init__(self, directory: str, holder: Holder | None, thread: str | None = None):
        who = f"the thread {thread!r} of this process" if thread is not None else holder or "another process"
        how = "" if holder is None else f" (on {holder.host}: kill {holder.pid})"
        text = (
            f"{directory} is in use by {who}. Two runs in one directory would overwrite each other's checkpoints. "
            f"Give this run another directory, or end the other one{how}."
        )
        super().__init__(printable(text))
        self.directory: str = directory
        self.holder: Holder | None = holder
        self.thread: str | None = thread

    def __reduce__(self) -> Any:
        return type(self), (self.directory, self.holder, self.thread)


class DirectoryLostError(RuntimeError):
    """A directory that this process has locked was moved, deleted or replaced."""


@dataclasses.dataclass(eq=False)
class _Lock:
    """One thread's lock of one directory, which all its `DirectoryLock`s share."""

    key: Any  # Of the directory and the file's name.
    path: str
    descriptor: int | None  # None if the file system has no locks.
    thread: threading.Thread = dataclasses.field(default_factory=threading.current_thread)
    count: int = 0


_held: set[_Lock] = set()  # By this process, as the kernel's locks are.
_mutex = threading.RLock()


def _forget() -> None:
    """Closes the descriptors in a forked child: a lock lasts as long as any descriptor of it is open."""
    while _held:
        if (descriptor := _held.pop().descriptor) is not None:
            os.close(descriptor)
    _mutex.release()


if fcntl is not None:
    os.register_at_fork(before=_mutex.acquire, after_in_parent=_mutex.release, after_in_child=_forget)


@final
class DirectoryLock:
    """Keeps other processes and threads from training in a directory at the same time.

    While the lock is held, a file in the directory names the process that holds it. The lock on the file is the
    kernel's (`flock`), which releases it however the process ends; the next process takes over a file that is left. A
    thread can acquire the lock several times, also by another name of the same directory, and must release it as
    often. Other threads are refused, and forked processes don't hold it.

    Where the file system has no locks (`gs://`, some network file systems), only the threads of this process are
    refused, and a warning is logged.

    >>> import tempfile
    >>> directory = tempfile.mkdtemp()
    >>> with DirectoryLock(directory):
    ...     os.listdir(directory)
    ['.trainer.lock']
    >>> os.listdir(directory)
    []

    Args:
      directory: the directory, which is made if it is missing.
      name: the name of the file.
    """

    def __init__(self, directory: epath.PathLike, name: str = TRAINER):
        self._directory = os.path.expanduser(os.fspath(directory))
        self._name = name
        self._acquired: list[_Lock] = []

    def acquire(self) -> None:
        """Takes the lock, or raises at once: it never waits for another holder to release it.

        Raises:
          DirectoryInUseError: another process, or another thread, holds it.
          OSError: the directory or the file can't be made.
        """
        with _mutex:
            try:
                key, path = self._key(), self._path()
                lock = next((each for each in _held if each.key == key), None)
                if lock is None:
                    lock = _Lock(key, path, self._open_locked(path))
                    _held.add(lock)
            except OSError as error:
                raise files.unwritable(self._directory, error) from error
            if lock.thread is not threading.current_thread():
                raise DirectoryInUseError(self._directory, None, lock.thread.name)
            lock.count += 1
            self._acquired.append(lock)

    def release(self) -> None:
        """Undoes one `acquire`; the last release deletes the file.

        Raises:
          RuntimeError: there is none to undo.
        """
        with _mutex:
            if not self._acquired:
                raise RuntimeError(f"The lock of {self._directory} is not held: release() needs an acquire() first.")
            lock = self._acquired.pop()
            lock.count -= 1
            if lock.count or lock not in _held:  # The latter in a forked child.
                return
            _held.remove(lock)
            if lock.descriptor is None:
                return
            try:  # Deletes it while it is locked: see `_open_locked`.
                if _is_same_file(lock.descriptor, lock.path):
                    os.unlink(lock.path)
            except OSError as error:  # Raising it would hide the error that ended the run.
                logging.warning("%s is unlocked, but could not be deleted: %s.", lock.path, error.strerror)
            with contextlib.suppress(OSError):  # It is closed all the same.
                os.close(lock.descriptor)

    def check(self) -> None:
        """Raises if the directory is no longer the one that was locked; does nothing if it is not locked here.

        Raises:
          DirectoryLostError: it was moved, deleted or replaced, or its lock file was.
        """
        path = self._path()
        with _mutex:
            for lock in _held:
                if lock.path == path and lock.descriptor is not None and not _is_same_file(lock.descriptor, path):
                    raise DirectoryLostError(
                        f"The directory {self._directory} is no longer the one that this run has locked: it was moved, "
                        f"deleted or replaced, or {self._name} in it was. Another run may use it now, so nothing more "
                        "is saved there. Put the directory back and start the run again."
                    )

    def __enter__(self) -> "DirectoryLock":
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _path(self) -> str:
        """Returns the path of the file, without links."""
        directory = self._directory if files.is_remote(self._directory) else os.path.realpath(self._directory)
        return os.path.join(directory, self._name)

    def _key(self) -> Any:
        """Returns a key that is equal for all names of the directory, which is made if it is missing."""
        if files.is_remote(self._directory):
            return self._directory, self._name
        os.makedirs(self._directory, exist_ok=True)
        stat = os.stat(self._directory)
        return stat.st_dev, stat.st_ino, self._name

    def _open_locked(self, path: str) -> int | None:
        """Opens, locks and signs the file; returns its descriptor, or None where there are no locks."""
        reason = "there are none on remote file systems, nor on Windows"
        while fcntl is not None and not files.is_remote(path):
            with contextlib.ExitStack() as stack:
                descriptor = files.open_descriptor(path, os.O_RDWR | os.O_CREAT)
                stack.callback(os.close, descriptor)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    time.sleep(_SIGNING_SECS)  # Of two that start together, the other may not have signed yet.
                    raise DirectoryInUseError(self._directory, _read(descriptor)) from None
                except OSError as error:
                    if error.errno not in _NO_LOCKS:
                        raise
                    reason = error.strerror
                    break
                if _is_same_file(descriptor, path):  # Else it was released, and deleted, after it was opened here.
                    self._sign(descriptor)
                    stack.pop_all()
                    return descriptor
        text = "%s can't be locked (%s): take care that no other run writes there at the same time."
        logging.warning(text, self._directory, reason)
        return None

    def _sign(self, descriptor: int) -> None:
        """Writes this process into the file, and logs whose it was if its process has not released it."""
        us, dead = _this_process(), _read(descriptor)
        if os.fstat(descriptor).st_size:
            level, text = logging.INFO, "%s: took over the lock of %s, which ended without releasing it."
            if dead is not None and dead.host != us.host:
                level = logging.WARNING
                text += " Or does it still run, on a host whose locks can't be seen here? Then end one."
            logging.log(level, text, self._directory, dead or "a process")
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(dataclasses.asdict(us)).encode(), 0)


def _is_same_file(descriptor: int, path: str) -> bool:
    with contextlib.suppress(OSError):  # It is gone, or can't be seen any more.
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    return False


def _this_process() -> Holder:
    now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    command = shlex.join(sys.orig_argv)
    shown = command if len(command) <= _COMMAND_LENGTH else f"{command[:_COMMAND_LENGTH]}..."
    return Holder(os.getpid(), socket.gethostname(), now, shown)


def _read(descriptor: int) -> Holder | None:
    """Reads the holder of a lock; None if the file does not name it, or not yet."""
    with contextlib.suppress(ValueError, TypeError, OSError):
        holder = Holder(**files.parse_json(os.pread(descriptor, _MOST_BYTES, 0)))
        if [type(value) for value in dataclasses.astuple(holder)] == [int, str, str, str]:
            return holder
    return None
