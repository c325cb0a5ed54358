"""Benchmarks of jaxloop against hand-written loops, clu-style loops and Keras.

    make bench
    python -m benchmarks --workloads=W0,W1 --rounds=12 --output=BENCHMARKS.md

- `workloads`: the models, optimizers and batches.
- `contestants` and `keras_contestant`: the loops that train them, each written as its users would write it.
- `lineup`: the contestants of each workload.
- `rounds`: timing. Contestants take turns, and are compared within a round.
- `moments`: costs that don't occur at every step: the end of a loop, checkpoints, waiting for data, the start.
- `part`: runs each workload in its own process.
- `gpu` and `transformer`: measurements that need a GPU.
- `targets` and `report`: the limits, and the page with the results.

This package is not installed with jaxloop.
"""
