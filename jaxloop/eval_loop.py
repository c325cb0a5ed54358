"""A loop that evaluates."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from absl import logging

from jaxloop import metrics, types
from jaxloop.action_loop import ActionLoop
from jaxloop.actions.action import Action
from jaxloop.step import Step


class EvalLoop(ActionLoop):
    """Evaluates: every step sees the state as it was given, and only the outputs come back.

    Hooks:
      begin, end: see `Loop`; call those of `super()`, which measure, and call the actions.
      run, update_outputs, _get_next_batch, _run_one_step: see `Loop`.

    Weighted by examples (`jaxloop.metrics.summarize`), they give the exact mean over the dataset, also when its last
    batch is short. A short batch that does not divide over a mesh is replicated.

    >>> from jaxloop import examples, metrics
    >>> step, state, batches = examples.tiny_regression()
    >>> same_state, outputs = EvalLoop(step, stat_names=[])(state, batches[:3])
    >>> list(metrics.summarize(outputs)), same_state is state
    (['loss'], True)

    Args:
      step: what happens to one batch.
      begin_actions: see `ActionLoop`, as all that follows.
      endless_after: a call without `num_steps` says after so many steps that its dataset may be endless.
      steps_per_dispatch: see `TrainLoop`.
      max_steps_in_flight: see `Loop`.
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
        endless_after: int = 10_000,
        steps_per_dispatch: int | Literal["auto"] = 1,
        max_steps_in_flight: int | None = None,
    ):
        super().__init__(
            step,
            begin_actions,
            end_actions,
            stat_names,
            global_batch_size,
            clock=clock,
            max_steps_in_flight=max_steps_in_flight,
        )
        self.engine.stepper.evaluates = True
        self.engine.stepper.set_steps_per_dispatch(steps_per_dispatch)
        self.engine.observers.append(self._count_batch)
        if step.train:
            logging.warning("EvalLoop got %s", self.said_of_training)
        self._endless_after = endless_after
        self._is_bounded, self._num_batches = False, 0

    @property
    def said_of_training(self) -> str:
        """The warning for a step with train=True in an evaluation."""
        return (
            f"{self.step!r}, a step with train=True: a model with dropout or batch statistics would be evaluated in "
            "training mode. Give the eval loop a step of its own, with train=False."
        )

    def __call__(
        self,
        state: Any,
        dataset_iterator: Iterable[types.Batch] | None,
        num_steps: int | None = None,
        return_state_from_step: bool = False,
    ) -> tuple[Any, metrics.LoopOutputs]:
        """Does `Loop.__call__`, with the state left as it is. It is not donated."""
        if return_state_from_step:
            raise ValueError(
                "return_state_from_step=True has no place in an EvalLoop, which can't change the state. Use a "
                "TrainLoop or an ActionLoop for steps that do."
            )
        self._is_bounded, self._num_batches = num_steps is not None, 0
        _, outputs = super().__call__(state, dataset_iterator, num_steps, return_state_from_step=False)
        return state, outputs

    def end(self, state: Any, outputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        # Part of an evaluation is none: no action shall take its means for those of the dataset.
        return (state, outputs) if self.was_interrupted else super().end(state, outputs)

    def _count_batch(self, batch: types.Batch) -> None:
        self._num_batches += 1
        if not self._is_bounded and self._num_batches == self._endless_after + 1:
            logging.warning(
                "The evaluation by %r has run more than %d steps, and its dataset has not ended. If it repeats without "
                "end, set num_steps in its EvalSpec, or give data that end.",
                self.step,
                self._endless_after,
            )
