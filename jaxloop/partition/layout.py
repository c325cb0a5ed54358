"""The layout of a state across devices, as a table."""

import dataclasses
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, final

import jax
import numpy as np

from jaxloop.base.text import printable


@final
@dataclasses.dataclass(frozen=True)
class LeafLayout:
    """The layout of one leaf of a state.

    Attributes:
      path: The path of the leaf in the state, such as `params/Dense_0/kernel`.
      shape: The shape of the whole leaf.
      dtype: The dtype.
      sharding: The sharding.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    sharding: Any

    @property
    def spec(self) -> str:
        """The partition spec of the leaf, such as `P('data')`."""
        spec = getattr(self.sharding, "spec", None)
        return "" if spec is None else str(spec).replace("PartitionSpec", "P").replace(",)", ")")

    @property
    def bytes(self) -> int:
        """The size of the whole leaf, in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def bytes_per_device(self) -> int:
        """The number of bytes on one device."""
        return math.prod(self.sharding.shard_shape(self.shape)) * self.dtype.itemsize


@final
class Layout:
    """The layout of a state. `str` formats it as a table.

    Attributes:
      leaves: The layouts of the leaves, in order.
    """

    def __init__(self, leaves: Iterable[LeafLayout]):
        self.leaves: list[LeafLayout] = list(leaves)

    @property
    def bytes(self) -> int:
        """The size of the whole state, in bytes."""
        return sum(leaf.bytes for leaf in self.leaves)

    @property
    def bytes_per_device(self) -> int:
        """The number of bytes on one device."""
        return sum(leaf.bytes_per_device for leaf in self.leaves)

    def __str__(self) -> str:
        head = ("path", "shape", "dtype", "spec", "per device", "")
        rows = [
            (
                printable(leaf.path),
                str(list(leaf.shape)),
                str(leaf.dtype),
                leaf.spec,
                readable(leaf.bytes_per_device),
                "",
            )
            for leaf in self.leaves
        ]
        total = ("", "", "", "", readable(self.bytes_per_device), f"of {readable(self.bytes)} in total")
        return _table([head, *rows, total], "<<<<>")

    def summary(self) -> str:
        """Returns a table of the parameters by module. If the state has no `params`, all leaves count as parameters.

        Modules whose names differ only in a number share a row for equal parameters, as in `12 x blocks/*/mlp`.

        >>> from jaxloop import examples
        >>> step, state, _ = examples.tiny_regression()
        >>> print(step.partitioner.report(state).summary())
        module  parameters     dtype    number  per device  spec
        (top)   bias [1]       float32       1         4 B
                kernel [3, 1]  float32       3        12 B
        total                                4        16 B  of 16 B
        """
        params = [leaf for leaf in self.leaves if leaf.path.startswith("params/")] or self.leaves
        # Equal leaves of modules whose names differ only in a number.
        alike: dict[Any, list[tuple[str, LeafLayout]]] = {}
        for leaf in params:
            path = printable(leaf.path.removeprefix("params/").removesuffix("/value"))  # NNX appends the latter.
            module, _, name = path.rpartition("/")
            key = (re.sub(r"[0-9]+", "*", module), name, leaf.shape, leaf.dtype, leaf.spec)
            alike.setdefault(key, []).append((module or "(top)", leaf))
        rows, before = [("module", "parameters", "dtype", "number", "per device", "spec")], None
        for (pattern, name, shape, dtype, spec), group in alike.items():
            module = group[0][0] if len(group) == 1 else f"{len(group)} x {pattern}"
            number = f"{sum(math.prod(leaf.shape) for _, leaf in group):,}"
            here = readable(sum(leaf.bytes_per_device for _, leaf in group))
            shown = "" if module == before else module
            rows.append((shown, f"{name} {list(shape)}", str(dtype), number, here, spec))
            before = module
        number, here = sum(math.prod(leaf.shape) for leaf in params), sum(leaf.bytes_per_device for leaf in params)
        whole = f"of {readable(sum(leaf.bytes for leaf in params))}"
        rows.append(("total", "", "", f"{number:,}", readable(here), whole))
        return _table(rows, "<<<>>")

    def __repr__(self) -> str:
        per_device = f"{readable(self.bytes_per_device)} of {readable(self.bytes)} per device"
        return f"Layout({len(self.leaves)} leaves, {per_device})"


def _table(rows: Sequence[Sequence[str]], alignment: str) -> str:
    """Returns rows as a table, whose last column is not aligned."""
    columns = zip(alignment, zip(*rows, strict=True), strict=False)
    form = "  ".join([*(f"{{:{side}{max(map(len, column))}}}" for side, column in columns), "{}"])
    return "\n".join(form.format(*row).rstrip() for row in rows)


def dtype_of(leaf: Any) -> Any:
    """Returns the dtype of a leaf, which may be a Python number."""
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
