"""What is found on the way: problems, each with its place, and the plan of the run."""

import contextlib
import pathlib
import re
import traceback
from collections.abc import Iterator
from typing import final

from jaxloop.preflight.report import Problem

_PACKAGE = pathlib.Path(__file__).parent.parent


@final
class Findings:
    """Collects what is found.

    >>> found = Findings()
    >>> with found.finding("the train loop"):
    ...     raise KeyError("image")
    >>> found.warn("the train data", "They end early.")
    >>> [(problem.where, problem.is_error) for problem in found.in_order()]
    [('the train loop', True), ('the train data', False)]

    Attributes:
      plan: how the run will go: lines by what they are about.
    """

    def __init__(self) -> None:
        self._problems: list[Problem] = []
        self.plan: dict[str, str] = {}

    def add(self, where: str, text: str, *, is_error: bool = True) -> None:
        """Takes a problem down."""
        self._problems.append(Problem(where, text, is_error))

    def warn(self, where: str, text: str) -> None:
        """Takes down a problem with which the run would not fail."""
        self.add(where, text, is_error=False)

    @contextlib.contextmanager
    def finding(self, where: str) -> Iterator[None]:
        """Takes down what is raised as an error of the run."""
        try:
            yield
        except Exception as error:
            self.add(where, _told(error))

    def has_errors(self, where: str) -> bool:
        """Whether a part of the run would fail."""
        return any(problem.where == where and problem.is_error for problem in self._problems)

    def in_order(self) -> list[Problem]:
        """The problems, errors first; what is wrong in several places is one."""
        places: dict[tuple[str, bool], list[str]] = {}  # What is wrong with a step is so in training and in evaluation.
        for problem in self._problems:
            places.setdefault((problem.text, problem.is_error), []).append(problem.where)
        joined = [Problem(" and ".join(dict.fromkeys(where)), *what) for what, where in places.items()]
        return sorted(joined, key=lambda problem: not problem.is_error)


def _told(error: Exception) -> str:
    """An error as a text: ours as it is, another with its class and the line of the user that it came from."""
    # JAX's own notes begin with a line of dashes.
    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()) if not note.startswith("----"))
    frames = [(frame, pathlib.Path(frame.filename)) for frame in traceback.extract_tb(error.__traceback__)]
    if frames and _is_of_jaxloop(frames[-1][1]) and isinstance(error, TypeError | ValueError | OSError):
        return f"{error}{notes}"
    users = [(frame, path) for frame, path in frames if not _is_of_jaxloop(path) and "site-packages" not in path.parts]
    place = f"\n{_place_in_words(*users[-1])}" if users else ""
    message = re.sub(
        r"\n?The error occurred while tracing the function <lambda> at .*jaxloop/step.*|\n?See https.*", "", str(error)
    )
    return f"{type(error).__name__}: {message}{notes}{place}"


def _is_of_jaxloop(path: pathlib.Path) -> bool:
    return path.is_relative_to(_PACKAGE) and not path.is_relative_to(_PACKAGE / "examples")


def _place_in_words(frame: traceback.FrameSummary, path: pathlib.Path) -> str:
    is_cell = any(part.startswith("ipykernel_") for part in path.parts)
    where = f"in a cell, line {frame.lineno}" if is_cell else f"at {path}:{frame.lineno}"
    return f"{where}, in {frame.name}: {frame.line}"
