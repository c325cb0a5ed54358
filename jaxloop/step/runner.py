"""Runs a `Step`: calls its hooks and actions in order, dispatches `run`, and keeps track of the step's states.

Each step delegates this work to its own `Runner`, so that `Step` itself defines only what users need.
"""

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from jaxloop import metrics, types
from jaxloop.actions.action import Action, as_action, call_action, is_due
from jaxloop.base import checks
from jaxloop.schedules import Elapsed, Schedule
from jaxloop.step import forward, nonfinite
from jaxloop.step.compiled import Programs


class Runner:
    """Passes batches through a step's hooks in order and calls the step's actions.

    Hooks:
      watch_class: The class of `batch_watch`.
      place: Places a batch, or several stacked batches, on the devices.
      ready_batch: Passes a batch through the hooks that precede `run`, if these hooks don't need the state.
      filler: Returns the function that sets the size of padded batches.
      explain: Adds a note about the batch to an error that a step raised.

    Args:
      step: The step.
      base: The class `Step`, which defines the default hooks.
      begin_actions: The actions to call before `run`.
      end_actions: The actions to call after `end`.

    Attributes:
      step: The step.
      batch_watch: The object that checks training batches before they are passed to `run`, and counts their rows.
      programs: The compiled versions of `run`.
      states: The object that prepares states and remembers the last state that the step returned.
      action_lists: `(begin_actions, end_actions)`, each in the order in which its actions are called.
      has_schedules: True if any of the step's actions has a schedule as its interval.
    """

    watch_class = checks.BatchWatch

    def __init__(
        self, step: Any, base: type, begin_actions: Sequence[Action] | None, end_actions: Sequence[Action] | None
    ):
        self.step: Any = step
        self._base = base
        self.batch_watch: checks.BatchWatch = self.watch_class()
        self.programs: Programs = Programs(step, self.batch_watch)
        self.states: States = States(step)
        begin, end = (tuple(map(as_action, actions or ())) for actions in (begin_actions, end_actions))
        self.action_lists: tuple[Sequence[Action], Sequence[Action]] = begin, end
        self.has_schedules: bool = any(isinstance(action.interval, Schedule) for action in (*begin, *end))
        self._has_warned_of_count = False

    def has_own(self, name: str) -> bool:
        """Returns True if the step or its class overrides the `Step` method that has the given name."""
        return checks.is_overridden(self.step, name, self._base)

    def work_for_each_step(self, *, evaluates: bool = False) -> str | None:
        """Returns the reason why a loop can't fuse several steps into one dispatch, or None if it can.

        The reason always names host code that must run for each step.

        Args:
          evaluates: Whether to consider evaluation rather than training.
        """
        for name in ("evaluate" if evaluates else "__call__", "end"):
            if self.has_own(name):
                return f"it has its own `{name}`, which is called after each step"
        if checks.is_user_defined(self.step, "shard_batch"):
            return "it has its own `shard_batch`, which places one batch"
        if any(self.action_lists):
            return "it has actions, which are called for each step; move them to the loop, with a schedule"
        return None

    # Before `run` --------------------------------------------------------------------------------

    def count_examples(self, batch: types.Batch) -> int:
        """Returns the result of `num_examples` as an int.

        Raises:
          ValueError: If the result is negative or not a whole number.
        """
        step = self.step
        value = step.num_examples(batch)
        count = checks.whole_number(value)
        if count is None:
            raise ValueError(
                f"{type(step).__name__}.num_examples must return the number of examples in the batch, a whole number, "
                f"got {value!r} for {checks.batch_in_words(batch)}."
            )
        is_default = count == 1 and not self._has_warned_of_count and not checks.is_user_defined(step, "num_examples")
        if is_default and checks.num_examples(batch) is None:
            self._has_warned_of_count = True
            logging.warning(
                "%r counts each batch as one example, because its leaves don't share a leading axis. Override "
                "Step.num_examples(batch) for weighted means.",
                step,
            )
        return count

    def ready_batch(self, batch: types.Batch) -> tuple[types.Batch, int] | None:
        """Passes a batch through the hooks that precede `run`, if these hooks don't need the state.

        A small step takes about 10% less time if the loop doesn't have to assemble the state for the hooks.

        Returns:
          The batch for `run` and the number of examples in the batch, or None if the hooks need the state. The default
          implementation returns None.
        """
        return None

    def filler(self) -> Callable[[int], None] | None:
        """Returns a function that sets the size to which short batches are padded.

        Returns None if short batches can't be padded. The default implementation returns None.
        """
        return None

    def preprocessed(self, batch: types.Batch) -> types.Batch:
        """Calls `preprocess_batch` and returns its result.

        Raises:
          TypeError: If the result is None, although the batch wasn't None.
        """
        ready = self.step.preprocess_batch(batch)
        if ready is None and batch is not None:
            raise TypeError(f"{type(self.step).__name__}.preprocess_batch returned None. Return the batch.")
        return ready

    def before_run(self, state: Any, batch: types.Batch) -> tuple[Any, types.Batch]:
        """Passes a prepared state and a batch from the dataset through the hooks that precede `run`."""
        result = self.step.begin(state, self.preprocessed(batch))
        new_state, batch = checks.check_pair(result, f"{type(self.step).__name__}.begin", "(state, batch)")
        return state if new_state is state else self.states.prepare(new_state), batch

    def begin(self, state: Any, batch: types.Batch, number: int, elapsed: Elapsed) -> tuple[Any, types.Batch]:
        """Passes a batch through the hooks that precede `run`, and then calls the begin actions that are due.

        Args:
          state: The prepared state.
          batch: A batch from the dataset.
          number: The number of steps before this one in the current loop.
          elapsed: The run's progress after this step.
        """
        state, batch = self.before_run(state, batch)
        _call_due(self.action_lists[0], state, None, number, elapsed)
        return state, batch

    # `run` ---------------------------------------------------------------------------------------

    @property
    def places_batches(self) -> bool:
        """True if each training batch must be passed to `place` before `run`."""
        step, places = self.step, type(self).place is not Runner.place
        is_own = places or checks.is_user_defined(step, "shard_batch")
        return is_own or (step._should_shard_batch and step.partitioner.places_batches)

    def place(self, batch: types.Batch, *, evaluates: bool = False, fuses: bool = False) -> types.Batch:
        """Places a batch on the devices, normally with `shard_batch`.

        In an evaluation, a batch that can't be divided evenly among the devices is replicated, unless `shard_batch` is
        overridden.

        Args:
          batch: The batch.
          evaluates: Whether the batch is used in an evaluation.
          fuses: Whether `batch` consists of several batches, stacked along a new leading axis.
        """
        step = self.step
        if fuses:
            return step._partitioner.shard_stacked_batches(batch) if step._should_shard_batch else batch
        if evaluates and step._should_shard_batch and not self.has_own("shard_batch"):
            return step._partitioner.shard_short_batch(batch)
        return step.shard_batch(batch)

    def dispatch(self, state: Any, batch: types.Batch, *, evaluates: bool = False) -> tuple[Any, types.Output]:
        """Dispatches `run` on a batch that has already passed through the preceding hooks."""
        compiled = self.programs.compiled(evaluates=evaluates)
        try:
            carry, outputs = compiled.call(compiled.enter(state), self.place(batch, evaluates=evaluates))
        except Exception as error:
            self.explain(error, batch)
            raise
        return compiled.leave(carry), outputs

    def explain(self, error: Exception, batch: types.Batch) -> None:
        """Adds a note about the batch to a step's error. If the batch is invalid, raises a different error instead."""
        if isinstance(error, TypeError | ValueError):
            checks.check_batch(batch)
        if batch is None:
            error.add_note("without a batch, because the dataset is None. If the step needs data, give a dataset.")
        else:
            error.add_note(f"with {checks.batch_in_words(batch)}")
            if any(np.ndim(leaf) == 0 for leaf in checks.batch_leaves(batch).values() if not isinstance(leaf, str)):
                error.add_note(
                    "Some of its leaves have no axis. If the dataset yields examples instead of batches, write "
                    "jaxloop.data.batched(dataset, 64, seed=0)."
                )

    # After `run` ---------------------------------------------------------------------------------

    def end(self, state: Any, outputs: types.Output, number: int, elapsed: Elapsed) -> tuple[Any, types.Output]:
        """Calls the `end` hook, and then the end actions that are due. For `number` and `elapsed`, see `begin`."""
        flags = (outputs or {}).get(nonfinite.FLAGS)
        if flags is not None:  # The hook and the actions receive only the step's own outputs.
            own = {name: value for name, value in (outputs or {}).items() if name != nonfinite.FLAGS}
            state, outputs = self.end(state, own or None, number, elapsed)
            return state, {**(outputs or {}), nonfinite.FLAGS: flags}
        if self.has_own("end"):
            with jax.profiler.TraceAnnotation("jaxloop: end"):
                result = self.step.end(state, outputs)
            state, outputs = checks.check_result(result, f"{type(self.step).__name__}.end")
            outputs = _copy_donated(outputs, state)
        _call_due(self.action_lists[1], state, outputs, number, elapsed)
        return state, outputs


def _call_due(actions: Sequence[Action], state: Any, outputs: types.Output, number: int, elapsed: Elapsed) -> None:
    for action in actions:
        if is_due(action, number + 1, elapsed):
            step_num = int(metrics.fetch(getattr(state, "step", 0)))
            call_action(action, state, outputs, dataclasses.replace(elapsed, steps=step_num))


def _copy_donated(outputs: types.Output, state: Any) -> types.Output:
    """Copies outputs that are also leaves of the state, so that donating the state doesn't make them unreadable."""
    donated = {id(leaf) for leaf in jax.tree.leaves(state)}
    return jax.tree.map(lambda leaf: jnp.copy(leaf) if id(leaf) in donated else leaf, outputs)


def shapes_for_run(step: Any, state: Any, batch: types.BatchSpec) -> tuple[Any, types.Batch]:
    """Passes a state and a batch through the hooks that precede `run`, and returns the results.

    Both the arguments and the results may be abstract.
    """
    runner = step._runner
    is_abstract = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(state))
    state = jax.tree.map(_shape_in_run, state) if is_abstract else runner.states.prepare(state)
    state, batch = runner.before_run(state, forward.example_batch(batch))
    if checks.is_user_defined(step, "shard_batch") or checks.is_user_defined(step.partitioner, "shard_batch"):
        return state, batch  # A custom `shard_batch` may accept only arrays.
    return state, jax.tree.map(forward.shape_of_array, batch)


def _shape_in_run(leaf: Any) -> Any:
    """Returns an abstract leaf without its sharding if the sharding refers to a single available device.

    Otherwise, returns the leaf unchanged. A program that is compiled for leaves without shardings can be reused when
    the step runs.
    """
    if not isinstance(leaf.sharding, jax.sharding.SingleDeviceSharding) or leaf.sharding.device_set.isdisjoint(
        jax.devices()
    ):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=leaf.weak_type)


_NOTHING: Callable[[], Any] = lambda: None


@final
class States:
    """Prepares states for a step and remembers the state that the step last returned.

    Args:
      step: The step.

    Attributes:
      initialize: A function that recreates the state that `initialize_model` last returned, or None if that method was
        never called.
      rescued: The state that `run` returned, if `end` or an end action raised an error in the most recent step;
        otherwise None.
    """

    def __init__(self, step: Any):
        self._step = step
        self.initialize: Callable[[], Any] | None = None
        self.rescued: Any = None
        # Weak references to a state that was not donated, and to one of its leaves that the next step will donate.
        self._known_state = self._known_leaf = _NOTHING

    def initial(self) -> Any:
        """Recreates the state that `initialize_model` last returned.

        Raises:
          ValueError: If `initialize_model` was never called.
        """
        if self.initialize is None:
            raise ValueError(
                f"The structure of the state is unknown. Call initialize_model(...) of {self._step!r} first, or give "
                "state=..."
            )
        return self.initialize()

    def prepare(self, state: Any) -> Any:
        """Converts a state to the form that `run` needs: all leaves are arrays on the partitioner's devices.

        The state that this step last returned or prepared isn't checked again.

        Raises:
          ValueError: If the state was donated to an earlier call. (With several CPU devices, using such a state would
            crash the process.)
        """
        self.rescued = None
        if self._is_known(state):
            return state
        checks.check_alive(state, repr(self._step))
        state = self._step.partitioner.place_state(checks.adopt(state))
        self.remember(state)
        return state

    def _is_known(self, state: Any) -> bool:
        if self._known_state() is not state:
            return False
        leaf = self._known_leaf()  # Another step may have donated it since.
        return leaf is not None and not leaf.is_deleted()

    def remember(self, state: Any, carry: Any = None) -> None:
        """Records the last state that this step returned, so that `prepare` doesn't check it again.

        Args:
          state: The state.
          carry: A carry of `Compiled` that contains the same state. If given, the method is faster, because it doesn't
            have to flatten the state.
        """
        # Compares by identity: `state.replace(...)` makes a new object, which may contain a donated leaf.
        leaf = checks.donated_leaf(state if carry is None else carry) if hasattr(state, "step") else None
        self._known_state, self._known_leaf = (_NOTHING, _NOTHING) if leaf is None else map(weakref.ref, (state, leaf))
