"""Splits each batch into micro-batches, which need less memory and give the same update."""

import jax
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import jaxloop

pixels, labels = load_digits(return_X_y=True)
data = {"x": (pixels / 16).astype(np.float32), "label": labels}


def loss(logits, batch):  # One value per example.
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])


def train(accumulate):
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(64, 1024, rngs=rngs), nnx.relu, nnx.Linear(1024, 10, rngs=rngs))
    step = jaxloop.LossStep(jax.random.key(0), model, optax.sgd(0.1), train=True, loss=loss, accumulate=accumulate)
    batch = {name: rows[:512] for name, rows in data.items()}
    cost = jaxloop.check.cost_analysis(step, step.abstract_state(), batch)
    batches = jaxloop.data.batched(data, 512, seed=0, drop_remainder=True)
    state, outputs = jaxloop.TrainLoop(step)(step.initialize_model(), batches, num_steps=30)
    return cost.temp_bytes, int(state.step), outputs["loss"][-1]


for accumulate in (1, 4):
    temp_bytes, steps, value = train(accumulate)
    print(f"accumulate={accumulate}: {temp_bytes / 2**20:.1f} MiB of temporaries, step {steps}, loss {value:.4f}")
