"""`EvalLoop`, which evaluates a state."""

from collections.abc import Iterable, Sequence
from typing import Any

from absl import logging

from jaxloop import metrics, types
from jaxloop.action_loop import ActionLoop
from jaxloop.actions.action import Action
from jaxloop.step import Step


class EvalLoop(ActionLoop):
    """Evaluates a state without changing or donating it.

    Hooks:
      begin: See `Loop`.
      end: See `Loop`. An override must call `super().end(...)`, which adds the statistics. The actions receive the
        state and the outputs that the override returns.
      run, update_outputs, _get_next_batch, _run_one_step: See `Loop`.

    `jaxloop.metrics.summarize` computes example-weighted means of the outputs. These are the exact means over the
    dataset, even if the last batch is short. A short batch that can't be divided evenly among the devices is
    replicated.

    >>> from jaxloop import examples, metrics
    >>> step, state, batches = examples.tiny_regression()
    >>> same_state, outputs = EvalLoop(step, stat_names=[])(state, batches[:3])
    >>> list(metrics.summarize(outputs)), same_state is state
    (['loss'], True)

    Args:
      step: The step to run on each batch, created with `train=False`.
      begin_actions, end_actions: See `ActionLoop`.
      stat_names, global_batch_size: See `StatLoop`.
      steps_per_dispatch: See `TrainLoop`.
      max_steps_in_flight: See `Loop`.
    """

    def __init__(
        self,
        step: Step,
        stat_names: Sequence[str] | None = None,
        begin_actions: Sequence[Action] | None = None,
        end_actions: Sequence[Action] | None = None,
        global_batch_size: int | None = None,
        *,
        steps_per_dispatch: int = 1,
        max_steps_in_flight: int | None = None,
    ):
        super().__init__(
            step,
            begin_actions,
            end_actions,
            stat_names,
            global_batch_size,
            max_steps_in_flight=max_steps_in_flight,
        )
        self.engine.options.evaluates = True
        self.engine.set_steps_per_dispatch(steps_per_dispatch)
        if step.train:
            logging.warning(
                "EvalLoop got %r, a step with train=True, which evaluates dropout and batch statistics in training "
                "mode. Make another step with train=False for the eval loop.",
                step,
            )

    def __call__(
        self,
        state: Any,
        dataset_iterator: Iterable[types.Batch] | None,
        num_steps: int | None = None,
        return_state_from_step: bool = False,
    ) -> tuple[Any, metrics.LoopOutputs]:
        """Evaluates the state on at most `num_steps` batches.

        The state is neither changed nor donated. See `Loop.__call__`.
        """
        if return_state_from_step:
            raise ValueError(
                "EvalLoop got return_state_from_step=True, but an evaluation can't change the state. Use a TrainLoop "
                "or an ActionLoop for steps that do."
            )
        _, outputs = super().__call__(state, dataset_iterator, num_steps, return_state_from_step=False)
        return state, outputs
