"""Compares the structures of pytrees, including the classes of their nodes.

JAX considers two structures equal if they differ only in the class of a dataclass with the same fields. Some versions
of JAX use this equality to look up functions compiled by `jax.jit`, so they may call a function that was compiled for a
different class. The two structures have different hashes, so this module also compares the hashes.
"""

import functools
from collections.abc import Callable
from typing import Any, final

import jax

MAX_STRUCTURES = 1024
"""The maximum number of structures in a cache."""


def are_alike(one: Any, other: Any) -> bool:
    """Returns whether two pytrees have the same structure, including the classes of their nodes.

    >>> import collections
    >>> are_alike({"x": 1}, {"x": 2}), are_alike({"x": 1}, collections.OrderedDict(x=1))
    (True, False)
    """
    return _with_hash(jax.tree.structure(one)) == _with_hash(jax.tree.structure(other))


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Returns a pytree's leaves and a key for its structure. Alike pytrees have equal keys; see `are_alike`.

    The last item of the key is the `PyTreeDef`.
    """
    leaves, structure = jax.tree.flatten(tree)
    return leaves, _with_hash(structure)


def _with_hash(structure: Any) -> tuple[int, Any]:
    return hash(structure), structure


@final
class PerStructure:
    """A function that is compiled separately for each structure of its arguments.

    Args:
      compile: A function that creates and jits the function for one structure. Each call must return a new function.

    >>> double = PerStructure(lambda: jax.jit(lambda x: jax.tree.map(lambda leaf: leaf + leaf, x)))
    >>> double({"x": 1.0}), double([1.0])
    ({'x': Array(2., dtype=float32, weak_type=True)}, [Array(2., dtype=float32, weak_type=True)])
    """

    def __init__(self, compile: Callable[[], Any]):
        # A dictionary compares the full hashes before it checks equality.
        self._of = functools.lru_cache(MAX_STRUCTURES)(lambda structure: compile())

    def __call__(self, *args: Any) -> Any:
        return self.of(*args)(*args)

    def of(self, *args: Any) -> Any:
        """Returns the function to call with arguments of this structure."""
        return self._of(jax.tree.structure(args))

    def trace(self, *args: Any) -> jax.stages.Traced:
        """Traces the function for these arguments, which may be `jax.ShapeDtypeStruct`s."""
        return self._of(jax.tree.structure(args)).trace(*args)
