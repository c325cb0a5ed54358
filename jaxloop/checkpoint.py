"""Train states on disk. The only module that knows Orbax."""

import math
import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from absl import logging
from etils import epath
from orbax.checkpoint import checkpoint_managers

from jaxloop import checks

# An Orbax manager keeps a single item, which it calls "default", in a directory of that name.
_ITEM = "default"
# Beside it, the metrics by which it tells the best checkpoint, and what it notes about each.
_METRICS_ITEM = "metrics"
_METADATA_FILE = "_CHECKPOINT_METADATA"
# In our metadata, which metric tells the best and how: `{"name": "test/accuracy", "mode": "max"}`.
_BEST_KEY = "best"


def all_steps(directory: epath.PathLike) -> list[int]:
    """The steps of the complete checkpoints in a directory, ascending; none where it does not exist."""
    directory = absolute(directory)
    return sorted(ocp.utils.checkpoint_steps(directory)) if directory.exists() else []


def metadata(directory: epath.PathLike, step: int) -> dict[str, Any]:
    """What was noted with the checkpoint of a step when it was saved; `{}` where there is nothing.

    Raises:
      FileNotFoundError: there is no such checkpoint.
    """
    found = all_steps(directory)
    if step not in found:
        raise FileNotFoundError(
            f"No checkpoint of step {step} in {directory}, which holds "
            + (f"steps {', '.join(map(str, found))}." if found else "none.")
        )
    path = absolute(directory) / str(step)
    if not (path / _METADATA_FILE).exists():
        return {}
    return dict(ocp.metadata.get_step_metadata(path).custom_metadata or {})


def _metrics(directory: epath.PathLike, step: int) -> dict[str, Any]:
    """The metrics that tell how good the checkpoint of a step is; `{}` where none were saved with it."""
    path = absolute(directory) / str(step) / _METRICS_ITEM
    if not (path / _METRICS_ITEM).exists():
        return {}
    return dict(ocp.JsonCheckpointHandler(filename=_METRICS_ITEM).restore(path) or {})


def best_step(directory: epath.PathLike, best: tuple[str, str] | None = None) -> int | None:
    """The step of the best checkpoint in a directory, the newest of equal ones; None where no metric tells.

    Args:
      directory: of a `CheckpointAction(directory, best=...)`, or of an Orbax manager with a `best_fn`.
      best: the name of the metric and "min" or "max", `("accuracy", "max")`. None for those of the `CheckpointAction`
        that wrote the newest checkpoint.
    """
    steps = all_steps(directory)
    if best is None and steps:
        noted = metadata(directory, steps[-1]).get(_BEST_KEY)
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


def restore(directory: epath.PathLike, step: int, state: Any, *, transforms: Any = None) -> Any:
    """Reads the checkpoint of a step into the structure and onto the devices of `state`.

    Raises:
      ValueError: the checkpoint's leaves differ from the state's in path, shape or dtype.
    """
    path = absolute(directory) / str(step) / _ITEM
    handler = ocp.PyTreeCheckpointHandler()
    template = _storable(state)
    if transforms is None:
        # The saved tree with our leaves: where it has no leaf, as in an empty dict, the two may differ.
        saved, wanted = handler.metadata(path).tree, checks.leaves_by_path(template)
        _check_fits(path.parent, checks.leaves_by_path(saved), wanted)
        template = jax.tree_util.tree_map_with_path(lambda path, _: wanted[checks.path_name(path)], saved)
    restore_args = jax.tree.map(_restore_args, template)
    with ocp.Checkpointer(handler) as checkpointer:
        restored = checkpointer.restore(
            path, args=ocp.args.PyTreeRestore(item=template, restore_args=restore_args, transforms=transforms)
        )
    values = checks.leaves_by_path(restored)
    return jax.tree_util.tree_map_with_path(lambda path, leaf: _as_in(leaf, values[checks.path_name(path)]), state)


def _check_fits(directory: epath.Path, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    differences = checks.compare(saved, wanted)
    if differences:
        raise ValueError(
            f"The checkpoint {directory} does not fit this state. Leaves that differ (checkpoint -> state):\n"
            + "\n".join(differences)
            + "\nBuild the model and the optimizer as they were when it was saved, give another directory, or "
            "map the old names onto the new ones with `transforms`."
        )


def _restore_args(leaf: jax.Array) -> ocp.RestoreArgs:
    return ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype)


def _storable(tree: Any) -> Any:
    """The tree with typed PRNG keys as their data, the form in which Orbax keeps them."""
    return jax.tree.map(lambda leaf: jax.random.key_data(leaf) if _is_typed_key(leaf) else leaf, tree)


def _as_in(leaf: Any, restored: Any) -> Any:
    return jax.random.wrap_key_data(restored, impl=jax.random.key_impl(leaf)) if _is_typed_key(leaf) else restored


def _is_typed_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


class CheckpointWriter:
    """Writes train states through an Orbax `CheckpointManager`, asynchronously where the manager does.

    Args:
      manager_or_directory: a manager that keeps single items, of the present or the older style; or a directory, for
        which a manager is made when the first state is saved, and again after `close`.
      keep: how many checkpoints a manager made here keeps, the newest ones; None for all.
      best: the name of a metric and "min" or "max": a manager made here keeps the best checkpoint too. Of equal ones
        it is the newest.
    """

    def __init__(
        self,
        manager_or_directory: ocp.CheckpointManager | epath.PathLike,
        keep: int | None = 3,
        best: tuple[str, str] | None = None,
    ):
        self._keep, self._best = keep, best
        self._manager: ocp.CheckpointManager | None = None
        self._owns_manager = isinstance(manager_or_directory, str | os.PathLike)
        self._closed = False  # A manager that was given; one of our own is made anew.
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
    ) -> bool:
        """Saves a state under its step; a step that is there already is left as it is.

        Args:
          step: its number.
          state: the state.
          metrics: how good it is, for a manager that keeps the best; others do not keep them.
          metadata: what is to be noted with it, as JSON can: numbers, strings, lists and dicts. See `metadata` of this
            module.

        Returns:
          Whether a save began: False for a step that is there, or that the manager's own policy passes over.
        """
        if self._closed:
            raise ValueError(
                f"The checkpoint manager of {self._directory} was closed when the last run ended, and would lose "
                "what it is given. Make a new CheckpointManager, or give CheckpointAction the directory instead."
            )
        if self._manager is None:
            prepare_directory(self._directory)
            self._manager = ocp.CheckpointManager(self._directory, options=self._options())
        if step in self._manager.all_steps():
            logging.warning(
                "%s has a checkpoint of step %d already. It stays, and the state given now is not saved.",
                self._directory,
                step,
            )
            return False
        if self._best is not None:
            name, mode = self._best
            metadata = {**(metadata or {}), _BEST_KEY: {"name": name, "mode": mode}}
            metrics = metrics or {}  # With None, Orbax warns at each save.
        if metadata:
            _check_is_json(metadata, "metadata")
        return self._manager.save(
            step,
            args=ocp.args.PyTreeSave(_storable(checks.adopt(state))),
            metrics=None if metrics is None else dict(metrics),
            custom_metadata=dict(metadata) if metadata else None,
        )

    def _options(self) -> ocp.CheckpointManagerOptions:
        """Of a manager made here."""
        best = self._best
        if best is None:
            return ocp.CheckpointManagerOptions(max_to_keep=self._keep, cleanup_tmp_directories=True)
        quality = lambda values: _quality(values, best)
        keeps_best = checkpoint_managers.BestN(get_metric_fn=quality, n=1, keep_checkpoints_without_metrics=False)
        return ocp.CheckpointManagerOptions(
            best_fn=quality,  # Without it, Orbax does not write the metrics.
            preservation_policy=checkpoint_managers.AnyPreservationPolicy(
                [checkpoint_managers.LatestN(self._keep), keeps_best]
            ),
            cleanup_tmp_directories=True,
        )

    def wait(self) -> None:
        """Waits until what was saved is committed; raises what went wrong."""
        if self._manager is not None and not self._closed:
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits, and ends the manager's threads. A manager that was given can save no more then."""
        if self._manager is not None and not self._closed:
            try:
                self._manager.wait_until_finished()
            finally:
                self._manager.close()
                if self._owns_manager:
                    self._manager = None
                else:
                    self._closed = True


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
    probe = path / f".write_probe_{os.getpid()}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise OSError(
            error.errno, f"Can't write to the directory {path} ({error.strerror}). Give one that can be written"
        ) from error
    return path


def absolute(directory: Any) -> epath.Path:
    """Orbax refuses relative paths, and only when it saves for the first time."""
    return epath.Path(directory).expanduser().resolve()
