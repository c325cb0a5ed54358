"""The outputs of the latest steps, while they are on the devices."""

import collections
import contextlib
import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np

from jaxloop import metrics, types
from jaxloop.base import timing
from jaxloop.base.structures import PerStructure

CHUNK_SIZE = 32
"""The maximum number of steps whose outputs are handled together."""
_MOST_KEPT = 1024  # The scalars of at most this many steps stay on an accelerator.


@final
class Block(NamedTuple):
    """The outputs of several steps from one dispatch, stacked along a new leading axis."""

    outputs: types.Output
    num_steps: int


@final
class Chunk(NamedTuple):
    """Outputs of several steps: groups of consecutive steps that report the same names, as columns.

    A column is a list with one value per step, or a stacked pytree.
    """

    groups: list[tuple[dict[str, Any] | None, int]]
    examples: list[int]


@final
class Cut(NamedTuple):
    """The end of a segment, with its merged `clu.metrics` states."""

    sums: dict[str, Any]


@final
class InFlight:
    """The dispatches that the devices may not have completed yet.

    Args:
      stopwatch: Tracks how the time is spent.

    Attributes:
      limit: The number of steps by which the host may run ahead.
      chunk: The number of steps whose outputs are handled together.
    """

    def __init__(self, stopwatch: timing.Stopwatch):
        self.set_limit(64)
        self._stopwatch = stopwatch
        self._markers: collections.deque[tuple[Any, int]] = collections.deque()
        self._num_steps = 0

    def set_limit(self, limit: int) -> None:
        """Sets the number of steps by which the host may run ahead."""
        self.limit: int = limit
        self.chunk: int = min(CHUNK_SIZE, -(-limit // 2))

    def add(self, outputs: types.Output, num_steps: int, state: Any) -> None:
        """Adds a dispatch, and waits if the host is too far ahead. `state` is the state after it."""
        marker = next((leaf for leaf in jax.tree.leaves(outputs) if isinstance(leaf, jax.Array)), None)
        self._markers.append((marker, num_steps))
        self._num_steps += num_steps
        while self._num_steps > self.limit - self.chunk and self._markers:
            marker, number = self._markers.popleft()
            self._num_steps -= number
            before = self._stopwatch.switch("device")
            try:
                metrics.wait(state if marker is None else marker)
            finally:
                self._stopwatch.switch(before)
            if marker is None:  # That step's state has been donated since, so this waited for the latest one.
                self.clear()

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context manager that times a wait for the devices."""
        return self._stopwatch.counting("device")

    def clear(self) -> None:
        """Forgets all dispatches, because they are completed."""
        self._markers.clear()
        self._num_steps = 0

    @property
    def num_computed(self) -> int:
        """The number of completed dispatches. May be read from another thread."""
        return sum(metrics.is_ready(marker) for marker, _ in self._markers.copy())


@final
class Pending:
    """The outputs of the latest steps, in a queue of chunks and cuts, until they are taken.

    Args:
      stopwatch: Tracks how the time is spent.

    Attributes:
      newest: The outputs of the latest steps, which are not in the queue yet. Programs append to this list.
      in_flight: The dispatches that may not be completed.
      num_steps: The number of steps whose outputs were not taken yet.
      names: The names that steps have reported; None before the first step.
      are_plain: True if there are outputs, and all steps report the same scalars, without `STOP_LOOP`.
    """

    def __init__(self, stopwatch: timing.Stopwatch):
        self.in_flight: InFlight = InFlight(stopwatch)
        self.clear()

    def clear(self) -> None:
        """Forgets all outputs."""
        self.newest: list[types.Output | Block] = []
        self.names: set[str] | None = None
        self.are_plain: bool = False
        self.num_steps: int = 0
        self._examples: list[int] = []  # Of the steps in `newest`.
        self._queue: list[Chunk | Cut] = []
        self._sums: dict[str, Any] = {}  # Of the steps since the last cut.
        self.in_flight.clear()

    @property
    def room(self) -> int:
        """The number of steps to run before the next `push`."""
        return self.in_flight.chunk - len(self._examples)

    def account(self, examples: Sequence[int]) -> None:
        """Accepts the steps that were appended to `newest`."""
        self._examples += examples
        self.num_steps += len(examples)

    def push(self, num_steps: int, state: Any) -> int:
        """Waits if the host is too far ahead after these steps. Returns the length of the queue to take now."""
        newest = self.newest[-1]
        values = _values_of(newest)
        self.in_flight.add(values, num_steps, state)
        self._look_at(values or {}, 1 if isinstance(newest, Block) else 0)
        if self.room > 0:
            return 0
        self.send()
        most = _MOST_KEPT if self.are_plain and not _is_on_cpu() else 0
        return len(self._queue) - 1 if self.num_steps >= max(most, self.in_flight.limit) else 0

    def _look_at(self, values: Mapping[str, Any], axes: int) -> None:
        """Notes whether the newest outputs are plain. One compiled function returns the same axes in all steps."""
        if self.names is None:
            self.names, self.are_plain = {*values}, types.STOP_LOOP not in values
        self.are_plain &= all([isinstance(value, jax.Array) and value.ndim == axes for value in values.values()])

    def send(self) -> None:
        """Moves `newest` to the queue as a chunk."""
        groups, names = [], self.names or set()
        for columns, number in _groups(self.newest):
            rest = {}
            self.are_plain &= (columns or {}).keys() == names
            self.names = names = names.union(columns or ())
            for name, column in (columns or {}).items():
                if metrics.is_metric(column[0] if isinstance(column, list) else column):
                    self._merge(name, column)
                else:
                    rest[name] = column
            if not _is_on_cpu() and number == CHUNK_SIZE and all(map(_is_stackable, rest.values())):
                rest = _stack(rest)  # One transfer per name.
            groups.append((columns and rest, number))
        if not _is_on_cpu():
            for leaf in jax.tree.leaves(groups):
                if isinstance(leaf, jax.Array):
                    leaf.copy_to_host_async()
        self._queue.append(Chunk(groups, self._examples))
        self.newest, self._examples = [], []

    def _merge(self, name: str, column: Any) -> None:
        is_list = isinstance(column, list)
        first = column[0] if is_list else column
        before = metrics.as_states_like([self._sums[name]] if name in self._sums else [], [first])
        if metrics.merges_on_host(first):
            states = metrics.fetch(column if is_list else unstacked(column, 0))
            self._sums[name] = metrics.merge([*metrics.fetch(before), *states])
        elif not is_list:
            self._sums[name] = _merge_stacked(before, column)
        elif len(column) >= self.in_flight.chunk:
            self._sums[name] = _merge_states([*before, *column])
        else:  # Compiling for each length would take longer.
            self._sums[name] = functools.reduce(lambda a, b: _merge_states([a, b]), [*before, *column])

    def cut(self) -> None:
        """Ends a segment here, without waiting."""
        if self._examples:
            self.send()
        if not (self._queue and isinstance(self._queue[-1], Cut)):
            self._queue.append(Cut(self._sums))
            self._sums = {}

    def take(self, number: int | None = None) -> list[Chunk | Cut]:
        """Waits for the first `number` elements of the queue, and removes them. If `number` is None, takes all."""
        if number is None and self._examples:
            self.send()
        taken = self._queue[:number]
        if taken:
            read = metrics.fetch if number is None or not _is_on_cpu() else metrics.view
            with self.in_flight.waiting():
                values = read([each.groups if isinstance(each, Chunk) else each.sums for each in taken])
            pairs = zip(taken, values, strict=True)
            taken = [each._replace(groups=found) if isinstance(each, Chunk) else Cut(found) for each, found in pairs]
            self.num_steps -= sum([len(each.examples) for each in taken if isinstance(each, Chunk)])
            del self._queue[:number]  # Only now, so an interrupted read loses nothing.
        if not self._queue:
            self.in_flight.clear()
        return taken

    def sums(self) -> dict[str, Any]:
        """Returns the merged `clu.metrics` states since the last cut, on the host."""
        return metrics.fetch(self._sums)

    def resume(self, sums: dict[str, Any], names: set[str] | None) -> None:
        """Sets the merged states since the last cut, and the names that steps have reported, before the first step."""
        self._sums, self.names = sums, names

    def newest_scalars(self) -> dict[str, Any]:
        """Returns the scalars of the latest computed step that was not taken yet. Never waits."""
        for outputs in reversed(self.newest):
            if found := metrics.ready_scalars(_last_of(outputs) or {}):
                return found
        for chunk in reversed(self._queue):
            for columns, number in reversed(chunk.groups if isinstance(chunk, Chunk) else ()):
                last = {name: _at(column, number - 1) for name, column in (columns or {}).items()}
                if found := metrics.ready_scalars(last):
                    return found
        return {}


def rows_of(groups: Iterable[tuple[dict[str, Any] | None, int]]) -> list[types.Output]:
    """Returns the outputs of each step, given groups of steps that have arrived on the host."""
    rows: list[types.Output] = []
    for columns, number in groups:
        lists = columns and {name: unstacked(column, number) for name, column in columns.items()}
        rows += [lists and {name: column[index] for name, column in lists.items()} for index in range(number)]
    return rows


def _values_of(outputs: types.Output | Block) -> types.Output:
    return outputs.outputs if isinstance(outputs, Block) else outputs


def _last_of(outputs: types.Output | Block) -> types.Output:
    if not isinstance(outputs, Block):
        return outputs
    return outputs.outputs and {name: _at(value, -1) for name, value in outputs.outputs.items()}


def _at(column: Any, index: int) -> Any:
    if isinstance(column, list):
        return column[index]
    return jax.tree.map(lambda leaf: np.asarray(leaf)[index] if metrics.is_ready(leaf) else leaf, column)


def _groups(rows: Sequence[Any]) -> list[tuple[dict[str, Any] | None, int]]:
    """Groups consecutive steps that report the same names."""
    if isinstance(rows[0], dict):
        with contextlib.suppress(KeyError, TypeError):
            columns = {name: [row[name] for row in rows] for name in rows[0]}
            if sum(map(len, rows)) == len(columns) * len(rows):  # No row has further names.
                return [(columns, len(rows))]
    groups = []
    for _, part in itertools.groupby(rows, lambda row: row.keys() if isinstance(row, dict) else id(row)):
        first, *others = part = list(part)
        if isinstance(first, Block):
            groups += [(each.outputs, each.num_steps) for each in part]
        else:
            groups.append((first and {name: [row[name] for row in part] for name in first}, 1 + len(others)))
    return groups


def unstacked(column: Any, number: int) -> list[Any]:
    """Returns a column as a list with one value per step."""
    if isinstance(column, list):
        return column
    if isinstance(column, np.ndarray):
        return list(column)
    leaves, structure = jax.tree.flatten(column)
    if not leaves:
        return [column] * number
    return [jax.tree.unflatten(structure, each) for each in zip(*map(list, leaves), strict=True)]


def _is_stackable(column: Any) -> bool:
    if not isinstance(column, list) or not isinstance(column[0], jax.Array) or column[0].ndim:
        return False
    return len({getattr(value, "dtype", None) for value in column}) == 1 and not jnp.issubdtype(
        column[0].dtype, jax.dtypes.prng_key
    )


@functools.cache
def _is_on_cpu() -> bool:
    return jax.default_backend() == "cpu"


def _merge_along_axis(before: Sequence[Any], stacked: Any) -> Any:
    first, others = (jax.tree.map(lambda leaf, part=part: leaf[part], stacked) for part in (0, slice(1, None)))
    fold = lambda sums, state: (sums.merge(state), None)
    return jax.lax.scan(fold, metrics.merge([*before, first]), others)[0]


_stack = jax.jit(lambda columns: {name: jnp.stack(values) for name, values in columns.items()})
_merge_states = PerStructure(lambda: jax.jit(lambda states: metrics.merge(states)))
_merge_stacked = PerStructure(lambda: jax.jit(lambda before, stacked: _merge_along_axis(before, stacked)))
