"""Trains for a few steps, for `moments.second_start`: `python -m benchmarks.start CACHE_DIRECTORY`.

Prints two numbers as JSON: the seconds that it took, including imports, and the number of programs that XLA compiled.
"""

import json
import sys
import time

START = time.perf_counter()


def main(cache_directory: str) -> dict[str, float | str]:
    import jax

    import jaxloop
    from benchmarks import contestants, workloads

    if not hasattr(jaxloop, "enable_compilation_cache"):
        return {"absent": "This jaxloop has no enable_compilation_cache."}
    jaxloop.enable_compilation_cache(cache_directory)
    counts = {"/jax/core/compile/backend_compile_duration": 0, "/jax/compilation_cache/cache_hits": 0}

    def count(event, *args, **kwargs):
        if event in counts:
            counts[event] += 1

    jax.monitoring.register_event_duration_secs_listener(count)
    jax.monitoring.register_event_listener(count)
    workload = workloads.workload("W2")
    step = contestants.WorkloadStep(workload)
    state, _ = jaxloop.TrainLoop(step)(step.initialize_model([1, *workload.input_shape]), workload.batches(), 3)
    jax.block_until_ready(state)
    compiled_or_cached, cached = counts.values()  # The first event also occurs for programs that are in the cache.
    return {"seconds": time.perf_counter() - START, "compilations": compiled_or_cached - cached}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
