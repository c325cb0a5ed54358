"""jaxloop: a training-loop framework for JAX.

The main concepts:

- `Step`: processes one batch (`preprocess_batch -> begin -> run -> end`). `run` is pure, jitted and sharded.
- `Partitioner`: determines where arrays are placed, on one device or across a mesh.
- `Loop`: runs a bounded number of steps over one dataset. Its subclasses are `TrainLoop` and `EvalLoop`.
- `Action`: performs a side effect, such as writing summaries or saving a checkpoint, at chosen times.
- `OuterLoop`: runs the whole experiment, including evaluations (given by `EvalSpec`s), checkpoints and resuming.
- `Schedule`: decides when an action or an evaluation runs. Examples are `every(steps=100) | last()` and `at(...)`.

Checkpoints contain everything needed to resume, so a run that is killed and restarted is bit-identical to an
uninterrupted one.

jaxloop's `TrainState` extends Flax's `TrainState` to hold all of a model's variables. The package also includes
`SummaryAction(default_writer(workdir))` for TensorBoard, `CheckpointAction(directory)`, and `summarize(outputs)` for
example-weighted means. To write a step with a Linen module or an NNX class, see `Step`. To run an experiment, see
`OuterLoop`.

Steps and train loops donate the state that you pass them, so always continue with the state that they return. The only
step counter is `state.step`, which counts completed optimizer updates.
"""

import inspect

from jaxloop.actions import Action as Action
from jaxloop.actions import CheckpointAction as CheckpointAction
from jaxloop.actions import EarlyStoppingAction as EarlyStoppingAction
from jaxloop.actions import ProfileAction as ProfileAction
from jaxloop.actions import ProgressAction as ProgressAction
from jaxloop.actions import SpikeGuard as SpikeGuard
from jaxloop.actions import SummaryAction as SummaryAction
from jaxloop.actions import default_writer as default_writer
from jaxloop.base.compilation_cache import enable_compilation_cache as enable_compilation_cache
from jaxloop.data import from_index as from_index
from jaxloop.data import prefetch as prefetch
from jaxloop.data import skippable as skippable
from jaxloop.eval_loop import EvalLoop as EvalLoop
from jaxloop.history import History as History
from jaxloop.metrics import summarize as summarize
from jaxloop.models import optimizers as optimizers
from jaxloop.models.ensemble import Ensemble as Ensemble
from jaxloop.models.export import export as export
from jaxloop.models.fit import fit as fit
from jaxloop.models.loss_step import LossStep as LossStep
from jaxloop.outer_loop import STOP_LOOP as STOP_LOOP
from jaxloop.outer_loop import CheckpointSpec as CheckpointSpec
from jaxloop.outer_loop import EvalSpec as EvalSpec
from jaxloop.outer_loop import OuterLoop as OuterLoop
from jaxloop.outer_loop.extension import Extension as Extension
from jaxloop.partition import DataParallelPartitioner as DataParallelPartitioner
from jaxloop.partition import ExplicitPartitioner as ExplicitPartitioner
from jaxloop.partition import FSDPPartitioner as FSDPPartitioner
from jaxloop.partition import Partitioner as Partitioner
from jaxloop.partition import RulesPartitioner as RulesPartitioner
from jaxloop.partition import SingleDevicePartitioner as SingleDevicePartitioner
from jaxloop.partition import SPMDPartitioner as SPMDPartitioner
from jaxloop.runs.accounts import goodput as goodput
from jaxloop.runs.commands import tell as tell
from jaxloop.runs.failures import replay as replay
from jaxloop.runs.rewinding import rewind as rewind
from jaxloop.runs.watchdog import Watchdog as Watchdog
from jaxloop.schedules import Elapsed as Elapsed
from jaxloop.schedules import Schedule as Schedule
from jaxloop.schedules import after as after
from jaxloop.schedules import always as always
from jaxloop.schedules import at as at
from jaxloop.schedules import every as every
from jaxloop.schedules import first as first
from jaxloop.schedules import last as last
from jaxloop.schedules import never as never
from jaxloop.step import Step as Step
from jaxloop.train_loop import TrainLoop as TrainLoop
from jaxloop.types import Batch as Batch
from jaxloop.types import MetricType as MetricType
from jaxloop.types import MetricWithMetadata as MetricWithMetadata
from jaxloop.types import TrainState as TrainState
from jaxloop.types import TurnBack as TurnBack
from jaxloop.types import Weighted as Weighted

from . import actions, check, checkpoint, data, distributed, metrics, partition, schedules, types  # noqa: F401 (public)

__version__ = "0.1.0"

_PUBLIC_MODULES = """action_loop actions check checkpoint data distributed eval_loop functional history loop metrics
optimizers outer_loop partition schedules stat_loop step testing train_loop types""".split()


def __dir__() -> list[str]:
    """Lists the public names, without internal modules, for tab completion."""
    names = [name for name, value in globals().items() if not (inspect.ismodule(value) or name.startswith("_"))]
    return sorted([*names, "__version__", *(name for name in _PUBLIC_MODULES if name in globals())])
