"""Trains an agent to balance a pole on a cart, with PPO.

The environments are part of the train state. Each call to `run` simulates 64 of them for 64 moments on the device, and
then performs 16 optimizer updates with the collected data. There is no train dataset.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import jaxloop
from jaxloop import at, last

NUM_ENVS, NUM_MOMENTS, MINIBATCH_SIZE, EVAL_MOMENTS = 64, 64, 1024, 500
DISCOUNT, TRACE_DECAY, CLIP = 0.99, 0.95, 0.2


def reset(key, num_envs):  # Returns position, speed, angle of the pole, and angular speed.
    return jax.random.uniform(key, [num_envs, 4], minval=-0.05, maxval=0.05)


def move(carts, actions):  # Simulates 0.02 seconds, with the equations of Gym's CartPole.
    _, speed, angle, spin = carts.T
    force, sin, cos = jnp.where(actions == 1, 10.0, -10.0), jnp.sin(angle), jnp.cos(angle)
    push = (force + 0.05 * spin**2 * sin) / 1.1
    spin_change = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
    speed_change = push - 0.05 * spin_change * cos / 1.1
    carts += 0.02 * jnp.stack([speed, speed_change, spin, spin_change], axis=-1)
    return carts, (jnp.abs(carts[:, 0]) > 2.4) | (jnp.abs(carts[:, 2]) > 0.2095)


class Agent(nn.Module):
    @nn.compact
    def __call__(self, carts):  # Returns the logits of the two actions, and the value.
        mlp = lambda size: nn.Sequential([nn.Dense(64), nn.tanh, nn.Dense(64), nn.tanh, nn.Dense(size)])
        return mlp(2)(carts), mlp(1)(carts)[:, 0]


class PPOState(jaxloop.TrainState):
    carts: jax.Array | None = None


class PPOStep(jaxloop.Step):
    updates_per_step = 16

    def make_state(self, spec=None, **init_kwargs):
        return PPOState(**vars(super().make_state(spec, **init_kwargs)), carts=reset(self.base_prng, NUM_ENVS))

    def run(self, state, batch):
        play_key, update_key = jax.random.split(self.prng_key(state.step))

        def play(carts, key):
            logits, value = state.apply_fn({"params": state.params}, carts)
            action = jax.random.categorical(key, logits) if self.train else logits.argmax(-1)
            moved, fails = move(carts, action)
            seen = {"carts": carts, "logits": logits, "value": value, "action": action, "fails": fails}
            return jnp.where(fails[:, None], reset(key, len(carts)), moved), seen

        if not self.train:  # Each row of the batch stands for one episode.
            carts = reset(play_key, len(batch["episode"]))
            _, seen = jax.lax.scan(play, carts, jax.random.split(play_key, EVAL_MOMENTS))
            return state, {"length": jnp.cumprod(~seen["fails"], axis=0).sum(0).mean()}

        def look_back(after, seen):  # Generalized advantage estimation. The reward is 1 at each moment.
            future = jnp.where(seen["fails"], 0.0, after["value"] + TRACE_DECAY * after["advantage"])
            now = {"value": seen["value"], "advantage": 1.0 + DISCOUNT * future - seen["value"]}
            return now, now["advantage"]

        carts, seen = jax.lax.scan(play, state.carts, jax.random.split(play_key, NUM_MOMENTS))
        end = {"value": state.apply_fn({"params": state.params}, carts)[1], "advantage": jnp.zeros(NUM_ENVS)}
        _, seen["advantage"] = jax.lax.scan(look_back, end, seen, reverse=True)
        seen = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), seen)

        def loss_fn(params, seen):
            logits, value = state.apply_fn({"params": params}, seen["carts"])
            nll = lambda logits: optax.softmax_cross_entropy_with_integer_labels(logits, seen["action"])
            ratio, advantage = jnp.exp(nll(seen["logits"]) - nll(logits)), jax.nn.standardize(seen["advantage"])
            gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantage)
            return (0.5 * (value - seen["value"] - seen["advantage"]) ** 2 - gain).mean()

        def update(state, key):
            rows = jax.random.permutation(key, NUM_ENVS * NUM_MOMENTS)[:MINIBATCH_SIZE]
            loss, grads = jax.value_and_grad(loss_fn)(state.params, jax.tree.map(lambda leaf: leaf[rows], seen))
            return state.apply_gradients(grads=grads), loss

        state, losses = jax.lax.scan(update, state, jax.random.split(update_key, self.updates_per_step))
        return state.replace(carts=carts), {"loss": losses.mean()}


optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(optax.linear_schedule(3e-3, 0.0, 1600)))
step, eval_step = PPOStep(jax.random.key(0), Agent(), optimizer, train=True), PPOStep(jax.random.key(0), Agent())
outer_loop = jaxloop.OuterLoop(jaxloop.TrainLoop(step), [jaxloop.EvalLoop(eval_step)])
evaluation = jaxloop.EvalSpec([{"episode": np.arange(100)}], interval=at(16) | last(), name="test")
state, _ = outer_loop(step.initialize_model([1, 4]), None, train_total_steps=1600, eval_specs=[evaluation])
for step_num, length in zip(*outer_loop.history.collect("steps", "test.length"), strict=True):
    print(f"{step_num} updates: the pole stays up for {length:.1f} of {EVAL_MOMENTS} moments")
