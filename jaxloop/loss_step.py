"""`LossStep`, which trains a model of any kind with a loss function."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxloop import agreement, checks, data, models, optimizers, partition, structures, types
from jaxloop.actions.action import Action
from jaxloop.metrics import fetch, is_metric, merge, value_of
from jaxloop.step import NO_OPTIMIZER, NumpyStep, Step

LossFn = Callable[[Any, types.Batch], Any]
"""`loss(outputs, batch)` returns `losses`, or `(losses, metrics)`."""

_INPUT_NAMES = ("inputs", "input", "x", "image", "images", "features", "pixels")


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
    - the result of `hk.transform` or `hk.transform_with_state`;
    - a pair of functions: `init(key, inputs) -> params` and `apply(params, inputs)`. `apply` may also take any of
      `train`, `rngs` (a dict), `rng` and `key`;
    - a pytree of parameters, which the loss receives instead of outputs: `loss(params, batch)`.

    `jaxloop.models.forward` describes how each kind receives its keys and the training mode. The keys come from
    `prng_key(state.step)`, so they depend only on `base_prng` and the step. NNX models keep their own keys in the
    state.

    **Masks and short batches.** A batch that is a dict may contain a `"mask"` of shape `[batch]` that consists of
    bools, or of 0s and 1s. Examples whose mask is 0 are excluded from means. A mask of any other shape is ignored, so
    the loss must apply it. Masks aren't applied to `Weighted` losses and metrics, so multiply their weights by the
    mask.

    A short batch is padded with masked copies of its last row if that doesn't change any mean. This requires that the
    loss and all metrics are per example and that, in training, the model doesn't mix examples (batch normalization
    does). An evaluation pads to the size of the loop's first batch, so that the step compiles only once. Training pads
    to `batch_size` or, if it is None, to the next multiple of the number of devices in the mesh. Short batches that
    can't be padded stay short. Their means are still exact, but the step has to be compiled again for them. A loss that
    compares a batch's examples with each other must return a scalar.

    **Micro-batches.** `accumulate=4` splits each training batch into four micro-batches, runs them one after another on
    the devices, and sums their gradients, weighted by the number of examples. The update is the same as for the whole
    batch, but needs a quarter of the memory. However, batch normalization uses the statistics of each micro-batch. With
    per-example losses, the batch size doesn't have to be a multiple of four. On a mesh, each row stays on its device.
    On CPUs, XLA generates slow code for convolutions inside the loop over micro-batches.

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
        `jaxloop.path_patterns.matches`. All other parameters are frozen: they stay bit-identical, and the optimizer has
        no state for them. If None, all parameters are trained. To use a different optimizer for each part, see
        `jaxloop.optimizers.by_path`.
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
        models.check_model(models.adapt(model), nnx_model_args, nnx_model_kwargs, known=_OPTIONS)
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
        self._takes_inputs = not isinstance(getattr(self._adapted, "apply_fn", None), models.ParamsApply)
        if not self._takes_inputs and (inputs is not None or compute_dtype is not None):
            raise ValueError(
                f"{type(self).__name__} got {'inputs' if inputs is not None else 'compute_dtype'}, which is for a "
                f"forward pass, and {self._adapted.kind}: the loss receives the parameters and the batch unchanged. "
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
        self._eval_rows: int | None = None  # In an evaluation, the number of rows in the loop's first batch.
        self._full_mask: jax.Array | None = None  # The mask of a batch without padding, on the device.
        self._forward: _Forward | None = None  # Made by `predict`, and kept with its compiled function.
        self._not_per_example: tuple[str, ...] | None = None  # Names of values; None until `run` is traced.

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
        """Adds a mask to the batch, and pads the batch if it is short.

        The returned batch can only be passed to `run`.
        """
        rows = checks.num_examples(batch)
        if rows is None or (rows == 0 and not self._is_shared):
            return state, batch
        padded = _pad(batch, rows, self._padded_size(rows))
        if padded.rows > rows and not self._may_pad(state, padded):
            if self._is_shared:
                raise ValueError(
                    f"{self!r} must pad a batch of {rows} rows to {padded.rows}, the size in other processes, but that "
                    "would change the result: the model mixes the examples of a batch, or a value is not per example. "
                    "Drop the remainder."
                )
            padded = _pad(batch, rows, rows)
        return state, padded

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

    @property
    def begin_reads_state(self) -> bool:
        # `LossStep.begin` reads the state only to pad a batch.
        may_pad = not self.train or self._batch_size is not None or self._partitioner.local_shards > 1
        return may_pad or checks.is_user_defined(self, "begin")

    def check_batches(self, *batches: types.Batch) -> int:
        return super().check_batches(*(batch.batch if isinstance(batch, _MaskedBatch) else batch for batch in batches))

    def place(self, batch: types.Batch, *, evaluates: bool = False) -> types.Batch:
        placed = super().place(batch, evaluates=evaluates)
        mask = placed.mask if isinstance(placed, _MaskedBatch) else None
        if not isinstance(mask, np.ndarray) or mask is not _real_rows(len(mask), len(mask)):
            return placed
        if self._full_mask is None or len(self._full_mask) != len(mask):  # Transferred once, not at each step.
            self._full_mask = jnp.asarray(mask)
        return placed._replace(mask=self._full_mask)

    # The model -----------------------------------------------------------------------------------

    def initialize_model(
        self, spec: types.BatchSpec = None, log_num_params: bool = False, **init_kwargs: Any
    ) -> types.TrainState:
        """Creates the initial state, like `Step.initialize_model`.

        Args:
          spec: The spec of the model's inputs, such as `input_spec(batch)`. Not used for an NNX model, an Equinox
            module or a pytree of parameters.
          log_num_params: Whether to log the number of parameters.
          **init_kwargs: Arguments for the function that creates the parameters, if the model has one.
        """
        return super().initialize_model(spec, log_num_params, **init_kwargs)

    def _adapt(self, model: Any) -> Any:
        return models.adapt(model)

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

        inputs = self.inputs_of(self.preprocess_batch(batch))
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

    def filler(self) -> Callable[[int], None] | None:
        return self._set_padded_size if not self.train or self._batch_size else None

    def _set_padded_size(self, rows: int) -> None:
        if not self.train:
            self._eval_rows = max(rows, self._eval_rows or rows)
        elif rows > (self._batch_size or rows):
            raise ValueError(
                f"A batch has {rows} rows, and other batches have fewer. Give batch_size={rows} to {self!r}."
            )

    def run(self, state: Any, batch: types.Batch) -> tuple[Any, types.Output]:
        if not isinstance(batch, _MaskedBatch):  # An override of `begin` made it.
            rows = checks.num_examples(batch)
            batch = _MaskedBatch(batch, None) if rows is None else _pad(batch, rows, rows)
        batch, mask = batch.batch, batch.mask
        keys = self.prng_key(state.step)
        if not self.train:
            _, (values, outputs, _) = self._mean_loss(self.params_to_evaluate(state), state, batch, mask, keys)
            return state, {**values, **self._more_metrics(values, outputs, batch, mask)}
        if self._accumulate == 1:
            grads, values, state = self._gradients(state, batch, mask, keys)
        else:
            grads, values, state = self._accumulated_gradients(state, batch, mask, keys)
        return types.apply_gradients(state, grads), values

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
        outputs, updates = self.call_model(state, params, self.inputs_of(batch), train=self.train, keys=keys)
        values = self._call_loss(outputs, batch)
        self._not_per_example = ()
        means = {name: self._mean(name, value, mask) for name, value in values.items()}
        return value_of(means["loss"]), (means, outputs, updates)

    def _call_loss(self, outputs: Any, batch: Any) -> dict[str, Any]:
        result = self.loss(outputs, batch)
        more: Any = {}
        if isinstance(result, tuple):
            if len(result) != 2 or not isinstance(result[1], Mapping):
                shown = ", ".join(map(checks.describe, result))
                raise TypeError(f"{self._name_of_loss} must return losses or (losses, metrics), got ({shown}).")
            result, more = result
        mean = value_of(result)
        if not hasattr(mean, "dtype") and not isinstance(mean, float):
            raise TypeError(
                f"{self._name_of_loss} must return an array of per-example losses [batch], a scalar, a Weighted mean, "
                f"or the pair (losses, metrics), got {checks.describe(result)}."
            )
        if not jnp.issubdtype(jnp.result_type(mean), jnp.floating):
            raise TypeError(f"{self._name_of_loss} must return floating-point losses, got {checks.describe(result)}.")
        if "loss" in more:
            raise ValueError(
                f"{self._name_of_loss} returned a metric named 'loss', the name of the loss itself. Give it another."
            )
        return {"loss": result, **types.nnx_metrics_as_weighted(more)}

    def _more_metrics(self, values: Mapping[str, Any], outputs: Any, batch: Any, mask: Any) -> dict[str, Any]:
        """Returns the values of the functions in `metrics`."""
        for name in self._metrics:
            if name in values:
                raise ValueError(
                    f"There are two metrics named {name!r}: {self._name_of_loss} returned one, and metrics= contains "
                    "another. Rename one of them."
                )
        more = {name: metric(outputs, batch) for name, metric in self._metrics.items()}
        more = types.nnx_metrics_as_weighted(more)
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
            remedy = f"Take the mean over the other axes, .mean(axis={axes[0] if len(axes) == 1 else axes})"
            remedy += ", or leave out keepdims=True." if value.size == rows else "."
        elif value.size == 1:
            remedy = "Leave out keepdims=True, or take [0]."
        raise ValueError(
            f"{what} is {checks.describe(value)} for {rows} examples; it must be per example, {value.dtype}[{rows}], "
            f"or a scalar. {remedy}"
        )

    def _gradients(self, state: Any, batch: Any, mask: Any, keys: Any) -> tuple[Any, dict[str, Any], Any]:
        """Returns the gradients of the mean loss, all outputs, and the state with updated variables."""
        with_gradients = jax.value_and_grad(self._mean_loss, has_aux=True)
        (_, (values, outputs, updates)), grads = with_gradients(state.params, state, batch, mask, keys)
        values = {**values, **self._more_metrics(values, outputs, batch, mask)}
        if updates is None:
            return grads, values, state
        return grads, values, _with_dtypes_of(state, state.update_variables(updates))

    def _accumulated_gradients(self, state: Any, batch: Any, mask: Any, keys: Any) -> tuple[Any, dict[str, Any], Any]:
        """Computes the same values as `_gradients` by scanning over micro-batches."""
        if mask is None:
            raise ValueError(
                f"{self!r} has accumulate={self._accumulate}, and can't split a batch whose leaves share no leading "
                f"axis: {jax.tree.map(checks.describe, batch)}. Give all leaves the same leading axis, or leave out "
                "accumulate."
            )
        parts, rows, shards = self._accumulate, mask.shape[0], self._partitioner.shards
        if rows % shards:
            shards = 1

        def add(carry: Any, part: Any) -> Any:
            grads_before, (batch_stats, collections) = carry
            number, (batch, mask) = part
            state_now = state.replace(batch_stats=batch_stats, collections=collections)
            keys_now = jax.tree.map(lambda key: jax.random.fold_in(key, number), keys)
            grads, values, state_now = self._gradients(state_now, batch, mask, keys_now)
            loss = values["loss"]
            weight = loss.weight if isinstance(loss, types.Weighted) else _count(mask)
            grads = jax.tree.map(lambda before, new: before + _weighted(new, weight), grads_before, grads)
            return (grads, (state_now.batch_stats, state_now.collections)), (weight, _count(mask), values)

        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, _sum_dtype(leaf)), state.params)
        micro_batches = (jnp.arange(parts), _split((batch, mask), rows, parts, shards))
        carry = (zeros, (state.batch_stats, state.collections))
        (grads, (batch_stats, collections)), (weights, counts, values) = jax.lax.scan(add, carry, micro_batches)
        if rows % (parts * shards) and self._not_per_example:
            raise ValueError(
                f"A batch of {rows} rows{f' on {shards} devices' if shards > 1 else ''} does not divide into "
                f"{parts} micro-batches, and it can be padded only if all values are per example; "
                f"{', '.join(map(repr, self._not_per_example))} "
                f"{'are' if len(self._not_per_example) > 1 else 'is'} not. Return arrays [batch], or batch to a "
                f"multiple of {parts * shards} and drop the remainder."
            )
        total = weights.sum()
        total = jnp.where(total == 0, 1, total)
        grads = jax.tree.map(lambda grad, leaf: (grad / total).astype(leaf.dtype), grads, state.params)
        shares = counts / jnp.maximum(counts.sum(), 1)
        values = {name: _combine(value, shares) for name, value in values.items()}
        return grads, values, state.replace(batch_stats=batch_stats, collections=collections)

    def inputs_of(self, batch: types.Batch) -> Any:
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
        """Rounds up a number of rows so that this process can divide them evenly among its devices."""
        shards = self._partitioner.local_shards
        return -(-rows // shards) * shards

    @property
    def _is_shared(self) -> bool:
        """True if other processes hold a part of each batch."""
        return agreement.is_shared(self._partitioner.mesh)

    def _may_pad(self, state: Any, padded: "_MaskedBatch") -> bool:
        """Returns True if padding doesn't change any mean."""
        if models.mixes_examples(state, train=self.train):
            return False
        if self._not_per_example is None:
            # The first batch is short: trace `run` to find out what the loss returns.
            jax.eval_shape(self._partitioner.partition(self.run), state, padded)
        return not self._not_per_example


_OPTIONS = models.options_of(LossStep)


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
        outputs, _ = self._step.call_model(state, params, self._step.inputs_of(batch), train=False)
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
def _real_rows(rows: int, size: int) -> np.ndarray:
    is_real = np.arange(size) < rows
    is_real.flags.writeable = False  # All batches with this number of rows share it.
    return is_real


def _pad(batch: Any, rows: int, size: int) -> _MaskedBatch:
    """Pads a batch to `size` rows with masked copies of its last row."""
    is_real = _real_rows(rows, size)
    if size > rows:
        # Pads with copies of a row, because the loss may be undefined for zeros.
        chosen = np.minimum(np.arange(size), rows - 1)
        # A batch can have no rows if other processes have some.
        copied = lambda leaf: leaf[chosen] if rows else np.zeros([size, *leaf.shape[1:]], leaf.dtype)
        batch = jax.tree.map(lambda leaf: copied(leaf) if np.ndim(leaf) else leaf, batch)
    mask = _mask_of(batch)
    if mask is None:
        return _MaskedBatch(batch, is_real)
    if size > rows:
        batch["mask"] = mask = mask * is_real.astype(mask.dtype)
    return _MaskedBatch(batch, mask.astype(bool))


def _count(mask: Any) -> jax.Array:
    return jnp.sum(mask, dtype=jnp.float32)


def _split(tree: Any, rows: int, parts: int, shards: int) -> Any:
    """Splits the rows into `parts` along a new first axis.

    Each part has the same number of rows from each of the `shards` shards.

    Rows stay on their device. If the rows of a shard can't be divided evenly, masked copies of the last row are added.
    """
    per_shard = rows // shards
    size = -(-per_shard // parts)

    def split(leaf: Any) -> jax.Array:
        leaf = jnp.asarray(leaf)
        if leaf.ndim == 0:
            return jnp.broadcast_to(leaf, (parts,))
        leaf = leaf.reshape(shards, per_shard, *leaf.shape[1:])
        if size * parts > per_shard:
            leaf = leaf[:, np.minimum(np.arange(size * parts), per_shard - 1)]
        # Adjacent rows go to different parts, which spreads the padding over the parts.
        leaf = jnp.moveaxis(leaf.reshape(shards, size, parts, *leaf.shape[2:]), 2, 0)
        return leaf.reshape(parts, shards * size, *leaf.shape[3:])

    batch, mask = tree
    is_real = np.tile(np.arange(size * parts) < per_shard, (shards, 1))
    is_real = np.moveaxis(is_real.reshape(shards, size, parts), 2, 0).reshape(parts, shards * size)
    has_own_mask = _mask_of(batch) is not None
    batch, mask = jax.tree.map(split, batch), split(mask) & is_real
    if has_own_mask:
        batch["mask"] = batch["mask"] * is_real.astype(batch["mask"].dtype)
    return batch, mask


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
    """Returns the weighted value, or 0 if the weight is 0 (the value may then be NaN)."""
    dtype = _sum_dtype(value)
    return jnp.where(weight > 0, weight.astype(dtype) * value.astype(dtype), 0)


def _sum_dtype(leaf: jax.Array) -> Any:
    """Returns the dtype in which to compute a mean: the dtype of the values, but at least float32."""
    is_wide = jnp.issubdtype(leaf.dtype, jnp.inexact) and leaf.dtype.itemsize >= 4
    return leaf.dtype if is_wide else jnp.float32


def _cast_floating(tree: Any, dtype: Any) -> Any:
    """Casts the floating-point leaves of a tree."""

    def cast(leaf: Any) -> Any:
        return jnp.asarray(leaf, dtype) if jnp.issubdtype(jnp.result_type(leaf), jnp.floating) else leaf

    return jax.tree.map(cast, tree)


def _with_dtypes_of(before: Any, after: Any) -> Any:
    """Returns the state `after` with its batch statistics and collections cast to the dtypes of `before`."""
    variables = lambda state: (state.batch_stats, state.collections)
    if not structures.are_alike(variables(before), variables(after)):
        return after  # `Step` raises the error when it checks the result of `run`.
    cast = lambda old, new: new if new.dtype == old.dtype else new.astype(old.dtype)
    batch_stats, collections = jax.tree.map(cast, variables(before), variables(after))
    return after.replace(batch_stats=batch_stats, collections=collections)


def _describe(batch: Any) -> str:
    items = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
    return f"{checks.describe(batch)}{items}"
