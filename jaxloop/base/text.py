"""Texts for people: names that are safe to display, and the lines that a run logs."""

import contextlib
import logging as py_logging
from collections.abc import Iterator

from absl import logging

from jaxloop import distributed


def printable(text: object) -> str:
    r"""Returns text as a single line, with all unprintable characters escaped.

    Metric names and text read from files may contain newlines, carriage returns or escape sequences. Use this function
    wherever such text is displayed. When writing to files, keep the original text.

    >>> print(printable("loss\n\x1b[31m"))
    loss\n\x1b[31m
    """
    line = str(text)
    if line.isprintable():
        return line
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in line)


def announce(text: str, *args: object) -> None:
    """Logs a line at INFO, whose verbosity in the first process of a job is that of warnings.

    That process therefore shows it by default, even in a program that doesn't call `absl.app.run`.
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
    """Hides the INFO lines of Orbax, about forty for each save, unless the verbosity is DEBUG."""
    is_shown = lambda record: (
        record.levelno > py_logging.INFO or logging.level_debug() or "/orbax/" not in record.pathname.replace("\\", "/")
    )
    logger = logging.get_absl_logger()
    logger.addFilter(is_shown)
    try:
        yield
    finally:
        logger.removeFilter(is_shown)
