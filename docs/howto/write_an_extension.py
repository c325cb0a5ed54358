"""An extension that sends a message when a run ends, however it ends."""

import contextlib

import jax
import numpy as np
import optax
from flax import nnx

import jaxloop
from jaxloop import every


class Message(jaxloop.Extension):
    def begin(self, experiment):
        self.workdir, self.history, self.batches = experiment.workdir, experiment.history, 0

    def batch(self, batch, step_num):  # Called for each batch that a step uses.
        self.batches += 1

    def end(self, now, reason, error):
        if reason != "a detour":  # After a detour, the run continues from an earlier checkpoint.
            newest = self.history.last("train.loss")  # (progress, loss), or None without a row.
            loss = "no loss yet" if newest is None else f"loss {newest[1]:.3f}"
            send(f"{self.workdir.name}: {reason}; step {now.steps}, {self.batches} batches, {loss}")


def send(text):  # For example, an HTTP request with a timeout: the run waits for it.
    print(text)


def make_batch(number):
    x = np.random.default_rng(number).normal(size=[32, 3]).astype(np.float32)
    return {"x": x, "y": x.sum(axis=-1, keepdims=True)}


def make_batch_or_fail(number):
    if number == 27:
        raise OSError("The disk is gone.")
    return make_batch(number)


def loss(predictions, batch):
    return ((predictions - batch["y"]) ** 2).mean(axis=-1)


def train(workdir, make_batch):
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    step = jaxloop.LossStep(jax.random.key(0), model, optax.sgd(0.1), train=True, loss=loss)
    outer_loop = jaxloop.OuterLoop(
        jaxloop.TrainLoop(step), workdir=workdir, extensions=[Message()], log_interval=every(steps=10)
    )
    outer_loop(step.initialize_model(), jaxloop.from_index(make_batch), train_total_steps=40)


train("runs/good", make_batch)
with contextlib.suppress(OSError):
    train("runs/bad", make_batch_or_fail)
