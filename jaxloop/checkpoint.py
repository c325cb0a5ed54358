"""Runs on disk: saved in one atomic commit, sealed, and verified before they are restored.

The only module that knows Orbax. A checkpoint is a directory named after its step. Those that a `CheckpointWriter` of a
directory wrote hold three items beside each other: `default`, the train state; `run`, a JSON dict; and `trees`, arrays
that are no part of the state. A seal over all of their files, see `jaxloop.seal`, is part of the commit.

A save is `CheckpointWriter.save`: it refuses what would not come back (`_to_be_saved`), waits for the save before and
looks at the directory (`_ready_manager`), and hands all to Orbax. Orbax's thread writes the files, calls `_seal`, and
commits with one rename. A restore is `open_newest`, or `Checkpoint.at`: it verifies the seal, once, and what a
`Checkpoint` reads after that is known to be as it was saved.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from etils import epath
from orbax.checkpoint import checkpoint_managers

from jaxloop import agreement, checks, distributed, files, lock, seal
from jaxloop.files import absolute, prepare_directory
from jaxloop.schedules import Elapsed

# An Orbax manager keeps a single item, which it calls "default", in a directory of that name.
_ITEM = "default"
# What else belongs to a run, beside it.
_RUN_ITEM = "run"
_TREES_ITEM = "trees"
# And there, the metrics by which it tells the best checkpoint, and what it notes about each.
_METRICS_ITEM = "metrics"
METADATA_FILE = "_CHECKPOINT_METADATA"
# In our metadata, which metric tells the best and how: `{"name": "test/accuracy", "mode": "max"}`.
_BEST_KEY = "best"
# And what only this module reads. There must be a seal:
_SEALED_KEY = "jaxloop/sealed"
# What leaves the state has: to ask Orbax takes half as long as to read them.
_LEAVES_KEY = "jaxloop/leaves"
# The format of `run` and of the metadata, and the version of jaxloop that saved.
_FORMAT_KEY, _VERSION_KEY = "jaxloop/format", "jaxloop/version"
# The run that saved.
_RUN_ID_KEY = "jaxloop/run"
_OWN_PREFIX = "jaxloop/"
# Increased whenever an earlier version of jaxloop could not resume from what this one saves, or the other way round.
_FORMAT = 2
# In the directory of each item: a partial copy of a checkpoint is known by it.
_MARKER_FILE = "SAVED_BY_JAXLOOP"
# In a directory of checkpoints, the id of the run that saves there.
_RUN_ID_FILE, _RUN_ID = ".run_id", re.compile(r"[0-9a-f]{32}")
# Where in a directory damaged checkpoints are kept. No name of a step, so neither Orbax nor we look there.
_DAMAGED = "damaged"
# Orbax numbers the saves of a process and keeps the current number in a global variable. Two threads that start saves
# at the same time would wait for each other's directories, for ever.
_start_of_a_save = threading.Lock()
_DELETION_POLL_SECS = 0.1


class CheckpointError(Exception):
    """Something is wrong with the files of checkpoints: damaged, unreadable, or not to be written.

    A checkpoint that is whole but of another model is none: that is a `ValueError`.

    Attributes:
      directory: the directory with one subdirectory a step; None where none is known.
      steps: the steps of the checkpoints with which something is wrong.
    """

    def __init__(self, message: str, directory: epath.PathLike | None = None, steps: Sequence[int] = ()):
        super().__init__(message)
        self.directory: epath.Path | None = None if directory is None else epath.Path(directory)
        self.steps: tuple[int, ...] = tuple(steps)


# What there is ---------------------------------------------------------------------------------------


def all_steps(directory: epath.PathLike) -> list[int]:
    """The steps of the complete checkpoints in a directory, ascending; none where it does not exist."""
    directory = absolute(directory)
    return sorted(ocp.utils.checkpoint_steps(directory)) if directory.is_dir() else []


def metadata(directory: epath.PathLike, step: int) -> dict[str, Any]:
    """What was noted with the checkpoint of a step when it was saved; `{}` where there is nothing.

    Raises:
      FileNotFoundError: there is no such checkpoint.
      CheckpointError: the file in which it is noted is damaged.
    """
    return Checkpoint.at(directory, step, METADATA_FILE).metadata()


def own_version() -> str:
    """Returns the version of jaxloop that saves here."""
    import jaxloop

    return jaxloop.__version__


def best_step(directory: epath.PathLike, best: tuple[str, str] | None = None) -> int | None:
    """The step of the best checkpoint in a directory, the newest of equal ones; None where no metric tells.

    Args:
      directory: of a `CheckpointAction(directory, best=...)`, or of an Orbax manager with a `best_fn`.
      best: the name of the metric and "min" or "max", `("accuracy", "max")`. None for those of the `CheckpointAction`
        that wrote the newest checkpoint.
    """
    directory = absolute(directory)
    steps = all_steps(directory)
    if best is None and steps:
        newest = Checkpoint.open(directory / str(steps[-1]), METADATA_FILE)
        noted = newest.metadata().get(_BEST_KEY)
        with newest.understanding():
            best = noted and (noted["name"], noted["mode"])
    if not best:
        return None
    qualities = {step: _quality(_metrics(directory / str(step)), best) for step in steps}
    known = [step for step in steps if qualities[step] > -math.inf]
    return max(known, key=lambda step: (qualities[step], step), default=None)


def _metrics(path: epath.Path) -> dict[str, Any]:
    """Reads the metrics by which a checkpoint may be the best; `{}` if none were saved with it."""
    return Checkpoint.open(path, _METRICS_ITEM).json(_METRICS_ITEM, _METRICS_ITEM)


def _quality(values: Mapping[str, Any], best: tuple[str, str]) -> float:
    """How good a checkpoint is, more being better; the least for one without the metric, or with NaN."""
    name, mode = best
    value = values.get(name)
    if value is None or math.isnan(value):
        return -math.inf
    return float(value) if mode == "max" else -float(value)


# Reading ---------------------------------------------------------------------------------------------


def restore(directory: epath.PathLike, step: int, state: Any, *, transforms: Any = None) -> Any:
    """Reads the train state of a checkpoint into the structure and onto the devices of `state`, which stays usable.

    All of the checkpoint is verified first. One without a seal, such as those of an Orbax manager, is read as it is.

    Args:
      directory: the directory with one subdirectory a step.
      step: the step of the checkpoint; 0 is a step like others.
      state: a state of JAX arrays of the structure, shapes and dtypes that were saved. Its shardings may be others.
      transforms: Orbax transformations of the saved tree, for `PyTreeRestore`.

    Raises:
      FileNotFoundError: there is no such checkpoint.
      CheckpointError: its files are damaged; the error lists them.
      ValueError: the checkpoint's leaves differ from the state's in path, shape or dtype; the error lists them.
    """
    try:
        return Checkpoint.at(directory, step).restore(state, transforms=transforms)
    except CheckpointError as error:
        hint = "checkpoint.restore_newest restores the newest that is whole, and moves damaged ones aside."
        raise CheckpointError(f"{error}\n{hint}", error.directory, error.steps) from error.__cause__


def restore_newest(
    directory: epath.PathLike, state: Any, *, transforms: Any = None, quarantines: bool = True
) -> tuple[Any, int] | None:
    """Restores the newest checkpoint that is whole; see `restore`.

    Newer ones that are damaged are moved to `<directory>/damaged/<step>`, with a warning each, once a whole one is
    restored: their steps can be saved again. Whoever only reads, while another process may be writing, says
    `quarantines=False`.

    Returns:
      The state and its step; None where the directory holds no checkpoint.

    Raises:
      CheckpointError: there are checkpoints, and all are damaged; none was moved.
      ValueError: the newest that is whole does not fit the state; none was moved.
    """
    opened = open_newest(directory, state, transforms=transforms, quarantines=quarantines)
    return opened and (opened[1], opened[0].step)


def open_newest(
    directory: epath.PathLike,
    state: Any,
    *,
    transforms: Any = None,
    quarantines: bool = True,
    steps: Sequence[int] | None = None,
) -> "tuple[Checkpoint, Any] | None":
    """Like `restore_newest`; returns the checkpoint, for what else is to be read from it, and the state.

    `steps` are those of `all_steps`, for a caller that has listed the directory.
    """
    found, errors = _newest_complete(directory, lambda opened: opened.restore(state, transforms=transforms), steps)
    if found is not None:
        for error in errors:
            consequence = f"Step {found[0].step} was restored instead."
            if quarantines:
                _quarantine(error, consequence)
            else:
                logging.warning("%s\n%s", error, consequence)
    elif errors:
        raise CheckpointError(
            f"All checkpoints in {absolute(directory)} are damaged, and nothing was restored or moved.\n"
            + "\n".join(map(str, errors))
            + "\nTo start from scratch, give another directory or move these away.",
            absolute(directory),
            [error.steps[0] for error in errors],
        )
    return found


def quarantine_damaged(directory: epath.PathLike) -> None:
    """Moves the checkpoints whose seal is broken and that are newer than the newest whole one, see `restore_newest`.

    In a job of many processes, the first does so before all of them restore. Where all are damaged, none is moved.
    """
    found, errors = _newest_complete(directory, lambda opened: None)
    if found is not None:
        for error in errors:
            _quarantine(error, f"Step {found[0].step} is restored instead.")


def _newest_complete(
    directory: epath.PathLike, read: Callable[["Checkpoint"], Any], steps: Sequence[int] | None = None
) -> tuple[tuple["Checkpoint", Any] | None, list[CheckpointError]]:
    """Returns the newest checkpoint that can be read, with what was read, or None; and the errors of newer ones."""
    errors: list[CheckpointError] = []
    directory = absolute(directory)
    for step in reversed(all_steps(directory) if steps is None else steps):
        try:
            opened = Checkpoint.open(directory / str(step))
            return (opened, read(opened)), errors
        except CheckpointError as error:
            errors.append(error)
    return None, errors


def _quarantine(error: CheckpointError, consequence: str) -> None:
    """Moves the damaged checkpoint that an error is about out of the way, and warns of it."""
    assert error.directory is not None
    (step,) = error.steps
    target, count = error.directory / _DAMAGED / str(step), 1
    while target.exists():
        count += 1
        target = error.directory / _DAMAGED / f"{step}-{count}"
    try:
        files.make_directory(target.parent)
        (error.directory / str(step)).rename(target)
        where = f"It was moved to {target}."
    except OSError as reason:
        where = f"It could not be moved to {target} ({reason})."
    logging.warning("%s\n%s %s", error, where, consequence)


def run(directory: epath.PathLike, step: int) -> dict[str, Any]:
    """The JSON dict that was saved as `run` with the checkpoint of a step; `{}` where none was.

    Raises:
      FileNotFoundError: there is no such checkpoint.
      CheckpointError: its file is damaged.
    """
    return Checkpoint.at(directory, step, _RUN_ITEM).run()


def trees(directory: epath.PathLike, step: int, templates: Mapping[str, Any]) -> dict[str, Any]:
    """Reads trees that were saved beside the state into the structures and onto the devices of `templates`.

    Args:
      directory: the directory with one subdirectory a step.
      step: the step of the checkpoint.
      templates: for each name that shall be read, a tree of the structure, shapes and dtypes that were saved. Where it
        has JAX arrays, JAX arrays of their shardings are returned, where it has NumPy arrays NumPy arrays.

    Raises:
      FileNotFoundError: there is no such checkpoint.
      CheckpointError: the files of the trees are damaged.
      ValueError: the saved trees differ from the templates in path, shape or dtype; the error lists the leaves.
    """
    return Checkpoint.at(directory, step, _TREES_ITEM).trees(templates)


@final
@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files were verified when it was opened; what is read from it later is not verified again.

    Attributes:
      path: its directory, whose name is the step.
      is_sealed: whether its files are known to be as they were saved; what an Orbax manager saves has no seal.
      noted: what was noted with it, by the caller and by this module.
    """

    path: epath.Path
    is_sealed: bool
    noted: Mapping[str, Any]

    @classmethod
    def at(cls, directory: epath.PathLike, step: int, below: str = "") -> "Checkpoint":
        """Opens the checkpoint of a step, and verifies its files, or those below a path in it.

        Raises:
          FileNotFoundError: there is no such checkpoint.
          CheckpointError: the files are damaged, or of another run; the error lists them.
        """
        found = all_steps(directory)
        if step not in found:
            raise FileNotFoundError(
                f"No checkpoint of step {step} in {directory}, which holds "
                + (f"steps {', '.join(map(str, found))}." if found else "none.")
            )
        return cls.open(absolute(directory) / str(step), below)

    @classmethod
    def open(cls, path: epath.Path, below: str = "") -> "Checkpoint":
        """Like `at`, for the directory of a checkpoint that exists."""
        is_sealed = seal.is_sealed(path)
        problems = seal.problems(path, below) if is_sealed else []
        noted = {} if problems else _noted(path)
        if not is_sealed and _is_jaxloop_checkpoint(path, noted):
            problems = seal.problems(path)  # The seal is missing.
        saved_by, belongs_to = noted.get(_RUN_ID_KEY), _read_run_id(path.parent)
        if None not in (saved_by, belongs_to) and saved_by != belongs_to:
            problems.append(f"another run saved it: run {saved_by}, and this directory belongs to run {belongs_to}")
        if problems:
            raise _damaged(path, problems)
        return cls(path, is_sealed, noted)

    @property
    def step(self) -> int:
        """The step after which it was saved."""
        return int(self.path.name)

    def elapsed(self) -> Elapsed:
        """Returns the progress of the run; without a note of it, the step alone.

        Raises:
          CheckpointError: what was noted is no progress.
        """
        with self.understanding():
            previous = Elapsed(**self.noted["previous"]) if "previous" in self.noted else None
            return Elapsed(**self.noted.get("elapsed", {"steps": self.step}), previous=previous)

    def metadata(self) -> dict[str, Any]:
        """Returns what the caller has noted with it."""
        return {key: value for key, value in self.noted.items() if not key.startswith(_OWN_PREFIX)}

    def run(self) -> dict[str, Any]:
        """Reads the JSON dict that was saved as `run`; `{}` where none was."""
        return self.json(_RUN_ITEM)

    def json(self, item: str, filename: str = "metadata") -> dict[str, Any]:
        """Reads the JSON dict of an item, from the file name that Orbax gives it; `{}` if there is none."""
        if not (self.path / item / filename).exists():
            return {}
        with _reading(self.path, f"{item}/{filename}"):
            return dict(ocp.JsonCheckpointHandler(filename=filename).restore(self.path / item) or {})

    def restore(self, state: Any, *, transforms: Any = None) -> Any:
        """Reads the train state; see `restore` of this module."""
        return self._tree(_ITEM, state, transforms)

    def trees(self, templates: Mapping[str, Any]) -> dict[str, Any]:
        """Reads trees that were saved beside the state; see `trees` of this module."""
        with_leaves = {name: tree for name, tree in templates.items() if jax.tree.leaves(tree)}
        return {**templates, **(self._tree(_TREES_ITEM, with_leaves) if with_leaves else {})}

    @contextlib.contextmanager
    def understanding(self) -> Iterator[None]:
        """Turns errors in interpreting what was saved into a `CheckpointError` that names both versions.

        Raises:
          CheckpointError: it was saved in another format, or the body raised a KeyError or the like.
        """
        by, version = self.noted.get(_VERSION_KEY, "an unknown version"), own_version()
        if _SEALED_KEY in self.noted and self.noted.get(_FORMAT_KEY) != _FORMAT:
            raise CheckpointError(
                f"The checkpoint {self.path} was saved by jaxloop {by} in format {self.noted.get(_FORMAT_KEY)}, and "
                f"jaxloop {version} resumes from format {_FORMAT}. Resume it with jaxloop {by}, or restore its train "
                "state alone with step.restore_model(state, directory) and start a run in another directory.",
                self.path.parent,
                [self.step],
            )
        try:
            yield
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise CheckpointError(
                f"The checkpoint {self.path}, saved by jaxloop {by}, does not hold what jaxloop {version} expects "
                f"({type(error).__name__}: {error}). Resume it with the version and the program that saved it, or "
                "restore its train state alone with step.restore_model(state, directory) and start a run in another "
                "directory.",
                self.path.parent,
                [self.step],
            ) from error

    def _tree(self, item: str, tree: Any, transforms: Any = None) -> Any:
        """Reads an item into the structure and onto the devices of a tree; of `trees`, only the names that it has."""
        template = _storable(tree)
        wanted = checks.leaves_by_path(template)
        if transforms is None:
            template = self.fitted(item, template)
        handler = ocp.PyTreeCheckpointHandler()
        args = ocp.args.PyTreeRestore(
            item=template,
            restore_args=jax.tree.map(_restore_args, template),
            transforms=transforms,
            partial_restore=item == _TREES_ITEM,
        )
        with _reading(self.path, item, self.is_sealed), ocp.Checkpointer(handler) as checkpointer:
            restored = checkpointer.restore(self.path / item, args=args)
        values = checks.leaves_by_path(restored)
        _check_fits(self.path, item, values, wanted)  # What `transforms` made of it, too.
        leaves, structure = jax.tree.flatten(tree)
        return jax.tree.unflatten(structure, map(_as_in, leaves, [values[path] for path in wanted]))

    def fitted(self, item: str, template: Any) -> Any:
        """Returns the saved tree of an item with the template's leaves; no array is read.

        Where it has no leaf, as in an empty dict, the two trees may differ.

        Raises:
          ValueError: they differ in the path, shape or dtype of a leaf.
        """
        if item == _ITEM and self.is_sealed and self.noted.get(_LEAVES_KEY) == _fingerprint(template):
            return template
        saved = {}
        if item == _ITEM or (self.path / item).exists():
            with _reading(self.path, item, self.is_sealed):
                saved = ocp.PyTreeCheckpointHandler().metadata(self.path / item).tree
        if item == _TREES_ITEM:
            saved = {name: saved[name] for name in template if name in saved}
        wanted = checks.leaves_by_path(template)
        _check_fits(self.path, item, checks.leaves_by_path(saved), wanted)
        return jax.tree_util.tree_map_with_path(lambda path, _: wanted[checks.path_name(path)], saved)


def _noted(path: epath.Path) -> dict[str, Any]:
    """Reads what was noted with a checkpoint; `{}` if there is nothing."""
    if not (path / METADATA_FILE).exists():
        return {}
    with _reading(path, METADATA_FILE):
        if seal.is_sealed(path):  # Of this file only what we noted is sealed: the rest, which Orbax reads, may be bad.
            return {**files.parse_json(files.read_bytes(path / METADATA_FILE))["custom_metadata"]}
        return dict(ocp.metadata.get_step_metadata(path).custom_metadata or {})


def _is_jaxloop_checkpoint(path: epath.Path, noted: Mapping[str, Any]) -> bool:
    """Returns whether a `CheckpointWriter` of a directory saved this: each part of it tells, where others are missing.

    What plain Orbax managers save, ours among them, has no such mark.
    """
    return _SEALED_KEY in noted or any((each / _MARKER_FILE).exists() for each in path.iterdir())


def _read_run_id(directory: epath.Path) -> str | None:
    """The id of the run to which a directory belongs; None where none is known."""
    if not (directory / _RUN_ID_FILE).exists():
        return None
    try:
        found = files.read_bytes(directory / _RUN_ID_FILE, 100).decode().strip()
    except ValueError:
        return None
    return found if _RUN_ID.fullmatch(found) else None


def _run_id_of(directory: epath.Path) -> str:
    """The id of the run that saves in a directory; if it has none, that of its newest checkpoint, or a new one."""
    run_id = _read_run_id(directory)
    if run_id is None:
        saved = (_noted(directory / str(step)).get(_RUN_ID_KEY) for step in reversed(all_steps(directory)))
        run_id = next((each for each in saved if isinstance(each, str) and _RUN_ID.fullmatch(each)), uuid.uuid4().hex)
    return run_id


def is_being_deleted(directory: epath.PathLike, step: int) -> bool:
    """Returns whether a checkpoint is gone; where it becomes smaller, waits until it is."""
    path = absolute(directory) / str(step)
    names = None
    while path.exists():
        before, names = names, _names_below(path)
        if names == before:
            return False
        time.sleep(_DELETION_POLL_SECS)
    return True


def _names_below(path: epath.Path) -> list[str]:
    return sorted(str(name) for parent in os.walk(path) for name in (*parent[1], *parent[2]))


def _damaged(path: epath.Path, problems: Sequence[str]) -> CheckpointError:
    shown = checks.first_lines([f"  {problem}" for problem in problems])
    return CheckpointError(
        f"The checkpoint {path} is damaged:\n" + "\n".join(shown),
        path.parent,
        [int(path.name)],
    )


@contextlib.contextmanager
def _reading(path: epath.Path, what: str, sealed: bool = False) -> Iterator[None]:
    """Turns what goes wrong in reading a checkpoint into a `CheckpointError`; not where its seal says it is whole."""
    try:
        yield
    except Exception as error:
        if sealed:
            error.add_note(f"in reading {what} of the checkpoint {path}, whose files are as they were saved")
            raise
        raise _damaged(path, [f"{what} can't be read: {type(error).__name__}: {error}"]) from error


def check_fits(directory: epath.PathLike, step: int, state: Any) -> None:
    """Raises what `restore` would raise for this state, which may be in shapes; no array is read.

    Raises:
      FileNotFoundError: there is no such checkpoint.
      CheckpointError: what says which leaves it has is damaged. Other damage is not looked for.
      ValueError: the checkpoint's leaves differ from the state's in path, shape or dtype; the error lists them.
    """
    Checkpoint.at(directory, step, METADATA_FILE).fitted(_ITEM, jax.eval_shape(_storable, state))


def _check_fits(path: epath.Path, item: str, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    differences = checks.compare(saved, wanted)
    if not differences:
        return
    misfit, what, remedy = (
        "does not fit this state",
        "state",
        "Build the model and the optimizer as they were when it was saved, give another directory, or map the old "
        "names onto the new ones with `transforms`.",
    )
    if item == _TREES_ITEM:
        misfit, what = "has trees that do not fit these templates", "template"
        remedy = "Give templates of the structure, shapes and dtypes that were saved, or another directory."
    raise ValueError(
        f"The checkpoint {path} {misfit}. Leaves that differ (checkpoint -> {what}):\n"
        + "\n".join(differences)
        + f"\n{remedy}"
    )


def _fingerprint(tree: Any) -> str:
    """What is equal of trees whose leaves have the same paths, shapes and dtypes, and that have the same empty places.

    Orbax restores into no other tree, unless it is asked what it has.
    """
    is_empty = lambda node: node is None or (isinstance(node, dict | list | tuple) and not node)
    nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_empty)
    lines = sorted([f"{checks.path_name(path)}: {checks.describe(node)}" for path, node in nodes])
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _restore_args(leaf: Any) -> ocp.RestoreArgs:
    """Without a dtype or a shape, to which Orbax would cast and pad: what differs is an error."""
    sharding = getattr(leaf, "sharding", None)
    return ocp.RestoreArgs(restore_type=np.ndarray) if sharding is None else ocp.ArrayRestoreArgs(sharding=sharding)


def _storable(tree: Any) -> Any:
    """The tree with typed PRNG keys as their data, the form in which Orbax keeps them."""
    return jax.tree.map(lambda leaf: jax.random.key_data(leaf) if _is_typed_key(leaf) else leaf, tree)


def _as_in(leaf: Any, restored: Any) -> Any:
    return jax.random.wrap_key_data(restored, impl=jax.random.key_impl(leaf)) if _is_typed_key(leaf) else restored


def _is_typed_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


# Writing ---------------------------------------------------------------------------------------------


@final
class CheckpointWriter:
    """Writes runs through an Orbax `CheckpointManager`, asynchronously where the manager does.

    Args:
      manager_or_directory: a manager that keeps single items, of the present or the older style: it saves the state
        and no more, unsealed. Or a directory, for which a manager is made when the first state is saved, and again
        after `close` and after a save that failed.
      keep: how many checkpoints a manager made here keeps, the newest ones; None for all.
      best: the name of a metric and "min" or "max": a manager made here keeps the best checkpoint too. Of equal ones
        it is the newest.
      clock: tells the time in seconds.

    Attributes:
      last_stall_secs: how long the last save held its caller up; None before the first.
      last_wait_secs: how much of that it waited for the save before to be committed.
    """

    def __init__(
        self,
        manager_or_directory: ocp.CheckpointManager | epath.PathLike,
        keep: int | None = 3,
        best: tuple[str, str] | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._keep, self._best, self._clock = keep, best, clock
        self.last_stall_secs: float | None = None
        self.last_wait_secs: float | None = None
        self._manager: ocp.CheckpointManager | None = None
        self._owns_manager = isinstance(manager_or_directory, str | os.PathLike)
        self._closed = False  # A manager that was given; one of our own is made anew.
        self._step: int | None = None  # Of the save under way, or of the last one.
        self._saved: int | None = None  # The step of the last save that was committed since `close`.
        self._noted: dict[str, Any] = {}  # With that save.
        if best is not None and not self._owns_manager:
            raise ValueError(
                "A CheckpointManager has options of its own for which checkpoints it keeps, so `best` goes with a "
                "directory. Give CheckpointManagerOptions(best_fn=...) to the manager, or the directory in its place."
            )
        if self._owns_manager:
            self._directory = absolute(manager_or_directory)
        else:
            self._manager = manager_or_directory  # pyright: ignore[reportAttributeAccessIssue]
            self._directory = epath.Path(manager_or_directory.directory)  # pyright: ignore[reportAttributeAccessIssue]
            logging.info(
                "The checkpoint manager of %s saves the train state alone. With the directory in its place, the state "
                "of the loops and actions would be saved too, and all be sealed against damage.",
                self._directory,
            )
        self._lock = lock.DirectoryLock(self._directory)  # That of a run, which is checked here and not acquired.

    @property
    def directory(self) -> epath.Path:
        """The directory with one subdirectory a step."""
        return self._directory

    def save(
        self,
        step: int,
        state: Any,
        metrics: Mapping[str, float] | None = None,
        metadata: Mapping[str, Any] | None = None,
        *,
        run: Mapping[str, Any] | None = None,
        trees: Mapping[str, Any] | None = None,
    ) -> bool:
        """Saves a state and what else belongs to the run; a step that is there already is left as it is.

        All of it is one atomic commit. What is given may be changed or donated once this returns: it is copied before.
        A save waits until the one before is committed.

        Args:
          step: its number.
          state: the state.
          metrics: how good it is, for a manager that keeps the best; others do not keep them.
          metadata: what is to be noted with it, as JSON can: numbers, strings, lists and dicts. See `metadata` of this
            module.
          run: a JSON dict, which may be some MB; see `run` of this module. Only with a directory.
          trees: trees of JAX and NumPy arrays under their names; see `trees` of this module. Only with a directory.

        Returns:
          Whether a save began: False for a step that is there, or that the manager's own policy passes over.

        Raises:
          CheckpointError: the last save failed in the background, or this one did. The error has its step. With a
            directory nothing is left of the save that failed, and the next one may succeed.
        """
        if self._closed:
            raise ValueError(
                f"The checkpoint manager of {self._directory} was closed when the last run ended, and would lose "
                "what it is given. Make a new CheckpointManager, or give CheckpointAction the directory instead."
            )
        began, self.last_wait_secs = self._clock(), 0.0
        try:
            args, noted = self._to_be_saved(state, metadata or {}, run or {}, trees or {})
            with self._named(step):
                manager = self._ready_manager()
                if self._has(step, manager):
                    logging.warning(
                        "%s has a checkpoint of step %d already. It stays, and the state given now is not saved.",
                        self._directory,
                        step,
                    )
                    return False
                if not manager.should_save(step):
                    return False
                if self._owns_manager:
                    noted[_RUN_ID_KEY] = _run_id_of(self._directory)
                else:
                    self._wait_for_previous_save()  # Only now: the manager may have passed this step over.
                if self._best is not None:
                    metrics = metrics or {}  # With None, Orbax warns at each save.
                self._step, self._noted = step, noted
                with _start_of_a_save:
                    return manager.save(
                        step,
                        args=args,
                        metrics=None if metrics is None else dict(metrics),
                        custom_metadata=noted or None,
                    )
        finally:
            self.last_stall_secs = self._clock() - began

    def _to_be_saved(
        self, state: Any, metadata: Mapping[str, Any], run: Mapping[str, Any], trees: Mapping[str, Any]
    ) -> tuple[ocp.args.CheckpointArgs, dict[str, Any]]:
        """Returns the items as Orbax takes them, and what is noted with them; raises where they would not come back."""
        noted = _json_copy(metadata, "metadata")
        if self._best is not None:
            noted[_BEST_KEY] = dict(zip(("name", "mode"), self._best, strict=True))
        state = _saved_form(checks.adopt(state), "the state")
        items: dict[str, ocp.args.CheckpointArgs] = {_ITEM: ocp.args.PyTreeSave(state)}
        if not self._owns_manager:
            return items[_ITEM], noted
        if run:
            items[_RUN_ITEM] = ocp.args.JsonSave(_json_copy(run, "run"))
        if with_leaves := _checked_trees(trees):
            items[_TREES_ITEM] = ocp.args.PyTreeSave(_saved_form(with_leaves, "trees"))
        noted |= {
            _SEALED_KEY: True,
            _LEAVES_KEY: _fingerprint(state),
            _FORMAT_KEY: _FORMAT,
            _VERSION_KEY: own_version(),
        }
        return ocp.args.Composite(**items), noted

    def _ready_manager(self) -> ocp.CheckpointManager:
        """Returns the manager; one of our own can save now, into a directory that was looked at."""
        if self._owns_manager:
            self._wait_for_previous_save()  # Whether it is a checkpoint is known only then.
            self._check_directory()  # Before `_open` makes it.
        return self._manager or self._open()

    def _check_directory(self) -> None:
        """Raises, in all processes, if no save can succeed now: it would have some of them wait for the others."""
        problem = ""
        if distributed.is_first_process():
            try:
                self._check_is_kept()
                if jax.process_count() > 1:
                    prepare_directory(self._directory)
            except (OSError, lock.DirectoryLostError) as error:
                problem = f"{type(error).__name__}: {error}"
                if jax.process_count() == 1:
                    raise
        if problem := agreement.gather_texts(problem)[0]:
            raise agreement.known_to_all_processes(RuntimeError(problem))

    def _check_is_kept(self) -> None:
        """Raises if the directory is no longer the one that the run has locked, or the last checkpoint is gone."""
        self._lock.check()
        if not self._owns_manager or self._saved is None or (self._directory / str(self._saved)).exists():
            return
        if max(all_steps(self._directory), default=-1) < self._saved:  # Else a newer one has replaced it.
            raise FileNotFoundError(f"The checkpoint of step {self._saved} was saved, and is no longer there")

    def _has(self, step: int, manager: ocp.CheckpointManager) -> bool:
        """Whether there is a complete checkpoint of a step, of this run or another program."""
        if not self._owns_manager:
            return step in manager.all_steps()
        # Orbax starts threads to look through a directory, which takes longer than to look for one name.
        return (self._directory / str(step)).exists() and step in all_steps(self._directory)

    def _wait_for_previous_save(self) -> None:
        began = self._clock()
        try:
            self.wait()
        finally:
            self.last_wait_secs = self._clock() - began

    def _open(self) -> ocp.CheckpointManager:
        prepare_directory(self._directory)
        if self._best is not None and distributed.is_first_process():
            for step in all_steps(self._directory):
                try:
                    _metrics(self._directory / str(step))
                except CheckpointError as error:  # Such as one whose deletion was killed half-way.
                    _quarantine(error, "It can't be the best any more.")
        self._manager = ocp.CheckpointManager(self._directory, options=self._options())
        return self._manager

    def _options(self) -> ocp.CheckpointManagerOptions:
        """Of a manager made here."""
        best = self._best
        options = ocp.CheckpointManagerOptions(
            max_to_keep=self._keep,
            cleanup_tmp_directories=True,
            async_options=ocp.options.AsyncOptions(
                post_finalization_callback=self._seal,
                # Where a directory can't be made, `save` raises. Otherwise Orbax's threads wait five minutes for it.
                create_directories_asynchronously=False,
            ),
        )
        if best is None:
            return options
        quality = lambda values: _quality(values, best)
        keeps_best = checkpoint_managers.BestN(get_metric_fn=quality, n=1, keep_checkpoints_without_metrics=False)
        return dataclasses.replace(
            options,
            max_to_keep=None,
            best_fn=quality,  # Without it, Orbax does not write the metrics.
            preservation_policy=checkpoint_managers.AnyPreservationPolicy(
                [checkpoint_managers.LatestN(self._keep), keeps_best]
            ),
        )

    def _seal(self) -> None:
        """Seals the save under way: Orbax calls this in its thread when all is written, before the commit."""
        path = self._directory / f"{self._step}{ocp.utils.TMP_DIR_SUFFIX}"
        if not path.exists():
            path = self._directory / str(self._step)  # Where a store can't rename, there is no temporary directory.
        for item in path.iterdir():
            if item.is_dir():
                with files.open_file(item / _MARKER_FILE, "w") as file:
                    file.write("A part of a checkpoint that jaxloop saved, with a SEAL in the directory above.\n")
        # Orbax is still writing this file, and puts the time of the commit into it afterwards.
        seal.write(path, {METADATA_FILE: {"custom_metadata": self._noted}})
        self._lock.check()
        if _read_run_id(self._directory) is None:
            with files.open_file(self._directory / _RUN_ID_FILE, "w") as file:
                file.write(f"{self._noted[_RUN_ID_KEY]}\n")

    @contextlib.contextmanager
    def _named(self, step: int | None) -> Iterator[None]:
        """Turns what goes wrong in a save into a `CheckpointError`; with a directory, clears what the save left."""
        try:
            yield
        except CheckpointError:  # It has its step: that of an earlier save.
            raise
        except Exception as error:
            if self._owns_manager:
                self._give_up_manager()
            try:
                found = ", ".join(map(str, all_steps(self._directory))) or "none"
            except OSError as reason:
                found = f"unknown, for it can't be listed ({reason})"
            raise CheckpointError(
                f"Saving the checkpoint of step {step} in {self._directory} failed: {type(error).__name__}: {error}\n"
                f"Complete checkpoints there: {found}. See that the directory can be written and has room, and save "
                "again.",
                self._directory,
                [] if step is None else [step],
            ) from error

    def _give_up_manager(self) -> None:
        """After an error: a manager would take the step that failed for saved, and its files stay on a full disk."""
        manager, self._manager = self._manager, None
        if manager is not None:
            with contextlib.suppress(Exception):  # That of the save is the one to be told.
                manager.close()
        with contextlib.suppress(OSError, lock.DirectoryLostError):  # The next manager tries again.
            self._lock.check()  # In a directory of another run, these are not ours.
            clear_leftovers(self._directory)

    def wait(self) -> None:
        """Waits until what was saved is committed.

        Raises:
          CheckpointError: the last save failed. It is said once.
        """
        if self._manager is not None and not self._closed:
            with self._named(self._step):
                self._manager.wait_until_finished()
            self._saved = self._step

    def close(self) -> None:
        """Waits, and ends the manager's threads. A manager that was given can save no more then.

        Raises:
          CheckpointError: the last save failed, or is no longer on disk. The error is raised once.
        """
        try:
            self.wait()
            if self._saved is not None and distributed.is_first_process():
                with self._named(self._saved):
                    self._check_is_kept()
        finally:
            self._saved = None
            if self._manager is not None and not self._closed:
                self._manager.close()
                if self._owns_manager:
                    self._manager = None
                else:
                    self._closed = True


def _json_copy(value: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns what a file of JSON gives back; raises a `TypeError` that names the place if that differs."""
    text = ""
    with contextlib.suppress(TypeError):  # Of which the place is found below.
        text = json.dumps(value, default=lambda mapping: {**mapping})
    found: list[tuple[str, Any]] = [(name, value)]
    for path, each in found:  # It grows meanwhile, by what is one level further in.
        if isinstance(each, Mapping):
            for key in each:
                if not isinstance(key, str):
                    said = f"{path} of a checkpoint must have strings as keys, got {key!r}. Write {str(key)!r}."
                    raise TypeError(said)
            found += [(f"{path}[{key!r}]", inner) for key, inner in each.items()]
        elif isinstance(each, list | tuple):
            found += [(f"{path}[{index}]", inner) for index, inner in enumerate(each)]
        elif each is not None and not isinstance(each, bool | int | float | str):
            raise TypeError(
                f"{path} of a checkpoint must be a number, a string, a list or a dict, got {each!r}. Arrays belong in "
                "the state; a NumPy number has .item()."
            )
    return json.loads(text)


def _checked_trees(trees: Mapping[str, Any]) -> dict[str, Any]:
    """The trees that have leaves; raises where a leaf is no array. Orbax copies both kinds before it returns."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(dict(trees)):
        is_numeric = isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind not in "OSUMm"
        if not is_numeric and not isinstance(leaf, jax.Array):
            raise TypeError(
                "trees of a checkpoint must hold JAX and NumPy arrays of numbers, and "
                f"{checks.path_name(path)} is {leaf!r}. Numbers, strings and lists belong in `run`."
            )
    as_array = lambda leaf: leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
    return {name: jax.tree.map(as_array, tree) for name, tree in trees.items() if jax.tree.leaves(tree)}


def _saved_form(tree: Any, what: str) -> Any:
    """The tree as Orbax keeps it; raises where it would keep two leaves under one name, and so lose one."""
    names: dict[str, str] = {}
    for keys, _ in jax.tree_util.tree_leaves_with_path(tree):
        path = checks.path_name(keys)
        name = path.replace("/", ".")
        if name in names:
            raise ValueError(
                f"{what} of a checkpoint can't have two leaves {names[name]} and {path}: one of them would be lost. "
                "Rename one."
            )
        names[name] = path
    return _storable(tree)


def clear_leftovers(directory: epath.PathLike) -> list[str]:
    """Removes what saves that were killed left in a directory, where nothing else may be saving now.

    In a job of many processes, it is the first that does so.

    Returns:
      The names of the temporary directories that were removed; they are logged.
    """
    directory = absolute(directory)
    if not directory.exists() or not distributed.is_first_process():
        return []
    names = sorted(path.name for path in directory.iterdir() if ocp.utils.TMP_DIR_SUFFIX in path.name)
    for name in names:
        (directory / name).rmtree()
    if names:
        logging.info("Removed what was left of incomplete saves in %s: %s", directory, ", ".join(names))
    return names
