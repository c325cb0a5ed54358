"""Functions that list and move checkpoints.

A checkpoint is a directory named after its step. This module doesn't read the files in checkpoints.
"""

import os
import re
import time
from collections.abc import Iterable

from absl import logging
from etils import epath, epy

from jaxloop.base import files
from jaxloop.base.files import absolute

with epy.lazy_imports():  # Importing Orbax takes a fifth as long as importing jaxloop.
    import orbax.checkpoint as ocp

METADATA_FILE = "_CHECKPOINT_METADATA"
"""The name of the file in which Orbax stores a checkpoint's metadata."""
# The subdirectories for checkpoints that are no longer used. Their names are not steps, so neither Orbax nor jaxloop
# reads them.
DAMAGED, _ABANDONED = "damaged", "abandoned"
_STEP = re.compile("0|[1-9][0-9]*")
_DELETION_POLL_SECS = 0.1


def all_steps(directory: epath.PathLike) -> list[int]:
    """Returns the steps of the complete checkpoints in a directory, in ascending order.

    The list is empty if the directory doesn't exist. A directory is a checkpoint only if its name is a step without
    leading zeros. (Orbax also accepts names like `0015` and `1_5`. It takes them for the steps 15 and 5, and would read
    and delete the directories `15` and `5` instead.)
    """
    return [int(path.name) for path in all_paths([directory])]


def all_paths(directories: Iterable[epath.PathLike]) -> list[epath.Path]:
    """Returns the paths of the complete checkpoints in several directories, in ascending order of their steps.

    Checkpoints of the same step are in the reverse order of `directories`: the one in the first directory comes last.
    """
    found = []
    for number, directory in enumerate(map(absolute, directories)):
        paths = ocp.path.step.checkpoint_steps_paths(directory) if directory.is_dir() else []
        found += [(int(path.name), -number, path) for path in paths if _STEP.fullmatch(path.name)]
    return [path for *_, path in sorted(found)]


def missing_error(directory: epath.PathLike) -> FileNotFoundError:
    """Returns the error to raise if a directory contains no checkpoints."""
    return FileNotFoundError(f"No checkpoint in {absolute(directory)}.")


def is_being_deleted(directory: epath.PathLike, step: int) -> bool:
    """Returns True if a checkpoint doesn't exist, or if it is deleted while this function waits.

    The function waits as long as files keep disappearing from the checkpoint. If no more files disappear but some
    remain, the function returns False.
    """
    path = absolute(directory) / str(step)
    names = None
    while path.exists():
        before, names = names, sorted(str(name) for parent in os.walk(path) for name in (*parent[1], *parent[2]))
        if names == before:
            return False
        time.sleep(_DELETION_POLL_SECS)
    return True


def abandon(directory: epath.PathLike, first_step: int) -> None:
    """Moves the checkpoints of step `first_step` or a later step to `abandoned/`, so that no run resumes from them.

    In a multi-process job, only the first process may call this function.
    """
    for path in all_paths([directory]):
        if int(path.name) >= first_step:
            logging.info("The checkpoint of step %s was moved to %s.", path.name, move(path, _ABANDONED))


def move(path: epath.Path, below: str) -> epath.Path:
    """Moves a checkpoint to the subdirectory `below` of its parent directory, and returns its new path."""
    target, count = path.parent / below / path.name, 1
    while target.exists():
        count += 1
        target = path.parent / below / f"{path.name}-{count}"
    files.make_directory(target.parent)
    path.rename(target)
    return target
