"""The loop that runs a whole experiment: training, evaluation, resuming and stopping."""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, final

import numpy as np
from absl import logging
from etils import epath

from jaxloop import checkpoint, distributed, metrics, types
from jaxloop.action_loop import ActionLoop
from jaxloop.actions.action import Action
from jaxloop.actions.checkpoint_action import CheckpointAction
from jaxloop.base import checks, files
from jaxloop.base.text import quiet_orbax, suggests
from jaxloop.base.timing import Spent
from jaxloop.check import preflight
from jaxloop.data.position import PositionedIterator
from jaxloop.engine.agenda import ActionItem, Rank
from jaxloop.engine.feed import Source
from jaxloop.engine.plan import Plan
from jaxloop.eval_loop import EvalLoop
from jaxloop.experiment.detours import LeftOut
from jaxloop.experiment.evaluations import Evaluation, Recorder, evaluate_checkpoints, evaluate_once
from jaxloop.experiment.specs import STOPPED_FILE as STOPPED_FILE
from jaxloop.experiment.specs import CheckpointSpec, EvalSpec, RunSpec, named
from jaxloop.experiment.specs import EvalContext as EvalContext
from jaxloop.experiment.training import Training, step_num_of, stopped_by
from jaxloop.experiment.whole_run import WholeRun, checkpoint_actions, directories_of
from jaxloop.history import HISTORY_FILE as HISTORY_FILE
from jaxloop.history import History
from jaxloop.processes import agreement, lock
from jaxloop.runs import failures, run_log
from jaxloop.runs.commands import Commands
from jaxloop.runs.watchdog import Watchdog
from jaxloop.schedules import Elapsed, Schedule, every, last
from jaxloop.train_loop import TrainLoop
from jaxloop.types import Batch as Batch
from jaxloop.types import BatchSpec as BatchSpec
from jaxloop.types import Output as Output
from jaxloop.types import State as State

STOP_LOOP = types.STOP_LOOP
"""The name of the output that a train or eval loop sets to end the experiment: `outputs[STOP_LOOP] = True`."""


_suggests_lengths = suggests(
    epochs="train_epochs", num_epochs="train_epochs", num_steps="train_total_steps", total_steps="train_total_steps"
)


@final
class OuterLoop:
    """Runs an experiment: trains a model, and runs evaluations when they are due.

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
      train_loop: The train loop; None to only evaluate.
      eval_loops: One loop for each `EvalSpec` that is passed to `__call__`.
      checkpoint_spec: The checkpoints to resume from (or, without a train loop, to evaluate). If None, the run neither
        resumes from checkpoints nor evaluates them. With "auto", a train loop with a `workdir` resumes from the newest
        checkpoint of its first `CheckpointAction` or, without one, from those in the subdirectory `checkpoints`.
      workdir: The directory that contains `history.jsonl` (`eval_history.jsonl` without a train loop). Each history row
        is appended to the file immediately, and a resumed run appends to the same file. With `checkpoint_spec="auto"`
        and without a `CheckpointAction`, the run also saves checkpoints, in the subdirectory `checkpoints`, at most
        every minute and at the end. If `workdir` is None, a run with a train loop and a `checkpoint_spec` writes its
        history to the checkpoint directory; any other run doesn't write a history file.
      log_interval: When to add a row to the history. Each row contains the train metrics since the previous row. As in
        an action's interval, an int is a number of train loops.
      notes: A dict of strings, numbers and booleans that distinguish this run from others, such as `{"lr": 3e-3,
        "seed": 0}`. The notes are written to the run log, and `python -m jaxloop compare` shows them. If the program is
        in a Git repository, the current commit is added as "commit".
      watchdog: A `Watchdog` that ends the run if it hangs; None for no watchdog.
      skip: The numbers of the batches to leave out, as if they had never been in the training data. Batches are
        numbered across all epochs, starting at 1. If no earlier batch was left out, `skip=[48_213]` leaves out the
        batch of step 48,213. In a multi-process job, each process leaves out its part of the batch. For each batch left
        out, a history row records its number as `left_out.batch`.

    Attributes:
      train_loop: The argument of the same name.
      checkpoint_spec: The checkpoints to resume from or to evaluate; None for none.
      log_interval: The argument of the same name.
      skip: The argument of the same name.

    >>> steps, losses = outer_loop.history.collect("steps", "eval.loss")
    >>> steps[:3], losses[-1] < losses[0]
    ([10, 20, 30], True)
    """

    def __init__(
        self,
        train_loop: ActionLoop | None = None,
        eval_loops: Sequence[ActionLoop] | None = None,
        checkpoint_spec: CheckpointSpec | Literal["auto"] | None = "auto",
        *,
        workdir: epath.PathLike | None = None,
        log_interval: int | Schedule = 1,
        notes: Mapping[str, Any] | None = None,
        watchdog: Watchdog | None = None,
        skip: Sequence[int] = (),
    ):
        if isinstance(eval_loops, ActionLoop):
            raise TypeError("eval_loops must be a list of loops, got a loop. Write eval_loops=[eval_loop].")
        if not (checkpoint_spec is None or checkpoint_spec == "auto" or isinstance(checkpoint_spec, CheckpointSpec)):
            raise TypeError(f'checkpoint_spec must be a CheckpointSpec, "auto" or None, got {checkpoint_spec!r}.')
        self.train_loop: ActionLoop | None = train_loop
        self._eval_loops = tuple(eval_loops or ())
        self._loops = (*(() if train_loop is None else (train_loop,)), *self._eval_loops)
        if not self._loops:
            raise ValueError("OuterLoop needs a train_loop, eval_loops, or both; it got neither.")
        for loop in self._loops:
            if not isinstance(loop, ActionLoop):
                raise TypeError(f"OuterLoop takes a TrainLoop and a list of EvalLoops, got {loop!r} among them.")
        if isinstance(train_loop, EvalLoop) or any(isinstance(loop, TrainLoop) for loop in self._eval_loops):
            raise TypeError(
                f"OuterLoop takes a TrainLoop as train_loop and EvalLoops as eval_loops, got train_loop={train_loop!r} "
                f"and eval_loops={list(self._eval_loops)!r}. Write OuterLoop(train_loop, [eval_loop])."
            )
        shared = [agreement.is_shared(loop.step.partitioner.mesh) for loop in self._loops]
        if len(set(shared)) > 1:
            raise ValueError(
                "Either all loops of an OuterLoop use the devices of all processes, or none does. Give their steps the "
                "same partitioner."
            )
        self._job = agreement.Job(shared[0])
        self._rescued_state: Any = None
        self._savers = [] if train_loop is None else checkpoint_actions(train_loop)
        self._own_saver: CheckpointAction | None = None
        if checkpoint_spec == "auto":
            checkpoint_spec = None
            if workdir is not None and train_loop is not None:
                if not self._savers:
                    self._own_saver = CheckpointAction(epath.Path(workdir) / "checkpoints", every(time=60) | last())
                    self._savers = [self._own_saver]
                checkpoint_spec = CheckpointSpec(self._savers[0].directory)
        self.checkpoint_spec: CheckpointSpec | None = checkpoint_spec
        if workdir is None and checkpoint_spec is not None and train_loop is not None:
            workdir = checkpoint_spec.checkpoint_dir
        workdir = None if workdir is None else files.absolute(workdir)
        if not isinstance(log_interval, Schedule):
            checks.check_positive("OuterLoop.log_interval", log_interval)
        if len({id(loop) for loop in self._loops}) < len(self._loops):
            raise ValueError(
                "OuterLoop got the same loop twice. Make a loop for each EvalSpec; they may share their step."
            )
        file = HISTORY_FILE if train_loop is not None else f"eval_{HISTORY_FILE}"
        if watchdog is not None and not isinstance(watchdog, Watchdog):
            raise TypeError(f"watchdog must be a Watchdog such as Watchdog(step_secs=600), got {watchdog!r}.")
        self._watchdog = watchdog
        for number in skip:
            checks.check_positive("OuterLoop.skip", number)
        self.skip: Sequence[int] = tuple(skip)
        self._workdir, self._notes = workdir, run_log.checked_notes(notes)
        self._directory_of_failures = workdir or next((action.directory for action in self._savers), None)
        history_file = None if workdir is None else workdir / file
        self._history = History(history_file, writes=self._job.is_first)
        self.log_interval: int | Schedule = log_interval
        self._spent = Spent()
        self._passes = 0  # Completed epochs.
        self._sources: dict[int, PositionedIterator] = {}  # Keyed by the `id` of each iterator.
        self._warnings: set[str] = set()  # Those logged at the start of a run.
        self._predicted_unused: set[Any] = set()  # The actions and the evaluations, by name, named by these warnings.

    @property
    def history(self) -> History:
        """The metrics of the run: train metrics under "train", and each evaluation's metrics under its name.

        The history doesn't contain statistics such as steps per second, so repeating a run produces the same history.
        """
        return self._history

    @property
    def spent(self) -> Spent:
        """A breakdown of how the last call spent its time. `str` formats it as one sentence."""
        return self._spent

    @property
    def rescued_state(self) -> Any:
        """The state after the last completed step, if the last call raised an exception; None otherwise."""
        return self._rescued_state

    @_suggests_lengths
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
    ) -> tuple[Any, metrics.LoopOutputs | None]:
        """Runs the experiment to its end.

        The run ends after `train_total_steps`, when `stop` fires, when the training dataset ends, when a loop sets
        `outputs[STOP_LOOP]`, or on Ctrl-C. However it ends, the actions are closed: checkpoints are committed, and
        writers are flushed. If an exception ends the run, `rescued_state` holds the state after the last completed
        step, and the train loop's `CheckpointAction`s save it.

        Before calling actions in the middle of a loop, the run reads the next batch to determine whether the current
        step is the last one. A checkpoint stores the data position before that batch.

        Args:
          state: The train state. The train loop donates it; without a train loop, it stays usable.
          train_dataset: An iterable or iterator of batches. If the train step doesn't need any data, pass None: `run`
            then receives None as its batch (which counts as one example), and `train_total_steps` or `stop` must end
            the run.
          train_total_steps: The total number of optimizer updates, including those before a resume; None to train until
            the dataset ends. Both this and `train_loop_steps` must be multiples of `Step.updates_per_step`.
          train_loop_steps: The number of updates per loop. Loops end at multiples of this number. If None, a single
            loop covers the whole dataset.
          eval_specs: One spec for each eval loop.
          log_train_total_steps: Whether to log the first and the last step of training.
          stop: A schedule that ends the training when it fires, such as `at(time=3600)` or `at(samples=1_000_000)`.
          train_epochs: The number of epochs over the training dataset, which must be an iterable. Each epoch is one
            loop, so `train_loop_steps` must be None. If `train_total_steps` is given too, the run ends at whichever
            comes first. A checkpoint stores the epoch and the position within it. If the order of later epochs can't be
            reproduced, a warning is logged at the start of the run.

        Returns:
          `(state, outputs)`. The outputs are those of the last train loop or, without a train loop, those of the last
          eval loop. They are None if no loop ran.
        """
        specs = named(eval_specs)
        spec = RunSpec(train_dataset, train_total_steps, train_loop_steps, specs, stop, train_epochs)
        for error in self._errors_of(spec):
            raise error
        checks.check_alive(state, "OuterLoop(...)")
        spec = dataclasses.replace(spec, stop=None if spec.stop is None else spec.stop.as_stop())
        described = [spec, *(loop.engine for loop in self._loops)]
        self._job.check_same("The run", lambda: [line for each in described for line in each.description()])
        self._rescued_state, requests = None, self._job.requests
        _begin_counting(self._loops)
        first_loop, spent_before = self._loops[0], self._loops[0].spent
        is_logged, logged_before = self.train_loop is not None and self._job.is_first, spent_before
        log = run_log.RunLog(self._workdir if is_logged else None, lambda: first_loop.spent - logged_before)
        # After SIGTERM, closing `requests` exits the process.
        with requests, quiet_orbax(), self._locked() as places, self._watched(log):
            training, kept = None, failures.KeptBatches()
            try:
                saved_in = [os.fspath(action.directory) for action in self._savers]
                while True:
                    log.start(total_steps=spec.total_steps, notes=self._notes, checkpoints=saved_in)
                    evaluations, training = self._join_loops(spec, log, training, kept)
                    with first_loop.engine.run.stopwatch.counting("dispatch"):
                        if training is None:
                            self._check_start(spec, state, None)
                            outputs = self._evaluate(state, evaluations)
                        else:
                            state, outputs = training(state, logs_total_steps=log_train_total_steps)
                            if not requests.requested:
                                for each in evaluations:
                                    if (
                                        each.was_called
                                    ):  # Calls the actions of the eval loop that are due at the last step.
                                        each.loop.engine.hold_now(state, is_last=True)
                        self._job.any_stops()  # Detects a signal that arrived after the last batch.
                        if training is None or not training.is_interrupted_for_detour:
                            is_over = not requests.requested  # A signal after this point no longer changes that.
                            if is_over:
                                state = _finish_actions(self._loops, state)
                                if training is not None:
                                    training.run.warn_of_unreached()
                            break
                    self._close_actions(None, raise_errors=True)
                    log.end(first_loop.step_num, requests.outermost.reason or "")
                    state, logged_before = checkpoint.template_of(state), first_loop.spent
                    training.turn_back()
            except BaseException as error:
                if training is not None and training.has_begun:
                    self._rescued_state, step_num = training.newest or (first_loop.rescued_state, first_loop.step_num)
                    training.rescue(self._rescued_state, step_num, error)
                self._close_actions(requests.run_status(error), raise_errors=False)
                self._record_failure(error, kept)
                log.end(first_loop.step_num, f"error: {type(error).__name__}: {error}")
                if self._job.is_shared and isinstance(error, SystemExit):
                    distributed.exit_without_waiting(error)
                raise
            finally:
                if training is not None:
                    training.close()
                    self._passes = training.run.passes
            self._close_actions(requests.run_status(None), raise_errors=True)
            self._spent = first_loop.spent - spent_before
            by = stopped_by(self._loops)
            ended = "stopped" if first_loop.engine.run.agenda.wants_stop else "finished"
            if ended == "stopped" and by is not None:
                ended = f"stopped by {type(by).__name__}"
            log.end(first_loop.step_num, requests.outermost.reason or ended)
            logging.info("%s", self._spent)
            if training is not None:
                _warn_of_nan(outputs, self._history, first_loop.step_num)
            if is_over:
                _warn_of_unused(self._loops, evaluations, self._predicted_unused)
                for place in places:
                    lock.check(*place)
                if training is None and outputs is None:
                    logging.warning("Nothing was evaluated: no should_eval_fn agreed, or there was no checkpoint.")
                if training is not None and self.checkpoint_spec is not None and distributed.is_first_process():
                    # Only after the last checkpoint is committed: an evaluator then stops waiting for more.
                    files.open_file(self.checkpoint_spec.stopped_file, "wb").close()
        return state, outputs

    @_suggests_lengths
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
        topology: str | None = None,
    ) -> preflight.Report:
        """Checks the arguments of a run without running any steps. Returns the run's plan and all problems found.

        The check reads one batch from each dataset, passes it through the hooks that precede `run`, and traces and
        compiles `run`. A later run reuses the compiled program. The plan lists when each evaluation, action and
        checkpoint is due, and how much memory a step and a checkpoint need.

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
          state: The run's initial state (which isn't donated), or the result of `step.abstract_state(...)`, which
            doesn't use any memory.
          train_dataset: See `__call__`, which also describes the arguments not listed here. If the dataset is an
            iterator, the check reads its first batch, and the next run of this `OuterLoop` begins with that batch.
          topology: The TPU topology to compile the train step for, such as "v5e:16x16". The TPUs don't have to be
            attached to this machine. The report then lists the memory, FLOPs and communication per device, and contains
            an error if the step doesn't fit in memory. Batches must be global, that is, contain the rows for all
            devices. Requires libtpu (`pip install libtpu`).

        Returns:
          A report with the plan and all problems. `report.raise_errors()` raises an exception if the report contains
          errors. The check doesn't write any files, but creates missing directories for checkpoints and the history.
        """
        specs = named(eval_specs)
        spec = RunSpec(train_dataset, train_total_steps, train_loop_steps, specs, stop, train_epochs)
        return preflight.check(self._experiment(spec, topology, is_starting=False), state, self._errors_of(spec))

    def _experiment(self, spec: RunSpec, topology: str | None, *, is_starting: bool) -> preflight.Experiment:
        return preflight.Experiment(
            spec,
            self.train_loop,
            self._eval_loops,
            self.checkpoint_spec,
            self._workdir,
            self.log_interval,
            self.source_of,
            self._savers,
            self._passes,
            topology,
            is_starting,
        )

    def _check_start(self, spec: RunSpec, state: Any, num_batches: int | None) -> None:
        """Warns about each problem of a run that can be found without delaying its start, unless it did so before."""
        report = preflight.check(self._experiment(spec, None, is_starting=True), state, num_batches=num_batches)
        self._predicted_unused = {each for each, calls in report.calls.items() if calls.is_never}
        for problem in report.problems:
            warning = f"In {problem.where}: {problem.text}"
            if self._job.is_first and warning not in self._warnings:
                self._warnings.add(warning)
                logging.warning("%s", warning)

    def _errors_of(self, spec: RunSpec) -> Iterator[Exception]:
        step = None if self.train_loop is None else self.train_loop.step
        return spec.errors(step, num_eval_loops=len(self._eval_loops))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[Sequence[tuple[epath.Path, str]]]:
        """Locks the directories that the run writes to, so that no other program can write to them.

        In a multi-process job, the first process holds the locks for all processes.
        """
        name = lock.TRAINER if self.train_loop is not None else lock.EVALUATOR
        places = [(each, name) for each in directories_of(self.train_loop, self.checkpoint_spec, self._workdir)]
        for directory, _ in places:  # Fails now rather than after hours of training.
            files.prepare_directory(directory)
        with contextlib.ExitStack() as locks:
            for place in places if distributed.is_first_process() else ():
                locks.enter_context(lock.locked(*place))
            yield places

    def _watched(self, log: run_log.RunLog) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which the watchdog, if there is one, watches this thread."""
        if self._watchdog is None:
            return contextlib.nullcontext()
        first, evals = self._loops[0].engine, [loop.engine for loop in self._eval_loops]
        end = lambda reason: log.end(first.step_num, reason)
        return self._watchdog.watching(first, evals, self._directory_of_failures, end)

    def _join_loops(
        self, spec: RunSpec, log: run_log.RunLog, before: Training | None, kept: failures.KeptBatches
    ) -> tuple[Sequence[Evaluation], Training | None]:
        """Joins the loops into one run, whose actions this object closes.

        Args:
          spec: The arguments of the call.
          log: The run log.
          before: The previous training, if it returned to an earlier checkpoint; None at the beginning of a call.
          kept: The most recent batches.

        Returns:
          The call's evaluations, and its training (None without a train loop).
        """
        train_loop, specs = self.train_loop, spec.eval_specs
        whole: WholeRun | None = None

        def context(now: Elapsed) -> Mapping[str, Any]:
            snapshot = None if whole is None else whole.snapshot
            known = {"history": self._history, "total_steps": spec.total_steps, "snapshot": snapshot}
            if whole is None or train_loop is None or self.checkpoint_spec is None:
                return {**known, "detour": None}
            updates = train_loop.step.updates_per_step
            return {**known, "detour": functools.partial(whole.detour, now, updates=updates)}

        iterators = {each.name: each.dataset_iterator for each in specs if each.dataset_iterator is not None}
        sources = {name: self.source_of(iterator) for name, iterator in iterators.items()}
        evaluations = [
            Evaluation(loop, each, sources.get(each.name), self._history, context)
            for loop, each in zip(self._eval_loops, specs, strict=True)
        ]
        training = None
        if train_loop is not None:
            engine = train_loop.engine
            parts = {each.spec.name: each.loop.engine for each in evaluations}
            keys = train_loop.step.base_prng
            recorder = Recorder(self._history, "train", self.log_interval)
            commands = Commands(
                self._workdir,
                engine.job,
                engine.run.agenda,
                list(dict.fromkeys([*_all_actions(self._loops), *self._savers])),
                recorder,
                self._history,
            )
            whole = WholeRun(
                engine,
                parts,
                sources,
                self._history,
                keys,
                self._job,
                self._passes,
                commands=commands,
                left_out=LeftOut(self.skip) if before is None else before.run.left_out,
                ends=spec.ends,
                transforms=None if self.checkpoint_spec is None else self.checkpoint_spec.transforms,
            )
            recorder.observers += [lambda now: log.log(now.steps), lambda _: commands.poll(), whole.record_left_out]
            training = Training(
                train_loop,
                spec,
                evaluations,
                whole,
                self.checkpoint_spec,
                self.source_of,
                self._savers,
                log,
                functools.partial(self._check_start, spec),
                returns=before is not None,
            )
            observers = []
            if self._directory_of_failures is not None and not self._job.is_shared:
                observers = [kept.add]
            rows = [ActionItem(recorder, context, Rank.ROW)]
            savers = [ActionItem(each, context) for each in filter(None, [self._own_saver])]
            engine.set_plan(
                Plan(
                    total=spec.total_steps,
                    loop_steps=spec.loop_steps,
                    stop=spec.stop,
                    items=[commands, *rows, *evaluations, *savers],
                    context=context,
                    source=Source(training.next_epoch, training.mark, whole.note_consumed, observers),
                )
            )
        return evaluations, training

    def _evaluate(self, state: Any, evaluations: Sequence[Evaluation]) -> metrics.LoopOutputs | None:
        """Runs the evaluations in a call without a train loop."""
        if self.checkpoint_spec is not None:
            return evaluate_checkpoints(state, evaluations, self.checkpoint_spec, self._history, self._job)
        step_num = step_num_of(state)
        self._history.resume(step_num - 1)
        return evaluate_once(state, evaluations, step_num)

    def source_of(self, dataset: Any) -> PositionedIterator:
        """Returns a `PositionedIterator` over a dataset.

        Repeated calls with the same iterator return the same `PositionedIterator`, so that no batches are lost.
        """
        if not hasattr(dataset, "__next__"):
            return PositionedIterator(dataset)
        if id(dataset) not in self._sources:
            self._sources[id(dataset)] = PositionedIterator(dataset)
        return self._sources[id(dataset)]

    # The end -------------------------------------------------------------------------------------

    def _record_failure(self, error: BaseException, kept: failures.KeptBatches) -> None:
        """Writes a record of the failed step, after all checkpoints are committed."""
        loop, workdir = self.train_loop, self._directory_of_failures
        failed_step = None if loop is None else loop.engine.outcome.failure.step_num
        if not isinstance(loop, TrainLoop) or failed_step is None or workdir is None:
            return
        if self._job.is_shared:
            logging.info("The failure is not recorded in %s: that would need the batches of all processes.", workdir)
            return
        if not isinstance(error, Exception) or not loop.spent.steps:  # The very first step is easy to repeat.
            return
        state = self._rescued_state if loop.step_num == failed_step - loop.step.updates_per_step else None
        failure = failures.Failure(
            failed_step,
            error,
            loop.nan_policy,
            kept.by_step(failed_step, loop.step_num, loop.step.updates_per_step),
            state,
            directories_of(loop, self.checkpoint_spec),
        )
        failures.record(workdir, loop.step, failure)

    def _close_actions(self, status: str | None, raise_errors: bool) -> None:
        """Closes the actions. `status` says how the run ended; it is None if the run goes on after a detour."""
        errors = []
        # The progress bar, often first, times the others.
        for action in dict.fromkeys([*self._savers, *reversed(_all_actions(self._loops))]):
            try:
                with self._loops[0].engine.run.stopwatch.counting(action.time_category):
                    try:
                        if status is not None:
                            action.end_run(status)
                    finally:
                        action.close()
            except Exception as error:
                error.add_note(f"in {type(action).__name__}.close of {action!r}, at the end of the run")
                logging.exception("%r could not be closed.", action)
                errors.append(error)
        for loop in self._loops:
            loop.engine.set_plan(None)
        self._history.close()
        if errors and raise_errors:
            raise errors[0]


def _begin_counting(loops: Sequence[ActionLoop]) -> None:
    """Resets the call counts of the loops and their actions."""
    for loop in loops:
        run = loop.engine.run
        run.loops_run = 0
        run.agenda.begin_call()
        for item in run.agenda.items:
            item.was_called = False
        for each in loop.step._runner.action_lists:
            each.calls = [0] * len(each.actions)


def _warn_of_unused(loops: Sequence[ActionLoop], evaluations: Sequence[Evaluation], predicted: Collection[Any]) -> None:
    """Logs a single warning that lists the actions and evaluations that were never called in a run, with reasons.

    Leaves out those in `predicted`, which a warning at the start of the run has named.
    """
    lines, seen = [], set()
    for loop in loops:
        engine, runs = loop.engine, loop.engine.run.loops_run
        unused = [
            (item.action, "loops") for item in (*engine.actions.begin, *engine.actions.end) if not item.was_called
        ]
        for each in loop.step._runner.action_lists:
            if id(each) not in seen:  # Two loops may share a step.
                seen.add(id(each))
                unused += [(a, each.unit) for a, calls in zip(each.actions, each.calls, strict=True) if not calls]
        ran = "1 loop ran" if runs == 1 else f"{runs} loops ran"
        for action, unit in unused if runs else ():
            happened = f"only {ran}" if unit == "loops" else "no loop had as many"
            name, interval = f"{type(action).__name__} of {loop!r}", action.interval
            if action in predicted:
                continue
            if isinstance(interval, Schedule):
                lines.append(f"{name}: interval={interval!r} did not fire up to step {loop.step_num}.")
            else:
                hint = f" Did you mean every(steps={interval})?" if interval > 1 else ""
                lines.append(f"{name}: interval={interval} means every {interval} {unit}, and {happened}.{hint}")
    train_loops = sum(loop.engine.run.loops_run for loop in loops[: len(loops) - len(evaluations)])
    for each in evaluations:
        if train_loops and not each.loop.engine.run.loops_run and each.spec.name not in predicted:
            lines.append(f"{each.loop!r}: {each.spec.when} was never due in {train_loops} train loops.")
    if lines:
        logging.warning("Never called in this run:\n  %s", "\n  ".join(lines))


def _warn_of_nan(outputs: metrics.LoopOutputs | None, history: History, step_num: int) -> None:
    """Warns about each train metric that is NaN in the last loop of a run, if its values are already on the host."""
    for name, values in (outputs or {}).items():
        if not isinstance(values, list) or not _is_nan(values):
            continue
        number = next(number for number, value in enumerate(values) if _is_nan([value]))
        first = f"since step {step_num - len(values) + number + 1}"
        if number == 0 and f"train.{name}" in history.paths():
            steps, means = history.collect("steps", f"train.{name}")
            first = next(
                (f"since step {step} or before" for step, mean in zip(steps, means, strict=True) if mean != mean), first
            )
        if not _is_nan(values[-1:]):
            first = f"{first.replace('since', 'at')}, though not at the last one (are its labels in range?)"
        logging.warning(
            "The run ended at step %d with %r NaN, %s. TrainLoop(..., nan_policy='raise') ends a run at the first such "
            "step.",
            step_num,
            name,
            first,
        )


def _is_nan(values: Sequence[Any]) -> bool:
    """Returns whether any of the values is NaN."""
    numbers = [metrics.value_of(value) for value in values if not metrics.is_empty(value)]
    return any(isinstance(value, float | np.generic) and bool(value != value) for value in numbers)


def _finish_actions(loops: Sequence[ActionLoop], state: Any) -> Any:
    for action in _all_actions(loops):
        try:
            state = action.finish(state)
        except Exception as error:
            error.add_note(f"in {type(action).__name__}.finish of {action!r}")
            raise
    return state


def _all_actions(loops: Sequence[ActionLoop]) -> list[Action]:
    return list({id(action): action for loop in loops for action in loop.actions}.values())
