"""Trains on arrays that are shuffled differently in each epoch, and resumes in the middle of one."""

import jax
import numpy as np
import optax
from flax import nnx

import jaxloop

rng = np.random.default_rng(0)
x = rng.normal(size=[100, 3]).astype(np.float32)
y = x.sum(axis=-1, keepdims=True)


def loss(predictions, batch):
    return ((predictions - batch["y"]) ** 2).mean(axis=-1)


def train(workdir, total_steps):
    data = jaxloop.data.batched({"x": x, "y": y}, 32, seed=7)
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    step = jaxloop.LossStep(jax.random.key(0), model, optax.sgd(0.1), train=True, loss=loss)
    outer_loop = jaxloop.OuterLoop(jaxloop.TrainLoop(step), workdir=workdir)
    state, _ = outer_loop(step.initialize_model(), data, train_total_steps=total_steps)
    return state.params


data = jaxloop.data.batched({"x": x, "y": y}, 32, seed=7, num_epochs=2)
print("rows of each batch:", [len(batch["x"]) for batch in data])

whole = train("runs/whole", 40)
train("runs/stopped", 17)  # Stops in the middle of an epoch.
resumed = train("runs/stopped", 40)
print("the same parameters:", jax.tree.all(jax.tree.map(np.array_equal, whole, resumed)))
