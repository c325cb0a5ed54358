"""The base of all actions."""

import abc
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxloop import checks, types
from jaxloop.schedules import Schedule


class Action(abc.ABC):
    """A side effect at chosen moments. Subclass it and write `__call__`.

    A loop calls its actions in their order, `begin_actions` with `outputs=None`. An exception in one ends the run.

    Hooks:
      __call__: by a loop, or a step, when the interval says.
      monitors, check: by `OuterLoop.check`, before a run.
      before_checkpoint, state_dict: when a checkpoint is about to be saved, in this order.
      load_state_dict: when a run resumes from a checkpoint, before its first step.
      begin_run: when a run that can resume begins or resumes, after `load_state_dict`.
      finish: when a run has ended well, before `close`.
      flush: when a loop on its own ends.
      close: when an `OuterLoop`'s run ends, however it ends.

    Args:
      interval: when it is called. An int counts loops as a loop's action (2: at the end of the 2nd, 4th, ... loop),
        and steps within the loop as a step's action. A schedule such as `every(steps=100)` fires at exactly that step,
        inside the loop if need be.

    >>> class Announce(Action):
    ...     def __call__(self, state, outputs, *, step_num, **kwargs):
    ...         print(f"step {step_num}: {outputs}")
    >>> Announce(interval=2)(None, {"loss": [0.5]}, step_num=10)
    step 10: {'loss': [0.5]}
    """

    uses_outputs: bool = True
    """It reads the outputs. If not, a loop keeps none for it, and does not wait for the devices."""

    waits_for_outputs: bool = True
    """A loop that calls it between two steps waits for the outputs of all its steps. If not, the action gets those of
    the newest step that has been computed, and the loop continues at once."""

    comes_last: bool = False
    """It is called after the evaluations of the same step, and after all other actions, as a checkpoint is."""

    time_goes_to: str = "actions"
    """The line of the time report for its calls: "actions", "evals" or "checkpoints"."""

    _interval: int | Schedule = 1  # For a subclass that does not call `super().__init__`.

    def __init__(self, interval: int | Schedule = 1):
        if not isinstance(interval, Schedule):
            checks.check_positive(f"{type(self).__name__}.interval", interval, instead="a schedule such as every(100)")
        self._interval = interval

    @property
    def interval(self) -> int | Schedule:
        """When it is called: every so many loops (or steps, as a step's action), or by a schedule."""
        return self._interval

    def __repr__(self) -> str:
        return f"{type(self).__name__}(interval={self._interval})"

    @abc.abstractmethod
    def __call__(self, state: Any, outputs: types.Output, **kwargs: Any) -> None:
        """Called by a loop, or a step, when the interval says; at most once after any one step.

        Args:
          state: the train state. The next step takes it over (donates it): copy what is to be kept.
          outputs: as a loop's action the `LoopOutputs` since its last call, on the host; as a step's action the step's
            outputs, still on the devices. `outputs[STOP_LOOP] = True` ends the experiment.
          **kwargs: `step_num`, the number of completed updates; `elapsed`, how far the run is (an `Elapsed`); from a
            loop also `history`, what was measured so far (a `History`, or None), `total_steps`, how many updates the
            run shall have in all (None if nobody knows), `spent`, the `Spent` seconds since its last call, and
            `snapshot`, a function that returns what a checkpoint keeps beside the state. More names may come.
        """

    @property
    def monitors(self) -> Sequence[str]:
        """The names of the metrics, see `jaxloop.actions.Monitor`, without which it can't do its work.

        Before a run, `OuterLoop.check` looks whether they will be measured where it is called.
        """
        return ()

    def check(self, state: Any, outputs: types.Output) -> Iterable[str]:
        """Returns the problems that a run would have, a sentence each with its remedy, for `OuterLoop.check`.

        Args:
          state: the train state, in shapes.
          outputs: those of a call, with ones for values; None if it is called when a loop begins.
        """
        return ()

    def finish(self, state: Any) -> Any:
        """Called once when a run has ended well, before `close`; returns the state that the run shall return."""
        return state

    kept_state: Any = None
    """A train state that it keeps from call to call, such as the best one; a checkpoint keeps it too, and sets it in a
    run that resumes."""

    def before_checkpoint(self) -> None:
        """Called before a checkpoint is saved: what the action has begun must be on disk when this returns.

        A process that is killed loses the rest, and the run that resumes does not call the action again for it.
        """
        self.flush()

    def begin_run(self, step_num: int) -> None:  # noqa: B027 (to override, or not)
        """Called before the first step of a run that has a `CheckpointSpec`, whether or not it resumes.

        An earlier process may have been killed after this step, and the work that it did since then will be repeated.

        Args:
          step_num: the number of completed updates.
        """

    def state_dict(self) -> Mapping[str, Any]:
        """Returns the memory from call to call, as `jaxloop.encoding` takes it: numbers, strings, arrays, lists, dicts.

        It is part of the run, and so of a checkpoint.
        """
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` of an action made with the same arguments returned."""
        self._check_remembers((), state_dict)

    def _check_remembers(self, names: Iterable[str], state_dict: Mapping[str, Any]) -> None:
        """Raises where a `state_dict` has other names than those of what this action remembers."""
        if sorted(names) != sorted(state_dict):
            remembered = sorted(names) or "nothing"
            raise ValueError(f"{self!r} remembers {remembered}, and was given {sorted(state_dict)}: of another action?")

    def flush(self) -> None:  # noqa: B027 (to override, or not)
        """Waits until what was begun is written. Called at the end of a loop on its own, without an OuterLoop."""

    def close(self) -> None:
        """Flushes, and lets resources go; called when an OuterLoop's run ends, however it ends."""
        self.flush()
