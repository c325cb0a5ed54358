"""A step made of a function: for those who bring their own."""

from collections.abc import Callable
from typing import Any, NoReturn

import jax
import numpy as np
import optax

from jaxloop import models, partition, types
from jaxloop.step import Step


class FunctionStep(Step):
    """Runs `fn(state, batch) -> (state, outputs)`, where the state is yours: any pytree.

    >>> step = FunctionStep(lambda state, batch: (state + batch["x"].sum(), {"sum": state}))
    >>> state, outputs = step.step(np.float32(1), {"x": np.ones(3, np.float32)})
    >>> float(state), float(outputs["sum"])
    (4.0, 1.0)

    Args:
      fn: pure; compiled for the devices, and given the state to take over (donate).
      partitioner: where the state and the batches live.
      train: see `Step`.
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
        no_model = models.AdaptedModel("a function brings no model", models.ParamsApply())
        super().__init__(np.zeros(2, np.uint32), no_model, optax.identity(), partitioner, train)  # pyright: ignore
        self._fn = fn

    def __repr__(self) -> str:
        return f"{type(self).__name__}({getattr(self._fn, '__name__', repr(self._fn))}, train={self._train})"

    def run(self, state: Any, batch: types.Batch) -> tuple[Any, types.Output]:
        return self._fn(state, batch)

    def initialize_model(self, *args: Any, **kwargs: Any) -> NoReturn:
        """A function has no model to initialise."""
        raise TypeError(f"{self!r} has no model: make the state yourself, by TrainState.create(...) for example.")

    def compute_num_params(self, state: Any) -> int:
        """The number of parameters in `state.params`, or in all leaves of a state without."""
        return sum(np.size(leaf) for leaf in jax.tree.leaves(getattr(state, "params", state)))
