"""The structures of pytrees, and train states in flattened form.

JAX considers two structures equal if they differ only in the class of a dataclass with the same fields. Some versions
of JAX use this equality to look up functions compiled by `jax.jit`, so they may call a function that was compiled for a
different class. The two structures have different hashes, so this module also compares the hashes.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any, Self, final

import jax

MAX_STRUCTURES = 1024
"""The maximum number of structures in a cache."""


def are_alike(one: Any, other: Any) -> bool:
    """Returns True if two pytrees have the same structure, including the classes of their nodes.

    >>> import collections
    >>> are_alike({"x": 1}, {"x": 2}), are_alike({"x": 1}, collections.OrderedDict(x=1))
    (True, False)
    """
    return _with_hash(jax.tree.structure(one)) == _with_hash(jax.tree.structure(other))


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Returns a pytree's leaves and a key for its structure. Pytrees that are alike (see `are_alike`) have equal keys.

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
        """Returns the function that is compiled for the structure of these arguments."""
        return self._of(jax.tree.structure(args))


@final
class FlatState:
    """A state as a list of leaves and a structure, without `state.step`, which is passed separately and is not donated.

    Flattening a `TrainState` and assembling the new one takes a sixth of the time of dispatching a small step with
    `jit`. Because nothing reads the state between two steps of a loop, its leaves are passed directly from one call to
    the next. The leaves keep their names in the compiled function and in error messages.

    >>> flat, step = FlatState.of({"kernel": 1.0, "bias": 2.0})
    >>> flat.leaves, flat.whole(step)
    ([2.0, 1.0], {'bias': 2.0, 'kernel': 1.0})

    Args:
      structure: A tuple: the index of `state.step` among the leaves (None if the state has no `step`), followed by the
        items of the key returned by `flatten`.
      leaves: The leaves of the state, in order, without `state.step`.
    """

    __slots__ = ("leaves", "structure")

    def __init__(self, structure: Any, leaves: Any):
        self.structure: Any = structure
        self.leaves: Any = leaves

    @classmethod
    def of(cls, state: Any) -> tuple[Self, Any]:
        """Returns a pair of the flattened state without `step` and `state.step` (None if the state has no `step`)."""
        leaves, structure = flatten(state)
        index = _step_index(structure)
        step = None if index is None else leaves.pop(index)
        return cls((index, *structure), leaves), step

    def whole(self, step: Any) -> Any:
        """Returns the whole state, including the given `step`."""
        index, *_, treedef = self.structure
        leaves = list(self.leaves)
        if index is not None:
            leaves.insert(index, step)
        return jax.tree.unflatten(treedef, leaves)


class _Path(tuple[Any, ...]):
    """The path of a leaf in the whole state, as a single key."""

    def __str__(self) -> str:
        return jax.tree_util.keystr(self)


def _with_paths(flat: FlatState) -> tuple[list[tuple[_Path, Any]], Any]:
    index, *_, treedef = flat.structure
    numbered = jax.tree.unflatten(treedef, range(treedef.num_leaves))
    paths = [_Path(path) for path, number in jax.tree_util.tree_leaves_with_path(numbered) if number != index]
    return list(zip(paths, flat.leaves, strict=True)), flat.structure


@functools.lru_cache(MAX_STRUCTURES)
def _step_index(structure: Any) -> int | None:
    treedef = structure[-1]
    index = getattr(jax.tree.unflatten(treedef, range(treedef.num_leaves)), "step", None)
    return index if isinstance(index, int) else None


jax.tree_util.register_pytree_with_keys(FlatState, _with_paths, FlatState, operator.attrgetter("leaves", "structure"))


@final
class Donating:
    """A compiled function of `(state, batch)` that donates every leaf of the state except `state.step`.

    A hook or an action that keeps a reference to `state.step` can therefore still read it after the update.

    >>> import jax.numpy as jnp
    >>> from jaxloop import examples
    >>> _, state, _ = examples.tiny_regression()
    >>> add = Donating(lambda state, batch: jax.tree.map(lambda leaf: leaf + batch.astype(leaf.dtype), state))
    >>> new_state = add(state, jnp.int32(1))
    >>> int(state.step), state.params["kernel"].is_deleted()
    (0, True)

    Args:
      fn: A pure function.
      **jit_kwargs: Arguments of `jax.jit`.
    """

    def __init__(self, fn: Callable[[Any, Any], Any], **jit_kwargs: Any):
        def of_parts(flat: FlatState, step: Any, batch: Any) -> Any:
            return fn(flat.whole(step), batch)

        of_parts.__name__ = of_parts.__qualname__ = getattr(fn, "__name__", "fn")
        self._of_parts = jax.jit(of_parts, donate_argnums=0, **jit_kwargs)

    def __call__(self, state: Any, batch: Any) -> Any:
        return self._of_parts(*FlatState.of(state), batch)

    def trace(self, state: Any, batch: Any) -> jax.stages.Traced:
        """Traces the function for these arguments, which may be `jax.ShapeDtypeStruct`s."""
        return self._of_parts.trace(*FlatState.of(state), batch)


def compile_donating(fn: Callable[[Any, Any], Any], **jit_kwargs: Any) -> Any:
    """Compiles `fn(state, batch)`. By default, every leaf of the state except `state.step` is donated.

    Args:
      fn: A pure function.
      **jit_kwargs: Arguments of `jax.jit`. Those that refer to the function's arguments (`in_shardings`,
        `donate_argnums`, `static_argnums`, ...) apply to the signature `(state, batch)`. If any of them is given,
        `state.step` is donated together with the rest of the state.
    """
    if any(name == "in_shardings" or "argn" in name for name in jit_kwargs):
        return jax.jit(fn, **{"donate_argnums": 0, **jit_kwargs})
    return Donating(fn, **jit_kwargs)
