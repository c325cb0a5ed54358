"""`Step`, the base class of all steps. A step defines how a batch is processed."""

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging
from etils import epath

from jaxloop import checkpoint, data, partition, types
from jaxloop.actions.action import Action
from jaxloop.base import checks
from jaxloop.partition.layout import Layout, readable
from jaxloop.schedules import Elapsed
from jaxloop.step import forward
from jaxloop.step.compiled import stacked
from jaxloop.step.cost import flops_of
from jaxloop.step.runner import Runner, shapes_for_run

NO_OPTIMIZER = optax.identity()
"""The default optimizer of a `Step`: a placeholder for no optimizer. With `train=True`, it causes a warning."""


class FusingError(ValueError):
    """Raised if several steps can't be fused into one dispatch. The message gives the reason."""


class Step:
    """Defines how a batch is processed. Subclass `Step` and implement `run`.

    A loop passes each batch through four hooks: `preprocess_batch`, `begin`, `run` and `end`, in this order. `run` and
    `end` must return their outputs as a dict with string keys (or None).

    Hooks:
      preprocess_batch: Runs first, on the host. It receives only the batch.
      begin: Runs second, on the host, and returns `(state, batch)`. The batch is still in host memory.
      run: Runs third, on the devices. It must be pure, and is compiled for each batch shape. In training, the state is
        donated to it.
      end: Runs last, on the host, and returns `(state, outputs)`. Reading an output value synchronizes with the device.
      num_examples: Counts the examples in a batch from the dataset. Called before `preprocess_batch`.
      shard_batch: Places a batch on the devices, between `begin` and `run`.
      make_state: Creates the initial state. `initialize_model` compiles this hook, so it must be pure.
      params_to_evaluate: Returns the parameters to use in evaluation, prediction and export.
      begin_evaluation: Prepares the step for an evaluation. Called before the first batch.

    >>> import jax.numpy as jnp
    >>> import numpy as np
    >>> from flax import linen as nn, nnx
    >>> class Regression(Step):
    ...     def run(self, state, batch):
    ...         def loss_fn(params):
    ...             predicted, updates = self.call_model(state, params, batch["x"])
    ...             return jnp.mean((predicted - batch["y"]) ** 2), updates
    ...         (loss, updates), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    ...         return state.apply_gradients(grads=grads).update_variables(updates), {"loss": loss}
    >>> step = Regression(jax.random.key(0), nnx.Linear(3, 1, rngs=nnx.Rngs(0)), optax.sgd(0.1), train=True)
    >>> batch = {"x": np.ones([8, 3], np.float32), "y": np.ones([8, 1], np.float32)}
    >>> state, outputs = step(step.initialize_model(), batch)
    >>> int(state.step), sorted(outputs)
    (1, ['loss'])

    A Linen module is initialized with the shape of its inputs:

    >>> step = Regression(jax.random.key(0), nn.Dense(1), optax.sgd(0.1), train=True)
    >>> state, outputs = step(step.initialize_model([1, 3]), batch)

    `call_model` calls any kind of model, in training mode if the step trains. It returns the model's outputs and the
    variables that the call changed, such as batch statistics. `update_variables` stores these variables in the state.

    The state may be any pytree with an int32 `step`. To add fields to it, such as the state of a second optimizer for a
    GAN, override `make_state` and return a subclass of `TrainState`.

    Args:
      base_prng: A PRNG key or a dict of PRNG keys, old-style or typed, from which all other keys are derived.
        `initialize_model` uses it unchanged, and `prng_key(step)` folds in the step.
      model: A Linen module, an NNX module or class, or a model of another kind; `LossStep` lists all kinds. The
        variables of an NNX module are copied into each initial state; the module itself never changes. If an NNX class
        is passed, the step constructs the module with `nnx_model_args`, `nnx_model_kwargs` and
        `rngs=nnx.Rngs(base_prng)` (`nnx.Rngs(**base_prng)` for a dict). Pass None if your override of `make_state`
        doesn't need a model.
      optimizer: An Optax transformation, which becomes `state.tx`. None means no optimizer.
      partitioner: The `Partitioner`, which determines where the state and the batches are placed.
      train: Whether this step trains. If so, it needs an optimizer. `run` can read this flag as `self.train`.
      should_shard_batch: Set this to False if `begin` already places the batch on the devices.
      nnx_model_args: Positional arguments for an NNX class. Pass an empty tuple if there are none.
      begin_actions: Actions that are called with `outputs=None` before `run`. An int interval counts steps within the
        loop, whereas a schedule counts steps of the run: `at(100)` fires at the update that increases `state.step` to
        100.
      end_actions: Actions that are called with the step's outputs after `end`. Their intervals work in the same way as
        those of begin actions.
      **nnx_model_kwargs: Keyword arguments for an NNX class.

    Raises:
      ValueError: If `nnx_model_args` are missing for an NNX class, or are given with any other model.
      TypeError: If there are unknown keyword arguments and the model is not an NNX class.
    """

    max_batch_shapes: int = 16
    """The maximum number of batch shapes in training. `run` is compiled for each. Any further shape raises an error."""

    updates_per_step: int = 1
    """The number of optimizer updates that `run` makes per training batch. `run` must add this number to `state.step`.

    `state.step`, `num_steps`, `train_total_steps`, schedules and checkpoint names all count updates. With
    `updates_per_step = 16`, each batch advances the count by 16, and totals must be multiples of 16.
    """

    _runner_class: type[Runner] = Runner

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
        **nnx_model_kwargs: Any,
    ):
        optimizer = NO_OPTIMIZER if optimizer is None else optimizer
        _check_key(base_prng)
        adapted = forward.with_arguments(model, nnx_model_args, nnx_model_kwargs, type(self))
        if not isinstance(partitioner, partition.Partitioner):
            raise TypeError(f"partitioner must be a jaxloop Partitioner, got {partitioner!r}.")
        if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
            raise TypeError(f"optimizer must be an Optax transformation such as optax.adam(1e-3), got {optimizer!r}.")
        checks.check_positive(f"{type(self).__name__}.updates_per_step", self.updates_per_step)
        if train and optimizer is NO_OPTIMIZER and model is not None:
            logging.warning(
                "%s has train=True and no optimizer: state.apply_gradients would add the gradients to the parameters. "
                "Give an Optax transformation.",
                type(self).__name__,
            )
        self._base_prng = base_prng
        self._model = model
        self._optimizer = optimizer
        self._partitioner = partitioner
        self._train = train
        self._should_shard_batch = should_shard_batch
        self._init_fn = functools.partial(forward.init_fn, adapted, optimizer, base_prng)
        self._num_params: int | None = None
        self._num_flops: float | None = None
        self._runner = self._runner_class(self, Step, begin_actions, end_actions)

    def __repr__(self) -> str:
        named = self._model if inspect.isclass(self._model) else type(self._model)
        model = None if self._model is None else named.__name__
        return f"{type(self).__name__}(model={model}, train={self._train})"

    # To override ---------------------------------------------------------------------------------

    def preprocess_batch(self, batch: types.Batch) -> types.Batch:
        """Transforms a host batch. This hook doesn't receive the state, so it can run in the prefetch thread."""
        return batch

    def begin(self, state: Any, batch: types.Batch) -> tuple[Any, types.Batch]:
        """Runs on the host before `run`. For example, an override can convert `tf.Tensor`s to NumPy arrays."""
        return state, batch

    def run(self, state: Any, batch: types.Batch) -> tuple[Any, types.Output]:
        """Computes `(state, outputs)` from a state and one batch. This method is compiled, so it must be pure.

        In training, `run` must add `updates_per_step` (1 by default) to `state.step`. If an output's name contains
        "loss" and its value has one float per example, the value is replaced by its mean, unless the step overrides
        `num_examples`. To keep the individual values, wrap them in `MetricWithMetadata`.
        """
        raise NotImplementedError(f"{type(self).__name__} must define run(self, state, batch) -> (state, outputs).")

    def end(self, state: Any, outputs: types.Output) -> tuple[Any, types.Output]:
        """Runs on the host after `run`. The outputs are still on the devices."""
        return state, outputs

    def num_examples(self, batch: types.Batch) -> int:
        """Returns the number of examples in a batch from the dataset. Means are weighted by this number.

        By default, this is the length of the leading axis, or 1 if the leaves don't all have a leading axis of the same
        length. Override the method in the latter case, or if batches are padded. An override may return any
        non-negative whole number: an int, a float or a scalar array.
        """
        count = checks.num_examples(batch)
        return 1 if count is None else count

    def make_state(self, spec: types.BatchSpec = None, **init_kwargs: Any) -> Any:
        """Creates the initial state, at step 0. This method must be pure, because `initialize_model` compiles it.

        Override it to add fields to the state. Create optimizers in `__init__`, not in `make_state`. They are static
        fields of the state, and two Optax transformations never compare equal, even if they were created with the same
        arguments. If each call to `make_state` created an optimizer, the resulting states would differ in structure.

        >>> class Averaged(types.TrainState):
        ...     average: Any = None
        >>> class AveragingStep(Step):
        ...     def make_state(self, spec=None, **init_kwargs):
        ...         state = super().make_state(spec, **init_kwargs)
        ...         return Averaged(**vars(state), average=state.params)
        >>> from flax import linen as nn
        >>> sorted(AveragingStep(jax.random.key(0), nn.Dense(1)).initialize_model([1, 3]).average)
        ['bias', 'kernel']

        Args:
          spec: See `initialize_model`.
          **init_kwargs: See `initialize_model`.
        """
        init, arrays = self._init_fn(spec, init_kwargs)
        return init(*arrays)

    # The model -----------------------------------------------------------------------------------

    def initialize_model(self, spec: types.BatchSpec = None, log_num_params: bool = False, **init_kwargs: Any) -> Any:
        """Creates the initial state and places it on the devices as the partitioner specifies.

        Args:
          spec: The spec of the model's input: a shape such as `[1, 28, 28, 1]` (with dtype float32), a `(shape, dtype)`
            pair, or a dict, list or named tuple of these. The model is initialized with arrays of ones, but arrays and
            keys in the spec are passed to the model unchanged. For a model with several inputs, pass their specs either
            by position, as a list (`[[1, 64], key]`), or by name, as a dict (`{"x": [1, 64], "key": key}`). The spec is
            ignored for NNX models and for pytrees of parameters, which are initialized without inputs.
            `LossStep.input_spec` returns the spec for a batch.
          log_num_params: Whether to log the number of parameters.
          **init_kwargs: Arguments for the function that creates the parameters, such as `model.init` (Linen) or the
            constructor (NNX).

        Returns:
          A `TrainState` at step 0. Linen variables other than `params` and `batch_stats` are in `state.collections`.
        """
        if self._runner.has_own("make_state"):
            init, arrays = lambda: self.make_state(spec, **init_kwargs), ()
        else:
            init, arrays = self._init_fn(spec, init_kwargs)
        compiled = self._partitioner.shard_init_fn(init)
        self._runner.states.initialize = lambda: compiled(*arrays)
        state = compiled(*arrays)
        self._num_params = self.compute_num_params(state)
        if log_num_params:
            logging.info("%r has %s parameters.", self, f"{self._num_params:,}")
        return state

    def restore_model(
        self,
        state: Any,
        checkpoint_dir: epath.PathLike,
        step: int | None = None,
        transforms: Mapping[str, str] | None = None,
        *,
        missing_ok: bool = False,
    ) -> Any:
        """Restores a state from a checkpoint, with the shardings of `state`. The given `state` remains usable.

        This method reads checkpoints saved by a `CheckpointAction`, or by an Orbax `CheckpointManager` with
        `PyTreeSave`.

        Args:
          state: A state with the same structure, shapes and dtypes as the saved one. If only the optimizer state
            doesn't match, a warning is logged, and the result has the `opt_state` of `state`. However, a moving average
            of the parameters is restored if `state` and the saved state both contain one. If `state` has no optimizer,
            the saved `opt_state` is ignored.
          checkpoint_dir: The directory that contains one subdirectory per step.
          step: The step of the checkpoint to restore. If None, the newest undamaged checkpoint is restored, and a
            warning is logged for each damaged checkpoint that is skipped.
          transforms: A dict for renaming saved leaves. It maps patterns for saved paths to paths in `state`, as in
            `{"**/Dense_0/**": "**/output/**"}`. `*` matches one name, and `**` matches one or more names. A checkpoint
            that already has the new names is read unchanged.
          missing_ok: Whether to return `state` unchanged, instead of raising an error, if the directory contains no
            checkpoints or doesn't exist.

        Raises:
          FileNotFoundError: If there is no checkpoint, or none for `step`. The message lists the steps that have one.
          CheckpointError: If the checkpoint for `step` or, if `step` is None, every checkpoint is damaged.
          ValueError: If the checkpoint was saved from a different model. The message lists the leaves that differ.
        """
        if missing_ok and not checkpoint.all_steps(checkpoint_dir):
            logging.info("No checkpoint found in %s", checkpoint_dir)
            return state
        options = {"transforms": transforms, "any_optimizer": True}
        if step is not None:
            return checkpoint.restore(checkpoint_dir, step, checks.adopt(state), **options)
        restored = checkpoint.restore_newest(checkpoint_dir, checks.adopt(state), **options, quarantines=False)
        if restored is None:
            raise checkpoint.missing_error(checkpoint_dir)
        return restored[0]

    def abstract_state(self, spec: types.BatchSpec = None, **init_kwargs: Any) -> Any:
        """Returns the shapes and dtypes of the state that `initialize_model` would create, without allocating memory.

        `compile` and `partitioner.report` accept the result instead of a state.

        >>> from jaxloop import examples
        >>> step, _, _ = examples.tiny_regression()
        >>> step.abstract_state([1, 3]).params["kernel"].shape
        (3, 1)

        Args:
          spec: See `initialize_model`.
          **init_kwargs: See `initialize_model`.

        Returns:
          A `TrainState` of `jax.ShapeDtypeStruct`s, with the partitioner's shardings.
        """
        shapes = jax.eval_shape(lambda: self.initialize_model(spec, **init_kwargs))
        placed = lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        return jax.tree.map(placed, shapes, self._partitioner.shardings_of(shapes))

    def summary(self, state: Any, batch: types.BatchSpec = None) -> str:
        """Returns a table of the model's parameters, followed by the number of parameters and the size of the state.

        >>> from jaxloop import examples
        >>> step, state, batches = examples.tiny_regression()
        >>> print(step.summary(state, batches[0]))  # doctest: +ELLIPSIS
        path           shape   dtype    spec  per device
        params/bias    [1]     float32               4 B
        params/kernel  [3, 1]  float32              12 B
                                                    16 B  of 16 B in total
        4 parameters; state: 20 B per device
        a step: ... FLOPs and ... B of a device's memory: 148 B of arguments, ... B of temporaries.

        Args:
          state: A state, or the result of `abstract_state`, which doesn't take up memory.
          batch: A batch, or a pytree of `jax.ShapeDtypeStruct`s. If given, the step is compiled for this batch, and the
            step's cost is added below the table.
        """
        layout = self._partitioner.report(state)
        params = Layout(leaf for leaf in layout.leaves if leaf.path.startswith("params/"))
        number = f"{self.compute_num_params(state):,} parameters"
        lines = [str(params), f"{number}; state: {readable(layout.bytes_per_device)} per device"]
        if batch is not None:
            self.compile(state, batch)
            lines.append(f"a step: {self._runner.programs.cost}")
        return "\n".join(lines)

    def params_to_evaluate(self, state: Any) -> Any:
        """Returns the parameters to use in evaluation, prediction and export, which may differ from those in training.

        By default, these are `state.params` or, with `optax.contrib.schedule_free`, the averaged parameters.
        `LossStep`, `fit` and `jaxloop.export` call this hook. If you write your own `run`, use the hook's result
        in evaluation: `params = state.params if self.train else self.params_to_evaluate(state)`.
        """
        return types.params_to_evaluate(state)

    def call_model(
        self, state: Any, params: Any, inputs: Any, *, train: bool | None = None, keys: Any = None
    ) -> tuple[Any, Any]:
        """Calls the model, which can be of any supported kind; see `jaxloop.models.forward`.

        Call this method inside a compiled function, such as `run`.

        Args:
          state: The state.
          params: The parameters to use, for example the ones being differentiated.
          inputs: The input of the model.
          train: Whether to call the model in training mode. If None, `self.train` is used.
          keys: The PRNG keys to use, for example for dropout; usually `self.prng_key(state.step)`. An NNX model uses
            the keys in its own variables instead, unless its `__call__` takes `rngs`.

        Returns:
          `(outputs, updates)`. `updates` contains the variables that the forward pass changed, or is None if there are
          none. Pass it to `state.update_variables`.
        """
        return forward.forward(state, params, inputs, train=self._train if train is None else train, rngs=keys)

    def compute_num_params(self, state: Any) -> int:
        """Returns the number of parameters in `state.params`, or 0 if the state has no `params`."""
        return sum(leaf.size for leaf in jax.tree.leaves(getattr(state, "params", None)))

    def compute_num_flops(self, state: Any, batch: types.Batch) -> float:
        """Returns the number of floating-point operations (FLOPs) in one call to `run`, across all devices.

        A multiply-add in a matrix product or convolution counts as two operations; any other floating-point operation
        counts as one per element. The body of a scan is counted once per iteration, but the body of a `while` loop is
        counted only once. If `run` has no floating-point operations, its integer operations are counted instead.

        The batch is passed through the hooks that precede `run`, and `run` is traced but not executed. The state
        remains usable. Both arguments may be abstract; see `compile`.
        """
        runner = self._runner
        state, batch = shapes_for_run(self, state, batch)
        with runner.programs.watched("ignore"):
            traced = runner.programs.compiled().trace(state, runner.place(batch, evaluates=True))
        self._num_flops = flops_of(traced.jaxpr)
        return self._num_flops

    # Running -------------------------------------------------------------------------------------

    def compile(
        self,
        state: Any = None,
        batch: types.BatchSpec = None,
        *,
        evaluates: bool = False,
        steps_per_dispatch: int = 1,
        **jit_kwargs: Any,
    ) -> None:
        """Compiles `run` ahead of time for a state and a batch, so that the first step doesn't trigger a compilation.

        Calling this method is optional. `Loop.compile` compiles everything that a loop needs.

        >>> from jaxloop import examples
        >>> step, state, batches = examples.tiny_regression()
        >>> step.compile(state, batches[0])
        >>> step.num_flops > 0
        True

        Args:
          state: A state (which remains usable) or the result of `abstract_state`. If None, nothing is compiled now;
            everything compiled so far is discarded, and later compilations use `jit_kwargs`.
          batch: A batch from the dataset, or its shapes, given as `jax.ShapeDtypeStruct`s or as a spec (see
            `initialize_model`). If shapes are given, the hooks that precede `run` receive arrays of zeros that don't
            take up memory.
          evaluates: Whether to compile `run` for evaluation, which doesn't update the state.
          steps_per_dispatch: The number of steps in one dispatch.
          **jit_kwargs: Arguments for `jax.jit`, which take precedence over those from the partitioner. Passing any of
            them discards everything compiled so far.

        Raises:
          TypeError: If `jax.jit` doesn't accept one of the arguments.
        """
        runner, fuses = self._runner, steps_per_dispatch > 1
        if jit_kwargs or state is None:
            runner.programs.restart(**jit_kwargs)
        if state is None:
            return
        state, example = shapes_for_run(self, state, batch)
        example = stacked([example] * steps_per_dispatch) if fuses else example
        placed = runner.place(example, evaluates=evaluates, fuses=fuses)
        cost = runner.programs.compile(state, placed, evaluates=evaluates, fuses=fuses)
        if not fuses and not evaluates:
            self._num_flops = cost.flops

    def prng_key(self, step: Any) -> Any:
        """Derives a PRNG key from `base_prng` and a step number. If `base_prng` is a dict, returns a dict of keys.

        >>> from flax import linen as nn
        >>> key = Step(jax.random.key(0), nn.Dense(1)).prng_key(7)
        >>> bool(key == jax.random.fold_in(jax.random.key(0), 7))
        True
        """
        return jax.tree.map(lambda key: jax.random.fold_in(key, step), self._base_prng)

    def shard_batch(self, batch: types.Batch) -> types.Batch:
        """Places a batch on the devices, unless `should_shard_batch` is False."""
        return self._partitioner.shard_batch(batch) if self._should_shard_batch else batch

    def __call__(
        self,
        state: Any,
        batch: types.Batch,
        per_loop_step_number: int = 0,
        log_num_flops: bool = False,
        *,
        elapsed: Elapsed | None = None,
    ) -> tuple[Any, types.Output]:
        """Passes one batch through the hooks. The state is donated, so always continue with the returned state.

        If `end` or an end action raises an error, `rescued_state` holds the state that `run` returned.

        Args:
          state: The train state.
          batch: A host batch.
          per_loop_step_number: The number of steps before this one in the current loop. It determines whether the
            step's actions with int intervals are due.
          log_num_flops: Whether to count and log the FLOPs of `run`, if they haven't been counted yet.
          elapsed: The run's progress after this step, which is passed to the schedules of the step's actions. If None,
            these schedules count the steps within the loop.

        Returns:
          `(state, outputs)`. The outputs are still on the devices.
        """
        runner, given = self._runner, state
        state = runner.states.prepare(state)
        if log_num_flops and self._num_flops is None:
            logging.info("%r takes %s FLOPs a step.", self, self.compute_num_flops(state, batch))
        elapsed = elapsed or Elapsed(per_loop_step_number + 1)
        state, batch = runner.begin(state, batch, per_loop_step_number, elapsed)
        runner.batch_watch.look([batch])
        state, outputs = runner.dispatch(state, batch)
        checks.mark_donated(given, repr(self))
        runner.states.remember(state)  # Before `end`: if that returns another state, the next step prepares it.
        try:
            return runner.end(state, outputs, per_loop_step_number, elapsed)
        except BaseException:
            runner.states.rescued = state
            raise

    def evaluate(self, state: Any, batch: types.Batch, per_loop_step_number: int = 0) -> types.Output:
        """Passes one batch through the hooks and returns only the outputs. The state isn't changed and remains usable.

        If the batch's rows can't be divided evenly among the devices, the batch is replicated. If
        `per_loop_step_number` is 0, `begin_evaluation` is called first.
        """
        if per_loop_step_number == 0:
            self.begin_evaluation()
        runner, elapsed = self._runner, Elapsed(per_loop_step_number + 1)
        state, batch = runner.begin(runner.states.prepare(state), batch, per_loop_step_number, elapsed)
        _, outputs = runner.dispatch(state, batch, evaluates=True)
        return runner.end(state, outputs, per_loop_step_number, elapsed)[1]

    def begin_evaluation(self) -> None:
        """Prepares the step for an evaluation. Called before the first batch."""

    # Properties ----------------------------------------------------------------------------------

    @property
    def train(self) -> bool:
        """True if this step trains; False if it only evaluates."""
        return self._train

    @property
    def model(self) -> Any:
        """The model that was passed to the constructor."""
        return self._model

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """The Optax transformation that updates the parameters."""
        return self._optimizer

    @property
    def partitioner(self) -> partition.Partitioner:
        """The partitioner, which determines where the state and the batches are placed."""
        return self._partitioner

    @property
    def base_prng(self) -> types.PRNGType:
        """The key, or the dict of keys, from which all other keys are derived."""
        return self._base_prng

    @property
    def rescued_state(self) -> Any:
        """The state from `run`, if `end` or an end action raised an error in the most recent step; otherwise None."""
        return self._runner.states.rescued

    @property
    def num_params(self) -> int | None:
        """The number of parameters, or None before `initialize_model` is called."""
        return self._num_params

    @property
    def num_flops(self) -> float | None:
        """The FLOPs of `run`, as last counted by `compute_num_flops` or `compile`; None before the first count."""
        return self._num_flops

    @property
    def begin_actions(self) -> Sequence[Action]:
        """The actions that are called before `run`."""
        return self._runner.action_lists[0]

    @property
    def end_actions(self) -> Sequence[Action]:
        """The actions that are called after `end`."""
        return self._runner.action_lists[1]


class NumpyStep(Step):
    """A `Step` that also accepts TensorFlow and PyTorch tensors.

    Hooks:
      preprocess_batch: See `Step`. An override must first call `super().preprocess_batch`, which converts tensors to
        NumPy arrays.
      begin, run, end, num_examples, make_state: See `Step`.
    """

    def preprocess_batch(self, batch: types.Batch) -> types.Batch:
        """Converts tensors to NumPy arrays."""
        return data.numpy_batch(batch)


def _check_key(base_prng: Any) -> None:
    for key in base_prng.values() if isinstance(base_prng, Mapping) else [base_prng]:
        dtype: Any = getattr(key, "dtype", np.dtype(object))
        if not jnp.issubdtype(dtype, jax.dtypes.prng_key) and not (dtype == np.uint32 and np.ndim(key)):
            raise TypeError(
                f"base_prng must be a PRNG key or a dict of PRNG keys, got {base_prng!r}. Write jax.random.key(seed)."
            )
