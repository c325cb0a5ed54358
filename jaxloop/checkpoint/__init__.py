"""Checkpoints: files that hold everything a run needs to resume."""

from jaxloop.checkpoint.checkpoint import METADATA_FILE as METADATA_FILE
from jaxloop.checkpoint.checkpoint import TRANSFORMS_KEY as TRANSFORMS_KEY
from jaxloop.checkpoint.checkpoint import Checkpoint as Checkpoint
from jaxloop.checkpoint.checkpoint import CheckpointError as CheckpointError
from jaxloop.checkpoint.checkpoint import CheckpointWriter as CheckpointWriter
from jaxloop.checkpoint.checkpoint import abandon as abandon
from jaxloop.checkpoint.checkpoint import all_paths as all_paths
from jaxloop.checkpoint.checkpoint import all_steps as all_steps
from jaxloop.checkpoint.checkpoint import best_step as best_step
from jaxloop.checkpoint.checkpoint import check_fits as check_fits
from jaxloop.checkpoint.checkpoint import clear_leftovers as clear_leftovers
from jaxloop.checkpoint.checkpoint import is_being_deleted as is_being_deleted
from jaxloop.checkpoint.checkpoint import load_params as load_params
from jaxloop.checkpoint.checkpoint import load_variables as load_variables
from jaxloop.checkpoint.checkpoint import metadata as metadata
from jaxloop.checkpoint.checkpoint import missing_error as missing_error
from jaxloop.checkpoint.checkpoint import open_newest as open_newest
from jaxloop.checkpoint.checkpoint import quarantine_damaged as quarantine_damaged
from jaxloop.checkpoint.checkpoint import restore as restore
from jaxloop.checkpoint.checkpoint import restore_newest as restore_newest
from jaxloop.checkpoint.checkpoint import run as run
from jaxloop.checkpoint.checkpoint import save_params as save_params
from jaxloop.checkpoint.checkpoint import template_of as template_of
from jaxloop.checkpoint.checkpoint import trees as trees
