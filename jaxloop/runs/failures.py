"""The extension that records failed steps, and the function `replay`, which reruns them."""

import collections
import contextlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
from absl import logging
from etils import epath

from jaxloop import checkpoint, metrics, types
from jaxloop.base import checks, encoding, files
from jaxloop.base.text import printable
from jaxloop.outer_loop.extension import Experiment, Extension
from jaxloop.schedules import Elapsed
from jaxloop.step import Step, nonfinite
from jaxloop.train_loop import TrainLoop

FOLDER = "failures"
"""The name of the subdirectory for failure records in a work directory."""

_FILE, _STATE = "failure.json", "state"
_MOST_FAILURES = 5

# The limits on the batches that are kept to record a failure.
_KEPT_BATCHES = 128
_KEPT_BYTES = 64 * 2**20
_MAX_FILE_BYTES = 1 << 32


@final
class Failures(Extension):
    """Records a failed step in `<workdir>/failures/<step>`. A note on the error explains how to replay the step.

    The directory contains the batch of the failed step, the PRNG keys, and the state before the step. If that state no
    longer exists or is already in a checkpoint, the directory doesn't contain it. Instead, the directory contains the
    path of the newest checkpoint before the step and the batches since that checkpoint. If there is no such checkpoint,
    the directory contains the batches since the `OuterLoop` was called. Only the most recent batches are stored: up to
    128 batches and 64 MiB. The five newest records are kept. Errors that occur while recording are logged rather than
    raised. A multi-process job doesn't record anything, because no process has the whole batch. A failure before the
    train loop has completed its first step isn't recorded either.
    """

    name = "failures"

    def __init__(self):
        self._experiment: Experiment | None = None  # None if no failure can be recorded.
        # The newest batches with the numbers of their steps, oldest first.
        self._batches: collections.deque[tuple[int, types.Batch]] = collections.deque()

    def begin(self, experiment: Experiment) -> None:
        self._batches.clear()
        loop = experiment.train_loop
        can_record = (
            isinstance(loop, TrainLoop) and not loop.engine.job.is_shared and experiment.reports_dir is not None
        )
        self._experiment = experiment if can_record else None

    def batch(self, batch: types.Batch, step_num: int) -> None:
        if self._experiment is None:
            return
        if not self._batches:
            size = sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(batch))
            self._batches = collections.deque(maxlen=min(_KEPT_BATCHES, max(1, _KEPT_BYTES // max(size, 1))))
        self._batches.append((step_num, batch))

    def end(self, now: Elapsed, reason: str, error: BaseException | None) -> None:
        experiment, self._experiment = self._experiment, None
        batches, self._batches = self._batches, collections.deque()
        if experiment is None or not isinstance(error, Exception):
            return
        loop, folder = experiment.train_loop, experiment.reports_dir
        assert isinstance(loop, TrainLoop) and folder is not None
        failed = loop.engine.outcome.failure.step_num
        if failed is not None and loop.spent.steps:  # The very first step is easy to repeat.
            folder = folder / FOLDER / str(failed)
            try:
                by_step = {number: batch for number, batch in batches if number <= failed}
                _write(folder, loop, failed, by_step, error, experiment.checkpoint_dirs)
                _remove_old(folder.parent, but=folder)
                error.add_note(
                    f"step {failed} was recorded: jaxloop.replay({str(folder)!r}, step) runs it again, and with "
                    "eagerly=True line by line for a debugger"
                )
            except Exception:
                logging.exception("The failure of step %d could not be recorded in %s.", failed, folder)


def _write(
    folder: epath.Path,
    loop: TrainLoop,
    failed: int,
    batches: Mapping[int, types.Batch],
    error: BaseException,
    checkpoint_dirs: Sequence[epath.Path],
) -> None:
    before = failed - loop.step.updates_per_step
    state = loop.rescued_state if loop.step_num == before else None
    saved = [(each, place) for place in checkpoint_dirs for each in checkpoint.all_steps(place) if each <= before]
    base, directory = max(saved, default=(None, None), key=lambda pair: pair[0])
    new = folder.parent / f"{folder.name}.new"
    shutil.rmtree(new, ignore_errors=True)
    files.make_directory(new.parent)
    new.mkdir()
    if base != before and state is not None:
        base, directory = before, None
        with contextlib.closing(checkpoint.CheckpointWriter(new / _STATE)) as writer:
            writer.save(before, state)
    noted = {
        "step_num": failed,
        "error": f"{type(error).__name__}: {error}",
        "nan_policy": loop.nan_policy,
        "keys": encoding.encode_keys(loop.step.base_prng),
        "state_step": base,
        "checkpoint_dir": None if directory is None else str(directory),
        "batches": {
            number: encoding.encode(batch, "batch")
            for number, batch in batches.items()
            if base is None or number > base
        },
    }
    (new / _FILE).write_text(json.dumps(noted))
    shutil.rmtree(folder, ignore_errors=True)
    new.rename(folder)


def _remove_old(folder: epath.Path, but: epath.Path) -> None:
    others = sorted((path for path in folder.iterdir() if path != but), key=_written_at, reverse=True)
    for path in others[_MOST_FAILURES - 1 :]:
        shutil.rmtree(path, ignore_errors=True)


def _written_at(folder: epath.Path) -> int:
    return os.stat(folder).st_mtime_ns


# Replay ----------------------------------------------------------------------------------------------


def replay(path: epath.PathLike, step: Step, *, state: Any = None, eagerly: bool = False) -> tuple[Any, types.Output]:
    """Reruns a failed step from the record written by an `OuterLoop` that has a `workdir`.

    On the same devices, the results are bit-identical to the original ones. If any results aren't finite, a warning
    lists their names. The step's own actions are not called.

    >>> import tempfile
    >>> import numpy as np
    >>> import jaxloop
    >>> from jaxloop import examples
    >>> step, state, batches = examples.tiny_regression()
    >>> batches[7]["x"][0, 0] = np.nan
    >>> workdir = tempfile.mkdtemp()
    >>> outer_loop = jaxloop.OuterLoop(jaxloop.TrainLoop(step, nan_policy="raise"), workdir=workdir)
    >>> try:
    ...     outer_loop(state, train_dataset=batches, train_total_steps=100)
    ... except FloatingPointError as error:
    ...     print(error.step_num)
    8
    >>> state, outputs = replay(workdir, step)
    >>> int(state.step), float(outputs["loss"])
    (8, nan)

    Args:
      path: The directory `<workdir>/failures/<step>` of a record, or a work directory. In a work directory, the most
        recent record is replayed.
      step: The run's `Step` object, or one created in the same way.
      state: A state with the same structure as the run's state. It is not donated. The replay starts from the given
        state if it is more recent than the recorded state and if the record contains the batch of each step since the
        given state. Otherwise, the given state serves only as a template for restoring the recorded state. If None, a
        newly created state is used, which requires that `step.initialize_model` has been called.
      eagerly: Whether to run the failed step without compiling it, so that a debugger can stop inside it. The results
        may differ in the last bits. If earlier steps must be replayed first, they are compiled; `run` is then
        traced before it is called eagerly.

    Returns:
      A pair `(state, outputs)`, as returned by the failed step. If the step raised an error in the run, the replay
      raises the same error.

    Raises:
      FileNotFoundError: If `path` contains no record, or if the checkpoint to which the record refers doesn't exist.
      ValueError: If the PRNG keys of `step` differ from those of the run, or if the state before the failed step isn't
        available.
    """
    folder = _folder(path)
    noted = files.parse_json(files.read_bytes(folder / _FILE, _MAX_FILE_BYTES))
    if noted["keys"] != encoding.encode_keys(step.base_prng):
        raise ValueError(
            f"{folder} was recorded in a run whose PRNG keys (base_prng) differ from those of {step!r}. Make the step "
            "with the same seed."
        )
    state = step._runner.states.initial() if state is None else state
    batches = {int(number): encoding.decode(batch) for number, batch in noted["batches"].items()}
    state, begins = _state_before(folder, noted, checks.adopt(state), batches, step.updates_per_step)
    policy, failed, outputs = noted["nan_policy"], noted["step_num"], None
    for number in range(begins + step.updates_per_step, failed + 1, step.updates_per_step):
        # This compiles the same program as in the run.
        with step._runner.programs.watched(policy):
            state, outputs = _run_again(step, state, batches[number], eagerly=eagerly and number == failed)
    names = nonfinite.names(state, outputs)
    if names:
        logging.warning("Step %d has NaN or infinity in %s.", failed, ", ".join(map(printable, names)))
    return state, outputs


def _run_again(step: Step, state: Any, batch: types.Batch, *, eagerly: bool) -> tuple[Any, types.Output]:
    """Runs a step with its hooks, but without its actions.

    If `eagerly` is True, `run` is not compiled, and the state is not donated.
    """
    runner = step._runner
    state, batch = runner.before_run(runner.states.prepare(state), batch)
    if eagerly:  # Otherwise, operations between NumPy arrays would run in NumPy instead of JAX.
        batch = jax.tree.map(jnp.asarray, batch)
    with jax.disable_jit(eagerly):
        state, outputs = runner.dispatch(state, batch)
    return checks.check_result(step.end(state, outputs), f"{type(step).__name__}.end")


def _folder(path: epath.PathLike) -> epath.Path:
    path = files.absolute(path)
    places = [path, *(each for each in (path / FOLDER).glob("*") if each.name.isdigit())]
    found = [each for each in places if (each / _FILE).exists()]
    if not found:
        raise FileNotFoundError(
            f"No failure is recorded in {path}. An OuterLoop with a workdir, or with a CheckpointSpec, records one in "
            f"{FOLDER}/<step> there when a step fails."
        )
    return max(found, key=_written_at)


def _state_before(
    folder: epath.Path, noted: Mapping[str, Any], state: Any, batches: Mapping[int, Any], updates: int
) -> Any:
    """Returns the state from which to start the replay, and the step number of that state.

    Returns a copy of `state` if it is more recent than the recorded state and if `batches` contains the batch of each
    step from `state` to the failed step. Otherwise, restores the recorded state, with `state` as the template.

    Raises:
      FileNotFoundError: If the checkpoint to which the record refers doesn't exist.
      ValueError: If the replay can start neither from `state` nor from a recorded state, for example because batches
        are missing.
    """
    failed, base, given = noted["step_num"], noted["state_step"], int(metrics.fetch(getattr(state, "step", 0)))
    leads = lambda step: step < failed and batches.keys() >= {*range(step + updates, failed + 1, updates)}
    if leads(given) and (base is None or given > base):
        return jax.tree.map(jnp.copy, state), given
    if base is not None and leads(base):
        directory = noted["checkpoint_dir"]
        try:
            return checkpoint.restore(folder / _STATE if directory is None else directory, base, state), base
        except FileNotFoundError as error:
            error.add_note("The record refers to this checkpoint. Pass replay(..., state=...), or call rewind.")
            raise
    first = min(batches, default=failed)
    start = "its start" if base is None else f"{noted['checkpoint_dir']}, step {base},"
    raise ValueError(
        f"{folder} has the batches of steps {first} to {failed}, but the state of step {first - updates} is not "
        f"available; the given one is of step {given}. Pass it as replay(..., state=state). A run from {start} with "
        f"train_total_steps={first - updates} reaches that state, bit for bit."
    )
