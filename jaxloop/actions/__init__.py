"""Actions, which perform side effects such as writing summaries, saving checkpoints and showing progress."""

from jaxloop.actions.action import Action as Action
from jaxloop.actions.checkpoint_action import CheckpointAction as CheckpointAction
from jaxloop.actions.early_stopping_action import EarlyStoppingAction as EarlyStoppingAction
from jaxloop.actions.monitor import Monitor as Monitor
from jaxloop.actions.profile_action import ProfileAction as ProfileAction
from jaxloop.actions.progress_action import ProgressAction as ProgressAction
from jaxloop.actions.spike_guard import SpikeGuard as SpikeGuard
from jaxloop.actions.summary_action import SummaryAction as SummaryAction
from jaxloop.actions.trackers import MlflowWriter as MlflowWriter
from jaxloop.actions.trackers import TrackioWriter as TrackioWriter
from jaxloop.actions.trackers import WandbWriter as WandbWriter
from jaxloop.actions.writers import TensorBoardWriter as TensorBoardWriter
from jaxloop.actions.writers import default_writer as default_writer
