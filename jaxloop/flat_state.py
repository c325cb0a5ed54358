"""A train state on its way from one compiled step to the next, and the compiled functions that donate it."""

import functools
import operator
from collections.abc import Callable
from typing import Any, Self, final

import jax

from jaxloop import structures


@final
class FlatState:
    """The leaves of a state and its structure, without `state.step`, which goes beside it and is not donated.

    To take a `TrainState` apart and to put the new one together is a sixth of what jit does to start a small step.
    Nobody looks at the states between two steps of a loop; so their leaves go from call to call as they are. They keep
    their names in what is compiled, and in errors.

    >>> flat, step = FlatState.of({"kernel": 1.0, "bias": 2.0})
    >>> flat.leaves, flat.whole(step)
    ([2.0, 1.0], {'bias': 2.0, 'kernel': 1.0})

    Args:
      structure: the position of `state.step` among the leaves, None for a state without, then what
        `structures.flatten` returns.
      leaves: as many as the state has besides, in its order.
    """

    __slots__ = ("leaves", "structure")

    def __init__(self, structure: Any, leaves: Any):
        self.structure: Any = structure
        self.leaves: Any = leaves

    @classmethod
    def of(cls, state: Any) -> tuple[Self, Any]:
        """Takes a state apart; returns it without `state.step`, and that, None for a state that has none."""
        leaves, structure = structures.flatten(state)
        place = _place_of_step(structure)
        step = None if place is None else leaves.pop(place)
        return cls((place, *structure), leaves), step

    def whole(self, step: Any) -> Any:
        """Puts the state together."""
        place, *_, treedef = self.structure
        leaves = list(self.leaves)
        if place is not None:
            leaves.insert(place, step)
        return jax.tree.unflatten(treedef, leaves)


class _Path(tuple[Any, ...]):
    """The path of a leaf in the whole state, as one key."""

    def __str__(self) -> str:
        return jax.tree_util.keystr(self)


def _with_paths(flat: FlatState) -> tuple[list[tuple[_Path, Any]], Any]:
    place, *_, treedef = flat.structure
    numbered = jax.tree.unflatten(treedef, range(treedef.num_leaves))
    paths = [_Path(path) for path, number in jax.tree_util.tree_leaves_with_path(numbered) if number != place]
    return list(zip(paths, flat.leaves, strict=True)), flat.structure


@functools.lru_cache(structures.MOST_STRUCTURES)
def _place_of_step(structure: Any) -> int | None:
    treedef = structure[-1]
    place = getattr(jax.tree.unflatten(treedef, range(treedef.num_leaves)), "step", None)
    return place if isinstance(place, int) else None


jax.tree_util.register_pytree_with_keys(FlatState, _with_paths, FlatState, operator.attrgetter("leaves", "structure"))


@final
class Donating:
    """A compiled function of `(state, batch)` that donates the state, except `state.step`.

    So a hook or an action that has kept `state.step` can read it after the update.

    >>> import jax.numpy as jnp
    >>> from jaxloop import examples
    >>> _, state, _ = examples.tiny_regression()
    >>> add = Donating(lambda state, batch: jax.tree.map(lambda leaf: leaf + batch.astype(leaf.dtype), state))
    >>> new_state = add(state, jnp.int32(1))
    >>> int(state.step), state.params["kernel"].is_deleted()
    (0, True)

    Args:
      fn: a pure function.
      **jit_kwargs: arguments of `jax.jit`.
    """

    def __init__(self, fn: Callable[[Any, Any], Any], **jit_kwargs: Any):
        def of_parts(flat: FlatState, step: Any, batch: Any) -> Any:
            return fn(flat.whole(step), batch)

        of_parts.__name__ = of_parts.__qualname__ = getattr(fn, "__name__", "fn")
        self._of_parts = jax.jit(of_parts, donate_argnums=0, **jit_kwargs)

    def __call__(self, state: Any, batch: Any) -> Any:
        return self._of_parts(*FlatState.of(state), batch)

    def lower(self, state: Any, batch: Any) -> jax.stages.Lowered:
        """Lowers the function for arguments like these, which may be shapes."""
        return self._of_parts.lower(*FlatState.of(state), batch)


def compile_donating(fn: Callable[[Any, Any], Any], **jit_kwargs: Any) -> Any:
    """Compiles `fn(state, batch)`, which donates the state except `state.step`, unless `jit_kwargs` say otherwise.

    Args:
      fn: a pure function.
      **jit_kwargs: arguments of `jax.jit`. Those that refer to arguments of the function by number, name or position
        (`in_shardings`, `donate_argnums`, `static_argnums`, ...) mean `(state, batch)`; then `state.step` is donated
        like the rest, where the state is.
    """
    if any(name == "in_shardings" or "argn" in name for name in jit_kwargs):
        return jax.jit(fn, **{"donate_argnums": 0, **jit_kwargs})
    return Donating(fn, **jit_kwargs)
