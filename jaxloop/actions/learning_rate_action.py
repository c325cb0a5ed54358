"""The action that writes the learning rate."""

from collections.abc import Iterable
from typing import Any, final

import numpy as np
import optax

from jaxloop import metrics, types
from jaxloop.actions.writer_queue import Call, WriterAction
from jaxloop.schedules import Schedule


@final
class LearningRateAction(WriterAction):
    """Writes the learning rate of the last update, as stored in the optimizer state by `optax.inject_hyperparams`.

    >>> optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    >>> float(learning_rate(optimizer.init(0.0)))
    0.10000000149011612

    Args:
      summary_writer: See `SummaryAction`. The caller owns the writer.
      interval: See `Action`.
      background: Whether to write in a background thread; see `SummaryAction`.

    Raises:
      ValueError: If the optimizer state has no learning rate when the action is called.
    """

    uses_outputs = False

    def __init__(self, summary_writer: Any, interval: int | Schedule = 1, *, background: bool = True):
        super().__init__(summary_writer, interval, background)

    def __call__(self, state: Any, outputs: types.Output, *, step_num: int, **kwargs: Any) -> None:
        for problem in self.check(state, outputs):
            raise ValueError(problem)
        value = float(metrics.fetch(learning_rate(state.opt_state)))
        self._queue.put(Call(self, step_num, "write_scalars", {"learning_rate": value}))

    def check(self, state: Any, outputs: types.Output) -> Iterable[str]:
        if learning_rate(getattr(state, "opt_state", None)) is None:
            yield (
                "LearningRateAction found no learning rate in the optimizer's state. Make the optimizer with "
                "optax.inject_hyperparams(optax.adam)(learning_rate=...), or leave the action out."
            )


def learning_rate(opt_state: Any) -> Any:
    """Returns the learning rate from an optimizer state, without copying it to the host.

    Returns None unless the state contains exactly one learning rate.
    """
    found = optax.tree_utils.tree_get_all_with_path(opt_state, "learning_rate")
    # A schedule has a state with the same name as the rate itself.
    rates = [value for _, value in found if hasattr(value, "dtype") and np.ndim(value) == 0]
    return rates[0] if len(rates) == 1 else None
