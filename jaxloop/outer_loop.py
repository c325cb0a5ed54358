"""The experiment: training, evaluation by their specs, resuming, stopping."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from absl import logging
from etils import epath

from jaxloop import checkpoint, checks, interrupt, metrics, types
from jaxloop.action_loop import ActionLoop
from jaxloop.actions.checkpoint_action import CheckpointAction
from jaxloop.loop import as_iterator

STOP_LOOP = types.STOP_LOOP
"""A train or eval loop ends the experiment by `outputs[STOP_LOOP] = True`."""

STOPPED_FILE = "STOPPED"
"""The empty file in the checkpoint directory which says that training is done."""

_POLL_SECS = 0.2


@dataclasses.dataclass(frozen=True)
class EvalContext:
    """Where an experiment is when it asks whether to evaluate.

    Attributes:
      is_continuous_eval: whether checkpoints are evaluated as they appear, without a train loop.
      step_num: completed updates of the state to evaluate.
      loop_count: train loops that have ended; in continuous evaluation, checkpoints that have been evaluated.
    """

    is_continuous_eval: bool
    step_num: int
    loop_count: int


@dataclasses.dataclass(frozen=True)
class EvalSpec:
    """On what an eval loop evaluates, and when.

    >>> EvalSpec([{"x": np.zeros([4, 3])}], eval_loop_interval=5).num_steps is None
    True

    Attributes:
      dataset: an iterable of batches, evaluated from its start each time.
      dataset_iterator: an iterator to go on with instead, `num_steps` batches each time.
      num_steps: how many batches; None for all.
      eval_loop_interval: evaluates after every so many train loops; None for each. Not asked in continuous evaluation.
      should_eval_fn: gets an `EvalContext`, says whether to evaluate. Both the interval and the function must agree.
    """

    dataset: Iterable[types.Batch] | None
    dataset_iterator: Iterator[types.Batch] | None = None
    num_steps: int | None = None
    eval_loop_interval: int | None = None
    should_eval_fn: Callable[[EvalContext], bool] | None = None

    def __post_init__(self):
        checks.check_positive("EvalSpec.num_steps", self.num_steps, optional=True)
        checks.check_positive("EvalSpec.eval_loop_interval", self.eval_loop_interval, optional=True)
        if self.dataset is None and self.dataset_iterator is None:
            raise ValueError("EvalSpec needs a dataset, or a dataset_iterator with num_steps; both are None.")
        if self.dataset_iterator is not None and self.num_steps is None:
            raise ValueError(
                "EvalSpec.dataset_iterator is drawn from again at each evaluation, so it needs num_steps, got None."
            )


@dataclasses.dataclass(frozen=True)
class CheckpointSpec:
    """Where an experiment's checkpoints are.

    With a train loop the experiment resumes from the newest one. (A `CheckpointAction` of the train loop writes them.)
    Without, each checkpoint is evaluated as it appears.

    Attributes:
      checkpoint_dir: the directory with one subdirectory a step.
      iterate_interval_secs: in continuous evaluation, seconds between two looks at the directory.
      iterate_stop_fn: in continuous evaluation, says whether no more checkpoints will come; None for the presence of
        the file `STOPPED`, which training leaves in the directory when it is done.
      transforms: Orbax transformations of the saved tree, for `Step.restore_model`.
    """

    checkpoint_dir: epath.PathLike
    iterate_interval_secs: float = 0
    iterate_stop_fn: Callable[[], bool] | None = None
    transforms: Any = None

    def __post_init__(self):
        if self.iterate_interval_secs < 0:
            raise ValueError(
                f"CheckpointSpec.iterate_interval_secs must not be negative, got {self.iterate_interval_secs}."
            )

    @property
    def stopped_file(self) -> epath.Path:
        """The file which says that training is done."""
        return checkpoint.absolute(self.checkpoint_dir) / STOPPED_FILE


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
    """

    def __init__(
        self,
        train_loop: ActionLoop | None = None,
        eval_loops: Sequence[ActionLoop] | None = None,
        checkpoint_spec: CheckpointSpec | None = None,
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
        self._interrupt = interrupt.Interruptible()
        self._rescued_state: Any = None

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
    ) -> tuple[Any, metrics.LoopOutputs | None]:
        """Runs the experiment to its end.

        It ends when `train_total_steps` are done, the train dataset ends, a loop sets `outputs[STOP_LOOP]`, or Ctrl-C
        is pressed. However it ends, the actions are closed: checkpoints are committed and writers flushed. Where an
        exception ends it, the state as of the last whole step is in `rescued_state`, and is saved by the train loop's
        `CheckpointAction`s.

        Args:
          state: the train state, taken over by the train loop. Only evaluated, it stays usable.
          train_dataset: an iterator of batches, gone on with from loop to loop; an iterable is turned into one.
          train_total_steps: optimizer updates in all, those before a resume included; None for as long as there is
            data.
          train_loop_steps: updates in a loop; loops end at its multiples. None for one loop through the dataset.
          eval_specs: one for each eval loop.
          log_train_total_steps: logs from where to where the training goes.

        Returns:
          `(state, outputs)`, the outputs being those of the last train loop, or of the last eval loop where there is
          no train loop; None where no loop ran.
        """
        eval_specs = tuple(eval_specs or ())
        self._check_arguments(train_dataset, train_total_steps, train_loop_steps, eval_specs)
        checks.check_alive(state, "OuterLoop(...)")
        tally = _Tally(self._loops)
        self._rescued_state = None
        for loop in self._loops:
            loop.flushes_actions = False  # They are closed here, however the run ends.
        try:
            with self._interrupt:
                if self._train_loop is not None:
                    state, outputs = self._train(
                        tally,
                        state,
                        as_iterator(train_dataset),
                        train_total_steps,
                        train_loop_steps,
                        eval_specs,
                        log_train_total_steps,
                    )
                elif self._checkpoint_spec is not None:
                    outputs = self._evaluate_checkpoints(tally, state, self._checkpoint_spec, eval_specs)
                else:
                    context = EvalContext(is_continuous_eval=False, step_num=_step_num(state), loop_count=0)
                    outputs = self._evaluate(tally, state, eval_specs, context)
        except BaseException as error:
            self._rescue_state(tally, save=isinstance(error, Exception))
            self._close_actions(raise_errors=False)
            raise
        self._close_actions(raise_errors=True)
        if not self._interrupt.requested:
            tally.report_what_never_ran(eval_specs)
            if self._train_loop is None and outputs is None:
                logging.warning("Nothing was evaluated: no should_eval_fn agreed, or there was no checkpoint.")
        if self._train_loop is not None and self._checkpoint_spec is not None and not self._interrupt.requested:
            # Only now that the last checkpoint is committed may an evaluator stop waiting for it.
            self._checkpoint_spec.stopped_file.touch()
        return state, outputs

    def _check_arguments(self, train_dataset, train_total_steps, train_loop_steps, eval_specs) -> None:
        checks.check_positive("train_total_steps", train_total_steps, optional=True)
        checks.check_positive("train_loop_steps", train_loop_steps, optional=True)
        if (self._train_loop is None) != (train_dataset is None):
            got, missing = (
                ("train_dataset", "train_loop") if self._train_loop is None else ("train_loop", "train_dataset")
            )
            raise ValueError(
                f"OuterLoop got a {got} without a {missing}: give both to train, neither to evaluate only."
            )
        if len(eval_specs) != len(self._eval_loops):
            raise ValueError(
                f"OuterLoop has {len(self._eval_loops)} eval_loops and was called with {len(eval_specs)} eval_specs. "
                "Give one EvalSpec for each eval loop, in their order."
            )
        for spec in eval_specs:
            if not isinstance(spec, EvalSpec):
                raise TypeError(f"eval_specs must hold EvalSpecs, got {spec!r}.")

    # Training ------------------------------------------------------------------------------------

    def _train(
        self, tally, state, dataset, total_steps, loop_steps, eval_specs, log_total_steps
    ) -> tuple[Any, metrics.LoopOutputs | None]:
        train_loop: ActionLoop = self._train_loop  # pyright: ignore[reportAssignmentType]
        if self._checkpoint_spec is not None:
            state = self._resume(train_loop, state, self._checkpoint_spec)
        step_num = _step_num(state)
        _check_no_newer_checkpoints(train_loop, step_num)
        if loop_steps is not None:
            self._set_loop_counts(step_num // loop_steps, eval_specs)
        if total_steps is not None and step_num >= total_steps:
            logging.warning("Nothing is left to train: step %d of train_total_steps=%d.", step_num, total_steps)
        elif log_total_steps:
            logging.info("Training from step %d to %s.", step_num, total_steps or "the end of the dataset")
        tally.newest, tally.has_begun = (state, step_num), True
        outputs = None
        while total_steps is None or step_num < total_steps:
            num_steps = _steps_of_next_loop(step_num, total_steps, loop_steps)
            tally.newest = None  # While the train loop runs, it knows better.
            state, loop_outputs = train_loop(state, dataset, num_steps)
            steps_run = tally.count(train_loop)
            step_num += steps_run
            tally.newest = (state, step_num)
            eval_outputs = None
            if steps_run:
                outputs = loop_outputs
            if steps_run and not self._interrupt.requested:
                context = EvalContext(is_continuous_eval=False, step_num=step_num, loop_count=train_loop.loop_count)
                eval_outputs = self._evaluate(tally, state, eval_specs, context)
            if self._interrupt.requested:
                logging.warning("Ended by Ctrl-C. The state of step %d is returned.", step_num)
                self._save_now(state, step_num)
                break
            if _asks_to_stop(loop_outputs) or _asks_to_stop(eval_outputs):
                loop_outputs[STOP_LOOP] = True
                logging.info("Stopped at step %d, as outputs[%r] asked.", step_num, STOP_LOOP)
                break
            if num_steps is None or steps_run < num_steps:
                self._report_end_of_data(step_num, total_steps)
                break
        return state, outputs

    def _set_loop_counts(self, train_loops: int, eval_specs: Sequence[EvalSpec]) -> None:
        """Has intervals go on where an earlier run, in this process or another, left off."""
        self._train_loop.loop_count = train_loops  # pyright: ignore[reportOptionalMemberAccess]
        for loop, spec in zip(self._eval_loops, eval_specs, strict=True):
            if spec.should_eval_fn is None:
                loop.loop_count = train_loops // (spec.eval_loop_interval or 1)

    def _resume(self, train_loop: ActionLoop, state: Any, spec: CheckpointSpec) -> Any:
        # Now rather than after hours of training, when STOPPED is written.
        checkpoint.prepare_directory(spec.checkpoint_dir)
        step_num, saved = _step_num(state), checkpoint.all_steps(spec.checkpoint_dir)
        if saved and saved[-1] < step_num:
            logging.info("Step %d is past the newest checkpoint, of step %d: going on.", step_num, saved[-1])
        else:
            state = train_loop.step.restore_model(state, spec.checkpoint_dir, transforms=spec.transforms)
            if saved:
                logging.info("Resumed at step %d from %s.", saved[-1], spec.checkpoint_dir)
        # Evaluators of this directory shall wait for what is trained now.
        spec.stopped_file.unlink(missing_ok=True)
        return state

    def _report_end_of_data(self, step_num: int, total_steps: int | None) -> None:
        if total_steps is not None and step_num < total_steps:
            logging.warning(
                "The train dataset ended at step %d of train_total_steps=%d; the run ends here. Repeat the dataset "
                "(.repeat()) to go on, or lower train_total_steps.",
                step_num,
                total_steps,
            )
        elif total_steps is None:
            logging.info("The train dataset ended at step %d.", step_num)

    # Evaluation ----------------------------------------------------------------------------------

    def _evaluate(self, tally, state, eval_specs, context: EvalContext) -> metrics.LoopOutputs | None:
        """Runs the evaluations that are due; returns the outputs of the last of them."""
        last, stop = None, False
        for loop, spec in zip(self._eval_loops, eval_specs, strict=True):
            if not _is_due(spec, context):
                continue
            dataset = as_iterator(spec.dataset) if spec.dataset_iterator is None else spec.dataset_iterator
            _, last = loop(state, dataset, spec.num_steps, return_state_from_step=False)
            self._check_evaluated(tally, spec, tally.count(loop))
            if loop.was_interrupted:
                break
            stop = stop or _asks_to_stop(last)
        if last is not None and stop:
            last[STOP_LOOP] = True
        return last

    def _check_evaluated(self, tally: "_Tally", spec: EvalSpec, steps_run: int) -> None:
        if self._interrupt.requested:
            return
        if steps_run == 0:
            used_up = spec.dataset_iterator is not None or iter(spec.dataset) is spec.dataset  # pyright: ignore
            raise ValueError(
                "An eval dataset gave no batch. "
                + (
                    "It is an iterator, which has been used up: give an iterable that starts anew each time (a list, a "
                    "tf.data.Dataset, tfds.as_numpy(...))."
                    if used_up
                    else "Look at what its pipeline filters out, and whether it drops a remainder that is all there is."
                )
            )
        if spec.num_steps is not None and steps_run < spec.num_steps and id(spec) not in tally.short_evaluations:
            tally.short_evaluations.add(id(spec))  # Once a run.
            logging.warning(
                "An eval dataset ended after %d of num_steps=%d batches; its metrics are those of %d batches.",
                steps_run,
                spec.num_steps,
                steps_run,
            )

    def _evaluate_checkpoints(self, tally, state, spec: CheckpointSpec, eval_specs) -> metrics.LoopOutputs | None:
        """Evaluates each checkpoint as it appears, in the order of their steps."""
        stop_fn = spec.iterate_stop_fn or spec.stopped_file.exists
        step = self._eval_loops[0].step
        outputs, seen = None, set()
        while True:
            # Asked before looking: what was saved before the stop is still found.
            no_more_will_come = stop_fn()
            for step_num in [found for found in checkpoint.all_steps(spec.checkpoint_dir) if found not in seen]:
                seen.add(step_num)
                try:
                    restored = step.restore_model(state, spec.checkpoint_dir, step_num, spec.transforms)
                except Exception:
                    if step_num in checkpoint.all_steps(spec.checkpoint_dir):
                        raise
                    logging.warning("The checkpoint of step %d was deleted before it could be evaluated.", step_num)
                    continue
                context = EvalContext(is_continuous_eval=True, step_num=step_num, loop_count=len(seen) - 1)
                outputs = self._evaluate(tally, restored, eval_specs, context) or outputs
                if _asks_to_stop(outputs) or self._interrupt.requested:
                    return outputs
            if no_more_will_come or self._interrupt.requested:
                return outputs
            self._sleep(max(spec.iterate_interval_secs, _POLL_SECS))

    def _sleep(self, seconds: float) -> None:
        """Sleeps in short pieces, for Ctrl-C not to wait long."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and not self._interrupt.requested:
            time.sleep(min(left, _POLL_SECS))

    # The end -------------------------------------------------------------------------------------

    def _rescue_state(self, tally: "_Tally", save: bool) -> None:
        """Keeps, and saves, the state as of the last whole step before an exception."""
        if self._train_loop is None or not tally.has_begun:
            return
        state, step_num = tally.newest or (self._train_loop.rescued_state, self._train_loop.step_num)
        self._rescued_state = state
        if state is None:
            logging.error("The step that failed had consumed the state of step %d: it is lost.", step_num)
        elif save:
            self._save_now(state, step_num)

    def _save_now(self, state: Any, step_num: int) -> None:
        """Has the train loop's `CheckpointAction`s save a state for which their interval has not come."""
        for action in _unique_actions(self._loops[:1]):
            if isinstance(action, CheckpointAction) and step_num not in checkpoint.all_steps(action.directory):
                try:
                    if action.save(step_num, state, None):
                        logging.info("%r saves the state of step %d.", action, step_num)
                except Exception:
                    logging.exception("%r could not save the state of step %d.", action, step_num)

    def _close_actions(self, raise_errors: bool) -> None:
        for loop in self._loops:
            loop.flushes_actions = True
        errors = []
        for action in _unique_actions(self._loops):
            try:
                action.close()
            except Exception as error:
                error.add_note(f"when {action!r} was closed at the end of the run")
                logging.exception("%r could not be closed.", action)
                errors.append(error)
        if errors and raise_errors:
            raise errors[0]


class _Tally:
    """What one run of an OuterLoop has done: which loops and actions ran, and the newest state."""

    def __init__(self, loops: Sequence[ActionLoop]):
        self._loops = loops
        self._runs = {id(loop): 0 for loop in loops}
        self._most_steps = {id(loop): 0 for loop in loops}
        self._calls_before = {id(each): list(each.calls) for loop in loops for each in loop.action_lists}
        self.newest: tuple[Any, int] | None = None
        self.has_begun = False
        self.short_evaluations: set[int] = set()

    def count(self, loop: ActionLoop) -> int:
        """Counts the loop's last call; returns how many steps it ran."""
        steps_run = len(loop.num_examples)
        self._runs[id(loop)] += steps_run > 0
        self._most_steps[id(loop)] = max(self._most_steps[id(loop)], steps_run)
        return steps_run

    def report_what_never_ran(self, eval_specs: Sequence[EvalSpec]) -> None:
        """Says in one warning which actions and evaluations never came to run, and why."""
        lines, told = [], set()
        for loop in self._loops:
            runs, most_steps = self._runs[id(loop)], self._most_steps[id(loop)]
            for each in loop.action_lists if runs else ():
                if id(each) in told:  # Of a step that two loops share.
                    continue
                told.add(id(each))
                happened = f"{runs} ran" if each.unit == "loops" else f"the longest loop had {most_steps}"
                for action, calls, before in zip(each.actions, each.calls, self._calls_before[id(each)], strict=True):
                    if calls == before:
                        lines.append(f"{action!r} of {loop!r}: its interval counts {each.unit}, of which {happened}")
        train_loops = sum(self._runs[id(loop)] for loop in self._loops[: len(self._loops) - len(eval_specs)])
        for index, spec in enumerate(eval_specs):
            loop = self._loops[len(self._loops) - len(eval_specs) + index]
            if train_loops and not self._runs[id(loop)]:
                asked = (
                    "should_eval_fn"
                    if spec.eval_loop_interval is None
                    else f"eval_loop_interval={spec.eval_loop_interval}"
                )
                lines.append(f"{loop!r}: {asked} never let it run after one of the {train_loops} train loops")
        if lines:
            logging.warning(
                "Never called in this run:\n  %s.\nA smaller interval would make them run.", ";\n  ".join(lines)
            )


def _step_num(state: Any) -> int:
    return int(metrics.fetch(getattr(state, "step", 0)))


def _check_no_newer_checkpoints(train_loop: ActionLoop, step_num: int) -> None:
    for action in _unique_actions([train_loop]):
        found = checkpoint.all_steps(action.directory) if isinstance(action, CheckpointAction) else []
        if found and found[-1] > step_num:
            raise ValueError(
                f"{action!r} would save among the checkpoints of another run: training starts at step {step_num}, and "
                f"the directory has checkpoints up to step {found[-1]}. Go on from them, with "
                f"checkpoint_spec=CheckpointSpec({str(action.directory)!r}), or give another directory."
            )


def _steps_of_next_loop(step_num: int, total_steps: int | None, loop_steps: int | None) -> int | None:
    """To the next multiple of `loop_steps`, but not past the total; None for as long as there is data."""
    limits = []
    if loop_steps is not None:
        limits.append(loop_steps - step_num % loop_steps)
    if total_steps is not None:
        limits.append(total_steps - step_num)
    return min(limits, default=None)


def _is_due(spec: EvalSpec, context: EvalContext) -> bool:
    if not context.is_continuous_eval and context.loop_count % (spec.eval_loop_interval or 1):
        return False
    return spec.should_eval_fn is None or bool(spec.should_eval_fn(context))


def _asks_to_stop(outputs: types.Output) -> bool:
    return outputs is not None and bool(np.any(outputs.get(STOP_LOOP, False)))


def _unique_actions(loops: Sequence[ActionLoop]) -> list[Any]:
    actions = [action for loop in loops for each in loop.action_lists for action in each.actions]
    return list({id(action): action for action in actions}.values())
