"""`fit` twice, bad numbers, and the evaluation of checkpoints, in several processes: `doors.py DIRECTORY`."""

import sys

import jax
import numpy as np
import optax
from flax import linen as nn

import jaxloop
from jaxloop import data, distributed, partition

distributed.initialize()
workdir = sys.argv[1]


def make_batch(number):
    x = np.random.default_rng(number).normal(size=[8, 3]).astype(np.float32)
    return {"x": x, "y": x.sum(-1, keepdims=True)}


def loss(outputs, batch):
    return ((outputs - batch["y"]) ** 2).mean(-1)


mine = data.shard_for_process([make_batch(number) for number in range(12)])
for train_epochs in (2, 3):
    state, history = jaxloop.fit(
        nn.Dense(1),
        mine[:10],
        mine[10:],
        loss=loss,
        optimizer=optax.sgd(0.1),
        train_epochs=train_epochs,
        workdir=workdir,
        partitioner="auto",
        progress=None,
    )
    print("fit", int(state.step), history.collect("steps", "eval.loss")[0])

partitioner = jaxloop.DataParallelPartitioner(partition.create_mesh(data=-1), "data")
step, eval_step = (
    jaxloop.LossStep(jax.random.key(0), nn.Dense(1), optax.sgd(0.1), partitioner, train=train, loss=loss)
    for train in (True, False)
)


def with_a_bad_number():
    for number in range(200):
        batch = mine[number % 10]
        is_bad = number == 70 and jax.process_index() == 1
        yield {**batch, "x": batch["x"] * np.float32(np.nan if is_bad else 1)}


train_loop = jaxloop.TrainLoop(step, nan_policy="raise")
try:
    train_loop(step.initialize_model([1, 3]), with_a_bad_number())
except FloatingPointError as error:
    print("bad number in step", error.step_num, "seen after step", train_loop.step_num)

spec = jaxloop.CheckpointSpec(f"{workdir}/checkpoints", iterate_interval_secs=0)
outer_loop = jaxloop.OuterLoop(None, [jaxloop.EvalLoop(eval_step)], spec)
outer_loop(eval_step.initialize_model([1, 3]), eval_specs=[jaxloop.EvalSpec(mine[10:])])
print("evaluated", outer_loop.history.collect("steps", "eval.loss")[0])
