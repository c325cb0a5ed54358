"""Numbers that are not finite: found inside the compiled step, and read when the host reads anyway."""

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
"""How many steps of a call `nan_policy="skip"` has left out; only where it has."""

# For how many steps the devices keep flags.
MAX_STEPS = _ROWS = 32

# How many flags are sent as one number; and in rows of how many numbers parameters are looked through on a CPU.
_WORD, _COLUMNS = 32, 64

# How many outputs have a flag of their own; the last stands for all that are left.
_OUTPUT_FLAGS = 8


class NonFiniteError(FloatingPointError):
    """A training step came to numbers that are not finite (NaN, inf).

    Attributes:
      step_num: the first step that did, as `state.step` counts: it made `state.step` this number.
      names: what was not finite, such as `outputs/loss` or `params/Dense_0/kernel`.
    """

    def __init__(self, step_num: int, names: Sequence[str]):
        shown = checks.listed(names, show=6)
        super().__init__(
            f"Step {step_num} is the first whose numbers are not all finite (NaN or inf): {shown}. Look at the batch "
            "of that step for bad values, lower the learning rate, or clip the gradients "
            "(optax.clip_by_global_norm). To leave such steps out write TrainLoop(..., nan_policy='skip'), to train "
            "on regardless nan_policy='ignore'."
        )
        self.step_num: int = step_num
        self.names: tuple[str, ...] = tuple(names)


@final
class Detector:
    """A step's `run` that also says, in the same compiled program, what was not finite.

    What counts are the floating-point leaves of the new `params` and `batch_stats` (of a state without `params`, all
    of them), and those outputs with "loss" in their name: other outputs may be undefined in some batches.

    Args:
      run: takes `(state, batch)`, returns `(state, outputs)`.
      policy: with "skip", a step with bad numbers leaves the state as it was, but for `step`.
      on_mesh: whether it is compiled for a mesh.
    """

    def __init__(self, run: Callable[[Any, Any], tuple[Any, types.Output]], policy: NanPolicy, on_mesh: bool):
        self._run, self._policy, self._on_mesh = run, policy, on_mesh
        self._output_names: list[str] = []

    def run(self, state: Any, batch_and_flags: Any) -> tuple[Any, Any]:
        """Takes `(batch, flags)`, the flags being those of the last steps, a row for each; the newest is the last."""
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
        """The flags before the first step, where the compiled step will leave them."""
        flags = _OUTPUT_FLAGS + len(_watched_leaves(state))
        zeros = lambda: jnp.zeros([_ROWS, -(-flags // _WORD)], jnp.uint32)
        scalars = (leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array) and leaf.ndim == 0)
        scalar = next(scalars, None) if self._on_mesh else None
        return zeros() if scalar is None else jax.jit(zeros, out_shardings=scalar.sharding)()

    def names(self, row: np.ndarray, state: Any) -> list[str]:
        """What the flags of one step say was not finite; `state` is any of the same structure."""
        names = [*self._output_names[: _OUTPUT_FLAGS - 1], *([""] * _OUTPUT_FLAGS)][: _OUTPUT_FLAGS - 1]
        names += [" or ".join(self._output_names[_OUTPUT_FLAGS - 1 :]), *_watched_leaves(state)]
        return [name for i, name in enumerate(names) if row[i // _WORD] >> (i % _WORD) & 1]


def names(state: Any, outputs: types.Output) -> list[str]:
    """What is not finite of what a step returned. Reads all of it."""
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
    """Reads a matrix product's worth: XLA's own reductions on a CPU are three to six times slower than its products."""
    numbers = leaf.reshape(-1)
    rows = numbers.size // _COLUMNS
    in_rows, rest = numbers[: rows * _COLUMNS], numbers[rows * _COLUMNS :]
    # What is finite comes to zero, inf and NaN to NaN.
    zero = (in_rows.reshape(rows, _COLUMNS) @ jnp.zeros(_COLUMNS)).sum() + (rest * 0).sum()
    return jnp.isnan(zero)


def _packed(flags: Sequence[jax.Array]) -> jax.Array:
    """Flags as the bits of 32-bit words: one small computation, where an array of them would be one for each."""
    words = [flags[i : i + _WORD] for i in range(0, len(flags), _WORD)]
    bits = lambda word: [flag.astype(jnp.uint32) << i for i, flag in enumerate(word)]
    return jnp.stack([functools.reduce(operator.or_, bits(word)) for word in words])


def _unchanged_where(is_bad: jax.Array, old: Any, new: Any) -> Any:
    """The old state where numbers are bad, but for `step`, which counts on."""
    choose = lambda path, a, b: b if checks.path_name(path) == "step" else jnp.where(is_bad, a, b)
    return jax.tree_util.tree_map_with_path(choose, old, new)


def _empty_where(is_bad: jax.Array, value: Any) -> Any:
    """A `clu.metrics` state without a weight where numbers are bad; other values as they are."""
    if not metrics.is_metric(value):
        return value
    empty = value.empty()
    alike = structures.are_alike(empty, value)
    pairs = zip(jax.tree.leaves(empty), jax.tree.leaves(value), strict=True) if alike else ()
    if not alike or any(jnp.shape(a) != jnp.shape(b) for a, b in pairs):
        return value  # One that collects values has no such state.
    return jax.tree.map(lambda a, b: jnp.where(is_bad, jnp.asarray(a, b.dtype), b), empty, value)


@final
@dataclasses.dataclass
class Found:
    """A step whose numbers were bad.

    Attributes:
      index: its place in the call of the loop, from 0.
      names: what was not finite.
    """

    index: int
    names: list[str]


@final
class Watch:
    """The flags of a loop's steps on their way to the host: one small array for a whole chunk of steps.

    Args:
      policy: "raise" or "skip".
      chunk_size: after how many steps their flags are sent; at most 32.

    Attributes:
      steps: how many steps have been run since `restart`.
    """

    def __init__(self, policy: NanPolicy, chunk_size: int = _ROWS):
        assert chunk_size <= _ROWS
        self.policy: NanPolicy = policy
        self._chunk_size = chunk_size
        self.steps: int = 0
        self._sent = self._read = 0
        self._on_their_way: collections.deque[_Sent] = collections.deque()
        self._flags: Any = None
        self._looking: Detector | None = None

    def restart(self) -> None:
        """Begins a call of the loop."""
        self._on_their_way.clear()
        self.steps = self._sent = self._read = 0

    def call(self, compiled: Any, carry: Any, batch: Any, form: Any = None, *, fuses: bool = False) -> Any:
        """Gives a batch to the devices as `compiled.call` does, with the flags; or as many as are stacked."""
        # Without data there is no leaf, and what was stacked has the number of steps as its length.
        num_steps = len((jax.tree.leaves(batch) or [batch])[0]) if fuses else 1
        if compiled.detector is not self._looking:  # Whose flags are in an array of their own.
            self._send()
            self._looking, self._flags = compiled.detector, compiled.detector.no_flags(compiled.leave(carry))
        elif self.steps - self._sent + num_steps > _ROWS:
            self._send()
        carry, (outputs, self._flags) = compiled.call(carry, (batch, self._flags), form)
        self.steps += num_steps
        return carry, outputs

    def look(self, state: Any, *, in_step: bool = False) -> list[Found]:
        """What the flags say that are there already. Does not wait; to be called after each chunk of steps.

        Args:
          state: any of the structure of the train state.
          in_step: to be told the same after the same step in each process of a job: waits for the flags of the chunk
            before the newest.
        """
        if self.steps - self._sent >= self._chunk_size:
            self._send()
        found = []
        is_there = lambda sent: len(self._on_their_way) > 1 if in_step else metrics.is_ready(sent.flags)
        while self._on_their_way and is_there(self._on_their_way[0]):
            found += self._found_next(state)
        return found

    def read(self, state: Any) -> list[Found]:
        """What the flags of all steps say of which nothing was said yet. Waits for them."""
        self._send()
        return [found for _ in range(len(self._on_their_way)) for found in self._found_next(state)]

    def _send(self) -> None:
        if self.steps > self._sent:
            assert self._looking is not None
            self._flags.copy_to_host_async()
            self._on_their_way.append(_Sent(self._flags, self.steps - self._sent, self._looking))
            self._sent = self.steps

    def _found_next(self, state: Any) -> list[Found]:
        flags, steps, detector = self._on_their_way[0]
        rows = metrics.fetch(flags)[-steps:]
        self._on_their_way.popleft()  # Only now: an interrupted read loses nothing.
        first, self._read = self._read, self._read + steps
        return [Found(first + int(i), detector.names(rows[i], state)) for i in np.flatnonzero(rows.any(axis=1))]


@final
class Guard:
    """Does what the policy of a train loop says about the steps whose numbers are bad.

    Args:
      watch: finds them; None to look for none.

    Attributes:
      watch: as given.
      bad: the error of the first such step of the call, where they end it.
      skipped: such steps of the loop, where they are left out.
    """

    def __init__(self, watch: Watch | None):
        self.watch: Watch | None = watch
        self.bad: NonFiniteError | None = None
        self.begin_loop()

    @property
    def policy(self) -> NanPolicy:
        """What is done about them."""
        return "ignore" if self.watch is None else self.watch.policy

    def begin_loop(self) -> None:
        """Begins a loop, whose steps are counted from 0."""
        self.skipped: list[Found] = []
        self._told = 0
        if self.watch is not None:
            self.watch.restart()

    def look(self, state: Any, *, in_step: bool) -> Found | None:
        """Returns the first bad step that ends the run, by the flags that are there, see `Watch.look`."""
        return None if self.watch is None else self._sort(self.watch.look(state, in_step=in_step))

    def read(self, state: Any) -> Found | None:
        """Returns the first bad step that ends the run, by the flags of all steps; waits for them."""
        return None if self.watch is None else self._sort(self.watch.read(state))

    def _sort(self, found: Sequence[Found]) -> Found | None:
        if self.policy == "skip":
            self.skipped += found
            return None
        return next(iter(found), None)

    def newly_skipped(self) -> list[Found]:
        """Returns the steps that were left out since the last time this was asked."""
        new, self._told = self.skipped[self._told :], len(self.skipped)
        return new

    def measure(self) -> dict[str, Any]:
        """Returns the number of skipped steps as a statistic, where there are any."""
        return {STAT_SKIPPED_STEPS: len(self.skipped)} if self.skipped else {}

    def weights(self, weights: list[int]) -> list[int]:
        """Returns the weights of the steps of the loop, those of skipped ones being 0."""
        skipped = {found.index for found in self.skipped}
        return [0 if index in skipped else weight for index, weight in enumerate(weights)] if skipped else weights


class _Sent(NamedTuple):
    """The flags of the newest so many steps, and whose names they stand for."""

    flags: jax.Array
    steps: int
    detector: Detector
