"""Evaluates both the parameters and their exponential moving average (EMA).

A fifth of the training labels are replaced by random ones. The parameters follow the noise in each small batch, but
their average doesn't.
"""

import jax
import numpy as np
import optax
from flax import linen as nn
from sklearn.datasets import load_digits

import jaxloop
from jaxloop import every


class Network(nn.Module):
    @nn.compact
    def __call__(self, pixels):
        return nn.Dense(10)(nn.relu(nn.Dense(128)(pixels)))


def loss(logits, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])


def accuracy(logits, batch):
    return logits.argmax(-1) == batch["label"]


def make_step(**options):
    return jaxloop.LossStep(jax.random.key(0), Network(), **options, loss=loss, metrics={"accuracy": accuracy})


rng = np.random.default_rng(0)
pixels, labels = load_digits(return_X_y=True)
order = rng.permutation(len(labels))
pixels, labels = (pixels[order] / 16).astype(np.float32), labels[order]
test_batch = {"pixels": pixels[1200:], "label": labels[1200:]}
train_labels = np.where(rng.random(1200) < 0.2, rng.integers(10, size=1200), labels[:1200])


def make_batch(number):
    rows = np.random.default_rng(number).choice(1200, 32)
    return {"pixels": pixels[rows], "label": train_labels[rows]}


train_step = make_step(optimizer=optax.adam(1e-2), train=True, ema=0.99)
outer_loop = jaxloop.OuterLoop(
    jaxloop.TrainLoop(train_step),
    [jaxloop.EvalLoop(make_step()), jaxloop.EvalLoop(make_step(use_ema=True))],
)
specs = [jaxloop.EvalSpec([test_batch], interval=every(steps=100), name=name) for name in ("plain", "average")]
state, _ = outer_loop(
    train_step.initialize_model([1, 64]),
    train_dataset=jaxloop.from_index(make_batch),
    train_total_steps=500,
    eval_specs=specs,
)
steps, plain = outer_loop.history.collect("steps", "plain.accuracy")
average = outer_loop.history.collect("average.accuracy")
for step, of_parameters, of_average in zip(steps, plain, average, strict=True):
    print(f"step {step}: parameters {of_parameters:.1%}, their average {of_average:.1%}")
