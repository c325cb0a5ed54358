"""Trains a variational autoencoder (VAE) on digits, and draws generated digits at each evaluation.

The pictures are saved in runs/vae, both as PNG files and in event files, which `tensorboard --logdir=runs/vae` shows.
"""

import pathlib

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import linen as nn
from sklearn.datasets import load_digits

import jaxloop
from jaxloop import at, every

WORKDIR = pathlib.Path("runs/vae")


class VAE(nn.Module):
    num_latents: int = 8

    def setup(self):
        self.encoder = nn.Sequential([nn.Dense(256), nn.relu, nn.Dense(2 * self.num_latents)])
        self.decoder = nn.Sequential([nn.Dense(256), nn.relu, nn.Dense(64)])

    def __call__(self, pixels, key):
        mean, log_std = jnp.split(self.encoder(pixels), 2, axis=-1)
        latents = mean + jnp.exp(log_std) * jax.random.normal(key, mean.shape)
        return self.decode(latents), mean, log_std

    def decode(self, latents):  # Returns the logits of the pixels.
        return self.decoder(latents)


class VAEStep(jaxloop.Step):
    def run(self, state, batch):
        pixels, key = batch["pixels"], self.prng_key(state.step)

        def loss_fn(params):
            logits, mean, log_std = state.apply_fn({"params": params}, pixels, key)
            # Each pixel is the mean of 16 black or white points.
            reconstruction = 16 * optax.sigmoid_binary_cross_entropy(logits, pixels).sum(-1).mean()
            divergence = (0.5 * (mean**2 + jnp.exp(2 * log_std) - 1) - log_std).sum(-1).mean()
            loss = reconstruction + divergence
            return loss, (logits, {"loss": loss, "reconstruction": reconstruction, "divergence": divergence})

        if self.train:
            grads, (_, outputs) = jax.grad(loss_fn, has_aux=True)(state.params)
            return state.apply_gradients(grads=grads), outputs

        _, (logits, outputs) = loss_fn(state.params)
        latents = jax.random.normal(jax.random.key(0), [10, VAE.num_latents])  # The same at each evaluation.
        generated = state.apply_fn({"params": state.params}, latents, method="decode")
        images = jnp.concatenate([pixels[:10], nn.sigmoid(logits[:10]), nn.sigmoid(generated)])
        return state, {**outputs, "images": images.reshape(-1, 8, 8, 1)}


class DrawAction(jaxloop.Action):
    """Draws the images of an evaluation: test digits, their reconstructions, and generated digits."""

    def __call__(self, state, outputs, *, step_num, **kwargs):
        figure, axes = plt.subplots(3, 10, figsize=(7, 2.6), layout="constrained")
        for axis, image in zip(axes.flat, outputs["images"][-1], strict=True):
            axis.imshow(image, cmap="gray_r", vmin=0, vmax=1)
            axis.set(xticks=[], yticks=[])
        for axis, name in zip(axes[:, 0], ["test", "reconstructed", "generated"], strict=True):
            axis.set_ylabel(name, rotation=0, ha="right", va="center")
        figure.suptitle(f"after {step_num} steps", fontsize="medium")
        figure.savefig(WORKDIR / f"step_{step_num}.png", dpi=100)
        plt.close(figure)


images, _ = load_digits(return_X_y=True)
images = np.random.default_rng(0).permutation(images / 16).astype(np.float32)
batches = [{"pixels": rows} for rows in images[:1536].reshape(24, 64, 64)]

train_step = VAEStep(jax.random.key(0), VAE(), optax.adam(3e-3), train=True)
test_step = VAEStep(jax.random.key(0), VAE())
summaries = jaxloop.SummaryAction(jaxloop.default_writer(WORKDIR), prefix="test/")
outer_loop = jaxloop.OuterLoop(
    jaxloop.TrainLoop(train_step), [jaxloop.EvalLoop(test_step, end_actions=[DrawAction(), summaries])]
)
state, _ = outer_loop(
    train_step.initialize_model([[1, 64], jax.random.key(0)]),
    train_dataset=batches,
    train_epochs=50,
    eval_specs=[jaxloop.EvalSpec([{"pixels": images[1536:]}], interval=at(100) | every(steps=600), name="test")],
)
for step, loss, divergence in zip(*outer_loop.history.collect("steps", "test.loss", "test.divergence"), strict=True):
    print(f"step {step:4}: test loss {loss:.1f} nats, of which {divergence:.1f} are the divergence of the latents")
