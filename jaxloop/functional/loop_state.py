"""Where a loop is: what its callbacks see, and what they have reported."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, final

from jaxloop import metrics
from jaxloop.function_step import name_of, positional_arguments
from jaxloop.functional.log_entries import Logs, Means, entries, nested
from jaxloop.history import History
from jaxloop.schedules import Elapsed


@final
class Moment:
    """A moment outside the steps: a key of tasks, but no schedule that could be joined with others."""

    def __init__(self, name: str):
        self._name = name

    def __repr__(self) -> str:
        return self._name

    def __call__(self, elapsed: Elapsed) -> bool:
        return False


on_start: Moment = Moment("on_start")
"""Key of the callbacks before the first step; their batch is None."""
on_end: Moment = Moment("on_end")
"""Key of the callbacks after the last step, also after Ctrl-C, but not after an exception."""


@final
@dataclasses.dataclass
class LoopState:
    """Where a loop is: what a callback with four arguments gets as its last.

    Attributes:
      state: the state; a callback may set it.
      history: what was measured, up to the step before.
      elapsed: how far the loop is; this step counts.
      batch: the batch of this step.
      logs: what the callbacks of this step have reported so far.
      outputs: what they have returned as outputs, by name.
      metadata: yours, for as long as the loop runs; checkpoints keep it, so that `jaxloop.encoding` must take it.
      stop_iteration: set it to True, and the loop ends after this step.
      total_steps: how many steps the loop shall come to, where `stop` says that.
      snapshot: what a checkpoint keeps beside the state; set by the loop.
      in_history: which of the logs the history has already, by path; likewise.
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
    snapshot: Callable[[], dict[str, Any]] | None = dataclasses.field(default=None, init=False, repr=False)
    in_history: set[str] = dataclasses.field(default_factory=set, init=False, repr=False)
    _means: Means = dataclasses.field(default_factory=Means, init=False, repr=False)

    @property
    def accumulated_logs(self) -> Logs:
        """The means of all logs of this history, this step included, weighted by examples. Reading it waits."""
        self._means.take(self.history)
        return self._means.logs_with(self.elapsed, metrics.fetch(self.not_in_history()))

    def not_in_history(self) -> Logs:
        """The logs of this step that the history does not have yet."""
        if not self.in_history:
            return self.logs
        return nested({path: value for path, value in entries(self.logs) if path not in self.in_history})


Callback = Any
"""A function of up to four of `(state, batch, elapsed, loop_state)`, an object with `__loop_callback__`, a `Step`, an
`Action`, a `Loop`, or an object of `clu.periodic_actions`."""

Tasks = Mapping[Any, Any] | Iterable[tuple[Any, Any]]
"""Schedules and callbacks: a dictionary, or pairs; a callback may stand alone or in a list."""


def end_row(loop_state: LoopState) -> None:
    """Puts what was reported in the history, for other callbacks to begin anew."""
    commit(loop_state, loop_state.not_in_history())
    loop_state.logs = Logs()
    loop_state.in_history.clear()
    if loop_state.outputs:
        loop_state.history.add_outputs(loop_state.elapsed, loop_state.outputs)
        loop_state.outputs = {}


def commit(loop_state: LoopState, logs: Mapping[str, Any]) -> None:
    """Makes a row of what the history does not have yet."""
    try:
        if logs:
            loop_state.history.commit(loop_state.elapsed, logs)
    except Exception as error:
        loop_state.logs = Logs()  # Once is enough.
        error.add_note(f"in the logs of step {loop_state.elapsed.steps}")
        raise


def write(loop_state: LoopState) -> None:
    """Completes the file of the history, if it has one, up to here."""
    if loop_state.history.path is not None:
        commit(loop_state, loop_state.not_in_history())
        loop_state.in_history = {path for path, _ in entries(loop_state.logs)}
        loop_state.history.flush()


ARGUMENTS = ("state", "batch", "elapsed", "loop_state")


def arguments(loop_state: LoopState, count: int) -> tuple[Any, ...]:
    """So many arguments for a callback, in their order."""
    return (loop_state.state, loop_state.batch, loop_state.elapsed, loop_state)[:count]


def num_arguments(callback: Callable[..., Any]) -> int:
    """How many arguments a callback takes; raises a `TypeError` that names it where it takes others than there are."""
    names, _ = positional_arguments(callback)
    takes = f"The callback {name_of(callback)} takes ({', '.join(names)}), and callbacks get up to four arguments by "
    takes += f"position, ({', '.join(ARGUMENTS)})."
    if len(names) > len(ARGUMENTS):
        raise TypeError(f"{takes} Bind the others: functools.partial(...), or a default value.")
    if any(name in ARGUMENTS and name != ARGUMENTS[index] for index, name in enumerate(names)):
        count = max(ARGUMENTS.index(name) for name in names if name in ARGUMENTS) + 1
        raise TypeError(f"{takes} Write ({', '.join(ARGUMENTS[:count])}).")
    return len(names)
