"""The outputs of a loop's steps on the host, in the order of the steps, for all who read them."""

import collections
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, final

from jaxloop import metrics, types
from jaxloop.metrics import LoopOutputs
from jaxloop.output_queue import Arrived, split_block


@final
class Series:
    """Outputs with the position in the ledger at which each part of them ends; readers have cursors at such positions.

    >>> series = Series()
    >>> series.add(2, LoopOutputs({"loss": [3.0, 2.0]}, [8, 8]))
    >>> series.add(3, LoopOutputs({"loss": [1.0]}, [8]))
    >>> series.since(0), series.since(2), series.since(3)
    ({'loss': [3.0, 2.0, 1.0]}, {'loss': [1.0]}, {})
    """

    def __init__(self, parts: Iterable[tuple[int, LoopOutputs]] = ()):
        self._parts = list(parts)

    def add(self, end: int, outputs: LoopOutputs) -> None:
        """Appends what was reported up to a position."""
        self._parts.append((end, outputs))

    def since(self, cursor: int) -> LoopOutputs:
        """Returns a copy of what was reported after a position."""
        outputs = LoopOutputs()
        for end, part in self._parts:
            if end > cursor:
                outputs.extend(part)
        return outputs

    def keep_for(self, cursors: Sequence[int]) -> None:
        """Joins the parts that no cursor separates, and drops those before all cursors."""
        kept: list[tuple[int, LoopOutputs]] = []
        for end, part in self._parts:
            if all(end <= cursor for cursor in cursors):
                continue
            if kept and kept[-1][0] not in cursors:
                kept[-1][1].extend(part)
                kept[-1] = (end, kept[-1][1])
            else:
                kept.append((end, part))
        self._parts = kept

    def encode(self, encode: Callable[[LoopOutputs], Any]) -> list[Any]:
        """Returns what a checkpoint keeps."""
        return [[end, encode(part)] for end, part in self._parts]

    @classmethod
    def decode(cls, encoded: Iterable[Any]) -> "Series":
        """Returns what `encode` was called on."""
        return cls((end, LoopOutputs.decode(part)) for end, part in encoded)


@final
class Ledger:
    """The outputs of a run's steps, on the host, in the order of the steps. Positions in it count steps.

    There are two series to read: what was reported from one reading to the next, and whole loops as their `end` left
    them. `clu.metrics` states are merged in the order of the steps, from one reading to the next; a save doesn't read,
    so it changes no bit of them.

    Attributes:
      position: how many steps have been counted.
      loop: the outputs of the loop under way, without the `sums`.
      weights: for each of its steps how many examples its values stand for.
      sums: the merged `clu.metrics` states since the last reading, by name.
      parts: what was reported between two readings.
      loops: the outputs of loops that have ended.
    """

    def __init__(self):
        self.position: int = 0
        self.loop: dict[str, Any] = LoopOutputs()
        self.weights: list[int] = []
        self.sums: dict[str, Any] = {}
        self.parts: Series = Series()
        self.loops: Series = Series()
        self._ended = LoopOutputs()  # Of the loops that have ended last.
        self._last_steps = 0  # Of the last one of them.
        self._unread = LoopOutputs()
        self._passed: collections.deque[_Passed] = collections.deque()  # Ended loops whose outputs are on their way.
        self._arrived = 0  # Steps of the first of these, or of the loop under way, whose outputs are here.

    def begin_loop(self) -> None:
        """Drops what a loop under way has reported: another one begins."""
        self.loop, self.weights, self.sums, self._unread = LoopOutputs(), [], {}, LoopOutputs()
        self._passed.clear()
        self._arrived = 0

    def take(
        self,
        arrived: Arrived,
        update: Callable[[Any, types.Output], Any] | None = None,
        *,
        keeps_parts: bool = True,
        keeps_loops: bool = True,
    ) -> None:
        """Takes outputs of steps that are on the host.

        Args:
          arrived: the outputs.
          update: adds those of one step to those of the loop; None to append the values to lists.
          keeps_parts: whether somebody reads `parts`.
          keeps_loops: whether somebody reads `loops`.
        """
        blocks = collections.deque(arrived.blocks)
        while True:
            left = len(self._passed[0].weights) - self._arrived if self._passed else None
            if left == 0:
                self._end_passed(self._passed.popleft(), keeps_parts, keeps_loops)
                continue
            if not blocks:
                return
            block = blocks.popleft()
            if left is not None and block[1] > left:
                block, rest = split_block(block, left)
                blocks.appendleft(rest)
            steps, self._arrived = Arrived([block]), self._arrived + block[1]
            if keeps_parts:
                steps.add_to(self._unread)
            if update is None:
                steps.add_to(self.loop)
            else:
                for row in steps.rows():
                    self.loop = update(self.loop, row)

    def _end_passed(self, passed: "_Passed", keeps_parts: bool, keeps_loops: bool) -> None:
        """Ends a loop that was passed, whose outputs are here by now."""
        later, self._unread.num_examples = self._unread.num_examples, passed.unread_weights
        self._ended, self._last_steps = LoopOutputs(self.loop, passed.weights), passed.last_steps
        if keeps_parts:
            self.parts.add(passed.position, self._unread)
        if keeps_loops:
            self.loops.add(passed.position, self._ended.copy())
        self._unread, self.loop, self._arrived = LoopOutputs(None, later), LoopOutputs(), 0

    def count(self, weights: Sequence[int]) -> None:
        """Counts steps, each of which stands for as many examples."""
        self.position += len(weights)
        self.weights += weights
        self._unread.num_examples += weights

    def end_part(self) -> None:
        """Ends the part since the last reading, and its sums: it can be read now. All outputs must be here."""
        _merge_into(self.loop, self.sums)
        _merge_into(self._unread, self.sums)
        self.parts.add(self.position, self._unread)
        self.sums, self._unread = {}, LoopOutputs()

    def whole_loop(self) -> LoopOutputs:
        """Returns the outputs of the loop under way, a copy."""
        outputs = LoopOutputs(self.loop, self.weights).copy()
        _merge_into(outputs, self.sums)
        return outputs

    @property
    def ended(self) -> LoopOutputs:
        """The outputs of the loop that has ended last."""
        more = len(self._ended.num_examples) - self._last_steps
        return self._ended.split(more)[1] if more else self._ended

    def pass_ends(self, last_steps: int | None = None, steps_since: int = 0) -> None:
        """Ends one loop, or several, before their outputs are here, which have no `clu.metrics` states.

        Args:
          last_steps: how many steps the last of several had; None for one alone.
          steps_since: how many steps of the next one were counted already.
        """
        position, (weights, self.weights) = self.position - steps_since, _split_end(self.weights, steps_since)
        unread, self._unread.num_examples = _split_end(self._unread.num_examples, steps_since)
        last_steps = len(weights) if last_steps is None else last_steps
        self._passed.append(_Passed(position, last_steps, weights, unread))

    def end_loop(self, outputs: LoopOutputs) -> None:
        """Ends the loop, and the part since the last reading, with what `end` has made of the outputs."""
        self._unread.update({name: value for name, value in outputs.items() if not isinstance(value, list)})
        self.end_part()
        self._ended, self._last_steps = outputs, len(outputs.num_examples)
        self.loops.add(self.position, outputs.copy())  # The caller has those, and a series joins its parts.
        self.begin_loop()

    def state_dict(self, encode: Callable[[LoopOutputs], Any], *, keeps_loop: bool) -> dict[str, Any]:
        """Returns what a checkpoint keeps; with `keeps_loop` also the loop under way. All outputs must be here."""
        loop = LoopOutputs(self.loop, self.weights) if keeps_loop else LoopOutputs()
        return {
            "position": self.position,
            "loop": encode(loop),
            "unread": encode(self._unread),
            "sums": encode(LoopOutputs({name: [state] for name, state in self.sums.items()})),
            "parts": self.parts.encode(encode),
            "loops": self.loops.encode(encode),
        }

    @classmethod
    def of(cls, state_dict: Mapping[str, Any]) -> "Ledger":
        """Returns the ledger whose `state_dict` it was."""
        ledger = cls()
        ledger.position = state_dict["position"]
        ledger.loop = loop = LoopOutputs.decode(state_dict["loop"])
        ledger.weights, ledger._unread = loop.num_examples, LoopOutputs.decode(state_dict["unread"])
        ledger._arrived = len(ledger.weights)
        ledger.sums = {name: states[0] for name, states in LoopOutputs.decode(state_dict["sums"]).items()}
        ledger.parts, ledger.loops = Series.decode(state_dict["parts"]), Series.decode(state_dict["loops"])
        return ledger


@final
class _Passed(NamedTuple):
    """One loop, or several, that have ended before their outputs were here."""

    position: int
    last_steps: int
    weights: list[int]
    unread_weights: list[int]


def _merge_into(outputs: dict[str, Any], sums: Mapping[str, Any]) -> None:
    for name, state in sums.items():
        outputs[name] = metrics.merge_if_metrics([*outputs.get(name, ()), state])


def _split_end(values: list[int], number: int) -> tuple[list[int], list[int]]:
    """Splits a list in those before the last ones, of which there are so many, and these."""
    place = len(values) - number
    return values[:place], values[place:]
