"""TensorBoard event files that don't lose events when the process is killed."""

import os
import re
import socket
import struct
import threading
import time
from collections.abc import Mapping
from typing import Any, final

from absl import logging
from etils import epath

from jaxloop.base import files

_NAME = re.compile(r"events\.out\.tfevents\.(\d{10})\.[^/\\]*")


@final
class EventFile:
    """The event file of one process. When `add_event` returns, the event is in the file.

    tensorboardX's `FileWriter` keeps events in a queue and two buffers. If a process is killed, `FileWriter` loses
    these events; its `flush` doesn't wait for the queue, and its thread ends silently if the disk is full. If this
    class can't write an event, it raises an error and leaves the file unchanged. It is thread-safe.

    The file is created when the first event is added, and closed by `close` or when this object is garbage-collected.
    TensorBoard reads event files in the order of their names, so the new file's name sorts after all existing ones.

    Args:
      directory: The directory in which to create the file.
    """

    def __init__(self, directory: str):
        from tensorboardX import record_writer
        from tensorboardX.proto import event_pb2

        self._tensorboard, self._new_event = record_writer, event_pb2.Event  # pyright: ignore
        self._lock = threading.RLock()
        self._directory, self._path = directory, ""
        self._file: Any = None
        self._size, self._newest_step, self._begins = 0, -1, 0  # The highest step, and where its events begin.

    def get_logdir(self) -> str:
        """Returns the directory. tensorboardX requires this method."""
        return self._directory

    def add_summary(self, summary: Any, global_step: int | None = None, walltime: float | None = None) -> None:
        """Adds a summary."""
        self.add_event(self._new_event(summary=summary), global_step, walltime)

    def add_event(self, event: Any, step: int | None = None, walltime: float | None = None) -> None:
        """Adds an event.

        Raises:
          OSError: If the event could not be written. The error contains the path of the file.
        """
        event.wall_time = time.time() if walltime is None else walltime
        if step is not None:
            event.step = int(step)
        with self._lock:
            if self._file is None:
                self._open()
            if not self._size:
                self._append(self._record(self._new_event(wall_time=event.wall_time, file_version="brain.Event:2")))
            begins = self._size
            self._append(self._record(event))
            if event.step > self._newest_step:
                self._newest_step, self._begins = event.step, begins

    def flush(self) -> None:
        """Waits until all events are on disk."""
        with self._lock:
            if self._file is not None:
                self._file.flush()
                if hasattr(self._file, "fileno"):
                    os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file. The next event is written to a new one."""
        with self._lock:
            file, self._file = self._file, None
            if file is not None:
                file.close()

    __del__ = close  # Callers might not close the writer.

    def position(self) -> dict[str, Any]:
        """Returns the place of the latest step's events, to be passed to `resume`."""
        with self._lock:
            name = os.path.basename(self._path)
            return {"file": name, "step": self._newest_step, "begins": self._begins, "ends": self._size}

    def resume(self, step: int, position: Mapping[str, Any] | None) -> None:
        """Makes TensorBoard hide everything after the position at which a run resumes or starts over.

        TensorBoard can only hide all points at or after a given step, so points of that step that were written before
        the position are copied from the earlier file.

        Args:
          step: The step at which the run resumes.
          position: The result of `position` when that step was saved. If None, the points of the step itself are kept,
            unless it is step 0.
        """
        with self._lock:
            if not self._numbers():
                return
            copies = None if position is None else self._events_of(step, position)
            first_hidden = step if copies is not None or step == 0 else step + 1
            for _ in range(2):  # TensorBoard attributes the first one in a directory to the first process.
                self.add_event(self._new_event(step=first_hidden, session_log={"status": "START"}))
            self._newest_step, self._begins = step, self._size
            self._append(copies or b"")

    def _numbers(self) -> list[int]:
        """Returns the numbers in the names of the directory's event files."""
        directory = epath.Path(self._directory)
        names = [path.name for path in directory.iterdir()] if directory.exists() else []
        return [int(found[1]) for found in map(_NAME.fullmatch, names) if found]

    def _open(self) -> None:
        number = max([int(time.time()), *(1 + each for each in self._numbers())])
        # The name includes the process and this object, so that no two objects create the same file.
        name = f"events.out.tfevents.{number:010d}.{socket.gethostname()}.{os.getpid()}.{id(self)}"
        self._path, self._size, self._newest_step, self._begins = f"{self._directory}/{name}", 0, -1, 0
        self._tensorboard.directory_check(self._directory)
        if files.is_remote(self._directory):
            self._file = self._tensorboard.open_file(self._path)
        else:
            self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115

    def _record(self, event: Any) -> bytes:
        """Returns an event as in the file: the length, a checksum of the length, the data, and a checksum of it."""
        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        length_crc, data_crc = (struct.pack("<I", self._tensorboard.masked_crc32c(each)) for each in (length, data))
        return length + length_crc + data + data_crc

    def _append(self, data: bytes) -> None:
        try:
            written = 0
            while written < len(data):
                written += self._file.write(data[written:]) or len(data)
        except OSError as error:  # A partially written record would hide all later ones.
            os.truncate(self._path, self._size)
            error.filename = self._path
            raise
        self._size += len(data)

    def _events_of(self, step: int, position: Mapping[str, Any]) -> bytes | None:
        """Returns a position's events if they belong to `step` or a later step; None if the file can't be read."""
        begins, ends = position["begins"], position["ends"]
        if position["step"] < step:
            return b""
        path = f"{self._directory}/{position['file']}"
        try:
            with files.open_file(path, "rb") as file:
                file.seek(begins)
                data = file.read(ends - begins)
            if len(data) == ends - begins:
                return data
            raise OSError("the file is too short")
        except OSError as error:
            logging.warning("TensorBoard may show points of step %d twice: %s can't be read, %s", step, path, error)
            return None
