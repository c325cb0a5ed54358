"""How long jaxloop takes for what others do: the hand-written loop, clu's way, Keras.

    make bench
    python -m benchmarks --workloads=W0,W1 --rounds=12 --output=BENCHMARKS.md

- `workloads`: what is trained: models, optimizers, batches.
- `contestants`: who trains it: loops, each written as its users write it. `keras_contestant` is one more.
- `lineup`: who takes part in what.
- `rounds`: how they are timed: in turns, and compared within a round.
- `moments`: what does not happen in each step: the end of a loop, checkpoints, waiting for data, the start.
- `part`: a process for each workload.
- `gpu` and `transformer`: what there is to see on a GPU only.
- `targets` and `report`: what is to be reached, and what was.

No part of the package that is installed.
"""
