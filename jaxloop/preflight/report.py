"""What a check has found, and how it prints."""

import dataclasses
import textwrap
from collections.abc import Mapping, Sequence
from typing import final

from jaxloop.actions.action import Action
from jaxloop.forecast import Calls
from jaxloop.text import printable

_WIDTH = 110


@final
@dataclasses.dataclass(frozen=True)
class Problem:
    """Something that would go wrong.

    Attributes:
      where: in which part of the run, such as "train step" or "eval 'test'".
      text: what was expected, what is there, and what to do.
      is_error: whether the run would fail; else it would do something that is hardly meant.
    """

    where: str
    text: str
    is_error: bool = True


class CheckError(ValueError):
    """A run would fail; the text is the report of what would."""


@final
@dataclasses.dataclass(frozen=True)
class Report:
    """What `OuterLoop.check` has found. It prints as one screen.

    >>> report = Report([Problem("eval 'test'", "Its data have no end.")], {"train": "600 steps"}, secs=0.5)
    >>> print(report)
    1 error. Nothing was run; it took 0.5 s.
    <BLANKLINE>
      train  600 steps
    <BLANKLINE>
      error in eval 'test':
        Its data have no end.

    Attributes:
      problems: what would go wrong, errors first.
      plan: how the run will go: lines by what they are about.
      secs: how long it took, in seconds.
      calls: when each action of the loops will be called, as far as that is foreseen.
    """

    problems: Sequence[Problem]
    plan: Mapping[str, str]
    secs: float = 0.0
    calls: Mapping[Action, Calls] = dataclasses.field(default_factory=dict)

    @property
    def errors(self) -> Sequence[Problem]:
        """The problems with which the run would fail."""
        return [problem for problem in self.problems if problem.is_error]

    @property
    def warnings(self) -> Sequence[Problem]:
        """The other problems."""
        return [problem for problem in self.problems if not problem.is_error]

    @property
    def ok(self) -> bool:
        """Whether there is no problem at all."""
        return not self.problems

    def raise_errors(self) -> None:
        """Raises a `CheckError` if there are errors."""
        if self.errors:
            raise CheckError(str(self))

    def __str__(self) -> str:
        counts = [(len(self.errors), "error"), (len(self.warnings), "warning")]
        found = [f"{count} {name}{'s' if count > 1 else ''}" for count, name in counts if count]
        lines = [f"{', '.join(found) or 'No problem'}. Nothing was run; it took {self.secs:.1f} s.", ""]
        plan = {printable(name): "\n".join(map(printable, text.split("\n"))) for name, text in self.plan.items()}
        width = max(map(len, plan), default=0)
        for name, text in plan.items():
            lines += _wrapped(text, f"  {name:<{width}}  ", " " * (width + 4))
        for problem in self.problems:
            lines += ["", f"  {'error' if problem.is_error else 'warning'} in {printable(problem.where)}:"]
            for line in map(printable, problem.text.splitlines()):
                lines += _wrapped(line, "    ", "      " if line.startswith(" ") else "    ")
        return "\n".join(lines)

    __repr__ = __str__  # The last line of a notebook's cell shows it.


def _wrapped(text: str, first: str, later: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=first, subsequent_indent=later, break_long_words=False, break_on_hyphens=False
    )
