"""Many processes as one: what those of a job tell each other, so that all do the same at the same step.

Each process draws a part of each batch of its own, hears signals of its own, and meets errors of its own. Steps are run
by all of them or by none: who ran one more than the others would wait for ever. So they tell each other, in messages of
one size that all send at the same place of their programs, what each is about to do.
"""

import functools
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxloop import checks, interrupt, types
from jaxloop.distributed import ProcessError as ProcessError

# What a message is about.
_DRAWS, _VOTES = 1, 2
_ABOUT = {_DRAWS: "draws batches", _VOTES: "asks whether the run goes on"}
# What a process has to say in it; the last one that its data had no batch at all.
_WELL, _ENDED, _FAILED, _EMPTY = 0, 1, 2, 3
# Of how many batches one message tells at most, and of how many seconds of training.
_MOST_BATCHES = 16
_SECS_BETWEEN = 0.05
# A message: what about, what there is to say, batches, the signal, the clock in two parts, batches of the next message;
# then of each batch its rows and its examples.
_HEAD = 7
_SIZE = _HEAD + 2 * _MOST_BATCHES


def is_known_to_all(error: BaseException) -> bool:
    """Whether all processes know of an error, and have stopped at the same step."""
    return getattr(error, "_jaxloop_is_known_to_all", False)


def _known(error: Any) -> Any:
    error._jaxloop_is_known_to_all = True
    return error


def is_shared(mesh: Mesh | None) -> bool:
    """Whether the devices of a mesh are those of several processes."""
    return mesh is not None and mesh.is_multi_process


class _Answers:
    """What all have said to one message; to be read when it is needed."""

    def __init__(self, about: int, sent: jax.Array):
        self._about, self._sent = about, sent

    def read(self) -> np.ndarray:
        """A row for each process, without what the message is about."""
        rows = np.asarray(self._sent.addressable_data(0))
        if np.any(rows[:, 0] != self._about):
            told = ", ".join(f"process {place} {_ABOUT.get(about, '?')}" for place, about in enumerate(rows[:, 0]))
            raise ProcessError(
                f"The processes of this job do not do the same: {told}. Give all of them the same loops, actions and "
                "schedules; what shall happen in one alone it decides inside an action, by jax.process_index()."
            )
        return rows[:, 1:]


@functools.cache
def _exchange() -> tuple[NamedSharding, Callable[[jax.Array], jax.Array]]:
    """Where a message is, a row in each process; and what gives all rows to all."""
    firsts = {device.process_index: device for device in reversed(jax.devices())}
    mesh = Mesh(np.array([firsts[place] for place in range(jax.process_count())]), ("processes",))
    gather = jax.jit(lambda rows: rows, out_shardings=NamedSharding(mesh, PartitionSpec()))
    return NamedSharding(mesh, PartitionSpec("processes")), gather


def _tell(about: int, *numbers: int) -> _Answers:
    """Sends a message; does not wait for the answers."""
    row = np.zeros([1, _SIZE], np.int32)
    row[0, : 1 + len(numbers)] = about, *numbers
    split, gather = _exchange()
    return _Answers(about, gather(jax.make_array_from_process_local_data(split, row, (jax.process_count(), _SIZE))))


def _error_for(failed: np.ndarray) -> ProcessError:
    """The error for what another process has told."""
    places = ", ".join(map(str, np.flatnonzero(failed)))
    return _known(ProcessError(f"Process {places} of {len(failed)} has failed; what it has met is in its own output."))


def any_stops(stops: bool) -> bool:
    """Whether one of the processes wants to stop here; all ask at the same place.

    Raises:
      ProcessError: another process has failed here.
    """
    told = _tell(_VOTES, _WELL, int(stops)).read()
    if np.any(told[:, 0] == _FAILED):
        raise _error_for(told[:, 0] == _FAILED)
    return bool(told[:, 1].any())


def tell_failure(error: BaseException) -> None:
    """Tells the others, where they ask `any_stops`, that this process has failed there."""
    _tell(_VOTES, _FAILED).read()
    _known(error)


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
    texts = gather_texts("\n".join(lines))
    for place, text in enumerate(texts):
        if text != texts[0]:
            first, other = (dict(enumerate(each.split("\n"))) for each in (texts[0], text))
            numbers = range(max(len(first), len(other)))
            pairs = [(first.get(number, "(none)"), other.get(number, "(none)")) for number in numbers]
            shown = "\n".join(f"  {one} -> {two}" for one, two in pairs if one != two)
            raise _known(
                ValueError(
                    f"{what} is not the same in all processes. What differs (process 0 -> process {place}):\n{shown}\n"
                    "Start the same program with the same arguments in each; what shall happen in one alone it decides "
                    "inside an action, by jax.process_index()."
                )
            )


class JointDraw:
    """Draws batches in all processes, as many in each, and tells of each what it is in all.

    The processes tell each other some batches in advance, those of about 50 ms, what they have drawn. So to draw here
    is to draw ahead from the dataset, and `held` says how far. What one of them meets all know at the same batch: the
    end of its data, an error, Ctrl-C or SIGTERM.

    Args:
      draw: draws the next batch of this process.
      count: counts its examples.
      requests: which signals have come here; it is told when all know.
      secs: the seconds of training in this process. Those of the first count for all.
      fill_to: called with the most rows that a batch has in one of the processes, where they may differ; None where all
        must be of one size.
      until_all_end: whether to go on until the data of all have ended. The others then draw batches without a row.
        Otherwise the end of one is that of all.
    """

    def __init__(
        self,
        draw: Callable[[], types.Batch],
        *,
        count: Callable[[types.Batch], int],
        requests: interrupt.Interruptible,
        secs: Callable[[], float],
        fill_to: Callable[[int], None] | None,
        until_all_end: bool,
    ):
        self._draw, self._count, self._requests, self._secs, self._fill_to = draw, count, requests, secs, fill_to
        self._until_all_end = until_all_end
        self._own: deque[types.Batch] = deque()  # Drawn, and not told of.
        self._told: deque[tuple[_Answers, list[types.Batch], int]] = deque()
        self._agreed: deque[tuple[types.Batch, int, float]] = deque()
        self._handed_out: deque[tuple[int, float]] = deque()  # Examples in all processes, and the time; not counted.
        self._error: Exception | None = None  # Of this process.
        self._end: Exception | None = None  # Of all, after what is agreed on.
        self._empty: types.Batch = None  # A batch without a row.
        self._left: float = math.inf
        self._next_size = self._most_rows = 1
        self._clock = 0.0, 0  # At the last message, and of how many batches that was.

    @property
    def held(self) -> int:
        """How many batches of this process were drawn, and not handed out."""
        return len(self._own) + len(self._agreed) + sum(len(batches) for _, batches, _ in self._told)

    def begin(self, limit: int | None, ahead: int) -> None:
        """Begins a series of at most so many batches, of which so many were handed out already."""
        coming = ahead + len(self._agreed) + sum(size for *_, size in self._told)
        self._left = math.inf if limit is None else limit - coming
        while len(self._handed_out) > ahead:
            self._handed_out.popleft()

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
        batch, examples, secs = self._agreed.popleft()
        self._handed_out.append((examples, secs))
        return batch

    def counted(self, number: int) -> list[tuple[int, float]]:
        """Of the batches handed out first: their examples in all processes, and the seconds of training then."""
        return [self._handed_out.popleft() for _ in range(number)]

    def _send(self) -> None:
        """Draws some batches and tells the others what came."""
        size, batches, sizes = max(int(min(self._next_size, self._left)), 1), [], []
        while len(batches) < size and self._error is None:
            try:
                batch = self._own.popleft() if self._own else self._draw()
                sizes += [checks.num_examples(batch) or 0, self._count(batch)]
                batches.append(batch)
            except Exception as error:
                self._error = error
        self._left -= size
        if batches:
            self._empty = jax.tree.map(lambda leaf: leaf[:0] if np.ndim(leaf) else leaf, batches[-1])
        secs, (before, steps) = self._secs(), self._clock
        self._clock = secs, size
        per_step = max((secs - before) / max(steps, 1), 1e-6)
        next_size = int(np.clip(_SECS_BETWEEN / per_step, 1, _MOST_BATCHES))
        signum, clock = self._requests.outermost.unconfirmed or 0, map(int, np.array([secs]).view(np.int32))
        answers = _tell(_DRAWS, self._what_to_say(), len(batches), signum, *clock, next_size, *sizes)
        self._told.append((answers, batches, size))

    def _what_to_say(self) -> int:
        if self._error is None:
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
        stops = said == _FAILED if self._until_all_end else said != _WELL
        number = int(drawn[stops].min() if stops.any() else drawn.max())
        if stops.any() or has_ended.all():
            self._end = self._end_of_all((said == _FAILED) & (drawn == number))
        for place in range(number):
            has_batch = drawn > place
            problem = self._fill(np.where(has_batch, rows[:, place], 0), said == _EMPTY)
            if problem is not None:
                number, self._end = place, _known(problem)
                break
            batch = mine[place] if place < len(mine) else self._empty
            self._agreed.append((batch, int(examples[has_batch, place].sum()), secs))
        if signum := int(told[:, 2].max()):
            self._requests.outermost.confirm(signum)
        if self._end is not None:
            # What this process has drawn beyond the end stays for another series.
            rest = [*mine[number:], *(batch for _, batches, _ in self._told for batch in batches)]
            self._own.extendleft(reversed(rest))
            self._told.clear()
            self._error = None

    def _end_of_all(self, failed: np.ndarray) -> Exception:
        """What ends the series in this process, where these have failed; where none has, it is the end of the data."""
        if not failed.any():
            return StopIteration()
        own = self._error if failed[jax.process_index()] else None
        return _error_for(failed) if own is None else _known(own)

    def _fill(self, sizes: np.ndarray, is_empty: np.ndarray) -> Exception | None:
        """Has batches of different sizes made one; says why that can't be."""
        if np.all(sizes == sizes[0]):
            return None
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
        if sizes.max() > self._most_rows:
            self._most_rows = int(sizes.max())
            self._fill_to(self._most_rows)
        return None
