"""Checkpoints: files that contain everything needed to resume a run."""

from jaxloop.checkpoint.listing import METADATA_FILE as METADATA_FILE
from jaxloop.checkpoint.listing import abandon as abandon
from jaxloop.checkpoint.listing import all_paths as all_paths
from jaxloop.checkpoint.listing import all_steps as all_steps
from jaxloop.checkpoint.listing import is_being_deleted as is_being_deleted
from jaxloop.checkpoint.listing import missing_error as missing_error
from jaxloop.checkpoint.read import TRANSFORMS_KEY as TRANSFORMS_KEY
from jaxloop.checkpoint.read import Checkpoint as Checkpoint
from jaxloop.checkpoint.read import CheckpointError as CheckpointError
from jaxloop.checkpoint.read import best_step as best_step
from jaxloop.checkpoint.read import open_newest as open_newest
from jaxloop.checkpoint.read import quarantine_damaged as quarantine_damaged
from jaxloop.checkpoint.read import restore as restore
from jaxloop.checkpoint.read import restore_newest as restore_newest
from jaxloop.checkpoint.stored import template_of as template_of
from jaxloop.checkpoint.weights import load_params as load_params
from jaxloop.checkpoint.weights import save_params as save_params
from jaxloop.checkpoint.write import CheckpointWriter as CheckpointWriter
