"""Safe access to the files in a work directory: regular files only, no symbolic links, and a size limit for reads.

The contents of a work directory are untrusted input. A FIFO would block a run forever, a device such as `/dev/null`
would discard everything written to it, and a symbolic link would let the run overwrite a file elsewhere.
"""

import contextlib
import errno
import functools
import json
import os
import stat
from collections.abc import Callable
from typing import IO, Any

from etils import epath

MAX_BYTES = 1 << 28
"""The default size limit of `read_bytes`, in bytes."""

_SAFE_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def open_descriptor(path: str | os.PathLike[str], flags: int, mode: int = 0o666) -> int:
    """Opens a regular file on a local file system and returns its file descriptor, like `os.open`.

    The last component of the path must not be a symbolic link, but earlier components may be. With `os.O_TRUNC`, the
    file is truncated only after this function has checked that it is a regular file.

    Raises:
      OSError: If the path is not a regular file, or can't be opened.
    """
    # Checked before opening, because opening some devices has side effects.
    with contextlib.suppress(FileNotFoundError):  # Another process may delete the file at any time.
        if not stat.S_ISREG(os.lstat(path).st_mode):
            message = "Expected a regular file, but this is a link, directory, pipe or device. Remove it"
            raise OSError(errno.EINVAL, message, os.fspath(path))
    descriptor = os.open(path, flags & ~os.O_TRUNC | _SAFE_FLAGS, mode)
    if flags & os.O_TRUNC:
        os.ftruncate(descriptor, 0)
    return descriptor


def open_file(path: epath.PathLike, mode: str) -> IO[Any]:
    """Opens a file like `open`, but only if it is a regular file. Text files use UTF-8.

    Remote paths (such as `gs://bucket/file`) are opened without this check.

    >>> import tempfile
    >>> directory = epath.Path(tempfile.mkdtemp())
    >>> os.mkfifo(directory / "history.jsonl")
    >>> try:
    ...     open_file(directory / "history.jsonl", "rb")
    ... except OSError as error:
    ...     print(error.strerror)
    Expected a regular file, but this is a link, directory, pipe or device. Remove it

    Raises:
      OSError: If the path is not a regular file, or can't be opened.
    """
    return opener(path)(path, mode, encoding=None if "b" in mode else "utf-8")


def opener(directory: epath.PathLike) -> Callable[..., IO[Any]]:
    """Returns a function that is called like `open` and opens files in a directory; see `open_file`.

    In a local directory, the returned function opens only regular files.
    """
    remote = lambda path, mode, encoding=None: epath.Path(path).open(mode, encoding=encoding)
    return remote if is_remote(directory) else functools.partial(open, opener=open_descriptor)


def write_atomically(path: epath.PathLike, content: bytes | bytearray) -> None:
    """Writes a file under a temporary name and then renames it, so that readers never see an incomplete file."""
    unfinished = epath.Path(f"{os.fspath(path)}.new")
    with open_file(unfinished, "wb") as file:
        file.write(content)
    unfinished.replace(path)


def read_bytes(path: epath.PathLike, max_bytes: int = MAX_BYTES) -> bytes:
    """Returns the contents of a regular file.

    Raises:
      OSError: If the path is not a regular file, or can't be read.
      ValueError: If the file is larger than `max_bytes`.
    """
    with opener(path)(path, "rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"{path} has more than {max_bytes:,} bytes, the size limit of such a file")
    return content


def parse_json(text: str | bytes) -> Any:
    """Parses JSON like `json.loads`, but also raises a `ValueError` if the text is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


def absolute(directory: Any) -> epath.Path:
    """Returns the absolute path of a directory, with `~` and symbolic links resolved. Remote paths are not changed.

    Orbax rejects relative paths, but only at the first save. Converting them early avoids that error.
    """
    return epath.Path(directory) if is_remote(directory) else epath.Path(directory).expanduser().resolve()


def prepare_directory(directory: epath.PathLike) -> epath.Path:
    """Creates a directory if it doesn't exist and checks that it is writable. Returns the absolute path.

    Raises:
      OSError: If the directory can't be created or written to. The message gives the reason.
    """
    path = absolute(directory)
    probe = path / ".write_probe"  # A fixed name, so the next call removes the file if this process is killed.
    try:
        path.mkdir(parents=True, exist_ok=True)
        try:
            with open_file(probe, "wb") as file:
                file.write(b"0")  # On a full disk, creating an empty file may still succeed.
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        raise unwritable(path, error) from error
    return path


def unwritable(directory: epath.PathLike, error: OSError) -> OSError:
    """Returns the error to raise if a directory can't be created or written to.

    The message gives the reason and explains what to do.
    """
    reason = f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror or error
    remedy = "free space and inodes" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "make this one writable"
    return OSError(
        error.errno, f"Can't write to the directory {directory} ({reason}). Use a different directory, or {remedy}"
    )


def make_directory(path: epath.PathLike) -> None:
    """Creates a directory and its parents if they are missing.

    Raises:
      OSError: If the path is a symbolic link, isn't a directory, or can't be created.
    """
    if not is_remote(path) and os.path.islink(path):
        raise OSError(errno.EINVAL, "Expected a directory, but this is a symbolic link. Remove it", os.fspath(path))
    epath.Path(path).mkdir(parents=True, exist_ok=True)


def is_remote(path: epath.PathLike) -> bool:
    """Returns True if a path is remote (such as `gs://bucket/run`), rather than on a local file system."""
    return "://" in os.fspath(path)
