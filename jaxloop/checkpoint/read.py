"""Functions and classes that open checkpoints, verify their files, and restore their contents.

A checkpoint that a `CheckpointWriter` saved through its own Orbax manager contains up to three items: `default` (the
train state), `run` (a JSON dict), and `trees` (arrays that are not part of the state). The checkpoint's seal covers all
files except Orbax's metadata file; see `jaxloop.checkpoint.seal`. `open_newest` and `Checkpoint.at` verify the files
against the seal once. After that, a `Checkpoint` reads its files without verifying them again.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, final

import jax
import numpy as np
from absl import logging
from etils import epath, epy

from jaxloop.base import checks, files, path_patterns
from jaxloop.base.files import absolute
from jaxloop.checkpoint import listing, seal, stored
from jaxloop.checkpoint.listing import METADATA_FILE, all_paths, all_steps, missing_error
from jaxloop.schedules import Elapsed

with epy.lazy_imports():  # Importing Orbax takes a fifth as long as importing jaxloop.
    import orbax.checkpoint as ocp

# The items. An Orbax manager keeps a single item, which it calls "default", in a directory of that name.
STATE, RUN, TREES = "default", "run", "trees"
# The file with the metrics that the manager uses to find the best checkpoint.
_METRICS_FILE = "metrics/metrics"
# The transforms that were passed to the run that saved the checkpoint, if any.
TRANSFORMS_KEY = "transforms"
# Only this package reads the following keys. This one, in Orbax's metadata file, means that the checkpoint has a seal.
SEALED_KEY = "jaxloop/sealed"
# The metric that decides which checkpoint is best: `["test/accuracy", "max"]`.
BEST_KEY = "jaxloop/best"
LEAVES_KEY = "jaxloop/leaves"  # The fingerprint of the state's leaves.
# The format of `run` and of the metadata, and the version of jaxloop that saved the checkpoint.
FORMAT_KEY, VERSION_KEY = "jaxloop/format", "jaxloop/version"
_OWN_PREFIX = "jaxloop/"
# Increased when an earlier version of jaxloop can't resume from checkpoints of this one, or vice versa.
FORMAT = 5
# Parts of paths in a train state: the optimizer's state, and the moving average in an `EMAState`.
_OPTIMIZER, AVERAGE = "opt_state/", "params_ema"


class CheckpointError(Exception):
    """Raised if a checkpoint's files are damaged, or can't be read or written.

    Loading an intact checkpoint of a different model raises a `ValueError` instead.

    Attributes:
      directory: The directory with one subdirectory per step, or None if it is unknown.
      steps: The steps of the affected checkpoints.
    """

    def __init__(self, message: str, directory: epath.PathLike | None = None, steps: Sequence[int] = ()):
        super().__init__(message)
        self.directory: epath.Path | None = None if directory is None else epath.Path(directory)
        self.steps: tuple[int, ...] = tuple(steps)


# Finding checkpoints ---------------------------------------------------------------------------------


def own_version() -> str:
    """Returns the version of the imported jaxloop package."""
    import jaxloop

    return jaxloop.__version__


def best_step(directory: epath.PathLike, best: tuple[str, str] | None = None) -> int | None:
    """Returns the step of the best checkpoint in a directory, or None if no checkpoint contains the metric.

    If several checkpoints are equally good, the newest one is considered the best.

    Args:
      directory: The directory of a `CheckpointAction(directory, best=...)`, or of an Orbax manager with a `best_fn`.
      best: The name of the metric and its mode, "min" or "max", as in `("accuracy", "max")`. If None, the metric and
        mode of the `CheckpointAction` that saved the newest checkpoint are used.
    """
    directory = absolute(directory)
    steps = all_steps(directory)
    if best is None and steps:
        best = Checkpoint.open(directory / str(steps[-1]), METADATA_FILE).custom_metadata.get(BEST_KEY)
    if not best:
        return None
    qualities = {step: quality(metrics(directory / str(step)), best) for step in steps}
    known = [step for step in steps if qualities[step] > -math.inf]
    return max(known, key=lambda step: (qualities[step], step), default=None)


def metrics(path: epath.Path) -> dict[str, Any]:
    """Returns the metrics that were saved with a checkpoint, or `{}` if none were saved.

    These metrics decide which checkpoint is the best.
    """
    return _read_json(Checkpoint.open(path, _METRICS_FILE).path, _METRICS_FILE)


def quality(values: Mapping[str, Any], best: tuple[str, str]) -> float:
    """Returns the quality of a checkpoint with the given metrics, or -inf if the metric in `best` is missing or NaN.

    A higher quality is better, whatever the mode in `best`.
    """
    name, mode = best
    value = values.get(name)
    if value is None or math.isnan(value):
        return -math.inf
    return float(value) if mode == "max" else -float(value)


def restore(
    directory: epath.PathLike,
    step: int,
    state: Any,
    *,
    transforms: Mapping[str, str] | None = None,
    any_optimizer: bool = False,
) -> Any:
    """Restores the train state from a checkpoint, with the structure and the shardings of `state`.

    The checkpoint's files are verified first, unless the checkpoint has no seal (for example, because an Orbax manager
    saved it).

    Args:
      directory: The directory with one subdirectory per step.
      step: The step of the checkpoint, which can be 0.
      state: A state of JAX arrays with the same structure, shapes and dtypes as the saved one. The shardings may
        differ. The state is not donated.
      transforms: A dict that renames saved leaves. It maps patterns for the saved paths to the corresponding paths in
        the state, as in `{"**/Dense_0/**": "**/output/**"}`. `*` matches one name, and `**` matches one or more names.
        A checkpoint that already has the new names is read unchanged.
      any_optimizer: Whether to accept a state with a different optimizer, or without one. With such a state, everything
        except `opt_state` is restored, and the differences are logged. If both the checkpoint and the state have a
        moving average of the parameters, the average is also restored.

    Raises:
      FileNotFoundError: If there is no such checkpoint.
      CheckpointError: If files of the checkpoint are damaged. The message lists these files.
      ValueError: If leaves of the checkpoint and the state differ in path, shape or dtype, or if a pattern in
        `transforms` matches no saved leaf. The message lists the leaves that differ, or names the pattern.
    """
    return Checkpoint.at(directory, step).restore(state, transforms=transforms, any_optimizer=any_optimizer)


def restore_newest(
    directory: epath.PathLike,
    state: Any,
    *,
    transforms: Mapping[str, str] | None = None,
    any_optimizer: bool = False,
    quarantines: bool = True,
) -> tuple[Any, int] | None:
    """Restores the newest undamaged checkpoint; see `restore`.

    Damaged checkpoints that are newer than the restored one are then moved to `<directory>/damaged/<step>`, so that
    their steps can be saved again. A warning is logged for each of these damaged checkpoints.

    Args:
      directory: The directory with one subdirectory per step.
      state: See `restore`.
      transforms: See `restore`.
      any_optimizer: See `restore`.
      quarantines: Whether to move damaged checkpoints. Pass False to leave the directory unchanged, for example if
        another process may be saving checkpoints there.

    Returns:
      The pair `(state, step)`, or None if the directory contains no checkpoints.

    Raises:
      CheckpointError: If there are checkpoints, but all of them are damaged. In this case, no checkpoint is moved.
      ValueError: If the newest undamaged checkpoint doesn't fit the state. In this case, no checkpoint is moved.
    """
    restore = lambda opened: opened.restore(state, transforms=transforms, any_optimizer=any_optimizer)
    opened = open_newest(all_paths([directory]), restore, quarantines=quarantines)
    return opened and (opened[1], opened[0].step)


def open_newest(
    paths: Sequence[epath.Path], read: Callable[["Checkpoint"], Any], *, quarantines: bool = True
) -> "tuple[Checkpoint, Any] | None":
    """Opens the newest undamaged checkpoint among `paths`; see `restore_newest`.

    Args:
      paths: The paths of the checkpoints, as returned by `all_paths`.
      read: A function that reads an open checkpoint. If `read` raises a `CheckpointError`, the checkpoint is treated as
        damaged.
      quarantines: See `restore_newest`.

    Returns:
      The checkpoint and the result of `read`, or None if `paths` is empty.

    Raises:
      CheckpointError: If all checkpoints are damaged. In this case, none is moved.
    """
    errors: list[CheckpointError] = []
    for path in reversed(paths):
        try:
            opened = Checkpoint.open(path)
            found = opened, read(opened)
        except CheckpointError as error:
            errors.append(error)
            continue
        for error in errors:
            consequence = f"Step {opened.step} was restored instead."
            quarantine(error, consequence) if quarantines else logging.warning("%s\n%s", error, consequence)
        return found
    if not errors:
        return None
    directories = list(dict.fromkeys(error.directory for error in errors))
    lines = "\n".join(map(str, errors))
    raise CheckpointError(
        f"All checkpoints in {' and '.join(map(str, directories))} are damaged, and nothing was restored or moved.\n"
        f"{lines}\nTo start from scratch, use a different directory or move these checkpoints away.",
        directories[0],
        [error.steps[0] for error in errors],
    )


def quarantine_damaged(paths: Sequence[epath.Path]) -> None:
    """Quarantines the damaged checkpoints among `paths` that are newer than the newest undamaged one; see `quarantine`.

    In a multi-process job, only the first process may call this function, and it must do so before any process starts
    restoring. If all checkpoints are damaged, none are moved.
    """
    with contextlib.suppress(CheckpointError):  # All processes raise the error when they restore.
        open_newest(paths, lambda opened: None)


def quarantine(error: CheckpointError, consequence: str) -> None:
    """Moves the damaged checkpoint named in `error` to the subdirectory `damaged` of its parent directory, if possible.

    Logs a warning that states whether the checkpoint was moved, and that ends with the sentence `consequence`.
    """
    assert error.directory is not None
    (step,) = error.steps
    try:
        where = f"It was moved to {listing.move(error.directory / str(step), listing.DAMAGED)}."
    except OSError as reason:
        where = f"It could not be moved to {error.directory / listing.DAMAGED} ({reason})."
    logging.warning("%s\n%s %s", error, where, consequence)


@final
@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """An open checkpoint. Its files are verified when the checkpoint is opened, but not again when they are read.

    Attributes:
      path: The directory of the checkpoint, whose name is the step.
      is_sealed: True if the checkpoint has a seal and its files match the seal. Checkpoints saved by an Orbax manager
        have no seal.
      custom_metadata: The metadata passed when the checkpoint was saved, and the metadata added by this package. If the
        checkpoint has a seal, both are stored in the seal.
    """

    path: epath.Path
    is_sealed: bool
    custom_metadata: Mapping[str, Any]

    @classmethod
    def at(cls, directory: epath.PathLike, step: int, below: str = "") -> "Checkpoint":
        """Opens the checkpoint of a step and, if it has a seal, verifies its files.

        If `below` is not empty, only the file or subdirectory with this relative path is verified.

        Raises:
          FileNotFoundError: If there is no such checkpoint.
          CheckpointError: If the files are damaged. The message lists the problems.
          PermissionError: If the current user may not read a file.
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
        """Opens the checkpoint in the directory `path`, which must exist. Verifies its files as `at` does."""
        in_orbax_file, is_sealed = _read_json(path, METADATA_FILE), (path / seal.NAME).exists()
        if not in_orbax_file:
            raise _damage_error(path, [f"{METADATA_FILE} is missing"])
        custom_metadata = in_orbax_file.get("custom_metadata")
        custom_metadata = custom_metadata if isinstance(custom_metadata, dict) else {}
        if is_sealed or SEALED_KEY in custom_metadata:
            custom_metadata, problems = seal.verify(path, below)
            if problems:
                raise _damage_error(path, problems)
        return cls(path, is_sealed, custom_metadata)

    @functools.cached_property
    def step(self) -> int:
        """The step of the checkpoint: the number of updates completed when it was saved."""
        return int(self.path.name)

    def elapsed(self) -> Elapsed:
        """Returns the run's progress at this checkpoint.

        If the checkpoint doesn't contain the progress, only the step is set in the result.

        Raises:
          CheckpointError: If the saved progress is invalid.
        """
        with self.understanding():
            saved = self.custom_metadata
            previous = Elapsed(**saved["previous"]) if "previous" in saved else None
            return Elapsed(**saved.get("elapsed", {"steps": self.step}), previous=previous)

    def metadata(self) -> dict[str, Any]:
        """Returns the metadata that was passed when the checkpoint was saved."""
        return {key: value for key, value in self.custom_metadata.items() if not key.startswith(_OWN_PREFIX)}

    def run(self) -> dict[str, Any]:
        """Returns the JSON dict that was saved as `run`, or `{}` if none was saved."""
        return _read_json(self.path, f"{RUN}/metadata")

    def restore(self, state: Any, *, transforms: Mapping[str, str] | None = None, any_optimizer: bool = False) -> Any:
        """Restores the train state; see the function `restore`."""
        template = stored.storable(checks.as_arrays(state))
        if not transforms and self.is_sealed and self.custom_metadata.get(LEAVES_KEY) == stored.fingerprint(template):
            return stored.with_values(state, self._read(template, STATE))
        ours = kept = checks.leaves_by_path(template)
        try:
            found, wanted = self._match(ours, transforms)
        except ValueError as error:
            if not any_optimizer:
                raise
            names, kept = _without_optimizer(self.leaves, ours)
            try:
                found, wanted = self._match(kept, transforms, names)
            except ValueError:
                raise error from None  # The model differs, too.
        values = stored.load(self, found, wanted)
        if kept is not ours:
            _warn_of_optimizer(self, ours, kept)
        return stored.with_values(state, values)

    def check_fits(self, state: Any, transforms: Mapping[str, str] | None = None) -> None:
        """Checks that `restore` would accept a state, which may consist of `jax.ShapeDtypeStruct`s. Reads no arrays.

        Raises:
          ValueError: If leaves of the checkpoint and the state differ in path, shape or dtype, or if a pattern in
            `transforms` matches no saved leaf. The message lists the leaves that differ, or names the pattern.
        """
        self._match(checks.leaves_by_path(jax.eval_shape(stored.storable, state)), transforms)

    def trees(self, templates: Mapping[str, Any]) -> dict[str, Any]:
        """Restores trees that were saved alongside the state. They get the structures and shardings of `templates`.

        Args:
          templates: Templates for the trees to restore, by name. They must have the same structures, shapes and dtypes
            as the saved trees. Where a template contains a JAX array, the saved array is restored as a JAX array with
            the same sharding. Where it contains a NumPy array, the saved array is restored as a NumPy array.

        Raises:
          ValueError: If leaves of the saved trees and the templates differ in path, shape or dtype. The message lists
            these leaves.
        """
        chosen = {name: tree for name, tree in templates.items() if jax.tree.leaves(tree)}
        if not chosen:
            return dict(templates)
        described = self._described(TREES) if (self.path / TREES).exists() else {}
        saved = checks.leaves_by_path({name: described[name] for name in chosen if name in described})
        wanted = checks.leaves_by_path(stored.storable(chosen))
        stored.check_fits(self.path, saved, wanted, "template")
        return {**templates, **stored.with_values(chosen, self.read(wanted, TREES))}

    @functools.cached_property
    def leaves(self) -> Mapping[str, Any]:
        """Descriptions of the train state's saved leaves, keyed by path. Accessing this property reads no arrays."""
        return checks.leaves_by_path(self._described(STATE))

    def read(self, wanted: Mapping[str, Any], item: str = STATE) -> dict[str, Any]:
        """Reads the leaves at the paths in `wanted`, with the shardings that `wanted` specifies.

        Leaves without a sharding in `wanted` are returned as NumPy arrays. All leaves have the saved shapes and dtypes.
        """
        chosen = lambda path, _: wanted.get(checks.path_name(path), ocp.PLACEHOLDER)
        return self._read(jax.tree_util.tree_map_with_path(chosen, self._described(item)), item)

    def _read(self, template: Any, item: str) -> dict[str, Any]:
        """Returns an item's arrays, keyed by path. Omits the arrays for which `template` contains a placeholder."""
        leaves, structure = jax.tree.flatten(template)
        # Without dtypes and shapes, because Orbax would cast and pad the arrays to match. Any difference is an error.
        shardings = [getattr(leaf, "sharding", None) for leaf in leaves]
        restore_args = [
            ocp.RestoreArgs(restore_type=np.ndarray) if each is None else ocp.ArrayRestoreArgs(sharding=each)
            for each in shardings
        ]
        args = ocp.args.PyTreeRestore(template, restore_args=jax.tree.unflatten(structure, restore_args))
        with _reading(self, item), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            restored = checks.leaves_by_path(checkpointer.restore(self.path / item, args=args))
        return {path: leaf for path, leaf in restored.items() if leaf is not ocp.PLACEHOLDER}

    def _described(self, item: str) -> Any:
        """Returns a tree with the structure of a saved item. Its leaves describe the saved arrays."""
        with _reading(self, item):
            return ocp.PyTreeCheckpointHandler().metadata(self.path / item).tree

    def _match(
        self, ours: Mapping[str, Any], transforms: Mapping[str, str] | None, names: Mapping[str, str] | None = None
    ) -> tuple[dict[str, str], dict[str, Any]]:
        """Finds the saved leaf for each leaf of a state; see `restore`.

        Transforms are not applied to a checkpoint that already has the new names, such as one saved by a run with the
        same transforms.

        Args:
          ours: The leaves of the state, keyed by path.
          transforms: See `restore`.
          names: A dict with the names of the saved leaves as keys and their paths in the checkpoint as values. The
            transforms are applied to the names. If None, each saved leaf's name is its path.

        Returns:
          Two dicts with the same keys as `ours`. The first contains the paths of the saved leaves in the checkpoint,
          and the second contains the templates for reading the saved leaves.

        Raises:
          ValueError: If the renamed leaves don't fit those in `ours`, or if a pattern matches no saved leaf.
        """
        names = {path: path for path in self.leaves} if names is None else names
        transforms = {} if transforms is None else transforms
        if not all(isinstance(each, str) for pair in transforms.items() for each in pair):
            raise TypeError(f"transforms must be a dict such as {{'**/Dense/**': '**/output/**'}}, got {transforms!r}.")
        if transforms == self.custom_metadata.get(TRANSFORMS_KEY):
            transforms = {}
        is_saved = lambda pattern: any(path_patterns.matches(pattern, name) for name in names)
        transforms = {old: new for old, new in transforms.items() if is_saved(old) or not is_saved(new)}
        found = stored.match(names, ours, transforms)
        described = {path: self.leaves[at] for path, at in found.items()}
        wanted = {path: stored.as_wide_as(described.get(path), leaf) for path, leaf in ours.items()}
        stored.check_fits(self.path, described, wanted, "state")
        return found, wanted

    @contextlib.contextmanager
    def understanding(self) -> Iterator[None]:
        """Returns a context manager that raises a `CheckpointError` if saved values don't have the expected form.

        The message contains the version of jaxloop that saved the checkpoint and the version in use.

        Raises:
          CheckpointError: If the checkpoint has a different format, or if the body of the `with` statement raises a
            `LookupError`, `TypeError` or `AttributeError`.
        """
        saved_format = self.custom_metadata.get(FORMAT_KEY, FORMAT)
        try:
            if saved_format != FORMAT:
                raise LookupError(f"the format {FORMAT} rather than {saved_format}")
            yield
        except (LookupError, TypeError, AttributeError) as error:
            saved_by, version = self.custom_metadata.get(VERSION_KEY, "an unknown version"), own_version()
            raise CheckpointError(
                f"The checkpoint {self.path}, saved by jaxloop {saved_by}, does not contain what jaxloop {version} "
                f"expects ({type(error).__name__}: {error}). Resume it with the version and the program that saved it, "
                "or restore only its train state with step.restore_model(state, directory) and start a run in another "
                "directory.",
                self.path.parent,
                [self.step],
            ) from error


def _damage_error(path: epath.Path, problems: Sequence[str]) -> CheckpointError:
    shown = checks.first_lines([f"  {problem}" for problem in problems])
    text = "\n".join([f"The checkpoint {path} is damaged:", *shown])
    return CheckpointError(text, path.parent, [int(path.name)])


def _read_json(path: epath.Path, name: str) -> dict[str, Any]:
    """Returns the dict in the JSON file `name` of a checkpoint, or `{}` if there is no such file."""
    try:
        return {**(files.parse_json(files.read_bytes(path / name)) or {})}
    except FileNotFoundError:
        return {}
    except PermissionError:
        raise
    except (OSError, ValueError, TypeError) as error:
        raise _damage_error(path, [f"{name} can't be read: {type(error).__name__}: {error}"]) from error


@contextlib.contextmanager
def _reading(opened: Checkpoint, item: str) -> Iterator[None]:
    """Returns a context manager that converts an error raised while reading an item to a `CheckpointError`.

    If the checkpoint has a seal, its files are known to be intact, so the original error is raised again, with a note.
    A `PermissionError` is not converted either, because it doesn't mean that the file is damaged.
    """
    try:
        yield
    except PermissionError:
        raise
    except Exception as error:
        if not opened.is_sealed:
            raise _damage_error(opened.path, [f"{item} can't be read: {type(error).__name__}: {error}"]) from error
        error.add_note(f"in {opened.path / item}, whose files match their checksums. If there are others, remove them.")
        raise


def place_of_ema(leaves: Collection[str]) -> str | None:
    """Returns the path of the only `EMAState` in a state, or None if the state has none or several.

    Args:
      leaves: The paths of the state's leaves.
    """
    middle = f"/{AVERAGE}/"
    places = {path.partition(middle)[0] for path in leaves if path.startswith(_OPTIMIZER) and middle in path}
    return places.pop() if len(places) == 1 else None


def _without_optimizer(saved: Collection[str], ours: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
    """Drops `opt_state` from the saved leaves and from the state's leaves.

    If the checkpoint and the state both have a moving average of the parameters, the leaves of the average are kept.

    Args:
      saved: The paths of the saved leaves.
      ours: The leaves of the state, keyed by path.

    Returns:
      Two dicts: the argument `names` for `Checkpoint._match`, and the remaining leaves of the state, keyed by path.
      `names` contains the remaining saved leaves. Most of these leaves are named after their paths in the checkpoint,
      but the leaves of the moving average are named after their paths in the state, because the average may have a
      different path in the checkpoint.
    """
    place, saved_place = place_of_ema(ours), place_of_ema(saved)
    names = {path: path for path in saved if not path.startswith(_OPTIMIZER)}
    kept = {path: leaf for path, leaf in ours.items() if not path.startswith(_OPTIMIZER)}
    if place is not None and saved_place is not None:
        averages = [path for path in saved if path.startswith(f"{saved_place}/")]
        names |= {f"{place}{path.removeprefix(saved_place)}": path for path in averages}
        kept |= {path: leaf for path, leaf in ours.items() if path.startswith(f"{place}/")}
    return names, kept


def _warn_of_optimizer(opened: Checkpoint, ours: Mapping[str, Any], kept: Mapping[str, Any]) -> None:
    """Logs that the optimizer state was not restored, and which leaves differ between the checkpoint and the state.

    Args:
      opened: The checkpoint.
      ours: All leaves of the state, keyed by path.
      kept: The leaves of the state that were restored, keyed by path.
    """
    lines = "\n".join(checks.compare(dict(opened.leaves), dict(ours)))
    # Only the state of `optax.contrib.schedule_free` has such a leaf.
    is_schedule_free = any(path.endswith("/weight_sum") for path in opened.leaves.keys() - ours.keys())
    logging.log(
        logging.WARNING if len(kept) < len(ours) or is_schedule_free else logging.INFO,  # INFO without an optimizer.
        "The state was restored from %s without its opt_state, because the optimizers differ (but with the average of "
        "the parameters, if both have one). The optimizer starts with the given opt_state. Leaves that differ "
        "(checkpoint -> state):\n%s%s",
        opened.path,
        lines,
        "\nThat of a schedule-free optimizer determines the parameters to evaluate. Give the evaluation's step the "
        "same optimizer, or it uses the training parameters, which are worse."
        if is_schedule_free
        else "",
    )
