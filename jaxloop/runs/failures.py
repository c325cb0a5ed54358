"""The flight recorder, which records a failed step so that it can be rerun."""

import collections
import itertools
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from etils import epath

from jaxloop import checkpoint, metrics, types
from jaxloop.base import checks, encoding, files
from jaxloop.base.text import printable
from jaxloop.engine.agenda import Item
from jaxloop.experiment.extension import Experiment, Extension
from jaxloop.schedules import Elapsed
from jaxloop.step import Step, nonfinite
from jaxloop.train_loop import TrainLoop

FOLDER = "failures"
"""The folder in a work directory that contains one subfolder per failed step."""

_FILE, _ARRAYS, _STATE = "failure.json", "batches.npz", "state"
_MOST_FAILURES = 5
_VERSION = 1


# The limits on the batches that are kept to record a failure.
_KEPT_BATCHES = 64
_KEPT_BYTES = 256 * 2**20


@final
class Failures(Extension):
    """Records a failed step in `<workdir>/failures/<step>`, and adds a note on how to replay it to the error.

    The folder contains the batch of the failed step, the PRNG keys, and the state before the step if it still exists.
    If it doesn't, the latest earlier checkpoint and the batches since then are stored instead, provided that they are
    from the last 64 steps and fit in 256 MiB. The checkpoint's files are hard-linked, so they survive when `keep`
    deletes the checkpoint. The five newest records are kept. Errors that occur while recording are logged, not raised.
    """

    name = "failures"

    def __init__(self):
        self._experiment: Experiment | None = None  # None if no failure can be recorded.
        self._is_shared = False
        self._batches: collections.deque[types.Batch] = collections.deque()  # The newest batches, oldest first.

    def begin(self, experiment: Experiment) -> Sequence[Item]:
        self._batches.clear()
        can_record = isinstance(experiment.train_loop, TrainLoop) and experiment.reports_dir is not None
        self._experiment = experiment if can_record else None
        self._is_shared = experiment.loops[0].engine.job.is_shared
        return ()

    def batch(self, batch: types.Batch) -> None:
        if self._experiment is None or self._is_shared:
            return
        if not self._batches:
            size = sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(batch))
            self._batches = collections.deque(maxlen=min(_KEPT_BATCHES, max(1, _KEPT_BYTES // max(size, 1))))
        self._batches.append(batch)

    def end(self, now: Elapsed, reason: str, error: BaseException | None) -> None:
        experiment, self._experiment = self._experiment, None
        batches, self._batches = self._batches, collections.deque()
        if experiment is None or not isinstance(error, Exception):
            return
        loop, folder = experiment.train_loop, experiment.reports_dir
        assert isinstance(loop, TrainLoop) and folder is not None
        failed = loop.engine.outcome.failure.step_num
        if failed is None:
            return
        if self._is_shared:
            logging.info("The failure is not recorded in %s: that would need the batches of all processes.", folder)
        elif loop.spent.steps:  # The very first step is easy to repeat.
            folder = folder / FOLDER / str(failed)
            try:
                by_step = _by_step(batches, failed, now.steps, loop.step.updates_per_step)
                _write(folder, loop, failed, by_step, error, experiment.checkpoint_dirs)
                _remove_old(folder.parent, but=folder)
                error.add_note(
                    f"step {failed} was recorded: jaxloop.replay({str(folder)!r}, step) runs it again, and with "
                    "eagerly=True line by line for a debugger"
                )
            except Exception:
                logging.exception("The failure of step %d could not be recorded in %s.", failed, folder)


def _by_step(batches: Sequence[types.Batch], failed: int, step_num: int, updates: int) -> dict[int, types.Batch]:
    """Returns the batches up to the failed one by the number of the step that they belong to."""
    newest = max(step_num, failed if failed == step_num + updates else 0)
    first = newest - (len(batches) - 1) * updates
    numbered = zip(range(first, newest + 1, updates), batches, strict=True)
    return {number: batch for number, batch in numbered if number <= failed}


def _write(
    folder: epath.Path,
    loop: TrainLoop,
    failed: int,
    batches: Mapping[int, types.Batch],
    error: BaseException,
    checkpoint_dirs: Sequence[epath.Path],
) -> None:
    step, updates = loop.step, loop.step.updates_per_step
    before = failed - updates
    state = loop.rescued_state if loop.step_num == before else None
    saved = [(each, place) for place in checkpoint_dirs for each in checkpoint.all_steps(place)]
    earlier = [pair for pair in saved if pair[0] <= before]
    base, directory = max(earlier, default=(None, None), key=lambda pair: pair[0])
    new = folder.parent / f"{folder.name}.new"
    shutil.rmtree(new, ignore_errors=True)
    files.make_directory(new.parent)
    new.mkdir()
    if base != before and state is not None:
        _save_state(new / _STATE, before, state)
        base, directory = before, None
    wanted = [number for number in batches if base is None or number > base]
    has_state = directory is None and base is not None
    if base is not None and base + updates not in wanted:
        wanted = wanted[-1:]
    elif directory is not None:
        has_state = _keep_checkpoint(directory / str(base), new / _STATE / str(base))
    arrays: dict[str, np.ndarray] = {}
    encoded = {str(number): _encode_batch(batches[number], arrays) for number in wanted}
    with (new / _ARRAYS).open("wb") as file:
        np.savez(file, allow_pickle=False, **{name: _as_bytes(array) for name, array in arrays.items()})
    noted = {
        "version": _VERSION,
        "step_num": failed,
        "error": f"{type(error).__name__}: {error}",
        "nan_policy": loop.nan_policy,
        "keys": encoding.encode_keys(step.base_prng),
        "state_step": base,
        "has_state": has_state,
        "checkpoint_dir": None if directory is None else str(directory),
        "batches": encoded,
        "arrays": {name: [_dtype_name(array.dtype), list(array.shape)] for name, array in arrays.items()},
    }
    (new / _FILE).write_text(json.dumps(noted, indent=1))
    shutil.rmtree(folder, ignore_errors=True)
    new.rename(folder)


def _save_state(directory: epath.Path, step_num: int, state: Any) -> None:
    writer = checkpoint.CheckpointWriter(directory)
    writer.save(step_num, state)
    writer.close()


def _keep_checkpoint(checkpoint_dir: epath.Path, folder: epath.Path) -> bool:
    """Hard-links or copies a checkpoint's files, which never change. Returns True if this succeeded."""

    def link(source: str, target: str) -> None:
        try:
            os.link(source, target)
        except OSError:  # For example, between two file systems.
            shutil.copy2(source, target)

    try:
        shutil.copytree(checkpoint_dir, folder, copy_function=link)
    except (OSError, shutil.Error) as error:  # For example, object storage.
        logging.info("The checkpoint %s is not kept with the record of the failure: %s", checkpoint_dir, error)
        shutil.rmtree(folder.parent, ignore_errors=True)
        return False
    return True


def _remove_old(folder: epath.Path, but: epath.Path) -> None:
    others = [path for path in folder.iterdir() if path != but]
    others.sort(key=_written_at)
    for path in others[: max(0, len(others) + 1 - _MOST_FAILURES)]:
        shutil.rmtree(path, ignore_errors=True)


def _written_at(folder: epath.Path) -> int:
    return os.stat(folder).st_mtime_ns


# Batches: the structure and Python numbers as JSON, the arrays in a separate file --------------------------


def _encode_batch(batch: types.Batch, arrays: dict[str, np.ndarray]) -> Any:
    numbers, plain = itertools.count(len(arrays)), {}

    def put(leaf: Any) -> str:
        name = f"leaf_{next(numbers)}"
        if isinstance(leaf, bool | int | float | str | bytes):
            plain[name] = leaf
        else:
            arrays[name] = np.asarray(metrics.fetch(leaf))
        return name

    return {"tree": encoding.encode(jax.tree.map(put, batch)), "plain": encoding.encode(plain)}


def _decode_batch(encoded: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> types.Batch:
    leaves = {**arrays, **encoding.decode(encoded["plain"])}
    return jax.tree.map(lambda name: leaves[name], encoding.decode(encoded["tree"]))


def _as_bytes(array: np.ndarray) -> np.ndarray:
    """Returns an array's bytes as uint8, because NumPy's file format doesn't support bfloat16."""
    if array.dtype.hasobject or array.dtype.names is not None:
        raise TypeError(f"A batch with an array of {array.dtype} can't be recorded; numbers and strings can.")
    return np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)


def _dtype_name(dtype: np.dtype) -> str:
    return dtype.str if dtype.kind in "SUMm" else dtype.name


# Replay ----------------------------------------------------------------------------------------------


def replay(
    path: epath.PathLike, step: Step, step_num: int | None = None, *, state: Any = None, eagerly: bool = False
) -> tuple[Any, types.Output]:
    """Reruns a failed step from the record written by an `OuterLoop` that has a `workdir`.

    On the same devices, the results are bit-identical to the original ones. If any of them aren't finite, a warning
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
      path: The folder `<workdir>/failures/<step>`, or the work directory.
      step: The run's step object, or one created in the same way.
      step_num: The number of the failed step. Pass it only if `path` is a work directory. If None, the most recent
        record is replayed.
      state: A state with the same structure as the run's state. If it is more recent than the recorded state, and all
        batches after it were recorded, the replay starts from it. Otherwise, it only serves as a template for restoring
        the recorded state. It is not donated. If None, a new state is used. This requires that `step.initialize_model`
        has been called.
      eagerly: Whether to run the failed step without compiling it, so that a debugger can stop inside it. The results
        may differ in the last bits. Any earlier steps are still compiled, so `run` is traced for them before it is
        called eagerly.

    Returns:
      `(state, outputs)` of the failed step. If the step raised an error in the run, the replay raises the same error.

    Raises:
      FileNotFoundError: If there is no such record.
      ValueError: If the PRNG keys of `step` differ from those of the run, or if the state before the failed step is not
        available.
    """
    folder = _folder(path, step_num)
    noted = files.parse_json(files.read_bytes(folder / _FILE))
    if noted["keys"] != encoding.encode_keys(step.base_prng):
        raise ValueError(
            f"{folder} was recorded in a run whose PRNG keys (base_prng) differ from those of {step!r}. Make the step "
            "with the same seed."
        )
    state = step._runner.states.initial() if state is None else state
    with np.load(folder / _ARRAYS, allow_pickle=False) as file:
        dtypes = {name: (jnp.dtype(dtype), shape) for name, (dtype, shape) in noted["arrays"].items()}
        arrays = {name: np.frombuffer(file[name].tobytes(), d).reshape(s) for name, (d, s) in dtypes.items()}
    batches = {int(number): _decode_batch(each, arrays) for number, each in noted["batches"].items()}
    state, begins = _state_before(folder, noted, checks.adopt(state), batches, step.updates_per_step)
    policy, failed, outputs = noted["nan_policy"], noted["step_num"], None
    for number in range(begins + step.updates_per_step, failed + 1, step.updates_per_step):
        # This compiles the same program as in the run.
        with step._runner.programs.watched(policy):
            state, outputs = _run_again(step, state, batches[number], eagerly=eagerly and number == failed)
    names = nonfinite.names(state, outputs)
    if names:
        logging.warning(
            "Step %d has NaN or infinity, first in %s: %s.",
            failed,
            printable(names[0]),
            ", ".join(map(printable, names)),
        )
    return state, outputs


def _run_again(step: Step, state: Any, batch: types.Batch, *, eagerly: bool) -> tuple[Any, types.Output]:
    """Runs a step with its hooks, but without its actions. If it runs eagerly, it doesn't donate the state."""
    runner = step._runner
    state, batch = runner.before_run(runner.states.prepare(state), batch)
    if eagerly:  # Otherwise, operations between NumPy arrays would run in NumPy instead of JAX.
        batch = jax.tree.map(jnp.asarray, batch)
    with jax.disable_jit(eagerly):
        state, outputs = runner.dispatch(state, batch)
    return checks.check_result(step.end(state, outputs), f"{type(step).__name__}.end")


def _folder(path: epath.PathLike, step_num: int | None) -> epath.Path:
    path = files.absolute(path)
    if (path / _FILE).exists() and step_num is None:
        return path
    found = [each for each in (path / FOLDER).glob("*") if (each / _FILE).exists() and each.name.isdigit()]
    if step_num is not None:
        found = [each for each in found if each.name == str(step_num)]
    if not found:
        what = "failure" if step_num is None else f"failure of step {step_num}"
        raise FileNotFoundError(
            f"No {what} is recorded in {path}. An OuterLoop with a workdir, or with a CheckpointSpec, records one in "
            f"{FOLDER}/<step> there when a step fails."
        )
    return max(found, key=_written_at)


def _state_before(
    folder: epath.Path, noted: Mapping[str, Any], state: Any, batches: Mapping[int, Any], updates: int
) -> Any:
    """Returns a state from which the recorded batches can be replayed up to the failed step, and its step number."""
    failed, base, given = noted["step_num"], noted["state_step"], int(metrics.fetch(getattr(state, "step", 0)))
    numbers = lambda step: range(step + updates, failed + 1, updates)
    leads = lambda step: failed in numbers(step) and all(number in batches for number in numbers(step))
    if leads(given) and (base is None or given > base):
        return jax.tree.map(jnp.copy, state), given
    if base is not None and leads(base):
        directory = folder / _STATE if noted["has_state"] else epath.Path(noted["checkpoint_dir"])
        return checkpoint.restore(directory, base, state), base
    if failed not in batches:
        raise ValueError(
            f"{folder} has no batch of step {failed}, because the batches are too large to keep enough of them. "
            + _reproduction_hint(noted, failed - updates)
        )
    raise ValueError(
        f"{folder} has the batches of steps {min(batches)} to {failed}, but the state of step "
        f"{min(batches) - updates} is not available; the given one is of step {given}. Pass it as "
        "replay(..., state=state). " + _reproduction_hint(noted, failed - updates)
    )


def _reproduction_hint(noted: Mapping[str, Any], before: int) -> str:
    start = "its start" if noted["state_step"] is None else f"{noted['checkpoint_dir']}, step {noted['state_step']},"
    return f"A run from {start} with train_total_steps={before} reaches that state, bit for bit."
