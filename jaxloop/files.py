"""Opening the files of a work directory: regular files only, without following links, and with bounded reads.

What a work directory contains is untrusted input. A FIFO there would block a run forever, a device would swallow its
rows, and through a symbolic link it would overwrite a file elsewhere.
"""

import contextlib
import errno
import json
import os
import stat
from typing import IO, Any

from etils import epath

MOST_BYTES = 1 << 28
"""The largest file that is read as a whole."""

_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFDIR: "a directory",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}
# Windows has neither links that any user can make nor FIFOs in directories.
_SAFELY = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)


def open_descriptor(path: str | os.PathLike[str], flags: int, mode: int = 0o666) -> int:
    """Like `os.open`, for a regular file of a local file system.

    The last component of the path must not be a link; those before it may be. `O_TRUNC` takes effect only after the
    file is known to be regular.

    Raises:
      OSError: there is something else of this name, or the file can't be opened.
    """
    with contextlib.suppress(FileNotFoundError):
        mode_now = os.lstat(path).st_mode  # Before it is opened, which has effects on some devices.
        if not stat.S_ISREG(mode_now):
            raise _not_regular(path, mode_now)
    descriptor = os.open(path, flags & ~os.O_TRUNC | _SAFELY, mode)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # It was replaced in between.
            raise _not_regular(path, os.fstat(descriptor).st_mode)
        if flags & os.O_TRUNC:
            os.ftruncate(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_file(path: epath.PathLike, mode: str) -> IO[Any]:
    """Like `open`, for a regular file; text is UTF-8. Remote paths (`gs://`) are opened as they are.

    >>> import tempfile
    >>> directory = epath.Path(tempfile.mkdtemp())
    >>> os.mkfifo(directory / "history.jsonl")
    >>> try:
    ...     open_file(directory / "history.jsonl", "rb")
    ... except OSError as error:
    ...     print(error.strerror)
    Expected a regular file and found a FIFO. Remove it, or give another directory

    Raises:
      OSError: there is something else of this name, or the file can't be opened.
    """
    if is_remote(path):
        return epath.Path(path).open(mode)
    return open(path, mode, encoding=None if "b" in mode else "utf-8", opener=open_descriptor)


def read_bytes(path: epath.PathLike, most: int = MOST_BYTES) -> bytes:
    """Reads a regular file.

    Raises:
      OSError: there is something else of this name, or the file can't be read.
      ValueError: it has more than `most` bytes.
    """
    with open_file(path, "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"{path} has more than {most:,} bytes, the most that is read of such a file")
    return content


def parse_json(text: str | bytes) -> Any:
    """Like `json.loads`, but also raises a ValueError for text that is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


def absolute(directory: Any) -> epath.Path:
    """Returns the absolute path of a directory, without links: Orbax refuses others, and only when it first saves."""
    return epath.Path(directory).expanduser().resolve()


def prepare_directory(directory: epath.PathLike) -> epath.Path:
    """Makes a directory, if need be, and makes sure that it can be written.

    Raises:
      OSError: it can't; the error says why.
    """
    path = absolute(directory)
    probe = path / ".write_probe"  # Of one name, for the next one to remove it if this process is killed just here.
    try:
        path.mkdir(parents=True, exist_ok=True)
        file = open_file(probe, "wb")
        try:
            with file:
                file.write(b"0")  # On a full disk, an empty file can be made.
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        raise unwritable(path, error) from error
    return path


def unwritable(directory: epath.PathLike, error: OSError) -> OSError:
    """Returns the error of a directory that can't be made or written to: why, and what to do."""
    reason = error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    remedy = "free space and inodes" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "the right to write there"
    return OSError(
        error.errno, f"Can't write to the directory {directory} ({reason}). Give another directory, or {remedy}"
    )


def make_directory(path: epath.PathLike) -> None:
    """Makes a directory and those above it, where none exists.

    Raises:
      OSError: there is something else of this name, such as a link to a directory, or it can't be made.
    """
    if not is_remote(path) and os.path.islink(path):
        raise OSError(errno.EINVAL, "Expected a directory and found a symbolic link. Remove it", os.fspath(path))
    epath.Path(path).mkdir(parents=True, exist_ok=True)


def is_remote(path: epath.PathLike) -> bool:
    """Returns whether a path is of a store such as `gs://`, and not of a local file system."""
    return "://" in os.fspath(path)


def _not_regular(path: str | os.PathLike[str], mode: int) -> OSError:
    kind = _KINDS.get(stat.S_IFMT(mode), "something else")
    text = f"Expected a regular file and found {kind}. Remove it, or give another directory"
    return OSError(errno.EINVAL, text, os.fspath(path))
