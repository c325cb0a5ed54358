"""Detects NaN and infinity inside the compiled step.

The host reads the results when it reads other values anyway.
"""

import collections
import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxloop import checks, metrics, structures, types

NanPolicy = Literal["raise", "skip", "ignore"]
POLICIES = ("raise", "skip", "ignore")

STAT_SKIPPED_STEPS = "jaxloop/skipped_steps"
"""The number of steps skipped by `nan_policy="skip"`; present only if any were skipped."""

# The number of steps for which the devices keep flags.
MAX_STEPS = _ROWS = 32

# The number of flags in one word, and the length of the rows in which parameters are checked on a CPU.
_WORD, _COLUMNS = 32, 64

# The number of flags for outputs. The last one is shared by all remaining outputs.
_OUTPUT_FLAGS = 8


class NonFiniteError(FloatingPointError):
    """Raised if a training step produces NaN or infinity.

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
    """Wraps a step's `run` so that the same compiled program also returns flags for non-finite values.

    It checks the floating-point leaves of the new `params` and `batch_stats` (or of the whole state if it has no
    `params`), and the outputs whose names contain "loss". Other outputs aren't checked, because they may legitimately
    be NaN for some batches.

    Args:
      run: A function `(state, batch) -> (state, outputs)`.
      policy: The `nan_policy`. With "skip", a bad step leaves the state unchanged except for `step`.
      on_mesh: True if the function is compiled for a mesh.
    """

    def __init__(self, run: Callable[[Any, Any], tuple[Any, types.Output]], policy: NanPolicy, on_mesh: bool):
        self._run, self._policy, self._on_mesh = run, policy, on_mesh
        self._output_names: list[str] = []

    def run(self, state: Any, batch_and_flags: Any) -> tuple[Any, Any]:
        """Runs a step on `(batch, flags)`, where `flags` has one row for each recent step, the latest one last."""
        batch, flags = batch_and_flags
        new_state, outputs = self._run(state, batch)
        found = _losses(outputs)
        self._output_names = list(found)
        is_bad = _is_bad if self._on_mesh else _is_bad_on_one_device
        bad = [is_bad(leaf) for leaf in found.values()]
        bad += [jnp.zeros((), bool)] * (_OUTPUT_FLAGS - len(bad))
        bad[_OUTPUT_FLAGS - 1 :] = [functools.reduce(operator.or_, bad[_OUTPUT_FLAGS - 1 :])]
        row = _packed([*bad, *map(is_bad, _watched_leaves(new_state).values())])
        if self._on_mesh:
            row = jax.lax.with_sharding_constraint(row, PartitionSpec())
        if self._policy == "skip":
            is_bad = row.any()
            new_state = _unchanged_where(is_bad, state, new_state)
            outputs = outputs and {name: _empty_where(is_bad, value) for name, value in outputs.items()}
        return new_state, (outputs, jnp.concatenate([flags[1:], row[None]]))

    def no_flags(self, state: Any) -> jax.Array:
        """Returns the initial flags (all unset), sharded like the flags that the compiled step returns."""
        flags = _OUTPUT_FLAGS + len(_watched_leaves(state))
        zeros = lambda: jnp.zeros([_ROWS, -(-flags // _WORD)], jnp.uint32)
        scalars = (leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array) and leaf.ndim == 0)
        scalar = next(scalars, None) if self._on_mesh else None
        return zeros() if scalar is None else jax.jit(zeros, out_shardings=scalar.sharding)()

    def names(self, row: np.ndarray, state: Any) -> list[str]:
        """Returns the names of the values that one step's flags mark as non-finite.

        `state` may be any state with the train state's structure.
        """
        names = [*self._output_names[: _OUTPUT_FLAGS - 1], *([""] * _OUTPUT_FLAGS)][: _OUTPUT_FLAGS - 1]
        names += [" or ".join(self._output_names[_OUTPUT_FLAGS - 1 :]), *_watched_leaves(state)]
        return [name for i, name in enumerate(names) if row[i // _WORD] >> (i % _WORD) & 1]


def names(state: Any, outputs: types.Output) -> list[str]:
    """Returns the names of the non-finite values in a step's results. Synchronizes with the devices."""
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
    return ~jnp.isfinite(leaf).all()


def _is_bad_on_one_device(leaf: Any) -> jax.Array:
    if leaf.dtype != jnp.float32 or leaf.size < _COLUMNS:
        return _is_bad(leaf)
    return jax.lax.platform_dependent(leaf, cpu=_is_bad_on_cpu, default=_is_bad)


def _is_bad_on_cpu(leaf: jax.Array) -> jax.Array:
    """Uses a matrix product for the check, because XLA's CPU reductions are three to six times slower."""
    numbers = leaf.reshape(-1)
    rows = numbers.size // _COLUMNS
    in_rows, rest = numbers[: rows * _COLUMNS], numbers[rows * _COLUMNS :]
    # Finite values yield zero; infinity and NaN yield NaN.
    zero = (in_rows.reshape(rows, _COLUMNS) @ jnp.zeros(_COLUMNS)).sum() + (rest * 0).sum()
    return jnp.isnan(zero)


def _packed(flags: Sequence[jax.Array]) -> jax.Array:
    """Packs flags into the bits of 32-bit words with one small computation."""
    words = [flags[i : i + _WORD] for i in range(0, len(flags), _WORD)]
    bits = lambda word: [flag.astype(jnp.uint32) << i for i, flag in enumerate(word)]
    return jnp.stack([functools.reduce(operator.or_, bits(word)) for word in words])


def _unchanged_where(is_bad: jax.Array, old: Any, new: Any) -> Any:
    """Returns the new state or, after a bad step, the old state with the new `step`."""
    choose = lambda path, a, b: b if checks.path_name(path) == "step" else jnp.where(is_bad, a, b)
    return jax.tree_util.tree_map_with_path(choose, old, new)


def _empty_where(is_bad: jax.Array, value: Any) -> Any:
    """Excludes the value of a bad step from means, by resetting a metric or setting a weight to 0."""
    if isinstance(value, types.Weighted):
        return types.Weighted.of(value.value, jnp.where(is_bad, 0, value.weight))
    if not metrics.is_metric(value):
        return value
    empty = value.empty()
    alike = structures.are_alike(empty, value)
    pairs = zip(jax.tree.leaves(empty), jax.tree.leaves(value), strict=True) if alike else ()
    if not alike or any(jnp.shape(a) != jnp.shape(b) for a, b in pairs):
        return value  # A metric that collects values has no empty state.
    return jax.tree.map(lambda a, b: jnp.where(is_bad, jnp.asarray(a, b.dtype), b), empty, value)


@final
@dataclasses.dataclass
class Found:
    """A step with non-finite values.

    Attributes:
      index: The zero-based index of the step, counting from the last `Watch.restart`.
      names: The names of the non-finite values.
    """

    index: int
    names: list[str]


@final
class Watch:
    """Transfers the flags of a loop's steps to the host. The flags of several steps are sent as one small array.

    Args:
      policy: "raise" or "skip".
      chunk_size: The number of steps whose flags are transferred together, at most 32.

    Attributes:
      steps: The number of steps since the last `restart`.
    """

    def __init__(self, policy: NanPolicy, chunk_size: int = _ROWS):
        assert chunk_size <= _ROWS
        self.policy: NanPolicy = policy
        self._chunk_size = chunk_size
        self.steps: int = 0
        self._sent = self._read = 0
        self._pending: collections.deque[_Sent] = collections.deque()
        self._flags: Any = None
        self._detector: Detector | None = None

    def restart(self) -> None:
        """Resets the counters for a new loop."""
        self._pending.clear()
        self.steps = self._sent = self._read = 0

    def call(self, compiled: Any, carry: Any, batch: Any, form: Any = None, *, fuses: bool = False) -> Any:
        """Calls `Compiled.call` with a batch (or stacked batches) and the flags, and stores the new flags."""
        # Without data, there are no leaves, and the length of the stacked batches is the number of steps.
        num_steps = len((jax.tree.leaves(batch) or [batch])[0]) if fuses else 1
        if compiled.detector is not self._detector:  # Each detector has its own flags.
            self._send()
            self._detector, self._flags = compiled.detector, compiled.detector.no_flags(compiled.leave(carry))
        elif self.steps - self._sent + num_steps > _ROWS:
            self._send()
        carry, (outputs, self._flags) = compiled.call(carry, (batch, self._flags), form)
        self.steps += num_steps
        return carry, outputs

    def look(self, state: Any, *, in_step: bool = False) -> list[Found]:
        """Returns the bad steps found in the flags that have already arrived. Call this after each chunk of steps.

        Args:
          state: Any state with the train state's structure.
          in_step: True if all processes of a job must get the same result after the same step. In that case, the call
            waits for all flags except the most recent ones.
        """
        if self.steps - self._sent >= self._chunk_size:
            self._send()
        found = []
        is_there = lambda sent: len(self._pending) > 1 if in_step else metrics.is_ready(sent.flags)
        while self._pending and is_there(self._pending[0]):
            found += self._found_next(state)
        return found

    def read(self, state: Any) -> list[Found]:
        """Waits for all remaining flags, and returns the steps that they mark as bad."""
        self._send()
        return [found for _ in range(len(self._pending)) for found in self._found_next(state)]

    def _send(self) -> None:
        if self.steps > self._sent:
            assert self._detector is not None
            self._flags.copy_to_host_async()
            self._pending.append(_Sent(self._flags, self.steps - self._sent, self._detector))
            self._sent = self.steps

    def _found_next(self, state: Any) -> list[Found]:
        flags, steps, detector = self._pending[0]
        rows = metrics.fetch(flags)[-steps:]
        self._pending.popleft()  # After the read, so that an interrupted read loses nothing.
        first, self._read = self._read, self._read + steps
        return [Found(first + int(i), detector.names(rows[i], state)) for i in np.flatnonzero(rows.any(axis=1))]


@final
class Guard:
    """Applies a train loop's `nan_policy` to bad steps.

    Args:
      watch: The `Watch` that finds bad steps; None to disable the checks.

    Attributes:
      watch: The argument of the same name.
      bad: With "raise", the error for the first bad step of the call, if there was one.
      skipped: With "skip", the bad steps of the current loop.
    """

    def __init__(self, watch: Watch | None):
        self.watch: Watch | None = watch
        self.bad: NonFiniteError | None = None
        self.begin_loop()

    @property
    def policy(self) -> NanPolicy:
        """The policy: "raise", "skip" or "ignore"."""
        return "ignore" if self.watch is None else self.watch.policy

    def begin_loop(self) -> None:
        """Starts a new loop: resets the step count and the list of skipped steps."""
        self.skipped: list[Found] = []
        self._num_returned = 0
        if self.watch is not None:
            self.watch.restart()

    def look(self, state: Any, *, in_step: bool) -> Found | None:
        """Checks the flags that have arrived. With "raise", returns the first bad step, if any; otherwise returns None.

        See `Watch.look` for the arguments.
        """
        return None if self.watch is None else self._sort(self.watch.look(state, in_step=in_step))

    def read(self, state: Any) -> Found | None:
        """Waits for all flags. With "raise", returns the first bad step, if any; otherwise returns None."""
        return None if self.watch is None else self._sort(self.watch.read(state))

    def _sort(self, found: Sequence[Found]) -> Found | None:
        if self.policy == "skip":
            self.skipped += found
            return None
        return next(iter(found), None)

    def newly_skipped(self) -> list[Found]:
        """Returns the steps that were skipped since the last call to this method."""
        new, self._num_returned = self.skipped[self._num_returned :], len(self.skipped)
        return new

    def measure(self) -> dict[str, Any]:
        """Returns a dict with the number of skipped steps as a statistic, or an empty dict if none were skipped."""
        return {STAT_SKIPPED_STEPS: len(self.skipped)} if self.skipped else {}

    def weights(self, weights: list[int]) -> list[int]:
        """Returns the weights of the loop's steps, with the weight of each skipped step set to 0."""
        skipped = {found.index for found in self.skipped}
        return [0 if index in skipped else weight for index, weight in enumerate(weights)] if skipped else weights


class _Sent(NamedTuple):
    """Flags that are being transferred, with the number of steps that they cover and their detector."""

    flags: jax.Array
    steps: int
    detector: Detector
