"""Trains in one or several processes; the first one writes losses and states: `processes.py FILE [FAULT]`."""

import os
import signal
import sys

import jax
import numpy as np
import optax
from jax.experimental import multihost_utils
from programs.models import Network, batch_of, squares

import jaxloop
from jaxloop import distributed, partition

distributed.initialize()
file, fault = (*sys.argv[1:], None)[:2]
mesh = partition.create_mesh(data=-1)


def fail():
    if fault == "exception":
        raise OSError("the disk is gone")
    os.kill(os.getpid(), signal.SIGKILL)


def batches():
    for number in range(50):
        if fault and number == 20 and jax.process_index() == 1:
            fail()
        (own,) = jaxloop.data.shard_for_process([batch_of(number, rows=16, features=8)])
        yield own


found = {}
for partitioner in (jaxloop.DataParallelPartitioner(mesh, "data"), jaxloop.FSDPPartitioner(mesh, min_size=1)):
    step = jaxloop.LossStep(jax.random.key(0), Network(), optax.adam(1e-2), partitioner, train=True, loss=squares)
    state, outputs = jaxloop.TrainLoop(step)(step.initialize_model([1, 8]), batches())
    name = type(partitioner).__name__
    found[f"{name} losses"] = np.array(outputs["loss"])
    for path, leaf in jaxloop.base.checks.leaves_by_path(state).items():
        found[f"{name} {path}"] = multihost_utils.process_allgather(leaf, tiled=True)
    print(f"{name}: step {int(state.step)} on {jax.device_count()} devices")
if jax.process_index() == 0:
    np.savez(file, **found)
