"""From what steps report to what is written down: fetch, weigh, merge, summarize.

`fetch` is the one place where jaxloop reads device values. A loop pushes each step's outputs into an `OutputQueue`,
which copies them to the host in bounded chunks, behind the device's back, and merges `clu.metrics` states on the
device. `summarize` turns a loop's outputs into example-weighted scalars.
"""

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from clu import metrics as clu_metrics

from jaxloop import encoding, timing, types


def fetch(tree: Any) -> Any:
    """Reads a tree from the devices, waiting for it; scalars come as NumPy scalars."""
    return jax.tree.map(_unwrap_scalar, jax.device_get(tree))


def wait(tree: Any) -> None:
    """Waits until the devices have computed a tree, without reading it."""
    jax.block_until_ready(tree)


def _unwrap_scalar(leaf: Any) -> Any:
    return leaf[()] if isinstance(leaf, np.ndarray) and leaf.ndim == 0 else leaf


class LoopOutputs(dict[str, Any]):
    """The outputs of a loop: for each name the list of its values, one per step, in order, on the host.

    `clu.metrics` states are merged, so their list holds the merged states; statistics are plain numbers.

    Attributes:
      num_examples: for each step of the loop, how many examples its values stand for.
    """

    def __init__(self, values: Mapping[str, Any] | None = None, num_examples: Iterable[int] = ()):
        super().__init__(values or {})
        self.num_examples = list(num_examples)

    def copy(self) -> "LoopOutputs":
        """Outputs whose lists can grow without these."""
        lists = {name: list(value) if isinstance(value, list) else value for name, value in self.items()}
        return LoopOutputs(lists, self.num_examples)

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
            elif not isinstance(earlier, list) or not all(map(_is_small, values)):
                self[name] = list(values)
            elif len(earlier) == steps_before and len(values) == steps_later:
                self[name] = _as_in(earlier, values)
                self[name].extend(values)
            else:
                self[name] = merge_if_metrics([*earlier, *values])
        self.num_examples.extend(later.num_examples)

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
    if _is_metric(value):
        computed = None if _merges_on_host(value) else fetch(value.compute())
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


def _as_in(kept: list[Any], values: list[Any]) -> list[Any]:
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
    return _is_metric(value) or np.ndim(value) == 0


# From how many steps on their scalars are stacked: for less, to compile that takes longer than it saves.
_STACKED = 32


class _Block:
    """The outputs of several steps that were one dispatch, stacked on their leading axis.

    Args:
      outputs: on the devices; those under other names than `stacked` are the last step's.
      stacked: names.
      num_steps: how many.
    """

    def __init__(self, outputs: types.Output, stacked: Iterable[str], num_steps: int):
        self.outputs, self.stacked, self.num_steps = outputs, frozenset(stacked), num_steps

    def without(self, names: Iterable[str]) -> "_Block":
        return _Block(_without(self.outputs, dict.fromkeys(names)), self.stacked, self.num_steps)

    def newest_scalars(self) -> dict[str, Any]:
        """The scalars of the last step, on the host; nothing while one of them is still being computed."""
        arrays = {name: value for name, value in (self.outputs or {}).items() if getattr(value, "ndim", 0) == 1}
        if not all(value.is_ready() for value in arrays.values()):
            return {}
        return {name: value[-1] for name, value in fetch(arrays).items() if name in self.stacked}

    def rows(self, fetched: types.Output) -> list[types.Output]:
        """The outputs of each step, of the same on the host."""
        if fetched is None:
            return [None] * self.num_steps
        columns = {name: _unstacked(value) for name, value in fetched.items() if name in self.stacked}
        rows: list[types.Output] = [
            {name: column[i] for name, column in columns.items()} for i in range(self.num_steps)
        ]
        rows[-1] = {**(rows[-1] or {}), **(_without(fetched, columns) or {})}
        return rows


def _unstacked(value: Any) -> Sequence[Any]:
    if isinstance(value, np.ndarray):
        return list(value)  # Of one axis, its items are scalars.
    leaves, structure = jax.tree.flatten(value)
    return [jax.tree.unflatten(structure, each) for each in zip(*leaves, strict=True)]


class _Chunk:
    """The outputs of some steps on their way to the host: scalars that all of them have go as one array.

    Args:
      outputs: of each step, or of several as a block, on the devices.
    """

    def __init__(self, outputs: "list[types.Output | _Block]"):
        self.outputs = outputs
        self._columns: dict[str, jax.Array] = {}

    def send(self) -> None:
        """Begins to copy all to the host, without waiting for it."""
        if len(self.outputs) == _STACKED and not any(isinstance(outputs, _Block) for outputs in self.outputs):
            columns = _columns_of_scalars(self.outputs)  # pyright: ignore[reportArgumentType]
            self._columns = _stack(columns) if columns else {}
        for leaf in jax.tree.leaves(self.on_devices()):
            if isinstance(leaf, jax.Array):
                leaf.copy_to_host_async()

    def on_devices(self) -> Any:
        """What is to be read, for `rows`."""
        return self._columns, self._trees()

    def _trees(self) -> list[types.Output]:
        """What is not in the columns, as of now: a loop may add to the newest outputs until they are read."""
        trees = [outputs.outputs if isinstance(outputs, _Block) else outputs for outputs in self.outputs]
        if not self._columns:
            return trees
        has_more = any(len(tree or ()) > len(self._columns) for tree in trees)
        return [_without(tree, self._columns) for tree in trees] if has_more else []

    def rows(self, on_host: Any) -> list[types.Output]:
        """The outputs of each step, of what `on_devices` has given."""
        columns, others = on_host
        if not columns:
            pairs = zip(self.outputs, others, strict=True)
            rows = [outputs.rows(host) if isinstance(outputs, _Block) else [host] for outputs, host in pairs]
            return [row for each in rows for row in each]
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        if not others:
            return rows  # pyright: ignore[reportReturnType]
        both = [{**row, **(other or {})} for row, other in zip(rows, others, strict=True)]
        names = [list(outputs or ()) for outputs in self.outputs]  # pyright: ignore (here are no blocks)
        return [{name: row[name] for name in each} for row, each in zip(both, names, strict=True)]


def _columns_of_scalars(chunk: Sequence[types.Output]) -> dict[str, list[jax.Array]]:
    """For each name under which all steps have a scalar of one dtype, on the devices, its values."""
    columns = {}
    for name, first in (chunk[0] or {}).items():
        values = [outputs.get(name) if outputs else None for outputs in chunk]
        scalars = [value for value in values if isinstance(value, jax.Array) and not value.ndim]
        is_whole = len(scalars) == len(values) and {value.dtype for value in scalars} == {first.dtype}
        if is_whole and isinstance(first.dtype, np.dtype):  # No typed keys.
            columns[name] = scalars
    return columns


def _without(outputs: types.Output, names: Mapping[str, Any]) -> types.Output:
    return outputs and {name: value for name, value in outputs.items() if name not in names}


_stack = jax.jit(lambda columns: {name: jnp.stack(values) for name, values in columns.items()})


class OutputQueue:
    """The outputs of a loop's steps on their way from the devices to the host.

    While the devices work on one chunk of steps, the chunk before is copied; the host waits only when it is more than
    two chunks ahead. So the host reads no value before it has to, and neither the devices' memory nor their queue of
    pending steps grows.

    States of `clu.metrics` are merged one after the other, from the first to the last. So it does not matter to a bit
    of them where a chunk ends, nor whether another queue had begun.

    Args:
      chunk_size: steps in a chunk.
      stopwatch: counts the time spent waiting.
      sums: by name, the merged `clu.metrics` states that an earlier queue came to, to go on with.
    """

    def __init__(
        self, chunk_size: int, stopwatch: timing.Stopwatch | None = None, sums: Mapping[str, Any] | None = None
    ):
        self._chunk_size = chunk_size
        self._sums_before = dict(sums or {})
        self._stopwatch = stopwatch or timing.Stopwatch(lambda: 0.0)
        self._newest: list[types.Output | _Block] = []
        self._steps = 0  # Of the newest.
        self._copying = _Chunk([])
        self._merged: dict[str, Any] = {}
        self._last_of_chunk: Any = None

    def push(self, outputs: types.Output, state: Any) -> Sequence[types.Output]:
        """Takes the outputs of the next step; returns those that have arrived, in order.

        Args:
          outputs: what the step returned.
          state: the state that it returned, to wait for where there are no outputs.
        """
        self._newest.append(outputs)
        self._steps += 1
        return self._send(outputs, state) if self._steps >= self._chunk_size else ()

    def push_block(
        self, outputs: types.Output, stacked: Iterable[str], num_steps: int, state: Any
    ) -> Sequence[types.Output]:
        """As `push`, of several steps that were one dispatch.

        Args:
          outputs: under the names of `stacked` those of all the steps, on their leading axis; else the last step's.
          stacked: names.
          num_steps: how many.
          state: the state that the last of them returned.
        """
        self._newest.append(_Block(outputs, stacked, num_steps))
        self._steps += num_steps
        return self._send(outputs, state) if self._steps >= self._chunk_size else ()

    def _send(self, outputs: types.Output, state: Any) -> Sequence[types.Output]:
        with self._stopwatch.counting("device"):
            arrived = self._copying.rows(fetch(self._copying.on_devices()))
            # Also where there was nothing to fetch, the devices shall not fall further behind.
            wait(self._last_of_chunk)
            self._last_of_chunk = [leaf for leaf in jax.tree.leaves(outputs) if isinstance(leaf, jax.Array)]
            if not self._last_of_chunk:
                wait(state)
        self._copying, self._newest, self._steps = _Chunk(self._set_metrics_aside(self._newest)), [], 0
        self._copying.send()
        return arrived

    def drain(self, *, keep_sums: bool = False) -> tuple[Sequence[types.Output], dict[str, Any]]:
        """Waits for the rest; returns it and the merged `clu.metrics` states since the last time, if any came.

        With `keep_sums` it goes on with those sums, and returns them again with what comes.
        """
        # Emptied only once all is there: an interrupted read loses nothing.
        self._newest = self._set_metrics_aside(self._newest)
        with self._stopwatch.counting("device"):
            chunks = self._copying, _Chunk(self._newest)
            *on_host, merged = fetch((*(chunk.on_devices() for chunk in chunks), self._merged))
        arrived = [row for chunk, each in zip(chunks, on_host, strict=True) for row in chunk.rows(each)], merged
        if keep_sums:
            self._sums_before.update(self._merged)
        else:
            self._sums_before = {}
        self._copying, self._newest, self._merged, self._steps = _Chunk([]), [], {}, 0
        return arrived

    def newest_scalars(self) -> dict[str, Any]:
        """The scalars of the newest step on its way whose values are there already. Does not wait."""
        for outputs in reversed([*self._copying.outputs, *self._newest]):
            scalars = outputs.newest_scalars() if isinstance(outputs, _Block) else ready_scalars(outputs or {})
            if scalars:
                return scalars
        return {}

    def _set_metrics_aside(self, chunk: "list[types.Output | _Block]") -> "list[types.Output | _Block]":
        """Merges the `clu.metrics` states of a chunk on the device; returns its other outputs."""
        trees = [outputs.outputs if isinstance(outputs, _Block) else outputs for outputs in chunk]
        names = {name for tree in trees for name, value in (tree or {}).items() if _is_metric(value)}
        if not names:
            return chunk
        for name in sorted(names):
            states = []
            for outputs, tree in zip(chunk, trees, strict=True):
                if not tree or name not in tree:
                    continue
                if isinstance(outputs, _Block):
                    self._merge(name, states)
                    self._merge_block(name, tree[name])
                    states = []
                else:
                    states.append(tree[name])
            self._merge(name, states)
        return [
            outputs.without(names) if isinstance(outputs, _Block) else _without(outputs, dict.fromkeys(names))
            for outputs in chunk
        ]

    def _sums(self, name: str, states: list[Any]) -> list[Any]:
        """What there is of a name so far, none or one, as of the class of the states that come."""
        return _as_in([sums[name] for sums in (self._merged, self._sums_before) if name in sums][:1], states)

    def _merge(self, name: str, states: list[Any]) -> None:
        if not states:
            return
        states = [*self._sums(name, states), *states]
        if any(map(_merges_on_host, states)):
            self._merged[name] = _merge(fetch(states))
        elif len(states) >= self._chunk_size:
            self._merged[name] = _merge_jitted(states)
        else:  # One by one: compiling for each length of a last chunk would take longer.
            self._merged[name] = functools.reduce(lambda a, b: _merge_jitted([a, b]), states)

    def _merge_block(self, name: str, stacked: Any) -> None:
        before = self._sums(name, [stacked])
        if _merges_on_host(stacked):
            self._merged[name] = _merge([*fetch(before), *_unstacked(fetch(stacked))])
        else:
            self._merged[name] = _merge_stacked(before, stacked)


def ready_scalars(outputs: Mapping[str, Any]) -> dict[str, Any]:
    """The scalars of a step's outputs, on the host; nothing while one of them is still being computed."""
    scalars = _scalar_values(outputs)
    if all(getattr(value, "is_ready", lambda: True)() for value in scalars.values()):
        return fetch(scalars)
    return {}


def newest_scalars(outputs: LoopOutputs) -> dict[str, Any]:
    """The scalars of the newest step, by name, of outputs on the host."""
    return _scalar_values({name: value[-1] for name, value in outputs.items() if isinstance(value, list) and value})


def _scalar_values(outputs: Mapping[str, Any]) -> dict[str, Any]:
    values = {name: _value_of(value) for name, value in outputs.items() if not _is_metric(value)}
    return {name: value for name, value in values.items() if np.ndim(value) == 0 and value is not None}


def _is_metric(value: Any) -> bool:
    return isinstance(value, clu_metrics.Metric | clu_metrics.Collection | _KeptMetric)


def _merges_on_host(metric: Any) -> bool:
    is_collecting = lambda node: isinstance(node, clu_metrics.CollectingMetric)
    return any(is_collecting(leaf) for leaf in jax.tree.leaves(metric, is_leaf=is_collecting))


def _merge(states: Sequence[Any]) -> Any:
    return functools.reduce(lambda merged, state: merged.merge(state), states)


_merge_jitted = jax.jit(_merge)


@jax.jit
def _merge_stacked(before: Sequence[Any], stacked: Any) -> Any:
    """Merges, after `before`, the states along the leading axis of one, from the first to the last."""
    first, others = (jax.tree.map(lambda leaf, part=part: leaf[part], stacked) for part in (0, slice(1, None)))
    return jax.lax.scan(lambda sums, state: (sums.merge(state), None), _merge([*before, first]), others)[0]


def merge_if_metrics(values: list[Any]) -> list[Any]:
    """The values, merged into one if they are `clu.metrics` states whose class is known."""
    if len(values) < 2 or isinstance(values[-1], _KeptMetric) or not all(map(_is_metric, values)):
        return values
    return [_merge(_as_in(values, values[-1:]))]


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
        values = [_value_of(item) for item in (value if isinstance(value, list) else [value])]
        present = [item for item in values if item is not None]
        if present and all(map(_is_number, present)):
            has_weights = isinstance(value, list) and len(num_examples) == len(values)
            scalars[name] = _weighted_mean(values, num_examples if has_weights else [1] * len(values))
    return scalars


def _weighted_mean(values: Sequence[Any], weights: Sequence[int]) -> float:
    """The mean of the values that are not None; those of an empty batch, often NaN, have no weight."""
    pairs = [(float(v), n) for v, n in zip(values, weights, strict=True) if v is not None and n]
    if not pairs:
        return float("nan")
    present, numbers = zip(*pairs, strict=True)
    return float(np.average(np.array(present, np.float64), weights=numbers))


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
    reduced = {}
    for name, value in fetch(dict(outputs or {})).items():
        values = value if isinstance(value, list) else [value]
        if name == types.STOP_LOOP:
            continue
        if not values or not all(map(_is_metric, values)):
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
