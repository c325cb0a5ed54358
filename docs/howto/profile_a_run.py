"""Shows where the time of a run goes, and records a profile of a few steps."""

import pathlib
import sys

import jax
import numpy as np
import optax
from flax import nnx

import jaxloop
from jaxloop import every

x = np.random.default_rng(0).normal(size=[6400, 64]).astype(np.float32)
data = jaxloop.data.batched({"x": x, "y": x.sum(axis=-1, keepdims=True)}, 32, seed=0)
rngs = nnx.Rngs(0)
model = nnx.Sequential(nnx.Linear(64, 64, rngs=rngs), nnx.relu, nnx.Linear(64, 1, rngs=rngs))


def loss(predictions, batch):
    return ((predictions - batch["y"]) ** 2).mean(axis=-1)


step = jaxloop.LossStep(jax.random.key(0), model, optax.sgd(1e-3), train=True, loss=loss)
profile = jaxloop.ProfileAction("runs/profile", first_step=100, num_steps=5)
train_loop = jaxloop.TrainLoop(step, end_actions=[profile])
outer_loop = jaxloop.OuterLoop(train_loop, log_interval=every(steps=100))
outer_loop(step.initialize_model(), data, train_total_steps=1000)

print(outer_loop.spent, file=sys.stderr)
print("steps:", outer_loop.spent.steps)
print("traces:", len(list(pathlib.Path("runs/profile").rglob("*.xplane.pb"))))
