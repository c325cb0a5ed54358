"""From what steps report to what is written down: fetch, weigh, merge, summarize.

`fetch` is the one place where jaxloop reads device values; `view` takes those that lie in the host's own memory.
`summarize` turns a loop's outputs into example-weighted scalars.
"""

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from clu import metrics as clu_metrics

from jaxloop import encoding, types


def fetch(tree: Any) -> Any:
    """Reads a tree from the devices, waiting for it; scalars come as NumPy scalars."""
    leaves, structure = jax.tree.flatten(tree)
    has_arrays = any(isinstance(leaf, jax.Array) for leaf in leaves)  # Else JAX need not be started.
    if has_arrays and jax.default_backend() != "cpu":
        leaves = jax.device_get(leaves)  # Which begins to copy all before it waits for the first.
    return jax.tree.unflatten(structure, _viewed(leaves))


def view(tree: Any) -> Any:
    """As `fetch`, of values in the memory of the host, for who knows that they are computed: else it waits."""
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, _viewed(leaves))


def _viewed(leaves: Sequence[Any]) -> list[Any]:
    read = {kind: _reader_of(kind) for kind in set(map(type, leaves))}
    return [read[type(leaf)](leaf) for leaf in leaves]


@functools.cache
def _reader_of(kind: type) -> Callable[[Any], Any]:
    if issubclass(kind, np.ndarray):
        return _unwrap_scalar
    if not issubclass(kind, jax.Array):
        return lambda leaf: leaf
    if kind is type(jnp.zeros(())):  # Which starts JAX, if it has not.
        return _read
    return lambda leaf: _unwrap_scalar(jax.device_get(leaf))  # Of typed keys, say.


def wait(tree: Any) -> Any:
    """Waits until the devices have computed a tree, without reading it; returns it."""
    if not isinstance(tree, jax.Array) or not is_ready(tree):
        jax.block_until_ready(tree)
    return tree


def is_ready(array: Any) -> bool:
    """Whether a value has been computed, if it is a device array. To ask one that was donated ends the process.

    Of a typed key nobody can tell: it counts as not computed.
    """
    if not isinstance(array, jax.Array):
        return True
    asks = getattr(array, "is_ready", None)
    return asks is not None and not array.is_deleted() and asks()


def _read(array: jax.Array) -> Any:
    view = np.asarray(array)
    # For a scalar the fastest way. Of an array with axes the view would keep more alive than its buffer.
    return array.__array__() if view.ndim else view[()]


def _unwrap_scalar(leaf: Any) -> Any:
    return leaf[()] if isinstance(leaf, np.ndarray) and leaf.ndim == 0 else leaf


@final
class LoopOutputs(dict[str, Any]):
    """The outputs of a loop: for each name the list of its values, one per step, in order, on the host.

    `clu.metrics` states are merged, so their list holds the merged states; statistics are plain numbers.

    Attributes:
      num_examples: for each step of the loop, how many examples its values stand for.
    """

    def __init__(self, values: Mapping[str, Any] | None = None, num_examples: Iterable[int] = ()):
        super().__init__(values or {})
        self.num_examples: list[int] = list(num_examples)

    def copy(self) -> "LoopOutputs":
        """Outputs whose lists can grow without these."""
        lists = {name: list(value) if isinstance(value, list) else value for name, value in self.items()}
        return LoopOutputs(lists, self.num_examples)

    @property
    def asks_to_stop(self) -> bool:
        """Whether a step, an action or a hook has set `outputs[STOP_LOOP]`."""
        return bool(np.any(self.get(types.STOP_LOOP, False)))

    def extend(self, later: "LoopOutputs") -> None:
        """Appends the outputs of the steps that came after.

        Of values that are no scalars (images, say) only the later ones are kept, so that memory does not grow. The
        lists here are this object's own: they grow, and those of `later` stay as they are.
        """
        steps_before, steps_later = len(self.num_examples), len(later.num_examples)
        for name, values in later.items():
            earlier = self.get(name)
            if not isinstance(values, list):
                self[name] = values
            elif not isinstance(earlier, list) or not (_numbers_alike(values) or all(map(_is_small, values))):
                self[name] = list(values)
            elif len(earlier) == steps_before and len(values) == steps_later:
                self[name] = as_states_like(earlier, values)
                self[name].extend(values)
            else:
                self[name] = merge_if_metrics([*earlier, *values])
        self.num_examples.extend(later.num_examples)

    def split(self, num_steps: int) -> "tuple[LoopOutputs, LoopOutputs]":
        """Those of so many steps, the first ones, and those of the others. What is no list both have.

        >>> [dict(each) for each in LoopOutputs({"loss": [3.0, 2.0, 1.0], "speed": 9.5}).split(2)]
        [{'loss': [3.0, 2.0], 'speed': 9.5}, {'loss': [1.0], 'speed': 9.5}]
        """
        first, others = (LoopOutputs(None, each) for each in _split(self.num_examples, num_steps))
        for name, value in self.items():
            parts = _split(value, num_steps) if isinstance(value, list) else (value, value)
            for outputs, part in zip((first, others), parts, strict=True):
                if not isinstance(part, list) or part:
                    outputs[name] = part
        return first, others

    def encode(self) -> tuple[dict[str, Any], list[str]]:
        """What a checkpoint keeps, as JSON can hold it, and the names of the values of which it can't hold any."""
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
        """What `encode` was given."""
        values = {name: _not_plain(encoding.decode(value)) for name, value in encoded["values"].items()}
        return cls(values, encoded["num_examples"])


def _split(values: list[Any], number: int) -> tuple[list[Any], list[Any]]:
    return values[:number], values[number:]


class _KeptMetric:
    """A `clu.metrics` state out of a checkpoint, whose class is not known yet, and what it came to.

    Such as one of a class that was defined inside a function: the next state of its name tells.
    """

    def __init__(self, fields: Any, computed: Any):
        self.fields, self.computed = fields, computed


def _plain(value: Any) -> Any:
    """A value without classes of ours and of clu: in their place are pairs with what to make them of."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, _KeptMetric):
        return ("metric", None, value.fields, value.computed)
    if is_metric(value):
        computed = None if merges_on_host(value) else fetch(value.compute())
        return ("metric", _name_of_class(value), _fields(value), computed)
    if isinstance(value, types.MetricWithMetadata):
        return ("with metadata", value.value, value.type.value, value.metadata and dict(value.metadata))
    return ("tuple", value) if isinstance(value, tuple) else value


def _not_plain(value: Any) -> Any:
    match value:
        case list():
            return [_not_plain(each) for each in value]
        case ("metric", name, fields, computed):
            cls = _class_of_name(name)
            with contextlib.suppress(Exception):  # Of a class that has changed, or whose `empty` is something else.
                return _with_fields(cls.empty(), fields)
            return _KeptMetric(fields, computed)
        case ("with metadata", inner, kind, metadata):
            return types.MetricWithMetadata(inner, types.MetricType(kind), metadata)
        case ("tuple", inner):
            return inner
    return value


def _fields(value: Any) -> Any:
    """The arrays of a metric by the names of its fields; those of the metrics inside a `Collection` likewise."""
    if not dataclasses.is_dataclass(value):
        return value
    fields = [field for field in dataclasses.fields(value) if field.metadata.get("pytree_node", True)]
    return {field.name: _fields(getattr(value, field.name)) for field in fields}


def _name_of_class(metric: Any) -> str | None:
    """Where to find the class of a metric; of one that clu made of another, such as `from_output`, where that is."""
    for cls in type(metric).__mro__:
        name = f"{cls.__module__}:{cls.__qualname__}"
        if _class_of_name(name) is not None:
            return name
        if cls.__module__ != clu_metrics.__name__:
            break
    return None


def _class_of_name(name: str | None) -> Any:
    """The metric class of a name among the modules that are loaded; None where there is none. Imports nothing."""
    module, _, path = (name or "").partition(":")
    found: Any = sys.modules.get(module)
    for each in path.split("."):
        found = getattr(found, each, None)
    bases = clu_metrics.Metric, clu_metrics.Collection
    return found if isinstance(found, type) and issubclass(found, bases) and found not in bases else None


def as_states_like(kept: list[Any], values: list[Any]) -> list[Any]:
    """The values out of a checkpoint as objects of the class of those that came after."""
    if not (kept and values and isinstance(kept[0], _KeptMetric)) or isinstance(values[0], _KeptMetric):
        return kept
    return [_with_fields(values[0], each.fields) if isinstance(each, _KeptMetric) else each for each in kept]


def _with_fields(metric: Any, fields: Any) -> Any:
    if not dataclasses.is_dataclass(metric):
        return fields
    inner = {name: _with_fields(getattr(metric, name), value) for name, value in fields.items()}
    return dataclasses.replace(metric, **inner)  # pyright: ignore[reportArgumentType]


def _is_small(value: Any) -> bool:
    if isinstance(value, types.MetricWithMetadata):
        return value.type in (types.MetricType.SCALAR, types.MetricType.TEXT)
    return is_metric(value) or np.ndim(value) == 0


def ready_scalars(outputs: Mapping[str, Any]) -> dict[str, Any]:
    """The scalars of a step's outputs, on the host; nothing while one of them is still being computed."""
    scalars = _scalar_values(outputs)
    if all(map(is_ready, scalars.values())):
        return fetch(scalars)
    return {}


def newest_scalars(outputs: Mapping[str, Any]) -> dict[str, Any]:
    """The scalars of the newest step, by name, of outputs on the host."""
    return _scalar_values({name: value[-1] for name, value in outputs.items() if isinstance(value, list) and value})


def _scalar_values(outputs: Mapping[str, Any]) -> dict[str, Any]:
    values = {name: _value_of(value) for name, value in outputs.items() if not is_metric(value)}
    return {name: value for name, value in values.items() if np.ndim(value) == 0 and value is not None}


@functools.cache
def is_metric_class(kind: type) -> bool:
    """Whether the values of a class are states of `clu.metrics`."""
    return issubclass(kind, clu_metrics.Metric | clu_metrics.Collection | _KeptMetric)


def is_metric(value: Any) -> bool:
    """Whether a value is a state of `clu.metrics`."""
    return is_metric_class(type(value))


def merges_on_host(metric: Any) -> bool:
    """Whether a state collects values, so that it grows with each merge and can't be compiled."""
    is_collecting = lambda node: isinstance(node, clu_metrics.CollectingMetric)
    return any(is_collecting(leaf) for leaf in jax.tree.leaves(metric, is_leaf=is_collecting))


def merge(states: Sequence[Any]) -> Any:
    """One `clu.metrics` state of several, from the first to the last."""
    return functools.reduce(lambda merged, state: merged.merge(state), states)


def merge_if_metrics(values: list[Any]) -> list[Any]:
    """The values, merged into one if they are `clu.metrics` states whose class is known."""
    if len(values) < 2 or isinstance(values[-1], _KeptMetric) or not all(map(is_metric, values)):
        return values
    return [merge(as_states_like(values, values[-1:]))]


def summarize(outputs: types.Output) -> dict[str, float]:
    """The scalars that a loop's outputs come to.

    A list of scalars becomes its example-weighted mean, `sum(n_i v_i) / sum(n_i)` in float64, with `n_i` the number of
    examples of step `i` (all 1 where `outputs` is a plain dict). `clu.metrics` states are merged and computed once, a
    `Collection` named `eval` with a field `loss` under `eval/loss`. Plain numbers stay. Other values are left out:
    see `media`.

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
        are_alike = _numbers_alike(values)
        values = values if are_alike else [_value_of(item) for item in values]
        present = values if are_alike else [item for item in values if item is not None]
        if present and (are_alike or all(map(_is_number, present))):
            has_weights = isinstance(value, list) and len(num_examples) == len(values)
            scalars[name] = _weighted_mean(values, num_examples if has_weights else [1] * len(values))
    return scalars


def _are_read(value: Any) -> bool:
    """Whether a value is on the host for sure: a list of a loop's, or a statistic."""
    return _numbers_alike(value) if isinstance(value, list) else isinstance(value, int | float)


def _numbers_alike(values: Sequence[Any]) -> bool:
    """Whether all are NumPy numbers of one type, as those of a loop's steps are; to look at each takes longer."""
    kinds = {*map(type, values)}
    return len(kinds) == 1 and issubclass(kinds.pop(), np.floating | np.integer | np.bool_)


def _weighted_mean(values: Sequence[Any], weights: Sequence[int]) -> float:
    """The mean of the values that are not None; those of an empty batch, often NaN, have no weight."""
    if not (all(weights) and _numbers_alike(values)):
        pairs = [(float(v), n) for v, n in zip(values, weights, strict=True) if v is not None and n]
        if not pairs:
            return float("nan")
        values, weights = zip(*pairs, strict=True)
    numbers, counts = np.array(values, np.float64), np.array(weights, np.float64)
    return float((numbers * counts).sum() / counts.sum())  # As `np.average` does, in a third of the time.


def _is_number(value: Any) -> bool:
    if isinstance(value, np.generic):  # Among them bfloat16, which is no np.number.
        return jnp.issubdtype(value.dtype, jnp.floating) or value.dtype.kind in "iub"
    return isinstance(value, bool | int | float)


def media(outputs: types.Output) -> dict[str, types.MetricWithMetadata]:
    """The values of a loop's outputs that are no scalars, each with its kind.

    Histograms, and arrays without metadata, hold the values of all steps; of images and the like, the last step's
    stand for the loop. An array `[N, H, W, C]` without metadata, C being 1, 3 or 4, is taken for images.
    """
    return _media(_reduced(outputs))


def scalars_and_media(outputs: types.Output) -> tuple[dict[str, float], dict[str, types.MetricWithMetadata]]:
    """What `summarize` and `media` return, with each `clu.metrics` state computed once for both."""
    reduced = _reduced(outputs)
    return _scalars(reduced, outputs), _media(reduced)


def _media(reduced: Mapping[str, Any]) -> dict[str, types.MetricWithMetadata]:
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
    return found


def _reduced(outputs: types.Output) -> dict[str, Any]:
    """The outputs on the host, with `clu.metrics` states merged and computed."""
    reduced, given = {}, dict(outputs or {})
    given.update(fetch({name: value for name, value in given.items() if not _are_read(value)}))
    for name in sorted(given):
        value = given[name]
        values = value if isinstance(value, list) else [value]
        if name == types.STOP_LOOP:
            continue
        if not values or not all(map(is_metric, values)):
            reduced[name] = value
            continue
        *others, last = merge_if_metrics(values)
        if others:
            _say_lost(name)
            continue
        computed = last.computed if isinstance(last, _KeptMetric) else fetch(last.compute())
        if computed is None:
            continue
        fields = computed if isinstance(computed, Mapping) else {None: computed}
        reduced.update({name if field is None else f"{name}/{field}": number for field, number in fields.items()})
    return reduced


@functools.cache  # Once.
def _say_lost(name: str) -> None:
    logging.warning(
        "The output %r is left out: a checkpoint has kept two parts of it, of a clu metric whose class can't be found, "
        "and no step came after to tell it. Define the class at the top of a module.",
        name,
    )


def _value_of(value: Any) -> Any:
    """The value inside scalar metadata; other values as they are."""
    if isinstance(value, types.MetricWithMetadata) and value.type is types.MetricType.SCALAR:
        return value.value
    return value
