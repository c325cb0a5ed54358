"""What is compiled of a step: for training and for evaluating, one batch or several in one dispatch."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxloop import bad_numbers, partition, types


class Compiled:
    """The functions that a step's `run` is compiled to, each when it is asked for first.

    Args:
      run: `(state, batch) -> (state, outputs)`, pure.
      evaluate: `(state, batch) -> outputs`, likewise.
      partitioner: compiles for its placement.
      **jit_kwargs: arguments of `jax.jit`, which replace the partitioner's own.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        evaluate: Callable[..., Any],
        partitioner: partition.Partitioner,
        **jit_kwargs: Any,
    ):
        self._run, self._evaluate, self._partitioner, self._jit_kwargs = run, evaluate, partitioner, jit_kwargs
        self._made: dict[Any, Any] = {}

    def training(self, watch: bad_numbers.Watch | None = None, *, fused: bool = False) -> Callable[..., Any]:
        """`(state, batch) -> (state, outputs)`, which takes the state over.

        Args:
          watch: looks for bad numbers.
          fused: of stacked batches; the outputs are stacked likewise.
        """
        if watch is None:
            run = _scan(self._run) if fused else self._run
            return self._once(("train", fused), lambda: self._partitioner.partition(run, **self._jit_kwargs))
        looking, compiled = self._once(("train", fused, watch.policy), lambda: self._looking(watch.policy, fused))
        return functools.partial(watch.run, looking, compiled, fused=fused)

    def _looking(self, policy: bad_numbers.NanPolicy, fused: bool) -> tuple[bad_numbers.Looking, Callable[..., Any]]:
        looking = bad_numbers.Looking(self._run, policy, self._partitioner.mesh is not None)
        run = _scan_with_flags(looking.run) if fused else looking.run
        return looking, self._partitioner.partition(run, **self._jit_kwargs)

    def evaluation(self, *, fused: bool = False) -> Callable[..., Any]:
        """`(state, batch) -> outputs`: the state is kept, and what `run` makes of it is never computed."""
        kept = {name: value for name, value in self._jit_kwargs.items() if name != "donate_argnames"}
        jit_kwargs = {**kept, "donate_argnums": (), "out_shardings": None}
        run = _map(self._evaluate) if fused else self._evaluate
        return self._once(("evaluate", fused), lambda: self._partitioner.partition(run, **jit_kwargs))

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


def _map(evaluate: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def fused(state: Any, batches: Any) -> Any:
        return jax.lax.scan(lambda _, batch: (None, evaluate(state, batch)), None, batches)[1]

    return fused


def _scan(run: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def fused(state: Any, batches: Any) -> Any:
        return jax.lax.scan(run, state, batches)

    return fused


def _scan_with_flags(run: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """The same of a `run` that hands on the flags of `bad_numbers.Looking`."""

    def fused(state: Any, batches_and_flags: Any) -> Any:
        batches, flags = batches_and_flags

        def body(carry: Any, batch: Any) -> Any:
            state, flags = carry
            state, (outputs, flags) = run(state, (batch, flags))
            return (state, flags), outputs

        (state, flags), outputs = jax.lax.scan(body, (state, flags), batches)
        return state, (outputs, flags)

    return fused


def stacked(batches: Sequence[types.Batch]) -> types.Batch | None:
    """Batches as one, on a new leading axis, host arrays on the host; None where they are not of one shape.

    >>> stacked([{"x": np.zeros(3)}, {"x": np.ones(3)}])["x"].shape
    (2, 3)
    """
    try:
        return jax.tree.map(_stacked_leaf, *batches)
    except ValueError:  # As jax.tree.map raises for trees of another structure.
        return None


def _stacked_leaf(*leaves: Any) -> Any:
    first = leaves[0]
    if not isinstance(first, np.ndarray):
        return jnp.stack(leaves) if isinstance(first, jax.Array) else np.stack(leaves)
    shape, dtype = first.shape, first.dtype
    for leaf in leaves:
        if leaf.shape != shape or leaf.dtype != dtype:
            raise ValueError("The leaves differ.")
    # Joining them is several times faster than `np.stack`.
    return np.concatenate(leaves).reshape(len(leaves), *shape) if shape else np.stack(leaves)
