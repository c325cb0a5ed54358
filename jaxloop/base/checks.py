"""Checks of states, batches and step results.

The error messages explain what was expected, what was found and what to do.
"""

import contextlib
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core

from jaxloop import types
from jaxloop.base import structures
from jaxloop.base.text import printable

_ARRAYS = jax.Array | jax.ShapeDtypeStruct

path_name: Callable[[Any], str] = functools.partial(jax.tree_util.keystr, simple=True, separator="/")
"""Returns a leaf's path with slashes between the names, such as `params/Dense_0/kernel`."""


def batch_leaf_name(path: Any) -> str:
    """Returns the path of a batch leaf as a Python expression, such as `batch['image']`."""
    # If there is a mask, the batch is in the field `batch`.
    return f"batch{jax.tree_util.keystr(path).removeprefix('.batch')}"


def batch_leaves(batch: Any) -> dict[str, Any]:
    """Returns a dict of a batch's leaves, keyed by name, such as `{"batch['image']": array}`."""
    return {batch_leaf_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(batch)}


def is_tracer_class(kind: type) -> bool:
    """Returns True if a class is a subclass of JAX's `Tracer`. JAX has no public API for this check."""
    return issubclass(kind, core.Tracer)


def shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    """Returns a `jax.ShapeDtypeStruct` with the shape, dtype and sharding of an array."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    is_weak = bool(getattr(leaf, "weak_type", False))
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding, weak_type=is_weak)


def describe(leaf: Any) -> str:
    """Describes an array by its dtype and shape (`float32[32, 10]`) and any other leaf by its class name."""
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        dtype = leaf.dtype if isinstance(leaf.dtype, np.dtype) else getattr(leaf.dtype, "name", leaf.dtype)
        return f"{dtype}{list(leaf.shape)}"
    return type(leaf).__name__


def listed(names: Iterable[str], *, show: int = 12) -> str:
    """Joins the first `show` names with commas and adds the number of remaining names, if any.

    >>> listed(["bias", "kernel", "scale"], show=2)
    'bias, kernel and 1 more'
    """
    names = list(map(printable, names))
    return ", ".join(names[:show]) + (f" and {len(names) - show} more" if len(names) > show else "")


def first_lines(lines: Sequence[str]) -> list[str]:
    """Returns the first twelve of the given lines and, if there are more, a line with the number of omitted lines."""
    return list(lines) if len(lines) <= 12 else [*lines[:12], f"  ... and {len(lines) - 12} more"]


def is_user_defined(thing: Any, name: str) -> bool:
    """Returns True if the method `name` of an object was defined outside jaxloop or set on the object itself."""
    module = getattr(getattr(type(thing), name), "__module__", "")
    return name in vars(thing) or not module.startswith("jaxloop.")


def is_overridden(thing: Any, name: str, base: type) -> bool:
    """Returns True if an object overrides the method `name` of the class `base`.

    The override may be in the object's class or on the object itself.
    """
    return name in vars(thing) or getattr(type(thing), name) is not getattr(base, name)


def check_positive(name: str, value: Any, *, optional: bool = False, instead: str = "") -> None:
    """Raises an error unless `value` is a positive int. None is also allowed if `optional` is True.

    If `instead` is given, the error message suggests it as an alternative.
    """
    if optional and value is None:
        return
    allowed = "a positive int or None" if optional else "a positive int"
    allowed += f", or {instead}" if instead else ""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name} must be {allowed}, got {value!r}.")
    if value <= 0:
        raise ValueError(f"{name} must be {allowed}, got {value}.")


def only_one(who: str, **names: Any) -> Any:
    """Returns the value of an argument that has two names.

    Args:
      who: The name of the function or class, for the error message.
      **names: The two names of the argument, each with the value that the caller passed under it, or None.

    Raises:
      TypeError: If the caller used neither or both of the names, or if the value is a number or a schedule, which was
        probably meant for a different argument.
    """
    given, (name, other) = {each: value for each, value in names.items() if value is not None}, names
    value = next(iter(given.values()), None)
    is_other_argument = isinstance(value, int | float) or hasattr(type(value), "fires")  # A number or a schedule.
    if len(given) != 1 or is_other_argument:
        raise TypeError(f"{who} takes {name}= first (also called {other}=), got {given or None}.")
    return value


# Donated states ------------------------------------------------------------------------------------


def deleted_leaves(state: Any) -> list[str]:
    """Returns the paths of a state's leaves that have been donated."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return [path_name(path) for path, leaf in leaves if isinstance(leaf, jax.Array) and leaf.is_deleted()]


def mark_donated(state: Any, by: Any) -> None:
    """Records that a state was donated to the object `by` (a loop, for example).

    If the state is used again, the error message names `by`. The record is stored on one of the donated arrays, so it
    survives `state.replace(...)`.
    """
    leaf = donated_leaf(state)
    if leaf is not None and not hasattr(leaf, "_jaxloop_donated_to"):
        leaf._jaxloop_donated_to = by  # pyright: ignore[reportAttributeAccessIssue]


def donated_leaf(state: Any) -> jax.Array | None:
    """Returns the first array of the state other than `state.step`, or None if there is none.

    `mark_donated` stores its record on this array. It doesn't use `state.step`, which is usually not donated.
    """
    step = getattr(state, "step", None)
    leaves = [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array) and leaf is not step]
    return leaves[0] if leaves else None


def check_multiple(name: str, value: int | None, step: Any) -> None:
    """Raises an error unless `value`, a number of updates, is a multiple of the step's `updates_per_step`."""
    updates = step.updates_per_step
    if value is not None and value % updates:
        raise ValueError(
            f"{name}={value} is not a multiple of {updates}, the number of updates that {step!r} makes per batch "
            f"({type(step).__name__}.updates_per_step)."
        )


def counting_hint(step: Any) -> str:
    """Returns a hint on how a training step should update `state.step`, for use in error messages."""
    return (
        f"Each run must add {step.updates_per_step} to it, the value of {type(step).__name__}.updates_per_step: return "
        "state.apply_gradients(grads=...) or state.replace(step=...), or correct updates_per_step."
    )


def whole_number(value: Any) -> int | None:
    """Returns a scalar as an int if it is a non-negative whole number, and None otherwise.

    >>> whole_number(np.float32(8.0)), whole_number(8), whole_number(1.5), whole_number("8")
    (8, 8, None, None)
    """
    if type(value) is int:
        return value if value >= 0 else None
    if not isinstance(value, float | np.number | np.ndarray | jax.Array) or np.ndim(value):
        return None
    return int(value) if float(value).is_integer() and value >= 0 else None


def check_alive(state: Any, caller: str) -> None:
    """Raises an error if the state has been donated.

    Without this check, using a donated state on multiple CPU devices would crash the process.
    """
    deleted = deleted_leaves(state)
    if not deleted:
        return
    taken_by = getattr(donated_leaf(state), "_jaxloop_donated_to", "an earlier call")
    raise ValueError(
        f"{caller} got a state that was already donated to {taken_by}: its buffers ({listed(deleted, show=3)}) were "
        "reused for the new state.\nUse the state returned by that call. To keep a copy, make it before the call: "
        "kept = jax.tree.map(jnp.copy, state)."
    )


def adopt(state: Any) -> Any:
    """Converts a state's Python and NumPy leaves, such as Flax's `step`, to JAX arrays.

    An array that appears more than once is copied, because a step can donate each array only once.
    `jax.ShapeDtypeStruct`s are left unchanged.

    Raises:
      TypeError: If `state.step` is not an integer, or if a leaf can't be converted to an array.
      ValueError: If JAX would truncate a 64-bit integer because it doesn't fit into 32 bits.
    """
    check_counter(getattr(state, "step", None))
    leaves, structure = jax.tree_util.tree_flatten_with_path(state)
    buffers, owned = set[Any](), []
    for path, leaf in leaves:
        if isinstance(leaf, jax.Array):
            buffer = _buffer(leaf)
            leaf = jnp.copy(leaf) if buffer in buffers else leaf
            buffers.add(buffer)
        elif not isinstance(leaf, jax.ShapeDtypeStruct):
            leaf = _on_device(path, leaf)
        owned.append(leaf)
    return jax.tree.unflatten(structure, owned)


def _buffer(leaf: jax.Array) -> Any:
    """Returns a key for an array's buffer. Arrays that share a buffer have equal keys.

    For example, `jax.device_put` may return an array that shares its argument's buffer.
    """
    if leaf.size:
        # Deleted arrays, tracers and arrays on several devices have no buffer of their own.
        with contextlib.suppress(AttributeError, RuntimeError, ValueError, TypeError):
            return leaf.unsafe_buffer_pointer(), *leaf.devices()
    return id(leaf)


def as_arrays(tree: Any) -> Any:
    """Converts a tree's Python numbers to NumPy arrays. Unlike `adopt`, keeps NumPy arrays and 64-bit precision.

    Raises a `TypeError` if a leaf can't be converted to an array.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    arrays = [leaf if isinstance(leaf, _ARRAYS) else _as_array(path, leaf) for path, leaf in leaves]
    return jax.tree.unflatten(structure, arrays)


def _as_array(path: Any, leaf: Any) -> np.ndarray:
    array = np.asarray(leaf)
    if array.dtype.kind in "OSUMm":
        raise TypeError(f"{_state_leaf_name(path)} is {_problem_of_leaf(leaf, 'Keep it out of the state.')}")
    return array


def _on_device(path: Any, leaf: Any) -> jax.Array:
    array = _as_array(path, leaf)
    _check_range(array, _wide_integers({_state_leaf_name(path): array}))
    # The dtype is explicit, because a weak type would make the step recompile.
    return jnp.asarray(array, jax.dtypes.canonicalize_dtype(array.dtype))


def _state_leaf_name(path: Any) -> str:
    return f"state/{path_name(path)}" if path else "The state"


def check_counter(step: Any, *, is_scalar: bool = True) -> None:
    """Raises a `TypeError` if `state.step` exists and is not an integer scalar.

    Args:
      step: The value of `state.step`, or its shape and dtype. None if the state doesn't have a `step`.
      is_scalar: Whether `state.step` is a scalar.
    """
    is_integer = jnp.issubdtype(getattr(step, "dtype", type(step)), jnp.integer)
    if step is not None and not (is_integer and is_scalar):
        raise TypeError(
            "state.step must be an integer scalar, the number of completed updates, got "
            f"{describe(step)}. For none, write state.replace(step=jnp.int32(0))."
        )


# Batches ---------------------------------------------------------------------------------------------


def check_batch(batch: Any) -> None:
    """Raises a `TypeError` if JAX can't handle one of the batch's leaves. The message names the leaf."""
    for problem in problems_of_batch(batch):
        raise TypeError(problem) from None


def problems_of_batch(batch: Any) -> Iterator[str]:
    """Yields a message for each batch leaf that JAX can't handle."""
    for name, leaf in batch_leaves(batch).items():
        if problem := _problem_of_leaf(leaf, "Drop it, or make it numbers, in Step.preprocess_batch or Step.begin."):
            yield f"{name} is {problem}"


def batch_in_words(batch: Any) -> str:
    """Describes up to eight leaves of a batch for an error message, as in `batch['x'] float32[8, 3], ...`.

    Values that are None are also shown, although JAX doesn't treat them as leaves.
    """
    leaves = jax.tree_util.tree_leaves_with_path(batch, is_leaf=lambda node: node is None)
    shown = [f"{batch_leaf_name(path)} {'None' if leaf is None else describe(leaf)}" for path, leaf in leaves]
    return listed(shown, show=8) or f"nothing ({type(batch).__name__})"


def _problem_of_leaf(leaf: Any, remedy: str) -> str | None:
    package = type(leaf).__module__.partition(".")[0]
    if package in ("tensorflow", "torch"):
        return (
            f"a tensor of {package}, {describe(leaf)}. Convert it with jax.tree.map(np.asarray, batch) in Step.begin."
        )
    dtype = getattr(leaf, "dtype", None)
    is_number = isinstance(leaf, int | float | complex)
    if isinstance(dtype, np.dtype):  # A PRNG key, for example, has another kind of dtype.
        is_number = dtype.kind in "biufcV" and dtype.isnative and not dtype.hasobject
    elif dtype is not None:
        return None
    return None if is_number else f"{describe(leaf)}, which JAX can't turn into an array. {remedy}"


def problem_of_dtypes(batch: Any) -> str | None:
    """Returns a warning that names the float64 arrays of a batch, which JAX would convert to float32.

    Returns None if the batch has no such arrays, or if 64-bit types are enabled in JAX.

    Raises:
      ValueError: If JAX would truncate a 64-bit integer because it doesn't fit into 32 bits.
    """
    leaves = batch_leaves(batch)
    _check_range(batch, _wide_integers(leaves))
    if names := [name for name, leaf in leaves.items() if _is_cut(leaf, "f")]:
        return (
            f"{', '.join(names)} is float64, which JAX converts to float32 at each step. Convert it when you make the "
            "data: .astype(np.float32)."
        )
    return None


def _is_cut(leaf: Any, kinds: str) -> bool:
    """Returns True if a leaf is a 64-bit NumPy array or scalar that JAX would convert to 32 bits.

    `kinds` contains the NumPy dtype kinds to consider, such as "iu" for signed and unsigned integers.
    """
    is_wide = isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind in kinds and leaf.dtype.itemsize == 8
    return is_wide and jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype


def _wide_integers(leaves: dict[str, Any]) -> list[tuple[int, str, Any]]:
    """Returns the index, name and 32-bit limits of each 64-bit integer leaf that JAX would convert to 32 bits."""
    narrow = lambda leaf: np.iinfo(jax.dtypes.canonicalize_dtype(leaf.dtype))
    return [(place, name, narrow(leaf)) for place, (name, leaf) in enumerate(leaves.items()) if _is_cut(leaf, "iu")]


def _check_range(tree: Any, wide: Sequence[tuple[int, str, Any]]) -> None:
    """Raises an error if an integer in the leaves listed in `wide` (see `_wide_integers`) doesn't fit into 32 bits."""
    leaves = jax.tree.leaves(tree)
    for place, name, limits in wide:
        leaf = leaves[place]
        if leaf.size and not limits.min <= np.minimum.reduce(leaf, None) <= np.maximum.reduce(leaf, None) <= limits.max:
            raise ValueError(
                f"{name} is {describe(leaf)} with values from {leaf.min()} to {leaf.max()}, which JAX would silently "
                f"truncate to {limits.dtype}. Map them to smaller numbers, split them in two, or call "
                "jax.config.update('jax_enable_x64', True) when the program starts."
            )


def empty_dataset(dataset: Any) -> ValueError:
    """Returns the error to raise if the training dataset is empty."""
    return ValueError(
        f"The training dataset ({describe(dataset)}) yielded no batches. Is it an exhausted iterator, or does its "
        "pipeline filter out everything?"
    )


_form = operator.attrgetter("shape", "dtype", "__class__")


class BatchWatch:
    """Checks a step's batches for integers that JAX would truncate, and counts the rows of each batch.

    Hooks:
      look: Checks the next batches.

    Attributes:
      num_rows: The number of rows in the last batch. None if there has been no batch yet, if the leading axes of the
        batch's leaves differ in length, or if all leaves are scalars.
      form: A list that identifies the structure, shapes and dtypes of the last batch, or None before the first batch.
      may_differ: True if the processes of a job have had batches that differ in more than their numbers of rows. The
        processes then compare their batches before each step.
    """

    def __init__(self):
        self.num_rows: int | None = None
        self.may_differ: bool = False
        self.form: list[Any] | None = None
        self._wide: list[tuple[int, str, Any]] = []  # The 64-bit integers; see `_wide_integers`.

    def look(self, batches: Sequence[Any]) -> int | None:
        """Checks the next batches and returns the number of rows in each of them.

        Args:
          batches: A sequence of one or more batches, all with the same shapes and dtypes.

        Returns:
          The number of rows in each batch. None if the leading axes of a batch's leaves differ in length, or if all
          leaves are scalars.

        Raises:
          ValueError: If JAX would truncate a 64-bit integer because it doesn't fit into 32 bits.
        """
        batch = batches[0]
        try:
            form = [*batch, *map(_form, batch.values())]
        except (AttributeError, TypeError):  # Not a dict of arrays.
            leaves, structure = structures.flatten(batch)
            form = [structure, *((getattr(leaf, "shape", None), getattr(leaf, "dtype", None)) for leaf in leaves)]
        if form != self.form:
            self._wide = _wide_integers(batch_leaves(batch))
            self.form, self.num_rows = form, num_examples(batch)
        for each in batches if self._wide else ():
            _check_range(each, self._wide)
        return self.num_rows


def num_examples(batch: Any) -> int | None:
    """Returns the number of rows in a batch. Returns 1 if the batch is None.

    Returns None if the batch's arrays differ in their numbers of rows, or if all of them are scalars.

    >>> num_examples({"image": np.zeros([32, 28, 28, 1]), "label": np.zeros([32])})
    32
    """
    if batch is None:
        return 1
    found = None
    for leaf in batch.values() if type(batch) is dict else jax.tree.leaves(batch):
        shape = getattr(leaf, "shape", None)
        if shape is None:
            if isinstance(leaf, (int, float)):
                continue
            # For example, a nested dict.
            return num_examples(jax.tree.leaves(batch)) if type(batch) is dict else None
        if len(shape):
            if found is None:
                found = shape[0]
            elif found != shape[0]:
                return None
    return None if found is None else int(found)


def check_only_process(who: str) -> None:
    """Raises an error in a multi-process job. Called by functions that support only a single process."""
    if jax.distributed.is_initialized() and jax.process_count() > 1:
        raise NotImplementedError(
            f"{who} supports one process only, but this job has {jax.process_count()}. Use an OuterLoop, a TrainLoop "
            "or fit."
        )


# Step results ----------------------------------------------------------------------------------------


def check_pair(result: Any, hook: str, names: str) -> tuple[Any, Any]:
    """Checks that a hook's result is a pair, and returns the result.

    `names` describes the pair in the error message, as in "(state, outputs)".
    """
    if not isinstance(result, tuple) or len(result) != 2 or hasattr(result, "_fields"):
        raise TypeError(f"{hook} must return {names}, a pair, got {_describe_result(result)}.")
    return result


def check_result(result: Any, hook: str) -> tuple[Any, types.Output]:
    """Checks that a hook's result is a pair of a state and outputs, and returns the result.

    The outputs must be None or a dict with string keys.
    """
    state, outputs = check_pair(result, hook, "(state, outputs)")
    if not isinstance(outputs, dict | None):
        raise TypeError(
            f"{hook} must return its outputs as a dict with string keys or None, got {_describe_result(outputs)}. "
            "Write {'loss': loss}."
        )
    for name in outputs or ():
        if not isinstance(name, str):
            raise TypeError(f"{hook} returned an output under the key {name!r}; the keys of outputs must be strings.")
    return state, outputs


def _describe_result(result: Any) -> str:
    if isinstance(result, tuple) and not hasattr(result, "_fields"):
        return f"a tuple of {len(result)}: ({', '.join(describe(item) for item in result)})"
    return describe(result)


def check_same_state(before: Any, after: Any, hook: str) -> None:
    """Raises an error if two states differ in structure, shapes or dtypes. The message lists the differing leaves."""
    differences = compare(leaves_by_path(before), leaves_by_path(after))
    if not differences and not structures.are_alike(before, after):
        differences = [
            f"  {type(before).__name__} was given, {type(after).__name__} was returned, or a static field differs"
        ]
    if differences:
        raise TypeError(
            f"{hook} must return a state with the structure, shapes and dtypes that it was given, or each step would "
            "compile again. These leaves differ (given -> returned):\n"
            + "\n".join(differences)
            + "\nUpdate the state with state.apply_gradients(grads=...) or state.replace(...), and cast back with "
            ".astype if a dtype changed."
        )


def leaves_by_path(tree: Any) -> dict[str, Any]:
    """Returns a dict of a pytree's leaves, keyed by path, such as `{"params/Dense_0/kernel": array}`."""
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def compare(expected: dict[str, Any], got: dict[str, Any]) -> list[str]:
    """Returns a line for each leaf whose dtype or shape differs between two dicts, or that only one dict contains.

    If there are more than twelve lines, the rest are omitted; see `first_lines`.
    """
    expected, got = ({path: describe(leaf) for path, leaf in leaves.items()} for leaves in (expected, got))
    return change_lines(changes(expected, got))


def changes(expected: dict[str, str], got: dict[str, str]) -> list[tuple[str, str, str]]:
    """Returns a tuple `(path, expected, got)` for each path at which two dicts of leaf descriptions differ.

    If one of the dicts lacks a path, the description on that side is "(none)".
    """
    paths = [*expected, *(path for path in got if path not in expected)]
    pairs = ((path, expected.get(path, "(none)"), got.get(path, "(none)")) for path in paths)
    return [change for change in pairs if change[1] != change[2]]


def change_lines(changes: list[tuple[str, str, str]]) -> list[str]:
    """Returns a line for each tuple in `changes`, as returned by the function `changes`.

    If there are more than twelve lines, the rest are omitted; see `first_lines`.
    """
    return first_lines([f"  {path}: {one} -> {two}" for path, one, two in changes])
