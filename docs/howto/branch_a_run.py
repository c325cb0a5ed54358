"""Starts a second run from a checkpoint of the first, and goes back to an older step."""

import pathlib
import shutil

import jax
import numpy as np
import optax
from flax import nnx

import jaxloop
from jaxloop import checkpoint, every

x = np.random.default_rng(0).normal(size=[800, 3]).astype(np.float32)


def loss(predictions, batch):
    return ((predictions - batch["y"]) ** 2).mean(axis=-1)


def train(workdir, learning_rate, total_steps):
    data = jaxloop.data.batched({"x": x, "y": x.sum(axis=-1, keepdims=True)}, 32, seed=0)
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    step = jaxloop.LossStep(jax.random.key(0), model, optax.adam(learning_rate), train=True, loss=loss)
    directory = f"{workdir}/checkpoints"
    outer_loop = jaxloop.OuterLoop(
        jaxloop.TrainLoop(step, end_actions=[jaxloop.CheckpointAction(directory, every(steps=50), keep=None)]),
        checkpoint_spec=jaxloop.CheckpointSpec(directory),
        log_interval=every(steps=50),
    )
    outer_loop(step.initialize_model(), data, train_total_steps=total_steps)
    steps, losses = outer_loop.history.collect("steps", "train.loss")
    return {step: round(value, 3) for step, value in zip(steps, losses, strict=True)}


print("first: ", train("runs/first", 0.01, 200))

# Copy one checkpoint, and the history next to it. The new run drops the rows after the checkpoint.
source, target = pathlib.Path("runs/first/checkpoints"), pathlib.Path("runs/branch/checkpoints")
shutil.copytree(source / "100", target / "100")
shutil.copy(source / "history.jsonl", target)
print("branch:", train("runs/branch", 0.05, 200))

# Go back to step 100 in the same directory: later checkpoints move to checkpoints/abandoned.
checkpoint.abandon("runs/first/checkpoints", 101)
print("again: ", train("runs/first", 0.1, 150))
