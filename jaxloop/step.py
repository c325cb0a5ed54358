"""What happens to one batch."""

import contextlib
import dataclasses
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
import optax
from absl import logging
from etils import epath
from jax.extend import core as jax_core
from jax.interpreters import partial_eval

from jaxloop import checkpoint, checks, cost, data, metrics, models, nonfinite, partition, types
from jaxloop.actions.action import Action
from jaxloop.actions.action_list import ActionList
from jaxloop.compiled import Compiled, stacked
from jaxloop.schedules import Elapsed
from jaxloop.timing import Stopwatch
from jaxloop.types import Batch as Batch
from jaxloop.types import BatchSpec as BatchSpec
from jaxloop.types import Output as Output
from jaxloop.types import State as State

NO_OPTIMIZER = optax.identity()
"""What stands for no optimizer: a step that trains with it is told so."""


@final
class Traced(NamedTuple):
    """What `run` would return, in shapes.

    Attributes:
      state: the new state.
      outputs: the outputs.
      updates: how much it adds to `state.step`; None for a state without, and where that depends on the data.
    """

    state: Any
    outputs: types.Output
    updates: int | None


_NOTHING = lambda: None


class FusingError(ValueError):
    """Several steps can't be taken in one dispatch, and why."""


class Step:
    """What happens to one batch: `preprocess_batch -> begin -> run -> end`. Subclass it and write `run`.

    Each batch that a loop draws goes through the first four hooks. `outputs` is a dict with string keys, or None.

    Hooks:
      preprocess_batch: first, on the host; sees the batch alone.
      begin: second, on the host; returns `(state, batch)`. The batch is still a host batch.
      run: third. Pure; it is compiled once, for all devices, and takes over (donates) the state.
      end: fourth, on the host; returns `(state, outputs)`. To read a value there is to wait for it.
      num_examples: for each batch, as the dataset gave it, before the others.
      shard_batch: for each batch, between `begin` and `run`, to place it on the devices.
      make_state: by `initialize_model`, to make the first state. Pure; it is compiled.
      begin_evaluation: before the first batch of an evaluation.

    >>> import jax.numpy as jnp
    >>> import numpy as np
    >>> from flax import linen as nn
    >>> class Regression(Step):
    ...     def run(self, state, batch):
    ...         def loss_fn(params):
    ...             predicted = state.apply_fn({"params": params}, batch["x"])
    ...             return jnp.mean((predicted - batch["y"]) ** 2)
    ...         loss, grads = jax.value_and_grad(loss_fn)(state.params)
    ...         return state.apply_gradients(grads=grads), {"loss": loss}
    >>> step = Regression(jax.random.key(0), nn.Dense(1), optax.sgd(0.1), train=True)
    >>> state = step.initialize_model([1, 3])
    >>> batch = {"x": np.ones([8, 3], np.float32), "y": np.ones([8, 1], np.float32)}
    >>> state, outputs = step(state, batch)
    >>> int(state.step), sorted(outputs)
    (1, ['loss'])

    With an NNX class, the forward pass returns the variables that it changed (batch statistics, dropout's counters)
    along with the outputs, and `update_variables` takes them over; Linen's `mutable=[...]` likewise:

    >>> from flax import nnx
    >>> class Network(nnx.Module):
    ...     def __init__(self, width, *, rngs):
    ...         self.dense = nnx.Linear(3, width, rngs=rngs)
    ...         self.dropout = nnx.Dropout(0.5, rngs=rngs)
    ...     def __call__(self, x):
    ...         return self.dropout(self.dense(x))
    >>> class NNXRegression(Step):
    ...     def run(self, state, batch):
    ...         def loss_fn(params):
    ...             model = state.apply_fn(params, state.batch_stats, state.collections, train=self.train)
    ...             predicted, (_, updates) = model(batch["x"])
    ...             return jnp.mean((predicted - batch["y"]) ** 2), updates
    ...         (loss, updates), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    ...         return state.apply_gradients(grads=grads).update_variables(updates), {"loss": loss}
    >>> step = NNXRegression(jax.random.key(0), Network, optax.sgd(0.1), train=True, nnx_model_args=(1,))
    >>> state, outputs = step(step.initialize_model(None), batch)
    >>> int(state.step)
    1

    The state may be any pytree with an int32 `step`, such as a subclass of `TrainState` with a second optimizer's state
    for a GAN: override `make_state`.

    Args:
      base_prng: the key, or a dict of keys, from which all others derive: `initialize_model` uses it as it is,
        `prng_key(step)` folds the step in. Old-style or typed.
      model: a Linen module, or an NNX module class, which the step constructs with `nnx_model_args`,
        `nnx_model_kwargs` and `rngs=nnx.Rngs(base_prng)`, or `nnx.Rngs(**base_prng)` for a dict. None for a step whose
        own `make_state` makes the state without a model.
      optimizer: an Optax transformation, kept as `state.tx`.
      partitioner: where the state and the batches live.
      train: whether this step trains, for `run` to ask (`self.train`). Then an optimizer is expected.
      should_shard_batch: False if `begin` has placed the batch already.
      nnx_model_args: positional arguments for an NNX class; an empty tuple for none.
      begin_actions: called with `outputs=None` before `run`. An int interval counts the steps within the loop, a
        schedule those of the training: `at(100)` is before or after the update that makes `state.step` 100.
      end_actions: called with the step's outputs after `end`; likewise.
      **nnx_model_kwargs: keyword arguments for an NNX class.

    Raises:
      ValueError: `nnx_model_args` with a Linen module, or an NNX class without.
      TypeError: an unknown keyword with a Linen module.
    """

    max_batch_shapes: int = 16
    """How many shapes of batches may come in training, each of which compiles `run` anew, before that is an error."""

    updates_per_step: int = 1
    """How many optimizer updates a training `run` makes with one batch, which is how much it adds to `state.step`.

    Steps are counted in updates everywhere: `state.step`, `num_steps`, `train_total_steps`, schedules and the names of
    checkpoints. With `updates_per_step = 16` each batch advances them by 16, and totals must be multiples of 16.
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
        **nnx_model_kwargs: Any,
    ):
        models.check_model(model, nnx_model_args, nnx_model_kwargs, known=_OPTIONS)
        if not isinstance(partitioner, partition.Partitioner):
            raise TypeError(f"partitioner must be a jaxloop Partitioner, got {partitioner!r}.")
        if types.is_nnx(optimizer, "Optimizer"):
            raise TypeError(
                "optimizer must be an Optax transformation such as optax.adam(1e-3), got an nnx.Optimizer, which holds "
                "one for a model of its own: give the transformation that it was made with, nnx_optimizer.tx."
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
        self._model = model
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
        self._watch: nonfinite.Watch | None = None
        self._stopwatch: Stopwatch | None = None
        self._new_state: Callable[[], Any] | None = None
        # Weak references to a state that is alive for certain, and to a leaf of it that the next step donates.
        self._known_state: Callable[[], Any] = _NOTHING
        self._known_leaf: Callable[[], Any] = _NOTHING
        self._rescued_state: Any = None
        self._has_logged_count = False
        self.batch_watch: checks.BatchWatch = checks.BatchWatch()
        self._num_params: int | None = None
        self._num_flops: float | None = None
        self._cost: cost.Cost | None = None

    def __repr__(self) -> str:
        named = self._model if inspect.isclass(self._model) else type(self._model)
        model = None if self._model is None else named.__name__
        return f"{type(self).__name__}(model={model}, train={self._train})"

    # To override ---------------------------------------------------------------------------------

    def preprocess_batch(self, batch: types.Batch) -> types.Batch:
        """Transforms a host batch; sees no state, so that it may run ahead of the step."""
        return batch

    def begin(self, state: Any, batch: types.Batch) -> tuple[Any, types.Batch]:
        """Runs on the host before `run`; turns `tf.Tensor` into NumPy, for example."""
        return state, batch

    def run(self, state: Any, batch: types.Batch) -> tuple[Any, types.Output]:
        """Computes `(state, outputs)` from one batch. Pure and jitted.

        In training it adds `updates_per_step`, which is one by default, to `state.step`.
        """
        raise NotImplementedError(f"{type(self).__name__} must define run(self, state, batch) -> (state, outputs).")

    def end(self, state: Any, outputs: types.Output) -> tuple[Any, types.Output]:
        """Runs on the host after `run`; the outputs are still on the devices."""
        return state, outputs

    def num_examples(self, batch: types.Batch) -> int:
        """How many examples a batch, as the dataset gave it, counts for in weighted means.

        By default the length of its leading axis; override it for batches with padding, or whose leaves differ. It may
        return any whole number that is not negative: an int, a float, or an array with one element.
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
        """Returns `num_examples` as an int.

        Raises:
          ValueError: it is no whole number, or negative.
        """
        value = self.num_examples(batch)
        count = checks.whole_number(value)
        if count is None:
            raise ValueError(
                f"{type(self).__name__}.num_examples must return a whole number, how many examples the batch has, got "
                f"{value!r} for {checks.batch_in_words(batch)}."
            )
        return count

    def make_state(self, spec: types.BatchSpec = None, **init_kwargs: Any) -> Any:
        """Makes the first state, at step 0. Pure; `initialize_model` compiles it, and has each leaf made in its place.

        Override it for a state with more than one model's. Make optimizers once, in `__init__`: a state has them as
        static fields, and two of them are never equal.

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
          spec: see `initialize_model`, as `init_kwargs`.
          **init_kwargs: likewise.
        """
        return self._init_fn(spec, init_kwargs)()

    # The model -----------------------------------------------------------------------------------

    @property
    def _model_to_initialize(self) -> Any:
        return self._model

    def _init_fn(self, spec: types.BatchSpec, init_kwargs: dict[str, Any]) -> Callable[..., Any]:
        return models.init_fn(
            self._model_to_initialize,
            self._optimizer,
            self._base_prng,
            spec,
            self._nnx_model_args,
            self._nnx_model_kwargs,
            init_kwargs,
        )

    def initialize_model(self, spec: types.BatchSpec = None, log_num_params: bool = False, **init_kwargs: Any) -> Any:
        """Makes the first state, each leaf where the partitioner wants it.

        Args:
          spec: describes the model's input: a shape (`[1, 28, 28, 1]`, float32), a `(shape, dtype)` pair, or these
            nested in dicts, lists and named tuples. The model is initialised with ones. Arrays and keys are passed as
            they are. A model with several inputs takes a list of specs by position (`[[1, 64], key]`), or a dict by
            name (`{"x": [1, 64], "key": key}`). Not used by NNX classes, and without a model.
          log_num_params: logs the number of parameters.
          **init_kwargs: passed on to `model.init` (Linen) or the constructor (NNX).

        Returns:
          A `TrainState` at step 0. Linen variables beside `params` and `batch_stats` are in `state.collections`.
        """
        init, model = self._init_fn(spec, init_kwargs), self._model_to_initialize
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
        self, state: Any, checkpoint_dir: epath.PathLike, step: int | None = None, transforms: Any = None
    ) -> Any:
        """Returns the state of a checkpoint, laid out like `state`, which stays usable.

        Reads what a `CheckpointAction`, or a plain Orbax `CheckpointManager` with `PyTreeSave`, wrote.

        Args:
          state: a state of the same structure, shapes and dtypes.
          checkpoint_dir: the directory with one subdirectory a step. Without a checkpoint there, the state is
            returned as it is, and that is logged.
          step: which checkpoint; None for the newest that is whole: damaged ones are passed over with a warning.
          transforms: Orbax transformations of the saved tree, for `PyTreeRestore`.

        Raises:
          FileNotFoundError: there are checkpoints, but none of `step`.
          CheckpointError: the checkpoint of `step` is damaged, or all are.
          ValueError: the checkpoint is of another model; the error lists the leaves that differ.
        """
        if not checkpoint.all_steps(checkpoint_dir):
            logging.info("No checkpoint found in %s", checkpoint_dir)
            return state
        if step is None:
            restored = checkpoint.restore_newest(
                checkpoint_dir, checks.adopt(state), transforms=transforms, quarantines=False
            )
            return state if restored is None else restored[0]
        return checkpoint.restore(checkpoint_dir, step, checks.adopt(state), transforms=transforms)

    def abstract_state(self, spec: types.BatchSpec = None, **init_kwargs: Any) -> Any:
        """The state that `initialize_model` would make, in shapes: nothing is computed, and no memory is taken.

        `compile` takes it in the place of a state, and `partitioner.report`.

        >>> from jaxloop import examples
        >>> step, _, _ = examples.tiny_regression()
        >>> step.abstract_state([1, 3]).params["kernel"].shape
        (3, 1)

        Args:
          spec: see `initialize_model`, as `init_kwargs`.
          **init_kwargs: likewise.

        Returns:
          A `TrainState` of `jax.ShapeDtypeStruct`s, with the shardings of the partitioner.
        """
        shapes = jax.eval_shape(lambda: self.initialize_model(spec, **init_kwargs))
        placed = lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        return jax.tree.map(placed, shapes, self._partitioner.shardings_of(shapes))

    def compute_num_params(self, state: Any) -> int:
        """The number of parameters in `state.params`; 0 for a state without."""
        return sum(leaf.size for leaf in jax.tree.leaves(getattr(state, "params", None)))

    def compute_num_flops(self, state: Any, batch: types.Batch) -> float | None:
        """The floating-point operations of one `run`, as XLA counts them before it optimizes; None if it doesn't say.

        Traces `run` on the batch as the hooks before it leave it, without running it. The state stays usable. Shapes
        are enough for both, see `compile`.
        """
        state, batch = self._in_shapes(state, batch)
        compiled = self._compiled_for(evaluates=False, fuses=False, watch=None)
        self._num_flops = cost.flops_of(compiled.lower(state, self._shard_short_batch(batch)))
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
        """Compiles `run` ahead, for a state and for batches like the one given; the first step then waits for nothing.

        There is no need to call it: XLA compiles when the first batch shows its shapes. `Loop.compile` compiles all
        that a loop will run.

        >>> from jaxloop import examples
        >>> step, state, batches = examples.tiny_regression()
        >>> step.compile(state, batches[0])
        >>> step.cost_analysis().flops > 0
        True

        Args:
          state: it stays usable; or its shapes, see `abstract_state`. None to compile nothing yet, but to give
            arguments of `jax.jit`.
          batch: as the dataset gives it; or its shapes, as `jax.ShapeDtypeStruct`s, or as the spec of
            `initialize_model` has them. The hooks before `run` then see zeros that take no memory.
          evaluates: as `evaluate` runs it, without an update.
          steps_per_dispatch: how many steps are to be one dispatch.
          **jit_kwargs: arguments of `jax.jit` that replace the partitioner's own. What was compiled is forgotten.
        """
        if jit_kwargs or state is None:
            self._compiled, self._jit_kwargs = {}, jit_kwargs
        if state is None:
            return
        state, example = self._in_shapes(state, batch)
        fused = steps_per_dispatch > 1
        if fused:
            example = stacked([example] * steps_per_dispatch)
        placed = self.place_stacked(example) if fused else self.place(example, evaluates=evaluates)
        lowered = self._compiled_for(evaluates=evaluates, fuses=fused, watch=self._watch).lower(state, placed)
        mesh = self._partitioner.mesh
        self._cost = cost.cost_of(lowered, lowered.compile(), num_devices=1 if mesh is None else mesh.size)
        if not fused and not evaluates:
            self._num_flops = self._cost.flops

    def _in_shapes(self, state: Any, batch: types.BatchSpec) -> tuple[Any, types.Batch]:
        """Returns a state, or its shapes, and the shapes of a batch as the hooks before `run` leave it."""
        is_abstract = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(state))
        state = self._as_after_first_step(state) if is_abstract else self.prepare_state(state)
        state, batch = self.before_run(state, models.example_batch(batch))
        if checks.is_user_defined(self, "shard_batch") or checks.is_user_defined(self._partitioner, "shard_batch"):
            return state, batch  # That one may take arrays only.
        return state, jax.tree.map(models.shape_of_array, batch)

    def _as_after_first_step(self, shapes: Any) -> Any:
        """A state in shapes, laid out as that of a run, for which jit then finds what was compiled ahead."""
        if self._partitioner.mesh is not None:
            return shapes
        plain = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=leaf.weak_type)
        return jax.tree.map(plain, shapes)

    def _compiled_for(self, *, evaluates: bool, fuses: bool, watch: nonfinite.Watch | None) -> Compiled:
        policy = None if evaluates or watch is None else watch.policy
        key = (evaluates, fuses, policy)
        if key not in self._compiled:
            run = self._checked_outputs if evaluates else self._checked_run
            self._compiled[key] = Compiled(
                type(self).__name__,
                run,
                self._partitioner,
                evaluates=evaluates,
                fuses=fuses,
                policy=policy,
                jit_kwargs=self._jit_kwargs,
                stopwatch=lambda: self._stopwatch,
            )
        return self._compiled[key]

    def dispatcher(self, *, evaluates: bool = False, fuses: bool = False) -> tuple[Compiled, Callable[..., Any]]:
        """Returns what is compiled of `run` for a purpose, and the function that gives a batch to the devices.

        Args:
          evaluates: keeps the state.
          fuses: takes several batches at once, see `place_stacked`.
        """
        watch = None if evaluates else self._watch
        compiled = self._compiled_for(evaluates=evaluates, fuses=fuses, watch=watch)
        return compiled, compiled.call if watch is None else functools.partial(watch.call, compiled, fuses=fuses)

    def trace(self, state: Any, batch: types.Batch, *, evaluates: bool = False) -> Traced:
        """Traces `run`, and says what it would return; nothing is computed.

        >>> from jaxloop import examples
        >>> step, state, batches = examples.tiny_regression()
        >>> step.trace(step.abstract_state([1, 3]), batches[0]).outputs["loss"].dtype
        dtype('float32')

        Args:
          state: a state, or its shapes, see `abstract_state`.
          batch: as the hooks before `run` leave it, see `before_run`.
          evaluates: as `evaluate` runs it: what it makes of the state is nobody's.

        Raises:
          Whatever `run` raises; and see `run` for what it must return.
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
        with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):  # To run it takes devices.
            return Traced(new_state, outputs, None if place is None else _added_to_leaf(jaxpr, place))

    def cost_analysis(self, state: Any = None, batch: types.BatchSpec = None) -> cost.Cost:
        """Operations and memory of the compiled step: of the one that `compile` compiled last, or of this one.

        Raises:
          ValueError: nothing was compiled ahead, and there is no state and batch to compile for.
        """
        if state is not None:
            self.compile(state, batch)
        if self._cost is None:
            raise ValueError(f"{self!r} was not compiled yet: call step.cost_analysis(state, batch).")
        return self._cost

    def prng_key(self, step: Any) -> Any:
        """The key of a step, a pure function of `base_prng` and `step`; a dict of keys if `base_prng` is one.

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
        """Returns the state as `run` takes it: on the partitioner's devices, and all arrays.

        The state that this step returned or prepared last passes through.

        Raises:
          ValueError: the state was donated to an earlier call. (Its use would end the process, on several CPUs.)
        """
        self._rescued_state = None  # That of an earlier call.
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
        """Takes one batch through the hooks. The state is donated: use the one that is returned.

        Args:
          state: the train state.
          batch: a host batch.
          per_loop_step_number: how many steps the loop has done before this one, for the step's actions.
          log_num_flops: counts and logs the operations of `run`, at the first call.
          elapsed: how far the training is once this step is done, for the schedules of the step's actions. None to
            count the steps within the loop.

        Returns:
          `(state, outputs)`, the outputs still on the devices.

        Raises:
          Whatever a hook or an action raises. Where `run` had returned before, its state is in `rescued_state`.
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
        try:
            state, outputs = self._end(state, outputs, per_loop_step_number, elapsed)
        except BaseException:
            self._rescued_state = state
            raise
        self.remember(state)
        return state, outputs

    def work_after_run(self, *, evaluates: bool = False) -> str | None:
        """Says what is to be done on the host after each step, so that a loop must call the step; None for nothing.

        Args:
          evaluates: whether it is for evaluations.
        """
        for name in ("evaluate" if evaluates else "__call__", "end"):
            if self._has_own(name):
                return f"it has its own `{name}`, which is called after each step"
        if self._begin_actions.actions or self._end_actions.actions:
            return "it has actions, which are called for each step; give them to the loop, with a schedule"
        return None

    def _has_own(self, name: str) -> bool:
        return checks.is_overridden(self, name, Step)

    @property
    def places_batches(self) -> bool:
        """Whether a batch has to be placed on the devices before `run`."""
        return self._has_own("shard_batch") or (self._should_shard_batch and self._partitioner.places_batches)

    @property
    def begin_reads_state(self) -> bool:
        """Whether `begin` reads the state, which then has to be put together for it before each step."""
        return self._has_own("begin")

    def check_batches(self, *batches: types.Batch) -> int:
        """Looks at batches of training that are ready for `run`, see `BatchWatch.look`; returns how many rows each has.

        Args:
          *batches: one batch, or several with the structure, shapes and dtypes of the first.
        """
        rows = self.batch_watch.look(batches, self)
        return self.count_examples(batches[0]) if rows is None else rows

    @property
    def watch(self) -> nonfinite.Watch | None:
        """What looks for bad numbers at present, see `watched`."""
        return self._watch

    @contextlib.contextmanager
    def watched(self, watch: nonfinite.Watch | None, stopwatch: Stopwatch | None = None) -> Iterator[None]:
        """Attaches the step to a loop, which checks for non-finite values and times compilations in this context.

        Args:
          watch: checks for non-finite values, as the loop's `nan_policy` asks; None for no checks.
          stopwatch: the loop's; None to keep the present one.
        """
        before = self._watch, self._stopwatch
        self._watch, self._stopwatch = watch, stopwatch or self._stopwatch
        try:
            yield
        finally:
            self._watch, self._stopwatch = before

    def run_again(self, state: Any, batch: types.Batch, *, eagerly: bool = False) -> tuple[Any, types.Output]:
        """Takes one batch through the hooks as a call of the step does, without its actions. The state is donated.

        Eagerly, `run` is not compiled, and keeps the state.
        """
        state, batch = self.before_run(self.prepare_state(state), batch)
        if eagerly:  # Else NumPy would compute with NumPy arrays.
            batch = jax.tree.map(jnp.asarray, batch)
        with jax.disable_jit(eagerly):
            state, outputs = self._dispatch(state, batch)
        return checks.check_result(self.end(state, outputs), f"{type(self).__name__}.end")

    def new_state(self) -> Any:
        """The state that `initialize_model` returned last, made once more; None before."""
        return self._new_state and self._new_state()

    def evaluate(self, state: Any, batch: types.Batch, per_loop_step_number: int = 0) -> types.Output:
        """Takes one batch through the hooks for its outputs alone: the state stays as it is, and usable.

        A batch whose rows do not divide over the devices is replicated.
        """
        if per_loop_step_number == 0:
            self.begin_evaluation()
        elapsed = Elapsed(per_loop_step_number + 1)
        state, batch = self._begin(self.prepare_state(state), batch, per_loop_step_number, elapsed)
        _, outputs = self._dispatch(state, batch, evaluates=True)
        return self._end(state, outputs, per_loop_step_number, elapsed)[1]

    def begin_evaluation(self) -> None:
        """Called before the first batch of an evaluation."""

    def filler(self) -> Callable[[int], None] | None:
        """What is told to how many rows short batches are to be filled up; None where this step can't do that."""
        return None

    def _shard_short_batch(self, batch: types.Batch) -> types.Batch:
        return self._partitioner.shard_short_batch(batch) if self._should_shard_batch else batch

    def place(self, batch: types.Batch, *, evaluates: bool = False) -> types.Batch:
        """Places a batch on the devices: by `shard_batch`, or replicated where, to evaluate, it does not divide."""
        return self._shard_short_batch(batch) if evaluates else self.shard_batch(batch)

    def place_stacked(self, batches: types.Batch) -> types.Batch:
        """Places batches that were stacked on a new leading axis."""
        return self._partitioner.shard_stacked_batches(batches) if self._should_shard_batch else batches

    def _is_known(self, state: Any) -> bool:
        if self._known_state() is not state:
            return False
        leaf = self._known_leaf()  # Another step may have donated it since.
        return leaf is not None and not leaf.is_deleted()

    def remember(self, state: Any) -> None:
        """Notes the newest state that this step has returned: it need not be looked at again."""
        # By the object: `state.replace(...)` makes a new one, which may hold a leaf that was donated.
        leaf = checks.donated_leaf(state) if hasattr(state, "step") else None
        self._known_state, self._known_leaf = (_NOTHING, _NOTHING) if leaf is None else map(weakref.ref, (state, leaf))

    def _begin(self, state: Any, batch: types.Batch, number: int, elapsed: Elapsed) -> tuple[Any, types.Batch]:
        state, batch = self.before_run(state, batch)
        self._call_actions(self._begin_actions, state, None, number, elapsed)
        return state, batch

    def before_run(self, state: Any, batch: types.Batch) -> tuple[Any, types.Batch]:
        """Takes a state that is prepared, and a batch as the dataset gives it, through the hooks before `run`."""
        result = self.begin(state, self.preprocessed(batch))
        new_state, batch = checks.check_pair(result, f"{type(self).__name__}.begin", "(state, batch)")
        return state if new_state is state else self.prepare_state(new_state), batch

    def preprocessed(self, batch: types.Batch) -> types.Batch:
        """Returns what `preprocess_batch` makes of a batch; raises a `TypeError` where that is None."""
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
        """Notes with an error in a step which batch it was; raises another where the batch is what is wrong."""
        if isinstance(error, TypeError | ValueError):
            checks.check_batch(batch)
        if batch is None:
            error.add_note("without a batch, because the dataset is None. Give the data, if the step needs them.")
        else:
            error.add_note(f"with {checks.batch_in_words(batch)}")

    def _end(self, state: Any, outputs: types.Output, number: int, elapsed: Elapsed) -> tuple[Any, types.Output]:
        if self._has_own("end"):
            result = self.end(state, outputs)
            state, outputs = checks.check_result(result, f"{type(self).__name__}.end")
            outputs = _copy_what_is_donated(outputs, state)
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
        new_state, outputs = checks.check_run(self.run(state, batch), hook)
        checks.check_same_state(state, new_state, hook)
        return new_state, outputs

    def _checked_outputs(self, state: Any, batch: types.Batch) -> types.Output:
        return checks.check_run(self.run(state, batch), f"{type(self).__name__}.run")[1]

    # Properties ----------------------------------------------------------------------------------

    @property
    def train(self) -> bool:
        """Whether this step trains."""
        return self._train

    @property
    def model(self) -> Any:
        """The Linen module, or the NNX module class."""
        return self._model

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """The Optax transformation."""
        return self._optimizer

    @property
    def partitioner(self) -> partition.Partitioner:
        """Where the state and the batches live."""
        return self._partitioner

    @property
    def base_prng(self) -> types.PRNGType:
        """The key, or the dict of keys, from which all others derive."""
        return self._base_prng

    @property
    def rescued_state(self) -> Any:
        """The state that `run` returned, if `end` or an end action raised in the step's last call; else None."""
        return self._rescued_state

    @property
    def num_params(self) -> int | None:
        """The number of parameters; None before `initialize_model`."""
        return self._num_params

    @property
    def num_flops(self) -> float | None:
        """What `compute_num_flops` found last; None before."""
        return self._num_flops

    @property
    def begin_actions(self) -> Sequence[Action]:
        """The actions before `run`."""
        return self._begin_actions.actions

    @property
    def end_actions(self) -> Sequence[Action]:
        """The actions after `end`."""
        return self._end_actions.actions

    @property
    def has_schedules(self) -> bool:
        """Whether one of its actions has a schedule for an interval."""
        return self._begin_actions.has_schedules or self._end_actions.has_schedules

    @property
    def action_lists(self) -> Sequence[ActionList]:
        """Both, and how often each action has been called."""
        return (self._begin_actions, self._end_actions)


class NumpyStep(Step):
    """A step that takes tensors of other libraries too.

    Hooks:
      preprocess_batch: see `Step`; call that of `super()` first, which makes NumPy arrays of tensors.
      begin, run, end, num_examples, make_state: see `Step`.
    """

    def preprocess_batch(self, batch: types.Batch) -> types.Batch:
        """Turns tensors into NumPy arrays."""
        return data.numpy_batch(batch)


_OPTIONS = models.options_of(Step)


def _added_to_leaf(jaxpr: Any, place: int) -> int | None:
    """How much a traced program adds to an integer that it takes and returns at this place; None where it depends."""
    is_used = [number == place for number in range(len(jaxpr.jaxpr.outvars))]
    needed, needs = partial_eval.dce_jaxpr(jaxpr.jaxpr, is_used)
    if any(needs_it and number != place for number, needs_it in enumerate(needs)):
        return None
    before = jnp.asarray(41, jaxpr.in_avals[place].dtype)  # Any number that is not special, and fits an int8.
    closed = jax_core.ClosedJaxpr(needed, jaxpr.consts)  # pyright: ignore[reportPrivateImportUsage]
    (after,) = jax_core.jaxpr_as_fun(closed)(*[before] * any(needs))
    return int(metrics.fetch(after)) - 41


def _copy_what_is_donated(outputs: types.Output, state: Any) -> types.Output:
    """Copies the outputs that are leaves of the state: they are read later, when the next step has taken it over."""
    donated = {id(leaf) for leaf in jax.tree.leaves(state)}
    return jax.tree.map(lambda leaf: jnp.copy(leaf) if id(leaf) in donated else leaf, outputs)
