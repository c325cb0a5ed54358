"""A test helper that checks whether a run with your step, dataset and actions can be killed and resumed.

`import jaxloop` doesn't import this module. Use `from jaxloop import testing`.
"""

import contextlib
import itertools
import json
import multiprocessing
import os
import pathlib
import signal
import tempfile
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.context import SpawnProcess
from typing import Any

import numpy as np

from jaxloop import metrics
from jaxloop.base import checks
from jaxloop.checkpoint import CheckpointWriter, stored
from jaxloop.data import fingerprint
from jaxloop.engine.run import Steps
from jaxloop.history import History


def assert_resumable(make_run: Callable[[str], Any], at_steps: Iterable[int], *, timeout: float = 600) -> None:
    """Kills runs at the given steps, resumes them, and checks that the results match those of an uninterrupted run.

    Everything runs in separate processes, each of which starts up and compiles just like your program. One process runs
    the experiment without interruption. For each of the given steps, a second process is killed with SIGKILL once that
    step has been dispatched and pending saves have been completed. A third process then resumes the killed run. All
    rows of the history (except for times) and all leaves of the final state must be bit-identical to those of the
    uninterrupted run. For example::

        def make_run(workdir):
            ...  # Builds everything from scratch, as a restarted program does.
            return outer_loop(state, dataset, train_total_steps=20)[0], outer_loop.history

        def test_my_experiment_can_be_resumed():
            testing.assert_resumable(make_run, at_steps=[7, 12])

    Args:
      make_run: A function that runs or resumes the experiment in a work directory and returns the final state, or
        `(state, history)`. It must be defined at the top level of a module or a script, so that the processes can
        import it. A script must call `assert_resumable` under `if __name__ == "__main__":`.
      at_steps: The steps at which to kill a run. Each must be later than the first checkpoint.
      timeout: The time limit for each process, in seconds.

    Raises:
      AssertionError: If a resumed run differs from the uninterrupted one (the message describes how), or if a run
        started from scratch instead of resuming, in which case nothing was tested.
      RuntimeError: If a process failed, exceeded `timeout`, or ended before it could be killed.
    """
    steps = sorted({int(step) for step in at_steps})
    if not steps or steps[0] < 1:
        raise ValueError(f"at_steps takes the steps at which to kill, each at least 1, got {list(at_steps)!r}.")
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as processes:
        root = pathlib.Path(directory)

        def start(name: str, kill_at: int = 0) -> SpawnProcess:
            (root / name).mkdir(exist_ok=True)
            process = multiprocessing.get_context("spawn").Process(target=_run, args=(make_run, root / name, kill_at))
            process.start()
            processes.callback(process.join)
            processes.callback(process.kill)  # In case another one fails.
            return process

        whole, killed = start("whole"), {step: start(str(step), step) for step in steps}
        expected = _finish(whole, root / "whole", timeout)
        for step, process in killed.items():
            _finish(process, root / str(step), timeout, killed_at=step)
        resumed = {step: start(str(step)) for step in steps}
        for step, process in resumed.items():
            differences = compare(expected, _finish(process, root / str(step), timeout))
            if differences:
                raise AssertionError(
                    f"Killed at step {step}, the run did not end like the uninterrupted one.\n{differences}"
                )


def compare(whole: Mapping[str, Any], resumed: Mapping[str, Any]) -> str:
    """Describes how a resumed run differs from an uninterrupted one. Returns "" if it doesn't differ.

    The description says that the resumed run started over, shows the first row of the history that differs, or lists
    the leaves of the final state that differ.

    Both arguments are records written by the processes of `assert_resumable`. A record has three entries: `begin` is
    the step at which training began, `state` contains digests of the final state, and `history` contains the rows
    of the history.
    """
    if resumed["begin"] == whole["begin"]:
        return (
            "It started over, because there was no checkpoint to resume from, so nothing was tested. Kill it after the "
            "first save, and make sure that make_run saves in the given work directory."
        )
    for index, (expected, got) in enumerate(itertools.zip_longest(whole["history"], resumed["history"])):
        if expected != got:
            return f"Row {index} of the history differs:\n  {expected}\n  {got}\n{_REASONS}"
    paths = {*whole["state"], *resumed["state"]}
    leaves = [path for path in sorted(paths) if whole["state"].get(path) != resumed["state"].get(path)]
    return f"The final state differs in {', '.join(leaves)}. {_REASONS}" if leaves else ""


_REASONS = (
    "Are the data at the right position (jaxloop.from_index, Grain, tf.data, lists)? Does the step derive its keys "
    "from self.prng_key(state.step), and keep what it remembers in the state? Do actions and metrics with a memory "
    "have state_dict and load_state_dict?"
)


# Processes -------------------------------------------------------------------------------------------


def _finish(process: SpawnProcess, directory: pathlib.Path, timeout: float, killed_at: int = 0) -> Any:
    """Waits for a process to end and returns the record that it wrote, or None if it was supposed to be killed."""
    process.join(timeout)
    if process.exitcode is None:
        raise RuntimeError(f"A run has not ended after {timeout} seconds.")
    if process.exitcode != (-signal.SIGKILL if killed_at else 0):
        what = f"ended before it could be killed at step {killed_at}" if killed_at else "failed"
        raise RuntimeError(f"A run {what}, with code {process.exitcode}. Its output is above.")
    return None if killed_at else json.loads((directory / "record.json").read_text())


def _run(make_run: Callable[[str], Any], directory: pathlib.Path, kill_at: int) -> None:
    """Runs or resumes the experiment in this process, and writes a record of the run to `directory`; see `compare`.

    If `kill_at` isn't 0, the process is killed at step `kill_at`, and no record is written.
    """
    begin = _observe(kill_at)
    result = make_run(str(directory / "run"))
    state, *others = result if type(result) is tuple else (result,)
    history = next((other for other in others if isinstance(other, History)), None)
    rows = [] if history is None else [[{**row.elapsed.to_dict(), "time": 0}, row.logs] for row in history]
    record = {"begin": begin, "state": _digest(state), "history": rows}
    (directory / "record.json").write_text(json.dumps(record, default=repr))


def _digest(tree: Any) -> dict[str, str]:
    """Returns a dict that maps each leaf's path to a description of the leaf: its dtype, shape and checksum."""
    leaves = checks.leaves_by_path(stored.storable(tree))
    return {path: fingerprint.describe(np.asarray(metrics.fetch(leaf))) for path, leaf in leaves.items()}


def _observe(kill_at: int) -> list[int]:
    """Makes jaxloop kill this process once step `kill_at` has been dispatched, unless `kill_at` is 0.

    Returns a list that will contain the step at which training begins. The list is empty until then.
    """
    begin: list[int] = []
    run_stretch, save = Steps._run_stretch, CheckpointWriter.save
    writers: set[CheckpointWriter] = set()

    def observed_run(self: Steps, room: int, goal: Any) -> int:
        run, updates = self._run, self._call.updates
        if not updates:
            return run_stretch(self, room, goal)
        if not begin:
            begin.append(run.now.steps)
        if kill_at > run.now.steps:
            room = min(room, -(-(kill_at - run.now.steps) // updates))
        number = run_stretch(self, room, goal)
        if 0 < kill_at <= run.now.steps:
            for writer in writers:  # Otherwise, a short run might never save.
                writer.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    def saved(self: CheckpointWriter, *args: Any, **kwargs: Any) -> bool:
        writers.add(self)
        return save(self, *args, **kwargs)

    Steps._run_stretch, CheckpointWriter.save = observed_run, saved
    return begin
