"""The action that skips batches when a metric spikes."""

import collections
import math
from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np

from jaxloop import metrics, types
from jaxloop.actions.action import Action, check_state_dict
from jaxloop.actions.monitor import Monitor
from jaxloop.base import checks
from jaxloop.schedules import Schedule, every

_INTERVAL = every(steps=10)


@final
class SpikeGuard(Action):
    """Rolls back to an earlier checkpoint when a train metric spikes, and skips the batches that caused the spike.

    A spike is a value that is NaN or infinite, or that exceeds the mean of the preceding `window` values by more than
    `sigmas` times their standard deviation. After a spike, the run rolls back to the last checkpoint before the spike
    and continues from there. If a check finds several spikes, the run skips all batches from the first spike to the
    last spike. From then on, the run is bit-identical to one whose data never contained those batches. Each rollback
    adds a "detour" row to the history.

    Checkpoints saved after the spike are moved to `<directory>/abandoned`. The run needs a `CheckpointSpec`, a
    `CheckpointAction`, and a dataset that can return to an earlier position.

    >>> SpikeGuard("loss", sigmas=6, window=128, at_most=3)
    SpikeGuard('loss', sigmas=6, window=128, at_most=3, interval=every(steps=10))

    Args:
      name: The name of a scalar output of the train step.
      sigmas: The number of standard deviations by which a value must exceed the mean to count as a spike.
      window: The number of preceding values, not counting spikes, from which the mean and the standard deviation are
        computed. Until that many values exist, and while all of them are equal, only NaN and infinity count as
        spikes.
      at_most: The maximum number of rollbacks in a run. If a spike occurs after that many rollbacks, the run ends with
        an error. If the run is then resumed, it starts from a checkpoint before that spike.
      interval: The interval at which to check the values. Each check covers all values since the previous check, and
        synchronizes with the devices. Checkpoints saved between a spike and the next check are abandoned, so check more
        often than you save.

    Raises:
      RuntimeError: If a spike occurs after `at_most` rollbacks, or before the first checkpoint.
    """

    def __init__(
        self,
        name: str,
        *,
        sigmas: float = 6.0,
        window: int = 128,
        at_most: int = 3,
        interval: int | Schedule = _INTERVAL,
    ):
        super().__init__(interval)
        self._monitor = Monitor(name, "min")
        checks.check_positive("SpikeGuard.window", window)
        checks.check_positive("SpikeGuard.at_most", at_most)
        if not sigmas > 0:
            raise ValueError(f"SpikeGuard.sigmas must be positive, got {sigmas!r}.")
        self._sigmas, self._window, self._at_most = sigmas, window, at_most
        self._values: collections.deque[float] = collections.deque(maxlen=window)
        self._seen_at = 0  # The step of the last call.

    @property
    def monitors(self) -> Sequence[str]:
        return (self._monitor.name,)

    def __repr__(self) -> str:
        return (
            f"SpikeGuard({self._monitor.name!r}, sigmas={self._sigmas:g}, window={self._window}, "
            f"at_most={self._at_most}, interval={self.interval})"
        )

    def begin_run(self, step_num: int, *, can_resume: bool) -> None:
        if not can_resume:
            raise ValueError(
                f"{self!r} needs checkpoints to return to, but this run has none. Give the run a CheckpointSpec."
            )
        if self._seen_at > step_num or not self._values:
            self._values.clear()
            self._seen_at = step_num

    def __call__(
        self,
        state: Any,
        outputs: types.Output,
        *,
        step_num: int,
        **kwargs: Any,
    ) -> None:
        values = self._values_of_steps(outputs)
        if not values:
            return
        per_value, self._seen_at = (step_num - self._seen_at) // len(values), step_num
        spikes, limit = [], self._limit()
        for number, value in enumerate(values):
            if value is None:
                continue
            if math.isfinite(value) and value <= limit:
                self._values.append(value)
                limit = self._limit()
            else:
                spikes.append(number)
        if not spikes:
            return
        first, last = (step_num - (len(values) - 1 - number) * per_value for number in (spikes[0], spikes[-1]))
        worst = max((values[number] for number in spikes), key=lambda value: (math.isnan(value), value))
        reason = f"{self._monitor.name} was {worst:.6g} in steps {first} to {last}, above the limit of {limit:.6g}."
        raise types.TurnBack(first, last, reason, at_most=self._at_most)

    def _values_of_steps(self, outputs: types.Output) -> list[Any]:
        """Returns the metric's value for each step since the action was last called.

        A value is None if the metric was not measured in that step.
        """
        name = self._monitor.name.removeprefix("train/")
        values = outputs.get(name) if isinstance(outputs, Mapping) else None
        if not isinstance(values, list) or any(np.ndim(value) for value in values):
            there = self._monitor.missing_message([name for name, value in (outputs or {}).items() if value], None)
            raise ValueError(f"{self!r} needs an output {name!r} with a number for each step. {there}")
        return [None if metrics.is_empty(value) else float(value) for value in values]

    def _limit(self) -> float:
        """Returns the limit above which a value is a spike.

        The limit is infinity if there are fewer than `window` preceding values, or if all of them are equal.
        """
        if len(self._values) < self._window:
            return math.inf
        values = np.array(self._values)
        deviation = float(values.std())
        return float(values.mean()) + self._sigmas * deviation if deviation else math.inf

    def state_dict(self) -> Mapping[str, Any]:
        return {"values": list(self._values), "seen_at": self._seen_at}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        check_state_dict(self, ("values", "seen_at"), state_dict)
        self._values = collections.deque(state_dict["values"], maxlen=self._window)
        self._seen_at = state_dict["seen_at"]
