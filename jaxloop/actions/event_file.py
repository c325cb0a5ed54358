"""TensorBoard event files that don't lose events when the process is killed."""

import os
import re
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any, final

from absl import logging
from etils import epath

from jaxloop import files

_NAME = re.compile(r"events\.out\.tfevents\.(\d{10})\.[^/\\]*")
# A record is the length of its data, a checksum of the length, the data, and a checksum of the data.
_LENGTH, _CRC = struct.Struct("<Q"), struct.Struct("<I")
_NUM_FRAME_BYTES = _LENGTH.size + 2 * _CRC.size


@final
class EventFile:
    """The event file of one process. When `add_event` returns, the event is in the file.

    This class replaces tensorboardX's `FileWriter`, which keeps events in a queue and two buffers. If a process is
    killed, `FileWriter` loses these events; its `flush` doesn't wait for the queue, and its thread ends silently if the
    disk is full. If this class can't write an event, it raises an error and leaves the file unchanged. It is
    thread-safe.

    The file is created when the first event is added, and closed by `close` or when this object is garbage-collected.
    TensorBoard reads event files in the order of their names, so the new file's name sorts after all existing ones.

    Args:
      directory: The directory in which to create the file.
    """

    def __init__(self, directory: str):
        from tensorboardX.proto import event_pb2

        self._directory, self._new_event = directory, event_pb2.Event  # pyright: ignore
        self._lock = threading.RLock()
        self._name: str | None = None
        self._file: IO[bytes] | None = None
        self._close_file: Callable[[], Any] = lambda: None
        self._size = 0
        self._newest_step, self._begins = -1, 0  # The highest step, and where its events begin.

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
            self._open()
            if not self._size:
                self._append(self._new_event(wall_time=event.wall_time, file_version="brain.Event:2"))
            begins = self._size
            self._append(event)
            if event.step > self._newest_step:
                self._newest_step, self._begins = event.step, begins

    def flush(self) -> None:
        """Waits until all events are on disk."""
        with self._lock:
            if self._file is not None:
                try:
                    self._file.flush()
                    if hasattr(self._file, "fileno"):
                        os.fsync(self._file.fileno())
                except OSError as error:
                    self._restore(error)
                    raise

    def close(self) -> None:
        """Closes the file. The next event reopens it."""
        with self._lock:
            self._file = None
            self._close_file()

    def position(self) -> dict[str, Any]:
        """Returns the file's name, its end, and the beginning of its latest step, to be passed to `resume`."""
        with self._lock:
            return {"file": self._name, "begins": self._begins, "ends": self._size}

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
            for event in copies or ():
                self._append(event)

    @property
    def _path(self) -> str:
        return f"{self._directory}/{self._name}"

    def _numbers(self) -> list[int]:
        """Returns the numbers in the names of the directory's event files."""
        directory = epath.Path(self._directory)
        names = [path.name for path in directory.iterdir()] if directory.exists() else []
        return [int(found[1]) for found in map(_NAME.fullmatch, names) if found]

    def _open(self) -> None:
        if self._file is not None:
            return
        is_old = self._name is not None and os.path.isfile(self._path)
        if not is_old:
            number = max([int(time.time()), *(1 + each for each in self._numbers())])
            # The name includes the process and this object, so that no two objects create the same file.
            self._name = f"events.out.tfevents.{number:010d}.{socket.gethostname()}.{os.getpid()}.{id(self)}"
            self._size, self._newest_step, self._begins = 0, -1, 0
        if files.is_remote(self._directory):  # Remote stores can't append, so every file is new.
            from tensorboardX import record_writer

            record_writer.directory_check(self._directory)
            file: Any = record_writer.open_file(self._path)
        else:
            os.makedirs(self._directory, exist_ok=True)
            file = open(self._path, "ab" if is_old else "xb", buffering=0)  # noqa: SIM115
        # Closed at the latest when this object is garbage-collected, because callers might not close the writer. Not
        # closed at exit, because an exit handler may still write.
        self._file, self._close_file = file, weakref.finalize(self, file.close)
        self._close_file.atexit = False

    def _append(self, event: Any) -> None:
        file, record = self._file, _record(event.SerializeToString())
        assert file is not None
        try:
            written = 0
            while written < len(record):
                written += file.write(record[written:]) or len(record)
        except OSError as error:
            self._restore(error)
            raise
        self._size += len(record)

    def _restore(self, error: OSError) -> None:
        """Removes a partially written record, which would hide all later ones, and adds the path to the error."""
        if self._file is not None and hasattr(self._file, "fileno"):
            os.ftruncate(self._file.fileno(), self._size)
            self._file.seek(self._size)
        if error.errno is not None:
            error.filename = self._path

    def _events_of(self, step: int, position: Mapping[str, Any]) -> list[Any] | None:
        """Returns a position's summaries that belong to `step` or a later step; None if the file can't be read."""
        name: Any
        name, begins, ends = (position.get(key, -1) for key in ("file", "begins", "ends"))
        if name is None:
            return []
        are_offsets = all(type(value) is int and value >= 0 for value in (begins, ends))
        if not isinstance(name, str) or not _NAME.fullmatch(name) or not are_offsets:
            raise ValueError(f"{position!r} is not a position in an event file.")
        path = os.path.join(self._directory, name)
        try:
            with files.open_file(path, "rb") as file:
                file.seek(begins)
                data = file.read(max(min(ends, os.path.getsize(path)) - begins, 0))
        except OSError as error:
            logging.warning("TensorBoard may show points of step %d twice: %s can't be read, %s", step, path, error)
            return None
        records = list(_records(data))
        if begins + sum(len(each) + _NUM_FRAME_BYTES for each in records) < ends:
            logging.warning("%s is damaged or truncated: TensorBoard may miss points of step %d.", path, step)
        events = map(self._new_event.FromString, records)
        return [event for event in events if event.step >= step and event.HasField("summary")]


def _record(data: bytes) -> bytes:
    length = _LENGTH.pack(len(data))
    return length + _CRC.pack(_checksum(length)) + data + _CRC.pack(_checksum(data))


def _records(data: bytes) -> Iterator[bytes]:
    """Yields the records up to the end of the data or the first damaged record."""
    place = 0
    while place + _NUM_FRAME_BYTES <= len(data):
        ends = place + _NUM_FRAME_BYTES + _LENGTH.unpack_from(data, place)[0]
        event = data[place + _LENGTH.size + _CRC.size : ends - _CRC.size]
        if data[place:ends] != _record(event):
            return
        yield event
        place = ends


def _checksum(data: bytes) -> int:
    from tensorboardX.record_writer import masked_crc32c

    return masked_crc32c(data)
