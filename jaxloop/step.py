"""`Step`, the base class of all steps. A step processes one batch."""

import contextlib
import copy
import dataclasses
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self, final

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging
from etils import epath
from jax.extend import core as jax_core
from jax.interpreters import partial_eval

from jaxloop import checkpoint, checks, cost, data, metrics, models, nonfinite, partition, types
from jaxloop import topology as topologies
from jaxloop.actions.action import Action
from jaxloop.actions.action_list import ActionList
from jaxloop.compiled import Compiled, stacked
from jaxloop.layout import readable
from jaxloop.schedules import Elapsed
from jaxloop.timing import Stopwatch
from jaxloop.types import Batch as Batch
from jaxloop.types import BatchSpec as BatchSpec
from jaxloop.types import Output as Output
from jaxloop.types import State as State

NO_OPTIMIZER = optax.identity()
"""The default for `Step(optimizer=)`: no optimizer. A step with `train=True` and this optimizer logs a warning."""


@final
class Traced(NamedTuple):
    """The shapes of the values that `run` would return.

    Attributes:
      state: The new state.
      outputs: The outputs.
      updates: The number that `run` adds to `state.step`. None if it depends on the data or if there is no
        `state.step`.
    """

    state: Any
    outputs: types.Output
    updates: int | None


_NOTHING = lambda: None


class FusingError(ValueError):
    """Raised when several steps can't be fused into one dispatch. The message gives the reason."""


class Step:
    """Processes one batch: `preprocess_batch -> begin -> run -> end`. Subclass `Step` and implement `run`.

    A loop passes each batch through these four hooks, in this order. `run` and `end` must return their outputs as a
    dict with string keys (or None).

    Hooks:
      preprocess_batch: Runs first, on the host. It receives only the batch.
      begin: Runs second, on the host, and returns `(state, batch)`. The batch is still in host memory.
      run: Runs third, on the devices. It must be pure. It is compiled once for all devices, and donates the state.
      end: Runs fourth, on the host, and returns `(state, outputs)`. Reading an output value synchronizes with the
        device.
      num_examples: Counts the examples in a batch from the dataset. Called before the other hooks.
      shard_batch: Places a batch on the devices, between `begin` and `run`.
      make_state: Creates the initial state. `initialize_model` compiles this hook, so it must be pure.
      params_to_evaluate: Returns the parameters for evaluations, predictions and exports.
      begin_evaluation: Runs before the first batch of an evaluation.

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

    `call_model` calls either kind of model, in training mode if the step trains. It returns the model's outputs and the
    variables that the call changed, such as batch statistics. `update_variables` stores them in the state.

    The state may be any pytree with an int32 `step`. To add fields to it, such as the state of a second optimizer for a
    GAN, override `make_state` and return a subclass of `TrainState`.

    Args:
      base_prng: A PRNG key or a dict of PRNG keys, old-style or typed, from which all other keys are derived.
        `initialize_model` uses it unchanged, and `prng_key(step)` folds in the step.
      model: An NNX module or class, or a Linen module. The variables of an NNX module are copied into each initial
        state; the module itself never changes. If a class is passed, the step constructs the module with
        `nnx_model_args`, `nnx_model_kwargs` and `rngs=nnx.Rngs(base_prng)` (`nnx.Rngs(**base_prng)` for a dict). Pass
        None if your override of `make_state` doesn't need a model.
      optimizer: An Optax transformation, which becomes `state.tx`. None means no optimizer.
      partitioner: The `Partitioner` that decides where the state and the batches live.
      train: Whether this step trains. If so, it also needs an optimizer. `run` can read this flag as `self.train`.
      should_shard_batch: Set this to False if `begin` already places the batch on the devices.
      nnx_model_args: Positional arguments for an NNX class. Pass an empty tuple if there are none.
      begin_actions: Actions that are called with `outputs=None` before `run`. An int interval counts steps within the
        loop, whereas a schedule counts steps of the run: `at(100)` fires at the update that increases `state.step` to
        100.
      end_actions: Actions that are called with the step's outputs after `end`. Their intervals work the same way.
      **nnx_model_kwargs: Keyword arguments for an NNX class.

    Raises:
      ValueError: If `nnx_model_args` are missing for an NNX class, or are given with any other model.
      TypeError: If there are unknown keyword arguments and the model is not an NNX class.
    """

    max_batch_shapes: int = 16
    """The maximum number of training batch shapes. `run` is compiled for each one. One more raises an error."""

    updates_per_step: int = 1
    """The number of optimizer updates that `run` makes per training batch. `run` must add this number to `state.step`.

    `state.step`, `num_steps`, `train_total_steps`, schedules and checkpoint names all count updates. With
    `updates_per_step = 16`, each batch advances the count by 16, and totals must be multiples of 16.
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
        **nnx_model_kwargs: Any,
    ):
        optimizer = NO_OPTIMIZER if optimizer is None else optimizer
        _check_key(base_prng)
        adapted = self._adapt(model)
        models.check_model(adapted, nnx_model_args, nnx_model_kwargs, known=_OPTIONS)
        if not isinstance(partitioner, partition.Partitioner):
            raise TypeError(f"partitioner must be a jaxloop Partitioner, got {partitioner!r}.")
        if types.is_nnx(optimizer, "Optimizer"):
            raise TypeError(
                "optimizer must be an Optax transformation such as optax.adam(1e-3), got an nnx.Optimizer, which is "
                "bound to its own model. Give the transformation that it was made with: nnx_optimizer.tx."
            )
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
        self._model, self._adapted = model, adapted
        self._optimizer = optimizer
        self._partitioner = partitioner
        self._train = train
        self._should_shard_batch = should_shard_batch
        self._nnx_model_args = tuple(nnx_model_args or ())
        self._nnx_model_kwargs = nnx_model_kwargs
        self._begin_actions = ActionList(begin_actions, unit="steps within the loop")
        self._end_actions = ActionList(end_actions, unit="steps within the loop")
        self._compiled: dict[Any, Compiled] = {}
        self._jit_kwargs: dict[str, Any] = {}
        self._policy: nonfinite.NanPolicy = "ignore"
        self._detectors: dict[str, nonfinite.Detector] = {}
        self._stopwatch: Stopwatch | None = None
        self._new_state: Callable[[], Any] | None = None
        # Weak references to a state that was not donated, and to one of its leaves that the next step will donate.
        self._known_state: Callable[[], Any] = _NOTHING
        self._known_leaf: Callable[[], Any] = _NOTHING
        self._rescued_state: Any = None
        self._has_logged_count = False
        self.batch_watch: checks.BatchWatch = checks.BatchWatch()
        self._num_params: int | None = None
        self._num_flops: float | None = None
        self._cost: cost.Cost | None = None
        self._is_moved = False

    def __repr__(self) -> str:
        named = self._model if inspect.isclass(self._model) else type(self._model)
        model = None if self._model is None else named.__name__
        return f"{type(self).__name__}(model={model}, train={self._train})"

    # To override ---------------------------------------------------------------------------------

    def preprocess_batch(self, batch: types.Batch) -> types.Batch:
        """Transforms a host batch. This hook doesn't receive the state, so it can run in the prefetch thread."""
        return batch

    def begin(self, state: Any, batch: types.Batch) -> tuple[Any, types.Batch]:
        """Runs on the host before `run`. Override it, for example, to convert `tf.Tensor`s to NumPy arrays."""
        return state, batch

    def run(self, state: Any, batch: types.Batch) -> tuple[Any, types.Output]:
        """Computes `(state, outputs)` from one batch. This method is compiled, so it must be pure.

        In training, `run` must add `updates_per_step` (1 by default) to `state.step`. If an output's name contains
        "loss" and its value has one float per example, it is replaced by its mean. To keep the individual values, wrap
        them in `MetricWithMetadata`.
        """
        raise NotImplementedError(f"{type(self).__name__} must define run(self, state, batch) -> (state, outputs).")

    def end(self, state: Any, outputs: types.Output) -> tuple[Any, types.Output]:
        """Runs on the host after `run`. The outputs are still on the devices."""
        return state, outputs

    def num_examples(self, batch: types.Batch) -> int:
        """Returns the number of examples in a batch from the dataset. Means are weighted by this number.

        By default, this is the length of the leading axis. Override the method if batches are padded, or if the leaves'
        leading axes differ. It may return any non-negative whole number, as an int, a float, or an array with one
        element.
        """
        count = checks.num_examples(batch)
        if count is None and not self._has_logged_count:
            self._has_logged_count = True
            logging.warning(
                "%r counts each batch as one example, because its leaves don't share a leading axis. Override "
                "Step.num_examples(batch) for weighted means.",
                self,
            )
        return 1 if count is None else count

    def count_examples(self, batch: types.Batch) -> int:
        """Returns the result of `num_examples` as an int.

        Raises:
          ValueError: If the result is negative or not a whole number.
        """
        value = self.num_examples(batch)
        count = checks.whole_number(value)
        if count is None:
            raise ValueError(
                f"{type(self).__name__}.num_examples must return the number of examples in the batch, a whole number, "
                f"got {value!r} for {checks.batch_in_words(batch)}."
            )
        return count

    def make_state(self, spec: types.BatchSpec = None, **init_kwargs: Any) -> Any:
        """Makes the initial state, at step 0. This method must be pure, because `initialize_model` compiles it.

        Override it to add fields to the state. Create optimizers only once, in `__init__`, because they are static
        fields of the state, and separately created Optax transformations never compare equal.

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
        return self._init_fn(spec, init_kwargs)()

    # The model -----------------------------------------------------------------------------------

    def _adapt(self, model: Any) -> Any:
        return models.adapt(model) if types.is_nnx(model, "Module") else model

    def _init_fn(self, spec: types.BatchSpec, init_kwargs: dict[str, Any]) -> Callable[..., Any]:
        return models.init_fn(
            self._adapted,
            self._optimizer,
            self._base_prng,
            spec,
            self._nnx_model_args,
            self._nnx_model_kwargs,
            init_kwargs,
        )

    def initialize_model(self, spec: types.BatchSpec = None, log_num_params: bool = False, **init_kwargs: Any) -> Any:
        """Makes the initial state and places it on the devices, using the partitioner.

        Args:
          spec: The spec of the model's input: a shape such as `[1, 28, 28, 1]` (with dtype float32), a `(shape, dtype)`
            pair, or a dict, list or named tuple of these. The model is initialized with arrays of ones, but arrays and
            keys in the spec are passed to it unchanged. For a model with several inputs, pass their specs either by
            position, as a list (`[[1, 64], key]`), or by name, as a dict (`{"x": [1, 64], "key": key}`). The spec is
            ignored if the model is an NNX module or None.
          log_num_params: Whether to log the number of parameters.
          **init_kwargs: Arguments for `model.init` (Linen) or for the constructor (NNX).

        Returns:
          A `TrainState` at step 0. Linen variables other than `params` and `batch_stats` are in `state.collections`.
        """
        init, model = self._init_fn(spec, init_kwargs), self._adapted
        arrays = model.arrays if isinstance(model, models.AdaptedModel) else ()
        if self._has_own("make_state"):
            init, arrays = lambda: self.make_state(spec, **init_kwargs), ()
        compiled = self._partitioner.shard_init_fn(init)
        self._new_state = lambda: compiled(*arrays)
        state = self._new_state()
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
          state: A state with the same structure, shapes and dtypes as the saved one. If only the optimizer differs, the
            given `opt_state` is kept and a warning is logged. If `state` has no optimizer, the saved `opt_state` is
            ignored.
          checkpoint_dir: The directory that contains one subdirectory per step.
          step: The step of the checkpoint. If None, the newest undamaged checkpoint is restored, and a warning is
            logged for each damaged checkpoint that is skipped.
          transforms: A dict for renaming saved leaves. It maps patterns of saved paths to paths in `state`, as in
            `{"**/Dense_0/**": "**/output/**"}`. `*` matches one name, and `**` matches one or more names. A checkpoint
            that has the new names already is used as it is.
          missing_ok: Whether to return `state` unchanged if the directory contains no checkpoints or doesn't exist, for
            a program that may start from scratch.

        Raises:
          FileNotFoundError: If there is no checkpoint, or none for `step`. The error lists the steps, or names the
            nearest directory with checkpoints.
          CheckpointError: If the checkpoint of `step` is damaged, or if `step` is None and all checkpoints are damaged.
          ValueError: If the checkpoint was saved from a different model. The error lists the leaves that differ.
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
        """Returns the shapes and dtypes of the state that `initialize_model` would make, without allocating memory.

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
        """Returns a table of the model's parameters by module: shapes, dtypes, counts, bytes and shardings.

        >>> from jaxloop import examples
        >>> step, state, batches = examples.tiny_regression()
        >>> print(step.summary(state, batches[0]))  # doctest: +ELLIPSIS
        module  parameters     dtype    number  per device  spec
        (top)   bias [1]       float32       1         4 B
                kernel [3, 1]  float32       3        12 B
        total                                4        16 B  of 16 B
        state: 20 B per device
        a step: ... FLOPs and ... B of a device's memory: 148 B of arguments, ... B of temporaries.

        Args:
          state: A state, or the result of `abstract_state`, which doesn't take up memory.
          batch: A batch, or a pytree of `jax.ShapeDtypeStruct`s. If given, the step is compiled for this batch, and the
            step's cost is added below the table.
        """
        layout = self._partitioner.report(state)
        lines = [layout.summary(), f"state: {readable(layout.bytes_per_device)} per device"]
        if batch is not None:
            lines.append(f"a step: {self.cost_analysis(state, batch)}")
        return "\n".join(lines)

    def params_to_evaluate(self, state: Any) -> Any:
        """Returns the parameters for evaluations, predictions and exports, which may differ from those in training.

        By default, these are `state.params` or, for `optax.contrib.schedule_free`, the averages that the optimizer
        keeps. `LossStep`, `fit` and `jaxloop.export` call this hook. In your own `run`, call it if the step evaluates:
        `params = state.params if self.train else self.params_to_evaluate(state)`.
        """
        return types.params_to_evaluate(state)

    def call_model(
        self, state: Any, params: Any, inputs: Any, *, train: bool | None = None, keys: Any = None
    ) -> tuple[Any, Any]:
        """Calls a model of any supported kind from within a compiled function; see `jaxloop.models.forward`.

        Args:
          state: The state.
          params: The parameters to use, for example the ones being differentiated.
          inputs: The input of the model.
          train: Whether to call the model in training mode. If None, `self.train` is used.
          keys: The PRNG keys to use, for example for dropout. They are usually `self.prng_key(state.step)`. NNX models
            have their own keys.

        Returns:
          `(outputs, updates)`. `updates` contains the variables that the forward pass changed, or is None if there are
          none. Pass it to `state.update_variables`.
        """
        return models.forward(state, params, inputs, train=self._train if train is None else train, rngs=keys)

    def compute_num_params(self, state: Any) -> int:
        """Returns the number of parameters in `state.params`, or 0 if the state has no `params`."""
        return sum(leaf.size for leaf in jax.tree.leaves(getattr(state, "params", None)))

    def compute_num_flops(self, state: Any, batch: types.Batch) -> float:
        """Returns the number of floating-point operations (FLOPs) in one call to `run`, across all devices.

        A multiply-add in a matrix product or convolution counts as two operations; any other floating-point operation
        counts as one per element. The body of a scan is counted once per iteration, but the body of a `while` loop is
        counted only once. If `run` has no floating-point operations, its integer operations are counted instead.

        The batch passes through the hooks that precede `run`, and `run` is traced but not executed. The state remains
        usable. Both arguments may be abstract; see `compile`.
        """
        state, batch = self._in_shapes(state, batch)
        compiled = self._compiled_for(evaluates=False, fuses=False)
        self._num_flops = cost.flops_of(compiled.trace(state, self.place(batch, evaluates=True)).jaxpr)
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
        """Compiles `run` for the given shapes ahead of time, so that the first step doesn't trigger a compilation.

        Calling this method is optional. `Loop.compile` compiles everything that a loop needs.

        >>> from jaxloop import examples
        >>> step, state, batches = examples.tiny_regression()
        >>> step.compile(state, batches[0])
        >>> step.cost_analysis().flops > 0
        True

        Args:
          state: A state (which remains usable) or the result of `abstract_state`. If None, the arguments of `jax.jit`
            are set, but nothing is compiled.
          batch: A batch from the dataset, or its shapes, given as `jax.ShapeDtypeStruct`s or as a spec (see
            `initialize_model`). If shapes are given, the hooks that precede `run` receive arrays of zeros that don't
            take up memory.
          evaluates: Whether to compile `run` for `evaluate`, which doesn't update the state.
          steps_per_dispatch: The number of steps in one dispatch.
          **jit_kwargs: Arguments for `jax.jit` that override the partitioner's. Passing any of them discards everything
            compiled so far.

        Raises:
          TypeError: If `jax.jit` doesn't take one of the arguments.
        """
        if jit_kwargs or state is None:
            jax.jit(lambda state, batch: None, **jit_kwargs)  # Raises a `TypeError` for an unknown option.
            self._compiled, self._jit_kwargs = {}, jit_kwargs
        if state is None:
            return
        state, example = self._in_shapes(state, batch)
        fused = steps_per_dispatch > 1
        if fused:
            example = stacked([example] * steps_per_dispatch)
        placed = self.place_stacked(example) if fused else self.place(example, evaluates=evaluates)
        traced = self._compiled_for(evaluates=evaluates, fuses=fused, policy=self._policy).trace(state, placed)
        mesh = self._partitioner.mesh
        self._cost = cost.cost_of(traced, num_devices=1 if mesh is None else mesh.size)
        if not fused and not evaluates:
            self._num_flops = self._cost.flops

    def _in_shapes(self, state: Any, batch: types.BatchSpec) -> tuple[Any, types.Batch]:
        """Passes a batch through the hooks that precede `run`. Returns the state (or its shapes) and batch shapes."""
        is_abstract = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(state))
        state = self._as_after_first_step(state) if is_abstract else self.prepare_state(state)
        state, batch = self.before_run(state, models.example_batch(batch))
        if checks.is_user_defined(self, "shard_batch") or checks.is_user_defined(self._partitioner, "shard_batch"):
            return state, batch  # A custom `shard_batch` may accept only arrays.
        return state, jax.tree.map(models.shape_of_array, batch)

    def _as_after_first_step(self, shapes: Any) -> Any:
        """Returns the shapes with the layout that states have in a run, so that jit reuses the compiled function."""
        if self._partitioner.mesh is not None or self._is_moved:
            return shapes
        plain = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=leaf.weak_type)
        return jax.tree.map(plain, shapes)

    def detector(self, policy: nonfinite.NanPolicy) -> nonfinite.Detector:
        """Returns the object that adds the flags of a `nan_policy` to the outputs of `run`."""
        if policy not in self._detectors:
            self._detectors[policy] = nonfinite.Detector(self._checked_run, policy, self._partitioner.mesh is not None)
        return self._detectors[policy]

    def _compiled_for(self, *, evaluates: bool, fuses: bool, policy: nonfinite.NanPolicy = "ignore") -> Compiled:
        key = (evaluates, fuses, policy)
        if key not in self._compiled:
            run = self._checked_outputs if evaluates else self._checked_run
            run = run if evaluates or policy == "ignore" else self.detector(policy).run
            self._compiled[key] = Compiled(
                type(self).__name__,
                run,
                self._partitioner,
                evaluates=evaluates,
                fuses=fuses,
                jit_kwargs=self._jit_kwargs,
                stopwatch=lambda: self._stopwatch,
                batch_watch=self.batch_watch,
            )
        return self._compiled[key]

    def dispatcher(self, *, evaluates: bool = False, fuses: bool = False) -> tuple[Compiled, Callable[..., Any]]:
        """Returns the compiled `run` and a function that dispatches it.

        Args:
          evaluates: Whether to dispatch an evaluation, which doesn't donate the state.
          fuses: Whether one dispatch processes several stacked batches; see `place_stacked`.
        """
        compiled = self._compiled_for(evaluates=evaluates, fuses=fuses, policy="ignore" if evaluates else self._policy)
        return compiled, compiled.call

    def trace(self, state: Any, batch: types.Batch, *, evaluates: bool = False) -> Traced:
        """Traces `run` and returns the shapes of its results, without computing anything.

        >>> from jaxloop import examples
        >>> step, state, batches = examples.tiny_regression()
        >>> step.trace(step.abstract_state([1, 3]), batches[0]).outputs["loss"].dtype
        dtype('float32')

        Args:
          state: A state, or its shapes from `abstract_state`.
          batch: A batch returned by `before_run`.
          evaluates: Whether to trace `run` for `evaluate`, which ignores the new state.

        Raises:
          Exception: A `TypeError` or a `ValueError` if `run` doesn't return `(state, outputs)` or changes the structure
            of the state. Errors raised by `run` itself are propagated.
        """
        if evaluates:
            evaluate = functools.wraps(self.run)(lambda state, batch: self._checked_outputs(state, batch))
            with partition.mesh_for_tracing(self._partitioner.mesh):
                return Traced(state, jax.eval_shape(evaluate, state, batch), 0)
        run = functools.wraps(self.run)(lambda state, batch: self._checked_run(state, batch))
        with partition.mesh_for_tracing(self._partitioner.mesh):
            jaxpr, (new_state, outputs) = jax.make_jaxpr(run, return_shape=True)(state, batch)
        step = getattr(new_state, "step", None)
        place = next((i for i, leaf in enumerate(jax.tree.leaves(new_state)) if leaf is step), None)
        mesh = self._partitioner.mesh
        with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):  # `_added_to_leaf` runs the program.
            return Traced(new_state, outputs, None if place is None else _added_to_leaf(jaxpr, place))

    def cost_analysis(
        self, state: Any = None, batch: types.BatchSpec = None, *, topology: str | None = None
    ) -> cost.Cost:
        """Returns the FLOPs and the memory usage of a compiled step.

        If you pass a state and a batch, the step is compiled for them. Otherwise, the result describes the most recent
        call to `compile`.

        Args:
          state: See `compile`.
          batch: See `compile`. If a topology is given, this is the global batch for all of its devices.
          topology: The TPUs to compile for, such as "v5e:16x16". This machine doesn't need to have them. The
            partitioner's data axis is resized to use all of them. If None, the devices of the step's partitioner are
            used.

        Raises:
          jaxloop.cost.DeviceMemoryError: If the step needs more memory than a device in the topology has.
          ImportError: If a topology is given but libtpu is not installed.
          ValueError: If no state is given and `compile` hasn't been called, or if the topology doesn't exist.
        """
        if topology is not None:
            there = self.moved_to(topologies.devices_of(topology))
            return there.cost_analysis(there.partitioner.layout_of(jax.tree.map(checks.shape_of, state)), batch)
        if state is not None:
            self.compile(state, batch)
        if self._cost is None:
            raise ValueError(f"{self!r} is not compiled yet. Call step.cost_analysis(state, batch).")
        return self._cost

    def moved_to(self, devices: Sequence[Any]) -> Self:
        """Returns a copy of this step that can be compiled for other devices; see `Partitioner.moved_to`."""
        moved = copy.copy(self)
        moved._partitioner, moved._compiled, moved._cost = self._partitioner.moved_to(devices), {}, None
        moved._known_state, moved._known_leaf, moved._is_moved = _NOTHING, _NOTHING, True
        return moved

    def largest_batch(self, state: Any, batch: types.BatchSpec, topology: str | None = None) -> int:
        """Returns the largest per-device batch size (in rows) for which a training step fits in device memory.

        Searches by bisection, compiling the step for each batch size that it tries. Nothing is allocated on the
        devices.

        Args:
          state: The state, or its shapes from `abstract_state`.
          batch: A batch or its shapes; see `compile`. The size of its leading axis doesn't matter.
          topology: See `cost_analysis`. If None, the devices of the step's partitioner are used. They must report how
            much memory they have.

        Returns:
          The number of rows per device, at most 2**20. It is 0 if not even one row fits.

        Raises:
          ValueError: If the memory of the devices is unknown.
        """
        step = self if topology is None else self.moved_to(topologies.devices_of(topology))
        state = jax.tree.map(checks.shape_of, state)
        state = state if topology is None else step.partitioner.layout_of(state)
        mesh = step.partitioner.mesh
        device = mesh.devices.flat[0] if mesh is not None else next(iter(step.partitioner.sharding.device_set))
        memory = partition.memory_of(device) if topology is None else topologies.memory_of(device)
        if memory is None:
            raise ValueError(
                f"The memory of {device.device_kind} is unknown, so the largest batch is, too. Give a topology, "
                'such as "v5e:2x4".'
            )
        example = models.example_batch(batch)

        def fits(rows: int) -> bool:
            resize = lambda leaf: np.broadcast_to(leaf[:1], (rows * step.partitioner.shards, *leaf.shape[1:]))
            resized = jax.tree.map(lambda leaf: resize(leaf) if np.ndim(leaf) else leaf, example)
            try:
                return step.cost_analysis(state, resized).peak_bytes <= memory
            except cost.DeviceMemoryError:
                return False

        return _largest(fits, 2**20)

    def prng_key(self, step: Any) -> Any:
        """Derives a step's PRNG key from `base_prng` and `step`. If `base_prng` is a dict, returns a dict of keys.

        >>> from flax import linen as nn
        >>> key = Step(jax.random.key(0), nn.Dense(1)).prng_key(7)
        >>> bool(key == jax.random.fold_in(jax.random.key(0), 7))
        True
        """
        return jax.tree.map(lambda key: jax.random.fold_in(key, step), self._base_prng)

    def shard_batch(self, batch: types.Batch) -> types.Batch:
        """Places a batch on the devices, unless `should_shard_batch` is False."""
        return self._partitioner.shard_batch(batch) if self._should_shard_batch else batch

    def prepare_state(self, state: Any) -> Any:
        """Converts a state to the form that `run` needs, with all leaves as arrays on the partitioner's devices.

        If the state is the one that this step last returned or prepared, it isn't checked again.

        Raises:
          ValueError: If the state was donated to an earlier call. (With several CPU devices, using such a state would
            crash the process.)
        """
        self._rescued_state = None
        if self._is_known(state):
            return state
        checks.check_alive(state, repr(self))
        state = self._partitioner.place_state(checks.adopt(state))
        self.remember(state)
        return state

    def __call__(
        self,
        state: Any,
        batch: types.Batch,
        per_loop_step_number: int = 0,
        log_num_flops: bool = False,
        *,
        elapsed: Elapsed | None = None,
    ) -> tuple[Any, types.Output]:
        """Passes one batch through the hooks and donates the state, so always continue with the returned state.

        If `end` or an end action raises an error, `rescued_state` holds the state that `run` returned.

        Args:
          state: The train state.
          batch: A host batch.
          per_loop_step_number: The number of steps that precede this one in the loop. The intervals of the step's
            actions depend on this number.
          log_num_flops: Whether to count and log the FLOPs of `run`, if they haven't been counted yet.
          elapsed: The progress of the run after this step. It is passed to the schedules of the step's actions. If
            None, these schedules count the steps within the loop.

        Returns:
          `(state, outputs)`. The outputs are still on the devices.
        """
        given = state
        state = self.prepare_state(state)
        if log_num_flops and self._num_flops is None:
            logging.info("%r takes %s FLOPs a step.", self, self.compute_num_flops(state, batch))
        elapsed = elapsed or Elapsed(per_loop_step_number + 1)
        state, batch = self._begin(state, batch, per_loop_step_number, elapsed)
        self.check_batches(batch)
        state, outputs = self._dispatch(state, batch)
        checks.mark_donated(given, repr(self))
        self.remember(state)  # Before `end`: if that returns another state, the next step prepares it.
        try:
            return self._end(state, outputs, per_loop_step_number, elapsed)
        except BaseException:
            self._rescued_state = state
            raise

    def work_for_each_step(self, *, evaluates: bool = False) -> str | None:
        """Describes any host code that must run at each step and therefore prevents a loop from fusing its steps.

        Returns None if there isn't any such code.

        Args:
          evaluates: Whether to describe the code for evaluations rather than for training.
        """
        for name in ("evaluate" if evaluates else "__call__", "end"):
            if self._has_own(name):
                return f"it has its own `{name}`, which is called after each step"
        if checks.is_user_defined(self, "shard_batch"):
            return "it has its own `shard_batch`, which places one batch"
        if self._begin_actions.actions or self._end_actions.actions:
            return "it has actions, which are called for each step; move them to the loop, with a schedule"
        return None

    def _has_own(self, name: str) -> bool:
        return checks.is_overridden(self, name, Step)

    @property
    def places_batches(self) -> bool:
        """True if a batch must be placed on the devices before `run`."""
        return self._has_own("shard_batch") or (self._should_shard_batch and self._partitioner.places_batches)

    def begin_reads_state(self, batch: types.Batch) -> bool:
        """Returns True if an overridden `begin` reads the state, which the loop must then assemble before the step."""
        return True

    def check_batches(self, *batches: types.Batch) -> int:
        """Checks the shapes of training batches that are ready for `run`, and returns the number of rows per batch.

        Args:
          *batches: One or more batches, all with the same structure, shapes and dtypes.
        """
        rows = self.batch_watch.look(batches, self)
        return self.count_examples(batches[0]) if rows is None else rows

    @contextlib.contextmanager
    def watched(self, policy: nonfinite.NanPolicy, stopwatch: Stopwatch | None = None) -> Iterator[None]:
        """A context manager that makes the step use a loop's `nan_policy` and its stopwatch."""
        before = self._policy, self._stopwatch
        self._policy, self._stopwatch = policy, stopwatch or self._stopwatch
        try:
            yield
        finally:
            self._policy, self._stopwatch = before

    def run_again(self, state: Any, batch: types.Batch, *, eagerly: bool = False) -> tuple[Any, types.Output]:
        """Passes one batch through the hooks and donates the state, like `__call__`, but doesn't call any actions.

        With `eagerly=True`, `run` is not compiled, and the state remains usable.
        """
        state, batch = self.before_run(self.prepare_state(state), batch)
        if eagerly:  # Otherwise, operations between NumPy arrays would run in NumPy instead of JAX.
            batch = jax.tree.map(jnp.asarray, batch)
        with jax.disable_jit(eagerly):
            state, outputs = self._dispatch(state, batch)
        return checks.check_result(self.end(state, outputs), f"{type(self).__name__}.end")

    def new_state(self) -> Any:
        """Recreates the state that `initialize_model` last returned. Returns None if that method was never called."""
        return self._new_state and self._new_state()

    def evaluate(self, state: Any, batch: types.Batch, per_loop_step_number: int = 0) -> types.Output:
        """Passes one batch through the hooks and returns only the outputs. The state doesn't change and remains usable.

        If the batch's rows can't be divided evenly among the devices, the batch is replicated.
        """
        if per_loop_step_number == 0:
            self.begin_evaluation()
        elapsed = Elapsed(per_loop_step_number + 1)
        state, batch = self._begin(self.prepare_state(state), batch, per_loop_step_number, elapsed)
        _, outputs = self._dispatch(state, batch, evaluates=True)
        return self._end(state, outputs, per_loop_step_number, elapsed)[1]

    def begin_evaluation(self) -> None:
        """Prepares the step for an evaluation. Called before the first batch."""

    def filler(self) -> Callable[[int], None] | None:
        """Returns a function that sets the size to which short batches are padded, or None if the step can't pad."""
        return None

    def place(self, batch: types.Batch, *, evaluates: bool = False) -> types.Batch:
        """Places a batch on the devices with `shard_batch`.

        In an evaluation, a batch that can't be divided evenly among the devices is replicated, unless `shard_batch` is
        overridden.
        """
        if evaluates and self._should_shard_batch and not self._has_own("shard_batch"):
            return self._partitioner.shard_short_batch(batch)
        return self.shard_batch(batch)

    def place_stacked(self, batches: types.Batch) -> types.Batch:
        """Places several batches on the devices. They must already be stacked along a new leading axis."""
        return self._partitioner.shard_stacked_batches(batches) if self._should_shard_batch else batches

    def _is_known(self, state: Any) -> bool:
        if self._known_state() is not state:
            return False
        leaf = self._known_leaf()  # Another step may have donated it since.
        return leaf is not None and not leaf.is_deleted()

    def remember(self, state: Any) -> None:
        """Records the last state that this step returned, so that `prepare_state` doesn't check it again."""
        # Compares by identity: `state.replace(...)` makes a new object, which may contain a donated leaf.
        leaf = checks.donated_leaf(state) if hasattr(state, "step") else None
        self._known_state, self._known_leaf = (_NOTHING, _NOTHING) if leaf is None else map(weakref.ref, (state, leaf))

    def _begin(self, state: Any, batch: types.Batch, number: int, elapsed: Elapsed) -> tuple[Any, types.Batch]:
        state, batch = self.before_run(state, batch)
        self._call_actions(self._begin_actions, state, None, number, elapsed)
        return state, batch

    def before_run(self, state: Any, batch: types.Batch) -> tuple[Any, types.Batch]:
        """Passes a prepared state and a batch from the dataset through the hooks that precede `run`."""
        result = self.begin(state, self.preprocessed(batch))
        new_state, batch = checks.check_pair(result, f"{type(self).__name__}.begin", "(state, batch)")
        return state if new_state is state else self.prepare_state(new_state), batch

    def preprocessed(self, batch: types.Batch) -> types.Batch:
        """Calls `preprocess_batch` and returns its result. Raises a `TypeError` if the result is None."""
        ready = self.preprocess_batch(batch)
        if ready is None and batch is not None:
            raise TypeError(f"{type(self).__name__}.preprocess_batch returned None. Return the batch.")
        return ready

    def _dispatch(self, state: Any, batch: types.Batch, *, evaluates: bool = False) -> tuple[Any, types.Output]:
        compiled, call = self.dispatcher(evaluates=evaluates)
        try:
            carry, outputs = call(compiled.enter(state), self.place(batch, evaluates=evaluates))
        except Exception as error:
            self.explain(error, batch)
            raise
        return compiled.leave(carry), outputs

    def explain(self, error: Exception, batch: types.Batch) -> None:
        """Adds a note about the batch to a step's error. If the batch is invalid, raises a different error instead."""
        if isinstance(error, TypeError | ValueError):
            checks.check_batch(batch)
        if batch is None:
            error.add_note("without a batch, because the dataset is None. If the step needs data, give a dataset.")
        else:
            error.add_note(f"with {checks.batch_in_words(batch)}")
            if any(np.ndim(leaf) == 0 for leaf in checks.batch_leaves(batch).values() if not isinstance(leaf, str)):
                error.add_note(
                    "Some of its leaves have no axis. If the dataset yields examples instead of batches, write "
                    "jaxloop.data.batched(dataset, 64, seed=0)."
                )

    def _end(self, state: Any, outputs: types.Output, number: int, elapsed: Elapsed) -> tuple[Any, types.Output]:
        flags = (outputs or {}).get(nonfinite.FLAGS)
        if flags is not None:  # The hook and the actions see only the step's own outputs.
            own = {name: value for name, value in (outputs or {}).items() if name != nonfinite.FLAGS}
            state, outputs = self._end(state, own or None, number, elapsed)
            return state, {**(outputs or {}), nonfinite.FLAGS: flags}
        if self._has_own("end"):
            with jax.profiler.TraceAnnotation("jaxloop: end"):
                result = self.end(state, outputs)
            state, outputs = checks.check_result(result, f"{type(self).__name__}.end")
            outputs = _copy_donated(outputs, state)
        self._call_actions(self._end_actions, state, outputs, number, elapsed)
        return state, outputs

    def _call_actions(
        self, actions: ActionList, state: Any, outputs: types.Output, number: int, elapsed: Elapsed
    ) -> None:
        for index in range(len(actions.actions)):
            if actions.is_due(index, number + 1, elapsed):
                step_num = int(metrics.fetch(getattr(state, "step", 0)))
                actions.call(index, state, outputs, dataclasses.replace(elapsed, steps=step_num))

    def _checked_run(self, state: Any, batch: types.Batch) -> tuple[Any, types.Output]:
        hook = f"{type(self).__name__}.run"
        with models.noting_changes() as changed:
            result = self.run(state, batch)
        new_state, outputs = checks.check_run(result, hook)
        checks.check_same_state(state, new_state, hook)
        trace = lambda: jax.make_jaxpr(lambda *args: self.run(*args)[0])(state, batch).jaxpr
        models.check_updates_kept(state, new_state, changed, repr(self), trace)
        return new_state, self._reported(outputs, batch)

    def _checked_outputs(self, state: Any, batch: types.Batch) -> types.Output:
        return self._reported(checks.check_run(self.run(state, batch), f"{type(self).__name__}.run")[1], batch)

    def _reported(self, outputs: types.Output, batch: types.Batch) -> types.Output:
        """Converts the outputs of `run` to the form in which loops report them."""
        if not outputs:
            return outputs
        is_padded = checks.is_user_defined(self, "num_examples")  # The arrays may contain rows that don't count.
        outputs = types.mean_losses(outputs, None if is_padded else checks.num_examples(batch))
        return types.nnx_metrics_as_weighted(outputs)

    # Properties ----------------------------------------------------------------------------------

    @property
    def train(self) -> bool:
        """True if this step trains, False if it only evaluates."""
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
        """The partitioner, which decides where the state and the batches live."""
        return self._partitioner

    @property
    def base_prng(self) -> types.PRNGType:
        """The key, or the dict of keys, from which all other keys are derived."""
        return self._base_prng

    @property
    def rescued_state(self) -> Any:
        """The state that `run` returned, if `end` or an end action raised an error in the last step; otherwise None."""
        return self._rescued_state

    @property
    def num_params(self) -> int | None:
        """The number of parameters; None before `initialize_model` is called."""
        return self._num_params

    @property
    def num_flops(self) -> float | None:
        """The FLOPs of `run`, as last counted by `compute_num_flops` or `compile`; None if neither was called."""
        return self._num_flops

    @property
    def begin_actions(self) -> Sequence[Action]:
        """The actions that are called before `run`."""
        return self._begin_actions.actions

    @property
    def end_actions(self) -> Sequence[Action]:
        """The actions that are called after `end`."""
        return self._end_actions.actions

    @property
    def has_schedules(self) -> bool:
        """True if the interval of any of the step's actions is a schedule."""
        return self._begin_actions.has_schedules or self._end_actions.has_schedules

    @property
    def action_lists(self) -> Sequence[ActionList]:
        """The step's lists of begin actions and end actions. Each list counts how often its actions were called."""
        return (self._begin_actions, self._end_actions)


class NumpyStep(Step):
    """A `Step` that also accepts tensors from other libraries.

    Hooks:
      preprocess_batch: See `Step`. An override must first call `super().preprocess_batch`, which converts tensors to
        NumPy arrays.
      begin, run, end, num_examples, make_state: See `Step`.
    """

    def preprocess_batch(self, batch: types.Batch) -> types.Batch:
        """Converts tensors to NumPy arrays."""
        return data.numpy_batch(batch)


_OPTIONS = models.options_of(Step)


def _check_key(base_prng: Any) -> None:
    for key in base_prng.values() if isinstance(base_prng, Mapping) else [base_prng]:
        dtype: Any = getattr(key, "dtype", np.dtype(object))
        if not jnp.issubdtype(dtype, jax.dtypes.prng_key) and not (dtype == np.uint32 and np.ndim(key)):
            seed = key if isinstance(key, int | np.integer) else 0
            raise TypeError(
                f"base_prng must be a PRNG key or a dict of PRNG keys, got {base_prng!r}. Write jax.random.key({seed})."
            )


def _added_to_leaf(jaxpr: Any, place: int) -> int | None:
    """Returns the number that a traced program adds to the integer leaf at `place`; None if it depends on the data."""
    is_used = [number == place for number in range(len(jaxpr.jaxpr.outvars))]
    needed, needs = partial_eval.dce_jaxpr(jaxpr.jaxpr, is_used)
    if any(needs_it and number != place for number, needs_it in enumerate(needs)):
        return None
    before = jnp.asarray(41, jaxpr.in_avals[place].dtype)  # An arbitrary number that fits in an int8.
    closed = jax_core.ClosedJaxpr(needed, jaxpr.consts)  # pyright: ignore[reportPrivateImportUsage]
    (after,) = jax_core.jaxpr_as_fun(closed)(*[before] * any(needs))
    return int(metrics.fetch(after)) - 41


def _copy_donated(outputs: types.Output, state: Any) -> types.Output:
    """Copies outputs that are leaves of the state, because the next step would donate them before they are read."""
    donated = {id(leaf) for leaf in jax.tree.leaves(state)}
    return jax.tree.map(lambda leaf: jnp.copy(leaf) if id(leaf) in donated else leaf, outputs)


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """Returns the largest number from 1 to `most` that fits, assuming that all smaller ones fit too; 0 if none fits.

    >>> _largest(lambda number: number <= 11, 100)
    11
    """
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if middle <= most and fits(middle) else (low, middle)
    return low
