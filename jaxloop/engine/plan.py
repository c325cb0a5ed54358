"""What an experiment adds to a loop."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, final

from jaxloop import types
from jaxloop.engine.agenda import Item
from jaxloop.schedules import Elapsed, Schedule


def _no_context(now: Elapsed) -> Mapping[str, Any]:
    return {"history": None, "total_steps": None, "snapshot": None, "detour": None}


@final
class Source(NamedTuple):
    """What an experiment does with the data of a loop.

    Attributes:
      next_pass: A function to call when the data end. Returns True if there is more data, for another loop.
      mark: A function to call before a batch is read ahead, if a save is due.
      consumed: A function to call with the number of batches that were read but not used, after steps.
      observers: Functions to call with each batch before a step sees it.
    """

    next_pass: Callable[[], bool] = lambda: False
    mark: Callable[..., None] = lambda **options: None
    consumed: Callable[[int], None] = lambda ahead: None
    observers: Sequence[Callable[[types.Batch], None]] = ()


@final
@dataclasses.dataclass(frozen=True)
class Plan:
    """What an experiment adds to a loop.

    Attributes:
      is_alone: True if no experiment runs the loop. Then, each call runs a single loop.
      total: The total number of updates.
      loop_steps: The number of updates per loop. Loops end at multiples of this number.
      stop: A schedule that ends the run.
      items: Items other than the loop's own end actions: rows and evaluations.
      context: A function `(progress) -> further keyword arguments for actions`.
      source: What is done with the data.
      at: In an evaluation, the progress of the training.
    """

    is_alone: bool = False
    total: int | None = None
    loop_steps: int | None = None
    stop: Schedule | None = None
    items: Sequence[Item] = ()
    context: Callable[[Elapsed], Mapping[str, Any]] = _no_context
    source: Source = dataclasses.field(default_factory=Source)
    at: Elapsed | None = None

    def ends_at(self, now: Elapsed) -> bool:
        """Returns True if the run ends at this step, whatever the data say."""
        return now.steps == self.total or (self.stop is not None and self.stop.stops(now.previous or now, now))

    def ends_loop(self, step_num: int) -> bool:
        """Returns True if a loop ends at this step because of its length."""
        return self.loop_steps is not None and step_num % self.loop_steps == 0

    @property
    def schedules(self) -> list[Schedule]:
        """The schedules at which the loop must stop, besides those of its items."""
        return [] if self.stop is None else [self.stop]
