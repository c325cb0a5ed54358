"""The outputs of a run. The latest outputs are still on the devices, and earlier ones are on the host."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from jaxloop import metrics, types
from jaxloop.base import timing
from jaxloop.base.structures import PerStructure
from jaxloop.base.text import printable
from jaxloop.engine.program import Block, InFlight
from jaxloop.metrics import LoopOutputs
from jaxloop.step.nonfinite import Guard

_FEWEST_STACKED = 32  # Outputs of fewer steps take less time to read one by one.
_MOST_KEPT = 1024  # The scalars of at most this many steps stay on an accelerator.


@final
class Chunk(NamedTuple):
    """The outputs of several steps, in groups of consecutive steps whose outputs have the same names.

    Attributes:
      groups: One pair `(outputs, num_steps)` per group. `outputs` is a dict keyed by name, or None if the steps return
        no outputs. The values of an output are stored as a column: a list with one value per step, or a stacked pytree.
      examples: The number of examples in each step.
    """

    groups: list[tuple[dict[str, Any] | None, int]]
    examples: list[int]


@final
class Cut(NamedTuple):
    """The end of a segment of the outputs; see `Outputs`.

    Attributes:
      sums: The segment's merged `clu.metrics` states, by name.
    """

    sums: dict[str, Any]


@final
class Pending:
    """A queue of chunks and cuts that holds the outputs of the latest steps until `take` removes them.

    Args:
      stopwatch: The stopwatch that tracks how the time is spent.

    Attributes:
      newest: A list of outputs that have not been moved to the queue yet. Programs append to this list.
      in_flight: The dispatches that the devices may not have completed yet.
      num_steps: The number of steps whose outputs haven't been taken yet.
      names: The names of all outputs so far, or None before the first step.
      are_plain: True if all steps so far have returned only scalars, with the same names and without `STOP_LOOP`.
    """

    def __init__(self, stopwatch: timing.Stopwatch):
        self.in_flight: InFlight = InFlight(stopwatch)
        self.clear()

    def clear(self, sums: Mapping[str, Any] | None = None, names: set[str] | None = None) -> None:
        """Forgets all outputs.

        Args:
          sums: In a resumed run, the `clu.metrics` states merged since the last cut.
          names: In a resumed run, `{STOP_LOOP}` if a step returned an output of that name before the resume. Otherwise
            None.
        """
        self.newest: list[types.Output | Block] = []
        self.names: set[str] | None = names
        self.are_plain: bool = False
        self.num_steps: int = 0
        self._examples: list[int] = []  # Of the steps in `newest`.
        self._queue: list[Chunk | Cut] = []
        self._sums: dict[str, Any] = {**(sums or {})}  # Of the steps since the last cut.
        self.in_flight.clear()

    @property
    def may_stop(self) -> bool:
        """True if any step has returned an output named `STOP_LOOP`."""
        return types.STOP_LOOP in (self.names or ())

    @property
    def room(self) -> int:
        """The number of steps whose outputs still fit into the current chunk."""
        return self.in_flight.chunk - len(self._examples)

    def account(self, examples: Sequence[int]) -> None:
        """Records the number of examples in each of the steps whose outputs have just been appended to `newest`."""
        self._examples += examples
        self.num_steps += len(examples)

    def push(self, num_steps: int, state: Any) -> int:
        """Records that steps were dispatched, and waits if the host is too far ahead of the devices.

        Args:
          num_steps: The number of steps that were dispatched. Their outputs are the last in `newest`.
          state: The state after the last of these steps.

        Returns:
          The number of elements that should now be taken from the queue.
        """
        newest = self.newest[-1]
        values, axes = (newest.outputs, 1) if isinstance(newest, Block) else (newest, 0)
        self.in_flight.add(values, num_steps, state)
        if self.names is None:
            self.names, self.are_plain = {*(values or {})}, types.STOP_LOOP not in (values or {})
        # The values of a scalar output are stacked along one axis if several steps were fused.
        self.are_plain &= all([isinstance(x, jax.Array) and x.ndim == axes for x in (values or {}).values()])
        if len(self._examples) < self.in_flight.chunk:
            return 0
        self.send()
        most = _MOST_KEPT if self.are_plain and not metrics.is_on_cpu() else 0
        return len(self._queue) - 1 if self.num_steps >= max(most, self.in_flight.limit) else 0

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
            if rest and number == self.in_flight.chunk >= _FEWEST_STACKED and all(map(_is_stackable, rest.values())):
                rest = _stack(rest)  # One read per name.
            groups.append((columns and rest, number))
        if not metrics.is_on_cpu():
            for leaf in jax.tree.leaves(groups):
                if isinstance(leaf, jax.Array):
                    leaf.copy_to_host_async()
        self._queue.append(Chunk(groups, self._examples))
        self.newest, self._examples = [], []

    def _merge(self, name: str, column: Any) -> None:
        is_list = isinstance(column, list)
        first = column[0] if is_list else column
        before = [self._sums[name]] if name in self._sums else []
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
        """Ends the current segment without waiting for the devices."""
        if self._examples:
            self.send()
        if not (self._queue and isinstance(self._queue[-1], Cut)):
            self._queue.append(Cut(self._sums))
            self._sums = {}

    def take(self, number: int | None = None) -> list[Chunk | Cut]:
        """Removes the first `number` elements (by default, all) from the queue and returns them, copied to the host."""
        if number is None and self._examples:
            self.send()
        taken = self._queue[:number]
        if taken:
            read = metrics.fetch if number is None or not metrics.is_on_cpu() else metrics.view
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
        """Returns the `clu.metrics` states of all steps since the last cut, merged and copied to the host."""
        return metrics.fetch(self._sums)

    def newest_scalars(self) -> dict[str, Any]:
        """Returns the most recent scalars that have already been computed. Never waits for the devices."""
        for outputs in reversed(self.newest):
            if found := metrics.ready_scalars(_last_of(outputs) or {}):
                return found
        for chunk in reversed(self._queue):
            for columns, number in reversed(chunk.groups if isinstance(chunk, Chunk) else ()):
                last = {name: _at(column, number - 1) for name, column in (columns or {}).items()}
                if found := metrics.ready_scalars(last):
                    return found
        return {}


@final
class Segment:
    """The outputs of consecutive steps. A position in the outputs is the number of steps that precede it in the run.

    Attributes:
      first: The position at which the segment begins.
      outputs: The outputs of the segment's steps.
      end: The position at which the segment ends.
    """

    def __init__(self, first: int = 0, outputs: LoopOutputs | None = None):
        self.first: int = first
        self.outputs: LoopOutputs = LoopOutputs() if outputs is None else outputs
        self.end: int = first + len(self.outputs.num_examples)

    def between(self, begin: int, end: int) -> LoopOutputs:
        """Returns the outputs of the steps between two positions."""
        if begin <= self.first and end >= self.end:
            return self.outputs
        return self.outputs.between(max(begin - self.first, 0), end - self.first)

    def add_sums(self, sums: Mapping[str, Any]) -> None:
        """Adds merged `clu.metrics` states to the segment."""
        for name, state in sums.items():
            self.outputs[name] = metrics.merge_if_metrics([*self.outputs.get(name, ()), state])


@final
class Outputs:
    """The outputs of a run, in segments. The outputs of the latest steps are still on the devices.

    A cut ends a segment. Within a segment, `clu.metrics` states are merged in the order of the steps, and can't be
    separated again. Therefore, a cut is made whenever outputs are read and whenever a loop ends. When a checkpoint is
    saved, however, outputs are read without a cut, so that saving doesn't affect the results.

        | dropped | segment | segment | open segment | pending |
                  ^ the cursor of a reader                     ^ position

    Args:
      stopwatch: The stopwatch that tracks how the time is spent.

    Attributes:
      pending: The outputs that are still on the devices.
      loop_start: The position at which the current loop began.
      update: A function that adds a step's outputs to the loop's outputs. If None, the values are appended to lists.
      hooks_read: True if the loop has hooks that read its outputs. In that case, a checkpoint contains all outputs of
        the current loop.
      guard: The object that checks for NaN and infinity as outputs arrive on the host, or None.
    """

    def __init__(self, stopwatch: timing.Stopwatch):
        self.pending: Pending = Pending(stopwatch)
        self.update: Callable[[Any, types.Output], Any] | None = None
        self.hooks_read: bool = False
        self.guard: Guard | None = None
        self._left_out: set[str] = set()  # The names of outputs that a checkpoint can't store.
        self.reset()

    def reset(self) -> None:
        """Forgets all outputs."""
        self.loop_start: int = 0
        self._segments = [Segment()]  # The last one is open.
        self._updated: Any = LoopOutputs()  # The loop's outputs, if there is an `update`.
        self.pending.clear()

    @property
    def position(self) -> int:
        """The current position: the number of steps so far."""
        return self._segments[-1].end + self.pending.num_steps

    def fetch(self, number: int | None = None) -> None:
        """Waits for the first `number` elements of the queue and moves them to the host.

        By default, waits for all pending outputs, including those that are not in the queue yet.
        """
        for each in self.pending.take(number):
            if isinstance(each, Chunk):
                self._arrive(each.groups, each.examples)
            elif self._segments[-1].outputs.num_examples:
                self._segments[-1].add_sums(each.sums)
                self._segments.append(Segment(self._segments[-1].end))
        if self.guard is not None:
            self.guard.check()

    def _arrive(self, groups: Any, examples: list[int]) -> None:
        for columns, number in groups:
            columns, newest = (
                {name: unstacked(column, number) for name, column in (columns or {}).items()},
                self._segments[-1],
            )
            own, examples = examples[:number], examples[number:]
            own = own if self.guard is None else self.guard.inspect(columns, newest.end, own)
            if newest.outputs.num_examples and columns.keys() != newest.outputs.keys():
                newest = Segment(newest.end)
                self._segments.append(newest)
            newest.outputs.num_examples += own
            newest.end += number
            for name, column in columns.items():
                newest.outputs.setdefault(name, []).extend(column)
            if self.update is not None:
                for row in rows_of([(columns, number)]):
                    self._updated = self.update(self._updated, row)

    def cut(self) -> None:
        """Ends the current segment without waiting for the devices."""
        if self.pending.num_steps or self._segments[-1].outputs.num_examples:
            self.pending.cut()

    # Reading -----------------------------------------------------------------------------------------

    def since(
        self, cursor: int, until: int | None = None, *, after: LoopOutputs | None = None, keeps_all: bool = False
    ) -> LoopOutputs:
        """Returns a copy of the outputs between two positions.

        Unless the outputs are plain (see `Pending`), a cut must have been made at both positions. By default,
        non-scalar values are returned only for the last segment.

        Args:
          cursor: The position at which the result begins.
          until: The position at which the result ends, or None for the current position.
          after: Earlier outputs to put at the beginning of the result. They are not changed.
          keeps_all: Whether to return the non-scalar values of all segments.
        """
        self.fetch()
        found = LoopOutputs() if after is None else after.copy()
        *segments, newest = self._segments
        until = newest.end if until is None else until
        if newest.first < until and newest.outputs.num_examples:
            newest = Segment(newest.first, newest.outputs.copy())
            newest.add_sums(self.pending.sums())
            segments.append(newest)
        for each in segments:
            if each.end > cursor and each.first < until:
                found.extend(each.between(cursor, until), keeps_all=keeps_all)
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
        """Begins the next loop at the given position or, by default, at the current one.

        An earlier position can be given only if all outputs since that position are plain (see `Pending`).
        """
        self.loop_start = self.position if position is None else position
        self._updated = LoopOutputs()

    def drop_loop(self) -> None:
        """Forgets the outputs of the current loop."""
        with contextlib.suppress(Exception):
            self.fetch()
        place, segments = self.loop_start, self._segments[:-1]
        self.reset()
        self._segments = [*(each for each in segments if each.end <= place), Segment(place)]
        self.loop_start = place

    def newest_scalars(self) -> dict[str, Any]:
        """Returns the scalars of the latest step whose scalars have been computed. Never waits for the devices."""
        newest = next((each for each in reversed(self._segments) if each.outputs.num_examples), self._segments[-1])
        return self.pending.newest_scalars() or metrics.newest_scalars(newest.outputs)

    def trim(self, cursors: Iterable[int]) -> None:
        """Drops segments that all readers have read, and joins adjacent segments with no cursor between them.

        Args:
          cursors: The readers' cursors. The start of the current loop counts as one more cursor.
        """
        kept: list[Segment] = []
        cursors = {*cursors, self.loop_start}
        *segments, newest = self._segments
        for each in segments:
            if kept and kept[-1].end not in cursors:
                kept[-1].outputs.extend(each.outputs, keeps_all=each.end > self.loop_start)
                kept[-1].end = each.end
            elif each.end > min(cursors):
                kept.append(each)
        self._segments = [*kept, newest]

    # Saving ------------------------------------------------------------------------------------------

    def state_dict(self, cursors: Sequence[int]) -> dict[str, Any]:
        """Returns a dict of JSON values that contains the outputs after the smallest cursor.

        It also contains all outputs of the current loop if these may be read when the loop ends.
        """
        self.fetch()
        wanted = [*cursors, self.loop_start] if self.hooks_read or self.pending.may_stop else [*cursors]
        least = min(wanted, default=self.position)
        *segments, newest = self._segments
        segments = [each for each in segments if each.end > least]
        segments.append(newest if least < newest.end else Segment(newest.end))
        sums = {name: [state] for name, state in self.pending.sums().items()} if cursors else {}
        return {
            "loop_start": self.loop_start,
            "may_stop": self.pending.may_stop,
            "segments": [[each.first, self.encode(each.outputs)] for each in segments],
            "sums": self.encode(LoopOutputs(sums)),
            "updated": self.encode(LoopOutputs(self._updated)),
        }

    def encode(self, outputs: LoopOutputs) -> dict[str, Any]:
        """Encodes outputs as JSON values. Warns once about outputs that a checkpoint can't store."""
        encoded, left_out = outputs.encode()
        if set(left_out) - self._left_out:
            self._left_out.update(left_out)
            logging.warning(
                "The run has outputs that a checkpoint can't store: %s. After a resume, an action that runs once every "
                "few steps receives these only for the steps after the resume.",
                ", ".join(map(printable, left_out)),
            )
        return encoded

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restores the outputs from the result of `state_dict`."""
        self.loop_start, self._updated = saved["loop_start"], LoopOutputs.decode(saved["updated"])
        self._segments = [Segment(first, LoopOutputs.decode(outputs)) for first, outputs in saved["segments"]]
        sums = {name: states[0] for name, states in LoopOutputs.decode(saved["sums"]).items()}
        self.pending.clear(sums, {types.STOP_LOOP} if saved["may_stop"] else None)


def rows_of(groups: Iterable[tuple[dict[str, Any] | None, int]]) -> list[types.Output]:
    """Splits groups of outputs (see `Chunk`) into a list with one element per step.

    Each element is a dict, or None if the step returned no outputs. The outputs must already be on the host.
    """
    rows: list[types.Output] = []
    for columns, number in groups:
        lists = columns and {name: unstacked(column, number) for name, column in columns.items()}
        rows += [lists and {name: column[index] for name, column in lists.items()} for index in range(number)]
    return rows


def _last_of(outputs: types.Output | Block) -> types.Output:
    if not isinstance(outputs, Block):
        return outputs
    return outputs.outputs and {name: _at(value, -1) for name, value in outputs.outputs.items()}


def _at(column: Any, index: int) -> Any:
    if isinstance(column, list):
        return column[index]
    return jax.tree.map(lambda leaf: np.asarray(leaf)[index] if metrics.is_ready(leaf) else leaf, column)


def _groups(rows: Sequence[Any]) -> list[tuple[dict[str, Any] | None, int]]:
    """Groups consecutive steps whose outputs have the same names."""
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
    """Converts a column (see `Chunk`) to a list with one value per step."""
    if isinstance(column, list):
        return column
    if isinstance(column, np.ndarray):
        return list(column)
    leaves, structure = jax.tree.flatten(column)
    if not leaves:
        return [column] * number
    return [jax.tree.unflatten(structure, each) for each in zip(*map(list, leaves), strict=True)]


def _is_stackable(column: Any) -> bool:
    """Returns True for a list of small device arrays that have the same shape and dtype and aren't typed PRNG keys."""
    first = column[0] if isinstance(column, list) else None
    is_tiny = isinstance(first, jax.Array) and first.size <= 64 and not jnp.issubdtype(first.dtype, jax.dtypes.prng_key)
    return is_tiny and len({(getattr(each, "shape", None), getattr(each, "dtype", None)) for each in column}) == 1


def _merge_along_axis(before: Sequence[Any], stacked: Any) -> Any:
    first, others = (jax.tree.map(lambda leaf, part=part: leaf[part], stacked) for part in (0, slice(1, None)))
    fold = lambda sums, state: (sums.merge(state), None)
    return jax.lax.scan(fold, metrics.merge([*before, first]), others)[0]


_stack = jax.jit(lambda columns: {name: jnp.stack(values) for name, values in columns.items()})
_merge_states = PerStructure(lambda: jax.jit(lambda states: metrics.merge(states)))
_merge_stacked = PerStructure(lambda: jax.jit(lambda before, stacked: _merge_along_axis(before, stacked)))
