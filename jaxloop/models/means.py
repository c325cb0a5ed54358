"""Means of the losses and metrics of a `LossStep`, over the unmasked rows of a batch and over micro-batches."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxloop import types
from jaxloop.base import checks, structures
from jaxloop.metrics import is_metric, merge
from jaxloop.step import forward


def mean_of(what: str, value: Any, mask: Any, *, parts: int = 1) -> tuple[Any, bool]:
    """Averages a per-example value over the unmasked rows of a batch. Returns any other value unchanged.

    If all rows are masked, however, the result is 0 for both a per-example value and a scalar.

    Args:
      what: A description of the value, for error messages.
      value: The value that the loss or a metric returned.
      mask: The batch's mask, which is True for the rows to include, or None if the number of rows is unknown.
      parts: The number of micro-batches whose values are combined later.

    Returns:
      The mean or the unchanged value, and a bool that is True if the given value had one number per example.

    Raises:
      TypeError: If the value is not of a supported type.
      ValueError: If the value has the wrong shape.
    """
    if isinstance(value, types.MetricWithMetadata) and value.type is types.MetricType.SCALAR:
        mean, is_per_example = mean_of(what, value.value, mask, parts=parts)
        return types.MetricWithMetadata(mean, value.type, value.metadata), is_per_example
    if isinstance(value, types.MetricWithMetadata | types.Weighted) or is_metric(value):
        return value, False
    value = _array_of(what, value, mask, parts)
    if value.ndim == 1:
        return jnp.sum(jnp.where(mask, value, 0)) / jnp.maximum(_count(mask), 1), True
    return value if mask is None else jnp.where(mask.any(), value, 0), False


def _array_of(what: str, value: Any, mask: Any, parts: int) -> jax.Array:
    if not hasattr(value, "dtype") and not isinstance(value, bool | int | float):
        raise TypeError(
            f"{what} must be an array [batch], a scalar, a Weighted mean, a MetricWithMetadata, or a metric with "
            f"`merge` and `compute`, got {checks.describe(value)}."
        )
    value = jnp.asarray(value)
    if value.ndim == 0 and parts > 1:
        raise ValueError(
            f"{what} is a scalar, and the step combines the values of {parts} micro-batches, but a scalar doesn't tell "
            "whether it is a mean or a sum, and over how many rows. Return one number for each example, or a mean with "
            "its weight: jaxloop.Weighted(mean, rows)."
        )
    if value.ndim == 0 or (mask is not None and value.shape == mask.shape):
        return value.astype(_sum_dtype(value))
    if mask is None:
        raise ValueError(
            f"{what} is {checks.describe(value)}, but the leaves of the batch share no leading axis, so the number of "
            "examples is unknown. Return a scalar."
        )
    rows = mask.shape[0]
    raise ValueError(
        f"{what} is {checks.describe(value)} for {rows} examples; it must be per example, {value.dtype}[{rows}], or a "
        "scalar. Take the mean over all axes but the first, without keepdims=True, or return "
        "jaxloop.Weighted(values, mask) to leave out padding."
    )


def weight_of(loss: Any, mask: Any) -> jax.Array:
    """Returns a `Weighted` loss's weight or, for any other loss, the number of unmasked rows (1 if unknown)."""
    if isinstance(loss, types.Weighted):
        return loss.weight
    return jnp.float32(1) if mask is None else _count(mask)


def accumulated(
    gradients: Callable[..., Any], state: Any, batch: Any, mask: Any, keys: Any, *, parts: int, shards: int
) -> tuple[Any, dict[str, Any], Any]:
    """Computes the result of `gradients(state, batch, mask, keys)` by scanning over the micro-batches of the batch.

    Args:
      gradients: A function that returns three values: the gradients of the mean loss, a dict that contains the loss and
        the metrics, and the state with the updated variables.
      state: The state.
      batch: The batch.
      mask: The batch's mask, which is True for the rows to include.
      keys: The PRNG keys.
      parts: The number of micro-batches.
      shards: The number of shards of the batch. Each row stays on its device.
    """
    if mask is None:
        raise ValueError(
            f"The step has accumulate={parts}, and can't split a batch whose leaves share no leading axis: "
            f"{jax.tree.map(checks.describe, batch)}. Give all leaves the same leading axis, or leave out accumulate."
        )

    def add(carry: Any, part: Any) -> Any:
        grads_before, (batch_stats, collections) = carry
        number, (batch, mask) = part
        state_now = state.replace(batch_stats=batch_stats, collections=collections)
        keys_now = jax.tree.map(lambda key: jax.random.fold_in(key, number), keys)
        with forward.noting_changes():  # The changes are kept, so `Step` doesn't have to check that they are.
            grads, values, state_now = gradients(state_now, batch, mask, keys_now)
        weight = weight_of(values["loss"], mask)
        grads = jax.tree.map(lambda before, new: before + _weighted(new, weight), grads_before, grads)
        return (grads, (state_now.batch_stats, state_now.collections)), (weight, _count(mask), values)

    def split(leaf: Any) -> jax.Array:
        leaf = jnp.asarray(leaf)
        if leaf.ndim == 0:
            return jnp.broadcast_to(leaf, (parts,))
        size = leaf.shape[0] // (parts * shards)
        # Adjacent rows go to different parts, which spreads the padding over the parts.
        leaf = jnp.moveaxis(leaf.reshape(shards, size, parts, *leaf.shape[1:]), 2, 0)
        return leaf.reshape(parts, shards * size, *leaf.shape[3:])

    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, _sum_dtype(leaf)), state.params)
    micro_batches = (jnp.arange(parts), jax.tree.map(split, (batch, mask)))
    carry = (zeros, (state.batch_stats, state.collections))
    (grads, (batch_stats, collections)), (weights, counts, values) = jax.lax.scan(add, carry, micro_batches)
    total = jnp.where(weights.sum() == 0, 1, weights.sum())
    grads = jax.tree.map(lambda grad, leaf: (grad / total.astype(grad.dtype)).astype(leaf.dtype), grads, state.params)
    shares = counts / jnp.maximum(counts.sum(), 1)
    values = {name: _combine(value, shares) for name, value in values.items()}
    return grads, values, state.replace(batch_stats=batch_stats, collections=collections)


def _combine(value: Any, weights: jax.Array) -> Any:
    """Combines the values of a loss or metric for all micro-batches into one value.

    In `value`, the values of the micro-batches are stacked along the leading axis. `weights` contains each
    micro-batch's share of the unmasked rows.
    """
    if isinstance(value, types.Weighted):
        return types.Weighted(value.value, value.weight)
    if is_metric(value):
        return merge([jax.tree.map(lambda leaf, part=part: leaf[part], value) for part in range(len(weights))])
    if isinstance(value, types.MetricWithMetadata) and value.type is not types.MetricType.SCALAR:
        return jax.tree.map(lambda leaf: leaf[0], value)
    return jax.tree.map(lambda leaf: jnp.sum(_weighted(leaf, weights)), value)


def with_variables(before: Any, after: Any, has_rows: Any) -> Any:
    """Returns the state `after` with each variable cast to the dtype that it has in the state `before`.

    If `has_rows` is False, because the batch has no unmasked rows, floating-point variables keep their values from
    `before`.
    """
    variables = lambda state: (state.batch_stats, state.collections)
    if not structures.are_alike(variables(before), variables(after)):
        return after  # `Step` raises the error when it checks the result of `run`.

    def updated(old: Any, new: Any) -> Any:
        new = new if new.dtype == old.dtype else new.astype(old.dtype)
        return jnp.where(has_rows, new, old) if jnp.issubdtype(old.dtype, jnp.inexact) else new

    batch_stats, collections = jax.tree.map(updated, variables(before), variables(after))
    return after.replace(batch_stats=batch_stats, collections=collections)


def _count(mask: Any) -> jax.Array:
    return jnp.sum(mask, dtype=jnp.float32)


def _weighted(value: jax.Array, weight: jax.Array) -> jax.Array:
    dtype = _sum_dtype(value)
    return weight.astype(dtype) * value.astype(dtype)


def _sum_dtype(leaf: jax.Array) -> Any:
    """Returns the dtype in which to compute a mean of `leaf`.

    This is `leaf.dtype` if it is a floating-point or complex dtype of at least 32 bits, and float32 otherwise.
    """
    is_wide = jnp.issubdtype(leaf.dtype, jnp.inexact) and leaf.dtype.itemsize >= 4
    return leaf.dtype if is_wide else jnp.float32
