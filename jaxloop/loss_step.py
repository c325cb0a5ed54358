"""A step of which the user writes only the loss."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxloop import agreement, checks, data, models, partition, structures, types
from jaxloop.actions.action import Action
from jaxloop.metrics import fetch, is_metric, merge
from jaxloop.step import NO_OPTIMIZER, NumpyStep

LossFn = Callable[[Any, types.Batch], Any]
"""`loss(outputs, batch)` returns `losses`, or `(losses, metrics)`."""

_INPUT_NAMES = ("inputs", "input", "x", "image", "images", "features", "pixels")


class LossStep(NumpyStep):
    """A `Step` of which the user writes only the loss: `loss(outputs, batch)`, as a method or an argument.

    `outputs` are what the model made of the batch's inputs. The loss returns one number per example, `[batch]`, or a
    scalar; and along with it, if you like, a dict of metrics, each again `[batch]` or a scalar: `(losses, metrics)`.

    With `train=True` a step is one optimizer update by the gradient of the mean loss, with the batch statistics and
    other variables of the model updated. With `train=False` the model is called in its evaluation mode, and the state
    stays as it is. Both report `{"loss": ..., **metrics}`, each the mean over the examples of the batch.

    Hooks:
      loss: inside `run`, for each batch or micro-batch. Pure; it is compiled.
      preprocess_batch: see `Step`; call that of `super()` first, which makes NumPy arrays of tensors.
      begin: see `Step`; call that of `super()` last, which adds the mask. What it returns is for `run` alone.
      end, num_examples, make_state: see `Step`.

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

    The same with functions, and with parameters in place of a model:

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
    - an NNX class, with `nnx_model_args`, or an NNX instance, whose variables are the initial ones;
    - an Equinox module, called on one example at a time under `jax.vmap`, with a `key` of its own in training if it
      takes one; or the pair that `eqx.nn.make_with_state(...)` makes. `state.apply_fn(state.params)` is the module;
    - what `hk.transform` or `hk.transform_with_state` returns;
    - a pair of functions: `init(key, inputs) -> params` and `apply(params, inputs)`, which may take `train`, and `rngs`
      (a dict), `rng` or `key`;
    - a pytree of parameters: the loss gets the parameters in place of outputs, `loss(params, batch)`.

    How each is told whether it trains, and given keys, is said in `jaxloop.models.forward`. The keys are
    `prng_key(state.step)`: a function of `base_prng` and the step alone. NNX models keep their own in the state.

    **Masks and short batches.** A dict batch may hold a `"mask"` of shape `[batch]`, bool or 0 and 1: examples with 0
    count in no mean. (A mask of another shape is the loss's own.) A short batch is filled up with masked copies of its
    last row, where that changes no mean: the loss and all metrics must be per example, and in training the model must
    not carry anything from one example to another, as batch normalisation does. In evaluation it is filled up to the
    size of the loop's first batch, so that an evaluation compiles once; in training to `batch_size`, or, without, over
    a mesh to the next multiple of its devices. Otherwise it stays short, which compiles once more, and is exact too. A
    loss that compares the examples of a batch with one another shall return a scalar.

    **Micro-batches.** `accumulate=4` splits a training batch in four, one after the other on the devices, and sums up
    their gradients, each weighted by its number of examples: the update is that of the whole batch, for a quarter of
    the memory. With per-example losses the batch need not divide by four. Over a mesh each device keeps its rows. On
    CPUs, XLA is slow at convolutions in such a loop.

    Args:
      base_prng: see `Step`, as all that follows to `end_actions`.
      model: a model of one of the kinds above.
      loss: the loss, unless a subclass defines it as a method.
      metrics: more metrics by name, each a function of `(outputs, batch)`.
      inputs: the key of the model's inputs in the batch, or a function of the batch. By default the first element of a
        tuple or list, the value under "inputs", "input", "x", "image", "images", "features" or "pixels" of a dict, or
        the batch itself where it is an array. A Linen or NNX model with several inputs takes a tuple of them, or a dict
        by name. A params pytree takes none.
      accumulate: into how many micro-batches a training batch is split.
      compute_dtype: what the parameters and floating inputs are cast to for the forward pass, such as `jnp.bfloat16`.
        The outputs are cast to float32 for the loss; parameters, gradients and the optimizer's state keep their types.
      batch_size: the number of rows to which short batches are filled up; None as said above.
      **nnx_model_kwargs: keyword arguments for an NNX class.

    Raises:
      TypeError: neither `loss` nor a subclass with one, or both; an unknown keyword; a model of no kind.
    """

    def __init__(
        self,
        base_prng: types.PRNGType,
        model: Any,
        optimizer: optax.GradientTransformation = NO_OPTIMIZER,
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
        **nnx_model_kwargs: Any,
    ):
        adapted = models.adapt(model)
        models.check_model(adapted, nnx_model_args, nnx_model_kwargs, known=_OPTIONS)
        super().__init__(
            base_prng,
            adapted,
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
        self._takes_inputs = not isinstance(getattr(adapted, "apply_fn", None), models.ParamsApply)
        if not self._takes_inputs and (inputs is not None or compute_dtype is not None):
            raise ValueError(
                f"{type(self).__name__} got {'inputs' if inputs is not None else 'compute_dtype'}, which is for a "
                f"forward pass, and {adapted.kind}: the loss gets them and the batch as they are. Leave it out."
            )
        if compute_dtype is not None and not jnp.issubdtype(compute_dtype, jnp.floating):
            raise ValueError(f"compute_dtype must be a floating-point type or None, got {compute_dtype!r}.")
        checks.check_positive("accumulate", accumulate)
        checks.check_positive("batch_size", batch_size, optional=True)
        self._adapted = adapted
        self._model = model
        self._loss = loss
        self._metrics = dict(metrics or {})
        self._inputs = inputs
        self._accumulate = accumulate
        self._compute_dtype = compute_dtype
        self._batch_size = batch_size
        self._rows_of_first: int | None = None  # Of the loop's first batch, in an evaluation.
        self._all_real: jax.Array | None = None  # The mask of a whole batch, on the device.
        self._not_per_example: tuple[str, ...] | None = None  # Which values are not; known once `run` is traced.

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

    # To override, or not -------------------------------------------------------------------------

    def loss(self, outputs: Any, batch: types.Batch) -> Any:
        """Returns per-example losses `[batch]`, or a scalar; or `(losses, metrics)`. Pure and jitted.

        Args:
          outputs: what the model made of the batch's inputs; for a params pytree the parameters.
          batch: the batch, on the devices; of a batch that was split, a micro-batch.
        """
        assert self._loss is not None
        return self._loss(outputs, batch)

    def begin(self, state: Any, batch: types.Batch) -> tuple[Any, types.Batch]:
        """Puts a mask beside the batch, and fills a short one up. What comes of it is for `run` alone."""
        rows = checks.num_examples(batch)
        if rows is None or (rows == 0 and not self._is_shared):
            return state, batch
        filled = _fill(batch, rows, self._fill_size(rows))
        if filled.rows > rows and not self._may_fill(state, filled):
            if self._is_shared:
                raise ValueError(
                    f"{self!r} can't fill a batch of {rows} rows up to {filled.rows}, which it would have to where "
                    "other processes have batches of this size: the model mixes the examples of a batch, or a value is "
                    "not per example. Drop the remainder."
                )
            filled = _fill(batch, rows, rows)
        return state, filled

    def num_examples(self, batch: types.Batch) -> int:
        """As `Step.num_examples`; of a batch with a mask, the number of examples that count."""
        mask = _mask_of(batch)
        if mask is None:
            return super().num_examples(batch)
        values = np.asarray(fetch(data.numpy_batch(mask)))
        if not np.all((values == 0) | (values == 1)):
            raise ValueError(
                f"batch['mask'] is {checks.describe(values)} with values other than 0 and 1. It says which examples "
                "count. Give weights another name, and multiply the losses by them."
            )
        return int(np.sum(values, dtype=np.int64))

    @property
    def begin_reads_state(self) -> bool:
        # Ours does so only for a batch that is to be filled up.
        may_fill = not self.train or self._batch_size is not None or self._partitioner.local_shards > 1
        return may_fill or checks.is_user_defined(self, "begin")

    def check_batches(self, *batches: types.Batch) -> int:
        return super().check_batches(*(batch.batch if isinstance(batch, _MaskedBatch) else batch for batch in batches))

    def place(self, batch: types.Batch, *, evaluates: bool = False) -> types.Batch:
        placed = super().place(batch, evaluates=evaluates)
        mask = placed.mask if isinstance(placed, _MaskedBatch) else None
        if not isinstance(mask, np.ndarray) or mask is not _real_rows(len(mask), len(mask)):
            return placed
        if self._all_real is None or len(self._all_real) != len(mask):  # It need not be brought there at each step.
            self._all_real = jnp.asarray(mask)
        return placed._replace(mask=self._all_real)

    # The model -----------------------------------------------------------------------------------

    def initialize_model(
        self, spec: types.BatchSpec = None, log_num_params: bool = False, **init_kwargs: Any
    ) -> types.TrainState:
        """As `Step.initialize_model`.

        Args:
          spec: what the model takes, such as `input_spec(batch)`. Not used for NNX and Equinox models and parameters.
          log_num_params: logs the number of parameters.
          **init_kwargs: passed on to what makes the parameters, if anything does.
        """
        return super().initialize_model(spec, log_num_params, **init_kwargs)

    @property
    def _model_to_initialize(self) -> Any:
        return self._adapted

    def input_spec(self, batch: types.Batch) -> types.BatchSpec:
        """The spec of one example of a host batch's inputs, for `initialize_model`; None for a params pytree.

        >>> step = LossStep(jax.random.key(0), (jnp.zeros, jnp.dot), loss=lambda outputs, batch: outputs)
        >>> step.input_spec({"x": np.zeros([32, 28, 28, 1]), "y": np.zeros(32)})
        ShapeDtypeStruct(shape=(1, 28, 28, 1), dtype=float32)
        """

        def spec(leaf: Any) -> jax.ShapeDtypeStruct:
            shape, dtype = np.shape(leaf), jax.dtypes.canonicalize_dtype(np.asarray(leaf).dtype)
            return jax.ShapeDtypeStruct((1, *shape[1:]) if shape else shape, dtype)

        inputs = self._inputs_of(self.preprocess_batch(batch))
        return None if inputs is None else jax.tree.map(spec, inputs)

    @property
    def model(self) -> Any:
        """The model, as it was given."""
        return self._model

    # Running -------------------------------------------------------------------------------------

    def begin_evaluation(self) -> None:
        # To forget the loops before makes an evaluation the same in a run that was resumed.
        self._rows_of_first = None

    def filler(self) -> Callable[[int], None] | None:
        return self._fill_to if not self.train or self._batch_size else None

    def _fill_to(self, rows: int) -> None:
        if not self.train:
            self._rows_of_first = max(rows, self._rows_of_first or rows)
        elif rows > (self._batch_size or rows):
            raise ValueError(f"A batch has {rows} rows, and others fewer: give batch_size={rows} to {self!r}.")

    def run(self, state: Any, batch: types.Batch) -> tuple[Any, types.Output]:
        if not isinstance(batch, _MaskedBatch):  # An override of `begin` has made it.
            rows = checks.num_examples(batch)
            batch = _MaskedBatch(batch, None) if rows is None else _fill(batch, rows, rows)
        batch, mask = batch.batch, batch.mask
        keys = self.prng_key(state.step)
        if not self.train:
            _, (values, outputs, _) = self._mean_loss(state.params, state, batch, mask, keys)
            return state, {**values, **self._more_metrics(values, outputs, batch, mask)}
        if self._accumulate == 1:
            grads, values, state = self._gradients(state, batch, mask, keys)
        else:
            grads, values, state = self._accumulated_gradients(state, batch, mask, keys)
        return types.apply_gradients(state, grads), values

    def _mean_loss(self, params: Any, state: Any, batch: Any, mask: Any, keys: Any) -> tuple[jax.Array, Any]:
        """Returns the mean loss and `(values, outputs, updates)`."""
        inputs = self._inputs_of(batch)
        if self._compute_dtype is not None:
            params, inputs = _cast_floating((params, inputs), self._compute_dtype)
        outputs, updates = models.forward(state, params, inputs, train=self.train, rngs=keys)
        if self._compute_dtype is not None:
            outputs = _cast_floating(outputs, jnp.float32)
        values = self._call_loss(outputs, batch)
        self._not_per_example = ()
        means = {name: self._mean(name, value, mask) for name, value in values.items()}
        return means["loss"], (means, outputs, updates)

    def _call_loss(self, outputs: Any, batch: Any) -> dict[str, Any]:
        result = self.loss(outputs, batch)
        more: Any = {}
        if isinstance(result, tuple):
            if len(result) != 2 or not isinstance(result[1], Mapping):
                shown = ", ".join(map(checks.describe, result))
                raise TypeError(f"{self._name_of_loss} must return losses or (losses, metrics), got ({shown}).")
            result, more = result
        if not hasattr(result, "dtype") and not isinstance(result, float):
            raise TypeError(
                f"{self._name_of_loss} must return an array of per-example losses [batch], or a scalar, or the pair "
                f"(losses, metrics), got {checks.describe(result)}."
            )
        if not jnp.issubdtype(jnp.result_type(result), jnp.floating):
            raise TypeError(f"{self._name_of_loss} must return floating-point losses, got {checks.describe(result)}.")
        if "loss" in more:
            raise ValueError(
                f"{self._name_of_loss} returned a metric named 'loss', the name of the loss itself. Give it another."
            )
        return {"loss": result, **more}

    def _more_metrics(self, values: Mapping[str, Any], outputs: Any, batch: Any, mask: Any) -> dict[str, Any]:
        """The values of the functions in `metrics`."""
        for name in self._metrics:
            if name in values:
                raise ValueError(
                    f"There are two metrics named {name!r}: {self._name_of_loss} returned one, and metrics= holds "
                    "another. Rename one of them."
                )
        return {name: self._mean(name, metric(outputs, batch), mask) for name, metric in self._metrics.items()}

    def _mean(self, name: str, value: Any, mask: Any) -> Any:
        """The mean of a value over the examples that count; what is no mean comes back as it is."""
        if isinstance(value, types.MetricWithMetadata) and value.type is types.MetricType.SCALAR:
            return types.MetricWithMetadata(self._mean(name, value.value, mask), value.type, value.metadata)
        is_per_example = False
        if not isinstance(value, types.MetricWithMetadata) and not is_metric(value):
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
                f"{what} must be an array [batch], a scalar, a MetricWithMetadata or a clu metric, got "
                f"{checks.describe(value)}."
            )
        value = jnp.asarray(value)
        if value.ndim == 0 or (mask is not None and value.shape == mask.shape):
            return value.astype(_sum_dtype(value))
        if mask is None:
            raise ValueError(
                f"{what} is {checks.describe(value)}, and the leaves of the batch share no leading axis, so that "
                "nothing says how many examples there are. Return a scalar."
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
        """Returns the gradients of the mean loss, all values, and the state with its variables updated."""
        with_gradients = jax.value_and_grad(self._mean_loss, has_aux=True)
        (_, (values, outputs, updates)), grads = with_gradients(state.params, state, batch, mask, keys)
        values = {**values, **self._more_metrics(values, outputs, batch, mask)}
        if updates is None:
            return grads, values, state
        return grads, values, _with_types_of(state, state.update_variables(updates))

    def _accumulated_gradients(self, state: Any, batch: Any, mask: Any, keys: Any) -> tuple[Any, dict[str, Any], Any]:
        """As `_gradients`, micro-batch by micro-batch."""
        if mask is None:
            raise ValueError(
                f"{self!r} has accumulate={self._accumulate}, and can't split a batch whose leaves share no leading "
                f"axis: {jax.tree.map(checks.describe, batch)}. Give them one, or leave out accumulate."
            )
        parts, rows, shards = self._accumulate, mask.shape[0], self._partitioner.shards
        if rows % shards:
            shards = 1
        total = jnp.maximum(_count(mask), 1)

        def add(carry: Any, part: Any) -> Any:
            grads_before, (batch_stats, collections) = carry
            number, (batch, mask) = part
            state_now = state.replace(batch_stats=batch_stats, collections=collections)
            keys_now = jax.tree.map(lambda key: jax.random.fold_in(key, number), keys)
            grads, values, state_now = self._gradients(state_now, batch, mask, keys_now)
            weight = _count(mask) / total
            grads = jax.tree.map(lambda before, new: before + _weighed(new, weight), grads_before, grads)
            return (grads, (state_now.batch_stats, state_now.collections)), (weight, values)

        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, _sum_dtype(leaf)), state.params)
        micro_batches = (jnp.arange(parts), _split((batch, mask), rows, parts, shards))
        carry = (zeros, (state.batch_stats, state.collections))
        (grads, (batch_stats, collections)), (weights, values) = jax.lax.scan(add, carry, micro_batches)
        if rows % (parts * shards) and self._not_per_example:
            raise ValueError(
                f"A batch of {rows} rows{f' on {shards} devices' if shards > 1 else ''} does not divide into "
                f"{parts} micro-batches, and to be filled up with masked rows all values must be per example; "
                f"{', '.join(map(repr, self._not_per_example))} "
                f"{'are' if len(self._not_per_example) > 1 else 'is'} not. Return arrays [batch], or batch to a "
                f"multiple of {parts * shards} and drop the remainder."
            )
        grads = jax.tree.map(lambda grad, leaf: grad.astype(leaf.dtype), grads, state.params)
        values = {name: _combine(value, weights) for name, value in values.items()}
        return grads, values, state.replace(batch_stats=batch_stats, collections=collections)

    def _inputs_of(self, batch: types.Batch) -> Any:
        """What the model takes of a batch."""
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
                f"The model's inputs are the value under one of {', '.join(map(repr, _INPUT_NAMES))}, and the batch "
                f"has {which}. Its keys are {', '.join(map(repr, batch))}. Say which: inputs='...', or a function of "
                "the batch."
            )
        if isinstance(batch, tuple | list) and batch:
            return batch[0]
        if hasattr(batch, "dtype"):
            return batch
        raise ValueError(
            f"A batch is a dict, a tuple, a list or an array, got {_describe(batch)}. Say what the model's inputs are: "
            "inputs=lambda batch: ..."
        )

    @property
    def _name_of_loss(self) -> str:
        return f"{type(self).__name__}.loss" if self._loss is None else "The loss"

    # Short batches -------------------------------------------------------------------------------

    def _fill_size(self, rows: int) -> int:
        """The number of rows that a batch is to have."""
        if self.train:
            # A function of the batch alone: a run that was resumed does not know the batches before.
            return self._divisible(max(rows, self._batch_size or rows))
        self._rows_of_first = max(rows, self._rows_of_first or self._batch_size or rows)
        return self._divisible(self._rows_of_first) if self._is_shared else self._rows_of_first

    def _divisible(self, rows: int) -> int:
        """So many rows or some more, for a batch of this process to divide over its devices."""
        shards = self._partitioner.local_shards
        return -(-rows // shards) * shards

    @property
    def _is_shared(self) -> bool:
        """Whether other processes have a part of each batch."""
        return agreement.is_shared(self._partitioner.mesh)

    def _may_fill(self, state: Any, filled: "_MaskedBatch") -> bool:
        """Whether filling up changes no mean."""
        if models.mixes_examples(state, train=self.train):
            return False
        if self._not_per_example is None:
            # The first batch is short. What the loss returns shows in a trace.
            jax.eval_shape(self._partitioner.partition(self.run), state, filled)
        return not self._not_per_example


_OPTIONS = models.options_of(LossStep)


# Batches with a mask ---------------------------------------------------------------------------------


class _MaskedBatch(NamedTuple):
    """A batch, and which of its rows count: a bool array, or None where rows can't be counted."""

    batch: Any
    mask: Any

    @property
    def rows(self) -> int:
        return self.mask.shape[0]


def _mask_of(batch: Any) -> Any:
    """The mask of examples that a batch holds; None where there is none."""
    if not isinstance(batch, dict) or "mask" not in batch:
        return None
    mask = batch["mask"]
    rows = checks.num_examples(batch)
    is_vector = rows is not None and tuple(getattr(mask, "shape", ())) == (rows,)
    return mask if is_vector else None


@functools.lru_cache(maxsize=64)
def _real_rows(rows: int, size: int) -> np.ndarray:
    is_real = np.arange(size) < rows
    is_real.flags.writeable = False  # All batches of so many rows share it.
    return is_real


def _fill(batch: Any, rows: int, size: int) -> _MaskedBatch:
    """The batch with masked copies of its last row, so that it has `size` rows."""
    is_real = _real_rows(rows, size)
    if size > rows:
        # A copy, for zeros may be none of the inputs that the loss is defined for.
        chosen = np.minimum(np.arange(size), rows - 1)
        # Where there is none, other processes have some.
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
    """Splits the rows into `parts` on a new first axis, each with as many rows of every one of the `shards`.

    What a device holds stays there. Where a shard's rows do not divide, its last row is repeated; of the mask, zeros.
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
        # Neighbours go to different parts, so that the repeated rows do.
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
    """The value of a batch from those of its micro-batches, stacked."""
    if is_metric(value):
        return merge([jax.tree.map(lambda leaf, part=part: leaf[part], value) for part in range(len(weights))])
    if isinstance(value, types.MetricWithMetadata) and value.type is not types.MetricType.SCALAR:
        return jax.tree.map(lambda leaf: leaf[0], value)
    return jax.tree.map(lambda leaf: jnp.sum(_weighed(leaf, weights)), value)


def _weighed(value: jax.Array, weight: jax.Array) -> jax.Array:
    """The product; a value that stands for no example may be NaN, and is zero then."""
    dtype = _sum_dtype(value)
    return jnp.where(weight > 0, weight.astype(dtype) * value.astype(dtype), 0)


def _sum_dtype(leaf: jax.Array) -> Any:
    """The type to take a mean in: that of the values, and at least float32."""
    is_wide = jnp.issubdtype(leaf.dtype, jnp.inexact) and leaf.dtype.itemsize >= 4
    return leaf.dtype if is_wide else jnp.float32


def _cast_floating(tree: Any, dtype: Any) -> Any:
    """Casts the floating-point leaves of a tree."""

    def cast(leaf: Any) -> Any:
        return jnp.asarray(leaf, dtype) if jnp.issubdtype(jnp.result_type(leaf), jnp.floating) else leaf

    return jax.tree.map(cast, tree)


def _with_types_of(before: Any, after: Any) -> Any:
    """The state with the variables beside the parameters in the types that they had."""
    variables = lambda state: (state.batch_stats, state.collections)
    if not structures.are_alike(variables(before), variables(after)):
        return after  # Said where a step's results are checked.
    cast = lambda old, new: new if new.dtype == old.dtype else new.astype(old.dtype)
    batch_stats, collections = jax.tree.map(cast, variables(before), variables(after))
    return after.replace(batch_stats=batch_stats, collections=collections)


def _describe(batch: Any) -> str:
    items = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
    return f"{checks.describe(batch)}{items}"
