"""`LossStep`, which trains a model of any kind with a loss function."""

import collections
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxloop import data, partition, types
from jaxloop.actions.action import Action
from jaxloop.base import checks
from jaxloop.metrics import fetch, value_of
from jaxloop.models import means, optimizers
from jaxloop.models.padding import MaskedBatch, PaddingRunner, mask_of, quoted, with_own_mask
from jaxloop.step import NO_OPTIMIZER, NumpyStep, forward

LossFn = Callable[[Any, types.Batch], Any]
"""A function `loss(outputs, batch)` that returns `losses` or `(losses, metrics)`."""

_INPUT_NAMES = ("inputs", "input", "x", "image", "images", "features", "pixels")


class LossStep(NumpyStep):
    """A `Step` for which you only have to provide the loss, `loss(outputs, batch)`, as a method or as an argument.

    `outputs` is the model's output for the batch's inputs. The loss has one of three forms: an array of shape `[batch]`
    (one number per example), a scalar, or `jaxloop.Weighted(losses, weights)` (for a mean over tokens or pixels). To
    add metrics, return a pair `(losses, metrics)`. Each value in the dict `metrics` can have any of these three forms.

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

    **Models.** `model` is one of the following:

    - a Linen module;
    - an NNX class, with `nnx_model_args`, or an NNX instance, whose variables become the initial variables;
    - a pair of functions: `init(key, inputs) -> params` and `apply(params, inputs)`. `apply` may also take any of
      `train`, `rngs` (a dict), `rng` and `key`;
    - a pytree of parameters, which the loss receives instead of outputs: `loss(params, batch)`. For an Equinox module,
      pass the `params` from `params, static = eqx.partition(module, eqx.is_inexact_array)`.

    `jaxloop.models.forward` describes how each kind of model receives its keys and the training mode. The keys come
    from `prng_key(state.step)`, so they depend only on `base_prng` and the step. NNX models keep their own keys in the
    state.

    **Masks and short batches.** A batch that is a dict may contain a `"mask"`: an array of shape `[batch]` with
    bools, or with 0s and 1s. Examples whose mask is 0 are excluded from means and from the update. They may even
    contain NaN: before the step, they are replaced by copies of another row. A mask of any other shape is ignored, so
    the loss must apply it. Masks aren't applied to scalar or `Weighted` losses and metrics either.

    A short batch is padded with masked copies of its last row if that doesn't change any value (the loss or a metric).
    This requires that the loss and all metrics are computed per example and that, in training, the model doesn't mix
    examples (as batch normalization does). The first time that a row is masked, the step is run twice without an
    update, with different contents in that row. This reveals values that depend on masked rows, such as a contrastive
    loss. In an evaluation, batches are padded to the size of the loop's first batch, so that the step compiles only
    once. In training, they are padded to `batch_size` or, if it is None, to the next multiple of `accumulate` times the
    number of devices that a batch is split across. If masked rows would change a value, a batch stays short, and its
    masked rows are removed. The values are then still exact, but the step has to be compiled again for each number of
    rows. Training raises an error if the remaining rows can't be divided evenly among the devices or the micro-batches.

    **Micro-batches.** `accumulate=4` splits each training batch into four micro-batches, runs them one after another on
    the devices, and averages their gradients. Each micro-batch is weighted by its number of examples or by the weight
    of its `Weighted` loss. The update is the same as for the whole batch, but needs only a quarter of the memory for
    activations. However, batch normalization and losses that compare examples see only one micro-batch at a time. The
    loss and the metrics must not be scalars, which could be means or sums; return `Weighted(mean, rows)` instead. If
    masked rows don't change any value, the batch size doesn't have to be a multiple of four. On a mesh, each row stays
    on its device. On CPUs, XLA generates slow code for convolutions inside the loop over micro-batches.

    **Sown losses and optimizers that need the loss.** Losses that a Linen or NNX model sows, as in `self.sow("losses",
    "name", value)`, are added to the loss in both training and evaluation. Each sown loss must be a scalar (a mean) or
    an array of shape `[batch]`. An optimizer that accepts extra arguments receives `value` (the loss), `grad` (the
    gradients) and `value_fn` (a function that computes the loss from parameters). Therefore,
    `optax.contrib.reduce_on_plateau` and `optax.lbfgs` work.

    Args:
      base_prng: See `Step`, which also describes the arguments that are not listed here.
      model: A model of any kind listed above.
      loss: The loss function, unless a subclass defines the method `loss`.
      metrics: A dict of functions `(outputs, batch) -> value` for additional metrics.
      inputs: The key of the model's inputs in the batch, or a function that extracts the inputs from a batch. By
        default, the inputs are the first element if the batch is a tuple or list; the value under "inputs", "input",
        "x", "image", "images", "features" or "pixels" if it is a dict; or the batch itself if it is an array. A
        Linen or NNX model with several inputs takes them from a tuple, or from a dict keyed by argument name. If the
        model is a pytree of parameters, don't pass `inputs`.
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
      use_ema: Whether to use the average of the parameters in evaluation, `predict` and `jaxloop.export`. This requires
        a state from a step with `ema`. Batch statistics are not averaged.
      params_to_evaluate: A function of the state that returns the parameters to use in evaluation, `predict` and
        `jaxloop.export`. If neither this nor `use_ema` is given, `Step.params_to_evaluate` determines the parameters.
      **nnx_model_kwargs: Keyword arguments for an NNX class.

    Raises:
      TypeError: If the loss is missing or is given both as an argument and as a method, if there are unknown keyword
        arguments, or if the kind of model isn't supported.
    """

    _runner_class = PaddingRunner
    _runner: PaddingRunner

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
        _check_functions(type(self), loss, metrics or {})
        adapted = forward.adapt(model)
        takes_inputs = getattr(adapted, "apply_fn", None) != forward.PARAMS_APPLY
        if not takes_inputs and (inputs is not None or compute_dtype is not None):
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
        self._inputs_of = functools.partial(_inputs_of, inputs) if takes_inputs else lambda batch: None
        self._accumulate = accumulate
        self._compute_dtype = compute_dtype
        self._batch_size = batch_size
        self._params_to_evaluate = params_to_evaluate or (optimizers.ema_params if use_ema else None)

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
        return state, self._runner.pad(state, batch)

    def num_examples(self, batch: types.Batch) -> int:
        """Returns the number of examples, excluding those whose mask is 0; see `Step.num_examples`."""
        mask = mask_of(batch)
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

        The spec describes the inputs in the given host batch, except that each leaf has a single row.

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
          NotImplementedError: If called in a multi-process job.
        """
        checks.check_only_process("LossStep.predict")
        pending, parts = None, []
        for batch in data.batches(dataset):
            newest = self._predict_batch(state, self.preprocess_batch(batch))
            if pending is not None:  # The devices compute the newest batch while the previous one is read.
                parts.append(_read_rows(*pending))
            pending = newest
        if pending is None:
            raise ValueError("LossStep.predict got a dataset without batches. An iterator can be read only once.")
        parts.append(_read_rows(*pending))
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)

    def _predict_batch(self, state: Any, batch: types.Batch) -> tuple[Any, Any]:
        """Returns the model's outputs for a batch, still on the devices, and the batch's mask (None if it has none)."""
        rows = checks.num_examples(batch)
        outputs = (self._runner.forward_step.evaluate(state, batch) or {})["outputs"]
        for path, leaf in checks.leaves_by_path(outputs).items():
            if leaf.ndim == 0 or leaf.shape[0] != rows:
                raise ValueError(
                    f"LossStep.predict needs outputs with one row per example. For a batch of {rows} examples, the "
                    f"model returned {path or 'an output'} {checks.describe(leaf)}."
                )
        return outputs, mask_of(batch)

    # Running -------------------------------------------------------------------------------------

    def begin_evaluation(self) -> None:
        # Forgets earlier loops, so that an evaluation is the same in a resumed run.
        self._runner.eval_rows = None

    def run(self, state: Any, batch: types.Batch) -> tuple[Any, types.Output]:
        if not isinstance(batch, MaskedBatch):  # An override of `begin` made it.
            batch = with_own_mask(batch)
        given = (state, batch.batch, batch.mask, self.prng_key(state.step))
        if not self.train:
            return state, self._mean_loss(self.params_to_evaluate(state), *given)[1][0]
        if self._accumulate == 1:
            grads, values, new_state = self._gradients(*given)
        else:
            sizes = {"parts": self._accumulate, "shards": self._partitioner.shards}
            grads, values, new_state = means.accumulated(self._gradients, *given, **sizes)
        value_fn = lambda params: self._mean_loss(params, *given)[0]
        return types.apply_gradients(new_state, grads, value_of(values["loss"]), value_fn), values

    def call_model(
        self, state: Any, params: Any, inputs: Any, *, train: bool | None = None, keys: Any = None
    ) -> tuple[Any, Any]:
        if self._compute_dtype is None:
            return super().call_model(state, params, inputs, train=train, keys=keys)
        params, inputs = _cast_floating((params, inputs), self._compute_dtype)
        outputs, updates = super().call_model(state, params, inputs, train=train, keys=keys)
        return _cast_floating(outputs, jnp.float32), updates

    def _gradients(self, state: Any, batch: Any, mask: Any, keys: Any) -> tuple[Any, dict[str, Any], Any]:
        """Returns `(gradients, values, state)` for a batch.

        `gradients` are the gradients of the mean loss. `values` is a dict that contains the loss and the metrics.
        `state` is the given state with the new values of the variables that the forward pass changed.

        For complex parameters, the gradients point in the direction of steepest ascent. They are the conjugates of the
        gradients that JAX returns.
        """
        with_gradients = jax.value_and_grad(self._mean_loss, has_aux=True)
        (_, (values, updates)), grads = with_gradients(state.params, state, batch, mask, keys)
        weight, has_rows = means.weight_of(values["loss"], mask), True if mask is None else mask.any()
        # JAX returns the conjugate of the direction of ascent. For a batch without examples, it may be NaN.
        grads = jax.tree.map(lambda grad: jnp.where(weight > 0, jnp.conj(grad), 0), grads)
        return grads, values, means.with_variables(state, state.update_variables(updates), has_rows)

    def _mean_loss(self, params: Any, state: Any, batch: Any, mask: Any, keys: Any) -> tuple[jax.Array, Any]:
        """Returns the mean loss and a pair `(values, updates)`.

        `values` is a dict that contains the loss and the metrics. `updates` contains the variables that the forward
        pass changed.
        """
        outputs, updates = self.call_model(state, params, self._inputs_of(batch), train=self.train, keys=keys)
        who = f"{type(self).__name__}.loss" if self._loss is None else "The loss"
        parts, found, not_per_example = self._accumulate if self.train else 1, {}, []
        for name, value in self._values(who, outputs, batch).items():
            what = who if name == "loss" else f"The metric {name!r}"
            found[name], is_per_example = means.mean_of(what, value, mask, parts=parts)
            not_per_example += [] if is_per_example else [name]
        for sown in forward.sown_losses(updates):
            more, is_per_example = means.mean_of("The sown loss", sown, mask)
            not_per_example += [] if is_per_example else ["sown loss"]
            (mean, *weight), structure = jax.tree.flatten(found["loss"])
            found["loss"] = jax.tree.unflatten(structure, [mean + more.astype(mean.dtype), *weight])
        self._runner.not_per_example = not_per_example
        return value_of(found["loss"]), (found, updates)

    def _values(self, who: str, outputs: Any, batch: Any) -> dict[str, Any]:
        """Calls the loss function and the metric functions, and returns a dict of their results.

        `who` describes the loss function in error messages.
        """
        result = self.loss(outputs, batch)
        more: Any = {}
        if isinstance(result, tuple):
            if len(result) != 2 or not isinstance(result[1], Mapping):
                shown = ", ".join(map(checks.describe, result))
                raise TypeError(f"{who} must return losses or (losses, metrics), got ({shown}).")
            result, more = result
        mean = value_of(result)
        if not isinstance(mean, float) and not jnp.issubdtype(getattr(mean, "dtype", bool), jnp.floating):
            raise TypeError(
                f"{who} must return floating-point losses (an array [batch], a scalar or a Weighted mean), or the pair "
                f"(losses, metrics), got {checks.describe(result)}."
            )
        twice = [name for name, count in collections.Counter(["loss", *more, *self._metrics]).items() if count > 1]
        if twice:
            raise ValueError(
                f"Two values are named {twice[0]!r}. The loss is named 'loss', {who} returned the metrics "
                f"{quoted(list(more)) or 'none'}, and metrics= holds {quoted(list(self._metrics)) or 'none'}. Rename "
                "one of them."
            )
        # Metrics may have no derivative. An output may be of any class, such as a distribution.
        fixed = jax.tree.map(lambda leaf: jax.lax.stop_gradient(leaf) if isinstance(leaf, jax.Array) else leaf, outputs)
        given = {name: metric(fixed, batch) for name, metric in self._metrics.items()}
        return {"loss": result, **more, **given}


def _check_functions(step_class: type, loss: LossFn | None, metrics: Mapping[str, LossFn]) -> None:
    if (loss is not None) == (step_class.loss is not LossStep.loss):
        raise TypeError(
            f"{step_class.__name__} needs one loss: the argument loss=, or a subclass that defines "
            f"loss(self, outputs, batch). It got {'both' if loss is not None else 'neither'}."
        )
    is_dict_of_functions = isinstance(metrics, Mapping) and all(map(callable, metrics.values()))
    if not is_dict_of_functions or not (loss is None or callable(loss)):
        raise TypeError(
            "loss must be a function of (outputs, batch), and metrics a dict of such functions, got "
            f"loss={loss!r}, metrics={metrics!r}."
        )


def _inputs_of(inputs: str | int | Callable[[types.Batch], Any] | None, batch: types.Batch) -> Any:
    """Returns the part of a batch that the model receives; see the argument `inputs` of `LossStep`."""
    if callable(inputs):
        return inputs(batch)
    try:
        if inputs is not None:
            return batch[inputs]
        if isinstance(batch, Mapping):
            (name,) = [name for name in _INPUT_NAMES if name in batch]
            return batch[name]
        return batch if hasattr(batch, "dtype") else batch[0]
    except (KeyError, IndexError, TypeError, ValueError):
        has = f"the keys {quoted(list(batch))}" if isinstance(batch, Mapping) else f"{checks.describe(batch)}"
        raise ValueError(
            f"LossStep doesn't find the inputs of the model (inputs={inputs!r}) in the batch, which has {has}. Name "
            "their key, inputs='...', or give a function of the batch. By default, they are the first element of a "
            f"tuple or list, an array, or what a dict has under exactly one of {quoted(_INPUT_NAMES)}."
        ) from None


def _read_rows(outputs: Any, mask: Any) -> Any:
    """Fetches the outputs of a batch, leaving out examples whose mask is 0."""
    chosen = slice(None) if mask is None else np.asarray(fetch(mask), bool)
    return jax.tree.map(lambda leaf: leaf[chosen], fetch(outputs))


def _cast_floating(tree: Any, dtype: Any) -> Any:
    def cast(leaf: Any) -> Any:
        return jnp.asarray(leaf, dtype) if jnp.issubdtype(jnp.result_type(leaf), jnp.floating) else leaf

    return jax.tree.map(cast, tree)
