"""Trains a GAN: a generator and a critic, each with its own optimizer, in one step.

The data are eight clusters of points on a circle. An evaluation measures the fraction of generated points that are
close to a cluster, and counts the clusters that the generator has found.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import jaxloop
from jaxloop import every

ANGLES = np.arange(8) * np.pi / 4
CENTERS = 2 * np.stack([np.cos(ANGLES), np.sin(ANGLES)], axis=-1).astype(np.float32)
SPREAD = 0.15


class MLP(nn.Module):
    num_outputs: int

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = nn.leaky_relu(nn.Dense(128)(x), 0.2)
        return nn.Dense(self.num_outputs)(x)


class GANState(jaxloop.TrainState):  # `params` and `opt_state` belong to the generator.
    critic: jaxloop.TrainState | None = None


class GANStep(jaxloop.Step):
    def __init__(self, *args, critic_optimizer, **kwargs):
        super().__init__(*args, **kwargs)
        self.critic_optimizer = critic_optimizer

    def make_state(self, spec=None, **init_kwargs):
        critic = MLP(1)
        params = critic.init(jax.random.fold_in(self.base_prng, 1), jnp.ones([1, 2]))["params"]
        critic_state = jaxloop.TrainState.create(apply_fn=critic.apply, params=params, tx=self.critic_optimizer)
        return GANState(**vars(super().make_state(spec, **init_kwargs)), critic=critic_state)

    def run(self, state, batch):
        real = batch["points"]
        noise = jax.random.normal(self.prng_key(state.step), [len(real), 2])
        generate = lambda params: state.apply_fn({"params": params}, noise)
        score = lambda params, points: state.critic.apply_fn({"params": params}, points)[:, 0]

        if not self.train:
            distances = jnp.linalg.norm(generate(state.params)[:, None] - CENTERS, axis=-1)
            is_close = distances < 3 * SPREAD  # [points, clusters]
            found = (is_close.mean(0) > 0.01).sum()
            return state, {"close": is_close.any(-1).mean(), "found": found}

        def critic_loss(params):
            fake = generate(state.params)
            slopes = jax.vmap(jax.grad(lambda point: score(params, point[None])[0]))(real)
            smoothness = 0.02 * (slopes**2).sum(-1)  # The R1 penalty keeps training stable.
            return (nn.softplus(-score(params, real)) + nn.softplus(score(params, fake)) + smoothness).mean()

        critic_value, grads = jax.value_and_grad(critic_loss)(state.critic.params)
        critic = state.critic.apply_gradients(grads=grads)

        def generator_loss(params):  # Uses the updated critic.
            return nn.softplus(-score(critic.params, generate(params))).mean()

        generator_value, grads = jax.value_and_grad(generator_loss)(state.params)
        state = state.apply_gradients(grads=grads, critic=critic)  # Adds one to `state.step`.
        return state, {"generator": generator_value, "critic": critic_value}


def make_batch(number, size=128):
    rng = np.random.default_rng(number)
    points = CENTERS[rng.integers(8, size=size)] + SPREAD * rng.normal(size=[size, 2])
    return {"points": points.astype(np.float32)}


optimizers = {"optimizer": optax.adam(2e-3, b1=0.5), "critic_optimizer": optax.adam(4e-3, b1=0.5)}
train_step = GANStep(jax.random.key(0), MLP(2), **optimizers, train=True)
test_step = GANStep(jax.random.key(0), MLP(2), **optimizers)
outer_loop = jaxloop.OuterLoop(jaxloop.TrainLoop(train_step), [jaxloop.EvalLoop(test_step)])
state, _ = outer_loop(
    train_step.initialize_model([1, 2]),
    train_dataset=jaxloop.from_index(make_batch),
    train_total_steps=2000,
    # The batch only determines how many points are generated.
    eval_specs=[jaxloop.EvalSpec([make_batch(0, size=2000)], interval=every(steps=1000), name="test")],
)
for step, close, found in zip(*outer_loop.history.collect("steps", "test.close", "test.found"), strict=True):
    print(f"step {step}: {close:.0%} of the points are close to one of {found:.0f} clusters")
