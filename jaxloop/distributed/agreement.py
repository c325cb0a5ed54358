"""Communication among the processes of a job, so that all of them do the same thing at the same step.

Each process reads its own part of each batch, receives its own signals and raises its own errors. However, a step must
run in all processes or in none: a process that ran one more step than the others would wait for them forever. The
processes therefore send each other messages about what they will do next. All messages have the same size, and all
processes send them at the same points in the program.
"""

import contextlib
import functools
import itertools
import json
import math
import re
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxloop import distributed, types
from jaxloop.base import checks, timing
from jaxloop.distributed import ProcessError, interrupt

# The status of a process: it has more data, it failed, its data ended, or its data ended before the first batch.
OK, FAILED, ENDED, EMPTY = range(4)
# The maximum number of batches in one vote, and the seconds of training that they should take.
_MAX_BATCHES = 16
_SECS_PER_VOTE = 0.05
# The description of a batch in a vote. The form is a checksum of the batch's structure, dtypes and row shapes.
_BATCH = np.dtype([(name, np.uint32) for name in ("rows", "examples", "form")])
# A message from one process. Its topic is a checksum of a description of the message.
_HEAD = [(name, np.uint32) for name in ("topic", "status", "number", "signum")]
MESSAGE = np.dtype([*_HEAD, ("secs", np.float64), ("batches", _BATCH, _MAX_BATCHES)])


def known_to_all_processes(error: Any) -> Any:
    """Marks an error as one that all processes know about, and that therefore stops them all at the same step.

    Returns the error.
    """
    error._jaxloop_is_known_everywhere = True
    return error


def is_shared(mesh: Mesh | None) -> bool:
    """Returns True if the devices of a mesh belong to more than one process."""
    return mesh is not None and mesh.is_multi_process


class _Messages:
    """The messages that all processes send at one point in the program. `read` waits until they have arrived."""

    def __init__(self, about: str, sent: jax.Array):
        self._about, self._sent = about, sent

    def read(self) -> np.ndarray:
        """Returns the messages, one per process, as an array of records.

        Raises:
          ProcessError: If another process has sent its message at a different point in the program.
        """
        messages = np.asarray(self._sent.addressable_data(0)).view(MESSAGE)[:, 0]
        others = np.flatnonzero(messages["topic"] != _checksum(self._about))
        if others.size:
            raise ProcessError(
                f"The processes of this job diverged: this one {self._about}, but process "
                f"{', '.join(map(str, others))} does something else. Give all processes the same loops, actions and "
                "schedules. For work in only one process, check jax.process_index() inside an action."
            )
        return messages


def _checksum(text: str) -> int:
    return zlib.crc32(_without_addresses(text).encode())


def _without_addresses(text: str) -> str:
    """Removes memory addresses from a string, because they differ between processes.

    For example, the default `repr` of an object contains its address.
    """
    return re.sub(r" at 0x[0-9a-f]+", "", text)


@functools.cache
def _exchange() -> tuple[NamedSharding, Callable[[jax.Array], jax.Array]]:
    """Returns the sharding and the function that are used to exchange messages.

    The sharding is for an array in which each process holds one row. This row is the message that the process sends.
    The function copies all rows to every process.
    """
    firsts = {device.process_index: device for device in reversed(jax.devices())}
    mesh = Mesh(np.array([firsts[place] for place in range(jax.process_count())]), ("processes",))
    gather = jax.jit(lambda rows: rows, out_shardings=NamedSharding(mesh, PartitionSpec()))
    return NamedSharding(mesh, PartitionSpec("processes")), gather


def _send_message(about: str, **fields: Any) -> _Messages:
    """Sends a message from this process to all processes, without waiting for the messages that they send.

    Args:
      about: A description of what this process does at this point. It must be the same in all processes.
      **fields: The values of the message's fields.
    """
    message = np.zeros(1, MESSAGE)
    for name, value in {"topic": _checksum(about), **fields}.items():
        message[name] = value
    row, (split, gather) = message.view(np.int32)[None], _exchange()
    shape = jax.process_count(), row.size
    return _Messages(about, gather(jax.make_array_from_process_local_data(split, row, shape)))


def _error_for(failed: np.ndarray) -> ProcessError:
    """Returns an error that names the failed processes. `failed` has one bool per process."""
    places = ", ".join(map(str, np.flatnonzero(failed)))
    return known_to_all_processes(
        ProcessError(f"Process {places} of {len(failed)} has failed. See the error in its own output.")
    )


_VOTES = "asks whether the run continues"


def report_failure(error: BaseException) -> None:
    """Notifies the other processes that this process has failed. Their next call to `Job.any_stops` raises an error."""
    with contextlib.suppress(Exception):  # The caller raises `error`.
        _send_message(_VOTES, status=FAILED).read()
        known_to_all_processes(error)


def wait_for_all(where: str) -> None:
    """Waits until all processes have called this function with the same `where`.

    If there is only one process, this function does nothing.
    """
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"jaxloop {where}")


def gather_texts(text: str) -> list[str]:
    """Returns the strings that all processes passed to this function, in process order.

    All processes must call this function at the same point, each with its own string.
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

    In the error message, `what` names the thing that the lines describe, and `remedy` explains what to do.

    >>> check_same("A loop", ["batch size 8"])

    Raises:
      ValueError: If the lines of the processes differ. The message lists the differences.
    """
    texts = gather_texts(_without_addresses("\n".join(lines)))
    for place, text in enumerate(texts):
        if text != texts[0]:
            pairs = itertools.zip_longest(texts[0].split("\n"), text.split("\n"), fillvalue="(none)")
            shown = "\n".join(f"  {one} -> {two}" for one, two in pairs if one != two)
            raise known_to_all_processes(
                ValueError(
                    f"{what} is not the same in all processes. Differences (process 0 -> process {place}):\n{shown}\n"
                    f"{remedy}"
                )
            )


@final
class Job:
    """The processes that train together. All of them must call the methods of this class at the same points.

    If there is only one process, the results of the methods depend only on the values that this process passes.

    Args:
      is_shared: Whether there are several processes.
      requests: An `Interruptible` with the signals that this process has received. Its `confirm` method is called when
        all processes know about a signal. If None, a new `Interruptible` is created.

    Attributes:
      is_shared: True if there are several processes.
      requests: The `Interruptible` with the signals that this process has received.

    >>> job = Job(False)
    >>> job.any_stops(True), job.gather([1, 2]), job.is_first
    (True, [[1, 2]], True)
    """

    def __init__(self, is_shared: bool, requests: interrupt.Interruptible | None = None):
        self.is_shared: bool = is_shared
        self.requests: interrupt.Interruptible = requests or interrupt.Interruptible(defers=is_shared)

    @property
    def is_first(self) -> bool:
        """True in the first (or only) process, which writes the job's files."""
        return not self.is_shared or distributed.is_first_process()

    def send(self, about: str, **message: Any) -> _Messages:
        """Sends a message to all processes, along with this process's unconfirmed signal or pause request, if any.

        Pass the returned object to `receive` to get the messages of all processes.
        """
        return _send_message(about, signum=self.requests.outermost.to_confirm, **message)

    def receive(self, messages: _Messages) -> np.ndarray:
        """Waits for the messages from all processes and returns them.

        If a message reports a signal or a pause request, that signal or request takes effect in this process; see
        `Interruptible.confirm`.
        """
        received = messages.read()
        if received["signum"].any():
            self.requests.outermost.confirm(int(received["signum"].max()))
        return received

    def any_stops(self, stops: bool = False) -> bool:
        """Returns True if at least one process passes `stops=True`.

        The processes also tell each other which signals they have received.

        Raises:
          ProcessError: If another process has failed and has called `report_failure`.
        """
        if not self.is_shared:
            return stops
        votes = self.receive(self.send(_VOTES, number=int(stops)))
        failed = votes["status"] == FAILED
        if failed.any():
            raise _error_for(failed)
        return bool(votes["number"].any())

    def from_first_process(self, value: bool) -> bool:
        """Returns the value that the first process passed to this method."""
        if not self.is_shared:
            return value
        return bool(_send_message("asks the first process", number=int(value)).read()["number"][0])

    def gather(self, value: Any) -> list[Any]:
        """Returns the values that all processes passed to this method, in process order.

        The values must be JSON-serializable.
        """
        return list(map(json.loads, gather_texts(json.dumps(value)))) if self.is_shared else [value]

    def knows(self, error: BaseException) -> bool:
        """Returns True if all processes know about the given error and therefore stop at the same step.

        Always True if there is only one process.
        """
        return not self.is_shared or getattr(error, "_jaxloop_is_known_everywhere", False)

    def check_same(self, what: str, lines: Callable[[], Sequence[str]]) -> None:
        """If there are several processes, passes `what` and the result of `lines()` to the function `check_same`."""
        if self.is_shared:
            check_same(what, lines())


@final
class Pace(NamedTuple):
    """The number of batches per vote, and the time of the latest vote. (`JointReader` explains votes.)

    The number of batches is adjusted so that training on them takes about 50 ms. Signals therefore take effect quickly.

    >>> Pace(size=4, secs=7.0).at(7.02), Pace(size=4, secs=7.0).at(8.0)
    (Pace(size=8, secs=7.02), Pace(size=2, secs=8.0))

    Attributes:
      size: The number of batches in the next vote.
      secs: The training time, in seconds, at which the first process sent the latest vote.
    """

    size: int = 1
    secs: float = 0.0

    def at(self, secs: float) -> "Pace":
        """Returns the new pace, given the training time at which the first process sent the latest vote."""
        size = self.size * 2 if secs - self.secs < _SECS_PER_VOTE else self.size // 2
        return Pace(min(max(size, 1), _MAX_BATCHES), secs)


def agree(votes: np.ndarray, *, until_all_end: bool, fill_to: Callable[[int], None] | None) -> list[int | Exception]:
    """Combines the processes' votes into a plan that all processes follow.

    Returns a list with the global number of examples in each of the next batches. If reading must stop after these
    batches, the last item of the list is the exception to raise: a `StopIteration` at the end of the data, a
    `ProcessError` if a process has failed, or a `ValueError` if the processes' batches can't form one global batch.

    Args:
      votes: The votes of all processes.
      until_all_end: See `JointReader`.
      fill_to: A function that sets the number of rows to which short batches are padded, or None if batches are never
        padded. If the processes' batches differ in size, this function is called with the largest number of rows. The
        function raises a `ValueError` if the batches can't be padded to this number.
    """
    status, number, batches = votes["status"], votes["number"], votes["batches"]
    stops = status == FAILED if until_all_end else status != OK
    size = int(number[stops].min() if stops.any() else number.max())
    for place, rows in enumerate(batches["rows"].T[:size]):
        if np.any(rows != rows[0]) and (problem := _size_problem(rows, status == EMPTY, fill_to)):
            return [*batches["examples"].sum(0)[:place].tolist(), known_to_all_processes(problem)]
    found: list[int | Exception] = batches["examples"].sum(0)[:size].tolist()
    if stops.any() or np.all(status >= ENDED):
        failed = (status == FAILED) & (number == size)
        found.append(_error_for(failed) if failed.any() else StopIteration())
    return found


def _size_problem(rows: np.ndarray, is_empty: np.ndarray, fill_to: Callable[[int], None] | None) -> ValueError | None:
    what = f"The processes have batches of {', '.join(map(str, rows))} rows for one step"
    if fill_to is None:
        return ValueError(
            f"{what}, but their sizes must be equal. Drop the remainder, or use a LossStep, which pads short "
            "batches (in training, with batch_size=...)."
        )
    if is_empty.any():
        return ValueError(f"{what}, and process {is_empty.argmax()} has none to pad. Give each process at least one.")
    try:
        fill_to(int(rows.max()))
    except ValueError as error:
        return error
    return None


@functools.lru_cache
def _checksum_of_form(*form: Any) -> int:
    return _checksum(repr(form))


@final
class OwnBatches:
    """The batches that this process reads ahead, so that the processes can vote on them; see `JointReader`.

    Args:
      read: A function that reads the next batch.
      runner: The `Runner` of the step that processes the batches.
      stopwatch: The loop's stopwatch, which measures the training time and the time spent reading.

    Attributes:
      runner: The `Runner` of the step.
      ahead: The batches that have been read but not returned yet. Each batch is stored with the record that describes
        it in a vote.
    """

    def __init__(self, read: Callable[[], types.Batch], runner: Any, stopwatch: timing.Stopwatch):
        self._read, self._stopwatch = read, stopwatch
        self.runner: Any = runner
        self.ahead: deque[tuple[types.Batch, tuple[int, int, int]]] = deque()
        self._newest: types.Batch = None  # None before the first batch.
        self._error: Exception | SystemExit | None = None  # The exception that comes after these batches.

    def vote(self, start: int, size: int) -> dict[str, Any]:
        """Returns the fields of this process's vote on `size` batches of `ahead`, beginning at index `start`.

        If `ahead` has too few batches, reads more of them first. The vote covers fewer than `size` batches if the data
        ends or an error occurs.
        """
        records = np.zeros(_MAX_BATCHES, _BATCH)
        try:
            while len(self.ahead) < start + size and self._error is None:
                self._read_one()
        except (Exception, SystemExit) as error:
            self._error = error
        secs = self._stopwatch.training_secs()
        found = [record for _, record in itertools.islice(self.ahead, start, start + size)]
        records[: len(found)] = found
        at_end = EMPTY if self._newest is None else ENDED
        status = OK if len(found) == size else at_end if isinstance(self._error, StopIteration) else FAILED
        return {"status": status, "number": len(found), "secs": secs, "batches": records}

    def _read_one(self) -> None:
        batch = self._read()
        leaves, structure = jax.tree.flatten(batch)
        form = [(tuple(getattr(x, "shape", ())[1:]), getattr(x, "dtype", type(x))) for x in leaves]
        record = checks.num_examples(batch) or 0, self.runner.count_examples(batch), _checksum_of_form(structure, *form)
        self.ahead.append((batch, record))
        self._newest = batch

    def take(self) -> types.Batch:
        """Removes the next batch from `ahead` and returns it.

        If `ahead` is empty because the data has ended, returns a batch without rows.
        """
        if self.ahead:
            return self.ahead.popleft()[0]
        return jax.tree.map(lambda leaf: leaf[:0] if np.ndim(leaf) else leaf, self._newest)

    def exception(self, agreed: Exception) -> Exception | SystemExit:
        """Returns the exception that this process raises when all processes stop.

        If `ahead` is empty, and reading the next batch raised an error in this process, returns that error. Otherwise,
        including at the end of the data, returns `agreed`, the exception on which all processes agreed.
        """
        if self.ahead:
            return agreed
        own, self._error = self._error, None
        return agreed if own is None or isinstance(own, StopIteration) else known_to_all_processes(own)


@final
class JointReader:
    """Reads the same number of batches in all processes, and computes the total number of examples in each step.

    Each process reads a few batches ahead, and the processes vote on these batches. A vote is a message from one
    process to all others. It contains the sizes of the sender's batches, and tells the others whether the sender has
    reached the end of its data, raised an error, or received Ctrl-C or SIGTERM. All processes can thus stop at the same
    batch.

    Args:
      who: A description of the loop that reads the batches. It must be the same in all processes.
      own: The batches of this process.
      job: The processes that train together.
      until_all_end: Whether to continue until the datasets of all processes have ended. If True, a process whose
        dataset has ended receives batches without rows. If False, reading stops when the first dataset ends.
    """

    def __init__(self, who: str, own: OwnBatches, job: Job, *, until_all_end: bool):
        self._who, self._own, self._job, self._until_all_end = who, own, job, until_all_end
        self._agreed: deque[int | Exception] = deque()
        self._sent: tuple[_Messages, int] | None = None  # The next vote, and its number of batches.
        self._left: float = math.inf  # The number of batches to vote on until the loop ends.
        self._pace = Pace()

    @property
    def held(self) -> int:
        """The number of batches that this process has read but not returned yet."""
        return len(self._own.ahead)

    @property
    def secs(self) -> float:
        """The training time, in seconds, on which all processes agree.

        This is the first process's training time when it sent the latest vote.
        """
        return self._pace.secs

    def begin(self, limit: float) -> None:
        """Prepares for a loop that reads at most `limit` batches. Discards earlier votes and their signals."""
        self._agreed.clear()
        self._sent, self._left = None, limit

    def __call__(self) -> tuple[types.Batch, int]:
        """Returns the next batch of this process, and the total number of examples in all processes' next batches."""
        while not self._agreed:
            sent, size = self._sent or self._send(0)
            # One vote ahead, so that the replies have arrived when they are needed.
            self._sent = self._send(size) if self._left > 0 else None
            self._receive(sent)
        examples = self._agreed.popleft()
        if isinstance(examples, Exception):
            self.begin(self._left)
            raise self._own.exception(examples)
        return self._own.take(), examples

    def _send(self, start: int) -> tuple[_Messages, int]:
        """Sends this process's vote on the batches read ahead, beginning with the batch at index `start`.

        Earlier votes cover the batches before this index.

        Returns a pair `(votes, size)`. `votes` contains the votes of all processes, which need not have arrived yet.
        Each process's vote covers at most `size` batches.
        """
        size = int(max(min(self._pace.size, self._left), 1))
        self._left -= size
        about = f"reads the next {size} batches for {self._who}"
        return self._job.send(about, **self._own.vote(start, size)), size

    def _receive(self, sent: _Messages) -> None:
        votes, runner = self._job.receive(sent), self._own.runner
        self._pace = self._pace.at(float(votes["secs"][0]))
        forms = votes["batches"]["form"]
        if np.any((forms != forms.max(0)) & (forms > 0)):
            runner.batch_watch.may_differ = True  # The step's hooks may make them alike.
        self._agreed.extend(agree(votes, until_all_end=self._until_all_end, fill_to=runner.filler()))
