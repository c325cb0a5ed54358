"""One trainer a directory: a second one is refused, and the lock of one that was killed is taken over."""

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

try:
    import fcntl
except ImportError:  # Windows.
    fcntl = None

# What a file system says that knows no locks, or whose server of locks can't be reached.
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
_COMMAND_LENGTH = 200
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
        return f"process {self.pid} on {self.host}, since {self.since} ({self.command})"


class DirectoryInUseError(RuntimeError):
    """Another process holds the lock of a directory.

    Attributes:
      directory: which one.
      holder: the other process; None where it has not got round to naming itself.
    """

    def __init__(self, directory: str, holder: Holder | None):
        how = f" (on {holder.host}: kill {holder.pid})" if holder else ""
        super().__init__(
            f"{directory} is in use by {holder or 'another process'}. Two runs in one directory would overwrite each "
            f"other's checkpoints. Give this run another directory, or end the other one{how}."
        )
        self.directory = directory
        self.holder = holder

    def __reduce__(self) -> Any:
        return type(self), (self.directory, self.holder)


class _Lock:
    """What this process holds of one directory, for all its `DirectoryLock`s."""

    def __init__(self, path: str, descriptor: int | None):
        self.path = path
        self.descriptor = descriptor  # None where the file system knows no locks.
        self.count = 0


# A lock belongs to the process, and so does this: by the file that it is, for a directory has many names.
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
    """Keeps other processes from training in a directory at the same time.

    While it is held, a file in the directory tells by whom. The lock on it is the kernel's (`flock`), which lets go of
    it however the process ends; a file that is left over is taken over by the next one. Within a process it can be
    acquired many times, also by another name of the same directory, and is free when each of them is released. The
    children of the process don't hold it.

    Where the file system knows no locks (`gs://`, some network file systems), there is none, and the log says so.

    >>> import tempfile
    >>> directory = tempfile.mkdtemp()
    >>> with DirectoryLock(directory):
    ...     os.listdir(directory)
    ['.trainer.lock']
    >>> os.listdir(directory)
    []

    Args:
      directory: made where it is missing.
      name: of the file.
    """

    def __init__(self, directory: epath.PathLike, name: str = ".trainer.lock"):
        self._directory = os.path.expanduser(os.fspath(directory))
        self._name = name
        self._acquired: list[tuple[Any, _Lock]] = []

    def __repr__(self) -> str:
        return f"DirectoryLock({self._directory!r}, {self._name!r})"

    def acquire(self) -> None:
        """Takes the lock, or raises at once: it never waits for it.

        Raises:
          DirectoryInUseError: another process holds it.
          OSError: the directory can't be made, or no file in it.
        """
        with _mutex:
            key = self._key()
            if key not in _held:
                path = os.path.join(os.path.realpath(self._directory), self._name)
                _held[key] = _Lock(path, self._lock(path))
            _held[key].count += 1
            self._acquired.append((key, _held[key]))

    def release(self) -> None:
        """Takes back one `acquire`; the last one of the process deletes the file.

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
                # Deleted while it is locked: whoever has opened it before sees, in `_lock`, that it is gone.
                if _is_same_file(lock.descriptor, lock.path):
                    os.unlink(lock.path)
                os.close(lock.descriptor)
                lock.descriptor = None

    def __enter__(self) -> "DirectoryLock":
        self.acquire()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.release()

    def _key(self) -> Any:
        """What is the same for all names of the directory, and no other."""
        if _is_remote(self._directory):
            return self._directory, self._name
        try:
            os.makedirs(self._directory, exist_ok=True)
            stat = os.stat(self._directory)
        except OSError as error:
            raise self._explained(error, "made") from error
        return stat.st_dev, stat.st_ino, self._name

    def _lock(self, path: str) -> int | None:
        """Opens, locks and signs the file; returns its descriptor, or None where there are no locks."""
        if fcntl is None or _is_remote(self._directory):
            return self._without_lock("there are none on remote file systems, nor on Windows")
        while True:
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)  # Not inherited by other programs.
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
        return type(error)(
            f"The directory {self._directory}, in which a run keeps its checkpoints, can't be {what}: "
            f"{error.strerror}. Give another directory, or the right to write there."
        )


def _is_remote(directory: str) -> bool:
    return "://" in directory


def _is_same_file(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _read(descriptor: int) -> Holder | None:
    try:
        return Holder(**json.loads(os.pread(descriptor, 10_000, 0)))
    except (ValueError, TypeError, OSError):  # Not written yet, or not to the end.
        return None


def _now() -> str:
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


def _command() -> str:
    command = shlex.join(sys.orig_argv)
    return command if len(command) <= _COMMAND_LENGTH else f"{command[:_COMMAND_LENGTH]}..."
