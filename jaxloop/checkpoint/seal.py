"""Detects damaged files in a directory with the help of a seal, a file with their checksums.

A seal contains the sizes and checksums of the files. It reveals storage errors and accidental changes, but not forgery.
This module doesn't depend on Orbax or JAX.
"""

import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from etils import epath

from jaxloop.base import files

# The name of the seal file in the sealed directory.
NAME = "SEAL"

_CHUNK = 1 << 22  # Bytes.
_UNREADABLE = "This user may not read the file, so it can't be verified. Change its owner or its permissions."


def write(directory: epath.PathLike, values: Mapping[str, Mapping[str, Any]] | None = None) -> None:
    """Seals all files in a directory and its subdirectories by writing a file named `SEAL` to the directory.

    >>> import tempfile
    >>> directory = epath.Path(tempfile.mkdtemp())
    >>> _ = (directory / "numbers").write_text("1 2 3")
    >>> write(directory)
    >>> _ = (directory / "numbers").write_text("1 2 4")
    >>> problems(directory)
    ['numbers has changed: its CRC-32 is 698e28fc, but the seal says f7eabd5f']

    Args:
      directory: The directory. Each file in it is read once, in chunks of 4 MiB.
      values: For JSON files that will be rewritten later, the values to seal, keyed by path and then by name:
        `{"about.json": {"author": "me"}}`. In these files, the seal covers only the given values, not all bytes.

    Raises:
      OSError: If a file can't be read or the seal can't be written.
    """
    directory = epath.Path(directory)
    values = values or {}
    sealed_files = {
        name: _size_and_crc(path) for name, path in _iterate_files(directory) if name not in (NAME, *values)
    }
    sealed_values = {name: {key: _value_crc(value) for key, value in by_key.items()} for name, by_key in values.items()}
    with files.open_file(directory / NAME, "w") as file:
        file.write(_serialize(sealed_files, sealed_values))


def is_sealed(directory: epath.PathLike) -> bool:
    """Returns whether a directory contains a seal, which may be damaged."""
    return (epath.Path(directory) / NAME).exists()


def unsealed_files(directory: epath.PathLike) -> list[str]:
    """Returns the paths of the files that were added after a directory was sealed."""
    directory = epath.Path(directory)
    sealed_files, values = _read_seal(directory / NAME)
    return [name for name, _ in _iterate_files(directory) if name not in (NAME, *sealed_files, *values)]


def problems(directory: epath.PathLike, below: str = "") -> list[str]:
    """Returns one line for each sealed file that is missing, changed or unreadable; an empty list if all are intact.

    A missing or changed seal is also reported, but files that were added later are not.

    Args:
      directory: The sealed directory.
      below: The file or subdirectory to check; empty for the whole directory. The seal itself is always checked.

    Raises:
      PermissionError: If this user may not read one of the files.
    """
    directory = epath.Path(directory)
    try:
        sealed_files, values = _read_seal(directory / NAME)
    except PermissionError as error:
        error.add_note(_UNREADABLE)
        raise
    except (OSError, ValueError) as error:
        return [str(error)]
    kinds: list[tuple[Callable[[epath.Path, Any], str | None], Mapping[str, Any]]]
    kinds, found = [(_file_problem, sealed_files), (_values_problem, values)], []
    for find_problem, sealed_by_name in kinds:
        for name, sealed in sealed_by_name.items():
            if not f"{name}/".startswith(f"{below}/" if below else ""):
                continue
            try:
                problem = find_problem(directory / name, sealed)
            except FileNotFoundError:
                problem = "is missing"
            except PermissionError as error:
                error.add_note(_UNREADABLE)
                raise
            except OSError as error:
                problem = f"can't be read: {error}"
            if problem is not None:
                found.append(f"{name} {problem}")
    return found


def _file_problem(path: epath.Path, sealed: tuple[int, int]) -> str | None:
    size, crc = sealed
    found_size = path.stat().length
    if found_size != size:  # No need to read the file.
        return f"has {found_size} bytes, but the seal says {size}"
    _, found_crc = _size_and_crc(path)
    return None if found_crc == crc else f"has changed: its CRC-32 is {found_crc:08x}, but the seal says {crc:08x}"


def _values_problem(path: epath.Path, sealed: Mapping[str, int]) -> str | None:
    try:
        found = files.parse_json(files.read_bytes(path))
        changed = [key for key, crc in sealed.items() if key not in found or _value_crc(found[key]) != crc]
    except (ValueError, TypeError) as error:
        return f"has changed: it is no longer a JSON object ({error})"
    return f"has changed: {', '.join(changed)} does not match the seal" if changed else None


def _iterate_files(directory: epath.Path, prefix: str = "") -> Iterator[tuple[str, epath.Path]]:
    """Yields the relative path and the full path of each file in a directory and its subdirectories."""
    for path in sorted(directory.iterdir()):
        if path.is_dir():
            yield from _iterate_files(path, f"{prefix}{path.name}/")
        else:
            yield f"{prefix}{path.name}", path


def _size_and_crc(path: epath.Path) -> tuple[int, int]:
    size = crc = 0
    with files.open_file(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return size, crc


def _value_crc(value: Any) -> int:
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())


def _serialize(sealed_files: Mapping[str, Any], values: Mapping[str, Any]) -> str:
    """Returns the content of the seal file: a line of JSON, preceded by a line with its checksum."""
    body = json.dumps({"files": sealed_files, "values": values}, sort_keys=True)
    return f"crc32 {zlib.crc32(body.encode()):08x}\n{body}\n"


def _read_seal(path: epath.Path) -> tuple[dict[str, tuple[int, int]], dict[str, dict[str, int]]]:
    """Reads the sizes and checksums from a seal.

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
        sealed_files, values = sealed["files"], sealed["values"]
    except (ValueError, TypeError, KeyError):
        sealed_files, values = {}, {}
    if text != _serialize(sealed_files, values).encode():
        raise ValueError(f"{path.name}, the file with the checksums, has changed: it does not match its own checksum")
    return sealed_files, values
