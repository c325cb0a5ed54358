"""Checks what jaxloop predicts for steps on TPUs that this machine doesn't have; for `chaos.py`."""

import random

import jax
import numpy as np
import optax
from flax import linen as nn

import jaxloop
from jaxloop import check
from jaxloop.check import topology
from jaxloop.check.costs import moved_to
from jaxloop.partition import create_mesh
from jaxloop.step import cost

NAMES = ("v5e:1x1", "v5e:2x4", "v6e:2x4", "v5p:2x2x1", "v5e:16x16")
PARTITIONERS = {
    "data": lambda: jaxloop.DataParallelPartitioner(create_mesh(data=-1), "data"),
    "fsdp": lambda: jaxloop.FSDPPartitioner(create_mesh(data=-1)),
}


class Wide(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.relu(nn.Dense(self.width)(x)))


def problems_of(seed):
    """Returns inconsistencies between `largest_batch`, `cost_analysis` and the memory of one random step."""
    rng, problems = random.Random(seed), []
    name, partitioner = NAMES[seed % len(NAMES)], PARTITIONERS[rng.choice(list(PARTITIONERS))]()
    loss = lambda outputs, batch: ((outputs - batch["y"]) ** 2).mean(axis=-1)
    model = Wide(rng.randint(2**20, 2**22) // 128 * 128)
    step = jaxloop.LossStep(jax.random.key(0), model, optax.sgd(1e-3, momentum=0.9), partitioner, train=True, loss=loss)
    state = step.abstract_state([1, 2])
    batch = lambda rows: {"x": ((rows, 2), np.float32), "y": ((rows, 1), np.float32)}
    devices = topology.devices_of(name)
    largest, memory = check.largest_batch(step, state, batch(1), topology=name), topology.memory_of(devices[0])

    def fits(rows):
        try:
            return check.cost_analysis(step, state, batch(rows * len(devices)), topology=name).peak_bytes <= memory
        except cost.DeviceMemoryError:
            return False

    for rows in {1, largest // 2, largest, largest + 1, 2 * largest} - {0}:
        if fits(rows) != (rows <= largest):
            problems.append(f"{name}: largest_batch is {largest}, but {rows} rows fit: {fits(rows)}")
    moved_step = moved_to(step, devices)
    placed = moved_step.partitioner.layout_of(state)
    found = check.cost_analysis(step, state, batch(len(devices)), topology=name)
    if found.argument_bytes < moved_step.partitioner.report(placed).bytes_per_device:
        problems.append(f"{name}: {found} has less memory than the state, {moved_step.partitioner.report(placed)}")
    return problems
