"""`Loop`, which runs a step on the batches of a dataset."""

from collections.abc import Iterable, Iterator
from typing import Any

from jaxloop import metrics, types
from jaxloop.base import checks, timing
from jaxloop.engine.engine import Engine
from jaxloop.engine.feed import as_iterator
from jaxloop.schedules import Elapsed
from jaxloop.step import Step
from jaxloop.types import Batch as Batch
from jaxloop.types import BatchSpec as BatchSpec
from jaxloop.types import Output as Output
from jaxloop.types import State as State


class Loop:
    """Runs a step on one batch after another. The loop's hooks are called in the order `begin -> run -> end`.

    Hooks:
      begin: Called before the first step of a loop. Returns the state and the iterator to read batches from. If the
        hook returns an iterator other than the one it received, the hook is called again when a run resumes in the
        middle of the loop, to get a new iterator. The state that the second call returns is ignored.
      run: Called after `begin`. An override must call `super().run(...)`, which runs the steps.
      end: Called after the last step, when all outputs are on the host. Not called if the dataset had no batches.
      update_outputs: Called for each step, in order, once the step's outputs have reached the host, which may be a few
        steps later.
      _get_next_batch: Called with the dataset whenever the loop needs a batch. Returns the batch.
      _run_one_step: Called for each batch with `(state, batch, per_loop_step_number)`, to run the step. If this
        hook is overridden, every step is run by `Step.__call__`, which is slower than the default.

    >>> from jaxloop import examples
    >>> step, state, batches = examples.tiny_regression()
    >>> state, outputs = Loop(step)(state, iter(batches), num_steps=3)
    >>> int(state.step), len(outputs["loss"])
    (3, 3)

    Args:
      step: The step to run on each batch.
      max_steps_in_flight: The maximum number of steps by which the host may run ahead of the devices. The default
        depends on the devices: 8 steps if several devices share a CPU, 128 steps (or 4 dispatches, if that is more) on
        a single CPU device, and 64 steps otherwise.

    Attributes:
      engine: The object that runs the loop.
    """

    def __init__(self, step: Step, *, max_steps_in_flight: int | None = None):
        if not isinstance(step, Step):
            raise TypeError(f"{type(self).__name__} takes a jaxloop Step, got {step!r}.")
        checks.check_positive("max_steps_in_flight", max_steps_in_flight, optional=True)
        self._step = step
        self.engine: Engine = Engine(self, max_steps_in_flight)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._step!r})"

    @property
    def step(self) -> Step:
        """The step that this loop runs on each batch."""
        return self._step

    @property
    def step_num(self) -> int:
        """The number of completed updates (`state.step` after the last step), counted on the host.

        If the state has no `step`, this is the number of steps that this loop has run.
        """
        return self.engine.step_num

    @property
    def num_examples(self) -> list[int]:
        """The number of examples in each step of the most recent loop."""
        return list(self.engine.outcome.num_examples)

    @property
    def elapsed(self) -> Elapsed:
        """The loop's training progress. `elapsed.previous` is the progress one batch earlier.

        `elapsed.time` is the number of seconds that this loop has spent training. If `state.step` at the start of a
        call to this loop differs from `state.step` at the end of the previous call, samples and time are reset to zero.
        To continue from the progress of an earlier run, call `resume`.
        """
        return self.engine.run.now

    @property
    def spent(self) -> timing.Spent:
        """The time report for all calls to this loop so far."""
        return self.engine.run.stopwatch.spent()

    @property
    def was_interrupted(self) -> bool:
        """True if Ctrl-C or SIGTERM stopped the last call to this loop before all of its steps had run."""
        return self.engine.outcome.is_interrupted

    @property
    def rescued_state(self) -> Any:
        """The state after the last completed step if the last call raised an exception; otherwise None.

        Also None if the failed step had already donated that state.
        """
        return self.engine.outcome.failure.state

    def compile(self, state: Any, batch: types.BatchSpec) -> None:
        """Compiles this loop ahead of time for a state and batches of the given shapes.

        >>> from jaxloop import examples
        >>> step, state, batches = examples.tiny_regression()
        >>> loop = Loop(step)
        >>> loop.compile(state, batches[0])
        >>> state, outputs = loop(state, batches, num_steps=3)

        Args:
          state: A state with the same shapes as the one that will be passed to the loop. It is not donated.
          batch: A batch as the dataset returns it, or its shapes; see `Step.compile`.
        """
        self.engine.compile(state, batch)

    def resume(self, elapsed: Elapsed) -> None:
        """Sets the loop's counters to the progress of an earlier run, so that counting continues from there."""
        self.engine.run.begin(elapsed)

    def __call__(
        self,
        state: Any,
        dataset_iterator: Iterable[types.Batch] | None,
        num_steps: int | None = None,
        return_state_from_step: bool = True,
    ) -> tuple[Any, metrics.LoopOutputs]:
        """Runs at most `num_steps` steps. Stops early if the dataset ends.

        On Ctrl-C, the loop ends after the current step, and `outputs[STOP_LOOP]` is True. A second Ctrl-C ends the
        process immediately (or raises `KeyboardInterrupt` in an interactive session). If an earlier loop was ended by
        Ctrl-C less than two seconds ago, even the first Ctrl-C raises `KeyboardInterrupt`. If the dataset has no
        batches, the outputs are empty, and `end` is not called.

        Args:
          state: The train state. It is donated, unless `return_state_from_step` is False.
          dataset_iterator: The batches. An iterable is read from its start. Pass None if the step doesn't need any
            data. In that case, `Step.run` receives None as the batch, and `num_steps` must be given.
          num_steps: The maximum number of steps, counted in updates (see `Step.updates_per_step`). If None, all batches
            are used.
          return_state_from_step: Whether to pass each step's new state to the next step and return the final state. If
            False, every step receives the given state, and the loop returns that state unchanged.

        Returns:
          `(state, outputs)`. `outputs` is a dict that maps the name of each output to a list with one value per step.
          All values are on the host.

        Raises:
          Exception: If a hook, an action or the dataset raises one. A note on the exception describes where and at
            which step it was raised, and `rescued_state` holds the state after the last completed step.
        """
        checks.check_positive("num_steps", num_steps, optional=True)
        if dataset_iterator is None and num_steps is None:
            raise ValueError(f"{type(self).__name__} got no dataset, so nothing ends it. Give num_steps.")
        if return_state_from_step:
            checks.check_multiple("num_steps", num_steps, self._step)
        trains = return_state_from_step
        return self.engine.loops(state, lambda: dataset_iterator, lambda: num_steps, trains=trains)

    # Hooks -------------------------------------------------------------------------------------------

    def begin(self, state: Any, dataset: Any) -> tuple[Any, Iterator[types.Batch]]:
        """Returns the state and the iterator to read batches from. Called before the first step of a loop."""
        return state, as_iterator(dataset)

    def run(self, state: Any, dataset: Iterator[types.Batch], num_steps: int | None) -> tuple[Any, Any]:
        """Runs the steps and returns the final state and the outputs of all steps.

        In an `OuterLoop`, a single call to this method can run the steps of several train loops if nothing is due
        between those loops.
        """
        return self.engine.advance(state, dataset, num_steps)

    def end(self, state: Any, outputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Returns the state and the outputs. Called after the last step.

        `outputs` is a `LoopOutputs` whose values are already on the host.
        """
        return state, outputs

    def update_outputs(self, loop_outputs: metrics.LoopOutputs, step_outputs: types.Output) -> metrics.LoopOutputs:
        """Adds a step's outputs to the loop's outputs, and returns the loop's outputs.

        Called for each step, in order, once the step's outputs have reached the host, which may be a few steps later.
        The step's outputs don't contain `clu.metrics` states, which the loop merges itself.
        """
        for name, value in (step_outputs or {}).items():
            loop_outputs.setdefault(name, []).append(value)
        return loop_outputs

    def _get_next_batch(self, dataset: Iterator[types.Batch]) -> types.Batch:
        return next(dataset)

    def _run_one_step(self, state: Any, batch: types.Batch, per_loop_step_number: int) -> tuple[Any, types.Output]:
        return self.engine.run_one_step(state, batch, per_loop_step_number)
