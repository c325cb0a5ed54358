"""The callbacks of a loop, as items of its engine."""

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from jaxloop import metrics, types
from jaxloop.actions.action import Action
from jaxloop.actions.periodic_action import is_periodic
from jaxloop.base import checks
from jaxloop.base.timing import Spent
from jaxloop.engine.agenda import ActionItem, Ended, Item, Moment, Rank
from jaxloop.engine.outputs import Outputs
from jaxloop.engine.program import Program
from jaxloop.functional.log_entries import Logs, columns, entries, named, num_examples
from jaxloop.functional.loop_state import ARGUMENTS, Callback, LoopState, end_row, num_arguments, with_arguments
from jaxloop.functional.tools import Tool
from jaxloop.history import History
from jaxloop.metrics import LoopOutputs
from jaxloop.models.function_step import CompiledFunction, name_of, outputs_logs_and_state
from jaxloop.schedules import Elapsed, Schedule, is_always, never
from jaxloop.step import Step


@final
class FunctionTask(Item):
    """A callback that reports logs, outputs or a new state, and that a loop calls when its schedule fires.

    Args:
      of: The callback.
      loop_state: The state of the loop.

    Attributes:
      of: The callback.
      when: The schedule.
      time_category: See `Item`.
    """

    def __init__(self, of: Callback, loop_state: LoopState):
        super().__init__(Rank.ELSEWHERE)
        self.of: Callback = of
        self.when: Schedule = never()
        self.time_category: str | None = getattr(of, "time_category", None)
        self._loop_state = loop_state
        self._report = _report_of(of)
        self._has_reported = False
        self._is_copied = False  # True if anything that it reported is part of the state.
        self._has_weights = False

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
        if self._loop_state.stop_iteration and moment.outputs is not None:
            moment.outputs[types.STOP_LOOP] = True
        return not getattr(self.of, "was_interrupted", False)

    def __call__(self) -> None:
        """Calls the callback. An error names it and the step."""
        try:
            outputs, logs, state = self._report(self._loop_state)
            self._accept(outputs, logs, state)
        except BaseException as error:
            self.add_note(error, self._loop_state.elapsed)
            raise
        if state is not None:
            self._loop_state.state = state

    def add_note(self, error: BaseException, elapsed: Elapsed) -> None:
        """Adds a note to an error, naming the callback and the step."""
        error.add_note(f"in the callback {name_of(self.of)}, at step {elapsed.steps}")

    def _accept(self, outputs: Any, logs: Any, state: Any = None) -> None:
        if logs and "updates" in logs:
            logs = {name: value for name, value in logs.items() if name != "updates"}
        if not self._has_reported and not (outputs is None and logs is None):
            self._check_report(outputs, logs, state)
        if self._has_weights:
            logs = metrics.separate_weights(logs or Logs())
        if self._is_copied:
            outputs, logs = jax.tree.map(lambda x: jnp.copy(x) if isinstance(x, jax.Array) else x, (outputs, logs))
        if outputs is not None:
            outputs = outputs if isinstance(outputs, Mapping) else {name_of(self.of): outputs}
            self._loop_state.outputs.update(outputs)
        if logs:
            self._loop_state.logs.merge(logs)

    def _check_report(self, outputs: Any, logs: Any, state: Any) -> None:
        """Checks the callback's first report."""
        self._has_reported = bool(logs)
        if logs:
            # Raises an error here, where the callback is known.
            History().commit(self._loop_state.elapsed, metrics.separate_weights(logs))
            self._has_weights = any(isinstance(value, types.Weighted) for value in entries(logs).values())
        # A later step may donate the leaves of a state.
        of_states = jax.tree.leaves((self._loop_state.state, state))
        leaves = {id(leaf) for leaf in of_states if isinstance(leaf, jax.Array)}
        self._is_copied |= any(id(leaf) in leaves for leaf in jax.tree.leaves((outputs, logs)))

    def saved(self, encode: Callable[[LoopOutputs], Any]) -> dict[str, Any]:
        found = super().saved(encode)
        # A callback of every step has been called at this one.
        return found | {"called_at": self._loop_state.elapsed.steps} if self.rank == Rank.ELSEWHERE else found

    def state_dict(self) -> Mapping[str, Any]:
        return self.of.state_dict() if hasattr(self.of, "__loop_callback__") and hasattr(self.of, "state_dict") else {}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        if saved:
            self.of.load_state_dict(saved)

    # Compiled callbacks ------------------------------------------------------------------------------

    def program(self, jitted: Program | None) -> Program | None:
        """Returns a program that runs steps of a compiled function, for `add_rows`. Returns None for other callbacks.

        Args:
          jitted: The program of the callback if the user has compiled it; otherwise None.
        """
        of, loop_state = self.of, self._loop_state
        if not self._has_reported or self._is_copied or self._has_weights:
            return None
        if isinstance(of, CompiledFunction) and (program := of.program()) is not None:
            loop_state.state = program.step._runner.states.prepare(loop_state.state)
            checks.mark_donated(loop_state.state, repr(of))
            return program
        return jitted

    def add_rows(self, progress: Sequence[Elapsed], reports: Sequence[Any]) -> None:
        """Adds what the program has reported for several steps. The row of the last one stays open.

        Args:
          progress: The progress before these steps, whose row is still open, and after each of them.
          reports: What the steps have reported.
        """
        loop_state, history, where = self._loop_state, self._loop_state.history, f", in the callback {name_of(self.of)}"
        end_row(loop_state, progress[0], where)
        logs, before = [found["logs"] for found in reports[:-1]], len(history)
        is_plain = all([found["logs"] and found["outputs"] is None for found in reports])
        if is_plain and logs and (found := columns(logs)) and not any("updates" in key for key in found):
            with contextlib.suppress(TypeError):  # An invalid value. The rows before it are added one by one.
                history.extend(progress[1:-1], tuple(found), [*zip(*found.values(), strict=True)])
            for each in logs[: len(history) - before]:
                loop_state.newest.push(each)
        added = len(history) - before
        for now, found in zip(progress[added:], reports[added:], strict=False):
            end_row(loop_state, now, where)
            self._accept(found["outputs"], found["logs"])


@final
class JittedProgram(Program):
    """Calls a function that the user has compiled. Its outputs have the form of a `CompiledFunction`'s.

    Args:
      step: The step of the loop.
      fn: The function.
      loop_state: The state of the loop.
    """

    def __init__(self, step: Step, fn: Any, loop_state: LoopState):
        super().__init__(step, custom=fn)
        self._fn, self._num_arguments, self._name = fn, num_arguments(fn), name_of(fn)
        self._loop_state = loop_state

    def _run_custom(self, state: Any, batch: types.Batch, number: int) -> tuple[Any, types.Output, int]:
        result = self._fn(*(state, batch)[: self._num_arguments])
        outputs, logs, new_state = outputs_logs_and_state(result, self._name, state)
        self._loop_state.state = state = state if new_state is None else new_state
        return state, {"outputs": outputs, "logs": logs}, 1


def _report_of(callback: Callback) -> Callable[[LoopState], tuple[Any, Any, Any]]:
    """Returns a function that calls a callback of any kind, except for an action.

    The function returns `(outputs, logs, state)`, with None for unchanged parts.
    """
    if isinstance(callback, Step):
        return lambda loop_state: _report_of_step(callback, loop_state)
    name, call = name_of(callback), getattr(callback, "__loop_callback__", None)
    if inspect.isclass(callback) or not (callable(callback) or call):
        raise TypeError(
            f"A callback is a function of up to four of ({', '.join(ARGUMENTS)}), an object with __loop_callback__, a "
            f"Step or an Action, got {callback!r}."
        )
    call = call or with_arguments(callback)
    return lambda loop_state: outputs_logs_and_state(call(loop_state), name, loop_state.state)


def _report_of_step(step: Step, loop_state: LoopState) -> tuple[Any, Any, Any]:
    """Calls a `Step`. Its numbers are logged as metrics, and its other values are outputs."""
    now = loop_state.elapsed
    state, found = step(loop_state.state, loop_state.batch, now.steps - 1, elapsed=now)
    is_weighted = lambda value: isinstance(value, types.Weighted)
    plain = {name: each if is_weighted(each) else metrics.value_of(each) for name, each in (found or {}).items()}
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
    """An action, which receives the logs since its previous call. Its cursor is a number of rows.

    Args:
      of: The callback: the action, or a tool that contains it.
      action: The action.
      loop_state: The state of the loop.

    Attributes:
      of: The callback.
      when: The schedule.
    """

    def __init__(self, of: Callback, action: Any, loop_state: LoopState):
        self.of: Callback = of
        self.when: Schedule = never()
        self._loop_state = loop_state
        is_saver = getattr(action, "time_category", None) == "checkpoints"
        super().__init__(action, {}, Rank.SAVE if is_saver else Rank.ACTION)
        self.reads = "nothing"  # No outputs of the engine.
        self.name = " ".join([self.name, *self.action.monitors])
        if not isinstance(self.action.interval, Schedule) and self.action.interval != 1:
            raise ValueError(
                f"{action!r} counts train loops, but there are none here. Leave its interval out: the schedule of its "
                "task determines when it is called."
            )

    @property
    def interval(self) -> Schedule:
        own = self.action.interval
        if not isinstance(own, Schedule):
            return self.when
        return own if is_always(self.when) else self.when & own

    def reset(self, spent: Spent, cursor: int = 0) -> None:
        super().reset(spent, self._num_rows)

    def mark(self, now: Elapsed, spent: Spent, cursor: int) -> None:
        super().mark(now, spent, self._num_rows)

    @property
    def _num_rows(self) -> int:
        return len(self._loop_state.history) + bool(self._loop_state.logs)

    def __call__(self) -> None:
        """Calls the action now, unless it was called at this step."""
        now = self._loop_state.elapsed
        if self.called_at != now.steps:
            outputs = self._unread()
            self.mark(now, self.spent, 0)
            self.call(Moment(None, now, outputs, Spent()))

    def call(self, moment: Moment) -> bool:
        loop_state, outputs = self._loop_state, moment.outputs
        loop_state.elapsed = moment.now
        if self.rank == Rank.SAVE:  # A checkpoint includes everything logged before it.
            end_row(loop_state)
        super().call(moment._replace(state=loop_state.state))
        loop_state.stop_iteration |= outputs is not None and outputs.asks_to_stop
        return True

    def unread_in(self, outputs: Outputs, ended: Ended | None) -> LoopOutputs:
        return self._unread()

    def _unread(self) -> LoopOutputs:
        action, loop_state, history, found = self.action, self._loop_state, self._loop_state.history, LoopOutputs()
        if not (action.uses_outputs and action.needs_all_outputs):
            return LoopOutputs(loop_state.newest.scalars() if action.uses_outputs else None)
        seen = min(self.cursor, len(history))  # The history may have been damaged.
        before = history[seen - 1].elapsed if seen else Elapsed()
        rows: list[tuple[Elapsed, Any]] = [history[index] for index in range(seen, len(history))]
        if loop_state.logs:
            rows.append((loop_state.elapsed, metrics.fetch(loop_state.logs)))
        for elapsed, logs in rows:
            if elapsed.steps != before.steps:
                found.num_examples.append(num_examples(elapsed, before))
                before = elapsed
            for name, value in named(logs).items():
                found.setdefault(name, []).append(value)
        if not action.monitors:
            found.update({name: [value] for name, value in metrics.fetch(loop_state.outputs).items()})
        return found


def task_of(callback: Callback, loop_state: LoopState) -> FunctionTask | ActionTask:
    """Returns the item of a callback. A function's rank is `ELSEWHERE`, unless the loop changes it."""
    action = callback.action if isinstance(callback, Tool) else callback
    if isinstance(action, Action) or is_periodic(action):
        return ActionTask(callback, action, loop_state)
    return FunctionTask(callback, loop_state)
