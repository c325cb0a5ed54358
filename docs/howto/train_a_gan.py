"""Trains a generator and a critic, whose parameters and optimizers are in one state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxloop
from jaxloop import optimizers


class MLP(nnx.Module):
    def __init__(self, num_outputs, *, rngs):
        self.hidden, self.output = nnx.Linear(2, 32, rngs=rngs), nnx.Linear(32, num_outputs, rngs=rngs)

    def __call__(self, x):
        return self.output(nnx.relu(self.hidden(x)))


class GAN(nnx.Module):
    def __init__(self, *, rngs):
        self.generator, self.critic = MLP(2, rngs=rngs), MLP(1, rngs=rngs)

    def __call__(self, noise, real):
        fake = self.generator(noise)
        graph, params = nnx.split(self.critic)
        frozen = nnx.merge(graph, jax.tree.map(jax.lax.stop_gradient, params))  # The generator doesn't train it.
        scores = {"fooled": frozen(fake), "fake": self.critic(jax.lax.stop_gradient(fake)), "real": self.critic(real)}
        return scores, fake.mean(axis=0)


class GANStep(jaxloop.Step):
    def run(self, state, batch):
        noise = jax.random.normal(self.prng_key(state.step), [len(batch["points"]), 2])

        def loss_fn(params):
            (scores, mean), updates = self.call_model(state, params, [noise, batch["points"]])
            generator = nnx.softplus(-scores["fooled"]).mean()
            critic = (nnx.softplus(-scores["real"]) + nnx.softplus(scores["fake"])).mean()
            return generator + critic, (generator, critic, mean, updates)

        grads, (generator, critic, mean, updates) = jax.grad(loss_fn, has_aux=True)(state.params)
        state = state.apply_gradients(grads=grads).update_variables(updates)
        distance = jnp.linalg.norm(mean - jnp.array([2.0, -1.0]))
        return state, {"generator": generator, "critic": critic, "distance": distance}


def make_batch(number):
    points = np.random.default_rng(number).normal([2, -1], 0.1, size=[128, 2])
    return {"points": points.astype(np.float32)}


optimizer = optimizers.by_path({"generator/**": optax.adam(1e-3, b1=0.5), "critic/**": optax.adam(2e-3, b1=0.5)})
step = GANStep(jax.random.key(0), GAN(rngs=nnx.Rngs(0)), optimizer, train=True)
state, outputs = jaxloop.TrainLoop(step)(step.initialize_model(), jaxloop.from_index(make_batch), num_steps=1000)
print(f"distance of the means: {outputs['distance'][0]:.2f} -> {np.mean(outputs['distance'][-100:]):.2f}")
