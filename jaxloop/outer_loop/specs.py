"""The arguments of an experiment: its length, evaluations and checkpoints."""

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, final

import numpy as np
from etils import epath

from jaxloop import types
from jaxloop.base import checks, files
from jaxloop.data.sources import NO_DATA, is_endless, name_of, pass_of
from jaxloop.schedules import Elapsed, Schedule, earliest, planned_steps

STOPPED_FILE = "STOPPED"
"""The name of the empty file in the checkpoint directory that marks training as finished."""


@final
@dataclasses.dataclass(frozen=True)
class EvalContext:
    """The progress of an experiment, which is passed to `EvalSpec.should_eval_fn`.

    Attributes:
      is_continuous_eval: True in continuous evaluation: there is no train loop, and checkpoints are evaluated as they
        appear.
      step_num: The number of updates that have been applied to the state being evaluated.
      loop_count: The number of completed train loops; in continuous evaluation, the number of checkpoints found before
        the current one.
    """

    is_continuous_eval: bool
    step_num: int
    loop_count: int


@final
@dataclasses.dataclass(frozen=True)
class EvalSpec:
    """The dataset and the interval of an evaluation.

    >>> import numpy as np
    >>> EvalSpec([{"x": np.zeros([4, 3])}], eval_loop_interval=5).num_steps is None
    True

    Attributes:
      dataset: An iterable of batches, or a function that returns one. Each evaluation reads the dataset from the start.
      dataset_iterator: An iterator to use instead of `dataset`. Each evaluation reads the next `num_steps` batches from
        it.
      num_steps: The number of batches in an evaluation, or None to use all batches.
      eval_loop_interval: The number of train loops between evaluations, or None to evaluate after each train loop
        (unless `interval` is given). Ignored in continuous evaluation; see `CheckpointSpec`.
      should_eval_fn: A function that receives an `EvalContext` and returns whether to evaluate. It is called only when
        the evaluation is due.
      interval: The interval between evaluations, specified like an action's `interval`: either a number of train loops
        (as in `eval_loop_interval`) or a schedule such as `every(steps=500)`, `every(time=600)` or `last()`. A
        schedule can fire at any step, even in the middle of a train loop. Ignored if there is no train loop. Can't be
        combined with `eval_loop_interval`.
      name: The name of this evaluation in the history, and the prefix of its metrics, as in `test/accuracy`. If several
        specs have the default name "eval", each of them except the first gets its position in the list of specs as a
        suffix, as in "eval_2".
    """

    dataset: Iterable[types.Batch] | Callable[[], Iterable[types.Batch]] | None
    dataset_iterator: Iterator[types.Batch] | None = None
    num_steps: int | None = None
    eval_loop_interval: int | None = None
    should_eval_fn: Callable[[EvalContext], bool] | None = None
    interval: int | Schedule | None = None
    name: str = "eval"

    def __post_init__(self) -> None:
        checks.check_positive("EvalSpec.num_steps", self.num_steps, optional=True)
        checks.check_positive("EvalSpec.eval_loop_interval", self.eval_loop_interval, optional=True)
        if not isinstance(self.interval, Schedule):
            checks.check_positive("EvalSpec.interval", self.interval, optional=True)
        if self.interval is not None and self.eval_loop_interval is not None:
            got = f"interval={self.interval!r} and eval_loop_interval={self.eval_loop_interval}"
            raise ValueError(f"EvalSpec got {got}. Give one of them, such as interval=every(steps=500).")
        if not isinstance(self.name, str) or self.name in ("", "train") or "/" in self.name or "." in self.name:
            raise ValueError(f"EvalSpec.name must be a name without / and ., other than 'train', got {self.name!r}.")
        if self.dataset is None and self.dataset_iterator is None:
            raise ValueError("EvalSpec needs a dataset, or a dataset_iterator with num_steps; both are None.")
        if self.dataset_iterator is not None and self.num_steps is None:
            raise ValueError("EvalSpec.dataset_iterator needs num_steps, got None. Give the number of batches.")

    @property
    def data(self) -> Any:
        """The dataset to evaluate on; only its first pass if it is endless and `num_steps` is None. See `pass_of`."""
        return pass_of(self.dataset) if self.num_steps is None and is_endless(self.dataset) else self.dataset

    @property
    def when_due(self) -> int | Schedule:
        """The interval at which the evaluation runs during training: a schedule or a number of train loops."""
        return self.interval if self.interval is not None else self.eval_loop_interval or 1

    @property
    def when(self) -> str:
        """The argument that determines when to evaluate, formatted for messages."""
        if self.interval is not None:
            return f"interval={self.interval!r}"
        is_by_fn = self.eval_loop_interval is None and self.should_eval_fn is not None
        return "should_eval_fn" if is_by_fn else f"eval_loop_interval={self.eval_loop_interval}"

    def empty(self) -> ValueError:
        """Returns the error to raise if the evaluation's dataset has no batches."""
        return ValueError(
            f"The eval dataset of EvalSpec {self.name!r} yielded no batches. If it is an exhausted iterator, give an "
            "iterable that can be read again for each evaluation (a list, a tf.data.Dataset, tfds.as_numpy(...)), or a "
            "function that returns a new iterator each time. Otherwise, its pipeline may filter out every example, or "
            "drop a remainder that is the only batch."
        )


@final
@dataclasses.dataclass(frozen=True)
class CheckpointSpec:
    """The checkpoint directory of an experiment, with options for resuming and for continuous evaluation.

    An experiment with a train loop resumes from the newest checkpoint in the directory. The train loop's
    `CheckpointAction` saves the checkpoints. An experiment without a train loop evaluates each checkpoint as it
    appears; this is called continuous evaluation.

    Attributes:
      checkpoint_dir: The directory, which contains one subdirectory per checkpoint, named after the step.
      iterate_interval_secs: In continuous evaluation, the time in seconds between searches for new checkpoints.
      iterate_stop_fn: In continuous evaluation, a function that returns True if no more checkpoints will appear. The
        default function checks for the file `STOPPED`, which a training run writes to the directory when it is done.
      transforms: A dict for renaming saved leaves; see `Step.restore_model`.
      restore_data: Whether a resumed run continues at the saved position in its training dataset. Pass False if the
        dataset has changed: the run then reads the new dataset from the beginning, and later restarts resume at the
        saved position in the new dataset. Also pass False for an iterator that is already at the right position.
      on_changed_data: "warn" to log a warning if the data has changed when a run resumes, or "raise" to raise an error.
        The data has changed if the next training batch isn't the one that came next when the checkpoint was saved. The
        message lists the differences.
      restore_hyperparams: Whether a resumed run uses the checkpoint's values of the hyperparameters set through
        `optax.inject_hyperparams`, such as the learning rate. Pass False to use the values in the state passed to the
        run. If the two values of a hyperparameter differ, a warning shows both.
    """

    checkpoint_dir: Any  # A path, which is made absolute.
    iterate_interval_secs: float = 0
    iterate_stop_fn: Callable[[], bool] | None = None
    transforms: Mapping[str, str] | None = None
    restore_data: bool = True
    on_changed_data: Literal["warn", "raise"] = "warn"
    restore_hyperparams: bool = True

    def __post_init__(self) -> None:
        if self.iterate_interval_secs < 0:
            raise ValueError(
                f"CheckpointSpec.iterate_interval_secs must be at least 0, got {self.iterate_interval_secs}."
            )
        if self.on_changed_data not in ("warn", "raise"):
            raise ValueError(f'CheckpointSpec.on_changed_data must be "warn" or "raise", got {self.on_changed_data!r}.')
        if not isinstance(self.checkpoint_dir, str | os.PathLike) or not os.fspath(self.checkpoint_dir):
            raise TypeError(f"CheckpointSpec takes the path of a directory, got {self.checkpoint_dir!r}.")
        object.__setattr__(self, "checkpoint_dir", files.absolute(self.checkpoint_dir))

    @property
    def stopped_file(self) -> epath.Path:
        """The file that marks training as finished."""
        return self.checkpoint_dir / STOPPED_FILE


def named(eval_specs: Sequence[EvalSpec] | None) -> tuple[EvalSpec, ...]:
    """Returns the specs as a tuple. Each spec with the default name, except the first, gets its position as a suffix.

    >>> [spec.name for spec in named([EvalSpec([]), EvalSpec([], name="test"), EvalSpec([])])]
    ['eval', 'test', 'eval_3']
    """
    if isinstance(eval_specs, EvalSpec):
        raise TypeError("eval_specs must be a list of EvalSpecs, got an EvalSpec. Write eval_specs=[eval_spec].")
    specs = list(eval_specs or ())
    unnamed = [index for index, spec in enumerate(specs) if isinstance(spec, EvalSpec) and spec.name == "eval"]
    for index in unnamed[1:]:
        specs[index] = dataclasses.replace(specs[index], name=f"eval_{index + 1}")
    return tuple(specs)


@final
@dataclasses.dataclass(frozen=True)
class RunSpec:
    """The arguments of `OuterLoop.__call__`. `eval_specs` is the result of `named`."""

    train_dataset: Any = None
    total_steps: int | None = None
    loop_steps: int | None = None
    eval_specs: Sequence[EvalSpec] = ()
    stop: Schedule | None = None
    epochs: int | None = None
    logs_total_steps: bool = True

    def errors(self, train_loop: Any, num_eval_loops: int) -> Iterator[Exception]:
        """Yields an error for each problem with the arguments. `train_loop` is the `OuterLoop`'s train loop or None."""
        try:
            checks.check_positive("train_total_steps", self.total_steps, optional=True)
            checks.check_positive("train_loop_steps", self.loop_steps, optional=True)
            checks.check_positive("train_epochs", self.epochs, optional=True)
            if train_loop is not None:
                checks.check_multiple("train_total_steps", self.total_steps, train_loop.step)
                checks.check_multiple("train_loop_steps", self.loop_steps, train_loop.step)
        except (TypeError, ValueError) as error:
            yield error
            return
        has_no_data = self.train_dataset is None and train_loop is not None
        if self.total_steps is not None and self.total_steps > np.iinfo(np.int32).max:
            yield ValueError(f"train_total_steps={self.total_steps} exceeds the range of state.step, an int32.")
        if self.epochs is not None and has_no_data:
            got = f"train_epochs={self.epochs} without a train_dataset"
            yield ValueError(f"OuterLoop got {got}. Give the dataset, or only train_total_steps or stop.")
        if self.epochs is not None and self.loop_steps is not None:
            yield ValueError(
                f"OuterLoop got train_epochs={self.epochs} and train_loop_steps={self.loop_steps}, and each epoch is "
                "one loop: give one of them. For actions and evaluations within an epoch, use every(steps=...)."
            )
        if self.epochs is not None and self.epochs > 1 and self.has_iterator:
            yield ValueError(
                f"train_epochs={self.epochs} needs data that can be read more than once, got {self.train_dataset!r}."
            )
        has_end = self.total_steps is not None or self.stop is not None
        has_end |= self.loop_steps is not None  # Then, there is another error.
        if self.epochs is not None and not has_end and is_endless(pass_of(self.train_dataset)):
            yield ValueError(
                f"train_epochs={self.epochs} needs a train_dataset that ends, got {name_of(self.train_dataset)}, which "
                "is endless. Give train_total_steps instead."
            )
        if self.stop is not None and not isinstance(self.stop, Schedule):
            yield TypeError(f"stop must be a Schedule such as at(steps=10_000), got {self.stop!r}.")
        if self.train_dataset is not None and train_loop is None:
            yield ValueError("OuterLoop got a train_dataset without a train_loop: give both, neither to evaluate only.")
        if has_no_data and self.total_steps is None and self.stop is None:
            yield ValueError(
                "OuterLoop got a train_loop without a train_dataset. Give the dataset. If the step needs no data, "
                "give train_total_steps or stop, because nothing else ends the run."
            )
        yield from self._errors_of_evaluations(num_eval_loops)

    def _errors_of_evaluations(self, num_eval_loops: int) -> Iterator[Exception]:
        specs = self.eval_specs
        names = [spec.name for spec in specs if isinstance(spec, EvalSpec)]
        if len(specs) != num_eval_loops:
            got = f"has {num_eval_loops} eval_loops and was called with {len(specs)} eval_specs"
            yield ValueError(f"OuterLoop {got}. Give one EvalSpec for each eval loop, in their order.")
        if strangers := [spec for spec in specs if not isinstance(spec, EvalSpec)]:
            yield TypeError(f"eval_specs must contain EvalSpecs, got {strangers[0]!r}.")
        elif twice := {name for name in names if names.count(name) > 1}:
            yield ValueError(f"Two EvalSpecs are named {twice.pop()!r}: give each one a different name.")

    @property
    def data(self) -> Any:
        """The training dataset; if there is none, an endless dataset whose batches are all None."""
        return NO_DATA if self.train_dataset is None else self.train_dataset

    @property
    def has_iterator(self) -> bool:
        """True if the training dataset is an iterator, which can be read only once."""
        return hasattr(self.train_dataset, "__next__")

    @property
    def end(self) -> Any:
        """The planned end of training, for use in messages."""
        end = self.stop if self.total_steps is None else self.total_steps
        return "the end of the dataset" if end is None else end

    @property
    def last_step(self) -> int | None:
        """The last step that `total_steps` and `stop` allow, or None if neither limits the number of steps."""
        return earliest([self.total_steps, planned_steps(self.stop, Elapsed())])

    def description(self) -> list[str]:
        """Returns lines that describe the run. The lines must be identical in all processes of a job."""
        names = ("total_steps", "loop_steps", "epochs", "stop")
        return [
            *(f"{name}={getattr(self, name)!r}" for name in names),
            *(f"EvalSpec {spec.name!r}: {spec.num_steps} steps" for spec in self.eval_specs),
        ]
