"""What would go wrong in a run, found before it, all at once. No step is run, and nothing is made of the state.

`look` goes through the rooms in this order:

- `state`: the one that is given, and the one that a step makes of it.
- `data`: the first batch of each dataset, and how many there are.
- `checkpoints`: the one that the run would go on from, and those that it would save.
- `course`: how far the run goes.
- `step`: a batch's way through the hooks, and a trace of `run`.
- `memory`: what the compiled train step takes of a device.
- `timetable`: when each evaluation and each action comes, and which never does.
- `actions`: how they are called, what they remember, monitor and write.

What they look at is in `experiment`. What they find goes into the `Findings` of `findings`, and comes out as the
`Report` of `report`.
"""

import time
from collections.abc import Mapping, Sequence

from jaxloop.action_loop import ActionLoop
from jaxloop.actions.action import Action
from jaxloop.eval_loop import EvalLoop
from jaxloop.forecast import Calls, Course
from jaxloop.preflight.actions import look_at_actions
from jaxloop.preflight.checkpoints import look_at_checkpoints, look_at_saving
from jaxloop.preflight.course import course_of, look_at_length
from jaxloop.preflight.data import TrainData, close_train_data, first_eval_batch, open_train_data
from jaxloop.preflight.experiment import TRAIN, Experiment, Part
from jaxloop.preflight.findings import Findings
from jaxloop.preflight.memory import look_at_compiled, look_at_layout
from jaxloop.preflight.report import CheckError, Problem, Report
from jaxloop.preflight.state import State, look_at_state
from jaxloop.preflight.step import Foreseen, look_at_model, look_at_optimizer, look_at_step
from jaxloop.preflight.timetable import look_at_log_interval, say_if_never_evaluated, when_evaluated
from jaxloop.specs import EvalSpec

__all__ = ["CheckError", "Experiment", "Problem", "Report", "look"]


def look(experiment: Experiment, errors: Sequence[Exception]) -> Report:
    """Looks at all of an experiment; `errors` are those that its arguments have already."""
    began, found = time.perf_counter(), Findings()
    for error in errors:
        found.add("the arguments", str(error))
    calls = _look(experiment, found)
    return Report(found.in_order(), found.plan, time.perf_counter() - began, calls)


def _look(experiment: Experiment, found: Findings) -> Mapping[Action, Calls]:
    train_loop, state = experiment.train_loop, look_at_state(experiment.state, found)
    data = open_train_data(experiment, found) if train_loop is not None else TrainData()
    begin = look_at_checkpoints(experiment, state, data.source, found)
    course = course_of(experiment, begin, data)
    parts, trained = [], None
    if train_loop is not None:
        look_at_length(experiment, course, begin, data, state.shapes, found)
        trained = _look_at_training(train_loop, state, data, course, found)
        parts.append(Part(TRAIN, "train", train_loop, course.loops(), trained and trained.outputs))
    for name, loop, spec in experiment.evaluations:
        parts.append(_look_at_evaluation(name, loop, spec, experiment, course, state, found))
    if train_loop is not None and trained is not None:
        _look_at_memory(train_loop, state, data, trained, found)
    calls = look_at_actions(parts, begin, course, state.shapes, found)
    if train_loop is not None:
        look_at_log_interval(experiment.log_interval, course, found)
        look_at_saving(experiment, course, state.shapes, data.source, found)
        close_train_data(experiment, data)
    return calls


def _look_at_training(
    loop: ActionLoop, state: State, data: TrainData, course: Course, found: Findings
) -> Foreseen | None:
    """What is known of the train steps; None where there is no state or no batch for them."""
    look_at_optimizer(TRAIN, loop.step, state.shapes, found)
    if state.shapes is None or not data.has_batch:
        return None
    longest = course.steps_of_longest_loop
    longest_loop = longest and longest // course.updates_per_step
    return look_at_step(TRAIN, loop, state, data.batch, found, longest_loop=longest_loop)


def _look_at_evaluation(
    name: str,
    loop: ActionLoop,
    spec: EvalSpec,
    experiment: Experiment,
    course: Course,
    state: State,
    found: Findings,
) -> Part:
    where, calls = f"eval {name!r}", when_evaluated(spec, experiment, course)
    if isinstance(loop, EvalLoop) and loop.step.train:
        found.warn(where, f"It evaluates by {loop.said_of_training}")
    if experiment.train_loop is not None:
        look_at_model(where, loop.step, experiment.train_loop.step, found)
    say_if_never_evaluated(where, spec, calls, course, found)
    batch, count, outputs = None, "?", None
    with found.finding(where):
        batch, count = first_eval_batch(where, spec, calls, experiment, found)
    found.plan[where] = f"{calls}; {count}"
    if batch is not None and state.shapes is not None:
        outputs = look_at_step(where, loop, state, batch, found, evaluates=True).outputs
    return Part(where, name, loop, calls, outputs)


def _look_at_memory(loop: ActionLoop, state: State, data: TrainData, trained: Foreseen, found: Findings) -> None:
    look_at_layout(loop.step, state.shapes, found)
    # Else it could not be compiled, or for something else than comes.
    if not trained.is_open and not found.has_errors(TRAIN):
        look_at_compiled(loop, state, data.batch, found)
