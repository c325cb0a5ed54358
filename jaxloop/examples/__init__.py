"""A complete training example, and a tiny regression problem for docstring examples and tests."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from jaxloop.step import Step


class _RegressionStep(Step):
    def run(self, state, batch):
        def loss_fn(params):
            predicted = state.apply_fn({"params": params}, batch["x"])
            return jnp.mean((predicted - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}


def tiny_regression(
    num_batches: int = 100, *, train: bool = True, **step_options: Any
) -> tuple[Step, Any, list[dict[str, np.ndarray]]]:
    """Creates a linear regression problem that trains almost instantly, for docstring examples and tests.

    Returns:
      The tuple `(step, state, batches)`: a step, its initial state, and a list of batches, each of which is a dict with
      the arrays `x`, of shape `[8, 3]`, and `y`, of shape `[8, 1]`.
    """
    step = _RegressionStep(jax.random.key(0), nn.Dense(1), optax.sgd(0.1), train=train, **step_options)
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(num_batches, 8, 3)).astype(np.float32)
    weights = np.array([[1.0], [-2.0], [0.5]], np.float32)
    batches = [{"x": x, "y": x @ weights} for x in inputs]
    return step, step.initialize_model([1, 3]), batches
