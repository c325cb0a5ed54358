"""Pads short batches, and overwrites or removes rows whose mask is 0."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np

from jaxloop import types
from jaxloop.base import checks
from jaxloop.distributed import agreement
from jaxloop.metrics import fetch, value_of
from jaxloop.models.function_step import FunctionStep
from jaxloop.step import Step, forward
from jaxloop.step.runner import Runner


@final
class MaskedBatch(NamedTuple):
    """A batch with its mask.

    Attributes:
      batch: The batch.
      mask: A bool array that is True for the rows to include, or None if the number of rows is unknown.
    """

    batch: Any
    mask: Any


class _UnmaskedWatch(checks.BatchWatch):
    """A `BatchWatch` that ignores the masks that were added to the batches."""

    def look(self, batches: Sequence[Any]) -> int | None:
        return super().look([each.batch if isinstance(each, MaskedBatch) else each for each in batches])


@final
class PaddingRunner(Runner):
    """Runs a `LossStep` with padded and masked batches.

    Attributes:
      not_per_example: The names of the losses and metrics that aren't computed per example and may therefore depend on
        padding. None until `run` is traced.
      eval_rows: The number of rows to which batches are padded in an evaluation. None before the evaluation's first
        batch.
    """

    watch_class = _UnmaskedWatch

    def __init__(self, step: Any, *args: Any):
        super().__init__(step, *args)
        self.not_per_example: Sequence[str] | None = None
        self.eval_rows: int | None = None
        self._depending: Sequence[str] | None = None  # See `_names_that_depend_on_masked_rows`.
        self._full_mask: jax.Array | None = None  # The mask of a batch without padding, on the device.

    # Hooks ---------------------------------------------------------------------------------------

    @functools.cached_property
    def _has_own_hooks(self) -> bool:
        return any(checks.is_user_defined(self.step, name) for name in ("preprocess_batch", "begin", "num_examples"))

    def ready_batch(self, batch: types.Batch) -> tuple[types.Batch, int] | None:
        # `pad` reads the state only to pad a batch, or if rows are masked.
        if self._has_own_hooks or mask_of(batch) is not None:
            return None
        batch = self.preprocessed(batch)
        rows = checks.num_examples(batch)
        return (MaskedBatch(batch, _all_real(rows)), rows) if rows and self._padded_size(rows) == rows else None

    def filler(self) -> Callable[[int], None] | None:
        return self._fill_to if not self.step.train or self.step._batch_size else None

    def _fill_to(self, rows: int) -> None:
        if not self.step.train:
            self.eval_rows = max(rows, self.eval_rows or rows)
        elif rows > self.step._batch_size:
            raise ValueError(
                f"A batch has {rows} rows, and other batches have fewer. Give batch_size={rows} to {self.step!r}."
            )

    def place(self, batch: types.Batch, *, evaluates: bool = False, fuses: bool = False) -> types.Batch:
        placed = super().place(batch, evaluates=evaluates, fuses=fuses)
        mask = placed.mask if isinstance(placed, MaskedBatch) else None
        if not isinstance(mask, np.ndarray) or mask is not _all_real(len(mask)):
            return placed
        if self._full_mask is None or len(self._full_mask) != len(mask):  # Transferred once, not at each step.
            self._full_mask = jnp.asarray(mask)
        return MaskedBatch(placed.batch, self._full_mask)

    # Padding -------------------------------------------------------------------------------------

    def pad(self, state: Any, batch: types.Batch) -> types.Batch:
        """Adds a mask to a batch, pads the batch if it is short, and overwrites or removes rows whose mask is 0.

        Raises:
          ValueError: If masked rows would affect the loss or a metric but can't be removed.
        """
        rows, mask = checks.num_examples(batch), mask_of(batch)
        if rows is None or (rows == 0 and not self._is_shared):
            return batch
        size, is_real = self._padded_size(rows), _all_real(rows) if mask is None else np.asarray(mask, bool)
        if size == rows and (mask is None or is_real.all()):
            return MaskedBatch(batch, _all_real(rows))
        filled = _fill(batch, is_real, size)
        if not is_real.any() and not self._is_shared:
            return filled
        reason = self._reason_not_to_fill(state, filled, pads=size > rows)
        if reason is None:
            return filled
        num_real = int(is_real.sum())
        is_split = self.step.train and (self.step._accumulate > 1 or self.step._should_shard_batch)
        if self._is_shared or (is_split and num_real != self._divisible(num_real)):
            raise ValueError(
                f"{self.step!r} must fill up a batch of {num_real} {'unmasked ' * (mask is not None)}rows to {size}, "
                "the size in other processes or a multiple of the devices and micro-batches, but that would change "
                f"the result: {reason}. Drop the remainder, and give batches without masked rows."
            )
        batch = jax.tree.map(lambda leaf: leaf[is_real] if np.ndim(leaf) else leaf, batch)
        return MaskedBatch(batch, _all_real(num_real))

    def _padded_size(self, rows: int) -> int:
        """Returns the number of rows to which a batch of `rows` rows should be padded. May increase `eval_rows`."""
        batch_size = self.step._batch_size or rows
        if self.step.train:
            # The size depends only on this batch, because a resumed run has no record of earlier batches.
            return self._divisible(max(rows, batch_size))
        self.eval_rows = max(rows, self.eval_rows or batch_size)
        return self._divisible(self.eval_rows) if self._is_shared else self.eval_rows

    def _divisible(self, rows: int) -> int:
        """Rounds up a number of rows so that it divides evenly among this process's devices and micro-batches."""
        return -(-rows // self._num_parts) * self._num_parts

    @functools.cached_property
    def _num_parts(self) -> int:
        return self.step._partitioner.local_shards * (self.step._accumulate if self.step.train else 1)

    @property
    def _is_shared(self) -> bool:
        """True if each batch is distributed over several processes."""
        return agreement.is_shared(self.step._partitioner.mesh)

    def _reason_not_to_fill(self, state: Any, filled: MaskedBatch, *, pads: bool) -> str | None:
        """Returns the reason why masked rows would change the results, or None if they wouldn't."""
        step = self.step
        if forward.mixes_examples(state, train=step.train):
            return "the model mixes the examples of a batch, as batch normalization does"
        if pads and self.not_per_example is None:
            # The first batch is short: trace `run` to determine what the loss returns.
            jax.eval_shape(step.partitioner.partition(step.run), state, filled)
        names = self.not_per_example if pads else ()
        is_abstract = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(state))
        if not names and self._depending is None and not self._is_shared and not is_abstract:
            self._depending = self._names_that_depend_on_masked_rows(state, filled)
        names = names or self._depending
        return f"these values depend on several examples: {quoted(names)}" if names else None

    def _names_that_depend_on_masked_rows(self, state: Any, filled: MaskedBatch) -> Sequence[str] | None:
        """Returns the names of the losses and metrics that change if the contents of masked rows change.

        To find them, runs the step twice, with different contents in the masked rows. Returns None if the result is
        inconclusive because the loss is NaN.
        """
        batch, mask = filled

        def change(leaf: Any) -> Any:
            if not np.ndim(leaf) or not (leaf.dtype == bool or jnp.issubdtype(leaf.dtype, np.number)):
                return leaf
            other = np.logical_not(leaf) if leaf.dtype == bool else leaf + 1
            return np.where(mask.reshape(-1, *[1] * (np.ndim(leaf) - 1)), leaf, other)

        changed = jax.tree.map(change, batch)
        if mask_of(batch) is not None:
            changed["mask"] = batch["mask"]
        run = lambda batch: fetch(self.dispatch(state, MaskedBatch(batch, mask), evaluates=True)[1])
        one, other = run(batch), run(changed)
        is_image = lambda value: isinstance(value_of(value), types.MetricWithMetadata)
        is_same = lambda *leaves: np.allclose(*leaves, rtol=1e-6, atol=0, equal_nan=True)
        same = lambda name: all(jax.tree.leaves(jax.tree.map(is_same, one[name], other[name])))
        differing = [name for name in one if not is_image(one[name]) and not same(name)]
        is_nan = any(np.isnan(leaf).any() for leaf in jax.tree.leaves(one.get("loss")))
        return None if is_nan and not differing else differing

    # Predictions ---------------------------------------------------------------------------------

    @functools.cached_property
    def forward_step(self) -> Step:
        """A step that only calls the model. It is cached together with its compiled function."""
        step = self.step

        def run(state: Any, batch: types.Batch) -> tuple[Any, types.Output]:
            outputs, _ = step.call_model(state, step.params_to_evaluate(state), step._inputs_of(batch), train=False)
            return state, {"outputs": outputs}

        return FunctionStep(run, step.partitioner)


def mask_of(batch: Any) -> Any:
    """Returns the mask of the examples in a batch, or None if the batch has no mask of shape `[batch]`."""
    if not isinstance(batch, dict) or "mask" not in batch:
        return None
    mask, rows = batch["mask"], checks.num_examples(batch)
    is_vector = rows is not None and tuple(getattr(mask, "shape", ())) == (rows,)
    return mask if is_vector else None


def with_own_mask(batch: Any) -> MaskedBatch:
    """Returns a `MaskedBatch` with a batch's own mask or, if the batch has none, a mask that is True for all rows.

    If the number of rows is unknown, the mask is None.
    """
    rows, mask = checks.num_examples(batch), mask_of(batch)
    all_real = None if rows is None else _all_real(rows)
    return MaskedBatch(batch, all_real if mask is None else mask.astype(bool))


@functools.lru_cache(maxsize=64)
def _all_real(rows: int) -> np.ndarray:
    mask = np.ones(rows, bool)
    mask.flags.writeable = False  # All batches with this number of rows share it.
    return mask


def _fill(batch: Any, is_real: np.ndarray, size: int) -> MaskedBatch:
    """Pads a batch to `size` rows, and overwrites the masked rows, which may contain NaN.

    The added and the overwritten rows are copies of the last unmasked row, or zeros if all rows are masked.

    Args:
      batch: The batch.
      is_real: A bool array that is False for the masked rows.
      size: The number of rows of the result.
    """
    mask = np.concatenate([is_real, np.zeros(size - len(is_real), bool)])
    own_mask, real = mask_of(batch), np.flatnonzero(is_real)
    # Copies of a row, because the loss may be undefined for zeros.
    chosen = np.where(mask, np.arange(size), real[-1] if len(real) else 0)

    def fill(leaf: Any) -> Any:
        if not np.ndim(leaf):
            return leaf
        return leaf[chosen] if len(real) else np.zeros([size, *leaf.shape[1:]], leaf.dtype)

    filled = jax.tree.map(fill, batch)
    if own_mask is not None:
        filled["mask"] = mask.astype(own_mask.dtype)
    return MaskedBatch(filled, mask)


def quoted(names: Sequence[str]) -> str:
    """Returns the names in quotes, separated by commas, for use in messages."""
    return ", ".join(map(repr, names))
