"""`fit`, which trains a model in one call."""

import contextlib
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import optax
from etils import epath

from jaxloop import data, partition, types
from jaxloop.actions import (
    Action,
    CheckpointAction,
    ProgressAction,
    SummaryAction,
    default_writer,
)
from jaxloop.base import checks
from jaxloop.base.files import absolute
from jaxloop.base.text import suggests
from jaxloop.data.sources import pass_of
from jaxloop.eval_loop import EvalLoop
from jaxloop.models.ensemble import Ensemble
from jaxloop.models.loss_step import LossFn, LossStep
from jaxloop.outer_loop import OuterLoop
from jaxloop.outer_loop.specs import CheckpointSpec, EvalSpec
from jaxloop.schedules import Schedule, every, last
from jaxloop.train_loop import TrainLoop


@suggests(
    epochs="train_epochs",
    num_epochs="train_epochs",
    num_steps="train_total_steps",
    steps="train_total_steps",
    batch_size="jaxloop.data.batched(arrays, batch_size), which makes batches of arrays",
    accumulate="jaxloop.LossStep(..., accumulate=...)",
    verbose="progress",
)
def fit(
    model: Any,
    train_dataset: Any,
    eval_dataset: Any = None,
    *,
    loss: LossFn,
    optimizer: optax.GradientTransformation,
    metrics: Mapping[str, LossFn] | None = None,
    inputs: str | int | Callable[[types.Batch], Any] | None = None,
    trainable: str | Sequence[str] | None = None,
    ema: float | Callable[[jax.Array], Any] | None = None,
    params_to_evaluate: Callable[[Any], Any] | None = None,
    train_epochs: int | None = None,
    train_total_steps: int | None = None,
    eval_interval: int | Schedule | None = None,
    log_interval: int | Schedule | None = None,
    workdir: epath.PathLike | None = None,
    keep: int | None = 1,
    hparams: Mapping[str, Any] | None = None,
    monitor: str | tuple[str, str] | None = None,
    partitioner: partition.Partitioner | None = None,
    progress: str | bool | None = "auto",
    seed: int = 0,
    seeds: int | Sequence[int] | None = None,
    steps_per_dispatch: int = 1,
    actions: Sequence[Action] = (),
    dry_run: bool = False,
    topology: str | None = None,
) -> Any:
    """Trains a model with a single call, using the same loops and actions as a hand-written program.

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
    ...     train_epochs=5,
    ...     progress=None,
    ... )
    >>> int(state.step), history.collect("steps", "eval.loss")[0]
    (40, [8, 16, 24, 32, 40])

    To train with your own step function, use `jaxloop.functional.loop`.

    An epoch is one pass over the training dataset, whose length may be unknown. Each epoch is one loop. At the end of
    each epoch, a row is added to the history. If `train_total_steps` is given, about a hundred additional rows
    are added during the run.

    If `workdir` is given, `fit` writes TensorBoard events (train and eval metrics and `hparams`), `history.jsonl`, and
    the newest and best checkpoints (in `checkpoints`). If the run is interrupted, repeat the call to resume it from the
    newest checkpoint. Without a `workdir`, `fit` doesn't write any files.

    Args:
      model: Any model that `LossStep` accepts.
      train_dataset: Anything that `jaxloop.data.batches` accepts, such as a list, a generator, a
        `tf.data.Dataset` or a `DataLoader`. Its batches are tuples `(inputs, targets)` or dicts.
      eval_dataset: The dataset to evaluate on, in any form that `train_dataset` accepts. Each evaluation reads it from
        the start. Mean metrics are exact even if the last batch is short.
      loss: A function of `(outputs, batch)`; see `LossStep`.
      optimizer: An Optax transformation.
      metrics: A dict that maps names to functions of `(outputs, batch)`; see `LossStep`.
      inputs: The key of the model's inputs in a batch, or a function that extracts the inputs from a batch; see
        `LossStep`.
      trainable: The paths of the parameters to train, such as `"head/**"`; see `LossStep`.
      ema: The decay of an exponential moving average of the parameters, such as 0.999; see `LossStep`. Evaluations use
        the average, which `jaxloop.optimizers.ema_params(state)` returns.
      params_to_evaluate: A function of the state that returns the parameters to evaluate; see `LossStep`.
      train_epochs: The number of epochs. Pass either this or `train_total_steps`.
      train_total_steps: The number of updates. A finite dataset is repeated as often as necessary.
      eval_interval: The interval between evaluations: a number of epochs, or a schedule such as `every(steps=500)`,
        which can also fire within an epoch. If None, `fit` evaluates after every epoch. It always evaluates at the end
        of the run.
      log_interval: The interval at which train metrics are added to the history and written as summaries: a number of
        epochs or a schedule. If None, the defaults described above apply.
      workdir: The work directory. If None, no files are written.
      keep: The number of recent checkpoints to keep in addition to the best one (if any), or None to keep all.
      hparams: Hyperparameters (numbers, strings or bools) to write to the TensorBoard events and to the log.
      monitor: The metric that determines the best checkpoint, such as "eval/accuracy", or a pair of the metric and its
        mode, such as `("eval/score", "max")`. The default is "eval/loss" if `eval_dataset` is given. Otherwise,
        no checkpoint counts as the best.
      partitioner: The partitioner, which determines where the state and the batches are placed. If None, a single
        device is used.
      progress: "auto" (or True), "tqdm" or "plain" (see `ProgressAction`). If None or False, no progress is shown.
      seed: The random seed for parameter initialization and dropout.
      seeds: The seeds of a `jaxloop.Ensemble`: a list, or an int `n` for the seeds 0 to `n - 1`. The ensemble trains
        one model per seed, all in one dispatch. The returned state and history are those of the ensemble.
      steps_per_dispatch: The number of steps per dispatch; see `TrainLoop`.
      actions: Additional end actions for the train loop, such as `EarlyStoppingAction("eval/loss", patience=3)`.
      dry_run: Whether to check the arguments instead of training. If True, `fit` doesn't allocate memory for the state,
        and returns the report of `OuterLoop.check`, which contains the plan of the run and all problems found.
      topology: The TPU topology to compile for in a dry run, such as "v5e:2x4"; see `OuterLoop.check`. The dataset must
        yield global batches, that is, batches with the rows for all devices.

    Returns:
      `(state, history)`, or a report if `dry_run` is True.

    Raises:
      ValueError: If both or neither of `train_epochs` and `train_total_steps` are given, if the training dataset is an
        iterator but there is more than one epoch, or if other arguments are incompatible.
    """
    if dry_run and data.is_one_pass(train_dataset):
        raise ValueError(
            f"A dry run would consume the first batch of the iterator {train_dataset!r}. Give a list, a dataset, or a "
            "function that returns a new iterator."
        )
    if topology is not None and not dry_run:
        raise ValueError(f"topology={topology!r} is for a dry run. Pass dry_run=True, too.")
    for name, value in {"monitor": monitor, "hparams": hparams}.items():
        if value is not None and workdir is None:
            raise ValueError(
                f"fit got {name}={value!r}, which concerns its files, and without a workdir there is none."
            )
    _check_data(train_dataset, eval_dataset, train_epochs, train_total_steps)
    passes, eval_passes = data.Passes(train_dataset), data.Passes(eval_dataset)
    can_repeat = not data.is_one_pass(train_dataset) and not data.is_endless(train_dataset)
    num_epochs = sys.maxsize if train_epochs is None and can_repeat else train_epochs
    evaluates = _schedule("eval_interval", eval_interval)
    if eval_interval is not None and eval_dataset is None:
        raise ValueError(f"fit got eval_interval={eval_interval!r} without eval_dataset. Give both, or neither.")

    partitioner = partition.SingleDevicePartitioner() if partitioner is None else partitioner
    options = {"loss": loss, "metrics": metrics, "inputs": inputs, "trainable": trainable, "ema": ema}
    options["params_to_evaluate"] = params_to_evaluate
    make_step = functools.partial(LossStep, jax.random.key(seed), model, optimizer, partitioner, **options)
    step = make_step(train=True, batch_size=checks.num_examples(passes.first()))
    step_for_eval, spec = make_step(use_ema=ema is not None), step.input_spec(passes.first())
    if seeds is not None:
        step = Ensemble(step, seeds=seeds)
        step_for_eval = step.for_evaluation(step_for_eval)
    state = (step.abstract_state if dry_run else step.initialize_model)(spec)
    monitor = "eval/loss" if monitor is None and eval_dataset is not None else monitor

    rows, saves = _schedule("log_interval", log_interval), every(loops=1) | last()
    if train_total_steps is not None:
        rows = rows | every(max(train_total_steps // 100, 1)) if log_interval is None else rows
        saves |= every(max(train_total_steps // 10, 1))
    train_actions, eval_actions, checkpoint_spec = [*actions], [], None
    if progress:
        batches = data.num_batches(pass_of(train_dataset))
        total = train_total_steps if train_epochs is None else batches and train_epochs * batches
        train_actions.append(ProgressAction(total, bar="auto" if progress is True else progress))
    with contextlib.ExitStack() as files:
        if workdir is not None:
            workdir = absolute(workdir)
            checkpoint_spec = CheckpointSpec(workdir / "checkpoints")
            saves = saves if monitor is None else saves | evaluates  # Save at evaluations, to keep the best.
            save = CheckpointAction(workdir / "checkpoints", saves, keep=keep, best=monitor)
            writer = files.enter_context(contextlib.closing(default_writer(workdir)))
            if hparams is not None and not dry_run:
                writer.write_hparams(dict(hparams))
            train_actions += [SummaryAction(writer, rows, prefix="train/"), save]
            eval_actions.append(SummaryAction(writer, prefix="eval/"))
        train_loop = TrainLoop(step, end_actions=train_actions, steps_per_dispatch=steps_per_dispatch)
        eval_loops, eval_specs = [], []
        if eval_dataset is not None:
            eval_loops.append(EvalLoop(step_for_eval, end_actions=eval_actions, steps_per_dispatch=steps_per_dispatch))
            eval_specs.append(EvalSpec(eval_passes, interval=evaluates))
        outer_loop = OuterLoop(train_loop, eval_loops, checkpoint_spec, workdir=workdir, log_interval=rows)
        arguments = {"train_total_steps": train_total_steps, "train_epochs": num_epochs, "eval_specs": eval_specs}
        if dry_run:
            return outer_loop.check(state, passes, **arguments, topology=topology)
        return outer_loop(state, passes, **arguments)[0], outer_loop.history


def _schedule(name: str, interval: int | Schedule | None) -> Schedule:
    """Converts an interval to a schedule that also fires at the end of the run.

    An int is a number of epochs, and None means every epoch.
    """
    if not isinstance(interval, Schedule):
        checks.check_positive(name, interval, optional=True)
        interval = every(loops=interval or 1)
    return interval | last()


def _check_data(train_dataset: Any, eval_dataset: Any, train_epochs: int | None, train_total_steps: int | None) -> None:
    checks.check_positive("train_epochs", train_epochs, optional=True)
    checks.check_positive("train_total_steps", train_total_steps, optional=True)
    if (train_epochs is None) == (train_total_steps is None):
        given = f"train_epochs={train_epochs} and train_total_steps={train_total_steps}"
        got = "neither" if train_epochs is None else given
        raise ValueError(f"fit takes either train_epochs or train_total_steps; it got {got}.")
    if data.is_one_pass(train_dataset) and (train_epochs or 1) > 1:
        raise ValueError(
            f"train_epochs={train_epochs} needs a train_dataset that can be read more than once, got the iterator "
            f"{train_dataset!r}. Give a list, a dataset, or a function that returns a new iterator."
        )
    if data.is_one_pass(eval_dataset):
        raise ValueError(
            f"Each evaluation reads eval_dataset from its start, got the iterator {eval_dataset!r}. Give a list, a "
            "dataset, or a function that returns a new iterator."
        )
