"""What one run of an experiment has done, and what never came to run."""

from collections.abc import Sequence
from typing import final

from absl import logging

from jaxloop.action_loop import ActionLoop
from jaxloop.schedules import Schedule
from jaxloop.specs import EvalSpec


@final
class Tally:
    """What one run of an OuterLoop has done: which loops and actions ran."""

    def __init__(self, loops: Sequence[ActionLoop]):
        self._loops = loops
        self._runs_before = {id(loop): loop.progress.loops_run for loop in loops}
        for loop in loops:
            loop.progress.longest_loop = 0
        self._calls_before = {id(each): list(each.calls) for loop in loops for each in loop.action_lists}

    def _runs(self, loop: ActionLoop) -> int:
        return loop.progress.loops_run - self._runs_before[id(loop)]

    def report_what_never_ran(self, eval_specs: Sequence[EvalSpec]) -> None:
        """Says in one warning which actions and evaluations never came to run, and why."""
        lines, told = [], set()
        for loop in self._loops:
            runs, most_steps = self._runs(loop), loop.progress.longest_loop
            for each in loop.action_lists if runs else ():
                if id(each) in told:  # Of a step that two loops share.
                    continue
                told.add(id(each))
                happened = f"{runs} ran" if each.unit == "loops" else f"the longest loop had {most_steps}"
                for action, calls, before in zip(each.actions, each.calls, self._calls_before[id(each)], strict=True):
                    if calls == before and isinstance(action.interval, Schedule):
                        lines.append(f"{action!r} of {loop!r}: its schedule did not fire up to step {loop.step_num}")
                    elif calls == before:
                        lines.append(f"{action!r} of {loop!r}: its interval counts {each.unit}, of which {happened}")
        train_loops = sum(self._runs(loop) for loop in self._loops[: len(self._loops) - len(eval_specs)])
        for index, spec in enumerate(eval_specs):
            loop = self._loops[len(self._loops) - len(eval_specs) + index]
            if train_loops and not self._runs(loop):
                lines.append(f"{loop!r}: {spec.when} never let it run after one of the {train_loops} train loops")
        if lines:
            logging.warning(
                "Never called in this run:\n  %s.\nAnother interval would make them run.", ";\n  ".join(lines)
            )
