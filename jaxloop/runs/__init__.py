"""Tools for monitoring and debugging runs: logs, status, commands, comparisons, failure records and rewinding."""

from collections.abc import Mapping
from typing import Any

from jaxloop.outer_loop.extension import Extension
from jaxloop.runs.commands import Tell
from jaxloop.runs.failures import Failures
from jaxloop.runs.run_log import RunLog


def default_extensions(notes: Mapping[str, Any] | None, *, has_directory: bool) -> list[Extension]:
    """Returns the default extensions of an `OuterLoop`.

    `notes` is the `notes` argument of the `OuterLoop`, and `has_directory` is True if the `OuterLoop` writes to a
    directory.
    """
    found: list[Extension] = [RunLog(notes)] if has_directory or notes else []
    return [*found, Tell(), Failures()] if has_directory else found
