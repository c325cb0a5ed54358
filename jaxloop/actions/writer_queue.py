"""A queue of calls to a writer, and the base class of the actions that use it."""

import collections
import concurrent.futures
import copy
import dataclasses
import functools
import weakref
from collections.abc import Mapping
from typing import Any, ClassVar, final

from absl import logging

from jaxloop import distributed
from jaxloop.actions.action import Action, check_state_dict
from jaxloop.base.text import printable
from jaxloop.schedules import Schedule

MOST_PENDING = 64
"""The maximum number of pending calls. An action that requests more calls must wait."""


@final
@dataclasses.dataclass(eq=False)
class Call:
    """A pending call to a writer's method, such as `write_scalars`, `flush` or `resume`.

    Attributes:
      action: The action that requested the call. For a call that was restored from a checkpoint, a string that
        describes the action.
      step: The step to which the values belong.
      method: The name of the method.
      values: The values to write, by name.
      options: Further keyword arguments for the method.
    """

    action: Any
    step: int
    method: str
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def make(self, writer: Any) -> None:
        """Makes this call. Any error gets a note with the action, the step, the method and the names of the values."""
        try:
            if self.method == "resume":
                writer.resume(self.step, self.options["position"])
            else:
                arguments = (self.step, self.values) if self.values else ()
                getattr(writer, self.method)(*arguments, **self.options)
        except BaseException as error:
            names = f" of {', '.join(map(printable, self.values))}" if self.values else ""
            error.add_note(f"in {self.action}, after step {self.step}: {self.method}{names}")
            raise


@final
class WriterQueue:
    """Calls a writer's methods in a background thread, in the order in which the calls were requested.

    >>> import types
    >>> writer = types.SimpleNamespace(write_scalars=lambda step, values: print(step, values), flush=lambda: None)
    >>> queue = WriterQueue.of(writer)
    >>> queue.put(Call("an action", 10, "write_scalars", {"loss": 0.5})); queue.flush()
    10 {'loss': 0.5}

    All actions with the same writer share its queue. All pending calls are made before the program exits. If the
    program is killed, pending calls can be lost, but calls requested before a checkpoint are never lost, because
    `state_dict` waits until everything is written and flushed. In a multi-process job, only the first process calls the
    writer.

    If a call raises an error, no value is lost or written twice: that call and all later calls stay in the queue. The
    next `put` or `flush` raises the error, and the `put` after that retries the calls. If a checkpoint is saved before
    the retry, the checkpoint contains these calls, and a run that resumes from it makes the calls first.

    Args:
      writer: Any object with the methods of `clu.metric_writers.MetricWriter`.
    """

    # Keyed by the ids of the writers, because not every writer can be hashed or weakly referenced. The queues keep
    # their writers alive.
    _all: ClassVar[weakref.WeakValueDictionary[int, "WriterQueue"]] = weakref.WeakValueDictionary()

    @classmethod
    def of(cls, writer: Any) -> "WriterQueue":
        """Returns a writer's queue, creating it if it doesn't exist."""
        return cls._all.setdefault(id(writer), cls(writer))

    def __init__(self, writer: Any):
        self._writer = writer
        self._calls: collections.deque[Call] = collections.deque()
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "jaxloop-writer")
        self._error: BaseException | None = None  # An error that has not been raised yet.
        self._needs_flush = False
        # The state to resume from; None once anything has been written.
        self._begins_from: Mapping[str, Any] | None = {"position": None}

    @functools.cached_property
    def _writes(self) -> bool:  # Read only after a run has begun, when the process index is known.
        return distributed.is_first_process()

    def put(self, *calls: Call) -> None:
        """Appends calls to the queue. If the queue has no room for the calls, first waits until it is empty.

        If an error is raised, none of the calls are appended.

        Args:
          calls: The calls to append. Their values are copied.

        Raises:
          BaseException: The error raised by an earlier call, if any.
        """
        if not calls or not self._writes:
            return
        for call in calls:
            if call.method != "write_scalars":  # Numbers are immutable.
                call.values = copy.deepcopy(call.values)
        self._raise_error()
        if len(self._calls) + len(calls) > MOST_PENDING:
            self._wait()
            self._raise_error()
        self._needs_flush, self._begins_from = True, None
        self._calls.extend(calls)
        self._thread.submit(self._make_calls)

    def flush(self) -> None:
        """Waits until all calls have been made and then flushes the writer.

        Raises:
          BaseException: The error raised by an earlier call, if any. Each error is raised only once.
        """
        self._wait()
        try:
            self._raise_error()
        finally:
            self._flush_writer()

    def state_dict(self, action: Any) -> dict[str, Any]:
        """Waits until all calls have been made, flushes the writer, and returns the data to store in a checkpoint.

        The data consists of the writer's position and any calls that could not be made because of an error. The error
        is raised later, so that the checkpoint can be saved. `action` is the action that calls this method.
        """
        if not self._writes:
            return {}
        self._wait()
        try:
            if self._needs_flush:
                self._flush_writer()
        except Exception as error:
            error.add_note(f"in {action}: flush")
            self._error = self._error or error
        unwritten = [vars(call) | {"action": str(call.action)} for call in self._calls]
        kept = {"unwritten": unwritten} if unwritten else {}
        return kept | ({"position": self._writer.position()} if hasattr(self._writer, "position") else {})

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Replaces the calls in the queue with those that a checkpoint contains, so that the resumed run makes them."""
        calls = state_dict.get("unwritten", ()) if self._writes else ()
        self._wait()
        self._calls = collections.deque(Call(**call) for call in calls)  # All actions of a writer store the same calls.
        self._needs_flush, self._begins_from = True, state_dict

    def begin_run(self, action: Any, step: int) -> None:
        """Makes the writer hide everything that a killed run wrote after its newest checkpoint.

        In a resumed run, this happens once for all actions that share the writer. In a new run, it happens only if this
        process hasn't written anything yet. In that case, any existing values come from a run that was killed before
        its first checkpoint.

        Args:
          action: The action that calls this method.
          step: The step of the checkpoint or, if there is no checkpoint, the step at which the run starts.
        """
        state_dict, self._begins_from = self._begins_from, None
        if state_dict is not None and self._writes:
            if hasattr(self._writer, "resume"):
                position = {"position": state_dict.get("position", {})}  # None only if there is no checkpoint.
                self._calls.appendleft(Call(action, step, "resume", options=position))
            self._thread.submit(self._make_calls)

    def _wait(self) -> None:
        """Waits until the thread has made all requested calls, or until one has failed."""
        if self._calls:
            self._thread.submit(lambda: None).result()

    def _flush_writer(self) -> None:
        self._needs_flush = False
        self._writer.flush()

    def _make_calls(self) -> None:
        while self._calls and self._error is None:
            try:
                self._calls[0].make(self._writer)
                self._calls.popleft()
            except BaseException as error:
                error.add_note("The call ran in the background; its error is raised when the writer is next used.")
                logging.error("Summaries could not be written. The next use of the writer raises the error: %r", error)
                self._error = error

    def _raise_error(self) -> None:
        if self._error is not None:
            self._wait()  # Otherwise, an earlier request could already retry the call.
            error, self._error = self._error, None
            raise error


class WriterAction(Action):
    """The base class of actions that write summaries. Actions with the same writer share one `WriterQueue`.

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
        self._summary_writer, self._queue = writer, WriterQueue.of(writer)

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
        if hasattr(type(self._summary_writer), "write_status"):  # Ignores names that only `__getattr__` provides.
            self._queue.put(Call(self, 0, "write_status", options={"status": status}))

    def state_dict(self) -> Mapping[str, Any]:
        return self._queue.state_dict(self)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        check_state_dict(self, {"unwritten", "position"} & state_dict.keys(), state_dict)
        self._queue.load_state_dict(state_dict)

    def flush(self) -> None:
        self._queue.flush()
