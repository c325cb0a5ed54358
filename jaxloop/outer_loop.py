"""The experiment: training, evaluation by their specs, resuming, stopping."""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, final

import numpy as np
from absl import logging
from etils import epath

from jaxloop import agreement, checkpoint, checks, distributed, failures, files, lock, metrics, preflight, types
from jaxloop.action_loop import ActionLoop
from jaxloop.actions.action import Action
from jaxloop.engine.moments import Run
from jaxloop.evaluations import Evaluation, Evaluations
from jaxloop.history import History
from jaxloop.position import PositionedIterator
from jaxloop.schedules import Schedule
from jaxloop.specs import STOPPED_FILE as STOPPED_FILE
from jaxloop.specs import CheckpointSpec, EvalSpec, RunSpec, named
from jaxloop.specs import EvalContext as EvalContext
from jaxloop.timing import Spent
from jaxloop.train_loop import TrainLoop
from jaxloop.training import Training, step_num_of
from jaxloop.types import Batch as Batch
from jaxloop.types import BatchSpec as BatchSpec
from jaxloop.types import Output as Output
from jaxloop.types import State as State
from jaxloop.whole_run import WholeRun, checkpoint_actions, directories_of

STOP_LOOP = types.STOP_LOOP
"""A train or eval loop ends the experiment by `outputs[STOP_LOOP] = True`."""

HISTORY_FILE = "history.jsonl"
"""The file in the work directory with a row of the history on each line."""


@final
class OuterLoop:
    """Runs an experiment: train loops, and after each the evaluations that are due.

    >>> import jaxloop
    >>> from jaxloop import examples
    >>> step, state, batches = examples.tiny_regression()
    >>> outer_loop = OuterLoop(jaxloop.TrainLoop(step), [jaxloop.EvalLoop(step)])
    >>> state, outputs = outer_loop(
    ...     state,
    ...     train_dataset=batches,
    ...     train_total_steps=100,
    ...     train_loop_steps=10,
    ...     eval_specs=[EvalSpec(batches[:3])],
    ... )
    >>> int(state.step), len(outputs["loss"])
    (100, 10)

    Args:
      train_loop: None to evaluate only.
      eval_loops: one for each `EvalSpec` of the call.
      checkpoint_spec: where to resume from, or what to evaluate. None to do neither.
      workdir: the directory of the file `history.jsonl` (`eval_history.jsonl` without a train loop), to which each row
        of the history is written at once, and which a resumed run continues. None for that of the checkpoints, where
        something is trained; for no file, where there is no `checkpoint_spec` either.
      log_interval: when the train metrics since the last time make a row of the history, as an action's interval: an
        int counts train loops.

    >>> steps, losses = outer_loop.history.collect("steps", "eval.loss")
    >>> steps[:3], losses[-1] < losses[0]
    ([10, 20, 30], True)
    """

    def __init__(
        self,
        train_loop: ActionLoop | None = None,
        eval_loops: Sequence[ActionLoop] | None = None,
        checkpoint_spec: CheckpointSpec | None = None,
        *,
        workdir: epath.PathLike | None = None,
        log_interval: int | Schedule = 1,
    ):
        if isinstance(eval_loops, ActionLoop):
            raise TypeError("eval_loops must be a list of loops, got a loop. Write eval_loops=[eval_loop].")
        if checkpoint_spec is not None and not isinstance(checkpoint_spec, CheckpointSpec):
            raise TypeError(f"checkpoint_spec must be a CheckpointSpec, got {checkpoint_spec!r}.")
        self._train_loop = train_loop
        self._eval_loops = tuple(eval_loops or ())
        self._checkpoint_spec = checkpoint_spec
        self._loops = (*(() if train_loop is None else (train_loop,)), *self._eval_loops)
        if not self._loops:
            raise ValueError("OuterLoop needs a train_loop, eval_loops, or both; it got neither.")
        for loop in self._loops:
            if not isinstance(loop, ActionLoop):
                raise TypeError(f"OuterLoop takes a TrainLoop and a list of EvalLoops, got {loop!r} among them.")
        shared = [agreement.is_shared(loop.step.partitioner.mesh) for loop in self._loops]
        if len(set(shared)) > 1:
            raise ValueError(
                "The loops of an OuterLoop must all be over the devices of all processes, or none: give their steps "
                "the same partitioner."
            )
        self._job = agreement.Job(shared[0])
        self._rescued_state: Any = None
        if workdir is None and checkpoint_spec is not None and train_loop is not None:
            workdir = checkpoint_spec.checkpoint_dir
        if not isinstance(log_interval, Schedule):
            checks.check_positive("OuterLoop.log_interval", log_interval)
        if len({id(loop) for loop in self._loops}) < len(self._loops):
            raise ValueError("OuterLoop got one loop twice. Make a loop for each EvalSpec; they may share their step.")
        file = HISTORY_FILE if train_loop is not None else f"eval_{HISTORY_FILE}"
        self._workdir = workdir
        self._savers = [] if train_loop is None else checkpoint_actions(train_loop)
        self._directory_of_failures = workdir or next((action.directory for action in self._savers), None)
        history_file = None if workdir is None else epath.Path(workdir) / file
        self._history = History(history_file, writes=self._job.is_first)
        self._log_interval = log_interval
        self._spent = Spent()
        self._passes = 0  # Over the train data, that have ended.
        self._sources: dict[int, PositionedIterator] = {}  # Of the iterators of the last call, by their ids.

    @property
    def history(self) -> History:
        """The measured values: `{"train": {...}}` at each log point, `{"test": {...}}` at each evaluation so named.

        Statistics such as the steps per second are left out: a run done again has the same history.
        """
        return self._history

    @property
    def spent(self) -> Spent:
        """The time that the last call spent, and on what; as a text, one sentence."""
        return self._spent

    @property
    def rescued_state(self) -> Any:
        """The state as of the last whole step of a call that an exception ended; None after other calls."""
        return self._rescued_state

    def __call__(
        self,
        state: Any,
        train_dataset: Iterable[types.Batch] | None = None,
        train_total_steps: int | None = None,
        train_loop_steps: int | None = None,
        eval_specs: Sequence[EvalSpec] | None = None,
        log_train_total_steps: bool = True,
        *,
        stop: Schedule | None = None,
        train_epochs: int | None = None,
        on_exhausted: str = "stop",
    ) -> tuple[Any, metrics.LoopOutputs | None]:
        """Runs the experiment to its end.

        If something is due at a step inside a loop, the next batch is read before: so it is known whether the step is
        the last one. The position that a checkpoint keeps is the one before that batch.

        It ends when `train_total_steps` are done, `stop` fires, the train dataset ends, a loop sets
        `outputs[STOP_LOOP]`, or Ctrl-C is pressed. However it ends, the actions are closed: checkpoints are committed
        and writers flushed. Where an exception ends it, the state as of the last whole step is in `rescued_state`, and
        is saved by the train loop's `CheckpointAction`s.

        Args:
          state: the train state, taken over by the train loop. Only evaluated, it stays usable.
          train_dataset: an iterator of batches, gone on with from loop to loop; an iterable is turned into one. With a
            train loop, None is for a step that needs no data: `run` gets None as its batch, each counts as one
            example, and `train_total_steps` or `stop` ends the run.
          train_total_steps: optimizer updates in all, those before a resume included; None for as long as there is
            data. Like `train_loop_steps`, a multiple of `Step.updates_per_step`.
          train_loop_steps: updates in a loop; loops end at its multiples. None for one loop through the dataset.
          eval_specs: one for each eval loop.
          log_train_total_steps: logs from where to where the training goes.
          stop: ends the training besides: `at(time=3600)`, `at(samples=1_000_000)`.
          train_epochs: passes over the train dataset, an iterable, of which each is one loop (so there are no
            `train_loop_steps`); with `train_total_steps`, at most so many. A checkpoint keeps the pass and the
            place in it; the run warns at its start if the order of later passes can't be kept.
          on_exhausted: where the train dataset ends before `train_total_steps`, "stop" ends the run with a warning,
            "raise" with an error, after the last step was saved.

        Returns:
          `(state, outputs)`, the outputs being those of the last train loop, or of the last eval loop where there is
          no train loop; None where no loop ran.
        """
        specs = named(eval_specs)
        spec = RunSpec(train_dataset, train_total_steps, train_loop_steps, specs, stop, train_epochs, on_exhausted)
        for error in self._errors_of(spec):
            raise error
        checks.check_alive(state, "OuterLoop(...)")
        spec = dataclasses.replace(spec, stop=None if spec.stop is None else spec.stop.as_stop())
        described = [spec, *(loop.engine for loop in self._loops)]
        self._job.check_same("The run", lambda: [line for each in described for line in each.description()])
        self._rescued_state, requests = None, self._job.requests
        _begin_counting(self._loops)
        first_loop, spent_before = self._loops[0], self._loops[0].spent
        with requests, self._locked() as locks:  # After SIGTERM, closing the first one exits.
            training = None
            try:
                evaluations, training = self._join_loops(spec)
                with first_loop.engine.progress.stopwatch.counting("rest"):
                    if training is None:
                        outputs = self._evaluate(state, evaluations)
                    else:
                        state, outputs = training(state, says_so=log_train_total_steps)
                    self._job.any_stops()  # Of a signal that came since the last batch.
                    is_over = not requests.requested  # A signal from here on comes too late to change that.
                    if is_over:
                        state = _finish_actions(self._loops, state)
            except BaseException as error:
                if training is not None and training.has_begun:
                    self._rescued_state, step_num = training.newest or (first_loop.rescued_state, first_loop.step_num)
                    training.rescue(self._rescued_state, step_num, error)
                self._close_actions(raise_errors=False)
                self._record_failure(error)
                if self._job.is_shared and isinstance(error, SystemExit):
                    distributed.exit_without_waiting(error)
                raise
            finally:
                if training is not None:
                    training.close()
                    self._passes = training.run.passes
            self._close_actions(raise_errors=True)
            self._spent = first_loop.spent - spent_before
            logging.info("%s", self._spent)
            if training is not None:
                _warn_of_nan(outputs, self._history, first_loop.step_num)
            if is_over:
                _warn_of_what_never_ran(self._loops, evaluations)
                for each in locks:
                    each.check()
                if training is None and outputs is None:
                    logging.warning("Nothing was evaluated: no should_eval_fn agreed, or there was no checkpoint.")
                if training is not None and self._checkpoint_spec is not None and distributed.is_first_process():
                    # Only now that the last checkpoint is committed may an evaluator stop waiting for it.
                    files.open_file(self._checkpoint_spec.stopped_file, "wb").close()
        return state, outputs

    def check(
        self,
        state: Any,
        train_dataset: Iterable[types.Batch] | None = None,
        train_total_steps: int | None = None,
        train_loop_steps: int | None = None,
        eval_specs: Sequence[EvalSpec] | None = None,
        log_train_total_steps: bool = True,
        *,
        stop: Schedule | None = None,
        train_epochs: int | None = None,
        on_exhausted: str = "stop",
    ) -> preflight.Report:
        """Says what would go wrong in a call with these arguments, all at once, and how the run would go.

        It looks at a batch of each dataset, takes it through the hooks before `run`, traces `run` and compiles it
        (which a call need not do again), and foresees the whole run: when each evaluation, action and checkpoint would
        come, and what a step and a checkpoint take. No step is run.

        >>> import jaxloop
        >>> from jaxloop import examples
        >>> step, _, batches = examples.tiny_regression()
        >>> eval_step, _, _ = examples.tiny_regression(train=False)
        >>> outer_loop = OuterLoop(jaxloop.TrainLoop(step), [jaxloop.EvalLoop(eval_step)])
        >>> report = outer_loop.check(
        ...     step.abstract_state([1, 3]), batches, 200, 20, [EvalSpec(batches[:3], eval_loop_interval=50)]
        ... )
        >>> for problem in report.problems:
        ...     print(problem.where, "|", problem.text[:44])
        the train data | They end at step 100, after 100 batches, and
        eval 'eval' | It would never run: eval_loop_interval=50, a

        Args:
          state: as for a call, or its shapes: `step.abstract_state(...)` takes no memory. It stays usable.
          train_dataset: as for a call, as all that follows. Of an iterator the first batch is drawn, and comes first in
            the next call of this object.

        Returns:
          A report with all problems; `report.raise_errors()` ends a program that has errors. (Of what it does there
          remains, where they were missing, empty directories for checkpoints and the history.)
        """
        specs = named(eval_specs)
        spec = RunSpec(train_dataset, train_total_steps, train_loop_steps, specs, stop, train_epochs, on_exhausted)
        experiment = preflight.Experiment(
            spec,
            self._train_loop,
            self._eval_loops,
            self._checkpoint_spec,
            self._workdir,
            self._log_interval,
            self._source_of,
            self._passes,
        )
        return preflight.check(experiment, state, self._errors_of(spec))

    def _errors_of(self, spec: RunSpec) -> Iterator[Exception]:
        step = None if self._train_loop is None else self._train_loop.step
        return spec.errors(step, num_eval_loops=len(self._eval_loops))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[Sequence[lock.DirectoryLock]]:
        """Keeps other programs out of the directories that the run writes to; the first process does so for all."""
        directories = directories_of(self._train_loop, self._checkpoint_spec, self._workdir)
        for directory in directories:  # Now rather than after hours of training.
            checkpoint.prepare_directory(directory)
        name = lock.TRAINER if self._train_loop is not None else lock.EVALUATOR
        locks = [lock.DirectoryLock(each, name) for each in directories] if distributed.is_first_process() else []
        with contextlib.ExitStack() as held:
            for each in locks:
                held.enter_context(each)
            yield locks

    def _join_loops(self, spec: RunSpec) -> tuple[Evaluations, Training | None]:
        """Makes the loops part of one run: their actions are closed here, however it ends.

        Returns the evaluations of a call, and its training; None where nothing is trained.
        """
        train_loop, specs = self._train_loop, spec.eval_specs
        training, run = None, Run(self._history, spec.total_steps, stop=spec.stop)
        iterators = {each.name: each.dataset_iterator for each in specs if each.dataset_iterator is not None}
        sources = {name: self._source_of(iterator) for name, iterator in iterators.items()}
        evaluations = Evaluations(
            [Evaluation(*each, sources.get(each[1].name)) for each in zip(self._eval_loops, specs, strict=True)],
            self._job,
            None if train_loop is None else train_loop.engine.progress.stopwatch,
        )
        if train_loop is not None:
            parts = {each.spec.name: each.loop.engine for each in evaluations.items}
            keys = train_loop.step.base_prng
            whole = WholeRun(train_loop.engine, parts, sources, self._history, keys, self._job, self._passes)
            training = Training(
                train_loop, spec, evaluations, whole, self._checkpoint_spec, self._source_of, self._savers
            )
            run.snapshot, run.can_resume = whole.snapshot, bool(self._savers)
            run.keeps_batches = self._directory_of_failures is not None and not self._job.is_shared
        for loop in self._loops:
            loop.engine.moments.detach_all()
            loop.engine.moments.run = dataclasses.replace(run)
        if train_loop is not None:
            train_loop.engine.moments.attach(_Recorder(self._history, "train", self._log_interval))
        for each in evaluations.items:
            each.loop.engine.moments.attach(_Recorder(self._history, each.spec.name, 1))
        return evaluations, training

    def _evaluate(self, state: Any, evaluations: Evaluations) -> metrics.LoopOutputs | None:
        """Evaluates only."""
        if self._checkpoint_spec is not None:
            return evaluations.of_checkpoints(state, self._checkpoint_spec, self._history)
        step_num = step_num_of(state)
        self._history.resume(step_num - 1)
        return evaluations.once(state, step_num)

    def _source_of(self, dataset: Any) -> PositionedIterator:
        """Returns what counts the batches of a dataset; for an iterator always the same, so no call loses one."""
        if not hasattr(dataset, "__next__"):
            return PositionedIterator(dataset)
        if id(dataset) not in self._sources:
            self._sources[id(dataset)] = PositionedIterator(dataset)
        return self._sources[id(dataset)]

    # The end -------------------------------------------------------------------------------------

    def _record_failure(self, error: BaseException) -> None:
        """Records the step that failed, once all checkpoints are committed."""
        loop, workdir = self._train_loop, self._directory_of_failures
        failed_step = None if loop is None else loop.engine.stepper.call.failed_step
        if not isinstance(loop, TrainLoop) or failed_step is None or workdir is None:
            return
        if self._job.is_shared:
            logging.info("No record of the failure is made in %s: it would take the batches of all processes.", workdir)
            return
        if not isinstance(error, Exception) or not loop.spent.steps:  # The very first step fails again at once.
            return
        state = self._rescued_state if loop.step_num == failed_step - loop.step.updates_per_step else None
        failure = failures.Failure(
            failed_step,
            error,
            loop.nan_policy,
            loop.engine.kept_by_step(),
            state,
            directories_of(loop, self._checkpoint_spec),
        )
        failures.record(workdir, loop.step, failure)

    def _close_actions(self, raise_errors: bool) -> None:
        errors = []
        for action in _all_actions(self._loops):
            try:
                with self._loops[0].engine.progress.stopwatch.counting(action.time_goes_to):
                    action.close()
            except Exception as error:
                error.add_note(f"when {action!r} was closed at the end of the run")
                logging.exception("%r could not be closed.", action)
                errors.append(error)
        for loop in self._loops:
            loop.engine.moments.run = None
            loop.engine.moments.detach_all()
        self._history.close()
        if errors and raise_errors:
            raise errors[0]


def _begin_counting(loops: Sequence[ActionLoop]) -> None:
    """Has the loops and their actions count from here how often they are called."""
    for loop in loops:
        loop.engine.progress.loops_run = loop.engine.progress.longest_loop = 0
        for each in loop.action_lists:
            each.calls = [0] * len(each.actions)


def _warn_of_what_never_ran(loops: Sequence[ActionLoop], evaluations: Evaluations) -> None:
    """Lists in one warning the actions and evaluations that were never called in a run, and the reasons."""
    lines, action_lists = [], {}
    for loop in loops:
        for each in loop.action_lists if loop.engine.progress.loops_run else ():
            action_lists.setdefault(id(each), (each, loop))  # Two loops may share a step.
    for each, loop in action_lists.values():
        runs, most_steps = loop.engine.progress.loops_run, loop.engine.progress.longest_loop
        happened = f"{runs} ran" if each.unit == "loops" else f"the longest loop had {most_steps}"
        for action in [action for action, calls in zip(each.actions, each.calls, strict=True) if not calls]:
            if isinstance(action.interval, Schedule):
                lines.append(f"{action!r} of {loop!r}: its schedule did not fire up to step {loop.step_num}")
            else:
                lines.append(f"{action!r} of {loop!r}: its interval counts {each.unit}, of which {happened}")
    train_loops = sum(loop.engine.progress.loops_run for loop in loops[: len(loops) - len(evaluations.items)])
    for each in evaluations.items:
        if train_loops and not each.loop.engine.progress.loops_run:
            when = f"{each.spec.when} never let it run after one of the {train_loops} train loops"
            lines.append(f"{each.loop!r}: {when}")
    if lines:
        logging.warning("Never called in this run:\n  %s.\nAnother interval would make them run.", ";\n  ".join(lines))


def _warn_of_nan(outputs: metrics.LoopOutputs | None, history: History, step_num: int) -> None:
    """Warns of each train metric that is NaN in the last step of a run, by what is on the host already."""
    for name, values in (outputs or {}).items():
        if not isinstance(values, list) or not _is_nan(values[-1:]):
            continue
        number = next(number for number, value in enumerate(values) if _is_nan([value]))
        first = f"since step {step_num - len(values) + number + 1}"
        if number == 0 and f"train.{name}" in history.paths():
            steps, means = history.collect("steps", f"train.{name}")
            first = next(
                (f"since step {step} or before" for step, mean in zip(steps, means, strict=True) if mean != mean), first
            )
        logging.warning(
            "The run ended at step %d with %r NaN, %s. TrainLoop(..., nan_policy='raise') ends a run at the first such "
            "step.",
            step_num,
            name,
            first,
        )


def _is_nan(values: Sequence[Any]) -> bool:
    """Returns whether there is a value, and it is NaN."""
    return any(isinstance(value, float | np.generic) and bool(value != value) for value in values)


def _finish_actions(loops: Sequence[ActionLoop], state: Any) -> Any:
    for action in _all_actions(loops):
        try:
            state = action.finish(state)
        except Exception as error:
            error.add_note(f"when {action!r} finished the run")
            raise
    return state


class _Recorder(Action):
    """Makes rows of the history. A loop's first action, so that the others find the row of their step there."""

    def __init__(self, history: History, name: str, interval: int | Schedule):
        super().__init__(interval)
        self._history, self._name = history, name

    def __call__(self, state, outputs, *, elapsed, **kwargs):
        for name in [name for name in outputs if name.startswith("jaxloop/")]:
            del outputs[name]
        measured = metrics.summarize(outputs)
        if measured:
            self._history.commit(elapsed, {self._name: measured})


def _all_actions(loops: Sequence[ActionLoop]) -> list[Action]:
    return list({id(action): action for loop in loops for action in loop.actions}.values())
