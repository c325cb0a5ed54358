"""`TrainLoop`, the training loop."""

from collections.abc import Sequence

from jaxloop.action_loop import ActionLoop
from jaxloop.actions.action import Action
from jaxloop.step import Step, nonfinite
from jaxloop.step.nonfinite import STAT_SKIPPED_STEPS as STAT_SKIPPED_STEPS


class TrainLoop(ActionLoop):
    """A training loop. Each step updates the state, which the loop then passes to the next step.

    Hooks:
      begin: See `Loop`.
      end: See `Loop`. An override must call `super().end(...)`, which adds the statistics. The actions receive the
        state and the outputs that the override returns.
      run, update_outputs, _get_next_batch, _run_one_step: See `Loop`.

    >>> from jaxloop import examples
    >>> step, state, batches = examples.tiny_regression()
    >>> train_loop = TrainLoop(step)
    >>> state, outputs = train_loop(state, batches, num_steps=100)
    >>> int(state.step), bool(outputs["loss"][-1] < outputs["loss"][0])
    (100, True)

    With a `nan_policy` other than "ignore", the compiled step checks for NaN and infinity. It checks the new `params`
    and `batch_stats`, where non-finite gradients show up, and the outputs with "loss" in their names. (If the state has
    no `params`, it checks the whole state and these outputs.) Other outputs aren't checked, because they may be
    undefined for some batches.

    >>> batches[2]["x"][0, 0] = float("nan")
    >>> step, state, _ = examples.tiny_regression()
    >>> try:
    ...     TrainLoop(step, nan_policy="raise")(state, batches, num_steps=100)
    ... except FloatingPointError as error:
    ...     print(error.step_num, error.names)
    3 ('outputs/loss', 'params/bias', 'params/kernel')

    Args:
      step: The step to run on each batch, created with `train=True`.
      stat_names: See `StatLoop`.
      begin_actions, end_actions: See `ActionLoop`.
      global_batch_size: See `StatLoop`.
      nan_policy: The response to a bad step, which is a step with NaN or infinity in the checked values. "raise" raises
        a `nonfinite.NonFiniteError` that reports the first bad step. The host reads the results of the check about
        every 64 steps and before each save, so the state of a bad step is never saved. "skip" discards the update of a
        bad step: only `state.step` changes, and the step's outputs are left out of means. If any steps were skipped,
        `outputs["jaxloop/skipped_steps"]` is their number.
        "skip" needs device memory for a second copy of the state. It also replaces the `clu.metrics` states of a bad
        step with empty ones, except for metrics that collect values. "ignore" disables the check. On two CPU cores, a
        step takes up to 1.3 times as long with "raise" and up to 1.5 times as long with "skip".
      steps_per_dispatch: The number of steps in one dispatch, which scans `run` over that many batches. With more than
        one step per dispatch, small models train several times faster, but convolutions on a CPU run ten times slower.
        A dispatch never runs past the end of a loop or a dataset, or past a step at which a schedule fires: if too few
        steps are left before such a point, they are dispatched one at a time. Time schedules are an exception: they
        can't be predicted, so they fire only after the dispatch has ended. The results are the same as with one step
        per dispatch, except that XLA may round the last bit differently. `Step.begin` receives the state before the
        dispatch and must not change it. With more than one step per dispatch, a `ValueError` is raised if the step has
        actions, if it overrides `end`, `shard_batch` or `__call__`, or if the loop overrides `_run_one_step`.
      max_steps_in_flight: See `Loop`.
    """

    def __init__(
        self,
        step: Step,
        stat_names: Sequence[str] | None = None,
        begin_actions: Sequence[Action] | None = None,
        end_actions: Sequence[Action] | None = None,
        global_batch_size: int | None = None,
        *,
        nan_policy: nonfinite.NanPolicy = "ignore",
        steps_per_dispatch: int = 1,
        max_steps_in_flight: int | None = None,
    ):
        if isinstance(step, Step) and not step.train:
            raise ValueError(
                f"{type(self).__name__} got {step!r}, a step with train=False, whose run would not train, or would "
                f"train a model in evaluation mode. Make it with {type(step).__name__}(..., train=True)."
            )
        super().__init__(
            step,
            begin_actions,
            end_actions,
            stat_names,
            global_batch_size,
            max_steps_in_flight=max_steps_in_flight,
        )
        if nan_policy not in nonfinite.POLICIES:
            raise ValueError(f"nan_policy must be one of 'raise', 'skip' and 'ignore', got {nan_policy!r}.")
        self.engine.options.checks_count, self.engine.options.nan_policy = True, nan_policy
        self.engine.set_steps_per_dispatch(steps_per_dispatch)

    @property
    def nan_policy(self) -> nonfinite.NanPolicy:
        """The policy for NaN and infinity: "raise", "skip" or "ignore"."""
        return self.engine.options.nan_policy
