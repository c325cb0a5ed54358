"""Functions that convert trees to a form supported by Orbax and match saved leaves to the leaves of a tree.

A leaf is identified by its path, such as `params/Dense_0/kernel`.
"""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath, epy

from jaxloop.base import checks, path_patterns

with epy.lazy_imports():  # Importing Orbax takes a fifth as long as importing jaxloop.
    import orbax.checkpoint as ocp

# Stored form -----------------------------------------------------------------------------------------


def _keys_in(leaves: Iterable[Any]) -> list[int]:
    """Returns the indices of the leaves that are typed PRNG keys."""
    arrays = [(at, leaf) for at, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
    return [at for at, array in arrays if jnp.issubdtype(array.dtype, jax.dtypes.prng_key)]


def storable(tree: Any) -> Any:
    """Replaces the typed PRNG keys in a tree with their data, because Orbax can't store typed keys."""
    leaves, structure = jax.tree.flatten(tree)
    for at in _keys_in(leaves):
        leaves[at] = jax.random.key_data(leaves[at])
    return jax.tree.unflatten(structure, leaves)


def with_values(tree: Any, values: Mapping[str, Any]) -> Any:
    """Returns a copy of a tree with new values for the leaves whose paths are in `values`.

    To replace a typed PRNG key, pass the new key's data.

    Args:
      tree: The tree, which is not changed.
      values: The new leaves, keyed by path.
    """
    by_path = checks.leaves_by_path(tree)
    ours, leaves = list(by_path.values()), [values.get(path, leaf) for path, leaf in by_path.items()]
    for at in _keys_in(ours):
        if leaves[at] is not ours[at]:
            leaves[at] = jax.random.wrap_key_data(leaves[at], impl=jax.random.key_impl(ours[at]))
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def template_of(state: Any) -> Any:
    """Returns a template for restoring a state. Each array is replaced with its shape, dtype and sharding.

    Typed PRNG keys are an exception: the template contains the keys themselves.
    """
    leaves, structure = jax.tree.flatten(state)
    keys = _keys_in(leaves)
    shapes = [leaf if at in keys else checks.shape_of(leaf) for at, leaf in enumerate(leaves)]
    return jax.tree.unflatten(structure, shapes)


def fingerprint(tree: Any) -> str:
    """Returns a hash of the paths, shapes and dtypes of a tree's leaves, and of the paths of its empty containers.

    If a saved tree and a template have the same hash, Orbax can restore the tree without reading its structure first.
    """
    nodes = ocp.tree.to_flat_dict(tree, sep="/", keep_empty_nodes=True).items()
    forms = [(path, str(getattr(node, "dtype", type(node))), getattr(node, "shape", ())) for path, node in nodes]
    return hashlib.sha256(repr(sorted(forms)).encode()).hexdigest()


def check_names(tree: Any, what: str) -> None:
    """Raises an error if two leaves of a tree would have the same name in Orbax's storage format."""
    names: dict[str, str] = {}
    for keys, _ in jax.tree_util.tree_leaves_with_path(tree):
        path = checks.path_name(keys)
        name = path.replace("/", ".")
        if name in names:
            raise ValueError(
                f"{what} of a checkpoint can't have two leaves {names[name]} and {path}: one of them would be lost. "
                "Rename one."
            )
        names[name] = path


# Matching --------------------------------------------------------------------------------------------


def match(
    saved: Mapping[str, str],
    ours: Iterable[str],
    patterns: Mapping[str, str] | None = None,
    *,
    only_renamed: bool = False,
) -> dict[str, str]:
    """Matches a tree's leaves to saved leaves. Returns a dict that maps paths in the tree to paths in the checkpoint.

    First, the saved leaves are renamed according to `patterns`. Then, a leaf of the tree matches the saved leaf with
    the same name. Names don't include the suffix `/value`, which the paths of NNX variables have. Saved leaves that
    match no leaf of the tree are also in the dict, with their new names as keys.

    >>> match({"body/kernel": "params/body/kernel"}, ["encoder/kernel/value"], {"body/**": "encoder/**"})
    {'encoder/kernel/value': 'params/body/kernel'}

    Args:
      saved: A dict that maps the names of the saved leaves to their paths in the checkpoint.
      ours: The paths of the leaves of the tree to restore.
      patterns: A dict that maps patterns for saved names to new names; see `jaxloop.base.path_patterns`.
      only_renamed: Whether to leave out saved leaves whose names match no pattern.

    Raises:
      ValueError: If a pattern matches no saved leaf, or if two saved leaves would have the same name after renaming.
    """
    saved_names, our_names = _bare(saved), _bare(ours)
    new_names = {} if only_renamed else {name: name for name in saved_names}
    new_names |= path_patterns.renamed(saved_names, patterns or {})
    found = {our_names.get(new, new): saved[saved_names[name]] for name, new in new_names.items()}
    if len(found) < len(new_names):
        pairs = new_names.items()
        new = next(new for name, new in pairs if found[our_names.get(new, new)] != saved[saved_names[name]])
        raise ValueError(
            f"A leaf is renamed to {new!r}, but there is already a saved leaf with that name. Give transforms that "
            "keep them apart."
        )
    return found


def _bare(paths: Iterable[str]) -> dict[str, str]:
    """Returns a dict that maps names to paths. A name is a path without the `/value` suffix of NNX variables."""
    return {path.removesuffix("/value"): path for path in paths}


def check_fits(path: epath.Path, saved: Mapping[str, Any], wanted: Mapping[str, Any], what: str) -> None:
    """Raises an error if the saved and the wanted leaves differ. The message lists the leaves that differ.

    Args:
      path: The path of the checkpoint.
      saved: The saved leaves, or their shapes and dtypes, by path.
      wanted: The leaves to be restored, or their shapes and dtypes, by path.
      what: The kind of tree to restore, for the error message: "state", "template" or "tree".
    """
    if differences := checks.compare(dict(saved), dict(wanted)):
        lines = "\n".join(differences)
        raise ValueError(
            f"The checkpoint {path} does not fit this {what}. Leaves that differ (checkpoint -> {what}):\n{lines}\n"
            "Build the model and the optimizer as they were when it was saved, map the old names onto the new ones, or "
            "use a different directory."
        )


def load(source: Any, found: Mapping[str, str], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Reads saved leaves and returns them in a dict, keyed by their paths in the tree to restore.

    Args:
      source: The `Checkpoint` or `SafetensorsFile` to read from.
      found: The result of `match`.
      wanted: Arrays or `jax.ShapeDtypeStruct`s with the required shapes, dtypes and shardings, keyed by path in the
        tree to restore.
    """
    values = source.read({path: wanted[name] for name, path in found.items()})
    return {name: values[path] for name, path in found.items()}


def as_wide_as(saved: Any, leaf: Any) -> Any:
    """Returns the template to use for reading the saved leaf that will replace `leaf`.

    If the saved leaf has the same shape as `leaf`, and a dtype that differs only in width (64 or 32 bits), the template
    is a NumPy array with the saved dtype. Otherwise, the template is `leaf` itself.

    Args:
      saved: The description of the saved leaf, or None if there is no saved leaf.
      leaf: The leaf to replace.
    """
    if saved is None or saved.dtype == leaf.dtype or saved.shape != leaf.shape:
        return leaf
    is_same = jax.dtypes.canonicalize_dtype(saved.dtype) == jax.dtypes.canonicalize_dtype(leaf.dtype)
    return np.broadcast_to(np.zeros((), saved.dtype), saved.shape) if is_same else leaf
