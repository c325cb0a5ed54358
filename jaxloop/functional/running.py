"""The loop function of the functional API."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from absl import logging
from etils import epath

from jaxloop import checkpoint as checkpoints
from jaxloop.actions.action import Action
from jaxloop.actions.checkpoint_action import CheckpointAction
from jaxloop.base import checks, encoding, timing
from jaxloop.base.text import announce, quiet_orbax, suggests
from jaxloop.data.position import DatasetPosition, PositionedIterator
from jaxloop.data.sources import NO_DATA, num_batches
from jaxloop.engine.feed import Feed, as_iterator
from jaxloop.engine.pending import CHUNK_SIZE
from jaxloop.engine.plan import Plan
from jaxloop.engine.program import Program, Ran
from jaxloop.engine.rehearse import Course
from jaxloop.experiment.data import position_of, warning_of_unknown_position
from jaxloop.experiment.whole_run import WholeRun, reconcile_hyperparams
from jaxloop.functional.callbacks import ActionCallback, CallbackOf, as_callback
from jaxloop.functional.counting import Counting, as_stop
from jaxloop.functional.loop_state import LoopState, Moment, Tasks, commit, end_row, on_end, on_start, write
from jaxloop.functional.tools import CheckpointTool, Tool, as_kind, kind_on_host
from jaxloop.history import History
from jaxloop.models.function_step import name_of
from jaxloop.processes import agreement, interrupt, lock
from jaxloop.schedules import NEVER, Elapsed, Schedule, goal_of, is_always, is_never, planned_steps, skipped_step


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

    The callbacks are called in the order of the tasks, except that checkpoints come last. A callback is a function that
    takes up to four positional arguments, `(state, batch, elapsed, loop_state)`, in this order; any further parameters
    need defaults. It returns None, logs, `(logs, state)`, or `(outputs, logs, state)`, where any element of a tuple may
    be None. It may also return just a state, unless the state is a tuple or a dictionary. jaxloop's `Step`s, `Action`s,
    and `Loop`s are callbacks too (a `Loop` runs on the current batch only), and so are objects with a
    `__loop_callback__(loop_state) -> (logs, state)` method.

    The logs of a step become one row of the history. As long as each step calls only one compiled function, the loop
    adds the rows of up to 32 steps at a time. The loop doesn't wait for the devices unless a callback reads a value. On
    Ctrl-C, the loop finishes the current step, saves a checkpoint if the tasks include one, and returns the results so
    far. On SIGTERM, it does the same, and then the process exits with status 143.

    If an action or a tool such as `checkpoint` is due at a step, the next batch is read before the callbacks are
    called, as in an `OuterLoop`, so that `elapsed.is_last` is known. Checkpoints still store the position before that
    batch.

    If the tasks include `checkpoint(directory, resume=True)`, the loop resumes from the newest checkpoint. It restores
    the state (with its NumPy and Python numbers), the position in the dataset, the history, and `LoopState.metadata`.
    It also restores the state of the tools, and of each `__loop_callback__` object that has the methods `state_dict()`
    and `load_state_dict(state_dict)`.

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
    if dataset is None:
        if stop is None:
            raise ValueError("jf.loop got no dataset, so nothing ends it. Give stop.")
        dataset = NO_DATA
    stop, stopwatch, tasks = as_stop(stop), timing.Stopwatch(), list(_pairs(tasks))
    history = _history_for(tasks) if history is None else history
    begin = elapsed or Elapsed()
    loop_state = LoopState(state, history, begin)
    entries = _compile(tasks, loop_state)
    callbacks = list({id(each): each for entry in entries for each in entry.callbacks}.values())
    checks.check_only_process("jf.loop")
    checks.check_alive(state, "jf.loop")

    with (
        interrupt.Interruptible() as interruptible,
        quiet_orbax(),
        _locking(callbacks),
        _closing(callbacks, loop_state, interruptible),
        stopwatch.counting("dispatch"),
    ):
        feed, mark, resume_history = _set_up_checkpoints(loop_state, callbacks, dataset, planned_steps(stop, begin))
        can_resume = any(isinstance(each.of, CheckpointTool) and each.of.resume for each in callbacks)
        for callback in callbacks:
            callback.begin_run(loop_state.elapsed.steps, can_resume=can_resume)
        start = loop_state.elapsed
        is_new = start is begin and start.steps == 0
        loop_state.total_steps = planned_steps(stop, start.previous or start)
        counting = Counting(feed, stop, start, stopwatch, num_examples, interruptible)
        _warn_of_unused(entries, None if start.steps else num_batches(dataset), loop_state.total_steps)
        resume_history()
        _Due(entry for entry in entries if entry.when is on_start).call(loop_state, stopwatch)
        if start is not begin:
            for callback in _Due(entry for entry in entries if entry.when(start)).callbacks:
                callback.save(loop_state, only_missing=True)
        if is_new:
            _Due(entry for entry in entries if entry.when(start)).call(loop_state, stopwatch)
        plan = _Plan(entries)
        batch_read = None if loop_state.stop_iteration else counting.read()
        while batch_read is not None:
            end_row(loop_state)  # Not earlier, because values reported at the last step belong to its row.
            loop_state.elapsed, loop_state.batch = batch_read
            due = plan.due(loop_state.elapsed)
            if due.has_actions and not loop_state.elapsed.is_last:
                if due.saves:
                    mark()  # Before the next batch is read, so that the position is this step's.
                with stopwatch.counting("data"):
                    is_last = not feed.has_more()
                if is_last:
                    loop_state.elapsed = dataclasses.replace(loop_state.elapsed, is_last=True)
                    due = plan.due(loop_state.elapsed)
            due.call(loop_state, stopwatch, ends_loop=not loop_state.elapsed.is_last)
            if loop_state.stop_iteration or interruptible.requested:
                break
            batch_read = plan.advance(loop_state, counting, interruptible.outermost)
        if interruptible.requested:
            for callback in callbacks:
                callback.save(loop_state)
        elif loop_state.elapsed is not start:
            # If the dataset has ended, the last step was not known to be the last until now.
            now = loop_state.elapsed = dataclasses.replace(loop_state.elapsed, is_last=True)
            _Due(entry.without(plan.newest.entries) for entry in entries if entry.when(now)).call(loop_state, stopwatch)
        end_row(loop_state)
        for callback in callbacks:
            callback.finish(loop_state)
        _Due(entry for entry in entries if entry.when is on_end).call(loop_state, stopwatch)
    return loop_state.state, loop_state.history, loop_state.elapsed.without_previous()


def _history_for(tasks: Iterable[tuple[Any, Any]]) -> History:
    """Returns a new history. If the loop can resume from checkpoints, the history's file is stored next to them."""
    for _, callbacks in tasks:
        for callback in callbacks if isinstance(callbacks, list | tuple) else [callbacks]:
            if isinstance(callback, CheckpointTool) and callback.resume:
                return History(callback.action.directory / "history.jsonl")
    return History()


def _set_up_checkpoints(
    loop_state: LoopState, callbacks: Sequence["CallbackOf"], dataset: Any, total_steps: int | None
) -> tuple[Feed, Callable[[], None], Callable[[], None]]:
    """Prepares to checkpoint the whole loop, and resumes from the newest checkpoint if a task requests it.

    Returns:
      The feed, at the right position in the dataset; a function that marks the position for a checkpoint; and a
      function that drops later rows from the history, to be called when nothing can refuse the start anymore.
    """
    if not any(callback.saves for callback in callbacks):
        return Feed(as_iterator(dataset)), lambda: None, lambda: None
    source = PositionedIterator(dataset)
    feed = Feed(source)
    parts = {"train": _LoopPart(loop_state, callbacks), "data": _DataPart(source, feed)}
    run = WholeRun(parts, loop_state.history, agreement.Job(False), ends=(total_steps, None))
    loop_state.snapshot = run.snapshot
    tools = [callback.of for callback in callbacks if isinstance(callback.of, CheckpointTool)]
    directories = [tool.action.directory for tool in tools if tool.resume]
    if not directories:
        return feed, source.mark, lambda: None
    for directory in directories:
        checkpoints.clear_leftovers(directory)
    given = checks.as_arrays(loop_state.state)
    restored = checkpoints.open_newest(checkpoints.all_paths(directories), lambda opened: opened.restore(given))
    if restored is None:
        if warning := source.resume_warning():
            logging.warning("%s", warning)
        logging.info("No checkpoint found in %s", " and ".join(map(str, directories)))
        run.rows.resume(loop_state.elapsed)
    else:
        opened, state = restored
        remedy = "To change it, let a callback return a state with another value."
        loop_state.state = reconcile_hyperparams(given, state, restores=True, remedy=remedy)
        resumed = run.load(opened, loop_state.state)
        loop_state.elapsed = resumed.elapsed
        actions = list(map(_action_of, callbacks))
        resumed.renew_patience(actions)
        loop_state.stop_iteration = resumed.stays_stopped(actions)
        announce("Resumed at step %d from %s.", opened.step, opened.path.parent)
    if loop_state.elapsed.steps == 0:
        announce("The loop saves checkpoints in %s.", " and ".join(map(str, _directories(callbacks))))
    return feed, source.mark, functools.partial(run.rows.drop_later, loop_state.elapsed.steps)


class _LoopPart:
    """The part of a checkpoint that describes a loop and its callbacks."""

    def __init__(self, loop_state: LoopState, callbacks: Sequence["CallbackOf"]):
        self._loop_state, self.callbacks = loop_state, callbacks

    def state_dict(self, *, in_moment: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        now, leaves = self._loop_state.elapsed, checks.leaves_by_path(self._loop_state.state)
        kept = {str(index): callback.kept_state for index, callback in enumerate(self.callbacks)}
        return {
            "elapsed": now.to_dict(),
            "previous": (now.previous or now).to_dict(),
            "steps_in_loop": 0,
            "has_stopped": self._loop_state.stop_iteration,
            "metadata": encoding.encode(self._loop_state.metadata),
            "on_host": {path: kind for path, leaf in leaves.items() if (kind := kind_on_host(leaf)) is not None},
            "callbacks": [[each.kind, encoding.encode(each.state_dict())] for each in self.callbacks],
        }, {name: checks.as_arrays(state) for name, state in kept.items() if state is not None}

    def load_state_dict(self, saved: Mapping[str, Any], kept: Mapping[str, Any]) -> None:
        self._loop_state.metadata.update(encoding.decode(saved["metadata"]))
        kinds = saved["on_host"]
        leaf_as_saved = lambda path, leaf: as_kind(kinds.get(checks.path_name(path)), leaf)
        as_saved = functools.partial(jax.tree_util.tree_map_with_path, leaf_as_saved)
        self._loop_state.state = as_saved(self._loop_state.state)
        if [callback.kind for callback in self.callbacks] != [kind for kind, _ in saved["callbacks"]]:
            logging.warning("The tasks differ from those in the checkpoint, so their callbacks start fresh.")
            return
        for index, (callback, (_, own)) in enumerate(zip(self.callbacks, saved["callbacks"], strict=True)):
            callback.load_state_dict(encoding.decode(own))
            if str(index) in kept:
                callback.kept_state = as_saved(kept[str(index)])

    def resume(self, elapsed: Elapsed, batches: int = 0) -> None:
        pass


class _DataPart:
    """The part of a checkpoint that contains the position in the data."""

    def __init__(self, source: PositionedIterator, feed: Feed):
        self._source, self._feed = source, feed

    def state_dict(self, *, in_moment: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        arrays: dict[str, Any] = {}
        position = position_of(self._source, self._source.count - self._feed.num_ahead, arrays)
        return {"positions": [{"data": position}]}, {"bytes": arrays}

    def load_state_dict(self, saved: Mapping[str, Any], trees: Mapping[str, Any]) -> None:
        position = saved["positions"][0]["data"]
        if position is not None:
            with warning_of_unknown_position("the dataset"):
                self._source.seek(DatasetPosition.from_dict(position, trees["bytes"]))

    def resume(self, elapsed: Elapsed, batches: int = 0) -> None:
        pass


def _action_of(callback: "CallbackOf") -> Any:
    return callback.of.action if isinstance(callback.of, Tool) else callback.of


@contextlib.contextmanager
def _locking(callbacks: Sequence["CallbackOf"]) -> Iterator[None]:
    """Locks the directories that the callbacks save to, so that no other run can use them."""
    with contextlib.ExitStack() as locks:
        for directory in _directories(callbacks):
            locks.enter_context(lock.locked(directory))
        yield


def _directories(callbacks: Sequence["CallbackOf"]) -> list[epath.Path]:
    """Returns the directories that the callbacks save to."""
    savers = [action for action in map(_action_of, callbacks) if isinstance(action, CheckpointAction)]
    return list(dict.fromkeys(action.directory for action in savers))


def _warn_of_unused(entries: Sequence["_Entry"], num_batches: int | None, total_steps: int | None) -> None:
    """Warns about schedules that would never fire in a loop of this length."""
    # The batch size is unknown, so assume that any number of examples is reached at once.
    course = Course(Plan(total=total_steps), batches_in_pass=num_batches, rows=2**30, most_moments=100)
    for entry in entries if not course.is_over else ():
        when = entry.when if isinstance(entry.when, Schedule) else None
        if when is not None and (step := skipped_step(when)):
            _warn_once(f"{when!r} fires at step {step}, but its next_step skips that step, so the firing is lost.")
        elif when is not None and not is_never(when) and course.calls(when).is_never:
            names = ", ".join(callback.name for callback in entry.callbacks)
            _warn_once(f"{when!r} would never fire, so {names} would never be called: {course}.")


@functools.cache  # A loop may run within each step of another one.
def _warn_once(text: str) -> None:
    logging.warning("%s", text)


@contextlib.contextmanager
def _closing(
    callbacks: Sequence["CallbackOf"], loop_state: LoopState, interruptible: interrupt.Interruptible
) -> Iterator[None]:
    """Closes the callbacks, no matter how the loop ends. Errors raised here don't hide an error that ended the loop."""
    failure, errors = None, []
    try:
        yield
    except BaseException as error:
        failure = error
        raise
    finally:
        ends = [("The last row", lambda: end_row(loop_state)), ("The file of the history", lambda: write(loop_state))]
        for callback in callbacks:
            if isinstance(action := _action_of(callback), Action):
                ends.append((callback.name, functools.partial(action.end_run, interruptible.run_status(failure))))
            ends.append((callback.name, callback.close))
        for name, end in ends:
            try:
                end()
            except Exception as error:
                logging.exception("%s could not be finished.", name)
                errors.append(error)
        if errors and failure is None:
            raise errors[0]


@dataclasses.dataclass(frozen=True, eq=False)
class _Entry:
    """An entry of the tasks: a schedule or a moment, with its callbacks."""

    when: Schedule | Moment
    callbacks: Sequence["CallbackOf"]

    def without(self, called: Sequence["_Entry"]) -> "_Entry":
        """Returns the entry, without the callbacks that don't need another call after the entries in `called`.

        If this entry is in `called`, only its actions remain, because actions decide themselves whether they are due.
        """
        if self not in called:
            return self
        return _Entry(self.when, [each for each in self.callbacks if isinstance(each, ActionCallback)])


class _Due:
    """The entries that are due, and their callbacks: in order, except that checkpoints come last."""

    def __init__(self, entries: Iterable[_Entry]):
        self.entries = list(entries)
        called = [each for entry in self.entries for each in entry.callbacks]
        self.callbacks = sorted(called, key=lambda callback: callback.saves)
        self.has_actions = any(isinstance(callback, ActionCallback) for callback in called)
        self.saves = any(callback.saves for callback in called)

    def call(self, loop_state: LoopState, stopwatch: timing.Stopwatch, *, ends_loop: bool = False) -> None:
        """Calls the callbacks. With `ends_loop`, skips checkpoints if a callback has stopped the loop.

        A skipped checkpoint is saved when the loop ends at this step, so it includes everything logged at this step.
        """
        for callback in self.callbacks:
            if callback.saves and ends_loop and loop_state.stop_iteration:
                continue
            try:
                if callback.time_category == "dispatch":  # This is already being counted.
                    callback(loop_state)
                else:
                    with stopwatch.counting(callback.time_category):
                        callback(loop_state)
            except BaseException as error:
                callback.add_note(error, loop_state)
                raise

    def program(self, loop_state: LoopState) -> Program | None:
        """Returns the program that runs the steps if each step only calls one compiled function; otherwise None."""
        known = self.callbacks[0].program() if len(self.callbacks) == 1 else None
        return None if isinstance(loop_state.state, tuple) else known


class _Plan:
    """Determines which entries are due at a step, without evaluating schedules that can't fire yet.

    If every step only calls a single compiled function, the plan itself runs the steps until another entry may be due.
    This matters because a few Python calls can take as long as a dispatch.
    """

    def __init__(self, entries: Sequence[_Entry]):
        pairs = [(entry, entry.when) for entry in entries if isinstance(entry.when, Schedule)]
        self._entries = [entry for entry, _ in pairs]
        self._others = [when for _, when in pairs if not is_always(when)]
        self._each_step = _Due(entry for entry, when in pairs if is_always(when))
        self._next_step = 0  # The first step at which other entries can be due.
        self.newest = _Due(())

    def due(self, now: Elapsed) -> _Due:
        """Returns the entries that are due now, and also stores them in `newest` until the next step."""
        if now.steps < self._next_step and not now.is_last:
            self.newest = self._each_step
            return self.newest
        self.newest = due = _Due(entry for entry in self._entries if entry.when(now))
        goal = goal_of(self._others, now)
        self._next_step = goal.step if goal.time == NEVER[1] else now.steps + 1
        return due

    def advance(
        self, loop_state: LoopState, counting: Counting, interruptible: interrupt.Interruptible
    ) -> tuple[Elapsed, Any] | None:
        """Runs the steps that only call one compiled function, and returns the progress and the batch of the next step.

        Returns None at the end of the run or after a signal. The row of the last step is not yet added to the history.
        """
        program = self._each_step.program(loop_state)
        while program is not None and interruptible.signum is None:
            room = min(self._next_step - 1 - counting.newest.steps, counting.room(), CHUNK_SIZE)
            if room < 1:
                break
            before = loop_state.elapsed
            has_ended = self._run_some(program, loop_state, counting, interruptible, room)
            if loop_state.elapsed is not before:
                self.newest = self._each_step
            if has_ended:
                return None
        return None if interruptible.signum is not None else counting.read()

    def _run_some(
        self,
        program: Program,
        loop_state: LoopState,
        counting: Counting,
        interruptible: interrupt.Interruptible,
        room: int,
    ) -> bool:
        """Runs up to `room` steps, and adds their rows to the history. Returns True if the dataset has ended."""
        clock, seen = counting.stopwatch.clock, list[tuple[int, float]]()

        def observe(batch: Any) -> None:
            loop_state.batch = batch
            seen.append((counting.num_examples(batch), clock()))

        program.observers = [observe]
        feed, error = counting.iterator, None
        assert isinstance(feed, Feed)
        feed.begin(None)
        state, step_num = program.step._runner.states.prepare(loop_state.state), loop_state.elapsed.steps
        ran = Ran(state, step_num, [])
        checks.mark_donated(loop_state.state, "jf.loop")
        try:
            program.run(ran, feed, room, interruptible)
        except BaseException as raised:
            error = raised
        counting.stopwatch.move(ran.in_data, "data")
        loop_state.state = ran.state
        program.step._runner.states.remember(ran.state)
        if ran.outputs:
            _report(loop_state, counting.count_all(seen[: len(ran.outputs)]), ran.outputs)
        if error is not None and ran.is_in_step:
            end_row(loop_state)
            loop_state.elapsed = counting.count(*seen[-1])
            self._each_step.callbacks[0].add_note(error, loop_state)
            raise error
        if feed.has_ended or error is not None:
            counting.end_by(error or StopIteration())
        return feed.has_ended


def _report(loop_state: LoopState, elapsed: Sequence[Elapsed], found: Sequence[Any]) -> None:
    """Adds the rows of several steps of a compiled function to the history, except for the row of the last step."""
    end_row(loop_state)
    for now, each in zip(elapsed, found, strict=True):
        if each["outputs"] is not None:
            loop_state.history.add_outputs(now, each["outputs"])
        loop_state.elapsed = now
        if each is not found[-1]:
            commit(loop_state, each["logs"] or {})
    loop_state.logs.merge(found[-1]["logs"] or {})


def _compile(tasks: Tasks, loop_state: LoopState) -> list[_Entry]:
    """Checks the tasks, and returns their entries. A callback that appears several times is wrapped only once."""
    entries, known, reporters = [], {}, []
    for when, callbacks in _pairs(tasks):
        callbacks = callbacks if isinstance(callbacks, list | tuple) else [callbacks]
        for callback in callbacks:
            if id(callback) not in known:
                known[id(callback)] = as_callback(callback, loop_state, reporters)
        entry = _Entry(when, [known[id(callback)] for callback in callbacks])
        entries.append(entry)
        if isinstance(when, Schedule):
            reporters += [each for each in entry.callbacks if not isinstance(each, ActionCallback)]
    return entries


def _pairs(tasks: Tasks) -> Iterator[tuple[Schedule | Moment, Any]]:
    if not isinstance(tasks, Iterable) or isinstance(tasks, str):
        raise TypeError(f"{_WHAT_TASKS_ARE}, got {name_of(tasks)}. Write {{every(1): {name_of(tasks)}}}.")
    for pair in tasks.items() if isinstance(tasks, Mapping) else tasks:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise TypeError(f"{_WHAT_TASKS_ARE}, got {pair!r} instead of a pair.")
        when, callbacks = pair
        if not isinstance(when, Schedule | Moment):
            raise TypeError(f"{_WHAT_TASKS_ARE}, got {when!r} instead of a schedule.")
        yield when, callbacks


_WHAT_TASKS_ARE = "Tasks must be {schedule: callbacks}, or pairs (schedule, callbacks), such as {every(100): [save]}"
