"""The evaluations of an experiment: which are due when; of the state in training, or of checkpoints as they appear."""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, final

from absl import logging

from jaxloop import agreement, checkpoint, checks, interrupt, metrics, types
from jaxloop.action_loop import ActionLoop
from jaxloop.feed import as_iterator
from jaxloop.history import History
from jaxloop.position import PositionedIterator
from jaxloop.schedules import Elapsed, Schedule
from jaxloop.sources import keeping_random_state
from jaxloop.specs import CheckpointSpec, EvalContext, EvalSpec, names_of
from jaxloop.whole_run import elapsed_at

_POLL_SECS = 0.2


@final
class Evaluations:
    """The evaluations of one call of an `OuterLoop`.

    Args:
      loops: one for each spec.
      specs: on what each evaluates, and when.
      source_of: what counts the batches of an iterator that an evaluation goes on with.
      counting: opens a context whose time goes to evaluations.
      job: the processes that evaluate together.
      requests: which signals have come.

    Attributes:
      names: what the history calls each.
      sources: of those that go on with an iterator, by name, what counts its batches.
    """

    def __init__(
        self,
        loops: Sequence[ActionLoop],
        specs: Sequence[EvalSpec],
        *,
        source_of: Callable[[Any], PositionedIterator],
        counting: Callable[[], AbstractContextManager[None]],
        job: agreement.Job,
        requests: interrupt.Interruptible,
    ):
        self.names: list[str] = names_of(specs)
        self.sources: dict[str, PositionedIterator] = {
            name: source_of(spec.dataset_iterator)
            for name, spec in zip(self.names, specs, strict=True)
            if spec.dataset_iterator is not None
        }
        self._all = list(zip(self.names, loops, specs, strict=True))
        self._counting, self._job, self._interrupt = counting, job, requests
        self._evaluated_at: dict[str, int] = {}  # By name: after which step, last.
        self._is_resumed = False
        self._short: set[str] = set()  # Of which it was said that their data ended early.

    @property
    def loops(self) -> dict[str, ActionLoop]:
        """The loops by name."""
        return {name: loop for name, loop, _ in self._all}

    def count_train_loops(self, number: int) -> None:
        """Has intervals go on after so many train loops, where an earlier run has left off."""
        for _, loop, spec in self._all:
            if spec.should_eval_fn is None and spec.schedule is None:
                loop.loop_count = number // (spec.eval_loop_interval or 1)

    def resume(self, step_num: int, measured: set[str]) -> None:
        """Goes on after a step at which an earlier run has measured these: they are not measured there once more."""
        self._evaluated_at, self._is_resumed = dict.fromkeys(measured, step_num), True

    @property
    def intervals(self) -> list[int | Schedule]:
        """When each may be due in training, as the intervals of actions."""
        return [spec.interval for _, _, spec in self._all]

    # Of the state in training --------------------------------------------------------------------

    def evaluate(self, state: Any, elapsed: Elapsed, at_end: bool) -> bool:
        """Runs what is due at a step, and was not run there; returns whether the training goes on.

        Args:
          state: the train state.
          elapsed: how far the training is.
          at_end: whether a train loop has ended there.
        """
        goes_on, is_resumed, self._is_resumed = True, self._is_resumed, False
        for name, loop, _ in self._all if is_resumed else ():
            if loop.is_ending and loop.run_info is not None:  # Only its actions are left to be called.
                loop.run_info.elapsed, self._evaluated_at[name] = elapsed, elapsed.steps
                goes_on &= loop.end_again(state)
        asked = [each for each in self._all if at_end or each[2].schedule is not None]
        outputs = self._run_due(state, asked, _context(elapsed), elapsed)
        for _, loop, _ in self._all if elapsed.is_last and not self._interrupt.requested else ():
            if loop.run_info is not None and loop.run_info.elapsed is not None:
                loop.hold(state, is_last=True)  # Its actions whose schedule waits for the last step.
        return _goes_on(outputs) and goes_on

    # Of a state that nobody trains ---------------------------------------------------------------

    def once(self, state: Any, step_num: int) -> metrics.LoopOutputs | None:
        """Evaluates a state; returns the outputs of the last evaluation, None where none was due."""
        elapsed = Elapsed(step_num)
        return self._run_due(state, self._all, _context(elapsed), elapsed)

    def of_checkpoints(self, state: Any, spec: CheckpointSpec, history: History) -> metrics.LoopOutputs | None:
        """Evaluates each checkpoint as it appears, in the order of their steps; returns the last outputs.

        Args:
          state: such as those in the checkpoints.
          spec: where they are.
          history: is gone on with from before the first of them.
        """
        stop_fn = spec.iterate_stop_fn or spec.stopped_file.exists
        outputs, seen = None, set()
        history.resume(min(checkpoint.all_steps(spec.checkpoint_dir), default=1) - 1)
        while True:
            # Asked before looking: what was saved before the stop is still found.
            no_more_will_come = stop_fn()
            found = checkpoint.all_steps(spec.checkpoint_dir)
            no_more_will_come, found = self._job.first_sees([no_more_will_come, found])
            for step_num in [step_num for step_num in found if step_num not in seen]:
                seen.add(step_num)
                restored = self._restore(state, spec, step_num)
                if self._job.any_stops(restored is None) or restored is None:
                    continue
                restored_state, elapsed = restored
                context = EvalContext(is_continuous_eval=True, step_num=step_num, loop_count=len(seen) - 1)
                outputs = self._run_due(restored_state, self._all, context, elapsed) or outputs
                if not _goes_on(outputs) or self._interrupt.requested:
                    return outputs
            if no_more_will_come or self._interrupt.requested:
                return outputs
            self._sleep(max(spec.iterate_interval_secs, _POLL_SECS))

    def _restore(self, state: Any, spec: CheckpointSpec, step_num: int) -> tuple[Any, Elapsed] | None:
        """The state of a checkpoint and how far the run was; None where the training deletes it at the same time."""
        directory = spec.checkpoint_dir
        try:
            restored = checkpoint.restore(directory, step_num, checks.adopt(state), transforms=spec.transforms)
            return restored, elapsed_at(directory, step_num).without_previous()
        except Exception:
            if not checkpoint.is_being_deleted(directory, step_num):
                raise
            logging.warning("The checkpoint of step %d was deleted before it could be evaluated.", step_num)
            return None

    def _sleep(self, seconds: float) -> None:
        """Sleeps in short pieces, for Ctrl-C not to wait long; all processes as many."""
        pieces = math.ceil(seconds / (1.0 if self._job.is_shared else _POLL_SECS))
        for _ in range(pieces):
            if self._interrupt.requested:
                break
            time.sleep(seconds / pieces)
            self._job.any_stops()

    # What both do --------------------------------------------------------------------------------

    def _run_due(
        self, state: Any, asked: Sequence[tuple[str, ActionLoop, EvalSpec]], context: EvalContext, elapsed: Elapsed
    ) -> metrics.LoopOutputs | None:
        """Runs those that are due, of some; returns the outputs of the last of them."""
        was_run = lambda name: elapsed.previous is not None and self._evaluated_at.get(name) == elapsed.steps
        due = [each for each in asked if not was_run(each[0]) and self._is_due(each[2], context, elapsed)]
        last, stops = None, False
        for name, loop, spec in due:
            if self._interrupt.requested:
                break
            self._evaluated_at[name] = elapsed.steps
            with self._counting():
                last = self._run(name, loop, spec, state, elapsed)
                if loop.was_interrupted:
                    break
                stops = not loop.call_last(state) or stops or last.asks_to_stop
        else:
            stops = self._job.any_stops(stops) if last is not None else stops
        if last is not None and stops:
            last[types.STOP_LOOP] = True
        return last

    def _run(self, name: str, loop: ActionLoop, spec: EvalSpec, state: Any, elapsed: Elapsed) -> metrics.LoopOutputs:
        assert loop.run_info is not None
        loop.run_info.elapsed = elapsed
        dataset = self.sources.get(name, spec.dataset)
        with keeping_random_state(dataset):
            _, outputs = loop(state, as_iterator(dataset), spec.num_steps, return_state_from_step=False)
        if not hasattr(dataset, "__next__"):  # The next time it begins anew: what draws ahead may end.
            loop.forget_batches()
        steps_run = len(loop.num_examples)
        if not self._interrupt.requested:
            self._check_length(name, spec, steps_run)
        return outputs

    def _check_length(self, name: str, spec: EvalSpec, steps_run: int) -> None:
        if steps_run == 0:
            raise spec.empty()
        if spec.num_steps is not None and steps_run < spec.num_steps and name not in self._short:
            self._short.add(name)  # Once a run.
            logging.warning(
                "An eval dataset ended after %d of num_steps=%d batches; its metrics are those of %d batches.",
                steps_run,
                spec.num_steps,
                steps_run,
            )

    def _is_due(self, spec: EvalSpec, context: EvalContext, elapsed: Elapsed) -> bool:
        if spec.schedule is not None and elapsed.previous is not None:
            if not spec.schedule(elapsed):
                return False
        elif not context.is_continuous_eval and context.loop_count % (spec.eval_loop_interval or 1):
            return False
        return spec.should_eval_fn is None or self._job.first_says(bool(spec.should_eval_fn(context)))


def _context(elapsed: Elapsed) -> EvalContext:
    return EvalContext(is_continuous_eval=False, step_num=elapsed.steps, loop_count=elapsed.loops)


def _goes_on(outputs: metrics.LoopOutputs | None) -> bool:
    return outputs is None or not outputs.asks_to_stop
