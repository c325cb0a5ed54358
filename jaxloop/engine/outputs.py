"""The outputs of the steps: on the devices until they are read, then on the host, with a cursor for each reader."""

import collections
import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np

from jaxloop import metrics, types
from jaxloop.base import timing
from jaxloop.base.structures import PerStructure
from jaxloop.metrics import LoopOutputs
from jaxloop.step.nonfinite import Guard

CHUNK_SIZE = 32
"""The maximum number of steps whose outputs are handled together."""
_MOST_KEPT = 1024  # The scalars of at most this many steps stay on the devices.


@final
class Block(NamedTuple):
    """The outputs of several steps from one dispatch, stacked along a new leading axis."""

    outputs: types.Output
    num_steps: int


@final
class _Chunk(NamedTuple):
    """Outputs on the devices: groups of consecutive steps that report the same names, as columns.

    A column is a list with one value per step, or a stacked pytree.
    """

    groups: list[tuple[dict[str, Any] | None, int]]
    examples: list[int]
    dispatches: int


@final
class _Cut(NamedTuple):
    """The end of a segment, with its merged `clu.metrics` states."""

    position: int
    sums: dict[str, Any]


@final
class Outputs:
    """The outputs of a run. A position is a number of steps.

    A cut ends a segment. `clu.metrics` states are merged in step order within a segment, so everything that reads
    outputs, and every end of a loop, makes a cut. A checkpoint reads without a cut, so it changes no bits.

        | dropped | segment | segment | open segment | on the devices | newest |
                  ^ the cursor of a reader                                     ^ position

    Attributes:
      newest: The outputs of the latest steps. Append to this list, then call `push`.
      position: The number of steps so far.
      loop_start: The position at which the current loop began.
      update: A function that adds a step's outputs to the loop's outputs; None to append to lists.
      are_plain: True if there are outputs, and all steps report the same scalars, without `STOP_LOOP`.
      may_stop: True if any step of the current loop has reported `STOP_LOOP`.
      guard: The object that sees the columns as they arrive, and looks for NaN and infinity; None if nothing does.
    """

    def __init__(self, stopwatch: timing.Stopwatch, max_in_flight: int = 64):
        self._stopwatch = stopwatch
        self._is_on_host = jax.default_backend() == "cpu"
        self.set_limit(max_in_flight)
        self.update: Callable[[Any, types.Output], Any] | None = None
        self.guard: Guard | None = None
        self.reset()

    def reset(self) -> None:
        """Forgets all outputs."""
        self.newest: list[types.Output | Block] = []
        self.position: int = 0
        self.loop_start: int = 0
        self.may_stop: bool = False
        self.are_plain: bool = False
        self._names: Any = None  # Those that each step has reported so far.
        self._examples: list[int] = []  # Of the steps in `newest`.
        self._queue: list[_Chunk | _Cut] = []
        self._held = 0
        self._sums: dict[str, Any] = {}  # Of the open segment.
        self._segments: list[tuple[int, LoopOutputs]] = []
        self._open = LoopOutputs()
        self._updated: Any = LoopOutputs()  # The loop's outputs, if there is an `update`.
        self._in_flight: collections.deque[tuple[Any, int]] = collections.deque()
        self._num_in_flight = 0
        self._last_cut = 0
        self._dropped = 0  # The position before the first segment that is kept.

    def set_limit(self, max_in_flight: int, *, keeps: bool = True) -> None:
        """Sets the number of steps by which the host may run ahead, and whether outputs may stay on the devices."""
        self._max_in_flight, self._most_kept = max_in_flight, _MOST_KEPT if keeps else 0
        self._chunk_size = min(CHUNK_SIZE, -(-max_in_flight // 2))

    @property
    def room(self) -> int:
        """The number of steps to run before the next `push`."""
        return self._chunk_size - len(self._examples)

    # From the devices --------------------------------------------------------------------------------

    def account(self, examples: Sequence[int]) -> None:
        """Accepts the steps that were appended to `newest`."""
        self._examples += examples
        self.position += len(examples)

    def push(self, num_steps: int, state: Any) -> None:
        """Waits if the host is too far ahead after these steps, and reads outputs that have been computed."""
        self._wait(num_steps, state)
        self._look_at(self.newest[-1])
        if len(self._examples) < self._chunk_size:
            return
        self._send()
        *earlier, newest = self._queue
        dispatches = sum(each.dispatches for each in earlier if isinstance(each, _Chunk))
        if self._is_on_host and dispatches >= self._chunk_size and all(map(_is_computed, earlier)):
            self._read(earlier, metrics.view)
        limit = self._most_kept if _has_only_scalars(newest) else 0
        if self._held > max(limit, self._max_in_flight):
            self._read([each for each in self._queue if each is not newest], metrics.fetch)

    def _look_at(self, newest: types.Output | Block) -> None:
        """Notes whether the newest outputs are plain. One compiled function returns the same axes in all steps."""
        values, axes = _values_of(newest) or {}, 1 if isinstance(newest, Block) else 0
        if self._names is None:
            self._names, self.are_plain = values.keys(), types.STOP_LOOP not in values
        self.are_plain &= all(isinstance(value, jax.Array) and value.ndim == axes for value in values.values())

    def _wait(self, num_steps: int, state: Any) -> None:
        leaves = jax.tree.leaves(_values_of(self.newest[-1]))
        self._in_flight.append((next((leaf for leaf in leaves if isinstance(leaf, jax.Array)), None), num_steps))
        self._num_in_flight += num_steps
        while self._num_in_flight > self._max_in_flight - self._chunk_size and self._in_flight:
            marker, number = self._in_flight.popleft()
            self._num_in_flight -= number
            before = self._stopwatch.switch("device")
            try:
                metrics.wait(state if marker is None else marker)
            finally:
                self._stopwatch.switch(before)
            if marker is None:  # That step's state has been donated since, so this waited for the latest one.
                self._forget_in_flight()

    def _forget_in_flight(self) -> None:
        self._in_flight.clear()
        self._num_in_flight = 0

    @property
    def num_computed(self) -> int:
        """The number of computed dispatches among those that may be pending. May be read from another thread."""
        return sum(metrics.is_ready(marker) for marker, _ in self._in_flight.copy())

    def _send(self) -> None:
        """Moves `newest` to the queue as a chunk."""
        groups = []
        for columns, number in _groups(self.newest):
            self.are_plain &= (columns or {}).keys() == self._names
            rest = {}
            for name, column in (columns or {}).items():
                if metrics.is_metric(column[0] if isinstance(column, list) else column):
                    self._merge(name, column)
                else:
                    rest[name] = column
            if not self._is_on_host and number == CHUNK_SIZE and all(map(_is_stackable, rest.values())):
                rest = _stack(rest)  # One transfer per name.
            self.may_stop |= types.STOP_LOOP in rest
            groups.append((columns and rest, number))
        chunk = _Chunk(groups, self._examples, len(self.newest))
        if not self._is_on_host:
            for leaf in jax.tree.leaves(groups):
                if isinstance(leaf, jax.Array):
                    leaf.copy_to_host_async()
        self._queue.append(chunk)
        self._held += len(self._examples)
        self.newest, self._examples = [], []

    def _merge(self, name: str, column: Any) -> None:
        is_list = isinstance(column, list)
        first = column[0] if is_list else column
        before = metrics.as_states_like([self._sums[name]] if name in self._sums else [], [first])
        if metrics.merges_on_host(first):
            states = metrics.fetch(column if is_list else _unstacked(column, 0))
            self._sums[name] = metrics.merge([*metrics.fetch(before), *states])
        elif not is_list:
            self._sums[name] = _merge_stacked(before, column)
        elif len(column) >= self._chunk_size:
            self._sums[name] = _merge_states([*before, *column])
        else:  # Compiling for each length would take longer.
            self._sums[name] = functools.reduce(lambda a, b: _merge_states([a, b]), [*before, *column])

    def _read(self, queue: Sequence[_Chunk | _Cut], read: Callable[[Any], Any]) -> None:
        with self._stopwatch.counting("device"):
            found = read([each.groups if isinstance(each, _Chunk) else each.sums for each in queue])
        del self._queue[: len(queue)]  # Only now, so an interrupted read loses nothing.
        for each, values in zip(queue, found, strict=True):
            if isinstance(each, _Cut):
                self._end_segment(each.position, values)
            else:
                self._held -= len(each.examples)
                self._arrive(values, each.examples)
        if self.guard is not None:
            self.guard.check()

    def _arrive(self, groups: Any, examples: list[int]) -> None:
        first = self._segments[-1][0] if self._segments else self._dropped
        first += len(self._open.num_examples)
        for columns, number in groups:
            columns = {name: _unstacked(column, number) for name, column in (columns or {}).items()}
            own, examples = examples[:number], examples[number:]
            own = own if self.guard is None else self.guard.inspect(columns, first, own)
            if self._open.num_examples and columns.keys() != self._open.keys():
                self._segments.append((first, self._open))
                self._open = LoopOutputs()
            self._open.num_examples += own
            first += number
            for name, column in columns.items():
                self._open.setdefault(name, []).extend(column)
            if self.update is not None:
                for row in rows_of([(columns, number)]):
                    self._updated = self.update(self._updated, row)

    def _end_segment(self, position: int, sums: Mapping[str, Any]) -> None:
        _add_sums(self._open, sums)
        self._segments.append((position, self._open))
        self._open = LoopOutputs()

    # Reading -----------------------------------------------------------------------------------------

    def cut(self) -> None:
        """Ends a segment here, without waiting."""
        if self._examples:
            self._send()
        if self.position > self._last_cut:
            self._queue.append(_Cut(self.position, self._sums))
            self._sums, self._last_cut = {}, self.position

    def fetch(self) -> None:
        """Waits until all outputs are on the host."""
        if self._examples:
            self._send()
        if self._queue:
            self._read(list(self._queue), metrics.fetch)
        self._forget_in_flight()

    def since(self, cursor: int, until: int | None = None, *, keeps_all: bool = False) -> LoopOutputs:
        """Returns a copy of the outputs between two positions. By default, until now.

        Unless the outputs are plain, a cut must have been made at both positions.

        Of values other than scalars, only those of the last segment are returned, unless `keeps_all` is True.
        """
        self.fetch()
        found, add = LoopOutputs(), _append if keeps_all else LoopOutputs.extend
        segments, until = self._segments, self.position if until is None else until
        if self._open.num_examples and until > self._last_cut:
            rest = self._open.copy()
            _add_sums(rest, metrics.fetch(self._sums))
            segments = [*segments, (self.position, rest)]
        for end, segment in segments:
            begin = end - len(segment.num_examples)
            if end > cursor and begin < until:
                add(found, _between(segment, max(cursor - begin, 0), until - begin))
        return found

    def loop(self) -> LoopOutputs:
        """Returns the outputs of the current loop."""
        outputs = self.since(self.loop_start, keeps_all=True)
        if self.update is None:
            return outputs
        found = LoopOutputs(self._updated, outputs.num_examples)
        found.update({name: value for name, value in outputs.items() if metrics.is_metric(next(iter(value), None))})
        return found

    def begin_loop(self, position: int | None = None) -> None:
        """Begins the next loop here or, if all outputs since then are plain, at an earlier position."""
        self.loop_start = self.position if position is None else position
        self._updated, self.may_stop = LoopOutputs(), False

    def drop_loop(self) -> None:
        """Forgets the outputs of the current loop."""
        with contextlib.suppress(Exception):
            self.fetch()
        kept = [(end, segment) for end, segment in self._segments if end <= self.loop_start]
        place, dropped = self.loop_start, self._dropped
        self.reset()
        self._segments, self._dropped = kept, dropped
        self.position = self.loop_start = self._last_cut = place

    def newest_scalars(self) -> dict[str, Any]:
        """Returns the scalars of the latest computed step. Never waits."""
        for outputs in reversed(self.newest):
            if found := metrics.ready_scalars(_last_of(outputs) or {}):
                return found
        for chunk in reversed(self._queue):
            for columns, number in reversed(chunk.groups if isinstance(chunk, _Chunk) else ()):
                last = {name: _at(column, number - 1) for name, column in (columns or {}).items()}
                if found := metrics.ready_scalars(last):
                    return found
        last = self._open if self._open.num_examples else self._segments[-1][1] if self._segments else {}
        return metrics.newest_scalars(last)

    def trim(self, cursors: Iterable[int]) -> None:
        """Drops what all readers have read, and joins segments that no cursor separates."""
        kept: list[tuple[int, LoopOutputs]] = []
        cursors = {*cursors, self.loop_start}
        for end, segment in self._segments:
            if all(end <= cursor for cursor in cursors):
                self._dropped = end
            elif kept and kept[-1][0] not in cursors:
                (_append if end > self.loop_start else LoopOutputs.extend)(kept[-1][1], segment)
                kept[-1] = (end, kept[-1][1])
            else:
                kept.append((end, segment))
        self._segments = kept

    # Saving ------------------------------------------------------------------------------------------

    def state_dict(self, cursors: Sequence[int], encode: Callable[[LoopOutputs], Any]) -> dict[str, Any]:
        """Returns the outputs after the first of these cursors, which are those that somebody has still to read."""
        self.fetch()
        wanted = [*cursors] if self.update is None else [*cursors, self.loop_start]
        least = min(wanted, default=self.position)
        segments = [(end, segment) for end, segment in self._segments if end > least]
        rest = self._open if least < self.position else LoopOutputs()
        number = sum(len(segment.num_examples) for _, segment in segments) + len(rest.num_examples)
        sums = LoopOutputs({name: [state] for name, state in metrics.fetch(self._sums).items()})
        return {
            "position": self.position,
            "loop_start": self.loop_start,
            "may_stop": self.may_stop,
            "dropped": self.position - number,
            "segments": [[end, encode(segment)] for end, segment in segments],
            "open": encode(rest),
            "sums": encode(sums if cursors else LoopOutputs()),
            "updated": encode(LoopOutputs(self._updated)),
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restores a `state_dict`."""
        self.position, self.loop_start, self._dropped = saved["position"], saved["loop_start"], saved["dropped"]
        self.may_stop = saved["may_stop"]
        self._segments = [(end, LoopOutputs.decode(segment)) for end, segment in saved["segments"]]
        self._open = LoopOutputs.decode(saved["open"])
        self._sums = {name: states[0] for name, states in LoopOutputs.decode(saved["sums"]).items()}
        self._last_cut = self.position - len(self._open.num_examples)
        self._updated = LoopOutputs.decode(saved["updated"])


def rows_of(groups: Iterable[tuple[dict[str, Any] | None, int]]) -> list[types.Output]:
    """Returns the outputs of each step, given groups of steps that have arrived on the host."""
    rows: list[types.Output] = []
    for columns, number in groups:
        lists = columns and {name: _unstacked(column, number) for name, column in columns.items()}
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


def _unstacked(column: Any, number: int) -> list[Any]:
    if isinstance(column, list):
        return column
    if isinstance(column, np.ndarray):
        return list(column)
    leaves, structure = jax.tree.flatten(column)
    if not leaves:
        return [column] * number
    return [jax.tree.unflatten(structure, each) for each in zip(*map(list, leaves), strict=True)]


def _is_computed(each: _Chunk | _Cut) -> bool:
    columns = (each.groups[-1][0] or {}).values() if isinstance(each, _Chunk) else each.sums.values()
    last = [column[-1] if isinstance(column, list) else column for column in columns]
    return all(map(metrics.is_ready, jax.tree.leaves(last)))


def _has_only_scalars(chunk: Any) -> bool:
    columns = [column for columns, _ in chunk.groups for column in (columns or {}).values()]
    newest = [(column[-1], 0) if isinstance(column, list) else (column, 1) for column in columns]
    return all(getattr(leaf, "ndim", 0) <= axes for value, axes in newest for leaf in jax.tree.leaves(value))


def _is_stackable(column: Any) -> bool:
    if not isinstance(column, list) or not isinstance(column[0], jax.Array) or column[0].ndim:
        return False
    return len({getattr(value, "dtype", None) for value in column}) == 1 and not jnp.issubdtype(
        column[0].dtype, jax.dtypes.prng_key
    )


def _between(segment: LoopOutputs, first: int, end: int) -> LoopOutputs:
    """Returns the outputs of the steps from `first` to `end` in a segment."""
    if end < len(segment.num_examples):
        segment = segment.split(end)[0]
    return segment.split(first)[1] if first else segment


def _append(outputs: LoopOutputs, later: LoopOutputs) -> None:
    for name, values in later.items():
        earlier = outputs.get(name)
        if not isinstance(values, list) or not isinstance(earlier, list):
            outputs[name] = list(values) if isinstance(values, list) else values
        elif values and metrics.is_metric(values[0]):
            outputs[name] = metrics.merge_if_metrics([*metrics.as_states_like(earlier, values), *values])
        else:
            earlier.extend(values)
    outputs.num_examples += later.num_examples


def _add_sums(outputs: LoopOutputs, sums: Mapping[str, Any]) -> None:
    for name, state in sums.items():
        outputs[name] = metrics.merge_if_metrics([*outputs.get(name, ()), state])


def _merge_along_axis(before: Sequence[Any], stacked: Any) -> Any:
    first, others = (jax.tree.map(lambda leaf, part=part: leaf[part], stacked) for part in (0, slice(1, None)))
    fold = lambda sums, state: (sums.merge(state), None)
    return jax.lax.scan(fold, metrics.merge([*before, first]), others)[0]


_stack = jax.jit(lambda columns: {name: jnp.stack(values) for name, values in columns.items()})
_merge_states = PerStructure(lambda: jax.jit(lambda states: metrics.merge(states)))
_merge_stacked = PerStructure(lambda: jax.jit(lambda before, stacked: _merge_along_axis(before, stacked)))
