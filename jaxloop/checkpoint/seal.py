"""Detects damaged files in a directory with the help of a seal, a file with their checksums.

A seal contains the sizes and checksums of the files, and a JSON dict about them. It reveals storage errors and
accidental changes, but not forgery. This module doesn't depend on Orbax or JAX.
"""

import json
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import IO, Any

from etils import epath

from jaxloop.base import files

# The name of the seal file in the sealed directory.
NAME = "SEAL"

_CHUNK = 1 << 22  # Bytes.
_UNREADABLE = "This user may not read the file, so it can't be verified. Change its owner or its permissions."


def write(directory: epath.PathLike, about: Mapping[str, Any] | None = None, leave_out: Collection[str] = ()) -> None:
    """Seals all files in a directory and its subdirectories by writing a file named `SEAL` to the directory.

    >>> import tempfile
    >>> directory = epath.Path(tempfile.mkdtemp())
    >>> _ = (directory / "numbers").write_text("1 2 3")
    >>> write(directory, {"author": "me"})
    >>> _ = (directory / "numbers").write_text("1 2 4")
    >>> verify(directory)
    ({'author': 'me'}, ['numbers has changed: its CRC-32 is 698e28fc, but the seal says f7eabd5f'])

    Args:
      directory: The directory. Each file in it is read once, in chunks of 4 MiB.
      about: A JSON dict to store in the seal.
      leave_out: The paths of files that may change later.

    Raises:
      OSError: If a file can't be read or the seal can't be written.
    """
    directory = epath.Path(directory)
    names = [name for name in _files_in(directory) if name not in (NAME, *leave_out)]
    open_file = files.opener(directory)
    sealed = {name: _size_and_crc(directory / name, open_file) for name in names}
    with open_file(directory / NAME, "w", encoding="utf-8") as file:
        file.write(_serialize(sealed, about or {}))


def is_sealed(directory: epath.PathLike) -> bool:
    """Returns whether a directory contains a seal, which may be damaged."""
    return (epath.Path(directory) / NAME).exists()


def unsealed_files(directory: epath.PathLike) -> list[str]:
    """Returns the paths of the files in a directory that its seal doesn't cover, except the seal itself."""
    directory = epath.Path(directory)
    sealed, _ = _read_seal(directory / NAME)
    return [name for name in _files_in(directory) if name not in (NAME, *sealed)]


def problems(directory: epath.PathLike, below: str = "") -> list[str]:
    """Returns only the problems that `verify` finds."""
    return verify(directory, below)[1]


def verify(directory: epath.PathLike, below: str = "") -> tuple[dict[str, Any], list[str]]:
    """Returns the dict in the seal, and one line for each sealed file that is missing, changed or unreadable.

    A missing or changed seal is also reported, but files that were added later are not.

    Args:
      directory: The sealed directory.
      below: The file or subdirectory to check; empty for the whole directory. The seal itself is always checked.

    Raises:
      PermissionError: If this user may not read one of the files.
    """
    directory, open_file = epath.Path(directory), files.opener(directory)
    start = f"{below}/" if below else ""
    try:
        sealed, about = _read_seal(directory / NAME)
        names = [name for name in sealed if f"{name}/".startswith(start)]
        found = [(name, _problem(directory / name, *sealed[name], open_file)) for name in names]
    except PermissionError as error:
        error.add_note(_UNREADABLE)
        raise
    except (OSError, ValueError) as error:
        return {}, [str(error)]
    return about, [f"{name} {problem}" for name, problem in found if problem is not None]


def _problem(path: epath.Path, size: int, crc: int, open_file: Callable[..., IO[Any]]) -> str | None:
    """Returns what is wrong with a file, or None."""
    try:
        found_size = path.stat().length
        if found_size != size:  # No need to read the file.
            return f"has {found_size} bytes, but the seal says {size}"
        _, found_crc = _size_and_crc(path, open_file)
    except FileNotFoundError:
        return "is missing"
    except PermissionError:
        raise
    except OSError as error:
        return f"can't be read: {error}"
    return None if found_crc == crc else f"has changed: its CRC-32 is {found_crc:08x}, but the seal says {crc:08x}"


def _files_in(directory: epath.Path, prefix: str = "") -> Iterator[str]:
    """Yields the relative path of each file in a directory and its subdirectories."""
    for path in sorted(directory.iterdir()):
        if path.is_dir():
            yield from _files_in(path, f"{prefix}{path.name}/")
        else:
            yield f"{prefix}{path.name}"


def _size_and_crc(path: epath.Path, open_file: Callable[..., IO[Any]]) -> tuple[int, int]:
    size = crc = 0
    with open_file(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return size, crc


def _serialize(sealed: Mapping[str, Any], about: Mapping[str, Any]) -> str:
    """Returns the content of the seal file: a line of JSON, preceded by a line with its checksum."""
    body = json.dumps({"files": sealed, "about": about}, sort_keys=True)
    return f"crc32 {zlib.crc32(body.encode()):08x}\n{body}\n"


def _read_seal(path: epath.Path) -> tuple[dict[str, tuple[int, int]], dict[str, Any]]:
    """Reads the sizes and checksums, and the dict about the files, from a seal.

    Raises:
      OSError: If the seal is missing or can't be read.
      ValueError: If the seal has been changed since it was written.
    """
    try:
        text = files.read_bytes(path)
    except PermissionError:
        raise
    except FileNotFoundError:
        raise FileNotFoundError(f"{path.name}, the file with the checksums, is missing") from None
    except OSError as error:
        raise OSError(f"{path.name}, the file with the checksums, can't be read: {error}") from error
    try:
        sealed = files.parse_json(text.partition(b"\n")[2])
        sealed_files, about = sealed["files"], {**sealed["about"]}
    except (ValueError, TypeError, KeyError):
        sealed_files, about = {}, {}
    if text != _serialize(sealed_files, about).encode():
        raise ValueError(f"{path.name}, the file with the checksums, has changed: it does not match its own checksum")
    return sealed_files, about
