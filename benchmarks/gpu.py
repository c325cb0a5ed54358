"""Measurements on a GPU: a model that keeps it busy, and models so small that the host limits the speed."""

import dataclasses
import statistics
from collections.abc import Callable

import jax
import jax.numpy as jnp

from benchmarks import lineup, moments, transformer, workloads
from benchmarks.lineup import DEFAULTS, FUSED, REFERENCE, SCAN
from benchmarks.rounds import Comparison, compare


def matmul_peak(size: int = 8192, times: int = 50) -> float:
    """Returns the FLOPs per second of a large bfloat16 matrix product, an upper bound for models."""

    @jax.jit
    def multiply(one, other):
        product = jax.lax.fori_loop(0, times, lambda _, matrix: matrix @ other, one)
        return product[0, 0]

    # Random numbers, because chips use less power on zeros, and then run faster. The scale keeps the products bounded.
    matrix = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16) / size**0.5
    seconds = [moments.timed(lambda: multiply(matrix, matrix)) for _ in range(4)][1:]  # The first one compiles.
    return 2 * size**3 * times / min(seconds)


def transformer_step(num_rounds: int = 4) -> Comparison:
    """Compares step times, and computes the share of the peak that the model reaches."""
    workload = transformer.workload()
    chosen = {name: lineup.contestants_for(workload)[name] for name in (REFERENCE, DEFAULTS, FUSED)}
    comparison = compare(workload, chosen, num_rounds)
    comparison.unit = "ms a step"
    num_params = sum(leaf.size for leaf in jax.tree.leaves(workload.first_params))
    flops, peak = transformer.step_flops(workload.model, num_params, workload.batch_size), matmul_peak()
    comparison.figures["million parameters"] = num_params / 1e6
    comparison.figures["measured peak, TFLOP/s"] = peak / 1e12
    for name, seconds in comparison.seconds.items():
        comparison.figures[f"MFU of {name}, %"] = 100 * flops / statistics.median(seconds) / peak
    return comparison


def small_model(name: str, num_rounds: int = 8) -> Comparison:
    """Compares contestants on a model whose step takes less time to compute than to dispatch."""
    workload = workloads.workload(name)
    workload = dataclasses.replace(workload, name=f"{name} on the GPU", title=f"{workload.title}, on the GPU")
    fastest = (REFERENCE, SCAN, DEFAULTS, FUSED)
    return compare(workload, {each: lineup.contestants_for(workload)[each] for each in fastest}, num_rounds)


def on_gpu(moment: Callable[[], Comparison]) -> Comparison:
    comparison = moment()
    return dataclasses.replace(comparison, name=f"{comparison.name} on the GPU")


def compare_all() -> list[Comparison]:
    """Runs all GPU measurements; returns an empty list if JAX has no GPU."""
    if jax.default_backend() != "gpu":
        return []
    return [
        transformer_step(),
        small_model("W0"),
        small_model("W1"),
        on_gpu(moments.slow_data),
        on_gpu(lambda: moments.checkpoint_stall(200)),
    ]
