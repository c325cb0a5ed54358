"""Compares a run that turns back from a spike with one on data without the spiking batches, in several processes."""

import pathlib
import sys

import jax
import numpy as np
import optax
from flax import linen as nn
from programs.acts import saving
from programs.models import squares

import jaxloop
from jaxloop import at, distributed, every, partition

distributed.initialize()
directory = pathlib.Path(sys.argv[1])
partitioner = jaxloop.DataParallelPartitioner(partition.create_mesh(data=-1), "data")


def batch(number):
    rng = np.random.default_rng(number)
    x = rng.normal(size=(8, 4)).astype(np.float32)
    y = x.sum(axis=-1, keepdims=True) + rng.normal(size=(8, 1)).astype(np.float32)
    return {"x": x, "y": y * np.float32(1000 if number == 37 else 1)}


def train(name, actions, left_out=()):
    step = jaxloop.LossStep(jax.random.key(0), nn.Dense(1), optax.sgd(1e-2), partitioner, train=True, loss=squares)
    kept = [number for number in range(100) if number + 1 not in left_out]
    data = jaxloop.data.shard_for_process(jaxloop.from_index(lambda index: batch(kept[index])))
    outer_loop = saving(directory / name, every(steps=10) | at(0), step, *actions)
    state, _ = outer_loop(step.initialize_model([1, 4]), data, 60)
    return jax.device_get(state.params), outer_loop.history.rows


params, rows = train("guarded", [jaxloop.SpikeGuard("loss", window=16, interval=every(steps=4))])
detours = [row.logs["detour"] for row in rows if "detour" in row.logs]
left_out = [number for each in detours for number in range(each["first_batch"], each["last_batch"] + 1)]
other_params, _ = train("without", [], left_out)
same = all(np.array_equal(one, other) for one, other in zip(*map(jax.tree.leaves, (params, other_params)), strict=True))
print("left out", left_out, same)
