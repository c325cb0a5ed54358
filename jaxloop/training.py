"""The training of an experiment: from where it begins or goes on, loop after loop, to its end."""

from collections.abc import Callable, Sequence
from typing import Any, final

from absl import logging

from jaxloop import agreement, checkpoint, checks, distributed, interrupt, metrics, types
from jaxloop.action_loop import ActionLoop
from jaxloop.evaluations import Evaluations
from jaxloop.position import PositionedIterator, PositionUnknownError
from jaxloop.schedules import Elapsed
from jaxloop.sources import reshuffles
from jaxloop.specs import CheckpointSpec, RunSpec, names_of
from jaxloop.whole_run import Resumed, WholeRun, check_no_newer_checkpoints, checkpoint_actions, go_to


@final
class Training:
    """The training of one call of an `OuterLoop`.

    Args:
      loop: the train loop.
      spec: on what it trains, and for how long.
      evaluations: those of the call.
      run: what checkpoints keep of it beside the state.
      checkpoint_spec: where to go on from; None to begin with the state as it is.
      source_of: what counts the batches of the train data.
      job: the processes that train together.
      requests: which signals have come.

    Attributes:
      run: what checkpoints keep of it.
      has_begun: whether it has come to its first step.
      newest: the newest state and its step; None while the train loop runs, which knows better.
    """

    def __init__(
        self,
        loop: ActionLoop,
        spec: RunSpec,
        evaluations: Evaluations,
        run: WholeRun,
        checkpoint_spec: CheckpointSpec | None,
        *,
        source_of: Callable[[Any], PositionedIterator],
        job: agreement.Job,
        requests: interrupt.Interruptible,
    ):
        self._loop, self._spec, self._evaluations = loop, spec, evaluations
        self._checkpoint_spec, self._source_of = checkpoint_spec, source_of
        self._job, self._interrupt = job, requests
        self.run: WholeRun = run
        self._pass_has_ended = False
        self.has_begun: bool = False
        self.newest: tuple[Any, int] | None = None

    def __call__(self, state: Any, *, says_so: bool) -> tuple[Any, metrics.LoopOutputs | None]:
        """Trains to the end; returns the state and the outputs of the last train loop, None where none ran.

        Args:
          state: what to begin with, unless there is a checkpoint.
          says_so: logs from where to where the training goes.
        """
        state, step_num, resumed = self._resume(state)
        if self._spec.total_steps is not None or self._spec.loop_steps is not None:
            checks.check_multiple("state.step", step_num, self._loop.step)
        if self._checkpoint_spec is not None:
            for action in dict.fromkeys(each for loop in self._loops for each in loop.actions):
                action.begin_run(step_num)
        self._open_data(resumed)
        if resumed is not None:
            self._evaluations.resume(step_num, self.run.measured_at(step_num))
        run_info = self._loop.run_info
        assert run_info is not None
        run_info.eval_intervals, run_info.evaluate = self._evaluations.intervals, self._evaluations.evaluate
        run_info.end_data, run_info.loop_steps = self._end_pass, self._spec.loop_steps
        end = self._end_that_is_reached(resumed, step_num)
        if resumed is not None and not self._catch_up(state, resumed, is_last=end is not None):
            logging.info("Stopped at step %d, as an evaluation or an action asked.", step_num)
            return state, None
        if end:
            logging.warning("Nothing is left to train: step %d of %s.", step_num, end)
            return state, None
        if says_so:
            logging.info("Training from step %d to %s.", step_num, self._spec.end)
        if resumed is None and step_num == 0:
            state, self._loop.source = self._loop.step.prepare_state(state), self.run.source
            if not self._loop.hold(state):  # What is due before the first step.
                logging.info("Stopped before the first step, as an evaluation or an action asked.")
                return state, None
        self.newest, self.has_begun = (state, step_num), True
        return self._train(state, step_num, is_resumed=resumed is not None)

    def save_now(self, state: Any, step_num: int) -> list[Exception]:
        """Has the train loop's `CheckpointAction`s save a run whose interval has not come; returns their errors."""
        errors = []
        for action in checkpoint_actions(self._loop):
            try:
                action.flush()  # Whether a step is saved is known, to all processes, only once it is committed.
                if step_num not in checkpoint.all_steps(action.directory):
                    snapshot = self.run.snapshot(was_broken_off=True)
                    if action.save(step_num, state, None, **snapshot):
                        action.flush()
                        logging.info("%r has saved the state of step %d.", action, step_num)
            except Exception as error:
                logging.exception("%r could not save the state of step %d.", action, step_num)
                errors.append(error)
        return errors

    def close(self) -> None:
        """Lets go of train data with which no later call goes on: what draws them ahead ends."""
        if not self._spec.has_iterator:  # Nobody holds them then; to close them is for whoever made them.
            self.run.source = None
            self._loop.forget_batches()

    @property
    def _loops(self) -> list[ActionLoop]:
        return [self._loop, *self._evaluations.loops.values()]

    # Loop after loop -----------------------------------------------------------------------------

    def _train(self, state: Any, step_num: int, *, is_resumed: bool) -> tuple[Any, metrics.LoopOutputs | None]:
        loop, first_step, outputs = self._loop, step_num, None
        while True:
            loop_count, loops_run = loop.loop_count, loop.progress.loops_run
            state, found = self._run_pass(state)
            step_num = loop.step_num
            self.newest = (state, step_num)
            if loop.progress.loops_run > loops_run or loop.loop_count > loop_count:
                outputs = found
            if self._interrupt.requested:
                if loop.was_interrupted and not checkpoint_actions(loop):  # The loop under way has not come to its end.
                    loop.loop_count -= 1
                self._end_by_signal(state, step_num)
                return state, outputs
            if found.asks_to_stop:
                found[types.STOP_LOOP] = True
                logging.info("Stopped at step %d, as outputs[%r] asked.", step_num, types.STOP_LOOP)
                break
            if loop.data_have_ended and not self._pass_has_ended:
                self._end_pass()
            goes_on = self._has_next_pass(step_num) if loop.data_have_ended else loop.loop_count > loop_count
            if loop.elapsed.is_last or not goes_on:
                break
        if step_num > first_step or is_resumed:
            loop.hold(state, is_last=True)  # What waits for the last step, and can know only now.
        return state, outputs

    def _run_pass(self, state: Any) -> tuple[Any, metrics.LoopOutputs]:
        """Trains to the end of the data, or of the run; returns the state, and the outputs of the last loop."""
        loop, run, run_info = self._loop, self.run, self._loop.run_info
        assert run_info is not None
        self.newest, self._pass_has_ended, loop.source = None, False, run.source
        run_info.ends_with_data = self._is_last_pass(run.passes + 1)
        return loop.train(state, iter(()) if run.source is None else run.source, self._steps_of_next_loop)

    def _steps_of_next_loop(self) -> int | None:
        step_num = self._loop.step_num
        # A run may have been broken off after the last step of a loop, and before its end.
        only_ends = self._loop.steps_before > 0 and self._spec.ends_loop(step_num)
        return 0 if only_ends else self._spec.steps_of_next_loop(step_num)

    def _end_by_signal(self, state: Any, step_num: int) -> None:
        saves = ", and being saved" if checkpoint_actions(self._loop) else ""
        signal_name = self._interrupt.signal_name
        logging.warning("Ended by %s. The state of step %d is returned%s.", signal_name, step_num, saves)
        for error in self.save_now(state, step_num):
            raise error

    def _end_pass(self) -> None:
        """Counts a pass over the train data, and begins the next one; raises where it had no batch.

        A checkpoint of this moment keeps the position at which the next pass begins, which may have an order of its
        own. After the last pass it does so for a run that is resumed for more of them.
        """
        run, self._pass_has_ended = self.run, True
        if self._job.any_stops(run.source is not None and run.source.count == 0):
            raise checks.empty_dataset(self._spec.train_dataset)
        if self._spec.epochs is None:
            return
        run.passes += 1
        if self._spec.has_iterator:
            run.source = None
            return
        if run.source is not None:
            run.source.close()
        self._loop.forget_batches()
        run.source = None
        if run.passes < self._spec.epochs or checkpoint_actions(self._loop):
            run.source = self._source_of(self._spec.train_dataset)

    def _has_next_pass(self, step_num: int) -> bool:
        """Whether there is another pass over the train data; says so where there is none."""
        spec = self._spec
        if not self._is_last_pass(self.run.passes):
            return True
        if spec.epochs is not None and self.run.passes >= spec.epochs:
            logging.info("The last of train_epochs=%d ended at step %d.", spec.epochs, step_num)
        else:
            self._report_end_of_data(step_num)
        return False

    def _is_last_pass(self, number: int) -> bool:
        """Whether the data can't, or need not, begin again after so many passes."""
        return self._spec.epochs is None or self._spec.has_iterator or number >= self._spec.epochs

    def _report_end_of_data(self, step_num: int) -> None:
        total_steps = self._spec.total_steps
        if total_steps is None or step_num == total_steps:
            logging.info("The train dataset ended at step %d.", step_num)
            return
        text = f"The train dataset ended at step {step_num} of train_total_steps={total_steps}"
        if self._spec.on_exhausted == "raise":
            error = ValueError(f"{text}. Repeat the dataset, or lower train_total_steps.")
            raise agreement.known_to_all(error)
        logging.warning("%s; the run ends here. Repeat the dataset to go on, or lower train_total_steps.", text)

    def _end_that_is_reached(self, resumed: Resumed | None, step_num: int) -> str | None:
        """Which end a run is at already, in words; None if there is something left to train."""
        spec, loop = self._spec, self._loop
        if loop.steps_before and spec.ends_loop(step_num):
            return None
        ends = {
            "a run that was stopped there, as an evaluation or an action asked (to train on from its state, take "
            "step.restore_model(state, directory) to another directory)": resumed and resumed.has_stopped,
            f"stop={spec.stop!r}": spec.stop is not None and spec.stop.stops(loop.elapsed, loop.elapsed),
            f"train_total_steps={spec.total_steps}": spec.total_steps is not None and step_num >= spec.total_steps,
            f"train_epochs={spec.epochs}": spec.epochs is not None and self.run.passes >= spec.epochs,
        }
        return next((end for end, is_reached in ends.items() if is_reached), None)

    # Going on ------------------------------------------------------------------------------------

    def _resume(self, state: Any) -> tuple[Any, int, Resumed | None]:
        """Goes on from the newest checkpoint, or where the last call ended, or begins with the state as it is.

        Returns the state, its step, and how far the run was where it is that of a checkpoint.
        """
        loop, run, resumed = self._loop, self.run, None
        if self._checkpoint_spec is not None:
            state, resumed = self._restore(state, self._checkpoint_spec)
        if resumed is not None:
            step_num = resumed.elapsed.steps
        else:
            step_num = step_num_of(state) if hasattr(state, "step") else loop.elapsed.steps
            if step_num != loop.step_num:  # Else it goes on where the last call ended.
                run.passes = 0
                for each in self._loops:
                    each.resume(Elapsed(step_num))
            run.resume_history(step_num, None if step_num else 0)  # The rows of step 0 are made again.
        if self._spec.loop_steps is not None and (resumed is None or not resumed.knows_position):
            loop.loop_count = step_num // self._spec.loop_steps
            self._evaluations.count_train_loops(loop.loop_count)
        check_no_newer_checkpoints(loop, step_num)
        return state, step_num, resumed

    def _restore(self, state: Any, spec: CheckpointSpec) -> tuple[Any, Resumed | None]:
        """Restores the newest checkpoint that is whole; the state as it is where it is past that one."""
        saved, step_num, resumed = self._whole_checkpoints(spec), step_num_of(state), None
        if saved and saved[-1] < step_num:
            logging.info("Step %d is past the newest checkpoint, of step %d: going on.", step_num, saved[-1])
        elif not saved:
            logging.info("No checkpoint found in %s", spec.checkpoint_dir)
        else:
            given = checks.adopt(state)
            restored = checkpoint.open_newest(
                spec.checkpoint_dir, given, transforms=spec.transforms, moves_aside=not self._job.is_shared
            )
            assert restored is not None
            opened, state = restored
            saved_step = opened.step
            _check_count(state, saved_step, spec.checkpoint_dir)
            resumed = self.run.load(opened, given)
            logging.info("Resumed at step %d from %s.", saved_step, spec.checkpoint_dir)
        if distributed.is_first_process():  # Evaluators of this directory shall wait for what is trained now.
            spec.stopped_file.unlink(missing_ok=True)
        return state, resumed

    def _whole_checkpoints(self, spec: CheckpointSpec) -> Sequence[int]:
        """The steps that are saved, the same in all processes."""
        checkpoint.clear_leftovers(spec.checkpoint_dir)
        if self._job.is_shared:
            if self._job.is_first:
                checkpoint.move_damaged_aside(spec.checkpoint_dir)
            agreement.wait_for_all("before restoring")
        saved = checkpoint.all_steps(spec.checkpoint_dir)
        found = f"The list of checkpoints in {spec.checkpoint_dir}, which must be a directory that all share,"
        self._job.check_same(found, lambda: list(map(str, saved)))
        return saved

    def _open_data(self, resumed: Resumed | None) -> None:
        """Has the run draw from its train data, from where it was when it was saved."""
        epochs, spec, run = self._spec.epochs, self._checkpoint_spec, self.run
        if resumed is not None and resumed.knows_position and resumed.position is None and epochs is not None:
            resumed = None  # It was between two passes.
        # An epoch that is left half-way is gone on with in any case.
        is_epoch = resumed is not None and epochs is not None
        run.source = self._source_of(self._spec.train_dataset)
        if resumed is None and spec is not None and checkpoint_actions(self._loop):
            self._warn_of_inexact_resume(run.source)
        if is_epoch:
            run.source = PositionedIterator(run.source, skippable=True)
        if resumed is None or spec is None or not spec.restore_data:
            return
        self._loop.forget_batches()
        try:
            if resumed.position is not None:
                go_to(run.source, resumed.position, is_own=resumed.is_own_position)
            elif not resumed.knows_position and is_epoch and resumed.steps_in_loop:
                run.source.skip(resumed.steps_in_loop)
        except PositionUnknownError as error:
            logging.warning("%s The run goes on with what the train dataset gives now.", error)
        except ValueError as error:
            error.add_note(
                f"when the run in {spec.checkpoint_dir} was to go on at step {resumed.elapsed.steps}. To train on with "
                "other data, from their start, write CheckpointSpec(..., restore_data=False)."
            )
            raise

    def _warn_of_inexact_resume(self, source: PositionedIterator) -> None:
        if warning := source.resume_warning(several_passes=(self._spec.epochs or 1) > 1):
            logging.warning("%s", warning)
        for name, spec in zip(names_of(self._spec.eval_specs), self._spec.eval_specs, strict=True):
            if reshuffles(spec.dataset):
                logging.warning(
                    "The data of the evaluation %r are shuffled anew each time, so a resumed run may measure other "
                    "values. Write dataset.shuffle(..., seed=..., reshuffle_each_iteration=False).",
                    name,
                )

    def _catch_up(self, state: Any, resumed: Resumed, *, is_last: bool) -> bool:
        """Does what belongs to the step of a checkpoint, and did not come to it because the run was broken off.

        Returns whether the run goes on.
        """
        elapsed = resumed.elapsed
        if not resumed.was_broken_off or elapsed.previous is None:
            return True
        loop_has_ended = resumed.steps_in_loop == 0 and elapsed.loops > elapsed.previous.loops
        return self._loop.hold(state, at_end=loop_has_ended, is_last=is_last, saves=False)


def _check_count(state: Any, saved_step: int, directory: Any) -> None:
    """Raises where a checkpoint is not of the step that it was saved under."""
    if hasattr(state, "step") and (count := step_num_of(state)) != saved_step:
        raise ValueError(
            f"The checkpoint {saved_step} in {directory} has state.step={count}, and must have {saved_step}, the name "
            "of its directory: no run can resume from it. A run whose step made another number of updates than it "
            "said, or a program that counts something else, saved it. Remove that directory, or give another "
            "checkpoint_dir; to begin with its parameters, call step.restore_model(state, directory)."
        )


def step_num_of(state: Any) -> int:
    """The number of completed updates of a state; 0 for one that doesn't count them."""
    return int(metrics.fetch(getattr(state, "step", 0)))
