"""The experiment being checked, with its state and loops."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, final

from etils import epath

from jaxloop import metrics
from jaxloop.action_loop import ActionLoop
from jaxloop.actions.checkpoint_action import CheckpointAction
from jaxloop.check.report import Findings
from jaxloop.data.position import PositionedIterator
from jaxloop.engine.rehearse import Calls
from jaxloop.experiment.specs import CheckpointSpec, EvalSpec, RunSpec
from jaxloop.schedules import Schedule


@final
@dataclasses.dataclass(frozen=True)
class Experiment:
    """An `OuterLoop` with the arguments of a call.

    Attributes:
      spec: The arguments of the call.
      train_loop: The train loop; None to evaluate only.
      eval_loops: One loop for each `EvalSpec`.
      checkpoint_spec, workdir, log_interval: See `OuterLoop`.
      source_of: A function that opens a dataset as the run would.
      savers: The actions that save checkpoints.
      passes: The number of epochs that the last call completed, in case this run continues from there.
      topology: The TPUs to compile the train step for; None for the devices of its partitioner.
      is_starting: True if the run is about to start, so that the check must neither read batches nor trace anything.
    """

    spec: RunSpec
    train_loop: ActionLoop | None
    eval_loops: Sequence[ActionLoop]
    checkpoint_spec: CheckpointSpec | None
    workdir: epath.PathLike | None
    log_interval: int | Schedule
    source_of: Callable[[Any], PositionedIterator]
    savers: Sequence[CheckpointAction]
    passes: int
    topology: str | None
    is_starting: bool

    @property
    def evaluations(self) -> list[tuple[str, ActionLoop, EvalSpec]]:
        """The name, loop and spec of each evaluation."""
        return [(each.name, loop, each) for loop, each in zip(self.eval_loops, self.spec.eval_specs, strict=True)]


@final
@dataclasses.dataclass(frozen=True)
class State:
    """The state that was passed to the check.

    Attributes:
      shapes: The shapes of the state; None if the run can't start from it.
      values: The state itself; None if only shapes were passed.
    """

    shapes: Any = None
    values: Any = None


@final
@dataclasses.dataclass(frozen=True)
class Part:
    """A loop of the experiment, with the check's predictions for it.

    Attributes:
      here: The findings for the loop.
      name: The loop's name in the history.
      loop: The loop.
      calls: The training steps at which the loop ends.
      outputs: Sample outputs, like those that the loop will return; None if they are unknown, either because of an
        error or because a user-defined method may add some.
      is_open: True if the arguments of `run` can be determined only by running the loop.
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
