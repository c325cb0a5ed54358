"""The loop language: schedules mapped to callbacks.

>>> import jax.numpy as jnp
>>> import numpy as np
>>> from jaxloop import functional as jf
>>> @jax.jit
... def train_step(weight, batch):
...     slope = jnp.mean((weight * batch["x"] - batch["y"]) * batch["x"])
...     logs = jf.logs()
...     logs.add_metric("slope", slope)
...     return logs, weight - 0.1 * slope
>>> dataset = [{"x": np.full(8, 2.0, np.float32), "y": np.full(8, 6.0, np.float32)}] * 100
>>> def show(weight, batch, elapsed):
...     print(f"step {elapsed.steps}: {weight:.4f}")
>>> weight, history, elapsed = jf.loop(
...     jnp.float32(0), dataset, {jf.every(1): train_step, jf.every(10): show}, stop=jf.at(30)
... )
step 10: 2.9819
step 20: 2.9999
step 30: 3.0000
>>> elapsed.steps, len(history.collect("slope"))
(30, 30)

The state may be any pytree. Everything else is what the other doors use: `Elapsed`, schedules, `History`, actions,
checkpoints, partitioners.

- `loop` calls the callbacks; `elapse` counts along in a loop of your own, where the same tools are called by hand.
- `logs()` is what a step reports, `history()` what was measured.
- `step` and `train_step` make callbacks of pure functions, compiled and sharded.
- `checkpoint`, `early_stopping`, `keras_bar`, `tqdm_bar` and `inner_loop` are callbacks.
"""

import abc
import collections
import contextlib
import dataclasses
import functools
import inspect
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from etils import epath

from jaxloop import checkpoint as checkpoints
from jaxloop import checks, encoding, interrupt, metrics, partition, timing, types
from jaxloop.actions.action import Action
from jaxloop.actions.checkpoint_action import CheckpointAction
from jaxloop.actions.early_stopping_action import EarlyStoppingAction
from jaxloop.actions.periodic_action import PeriodicAction, is_periodic
from jaxloop.actions.progress_action import ProgressAction
from jaxloop.function_step import CompiledFunction, PlainCall, name_of, outputs_logs_and_state, positional_arguments
from jaxloop.history import History
from jaxloop.loop import Counting, Loop, as_iterator, as_stop
from jaxloop.loop import elapse as elapse
from jaxloop.output_queue import CHUNK_SIZE
from jaxloop.position import PositionedIterator, PositionUnknownError
from jaxloop.schedules import Elapsed as Elapsed
from jaxloop.schedules import Schedule, earliest, is_always
from jaxloop.schedules import after as after
from jaxloop.schedules import always as always
from jaxloop.schedules import at as at
from jaxloop.schedules import every as every
from jaxloop.schedules import first as first
from jaxloop.schedules import last as last
from jaxloop.schedules import never as never
from jaxloop.step import Step
from jaxloop.whole_run import WholeRun

# Logs ------------------------------------------------------------------------------------------------


@jax.tree_util.register_pytree_with_keys_class
class Logs(dict[str, Any]):
    """What a step reports: values by collection and name. A nested dictionary, and a pytree, so that jit returns it.

    >>> logs = Logs()
    >>> logs.add_metric("accuracy", 0.9).add_loss("loss", 0.3)
    {'metrics': {'accuracy': 0.9}, 'losses': {'loss': 0.3}}
    >>> logs.entry_value("accuracy"), logs.metrics.accuracy, logs.loss
    (0.9, 0.9, 0.3)
    """

    def add(self, collection: str, name: str, value: Any) -> Self:
        """Adds a value to a collection; returns the logs."""
        for each in (collection, name):
            if not isinstance(each, str):
                raise TypeError(f"Logs.add takes the names of a collection and of a value as strings, got {each!r}.")
        self.setdefault(collection, Logs())[name] = value
        return self

    def add_metric(self, name: str, value: Any) -> Self:
        """Adds to `metrics`: what is to be seen."""
        return self.add("metrics", name, value)

    def add_loss(self, name: str, value: Any) -> Self:
        """Adds to `losses`: scalars, of whose sum `train_step` takes the gradient."""
        return self.add("losses", name, value)

    @property
    def updates(self) -> "Logs":
        """The collection `updates`: what the forward pass changed, for `train_step` to put in the state.

        `logs.add("updates", "batch_stats", batch_stats)` adds to it. It is not kept in a history.
        """
        return self.setdefault("updates", Logs())

    def merge(self, other: Mapping[str, Any]) -> Self:
        """Takes over all entries of other logs, collection by collection; returns the logs."""
        for name, value in other.items():
            if isinstance(value, (dict, Mapping)):  # The first costs less.
                own = self.get(name)
                value = Logs(value) if own is None else Logs({**own, **value} if isinstance(own, Mapping) else value)
            self[name] = value
        return self

    def entry_value(self, name: str) -> Any:
        """The value of a name, in whichever collection; `entry_value("metrics.loss")` picks one.

        Raises:
          KeyError: there is no such name, or there are several.
        """
        entries = dict(_entries(self))
        found = [path for path in entries if f".{path}".endswith(f".{name.replace('/', '.')}")]
        if len(found) == 1:
            return entries[found[0]]
        if found:
            raise KeyError(f"{len(found)} entries of the logs are named {name!r}: {', '.join(found)}. Ask for one.")
        raise KeyError(f"No entry of the logs is named {name!r}. There are: {', '.join(entries) or 'none'}.")

    def __getattr__(self, name: str) -> Any:
        if name in self:
            value = self[name]
            return Logs(value) if isinstance(value, Mapping) and not isinstance(value, Logs) else value
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self.entry_value(name)
        except KeyError as error:
            raise AttributeError(error.args[0]) from None

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"Attributes of logs are for reading. Write logs.add_metric({name!r}, value).")

    def tree_flatten(self):
        names = tuple(sorted(self))
        return [self[name] for name in names], names

    def tree_flatten_with_keys(self):
        values, names = self.tree_flatten()
        return [(jax.tree_util.DictKey(name), value) for name, value in zip(names, values, strict=True)], names

    @classmethod
    def tree_unflatten(cls, names, values) -> Self:
        return cls(zip(names, values, strict=True))


logs, history = Logs, History


def _entries(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values under their paths, `metrics.loss`."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _entries(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _nested(entries: Mapping[str, Any]) -> Logs:
    """The logs of which these are the entries."""
    logs = Logs()
    for path, value in entries.items():
        *collections_, name = path.split(".")
        inner = logs
        for collection in collections_:
            inner = inner.setdefault(collection, Logs())
        inner[name] = value
    return logs


def _named(logs: Mapping[str, Any]) -> dict[str, Any]:
    """The entries as actions and bars call them: `loss` for those of `metrics` and `losses`, `test/loss` for others."""
    named = {}
    # A metric of the name of a loss comes later, and is the one that is meant.
    for path, value in sorted(_entries(logs), key=lambda entry: not entry[0].startswith("losses.")):
        collection, _, name = path.partition(".")
        named[(name if name and collection in ("metrics", "losses") else path).replace(".", "/")] = value
    return named


# Means -----------------------------------------------------------------------------------------------


def _num_examples(elapsed: Elapsed, before: Elapsed) -> int:
    """How many examples a row stands for; for one that comes after steps without a row, the mean of these."""
    return max((elapsed.samples - before.samples) // max(elapsed.steps - before.steps, 1), 1)


class _Means:
    """The means of the rows of a history so far, weighted by examples."""

    def __init__(self):
        self._num_rows, self._before, self._weight = 0, Elapsed(), 1
        self._sums: dict[str, tuple[float, int]] = {}

    def take(self, history: History) -> None:
        """Takes in the rows that it has not seen."""
        for index in range(self._num_rows, len(history)):
            elapsed, logs = history[index]
            self._add(elapsed, logs)
        self._num_rows = len(history)

    def _add(self, elapsed: Elapsed, logs: Mapping[str, Any]) -> None:
        if elapsed.steps != self._before.steps:  # Else it is the rest of a row.
            self._weight, self._before = _num_examples(elapsed, self._before), elapsed
        for path, value in _entries(logs):
            if not isinstance(value, str):
                total, weights = self._sums.get(path, (0.0, 0))
                self._sums[path] = (total + self._weight * float(value), weights + self._weight)

    def logs(self) -> Logs:
        return _nested({path: total / weights for path, (total, weights) in self._sums.items()})

    def logs_with(self, elapsed: Elapsed, logs: Mapping[str, Any]) -> Logs:
        """The means with one more row, which is not kept."""
        means = _Means()
        means._sums, means._before, means._weight = dict(self._sums), self._before, self._weight
        means._add(elapsed, logs)
        return means.logs()


_REDUCTIONS: dict[str, Callable[[list[Any]], Any]] = {
    "sum": sum,
    "min": min,
    "max": max,
    "last": lambda values: values[-1],
}


def _aggregate(history: History, how: str | Callable[[list[Any]], Any]) -> Logs:
    """What the rows of a history come to."""
    if how == "mean":
        means = _Means()
        means.take(history)
        return means.logs()
    values: dict[str, list[Any]] = {}
    for row in history:
        for path, value in _entries(row.logs):
            if not isinstance(value, str):
                values.setdefault(path, []).append(value)
    reduce = how if callable(how) else _REDUCTIONS[how]
    return _nested({path: reduce(each) for path, each in values.items()})


# The loop --------------------------------------------------------------------------------------------


class _Moment:
    """A moment outside the steps: a key of tasks, but no schedule that could be joined with others."""

    def __init__(self, name: str):
        self._name = name

    def __repr__(self) -> str:
        return self._name

    def __call__(self, elapsed: Elapsed) -> bool:
        return False


on_start = _Moment("on_start")
"""Key of the callbacks before the first step; their batch is None."""
on_end = _Moment("on_end")
"""Key of the callbacks after the last step, also after Ctrl-C, but not after an exception."""


@dataclasses.dataclass
class LoopState:
    """Where a loop is: what a callback with four arguments gets as its last.

    Attributes:
      state: the state; a callback may set it.
      history: what was measured, up to the step before.
      elapsed: how far the loop is; this step counts.
      batch: the batch of this step.
      logs: what the callbacks of this step have reported so far.
      outputs: what they have returned as outputs, by name.
      metadata: yours, for as long as the loop runs; checkpoints keep it, so that `jaxloop.encoding` must take it.
      stop_iteration: set it to True, and the loop ends after this step.
      total_steps: how many steps the loop shall come to, where `stop` says that.
    """

    state: Any = dataclasses.field(repr=False)
    history: History
    elapsed: Elapsed
    batch: Any = dataclasses.field(default=None, repr=False)
    logs: Logs = dataclasses.field(default_factory=Logs)
    outputs: dict[str, Any] = dataclasses.field(default_factory=dict, repr=False)
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)
    stop_iteration: bool = False
    total_steps: int | None = None
    # What a checkpoint keeps beside the state.
    _snapshot: Callable[[], dict[str, Any]] | None = dataclasses.field(default=None, init=False, repr=False)
    # Which of the logs the history has already, by path.
    _in_history: set[str] = dataclasses.field(default_factory=set, init=False, repr=False)
    _means: _Means = dataclasses.field(default_factory=_Means, init=False, repr=False)

    @property
    def accumulated_logs(self) -> Logs:
        """The means of all logs of this history, this step included, weighted by examples. Reading it waits."""
        self._means.take(self.history)
        return self._means.logs_with(self.elapsed, metrics.fetch(self._not_in_history()))

    def _not_in_history(self) -> Logs:
        if not self._in_history:
            return self.logs
        return _nested({path: value for path, value in _entries(self.logs) if path not in self._in_history})


Callback = Any
"""A function of up to four of `(state, batch, elapsed, loop_state)`, an object with `__loop_callback__`, a `Step`, an
`Action`, a `Loop`, or an object of `clu.periodic_actions`."""

Tasks = Mapping[Any, Any] | Iterable[tuple[Any, Any]]
"""Schedules and callbacks: a dictionary, or pairs; a callback may stand alone or in a list."""


def loop(
    state: Any,
    dataset: Any,
    tasks: Tasks,
    *,
    stop: Schedule | int | None = None,
    history: History | None = None,
    elapsed: Elapsed | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[Any, History, Elapsed]:
    """For each batch, calls the callbacks whose schedule fires, in the order in which they stand, checkpoints last.

    A callback is a function of none to four of `(state, batch, elapsed, loop_state)`, by position; arguments with a
    default are its own. It returns None, logs, `(logs, state)` or `(outputs, logs, state)`, with None for what it
    leaves alone. A state that is neither a tuple nor a dictionary may be returned alone. `Step`s, `Action`s and `Loop`s
    of jaxloop are callbacks too (a loop runs on the one batch), and so are objects with
    `__loop_callback__(loop_state) -> (logs, state)`.

    The logs of a step make one row of the history. Where nothing is called but one compiled function, the rows of up to
    32 steps are made together, before anything else is called: only the dataset could see that. Nothing waits for the
    devices, unless a callback reads a value. Ctrl-C ends the loop after the step in flight: it is saved where the tasks
    have a checkpoint, and what is there is returned. SIGTERM does the same, and exits with 143.

    With a `checkpoint(directory, resume=True)` among the tasks, the loop goes on from the newest checkpoint: with its
    state, its position in the data, the rows of its history, and what the tools and `LoopState.metadata` remember. So
    do objects with `__loop_callback__` that have `state_dict()` and `load_state_dict(state_dict)`.

    Args:
      state: any pytree. Callbacks that take it over (`train_step` donates it) leave you the one that is returned.
      dataset: the batches.
      tasks: `{every(1): [train_step], every(steps=1000): [checkpoint(...)]}`, or pairs. Not changed. `on_start` and
        `on_end` are keys too.
      stop: where to end, as in `elapse`.
      history: goes on with this one; it is the one that is returned.
      elapsed: goes on from here.
      clock: tells the time in seconds.

    Returns:
      `(state, history, elapsed)`.

    Raises:
      TypeError: a callback with a signature or a result that can't be meant; the error names it.
      ValueError: the state was donated to an earlier call.
      Whatever a callback or the dataset raises, with a note of where and at which step. Checkpoints under way are
        committed first.
    """
    stopwatch, tasks = timing.Stopwatch(clock), list(_pairs(tasks))
    history = _history_for(tasks) if history is None else history
    loop_state = LoopState(state, history, elapsed or Elapsed())
    entries = _compile(tasks, loop_state)
    callbacks = list({id(each): each for entry in entries for each in entry.callbacks}.values())
    checks.check_only_process("jf.loop")
    checks.check_alive(state, "jf.loop")

    with interrupt.Interruptible() as interruptible, _closing(callbacks, loop_state), stopwatch.counting("rest"):
        dataset = _keep_all(loop_state, callbacks, dataset)
        start = loop_state.elapsed
        loop_state.total_steps = _steps_of(stop, start)
        counting = Counting(as_iterator(dataset), as_stop(stop), start, stopwatch)
        _Due(entry for entry in entries if entry.when is on_start).call(loop_state, stopwatch)
        plan = _Plan(entries)
        drawn = None if loop_state.stop_iteration else counting.draw()
        while drawn is not None:
            _end_row(loop_state)  # Not before: what waits for the last step belongs to the row of that step.
            loop_state.elapsed, loop_state.batch = drawn
            plan.due(loop_state.elapsed).call(loop_state, stopwatch)
            if loop_state.stop_iteration or interruptible.requested:
                break
            drawn = plan.draw(loop_state, counting, interruptible.outermost)
        if interruptible.requested:
            for callback in callbacks:
                callback.save(loop_state)
        elif loop_state.elapsed is not start:
            # Where the data has ended, say, only now it is known that this was the last step.
            now = loop_state.elapsed = dataclasses.replace(loop_state.elapsed, is_last=True)
            _Due(entry.without(plan.newest.entries) for entry in entries if entry.when(now)).call(loop_state, stopwatch)
        _end_row(loop_state)
        for callback in callbacks:
            callback.finish(loop_state)
        _Due(entry for entry in entries if entry.when is on_end).call(loop_state, stopwatch)
    return loop_state.state, loop_state.history, loop_state.elapsed.without_previous()


def _history_for(tasks: Iterable[tuple[Any, Any]]) -> History:
    """A new history, beside the checkpoints that the loop goes on from."""
    for _, callbacks in tasks:
        for callback in callbacks if isinstance(callbacks, list | tuple) else [callbacks]:
            if isinstance(callback, _Checkpoint) and callback.resume:
                return History(callback.action.directory / "history.jsonl")
    return History()


def _keep_all(loop_state: LoopState, callbacks: Sequence["_Callback"], dataset: Any) -> Any:
    """Has checkpoints keep the whole of the loop, and goes on from one where a task asks for that.

    Returns the dataset, at its position.
    """
    if not any(callback.saves for callback in callbacks):
        return dataset
    source = PositionedIterator(dataset)
    part = _LoopPart(loop_state, callbacks, source)
    run = WholeRun(part, {}, {}, loop_state.history)
    run.source, loop_state._snapshot = source, run.snapshot
    for tool in [callback.of for callback in callbacks if isinstance(callback.of, _Checkpoint) and callback.of.resume]:
        directory = tool.action.directory
        checkpoints.clear_leftovers(directory)
        given = checks.adopt(loop_state.state)
        restored = checkpoints.restore_newest(directory, given)
        if restored is None:
            logging.info("No checkpoint found in %s", directory)
            loop_state.history.resume(loop_state.elapsed.steps)
            continue
        loop_state.state, step = restored
        resumed = run.load(directory, step, given)
        loop_state.elapsed = resumed.elapsed
        if resumed.position is not None:
            try:
                source.seek(resumed.position)
            except PositionUnknownError as error:
                logging.warning("%s The loop goes on with what the dataset gives now.", error)
        logging.info("Resumed at step %d from %s.", step, directory)
    return source


class _LoopPart:
    """What a checkpoint keeps of a loop and its callbacks."""

    steps_before = 0

    def __init__(self, loop_state: LoopState, callbacks: Sequence["_Callback"], source: PositionedIterator):
        self._loop_state, self._callbacks, self._source = loop_state, callbacks, source

    @property
    def batches_consumed(self) -> int:
        return self._source.count

    def state_dict(self) -> tuple[dict[str, Any], dict[str, Any]]:
        now = self._loop_state.elapsed
        kept = {str(index): callback.kept_state for index, callback in enumerate(self._callbacks)}
        return {
            "elapsed": now.to_dict(),
            "previous": (now.previous or now).to_dict(),
            "steps_in_loop": 0,
            "has_stopped": self._loop_state.stop_iteration,
            "metadata": encoding.encode(self._loop_state.metadata),
            "callbacks": [[each.kind, encoding.encode(each.state_dict())] for each in self._callbacks],
        }, {name: state for name, state in kept.items() if state is not None}

    def load_state_dict(self, state_dict: Mapping[str, Any], kept_states: Mapping[str, Any]) -> None:
        self._loop_state.metadata.update(encoding.decode(state_dict["metadata"]))
        self._loop_state.stop_iteration = state_dict["has_stopped"]
        if [callback.kind for callback in self._callbacks] != [kind for kind, _ in state_dict["callbacks"]]:
            logging.warning("The tasks are not those of the checkpoint: what they remember begins anew.")
            return
        for index, (callback, (_, kept)) in enumerate(zip(self._callbacks, state_dict["callbacks"], strict=True)):
            callback.load_state_dict(encoding.decode(kept))
            if str(index) in kept_states:
                callback.kept_state = kept_states[str(index)]

    def resume(self, elapsed: Elapsed) -> None:
        pass

    def batches_ahead(self, source: Any) -> int:
        return 0


def _steps_of(stop: Any, start: Elapsed) -> int | None:
    """How many steps a run shall come to, if its stop says so."""
    if isinstance(stop, Schedule):
        return stop.next_step(start) if getattr(stop, "unit", None) == "steps" else None
    return stop


def _end_row(loop_state: LoopState) -> None:
    """Puts what was reported in the history, for other callbacks to begin anew."""
    _commit(loop_state, loop_state._not_in_history())
    loop_state.logs = Logs()
    loop_state._in_history.clear()
    if loop_state.outputs:
        loop_state.history.add_outputs(loop_state.elapsed, loop_state.outputs)
        loop_state.outputs = {}


def _commit(loop_state: LoopState, logs: Mapping[str, Any]) -> None:
    """Makes a row of what the history does not have yet."""
    try:
        if logs:
            loop_state.history.commit(loop_state.elapsed, logs)
    except Exception as error:
        loop_state.logs = Logs()  # Once is enough.
        error.add_note(f"in the logs of step {loop_state.elapsed.steps}")
        raise


def _write(loop_state: LoopState) -> None:
    """Completes the file of the history, if it has one, up to here."""
    if loop_state.history.path is not None:
        _commit(loop_state, loop_state._not_in_history())
        loop_state._in_history = {path for path, _ in _entries(loop_state.logs)}
        loop_state.history.flush()


@contextlib.contextmanager
def _closing(callbacks: Sequence["_Callback"], loop_state: LoopState) -> Iterator[None]:
    """Closes the callbacks, however the loop ends. An error in that does not hide the one that ended the loop."""
    has_failed, errors = True, []
    try:
        yield
        has_failed = False
    finally:
        ends = [lambda: _end_row(loop_state), lambda: _write(loop_state), *(callback.close for callback in callbacks)]
        names = ["The last row", "The file of the history", *(callback.name for callback in callbacks)]
        for name, end in zip(names, ends, strict=True):
            try:
                end()
            except Exception as error:
                logging.exception("%s could not be finished.", name)
                errors.append(error)
        if errors and not has_failed:
            raise errors[0]


# Callbacks -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class _Entry:
    """An entry of the tasks."""

    when: Schedule | _Moment
    callbacks: Sequence["_Callback"]

    def without(self, called: Sequence["_Entry"]) -> "_Entry":
        """What is left to call of it at a step where some entries were called: actions know by themselves."""
        if self not in called:
            return self
        return _Entry(self.when, [each for each in self.callbacks if isinstance(each, _ActionCallback)])


class _Due:
    """Entries whose callbacks are to be called, in their order, checkpoints last."""

    def __init__(self, entries: Iterable[_Entry]):
        self.entries = list(entries)
        called = [each for entry in self.entries for each in entry.callbacks]
        self._callbacks = sorted(called, key=lambda callback: callback.saves)

    def call(self, loop_state: LoopState, stopwatch: timing.Stopwatch) -> None:
        for callback in self._callbacks:
            try:
                if callback.time_goes_to == "rest":  # As it does already.
                    callback(loop_state)
                else:
                    with stopwatch.counting(callback.time_goes_to):
                        callback(loop_state)
            except BaseException as error:
                callback.add_note(error, loop_state)
                raise

    def only_compiled(self, loop_state: LoopState) -> "_OnlyCompiled | None":
        """The only callback, if it is a compiled function that was called with a batch such as most are."""
        batch = loop_state.batch
        if len(self._callbacks) != 1 or type(batch) is not dict or isinstance(loop_state.state, tuple):
            return None
        plain = self._callbacks[0].plain_call()
        if plain is None or any(type(getattr(leaf, "shape", None)) is not tuple for leaf in batch.values()):
            return None
        like = [(name, leaf.shape, leaf.dtype) for name, leaf in batch.items()]
        return _OnlyCompiled(self._callbacks[0], plain, like, checks.num_examples(batch) or 1)


class _Plan:
    """Says which entries are due at a step; up to the next where others than those of each step can be, it asks none.

    Where these are a single compiled function, the steps in between are taken here: its dispatch may take no longer
    than a few calls in Python.
    """

    def __init__(self, entries: Sequence[_Entry]):
        pairs = [(entry, entry.when) for entry in entries if isinstance(entry.when, Schedule)]
        self._entries = [entry for entry, _ in pairs]
        self._others = [when for _, when in pairs if not is_always(when)]
        self._each_step = _Due(entry for entry, when in pairs if is_always(when))
        self._next_step = 0  # From which on others can be due.
        self.newest = _Due(())

    def due(self, now: Elapsed) -> _Due:
        """What is due now; it is also in `newest`, until the next step."""
        if now.steps < self._next_step and not now.is_last:
            self.newest = self._each_step
            return self.newest
        self.newest = due = _Due(entry for entry in self._entries if entry.when(now))
        can_be_any_time = any(when.next_time(now) is not None for when in self._others)
        next_step = now.steps + 1 if can_be_any_time else earliest(when.next_step(now) for when in self._others)
        self._next_step = sys.maxsize if next_step is None else next_step
        return due

    def draw(
        self, loop_state: LoopState, counting: Counting, interruptible: interrupt.Interruptible
    ) -> tuple[Elapsed, Any] | None:
        """Takes the steps at which nothing but one compiled function is called, and draws the batch after them.

        None where the run is over, or a signal has come. The row of the last step is left to be ended.
        """
        known = self._each_step.only_compiled(loop_state)
        while known is not None and interruptible.signum is None:
            room = min(self._next_step - 1 - counting.newest.steps, counting.room(), CHUNK_SIZE)
            if room < 1:
                break
            before = loop_state.elapsed
            drawn, goes_on = _take_some(known, loop_state, counting, interruptible, room)
            if loop_state.elapsed is not before:
                self.newest = self._each_step
            if not goes_on:
                return drawn
        return None if interruptible.signum is not None else counting.draw()


@dataclasses.dataclass(frozen=True)
class _OnlyCompiled:
    """The one callback of a step, a compiled function, and what the batches look like that it has been called with."""

    callback: "_Callback"
    plain: PlainCall
    like: list[tuple[str, Any, Any]]
    samples: int


def _take_some(
    known: _OnlyCompiled,
    loop_state: LoopState,
    counting: Counting,
    interruptible: interrupt.Interruptible,
    room: int,
) -> tuple[tuple[Elapsed, Any] | None, bool]:
    """Calls a compiled function for up to `room` batches, and then makes the rows of what it has reported.

    Returns:
      A batch that was drawn, and is not like those before, or with which the call fails: to be taken with all that
      belongs to it. And whether there is none, and more steps can be taken here.
    """
    call, like = known.plain.call, known.like
    draw, clock, state = counting.iterator.__next__, counting.stopwatch.clock, loop_state.state
    reported: list[Any] = []
    came_at: list[float] = []
    in_data, came, batch, error, is_ahead = 0.0, 0.0, loop_state.batch, None, False
    try:
        with known.plain.taking(state):
            for _ in range(room):
                began = clock()
                batch = draw()
                came, is_ahead = clock(), True
                in_data += came - began
                if [(name, leaf.shape, leaf.dtype) for name, leaf in batch.items()] != like:
                    break
                logs, state = call(state, batch)
                reported.append(logs)
                came_at.append(came)
                is_ahead = False
                if interruptible.signum is not None:
                    break
    except BaseException as raised:
        error = raised
    counting.stopwatch.move(in_data, "data")
    loop_state.state, loop_state.batch = state, batch
    if reported:
        known.plain.remember(state)
        _end_row(loop_state)
        *others, newest = zip(counting.count_all(known.samples, came_at), reported, strict=True)
        for loop_state.elapsed, logs in others:
            _commit(loop_state, logs)
        loop_state.elapsed, logs = newest
        loop_state.logs.merge(logs)
    if error is not None and not is_ahead:
        return counting.end_by(error), False
    if is_ahead:
        drawn = counting.count(checks.num_examples(batch) or 1, came), batch
        if error is not None and not (isinstance(error, Exception) and checks.is_alive(state)):
            _end_row(loop_state)
            loop_state.elapsed = drawn[0]
            known.callback.add_note(error, loop_state)
            raise error
        return drawn, False
    return None, True


def _compile(tasks: Tasks, loop_state: LoopState) -> list[_Entry]:
    """The entries of the tasks, checked. A callback that stands in several places is one."""
    entries, known, reporters = [], {}, []
    for when, callbacks in _pairs(tasks):
        callbacks = callbacks if isinstance(callbacks, list | tuple) else [callbacks]
        for callback in callbacks:
            if id(callback) not in known:
                known[id(callback)] = _as_callback(callback, loop_state, reporters)
        entry = _Entry(when, [known[id(callback)] for callback in callbacks])
        entries.append(entry)
        if isinstance(when, Schedule):
            reporters += [each for each in entry.callbacks if not isinstance(each, _ActionCallback)]
    return entries


def _pairs(tasks: Tasks) -> Iterator[tuple[Schedule | _Moment, Any]]:
    if not isinstance(tasks, Iterable) or isinstance(tasks, str):
        raise TypeError(f"{_WHAT_TASKS_ARE}, got {name_of(tasks)}. Write {{every(1): {name_of(tasks)}}}.")
    for pair in tasks.items() if isinstance(tasks, Mapping) else tasks:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise TypeError(f"{_WHAT_TASKS_ARE}, got {pair!r} in the place of a pair.")
        when, callbacks = pair
        if not isinstance(when, Schedule | _Moment):
            raise TypeError(f"{_WHAT_TASKS_ARE}, got {when!r} in the place of a schedule.")
        yield when, callbacks


_WHAT_TASKS_ARE = "Tasks are {schedule: callbacks}, or pairs (schedule, callbacks), such as {every(100): [save]}"


def _as_callback(callback: Callback, loop_state: LoopState, reporters: Sequence["_Callback"]) -> "_Callback":
    if isinstance(callback, _Tool):
        return _ActionCallback(callback, callback.action, callback.monitor, loop_state, reporters)
    if isinstance(callback, Action) or is_periodic(callback):
        action = callback if isinstance(callback, Action) else PeriodicAction(callback)
        return _ActionCallback(callback, action, None, loop_state, reporters)
    if isinstance(callback, Step):
        return _StepCallback(callback)
    if isinstance(callback, Loop):
        return _LoopCallback(callback)
    if inspect.isclass(callback) or not (callable(callback) or hasattr(callback, "__loop_callback__")):
        raise TypeError(
            f"A callback is a function of up to four of ({', '.join(_ARGUMENTS)}), an object with __loop_callback__, a "
            f"Step, an Action or a Loop, got {callback!r}."
        )
    return _ObjectCallback(callback) if hasattr(callback, "__loop_callback__") else _FunctionCallback(callback)


class _Callback(abc.ABC):
    """A callback of any kind, called with the loop state alone."""

    def __init__(self, of: Callback):
        self.of = of
        self.name = name_of(of)
        self.time_goes_to = getattr(of, "time_goes_to", "rest")
        self.was_called = self.has_reported = self._reports_state = False
        self.saves = False
        self.kept_state: Any = None

    @abc.abstractmethod
    def report(self, loop_state: LoopState) -> tuple[Any, Any, Any]:
        """Calls it; returns `(outputs, logs, state)`, with None for what it leaves alone."""

    def __call__(self, loop_state: LoopState) -> None:
        outputs, reported, state = self.report(loop_state)
        self.was_called = True
        if reported and "updates" in reported:
            reported = {name: value for name, value in reported.items() if name != "updates"}
        if not self.has_reported and not (outputs is None and reported is None):
            self._check_report(loop_state, outputs, reported, state)
        if self._reports_state:
            outputs, reported = jax.tree.map(_copied, (outputs, reported))
        if outputs is not None:
            loop_state.outputs.update(outputs if isinstance(outputs, Mapping) else {self.name: outputs})
        if reported:
            loop_state.logs.merge(reported)
        if state is not None:
            loop_state.state = state

    def add_note(self, error: BaseException, loop_state: LoopState) -> None:
        """Notes with an error that it comes from here."""
        error.add_note(f"in the callback {self.name}, at step {loop_state.elapsed.steps}")

    def plain_call(self) -> PlainCall | None:
        """What it calls, if that is no more than a compiled function."""
        return None

    @property
    def _reports_alone(self) -> bool:
        """Whether there is no more to do with what it reports than to log it."""
        return self.has_reported and not self._reports_state

    def _check_report(self, loop_state: LoopState, outputs: Any, reported: Any, state: Any) -> None:
        """Looks closely at what it reports for the first time."""
        self.has_reported = bool(reported)
        if reported:
            History().commit(loop_state.elapsed, reported)  # Raises here, where the callback is known.
        # A later step may take the leaves of a state over (donate them).
        leaves = {id(leaf) for leaf in jax.tree.leaves((loop_state.state, state)) if isinstance(leaf, jax.Array)}
        self._reports_state |= any(id(leaf) in leaves for leaf in jax.tree.leaves((outputs, reported)))

    @property
    def kind(self) -> str:
        """What it is, the same in each process."""
        return type(self.of).__qualname__

    def state_dict(self) -> dict[str, Any]:
        """What it remembers from call to call, for `load_state_dict`."""
        return self.of.state_dict() if hasattr(self.of, "__loop_callback__") and hasattr(self.of, "state_dict") else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        if state_dict:
            self.of.load_state_dict(state_dict)

    def save(self, loop_state: LoopState) -> None:  # noqa: B027 (to override, or not)
        """Saves the loop, if that is what it does, though its schedule has not come."""

    def finish(self, loop_state: LoopState) -> None:  # noqa: B027 (to override, or not)
        """Called when the loop has ended well; may set the state that it shall return."""

    def close(self) -> None:  # noqa: B027 (to override, or not)
        """Finishes what was begun."""


class _FunctionCallback(_Callback):
    def __init__(self, of: Callable[..., Any]):
        super().__init__(of)
        self._num_arguments = _num_arguments(of)
        self._returns_pair = False

    def report(self, loop_state: LoopState) -> tuple[Any, Any, Any]:
        if self._num_arguments == 2:  # As most.
            result = self.of(loop_state.state, loop_state.batch)
        else:
            result = self.of(*_arguments(loop_state, self._num_arguments))
        outputs, logs, state = outputs_logs_and_state(result, self.name, loop_state.state)
        self._returns_pair = type(result) is tuple and outputs is None and bool(logs) and state is not None
        self._returns_pair &= "updates" not in (logs or {})
        return outputs, logs, state

    def plain_call(self) -> PlainCall | None:
        # A function in Python could look at anything.
        is_compiled = isinstance(self.of, jax.stages.Wrapped) and self._num_arguments == 2 and self._returns_pair
        is_plain = is_compiled and self._reports_alone
        return PlainCall(self.of, contextlib.nullcontext, lambda state: None) if is_plain else None


class _ObjectCallback(_Callback):
    def report(self, loop_state: LoopState) -> tuple[Any, Any, Any]:
        return outputs_logs_and_state(self.of.__loop_callback__(loop_state), self.name, loop_state.state)

    def plain_call(self) -> PlainCall | None:
        return self.of.plain_call() if self._reports_alone and isinstance(self.of, CompiledFunction) else None


class _StepCallback(_Callback):
    def report(self, loop_state: LoopState) -> tuple[Any, Any, Any]:
        now = loop_state.elapsed
        state, values = self.of.step(loop_state.state, loop_state.batch, now.steps - 1, elapsed=now)
        return *_outputs_and_logs(values), state


class _LoopCallback(_Callback):
    def report(self, loop_state: LoopState) -> tuple[Any, Any, Any]:
        state, outputs = self.of(loop_state.state, [loop_state.batch], num_steps=1)
        if outputs.pop(types.STOP_LOOP, False):
            loop_state.stop_iteration = True
        # The statistics of one batch say nothing.
        values = {name: value for name, value in metrics.summarize(outputs).items() if not name.startswith("jaxloop/")}
        return *_outputs_and_logs(values), state


class _ActionCallback(_Callback):
    """Calls an action with what was logged since its last call, at most once at each step."""

    def __init__(
        self,
        of: Callback,
        action: Action,
        monitor: str | None,
        loop_state: LoopState,
        reporters: Sequence[_Callback],
    ):
        super().__init__(of)
        if not isinstance(action.interval, Schedule) and action.interval != 1:
            raise ValueError(
                f"{action!r} counts train loops, of which there are none here. Leave its interval out: the schedule "
                "under which it stands says when it is called."
            )
        self.time_goes_to = action.time_goes_to
        self.saves = action.time_goes_to == "checkpoints"
        self._action, self._monitor, self._reporters = action, monitor, reporters
        self._was_measured = self._has_warned = False
        self._newest = _NewestReady()
        self._called_at: int | None = None
        # Up to where it has seen the history: the next row, and what it has seen of that one already.
        self._next_row, self._names_seen = len(loop_state.history), set[str]()
        self._before = loop_state.elapsed

    def report(self, loop_state: LoopState) -> tuple[None, None, None]:
        action, now = self._action, loop_state.elapsed
        if not action.waits_for_outputs:
            self._newest.push(loop_state.logs)
        is_due = not isinstance(action.interval, Schedule) or action.interval(now)
        if is_due and self._called_at != now.steps:
            self._call_action(loop_state)
        return None, None, None

    @property
    def kept_state(self) -> Any:
        return self._action.kept_state

    @kept_state.setter
    def kept_state(self, state: Any) -> None:
        if state is not None:
            self._action.kept_state = state

    def state_dict(self) -> dict[str, Any]:
        return {
            "action": dict(self._action.state_dict()),
            "called_at": self._called_at,
            "next_row": self._next_row,
            "names_seen": sorted(self._names_seen),
            "before": self._before.to_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._action.load_state_dict(state_dict["action"])
        self._called_at, self._next_row = state_dict["called_at"], state_dict["next_row"]
        self._names_seen, self._before = set(state_dict["names_seen"]), Elapsed(**state_dict["before"])

    def save(self, loop_state: LoopState) -> None:
        if self.saves and self._called_at != loop_state.elapsed.steps:
            self._call_action(loop_state)

    def _call_action(self, loop_state: LoopState) -> None:
        action, now = self._action, loop_state.elapsed
        self._called_at = now.steps
        if self.saves:  # What was logged up to a checkpoint is part of it.
            _write(loop_state)
        outputs, history = self._outputs(loop_state), loop_state.history if action.waits_for_outputs else None
        if not self._is_measured(loop_state):
            outputs, history = metrics.LoopOutputs(), None
        context = {"history": history, "total_steps": loop_state.total_steps, "snapshot": loop_state._snapshot}
        action(loop_state.state, outputs, step_num=now.steps, elapsed=now, **context)
        if outputs.get(types.STOP_LOOP):
            loop_state.stop_iteration = True

    def _outputs(self, loop_state: LoopState) -> metrics.LoopOutputs:
        if not self._action.uses_outputs:
            return metrics.LoopOutputs()
        if not self._action.waits_for_outputs:
            return metrics.LoopOutputs(self._newest.scalars())
        history = loop_state.history
        rows: list[tuple[Elapsed, Any]] = [history[index] for index in range(self._next_row, len(history))]
        if coming := loop_state._not_in_history():
            rows.append((loop_state.elapsed, metrics.fetch(coming)))
        names_seen, self._names_seen, self._next_row = self._names_seen, set(_named(coming)), len(history)
        outputs = metrics.LoopOutputs()
        for elapsed, logs in rows:
            if elapsed.steps != self._before.steps:  # Else it is the rest of a row.
                outputs.num_examples.append(_num_examples(elapsed, self._before))
                self._before = elapsed.without_previous()
            for name, value in _named(logs).items():
                if name not in names_seen:
                    outputs.setdefault(name, []).append(value)
            names_seen = set()
        if self._monitor is None:
            outputs.update({name: [value] for name, value in metrics.fetch(loop_state.outputs).items()})
        return outputs

    def _is_measured(self, loop_state: LoopState) -> bool:
        """Whether what it monitors was measured so far. Raises if it can't come any more."""
        if self._was_measured or self._monitor is None:
            return True
        paths = [*loop_state.history.paths(), *dict(_entries(loop_state.logs))]
        end = "." + self._monitor.replace("/", ".").removeprefix("train.")
        self._was_measured = any(f".{path.replace('/', '.')}".endswith(end) for path in paths)
        if self._was_measured or not paths or not all(each.was_called for each in self._reporters):
            return self._was_measured
        there = ", ".join(sorted({path.replace(".", "/") for path in paths}))
        text = f"Nothing named {self._monitor!r} was logged. There is: {there}."
        if all(each.has_reported for each in self._reporters):
            raise ValueError(f"{text} Give the name of one of them to {self.name}.")
        if not self._has_warned:
            self._has_warned = True
            logging.warning("%s %s goes on waiting for it.", text, self.name)
        return False

    def finish(self, loop_state: LoopState) -> None:
        if isinstance(self.of, _Bar) and self._called_at not in (None, loop_state.elapsed.steps):
            self._call_action(loop_state)  # After Ctrl-C it shall show how far the loop came.
        loop_state.state = self._action.finish(loop_state.state)

    def close(self) -> None:
        self._action.close()


class _NewestReady:
    """The newest logged values that are there already."""

    def __init__(self):
        # So many steps may be under way; of those before, the newest of each collection.
        self._recent: collections.deque[Mapping[str, Any]] = collections.deque(maxlen=64)
        self._before = Logs()

    def push(self, logs: Mapping[str, Any]) -> None:
        """Takes in the logs of the next step; more may be added to them until the one after."""
        if self._recent:
            self._before.update(self._recent[-1])
        self._recent.append(logs)

    def scalars(self) -> dict[str, Any]:
        found: dict[str, dict[str, Any]] = {}
        for logs in (*reversed(self._recent), self._before):
            for collection in logs.keys() - found.keys():
                ready = metrics.ready_scalars(_named({collection: logs[collection]}))
                if ready:
                    found[collection] = ready
        # As in `_named`, a metric of the name of a loss is the one that is meant.
        return {**found.pop("losses", {}), **{name: value for each in found.values() for name, value in each.items()}}


_ARGUMENTS = ("state", "batch", "elapsed", "loop_state")


def _arguments(loop_state: LoopState, count: int) -> tuple[Any, ...]:
    return (loop_state.state, loop_state.batch, loop_state.elapsed, loop_state)[:count]


def _num_arguments(callback: Callable[..., Any]) -> int:
    """How many arguments a callback takes; raises a `TypeError` that names it where it takes others than there are."""
    names, _ = positional_arguments(callback)
    takes = f"The callback {name_of(callback)} takes ({', '.join(names)}), and callbacks get up to four arguments by "
    takes += f"position, ({', '.join(_ARGUMENTS)})."
    if len(names) > len(_ARGUMENTS):
        raise TypeError(f"{takes} Bind the others: functools.partial(...), or a default value.")
    if any(name in _ARGUMENTS and name != _ARGUMENTS[index] for index, name in enumerate(names)):
        count = max(_ARGUMENTS.index(name) for name in names if name in _ARGUMENTS) + 1
        raise TypeError(f"{takes} Write ({', '.join(_ARGUMENTS[:count])}).")
    return len(names)


def _outputs_and_logs(values: types.Output) -> tuple[dict[str, Any] | None, Logs]:
    """What a `Step` or a `Loop` reports: scalars as metrics, all else as outputs."""
    reported, outputs = Logs(), {}
    for name, value in (values or {}).items():
        is_scalar = isinstance(value, types.MetricWithMetadata) and value.type is types.MetricType.SCALAR
        value = value.value if is_scalar else value
        if _is_number(value):
            reported.add_metric(name, value)
        elif isinstance(value, Mapping) and all(_is_number(each) for _, each in _entries(value)):
            reported.merge({name: value})
        else:
            outputs[name] = value
    return outputs or None, reported


def _is_number(value: Any) -> bool:
    if isinstance(value, bool | int | float):
        return True
    is_numeric = lambda dtype: jnp.issubdtype(dtype, np.number) or jnp.issubdtype(dtype, np.bool_)
    return isinstance(value, np.generic | np.ndarray | jax.Array) and value.ndim == 0 and is_numeric(value.dtype)


def _copied(leaf: Any) -> Any:
    return jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf


# Tools -----------------------------------------------------------------------------------------------


class _Tool:
    """An action as a callback: in tasks, there by `**tool` at every step, and called by hand in a loop of your own.

    Attributes:
      action: the action.
      monitor: the logged value that it watches, if any.
    """

    def __init__(self, text: str, action: Action, monitor: str | None = None):
        self._text, self.action, self.monitor = text, action, monitor
        self._key = always()

    def __repr__(self) -> str:
        return self._text

    def keys(self) -> list[Schedule]:
        """With `__getitem__`, what `{**tool}` takes."""
        return [self._key]

    def __getitem__(self, key: Schedule) -> list[Self]:
        if key is not self._key:
            raise KeyError(key)
        return [self]

    def finish(self, state: Any) -> Any:
        """Returns the state to go on with when the run is over. A `loop` does so by itself, and so all that follows."""
        return self.action.finish(state)

    def close(self) -> None:
        """Finishes what was begun."""
        self.action.close()

    def _call_action(self, elapsed: Elapsed, state: Any, logs: Mapping[str, Any] | None) -> metrics.LoopOutputs:
        outputs = metrics.LoopOutputs({name: [value] for name, value in metrics.fetch(_named(logs or {})).items()})
        self.action(state, outputs, step_num=elapsed.steps, elapsed=elapsed, history=None)
        return outputs


class _Checkpoint(_Tool):
    action: CheckpointAction

    def __init__(self, text: str, action: CheckpointAction, monitor: str | None, resume: bool):
        super().__init__(text, action, monitor)
        self.resume = resume

    def __call__(self, elapsed: Elapsed, state: Any, logs: Mapping[str, Any] | None = None) -> None:
        """Saves the state of this step, and waits until it is on disk."""
        self._call_action(elapsed, state, logs)
        self.action.flush()

    def restore(self, state: Any, step: int | None = None) -> tuple[Any, Elapsed]:
        """Reads what was saved last, or at a step: the state, laid out like `state`, and how far the run was.

        Both go back into `loop(state, ..., elapsed=elapsed)`, with a dataset that goes on after `elapsed.steps`
        batches. Without a checkpoint, the state comes back as it is, with `Elapsed()`.

        Raises:
          FileNotFoundError: there are checkpoints, but none of `step`.
          ValueError: the checkpoint is of another state; the error lists the leaves that differ.
        """
        directory = self.action.directory
        if step is not None:
            state = checkpoints.restore(directory, step, checks.adopt(state))
        elif restored := checkpoints.restore_newest(directory, checks.adopt(state)):
            state, step = restored
        else:
            logging.info("No checkpoint found in %s", directory)
            return state, Elapsed()
        noted = checkpoints.metadata(directory, step)
        return state, Elapsed(**noted["elapsed"]) if "elapsed" in noted else Elapsed(step)


def checkpoint(
    directory: epath.PathLike,
    keep: int | None = 1,
    monitor: str | None = None,
    mode: str = "min",
    resume: bool = False,
) -> _Checkpoint:
    """Saves the state under its step; by hand, `checkpoint(elapsed, state, logs)`.

    In a `loop` it saves the whole of it, asynchronously, after all other callbacks of the step; the loop's end waits
    for what is under way. `checkpoint(directory).restore` reads the state again.

    Args:
      directory: with one subdirectory a step; may be relative.
      keep: how many of the newest to keep; None for all.
      monitor: a logged value by which the best one is kept beside them; it must be logged at the steps that are saved.
      mode: whether the best is the "min" or the "max".
      resume: whether a `loop` goes on from the newest checkpoint, see there. Its history, unless one is given, is
        written to `history.jsonl` in the directory.
    """
    action = CheckpointAction(directory, keep=keep, best=None if monitor is None else (monitor, mode))
    return _Checkpoint(f"checkpoint({str(directory)!r})", action, monitor, resume)


class _EarlyStopping(_Tool):
    def __call__(self, elapsed: Elapsed, state: Any, logs: Mapping[str, Any]) -> bool:
        """Whether to stop. Then `finish(state)` gives the best state, with `restore_best`."""
        return bool(self._call_action(elapsed, state, logs).get(types.STOP_LOOP, False))


def early_stopping(
    monitor: str,
    patience: int | Schedule,
    mode: str = "auto",
    min_delta: float = 0.0,
    baseline: float | None = None,
    restore_best: bool = False,
) -> _EarlyStopping:
    """Ends the loop when a logged value no longer improves; by hand, `if early_stopping(elapsed, state, logs): break`.

    Reading the value waits for the devices. The arguments are those of `EarlyStoppingAction`: patience counts the
    calls at which the value was logged, or is a period such as `after(steps=1000)`.
    """
    action = EarlyStoppingAction(monitor, patience, mode, min_delta, baseline, restore_best)
    return _EarlyStopping(f"early_stopping({monitor!r})", action, monitor)


class _Bar(_Tool):
    def __init__(self, text: str, action: Action):
        super().__init__(text, action)
        self._newest = _NewestReady()

    def __call__(self, elapsed: Elapsed, logs: Mapping[str, Any] | None = None) -> None:
        """Shows this step, now and then, and the newest values that are there already."""
        self._newest.push(logs or {})
        if isinstance(self.action.interval, Schedule) and self.action.interval(elapsed):
            outputs = metrics.LoopOutputs(self._newest.scalars())
            self.action(None, outputs, step_num=elapsed.steps, elapsed=elapsed, history=None)


def keras_bar(total: int | None = None, **options: Any) -> _Bar:
    """A bar as Keras draws it: `4650/10000 [============>.................] - ETA: 8s - accuracy: 0.9779`.

    By hand, `keras_bar(elapsed, logs)`, and `keras_bar.close()` at the end. It shows the newest values that are there,
    and never waits for the devices.

    Args:
      total: steps of the run; None for what the loop's `stop` says.
      **options: of `ProgressAction`.
    """
    return _Bar("keras_bar()", ProgressAction(total, bar="keras", **options))


def tqdm_bar(total: int | None = None, **options: Any) -> _Bar:
    """A bar of tqdm; else as `keras_bar`."""
    return _Bar("tqdm_bar()", ProgressAction(total, bar="tqdm", **options))


class _InnerLoop:
    time_goes_to = "evals"

    def __init__(self, name: str, run: Callable[..., Any], aggregation: str | Callable[[list[Any]], Any]):
        self.name, self._run, self._aggregation = name, run, aggregation
        self._num_arguments = _num_arguments(run)

    def __repr__(self) -> str:
        return f"inner_loop({self.name!r})"

    def __loop_callback__(self, loop_state: LoopState) -> tuple[Logs | None, None]:
        with interrupt.Interruptible() as interruptible:
            result = self._run(*_arguments(loop_state, self._num_arguments))
            if interruptible.requested:
                return None, None  # Part of an evaluation is none.
        if not isinstance(result, tuple) or len(result) != 3 or not isinstance(result[1], History):
            raise TypeError(f"{self!r} must return (state, history, elapsed), as jf.loop does, got {result!r}.")
        if not checks.is_alive(loop_state.state):
            raise ValueError(
                f"{self!r} has taken over (donated) the state of the loop around it, which can't go on. Evaluate with "
                "jf.step or an EvalLoop, which leave the state alone, or give the inner loop a copy: "
                "jax.tree.map(jnp.copy, state)."
            )
        return Logs({self.name: Logs(_named(_aggregate(result[1], self._aggregation)))}), None


def inner_loop(
    name: str,
    run: Callable[..., tuple[Any, History, Elapsed]],
    aggregation: str | Callable[[list[Any]], Any] = "mean",
) -> _InnerLoop:
    """Evaluation inside training: a callback that runs another loop, and reports what it comes to under a name.

    `{every(1000): inner_loop("test", lambda state: loop(state, test_data, {every(1): test_step}))}` logs `test.loss`.
    An evaluation that Ctrl-C has cut short reports nothing.

    Args:
      name: the collection of the reported values.
      run: takes what a callback takes, and returns what `loop` returns. The state that it returns is left alone.
      aggregation: "mean", weighted by examples, "sum", "min", "max", "last", or a function of the list of values.
    """
    if aggregation != "mean" and aggregation not in _REDUCTIONS and not callable(aggregation):
        raise ValueError(
            f"aggregation must be one of mean, {', '.join(_REDUCTIONS)} or a function, got {aggregation!r}."
        )
    return _InnerLoop(name, run, aggregation)


# Compiled functions ----------------------------------------------------------------------------------


class _CompiledStep(CompiledFunction):
    def __loop_callback__(self, loop_state: LoopState) -> tuple[Any, Any, Any]:
        return self.call(loop_state.state, loop_state.batch, None, None)


def step(
    fn: Callable[..., Any] | None = None, partitioner: partition.Partitioner | None = None, *, donate: bool = False
) -> Any:
    """Makes a callback of a pure function `fn(state, batch, [broadcasts, statics])`, as a decorator or by hand.

    It is compiled, and sharded by the partitioner: the batch is split, or replicated if its rows do not divide over the
    devices; broadcasts are replicated, statics are hashable and compiled in. It returns what a callback returns. In a
    `loop`, broadcasts and statics are None: to give them, call it in a callback.

    `{every(1): lambda state, batch: test_step(state, batch, broadcasts=teacher)}`

    Args:
      fn: the function.
      partitioner: where the state and the batches live; None for one device.
      donate: whether the state is taken over, so that its memory serves for the new one.
    """
    if fn is None:
        return functools.partial(step, partitioner=partitioner, donate=donate)
    return _CompiledStep(fn, partitioner, donate=donate)


def train_step(fn: Callable[..., Any] | None = None, partitioner: partition.Partitioner | None = None) -> Any:
    """As `step`, and takes the gradient of the sum of the losses that `fn` logged by `add_loss`, and updates the state.

    The state is a `TrainState`, and is taken over (donated). What the forward pass changed is taken over too, where
    `fn` returns it in a state, or adds it to the logs' `updates`: `logs.add("updates", "batch_stats", batch_stats)`,
    and for an NNX model all that changed, under any name. The rows of a batch must divide over the devices.

    >>> import jax.numpy as jnp
    >>> from jaxloop import examples
    >>> _, state, batches = examples.tiny_regression()
    >>> @train_step
    ... def regression(state, batch):
    ...     loss = jnp.mean((state.apply_fn({"params": state.params}, batch["x"]) - batch["y"]) ** 2)
    ...     return Logs().add_loss("loss", loss)
    >>> logs, state = regression(state, batches[0])
    >>> int(state.step), sorted(logs.losses)
    (1, ['loss'])
    """
    if fn is None:
        return functools.partial(train_step, partitioner=partitioner)
    return _CompiledStep(fn, partitioner, train=True, donate=True)
