"""A train state on its way from one compiled step to the next, and the compiled functions that donate it."""

import functools
import operator
from collections.abc import Callable
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
      structure: the position of `state.step` among the leaves, None for a state without, then what
        `structures.flatten` returns.
      leaves: as many as the state has, in its order; None in the place of `state.step` where that is apart.
    """

    __slots__ = ("leaves", "structure")

    def __init__(self, structure: Any, leaves: Any):
        self.structure: Any = structure
        self.leaves: Any = leaves

    @classmethod
    def of(cls, state: Any) -> Self:
        """Takes a state apart."""
        leaves, structure = structures.flatten(state)
        return cls((_place_of_step(structure), *structure), leaves)

    def split(self) -> tuple[Self, Any]:
        """Returns the state without `state.step`, and that; None for a state that has none."""
        place = self.structure[0]
        if place is None:
            return self, None
        leaves = list(self.leaves)
        step, leaves[place] = leaves[place], None
        return type(self)(self.structure, leaves), step

    def join(self, step: Any) -> Self:
        """Returns the state that was split."""
        place = self.structure[0]
        if place is None:
            return self
        leaves = list(self.leaves)
        leaves[place] = step
        return type(self)(self.structure, leaves)

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
    numbered = jax.tree.unflatten(flat.structure[-1], range(len(flat.leaves)))
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(numbered)]
    return [(_Path(path), leaf) for path, leaf in zip(paths, flat.leaves, strict=True)], flat.structure


@functools.lru_cache(structures.MOST_STRUCTURES)
def _place_of_step(structure: Any) -> int | None:
    treedef = structure[-1]
    place = getattr(jax.tree.unflatten(treedef, range(treedef.num_leaves)), "step", None)
    return place if isinstance(place, int) else None


jax.tree_util.register_pytree_with_keys(FlatState, _with_paths, FlatState, operator.attrgetter("leaves", "structure"))


@final
class Donating:
    """A compiled function of `(state, batch)` that donates the state, which may be flat, except `state.step`.

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
        def compile(state_of: Callable[[FlatState], Any]) -> Any:
            def of_parts(state: FlatState, step: Any, batch: Any) -> Any:
                return fn(state_of(state.join(step)), batch)

            of_parts.__name__ = of_parts.__qualname__ = getattr(fn, "__name__", "fn")
            return jax.jit(of_parts, donate_argnums=0, **jit_kwargs)

        self._of_flat, self._of_whole = compile(lambda state: state), compile(FlatState.whole)

    def __call__(self, state: Any, batch: Any) -> Any:
        if isinstance(state, FlatState):
            return self._of_flat(*state.split(), batch)
        return self._of_whole(*FlatState.of(state).split(), batch)

    def lower(self, state: Any, batch: Any) -> jax.stages.Lowered:
        """Lowers the function for arguments like these, which may be shapes."""
        if isinstance(state, FlatState):
            return self._of_flat.lower(*state.split(), batch)
        return self._of_whole.lower(*FlatState.of(state).split(), batch)


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
