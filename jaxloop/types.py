"""Types shared by all modules: train states, batches, outputs and metrics."""

import dataclasses
import enum
import functools
import inspect
import sys
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Self, final

import jax
import jax.numpy as jnp
import optax
from etils import epy
from flax import struct
from flax.training import train_state

with epy.lazy_imports():  # Importing NNX takes as long as importing jaxloop, and Linen models don't need it.
    from flax import nnx

Batch = Any
"""A pytree of arrays with one row per example: a dict, a tuple, a named tuple, ..."""

BatchSpec = Any
"""A description of a batch: a shape, a `(shape, dtype)` pair, an array, a PRNG key, or a container of these."""

Output = dict[str, Any] | None
"""The values that a step returns, keyed by name, or None."""

PRNGType = jax.Array | Mapping[str, jax.Array]
"""A typed or legacy (uint32) PRNG key, or a dict with one key per random stream of the model."""

STOP_LOOP = "jaxloop/stop_loop"
"""The name of the output that stops the experiment: `outputs[STOP_LOOP] = True`."""


def is_nnx(value: Any, name: str) -> bool:
    """Returns True if a value is an instance of the NNX class with the given name, without importing NNX."""
    return "flax.nnx" in sys.modules and isinstance(value, getattr(nnx, name))


def is_nnx_class(value: Any) -> bool:
    """Returns True if a value is an NNX module class, without importing NNX."""
    return "flax.nnx" in sys.modules and inspect.isclass(value) and issubclass(value, nnx.Module)


State = Any
"""Any pytree that a step updates, usually a `TrainState`."""


class TrainState(train_state.TrainState):
    """A Flax `TrainState` that holds all of a model's variables. Subclasses may add fields.

    Hooks:
      apply_gradients: Called inside `Step.run` with the gradients. Returns the state after the update.
      update_variables: Called inside `Step.run` with the variables that a forward pass changed. Returns the state with
        the new values.

    Attributes:
      step: The number of completed optimizer updates (an int32 scalar). `apply_gradients` increases it by one.
      apply_fn: The model's forward pass. For a Linen model, this is `module.apply`. For an NNX model, call it as
        `outputs, (_, updates) = state.apply_fn(params, state.batch_stats, state.collections, train=True)(inputs)`,
        where `train=True` puts the model in training mode and `train=False` puts it in evaluation mode. For any other
        kind of model that `LossStep` accepts, use `jaxloop.models.forward(state, state.params, inputs, train=True)`.
      params: The parameters that `tx` updates.
      tx: The Optax optimizer.
      opt_state: The optimizer's state.
      batch_stats: The running statistics of normalization layers. Empty for a model without such layers.
      collections: All other variables. For Linen, this is a dict keyed by collection name (`{"cache": ...}`). For NNX,
        it is a single `nnx.State`, which contains caches, the counters and keys of `Rngs`, and so on.

    >>> import optax
    >>> from flax import linen as nn
    >>> model = nn.Dense(2)
    >>> variables = model.init(jax.random.key(0), jnp.ones([1, 3]))
    >>> state = TrainState.create(apply_fn=model.apply, params=variables["params"], tx=optax.sgd(0.1))
    >>> state.apply_fn(state.variables, jnp.ones([5, 3])).shape
    (5, 2)
    """

    batch_stats: Any = struct.field(default_factory=dict)
    collections: Any = struct.field(default_factory=dict)

    @classmethod
    def create(cls, *, apply_fn: Any, params: Any, tx: Any, **kwargs: Any) -> Self:
        """Creates a state at step 0 and initializes the optimizer's state.

        Args:
          apply_fn: The forward pass; see `TrainState`.
          params: Any pytree of arrays, such as a dict, or an Equinox module whose leaves are all arrays.
          tx: The Optax optimizer.
          **kwargs: Values for the other fields.

        Raises:
          TypeError: If a leaf of `params` is neither an array nor a number.
          ValueError: If `params` contains values that Flax overwrites with their gradients, such as the statistics of
            its FP8 layers.
        """
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            if "_overwrite_with_gradient" in jax.tree_util.keystr(path[:1]):
                raise ValueError(
                    "TrainState updates all params with the optimizer, so they can't contain Flax's FP8 statistics, "
                    "'_overwrite_with_gradient'. Use Flax's own TrainState, from flax.training.train_state."
                )
            if not hasattr(leaf, "dtype") and not isinstance(leaf, int | float | complex):
                raise TypeError(
                    f"TrainState.create takes params whose leaves are arrays, got {leaf!r} at "
                    f"params{jax.tree_util.keystr(path)}. Keep other leaves in apply_fn. For an Equinox module: "
                    "params, static = eqx.partition(module, eqx.is_inexact_array), and "
                    "apply_fn=lambda params: eqx.combine(params, static)."
                )
        # Flax counts with a Python int, which would make the first call to a jitted step a special case.
        step = jnp.zeros((), jnp.int32)
        # Some optimizers begin with weakly typed numbers, which would make the second step compile again.
        strong = lambda leaf: leaf.astype(leaf.dtype) if getattr(leaf, "weak_type", False) else leaf
        opt_state = jax.tree.map(strong, tx.init(params))
        return cls(step=step, apply_fn=apply_fn, params=params, tx=tx, opt_state=opt_state, **kwargs)

    def apply_gradients(self, *, grads: Any, **kwargs: Any) -> Self:
        """Returns the state after an optimizer update, with `step` increased by one.

        Args:
          grads: The gradients, with the same tree structure as `params`. For complex parameters, pass the conjugate of
            the result of `jax.grad` (`jax.tree.map(jnp.conj, grads)`), which is the direction of steepest ascent.
          **kwargs: New values for other fields.
        """
        # Unlike in Flax, neither the parameters nor the gradients need to be a dict.
        opt_state = _with_initial_params(self.opt_state, self.params)
        updates, opt_state = self.tx.update(grads, opt_state, self.params)
        params = optax.apply_updates(self.params, updates)
        return self.replace(step=self.step + 1, params=params, opt_state=opt_state, **kwargs)

    @property
    def variables(self) -> dict[str, Any]:
        """The variables of a Linen model as `apply_fn` expects them: a dict of `params` and all other collections."""
        if is_nnx(self.params, "State"):
            raise TypeError(
                "TrainState.variables is for Linen models. For NNX, step.call_model(state, params, inputs)."
            )
        batch_stats = {"batch_stats": self.batch_stats} if self.batch_stats else {}
        return {"params": self.params, **batch_stats, **self.collections}

    def module(self) -> Any:
        """Returns the trained NNX module in evaluation mode. The module contains copies of the state's variables.

        >>> import jaxloop
        >>> from flax import nnx
        >>> step = jaxloop.Step(jax.random.key(0), nnx.Linear(3, 1, rngs=nnx.Rngs(0)), optax.sgd(0.1), train=True)
        >>> state = step.initialize_model([1, 3])
        >>> state.module()(jnp.ones([5, 3])).shape
        (5, 1)

        Raises:
          TypeError: If the state doesn't hold an NNX model.
        """
        build = getattr(self.apply_fn, "module", None)
        if build is None:
            raise TypeError("TrainState.module() is for NNX models. For Linen, module.apply(state.variables, inputs).")
        return build(jax.tree.map(jnp.copy, (self.params, self.batch_stats, self.collections)), train=False)

    def update_variables(self, updates: Any) -> Self:
        """Returns the state with new values for the variables that a forward pass changed. The parameters don't change.

        Args:
          updates: The new values. For Linen, these are the second result of `apply_fn(..., mutable=[...])`. For NNX,
            they are the `updates` in the result of `apply_fn(...)(inputs)`, which is `(outputs, (_, updates))`; any
            parameters in `updates` are ignored. If None, the state is returned unchanged. Losses and intermediates that
            the model sowed are not stored.
        """
        if updates is None:
            return self
        if is_nnx(self.params, "State"):
            _, batch_stats, _, rest = nnx.split_state(updates, nnx.Param, nnx.BatchStat, nnx_sown_types(), ...)
            return self.replace(batch_stats=batch_stats, collections=rest)
        rest = {name: collection for name, collection in updates.items() if name not in LINEN_SOWN}
        if "params" in rest:
            raise ValueError("update_variables got 'params': parameters change through apply_gradients(grads=...).")
        batch_stats = rest.pop("batch_stats", self.batch_stats)
        return self.replace(batch_stats=batch_stats, collections={**self.collections, **rest})


LINEN_SOWN = ("losses", "intermediates")
"""The Linen collections that a forward pass fills with `sow` and that a state doesn't store."""


def nnx_sown_types() -> tuple[Any, ...]:
    """Returns the types of the NNX variables that a forward pass creates with `sow` and that a state doesn't store."""
    return nnx.variable_type_from_name("losses", allow_register=True), nnx.Intermediate


def apply_gradients(state: Any, grads: Any, value: Any = None, value_fn: Callable[[Any], Any] | None = None) -> Any:
    """Returns the state after applying gradients.

    An optimizer that accepts extra arguments also receives the loss as `value`, the gradients as `grad`, and a function
    that computes the loss from parameters as `value_fn`.
    """
    tx = getattr(state, "tx", None)
    if isinstance(tx, optax.GradientTransformationExtraArgs):
        # Bound to the optimizer, so that an override of `apply_gradients` doesn't need to pass them on.
        update = functools.partial(tx.update, value=value, grad=grads, value_fn=value_fn)
        return apply_gradients(state.replace(tx=optax.GradientTransformation(tx.init, update)), grads).replace(tx=tx)
    return state.apply_gradients(grads=grads)


def params_to_evaluate(state: Any) -> Any:
    """Returns the parameters to use in evaluation, which depend on the optimizer that the state was trained with.

    For `optax.contrib.schedule_free`, this function returns the same averages as
    `optax.contrib.schedule_free_eval_params`. For all other optimizers, it returns `state.params`.
    """
    params = state.params
    opt_state = _with_initial_params(getattr(state, "opt_state", None), params)
    for node in filter(_is_free, jax.tree.leaves(opt_state, is_leaf=_is_free)):
        value = lambda z, y, b1=node.b1: y if _is_masked(z) else ((y - (1 - b1) * z) / b1).astype(y.dtype)
        params = jax.tree.map(value, node.z, params, is_leaf=_is_masked)
    return params


def _with_initial_params(opt_state: Any, params: Any) -> Any:
    """Returns an optimizer's state in which the `z` of each `ScheduleFreeState` is reset to the given parameters.

    This is necessary if parameters were loaded after the optimizer's state had been created. Once the optimizer has
    made an update, its state is returned unchanged.
    """

    def start(node: Any) -> Any:
        is_alike = lambda z, y: not _is_masked(z) and getattr(y, "shape", None) == z.shape
        value = lambda z, y: jnp.where(node.step_count == 1, y.astype(z.dtype), z) if is_alike(z, y) else z
        return node._replace(z=jax.tree.map(value, node.z, params, is_leaf=_is_masked)) if _is_free(node) else node

    return jax.tree.map(start, opt_state, is_leaf=_is_free)


def _is_free(node: Any) -> bool:
    return isinstance(node, optax.contrib.ScheduleFreeState)


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)


class MetricType(enum.Enum):
    """The kind of a value, such as image or audio, which determines how a writer displays the value."""

    SCALAR = "scalar"
    IMAGE = "image"
    VIDEO = "video"
    AUDIO = "audio"
    TEXT = "text"
    HISTOGRAM = "histogram"
    OTHER = "other"


@final
@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class MetricWithMetadata:
    """A value for a writer, together with its kind, such as image or audio.

    A `MetricWithMetadata` is a pytree, so `Step.run` can return it.

    Attributes:
      value: An array. Its shape is `[N, H, W, C]` for images, `[N, T, H, W, C]` for videos, and `[N, T, C]` for audio.
        Scalars and histograms may have any shape. Text is a string, which only `Step.end` can return, because jitted
        code can't return strings.
      type: The kind of value, which determines how a writer displays it.
      metadata: Hashable values for the writer, keyed by name, such as `{"sample_rate": 16_000}` for audio or
        `{"num_buckets": 30}` for a histogram.

    >>> images = MetricWithMetadata(jnp.zeros([4, 8, 8, 1]), MetricType.IMAGE)
    >>> jax.tree.map(jnp.shape, images).value
    (4, 8, 8, 1)
    """

    value: Any
    type: MetricType = MetricType.SCALAR
    metadata: Mapping[str, Hashable] | None = None

    def tree_flatten(self) -> tuple[tuple[Any], tuple[MetricType, Any]]:
        metadata = None if self.metadata is None else tuple(sorted(self.metadata.items()))
        return (self.value,), (self.type, metadata)

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> Self:
        kind, metadata = aux
        return cls(children[0], kind, None if metadata is None else dict(metadata))


@final
@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, init=False)
class Weighted:
    """A mean with its own weight, such as the loss per token. A `Weighted` is a pytree, so `Step.run` can return it.

    Over several steps, the mean is `sum(value * weight) / sum(weight)`, computed in float64. Without `Weighted`, all
    values of a step are weighted by the step's number of examples.

    >>> losses, is_token = jnp.array([[1.0, 2.0, 9.0], [3.0, 9.0, 9.0]]), jnp.array([[1, 1, 0], [1, 0, 0]])
    >>> loss = Weighted(losses, is_token)
    >>> float(loss.value), float(loss.weight)
    (2.0, 3.0)

    Attributes:
      value: The mean (a scalar), or 0 if the weight is 0.
      weight: The mean's weight (a scalar), such as the number of tokens, pixels or graphs.

    Args:
      value: A scalar, or an array whose weighted mean is computed.
      weight: A scalar, or an array that can be broadcast to the shape of `value`. Values whose weight is 0 are ignored,
        even if they are NaN. However, such a NaN can make the gradient NaN.

    Raises:
      ValueError: If `weight` can't be broadcast to the shape of `value`.
    """

    value: Any
    weight: Any

    def __init__(self, value: Any, weight: Any):
        value, weight = jnp.asarray(value), jnp.asarray(weight)
        try:
            weight = jnp.broadcast_to(weight, value.shape)
        except ValueError:
            raise ValueError(
                f"Weighted needs a weight that can be broadcast to the value's shape {value.shape}, got {weight.shape}."
            ) from None
        is_wide = jnp.issubdtype(value.dtype, jnp.floating) and value.dtype.itemsize >= 4
        dtype = value.dtype if is_wide else jnp.float32
        value, weight = value.astype(dtype), weight.astype(dtype)
        value, total = jnp.where(weight == 0, 0, value), weight.sum()
        mean = (value * weight).sum() / jnp.where(total == 0, 1, total) if value.ndim else value
        self._set(mean, total)

    @classmethod
    def of(cls, value: Any, weight: Any) -> Self:
        """Creates a `Weighted` from a mean and its weight, without computing anything.

        >>> Weighted.of(0.5, 12)
        Weighted(value=0.5, weight=12)
        """
        weighted = object.__new__(cls)
        weighted._set(value, weight)
        return weighted

    def __float__(self) -> float:
        return float(self.value)

    def _set(self, value: Any, weight: Any) -> None:
        object.__setattr__(self, "value", value)
        object.__setattr__(self, "weight", weight)

    def tree_flatten_with_keys(self) -> tuple[tuple[Any, Any], None]:
        key = jax.tree_util.GetAttrKey
        return ((key("value"), self.value), (key("weight"), self.weight)), None

    @classmethod
    def tree_unflatten(cls, aux: None, children: Any) -> Self:
        return cls.of(*children)


def mean_losses(outputs: Mapping[str, Any], num_examples: int | None) -> dict[str, Any]:
    """Returns the outputs with each array of per-example losses replaced by its mean.

    >>> mean_losses({"loss": jnp.array([1.0, 3.0]), "logits": jnp.array([1.0, 3.0])}, 2)
    {'loss': Array(2., dtype=float32), 'logits': Array([1., 3.], dtype=float32)}

    Args:
      outputs: The outputs of a step. Those whose names contain "loss" are treated as losses.
      num_examples: The number of examples in the batch. If None (unknown), the outputs are returned unchanged.
    """
    return {name: mean_loss(each, num_examples) if "loss" in name.lower() else each for name, each in outputs.items()}


def mean_loss(loss: Any, num_examples: int | None) -> Any:
    """Returns the mean of an array of per-example losses. Returns any other loss unchanged."""
    is_array = isinstance(loss, jax.Array) and jnp.issubdtype(loss.dtype, jnp.floating)
    return loss.mean() if is_array and loss.shape == (num_examples,) else loss


@final
class TurnBack(BaseException):
    """Raised by an action to make the run return to an earlier checkpoint and leave out the batches of some steps.

    The `OuterLoop` returns to the newest checkpoint before those steps, moves later checkpoints to
    `<directory>/abandoned`, adds a "detour" row to the history, and continues as if those batches had never been in the
    data. In a multi-process job, all processes must raise this exception at the same step. Like `KeyboardInterrupt`,
    `TurnBack` is not a subclass of `Exception`.

    >>> raise TurnBack(38, 40, "The loss exploded.")
    Traceback (most recent call last):
    jaxloop.types.TurnBack: The loss exploded. Only the train loop of an OuterLoop can return to a checkpoint.

    Args:
      first: The first step whose batch is left out.
      last: The last step whose batch is left out.
      reason: The reason, as a sentence.
      at_most: The maximum number of returns to a checkpoint in a run, or None for no limit. If this number would be
        exceeded, the run ends with an error instead.
    """

    def __init__(self, first: int, last: int, reason: str, *, at_most: int | None = None):
        super().__init__(f"{reason} Only the train loop of an OuterLoop can return to a checkpoint.")
        self.first: int = first
        self.last: int = last
        self.reason: str = reason
        self.at_most: int | None = at_most
