"""The arguments of an experiment: how long to train, on what to evaluate and when, where its checkpoints are."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, final

import numpy as np
from etils import epath

from jaxloop import checkpoint, checks, types
from jaxloop.schedules import Schedule
from jaxloop.sources import NO_DATA

STOPPED_FILE = "STOPPED"
"""The empty file in the checkpoint directory which says that training is done."""


@final
@dataclasses.dataclass(frozen=True)
class EvalContext:
    """The progress of an experiment when it asks whether to evaluate.

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
    """The data that an eval loop evaluates on, and when it does.

    >>> import numpy as np
    >>> EvalSpec([{"x": np.zeros([4, 3])}], eval_loop_interval=5).num_steps is None
    True

    Attributes:
      dataset: an iterable of batches, evaluated from its start each time, or a function that returns a new one.
      dataset_iterator: an iterator to go on with instead, `num_steps` batches each time.
      num_steps: how many batches; None for all.
      eval_loop_interval: evaluates after every so many train loops; None for each. Not asked in continuous evaluation.
      should_eval_fn: gets an `EvalContext`, says whether to evaluate. Both the interval and the function must agree.
      schedule: evaluates after exactly the steps at which it fires, inside a train loop if need be, in the place of the
        interval: `every(steps=500)`, `every(time=600)`, `last()`. Not asked where nothing is trained.
      name: what its rows in the history are called, and its metrics: "test" makes `test/accuracy`. Where several specs
        leave it at "eval", the second is called "eval_2".
    """

    dataset: Iterable[types.Batch] | Callable[[], Iterable[types.Batch]] | None
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

    @property
    def interval(self) -> int | Schedule:
        """When it is evaluated in training, as the interval of an action."""
        return self.schedule if self.schedule is not None else self.eval_loop_interval or 1

    @property
    def when(self) -> str:
        """The argument that says when it is evaluated, in words."""
        if self.schedule is not None:
            return f"schedule={self.schedule!r}"
        is_by_fn = self.eval_loop_interval is None and self.should_eval_fn is not None
        return "should_eval_fn" if is_by_fn else f"eval_loop_interval={self.eval_loop_interval}"

    def empty(self) -> ValueError:
        """The error of an evaluation without a batch."""
        used_up = self.dataset_iterator is not None or hasattr(self.dataset, "__next__")
        return ValueError(
            "An eval dataset gave no batch. "
            + (
                "It is an iterator, which has been used up: give an iterable that starts anew each time (a list, a "
                "tf.data.Dataset, tfds.as_numpy(...))."
                if used_up
                else "Look at what its pipeline filters out, and whether it drops a remainder that is all there is. "
                "A function must return a new iterator each time."
            )
        )


@final
@dataclasses.dataclass(frozen=True)
class CheckpointSpec:
    """The checkpoints of an experiment.

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


def named(eval_specs: Sequence[EvalSpec] | None) -> tuple[EvalSpec, ...]:
    """Returns the specs, those without a name of their own numbered.

    >>> [spec.name for spec in named([EvalSpec([]), EvalSpec([], name="test"), EvalSpec([])])]
    ['eval', 'test', 'eval_3']
    """
    specs = list(eval_specs or ())
    unnamed = [index for index, spec in enumerate(specs) if isinstance(spec, EvalSpec) and spec.name == "eval"]
    for index in unnamed[1:]:
        specs[index] = dataclasses.replace(specs[index], name=f"eval_{index + 1}")
    return tuple(specs)


def evaluations_in(train_loops: int, spec: EvalSpec) -> int | None:
    """Returns how many evaluations come in so many train loops; None where that takes more than to count loops."""
    if spec.schedule is not None or spec.should_eval_fn is not None:
        return None
    return train_loops // (spec.eval_loop_interval or 1)


@final
@dataclasses.dataclass(frozen=True)
class RunSpec:
    """The arguments of a call of an `OuterLoop`, see there; the eval specs are `named`."""

    train_dataset: Any = None
    total_steps: int | None = None
    loop_steps: int | None = None
    eval_specs: Sequence[EvalSpec] = ()
    stop: Schedule | None = None
    epochs: int | None = None
    on_exhausted: str = "stop"

    def errors(self, train_step: Any, *, num_eval_loops: int) -> Iterator[Exception]:
        """Yields the errors in it, for an `OuterLoop` with so many eval loops, and with a train loop of this step."""
        try:
            checks.check_positive("train_total_steps", self.total_steps, optional=True)
            checks.check_positive("train_loop_steps", self.loop_steps, optional=True)
            checks.check_positive("train_epochs", self.epochs, optional=True)
            if train_step is not None:
                checks.check_multiple("train_total_steps", self.total_steps, train_step)
                checks.check_multiple("train_loop_steps", self.loop_steps, train_step)
        except (TypeError, ValueError) as error:
            yield error
            return
        has_no_data = self.train_dataset is None and train_step is not None
        if self.total_steps is not None and self.total_steps > np.iinfo(np.int32).max:
            yield ValueError(f"train_total_steps={self.total_steps} is more than state.step, an int32, can count to.")
        if self.epochs is not None and has_no_data:
            yield ValueError(
                f"OuterLoop got train_epochs={self.epochs} without a train_dataset: there is nothing to pass over. "
                "Give train_total_steps or stop."
            )
        if self.epochs is not None and self.loop_steps is not None:
            yield ValueError(
                f"OuterLoop got train_epochs={self.epochs} and train_loop_steps={self.loop_steps}, and each epoch is "
                "one loop: give one of them. An action or evaluation with a schedule such as every(steps=100) is "
                "called inside the loop."
            )
        if self.epochs is not None and self.epochs > 1 and self.has_iterator:
            yield ValueError(
                f"train_epochs={self.epochs} needs a train dataset that starts anew each time (a list, a "
                f"tf.data.Dataset, a DataLoader), got the iterator {self.train_dataset!r}, which ends once and for all."
            )
        if self.stop is not None and not isinstance(self.stop, Schedule):
            yield TypeError(f"stop must be a Schedule such as at(steps=10_000), got {self.stop!r}.")
        if self.train_dataset is not None and train_step is None:
            yield ValueError(
                "OuterLoop got a train_dataset without a train_loop: give both to train, neither to evaluate only."
            )
        if has_no_data and self.total_steps is None and self.stop is None:
            yield ValueError(
                "OuterLoop got a train_loop without a train_dataset. Give the data; or, if the step needs none, "
                "train_total_steps or stop, because nothing else ends the run."
            )
        yield from self._errors_of_evaluations(num_eval_loops)
        if self.on_exhausted not in ("stop", "raise"):
            yield ValueError(f'on_exhausted must be "stop" or "raise", got {self.on_exhausted!r}.')

    def _errors_of_evaluations(self, num_eval_loops: int) -> Iterator[Exception]:
        specs = self.eval_specs
        names = [spec.name for spec in specs if isinstance(spec, EvalSpec)]
        if len(specs) != num_eval_loops:
            yield ValueError(
                f"OuterLoop has {num_eval_loops} eval_loops and was called with {len(specs)} eval_specs. "
                "Give one EvalSpec for each eval loop, in their order."
            )
        if strangers := [spec for spec in specs if not isinstance(spec, EvalSpec)]:
            yield TypeError(f"eval_specs must hold EvalSpecs, got {strangers[0]!r}.")
        elif twice := {name for name in names if names.count(name) > 1}:
            yield ValueError(f"Two EvalSpecs are named {twice.pop()!r}: give each a name of its own.")

    @property
    def data(self) -> Any:
        """The train dataset; without one, a batch of None for each step."""
        return NO_DATA if self.train_dataset is None else self.train_dataset

    @property
    def has_iterator(self) -> bool:
        """True if the train data end once and for all."""
        return hasattr(self.train_dataset, "__next__")

    @property
    def end(self) -> Any:
        """The end of the training, as far as it is known before."""
        end = self.stop if self.total_steps is None else self.total_steps
        return "the end of the dataset" if end is None else end

    def ends_loop(self, step_num: int) -> bool:
        """Returns whether a loop ends after this step in any case."""
        is_multiple = self.loop_steps is not None and step_num % self.loop_steps == 0
        return is_multiple or step_num == self.total_steps

    def steps_of_next_loop(self, step_num: int) -> int | None:
        """Returns the steps to the next multiple of `loop_steps`, or to the total; None for as long as there is data.

        >>> spec = RunSpec(total_steps=25, loop_steps=10)
        >>> spec.steps_of_next_loop(0), spec.steps_of_next_loop(7), spec.steps_of_next_loop(20)
        (10, 3, 5)
        """
        limits = []
        if self.loop_steps is not None:
            limits.append(self.loop_steps - step_num % self.loop_steps)
        if self.total_steps is not None:
            limits.append(self.total_steps - step_num)
        return min(limits, default=None)

    def description(self) -> list[str]:
        """Returns what must be the same in all processes of a job, a line each."""
        names = ("total_steps", "loop_steps", "epochs", "stop", "on_exhausted")
        return [
            *(f"{name}={getattr(self, name)!r}" for name in names),
            *(f"EvalSpec {spec.name!r}: {spec.num_steps} steps" for spec in self.eval_specs),
        ]
