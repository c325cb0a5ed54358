"""Incomplete and foreign copies of checkpoints, and damaged history files; for `chaos.py`."""

import itertools
import logging
import pathlib
import random
import shutil
from collections.abc import Callable, Iterator
from typing import Any

from programs import whole_run

from jaxloop import checkpoint

Case = tuple[str, Callable[[pathlib.Path], Any]]
HISTORY = "history.jsonl"


class Warnings(logging.Handler):
    """Collects logged warnings."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def remove(path: pathlib.Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def incomplete(reference: pathlib.Path) -> Iterator[Case]:
    """Removes each non-empty subset of the top-level entries of the newest checkpoint."""
    names = sorted(path.name for path in (reference / "checkpoints" / "10").iterdir())
    for number in range(1, len(names) + 1):
        for missing in itertools.combinations(names, number):
            if missing == ("commit_success.txt",):  # Nothing reads it.
                continue
            remove_these = lambda run, missing=missing: [remove(run / "checkpoints" / "10" / name) for name in missing]
            yield f"checkpoint without {', '.join(missing)}", remove_these


def foreign(reference: pathlib.Path, other: pathlib.Path) -> Iterator[Case]:
    """Copies a checkpoint of this run or another one to step 5, 10 or 15, and makes it the newest."""
    for source, step, target in itertools.product((reference, other), ("5", "10"), ("5", "10", "15")):
        if (source, step) == (reference, target):
            continue

        def copy(run: pathlib.Path, path: pathlib.Path = source / "checkpoints" / step, target: str = target) -> None:
            checkpoints = run / "checkpoints"
            for newer in {"5": ["5", "10"], "10": ["10"], "15": []}[target]:
                remove(checkpoints / newer)
            shutil.copytree(path, checkpoints / target)

        yield f"step {step} of {source.name} as step {target}", copy


def damaged_histories(rng: random.Random, count: int) -> Iterator[Case]:
    """Damages the history file of a run that was killed after step 5."""

    def edited(content: bytes) -> bytes:
        place = rng.choice([index for index, byte in enumerate(content) if chr(byte).isdigit()])
        return content[:place] + (b"1" if content[place : place + 1] == b"2" else b"2") + content[place + 1 :]

    def reordered(content: bytes) -> bytes:
        return b"".join(sorted(content.splitlines(keepends=True), key=lambda _: rng.random()))

    def zero_filled(content: bytes) -> bytes:
        return content[: (place := rng.randrange(len(content)))] + b"\0" * (len(content) - place)

    kinds: list[tuple[str, Callable[[bytes], bytes | None]]] = [
        ("truncated", lambda content: content[: rng.randrange(len(content))]),
        ("zero-filled", zero_filled),
        ("edited", edited),
        ("reordered", reordered),
        ("deleted", lambda content: None),
    ]
    for number in range(count):
        kind, change = kinds[number % len(kinds)]

        def damage(run: pathlib.Path, change: Callable[[bytes], bytes | None] = change) -> None:
            remove(run / "checkpoints" / "10")
            content = change((run / HISTORY).read_bytes())
            remove(run / HISTORY) if content is None else (run / HISTORY).write_bytes(content)

        yield f"history {kind}, number {number}", damage


def resume_from_each(directory: pathlib.Path, report: Any, *, num_cases: int, seed: int) -> dict[str, list[str]]:
    """Resumes a run from each of these cases; returns the problems of each.

    The run must either raise a typed error or end with the same state as the uninterrupted run. In the latter case it
    must have logged a warning that names the checkpoint directory. Its history may differ only if the history file was
    damaged and a warning names that file.
    """
    program, warnings = whole_run.make_program(), Warnings()
    logging.getLogger("absl").addHandler(warnings)
    reference = whole_run.run(directory / "reference", program=program, save=5)
    whole_run.run(directory / "other", program=whole_run.make_program(seed=4), save=5)
    cases = [*incomplete(directory / "reference"), *foreign(directory / "reference", directory / "other")]
    cases += damaged_histories(random.Random(seed), num_cases - len(cases))
    problems = {}
    for name, damage in cases:
        copy, warnings.texts = directory / "copy", []
        shutil.copytree(directory / "reference", copy)
        (copy / "checkpoints" / "STOPPED").unlink()
        damage(copy)
        try:
            resumed = whole_run.run(copy, program=program, save=5)
        except (checkpoint.CheckpointError, ValueError, OSError) as error:
            problems[name] = [] if str(copy) in str(error) else [f"an error that doesn't name the path: {error}"]
        else:
            differ = [what for what in ("state", "history") if resumed[what] != reference[what]]
            place = copy / (HISTORY if name.startswith("history") else "checkpoints")
            if any(str(place) in text for text in warnings.texts):
                differ = [what for what in differ if what != "history" or place.name != HISTORY]
            elif place.name != HISTORY:
                differ.append("no warning")
            problems[name] = differ
        remove(copy)
    return problems
