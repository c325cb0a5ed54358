"""The action that ends a run when a metric stops improving."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging

from jaxloop import types
from jaxloop.actions.action import Action, check_state_dict
from jaxloop.actions.monitor import Monitor
from jaxloop.base import checks
from jaxloop.base.text import announce, printable
from jaxloop.history import History
from jaxloop.schedules import Elapsed, Schedule


@dataclasses.dataclass
class _Memory:
    """The values that an `EarlyStoppingAction` remembers between calls.

    Attributes:
      best: The best value of the metric so far.
      best_elapsed: The progress of the run when the best value was measured.
      waits: The number of measurements since the last improvement, or infinity if the metric has failed (see
        `Monitor.has_failed`).
      seen_at: The progress of the run at the most recent call.
      stopped: True if the action has ended the run.
    """

    best: float | None = None
    best_elapsed: Elapsed | None = None
    waits: float = 0
    seen_at: Elapsed | None = None
    stopped: bool = False


class EarlyStoppingAction(Action):
    """Ends the run when a metric stops improving, or immediately if the metric becomes NaN.

    The run also ends immediately if the metric becomes infinite in the wrong direction; see `Monitor.has_failed`. When
    the action ends the run, it logs the reason.

    Add this action to the eval loop that computes the metric. The loop then calls the action after each evaluation.
    Alternatively, add the action to the train loop, with the same interval as the evaluation, such as
    `interval=every(steps=100)`. In a train loop, the default interval of 1 means once per loop. With this default, if
    the whole run is a single loop, the action is called only at the end of the run.

    Hooks:
      __call__, begin_run, finish, state_dict, load_state_dict: See `Action`. Overrides must call `super()`.

    >>> stopping = EarlyStoppingAction("test/accuracy", patience=2)
    >>> for step, accuracy in [(100, 0.95), (200, 0.98), (300, 0.97), (400, 0.98)]:
    ...     outputs = {"test/accuracy": accuracy}
    ...     stopping(None, outputs, step_num=step)
    >>> outputs[types.STOP_LOOP], stopping.best, stopping.best_elapsed.steps
    (True, 0.98, 200)

    Attributes:
      monitor: The `Monitor` for the metric.
      patience: The value of the argument `patience`.

    Args:
      monitor: The name of the metric; see `jaxloop.actions.Monitor`. The value of a train metric is its mean since the
        last call.
      patience: The number of consecutive measurements without improvement after which the run ends.
      mode: "min", "max" or "auto"; see `jaxloop.actions.Monitor`.
      min_delta: A value counts as an improvement only if it beats the best value by more than this amount.
      restore_best: Whether to keep a copy of the best state on the devices. If so, a run that ends without an
        interruption returns this state (including its `step`), even if the action didn't stop the run.
      interval: See `Action`.
    """

    runs_last = True

    def __init__(
        self,
        monitor: str,
        patience: int,
        mode: str = "auto",
        min_delta: float = 0.0,
        restore_best: bool = False,
        interval: int | Schedule = 1,
    ):
        super().__init__(interval)
        self.monitor: Monitor = Monitor(monitor, mode)
        checks.check_positive("EarlyStoppingAction.patience", patience)
        if not isinstance(min_delta, int | float) or not 0 <= min_delta < math.inf:
            raise ValueError(f"EarlyStoppingAction.min_delta must be finite and not negative, got {min_delta!r}.")
        self.patience: int = patience
        self._min_delta, self._restore_best = min_delta, restore_best
        self._forget()

    def _forget(self) -> None:
        self._memory = _Memory()
        self.monitor.begin_run()
        self.kept_state: Any = None
        self._is_over = False

    def begin_run(self, step_num: int, *, can_resume: bool) -> None:
        if self._is_over or (self._memory.seen_at is not None and step_num < self._memory.seen_at.steps):
            self._forget()

    @property
    def monitors(self) -> Sequence[str]:
        return (self.monitor.name,)

    @property
    def best(self) -> float | None:
        """The best value so far, or None before the first measurement."""
        return self._memory.best

    @property
    def best_elapsed(self) -> Elapsed | None:
        """The run's progress when the best value was measured, or None before the first measurement."""
        return self._memory.best_elapsed

    @property
    def stopped(self) -> bool:
        """True if the action has ended the run."""
        return self._memory.stopped

    def __repr__(self) -> str:
        name, mode = self.monitor.name, self.monitor.mode
        return f"EarlyStoppingAction({name!r}, patience={self.patience}, mode={mode!r}, interval={self.interval})"

    def __call__(
        self,
        state: Any,
        outputs: types.Output,
        *,
        step_num: int,
        elapsed: Elapsed | None = None,
        history: History | None = None,
        **kwargs: Any,
    ) -> None:
        if outputs is None:
            raise TypeError(f"{self!r} can't stop a loop as one of its begin_actions. Add it to the end_actions.")
        now = Elapsed(step_num) if elapsed is None else elapsed.without_previous()
        self._memory.seen_at = now
        value = self.monitor.measured(outputs, history, now)
        if value is None:
            return
        memory, reason = self._memory, None
        if self.monitor.has_failed(value):
            memory.waits = math.inf  # No amount of patience helps.
            reason = f"{self.monitor.name} is {value}."
        else:
            memory.waits += 1
            if self.monitor.improves(value, memory.best, self._min_delta):
                memory.best, memory.best_elapsed, memory.waits = value, now, 0
                if self._restore_best:
                    self.kept_state = None  # Frees the previous copy, so that there are never three states.
                    self.kept_state = jax.tree.map(_copy, state)
            if self.is_out_of_patience:
                assert (
                    memory.best is not None and memory.best_elapsed is not None
                )  # The first value is the best so far.
                best = f"{memory.best:.6g} (step {memory.best_elapsed.steps})"
                margin = f" by more than {self._min_delta:g}" if self._min_delta else ""
                period = f"{memory.waits:g} evaluation{'s' if memory.waits > 1 else ''}"
                reason = f"{self.monitor.name} has not improved on {best}{margin} for {period}."
        memory.stopped = reason is not None
        if reason is not None:
            outputs[types.STOP_LOOP] = True
            announce("Stopped at step %d: %s", now.steps, reason)

    @property
    def is_out_of_patience(self) -> bool:
        """True if none of the last `patience` values was an improvement, or if the latest value counts as a failure.

        `Monitor.has_failed` determines which values count as failures.
        """
        return self._memory.waits >= self.patience

    def finish(self, state: Any) -> Any:
        memory, name = self._memory, printable(self.monitor.name)
        if memory.seen_at is not None and memory.best is None and not memory.stopped:
            self.monitor.check_was_measured()
            logging.warning(
                f"{self!r} could not stop the run: {name} was not measured at any of its calls. Make its interval "
                "coincide with the evaluations, or add it to the end_actions of the eval loop."
            )
        self._is_over = True
        best_state, self.kept_state = self.kept_state, None
        if best_state is None or memory.best_elapsed is None:
            return state
        logging.info("The run returns the state of step %d, with the best %s.", memory.best_elapsed.steps, name)
        return best_state

    def state_dict(self) -> Mapping[str, Any]:
        kept = vars(self._memory)
        return {name: value.to_dict() if isinstance(value, Elapsed) else value for name, value in kept.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        check_state_dict(self, vars(_Memory()), state_dict)
        self._forget()
        for name, kept in state_dict.items():
            setattr(self._memory, name, Elapsed(**kept) if isinstance(kept, Mapping) else kept)


def _copy(leaf: Any) -> Any:
    return jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf
