"""The training data of a run: epochs, positions, and batches that are left out."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, final

import jax
import numpy as np
from absl import logging

from jaxloop import types
from jaxloop.action_loop import ActionLoop
from jaxloop.base import checks
from jaxloop.data.position import DatasetPosition, PositionedIterator, PositionUnknownError, number_before, skip_to
from jaxloop.data.sources import num_batches
from jaxloop.distributed.agreement import Job
from jaxloop.engine.engine import Engine
from jaxloop.history import History
from jaxloop.outer_loop.evaluations import Evaluation
from jaxloop.outer_loop.specs import RunSpec
from jaxloop.schedules import Elapsed


@final
class Sources:
    """The datasets that an `OuterLoop` has opened. Iterators stay open between calls.

    Attributes:
      passes: The number of completed epochs.
      is_new: True if the run was resumed with `restore_data=False`. Positions saved after such a resume refer to the
        new dataset; see `CheckpointSpec`.
    """

    def __init__(self):
        self.passes: int = 0
        self.is_new: bool = False
        self._opened: dict[int, PositionedIterator] = {}  # Keyed by the `id` of each iterator.

    def open(self, dataset: Any) -> PositionedIterator:
        """Opens a dataset. Opening an iterator again returns the same `PositionedIterator`, so no batches are lost."""
        if not hasattr(dataset, "__next__"):
            return PositionedIterator(dataset)
        if id(dataset) not in self._opened:
            self._opened[id(dataset)] = PositionedIterator(dataset)
        return self._opened[id(dataset)]


@final
class TrainingData:
    """The training data of a run, and the iterators that evaluations read from (see `EvalSpec.dataset_iterator`).

    Args:
      spec: The arguments of the run.
      sources: The datasets that are already open.
      engine: The engine of the train loop.
      evaluations: The evaluations.
      left_out: The training batches to leave out.

    Attributes:
      left_out: The argument of the same name.
      source: The iterator over the current epoch, or None between two epochs.
      consumed: The position in `source` (counted from 1) of the batch that the last completed step used; 0 if no step
        has used a batch of `source`.
    """

    def __init__(
        self, spec: RunSpec, sources: Sources, engine: Engine, evaluations: Sequence[Evaluation], left_out: "LeftOut"
    ):
        self._spec, self._sources, self._engine = spec, sources, engine
        self._evals = {
            each.spec.name: (each.source, each.loop.engine) for each in evaluations if each.source is not None
        }
        self.left_out: LeftOut = left_out
        self.source: PositionedIterator | None = None
        self.consumed: int = 0
        # The restored position, and whether this process saved it.
        self._saved: tuple[DatasetPosition | None, bool] | None = None

    # Reading ---------------------------------------------------------------------------------------------

    def open(self, *, restores: bool, warns: bool, must_return: bool = False, raises: bool = False) -> None:
        """Opens the training dataset at the position restored from a checkpoint, or at its start.

        Args:
          restores: Whether to move to the restored position. If False, moves to it only if `Sources.is_new` is True and
            the dataset isn't an iterator.
          warns: Whether to warn about each dataset whose position can't be saved and restored.
          must_return: Whether to raise an error if the dataset can't return to the restored position. If False, a
            warning is logged instead, except after a return to an earlier checkpoint, where the error is always raised.
          raises: Whether to raise an error if the next batch has changed since the checkpoint was saved. If False, a
            warning is logged instead.
        """
        saved, self._saved, is_epoch = self._saved, None, self._spec.epochs is not None
        self.source = source = self._source_of_epoch()
        if saved is None or (is_epoch and saved[0] is None):
            if warns:
                self._warn_of_inexact_resume(source)
        elif restores or (self._sources.is_new and not self._spec.has_iterator):
            if is_epoch:  # A run always continues inside an epoch, even if that means skipping batches.
                self.source = source = PositionedIterator(source, skippable=True)
            self._engine.data.forget()
            with (
                contextlib.nullcontext()
                if must_return or self.left_out.detours
                else warning_of_unknown_position("the training dataset")
            ):
                go_to(source, *saved, raises=raises)
        self._sources.is_new = not restores
        self.left_out.apply_to(self.source)
        self.note_consumed(self._engine.batches_ahead(self.source))

    def _source_of_epoch(self) -> PositionedIterator:
        source = self._sources.open(self._spec.data)
        if self._spec.epochs is not None and not self._spec.has_iterator:
            source.begin_pass(self._sources.passes)
        return source

    def _warn_of_inexact_resume(self, source: PositionedIterator) -> None:
        if warning := source.resume_warning():
            logging.warning("%s", warning)
        for name, (each, _) in self._evals.items():
            if warning := each.resume_warning():
                logging.warning("In the evaluation %r: %s", name, warning)

    def note_consumed(self, ahead: int) -> None:
        """Records that all batches read from `source` so far have been used, except for the last `ahead` batches."""
        source = self.source
        self.consumed = 0 if source is None else number_before(source.count, ahead, source.left_out)

    def mark(self, *, if_cheap: bool = False) -> None:
        """Marks the current position in the data. Called before reading ahead; see `PositionedIterator.mark`."""
        if self.source is not None:
            self.source.mark(if_cheap=if_cheap)

    def next_epoch(self, *, saves: bool) -> bool:
        """Ends the current epoch and begins the next one. Returns False if there is no next epoch.

        In a checkpoint saved between two epochs, the position in the data is the start of the next epoch rather than
        the end of the previous one, because the order of the batches may differ between epochs. After the last epoch,
        it is the start of an additional epoch, so that a later run can resume and train for more epochs. Raises an
        error if the epoch that just ended had no batches.

        Args:
          saves: Whether the run saves checkpoints.
        """
        spec, ended = self._spec, self.source
        if self._engine.job.any_stops(ended is not None and ended.count == 0):
            raise checks.empty_dataset(spec.train_dataset)
        if spec.epochs is None:
            return False
        self._sources.passes += 1
        self.left_out.epoch_start += 0 if ended is None else ended.count
        self.source = None
        self.note_consumed(0)
        if spec.has_iterator:
            return False
        if ended is not None:
            ended.close()
        self._engine.data.forget()
        if saves or not self.has_ended_all_epochs:
            self.source = self._source_of_epoch()
            self.left_out.apply_to(self.source)
            if saves and not (self.has_ended_all_epochs or self._engine.job.is_shared):
                # A checkpoint of this step tells which batch comes next. If there is an error, the next read raises it.
                with self._engine.run.stopwatch.counting("data"), contextlib.suppress(Exception):
                    self.source.peek()
        return not self.has_ended_all_epochs

    def close(self) -> None:
        """Releases the dataset and stops the prefetch thread.

        Does nothing if the dataset is an iterator, because the caller may keep reading from it.
        """
        if not self._spec.has_iterator:  # An iterator belongs to the caller, who may keep reading from it.
            self.source = None
            self._engine.data.forget()

    @property
    def has_ended_all_epochs(self) -> bool:
        """True if the number of epochs is given and all epochs have been completed."""
        return self._spec.epochs is not None and self._sources.passes >= self._spec.epochs

    def batches_per_epoch(self, batches_before: int) -> int | None:
        """Returns the number of batches in the current epoch, or None if it is unknown.

        If `train_epochs` isn't given, returns the number of batches in the whole run instead. `batches_before` is the
        number of batches that the run has used so far.
        """
        source = self.source
        left = None if source is None else num_batches(source)
        if source is None or left is None:
            return None
        return left + (batches_before if self._spec.epochs is None else source.count)

    # Leaving batches out ---------------------------------------------------------------------------------

    def _newest_batch(self, *, before: int = 0) -> int:
        """Returns the number (see `LeftOut`) of the batch that the last completed step used.

        If `before` is greater than 0, returns the number of the batch that was used `before` steps earlier. Returns 0
        if there is no such batch.
        """
        left_out = self.left_out
        return number_before(left_out.epoch_start + self.consumed, before, left_out.numbers)

    def turn_back(self, turn: types.TurnBack, updates: int) -> None:
        """Records a detour: a return to an earlier checkpoint, after which the run leaves out some batches.

        Args:
          turn: The exception that requests the detour. The batches to leave out are those that the steps from
            `turn.first` to `turn.last` used.
          updates: The number of updates per batch.

        Raises:
          ValueError: If the run hasn't completed all steps from `turn.first` to `turn.last`.
        """
        newest = self._engine.run.now.steps
        if not 0 < turn.first <= turn.last <= newest:
            raise ValueError(f"A detour leaves out batches of steps 1 to {newest}, got {turn.first} to {turn.last}.")
        first, last = (self._newest_batch(before=(newest - step) // updates) for step in (turn.first, turn.last))
        detour = {"step": newest, "first_batch": first, "last_batch": last, "first_step": turn.first}
        self.left_out.detours.append({**detour, "reason": turn.reason})

    # Saving ----------------------------------------------------------------------------------------------

    def state_dict(self, *, in_moment: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns two dicts to store in a checkpoint; see `Saveable.state_dict`.

        The first dict contains the positions of all processes, the number of completed epochs, and the batches to leave
        out. The second dict contains the long byte strings in these positions, converted to arrays.
        """
        arrays: dict[str, np.ndarray] = {}
        job, evals, failure = self._engine.job, self._evals.items(), self._engine.outcome.failure
        position = position_of(self.source, self.consumed, None if job.is_shared else arrays)
        if position and failure.step_num is not None:  # A step that failed may have changed the next batch.
            position["next"] = None
        eval_data = {name: position_of(each, each.count - engine.batches_ahead(each)) for name, (each, engine) in evals}
        left_out = self.left_out.state_dict(self._newest_batch())
        counts = {"passes": self._sources.passes, "is_new": self._sources.is_new}
        own = {"data": position, "eval_data": eval_data}
        return {"positions": job.gather(own), "left_out": left_out, **counts}, {"bytes": arrays}

    def load_state_dict(self, saved: Mapping[str, Any], trees: Mapping[str, Any]) -> None:
        """Restores the training data and the iterators of the evaluations from the result of `state_dict`.

        Moves the evaluations' iterators immediately. The next call to `open` moves the training dataset to its
        saved position.
        """
        is_shared, positions = self._engine.job.is_shared, saved["positions"]
        place, count = (jax.process_index(), jax.process_count()) if is_shared else (0, 1)
        is_own = len(positions) == count  # Otherwise, only the number of batches of the first process is used.
        own = positions[place if is_own else 0]
        for name, (each, _) in self._evals.items():
            if position := own["eval_data"].get(name):
                with warning_of_unknown_position(f"the iterator of the evaluation {name!r}"):
                    go_to(each, DatasetPosition.from_dict(position), is_own)
        self._saved = own["data"] and DatasetPosition.from_dict(own["data"], trees["bytes"]), is_own
        self._sources.passes, self._sources.is_new = saved["passes"], saved["is_new"]
        self.left_out.load_state_dict(saved["left_out"], self._engine.run.now.steps)

    def begin(self, passes: int) -> None:
        """Sets the number of completed epochs to `passes`. Training then starts at the beginning of the next epoch."""
        self._sources.passes = passes


@contextlib.contextmanager
def warning_of_unknown_position(what: str) -> Iterator[None]:
    """Returns a context manager that logs a warning, rather than raising an error, if a position can't be restored."""
    try:
        yield
    except PositionUnknownError as error:
        logging.warning("%s The run continues with the next batch that %s returns.", error, what)


def go_to(source: PositionedIterator, position: DatasetPosition | None, is_own: bool, raises: bool = False) -> None:
    """Moves an iterator to a saved position, or does nothing if the position is None.

    If `is_own` is False, the position was saved by another process, which may have read different rows. In that case,
    the iterator skips batches until it has read `position.count` of them.
    """
    if position is None:
        return
    if is_own:
        return source.seek(position, raises=raises)
    if source.kind == "unknown" or source.count > position.count:
        problem = f"is unknown. {source.problem}" if source.kind == "unknown" else "is past it. Give unread data."
        raise PositionUnknownError(
            f"The position after {position.count} batches was saved by a different number of processes, and that of "
            f"{source!r} {problem}"
        )
    skip_to(source, position.count)


def position_of(source: PositionedIterator | None, count: int, arrays: dict[str, np.ndarray] | None = None) -> Any:
    """Returns the position after `count` batches as a dict to store in a checkpoint.

    Returns None if there is no iterator. If the position can't be determined, logs the error and returns None. For
    `arrays`, see `DatasetPosition.to_dict`.
    """
    try:
        return source and source.position(count).to_dict(arrays)
    except Exception:  # A problem with the data may be the reason why the run is ending.
        logging.exception("The position in %r could not be read, so a resumed run can't return to it.", source)
        return None


def check_not_empty(source: PositionedIterator | None, dataset: Any, loop: ActionLoop, job: Job) -> None:
    """Raises an error if a train loop's dataset is empty. Peeks at the next batch, but doesn't consume it.

    Does nothing if several processes train together, or if `source`, the iterator over the dataset, is None.
    """
    if source is None or job.is_shared:  # The processes of a job read their first batches together.
        return
    try:
        with loop.engine.run.stopwatch.counting("data"):
            source.peek()
    except StopIteration:
        if not source.count:
            raise checks.empty_dataset(dataset) from None
    except Exception as error:
        if not job.requests.supersedes(error):
            error.add_note(f"in the dataset, after step {loop.step_num}, in {loop!r}")
            raise


@final
class LeftOut:
    """The batches that a run leaves out. Batches are numbered from 1, and the numbering continues across epochs.

    >>> left_out = LeftOut([3])
    >>> epoch = PositionedIterator(["a", "b", "c", "d"])
    >>> left_out.apply_to(epoch)
    >>> list(epoch)
    ['a', 'b', 'd']

    Args:
      given: The batch numbers that were passed to the `OuterLoop` as `skip`.

    Attributes:
      numbers: The numbers of all batches to leave out, in ascending order.
      detours: One dict for each time the run has returned to an earlier checkpoint. Its `step` is the step from which
        the run returned. `first_batch` and `last_batch` are the numbers of the first and the last batch to leave out.
        `first_step` is the step that used the batch `first_batch`. `reason` is the reason for the detour.
      epoch_start: The total number of batches in the completed epochs.
    """

    def __init__(self, given: Iterable[int] = ()):
        self._given = sorted(set(given))
        self.numbers: list[int] = list(self._given)
        self.detours: list[dict[str, Any]] = []
        self.epoch_start: int = 0
        self._num_saved = 0

    def apply_to(self, source: PositionedIterator | None) -> None:
        """Makes `source`, the iterator over the current epoch, skip the batches that the run leaves out."""
        if source is not None:
            source.left_out = {number - self.epoch_start for number in self.numbers if number > self.epoch_start}

    def record_detours(self, now: Elapsed, history: History) -> None:
        """Adds a history row for each detour that isn't stored in the checkpoint from which the run resumed."""
        for detour in self.detours[self._num_saved :]:
            history.commit(now, {"detour": detour})
        self._num_saved = len(self.detours)

    def state_dict(self, number: int) -> dict[str, Any]:
        """Returns the JSON-serializable state to store in a checkpoint.

        `number` is the number of the batch that the last completed step used.
        """
        return {
            "numbers": [each for each in self.numbers if each <= number],
            "detours": self.detours,
            "epoch_start": self.epoch_start,
            "newest": number,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], step_num: int) -> None:
        """Restores the state from a checkpoint that was saved at the given step.

        Detours that began after the checkpoint was saved are kept, although the checkpoint doesn't contain them.
        Batches that were used before the checkpoint was saved can no longer be left out.
        """
        newest, before, detours = state_dict["newest"], state_dict["numbers"], state_dict["detours"]
        if missed := [each for each in self._given if each <= newest and each not in before]:
            logging.warning(
                "The run has used the batches %s before step %d, so it can no longer leave them out. Resume from an "
                "earlier checkpoint.",
                checks.listed(map(str, missed)),
                step_num,
            )
        self.detours, self._num_saved = [*detours, *self.detours[len(detours) :]], len(detours)
        planned = [*self._given, *batches_of(self.detours)]
        self.numbers = sorted({*before, *[each for each in planned if each > newest]})
        self.epoch_start = state_dict["epoch_start"]


def batches_of(detours: Iterable[Mapping[str, Any]]) -> Iterator[int]:
    """Yields the numbers of the batches that the run leaves out because of the given detours; see `LeftOut`."""
    for each in detours:
        yield from range(each["first_batch"], each["last_batch"] + 1)
