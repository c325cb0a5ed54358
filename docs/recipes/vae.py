"""Train a variational autoencoder on digits, and draw reconstructions and samples at evaluations."""

import jax
import jax.numpy as jnp
import matplotlib.image
import numpy as np
import optax
from flax import linen as nn
from sklearn import datasets

import jaxloop
from jaxloop import every

LATENTS = 8


class VAE(nn.Module):
    def setup(self):
        self.encoder = nn.Sequential([nn.Dense(128), nn.relu, nn.Dense(2 * LATENTS)])
        self.decoder = nn.Sequential([nn.Dense(128), nn.relu, nn.Dense(64)])

    def __call__(self, images, key=None):
        mean, log_var = jnp.split(self.encoder(images), 2, axis=-1)
        latents = mean if key is None else mean + jnp.exp(log_var / 2) * jax.random.normal(key, mean.shape)
        return self.decoder(latents), mean, log_var

    def decode(self, latents):
        return nn.sigmoid(self.decoder(latents))


class VAEStep(jaxloop.Step):
    def run(self, state, batch):
        def loss_fn(params):
            key = self.prng_key(state.step) if self.train else None
            logits, mean, log_var = state.apply_fn({"params": params}, batch["image"], key)
            reconstruction = optax.sigmoid_binary_cross_entropy(logits, batch["image"]).sum(axis=-1).mean()
            kl = 0.5 * (jnp.exp(log_var) + mean**2 - 1 - log_var).sum(axis=-1).mean()
            outputs = {"elbo": -reconstruction - kl, "kl": kl}
            if not self.train:
                outputs["reconstructed"] = nn.sigmoid(logits[:10])
            return reconstruction + kl, outputs

        grads, outputs = jax.grad(loss_fn, has_aux=True)(state.params)
        return (state.apply_gradients(grads=grads) if self.train else state), outputs


class DrawImages(jaxloop.Action):
    """Draws ten test images, their reconstructions and ten samples."""

    def __call__(self, state, outputs, *, step_num, **kwargs):
        noise = np.random.default_rng(0).normal(size=[10, LATENTS]).astype(np.float32)
        samples = state.apply_fn({"params": state.params}, noise, method="decode")
        rows = [test_images[:10], outputs["reconstructed"][0], samples]
        image = np.block(
            [[np.pad(digit.reshape(8, 8), 1, constant_values=1) for digit in np.asarray(row)] for row in rows]
        )
        matplotlib.image.imsave(f"vae_{step_num}.png", np.kron(image, np.ones([6, 6])), cmap="gray_r")


images = (datasets.load_digits().images.reshape(-1, 64) / 16).astype(np.float32)
train_images, test_images = images[:1500], images[1500:]


def batch_of(number):
    return {"image": train_images[np.random.default_rng(number).choice(1500, 64)]}


train_step = VAEStep(jax.random.key(0), VAE(), optax.adam(2e-3), train=True)
eval_loop = jaxloop.EvalLoop(VAEStep(jax.random.key(0), VAE()), end_actions=[DrawImages()])
outer_loop = jaxloop.OuterLoop(jaxloop.TrainLoop(train_step), [eval_loop])
test = jaxloop.EvalSpec([{"image": test_images}], interval=every(steps=1000), name="test")
outer_loop(train_step.initialize_model([1, 64]), jaxloop.from_index(batch_of), 3000, eval_specs=[test])

for step, elbo, kl in zip(*outer_loop.history.collect("steps", "test.elbo", "test.kl"), strict=True):
    print(f"step {step}: ELBO {elbo:.1f} nats, of which KL {kl:.1f}")
