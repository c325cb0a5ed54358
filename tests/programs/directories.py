"""Ways to lose a checkpoint directory, and objects that may be in place of its lock file; for `chaos.py`."""

import contextlib
import os
import pathlib
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

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
    (directory / "checkpoints").rename(directory / "elsewhere")
    (directory / "checkpoints").mkdir()
    yield
    (directory / "checkpoints").rmdir()  # Raises if something was saved there.
    (directory / "elsewhere").rename(directory / "checkpoints")


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


LOSSES: dict[str, Callable[[pathlib.Path], Any]] = {
    "moved": moved,
    "replaced": replaced,
    "without_inodes": without_inodes,
}


@contextlib.contextmanager
def few_inodes(directory: pathlib.Path) -> Iterator[None]:
    """Mounts a file system with few inodes at a directory."""
    directory.mkdir()
    options = ["-t", "tmpfs", "-o", "size=30m,nr_inodes=2000", "tmpfs"]
    subprocess.run(["mount", *options, str(directory)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(directory)], check=True)


def link(path: pathlib.Path) -> None:
    path.symlink_to(path.parent / "target")


def link_to_device(path: pathlib.Path) -> None:
    path.symlink_to("/dev/full")


# Objects in place of the lock file.
IMPOSTORS: dict[str, Callable[[pathlib.Path], Any]] = {
    "fifo": os.mkfifo,
    "directory": os.mkdir,
    "link": link,
    "device": link_to_device,
}


def remove(path: pathlib.Path) -> None:
    path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
