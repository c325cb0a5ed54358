"""Functions that fetch, merge and summarize step outputs.

`fetch` copies values from devices to the host, and `view` reads values that are already in host memory. `summarize`
turns a loop's outputs into example-weighted means.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from jaxloop import types
from jaxloop.base import encoding

_CLU_MODULE = "clu.metrics"


def fetch(tree: Any) -> Any:
    """Copies a pytree to the host, blocking until it has been computed. Scalar arrays become NumPy scalars."""
    # Without arrays, JAX isn't initialized.
    if any([isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(tree)]) and not is_on_cpu():
        tree = jax.device_get(tree)  # This starts all copies before it waits for the first one.
    return view(tree)


def view(tree: Any) -> Any:
    """Like `fetch`, but faster for values that are already in host memory."""
    leaves, structure = jax.tree.flatten(tree)
    read = {kind: _reader_of(kind) for kind in set(map(type, leaves))}
    # A view's `[()]` is fastest for scalars. For other arrays, it would keep more than the buffer alive.
    is_array = {kind: reader is _read for kind, reader in read.items()}
    values = [np.asarray(x)[()] if is_array[type(x)] and not x.shape else read[type(x)](x) for x in leaves]
    return jax.tree.unflatten(structure, values)


@functools.cache
def _reader_of(kind: type) -> Callable[[Any], Any]:
    if issubclass(kind, np.ndarray):
        return _unwrap_scalar
    if not issubclass(kind, jax.Array):
        return lambda leaf: leaf
    if kind is type(jnp.zeros(())):  # This initializes JAX.
        return _read
    return lambda leaf: _unwrap_scalar(jax.device_get(leaf))  # For example, typed keys.


def fetch_scalar(array: jax.Array) -> bool | int | float:
    """Returns a scalar array as a Python number, blocking until it has been computed. Faster than `fetch`."""
    return np.asarray(array).item()


@functools.cache
def is_on_cpu() -> bool:
    """Returns True if the devices are CPUs, which share memory with the host. Initializes JAX."""
    return jax.default_backend() == "cpu"


def wait(tree: Any) -> Any:
    """Blocks until the devices have computed a pytree. Returns the pytree without reading its values."""
    if not isinstance(tree, jax.Array) or not is_ready(tree):
        jax.block_until_ready(tree)
    return tree


def is_ready(array: Any) -> bool:
    """Returns True if a value has been computed. Anything that isn't a device array counts as computed.

    Returns False for donated arrays. Also returns False for typed PRNG keys, because they have no `is_ready` method.
    """
    if not isinstance(array, jax.Array):
        return True
    asks = getattr(array, "is_ready", None)
    return asks is not None and not array.is_deleted() and asks()


def _read(array: jax.Array) -> Any:
    # A copy of a small array takes less time than a view.
    return np.array(array) if array.size < 1024 else array.__array__()


def _unwrap_scalar(leaf: Any) -> Any:
    return leaf[()] if isinstance(leaf, np.ndarray) and leaf.ndim == 0 else leaf


@final
class LoopOutputs(dict[str, Any]):
    """The outputs of a loop, on the host. Each name maps to a list with one value per step, in order.

    Metrics with `merge` and `compute` methods, such as those of `clu.metrics`, are merged: their lists contain merged
    states rather than one state per step. Statistics are plain numbers rather than lists.

    Attributes:
      num_examples: The number of examples in each step.
    """

    def __init__(self, values: Mapping[str, Any] | None = None, num_examples: Iterable[int] = ()):
        super().__init__(values or {})
        self.num_examples: list[int] = list(num_examples)

    def copy(self) -> "LoopOutputs":
        """Returns a copy whose lists can be extended without changing the original."""
        lists = {name: list(value) if isinstance(value, list) else value for name, value in self.items()}
        return LoopOutputs(lists, self.num_examples)

    @property
    def asks_to_stop(self) -> bool:
        """True if a step, an action or a hook has set `outputs[STOP_LOOP]`."""
        return bool(np.any(self.get(types.STOP_LOOP, False)))

    def extend(self, later: "LoopOutputs", *, keeps_all: bool = False) -> None:
        """Appends the outputs of later steps.

        Unless `keeps_all` is True, non-scalar values, such as images, are replaced by those in `later`, so that memory
        use doesn't grow. Values that are not lists, such as statistics, are always replaced. The lists in this object
        are extended in place, and `later` isn't modified.
        """
        num_steps = len(self.num_examples) + len(later.num_examples)
        for name, values in later.items():
            earlier = self.get(name)
            if not isinstance(values, list) or not isinstance(earlier, list):
                self[name] = list(values) if isinstance(values, list) else values
            elif not (keeps_all or _numbers_alike(values) or all(map(_is_small, values))):
                self[name] = list(values)
            elif (keeps_all or len(earlier) + len(values) < num_steps) and values and is_metric(values[0]):
                self[name] = merge_if_metrics([*earlier, *values])
            else:
                earlier.extend(values)
        self.num_examples.extend(later.num_examples)

    def between(self, begin: int, end: int) -> "LoopOutputs":
        """Returns the outputs of the steps with indices from `begin` to `end` (exclusive).

        Values that are not lists are returned unchanged. Lists with no value in this range are left out.

        >>> dict(LoopOutputs({"loss": [3.0, 2.0, 1.0], "speed": 9.5}).between(1, 3))
        {'loss': [2.0, 1.0], 'speed': 9.5}
        """
        parts = {name: value[begin:end] if isinstance(value, list) else value for name, value in self.items()}
        kept = {name: part for name, part in parts.items() if not isinstance(part, list) or part}
        return LoopOutputs(kept, self.num_examples[begin:end])

    def encode(self) -> tuple[dict[str, Any], list[str]]:
        """Returns the outputs in a JSON-compatible form, and a list of the names of values that can't be encoded."""
        values, left_out = {}, []
        for name, value in self.items():
            try:
                whole = merge_if_metrics(value) if isinstance(value, list) else value
                values[name] = encoding.encode(_plain(fetch(whole)))
            except TypeError:
                left_out.append(name)
        return {"values": values, "num_examples": list(self.num_examples)}, left_out

    @classmethod
    def decode(cls, encoded: Mapping[str, Any]) -> "LoopOutputs":
        """Restores outputs from the result of `encode`, except for the values that `encode` left out."""
        values = {name: _not_plain(encoding.decode(value)) for name, value in encoded["values"].items()}
        return cls(values, encoded["num_examples"])


def _plain(value: Any) -> Any:
    """Converts the jaxloop and clu objects in a value to tuples of plain values."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if is_metric(value):
        return ("metric", _name_of_class(value), _fields(value))
    if isinstance(value, types.Weighted):
        return ("weighted", value.value, value.weight)
    if isinstance(value, types.MetricWithMetadata):
        return ("with metadata", value.value, value.type.value, value.metadata and dict(value.metadata))
    return ("tuple", value) if isinstance(value, tuple) else value


def _not_plain(value: Any) -> Any:
    """Restores a value from the result of `_plain`."""
    match value:
        case list():
            return [_not_plain(each) for each in value]
        case ("metric", name, fields):
            cls = _class_of_name(name)
            if cls is None:
                raise ValueError(f"The checkpoint contains a metric of the class {name}, which the program lacks.")
            return _with_fields(cls.empty(), fields) if hasattr(cls, "empty") else cls(**fields)
        case ("weighted", inner, weight):
            return types.Weighted.of(inner, weight)
        case ("with metadata", inner, kind, metadata):
            return types.MetricWithMetadata(inner, types.MetricType(kind), metadata)
        case ("tuple", inner):
            return inner
    return value


def _fields(value: Any) -> Any:
    """Returns a dict of a metric's arrays, keyed by field name. Metrics inside a `Collection` become nested dicts."""
    if not dataclasses.is_dataclass(value):
        return value
    fields = [field for field in dataclasses.fields(value) if field.metadata.get("pytree_node", True)]
    return {field.name: _fields(getattr(value, field.name)) for field in fields}


def _name_of_class(metric: Any) -> str:
    """Returns the import path of a metric's class. If clu generated the class, returns the path of its base class.

    Raises:
      TypeError: If the class isn't defined at the top level of a module.
    """
    for cls in type(metric).__mro__:
        name = f"{cls.__module__}:{cls.__qualname__}"
        if _class_of_name(name) is not None:
            return name
        if cls.__module__ != _CLU_MODULE:
            break
    raise TypeError(f"{type(metric).__name__} must be defined at the top level of a module.")


def _class_of_name(name: str) -> Any:
    """Returns the metric class with the given import path, or None if no imported module contains it."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for each in path.split("."):
        found = getattr(found, each, None)
    is_base = module == _CLU_MODULE and path in ("Metric", "Collection")
    return found if isinstance(found, type) and is_metric_class(found) and not is_base else None


def _with_fields(metric: Any, fields: Any) -> Any:
    if not dataclasses.is_dataclass(metric):
        return fields
    inner = {name: _with_fields(getattr(metric, name), value) for name, value in fields.items()}
    return dataclasses.replace(metric, **inner)  # pyright: ignore[reportArgumentType]


def _is_small(value: Any) -> bool:
    if isinstance(value, types.Weighted):
        return True
    if isinstance(value, types.MetricWithMetadata):
        return value.type in (types.MetricType.SCALAR, types.MetricType.TEXT)
    return is_metric(value) or np.ndim(value) == 0


def ready_scalars(outputs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a step's scalar outputs on the host, or an empty dict if any of them hasn't been computed yet."""
    scalars = scalars_in(outputs)
    if all(map(is_ready, map(value_of, scalars.values()))):
        return _measured(fetch(scalars))
    return {}


def newest_scalars(outputs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a dict of the scalars of a loop's last step. The loop's outputs must already be on the host."""
    lists = {name: value[-1] for name, value in outputs.items() if isinstance(value, list) and value}
    return _measured(scalars_in(lists))


def scalars_in(outputs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a step's scalar outputs, including `Weighted` and `MetricWithMetadata` objects that hold a scalar."""
    return {name: each for name, each in outputs.items() if not is_metric(each) and np.ndim(value_of(each)) == 0}


def _measured(scalars: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value_of(value) for name, value in scalars.items() if not is_empty(value)}


def is_empty(value: Any) -> bool:
    """Returns True if a value is None or a `Weighted` with weight 0. The weight must be on the host."""
    return value is None or (isinstance(value, types.Weighted) and bool(value.weight == 0))


@functools.cache
def is_metric_class(kind: type) -> bool:
    """Returns True if a class has `merge` and `compute` methods, as the classes in `clu.metrics` do."""
    return all(callable(getattr(kind, name, None)) for name in ("merge", "compute"))


def is_metric(value: Any) -> bool:
    """Returns True if a value is an instance of a metric class; see `is_metric_class`."""
    return is_metric_class(type(value))


def merges_on_host(metric: Any) -> bool:
    """Returns True if a metric's state must be merged on the host.

    This is the case if the state grows with each merge, or if merging can't be traced.
    """
    leaves, structure = jax.tree.flatten(metric)
    return _grows(structure, tuple((np.shape(leaf), jnp.result_type(leaf)) for leaf in leaves))


@functools.lru_cache(maxsize=64)
def _grows(structure: Any, shapes: tuple[tuple[tuple[int, ...], Any], ...]) -> bool:
    state = jax.tree.unflatten(structure, [jax.ShapeDtypeStruct(*each) for each in shapes])
    try:
        merged = jax.eval_shape(lambda one, other: one.merge(other), state, state)
    except Exception:  # The merge can't be traced at all. If it is broken, the host raises the error.
        return True
    sizes = [leaf.shape for leaf in jax.tree.leaves(merged)]
    return jax.tree.structure(merged) != structure or sizes != [shape for shape, _ in shapes]


def merge(states: Sequence[Any]) -> Any:
    """Merges several `clu.metrics` states in order."""
    return functools.reduce(lambda merged, state: merged.merge(state), states)


def merge_if_metrics(values: list[Any]) -> list[Any]:
    """Returns a list with the merged state if all values are `clu.metrics` states; otherwise, returns `values`."""
    return [merge(values)] if len(values) > 1 and all(map(is_metric, values)) else values


def summarize(outputs: types.Output) -> dict[str, float]:
    """Summarizes a loop's outputs as scalars.

    A list of scalars `v_i` becomes its weighted mean, `sum(n_i v_i) / sum(n_i)` in float64. The weight `n_i` is the
    number of examples in step `i` (1 if `outputs` is a plain dict). If `v_i` is a `Weighted`, its own weight is used
    instead. `clu.metrics` states are merged, and the result is computed once, from the merged state. The field `loss`
    of a `Collection` named `eval` becomes `eval/loss`. Plain numbers are returned unchanged. Values whose weights are
    all 0 are omitted, because they were not measured. Values that are not scalars are also omitted.

    Raises:
      ValueError: If a weight is negative.

    >>> summarize(LoopOutputs({"loss": [1.0, 4.0]}, num_examples=[32, 16]))
    {'loss': 2.0}
    """
    return _scalars(_reduced(outputs), outputs)


def _scalars(reduced: Mapping[str, Any], outputs: types.Output) -> dict[str, float]:
    scalars = {}
    num_examples = getattr(outputs, "num_examples", ())
    for name, value in reduced.items():
        if isinstance(value, int | float):  # A statistic.
            scalars[name] = float(value)
            continue
        values = value if isinstance(value, list) else [value]
        has_weights = isinstance(value, list) and len(num_examples) == len(values)
        weights = num_examples if has_weights else [1] * len(values)
        if not _numbers_alike(values):
            if values and all(isinstance(item, types.Weighted) for item in values):
                weights = [item.weight for item in values]
            values = [value_of(item) for item in values]
            weights = [weight for weight, item in zip(weights, values, strict=True) if item is not None]
            values = [item for item in values if item is not None]
            if not all(map(_is_number, values)):
                continue
        if any(weights):
            numbers, counts = np.array(values, np.float64), np.array(weights, np.float64)
            if counts.min() < 0:
                raise ValueError(f"The weights of {name!r} must not be negative, got {counts.min():g}.")
            numbers, counts = numbers[counts != 0], counts[counts != 0]  # Even NaN doesn't count if its weight is 0.
            scalars[name] = float((numbers * counts).sum() / counts.sum())  # `np.average` takes three times as long.
    return scalars


def _numbers_alike(values: Sequence[Any]) -> bool:
    """Returns True if all values are NumPy numbers of the same type. Faster than checking each value."""
    kinds = {*map(type, values)}
    return len(kinds) == 1 and issubclass(kinds.pop(), np.floating | np.integer | np.bool_)


def _is_number(value: Any) -> bool:
    if isinstance(value, np.generic):  # This includes bfloat16, which is not an np.number.
        return jnp.issubdtype(value.dtype, jnp.floating) or value.dtype.kind in "iub"
    return isinstance(value, bool | int | float)


def is_of_members(name: str) -> bool:
    """Returns True if a name refers to the value of a single member of a `jaxloop.Ensemble`.

    Also returns True for the minimum, the maximum and the standard deviation of the members' values.

    >>> is_of_members("test/loss/members/3"), is_of_members("train.loss.members.max"), is_of_members("loss")
    (True, True, False)
    """
    return ".members." in name.replace("/", ".")


def scalars_and_media(outputs: types.Output) -> tuple[dict[str, float], dict[str, types.MetricWithMetadata]]:
    """Returns the result of `summarize`, and a dict of the non-scalar outputs as `MetricWithMetadata` objects.

    An `[N, H, W, C]` array without metadata is treated as images if C is 1, 3 or 4. Any other array without metadata
    becomes a histogram, and a string becomes text. Histograms contain the values of all steps, whereas images, videos,
    audio and text are taken from the last step only.
    """
    reduced = _reduced(outputs)
    found = {}
    for name, value in reduced.items():
        values = value if isinstance(value, list) else [value]
        last = values[-1] if values else None
        if isinstance(last, types.MetricWithMetadata):
            if last.type is types.MetricType.HISTOGRAM:
                joined = np.concatenate([np.ravel(item.value) for item in values])
                found[name] = types.MetricWithMetadata(joined, last.type, last.metadata)
            elif last.type is not types.MetricType.SCALAR:
                found[name] = last
        elif isinstance(last, str):
            found[name] = types.MetricWithMetadata(last, types.MetricType.TEXT)
        elif isinstance(last, np.ndarray) and last.ndim == 4 and last.shape[-1] in (1, 3, 4):
            found[name] = types.MetricWithMetadata(last, types.MetricType.IMAGE)
        elif isinstance(last, np.ndarray):
            joined = np.concatenate([np.ravel(item) for item in values])
            found[name] = types.MetricWithMetadata(joined, types.MetricType.HISTOGRAM)
    return _scalars(reduced, outputs), found


def _reduced(outputs: types.Output) -> dict[str, Any]:
    """Fetches the outputs and replaces `clu.metrics` states with their computed results."""
    reduced, given = {}, {name: value for name, value in (outputs or {}).items() if name != types.STOP_LOOP}
    to_read = {  # Statistics and NumPy numbers are on the host.
        name: value
        for name, value in given.items()
        if not (_numbers_alike(value) if isinstance(value, list) else isinstance(value, int | float))
    }
    given.update(fetch(to_read) if to_read else {})
    for name in sorted(given):
        value = given[name]
        values = value if isinstance(value, list) else [value]
        if name not in to_read or not values or not all(map(is_metric, values)):
            reduced[name] = value
            continue
        computed = fetch(merge(values).compute())
        fields = computed if isinstance(computed, Mapping) else {None: computed}
        reduced.update({name if field is None else f"{name}/{field}": number for field, number in fields.items()})
    return reduced


WEIGHT = " (weight)"
"""The suffix that turns the name of a `Weighted` value into the name of its weight; see `separate_weights`."""


def separate_weights(logs: Mapping[str, Any]) -> Any:
    """Returns the logs with each `Weighted` replaced by two scalars, such as `loss` and `loss (weight)`."""
    separated = {}
    for name, value in logs.items():
        if isinstance(value, types.Weighted):
            separated |= {name: value.value, name + WEIGHT: value.weight}
        else:
            separated[name] = separate_weights(value) if isinstance(value, Mapping) else value
    return type(logs)(separated)  # pyright: ignore[reportCallIssue]


def join_weights(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Reverses `separate_weights` in a flat dict of entries, keyed by path.

    >>> join_weights({"loss": 0.5, "loss (weight)": 12, "accuracy": 0.9})
    {'loss': Weighted(value=0.5, weight=12), 'accuracy': 0.9}
    """
    joined = {}
    for path, value in entries.items():
        if path + WEIGHT in entries:
            joined[path] = types.Weighted.of(value, entries[path + WEIGHT])
        elif path.removesuffix(WEIGHT) == path or path.removesuffix(WEIGHT) not in entries:
            joined[path] = value
    return joined


def value_of(value: Any) -> Any:
    """Returns the scalar inside a `Weighted` or a scalar `MetricWithMetadata`. Returns any other value unchanged."""
    if isinstance(value, types.Weighted):
        return value.value
    if isinstance(value, types.MetricWithMetadata) and value.type is types.MetricType.SCALAR:
        return value.value
    return value
