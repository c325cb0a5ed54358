"""`LossStep`, which trains a model of any kind with a loss function."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging

from jaxloop import data, partition, types
from jaxloop.actions.action import Action
from jaxloop.base import checks, structures
from jaxloop.metrics import fetch, is_metric, merge, value_of
from jaxloop.models import optimizers
from jaxloop.processes import agreement
from jaxloop.step import NO_OPTIMIZER, NumpyStep, Step, forward
from jaxloop.step.runner import Runner

LossFn = Callable[[Any, types.Batch], Any]
"""`loss(outputs, batch)` returns `losses`, or `(losses, metrics)`."""

_INPUT_NAMES = ("inputs", "input", "x", "image", "images", "features", "pixels")


class _UnmaskedWatch(checks.BatchWatch):
    """Checks the batches without their masks."""

    def look(self, batches: Sequence[Any], step: Any) -> int | None:
        try:
            return super().look([each.batch if isinstance(each, _MaskedBatch) else each for each in batches], step)
        except ValueError as error:
            if step._reason_to_remove and "max_batch_shapes" in str(error):
                error.add_note(
                    f"Padding can't help: rows whose mask is 0 are removed, because {step._reason_to_remove}. "
                    "Give all batches the same number of unmasked rows."
                )
            raise


class _PaddingRunner(Runner):
    """Runs a `LossStep`, which pads and masks its batches."""

    watch_class = _UnmaskedWatch
    _full_mask: jax.Array | None = None  # The mask of a batch without padding, on the device.

    def begin_reads_state(self, batch: types.Batch) -> bool:
        # `LossStep.begin` reads the state only to pad a batch, or if rows are masked.
        return self.step._always_reads_state or _mask_of(batch) is not None

    def filler(self) -> Callable[[int], None] | None:
        return self.step._set_padded_size if not self.step.train or self.step._batch_size else None

    def place(self, batch: types.Batch, *, evaluates: bool = False, fuses: bool = False) -> types.Batch:
        placed = super().place(batch, evaluates=evaluates, fuses=fuses)
        mask = placed.mask if isinstance(placed, _MaskedBatch) else None
        if not isinstance(mask, np.ndarray) or mask is not _all_real(len(mask)):
            return placed
        if self._full_mask is None or len(self._full_mask) != len(mask):  # Transferred once, not at each step.
            self._full_mask = jnp.asarray(mask)
        return placed._replace(mask=self._full_mask)


class LossStep(NumpyStep):
    """A `Step` for which you only provide the loss, `loss(outputs, batch)`, as a method or as an argument.

    `outputs` is the model's output for the batch's inputs. The loss returns an array of shape `[batch]` with one number
    per example, a scalar, or `jaxloop.Weighted(losses, weights)` for a mean over tokens or pixels. To add metrics,
    return a pair `(losses, metrics)`, where `metrics` is a dict in which each value has one of these three forms.

    With `train=True`, a step makes one optimizer update, using the gradient of the mean loss, and updates the model's
    batch statistics and other variables. With `train=False`, a step calls the model in evaluation mode and doesn't
    change the state. In both cases, the outputs are `{"loss": ..., **metrics}`, averaged over the examples of the
    batch.

    Hooks:
      loss: Called by `run` for each batch or micro-batch. It is compiled, so it must be pure.
      preprocess_batch: See `Step`. An override must first call `super().preprocess_batch`, which converts tensors to
        NumPy arrays.
      begin: See `Step`. An override must end by calling `super().begin`, which adds the mask and returns a batch that
        only `run` can use.
      end, num_examples, make_state, params_to_evaluate: See `Step`.

    >>> import optax
    >>> from flax import linen as nn
    >>> class Regression(LossStep):
    ...     def loss(self, outputs, batch):
    ...         return jnp.mean((outputs - batch["y"]) ** 2, axis=-1)
    >>> step = Regression(jax.random.key(0), nn.Dense(1), optax.sgd(0.1), train=True)
    >>> state = step.initialize_model([1, 3])
    >>> batch = {"x": np.ones([8, 3], np.float32), "y": np.ones([8, 1], np.float32)}
    >>> state, outputs = step(state, batch)
    >>> int(state.step), sorted(outputs)
    (1, ['loss'])

    The loss and the metrics can be functions, and the model can be a pytree of parameters:

    >>> def loss(params, batch):
    ...     return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2, axis=-1)
    >>> error = lambda params, batch: jnp.abs(batch["x"] @ params["w"] - batch["y"]).mean(axis=-1)
    >>> params = {"w": np.zeros([3, 1], np.float32)}
    >>> step = LossStep(jax.random.key(0), params, optax.sgd(0.1), train=True, loss=loss, metrics={"error": error})
    >>> state, outputs = step(step.initialize_model(), batch)
    >>> float(outputs["loss"]), float(outputs["error"])
    (1.0, 1.0)

    **Models.** `model` is

    - a Linen module;
    - an NNX class, with `nnx_model_args`, or an NNX instance, whose variables become the initial variables;
    - an Equinox module, which is called on one example at a time under `jax.vmap`. If it takes a `key`, each example
      gets its own key in training. `state.apply_fn(state.params)` returns the module. For a module with a state, pass
      the pair that `eqx.nn.make_with_state(...)` returns;
    - a pair of functions: `init(key, inputs) -> params` and `apply(params, inputs)`. `apply` may also take any of
      `train`, `rngs` (a dict), `rng` and `key`;
    - a pytree of parameters, which the loss receives instead of outputs: `loss(params, batch)`.

    `jaxloop.models.forward` describes how each kind receives its keys and the training mode. The keys come from
    `prng_key(state.step)`, so they depend only on `base_prng` and the step. NNX models keep their own keys in the
    state.

    **Masks and short batches.** A batch that is a dict may contain a `"mask"` of shape `[batch]` that consists of
    bools, or of 0s and 1s. Examples whose mask is 0 are excluded from means and from the update, even if they contain
    NaN: they are replaced by copies of another row before the step. A mask of any other shape is ignored, so the loss
    must apply it. Masks aren't applied to scalar or `Weighted` losses and metrics, so multiply by the mask.

    A short batch is padded with masked copies of its last row if that doesn't change any value. This requires that the
    loss and all metrics are per example and that, in training, the model doesn't mix examples (batch normalization
    does). When a row is masked for the first time, the step is run with two different contents of that row, without an
    update, to make sure that the values don't depend on it, as those of contrastive losses do. An evaluation pads to
    the size of the loop's first batch, so that the step compiles only once. Training pads to `batch_size` or, if it is
    None, to the next multiple of the number of devices in the mesh, times `accumulate`. If masked rows would change a
    value, a batch stays short, and its masked rows are removed. The values are then still exact, but the step has to be
    compiled again for each number of rows, and training raises an error if the devices or the micro-batches can't
    divide the rows evenly.

    **Micro-batches.** `accumulate=4` splits each training batch into four micro-batches, runs them one after another on
    the devices, and sums their gradients, weighted by the number of examples or, for a `Weighted` loss, by its weight.
    The update is the same as for the whole batch, but needs a quarter of the memory. However, batch normalization and
    losses that compare examples see one micro-batch at a time. The loss and the metrics must not be scalars, which
    could be means or sums; return `Weighted(mean, rows)`. If masked rows don't change any value, the batch size doesn't
    have to be a multiple of four. On a mesh, each row stays on its device. On CPUs, XLA generates slow code for
    convolutions inside the loop over micro-batches.

    **Sown losses and optimizers that need the loss.** Losses that a Linen or NNX model sows, as in
    `self.sow("losses", "name", value)`, are added to the loss, also in evaluations. Each must be a scalar (a mean) or
    an array `[batch]`. Optimizers that take them receive the loss as `value`, the gradients as `grad`, and a function
    that computes the loss from parameters as `value_fn`, so `optax.contrib.reduce_on_plateau` and `optax.lbfgs` work.

    Args:
      base_prng: See `Step`, which also describes the arguments that are not listed here.
      model: A model of any kind listed above.
      loss: The loss function, unless a subclass defines the method `loss`.
      metrics: A dict of functions `(outputs, batch) -> value` for additional metrics.
      inputs: The key of the model's inputs in the batch, or a function that takes the batch and returns them. By
        default, the inputs are the first element if the batch is a tuple or list; the value under "inputs", "input",
        "x", "image", "images", "features" or "pixels" if it is a dict; or the batch itself if it is an array. A
        Linen or NNX model with several inputs takes them from a tuple, or from a dict keyed by argument name. A pytree
        of parameters has no inputs.
      accumulate: The number of micro-batches into which each training batch is split.
      compute_dtype: The dtype of the forward pass, such as `jnp.bfloat16`. Parameters and floating-point inputs are
        cast to it, and the outputs are cast to float32 for the loss. Parameters, gradients and the optimizer's state
        keep their dtypes.
      batch_size: The number of rows to pad short training batches to. If None, the default described above is used.
      trainable: A pattern for the paths of the parameters to train, such as `"head/**"`, or a list of patterns; see
        `jaxloop.base.path_patterns.matches`. All other parameters are frozen: they stay bit-identical, and the
        optimizer has no state for them. If None, all parameters are trained. To use a different optimizer for each
        part, see `jaxloop.optimizers.by_path`.
      ema: The decay of an exponential moving average of the parameters, such as 0.999, or a function that computes the
        decay from the number of updates. The average is part of the optimizer's state; see `jaxloop.optimizers.ema`.
      use_ema: Whether to use the average of the parameters in evaluations, `predict` and `jaxloop.export`. The state
        must come from a step with `ema`. Batch statistics are not averaged.
      params_to_evaluate: A function of the state that returns the parameters to use there instead. If neither is given,
        see `Step.params_to_evaluate`.
      **nnx_model_kwargs: Keyword arguments for an NNX class.

    Raises:
      TypeError: If the loss is missing or is given both as an argument and as a method, if a keyword is unknown, or if
        the kind of model isn't supported.
    """

    _runner_class = _PaddingRunner

    def __init__(
        self,
        base_prng: types.PRNGType,
        model: Any,
        optimizer: optax.GradientTransformation | None = NO_OPTIMIZER,
        partitioner: partition.Partitioner = partition.SingleDevicePartitioner(),  # noqa: B008 (stateless)
        train: bool = False,
        should_shard_batch: bool = True,
        nnx_model_args: Sequence[Any] | None = None,
        begin_actions: Sequence[Action] | None = None,
        end_actions: Sequence[Action] | None = None,
        *,
        loss: LossFn | None = None,
        metrics: Mapping[str, LossFn] | None = None,
        inputs: str | int | Callable[[types.Batch], Any] | None = None,
        accumulate: int = 1,
        compute_dtype: Any = None,
        batch_size: int | None = None,
        trainable: str | Sequence[str] | None = None,
        ema: float | Callable[[jax.Array], Any] | None = None,
        use_ema: bool = False,
        params_to_evaluate: Callable[[Any], Any] | None = None,
        **nnx_model_kwargs: Any,
    ):
        optimizer = NO_OPTIMIZER if optimizer is None else optimizer
        if use_ema and train:
            raise ValueError("use_ema=True is for evaluations, got train=True. A training step updates the parameters.")
        if trainable is not None and optimizer is not NO_OPTIMIZER:
            patterns = [trainable] if isinstance(trainable, str) else trainable
            optimizer = optimizers.by_path({**dict.fromkeys(patterns, optimizer), "**": None})
        if ema is not None and not (train and optimizer is NO_OPTIMIZER):
            optimizer = optax.chain(optimizer, optimizers.ema(ema))
        super().__init__(
            base_prng,
            model,
            optimizer,
            partitioner,
            train,
            should_shard_batch,
            nnx_model_args,
            begin_actions,
            end_actions,
            **nnx_model_kwargs,
        )
        self._check_functions(loss, metrics or {})
        adapted = forward.adapt(model)
        self._takes_inputs = not isinstance(getattr(adapted, "apply_fn", None), forward.ParamsApply)
        if not self._takes_inputs and (inputs is not None or compute_dtype is not None):
            raise ValueError(
                f"{type(self).__name__} got {'inputs' if inputs is not None else 'compute_dtype'}, which is for a "
                f"forward pass, and {adapted.kind}: the loss receives the parameters and the batch unchanged. "
                "Leave it out."
            )
        if compute_dtype is not None and not jnp.issubdtype(compute_dtype, jnp.floating):
            raise ValueError(f"compute_dtype must be a floating-point type or None, got {compute_dtype!r}.")
        checks.check_positive("accumulate", accumulate)
        checks.check_positive("batch_size", batch_size, optional=True)
        self._loss = loss
        self._metrics = dict(metrics or {})
        self._inputs = inputs
        self._accumulate = accumulate
        self._compute_dtype = compute_dtype
        self._batch_size = batch_size
        self._params_to_evaluate = params_to_evaluate or (optimizers.ema_params if use_ema else None)
        may_pad = not train or batch_size is not None or accumulate > 1 or partitioner.local_shards > 1
        self._always_reads_state = may_pad or any(
            checks.is_user_defined(self, n) for n in ("preprocess_batch", "begin")
        )
        self._eval_rows: int | None = None  # In an evaluation, the number of rows in the loop's first batch.
        self._forward: _Forward | None = None  # Made by `predict`, and kept with its compiled function.
        self._not_per_example: tuple[str, ...] | None = None  # Names of values; None until `run` is traced.
        self._reads_masked_rows: tuple[str, ...] | None = None  # Names of values; None until rows are first masked.
        self._reason_to_remove: str | None = None  # The reason why masked rows were removed, if they were.

    def _check_functions(self, loss: LossFn | None, metrics: Mapping[str, LossFn]) -> None:
        if (loss is not None) == (type(self).loss is not LossStep.loss):
            raise TypeError(
                f"{type(self).__name__} needs one loss: the argument loss=, or a subclass that defines "
                f"loss(self, outputs, batch). It got {'both' if loss is not None else 'neither'}."
            )
        for name, value in {"loss": loss, **metrics}.items():
            if value is not None and not callable(value):
                raise TypeError(f"{name} must be a function of (outputs, batch), got {value!r}.")
        if "loss" in metrics:
            raise ValueError(
                "metrics holds a function named 'loss', the name of the loss itself. Give it another name."
            )

    # To override ---------------------------------------------------------------------------------

    def loss(self, outputs: Any, batch: types.Batch) -> Any:
        """Returns the loss: an array of shape `[batch]`, a scalar, a `Weighted`, or a pair `(losses, metrics)`.

        This method is compiled, so it must be pure.

        Args:
          outputs: The output of the model or, if the model is a pytree of parameters, the parameters.
          batch: The batch (or a micro-batch, with `accumulate`), already placed on the devices.
        """
        assert self._loss is not None
        return self._loss(outputs, batch)

    def begin(self, state: Any, batch: types.Batch) -> tuple[Any, types.Batch]:
        """Adds a mask to the batch, pads the batch if it is short, and replaces or removes rows whose mask is 0.

        The returned batch can only be passed to `run`.
        """
        rows = checks.num_examples(batch)
        if rows is None or (rows == 0 and not self._is_shared):
            return state, batch
        mask, size = _mask_of(batch), self._padded_size(rows)
        is_real = _all_real(rows) if mask is None else np.asarray(mask, bool)
        if size == rows and (mask is None or is_real.all()):
            return state, _MaskedBatch(batch, _all_real(rows))
        filled = _fill(batch, is_real, size)
        if not is_real.any() and not self._is_shared:
            return state, filled
        reason = self._reason_not_to_fill(state, filled, pads=size > rows)
        if reason is None:
            return state, filled
        real_rows = int(is_real.sum())
        is_split = self.train and (self._accumulate > 1 or self._should_shard_batch)
        if self._is_shared or (is_split and real_rows != self._divisible(real_rows)):
            which, remedy = "rows", "Drop the remainder."
            if real_rows < rows:
                which, remedy = "unmasked rows", "Give batches without masked rows, and drop the remainder."
            raise ValueError(
                f"{self!r} must fill up a batch of {real_rows} {which} to {size}, the size in other processes or a "
                f"multiple of the devices and micro-batches, but that would change the result: {reason}. {remedy}"
            )
        if real_rows < rows:
            self._reason_to_remove = reason
        batch = jax.tree.map(lambda leaf: leaf[is_real] if np.ndim(leaf) else leaf, batch)
        return state, _MaskedBatch(batch, _all_real(real_rows))

    def num_examples(self, batch: types.Batch) -> int:
        """Returns the number of examples, excluding those whose mask is 0; see `Step.num_examples`."""
        mask = _mask_of(batch)
        if mask is None:
            return super().num_examples(batch)
        values = np.asarray(fetch(data.numpy_batch(mask)))
        if not np.all((values == 0) | (values == 1)):
            raise ValueError(
                f"batch['mask'] is {checks.describe(values)} with values other than 0 and 1, but it marks the examples "
                "that count. Give weights another name, and multiply the losses by them."
            )
        return int(np.sum(values, dtype=np.int64))

    # The model -----------------------------------------------------------------------------------

    def input_spec(self, batch: types.Batch) -> types.BatchSpec:
        """Returns the spec of the model's inputs for `initialize_model`, or None for a pytree of parameters.

        The spec describes the inputs of a host batch, but with a single row.

        >>> step = LossStep(jax.random.key(0), (jnp.zeros, jnp.dot), loss=lambda outputs, batch: outputs)
        >>> step.input_spec({"x": np.zeros([32, 28, 28, 1]), "y": np.zeros(32)})
        ShapeDtypeStruct(shape=(1, 28, 28, 1), dtype=float32)
        """

        def spec(leaf: Any) -> jax.ShapeDtypeStruct:
            shape, dtype = np.shape(leaf), jax.dtypes.canonicalize_dtype(np.asarray(leaf).dtype)
            return jax.ShapeDtypeStruct((1, *shape[1:]) if shape else shape, dtype)

        inputs = self._inputs_of(self.preprocess_batch(batch))
        return None if inputs is None else jax.tree.map(spec, inputs)

    def params_to_evaluate(self, state: Any) -> Any:
        return (self._params_to_evaluate or super().params_to_evaluate)(state)

    def predict(self, state: Any, dataset: Any) -> Any:
        """Returns the outputs of the model for all examples of a dataset, in order.

        The model is called in evaluation mode on the partitioner's devices, with one dispatch per batch. The result
        doesn't include padding or examples whose mask is 0. The loss isn't called, so batches don't need labels.

        >>> model = (lambda key, x: jnp.ones([3, 2]), lambda params, x: x @ params)
        >>> step = LossStep(jax.random.key(0), model, loss=lambda outputs, batch: outputs)
        >>> batches = [np.ones([4, 3], np.float32), np.ones([1, 3], np.float32)]
        >>> step.predict(step.initialize_model([1, 3]), batches).shape
        (5, 2)

        Args:
          state: The state, which is not donated.
          dataset: Batches, in any form that `jaxloop.data.batches` accepts.

        Returns:
          The outputs as NumPy arrays, with one row per example.

        Raises:
          ValueError: If the dataset is empty, or if an output has no example axis.
          NotImplementedError: If this is a multi-process job.
        """
        checks.check_only_process("LossStep.predict")
        if self._forward is None or self._forward.partitioner is not self._partitioner:
            self._forward = _Forward(self)
        pending, parts = None, []
        for batch in data.batches(dataset):
            newest = self._forward.predict(state, self.preprocess_batch(batch))
            if pending is not None:  # The devices compute the newest batch while the previous one is read.
                parts.append(_read_rows(*pending))
            pending = newest
        if pending is None:
            raise ValueError("LossStep.predict got a dataset without batches. An iterator can be read only once.")
        parts.append(_read_rows(*pending))
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)

    # Running -------------------------------------------------------------------------------------

    def begin_evaluation(self) -> None:
        # Forgets earlier loops, so that an evaluation is the same in a resumed run.
        self._eval_rows = None

    def _set_padded_size(self, rows: int) -> None:
        if not self.train:
            self._eval_rows = max(rows, self._eval_rows or rows)
        elif rows > (self._batch_size or rows):
            raise ValueError(
                f"A batch has {rows} rows, and other batches have fewer. Give batch_size={rows} to {self!r}."
            )

    def run(self, state: Any, batch: types.Batch) -> tuple[Any, types.Output]:
        if not isinstance(batch, _MaskedBatch):  # An override of `begin` made it.
            rows, mask = checks.num_examples(batch), _mask_of(batch)
            all_real = None if rows is None else _all_real(rows)
            batch = _MaskedBatch(batch, all_real if mask is None else mask.astype(bool))
        batch, mask = batch.batch, batch.mask
        keys = self.prng_key(state.step)
        if not self.train:
            _, (values, outputs, _) = self._mean_loss(self.params_to_evaluate(state), state, batch, mask, keys)
            return state, {**values, **self._more_metrics(values, outputs, batch, mask)}
        gradients = self._gradients if self._accumulate == 1 else self._accumulated_gradients
        grads, values, new_state = gradients(state, batch, mask, keys)
        value_fn = lambda params: self._mean_loss(params, state, batch, mask, keys)[0]
        return types.apply_gradients(new_state, grads, value_of(values["loss"]), value_fn), values

    def call_model(
        self, state: Any, params: Any, inputs: Any, *, train: bool | None = None, keys: Any = None
    ) -> tuple[Any, Any]:
        if self._compute_dtype is None:
            return super().call_model(state, params, inputs, train=train, keys=keys)
        params, inputs = _cast_floating((params, inputs), self._compute_dtype)
        outputs, updates = super().call_model(state, params, inputs, train=train, keys=keys)
        return _cast_floating(outputs, jnp.float32), updates

    def _mean_loss(self, params: Any, state: Any, batch: Any, mask: Any, keys: Any) -> tuple[jax.Array, Any]:
        """Returns the mean loss and `(values, outputs, updates)`."""
        outputs, updates = self.call_model(state, params, self._inputs_of(batch), train=self.train, keys=keys)
        values = self._call_loss(outputs, batch)
        self._not_per_example = ()
        means = {name: self._mean(name, value, mask) for name, value in values.items()}
        loss = means["loss"]
        for sown in forward.sown_losses(updates):
            mean, *weight = jax.tree.leaves(loss)
            more = self._mean("sown loss", sown, mask).astype(mean.dtype)
            loss = jax.tree.unflatten(jax.tree.structure(loss), [mean + more, *weight])
        return value_of(loss), ({**means, "loss": loss}, outputs, updates)

    def _call_loss(self, outputs: Any, batch: Any) -> dict[str, Any]:
        result = self.loss(outputs, batch)
        more: Any = {}
        if isinstance(result, tuple):
            if len(result) != 2 or not isinstance(result[1], Mapping):
                shown = ", ".join(map(checks.describe, result))
                raise TypeError(f"{self._name_of_loss} must return losses or (losses, metrics), got ({shown}).")
            result, more = result
        mean = value_of(result)
        if not isinstance(mean, float) and not jnp.issubdtype(getattr(mean, "dtype", bool), jnp.floating):
            raise TypeError(
                f"{self._name_of_loss} must return floating-point losses (an array [batch], a scalar or a Weighted "
                f"mean), or the pair (losses, metrics), got {checks.describe(result)}."
            )
        if "loss" in more:
            raise ValueError(
                f"{self._name_of_loss} returned a metric named 'loss', the name of the loss itself. Give it another."
            )
        return {"loss": result, **types.nnx_metrics_as_weighted(more)}

    def _more_metrics(self, values: Mapping[str, Any], outputs: Any, batch: Any, mask: Any) -> dict[str, Any]:
        """Returns the values of the functions in `metrics`."""
        if both := [name for name in self._metrics if name in values]:
            raise ValueError(
                f"There are two metrics named {_quoted(both)}: {self._name_of_loss} returned one, and metrics= holds "
                "another. Rename one of them."
            )
        more = types.nnx_metrics_as_weighted({name: metric(outputs, batch) for name, metric in self._metrics.items()})
        return {name: self._mean(name, value, mask) for name, value in more.items()}

    def _mean(self, name: str, value: Any, mask: Any) -> Any:
        """Returns the mean of a per-example value over the unmasked examples, and other values unchanged."""
        if isinstance(value, types.MetricWithMetadata) and value.type is types.MetricType.SCALAR:
            return types.MetricWithMetadata(self._mean(name, value.value, mask), value.type, value.metadata)
        is_per_example = False
        if not isinstance(value, types.MetricWithMetadata | types.Weighted) and not is_metric(value):
            value = self._array_of(name, value, mask)
            is_per_example = value.ndim == 1
            if is_per_example:
                value = jnp.sum(jnp.where(mask, value, 0)) / jnp.maximum(_count(mask), 1)
            elif mask is not None:
                value = jnp.where(mask.any(), value, 0)
        if not is_per_example:
            self._not_per_example = (*(self._not_per_example or ()), name)
        return value

    def _array_of(self, name: str, value: Any, mask: Any) -> jax.Array:
        what = self._name_of_loss if name == "loss" else f"The metric {name!r}"
        if not hasattr(value, "dtype") and not isinstance(value, bool | int | float):
            raise TypeError(
                f"{what} must be an array [batch], a scalar, a Weighted mean, a MetricWithMetadata, or a metric with "
                f"`merge` and `compute`, got {checks.describe(value)}."
            )
        value = jnp.asarray(value)
        if value.ndim == 0 and self.train and self._accumulate > 1 and name != "sown loss":
            raise ValueError(
                f"{what} is a scalar, and {self!r} combines the values of {self._accumulate} micro-batches, but a "
                "scalar doesn't tell whether it is a mean or a sum, and over how many rows. Return one number for each "
                "example, or a mean with its weight: jaxloop.Weighted(mean, rows)."
            )
        if value.ndim == 0 or (mask is not None and value.shape == mask.shape):
            return value.astype(_sum_dtype(value))
        if mask is None:
            raise ValueError(
                f"{what} is {checks.describe(value)}, but the leaves of the batch share no leading axis, so the number "
                "of examples is unknown. Return a scalar."
            )
        rows = mask.shape[0]
        remedy = "Return one number for each example, or the mean over all as a scalar."
        if value.shape[0] == rows:
            axes = tuple(range(1, value.ndim))
            mean = f".mean(axis={axes[0] if len(axes) == 1 else axes})"
            if value.size == rows:
                remedy = f"Take the mean over the other axes, {mean}, or leave out keepdims=True."
            else:
                weighted = f"jaxloop.Weighted({'losses' if name == 'loss' else 'values'}, mask)"
                remedy = f"Return {weighted}, which leaves out padding, or, without padding, the mean {mean}."
        elif value.size == 1:
            remedy = "Leave out keepdims=True, or take [0]."
        raise ValueError(
            f"{what} is {checks.describe(value)} for {rows} examples; it must be per example, {value.dtype}[{rows}], "
            f"or a scalar. {remedy}"
        )

    def _gradients(self, state: Any, batch: Any, mask: Any, keys: Any) -> tuple[Any, dict[str, Any], Any]:
        """Returns the direction in which the mean loss increases, all outputs, and the state with updated variables."""
        with_gradients = jax.value_and_grad(self._mean_loss, has_aux=True)
        (_, (values, outputs, updates)), grads = with_gradients(state.params, state, batch, mask, keys)
        values = {**values, **self._more_metrics(values, outputs, batch, mask)}
        weight, has_rows = _weight(values["loss"], mask), True if mask is None else mask.any()
        # JAX returns the conjugate of the direction. For a batch without examples, it may be NaN.
        grads = jax.tree.map(lambda grad: jnp.where(weight > 0, jnp.conj(grad), 0), grads)
        return grads, values, _with_variables(state, state.update_variables(updates), has_rows)

    def _accumulated_gradients(self, state: Any, batch: Any, mask: Any, keys: Any) -> tuple[Any, dict[str, Any], Any]:
        """Computes the same values as `_gradients` by scanning over micro-batches."""
        if mask is None:
            raise ValueError(
                f"{self!r} has accumulate={self._accumulate}, and can't split a batch whose leaves share no leading "
                f"axis: {jax.tree.map(checks.describe, batch)}. Give all leaves the same leading axis, or leave out "
                "accumulate."
            )

        def add(carry: Any, part: Any) -> Any:
            grads_before, (batch_stats, collections) = carry
            number, (batch, mask) = part
            state_now = state.replace(batch_stats=batch_stats, collections=collections)
            keys_now = jax.tree.map(lambda key: jax.random.fold_in(key, number), keys)
            with forward.noting_changes():  # They are kept, so `Step` needn't look for them.
                grads, values, state_now = self._gradients(state_now, batch, mask, keys_now)
            weight = _weight(values["loss"], mask)
            grads = jax.tree.map(lambda before, new: before + _weighted(new, weight), grads_before, grads)
            return (grads, (state_now.batch_stats, state_now.collections)), (weight, _count(mask), values)

        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, _sum_dtype(leaf)), state.params)
        micro_batches = (jnp.arange(self._accumulate), self._split((batch, mask)))
        carry = (zeros, (state.batch_stats, state.collections))
        (grads, (batch_stats, collections)), (weights, counts, values) = jax.lax.scan(add, carry, micro_batches)
        total = weights.sum()
        total = jnp.where(total == 0, 1, total)
        grads = jax.tree.map(
            lambda grad, leaf: (grad / total.astype(grad.dtype)).astype(leaf.dtype), grads, state.params
        )
        shares = counts / jnp.maximum(counts.sum(), 1)
        values = {name: _combine(value, shares) for name, value in values.items()}
        return grads, values, state.replace(batch_stats=batch_stats, collections=collections)

    def _split(self, tree: Any) -> Any:
        """Splits the rows into micro-batches along a new first axis. Each row stays on its device."""
        parts, shards = self._accumulate, self._partitioner.shards

        def split(leaf: Any) -> jax.Array:
            leaf = jnp.asarray(leaf)
            if leaf.ndim == 0:
                return jnp.broadcast_to(leaf, (parts,))
            size = leaf.shape[0] // (parts * shards)
            # Adjacent rows go to different parts, which spreads the padding over the parts.
            leaf = jnp.moveaxis(leaf.reshape(shards, size, parts, *leaf.shape[1:]), 2, 0)
            return leaf.reshape(parts, shards * size, *leaf.shape[3:])

        return jax.tree.map(split, tree)

    def _inputs_of(self, batch: types.Batch) -> Any:
        """Returns the part of a batch that is passed to the model as its inputs, or None if the model takes none."""
        if not self._takes_inputs:
            return None
        if callable(self._inputs):
            return self._inputs(batch)
        if self._inputs is not None:
            try:
                return batch[self._inputs]
            except (KeyError, IndexError, TypeError):
                shown = f"the keys {', '.join(map(repr, batch))}" if isinstance(batch, Mapping) else _describe(batch)
                raise ValueError(f"The batch has no inputs={self._inputs!r}; it has {shown}.") from None
        if isinstance(batch, Mapping):
            found = [name for name in _INPUT_NAMES if name in batch]
            if len(found) == 1:
                return batch[found[0]]
            which = f"more than one of them, {', '.join(map(repr, found))}" if found else "none of them"
            raise ValueError(
                f"By default, the model's inputs are the value under one of {', '.join(map(repr, _INPUT_NAMES))}, and "
                f"the batch has {which}. Its keys are {', '.join(map(repr, batch))}. Name the key, inputs='...', or "
                "give a function of the batch."
            )
        if isinstance(batch, tuple | list) and batch:
            return batch[0]
        if hasattr(batch, "dtype"):
            return batch
        raise ValueError(
            f"A batch must be a dict, a tuple, a list or an array, got {_describe(batch)}. Give a function that "
            "returns the model's inputs: inputs=lambda batch: ..."
        )

    @property
    def _name_of_loss(self) -> str:
        return f"{type(self).__name__}.loss" if self._loss is None else "The loss"

    # Short batches -------------------------------------------------------------------------------

    def _padded_size(self, rows: int) -> int:
        """Returns the number of rows to which a batch should be padded."""
        if self.train:
            # The size depends only on this batch, because a resumed run doesn't know the earlier batches.
            return self._divisible(max(rows, self._batch_size or rows))
        self._eval_rows = max(rows, self._eval_rows or self._batch_size or rows)
        return self._divisible(self._eval_rows) if self._is_shared else self._eval_rows

    def _divisible(self, rows: int) -> int:
        """Rounds up a number of rows so that this process can divide them among its devices and micro-batches."""
        parts = self._partitioner.local_shards * (self._accumulate if self.train else 1)
        return -(-rows // parts) * parts

    @property
    def _is_shared(self) -> bool:
        """True if other processes hold a part of each batch."""
        return agreement.is_shared(self._partitioner.mesh)

    def _reason_not_to_fill(self, state: Any, filled: "_MaskedBatch", pads: bool) -> str | None:
        """Returns the reason why masked rows would change the results; None if they don't."""
        if forward.mixes_examples(state, train=self.train):
            return "the model mixes the examples of a batch, as batch normalization does"
        if pads and self._not_per_example is None:
            # The first batch is short: trace `run` to find out what the loss returns.
            jax.eval_shape(self._partitioner.partition(self.run), state, filled)
        names = self._not_per_example if pads else ()
        is_abstract = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(state))
        if not names and self._reads_masked_rows is None and not self._is_shared and not is_abstract:
            self._reads_masked_rows = self._values_that_read_masked_rows(state, filled)
            if self._reads_masked_rows:
                logging.warning(
                    "%r: %s depends on masked rows, so short batches aren't padded, and rows whose mask is 0 are "
                    "removed. The step is compiled for each number of rows. To avoid this, drop the remainder, or give "
                    "each batch a 'mask', and leave out the rows in which it is 0, for example as negatives of a loss "
                    "that compares examples.",
                    self,
                    _quoted(self._reads_masked_rows),
                )
        names = names or self._reads_masked_rows
        return f"these values depend on several examples: {_quoted(names)}" if names else None

    def _values_that_read_masked_rows(self, state: Any, filled: "_MaskedBatch") -> tuple[str, ...] | None:
        """Returns the names of the values that change with the contents of masked rows; None if the loss is NaN."""
        batch, mask = filled

        def change(leaf: Any) -> Any:
            if not np.ndim(leaf) or not (leaf.dtype == bool or jnp.issubdtype(leaf.dtype, np.number)):
                return leaf
            other = np.logical_not(leaf) if leaf.dtype == bool else leaf + 1
            return np.where(mask.reshape(-1, *[1] * (np.ndim(leaf) - 1)), leaf, other)

        changed = jax.tree.map(change, batch)
        if _mask_of(batch) is not None:
            changed["mask"] = batch["mask"]
        compiled = self._runner.programs.compiled(evaluates=True)
        place = lambda batch: self._runner.place(_MaskedBatch(batch, mask), evaluates=True)
        one, other = (fetch(compiled.call(compiled.enter(state), place(each))[1]) for each in (batch, changed))
        is_image = lambda value: isinstance(value_of(value), types.MetricWithMetadata)
        is_same = lambda *leaves: np.allclose(*leaves, rtol=1e-6, atol=0, equal_nan=True)
        same = lambda name: all(jax.tree.leaves(jax.tree.map(is_same, one[name], other[name])))
        names = tuple(name for name in one if not is_image(one[name]) and not same(name))
        # If the loss is NaN, for example because the parameters are, equal values don't prove anything.
        is_nan = any(np.isnan(leaf).any() for leaf in jax.tree.leaves(one.get("loss")))
        return None if is_nan and not names else names


# Batches with a mask ---------------------------------------------------------------------------------


class _MaskedBatch(NamedTuple):
    """A batch and the mask of its real rows: a bool array, or None if the rows can't be counted."""

    batch: Any
    mask: Any

    @property
    def rows(self) -> int:
        return self.mask.shape[0]


class _Forward(Step):
    """A step that only calls the model of a `LossStep`, for `LossStep.predict`."""

    def __init__(self, step: LossStep):
        super().__init__(step.base_prng, None, partitioner=step.partitioner)
        self._step = step

    def run(self, state: Any, batch: types.Batch) -> tuple[Any, types.Output]:
        params = self._step.params_to_evaluate(state)
        outputs, _ = self._step.call_model(state, params, self._step._inputs_of(batch), train=False)
        return state, {str(number): leaf for number, leaf in enumerate(self._leaves(outputs))}

    def _leaves(self, outputs: Any) -> list[Any]:
        leaves, self._structure = jax.tree.flatten(outputs)
        return leaves

    def predict(self, state: Any, batch: types.Batch) -> tuple[Any, Any]:
        """Returns the outputs, still on the devices, and the mask of the batch (None if it has no mask)."""
        rows, mask = checks.num_examples(batch), _mask_of(batch)
        outputs = self.evaluate(state, batch, per_loop_step_number=1) or {}
        outputs = jax.tree.unflatten(self._structure, [outputs[str(number)] for number in range(len(outputs))])
        for path, leaf in checks.leaves_by_path(outputs).items():
            if leaf.ndim == 0 or leaf.shape[0] != rows:
                raise ValueError(
                    f"LossStep.predict needs outputs with one row per example. For a batch of {rows} examples, the "
                    f"model returned {path or 'an output'} {checks.describe(leaf)}."
                )
        return outputs, mask


def _read_rows(outputs: Any, mask: Any) -> Any:
    """Fetches the outputs of a batch, leaving out examples whose mask is 0."""
    chosen = slice(None) if mask is None else np.asarray(fetch(mask), bool)
    return jax.tree.map(lambda leaf: leaf[chosen], fetch(outputs))


def _mask_of(batch: Any) -> Any:
    """Returns the mask of the examples in a batch, or None if it has none."""
    if not isinstance(batch, dict) or "mask" not in batch:
        return None
    mask = batch["mask"]
    rows = checks.num_examples(batch)
    is_vector = rows is not None and tuple(getattr(mask, "shape", ())) == (rows,)
    return mask if is_vector else None


@functools.lru_cache(maxsize=64)
def _all_real(rows: int) -> np.ndarray:
    mask = np.ones(rows, bool)
    mask.flags.writeable = False  # All batches with this number of rows share it.
    return mask


def _fill(batch: Any, is_real: np.ndarray, size: int) -> _MaskedBatch:
    """Pads a batch to `size` rows, and overwrites all rows that are not real, because they may hold NaN."""
    mask = np.concatenate([is_real, np.zeros(size - len(is_real), bool)])
    own_mask = _mask_of(batch)
    real = np.flatnonzero(is_real)
    # Copies of a row, because the loss may be undefined for zeros.
    chosen = np.where(mask, np.arange(size), real[-1] if len(real) else 0)

    def fill(leaf: Any) -> Any:
        if not np.ndim(leaf):
            return leaf
        may_copy = len(real) or (len(leaf) and not jnp.issubdtype(leaf.dtype, jnp.inexact))
        return leaf[chosen] if may_copy else np.zeros([size, *leaf.shape[1:]], leaf.dtype)

    filled = jax.tree.map(fill, batch)
    if own_mask is not None:
        filled["mask"] = mask.astype(own_mask.dtype)
    return _MaskedBatch(filled, mask)


def _count(mask: Any) -> jax.Array:
    return jnp.sum(mask, dtype=jnp.float32)


def _weight(loss: Any, mask: Any) -> jax.Array:
    """Returns the weight of a mean loss."""
    if isinstance(loss, types.Weighted):
        return loss.weight
    return jnp.float32(1) if mask is None else _count(mask)


def _combine(value: Any, weights: jax.Array) -> Any:
    """Combines the stacked values of the micro-batches into the value of the batch."""
    if isinstance(value, types.Weighted):
        return types.Weighted(value.value, value.weight)
    if is_metric(value):
        return merge([jax.tree.map(lambda leaf, part=part: leaf[part], value) for part in range(len(weights))])
    if isinstance(value, types.MetricWithMetadata) and value.type is not types.MetricType.SCALAR:
        return jax.tree.map(lambda leaf: leaf[0], value)
    return jax.tree.map(lambda leaf: jnp.sum(_weighted(leaf, weights)), value)


def _weighted(value: jax.Array, weight: jax.Array) -> jax.Array:
    dtype = _sum_dtype(value)
    return weight.astype(dtype) * value.astype(dtype)


def _sum_dtype(leaf: jax.Array) -> Any:
    """Returns the dtype in which to compute a mean: the dtype of the values, but at least float32."""
    is_wide = jnp.issubdtype(leaf.dtype, jnp.inexact) and leaf.dtype.itemsize >= 4
    return leaf.dtype if is_wide else jnp.float32


def _cast_floating(tree: Any, dtype: Any) -> Any:
    """Casts the floating-point leaves of a tree."""

    def cast(leaf: Any) -> Any:
        return jnp.asarray(leaf, dtype) if jnp.issubdtype(jnp.result_type(leaf), jnp.floating) else leaf

    return jax.tree.map(cast, tree)


def _with_variables(before: Any, after: Any, has_rows: Any) -> Any:
    """Returns the state `after`, with variables of the dtypes of `before`, and its values for a batch without rows."""
    variables = lambda state: (state.batch_stats, state.collections)
    if not structures.are_alike(variables(before), variables(after)):
        return after  # `Step` raises the error when it checks the result of `run`.

    def updated(old: Any, new: Any) -> Any:
        new = new if new.dtype == old.dtype else new.astype(old.dtype)
        return jnp.where(has_rows, new, old) if jnp.issubdtype(old.dtype, jnp.inexact) else new

    batch_stats, collections = jax.tree.map(updated, variables(before), variables(after))
    return after.replace(batch_stats=batch_stats, collections=collections)


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))


def _describe(batch: Any) -> str:
    items = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
    return f"{checks.describe(batch)}{items}"
