"""Side effects at chosen moments: summaries, checkpoints, and your own."""

from jaxloop.actions.action import Action as Action
from jaxloop.actions.checkpoint_action import CheckpointAction as CheckpointAction
from jaxloop.actions.summary_action import SummaryAction as SummaryAction
from jaxloop.actions.writers import LogWriter as LogWriter
from jaxloop.actions.writers import TensorBoardWriter as TensorBoardWriter
from jaxloop.actions.writers import default_writer as default_writer
