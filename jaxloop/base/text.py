"""Functions for text shown to users: tables, log lines, suggestions in error messages, and safe display of names."""

import contextlib
import difflib
import functools
import inspect
import logging as py_logging
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any, TypeVar, cast

from absl import logging

from jaxloop import distributed

_Function = TypeVar("_Function", bound=Callable[..., Any])


def suggests(**arguments: str) -> Callable[[_Function], _Function]:
    """Returns a decorator that adds a suggestion to the error that a function raises for a wrong argument name.

    >>> @suggests(epochs="train_epochs")
    ... def run(train_epochs=1): ...
    >>> run(epochs=2)
    Traceback (most recent call last):
    ...
    TypeError: run has no argument 'epochs'. Did you mean train_epochs?

    Args:
      **arguments: Common wrong names, each with the right name as its value. For any other wrong name, the error
        suggests the most similar argument name, or lists all argument names if none is similar.
    """

    def decorate(function: _Function) -> _Function:
        known = list(inspect.signature(function).parameters)
        shown = function.__qualname__.removesuffix(".__init__").removesuffix(".__call__")

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for name in kwargs:
                if name not in known:
                    similar = [repr(each) for each in difflib.get_close_matches(name, known, 1)]
                    meant = arguments.get(name) or next(iter(similar), None)
                    hint = f"It takes {', '.join(known)}." if meant is None else f"Did you mean {meant}?"
                    raise TypeError(f"{shown} has no argument {name!r}. {hint}")
            return function(*args, **kwargs)

        return cast(_Function, call)

    return decorate


def printable(text: object) -> str:
    r"""Returns text as a single line, with all unprintable characters escaped.

    Metric names and text read from files may contain newlines, carriage returns or escape sequences. Use this function
    wherever such text is displayed. When writing to files, keep the original text.

    >>> print(printable("loss\n\x1b[31m"))
    loss\n\x1b[31m
    """
    escaped = lambda char: char.encode("unicode_escape").decode("ascii")
    return "".join(char if char.isprintable() else escaped(char) for char in str(text))


def table(rows: Iterable[Iterable[object]], *, right: Container[int] = ()) -> str:
    """Formats rows of cells as lines with aligned columns.

    >>> print(table([["step", "100"], ["loss", "0.5"]], right=[1]))
    step  100
    loss  0.5

    Args:
      rows: The rows, which all have the same number of cells.
      right: The indices of the columns to right-align.
    """
    cells = [list(map(printable, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    align = lambda number, cell: (cell.rjust if number in right else cell.ljust)(widths[number])
    return "\n".join("  ".join(map(align, range(len(row)), row)).rstrip() for row in cells)


def announce(text: str, *args: object) -> None:
    """Logs a line at level INFO. In the first process of a job, the line is shown even if the verbosity is WARNING.

    This also works in programs that don't call `absl.app.run`.
    """
    logger = logging.get_absl_logger()
    if not logger.isEnabledFor(py_logging.WARNING if distributed.is_first_process() else py_logging.INFO):
        return
    if not logger.root.handlers:
        py_logging.basicConfig()  # As absl does before its first line.
    path, line, function, _ = logger.findCaller(stacklevel=2)
    logger.handle(logger.makeRecord(logger.name, py_logging.INFO, path, line, text, args, None, function))


@contextlib.contextmanager
def quiet_orbax() -> Iterator[None]:
    """Returns a context manager that hides Orbax's INFO messages (about 40 per save), unless the verbosity is DEBUG."""
    is_shown = lambda record: (
        record.levelno > py_logging.INFO or logging.level_debug() or "/orbax/" not in record.pathname.replace("\\", "/")
    )
    logger = logging.get_absl_logger()
    logger.addFilter(is_shown)
    try:
        yield
    finally:
        logger.removeFilter(is_shown)
