"""Communication that makes all processes of a job do the same thing at the same step.

Each process reads its own part of each batch, receives its own signals and raises its own errors. However, a step must
run in all processes or in none: a process that ran one more step than the others would wait for them forever. The
processes therefore send each other messages about what they will do next. All messages have the same size, and all
processes send them at the same points in the program.
"""

import contextlib
import functools
import json
import math
import re
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, final

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxloop import distributed, types
from jaxloop.base import checks
from jaxloop.distributed import ProcessError
from jaxloop.processes import interrupt

# The status of a process: it has more data, its data ended, it failed, or its data ended before the first batch.
_OK, _ENDED, _FAILED, _EMPTY = 0, 1, 2, 3
# The maximum number of batches in one message, and the seconds of training that they should take.
_MAX_BATCHES = 16
_SECS_BETWEEN = 0.05
# A message: a checksum of its topic, the status, the number of batches, the signal, the clock in two parts, and the
# number of batches in the next message; then the rows, the examples and a checksum of the form of each batch.
_HEAD = 7
_SIZE = _HEAD + 3 * _MAX_BATCHES


def is_known_to_all_processes(error: BaseException) -> bool:
    """Returns whether all processes know about an error and have stopped at the same step."""
    return getattr(error, "_jaxloop_is_known_everywhere", False)


def known_to_all_processes(error: Any) -> Any:
    """Marks an error as raised by all processes at the same step, and returns it."""
    error._jaxloop_is_known_everywhere = True
    return error


def is_shared(mesh: Mesh | None) -> bool:
    """Returns whether the devices of a mesh belong to more than one process."""
    return mesh is not None and mesh.is_multi_process


class _Messages:
    """The messages that all processes sent at the same point. They are read only when needed."""

    def __init__(self, about: str, sent: jax.Array):
        self._about, self._sent = about, sent

    def read(self) -> np.ndarray:
        """Returns the messages, one row per process, without the checksum of their topic."""
        rows = np.asarray(self._sent.addressable_data(0))
        others = np.flatnonzero(rows[:, 0] != _checksum(self._about))
        if others.size:
            raise ProcessError(
                f"The processes of this job diverged: this one {self._about}, but process "
                f"{', '.join(map(str, others))} does something else. Give all processes the same loops, actions and "
                "schedules. For work in only one process, check jax.process_index() inside an action."
            )
        return rows[:, 1:]


def _checksum(text: str) -> int:
    return int(np.array(zlib.crc32(_without_addresses(text).encode()), np.uint32).view(np.int32))


def _without_addresses(text: str) -> str:
    """Removes memory addresses, as in the default `repr` of objects, because they differ between processes."""
    return re.sub(r" at 0x[0-9a-f]+", "", text)


@functools.cache
def _exchange() -> tuple[NamedSharding, Callable[[jax.Array], jax.Array]]:
    """Returns the sharding of a message, which has one row per process, and the function that gathers all rows."""
    firsts = {device.process_index: device for device in reversed(jax.devices())}
    mesh = Mesh(np.array([firsts[place] for place in range(jax.process_count())]), ("processes",))
    gather = jax.jit(lambda rows: rows, out_shardings=NamedSharding(mesh, PartitionSpec()))
    return NamedSharding(mesh, PartitionSpec("processes")), gather


def _send_message(about: str, *numbers: int) -> _Messages:
    """Sends a message without waiting for the other processes."""
    row = np.zeros([1, _SIZE], np.int32)
    row[0, : 1 + len(numbers)] = _checksum(about), *numbers
    split, gather = _exchange()
    return _Messages(about, gather(jax.make_array_from_process_local_data(split, row, (jax.process_count(), _SIZE))))


def _error_for(failed: np.ndarray) -> ProcessError:
    """Returns the error to raise when other processes have failed."""
    places = ", ".join(map(str, np.flatnonzero(failed)))
    return known_to_all_processes(
        ProcessError(f"Process {places} of {len(failed)} has failed. See the error in its own output.")
    )


_VOTES = "asks whether the run continues"


def report_failure(error: BaseException) -> None:
    """Tells the other processes, at their next call to `any_stops`, that this process failed."""
    with contextlib.suppress(Exception):  # The caller raises `error`.
        _send_message(_VOTES, _FAILED).read()
        known_to_all_processes(error)


def wait_for_all(where: str) -> None:
    """Waits until all processes reach this point. Does nothing if there is only one process."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"jaxloop {where}")


def gather_texts(text: str) -> list[str]:
    """Returns the texts of all processes, in process order.

    All processes must call this at the same point, each with its own text.
    """
    if jax.process_count() == 1:
        return [text]
    mine = np.frombuffer(text.encode(), np.uint8)
    lengths = np.ravel(multihost_utils.process_allgather(np.array([mine.size], np.int32)))
    padded = np.zeros(max(int(lengths.max()), 1), np.uint8)
    padded[: mine.size] = mine
    rows = np.reshape(multihost_utils.process_allgather(padded), [len(lengths), -1])
    return [row[:length].tobytes().decode() for row, length in zip(rows, lengths, strict=True)]


_SAME_PROGRAM = (
    "Start the same program with the same arguments in each process. For work in only one process, check "
    "jax.process_index() inside an action."
)


def check_same(what: str, lines: Sequence[str], remedy: str = _SAME_PROGRAM) -> None:
    """Raises an error in every process unless all processes pass the same lines.

    >>> check_same("A loop", ["batch size 8"])

    Raises:
      ValueError: If the lines of the processes differ. The error lists the differences.
    """
    texts = gather_texts(_without_addresses("\n".join(lines)))
    for place, text in enumerate(texts):
        if text != texts[0]:
            first, other = (dict(enumerate(each.split("\n"))) for each in (texts[0], text))
            numbers = range(max(len(first), len(other)))
            pairs = [(first.get(number, "(none)"), other.get(number, "(none)")) for number in numbers]
            shown = "\n".join(f"  {one} -> {two}" for one, two in pairs if one != two)
            raise known_to_all_processes(
                ValueError(
                    f"{what} is not the same in all processes. Differences (process 0 -> process {place}):\n{shown}\n"
                    f"{remedy}"
                )
            )


@final
class Job:
    """The processes that train together, all of which must call these methods at the same points.

    If there is only one process, the methods return its own values.

    Args:
      is_shared: Whether there are several processes.
      requests: An `Interruptible` with the signals that this process has received. Its `confirm` method is called when
        all processes know about a signal. If None, a new one is created.

    Attributes:
      is_shared: True if there are several processes.
      requests: The signals received by this process.

    >>> job = Job(False)
    >>> job.any_stops(True), job.gather([1, 2]), job.is_first
    (True, [[1, 2]], True)
    """

    def __init__(self, is_shared: bool, requests: interrupt.Interruptible | None = None):
        self.is_shared: bool = is_shared
        self.requests: interrupt.Interruptible = requests or interrupt.Interruptible(defers=is_shared)

    @property
    def is_first(self) -> bool:
        """True in the process that writes the job's files."""
        return not self.is_shared or distributed.is_first_process()

    def any_stops(self, stops: bool = False) -> bool:
        """Returns whether any process wants to stop here.

        The processes also tell each other which signals they have received.

        Raises:
          ProcessError: If another process failed at this point.
        """
        if not self.is_shared:
            return stops
        messages = _send_message(_VOTES, _OK, int(stops), self.requests.outermost.to_confirm).read()
        if np.any(messages[:, 0] == _FAILED):
            raise _error_for(messages[:, 0] == _FAILED)
        if messages[:, 2].any():
            self.requests.outermost.confirm(int(messages[:, 2].max()))
        return bool(messages[:, 1].any())

    def from_first_process(self, value: bool) -> bool:
        """Returns the value that the first process passed."""
        return bool(_send_message("asks the first process", int(value)).read()[0, 0]) if self.is_shared else value

    def gather(self, value: Any) -> list[Any]:
        """Returns the values of all processes, such as their listings of a directory, in process order.

        The values must be representable in JSON.
        """
        return list(map(json.loads, gather_texts(json.dumps(value)))) if self.is_shared else [value]

    def knows(self, error: BaseException) -> bool:
        """Returns whether all processes stopped at the same step because of this error."""
        return not self.is_shared or is_known_to_all_processes(error)

    def check_same(self, what: str, lines: Callable[[], Sequence[str]]) -> None:
        """Calls the function `check_same` if there are several processes."""
        if self.is_shared:
            check_same(what, lines())


@final
class JointReader:
    """Reads the same number of batches in all processes, and sums each batch's size over the processes.

    Each message covers the next few batches (about 50 ms of training), which are read from the dataset ahead of time.
    `held` counts the batches that were read ahead. If one process reaches the end of its data, raises an error, or
    receives Ctrl-C or SIGTERM, all processes learn of it at the same batch.

    Args:
      who: A description of the loop that reads the batches. It must be the same in all processes.
      read: A function that reads the next batch of this process.
      before_reading: A function that is called before batches are read from the dataset.
      count: A function that returns the number of examples in a batch.
      requests: The `Interruptible` with the signals that this process has received. Its `confirm` method is called when
        all processes know about a signal.
      secs: A function that returns the training time in this process, in seconds. All processes use the first process's
        time.
      on_difference: A function that is called in all processes, before they get such batches, if the batches of the
        processes differ in more than their numbers of rows. The step's hooks may make them alike.
      fill_to: A function that is called with the largest number of rows when the processes' batches differ in size, or
        None if all batches must have the same size.
      until_all_processes_end: Whether to continue until the datasets of all processes have ended. If True, a process
        whose dataset has ended reads batches without rows. If False, reading stops when the first dataset ends.
    """

    def __init__(
        self,
        who: str,
        read: Callable[[], types.Batch],
        *,
        before_reading: Callable[[], None],
        count: Callable[[types.Batch], int],
        requests: interrupt.Interruptible,
        secs: Callable[[], float],
        on_difference: Callable[[], None],
        fill_to: Callable[[int], None] | None,
        until_all_processes_end: bool,
    ):
        self._who, self._before_reading = who, before_reading
        self._read, self._count, self._requests, self._secs, self._fill_to = read, count, requests, secs, fill_to
        self._until_all_processes_end, self._on_difference = until_all_processes_end, on_difference
        self._form: tuple[Any, int] = (None, 0)  # What the newest batch consists of, and its checksum.
        self._own: deque[types.Batch] = deque()  # Read, but not in a message yet.
        self._sent: deque[tuple[_Messages, list[types.Batch], int]] = deque()
        self._agreed: deque[tuple[types.Batch, int, float, int]] = deque()
        # For each batch that was returned but not counted yet: the examples in all processes, and the time.
        self._returned: deque[tuple[int, float]] = deque()
        self._error: Exception | SystemExit | None = None  # The error in this process.
        self._end: Exception | SystemExit | None = None  # The error in all processes, to raise after `_agreed`.
        self._empty: types.Batch = None  # A batch without rows.
        self._left: float = math.inf
        self._next_size = 1
        self._num_sent = 0  # The number of batches in all messages.
        self._num_old = 0  # The number of pending messages from an earlier loop, which handled their signals.
        self._clock = 0.0, 0  # The seconds at the last message, and its number of batches.

    @property
    def held(self) -> int:
        """The number of batches that this process has read but not returned yet."""
        return len(self._own) + len(self._agreed) + sum(len(batches) for _, batches, _ in self._sent)

    def begin(self, limit: int | None, ahead: int) -> None:
        """Begins a loop of at most `limit` batches, the first `ahead` of which have already been returned."""
        coming = ahead + len(self._agreed) + sum(size for *_, size in self._sent)
        self._left = math.inf if limit is None else limit - coming
        while len(self._returned) > ahead:
            self._returned.popleft()
        self._num_old = len(self._sent)

    @property
    def next_examples(self) -> int:
        """The number of examples, across all processes, in the first batch that has been returned but not counted."""
        return self._returned[0][0]

    def __call__(self) -> types.Batch:
        while not self._agreed:
            if self._end is not None:
                error, self._end = self._end, None
                raise error
            if not self._sent:
                self._send()
            if self._left > 0:  # One message ahead, so that the replies have arrived when they are needed.
                self._send()
            self._receive()
        batch, examples, secs, most_rows = self._agreed.popleft()
        self._returned.append((examples, secs))
        if most_rows and self._fill_to is not None:
            self._fill_to(most_rows)
        return batch

    def counted(self, number: int) -> list[tuple[int, float]]:
        """Returns, for each of the next batches, the number of examples in all processes and the training seconds."""
        return [self._returned.popleft() for _ in range(number)]

    def _send(self) -> None:
        """Reads some batches, and sends a message about them."""
        size, batches, sizes = max(int(min(self._next_size, self._left)), 1), [], []
        if not self._own:
            self._before_reading()
        while len(batches) < size and (self._own or self._error is None):
            try:
                batch = self._own.popleft() if self._own else self._read()
                sizes += [checks.num_examples(batch) or 0, self._count(batch), self._checksum_of_form(batch)]
                batches.append(batch)
            except (Exception, SystemExit) as error:
                self._error = error
        self._left -= size
        if batches:
            self._empty = jax.tree.map(lambda leaf: leaf[:0] if np.ndim(leaf) else leaf, batches[-1])
        secs, (before, steps) = self._secs(), self._clock
        self._clock = secs, size
        per_step = max((secs - before) / max(steps, 1), 1e-6)
        next_size = int(np.clip(_SECS_BETWEEN / per_step, 1, _MAX_BATCHES))
        signum, clock = self._requests.outermost.to_confirm, map(int, np.array([secs]).view(np.int32))
        about = f"reads batches from the one after {self._num_sent} on, for {self._who}"
        self._num_sent += size
        replies = _send_message(about, self._message(), len(batches), signum, *clock, next_size, *sizes)
        self._sent.append((replies, batches, size))

    def _checksum_of_form(self, batch: types.Batch) -> int:
        """Returns a checksum of a batch's structure, dtypes and shapes without the number of rows."""
        leaves, structure = jax.tree.flatten(batch)
        form = [structure, *((getattr(x, "shape", ())[1:], getattr(x, "dtype", type(x))) for x in leaves)]
        if form != self._form[0]:
            self._form = form, _checksum(repr(form))
        return self._form[1]

    def _message(self) -> int:
        if self._error is None or self._own:
            return _OK
        if not isinstance(self._error, StopIteration):
            return _FAILED
        return _EMPTY if self._empty is None else _ENDED

    def _receive(self) -> None:
        """Receives messages about some batches, and queues the batches that all processes agree on."""
        replies, mine, _ = self._sent.popleft()
        messages = replies.read()
        status, num_read, self._next_size = messages[:, 0], messages[:, 1], int(messages[0, 5])
        secs = float(np.ascontiguousarray(messages[0, 3:5]).view(np.float64)[0])
        rows, examples, forms = np.moveaxis(messages[:, _HEAD - 1 :].reshape(len(messages), _MAX_BATCHES, 3), -1, 0)
        has_ended = (status == _ENDED) | (status == _EMPTY)
        stops = status == _FAILED if self._until_all_processes_end else status != _OK
        number = int(num_read[stops].min() if stops.any() else num_read.max())
        if stops.any() or has_ended.all():
            self._end = self._end_of_all_processes((status == _FAILED) & (num_read == number))
        for place in range(number):
            has_batch = num_read > place
            if len(set(forms[has_batch, place].tolist())) > 1:
                self._on_difference()
            sizes = np.where(has_batch, rows[:, place], 0)
            most_rows = 0 if np.all(sizes == sizes[0]) else int(sizes.max())
            problem = self._size_problem(sizes, status == _EMPTY) if most_rows else None
            if problem is not None:
                number, self._end = place, known_to_all_processes(problem)
                break
            batch = mine[place] if place < len(mine) else self._empty
            self._agreed.append((batch, int(examples[has_batch, place].sum()), secs, most_rows))
        signum, self._num_old = int(messages[:, 2].max()), max(self._num_old - 1, -1)
        if signum and self._num_old < 0:
            self._requests.outermost.confirm(signum)
        if self._end is not None:
            # Batches that this process read beyond the end, and its own error, are kept for the next loop.
            rest = [*mine[number:], *(batch for _, batches, _ in self._sent for batch in batches)]
            self._own.extendleft(reversed(rest))
            self._sent.clear()
            self._num_old = 0
            if isinstance(self._error, StopIteration) or self._error is self._end:
                self._error = None

    def _end_of_all_processes(self, failed: np.ndarray) -> Exception | SystemExit:
        """Returns the error for the processes that failed, or a `StopIteration` if none failed."""
        if not failed.any():
            return StopIteration()
        own = self._error if failed[jax.process_index()] else None
        return _error_for(failed) if own is None else known_to_all_processes(own)

    def _size_problem(self, sizes: np.ndarray, is_empty: np.ndarray) -> Exception | None:
        """Returns an error if batches of these sizes can't form one global batch, or None if they can."""
        what = f"The processes have batches of {', '.join(map(str, sizes))} rows for one step"
        if self._fill_to is None:
            return ValueError(
                f"{what}, but their sizes must be equal. Drop the remainder, or use a LossStep, which pads short "
                "batches (in training, with batch_size=...)."
            )
        if is_empty.any():
            return ValueError(
                f"{what}, and process {np.flatnonzero(is_empty)[0]} has not read any, so it can't make an empty batch "
                "of the same structure. Give each process at least one batch."
            )
        try:
            self._fill_to(int(sizes.max()))
        except ValueError as error:
            return error
        return None
