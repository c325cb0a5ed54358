"""Wrappers that call any kind of callback with the loop state."""

import abc
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from jaxloop import metrics, types
from jaxloop.actions.action import Action
from jaxloop.actions.checkpoint_action import CheckpointAction
from jaxloop.actions.monitor import Monitor
from jaxloop.actions.periodic_action import PeriodicAction, is_periodic
from jaxloop.checkpoint import all_steps
from jaxloop.engine.program import Program
from jaxloop.functional.log_entries import Logs, NewestReady, entries, named, num_examples
from jaxloop.functional.loop_state import ARGUMENTS, Callback, LoopState, arguments, num_arguments, write
from jaxloop.functional.tools import BarTool, Tool
from jaxloop.history import History
from jaxloop.loop import Loop
from jaxloop.models.function_step import CompiledFunction, name_of, outputs_logs_and_state
from jaxloop.schedules import Elapsed, Schedule
from jaxloop.step import Step


def as_callback(callback: Callback, loop_state: LoopState, reporters: Sequence["CallbackOf"]) -> "CallbackOf":
    """Wraps a callback of any kind. An action receives the logs of `reporters`, the callbacks that come before it."""
    if isinstance(callback, Tool):
        return ActionCallback(callback, callback.action, callback.monitor, loop_state, reporters)
    if isinstance(callback, Action) or is_periodic(callback):
        action = callback if isinstance(callback, Action) else PeriodicAction(callback)
        return ActionCallback(callback, action, None, loop_state, reporters)
    if isinstance(callback, Step):
        return _StepCallback(callback)
    if isinstance(callback, Loop):
        return _LoopCallback(callback)
    if inspect.isclass(callback) or not (callable(callback) or hasattr(callback, "__loop_callback__")):
        raise TypeError(
            f"A callback is a function of up to four of ({', '.join(ARGUMENTS)}), an object with __loop_callback__, a "
            f"Step, an Action or a Loop, got {callback!r}."
        )
    return _ObjectCallback(callback) if hasattr(callback, "__loop_callback__") else _FunctionCallback(callback)


class CallbackOf(abc.ABC):
    """A wrapper around a callback of any kind, called with the loop state."""

    def __init__(self, of: Callback):
        self.of = of
        self.name: str = name_of(of)
        self.time_category: str = getattr(of, "time_category", "dispatch")
        self.was_called: bool = False
        self.has_reported: bool = False
        self.saves: bool = False
        self._reports_state, self._reports_weights = False, False
        self.kept_state: Any = None

    @abc.abstractmethod
    def report(self, loop_state: LoopState) -> tuple[Any, Any, Any]:
        """Calls the callback, and returns `(outputs, logs, state)`, with None for unchanged parts."""

    def __call__(self, loop_state: LoopState) -> None:
        outputs, reported, state = self.report(loop_state)
        self.was_called = True
        if reported and "updates" in reported:
            reported = {name: value for name, value in reported.items() if name != "updates"}
        if reported and not self.has_reported:
            self._reports_weights = any(isinstance(value, types.Weighted) for _, value in entries(reported))
        if self._reports_weights:
            reported = metrics.separate_weights(reported or Logs())
        if not self.has_reported and not (outputs is None and reported is None):
            self._check_report(loop_state, outputs, reported, state)
        if self._reports_state:
            outputs, reported = jax.tree.map(_copied, (outputs, reported))
        if outputs is not None:
            loop_state.outputs.update(outputs if isinstance(outputs, Mapping) else {self.name: outputs})
        if reported:
            loop_state.logs.merge(reported)
        if state is not None:
            loop_state.state = state

    def add_note(self, error: BaseException, loop_state: LoopState) -> None:
        """Adds a note to an error, naming the callback and the step."""
        error.add_note(f"in the callback {self.name}, at step {loop_state.elapsed.steps}")

    def begin_run(self, step_num: int, *, can_resume: bool) -> None:  # noqa: B027 (to override, or not)
        """See `Action.begin_run`."""

    def program(self) -> Program | None:
        """Returns the program that runs the callback's steps.

        Returns None unless the callback is a compiled function that returns only logs.
        """
        return None

    @property
    def _reports_alone(self) -> bool:
        """True if the callback has reported logs, and nothing that it reported is part of the state."""
        return self.has_reported and not self._reports_state

    def _check_report(self, loop_state: LoopState, outputs: Any, reported: Any, state: Any) -> None:
        """Checks the callback's first report."""
        self.has_reported = bool(reported)
        if reported:
            History().commit(loop_state.elapsed, reported)  # Raises an error here, where the callback is known.
        # A later step may donate the leaves of a state.
        leaves = {id(leaf) for leaf in jax.tree.leaves((loop_state.state, state)) if isinstance(leaf, jax.Array)}
        self._reports_state |= any(id(leaf) in leaves for leaf in jax.tree.leaves((outputs, reported)))

    @property
    def kind(self) -> str:
        """The kind of callback. The callbacks' states are only restored if all kinds match those in the checkpoint."""
        return type(self.of).__qualname__

    def state_dict(self) -> dict[str, Any]:
        """Returns the callback's state, for `load_state_dict`."""
        return self.of.state_dict() if hasattr(self.of, "__loop_callback__") and hasattr(self.of, "state_dict") else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores a state that `state_dict` returned."""
        if state_dict:
            self.of.load_state_dict(state_dict)

    def save(self, loop_state: LoopState, *, only_missing: bool = False) -> None:  # noqa: B027 (to override, or not)
        """Saves a checkpoint now, whether or not one is due. Only has an effect if the callback saves checkpoints.

        With `only_missing`, as after a resume, its directory decides whether it has saved this step.
        """

    def finish(self, loop_state: LoopState) -> None:  # noqa: B027 (to override, or not)
        """Finishes a loop that ended without an error. May replace the state that the loop returns."""

    def close(self) -> None:  # noqa: B027 (to override, or not)
        """Finishes all pending work."""


class _FunctionCallback(CallbackOf):
    def __init__(self, of: Callable[..., Any]):
        super().__init__(of)
        self._num_arguments = num_arguments(of)

    def report(self, loop_state: LoopState) -> tuple[Any, Any, Any]:
        if self._num_arguments == 2:  # The most common case.
            result = self.of(loop_state.state, loop_state.batch)
        else:
            result = self.of(*arguments(loop_state, self._num_arguments))
        return outputs_logs_and_state(result, self.name, loop_state.state)


class _ObjectCallback(CallbackOf):
    def report(self, loop_state: LoopState) -> tuple[Any, Any, Any]:
        return outputs_logs_and_state(self.of.__loop_callback__(loop_state), self.name, loop_state.state)

    def program(self) -> Program | None:
        return self.of.program() if self._reports_alone and isinstance(self.of, CompiledFunction) else None


class _StepCallback(CallbackOf):
    def report(self, loop_state: LoopState) -> tuple[Any, Any, Any]:
        now = loop_state.elapsed
        state, values = self.of(loop_state.state, loop_state.batch, now.steps - 1, elapsed=now)
        return *_outputs_and_logs(values), state


class _LoopCallback(CallbackOf):
    def report(self, loop_state: LoopState) -> tuple[Any, Any, Any]:
        state, outputs = self.of(loop_state.state, [loop_state.batch])
        loop_state.stop_iteration |= outputs.asks_to_stop
        outputs.pop(types.STOP_LOOP, None)
        # The statistics of a single batch are meaningless.
        values = {name: value for name, value in metrics.summarize(outputs).items() if not name.startswith("jaxloop/")}
        return *_outputs_and_logs(values), state


@final
class ActionCallback(CallbackOf):
    """Calls an action, at most once per step, with the logs since its previous call."""

    def __init__(
        self,
        of: Callback,
        action: Action,
        monitor: str | None,
        loop_state: LoopState,
        reporters: Sequence[CallbackOf],
    ):
        super().__init__(of)
        if not isinstance(action.interval, Schedule) and action.interval != 1:
            raise ValueError(
                f"{action!r} counts train loops, but there are none here. Leave its interval out: the schedule of its "
                "task determines when it is called."
            )
        self.time_category: str = action.time_category
        self.saves: bool = action.time_category == "checkpoints"
        self._action, self._monitor, self._reporters = action, monitor, reporters
        self._newest = NewestReady()
        self._called_at: int | None = None
        # The position in the history: the next row to read, and the names in that row that were already read.
        self._next_row, self._names_seen = len(loop_state.history), set[str]()
        self._before = loop_state.elapsed

    def report(self, loop_state: LoopState) -> tuple[None, None, None]:
        action, now = self._action, loop_state.elapsed
        if not action.needs_all_outputs:
            self._newest.push(loop_state.logs)
        is_due = not isinstance(action.interval, Schedule) or action.interval(now)
        if is_due and self._called_at != now.steps:
            self._call_action(loop_state)
        return None, None, None

    @property
    def kept_state(self) -> Any:
        """The state that the action keeps; see `Action`."""
        return self._action.kept_state

    @kept_state.setter
    def kept_state(self, state: Any) -> None:
        if state is not None:
            self._action.kept_state = state

    def state_dict(self) -> dict[str, Any]:
        self._action.before_checkpoint()
        return {
            "action": dict(self._action.state_dict()),
            "called_at": self._called_at,
            "next_row": self._next_row,
            "names_seen": sorted(self._names_seen),
            "before": self._before.to_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._action.load_state_dict(state_dict["action"])
        self._called_at, self._next_row = state_dict["called_at"], state_dict["next_row"]
        self._names_seen, self._before = set(state_dict["names_seen"]), Elapsed(**state_dict["before"])

    def begin_run(self, step_num: int, *, can_resume: bool) -> None:
        self._action.begin_run(step_num, can_resume=can_resume)

    def save(self, loop_state: LoopState, *, only_missing: bool = False) -> None:
        step, action = loop_state.elapsed.steps, self._action
        if only_missing and isinstance(action, CheckpointAction):
            self._called_at = step if step in all_steps(action.directory) else None
        if self.saves and self._called_at != step:
            self._call_action(loop_state)

    def _call_action(self, loop_state: LoopState) -> None:
        action, now = self._action, loop_state.elapsed
        self._called_at = now.steps
        if self.saves:  # A checkpoint includes everything logged before it.
            write(loop_state)
        outputs, history = self._outputs(loop_state), loop_state.history if action.needs_all_outputs else None
        if self._may_be_measured_later(outputs, history):
            outputs, history = metrics.LoopOutputs(), None
        context = {"history": history, "total_steps": loop_state.total_steps, "snapshot": loop_state.snapshot}
        action(loop_state.state, outputs, step_num=now.steps, elapsed=now, **context)
        if outputs.asks_to_stop:
            loop_state.stop_iteration = True

    def _outputs(self, loop_state: LoopState) -> metrics.LoopOutputs:
        if not self._action.uses_outputs:
            return metrics.LoopOutputs()
        if not self._action.needs_all_outputs:
            return metrics.LoopOutputs(self._newest.scalars())
        history = loop_state.history
        rows: list[tuple[Elapsed, Any]] = [history[index] for index in range(self._next_row, len(history))]
        if coming := loop_state.not_in_history():
            rows.append((loop_state.elapsed, metrics.fetch(coming)))
        names_seen, self._names_seen, self._next_row = self._names_seen, set(named(coming)), len(history)
        outputs = metrics.LoopOutputs()
        for elapsed, logs in rows:
            if elapsed.steps != self._before.steps:  # Otherwise, it is the rest of a row.
                outputs.num_examples.append(num_examples(elapsed, self._before))
                self._before = elapsed.without_previous()
            for name, value in named(logs).items():
                if name not in names_seen:
                    outputs.setdefault(name, []).append(value)
            names_seen = set()
        if self._monitor is None:
            outputs.update({name: [value] for name, value in metrics.fetch(loop_state.outputs).items()})
        return outputs

    def _may_be_measured_later(self, outputs: metrics.LoopOutputs, history: History | None) -> bool:
        """Returns True if the monitored value is missing, but a callback that wasn't called yet may still log it."""
        if self._monitor is None or all(each.was_called for each in self._reporters):
            return False
        return not Monitor(self._monitor, "min").is_measured(metrics.summarize(outputs), history)

    def finish(self, loop_state: LoopState) -> None:
        if isinstance(self.of, BarTool) and self._called_at not in (None, loop_state.elapsed.steps):
            self._call_action(loop_state)  # After Ctrl-C, the bar shows how far the loop got.
        loop_state.state = self._action.finish(loop_state.state)

    def close(self) -> None:
        self._action.close()


def _outputs_and_logs(values: types.Output) -> tuple[dict[str, Any] | None, Logs]:
    """Splits the outputs of a `Step` or `Loop` into non-scalar outputs and logs, which hold the scalars as metrics."""
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
