"""A loop that trains."""

import collections
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import numpy as np
from absl import logging

from jaxloop import bad_numbers, checks, metrics, timing, types
from jaxloop.action_loop import ActionLoop
from jaxloop.actions.action import Action
from jaxloop.output_queue import chunk_size
from jaxloop.schedules import Elapsed
from jaxloop.step import Step

STAT_SKIPPED_STEPS = "jaxloop/skipped_steps"
"""How many steps of a call `nan_policy="skip"` has left out; only where it has."""

# Batches that are kept for the record of a failure: for as many steps as may be under way, within this many bytes.
_KEPT_BATCHES = 64
_KEPT_BYTES = 256 * 2**20


class TrainLoop(ActionLoop):
    """Trains: each step makes one optimizer update, and the state that comes out goes into the next.

    Hooks:
      begin, end: see `Loop`; call those of `super()`, which measure, and call the actions.
      run, update_outputs, _get_next_batch, _run_one_step: see `Loop`.

    >>> from jaxloop import examples
    >>> step, state, batches = examples.tiny_regression()
    >>> train_loop = TrainLoop(step)
    >>> state, outputs = train_loop(state, batches, num_steps=100)
    >>> int(state.step), bool(outputs["loss"][-1] < outputs["loss"][0])
    (100, True)

    With a `nan_policy`, numbers that are not finite (NaN, inf) are looked for inside the compiled step: in the new
    `params` and `batch_stats`, where such gradients end up (of a state without `params`, in all of it), and in the
    outputs with "loss" in their name. Other outputs may be undefined in some batches.

    >>> batches[2]["x"][0, 0] = float("nan")
    >>> step, state, _ = examples.tiny_regression()
    >>> try:
    ...     TrainLoop(step, nan_policy="raise")(state, batches, num_steps=100)
    ... except FloatingPointError as error:
    ...     print(error.step_num, error.names)
    3 ('outputs/loss', 'params/bias', 'params/kernel')

    Args:
      step: what happens to one batch; made with `train=True`.
      stat_names: see `StatLoop`.
      begin_actions: see `ActionLoop`, as `end_actions`.
      global_batch_size: see `StatLoop`, as `clock`.
      nan_policy: "raise" for a `bad_numbers.BadNumberError`, which names the first bad step. The loop does not wait
        for the devices to find out: the host looks at flags that are there, once in 32 steps, and at the rest
        before a checkpoint is saved, so that none is of a state from a bad step on. "skip" to leave such a step out:
        the state stays bit by bit what it was, but for `state.step`, which counts on. Its outputs are in the lists,
        and have no weight in means; states of `clu.metrics` are emptied, unless they collect values; the number of
        such steps is in `outputs["jaxloop/skipped_steps"]`. The devices then hold a second copy of the state during a
        step. "ignore" to look at nothing, which costs nothing. Measured on two CPU cores, "raise" makes a step of a
        small CNN 1.0 times as long, one of 2M parameters in 193 leaves with Adam 1.05 to 1.25 times, and one of 0.1 ms
        1.1 to 1.3 times; "skip" 1.0, 1.3 to 1.5 and 1.1 to 1.2 times.
      steps_per_dispatch: how many steps the devices take at a time, in one dispatch that scans `run` over as many
        batches. For small models, whose steps take less time than to start them, several times faster; on a CPU
        convolutions are ten times slower so. What happens between two steps on the host (schedules, the end of a loop
        or of the data) is done at its exact step: up to there steps are taken one by one. Only a schedule of time,
        which nobody knows in advance, fires after the dispatch in which its time comes. What comes out is the same, but
        XLA may round otherwise in the last bit. `Step.begin` is called for each batch, with the state before the
        dispatch, and may not change it; a Step with actions or with an `end` of its own is a ValueError. "auto" tries
        1 and 32 on the first 32 batches, with copies of the state, and keeps what is faster, for a checkpoint's resume
        too; the hooks before `run` are called more often then. In several processes it is 1.
      max_steps_in_flight: see `Loop`.
    """

    def __init__(
        self,
        step: Step,
        stat_names: Sequence[str] | None = None,
        begin_actions: Sequence[Action] | None = None,
        end_actions: Sequence[Action] | None = None,
        global_batch_size: int | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
        nan_policy: bad_numbers.NanPolicy = "ignore",
        steps_per_dispatch: int | Literal["auto"] = 1,
        max_steps_in_flight: int | None = None,
    ):
        if isinstance(step, Step) and not step.train:
            raise ValueError(
                f"{type(self).__name__} got {step!r}, a step with train=False: its run would not train, or would train "
                f"a model in evaluation mode. Make it with {type(step).__name__}(..., train=True)."
            )
        super().__init__(
            step,
            begin_actions,
            end_actions,
            stat_names,
            global_batch_size,
            clock=clock,
            max_steps_in_flight=max_steps_in_flight,
        )
        if nan_policy not in bad_numbers.POLICIES:
            raise ValueError(f"nan_policy must be one of 'raise', 'skip' and 'ignore', got {nan_policy!r}.")
        self._set_steps_per_dispatch(steps_per_dispatch)
        if nan_policy != "ignore" and (self._steps_at_once or 1) > bad_numbers.MAX_STEPS:
            raise ValueError(
                f"With nan_policy={nan_policy!r}, steps_per_dispatch can be {bad_numbers.MAX_STEPS} at most, got "
                f"{steps_per_dispatch}."
            )
        watch = None if nan_policy == "ignore" else bad_numbers.Watch(nan_policy, chunk_size(self._max_in_flight))
        self._guard = bad_numbers.Guard(watch)
        self._kept = _KeptBatches()
        self._most_steps: int | None = None  # What `state.step` can count to; None until the first steps were counted.

    @property
    def nan_policy(self) -> bad_numbers.NanPolicy:
        """What is done about numbers that are not finite."""
        return self._guard.policy

    @property
    def failed_step(self) -> int | None:
        """Which step the last call failed in, if it did: it was to make `state.step` this number."""
        return self._call.failed_step

    @property
    def kept_batches(self) -> dict[int, types.Batch]:
        """The last batches, as the dataset gave them, by their steps; only in a run that wants them."""
        failed, updates = self._call.failed_step, self._updates
        newest = self.step_num + (updates if failed == self.step_num + updates else 0)
        batches = list(self._kept.batches)
        first = newest - (len(batches) - 1) * updates
        return dict(zip(range(first, newest + 1, updates), batches, strict=True))

    def _run_loops(
        self, state: Any, dataset: Any, steps_of_loop: Callable[[], int | None], *, trains: bool
    ) -> tuple[Any, metrics.LoopOutputs]:
        if self._call.failed_step is not None:
            self._kept = _KeptBatches()
        self._guard.bad = None
        with self._step.watched(self._guard.watch if trains else None):
            return super()._run_loops(state, dataset, steps_of_loop, trains=trains)

    def compile(self, state: Any, batch: types.BatchSpec) -> None:
        with self._step.watched(self._guard.watch):
            super().compile(state, batch)

    def resume(self, elapsed: Elapsed) -> None:
        super().resume(elapsed)
        self._kept = _KeptBatches()

    def _begin_loop(self) -> None:
        super()._begin_loop()
        self._guard.begin_loop()

    def _observers(self) -> list[Callable[[types.Batch], None]]:
        keeps = self.run_info is not None and self.run_info.keeps_batches
        return [*super()._observers(), *([self._kept.add] if keeps else [])]

    def _hears_all_ends(self) -> bool:
        # What was found is told, and left out of means, loop by loop.
        return self._guard.watch is not None or super()._hears_all_ends()

    # Bad numbers -------------------------------------------------------------------------------------

    def _push(self, state: Any, num_steps: int) -> None:
        super()._push(state, num_steps)
        self._check_count(state)
        self._look_at(self._guard.look(state, in_step=self._job.is_shared))

    def _count_weights(self) -> None:
        self._look_at(self._guard.read(self._call.state))
        if new := self._guard.newly_skipped():
            logging.warning(
                "%r left out %d step%s whose numbers were not finite, the first of them step %d: %s.",
                self,
                len(new),
                "s" if len(new) > 1 else "",
                self._step_at(new[0].index),
                ", ".join(new[0].names[:6]),
            )
        super()._count_weights()

    def _look_at(self, bad: bad_numbers.Found | None) -> None:
        if bad is not None and self._guard.bad is None:
            self._guard.bad = bad_numbers.BadNumberError(self._step_at(bad.index), bad.names)
            self._call.failed_step = self._guard.bad.step_num
            if not self._call.is_failing:
                raise self._guard.bad

    def _step_at(self, index: int) -> int:
        """Returns the step number after a batch of the loop."""
        return self._progress.steps - (len(self.num_examples) - 1 - index) * self._updates

    def _rescue_outputs(self, error: BaseException) -> None:
        if error is self._guard.bad:
            return
        super()._rescue_outputs(error)
        if self._guard.bad is not None:
            error.add_note(f"before that: {self._guard.bad}")

    def _why_not_rescued(self) -> str | None:
        if self._guard.bad is not None:
            return "its numbers are bad"
        problem = super()._why_not_rescued()
        if problem is None:
            try:
                self._check_count(self._call.state)
            except Exception as error:  # Also what the devices raise when the count is read.
                problem = str(error)
        return problem

    def _weights(self) -> list[int]:
        return self._guard.weights(super()._weights())

    def _stats(self, state: Any, spent: timing.Spent | None = None) -> dict[str, Any]:
        number = len(self._guard.skipped)
        return {**super()._stats(state, spent), **({STAT_SKIPPED_STEPS: number} if number else {})}

    # The count ---------------------------------------------------------------------------------------

    def _check_count(self, state: Any) -> None:
        """Raises where `state.step` is not what the loop has counted; reads it after the first steps alone."""
        if not self._trains or not hasattr(state, "step"):
            return
        step_num, batches = self._progress.steps, len(self.num_examples)
        most_steps = self._most_steps or np.iinfo(getattr(state.step, "dtype", np.int64)).max
        if step_num > most_steps:
            raise ValueError(
                f"state.step, {checks.describe(state.step)}, counts to {most_steps}, and should be {step_num} by now. "
                "Begin with a smaller state.step."
            )
        if self._most_steps is not None:
            return
        count = int(metrics.fetch(state.step))
        if count != step_num:
            begin = step_num - batches * self._updates
            raise ValueError(
                f"{self.step!r} ran on {batches} batch{'es' if batches > 1 else ''} from state.step {begin}, and "
                f"state.step is now {count}, not {step_num}. {checks.ways_to_count(self.step)}"
            )
        self._most_steps = int(most_steps) if batches else None


class _KeptBatches:
    """The last batches, for the record of a failure: those of the steps that may be under way, within some bytes.

    Attributes:
      batches: the batches, the newest last.
    """

    def __init__(self):
        self.batches: collections.deque[types.Batch] = collections.deque()

    def add(self, batch: types.Batch) -> None:
        """Keeps a batch, and as many before it as there is room for."""
        if not self.batches:
            size = sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(batch))
            self.batches = collections.deque(maxlen=min(_KEPT_BATCHES, max(1, _KEPT_BYTES // max(size, 1))))
        self.batches.append(batch)
