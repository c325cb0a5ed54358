"""The options of a loop, and one call of it with its outcome."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, final

from jaxloop import partition
from jaxloop.engine.program import Program, Ran
from jaxloop.step import Step, nonfinite


@final
@dataclasses.dataclass
class Options:
    """How a loop runs its steps. See `TrainLoop`.

    Attributes:
      steps_per_dispatch: The number of steps in one dispatch.
      nan_policy: What to do about NaN and infinity.
      max_in_flight: The maximum number of steps by which the host may run ahead; None for the default.
      evaluates: True if the loop never changes the state.
      checks_count: Whether to check that `state.step` counts the updates, once.
    """

    steps_per_dispatch: int = 1
    nan_policy: nonfinite.NanPolicy = "ignore"
    max_in_flight: int | None = None
    evaluates: bool = False
    checks_count: bool = False

    def in_flight(self, step: Step) -> int:
        """Returns the number of steps by which the host may run ahead."""
        default = partition.max_steps_in_flight(step.partitioner.mesh, self.steps_per_dispatch)
        return self.max_in_flight or default


@final
class Failure(NamedTuple):
    """What is left after an exception.

    Attributes:
      step_num: The number of the step that raised the exception; None if no step did.
      state: The state after the last completed step; None if it was lost.
      reason: The reason why there is no state.
    """

    step_num: int | None = None
    state: Any = None
    reason: str | None = None


@final
@dataclasses.dataclass
class Outcome:
    """How the newest call of an engine went.

    Attributes:
      num_examples: The number of examples in each step of the latest loop.
      data_ended: True if the data have ended.
      is_interrupted: True if a signal came before all steps of a loop had run.
      failure: What is left after an exception.
    """

    num_examples: Sequence[int] = ()
    data_ended: bool = False
    is_interrupted: bool = False
    failure: Failure = dataclasses.field(default_factory=Failure)


@final
@dataclasses.dataclass
class Call:
    """One call of an engine.

    Attributes:
      updates: The number of updates per batch; 0 if the call evaluates.
      program: The program that runs the steps; None after the call.
      state: The state after the last completed step; None after the call.
      place: What is running, for the note on an exception.
      ran: The steps that are running now; None between them.
      count: After the call, `state.step` and its value.
      own_hooks: The names of the loop's hooks that a user has defined.
      outcome: How the call has gone so far.
    """

    updates: int = 1
    program: Program | None = None
    state: Any = None
    place: Any = "the dataset"
    ran: Ran | None = None
    count: tuple[Any, int] = (None, 0)
    own_hooks: frozenset[str] | set[str] = frozenset()

    @property
    def changes_outputs(self) -> bool:
        """True if hooks of the loop read its outputs, and may change them."""
        return not self.own_hooks.isdisjoint({"run", "update_outputs", "end"})

    outcome: Outcome = dataclasses.field(default_factory=Outcome)
