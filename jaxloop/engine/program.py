"""Programs, which run steps. This is the only module that loops over steps."""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import jax
from absl import logging

from jaxloop import metrics, types
from jaxloop.base import checks, timing
from jaxloop.distributed.interrupt import Interruptible
from jaxloop.engine.feed import Feed
from jaxloop.step import FusingError, Step
from jaxloop.step.compiled import Compiled, stacked

CHUNK_SIZE = 64
"""The maximum number of steps whose outputs are processed together."""

Custom = Callable[[Any, types.Batch, int], tuple[Any, types.Output]]
"""A function that runs one step: `(state, batch, index) -> (state, outputs)`.

The index is the number of steps that the current call to `Program.run` has already run.
"""


@final
class Block(NamedTuple):
    """The outputs of the steps of one dispatch, stacked along a new leading axis."""

    outputs: types.Output
    num_steps: int


@final
@dataclasses.dataclass
class Ran:
    """The result of running some steps. It is valid even if an exception interrupted the steps.

    Attributes:
      state: The state after the last completed step.
      step_num: The number of updates before these steps.
      outputs: The list that the outputs are appended to.
      examples: The number of examples in each completed step.
      in_data: The number of seconds spent waiting for batches.
      is_in_step: True if an exception was raised after a batch was read but before the batch's step was completed.
    """

    state: Any
    step_num: int
    outputs: list[Any]
    examples: list[int] = dataclasses.field(default_factory=list)
    in_data: float = 0.0
    is_in_step: bool = False


class Program:
    """Runs a step on batches, one at a time or several in one dispatch, and calls the step's hooks.

    Hooks:
      run: Runs steps.
      _run_one: Runs one step: `(carry, batch) -> (carry, outputs, num_examples)`. For the carry, see `Compiled`.

    Args:
      step: The step.
      evaluates: Whether to run the steps as an evaluation, which doesn't donate the state.
      custom: A function that runs each step, with all of its hooks and actions, in place of the compiled function.
      observers: Functions to call with each batch.
    """

    def __init__(
        self,
        step: Step,
        *,
        evaluates: bool = False,
        custom: Custom | None = None,
        observers: Sequence[Callable[[types.Batch], None]] = (),
    ):
        self.step: Step = step
        self.custom: Custom | None = custom
        self.observers: Sequence[Callable[[types.Batch], None]] = observers
        self._evaluates = evaluates
        self._compiled = step._runner.programs.compiled(evaluates=evaluates)
        self._runner = step._runner
        self._own_hooks = [hook for hook in ("begin", "preprocess_batch", "num_examples") if self._runner.has_own(hook)]
        self._has_failed = False  # True if a dispatch of several steps failed.

    def run(
        self,
        ran: Ran,
        feed: Feed,
        room: int,
        requests: Interruptible,
        deadline: float = math.inf,
    ) -> None:
        """Runs at most `room` steps on batches from `feed`, and stores the results in `ran`.

        Stops early if the data ends, if a signal or a request to pause arrives, or if the deadline passes.
        """
        read, add_outputs, add_number = feed.reader(), ran.outputs.append, ran.examples.append
        clock = timing.clock
        enter, leave, run_one, observers = self._compiled.enter, self._compiled.leave, self._run_one, self.observers
        if self.custom is not None:
            enter = leave = lambda state: state
            run_one = lambda state, batch: self._run_custom(state, batch, len(ran.examples))
        if jax.profiler.TraceAnnotation.is_enabled():
            run_one = self._marked(run_one, ran.step_num)
            read = jax.profiler.annotate_function(read, "jaxloop: waiting for data")
        in_data, is_in_step, carry, batch = 0.0, False, enter(ran.state), None
        try:
            for _ in range(room):
                began = clock()
                batch = read()
                is_in_step, came = True, clock()
                in_data += came - began
                for observe in observers:
                    observe(batch)
                carry, outputs, num_examples = run_one(carry, batch)
                add_outputs(outputs)
                add_number(num_examples)
                is_in_step = False
                if came >= deadline or requests.signum is not None or requests.pauses:
                    break
        except StopIteration as error:
            if is_in_step:  # An iterator that calls this would mistake it for the end of its data.
                raise RuntimeError(
                    "The step raised StopIteration, which next() raises for an empty iterator. Use next(iterator, "
                    "default), or catch it."
                ) from error
            feed.has_ended = True
        finally:
            if is_in_step and self.custom is not None and self.step.rescued_state is not None:
                carry = self.step.rescued_state  # `run` completed, and its `end` or an action failed.
                add_outputs(None)
                add_number(self._runner.count_examples(batch))
            ran.state, ran.in_data, ran.is_in_step = leave(carry), ran.in_data + in_data, is_in_step

    def _marked(self, run_one: Callable[..., Any], step_num: int) -> Callable[..., Any]:
        """Wraps `run_one` to mark each step in the profile being recorded, for tools that group events by step."""
        updates = 1 if self._evaluates else self.step.updates_per_step
        numbers = itertools.count(step_num + updates, updates)

        def marked(carry: Any, batch: types.Batch) -> Any:
            with jax.profiler.StepTraceAnnotation(self._marker, step_num=next(numbers)):
                return run_one(carry, batch)

        return marked

    @property
    def _marker(self) -> str:
        return "eval" if self._evaluates else "train"

    def _run_custom(self, state: Any, batch: types.Batch, number: int) -> tuple[Any, types.Output, int]:
        assert self.custom is not None
        num_examples = self._runner.count_examples(batch)
        return *self.custom(state, batch, number), num_examples

    @functools.cached_property
    def _run_one(self) -> Callable[[Any, types.Batch], tuple[Any, types.Output, int]]:
        """A function that runs one step: `(carry, batch) -> (carry, outputs, num_examples)`; see `Compiled`."""
        runner, watch, call, evaluates = self._runner, self._runner.batch_watch, self._compiled.call, self._evaluates
        look, prepares, places = watch.look, self._prepares, evaluates or runner.places_batches

        def run_one(carry: Any, batch: types.Batch) -> tuple[Any, types.Output, int]:
            num_examples = None
            if prepares:
                carry, batch, num_examples = self._prepare(carry, batch)
            rows = 0 if evaluates else look((batch,))
            if num_examples is None:
                num_examples = runner.count_examples(batch) if rows is None else rows
            try:
                placed = runner.place(batch, evaluates=evaluates) if places else batch
                carry, outputs = call(carry, placed, watch.form)
            except Exception as error:
                runner.explain(error, batch)
                raise
            return carry, outputs, num_examples

        return run_one

    @property
    def _prepares(self) -> bool:
        """True if each batch must be passed to `_prepare` before the step's `run` hook is called."""
        return self._evaluates or bool(self._own_hooks)

    def _prepare(self, carry: Any, batch: types.Batch) -> tuple[Any, types.Batch, int]:
        """Passes a batch through the hooks that precede the step's `run` hook, and counts the batch's examples."""
        runner = self._runner
        if "begin" in self._own_hooks and (ready := runner.ready_batch(batch)) is not None:
            return carry, *ready
        num_examples = runner.count_examples(batch)
        if "begin" in self._own_hooks:
            state = self._compiled.leave(carry)
            with jax.profiler.TraceAnnotation("jaxloop: begin"):
                new_state, batch = runner.before_run(state, batch)
            carry = carry if new_state is state else self._compiled.enter(new_state)
        elif "preprocess_batch" in self._own_hooks:
            with jax.profiler.TraceAnnotation("jaxloop: preprocess_batch"):
                batch = runner.preprocessed(batch)
        return carry, batch, num_examples

    def run_fused(self, ran: Ran, feed: Feed, size: int) -> bool:
        """Runs `size` steps in one dispatch and returns True.

        If the steps must run one at a time, runs none of them and returns False.
        """
        if self._has_failed:
            return False
        began = timing.clock()
        batches, result = feed.take(size), None
        ran.in_data = timing.clock() - began
        # If the processes' batches may differ, the processes compare them one by one.
        if len(batches) == size and not self._runner.batch_watch.may_differ:
            ran.is_in_step = True
            try:
                newest = ran.step_num + size * self.step.updates_per_step
                with jax.profiler.StepTraceAnnotation(self._marker, step_num=newest):
                    result = self.dispatch_fused(ran.state, batches)
            except BaseException as error:
                is_final = isinstance(error, FusingError) or checks.deleted_leaves(ran.state)
                if is_final or not isinstance(error, Exception):
                    feed.put_back(batches[1:])
                    raise
                self._has_failed = True
                text = "%r: a dispatch of %d steps failed, so they run one at a time: %r"
                logging.warning(text, self.step, size, error)
            ran.is_in_step = False
        if result is None:
            feed.put_back(batches)
            return False
        ran.state, block, examples = result
        ran.outputs.append(block)
        ran.examples += examples
        for observe in self.observers:
            for batch in batches:
                observe(batch)
        return True

    def dispatch_fused(self, state: Any, batches: Sequence[types.Batch]) -> tuple[Any, Block, list[int]] | None:
        """Runs one step per batch, all in a single dispatch.

        Returns the state, the outputs, and a list with the number of examples in each batch. If the batches can't be
        stacked, runs no steps and returns None.
        """
        compiled = self.fused
        carry, prepared, numbers = compiled.enter(state), [], []
        for batch in batches if self._prepares else ():
            new_carry, ready, num_examples = self._prepare(carry, batch)
            if new_carry is not carry:
                raise FusingError(
                    f"{type(self.step).__name__}.begin returned another state, so several steps can't run in one "
                    "dispatch. Change the state in run instead, or use steps_per_dispatch=1."
                )
            prepared.append(ready)
            numbers.append(num_examples)
        prepared = prepared or batches
        whole = stacked(prepared)
        if whole is None:
            return None
        rows = 0 if self._evaluates else self._runner.batch_watch.look(prepared)
        rows = self._runner.count_examples(prepared[0]) if rows is None else rows
        try:
            placed = self._runner.place(whole, evaluates=self._evaluates, fuses=True)
            carry, outputs = compiled.call(carry, placed, self._runner.batch_watch.form)
        except Exception as error:
            self._runner.explain(error, prepared[0])
            raise
        return compiled.leave(carry), Block(outputs, len(batches)), numbers or [rows] * len(batches)

    @functools.cached_property
    def fused(self) -> Compiled:
        """The compiled function that runs several steps. Raises a `FusingError` if they can't run in one dispatch."""
        if work := self._runner.work_for_each_step(evaluates=self._evaluates):
            raise FusingError(f"{self.step!r} can't run several steps in one dispatch: {work}.")
        return self._runner.programs.compiled(evaluates=self._evaluates, fuses=True)


@final
class InFlight:
    """The dispatches that the devices may not have completed yet.

    Args:
      stopwatch: The stopwatch that tracks how the time is spent.

    Attributes:
      limit: The number of steps by which the host may run ahead of the devices.
      chunk: The number of steps whose outputs are processed together.
      waiting: A function that returns a context manager for measuring the time spent waiting for the devices.
    """

    def __init__(self, stopwatch: timing.Stopwatch):
        self.set_limit(64)
        self.waiting: Callable[[], Any] = functools.partial(stopwatch.counting, "device")
        self._markers: collections.deque[tuple[Any, int]] = collections.deque()
        self._num_steps = 0

    def set_limit(self, limit: int) -> None:
        """Sets the number of steps by which the host may run ahead of the devices."""
        self.limit: int = limit
        self.chunk: int = min(CHUNK_SIZE, -(-limit // 2))

    def add(self, outputs: types.Output, num_steps: int, state: Any) -> None:
        """Adds a dispatch, and waits if the host is too far ahead of the devices.

        Args:
          outputs: The outputs of the dispatched steps.
          num_steps: The number of steps in the dispatch.
          state: The state after the dispatch.
        """
        arrays = [leaf for leaf in jax.tree.leaves(outputs) if isinstance(leaf, jax.Array)]
        self._markers.append((arrays[0] if arrays else None, num_steps))
        self._num_steps += num_steps
        while self._num_steps > self.limit - self.chunk and self._markers:
            marker, number = self._markers.popleft()
            self._num_steps -= number
            with self.waiting():
                metrics.wait(state if marker is None else marker)
            if marker is None:  # That step's state has been donated since, so this waited for the latest one.
                self.clear()

    def clear(self) -> None:
        """Forgets all dispatches."""
        self._markers.clear()
        self._num_steps = 0

    @property
    def num_computed(self) -> int:
        """The number of tracked dispatches that the devices have already completed. May be read from another thread."""
        return sum(metrics.is_ready(marker) for marker, _ in self._markers.copy())
