"""Evaluations of the current state during training, or of checkpoints as they appear."""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, final

from absl import logging

from jaxloop import checkpoint, metrics, types
from jaxloop.action_loop import ActionLoop
from jaxloop.base import checks
from jaxloop.data.position import PositionedIterator
from jaxloop.data.sources import keeping_random_state
from jaxloop.distributed import agreement
from jaxloop.engine.agenda import Item, Moment, Rank
from jaxloop.engine.feed import as_iterator
from jaxloop.engine.run import Plan
from jaxloop.history import History
from jaxloop.outer_loop.specs import CheckpointSpec, EvalContext, EvalSpec
from jaxloop.outer_loop.whole_run import elapsed_at, step_num_of
from jaxloop.schedules import Elapsed, Schedule, last

_POLL_SECS = 0.2


@final
class Recorder(Item):
    """An agenda item that adds a row to the history."""

    name = "Recorder"

    def __init__(self, history: History, part: str, interval: int | Schedule):
        super().__init__(Rank.ROW, "all")
        if not isinstance(interval, Schedule):
            checks.check_positive("log_interval", interval)
        self.interval: int | Schedule | None = interval  # Commands can change it.
        self._history, self._part = history, part

    def call(self, moment: Moment) -> bool:
        outputs = moment.outputs
        assert outputs is not None
        for name in [name for name in outputs if name.startswith("jaxloop/")]:
            del outputs[name]
        try:
            if measured := metrics.summarize(outputs):
                self._history.commit(moment.now, {self._part: measured})
        except Exception as error:
            error.add_note(f"in the history's row of {self._part!r}, after step {moment.now.steps}")
            raise
        return True


@final
class Evaluation(Item):
    """An evaluation with its eval loop. During training, it is an item on the train loop's agenda.

    Args:
      loop: The eval loop.
      spec: The dataset and the interval of the evaluation.
      source: The iterator from which each evaluation reads the next batches. None if each evaluation reads the dataset
        from the start.
      history: The history to add rows to.
      context: Additional keyword arguments for the actions of the eval loop.
    """

    time_category = "evals"

    def __init__(
        self,
        loop: ActionLoop,
        spec: EvalSpec,
        source: PositionedIterator | None,
        history: History,
        context: Mapping[str, Any],
    ):
        super().__init__(Rank.EVALUATION)
        self.loop: ActionLoop = loop
        self.spec: EvalSpec = spec
        self.source: PositionedIterator | None = source
        self.name: str = f"evaluation {spec.name}"
        self.interval: int | Schedule | None = spec.when_due
        self._context = context
        self._row = Recorder(history, spec.name, 1)
        self._was_short = False
        self._plan_at(Elapsed())

    def _plan_at(self, now: Elapsed) -> None:
        """Sets the eval loop's plan for an evaluation at `now`, which is the run's progress."""
        self.loop.engine.set_plan(Plan(items=[self._row], context=self._context, at=now))

    def call(self, moment: Moment) -> bool:
        now, engine, agenda = moment.now, self.loop.engine, self.loop.engine.run.agenda
        is_measured = self._row.called_at == now.steps
        if is_measured:  # Before the checkpoint, an exception kept actions of the eval loop from being called.
            stopped_by = agenda.stopped_by
            self._plan_at(now)
            engine.hold_now(moment.state, is_last=now.is_last, at_end=True)
            agenda.stopped_by = stopped_by or agenda.stopped_by
        elif self.evaluate(moment.state, now, EvalContext(False, now.steps, now.loops)) is None:
            return True
        if agenda.wants_stop and moment.outputs is not None:
            moment.outputs[types.STOP_LOOP] = True
        return is_measured or not engine.outcome.is_interrupted

    @property
    def was_measured(self) -> bool:
        """True if the evaluation has run at least once."""
        return self.loop.loop_count > 0

    def evaluate(self, state: Any, now: Elapsed, context: EvalContext) -> metrics.LoopOutputs | None:
        """Evaluates a state and returns the outputs, or None if `should_eval_fn` returns False."""
        spec, engine, loop = self.spec, self.loop.engine, self.loop
        should = spec.should_eval_fn
        if should is not None and not engine.job.from_first_process(bool(should(context))):
            return None
        self._plan_at(now)
        dataset = spec.data if self.source is None else self.source
        with keeping_random_state(dataset):
            _, outputs = loop(state, as_iterator(dataset), spec.num_steps, return_state_from_step=False)
        if not hasattr(dataset, "__next__"):  # The next evaluation starts over, so batches read ahead are useless.
            engine.data.forget()
        if not engine.job.requests.requested:
            self._check_length()
        return outputs

    def _check_length(self) -> None:
        """Raises an error if the evaluation had no batches. Warns once if it had fewer than `num_steps` batches."""
        number, wanted = len(self.loop.num_examples), self.spec.num_steps
        if number == 0:
            raise self.spec.empty()
        if number < (wanted or 0) and not self._was_short:
            self._was_short = True
            text = "An eval dataset ended after %d of num_steps=%s batches. Its metrics are means over those it has."
            logging.warning(text, number, wanted)


@final
class LastActions(Item):
    """An agenda item that calls an eval loop's actions at the end of training if they are due then."""

    interval: int | Schedule | None = last()

    def __init__(self, evaluation: Evaluation):
        super().__init__(Rank.AFTER_EVALUATIONS)
        self.name: str = f"last actions of {evaluation.name}"
        self._evaluation = evaluation

    def call(self, moment: Moment) -> bool:
        if self._evaluation.was_measured:
            self._evaluation.loop.engine.hold_now(moment.state, is_last=True)
        return True


def evaluate(
    state: Any, evaluations: Sequence[Evaluation], spec: CheckpointSpec | None, history: History, job: agreement.Job
) -> metrics.LoopOutputs | None:
    """Evaluates a state or, with a `CheckpointSpec`, each checkpoint as it appears, in step order.

    Args:
      state: The state to evaluate or, with a `CheckpointSpec`, a state with the same structure as the saved states.
      evaluations: The evaluations.
      spec: The checkpoint directory and the options for reading checkpoints. If None, `state` is evaluated.
      history: The history to add rows to. Existing rows at or after the first evaluated step are dropped.
      job: The processes that evaluate together.

    Returns:
      The outputs of the last evaluation, or None if no evaluation ran.
    """
    if spec is None:
        step_num = step_num_of(state)
        history.resume(step_num - 1)
        return _evaluate_all(state, evaluations, EvalContext(False, step_num, 0), Elapsed(step_num))
    stop_fn, requests = spec.iterate_stop_fn or spec.stopped_file.exists, job.requests
    outputs, seen, may_write = None, set(), False
    if not spec.checkpoint_dir.exists():
        logging.warning("Waiting for checkpoints in %s, which doesn't exist yet.", spec.checkpoint_dir)
    while True:
        # Call stop_fn before listing, so that everything saved before the stop is found.
        is_complete, found = job.gather([stop_fn(), checkpoint.all_steps(spec.checkpoint_dir)])[0]
        for step_num in [step_num for step_num in found if step_num not in seen]:
            seen.add(step_num)
            restored = _restore(state, spec, step_num)
            if job.any_stops(restored is None) or restored is None:
                continue
            if not may_write:  # Not before a checkpoint fits the state.
                history.resume(step_num - 1)
                may_write = True
            context = EvalContext(True, step_num, loop_count=len(seen) - 1)
            outputs = _evaluate_all(restored[0], evaluations, context, restored[1]) or outputs
            if requests.requested or (outputs is not None and outputs.asks_to_stop):
                return outputs
        if is_complete or requests.requested:
            return outputs
        _sleep(max(spec.iterate_interval_secs, _POLL_SECS), job)


def _sleep(seconds: float, job: agreement.Job) -> None:
    """Sleeps for several short intervals (the same number in all processes), so that Ctrl-C takes effect promptly."""
    num_sleeps = math.ceil(seconds / (1.0 if job.is_shared else _POLL_SECS))
    for _ in range(num_sleeps):
        if job.requests.requested:
            break
        time.sleep(seconds / num_sleeps)
        job.any_stops()


def _evaluate_all(
    state: Any, evaluations: Sequence[Evaluation], context: EvalContext, now: Elapsed
) -> metrics.LoopOutputs | None:
    """Runs the evaluations that are due. Returns the outputs of the last one, or None if none ran."""
    last, stops = None, False
    for each in evaluations:
        engine, interval = each.loop.engine, each.spec.when_due
        is_due = context.is_continuous_eval or isinstance(interval, Schedule) or context.loop_count % interval == 0
        if is_due and not engine.job.requests.requested:
            for item in engine.run.agenda.items:
                item.called_at = None  # Another state may have the same step.
            last = each.evaluate(state, now, context) or last
            stops |= engine.run.agenda.wants_stop
    if last is not None and stops:
        last[types.STOP_LOOP] = True
    return last


def _restore(state: Any, spec: CheckpointSpec, step_num: int) -> tuple[Any, Elapsed] | None:
    """Returns the state and progress stored in a checkpoint, or None if the checkpoint no longer exists."""
    directory, given = spec.checkpoint_dir, checks.adopt(state)
    try:
        restored = checkpoint.restore(directory, step_num, given, transforms=spec.transforms, any_optimizer=True)
        return restored, elapsed_at(directory, step_num).without_previous()
    except Exception:
        if not checkpoint.is_being_deleted(directory, step_num):
            raise
        logging.warning("The checkpoint of step %d was deleted before it could be evaluated.", step_num)
        return None
