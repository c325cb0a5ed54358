"""The action that writes the learning rate."""

from collections.abc import Iterable
from typing import Any, final

import numpy as np
import optax

from jaxloop import metrics, types
from jaxloop.actions.writer_queue import Call, WriterAction
from jaxloop.base import checks
from jaxloop.schedules import Schedule


@final
class LearningRateAction(WriterAction):
    """Writes the learning rate of the last update, as stored in the optimizer state by `optax.inject_hyperparams`.

    >>> optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    >>> float(learning_rate(optimizer.init(0.0)))
    0.10000000149011612

    Args:
      writer: See `SummaryAction`. The caller owns the writer.
      interval: See `Action`.
      summary_writer: Another name for `writer`.

    Raises:
      ValueError: If the optimizer state has no learning rate when the action is called.
    """

    uses_outputs = False

    def __init__(
        self,
        writer: Any = None,
        interval: int | Schedule = 1,
        *,
        summary_writer: Any = None,
    ):
        writer = checks.only_one("LearningRateAction", writer=writer, summary_writer=summary_writer)
        super().__init__(writer, interval)

    def __call__(self, state: Any, outputs: types.Output, *, step_num: int, **kwargs: Any) -> None:
        for problem in self.check(state, outputs):
            raise ValueError(problem)
        value = float(metrics.fetch(learning_rate(state.opt_state)))
        self._queue.put(Call(self, step_num, "write_scalars", {"learning_rate": value}))

    def check(self, state: Any, outputs: types.Output) -> Iterable[str]:
        rates = _learning_rates(getattr(state, "opt_state", None))
        if len(rates) != 1:
            found = f"{len(rates)}: {', '.join(rates)}" if rates else "none"
            yield (
                f"LearningRateAction writes one learning rate, but the optimizer's state has {found}. Make it "
                "with optax.inject_hyperparams(optax.adam)(learning_rate=...), or write an action of your own."
            )


def learning_rate(opt_state: Any) -> Any:
    """Returns the learning rate from an optimizer state, without copying it to the host.

    Returns None unless the state contains exactly one learning rate.
    """
    rates = list(_learning_rates(opt_state).values())
    return rates[0] if len(rates) == 1 else None


def _learning_rates(opt_state: Any) -> dict[str, Any]:
    """Returns the learning rates in an optimizer state, by path."""
    found = optax.tree_utils.tree_get_all_with_path(opt_state, "learning_rate")
    # A schedule has a state with the same name as the rate itself.
    is_rate = lambda value: hasattr(value, "dtype") and np.ndim(value) == 0
    return {checks.path_name(path): value for path, value in found if is_rate(value)}
