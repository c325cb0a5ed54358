"""Dataset fingerprints, which ensure that a saved position is only used with the dataset that it belongs to.

A fingerprint is the same in every process.
"""

import contextlib
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, MethodType
from typing import Any

import numpy as np

from jaxloop import types
from jaxloop.base import checks

# The attributes of a pipeline's parts that must stay the same, with or without a leading underscore. Paths are excluded
# because files may move, and so are options that only affect speed.
_PARAMETERS = """
batch_size drop_remainder drop_last seed seed2 seed_rng_seed reshuffle_each_epoch reshuffle_each_iteration window_size
buffer_size num_epochs cycle_length num_records num_batches shuffle shard_index shard_count num_workers
""".split()
# These are used only for parts from the libraries below. In other classes, `step` may be a counter.
_PARAMETERS_OF_LIBRARIES = "start stop step".split()
_LIBRARIES = ("grain", "tensorflow")
_PARTS = """
_inputs _parents _datasets _parent _map_parent _data_loader _sampler sampler _operations _multiprocessing_options
_shard_options shard_options _data_source _source dataset
""".split()
_NO_PARTS = (str, bytes, int, FunctionType, MethodType)
_MAX_PARTS = 200


def describe_source(dataset: Any) -> list[str]:
    """Describes a pipeline, one line per part. Every process that builds the pipeline gets the same lines.

    >>> describe_source([{"x": 1}, {"x": 2}])
    ['list of 2']
    """
    parts = itertools.islice(_parts(dataset, {}), _MAX_PARTS)
    return [f"{'  ' * depth}{_describe_part(part)}" for depth, part in parts]


def _parts(part: Any, seen: dict[int, Any], depth: int = 0) -> Iterator[tuple[int, Any]]:
    seen[id(part)] = part  # Kept alive, so that no other object gets its id.
    yield depth, part
    for name, found in _attributes(part, _PARTS).items():
        if name == "_inputs" and callable(found):
            found = _attempt(found)
        for each in found if isinstance(found, list | tuple) and name not in ("_data_source", "_source") else [found]:
            if each is not None and not isinstance(each, _NO_PARTS) and id(each) not in seen:
                yield from _parts(each, seen, depth + 1)


def _describe_part(part: Any) -> str:
    is_of_library = type(part).__module__.partition(".")[0] in _LIBRARIES
    names = _PARAMETERS + _PARAMETERS_OF_LIBRARIES if is_of_library else _PARAMETERS
    found = _attributes(part, [prefix + name for name in (*names, "transform_name") for prefix in ("", "_")])
    shown = []
    for name in names:
        value = found.get(name)
        value = found.get(f"_{name}") if value is None or callable(value) else value
        if value is not None and hasattr(value, "numpy") and not np.ndim(value):  # An eager tf.Tensor.
            value = _attempt(lambda tensor=value: tensor.numpy().item())
        if isinstance(value, bool | int):
            shown.append(f"{name}={value!r}")
    transform = found.get("transform_name") or found.get("_transform_name")
    if isinstance(transform, str):
        shown.append(transform.partition(" @ ")[0])  # Without the file and line number, which change with edits.
    if hasattr(type(part), "element_spec"):
        shown.append(str(_attempt(lambda: part.element_spec)))
    text = type(part).__name__ + (f"({', '.join(shown)})" if shown else "")
    length = _attempt(lambda: len(part))
    return re.sub(r" at 0x[0-9a-f]+", "", text if length is None else f"{text} of {length}")


def _attributes(part: Any, names: Iterable[str]) -> dict[str, Any]:
    """Looks up attributes of a third-party pipeline's part by name, and skips those that it doesn't have."""
    found = {}
    for name in names:
        with contextlib.suppress(Exception):
            found[name] = getattr(part, name)
    return found


def _attempt(ask: Callable[[], Any]) -> Any:
    """Calls a method of a third-party pipeline, and returns None if it raises an exception."""
    try:
        return ask()
    except Exception:
        return None


def describe_batch(batch: types.Batch) -> list[str]:
    """Describes the leaves of a batch, one line per leaf.

    >>> describe_batch({"x": np.zeros([2, 3], np.float32), "name": "a"})
    ["batch['name']: str", "batch['x']: float32[2, 3]"]
    """
    return [f"{name}: {_describe_leaf(leaf)}" for name, leaf in checks.batch_leaves(batch).items()]


def _describe_leaf(leaf: Any) -> str:
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or not hasattr(leaf, "shape"):
        return type(leaf).__name__
    return f"{getattr(dtype, 'name', dtype)}{list(leaf.shape)}"


def check_same(saved: list[str] | None, now: list[str], *, sizes: bool = True) -> None:
    """Raises a `ValueError` that lists the differences between two descriptions, if there are any.

    Args:
      saved: The description saved by an earlier run; None if there is none.
      now: The description of this run's dataset.
      sizes: Whether to compare array sizes, which may differ between batches of the same dataset, because the last
        batch may be short.
    """
    if saved is None:
        return
    if not sizes:
        saved, now = ([re.sub(r"\d+(?=[],])", "_", line) for line in lines] for lines in (saved, now))
    unlike = [(one, two) for one, two in itertools.zip_longest(saved, now, fillvalue="(none)") if one != two]
    if not unlike:
        return
    lines = checks.first_lines([f"  {one.strip()} -> {two.strip()}" for one, two in unlike])
    raise ValueError(
        "The position in the data was saved from a different dataset. Differences (saved -> now):\n"
        + "\n".join(lines)
        + "\nBuild the same dataset (batch size, seed, length, transformations), or start a new run in another "
        "directory."
    )
