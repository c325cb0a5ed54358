"""The training part of an experiment, which starts or resumes and then trains epoch by epoch until the end."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, final

from absl import logging
from etils import epath

from jaxloop import checkpoint, distributed, metrics, types
from jaxloop.action_loop import ActionLoop
from jaxloop.actions.action import Action
from jaxloop.actions.checkpoint_action import CheckpointAction
from jaxloop.actions.early_stopping_action import EarlyStoppingAction
from jaxloop.base import checks
from jaxloop.base.text import announce
from jaxloop.data.position import PositionedIterator, PositionUnknownError
from jaxloop.data.sources import fork_warning, num_batches, reshuffles
from jaxloop.engine.agenda import ActionItem
from jaxloop.experiment.evaluations import Evaluation
from jaxloop.experiment.specs import CheckpointSpec, RunSpec, evaluations_in
from jaxloop.experiment.whole_run import (
    Resumed,
    WholeRun,
    check_no_newer_checkpoints,
    directories_of,
    go_to,
    reconcile_hyperparams,
)
from jaxloop.processes import agreement, interrupt
from jaxloop.runs.run_log import RunLog
from jaxloop.schedules import Elapsed


@final
@dataclasses.dataclass(eq=False)
class Training:
    """The training performed by one call to an `OuterLoop`.

    Attributes:
      loop: The train loop.
      spec: The call's arguments, such as the dataset and the length of the training.
      evaluations: The evaluations of the call.
      run: Everything that a checkpoint stores in addition to the train state.
      checkpoint_spec: The checkpoints to resume from. If None, training starts from the given state.
      source_of: A function that returns a `PositionedIterator` over a dataset.
      savers: The actions that save checkpoints.
      log: The run log.
      check_start: A function that logs the problems of a run with a given state and number of batches per epoch (None
        if unknown), before the first step.
      has_begun: True if the training has reached its first step.
      newest: The latest state and its step; None while the train loop is running, because the loop holds them then.
      returns: Whether to return to an earlier checkpoint even if the given state is past it.
    """

    loop: ActionLoop
    spec: RunSpec
    evaluations: Sequence[Evaluation]
    run: WholeRun
    checkpoint_spec: CheckpointSpec | None
    source_of: Callable[[Any], PositionedIterator]
    savers: Sequence[CheckpointAction]
    log: RunLog
    check_start: Callable[[Any, int | None], None] = lambda state, num_batches: None
    has_begun: bool = False
    newest: tuple[Any, int] | None = None
    returns: bool = False

    def __call__(self, state: Any, *, logs_total_steps: bool) -> tuple[Any, metrics.LoopOutputs | None]:
        """Trains to the end. Returns the state and the outputs of the last train loop (None if no loop ran).

        Args:
          state: The state to start from if there is no checkpoint.
          logs_total_steps: Whether to log the first and the last step of the training.
        """
        loop, spec, run, engine = self.loop, self.spec, self.run, self.loop.engine
        assert run.commands is not None
        with engine.run.stopwatch.counting("restores"):
            state, step_num, resumed = self._resume(state)
            if spec.total_steps is not None or spec.loop_steps is not None:
                checks.check_multiple("state.step", step_num, loop.step)
            self._open_data(resumed)
            if resumed is None and step_num == 0:
                state = loop.step._runner.states.prepare(state)
        end = self._end_reached(resumed, step_num)
        if not end:
            self._check_first_step()
        # The run writes nothing before this point, because the checkpoint, the directories, the data or a schedule may
        # not fit it.
        self.log.begin(step_num)
        if resumed is None:
            run.commands.forget()
        if self.checkpoint_spec is not None and distributed.is_first_process():
            self.checkpoint_spec.stopped_file.unlink(missing_ok=True)  # Evaluators of this directory wait for this run.
        for action in dict.fromkeys([*self.savers, *(action for each in self._loops for action in each.actions)]):
            action.begin_run(step_num, can_resume=self.checkpoint_spec is not None)
            action.write_notes(self.log.notes)
        # If the run begins at step 0, it repeats the rows of this step.
        run.resume_history(resumed or Resumed(Elapsed(step_num), history_rows=None if step_num else 0))
        if resumed is not None:
            measured = run.measured_at(step_num)
            for each in self.evaluations:
                each.called_at = step_num if each.spec.name in measured else each.called_at
            if not self._catch_up(state, resumed, is_last=end is not None):
                self._announce_stop()
                return state, None
        if end:
            logging.warning("Nothing is left to train: step %d has reached %s.", step_num, end)
            return state, None
        self.check_start(state, self._batches_per_epoch(step_num))
        if resumed is None and self.savers:
            announce("The run saves checkpoints in %s.", " and ".join(str(each.directory) for each in self.savers))
        if logs_total_steps:
            logging.info("Training from step %d to %s.", step_num, spec.end)
        # Runs everything that is due before the first step.
        if resumed is None and step_num == 0 and not engine.hold_now(state):
            self._announce_stop()
            return state, None
        if run.job.requests.requested:  # Perhaps during an evaluation of this step, which the next run repeats.
            logging.warning("Stopped by %s before the first step.", run.job.requests.signal_name)
            return state, metrics.LoopOutputs({types.STOP_LOOP: True})
        self.newest, self.has_begun = (state, step_num), True
        with run.commands.polling():
            return self._train(state)

    def repeat(self, state: Any, resumed: Resumed | None) -> tuple[Any, types.Batch]:
        """Trains from a given state to step `spec.total_steps`, without reading or writing checkpoints.

        Returns the new state and the next batch (None at the end of the data).

        Args:
          state: The state.
          resumed: The progress of the run at this state; None for the initial state.
        """
        run = self.run
        self._open_data(resumed)
        if self.loop.step_num != self.spec.total_steps:
            state, _ = self._train(state)
        for _ in range(2):
            with contextlib.suppress(StopIteration):
                return state, None if run.source is None else self.loop.engine.data.next_batch(run.source)
            self.next_epoch()
        return state, None

    def save_now(self, state: Any, step_num: int) -> list[Exception]:
        """Saves a checkpoint now, even if none of the `savers` is due.

        Returns the errors raised by the `savers`.
        """
        errors = []
        for action in () if self.run.left_out.requested else self.savers:  # A detour discards the current state.
            try:
                action.flush()  # After the commit, all processes know that the step is saved.
                if step_num not in checkpoint.all_steps(action.directory):
                    snapshot = self.run.snapshot(may_be_incomplete=True)
                    if action.save(step_num, state, None, **snapshot):
                        action.flush()
                        logging.info("%r saved the state of step %d.", action, step_num)
            except Exception as error:
                logging.exception("%r could not save the state of step %d.", action, step_num)
                errors.append(error)
        return errors

    def rescue(self, state: Any, step_num: int, error: BaseException) -> None:
        """Saves the last completed step's state when an exception ends a run.

        `state` is None if the state was lost.
        """
        if state is None and self.savers:
            logging.error("The state of step %d was not saved: %s", step_num, self.loop.engine.outcome.failure.reason)
        if self.run.left_out.requested or step_num == 0:  # The program makes the state of step 0 again.
            return
        # A save needs all processes. An exception such as KeyboardInterrupt ends the program without a save.
        if state is not None and self.run.job.knows(error) and isinstance(error, Exception | SystemExit):
            self.save_now(state, step_num)

    @property
    def is_interrupted_for_detour(self) -> bool:
        """True if an action has requested a detour and no signal has ended the run since then."""
        return self.run.left_out.requested is not None and self.run.job.requests.outermost.signum == interrupt.DETOUR

    def turn_back(self) -> None:
        """Starts the requested detour by abandoning all checkpoints after the one that the run returns to.

        Raises:
          RuntimeError: If there is no checkpoint from before the batches to leave out, or if the run has turned back
            too many times.
        """
        self.close()
        self.has_begun = False  # If an exception follows, the state of this training must not be saved.
        detour, job, spec = self.run.left_out.turn_back(), self.run.job, self.checkpoint_spec
        job.requests.outermost.end_detour()
        for directory in {action.directory for action in self.savers}:
            if job.is_first:
                checkpoint.abandon(directory, detour.first_step)
            if job.is_shared:
                agreement.wait_for_all("after abandoning checkpoints")
        if len(self.run.left_out.detours) > (self.run.left_out.at_most or math.inf):
            raise RuntimeError(
                f"At step {detour.step}, {detour.reason} The run has turned back {len(self.run.left_out.detours) - 1} "
                "times already. Look at the batches and the learning rate, or allow more with at_most."
            )
        if spec is None or not any(map(checkpoint.all_steps, self._directories)):
            raise RuntimeError(
                f"The run must return to a checkpoint before step {detour.first_step}, and there is none: "
                f"{detour.reason} Give the run a CheckpointSpec, and save from the first step on: "
                "CheckpointAction(directory, interval=at(0) | every(steps=...))."
            )
        logging.warning(
            "The run turned back at step %d, and leaves out the batches from %d to %d: %s",
            detour.step,
            detour.first_batch,
            detour.last_batch,
            detour.reason,
        )

    def close(self) -> None:
        """Releases a training dataset that no later call will keep reading from, and ends the prefetch thread."""
        if not self.spec.has_iterator:  # An iterator belongs to the caller, who may keep reading from it.
            self.run.source = None
            self.loop.forget_batches()

    def mark(self, *, if_cheap: bool = False) -> None:
        """Marks the position in the data, before a batch is read ahead."""
        if self.run.source is not None:
            self.run.source.mark(if_cheap=if_cheap)

    @property
    def _directories(self) -> list[epath.Path]:
        """The directories with checkpoints of this run: those to resume from, and those that it saves to."""
        return [] if self.checkpoint_spec is None else directories_of(self.loop, self.checkpoint_spec)

    @property
    def _loops(self) -> list[ActionLoop]:
        return [self.loop, *(each.loop for each in self.evaluations)]

    # Epochs --------------------------------------------------------------------------------------

    def _train(self, state: Any) -> tuple[Any, metrics.LoopOutputs | None]:
        """Trains to the end. Returns the state, and the outputs of the last loop that ended."""
        loop, engine, run, loops = self.loop, self.loop.engine, self.run, self.loop.engine.run.loops
        self.newest = None
        data = lambda: iter(()) if run.source is None else run.source
        state, outputs = engine.loops(state, data, self._steps_of_next_loop)
        self.newest = (state, loop.step_num)
        if run.job.requests.requested:
            self._end_by_signal(state, loop.step_num)
        elif engine.run.agenda.wants_stop:
            self._announce_stop()
        elif engine.outcome.data_ended:
            self._tell_end_of_data(loop.step_num)
        return state, outputs if outputs or engine.run.loops > loops else None

    def _announce_stop(self) -> None:
        by = stopped_by(self._loops)
        if not isinstance(by, EarlyStoppingAction):  # It has given its reason.
            announce("Stopped at step %d by %s.", self.loop.step_num, by or f"outputs[{types.STOP_LOOP!r}]")

    def _steps_of_next_loop(self) -> int | None:
        step_num = self.loop.step_num
        # A run may have been interrupted between the last step of a loop and its end.
        engine = self.loop.engine
        only_ends = engine.run.batches > 0 and self.spec.ends_loop(step_num)
        return 0 if only_ends else engine.loop_end(step_num)

    def _end_by_signal(self, state: Any, step_num: int) -> None:
        saves = "; saving its state" if self.savers else ""
        if not self.is_interrupted_for_detour:
            announce("Stopped by %s at step %d%s.", self.run.job.requests.signal_name, step_num, saves)
        for error in self.save_now(state, step_num):
            raise error

    def next_epoch(self) -> bool:
        """Counts the epoch that has ended, and begins the next one. Returns False if there is none.

        A checkpoint saved at this moment stores the start of the next epoch, which may have a different order. If the
        epoch was the last one, a later run can therefore resume and train for more epochs. An epoch without batches is
        an error.
        """
        run, spec = self.run, self.spec
        if run.job.any_stops(run.source is not None and run.source.num_read == 0):
            raise checks.empty_dataset(spec.train_dataset)
        if spec.epochs is None:
            return False
        run.passes += 1
        run.left_out.end_epoch(run.source)
        ended, run.source = run.source, None
        if spec.has_iterator:
            return False
        if ended is not None:
            ended.close()
        self.loop.forget_batches()
        if run.passes < spec.epochs or self.savers:
            run.source = self._source_of_epoch()
            run.left_out.apply_to(run.source)
        run.note_consumed(0)
        return run.passes < spec.epochs

    def _check_first_step(self) -> None:
        """Raises an error if the dataset is empty, or if a schedule doesn't return a later step."""
        loop, source, job = self.loop, self.run.source, self.run.job
        loop.engine.check_schedules()
        if source is None or source.num_read or job.is_shared:  # The processes read their first batches together.
            return
        try:
            with loop.engine.run.stopwatch.counting("data"):
                source.peek()
        except StopIteration:
            raise checks.empty_dataset(self.spec.train_dataset) from None
        except Exception as error:
            if not job.requests.supersedes(error):
                error.add_note(f"in the dataset, after step {loop.step_num}, in {loop!r}")
                raise

    def _batches_per_epoch(self, step_num: int) -> int | None:
        """Returns the number of batches in an epoch; without epochs, in the whole run. None if it is unknown."""
        source = self.run.source
        left = None if source is None else num_batches(source)
        if source is None or left is None:
            return None
        updates = self.loop.step.updates_per_step
        return left + (step_num // updates if self.spec.epochs is None else source.num_read)

    def _tell_end_of_data(self, step_num: int) -> None:
        """Logs that the training has ended because the data did."""
        total_steps, epochs = self.spec.total_steps, self.spec.epochs
        if epochs is not None and self.run.passes >= epochs:
            logging.info("The last of %d epochs ended at step %d.", epochs, step_num)
        elif total_steps in (None, step_num):
            logging.info("The training dataset ended at step %d.", step_num)
        else:
            logging.warning(
                "The training dataset ended at step %d of train_total_steps=%s, so the run ends, too. Repeat the "
                "dataset, or lower train_total_steps.",
                step_num,
                total_steps,
            )

    # Resuming ------------------------------------------------------------------------------------

    def _end_reached(self, resumed: Resumed | None, step_num: int) -> str | None:
        """Describes the end that the run has already reached. Returns None if there are steps left to train.

        If the end of a run that was stopped is later now, this renews the patience of the actions that stopped it.
        """
        spec, loop, actions = self.spec, self.loop, [action for each in self._loops for action in each.actions]
        if resumed is not None:
            resumed.renew_patience(actions)
        if loop.engine.run.batches and spec.ends_loop(step_num):
            return None
        ends = {
            "the end of a run that an evaluation or an action stopped (to train further, give it more patience, steps "
            "or epochs)": resumed is not None and resumed.stays_stopped(actions),
            f"stop={spec.stop!r}": spec.stop is not None and spec.stop.stops(loop.elapsed, loop.elapsed),
            f"train_total_steps={spec.total_steps}": spec.total_steps is not None and step_num >= spec.total_steps,
            f"train_epochs={spec.epochs}": spec.epochs is not None and self.run.passes >= spec.epochs,
        }
        return next((end for end, is_reached in ends.items() if is_reached), None)

    def _resume(self, state: Any) -> tuple[Any, int, Resumed | None]:
        """Resumes from the newest checkpoint, continues from the last call, or begins with the given state.

        Returns:
          The state, its step, and the progress stored in the checkpoint (None if the state is not from one).
        """
        loop, run, spec, loop_steps = self.loop, self.run, self.checkpoint_spec, self.spec.loop_steps
        saved, resumed = [], None
        if spec is not None:
            saved = self._saved_paths()
            state, resumed = self._restore(state, spec, saved)
        if resumed is not None:
            step_num = resumed.elapsed.steps
            for item in loop.engine.run.agenda.items:
                # Its own directory tells whether it saved this step.
                if isinstance(item, ActionItem) and isinstance(item.action, CheckpointAction):
                    path = item.action.directory / str(step_num)
                    item.called_at = step_num if path in saved and path.exists() else None
        else:
            step_num = step_num_of(state) if hasattr(state, "step") else loop.elapsed.steps
            if step_num != loop.step_num:  # Otherwise, it continues where the last call ended.
                run.passes = 0
                for each in self._loops:
                    each.resume(Elapsed(step_num))
        if loop_steps is not None and (resumed is None or not resumed.knows_position):
            loop.loop_count = step_num // loop_steps
            for each in self.evaluations:
                if (number := evaluations_in(loop.loop_count, each.spec)) is not None:
                    each.loop.loop_count = number
        if spec is None or (saved and int(saved[-1].name) > step_num):  # Damaged checkpoints have been moved away.
            check_no_newer_checkpoints(loop, step_num)
        return state, step_num, resumed

    def _saved_paths(self) -> list[epath.Path]:
        """Returns the paths of the run's checkpoints, after checking that they are the same in all processes."""
        job, directories = self.run.job, self._directories
        for directory in directories:
            checkpoint.clear_leftovers(directory)
        if job.is_shared:
            if job.is_first:
                checkpoint.quarantine_damaged(checkpoint.all_paths(directories))
            agreement.wait_for_all("before restoring")
        saved = checkpoint.all_paths(directories)
        found = f"The list of checkpoints in {_joined(directories)}, which all processes must share,"
        job.check_same(found, lambda: [f"{directories.index(path.parent)}/{path.name}" for path in saved])
        return saved

    def _restore(self, state: Any, spec: CheckpointSpec, saved: Sequence[epath.Path]) -> tuple[Any, Resumed | None]:
        """Restores the newest complete checkpoint, or keeps the given state if its step is later."""
        step_num, job = 0 if self.returns else step_num_of(state), self.run.job
        if not saved:
            where = "from scratch" if step_num == 0 else f"at step {step_num}, from the given state"
            saves_there = spec.checkpoint_dir in [action.directory for action in self.savers]
            level = logging.INFO if saves_there else logging.WARNING  # If so, this is simply the first start.
            logging.log(level, "No checkpoint found in %s: the run starts %s.", _joined(self._directories), where)
            return state, None
        if int(saved[-1].name) < step_num:
            text = "The run continues at step %d, which is past the newest checkpoint (step %s)."
            logging.info(text, step_num, saved[-1].name)
            return state, None
        given = checks.adopt(state)
        restored = checkpoint.open_newest(saved, given, transforms=spec.transforms, quarantines=not job.is_shared)
        assert restored is not None
        opened, state = restored
        _check_count(state, opened.step, opened.path.parent)
        remedy = "CheckpointSpec(..., restore_hyperparams=False) takes the program's value."
        restores = spec.restore_hyperparams
        state = reconcile_hyperparams(given, state, restores=restores, remedy=remedy if restores else "")
        resumed = self.run.load(opened, given)
        announce("Resumed at step %d from %s.", opened.step, opened.path.parent)
        return state, resumed

    def _open_data(self, resumed: Resumed | None) -> None:
        """Opens the training dataset at the saved position."""
        self._open_source(resumed)
        self.run.left_out.apply_to(self.run.source)
        self.run.note_consumed(self.loop.engine.batches_ahead(self.run.source))

    def _source_of_epoch(self) -> PositionedIterator:
        source = self.source_of(self.spec.data)
        if self.spec.epochs is not None:
            source.begin_pass(self.run.passes)
        return source

    def _open_source(self, resumed: Resumed | None) -> None:
        run, spec, is_epoch = self.run, self.checkpoint_spec, self.spec.epochs is not None
        run.source = source = self._source_of_epoch()
        if warning := fork_warning(source):
            logging.warning("%s", warning)
        if resumed is None or spec is None or (is_epoch and resumed.is_between_passes):
            if spec is not None and self.savers:
                self._warn_of_inexact_resume(source)
            return
        if is_epoch:  # A run always continues inside an epoch, even if that means skipping batches.
            run.source = source = PositionedIterator(source, skippable=True)
        if not spec.restore_data:
            return
        self.loop.forget_batches()
        try:
            if resumed.position is not None:
                go_to(source, resumed.position, is_own=resumed.is_own_position)
            elif is_epoch and resumed.steps_in_loop:
                source.skip(resumed.steps_in_loop)
        except PositionUnknownError as error:
            if self.returns:
                raise
            logging.warning("%s The run continues with the next batch that the training dataset returns.", error)
        except ValueError as error:
            error.add_note(
                f"while resuming the run in {spec.checkpoint_dir} at step {resumed.elapsed.steps}. To continue with "
                "another dataset from its start, write CheckpointSpec(..., restore_data=False)."
            )
            raise

    def _warn_of_inexact_resume(self, source: PositionedIterator) -> None:
        eval_sources = {name: each.resume_warning() for name, each in self.run.eval_sources.items()}
        warnings = [source.resume_warning(several_passes=(self.spec.epochs or 1) > 1)]
        warnings += [warning and f"In the evaluation {name!r}: {warning}" for name, warning in eval_sources.items()]
        for warning in filter(None, warnings):
            logging.warning("%s", warning)
        for spec in self.spec.eval_specs:
            if reshuffles(spec.dataset):
                logging.warning(
                    "The dataset of the evaluation %r is shuffled differently each time, so a resumed run may measure "
                    "other values. Write dataset.shuffle(..., seed=..., reshuffle_each_iteration=False).",
                    spec.name,
                )

    def _catch_up(self, state: Any, resumed: Resumed, *, is_last: bool) -> bool:
        """Runs everything that was due at a checkpoint's step but didn't run because of an interruption.

        This includes a save to a second directory, if the run was killed between the two saves.

        Returns:
          True if the run continues.
        """
        elapsed, continues = resumed.elapsed, True
        if elapsed.previous is None or not resumed.knows_position:
            return True
        if resumed.may_be_incomplete:
            now = dataclasses.replace(elapsed, is_last=is_last)
            caught = [each.catch_up(state, now) for each in self.evaluations if each.called_at == elapsed.steps]
            continues = all(caught)
        at_end = resumed.steps_in_loop == 0 and elapsed.loops > elapsed.previous.loops
        only_saves = not resumed.may_be_incomplete
        return self.loop.engine.hold_now(state, is_last=is_last, at_end=at_end, only_saves=only_saves) and continues


def _check_count(state: Any, saved_step: int, directory: Any) -> None:
    """Raises an error if the step stored in a checkpoint differs from the step in its name."""
    if hasattr(state, "step") and (count := step_num_of(state)) != saved_step:
        raise ValueError(
            f"No run can resume from checkpoint {saved_step} in {directory}, because its state.step is {count}. It was "
            "saved by a step whose updates_per_step was wrong, or by a program that counts something else. Remove the "
            "checkpoint, or give another checkpoint_dir. To begin with its parameters, call "
            "step.restore_model(state, directory)."
        )


def stopped_by(loops: Iterable[ActionLoop]) -> Action | None:
    """Returns the action that asked the run to stop; None if none did."""
    items = (loop.engine.run.agenda.stopped_by for loop in loops)
    return next((item.action for item in items if isinstance(item, ActionItem)), None)


def _joined(directories: Sequence[epath.Path]) -> str:
    return " and ".join(map(str, directories))


def step_num_of(state: Any) -> int:
    """Returns the number of updates that have been applied to a state, or 0 if the state has no counter."""
    return int(metrics.fetch(getattr(state, "step", 0)))
