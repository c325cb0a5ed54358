"""Checks of a run's actions: when they are called, and which values they save, monitor and write."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, final

from jaxloop import metrics
from jaxloop.actions.action import Action
from jaxloop.actions.early_stopping_action import EarlyStoppingAction
from jaxloop.actions.monitor import Monitor
from jaxloop.actions.spike_guard import SpikeGuard
from jaxloop.actions.summary_action import SummaryAction
from jaxloop.base import checks, encoding
from jaxloop.check.experiment import Part
from jaxloop.check.report import Findings
from jaxloop.engine.rehearse import Calls, Course
from jaxloop.history import History
from jaxloop.schedules import Elapsed, Schedule, is_never

At = Literal["begin", "end", "step"]


@final
class CalledAction(NamedTuple):
    """An action of a loop or a step, with the predicted calls to the action.

    Attributes:
      action: The action.
      part: The loop that calls the action or runs the action's step.
      at: "begin" or "end" if the action is in the loop's `begin_actions` or `end_actions`, or "step" if it belongs to
        the loop's step.
      calls: The predicted calls to the action.
      here: The findings about the action.
    """

    action: Action
    part: Part
    at: At
    calls: Calls
    here: Findings


def check_actions(parts: Sequence[Part], course: Course, state: Any, found: Findings) -> dict[Action | str, Calls]:
    """Checks the actions of all loops and steps, and returns the predicted calls to each action."""
    all_called = list(_called_actions(parts, course, found))
    for called in all_called:
        action, here = called.action, called.here
        if not type(action).__module__.startswith("jaxloop.") or isinstance(action, EarlyStoppingAction):
            monitors = f"; monitors {action.monitor}" if isinstance(action, EarlyStoppingAction) else ""
            found.plan[type(action).__name__] = f"{called.calls}{monitors}"
        _check_interval(called, course)
        _check_patience(called, course)
        with here:
            _run_check(called, state)
        with here:
            _check_contract(action, here)
        for name in action.monitors if called.at == "end" else ():
            with here:
                _check_metric(Monitor(name, "min"), called, parts)  # Only the name matters, not the mode.
    _check_curves(all_called)
    return {called.action: called.calls for called in all_called}


def _called_actions(parts: Sequence[Part], course: Course, found: Findings) -> Iterator[CalledAction]:
    """Yields the actions of all loops and steps. If several loops share a step, its actions are yielded only once."""
    told = []
    for part in parts:
        loop, step = part.loop, part.loop.step
        of_step = [] if step in told else [*step.begin_actions, *step.end_actions]
        told.append(step)
        places: dict[At, Sequence[Action]] = {"begin": loop.begin_actions, "end": loop.end_actions, "step": of_step}
        for at, actions in places.items():
            for action in actions:
                calls, here = _calls_of(action, part, at, course), found.at(f"{action!r} of {part.here.where}")
                yield CalledAction(action, part, at, calls, here)


def _calls_of(action: Action, part: Part, at: At, course: Course) -> Calls:
    interval = action.interval
    if at == "begin" or (at == "step" and not part.trains):
        return Calls(rest="at unknown steps")
    if not part.trains:
        return course.calls_in_evaluation(interval, part.calls)
    return course.calls(interval, in_step=at == "step")


def _check_interval(called: CalledAction, course: Course) -> None:
    """Warns if an action would never be called although its loop runs."""
    interval, part = called.action.interval, called.part
    if called.calls.is_never and not course.is_over and not is_never(interval):
        unit = "steps within the loop" if called.at == "step" else "loops"
        counts = "" if isinstance(interval, Schedule) else f" counts {unit}"
        hint = f" Did you mean every(steps={interval})?" if counts and interval != 1 else ""
        if part.trains or not part.calls.is_never:
            called.here.warn(f"It would never be called: interval={interval!r}{counts}, and {course}.{hint}")


def _check_patience(called: CalledAction, course: Course) -> None:
    """Warns if an `EarlyStoppingAction` would be called too rarely to end the run."""
    action, calls = called.action, called.calls
    patience = action.patience if isinstance(action, EarlyStoppingAction) else None
    if patience and not calls.rest and 0 < len(calls.moments) <= patience and not course.start.steps:
        called.here.warn(
            f"It can't end the run: it is called {calls}, and patience={patience} needs at least {patience + 1} "
            "measurements. Lower patience, or call it more often: add it to the end_actions of the eval loop, or pass "
            "the interval of the evaluation."
        )


def _run_check(called: CalledAction, state: Any) -> None:
    """Calls the action's `check` method and adds the reported problems to the findings."""
    if called.at != "begin" and called.part.outputs is None and checks.is_user_defined(called.action, "check"):
        return  # The outputs are unknown, and the user's method may need them.
    if called.at == "begin" and isinstance(called.action, EarlyStoppingAction | SpikeGuard | SummaryAction):
        called.here.error("It is one of the begin_actions, which receive no outputs. Add it to the end_actions.")
    outputs = None if called.at == "begin" else called.part.outputs or {}
    texts: Any = called.action.check(state, outputs)
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        kind = type(called.action).__name__
        raise TypeError(f"{kind}.check must yield sentences, or return a list, got {texts!r}.")
    for text in texts:
        called.here.error(text)


def _check_contract(action: Action, here: Findings) -> None:
    """Checks that an action's state can be saved in a checkpoint and restored from it."""
    name = type(action).__name__
    remembered = action.state_dict()
    encoding.encode(remembered)
    if remembered and type(action).load_state_dict is Action.load_state_dict:
        here.error(
            f"{name}.state_dict returns {sorted(remembered)}, but {name} has no load_state_dict, so no run could "
            "resume from a checkpoint. Write load_state_dict(self, state_dict), which restores it."
        )


# Monitored metrics ------------------------------------------------------------------------------------------


def _check_metric(monitor: Monitor, called: CalledAction, parts: Sequence[Part]) -> None:
    """Checks that a monitored metric is measured before the action that monitors it is called."""
    known = {part.name: part.outputs and metrics.summarize(part.outputs) for part in parts}
    if monitor.name.startswith("jaxloop/") or _may_be_missing(monitor, known):
        return  # The metric is a statistic, or may exist.
    own, here = metrics.summarize(called.part.outputs), called.here
    if monitor.is_measured(own, None):
        return
    history = _history_of(known)
    if not monitor.is_measured((), history):
        here.error(f"{monitor.missing_message(own, history)} Give the name of one of them.")
    elif called.part.trains and not called.action.runs_last:
        here.warn(
            f"It monitors {monitor.name!r}, but is called before the evaluations of the same step. Set runs_last = "
            "True in its class, or add it to the end_actions of the eval loop."
        )
    else:
        there = [name for name in known if monitor.is_measured((), _history_of({name: known[name]}))]
        comes = [part.calls for part in parts if part.name in there and not part.trains and not part.calls.is_never]
        if comes and not called.calls.is_never and not any(map(called.calls.may_coincide, comes)):
            here.warn(
                f"It is called {called.calls}, but {monitor.name!r} is not measured at any of these steps. Make its "
                "interval coincide with the evaluations, or add it to the end_actions of the eval loop."
            )


def _may_be_missing(monitor: Monitor, known: Mapping[str, Mapping[str, float] | None]) -> bool:
    """Returns True if a metric may come from a loop whose metrics are unknown (None in `known`)."""
    group, _, rest = monitor.name.replace(".", "/").partition("/")
    if group in known:
        return bool(rest) and known[group] is None
    return None in known.values()


def _history_of(known: Mapping[str, Mapping[str, float] | None]) -> History:
    """Returns a history with a single row that contains all known metrics."""
    history = History()
    history.commit(Elapsed(1), {name: dict(scalars) for name, scalars in known.items() if scalars})
    return history


# Written summaries ------------------------------------------------------------------------------------------


def _check_curves(all_called: Sequence[CalledAction]) -> None:
    """Warns if the `SummaryAction`s of two loops would write values with the same name to the same writer."""
    written: dict[tuple[int, str, str], str] = {}  # Where each curve is first written, by writer, prefix, and name.
    for called in all_called:
        action, where, outputs = called.action, called.part.here.where, called.part.outputs
        if called.at == "end" and isinstance(action, SummaryAction):
            curves = (id(action.summary_writer), action.prefix)
            known = None if outputs is None else sorted(set().union(*metrics.scalars_and_media(outputs)))
            names = ["any output of the same name"] if known is None else known
            first = {name: written.setdefault((*curves, name), where) for name in names}
            if others := {name: other for name, other in first.items() if other != where}:
                called.here.warn(
                    f"It writes {', '.join(others)} to the same writer as that of {next(iter(others.values()))}: one "
                    "curve would mix both. Give the eval loop a separate one: SummaryAction(writer, prefix='eval/')."
                )
