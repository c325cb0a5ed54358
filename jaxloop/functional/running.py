"""The loop function of the functional API."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, final

import jax
from absl import logging
from etils import epath

from jaxloop import checkpoint as checkpoints
from jaxloop.actions.checkpoint_action import CheckpointAction
from jaxloop.base import checks, encoding
from jaxloop.base.text import announce, quiet_orbax, suggests
from jaxloop.engine.agenda import Rank
from jaxloop.engine.feed import Source
from jaxloop.engine.rehearse import Course
from jaxloop.engine.run import Plan
from jaxloop.experiment.data import LeftOut, Sources, TrainingData
from jaxloop.experiment.specs import RunSpec
from jaxloop.experiment.whole_run import WholeRun, reconcile_hyperparams, saved_paths, withdraw_stop
from jaxloop.functional.callbacks import ActionTask, FunctionTask, action_of
from jaxloop.functional.counting import as_stop, counter, is_over, warn_of_early_end
from jaxloop.functional.loop_state import LoopState, Moment, Tasks, end_row, on_end, on_start
from jaxloop.functional.program import TaskLoop
from jaxloop.functional.tools import CheckpointTool, as_kind, kind_on_host
from jaxloop.history import HISTORY_FILE, History
from jaxloop.models.function_step import name_of
from jaxloop.processes import agreement, lock
from jaxloop.schedules import Elapsed, Schedule, is_always, is_never, planned_steps


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

    The callbacks are called in the order of the tasks, except that actions and tools come after all others, and
    checkpoints last. A callback is a function that takes up to four positional arguments, `(state, batch, elapsed,
    loop_state)`, in this order; any further parameters need defaults. It returns None, logs, `(logs, state)`, or
    `(outputs, logs, state)`, where any element of a tuple may be None. It may also return just a state, unless the
    state is a tuple or a dictionary. jaxloop's `Step`s and `Action`s are callbacks too, and so are objects with a
    `__loop_callback__(loop_state) -> (logs, state)` method.

    The logs of a step become one row of the history. The loop doesn't wait for the devices unless a callback reads a
    value. On Ctrl-C, the loop finishes the current step, saves a checkpoint if the tasks include one, and returns the
    results so far. On SIGTERM, it does the same, and then the process exits with status 143.

    The callbacks of every step that come first in the tasks, such as the train step, are called as soon as its batch
    has been read. Before any other callback is called, the next batch is read, too, as in an `OuterLoop`, so that
    `elapsed.is_last` is known. Checkpoints still store the position before that batch. If one of these callbacks stops
    the loop, a dataset that is an iterator has therefore lost that batch.

    Unlike an `OuterLoop`, the loop has no `check`, and supports one process only. At its start, it warns only about
    schedules that would never fire. The other problems that an `OuterLoop` reports then, such as a patience that is
    longer than the run, show only during the run.

    If the tasks include `checkpoint(directory, resume=True)`, the loop resumes from the newest checkpoint. It restores
    the state (with its NumPy and Python numbers), the position in the dataset, the history, and `LoopState.metadata`.
    It also restores the state of the tools, and of each `__loop_callback__` object that has the methods `state_dict()`
    and `load_state_dict(state_dict)`. A callback that is called at the step of the checkpoint, such as one with the
    schedule `last()` if that was the last step, receives None as its batch.

    Args:
      state: Any pytree. If a callback such as `train_step` donates it, use the returned state afterwards.
      dataset: The batches to loop over. Pass None if the callbacks don't need any data. In that case, `batch` is None,
        and `stop` must be given.
      tasks: The callbacks by schedule, such as `{every(1): [train_step], every(steps=1000): [checkpoint(...)]}`, as a
        dictionary or as pairs. `on_start` and `on_end` are also valid keys.
      stop: When to end the loop; see `elapse`.
      history: A history to continue, which is also returned. If None, a new one is started.
      elapsed: The progress of an earlier run to continue.
      num_examples: A function that returns the number of examples in a batch, which is the batch's weight in means. For
        padded batches, pass a function such as `lambda batch: batch["mask"].sum()`. If None, the weight is the size of
        the batch's leading axis, or 1 if there is none.

    Returns:
      `(state, history, elapsed)`.

    Raises:
      TypeError: If a callback has an invalid signature or returns an invalid result. The message names the callback.
      ValueError: If the state was donated to an earlier call.
      Exception: If a callback or the dataset raises one. A note added to the exception says where and at which step it
        was raised. Pending checkpoints are committed before the exception is propagated.
    """
    if dataset is None and stop is None:
        raise ValueError("jf.loop got no dataset, so nothing ends it. Give stop.")
    checks.check_only_process("jf.loop")
    checks.check_alive(state, "jf.loop")
    begin, spec = elapsed or Elapsed(), RunSpec(dataset, stop=as_stop(stop))
    loop_state = LoopState(state, History() if history is None else history, begin)
    run = _Run(loop_state, tasks, spec, counter(num_examples), has_history=history is not None)
    with run.job.requests, quiet_orbax(), run.closing():
        resumed = run.begin()
        run.call_at(on_start)
        run.train(resumed)
        run.finish()
        run.call_at(on_end)
    return loop_state.state, loop_state.history, loop_state.elapsed.without_previous()


@final
class _Run:
    """One call of `loop`. An action that appears several times is due when any of its schedules fires.

    It is also the part of a checkpoint that describes the loop and its callbacks.

    Args:
      loop_state: The state of the loop.
      tasks: The callbacks by schedule.
      spec: The dataset, and when to end the loop.
      count: A function that counts the examples in a batch.
      has_history: Whether the history was given by the user.

    Attributes:
      job: The only process, with its signals.
    """

    def __init__(
        self, loop_state: LoopState, tasks: Tasks, spec: RunSpec, count: Callable[[Any], int], *, has_history: bool
    ):
        functions, actions = list[FunctionTask](), dict[int, ActionTask]()
        at_moments: list[tuple[Moment, FunctionTask | ActionTask]] = []
        for when, callback in _callbacks(tasks):
            if (action := action_of(callback)) is None:
                task = FunctionTask(callback, loop_state)
            elif (task := actions.get(id(callback))) is None:
                task = actions[id(callback)] = ActionTask(callback, action, loop_state)
            if isinstance(when, Moment):
                at_moments.append((when, task))
                continue
            task.when = when if is_never(task.when) else task.when | when
            if isinstance(task, FunctionTask):
                functions.append(task)
        of_each_step = list(itertools.takewhile(lambda task: is_always(task.when), functions))
        not_due = [*of_each_step, *(task for _, task in at_moments if isinstance(task, FunctionTask))]
        for task in not_due:
            task.rank = Rank.ELSEWHERE
        self._loop_state, self._actions, self._at_moments = loop_state, list(actions.values()), at_moments
        if self._resumed_from and not has_history:
            loop_state.history = History(self._resumed_from[0] / HISTORY_FILE)
        self.job: agreement.Job = agreement.Job(False)
        self._engine = engine = TaskLoop(of_each_step, loop_state, count).engine
        self._data = data = TrainingData(spec, Sources(), engine, (), LeftOut())
        self._whole = WholeRun({"train": self, "data": data}, loop_state.history, self.job)
        items = list(dict.fromkeys([*not_due, *functions, *self._actions]))
        source = Source(mark=data.mark, consumed=data.note_consumed)
        engine.set_plan(Plan(stop=spec.stop, items=items, source=source))
        engine.resume(loop_state.elapsed)
        for task in self._actions:
            task.snapshot = self._whole.snapshot

    @property
    def _directories(self) -> list[epath.Path]:
        """The directories that the loop saves to."""
        savers = [task.action for task in self._actions if isinstance(task.action, CheckpointAction)]
        return list(dict.fromkeys(action.directory for action in savers))

    @property
    def _resumed_from(self) -> list[epath.Path]:
        """The directories that the loop resumes from."""
        tools = [task.of for task in self._actions if isinstance(task.of, CheckpointTool)]
        return [tool.action.directory for tool in tools if tool.resume]

    def begin(self) -> bool:
        """Prepares the first step. Returns whether the loop resumes from a checkpoint, because a task requests it."""
        loop_state, engine, can_resume = self._loop_state, self._engine, bool(self._resumed_from)
        is_resumed = can_resume and self._resume(loop_state)
        self._data.open(restores=True, warns=can_resume)
        engine.check_schedules()
        start = loop_state.elapsed = engine.run.now
        loop_state.total_steps = planned_steps(engine.plan.stop, start.previous or start)
        for task in self._actions:
            task.action.begin_run(start.steps, can_resume=can_resume)
        _warn_of_unused(engine.plan.items, self._data.batches_per_epoch(start.steps), loop_state.total_steps)
        if can_resume:
            self._whole.rows.drop_later(start.steps)
        return is_resumed

    def _resume(self, loop_state: LoopState) -> bool:
        directories, given = self._resumed_from, checks.as_arrays(loop_state.state)
        restored = checkpoints.open_newest(saved_paths(directories, self.job), lambda opened: opened.restore(given))
        if restored is None:
            logging.info("No checkpoint found in %s", " and ".join(map(str, directories)))
            self._whole.rows.begin(loop_state.elapsed.steps)
            announce("The loop saves checkpoints in %s.", " and ".join(map(str, self._directories)))
            return False
        opened, state = restored
        remedy = "To change it, let a callback return a state with another value."
        loop_state.state = reconcile_hyperparams(given, state, restores=True, remedy=remedy)
        self._engine.resume(opened.elapsed())
        self._whole.rows.begin(opened.step)
        self._whole.load(opened, loop_state.state)
        withdraw_stop(self._engine.run.agenda, [task.action for task in self._actions])
        loop_state.stop_iteration = self._engine.run.agenda.wants_stop
        for task in self._actions:
            if isinstance(task.action, CheckpointAction):  # Its directory tells whether it saved this step.
                is_saved = opened.step in checkpoints.all_steps(task.action.directory)
                task.called_at = opened.step if is_saved else None
        announce("Resumed at step %d from %s.", opened.step, opened.path.parent)
        return True

    def train(self, is_resumed: bool) -> None:
        """Calls what is due at the start, and runs the steps."""
        loop_state, engine = self._loop_state, self._engine
        start, stop = loop_state.elapsed, engine.plan.stop
        is_done = is_over(stop, start) or loop_state.stop_iteration
        if is_resumed or start.steps == 0:
            engine.hold_now(None, is_last=is_done)
        loop_state.elapsed = engine.run.now
        if is_resumed and loop_state.stop_iteration:
            text = "Nothing is left to run: a callback stopped the loop at step %d. If it can, give it more patience."
            logging.warning(text, start.steps)
        if is_done:
            return
        engine.loops(None, lambda: self._data.source, lambda: None)
        loop_state.elapsed = engine.run.now
        if self.job.requests.requested:
            for task in self._actions:
                if task.rank == Rank.SAVE:
                    task.snapshot = functools.partial(self._whole.snapshot, in_moment=True)
                    task()
        elif engine.outcome.data_ended and not engine.run.agenda.wants_stop:
            warn_of_early_end(start, loop_state.elapsed, stop)

    def call_at(self, moment: Moment) -> None:
        """Calls the callbacks under `on_start` or `on_end`."""
        for when, task in self._at_moments:
            if when is moment:
                task()

    def finish(self) -> None:
        """Finishes the last row, and the actions of a loop that ended without an error."""
        end_row(self._loop_state)
        for task in self._actions:
            self._loop_state.state = task.action.finish(self._loop_state.state)

    @contextlib.contextmanager
    def closing(self) -> Iterator[None]:
        """Locks the directories of the loop, and closes its actions, no matter how it ends.

        Errors raised by the actions don't hide an error that ended the loop.
        """
        failure = None
        with contextlib.ExitStack() as locks:
            for directory in self._directories:
                locks.enter_context(lock.locked(directory))
            try:
                yield
            except BaseException as error:
                failure = error
                raise
            finally:
                errors = list(self._close(self.job.requests.run_status(failure)))
                if errors and failure is None:
                    raise errors[0]

    def _close(self, status: str) -> Iterator[Exception]:
        history = self._loop_state.history
        ends = [functools.partial(end_row, self._loop_state), *([] if history.path is None else [history.flush])]
        for task in self._actions:
            ends += [functools.partial(task.action.end_run, status), task.action.close]
        for end in [*ends, self._data.close]:
            try:
                end()
            except Exception as error:
                logging.exception("Failed at the end of the loop: %r", end)
                yield error

    # Saving ------------------------------------------------------------------------------------------

    def state_dict(self, *, in_moment: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns JSON values, and the train states that actions keep."""
        saved, kept = self._engine.state_dict(in_moment=in_moment)
        leaves = checks.leaves_by_path(self._loop_state.state)
        on_host = {path: kind for path, leaf in leaves.items() if (kind := kind_on_host(leaf)) is not None}
        saved |= {"metadata": encoding.encode(self._loop_state.metadata), "on_host": on_host}
        return saved, {index: checks.as_arrays(state) for index, state in kept.items()}

    def load_state_dict(self, saved: Mapping[str, Any], kept: Mapping[str, Any]) -> None:
        """Restores a `state_dict`, with the NumPy and Python numbers of the state."""
        self._loop_state.metadata.update(encoding.decode(saved["metadata"]))
        as_saved = lambda path, leaf: as_kind(saved["on_host"].get(checks.path_name(path)), leaf)
        restore = functools.partial(jax.tree_util.tree_map_with_path, as_saved)
        self._loop_state.state = restore(self._loop_state.state)
        self._engine.load_state_dict(saved, {index: restore(state) for index, state in kept.items()})


def _warn_of_unused(tasks: Iterable[Any], num_batches: int | None, total_steps: int | None) -> None:
    """Warns about schedules that would never fire in a loop of this length."""
    # The batch size is unknown, so assume that any number of examples is reached at once.
    course = Course(Plan(total=total_steps), batches_in_pass=num_batches, rows=2**30, most_moments=100)
    for task in tasks if not course.is_over else ():
        if not is_always(task.when) and not is_never(task.when) and course.calls(task.when).is_never:
            _warn_once(f"{task.when!r} would never fire, so {name_of(task.of)} would never be called: {course}.")


_warn_once = functools.cache(logging.warning)  # A loop may run within each step of another one.


def _callbacks(tasks: Tasks) -> Iterator[tuple[Schedule | Moment, Any]]:
    """Yields each callback with its schedule, or the moment of its call."""
    what = "Tasks must be {schedule: callbacks}, or pairs (schedule, callbacks), such as {every(100): [save]}"
    if not isinstance(tasks, Iterable) or isinstance(tasks, str):
        raise TypeError(f"{what}, got {name_of(tasks)}. Write {{every(1): {name_of(tasks)}}}.")
    for pair in tasks.items() if isinstance(tasks, Mapping) else tasks:
        if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], Schedule | Moment):
            raise TypeError(f"{what}, got {pair!r}.")
        for callback in pair[1] if isinstance(pair[1], list | tuple) else [pair[1]]:
            yield pair[0], callback
