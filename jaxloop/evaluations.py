"""The evaluations of an experiment: which are due when; of the state in training, or of checkpoints as they appear."""

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
from jaxloop.schedules import Elapsed
from jaxloop.sources import keeping_random_state
from jaxloop.specs import CheckpointSpec, EvalContext, EvalSpec
from jaxloop.whole_run import elapsed_at

_POLL_SECS = 0.2


@final
@dataclasses.dataclass(eq=False)
class Evaluation:
    """An evaluation of one call of an `OuterLoop`.

    Attributes:
      loop: its loop.
      spec: on what it evaluates, and when.
      source: counts the batches of the iterator that it goes on with; None where it begins anew each time.
      evaluated_at: the step after which it was run last.
      was_short: whether the log has said that its data ended early.
    """

    loop: ActionLoop
    spec: EvalSpec
    source: PositionedIterator | None = None
    evaluated_at: int | None = None
    was_short: bool = False

    def run(self, state: Any, elapsed: Elapsed) -> metrics.LoopOutputs:
        """Evaluates a state of a training that is so far; returns the outputs."""
        loop, spec, run_info = self.loop, self.spec, self.loop.engine.moments.run
        assert run_info is not None
        run_info.elapsed, self.evaluated_at = elapsed, elapsed.steps
        dataset = spec.dataset if self.source is None else self.source
        with keeping_random_state(dataset):
            _, outputs = loop(state, as_iterator(dataset), spec.num_steps, return_state_from_step=False)
        if not hasattr(dataset, "__next__"):  # The next time it begins anew: what draws ahead may end.
            loop.forget_batches()
        return outputs

    def check_length(self) -> None:
        """Raises if the last evaluation had no batch; warns, once, if it had fewer than asked for."""
        steps_run = len(self.loop.num_examples)
        if steps_run == 0:
            raise self.spec.empty()
        if steps_run < (self.spec.num_steps or 0) and not self.was_short:
            self.was_short = True
            logging.warning(
                "An eval dataset ended after %d of num_steps=%d batches; its metrics are those of %d batches.",
                steps_run,
                self.spec.num_steps,
                steps_run,
            )

    def end_again(self, state: Any, elapsed: Elapsed) -> bool:
        """Calls what an exception in an end action has kept from being called; returns whether the run goes on."""
        engine, run_info = self.loop.engine, self.loop.engine.moments.run
        if not engine.progress.is_ending or run_info is None:
            return True
        run_info.elapsed, self.evaluated_at = elapsed, elapsed.steps
        return engine.end_again(state)


@final
@dataclasses.dataclass(eq=False)
class Evaluations:
    """The evaluations of one call of an `OuterLoop`.

    Attributes:
      items: each of them.
      job: the processes that evaluate together.
      stopwatch: counts what they take of a training; None where nothing is trained.
      is_resumed: whether the run has just been resumed.
    """

    items: Sequence[Evaluation]
    job: agreement.Job
    stopwatch: timing.Stopwatch | None
    is_resumed: bool = False

    def resume(self, step_num: int, measured: set[str]) -> None:
        """Goes on after a step at which an earlier run has measured these: they are not measured there once more."""
        self.is_resumed = True
        for each in self.items:
            each.evaluated_at = step_num if each.spec.name in measured else None

    def evaluate(self, state: Any, elapsed: Elapsed, at_end: bool) -> bool:
        """Runs what is due at a step of a training, and was not run there; returns whether the training goes on.

        Args:
          state: the train state.
          elapsed: how far the training is.
          at_end: whether a train loop has ended there.
        """
        is_resumed, self.is_resumed = self.is_resumed, False
        goes_on = [each.end_again(state, elapsed) for each in self.items] if is_resumed else []
        asked = [each for each in self.items if at_end or each.spec.schedule is not None]
        outputs = self._run_due(state, asked, EvalContext(False, elapsed.steps, elapsed.loops), elapsed)
        if elapsed.is_last and not self.job.requests.requested:
            for each in self.items:
                moments = each.loop.engine.moments
                if moments.run is not None and moments.run.elapsed is not None:
                    moments.hold(state, is_last=True)  # Its actions whose schedule waits for the last step.
        return all(goes_on) and not _asks_to_stop(outputs)

    def once(self, state: Any, step_num: int) -> metrics.LoopOutputs | None:
        """Evaluates a state that nobody trains; returns the outputs of the last evaluation, None where none was due."""
        return self._run_due(state, self.items, EvalContext(False, step_num, 0), Elapsed(step_num))

    def of_checkpoints(self, state: Any, spec: CheckpointSpec, history: History) -> metrics.LoopOutputs | None:
        """Evaluates each checkpoint as it appears, in the order of their steps; returns the last outputs.

        Args:
          state: such as those in the checkpoints.
          spec: where they are.
          history: is gone on with from before the first of them.
        """
        stop_fn, requests = spec.iterate_stop_fn or spec.stopped_file.exists, self.job.requests
        outputs, seen = None, set()
        history.resume(min(checkpoint.all_steps(spec.checkpoint_dir), default=1) - 1)
        while True:
            # Asked before looking: what was saved before the stop is still found.
            no_more_will_come, found = self.job.gather([stop_fn(), checkpoint.all_steps(spec.checkpoint_dir)])[0]
            for step_num in [step_num for step_num in found if step_num not in seen]:
                seen.add(step_num)
                restored = _restore(state, spec, step_num)
                if self.job.any_stops(restored is None) or restored is None:
                    continue
                context = EvalContext(True, step_num, loop_count=len(seen) - 1)
                outputs = self._run_due(restored[0], self.items, context, restored[1]) or outputs
                if _asks_to_stop(outputs) or requests.requested:
                    return outputs
            if no_more_will_come or requests.requested:
                return outputs
            self._sleep(max(spec.iterate_interval_secs, _POLL_SECS))

    def _sleep(self, seconds: float) -> None:
        """Sleeps in short pieces, for Ctrl-C not to wait long; all processes as many."""
        pieces = math.ceil(seconds / (1.0 if self.job.is_shared else _POLL_SECS))
        for _ in range(pieces):
            if self.job.requests.requested:
                break
            time.sleep(seconds / pieces)
            self.job.any_stops()

    def _run_due(
        self, state: Any, asked: Sequence[Evaluation], context: EvalContext, elapsed: Elapsed
    ) -> metrics.LoopOutputs | None:
        """Runs those that are due, of some; returns the outputs of the last of them."""
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
        if spec.schedule is not None and is_in_training:
            if not spec.schedule(elapsed):
                return False
        elif not context.is_continuous_eval and context.loop_count % (spec.eval_loop_interval or 1):
            return False
        return spec.should_eval_fn is None or self.job.first_says(bool(spec.should_eval_fn(context)))


def _restore(state: Any, spec: CheckpointSpec, step_num: int) -> tuple[Any, Elapsed] | None:
    """Returns the state of a checkpoint and how far the run was; None where the training deletes it meanwhile."""
    directory = spec.checkpoint_dir
    try:
        restored = checkpoint.restore(directory, step_num, checks.adopt(state), transforms=spec.transforms)
        return restored, elapsed_at(directory, step_num).without_previous()
    except Exception:
        if not checkpoint.is_being_deleted(directory, step_num):
            raise
        logging.warning("The checkpoint of step %d was deleted before it could be evaluated.", step_num)
        return None


def _asks_to_stop(outputs: metrics.LoopOutputs | None) -> bool:
    return outputs is not None and outputs.asks_to_stop
