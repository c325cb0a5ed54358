"""The layout of a state across devices, which can be printed as a table."""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple, final

import jax
import numpy as np

from jaxloop.base.text import table


@final
class LeafLayout(NamedTuple):
    """The layout of one leaf of a state.

    Attributes:
      path: The path of the leaf in the state, such as `params/Dense_0/kernel`.
      shape: The shape of the whole leaf.
      dtype: The dtype of the leaf.
      sharding: The sharding of the leaf.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    sharding: Any

    @property
    def spec(self) -> str:
        """The partition spec of the leaf, such as `P('data')`, or "" if the sharding has no spec."""
        spec = getattr(self.sharding, "spec", None)
        return "" if spec is None else str(spec).replace("PartitionSpec", "P").replace(",)", ")")

    @property
    def bytes(self) -> int:
        """The size of the whole leaf, in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def bytes_per_device(self) -> int:
        """The size of the part of the leaf that each device holds, in bytes."""
        return math.prod(self.sharding.shard_shape(self.shape)) * self.dtype.itemsize


@final
class Layout:
    """The layout of a state across devices. `str` returns it as a table.

    Attributes:
      leaves: The layouts of the leaves, in the order of the leaves in the state.
    """

    def __init__(self, leaves: Iterable[LeafLayout]):
        self.leaves: list[LeafLayout] = list(leaves)

    @property
    def bytes(self) -> int:
        """The size of the whole state, in bytes."""
        return sum(leaf.bytes for leaf in self.leaves)

    @property
    def bytes_per_device(self) -> int:
        """The size of the part of the state that each device holds, in bytes."""
        return sum(leaf.bytes_per_device for leaf in self.leaves)

    def __str__(self) -> str:
        rows: list[tuple[object, ...]] = [("path", "shape", "dtype", "spec", "per device")]
        for leaf in self.leaves:
            size = readable(leaf.bytes_per_device)
            rows.append((leaf.path, list(leaf.shape), leaf.dtype, leaf.spec, size))
        rows.append(("", "", "", "", readable(self.bytes_per_device)))
        return f"{table(rows, right=[4])}  of {readable(self.bytes)} in total"

    def __repr__(self) -> str:
        per_device = f"{readable(self.bytes_per_device)} of {readable(self.bytes)} per device"
        return f"Layout({len(self.leaves)} leaves, {per_device})"


def dtype_of(leaf: Any) -> Any:
    """Returns the dtype of an array, a `jax.ShapeDtypeStruct` or a Python number."""
    return leaf.dtype if hasattr(leaf, "dtype") else jax.dtypes.canonicalize_dtype(np.asarray(leaf).dtype)


def bytes_of(tree: Any) -> int:
    """Returns the total size in bytes of a pytree of arrays, numbers or `jax.ShapeDtypeStruct`s.

    >>> bytes_of({"kernel": np.zeros([3, 2], np.float32), "bias": jax.ShapeDtypeStruct([2], np.float32)})
    32
    """
    return sum(math.prod(np.shape(leaf)) * dtype_of(leaf).itemsize for leaf in jax.tree.leaves(tree))


def readable(number: float) -> str:
    """Formats a number of bytes with a suitable unit.

    >>> readable(1_572_864)
    '1.5 MiB'
    """
    if number < 1024:
        return f"{number:.0f} B"
    power = min(int(math.log2(number)) // 10, 4)
    return f"{number / 1024**power:.1f} {' KMGT'[power]}iB"
