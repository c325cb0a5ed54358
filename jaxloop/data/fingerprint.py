"""Fingerprints of batches, which reveal whether a resumed run reads the same batches as an uninterrupted run."""

import zlib
from typing import Any

import numpy as np

from jaxloop import types
from jaxloop.base import checks
from jaxloop.data.tensors import numpy_batch

END: dict[str, Any] = {"rows": None, "leaves": {}}
"""The fingerprint that represents the end of the data."""


def fingerprint(batch: types.Batch) -> dict[str, Any]:
    """Returns the number of examples in a batch, and the dtype, shape and checksum of each leaf.

    >>> fingerprint({"x": np.zeros([2, 3], np.float32)})
    {'rows': 2, 'leaves': {"batch['x']": 'float32[2, 3], checksum a3c1ca20'}}
    """
    leaves = {name: describe(leaf) for name, leaf in checks.batch_leaves(numpy_batch(batch)).items()}
    return {"rows": checks.num_examples(batch), "leaves": leaves}


def describe(leaf: Any) -> str:
    """Returns a leaf's dtype, shape and checksum as text. Omits the checksum if NumPy can't read the leaf."""
    try:
        array = np.asarray(leaf)
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    except Exception:  # NumPy can't read every leaf: for example, an array that is spread over several processes.
        return checks.describe(leaf)
    return f"{checks.describe(array)}, checksum {zlib.crc32(data.data):08x}"
