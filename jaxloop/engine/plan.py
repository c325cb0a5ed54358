"""What an experiment adds to a loop."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, final

from jaxloop.engine.agenda import Item
from jaxloop.engine.feed import Source
from jaxloop.schedules import Elapsed, Schedule

_NO_CONTEXT = {"history": None, "total_steps": None, "snapshot": None}


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
      context: Further keyword arguments for actions.
      source: What is done with the data.
      at: In an evaluation, the progress of the training.
    """

    is_alone: bool = False
    total: int | None = None
    loop_steps: int | None = None
    stop: Schedule | None = None
    items: Sequence[Item] = ()
    context: Mapping[str, Any] = dataclasses.field(default_factory=lambda: _NO_CONTEXT)
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
