"""Train two networks against each other, with an optimizer for each: a GAN whose samples lie on a ring."""

from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import jaxloop
from jaxloop import every

ANGLES = 2 * np.pi * np.arange(8) / 8
MODES = 2 * np.stack([np.cos(ANGLES), np.sin(ANGLES)], axis=-1).astype(np.float32)


class MLP(nn.Module):
    features: int

    @nn.compact
    def __call__(self, x):
        x = nn.tanh(nn.Dense(64)(x))
        return nn.Dense(self.features)(nn.tanh(nn.Dense(64)(x)))


@flax.struct.dataclass
class GANState:
    step: jax.Array
    generator: jaxloop.TrainState
    discriminator: jaxloop.TrainState


class GANStep(jaxloop.Step):
    optimizers = (optax.adam(1e-3, b1=0.5), optax.adam(1e-3, b1=0.5))

    def make_state(self, spec=None, **init_kwargs):
        keys = jax.random.split(self.base_prng)

        def make(key, model, inputs, optimizer):
            params = model.init(key, jnp.ones([1, inputs]))["params"]
            return jaxloop.TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)

        generator, discriminator = self.optimizers
        return GANState(jnp.int32(0), make(keys[0], MLP(2), 8, generator), make(keys[1], MLP(1), 2, discriminator))

    def run(self, state, batch):
        key = self.prng_key(state.step)
        generate = lambda params, key: state.generator.apply_fn({"params": params}, jax.random.normal(key, [256, 8]))
        judge = lambda params, points: state.discriminator.apply_fn({"params": params}, points)

        def discriminator_loss(params):
            fake = judge(params, generate(state.generator.params, jax.random.fold_in(key, 0)))
            return jnp.mean(nn.softplus(-judge(params, batch))) + jnp.mean(nn.softplus(fake))

        def generator_loss(params, judge_params):
            return jnp.mean(nn.softplus(-judge(judge_params, generate(params, jax.random.fold_in(key, 1)))))

        d_loss, grads = jax.value_and_grad(discriminator_loss)(state.discriminator.params)
        discriminator = state.discriminator.apply_gradients(grads=grads)
        g_loss, grads = jax.value_and_grad(generator_loss)(state.generator.params, discriminator.params)
        generator = state.generator.apply_gradients(grads=grads)
        state = GANState(state.step + 1, generator, discriminator)
        return state, {"discriminator": d_loss, "generator": g_loss}


def batch_of(number):
    rng = np.random.default_rng(number)
    return MODES[rng.integers(8, size=256)] + 0.05 * rng.normal(size=[256, 2]).astype(np.float32)


class PrintSamples(jaxloop.Action):
    """Prints how many of the eight modes the generator finds, and how many of its samples are near one."""

    def __call__(self, state, outputs, *, step_num, **kwargs):
        noise = np.random.default_rng(0).normal(size=[1000, 8]).astype(np.float32)
        samples: Any = state.generator.apply_fn({"params": state.generator.params}, noise)
        distances = np.linalg.norm(np.asarray(samples)[:, None] - MODES, axis=-1)
        near = distances.min(axis=-1) < 0.3
        found = np.unique(distances.argmin(axis=-1)[near])
        print(f"step {step_num}: {len(found)} of 8 modes, {near.mean():.0%} of the samples near one")


step = GANStep(jax.random.key(0), None, train=True)
loop = jaxloop.TrainLoop(step, end_actions=[PrintSamples(every(steps=1000))])
jaxloop.OuterLoop(loop)(step.initialize_model(), jaxloop.from_index(batch_of), train_total_steps=4000)
