"""Runs the callbacks of every step."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, final

from jaxloop import types
from jaxloop.base import timing
from jaxloop.engine.feed import Feed
from jaxloop.engine.program import Program, Ran
from jaxloop.functional.callbacks import FunctionTask
from jaxloop.functional.loop_state import LoopState, end_row
from jaxloop.loop import Loop
from jaxloop.models.function_step import FunctionStep
from jaxloop.processes.interrupt import Interruptible


@final
class TaskLoop(Loop):
    """A loop that calls callbacks. Its own state is None, because they share a `LoopState`.

    Args:
      tasks: The callbacks of every step.
      loop_state: The state of the loop.
      count: A function that counts the examples in a batch.
    """

    def __init__(self, tasks: Sequence[FunctionTask], loop_state: LoopState, count: Callable[[types.Batch], int]):
        super().__init__(_TaskStep(lambda state, batch: (state, None)))
        self._tasks, self._loop_state, self._count = tasks, loop_state, count

    def __repr__(self) -> str:
        return "jf.loop"

    def run(self, state: Any, dataset: Any, num_steps: int | None) -> tuple[Any, Any]:
        self.engine.call.program = TaskProgram(self)
        return super().run(state, dataset, num_steps)


class _TaskStep(FunctionStep):
    def __repr__(self) -> str:
        return "the tasks"


@final
class TaskProgram(Program):
    """A program that calls callbacks at each step.

    Args:
      loop: The loop.
    """

    def __init__(self, loop: TaskLoop):
        super().__init__(loop.step, custom=loop._run_one_step)
        self._run, self._plan = loop.engine.run, loop.engine.plan
        self._tasks, self._loop_state, self._count = loop._tasks, loop._loop_state, loop._count
        self._requests: Interruptible | None = None
        self._first_end = 0  # The first step of a stretch at which the run may end.
        self._start = 0.0  # The training time at which the clock would have read 0.

    @property
    def runs_singly(self) -> bool:
        return False

    def run(self, ran: Ran, feed: Feed, room: int, requests: Interruptible, deadline: float = math.inf) -> None:
        pauses, self._requests = requests.pauses, requests
        self._first_end = room - 1 if deadline == math.inf else 0
        self._start = self._run.clock.time() - timing.clock()
        with self._tasks[0].compiled() if len(self._tasks) == 1 else contextlib.nullcontext():
            super().run(ran, feed, room, requests, deadline)
        if self._loop_state.stop_iteration:
            requests.pauses, feed.has_ended = pauses, True  # Ends the loop here.
            self._run.agenda.stopped_by = "a callback"

    def _run_custom(self, state: Any, batch: types.Batch, number: int) -> tuple[Any, types.Output, int]:
        loop_state, examples = self._loop_state, self._count(batch)
        end_row(loop_state)
        before = loop_state.elapsed if number else self._run.now
        now = before.advance(samples=examples, time=self._start + timing.clock())
        if number >= self._first_end and self._plan.ends_at(now):
            now = dataclasses.replace(now, is_last=True)
        loop_state.batch, loop_state.elapsed = batch, now
        for task in self._tasks:
            if task.time_category is None:
                task()
            else:
                with self._run.stopwatch.counting(task.time_category):
                    task()
                self._start = self._run.clock.time() - timing.clock()
        if loop_state.stop_iteration and self._requests is not None:
            self._requests.request_pause()
        return None, {}, examples
