"""Saves and restores all parts of a run other than the train state."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, final

import jax
import numpy as np
from absl import logging
from etils import epath

from jaxloop import checkpoint, metrics
from jaxloop.action_loop import ActionLoop
from jaxloop.actions.checkpoint_action import CheckpointAction
from jaxloop.actions.early_stopping_action import EarlyStoppingAction
from jaxloop.base import checks, encoding
from jaxloop.distributed import agreement
from jaxloop.engine.agenda import Agenda
from jaxloop.history import History
from jaxloop.outer_loop.specs import CheckpointSpec
from jaxloop.schedules import Elapsed

# In the state of `optax.inject_hyperparams`: a hyperparameter, and the state of a schedule that sets one.
_INJECTED = re.compile(r"(?!(?:params|batch_stats|collections)/)(?:.*/)?hyperparams/[^/]+")
_SCHEDULED = re.compile(r"(.*hyperparams)_states(/[^/]+)")
_BYTES = "data.bytes"  # The name of the tree of long byte strings.


class Saveable(Protocol):
    """A part of a run that is stored in checkpoints, such as a loop, the data, the history or the extensions."""

    def state_dict(self, *, in_moment: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns a dict of JSON values and a dict of train states.

        For the training data, the second dict contains long byte strings (as arrays) instead of train states.
        `in_moment` is True if there may be agenda items that are due at the current step but haven't been called yet.
        """
        ...

    def load_state_dict(self, saved: Mapping[str, Any], trees: Mapping[str, Any], /) -> None:
        """Restores this part from the two dicts that `state_dict` returned."""


@final
class WholeRun:
    """The parts of a run that a checkpoint contains in addition to the train state.

    Args:
      parts: The parts by name, in the order in which they are restored. The part "train" is the train loop. The JSON
        values that its `state_dict` method returns contain the run's progress (`elapsed`) and the progress one batch
        earlier (`previous`).
      history: The history, which is added as the last part.
      job: The processes that train together.
      keys: The PRNG keys. The run can be resumed only with the same keys.
      transforms: New names for saved leaves; see `CheckpointSpec`.

    Attributes:
      job: The argument of the same name.
      rows: The part that represents the history.
    """

    def __init__(
        self,
        parts: Mapping[str, Saveable],
        history: History,
        job: agreement.Job,
        *,
        keys: Any = None,
        transforms: Mapping[str, str] | None = None,
    ):
        self.job: agreement.Job = job
        self.rows: Rows = Rows(history, job)
        self._parts: Mapping[str, Saveable] = {**parts, "history": self.rows}
        self._keys, self._transforms = encoding.encode_keys(keys), transforms

    def snapshot(self, *, in_moment: bool = False) -> dict[str, Any]:
        """Returns the current contents of all parts as keyword arguments for `CheckpointAction.save`.

        `in_moment` is True if there may be agenda items that are due at the current step but haven't been called yet.
        """
        values, trees = dict[str, Any](), dict[str, Any]()
        for name, part in self._parts.items():
            values[name], own = part.state_dict(in_moment=in_moment)
            trees |= {f"{name}.{key}": tree for key, tree in own.items()}
        train = values["train"]
        return {
            "metadata": {
                "elapsed": train["elapsed"],
                "previous": train["previous"],
                **({checkpoint.TRANSFORMS_KEY: self._transforms} if self._transforms else {}),
            },
            "run": {
                "keys": self._keys,
                "parts": values,
                "sizes": {name: array.size for name, array in trees.get(_BYTES, {}).items()},
                "kept_states": [name for name in trees if name != _BYTES],
            },
            "trees": trees,
        }

    def load(self, opened: checkpoint.Checkpoint, state: Any) -> list[str]:
        """Restores all parts that a checkpoint contains and returns their names.

        The list is empty if the checkpoint contains only a train state.

        Args:
          opened: The checkpoint.
          state: A train state, whose structure and shardings are used to restore the states kept by actions.

        Raises:
          CheckpointError: If the checkpoint is damaged.
          ValueError: If the checkpoint was saved by a run with different PRNG keys, or if its directory was renamed to
            a different step number.
        """
        with opened.understanding():
            run = opened.run()
            if not run:
                logging.warning(
                    "%s contains only a train state, as an Orbax CheckpointManager saves it. The data, the actions and "
                    "unfinished means start from scratch, and damage to it can't be detected.",
                    opened.path,
                )
                return []
            saved_after = run["parts"]["train"]["elapsed"]["steps"]
            if saved_after != opened.step:
                raise ValueError(
                    f"The checkpoint {opened.step} in {opened.path.parent} was saved after step {saved_after}, and its "
                    f"directory must have that name. Rename it to {saved_after}, or remove it."
                )
            check_keys(run, self._keys, opened.path.parent)
            arrays = {name: np.zeros(size, np.uint8) for name, size in run["sizes"].items()}
            trees = opened.trees({**dict.fromkeys(run["kept_states"], state), _BYTES: arrays})
            names = [name for name in self._parts if name in run["parts"]]
            for name in names:
                prefix = f"{name}."
                own = {key.removeprefix(prefix): tree for key, tree in trees.items() if key.startswith(prefix)}
                self._parts[name].load_state_dict(run["parts"][name], own)
            return names


@final
class Rows:
    """The history as a `Saveable` part of a run. A resumed run drops all rows added after the checkpoint was saved.

    Args:
      history: The history.
      job: The processes that train together.
    """

    def __init__(self, history: History, job: agreement.Job):
        self._history, self._job = history, job
        self._saved: Mapping[str, Any] = {}

    def state_dict(self, *, in_moment: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns two dicts to store in a checkpoint; see `Saveable.state_dict`.

        The first dict contains the number of history rows and the checksum of the history file. The second dict is
        empty.
        """
        self._history.flush()
        return {"num_rows": len(self._history), "checksum": self._history.checksum()}, {}

    def load_state_dict(self, saved: Mapping[str, Any], trees: Mapping[str, Any]) -> None:
        """Stores the number of rows and the checksum that the checkpoint contains; `drop_later` uses them."""
        self._saved = {name: saved[name] for name in ("num_rows", "checksum")}

    def begin(self, step_num: int) -> None:
        """Prepares `drop_later` for a run that doesn't restore its history from a checkpoint.

        If `step_num` is 0, `drop_later` will drop all rows. Otherwise, it will drop only the rows of later steps.
        """
        self._saved = {} if step_num else {"num_rows": 0}

    def drop_later(self, step_num: int) -> None:
        """Drops the rows that don't belong to a run that starts or resumes at `step_num`.

        The process that writes the history file drops the rows first; the other processes follow. Dropped rows can't
        be recovered, so all checks that could prevent the run from starting must come before this call.
        """
        if not self._job.is_first:
            agreement.wait_for_all("the history")
        self._history.resume(step_num, **self._saved)
        if self._job.is_shared and self._job.is_first:
            agreement.wait_for_all("the history")


def saved_paths(directories: Sequence[epath.Path], job: agreement.Job) -> list[epath.Path]:
    """Returns the paths of a run's checkpoints, after checking that all processes find the same checkpoints.

    If several processes train together, the first process quarantines damaged checkpoints before this check.
    """
    if job.is_shared:
        if job.is_first:
            checkpoint.quarantine_damaged(checkpoint.all_paths(directories))
        agreement.wait_for_all("before restoring")
    saved = checkpoint.all_paths(directories)
    found = f"The list of checkpoints in {' and '.join(map(str, directories))}, which all processes must share,"
    job.check_same(found, lambda: [f"{directories.index(path.parent)}/{path.name}" for path in saved])
    return saved


def restore_newest(
    saved: Sequence[epath.Path], state: Any, spec: CheckpointSpec, job: agreement.Job
) -> tuple[checkpoint.Checkpoint, Any]:
    """Restores the state of the newest undamaged checkpoint. Returns the checkpoint and the state.

    Raises:
      ValueError: If the restored `state.step` differs from the step in the checkpoint's name.
    """
    restore = lambda opened: opened.restore(state, transforms=spec.transforms)
    restored = checkpoint.open_newest(saved, restore, quarantines=not job.is_shared)
    assert restored is not None
    opened, found = restored
    if hasattr(found, "step") and (count := step_num_of(found)) != opened.step:
        raise ValueError(
            f"No run can resume from checkpoint {opened.step} in {opened.path.parent}, because its state.step is "
            f"{count}. Was updates_per_step wrong? Remove the checkpoint, or give another checkpoint_dir. To begin "
            "with its parameters, call step.restore_model(state, directory)."
        )
    restores = spec.restore_hyperparams
    remedy = "CheckpointSpec(..., restore_hyperparams=False) takes the program's value." if restores else ""
    return opened, reconcile_hyperparams(state, found, restores=restores, remedy=remedy)


def check_keys(run: Mapping[str, Any], keys: Any, directory: epath.PathLike) -> None:
    """Checks that the PRNG keys in a checkpoint's `run` item equal `keys`. Both must be encoded with `encode_keys`.

    Raises:
      ValueError: If the checkpoint has different keys.
    """
    if run["keys"] != keys:
        raise ValueError(
            f"The checkpoints in {directory} come from a run with different PRNG keys (base_prng), so this run can't "
            "resume from them. Give the step the same keys, made from the same seed, or use a different directory."
        )


def withdraw_stop(agenda: Agenda, actions: Iterable[Any]) -> None:
    """Cancels an early stop if all actions that requested it have patience left.

    This can happen if `patience` was increased before the run was resumed.
    """
    stopped_by = [action for action in actions if isinstance(action, EarlyStoppingAction) and action.stopped]
    if stopped_by and not any(action.is_out_of_patience for action in stopped_by):
        agenda.stopped_by = None


def reconcile_hyperparams(given: Any, restored: Any, *, restores: bool, remedy: str) -> Any:
    """Warns if hyperparameters set through `optax.inject_hyperparams` differ between the program and the checkpoint.

    Scheduled hyperparameters are not compared, because they are recomputed at each update.

    Args:
      given: The state that the program created.
      restored: The state from the checkpoint.
      restores: Whether the run continues with the checkpoint's values rather than the program's.
      remedy: The last sentence of the warning, which may explain how to continue with the program's values instead
        of the checkpoint's. May be empty.

    Returns:
      The restored state. If `restores` is False, any hyperparameters that differ have the program's values.
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
    """Returns the run's progress as stored in the checkpoint for the given step.

    The result's `previous` attribute is the progress one batch earlier.
    """
    return checkpoint.Checkpoint.at(directory, step, checkpoint.METADATA_FILE).elapsed()


def checkpoint_actions(loop: ActionLoop) -> list[CheckpointAction]:
    """Returns a loop's `CheckpointAction`s."""
    return [action for action in loop.actions if isinstance(action, CheckpointAction)]


def check_no_newer_checkpoints(savers: Iterable[CheckpointAction], step_num: int) -> None:
    """Checks that a run starting at `step_num` won't save into a directory with later checkpoints from another run.

    Raises:
      ValueError: If a directory contains checkpoints of later steps.
    """
    for action in savers:
        found = checkpoint.all_steps(action.directory)
        if found and found[-1] > step_num:
            raise ValueError(
                f"{action!r} would save among the checkpoints of another run: training starts at step {step_num}, and "
                f"the directory has checkpoints up to step {found[-1]}. Resume from them with "
                f"checkpoint_spec=CheckpointSpec({str(action.directory)!r}), or use a different directory."
            )


def step_num_of(state: Any) -> int:
    """Returns the number of updates that have been applied to a state, or 0 if the state has no `step`."""
    return int(metrics.fetch(getattr(state, "step", 0)))


def end_all(ends: Iterable[tuple[str, Callable[[], Any]]], *, raises: bool) -> None:
    """Calls the functions that end a run, and logs any errors that they raise.

    Args:
      ends: Pairs `(name, function)`. The names are used in error messages.
      raises: Whether to raise an error once all functions have been called. If several functions have failed, the first
        error is raised.
    """
    errors = []
    for name, end in ends:
        try:
            end()
        except Exception as error:
            error.add_note(f"in {name}, at the end of the run")
            logging.exception("At the end of the run, there was an error in %s.", name)
            errors.append(error)
    if errors and raises:
        raise errors[0]
