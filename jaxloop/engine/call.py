"""The options of an engine, and the state and outcome of a single call to it."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, final

from jaxloop import partition
from jaxloop.engine.program import Program, Ran
from jaxloop.step import Step, nonfinite


@final
@dataclasses.dataclass
class Options:
    """The options that determine how a loop runs its steps; see `TrainLoop`.

    Attributes:
      steps_per_dispatch: The number of steps in one dispatch.
      nan_policy: The policy for NaN and infinity.
      max_in_flight: The maximum number of steps by which the host may run ahead of the devices; None for the default.
      evaluates: True if the loop never changes the state.
      checks_count: True if the engine still has to check that `state.step` counts the updates. Set to False once the
        check has passed.
    """

    steps_per_dispatch: int = 1
    nan_policy: nonfinite.NanPolicy = "ignore"
    max_in_flight: int | None = None
    evaluates: bool = False
    checks_count: bool = False

    def in_flight(self, step: Step) -> int:
        """Returns the number of steps by which the host may run ahead of the devices."""
        default = partition.max_steps_in_flight(step.partitioner.mesh, self.steps_per_dispatch)
        return self.max_in_flight or default


@final
class Failure(NamedTuple):
    """The information that an engine keeps after an exception.

    Attributes:
      step_num: The number of the step that raised the exception, or None if no step raised it.
      state: The state after the last completed step, or None if that state is unusable.
      reason: The reason why that state is unusable, or None if it is usable.
    """

    step_num: int | None = None
    state: Any = None
    reason: str | None = None


@final
@dataclasses.dataclass
class Outcome:
    """The outcome of the latest call to an engine.

    Attributes:
      num_examples: The number of examples in each step of the latest loop.
      data_ended: True if the end of the data has been reached.
      is_interrupted: True if a signal arrived before all steps of a loop had run.
      failure: The information that is kept if the call raised an exception.
    """

    num_examples: Sequence[int] = ()
    data_ended: bool = False
    is_interrupted: bool = False
    failure: Failure = dataclasses.field(default_factory=Failure)


@final
@dataclasses.dataclass
class Call:
    """A single call to an engine.

    Attributes:
      updates: The number of updates per batch, or 0 if the call evaluates.
      program: The program that runs the steps. None after the call.
      state: The state after the last completed step. None after the call.
      place: The part of the run that is currently active, such as the dataset or the step. If an exception is raised, a
        note on the exception names this part.
      ran: The steps that are running now, with their results so far. None if no steps are running.
      count: The pair `(state.step, number of completed updates)` at the end of the most recent training call. The first
        element is None if the state has no `step`. If a later call begins with the same `state.step` array, that call
        uses the recorded number instead of reading the array.
      own_hooks: The names of the loop's hooks that the user has overridden.
      outcome: The outcome of the call so far.
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
        """True if the user has overridden a hook that reads the outputs and may change them."""
        return not self.own_hooks.isdisjoint({"run", "update_outputs", "end"})

    outcome: Outcome = dataclasses.field(default_factory=Outcome)
