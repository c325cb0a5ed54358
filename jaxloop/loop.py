"""A bounded series of steps over one dataset. The only place that repeats steps."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from jaxloop import checks, interrupt, metrics, types
from jaxloop.step import Step

# How many steps' outputs are copied to the host at once; twice as many steps may be under way.
_CHUNK_SIZE = 32
# With several devices on one CPU, the collectives of more steps than this compete for the same threads.
_CHUNK_SIZE_CPU_MESH = 4


class Loop:
    """Runs a step on one batch after another.

    A call goes `begin -> run -> end`; each of the three can be overridden.

    >>> from jaxloop import examples
    >>> step, state, batches = examples.tiny_regression()
    >>> state, outputs = Loop(step)(state, iter(batches), num_steps=3)
    >>> int(state.step), len(outputs["loss"])
    (3, 3)

    Args:
      step: what happens to one batch.
    """

    def __init__(self, step: Step):
        if not isinstance(step, Step):
            raise TypeError(f"{type(self).__name__} takes a jaxloop Step, got {step!r}.")
        self._step = step
        self._returns_new_state = True
        self._step_num = 0
        self._num_examples: list[int] = []
        self._known_step: Any = None  # The `state.step` array whose value is `_step_num`.
        self._newest_state: Any = None  # During a call, the state as of the last whole step.
        self._rescued_state: Any = None
        self._interrupt = interrupt.Interruptible()
        self._was_interrupted = False

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
        return self._step_num

    @property
    def num_examples(self) -> list[int]:
        """How many examples each step of the last call had."""
        return self._num_examples

    @property
    def was_interrupted(self) -> bool:
        """Whether Ctrl-C ended the steps of the last call."""
        return self._was_interrupted

    @property
    def rescued_state(self) -> Any:
        """The state as of the last whole step of a call that an exception ended; None after other calls.

        None too where the failing step had taken the state over already.
        """
        return self._rescued_state

    def __call__(
        self,
        state: Any,
        dataset_iterator: Iterable[types.Batch],
        num_steps: int | None = None,
        return_state_from_step: bool = True,
    ) -> tuple[Any, metrics.LoopOutputs]:
        """Runs at most `num_steps` batches; a dataset that ends before ends the loop.

        So does Ctrl-C, after the step in flight; then `outputs[STOP_LOOP]` is True. A second one within two seconds
        raises `KeyboardInterrupt`. Of a dataset without a batch comes an empty dict, and `end` is not called.

        Args:
          state: the train state. It is donated, unless `return_state_from_step` is False.
          dataset_iterator: the batches; an iterable is run through from its start.
          num_steps: how many; None for all there are.
          return_state_from_step: False to give every step the same state, and to return that: then the steps can't
            change it.

        Returns:
          `(state, outputs)`, where `outputs[name]` is the list of that output's values, one per step, on the host.

        Raises:
          Whatever a hook, an action or the dataset raises, with a note of where and after which step. The state as of
          the last whole step is then in `rescued_state`.
        """
        checks.check_positive("num_steps", num_steps, optional=True)
        self._returns_new_state = return_state_from_step
        self._num_examples = []
        self._rescued_state = None
        self._was_interrupted = False
        self._newest_state = self._step.prepare_state(state)
        self._step_num = self._read_step_num(self._newest_state)
        if return_state_from_step:
            checks.mark_taken(self._newest_state, f"{self!r}, which began at step {self._step_num},")
        try:
            with self._interrupt:
                state, dataset = self.begin(self._newest_state, dataset_iterator)
                state, outputs = self.run(state, dataset, num_steps)
                outputs = self._with_num_examples(outputs)
                if self._num_examples:  # Else the dataset had ended before: there is nothing to end.
                    state, outputs = checks.check_result(self.end(state, outputs), f"{type(self).__name__}.end")
        except BaseException:
            self._rescued_state = self._newest_state if checks.is_alive(self._newest_state) else None
            raise
        finally:
            self._newest_state = None  # It is the caller's.
        self._known_step = getattr(state, "step", None)
        outputs = self._with_num_examples(outputs)
        if self._was_interrupted:
            outputs[types.STOP_LOOP] = True
        return state, outputs

    def begin(self, state: Any, dataset: Any) -> tuple[Any, Iterator[types.Batch]]:
        """Runs before the first step; returns the state and the iterator to draw batches from."""
        return state, as_iterator(dataset)

    def run(self, state: Any, dataset: Iterator[types.Batch], num_steps: int | None) -> tuple[Any, metrics.LoopOutputs]:
        """Repeats the step; returns the newest state and the outputs of all steps."""
        outputs = metrics.LoopOutputs()
        queue = metrics.OutputQueue(self._chunk_size())
        place, step_name = "the dataset", repr(self._step)
        try:
            for number in itertools.count() if num_steps is None else range(num_steps):
                place = "the dataset"
                try:
                    batch = self._get_next_batch(dataset)
                except StopIteration:
                    break
                place = step_name
                num_examples = self._step.num_examples(batch)
                state, step_outputs = self._run_one_step(state, batch, number)
                self._newest_state = state
                self._num_examples.append(num_examples)
                if self._returns_new_state:
                    self._step_num += 1
                for arrived in queue.push(step_outputs, state):
                    outputs = self.update_outputs(outputs, arrived)
                if self._interrupt.requested:
                    self._was_interrupted = True
                    break
            rest, merged = queue.drain()
        except BaseException as error:
            if self._step.rescued_state is not None:  # Only what came after the update has failed.
                self._newest_state = self._step.rescued_state
                self._step_num += 1
            error.add_note(f"in {place}, after step {self._step_num}, in {self!r}")
            raise
        for arrived in rest:
            outputs = self.update_outputs(outputs, arrived)
        outputs.update({name: [metric] for name, metric in merged.items()})
        return state, outputs

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
        if self._returns_new_state:
            return self._step.step(state, batch, per_loop_step_number)
        return state, self._step.evaluate(state, batch, per_loop_step_number)

    def _with_num_examples(self, outputs: Any) -> metrics.LoopOutputs:
        if not isinstance(outputs, metrics.LoopOutputs):
            outputs = metrics.LoopOutputs(outputs)
        outputs.num_examples = list(self._num_examples)
        return outputs

    def _chunk_size(self) -> int:
        mesh = self._step.partitioner.mesh
        on_cpu_mesh = mesh is not None and mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"
        return _CHUNK_SIZE_CPU_MESH if on_cpu_mesh else _CHUNK_SIZE

    def _read_step_num(self, state: Any) -> int:
        count = getattr(state, "step", None)
        if count is None:
            return self._step_num
        if count is not self._known_step:
            return int(metrics.fetch(count))
        return self._step_num  # Reading it would wait for the device.


def as_iterator(dataset: Any) -> Iterator[Any]:
    """The iterator of a dataset; raises a `TypeError` that says what to give where there is none."""
    if hasattr(dataset, "__next__"):
        return dataset
    if isinstance(dataset, str | bytes | dict | np.ndarray | jax.Array) or not hasattr(dataset, "__iter__"):
        raise TypeError(
            f"A dataset is an iterator of batches, or an iterable, got {checks.describe(dataset)}. Give, for example, "
            "dataset.as_numpy_iterator(), or a list of dicts of arrays."
        )
    return iter(dataset)
