"""The items that call a loop's callbacks, and `LoopState`, which the callbacks can read and change."""

import dataclasses
import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, final

import jax
import jax.numpy as jnp

from jaxloop import metrics, types
from jaxloop.actions import Action, CheckpointAction
from jaxloop.base.timing import Spent
from jaxloop.engine.agenda import ActionItem, Item, Moment, Rank
from jaxloop.functional.log_entries import Logs, NewestReady, named, num_examples
from jaxloop.history import History
from jaxloop.models.function_step import CompiledFunction, name_of, outputs_logs_and_state, positional_arguments
from jaxloop.schedules import Elapsed, Schedule
from jaxloop.step import Step


@final
@dataclasses.dataclass
class LoopState:
    """The state of a loop. Callbacks that take four arguments receive it as the last argument.

    Attributes:
      state: The train state. A callback may replace it.
      history: The history of the run up to the previous step.
      elapsed: The progress of the run, including the current step.
      batch: The batch of the current step. None before the first step and right after the loop has resumed.
      logs: The values that callbacks have logged so far in the current step.
      outputs: The outputs that callbacks have returned so far in the current step, by name.
      metadata: A dict in which callbacks can store their own data. The dict is saved in checkpoints, so its values must
        be numbers, strings, arrays, lists or dicts.
      stop_iteration: Set this to True to end the loop after the current step.
      total_steps: The planned number of steps, or None if the loop's `stop` doesn't determine it.
      newest: The latest logged values that have arrived on the host. Set by the loop. None until an action needs them.
    """

    state: Any = dataclasses.field(repr=False)
    history: History
    elapsed: Elapsed
    batch: Any = dataclasses.field(default=None, repr=False)
    logs: Logs = dataclasses.field(default_factory=Logs)
    outputs: dict[str, Any] = dataclasses.field(default_factory=dict, repr=False)
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)
    stop_iteration: bool = False
    total_steps: int | None = None
    newest: NewestReady | None = dataclasses.field(default=None, init=False, repr=False)


Callback = Any
"""Any callback that a loop accepts.

A callback is a `Step`, an `Action`, an object with a `__loop_callback__` method, or a function that takes up to four
arguments: `(state, batch, elapsed, loop_state)`.
"""

Tasks = Mapping[Any, Any] | Iterable[tuple[Any, Any]]
"""Schedules and their callbacks, as a dictionary or as pairs. A schedule can have one callback or a list of them."""


def end_row(loop_state: LoopState, rows: list[tuple[Elapsed, Logs]] | None = None) -> None:
    """Moves the current step's outputs and logs from `loop_state` to the history.

    If `rows` is given, the logs are appended to `rows` instead of to the history. The outputs always go to the history.
    """
    ended, outputs = loop_state.logs, loop_state.outputs
    if ended:
        if loop_state.newest is not None:
            loop_state.newest.push(ended)
        loop_state.logs = Logs()
        if rows is None:
            loop_state.history.commit(loop_state.elapsed, ended)
        else:
            rows.append((loop_state.elapsed, ended))
    if outputs:
        loop_state.outputs = {}
        loop_state.history.add_outputs(loop_state.elapsed, outputs)


ARGUMENTS = ("state", "batch", "elapsed", "loop_state")


def _num_arguments(callback: Callable[..., Any]) -> int:
    """Returns the number of arguments that a callback takes.

    Raises a `TypeError` that names the callback if it can't be called with the loop's arguments.
    """
    names, _ = positional_arguments(callback)
    takes = f"The callback {name_of(callback)} takes ({', '.join(names)}), but callbacks receive up to four arguments"
    takes = f"{takes}, ({', '.join(ARGUMENTS)})."
    if len(names) > len(ARGUMENTS):
        raise TypeError(f"{takes} Bind the others: functools.partial(...), or a default value.")
    if any(name in ARGUMENTS and name != ARGUMENTS[index] for index, name in enumerate(names)):
        count = max(ARGUMENTS.index(name) for name in names if name in ARGUMENTS) + 1
        raise TypeError(f"{takes} Write ({', '.join(ARGUMENTS[:count])}).")
    return len(names)


# Items -----------------------------------------------------------------------------------------------


@final
class FunctionTask(Item):
    """An item that calls a callback and stores the logs, outputs and state that the callback returns.

    Actions are called by an `ActionTask` instead.

    Args:
      of: The callback, which must not be an action.
      interval: The schedule of the callback.
      loop_state: The state of the loop.

    Attributes:
      of: The callback.
      is_compiled: True if the callback is a compiled function, which doesn't receive the `LoopState`.
      interval: The argument `interval`, or `never()` if the callback is called by a `TaskProgram` rather than by the
        engine.
      name, time_category: See `Item`.
    """

    def __init__(self, of: Callback, interval: Schedule, loop_state: LoopState):
        super().__init__(Rank.ACTION)
        self._loop_state, self._call, self._short_name = loop_state, call_of(of), name_of(of)
        self.of: Callback = of
        self.is_compiled: bool = isinstance(of, CompiledFunction | jax.stages.Wrapped)
        self.interval: Schedule = interval  # pyright: ignore[reportIncompatibleVariableOverride]
        of_function = f"{self._short_name} {interval!r}"
        self.name: str = type(of).__qualname__ if hasattr(of, "__loop_callback__") else of_function
        # Whether any of the logs and outputs is part of the state; None before the first logs or outputs.
        self._reports_state: bool | None = None

    @property
    def time_category(self) -> str | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return getattr(self.of, "time_category", None)

    def call(self, moment: Moment) -> bool:
        self._loop_state.elapsed = moment.now
        self()
        if self._loop_state.stop_iteration and moment.outputs is not None:
            moment.outputs[types.STOP_LOOP] = True
        return not getattr(self.of, "was_interrupted", False)

    def __call__(self) -> None:
        """Calls the callback. If it raises an error, a note on the error names the callback and the step."""
        loop_state = self._loop_state
        try:
            outputs, logs, state = outputs_logs_and_state(self._call(loop_state), self._short_name, loop_state.state)
            if logs and "updates" in logs:
                logs = {name: value for name, value in logs.items() if name != "updates"}
            if self._reports_state is None and (outputs is not None or logs):
                self._check_report(outputs, logs, state)
            if self._reports_state:
                copied = lambda leaf: jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf
                outputs, logs = jax.tree.map(copied, (outputs, logs))
            if outputs is not None:
                loop_state.outputs |= outputs if isinstance(outputs, Mapping) else {self._short_name: outputs}
            if self.is_compiled and not loop_state.logs and type(logs) is Logs:
                loop_state.logs = logs  # Nothing else refers to this object, so it isn't copied.
            elif logs:
                loop_state.logs.merge(logs)
            if state is not None:
                loop_state.state = state
        except BaseException as error:
            error.add_note(f"in the callback {self._short_name}, at step {loop_state.elapsed.steps}")
            raise

    def _check_report(self, outputs: Any, logs: Any, state: Any) -> None:
        """Checks the callback's first non-empty results.

        Raises an error if a history can't store the logs. Records whether the logs or outputs share arrays with the
        state.
        """
        if logs:  # Raises an error here, where the callback is known.
            History().commit(self._loop_state.elapsed, logs)
        # A later step may donate the leaves of a state.
        leaves = {id(leaf) for leaf in jax.tree.leaves((self._loop_state.state, state)) if isinstance(leaf, jax.Array)}
        self._reports_state = any(id(leaf) in leaves for leaf in jax.tree.leaves((outputs, logs)))

    def state_dict(self) -> Mapping[str, Any]:
        return getattr(self.of, "state_dict", dict)()

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        if saved:
            self.of.load_state_dict(saved)


def call_of(callback: Callback) -> Callable[[LoopState], Any]:
    """Returns a function that takes the `LoopState` and calls the callback. The callback must not be an action."""
    if isinstance(callback, Step):
        return lambda loop_state: _call_step(callback, loop_state)
    call = getattr(callback, "__loop_callback__", None)
    if inspect.isclass(callback) or not (callable(callback) or call):
        raise TypeError(
            f"A callback is a function of up to four of ({', '.join(ARGUMENTS)}), an object with __loop_callback__, a "
            f"Step or an Action, got {callback!r}."
        )
    if call is not None:
        return call
    number = _num_arguments(callback)
    return lambda it: callback(*(it.state, it.batch, it.elapsed, it)[:number])


def _call_step(step: Step, loop_state: LoopState) -> tuple[Any, Any, Any]:
    """Calls a `Step` and returns `(outputs, logs, state)`.

    The scalars that the step returns are logged as metrics. All other values become outputs.
    """
    state, found = step(loop_state.state, loop_state.batch, loop_state.elapsed.steps - 1, elapsed=loop_state.elapsed)
    numbers, outputs = Logs(), {}
    for name, value in (found or {}).items():
        value = value if isinstance(value, types.Weighted) else metrics.value_of(value)
        is_number = isinstance(value, types.Weighted | int | float) or getattr(value, "ndim", None) == 0
        (numbers if is_number else outputs)[name] = value
    return outputs or None, Logs(metrics=numbers), state


@final
class ActionTask(ActionItem):
    """An item that calls an action with the values that were logged since the action's previous call.

    Args:
      of: The callback, which is either the action itself or a tool that wraps it.
      action: The action.
      loop_state: The state of the loop.

    Attributes:
      of: The callback.
      schedules: The schedules under which the loop's `tasks` list the callback. The action is due when any of them
        fires. If the action's own interval is a schedule, it must also fire at the same step.
    """

    def __init__(self, of: Callback, action: Action, loop_state: LoopState):
        if not isinstance(action.interval, Schedule) and action.interval != 1:
            raise ValueError(f"{action!r} counts train loops, but there are none here. Leave its interval out.")
        super().__init__(action, {}, Rank.SAVE if isinstance(action, CheckpointAction) else Rank.ACTION)
        self.reads = "nothing"  # Of the engine's outputs.
        self.name: str = " ".join([type(action).__qualname__, *action.monitors])
        self.of: Callback = of
        self.schedules: list[Schedule] = []
        self._loop_state = loop_state
        self._next_row = len(loop_state.history)  # The next row of the history to read.

    @property
    def interval(self) -> Schedule:
        own, of_tasks = self.action.interval, functools.reduce(operator.or_, self.schedules)
        return of_tasks & own if isinstance(own, Schedule) else of_tasks

    def __call__(self) -> None:
        """Calls the action now, unless it has already been called at the current step."""
        now = self._loop_state.elapsed
        if self.called_at != now.steps:
            self.call(Moment(None, now, metrics.LoopOutputs(), Spent()))
            self.mark(now, Spent(), 0)

    def call(self, moment: Moment) -> bool:
        loop_state, outputs = self._loop_state, moment.outputs
        assert outputs is not None
        loop_state.elapsed = moment.now
        end_row(loop_state)  # No other callback of this step follows, except for actions.
        if self.action.uses_outputs and self.action.needs_all_outputs:
            self._add_rows(outputs)
        elif self.action.uses_outputs:
            loop_state.newest = loop_state.newest or NewestReady()
            outputs.update(loop_state.newest.scalars())
        super().call(moment._replace(state=loop_state.state))
        loop_state.stop_iteration |= outputs.asks_to_stop
        return True

    def _add_rows(self, outputs: metrics.LoopOutputs) -> None:
        """Adds to `outputs` the values that were logged since the action's previous call.

        Unless the action monitors a metric, also adds the non-scalar outputs of the current step.
        """
        history = self._loop_state.history
        first = min(self._next_row, len(history))  # The history may have been damaged.
        before, self._next_row = history[first - 1].elapsed if first else Elapsed(), len(history)
        for elapsed, logs in [history[index] for index in range(first, len(history))]:
            if elapsed.steps != before.steps:
                outputs.num_examples.append(num_examples(elapsed, before))
                before = elapsed
            for name, value in named(logs).items():
                outputs.setdefault(name, []).append(value)
        for elapsed, found in history.outputs[-1:] if not self.action.monitors else ():
            if elapsed.steps == self._loop_state.elapsed.steps:
                outputs.update({name: [value] for name, value in metrics.fetch(found).items()})

    def state_dict(self) -> Mapping[str, Any]:
        return {"action": dict(super().state_dict()), "next_row": self._next_row}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        super().load_state_dict(saved["action"])
        self._next_row = saved["next_row"]
