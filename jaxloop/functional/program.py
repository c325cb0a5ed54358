"""Runs the callbacks of every step."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, final

import jax

from jaxloop import types
from jaxloop.base import timing
from jaxloop.engine.feed import Feed
from jaxloop.engine.program import Program, Ran
from jaxloop.functional.callbacks import FunctionTask, JittedProgram
from jaxloop.functional.counting import Count
from jaxloop.functional.loop_state import LoopState, end_row, num_arguments
from jaxloop.loop import Loop
from jaxloop.models.function_step import FunctionStep
from jaxloop.processes.interrupt import Interruptible
from jaxloop.schedules import Elapsed


@final
class TaskLoop(Loop):
    """A loop that calls callbacks. Its own state is None, because they share a `LoopState`.

    Args:
      make_program: A function that makes the loop's program.
    """

    def __init__(self, make_program: Callable[[Loop], Program]):
        super().__init__(_TaskStep(lambda state, batch: (state, None)))
        self._make_program = make_program

    def __repr__(self) -> str:
        return "jf.loop"

    def run(self, state: Any, dataset: Any, num_steps: int | None) -> tuple[Any, Any]:
        self.engine.call.program = self._make_program(self)
        return super().run(state, dataset, num_steps)


class _TaskStep(FunctionStep):
    def __repr__(self) -> str:
        return "the tasks"


@final
class TaskProgram(Program):
    """A program that calls callbacks at each step.

    Args:
      loop: The loop.
      tasks: The callbacks of every step.
      loop_state: The state of the loop.
      count: A function that counts the examples in a batch.
    """

    def __init__(self, loop: Loop, tasks: Sequence[FunctionTask], loop_state: LoopState, count: Count):
        super().__init__(loop.step, custom=loop._run_one_step)
        self._run, self._plan = loop.engine.run, loop.engine.plan
        self._tasks, self._loop_state, self._count = tasks, loop_state, count
        self._requests: Interruptible | None = None
        self._first_end = 0  # The first step of a stretch at which the run may end.
        self._start = 0.0  # The training time at which the clock would have read 0.

    @property
    def runs_singly(self) -> bool:
        return False

    @functools.cached_property
    def _jitted(self) -> JittedProgram | None:
        """The program of the only callback, if the user has compiled it."""
        fn = self._tasks[0].of
        is_jitted = isinstance(fn, jax.stages.Wrapped) and num_arguments(fn) <= 2
        return JittedProgram(self.step, fn) if is_jitted else None

    def run(self, ran: Ran, feed: Feed, room: int, requests: Interruptible, deadline: float = math.inf) -> None:
        pauses, self._requests = requests.pauses, requests
        self._first_end = room - 1 if deadline == math.inf else 0
        self._start = self._run.clock.time() - timing.clock()
        program = self._tasks[0].program(self._jitted) if len(self._tasks) == 1 else None
        if program is None:
            super().run(ran, feed, room, requests, deadline)
        else:
            self._run_compiled(program, ran, feed, room, requests, deadline)
        if self._loop_state.stop_iteration:
            requests.pauses, feed.has_ended = pauses, True  # Ends the loop here.
            self._run.agenda.stopped_by = "a callback"

    def _run_compiled(self, program: Program, ran: Ran, *options: Any) -> None:
        """Runs steps of a compiled function, and then adds their rows, which nothing can read before that."""
        loop_state, task, outputs, progress = self._loop_state, self._tasks[0], ran.outputs, [self._run.now]

        def note(batch: types.Batch) -> None:
            before, time = progress[-1], self._start + timing.clock()
            progress.append(Elapsed(before.steps + 1, before.samples + self._count(batch), time, before.loops))
            loop_state.batch = batch

        end_row(loop_state)
        program.observers, ran.outputs, ran.state = [note], [], loop_state.state
        try:
            program.run(ran, *options)
        except BaseException as error:
            if len(progress) - 1 > len(ran.outputs):
                task.add_note(error, progress[-1])
            raise
        finally:
            reports, ran.outputs, loop_state.state, ran.state = ran.outputs, outputs, ran.state, None
            program.step._runner.states.remember(loop_state.state)
            outputs += [{}] * len(reports)
            ran.examples[:] = [
                now.samples - before.samples for before, now in itertools.pairwise(progress[: len(reports) + 1])
            ]
            task.add_rows(progress[1:], reports)

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
