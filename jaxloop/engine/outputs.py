"""The outputs of a run, with a cursor for each reader."""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

from absl import logging

from jaxloop import metrics, types
from jaxloop.base import timing
from jaxloop.base.text import printable
from jaxloop.engine.pending import Chunk, Pending, rows_of, unstacked
from jaxloop.metrics import LoopOutputs
from jaxloop.step.nonfinite import Guard


@final
class Segment:
    """Consecutive steps. A position is a number of steps.

    Attributes:
      first: The position at which the segment begins.
      outputs: The outputs of its steps.
      end: The position at which the segment ends.
    """

    def __init__(self, first: int = 0, outputs: LoopOutputs | None = None):
        self.first: int = first
        self.outputs: LoopOutputs = LoopOutputs() if outputs is None else outputs
        self.end: int = first + len(self.outputs.num_examples)

    def between(self, begin: int, end: int) -> LoopOutputs:
        """Returns the outputs of the steps between two positions."""
        outputs = self.outputs if end >= self.end else self.outputs.split(end - self.first)[0]
        return outputs.split(begin - self.first)[1] if begin > self.first else outputs

    def add_sums(self, sums: Mapping[str, Any]) -> None:
        """Adds merged `clu.metrics` states."""
        for name, state in sums.items():
            self.outputs[name] = metrics.merge_if_metrics([*self.outputs.get(name, ()), state])


@final
class Outputs:
    """The outputs of a run, in segments. Those of the latest steps are still on the devices.

    A cut ends a segment. `clu.metrics` states are merged in step order within a segment, so everything that reads
    outputs, and every end of a loop, makes a cut. A checkpoint reads without a cut, so it changes no bits.

        | dropped | segment | segment | open segment | pending |
                  ^ the cursor of a reader                     ^ position

    Args:
      stopwatch: Tracks how the time is spent.

    Attributes:
      pending: The outputs on the devices.
      loop_start: The position at which the current loop began.
      update: A function that adds a step's outputs to the loop's outputs; None to append to lists.
      hooks_read: True if hooks of the loop read its outputs, so a checkpoint contains them from the loop's start.
      guard: The object that sees the columns as they arrive, and looks for NaN and infinity; None if nothing does.
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
        """The number of steps so far."""
        return self._segments[-1].end + self.pending.num_steps

    @property
    def num_computed(self) -> int:
        """The number of completed dispatches among those that may be pending. May be read from another thread."""
        return self.pending.in_flight.num_computed

    @property
    def may_stop(self) -> bool:
        """True if any step has reported `STOP_LOOP`."""
        return types.STOP_LOOP in (self.pending.names or ())

    def push(self, num_steps: int, state: Any) -> None:
        """Waits if the host is too far ahead after these steps, and reads outputs that have been computed."""
        if number := self.pending.push(num_steps, state):
            self._read(number)

    def _read(self, number: int | None = None) -> None:
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
        """Ends a segment here, without waiting."""
        if self.pending.num_steps or self._segments[-1].outputs.num_examples:
            self.pending.cut()

    def fetch(self) -> None:
        """Waits until all outputs are on the host."""
        self._read()

    # Reading -----------------------------------------------------------------------------------------

    def since(
        self, cursor: int, until: int | None = None, *, after: LoopOutputs | None = None, keeps_all: bool = False
    ) -> LoopOutputs:
        """Returns a copy of the outputs between two positions. By default, until now.

        Unless the outputs are plain, a cut must have been made at both positions.

        Of values other than scalars, only those of the last segment are returned, unless `keeps_all` is True.

        Args:
          cursor: The first position.
          until: The second position; None for the newest.
          after: Earlier outputs, which are not changed, and which the result begins with.
          keeps_all: Whether to return all values.
        """
        self._read()
        found, add = LoopOutputs() if after is None else after.copy(), _append if keeps_all else LoopOutputs.extend
        *segments, newest = self._segments
        until = newest.end if until is None else until
        if newest.first < until and newest.outputs.num_examples:
            newest = Segment(newest.first, newest.outputs.copy())
            newest.add_sums(self.pending.sums())
            segments.append(newest)
        for each in segments:
            if each.end > cursor and each.first < until:
                add(found, each.between(cursor, until))
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
        """Returns the scalars of the latest computed step. Never waits."""
        newest = next((each for each in reversed(self._segments) if each.outputs.num_examples), self._segments[-1])
        return self.pending.newest_scalars() or metrics.newest_scalars(newest.outputs)

    def trim(self, cursors: Iterable[int]) -> None:
        """Drops what all readers have read, and joins segments that no cursor separates."""
        kept: list[Segment] = []
        cursors = {*cursors, self.loop_start}
        *segments, newest = self._segments
        for each in segments:
            if kept and kept[-1].end not in cursors:
                (_append if each.end > self.loop_start else LoopOutputs.extend)(kept[-1].outputs, each.outputs)
                kept[-1].end = each.end
            elif each.end > min(cursors):
                kept.append(each)
        self._segments = [*kept, newest]

    # Saving ------------------------------------------------------------------------------------------

    def state_dict(self, cursors: Sequence[int]) -> dict[str, Any]:
        """Returns the outputs after the first of these cursors and, if they matter at its end, those of the loop."""
        self.fetch()
        wanted = [*cursors, self.loop_start] if self.hooks_read or self.may_stop else [*cursors]
        least = min(wanted, default=self.position)
        *segments, newest = self._segments
        segments = [each for each in segments if each.end > least]
        segments.append(newest if least < newest.end else Segment(newest.end))
        sums = {name: [state] for name, state in self.pending.sums().items()} if cursors else {}
        return {
            "loop_start": self.loop_start,
            "may_stop": self.may_stop,
            "segments": [[each.first, self.encode(each.outputs)] for each in segments],
            "sums": self.encode(LoopOutputs(sums)),
            "updated": self.encode(LoopOutputs(self._updated)),
        }

    def encode(self, outputs: LoopOutputs) -> dict[str, Any]:
        """Returns outputs as JSON values. Warns once of those that a checkpoint can't store."""
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
        """Restores a `state_dict`."""
        self.loop_start, self._updated = saved["loop_start"], LoopOutputs.decode(saved["updated"])
        self._segments = [Segment(first, LoopOutputs.decode(outputs)) for first, outputs in saved["segments"]]
        sums = {name: states[0] for name, states in LoopOutputs.decode(saved["sums"]).items()}
        self.pending.resume(sums, {types.STOP_LOOP} if saved["may_stop"] else None)


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
