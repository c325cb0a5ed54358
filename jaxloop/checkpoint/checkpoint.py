"""Checkpoints, which are sealed, committed atomically, and verified before they are restored.

This is the only module that uses Orbax. A checkpoint is a directory named after its step. If a `CheckpointWriter` was
created with a directory, each of its checkpoints contains up to three items: `default` (the train state), `run` (a JSON
dict), and `trees` (arrays that are not part of the state). The commit includes a seal that covers all files of the
checkpoint; see `jaxloop.checkpoint.seal`.

`CheckpointWriter.save` rejects values that could not be restored (`_save_args`), waits for the previous save and checks
the directory (`_prepared_manager`), and then passes everything to Orbax. Orbax's thread writes the files, calls
`_seal`, and commits the checkpoint with a single rename.

`open_newest` and `Checkpoint.at` verify the seal once. After that, a `Checkpoint` reads its files without verifying
them again.
"""

import contextlib
import dataclasses
import difflib
import functools
import hashlib
import itertools
import json
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from etils import epath
from orbax.checkpoint import checkpoint_managers

from jaxloop import distributed
from jaxloop.base import checks, files, path_patterns, timing
from jaxloop.base.files import absolute, prepare_directory
from jaxloop.checkpoint import safetensors_file, seal
from jaxloop.checkpoint.safetensors_file import SafetensorsFile, groups, is_safetensors
from jaxloop.processes import agreement, lock
from jaxloop.schedules import Elapsed, Schedule

# An Orbax manager keeps a single item, which it calls "default", in a directory of that name.
_ITEM = "default"
# The fields of an `EMAState` in that item.
_AVERAGE, _COUNT = "/params_ema", "/count"
# The other items.
_RUN_ITEM = "run"
# A path in the state of `optax.contrib.schedule_free`, which no other optimizer of Optax has.
_OF_SCHEDULE_FREE = re.compile(r"^opt_state/(?:.*/)?weight_sum$")
_TREES_ITEM = "trees"
# Also in a checkpoint: the metrics that the manager uses to find the best checkpoint, and the checkpoint's metadata.
_METRICS_ITEM = "metrics"
# Among these metrics, marks a checkpoint that is never deleted; see `CheckpointAction.keep_every`.
_KEPT = "jaxloop/kept"
METADATA_FILE = "_CHECKPOINT_METADATA"
# In the custom metadata, the metric that decides which checkpoint is best: `{"name": "test/accuracy", "mode": "max"}`.
_BEST_KEY = "best"
# The transforms with which the run that saved the checkpoint had begun, if any.
TRANSFORMS_KEY = "transforms"
# Only this module reads the following keys. This one means that the checkpoint must have a seal.
_SEALED_KEY = "jaxloop/sealed"
# A fingerprint of the state's leaves. Asking Orbax to describe them instead would take half as long as reading them.
_LEAVES_KEY = "jaxloop/leaves"
# The format of `run` and of the metadata, and the version of jaxloop that saved the checkpoint.
_FORMAT_KEY, _VERSION_KEY = "jaxloop/format", "jaxloop/version"
_OWN_PREFIX = "jaxloop/"
# Increased when an earlier version of jaxloop can't resume from checkpoints of this one, or vice versa.
_FORMAT = 3
# The subdirectory for damaged checkpoints. Its name is not a step, so neither Orbax nor jaxloop reads it.
_DAMAGED = "damaged"
_ABANDONED = "abandoned"
# Orbax numbers the saves of a process and keeps the current number in a global variable. If two threads started saves
# at the same time, each would wait forever for the directory of the other.
_save_start_lock = threading.Lock()
_STEP = re.compile("0|[1-9][0-9]*")
_DELETION_POLL_SECS = 0.1
# Limits how much of a directory is searched to complete an error message.
_MOST_DIRECTORIES = 100


class CheckpointError(Exception):
    """Raised if a checkpoint's files are damaged, or can't be read or written.

    Loading an intact checkpoint of a different model raises a `ValueError` instead.

    Attributes:
      directory: The directory with one subdirectory per step; None if it is unknown.
      steps: The steps of the affected checkpoints.
    """

    def __init__(self, message: str, directory: epath.PathLike | None = None, steps: Sequence[int] = ()):
        super().__init__(message)
        self.directory: epath.Path | None = None if directory is None else epath.Path(directory)
        self.steps: tuple[int, ...] = tuple(steps)


# Listing ---------------------------------------------------------------------------------------------


def all_steps(directory: epath.PathLike) -> list[int]:
    """Returns the steps of the complete checkpoints in a directory, in ascending order.

    The list is empty if the directory doesn't exist. Only a directory whose name is a step without leading zeros is a
    checkpoint. Orbax also accepts names like `0015` and `1_5`, but then reads and deletes `15` and `5`.
    """
    directory = absolute(directory)
    paths = ocp.path.step.checkpoint_steps_paths(directory) if directory.is_dir() else []
    return sorted(int(path.name) for path in paths if _STEP.fullmatch(path.name))


def all_paths(directories: Iterable[epath.PathLike]) -> list[epath.Path]:
    """Returns the paths of the complete checkpoints in several directories, in ascending order of their steps.

    If several directories have a checkpoint of the same step, the one in the first of them comes last.
    """
    found = [absolute(each) / str(step) for each in reversed(list(directories)) for step in all_steps(each)]
    return sorted(found, key=lambda path: int(path.name))


def metadata(directory: epath.PathLike, step: int) -> dict[str, Any]:
    """Returns the metadata saved in a step's checkpoint, or `{}` if none was saved.

    Raises:
      FileNotFoundError: If there is no such checkpoint.
      CheckpointError: If the metadata file is damaged.
    """
    return Checkpoint.at(directory, step, METADATA_FILE).metadata()


def own_version() -> str:
    """Returns the version of jaxloop that is in use."""
    import jaxloop

    return jaxloop.__version__


def best_step(directory: epath.PathLike, best: tuple[str, str] | None = None) -> int | None:
    """Returns the step of the best checkpoint in a directory, or None if no checkpoint has the metric.

    If several checkpoints are equally good, the newest one is considered the best.

    Args:
      directory: The directory of a `CheckpointAction(directory, best=...)`, or of an Orbax manager with a `best_fn`.
      best: The name of the metric and its mode, "min" or "max", as in `("accuracy", "max")`. If None, the metric of the
        `CheckpointAction` that saved the newest checkpoint is used.
    """
    directory = absolute(directory)
    steps = all_steps(directory)
    if best is None and steps:
        newest = Checkpoint.open(directory / str(steps[-1]), METADATA_FILE)
        saved = newest.metadata().get(_BEST_KEY)
        with newest.understanding():
            best = saved and (saved["name"], saved["mode"])
    if not best:
        return None
    qualities = {step: _quality(_metrics(directory / str(step)), best) for step in steps}
    known = [step for step in steps if qualities[step] > -math.inf]
    return max(known, key=lambda step: (qualities[step], step), default=None)


def missing_error(directory: epath.PathLike) -> FileNotFoundError:
    """Returns the error for a directory without checkpoints. It names the nearest directory that has some."""
    directory = absolute(directory)
    text, near = f"No checkpoint in {directory}.", None
    with contextlib.suppress(OSError):
        nearby = itertools.islice(_directories_near(directory), 3 * _MOST_DIRECTORIES)
        found = (path for each in nearby for path in all_paths([each])[-1:])
        near = next((path for path in found if (path / METADATA_FILE).exists()), None)
    if near is not None:
        text += f" The nearest directory with checkpoints is {near.parent}, up to step {near.name}."
    return FileNotFoundError(text)


def _directories_near(directory: epath.Path) -> Iterator[epath.Path]:
    """Yields directories that may have been meant: those below, the parent, and those beside with a similar name."""
    similarity = lambda path: difflib.SequenceMatcher(None, path.name, directory.name).ratio()
    for path in (directory, directory.parent):
        children = path.iterdir() if path.is_dir() else ()
        below = [each for each in itertools.islice(children, _MOST_DIRECTORIES) if each.is_dir()]
        below.sort(key=similarity, reverse=True)
        yield from (path, *below)
        for each in below:
            yield from (inner for inner in itertools.islice(each.iterdir(), _MOST_DIRECTORIES) if inner.is_dir())


def _metrics(path: epath.Path) -> dict[str, Any]:
    """Reads the metrics that decide which checkpoint is best; `{}` if none were saved."""
    return Checkpoint.open(path, _METRICS_ITEM).json(_METRICS_ITEM, _METRICS_ITEM)


def _quality(values: Mapping[str, Any], best: tuple[str, str]) -> float:
    """Returns the quality of a checkpoint (higher is better), which is -inf if the metric is missing or NaN."""
    name, mode = best
    value = values.get(name)
    if value is None or math.isnan(value):
        return -math.inf
    return float(value) if mode == "max" else -float(value)


# Reading ---------------------------------------------------------------------------------------------


def restore(
    directory: epath.PathLike,
    step: int,
    state: Any,
    *,
    transforms: Mapping[str, str] | None = None,
    any_optimizer: bool = False,
) -> Any:
    """Restores the train state from a checkpoint, with the structure and the shardings of `state`.

    All files of the checkpoint are verified first, unless the checkpoint has no seal (for example, because an Orbax
    manager saved it).

    Args:
      directory: The directory with one subdirectory per step.
      step: The step of the checkpoint, which can be 0.
      state: A state of JAX arrays with the same structure, shapes and dtypes as the saved one. The shardings may
        differ. The state is not donated.
      transforms: A dict that renames saved leaves by mapping patterns of saved paths to paths in the state, as in
        `{"**/Dense_0/**": "**/output/**"}`. `*` matches one name, and `**` matches one or more names. A checkpoint that
        has the new names already is used as it is.
      any_optimizer: Whether to accept a state with a different optimizer, or without one. In that case, everything
        except `opt_state` is restored, and the differences are logged.

    Raises:
      FileNotFoundError: If there is no such checkpoint.
      CheckpointError: If files of the checkpoint are damaged. The error lists them.
      ValueError: If leaves of the checkpoint and the state differ in path, shape or dtype, or if a pattern in
        `transforms` matches no leaf. The error lists the leaves or the pattern.
    """
    try:
        return Checkpoint.at(directory, step).restore(state, transforms=transforms, any_optimizer=any_optimizer)
    except CheckpointError as error:
        hint = "checkpoint.restore_newest restores the newest undamaged checkpoint, and moves newer ones to damaged/."
        raise CheckpointError(f"{error}\n{hint}", error.directory, error.steps) from error.__cause__


def restore_newest(
    directory: epath.PathLike,
    state: Any,
    *,
    transforms: Mapping[str, str] | None = None,
    any_optimizer: bool = False,
    quarantines: bool = True,
) -> tuple[Any, int] | None:
    """Restores the newest undamaged checkpoint; see `restore`.

    Any newer checkpoints, all of which are damaged, are then moved to `<directory>/damaged/<step>`, so that their steps
    can be saved again. A warning is logged for each of them.

    Args:
      directory: The directory with one subdirectory per step.
      state: See `restore`.
      transforms: See `restore`.
      any_optimizer: See `restore`.
      quarantines: Whether to move the damaged checkpoints. Pass False to leave the directory unchanged, for example if
        another process may be saving there.

    Returns:
      The pair `(state, step)`, or None if the directory contains no checkpoint.

    Raises:
      CheckpointError: If there are checkpoints, but all of them are damaged. In this case, no checkpoint is moved.
      ValueError: If the newest undamaged checkpoint doesn't fit the state. In this case, no checkpoint is moved.
    """
    options = {"transforms": transforms, "any_optimizer": any_optimizer, "quarantines": quarantines}
    opened = open_newest(all_paths([directory]), state, **options)
    return opened and (opened[1], opened[0].step)


def open_newest(
    paths: Sequence[epath.Path],
    state: Any,
    *,
    transforms: Mapping[str, str] | None = None,
    any_optimizer: bool = False,
    quarantines: bool = True,
) -> "tuple[Checkpoint, Any] | None":
    """Restores the newest undamaged checkpoint of `paths`, which are as returned by `all_paths`; see `restore_newest`.

    Returns the checkpoint and the state.
    """
    restore = lambda opened: opened.restore(state, transforms=transforms, any_optimizer=any_optimizer)
    found, errors = _newest_complete(paths, restore)
    if found is not None:
        for error in errors:
            consequence = f"Step {found[0].step} was restored instead."
            if quarantines:
                _quarantine(error, consequence)
            else:
                logging.warning("%s\n%s", error, consequence)
    elif errors:
        remedy = "To start from scratch, use a different directory or move these checkpoints away."
        raise _all_damaged_error(errors, remedy)
    return found


def _all_damaged_error(errors: Sequence[CheckpointError], remedy: str) -> CheckpointError:
    directories = list(dict.fromkeys(error.directory for error in errors))
    return CheckpointError(
        f"All checkpoints in {' and '.join(map(str, directories))} are damaged, and nothing was restored or moved.\n"
        + "\n".join([*map(str, errors), remedy]),
        directories[0],
        [error.steps[0] for error in errors],
    )


def quarantine_damaged(paths: Sequence[epath.Path]) -> None:
    """Quarantines the checkpoints of `paths` that are newer than the newest undamaged one; see `open_newest`.

    In a multi-process job, only the first process may call this, and it must do so before any process starts to
    restore. If all checkpoints are damaged, none are moved.
    """
    found, errors = _newest_complete(paths, lambda opened: None)
    if found is not None:
        for error in errors:
            _quarantine(error, f"Step {found[0].step} is restored instead.")


def _newest_complete(
    paths: Sequence[epath.Path], read: Callable[["Checkpoint"], Any]
) -> tuple[tuple["Checkpoint", Any] | None, list[CheckpointError]]:
    """Finds the newest checkpoint that can be read.

    Returns:
      A pair. The first item is a pair of the checkpoint and the result of `read`, or None if no checkpoint can be read.
      The second item is a list of the errors raised while reading newer checkpoints.
    """
    errors: list[CheckpointError] = []
    for path in reversed(paths):
        try:
            opened = Checkpoint.open(path)
            return (opened, read(opened)), errors
        except CheckpointError as error:
            errors.append(error)
    return None, errors


def _quarantine(error: CheckpointError, consequence: str) -> None:
    """Moves the damaged checkpoint that an error describes to the subdirectory `damaged`, and logs a warning."""
    assert error.directory is not None
    (step,) = error.steps
    try:
        where = f"It was moved to {_move(error.directory, step, _DAMAGED)}."
    except OSError as reason:
        where = f"It could not be moved to {error.directory / _DAMAGED} ({reason})."
    logging.warning("%s\n%s %s", error, where, consequence)


def abandon(directory: epath.PathLike, first_step: int) -> None:
    """Moves the checkpoints of `first_step` and all later steps to `abandoned/`, so that no run resumes from them.

    In a multi-process job, only the first process may call this.
    """
    for step in all_steps(directory):
        if step >= first_step:
            moved = _move(absolute(directory), step, _ABANDONED)
            logging.info("The checkpoint of step %d was moved to %s.", step, moved)


def _move(directory: epath.Path, step: int, below: str) -> epath.Path:
    """Moves a checkpoint to the subdirectory `below`, and returns its new path."""
    target, count = directory / below / str(step), 1
    while target.exists():
        count += 1
        target = directory / below / f"{step}-{count}"
    files.make_directory(target.parent)
    (directory / str(step)).rename(target)
    return target


def load_params(
    directory: epath.PathLike,
    step: int | str = "newest",
    *,
    into: Any = None,
    paths: Mapping[str, str] | None = None,
    ema: bool = False,
) -> Any:
    """Loads only the parameters from a checkpoint or a safetensors file.

    >>> import jax, optax, tempfile, jaxloop
    >>> from flax import linen as nn
    >>> step = jaxloop.LossStep(jax.random.key(0), nn.Dense(2), optax.adam(1e-3), train=True, loss=lambda x, batch: x)
    >>> state, directory = step.initialize_model([1, 3]), tempfile.mkdtemp()
    >>> with contextlib.closing(CheckpointWriter(directory)) as writer:
    ...     _ = writer.save(100, state)
    >>> params = load_params(directory)
    >>> nn.Dense(2).apply({"params": params}, jnp.ones([5, 3])).shape
    (5, 2)
    >>> encoder = {"encoder": {"kernel": jnp.zeros([3, 2])}, "head": {"bias": jnp.zeros(7)}}
    >>> loaded = load_params(directory, 100, into=encoder, paths={"kernel": "encoder/kernel"})
    >>> bool((loaded["encoder"]["kernel"] == params["kernel"]).all()), loaded["head"]["bias"].shape
    (True, (7,))

    Args:
      directory: The directory with one subdirectory per step, saved by a `CheckpointAction`, or by an Orbax manager
        that used `PyTreeSave`. Alternatively, a file whose name ends in `.safetensors`; see `save_params`.
      step: The step of the checkpoint; "newest" for the newest undamaged one, or "best" for the one at step
        `best_step(directory)`.
      into: A tree of arrays or `jax.ShapeDtypeStruct`s, such as `state.params`, that determines the structure, shapes,
        dtypes and shardings of the result. It is not donated. If None, nested dicts of arrays on JAX's default device
        are returned.
      paths: A dict that maps patterns of paths in the checkpoint to paths in `into`, as in `{"encoder/**":
        "backbone/**"}`; see `jaxloop.base.path_patterns`. Other leaves of `into`, which must be arrays, are returned
        unchanged. If None, every leaf of `into` is loaded from the same path.
      ema: Whether to load the parameters' moving average (from `LossStep(ema=...)` or `jaxloop.optimizers.ema`) instead
        of the parameters themselves.

    Returns:
      The parameters, in the structure of `into`.

    Raises:
      FileNotFoundError: If there is no such checkpoint.
      CheckpointError: If files of the checkpoint are damaged. The error lists them.
      ValueError: If the checkpoint has no parameters or no average, if a leaf differs in path, shape or dtype, or if a
        pattern matches nothing. The error lists the leaves. A damaged safetensors file also raises this error.
    """
    if not is_safetensors(directory):
        load = lambda opened: opened.load(opened.path_of_ema() if ema else "params", into, paths)
        return _load(directory, step, load)
    if ema or step != "newest":
        raise ValueError(f"A safetensors file has neither steps nor an average, got {step=}, {ema=}. Leave them out.")
    file = SafetensorsFile(directory)
    return _load_part(file, dict(zip(file.leaves, file.leaves, strict=True)), into, paths)


def save_params(params: Any, path: epath.PathLike) -> None:
    """Writes parameters to a file in the safetensors format, which other libraries can also read.

    `load_params` reads such files, including those written by other libraries. Both functions need the `safetensors`
    extra. In the file, the slashes of jaxloop's paths are replaced by dots: `encoder/kernel` becomes `encoder.kernel`.
    The values are not changed. Note that a PyTorch `Linear` expects the transpose of a Flax kernel.

    >>> import tempfile
    >>> path = tempfile.mkdtemp() + "/weights.safetensors"
    >>> save_params({"encoder": {"kernel": jnp.ones([3, 2])}}, path)
    >>> load_params(path)["encoder"]["kernel"].shape
    (3, 2)

    Args:
      params: A tree of arrays (on any devices), such as `state.params`. It is not donated.
      path: The path of the file to write. It must end in `.safetensors`. An existing file is replaced once the new file
        is complete.

    Raises:
      ValueError: If the file name, the name of a leaf, or the dtype of a leaf is not supported.
      ImportError: If the `safetensors` package is not installed.
      OSError: If the file can't be written.
    """
    safetensors_file.save(params, path)


def load_variables(directory: epath.PathLike, step: int | str = "newest", *, into: Any = None) -> Any:
    """Loads all variables of a model from a checkpoint, but not the optimizer state.

    For a Linen model, the result is what `module.apply` accepts: `{"params": ..., "batch_stats": ..., **collections}`.
    For an NNX model, it is a dict with `params`, `batch_stats` and `collections`, the fields of a `TrainState`.

    Args:
      directory: See `load_params`.
      step: See `load_params`.
      into: A dict of the same form as the result. It determines the result's structure, shapes, dtypes and shardings.
        For a Linen model, pass `state.variables`; for an NNX model, pass a dict of the state's `params`, `batch_stats`
        and `collections`. If None, nested dicts of arrays on JAX's default device are returned.

    Raises:
      FileNotFoundError: If there is no such checkpoint.
      CheckpointError: If files of the checkpoint are damaged. The error lists them.
      ValueError: If the checkpoint has no parameters, or if a leaf differs in path, shape or dtype.
    """

    def load(opened: Checkpoint) -> dict[str, Any]:
        names = ["params", *filter(opened.has, ("batch_stats", "collections"))]
        at: dict[str, str] = dict(zip(names, names, strict=True))
        if "collections" in at and not opened.has_nnx_model:
            del at["collections"]
            collections = [path.split("/")[1] for path in opened.leaves if path.startswith("collections/")]
            at |= {name: f"collections/{name}" for name in collections}
        if into is not None:
            at = {name: at.get(name, name) for name in map(str, into)}
        return {name: opened.load(place, None if into is None else into[name]) for name, place in at.items()}

    return _load(directory, step, load)


def _load(directory: epath.PathLike, step: int | str, load: Callable[["Checkpoint"], Any]) -> Any:
    """Calls `load` with the checkpoint of `step`, which can also be "newest" or "best"."""
    if step == "best":
        best = best_step(directory)
        if best is None and not all_steps(directory):
            raise missing_error(directory)
        if best is None:
            raise FileNotFoundError(
                f"No checkpoint in {directory} is known to be the best. Save them with CheckpointAction(directory, "
                'best=...), or give a step, or "newest".'
            )
        step = best
    if step != "newest":
        if type(step) is not int:
            raise ValueError(f'step must be an int, "newest" or "best", got {step!r}.')
        return load(Checkpoint.at(directory, step, _ITEM))
    found, errors = _newest_complete(all_paths([directory]), load)
    if found is None and errors:
        raise _all_damaged_error(errors, "Use a different directory.")
    if found is None:
        raise missing_error(directory)
    for error in errors:
        logging.warning("%s\nStep %d was loaded instead.", error, found[0].step)
    return found[1]


def run(directory: epath.PathLike, step: int) -> dict[str, Any]:
    """Returns the JSON dict saved as `run` in a step's checkpoint, or `{}` if none was saved.

    Raises:
      FileNotFoundError: If there is no such checkpoint.
      CheckpointError: If the file that contains the dict is damaged.
    """
    return Checkpoint.at(directory, step, _RUN_ITEM).run()


def trees(directory: epath.PathLike, step: int, templates: Mapping[str, Any]) -> dict[str, Any]:
    """Restores trees that were saved alongside the state, with the structures and shardings of `templates`.

    Args:
      directory: The directory with one subdirectory per step.
      step: The step of the checkpoint.
      templates: Templates for the trees to restore, by name. They must have the same structures, shapes and dtypes as
        the saved trees. Where a template contains a JAX array, the result contains a JAX array with the same sharding.
        Where it contains a NumPy array, so does the result.

    Raises:
      FileNotFoundError: If there is no such checkpoint.
      CheckpointError: If the files of the trees are damaged.
      ValueError: If leaves of the saved trees and the templates differ in path, shape or dtype. The error lists these
        leaves.
    """
    return Checkpoint.at(directory, step, _TREES_ITEM).trees(templates)


@final
@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """An open checkpoint. Its files are verified when it is opened, but not again when they are read.

    Attributes:
      path: The directory of the checkpoint, whose name is the step.
      is_sealed: True if the checkpoint has a seal and its files match the seal. Checkpoints saved by an Orbax manager
        have no seal.
      custom_metadata: The metadata saved by the caller and by this module.
    """

    path: epath.Path
    is_sealed: bool
    custom_metadata: Mapping[str, Any]

    @classmethod
    def at(cls, directory: epath.PathLike, step: int, below: str = "") -> "Checkpoint":
        """Opens a step's checkpoint and verifies its files.

        If `below` is given, only the files below that path in the checkpoint are verified.

        Raises:
          FileNotFoundError: If there is no such checkpoint.
          CheckpointError: If the files are damaged. The error lists the problems.
          PermissionError: If this user may not read a file.
        """
        found = all_steps(directory)
        if not found:
            raise missing_error(directory)
        if step not in found:
            raise FileNotFoundError(
                f"No checkpoint of step {step} in {directory}, which holds steps {', '.join(map(str, found))}."
            )
        return cls.open(absolute(directory) / str(step), below)

    @classmethod
    def open(cls, path: epath.Path, below: str = "") -> "Checkpoint":
        """Opens the checkpoint in the directory `path`, which must exist, and verifies its files; see `at`."""
        is_sealed = seal.is_sealed(path)
        problems = seal.problems(path, below) if is_sealed else []
        custom_metadata = {} if problems else _read_custom_metadata(path)
        # Orbax managers save no seal, but they always save the metadata file.
        if not is_sealed and (_SEALED_KEY in custom_metadata or not (path / METADATA_FILE).exists()):
            problems = seal.problems(path)  # The seal is missing.
        if problems:
            raise _damage_error(path, problems)
        return cls(path, is_sealed, custom_metadata)

    @property
    def step(self) -> int:
        """The step after which the checkpoint was saved."""
        return int(self.path.name)

    def elapsed(self) -> Elapsed:
        """Returns the run's progress at this checkpoint. If it was not saved, only the number of steps is known.

        Raises:
          CheckpointError: If the saved progress is invalid.
        """
        with self.understanding():
            return _elapsed(self.custom_metadata, self.step)

    def metadata(self) -> dict[str, Any]:
        """Returns the metadata that the caller saved."""
        return {key: value for key, value in self.custom_metadata.items() if not key.startswith(_OWN_PREFIX)}

    def run(self) -> dict[str, Any]:
        """Returns the JSON dict that was saved as `run`, or `{}` if none was saved."""
        return self.json(_RUN_ITEM)

    def json(self, item: str, filename: str = "metadata") -> dict[str, Any]:
        """Returns the contents of an item's JSON file as a dict, or `{}` if there is no such file."""
        if not (self.path / item / filename).exists():
            return {}
        with _reading(self.path, f"{item}/{filename}"):
            return dict(ocp.JsonCheckpointHandler(filename=filename).restore(self.path / item) or {})

    def restore(self, state: Any, *, transforms: Mapping[str, str] | None = None, any_optimizer: bool = False) -> Any:
        """Restores the train state; see the function `restore`."""
        try:
            return self._tree(_ITEM, state) if transforms is None else self._renamed_tree(state, transforms)
        except ValueError:
            if not any_optimizer or transforms is not None or not hasattr(state, "opt_state"):
                raise
            ours, saved = checks.leaves_by_path(_storable(state)), self.leaves
            kept = {path: leaf for path, leaf in ours.items() if not path.startswith("opt_state/")}
            others = {path: path for path in saved if not path.startswith("opt_state/")}
            place, saved_place = _place_of_ema(ours), _place_of_ema(saved)
            averages: list[str] = []
            if place is not None and saved_place is not None:
                averages = [path for path in ours if path.startswith(f"{place}/")]
                kept |= {path: ours[path] for path in averages}
                others |= {path: f"{saved_place}{path.removeprefix(place)}" for path in averages}
            if checks.compare({path: saved[at] for path, at in others.items()}, kept):
                raise  # The model differs too.
            values = _load_leaves(self, others, kept)
            if any(_OF_SCHEDULE_FREE.search(path) for path in saved if path not in ours):
                logging.warning(
                    "%s was trained with a schedule-free optimizer, whose opt_state determines the parameters to "
                    "evaluate. The restored state has none, so an evaluation uses the training parameters, which are "
                    "worse. Give the evaluation's step the same optimizer.",
                    self.path,
                )
            logging.log(
                logging.WARNING if len(kept) < len(ours) else logging.INFO,  # INFO if the state has no optimizer.
                "The state was restored from %s without its opt_state%s, because the optimizers differ. The optimizer "
                "starts with the given opt_state. Leaves that differ (checkpoint -> state):\n%s",
                self.path,
                ", except for the average of the parameters" if averages else "",
                "\n".join(checks.compare(dict(saved), ours)),
            )
            return _with_values(state, values)

    @functools.cached_property
    def leaves(self) -> Mapping[str, Any]:
        """Descriptions of the train state's saved leaves, by path, obtained without reading any arrays."""
        return checks.leaves_by_path(self._saved_tree(_ITEM))

    def has(self, name: str) -> bool:
        """Returns whether the saved train state has leaves below the path `name`."""
        return any(path.startswith(f"{name}/") for path in self.leaves)

    @property
    def has_nnx_model(self) -> bool:
        """True if the parameters were saved from an NNX model, in which case their paths end in `/value`."""
        return all(path.endswith("/value") for path in self.leaves if path.startswith("params/"))

    def path_of_ema(self) -> str:
        """Returns the path of the parameters' moving average in the saved train state.

        Raises:
          ValueError: If the train state doesn't contain exactly one such average.
        """
        place = _place_of_ema(self.leaves)
        if place is None:
            raise ValueError(
                f"The checkpoint {self.path} has no average of the parameters. LossStep(ema=...) and "
                "jaxloop.optimizers.ema keep one."
            )
        return f"{place}{_AVERAGE}"

    def load(self, name: str, into: Any = None, paths: Mapping[str, str] | None = None) -> Any:
        """Loads the part of the train state below the path `name`; see `load_params`."""
        saved = {path.removeprefix(f"{name}/"): path for path in self.leaves if path.startswith(f"{name}/")}
        if not saved and (into is None or jax.tree.leaves(into)):
            raise ValueError(
                f"The checkpoint {self.path} has no {name!r}. It contains {checks.listed(list(self.leaves))}."
            )
        return _load_part(self, saved, into, paths)

    def read(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Reads the leaves at the paths in `wanted`, with the shapes, dtypes and shardings given there."""
        tree, values = self._saved_tree(_ITEM), {}
        for group in groups(wanted):  # Orbax reads all leaves in a call at once, and copies each one.
            chosen = lambda path, _, group=group: group.get(checks.path_name(path), ocp.PLACEHOLDER)
            read = self._read(_ITEM, jax.tree_util.tree_map_with_path(chosen, tree))
            values |= {path: read[path] for path in group}
        return values

    def _saved_tree(self, item: str) -> Any:
        """Returns a tree with the structure of an item and with leaves that describe the saved arrays."""
        with _reading(self.path, item, self.is_sealed):
            return ocp.PyTreeCheckpointHandler().metadata(self.path / item).tree

    def trees(self, templates: Mapping[str, Any]) -> dict[str, Any]:
        """Restores trees that were saved alongside the state; see the function `trees`."""
        with_leaves = {name: tree for name, tree in templates.items() if jax.tree.leaves(tree)}
        return {**templates, **(self._tree(_TREES_ITEM, with_leaves) if with_leaves else {})}

    @contextlib.contextmanager
    def understanding(self) -> Iterator[None]:
        """A context manager that converts errors raised while interpreting saved values into a `CheckpointError`.

        The error names both the version of jaxloop that saved the checkpoint and the current one.

        Raises:
          CheckpointError: If the checkpoint has a different format, or if the body of the `with` statement raises a
            `KeyError` or a similar error.
        """
        saved_by, version = self.custom_metadata.get(_VERSION_KEY, "an unknown version"), own_version()
        saved_format = self.custom_metadata.get(_FORMAT_KEY)
        if _SEALED_KEY in self.custom_metadata and saved_format != _FORMAT:
            raise CheckpointError(
                f"The checkpoint {self.path} was saved by jaxloop {saved_by} in format {saved_format}, but jaxloop "
                f"{version} can resume only from format {_FORMAT}. Resume it with jaxloop {saved_by}, or restore only "
                "its train state with step.restore_model(state, directory) and start a run in another directory.",
                self.path.parent,
                [self.step],
            )
        try:
            yield
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise CheckpointError(
                f"The checkpoint {self.path}, saved by jaxloop {saved_by}, does not contain what jaxloop {version} "
                f"expects ({type(error).__name__}: {error}). Resume it with the version and the program that saved it, "
                "or restore only its train state with step.restore_model(state, directory) and start a run in another "
                "directory.",
                self.path.parent,
                [self.step],
            ) from error

    def _renamed_tree(self, state: Any, transforms: Mapping[str, str]) -> Any:
        """Reads a train state in which some leaves were saved under different names."""
        ours = checks.leaves_by_path(_storable(state))
        return _with_values(state, _load_leaves(self, self.saved_paths(ours, transforms), ours))

    def saved_paths(self, ours: Mapping[str, Any], transforms: Mapping[str, str]) -> dict[str, str]:
        """Maps the path of each leaf in `ours` to the path of the corresponding saved leaf; see `restore`.

        A checkpoint that has the new names already, such as one saved by a run with these transforms, is used as it is.

        Raises:
          ValueError: If the renamed leaves don't fit those in `ours`, or if a pattern matches no leaf.
        """
        if not all(isinstance(each, str) for pair in transforms.items() for each in pair):
            raise TypeError(
                "transforms must be a dict from patterns of saved paths to paths in the state, such as "
                f"{{'**/Dense_0/**': '**/output/**'}}, got {transforms!r}."
            )
        saved_names, our_names = _bare(self.leaves), _bare(ours)
        if transforms == self.custom_metadata.get(TRANSFORMS_KEY):
            transforms = {}
        is_saved = lambda pattern: any(path_patterns.matches(pattern, name) for name in saved_names)
        transforms = {old: new for old, new in transforms.items() if is_saved(old) or not is_saved(new)}
        new_names = {name: name for name in saved_names} | path_patterns.renamed(saved_names, transforms)
        saved = {our_names.get(new, new): saved_names[name] for name, new in new_names.items()}
        if len(saved) < len(new_names):
            taken = next(name for name, new in new_names.items() if saved[our_names.get(new, new)] != saved_names[name])
            raise ValueError(
                f"A leaf is renamed to {new_names[taken]!r}, but the checkpoint {self.path} already contains a leaf "
                "with that name. Give transforms that keep them apart."
            )
        _check_fits(self.path, _ITEM, {path: self.leaves[at] for path, at in saved.items()}, dict(ours))
        return saved

    def _tree(self, item: str, tree: Any) -> Any:
        """Reads an item, with the structure and shardings of `tree`.

        If the item is `trees`, only the names in `tree` are read.
        """
        template = self.fit_template(item, _storable(tree))
        values = self._read(item, template)
        _check_fits(self.path, item, values, checks.leaves_by_path(template))
        return _with_values(tree, values)

    def _read(self, item: str, template: Any) -> dict[str, Any]:
        """Reads an item's arrays, except where the template has a placeholder, and returns them by path."""
        args = ocp.args.PyTreeRestore(
            item=template,
            restore_args=jax.tree.map(_restore_args, template),
            partial_restore=item == _TREES_ITEM,
        )
        handler = ocp.PyTreeCheckpointHandler()
        with _reading(self.path, item, self.is_sealed), ocp.Checkpointer(handler) as checkpointer:
            return checks.leaves_by_path(checkpointer.restore(self.path / item, args=args))

    def fit_template(self, item: str, template: Any) -> Any:
        """Arranges the leaves of a template in the structure of a saved item, without reading any arrays.

        The two trees may differ in parts that don't contain leaves, such as empty dicts.

        Raises:
          ValueError: If the two trees differ in the path, shape or dtype of a leaf.
        """
        if item == _ITEM and self.is_sealed and self.custom_metadata.get(_LEAVES_KEY) == _fingerprint(template):
            return template
        saved = {}
        if item == _ITEM or (self.path / item).exists():
            saved = self._saved_tree(item)
        if item == _TREES_ITEM:
            saved = {name: saved[name] for name in template if name in saved}
        described, wanted = checks.leaves_by_path(saved), checks.leaves_by_path(template)
        if item == _ITEM:
            wanted = {path: _as_wide_as(described.get(path), leaf) for path, leaf in wanted.items()}
        _check_fits(self.path, item, described, wanted)
        return jax.tree_util.tree_map_with_path(lambda path, _: wanted[checks.path_name(path)], saved)


def _elapsed(custom_metadata: Mapping[str, Any], step: int) -> Elapsed:
    previous = Elapsed(**custom_metadata["previous"]) if "previous" in custom_metadata else None
    return Elapsed(**custom_metadata.get("elapsed", {"steps": step}), previous=previous)


def _read_custom_metadata(path: epath.Path) -> dict[str, Any]:
    """Reads the metadata saved by the caller and by this module; `{}` if there is none."""
    if not (path / METADATA_FILE).exists():
        return {}
    with _reading(path, METADATA_FILE):
        # The seal covers only this key of the file. The other keys, which Orbax reads, may be damaged.
        if seal.is_sealed(path):
            return {**files.parse_json(files.read_bytes(path / METADATA_FILE))["custom_metadata"]}
        return dict(ocp.metadata.get_step_metadata(path).custom_metadata or {})


def is_being_deleted(directory: epath.PathLike, step: int) -> bool:
    """Returns whether a checkpoint has been deleted. If it is being deleted, waits for the deletion to finish first."""
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


def _damage_error(path: epath.Path, problems: Sequence[str]) -> CheckpointError:
    shown = checks.first_lines([f"  {problem}" for problem in problems])
    return CheckpointError(
        f"The checkpoint {path} is damaged:\n" + "\n".join(shown),
        path.parent,
        [int(path.name)],
    )


@contextlib.contextmanager
def _reading(path: epath.Path, what: str, sealed: bool = False) -> Iterator[None]:
    """Converts errors raised while reading a checkpoint into a `CheckpointError`, unless its files match their seal.

    A file that this user may not read is not damaged.
    """
    try:
        yield
    except PermissionError:
        raise
    except Exception as error:
        strangers = [name for name in seal.unsealed_files(path) if name.startswith(f"{what}/")] if sealed else []
        if strangers:
            raise ValueError(
                f"{what} of the checkpoint {path} can't be read ({type(error).__name__}: {error}). Its own files match "
                f"their checksums, but there are other files beside them: {checks.listed(strangers)}. Remove those."
            ) from error
        if sealed:
            error.add_note(f"while reading {what} of the checkpoint {path}, whose files match their checksums")
            raise
        raise _damage_error(path, [f"{what} can't be read: {type(error).__name__}: {error}"]) from error


def check_fits(directory: epath.PathLike, step: int, state: Any, transforms: Mapping[str, str] | None = None) -> None:
    """Checks that `restore` would accept this state, without reading any arrays.

    Args:
      directory: The directory with one subdirectory per step.
      step: The step of the checkpoint.
      state: A state of arrays or `jax.ShapeDtypeStruct`s.
      transforms: See `restore`.

    Raises:
      FileNotFoundError: If there is no such checkpoint.
      CheckpointError: If the saved description of the leaves is damaged. Other damage is not detected.
      ValueError: If leaves of the checkpoint and the state differ in path, shape or dtype. The error lists these
        leaves.
    """
    opened, template = Checkpoint.at(directory, step, METADATA_FILE), jax.eval_shape(_storable, state)
    if transforms is None:
        opened.fit_template(_ITEM, template)
    else:
        opened.saved_paths(checks.leaves_by_path(template), transforms)


def _check_fits(
    path: epath.Path, item: str, saved: dict[str, Any], wanted: dict[str, Any], *, is_part: bool = False
) -> None:
    differences = checks.compare(saved, wanted)
    if not differences:
        return
    misfit, what, remedy = (
        "does not fit this state",
        "state",
        "Build the model and the optimizer as they were when it was saved, use a different directory, or map the "
        "old names onto the new ones with `transforms`.",
    )
    if item == _TREES_ITEM:
        misfit, what = "has trees that do not fit these templates", "template"
        remedy = "Give templates with the saved structure, shapes and dtypes, or use a different directory."
    if is_part:
        misfit, what = "does not fit this tree", "tree"
        remedy = "Give a tree of the same model, or choose leaves of the checkpoint with `paths`."
    raise ValueError(
        f"The checkpoint {path} {misfit}. Leaves that differ (checkpoint -> {what}):\n"
        + "\n".join(differences)
        + f"\n{remedy}"
    )


def _fingerprint(tree: Any) -> str:
    """Returns a hash of the paths, shapes and dtypes of a tree's leaves, and of its empty containers.

    If a saved tree and a template have the same hash, Orbax can restore the tree without reading its saved structure
    first.
    """
    is_empty = lambda node: node is None or (isinstance(node, dict | list | tuple) and not node)
    nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_empty)
    lines = sorted([f"{checks.path_name(path)}: {checks.describe(node)}" for path, node in nodes])
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _as_wide_as(saved: Any, leaf: Any) -> Any:
    """Returns a NumPy template for a leaf that was saved with 64 bits from the host, or that is on the host now."""
    if saved is None or saved.dtype == leaf.dtype or saved.shape != leaf.shape:
        return leaf
    is_same = jax.dtypes.canonicalize_dtype(saved.dtype) == jax.dtypes.canonicalize_dtype(leaf.dtype)
    return np.broadcast_to(np.zeros((), saved.dtype), saved.shape) if is_same else leaf


def _restore_args(leaf: Any) -> ocp.RestoreArgs:
    """Returns restore arguments without a dtype or shape.

    Given a dtype and shape, Orbax would cast and pad the arrays, but jaxloop treats any difference as an error.
    """
    sharding = getattr(leaf, "sharding", None)
    return ocp.RestoreArgs(restore_type=np.ndarray) if sharding is None else ocp.ArrayRestoreArgs(sharding=sharding)


def _place_of_ema(leaves: Mapping[str, Any]) -> str | None:
    """Returns the path of the `EMAState` in a state with these leaves, or None unless there is exactly one."""
    places = {path[: path.index(f"{_AVERAGE}/")] for path in leaves if f"{_AVERAGE}/" in path}
    found = [place for place in places if place.startswith("opt_state/") and f"{place}{_COUNT}" in leaves]
    return found[0] if len(found) == 1 else None


def _load_part(source: Any, saved: Mapping[str, str], into: Any, paths: Mapping[str, str] | None) -> Any:
    """Reads leaves of a `Checkpoint` or a `SafetensorsFile`; see `load_params`.

    Args:
      source: The `Checkpoint` or `SafetensorsFile` to read from.
      saved: A dict that maps the path of each leaf within the part to its path in the source.
      into: See `load_params`.
      paths: See `load_params`.
    """
    if into is None:
        ours = {path: _on_default_device(source.leaves[at]) for path, at in saved.items()}
        wide = [path for path, leaf in ours.items() if jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype]
        if wide:
            raise ValueError(
                f"{source.path} has 64-bit leaves, which JAX would truncate: {checks.listed(wide)}. Enable "
                "jax_enable_x64, or give NumPy arrays of these dtypes as `into`."
            )
    else:
        is_shape = lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is None
        ours = {
            path: _on_default_device(leaf) if is_shape(leaf) else leaf
            for path, leaf in checks.leaves_by_path(into).items()
        }
    if paths is None:
        our_names = _bare(ours)
        saved = {path if path in ours else our_names.get(_name(path), path): at for path, at in saved.items()}
    else:
        saved, ours = _renamed(saved, ours, paths)
    values = _load_leaves(source, saved, ours)
    return _nested(values) if into is None else _with_values(into, values)


def _load_leaves(source: Any, saved: Mapping[str, str], ours: Mapping[str, Any]) -> dict[str, Any]:
    """Reads only the given leaves.

    Args:
      source: The `Checkpoint` or `SafetensorsFile` to read from.
      saved: A dict that maps the name of each leaf to its path in the source.
      ours: Arrays or `jax.ShapeDtypeStruct`s with the shapes, dtypes and shardings to load, by name.

    Raises:
      ValueError: If the names, shapes or dtypes differ. The error lists the leaves.
    """
    described = {name: source.leaves[path] for name, path in saved.items()}
    _check_fits(source.path, _ITEM, described, dict(ours), is_part=True)
    values = source.read({path: ours[name] for name, path in saved.items()})
    return {name: values[path] for name, path in saved.items()}


def _name(path: str) -> str:
    return path.removesuffix("/value")


def _bare(paths: Iterable[str]) -> dict[str, str]:
    """Maps names to paths. A name is a path without the `/value` suffix of NNX variables."""
    return {_name(path): path for path in paths}


def _renamed(
    saved: Mapping[str, str], ours: Mapping[str, Any], paths: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, Any]]:
    """Returns two dicts, keyed by path in `ours`, of the saved paths and the leaves that `paths` selects."""
    saved_names, our_names = _bare(saved), _bare(ours)
    new_names = path_patterns.renamed(saved_names, paths)
    chosen = {our_names.get(new, new): saved[saved_names[old]] for old, new in new_names.items()}
    for path, leaf in ours.items():
        if path not in chosen and isinstance(leaf, jax.ShapeDtypeStruct):
            raise ValueError(
                f"No pattern in `paths` maps a saved leaf to {path}, for which `into` has only a shape. Give an array, "
                "or add a pattern."
            )
    return chosen, {path: leaf for path, leaf in ours.items() if path in chosen}


def _on_default_device(leaf: Any) -> jax.ShapeDtypeStruct:
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device)


def _with_values(tree: Any, values: Mapping[str, Any]) -> Any:
    """Returns a copy of a tree in which the leaves at the given paths are replaced by these values."""
    new = lambda path, leaf: _with_key_type(leaf, values.get(checks.path_name(path), leaf))
    return jax.tree_util.tree_map_with_path(new, tree)


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns nested dicts with the values at their paths. The final `value` in the paths of NNX variables is dropped.

    >>> _nested({"Dense_0/kernel": 1, "Dense_0/bias": 2})
    {'Dense_0': {'kernel': 1, 'bias': 2}}
    """
    result: dict[str, Any] = {}
    is_nnx = all(path.endswith("/value") for path in values)
    for path, value in values.items():
        *parents, name = (path.removesuffix("/value") if is_nnx else path).split("/")
        node = result
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise ValueError(
                    f"There is a leaf at {path}, and also one at the beginning of this path, so they can't be nested "
                    "in dicts. Give `into` and `paths`."
                )
        node[name] = value
    return result


def template_of(state: Any) -> Any:
    """Returns a template for restoring a state like `state`. The template doesn't keep the arrays of `state` alive."""
    return jax.tree.map(lambda leaf: leaf if _is_typed_key(leaf) else checks.shape_of(leaf), state)


def _storable(tree: Any) -> Any:
    """Replaces the typed PRNG keys in a tree with their data, because Orbax can't store typed keys."""
    return jax.tree.map(lambda leaf: jax.random.key_data(leaf) if _is_typed_key(leaf) else leaf, tree)


def _with_key_type(leaf: Any, restored: Any) -> Any:
    if not _is_typed_key(leaf) or restored is leaf:
        return restored
    return jax.random.wrap_key_data(restored, impl=jax.random.key_impl(leaf))


def _is_typed_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


# Writing ---------------------------------------------------------------------------------------------


def _is_saved(step: int, directory: epath.Path, manager: ocp.CheckpointManager | None) -> bool:
    """Returns whether there is a complete checkpoint of a step in a user's manager or, without one, a directory."""
    if manager is not None:
        return step in manager.all_steps()
    # Checking one name first is faster: Orbax starts threads to list a directory.
    return (directory / str(step)).exists() and step in all_steps(directory)


@final
class CheckpointWriter:
    """Saves checkpoints through an Orbax `CheckpointManager`, asynchronously if the manager is asynchronous.

    Args:
      manager_or_directory: A directory, or an Orbax manager that saves a single item (from either the current or the
        older Orbax API). With a manager, only the state is saved, without a seal. With a directory, the writer creates
        its own manager at the first save, and a new one after `close` or a failed save.
      keep: The number of recent checkpoints to keep, or None to keep all. Used only with a directory.
      best: The name of a metric and its mode, "min" or "max". The best checkpoint is kept in addition to the recent
        ones. If several are equally good, the newest one is considered the best. Requires a directory.
      keep_every: The checkpoints at which this schedule fires are never deleted. Requires a directory.

    Attributes:
      best: The argument of the same name.
      last_stall_secs: The number of seconds for which the last save blocked its caller; None before the first save.
      last_wait_secs: The part of `last_stall_secs` spent waiting for the previous save to be committed.
    """

    def __init__(
        self,
        manager_or_directory: ocp.CheckpointManager | epath.PathLike,
        keep: int | None = 3,
        best: tuple[str, str] | None = None,
        *,
        keep_every: Schedule | None = None,
    ):
        self._keep, self._keep_every = keep, keep_every
        self.best: tuple[str, str] | None = best
        self.last_stall_secs: float | None = None
        self.last_wait_secs: float | None = None
        self._manager: ocp.CheckpointManager | None = None
        self._owns_manager = isinstance(manager_or_directory, str | os.PathLike)
        self._closed = False  # Only for a manager that was passed in. With a directory, a new one is created.
        self._step: int | None = None  # The step of the current or last save.
        self._committed_step: int | None = None  # The step of the last commit since `close`.
        self._custom_metadata: dict[str, Any] = {}  # The metadata of the current or last save.
        self._has_metrics = best is not None or keep_every is not None
        if self._has_metrics and not self._owns_manager:
            raise ValueError(
                "`best` and `keep_every` need a directory, got a CheckpointManager, whose own options decide which "
                "checkpoints it keeps. Give the CheckpointManagerOptions a preservation_policy, or give the directory "
                "instead."
            )
        if self._owns_manager:
            self._directory = absolute(manager_or_directory)
        else:
            self._manager = manager_or_directory  # pyright: ignore[reportAttributeAccessIssue]
            self._directory = epath.Path(manager_or_directory.directory)  # pyright: ignore[reportAttributeAccessIssue]
            logging.info(
                "The checkpoint manager of %s saves only the train state. Give the directory instead to also save the "
                "state of the loops and actions, and to detect damaged files.",
                self._directory,
            )

    @property
    def directory(self) -> epath.Path:
        """The directory with one subdirectory per step."""
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
        """Starts saving a checkpoint, which is committed atomically. Existing checkpoints are not overwritten.

        All arguments are copied before this method returns, so they may be changed or donated afterwards. A save first
        waits until the previous save is committed.

        Args:
          step: The step number, which becomes the name of the checkpoint.
          state: The train state.
          metrics: The metrics that determine which checkpoint is best. Ignored by a manager that doesn't keep the best
            checkpoint.
          metadata: Numbers, strings, lists and dicts to store in the checkpoint; see the function `metadata`.
          run: A JSON dict, which may be several megabytes in size; see the function `run`. Saved only if the writer was
            created with a directory.
          trees: Trees of JAX and NumPy arrays, by name; see the function `trees`. Saved only if the writer was created
            with a directory.

        Returns:
          True if a save was started; False if the checkpoint already exists, or if the manager's policy skips this
          step.

        Raises:
          CheckpointError: If the previous save failed in the background, or if this save failed. The error includes the
            failed save's step. With a directory, the files of that save are removed, so that the next save can succeed.
        """
        if self._closed:
            raise ValueError(
                f"The checkpoint manager of {self._directory} was closed when the last run ended, and can't save any "
                "more. Make a new CheckpointManager, or give CheckpointAction the directory instead."
            )
        began, self.last_wait_secs = timing.clock(), 0.0
        try:
            args, custom_metadata = self._save_args(state, metadata or {}, run or {}, trees or {})
            with self._handling_errors_of(step):
                manager = self._prepared_manager()
                if _is_saved(step, self._directory, None if self._owns_manager else manager):
                    logging.warning(
                        "%s already has a checkpoint of step %d, which was not overwritten.", self._directory, step
                    )
                    return False
                if not manager.should_save(step):
                    return False
                if not self._owns_manager:
                    self._wait_for_previous_save()  # Not earlier: the manager might have skipped this step.
                if self._has_metrics:
                    metrics = dict(metrics or {})  # With None, Orbax warns at each save.
                    if self._keep_every is not None and self._keep_every(_elapsed(metadata or {}, step)):
                        metrics[_KEPT] = 1.0
                self._step, self._custom_metadata = step, custom_metadata
                with _save_start_lock:
                    return manager.save(
                        step,
                        args=args,
                        metrics=None if metrics is None else dict(metrics),
                        custom_metadata=custom_metadata or None,
                    )
        finally:
            self.last_stall_secs = timing.clock() - began

    def _save_args(
        self, state: Any, metadata: Mapping[str, Any], run: Mapping[str, Any], trees: Mapping[str, Any]
    ) -> tuple[ocp.args.CheckpointArgs, dict[str, Any]]:
        """Returns Orbax's arguments and the custom metadata. Raises an error if a value could not be restored."""
        custom_metadata = _json_copy(metadata, "metadata")
        if self.best is not None:
            custom_metadata[_BEST_KEY] = dict(zip(("name", "mode"), self.best, strict=True))
        checks.check_counter(getattr(state, "step", None))
        state = _saved_form(checks.as_arrays(state), "the state")
        items: dict[str, ocp.args.CheckpointArgs] = {_ITEM: ocp.args.PyTreeSave(state)}
        if not self._owns_manager:
            return items[_ITEM], custom_metadata
        if run:
            items[_RUN_ITEM] = ocp.args.JsonSave(_json_copy(run, "run"))
        if with_leaves := _checked_trees(trees):
            items[_TREES_ITEM] = ocp.args.PyTreeSave(_saved_form(with_leaves, "trees"))
        custom_metadata |= {
            _SEALED_KEY: True,
            _LEAVES_KEY: _fingerprint(state),
            _FORMAT_KEY: _FORMAT,
            _VERSION_KEY: own_version(),
        }
        return ocp.args.Composite(**items), custom_metadata

    def _prepared_manager(self) -> ocp.CheckpointManager:
        """Returns the manager. With a directory, first waits for the previous save and checks the directory."""
        if self._owns_manager:
            self._wait_for_previous_save()  # Before checking that its checkpoint still exists.
            self._check_directory()  # Before `_open_manager` creates it.
        return self._manager or self._open_manager()

    def _check_directory(self) -> None:
        """Raises an error in all processes if no save can succeed.

        If only some processes raised it, the others would wait for them forever.
        """
        problem = ""
        if distributed.is_first_process():
            try:
                self._check_not_lost()
                if jax.process_count() > 1:
                    prepare_directory(self._directory)
            except (OSError, lock.DirectoryLostError) as error:
                problem = f"{type(error).__name__}: {error}"
                if jax.process_count() == 1:
                    raise
        if problem := agreement.gather_texts(problem)[0]:
            raise agreement.known_to_all_processes(RuntimeError(problem))

    def _check_not_lost(self) -> None:
        """Raises an error if the run's locked directory was moved or replaced, or if the last checkpoint is gone."""
        lock.check(self._directory)
        step = self._committed_step
        if not self._owns_manager or step is None or (self._directory / str(step)).exists():
            return
        if max(all_steps(self._directory), default=-1) < step:  # Otherwise a newer one has replaced it.
            raise lock.DirectoryLostError(
                f"The checkpoint of step {step} was saved, and then something else deleted or moved it. Make sure that "
                "no clean-up job or other program does so, and start the run again: it resumes from the newest "
                "checkpoint that is left."
            )

    def _wait_for_previous_save(self) -> None:
        began = timing.clock()
        try:
            self.wait()
        finally:
            self.last_wait_secs = timing.clock() - began

    def _open_manager(self) -> ocp.CheckpointManager:
        prepare_directory(self._directory)
        if self._has_metrics and distributed.is_first_process():
            for step in all_steps(self._directory):
                try:
                    _metrics(self._directory / str(step))
                except CheckpointError as error:  # For example, its deletion was killed halfway.
                    _quarantine(error, "It can no longer be the best, or one of keep_every.")
        self._manager = ocp.CheckpointManager(self._directory, options=self._manager_options())
        return self._manager

    def _manager_options(self) -> ocp.CheckpointManagerOptions:
        """Returns the options for the manager that the writer creates for a directory."""
        options = ocp.CheckpointManagerOptions(
            max_to_keep=self._keep,
            cleanup_tmp_directories=True,
            async_options=ocp.options.AsyncOptions(
                post_finalization_callback=self._seal,
                # If the directory can't be created, `save` then raises. Otherwise Orbax's threads would wait for it
                # for five minutes.
                create_directories_asynchronously=False,
            ),
        )
        if not self._has_metrics:
            return options
        best = self.best or ("", "min")
        quality = lambda values: _quality(values, best)
        policies = [checkpoint_managers.LatestN(self._keep), _KeepMarked()]
        if self.best is not None:
            policies.append(
                checkpoint_managers.BestN(get_metric_fn=quality, n=1, keep_checkpoints_without_metrics=False)
            )
        return dataclasses.replace(
            options,
            max_to_keep=None,
            best_fn=quality,  # Without it, Orbax does not write the metrics.
            preservation_policy=checkpoint_managers.AnyPreservationPolicy(policies),
        )

    def _seal(self) -> None:
        """Seals the current save. Called in Orbax's thread, after all files are written and before the commit."""
        path = self._directory / f"{self._step}{ocp.utils.TMP_DIR_SUFFIX}"
        if not path.exists():
            path = self._directory / str(self._step)  # A store that can't rename has no temporary directory.
        # Orbax later writes to this file again, to add the time of the commit.
        seal.write(path, {METADATA_FILE: {"custom_metadata": self._custom_metadata}})
        lock.check(self._directory)

    @contextlib.contextmanager
    def _handling_errors_of(self, step: int | None) -> Iterator[None]:
        """Converts a save's errors into a `CheckpointError`. With a directory, also removes the save's files."""
        try:
            yield
        except CheckpointError:  # It already contains the step of an earlier save.
            raise
        except Exception as error:
            if self._owns_manager:
                self._discard_manager(step)
            try:
                found = ", ".join(map(str, all_steps(self._directory))) or "none"
            except OSError as reason:
                found = f"unknown, because it can't be listed ({reason})"
            remedy = " Make sure that the directory is writable and has free space, and save again."
            raise CheckpointError(
                f"Saving the checkpoint of step {step} in {self._directory} failed: {type(error).__name__}: {error}\n"
                f"Complete checkpoints there: {found}.{'' if isinstance(error, lock.DirectoryLostError) else remedy}",
                self._directory,
                [] if step is None else [step],
            ) from error

    def _discard_manager(self, step: int | None) -> None:
        """Closes the manager after an error, and removes the files of the failed save, which may fill the disk.

        The manager can't be used again, because it would treat the failed step as saved.
        """
        manager, self._manager = self._manager, None
        if manager is not None:
            with contextlib.suppress(Exception):  # The error of the save is the one to report.
                manager.close()
        with contextlib.suppress(OSError, lock.DirectoryLostError):  # The next manager tries again.
            lock.check(self._directory)  # If another run owns the directory, these files are not ours.
            clear_leftovers(self._directory)
            path = self._directory / str(step)
            # Orbax may have renamed the directory before it failed to write its metadata.
            if distributed.is_first_process() and path.exists() and seal.problems(path):
                path.rmtree()

    def wait(self) -> None:
        """Waits until the last save is committed.

        Raises:
          CheckpointError: If the last save failed. The error is raised only once.
        """
        if self._manager is not None and not self._closed:
            with self._handling_errors_of(self._step):
                self._manager.wait_until_finished()
            self._committed_step = self._step

    def close(self) -> None:
        """Waits for the last save, and closes the manager. A manager that was passed in can't save anything afterwards.

        Raises:
          CheckpointError: If the last save failed, or its checkpoint is no longer on disk. The error is raised only
            once.
        """
        try:
            self.wait()
            if self._committed_step is not None and distributed.is_first_process():
                with self._handling_errors_of(self._committed_step):
                    self._check_not_lost()
        finally:
            self._committed_step = None
            if self._manager is not None and not self._closed:
                self._manager.close()
                if self._owns_manager:
                    self._manager = None
                else:
                    self._closed = True


class _KeepMarked:
    """The preservation policy for `keep_every`. The mark is part of the checkpoint, so it survives restarts."""

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        return [_KEPT in (each.metrics or {}) for each in checkpoints]


def _json_copy(value: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns a copy of a value, made by a round trip through JSON. Tuples become lists.

    Raises:
      TypeError: If a key is not a string, or if a value can't be represented in JSON. The error names its path.
    """
    text = ""
    with contextlib.suppress(TypeError):  # The loop below raises an error with the path.
        text = json.dumps(value, default=lambda mapping: {**mapping})
    found: list[tuple[str, Any]] = [(name, value)]
    for path, each in found:  # The loop appends the values one level deeper to the list.
        if isinstance(each, Mapping):
            for key in each:
                if not isinstance(key, str):
                    raise TypeError(
                        f"{path} of a checkpoint must have strings as keys, got {key!r}. Write {str(key)!r}."
                    )
            found += [(f"{path}[{key!r}]", inner) for key, inner in each.items()]
        elif isinstance(each, list | tuple):
            found += [(f"{path}[{index}]", inner) for index, inner in enumerate(each)]
        elif each is not None and not isinstance(each, bool | int | float | str):
            raise TypeError(
                f"{path} of a checkpoint must be a number, a string, a list or a dict, got {each!r}. Put arrays "
                "into the state, and convert NumPy scalars with .item()."
            )
    return json.loads(text)


def _checked_trees(trees: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the trees that have leaves. All leaves must be JAX or NumPy arrays; Orbax copies both.

    Raises:
      TypeError: If a leaf is not an array of numbers.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(dict(trees)):
        is_numeric = isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind not in "OSUMm"
        if not is_numeric and not isinstance(leaf, jax.Array):
            raise TypeError(
                "trees of a checkpoint must hold JAX and NumPy arrays of numbers, and "
                f"{checks.path_name(path)} is {leaf!r}. Numbers, strings and lists belong in `run`."
            )
    return {name: checks.as_arrays(tree) for name, tree in trees.items() if jax.tree.leaves(tree)}


def _saved_form(tree: Any, what: str) -> Any:
    """Returns a tree in the form that Orbax stores. Raises an error if two leaves would have the same name in it."""
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
    """Removes the temporary directories left behind by interrupted saves. Not for use during a save to the directory.

    In a multi-process job, only the first process removes them.

    Returns:
      The names of the removed temporary directories, which are also logged.
    """
    directory = absolute(directory)
    if not directory.exists() or not distributed.is_first_process():
        return []
    names = sorted(path.name for path in directory.iterdir() if ocp.utils.TMP_DIR_SUFFIX in path.name)
    for name in names:
        path = directory / name
        is_link = not files.is_remote(path) and os.path.islink(path)
        path.unlink() if is_link or not path.is_dir() else path.rmtree()  # Not what a link points to.
    if names:
        logging.info("Removed the remains of incomplete saves in %s: %s", directory, ", ".join(names))
    return names
