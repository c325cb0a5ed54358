"""Classes that describe a checked experiment, its state and its loops."""

from typing import Any, NamedTuple, final

from jaxloop import metrics
from jaxloop.action_loop import ActionLoop
from jaxloop.check.report import Findings
from jaxloop.engine.rehearse import Calls
from jaxloop.outer_loop.data import Sources
from jaxloop.outer_loop.extension import Experiment
from jaxloop.outer_loop.specs import EvalSpec
from jaxloop.schedules import Schedule


@final
class Checked(NamedTuple):
    """An experiment to check, with the options of the check.

    Attributes:
      experiment: The experiment.
      log_interval: See `OuterLoop`.
      sources: The object that opens the datasets, both for checks and for runs.
      topology: The TPUs to compile the train step for, or None to use the devices of the step's partitioner.
      is_starting: True if the run is about to start. In that case, the check neither reads batches nor traces anything.
    """

    experiment: Experiment
    log_interval: int | Schedule
    sources: Sources
    topology: str | None
    is_starting: bool

    @property
    def evaluations(self) -> list[tuple[str, ActionLoop, EvalSpec]]:
        """The name, loop and spec of each evaluation."""
        loops, specs = self.experiment.eval_loops, self.experiment.spec.eval_specs
        return [(each.name, loop, each) for loop, each in zip(loops, specs, strict=True)]


@final
class State(NamedTuple):
    """The state that a run would start from.

    Attributes:
      shapes: The shapes of the state's leaves, or None if the run can't start from this state.
      values: The state itself, or None if only its shapes are known.
    """

    shapes: Any = None
    values: Any = None


@final
class Part(NamedTuple):
    """A loop of the experiment, with the check's predictions for it.

    Attributes:
      here: The findings for the loop.
      name: The loop's name in the history.
      loop: The loop.
      calls: The predicted calls to the loop. A call to the train loop is listed at the training step at which the call
        ends, and a call to an eval loop at the training step at which the evaluation runs.
      outputs: Sample outputs with the same structure as the outputs that the loop would return. None if the structure
        is unknown, for example because of an error or a user-defined method.
      is_open: True if the arguments that the step's `run` would receive are unknown.
    """

    here: Findings
    name: str
    loop: ActionLoop
    calls: Calls
    outputs: metrics.LoopOutputs | None = None
    is_open: bool = False

    @property
    def trains(self) -> bool:
        """True if this is the train loop."""
        return self.name == "train"
