"""Trains a policy on environments that are part of the state, without a dataset."""

import jax
import jax.numpy as jnp
import optax

import jaxloop
from jaxloop import every


class WalkerState(jaxloop.TrainState):
    position: jax.Array = None  # One per environment.
    key: jax.Array = None


class Walk(jaxloop.Step):
    """Sixteen walkers learn to walk toward 0, with REINFORCE."""

    def make_state(self, spec=None):  # This step has no model.
        params = {"slope": jnp.zeros([]), "bias": jnp.zeros([])}
        start = {"position": jnp.zeros([16]), "key": jax.random.key_data(self.base_prng)}
        return WalkerState.create(apply_fn=None, params=params, tx=self.optimizer, **start)

    def run(self, state, batch):  # The batch is None.
        key, action_key, noise_key = jax.random.split(jax.random.wrap_key_data(state.key), 3)
        logits = lambda params: params["slope"] * state.position + params["bias"]
        goes_right = jax.random.bernoulli(action_key, jax.nn.sigmoid(logits(state.params)))
        noise = 0.1 * jax.random.normal(noise_key, state.position.shape)
        position = jnp.clip(state.position + jnp.where(goes_right, 1, -1) + noise, -5, 5)
        reward = jnp.abs(state.position) - jnp.abs(position)  # How much closer each walker came to 0.

        def loss_fn(params):
            log_prob = jax.nn.log_sigmoid(jnp.where(goes_right, 1, -1) * logits(params))
            return -(reward * log_prob).mean()

        grads = jax.grad(loss_fn)(state.params)
        state = state.apply_gradients(grads=grads, position=position, key=jax.random.key_data(key))
        return state, {"reward": reward.mean(), "distance": jnp.abs(position).mean()}


step = Walk(jax.random.key(0), None, optax.adam(0.05), train=True)
train_loop = jaxloop.TrainLoop(step, steps_per_dispatch=10)
outer_loop = jaxloop.OuterLoop(train_loop, log_interval=every(steps=100))
outer_loop(step.initialize_model(), None, train_total_steps=300)
for steps, distance in zip(*outer_loop.history.collect("steps", "train.distance"), strict=True):
    print(f"steps {steps - 99} to {steps}: mean distance {distance:.2f}")
