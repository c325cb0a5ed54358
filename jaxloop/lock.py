"""One trainer per directory: a second one is refused, and the lock of a killed one is taken over."""

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
from types import TracebackType
from typing import Any, final

from absl import logging
from etils import epath

from jaxloop import files
from jaxloop.text import printable

try:
    import fcntl
except ImportError:  # Windows.
    fcntl = None

# What a file system says that knows no locks, or whose server of locks can't be reached.
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
TRAINER, EVALUATOR = ".trainer.lock", ".evaluator.lock"
"""The names of the lock files of a directory: for what trains, and for what only evaluates."""

_COMMAND_LENGTH = 200
_MOST_BYTES = 10_000  # Of the file, which anybody may have written.
# From taking a lock to having written into the file who has it, amply.
_SIGNING_SECS = 0.1


@final
@dataclasses.dataclass(frozen=True)
class Holder:
    """The process that holds a lock, as it has written itself into the file.

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
        who, how = f"{holder or 'another process'}", ""
        if thread is not None:
            who = printable(f"the thread {thread!r} of this process")
        elif holder is not None:
            how = printable(f" (on {holder.host}: kill {holder.pid})")
        super().__init__(
            f"{directory} is in use by {who}. Two runs in one directory would overwrite each "
            f"other's checkpoints. Give this run another directory, or end the other one{how}."
        )
        self.directory = directory
        self.holder = holder
        self.thread = thread

    def __reduce__(self) -> Any:
        return type(self), (self.directory, self.holder, self.thread)


class DirectoryLostError(RuntimeError):
    """A directory that this process has locked was moved, deleted or replaced."""


class _Lock:
    """One thread's lock of one directory, which all its `DirectoryLock`s share."""

    def __init__(self, path: str, descriptor: int | None):
        self.path = path
        self.descriptor = descriptor  # None if the file system has no locks.
        self.thread = threading.current_thread()
        self.count = 0


# A lock of the kernel belongs to the process, and so does this dict. Its keys are those of `DirectoryLock._key`.
_held: dict[Any, _Lock] = {}
_mutex = threading.RLock()


def _forget() -> None:
    """In a forked child: the lock would live as long as the last descriptor of it."""
    for lock in _held.values():
        if lock.descriptor is not None:
            os.close(lock.descriptor)
            lock.descriptor = None
    _held.clear()
    _mutex.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_mutex.acquire, after_in_parent=_mutex.release, after_in_child=_forget)


@final
class DirectoryLock:
    """Keeps other processes and threads from training in a directory at the same time.

    While it is held, a file in the directory says by which process. The lock on the file is the kernel's (`flock`),
    which releases it however the process ends; the next process takes over a file that is left. A thread can acquire
    the lock many times, also by another name of the same directory, and has to release it as often. Other threads are
    refused, and forked processes don't hold it.

    Where the file system has no locks (`gs://`, some network file systems), only the threads of this process are
    refused, and a warning says so.

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
        self._acquired: list[tuple[Any, _Lock]] = []

    def __repr__(self) -> str:
        return f"DirectoryLock({self._directory!r}, {self._name!r})"

    def acquire(self) -> None:
        """Takes the lock, or raises at once: it never waits for it.

        Raises:
          DirectoryInUseError: another process, or another thread, holds it.
          OSError: the directory or the file can't be made.
        """
        with _mutex:
            key = self._key()
            if key not in _held:
                path = self._path()
                _held[key] = _Lock(path, self._lock(path))
            elif _held[key].thread is not threading.current_thread():
                raise DirectoryInUseError(self._directory, None, _held[key].thread.name)
            _held[key].count += 1
            self._acquired.append((key, _held[key]))

    def release(self) -> None:
        """Takes back one `acquire`; the last one deletes the file.

        Raises:
          RuntimeError: there is none to take back.
        """
        with _mutex:
            if not self._acquired:
                raise RuntimeError(f"{self!r} is not held: release() takes back one acquire(), and there is none left.")
            key, lock = self._acquired.pop()
            lock.count -= 1
            if lock.count:
                return
            if _held.get(key) is lock:  # Not in a forked child, nor twice.
                del _held[key]
            if lock.descriptor is not None:
                # Deleted while it is locked: a process that has opened it before sees, in `_lock`, that it is gone.
                if _is_same_file(lock.descriptor, lock.path):
                    try:
                        os.unlink(lock.path)
                    except OSError as error:  # Raising it would hide the error that ended the run.
                        logging.warning("%s is unlocked, but could not be deleted: %s.", lock.path, error.strerror)
                os.close(lock.descriptor)
                lock.descriptor = None

    def check(self) -> None:
        """Raises if the directory is no longer the one that was locked; does nothing if it is not locked here.

        Raises:
          DirectoryLostError: it was moved, deleted or replaced, or its lock file was.
        """
        path = self._path()
        with _mutex:
            for lock in _held.values():
                if lock.path == path and lock.descriptor is not None and not _is_same_file(lock.descriptor, path):
                    raise DirectoryLostError(
                        f"The directory {self._directory} is no longer the one that this run has locked: it was moved, "
                        f"deleted or replaced, or {self._name} in it was. Another run may use it now, so nothing more "
                        "is saved there. Put the directory back and start the run again."
                    )

    def __enter__(self) -> "DirectoryLock":
        self.acquire()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.release()

    def _path(self) -> str:
        """The path of the file, without links."""
        directory = self._directory if files.is_remote(self._directory) else os.path.realpath(self._directory)
        return os.path.join(directory, self._name)

    def _key(self) -> Any:
        """Returns what is equal for all names of the directory, and differs for other directories."""
        if files.is_remote(self._directory):
            return self._directory, self._name
        try:
            os.makedirs(self._directory, exist_ok=True)
            stat = os.stat(self._directory)
        except OSError as error:
            raise self._explained(error, "made") from error
        return stat.st_dev, stat.st_ino, self._name

    def _lock(self, path: str) -> int | None:
        """Opens, locks and signs the file; returns its descriptor, or None where there are no locks."""
        if fcntl is None or files.is_remote(self._directory):
            return self._without_lock("there are none on remote file systems, nor on Windows")
        while True:
            try:
                descriptor = files.open_descriptor(path, os.O_RDWR | os.O_CREAT)
            except OSError as error:
                raise self._explained(error, "written to") from error
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not _is_same_file(descriptor, path):  # Released, and deleted, after we had opened it.
                    os.close(descriptor)
                    continue
                self._take_over(descriptor)
                return descriptor
            except BlockingIOError:
                time.sleep(_SIGNING_SECS)  # Where two start together, the other one is just taking it.
                holder = _read(descriptor)
                os.close(descriptor)
                raise DirectoryInUseError(self._directory, holder) from None
            except OSError as error:
                os.close(descriptor)
                if error.errno not in _NO_LOCKS:
                    raise self._explained(error, "locked") from error
                return self._without_lock(error.strerror)

    def _take_over(self, descriptor: int) -> None:
        """Writes who we are into the file, and says whose it was where its process has not released it."""
        us = Holder(os.getpid(), socket.gethostname(), _now(), _command())
        if os.fstat(descriptor).st_size:
            dead = _read(descriptor)
            text = f"{self._directory}: took over the lock of {dead or 'a process'}, which ended without releasing it."
            if dead is None or dead.host == us.host:
                logging.info("%s", text)
            else:
                logging.warning(
                    "%s Or does it still run, on a host whose locks can't be seen here? Then end one.", text
                )
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(dataclasses.asdict(us)).encode(), 0)

    def _without_lock(self, why: str | None) -> None:
        logging.warning(
            "%s can't be locked (%s): take care that no other run writes there at the same time.", self._directory, why
        )

    def _explained(self, error: OSError, what: str) -> OSError:
        has_no_room = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "free space and inodes" if has_no_room else "the right to write there"
        explained = type(error)(
            f"The directory {self._directory}, which a run writes to, can't be {what}: {error.strerror}. Give another "
            f"directory, or {remedy}."
        )
        explained.errno = error.errno
        return explained


def _is_same_file(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except OSError:  # It is gone, or can't be seen any more.
        return False


def _read(descriptor: int) -> Holder | None:
    """Reads who holds a lock; None if the file does not say so, or not yet."""
    try:
        holder = Holder(**files.parse_json(os.pread(descriptor, _MOST_BYTES, 0)))
    except (ValueError, TypeError, OSError):
        return None
    kinds = [type(value) for value in dataclasses.astuple(holder)]
    return holder if kinds == [int, str, str, str] else None


def _now() -> str:
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


def _command() -> str:
    command = shlex.join(sys.orig_argv)
    return command if len(command) <= _COMMAND_LENGTH else f"{command[:_COMMAND_LENGTH]}..."
