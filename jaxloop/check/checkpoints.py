"""Checks of a run's checkpoints: the one that the run would resume from, and those that it would save."""

import dataclasses
import shutil
from typing import Any

import numpy as np
from etils import epath

from jaxloop import checkpoint, distributed
from jaxloop.actions.checkpoint_action import CheckpointAction
from jaxloop.base import encoding, files
from jaxloop.check.data import TrainData
from jaxloop.check.experiment import Checked, State
from jaxloop.check.report import Findings
from jaxloop.data.position import check_kind, prove
from jaxloop.distributed import lock
from jaxloop.engine.rehearse import Course
from jaxloop.outer_loop import whole_run
from jaxloop.outer_loop.specs import CheckpointSpec
from jaxloop.partition.layout import readable
from jaxloop.schedules import Elapsed, Schedule

# Resuming ---------------------------------------------------------------------------------------------------


def check_checkpoints(checked: Checked, course: Course, state: State, data: TrainData, found: Findings) -> Course:
    """Checks the checkpoint directories and the checkpoint to resume from.

    Returns the predicted course of the run, from the step at which the run would start or resume.
    """
    experiment = checked.experiment
    spec, train_loop, here = experiment.checkpoint_spec, experiment.train_loop, found.at("the checkpoint")
    _check_directories(checked, found)
    course = _course_from(state.values, course, checked)
    with here:
        directories = [] if spec is None else [spec.checkpoint_dir, *experiment.checkpoint_dirs]
        saved = checkpoint.all_paths(dict.fromkeys(directories))
        if spec is not None and not saved:
            found.plan["checkpoint"] = f"none yet in {spec.checkpoint_dir}"
        elif spec is not None and int(saved[-1].name) < course.start.steps:
            where = f"the newest, of step {saved[-1].name}, is behind the state"
            found.plan["checkpoint"] = f"{where}, so the run continues from the state"
        elif spec is not None:
            step, directory = int(saved[-1].name), saved[-1].parent
            found.plan["checkpoint"] = f"resumes from step {step:,} in {directory}"
            course = _check_checkpoint(spec, directory, step, checked, course, state, data, here)
    if train_loop is not None:
        with found.at("the checkpoints"):
            whole_run.check_no_newer_checkpoints(experiment.savers, course.start.steps)
    return course


def _check_directories(checked: Checked, found: Findings) -> None:
    experiment = checked.experiment
    name = lock.TRAINER if experiment.train_loop is not None else lock.EVALUATOR
    for directory in experiment.directories:
        with found.at(f"the {'work ' if directory == experiment.workdir else ''}directory {directory}"):
            files.prepare_directory(directory)
            if distributed.is_first_process():
                with lock.locked(directory, name):
                    pass


def _course_from(given: Any, course: Course, checked: Checked) -> Course:
    """Returns the predicted course of a run that starts from a given state rather than from a checkpoint.

    The run continues the train loop's last run if the last run ended at the step of the given state, or if the given
    state has no `step`. Otherwise, it is a new run that starts at the state's step, or at step 0 if the given state is
    None.
    """
    experiment = checked.experiment
    loop, loop_steps = experiment.train_loop, experiment.spec.loop_steps
    # If the count isn't a scalar, an error was already found.
    step = 0 if np.ndim(getattr(given, "step", 0)) else whole_run.step_num_of(given)
    continues = given is not None and loop is not None and (not hasattr(given, "step") or step == loop.step_num)
    start = dataclasses.replace(loop.elapsed, is_last=False, previous=None) if loop and continues else Elapsed(step)
    if loop_steps is not None:
        start = dataclasses.replace(start, loops=start.steps // loop_steps)
    return dataclasses.replace(course, start=start, passes=checked.sources.passes if continues else 0)


def _check_checkpoint(
    spec: CheckpointSpec,
    directory: epath.Path,
    step: int,
    checked: Checked,
    course: Course,
    state: State,
    data: TrainData,
    here: Findings,
) -> Course:
    """Checks that a checkpoint belongs to this run. Returns the predicted course of the run after resuming from it."""
    experiment = checked.experiment
    loop, opened = experiment.train_loop, checkpoint.Checkpoint.at(directory, step, checkpoint.METADATA_FILE)
    with opened.understanding():
        if state.shapes is not None:
            with here:
                opened.check_fits(state.shapes, spec.transforms)
        elapsed, run = opened.elapsed().without_previous(), checkpoint.Checkpoint.at(directory, step, "run").run()
        if not run or loop is None:
            return dataclasses.replace(course, start=elapsed)
        with here:
            whole_run.check_keys(run, encoding.encode_keys(loop.step.base_prng), directory)
        position = run["parts"]["data"]["positions"][0]["data"] if spec.restore_data else None
        if position and data.source is not None:
            with here.at("the train data"):
                check_kind(position["kind"], data.source)
        train, batches = run["parts"]["train"], position["count"] if position else 0
        passes, has_stopped = run["parts"]["data"]["passes"], train["has_stopped"]
        return dataclasses.replace(course, start=elapsed, passes=passes, batches=batches, has_stopped=has_stopped)


# Saving -----------------------------------------------------------------------------------------------------


def check_saving(checked: Checked, course: Course, size: int, data: TrainData, here: Findings) -> None:
    """Checks the checkpoints that a run would save. Warns if the run couldn't resume exactly after being killed."""
    experiment = checked.experiment
    spec, savers = experiment.checkpoint_spec, experiment.savers
    directories = [action.directory for action in savers]
    if spec is not None and not directories:
        here.warn(
            f"The run would resume from checkpoints in {spec.checkpoint_dir}, but the train loop has no "
            "CheckpointAction, so a killed run would start over. Add CheckpointAction(directory, interval), or give "
            "workdir=... instead of checkpoint_spec, with which the run saves on its own."
        )
    evaluated = [
        (name, action) for name, loop, _ in checked.evaluations for action in whole_run.checkpoint_actions(loop)
    ]
    for name, action in evaluated if not savers else ():
        here.at(f"eval {name!r}").warn(
            f"{action!r} saves states in evaluations only, from which no run can resume. Add it to the end_actions of "
            "the train loop."
        )
    for directory in {each for each in directories if directories.count(each) > 1}:
        here.warn(f"Two CheckpointActions save to {directory}, but a step is saved once. Join their schedules with |.")
    if savers and spec is not None and spec.restore_data and data.source is not None:
        with here.at("the train data"):
            if warning := data.source.resume_warning() or prove(experiment.spec.data):
                here.at("the train data").warn(warning)
    for number, action in enumerate(savers, start=1):
        _check_saver("saves" if number == 1 else f"saves {number}", action, course, size, here)


def _check_saver(name: str, action: CheckpointAction, course: Course, size: int, here: Findings) -> None:
    """Checks the checkpoints that an action would save, and warns if they would not fit on the disk."""
    calls, has_best = course.calls(action.interval), bool(action.monitors)
    kept = len(calls.moments) if action.keep is None else action.keep
    keeps = "all" if action.keep is None else f"the newest {action.keep}{' and the best' if has_best else ''}"
    best = f"; the best by {action.monitor}" if has_best else ""
    here.plan[name] = f"{calls}; {readable(size)} each, {keeps} kept in {action.directory}{best}"
    if course.is_one_loop and not isinstance(action.interval, Schedule) and len(calls.moments) == 1:
        here.warn(
            f"{action!r} counts loops, and the run is a single loop, so it saves once, at the end, and a killed run "
            "would start over. Write interval=every(time=600) | last(), or give train_loop_steps=...."
        )
    try:
        free = shutil.disk_usage(action.directory).free
    except (OSError, ValueError):  # For example, the directory is in a bucket.
        return
    needed = size * (max(kept + has_best, 1) + 1)
    if free < needed:
        here.warn(
            f"{kept} checkpoints of {readable(size)} and one that is being written need {readable(needed)}, but "
            f"{action.directory} has {readable(free)} free. Keep fewer, or use another directory."
        )
