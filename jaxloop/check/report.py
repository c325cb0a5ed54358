"""The report that `OuterLoop.check` returns."""

import contextlib
import dataclasses
import pathlib
import re
import textwrap
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, final

from jaxloop.actions.action import Action
from jaxloop.base.text import printable
from jaxloop.engine.rehearse import Calls

_WIDTH = 110
_PACKAGE = pathlib.Path(__file__).parent.parent


@final
@dataclasses.dataclass(frozen=True)
class Problem:
    """A problem that a check found in a run.

    Attributes:
      where: The part of the run that has the problem, such as "train step" or "eval 'test'".
      text: A message that states what was expected, what was found, and how to fix the problem.
      is_error: True if the run would fail, or if a part of the run could never do what was requested. False if the run
        would do something that is probably not intended.
    """

    where: str
    text: str
    is_error: bool = True


class CheckError(ValueError):
    """Raised if a report contains errors. The report is the error message."""


@final
@dataclasses.dataclass(frozen=True)
class Report:
    """The result of `OuterLoop.check`. A printed report fits on one screen.

    >>> report = Report([Problem("eval 'test'", "Its dataset is endless.")], {"train": "600 steps"}, secs=0.5)
    >>> print(report)
    1 error. Nothing was run; the check took 0.5 s.
    <BLANKLINE>
      train  600 steps
    <BLANKLINE>
      error in eval 'test':
        Its dataset is endless.

    Attributes:
      problems: The problems, errors first.
      plan: The plan of the run, as a dict that maps topics to text.
      secs: The time that the check took, in seconds.
      calls: A dict with the predicted calls to each action and each evaluation. The keys are the actions themselves and
        the names of the evaluations.
    """

    problems: Sequence[Problem]
    plan: Mapping[str, str]
    secs: float = 0.0
    calls: Mapping[Action | str, Calls] = dataclasses.field(default_factory=dict)

    @property
    def errors(self) -> Sequence[Problem]:
        """The problems that are errors; see `Problem.is_error`."""
        return [problem for problem in self.problems if problem.is_error]

    @property
    def warnings(self) -> Sequence[Problem]:
        """The problems that are not errors; see `Problem.is_error`."""
        return [problem for problem in self.problems if not problem.is_error]

    @property
    def ok(self) -> bool:
        """True if there are no problems."""
        return not self.problems

    def raise_errors(self) -> None:
        """Raises a `CheckError` if there are errors."""
        if self.errors:
            raise CheckError(str(self))

    def __str__(self) -> str:
        counts = [(len(self.errors), "error"), (len(self.warnings), "warning")]
        found = [f"{count} {name}{'s' if count > 1 else ''}" for count, name in counts if count]
        lines = [f"{', '.join(found) or 'No problem'}. Nothing was run; the check took {self.secs:.1f} s.", ""]
        plan = {printable(name): "\n".join(map(printable, text.split("\n"))) for name, text in self.plan.items()}
        width = max(map(len, plan), default=0)
        for name, text in plan.items():
            lines += _wrapped(text, f"  {name:<{width}}  ", " " * (width + 4))
        for problem in self.problems:
            lines += ["", f"  {'error' if problem.is_error else 'warning'} in {printable(problem.where)}:"]
            for line in map(printable, problem.text.splitlines()):
                lines += _wrapped(line, "    ", "      " if line.startswith(" ") else "    ")
        return "\n".join(lines)

    __repr__ = __str__  # For the last line of a notebook cell.


def _wrapped(text: str, first: str, later: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=first, subsequent_indent=later, break_long_words=False, break_on_hyphens=False
    )


# Findings ---------------------------------------------------------------------------------------------------


@final
@dataclasses.dataclass(frozen=True)
class Findings(contextlib.AbstractContextManager[None]):
    """Collects the problems found in one part of a run.

    As a context manager, it suppresses exceptions and adds them as errors.

    >>> found = Findings()
    >>> with found.at("the train loop"):
    ...     raise KeyError("image")
    >>> found.at("the train data").warn("They end early.")
    >>> [(problem.where, problem.is_error) for problem in found.in_order()]
    [('the train loop', True), ('the train data', False)]

    Attributes:
      where: The name of the part of the run that these findings are about.
      problems: A list of problems in the order in which they were found. The findings of all parts share this list.
      plan: The plan of the run, as a dict that maps topics to text.
    """

    where: str = ""
    problems: list[Problem] = dataclasses.field(default_factory=list)
    plan: dict[str, str] = dataclasses.field(default_factory=dict)

    def at(self, where: str) -> "Findings":
        """Returns a `Findings` for another part of the run. Both share one list of problems and one plan."""
        return dataclasses.replace(self, where=where)

    def error(self, text: str) -> None:
        """Adds an error that was found in this part of the run."""
        self.problems.append(Problem(self.where, text))

    def warn(self, text: str) -> None:
        """Adds a warning about this part of the run."""
        self.problems.append(Problem(self.where, text, is_error=False))

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if isinstance(error, Exception):
            self.error(_formatted(error))
        return isinstance(error, Exception)

    @property
    def has_errors(self) -> bool:
        """True if an error was found in this part of the run."""
        return any(problem.where == self.where and problem.is_error for problem in self.problems)

    def in_order(self) -> list[Problem]:
        """Returns all problems, errors first. Merges identical problems that were found in several parts of the run."""
        places: dict[tuple[str, bool], list[str]] = {}  # A problem of a step appears in training and in evaluations.
        for problem in self.problems:
            places.setdefault((problem.text, problem.is_error), []).append(problem.where)
        joined = [Problem(" and ".join(dict.fromkeys(where)), *what) for what, where in places.items()]
        return sorted(joined, key=lambda problem: not problem.is_error)


def _formatted(error: Exception) -> str:
    """Formats an error for the report.

    A `TypeError`, `ValueError` or `OSError` raised by jaxloop is shown as is. Other errors are shown with their class
    and the last line of user code in their traceback.
    """
    # JAX's own notes begin with a line of dashes.
    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()) if not note.startswith("----"))
    frames = [(frame, pathlib.Path(frame.filename)) for frame in traceback.extract_tb(error.__traceback__)]
    if frames and _is_in_jaxloop(frames[-1][1]) and isinstance(error, TypeError | ValueError | OSError):
        return f"{error}{notes}"
    users = [(frame, path) for frame, path in frames if not _is_in_jaxloop(path) and "site-packages" not in path.parts]
    place = f"\n{_place_in_words(*users[-1])}" if users else ""
    message = re.sub(r"\n?See https.*", "", str(error))
    return f"{type(error).__name__}: {message}{notes}{place}"


def _is_in_jaxloop(path: pathlib.Path) -> bool:
    return path.is_relative_to(_PACKAGE) and not path.is_relative_to(_PACKAGE / "examples")


def _place_in_words(frame: traceback.FrameSummary, path: pathlib.Path) -> str:
    is_cell = any(part.startswith("ipykernel_") for part in path.parts)
    where = f"in a cell, line {frame.lineno}" if is_cell else f"at {path}:{frame.lineno}"
    return f"{where}, in {frame.name}: {frame.line}"
