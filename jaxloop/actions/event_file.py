"""TensorBoard event files."""

import os
import threading
import time
from typing import Any, final

_FLUSH_SECS = 10.0


@final
class EventFile:
    """An event file, which tensorboardX writes in the thread that adds an event.

    It takes the place of tensorboardX's `FileWriter`, whose `flush` doesn't wait for its queue, and whose thread ends
    silently if the disk is full. This class is thread-safe. Events are on disk after `flush`, or after ten seconds.

    The file is created when the first event is added, and closed by `close` or when this object is garbage-collected.
    TensorBoard reads the files of a directory in the order of their names, which begin with the time.

    Args:
      directory: The directory in which to create the file.
    """

    def __init__(self, directory: str):
        from tensorboardX import event_file_writer
        from tensorboardX.proto import event_pb2

        self._writers, self._new_event = event_file_writer, event_pb2.Event  # pyright: ignore
        self._directory, self._lock = directory, threading.RLock()
        self._file: Any = None
        self._flushed_at = 0.0

    def get_logdir(self) -> str:
        """Returns the directory. tensorboardX requires this method."""
        return self._directory

    def add_summary(self, summary: Any, global_step: int | None = None, walltime: float | None = None) -> None:
        """Adds a summary."""
        self.add_event(self._new_event(summary=summary), global_step, walltime)

    def add_event(self, event: Any, step: int | None = None, walltime: float | None = None) -> None:
        """Adds an event.

        Raises:
          OSError: If events could not be written.
        """
        event.wall_time = time.time() if walltime is None else walltime
        if step is not None:
            event.step = int(step)
        with self._lock:
            if self._file is None:
                self._writers.directory_check(self._directory)
                suffix = f".{time.time_ns()}.{os.getpid()}"  # Two files of one second need different names.
                self._file = self._writers.EventsWriter(f"{self._directory}/events", suffix)
            self._file.write_event(event)
            if time.time() - self._flushed_at > _FLUSH_SECS:
                self.flush()

    def flush(self) -> None:
        """Waits until all events are on disk."""
        with self._lock:
            if self._file is not None:
                self._file.flush()
                self._flushed_at = time.time()

    def close(self) -> None:
        """Closes the file. The next event is written to a new one."""
        with self._lock:
            file, self._file = self._file, None
            if file is not None:
                file.close()

    __del__ = close  # Callers might not close the writer.

    def resume(self, step: int) -> None:
        """Makes TensorBoard hide all earlier points after a step, or all of them if a run starts at step 0."""
        for _ in range(2):  # TensorBoard attributes the first one in a directory to the first process.
            self.add_event(self._new_event(session_log={"status": "START"}), step + 1 if step else 0)
