"""What an experiment is told: on what to evaluate and when, and where its checkpoints are."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, final

from etils import epath

from jaxloop import checkpoint, checks, types
from jaxloop.schedules import Schedule

STOPPED_FILE = "STOPPED"
"""The empty file in the checkpoint directory which says that training is done."""


@final
@dataclasses.dataclass(frozen=True)
class EvalContext:
    """Where an experiment is when it asks whether to evaluate.

    Attributes:
      is_continuous_eval: whether checkpoints are evaluated as they appear, without a train loop.
      step_num: completed updates of the state to evaluate.
      loop_count: train loops that have ended; in continuous evaluation, checkpoints that have been evaluated.
    """

    is_continuous_eval: bool
    step_num: int
    loop_count: int


@final
@dataclasses.dataclass(frozen=True)
class EvalSpec:
    """On what an eval loop evaluates, and when.

    >>> import numpy as np
    >>> EvalSpec([{"x": np.zeros([4, 3])}], eval_loop_interval=5).num_steps is None
    True

    Attributes:
      dataset: an iterable of batches, evaluated from its start each time.
      dataset_iterator: an iterator to go on with instead, `num_steps` batches each time.
      num_steps: how many batches; None for all.
      eval_loop_interval: evaluates after every so many train loops; None for each. Not asked in continuous evaluation.
      should_eval_fn: gets an `EvalContext`, says whether to evaluate. Both the interval and the function must agree.
      schedule: evaluates after exactly the steps at which it fires, inside a train loop if need be, in the place of the
        interval: `every(steps=500)`, `every(time=600)`, `last()`. Not asked where nothing is trained.
      name: what its rows in the history are called, and its metrics: "test" makes `test/accuracy`. Where several specs
        leave it at "eval", the second is called "eval_2".
    """

    dataset: Iterable[types.Batch] | None
    dataset_iterator: Iterator[types.Batch] | None = None
    num_steps: int | None = None
    eval_loop_interval: int | None = None
    should_eval_fn: Callable[[EvalContext], bool] | None = None
    schedule: Schedule | None = None
    name: str = "eval"

    def __post_init__(self) -> None:
        checks.check_positive("EvalSpec.num_steps", self.num_steps, optional=True)
        checks.check_positive("EvalSpec.eval_loop_interval", self.eval_loop_interval, optional=True)
        if self.schedule is not None and not isinstance(self.schedule, Schedule):
            raise TypeError(f"EvalSpec.schedule must be a Schedule such as every(steps=500), got {self.schedule!r}.")
        if self.schedule is not None and self.eval_loop_interval is not None:
            raise ValueError(
                f"EvalSpec got schedule={self.schedule!r} and eval_loop_interval={self.eval_loop_interval}: give one "
                "of them. every(loops=5) is the interval as a schedule."
            )
        if self.name in ("", "train") or "/" in self.name or "." in self.name:
            raise ValueError(f"EvalSpec.name must be a name without / and ., other than 'train', got {self.name!r}.")
        if self.dataset is None and self.dataset_iterator is None:
            raise ValueError("EvalSpec needs a dataset, or a dataset_iterator with num_steps; both are None.")
        if self.dataset_iterator is not None and self.num_steps is None:
            raise ValueError(
                "EvalSpec.dataset_iterator is drawn from again at each evaluation, so it needs num_steps, got None."
            )

    def empty(self) -> ValueError:
        """The error of an evaluation without a batch."""
        used_up = self.dataset_iterator is not None or iter(self.dataset) is self.dataset  # pyright: ignore
        return ValueError(
            "An eval dataset gave no batch. "
            + (
                "It is an iterator, which has been used up: give an iterable that starts anew each time (a list, a "
                "tf.data.Dataset, tfds.as_numpy(...))."
                if used_up
                else "Look at what its pipeline filters out, and whether it drops a remainder that is all there is."
            )
        )


@final
@dataclasses.dataclass(frozen=True)
class CheckpointSpec:
    """Where an experiment's checkpoints are.

    With a train loop the experiment resumes from the newest one. (A `CheckpointAction` of the train loop writes them.)
    Without, each checkpoint is evaluated as it appears.

    Attributes:
      checkpoint_dir: the directory with one subdirectory a step.
      iterate_interval_secs: in continuous evaluation, seconds between two looks at the directory.
      iterate_stop_fn: in continuous evaluation, says whether no more checkpoints will come; None for the presence of
        the file `STOPPED`, which training leaves in the directory when it is done.
      transforms: Orbax transformations of the saved tree, for `Step.restore_model`.
      restore_data: whether a resumed run goes on in its train data where it was; False for other data, or for an
        iterator that stands where it should.
    """

    checkpoint_dir: epath.PathLike
    iterate_interval_secs: float = 0
    iterate_stop_fn: Callable[[], bool] | None = None
    transforms: Any = None
    restore_data: bool = True

    def __post_init__(self) -> None:
        if self.iterate_interval_secs < 0:
            raise ValueError(
                f"CheckpointSpec.iterate_interval_secs must not be negative, got {self.iterate_interval_secs}."
            )

    @property
    def stopped_file(self) -> epath.Path:
        """The file which says that training is done."""
        return checkpoint.absolute(self.checkpoint_dir) / STOPPED_FILE
