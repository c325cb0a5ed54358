"""The checkpoints: the one from which the run would resume, and those that it would save."""

import dataclasses
import shutil
from typing import Any

import numpy as np
from etils import epath

from jaxloop import checkpoint, distributed, encoding, fingerprint, lock, whole_run
from jaxloop.actions.checkpoint_action import CheckpointAction
from jaxloop.forecast import Begin, Course
from jaxloop.layout import bytes_of, readable
from jaxloop.position import PositionedIterator
from jaxloop.preflight.experiment import Experiment, State
from jaxloop.preflight.report import Findings
from jaxloop.schedules import Elapsed
from jaxloop.specs import CheckpointSpec
from jaxloop.training import step_num_of

# Resuming ---------------------------------------------------------------------------------------------------


def check_checkpoints(
    experiment: Experiment, state: State, source: PositionedIterator | None, found: Findings
) -> Begin:
    """Checks the directories, and the checkpoint from which the run would resume; returns where it begins."""
    spec, train_loop = experiment.checkpoint_spec, experiment.train_loop
    _check_directories(experiment, found)
    begin = _begin_with(state.values, experiment)
    with found.at("the checkpoint"):
        newest = None if spec is None else _newest_to_resume_from(spec.checkpoint_dir, begin, found)
        if spec is not None and newest is not None:
            opened = checkpoint.Checkpoint.at(spec.checkpoint_dir, newest, checkpoint.METADATA_FILE)
            with opened.understanding():
                begin = _check_checkpoint(opened, spec, experiment, state, source, found)
    if train_loop is not None:
        with found.at("the checkpoints"):
            whole_run.check_no_newer_checkpoints(train_loop, begin.elapsed.steps)
    return begin


def _check_directories(experiment: Experiment, found: Findings) -> None:
    train_loop, workdir = experiment.train_loop, experiment.workdir
    name = lock.TRAINER if train_loop is not None else lock.EVALUATOR
    for directory in whole_run.directories_of(train_loop, experiment.checkpoint_spec, workdir):
        is_workdir = workdir is not None and directory == checkpoint.absolute(workdir)
        with found.at(f"the {'work ' if is_workdir else ''}directory {directory}"):
            checkpoint.prepare_directory(directory)
            if distributed.is_first_process():
                with lock.DirectoryLock(directory, name):
                    pass


def _begin_with(given: Any, experiment: Experiment) -> Begin:
    """Returns where the run begins by its state: where the last call ended, if the state is that of its end."""
    loop = experiment.train_loop
    step = 0 if np.ndim(getattr(given, "step", 0)) else step_num_of(given)  # Else there is an error already.
    if loop is None:
        return Begin(Elapsed(step))
    continues = given is not None and (not hasattr(given, "step") or step == loop.step_num)
    start = dataclasses.replace(loop.elapsed, is_last=False, previous=None) if continues else Elapsed(step)
    if experiment.spec.loop_steps is not None:
        start = dataclasses.replace(start, loops=start.steps // experiment.spec.loop_steps)
    return Begin(start, passes=experiment.passes if continues else 0)


def _newest_to_resume_from(directory: epath.PathLike, begin: Begin, found: Findings) -> int | None:
    """Returns the step of the newest checkpoint; None where the run begins with its state."""
    newest = max(checkpoint.all_steps(directory), default=None)
    if newest is None:
        found.plan["checkpoint"] = f"none yet in {directory}"
    elif newest < begin.elapsed.steps:
        found.plan["checkpoint"] = f"the newest, of step {newest}, is behind the state: going on from the state"
        return None
    else:
        found.plan["checkpoint"] = f"goes on from step {newest:,} in {directory}"
    return newest


def _check_checkpoint(
    opened: checkpoint.Checkpoint,
    spec: CheckpointSpec,
    experiment: Experiment,
    state: State,
    source: PositionedIterator | None,
    found: Findings,
) -> Begin:
    """Checks whether a checkpoint is of this run; returns where it begins with that."""
    directory, step, train_loop = opened.path.parent, opened.step, experiment.train_loop
    if state.shapes is not None and spec.transforms is None:
        with found.at("the checkpoint"):
            checkpoint.check_fits(directory, step, state.shapes)
    begin, run = Begin(opened.elapsed().without_previous()), checkpoint.run(directory, step)
    if not run or train_loop is None:
        return begin
    with found.at("the checkpoint"):
        whole_run.check_keys(run, encoding.encode_keys(train_loop.step.base_prng), directory)
    position = run["positions"][0]["data"] if spec.restore_data else None
    if position and source is not None:
        with found.at("the train data"):
            before = position["fingerprint"]
            fingerprint.check_same(before.get("source"), source.fingerprint)
            fingerprint.check_same(before.get("batch"), fingerprint.describe_batch(source.peek()), sizes=False)
    return dataclasses.replace(
        begin,
        passes=run["passes"],
        batches=position["count"] if position else 0,
        evaluations={name: part["loop_count"] for name, part in run["parts"].items()},
        has_stopped=run["parts"]["train"]["has_stopped"],
    )


# Saving -----------------------------------------------------------------------------------------------------


def check_saving(
    experiment: Experiment, course: Course, state: Any, source: PositionedIterator | None, found: Findings
) -> None:
    """Checks what is saved when, and whether a run that is killed could resume exactly."""
    spec, loop = experiment.checkpoint_spec, experiment.train_loop
    savers = [] if loop is None else whole_run.checkpoint_actions(loop)
    directories = [action.directory for action in savers]
    if spec is not None and checkpoint.absolute(spec.checkpoint_dir) not in directories:
        got = f"saves to {', '.join(map(str, directories))}" if directories else "has no CheckpointAction"
        found.at("the checkpoints").warn(
            f"The run would go on from checkpoints in {spec.checkpoint_dir}, and the train loop {got}: a run that is "
            "killed would begin anew. Give CheckpointAction and CheckpointSpec the same directory.",
        )
    for directory in {each for each in directories if directories.count(each) > 1}:
        text = f"Two CheckpointActions save to {directory}: a step can be saved once. Join their schedules with |."
        found.at("the checkpoints").warn(text)
    if savers and spec is not None and spec.restore_data and source is not None:
        several_passes = (experiment.spec.epochs or 1) > 1
        if warning := source.resume_warning(several_passes=several_passes):
            found.at("the train data").warn(warning)
    for number, action in enumerate(savers, start=1):
        _check_saver("saves" if number == 1 else f"saves {number}", action, course, bytes_of(state), found)


def _check_saver(name: str, action: CheckpointAction, course: Course, size: int, found: Findings) -> None:
    """Checks when an action saves, and whether there is room for what it keeps."""
    calls, has_best = course.calls(action.interval), bool(action.monitors)
    kept = len(calls.steps) if action.keep is None else action.keep
    keeps = "all" if action.keep is None else f"the newest {action.keep}{' and the best' if has_best else ''}"
    found.plan[name] = f"{calls}; {readable(size)} each, {keeps} kept in {action.directory}"
    try:
        free = shutil.disk_usage(action.directory).free
    except (OSError, ValueError):  # Such as of a bucket.
        return
    needed = size * (max(kept + has_best, 1) + 1)
    if free < needed:
        found.at("the checkpoints").warn(
            f"{kept} checkpoints of {readable(size)} and one in the making take {readable(needed)}, and "
            f"{action.directory} has {readable(free)} free. Keep fewer, or give another directory.",
        )
