"""Evaluations of the state during training, or of checkpoints as they are saved."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any, final

from absl import logging

from jaxloop import agreement, checkpoint, checks, metrics, timing, types
from jaxloop.action_loop import ActionLoop
from jaxloop.feed import as_iterator
from jaxloop.history import History
from jaxloop.position import PositionedIterator
from jaxloop.schedules import Elapsed, Schedule
from jaxloop.sources import keeping_random_state
from jaxloop.specs import CheckpointSpec, EvalContext, EvalSpec
from jaxloop.whole_run import elapsed_at

_POLL_SECS = 0.2


@final
@dataclasses.dataclass(eq=False)
class Evaluation:
    """One of the evaluations in a call to an `OuterLoop`.

    Attributes:
      loop: The eval loop.
      spec: The dataset and the interval of the evaluation.
      source: The positioned iterator that successive evaluations keep reading from; None if each one reads the dataset
        from the start.
      evaluated_at: The step after which the evaluation last ran; None if it hasn't run yet.
      was_short: True once the warning about a dataset that ended early has been logged.
    """

    loop: ActionLoop
    spec: EvalSpec
    source: PositionedIterator | None = None
    evaluated_at: int | None = None
    was_short: bool = False

    def run(self, state: Any, elapsed: Elapsed) -> metrics.LoopOutputs:
        """Evaluates a state at the given training progress, and returns the outputs."""
        loop, spec, run_info = self.loop, self.spec, self.loop.engine.moments.run
        assert run_info is not None
        run_info.elapsed, self.evaluated_at = elapsed, elapsed.steps
        dataset = spec.data if self.source is None else self.source
        with keeping_random_state(dataset):
            _, outputs = loop(state, as_iterator(dataset), spec.num_steps, return_state_from_step=False)
        if not hasattr(dataset, "__next__"):  # The next evaluation starts over, so batches read ahead are useless.
            loop.forget_batches()
        return outputs

    def check_length(self) -> None:
        """Raises an error if the last evaluation was empty. Warns once if it had fewer than `num_steps` batches."""
        steps_run = len(self.loop.num_examples)
        if steps_run == 0:
            raise self.spec.empty()
        if steps_run < (self.spec.num_steps or 0) and not self.was_short:
            self.was_short = True
            logging.warning(
                "An eval dataset ended after %d of num_steps=%d batches. Its metrics are means over these %d batches.",
                steps_run,
                self.spec.num_steps,
                steps_run,
            )

    def call_missed_actions(self, state: Any, elapsed: Elapsed) -> bool:
        """Calls the end actions that were skipped because of an exception. Returns True if the run continues."""
        engine, run_info = self.loop.engine, self.loop.engine.moments.run
        if not engine.progress.is_ending or run_info is None:
            return True
        run_info.elapsed, self.evaluated_at = elapsed, elapsed.steps
        return engine.call_missed_actions(state)


@final
@dataclasses.dataclass(eq=False)
class Evaluations:
    """All evaluations in a call to an `OuterLoop`.

    Attributes:
      items: The evaluations.
      job: The processes that evaluate together.
      stopwatch: The stopwatch that measures the time spent on evaluations; None if the call doesn't train.
      is_resumed: True if the run has just resumed.
    """

    items: Sequence[Evaluation]
    job: agreement.Job
    stopwatch: timing.Stopwatch | None
    is_resumed: bool = False

    def resume(self, step_num: int, measured: set[str]) -> None:
        """Resumes at a step. `measured` contains the names of the evaluations that were already done at this step."""
        self.is_resumed = True
        for each in self.items:
            each.evaluated_at = step_num if each.spec.name in measured else None

    def evaluate(self, state: Any, elapsed: Elapsed, at_end: bool) -> bool:
        """Runs the evaluations that are due at a training step, and returns True if training continues.

        Args:
          state: The train state.
          elapsed: The training progress.
          at_end: True if a train loop ended at this step.
        """
        is_resumed, self.is_resumed = self.is_resumed, False
        continues = [each.call_missed_actions(state, elapsed) for each in self.items] if is_resumed else []
        asked = [each for each in self.items if at_end or isinstance(each.spec.when_due, Schedule)]
        outputs = self._run_due(state, asked, EvalContext(False, elapsed.steps, elapsed.loops), elapsed)
        if elapsed.is_last and not self.job.requests.requested:
            for each in self.items:
                moments = each.loop.engine.moments
                if moments.run is not None and moments.run.elapsed is not None:
                    moments.run_moment(state, is_last=True)  # Calls the actions that are due at the last step.
        return all(continues) and not _asks_to_stop(outputs)

    def once(self, state: Any, step_num: int) -> metrics.LoopOutputs | None:
        """Evaluates a state without training. Returns the outputs of the last evaluation, or None if none was due."""
        return self._run_due(state, self.items, EvalContext(False, step_num, 0), Elapsed(step_num))

    def of_checkpoints(self, state: Any, spec: CheckpointSpec, history: History) -> metrics.LoopOutputs | None:
        """Evaluates checkpoints in step order as they are saved, and returns the outputs of the last evaluation.

        Args:
          state: A state with the same structure as those in the checkpoints.
          spec: The spec that contains the checkpoint directory and the options for reading checkpoints.
          history: The history to add rows to. Existing rows at or after the first checkpoint's step are dropped.
        """
        stop_fn, requests = spec.iterate_stop_fn or spec.stopped_file.exists, self.job.requests
        outputs, seen, may_write = None, set(), False
        if not spec.checkpoint_dir.exists():
            logging.warning("Waiting for checkpoints in %s, which doesn't exist yet.", spec.checkpoint_dir)
        while True:
            # Call stop_fn before listing, so that everything saved before the stop is found.
            is_complete, found = self.job.gather([stop_fn(), checkpoint.all_steps(spec.checkpoint_dir)])[0]
            for step_num in [step_num for step_num in found if step_num not in seen]:
                seen.add(step_num)
                restored = _restore(state, spec, step_num)
                if self.job.any_stops(restored is None) or restored is None:
                    continue
                if not may_write:  # Not before a checkpoint fits the state.
                    history.resume(step_num - 1)
                    may_write = True
                context = EvalContext(True, step_num, loop_count=len(seen) - 1)
                outputs = self._run_due(restored[0], self.items, context, restored[1]) or outputs
                if _asks_to_stop(outputs) or requests.requested:
                    return outputs
            if is_complete or requests.requested:
                return outputs
            self._sleep(max(spec.iterate_interval_secs, _POLL_SECS))

    def _sleep(self, seconds: float) -> None:
        """Sleeps in short intervals, so that Ctrl-C works. All processes use the same number of intervals."""
        num_sleeps = math.ceil(seconds / (1.0 if self.job.is_shared else _POLL_SECS))
        for _ in range(num_sleeps):
            if self.job.requests.requested:
                break
            time.sleep(seconds / num_sleeps)
            self.job.any_stops()

    def _run_due(
        self, state: Any, asked: Sequence[Evaluation], context: EvalContext, elapsed: Elapsed
    ) -> metrics.LoopOutputs | None:
        """Runs the evaluations in `asked` that are due, and returns the outputs of the last one."""
        last, stops = None, False
        for each in [each for each in asked if self._is_due(each, context, elapsed)]:
            if self.job.requests.requested:
                break
            with contextlib.nullcontext() if self.stopwatch is None else self.stopwatch.counting("evals"):
                last = each.run(state, elapsed)
                if not self.job.requests.requested:
                    each.check_length()
                if each.loop.was_interrupted:
                    break
                stops = not each.loop.engine.moments.call_last(state) or stops or last.asks_to_stop
        else:
            stops = self.job.any_stops(stops) if last is not None else stops
        if last is not None and stops:
            last[types.STOP_LOOP] = True
        return last

    def _is_due(self, evaluation: Evaluation, context: EvalContext, elapsed: Elapsed) -> bool:
        spec, is_in_training = evaluation.spec, elapsed.previous is not None
        if is_in_training and evaluation.evaluated_at == elapsed.steps:
            return False
        if isinstance(spec.when_due, Schedule):
            if is_in_training and not spec.when_due(elapsed):
                return False
        elif not context.is_continuous_eval and context.loop_count % spec.when_due:
            return False
        return spec.should_eval_fn is None or self.job.from_first_process(bool(spec.should_eval_fn(context)))


def _restore(state: Any, spec: CheckpointSpec, step_num: int) -> tuple[Any, Elapsed] | None:
    """Returns the state and progress stored in a checkpoint, or None if the training run has since deleted it."""
    directory = spec.checkpoint_dir
    try:
        restored = checkpoint.restore(
            directory, step_num, checks.adopt(state), transforms=spec.transforms, any_optimizer=True
        )
        return restored, elapsed_at(directory, step_num).without_previous()
    except Exception:
        if not checkpoint.is_being_deleted(directory, step_num):
            raise
        logging.warning("The checkpoint of step %d was deleted before it could be evaluated.", step_num)
        return None


def _asks_to_stop(outputs: metrics.LoopOutputs | None) -> bool:
    return outputs is not None and outputs.asks_to_stop
