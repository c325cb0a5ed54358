"""jaxloop: a training-loop framework for JAX.

Five nouns, and one word for "when":

- `Step`: what happens to one batch, `preprocess_batch -> begin -> run -> end`; `run` is pure, jitted and sharded.
- `Partitioner`: where arrays live, on one device or over a mesh.
- `Loop`: a bounded series of steps over one dataset: `TrainLoop`, `EvalLoop`.
- `Action`: a side effect at chosen moments: summaries, checkpoints, progress, early stopping, your own.
- `OuterLoop`: the experiment, made of train loops, eval loops by their `EvalSpec`, resume and stop.
- `Schedule`: *when*, for the interval of an action or an evaluation: `every(steps=100) | last()`, `at(...)`, ...

A checkpoint is the whole run: a run that was killed, and is started again, ends as if nothing had happened.

Beside them: `TrainState`, Flax's with all of a model's variables; `SummaryAction(default_writer(workdir))` for
TensorBoard and `CheckpointAction(directory)`; `summarize(outputs)` for example-weighted means. `Step` shows how to
write a step, with a Linen module or an NNX class; `OuterLoop` how to run an experiment.

The state that a step or a train loop is given is donated: go on with the one that it returns. `state.step` counts
completed optimizer updates, and is the only count.
"""

from jaxloop.action_loop import ActionLoop
from jaxloop.actions import (
    Action,
    CheckpointAction,
    EarlyStoppingAction,
    LearningRateAction,
    ProfileAction,
    ProgressAction,
    SummaryAction,
    default_writer,
)
from jaxloop.checkpoint import CheckpointError
from jaxloop.compilation_cache import enable_compilation_cache
from jaxloop.data import from_index, prefetch, skippable
from jaxloop.eval_loop import EvalLoop
from jaxloop.failures import replay
from jaxloop.fitting import fit, lr_schedule
from jaxloop.history import History
from jaxloop.loop import Loop
from jaxloop.loss_step import LossStep
from jaxloop.metrics import LoopOutputs, summarize
from jaxloop.outer_loop import STOP_LOOP, CheckpointSpec, EvalContext, EvalSpec, OuterLoop
from jaxloop.partition import (
    DataParallelPartitioner,
    ExplicitPartitioner,
    FSDPPartitioner,
    Partitioner,
    RulesPartitioner,
    SingleDevicePartitioner,
    SPMDPartitioner,
)
from jaxloop.schedules import Elapsed, Schedule, after, always, at, every, first, last, never
from jaxloop.stat_loop import StatLoop
from jaxloop.step import Step
from jaxloop.train_loop import TrainLoop
from jaxloop.types import Batch, BatchSpec, MetricType, MetricWithMetadata, Output, PRNGType, State, TrainState

__version__ = "0.1.0"

__all__ = [
    "STOP_LOOP",
    "Action",
    "ActionLoop",
    "Batch",
    "BatchSpec",
    "CheckpointAction",
    "CheckpointError",
    "CheckpointSpec",
    "DataParallelPartitioner",
    "EarlyStoppingAction",
    "Elapsed",
    "EvalContext",
    "EvalLoop",
    "EvalSpec",
    "ExplicitPartitioner",
    "FSDPPartitioner",
    "History",
    "LearningRateAction",
    "Loop",
    "LoopOutputs",
    "LossStep",
    "MetricType",
    "MetricWithMetadata",
    "OuterLoop",
    "Output",
    "PRNGType",
    "Partitioner",
    "ProfileAction",
    "ProgressAction",
    "RulesPartitioner",
    "SPMDPartitioner",
    "Schedule",
    "SingleDevicePartitioner",
    "StatLoop",
    "State",
    "Step",
    "SummaryAction",
    "TrainLoop",
    "TrainState",
    "after",
    "always",
    "at",
    "default_writer",
    "enable_compilation_cache",
    "every",
    "first",
    "fit",
    "from_index",
    "last",
    "lr_schedule",
    "never",
    "prefetch",
    "replay",
    "skippable",
    "summarize",
]
