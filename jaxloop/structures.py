"""The structures of pytrees, told apart by the classes of their nodes too.

JAX finds two structures equal where a dataclass stands in the place of another with the same fields, and some of its
versions look up what `jax.jit` has compiled by that: then a function compiled for one class computes another. Their
hashes differ.
"""

import functools
from collections.abc import Callable
from typing import Any, final

import jax

MOST_STRUCTURES = 1024
"""Of how many structures something is remembered."""


def are_alike(one: Any, other: Any) -> bool:
    """Returns whether two trees have the same structure, with nodes of the same classes.

    >>> import collections
    >>> are_alike({"x": 1}, {"x": 2}), are_alike({"x": 1}, collections.OrderedDict(x=1))
    (True, False)
    """
    return _with_hash(jax.tree.structure(one)) == _with_hash(jax.tree.structure(other))


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Returns the leaves of a tree, and a key that is equal only for trees alike; its last item is the `PyTreeDef`."""
    leaves, structure = jax.tree.flatten(tree)
    return leaves, _with_hash(structure)


def _with_hash(structure: Any) -> tuple[int, Any]:
    return hash(structure), structure


@final
class OfEachStructure:
    """A compiled function that is compiled separately for arguments of each structure.

    Args:
      compile: compiles it. Each call must return a new function, made of a new function.

    >>> double = OfEachStructure(lambda: jax.jit(lambda x: jax.tree.map(lambda leaf: leaf + leaf, x)))
    >>> double({"x": 1.0}), double([1.0])
    ({'x': Array(2., dtype=float32, weak_type=True)}, [Array(2., dtype=float32, weak_type=True)])
    """

    def __init__(self, compile: Callable[[], Any]):
        # A dictionary compares the whole hashes before it asks whether two structures are equal.
        self._of = functools.lru_cache(MOST_STRUCTURES)(lambda structure: compile())

    def __call__(self, *args: Any) -> Any:
        return self.of(*args)(*args)

    def of(self, *args: Any) -> Any:
        """Returns the function that is compiled for arguments of this structure."""
        return self._of(jax.tree.structure(args))

    def lower(self, *args: Any) -> jax.stages.Lowered:
        """Lowers the function for arguments like these, which may be shapes."""
        return self._of(jax.tree.structure(args)).lower(*args)
