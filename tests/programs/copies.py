"""Incomplete and foreign copies of checkpoints, and damaged files of the history; for `chaos.py`."""

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
    """Keeps the warnings that are logged."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def remove(path: pathlib.Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def incomplete(whole: pathlib.Path) -> Iterator[Case]:
    """Removes each subset of the top-level entries of the newest checkpoint, also all of them."""
    names = sorted(path.name for path in (whole / "checkpoints" / "10").iterdir())
    for number in range(1, len(names) + 1):
        for missing in itertools.combinations(names, number):
            if missing == ("commit_success.txt",):  # Nothing reads it.
                continue
            remove_these = lambda run, missing=missing: [remove(run / "checkpoints" / "10" / name) for name in missing]
            yield f"checkpoint without {', '.join(missing)}", remove_these


def foreign(whole: pathlib.Path, other: pathlib.Path) -> Iterator[Case]:
    """Copies a checkpoint of this run or of another to the place of step 5, 10 or 15, which is then the newest."""
    for source, step, target in itertools.product((whole, other), ("5", "10"), ("5", "10", "15")):
        if (source, step) == (whole, target):
            continue

        def copy(run: pathlib.Path, path: pathlib.Path = source / "checkpoints" / step, target: str = target) -> None:
            checkpoints = run / "checkpoints"
            for newer in {"5": ["5", "10"], "10": ["10"], "15": []}[target]:
                remove(checkpoints / newer)
            shutil.copytree(path, checkpoints / target)

        yield f"step {step} of {source.name} as step {target}", copy


def damaged_histories(rng: random.Random, count: int) -> Iterator[Case]:
    """Changes the history of a run that was killed after step 5."""

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


def resume_from_each(directory: pathlib.Path, tell: Any, *, num_cases: int, seed: int) -> dict[str, list[str]]:
    """Resumes a run from each of these; returns what is wrong with how it ended.

    It must raise a typed error, or end with the leaves of the uninterrupted run, after a warning that names the
    directory of the checkpoints. Rows of the history may differ only where it is damaged, and a warning names its file.
    """
    program, warnings = whole_run.make_program(), Warnings()
    logging.getLogger("absl").addHandler(warnings)
    whole = whole_run.run(directory / "whole", program=program, save=5)
    whole_run.run(directory / "other", program=whole_run.make_program(seed=4), save=5)
    cases = [*incomplete(directory / "whole"), *foreign(directory / "whole", directory / "other")]
    cases += damaged_histories(random.Random(seed), num_cases - len(cases))
    problems = {}
    for name, damage in cases:
        copy, warnings.texts = directory / "copy", []
        shutil.copytree(directory / "whole", copy)
        (copy / "checkpoints" / "STOPPED").unlink()
        damage(copy)
        try:
            resumed = whole_run.run(copy, program=program, save=5)
        except (checkpoint.CheckpointError, ValueError, OSError) as error:
            problems[name] = [] if str(copy) in str(error) else [f"an error that names no path: {error}"]
        else:
            differ = [what for what in ("state", "history") if resumed[what] != whole[what]]
            place = copy / (HISTORY if name.startswith("history") else "checkpoints")
            if any(str(place) in text for text in warnings.texts):
                differ = [what for what in differ if what != "history" or place.name != HISTORY]
            elif place.name != HISTORY:
                differ.append("no warning")
            problems[name] = differ
        remove(copy)
    return problems
