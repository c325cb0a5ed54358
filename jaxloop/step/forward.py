"""Functions that create the initial `TrainState` for any kind of model, and run the model's forward pass.

`adapt` converts models that are neither Linen modules nor NNX classes to an `AdaptedModel`, and `forward` calls every
kind of model in the same way.
"""

import abc
import contextlib
import contextvars
import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from jaxloop import types
from jaxloop.base import checks
from jaxloop.types import nnx


def with_arguments(
    model: Any, nnx_model_args: Sequence[Any] | None, options: Mapping[str, Any], step_class: type
) -> Any:
    """Converts a model by calling `adapt` or, for an NNX class, by binding the arguments of its constructor.

    Args:
      model: A model of any supported kind, or None.
      nnx_model_args: The step's argument of the same name.
      options: The keyword arguments that are not declared by the constructors of the step's class and base classes.
      step_class: The class of the step.

    Raises:
      ValueError: If `nnx_model_args` is missing for an NNX class, or is given for any other kind of model.
      TypeError: If there are unknown keyword arguments and the model is not an NNX class.
    """
    if types.is_nnx_class(model):
        if nnx_model_args is None:
            raise ValueError(
                f"{model.__name__} is an NNX module class, so the Step needs nnx_model_args, the positional arguments "
                "of its constructor (nnx_model_args=() for none). The Step constructs the model, with "
                "rngs=nnx.Rngs(...) from base_prng."
            )
        return functools.partial(model, *nnx_model_args, **options)
    model = None if model is None else adapt(model)
    if nnx_model_args is not None:
        what = model.kind if isinstance(model, AdaptedModel) else f"the model is a {type(model).__name__}"
        raise ValueError(f"nnx_model_args={nnx_model_args!r} is for an NNX module class, but {what}. Leave it out.")
    for name in options:
        known = dict.fromkeys(each for base in step_class.__mro__ for each in _parameters(base))
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]!r}?" if near else f" It takes {', '.join(known)}."
        raise TypeError(f"Step got an unexpected keyword argument {name!r}.{hint}")
    return model


def init_fn(
    model: Any,
    optimizer: optax.GradientTransformation,
    base_prng: types.PRNGType,
    spec: types.BatchSpec,
    init_kwargs: Mapping[str, Any],
) -> tuple[Callable[..., types.TrainState], Sequence[Any]]:
    """Returns a pure function that creates the initial state, and the arguments with which to call this function.

    The function is compiled by a partitioner. The arrays of an `AdaptedModel` are passed as arguments, because
    compiling them as constants would be slow.
    """

    def variables(*arrays: Any) -> tuple[Any, Any, Any, Any]:
        if model is None:
            raise TypeError(
                "This step has no model to initialize. Make the state yourself, for example with "
                "TrainState.create(...), in an override of make_state(self, spec=None), or give the Step a model."
            )
        if isinstance(model, nn.Module):
            return _init_linen(model, base_prng, example_inputs(spec), init_kwargs)
        if isinstance(model, AdaptedModel):
            return _init_adapted(model, base_prng, spec, arrays, init_kwargs)
        return _init_nnx(model, base_prng, init_kwargs)

    def initialize(*arrays: Any) -> types.TrainState:
        apply_fn, params, batch_stats, collections = variables(*arrays)
        return types.TrainState.create(
            apply_fn=apply_fn, params=params, tx=optimizer, batch_stats=batch_stats, collections=collections
        )

    return initialize, model.arrays if isinstance(model, AdaptedModel) else ()


# Each of these functions returns `(apply_fn, params, batch_stats, collections)`.


def _init_linen(model, base_prng, inputs, init_kwargs) -> tuple[Any, Any, Any, Any]:
    rngs = dict(base_prng) if isinstance(base_prng, Mapping) else base_prng
    method = init_kwargs.get("method", "__call__")
    method = getattr(type(model), method) if isinstance(method, str) else method
    flags = _mode_flags(method, train=False, without_default=True)
    args, kwargs = _arguments(method, inputs, given=init_kwargs)
    variables = dict(model.init(rngs, *args, **{**flags, **kwargs, **init_kwargs}))
    variables = {name: each for name, each in variables.items() if name not in types.LINEN_SOWN}
    return model.apply, variables.pop("params", {}), variables.pop("batch_stats", {}), variables


def _init_nnx(new_model, base_prng, init_kwargs) -> tuple[Any, Any, Any, Any]:
    rngs = nnx.Rngs(**base_prng) if isinstance(base_prng, Mapping) else nnx.Rngs(base_prng)
    model = new_model(rngs=rngs, **init_kwargs)
    graphdef, params, batch_stats, rest = nnx.split(model, nnx.Param, nnx.BatchStat, ...)
    return NNXApply(graphdef), params, batch_stats, rest


def _init_adapted(model, base_prng, spec, arrays, init_kwargs) -> tuple[Any, Any, Any, Any]:
    if model.init is None:
        if init_kwargs:
            raise TypeError(f"{model.kind} and takes no {', '.join(init_kwargs)}, because it has its parameters.")
        return model.apply_fn, *jax.tree.map(_copy, arrays)
    return model.apply_fn, *model.init(_key(base_prng, "params"), example_inputs(spec), init_kwargs)


def _copy(leaf: Any) -> jax.Array:
    """Copies an array, so that the first step can donate the copy.

    The copy is never weakly typed, because a weak type would cause the step to be compiled a second time.
    """
    leaf = jnp.asarray(leaf)
    return jnp.copy(leaf if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf.astype(leaf.dtype))


# The forward pass ------------------------------------------------------------------------------------


def forward(state: Any, params: Any, inputs: Any, *, train: bool, rngs: types.PRNGType | None = None) -> Any:
    """Calls a state's model, which can be of any kind that `LossStep` accepts.

    The mode (training or inference) is set in the way that each kind of model expects. NNX models are switched with
    their `train` and `eval` methods. If a model takes an argument named `train`, `training`, `is_training` or
    `deterministic`, this argument is set according to the mode. Linen collections are mutable in training mode.

    Args:
      state: The `TrainState`. Its `apply_fn` determines the kind of model. A plain function is called like the `apply`
        of an `(init, apply)` pair.
      params: The parameters to use instead of `state.params`, for example inside a function to be differentiated.
      inputs: The model's input, or a list or dict of inputs for a Linen or NNX model that takes several.
      train: Whether to call the model in training mode.
      rngs: A single PRNG key, or a dict that maps names to PRNG keys. If you pass a single key, a Linen model uses it
        for dropout without modification, and derives the keys of all other random streams from it. If you pass a dict,
        a model that takes a single key receives the key named "dropout" or, if no key has this name, the key whose name
        sorts first. An NNX model receives keys only if its `__call__` takes `rngs`; otherwise, it uses the keys in its
        own variables.

    Returns:
      `(outputs, updates)`. In training mode, `updates` contains the variables that the forward pass changed; pass it to
      `state.update_variables`. In inference mode, it contains only the losses that the model sowed; see `sown_losses`.
      `updates` is None if it would be empty.

    >>> import optax
    >>> model = nn.Dense(2)
    >>> variables = model.init(jax.random.key(0), jnp.ones([1, 3]))
    >>> state = types.TrainState.create(apply_fn=model.apply, params=variables["params"], tx=optax.sgd(0.1))
    >>> outputs, updates = forward(state, state.params, jnp.ones([5, 3]), train=False)
    >>> outputs.shape, updates is None
    ((5, 2), True)
    """
    apply_fn, module = state.apply_fn, _linen_module(state.apply_fn)
    if module is not None:
        outputs, updates = _forward_linen(module, {**state.variables, "params": params}, inputs, train, rngs)
    else:
        apply_fn = apply_fn if isinstance(apply_fn, Forward) else FunctionApply(apply_fn)
        outputs, updates = apply_fn.forward(state, params, inputs, train=train, rngs=rngs)
    changed = _changed.get()
    if train and updates is not None and changed is not None:
        kept = {id(leaf) for leaf in jax.tree.leaves(updates)}
        changed += [leaf for leaf in jax.tree.leaves((state.batch_stats, state.collections)) if id(leaf) not in kept]
    return outputs, (updates if train else _sown_part(updates)) or None


# The old values of variables that forward passes in training mode have changed; None outside `noting_changes`.
_changed: contextvars.ContextVar[list[Any] | None] = contextvars.ContextVar("changed", default=None)


@contextlib.contextmanager
def noting_changes() -> Iterator[list[Any]]:
    """Returns a context manager that records which variables are changed by forward passes in training mode.

    The context manager yields a list that collects the old values of these variables.
    """
    token = _changed.set(changed := [])
    try:
        yield changed
    finally:
        _changed.reset(token)


def check_updates_kept(before: Any, after: Any, changed: Sequence[Any], step: str) -> None:
    """Raises an error if a step updates the state without storing the variables that the forward pass changed.

    Args:
      before: The state that was passed to `run`.
      after: The state that `run` returned.
      changed: The list from `noting_changes`.
      step: A description of the step.
    """
    old, lost = {id(leaf) for leaf in jax.tree.leaves(before)}, {id(leaf) for leaf in changed}
    new = checks.leaves_by_path(after)
    dropped = [path for path, leaf in new.items() if id(leaf) in lost]
    if dropped and not all(id(leaf) in old for leaf in new.values()):
        raise ValueError(
            f"{step} returns variables unchanged that the model's forward pass changed: {checks.listed(dropped)}. Each "
            "step would start from the same values: dropout would repeat its mask, and running statistics would never "
            "move. Keep the second result of call_model, outputs, updates = self.call_model(...), return "
            "updates from the loss function (has_aux=True), and store them: "
            "state = state.apply_gradients(grads=grads).update_variables(updates). If the old values are right, call "
            "the model with train=False, or return copies of them (jnp.copy)."
        )


def sown_losses(updates: Any) -> list[Any]:
    """Returns the losses that a Linen or NNX model sowed in a forward pass with `self.sow("losses", "name", value)`.

    `LossStep` adds them to the loss. In your own `Step`, add them yourself: `loss + sum(sown_losses(updates))`.

    Args:
      updates: The second result of `forward` or `Step.call_model`.
    """
    return jax.tree.leaves(_sown_part(updates))


def _sown_part(updates: Any) -> Any:
    if types.is_nnx(updates, "State"):
        return nnx.filter_state(updates, types.nnx_sown_types()[0])
    return {name: each for name, each in (updates or {}).items() if name == "losses"}


def mixes_examples(state: Any, *, train: bool) -> bool:
    """Returns True if an example may affect the model's outputs for other examples.

    The other examples may be in the same batch or in later batches.
    Batch normalization in training mode has this effect. If the result is True, a short batch must not be padded.
    """
    others = state.collections
    if types.is_nnx(others, "State"):
        _, others = nnx.split_state(others, nnx.RngState, ...)
    has_statistics = bool(jax.tree.leaves((state.batch_stats, others)))
    module = _linen_module(state.apply_fn)
    # A Linen module without a mode flag can't know that it is being evaluated.
    knows_mode = module is None or bool(_mode_flags(type(module).__call__, train))
    return has_statistics and (train or not knows_mode)


def _linen_module(apply_fn: Any) -> nn.Module | None:
    module = getattr(apply_fn, "__self__", None)
    return module if isinstance(module, nn.Module) else None


def _forward_linen(module, variables, inputs, train, rngs) -> tuple[Any, Any]:
    args, kwargs = _arguments(type(module).__call__, inputs)
    options = {**kwargs, **_mode_flags(type(module).__call__, train), "rngs": _named_keys(rngs)}
    # Leaves out the earlier sown values, because `sow` would add to them.
    variables = {name: each for name, each in variables.items() if name not in types.LINEN_SOWN}
    stored = [name for name in variables if name != "params"] if train else []
    return module.apply(variables, *args, mutable=[*stored, "losses"], **options)


# The arguments through which models receive the training mode, with their values in training.
_MODE_FLAGS = {"train": True, "training": True, "is_training": True, "deterministic": False}

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # Some functions written in C have no signature.
        return {}


def _mode_flags(function: Callable[..., Any], train: bool, *, without_default: bool = False) -> dict[str, bool]:
    found = {name: parameter for name, parameter in _parameters(function).items() if name in _MODE_FLAGS}
    return {
        name: _MODE_FLAGS[name] == train
        for name, parameter in found.items()
        if not without_default or parameter.default is inspect.Parameter.empty
    }


def _arguments(method: Callable[..., Any], inputs: Any, given: Iterable[str] = ()) -> tuple[Sequence[Any], Any]:
    """Returns the positional and keyword arguments for a model's method.

    A method that takes one argument receives the inputs unchanged. A method that takes several arguments receives the
    items of a list or tuple by position, or the items of a dict by name.

    Args:
      method: The method, bound or unbound.
      inputs: The inputs.
      given: The names of the arguments that the caller passes in addition to the inputs.

    Raises:
      TypeError: If the method takes several arguments, and the inputs are not a list, tuple or dict that matches them.
    """
    ignored = {"self", "rngs", *_MODE_FLAGS, *given}
    parameters = {
        name: each for name, each in _parameters(method).items() if name not in ignored and each.kind not in _VARIADIC
    }
    required = [name for name, each in parameters.items() if each.default is inspect.Parameter.empty]
    if isinstance(inputs, Mapping) and len(inputs) > 1 and {*required} <= {*inputs} <= {*parameters}:
        return (), inputs
    if len(required) < 2:
        return (inputs,), {}
    if type(inputs) in (list, tuple) and len(required) <= len(inputs) <= len(parameters):
        return tuple(inputs), {}
    raise TypeError(
        f"The model takes {', '.join(parameters)}, and its inputs are {checks.describe(inputs)}"
        f"{f' of {len(inputs)}' if isinstance(inputs, Sequence | Mapping) else ''}. Give a list of the inputs in this "
        "order, or a dict with these keys."
    )


def _key(rngs: types.PRNGType | None, name: str) -> Any:
    """Returns the PRNG key with the given name from the dict `rngs`.

    If no key has this name, returns the key whose name sorts first. If `rngs` is a single key, returns it unchanged.
    """
    if isinstance(rngs, Mapping):
        return rngs[name if name in rngs else min(rngs)]
    return rngs


def _named_keys(rngs: types.PRNGType | None) -> dict[str, jax.Array] | None:
    if rngs is None or isinstance(rngs, Mapping):
        return None if rngs is None else dict(rngs)
    # Linen uses the key "params" for all names without a key.
    return {"dropout": rngs, "params": jax.random.fold_in(rngs, 1)}


class Forward(abc.ABC):
    """The `apply_fn` of a model that isn't a Linen module.

    Hashing and comparing it must be fast, because `jit` does both each time a compiled function is called.
    """

    @abc.abstractmethod
    def forward(self, state: Any, params: Any, inputs: Any, *, train: bool, rngs: Any) -> tuple[Any, Any]:
        """Calls the model; see the function `forward`."""


@final
class NNXApply(Forward):
    """The `apply_fn` of an NNX model.

    Call it like `graphdef.apply`: `outputs, (_, updates) = apply_fn(params, batch_stats, collections)(inputs)`.
    With the argument `train=True` or `train=False`, `apply_fn` also calls the model's `train()` or `eval()` method,
    which switches layers such as dropout and batch normalization to training or evaluation mode. If `train` isn't
    given, the model stays in the mode that its constructor set.

    `jit` hashes the static fields of the state on each call. Hashing a graphdef takes about a millisecond, so the hash
    is cached.
    """

    def __init__(self, graphdef: "nnx.GraphDef"):
        self.graphdef = graphdef
        self._hash = hash(graphdef)

    def __call__(self, *states: Any, train: bool | None = None) -> Callable[..., Any]:
        if train is None:
            return self.graphdef.apply(*self._new_variables(states))
        graphdef, state = nnx.split(self.module(states, train=train))
        return graphdef.apply(state)

    def forward(self, state: Any, params: Any, inputs: Any, *, train: bool, rngs: Any) -> tuple[Any, Any]:
        model = self.module((params, state.batch_stats, state.collections), train=train)
        options: dict[str, Any] = dict(_mode_flags(type(model).__call__, train))
        if rngs is not None and "rngs" in _parameters(type(model).__call__):
            options["rngs"] = nnx.Rngs(**rngs) if isinstance(rngs, Mapping) else nnx.Rngs(rngs)
        args, kwargs = _arguments(type(model).__call__, inputs)
        if hasattr(nnx, "capture"):
            outputs, sown = nnx.capture(model, types.nnx_sown_types()[0])(*args, **kwargs, **options)
            return outputs, nnx.merge_state(nnx.state(model), sown)
        # Older versions of Flax store what a model sows in the model.
        return model(*args, **kwargs, **options), nnx.state(model)

    def module(self, states: Sequence[Any], *, train: bool) -> Any:
        """Returns an NNX module with the given variables, in training or evaluation mode."""
        model = nnx.merge(self.graphdef, *self._new_variables(states))
        model.train() if train else model.eval()
        return model

    def _new_variables(self, states: Sequence[Any]) -> Any:
        # Copies the variables, because inside a gradient, NNX can only change variables created there.
        return jax.tree.map(lambda leaf: leaf, states)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, NNXApply) and self.graphdef == other.graphdef)

    def __hash__(self) -> int:
        return self._hash


@final
@dataclasses.dataclass(frozen=True)
class FunctionApply(Forward):
    """The `apply_fn` of an `(init, apply)` pair of functions. It calls `apply(params, inputs)`."""

    apply: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.apply(*args, **kwargs)

    def forward(self, state: Any, params: Any, inputs: Any, *, train: bool, rngs: Any) -> tuple[Any, Any]:
        options: dict[str, Any] = dict(_mode_flags(self.apply, train))
        for name in _parameters(self.apply):
            if name in ("rng", "key"):
                options[name] = _key(rngs, "dropout")
            elif name == "rngs":
                options[name] = _named_keys(rngs)
        return self.apply(params, inputs, **options), None


PARAMS_APPLY = FunctionApply(lambda params, inputs=None: params)
"""The `apply_fn` for parameters without a model. It returns the parameters as the outputs."""


# Models of other kinds -------------------------------------------------------------------------------


@final
@dataclasses.dataclass(frozen=True, eq=False)
class AdaptedModel:
    """The result of `adapt` for a model that is neither a Linen module nor an NNX class.

    Attributes:
      kind: A clause that describes the kind of model in error messages.
      apply_fn: The `apply_fn` of states created from the model.
      arrays: The initial `(params, batch_stats, collections)`. Empty if the model doesn't contain these arrays.
      init: A function that computes `arrays` from `(key, inputs, init_kwargs)`. None if the model contains the arrays.
    """

    kind: str
    apply_fn: Forward
    arrays: tuple[Any, ...] = ()
    init: Callable[..., tuple[Any, Any, Any]] | None = None


def adapt(model: Any) -> Any:
    """Converts a model to a form that a `Step` can initialize.

    Linen modules and NNX classes are returned unchanged. The following are converted to an `AdaptedModel`:

    - an NNX module instance;
    - a pair of functions `(init, apply)`;
    - a pytree of parameters.

    >>> adapt({"w": np.ones(3), "b": 0.0}).kind
    'a dict is a pytree of parameters'

    Raises:
      TypeError: If the model is not of a supported kind.
    """
    if isinstance(model, nn.Module | AdaptedModel) or types.is_nnx_class(model):
        return model
    if types.is_nnx(model, "Module"):
        model = nnx.clone(model)
        nnx.pop(model, types.nnx_sown_types())  # An earlier call may have sown values.
        graphdef, *arrays = nnx.split(model, nnx.Param, nnx.BatchStat, ...)
        kind = f"{type(model).__name__} is an instance of an NNX module"
        return AdaptedModel(kind, NNXApply(graphdef), tuple(arrays))
    if isinstance(model, tuple) and len(model) == 2 and all(map(callable, model)):
        init, apply = model
        make = lambda key, inputs, init_kwargs: (init(key, inputs, **init_kwargs), {}, {})
        return AdaptedModel("the model is a pair of functions (init, apply)", FunctionApply(apply), init=make)
    return _adapt_params(model)


def _adapt_params(params: Any) -> AdaptedModel:
    is_param = lambda leaf: isinstance(leaf, float | _ARRAYS) and jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
    leaves = checks.leaves_by_path(params)
    for path, leaf in leaves.items() if leaves else [("", params)]:
        if not is_param(leaf):
            raise TypeError(
                "model must be a Linen module, an NNX class or instance, a pair of functions (init, apply), or a "
                f"pytree of floating-point parameters, got {leaf!r:.100}{f' in {path}' if path else ''}. For an "
                "Equinox module: params, static = eqx.partition(module, eqx.is_inexact_array). Give the params, and "
                "call eqx.combine(params, static) in the loss."
            )
    return AdaptedModel(f"a {checks.describe(params)} is a pytree of parameters", PARAMS_APPLY, (params, {}, {}))


_ARRAYS = jax.Array | np.ndarray | np.generic


def example_inputs(spec: types.BatchSpec) -> Any:
    """Returns inputs for initializing a model: the given spec, with its shapes replaced by arrays of ones.

    >>> jax.tree.map(jnp.shape, example_inputs({"image": [1, 28, 28, 1], "key": jax.random.key(0)}))
    {'image': (1, 28, 28, 1), 'key': ()}
    """

    def ones(leaf: Any) -> jax.Array:
        shape = _shape_in_spec(leaf)
        if shape is not None:
            return jnp.ones(shape.shape, shape.dtype)
        if isinstance(leaf, _ARRAYS):
            return jnp.asarray(leaf)
        raise ValueError(
            f"A spec must be a shape ([1, 28, 28, 1]), a (shape, dtype) pair, an array or a key, or these nested in "
            f"dicts, lists and named tuples, got {leaf!r} in it."
        )

    return jax.tree.map(ones, spec, is_leaf=lambda leaf: leaf is None or _shape_in_spec(leaf) is not None)


def example_batch(batch: types.BatchSpec) -> types.Batch:
    """Returns a host batch in which each shape in the given batch or spec is replaced by an array of zeros.

    Each array of zeros is a view of a single number, so it takes up almost no memory. A list of numbers is treated as a
    shape only if the argument contains no arrays.

    >>> example_batch({"x": ([2**40, 3], np.uint8)})["x"].shape
    (1099511627776, 3)
    """
    is_spec = not any(isinstance(leaf, _ARRAYS) for leaf in jax.tree.leaves(batch))
    shape_of = lambda leaf: None if _is_shape(leaf) and not is_spec else _shape_in_spec(leaf)

    def zeros(leaf: Any) -> Any:
        shape = shape_of(leaf)
        return leaf if shape is None else np.broadcast_to(np.zeros((), shape.dtype), shape.shape)

    return jax.tree.map(zeros, batch, is_leaf=lambda leaf: shape_of(leaf) is not None)


def shape_of_array(leaf: Any) -> Any:
    """Converts a NumPy array to a `jax.ShapeDtypeStruct` with the dtype that `jit` would convert the array to.

    Returns other leaves unchanged.
    """
    if not isinstance(leaf, np.ndarray):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype))


def _shape_in_spec(leaf: Any) -> jax.ShapeDtypeStruct | None:
    """Returns the shape and dtype that a leaf of a spec describes, or None if the leaf doesn't describe an array."""
    if _is_shape(leaf):
        return jax.ShapeDtypeStruct(tuple(leaf), jnp.float32)
    if _is_shape_and_dtype(leaf):
        return jax.ShapeDtypeStruct(tuple(leaf[0]), jax.dtypes.canonicalize_dtype(leaf[1]))
    return leaf if isinstance(leaf, jax.ShapeDtypeStruct) else None


def _is_shape(leaf: Any) -> bool:
    plain_sequence = isinstance(leaf, list | tuple) and not hasattr(leaf, "_fields")
    return plain_sequence and all(isinstance(size, int | np.integer) and not isinstance(size, bool) for size in leaf)


def _is_shape_and_dtype(leaf: Any) -> bool:
    plain_pair = isinstance(leaf, list | tuple) and not hasattr(leaf, "_fields") and len(leaf) == 2
    if not plain_pair or not _is_shape(leaf[0]) or isinstance(leaf[1], jax.ShapeDtypeStruct | _ARRAYS):
        return False
    return isinstance(leaf[1], str | np.dtype | type) or hasattr(leaf[1], "dtype")
