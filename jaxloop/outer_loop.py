"""The experiment: training, evaluation by their specs, resuming, stopping."""

import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from absl import logging
from etils import epath

from jaxloop import (
    agreement,
    bad_numbers,
    checkpoint,
    checks,
    distributed,
    failures,
    interrupt,
    lock,
    metrics,
    preflight,
    types,
)
from jaxloop.action_loop import ActionLoop, Run
from jaxloop.actions.action import Action
from jaxloop.history import History
from jaxloop.loop import as_iterator
from jaxloop.position import PositionedIterator, PositionUnknownError
from jaxloop.schedules import Elapsed, Schedule
from jaxloop.specs import STOPPED_FILE as STOPPED_FILE
from jaxloop.specs import CheckpointSpec, EvalContext, EvalSpec
from jaxloop.tally import Tally
from jaxloop.timing import Spent
from jaxloop.train_loop import TrainLoop
from jaxloop.whole_run import Resumed, WholeRun, check_no_newer_checkpoints, checkpoint_actions, go_to

STOP_LOOP = types.STOP_LOOP
"""A train or eval loop ends the experiment by `outputs[STOP_LOOP] = True`."""

HISTORY_FILE = "history.jsonl"
"""The file in the work directory with a row of the history on each line."""

_POLL_SECS = 0.2


@dataclasses.dataclass
class _Call:
    """A call of an OuterLoop: what it was given, see there, and what it has come to."""

    state: Any
    train_dataset: Any
    total_steps: int | None
    loop_steps: int | None
    epochs: int | None
    stop: Schedule | None
    eval_specs: Sequence[EvalSpec]
    log_total_steps: bool
    on_exhausted: str
    tally: Tally
    eval_sources: dict[str, PositionedIterator] = dataclasses.field(default_factory=dict)
    whole_run: WholeRun | None = None  # Where something is trained.


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
        self._is_shared = shared[0]
        self._interrupt = interrupt.Interruptible(defers=self._is_shared)
        self._rescued_state: Any = None
        if workdir is None and checkpoint_spec is not None and train_loop is not None:
            workdir = checkpoint_spec.checkpoint_dir
        if not isinstance(log_interval, Schedule):
            checks.check_positive("OuterLoop.log_interval", log_interval)
        if len({id(loop) for loop in self._loops}) < len(self._loops):
            raise ValueError("OuterLoop got one loop twice. Make a loop for each EvalSpec; they may share their step.")
        file = HISTORY_FILE if train_loop is not None else f"eval_{HISTORY_FILE}"
        self._workdir = workdir
        history_file = None if workdir is None else epath.Path(workdir) / file
        self._history = History(history_file, writes=not self._is_shared or distributed.is_first_process())
        self._log_interval = log_interval
        self._spent = Spent()
        self._passes = 0  # Over the train data, that have ended.
        self._sources: dict[int, PositionedIterator] = {}  # Of the iterators of the last call, by their ids.

    @property
    def history(self) -> History:
        """What was measured: `{"train": {...}}` at each log point, `{"test": {...}}` at each evaluation so named.

        Statistics such as the steps per second are left out: a run done again has the same history.
        """
        return self._history

    @property
    def spent(self) -> Spent:
        """What the last call spent its time on; as a text, one sentence."""
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

        It ends when `train_total_steps` are done, `stop` fires, the train dataset ends, a loop sets
        `outputs[STOP_LOOP]`, or Ctrl-C is pressed. However it ends, the actions are closed: checkpoints are committed
        and writers flushed. Where an exception ends it, the state as of the last whole step is in `rescued_state`, and
        is saved by the train loop's `CheckpointAction`s.

        Args:
          state: the train state, taken over by the train loop. Only evaluated, it stays usable.
          train_dataset: an iterator of batches, gone on with from loop to loop; an iterable is turned into one.
          train_total_steps: optimizer updates in all, those before a resume included; None for as long as there is
            data.
          train_loop_steps: updates in a loop; loops end at its multiples. None for one loop through the dataset.
          eval_specs: one for each eval loop.
          log_train_total_steps: logs from where to where the training goes.
          stop: ends the training besides: `at(time=3600)`, `at(samples=1_000_000)`.
          train_epochs: passes over the train dataset, an iterable, of which each is one loop (so there are no
            `train_loop_steps`); with `train_total_steps`, at most so many. A run that was resumed inside a pass skips
            the batches that it has had, which is exact where they come in the same order again.
          on_exhausted: where the train dataset ends before `train_total_steps`, "stop" ends the run with a warning,
            "raise" with an error, after the last step was saved.

        Returns:
          `(state, outputs)`, the outputs being those of the last train loop, or of the last eval loop where there is
          no train loop; None where no loop ran.
        """
        eval_specs = tuple(eval_specs or ())
        for error in self._errors_of_arguments(
            train_dataset, train_total_steps, train_loop_steps, eval_specs, stop, train_epochs, on_exhausted
        ):
            raise error
        checks.check_alive(state, "OuterLoop(...)")
        stop, tally = stop and stop.as_stop(), Tally(self._loops)
        call = _Call(
            state,
            train_dataset,
            train_total_steps,
            train_loop_steps,
            train_epochs,
            stop,
            eval_specs,
            log_train_total_steps,
            on_exhausted,
            tally,
        )
        self._rescued_state = None
        if self._is_shared:
            self._check_same_in_all(call)
        spent_before = self._loops[0].spent
        with self._interrupt, contextlib.ExitStack() as locks:  # After SIGTERM, closing the first one exits.
            for directory in self._directories_to_train_in():
                if distributed.is_first_process():
                    locks.enter_context(lock.DirectoryLock(directory))
            try:
                self._join_loops(call)
                with self._loops[0].stopwatch.counting("rest"):
                    state, outputs = self._run(call)
                    if self._is_shared:  # Of a signal that came since the last batch.
                        agreement.any_stops(False, self._interrupt)
                    is_over = not self._interrupt.requested  # A signal from here on comes too late to change that.
                    if is_over:
                        state = _finish_actions(self._loops, state)
            except BaseException as error:
                can_save = not self._is_shared or agreement.is_known_to_all(error)  # To save takes all processes.
                self._rescue_state(call, error, save=can_save and isinstance(error, Exception | SystemExit))
                self._close_actions(raise_errors=False)
                self._record_failure(error)
                raise
            self._close_actions(raise_errors=True)
            self._spent = self._loops[0].spent - spent_before
            logging.info("%s", self._spent)
            if is_over:
                tally.report_what_never_ran(eval_specs)
                if self._train_loop is None and outputs is None:
                    logging.warning("Nothing was evaluated: no should_eval_fn agreed, or there was no checkpoint.")
                if self._writes_stopped_file():
                    assert self._checkpoint_spec is not None
                    # Only now that the last checkpoint is committed may an evaluator stop waiting for it.
                    self._checkpoint_spec.stopped_file.touch()
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
        >>> outer_loop = OuterLoop(jaxloop.TrainLoop(step), [jaxloop.EvalLoop(step)])
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
        eval_specs = tuple(eval_specs or ())
        errors = self._errors_of_arguments(
            train_dataset, train_total_steps, train_loop_steps, eval_specs, stop, train_epochs, on_exhausted
        )
        specs = [spec for spec in eval_specs if isinstance(spec, EvalSpec)]
        try:
            names = _names(specs)
        except ValueError:  # Which is among the errors.
            names = [f"{spec.name} {number}" for number, spec in enumerate(specs, start=1)]
        as_count = lambda value: value if isinstance(value, int) and value > 0 else None
        experiment = preflight.Experiment(
            state,
            self._train_loop if train_dataset is not None else None,
            list(zip(names, self._eval_loops, specs, strict=False)),
            self._checkpoint_spec,
            self._workdir,
            self._log_interval,
            train_dataset,
            lambda: self._source_of(train_dataset),
            self._source_of,
            as_count(train_total_steps),
            as_count(train_loop_steps),
            as_count(train_epochs),
            stop,
            on_exhausted,
            self._passes,
        )
        return preflight.look(experiment, list(errors))

    def _writes_stopped_file(self) -> bool:
        return self._train_loop is not None and self._checkpoint_spec is not None and distributed.is_first_process()

    def _check_same_in_all(self, call: _Call) -> None:
        """Raises where the processes of a job are about to do different things."""
        names = ("total_steps", "loop_steps", "epochs", "stop", "on_exhausted")
        lines = [f"{name}={getattr(call, name)!r}" for name in names]
        lines += [
            f"EvalSpec {name!r}: {spec.num_steps} steps"
            for name, spec in zip(_names(call.eval_specs), call.eval_specs, strict=True)
        ]
        agreement.check_same("The run", [*lines, *(line for loop in self._loops for line in loop.description())])

    def _run(self, call: _Call) -> tuple[Any, metrics.LoopOutputs | None]:
        if self._train_loop is not None:
            return self._train(call)
        if self._checkpoint_spec is not None:
            return call.state, self._evaluate_checkpoints(call, self._checkpoint_spec)
        context = EvalContext(is_continuous_eval=False, step_num=_step_num(call.state), loop_count=0)
        self._history.resume(context.step_num - 1)
        return call.state, self._evaluate(call, call.state, context, Elapsed(context.step_num))

    def _directories_to_train_in(self) -> list[epath.Path]:
        """The directories that no other process may write checkpoints to."""
        if self._train_loop is None:
            return []
        directories = [action.directory for action in checkpoint_actions(self._train_loop)]
        if self._checkpoint_spec is not None:
            directories.append(checkpoint.absolute(self._checkpoint_spec.checkpoint_dir))
        for directory in directories:  # Now rather than after hours of training.
            checkpoint.prepare_directory(directory)
        return list(dict.fromkeys(directories))

    def _errors_of_arguments(
        self, train_dataset, train_total_steps, train_loop_steps, eval_specs, stop, train_epochs, on_exhausted
    ) -> Iterator[Exception]:
        """What is wrong with the arguments of a call."""
        counts = {
            "train_total_steps": train_total_steps,
            "train_loop_steps": train_loop_steps,
            "train_epochs": train_epochs,
        }
        for name, count in counts.items():
            try:
                checks.check_positive(name, count, optional=True)
            except (TypeError, ValueError) as error:
                yield error
                return
        if train_total_steps is not None and train_total_steps > np.iinfo(np.int32).max:
            yield ValueError(f"train_total_steps={train_total_steps} is more than state.step, an int32, can count to.")
        if train_epochs is not None and train_loop_steps is not None:
            yield ValueError(
                f"OuterLoop got train_epochs={train_epochs} and train_loop_steps={train_loop_steps}, and each epoch is "
                "one loop: give one of them. An action or evaluation with a schedule such as every(steps=100) is "
                "called inside the loop."
            )
        if train_epochs is not None and train_epochs > 1 and hasattr(train_dataset, "__next__"):
            yield ValueError(
                f"train_epochs={train_epochs} needs a train dataset that starts anew each time (a list, a "
                f"tf.data.Dataset, a DataLoader), got the iterator {train_dataset!r}, which ends once and for all."
            )
        if stop is not None and not isinstance(stop, Schedule):
            yield TypeError(f"stop must be a Schedule such as at(steps=10_000), got {stop!r}.")
        if (self._train_loop is None) != (train_dataset is None):
            got, missing = (
                ("train_dataset", "train_loop") if self._train_loop is None else ("train_loop", "train_dataset")
            )
            yield ValueError(
                f"OuterLoop got a {got} without a {missing}: give both to train, neither to evaluate only."
            )
        if len(eval_specs) != len(self._eval_loops):
            yield ValueError(
                f"OuterLoop has {len(self._eval_loops)} eval_loops and was called with {len(eval_specs)} eval_specs. "
                "Give one EvalSpec for each eval loop, in their order."
            )
        if strangers := [spec for spec in eval_specs if not isinstance(spec, EvalSpec)]:
            yield TypeError(f"eval_specs must hold EvalSpecs, got {strangers[0]!r}.")
        else:
            try:
                _names(eval_specs)
            except ValueError as error:
                yield error
        if on_exhausted not in ("stop", "raise"):
            yield ValueError(f'on_exhausted must be "stop" or "raise", got {on_exhausted!r}.')

    def _join_loops(self, call: _Call) -> None:
        """Makes the loops part of one run: their actions are closed here, however it ends."""
        names = _names(call.eval_specs)
        run = Run(self._history, call.total_steps, stop=call.stop)
        if self._train_loop is not None:
            with_iterator = [pair for pair in zip(names, call.eval_specs, strict=True) if pair[1].dataset_iterator]
            call.eval_sources = {name: self._source_of(spec.dataset_iterator) for name, spec in with_iterator}
            eval_loops = dict(zip(names, self._eval_loops, strict=True))
            keys = self._train_loop.step.base_prng
            sources = call.eval_sources
            call.whole_run = WholeRun(self._train_loop, eval_loops, sources, self._history, keys, self._is_shared)
            can_resume = bool(checkpoint_actions(self._train_loop))
            run = dataclasses.replace(run, snapshot=call.whole_run.snapshot, can_resume=can_resume)
            run.keeps_batches = self._directory_of_failures() is not None and not self._is_shared
        for loop in self._loops:
            loop.detach_all()
            loop.run_info = dataclasses.replace(run)
        if self._train_loop is not None:
            self._train_loop.attach(_Recorder(self._history, "train", self._log_interval))
        for loop, name in zip(self._eval_loops, names, strict=True):
            loop.attach(_Recorder(self._history, name, 1))

    def _source_of(self, dataset: Any) -> PositionedIterator:
        """What counts the batches of a dataset; of an iterator always the same, for none to be lost between calls."""
        if not hasattr(dataset, "__next__"):
            return PositionedIterator(dataset)
        if id(dataset) not in self._sources:
            self._sources[id(dataset)] = PositionedIterator(dataset)
        return self._sources[id(dataset)]

    # Training ------------------------------------------------------------------------------------

    def _train(self, call: _Call) -> tuple[Any, metrics.LoopOutputs | None]:
        train_loop: ActionLoop = self._train_loop  # pyright: ignore[reportAssignmentType]
        run, tally = call.whole_run, call.tally
        assert run is not None and train_loop.run_info is not None
        state, step_num, resumed = self._resume(call, run)
        self._open_train_data(call, run, resumed)
        if resumed is not None and not self._catch_up(call, state, resumed):
            logging.info("Stopped at step %d, as an evaluation or an action asked.", step_num)
            return state, None
        if end := self._end_that_is_reached(call, run, resumed, step_num):
            logging.warning("Nothing is left to train: step %d of %s.", step_num, end)
            return state, None
        if call.log_total_steps:
            end = call.total_steps or call.stop or "the end of the dataset"
            logging.info("Training from step %d to %s.", step_num, end)
        tally.newest, tally.has_begun = (state, step_num), True
        schedules = [spec.schedule for spec in call.eval_specs if spec.schedule is not None]
        evaluate = lambda state, elapsed: self._evaluate_inside(call, state, elapsed)
        train_loop.run_info = dataclasses.replace(train_loop.run_info, eval_schedules=schedules, evaluate=evaluate)
        first_step, outputs = step_num, None
        while True:
            # A run may have been broken off after the last step of a loop, and before its end.
            only_ends = train_loop.steps_before > 0 and _is_end_of_loop(call, step_num)
            num_steps = 1 if only_ends else _steps_of_next_loop(step_num, call.total_steps, call.loop_steps)
            loops_before = train_loop.loop_count
            tally.newest = None  # While the train loop runs, it knows better.
            train_loop.source = run.source
            dataset = run.source if run.source is not None and not only_ends else iter(())
            state, loop_outputs = train_loop(state, dataset, num_steps)
            steps_run = tally.count(train_loop)
            step_num += steps_run
            tally.newest = (state, step_num)
            has_ended = train_loop.loop_count > loops_before
            goes_on = not _asks_to_stop(loop_outputs)
            if self._is_shared and not self._interrupt.requested:
                goes_on = not agreement.any_stops(not goes_on, self._interrupt)
            if steps_run or has_ended:
                outputs = loop_outputs
            pass_has_ended = goes_on and not only_ends and (num_steps is None or steps_run < num_steps)
            pass_has_ended &= not train_loop.elapsed.is_last
            if pass_has_ended:
                self._end_pass(call, run)
            if has_ended and not self._interrupt.requested:
                goes_on &= self._evaluate_after(call, state, train_loop.elapsed)
                goes_on &= self._interrupt.requested or train_loop.call_late_actions(state)
            if self._interrupt.requested:
                saves = " and saved" if checkpoint_actions(train_loop) else ""
                signal_name = self._interrupt.signal_name
                logging.warning("Ended by %s. The state of step %d is returned%s.", signal_name, step_num, saves)
                if train_loop.was_interrupted:  # Then this loop has not come to its end.
                    train_loop.loop_count = loops_before
                self._save_now(call, state, step_num)
                return state, outputs
            if not goes_on:
                loop_outputs[STOP_LOOP] = True
                logging.info("Stopped at step %d, as outputs[%r] asked.", step_num, STOP_LOOP)
                break
            if train_loop.elapsed.is_last:
                break
            if pass_has_ended:
                if call.epochs is not None and run.passes >= call.epochs:
                    logging.info("The last of train_epochs=%d ended at step %d.", call.epochs, step_num)
                    break
                if call.epochs is None or hasattr(call.train_dataset, "__next__"):
                    self._report_end_of_data(call, step_num)
                    break
                run.source = self._source_of(call.train_dataset)
        if step_num > first_step or resumed is not None:
            self._call_what_waits_for_the_last_step(call, state)
        return state, outputs

    def _end_that_is_reached(self, call: _Call, run: WholeRun, resumed: Resumed | None, step_num: int) -> str | None:
        """Which end a run is at already, in words; None if there is something left to train."""
        train_loop: ActionLoop = self._train_loop  # pyright: ignore[reportAssignmentType]
        if train_loop.steps_before and _is_end_of_loop(call, step_num):
            return None
        ends = {
            "a run that was stopped there, as an evaluation or an action asked (to train on from its state, take "
            "step.restore_model(state, directory) to another directory)": resumed and resumed.has_stopped,
            f"stop={call.stop!r}": call.stop is not None and call.stop.stops(train_loop.elapsed, train_loop.elapsed),
            f"train_total_steps={call.total_steps}": call.total_steps is not None and step_num >= call.total_steps,
            f"train_epochs={call.epochs}": call.epochs is not None and run.passes >= call.epochs,
        }
        return next((end for end, is_reached in ends.items() if is_reached), None)

    def _call_what_waits_for_the_last_step(self, call: _Call, state: Any) -> None:
        """Calls the actions and evaluations whose schedule fires only now that the run is known to have ended."""
        train_loop: ActionLoop = self._train_loop  # pyright: ignore[reportAssignmentType]
        elapsed = dataclasses.replace(train_loop.elapsed, is_last=True)
        train_loop.call_last_actions(state, comes_last=False)
        self._evaluate_inside(call, state, elapsed)
        for loop in self._eval_loops:
            if loop.run_info is not None and loop.run_info.elapsed is not None:
                loop.call_last_actions(state, comes_last=False)
                loop.call_last_actions(state, comes_last=True)
        train_loop.call_last_actions(state, comes_last=True)

    # Going on ------------------------------------------------------------------------------------

    def _resume(self, call: _Call, run: WholeRun) -> tuple[Any, int, Resumed | None]:
        """Goes on from the newest checkpoint, or where the last call ended, or begins with the state as it is.

        Returns the state, its step, and how far the run was where it is that of a checkpoint.
        """
        train_loop: ActionLoop = self._train_loop  # pyright: ignore[reportAssignmentType]
        state, resumed = call.state, None
        if self._checkpoint_spec is not None:
            state, resumed = self._restore(call, run, self._checkpoint_spec)
        if resumed is not None:
            self._passes = run.passes
            step_num = resumed.elapsed.steps
        else:
            step_num = _step_num(state) if hasattr(state, "step") else train_loop.elapsed.steps
            if step_num != train_loop.step_num:  # Else it goes on where the last call ended.
                self._passes = 0
                for loop in self._loops:
                    loop.resume(Elapsed(step_num))
            run.passes = self._passes
            run.resume_history(step_num)
        if call.loop_steps is not None and (resumed is None or not resumed.knows_position):
            self._set_loop_counts(step_num // call.loop_steps, call.eval_specs)
        check_no_newer_checkpoints(train_loop, step_num)
        return state, step_num, resumed

    def _restore(self, call: _Call, run: WholeRun, spec: CheckpointSpec) -> tuple[Any, Resumed | None]:
        """Restores the newest checkpoint that is whole; the state as it is where it is past that one."""
        state, step_num = call.state, _step_num(call.state)
        checkpoint.clear_leftovers(spec.checkpoint_dir)
        if self._is_shared:
            if distributed.is_first_process():
                checkpoint.move_damaged_aside(spec.checkpoint_dir)
            agreement.wait_for_all("before restoring")
            found = f"The list of checkpoints in {spec.checkpoint_dir}, which must be a directory that all share,"
            agreement.check_same(found, list(map(str, checkpoint.all_steps(spec.checkpoint_dir))))
        saved = checkpoint.all_steps(spec.checkpoint_dir)
        resumed = None
        if saved and saved[-1] < step_num:
            logging.info("Step %d is past the newest checkpoint, of step %d: going on.", step_num, saved[-1])
        elif not saved:
            logging.info("No checkpoint found in %s", spec.checkpoint_dir)
        else:
            given = checks.adopt(call.state)
            restored = checkpoint.restore_newest(
                spec.checkpoint_dir, given, transforms=spec.transforms, moves_aside=not self._is_shared
            )
            assert restored is not None
            state, saved_step = restored
            resumed = run.load(spec.checkpoint_dir, saved_step, given)
            logging.info("Resumed at step %d from %s.", saved_step, spec.checkpoint_dir)
        if self._writes_stopped_file():  # Evaluators of this directory shall wait for what is trained now.
            spec.stopped_file.unlink(missing_ok=True)
        return state, resumed

    def _open_train_data(self, call: _Call, run: WholeRun, resumed: Resumed | None) -> None:
        """Has the run draw from its train data, from where it was when it was saved."""
        if resumed is not None and resumed.knows_position and resumed.position is None and call.epochs is not None:
            resumed = None  # It was between two passes.
        # An epoch that is left half-way is gone on with in any case.
        is_epoch = resumed is not None and call.epochs is not None
        run.source = self._source_of(call.train_dataset)
        if resumed is None and self._checkpoint_spec is not None and checkpoint_actions(self._loops[0]):
            _warn_of_unknown_positions(run.source)
        if is_epoch:
            run.source = PositionedIterator(run.source, skippable=True)
        spec = self._checkpoint_spec
        if resumed is None or spec is None or not spec.restore_data:
            return
        self._loops[0].forget_batches()
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

    def _end_pass(self, call: _Call, run: WholeRun) -> None:
        """Counts a pass over the train data; raises where it had no batch."""
        is_empty = run.source is not None and run.source.count == 0
        if agreement.any_stops(is_empty) if self._is_shared else is_empty:
            raise checks.empty_dataset(call.train_dataset)
        if call.epochs is None:
            return
        run.passes += 1
        self._passes = run.passes
        if run.source is not None and not hasattr(call.train_dataset, "__next__"):
            run.source.close()
        run.source = None

    def _set_loop_counts(self, train_loops: int, eval_specs: Sequence[EvalSpec]) -> None:
        """Has intervals go on where an earlier run, in this process or another, left off."""
        self._train_loop.loop_count = train_loops  # pyright: ignore[reportOptionalMemberAccess]
        for loop, spec in zip(self._eval_loops, eval_specs, strict=True):
            if spec.should_eval_fn is None and spec.schedule is None:
                loop.loop_count = train_loops // (spec.eval_loop_interval or 1)

    def _catch_up(self, call: _Call, state: Any, resumed: Resumed) -> bool:
        """Does what belongs to the step of a checkpoint, and did not come to it because the run was broken off.

        Returns whether the run goes on.
        """
        elapsed, train_loop = resumed.elapsed, self._train_loop
        if not resumed.was_broken_off or elapsed.previous is None or train_loop is None:
            return True
        goes_on = not resumed.knows_position or train_loop.call_missed_actions(state, comes_last=False)
        loop_has_ended = resumed.steps_in_loop == 0 and elapsed.loops > elapsed.previous.loops
        elapsed = dataclasses.replace(elapsed, is_last=elapsed.steps == call.total_steps)
        for loop in self._eval_loops:
            if loop.is_ending and loop.run_info is not None:
                loop.run_info.elapsed = elapsed
                goes_on &= loop.end_again(state)
        measured = {name for row in self._history.rows if row.elapsed.steps == elapsed.steps for name in row.logs}
        context = EvalContext(is_continuous_eval=False, step_num=elapsed.steps, loop_count=elapsed.loops)
        due = [
            (loop, spec)
            for loop, spec, name in zip(self._eval_loops, call.eval_specs, _names(call.eval_specs), strict=True)
            if name not in measured
            and (spec.schedule or loop_has_ended)
            and _is_due(spec, context, elapsed, self._is_shared)
        ]
        goes_on &= not _asks_to_stop(self._evaluate_all(call, state, due, elapsed))
        return goes_on and (not resumed.knows_position or train_loop.call_missed_actions(state, comes_last=True))

    def _report_end_of_data(self, call: _Call, step_num: int) -> None:
        if call.total_steps is None or step_num == call.total_steps:
            logging.info("The train dataset ended at step %d.", step_num)
            return
        text = f"The train dataset ended at step {step_num} of train_total_steps={call.total_steps}"
        if call.on_exhausted == "raise":
            error = ValueError(f"{text}. Repeat the dataset, or lower train_total_steps.")
            raise agreement.known_to_all(error)
        logging.warning("%s; the run ends here. Repeat the dataset to go on, or lower train_total_steps.", text)

    # Evaluation ----------------------------------------------------------------------------------

    def _evaluate(self, call: _Call, state: Any, context: EvalContext, elapsed: Elapsed) -> metrics.LoopOutputs | None:
        """Runs the evaluations that are due at the end of a train loop; returns the outputs of the last of them."""
        is_due = lambda spec: _is_due(spec, context, elapsed, self._is_shared)
        due = [(loop, spec) for loop, spec in zip(self._eval_loops, call.eval_specs, strict=True) if is_due(spec)]
        return self._evaluate_all(call, state, due, elapsed)

    def _evaluate_after(self, call: _Call, state: Any, elapsed: Elapsed) -> bool:
        """Evaluates what is due after a train loop; returns whether the run goes on."""
        context = EvalContext(is_continuous_eval=False, step_num=elapsed.steps, loop_count=elapsed.loops)
        goes_on = not _asks_to_stop(self._evaluate(call, state, context, elapsed))
        if not goes_on:
            self._train_loop.ask_to_stop()  # pyright: ignore[reportOptionalMemberAccess]
        return goes_on

    def _evaluate_inside(self, call: _Call, state: Any, elapsed: Elapsed) -> bool:
        """Evaluates what a schedule asks for inside a train loop; returns whether the run goes on."""
        pairs = zip(self._eval_loops, call.eval_specs, strict=True)
        scheduled = [pair for pair in pairs if pair[1].schedule is not None]
        context = EvalContext(is_continuous_eval=False, step_num=elapsed.steps, loop_count=elapsed.loops)
        due = [(loop, spec) for loop, spec in scheduled if _is_due(spec, context, elapsed, self._is_shared)]
        return not _asks_to_stop(self._evaluate_all(call, state, due, elapsed))

    def _evaluate_all(self, call: _Call, state: Any, due, elapsed: Elapsed) -> metrics.LoopOutputs | None:
        last, stop, tally, is_whole = None, False, call.tally, True
        for loop, spec in due:
            if spec.schedule is not None and tally.evaluated_at.get(id(loop)) == elapsed.steps:
                continue
            if self._interrupt.requested:
                is_whole = False
                break
            tally.evaluated_at[id(loop)] = elapsed.steps
            loop.run_info.elapsed = elapsed
            with self._counting_eval():
                dataset = spec.dataset if spec.dataset_iterator is None else self._source_of(spec.dataset_iterator)
                _, last = loop(state, as_iterator(dataset), spec.num_steps, return_state_from_step=False)
                self._check_evaluated(tally, spec, tally.count(loop))
                if loop.was_interrupted:
                    is_whole = False
                    break
                stop = not loop.call_late_actions(state) or stop or _asks_to_stop(last)
        if self._is_shared and is_whole and last is not None:
            stop = agreement.any_stops(stop, self._interrupt)
        if last is not None and stop:
            last[STOP_LOOP] = True
        return last

    def _counting_eval(self) -> contextlib.AbstractContextManager[None]:
        if self._train_loop is None:
            return contextlib.nullcontext()
        return self._train_loop.stopwatch.counting("evals")

    def _check_evaluated(self, tally: Tally, spec: EvalSpec, steps_run: int) -> None:
        if self._interrupt.requested:
            return
        if steps_run == 0:
            raise spec.empty()
        if spec.num_steps is not None and steps_run < spec.num_steps and id(spec) not in tally.short_evaluations:
            tally.short_evaluations.add(id(spec))  # Once a run.
            logging.warning(
                "An eval dataset ended after %d of num_steps=%d batches; its metrics are those of %d batches.",
                steps_run,
                spec.num_steps,
                steps_run,
            )

    def _evaluate_checkpoints(self, call: _Call, spec: CheckpointSpec) -> metrics.LoopOutputs | None:
        """Evaluates each checkpoint as it appears, in the order of their steps."""
        stop_fn = spec.iterate_stop_fn or spec.stopped_file.exists
        step = self._eval_loops[0].step
        outputs, seen = None, set()
        self._history.resume(min(checkpoint.all_steps(spec.checkpoint_dir), default=1) - 1)
        while True:
            # Asked before looking: what was saved before the stop is still found.
            no_more_will_come = stop_fn()
            found = checkpoint.all_steps(spec.checkpoint_dir)
            if self._is_shared:
                no_more_will_come, found = self._as_the_first_sees_it(no_more_will_come, found)
            for step_num in [step_num for step_num in found if step_num not in seen]:
                seen.add(step_num)
                restored = None
                try:
                    restored = step.restore_model(call.state, spec.checkpoint_dir, step_num, spec.transforms)
                except Exception:
                    if step_num in checkpoint.all_steps(spec.checkpoint_dir):
                        raise
                    logging.warning("The checkpoint of step %d was deleted before it could be evaluated.", step_num)
                if agreement.any_stops(restored is None) if self._is_shared else restored is None:
                    continue
                context = EvalContext(is_continuous_eval=True, step_num=step_num, loop_count=len(seen) - 1)
                saved = checkpoint.metadata(spec.checkpoint_dir, step_num).get("elapsed", {"steps": step_num})
                outputs = self._evaluate(call, restored, context, Elapsed(**saved)) or outputs
                if _asks_to_stop(outputs) or self._interrupt.requested:
                    return outputs
            if no_more_will_come or self._interrupt.requested:
                return outputs
            self._sleep(max(spec.iterate_interval_secs, _POLL_SECS))

    def _as_the_first_sees_it(self, no_more_will_come: bool, found: list[int]) -> tuple[bool, list[int]]:
        """What there is to evaluate, the same in all processes."""
        no_more_will_come, found = json.loads(agreement.gather_texts(json.dumps([no_more_will_come, found]))[0])
        return no_more_will_come, found

    def _sleep(self, seconds: float) -> None:
        """Sleeps in short pieces, for Ctrl-C not to wait long; all processes as many."""
        pieces = math.ceil(seconds / (1.0 if self._is_shared else _POLL_SECS))
        for _ in range(pieces):
            if self._interrupt.requested:
                break
            time.sleep(seconds / pieces)
            if self._is_shared:
                agreement.any_stops(False, self._interrupt)

    # The end -------------------------------------------------------------------------------------

    def _rescue_state(self, call: _Call, error: BaseException, save: bool) -> None:
        """Keeps, and saves, the state as of the last whole step before an exception."""
        if self._train_loop is None or not call.tally.has_begun:
            return
        state, step_num = call.tally.newest or (self._train_loop.rescued_state, self._train_loop.step_num)
        self._rescued_state = state
        if state is not None and save:
            self._save_now(call, state, step_num)
        elif state is None and checkpoint_actions(self._train_loop):
            is_bad = isinstance(error, bad_numbers.BadNumberError)
            reason = "its numbers are bad" if is_bad else "the step that failed had taken it over"
            logging.error("The state of step %d is not saved: %s.", step_num, reason)

    def _save_now(self, call: _Call, state: Any, step_num: int) -> None:
        """Has the train loop's `CheckpointAction`s save a run whose interval has not come."""
        for action in checkpoint_actions(self._loops[0]):
            try:
                action.flush()  # Whether a step is saved is known, to all processes, only once it is committed.
                if step_num not in checkpoint.all_steps(action.directory):
                    snapshot = call.whole_run.snapshot(was_broken_off=True)  # pyright: ignore
                    if action.save(step_num, state, None, **snapshot):
                        logging.info("%r saves the state of step %d.", action, step_num)
            except Exception:
                logging.exception("%r could not save the state of step %d.", action, step_num)

    def _directory_of_failures(self) -> epath.PathLike | None:
        return self._workdir or next((action.directory for action in checkpoint_actions(self._loops[0])), None)

    def _record_failure(self, error: BaseException) -> None:
        """Records the step that failed, once all checkpoints are committed."""
        loop, workdir = self._train_loop, self._directory_of_failures()
        if not isinstance(loop, TrainLoop) or loop.failed_step is None or workdir is None:
            return
        if self._is_shared:
            logging.info("No record of the failure is made in %s: it would take the batches of all processes.", workdir)
            return
        if not isinstance(error, Exception) or not loop.stopwatch.steps:  # The very first step fails again at once.
            return
        state = self._rescued_state if loop.step_num == loop.failed_step - 1 else None
        failure = failures.Failure(
            loop.failed_step, error, loop.nan_policy, loop.kept_batches, state, self._directories_to_train_in()
        )
        failures.record(workdir, loop.step, failure)

    def _close_actions(self, raise_errors: bool) -> None:
        errors = []
        for action in _all_actions(self._loops):
            try:
                with self._loops[0].stopwatch.counting(action.time_goes_to):
                    action.close()
            except Exception as error:
                error.add_note(f"when {action!r} was closed at the end of the run")
                logging.exception("%r could not be closed.", action)
                errors.append(error)
        for loop in self._loops:
            loop.run_info = None
            loop.detach_all()
        self._history.close()
        if errors and raise_errors:
            raise errors[0]


def _warn_of_unknown_positions(source: PositionedIterator) -> None:
    if source.kind == "unknown":
        logging.warning(
            "%s A run that goes on from a checkpoint of this one trains on what it gives then.", source.problem
        )


def _step_num(state: Any) -> int:
    return int(metrics.fetch(getattr(state, "step", 0)))


def _finish_actions(loops: Sequence[ActionLoop], state: Any) -> Any:
    for action in _all_actions(loops):
        try:
            state = action.finish(state)
        except Exception as error:
            error.add_note(f"when {action!r} finished the run")
            raise
    return state


def _is_end_of_loop(call: _Call, step_num: int) -> bool:
    """Whether a loop ends after this step in any case."""
    is_multiple = call.loop_steps is not None and step_num % call.loop_steps == 0
    return is_multiple or step_num == call.total_steps


def _steps_of_next_loop(step_num: int, total_steps: int | None, loop_steps: int | None) -> int | None:
    """To the next multiple of `loop_steps`, but not past the total; None for as long as there is data."""
    limits = []
    if loop_steps is not None:
        limits.append(loop_steps - step_num % loop_steps)
    if total_steps is not None:
        limits.append(total_steps - step_num)
    return min(limits, default=None)


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


def _names(eval_specs: Sequence[EvalSpec]) -> list[str]:
    """The names of the evaluations, all different."""
    names = []
    for spec in eval_specs:
        if spec.name == "eval":
            names.append("eval" if "eval" not in names else f"eval_{len(names) + 1}")
        else:
            names.append(spec.name)
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"Two EvalSpecs are named {twice.pop()!r}: give each a name of its own.")
    return names


def _is_due(spec: EvalSpec, context: EvalContext, elapsed: Elapsed, is_shared: bool) -> bool:
    if spec.schedule is not None and elapsed.previous is not None:
        if not spec.schedule(elapsed):
            return False
    elif not context.is_continuous_eval and context.loop_count % (spec.eval_loop_interval or 1):
        return False
    if spec.should_eval_fn is None:
        return True
    is_due = bool(spec.should_eval_fn(context))
    return agreement.first_says(is_due) if is_shared else is_due


def _asks_to_stop(outputs: types.Output) -> bool:
    return outputs is not None and bool(np.any(outputs.get(STOP_LOOP, False)))


def _all_actions(loops: Sequence[ActionLoop]) -> list[Action]:
    return list({id(action): action for loop in loops for action in loop.actions}.values())
