"""Finds the step, the batch and the operation that make the loss infinite."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxloop


class Logarithm(jaxloop.Step):
    def run(self, state, batch):
        def loss_fn(params):
            predicted, updates = self.call_model(state, params, jnp.log(batch["x"] ** 2))
            return ((predicted - batch["y"]) ** 2).mean(), updates

        (loss, updates), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads).update_variables(updates), {"loss": loss}


x = np.random.default_rng(0).normal(size=[50, 32, 3]).astype(np.float32)
x[13, 5, 2] = 0  # In the batch of step 14. The logarithm of 0 is infinite.
batches = [{"x": each, "y": each.sum(axis=-1, keepdims=True)} for each in x]

step = Logarithm(jax.random.key(0), nnx.Linear(3, 1, rngs=nnx.Rngs(0)), optax.adam(1e-2), train=True)
train_loop = jaxloop.TrainLoop(step, nan_policy="raise")
outer_loop = jaxloop.OuterLoop(train_loop, workdir="runs/nan")
try:
    outer_loop(step.initialize_model(), batches, train_loop_steps=10)
except FloatingPointError as error:
    print(f"step {error.step_num}: {', '.join(error.names)}")

# The failed step was recorded. Run it again, as plain Python, and let JAX name the operation.
try:
    with jax.debug_nans(True), jax.debug_infs(True):
        jaxloop.replay("runs/nan", step, eagerly=True)
except FloatingPointError as error:
    print(str(error).splitlines()[0])
