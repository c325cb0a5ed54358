"""The function `check`, which reports a run's plan and problems without running any steps.

`check` uses the following modules, each of which checks one part of the run:

- `step`: the state, the hooks (called with a batch), `run` (traced), and the memory use of the compiled train step.
- `data`: the first batch of each dataset, the number of batches, and the length of the run.
- `checkpoints`: the checkpoint that the run would resume from, and the checkpoints that it would save.
- `actions`: when actions are called, and which values they save, monitor and write.

These modules collect problems in `report.Findings`, which `check` returns as a `Report`. The class `Course` in
`jaxloop.engine.rehearse` predicts when actions and evaluations are due. Every run calls `check` when it starts, with
`Checked.is_starting` set to True. In that case, `check` omits everything that takes more than a few milliseconds.
"""

import time
from collections.abc import Iterable, Mapping
from typing import Any

from jaxloop.action_loop import ActionLoop
from jaxloop.actions.action import Action
from jaxloop.check.actions import check_actions
from jaxloop.check.checkpoints import check_checkpoints, check_saving
from jaxloop.check.data import TrainData, check_length, course_of, first_eval_batch, open_train_data
from jaxloop.check.experiment import Checked, Part, State
from jaxloop.check.report import CheckError, Findings, Problem, Report
from jaxloop.check.step import check_memory, check_model, check_state, check_step
from jaxloop.engine.rehearse import Calls, Course
from jaxloop.outer_loop.specs import EvalSpec
from jaxloop.partition.layout import bytes_of
from jaxloop.schedules import Schedule, is_never

# In a run of this many batches or fewer, such as a first try, history rows are not important.
_LONG_LOOP = 100

__all__ = ["CheckError", "Checked", "Problem", "Report", "check"]


def check(checked: Checked, state: Any, errors: Iterable[Exception] = (), num_batches: int | None = None) -> Report:
    """Checks an experiment and returns a report.

    If the run is about to start, the check covers the whole run from step 0, so that the report doesn't depend on the
    step at which the run resumes.

    Args:
      checked: The experiment, with the options of the check.
      state: The state that the run would start from.
      errors: Errors that were already found in the arguments. If there are any, nothing else is checked.
      num_batches: The number of batches in an epoch, or None if it is unknown. Used only if the run is about to start.
    """
    experiment = checked.experiment
    began, found, calls = time.perf_counter(), Findings(), {}
    for error in errors:
        found.at("the arguments").error(str(error))
    if not found.problems:
        with found.at("the run"):
            if checked.is_starting:
                state, data = State(state), TrainData(num_batches=num_batches)
                course = course_of(checked, data)
            else:
                state, data = check_state(state, found.at("the state")), open_train_data(checked, found)
                course = check_checkpoints(checked, course_of(checked, data), state, data, found)
            calls = _check_course(checked, course, state, data, found)
            if data.source is not None and not experiment.spec.has_iterator:  # The run will read on from an iterator.
                data.source.close()
    return Report(found.in_order(), found.plan, time.perf_counter() - began, calls)


def _check_course(
    checked: Checked, course: Course, state: State, data: TrainData, found: Findings
) -> Mapping[Action | str, Calls]:
    experiment = checked.experiment
    train_loop, parts = experiment.train_loop, []
    if train_loop is not None:
        train = Part(found.at("the train loop"), "train", train_loop, course.loops)
        check_length(train.here, checked, course, data, state.shapes)
        parts.append(check_step(train, state, data.first, longest_loop=course.batches_of_longest_loop))
    for name, loop, spec in checked.evaluations:
        parts.append(_check_evaluation(name, loop, spec, checked, course, state, found))
    if train_loop is not None:
        check_memory(parts[0], state, data.first, checked.topology)
    calls = check_actions(parts, course, state.shapes, found)
    if train_loop is not None:
        evaluates_once = all(len(part.calls.moments) <= 1 for part in parts[1:])  # Evaluations add rows, too.
        _check_log_interval(checked.log_interval, course, evaluates_once, found.at("OuterLoop"))
        check_saving(checked, course, bytes_of(state.shapes), data, found.at("the checkpoints"))
    return calls | {part.name: part.calls for part in parts if not part.trains}


def _check_evaluation(
    name: str, loop: ActionLoop, spec: EvalSpec, checked: Checked, course: Course, state: State, found: Findings
) -> Part:
    experiment = checked.experiment
    train_loop = experiment.train_loop
    calls = Calls([course.start]) if experiment.checkpoint_spec is None else Calls(rest="at each checkpoint")
    calls = calls if train_loop is None else course.calls(spec.when_due)
    part = Part(found.at(f"eval {name!r}"), name, loop, calls)
    if train_loop is not None:
        check_model(part, train_loop.step)
    if part.calls.is_never and not course.is_over:
        part.here.warn(f"It would never run: {spec.when}, and {course}.")
    first, count = (), "?"
    with part.here:
        first, count = first_eval_batch(part, spec, checked)
    may_skip = spec.should_eval_fn is not None and part.calls.moments
    found.plan[part.here.where] = f"{'at most ' if may_skip else ''}{part.calls}; {count}"
    return check_step(part, state, first)


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
