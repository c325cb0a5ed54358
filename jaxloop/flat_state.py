"""A train state on its way from one compiled step to the next."""

import operator
from typing import Any, Self, final

import jax

from jaxloop import structures


@final
class FlatState:
    """The leaves of a state, and its structure.

    To take a `TrainState` apart and to put the new one together is a sixth of what jit does to start a small step.
    Nobody looks at the states between two steps of a loop; so their leaves go from call to call as they are. They keep
    their names in what is compiled, and in errors.

    >>> flat = FlatState.of({"kernel": 1.0, "bias": 2.0})
    >>> flat.leaves, flat.whole()
    ([2.0, 1.0], {'bias': 2.0, 'kernel': 1.0})

    Args:
      structure: as `structures.flatten` returns it.
      leaves: as many as it has, in its order.
    """

    __slots__ = ("leaves", "structure")

    def __init__(self, structure: Any, leaves: Any):
        self.structure: Any = structure
        self.leaves: Any = leaves

    @classmethod
    def of(cls, state: Any) -> Self:
        """Takes a state apart."""
        leaves, structure = structures.flatten(state)
        return cls(structure, leaves)

    def whole(self) -> Any:
        """Puts the state together."""
        return jax.tree.unflatten(self.structure[-1], self.leaves)


def whole(state: Any) -> Any:
    """The state, if it is a flat one put together."""
    return state.whole() if isinstance(state, FlatState) else state


class _Path(tuple[Any, ...]):
    """Where a leaf is in the whole state, as one key."""

    def __str__(self) -> str:
        return jax.tree_util.keystr(self)


def _with_paths(flat: FlatState) -> tuple[list[tuple[_Path, Any]], Any]:
    paths = (path for path, _ in jax.tree_util.tree_leaves_with_path(flat.whole()))
    return [(_Path(path), leaf) for path, leaf in zip(paths, flat.leaves, strict=True)], flat.structure


jax.tree_util.register_pytree_with_keys(FlatState, _with_paths, FlatState, operator.attrgetter("leaves", "structure"))
