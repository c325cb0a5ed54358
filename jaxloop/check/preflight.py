"""Checks a run before it starts, and reports its plan and problems. Doesn't run any steps or change any state.

`check` uses these modules, each of which checks one part of the run:

- `step`: the state, the hooks (called with a batch), a trace of `run`, and the memory use of the compiled train step.
- `data`: the first batch of each dataset, the number of batches, and the length of the run.
- `checkpoints`: the checkpoint from which the run would resume, and those that it would save.
- `actions`: the calls to actions, and the values that actions save, monitor, and write.

The modules check an `Experiment` and collect problems in `report.Findings`. `check` returns them as a `Report`. The
class `Course` in `jaxloop.check.forecast` predicts when actions and evaluations are due. `check_start` is the part of
the check that takes only milliseconds, with which every run starts.
"""

import dataclasses
import time
from collections.abc import Iterable, Mapping
from typing import Any

from jaxloop import checkpoint
from jaxloop.action_loop import ActionLoop
from jaxloop.actions.action import Action
from jaxloop.check.actions import check_actions
from jaxloop.check.checkpoints import check_checkpoints, check_saving
from jaxloop.check.data import TrainData, check_length, course_of, first_eval_batch, open_train_data
from jaxloop.check.experiment import Experiment, Part, State
from jaxloop.check.forecast import Begin, Calls, Course
from jaxloop.check.report import CheckError, Findings, Problem, Report
from jaxloop.check.step import check_memory, check_model, check_optimizer, check_state, check_step
from jaxloop.eval_loop import EvalLoop
from jaxloop.experiment.specs import EvalSpec
from jaxloop.partition.layout import bytes_of
from jaxloop.schedules import Elapsed, Schedule, is_never, skipped_step

# In a run of this many batches or fewer, such as a first try, nobody misses the rows of a history.
_LONG_LOOP = 100

__all__ = ["CheckError", "Experiment", "Problem", "Report", "check", "check_start"]


def check(experiment: Experiment, state: Any, errors: Iterable[Exception]) -> Report:
    """Checks an experiment that starts from a state. `errors` contains the errors already found in its arguments."""
    began, found = time.perf_counter(), Findings()
    for error in errors:
        found.at("the arguments").error(str(error))
    experiment = _without_invalid_counts(experiment)
    _check_schedules(experiment, found.at("the schedules"))
    # Nothing can be predicted from a schedule that contradicts itself.
    calls = {} if found.at("the schedules").has_errors else _check(experiment, state, found)
    return Report(found.in_order(), found.plan, time.perf_counter() - began, calls)


def _check_schedules(experiment: Experiment, here: Findings) -> None:
    loops = [] if experiment.train_loop is None else [experiment.train_loop]
    actions = [action for loop in [*loops, *experiment.eval_loops] for action in loop.actions]
    evaluations = [spec.when_due for _, _, spec in experiment.evaluations]
    intervals = [*(action.interval for action in actions), *evaluations, experiment.log_interval, experiment.spec.stop]
    for schedule in dict.fromkeys(each for each in intervals if isinstance(each, Schedule)):
        with here:
            if step := skipped_step(schedule):
                here.error(
                    f"{schedule!r} fires at step {step}, but its next_step skips that step, so a run would lose the "
                    "firing. Leave next_step out, or let it return the first step at which fires returns True."
                )


def check_start(experiment: Experiment, state: Any, num_batches: int | None) -> Report:
    """Checks the schedules and the actions of a run that is about to start.

    The report covers the whole run from step 0, so it doesn't depend on the step at which the run resumes.

    Args:
      experiment: The experiment.
      state: The state from which the run starts.
      num_batches: The number of batches in an epoch; None if unknown.
    """
    experiment, reports = dataclasses.replace(experiment, is_starting=True), []
    for rows in (1, 2**30):  # The batch size is unknown. Problems that depend on it are left out.
        if reports and reports[0].ok:
            break
        found, data, calls = Findings(), TrainData(num_batches=num_batches), {}
        _check_schedules(experiment, found.at("the schedules"))
        with found.at("the run"):
            if not found.at("the schedules").has_errors:
                course = course_of(experiment, Begin(), data, rows=rows, most_moments=100)
                calls = _check_course(experiment, course, State(state), data, found)
        reports.append(Report(found.in_order(), found.plan, calls=calls))
    one, other = reports[0], reports[-1]
    problems = [each for each in one.problems if each in other.problems]
    plan = {name: text for name, text in one.plan.items() if other.plan.get(name) == text}
    calls = {action: each for action, each in one.calls.items() if action in other.calls}
    calls = {action: each for action, each in calls.items() if each.is_never == other.calls[action].is_never}
    return dataclasses.replace(one, problems=problems, plan=plan, calls=calls)


def _without_invalid_counts(experiment: Experiment) -> Experiment:
    """Returns the experiment without invalid counts and stop schedules, so that the rest can be checked."""
    given = experiment.spec
    counts = {name: getattr(given, name) for name in ("total_steps", "loop_steps", "epochs")}
    valid = {name: count if isinstance(count, int) and count > 0 else None for name, count in counts.items()}
    spec = dataclasses.replace(given, stop=given.stop if isinstance(given.stop, Schedule) else None, **valid)
    return dataclasses.replace(experiment, spec=spec)


def _check(experiment: Experiment, given: Any, found: Findings) -> Mapping[Action, Calls]:
    state = check_state(given, found.at("the state"))
    data = open_train_data(experiment, found)
    begin = check_checkpoints(experiment, state, data, found)
    calls = _check_course(experiment, course_of(experiment, begin, data), state, data, found)
    if data.source is not None and not experiment.spec.has_iterator:  # The run will keep reading from an iterator.
        data.source.close()
    return calls


def _check_course(
    experiment: Experiment, course: Course, state: State, data: TrainData, found: Findings
) -> Mapping[Action, Calls]:
    train_loop, parts = experiment.train_loop, []
    if train_loop is not None:
        train = Part(found.at("the train loop"), "train", train_loop, course.loops)
        check_length(train.here, experiment, course, data, state.shapes)
        if not experiment.is_starting:  # The step has warned of it.
            check_optimizer(train, state.shapes)
        parts.append(check_step(train, state, data.first, longest_loop=course.batches_of_longest_loop))
    for name, loop, spec in experiment.evaluations:
        parts.append(_check_evaluation(name, loop, spec, experiment, course, state, found))
    if train_loop is not None:
        check_memory(parts[0], state, data.to_compile, experiment.topology)
    calls = check_actions(parts, course, state.shapes, found)
    if train_loop is not None:
        evaluates_once = all(part.calls.number <= 1 for part in parts[1:])  # Evaluations add rows, too.
        _check_log_interval(experiment.log_interval, course, evaluates_once, found.at("OuterLoop"))
        check_saving(experiment, course, bytes_of(state.shapes), data, found.at("the checkpoints"))
    return calls


def _check_evaluation(
    name: str, loop: ActionLoop, spec: EvalSpec, experiment: Experiment, course: Course, state: State, found: Findings
) -> Part:
    part = Part(found.at(f"eval {name!r}"), name, loop, _calls_of_evaluation(spec, experiment, course))
    if isinstance(loop, EvalLoop) and loop.step.train and not experiment.is_starting:  # The loop has warned of it.
        part.here.warn(f"It evaluates by {loop.training_warning}")
    if experiment.train_loop is not None:
        check_model(part, experiment.train_loop.step)
    if part.calls.is_never and not course.is_over:
        part.here.warn(f"It would never run: {spec.when}, and {course}.")
    first, count = (), "?"
    with part.here:
        first, count = first_eval_batch(part, spec, experiment)
    found.plan[part.here.where] = f"{part.calls}; {count}"
    return check_step(part, state, first)


def _calls_of_evaluation(spec: EvalSpec, experiment: Experiment, course: Course) -> Calls:
    """Predicts when an evaluation runs."""
    if experiment.train_loop is not None:
        return dataclasses.replace(course.calls(spec.when_due), at_most=spec.should_eval_fn is not None)
    if experiment.checkpoint_spec is None:
        return Calls([course.start])
    saved = checkpoint.all_steps(experiment.checkpoint_spec.checkpoint_dir)
    return Calls([Elapsed(step) for step in saved], is_all=False)


def _check_log_interval(interval: int | Schedule, course: Course, evaluates_once: bool, here: Findings) -> None:
    if course.calls(interval).is_never and not course.is_over and not is_never(interval):
        text = f"log_interval={interval!r} is never due, so the history would have no row of the training"
        here.warn(f"{text}: {course}.")
    elif (
        not isinstance(interval, Schedule)
        and course.is_one_loop
        and evaluates_once
        and (course.batches_of_longest_loop or 0) > _LONG_LOOP
    ):
        here.warn(
            f"log_interval={interval!r} counts loops, and the run is a single loop, so the history gets one row of "
            "the training, at the end. Give train_loop_steps=..., or log_interval=every(steps=...)."
        )
