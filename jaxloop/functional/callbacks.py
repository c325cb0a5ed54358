"""The callbacks of a loop, as items of its engine."""

import abc
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from jaxloop import metrics, types
from jaxloop.actions.action import Action
from jaxloop.actions.checkpoint_action import CheckpointAction
from jaxloop.actions.monitor import Monitor
from jaxloop.actions.periodic_action import PeriodicAction, is_periodic
from jaxloop.base.timing import Spent
from jaxloop.engine.agenda import Item, Moment, Rank
from jaxloop.functional.log_entries import Logs, NewestReady, entries, named, num_examples
from jaxloop.functional.loop_state import ARGUMENTS, Callback, LoopState, arguments, end_row, num_arguments
from jaxloop.functional.tools import Tool
from jaxloop.history import History
from jaxloop.models.function_step import name_of, outputs_logs_and_state
from jaxloop.schedules import Elapsed, Schedule, is_always, never
from jaxloop.step import Step

Report = Callable[[LoopState], tuple[Any, Any, Any]]
"""Calls a callback. Returns `(outputs, logs, state)`, with None for unchanged parts."""


def action_of(callback: Callback) -> Action | None:
    """Returns the action that a callback is or contains, if it is of such a kind."""
    if isinstance(callback, Tool):
        return callback.action
    return PeriodicAction(callback) if is_periodic(callback) else callback if isinstance(callback, Action) else None


class Task(Item, abc.ABC):
    """A callback that a loop calls when its schedule fires.

    Args:
      of: The callback.
      loop_state: The state of the loop.

    Attributes:
      of: The callback.
      when: The schedule.
      was_called: True if this process has called it.
      time_category: See `Item`.
    """

    def __init__(self, of: Callback, loop_state: LoopState, rank: Rank):
        super().__init__(rank)
        self.of: Callback = of
        self.when: Schedule = never()
        self.was_called: bool = False
        self.time_category: str | None = getattr(of, "time_category", None)
        self._loop_state = loop_state

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        if isinstance(self.of, Tool):  # Not with its directory, which may have moved.
            return f"{type(self.of).__qualname__} {self.of.monitor}"
        has_state = isinstance(self.of, Action) or hasattr(self.of, "__loop_callback__")
        return type(self.of).__qualname__ if has_state else f"{name_of(self.of)} {self.when!r}"

    @property
    def interval(self) -> Schedule:
        return self.when

    def call(self, moment: Moment) -> bool:
        self._loop_state.elapsed = moment.now
        self(moment.spent)
        if self._loop_state.stop_iteration and moment.outputs is not None:
            moment.outputs[types.STOP_LOOP] = True
        return True

    def saved(self, encode: Callable[[metrics.LoopOutputs], Any]) -> dict[str, Any]:
        found = super().saved(encode)
        # A callback of every step has been called at this one.
        return found | {"called_at": self._loop_state.elapsed.steps} if self.rank == Rank.ELSEWHERE else found

    def __call__(self, spent: Spent | None = None) -> None:
        """Calls the callback. An error names it and the step."""
        try:
            self._call(spent)
        except BaseException as error:
            self.add_note(error)
            raise
        self.was_called = True

    def add_note(self, error: BaseException) -> None:
        """Adds a note to an error, naming the callback and the step."""
        error.add_note(f"in the callback {name_of(self.of)}, at step {self._loop_state.elapsed.steps}")

    @abc.abstractmethod
    def _call(self, spent: Spent | None) -> None:
        """Calls the callback."""


@final
class FunctionTask(Task):
    """A callback that reports logs, outputs or a new state.

    Attributes:
      has_reported: True if the callback has reported logs.
      reports_state: True if anything that it reported is part of the state.
    """

    def __init__(self, of: Callback, loop_state: LoopState):
        super().__init__(of, loop_state, Rank.ACTION)
        self._report = _report_of(of)
        self.has_reported: bool = False
        self.reports_state: bool = False
        self._reports_weights = False

    def _call(self, spent: Spent | None) -> None:
        self.take(*self._report(self._loop_state))

    def take(self, outputs: Any, reported: Any, state: Any) -> None:
        """Adds what the callback has reported to the state of the loop."""
        loop_state = self._loop_state
        if reported and "updates" in reported:
            reported = {name: value for name, value in reported.items() if name != "updates"}
        if reported and not self.has_reported:
            self._reports_weights = any(isinstance(value, types.Weighted) for _, value in entries(reported))
        if self._reports_weights:
            reported = metrics.separate_weights(reported or Logs())
        if not self.has_reported and not (outputs is None and reported is None):
            self._check_report(outputs, reported, state)
        if self.reports_state:
            outputs, reported = jax.tree.map(_copied, (outputs, reported))
        if outputs is not None:
            loop_state.outputs.update(outputs if isinstance(outputs, Mapping) else {name_of(self.of): outputs})
        if reported:
            loop_state.logs.merge(reported)
        if state is not None:
            loop_state.state = state

    def _check_report(self, outputs: Any, reported: Any, state: Any) -> None:
        """Checks the callback's first report."""
        self.has_reported = bool(reported)
        if reported:
            History().commit(self._loop_state.elapsed, reported)  # Raises an error here, where the callback is known.
        # A later step may donate the leaves of a state.
        states = (self._loop_state.state, state)
        leaves = {id(leaf) for leaf in jax.tree.leaves(states) if isinstance(leaf, jax.Array)}
        self.reports_state |= any(id(leaf) in leaves for leaf in jax.tree.leaves((outputs, reported)))

    def state_dict(self) -> Mapping[str, Any]:
        return self.of.state_dict() if hasattr(self.of, "__loop_callback__") and hasattr(self.of, "state_dict") else {}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        if saved:
            self.of.load_state_dict(saved)


def _report_of(callback: Callback) -> Report:
    """Returns a function that calls a callback of any kind, except for an action."""
    if isinstance(callback, Step):
        return lambda loop_state: _report_of_step(callback, loop_state)
    name, call = name_of(callback), getattr(callback, "__loop_callback__", None)
    if inspect.isclass(callback) or not (callable(callback) or call):
        raise TypeError(
            f"A callback is a function of up to four of ({', '.join(ARGUMENTS)}), an object with __loop_callback__, a "
            f"Step or an Action, got {callback!r}."
        )
    if call is not None:
        return lambda loop_state: outputs_logs_and_state(call(loop_state), name, loop_state.state)
    number = num_arguments(callback)
    if number == 2:  # The most common case.
        return lambda it: outputs_logs_and_state(callback(it.state, it.batch), name, it.state)
    return lambda it: outputs_logs_and_state(callback(*arguments(it, number)), name, it.state)


def _report_of_step(step: Step, loop_state: LoopState) -> tuple[Any, Any, Any]:
    now = loop_state.elapsed
    state, values = step(loop_state.state, loop_state.batch, now.steps - 1, elapsed=now)
    return *_outputs_and_logs(values), state


@final
class ActionTask(Task):
    """An action, which receives the logs since its previous call.

    Args:
      of: The callback: the action, or a tool that contains it.
      action: The action.
      loop_state: The state of the loop.
      functions: The other callbacks of the loop, which come before the actions.

    Attributes:
      action: The action.
      snapshot: A function that returns the contents of a checkpoint, except for the state.
    """

    def __init__(self, of: Callback, action: Action, loop_state: LoopState, functions: Sequence[FunctionTask]):
        if not isinstance(action.interval, Schedule) and action.interval != 1:
            raise ValueError(
                f"{action!r} counts train loops, but there are none here. Leave its interval out: the schedule of its "
                "task determines when it is called."
            )
        super().__init__(of, loop_state, Rank.SAVE if action.time_category == "checkpoints" else Rank.ACTION)
        self.action: Action = action
        self.time_category: str | None = action.time_category
        self.snapshot: Callable[[], Mapping[str, Any]] | None = None
        self._functions = functions
        # The next row of the history to read, and the progress at the row before it.
        self._next_row, self._before = len(loop_state.history), loop_state.elapsed
        if not action.needs_all_outputs:
            loop_state.newest = loop_state.newest or NewestReady()

    @property
    def interval(self) -> Schedule:
        own = self.action.interval
        if not isinstance(own, Schedule):
            return self.when
        return own if is_always(self.when) else self.when & own

    @property
    def directory(self) -> epath.Path | None:
        """The directory of checkpoints; None if the action saves none."""
        return self.action.directory if isinstance(self.action, CheckpointAction) else None

    def call_once(self) -> None:
        """Calls the action now, unless it was called at this step."""
        if self.called_at != self._loop_state.elapsed.steps:
            self()

    def _call(self, spent: Spent | None) -> None:
        action, loop_state, now = self.action, self._loop_state, self._loop_state.elapsed
        self.called_at: int | None = now.steps
        if self.rank == Rank.SAVE:  # A checkpoint includes everything logged before it.
            end_row(loop_state)
        outputs, history = self._outputs(), loop_state.history if action.needs_all_outputs else None
        if self._may_be_measured_later(outputs, history):
            outputs, history = metrics.LoopOutputs(), None
        context = {"history": history, "total_steps": loop_state.total_steps, "snapshot": self.snapshot}
        action(loop_state.state, outputs, step_num=now.steps, elapsed=now, spent=spent, **context)
        loop_state.stop_iteration |= outputs.asks_to_stop

    def _outputs(self) -> metrics.LoopOutputs:
        loop_state, outputs = self._loop_state, metrics.LoopOutputs()
        if not self.action.uses_outputs:
            return outputs
        if not self.action.needs_all_outputs:
            assert loop_state.newest is not None
            return metrics.LoopOutputs(loop_state.newest.scalars())
        history, newest = loop_state.history, loop_state.logs
        rows: list[tuple[Elapsed, Any]] = [history[index] for index in range(self._next_row, len(history))]
        if newest:
            rows.append((loop_state.elapsed, metrics.fetch(newest)))
        self._next_row = len(history) + bool(newest)
        for elapsed, logs in rows:
            if elapsed.steps != self._before.steps:
                outputs.num_examples.append(num_examples(elapsed, self._before))
                self._before = elapsed.without_previous()
            for name, value in named(logs).items():
                outputs.setdefault(name, []).append(value)
        if self._monitor is None:
            outputs.update({name: [value] for name, value in metrics.fetch(loop_state.outputs).items()})
        return outputs

    @property
    def _monitor(self) -> str | None:
        return self.of.monitor if isinstance(self.of, Tool) else None

    def _may_be_measured_later(self, outputs: metrics.LoopOutputs, history: History | None) -> bool:
        """Returns True if the monitored value is missing, but a callback that wasn't called yet may still log it."""
        if self._monitor is None or all([each.was_called for each in self._functions]):
            return False
        return not Monitor(self._monitor, "min").is_measured(metrics.summarize(outputs), history)

    # Saving ------------------------------------------------------------------------------------------

    @property
    def kept_state(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.action.kept_state

    @kept_state.setter
    def kept_state(self, state: Any) -> None:
        self.action.kept_state = state

    def state_dict(self) -> Mapping[str, Any]:
        self.action.before_checkpoint()
        own = dict(self.action.state_dict())
        return {"action": own, "next_row": self._next_row, "before": self._before.to_dict()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self.action.load_state_dict(saved["action"])
        self._next_row, self._before = saved["next_row"], Elapsed(**saved["before"])


def _outputs_and_logs(values: types.Output) -> tuple[dict[str, Any] | None, Logs]:
    """Splits the outputs of a `Step` into non-scalar outputs and logs, which hold the scalars as metrics."""
    reported, outputs = Logs(), {}
    for name, value in (values or {}).items():
        is_scalar = isinstance(value, types.MetricWithMetadata) and value.type is types.MetricType.SCALAR
        value = value.value if is_scalar else value
        if _is_number(value) or isinstance(value, types.Weighted):
            reported.add_metric(name, value)
        elif isinstance(value, Mapping) and all(_is_number(each) for _, each in entries(value)):
            reported.merge({name: value})
        else:
            outputs[name] = value
    return outputs or None, reported


def _is_number(value: Any) -> bool:
    if isinstance(value, bool | int | float):
        return True
    is_numeric = lambda dtype: jnp.issubdtype(dtype, np.number) or jnp.issubdtype(dtype, np.bool_)
    return isinstance(value, np.generic | np.ndarray | jax.Array) and value.ndim == 0 and is_numeric(value.dtype)


def _copied(leaf: Any) -> Any:
    return jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf
