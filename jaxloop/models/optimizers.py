"""Optax transformations: parameter averaging, and different optimizers for different parameters."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
import optax

from jaxloop.base import checks, path_patterns


@final
class EMAState(NamedTuple):
    """The state of `ema`.

    Attributes:
      count: The number of updates so far, as an int32 scalar.
      params_ema: The average, with the tree structure of the parameters. Half-precision parameters are averaged in
        float32.
    """

    count: Any  # pyright: ignore[reportIncompatibleMethodOverride]
    params_ema: Any


def ema(decay: float | Callable[[jax.Array], Any]) -> optax.GradientTransformation:
    """Returns an Optax transformation that keeps an exponential moving average of the parameters in its state.

    After each update, `average += (1 - decay) * (params - average)`, where `params` are the updated parameters. The
    average starts at the parameters passed to the first update, even if they were loaded after the optimizer's state
    was created. The average is sharded like the parameters and saved with the optimizer's state. The updates pass
    through unchanged. `LossStep(ema=...)` adds this transformation.

    >>> optimizer = optax.chain(optax.sgd(1.0), ema(0.75))  # It must be the last transformation.
    >>> params = {"w": jnp.array(1.0)}
    >>> updates, state = optimizer.update({"w": jnp.array(4.0)}, optimizer.init(params), params)
    >>> float(optax.apply_updates(params, updates)["w"]), float(state[1].params_ema["w"])
    (-3.0, 0.0)

    Args:
      decay: A number from 0 to 1, or a function of the number of previous updates. With a number, the average spans
        about `1 / (1 - decay)` updates. The function `lambda count: jnp.minimum(0.999, (1 + count) / (10 + count))`
        lets the average forget the initial parameters even in a short run.

    Raises:
      ValueError: If `decay` is not between 0 and 1.
    """
    if not callable(decay) and not (isinstance(decay, int | float) and 0 <= decay <= 1):
        raise ValueError(f"ema must be a number from 0 to 1, such as 0.999, or a function of the count, got {decay!r}.")

    def init(params: Any) -> EMAState:
        # Make copies, because the parameters are donated too.
        copies = jax.tree.map(lambda leaf: jnp.array(leaf, _average_dtype(leaf), copy=True), params)
        return EMAState(jnp.zeros((), jnp.int32), copies)

    def update(updates: Any, state: EMAState, params: Any = None) -> tuple[Any, EMAState]:
        if params is None:
            raise ValueError("jaxloop.optimizers.ema needs the parameters: optimizer.update(grads, opt_state, params).")
        rate = 1 - (decay(state.count) if callable(decay) else decay)

        def average(before: jax.Array, param: jax.Array, new: jax.Array) -> jax.Array:
            if not jnp.issubdtype(before.dtype, jnp.inexact):
                return new
            before = jnp.where(state.count == 0, param.astype(before.dtype), before)
            return before + (rate * (new.astype(before.dtype) - before)).astype(before.dtype)

        averages = jax.tree.map(average, state.params_ema, params, optax.apply_updates(params, updates))
        return updates, EMAState(optax.safe_increment(state.count), averages)

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def ema_params(state: Any) -> Any:
    """Returns the average that `ema` keeps in a train state, with the structure and dtypes of the parameters.

    Before the first update, the average is equal to `state.params`.

    You can call this function inside `Step.run`, for example in an evaluation: `params = ema_params(state)`.

    >>> import jaxloop
    >>> from flax import linen as nn
    >>> optimizer = optax.chain(optax.adam(1e-3), ema(0.999))
    >>> step = jaxloop.LossStep(jax.random.key(0), nn.Dense(2), optimizer, train=True, loss=lambda x, batch: x)
    >>> ema_params(step.initialize_model([1, 3]))["kernel"].shape
    (3, 2)

    Raises:
      ValueError: If the optimizer's state doesn't contain exactly one average.
    """
    is_average = lambda node: isinstance(node, EMAState)
    leaves = jax.tree.leaves(getattr(state, "opt_state", None), is_leaf=is_average)
    found = [leaf for leaf in leaves if is_average(leaf)]
    if len(found) != 1:
        raise ValueError(
            f"The optimizer's state has {len(found) or 'no'} averages of the parameters, but must have exactly "
            "one. Make the state with the train step, LossStep(..., ema=0.999), or with optax.chain(optimizer, "
            "jaxloop.optimizers.ema(0.999))."
        )
    count, averages = found[0]
    value = lambda average, leaf: jnp.where(count == 0, leaf, average.astype(leaf.dtype))
    return jax.tree.map(value, averages, state.params)


def by_path(transformations: Mapping[str, optax.GradientTransformation | None]) -> optax.GradientTransformation:
    """Returns an optimizer that updates each parameter with the first transformation whose pattern matches its path.

    Parameters whose pattern is mapped to None are frozen: they stay bit-identical, and the optimizer doesn't keep any
    state for them.

    >>> optimizer = by_path({"head/**": optax.sgd(1e-2), "body/embedding": None, "**": optax.sgd(1e-4)})
    >>> params = {"body": {"embedding": jnp.ones(3), "kernel": jnp.ones(3)}, "head": {"kernel": jnp.ones(3)}}
    >>> grads, state = jax.tree.map(jnp.ones_like, params), optimizer.init(params)
    >>> updates, _ = optimizer.update(grads, state, params)
    >>> [round(float(leaf[0]), 5) for leaf in jax.tree.leaves(updates)]
    [-0.0, -0.0001, -0.01]

    Args:
      transformations: A dict that maps patterns (see `jaxloop.base.path_patterns.matches`) to Optax transformations or
        None. Patterns mapped to the same transformation object share its state. Different objects are independent: an
        `optax.clip_by_global_norm` in one of them computes the norm of just the gradients it receives. To clip by the
        norm of all gradients, write `optax.chain(optax.clip_by_global_norm(1.0), by_path(...))`.

    Raises:
      ValueError: If a pattern doesn't match any parameter, or a parameter doesn't match any pattern. The error is
        raised when the optimizer's state is initialized, and its message lists the paths.
    """
    numbers = {
        pattern: str(list(map(id, transformations.values())).index(id(each)))
        for pattern, each in transformations.items()
    }

    def label(params: Any) -> Any:
        paths = list(checks.leaves_by_path(params))
        for pattern in numbers:
            if not any(path_patterns.matches(pattern, path) for path in paths):
                raise ValueError(
                    f"The pattern {pattern!r} matches no parameter. The parameters are:\n"
                    + "\n".join(checks.first_lines(paths))
                )
        matched = [
            [number for pattern, number in numbers.items() if path_patterns.matches(pattern, path)] for path in paths
        ]
        missed = [path for path, found in zip(paths, matched, strict=True) if not found]
        if missed:
            raise ValueError(
                f'No pattern of {", ".join(map(repr, numbers))} matches these parameters. Add "**": None to freeze '
                'them, or "**" with a transformation:\n' + "\n".join(checks.first_lines(missed))
            )
        return jax.tree.unflatten(jax.tree.structure(params), [found[0] for found in matched])

    by_number: dict[Any, Any] = {
        numbers[pattern]: _FROZEN if each is None else each for pattern, each in transformations.items()
    }
    return optax.partition(by_number, label)


def _average_dtype(leaf: Any) -> Any:
    dtype = jnp.result_type(leaf)
    return jnp.float32 if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4 else dtype


# The update is -0.0, because adding 0.0 to a parameter of -0.0 would change it.
_FROZEN = optax.GradientTransformation(
    lambda params: optax.EmptyState(),
    lambda updates, state, params=None: (jax.tree.map(lambda leaf: -jnp.zeros_like(leaf), updates), state),
)
