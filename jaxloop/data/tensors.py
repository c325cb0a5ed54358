"""Functions that convert TensorFlow and PyTorch tensors to NumPy arrays without importing either library."""

from typing import Any

import jax
import numpy as np

from jaxloop import types

_NUMPY_ALONE = {np.ndarray}


def library(value: Any) -> str | None:
    """Returns "tensorflow" for a value from TensorFlow, "torch" for a value from PyTorch, and None for other values.

    A value is from a library if the library defines the class of the value or one of its base classes.

    >>> library(np.ones(2)) is None
    True
    """
    if isinstance(value, np.ndarray | np.generic | jax.Array | int | float):
        return None
    packages = {base.__module__.partition(".")[0] for base in type(value).__mro__}
    return next((name for name in ("tensorflow", "torch") if name in packages), None)


def numpy_batch(batch: types.Batch) -> types.Batch:
    """Converts the `tf.Tensor`s and `torch.Tensor`s in a batch to NumPy arrays. Other values are left unchanged.

    A bfloat16 tensor becomes a bfloat16 array. This function doesn't import TensorFlow or PyTorch.

    >>> numpy_batch({"name": "a", "x": np.zeros(3)})
    {'name': 'a', 'x': array([0., 0., 0.])}
    """
    leaves = batch.values() if type(batch) is dict else batch if type(batch) in (tuple, list) else ()
    if {*map(type, leaves)} == _NUMPY_ALONE:
        return batch
    return jax.tree.map(_numpy_leaf, batch)


def _numpy_leaf(leaf: Any) -> Any:
    match library(leaf):
        case "tensorflow" if hasattr(leaf, "numpy"):
            return leaf.numpy()
        case "torch":
            leaf = leaf.detach().cpu()
            if str(leaf.dtype) == "torch.bfloat16":  # NumPy has no bfloat16, and torch doesn't support JAX's.
                return leaf.float().numpy().astype(jax.numpy.bfloat16)
            return leaf.numpy()
    return leaf
