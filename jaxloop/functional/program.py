"""Runs the callbacks of every step."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, final

from jaxloop import types
from jaxloop.base import checks, timing
from jaxloop.engine.feed import Feed
from jaxloop.engine.program import Program, Ran
from jaxloop.functional.callbacks import FunctionTask
from jaxloop.functional.log_entries import Logs
from jaxloop.functional.loop_state import LoopState, end_row
from jaxloop.loop import Loop
from jaxloop.models.function_step import CompiledFunction, FunctionStep
from jaxloop.processes.interrupt import Interruptible
from jaxloop.schedules import Elapsed


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
        self.engine.call.program = TaskProgram(self, self._tasks, self._loop_state, self._count)
        return super().run(state, dataset, num_steps)


class _TaskStep(FunctionStep):
    def __repr__(self) -> str:
        return "the tasks"


@final
class TaskProgram(Program):
    """A program that calls callbacks at each step.

    If there is only one of them and it is a compiled function, the function's own program runs the steps, because a few
    Python calls can take as long as a dispatch.

    Args:
      loop: The loop.
      tasks: The callbacks of every step.
      loop_state: The state of the loop.
      count: A function that counts the examples in a batch.
    """

    def __init__(
        self,
        loop: Loop,
        tasks: Sequence[FunctionTask],
        loop_state: LoopState,
        count: Callable[[types.Batch], int],
    ):
        super().__init__(loop.step, custom=loop._run_one_step)
        self._run, self._plan = loop.engine.run, loop.engine.plan
        self._tasks, self._loop_state, self._count = tasks, loop_state, count
        self._requests: Interruptible | None = None
        self._time_since = 0.0, 0.0  # A training time, and the reading of the clock at that time.

    @property
    def runs_singly(self) -> bool:
        return False

    def run(self, ran: Ran, feed: Feed, room: int, requests: Interruptible, deadline: float = math.inf) -> None:
        self._read_time()
        if compiled := self._compiled_program():
            return self._run_compiled(compiled, ran, feed, room, requests, deadline)
        room = 1 if self._requests is None else room  # After the first step, the program of a function is known.
        pauses, self._requests = requests.pauses, requests
        try:
            super().run(ran, feed, room, requests, deadline)
        finally:
            if self._loop_state.stop_iteration:
                requests.pauses, feed.has_ended = pauses, True  # Ends the loop here.
                self._run.agenda.stopped_by = "a callback"

    def _read_time(self) -> None:
        self._time_since = self._run.clock.time(), timing.clock()

    def _time(self) -> float:
        time, reading = self._time_since
        return time + timing.clock() - reading

    def _run_custom(self, state: Any, batch: types.Batch, number: int) -> tuple[Any, types.Output, int]:
        loop_state, requests, examples = self._loop_state, self._requests, self._count(batch)
        end_row(loop_state)
        now = (loop_state.elapsed if number else self._run.now).advance(samples=examples, time=self._time())
        if self._plan.ends_at(now):
            now = dataclasses.replace(now, is_last=True)
        loop_state.batch, loop_state.elapsed = batch, now
        for task in self._tasks:
            if task.time_category is None:
                task()
            else:
                with self._run.stopwatch.counting(task.time_category):
                    task()
                self._read_time()
        if loop_state.stop_iteration and requests is not None:
            requests.request_pause()
        return None, {}, examples

    def _compiled_program(self) -> Program | None:
        """Returns the program of the only callback if that is a compiled function that returns only logs."""
        if len(self._tasks) != 1 or isinstance(self._loop_state.state, tuple):
            return None
        (task,) = self._tasks
        is_known = isinstance(task.of, CompiledFunction) and task.has_reported and not task.reports_state
        return task.of.program() if is_known else None

    def _run_compiled(
        self, program: Program, ran: Ran, feed: Feed, room: int, requests: Interruptible, deadline: float
    ) -> None:
        (task,), loop_state, count, (time, since) = self._tasks, self._loop_state, self._count, self._time_since
        seen, error = list[tuple[int, float]](), None

        def observe(batch: types.Batch) -> None:
            loop_state.batch = batch
            seen.append((count(batch), timing.clock()))

        program.observers = [observe]
        states, now = program.step._runner.states, self._run.now
        own = Ran(states.prepare(loop_state.state), ran.step_num, [])
        checks.mark_donated(loop_state.state, repr(task.of))
        try:
            program.run(own, feed, room, requests, deadline)
        except BaseException as raised:
            error = raised
        loop_state.state, ran.in_data, ran.is_in_step = own.state, own.in_data, own.is_in_step
        states.remember(own.state)
        for (examples, read_at), found in zip(seen, own.outputs, strict=False):
            end_row(loop_state, Logs(found["logs"] or ()))
            now = Elapsed(now.steps + 1, now.samples + examples, time + read_at - since, now.loops)
            loop_state.elapsed = now
            if found["outputs"] is not None:
                task.take(found["outputs"], None, None)
            ran.examples.append(examples)
            ran.outputs.append({})
        if error is not None:
            if own.is_in_step:
                end_row(loop_state)
                examples, read_at = seen[-1]
                loop_state.elapsed = now.advance(samples=examples, time=time + read_at - since)
                task.add_note(error)
            raise error
