"""Ways to lose a checkpoint directory, and objects that may be in place of its lock file; for `chaos.py`."""

import contextlib
import os
import pathlib
import subprocess
from collections.abc import Iterator

LOCK = ".trainer.lock"


@contextlib.contextmanager
def moved(directory: pathlib.Path) -> Iterator[None]:
    """Moves the checkpoint directory; afterwards moves it back."""
    (directory / "checkpoints").rename(directory / "elsewhere")
    yield
    assert not (directory / "checkpoints").exists(), "it was created again"
    (directory / "elsewhere").rename(directory / "checkpoints")


@contextlib.contextmanager
def replaced(directory: pathlib.Path) -> Iterator[None]:
    """Replaces the checkpoint directory with an empty one; afterwards puts it back."""
    with moved(directory):
        (directory / "checkpoints").mkdir()
        yield
        (directory / "checkpoints").rmdir()  # Raises if something was saved there.


@contextlib.contextmanager
def without_inodes(directory: pathlib.Path) -> Iterator[None]:
    """Uses up all inodes of the file system; afterwards frees them."""
    fillers = directory / "fillers"
    try:
        fillers.mkdir()
        for number in range(100_000):
            (fillers / str(number)).touch()
    except OSError:
        yield
    else:
        raise AssertionError("the file system has too many inodes to use up")
    for path in fillers.iterdir() if fillers.exists() else ():
        path.unlink()
    with contextlib.suppress(FileNotFoundError):
        fillers.rmdir()


LOSSES = {lose.__name__: lose for lose in (moved, replaced, without_inodes)}


@contextlib.contextmanager
def mounted(directory: pathlib.Path, options: str) -> Iterator[None]:
    """Mounts a file system in memory at a directory."""
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(directory)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(directory)], check=True)


def link(path: pathlib.Path) -> None:
    path.symlink_to(path.parent / "target")


def link_to_device(path: pathlib.Path) -> None:
    path.symlink_to("/dev/full")


# Objects in place of the lock file.
IMPOSTORS = {"fifo": os.mkfifo, "directory": os.mkdir, "link": link, "device": link_to_device}
