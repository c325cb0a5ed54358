"""A bounded series of steps over one dataset."""

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
    """Runs a step on one batch after another.

    A call goes `begin -> run -> end`.

    Hooks:
      begin: before the first step of a loop, once; returns the state and the iterator to draw batches from. A run that
        resumes inside a loop calls it again only if it had returned another iterator than it was given, and then drops
        the state that it returns.
      run: then; to take the steps is its work, so call that of `super()`.
      end: after the last step, with the outputs on the host; not where the data had no batch.
      update_outputs: for each step, in order, when its outputs have reached the host, which is some steps later.
      _get_next_batch: `(dataset)`, for each batch, to draw it.
      _run_one_step: `(state, batch, per_loop_step_number)`, for each batch, to take its step; with one of its own, a
        loop takes none of the shorter ways.

    >>> from jaxloop import examples
    >>> step, state, batches = examples.tiny_regression()
    >>> state, outputs = Loop(step)(state, iter(batches), num_steps=3)
    >>> int(state.step), len(outputs["loss"])
    (3, 3)

    Args:
      step: what happens to one batch.
      clock: tells the time in seconds, for durations.
      max_steps_in_flight: how many steps the host may be ahead of the devices; then it waits for them. None for 64, on
        a CPU for 4 dispatches where those are more, and for 8 where several devices are one CPU.

    Attributes:
      engine: what runs it.
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
        """What happens to one batch."""
        return self._step

    @property
    def step_num(self) -> int:
        """The number of completed updates (`state.step`) as of the last step, counted on the host.

        For a state without `step`, the number of steps that this loop has run.
        """
        return self.engine.stepper.step_num

    @property
    def num_examples(self) -> list[int]:
        """How many examples each step of the last loop had."""
        return self.engine.stepper.call.num_examples

    @property
    def elapsed(self) -> Elapsed:
        """How far the training is, with `previous` a step earlier. Its `time` is what this loop has spent on training.

        A state that is not the one this loop returned last begins anew: samples and time are zero then. Call `resume`
        to go on with those of an earlier run.
        """
        return self.engine.moments.elapsed

    @property
    def spent(self) -> timing.Spent:
        """What this loop has spent its time on, in all its calls."""
        return self.engine.progress.stopwatch.spent()

    @property
    def was_interrupted(self) -> bool:
        """Whether Ctrl-C, or SIGTERM, cut the last call short: it would have had more steps to do."""
        return self.engine.stepper.call.was_interrupted

    @property
    def rescued_state(self) -> Any:
        """The state as of the last whole step of a call that an exception ended; None after other calls.

        None too where the failing step had taken the state over already.
        """
        return self.engine.rescued[0]

    def compile(self, state: Any, batch: types.BatchSpec) -> None:
        """Compiles ahead all that this loop will run on batches like this one: its first step then waits for nothing.

        >>> from jaxloop import examples
        >>> step, state, batches = examples.tiny_regression()
        >>> loop = Loop(step)
        >>> loop.compile(state, batches[0])
        >>> state, outputs = loop(state, batches, num_steps=3)

        Args:
          state: a state such as the loop will be called with; it stays usable.
          batch: as the dataset gives it, or its shapes, see `Step.compile`.
        """
        self.engine.stepper.compile(state, batch)

    def resume(self, elapsed: Elapsed) -> None:
        """Goes on counting from where an earlier run, in this process or another, left off."""
        self.engine.resume(elapsed)

    def forget_batches(self) -> None:
        """Drops the batches that were drawn ahead: to be called when the iterator was moved to another place since."""
        self.engine.stepper.forget_batches()

    def __call__(
        self,
        state: Any,
        dataset_iterator: Iterable[types.Batch] | None,
        num_steps: int | None = None,
        return_state_from_step: bool = True,
    ) -> tuple[Any, metrics.LoopOutputs]:
        """Runs at most `num_steps` batches; a dataset that ends before ends the loop.

        So does Ctrl-C, after the step in flight; then `outputs[STOP_LOOP]` is True. A second one within two seconds
        raises `KeyboardInterrupt`. Of a dataset without a batch comes an empty dict, and `end` is not called.

        Args:
          state: the train state. It is donated, unless `return_state_from_step` is False.
          dataset_iterator: the batches; an iterable is run through from its start. None for a step that needs no data:
            `run` gets None as its batch, and `num_steps` ends the loop.
          num_steps: how many steps, that is updates, see `Step.updates_per_step`; None for all batches there are.
          return_state_from_step: False to give every step the same state, and to return that: then the steps can't
            change it.

        Returns:
          `(state, outputs)`, where `outputs[name]` is the list of that output's values, one per step, on the host.

        Raises:
          Whatever a hook, an action or the dataset raises, with a note of where and after which step. The state as of
          the last whole step is then in `rescued_state`.
        """
        checks.check_positive("num_steps", num_steps, optional=True)
        if dataset_iterator is None and num_steps is None:
            raise ValueError(f"{type(self).__name__} got no data, so nothing ends it: give num_steps.")
        if return_state_from_step:
            checks.check_multiple("num_steps", num_steps, self._step)
        trains = return_state_from_step
        return self.engine.run_loops(state, dataset_iterator, lambda: num_steps, trains=trains)

    # Hooks -------------------------------------------------------------------------------------------

    def begin(self, state: Any, dataset: Any) -> tuple[Any, Iterator[types.Batch]]:
        """Runs before the first step of a loop; returns the state and the iterator to draw batches from."""
        return state, self.engine.open(dataset)

    def run(self, state: Any, dataset: Iterator[types.Batch], num_steps: int | None) -> tuple[Any, Any]:
        """Repeats the step; returns the newest state and the outputs of all steps.

        Loops before the last one may have ended inside, where nobody was to hear of their ends.
        """
        return self.engine.run(state, dataset, num_steps)

    def end(self, state: Any, outputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Runs after the last step, with the `LoopOutputs` on the host."""
        return state, outputs

    def update_outputs(self, loop_outputs: metrics.LoopOutputs, step_outputs: types.Output) -> metrics.LoopOutputs:
        """Adds the outputs of one step, in order, to those of the loop; returns the latter.

        Called some steps later than the step itself ran, when its values have reached the host, and without
        `clu.metrics`, which are merged on the device.
        """
        for name, value in (step_outputs or {}).items():
            loop_outputs.setdefault(name, []).append(value)
        return loop_outputs

    def _get_next_batch(self, dataset: Iterator[types.Batch]) -> types.Batch:
        return next(dataset)

    def _run_one_step(self, state: Any, batch: types.Batch, per_loop_step_number: int) -> tuple[Any, types.Output]:
        return self.engine.stepper.run_one_step(state, batch, per_loop_step_number)
