"""The step outputs of a loop, kept on the host in step order for all actions that read them."""

import collections
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, final

from jaxloop import metrics, types
from jaxloop.metrics import LoopOutputs
from jaxloop.output_queue import Arrived, split_block


@final
class Series:
    """Outputs that are kept in parts. The ledger position at which each part ends is stored with it.

    A reader's cursor is the position up to which it has read.

    >>> series = Series()
    >>> series.add(2, LoopOutputs({"loss": [3.0, 2.0]}, [8, 8]))
    >>> series.add(3, LoopOutputs({"loss": [1.0]}, [8]))
    >>> series.since(0), series.since(2), series.since(3)
    ({'loss': [3.0, 2.0, 1.0]}, {'loss': [1.0]}, {})
    """

    def __init__(self, parts: Iterable[tuple[int, LoopOutputs]] = ()):
        self._parts = list(parts)

    def add(self, end: int, outputs: LoopOutputs) -> None:
        """Appends a part that ends at the position `end`."""
        self._parts.append((end, outputs))

    def since(self, cursor: int) -> LoopOutputs:
        """Returns a copy of the outputs after the position `cursor`."""
        outputs = LoopOutputs()
        for end, part in self._parts:
            if end > cursor:
                outputs.extend(part)
        return outputs

    def keep_for(self, cursors: Sequence[int]) -> None:
        """Drops the parts that all readers have read, and joins adjacent parts that no cursor separates."""
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
        """Returns the parts in the form stored in a checkpoint, each one encoded with `encode`."""
        return [[end, encode(part)] for end, part in self._parts]

    @classmethod
    def decode(cls, encoded: Iterable[Any]) -> "Series":
        """Rebuilds a series from the result of `encode`."""
        return cls((end, LoopOutputs.decode(part)) for end, part in encoded)


@final
class Ledger:
    """The step outputs of a run, kept on the host in step order. A position in the ledger is a number of steps.

    Actions read one of two series: `parts` or `loops`. Between two reads, `clu.metrics` states are merged in step
    order. Saving a checkpoint does not count as a read, so it doesn't change a single bit of these states.

    Attributes:
      position: The number of steps counted so far.
      loop: The outputs of the current loop, excluding `sums`.
      weights: The number of examples in each step of the current loop.
      sums: The merged `clu.metrics` states since the last read, by name.
      parts: The series to which each read adds the outputs since the previous read.
      loops: The series to which each loop end adds the loop's outputs, as returned by the `end` hook.
    """

    def __init__(self):
        self.position: int = 0
        self.loop: dict[str, Any] = LoopOutputs()
        self.weights: list[int] = []
        self.sums: dict[str, Any] = {}
        self.parts: Series = Series()
        self.loops: Series = Series()
        self._ended = LoopOutputs()  # The outputs of the loop or loops that ended last.
        self._last_steps = 0  # The number of steps in the last of these loops.
        self._unread = LoopOutputs()
        self._passed: collections.deque[_Passed] = collections.deque()  # Ended loops whose outputs are on the devices.
        self._arrived = 0  # Steps in the first of these, or in the current loop, whose outputs have arrived.

    def begin_loop(self) -> None:
        """Drops the current loop's outputs, and begins a new loop."""
        self.loop, self.weights, self.sums, self._unread = LoopOutputs(), [], {}, LoopOutputs()
        self._passed.clear()
        self._arrived = 0

    def add(
        self,
        arrived: Arrived,
        update: Callable[[Any, types.Output], Any] | None = None,
        *,
        keeps_parts: bool = True,
        keeps_loops: bool = True,
    ) -> None:
        """Adds step outputs that have arrived on the host.

        Args:
          arrived: The outputs to add.
          update: A function that adds one step's outputs to the loop's outputs. If None, each value is appended to a
            list.
          keeps_parts: True if any action reads `parts`.
          keeps_loops: True if any action reads `loops`.
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
        """Ends loops that `pass_ends` has recorded, once all of their outputs have arrived."""
        later, self._unread.num_examples = self._unread.num_examples, passed.unread_weights
        self._ended, self._last_steps = LoopOutputs(self.loop, passed.weights), passed.last_steps
        if keeps_parts:
            self.parts.add(passed.position, self._unread)
        if keeps_loops:
            self.loops.add(passed.position, self._ended.copy())
        self._unread, self.loop, self._arrived = LoopOutputs(None, later), LoopOutputs(), 0

    def count(self, weights: Sequence[int]) -> None:
        """Counts the given steps. `weights` contains the number of examples in each one."""
        self.position += len(weights)
        self.weights += weights
        self._unread.num_examples += weights

    def end_part(self) -> None:
        """Ends the part that began at the last read, and adds its sums, so that actions can read it.

        All outputs must have arrived.
        """
        _merge_into(self.loop, self.sums)
        _merge_into(self._unread, self.sums)
        self.parts.add(self.position, self._unread)
        self.sums, self._unread = {}, LoopOutputs()

    def whole_loop(self) -> LoopOutputs:
        """Returns a copy of the current loop's outputs."""
        outputs = LoopOutputs(self.loop, self.weights).copy()
        _merge_into(outputs, self.sums)
        return outputs

    @property
    def ended(self) -> LoopOutputs:
        """The outputs of the loop that ended last."""
        more = len(self._ended.num_examples) - self._last_steps
        return self._ended.split(more)[1] if more else self._ended

    def pass_ends(self, last_steps: int | None = None, steps_since: int = 0) -> None:
        """Ends one or more loops before their outputs have arrived. The outputs must not contain `clu.metrics` states.

        Args:
          last_steps: The number of steps in the last loop if several loops end; None if only one loop ends.
          steps_since: The number of counted steps that already belong to the next loop.
        """
        position, (weights, self.weights) = self.position - steps_since, _split_end(self.weights, steps_since)
        unread, self._unread.num_examples = _split_end(self._unread.num_examples, steps_since)
        last_steps = len(weights) if last_steps is None else last_steps
        self._passed.append(_Passed(position, last_steps, weights, unread))

    def end_loop(self, outputs: LoopOutputs) -> None:
        """Ends the current loop and part, using the outputs that the `end` hook returned."""
        self._unread.update({name: value for name, value in outputs.items() if not isinstance(value, list)})
        self.end_part()
        self._ended, self._last_steps = outputs, len(outputs.num_examples)
        # A copy, because the caller owns the outputs, and a series extends its parts.
        self.loops.add(self.position, outputs.copy())
        self.begin_loop()

    def state_dict(self, encode: Callable[[LoopOutputs], Any], *, keeps_loop: bool) -> dict[str, Any]:
        """Returns the state to be stored in a checkpoint. All outputs must have arrived.

        The current loop's outputs are included only if `keeps_loop` is True.
        """
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
        """Rebuilds a ledger from its `state_dict`."""
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
    """One or more loops that ended before their outputs arrived."""

    position: int
    last_steps: int
    weights: list[int]
    unread_weights: list[int]


def _merge_into(outputs: dict[str, Any], sums: Mapping[str, Any]) -> None:
    for name, state in sums.items():
        outputs[name] = metrics.merge_if_metrics([*outputs.get(name, ()), state])


def _split_end(values: list[int], number: int) -> tuple[list[int], list[int]]:
    """Splits off the last `number` values of a list."""
    place = len(values) - number
    return values[:place], values[place:]
