"""Detects NaN and infinity inside the compiled step.

The compiled step returns flags for non-finite values. The host reads these flags together with the step's outputs,
without additional synchronization.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal, final

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.sharding import PartitionSpec

from jaxloop import metrics, types
from jaxloop.base import checks

NanPolicy = Literal["raise", "skip", "ignore"]
POLICIES = ("raise", "skip", "ignore")

STAT_SKIPPED_STEPS = "jaxloop/skipped_steps"
"""The number of steps skipped by `nan_policy="skip"`; present only if any were skipped."""

FLAGS = "jaxloop/nonfinite"
"""The name of the output that contains a step's flags for non-finite values."""


class NonFiniteError(FloatingPointError):
    """Raised if a training step produces a NaN or an infinity.

    Attributes:
      step_num: The number of the first such step (the value of `state.step` after that step).
      names: The names of the non-finite values, such as `outputs/loss` or `params/Dense_0/kernel`.
    """

    def __init__(self, step_num: int, names: Sequence[str]):
        shown = checks.listed(names, show=6)
        if not any(name.startswith("outputs/") for name in names):
            shown += (
                ", but no loss. A value that is NaN has a NaN gradient even if its weight is 0, so replace NaN in the "
                "batch before computing with it: labels = jnp.where(mask, labels, 0)"
            )
        super().__init__(
            f"Step {step_num} is the first with NaN or infinity: {shown}. Check the batch of that step, lower the "
            "learning rate, or clip the gradients (optax.clip_by_global_norm). To skip such steps, use "
            "TrainLoop(..., nan_policy='skip'); to ignore them, nan_policy='ignore'."
        )
        self.step_num: int = step_num
        self.names: tuple[str, ...] = tuple(names)


@final
class Detector:
    """Wraps a step's `run` so that its compiled program also returns flags for non-finite values.

    There is one flag per floating-point leaf. The flags cover the new `params`, the new `batch_stats`, and the outputs
    whose names contain "loss". (If the state has no `params`, they cover the whole new state and these outputs.) Other
    outputs aren't checked, because they may legitimately be NaN for some batches.

    Args:
      run: A function `(state, batch) -> (state, outputs)`.
      policy: The `nan_policy`. With "skip", a step with non-finite values leaves the state unchanged except for `step`.
      on_mesh: Whether the function is compiled for a mesh.
    """

    def __init__(self, run: Callable[[Any, Any], tuple[Any, types.Output]], policy: NanPolicy, on_mesh: bool):
        self._run, self._policy, self._on_mesh = run, policy, on_mesh
        self._names: list[str] = []

    def run(self, state: Any, batch: Any) -> tuple[Any, types.Output]:
        """Runs a step, applies the policy, and adds the flags to the outputs."""
        new_state, outputs = self._run(state, batch)
        values = {**_losses(outputs), **_watched_leaves(new_state)}
        self._names = list(values)
        row = jnp.stack([_is_bad(leaf) for leaf in values.values()] or [jnp.zeros((), bool)])
        if self._on_mesh:
            row = jax.lax.with_sharding_constraint(row, PartitionSpec())
        if self._policy == "skip":
            is_bad = row.any()
            new_state = _unchanged_where(is_bad, state, new_state)
            outputs = outputs and {name: _empty_where(is_bad, value) for name, value in outputs.items()}
        return new_state, {**(outputs or {}), FLAGS: row}

    def names(self, row: np.ndarray) -> list[str]:
        """Returns the names of the values that are marked as non-finite by `row`, the flags of one step."""
        return list(itertools.compress(self._names, row))


def names(state: Any, outputs: types.Output) -> list[str]:
    """Returns the names of the non-finite values in a step's state and outputs. Synchronizes with the devices.

    Checks the same values as `Detector`.
    """
    leaves = {**_losses(outputs), **_watched_leaves(state)}
    return [name for name, is_bad in metrics.fetch(jax.tree.map(_is_bad, leaves)).items() if is_bad]


def _losses(outputs: types.Output) -> dict[str, Any]:
    leaves = checks.leaves_by_path(dict(outputs or {}))
    return {f"outputs/{name}": leaf for name, leaf in leaves.items() if "loss" in name.lower() and _floats(leaf)}


def _watched_leaves(state: Any) -> dict[str, Any]:
    parts = state
    if hasattr(state, "params"):
        parts = {name: getattr(state, name, {}) for name in ("params", "batch_stats")}
    return {name: leaf for name, leaf in checks.leaves_by_path(parts).items() if _floats(leaf)}


def _floats(leaf: Any) -> bool:
    return jnp.issubdtype(getattr(leaf, "dtype", np.int32), jnp.inexact) and leaf.size > 0


def _is_bad(leaf: Any) -> jax.Array:
    # Each finite value yields zero, and any other NaN. XLA's CPU reductions of `isfinite` take several times longer.
    return jnp.isnan((leaf * 0).sum())


def _unchanged_where(is_bad: jax.Array, old: Any, new: Any) -> Any:
    """Returns the new state or, after a bad step, the old state with the new value of `step`."""
    choose = lambda path, a, b: b if checks.path_name(path) == "step" else jnp.where(is_bad, a, b)
    return jax.tree_util.tree_map_with_path(choose, old, new)


def _empty_where(is_bad: jax.Array, value: Any) -> Any:
    """Excludes an output of a bad step from means, by resetting a metric to its empty state or a weight to 0."""
    if isinstance(value, types.Weighted):
        return types.Weighted.of(value.value, jnp.where(is_bad, 0, value.weight))
    if not metrics.is_metric(value) or metrics.merges_on_host(value):  # A metric that collects values can't be empty.
        return value
    return jax.tree.map(lambda a, b: jnp.where(is_bad, jnp.asarray(a, b.dtype), b), value.empty(), value)


@final
class Guard:
    """Applies a `nan_policy` to the flags from a `Detector` as they arrive on the host.

    Args:
      policy: "raise" or "skip".
      names: A function that receives the flags of a step and returns the names of the non-finite values.
      step_of: A function that converts a position in the outputs to the number of the step at that position.

    Attributes:
      error: The error to raise for the first bad step. None if there is no such step or the policy is "skip".
      skipped: The skipped steps, as positions in the outputs. Empty if the policy is "raise".
    """

    def __init__(self, policy: NanPolicy, names: Callable[[np.ndarray], list[str]], step_of: Callable[[int], int]):
        self._policy, self._names, self._step_of = policy, names, step_of
        self.error: NonFiniteError | None = None
        self.skipped: list[int] = []
        self._untold: list[tuple[int, list[str]]] = []

    def inspect(self, columns: dict[str, Any], first: int, examples: list[int]) -> list[int]:
        """Removes the flags from the outputs of consecutive steps and records bad steps. Returns the steps' weights.

        A step's weight is its number of examples, or 0 if the step is skipped.

        Args:
          columns: A dict that maps the name of each output to its values, one row per step.
          first: The position in the outputs at which these steps begin.
          examples: The number of examples in each of these steps.
        """
        flags, weights = columns.pop(FLAGS, None), list(examples)
        if flags is None:
            return weights
        for index in np.flatnonzero(np.any(flags, axis=1)):
            place, names = first + int(index), self._names(flags[index])
            if self._policy == "raise":
                self.error = self.error or NonFiniteError(self._step_of(place), names)
                continue
            self.skipped.append(place)
            weights[index] = 0
            self._untold.append((self._step_of(place), names))
        return weights

    def check(self) -> None:
        """Raises the error for the first bad step, if there is one."""
        if self.error is not None:
            raise self.error

    def report(self, who: str) -> None:
        """Logs a warning about the steps that were skipped since the last report. `who` describes the loop."""
        if self._untold:
            (step_num, names), number, self._untold = self._untold[0], len(self._untold), []
            text = "%s skipped %d step%s with values that are not finite, the first of them step %d: %s."
            logging.warning(text, who, number, "s" if number > 1 else "", step_num, ", ".join(names[:6]))

    def measure(self, start: int) -> dict[str, int]:
        """Returns a dict with the number of steps skipped since position `start`, or an empty dict if none were."""
        number = sum(place >= start for place in self.skipped)
        return {STAT_SKIPPED_STEPS: number} if number else {}
