"""jaxloop: a training-loop framework for JAX.

The main concepts:

- `Step`: processes one batch (`preprocess_batch -> begin -> run -> end`). `run` is pure, jitted and sharded.
- `Partitioner`: decides where arrays live, on one device or across a mesh.
- `Loop`: runs a bounded number of steps over one dataset. Its subclasses are `TrainLoop` and `EvalLoop`.
- `Action`: a side effect, such as writing summaries or saving checkpoints, that runs at chosen moments.
- `OuterLoop`: runs the whole experiment: it trains, evaluates according to its `EvalSpec`s, resumes and stops.
- `Schedule`: decides when an action or an evaluation runs, as in `every(steps=100) | last()` or `at(...)`.

Checkpoints contain everything needed to resume, so a run that is killed and restarted is bit-identical to an
uninterrupted one.

The package also includes `TrainState`, which extends Flax's `TrainState` to hold all of a model's variables,
`SummaryAction(default_writer(workdir))` for TensorBoard, `CheckpointAction(directory)`, and `summarize(outputs)` for
example-weighted means. See `Step` for how to write a step with a Linen module or an NNX class, and `OuterLoop` for how
to run an experiment.

Steps and train loops donate the state that you pass them, so always continue with the state that they return. The only
counter is `state.step`, which counts completed optimizer updates.
"""

from jaxloop import check as check
from jaxloop.action_loop import ActionLoop
from jaxloop.actions import (
    Action,
    CheckpointAction,
    EarlyStoppingAction,
    LearningRateAction,
    ProfileAction,
    ProgressAction,
    SpikeGuard,
    SummaryAction,
    default_writer,
)
from jaxloop.base.compilation_cache import enable_compilation_cache
from jaxloop.checkpoint import CheckpointError
from jaxloop.data import from_index, prefetch, skippable
from jaxloop.eval_loop import EvalLoop
from jaxloop.experiment.extension import Extension
from jaxloop.history import History
from jaxloop.loop import Loop
from jaxloop.metrics import LoopOutputs, summarize
from jaxloop.models import optimizers as optimizers
from jaxloop.models.export import export
from jaxloop.models.fit import fit, lr_schedule
from jaxloop.models.loss_step import LossStep
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
from jaxloop.runs.accounts import Goodput, goodput
from jaxloop.runs.commands import tell
from jaxloop.runs.failures import replay
from jaxloop.runs.rewinding import rewind
from jaxloop.runs.watchdog import Watchdog
from jaxloop.schedules import Elapsed, Schedule, after, always, at, every, first, last, never
from jaxloop.stat_loop import StatLoop
from jaxloop.step import Step
from jaxloop.train_loop import TrainLoop
from jaxloop.types import (
    Batch,
    BatchSpec,
    MetricType,
    MetricWithMetadata,
    Output,
    PRNGType,
    State,
    TrainState,
    TurnBack,
    Weighted,
)

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
    "Extension",
    "FSDPPartitioner",
    "Goodput",
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
    "SpikeGuard",
    "StatLoop",
    "State",
    "Step",
    "SummaryAction",
    "TrainLoop",
    "TrainState",
    "TurnBack",
    "Watchdog",
    "Weighted",
    "after",
    "always",
    "at",
    "default_writer",
    "enable_compilation_cache",
    "every",
    "export",
    "first",
    "fit",
    "from_index",
    "goodput",
    "last",
    "lr_schedule",
    "never",
    "prefetch",
    "replay",
    "rewind",
    "skippable",
    "summarize",
    "tell",
]

_PUBLIC_MODULES = """action_loop actions check checkpoint data distributed eval_loop functional history loop metrics
outer_loop partition schedules stat_loop step testing train_loop types""".split()


def __dir__() -> list[str]:
    """Lists the public names, without internal modules, for tab completion."""
    return sorted([*__all__, "__version__", *(name for name in _PUBLIC_MODULES if name in globals())])
