"""The state of a loop as its callbacks see it, and the values that they report."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, final

from jaxloop import metrics
from jaxloop.functional.log_entries import Logs, aggregate
from jaxloop.history import History
from jaxloop.models.function_step import name_of, positional_arguments
from jaxloop.schedules import Elapsed


@final
class Moment:
    """A key of `tasks`, used in place of a schedule: `on_start` for the start of a run, or `on_end` for its end."""

    def __init__(self, name: str):
        self._name = name

    def __repr__(self) -> str:
        return self._name


on_start: Moment = Moment("on_start")
"""The key for callbacks that run before the first step. Their batch is None."""
on_end: Moment = Moment("on_end")
"""The key for callbacks that run after the last step, even after Ctrl-C, but not after an exception."""


@final
@dataclasses.dataclass
class LoopState:
    """The state of a loop. A callback with four arguments receives it as its last argument.

    Attributes:
      state: The train state. A callback may replace it.
      history: The history of the run up to the previous step.
      elapsed: The progress of the loop, including this step.
      batch: The batch of this step. None before the first step, and right after a resume.
      logs: The values that the callbacks of this step have logged so far.
      outputs: The outputs that the callbacks of this step have returned so far, by name.
      metadata: A dict that callbacks can use to store their own data. Checkpoints include it, so its values must be
        numbers, strings, arrays, lists or dicts.
      stop_iteration: Set this to True to end the loop after this step.
      total_steps: The planned number of steps; None if `stop` doesn't determine it.
      newest: The latest values that have arrived on the host. Set by the loop.
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
    newest: Any = dataclasses.field(default=None, init=False, repr=False)

    @property
    def accumulated_logs(self) -> Logs:
        """The example-weighted means of all logs, including this step's.

        Reading them waits for the devices, and takes longer the more rows the history has.
        """
        return aggregate([*self.history, (self.elapsed, metrics.fetch(self.logs))])


Callback = Any
"""A callback of any kind that a loop accepts.

A callback is a `Step`, an `Action`, an object with a `__loop_callback__` method, or a function that takes up to four
arguments: `(state, batch, elapsed, loop_state)`.
"""

Tasks = Mapping[Any, Any] | Iterable[tuple[Any, Any]]
"""Schedules and their callbacks, as a dictionary or as pairs. Each value is a callback or a list of callbacks."""


def end_row(loop_state: LoopState) -> None:
    """Adds a row with the logs of this step to the history, and begins the next one."""
    ended, loop_state.logs = loop_state.logs, Logs()
    if loop_state.newest is not None:
        loop_state.newest.push(loop_state.logs)
    try:
        if ended:
            loop_state.history.commit(loop_state.elapsed, ended)
    except Exception as error:
        error.add_note(f"in the logs of step {loop_state.elapsed.steps}")
        raise
    if loop_state.outputs:
        loop_state.history.add_outputs(loop_state.elapsed, loop_state.outputs)
        loop_state.outputs = {}


ARGUMENTS = ("state", "batch", "elapsed", "loop_state")


def arguments(loop_state: LoopState, count: int) -> tuple[Any, ...]:
    """Returns the first `count` arguments for a callback."""
    return (loop_state.state, loop_state.batch, loop_state.elapsed, loop_state)[:count]


def num_arguments(callback: Callable[..., Any]) -> int:
    """Returns the number of arguments that a callback takes.

    Raises a `TypeError` that names the callback if it can't be called with the loop's arguments.
    """
    names, _ = positional_arguments(callback)
    takes = (
        f"The callback {name_of(callback)} takes ({', '.join(names)}), but callbacks receive up to four arguments by "
    )
    takes += f"position, ({', '.join(ARGUMENTS)})."
    if len(names) > len(ARGUMENTS):
        raise TypeError(f"{takes} Bind the others: functools.partial(...), or a default value.")
    if any(name in ARGUMENTS and name != ARGUMENTS[index] for index, name in enumerate(names)):
        count = max(ARGUMENTS.index(name) for name in names if name in ARGUMENTS) + 1
        raise TypeError(f"{takes} Write ({', '.join(ARGUMENTS[:count])}).")
    return len(names)
