"""jaxloop: a training-loop framework for JAX.

Five nouns, and one word for "when":

- `Step`: what happens to one batch, `preprocess_batch -> begin -> run -> end`; `run` is pure, jitted and sharded.
- `Partitioner`: where arrays live, on one device or over a mesh.
- `Loop`: a bounded series of steps over one dataset: `TrainLoop`, `EvalLoop`.
- `Action`: a side effect at chosen moments: summaries, checkpoints, your own. Its `interval` says when.
- `OuterLoop`: the experiment, made of train loops, eval loops by their `EvalSpec`, resume and stop.

The state that a step or a train loop is given is donated: go on with the one that it returns. `state.step` counts
completed optimizer updates, and is the only count.
"""

from jaxloop.action_loop import ActionLoop as ActionLoop
from jaxloop.actions import Action as Action
from jaxloop.actions import CheckpointAction as CheckpointAction
from jaxloop.actions import SummaryAction as SummaryAction
from jaxloop.actions import default_writer as default_writer
from jaxloop.eval_loop import EvalLoop as EvalLoop
from jaxloop.loop import Loop as Loop
from jaxloop.metrics import LoopOutputs as LoopOutputs
from jaxloop.metrics import summarize as summarize
from jaxloop.outer_loop import STOP_LOOP as STOP_LOOP
from jaxloop.outer_loop import CheckpointSpec as CheckpointSpec
from jaxloop.outer_loop import EvalContext as EvalContext
from jaxloop.outer_loop import EvalSpec as EvalSpec
from jaxloop.outer_loop import OuterLoop as OuterLoop
from jaxloop.partition import DataParallelPartitioner as DataParallelPartitioner
from jaxloop.partition import Partitioner as Partitioner
from jaxloop.partition import SingleDevicePartitioner as SingleDevicePartitioner
from jaxloop.partition import SPMDPartitioner as SPMDPartitioner
from jaxloop.stat_loop import StatLoop as StatLoop
from jaxloop.step import Step as Step
from jaxloop.train_loop import TrainLoop as TrainLoop
from jaxloop.types import Batch as Batch
from jaxloop.types import BatchSpec as BatchSpec
from jaxloop.types import MetricType as MetricType
from jaxloop.types import MetricWithMetadata as MetricWithMetadata
from jaxloop.types import Output as Output
from jaxloop.types import PRNGType as PRNGType
from jaxloop.types import TrainState as TrainState

__version__ = "0.1.0"
