"""Exact JSON encoding of Python values and arrays in checkpoints and failure records.

Decoding doesn't execute any code. The train state is not encoded: its arrays are saved by Orbax.
"""

import base64
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np


def encode(value: Any, path: str = "value") -> Any:
    """Converts a value to JSON types so that `decode` can restore it bit for bit.

    Accepts None, bools, ints, floats, strings, bytes, NumPy scalars, arrays of numbers, and lists, tuples and
    string-keyed dicts of these. `decode` returns JAX arrays as NumPy arrays.

    >>> decode(encode({"loss": [np.float32(0.1), np.float32(0.2)], "sizes": (32, 16)}))
    {'loss': [np.float32(0.1), np.float32(0.2)], 'sizes': (32, 16)}

    Args:
      value: The value to encode.
      path: The name of the value in error messages.

    Raises:
      TypeError: If the value contains an object of an unsupported type. The message contains the path of that object.
    """
    if value is None or isinstance(value, bool | str) or type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, np.generic | np.ndarray | jax.Array):
        return _encode_array(value, path)
    if isinstance(value, list):
        # Some lists, such as the losses of an epoch, have thousands of scalars, which take less space as one array.
        if len(value) > 1 and isinstance(value[0], np.generic) and all(type(each) is type(value[0]) for each in value):
            return {"scalars": _encode_array(np.array(value, value[0].dtype), path)}
        return [encode(each, f"{path}[{index}]") for index, each in enumerate(value)]
    if type(value) is tuple:
        return {"tuple": [encode(each, f"{path}[{index}]") for index, each in enumerate(value)]}
    if isinstance(value, Mapping) and not [key for key in value if not isinstance(key, str)]:
        return {"dict": {key: encode(each, f"{path}[{key!r}]") for key, each in value.items()}}
    raise TypeError(
        f"{path} can't be saved in a checkpoint: got {value!r} of type {type(value).__name__}. Use numbers, strings, "
        "bytes, arrays of numbers, and lists, tuples and dicts with string keys of these."
    )


def encode_keys(keys: Any) -> Any:
    """Converts a pytree of PRNG keys (typed or raw) to JSON types. Equal keys have equal encodings."""
    is_typed = lambda key: jax.numpy.issubdtype(key.dtype, jax.dtypes.prng_key)
    return encode(jax.tree.map(lambda key: jax.random.key_data(key) if is_typed(key) else key, keys))


def _encode_array(value: Any, path: str) -> dict[str, Any]:
    array = np.asarray(value)
    if array.dtype.hasobject or array.dtype.names is not None:
        raise TypeError(f"{path} can't be saved in a checkpoint: got an array of {array.dtype}. Use arrays of numbers.")
    kind = "scalar" if isinstance(value, np.generic) else "array"
    return {kind: base64.b64encode(array.tobytes()).decode(), "dtype": array.dtype.name, "shape": list(array.shape)}


def decode(encoded: Any) -> Any:
    """Restores a value that was converted by `encode`.

    Raises:
      ValueError: If the argument is not a result of `encode`.
    """
    if isinstance(encoded, list):
        return [decode(each) for each in encoded]
    if not isinstance(encoded, dict):
        return encoded
    match encoded:
        case {"float": text}:
            return float(text)
        case {"bytes": text}:
            return base64.b64decode(text)
        case {"array": text, "dtype": dtype, "shape": shape}:
            return _decode_array(text, dtype, shape)
        case {"scalar": text, "dtype": dtype, "shape": shape}:
            return _decode_array(text, dtype, shape)[()]
        case {"scalars": inner}:
            return list(decode(inner))
        case {"tuple": items}:
            return tuple(map(decode, items))
        case {"dict": items}:
            return {key: decode(each) for key, each in items.items()}
    raise ValueError(f"Expected a value that jaxloop encoded, got a dict with the keys {sorted(encoded)}.")


def _decode_array(text: str, dtype: str, shape: list[int]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), jax.numpy.dtype(dtype)).reshape(shape).copy()
