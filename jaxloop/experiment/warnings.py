"""What an experiment warns of: the problems found before its first step, what it never called, and NaN at its end."""

from collections.abc import Sequence
from typing import Any, final

import numpy as np
from absl import logging

from jaxloop import metrics
from jaxloop.action_loop import ActionLoop
from jaxloop.experiment.evaluations import Evaluation
from jaxloop.history import History
from jaxloop.schedules import Schedule


@final
class Warnings:
    """The warnings of an `OuterLoop`, each of which is logged once.

    Attributes:
      predicted: The actions and the names of evaluations about which a warning at the start has said that they will
        never be called.
    """

    def __init__(self):
        self.predicted: set[Any] = set()
        self._logged: set[str] = set()

    def warn(self, text: str) -> None:
        """Logs a warning, unless this object did so before."""
        if text not in self._logged:
            self._logged.add(text)
            logging.warning("%s", text)

    def warn_of_unused(self, loops: Sequence[ActionLoop], evaluations: Sequence[Evaluation]) -> None:
        """Logs one warning that lists the actions and evaluations that were never called in a run, with reasons."""
        lines, seen = [], set()
        for loop in loops:
            actions, runs = loop.engine.actions, loop.engine.run.loops_run
            unused = [(item.action, "loops") for item in (*actions.begin, *actions.end) if not item.was_called]
            for each in loop.step._runner.action_lists:
                if id(each) not in seen:  # Two loops may share a step.
                    seen.add(id(each))
                    unused += [(a, each.unit) for a, calls in zip(each.actions, each.calls, strict=True) if not calls]
            ran = "1 loop ran" if runs == 1 else f"{runs} loops ran"
            for action, unit in unused if runs else ():
                happened = f"only {ran}" if unit == "loops" else "no loop had as many"
                name, interval = f"{type(action).__name__} of {loop!r}", action.interval
                if action in self.predicted:
                    continue
                if isinstance(interval, Schedule):
                    lines.append(f"{name}: interval={interval!r} did not fire up to step {loop.step_num}.")
                else:
                    hint = f" Did you mean every(steps={interval})?" if interval > 1 else ""
                    lines.append(f"{name}: interval={interval} means every {interval} {unit}, and {happened}.{hint}")
        train_loops = sum(loop.engine.run.loops_run for loop in loops[: len(loops) - len(evaluations)])
        for each in evaluations:
            if train_loops and not each.loop.engine.run.loops_run and each.spec.name not in self.predicted:
                lines.append(f"{each.loop!r}: {each.spec.when} was never due in {train_loops} train loops.")
        if lines:
            logging.warning("Never called in this run:\n  %s", "\n  ".join(lines))


def warn_of_nan(outputs: metrics.LoopOutputs | None, history: History, step_num: int) -> None:
    """Warns about each train metric that is NaN in the last loop of a run, if its values are already on the host."""
    for name, values in (outputs or {}).items():
        if not isinstance(values, list) or not _is_nan(values):
            continue
        number = next(number for number, value in enumerate(values) if _is_nan([value]))
        first = f"since step {step_num - len(values) + number + 1}"
        if number == 0 and f"train.{name}" in history.paths():
            steps, means = history.collect("steps", f"train.{name}")
            first = next(
                (f"since step {step} or before" for step, mean in zip(steps, means, strict=True) if mean != mean), first
            )
        if not _is_nan(values[-1:]):
            first = f"{first.replace('since', 'at')}, though not at the last one (are its labels in range?)"
        logging.warning(
            "The run ended at step %d with %r NaN, %s. TrainLoop(..., nan_policy='raise') ends a run at the first such "
            "step.",
            step_num,
            name,
            first,
        )


def _is_nan(values: Sequence[Any]) -> bool:
    """Returns whether any of the values is NaN."""
    numbers = [metrics.value_of(value) for value in values if not metrics.is_empty(value)]
    return any(isinstance(value, float | np.generic) and bool(value != value) for value in numbers)
