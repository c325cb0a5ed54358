"""The whole run: what a checkpoint keeps beside the train state, and how a run goes on from there."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, final

import jax
import numpy as np
from absl import logging
from etils import epath

from jaxloop import agreement, checkpoint, encoding
from jaxloop.action_loop import ActionLoop
from jaxloop.actions.checkpoint_action import CheckpointAction
from jaxloop.history import History
from jaxloop.position import DatasetPosition, PositionedIterator, PositionUnknownError
from jaxloop.schedules import Elapsed
from jaxloop.specs import CheckpointSpec

_POSITION_ARRAYS = "data"
"""The tree with the long byte strings of a position in the data."""


@final
@dataclasses.dataclass(frozen=True)
class Resumed:
    """The progress of a run when its checkpoint was saved.

    Attributes:
      elapsed: after the last completed step; `previous` is the one before.
      was_broken_off: whether a signal or an exception may have kept it from all that belongs to that step.
      has_stopped: whether somebody had asked it to stop there.
      steps_in_loop: how many steps of the loop under way it had done.
      position: where in the data it was; None for the start of the next pass, or where nothing is known.
      knows_position: whether the checkpoint says where in the data it was.
      is_own_position: whether it was saved by as many processes as there are now: the position is that of this one.
    """

    elapsed: Elapsed
    was_broken_off: bool = False
    has_stopped: bool = False
    steps_in_loop: int = 0
    position: DatasetPosition | None = None
    knows_position: bool = False
    is_own_position: bool = True

    @property
    def is_between_passes(self) -> bool:
        """True if it was between two passes over the train data."""
        return self.knows_position and self.position is None


class Part(Protocol):
    """A part of a run that remembers something: a loop with its actions, say.

    What the part that trains remembers has `elapsed`, `previous` (a step before), `steps_in_loop` and `has_stopped`.
    """

    @property
    def batches_consumed(self) -> int:
        """The number of batches that the source had given when the last whole step was done."""
        ...

    def state_dict(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns what it remembers: as JSON can hold it, and states by name."""
        ...

    def load_state_dict(self, state_dict: Mapping[str, Any], kept_states: Mapping[str, Any]) -> None:
        """Takes that over."""

    def resume(self, elapsed: Elapsed, batches_before: int = 0) -> None:
        """Goes on from here without it, after so many steps of the loop under way."""

    def batches_ahead(self, source: Any) -> int:
        """Returns how many batches it has drawn from a source, and not used."""
        ...


@final
@dataclasses.dataclass(eq=False)
class WholeRun:
    """All of a run but its train state: loops, actions, positions in the data, the history.

    Attributes:
      main: the part that trains.
      others: other parts by name.
      eval_sources: what evaluations draw from, where they go on from one to the next.
      history: what was measured.
      keys: the PRNG keys, which a later run must have too.
      job: the processes that train together, each with data of its own.
      passes: how many passes over the train data have ended.
      source: the pass over the train data under way; None between two.
    """

    main: Part
    others: Mapping[str, Part]
    eval_sources: Mapping[str, PositionedIterator]
    history: History
    keys: Any = None
    job: agreement.Job = dataclasses.field(default_factory=lambda: agreement.Job(False))
    passes: int = 0
    source: PositionedIterator | None = None

    def __post_init__(self) -> None:
        self._keys = encoding.encode_keys(self.keys)
        self._parts = {"train": self.main, **self.others}

    # What `snapshot` writes, `load` reads, in the same order ---------------------------------------------

    def snapshot(self, *, was_broken_off: bool = False) -> dict[str, Any]:
        """Returns what a checkpoint of this moment keeps, as `CheckpointAction.save` takes it.

        Args:
          was_broken_off: whether this step may lack some of what belongs to it.
        """
        self.history.flush()  # The rows up to here are part of it.
        states, trees = {}, {}
        for name, part in self._parts.items():
            states[name], kept = part.state_dict()
            trees.update({f"{name}.{key}": state for key, state in kept.items()})
        main, (positions, arrays) = states["train"], self._positions()
        return {
            "metadata": {
                "elapsed": main["elapsed"],
                "previous": main["previous"],
                "batches_in_loop": main["steps_in_loop"],
                "was_broken_off": was_broken_off,
            },
            "run": {
                "jaxloop": checkpoint.own_version(),
                "keys": self._keys,
                "parts": states,
                "kept_states": sorted(trees),
                "data_sizes": {name: array.size for name, array in arrays.items()},
                "positions": positions,
                # Of rows in memory a later process has none.
                "history_rows": None if self.history.path is None else len(self.history),
                "history_file": self.history.checksum(),
                "passes": self.passes,
            },
            "trees": {**trees, _POSITION_ARRAYS: arrays},
        }

    def load(self, opened: checkpoint.Checkpoint, state: Any) -> Resumed:
        """Has all parts go on from a checkpoint.

        Args:
          opened: the checkpoint.
          state: a train state; those that actions keep are laid out as it is.

        Returns:
          How far the run was; its `position` is for the caller to seek, as `source`.

        Raises:
          CheckpointError: the checkpoint is damaged.
          ValueError: it is of a run with other PRNG keys.
        """
        with opened.understanding():
            metadata, run = opened.metadata(), opened.run()
            resumed = Resumed(
                opened.elapsed(),
                steps_in_loop=metadata.get("batches_in_loop", 0),
                was_broken_off=metadata.get("was_broken_off", False),
            )
            if not run:
                self._load_nothing(opened, resumed)
                return resumed
            self._check_is_this_run(run, opened, resumed.elapsed)
            arrays = {name: np.zeros(size, np.uint8) for name, size in run["data_sizes"].items()}
            trees = opened.trees({**dict.fromkeys(run["kept_states"], state), _POSITION_ARRAYS: arrays})
            for name, part in self._parts.items():
                if name in run["parts"]:
                    prefix = f"{name}."
                    kept = {key.removeprefix(prefix): tree for key, tree in trees.items() if key.startswith(prefix)}
                    part.load_state_dict(run["parts"][name], kept)
                else:
                    warning = "The checkpoint of step %d has no evaluation named %r: it begins anew."
                    logging.warning(warning, opened.step, name)
                    part.resume(resumed.elapsed)
            position, is_own = self._load_positions(run["positions"], trees[_POSITION_ARRAYS])
            self.resume_history(opened.step, run["history_rows"], run["history_file"])
            self.passes = run["passes"]
            return dataclasses.replace(
                resumed,
                has_stopped=run["parts"]["train"]["has_stopped"],
                position=position,
                knows_position=True,
                is_own_position=is_own,
            )

    def _positions(self) -> tuple[list[Any], dict[str, np.ndarray]]:
        """Returns the positions in the data of each process, and the long byte strings of one alone, as arrays."""
        arrays: dict[str, np.ndarray] = {}
        own = {
            "data": _position_of(self.source, self.main.batches_consumed, None if self.job.is_shared else arrays),
            "eval_data": {
                name: _position_of(source, source.count - self._parts[name].batches_ahead(source))
                for name, source in self.eval_sources.items()
            },
        }
        return self.job.gather(own), arrays

    def _load_positions(
        self, positions: Sequence[Any], arrays: Mapping[str, np.ndarray]
    ) -> tuple[DatasetPosition | None, bool]:
        """Has the evaluations go on in their data; returns the position in the train data, and whether it is our own.

        It is that of the first process where there were more processes, or fewer.
        """
        place, count = (jax.process_index(), jax.process_count()) if self.job.is_shared else (0, 1)
        is_own = len(positions) == count
        own = positions[place if is_own else 0]
        for name, source in self.eval_sources.items():
            if position := own["eval_data"].get(name):
                try:
                    go_to(source, DatasetPosition.from_dict(position), is_own=is_own)
                except PositionUnknownError as error:
                    if is_own:
                        raise
                    logging.warning("%s The evaluation %r goes on with what it gives now.", error, name)
        return own["data"] and DatasetPosition.from_dict(own["data"], arrays), is_own

    # --------------------------------------------------------------------------------------------------

    def _load_nothing(self, opened: checkpoint.Checkpoint, resumed: Resumed) -> None:
        """Has all parts go on from a train state alone."""
        logging.warning(
            "The checkpoint of step %d in %s holds a train state alone, as an Orbax CheckpointManager saves it: "
            "the data, the actions and open means start afresh, and damage to it can't be detected.",
            opened.step,
            opened.path.parent,
        )
        for part in self._parts.values():
            part.resume(resumed.elapsed, resumed.steps_in_loop if part is self.main else 0)
        self.resume_history(opened.step)
        self.passes = resumed.elapsed.loops

    def _check_is_this_run(self, run: Mapping[str, Any], opened: checkpoint.Checkpoint, elapsed: Elapsed) -> None:
        step, directory = opened.step, opened.path.parent
        if elapsed.steps != step:
            raise ValueError(
                f"The checkpoint {step} in {directory} was saved after step {elapsed.steps}, and its directory must "
                f"have that name. Rename it to {elapsed.steps}, or remove it."
            )
        if run["jaxloop"] != checkpoint.own_version():
            message = "The checkpoint of step %d was saved by jaxloop %s; this is %s."
            logging.info(message, step, run["jaxloop"], checkpoint.own_version())
        check_keys(run, self._keys, directory)

    def measured_at(self, step: int) -> set[str]:
        """Returns the names of what the history has measured at a step."""
        return {name for row in self.history.rows if row.elapsed.steps == step for name in row.logs}

    def resume_history(
        self, steps: int, num_rows: int | None = None, checksum: Mapping[str, Any] | None = None
    ) -> None:
        """Does `History.resume`; of several processes the first does so, which writes the file, before the others."""
        if not self.job.is_first:
            agreement.wait_for_all("the history")
        self.history.resume(steps, num_rows, checksum=checksum)
        if self.job.is_shared and self.job.is_first:
            agreement.wait_for_all("the history")


def check_keys(run: Mapping[str, Any], keys: Any, directory: epath.PathLike) -> None:
    """Raises where a checkpoint's `run` is of other PRNG keys than these, encoded."""
    if run["keys"] != keys:
        raise ValueError(
            f"The checkpoints in {directory} are of a run with other PRNG keys (base_prng) than this one, so it "
            "could not go on as it was. Give the step the same keys, made from the same seed, or give another "
            "directory."
        )


def elapsed_at(directory: epath.PathLike, step: int) -> Elapsed:
    """Returns the progress of the run at the checkpoint of a step; `previous` is a step earlier."""
    return checkpoint.Checkpoint.at(directory, step, checkpoint.METADATA_FILE).elapsed()


def directories_of(
    train_loop: ActionLoop | None, spec: CheckpointSpec | None, workdir: epath.PathLike | None = None
) -> list[epath.Path]:
    """Returns the directories that a run writes to: of its checkpoints, and its work directory if given.

    Without a train loop, a run writes to its work directory alone.
    """
    directories = [] if train_loop is None else [action.directory for action in checkpoint_actions(train_loop)]
    directories += [] if train_loop is None or spec is None else [checkpoint.absolute(spec.checkpoint_dir)]
    directories += [] if workdir is None else [checkpoint.absolute(workdir)]
    return list(dict.fromkeys(directories))


def checkpoint_actions(loop: ActionLoop) -> list[CheckpointAction]:
    """The actions of a loop that save the run."""
    return [action for action in loop.actions if isinstance(action, CheckpointAction)]


def check_no_newer_checkpoints(
    train_loop: ActionLoop, step_num: int, listed: Mapping[epath.Path, Sequence[int]] | None = None
) -> None:
    """Raises where a run that begins at a step would save among the later checkpoints of another.

    `listed` has the steps in directories that the caller has listed.
    """
    listed = listed or {}
    for action in checkpoint_actions(train_loop):
        directory = action.directory
        found = listed[directory] if directory in listed else checkpoint.all_steps(directory)
        if found and found[-1] > step_num:
            raise ValueError(
                f"{action!r} would save among the checkpoints of another run: training starts at step {step_num}, and "
                f"the directory has checkpoints up to step {found[-1]}. Go on from them, with "
                f"checkpoint_spec=CheckpointSpec({str(directory)!r}), or give another directory."
            )


def go_to(source: PositionedIterator, position: DatasetPosition, *, is_own: bool) -> None:
    """Goes to a position in the data, that of this process or of one that had another part of each batch.

    Raises:
      PositionUnknownError: the source can't go there.
      ValueError: it is a position in other data.
    """
    if is_own:
        source.seek(position)
    elif source.kind == "unknown":
        raise PositionUnknownError(
            f"The position after {position.count} batches was saved by another number of processes, and {source!r} "
            f"does not say where it is. {source.problem}"
        )
    elif source.count > position.count:
        raise PositionUnknownError(
            f"The position after {position.count} batches was saved by another number of processes, and {source!r} is "
            "past it. Give data from which nothing was drawn."
        )
    else:
        source.skip(position.count - source.count)


def _position_of(source: PositionedIterator | None, count: int, arrays: dict[str, np.ndarray] | None = None) -> Any:
    try:
        return source and source.position(count).to_dict(arrays)
    except Exception:  # The run may be ending because the data are what fails.
        logging.exception("The position in %r could not be read: a resumed run can't go there.", source)
        return None
