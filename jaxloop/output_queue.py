"""The queue that moves the outputs of a loop's steps from the devices to the host.

A loop pushes the outputs of its steps into an `OutputQueue`, which returns them some steps later, as columns. The queue
also limits how far the host runs ahead of the devices, and merges `clu.metrics` states on the devices.
"""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from jaxloop import metrics, timing, types
from jaxloop.structures import PerStructure

CHUNK_SIZE = 32
"""The number of steps whose scalars are copied together from an accelerator. For fewer, compiling isn't worthwhile."""


def chunk_size(max_steps_in_flight: int) -> int:
    """Returns the number of steps to dispatch before handling their outputs: at most half of `max_steps_in_flight`."""
    return min(CHUNK_SIZE, -(-max_steps_in_flight // 2))


@final
class Arrived:
    """Host-side outputs of consecutive steps, as columns: one list per name, with one value per step.

    >>> arrived = Arrived()
    >>> arrived.add({"loss": [3.0, 2.0]}, num_steps=2)
    >>> arrived.rows()
    [{'loss': 3.0}, {'loss': 2.0}]

    Attributes:
      blocks: Pairs `(columns, num_steps)`, in order. All steps in a block report the same names. The columns are None
        if the steps have no outputs.
    """

    def __init__(self, blocks: Iterable[tuple[dict[str, Any] | None, int]] = ()):
        self.blocks: list[tuple[dict[str, Any] | None, int]] = list(blocks)

    def __bool__(self) -> bool:
        return bool(self.blocks)

    def add(self, columns: dict[str, Any] | None, num_steps: int) -> None:
        """Appends steps that report the same names. `columns` is None if they have no outputs."""
        self.blocks.append((columns, num_steps))

    def rows(self) -> list[types.Output]:
        """Returns a list with the outputs of each step."""
        rows: list[types.Output] = []
        for columns, num_steps in self.blocks:
            if columns is None:
                rows += [None] * num_steps
            else:
                rows += [{name: column[i] for name, column in columns.items()} for i in range(num_steps)]
        return rows

    def add_to(self, outputs: dict[str, Any]) -> None:
        """Appends the steps' values to the lists in a loop's outputs."""
        for columns, _ in self.blocks:
            for name, column in (columns or {}).items():
                if name in outputs:
                    outputs[name].extend(column)
                else:
                    outputs[name] = list(column)


def split_block(block: tuple[Any, int], num_steps: int) -> tuple[Any, Any]:
    """Splits an item of `Arrived.blocks` after its first `num_steps` steps."""
    columns, number = block
    first, others = (
        columns and {name: column[part] for name, column in columns.items()}
        for part in (slice(num_steps), slice(num_steps, None))
    )
    return (first, num_steps), (others, number - num_steps)


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Block:
    """The on-device outputs of several steps that were dispatched together.

    The leading axis of each array indexes the steps.
    """

    outputs: types.Output
    num_steps: int

    def newest_scalars(self) -> dict[str, Any]:
        """Fetches the scalars of the last step. Returns `{}` if any of them is still being computed."""
        arrays = {name: value for name, value in (self.outputs or {}).items() if getattr(value, "ndim", 0) == 1}
        if not all(map(metrics.is_ready, arrays.values())):
            return {}
        return {name: value[-1] for name, value in metrics.fetch(arrays).items()}

    def arrive(self, fetched: types.Output, arrived: Arrived) -> None:
        """Appends the outputs to `arrived`. The caller has already copied them to the host, as `fetched`."""
        columns = fetched and {name: _unstacked(value, self.num_steps) for name, value in fetched.items()}
        arrived.add(columns, self.num_steps)


def _unstacked(value: Any, number: int) -> Sequence[Any]:
    if isinstance(value, np.ndarray):
        return list(value)  # If it has one axis, the items are scalars.
    leaves, structure = jax.tree.flatten(value)
    if not leaves:
        return [value] * number
    return [jax.tree.unflatten(structure, each) for each in zip(*leaves, strict=True)]


class _Chunk:
    """The outputs of several steps that are being moved to the host.

    Args:
      outputs: The on-device outputs of each step. Steps that were dispatched together share a `Block`.
      num_steps: The number of steps.
    """

    def __init__(self, outputs: "list[types.Output | Block]", num_steps: int):
        self.outputs, self.num_steps = outputs, num_steps
        self._stacked: dict[str, jax.Array] = {}
        self._parts: list[Any] = []

    def has_only_scalars(self) -> bool:
        """Returns whether the steps report only scalars."""
        newest = self.outputs[-1]
        axes = 1 if isinstance(newest, Block) else 0
        return all(getattr(leaf, "ndim", 0) <= axes for leaf in jax.tree.leaves(_outputs_of(newest)))

    def is_computed(self) -> bool:
        """Returns whether the devices have computed the last step."""
        return all(map(metrics.is_ready, jax.tree.leaves(_outputs_of(self.outputs[-1]))))

    def send(self) -> None:
        """Starts copying all outputs to the host, without waiting.

        If the chunk is full, scalars that all steps report are copied as one array.
        """
        if len(self.outputs) == CHUNK_SIZE and not any(isinstance(outputs, Block) for outputs in self.outputs):
            columns = _columns_of_scalars(self.outputs)  # pyright: ignore[reportArgumentType]
            self._stacked = _stack(columns) if columns else {}
        for leaf in jax.tree.leaves(self.on_devices()):
            if isinstance(leaf, jax.Array):
                leaf.copy_to_host_async()

    def on_devices(self) -> Any:
        """Returns the arrays to read, in the structure that `arrive` expects."""
        columns = _columns_if_alike(self.outputs)
        if columns is not None:
            self._parts = [self.outputs]
            return self._stacked, [_without(columns, self._stacked)]
        self._parts = [list(part) for _, part in itertools.groupby(self.outputs, _kind)]
        return self._stacked, [self._to_read(part) for part in self._parts]

    def _to_read(self, part: list[Any]) -> Any:
        first = part[0]
        if isinstance(first, Block):
            return first.outputs
        return first and {name: [row[name] for row in part] for name in first if name not in self._stacked}

    def arrive(self, on_host: Any, arrived: Arrived) -> None:
        """Appends the outputs to `arrived`. `on_host` is a host copy of the result of `on_devices`."""
        stacked, fetched = on_host
        begin = 0
        for part, columns in zip(self._parts, fetched, strict=True):
            first, end = part[0], begin + len(part)
            if isinstance(first, Block):
                first.arrive(columns, arrived)
            elif not stacked:
                arrived.add(columns, len(part))
            else:
                whole = {name: columns[name] if name in columns else list(stacked[name][begin:end]) for name in first}
                arrived.add(whole, len(part))
            begin = end


def _outputs_without(outputs: "types.Output | Block", names: Iterable[str]) -> "types.Output | Block":
    if isinstance(outputs, Block):
        return Block(_without(outputs.outputs, names), outputs.num_steps)
    return _without(outputs, names)


def _is_plain(outputs: "types.Output | Block") -> bool:
    axes, values = (1, outputs.outputs) if isinstance(outputs, Block) else (0, outputs)
    if not values or types.STOP_LOOP in values:
        return not values
    return all(isinstance(value, jax.Array) and value.ndim == axes for value in values.values())


def _outputs_of(outputs: "types.Output | Block") -> types.Output:
    return outputs.outputs if isinstance(outputs, Block) else outputs


def _columns_if_alike(rows: "Sequence[types.Output | Block]") -> dict[str, list[Any]] | None:
    """Returns the outputs of steps as columns; None if they don't all have the same names."""
    if not rows or not isinstance(rows[0], dict):
        return None
    try:
        columns = {name: [row[name] for row in rows] for name in rows[0]}  # pyright: ignore
        # Each row has all the names of the first row. If the total number of names matches, no row has other names.
        return columns if sum(map(len, rows)) == len(columns) * len(rows) else None  # pyright: ignore
    except (KeyError, TypeError):
        return None


def _kind(outputs: "types.Output | Block") -> Any:
    """Returns a key for grouping consecutive steps that report the same names."""
    return outputs.keys() if isinstance(outputs, dict) else outputs


def _columns_of_scalars(chunk: Sequence[types.Output]) -> dict[str, list[jax.Array]]:
    """Returns the on-device values, by name, of the outputs that are scalars of one dtype in all steps."""
    columns = {}
    for name, first in (chunk[0] or {}).items():
        values = [outputs.get(name) if outputs else None for outputs in chunk]
        scalars = [value for value in values if isinstance(value, jax.Array) and not value.ndim]
        is_whole = len(scalars) == len(values) and {value.dtype for value in scalars} == {first.dtype}
        if is_whole and isinstance(first.dtype, np.dtype):  # Excludes typed keys.
            columns[name] = scalars
    return columns


def _without(outputs: types.Output, names: Iterable[str]) -> types.Output:
    return outputs and {name: value for name, value in outputs.items() if name not in names}


_stack = jax.jit(lambda columns: {name: jnp.stack(values) for name, values in columns.items()})


@final
class OutputQueue:
    """Receives the outputs of a loop's steps, and returns them once they are on the host.

    The host reads values from the devices in `drain`, and whenever the devices hold the outputs of more than
    `max_steps_kept` steps. This bounds the memory used on the devices. If the devices share the host's memory, nothing
    needs to be copied, so the queue reads values soon after they are computed, while they are still in the CPU caches.
    The host waits only if it is more than `max_steps_in_flight` steps ahead, which bounds the number of pending steps.

    `clu.metrics` states are merged one at a time, in order. The result is therefore bit-identical, no matter how the
    steps are divided into chunks and queues.

    Args:
      max_steps_in_flight: The maximum number of pending steps on the devices.
      max_steps_kept: The maximum number of steps whose outputs stay on the devices if all outputs are scalars. If there
        are larger outputs, or if this is None, `max_steps_in_flight` is used instead.
      stopwatch: The stopwatch that measures the time spent waiting.
      sums: The merged `clu.metrics` states of an earlier queue, by name. Merging continues from them.
      is_on_host: Whether the devices share the host's memory. If None, this is detected automatically.

    Attributes:
      max_steps_in_flight: See above. It may be changed once `steps_per_dispatch` is known.
      newest: The outputs of the latest steps. Append to this list before calling `push`.
    """

    def __init__(
        self,
        max_steps_in_flight: int,
        max_steps_kept: int | None = None,
        stopwatch: timing.Stopwatch | None = None,
        sums: Mapping[str, Any] | None = None,
        is_on_host: bool | None = None,
    ):
        self.max_steps_in_flight: int = max_steps_in_flight
        self._chunk_size = chunk_size(max_steps_in_flight)
        self._max_kept = max(max_steps_in_flight, max_steps_kept or 0)
        self._sums_before = dict(sums or {})
        self._stopwatch = stopwatch or timing.Stopwatch()
        self._is_on_host = jax.default_backend() == "cpu" if is_on_host is None else is_on_host
        self.newest: list[types.Output | Block] = []
        self._steps = 0  # The number of steps in `newest`.
        self._chunks: list[_Chunk] = []  # The steps before `newest`.
        self._held = 0  # The number of steps in `_chunks`.
        self._num_outputs = 0  # The number of dispatches in `_chunks`.
        self._merged: dict[str, Any] = {}
        self._are_plain = True  # Whether all steps before `newest` are plain.
        # For each dispatch, an array to wait for and the number of steps; oldest first.
        self._in_flight: collections.deque[tuple[jax.Array | None, int]] = collections.deque()
        self._num_in_flight = 0

    @property
    def room(self) -> int:
        """The maximum number of steps to run before the next push."""
        return self._chunk_size - self._steps

    @property
    def num_computed(self) -> int:
        """The number of computed dispatches among those that may be pending. May be read from another thread."""
        return sum(metrics.is_ready(marker) for marker, _ in self._in_flight.copy())

    def push(self, num_steps: int, state: Any) -> Arrived:
        """Processes the outputs that were appended to `newest`, and returns the outputs that have arrived on the host.

        Args:
          num_steps: The number of steps whose outputs were appended. It may exceed `room` only if the steps were
            dispatched together.
          state: The state that the last of these steps returned. If the steps have no outputs, the queue waits for the
            state instead.
        """
        self._steps += num_steps
        self._wait(num_steps, state)
        arrived = Arrived()
        if self._steps < self._chunk_size:
            return arrived
        self.newest = self._split_off_metrics(self.newest)
        chunk = _Chunk(self.newest, self._steps)
        if not self._is_on_host:
            chunk.send()
        elif self._num_outputs >= self._chunk_size and all(chunk.is_computed() for chunk in self._chunks):
            self._take_chunks(arrived, metrics.view)
        max_kept = self._max_kept if chunk.has_only_scalars() else self.max_steps_in_flight
        if self._held + self._steps >= max_kept:
            self._take_chunks(arrived, metrics.fetch)
        self._chunks.append(chunk)
        self._held += chunk.num_steps
        self._num_outputs += len(chunk.outputs)
        self.newest, self._steps = [], 0
        return arrived

    def _wait(self, num_steps: int, state: Any) -> None:
        """Waits until the next steps can be dispatched without exceeding `max_steps_in_flight`."""
        newest = _outputs_of(self.newest[-1])
        marker = next((leaf for leaf in jax.tree.leaves(newest) if isinstance(leaf, jax.Array)), None)
        self._in_flight.append((marker, num_steps))
        self._num_in_flight += num_steps
        while self._num_in_flight > self.max_steps_in_flight - self._chunk_size and self._in_flight:
            marker, num_steps = self._in_flight.popleft()
            self._num_in_flight -= num_steps
            before = self._stopwatch.switch("device")
            try:
                metrics.wait(state if marker is None else marker)
            finally:
                self._stopwatch.switch(before)
            if marker is None:  # That step's state has been donated since, so this waited for the latest one.
                self._in_flight.clear()
                self._num_in_flight = 0

    def _take_chunks(self, arrived: Arrived, read: Callable[[Any], Any]) -> None:
        self._read(self._chunks, arrived, read)
        self._chunks, self._held, self._num_outputs = [], 0, 0

    def _read(self, chunks: Sequence[_Chunk], arrived: Arrived, read: Callable[[Any], Any], others: Any = None) -> Any:
        with self._stopwatch.counting("device"):
            *on_host, others = read([*(chunk.on_devices() for chunk in chunks), others])
        for chunk, each in zip(chunks, on_host, strict=True):
            chunk.arrive(each, arrived)
        return others

    def drain(self, *, keep_sums: bool = False) -> tuple[Arrived, dict[str, Any]]:
        """Waits for all outputs. Returns them with a dict of the `clu.metrics` states merged since the last `drain`.

        With `keep_sums`, merging continues from these states, so the next `drain` includes them.
        """
        # The queue is emptied only after the read, so an interrupted read loses nothing.
        self.newest, arrived = self._split_off_metrics(self.newest), Arrived()
        merged = self._read([*self._chunks, _Chunk(self.newest, self._steps)], arrived, metrics.fetch, self._merged)
        if keep_sums:
            self._sums_before.update(self._merged)
        else:
            self._sums_before = {}
        self._in_flight.clear()
        self._chunks, self.newest, self._merged = [], [], {}
        self._steps = self._held = self._num_outputs = self._num_in_flight = 0
        return arrived, merged

    def are_plain(self) -> bool:
        """Returns whether all steps so far reported only scalar arrays, and none reported `STOP_LOOP`."""
        return self._are_plain and all(map(_is_plain, self.newest))

    def newest_scalars(self) -> dict[str, Any]:
        """Returns the scalars of the latest step that has been computed but not read yet. Never blocks."""
        for outputs in self._newest_first():
            is_block = isinstance(outputs, Block)
            scalars = outputs.newest_scalars() if is_block else metrics.ready_scalars(outputs or {})
            if scalars:
                return scalars
        return {}

    def _newest_first(self) -> "Iterator[types.Output | Block]":
        yield from reversed(self.newest)
        for chunk in reversed(self._chunks):
            yield from reversed(chunk.outputs)

    # States of clu.metrics -----------------------------------------------------------------------

    def _split_off_metrics(self, chunk: "list[types.Output | Block]") -> "list[types.Output | Block]":
        """Merges a chunk's `clu.metrics` states on the devices, and returns its other outputs."""
        columns = _columns_if_alike(chunk)
        if columns is None:
            self._are_plain &= all(map(_is_plain, chunk))
        else:
            kinds = {kind for column in columns.values() for kind in set(map(type, column))}
            # Arrays from one compiled function have the same axes, so it is enough to check the last step.
            self._are_plain &= all(issubclass(kind, jax.Array) for kind in kinds) and _is_plain(chunk[-1])
            if not any(map(metrics.is_metric_class, kinds)):
                return chunk
        trees = [_outputs_of(outputs) for outputs in chunk]
        names = {name for tree in trees for name, value in (tree or {}).items() if metrics.is_metric(value)}
        if not names:
            return chunk
        for name in sorted(names):
            states = []
            for outputs, tree in zip(chunk, trees, strict=True):
                if not tree or name not in tree:
                    continue
                if isinstance(outputs, Block):
                    self._merge(name, states)
                    self._merge_block(name, tree[name])
                    states = []
                else:
                    states.append(tree[name])
            self._merge(name, states)
        return [_outputs_without(outputs, names) for outputs in chunk]

    def _sums(self, name: str, states: list[Any]) -> list[Any]:
        """Returns a list with the sum so far, converted to the class of `states`; an empty list if there is no sum."""
        found = [sums[name] for sums in (self._merged, self._sums_before) if name in sums][:1]
        return metrics.as_states_like(found, states)

    def _merge(self, name: str, states: list[Any]) -> None:
        if not states:
            return
        states = [*self._sums(name, states), *states]
        if any(map(metrics.merges_on_host, states)):
            self._merged[name] = metrics.merge(metrics.fetch(states))
        elif len(states) >= self._chunk_size:
            self._merged[name] = _merge_jitted(states)
        else:  # Merge one by one, because compiling for each length of the last chunk would take longer.
            self._merged[name] = functools.reduce(lambda a, b: _merge_jitted([a, b]), states)

    def _merge_block(self, name: str, stacked: Any) -> None:
        before = self._sums(name, [stacked])
        if metrics.merges_on_host(stacked):
            self._merged[name] = metrics.merge([*metrics.fetch(before), *_unstacked(metrics.fetch(stacked), 0)])
        else:
            self._merged[name] = _merge_stacked(before, stacked)


_merge_jitted = PerStructure(lambda: jax.jit(lambda states: metrics.merge(states)))
_merge_stacked = PerStructure(lambda: jax.jit(lambda before, stacked: _merge_along_axis(before, stacked)))


def _merge_along_axis(before: Sequence[Any], stacked: Any) -> Any:
    """Merges the states in `before`, followed by those along the leading axis of `stacked`, in order."""
    first, others = (jax.tree.map(lambda leaf, part=part: leaf[part], stacked) for part in (0, slice(1, None)))
    fold = lambda sums, state: (sums.merge(state), None)
    return jax.lax.scan(fold, metrics.merge([*before, first]), others)[0]
