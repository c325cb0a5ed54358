"""Functions that detect damaged files in a directory by means of a seal, a file that contains checksums.

A seal also contains the sizes of the files and a JSON dict supplied by the caller. It reveals storage errors and
accidental changes, but not deliberate tampering. This module doesn't depend on Orbax or JAX.
"""

import json
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from etils import epath

from jaxloop.base import files

# The name of the seal file in the sealed directory.
NAME = "SEAL"

_CHUNK = 1 << 22  # Bytes.


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
      directory: The directory. Each file to seal is read once, in chunks of 4 MiB.
      about: A JSON dict to store in the seal.
      leave_out: The relative paths of files to leave unsealed because they may change later.

    Raises:
      OSError: If a file can't be read or the seal can't be written.
    """
    directory = epath.Path(directory)
    sealed = _sizes_and_crcs(directory, [name for name in _files_in(directory) if name not in (NAME, *leave_out)])
    for error in sealed.values():
        if isinstance(error, OSError):
            raise error
    with files.open_file(directory / NAME, "w") as file:
        file.write(_serialize(sealed, about or {}))


def problems(directory: epath.PathLike, below: str = "") -> list[str]:
    """Returns the problems that `verify` finds, without the dict in the seal."""
    return verify(directory, below)[1]


def verify(directory: epath.PathLike, below: str = "") -> tuple[dict[str, Any], list[str]]:
    """Returns the dict in the seal and one line for each sealed file that is missing, changed or unreadable.

    A missing or changed seal is also reported; in this case, the dict is empty. Files added later are not reported.

    Args:
      directory: The sealed directory.
      below: The relative path of the file or subdirectory to check. If empty, the whole directory is checked. The seal
        itself is always checked.

    Raises:
      PermissionError: If the current user may not read one of the files.
    """
    directory, start, problems = epath.Path(directory), f"{below}/" if below else "", []
    try:
        sealed, about = _parse(files.read_bytes(directory / NAME))
    except (OSError, ValueError) as error:
        return {}, [_problem_of(f"{NAME}, the file with the checksums,", error)]
    names = [name for name in sealed if f"{name}/".startswith(start)]
    for name, found in _sizes_and_crcs(directory, names).items():
        size, crc = sealed[name]
        if isinstance(found, OSError):
            problems.append(_problem_of(name, found))
        elif found[0] != size:
            problems.append(f"{name} has {found[0]} bytes, but the seal says {size}")
        elif found[1] != crc:
            problems.append(f"{name} has changed: its CRC-32 is {found[1]:08x}, but the seal says {crc:08x}")
    return about, problems


def _problem_of(name: str, error: OSError | ValueError) -> str:
    """Returns a description of an error that was raised while a file was read.

    Raises the error again if it is a `PermissionError`, which doesn't mean that the file is damaged.
    """
    if isinstance(error, PermissionError):
        error.add_note("So it can't be verified. Change its owner or its permissions.")
        raise error
    if isinstance(error, FileNotFoundError):
        return f"{name} is missing"
    return f"{name} can't be read: {error}" if isinstance(error, OSError) else f"{name} has changed: {error}"


def _files_in(directory: epath.Path, prefix: str = "") -> Iterator[str]:
    """Yields the relative path of each file in a directory and its subdirectories."""
    for path in sorted(directory.iterdir()):
        if path.is_dir():
            yield from _files_in(path, f"{prefix}{path.name}/")
        else:
            yield f"{prefix}{path.name}"


def _sizes_and_crcs(directory: epath.Path, names: Iterable[str]) -> dict[str, tuple[int, int] | OSError]:
    """Returns a dict that maps each file name to the file's size and checksum, or to an `OSError` if reading failed."""
    open_file, found = files.opener(directory), dict[str, tuple[int, int] | OSError]()
    for name in names:
        size = crc = 0
        try:
            with open_file(directory / name, "rb") as file:
                while chunk := file.read(_CHUNK):
                    size, crc = size + len(chunk), zlib.crc32(chunk, crc)
            found[name] = size, crc
        except OSError as error:
            found[name] = error
    return found


def _serialize(sealed: Mapping[str, Any], about: Mapping[str, Any]) -> str:
    """Returns the content of the seal file: a line of JSON, preceded by a line with its checksum."""
    body = json.dumps({"files": sealed, "about": about}, sort_keys=True)
    return f"crc32 {zlib.crc32(body.encode()):08x}\n{body}\n"


def _parse(text: bytes) -> tuple[dict[str, tuple[int, int]], dict[str, Any]]:
    """Returns the contents of a seal file: the sizes and checksums of the files, and the caller's dict.

    Raises:
      ValueError: If the seal file has been changed since it was written.
    """
    try:
        content = files.parse_json(text.partition(b"\n")[2])
        sealed, about = content["files"], {**content["about"]}
    except (ValueError, TypeError, KeyError):
        sealed, about = {}, {}
    if text != _serialize(sealed, about).encode():
        raise ValueError("it does not match its own checksum, or a version of jaxloop before 0.1.0 wrote it")
    return sealed, about
