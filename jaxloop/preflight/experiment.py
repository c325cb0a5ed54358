"""What is looked at: an experiment, where its run begins, and the loops it is made of."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from etils import epath

from jaxloop import metrics
from jaxloop.action_loop import ActionLoop
from jaxloop.forecast import Calls
from jaxloop.position import PositionedIterator
from jaxloop.schedules import Elapsed, Schedule
from jaxloop.specs import CheckpointSpec, EvalSpec

TRAIN = "the train loop"
"""Where a problem of the training is."""


@final
@dataclasses.dataclass(frozen=True)
class Experiment:
    """What is to be looked at: an `OuterLoop` and what it would be called with.

    Attributes:
      train_loop: None where something is only evaluated.
      evaluations: for each its name, loop and spec.
      open_train_data: opens the train data, as the run would.
      open_eval_data: opens the iterator that an evaluation goes on with, as the run would.
      passes: how many passes over the train data have ended, if the run goes on where the last call ended.
    """

    state: Any
    train_loop: ActionLoop | None
    evaluations: Sequence[tuple[str, ActionLoop, EvalSpec]]
    checkpoint_spec: CheckpointSpec | None
    workdir: epath.PathLike | None
    log_interval: int | Schedule
    train_dataset: Any
    open_train_data: Callable[[], PositionedIterator]
    open_eval_data: Callable[[Any], PositionedIterator]
    total_steps: int | None
    loop_steps: int | None
    epochs: int | None
    stop: Schedule | None
    on_exhausted: str
    passes: int

    @property
    def updates_per_step(self) -> int:
        """How many steps a batch of the training counts for."""
        return 1 if self.train_loop is None else self.train_loop.step.updates_per_step


@final
@dataclasses.dataclass(frozen=True)
class Begin:
    """Where a run begins.

    Attributes:
      elapsed: how far it is.
      passes: how many passes over its data have ended.
      batches: how many batches of this pass are used.
      evaluations: how often each evaluation has run, by name.
      has_stopped: whether it was asked to stop there.
    """

    elapsed: Elapsed
    passes: int = 0
    batches: int = 0
    evaluations: Mapping[str, int] = dataclasses.field(default_factory=dict)
    has_stopped: bool = False


@final
@dataclasses.dataclass(frozen=True)
class Part:
    """A loop of the experiment, and what is foreseen of it.

    Attributes:
      where: where a problem of it is.
      name: what the history calls it.
      loop: itself.
      calls: after which steps of the training it ends.
      outputs: like those that it will return; None where nobody knows them.
    """

    where: str
    name: str
    loop: ActionLoop
    calls: Calls
    outputs: metrics.LoopOutputs | None

    @property
    def trains(self) -> bool:
        """Whether it is the train loop."""
        return self.where == TRAIN
