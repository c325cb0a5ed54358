"""A seal on the files of a directory: their sizes and checksums, for damage to be seen before it is read.

It knows neither Orbax nor JAX. It guards against what storage and accidents do to files, not against forgery.
"""

import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from etils import epath

from jaxloop import files

# The file that holds the seal, in the directory that it seals.
NAME = "SEAL"

_CHUNK = 1 << 22  # Bytes.


def write(directory: epath.PathLike, values: Mapping[str, Mapping[str, Any]] | None = None) -> None:
    """Seals the files of a directory and of those below it, in a file `SEAL` there.

    >>> import tempfile
    >>> directory = epath.Path(tempfile.mkdtemp())
    >>> _ = (directory / "numbers").write_text("1 2 3")
    >>> write(directory)
    >>> _ = (directory / "numbers").write_text("1 2 4")
    >>> problems(directory)
    ['numbers is changed: its CRC-32 is 698e28fc, and f7eabd5f was sealed']

    Args:
      directory: the directory. Each of its files is read once, in pieces of 4 MiB.
      values: JSON files that will be rewritten yet, by path: of these not the bytes are sealed but the values under
        some of their keys, `{"about.json": {"author": "me"}}`.

    Raises:
      OSError: a file can't be read, or the seal not be written.
    """
    directory = epath.Path(directory)
    values = values or {}
    sealed_files = {name: _size_and_crc(path) for name, path in _files(directory) if name not in (NAME, *values)}
    sealed_values = {name: {key: _crc_of_value(value) for key, value in of.items()} for name, of in values.items()}
    with files.open_file(directory / NAME, "w") as file:
        file.write(_text(sealed_files, sealed_values))


def is_sealed(directory: epath.PathLike) -> bool:
    """Whether there is a seal, broken or not."""
    return (epath.Path(directory) / NAME).exists()


def problems(directory: epath.PathLike, below: str = "") -> list[str]:
    """What is not as it was sealed, a line each: missing, changed and unreadable files; nothing where all is well.

    Files that came later are no problem. A missing seal is one.

    Args:
      directory: the directory.
      below: only of the file of this path, or of the files below it; the seal itself is always looked at.
    """
    directory = epath.Path(directory)
    try:
        sealed_files, values = _read(directory / NAME)
    except (OSError, ValueError) as error:
        return [str(error)]
    kinds: list[tuple[Callable[[epath.Path, Any], str | None], Mapping[str, Any]]]
    kinds, found = [(_change_of_file, sealed_files), (_change_of_values, values)], []
    for change_of, sealed in kinds:
        for name, of in sealed.items():
            if not f"{name}/".startswith(f"{below}/" if below else ""):
                continue
            try:
                problem = change_of(directory / name, of)
            except FileNotFoundError:
                problem = "is missing"
            except OSError as error:
                problem = f"can't be read: {error}"
            if problem is not None:
                found.append(f"{name} {problem}")
    return found


def _change_of_file(path: epath.Path, sealed: tuple[int, int]) -> str | None:
    size, crc = sealed
    found_size = path.stat().length
    if found_size != size:  # Said without reading it.
        return f"has {found_size} bytes, and {size} were sealed"
    _, found_crc = _size_and_crc(path)
    return None if found_crc == crc else f"is changed: its CRC-32 is {found_crc:08x}, and {crc:08x} was sealed"


def _change_of_values(path: epath.Path, sealed: Mapping[str, int]) -> str | None:
    try:
        found = files.parse_json(files.read_bytes(path))
        changed = [key for key, crc in sealed.items() if key not in found or _crc_of_value(found[key]) != crc]
    except (ValueError, TypeError) as error:
        return f"is changed: it is no JSON object any more ({error})"
    return f"is changed: {', '.join(changed)} is not what was sealed" if changed else None


def _files(directory: epath.Path, prefix: str = "") -> Iterator[tuple[str, epath.Path]]:
    """The files of a directory and of those below it, under their paths from it."""
    for path in sorted(directory.iterdir()):
        if path.is_dir():
            yield from _files(path, f"{prefix}{path.name}/")
        else:
            yield f"{prefix}{path.name}", path


def _size_and_crc(path: epath.Path) -> tuple[int, int]:
    size = crc = 0
    with files.open_file(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return size, crc


def _crc_of_value(value: Any) -> int:
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())


def _text(sealed_files: Mapping[str, Any], values: Mapping[str, Any]) -> str:
    """The seal as it is written: a line with its own checksum, and one of JSON."""
    body = json.dumps({"files": sealed_files, "values": values}, sort_keys=True)
    return f"crc32 {zlib.crc32(body.encode()):08x}\n{body}\n"


def _read(path: epath.Path) -> tuple[dict[str, tuple[int, int]], dict[str, dict[str, int]]]:
    """The sizes and checksums of a seal.

    Raises:
      OSError: it is missing or can't be read.
      ValueError: it is not as it was written.
    """
    try:
        text = files.read_bytes(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path.name}, the file with the checksums, is missing") from None
    except OSError as error:
        raise OSError(f"{path.name}, the file with the checksums, can't be read: {error}") from error
    try:
        sealed = files.parse_json(text.partition(b"\n")[2])
        sealed_files, values = sealed["files"], sealed["values"]
    except (ValueError, TypeError, KeyError):
        sealed_files, values = {}, {}
    if text != _text(sealed_files, values).encode():
        raise ValueError(f"{path.name}, the file with the checksums, is changed: it does not fit its own checksum")
    return sealed_files, values
