"""The class that saves checkpoints. Each checkpoint is sealed and then committed atomically.

`CheckpointWriter.save` rejects values that couldn't be restored later (`_save_args`), waits for the previous save,
checks the directory, and then passes the values to Orbax. An Orbax thread writes the files, calls `_seal`, and commits
the checkpoint with a single rename.
"""

import contextlib
import dataclasses
import json
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any, final

import jax
from absl import logging
from etils import epath, epy

from jaxloop import distributed
from jaxloop.base import checks, files, timing
from jaxloop.checkpoint import read, seal, stored
from jaxloop.checkpoint.listing import METADATA_FILE, all_paths
from jaxloop.checkpoint.read import CheckpointError
from jaxloop.distributed import agreement, lock

with epy.lazy_imports():  # Importing Orbax takes a fifth as long as importing jaxloop.
    import orbax.checkpoint as ocp

# Orbax numbers the saves of a process and keeps the current number in a global variable. If two threads started saves
# at the same time, each would wait forever for the directory of the other.
_save_start_lock = threading.Lock()


@final
class CheckpointWriter:
    """Saves checkpoints through an Orbax `CheckpointManager`, asynchronously if the manager is asynchronous.

    Args:
      manager_or_directory: A directory, or an Orbax manager (from the current or the older API) that saves a single
        item. If a directory is passed, the writer creates its own manager at the first save. After `close` or a failed
        save, the next save creates a new manager. If a manager is passed, the caller must close that manager, and the
        checkpoints have no seal and contain neither `run` nor `trees`; see `save`.
      keep: The number of recent checkpoints to keep, or None to keep all. Used only with a directory.
      best: The name of a metric and its mode, "min" or "max". The best checkpoint is kept in addition to the recent
        ones. If several are equally good, the newest one is considered the best. Requires a directory.

    Attributes:
      directory: The directory of the checkpoints, with one subdirectory per checkpoint.
      last_stall_secs: The number of seconds for which the last call to `save` blocked, or None before the first call.
    """

    def __init__(
        self,
        manager_or_directory: "ocp.CheckpointManager | epath.PathLike",
        keep: int | None = 3,
        best: tuple[str, str] | None = None,
    ):
        self.last_stall_secs: float | None = None
        self._policy: _Policy | None = None  # None if a manager was passed in, whose own options decide.
        self._manager: ocp.CheckpointManager | None = None  # None while no manager is open.
        self._saving: tuple[int, dict[str, Any]] = -1, {}  # The step and the metadata of the current or last save.
        if isinstance(manager_or_directory, str | os.PathLike):
            self.directory: epath.Path = files.absolute(manager_or_directory)
            self._policy = _Policy(keep, best)
            return
        if best is not None:
            raise ValueError("`best` needs a directory, got a CheckpointManager, whose options say what it keeps.")
        self._manager, self.directory = manager_or_directory, epath.Path(manager_or_directory.directory)

    @property
    def best(self) -> tuple[str, str] | None:
        """The constructor argument `best`, or None if a manager was passed."""
        return self._policy and self._policy.best

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

        All arguments are copied before this method returns, so they may be changed or donated afterwards. Before a save
        starts, this method waits until the previous save is committed.

        Args:
          step: The step number, which becomes the name of the checkpoint.
          state: The train state.
          metrics: The metrics that determine which checkpoint is best. Ignored by a manager that doesn't keep the best
            checkpoint.
          metadata: Numbers, strings, lists and dicts to store in the checkpoint; see `Checkpoint.metadata`.
          run: A JSON dict, which may be several megabytes in size; see `Checkpoint.run`. Saved only if the writer was
            created with a directory.
          trees: Trees of JAX and NumPy arrays, by name; see `Checkpoint.trees`. Saved only if the writer was created
            with a directory.

        Returns:
          True if a save was started; False if the checkpoint already exists, or if the manager's policy skips this
          step.

        Raises:
          CheckpointError: If the previous save failed in the background, or if this save failed. The error contains the
            step of the failed save. If the writer was created with a directory, the files of the failed save are
            removed, so that the next save can succeed.
        """
        began = timing.clock()
        try:
            args, custom_metadata = self._save_args(state, metadata or {}, run or {}, trees or {})
            try:
                return self._start(step, args, custom_metadata, metrics)
            except CheckpointError:  # It already contains the step of an earlier save.
                raise
            except Exception as error:
                raise self._failure(step, error) from error
        finally:
            self.last_stall_secs = timing.clock() - began

    def _save_args(
        self, state: Any, metadata: Mapping[str, Any], run: Mapping[str, Any], trees: Mapping[str, Any]
    ) -> "tuple[ocp.args.CheckpointArgs, dict[str, Any]]":
        """Returns two values: Orbax's arguments for a save, and the custom metadata of the checkpoint.

        Raises an error if a value could be saved but not restored.
        """
        custom_metadata = _json_copy(metadata, "metadata")
        checks.check_counter(getattr(state, "step", None))
        state = stored.storable(checks.as_arrays(state))
        stored.check_names(state, "the state")
        items: dict[str, ocp.args.CheckpointArgs] = {read.STATE: ocp.args.PyTreeSave(state)}
        if self._policy is None:
            return items[read.STATE], custom_metadata
        if run:
            items[read.RUN] = ocp.args.JsonSave(_json_copy(run, "run"))
        if with_leaves := {name: checks.as_arrays(tree) for name, tree in trees.items() if jax.tree.leaves(tree)}:
            stored.check_names(with_leaves, "trees")
            items[read.TREES] = ocp.args.PyTreeSave(stored.storable(with_leaves))
        custom_metadata |= {read.FORMAT_KEY: read.FORMAT, read.VERSION_KEY: read.own_version()}
        custom_metadata[read.LEAVES_KEY] = stored.fingerprint(state)
        if self._policy.best is not None:
            custom_metadata[read.BEST_KEY] = list(self._policy.best)
        return ocp.args.Composite(**items), custom_metadata

    def _start(
        self,
        step: int,
        args: "ocp.args.CheckpointArgs",
        custom_metadata: dict[str, Any],
        metrics: Mapping[str, float] | None,
    ) -> bool:
        """Starts a save in Orbax, unless the checkpoint already exists or the manager skips the step.

        Returns True if a save was started. See `save`.
        """
        policy = self._policy
        if policy is not None:
            self.wait()  # Before checking that the checkpoint of the previous save still exists.
            self._check_directory()  # Before `_open_manager` creates it.
        if (self.directory / str(step)).exists() or (self._manager and step in self._manager.all_steps()):
            logging.warning("%s already has a checkpoint of step %d, which was not overwritten.", self.directory, step)
            return False
        manager = self._manager or self._open_manager()  # It deletes unfinished saves until its first save starts.
        if not manager.should_save(step):
            return False
        if policy is None:
            self.wait()  # Not earlier: the manager might have skipped this step.
        else:
            metrics = metrics or {}
        self._saving = step, custom_metadata
        with _save_start_lock:
            noted = custom_metadata if policy is None else {read.SEALED_KEY: True}
            return manager.save(step, args=args, metrics=metrics and dict(metrics), custom_metadata=noted or None)

    def _check_directory(self) -> None:
        """Raises an error in all processes if checkpoints can't be saved to the directory.

        If only some processes raised the error, the others would wait for them forever.
        """
        problem = ""
        if distributed.is_first_process():
            try:
                lock.check(self.directory)
                # If Orbax then failed to create a directory, its threads would wait for it for five minutes.
                files.prepare_directory(self.directory)
                self._quarantine_unreadable()  # Before any process looks at which checkpoints exist.
            except (OSError, lock.DirectoryLostError) as error:
                problem = f"{type(error).__name__}: {error}"
                if jax.process_count() == 1:
                    raise
        if problem := agreement.gather_texts(problem)[0]:
            raise agreement.known_to_all_processes(RuntimeError(problem))

    def _quarantine_unreadable(self) -> None:
        """Quarantines checkpoints whose metrics can't be read. Orbax needs the metrics to find the best checkpoint.

        Does nothing if the writer doesn't keep the best checkpoint, or if a manager is open.
        """
        if self._manager is not None or self._policy is None or self._policy.best is None:
            return
        for path in all_paths([self.directory]):
            try:
                read.metrics(path)
            except CheckpointError as error:
                read.quarantine(error, "A killed run may have been deleting it. It can no longer be the best.")

    def _open_manager(self) -> "ocp.CheckpointManager":
        policy = self._policy
        assert policy is not None
        self._manager = ocp.CheckpointManager(self.directory, options=policy.options(self._seal))
        return self._manager

    def _seal(self) -> None:
        """Seals the checkpoint that is being saved.

        Orbax calls this method in its own thread, after all files are written and before the checkpoint is committed.
        """
        step, custom_metadata = self._saving
        path = self._unfinished(step)
        # Orbax later writes to the metadata file again, to add the time of the commit.
        seal.write(path, custom_metadata, [METADATA_FILE])
        lock.check(self.directory)

    def _unfinished(self, step: int) -> epath.Path:
        """Returns the directory that contains the files of a save, whether or not the save has been committed."""
        path = self.directory / f"{step}{ocp.utils.TMP_DIR_SUFFIX}"
        return path if path.exists() else self.directory / str(step)  # A store that can't rename has only the latter.

    def _failure(self, step: int, error: Exception) -> CheckpointError:
        """Returns the error for a failed save.

        If the writer created its own manager, also closes the manager and removes the files of the failed save.
        """
        if self._policy is not None:
            self._discard_manager(step)
        remedy = " Make sure that the directory is writable and has free space, and save again."
        return CheckpointError(
            f"Saving the checkpoint of step {step} in {self.directory} failed: {type(error).__name__}: {error}"
            f"{'' if isinstance(error, lock.DirectoryLostError) else remedy}",
            self.directory,
            [step],
        )

    def _discard_manager(self, step: int) -> None:
        """Closes the manager after a failed save, and removes the files of this save.

        The files are removed because the disk may be full. The manager can't be used again, because it would treat the
        failed step as saved.
        """
        manager, self._manager = self._manager, None
        if manager is not None:
            with contextlib.suppress(Exception):  # The error of the save is the one to report.
                manager.close()
        with contextlib.suppress(OSError, lock.DirectoryLostError):  # The next manager tries again.
            lock.check(self.directory)  # If another run owns the directory, these files are not ours.
            path = self._unfinished(step)
            # Orbax may have renamed the directory before it failed to write its metadata.
            is_complete = path.name == str(step) and not seal.problems(path)
            if distributed.is_first_process() and not is_complete and path.exists():
                path.rmtree()

    def wait(self) -> None:
        """Waits until the last save is committed.

        Raises:
          CheckpointError: If the last save failed. The error is raised only once.
        """
        if self._manager is None:
            return
        step, _ = self._saving
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._failure(step, error) from error

    def close(self) -> None:
        """Waits for the last save, and then closes the manager if the writer created it.

        Raises:
          CheckpointError: If the last save failed, or if the directory that this process locked was moved or deleted.
            The error is raised only once.
        """
        try:
            self.wait()
            if self._policy is not None and self._manager is not None and distributed.is_first_process():
                lock.check(self.directory)
        except (OSError, lock.DirectoryLostError) as error:
            raise self._failure(self._saving[0], error) from error
        finally:
            if self._policy is not None and self._manager is not None:
                manager, self._manager = self._manager, None
                manager.close()


@final
@dataclasses.dataclass(frozen=True)
class _Policy:
    """The policy that determines which checkpoints to keep. See `CheckpointWriter` for the meaning of the fields."""

    keep: int | None
    best: tuple[str, str] | None

    def options(self, seal_save: Callable[[], None]) -> "ocp.CheckpointManagerOptions":
        """Returns options for a manager that applies this policy and calls `seal_save` before each commit."""
        managers, best = ocp.checkpoint_managers, self.best
        quality = None if best is None else lambda values: read.quality(values, best)
        bests = [managers.BestN(get_metric_fn=quality, n=1, keep_checkpoints_without_metrics=False)] if quality else []
        return ocp.CheckpointManagerOptions(
            preservation_policy=managers.AnyPreservationPolicy([managers.LatestN(self.keep), *bests]),
            best_fn=quality,  # With it, Orbax writes the metrics.
            cleanup_tmp_directories=True,
            async_options=ocp.options.AsyncOptions(post_finalization_callback=seal_save),
        )


def _json_copy(value: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns a copy of a dict, made by converting it to JSON and back. Tuples become lists, and keys become strings.

    Raises:
      TypeError: If the dict contains a value that can't be represented in JSON.
      ValueError: If the JSON is too large to be read back.
    """
    try:
        text = json.dumps(value, default=lambda mapping: {**mapping})
    except TypeError as error:
        raise TypeError(
            f"{name} of a checkpoint must consist of numbers, strings, lists and dicts: {error}. Put arrays into the "
            "state, and convert NumPy scalars with .item()."
        ) from error
    if len(text) > files.MAX_BYTES:
        raise ValueError(f"{name} of a checkpoint must have at most {files.MAX_BYTES:,} bytes, got {len(text):,}.")
    return json.loads(text)
