"""Reads and writes files in the safetensors format, which many other libraries support."""

import contextlib
import functools
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from jaxloop.base import checks, files
from jaxloop.metrics import fetch

_DTYPES: dict[str, Any] = {
    "BOOL": np.bool_,
    "BF16": jnp.bfloat16,
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
}


_MAX_READ_BYTES = 2**27


def is_safetensors(path: epath.PathLike) -> bool:
    """Returns whether a path ends in `.safetensors`.

    >>> is_safetensors("weights.safetensors"), is_safetensors("runs/7/checkpoints")
    (True, False)
    """
    return os.fspath(path).endswith(".safetensors")


def save(params: Any, path: epath.PathLike) -> None:
    """Writes a pytree to a safetensors file; see `jaxloop.checkpoint.save_params`."""
    checks.check_only_process("save_params")
    if not is_safetensors(path):
        raise ValueError(f"save_params writes a file whose name ends in .safetensors, got {os.fspath(path)!r}.")
    tensors, leaves = {}, checks.leaves_by_path(params)
    is_nnx = all(name.endswith("/value") for name in leaves)
    for name, leaf in leaves.items():
        name = name.removesuffix("/value") if is_nnx else name
        if "." in name:
            raise ValueError(f"Names in a safetensors file have dots instead of slashes, so {name!r} can't have dots.")
        tensors[name.replace("/", ".")] = np.asarray(fetch(leaf), order="C")
        if tensors[name.replace("/", ".")].dtype not in map(np.dtype, _DTYPES.values()):
            raise ValueError(f"save_params can't write {name!r}, {checks.describe(leaf)}. Cast it or leave it out.")
    target = files.absolute(path)
    files.prepare_directory(target.parent)
    unfinished = target.with_name(f"{target.name}.tmp")
    _library().numpy.save_file(tensors, os.fspath(unfinished), metadata={"format": "jax"})
    unfinished.replace(target)


def _library() -> Any:
    try:
        import safetensors.numpy
    except ImportError:
        raise ImportError("A .safetensors file needs the package safetensors: pip install safetensors") from None
    return safetensors


@final
class SafetensorsFile:
    """A safetensors file that can be read like a `Checkpoint`. Dots in tensor names become slashes.

    Attributes:
      path: The path of the file.

    Raises:
      FileNotFoundError: If the file doesn't exist.
      ValueError: If the file is damaged or contains a tensor with an unsupported dtype.
    """

    def __init__(self, path: epath.PathLike):
        self.path: epath.Path = files.absolute(path)

    @functools.cached_property
    def leaves(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes and dtypes of the tensors, keyed by path."""
        with self._open() as file:
            leaves = {name.replace(".", "/"): self._shape_of(name, file.get_slice(name)) for name in _names(file)}
            if len(leaves) < len(_names(file)):
                raise ValueError(f"{self.path} has tensors whose names differ only in dots and slashes.")
            return leaves

    def _shape_of(self, name: str, part: Any) -> jax.ShapeDtypeStruct:
        if part.get_dtype() not in _DTYPES:
            raise ValueError(f"{self.path} contains {name!r} with dtype {part.get_dtype()}, which jaxloop can't read.")
        return jax.ShapeDtypeStruct(part.get_shape(), _DTYPES[part.get_dtype()])

    def read(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the leaves at the given paths. Each device reads only its own shard.

        Args:
          wanted: A dict that maps each path to an array or a `jax.ShapeDtypeStruct`, which determines the leaf's shape
            and sharding. A leaf without a sharding is read as a NumPy array.
        """
        values = {}
        for group in groups(wanted):
            with self._open() as file:  # Reopened, because everything read from an open file stays in memory.
                names = {name.replace(".", "/"): name for name in _names(file)}
                values |= {path: _read_leaf(file, names[path], leaf) for path, leaf in group.items()}
        return values

    @contextlib.contextmanager
    def _open(self) -> Iterator[Any]:
        library = _library()
        files.open_file(self.path, "rb").close()  # Rejects directories and pipes.
        try:
            with library.safe_open(os.fspath(self.path), framework="np") as file:
                yield file
        except library.SafetensorError as error:
            raise ValueError(f"{self.path} is damaged, or not a safetensors file: {error}") from error


def _read_leaf(file: Any, name: str, leaf: Any) -> Any:
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        return file.get_tensor(name)
    if not math.prod(leaf.shape[1:]) or not leaf.shape or not leaf.shape[0]:  # The library can't slice these.
        value = file.get_tensor(name)
        return jax.make_array_from_callback(leaf.shape, sharding, lambda index: value[index])
    return jax.make_array_from_callback(leaf.shape, sharding, lambda index: file.get_slice(name)[index])


def groups(leaves: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the leaves in groups of at most 128 MiB. A larger leaf forms a group by itself."""
    group: dict[str, Any] = {}
    for path, leaf in leaves.items():
        if group and sum(each.size * each.dtype.itemsize for each in (*group.values(), leaf)) > _MAX_READ_BYTES:
            yield group
            group = {}
        group[path] = leaf
    yield group


def _names(file: Any) -> list[str]:
    return file.keys()  # The file itself can't be iterated over.
