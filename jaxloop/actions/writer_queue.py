"""The queue in front of a writer."""

import concurrent.futures
import copy
import functools
import threading
import weakref
from collections.abc import Mapping
from typing import Any, ClassVar, final

from absl import logging

from jaxloop import distributed

MOST_PENDING = 64
"""The maximum number of pending calls. An action that requests more must wait."""


@final
class WriterQueue:
    """Calls a writer's methods in a thread, in the order in which actions request the calls.

    >>> import types
    >>> writer = types.SimpleNamespace(write_scalars=lambda step, values: print(step, values), flush=lambda: None)
    >>> queue = WriterQueue.of(writer)
    >>> queue.put("an action, after step 10", "write_scalars", 10, {"loss": 0.5}); queue.flush()
    10 {'loss': 0.5}

    All actions with the same writer share its queue. The program makes all pending calls before it exits. If it is
    killed, the pending calls can be lost, but not those from before a checkpoint, because `state_dict` waits until
    everything is written and flushed. In a multi-process job, only the first process calls the writer.

    If a call raises an error, the next request or flush raises it. The failed call is not repeated.

    Args:
      writer: Any object with the methods of `clu.metric_writers.MetricWriter`.
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
        self._room = threading.BoundedSemaphore(MOST_PENDING)
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "jaxloop-writer")
        self._error: BaseException | None = None  # Still to be raised.
        self._needs_flush = False
        # The state to resume from; None once anything was written.
        self._begins_from: Mapping[str, Any] | None = {"position": None}

    @functools.cached_property
    def _writes(self) -> bool:  # Not asked before a run begins, because JAX may not have started.
        return distributed.is_first_process()

    def put(self, place: str, method: str, *arguments: Any, **options: Any) -> None:
        """Requests a call to one of the writer's methods. If the queue is full, waits until it has room.

        Args:
          place: The action and the step, for a note on an error of the call.
          method: The name of the method.
          *arguments: The arguments of the call, which are copied.
          **options: Further keyword arguments.

        Raises:
          BaseException: If an earlier call raised it.
        """
        if not self._writes:
            return
        self._raise_error()
        if method != "write_scalars":  # Numbers are immutable.
            arguments = copy.deepcopy(arguments)
        self._needs_flush, self._begins_from = True, None
        self._submit(place, method, *arguments, **options)

    def flush(self) -> None:
        """Waits until all calls have been made, and flushes the writer.

        Raises:
          BaseException: If an earlier call raised it. Each error is raised only once.
        """
        self._wait()
        try:
            self._raise_error()
        finally:
            self._needs_flush = False
            self._writer.flush()

    def state_dict(self, place: str) -> dict[str, Any]:
        """Flushes everything. Returns the writer's position, to be stored in a checkpoint.

        Errors are raised later, not here, so that the checkpoint can be saved.
        """
        if not self._writes:
            return {}
        if self._needs_flush:
            self._needs_flush = False
            self._submit(place, "flush")
        self._wait()
        return {"position": self._writer.position()} if hasattr(self._writer, "position") else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Makes the next run continue from a writer's position in a checkpoint."""
        self._needs_flush, self._begins_from = True, state_dict

    def begin_run(self, place: str, step: int) -> None:
        """Makes the writer first hide everything that a killed run wrote after its newest checkpoint.

        A resumed run does this once for all actions that share the writer. A new run does it only if this process
        hasn't written anything yet, because any existing values must then come from a run that was killed before its
        first checkpoint.

        Args:
          place: The action that makes the request.
          step: The step of the checkpoint, or the first step of the run if there is no checkpoint.
        """
        state_dict, self._begins_from = self._begins_from, None
        if state_dict is not None and self._writes and hasattr(self._writer, "resume"):
            # The position is None only if there is no checkpoint.
            self._submit(place, "resume", step, state_dict.get("position", {}))

    def _submit(self, *arguments: Any, **options: Any) -> None:
        self._room.acquire()
        self._thread.submit(self._call, *arguments, **options)

    def _wait(self) -> None:
        """Waits until the thread has made all calls that were requested."""
        self._thread.submit(lambda: None).result()

    def _call(self, place: str, method: str, *arguments: Any, **options: Any) -> None:
        try:
            getattr(self._writer, method)(*arguments, **options)
        except BaseException as error:
            error.add_note(f"in {place}: {method}")
            error.add_note("The call ran in the background; its error is raised when the writer is next used.")
            if self._error is None:
                logging.error("Summaries could not be written. The next use of the writer raises the error: %r", error)
                self._error = error
        finally:
            self._room.release()

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error
