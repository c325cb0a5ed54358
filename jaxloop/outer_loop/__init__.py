"""The loop that runs a whole experiment, including evaluations, checkpoints and resuming."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, final

from absl import logging
from etils import epath

from jaxloop import checkpoint, distributed, metrics, types
from jaxloop.action_loop import ActionLoop
from jaxloop.actions.action import Action
from jaxloop.actions.checkpoint_action import CheckpointAction
from jaxloop.base import checks, files
from jaxloop.base.text import quiet_orbax, suggests
from jaxloop.base.timing import Spent
from jaxloop.distributed import agreement, lock
from jaxloop.engine.agenda import ActionItem, Item
from jaxloop.engine.feed import Source
from jaxloop.engine.run import Plan
from jaxloop.eval_loop import EvalLoop
from jaxloop.history import HISTORY_FILE as HISTORY_FILE
from jaxloop.history import History
from jaxloop.outer_loop.data import LeftOut, Sources, TrainingData
from jaxloop.outer_loop.evaluations import Evaluation, LastActions, Recorder, evaluate
from jaxloop.outer_loop.extension import Experiment, Extension, Extensions
from jaxloop.outer_loop.specs import STOPPED_FILE as STOPPED_FILE
from jaxloop.outer_loop.specs import CheckpointSpec, EvalSpec, RunSpec, named
from jaxloop.outer_loop.specs import EvalContext as EvalContext
from jaxloop.outer_loop.training import Training, end_of
from jaxloop.outer_loop.whole_run import WholeRun, checkpoint_actions, end_all
from jaxloop.schedules import Schedule, every, is_never, last
from jaxloop.train_loop import TrainLoop
from jaxloop.types import Batch as Batch
from jaxloop.types import BatchSpec as BatchSpec
from jaxloop.types import Output as Output
from jaxloop.types import State as State

if TYPE_CHECKING:
    from jaxloop.check import preflight

STOP_LOOP = types.STOP_LOOP
"""The name of the output that a step, an action or a hook sets to end the experiment: `outputs[STOP_LOOP] = True`."""


_suggests_lengths = suggests(
    epochs="train_epochs", num_epochs="train_epochs", num_steps="train_total_steps", total_steps="train_total_steps"
)


@final
class OuterLoop:
    """Runs an experiment: trains a model and evaluates it whenever an evaluation is due.

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
      train_loop: The train loop, or None to evaluate only.
      eval_loops: One loop for each `EvalSpec` that is passed to `__call__`.
      checkpoint_spec: The checkpoints to resume from (or, without a train loop, to evaluate). If None, the run neither
        resumes from checkpoints nor evaluates them. With "auto", a run with a train loop and a `workdir` resumes from
        the newest checkpoint of the train loop's first `CheckpointAction`. Without such an action, it resumes from the
        newest checkpoint in the subdirectory `checkpoints` of `workdir`. For any other run, "auto" is the same as None.
      workdir: The directory that contains `history.jsonl` (`eval_history.jsonl` without a train loop). Each history row
        is appended to the file immediately, and a resumed run appends to the same file. With `checkpoint_spec="auto"`
        and without a `CheckpointAction`, the run also saves checkpoints in the subdirectory `checkpoints`: one at
        the end and, before that, at most one a minute. If `workdir` is None, a run with a train loop and a
        `checkpoint_spec` writes its history to the checkpoint directory; other runs don't write a history file.
      log_interval: The interval at which rows are added to the history. Each row contains the train metrics since the
        previous row. As with an action's interval, an int is a number of train loops.
      notes: A dict of strings, numbers and booleans that distinguish this run from others, such as `{"lr": 3e-3,
        "seed": 0}`. The notes are written to the run log, and `python -m jaxloop compare` shows them. If the program is
        in a Git repository, the current commit is added as "commit".
      extensions: Objects that observe each run, such as a `Watchdog`; see `Extension`.
      skip: The numbers of the batches to leave out. The run proceeds as if the training data didn't contain them.
        Batches are numbered across all epochs, starting at 1. If no earlier batch was left out, `skip=[48_213]` leaves
        out the batch that step 48,213 would otherwise use. In a multi-process job, every process leaves
        out its part of each such batch.

    Attributes:
      log_interval: The argument of the same name.
      skip: The argument of the same name.
      sources: The datasets that have been opened.

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
        extensions: Sequence[Extension] = (),
        skip: Sequence[int] = (),
    ):
        from jaxloop import runs  # Imported here, because nothing else needs it.

        if not (checkpoint_spec is None or checkpoint_spec == "auto" or isinstance(checkpoint_spec, CheckpointSpec)):
            raise TypeError(f'checkpoint_spec must be a CheckpointSpec, "auto" or None, got {checkpoint_spec!r}.')
        is_loop = lambda loop, other: isinstance(loop, ActionLoop) and not isinstance(loop, other)
        fits = (train_loop is None or is_loop(train_loop, EvalLoop)) and not isinstance(eval_loops, ActionLoop)
        if not (fits and all(is_loop(each, TrainLoop) for each in eval_loops or ())):
            raise TypeError(
                f"OuterLoop takes a TrainLoop and a list of EvalLoops, got train_loop={train_loop!r} and "
                f"eval_loops={eval_loops!r}. Write OuterLoop(train_loop, [eval_loop])."
            )
        loops = [loop for loop in (train_loop, *(eval_loops or ())) if loop is not None]
        if not loops:
            raise ValueError("OuterLoop needs a train_loop, eval_loops, or both; it got neither.")
        if len({id(loop) for loop in loops}) < len(loops):
            raise ValueError("OuterLoop got the same loop twice. Make one for each EvalSpec; they may share a step.")
        shared = [agreement.is_shared(loop.step.partitioner.mesh) for loop in loops]
        if len(set(shared)) > 1:
            raise ValueError("Some loops use the devices of all processes, others don't. Give them one partitioner.")
        if not isinstance(log_interval, Schedule):
            checks.check_positive("OuterLoop.log_interval", log_interval)
        for number in skip:
            checks.check_positive("OuterLoop.skip", number)
        savers = [] if train_loop is None else checkpoint_actions(train_loop)
        if checkpoint_spec == "auto":
            checkpoint_spec = None
            if workdir is not None and train_loop is not None:
                if not savers:
                    savers = [CheckpointAction(epath.Path(workdir) / "checkpoints", every(time=60) | last())]
                checkpoint_spec = CheckpointSpec(savers[0].directory)
        if workdir is None and checkpoint_spec is not None and train_loop is not None:
            workdir = checkpoint_spec.checkpoint_dir
        workdir = None if workdir is None else files.absolute(workdir)
        operated = runs.default_extensions(notes, has_directory=bool(workdir or savers))
        file = HISTORY_FILE if train_loop is not None else f"eval_{HISTORY_FILE}"
        self._job = agreement.Job(shared[0])
        self._experiment = Experiment(
            train_loop,
            tuple(eval_loops or ()),
            checkpoint_spec,
            workdir,
            savers,
            History(None if workdir is None else workdir / file, writes=self._job.is_first),
            Extensions([*operated, *extensions]),
        )
        self.log_interval: int | Schedule = log_interval
        self.skip: Sequence[int] = tuple(skip)
        self.sources: Sources = Sources()
        self._warned: set[str] = set()
        self._spent, self._rescued_state = Spent(), None

    @property
    def train_loop(self) -> ActionLoop | None:
        """The train loop, or None if the experiment only evaluates."""
        return self._experiment.train_loop

    @property
    def checkpoint_spec(self) -> CheckpointSpec | None:
        """The checkpoints that the experiment resumes from or evaluates; None if it doesn't read any checkpoints."""
        return self._experiment.checkpoint_spec

    @property
    def history(self) -> History:
        """The metrics of the run: train metrics under "train", and each evaluation's metrics under its name.

        The history doesn't contain statistics such as steps per second, so repeating a run produces the same metrics.
        """
        return self._experiment.history

    @property
    def spent(self) -> Spent:
        """A breakdown of how the last call spent its time. `str(...)` formats it as a sentence."""
        return self._spent

    @property
    def rescued_state(self) -> Any:
        """The state after the last completed step if the last call raised an exception; otherwise None.

        Also None if the failed step had already donated that state, or if training hadn't begun.
        """
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
        """Runs the experiment until it ends.

        The run ends after `train_total_steps` or `train_epochs`, when `stop` fires, when the training dataset ends,
        when a step, an action or a hook sets `outputs[STOP_LOOP]`, or on Ctrl-C. In all cases, the actions are closed:
        checkpoints are committed and writers are flushed. If an exception ends the run, `rescued_state` holds the state
        after the last completed step, and the run's `CheckpointAction`s save that state.

        Before calling actions in the middle of a loop, the run reads the next batch to determine whether the current
        step is the last one. A checkpoint saved by an action stores the position in the data before that batch.

        Args:
          state: The train state. The train loop donates it; without a train loop, it stays usable.
          train_dataset: An iterable or iterator of batches. If the train step doesn't need any data, pass None, and
            give `train_total_steps` or `stop` to end the run. In that case, `Step.run` receives None as its batch,
            which counts as one example.
          train_total_steps: The total number of optimizer updates, including those made before the run was resumed. If
            None, training continues until the dataset ends. `train_total_steps` and `train_loop_steps` must be
            multiples of `Step.updates_per_step`.
          train_loop_steps: The number of updates per loop. Loops end at multiples of this number. If None, a single
            loop covers the whole dataset.
          eval_specs: One spec for each eval loop.
          log_train_total_steps: Whether to log a message with the steps at which training begins and ends.
          stop: A schedule that ends the run when it fires, such as `at(time=3600)` or `at(samples=1_000_000)`.
          train_epochs: The number of epochs over the training dataset, which must be an iterable. Each epoch is one
            loop, so `train_loop_steps` must be None. If `train_total_steps` is also given, the run ends at whichever
            limit is reached first. A checkpoint stores the epoch and the position within it. For a resumed run to use
            the same batches as an uninterrupted one, a new iterator over the dataset must always return the batches
            of a given epoch in the same order.

        Returns:
          `(state, outputs)`. The outputs are those of the last train loop or, without a train loop, those of the last
          eval loop. They are None if no loop ran.
        """
        spec = RunSpec(train_dataset, train_total_steps, train_loop_steps, named(eval_specs), stop, train_epochs)
        spec = dataclasses.replace(spec, logs_total_steps=log_train_total_steps)
        for error in spec.errors(self.train_loop, len(self._experiment.eval_loops)):
            raise error
        checks.check_alive(state, "OuterLoop(...)")
        spec = dataclasses.replace(spec, stop=None if spec.stop is None else spec.stop.as_stop())
        experiment = dataclasses.replace(self._experiment, spec=spec)
        described = [spec, *[loop.engine for loop in experiment.loops]]
        self._job.check_same("The run", lambda: [line for each in described for line in each.description()])
        loop, left_out = experiment.loops[0], LeftOut(self.skip)
        spent_before, self._rescued_state = loop.spent, None
        # After SIGTERM, closing `requests` exits the process.
        with self._job.requests, quiet_orbax(), _locked(experiment) as places:
            while True:  # Once, and again whenever the run turns back.
                evaluations, training = self._parts(experiment, left_out)
                state, found = self._attempt(state, experiment, evaluations, training)
                if found is not None:
                    break
            self._spent = loop.spent - spent_before
            logging.info("%s", self._spent)
            outputs, is_over = found
            if training is not None:
                _warn_of_nan(outputs, loop.step_num)
            for place in places if is_over else ():
                lock.check(*place)
            if is_over and training is None and outputs is None:
                logging.warning("Nothing was evaluated: no should_eval_fn agreed, or there was no checkpoint.")
            if is_over and training is not None:
                if training.has_begun:
                    _warn_of_unused(experiment, evaluations)
                if self.checkpoint_spec is not None and distributed.is_first_process():
                    # Only after the last checkpoint is committed: an evaluator then stops waiting for more.
                    files.open_file(self.checkpoint_spec.stopped_file, "wb").close()
        return state, outputs

    def _attempt(
        self, state: Any, experiment: Experiment, evaluations: Sequence[Evaluation], training: Training | None
    ) -> tuple[Any, tuple[metrics.LoopOutputs | None, bool] | None]:
        """Runs the experiment until it ends or an action requests a detour (a return to an earlier checkpoint).

        In both cases, closes all actions and reports the end to the extensions.

        Returns:
          `(state, None)` if the run must return to an earlier checkpoint; otherwise `(state, (outputs, is_over))`,
          where `is_over` is False if a signal ended the run early.
        """
        engine, requests, reason, failure = experiment.loops[0].engine, self._job.requests, "", None
        try:
            try:
                items = experiment.extensions.begin(experiment)
                if training is not None:
                    self._plan(training, [*items, *evaluations, *map(LastActions, evaluations)])
                with engine.run.stopwatch.counting("dispatch"):
                    check_start = functools.partial(self._check_start, experiment)
                    if training is None:
                        check_start(state, None)
                        outputs = evaluate(state, evaluations, self.checkpoint_spec, self.history, self._job)
                    else:
                        state, outputs = training(state, check_start)
                    self._job.any_stops()  # Detects a signal that arrived after the last batch.
                    is_over = not requests.requested  # A signal after this point no longer changes that.
                    if is_over:
                        state = _finish_actions(experiment, state)
                reason = requests.outermost.reason or end_of(experiment.loops)
                _close_actions(experiment, requests.run_status(None), raise_errors=True)
                return state, (outputs, is_over)
            except types.TurnBack as turn:
                if training is None or training.newest_state is None:
                    raise
                state = checkpoint.template_of(training.newest_state)
                training.begin_detour(turn)
                _close_actions(experiment, None, raise_errors=True)
                training.abandon_checkpoints(turn)
                reason = "a detour"
                return state, None
        except BaseException as error:
            if not reason:
                if training is not None and training.has_begun:
                    self._rescued_state = training.newest_state
                    training.rescue(error)
                _close_actions(experiment, requests.run_status(error), raise_errors=False)
            reason, failure = f"error: {type(error).__name__}: {error}", error
            raise
        finally:
            for loop in experiment.loops:
                loop.engine.set_plan(None)
            experiment.extensions.end(experiment.loops[0].elapsed, reason, failure)
            if training is not None:
                training.data.close()
            if self._job.is_shared and isinstance(failure, SystemExit):
                distributed.exit_without_waiting(failure)

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
    ) -> "preflight.Report":
        """Checks the arguments of a run without running any steps. Reports the run's plan and all problems found.

        The check reads one batch from each dataset, passes it through the hooks that precede `Step.run`, and compiles
        `Step.run`. When the experiment is run later, it reuses the compiled program. If checkpoints are saved, the
        check also reads three batches of the training data to verify that a resumed run can return to a saved position.
        The plan shows when each evaluation, action and checkpoint is due, and how much memory a step and a checkpoint
        need.

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
            attached to this machine. The report then lists the memory and FLOPs per device, and contains
            an error if the step doesn't fit in memory. Batches must be global, that is, contain the rows for all
            devices. Requires libtpu (`pip install libtpu`).

        Returns:
          A report with the plan and all problems found. `report.raise_errors()` raises an exception if the report
          contains errors. The check writes no files, but it creates missing directories for checkpoints and the
          history.
        """
        spec = RunSpec(train_dataset, train_total_steps, train_loop_steps, named(eval_specs), stop, train_epochs)
        return self._check(dataclasses.replace(self._experiment, spec=spec), state, topology, None, is_starting=False)

    def _check(
        self, experiment: Experiment, state: Any, topology: str | None, num_batches: int | None, *, is_starting: bool
    ) -> "preflight.Report":
        from jaxloop.check import preflight

        checked = preflight.Checked(experiment, self.log_interval, self.sources, topology, is_starting)
        errors = experiment.spec.errors(experiment.train_loop, len(experiment.eval_loops))
        return preflight.check(checked, state, () if is_starting else errors, num_batches)

    def _check_start(self, experiment: Experiment, state: Any, num_batches: int | None) -> None:
        """Logs a warning about each problem that can be found without delaying the start of the run.

        A problem that has already been logged isn't logged again.
        """
        report = self._check(experiment, state, None, num_batches, is_starting=True)
        texts = [f"In {problem.where}: {problem.text}" for problem in report.problems] if self._job.is_first else []
        for text in dict.fromkeys(texts):
            if text not in self._warned:
                logging.warning("%s", text)
        self._warned.update(texts)

    def _parts(self, experiment: Experiment, left_out: LeftOut) -> tuple[Sequence[Evaluation], Training | None]:
        """Returns the `Evaluation`s and the `Training` for one call. The latter is None if there is no train loop."""
        spec, train_loop, training, evaluations = experiment.spec, experiment.train_loop, None, []
        context: dict[str, Any] = {"history": experiment.history, "total_steps": spec.total_steps, "snapshot": None}
        for loop, each in zip(experiment.eval_loops, spec.eval_specs, strict=True):
            source = None if each.dataset_iterator is None else self.sources.open(each.dataset_iterator)
            evaluations.append(Evaluation(loop, each, source, experiment.history, context))
        if train_loop is not None:
            checkpoints = experiment.checkpoint_spec
            data = TrainingData(spec, self.sources, train_loop.engine, evaluations, left_out)
            parts = {
                "extensions": experiment.extensions,
                "train": train_loop.engine,
                **{f"eval {each.spec.name}": each.loop.engine for each in evaluations},
                "data": data,
            }
            whole = WholeRun(
                parts,
                experiment.history,
                self._job,
                keys=train_loop.step.base_prng,
                transforms=None if checkpoints is None else checkpoints.transforms,
            )
            context["snapshot"] = whole.snapshot
            training = Training(experiment, evaluations, data, whole, context)
        return evaluations, training

    def _plan(self, training: Training, items: Sequence[Item]) -> None:
        """Sets the train loop's plan, which contains `items` and all other items that may be due between steps."""
        experiment, data, context = training.experiment, training.data, training.context
        spec, in_loops = experiment.spec, experiment.in_loops
        savers = [ActionItem(each, context) for each in experiment.savers if each not in in_loops]
        plan = Plan(
            total=spec.total_steps,
            loop_steps=spec.loop_steps,
            stop=spec.stop,
            items=[Recorder(experiment.history, "train", self.log_interval), *items, *savers],
            context=context,
            source=Source(
                next_pass=lambda: data.next_epoch(saves=bool(experiment.savers)),
                mark=data.mark,
                consumed=data.note_consumed,
                observers=experiment.extensions.observers,
            ),
        )
        training.loop.engine.set_plan(plan)


@contextlib.contextmanager
def _locked(experiment: Experiment) -> Iterator[Sequence[tuple[epath.Path, str]]]:
    """Returns a context manager that locks the directories that the run writes to.

    No other run can then write to these directories. However, a run with a train loop and a run without one can share a
    directory, because they use different locks. In a multi-process job, the first process holds the locks for all
    processes. The context manager yields a list of pairs `(directory, name of the lock file)`.
    """
    name = lock.TRAINER if experiment.train_loop is not None else lock.EVALUATOR
    places, is_first = [(directory, name) for directory in experiment.directories], distributed.is_first_process()
    with contextlib.ExitStack() as locks:
        for place in places:  # Fails now rather than after hours of training.
            if not is_first or files.is_remote(place[0]):
                files.prepare_directory(place[0])
            if is_first:
                locks.enter_context(lock.locked(*place))
        yield places


def _warn_of_nan(outputs: metrics.LoopOutputs | None, step_num: int) -> None:
    """Warns about train metrics that were NaN in the last loop of a run."""
    if names := [name for name, mean in metrics.summarize(outputs).items() if math.isnan(mean)]:
        text = "The run ended at step %d with NaN in its last loop: %s. TrainLoop(nan_policy='raise') finds the first."
        logging.warning(text, step_num, ", ".join(names))


def _warn_of_unused(experiment: Experiment, evaluations: Sequence[Evaluation]) -> None:
    """Warns about actions that were never called, and evaluations that never ran, during a run.

    `OuterLoop.check` can't find these actions and evaluations before the run if the length of the run is unknown.
    """
    skipped = [each for each in evaluations if not each.was_measured and not is_never(each.interval)]
    unused = [f"{each.name} ({each.spec.when})" for each in skipped]
    for loop in experiment.loops:
        items = [item for item in loop.engine.actions.end if item.called_at is None and not is_never(item.interval)]
        unused += [f"{item.action!r} of {loop!r}" for item in items]
    if unused:
        logging.warning("Never called in this run, up to step %d: %s.", experiment.loops[0].step_num, ", ".join(unused))


def _finish_actions(experiment: Experiment, state: Any) -> Any:
    for action in experiment.actions:
        try:
            state = action.finish(state)
        except Exception as error:
            error.add_note(f"in {type(action).__name__}.finish of {action!r}")
            raise
    return state


def _close_actions(experiment: Experiment, status: str | None, raise_errors: bool) -> None:
    """Closes the actions. `status` describes how the run ended; None if it returns to an earlier checkpoint."""

    def close(action: Action) -> None:
        with experiment.loops[0].engine.run.stopwatch.counting(action.time_category):
            try:
                if status is not None:
                    action.end_run(status)
            finally:
                action.close()

    # In reverse order: the progress bar, which often comes first, also times the others.
    actions = dict.fromkeys([*experiment.savers, *reversed(experiment.actions)])
    ends = [(f"{type(each).__name__}.close of {each!r}", functools.partial(close, each)) for each in actions]
    end_all([*ends, ("the history", experiment.history.flush)], raises=raise_errors)
