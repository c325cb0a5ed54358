"""Runs with batches that make the loss spike, for the chaos test of `SpikeGuard`."""

import hashlib
import itertools
import random

import jax
import numpy as np
import optax
from flax import linen as nn
from programs.acts import Do
from programs.models import squares

import jaxloop
from jaxloop import at, every

TOTAL, EPOCH, SPIKES = 300, 70, 5


class Noisy(nn.Module):
    """A model with dropout."""

    @nn.compact
    def __call__(self, x, *, train):
        return nn.Dense(1)(nn.Dropout(0.2, deterministic=not train)(nn.Dense(16)(x)))


def digest_of(state):
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(jax.device_get(state)):
        found.update(np.asarray(leaf).tobytes())
    return found.hexdigest()


def spikes_of(seed):
    """Returns the numbers of the batches that spike, at least 30 apart."""
    rng = random.Random(seed)
    return [number * 48 + rng.randint(30, 48) for number in range(SPIKES)]


def batches(seed, left_out=()):
    """Yields the batches of all epochs, in a different order in each, except those that are left out."""
    spikes = spikes_of(seed)
    for number in itertools.count(1):
        epoch, index = divmod(number - 1, EPOCH)
        if number not in left_out:
            rng = np.random.default_rng([seed, epoch, int(np.random.default_rng(epoch).permutation(EPOCH)[index])])
            x = rng.normal(size=(8, 4)).astype(np.float32)
            y = x.sum(axis=-1, keepdims=True) + rng.normal(size=(8, 1)).astype(np.float32)
            yield {"x": x, "y": y * np.float32([np.nan, 1e3][number % 2] if number in spikes else 1)}


def experiment(directory, report, seed, guarded=True, total=TOTAL):
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1e-2))
    step = jaxloop.LossStep(jax.random.key(seed), Noisy(), optimizer, train=True, loss=squares)
    interval = every(steps=[1, 4, 10][seed % 3])
    guard = jaxloop.SpikeGuard("loss", sigmas=8, window=20, at_most=3 * SPIKES, interval=interval)
    saving = jaxloop.CheckpointAction(directory / "checkpoints", every(steps=12) | at(0), keep=1000)
    digests = {}

    def record(state, step_num, **_):
        report("action", step_num)
        digests[step_num] = digest_of(state)

    recording = Do(record, every(steps=1) | at(0))
    actions = [guard, recording, saving] if guarded else [recording, saving]
    train_loop = jaxloop.TrainLoop(step, end_actions=actions, steps_per_dispatch=[1, 4][seed % 2])
    spec = jaxloop.CheckpointSpec(directory / "checkpoints")
    outer_loop = jaxloop.OuterLoop(train_loop, checkpoint_spec=spec, workdir=directory, log_interval=every(steps=5))
    return outer_loop, step.initialize_model([1, 4]), digests


def run(directory, report, *, seed):
    """Trains to the end; returns digests of the state, the history, and the numbers of the batches left out."""
    outer_loop, state, _ = experiment(directory, report, seed)
    state, _ = outer_loop(state, jaxloop.skippable(lambda: batches(seed)), TOTAL, train_loop_steps=50)
    rows = outer_loop.history.rows
    detours = [row.logs["detour"] for row in rows if "detour" in row.logs]
    left_out = [number for each in detours for number in range(each["first_batch"], each["last_batch"] + 1)]
    return {"state": digest_of(state), "history": train_rows(rows), "left_out": left_out}


def without(directory, report, *, seed, left_out, rewinds):
    """Trains on data without these batches; returns the same results, and differences from rewound states."""
    outer_loop, state, digests = experiment(directory, report, seed, guarded=False)
    state, _ = outer_loop(state, jaxloop.skippable(lambda: batches(seed, left_out)), TOTAL, train_loop_steps=50)
    problems, rng = [], random.Random(seed)
    guarded, _, _ = experiment(directory.parent / rewinds, report, seed)
    for step_num in rng.sample(range(1, TOTAL + 1), 3):
        data = jaxloop.skippable(lambda: batches(seed))
        before = jaxloop.rewind(directory.parent / rewinds, guarded, step_num, None, data, train_loop_steps=50)
        if digest_of(before.state) != digests[step_num - 1]:
            problems.append(f"the rewound state before step {step_num} differs")
        batch = next(itertools.islice(batches(seed, left_out), step_num - 1, None))
        if any(before.batch[name].tobytes() != batch[name].tobytes() for name in batch):
            problems.append(f"the rewound batch of step {step_num} differs")
    return {"state": digest_of(state), "history": train_rows(outer_loop.history.rows), "problems": problems}


def train_rows(rows):
    return [[row.elapsed.steps, row.elapsed.samples, row.logs["train"]] for row in rows if "train" in row.logs]
