"""Checkpoints, early stopping, bars, loops inside and compiled steps: callbacks that are there to take."""

import abc
import functools
from collections.abc import Callable, Mapping
from typing import Any, Self, final

from absl import logging
from etils import epath

from jaxloop import checkpoint as checkpoints
from jaxloop import checks, interrupt, metrics, partition
from jaxloop.actions.action import Action
from jaxloop.actions.checkpoint_action import CheckpointAction
from jaxloop.actions.early_stopping_action import EarlyStoppingAction
from jaxloop.actions.progress_action import ProgressAction
from jaxloop.function_step import CompiledFunction
from jaxloop.functional.log_entries import REDUCTIONS, Logs, NewestReady, aggregate, named
from jaxloop.functional.loop_state import LoopState, arguments, num_arguments
from jaxloop.history import History
from jaxloop.schedules import Elapsed, Schedule, always
from jaxloop.whole_run import elapsed_at


class Tool(abc.ABC):
    """An action as a callback: in tasks, there by `**tool` at every step, and called by hand in a loop of your own.

    Attributes:
      action: the action.
      monitor: the logged value that it watches, if any.
    """

    def __init__(self, text: str, action: Action, monitor: str | None = None):
        self.action: Action = action
        self.monitor: str | None = monitor
        self._text, self._key = text, always()

    def __repr__(self) -> str:
        return self._text

    def keys(self) -> list[Schedule]:
        """With `__getitem__`, what `{**tool}` takes."""
        return [self._key]

    def __getitem__(self, key: Schedule) -> list[Self]:
        if key is not self._key:
            raise KeyError(key)
        return [self]

    @abc.abstractmethod
    def __call__(self, elapsed: Elapsed, *args: Any, **kwargs: Any) -> Any:
        """Calls the action at a step, in a loop written by hand."""

    def finish(self, state: Any) -> Any:
        """Returns the state to go on with when the run is over. A `loop` does so by itself, and so all that follows."""
        return self.action.finish(state)

    def close(self) -> None:
        """Finishes what was begun."""
        self.action.close()

    def _call_action(self, elapsed: Elapsed, state: Any, logs: Mapping[str, Any] | None) -> metrics.LoopOutputs:
        outputs = metrics.LoopOutputs({name: [value] for name, value in metrics.fetch(named(logs or {})).items()})
        self.action(state, outputs, step_num=elapsed.steps, elapsed=elapsed, history=None)
        return outputs


@final
class CheckpointTool(Tool):
    """What `checkpoint` returns."""

    action: CheckpointAction  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, text: str, action: CheckpointAction, monitor: str | None, resume: bool):
        super().__init__(text, action, monitor)
        self.resume = resume

    def __call__(self, elapsed: Elapsed, state: Any, logs: Mapping[str, Any] | None = None) -> None:
        """Saves the state of this step, and waits until it is on disk."""
        self._call_action(elapsed, state, logs)
        self.action.flush()

    def restore(self, state: Any, step: int | None = None) -> tuple[Any, Elapsed]:
        """Reads what was saved last, or at a step: the state, laid out like `state`, and how far the run was.

        Both go back into `loop(state, ..., elapsed=elapsed)`, with a dataset that goes on after `elapsed.steps`
        batches. Without a checkpoint, the state comes back as it is, with `Elapsed()`.

        Raises:
          FileNotFoundError: there are checkpoints, but none of `step`.
          ValueError: the checkpoint is of another state; the error lists the leaves that differ.
        """
        directory = self.action.directory
        if step is not None:
            state = checkpoints.restore(directory, step, checks.adopt(state))
        elif restored := checkpoints.restore_newest(directory, checks.adopt(state)):
            state, step = restored
        else:
            logging.info("No checkpoint found in %s", directory)
            return state, Elapsed()
        return state, elapsed_at(directory, step).without_previous()


def checkpoint(
    directory: epath.PathLike,
    keep: int | None = 1,
    monitor: str | None = None,
    mode: str = "min",
    resume: bool = False,
) -> CheckpointTool:
    """Saves the state under its step; by hand, `checkpoint(elapsed, state, logs)`.

    In a `loop` it saves the whole of it, asynchronously, after all other callbacks of the step; the loop's end waits
    for what is under way. `checkpoint(directory).restore` reads the state again.

    Args:
      directory: with one subdirectory a step; may be relative.
      keep: how many of the newest to keep; None for all.
      monitor: a logged value by which the best one is kept beside them; it must be logged at the steps that are saved.
      mode: whether the best is the "min" or the "max".
      resume: whether a `loop` goes on from the newest checkpoint, see there. Its history, unless one is given, is
        written to `history.jsonl` in the directory.
    """
    action = CheckpointAction(directory, keep=keep, best=None if monitor is None else (monitor, mode))
    return CheckpointTool(f"checkpoint({str(directory)!r})", action, monitor, resume)


@final
class EarlyStoppingTool(Tool):
    """What `early_stopping` returns."""

    def __call__(self, elapsed: Elapsed, state: Any, logs: Mapping[str, Any]) -> bool:
        """Whether to stop. Then `finish(state)` gives the best state, with `restore_best`."""
        return self._call_action(elapsed, state, logs).asks_to_stop


def early_stopping(
    monitor: str,
    patience: int | Schedule,
    mode: str = "auto",
    min_delta: float = 0.0,
    baseline: float | None = None,
    restore_best: bool = False,
) -> EarlyStoppingTool:
    """Ends the loop when a logged value no longer improves; by hand, `if early_stopping(elapsed, state, logs): break`.

    Reading the value waits for the devices. The arguments are those of `EarlyStoppingAction`: patience counts the
    calls at which the value was logged, or is a period such as `after(steps=1000)`.
    """
    action = EarlyStoppingAction(monitor, patience, mode, min_delta, baseline, restore_best)
    return EarlyStoppingTool(f"early_stopping({monitor!r})", action, monitor)


@final
class BarTool(Tool):
    """A progress bar, as `keras_bar` and `tqdm_bar` return it."""

    def __init__(self, text: str, action: Action):
        super().__init__(text, action)
        self._newest = NewestReady()

    def __call__(self, elapsed: Elapsed, logs: Mapping[str, Any] | None = None) -> None:
        """Shows this step, now and then, and the newest values that are there already."""
        self._newest.push(logs or {})
        if isinstance(self.action.interval, Schedule) and self.action.interval(elapsed):
            outputs = metrics.LoopOutputs(self._newest.scalars())
            self.action(None, outputs, step_num=elapsed.steps, elapsed=elapsed, history=None)


def keras_bar(total: int | None = None, **options: Any) -> BarTool:
    """Shows tqdm's bar: `46%|████▋     | 4650/10000 [00:07<00:08, 670 steps/s, accuracy=0.9779]`.

    By hand, call `keras_bar(elapsed, logs)` at each step, and `keras_bar.close()` at the end. It shows the newest
    values that have arrived, and never waits for the devices.

    Args:
      total: steps of the run; None for what the loop's `stop` says.
      **options: of `ProgressAction`.
    """
    return BarTool("keras_bar()", ProgressAction(total, bar="tqdm", **options))


def tqdm_bar(total: int | None = None, **options: Any) -> BarTool:
    """Shows the same bar as `keras_bar`, with the same arguments."""
    return BarTool("tqdm_bar()", ProgressAction(total, bar="tqdm", **options))


class _InnerLoop:
    time_goes_to = "evals"

    def __init__(self, name: str, run: Callable[..., Any], aggregation: str | Callable[[list[Any]], Any]):
        self.name, self._run, self._aggregation = name, run, aggregation
        self._num_arguments = num_arguments(run)

    def __repr__(self) -> str:
        return f"inner_loop({self.name!r})"

    def __loop_callback__(self, loop_state: LoopState) -> tuple[Logs | None, None]:
        with interrupt.Interruptible() as interruptible:
            result = self._run(*arguments(loop_state, self._num_arguments))
            if interruptible.requested:
                return None, None  # Part of an evaluation is none.
        if not isinstance(result, tuple) or len(result) != 3 or not isinstance(result[1], History):
            raise TypeError(f"{self!r} must return (state, history, elapsed), as jf.loop does, got {result!r}.")
        if not checks.is_alive(loop_state.state):
            raise ValueError(
                f"{self!r} has taken over (donated) the state of the loop around it, which can't go on. Evaluate with "
                "jf.step or an EvalLoop, which leave the state alone, or give the inner loop a copy: "
                "jax.tree.map(jnp.copy, state)."
            )
        return Logs({self.name: Logs(named(aggregate(result[1], self._aggregation)))}), None


def inner_loop(
    name: str,
    run: Callable[..., tuple[Any, History, Elapsed]],
    aggregation: str | Callable[[list[Any]], Any] = "mean",
) -> _InnerLoop:
    """Evaluation inside training: a callback that runs another loop, and reports what it comes to under a name.

    `{every(1000): inner_loop("test", lambda state: loop(state, test_data, {every(1): test_step}))}` logs `test.loss`.
    An evaluation that Ctrl-C has cut short reports nothing.

    Args:
      name: the collection of the reported values.
      run: takes what a callback takes, and returns what `loop` returns. The state that it returns is left alone.
      aggregation: "mean", weighted by examples, "sum", "min", "max", "last", or a function of the list of values.
    """
    if not callable(aggregation) and aggregation not in ["mean", *REDUCTIONS]:
        raise ValueError(
            f"aggregation must be one of mean, {', '.join(REDUCTIONS)} or a function, got {aggregation!r}. For several "
            "kinds, add several inner loops, or give a function of the list of values."
        )
    return _InnerLoop(name, run, aggregation)


# Compiled functions ----------------------------------------------------------------------------------


class _CompiledStep(CompiledFunction):
    def __loop_callback__(self, loop_state: LoopState) -> tuple[Any, Any, Any]:
        return self.call(loop_state.state, loop_state.batch, None, None)


def step(
    fn: Callable[..., Any] | None = None, partitioner: partition.Partitioner | None = None, *, donate: bool = False
) -> Any:
    """Makes a callback of a pure function `fn(state, batch, [broadcasts, statics])`, as a decorator or by hand.

    It is compiled, and sharded by the partitioner: the batch is split, or replicated if its rows do not divide over the
    devices; broadcasts are replicated, statics are hashable and compiled in. It returns what a callback returns. In a
    `loop`, broadcasts and statics are None: to give them, call it in a callback.

    `{every(1): lambda state, batch: test_step(state, batch, broadcasts=teacher)}`

    Args:
      fn: the function.
      partitioner: where the state and the batches live; None for one device.
      donate: whether the state is taken over, so that its memory serves for the new one.
    """
    if fn is None:
        return functools.partial(step, partitioner=partitioner, donate=donate)
    return _CompiledStep(fn, partitioner, donate=donate)


def train_step(fn: Callable[..., Any] | None = None, partitioner: partition.Partitioner | None = None) -> Any:
    """As `step`, and takes the gradient of the sum of the losses that `fn` logged by `add_loss`, and updates the state.

    The state is a `TrainState`, and is taken over (donated). What the forward pass changed is taken over too, where
    `fn` returns it in a state, or adds it to the logs' `updates`: `logs.add("updates", "batch_stats", batch_stats)`,
    and for an NNX model all that changed, under any name. The rows of a batch must divide over the devices.

    >>> import jax.numpy as jnp
    >>> from jaxloop import examples
    >>> _, state, batches = examples.tiny_regression()
    >>> @train_step
    ... def regression(state, batch):
    ...     loss = jnp.mean((state.apply_fn({"params": state.params}, batch["x"]) - batch["y"]) ** 2)
    ...     return Logs().add_loss("loss", loss)
    >>> logs, state = regression(state, batches[0])
    >>> int(state.step), sorted(logs.losses)
    (1, ['loss'])
    """
    if fn is None:
        return functools.partial(train_step, partitioner=partitioner)
    return _CompiledStep(fn, partitioner, train=True, donate=True)
