"""Runs on disk: saved in one atomic commit, sealed, and verified before they are restored.

The only module that knows Orbax. A checkpoint is a directory named after its step. Those that a `CheckpointWriter` of a
directory wrote hold three items beside each other: `default`, the train state; `run`, a JSON dict; and `trees`, arrays
that are no part of the state. A seal over all of their files, see `jaxloop.seal`, is part of the commit.
"""

import contextlib
import dataclasses
import functools
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


def _noted(path: epath.Path) -> dict[str, Any]:
    if not (path / METADATA_FILE).exists():
        return {}
    with _reading(path, METADATA_FILE):
        if seal.is_sealed(path):  # Of this file only what we noted is sealed: the rest, which Orbax reads, may be bad.
            return {**files.parse_json(files.read_bytes(path / METADATA_FILE))["custom_metadata"]}
        return dict(ocp.metadata.get_step_metadata(path).custom_metadata or {})


def _version() -> str:
    import jaxloop

    return jaxloop.__version__


def _metrics(directory: epath.PathLike, step: int) -> dict[str, Any]:
    """The metrics that tell how good the checkpoint of a step is; `{}` where none were saved with it."""
    return _json_item(Checkpoint.at(directory, step, _METRICS_ITEM).path, _METRICS_ITEM, filename=_METRICS_ITEM)


def _json_item(path: epath.Path, item: str, filename: str = "metadata") -> dict[str, Any]:
    """The JSON dict of an item, from the file name that Orbax gives it; `{}` where there is none."""
    if not (path / item / filename).exists():
        return {}
    with _reading(path, f"{item}/{filename}"):
        return dict(ocp.JsonCheckpointHandler(filename=filename).restore(path / item) or {})


def best_step(directory: epath.PathLike, best: tuple[str, str] | None = None) -> int | None:
    """The step of the best checkpoint in a directory, the newest of equal ones; None where no metric tells.

    Args:
      directory: of a `CheckpointAction(directory, best=...)`, or of an Orbax manager with a `best_fn`.
      best: the name of the metric and "min" or "max", `("accuracy", "max")`. None for those of the `CheckpointAction`
        that wrote the newest checkpoint.
    """
    steps = all_steps(directory)
    if best is None and steps:
        newest = Checkpoint.at(directory, steps[-1], METADATA_FILE)
        noted = newest.metadata().get(_BEST_KEY)
        with newest.understanding():
            best = noted and (noted["name"], noted["mode"])
    if not best:
        return None
    qualities = {step: _quality(_metrics(directory, step), best) for step in steps}
    known = [step for step in steps if qualities[step] > -math.inf]
    return max(known, key=lambda step: (qualities[step], step), default=None)


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
    directory: epath.PathLike, state: Any, *, transforms: Any = None, moves_aside: bool = True
) -> tuple[Any, int] | None:
    """Restores the newest checkpoint that is whole; see `restore`.

    Newer ones that are damaged are moved to `<directory>/damaged/<step>`, with a warning each, once a whole one is
    restored: their steps can be saved again. Whoever only reads, while another process may be writing, says
    `moves_aside=False`.

    Returns:
      The state and its step; None where the directory holds no checkpoint.

    Raises:
      CheckpointError: there are checkpoints, and all are damaged; none was moved.
      ValueError: the newest that is whole does not fit the state; none was moved.
    """
    opened = open_newest(directory, state, transforms=transforms, moves_aside=moves_aside)
    return opened and (opened[1], opened[0].step)


def open_newest(
    directory: epath.PathLike, state: Any, *, transforms: Any = None, moves_aside: bool = True
) -> "tuple[Checkpoint, Any] | None":
    """Like `restore_newest`; returns the checkpoint, for what else is to be read from it, and the state."""
    directory = absolute(directory)

    def read(step: int) -> tuple[Checkpoint, Any]:
        opened = Checkpoint.at(directory, step)
        return opened, opened.restore(state, transforms=transforms)

    step, found, errors = _newest_whole(directory, read)
    if step is not None:
        for damaged, error in errors.items():
            if moves_aside:
                _move_aside(directory, damaged, error, f"Step {step} was restored instead.")
            else:
                logging.warning("%s\nStep %d was restored instead.", error, step)
        return found
    if errors:
        raise CheckpointError(
            f"All checkpoints in {directory} are damaged, and nothing was restored or moved.\n"
            + "\n".join(map(str, errors.values()))
            + "\nTo start from scratch, give another directory or move these away.",
            directory,
            list(errors),
        )
    return None


def move_damaged_aside(directory: epath.PathLike) -> None:
    """Moves the checkpoints whose seal is broken and that are newer than the newest whole one, see `restore_newest`.

    In a job of many processes, the first does so before all of them restore. Where all are damaged, none is moved.
    """
    step, _, errors = _newest_whole(directory, lambda step: Checkpoint.at(directory, step))
    for damaged, error in errors.items() if step is not None else ():
        _move_aside(absolute(directory), damaged, error, f"Step {step} is restored instead.")


def _newest_whole(
    directory: epath.PathLike, read: Callable[[int], Any]
) -> tuple[int | None, Any, dict[int, CheckpointError]]:
    """The newest step that can be read, or None; what was read; and what is wrong with newer ones."""
    errors: dict[int, CheckpointError] = {}
    for step in reversed(all_steps(directory)):
        try:
            return step, read(step), errors
        except CheckpointError as error:
            errors[step] = error
    return None, None, errors


def _move_aside(directory: epath.Path, step: int, error: CheckpointError, consequence: str) -> None:
    """Moves a damaged checkpoint out of the way, or says why it can't."""
    target, count = directory / _DAMAGED / str(step), 1
    while target.exists():
        count += 1
        target = directory / _DAMAGED / f"{step}-{count}"
    try:
        files.make_directory(target.parent)
        (directory / str(step)).rename(target)
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
    """

    path: epath.Path
    is_sealed: bool

    @classmethod
    def at(cls, directory: epath.PathLike, step: int, below: str = "") -> "Checkpoint":
        """Opens the checkpoint of a step, and verifies its files, or those below a path in it.

        Raises:
          FileNotFoundError: there is no such checkpoint.
          CheckpointError: the files are damaged, or of another run; the error lists them.
        """
        path = _step_directory(directory, step)
        is_sealed = seal.is_sealed(path) or _is_of_jaxloop(path)
        problems = seal.problems(path, below) if is_sealed else []
        if not problems and is_sealed:
            problems = _problems_of_run_id(path)
        if problems:
            raise _damaged(path, problems)
        return cls(path, is_sealed)

    @property
    def step(self) -> int:
        """The step after which it was saved."""
        return int(self.path.name)

    @functools.cached_property
    def _noted(self) -> dict[str, Any]:
        return _noted(self.path)

    def metadata(self) -> dict[str, Any]:
        """Returns what was noted with it."""
        return {key: value for key, value in self._noted.items() if not key.startswith(_OWN_PREFIX)}

    def restore(self, state: Any, *, transforms: Any = None) -> Any:
        """Reads the train state; see `restore` of this module."""
        return self._tree(_ITEM, state, transforms)

    def run(self) -> dict[str, Any]:
        """Reads the JSON dict that was saved as `run`; `{}` where none was."""
        return _json_item(self.path, _RUN_ITEM)

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
        by, version = self._noted.get(_VERSION_KEY, "an unknown version"), _version()
        if _SEALED_KEY in self._noted and self._noted.get(_FORMAT_KEY) != _FORMAT:
            raise CheckpointError(
                f"The checkpoint {self.path} was saved by jaxloop {by} in format {self._noted.get(_FORMAT_KEY)}, and "
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
        handler = ocp.PyTreeCheckpointHandler()
        is_known_to_fit = item == _ITEM and self.is_sealed and self._noted.get(_LEAVES_KEY) == _fingerprint(template)
        if transforms is None and not is_known_to_fit:
            saved = {}
            if item == _ITEM or (self.path / item).exists():
                with _reading(self.path, item, self.is_sealed):
                    saved = handler.metadata(self.path / item).tree
            if item == _TREES_ITEM:
                saved = {name: saved[name] for name in tree if name in saved}
            _check_fits(self.path, item, checks.leaves_by_path(saved), wanted)
            # The saved tree with our leaves: where it has no leaf, as in an empty dict, the two may differ.
            template = jax.tree_util.tree_map_with_path(lambda path, _: wanted[checks.path_name(path)], saved)
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
        return jax.tree_util.tree_map_with_path(lambda path, leaf: _as_in(leaf, values[checks.path_name(path)]), tree)


def _step_directory(directory: epath.PathLike, step: int) -> epath.Path:
    found = all_steps(directory)
    if step not in found:
        raise FileNotFoundError(
            f"No checkpoint of step {step} in {directory}, which holds "
            + (f"steps {', '.join(map(str, found))}." if found else "none.")
        )
    return absolute(directory) / str(step)


def _is_of_jaxloop(path: epath.Path) -> bool:
    """Returns whether a `CheckpointWriter` of a directory saved this: each part of it tells, where others are missing.

    What plain Orbax managers save, ours among them, has no such mark.
    """
    return any((each / _MARKER_FILE).exists() for each in path.iterdir()) or _SEALED_KEY in _noted(path)


def _problems_of_run_id(path: epath.Path) -> list[str]:
    directory_id, saved_id = _read_run_id(path.parent), _noted(path).get(_RUN_ID_KEY)
    if directory_id is None or saved_id is None or directory_id == saved_id:
        return []
    return [f"another run saved it: run {saved_id}, and this directory belongs to run {directory_id}"]


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
    path = _step_directory(directory, step)
    template = jax.eval_shape(_storable, state)
    if _noted(path).get(_LEAVES_KEY) == _fingerprint(template):
        return
    with _reading(path, _ITEM):
        saved = ocp.PyTreeCheckpointHandler().metadata(path / _ITEM).tree
    _check_fits(path, _ITEM, checks.leaves_by_path(saved), checks.leaves_by_path(template))


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
    describe = lambda node: "nothing" if is_empty(node) else checks.describe(node)
    leaves = sorted(f"{checks.path_name(path)}: {describe(node)}" for path, node in nodes)
    return hashlib.sha256("\n".join(leaves).encode()).hexdigest()


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
        self._said_what_is_left_out = False
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
        began, self.last_wait_secs = self._clock(), 0.0
        try:
            return self._save(step, state, metrics, metadata, run, trees)
        finally:
            self.last_stall_secs = self._clock() - began

    def _save(
        self,
        step: int,
        state: Any,
        metrics: Mapping[str, float] | None,
        metadata: Mapping[str, Any] | None,
        run: Mapping[str, Any] | None,
        trees: Mapping[str, Any] | None,
    ) -> bool:
        if self._closed:
            raise ValueError(
                f"The checkpoint manager of {self._directory} was closed when the last run ended, and would lose "
                "what it is given. Make a new CheckpointManager, or give CheckpointAction the directory instead."
            )
        if self._best is not None:
            name, mode = self._best
            metadata = {**(metadata or {}), _BEST_KEY: {"name": name, "mode": mode}}
            metrics = metrics or {}  # With None, Orbax warns at each save.
        noted = _json_copy(metadata or {}, "metadata")
        saved = _saved_form(checks.adopt(state), "the state")
        if self._owns_manager:
            noted |= {_SEALED_KEY: True, _LEAVES_KEY: _fingerprint(saved)}
            noted |= {_FORMAT_KEY: _FORMAT, _VERSION_KEY: _version()}
            args = _items(saved, run or {}, trees or {})
        else:
            args = ocp.args.PyTreeSave(saved)
            if run or trees:
                self._say_what_is_left_out()
        with self._named(step):
            if self._owns_manager:
                self._wait_for_the_one_before()  # Whether it is a checkpoint is known only then.
            self._check_directory()  # Before `_open` makes it anew.
            manager = self._manager or self._open()
            if self._has(step, manager):
                logging.warning(
                    "%s has a checkpoint of step %d already. It stays, and the state given now is not saved.",
                    self._directory,
                    step,
                )
                return False
            if not manager.should_save(step):
                return False
            if not self._owns_manager:
                self._wait_for_the_one_before()  # Only now: the manager may have passed this step over.
            if self._owns_manager:
                noted[_RUN_ID_KEY] = _run_id_of(self._directory)
            self._step, self._noted = step, noted
            with _start_of_a_save:
                return manager.save(
                    step,
                    args=args,
                    metrics=None if metrics is None else dict(metrics),
                    custom_metadata=noted or None,
                )

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
            raise agreement.known_to_all(RuntimeError(problem))

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

    def _wait_for_the_one_before(self) -> None:
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
                    _metrics(self._directory, step)
                except CheckpointError as error:  # Such as one whose deletion was killed half-way.
                    _move_aside(self._directory, step, error, "It can't be the best any more.")
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

    def _say_what_is_left_out(self) -> None:
        if not self._said_what_is_left_out:
            self._said_what_is_left_out = True
            logging.info(
                "The checkpoint manager of %s saves the train state alone. With the directory in its place, the state "
                "of the loops and actions would be saved too, and all be sealed against damage.",
                self._directory,
            )

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


def _items(saved: Any, run: Mapping[str, Any], trees: Mapping[str, Any]) -> ocp.args.Composite:
    """What Orbax is to save as one checkpoint."""
    items: dict[str, ocp.args.CheckpointArgs] = {_ITEM: ocp.args.PyTreeSave(saved)}
    if run:
        items[_RUN_ITEM] = ocp.args.JsonSave(_json_copy(run, "run"))
    if jax.tree.leaves(trees):
        items[_TREES_ITEM] = ocp.args.PyTreeSave(_saved_form(_checked_trees(trees), "trees"))
    return ocp.args.Composite(**items)


def _json_copy(value: Mapping[str, Any], path: str) -> dict[str, Any]:
    """What a file of JSON will give back; raises where that would differ."""
    _check_is_json(value, path)
    return json.loads(json.dumps(value, default=dict))


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


def _check_is_json(value: Any, path: str) -> None:
    """Raises where a file of JSON would not give back what it was given, naming the place."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{path} of a checkpoint must have strings as keys, got {key!r}. Write {str(key)!r}.")
            _check_is_json(each, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            _check_is_json(each, f"{path}[{index}]")
    elif value is not None and not isinstance(value, bool | int | float | str):
        raise TypeError(
            f"{path} of a checkpoint must be a number, a string, a list or a dict, got {value!r}. Arrays belong in the "
            "state; a NumPy number has .item()."
        )


def prepare_directory(directory: epath.PathLike) -> epath.Path:
    """Makes a directory, if need be, and makes sure that it can be written.

    Raises:
      OSError: it can't; the error says why.
    """
    path = absolute(directory)
    probe = path / ".write_probe"  # Of one name, for the next one to remove it if this process is killed just here.
    try:
        path.mkdir(parents=True, exist_ok=True)
        file = files.open_file(probe, "wb")
        try:
            with file:
                file.write(b"0")  # On a full disk, an empty file can be made.
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        reason = error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
        raise OSError(
            error.errno, f"Can't write to the directory {path} ({reason}). Give one that can be written"
        ) from error
    return path


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


def absolute(directory: Any) -> epath.Path:
    """Orbax refuses relative paths, and only when it saves for the first time."""
    return epath.Path(directory).expanduser().resolve()
