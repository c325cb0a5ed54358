"""Trains a small network to imitate a large one, whose parameters are stored in the state and never change."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from sklearn import datasets

import jaxloop

TEMPERATURE = 4.0


class MLP(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(10)(nn.relu(nn.Dense(self.width)(x)))


class State(jaxloop.TrainState):
    teacher: Any = None  # The teacher's parameters, which have no gradients or optimizer state.


class DistillationStep(jaxloop.Step):
    teacher_model = MLP(256)

    def run(self, state, batch):
        teacher_logits = self.teacher_model.apply({"params": state.teacher}, batch["image"]) / TEMPERATURE

        def loss_fn(params):
            logits = state.apply_fn({"params": params}, batch["image"])
            loss = optax.kl_divergence(nn.log_softmax(logits / TEMPERATURE), nn.softmax(teacher_logits)).mean()
            return loss, {"loss": loss, "accuracy": jnp.mean(logits.argmax(-1) == batch["label"])}

        grads, outputs = jax.grad(loss_fn, has_aux=True)(state.params)
        return (state.apply_gradients(grads=grads) if self.train else state), outputs


def cross_entropy(logits, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses, {"accuracy": logits.argmax(-1) == batch["label"]}


images, labels = datasets.load_digits(return_X_y=True)
images = (images / 16).astype(np.float32)
test = jaxloop.EvalSpec([{"image": images[900:], "label": labels[900:]}], name="test")


def batches(num_examples):
    def batch_of(number):
        rows = np.random.default_rng(number).choice(num_examples, 64)
        return {"image": images[rows], "label": labels[rows]}

    return jaxloop.from_index(batch_of)


def train(step, eval_step, state, num_examples):
    outer_loop = jaxloop.OuterLoop(jaxloop.TrainLoop(step), [jaxloop.EvalLoop(eval_step)])
    state, _ = outer_loop(state, batches(num_examples), 1000, 500, eval_specs=[test])
    return state, outer_loop.history.last("test.accuracy")[1]


def plain(width, train=False):
    optimizer = {"optimizer": optax.adam(3e-3)} if train else {}
    return jaxloop.LossStep(jax.random.key(0), MLP(width), train=train, loss=cross_entropy, **optimizer)


step = plain(256, train=True)
teacher, accuracy = train(step, plain(256), step.initialize_model([1, 64]), 900)
print(f"teacher with 256 units, on 900 labels: {accuracy:.1%}")

step = plain(16, train=True)
_, accuracy = train(step, plain(16), step.initialize_model([1, 64]), 100)
print(f"student with 16 units, on 100 labels: {accuracy:.1%}")

step = DistillationStep(jax.random.key(0), MLP(16), optax.adam(3e-3), train=True)
student = State(**vars(step.initialize_model([1, 64])), teacher=teacher.params)
_, accuracy = train(step, DistillationStep(jax.random.key(0), MLP(16)), student, 900)
print(f"student with 16 units, distilled without labels: {accuracy:.1%}")
