"""Models as they come: what makes a `TrainState` of one, and its forward pass.

A `Step` takes Linen modules and NNX classes; its `run` calls `state.apply_fn` itself. A `LossStep` takes models of
other kinds too: `adapt` makes an `AdaptedModel` of each, and `forward` is the same call for all.
"""

import abc
import dataclasses
import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from jaxloop import checks, types
from jaxloop.types import nnx


def check_model(model: Any, nnx_model_args: Sequence[Any] | None, options: Mapping[str, Any], known: list[str]) -> None:
    """Raises where a model and the arguments that came with it do not belong together.

    Args:
      model: a Linen module, an NNX module class, an `AdaptedModel`, or None.
      nnx_model_args: what the user gave under this name.
      options: keywords that the Step itself does not know.
      known: the names of those that it does know.

    Raises:
      ValueError: an NNX class without `nnx_model_args`, or a Linen module with them.
      TypeError: anything else that is no model; an unknown keyword beside a Linen module.
    """
    is_nnx_class = types.is_nnx_class(model)
    if is_nnx_class:
        if nnx_model_args is None:
            raise ValueError(
                f"{model.__name__} is an NNX module class, so the Step needs nnx_model_args, the positional arguments "
                "of its constructor (nnx_model_args=() for none). The Step makes the model itself, with "
                "rngs=nnx.Rngs(...) from base_prng."
            )
        return
    if types.is_nnx(model, "Module"):
        raise TypeError(
            f"model is an instance of the NNX module {type(model).__name__}; give the class itself, and its arguments "
            f"as nnx_model_args: Step(base_prng, {type(model).__name__}, nnx_model_args=(...))."
        )
    if not isinstance(model, nn.Module | AdaptedModel | None):
        raise TypeError(
            "model must be a Linen module or an NNX module class, or None for a step whose make_state needs no model, "
            f"got {model!r}."
        )
    if nnx_model_args is not None:
        what = (
            model.kind
            if isinstance(model, AdaptedModel)
            else "model is None"
            if model is None
            else f"{type(model).__name__} is a Linen module"
        )
        raise ValueError(
            f"nnx_model_args={nnx_model_args!r} belongs to an NNX module class, and {what}. Leave it out, or give the "
            "class of an NNX module."
        )
    for name in options:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]!r}?" if near else f" It takes {', '.join(known)}."
        raise TypeError(f"Step got an unexpected keyword {name!r}.{hint}")


def options_of(step_class: type) -> list[str]:
    """The names of the arguments of a class of steps, but for those of its model."""
    parameters = inspect.signature(step_class).parameters.values()
    return [each.name for each in parameters if each.kind is not each.VAR_KEYWORD]


def init_fn(
    model: Any,
    optimizer: optax.GradientTransformation,
    base_prng: types.PRNGType,
    spec: types.BatchSpec,
    nnx_model_args: Sequence[Any],
    nnx_model_kwargs: Mapping[str, Any],
    init_kwargs: Mapping[str, Any],
) -> Callable[..., types.TrainState]:
    """Returns a function that makes the first state; pure, so that a partitioner can compile it.

    For an `AdaptedModel` with arrays of its own it takes these: as constants they would slow the compilation down.
    """

    def initialize(*arrays: Any) -> types.TrainState:
        if model is None:
            raise TypeError(
                "This step has model=None, so there is nothing to initialize. Override make_state(self, spec=None), "
                "which returns the first state, or give the Step a model."
            )
        if isinstance(model, nn.Module):
            return _init_linen(model, optimizer, base_prng, example_inputs(spec), init_kwargs)
        if isinstance(model, AdaptedModel):
            return _init_adapted(model, optimizer, base_prng, spec, arrays or model.arrays, init_kwargs)
        return _init_nnx(model, optimizer, base_prng, nnx_model_args, {**nnx_model_kwargs, **init_kwargs})

    return initialize


def _init_linen(model, optimizer, base_prng, inputs, init_kwargs) -> types.TrainState:
    rngs = dict(base_prng) if isinstance(base_prng, Mapping) else base_prng
    method = init_kwargs.get("method", "__call__")
    method = getattr(type(model), method) if isinstance(method, str) else method
    flags = _mode_flags(method, train=False, without_default=True)
    args, kwargs = _arguments(method, inputs, given=init_kwargs)
    variables = dict(model.init(rngs, *args, **{**flags, **kwargs, **init_kwargs}))
    params = variables.pop("params", {})
    batch_stats = variables.pop("batch_stats", {})
    return types.TrainState.create(
        apply_fn=model.apply, params=params, tx=optimizer, batch_stats=batch_stats, collections=variables
    )


def _init_nnx(model_class, optimizer, base_prng, args, kwargs) -> types.TrainState:
    rngs = nnx.Rngs(**base_prng) if isinstance(base_prng, Mapping) else nnx.Rngs(base_prng)
    model = model_class(*args, rngs=rngs, **kwargs)
    graphdef, params, batch_stats, rest = nnx.split(model, nnx.Param, nnx.BatchStat, ...)
    return types.TrainState.create(
        apply_fn=NNXApply(graphdef), params=params, tx=optimizer, batch_stats=batch_stats, collections=rest
    )


def _init_adapted(model, optimizer, base_prng, spec, arrays, init_kwargs) -> types.TrainState:
    if model.init is None:
        if init_kwargs:
            raise TypeError(
                f"initialize_model got {', '.join(init_kwargs)}, and {model.kind}, which has its initial parameters: "
                "leave out the keywords."
            )
        params, batch_stats, collections = jax.tree.map(_copy, arrays)
    else:
        params, batch_stats, collections = model.init(_key(base_prng, "params"), example_inputs(spec), init_kwargs)
    return types.TrainState.create(
        apply_fn=model.apply_fn, params=params, tx=optimizer, batch_stats=batch_stats, collections=collections
    )


def _copy(leaf: Any) -> jax.Array:
    """A copy that the state can own: the first step donates it. Never weakly typed, or a step would compile twice."""
    leaf = jnp.asarray(leaf)
    return jnp.copy(leaf if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf.astype(leaf.dtype))


# The forward pass ------------------------------------------------------------------------------------


def forward(state: Any, params: Any, inputs: Any, *, train: bool, rngs: types.PRNGType | None = None) -> Any:
    """Calls the model of a state, of whatever kind.

    The model is told whether it trains in the way of its kind. NNX and Equinox models are put in training or inference
    mode. All but Equinox models get `train`, `training`, `is_training` or `deterministic` if they take an argument of
    that name. Linen's collections are mutable in training.

    Args:
      state: the `TrainState`, whose `apply_fn` says which kind of model it is. A function that is none of
        `initialize_model`'s is called as the `apply` of a pair `(init, apply)`.
      params: its parameters, or what a gradient is taken of.
      inputs: the model's one argument; of a Linen or NNX model that takes several, a list of them, or a dict by name.
      train: whether the model trains.
      rngs: one key, or a dict of keys by name. Of one key, Linen's dropout gets the key itself, and other names keys
        derived from it. Models that take one key get the one named "dropout" of a dict, or else its first.

    Returns:
      `(outputs, updates)`: `updates` is for `state.update_variables`, and None where nothing changes, as in evaluation.

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
    return outputs, updates if train else None


def mixes_examples(state: Any, *, train: bool) -> bool:
    """Whether the forward pass may carry something from one example of a batch to another, or to a later batch.

    So does batch normalisation in training. Where it is so, nothing may be added to a short batch.
    """
    if types.is_nnx(state.collections, "State"):
        is_variable = lambda leaf: isinstance(leaf, nnx.Variable)
        others = [
            leaf
            for leaf in jax.tree.leaves(state.collections, is_leaf=is_variable)
            if not isinstance(leaf, nnx.RngState)
        ]
    else:
        others = state.collections
    has_statistics = bool(jax.tree.leaves(state.batch_stats)) or bool(others)
    module = _linen_module(state.apply_fn)
    # Without a flag, nothing tells a Linen module that it is evaluated.
    knows_mode = module is None or bool(_mode_flags(type(module).__call__, train))
    return has_statistics and (train or not knows_mode)


def _linen_module(apply_fn: Any) -> nn.Module | None:
    module = getattr(apply_fn, "__self__", None)
    return module if isinstance(module, nn.Module) else None


def _forward_linen(module, variables, inputs, train, rngs) -> tuple[Any, Any]:
    args, kwargs = _arguments(type(module).__call__, inputs)
    options = {**kwargs, **_mode_flags(type(module).__call__, train), "rngs": _named_keys(rngs)}
    collections = [name for name in variables if name != "params"]
    if train and collections:
        return module.apply(variables, *args, mutable=collections, **options)
    return module.apply(variables, *args, **options), None


# The names under which models ask whether they train, and what is said to them when they do.
_MODE_FLAGS = {"train": True, "training": True, "is_training": True, "deterministic": False}


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # Some functions written in C have none.
        return {}


def _mode_flags(function: Callable[..., Any], train: bool, *, without_default: bool = False) -> dict[str, bool]:
    found = {name: parameter for name, parameter in _parameters(function).items() if name in _MODE_FLAGS}
    return {
        name: _MODE_FLAGS[name] == train
        for name, parameter in found.items()
        if not without_default or parameter.default is inspect.Parameter.empty
    }


def _arguments(method: Callable[..., Any], inputs: Any, given: Iterable[str] = ()) -> tuple[Sequence[Any], Any]:
    """Returns the positional and the keyword arguments with which a method of a model is called.

    A method that takes one argument gets the inputs as they are. One that takes several gets the items of a list or a
    tuple by position, and those of a dict by name.

    Args:
      method: unbound, or bound to the model.
      inputs: the inputs.
      given: the names of arguments that the method gets in any case.

    Raises:
      TypeError: it takes several, and the inputs are no list and no dict of them.
    """
    ignored = {"self", "rngs", *_MODE_FLAGS, *given}
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = {
        name: each for name, each in _parameters(method).items() if name not in ignored and each.kind not in several
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
    """The key of a name; of a dict without that name the first."""
    if isinstance(rngs, Mapping):
        return rngs[name if name in rngs else min(rngs)]
    return rngs


def _named_keys(rngs: types.PRNGType | None) -> dict[str, jax.Array] | None:
    if rngs is None or isinstance(rngs, Mapping):
        return None if rngs is None else dict(rngs)
    # Linen takes the key "params" for all names that it is not given.
    return {"dropout": rngs, "params": jax.random.fold_in(rngs, 1)}


class Forward(abc.ABC):
    """The `apply_fn` of models that are no Linen modules. jit hashes and compares it at each call."""

    @abc.abstractmethod
    def forward(self, state: Any, params: Any, inputs: Any, *, train: bool, rngs: Any) -> tuple[Any, Any]:
        """See `forward`."""


@final
class NNXApply(Forward):
    """The `apply_fn` of an NNX model: `outputs, (_, updates) = apply_fn(params, batch_stats, collections)(inputs)`.

    As `graphdef.apply`, and with `train=True` or `train=False` the model is in `model.train()` or `model.eval()` mode,
    which turns dropout and batch statistics on or off. Without, it is as its constructor left it.

    jit hashes the state's static fields at each call, and a graphdef takes about a millisecond: so it is done once.
    """

    def __init__(self, graphdef: "nnx.GraphDef"):
        self.graphdef = graphdef
        self._hash = hash(graphdef)

    def __call__(self, *states: Any, train: bool | None = None) -> Callable[..., Any]:
        if train is None:
            return self.graphdef.apply(*self._new_variables(states))
        graphdef, state = nnx.split(self._merge(states, train))
        return graphdef.apply(state)

    def forward(self, state: Any, params: Any, inputs: Any, *, train: bool, rngs: Any) -> tuple[Any, Any]:
        model = self._merge((params, state.batch_stats, state.collections), train)
        options: dict[str, Any] = dict(_mode_flags(type(model).__call__, train))
        if rngs is not None and "rngs" in _parameters(type(model).__call__):
            options["rngs"] = nnx.Rngs(**rngs) if isinstance(rngs, Mapping) else nnx.Rngs(rngs)
        args, kwargs = _arguments(type(model).__call__, inputs)
        outputs = model(*args, **kwargs, **options)
        return outputs, nnx.state(model)

    def _merge(self, states: Sequence[Any], train: bool) -> Any:
        model = nnx.merge(self.graphdef, *self._new_variables(states))
        model.train() if train else model.eval()
        return model

    def _new_variables(self, states: Sequence[Any]) -> Any:
        for state in states:
            if not isinstance(state, nnx.State):
                raise TypeError(
                    "The apply_fn of an NNX model takes its states, apply_fn(params, batch_stats, collections, "
                    f"train=...)(inputs), got {checks.describe(state)} among them. "
                    "(apply_fn({'params': params}, inputs) is for Linen modules.)"
                )
        # Because inside a gradient NNX lets a model change only those that were made there.
        return jax.tree.map(lambda leaf: leaf, states)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, NNXApply) and self.graphdef == other.graphdef)

    def __hash__(self) -> int:
        return self._hash


@final
@dataclasses.dataclass(frozen=True, eq=False)
class EquinoxApply(Forward):
    """The `apply_fn` of an Equinox module: `apply_fn(state.params)` is the module with these parameters.

    Attributes:
      static: the module without its parameters.
    """

    static: Any

    def __call__(self, params: Any) -> Any:
        import equinox as eqx

        return eqx.combine(params, self.static)

    def forward(self, state: Any, params: Any, inputs: Any, *, train: bool, rngs: Any) -> tuple[Any, Any]:
        import equinox as eqx

        model = eqx.nn.inference_mode(self(params), value=not train)
        parameters = _parameters(type(model).__call__)
        takes_key = "key" in parameters and (train or parameters["key"].default is inspect.Parameter.empty)
        keys = None
        if takes_key and rngs is not None:
            keys = jax.random.split(_key(rngs, "dropout"), len(jax.tree.leaves(inputs)[0]))

        def of_one_example(example: Any, variables: Any, key: Any) -> Any:
            arguments = (example,) if variables is None else (example, variables)
            return model(*arguments) if key is None else model(*arguments, key=key)

        # BatchNorm takes its means over the axis of this name.
        batched = lambda out_axes: jax.vmap(of_one_example, in_axes=(0, None, 0), out_axes=out_axes, axis_name="batch")
        if "state" not in state.collections:
            return batched(0)(inputs, None, keys), None
        outputs, variables = batched((0, None))(inputs, state.collections["state"], keys)
        return outputs, {"state": variables}


@final
@dataclasses.dataclass(frozen=True)
class HaikuApply(Forward):
    """The `apply_fn` of what `hk.transform` or `hk.transform_with_state` returned: its `apply`."""

    apply: Callable[..., Any]
    has_state: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.apply(*args, **kwargs)

    def forward(self, state: Any, params: Any, inputs: Any, *, train: bool, rngs: Any) -> tuple[Any, Any]:
        flags = _mode_flags(self.apply, train)
        if not self.has_state:
            return self.apply(params, _key(rngs, "dropout"), inputs, **flags), None
        outputs, variables = self.apply(params, state.collections["state"], _key(rngs, "dropout"), inputs, **flags)
        return outputs, {"state": variables}


@final
@dataclasses.dataclass(frozen=True)
class FunctionApply(Forward):
    """The `apply_fn` of a pair `(init, apply)`: its `apply(params, inputs)`."""

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


@final
@dataclasses.dataclass(frozen=True)
class ParamsApply(Forward):
    """The `apply_fn` of parameters without a model: they are the outputs."""

    def __call__(self, params: Any) -> Any:
        return params

    def forward(self, state: Any, params: Any, inputs: Any, *, train: bool, rngs: Any) -> tuple[Any, Any]:
        return params, None


# Models of other kinds -------------------------------------------------------------------------------


@final
@dataclasses.dataclass(frozen=True, eq=False)
class AdaptedModel:
    """A model that is neither a Linen module nor an NNX class, as a `Step` initialises it. `adapt` makes them.

    Attributes:
      kind: what it is, as a sentence.
      apply_fn: that of its states.
      arrays: `(params, batch_stats, collections)`, where the model brings its initial values along.
      init: else the function that makes these of `(key, inputs, init_kwargs)`.
    """

    kind: str
    apply_fn: Forward
    arrays: tuple[Any, ...] = ()
    init: Callable[..., tuple[Any, Any, Any]] | None = None


def adapt(model: Any) -> Any:
    """Returns a model as a `Step` can initialise it.

    Linen modules and NNX classes come back as they are; an `AdaptedModel` is made of

    - an NNX module instance;
    - an Equinox module instance, or the pair `(module, state)` that `eqx.nn.make_with_state` makes;
    - what `hk.transform` or `hk.transform_with_state` returns;
    - a pair of functions `(init, apply)`;
    - a pytree of parameters.

    >>> adapt({"w": np.ones(3), "b": 0.0}).kind
    'a dict is a pytree of parameters'

    Raises:
      TypeError: it is none of them.
    """
    name = type(model).__name__
    if inspect.isclass(model):
        if types.is_nnx_class(model):
            return model
        raise TypeError(f"{_WHAT_A_MODEL_IS}, got the class {model.__name__}: give an instance, {model.__name__}(...).")
    if isinstance(model, nn.Module | AdaptedModel):
        return model
    if types.is_nnx(model, "Module"):
        graphdef, *arrays = nnx.split(model, nnx.Param, nnx.BatchStat, ...)
        return AdaptedModel(f"{name} is an instance of an NNX module", NNXApply(graphdef), tuple(arrays))
    if isinstance(model, tuple) and len(model) == 2 and _is_equinox_state(model[1]):
        return _adapt_equinox(*model)
    if _is_of("equinox", model):
        return _adapt_equinox(model, None)
    if _is_of("haiku", model):
        if name not in ("Transformed", "TransformedWithState"):
            raise TypeError(f"{_WHAT_A_MODEL_IS}, got Haiku's {name}. Give hk.transform(...) of one function.")
        return _adapt_haiku(model, has_state=name == "TransformedWithState")
    if isinstance(model, tuple) and len(model) == 2 and all(map(callable, model)):
        init, apply = model
        make = lambda key, inputs, init_kwargs: (init(key, inputs, **init_kwargs), {}, {})
        return AdaptedModel("the model is a pair of functions (init, apply)", FunctionApply(apply), init=make)
    return _adapt_params(model)


_WHAT_A_MODEL_IS = (
    "model must be a Linen module, an NNX class or instance, an Equinox module, what hk.transform returns, a pair of "
    "functions (init, apply), or a pytree of parameters"
)


def _is_of(package: str, model: Any) -> bool:
    """Whether a class of the package is among the model's classes. Importing the package only to ask takes long."""
    return any(base.__module__.partition(".")[0] == package for base in type(model).__mro__)


def _is_equinox_state(value: Any) -> bool:
    return _is_of("equinox", value) and type(value).__name__ == "State"


def _adapt_equinox(model: Any, state: Any) -> AdaptedModel:
    import equinox as eqx

    name = type(model).__name__
    if not callable(model):
        raise TypeError(f"The Equinox module {name} has no __call__, which the forward pass needs. Define it.")
    if state is None and "state" in _parameters(type(model).__call__):
        raise TypeError(
            f"The Equinox module {name} takes a state. Give the pair that makes both: "
            f"model=eqx.nn.make_with_state({name})(...)."
        )
    params, static = eqx.partition(model, eqx.is_inexact_array)
    arrays = (params, {}, {} if state is None else {"state": state})
    return AdaptedModel(f"{name} is an Equinox module", EquinoxApply(static), arrays)


def _adapt_haiku(model: Any, has_state: bool) -> AdaptedModel:
    def init(key: Any, inputs: Any, init_kwargs: Mapping[str, Any]) -> tuple[Any, Any, Any]:
        # As in training, for hk.BatchNorm makes its state only then.
        made = model.init(key, inputs, **{**_mode_flags(model.init, train=True), **init_kwargs})
        params, state = made if has_state else (made, None)
        return params, {}, {"state": state} if has_state else {}

    return AdaptedModel("the model is a Haiku transform", HaikuApply(model.apply, has_state), init=init)


def _adapt_params(params: Any) -> AdaptedModel:
    is_array = lambda leaf: isinstance(leaf, float | np.ndarray | np.generic | jax.Array)
    leaves = jax.tree_util.tree_leaves_with_path(params)
    if not any(is_array(leaf) for _, leaf in leaves):
        raise TypeError(f"{_WHAT_A_MODEL_IS}, got {checks.describe(params)}.")
    for path, leaf in leaves:
        if not is_array(leaf) or not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            where = f"leaf {checks.path_name(path)!r}" if path else "model"
            raise TypeError(
                f"model is a pytree of parameters, and its {where} is {checks.describe(leaf)}: gradients need "
                "floating-point arrays. Keep what is no parameter out of it, or cast it with .astype(np.float32)."
            )
    return AdaptedModel(f"a {checks.describe(params)} is a pytree of parameters", ParamsApply(), (params, {}, {}))


_ARRAYS = jax.Array | np.ndarray | np.generic


def example_inputs(spec: types.BatchSpec) -> Any:
    """Returns what the model is initialised with: arrays of ones where the spec has shapes, and its arrays as they are.

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
            f"A spec is a shape ([1, 28, 28, 1]), a (shape, dtype) pair, an array or a key, or these nested in dicts, "
            f"lists and named tuples; {leaf!r} in it is none of them."
        )

    return jax.tree.map(ones, spec, is_leaf=lambda leaf: leaf is None or _shape_in_spec(leaf) is not None)


def example_batch(batch: types.BatchSpec) -> types.Batch:
    """Returns a host batch with zeros where it has shapes. They are views of one number, whatever their size.

    A batch without arrays is a spec. In one that has some, a list of numbers is no shape.

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
    """Returns the shape of a host array, as `jit` takes it; every other leaf as it is."""
    if not isinstance(leaf, np.ndarray):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype))


def _shape_in_spec(leaf: Any) -> jax.ShapeDtypeStruct | None:
    """Returns what a leaf of a spec describes; None for an array, and for what is no leaf of a spec."""
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
    if isinstance(leaf[1], str | np.dtype):
        return True
    return (isinstance(leaf[1], type) and issubclass(leaf[1], np.generic | int | float | bool)) or hasattr(
        leaf[1], "dtype"
    )
