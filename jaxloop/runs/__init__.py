"""Tools for the operation of runs: logs, status, commands, comparisons, failures and rewinding."""

from collections.abc import Mapping
from typing import Any

from jaxloop.experiment.extension import Extension
from jaxloop.runs.commands import Tell
from jaxloop.runs.failures import Failures
from jaxloop.runs.run_log import RunLog
from jaxloop.runs.watchdog import Watchdog


def default_extensions(notes: Mapping[str, Any] | None, watchdog: Any, *, has_directory: bool) -> list[Extension]:
    """Returns the extensions that each `OuterLoop` has; see there for the arguments."""
    if watchdog is not None and not isinstance(watchdog, Watchdog):
        raise TypeError(f"watchdog must be a Watchdog such as Watchdog(step_secs=600), got {watchdog!r}.")
    found: list[Extension] = [] if watchdog is None else [watchdog]
    if has_directory or notes:
        found.append(RunLog(notes))
    return [*found, Tell(), Failures()] if has_directory else found
