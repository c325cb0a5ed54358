"""Train a policy by PPO to balance a pole, with 64 environments in the state."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import jaxloop
from jaxloop import every

ENVIRONMENTS, ROLLOUT, UPDATES, PART = 64, 64, 16, 1024
reset = lambda key: jax.random.uniform(key, [4], minval=-0.05, maxval=0.05)


def move(state, action):
    """Moves the cart: Barto, Sutton and Anderson (1983). Returns the new state and whether the pole has fallen."""
    _, speed, angle, turning = state
    push = (20.0 * action - 10.0 + 0.05 * turning**2 * jnp.sin(angle)) / 1.1
    turn = (9.8 * jnp.sin(angle) - jnp.cos(angle) * push) / (0.5 * (4 / 3 - 0.1 * jnp.cos(angle) ** 2 / 1.1))
    accelerate = push - 0.05 * turn * jnp.cos(angle) / 1.1
    state = state + 0.02 * jnp.stack([speed, accelerate, turning, turn])
    return state, (jnp.abs(state[0]) > 2.4) | (jnp.abs(state[2]) > 0.2095)


class Policy(nn.Module):
    @nn.compact
    def __call__(self, x):
        hidden = lambda: nn.tanh(nn.Dense(64)(nn.tanh(nn.Dense(64)(x))))
        return nn.Dense(2, kernel_init=nn.initializers.zeros)(hidden()), nn.Dense(1)(hidden())[..., 0]


class State(jaxloop.TrainState):
    environments: Any = None
    ages: Any = None


class PPOStep(jaxloop.Step):
    updates_per_step = UPDATES

    def make_state(self, spec=None):
        environments = jax.vmap(reset)(jax.random.split(self.base_prng, ENVIRONMENTS))
        state = super().make_state(spec)
        return State(**vars(state), environments=environments, ages=jnp.zeros([ENVIRONMENTS], jnp.int32))

    def run(self, state, batch):
        keys = jax.random.split(self.prng_key(state.step), ROLLOUT + UPDATES)
        apply = lambda params, seen: state.apply_fn({"params": params}, seen)

        def act(carry, key):
            now, ages = carry
            logits, values = apply(state.params, now)
            actions = jax.random.categorical(key, logits)
            after, fallen = jax.vmap(move)(now, actions)
            done = fallen | (ages >= 499)
            fresh = jax.vmap(reset)(jax.random.split(jax.random.fold_in(key, 1), ENVIRONMENTS))
            chosen = nn.log_softmax(logits)[jnp.arange(ENVIRONMENTS), actions]
            new = jnp.where(done[:, None], fresh, after), jnp.where(done, 0, ages + 1)
            return new, (now, actions, chosen, values, done, jnp.where(done, ages + 1, 0))

        (environments, ages), rows = jax.lax.scan(act, (state.environments, state.ages), keys[:ROLLOUT])
        seen, actions, chosen, values, done, lengths = rows

        def discount(carry, row):
            (advantage, next_value), (value, done) = carry, row
            advantage = 1.0 + 0.99 * next_value * (1 - done) - value + 0.99 * 0.95 * (1 - done) * advantage
            return (advantage, value), advantage

        last = jnp.zeros(ENVIRONMENTS), apply(state.params, environments)[1]
        _, advantages = jax.lax.scan(discount, last, (values, done.astype(jnp.float32)), reverse=True)
        flat = lambda x: x.reshape(-1, *x.shape[2:])
        data = jax.tree.map(flat, (seen, actions, chosen, advantages, advantages + values))

        def loss_fn(params, rows):
            seen, actions, chosen, advantages, returns = rows
            logits, values = apply(params, seen)
            log_probs = nn.log_softmax(logits)
            ratio = jnp.exp(log_probs[jnp.arange(PART), actions] - chosen)
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
            gain = jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages).mean()
            entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1).mean()
            return jnp.mean((values - returns) ** 2) / 2 - gain - 0.01 * entropy

        def update(state, key):
            rows = jax.random.choice(key, len(data[0]), [PART])
            grads = jax.grad(loss_fn)(state.params, jax.tree.map(lambda x: x[rows], data))
            return state.apply_gradients(grads=grads), None

        state, _ = jax.lax.scan(update, state.replace(environments=environments, ages=ages), keys[ROLLOUT:])
        return state, {"length": lengths.sum() / jnp.maximum(done.sum(), 1)}


step = PPOStep(jax.random.key(0), Policy(), optax.adam(1e-3), train=True)
outer_loop = jaxloop.OuterLoop(jaxloop.TrainLoop(step), log_interval=every(steps=400))
outer_loop(step.initialize_model([1, 4]), train_total_steps=1600)
for number, length in zip(*outer_loop.history.collect("steps", "train.length"), strict=True):
    print(f"step {number}: episodes of {length:.0f} moves")
