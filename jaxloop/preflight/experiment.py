"""What is checked: an experiment, its state, and the loops it is made of."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, final

from etils import epath

from jaxloop import metrics
from jaxloop.action_loop import ActionLoop
from jaxloop.forecast import Calls
from jaxloop.position import PositionedIterator
from jaxloop.preflight.report import Findings
from jaxloop.schedules import Schedule
from jaxloop.specs import CheckpointSpec, EvalSpec, RunSpec


@final
@dataclasses.dataclass(frozen=True)
class Experiment:
    """An `OuterLoop`, and what it would be called with.

    Attributes:
      spec: how long it would train, and on what, and on what it would evaluate.
      train_loop: None where something is only evaluated.
      eval_loops: one for each `EvalSpec`.
      checkpoint_spec: see `OuterLoop`, as `workdir` and `log_interval`.
      source_of: opens a dataset as the run would.
      passes: how many passes over the train data have ended, if the run resumes where the last call ended.
    """

    spec: RunSpec
    train_loop: ActionLoop | None
    eval_loops: Sequence[ActionLoop]
    checkpoint_spec: CheckpointSpec | None
    workdir: epath.PathLike | None
    log_interval: int | Schedule
    source_of: Callable[[Any], PositionedIterator]
    passes: int

    @property
    def evaluations(self) -> list[tuple[str, ActionLoop, EvalSpec]]:
        """The name, loop and spec of each evaluation."""
        specs = [each for each in self.spec.eval_specs if isinstance(each, EvalSpec)]
        names = [each.name for each in specs]
        # Two of one name are among the errors of the arguments.
        names = [name if names.count(name) == 1 else f"{name} {number}" for number, name in enumerate(names, start=1)]
        return list(zip(names, self.eval_loops, specs, strict=False))


@final
@dataclasses.dataclass(frozen=True)
class State:
    """The state that is given.

    Attributes:
      shapes: it in shapes; None where there is none to begin with.
      values: itself; None where it is given in shapes.
    """

    shapes: Any = None
    values: Any = None


@final
@dataclasses.dataclass(frozen=True)
class Part:
    """A loop of the experiment, and what is foreseen of it.

    Attributes:
      here: where its problems are.
      name: its name in the history.
      loop: the loop.
      calls: after which steps of the training it ends.
      outputs: outputs like those that it will return; None where nobody knows them: with an error, and where a method
        of the user may add to them.
      is_open: whether only a run can tell what `run` gets.
    """

    here: Findings
    name: str
    loop: ActionLoop
    calls: Calls
    outputs: metrics.LoopOutputs | None = None
    is_open: bool = False

    @property
    def trains(self) -> bool:
        """Whether it is the train loop."""
        return self.name == "train"
