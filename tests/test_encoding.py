"""Encoding of values as JSON."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from jaxloop.base import encoding


def same(one, two):
    if isinstance(one, list | tuple):
        return type(one) is type(two) and len(one) == len(two) and all(map(same, one, two))
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    if isinstance(one, np.generic | np.ndarray):
        return type(one) is type(two) and one.dtype == two.dtype and one.tobytes() == two.tobytes()
    return type(one) is type(two) and repr(one) == repr(two)


@pytest.mark.parametrize(
    "value",
    [
        None,
        [True, 1, 0.1, -0.0, float("nan"), float("-inf"), "a", b"\x00\xff"],
        {"a": {"b": (1, (2.5,))}, "float": [], "tuple": {}, "dict": "x"},
        [np.float32(0.1), np.float64(0.1), np.int8(3), np.bool_(True)],
        [np.float64(0.1), 0.1],
        np.arange(6, dtype=np.int16).reshape(2, 3),
        np.zeros((0, 3), np.uint32),
        np.asarray(jnp.array([0.1, 3], jnp.bfloat16)),
        np.array(3, np.int32),
    ],
)
def test_json_round_trip_is_bit_exact(value):
    through_json = json.loads(json.dumps(encoding.encode(value), allow_nan=False))
    assert same(encoding.decode(through_json), value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [1, object()]}, r"value\['a'\]\[1\] can't be saved in a checkpoint: got <object"),
        (np.array(["a", None], object), "got an array of object"),
        ({3}, "of type set. Use numbers, strings"),
    ],
)
def test_unsupported_value_raises_with_its_path_and_unknown_json_is_not_decoded(value, message):
    with pytest.raises(TypeError, match=message):
        encoding.encode(value)
    with pytest.raises(ValueError, match="a dict with the keys \\['__reduce__'\\]"):
        encoding.decode({"__reduce__": ["os.system", "true"]})
