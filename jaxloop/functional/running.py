"""The `loop` function of the functional API."""

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, final

import jax
from absl import logging
from etils import epath

from jaxloop import checkpoint as checkpoints
from jaxloop import types
from jaxloop.actions.action import Action
from jaxloop.actions.checkpoint_action import CheckpointAction
from jaxloop.base import checks, encoding, timing
from jaxloop.base.text import announce, quiet_orbax, suggests
from jaxloop.distributed import agreement, lock
from jaxloop.distributed.interrupt import Interruptible
from jaxloop.engine.agenda import Rank
from jaxloop.engine.feed import Feed, Source
from jaxloop.engine.program import Program, Ran
from jaxloop.engine.rehearse import Course
from jaxloop.engine.run import Plan
from jaxloop.functional.callbacks import ActionTask, FunctionTask, LoopState, Tasks, end_row
from jaxloop.functional.counting import as_stop, counter, is_over, warn_of_early_end
from jaxloop.functional.tools import as_kind, kind_on_host
from jaxloop.history import HISTORY_FILE, History
from jaxloop.loop import Loop
from jaxloop.models.function_step import FunctionStep, name_of
from jaxloop.outer_loop.data import LeftOut, Sources, TrainingData
from jaxloop.outer_loop.specs import RunSpec
from jaxloop.outer_loop.whole_run import WholeRun, end_all, reconcile_hyperparams, saved_paths, withdraw_stop
from jaxloop.schedules import Elapsed, Schedule, is_always, is_never, never, planned_steps


@suggests(num_steps="stop", train_total_steps="stop", steps="stop", total="stop", total_steps="stop")
def loop(
    state: Any,
    dataset: Any,
    tasks: Tasks,
    *,
    stop: Schedule | int | None = None,
    history: History | None = None,
    elapsed: Elapsed | None = None,
    num_examples: Callable[[Any], int] | None = None,
) -> tuple[Any, History, Elapsed]:
    """Loops over the batches of a dataset and, at each step, calls the callbacks whose schedules fire.

    The callbacks are called in the order of the tasks, except that actions and tools (such as `early_stopping`) are
    called after all other callbacks, and checkpoints are saved last. A callback is a function that takes up to four
    positional arguments, `(state, batch, elapsed, loop_state)`, in this order; any other parameters must have defaults.
    It returns None, `logs`, `(logs, state)`, or `(outputs, logs, state)`, where any element of a tuple may be None. It
    may also return just a state, unless the state is a tuple or a dictionary. jaxloop's `Step`s and `Action`s are also
    callbacks, and so are objects with a method `__loop_callback__(loop_state) -> (logs, state)`.

    The logs of a step become one row of the history. The loop doesn't wait for the devices unless a callback reads a
    value. On Ctrl-C, the loop finishes the current step, saves a checkpoint if the tasks include one, and returns the
    results so far. On SIGTERM, it does the same, and then the process exits with status 143.

    Callbacks that come first in `tasks` and are due at every step, such as the train step, are called as soon as
    the step's batch has been read. Before any other callback is called, the loop reads the next batch, as an
    `OuterLoop` does, to determine `elapsed.is_last`. A checkpoint saved at this point nevertheless stores the position
    before the next batch. However, if one of the other callbacks stops the loop and the dataset is an iterator, the
    next batch is lost.

    Unlike an `OuterLoop`, the loop supports neither `check` nor multiple processes. When it starts, it warns only about
    schedules that would never fire. Other problems that an `OuterLoop` reports at the start, such as a `patience` that
    exceeds the length of the run, become apparent only during the run.

    If the tasks include `checkpoint(directory, resume=True)`, the loop resumes from the newest checkpoint. It restores
    the train state, the position in the dataset, the history, and `LoopState.metadata`. Leaves of the train state that
    were NumPy values or Python numbers are restored as such. The loop also restores the state of the tools, and of each
    `__loop_callback__` object that has the methods `state_dict()` and `load_state_dict(state_dict)`. When the loop
    resumes, it may call some callbacks at the step of the checkpoint, and passes None to them as the batch. For
    example, it may call callbacks whose schedule is `last()` if the checkpoint is from the last step.

    Args:
      state: Any pytree. If a callback such as `train_step` donates it, use the returned state afterwards.
      dataset: The batches to loop over. Pass None if the callbacks don't need any data. In that case, `batch` is None,
        and `stop` must be given.
      tasks: The callbacks by schedule, as a dictionary or as pairs. For example, `{every(1): [train_step],
        every(steps=1000): [checkpoint(...)]}`.
      stop: The total number of steps (including those before a resume), or a schedule that ends the loop; see
        `elapse`.
      history: A history to continue, which is also returned. If None, a new one is started.
      elapsed: The progress of the run to continue. If None, counting starts from zero.
      num_examples: A function that returns the number of examples in a batch, which is the batch's weight in means. For
        padded batches, pass a function such as `lambda batch: batch["mask"].sum()`. If None, the weight is the size of
        the batch's leading axis, or 1 if there is none.

    Returns:
      `(state, history, elapsed)`.

    Raises:
      TypeError: If a callback has an invalid signature or returns an invalid result. The message names the callback.
      ValueError: If the state has already been donated, for example to an earlier call to `loop`.
      Exception: If a callback or the dataset raises one. A note on the exception describes where and at which step it
        was raised. Pending checkpoints are committed before the exception is propagated.
    """
    if dataset is None and stop is None:
        raise ValueError("jf.loop got no dataset, so nothing ends it. Give stop.")
    checks.check_only_process("jf.loop")
    checks.check_alive(state, "jf.loop")
    loop_state = LoopState(state, History() if history is None else history, elapsed or Elapsed())
    spec = RunSpec(dataset, stop=as_stop(stop))
    run = TaskLoop(loop_state, tasks, spec, counter(num_examples), has_history=history is not None)
    with run.job.requests, quiet_orbax(), contextlib.ExitStack() as locks:
        for each in run.directories:
            locks.enter_context(lock.locked(each))
        try:
            run.run_to_end()
        except BaseException as error:
            run.close(error)
            raise
        run.close(None)
    return loop_state.state, loop_state.history, loop_state.elapsed.without_previous()


@final
class TaskLoop(Loop):
    """A single call to `loop`.

    The callbacks share a `LoopState`, which holds the train state. The engine is always given None as the state. A
    `TaskLoop` is also a `Saveable`: it provides what a checkpoint stores about the loop and its callbacks.

    Args:
      loop_state: The state of the loop.
      tasks: The callbacks by schedule. An action that appears several times is due when any of its schedules fires.
      spec: The dataset, and the schedule that ends the loop.
      count: A function that counts the examples in a batch.
      has_history: Whether the user passed a history.

    Attributes:
      job: The job, which consists only of this process. It also records the signals that the process has received.
      loop_state: The state of the loop.
      of_each_step: The callbacks that `TaskProgram` calls at every step.
      directories: The directories that the loop saves checkpoints to.
    """

    def __init__(
        self, loop_state: LoopState, tasks: Tasks, spec: RunSpec, count: Callable[[Any], int], *, has_history: bool
    ):
        super().__init__(FunctionStep(lambda state, batch: (state, None)))
        self.loop_state: LoopState = loop_state
        self.step.num_examples = count  # pyright: ignore[reportAttributeAccessIssue]
        functions, actions = list[FunctionTask](), dict[int, ActionTask]()
        for schedule, callback in _callbacks(tasks):
            action = getattr(callback, "action", callback)
            if isinstance(action, Action):
                actions.setdefault(id(callback), ActionTask(callback, action, loop_state)).schedules.append(schedule)
            else:
                functions.append(FunctionTask(callback, schedule, loop_state))
        scheduled = (task for task in functions if not is_never(task.interval))
        is_of_each_step = lambda task: is_always(task.interval) and task.time_category is None
        self.of_each_step: list[FunctionTask] = list(itertools.takewhile(is_of_each_step, scheduled))
        for task in self.of_each_step:
            task.interval = never()  # The program calls it, so the engine never does.
        self._actions = list(actions.values())
        savers = [task.action for task in self._actions if isinstance(task.action, CheckpointAction)]
        self.directories: list[epath.Path] = list(dict.fromkeys(action.directory for action in savers))
        self._resumed_from = [task.of.action.directory for task in self._actions if getattr(task.of, "resume", False)]
        if self._resumed_from and not has_history:
            loop_state.history = History(self._resumed_from[0] / HISTORY_FILE)
        self.job: agreement.Job = agreement.Job(False)
        self._data = data = TrainingData(spec, Sources(), self.engine, (), LeftOut())
        self._whole = WholeRun({"train": self, "data": data}, loop_state.history, self.job)
        source = Source(mark=data.mark, consumed=data.note_consumed)
        self.engine.set_plan(Plan(stop=spec.stop, items=[*functions, *self._actions], source=source))
        self.resume(loop_state.elapsed)

    def __repr__(self) -> str:
        return "jf.loop"

    def run(self, state: Any, dataset: Any, num_steps: int | None) -> tuple[Any, Any]:
        self.engine.call.program = TaskProgram(self)
        return super().run(state, dataset, num_steps)

    def run_to_end(self) -> None:
        """Starts or resumes the loop, calls the items due at the start, runs the steps, and finishes the actions."""
        loop_state, engine, can_resume = self.loop_state, self.engine, bool(self._resumed_from)
        is_resumed = can_resume and self._resume()
        self._data.open(restores=True, warns=can_resume)
        start, stop = engine.run.now, engine.plan.stop
        loop_state.elapsed, loop_state.total_steps = start, planned_steps(stop, start.previous or start)
        context = {"total_steps": loop_state.total_steps, "snapshot": self._whole.snapshot}
        for task in self._actions:
            task.context = {"history": loop_state.history if task.action.needs_all_outputs else None, **context}
            task.action.begin_run(start.steps, can_resume=can_resume)
        _warn_of_unused(engine.plan.items, self._data.batches_per_epoch(start.steps), loop_state.total_steps)
        if can_resume:
            self._whole.rows.drop_later(start.steps)
        is_done = is_over(stop, start) or loop_state.stop_iteration
        if is_resumed or start.steps == 0:
            engine.hold_now(None, is_last=is_done)
        if is_resumed and loop_state.stop_iteration:
            text = "Nothing is left to run: a callback stopped the loop at step %d. If it can, give it more patience."
            logging.warning(text, start.steps)
        if not is_done:
            engine.loops(None, lambda: self._data.source, lambda: None)
        loop_state.elapsed = engine.run.now
        if self.job.requests.requested:
            for task in self._actions:
                if task.rank == Rank.SAVE:
                    task.context = {**task.context, "snapshot": functools.partial(self._whole.snapshot, in_moment=True)}
                    task()
        elif engine.outcome.data_ended and not engine.run.agenda.wants_stop:
            warn_of_early_end(start, loop_state.elapsed, stop)
        end_row(loop_state)
        for task in self._actions:
            loop_state.state = task.action.finish(loop_state.state)

    def _resume(self) -> bool:
        """Resumes from the newest checkpoint and returns True, or returns False if there is no checkpoint."""
        loop_state, given = self.loop_state, checks.as_arrays(self.loop_state.state)
        restored = checkpoints.open_newest(saved_paths(self._resumed_from, self.job), lambda it: it.restore(given))
        if restored is None:
            logging.info("No checkpoint found in %s", " and ".join(map(str, self._resumed_from)))
            self._whole.rows.begin(loop_state.elapsed.steps)
            announce("The loop saves checkpoints in %s.", " and ".join(map(str, self.directories)))
            return False
        opened, state = restored
        loop_state.state = reconcile_hyperparams(given, state, restores=True, remedy="Change it in a callback.")
        self.resume(opened.elapsed())
        self._whole.rows.begin(opened.step)
        self._whole.load(opened, loop_state.state)
        withdraw_stop(self.engine.run.agenda, [task.action for task in self._actions])
        loop_state.stop_iteration = self.engine.run.agenda.wants_stop
        for task in self._actions:
            if isinstance(task.action, CheckpointAction):  # Its directory shows if it saved this step.
                task.called_at = opened.step if opened.step in checkpoints.all_steps(task.action.directory) else None
        announce("Resumed at step %d from %s.", opened.step, opened.path.parent)
        return True

    def close(self, failure: BaseException | None) -> None:
        """Finishes the history and closes the actions and the data.

        If an error (`failure`) ended the loop, any errors raised while closing are only logged.
        """
        history, status = self.loop_state.history, self.job.requests.run_status(failure)
        ends = [("the last row", functools.partial(end_row, self.loop_state))]
        ends += [] if history.path is None else [("the history", history.flush)]
        for task in self._actions:
            end_run = functools.partial(task.action.end_run, status)
            ends += [(repr(task.action), end) for end in (end_run, task.action.close)]
        end_all([*ends, ("the data", self._data.close)], raises=failure is None)

    # Saving ------------------------------------------------------------------------------------------

    def state_dict(self, *, in_moment: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns a dict of JSON values and a dict of the train states that actions keep; see `Saveable`."""
        saved, kept = self.engine.state_dict(in_moment=in_moment)
        leaves = checks.leaves_by_path(self.loop_state.state)
        on_host = {path: kind for path, leaf in leaves.items() if (kind := kind_on_host(leaf)) is not None}
        saved |= {"metadata": encoding.encode(self.loop_state.metadata), "on_host": on_host}
        return saved, {index: checks.as_arrays(state) for index, state in kept.items()}

    def load_state_dict(self, saved: Mapping[str, Any], kept: Mapping[str, Any]) -> None:
        """Restores the loop from the result of `state_dict`.

        Also converts the leaves of the train state back to the kinds they had when they were saved: JAX arrays, NumPy
        values or Python numbers.
        """
        self.loop_state.metadata.update(encoding.decode(saved["metadata"]))
        as_saved = lambda path, leaf: as_kind(saved["on_host"].get(checks.path_name(path)), leaf)
        restore = functools.partial(jax.tree_util.tree_map_with_path, as_saved)
        self.loop_state.state = restore(self.loop_state.state)
        self.engine.load_state_dict(saved, {index: restore(state) for index, state in kept.items()})


def _warn_of_unused(tasks: Iterable[Any], num_batches: int | None, total_steps: int | None) -> None:
    """Warns about schedules that would never fire during the loop.

    Args:
      tasks: The items of the loop.
      num_batches: The number of batches in the dataset (including those used before a resume), or None if unknown.
      total_steps: The planned number of steps, or None if unknown.
    """
    # The batch size is unknown, so assume that any number of examples is reached at once.
    course = Course(Plan(total=total_steps), batches_in_pass=num_batches, rows=2**30, most_moments=100)
    for task in tasks if not course.is_over else ():
        when, name = task.interval, name_of(getattr(task, "action", task.of))
        if not is_always(when) and not is_never(when) and course.calls(when).is_never:
            _warn_once(f"{when!r} would never fire, so {name} would never be called: {course}.")


_warn_once = functools.cache(logging.warning)  # A loop may run within each step of another one.


def _callbacks(tasks: Tasks) -> Iterator[tuple[Schedule, Any]]:
    """Yields a pair `(schedule, callback)` for each callback in the tasks."""
    what = "Tasks must be {schedule: callbacks}, or pairs (schedule, callbacks), such as {every(100): [save]}"
    if not isinstance(tasks, Iterable) or isinstance(tasks, str):
        raise TypeError(f"{what}, got {name_of(tasks)}. Write {{every(1): {name_of(tasks)}}}.")
    for pair in tasks.items() if isinstance(tasks, Mapping) else tasks:
        if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], Schedule):
            raise TypeError(f"{what}, got {pair!r}.")
        for callback in pair[1] if isinstance(pair[1], list | tuple) else [pair[1]]:
            yield pair[0], callback


@final
class TaskProgram(Program):
    """A program that calls a loop's `of_each_step` callbacks at every step.

    Args:
      loop: The loop.
    """

    def __init__(self, loop: TaskLoop):
        super().__init__(loop.step)
        self._loop, self._run, self._plan = loop, loop.engine.run, loop.engine.plan
        # Compiled functions can't read the history between steps. Adding these rows together is faster.
        self._ended_rows: list[Any] | None = [] if all(task.is_compiled for task in loop.of_each_step) else None

    def run(self, ran: Ran, feed: Feed, room: int, requests: Interruptible, deadline: float = math.inf) -> None:
        pauses, self._requests = requests.pauses, requests
        self._now, self._start = self._run.now, self._run.clock.time() - timing.clock()
        # The first of the following steps at which the run may end.
        self._first_end = ran.step_num + (room if deadline == math.inf else 1)
        loop_state, callbacks = self._loop.loop_state, [task.of for task in self._loop.of_each_step]
        # No other callback reads the state between the steps of a single compiled function.
        compiled = callbacks[0] if len(callbacks) == 1 and getattr(callbacks[0], "donates", False) else None
        if compiled is not None:
            loop_state.state = compiled.enter(loop_state.state)
        try:
            super().run(ran, feed, room, requests, deadline)
        finally:
            if compiled is not None:
                loop_state.state = compiled.leave(loop_state.state)
            if self._ended_rows:
                rows, self._ended_rows = self._ended_rows, []
                loop_state.history.commit_all(rows)
        if loop_state.stop_iteration:
            requests.pauses, feed.has_ended = pauses, True  # Ends the loop here.
            self._run.agenda.stopped_by = "a callback"

    def _run_one(self, carry: Any, batch: types.Batch) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        loop_state, examples = self._loop.loop_state, self.step.num_examples(batch)
        end_row(loop_state, self._ended_rows)
        self._now = now = self._now.advance(samples=examples, time=self._start + timing.clock())
        if now.steps >= self._first_end and self._plan.ends_at(now):
            now = dataclasses.replace(now, is_last=True)
        loop_state.batch, loop_state.elapsed = batch, now
        for task in self._loop.of_each_step:
            task()
        if loop_state.stop_iteration:
            self._requests.request_pause()
        return carry, {}, examples
