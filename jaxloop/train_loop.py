"""A loop that trains."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from jaxloop import metrics
from jaxloop.action_loop import ActionLoop
from jaxloop.actions.action import Action
from jaxloop.schedules import Elapsed
from jaxloop.step import Step


class TrainLoop(ActionLoop):
    """Trains: each step makes one optimizer update, and the state that comes out goes into the next.

    >>> from jaxloop import examples
    >>> step, state, batches = examples.tiny_regression()
    >>> train_loop = TrainLoop(step)
    >>> state, outputs = train_loop(state, batches, num_steps=100)
    >>> int(state.step), bool(outputs["loss"][-1] < outputs["loss"][0])
    (100, True)
    """

    def __init__(
        self,
        step: Step,
        stat_names: Sequence[str] | None = None,
        begin_actions: Sequence[Action] | None = None,
        end_actions: Sequence[Action] | None = None,
        global_batch_size: int | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ):
        super().__init__(step, begin_actions, end_actions, stat_names, global_batch_size, clock=clock)
        self._count_is_checked = False

    def end(self, state: Any, outputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        # Once is enough, and costs nothing now that the outputs have been read.
        self._check_count(state)
        return super().end(state, outputs)

    def _at_event(
        self, now: Elapsed, state: Any, outputs: metrics.LoopOutputs, queue: metrics.OutputQueue
    ) -> tuple[metrics.LoopOutputs, bool]:
        is_ready = getattr(getattr(state, "step", None), "is_ready", None)
        if is_ready is not None and is_ready():
            self._check_count(state)
        return super()._at_event(now, state, outputs, queue)

    def _check_count(self, state: Any) -> None:
        if self._count_is_checked or not hasattr(state, "step"):
            return
        count = int(metrics.fetch(state.step))
        if count != self.step_num:
            steps = len(self.num_examples)
            raise ValueError(
                f"{self.step!r} ran {steps} steps from state.step {self.step_num - steps}, and state.step is now "
                f"{count}, not {self.step_num}. Each run must add one to it: return "
                "state.apply_gradients(grads=...), or state.replace(step=state.step + 1)."
                + ("" if self.step.train else " (The step has train=False: did you mean Step(..., train=True)?)")
            )
        self._count_is_checked = True
