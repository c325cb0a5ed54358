"""A loop with actions before, inside and after it."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from jaxloop import metrics, types
from jaxloop.actions.action import Action
from jaxloop.actions.action_list import ActionList
from jaxloop.engine.agenda import Agenda
from jaxloop.stat_loop import StatLoop
from jaxloop.step import Step


class ActionLoop(StatLoop):
    """Calls actions when the loop begins, when it ends, and inside it where their schedule says so.

    Hooks:
      begin, end: see `Loop`; call those of `super()`, which measure, and call the actions.
      run, update_outputs, _get_next_batch, _run_one_step: see `Loop`.

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
      step: what happens to one batch.
      begin_actions: called in their order when the loop begins, with `outputs=None`. An int interval counts loops; a
        schedule is asked then, whether it fired since the last beginning.
      end_actions: called with the outputs since their last call. An int interval counts loops, and they are called
        when the loop ends; with a schedule they are called after exactly that step. Those that come last
        (`Action.comes_last`, as checkpoints do) follow the others, and the evaluations of an `OuterLoop`.
      stat_names: see `StatLoop`, as all that follows.

    A loop on its own waits at the end of each call for what the actions have begun, such as an asynchronous save.
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
        max_steps_in_flight: int | None = None,
    ):
        super().__init__(step, stat_names, global_batch_size, clock=clock, max_steps_in_flight=max_steps_in_flight)
        self.engine.moments.beginnings = ActionList(begin_actions, unit="loops")
        self.engine.moments.agenda = Agenda(ActionList(end_actions, unit="loops"))

    @property
    def begin_actions(self) -> Sequence[Action]:
        """The actions when the loop begins."""
        return self.engine.moments.beginnings.actions

    @property
    def end_actions(self) -> Sequence[Action]:
        """The actions after the steps."""
        return self.engine.moments.agenda.actions.actions

    @property
    def action_lists(self) -> Sequence[ActionList]:
        """All actions, the step's too, and how often each has been called."""
        return self.engine.action_lists

    @property
    def actions(self) -> Sequence[Action]:
        """All actions, the step's too, each of them once."""
        return list({id(action): action for each in self.action_lists for action in each.actions}.values())

    @property
    def loop_count(self) -> int:
        """How many loops have ended. Set it to go on with the intervals of an earlier run."""
        return self.engine.progress.loops

    @loop_count.setter
    def loop_count(self, value: int) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"loop_count must be a non-negative int, got {value!r}.")
        self.engine.set_loops(value)

    def __call__(
        self,
        state: Any,
        dataset_iterator: Iterable[types.Batch] | None,
        num_steps: int | None = None,
        return_state_from_step: bool = True,
    ) -> tuple[Any, metrics.LoopOutputs]:
        try:
            result = super().__call__(state, dataset_iterator, num_steps, return_state_from_step)
        except BaseException:
            self.engine.moments.flush(raise_errors=False)
            raise
        self.engine.moments.flush(raise_errors=True)
        return result

    def begin(self, state: Any, dataset: Any) -> tuple[Any, Iterator[types.Batch]]:
        state, iterator = super().begin(state, dataset)
        self.engine.begin(state)
        return state, iterator

    def end(self, state: Any, outputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        state, outputs = super().end(state, outputs)
        self.engine.end(state, outputs)
        return state, outputs
