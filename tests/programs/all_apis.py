"""Calls `fit` twice, hits a NaN and evaluates checkpoints, in several processes: `all_apis.py DIRECTORY`."""

import sys

import jax
import numpy as np
import optax
from flax import linen as nn
from programs.models import batch_of, squares

import jaxloop
from jaxloop import data, distributed, partition

distributed.initialize()
workdir = sys.argv[1]


batches = data.shard_for_process([batch_of(number) for number in range(12)])
partitioner = jaxloop.DataParallelPartitioner(partition.create_mesh(data=-1), "data")
options = {"loss": squares, "optimizer": optax.sgd(0.1), "workdir": workdir, "partitioner": partitioner}
for train_epochs in (2, 3):
    datasets = batches[:10], batches[10:]
    state, history = jaxloop.fit(nn.Dense(1), *datasets, train_epochs=train_epochs, progress=None, **options)
    print("fit", int(state.step), history.collect("steps", "eval.loss")[0])

step, eval_step = (
    jaxloop.LossStep(jax.random.key(0), nn.Dense(1), optax.sgd(0.1), partitioner, train=train, loss=squares)
    for train in (True, False)
)


def batches_with_nan():
    for number in range(200):
        batch = batches[number % 10]
        is_nan = number == 70 and jax.process_index() == 1
        yield {**batch, "x": batch["x"] * np.float32(np.nan if is_nan else 1)}


train_loop = jaxloop.TrainLoop(step, nan_policy="raise")
try:
    train_loop(step.initialize_model([1, 3]), batches_with_nan())
except FloatingPointError as error:
    print("bad number in step", error.step_num, "seen after step", train_loop.step_num)

spec = jaxloop.CheckpointSpec(f"{workdir}/checkpoints", iterate_interval_secs=0)
outer_loop = jaxloop.OuterLoop(None, [jaxloop.EvalLoop(eval_step)], spec)
outer_loop(eval_step.initialize_model([1, 3]), eval_specs=[jaxloop.EvalSpec(batches[10:])])
print("evaluated", outer_loop.history.collect("steps", "eval.loss")[0])
