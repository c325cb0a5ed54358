"""Trains for a few steps, for `moments.second_start`: `python -m benchmarks.start CACHE_DIRECTORY [--by-hand]`.

Prints two numbers as JSON: the seconds that it took, including imports, and the number of programs that XLA compiled.
"""

import json
import sys
import time

START = time.perf_counter()
NUM_STEPS = 3


def train(cache_directory: str) -> None:
    """Trains with a `TrainLoop`."""
    import jax

    import jaxloop
    from benchmarks import contestants, workloads

    jaxloop.enable_compilation_cache(cache_directory)
    workload = workloads.workload("W2")
    step = contestants.WorkloadStep(workload)
    state = step.initialize_model([1, *workload.input_shape])
    state, _ = jaxloop.TrainLoop(step)(state, workload.batches(), NUM_STEPS)
    jax.block_until_ready(state)


def train_by_hand(cache_directory: str) -> None:
    """Trains with a hand-written loop."""
    import itertools

    import jax
    import jax.numpy as jnp
    from flax.training.train_state import TrainState

    from benchmarks import workloads

    jax.config.update("jax_compilation_cache_dir", cache_directory)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    workload = workloads.workload("W2")

    @jax.jit
    def initialize(key):
        params = workload.model.init(key, jnp.zeros([1, *workload.input_shape]))["params"]
        state = TrainState.create(apply_fn=workload.model.apply, params=params, tx=workload.optimizer)
        return state.replace(step=jnp.int32(0))

    step = jax.jit(workload.train_step, donate_argnums=0)
    state = initialize(jax.random.key(0))
    for batch in itertools.islice(workload.batches(), NUM_STEPS):
        state, _ = step(state, batch)
    jax.block_until_ready(state)


def main(cache_directory: str, *options: str) -> dict[str, float]:
    import jax

    counts = {"/jax/core/compile/backend_compile_duration": 0, "/jax/compilation_cache/cache_hits": 0}

    def count(event, *args, **kwargs):
        if event in counts:
            counts[event] += 1

    jax.monitoring.register_event_duration_secs_listener(count)
    jax.monitoring.register_event_listener(count)
    (train_by_hand if options else train)(cache_directory)
    compiled_or_cached, cached = counts.values()  # The first event also occurs for programs that are in the cache.
    return {"seconds": time.perf_counter() - START, "compilations": compiled_or_cached - cached}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
