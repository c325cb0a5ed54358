"""The cost per member and step of an ensemble, relative to runs one after another."""

import functools
import itertools

import jax
import jax.numpy as jnp

import jaxloop
from benchmarks import contestants, workloads
from benchmarks.moments import compare_functions, timed
from benchmarks.rounds import Comparison
from benchmarks.workloads import Workload

RUNS, LOOPS = "hand-written loops, one after another", "TrainLoops, one after another"
BY_HAND, ENSEMBLE, FUSED = "hand-written vmap", "Ensemble", "Ensemble, steps_per_dispatch=32"
NUM_MEMBERS = 16
NUM_STEPS = {"W0": 1024, "W1": 512, "W2": 2}  # Of each member, in a round.


def runs(workload: Workload, contestant: contestants.Contestant, num_steps: int) -> float:
    train = contestant(workload)
    return sum(train(num_steps).secs_per_step for _ in range(NUM_MEMBERS)) / NUM_MEMBERS


def by_hand(workload: Workload, num_steps: int) -> float:
    """Maps the step function over states with a leading axis of members."""
    step = _mapped(workload)
    state = jax.tree.map(lambda leaf: jnp.stack([leaf] * NUM_MEMBERS), contestants.flax_state(workload))

    def train():
        nonlocal state
        for batch in itertools.islice(workload.batches(), num_steps):
            state, _ = step(state, batch)
        return state

    return timed(train) / num_steps / NUM_MEMBERS


@functools.cache
def _mapped(workload: Workload):
    return jax.jit(jax.vmap(workload.train_step, in_axes=(0, None)), donate_argnums=0)


def ensemble(workload: Workload, loop: jaxloop.TrainLoop, num_steps: int) -> float:
    state = jax.block_until_ready(loop.step.initialize_model([1, *workload.input_shape]))
    return timed(lambda: loop(state, workload.batches(), num_steps)[0]) / num_steps / NUM_MEMBERS


def compare_members(name: str, num_rounds: int = 5) -> Comparison:
    """Compares the seconds per member and step for a workload."""
    workload, num_steps = workloads.workload(name), NUM_STEPS[name]
    step = jaxloop.Ensemble(contestants.WorkloadStep(workload), seeds=range(NUM_MEMBERS))
    loop, fused = jaxloop.TrainLoop(step), jaxloop.TrainLoop(step, steps_per_dispatch=contestants.SCAN_LENGTH)
    hand_written, one_loop = contestants.hand_written_loop(workload), contestants.train_loop()(workload)
    functions = {
        RUNS: lambda: runs(workload, lambda _: hand_written, num_steps),
        LOOPS: lambda: runs(workload, lambda _: one_loop, num_steps),
        BY_HAND: lambda: by_hand(workload, num_steps),
        ENSEMBLE: lambda: ensemble(workload, loop, num_steps),
    }
    if workload.scans:
        functions[FUSED] = lambda: ensemble(workload, fused, num_steps)
    title = f"{NUM_MEMBERS} models of {workload.title}: time per member and step"
    return compare_functions(f"ensemble of {name}", title, functions, num_rounds, unit="us")
