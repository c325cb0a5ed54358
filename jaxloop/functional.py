"""The loop language: schedules mapped to callbacks.

>>> import jax.numpy as jnp
>>> import numpy as np
>>> from jaxloop import functional as jf
>>> @jax.jit
... def train_step(weight, batch):
...     slope = jnp.mean((weight * batch["x"] - batch["y"]) * batch["x"])
...     logs = jf.logs()
...     logs.add_metric("slope", slope)
...     return logs, weight - 0.1 * slope
>>> dataset = [{"x": np.full(8, 2.0, np.float32), "y": np.full(8, 6.0, np.float32)}] * 100
>>> weight, history, elapsed = jf.loop(
...     jnp.float32(0), dataset, {jf.every(1): train_step, jf.every(20): lambda: None}, stop=jf.at(30)
... )
>>> round(float(weight), 4), elapsed.steps, len(history.collect("slope"))
(3.0, 30, 30)

The state may be any pytree. Everything else is what the other doors use: `Elapsed`, schedules, `History`, actions,
checkpoints, partitioners.
"""

import dataclasses
import functools
import inspect
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import jax
import numpy as np
from absl import logging
from etils import epath

from jaxloop import checks, interrupt, metrics, models, partition, timing, types
from jaxloop.actions.action import Action
from jaxloop.actions.checkpoint_action import CheckpointAction
from jaxloop.actions.early_stopping_action import EarlyStoppingAction
from jaxloop.actions.periodic_action import PeriodicAction, is_periodic
from jaxloop.actions.progress_action import ProgressAction
from jaxloop.function_step import FunctionStep
from jaxloop.history import History
from jaxloop.loop import Loop
from jaxloop.loop import elapse as elapse
from jaxloop.schedules import Elapsed, Schedule
from jaxloop.schedules import after as after
from jaxloop.schedules import always as always
from jaxloop.schedules import at as at
from jaxloop.schedules import every as every
from jaxloop.schedules import first as first
from jaxloop.schedules import last as last
from jaxloop.schedules import never as never
from jaxloop.step import Step

# Logs ----------------------------------------------------------------------------------------------


@jax.tree_util.register_pytree_with_keys_class
class Logs(dict[str, Any]):
    """What a step reports: values by collection and name. A nested dictionary, and a pytree, so that jit returns it.

    >>> logs = Logs()
    >>> logs.add_metric("accuracy", 0.9).add_loss("loss", 0.3)
    {'metrics': {'accuracy': 0.9}, 'losses': {'loss': 0.3}}
    >>> logs.entry_value("accuracy"), logs.metrics.accuracy, logs.loss
    (0.9, 0.9, 0.3)
    """

    def add(self, collection: str, name: str, value: Any) -> Self:
        """Adds a value to a collection; returns the logs."""
        for each in (collection, name):
            if not isinstance(each, str):
                raise TypeError(f"Logs.add takes the names of a collection and of a value as strings, got {each!r}.")
        self.setdefault(collection, Logs())[name] = value
        return self

    def add_metric(self, name: str, value: Any) -> Self:
        """Adds to `metrics`: what is to be seen."""
        return self.add("metrics", name, value)

    def add_loss(self, name: str, value: Any) -> Self:
        """Adds to `losses`: scalars, of whose sum `train_step` takes the gradient."""
        return self.add("losses", name, value)

    @property
    def updates(self) -> "Logs":
        """The collection `updates`: variables that the forward pass changed, for `train_step` to put in the state.

        `logs.add("updates", "batch_stats", batch_stats)` adds one.
        """
        return self.get("updates", Logs())

    def merge(self, other: Mapping[str, Any]) -> Self:
        """Takes over all entries of other logs, collection by collection; returns the logs."""
        for name, value in other.items():
            if isinstance(value, Mapping):
                self[name] = Logs(self.get(name, {})).merge(value)
            else:
                self[name] = value
        return self

    def entry_value(self, name: str) -> Any:
        """The value of a name, in whichever collection; `entry_value("metrics.loss")` picks one.

        Raises:
          KeyError: there is no such name, or there are several.
        """
        found = {path: value for path, value in _entries(self) if f".{path}".endswith(f".{name.replace('/', '.')}")}
        if len(found) != 1:
            there = f"it is any of {', '.join(found)}" if found else f"there are {', '.join(dict(_entries(self)))}"
            raise KeyError(f"No one entry of the logs is named {name!r}: {there or 'none'}.")
        return next(iter(found.values()))

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self.entry_value(name)
        except KeyError as error:
            raise AttributeError(error.args[0]) from None

    def tree_flatten_with_keys(self):
        names = tuple(sorted(self))
        return [(jax.tree_util.DictKey(name), self[name]) for name in names], names

    @classmethod
    def tree_unflatten(cls, names, values) -> Self:
        return cls(zip(names, values, strict=True))


logs, history = Logs, History


def _entries(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _entries(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


# The loop ------------------------------------------------------------------------------------------


class _Moment(Schedule):
    """A moment outside the steps."""

    def __init__(self, name: str):
        self._name = name

    def __repr__(self) -> str:
        return self._name

    def fires(self, before: Elapsed, now: Elapsed) -> bool:
        return False

    def next_step(self, now: Elapsed) -> int | None:
        return None


on_start = _Moment("on_start")
"""Key of the callbacks before the first step; their batch is None."""
on_end = _Moment("on_end")
"""Key of the callbacks after the last step, however the loop ended, other than by an exception."""


@dataclasses.dataclass
class LoopState:
    """Where a loop is: what a callback with four arguments gets as its last.

    Attributes:
      state: the state; a callback may set it.
      batch: the batch of this step.
      history: what was measured, up to the step before.
      elapsed: how far the loop is; this step counts.
      logs: what the callbacks of this step have reported so far.
      outputs: what they have returned as outputs, by name.
      metadata: yours, for as long as the loop runs.
      stop_iteration: set it to True, and the loop ends after this step.
      total_steps: how many steps the loop shall come to, where `stop` says that.
    """

    state: Any
    history: History
    elapsed: Elapsed
    batch: Any = None
    logs: Logs = dataclasses.field(default_factory=Logs)
    outputs: dict[str, Any] = dataclasses.field(default_factory=dict)
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)
    stop_iteration: bool = False
    total_steps: int | None = None

    @property
    def accumulated_logs(self) -> Logs:
        """The means of all logs of this history so far, weighted by examples. Reading it waits for the devices."""
        rows = [*self.history, *([(self.elapsed, self.logs)] if self.logs else [])]
        return _aggregate(rows, "mean")


Callback = Any
"""A function of up to four of `(state, batch, elapsed, loop_state)`, an object with `__loop_callback__`, a `Step`, an
`Action`, a `Loop`, or an object of `clu.periodic_actions`."""

Tasks = Mapping[Any, Any] | Iterable[tuple[Schedule, Any]]
"""Schedules and callbacks: a dictionary, or pairs; a callback may stand alone or in a list."""


def loop(
    state: Any,
    dataset: Any,
    tasks: Tasks,
    *,
    stop: Schedule | int | None = None,
    history: History | None = None,
    elapsed: Elapsed | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[Any, History, Elapsed]:
    """For each batch, calls the callbacks whose schedule fires, in the order in which they stand.

    A callback is a function of none to four of `(state, batch, elapsed, loop_state)`, by position. It returns None,
    logs, `(logs, state)` or `(outputs, logs, state)`, with None for what it leaves alone; a state that is no tuple and
    no dictionary may be returned alone. Also `Step`s, `Action`s and `Loop`s of jaxloop are callbacks (a loop runs on
    the one batch), and objects with `__loop_callback__(loop_state) -> (logs, state)`.

    The logs of a step make one row of the history. Nothing waits for the devices, unless a callback reads a value.
    Ctrl-C ends the loop after the step in flight, and what is there is returned.

    Args:
      state: any pytree. Callbacks that take it over (`train_step` donates it) leave you the one that is returned.
      dataset: the batches.
      tasks: `{every(1): [train_step], every(steps=1000): [checkpoint(...)]}`, or pairs. Not changed. `on_start` and
        `on_end` are keys too.
      stop: where to end, as in `elapse`.
      history: goes on with this one; it is the one that is returned.
      elapsed: goes on from here.
      clock: tells the time in seconds.

    Returns:
      `(state, history, elapsed)`.

    Raises:
      TypeError: a callback with a signature or a result that can't be meant; the error names it.
    """
    compiled = _compile(tasks)
    stopwatch = timing.Stopwatch(clock)
    loop_state = LoopState(state, History() if history is None else history, elapsed or Elapsed())
    if isinstance(stop, int) or getattr(stop, "unit", None) == "steps":
        loop_state.total_steps = getattr(stop, "value", stop)  # pyright: ignore[reportAttributeAccessIssue]
    interruptible = interrupt.Interruptible()
    callbacks = [callback for _, each in compiled for callback in each]
    try:
        with interruptible, stopwatch.counting("rest"):
            _call(loop_state, stopwatch, [each for schedule, each in compiled if schedule is on_start])
            called: set[int] = set()
            for now, batch in elapse(dataset, stop=stop, start=loop_state.elapsed, stopwatch=stopwatch):
                loop_state.elapsed, loop_state.batch = now, batch
                called = {index for index, (schedule, _) in enumerate(compiled) if schedule(now)}
                _call(loop_state, stopwatch, [each for index, (_, each) in enumerate(compiled) if index in called])
                if loop_state.stop_iteration or interruptible.requested:
                    break
            if loop_state.elapsed.previous is not None and not loop_state.elapsed.is_last:
                # Only now it is known that this was the last step.
                now = loop_state.elapsed = dataclasses.replace(loop_state.elapsed, is_last=True)
                late = [
                    each for index, (schedule, each) in enumerate(compiled) if index not in called and schedule(now)
                ]
                _call(loop_state, stopwatch, late)
            _call(loop_state, stopwatch, [each for schedule, each in compiled if schedule is on_end])
            for callback in callbacks:
                loop_state.state = callback.finish(loop_state.state)
    finally:
        _close(callbacks)
    return loop_state.state, loop_state.history, loop_state.elapsed.without_previous()


def _call(loop_state: LoopState, stopwatch: timing.Stopwatch, due: Sequence[Sequence["_Compiled"]]) -> None:
    """Calls callbacks, and makes a row of what they report."""
    loop_state.logs, loop_state.outputs = Logs(), {}
    for callback in (callback for callbacks in due for callback in callbacks):
        try:
            with stopwatch.counting(callback.time_goes_to):
                callback(loop_state)
        except BaseException as error:
            error.add_note(f"in the callback {callback.name}, at step {loop_state.elapsed.steps}")
            raise
    if loop_state.logs:
        loop_state.history.commit(loop_state.elapsed, loop_state.logs)
    if loop_state.outputs:
        loop_state.history.add_outputs(loop_state.elapsed, loop_state.outputs)


def _close(callbacks: Sequence["_Compiled"]) -> None:
    errors = []
    for callback in {id(callback.of): callback for callback in callbacks}.values():
        try:
            callback.close()
        except Exception as error:
            logging.exception("The callback %s could not be closed.", callback.name)
            errors.append(error)
    if errors:
        raise errors[0]


# Callbacks -----------------------------------------------------------------------------------------


def _compile(tasks: Tasks) -> list[tuple[Schedule, list["_Compiled"]]]:
    pairs = tasks.items() if isinstance(tasks, Mapping) else tasks
    compiled = []
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], Schedule):
            raise TypeError(
                "Tasks are {schedule: callbacks} or pairs (schedule, callbacks), such as {every(100): [save]}, got "
                f"{pair[0] if isinstance(tasks, Mapping) else pair!r} in the place of "
                f"{'a schedule' if isinstance(tasks, Mapping) else 'a pair'}."
            )
        schedule, callbacks = pair
        callbacks = callbacks if isinstance(callbacks, list | tuple) else [callbacks]
        compiled.append((schedule, [_compiled(callback) for callback in callbacks]))
    return compiled


def _compiled(callback: Callback) -> "_Compiled":
    if hasattr(callback, "__loop_callback__"):
        return _Compiled(callback, lambda loop_state: (None, *callback.__loop_callback__(loop_state)))
    if isinstance(callback, Step):
        return _Compiled(callback, functools.partial(_run_step, callback))
    if isinstance(callback, Loop):
        return _Compiled(callback, functools.partial(_run_loop, callback))
    if is_periodic(callback):
        callback = PeriodicAction(callback)
    if isinstance(callback, Action):
        return _Compiled(callback, _ActionCallback(callback).call)
    if not callable(callback):
        raise TypeError(
            f"A callback is a function of up to four of (state, batch, elapsed, loop_state), an object with "
            f"__loop_callback__, a Step, an Action or a Loop, got {callback!r}."
        )
    count, name = _num_arguments(callback), _name_of(callback)

    def call(loop_state: LoopState) -> Any:
        arguments = (loop_state.state, loop_state.batch, loop_state.elapsed, loop_state)
        return _three(callback(*arguments[:count]), name)

    return _Compiled(callback, call)


class _Compiled:
    """A callback of any kind, called with the loop state alone."""

    def __init__(self, of: Callback, call: Callable[[LoopState], tuple[Any, Any, Any]]):
        self.of = of
        self.name = _name_of(of)
        self.time_goes_to = getattr(of, "time_goes_to", "rest")
        self._call = call

    def __call__(self, loop_state: LoopState) -> None:
        outputs, logs, state = self._call(loop_state)
        if outputs is not None:
            loop_state.outputs.update(outputs if isinstance(outputs, Mapping) else {self.name: outputs})
        if logs is not None:
            loop_state.logs.merge({name: value for name, value in logs.items() if name != "updates"})
        if state is not None:
            loop_state.state = state

    def finish(self, state: Any) -> Any:
        return self.of.finish(state) if isinstance(self.of, Action | _Tool) else state

    def close(self) -> None:
        if isinstance(self.of, Action | _Tool):
            self.of.close()


_ARGUMENTS = "(state, batch, elapsed, loop_state)"


def _name_of(callback: Callback) -> str:
    return getattr(callback, "__name__", None) or repr(callback)


def _num_arguments(callback: Callable[..., Any]) -> int:
    """How many positional arguments a callback takes; raises a `TypeError` that names it where that can't be."""
    try:
        parameters = inspect.signature(callback).parameters.values()
    except (TypeError, ValueError):
        raise TypeError(
            f"The signature of the callback {_name_of(callback)} can't be read: wrap it, lambda state: ..."
        ) from None
    required = [each for each in parameters if each.default is each.empty]
    by_name = [each.name for each in required if each.kind is each.KEYWORD_ONLY]
    if by_name:
        raise TypeError(
            f"The callback {_name_of(callback)} needs {', '.join(by_name)} by name, and callbacks get {_ARGUMENTS} by "
            "position."
        )
    if any(each.kind is each.VAR_POSITIONAL for each in parameters):
        return 4
    positional = [each.name for each in required if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    if len(positional) > 4:
        raise TypeError(
            f"The callback {_name_of(callback)} takes {len(positional)} arguments ({', '.join(positional)}); callbacks "
            f"get up to four, {_ARGUMENTS}. Bind the others: functools.partial(...), or a default value."
        )
    return len(positional)


def _three(result: Any, name: str) -> tuple[Any, Any, Any]:
    """What a callback returned, as `(outputs, logs, state)`."""
    is_plain_tuple = isinstance(result, tuple) and not hasattr(result, "_fields")
    if is_plain_tuple and len(result) in (2, 3):
        outputs, logs, state = result if len(result) == 3 else (None, *result)
    elif isinstance(result, tuple):
        raise TypeError(_wrong_result(name, f"a tuple of {len(result)}"))
    elif isinstance(result, Mapping):
        outputs, logs, state = None, result, None
    else:
        outputs, logs, state = None, None, result
    if logs is not None and not isinstance(logs, Mapping):
        raise TypeError(_wrong_result(name, f"logs that are no dictionary: {checks.describe(logs)}"))
    return outputs, logs, state


def _wrong_result(name: str, got: str) -> str:
    return (
        f"The callback {name} must return None, logs, (logs, state) or (outputs, logs, state), with None for what it "
        f"leaves alone, got {got}. A state that is a tuple or a dictionary is returned as (None, state)."
    )


def _run_step(step: Step, loop_state: LoopState) -> tuple[Any, Any, Any]:
    state, outputs = step.step(
        loop_state.state, loop_state.batch, loop_state.elapsed.steps - 1, elapsed=loop_state.elapsed
    )
    return (*_outputs_and_logs(outputs), state)


def _outputs_and_logs(values: types.Output) -> tuple[dict[str, Any] | None, Logs]:
    """Scalars as metrics, all else as outputs."""
    logs, outputs = Logs(), {}
    for name, value in (values or {}).items():
        if isinstance(value, Mapping):
            logs[name] = value
        elif np.ndim(value) == 0 and not isinstance(value, str | types.MetricWithMetadata):
            logs.add_metric(name, value)
        else:
            outputs[name] = value
    return outputs or None, logs


def _run_loop(a_loop: Loop, loop_state: LoopState) -> tuple[Any, Any, Any]:
    state, outputs = a_loop(loop_state.state, [loop_state.batch], num_steps=1)
    if outputs.pop(types.STOP_LOOP, False):
        loop_state.stop_iteration = True
    return (*_outputs_and_logs(dict(metrics.summarize(outputs))), state)


class _ActionCallback:
    """Calls an action with what was logged since its last call."""

    def __init__(self, action: Action):
        if not isinstance(action.interval, Schedule) and action.interval != 1:
            raise ValueError(
                f"{action!r} counts train loops, of which there are none here. Leave its interval out: the schedule "
                "under which it stands says when it is called."
            )
        self.action = action
        self._seen: tuple[History | None, int, Elapsed] = (None, 0, Elapsed())  # The rows of which history, and so far.

    def call(self, loop_state: LoopState) -> tuple[Any, Any, Any]:
        interval = self.action.interval
        if not isinstance(interval, Schedule) or interval(loop_state.elapsed):
            outputs = self._outputs(loop_state)
            self.action(
                loop_state.state,
                outputs,
                step_num=loop_state.elapsed.steps,
                elapsed=loop_state.elapsed,
                history=loop_state.history if self.action.waits_for_outputs else None,
                total_steps=loop_state.total_steps,
            )
            if outputs.get(types.STOP_LOOP):
                loop_state.stop_iteration = True
        return None, None, None

    def _outputs(self, loop_state: LoopState) -> metrics.LoopOutputs:
        if not self.action.uses_outputs:
            return metrics.LoopOutputs()
        if not self.action.waits_for_outputs:
            return metrics.LoopOutputs(metrics.ready_scalars(_named(loop_state.logs)))
        history, before = loop_state.history, Elapsed()
        if self._seen[0] is history:
            before = self._seen[2]
            rows = history.rows[self._seen[1] :]
        else:
            rows = history.rows
        pairs = [*rows, *([(loop_state.elapsed, metrics.fetch(loop_state.logs))] if loop_state.logs else [])]
        self._seen = (history, len(history) + bool(loop_state.logs), loop_state.elapsed.without_previous())
        outputs = metrics.LoopOutputs(num_examples=_num_samples([elapsed for elapsed, _ in pairs], before))
        for _, logs in pairs:
            for name, value in _named(logs).items():
                outputs.setdefault(name, []).append(value)
        return outputs


def _num_samples(rows: Sequence[Elapsed], before: Elapsed) -> list[int]:
    """How many examples each row stands for; for one that comes after steps without a row, the mean of these."""
    counts = []
    for elapsed in rows:
        counts.append(max((elapsed.samples - before.samples) // max(elapsed.steps - before.steps, 1), 1))
        before = elapsed
    return counts


def _named(logs: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of logs, under their own names where these tell them apart, else with their collection's."""
    entries = dict(_entries(logs))
    names = [path.rpartition(".")[2] for path in entries]
    return {
        path.replace(".", "/") if names.count(name) > 1 or path.count(".") == 0 else name: value
        for name, (path, value) in zip(names, entries.items(), strict=True)
    }


# Tools ---------------------------------------------------------------------------------------------


class _Tool:
    """An action as a callback: in a task, by `**tool` at every step, and called by hand in a loop of your own."""

    def __init__(self, action: Action):
        self.action = action
        self.time_goes_to = action.time_goes_to
        self._callback = _ActionCallback(action)
        self._key = always()

    def __repr__(self) -> str:
        return f"{type(self).__name__.lstrip('_').lower()}({self.action!r})"

    def __loop_callback__(self, loop_state: LoopState) -> tuple[None, None]:
        self._callback.call(loop_state)
        return None, None

    def finish(self, state: Any) -> Any:
        return self.action.finish(state)

    def close(self) -> None:
        """Finishes what was begun. A `loop` does so by itself."""
        self.action.close()

    def keys(self) -> list[Schedule]:
        return [self._key]

    def __getitem__(self, key: Schedule) -> list[Self]:
        if key is not self._key:
            raise KeyError(key)
        return [self]

    def _call_action(self, elapsed: Elapsed, state: Any, logs: Mapping[str, Any] | None) -> metrics.LoopOutputs:
        outputs = metrics.LoopOutputs({name: [value] for name, value in metrics.fetch(_named(logs or {})).items()})
        self.action(state, outputs, step_num=elapsed.steps, elapsed=elapsed, history=None)
        return outputs


class _Checkpoint(_Tool):
    def __call__(self, elapsed: Elapsed, state: Any, logs: Mapping[str, Any] | None = None) -> None:
        """Saves the state of this step, and waits until it is on disk."""
        self._call_action(elapsed, state, logs)
        self.action.flush()


def checkpoint(
    directory: epath.PathLike, keep: int | None = 1, monitor: str | None = None, mode: str = "min"
) -> _Checkpoint:
    """Saves the state under its step; by hand, `checkpoint(elapsed, state, logs)`.

    In a `loop` it saves asynchronously, and the loop's end waits for what is under way.

    Args:
      directory: with one subdirectory a step; may be relative.
      keep: how many of the newest to keep; None for all.
      monitor: a logged value by which the best one is kept beside them; it must be logged at the steps that are saved.
      mode: whether the best is the "min" or the "max".
    """
    best = None if monitor is None else (monitor, mode)
    return _Checkpoint(CheckpointAction(directory, keep=keep, best=best))


class _EarlyStopping(_Tool):
    def __call__(self, elapsed: Elapsed, state: Any, logs: Mapping[str, Any]) -> bool:
        """Whether to stop. Then `finish(state)` gives the best state, with `restore_best`."""
        return bool(self._call_action(elapsed, state, logs).get(types.STOP_LOOP, False))


def early_stopping(
    monitor: str,
    patience: int | Schedule,
    mode: str = "auto",
    min_delta: float = 0.0,
    baseline: float | None = None,
    restore_best: bool = False,
) -> _EarlyStopping:
    """Ends the loop when a logged value no longer improves; by hand, `if early_stopping(elapsed, state, logs): break`.

    Reading the value waits for the devices. The arguments are those of `EarlyStoppingAction`: patience counts the
    calls at which the value was logged, or is a period such as `after(steps=1000)`.
    """
    return _EarlyStopping(EarlyStoppingAction(monitor, patience, mode, min_delta, baseline, restore_best))


class _Bar(_Tool):
    def __call__(self, elapsed: Elapsed, logs: Mapping[str, Any] | None = None) -> None:
        """Shows this step, and those of its values that are there already."""
        ready = metrics.LoopOutputs(metrics.ready_scalars(_named(logs or {})))
        self.action(None, ready, step_num=elapsed.steps, elapsed=elapsed, history=None)


def keras_bar(total: int | None = None, **options: Any) -> _Bar:
    """A bar as Keras draws it: `4650/10000 [============>.................] - ETA: 8s - accuracy: 0.9779`.

    By hand, `keras_bar(elapsed, logs)`, and `keras_bar.close()` at the end. It shows the newest values that are there,
    and never waits for the devices.

    Args:
      total: steps of the run; None for what the loop's `stop` says.
      **options: of `ProgressAction`.
    """
    return _Bar(ProgressAction(total, bar="keras", **options))


def tqdm_bar(total: int | None = None, **options: Any) -> _Bar:
    """A bar of tqdm; else as `keras_bar`."""
    return _Bar(ProgressAction(total, bar="tqdm", **options))


class _InnerLoop:
    time_goes_to = "evals"

    def __init__(self, name: str, run: Callable[[Any], Any], aggregation: str | Callable[[list[Any]], Any]):
        self.name, self._run, self._aggregation = name, run, aggregation

    def __repr__(self) -> str:
        return f"inner_loop({self.name!r})"

    def __loop_callback__(self, loop_state: LoopState) -> tuple[Logs, None]:
        result = self._run(loop_state.state)
        if not isinstance(result, tuple) or len(result) != 3 or not isinstance(result[1], History):
            raise TypeError(f"{self!r} must return (state, history, elapsed), as jf.loop does, got {result!r}.")
        if not checks.is_alive(loop_state.state):
            raise ValueError(
                f"{self!r} has taken over (donated) the state of the loop around it, which can't go on. Evaluate with "
                "jf.step, which leaves the state alone, or give the inner loop a copy: jax.tree.map(jnp.copy, state)."
            )
        means = _aggregate(result[1], self._aggregation)
        inner = Logs({name: value for _, entries in means.items() for name, value in entries.items()})
        return Logs({self.name: inner}), None


def inner_loop(
    name: str,
    run: Callable[[Any], tuple[Any, History, Elapsed]],
    aggregation: str | Callable[[list[Any]], Any] = "mean",
) -> _InnerLoop:
    """Evaluation inside training: a callback that runs another loop, and reports what it comes to under a name.

    `{every(1000): inner_loop("test", lambda state: loop(state, test_data, {every(1): test_step}))}` logs `test.loss`.

    Args:
      name: the collection of the reported values.
      run: gets the state, and returns what `loop` returns. The state that it returns is left alone.
      aggregation: "mean", weighted by examples, "sum", "min", "max", "last", or a function of the list of values.
    """
    if aggregation not in _AGGREGATIONS and not callable(aggregation):
        raise ValueError(f"aggregation must be one of {', '.join(_AGGREGATIONS)} or a function, got {aggregation!r}.")
    return _InnerLoop(name, run, aggregation)


_AGGREGATIONS: dict[str, Callable[[list[Any], list[int]], Any]] = {
    "mean": lambda values, weights: float(np.average(np.array(values, np.float64), weights=weights)),
    "sum": lambda values, weights: sum(values),
    "min": lambda values, weights: min(values),
    "max": lambda values, weights: max(values),
    "last": lambda values, weights: values[-1],
}


def _aggregate(rows: Iterable[Any], how: str | Callable[[list[Any]], Any]) -> Logs:
    """What the logs of rows come to, by collection and name."""
    pairs = list(rows)
    counts = _num_samples([elapsed for elapsed, _ in pairs], Elapsed())
    found: dict[tuple[str, str], tuple[list[Any], list[int]]] = {}
    for (_, logs), count in zip(pairs, counts, strict=True):
        for path, value in _entries(metrics.fetch(logs)):
            collection, _, name = path.rpartition(".")
            values, weights = found.setdefault((collection or "metrics", name), ([], []))
            values.append(value)
            weights.append(count)
    aggregate = (lambda values, weights: how(values)) if callable(how) else _AGGREGATIONS[how]
    logs = Logs()
    for (collection, name), (values, weights) in found.items():
        logs.add(collection, name, aggregate(values, weights))
    return logs


# Compiled steps ------------------------------------------------------------------------------------


class _PureStep(FunctionStep):
    """Its batch is a pair: the batch itself, and what is replicated."""

    def shard_batch(self, batch: Any) -> Any:
        own, broadcasts = batch
        return (super().shard_batch(own) if self.train else self._shard_short_batch(own)), broadcasts


class _Compilable:
    """A pure function as a callback: compiled, and sharded by a partitioner."""

    def __init__(self, fn: Callable[..., Any], partitioner: partition.Partitioner, *, train: bool, donate: bool):
        self._num_arguments = _num_arguments(fn)
        if self._num_arguments < 2:
            raise TypeError(
                f"{_name_of(fn)} must take (state, batch), and may take (state, batch, broadcasts, statics)."
            )
        functools.update_wrapper(self, fn)
        self._fn, self._partitioner, self._train, self._donate = fn, partitioner, train, donate
        self._steps: dict[Hashable, Step] = {}

    def __repr__(self) -> str:
        return f"{'train_step' if self._train else 'step'}({_name_of(self._fn)})"

    def __loop_callback__(self, loop_state: LoopState) -> tuple[Logs | None, Any]:
        outputs, logs, state = self._run(loop_state.state, loop_state.batch, None, None)
        loop_state.outputs.update(outputs or {})
        return logs, state

    def __call__(self, state: Any, batch: types.Batch, broadcasts: Any = None, statics: Hashable = None) -> Any:
        """Runs the function: `(logs, state)`, or `(outputs, logs, state)` where it returns outputs.

        Args:
          state: the state.
          batch: a host batch, split over the devices.
          broadcasts: any pytree, the same on all devices.
          statics: a hashable value; each one compiles anew.
        """
        outputs, logs, state = self._run(state, batch, broadcasts, statics)
        return (logs, state) if outputs is None else (outputs, logs, state)

    def _run(self, state: Any, batch: types.Batch, broadcasts: Any, statics: Hashable) -> tuple[Any, Any, Any]:
        given = {"broadcasts": (broadcasts, 3), "statics": (statics, 4)}
        for name, (value, place) in given.items():
            if value is not None and self._num_arguments < place:
                raise TypeError(f"{self!r} was given {name}, which its function does not take as argument {place}.")
        if statics not in self._steps:
            step = _PureStep(functools.partial(self._pure, statics), self._partitioner, train=self._train)
            step.compile(**({} if self._donate else {"donate_argnums": ()}))
            self._steps[statics] = step
        state, found = self._steps[statics].step(state, (batch, broadcasts))
        return (found or {}).get("outputs"), (found or {}).get("logs"), state

    def _pure(self, statics: Hashable, state: Any, packed: tuple[Any, Any]) -> tuple[Any, Any]:
        arguments = (*packed, statics)[: self._num_arguments - 1]
        call = lambda state: _three(self._fn(state, *arguments), _name_of(self._fn))
        outputs, logs, new_state = self._gradient_update(call, state) if self._train else call(state)
        found = {"outputs": outputs, "logs": None if logs is None else Logs().merge(logs)}
        return (state if new_state is None else new_state), found

    def _gradient_update(self, call: Callable[[Any], tuple[Any, Any, Any]], state: Any) -> tuple[Any, Any, Any]:
        if not hasattr(state, "params") or not hasattr(state, "apply_gradients"):
            raise TypeError(
                f"{self!r} takes a TrainState, with params and apply_gradients, got {checks.describe(state)}."
            )

        def sum_of_losses(params: Any) -> tuple[jax.Array, Any]:
            outputs, logs, new_state = call(state.replace(params=params))
            losses = dict(_entries((logs or {}).get("losses", {})))
            if not losses:
                raise ValueError(f"{self!r} logged no loss to take the gradient of: logs.add_loss('loss', loss).")
            for name, loss in losses.items():
                if np.shape(loss):
                    raise ValueError(f"{self!r} logged the loss {name!r}, {checks.describe(loss)}: take its mean.")
            return sum(losses.values()), (outputs, logs, new_state)  # pyright: ignore[reportReturnType]

        grads, (outputs, logs, new_state) = jax.grad(sum_of_losses, has_aux=True)(state.params)
        state = (state if new_state is None else new_state).replace(params=state.params)
        updates = dict(logs).pop("updates", None)
        if updates:
            state = state.update_variables(dict(updates))
        return (
            outputs,
            {name: each for name, each in logs.items() if name != "updates"},
            models.apply_gradients(state, grads),
        )


def step(
    fn: Callable[..., Any] | None = None, partitioner: partition.Partitioner | None = None, *, donate: bool = False
) -> Any:
    """Makes a callback of a pure function `fn(state, batch, [broadcasts, statics])`, as a decorator or by hand.

    It is compiled, and sharded by the partitioner: the batch is split, broadcasts are replicated, statics are hashable
    and compiled in. It returns what a callback returns.

    Args:
      fn: the function.
      partitioner: where the state and the batches live; None for one device.
      donate: whether the state is taken over, so that its memory serves for the new one. A step that returns a new
        state is up to a third faster then.
    """
    if fn is None:
        return functools.partial(step, partitioner=partitioner, donate=donate)
    return _Compilable(fn, partitioner or partition.SingleDevicePartitioner(), train=False, donate=donate)


def train_step(fn: Callable[..., Any] | None = None, partitioner: partition.Partitioner | None = None) -> Any:
    """As `step`, and takes the gradient of the sum of the losses that `fn` logged by `add_loss`, and updates the state.

    The state is a `TrainState`, and is taken over (donated). What `fn` adds to the logs' `updates`
    (`logs.add("updates", "batch_stats", ...)`), or returns as a state, is taken over too.

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
    return _Compilable(fn, partitioner or partition.SingleDevicePartitioner(), train=True, donate=True)
