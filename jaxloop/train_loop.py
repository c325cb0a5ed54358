"""A loop that trains."""

import time
from collections.abc import Callable, Sequence
from typing import Literal

from jaxloop import bad_numbers
from jaxloop.action_loop import ActionLoop
from jaxloop.actions.action import Action
from jaxloop.bad_numbers import STAT_SKIPPED_STEPS as STAT_SKIPPED_STEPS
from jaxloop.output_queue import chunk_size
from jaxloop.step import Step


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
        stepper = self.engine.stepper
        stepper.checks_count = True
        stepper.set_steps_per_dispatch(steps_per_dispatch)
        if nan_policy != "ignore" and (stepper.steps_at_once or 1) > bad_numbers.MAX_STEPS:
            raise ValueError(
                f"With nan_policy={nan_policy!r}, steps_per_dispatch can be {bad_numbers.MAX_STEPS} at most, got "
                f"{steps_per_dispatch}."
            )
        if nan_policy != "ignore":
            stepper.guard = bad_numbers.Guard(bad_numbers.Watch(nan_policy, chunk_size(stepper.max_in_flight)))

    @property
    def nan_policy(self) -> bad_numbers.NanPolicy:
        """What is done about numbers that are not finite."""
        return self.engine.stepper.guard.policy
