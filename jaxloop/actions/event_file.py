"""TensorBoard event files."""

import os
import socket
import threading
import time
from typing import Any, final

from jaxloop import distributed
from jaxloop.base import files


@final
class EventFile:
    """A TensorBoard event file.

    When `add_event` returns, the event has been written to the file. (In a remote store, the event is written by the
    next `flush`.) This class is thread-safe. It replaces tensorboardX's `FileWriter`, whose `flush` doesn't wait until
    all queued events are written, and whose thread ends silently if the disk is full.

    The file is created when the first event is added, and closed by `close` or when this object is garbage-collected.
    After an error, the next event is written to a new file, because the old file may end with an incomplete event.
    TensorBoard reads the files of a directory in the order of their names, which contain the time of creation.

    Args:
      directory: The directory in which to create the file.
    """

    def __init__(self, directory: str):
        from tensorboardX import record_writer
        from tensorboardX.proto import event_pb2

        self._tensorboard, self._new_event = record_writer, event_pb2.Event  # pyright: ignore
        self._directory, self._lock = directory, threading.RLock()
        self._file: Any = None

    def get_logdir(self) -> str:
        """Returns the directory. tensorboardX requires this method."""
        return self._directory

    def add_summary(self, summary: Any, global_step: int | None = None, walltime: float | None = None) -> None:
        """Adds an event with a summary."""
        self.add_event(self._new_event(summary=summary), global_step, walltime)

    def add_event(self, event: Any, step: int | None = None, walltime: float | None = None) -> None:
        """Adds an event. In a multi-process job, only the first process writes it.

        Raises:
          OSError: If the event could not be written. The error contains the path of the file.
        """
        if not distributed.is_first_process():
            return
        event.wall_time = time.time() if walltime is None else walltime
        if step is not None:
            event.step = int(step)
        with self._lock:
            if self._file is None:
                self._tensorboard.directory_check(self._directory)
                name = f"{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
                self._file = self._tensorboard.RecordWriter(f"{self._directory}/events.out.tfevents.{name}")
                self._write(self._new_event(wall_time=event.wall_time, file_version="brain.Event:2"))
            self._write(event)

    def _write(self, event: Any) -> None:
        stream = self._file._writer  # `RecordWriter.flush` would also wait for the disk.
        try:
            self._file.write(event.SerializeToString())
            if not files.is_remote(self._directory):
                stream.flush()
        except OSError as error:
            error.filename, self._file = self._file.path, None
            stream.raw.close()  # Otherwise, Python would try to write the rest when it closes the file.
            raise

    def flush(self) -> None:
        """Waits until all events are on disk."""
        with self._lock:
            if self._file is not None:
                self._file.flush()

    def close(self) -> None:
        """Closes the file. The next event is written to a new file."""
        with self._lock:
            file, self._file = self._file, None
            if file is not None:
                file.close()

    __del__ = close  # Callers might not close the writer.

    def resume(self, first_hidden: int) -> None:
        """Makes TensorBoard hide all existing points whose step is `first_hidden` or later."""
        for _ in range(2):  # TensorBoard hides nothing at the first START event.
            self.add_event(self._new_event(session_log={"status": "START"}), first_hidden)
