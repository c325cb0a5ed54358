"""A bounded number of steps over one dataset."""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jaxloop import checks, metrics, timing, types
from jaxloop.engine.engine import Engine
from jaxloop.schedules import Elapsed
from jaxloop.step import Step
from jaxloop.types import Batch as Batch
from jaxloop.types import BatchSpec as BatchSpec
from jaxloop.types import Output as Output
from jaxloop.types import State as State


class Loop:
    """Runs a step on one batch after another: `begin -> run -> end`.

    Hooks:
      begin: Called once, before the first step of a loop. Returns the state and the iterator to read batches from. If a
        run resumes inside a loop, `begin` is called again only if it returned a different iterator than it received.
        The state that it then returns is ignored.
      run: Called next. Call `super().run(...)`, which runs the steps.
      end: Called after the last step, with the outputs on the host; not called if the dataset had no batch.
      update_outputs: Called for each step, in order, some steps later, when its outputs have reached the host.
      _get_next_batch: `(dataset)`. Called for each batch, to read it.
      _run_one_step: `(state, batch, per_loop_step_number)`. Called for each batch, to run its step. A loop that
        overrides it runs each step through `Step.__call__`, without the faster paths.

    >>> from jaxloop import examples
    >>> step, state, batches = examples.tiny_regression()
    >>> state, outputs = Loop(step)(state, iter(batches), num_steps=3)
    >>> int(state.step), len(outputs["loss"])
    (3, 3)

    Args:
      step: The step to run on each batch.
      clock: Returns the time in seconds, for durations.
      max_steps_in_flight: The largest number of steps that the host may be ahead of the devices. None for the default
        of 64 steps. On a CPU, the default is 4 dispatches if these are more steps, and 8 steps if several devices share
        it.

    Attributes:
      engine: The object that runs the loop.
    """

    def __init__(
        self, step: Step, *, clock: Callable[[], float] = time.perf_counter, max_steps_in_flight: int | None = None
    ):
        if not isinstance(step, Step):
            raise TypeError(f"{type(self).__name__} takes a jaxloop Step, got {step!r}.")
        checks.check_positive("max_steps_in_flight", max_steps_in_flight, optional=True)
        self._step = step
        self.engine: Engine = Engine(self, step, clock, max_steps_in_flight)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._step!r})"

    @property
    def step(self) -> Step:
        """The step that runs on each batch."""
        return self._step

    @property
    def step_num(self) -> int:
        """The number of completed updates (`state.step`) after the last step, counted on the host.

        If the state has no `step`, the number of steps that this loop has run.
        """
        return self.engine.stepper.step_num

    @property
    def num_examples(self) -> list[int]:
        """The number of examples in each step of the last loop."""
        return self.engine.stepper.call.num_examples

    @property
    def elapsed(self) -> Elapsed:
        """The progress of the training, with `previous` one step earlier.

        `time` counts the seconds of training in this loop. A call with a state other than the one that this loop
        returned last resets samples and time to zero. Call `resume` to continue those of an earlier run.
        """
        return self.engine.moments.elapsed

    @property
    def spent(self) -> timing.Spent:
        """The time report of all calls of this loop."""
        return self.engine.progress.stopwatch.spent()

    @property
    def was_interrupted(self) -> bool:
        """True if Ctrl-C or SIGTERM ended the last call before its last step."""
        return self.engine.stepper.call.was_interrupted

    @property
    def rescued_state(self) -> Any:
        """The state after the last completed step of a call that raised an exception; None after other calls.

        Also None if the failing step had already donated the state.
        """
        return self.engine.rescued[0]

    def compile(self, state: Any, batch: types.BatchSpec) -> None:
        """Compiles ahead of time everything that this loop runs on batches of this shape.

        >>> from jaxloop import examples
        >>> step, state, batches = examples.tiny_regression()
        >>> loop = Loop(step)
        >>> loop.compile(state, batches[0])
        >>> state, outputs = loop(state, batches, num_steps=3)

        Args:
          state: A state with the shapes of the one that the loop will be called with. It is not donated.
          batch: A batch as the dataset returns it, or its shapes; see `Step.compile`.
        """
        self.engine.stepper.compile(state, batch)

    def resume(self, elapsed: Elapsed) -> None:
        """Continues the counters of an earlier run, from this process or another."""
        self.engine.resume(elapsed)

    def forget_batches(self) -> None:
        """Drops the batches that were read ahead. Call it after moving the iterator to another position."""
        self.engine.stepper.forget_batches()

    def __call__(
        self,
        state: Any,
        dataset_iterator: Iterable[types.Batch] | None,
        num_steps: int | None = None,
        return_state_from_step: bool = True,
    ) -> tuple[Any, metrics.LoopOutputs]:
        """Runs at most `num_steps` steps. A dataset that ends earlier ends the loop.

        Ctrl-C ends the loop after the step in flight and sets `outputs[STOP_LOOP]` to True. A second Ctrl-C within two
        seconds raises `KeyboardInterrupt`. If the dataset has no batch, the outputs are empty and `end` is not called.

        Args:
          state: The train state. It is donated, unless `return_state_from_step` is False.
          dataset_iterator: The batches. An iterable is read from its start. None if the step needs no data: `run` then
            receives None as its batch, and `num_steps` ends the loop.
          num_steps: The number of steps, counted in updates (see `Step.updates_per_step`); None for all batches.
          return_state_from_step: If False, every step receives the same state, and the loop returns it unchanged.

        Returns:
          `(state, outputs)`, where `outputs[name]` is the list of that output's values, one per step, on the host.

        Raises:
          Exceptions of hooks, actions and the dataset, with a note that names the place and the step. `rescued_state`
          then holds the state after the last completed step.
        """
        checks.check_positive("num_steps", num_steps, optional=True)
        if dataset_iterator is None and num_steps is None:
            raise ValueError(f"{type(self).__name__} got no dataset, so nothing ends it. Give num_steps.")
        if return_state_from_step:
            checks.check_multiple("num_steps", num_steps, self._step)
        trains = return_state_from_step
        return self.engine.run_loops(state, dataset_iterator, lambda: num_steps, trains=trains)

    # Hooks -------------------------------------------------------------------------------------------

    def begin(self, state: Any, dataset: Any) -> tuple[Any, Iterator[types.Batch]]:
        """Runs before the first step of a loop; returns the state and the iterator to read batches from."""
        return state, self.engine.open(dataset)

    def run(self, state: Any, dataset: Iterator[types.Batch], num_steps: int | None) -> tuple[Any, Any]:
        """Repeats the step; returns the newest state and the outputs of all steps.

        An `OuterLoop` may run several loops in one call if nothing is due at the ends of the earlier ones.
        """
        return self.engine.run(state, dataset, num_steps)

    def end(self, state: Any, outputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Runs after the last step, with the `LoopOutputs` on the host."""
        return state, outputs

    def update_outputs(self, loop_outputs: metrics.LoopOutputs, step_outputs: types.Output) -> metrics.LoopOutputs:
        """Adds the outputs of one step to those of the loop, and returns these.

        The loop calls it for each step, in order, some steps after the step ran, when its values have reached the host.
        `clu.metrics` are not among the outputs, because they are merged on the device.
        """
        for name, value in (step_outputs or {}).items():
            loop_outputs.setdefault(name, []).append(value)
        return loop_outputs

    def _get_next_batch(self, dataset: Iterator[types.Batch]) -> types.Batch:
        return next(dataset)

    def _run_one_step(self, state: Any, batch: types.Batch, per_loop_step_number: int) -> tuple[Any, types.Output]:
        return self.engine.stepper.run_one_step(state, batch, per_loop_step_number)
