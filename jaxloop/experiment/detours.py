"""Batches that a run leaves out, and detours, which are returns to earlier checkpoints."""

import bisect
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, final

from absl import logging

from jaxloop.base import checks
from jaxloop.data.position import PositionedIterator, number_of
from jaxloop.history import History
from jaxloop.schedules import Elapsed


@final
@dataclasses.dataclass(frozen=True)
class Detour:
    """A return to an earlier checkpoint, after which the run continues but skips some batches.

    Attributes:
      step: The step at which the run turned back.
      first_batch: The number of the first batch to skip.
      last_batch: The number of the last batch to skip.
      first_step: The step that used the first of these batches. The run returns to a checkpoint from before this step.
      reason: The reason for the detour, as a phrase for messages.
    """

    step: int
    first_batch: int
    last_batch: int
    first_step: int
    reason: str


@final
class LeftOut:
    """The batches that a run leaves out. Batches are numbered from 1, and numbering continues across epochs.

    >>> left_out = LeftOut([3])
    >>> epoch = PositionedIterator(["a", "b", "c", "d"])
    >>> left_out.apply_to(epoch)
    >>> list(epoch)
    ['a', 'b', 'd']
    >>> left_out.number_at(2, epoch), left_out.number_at(3, epoch)
    (2, 4)

    Args:
      given: The batch numbers that were passed to the `OuterLoop` as `skip`.

    Attributes:
      numbers: The numbers of all batches to leave out, in ascending order.
      detours: The detours so far.
      requested: The detour that an action has requested; None if no detour is pending.
      at_most: The maximum number of detours; None for no limit. Exceeding it ends the run with an error.
      epoch_start: The total number of batches in the completed epochs.
    """

    def __init__(self, given: Iterable[int] = ()):
        self._given = sorted(set(given))
        self.numbers: list[int] = list(self._given)
        self.detours: list[Detour] = []
        self.requested: Detour | None = None
        self.at_most: int | None = None
        self.epoch_start: int = 0
        self._num_recorded = 0

    def apply_to(self, source: PositionedIterator | None) -> None:
        """Makes the iterator over the current epoch skip these batches."""
        if source is not None:
            source.leave_out(number - self.epoch_start for number in self.numbers if number > self.epoch_start)

    def end_epoch(self, source: PositionedIterator | None) -> None:
        """Advances `epoch_start` by the number of batches in the epoch that just ended."""
        self.epoch_start += 0 if source is None else source.num_read

    def number_at(self, count: int, source: PositionedIterator | None, *, before: int = 0) -> int:
        """Returns the number of the `count`-th batch returned in this epoch, or of the batch `before` batches earlier.

        Args:
          count: The batch's position among the batches returned in the current epoch, starting at 1.
          source: The iterator over the current epoch; None between epochs.
          before: How many batches to go back from the `count`-th one.
        """
        earlier = self.epoch_start - bisect.bisect_right(self.numbers, self.epoch_start)
        return number_of(earlier + (0 if source is None else count) - before, self.numbers)

    def record(self, number: int, now: Elapsed, history: History) -> None:
        """Adds a history row for each batch left out since the last call.

        `number` is the number of the latest batch.
        """
        for left_out in self.numbers[self._num_recorded : bisect.bisect_right(self.numbers, number)]:
            self._num_recorded += 1
            history.commit(now, {"left_out": {"batch": left_out}})

    def warn_of_unreached(self, number: int) -> None:
        """Warns about batches in `skip` that the run never reached.

        `number` is the number of the latest batch.
        """
        if unreached := [each for each in self._given if each > number]:
            logging.warning("The run ended before it reached the batches %s in skip.", _listed(unreached))

    # Detours ---------------------------------------------------------------------------------------------

    def state_dict(self, number: int) -> dict[str, Any]:
        """Returns the state as JSON-serializable values, to be stored in a checkpoint.

        `number` is the number of the latest batch.
        """
        return {
            "numbers": [each for each in self.numbers if each <= number],
            "detours": [dataclasses.asdict(each) for each in self.detours],
            "epoch_start": self.epoch_start,
            "num_recorded": self._num_recorded,
            "newest": number,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], now: Elapsed) -> list[Detour]:
        """Restores the state saved in a checkpoint.

        Detours that began after the checkpoint was saved are kept, as are the batches to leave out after it.

        Args:
          state_dict: The result of `state_dict`.
          now: The run's progress at the checkpoint.

        Returns:
          The detours that began after this checkpoint was saved.
        """
        newest, before = state_dict["newest"], state_dict["numbers"]
        detours = [Detour(**each) for each in state_dict["detours"]]
        if missed := [each for each in self._given if each <= newest and each not in before]:
            logging.warning(
                "The run has used the batches %s before step %d, so it can no longer leave them out. Resume from an "
                "earlier checkpoint.",
                _listed(missed),
                now.steps,
            )
        newer, self.detours = self.detours[len(detours) :], [*detours, *self.detours[len(detours) :]]
        planned = {*self._given, *(n for each in self.detours for n in range(each.first_batch, each.last_batch + 1))}
        self.numbers = sorted({*before, *(each for each in planned if each > newest)})
        self.epoch_start, self._num_recorded = state_dict["epoch_start"], state_dict["num_recorded"]
        return newer

    def turn_back(self) -> Detour:
        """Begins the requested detour and returns it."""
        assert self.requested is not None
        detour, self.requested = self.requested, None
        self.detours.append(detour)
        return detour


def _listed(numbers: Iterable[int]) -> str:
    return checks.listed(map(str, numbers))
