"""The checkpoints: the one that the run would go on from, and those that it would save."""

import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from jaxloop import checkpoint, distributed, encoding, fingerprint, lock, whole_run
from jaxloop.action_loop import ActionLoop
from jaxloop.actions.checkpoint_action import CheckpointAction
from jaxloop.forecast import Course
from jaxloop.layout import bytes_of, readable
from jaxloop.position import PositionedIterator
from jaxloop.preflight.experiment import Begin, Experiment
from jaxloop.preflight.findings import Findings
from jaxloop.preflight.state import State
from jaxloop.preflight.timetable import calls_in_training
from jaxloop.schedules import Elapsed
from jaxloop.specs import CheckpointSpec
from jaxloop.training import step_num_of

# Going on -----------------------------------------------------------------------------------------------


def look_at_checkpoints(
    experiment: Experiment, state: State, source: PositionedIterator | None, found: Findings
) -> Begin:
    """Looks at the directories, and at the checkpoint that the run would go on from; says where it begins."""
    spec, train_loop = experiment.checkpoint_spec, experiment.train_loop
    _look_at_directories(experiment, found)
    begin = _begin_with(state.values, experiment)
    if spec is not None:
        with found.finding("the checkpoint"):
            newest = _newest_to_go_on_from(spec.checkpoint_dir, begin, found)
            if newest is not None:
                opened = checkpoint.Checkpoint.at(spec.checkpoint_dir, newest, checkpoint.METADATA_FILE)
                with opened.understanding():
                    begin = _look_at_checkpoint(spec, newest, experiment, state, source, found)
    if train_loop is not None:
        with found.finding("the checkpoints"):
            whole_run.check_no_newer_checkpoints(train_loop, begin.elapsed.steps)
    return begin


def _look_at_directories(experiment: Experiment, found: Findings) -> None:
    spec, train_loop, workdir = experiment.checkpoint_spec, experiment.train_loop, experiment.workdir
    name = lock.TRAINER if train_loop is not None else lock.EVALUATOR
    for directory in whole_run.directories_of(train_loop, spec, workdir):
        is_workdir = workdir is not None and directory == checkpoint.absolute(workdir)
        with found.finding(f"the {'work ' if is_workdir else ''}directory {directory}"):
            checkpoint.prepare_directory(directory)
            if distributed.is_first_process():
                with lock.DirectoryLock(directory, name):
                    pass


def _savers(train_loop: ActionLoop | None) -> list[CheckpointAction]:
    return [] if train_loop is None else whole_run.checkpoint_actions(train_loop)


def _begin_with(given: Any, experiment: Experiment) -> Begin:
    """Where the run begins by its state: where the last call ended, if it goes on from there."""
    loop = experiment.train_loop
    step = 0 if np.ndim(getattr(given, "step", 0)) else step_num_of(given)  # Else there is an error already.
    if loop is None:
        return Begin(Elapsed(step))
    goes_on = given is not None and (not hasattr(given, "step") or step == loop.step_num)
    start = dataclasses.replace(loop.elapsed, is_last=False, previous=None) if goes_on else Elapsed(step)
    if experiment.loop_steps is not None:
        start = dataclasses.replace(start, loops=start.steps // experiment.loop_steps)
    return Begin(start, passes=experiment.passes if goes_on else 0)


def _newest_to_go_on_from(directory: epath.PathLike, begin: Begin, found: Findings) -> int | None:
    """The step of the newest checkpoint; None where the run goes on from its state."""
    saved = checkpoint.all_steps(directory)
    if not saved:
        found.plan["checkpoint"] = f"none yet in {directory}"
        return None
    if saved[-1] < begin.elapsed.steps:
        found.plan["checkpoint"] = f"the newest, of step {saved[-1]}, is behind the state: going on from the state"
        return None
    found.plan["checkpoint"] = f"goes on from step {saved[-1]:,} in {directory}"
    return saved[-1]


def _look_at_checkpoint(
    spec: CheckpointSpec,
    step_num: int,
    experiment: Experiment,
    state: State,
    source: PositionedIterator | None,
    found: Findings,
) -> Begin:
    """Looks whether a checkpoint is of this run; says where it begins with that."""
    directory, train_loop = spec.checkpoint_dir, experiment.train_loop
    if state.shapes is not None and spec.transforms is None:
        with found.finding("the checkpoint"):
            checkpoint.check_fits(directory, step_num, state.shapes)
    elapsed = whole_run.elapsed_at(directory, step_num).without_previous()
    run = checkpoint.run(directory, step_num)
    if not run or train_loop is None:
        return Begin(elapsed)
    with found.finding("the checkpoint"):
        whole_run.check_keys(run, encoding.encode_keys(train_loop.step.base_prng), directory)
    position = run["positions"][0]["data"] if spec.restore_data else None
    if position and source is not None:
        _look_at_same_data(position["fingerprint"], source, found)
    return _begin_of(run, elapsed, position)


def _look_at_same_data(before: Mapping[str, Any], source: PositionedIterator, found: Findings) -> None:
    with found.finding("the train data"):
        fingerprint.check_same(before.get("source"), source.fingerprint)
        fingerprint.check_same(before.get("batch"), fingerprint.describe_batch(source.peek()), sizes=False)


def _begin_of(run: Mapping[str, Any], elapsed: Elapsed, position: Mapping[str, Any] | None) -> Begin:
    """Where a run begins that goes on from a checkpoint, at a position in its data."""
    return Begin(
        elapsed,
        run["passes"],
        position["count"] if position else 0,
        {name: part["loop_count"] for name, part in run["parts"].items()},
        run["parts"]["train"]["has_stopped"],
    )


# Saving -------------------------------------------------------------------------------------------------


def look_at_saving(
    experiment: Experiment, course: Course, state: Any, source: PositionedIterator | None, found: Findings
) -> None:
    """Says what is saved when, and where a run that is killed would not go on as it was."""
    savers, spec = _savers(experiment.train_loop), experiment.checkpoint_spec
    _look_at_where_it_saves([action.directory for action in savers], spec, found)
    if savers and spec is not None and spec.restore_data and source is not None:
        warning = source.resume_warning(several_passes=(experiment.epochs or 1) > 1)
        if warning:
            found.warn("the train data", warning)
    for number, action in enumerate(savers, start=1):
        _look_at_saver("saves" if number == 1 else f"saves {number}", action, course, bytes_of(state), found)


def _look_at_where_it_saves(directories: Sequence[epath.Path], spec: CheckpointSpec | None, found: Findings) -> None:
    if spec is not None and checkpoint.absolute(spec.checkpoint_dir) not in directories:
        got = f"saves to {', '.join(map(str, directories))}" if directories else "has no CheckpointAction"
        found.warn(
            "the checkpoints",
            f"The run would go on from checkpoints in {spec.checkpoint_dir}, and the train loop {got}: a run that is "
            "killed would begin anew. Give CheckpointAction and CheckpointSpec the same directory.",
        )
    for directory in {each for each in directories if directories.count(each) > 1}:
        text = f"Two CheckpointActions save to {directory}: a step can be saved once. Join their schedules with |."
        found.warn("the checkpoints", text)


def _look_at_saver(name: str, action: CheckpointAction, course: Course, size: int, found: Findings) -> None:
    """Says when an action saves, and whether there is room for what it keeps."""
    calls = calls_in_training(action, course, at="end")
    kept = len(calls.steps) if action.keep is None else action.keep
    keeps = "all" if action.keep is None else f"the newest {action.keep}"
    keeps += " and the best" if action.monitors and action.keep is not None else ""
    found.plan[name] = f"{calls}; {readable(size)} each, {keeps} kept in {action.directory}"
    needed, free = size * (max(kept + bool(action.monitors), 1) + 1), _free_bytes(action.directory)
    if free is not None and free < needed:
        found.warn(
            "the checkpoints",
            f"{kept} checkpoints of {readable(size)} and one in the making take {readable(needed)}, and "
            f"{action.directory} has {readable(free)} free. Keep fewer, or give another directory.",
        )


def _free_bytes(directory: Any) -> int | None:
    try:
        return shutil.disk_usage(directory).free
    except (OSError, ValueError):  # Such as of a bucket.
        return None
