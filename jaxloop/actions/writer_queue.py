"""The queue in front of a writer, and the base class of the actions that use it."""

import atexit
import copy
import dataclasses
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, final

from absl import logging

from jaxloop import distributed, encoding
from jaxloop.actions.action import Action
from jaxloop.schedules import Schedule
from jaxloop.text import printable

MOST_PENDING = 64
"""The maximum number of pending calls. An action that requests more must wait."""

PAUSE_SECS = 0.1
"""The time, in seconds, for which a new thread collects calls, unless an action is waiting for them."""

_METHODS = frozenset(
    f"write_{kind}"
    for kind in (
        "scalars",
        "texts",
        "images",
        "videos",
        "audios",
        "histograms",
        "summaries",
        "hparams",
        "notes",
        "status",
    )
) | {"flush", "resume"}
"""The writer methods that the calls in a checkpoint may use."""


@final
@dataclasses.dataclass(eq=False)
class Call:
    """A pending call to a writer's method, such as `write_scalars`, `flush` or `resume`.

    Attributes:
      action: The action that requested the call.
      step: The step to which the values belong.
      method: The name of the method.
      values: The values to write, by name.
      options: Further keyword arguments.
      number: The position of this call among all calls to the writer. Calls with number 0 come first.
      is_in_checkpoint: True if a checkpoint saved by this process contains the call, so that a resumed run will make
        it.
    """

    action: Any
    step: int
    method: str
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    number: int = 0
    is_in_checkpoint: bool = False

    def make(self, writer: Any) -> None:
        """Calls the writer's method, and adds a note with the action, the step and the names to any error."""
        try:
            if self.method == "resume":
                _resume(writer, self.step, **self.options)
            else:
                arguments = (self.step, self.values) if self.values else ()
                getattr(writer, self.method)(*arguments, **self.options)
        except BaseException as error:
            names = f" of {', '.join(map(printable, self.values))}" if self.values else ""
            error.add_note(f"in {self.action!r}, after step {self.step}: {self.method}{names}")
            raise

    def keep(self) -> dict[str, Any] | None:
        """Returns the call in the form stored in checkpoints. If it can't be stored, logs an error and returns None."""
        kept = {name: getattr(self, name) for name in ("number", "step", "method", "values", "options")}
        try:
            encoding.encode(kept)
        except TypeError as error:
            text = "The values that %r could not write for step %d can't be saved in a checkpoint: %s"
            logging.error(text, self.action, self.step, error)
            return None
        self.is_in_checkpoint = True
        return kept


@final
class WriterQueue:
    """Calls a writer's methods in a thread, in the order in which actions request the calls.

    >>> import types
    >>> writer = types.SimpleNamespace(write_scalars=lambda step, values: print(step, values), flush=lambda: None)
    >>> queue = WriterQueue.of(writer)
    >>> queue.put(Call("an action", 10, "write_scalars", {"loss": 0.5}))
    >>> queue.flush()
    10 {'loss': 0.5}

    All actions with the same writer share its queue. The first request starts the thread, which waits a tenth of a
    second for more requests, makes all calls, and ends. If the process is killed, calls requested in that tenth of a
    second can be lost. Calls from before a checkpoint are never lost, because `state_dict` waits until everything is
    written and flushed. All pending calls are made before the program exits, but not in forked processes. In a
    multi-process job, only the first process calls the writer.

    If a call raises an error, no row is lost or written twice: that call and all later ones stay in the queue, and the
    thread ends. The next request or flush raises the error, and the request after that retries the calls. A checkpoint
    saved in between stores these calls, and a resumed run makes them first.

    Args:
      writer: Any object with the methods of `clu.metric_writers.MetricWriter`.

    Attributes:
      last_steps: The last step at which each scalar was written, to warn of two curves with one name.
    """

    # Keyed by the ids of the writers, because not every writer can be hashed or weakly referenced. The queues keep
    # their writers alive.
    _all: ClassVar[weakref.WeakValueDictionary[int, "WriterQueue"]] = weakref.WeakValueDictionary()

    @classmethod
    def of(cls, writer: Any) -> "WriterQueue":
        """Returns the queue of a writer."""
        return cls._all.setdefault(id(writer), cls(writer))

    def __init__(self, writer: Any):
        self._writer = writer
        self.last_steps: dict[str, int] = {}
        self._lock = threading.Lock()
        self._pending: list[Call] = []
        self._count = 0  # The number of the last call.
        self._thread: threading.Thread | None = None
        self._hurry, self._has_ended = threading.Event(), threading.Event()  # An action waits; the thread has ended.
        self._errors: list[BaseException] = []  # Still to be raised; at most one.
        self._is_halted = False  # True after an error, until the next request.
        self._unflushed_step: int | None = None  # The newest step that was written since the last flush.
        self._begins_from: Mapping[str, Any] | None = {}  # The state to resume from; None once anything was written.
        self._process = os.getpid()

    def put(self, *calls: Call) -> None:
        """Appends either all or none of the calls to the queue. If the queue is full, first waits until it is empty.

        Args:
          calls: The calls to append. Their values are copied.

        Raises:
          BaseException: If an earlier call raised it.
        """
        if not calls or not distributed.is_first_process():
            return
        with self._lock:
            self._raise_error()
            self._is_halted = False
        if len(self._pending) + len(calls) > MOST_PENDING:
            self._drain()
            self._raise_error()
        self._unflushed_step, self._begins_from = calls[-1].step, None
        for call in calls:
            if call.method != "write_scalars":  # Numbers are immutable.
                call.values = copy.deepcopy(call.values)
        with self._lock:
            self._add(calls)
            self._start()

    def flush(self) -> None:
        """Waits until all calls have been made and the thread has ended, and flushes the writer.

        Raises:
          BaseException: If an earlier call raised it. Each error is raised only once.
        """
        self._drain()
        try:
            self._raise_error()
        finally:
            self._writer.flush()
            self._unflushed_step = None

    def state_dict(self, action: Any) -> dict[str, Any]:
        """Flushes everything. Returns an action's failed calls and the writer's position, to be stored in a checkpoint.

        Errors are raised later, not here, so that the checkpoint can be saved.
        """
        if not distributed.is_first_process():
            return {}
        if self._unflushed_step is not None:
            with self._lock:
                self._add([Call(action, self._unflushed_step, "flush")])
            self._unflushed_step = None
        self._drain()
        kept = [call.keep() for call in self._pending if call.action is action]
        unwritten = {"unwritten": [each for each in kept if each is not None]} if any(kept) else {}
        return unwritten | ({"position": self._writer.position()} if hasattr(self._writer, "position") else {})

    def load_state_dict(self, action: Any, state_dict: Mapping[str, Any]) -> None:
        """Puts the failed calls from a checkpoint at the front of the queue."""
        calls = list(_calls_in(action, state_dict)) if distributed.is_first_process() else []
        self._join()
        with self._lock:
            # Drops the calls of this action and those in a checkpoint (of the corresponding action in an earlier run),
            # because the state contains all that still have to be made.
            others = [each for each in self._pending if each.action is not action and not each.is_in_checkpoint]
            # Other actions may insert their calls between these, so the thread starts later.
            self._pending = sorted([*others, *calls], key=lambda call: call.number)
            self._count = max([self._count, *(call.number for call in calls)])
            self._is_halted, self._begins_from = False, state_dict

    def begin_run(self, action: Any, step: int) -> None:
        """Makes the writer first hide everything that a killed run wrote after its newest checkpoint.

        A resumed run does this once for all actions that share the writer. A new run does it only if this process
        hasn't written anything yet, because any existing values must then come from a run that was killed before its
        first checkpoint.

        Args:
          action: The action that makes the request.
          step: The step of the checkpoint, or the first step of the run if there is no checkpoint.
        """
        with self._lock:
            state_dict, self._begins_from = self._begins_from, None
            if state_dict is not None and distributed.is_first_process():
                position = {"position": state_dict.get("position")}
                self._pending.insert(0, Call(action, step, "resume", options=position))

    def _add(self, calls: Sequence[Call]) -> None:
        for call in calls:
            self._count += 1
            call.number = self._count
        self._pending += calls

    def _start(self) -> None:
        """Starts the thread if there are pending calls."""
        if self._pending and not self._is_halted and self._thread is None:
            self._hurry.clear()
            # Registered after the writer's own exit handler, if any, and thus called first, while the writer is open.
            atexit.register(self._finish)
            thread = threading.Thread(target=self._work, name="jaxloop-writer", daemon=True)
            self._has_ended.clear()
            thread.start()
            self._thread = thread

    def _drain(self) -> None:
        """Makes calls until one raises an error or none are left, and then ends the thread."""
        with self._lock:
            self._start()
        self._join()

    def _join(self) -> None:
        if self._thread is not None:
            self._hurry.set()
            # In Python 3.11 a thread counts as ended once Ctrl-C has interrupted its `join`.
            self._has_ended.wait()

    def _work(self) -> None:
        self._hurry.wait(PAUSE_SECS)
        self._make_calls()

    def _make_calls(self) -> None:
        while True:
            with self._lock:
                if not self._pending or self._is_halted:
                    if not self._pending and self._thread is not None:
                        atexit.unregister(self._finish)
                    self._thread = None
                    self._has_ended.set()
                    return
                call = self._pending[0]
            try:
                call.make(self._writer)
            except BaseException as error:
                error.add_note("The call ran in the background; its error is raised when the writer is next used.")
                with self._lock:
                    self._errors, self._is_halted = [error], True
            else:
                with self._lock:
                    self._pending.remove(call)

    def _raise_error(self) -> None:
        if self._errors:
            raise self._errors.pop()

    def _finish(self) -> None:
        """Makes the pending calls when the program exits, and logs errors."""
        if os.getpid() != self._process:  # The thread belongs to the parent process.
            return
        self._join()
        self._pending = [call for call in self._pending if not call.is_in_checkpoint]
        if self._pending:
            self._errors, self._is_halted = [], False
            self._make_calls()  # Not in a thread, because an exiting program can't start one.
        for error in self._errors:
            logging.error("Summaries could not be written.", exc_info=error)


class WriterAction(Action):
    """The base class of actions that write summaries. Actions with the same writer share its queue.

    Args:
      writer: Any object with the methods of `clu.metric_writers.MetricWriter`. It is flushed at the end of a
        run but not closed, because the caller owns it.
      interval: See `Action`.
    """

    def __init__(self, writer: Any, interval: int | Schedule):
        super().__init__(interval)
        if missing := [name for name in ("write_scalars", "flush") if not hasattr(writer, name)]:
            raise TypeError(
                f"{type(self).__name__} takes a writer with the methods of clu's MetricWriter, got {writer!r}. "
                f"jaxloop.default_writer(workdir) makes one. This one lacks {' and '.join(missing)}."
            )
        self._summary_writer = writer
        self._queue = WriterQueue.of(writer)

    @property
    def summary_writer(self) -> Any:
        """The writer that was passed to the constructor."""
        return self._summary_writer

    def before_checkpoint(self) -> None:
        """Does nothing, because `state_dict` flushes the writer and returns any failed calls."""

    def begin_run(self, step_num: int, *, can_resume: bool) -> None:
        if can_resume:
            self._queue.begin_run(self, step_num)

    def write_notes(self, notes: Mapping[str, Any]) -> None:
        if notes and hasattr(self._summary_writer, "write_notes"):
            self._queue.put(Call(self, 0, "write_notes", options={"notes": notes}))

    def end_run(self, status: str) -> None:
        if hasattr(type(self._summary_writer), "write_status"):  # Not one that a `__getattr__` makes for any name.
            self._queue.put(Call(self, 0, "write_status", options={"status": status}))

    def state_dict(self) -> Mapping[str, Any]:
        return self._queue.state_dict(self)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._queue.load_state_dict(self, state_dict)

    def flush(self) -> None:
        self._queue.flush()


def _resume(writer: Any, step: int, position: Mapping[str, Any] | None) -> None:
    """Calls a writer's `resume` method, or does the equivalent for the TensorFlow writer inside a clu writer."""
    if hasattr(writer, "resume"):
        writer.resume(step, position)
    elif hasattr(writer, "_summary_writer") and "tensorflow" in sys.modules:
        import tensorflow as tf

        started = tf.compat.v1.SessionLog(status=tf.compat.v1.SessionLog.START)
        # The file doesn't show which points of the step itself were written after the checkpoint, so all are kept.
        event = tf.compat.v1.Event(wall_time=time.time(), step=step + 1 if step else 0, session_log=started)
        for _ in range(2):  # TensorBoard attributes the first one in a directory to the first process.
            tf.raw_ops.ImportEvent(writer=writer._summary_writer._resource, event=event.SerializeToString())
    else:
        for inner in getattr(writer, "_writers", [getattr(writer, "_writer", None)]):
            if inner is not None:
                _resume(inner, step, position)


def _calls_in(action: Any, state_dict: Mapping[str, Any]) -> Iterable[Call]:
    """Yields the calls that are stored in an action's state."""
    if set(state_dict) - {"unwritten", "position"}:
        raise ValueError(
            f"{action!r} expects only 'unwritten' and 'position' in its state_dict, got {sorted(state_dict)}. Was it "
            "saved by a different action?"
        )
    for kept in state_dict.get("unwritten", ()):
        if kept["method"] not in _METHODS:
            raise ValueError(
                f"The state of {action!r} has a call of {kept['method']!r}, which is not a method of a writer. Was it "
                "saved by a different action?"
            )
        yield Call(action, **kept)
