"""Stopping when it gets no better."""

import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging

from jaxloop import checks, types
from jaxloop.actions.action import Action
from jaxloop.actions.monitor import Monitor
from jaxloop.history import History
from jaxloop.schedules import Elapsed, Schedule
from jaxloop.text import printable


class EarlyStoppingAction(Action):
    """Ends the run when a metric no longer improves, or at once when it is NaN.

    Give it to the eval loop whose metric it watches, or to the train loop, where it is called after the evaluations of
    the same step. Why it stopped is logged.

    Hooks:
      __call__, finish, close, state_dict, load_state_dict: see `Action`; call those of `super()`.

    >>> stopping = EarlyStoppingAction("test/accuracy", patience=2)
    >>> for step, accuracy in [(100, 0.95), (200, 0.98), (300, 0.97), (400, 0.98)]:
    ...     outputs = {"test/accuracy": accuracy}
    ...     stopping(None, outputs, step_num=step)
    >>> outputs[types.STOP_LOOP], stopping.best, stopping.best_elapsed.steps
    (True, 0.98, 200)

    Args:
      monitor: the name of the metric, see `jaxloop.actions.Monitor`. A train metric is its mean since the last call.
      patience: how many measurements in a row may bring no improvement; the run ends at the last of them. Or for how
        long none may come, as a period that begins at the best: `after(steps=1000)`, `after(time=600)`.
      mode: "min", "max" or "auto", see `jaxloop.actions.Monitor`.
      min_delta: an improvement is better than the best by more than this.
      baseline: as long as it has not been better than this, the patience goes on running through improvements.
      restore_best: keeps a copy of the state with the best value on the devices, as large as the state; the run
        returns it when it ends, for whatever reason. Its `step` is that of the best.
      interval: see `Action`.
    """

    comes_last = True

    def __init__(
        self,
        monitor: str,
        patience: int | Schedule,
        mode: str = "auto",
        min_delta: float = 0.0,
        baseline: float | None = None,
        restore_best: bool = False,
        interval: int | Schedule = 1,
    ):
        super().__init__(interval)
        self._monitor = Monitor(monitor, mode)
        self._patience, self._unit = _patience_and_unit(patience)
        for name, value in (("min_delta", min_delta), ("baseline", baseline)):
            if value is not None and (not isinstance(value, numbers.Real) or not math.isfinite(value)):
                raise TypeError(f"EarlyStoppingAction.{name} must be a number, got {value!r}.")
        if min_delta < 0:
            raise ValueError(f"EarlyStoppingAction.min_delta must not be negative, got {min_delta}.")
        self._min_delta, self._baseline, self._restore_best = min_delta, baseline, restore_best
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._best: tuple[float, Elapsed] | None = None
        self.kept_state: Any = None
        self._patient_since: Elapsed | None = None  # Where the patience began to run.
        self._waits = 0  # Measurements since then.
        self._seen_at: Elapsed | None = None
        self._stopped = False
        self._is_over = False

    @property
    def monitors(self) -> Sequence[str]:
        return (self._monitor.name,)

    def check(self, state: Any, outputs: types.Output) -> Iterable[str]:
        if outputs is None:
            yield self._cant_stop_a_beginning

    @property
    def best(self) -> float | None:
        """The best value so far; None before the first."""
        return self._best and self._best[0]

    @property
    def best_elapsed(self) -> Elapsed | None:
        """How far the run was at the best value."""
        return self._best and self._best[1]

    @property
    def stopped(self) -> bool:
        """Whether it has ended the run."""
        return self._stopped

    def __repr__(self) -> str:
        patience = f"after({self._unit}={self._patience})" if self._unit else self._patience
        return f"EarlyStoppingAction({self._monitor.name!r}, patience={patience}, interval={self.interval})"

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
        now = Elapsed(step_num) if elapsed is None else elapsed.without_previous()
        if self._is_over or (self._seen_at is not None and now.steps < self._seen_at.steps):
            self._begin_anew()  # It is another run.
        self._seen_at = now
        value = self._monitor.measured(outputs, history, now)
        if value is None:
            return
        reason = self._reason_to_stop(state, value, now)
        self._stopped = reason is not None
        if self._stopped:
            if outputs is None:
                raise TypeError(self._cant_stop_a_beginning)
            outputs[types.STOP_LOOP] = True
            logging.info("Stopped at step %d: %s", now.steps, reason)

    @property
    def _cant_stop_a_beginning(self) -> str:
        return f"{self!r} can't stop a loop that begins: give it to the end_actions."

    def _reason_to_stop(self, state: Any, value: float, now: Elapsed) -> str | None:
        """Takes a value in; returns why the run is to stop, as half a sentence."""
        if self._monitor.has_failed(value):
            return f"{self._monitor.name} is {value}."
        self._waits += 1
        if self._patient_since is None:
            self._patient_since = now
        if self._monitor.improves(value, self.best, self._min_delta):
            self._best = (value, now)
            if self._restore_best:
                self.kept_state = None  # Let go of the one before, so that there are never three.
                self.kept_state = jax.tree.map(_copy, state)
            if self._baseline is None or self._monitor.improves(value, self._baseline, self._min_delta):
                self._patient_since, self._waits = now, 0
        gone = getattr(now, self._unit) - getattr(self._patient_since, self._unit) if self._unit else self._waits
        best, at = self._best or (value, now)
        return self._describe(gone, best, at) if gone >= self._patience else None

    def _describe(self, gone: float, best: float, at: Elapsed) -> str:
        unit = {"": "evaluations", "time": "seconds"}.get(self._unit, self._unit)
        period = f"{gone:g} {unit}" if gone != 1 else f"1 {unit[:-1]}"
        margin = f" by more than {self._min_delta:g}" if self._min_delta else ""
        if self._baseline is not None and not self._monitor.improves(best, self._baseline, self._min_delta):
            return (
                f"{self._monitor.name} has not got better than the baseline {self._baseline:g}{margin} for {period}; "
                f"the best was {best:.6g} (step {at.steps})."
            )
        return f"{self._monitor.name} has not improved on {best:.6g} (step {at.steps}){margin} for {period}."

    def finish(self, state: Any) -> Any:
        self._warn_if_blind()
        self._is_over = True
        best_state, self.kept_state = self.kept_state, None
        if not self._restore_best or self._best is None:
            return state
        if best_state is None:
            logging.warning(
                "%r can't return the state with the best %s: the run was resumed after step %d, where it was, and the "
                "copy is not part of a checkpoint. The newest state is returned. CheckpointAction(directory, best=%r) "
                "keeps the best on disk.",
                self,
                printable(self._monitor.name),
                self._best[1].steps,
                printable(self._monitor.name),
            )
            return state
        logging.info(
            "The run returns the state of step %d, with the best %s.",
            self._best[1].steps,
            printable(self._monitor.name),
        )
        return best_state

    def _warn_if_blind(self) -> None:
        if self._seen_at is not None and self._best is None and not self._stopped:
            logging.warning(
                "%r could not stop the run: at none of its calls was %s measured. Let its interval coincide with the "
                "evaluations, or give it to the end_actions of the eval loop.",
                self,
                printable(self._monitor.name),
            )

    def close(self) -> None:
        super().close()
        self.kept_state = None

    def state_dict(self) -> Mapping[str, Any]:
        dicts = {"best_elapsed": self.best_elapsed, "patient_since": self._patient_since, "seen_at": self._seen_at}
        return {
            "best": self.best,
            "waits": self._waits,
            "stopped": self._stopped,
            **{name: elapsed and elapsed.to_dict() for name, elapsed in dicts.items()},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._check_remembers(EarlyStoppingAction.state_dict(self), state_dict)
        self._begin_anew()
        best_elapsed, self._patient_since, self._seen_at = (
            Elapsed(**state_dict[name]) if state_dict[name] is not None else None
            for name in ("best_elapsed", "patient_since", "seen_at")
        )
        self._best = None if best_elapsed is None else (state_dict["best"], best_elapsed)
        self._waits, self._stopped = state_dict["waits"], state_dict["stopped"]


def _copy(leaf: Any) -> Any:
    return jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf


def _patience_and_unit(patience: int | Schedule) -> tuple[float, str]:
    """How much patience there is, and of what: a unit of `Elapsed`, or "" for measurements."""
    if not isinstance(patience, Schedule):
        checks.check_positive("EarlyStoppingAction.patience", patience)
        return patience, ""
    unit, value = getattr(patience, "unit", None), getattr(patience, "value", None)
    if unit is None or value is None:
        raise TypeError(
            f"EarlyStoppingAction.patience must be a positive int or a period such as after(steps=1000), got "
            f"{patience!r}, which has no length."
        )
    if value <= 0:
        raise ValueError(f"EarlyStoppingAction.patience must be longer than nothing, got {patience!r}.")
    return value, unit
