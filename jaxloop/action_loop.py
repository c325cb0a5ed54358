"""A loop that calls actions before, between and after its steps."""

import dataclasses
from collections.abc import Sequence

from jaxloop.actions.action import Action
from jaxloop.stat_loop import StatLoop
from jaxloop.step import Step


class ActionLoop(StatLoop):
    """A loop that calls actions when it begins, between its steps, and when it ends.

    Hooks:
      begin: See `Loop`.
      end: See `Loop`. An override must call `super().end(...)`, which adds the statistics. The actions receive the
        state and the outputs that the override returns.
      run, update_outputs, _get_next_batch, _run_one_step: See `Loop`.

    >>> import jaxloop
    >>> from jaxloop import examples
    >>> class Report(Action):
    ...     def __call__(self, state, outputs, *, step_num, **kwargs):
    ...         print(f"step {step_num}: {len(outputs['loss'])} losses")
    >>> step, state, batches = examples.tiny_regression()
    >>> loop = ActionLoop(step, end_actions=[Report(interval=2)])
    >>> for _ in range(4):
    ...     state, outputs = loop(state, batches, num_steps=3)
    step 6: 6 losses
    step 12: 6 losses
    >>> loop = ActionLoop(step, end_actions=[Report(interval=jaxloop.every(steps=10))])
    >>> state, outputs = loop(state, batches, num_steps=20)
    step 20: 8 losses
    step 30: 10 losses

    Args:
      step: The step to run on each batch.
      begin_actions: Actions to call, in the given order, when a loop begins. They receive `outputs=None`. An int
        interval counts loops. An action whose interval is a schedule is called if the schedule has fired since the
        previous loop began.
      end_actions: Actions to call between steps or when a loop ends. Each action receives the outputs of all steps
        since its previous call. An int interval counts loops: with 2, the action is called at the end of every second
        loop. An action whose interval is a schedule is called right after the step at which the schedule fires. Actions
        whose `runs_last` is True, such as those that save checkpoints, are called after all other actions and after the
        evaluations of an `OuterLoop`.
      stat_names: See `StatLoop`, which also describes the remaining arguments.

    Without an `OuterLoop`, a call to the loop returns only after the actions have finished all their work, including
    asynchronous saves.
    """

    def __init__(
        self,
        step: Step,
        begin_actions: Sequence[Action] | None = None,
        end_actions: Sequence[Action] | None = None,
        stat_names: Sequence[str] | None = None,
        global_batch_size: int | None = None,
        *,
        max_steps_in_flight: int | None = None,
    ):
        super().__init__(step, stat_names, global_batch_size, max_steps_in_flight=max_steps_in_flight)
        self.engine.set_actions(begin_actions or (), end_actions or ())

    @property
    def begin_actions(self) -> Sequence[Action]:
        """The actions that are called when a loop begins."""
        return tuple(item.action for item in self.engine.actions.begin)

    @property
    def end_actions(self) -> Sequence[Action]:
        """The actions that are called between steps, or when a loop ends."""
        return tuple(item.action for item in self.engine.actions.end)

    @property
    def actions(self) -> Sequence[Action]:
        """All actions of the loop and its step, without duplicates."""
        in_loop, step = [item.action for items in self.engine.actions for item in items], self.step
        return list({id(each): each for each in [*in_loop, *step.begin_actions, *step.end_actions]}.values())

    @property
    def loop_count(self) -> int:
        """The number of completed loops.

        To make int intervals continue where an earlier run left off, set this property to that run's `loop_count`.
        """
        return self.engine.run.loops

    @loop_count.setter
    def loop_count(self, value: int) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"loop_count must be a non-negative int, got {value!r}.")
        run = self.engine.run
        if value != run.loops:  # Outputs that no action has read yet belong to a different run.
            run.begin(dataclasses.replace(run.now, loops=value))
