"""The contestants of each workload, and their names."""

from benchmarks.contestants import (
    SCAN_LENGTH,
    Contestant,
    clu_style_loop,
    data_parallel,
    fit,
    fsdp,
    functional_loop,
    hand_written_loop,
    hand_written_loop_keeping_losses,
    hand_written_loop_with_logs,
    hand_written_scan,
    train_loop,
    train_loop_with_logs,
)
from benchmarks.keras_contestant import keras_fit
from benchmarks.workloads import Workload

REFERENCE = "hand-written loop"
KEEPS_LOSSES = "hand-written loop that keeps its losses"
HAND_WRITTEN_WITH_LOGS = "hand-written loop with summaries, read every 100 steps"
SCAN = "hand-written scan of 32"
DEFAULTS = "TrainLoop"
FUSED = "TrainLoop, steps_per_dispatch=32"
ON_ONE_DEVICE = "TrainLoop, DataParallelPartitioner on one device"
FSDP = "TrainLoop, FSDPPartitioner"
NAN_POLICY = "TrainLoop, nan_policy='raise'"
WITH_LOGS = "TrainLoop, with bar, summaries and history, read every 100 steps"
FUNCTIONAL = "functional loop"
FIT = "fit, without a bar"
CLU = "clu-style loop"
KERAS = "Keras 3 on JAX"
KERAS_32 = "Keras 3 on JAX, steps_per_execution=32"


def contestants_for(workload: Workload) -> dict[str, Contestant]:
    """Returns the contestants of a workload by name, the reference first."""
    is_parallel = workload.num_devices > 1
    layout = data_parallel if is_parallel else None
    lineup: dict[str, Contestant] = {
        REFERENCE: hand_written_loop,
        SCAN: hand_written_scan,
        DEFAULTS: train_loop(layout),
        FUSED: train_loop(layout, steps_per_dispatch=SCAN_LENGTH),
    }
    if is_parallel:
        return lineup | {FSDP: train_loop(fsdp)}
    lineup[KEEPS_LOSSES] = hand_written_loop_keeping_losses
    if workload.name == "W0":
        lineup[ON_ONE_DEVICE] = train_loop(data_parallel)
    if workload.name in ("W0", "W2", "W3"):
        lineup[NAN_POLICY] = train_loop(nan_policy="raise")
    if workload.name == "W1":
        lineup |= {WITH_LOGS: train_loop_with_logs, HAND_WRITTEN_WITH_LOGS: hand_written_loop_with_logs}
    lineup |= {FUNCTIONAL: functional_loop, FIT: fit, CLU: clu_style_loop}
    return {**lineup, KERAS: keras_fit(1), KERAS_32: keras_fit(SCAN_LENGTH)}
