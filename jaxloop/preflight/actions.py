"""The actions: how they are called, what they remember, monitor and write."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxloop import encoding, metrics
from jaxloop.actions.action import Action
from jaxloop.actions.monitor import Monitor
from jaxloop.actions.summary_action import SummaryAction
from jaxloop.forecast import Calls, Course
from jaxloop.history import History
from jaxloop.preflight.experiment import Begin, Part
from jaxloop.preflight.findings import Findings
from jaxloop.preflight.timetable import CalledAction, called_actions, say_if_never_called
from jaxloop.schedules import Elapsed

# What a loop calls its actions with, by name.
_CONTEXT = ("step_num", "elapsed", "history", "total_steps", "spent", "snapshot")


def look_at_actions(
    parts: Sequence[Part], begin: Begin, course: Course, state: Any, found: Findings
) -> dict[Action, Calls]:
    """Looks at the actions of all loops; says when each is called."""
    calls, curves = {}, _Curves(found)
    for called in called_actions(parts, begin, course):
        action, where = called.action, called.where
        calls[action] = called.calls
        if not type(action).__module__.startswith("jaxloop."):
            found.plan[type(action).__name__] = str(called.calls)
        say_if_never_called(called, course, found)
        with found.finding(where):
            _have_it_check(called, state, found)
        with found.finding(where):
            _look_at_contract(where, action, found)
        if called.at == "end":
            for monitored in action.monitors:
                with found.finding(where):
                    _look_for_metric(Monitor(monitored), called, parts, found)
            curves.look_at(called)
    return calls


def _have_it_check(called: CalledAction, state: Any, found: Findings) -> None:
    """Takes down what an action says itself."""
    kind, outputs = type(called.action).__name__, called.outputs
    texts: Any = called.action.check(state, outputs if outputs is not None or called.at == "begin" else {})
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        raise TypeError(f"{kind}.check must yield sentences, or return a list, got {texts!r}.")
    for text in texts:
        found.add(called.where, text)


def _look_at_contract(where: str, action: Action, found: Findings) -> None:
    """Says where an action can't be called as loops do, or can't go on from a checkpoint."""
    name = type(action).__name__
    try:
        inspect.signature(action).bind(None, None, **dict.fromkeys(_CONTEXT))
    except TypeError as error:
        found.add(
            where,
            f"{name}.__call__ can't be called with (state, outputs, {', '.join(f'{each}=' for each in _CONTEXT)}): "
            f"{error}. Write __call__(self, state, outputs, *, step_num, **kwargs).",
        )
    remembered = action.state_dict()
    encoding.encode(remembered)
    if remembered and type(action).load_state_dict is Action.load_state_dict:
        found.add(
            where,
            f"{name}.state_dict returns {sorted(remembered)}, and {name} has no load_state_dict, so that no run could "
            "go on from a checkpoint. Write load_state_dict(self, state_dict), which takes it over.",
        )


# What it monitors ---------------------------------------------------------------------------------------


def _look_for_metric(monitor: Monitor, called: CalledAction, parts: Sequence[Part], found: Findings) -> None:
    """Says where what an action monitors is measured nowhere, or never when it is called."""
    if monitor.name.startswith("jaxloop/"):
        return  # A statistic.
    known = {part.name: part.outputs and metrics.summarize(part.outputs) for part in parts}
    if _may_be_unknown(monitor, known):
        return
    own, measured = metrics.summarize(called.part.outputs), {name: each for name, each in known.items() if each}
    history = _history_of(measured)
    if monitor.is_measured(own, None):
        return
    if not monitor.is_measured((), history):
        found.add(called.where, f"{monitor.said_of_none(own, history)} Give the name of one of them.")
        return
    if called.part.trains and not called.action.comes_last:
        found.warn(
            called.where,
            f"It monitors {monitor.name!r}, and is called before the evaluations of the same step. Set comes_last = "
            "True in its class, or give it to the end_actions of the eval loop.",
        )
        return
    there = [name for name, each in measured.items() if monitor.is_measured((), _history_of({name: each}))]
    comes = [part.calls for part in parts if part.name in there and not part.trains and not part.calls.is_never]
    if comes and not called.calls.is_never and not any(map(called.calls.may_meet, comes)):
        found.warn(
            called.where,
            f"It is called {called.calls}, and at none of these steps is {monitor.name!r} measured. Let its interval "
            "coincide with the evaluations, or give it to the end_actions of the eval loop.",
        )


def _may_be_unknown(monitor: Monitor, known: Mapping[str, Mapping[str, float] | None]) -> bool:
    """Whether a metric may be among those of a loop of which nobody knows what it measures."""
    group, _, rest = monitor.name.replace(".", "/").partition("/")
    if group in known:
        return bool(rest) and known[group] is None
    return None in known.values()


def _history_of(measured: Mapping[str, Mapping[str, float]]) -> History:
    """A history in which a step has measured all of this."""
    history = History()
    history.commit(Elapsed(1), {name: dict(scalars) for name, scalars in measured.items()})
    return history


# What it writes -----------------------------------------------------------------------------------------


class _Curves:
    """The names under which `SummaryAction`s write, for each writer."""

    def __init__(self, found: Findings):
        self._found = found
        self._written: dict[tuple[int, str], tuple[str, set[str]]] = {}  # Where first, and what.

    def look_at(self, called: CalledAction) -> None:
        """Says where two loops would write one curve."""
        action, where = called.action, called.part.where
        if not isinstance(action, SummaryAction) or called.outputs is None:
            return
        scalars, media = metrics.scalars_and_media(called.outputs)
        names = {*scalars, *media}
        key = (id(action.summary_writer), action.prefix)
        other, before = self._written.setdefault(key, (where, set()))
        if names & before and other != where:
            self._found.warn(
                called.where,
                f"It writes {', '.join(sorted(names & before))} to the same writer as that of {other}: one curve would "
                "be of both. Give the eval loop one of its own, SummaryAction(writer, prefix='eval/').",
            )
        self._written[key] = (other, before | names)
