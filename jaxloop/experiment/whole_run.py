"""Saves and loads the state of a run, except for the train state."""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, final

import jax
import numpy as np
from absl import logging
from etils import epath

from jaxloop import checkpoint, metrics
from jaxloop.action_loop import ActionLoop
from jaxloop.actions.checkpoint_action import CheckpointAction
from jaxloop.actions.early_stopping_action import EarlyStoppingAction
from jaxloop.base import checks, encoding, files
from jaxloop.data.position import DatasetPosition, PositionedIterator, PositionUnknownError
from jaxloop.experiment.detours import Detour, LeftOut
from jaxloop.experiment.specs import CheckpointSpec
from jaxloop.history import History
from jaxloop.processes import agreement, interrupt
from jaxloop.runs.commands import Commands
from jaxloop.schedules import Elapsed

# In the state of `optax.inject_hyperparams`: a hyperparameter, and the state of a schedule that sets one.
_INJECTED = re.compile(r"(?!(?:params|batch_stats|collections)/)(?:.*/)?hyperparams/[^/]+")
_SCHEDULED = re.compile(r"(.*hyperparams)_states(/[^/]+)")
_POSITION_ARRAYS = "data"
"""The name of the checkpoint tree that holds long byte strings from the position in the training data."""


@final
@dataclasses.dataclass(frozen=True)
class Resumed:
    """The progress of a run at the time a checkpoint was saved.

    Attributes:
      elapsed: The progress after the last completed step. Its `previous` is the progress one step earlier.
      may_be_incomplete: True if a signal or an exception may have prevented some actions or evaluations from running at
        that step.
      has_stopped: True if the run had been asked to stop at that step.
      has_more: True if the run has a later end now than it had then.
      steps_in_loop: The number of completed steps in the current loop.
      position: The position in the training data; None at the start of an epoch, or if the position is unknown.
      knows_position: True if the checkpoint contains information about the position in the training data.
      is_own_position: True if the number of processes hasn't changed, so that the position belongs to this process.
      history_rows: The number of history rows; None if unknown.
      history_file: The result of `History.checksum`.
      detours: The detours that began after the checkpoint was saved.
    """

    elapsed: Elapsed
    may_be_incomplete: bool = False
    has_stopped: bool = False
    has_more: bool = False
    steps_in_loop: int = 0
    position: DatasetPosition | None = None
    knows_position: bool = False
    is_own_position: bool = True
    history_rows: int | None = None
    history_file: Mapping[str, Any] | None = None
    detours: Sequence[Detour] = ()

    def stays_stopped(self, actions: Iterable[Any]) -> bool:
        """Returns whether a run that was stopped has neither a later end nor more patience now."""
        stopped_by = _actions_that_stopped(actions)
        has_no_patience = not stopped_by or any(action.is_out_of_patience for action in stopped_by)
        return self.has_stopped and not self.has_more and has_no_patience

    def renew_patience(self, actions: Iterable[Any]) -> None:
        """Renews the patience of the actions that stopped the run if it has a later end now."""
        for action in _actions_that_stopped(actions) if self.has_stopped and self.has_more else ():
            action.renew_patience()

    @property
    def is_between_passes(self) -> bool:
        """True if the checkpoint was saved between two epochs."""
        return self.knows_position and self.position is None


def _actions_that_stopped(actions: Iterable[Any]) -> list[EarlyStoppingAction]:
    return [action for action in actions if isinstance(action, EarlyStoppingAction) and action.stopped]


class Part(Protocol):
    """A part of a run that has a state, such as a loop with its actions.

    The state dict of the training part has the keys `elapsed`, `previous` (the progress one step earlier),
    `steps_in_loop` and `has_stopped`.
    """

    def state_dict(self, *, in_moment: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns this part's state as JSON-serializable values, and a dict of the train states that it keeps.

        `in_moment` is True if something that is due at this step may not have been called.
        """
        ...

    def load_state_dict(self, saved: Mapping[str, Any], kept: Mapping[str, Any]) -> None:
        """Restores a state that `state_dict` returned."""

    def resume(self, elapsed: Elapsed, batches: int = 0) -> None:
        """Resumes at the given progress without a state dict, `batches` batches into the current loop."""

    def batches_ahead(self, source: Any) -> int:
        """Returns the number of batches that this part has read from a source but hasn't used yet."""
        ...


@final
@dataclasses.dataclass(eq=False)
class WholeRun:
    """A run's state without the train state: its loops, actions, data positions and history.

    Attributes:
      main: The part that trains.
      others: The other parts, by name.
      eval_sources: The iterators of evaluations that continue where they last stopped, keyed by evaluation name.
      history: The history of the run.
      keys: The PRNG keys. The run can be resumed only with the same keys.
      job: The processes that train together, each with its own data.
      passes: The number of completed epochs.
      source: The iterator over the current epoch of the training data; None between two epochs.
      consumed: The number of batches that `source` had returned by the end of the last completed step.
      commands: The commands sent to the run; None if the run doesn't accept commands.
      left_out: The training batches that the run leaves out.
      ends: The number of steps and of epochs after which the run ends; None where there is no such limit.
      transforms: New names for saved leaves; see `CheckpointSpec`.
    """

    main: Part
    others: Mapping[str, Part]
    eval_sources: Mapping[str, PositionedIterator]
    history: History
    keys: Any = None
    job: agreement.Job = dataclasses.field(default_factory=lambda: agreement.Job(False))
    passes: int = 0
    source: PositionedIterator | None = None
    consumed: int = 0
    commands: Commands | None = None
    left_out: LeftOut = dataclasses.field(default_factory=LeftOut)
    ends: tuple[int | None, int | None] = (None, None)
    transforms: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        self._keys = encoding.encode_keys(self.keys)
        self._parts = {"train": self.main, **self.others}

    def note_consumed(self, ahead: int) -> None:
        """Notes that all batches of `source` so far have been used, except for the last `ahead` ones."""
        self.consumed = 0 if self.source is None else self.source.count - ahead

    # `load` reads what `snapshot` writes, in the same order -----------------------------------------------

    def snapshot(self, *, may_be_incomplete: bool = False) -> dict[str, Any]:
        """Returns the run's current state as keyword arguments for `CheckpointAction.save`.

        Args:
          may_be_incomplete: True if some actions or evaluations may not have run at this step.
        """
        self.history.flush()  # The checkpoint includes all rows up to this point.
        states, trees = {}, {}
        for name, part in self._parts.items():
            states[name], kept = part.state_dict(in_moment=may_be_incomplete)
            trees.update({f"{name}.{key}": state for key, state in kept.items()})
        main, (positions, arrays) = states["train"], self._positions()
        return {
            "metadata": {
                "elapsed": main["elapsed"],
                "previous": main["previous"],
                "batches_in_loop": main["steps_in_loop"],
                "may_be_incomplete": may_be_incomplete,
                **({checkpoint.TRANSFORMS_KEY: self.transforms} if self.transforms else {}),
            },
            "run": {
                "keys": self._keys,
                "commands": [] if self.commands is None else self.commands.executed(),
                "left_out": self.left_out.state_dict(self.newest_batch()),
                "parts": states,
                "kept_states": sorted(trees),
                "data_sizes": {name: array.size for name, array in arrays.items()},
                "positions": positions,
                # Rows that exist only in memory are lost with the process.
                "history_rows": None if self.history.path is None else len(self.history),
                "history_file": self.history.checksum(),
                "passes": self.passes,
                "ends": list(self.ends),
            },
            "trees": {**trees, _POSITION_ARRAYS: arrays},
        }

    def load(self, opened: checkpoint.Checkpoint, state: Any) -> Resumed:
        """Loads the state of all parts from a checkpoint.

        Args:
          opened: The checkpoint.
          state: A train state, whose structure and shardings are used to restore the states kept by actions.

        Returns:
          The progress of the run. The caller must set `source` to an iterator that has been moved to the returned
          `position`, and then call `resume_history`.

        Raises:
          CheckpointError: If the checkpoint is damaged.
          ValueError: If the checkpoint was saved by a run with different PRNG keys, or if its directory was renamed to
            a different step.
        """
        with opened.understanding():
            metadata, run = opened.metadata(), opened.run()
            resumed = Resumed(
                opened.elapsed(),
                steps_in_loop=metadata.get("batches_in_loop", 0),
                may_be_incomplete=metadata.get("may_be_incomplete", False),
            )
            if not run:
                self._start_without_state(opened, resumed)
                return resumed
            self._check_is_this_run(run, opened, resumed.elapsed)
            arrays = {name: np.zeros(size, np.uint8) for name, size in run["data_sizes"].items()}
            trees = opened.trees({**dict.fromkeys(run["kept_states"], state), _POSITION_ARRAYS: arrays})
            if self.commands is not None:  # First, because a command may have added an action.
                self.commands.repeat(run["commands"], opened.step)
            for name, part in self._parts.items():
                if name in run["parts"]:
                    prefix = f"{name}."
                    kept = {key.removeprefix(prefix): tree for key, tree in trees.items() if key.startswith(prefix)}
                    part.load_state_dict(run["parts"][name], kept)
                else:
                    warning = "The checkpoint of step %d has no state of an evaluation %r, which starts from scratch."
                    logging.warning(warning, opened.step, name)
                    part.resume(resumed.elapsed)
            position, is_own = self._load_positions(run["positions"], trees[_POSITION_ARRAYS])
            self.passes = run["passes"]
            detours = self.left_out.load_state_dict(run["left_out"], resumed.elapsed)
            return dataclasses.replace(
                resumed,
                has_stopped=run["parts"]["train"]["has_stopped"],
                has_more=ends_later(run, self.ends),
                position=position,
                knows_position=True,
                is_own_position=is_own,
                history_rows=run["history_rows"],
                history_file=run["history_file"],
                detours=detours,
            )

    # Batches that are left out ---------------------------------------------------------------------------

    def newest_batch(self, *, before: int = 0) -> int:
        """Returns the number of the batch that the last completed step used, or the number of an earlier batch.

        `before` is the number of batches to go back. Returns 0 if there is no such batch.
        """
        return self.left_out.number_at(self.consumed, self.source, before=before)

    def record_left_out(self, now: Elapsed) -> None:
        """Adds a history row for each batch that has been left out since the last call to this method."""
        self.left_out.record(self.newest_batch(), now, self.history)

    def warn_of_unreached(self) -> None:
        """Warns if the run was asked to leave out batches that it never reached."""
        self.left_out.warn_of_unreached(self.newest_batch())

    def detour(
        self, now: Elapsed, first_step: int, last_step: int, reason: str, *, updates: int, at_most: int | None = None
    ) -> None:
        """Rolls the run back to the newest checkpoint before `first_step`.

        The run then continues from there, skipping the batches of steps `first_step` through `last_step`.

        Args:
          now: The progress of the run.
          first_step: The first step whose batch is left out.
          last_step: The last step whose batch is left out. It must not be later than the step of `now`.
          reason: A human-readable reason for the detour.
          updates: The number of updates per batch.
          at_most: The maximum number of detours, or None for no limit. Exceeding it ends the run with an error.
        """
        if not 0 < first_step <= last_step <= now.steps:
            raise ValueError(
                f"A detour can leave out only batches of steps 1 to {now.steps}, got {first_step} to {last_step}."
            )
        number_of = lambda step: self.newest_batch(before=(now.steps - step) // updates)
        first, last = number_of(first_step), number_of(last_step)
        self.left_out.requested, self.left_out.at_most = Detour(now.steps, first, last, first_step, reason), at_most
        self.job.requests.outermost.confirm(interrupt.DETOUR)

    # Positions -------------------------------------------------------------------------------------------

    def _positions(self) -> tuple[list[Any], dict[str, np.ndarray]]:
        """Returns all processes' positions in the data, and long byte strings in this process's position as arrays.

        If several processes train together, there are no arrays.
        """
        arrays: dict[str, np.ndarray] = {}
        own = {
            "data": _position_of(self.source, self.consumed, None if self.job.is_shared else arrays),
            "eval_data": {
                name: _position_of(source, source.count - self._parts[name].batches_ahead(source))
                for name, source in self.eval_sources.items()
            },
        }
        return self.job.gather(own), arrays

    def _load_positions(
        self, positions: Sequence[Any], arrays: Mapping[str, np.ndarray]
    ) -> tuple[DatasetPosition | None, bool]:
        """Restores the positions of evaluations, and returns the position in the training data.

        Also returns whether these positions belong to this process. If the number of processes has changed, they belong
        to the first process instead.
        """
        place, count = (jax.process_index(), jax.process_count()) if self.job.is_shared else (0, 1)
        is_own = len(positions) == count
        own = positions[place if is_own else 0]
        for name, source in self.eval_sources.items():
            if position := own["eval_data"].get(name):
                try:
                    go_to(source, DatasetPosition.from_dict(position), is_own=is_own)
                except PositionUnknownError as error:
                    logging.warning(
                        "%s The evaluation %r continues with the next batch that its iterator returns.", error, name
                    )
        return own["data"] and DatasetPosition.from_dict(own["data"], arrays), is_own

    # --------------------------------------------------------------------------------------------------

    def _start_without_state(self, opened: checkpoint.Checkpoint, resumed: Resumed) -> None:
        """Resumes all parts from a checkpoint that contains only a train state."""
        logging.warning(
            "The checkpoint of step %d in %s contains only a train state, as an Orbax CheckpointManager saves it: "
            "the data, the actions and unfinished means start from scratch, and damage to it can't be detected.",
            opened.step,
            opened.path.parent,
        )
        for part in self._parts.values():
            part.resume(resumed.elapsed, resumed.steps_in_loop if part is self.main else 0)
        self.passes = resumed.elapsed.loops

    def _check_is_this_run(self, run: Mapping[str, Any], opened: checkpoint.Checkpoint, elapsed: Elapsed) -> None:
        step, directory = opened.step, opened.path.parent
        if elapsed.steps != step:
            raise ValueError(
                f"The checkpoint {step} in {directory} was saved after step {elapsed.steps}, and its directory must "
                f"have that name. Rename it to {elapsed.steps}, or remove it."
            )
        check_keys(run, self._keys, directory)

    def measured_at(self, step: int) -> set[str]:
        """Returns the top-level names recorded in the history at a step, such as the names of evaluations."""
        return {name for row in self.history.rows if row.elapsed.steps == step for name in row.logs}

    def resume_history(self, resumed: Resumed) -> None:
        """Drops later rows from the history, first in the process that writes the file, then in all others.

        Nothing may refuse the start of the run afterwards, because the rows are lost.
        """
        if not self.job.is_first:
            agreement.wait_for_all("the history")
        self.history.resume(resumed.elapsed.steps, resumed.history_rows, checksum=resumed.history_file)
        if self.job.is_shared and self.job.is_first:
            agreement.wait_for_all("the history")
        for detour in resumed.detours:
            self.history.commit(resumed.elapsed, {"detour": dataclasses.asdict(detour)})


def check_keys(run: Mapping[str, Any], keys: Any, directory: epath.PathLike) -> None:
    """Checks that a checkpoint's `run` item contains the given PRNG keys, which must be in encoded form.

    Raises:
      ValueError: If the checkpoint has different keys.
    """
    if run["keys"] != keys:
        raise ValueError(
            f"The checkpoints in {directory} come from a run with different PRNG keys (base_prng), so this run can't "
            "resume from them. Give the step the same keys, made from the same seed, or use a different directory."
        )


def ends_later(run: Mapping[str, Any], ends: Sequence[int | None]) -> bool:
    """Returns whether `ends`, the numbers of steps and epochs of a run, exceed those in a checkpoint's `run` item."""
    pairs = zip(run["ends"], ends, strict=True)
    return any(before is not None and (now is None or now > before) for before, now in pairs)


def reconcile_hyperparams(given: Any, restored: Any, *, restores: bool, remedy: str) -> Any:
    """Warns if hyperparameters of `optax.inject_hyperparams` differ between the program and the checkpoint.

    Scheduled hyperparameters are not compared, because each update computes them anew.

    Args:
      given: The state that the program made.
      restored: The state from the checkpoint.
      restores: Whether the run continues with the checkpoint's values. Otherwise, it continues with the program's.
      remedy: A sentence about how to change that.

    Returns:
      The restored state, with the program's values if `restores` is False.
    """
    ours, saved, changed = checks.leaves_by_path(given), checks.leaves_by_path(restored), {}
    scheduled = {match[1] + match[2] for path in ours if (match := _SCHEDULED.match(path))}
    for path, leaf in ours.items():
        if _INJECTED.fullmatch(path) and path not in scheduled and path in saved and isinstance(leaf, jax.Array):
            new, old = metrics.fetch([leaf, saved[path]])
            if not np.array_equal(new, old):
                changed[path] = leaf
                text = "%s is %s in the program, and %s in the checkpoint. The run continues with %s. %s"
                logging.warning(text, path, new, old, old if restores else new, remedy)
    if restores or not changed:
        return restored
    return jax.tree_util.tree_map_with_path(lambda path, leaf: changed.get(checks.path_name(path), leaf), restored)


def elapsed_at(directory: epath.PathLike, step: int) -> Elapsed:
    """Returns the progress stored in the checkpoint of a step. Its `previous` is the progress one step earlier."""
    return checkpoint.Checkpoint.at(directory, step, checkpoint.METADATA_FILE).elapsed()


def directories_of(
    train_loop: ActionLoop | None, spec: CheckpointSpec | None, workdir: epath.PathLike | None = None
) -> list[epath.Path]:
    """Returns the directories that a run writes to: its checkpoint directories, and its work directory if it has one.

    Without a train loop, a run writes only to its work directory.
    """
    directories = [] if train_loop is None else [action.directory for action in checkpoint_actions(train_loop)]
    directories += [] if train_loop is None or spec is None else [spec.checkpoint_dir]
    directories += [] if workdir is None else [files.absolute(workdir)]
    return list(dict.fromkeys(directories))


def checkpoint_actions(loop: ActionLoop) -> list[CheckpointAction]:
    """Returns a loop's `CheckpointAction`s."""
    return [action for action in loop.actions if isinstance(action, CheckpointAction)]


def check_no_newer_checkpoints(train_loop: ActionLoop, step_num: int) -> None:
    """Checks that a run starting at `step_num` won't save into a directory with later checkpoints from another run.

    Args:
      train_loop: The train loop, with its `CheckpointAction`s.
      step_num: The step at which the run starts.

    Raises:
      ValueError: If a directory contains checkpoints from later steps.
    """
    for action in checkpoint_actions(train_loop):
        directory = action.directory
        found = checkpoint.all_steps(directory)
        if found and found[-1] > step_num:
            raise ValueError(
                f"{action!r} would save among the checkpoints of another run: training starts at step {step_num}, and "
                f"the directory has checkpoints up to step {found[-1]}. Resume from them with "
                f"checkpoint_spec=CheckpointSpec({str(directory)!r}), or use a different directory."
            )


def go_to(source: PositionedIterator, position: DatasetPosition, *, is_own: bool) -> None:
    """Moves an iterator to a saved position.

    Args:
      source: The iterator.
      position: The position.
      is_own: True if the position belongs to this process. Otherwise, only its number of batches is used, because the
        process that saved it read a different part of each batch.

    Raises:
      PositionUnknownError: If the source can't be moved to the position.
      ValueError: If the position was saved from a different dataset, or the dataset ends before the position.
    """
    if is_own:
        source.seek(position)
    elif source.kind == "unknown":
        raise PositionUnknownError(
            f"The position after {position.count} batches was saved by a different number of processes, and that of "
            f"{source!r} is unknown. {source.problem}"
        )
    elif source.count > position.count:
        raise PositionUnknownError(
            f"The position after {position.count} batches was saved by a different number of processes, and {source!r} "
            "is past it. Give data from which no batch was read."
        )
    else:
        source.skip(position.count - source.count)


def _position_of(source: PositionedIterator | None, count: int, arrays: dict[str, np.ndarray] | None = None) -> Any:
    try:
        return source and source.position(count).to_dict(arrays)
    except Exception:  # A problem with the data may be the reason why the run is ending.
        logging.exception("The position in %r could not be read, so a resumed run can't return to it.", source)
        return None
