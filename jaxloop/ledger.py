"""The outputs of a loop's steps on the host, in the order of the steps, for all who read them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

from jaxloop import metrics, types
from jaxloop.metrics import LoopOutputs
from jaxloop.output_queue import Arrived


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
    """What the steps of a run have reported, on the host, in their order. Positions in it count steps.

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
        self._unread = LoopOutputs()

    def begin_loop(self) -> None:
        """Drops what a loop under way has reported: another one begins."""
        self.loop, self.weights, self.sums, self._unread = LoopOutputs(), [], {}, LoopOutputs()

    def take(
        self, arrived: Arrived, update: Callable[[Any, types.Output], Any] | None = None, *, keeps_unread: bool = True
    ) -> None:
        """Takes outputs of steps that are on the host.

        Args:
          arrived: the outputs.
          update: adds those of one step to those of the loop; None to append the values to lists.
          keeps_unread: whether somebody reads `parts`.
        """
        if keeps_unread:
            arrived.add_to(self._unread)
        if update is None:
            arrived.add_to(self.loop)
            return
        for row in arrived.rows():
            self.loop = update(self.loop, row)

    def count(self, weights: Sequence[int]) -> None:
        """Counts steps whose outputs were taken, each for as many examples."""
        self.position += len(weights)
        self.weights += weights
        self._unread.num_examples += weights

    def read(self) -> None:
        """Ends the part since the last reading, and its sums."""
        _merge_into(self.loop, self.sums)
        _merge_into(self._unread, self.sums)
        self.parts.add(self.position, self._unread)
        self.sums, self._unread = {}, LoopOutputs()

    def whole_loop(self) -> LoopOutputs:
        """Returns the outputs of the loop under way, a copy."""
        outputs = LoopOutputs(self.loop, self.weights).copy()
        _merge_into(outputs, self.sums)
        return outputs

    def pass_loops(self, num_steps: int) -> None:
        """Ends the loops that have ended inside a call, of whose steps the first ones are in `loop`."""
        ended, loop = LoopOutputs(self.loop, self.weights).split(num_steps)
        end, unread = self.position - len(loop.num_examples), self._unread.num_examples
        self.loops.add(end, ended)
        if len(unread) > len(loop.num_examples):
            part, self._unread = self._unread.split(len(unread) - len(loop.num_examples))
            self.parts.add(end, part)
        self.loop, self.weights = loop, loop.num_examples

    def end_loop(self, outputs: LoopOutputs) -> None:
        """Ends the loop, and the part since the last reading, with what `end` has made of the outputs."""
        self._unread.update({name: value for name, value in outputs.items() if not isinstance(value, list)})
        self.read()
        self.loops.add(self.position, outputs.copy())  # The caller has those, and a series joins its parts.
        self.begin_loop()

    def state_dict(self, encode: Callable[[LoopOutputs], Any], *, keeps_loop: bool) -> dict[str, Any]:
        """Returns what a checkpoint keeps; with `keeps_loop` also the loop under way."""
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
        ledger.sums = {name: states[0] for name, states in LoopOutputs.decode(state_dict["sums"]).items()}
        ledger.parts, ledger.loops = Series.decode(state_dict["parts"]), Series.decode(state_dict["loops"])
        return ledger


def _merge_into(outputs: dict[str, Any], sums: Mapping[str, Any]) -> None:
    for name, state in sums.items():
        outputs[name] = metrics.merge_if_metrics([*outputs.get(name, ()), state])
