"""Steps built from pure functions: `FunctionStep`, and `CompiledFunction` for `jaxloop.functional`."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from jaxloop import metrics, partition, types
from jaxloop.base import checks, structures
from jaxloop.step import NumpyStep


class FunctionStep(NumpyStep):
    """A `Step` that runs your function `fn(state, batch) -> (state, outputs)`. The state may be any pytree.

    If the state has no int32 field `step`, the loop counts the steps.

    Hooks:
      preprocess_batch: See `Step`. An override must first call `super().preprocess_batch`, which converts tensors to
        NumPy arrays.
      begin, end, num_examples: See `Step`.

    >>> step = FunctionStep(lambda state, batch: (state + batch["x"].sum(), {"sum": state}))
    >>> state, outputs = step(np.float32(1), {"x": np.ones(3, np.float32)})
    >>> float(state), float(outputs["sum"])
    (4.0, 1.0)

    Args:
      fn: A pure function. It is compiled, and its state argument is donated.
      partitioner: The partitioner, which determines where the state and the batches are placed.
      train: Whether this is a train step.
    """

    def __init__(
        self,
        fn: Callable[[Any, types.Batch], tuple[Any, types.Output]],
        partitioner: partition.Partitioner = partition.SingleDevicePartitioner(),  # noqa: B008 (stateless)
        *,
        train: bool = False,
    ):
        if not callable(fn):
            raise TypeError(f"{type(self).__name__} takes a function fn(state, batch) -> (state, outputs), got {fn!r}.")
        # The key is unused: the function updates the state.
        super().__init__(np.zeros(2, np.uint32), None, None, partitioner, train)  # pyright: ignore
        self._fn = fn

    def __repr__(self) -> str:
        return f"{type(self).__name__}({name_of(self._fn)}, train={self._train})"

    def run(self, state: Any, batch: types.Batch) -> tuple[Any, types.Output]:
        return self._fn(state, batch)

    def compute_num_params(self, state: Any) -> int:
        """Returns the number of parameters in `state.params`, or in all leaves if the state has no `params`."""
        return sum(np.size(leaf) for leaf in jax.tree.leaves(getattr(state, "params", state)))


# A function that returns logs ------------------------------------------------------------------------


@final
class Carry(list[Any]):
    """A list with one element: a state, converted to the form that a `CompiledFunction` uses between calls.

    Each call replaces the element with the new state.
    """


@final
class CompiledFunction:
    """Compiles a pure function of `(state, batch)` for the partitioner's devices.

    The function returns None, logs, `(logs, state)` or `(outputs, logs, state)`; see `outputs_logs_and_state`.

    >>> @CompiledFunction
    ... def add(state, batch):
    ...     return {"sum": state}, state + batch
    >>> logs, state = add(np.float32(1), np.float32(2))
    >>> float(logs["sum"]), float(state)
    (1.0, 3.0)

    Args:
      fn: The function.
      partitioner: The partitioner, which determines where the state and the batches are placed. If None, a single
        device is used.
      train: Whether to update the state with the gradient of the sum of the logged losses. If True, the state must be a
        `TrainState`.
      donate: Whether to donate the state, so that the new state reuses its memory.

    Attributes:
      donates: True if the state is donated.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        partitioner: partition.Partitioner | None = None,
        *,
        train: bool = False,
        donate: bool = False,
    ):
        partitioner = partition.SingleDevicePartitioner() if partitioner is None else partitioner
        if not isinstance(partitioner, partition.Partitioner):
            raise TypeError(f"partitioner must be a jaxloop Partitioner, got {partitioner!r}.")
        needed, most_arguments = positional_arguments(fn)
        if most_arguments < 2 or len(needed) > 2:
            raise TypeError(
                f"{name_of(fn)} must take (state, batch), got ({', '.join(needed)}). Bind constants with "
                "functools.partial, and put other arrays into the state."
            )
        functools.update_wrapper(self, fn)
        self._fn, self._partitioner, self._train, self._num_calls = fn, partitioner, train, 0
        self.donates: bool = donate
        self._is_on_cpu_mesh = partition.is_cpu_mesh(partitioner.mesh)
        self._step = FunctionStep(self._run, partitioner, train=train)
        self._compiled = self._step._runner.programs.compiled(evaluates=not donate)

    def __repr__(self) -> str:
        return f"{'train_step' if self._train else 'step'}({name_of(self._fn)})"

    def __call__(self, state: Any, batch: types.Batch) -> Any:
        """Returns `(logs, state)`, or `(outputs, logs, state)` if the function returns outputs.

        Args:
          state: The state, or a `Carry` that contains it.
          batch: A host batch, which will be sharded across the devices.
        """
        carry, runner = state if isinstance(state, Carry) else self.enter(state), self._step._runner
        batch = self._step.preprocess_batch(batch)
        runner.batch_watch.look([batch])
        try:
            placed = runner.place(batch, evaluates=not self._train)
            carry[0], found = self._compiled.call(carry[0], placed, runner.batch_watch.form)
        except Exception as error:
            runner.explain(error, batch)
            raise
        if self.donates and carry is not state:
            state = self.leave(carry)
        self._num_calls += 1
        if self._is_on_cpu_mesh and 2 * self._num_calls % partition.max_steps_in_flight(self._partitioner.mesh) == 0:
            metrics.wait((carry[0], found))
        outputs, logs, state = found["outputs"], found["logs"], found.get("state", state)
        return (logs, state) if outputs is None else (outputs, logs, state)

    def enter(self, state: Any) -> "Carry":
        """Converts a state to a carry, which can be passed to each call in place of the state.

        Passing a carry is faster than passing a state.
        """
        ready = self._step._runner.states.prepare(state)
        if self.donates and ready is not state:  # Otherwise, this function returned the state.
            checks.mark_donated(state, repr(self))
        return Carry([self._compiled.enter(ready)])

    def leave(self, carry: "Carry") -> Any:
        """Converts a carry back to a state."""
        state = self._compiled.leave(carry[0])
        self._step._runner.states.remember(state, carry[0])
        return state

    # Traced ----------------------------------------------------------------------------------------

    def _run(self, state: Any, batch: types.Batch) -> tuple[Any, types.Output]:
        def call(state: Any) -> tuple[Any, Any, Any]:
            outputs, logs, new_state = outputs_logs_and_state(self._fn(state, batch), name_of(self._fn), state)
            if logs:
                logs = metrics.separate_weights(logs)
                losses = jax.tree.map(
                    lambda loss: types.mean_loss(loss, checks.num_examples(batch)), logs.get("losses") or {}
                )
                logs = type(logs)({**logs, "losses": losses}) if losses else logs
            return outputs, logs, new_state

        outputs, logs, new_state = self._update_by_gradient(call, state) if self._train else call(state)
        found = {"outputs": outputs, "logs": logs}
        if new_state is None:
            return state, found
        checks.check_same_state(state, new_state, repr(self))
        if self.donates:
            return new_state, found
        if self._partitioner.mesh is not None:  # Otherwise, the compiler would choose the sharding.
            new_state = jax.lax.with_sharding_constraint(new_state, self._partitioner.sharding)
        return state, {**found, "state": new_state}

    def _update_by_gradient(self, call: Callable[[Any], tuple[Any, Any, Any]], state: Any) -> tuple[Any, Any, Any]:
        if not hasattr(state, "params") or not hasattr(state, "apply_gradients"):
            raise TypeError(
                f"{self!r} needs a TrainState, with params and apply_gradients, got {checks.describe(state)}. For "
                "a different kind of state, compute the gradient yourself, in a jf.step."
            )

        def sum_of_losses(params: Any) -> tuple[Any, Any]:
            outputs, logs, new_state = call(state.replace(params=params))
            losses = metrics.join_weights(checks.leaves_by_path((logs or {}).get("losses", {})))
            losses = {name: metrics.value_of(loss) for name, loss in losses.items()}
            if not losses:
                raise ValueError(f"{self!r} logged no loss to differentiate. Call logs.add_loss('loss', loss).")
            for name, loss in losses.items():
                if np.shape(loss):
                    raise ValueError(
                        f"{self!r} logged the loss {name!r}, {checks.describe(loss)}, which is not a scalar. Take its "
                        "mean."
                    )
            return sum(losses.values()), (outputs, logs, new_state)

        with_gradients = jax.value_and_grad(sum_of_losses, has_aux=True)
        (value, (outputs, logs, new_state)), grads = with_gradients(state.params)
        grads = jax.tree.map(jnp.conj, grads)  # JAX returns the conjugate of the direction of ascent.
        new_state = (state if new_state is None else new_state).replace(params=state.params)
        new_state = _update_variables(new_state, logs.pop("updates", {}))
        value_fn = lambda params: sum_of_losses(params)[0]
        return outputs, logs, types.apply_gradients(new_state, grads, value, value_fn)


def _update_variables(state: Any, updates: Mapping[str, Any]) -> Any:
    """Returns the state with the new values of the variables that the forward pass changed."""
    if not updates:
        return state
    if not hasattr(state, "update_variables"):  # Flax's TrainState, with custom fields.
        return state.replace(**updates)
    if types.is_nnx(state.params, "State"):
        return functools.reduce(lambda state, variables: state.update_variables(variables), updates.values(), state)
    return state.update_variables(updates)


# Signatures and results of functions -----------------------------------------------------------------


def name_of(function: Any) -> str:
    """Returns the name of a function or other callable, for use in messages."""
    of = function.func if isinstance(function, functools.partial) else function
    return getattr(of, "__name__", None) or repr(of)


def positional_arguments(function: Callable[..., Any]) -> tuple[list[str], int]:
    """Returns the names of a function's required positional arguments, and how many positional arguments it accepts.

    >>> positional_arguments(lambda state, batch, extra=None: None)
    (['state', 'batch'], 3)

    Raises:
      TypeError: If the function has required keyword-only arguments, or its signature can't be read.
    """
    name = name_of(function)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise TypeError(f"The signature of {name} can't be read. Wrap it: lambda state: ...") from None
    needed = [each for each in parameters if each.default is each.empty]
    by_name = [each.name for each in needed if each.kind is each.KEYWORD_ONLY]
    if by_name:
        raise TypeError(
            f"{name} has keyword-only arguments ({', '.join(by_name)}), but is called with positional ones. Bind them "
            "with functools.partial."
        )
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [each.name for each in needed if each.kind in kinds]
    if any(each.kind is each.VAR_POSITIONAL for each in parameters):
        names += [f"*{place}" for place in range(len(names), 4)]
        return names, len(names)
    return names, sum(each.kind in kinds for each in parameters)


def outputs_logs_and_state(result: Any, name: str, state: Any) -> tuple[Any, Any, Any]:
    """Converts a function's result to `(outputs, logs, state)`, with None for each part that is missing.

    >>> outputs_logs_and_state(({"loss": 0.5}, 7.0), "train_step", state=6.0)
    (None, {'loss': 0.5}, 7.0)

    Args:
      result: None, logs, `(logs, state)`, `(outputs, logs, state)`, or a state that is neither a tuple nor a dict.
      name: The name of the function, for error messages.
      state: The state that was passed to the function, or None.

    Raises:
      TypeError: If the result has none of these forms.
    """
    if type(result) is tuple and len(result) == 2 and isinstance(result[0], dict) and not isinstance(state, tuple):
        return None, *result  # The common case, first for speed.
    if isinstance(result, Mapping):
        if isinstance(state, Mapping) and state and result.keys() == state.keys():
            raise TypeError(_wrong_result(name, "a dictionary with the keys of the state"))
        return None, result, None
    if isinstance(result, tuple):
        is_named = hasattr(result, "_fields")
        if is_named or len(result) not in (2, 3) or _is_state_in_parts(result, state):
            got = f"the tuple {type(result).__name__}" if is_named else f"a tuple of {len(result)}"
            raise TypeError(_wrong_result(name, got))
        outputs, logs, new_state = result if len(result) == 3 else (None, *result)
        if logs is not None and not isinstance(logs, Mapping):
            raise TypeError(_wrong_result(name, f"{checks.describe(logs)} as logs, a dict that precedes the state"))
        return outputs, logs, new_state
    if not (result is None or state is None or _may_replace(result, state)):
        got = f"only {checks.describe(result)}, while the state is {checks.describe(state)}"
        raise TypeError(_wrong_result(name, got))
    return None, None, result


def _is_state_in_parts(result: tuple[Any, ...], state: Any) -> bool:
    """Returns True if a tuple is itself a new state, rather than `(logs, state)` or `(outputs, logs, state)`."""
    may_be = isinstance(state, tuple) and len(state) == len(result) and isinstance(result[0], Mapping)
    return may_be and structures.are_alike(state, result)


def _may_replace(result: Any, state: Any) -> bool:
    """Returns True if a function's single result is likely to be a new state rather than a mistake."""
    arrays = (jax.Array, np.ndarray, np.generic, int, float, complex)
    if isinstance(result, arrays) and isinstance(state, arrays):
        return np.shape(result) == np.shape(state)
    return isinstance(result, type(state)) or isinstance(state, type(result))


def _wrong_result(name: str, got: str) -> str:
    return (
        f"{name} must return None, logs, (logs, state) or (outputs, logs, state), with None for anything that it "
        f"doesn't return, got {got}. Write {{'name': value}} for values to log, and (None, state) for a state that is "
        "a tuple or a dictionary."
    )
