"""The base class of all actions."""

import abc
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxloop import types
from jaxloop.base import checks
from jaxloop.schedules import Elapsed, Schedule

# The keyword arguments that a loop passes to its actions.
_CONTEXT = ("step_num", "elapsed", "history", "total_steps", "spent", "snapshot")


class Action(abc.ABC):
    """The base class of actions, which perform side effects at chosen times. A subclass must implement `__call__`.

    A loop calls its actions in the order listed, except that actions with `runs_last = True` are called after all
    others. A loop's `begin_actions` receive `outputs=None`. If an action raises an exception other than `TurnBack`, the
    run ends. `TurnBack` makes the run resume from an earlier checkpoint: the methods `close`, `load_state_dict` and
    `begin_run` are then called, in this order.

    Hooks:
      __call__: Called by a loop or a step whenever the action is due.
      monitors, check: Used by `OuterLoop.check` to find problems before a run.
      before_checkpoint, state_dict: Called, in this order, before a checkpoint is saved.
      load_state_dict: Called when a run resumes from a checkpoint, before the first step.
      begin_run: Called when an `OuterLoop` or `jf.loop` begins or resumes a run, after `load_state_dict`.
      write_notes: Called when an `OuterLoop` begins or resumes a run.
      finish: Called before `close` when a run ends without an error or interruption.
      end_run: Called before `close` when a run of an `OuterLoop` or `jf.loop` ends.
      flush: Called at the end of a loop that runs without an `OuterLoop`.
      close: Called when a run of an `OuterLoop` or `jf.loop` ends, even if it ends with an error.

    Args:
      interval: The interval at which to call the action. For a loop's action, an int counts loops: with 2, the action
        is called at the end of every second loop. For a step's action, an int counts steps within the loop. A
        schedule such as `every(steps=100)` can also fire in the middle of a loop.

    Raises:
      TypeError: If `__call__` doesn't accept the arguments that a loop passes, for example because it lacks `**kwargs`.

    >>> class Announce(Action):
    ...     def __call__(self, state, outputs, *, step_num, **kwargs):
    ...         print(f"step {step_num}: {outputs}")
    >>> Announce(interval=2)(None, {"loss": [0.5]}, step_num=10)
    step 10: {'loss': [0.5]}
    """

    uses_outputs: bool = True
    """True if the action reads the outputs.

    If False, the loop neither keeps outputs for the action nor waits for the devices before it calls the action.
    """

    needs_all_outputs: bool = True
    """True if a loop that calls the action between two steps must first wait for the outputs of all steps so far.

    If False, the loop doesn't wait, and the action receives the outputs of the latest step that has been computed.
    """

    runs_last: bool = False
    """True if the action is called after the other actions and evaluations that are due at the same step."""

    time_category: str = "actions"
    """The category of the action in the time report: "actions", "evals" or "checkpoints"."""

    interval: int | Schedule = 1
    """The interval between calls: a schedule, a number of loops or, for a step's action, a number of steps."""

    def __init__(self, interval: int | Schedule = 1):
        if not isinstance(interval, Schedule):
            checks.check_positive(f"{type(self).__name__}.interval", interval, instead="a schedule such as every(100)")
        self.interval = interval
        try:
            inspect.signature(self).bind(None, None, **dict.fromkeys(_CONTEXT))
        except TypeError as error:
            raise TypeError(
                f"{type(self).__name__}.__call__ can't be called as (state, outputs, {', '.join(_CONTEXT)}): {error}. "
                "Write __call__(self, state, outputs, *, step_num, **kwargs)."
            ) from None

    def __repr__(self) -> str:
        return f"{type(self).__name__}(interval={self.interval})"

    @abc.abstractmethod
    def __call__(self, state: Any, outputs: types.Output, **kwargs: Any) -> None:
        """Performs the side effect. Called by a loop or a step when the action is due, at most once per step.

        Args:
          state: The train state. The next step donates it, so copy any part of the state that you keep.
          outputs: For a loop's action, the `LoopOutputs` of all steps since the action's last call, in host memory. For
            a step's action, the outputs of the step, still on the devices. Set `outputs[STOP_LOOP] = True` to end the
            experiment.
          **kwargs: `step_num`, the number of completed updates, and `elapsed`, the progress of the run (an `Elapsed`).
            A loop also passes `history`, `total_steps`, `spent` and `snapshot`. `history` is a `History` of the values
            measured so far, or None. `total_steps` is the planned number of updates, or None if it is unknown. `spent`
            is a `Spent`, the time report for the period since the action's last call. `snapshot` is a function that
            returns what a checkpoint stores in addition to the state. Later versions may add more keywords.

        Raises:
          TurnBack: If the run should return to an earlier checkpoint and skip the batches that the exception specifies.
        """

    @property
    def monitors(self) -> Sequence[str]:
        """The names of the metrics that the action needs; see `jaxloop.actions.Monitor`.

        Before a run, `OuterLoop.check` verifies that these metrics will be available whenever the action is called.
        """
        return ()

    def check(self, state: Any, outputs: types.Output) -> Iterable[str]:
        """Returns one message for each problem that would occur in a run. Each message explains how to fix the problem.

        Called by `OuterLoop.check`, but not by the check at the start of each run, because the outputs aren't known
        then.

        Args:
          state: The abstract train state (shapes and dtypes only).
          outputs: Outputs with the same structure as those that the action would receive, but with all numbers equal to
            1. None for a begin action.
        """
        return ()

    def finish(self, state: Any) -> Any:
        """Returns the final state of the run, which is `state` by default.

        Called once, before `close`, if the run ends without an error or interruption.
        """
        return state

    kept_state: Any = None
    """A train state that the action keeps between calls, such as the best one, or None.

    Checkpoints store this state, and a resumed run restores it.
    """

    def before_checkpoint(self) -> None:
        """Finishes all pending work. Called before a checkpoint is saved.

        Any work that is still pending afterwards is lost if the process is killed, because a resumed run doesn't repeat
        it.
        """
        self.flush()

    def begin_run(self, step_num: int, *, can_resume: bool) -> None:  # noqa: B027 (overriding is optional)
        """Prepares the action for a new or resumed run of an `OuterLoop` or `jf.loop`. Called before the first step.

        An action that keeps data between calls must discard all data from steps after `step_num`, because that data
        comes from an earlier run or from steps that this run will repeat.

        Args:
          step_num: The number of completed updates.
          can_resume: True if the run can resume from checkpoints. In that case, an earlier process may have continued
            past `step_num` before it was killed, and this run repeats those steps.
        """

    def write_notes(self, notes: Mapping[str, Any]) -> None:  # noqa: B027 (overriding is optional)
        """Records a run's notes: `OuterLoop.notes` and, if the run has a log, the program's Git commit."""

    def end_run(self, status: str) -> None:  # noqa: B027 (overriding is optional)
        """Records how a run ended: "finished", "failed" (with an error) or "killed" (by Ctrl-C or SIGTERM)."""

    def state_dict(self) -> Mapping[str, Any]:
        """Returns the data that the action keeps between calls, as numbers, strings, arrays, lists and dicts."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores data returned by the `state_dict` method of an action that was created with the same arguments."""
        check_state_dict(self, (), state_dict)

    def flush(self) -> None:  # noqa: B027 (overriding is optional)
        """Finishes all pending writes.

        Called by `before_checkpoint` and `close`, and at the end of a loop that runs without an `OuterLoop`.
        """

    def close(self) -> None:
        """Finishes pending writes and releases resources.

        Called when a run of an `OuterLoop` or `jf.loop` ends, even after an error. Also called before a run returns to
        an earlier checkpoint; `begin_run` is then called again.
        """
        self.flush()


def check_state_dict(action: Action, names: Iterable[str], state_dict: Mapping[str, Any]) -> None:
    """Raises a `ValueError` unless the keys of a saved `state_dict` are exactly the `names` that `action` expects."""
    if sorted(names) != sorted(state_dict):
        remembered = sorted(names) or "nothing"
        raise ValueError(
            f"{action!r} expects {remembered} in its state_dict, got {sorted(state_dict)}. Was it saved by a different "
            "action?"
        )


def as_action(action: Any) -> Action:
    """Returns the given object unchanged, or raises a `TypeError` if it isn't an `Action`."""
    if not isinstance(action, Action):
        raise TypeError(f"An action must be a jaxloop.Action, got {action!r}. Write a subclass.")
    return action


def is_due(action: Action, count: int, elapsed: Elapsed) -> bool:
    """Returns True if a step's action is due at the end of the `count`-th step of a loop."""
    interval = action.interval
    return interval(elapsed) if isinstance(interval, Schedule) else count % interval == 0


def call_action(action: Action, state: Any, outputs: types.Output, elapsed: Elapsed, **context: Any) -> None:
    """Calls an action. Any exception that the action raises gets a note that names the action and the step."""
    try:
        action(state, outputs, step_num=elapsed.steps, elapsed=elapsed, **context)
    except BaseException as error:
        error.add_note(f"in {action!r}, after step {elapsed.steps}")
        raise
