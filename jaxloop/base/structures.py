"""Functions and classes that compare the structures of pytrees and flatten train states.

JAX considers two structures equal even if their nodes belong to different dataclasses with the same fields. Some
versions of JAX use this equality to look up functions compiled by `jax.jit`, so these versions may call a function that
was compiled for a different class. Because the hashes of such structures differ, this module also compares hashes.
"""

import functools
from collections.abc import Callable
from typing import Any, final

import jax

MAX_STRUCTURES = 1024
"""The maximum number of structures in a cache."""


def are_alike(one: Any, other: Any) -> bool:
    """Returns True if two pytrees have the same structure, including the classes of their nodes.

    >>> import collections
    >>> are_alike({"x": 1}, {"x": 2}), are_alike({"x": 1}, collections.OrderedDict(x=1))
    (True, False)
    """
    return flatten(one)[1] == flatten(other)[1]


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Returns a pytree's leaves and a key for its structure. Pytrees that are alike (see `are_alike`) have equal keys.

    The last item of the key is the `PyTreeDef`.
    """
    leaves, structure = jax.tree.flatten(tree)
    return leaves, (hash(structure), structure)


@final
class PerStructure:
    """A function that is compiled separately for each structure of its arguments.

    Args:
      compile: A function that returns a new jitted function. `compile` is called once for each structure.

    >>> double = PerStructure(lambda: jax.jit(lambda x: jax.tree.map(lambda leaf: leaf + leaf, x)))
    >>> double({"x": 1.0}), double([1.0])
    ({'x': Array(2., dtype=float32, weak_type=True)}, [Array(2., dtype=float32, weak_type=True)])
    """

    def __init__(self, compile: Callable[[], Any]):
        # A dictionary compares the full hashes before it checks equality.
        self._of = functools.lru_cache(MAX_STRUCTURES)(lambda structure: compile())

    def __call__(self, *args: Any) -> Any:
        return self._of(jax.tree.structure(args))(*args)


def take_apart(state: Any) -> tuple[list[Any], Any, Any]:
    """Returns three values: a state's leaves without `state.step`, `state.step` itself, and a key for the structure.

    To save time, a loop passes the leaves directly from one dispatch to the next, without rebuilding the state.
    `state.step` is returned separately because it is not donated. If the state has no `step`, the second value is None.

    >>> leaves, step, structure = take_apart({"kernel": 1.0, "bias": 2.0})
    >>> leaves, put_together(leaves, step, structure)
    ([2.0, 1.0], {'bias': 2.0, 'kernel': 1.0})
    """
    leaves, structure = flatten(state)
    index = _step_index(structure)
    return leaves, None if index is None else leaves.pop(index), structure


def put_together(leaves: Any, step: Any, structure: Any) -> Any:
    """Returns a state with the given leaves, step and structure. This is the inverse of `take_apart`."""
    index = _step_index(structure)
    return jax.tree.unflatten(structure[-1], leaves if index is None else [*leaves[:index], step, *leaves[index:]])


@functools.lru_cache(MAX_STRUCTURES)
def _step_index(structure: Any) -> int | None:
    treedef = structure[-1]
    index = getattr(jax.tree.unflatten(treedef, range(treedef.num_leaves)), "step", None)
    return index if isinstance(index, int) else None


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
      fn: A pure function of `(state, batch)`.
      **jit_kwargs: Keyword arguments for `jax.jit`.
    """

    def __init__(self, fn: Callable[[Any, Any], Any], **jit_kwargs: Any):
        def of_parts(leaves: list[Any], step: Any, batch: Any, structure: Any) -> Any:
            return fn(put_together(leaves, step, structure), batch)

        of_parts.__name__ = of_parts.__qualname__ = getattr(fn, "__name__", "fn")
        self._compiled = jax.jit(of_parts, donate_argnums=0, static_argnums=3, **jit_kwargs)

    def __call__(self, state: Any, batch: Any) -> Any:
        leaves, step, structure = take_apart(state)
        return self._compiled(leaves, step, batch, structure)

    def trace(self, state: Any, batch: Any) -> jax.stages.Traced:
        """Traces the function for a state and a batch, which may consist of `jax.ShapeDtypeStruct`s."""
        leaves, step, structure = take_apart(state)
        return self._compiled.trace(leaves, step, batch, structure)


def compile_donating(fn: Callable[[Any, Any], Any], **jit_kwargs: Any) -> Any:
    """Compiles `fn(state, batch)`. By default, every leaf of the state except `state.step` is donated.

    Args:
      fn: A pure function.
      **jit_kwargs: Keyword arguments for `jax.jit`. Those that refer to the function's arguments (`in_shardings`,
        `donate_argnums`, `static_argnums`, ...) apply to the signature `(state, batch)`. If any of them is given,
        the whole state is donated, including `state.step`, unless `donate_argnums` excludes the state.
    """
    if any(name == "in_shardings" or "argn" in name for name in jit_kwargs):
        return jax.jit(fn, **{"donate_argnums": 0, **jit_kwargs})
    return Donating(fn, **jit_kwargs)
