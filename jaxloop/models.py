"""What makes a `TrainState` of a Linen module or an NNX module class."""

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx

from jaxloop import checks, types


def check_model(model: Any, nnx_model_args: Sequence[Any] | None, options: Mapping[str, Any], known: list[str]) -> None:
    """Raises where a model and the arguments that came with it do not belong together.

    Args:
      model: a Linen module or an NNX module class.
      nnx_model_args: what the user gave under this name.
      options: keywords that the Step itself does not know.
      known: the names of those that it does know.

    Raises:
      ValueError: an NNX class without `nnx_model_args`, or a Linen module with them.
      TypeError: anything else that is no model; an unknown keyword beside a Linen module.
    """
    is_nnx_class = inspect.isclass(model) and issubclass(model, nnx.Module)
    if is_nnx_class:
        if nnx_model_args is None:
            raise ValueError(
                f"{model.__name__} is an NNX module class, so the Step needs nnx_model_args, the positional arguments "
                "of its constructor (nnx_model_args=() for none). The Step makes the model itself, with "
                "rngs=nnx.Rngs(...) from base_prng."
            )
        return
    if isinstance(model, nnx.Module):
        raise TypeError(
            f"model is an instance of the NNX module {type(model).__name__}; give the class itself, and its arguments "
            f"as nnx_model_args: Step(base_prng, {type(model).__name__}, nnx_model_args=(...))."
        )
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a Linen module or an NNX module class, got {model!r}.")
    if nnx_model_args is not None:
        raise ValueError(
            f"nnx_model_args={nnx_model_args!r} belongs to an NNX module class, and {type(model).__name__} is a Linen "
            "module. Leave it out, or give the class of an NNX module."
        )
    for name in options:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]!r}?" if near else f" It takes {', '.join(known)}."
        raise TypeError(f"Step got an unexpected keyword {name!r}.{hint}")


def init_fn(
    model: Any,
    optimizer: optax.GradientTransformation,
    base_prng: types.PRNGType,
    spec: types.BatchSpec,
    nnx_model_args: Sequence[Any],
    nnx_model_kwargs: Mapping[str, Any],
    init_kwargs: Mapping[str, Any],
) -> Callable[[], types.TrainState]:
    """Returns a function that makes the first state; pure, so that a partitioner can compile it."""

    def initialize() -> types.TrainState:
        if isinstance(model, nn.Module):
            return _init_linen(model, optimizer, base_prng, example_inputs(spec), init_kwargs)
        return _init_nnx(model, optimizer, base_prng, nnx_model_args, {**nnx_model_kwargs, **init_kwargs})

    return initialize


def _init_linen(model, optimizer, base_prng, inputs, init_kwargs) -> types.TrainState:
    rngs = dict(base_prng) if isinstance(base_prng, Mapping) else base_prng
    variables = dict(model.init(rngs, inputs, **init_kwargs))
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


class NNXApply:
    """The `apply_fn` of an NNX model: `outputs, (_, updates) = apply_fn(params, batch_stats, collections)(inputs)`.

    As `graphdef.apply`, and with `train=True` or `train=False` the model is in `model.train()` or `model.eval()` mode,
    which turns dropout and batch statistics on or off. Without, it is as its constructor left it.

    jit hashes the state's static fields at each call, and a graphdef takes about a millisecond: so it is done once.
    """

    def __init__(self, graphdef: nnx.GraphDef):
        self.graphdef = graphdef
        self._hash = hash(graphdef)

    def __call__(self, *states: Any, train: bool | None = None) -> Callable[..., Any]:
        for state in states:
            if not isinstance(state, nnx.State):
                raise TypeError(
                    "The apply_fn of an NNX model takes its states, apply_fn(params, batch_stats, collections, "
                    f"train=...)(inputs), got {checks.describe(state)} among them. "
                    "(apply_fn({'params': params}, inputs) is for Linen modules.)"
                )
        # New variables, because inside a gradient NNX lets a model change only those that were made there.
        states = jax.tree.map(lambda leaf: leaf, states)
        if train is None:
            return self.graphdef.apply(*states)
        model = nnx.merge(self.graphdef, *states)
        model.train() if train else model.eval()
        graphdef, state = nnx.split(model)
        return graphdef.apply(state)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, NNXApply) and self.graphdef == other.graphdef)

    def __hash__(self) -> int:
        return self._hash


def example_inputs(spec: types.BatchSpec) -> Any:
    """Arrays of ones as a spec describes them: what the model is initialised with.

    >>> jax.tree.map(jnp.shape, example_inputs({"image": [1, 28, 28, 1], "label": ([1], jnp.int32)}))
    {'image': (1, 28, 28, 1), 'label': (1,)}
    """

    def ones(leaf: Any) -> jax.Array:
        if _is_shape(leaf):
            return jnp.ones(leaf, jnp.float32)
        if _is_shape_and_dtype(leaf):
            return jnp.ones(leaf[0], leaf[1])
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jnp.ones(leaf.shape, leaf.dtype)
        raise ValueError(
            f"A spec is a shape ([1, 28, 28, 1]), a (shape, dtype) pair, or these nested in dicts, lists and named "
            f"tuples; {leaf!r} in it is none of them."
        )

    return jax.tree.map(ones, spec, is_leaf=lambda leaf: leaf is None or _is_shape(leaf) or _is_shape_and_dtype(leaf))


def _is_shape(leaf: Any) -> bool:
    plain_sequence = isinstance(leaf, list | tuple) and not hasattr(leaf, "_fields")
    return plain_sequence and all(isinstance(size, int | np.integer) and not isinstance(size, bool) for size in leaf)


def _is_shape_and_dtype(leaf: Any) -> bool:
    plain_pair = isinstance(leaf, list | tuple) and not hasattr(leaf, "_fields") and len(leaf) == 2
    if not plain_pair or not _is_shape(leaf[0]):
        return False
    if isinstance(leaf[1], str | np.dtype):
        return True
    return (isinstance(leaf[1], type) and issubclass(leaf[1], np.generic | int | float | bool)) or hasattr(
        leaf[1], "dtype"
    )
