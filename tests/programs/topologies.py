"""Checks of steps for TPUs that the machine doesn't have, for the chaos test."""

import random

import jax
import numpy as np
import optax
from flax import linen as nn

import jaxloop
from jaxloop import cost, topology
from jaxloop.partition import create_mesh

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
    """Returns what is wrong with the verdicts about one step: around its largest batch, and of its memory."""
    rng, problems = random.Random(seed), []
    name, partitioner = NAMES[seed % len(NAMES)], PARTITIONERS[rng.choice(list(PARTITIONERS))]()
    loss = lambda outputs, batch: ((outputs - batch["y"]) ** 2).mean(axis=-1)
    model = Wide(rng.randint(2**20, 2**22) // 128 * 128)
    step = jaxloop.LossStep(jax.random.key(0), model, optax.sgd(1e-3, momentum=0.9), partitioner, train=True, loss=loss)
    state = step.abstract_state([1, 2])
    batch = lambda rows: {"x": ((rows, 2), np.float32), "y": ((rows, 1), np.float32)}
    devices = topology.devices_of(name)
    most, memory = step.largest_batch(state, batch(1), topology=name), topology.memory_of(devices[0])

    def fits(rows):
        try:
            return step.cost_analysis(state, batch(rows * len(devices)), topology=name).peak_bytes <= memory
        except cost.DeviceMemoryError:
            return False

    for rows in {1, most // 2, most, most + 1, 2 * most} - {0}:
        if fits(rows) != (rows <= most):
            problems.append(f"{name}: largest_batch is {most}, and {rows} rows fit: {fits(rows)}")
    there = step.moved_to(devices)
    placed = there.partitioner.layout_of(state)
    found = step.cost_analysis(state, batch(len(devices)), topology=name)
    if found.argument_bytes < there.partitioner.report(placed).bytes_per_device:
        problems.append(f"{name}: {found} takes less than the state, {there.partitioner.report(placed)}")
    return problems
