"""A loop with actions before and after it."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxloop import metrics, types
from jaxloop.actions.action import Action, ActionList
from jaxloop.stat_loop import StatLoop
from jaxloop.step import Step


class ActionLoop(StatLoop):
    """Calls actions when the loop begins and when it ends.

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

    Args:
      step: what happens to one batch.
      begin_actions: called in their order when the loop begins, with `outputs=None`. Their interval counts loops.
      end_actions: called when the loop ends, with the outputs since their last call; likewise.
      stat_names: see `StatLoop`, as all that follows.

    Attributes:
      flushes_actions: whether the end of a call waits for what its actions have begun, such as an asynchronous save.
        True for a loop on its own; an `OuterLoop` sets it to False, and closes the actions when the run ends.
    """

    def __init__(
        self,
        step: Step,
        begin_actions: Sequence[Action] | None = None,
        end_actions: Sequence[Action] | None = None,
        stat_names: Sequence[str] | None = None,
        global_batch_size: int | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ):
        super().__init__(step, stat_names, global_batch_size, clock=clock)
        self._begin_actions = ActionList(begin_actions, unit="loops")
        self._end_actions = ActionList(end_actions, unit="loops")
        self._loop_count = 0
        self.flushes_actions = True
        # What each end action has not seen yet.
        self._unseen = [metrics.LoopOutputs() for _ in self._end_actions.actions]

    @property
    def begin_actions(self) -> Sequence[Action]:
        """The actions when the loop begins."""
        return self._begin_actions.actions

    @property
    def end_actions(self) -> Sequence[Action]:
        """The actions when the loop ends."""
        return self._end_actions.actions

    @property
    def action_lists(self) -> Sequence[ActionList]:
        """All actions, the step's too, and how often each has been called."""
        return (self._begin_actions, self._end_actions, *self.step.action_lists)

    @property
    def loop_count(self) -> int:
        """How many loops have ended. Set it to go on with the intervals of an earlier run."""
        return self._loop_count

    @loop_count.setter
    def loop_count(self, value: int) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"loop_count must be a non-negative int, got {value!r}.")
        if value != self._loop_count:  # What the actions have not seen yet belongs to another run.
            self._unseen = [metrics.LoopOutputs() for _ in self.end_actions]
        self._loop_count = value

    def begin(self, state: Any, dataset: Any) -> tuple[Any, Iterator[types.Batch]]:
        state, iterator = super().begin(state, dataset)
        for index in range(len(self.begin_actions)):
            if self._begin_actions.is_due(index, self._loop_count + 1):
                self._begin_actions.call(index, state, None, self.step_num)
        return state, iterator

    def end(self, state: Any, outputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        state, outputs = super().end(state, outputs)
        for index, action in enumerate(self.end_actions):
            if not action.uses_outputs:
                self._unseen[index] = metrics.LoopOutputs()
            self._unseen[index].extend(metrics.LoopOutputs(outputs, self.num_examples))
            if self._end_actions.is_due(index, self._loop_count + 1):
                seen, self._unseen[index] = self._unseen[index], metrics.LoopOutputs()
                self._end_actions.call(index, state, seen, self.step_num)
                if self.flushes_actions:
                    action.flush()
                if types.STOP_LOOP in seen:
                    outputs[types.STOP_LOOP] = seen[types.STOP_LOOP]
        self._loop_count += 1
        return state, outputs
