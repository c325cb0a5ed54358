"""Starts or resumes training in an experiment, and continues until the run ends."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
from jaxloop.distributed import agreement
from jaxloop.engine.agenda import ActionItem
from jaxloop.engine.call import Failure
from jaxloop.outer_loop.data import TrainingData, check_not_empty
from jaxloop.outer_loop.evaluations import Evaluation
from jaxloop.outer_loop.extension import Experiment
from jaxloop.outer_loop.specs import CheckpointSpec
from jaxloop.outer_loop.whole_run import (
    WholeRun,
    check_no_newer_checkpoints,
    restore_newest,
    saved_paths,
    step_num_of,
    withdraw_stop,
)
from jaxloop.schedules import Elapsed


@final
@dataclasses.dataclass(eq=False)
class Training:
    """The training performed by one call to an `OuterLoop`.

    Attributes:
      experiment: The experiment, which must have a train loop.
      evaluations: The evaluations to run during the call.
      data: The training data.
      whole: Everything that a checkpoint contains in addition to the train state.
      context: Additional keyword arguments for actions.
      has_begun: True from just before the first step of the run. False again when a detour (a return to an earlier
        checkpoint) begins.
      between_loops: The newest state. None while the train loop is running, because the loop holds the state itself.
    """

    experiment: Experiment
    evaluations: Sequence[Evaluation]
    data: TrainingData
    whole: WholeRun
    context: Mapping[str, Any]
    has_begun: bool = False
    between_loops: Any = None

    @functools.cached_property
    def loop(self) -> ActionLoop:
        """The train loop."""
        return self.experiment.loops[0]

    @property
    def newest_state(self) -> Any:
        """The state after the last completed step, or None if this state no longer exists."""
        return self.loop.rescued_state if self.between_loops is None else self.between_loops

    def __call__(
        self, state: Any, check_start: Callable[[Any, int | None], None]
    ) -> tuple[Any, metrics.LoopOutputs | None]:
        """Trains until the run ends. Returns a pair: the final state, and the outputs of the last train loop.

        The outputs are None if no loop ran.

        Args:
          state: The state to start from, unless the run resumes from a checkpoint.
          check_start: A function that logs any problems with the run. It is called before the first step, with the
            state and the number of batches per epoch (None if it is unknown).
        """
        experiment, loop, engine = self.experiment, self.loop, self.loop.engine
        spec, checkpoints, savers = experiment.spec, experiment.checkpoint_spec, experiment.savers
        with engine.run.stopwatch.counting("restores"):
            state, is_resumed = self._resume(state)
            step_num = engine.step_num
            if spec.total_steps is not None or spec.loop_steps is not None:
                checks.check_multiple("state.step", step_num, loop.step)
            self._open_data(is_resumed)
            if step_num == 0 and not is_resumed:
                state = loop.step._runner.states.prepare(state)
        self.between_loops = state
        if not (end := self._end_reached()):
            check_not_empty(self.data.source, spec.train_dataset, loop, self.whole.job)
        # The run writes nothing before this point, because the checkpoint, the directories or the data may not fit it.
        if checkpoints is not None and distributed.is_first_process():
            checkpoints.stopped_file.unlink(missing_ok=True)  # Evaluators that watch this directory wait for the run.
        for action in experiment.actions:
            action.begin_run(step_num, can_resume=checkpoints is not None)
        experiment.extensions.moment(loop.elapsed)
        self.whole.rows.drop_later(step_num)
        self.data.left_out.record_detours(loop.elapsed, experiment.history)
        stopped, requests = metrics.LoopOutputs({types.STOP_LOOP: True}), self.whole.job.requests
        if requests.requested and not end:
            self._tell_end()
            return state, stopped
        if end:
            logging.warning("Nothing is left to train: step %d has reached %s.", step_num, end)
        else:
            check_start(state, self.data.batches_per_epoch(step_num // loop.step.updates_per_step))
            if savers and not is_resumed:
                announce("The run saves checkpoints in %s.", " and ".join(str(each.directory) for each in savers))
            if spec.logs_total_steps:
                logging.info("Training from step %d to %s.", step_num, spec.end)
        # Calls what is due before the first step, or was not called when the checkpoint was saved.
        holds, now = is_resumed or (step_num == 0 and not end), loop.elapsed
        at_end = engine.run.batches == 0 and now.previous is not None and now.loops > now.previous.loops
        if holds and not engine.hold_now(state, is_last=bool(end), at_end=at_end):
            self._tell_end()
            return state, stopped if requests.requested else None
        if end:
            return state, None
        # Even if a signal has arrived since then, the run makes a step, because only a checkpoint of the next step
        # contains what was called here.
        self.has_begun = True
        return self._train(state)

    def _train(self, state: Any) -> tuple[Any, metrics.LoopOutputs | None]:
        engine, loops = self.loop.engine, self.loop.engine.run.loops
        self.between_loops = None
        data = lambda: iter(()) if self.data.source is None else self.data.source
        state, outputs = engine.loops(state, data, lambda: steps_of_next_loop(self.loop))
        self.between_loops = state
        self._tell_end()
        for error in self.save_now(state) if self.whole.job.requests.requested else ():
            raise error
        return state, outputs if outputs or engine.run.loops > loops else None

    def save_now(self, state: Any) -> list[Exception]:
        """Saves a checkpoint of the current step with each of the run's `CheckpointAction`s, even if none is due.

        Actions that have already saved this step don't save it again. Returns the errors that the actions raised.
        """
        errors, step_num = [], self.loop.step_num
        for action in self.experiment.savers:
            try:
                action.flush()  # After the commit, all processes know that the step is saved.
                if step_num not in checkpoint.all_steps(action.directory):
                    snapshot = self.whole.snapshot(in_moment=True)
                    if action.save(step_num, state, None, **snapshot):
                        action.flush()
                        logging.info("%r saved the state of step %d.", action, step_num)
            except Exception as error:
                logging.exception("%r could not save the state of step %d.", action, step_num)
                errors.append(error)
        return errors

    def rescue(self, error: BaseException) -> None:
        """Saves the state that the last completed step returned, if possible. Called when an exception ends a run."""
        state, step_num = self.newest_state, self.loop.step_num
        if state is None and self.experiment.savers:
            logging.error("The state of step %d was not saved: %s", step_num, self.loop.engine.outcome.failure.reason)
        # The program makes the state of step 0 again. A save needs all processes. An exception such as
        # KeyboardInterrupt ends the program without a save.
        if state is not None and step_num and self.whole.job.knows(error) and isinstance(error, Exception | SystemExit):
            self.save_now(state)

    def begin_detour(self, turn: types.TurnBack) -> None:
        """Prepares for the detour (a return to an earlier checkpoint) that `turn` requests."""
        self.has_begun = False  # No checkpoint may contain the newest state.
        self.data.turn_back(turn, self.loop.step.updates_per_step)
        self.loop.engine.outcome.failure = Failure()  # The old one refers to the state, which takes up memory.

    def abandon_checkpoints(self, turn: types.TurnBack) -> None:
        """Moves all checkpoints of step `turn.first` and of later steps to `abandoned/` in their directories.

        Must not be called while a checkpoint is being saved.

        Raises:
          RuntimeError: If there is no checkpoint to return to, or if the run has now made more detours than
            `turn.at_most` allows.
        """
        experiment, job, detours = self.experiment, self.whole.job, self.data.left_out.detours
        for directory in {action.directory for action in experiment.savers}:
            if job.is_first:
                checkpoint.abandon(directory, turn.first)
            if job.is_shared:
                agreement.wait_for_all("after abandoning checkpoints")
        if turn.at_most is not None and len(detours) > turn.at_most:
            raise RuntimeError(
                f"At step {self.loop.step_num}, {turn.reason} The run has turned back {len(detours) - 1} times "
                "already. Look at the batches and the learning rate, or allow more with at_most."
            )
        if experiment.checkpoint_spec is None or not any(map(checkpoint.all_steps, experiment.checkpoint_dirs)):
            raise RuntimeError(
                f"The run must return to a checkpoint before step {turn.first}, and there is none: {turn.reason} Give "
                "it a CheckpointSpec, and save from the start: CheckpointAction(directory, at(0) | every(steps=...))."
            )
        text = "The run turned back at step %d, and leaves out the batches from %d to %d: %s"
        logging.warning(text, self.loop.step_num, detours[-1]["first_batch"], detours[-1]["last_batch"], turn.reason)

    def _tell_end(self) -> None:
        """Logs why training ends at the current step: a signal, a request to stop, or the end of the data."""
        spec, step_num, requests = self.experiment.spec, self.loop.step_num, self.whole.job.requests
        if requests.requested:
            saves = "; saving its state" if self.has_begun and self.experiment.savers else ""
            announce("Stopped by %s at step %d%s.", requests.signal_name, step_num, saves)
        elif self.loop.engine.run.agenda.wants_stop:
            by = stopped_by(self.experiment.loops)
            if not isinstance(by, EarlyStoppingAction):  # It has given its reason.
                announce("Stopped at step %d by %s.", step_num, by or f"outputs[{types.STOP_LOOP!r}]")
        elif not self.loop.engine.outcome.data_ended:
            return
        elif self.data.has_ended_all_epochs:
            logging.info("The last of %d epochs ended at step %d.", spec.epochs, step_num)
        elif spec.total_steps in (None, step_num):
            logging.info("The training dataset ended at step %d.", step_num)
        else:
            text = "The training dataset ended at step %d of train_total_steps=%s, so the run ends, too. Repeat the"
            logging.warning(f"{text} dataset, or lower train_total_steps.", step_num, spec.total_steps)

    # Resuming ------------------------------------------------------------------------------------

    def _resume(self, state: Any) -> tuple[Any, bool]:
        """Resumes from the newest checkpoint, continues where the last `OuterLoop` call ended, or begins with `state`.

        Returns a pair: the state to train from, and a bool, which is True if this state came from a checkpoint that
        contains more than a train state.
        """
        loop, spec, saved = self.loop, self.experiment.checkpoint_spec, list[epath.Path]()
        step_num = 0 if self.data.left_out.detours else step_num_of(state) if hasattr(state, "step") else loop.step_num
        if spec is not None:
            saved = saved_paths(self.experiment.checkpoint_dirs, self.whole.job)
        if spec is not None and saved and int(saved[-1].name) >= step_num:
            given = checks.adopt(state)
            opened, state = restore_newest(saved, given, spec, self.whole.job)
            elapsed = opened.elapsed()
            announce("Resumed at step %d from %s.", elapsed.steps, opened.path.parent)
            if int(saved[-1].name) > elapsed.steps:  # Those that were damaged have been moved away.
                check_no_newer_checkpoints(self.experiment.savers, elapsed.steps)
            restored = self.whole.load(opened, given)
            self._begin(elapsed, restored)
            for item in loop.engine.run.agenda.items:  # The directory of each saver tells whether it saved this step.
                if isinstance(item, ActionItem) and isinstance(item.action, CheckpointAction):
                    path = item.action.directory / opened.path.name
                    item.called_at = elapsed.steps if path in saved and path.exists() else None
            return state, bool(restored)
        if saved:
            text = "The run continues at step %d, which is past the newest checkpoint (step %s)."
            logging.info(text, step_num, saved[-1].name)
        elif spec is not None:
            self._tell_fresh_start(spec, step_num)
        if step_num != loop.step_num:  # Otherwise, it continues where the last call ended.
            self._begin(Elapsed(step_num))
        self.whole.rows.begin(step_num)
        check_no_newer_checkpoints(self.experiment.savers, step_num)
        return state, False

    def _begin(self, elapsed: Elapsed, restored: Collection[str] = ()) -> None:
        """Sets the starting points of those parts of the run that were not restored from a checkpoint.

        If loops have a fixed length, the number of completed loops is derived from the number of completed steps.
        Otherwise, it is taken from `elapsed`. If an evaluation's interval is a number of loops, the number of its
        completed runs is derived from the number of completed loops. Otherwise, this number starts at 0.

        Args:
          elapsed: The progress at which the run starts.
          restored: The names of the parts that were restored.
        """
        loop_steps = self.experiment.spec.loop_steps
        loops = elapsed.loops if loop_steps is None else elapsed.steps // loop_steps
        for each in self.evaluations:
            if f"eval {each.spec.name}" not in restored:
                interval = each.interval
                each.loop.resume(Elapsed(loops=loops // interval if isinstance(interval, int) else 0))
        if not restored:
            self.data.begin(elapsed.loops)
            self.whole.rows.begin(elapsed.steps)
            self.loop.resume(dataclasses.replace(elapsed, loops=loops))

    def _tell_fresh_start(self, spec: CheckpointSpec, step_num: int) -> None:
        where = "from scratch" if step_num == 0 else f"at step {step_num}, from the given state"
        saves_there = spec.checkpoint_dir in [action.directory for action in self.experiment.savers]
        level = logging.INFO if saves_there else logging.WARNING  # If so, this is simply the first start.
        directories = " and ".join(map(str, self.experiment.checkpoint_dirs))
        logging.log(level, "No checkpoint found in %s: the run starts %s.", directories, where)

    def _open_data(self, is_resumed: bool) -> None:
        spec, saves = self.experiment.checkpoint_spec, bool(self.experiment.savers)
        restores, raises = spec is None or spec.restore_data, spec is not None and spec.on_changed_data == "raise"
        try:
            self.data.open(restores=restores, warns=spec is not None and saves, raises=raises)
        except ValueError as error:
            if spec is not None and is_resumed:
                error.add_note(
                    f"while resuming the run in {spec.checkpoint_dir} at step {self.loop.step_num}. To continue with "
                    "another dataset from its start, write CheckpointSpec(..., restore_data=False)."
                )
            raise

    def _end_reached(self) -> str | None:
        """Returns the reason why there are no steps left to run, or None if there are steps left."""
        spec, loop, run = self.experiment.spec, self.loop, self.loop.engine.run
        withdraw_stop(run.agenda, self.experiment.actions)
        if ends_now(loop):
            return None
        ends = {
            "the end of a run that an evaluation or an action stopped (to train further, give it more patience, or "
            "start a new run from its state)": run.agenda.wants_stop,
            f"stop={spec.stop!r}": spec.stop is not None and spec.stop.stops(loop.elapsed, loop.elapsed),
            f"train_total_steps={spec.total_steps}": spec.total_steps is not None and run.now.steps >= spec.total_steps,
            f"train_epochs={spec.epochs}": self.data.has_ended_all_epochs,
        }
        reached = [end for end, is_reached in ends.items() if is_reached]
        return reached[0] if reached else None


def steps_of_next_loop(loop: ActionLoop) -> int | None:
    """Returns the number of steps in the next train loop, or None if the loop runs to the end of the data."""
    return 0 if ends_now(loop) else loop.engine.loop_end(loop.step_num)


def ends_now(loop: ActionLoop) -> bool:
    """Returns True if the current loop ends without another step.

    This is the case in a resumed run that was interrupted after the last step of a loop but before that loop ended.
    """
    run, plan, now = loop.engine.run, loop.engine.plan, loop.engine.run.now
    return run.batches > 0 and (plan.ends_loop(now.steps) or now.steps == plan.total or run.agenda.wants_stop)


def end_of(loops: Sequence[ActionLoop]) -> str:
    """Returns "finished", "stopped" or "stopped by <action class>" for a run that wasn't ended by a signal."""
    if not loops[0].engine.run.agenda.wants_stop:
        return "finished"
    by = stopped_by(loops)
    return "stopped" if by is None else f"stopped by {type(by).__name__}"


def stopped_by(loops: Iterable[ActionLoop]) -> Action | None:
    """Returns the action that asked the run to stop, or None if no action did."""
    items = (loop.engine.run.agenda.stopped_by for loop in loops)
    return next((item.action for item in items if isinstance(item, ActionItem)), None)
