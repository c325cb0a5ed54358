"""Ready-made callbacks: checkpoints, early stopping, progress bars, inner loops and compiled steps."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from etils import epath

from jaxloop import checkpoint as checkpoints
from jaxloop import metrics, partition
from jaxloop.actions.action import Action
from jaxloop.actions.checkpoint_action import CheckpointAction
from jaxloop.actions.early_stopping_action import EarlyStoppingAction
from jaxloop.actions.progress_action import ProgressAction
from jaxloop.base import checks
from jaxloop.distributed import interrupt
from jaxloop.functional.callbacks import LoopState, call_of
from jaxloop.functional.log_entries import Logs, NewestReady, aggregate, named
from jaxloop.history import History
from jaxloop.models.function_step import CompiledFunction
from jaxloop.outer_loop.whole_run import elapsed_at
from jaxloop.schedules import Elapsed, Schedule


class Tool:
    """A callback that wraps an action, for use in a `loop` or in a hand-written loop.

    Hooks:
      __call__: Calls the action at a step of a hand-written loop.

    Attributes:
      action: The action.
      resume: Whether a `loop` resumes from the newest of the checkpoints that the action saves.
    """

    def __init__(self, action: Action, resume: bool = False):
        self.action: Action = action
        self.resume: bool = resume

    def __call__(self, elapsed: Elapsed, state: Any = None, logs: Mapping[str, Any] | None = None) -> bool:
        """Calls the action at a step of a hand-written loop and waits until the action has finished its work.

        Returns True if the loop should stop.
        """
        outputs = metrics.LoopOutputs({name: [value] for name, value in metrics.fetch(named(logs or {})).items()})
        self.action(state, outputs, step_num=elapsed.steps, elapsed=elapsed, history=None)
        self.action.flush()
        return outputs.asks_to_stop

    def finish(self, state: Any) -> Any:
        """Returns the state that the run should return: the given state or another one, such as the best state.

        `loop` calls both this method and `close` automatically.
        """
        return self.action.finish(state)

    def close(self) -> None:
        """Finishes all pending work."""
        self.action.close()


@final
class CheckpointTool(Tool):
    """The callback that `checkpoint` returns."""

    action: CheckpointAction  # pyright: ignore[reportIncompatibleVariableOverride]

    def restore(self, state: Any) -> tuple[Any, Elapsed]:
        """Restores the newest checkpoint. Returns the saved state and the run's progress at the time of the save.

        The returned state has the same structure as `state`. To continue the run, call `loop` with the returned state,
        the returned progress as `elapsed`, and a dataset that starts after the first `elapsed.steps` batches. If there
        is no checkpoint, returns the given state and `Elapsed()`.

        Raises:
          ValueError: If leaves of the checkpoint and of `state` differ in path, shape or dtype. The message lists them.
        """
        directory = self.action.directory
        found = checkpoints.restore_newest(directory, checks.as_arrays(state))
        if found is None:
            logging.info("No checkpoint found in %s", directory)
            return state, Elapsed()
        restored = jax.tree.map(lambda leaf, saved: as_kind(kind_on_host(leaf), saved), state, found[0])
        return restored, elapsed_at(directory, found[1]).without_previous()


def kind_on_host(leaf: Any) -> str | None:
    """Returns a leaf's kind: None for a JAX array, "numpy" for a NumPy value, or "builtins" for a Python number."""
    return None if isinstance(leaf, jax.Array) else type(leaf).__module__


def as_kind(kind: str | None, leaf: Any) -> Any:
    """Converts a restored leaf back to its original kind, as returned by `kind_on_host`."""
    if kind is None:
        return jnp.asarray(leaf)
    return np.asarray(leaf).item() if kind == "builtins" else np.asarray(leaf)[()]


def checkpoint(
    directory: epath.PathLike,
    keep: int | None = 1,
    monitor: str | None = None,
    mode: str = "auto",
    resume: bool = False,
) -> CheckpointTool:
    """Returns a callback that saves checkpoints.

    In a hand-written loop, call the callback with `(elapsed, state, logs)`. It returns once the state is on disk.

    In a `loop`, the callback saves everything that a run needs to resume. It saves asynchronously, after all other
    callbacks of the step. The loop waits for pending saves before it returns.

    In both cases, `checkpoint(directory).restore(state)` restores the newest saved state.

    Args:
      directory: The directory for the checkpoints, each of which gets its own subdirectory. The path may be relative.
      keep: The number of recent checkpoints to keep, or None to keep all.
      monitor: The name of the logged value that determines the best checkpoint. If given, the best checkpoint is kept
        in addition to the recent ones, and the value must be logged at every step at which a checkpoint is saved.
      mode: "min" if the smallest value is the best, "max" if the largest is, or "auto" to infer it from the name; see
        `jaxloop.actions.Monitor`.
      resume: Whether to resume a `loop` from the newest checkpoint; see `loop`. If this is True and no history is
        passed to the loop, the loop writes its history to `history.jsonl` in the directory.
    """
    best = None if monitor is None else (monitor, mode)
    return CheckpointTool(CheckpointAction(directory, keep=keep, best=best), resume)


def early_stopping(
    monitor: str, patience: int, mode: str = "auto", min_delta: float = 0.0, restore_best: bool = False
) -> Tool:
    """Returns a callback that ends the loop when a logged value stops improving.

    In a hand-written loop, create the callback once, as in `stop = early_stopping("loss", patience=5)`, and write
    `if stop(elapsed, state, logs): break`. Each call reads the value, and therefore synchronizes with the devices. With
    `restore_best=True`, the callback's `finish(state)` returns the best state. For the arguments, see
    `EarlyStoppingAction`. `patience` counts only calls for which a new value was logged.
    """
    return Tool(EarlyStoppingAction(monitor, patience, mode, min_delta, restore_best))


@final
class BarTool(Tool):
    """The progress bar that `keras_bar` returns."""

    def __init__(self, action: Action):
        super().__init__(action)
        self._newest = NewestReady()

    def __call__(self, elapsed: Elapsed, logs: Mapping[str, Any] | None = None) -> None:  # pyright: ignore
        """Records a step. If the bar is due for an update, shows the latest values that have arrived on the host."""
        self._newest.push(logs or {})
        if isinstance(self.action.interval, Schedule) and self.action.interval(elapsed):
            self.action(None, metrics.LoopOutputs(self._newest.scalars()), step_num=elapsed.steps, elapsed=elapsed)


def keras_bar(total: int | None = None, **options: Any) -> BarTool:
    """Returns a callback that shows a tqdm progress bar.

    The bar looks like `46%|████▋     | 4650/10000 [00:07<00:08, 670 steps/s, accuracy=0.9779]`. It shows the latest
    values that have arrived on the host, and never waits for the devices. In a hand-written loop, call the callback
    with `(elapsed, logs)` at each step, and call the callback's `close()` method at the end.

    Args:
      total: The number of steps in the run. If None, it is derived from the loop's `stop`.
      **options: Additional arguments for `ProgressAction`.
    """
    return BarTool(ProgressAction(total, bar="tqdm", **options))


class _InnerLoop:
    time_category = "evals"

    def __init__(self, name: str, run: Callable[..., Any]):
        self.name, self._run = name, call_of(run)
        self.was_interrupted = False

    def __repr__(self) -> str:
        return f"inner_loop({self.name!r})"

    def __loop_callback__(self, loop_state: LoopState) -> tuple[Logs | None, None]:
        with interrupt.Interruptible() as interruptible:
            result = None if interruptible.requested else self._run(loop_state)
            self.was_interrupted = interruptible.requested
        if self.was_interrupted:  # It has no result. A resumed loop calls it again.
            return None, None
        if not isinstance(result, tuple) or len(result) != 3 or not isinstance(result[1], History):
            raise TypeError(f"{self!r} must return (state, history, elapsed), as jf.loop does, got {result!r}.")
        return Logs({self.name: Logs(named(aggregate(result[1])))}), None


def inner_loop(name: str, run: Callable[..., tuple[Any, History, Elapsed]]) -> _InnerLoop:
    """Returns a callback that runs another loop, such as an evaluation, and logs the means of that loop's values.

    `{every(1000): inner_loop("test", lambda state: loop(state, test_data, {every(1): test_step}))}` logs `test.loss`,
    the mean over all examples. An evaluation that is interrupted by Ctrl-C doesn't log anything; a resumed loop repeats
    the evaluation.

    Args:
      name: The name of the collection in which the means are logged.
      run: A function that accepts the same arguments as a callback and returns what `loop` returns. The returned
        state is ignored.
    """
    return _InnerLoop(name, run)


# Compiled functions ----------------------------------------------------------------------------------


def step(
    fn: Callable[..., Any] | None = None, partitioner: partition.Partitioner | None = None, *, donate: bool = False
) -> Any:
    """Converts a pure function `fn(state, batch)` to a callback. Can be used as a decorator.

    The function is compiled, and the partitioner shards its arguments. The batch is split, or replicated if its rows
    can't be divided evenly among the devices. The function must return its results in the same form as any other
    callback; see `loop`.

    Args:
      fn: The function to compile.
      partitioner: The object that places the state and the batches on devices. If None, a single device is used.
      donate: Whether to donate the state, so that the new state can reuse its memory.
    """
    if fn is None:
        return functools.partial(step, partitioner=partitioner, donate=donate)
    return CompiledFunction(fn, partitioner, donate=donate)


def train_step(fn: Callable[..., Any] | None = None, partitioner: partition.Partitioner | None = None) -> Any:
    """Like `step`, but the callback also updates the state, using the gradient of the logged losses.

    The callback differentiates the sum of all losses logged with `add_loss`. The state must be a `TrainState`, and is
    donated. The rows of a batch must divide evenly among the devices.

    Variables that the forward pass changes are stored in the new state if `fn` either returns a state that contains
    them or adds them to the collection `updates` of the logs, as in `logs.add("updates", "batch_stats", batch_stats)`.
    For an NNX model, add all changed variables in a single call, under any name.

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
    return CompiledFunction(fn, partitioner, train=True, donate=True)
