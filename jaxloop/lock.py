"""Directory locks, which ensure that only one run at a time trains in a directory.

A lock left behind by a killed process can be acquired again.
"""

import contextlib
import dataclasses
import datetime
import errno
import fcntl
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

# Errors from file systems that don't support locks, or whose lock server can't be reached.
_NO_LOCK_ERRNOS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
TRAINER, EVALUATOR = ".trainer.lock", ".evaluator.lock"
"""The names of the lock files: one for a run that trains, and one for a run that only evaluates."""

_COMMAND_LENGTH = 200
_MAX_BYTES = 10_000  # Limits how much of the file is read, because its content is untrusted.
_WRITE_HOLDER_SECS = 0.1  # More than enough time to write the holder into a file that was just locked.


@final
@dataclasses.dataclass(frozen=True)
class Holder:
    """The process that holds a lock, as described in the lock file.

    >>> print(Holder(123, "gpu7", "2026-01-31T09:30:00+01:00", "python train.py"))
    process 123 on gpu7, since 2026-01-31T09:30:00+01:00 (python train.py)

    Attributes:
      pid: The process ID.
      host: The name of the process's host.
      since: The time at which the process acquired the lock, in ISO 8601 format.
      command: The command line of the process, shortened to about 200 characters.
    """

    pid: int
    host: str
    since: str
    command: str

    def __str__(self) -> str:
        return printable(f"process {self.pid} on {self.host}, since {self.since} ({self.command})")


class DirectoryInUseError(RuntimeError):
    """Raised if another process, or another thread of this process, holds the lock on a directory.

    Attributes:
      directory: The directory.
      holder: The process that holds the lock; None if this is the current process, or if the holder hasn't described
        itself in the lock file yet.
      thread: The name of the thread that holds the lock, if the thread belongs to this process; None otherwise.
    """

    def __init__(self, directory: str, holder: Holder | None, thread: str | None = None):
        who = f"the thread {thread!r} of this process" if thread is not None else holder or "another process"
        how = "" if holder is None else f" (on {holder.host}: kill {holder.pid})"
        message = (
            f"{directory} is in use by {who}. Two runs in one directory would overwrite each other's checkpoints. "
            f"Give this run another directory, or end the other one{how}."
        )
        super().__init__(printable(message))
        self.directory: str = directory
        self.holder: Holder | None = holder
        self.thread: str | None = thread

    def __reduce__(self) -> Any:
        return type(self), (self.directory, self.holder, self.thread)


class DirectoryLostError(RuntimeError):
    """Raised if a directory that this process has locked was moved, deleted, or replaced."""


@dataclasses.dataclass(eq=False)
class _Lock:
    """A lock that one thread holds on one directory, shared by all `DirectoryLock` objects of that thread."""

    key: Any  # Identifies the directory and the name of the file.
    path: str
    descriptor: int | None  # None if the file system doesn't support locks.
    thread: threading.Thread = dataclasses.field(default_factory=threading.current_thread)
    count: int = 0


_held_locks: set[_Lock] = set()  # Belongs to the process, like the kernel's locks.
_mutex = threading.RLock()


def _close_in_child() -> None:
    """Closes the descriptors in a forked child. Otherwise, the directories would stay locked until the child ends."""
    while _held_locks:
        if (descriptor := _held_locks.pop().descriptor) is not None:
            os.close(descriptor)
    _mutex.release()


os.register_at_fork(before=_mutex.acquire, after_in_parent=_mutex.release, after_in_child=_close_in_child)


@final
class DirectoryLock:
    """Prevents other processes and threads from training in a directory at the same time.

    While the lock is held, a file in the directory describes the process that holds it. The kernel locks the file
    (`flock`) and releases the lock no matter how the process ends. If the process leaves the file behind, the next
    process reuses it. A thread can acquire the lock several times, even through different paths to the same directory,
    and must release it the same number of times. Until then, no other thread can acquire it. Forked processes don't
    inherit the lock.

    If the file system doesn't support locks (`gs://`, some network file systems), the lock excludes only other threads
    of this process, and a warning is logged.

    >>> import tempfile
    >>> directory = tempfile.mkdtemp()
    >>> with DirectoryLock(directory):
    ...     os.listdir(directory)
    ['.trainer.lock']
    >>> os.listdir(directory)
    []

    Args:
      directory: The directory, which is created if it doesn't exist.
      name: The name of the lock file.
    """

    def __init__(self, directory: epath.PathLike, name: str = TRAINER):
        self._directory = os.fspath(files.absolute(directory))
        self._name = name
        self._acquired: list[_Lock] = []

    def acquire(self) -> None:
        """Acquires the lock. If it is already held, raises an error instead of waiting.

        Raises:
          DirectoryInUseError: If another process, or another thread of this process, holds the lock.
          OSError: If the directory or the lock file can't be created.
        """
        with _mutex:
            try:
                key, path = self._key(), self._path()
                lock = next((each for each in _held_locks if each.key == key), None)
                if lock is None:
                    lock = _Lock(key, path, self._open_locked(path))
                    _held_locks.add(lock)
            except OSError as error:
                raise files.unwritable(self._directory, error) from error
            if lock.thread is not threading.current_thread():
                raise DirectoryInUseError(self._directory, None, lock.thread.name)
            lock.count += 1
            self._acquired.append(lock)

    def release(self) -> None:
        """Undoes one call to `acquire`. The last release deletes the lock file.

        Raises:
          RuntimeError: If there is no `acquire` to undo.
        """
        with _mutex:
            if not self._acquired:
                raise RuntimeError(f"The lock of {self._directory} is not held: release() needs an acquire() first.")
            lock = self._acquired.pop()
            lock.count -= 1
            if lock.count or lock not in _held_locks:  # A forked child holds no locks.
                return
            _held_locks.remove(lock)
            if lock.descriptor is None:
                return
            try:  # Deletes the file while it is still locked, as `_open_locked` expects.
                if _is_same_file(lock.descriptor, lock.path):
                    os.unlink(lock.path)
            except OSError as error:  # Raising this error would hide the one that ended the run.
                logging.warning("%s is unlocked, but could not be deleted: %s.", lock.path, error.strerror)
            with contextlib.suppress(OSError):  # The descriptor is closed even if this fails.
                os.close(lock.descriptor)

    def check(self) -> None:
        """Checks that the directory is still the one that this process locked. Does nothing if it isn't locked.

        Raises:
          DirectoryLostError: If the directory or its lock file was moved, deleted, or replaced.
        """
        path = self._path()
        with _mutex:
            for lock in _held_locks:
                if lock.path == path and lock.descriptor is not None and not _is_same_file(lock.descriptor, path):
                    raise DirectoryLostError(
                        f"The directory {self._directory} is no longer the one that this run locked: it was moved, "
                        f"deleted or replaced, or {self._name} in it was. Another run may use it now, so nothing more "
                        "is saved there. Put the directory back and start the run again."
                    )

    def __enter__(self) -> "DirectoryLock":
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _path(self) -> str:
        """Returns the path of the lock file, with symbolic links in the directory's path resolved."""
        return os.path.join(self._directory, self._name)

    def _key(self) -> Any:
        """Returns a key that is the same for all paths to the directory. Creates the directory if it doesn't exist."""
        if files.is_remote(self._directory):
            return self._directory, self._name
        os.makedirs(self._directory, exist_ok=True)
        stat = os.stat(self._directory)
        return stat.st_dev, stat.st_ino, self._name

    def _open_locked(self, path: str) -> int | None:
        """Opens and locks the file, and describes this process in it.

        Returns the descriptor, or None if locks aren't supported.
        """
        reason = "remote file systems have no locks"
        while not files.is_remote(path):
            with contextlib.ExitStack() as stack:
                descriptor = files.open_descriptor(path, os.O_RDWR | os.O_CREAT)
                stack.callback(os.close, descriptor)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    # If both processes started together, the other may not have described itself yet.
                    time.sleep(_WRITE_HOLDER_SECS)
                    raise DirectoryInUseError(self._directory, _read_holder(descriptor)) from None
                except OSError as error:
                    if error.errno not in _NO_LOCK_ERRNOS:
                        raise
                    reason = error.strerror
                    break
                if _is_same_file(descriptor, path):  # Otherwise, it was deleted after it was opened; try again.
                    self._write_holder(descriptor)
                    stack.pop_all()
                    return descriptor
        message = "%s can't be locked (%s): make sure that no other run writes there at the same time."
        logging.warning(message, self._directory, reason)
        return None

    def _write_holder(self, descriptor: int) -> None:
        """Describes this process in the file. Logs the previous holder if it didn't release the lock."""
        own, previous = _this_process(), _read_holder(descriptor)
        if os.fstat(descriptor).st_size:
            level, message = logging.INFO, "%s: took over the lock of %s, which ended without releasing it."
            if previous is not None and previous.host != own.host:
                level = logging.WARNING
                message += " If it still runs on its host, the two hosts don't share locks: end one of the runs."
            logging.log(level, message, self._directory, previous or "a process")
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(dataclasses.asdict(own)).encode(), 0)


def _is_same_file(descriptor: int, path: str) -> bool:
    with contextlib.suppress(OSError):  # The file is gone, or the path is no longer accessible.
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    return False


def _this_process() -> Holder:
    now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    command = shlex.join(sys.orig_argv)
    shortened = command if len(command) <= _COMMAND_LENGTH else f"{command[:_COMMAND_LENGTH]}..."
    return Holder(os.getpid(), socket.gethostname(), now, shortened)


def _read_holder(descriptor: int) -> Holder | None:
    """Reads the holder of a lock from its file. Returns None if the file doesn't describe a process (yet)."""
    with contextlib.suppress(ValueError, TypeError, OSError):
        holder = Holder(**files.parse_json(os.pread(descriptor, _MAX_BYTES, 0)))
        if [type(value) for value in dataclasses.astuple(holder)] == [int, str, str, str]:
            return holder
    return None
