"""Many processes as one: what those of a job tell each other, so that all do the same at the same step.

Each process draws a part of each batch of its own, hears signals of its own, and meets errors of its own. Steps are run
by all of them or by none: who ran one more than the others would wait for ever. So they tell each other, in messages of
one size that all send at the same place of their programs, what each is about to do.
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

from jaxloop import checks, distributed, interrupt, types
from jaxloop.distributed import ProcessError

# What a process has to say in it; the last one that its data had no batch at all.
_WELL, _ENDED, _FAILED, _EMPTY = 0, 1, 2, 3
# Of how many batches one message tells at most, and of how many seconds of training.
_MOST_BATCHES = 16
_SECS_BETWEEN = 0.05
# A message: what about, as a checksum; what there is to say, batches, the signal, the clock in two parts, batches of
# the next message; then of each batch its rows and its examples.
_HEAD = 7
_SIZE = _HEAD + 2 * _MOST_BATCHES


def is_known_to_all_processes(error: BaseException) -> bool:
    """Returns whether all processes know of an error, and have stopped at the same step."""
    return getattr(error, "_jaxloop_is_known_everywhere", False)


def known_to_all_processes(error: Any) -> Any:
    """Notes that all processes meet an error at the same step; returns it."""
    error._jaxloop_is_known_everywhere = True
    return error


def is_shared(mesh: Mesh | None) -> bool:
    """Returns whether the devices of a mesh are those of several processes."""
    return mesh is not None and mesh.is_multi_process


class _Answers:
    """The answers of all to one message; read them when they are needed."""

    def __init__(self, about: str, sent: jax.Array):
        self._about, self._sent = about, sent

    def read(self) -> np.ndarray:
        """A row for each process, without what the message is about."""
        rows = np.asarray(self._sent.addressable_data(0))
        others = np.flatnonzero(rows[:, 0] != _checksum(self._about))
        if others.size:
            raise ProcessError(
                f"The processes of this job do not do the same: this one {self._about}, and process "
                f"{', '.join(map(str, others))} does something else. Give all of them the same loops, actions and "
                "schedules; what shall happen in one alone it decides inside an action, by jax.process_index()."
            )
        return rows[:, 1:]


def _checksum(text: str) -> int:
    return int(np.array(zlib.crc32(_without_addresses(text).encode()), np.uint32).view(np.int32))


def _without_addresses(text: str) -> str:
    """An object without a text of its own has its address in it."""
    return re.sub(r" at 0x[0-9a-f]+", "", text)


@functools.cache
def _exchange() -> tuple[NamedSharding, Callable[[jax.Array], jax.Array]]:
    """Returns the layout of a message, a row in each process, and the function that gives all rows to all."""
    firsts = {device.process_index: device for device in reversed(jax.devices())}
    mesh = Mesh(np.array([firsts[place] for place in range(jax.process_count())]), ("processes",))
    gather = jax.jit(lambda rows: rows, out_shardings=NamedSharding(mesh, PartitionSpec()))
    return NamedSharding(mesh, PartitionSpec("processes")), gather


def _tell(about: str, *numbers: int) -> _Answers:
    """Sends a message; does not wait for the answers."""
    row = np.zeros([1, _SIZE], np.int32)
    row[0, : 1 + len(numbers)] = _checksum(about), *numbers
    split, gather = _exchange()
    return _Answers(about, gather(jax.make_array_from_process_local_data(split, row, (jax.process_count(), _SIZE))))


def _error_for(failed: np.ndarray) -> ProcessError:
    """The error for what another process has told."""
    places = ", ".join(map(str, np.flatnonzero(failed)))
    return known_to_all_processes(
        ProcessError(f"Process {places} of {len(failed)} has failed; what it has met is in its own output.")
    )


_VOTES = "asks whether the run goes on"


def tell_failure(error: BaseException) -> None:
    """Tells the others, where they ask `any_stops`, that this process has failed there."""
    with contextlib.suppress(Exception):  # The error at hand is the one to be told.
        _tell(_VOTES, _FAILED).read()
        known_to_all_processes(error)


def wait_for_all(where: str) -> None:
    """Waits until all processes are here; does nothing in a process that is alone."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"jaxloop {where}")


def gather_texts(text: str) -> list[str]:
    """The texts of all processes, in their order; each gives one, at the same place."""
    if jax.process_count() == 1:
        return [text]
    mine = np.frombuffer(text.encode(), np.uint8)
    lengths = np.ravel(multihost_utils.process_allgather(np.array([mine.size], np.int32)))
    padded = np.zeros(max(int(lengths.max()), 1), np.uint8)
    padded[: mine.size] = mine
    rows = np.reshape(multihost_utils.process_allgather(padded), [len(lengths), -1])
    return [row[:length].tobytes().decode() for row, length in zip(rows, lengths, strict=True)]


def check_same(what: str, lines: Sequence[str]) -> None:
    """Raises in all processes where what they are about to do differs, with the lines that do.

    >>> check_same("A loop", ["batch size 8"])

    Raises:
      ValueError: the lines of the processes differ.
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
                    f"{what} is not the same in all processes. What differs (process 0 -> process {place}):\n{shown}\n"
                    "Start the same program with the same arguments in each; what shall happen in one alone it decides "
                    "inside an action, by jax.process_index()."
                )
            )


@final
class Job:
    """The processes that train together: what one of them asks, all do at the same place. One alone answers itself.

    Args:
      is_shared: whether there are several.
      requests: which signals have come here; it is told what all know. None for one of its own.

    Attributes:
      is_shared: whether there are several.
      requests: which signals have come here.

    >>> job = Job(False)
    >>> job.any_stops(True), job.gather([1, 2]), job.is_first
    (True, [[1, 2]], True)
    """

    def __init__(self, is_shared: bool, requests: interrupt.Interruptible | None = None):
        self.is_shared: bool = is_shared
        self.requests: interrupt.Interruptible = requests or interrupt.Interruptible(defers=is_shared)

    @property
    def is_first(self) -> bool:
        """True in the process that writes what is written once."""
        return not self.is_shared or distributed.is_first_process()

    def any_stops(self, stops: bool = False) -> bool:
        """Returns whether one of the processes wants to stop here; without an argument, hears of signals of others.

        Raises:
          ProcessError: another process has failed here.
        """
        if not self.is_shared:
            return stops
        told = _tell(_VOTES, _WELL, int(stops), self.requests.outermost.unconfirmed or 0).read()
        if np.any(told[:, 0] == _FAILED):
            raise _error_for(told[:, 0] == _FAILED)
        if told[:, 2].any():
            self.requests.outermost.confirm(int(told[:, 2].max()))
        return bool(told[:, 1].any())

    def from_first_process(self, value: bool) -> bool:
        """Returns what the first process says."""
        return bool(_tell("asks what the first process says", int(value)).read()[0, 0]) if self.is_shared else value

    def gather(self, value: Any) -> list[Any]:
        """Returns what all have, such as what each sees in a directory, in their order; of what JSON can hold."""
        return list(map(json.loads, gather_texts(json.dumps(value)))) if self.is_shared else [value]

    def knows(self, error: BaseException) -> bool:
        """Returns whether all have stopped for this error, at the same step."""
        return not self.is_shared or is_known_to_all_processes(error)

    def check_same(self, what: str, lines: Callable[[], Sequence[str]]) -> None:
        """See `check_same`."""
        if self.is_shared:
            check_same(what, lines())


@final
class JointReader:
    """Draws batches in all processes, as many in each, and tells of each what it is in all.

    The processes tell each other some batches in advance, those of about 50 ms, what they have drawn. So to draw here
    is to draw ahead from the dataset, and `held` says how far. What one of them meets all know at the same batch: the
    end of its data, an error, Ctrl-C or SIGTERM.

    Args:
      who: for whom it draws, the same in all processes.
      draw: draws the next batch of this process.
      before_reading: called before some batches are drawn from the dataset.
      count: counts its examples.
      requests: which signals have come here; it is told when all know.
      secs: the seconds of training in this process. Those of the first count for all.
      fill_to: called with the most rows that a batch has in one of the processes, where they may differ; None where all
        must be of one size.
      until_all_processes_end: Whether to continue until the datasets of all processes have ended; the others then read
        batches without rows. Otherwise the end of one dataset ends all.
    """

    def __init__(
        self,
        who: str,
        draw: Callable[[], types.Batch],
        *,
        before_reading: Callable[[], None],
        count: Callable[[types.Batch], int],
        requests: interrupt.Interruptible,
        secs: Callable[[], float],
        fill_to: Callable[[int], None] | None,
        until_all_processes_end: bool,
    ):
        self._who, self._before_reading = who, before_reading
        self._draw, self._count, self._requests, self._secs, self._fill_to = draw, count, requests, secs, fill_to
        self._until_all_processes_end = until_all_processes_end
        self._own: deque[types.Batch] = deque()  # ReadBatch, and not told of.
        self._told: deque[tuple[_Answers, list[types.Batch], int]] = deque()
        self._agreed: deque[tuple[types.Batch, int, float, int]] = deque()
        self._handed_out: deque[tuple[int, float]] = deque()  # Examples in all processes, and the time; not counted.
        self._error: Exception | SystemExit | None = None  # Of this process.
        self._end: Exception | SystemExit | None = None  # Of all, after what is agreed on.
        self._empty: types.Batch = None  # A batch without a row.
        self._left: float = math.inf
        self._next_size = 1
        self._num_told = 0  # Batches told of.
        self._num_old = 0  # Messages of an earlier series, which has heeded their signals.
        self._clock = 0.0, 0  # At the last message, and of how many batches that was.

    @property
    def held(self) -> int:
        """The number of batches of this process that were drawn, and not handed out."""
        return len(self._own) + len(self._agreed) + sum(len(batches) for _, batches, _ in self._told)

    def begin(self, limit: int | None, ahead: int) -> None:
        """Begins a series of at most so many batches, of which so many were handed out already."""
        coming = ahead + len(self._agreed) + sum(size for *_, size in self._told)
        self._left = math.inf if limit is None else limit - coming
        while len(self._handed_out) > ahead:
            self._handed_out.popleft()
        self._num_old = len(self._told)

    @property
    def next_examples(self) -> int:
        """The examples in all processes of the first batch that was handed out and not counted."""
        return self._handed_out[0][0]

    def __call__(self) -> types.Batch:
        while not self._agreed:
            if self._end is not None:
                error, self._end = self._end, None
                raise error
            if not self._told:
                self._send()
            if self._left > 0:  # One ahead, for its answers to be there when they are needed.
                self._send()
            self._receive()
        batch, examples, secs, most_rows = self._agreed.popleft()
        self._handed_out.append((examples, secs))
        if most_rows and self._fill_to is not None:
            self._fill_to(most_rows)
        return batch

    def counted(self, number: int) -> list[tuple[int, float]]:
        """Returns, of the batches handed out first, the examples in all processes, and the seconds of training then."""
        return [self._handed_out.popleft() for _ in range(number)]

    def _send(self) -> None:
        """Draws some batches and tells the others what came."""
        size, batches, sizes = max(int(min(self._next_size, self._left)), 1), [], []
        if not self._own:
            self._before_reading()
        while len(batches) < size and (self._own or self._error is None):
            try:
                batch = self._own.popleft() if self._own else self._draw()
                sizes += [checks.num_examples(batch) or 0, self._count(batch)]
                batches.append(batch)
            except (Exception, SystemExit) as error:
                self._error = error
        self._left -= size
        if batches:
            self._empty = jax.tree.map(lambda leaf: leaf[:0] if np.ndim(leaf) else leaf, batches[-1])
        secs, (before, steps) = self._secs(), self._clock
        self._clock = secs, size
        per_step = max((secs - before) / max(steps, 1), 1e-6)
        next_size = int(np.clip(_SECS_BETWEEN / per_step, 1, _MOST_BATCHES))
        signum, clock = self._requests.outermost.unconfirmed or 0, map(int, np.array([secs]).view(np.int32))
        about = f"draws batches from the one after {self._num_told} on, for {self._who}"
        self._num_told += size
        answers = _tell(about, self._message(), len(batches), signum, *clock, next_size, *sizes)
        self._told.append((answers, batches, size))

    def _message(self) -> int:
        if self._error is None or self._own:
            return _WELL
        if not isinstance(self._error, StopIteration):
            return _FAILED
        return _EMPTY if self._empty is None else _ENDED

    def _receive(self) -> None:
        """Reads what all have told of some batches: those that all have may be handed out."""
        answers, mine, _ = self._told.popleft()
        told = answers.read()
        said, drawn, self._next_size = told[:, 0], told[:, 1], int(told[0, 5])
        secs = float(np.ascontiguousarray(told[0, 3:5]).view(np.float64)[0])
        rows, examples = np.moveaxis(told[:, _HEAD - 1 :].reshape(len(told), _MOST_BATCHES, 2), -1, 0)
        has_ended = (said == _ENDED) | (said == _EMPTY)
        stops = said == _FAILED if self._until_all_processes_end else said != _WELL
        number = int(drawn[stops].min() if stops.any() else drawn.max())
        if stops.any() or has_ended.all():
            self._end = self._end_of_all_processes((said == _FAILED) & (drawn == number))
        for place in range(number):
            has_batch = drawn > place
            sizes = np.where(has_batch, rows[:, place], 0)
            most_rows = 0 if np.all(sizes == sizes[0]) else int(sizes.max())
            problem = self._why_not(sizes, said == _EMPTY) if most_rows else None
            if problem is not None:
                number, self._end = place, known_to_all_processes(problem)
                break
            batch = mine[place] if place < len(mine) else self._empty
            self._agreed.append((batch, int(examples[has_batch, place].sum()), secs, most_rows))
        signum, self._num_old = int(told[:, 2].max()), max(self._num_old - 1, -1)
        if signum and self._num_old < 0:
            self._requests.outermost.confirm(signum)
        if self._end is not None:
            # What this process has drawn beyond the end stays for another series, and so does an error of its own.
            rest = [*mine[number:], *(batch for _, batches, _ in self._told for batch in batches)]
            self._own.extendleft(reversed(rest))
            self._told.clear()
            self._num_old = 0
            if isinstance(self._error, StopIteration) or self._error is self._end:
                self._error = None

    def _end_of_all_processes(self, failed: np.ndarray) -> Exception | SystemExit:
        """Returns the error that ends the series here, where these have failed; where none has, the end of the data."""
        if not failed.any():
            return StopIteration()
        own = self._error if failed[jax.process_index()] else None
        return _error_for(failed) if own is None else known_to_all_processes(own)

    def _why_not(self, sizes: np.ndarray, is_empty: np.ndarray) -> Exception | None:
        """Returns the reason why batches of different sizes can't be made one; None where they can."""
        what = f"The processes have batches of {', '.join(map(str, sizes))} rows for one step"
        if self._fill_to is None:
            return ValueError(
                f"{what}, and here those must be of one size. Drop the remainder; or take a LossStep, which fills "
                "short batches up, in training with batch_size=..."
            )
        if is_empty.any():
            return ValueError(
                f"{what}, and process {np.flatnonzero(is_empty)[0]} has had none, so that it does not know what to put "
                "in its place. Give each process a batch at least."
            )
        try:
            self._fill_to(int(sizes.max()))
        except ValueError as error:
            return error
        return None
