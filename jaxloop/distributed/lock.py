"""Directory locks, which ensure that only one run at a time trains in a directory.

The kernel releases a process's locks when the process ends, even if it was killed.
"""

import contextlib
import datetime
import os
import shlex
import socket
import sys
from collections.abc import Iterator

import filelock
from absl import logging
from etils import epath

from jaxloop.base import files
from jaxloop.base.text import printable

TRAINER, EVALUATOR = ".trainer.lock", ".evaluator.lock"
"""The names of the lock files: one for a run that trains, and one for a run that only evaluates."""

_COMMAND_LENGTH = 200
_MAX_BYTES = 10_000  # Limits how much of the file is read, because its content is untrusted.

_held: dict[str, os.stat_result] = {}  # The lock files that this process has locked, by path.


class DirectoryInUseError(RuntimeError):
    """Raised if a directory is in use by another run, in this process or another one."""


class DirectoryLostError(RuntimeError):
    """Raised if a directory that this process has locked was moved, deleted or replaced."""


@contextlib.contextmanager
def locked(directory: epath.PathLike, name: str = TRAINER) -> Iterator[None]:
    """Returns a context manager that prevents other runs from using a directory.

    The lock file stays in the directory and describes the process that last held the lock. Remote directories (`gs://`)
    can't be locked; a warning is logged instead.

    >>> import tempfile
    >>> directory = tempfile.mkdtemp()
    >>> with locked(directory):
    ...     pass
    >>> os.listdir(directory)
    ['.trainer.lock']

    Args:
      directory: The directory, which is created if it doesn't exist.
      name: The name of the lock file. Only runs that use the same name exclude each other.

    Raises:
      DirectoryInUseError: If the lock is already held.
      OSError: If the directory can't be created, written to or locked.
    """
    path = _path(directory, name)
    if files.is_remote(path):
        logging.warning("%s can't be locked: make sure that no other run writes there at the same time.", directory)
        yield
        return
    directory, lock = os.path.dirname(path), filelock.FileLock(path)
    with contextlib.ExitStack() as stack:
        try:
            os.makedirs(directory, exist_ok=True)
            # Raises if it isn't a regular file.
            with open(files.open_descriptor(path, os.O_RDWR | os.O_CREAT), "w", encoding="utf-8") as file:
                stack.enter_context(lock.acquire(timeout=0))
                file.truncate()
                file.write(_this_process())
        except filelock.Timeout:
            raise DirectoryInUseError(
                f"{printable(directory)} is in use by {_read_holder(path)}. Two runs in one directory would overwrite "
                "each other's checkpoints. Give this run another directory, or end the other one."
            ) from None
        except OSError as error:
            raise files.unwritable(directory, error) from error
        _held[path] = os.stat(path)
        stack.callback(_held.pop, path, None)
        yield


def check(directory: epath.PathLike, name: str = TRAINER) -> None:
    """Checks that a directory locked by this process has not been moved, deleted or replaced.

    Does nothing if this process hasn't locked the directory.

    Raises:
      DirectoryLostError: If the directory or its lock file was moved, deleted or replaced.
    """
    path = _path(directory, name)
    if (locked_file := _held.get(path)) is None:
        return
    with contextlib.suppress(OSError):  # The file is gone, or the path is no longer accessible.
        if os.path.samestat(locked_file, os.lstat(path)):
            return
    raise DirectoryLostError(
        f"The directory {os.path.dirname(path)} is no longer the one that this run locked: it was moved, deleted or "
        f"replaced, or {name} in it was. Another run may use it now, so nothing more is saved there. Put the directory "
        "back and start the run again."
    )


def _path(directory: epath.PathLike, name: str) -> str:
    """Returns the absolute path of a directory's lock file. Resolves symbolic links in the path of the directory."""
    return os.path.join(files.absolute(directory), name)


def _this_process() -> str:
    now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    command = shlex.join(sys.orig_argv)
    shortened = command if len(command) <= _COMMAND_LENGTH else f"{command[:_COMMAND_LENGTH]}..."
    return f"process {os.getpid()} on {socket.gethostname()}, since {now} ({shortened})"


def _read_holder(path: str) -> str:
    """Returns the text of a lock file, which describes the process that holds the lock.

    Returns "another process" if the file is empty or can't be read as text.
    """
    with contextlib.suppress(OSError, ValueError):
        return printable(files.read_bytes(path, _MAX_BYTES).decode()) or "another process"
    return "another process"
