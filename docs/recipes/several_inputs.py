"""Trains a model with two inputs (an image and a dict of numbers) on nested batches."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from sklearn import datasets

import jaxloop


class TwoInputs(nn.Module):
    """Encodes an image and a few numbers that describe it, and classifies the combined encoding."""

    @nn.compact
    def __call__(self, image, table):
        pixels = nn.relu(nn.Dense(32)(image.reshape(len(image), -1)))
        numbers = nn.relu(nn.Dense(8)(jnp.stack([table["ink"], table["width"]], axis=-1)))
        return nn.Dense(10)(jnp.concatenate([pixels, numbers], axis=-1))


def loss(logits, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses, {"accuracy": logits.argmax(-1) == batch["label"]}


images, labels = datasets.load_digits(return_X_y=True)
images = (images / 16).astype(np.float32).reshape(-1, 8, 8)
ink, width = images.mean(axis=(1, 2)), (images.max(axis=1) > 0.5).mean(axis=1).astype(np.float32)


def batch_of(rows):
    inputs = {"image": images[rows], "table": {"ink": ink[rows], "width": width[rows]}}
    return {"inputs": inputs, "label": labels[rows]}


def train_batch(number):
    return batch_of(np.random.default_rng(number).choice(900, 64))


# The shapes of one batch of inputs, under the names of the model's arguments.
spec = {"image": [1, 8, 8], "table": {"ink": [1], "width": [1]}}
train_step = jaxloop.LossStep(jax.random.key(0), TwoInputs(), optax.adam(3e-3), train=True, loss=loss)
eval_step = jaxloop.LossStep(jax.random.key(0), TwoInputs(), loss=loss)
outer_loop = jaxloop.OuterLoop(jaxloop.TrainLoop(train_step), [jaxloop.EvalLoop(eval_step)])
test = jaxloop.EvalSpec([batch_of(slice(900, 1400)), batch_of(slice(1400, 1797))], name="test")
outer_loop(train_step.initialize_model(spec), jaxloop.from_index(train_batch), 600, 200, [test])

for step, accuracy in zip(*outer_loop.history.collect("steps", "test.accuracy"), strict=True):
    print(f"step {step}: test accuracy {accuracy:.1%}")
