"""Runs the callbacks of every step."""

import dataclasses
import functools
import itertools
import math
import threading
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
from jaxloop.history import nothing
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
        return JittedProgram(self.step, fn, self._loop_state) if is_jitted else None

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
        """Runs steps of a compiled function. Adds their rows as soon as something reads the history, or at the end."""
        loop_state, task, history = self._loop_state, self._tasks[0], self._loop_state.history
        outputs, progress, reports = ran.outputs, [loop_state.elapsed], list[Any]()
        lock, num_added = threading.RLock(), 0

        def note(batch: types.Batch) -> None:
            progress.append(self._begin_step(batch, len(reports)))
            self._pause_if_stopped()

        def add_rows() -> None:
            nonlocal num_added
            with lock:  # Another thread may read the history, too. Adding rows also reads it, but finds none to add.
                begin, num_added = num_added, len(reports)
                if begin < num_added:
                    if begin == 0:  # Other callbacks may have added to this row.
                        end_row(loop_state, progress[0])
                    task.add_rows(progress[begin : num_added + 1], reports[begin:num_added])

        program.observers, ran.outputs, ran.state, history.before_reading = [note], reports, loop_state.state, add_rows
        try:
            program.run(ran, *options)
        except BaseException as error:
            if len(progress) - 1 > len(reports):
                task.add_note(error, progress[-1])
            raise
        finally:
            ran.outputs, loop_state.state, ran.state = outputs, ran.state, None
            loop_state.elapsed, history.before_reading = progress[len(reports)], nothing
            program.step._runner.states.remember(loop_state.state)
            outputs += [{}] * len(reports)
            ran.examples[:] = [
                now.samples - before.samples for before, now in itertools.pairwise(progress[: len(reports) + 1])
            ]
            is_in_step, ran.is_in_step = ran.is_in_step, True  # An invalid row is not an error of the dataset.
            add_rows()
            ran.is_in_step = is_in_step

    def _begin_step(self, batch: types.Batch, number: int) -> Elapsed:
        """Counts a step that begins, and returns the progress that includes it."""
        before = self._loop_state.elapsed if number else self._run.now
        now = before.advance(samples=self._count(batch), time=self._start + timing.clock())
        if number >= self._first_end and self._plan.ends_at(now):
            now = dataclasses.replace(now, is_last=True)
        self._loop_state.batch, self._loop_state.elapsed = batch, now
        return now

    def _pause_if_stopped(self) -> None:
        if self._loop_state.stop_iteration and self._requests is not None:
            self._requests.request_pause()

    def _run_custom(self, state: Any, batch: types.Batch, number: int) -> tuple[Any, types.Output, int]:
        end_row(self._loop_state)
        before = self._loop_state.elapsed.samples
        now = self._begin_step(batch, number)
        for task in self._tasks:
            if task.time_category is None:
                task()
            else:
                with self._run.stopwatch.counting(task.time_category):
                    task()
                self._start = self._run.clock.time() - timing.clock()
        self._pause_if_stopped()
        return None, {}, now.samples - before
