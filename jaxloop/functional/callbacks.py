"""The callbacks of a loop, as items of its engine."""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from jaxloop import metrics, types
from jaxloop.actions.action import Action
from jaxloop.base import checks
from jaxloop.base.timing import Spent
from jaxloop.engine.agenda import ActionItem, Item, Moment, Rank
from jaxloop.engine.program import Program
from jaxloop.functional.log_entries import Logs, NewestReady, entries, named, num_examples
from jaxloop.functional.loop_state import ARGUMENTS, Callback, LoopState, arguments, end_row, num_arguments
from jaxloop.functional.tools import Tool
from jaxloop.history import History
from jaxloop.models.function_step import CompiledFunction, name_of, outputs_logs_and_state
from jaxloop.schedules import Elapsed, Schedule, is_always, never
from jaxloop.step import Step

Report = Callable[[LoopState], tuple[Any, Any, Any]]
"""Calls a callback. Returns `(outputs, logs, state)`, with None for unchanged parts."""


def action_of(callback: Callback) -> Action | None:
    """Returns the action that a callback is or contains, if it is of such a kind."""
    if isinstance(callback, Tool):
        return callback.action
    return callback if isinstance(callback, Action) else None


@final
class FunctionTask(Item):
    """A callback that reports logs, outputs or a new state, which a loop calls when its schedule fires.

    Args:
      of: The callback.
      loop_state: The state of the loop.

    Attributes:
      of: The callback.
      when: The schedule.
      time_category: See `Item`.
      has_reported: True if the callback has reported logs.
      reports_state: True if anything that it reported is part of the state.
    """

    def __init__(self, of: Callback, loop_state: LoopState):
        super().__init__(Rank.ACTION)
        self.of: Callback = of
        self.when: Schedule = never()
        self.time_category: str | None = getattr(of, "time_category", None)
        self._loop_state, self._report = loop_state, _report_of(of)
        self.has_reported: bool = False
        self.reports_state: bool = False
        self._reports_weights = False

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        has_state = hasattr(self.of, "__loop_callback__")
        return type(self.of).__qualname__ if has_state else f"{name_of(self.of)} {self.when!r}"

    @property
    def interval(self) -> Schedule:
        return self.when

    def call(self, moment: Moment) -> bool:
        self._loop_state.elapsed = moment.now
        self()
        _pass_on_stop(self._loop_state, moment)
        return not getattr(self.of, "was_interrupted", False)

    def __call__(self) -> None:
        """Calls the callback. An error names it and the step."""
        try:
            self._call()
        except BaseException as error:
            error.add_note(f"in the callback {name_of(self.of)}, at step {self._loop_state.elapsed.steps}")
            raise

    def _call(self) -> None:
        loop_state = self._loop_state
        outputs, logs, state = self._report(loop_state)
        if logs and "updates" in logs:
            logs = {name: value for name, value in logs.items() if name != "updates"}
        if not self.has_reported and not (outputs is None and logs is None):
            self._check_report(outputs, logs, state)
        if self._reports_weights:
            logs = metrics.separate_weights(logs or Logs())
        if self.reports_state:
            outputs, logs = jax.tree.map(_copied, (outputs, logs))
        if outputs is not None:
            loop_state.outputs.update(outputs if isinstance(outputs, Mapping) else {name_of(self.of): outputs})
        if logs:
            loop_state.logs.merge(logs)
        if state is not None:
            loop_state.state = state

    @contextlib.contextmanager
    def compiled(self) -> Iterator[None]:
        """A context in which the state has the form that a compiled function passes from one step to the next.

        Nothing else may read the state meanwhile. If the function doesn't have such a form, the context has no effect.
        """
        is_known = isinstance(self.of, CompiledFunction) and self.has_reported and not self.reports_state
        program, report, loop_state = self.of.program() if is_known else None, self._report, self._loop_state
        if program is None:
            yield
            return
        states, given = program.step._runner.states, loop_state.state
        loop_state.state, self._report = (
            program._compiled.enter(states.prepare(given)),
            lambda it: _report_compiled(program, it),
        )
        checks.mark_donated(given, repr(self.of))
        try:
            yield
        finally:
            loop_state.state, self._report = program._compiled.leave(loop_state.state), report
            states.remember(loop_state.state)

    def _check_report(self, outputs: Any, logs: Any, state: Any) -> None:
        """Checks the callback's first report."""
        self.has_reported = bool(logs)
        if logs:
            # Raises an error here, where the callback is known.
            History().commit(self._loop_state.elapsed, metrics.separate_weights(logs))
            self._reports_weights = any(isinstance(value, types.Weighted) for value in entries(logs).values())
        # A later step may donate the leaves of a state.
        states = (self._loop_state.state, state)
        leaves = {id(leaf) for leaf in jax.tree.leaves(states) if isinstance(leaf, jax.Array)}
        self.reports_state |= any(id(leaf) in leaves for leaf in jax.tree.leaves((outputs, logs)))

    def saved(self, encode: Callable[[metrics.LoopOutputs], Any]) -> dict[str, Any]:
        found = super().saved(encode)
        # A callback of every step has been called at this one.
        return found | {"called_at": self._loop_state.elapsed.steps} if self.rank == Rank.ELSEWHERE else found

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


def _report_compiled(program: Program, loop_state: LoopState) -> tuple[Any, Any, Any]:
    carry, found, _ = program._run_one(loop_state.state, loop_state.batch)
    assert found is not None
    return found["outputs"], found["logs"], carry


def _report_of_step(step: Step, loop_state: LoopState) -> tuple[Any, Any, Any]:
    """Calls a `Step`. Its numbers are logged as metrics, and its other values are outputs."""
    now = loop_state.elapsed
    state, found = step(loop_state.state, loop_state.batch, now.steps - 1, elapsed=now)
    is_scalar = lambda value: isinstance(value, types.MetricWithMetadata) and value.type is types.MetricType.SCALAR
    plain = {name: value.value if is_scalar(value) else value for name, value in (found or {}).items()}
    numbers = {name: value for name, value in plain.items() if _holds_numbers(value)}
    outputs = {name: value for name, value in plain.items() if name not in numbers}
    return outputs or None, Logs(metrics=Logs(numbers)), state


def _holds_numbers(value: Any) -> bool:
    """Returns whether a value is a number, or a dict in which all values are."""
    if isinstance(value, Mapping):
        return all(map(_holds_numbers, value.values()))
    if isinstance(value, np.generic | np.ndarray | jax.Array):
        return value.ndim == 0 and any(jnp.issubdtype(value.dtype, kind) for kind in (np.bool_, np.number))
    return isinstance(value, bool | int | float | types.Weighted)


@final
class ActionTask(ActionItem):
    """An action, which receives the logs since its previous call.

    Args:
      of: The callback: the action, or a tool that contains it.
      action: The action.
      loop_state: The state of the loop.

    Attributes:
      of: The callback.
      when: The schedule of the task.
      snapshot: A function that returns the contents of a checkpoint, except for the state.
    """

    def __init__(self, of: Callback, action: Action, loop_state: LoopState):
        if not isinstance(action.interval, Schedule) and action.interval != 1:
            raise ValueError(
                f"{action!r} counts train loops, but there are none here. Leave its interval out: the schedule of its "
                "task determines when it is called."
            )
        super().__init__(action, {}, Rank.SAVE if action.time_category == "checkpoints" else Rank.ACTION)
        self.reads = "nothing"  # Of the engine's outputs.
        self.name: str = " ".join([type(action).__qualname__, *action.monitors])
        self.of: Callback = of
        self.when: Schedule = never()
        self.snapshot: Callable[[], Mapping[str, Any]] | None = None
        self._loop_state = loop_state
        self._next_row = len(loop_state.history)  # The next row of the history to read.
        if not action.needs_all_outputs:
            loop_state.newest = loop_state.newest or NewestReady()

    @property
    def interval(self) -> Schedule:
        own = self.action.interval
        if not isinstance(own, Schedule):
            return self.when
        return own if is_always(self.when) else self.when & own

    def __call__(self) -> None:
        """Calls the action now, unless it was called at this step."""
        now = self._loop_state.elapsed
        if self.called_at != now.steps:
            self.call(Moment(None, now, None, Spent()))
            self.mark(now, Spent(), 0)

    def call(self, moment: Moment) -> bool:
        loop_state = self._loop_state
        loop_state.elapsed = moment.now
        if self.rank == Rank.SAVE:  # A checkpoint includes everything logged before it.
            end_row(loop_state)
        history, outputs = loop_state.history if self.action.needs_all_outputs else None, self._outputs()
        context = {"history": history, "total_steps": loop_state.total_steps, "snapshot": self.snapshot}
        self.context: Mapping[str, Any] = context
        super().call(moment._replace(state=loop_state.state, outputs=outputs))
        loop_state.stop_iteration |= outputs.asks_to_stop
        _pass_on_stop(loop_state, moment)
        return True

    def _outputs(self) -> metrics.LoopOutputs:
        loop_state, outputs = self._loop_state, metrics.LoopOutputs()
        history, newest = loop_state.history, loop_state.logs
        if not self.action.uses_outputs:
            return outputs
        if not self.action.needs_all_outputs:
            assert loop_state.newest is not None
            return metrics.LoopOutputs(loop_state.newest.scalars())
        rows: list[tuple[Elapsed, Any]] = [history[index] for index in range(self._next_row, len(history))]
        if newest:
            rows.append((loop_state.elapsed, metrics.fetch(newest)))
        seen = min(self._next_row, len(history))  # The history may have been damaged.
        before = history[seen - 1].elapsed if seen else Elapsed()
        self._next_row = len(history) + bool(newest)
        for elapsed, logs in rows:
            if elapsed.steps != before.steps:
                outputs.num_examples.append(num_examples(elapsed, before))
                before = elapsed
            for name, value in named(logs).items():
                outputs.setdefault(name, []).append(value)
        if not self.action.monitors:
            outputs.update({name: [value] for name, value in metrics.fetch(loop_state.outputs).items()})
        return outputs

    def state_dict(self) -> Mapping[str, Any]:
        return {"action": dict(super().state_dict()), "next_row": self._next_row}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        super().load_state_dict(saved["action"])
        self._next_row = saved["next_row"]


def _pass_on_stop(loop_state: LoopState, moment: Moment) -> None:
    if loop_state.stop_iteration and moment.outputs is not None:
        moment.outputs[types.STOP_LOOP] = True


def _copied(leaf: Any) -> Any:
    return jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf
