"""Training in one call, and the learning rates for it."""

import contextlib
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, overload

import jax
import optax
from absl import logging
from etils import epath

from jaxloop import checks, data, partition, types
from jaxloop.actions import (
    Action,
    CheckpointAction,
    LearningRateAction,
    ProgressAction,
    SummaryAction,
    default_writer,
)
from jaxloop.actions.learning_rate_action import learning_rate
from jaxloop.eval_loop import EvalLoop
from jaxloop.function_step import FunctionStep
from jaxloop.history import History
from jaxloop.loss_step import LossFn, LossStep
from jaxloop.outer_loop import OuterLoop
from jaxloop.preflight import Report
from jaxloop.schedules import Schedule, every, last
from jaxloop.specs import CheckpointSpec, EvalSpec
from jaxloop.train_loop import TrainLoop


@overload
def fit(
    model: Any,
    train_data: Any,
    eval_data: Any = None,
    *,
    loss: LossFn | None = None,
    optimizer: optax.GradientTransformation | None = None,
    metrics: Mapping[str, LossFn] | None = None,
    inputs: str | int | Callable[[types.Batch], Any] | None = None,
    train_step: Callable[[Any, types.Batch], tuple[Any, types.Output]] | None = None,
    eval_step: Callable[[Any, types.Batch], types.Output] | None = None,
    num_epochs: int | None = None,
    num_steps: int | None = None,
    eval_every: int | Schedule | None = None,
    eval_freq: int | Schedule | None = None,
    workdir: epath.PathLike | None = None,
    log_name: str | None = None,
    hparams: Mapping[str, Any] | None = None,
    monitor: str | None = None,
    partitioner: partition.Partitioner | Literal["auto"] | None = None,
    progress: str | None = "auto",
    seed: int = 0,
    steps_per_dispatch: int | Literal["auto"] = 1,
    actions: Sequence[Action] = (),
    dry_run: Literal[False] = False,
) -> tuple[Any, History]: ...


@overload
def fit(model: Any, train_data: Any, eval_data: Any = None, *, dry_run: Literal[True], **options: Any) -> Report: ...


def fit(  # pyright: ignore[reportInconsistentOverload]
    model: Any,
    train_data: Any,
    eval_data: Any = None,
    *,
    loss: LossFn | None = None,
    optimizer: optax.GradientTransformation | None = None,
    metrics: Mapping[str, LossFn] | None = None,
    inputs: str | int | Callable[[types.Batch], Any] | None = None,
    train_step: Callable[[Any, types.Batch], tuple[Any, types.Output]] | None = None,
    eval_step: Callable[[Any, types.Batch], types.Output] | None = None,
    num_epochs: int | None = None,
    num_steps: int | None = None,
    eval_every: int | Schedule | None = None,
    eval_freq: int | Schedule | None = None,
    workdir: epath.PathLike | None = None,
    log_name: str | None = None,
    hparams: Mapping[str, Any] | None = None,
    monitor: str | None = None,
    partitioner: partition.Partitioner | Literal["auto"] | None = None,
    progress: str | None = "auto",
    seed: int = 0,
    steps_per_dispatch: int | Literal["auto"] = 1,
    actions: Sequence[Action] = (),
    dry_run: bool = False,
) -> tuple[Any, History] | Report:
    """Trains, in one call. It builds the loops and actions that you would build, and runs them.

    >>> import numpy as np
    >>> from flax import linen as nn
    >>> rng = np.random.default_rng(0)
    >>> x = rng.normal(size=(10, 8, 3)).astype(np.float32)
    >>> batches = [{"x": each, "y": each.sum(-1, keepdims=True)} for each in x]
    >>> state, history = fit(
    ...     nn.Dense(1),
    ...     batches[:8],
    ...     batches[8:],
    ...     loss=lambda outputs, batch: ((outputs - batch["y"]) ** 2).mean(axis=-1),
    ...     optimizer=optax.sgd(0.1),
    ...     num_epochs=5,
    ...     progress=None,
    ... )
    >>> int(state.step), history.collect("steps", "eval.loss")[0]
    (40, [8, 16, 24, 32, 40])

    With functions of your own, give your state in the place of the model:

    >>> def train_step(weight, batch):
    ...     slope = (batch["x"][:, :1] * (batch["x"][:, :1] * weight - batch["y"])).mean()
    ...     return weight - 0.1 * slope, {"slope": slope}
    >>> weight, history = fit(np.float32(0), batches, train_step=train_step, num_epochs=2, progress=None)

    An epoch is one pass over the train data; its length need not be known. One train loop runs an epoch, and ends with
    a row of the history; in a run of `num_steps` there are about a hundred rows besides.

    With a work directory, there are TensorBoard events of the train and eval metrics, of the learning rate (where
    `optax.inject_hyperparams` keeps it) and of `hparams`; `history.jsonl`; and `checkpoints`, the newest and the best
    one. The same call goes on there where it was stopped, in whichever way. Without one, no file is written.

    Args:
      model: a model of any kind that `LossStep` takes; a state, with `train_step`.
      train_data: batches, as `jaxloop.data.batches` takes them: lists, generators, `tf.data`, DataLoaders, ...; tuples
        `(inputs, targets)` or dicts.
      eval_data: likewise, evaluated from its start each time, and exactly, also where its last batch is short.
      loss: a function of `(outputs, batch)`, see `LossStep`.
      optimizer: an Optax transformation.
      metrics: by name, functions of `(outputs, batch)`, see `LossStep`.
      inputs: which part of a batch the model takes, see `LossStep`.
      train_step: instead of a loss and an optimizer, a pure function `(state, batch) -> (state, outputs)`, which is
        compiled for the devices. The state is any pytree.
      eval_step: a pure function `(state, batch) -> outputs`.
      num_epochs: passes over the train data.
      num_steps: or updates in all, for which the data are passed over again and again.
      eval_every: evaluates after so many epochs, or by a schedule such as `every(steps=500)`; and at the end. None for
        each epoch.
      eval_freq: another name of `eval_every`.
      workdir: where the files go; None for no files.
      log_name: the run's own directory in the work directory.
      hparams: hyperparameters to note with the events, and in the log: numbers, strings and bools.
      monitor: what the best checkpoint is the best in, such as "eval/accuracy". By default "eval/loss", where a `loss`
        and `eval_data` are given.
      partitioner: where the state and the batches live; None for one device. "auto" to take all there are: the state
        is on each one if it fits there, and split over them (`FSDPPartitioner`) if not; the log says which.
      progress: "auto", "tqdm" or "plain", see `ProgressAction`; None to show nothing.
      seed: of the parameters and of dropout.
      steps_per_dispatch: how many steps the devices take at a time, a number or "auto", see `TrainLoop`.
      actions: more end actions of the train loop, such as `EarlyStoppingAction("eval/loss", patience=3)`.
      dry_run: trains nothing, takes no memory for the state, and returns the report of `OuterLoop.check`: what would go
        wrong, all at once, and how the run would go.

    Returns:
      `(state, history)`; of a dry run the report.

    Raises:
      ValueError: both or neither of `num_epochs` and `num_steps`; data that ends once and for all, for more than one
        pass; arguments that don't belong together.
    """
    if dry_run and data.is_one_pass(train_data):
        raise ValueError(
            f"A dry run would draw the first batch of {train_data!r}, which gives its batches once and for all. Give a "
            "list, a dataset, or a function that returns a new iterator."
        )
    eval_schedule = _eval_schedule(eval_every, eval_freq, eval_data)
    if monitor is not None and workdir is None:
        raise ValueError(f"monitor={monitor!r} chooses the best checkpoint, and without a workdir there is none.")
    passes, eval_passes, num_passes = _data(train_data, eval_data, num_epochs, num_steps)
    partitioner = partition.SingleDevicePartitioner() if partitioner is None else partitioner
    if metrics is not None and not isinstance(metrics, Mapping):
        raise TypeError(f"metrics takes functions by name, {{'accuracy': function}}, got {metrics!r}.")
    progress = {True: "auto", False: None}.get(progress, progress)  # pyright: ignore[reportCallIssue, reportArgumentType]
    if train_step is None:
        _check_loss(model, loss, optimizer, eval_step)
        options = {"loss": loss, "metrics": metrics, "inputs": inputs}
        step, step_for_eval = _steps_by_loss(model, optimizer, partitioner, seed, passes.first(), options)
        make_state = step.abstract_state if dry_run else step.initialize_model
        state = make_state(step.input_spec(passes.first()))
        monitor = "eval/loss" if monitor is None and eval_data is not None else monitor
    else:
        _check_own_steps(loss, optimizer, metrics, inputs, eval_step, eval_data)
        step, step_for_eval = _own_steps(train_step, eval_step, model, partitioner, passes.first())
        state = model

    log_points, saves = every(loops=1) | last(), every(loops=1) | last()
    if num_steps is not None:
        log_points, saves = log_points | every(max(num_steps // 100, 1)), saves | every(max(num_steps // 10, 1))
    train_actions, eval_actions = [*actions], []
    if progress is not None:
        train_actions.append(ProgressAction(_total_steps(train_data, num_epochs, num_steps), bar=progress))
    if hparams or log_name:
        logging.info("Run %s: %s", log_name or "", dict(hparams or {}))
    with contextlib.ExitStack() as files:
        checkpoint_spec = None
        if workdir is not None:
            workdir = epath.Path(workdir) / (log_name or "")
            checkpoint_spec = CheckpointSpec(workdir / "checkpoints")
            writer = files.enter_context(contextlib.closing(default_writer(workdir)))
            if hparams and not dry_run:
                writer.write_hparams(dict(hparams))
            saves = saves if monitor is None else saves | eval_schedule  # The best must have been saved.
            train_actions += _summaries(writer, log_points, state)
            train_actions.append(CheckpointAction(workdir / "checkpoints", saves, keep=1, best=monitor))
            eval_actions.append(SummaryAction(writer, prefix="eval/"))

        train_loop = TrainLoop(step, end_actions=train_actions, steps_per_dispatch=steps_per_dispatch)
        eval_loops, eval_specs = [], []
        if eval_data is not None:
            eval_loops.append(EvalLoop(step_for_eval, end_actions=eval_actions, steps_per_dispatch=steps_per_dispatch))
            eval_specs.append(EvalSpec(eval_passes, schedule=eval_schedule))
        outer_loop = OuterLoop(train_loop, eval_loops, checkpoint_spec, workdir=workdir, log_interval=log_points)
        run = outer_loop.check if dry_run else outer_loop
        result = run(state, passes, num_steps, eval_specs=eval_specs, train_epochs=num_passes)
        return result if isinstance(result, Report) else (result[0], outer_loop.history)


def _eval_schedule(eval_every: int | Schedule | None, eval_freq: int | Schedule | None, eval_data: Any) -> Schedule:
    if eval_every is not None and eval_freq is not None:
        raise ValueError(f"eval_freq is another name of eval_every; fit got both, {eval_freq!r} and {eval_every!r}.")
    name, value = ("eval_every", eval_every) if eval_freq is None else ("eval_freq", eval_freq)
    if not isinstance(value, Schedule):
        checks.check_positive(name, value, optional=True)
    if value is not None and eval_data is None:
        raise ValueError(f"fit got {name}={value!r} without eval_data: give both, or neither.")
    if isinstance(value, Schedule):
        return value | last()
    return every(loops=value or 1) | last()


def _data(
    train_data: Any, eval_data: Any, num_epochs: int | None, num_steps: int | None
) -> tuple[data.Passes, data.Passes, int | None]:
    """The data by passes, and how many of them there may be at most; None for data that end once and for all."""
    checks.check_positive("num_epochs", num_epochs, optional=True)
    checks.check_positive("num_steps", num_steps, optional=True)
    if (num_epochs is None) == (num_steps is None):
        got = "neither" if num_epochs is None else f"num_epochs={num_epochs} and num_steps={num_steps}"
        raise ValueError(f"fit takes either num_epochs, passes over the data, or num_steps, updates; it got {got}.")
    if data.is_one_pass(train_data) and (num_epochs or 1) > 1:
        raise ValueError(
            f"num_epochs={num_epochs} needs train data that start anew for each pass, got the iterator {train_data!r}, "
            "which ends once and for all. Give a list, a dataset, or a function that returns a new iterator."
        )
    if data.is_one_pass(eval_data):
        raise ValueError(
            f"eval_data is evaluated from its start each time, got the iterator {eval_data!r}, which ends once and for "
            "all. Give a list, a dataset, or a function that returns a new iterator."
        )
    as_often_as_needed = None if data.is_one_pass(train_data) else sys.maxsize
    return data.Passes(train_data), data.Passes(eval_data), num_epochs or as_often_as_needed


def _steps_by_loss(
    model: Any,
    optimizer: Any,
    partitioner: partition.Partitioner | Literal["auto"],
    seed: int,
    first_batch: types.Batch,
    options: dict[str, Any],
) -> tuple[LossStep, LossStep]:
    """The steps that train and that evaluate."""
    key, batch_size = jax.random.key(seed), checks.num_examples(first_batch)
    if partitioner == "auto":
        trial = LossStep(key, model, optimizer, train=True, **options)
        partitioner = partition.choose(trial.abstract_state(trial.input_spec(first_batch)), batch_size)
    step = LossStep(key, model, optimizer, partitioner, train=True, batch_size=batch_size, **options)
    return step, LossStep(key, model, optimizer, partitioner, **options)


def _check_loss(model: Any, loss: Any, optimizer: Any, eval_step: Any) -> None:
    if hasattr(model, "apply_gradients"):
        raise TypeError(
            f"fit trains a model by a loss, and got a state in its place, {checks.describe(model)}. Give the model "
            "itself, with loss=... and optimizer=...; or, to train your state, a train_step: "
            "fit(state, data, train_step=function)."
        )
    if loss is None or optimizer is None or eval_step is not None:
        raise ValueError(
            "fit takes a model with a loss and an optimizer, or a state with a train_step (and an eval_step), got "
            f"loss={loss!r}, optimizer={optimizer!r}, eval_step={eval_step!r}."
        )


def _check_own_steps(loss, optimizer, metrics, inputs, eval_step, eval_data) -> None:
    options = {"loss": loss, "optimizer": optimizer, "metrics": metrics, "inputs": inputs}
    for name, value in options.items():
        if value is not None:
            raise ValueError(
                f"fit got a train_step and {name}, which is for training by a loss: leave one of them out."
            )
    if (eval_step is None) != (eval_data is None):
        got, missing = ("eval_data", "eval_step") if eval_step is None else ("eval_step", "eval_data")
        raise ValueError(f"fit got a train_step and {got} without {missing}: give both, or neither.")


def _own_steps(
    train_step: Any,
    eval_step: Any,
    state: Any,
    partitioner: partition.Partitioner | Literal["auto"],
    first_batch: types.Batch,
) -> tuple[FunctionStep, FunctionStep]:
    """The steps that train and that evaluate, by functions of the user's."""
    if partitioner == "auto":
        partitioner = partition.choose(state, checks.num_examples(first_batch))
    step_for_eval = FunctionStep(functools.partial(_evaluate, eval_step), partitioner)
    return FunctionStep(train_step, partitioner, train=True), step_for_eval


def _summaries(writer: Any, log_points: Schedule, state: Any) -> list[Action]:
    """What writes the train metrics, and the learning rate where there is one to be seen."""
    has_rate = learning_rate(getattr(state, "opt_state", None)) is not None
    rate = [LearningRateAction(writer, log_points)] if has_rate else []
    return [*rate, SummaryAction(writer, log_points, prefix="train/")]


def _evaluate(eval_step: Any, state: Any, batch: types.Batch) -> tuple[Any, types.Output]:
    return state, eval_step(state, batch)


def _total_steps(train_data: Any, num_epochs: int | None, num_steps: int | None) -> int | None:
    """How many updates a progress bar can expect; None where the data don't say."""
    if num_epochs is None:
        return num_steps
    try:
        return num_epochs * len(train_data) or None
    except TypeError:  # That of a tf.data pipeline is not always known.
        return None


def lr_schedule(base_lr: float, steps_per_epoch: int, epochs: int = 100, warmup_epochs: int = 5) -> optax.Schedule:
    r"""The learning rate by step: a linear warm-up to `base_lr`, then a cosine down to a hundredth of it.

    With `w = warmup_epochs * steps_per_epoch` and `T = epochs * steps_per_epoch`, at step `t`

    - for `t < w`: `base_lr * (0.1 + 0.9 t / w)`;
    - for `w <= t <= T`: `base_lr * (0.01 + 0.99 (1 + cos(pi (t - w) / (T - w))) / 2)`;
    - after `T`: `base_lr / 100`.

    The cosine is that of Loshchilov and Hutter, https://arxiv.org/abs/1608.03983; the warm-up that of Goyal et al.,
    https://arxiv.org/abs/1706.02677.

    Args:
      base_lr: the peak, which is reached when the warm-up ends.
      steps_per_epoch: optimizer updates in an epoch.
      epochs: how many epochs the training has.
      warmup_epochs: how many of them warm up; 0 for none.

    Returns:
      An Optax schedule, which takes the place of a learning rate: `optax.adam(lr_schedule(1e-3, 100))`.

    >>> schedule = lr_schedule(1.0, steps_per_epoch=10, epochs=10, warmup_epochs=5)
    >>> [round(float(schedule(step)), 3) for step in (0, 25, 50, 75, 100, 200)]
    [0.1, 0.55, 1.0, 0.505, 0.01, 0.01]
    """
    if not base_lr > 0:
        raise ValueError(f"base_lr must be positive, got {base_lr!r}.")
    checks.check_positive("steps_per_epoch", steps_per_epoch)
    checks.check_positive("epochs", epochs)
    if warmup_epochs != 0:
        checks.check_positive("warmup_epochs", warmup_epochs)
    if warmup_epochs >= epochs:
        raise ValueError(
            f"warmup_epochs must be smaller than epochs, got warmup_epochs={warmup_epochs} and epochs={epochs}. "
            "Lower it; 0 is for no warm-up."
        )
    warmup_steps, total_steps = warmup_epochs * steps_per_epoch, epochs * steps_per_epoch
    cosine = optax.cosine_decay_schedule(base_lr, total_steps - warmup_steps, alpha=0.01)
    if not warmup_steps:
        return cosine
    warmup = optax.linear_schedule(base_lr / 10, base_lr, warmup_steps)
    return optax.join_schedules([warmup, cosine], [warmup_steps])
