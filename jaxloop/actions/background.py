"""Summaries written by a thread, for a loop not to wait for files."""

import atexit
import bisect
import copy
import dataclasses
import functools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, final

import numpy as np
from absl import logging

from jaxloop import distributed, encoding
from jaxloop.text import printable

MOST_PENDING = 64
"""How many calls may wait for a thread. Whoever has more waits."""

_IDLE_SECS = 1.0
"""How long a thread waits for more before it ends. The next call begins another."""

_PAUSE_SECS = 0.1
"""How long a thread lets calls come together, unless somebody waits for them: to wake it up costs the loop more than a
call does."""

_METHODS = frozenset(
    f"write_{what}" for what in ("scalars", "texts", "images", "videos", "audios", "histograms", "summaries", "hparams")
) | {"flush", "resume"}
"""What may be called of a writer: a checkpoint that names something else is not to be followed."""

_UNWRITTEN, _POSITION = "unwritten", "position"
"""The keys in an action's state of what could not be written, and of how far the writer's file goes."""


@final
class Call(NamedTuple):
    """A call of a writer's method: `write_scalars` with values by name, `flush` with none, `resume` with a position."""

    method: str
    values: Mapping[str, Any]
    options: Mapping[str, Any]


def writer_of(writer: Any, background: bool = True) -> "BackgroundWriter | DirectWriter":
    """What calls the methods of a writer for actions.

    Args:
      writer: any object with the methods of `clu.metric_writers.MetricWriter`.
      background: whether a thread calls them, one for all actions with this writer. clu's `AsyncWriter`, which has a
        thread itself, is called at once in any case.
    """
    if not background or any(each.__module__ == "clu.metric_writers.async_writer" for each in type(writer).__mro__):
        return DirectWriter(writer)
    return BackgroundWriter.of(writer)


@dataclasses.dataclass(eq=False)
class _Write:
    """A call that is to be made.

    Attributes:
      number: its place among all calls of the writer.
      action: who asked for it.
      step: of which step it tells.
      is_in_checkpoint: whether a checkpoint of this process has it, so that a later process will make it.
    """

    number: int
    action: Any
    step: int
    call: Call
    is_in_checkpoint: bool = False

    def carry_out(self, writer: Any) -> None:
        method, values, options = self.call
        arguments = (self.step, values) if values else ()
        try:
            if method == "resume":
                _resume(writer, self.step, options["position"])
            else:
                getattr(writer, method)(*arguments, **options)
        except BaseException as error:
            names = f" of {', '.join(map(printable, values))}" if values else ""
            error.add_note(f"in {self.action!r}, after step {self.step}: {method}{names}")
            raise


@final
class DirectWriter:
    """Calls the methods of a writer at once. See `BackgroundWriter` for what its own methods are."""

    def __init__(self, writer: Any):
        self._writer = writer
        self._beginning = _Beginning()
        self._is_flushed = True
        self._error: Exception | None = None  # Of a flush before a checkpoint, to be raised.

    def put(self, action: Any, step: int, calls: Sequence[Call], *, waits: bool = False) -> None:
        self._raise_error()
        self._beginning.is_over, self._is_flushed = True, False
        for call in calls if distributed.is_first_process() else ():
            _Write(0, action, step, call).carry_out(self._writer)

    def flush(self) -> None:
        self._writer.flush()
        self._is_flushed = True
        self._raise_error()

    def state_dict(self, action: Any) -> dict[str, Any]:
        try:
            if not self._is_flushed and distributed.is_first_process():
                self.flush()
        except Exception as error:  # It shall not keep the run from being saved.
            error.add_note(f"in {action!r}, which was flushed before a checkpoint")
            self._error = error
        return _position_of(self._writer)

    def load_state_dict(self, action: Any, state_dict: Mapping[str, Any]) -> None:
        self._beginning.load(state_dict)
        for write in _writes_in(action, state_dict) if distributed.is_first_process() else ():
            write.carry_out(self._writer)  # Of a run that had a thread.

    def begin_run(self, action: Any, step: int) -> None:
        if distributed.is_first_process():
            for call in self._beginning.calls():
                _Write(0, action, step, call).carry_out(self._writer)

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error


@final
class BackgroundWriter:
    """Calls the methods of a writer in a thread, in the order in which actions ask for it.

    >>> import types
    >>> writer = types.SimpleNamespace(write_scalars=lambda step, values: print(step, values), flush=lambda: None)
    >>> in_background = BackgroundWriter.of(writer)
    >>> in_background.put("an action", 10, [Call("write_scalars", {"loss": 0.5}, {})])
    >>> in_background.flush()
    10 {'loss': 0.5}

    No row is lost or written twice where a call raises: that call and those behind it are kept, in their order, and the
    thread ends. The error is raised where an action next asks for something, or flushes. The time after that they are
    tried again. A checkpoint that is saved in between has them, and a run that goes on from there makes them first.

    Of a job's processes the first alone calls anything.

    Calls that come within a tenth of a second are made together: who kills a process may lose as much, where no
    checkpoint tells of it. The thread is a daemon that ends with `flush`, and when nothing has come for a second. A
    program that ends makes all calls before; one that was forked from it makes none of them.
    """

    # By the ids of the writers, which these objects keep alive: not every writer can be hashed, or weakly referred to.
    _all: ClassVar[weakref.WeakValueDictionary[int, "BackgroundWriter"]] = weakref.WeakValueDictionary()

    @classmethod
    def of(cls, writer: Any) -> "BackgroundWriter":
        """The one of a writer, the same for all who ask."""
        found = cls._all.get(id(writer))
        return cls._all.setdefault(id(writer), cls(writer)) if found is None else found

    def __init__(self, writer: Any):
        self._writer = writer
        self._changed = threading.Condition()
        self._pending: list[_Write] = []
        self._count = 0  # The number of the last call.
        self._thread: threading.Thread | None = None
        self._is_working = False  # Whether the thread will make what is pending.
        self._ends = False  # Whether it ends once nothing is.
        self._pauses = False  # Whether it lets calls come together.
        self._waiting = 0  # How many wait for it.
        self._error: BaseException | None = None  # To be raised.
        self._is_halted = False  # After an error, until an action asks for more.
        self._is_flushed, self._newest_step = True, 0
        self._beginning = _Beginning()
        self._process = os.getpid()
        # Registered after what the writer itself may have, and so called before: it is still open then.
        at_exit = functools.partial(_finish, weakref.ref(self))
        atexit.register(at_exit)
        weakref.finalize(self, atexit.unregister, at_exit).atexit = False

    def put(self, action: Any, step: int, calls: Sequence[Call], *, waits: bool = False) -> None:
        """Has calls made after those before, all or none of them. Waits while there is no room.

        Args:
          action: who asks.
          step: of which step they tell.
          calls: the calls. Their values are copied.
          waits: until they are made. An error in them is raised the next time nevertheless, as they are kept.

        Raises:
          BaseException: that of an earlier call.
        """
        if not distributed.is_first_process():
            return
        copies = [call._replace(values={name: _copy(value) for name, value in call.values.items()}) for call in calls]
        with self._changed:
            self._raise_error()
            self._is_halted = False
            self._begin()
            has_room = lambda: not self._pending or len(self._pending) + len(calls) <= MOST_PENDING
            self._wait_for(has_room)
            self._raise_error()
            self._insert(_Write(self._count + 1, action, step, call) for call in copies)
            self._beginning.is_over, self._is_flushed, self._newest_step = True, False, step
            self._begin()
            if not self._pauses:
                self._changed.notify_all()
            if waits:
                self._wait()

    def flush(self) -> None:
        """Waits until all calls are made and the thread has ended, and flushes the writer.

        Raises:
          BaseException: that of an earlier call, once.
        """
        with self._changed:
            self._begin()
            self._ends, thread = True, self._thread
            self._changed.notify_all()
        if thread is not None:
            thread.join()
        try:
            with self._changed:
                self._raise_error()
        finally:
            self._writer.flush()
            self._is_flushed = True

    def state_dict(self, action: Any) -> dict[str, Any]:
        """Returns what could not be written for an action, and how far the writer's file goes.

        Waits until all else is written and flushed: a checkpoint is about to be saved, and a killed process loses what
        the writer holds.
        """
        with self._changed:
            self._begin()
            self._wait()
            if not self._is_flushed and not self._pending:
                self._is_flushed = True
                self._insert([_Write(self._count + 1, action, self._newest_step, Call("flush", {}, {}))])
                self._begin()
                self._wait()
            left = [write for write in self._pending if write.action is action]
        kept = []
        for write in left:
            encodable = {"number": write.number, "step": write.step, **write.call._asdict()}
            write.is_in_checkpoint = _can_be_kept(action, encodable)
            kept += [encodable] if write.is_in_checkpoint else []
        return ({_UNWRITTEN: kept} if kept else {}) | _position_of(self._writer)

    def load_state_dict(self, action: Any, state_dict: Mapping[str, Any]) -> None:
        """Has what could not be written be made before all that is asked for from now on."""
        with self._changed:
            self._wait()
            # The state has them, if they are to be made: of this action, or one in its place in an earlier run.
            self._pending = [each for each in self._pending if each.action is not action and not each.is_in_checkpoint]
            self._is_halted = False
            # The thread begins later, when other actions have put theirs between these.
            self._insert(_writes_in(action, state_dict) if distributed.is_first_process() else [])
            self._beginning.load(state_dict)

    def begin_run(self, action: Any, step: int) -> None:
        """Has the writer, before anything else, hide what a killed run wrote after its newest checkpoint.

        Args:
          action: asks for it. Where several share a writer, the first of them has it done.
          step: of the checkpoint; the first step of the run where there is none.
        """
        with self._changed:
            if distributed.is_first_process():
                self._insert(_Write(0, action, step, call) for call in self._beginning.calls())

    def _insert(self, writes: Iterable[_Write]) -> None:
        for write in writes:
            bisect.insort(self._pending, write, key=lambda each: each.number)
            self._count = max(self._count, write.number)

    def _begin(self) -> None:
        """Sees that a thread makes what is pending."""
        if self._pending and not self._is_halted and not self._is_working:
            self._is_working, self._ends = True, False
            self._thread = threading.Thread(target=self._work, name="jaxloop-writer", daemon=True)
            self._thread.start()

    def _wait(self) -> None:
        self._wait_for(lambda: not self._pending)

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        """Waits for the thread, as long as it works."""
        if condition() or not self._is_working:
            return
        self._waiting += 1
        self._changed.notify_all()
        try:
            self._changed.wait_for(lambda: condition() or not self._is_working)
        finally:
            self._waiting -= 1

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # Its traceback has this frame.

    def _work(self) -> None:
        while (write := self._next()) is not None:
            try:
                write.carry_out(self._writer)
            except BaseException as error:
                error.add_note("It was called in the background, and raised where the run next came to the writer.")
                self._halt(error)
                return
            with self._changed:
                self._pending.remove(write)
                self._changed.notify_all()

    def _next(self) -> _Write | None:
        with self._changed:
            if not self._pending:
                self._pauses = True
                # Who waits for nothing has what it waited for, and is about to go on.
                self._changed.wait_for(lambda: self._ends or (self._waiting and self._pending), timeout=_PAUSE_SECS)
                self._pauses = False
            self._changed.wait_for(lambda: self._pending or self._ends, timeout=_IDLE_SECS)
            self._is_working = bool(self._pending)
            return self._pending[0] if self._pending else None

    def _halt(self, error: BaseException) -> None:
        with self._changed:
            self._error, self._is_halted, self._is_working = error, True, False
            self._changed.notify_all()

    def finish(self) -> None:
        """Makes what is pending, at the end of the program; what raises is logged."""
        if os.getpid() != self._process:  # The thread is that of the process from which this one was forked.
            return
        with self._changed:
            self._ends = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        error, self._error = self._error, None
        left = [write for write in self._pending if not write.is_in_checkpoint]
        try:
            for write in left:  # Not in a thread: in a program that ends none can be started.
                write.carry_out(self._writer)
                error = None
        except Exception as reason:
            error = reason
        if error is not None:
            logging.error("Summaries could not be written.", exc_info=error)


class _Beginning:
    """Decides whether a run that begins hides what others wrote before it.

    A run that resumes does so, once for all actions that share a writer. Another one does so only where this process
    has written nothing yet: what is there then was written by a run that was killed before its first checkpoint.

    Attributes:
      is_over: whether something was written.
    """

    def __init__(self):
        self.is_over = False
        self._state_dict: Mapping[str, Any] | None = None  # That was loaded.

    def load(self, state_dict: Mapping[str, Any]) -> None:
        self._state_dict = state_dict

    def calls(self) -> list[Call]:
        state_dict, self._state_dict = self._state_dict, None
        if state_dict is None and self.is_over:
            return []
        self.is_over = True
        return [Call("resume", {}, {"position": (state_dict or {}).get(_POSITION)})]


def _position_of(writer: Any) -> dict[str, Any]:
    if not hasattr(writer, "position") or not distributed.is_first_process():
        return {}
    return {_POSITION: writer.position()}


def _resume(writer: Any, step: int, position: Mapping[str, Any] | None) -> None:
    """Calls `resume` of a writer that has it; for TensorFlow's writers, which clu wraps, does the same itself."""
    if hasattr(writer, "resume"):
        writer.resume(step, position)
    elif hasattr(writer, "_summary_writer") and "tensorflow" in sys.modules:
        import tensorflow as tf

        started = tf.compat.v1.SessionLog(status=tf.compat.v1.SessionLog.START)
        # The file says nothing of which points of the step itself came after the checkpoint: they stay.
        event = tf.compat.v1.Event(wall_time=time.time(), step=step + 1 if step else 0, session_log=started)
        for _ in range(2):  # TensorBoard's pages take the first one of a directory for that of the first process.
            tf.raw_ops.ImportEvent(writer=writer._summary_writer._resource, event=event.SerializeToString())
    else:
        for inner in getattr(writer, "_writers", [getattr(writer, "_writer", None)]):
            if inner is not None:
                _resume(inner, step, position)


def _finish(of: "weakref.ref[BackgroundWriter]") -> None:
    writer = of()
    if writer is not None:
        writer.finish()


def _copy(value: Any) -> Any:
    return value if isinstance(value, int | float | str | np.generic) else copy.deepcopy(value)


def _writes_in(action: Any, state_dict: Mapping[str, Any]) -> list[_Write]:
    """The calls that are kept in an action's state."""
    if set(state_dict) - {_UNWRITTEN, _POSITION}:
        raise ValueError(f"{action!r} remembers what is unwritten, and was given {sorted(state_dict)}: of another?")
    for each in state_dict.get(_UNWRITTEN, ()):
        if each["method"] not in _METHODS:
            raise ValueError(f"{action!r} has no call of {each['method']!r} to make: its state is not one it wrote.")
    return [
        _Write(each["number"], action, each["step"], Call(each["method"], each["values"], each["options"]))
        for each in state_dict.get(_UNWRITTEN, ())
    ]


def _can_be_kept(action: Any, kept: Mapping[str, Any]) -> bool:
    try:
        encoding.encode(kept)
    except TypeError as error:
        logging.error("A checkpoint can't keep what %r could not write for step %d: %s", action, kept["step"], error)
        return False
    return True
