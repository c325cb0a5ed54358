"""Progress bars: tqdm's where one can be redrawn, and plain lines."""

import contextlib
import dataclasses
import importlib
import os
import sys
from collections.abc import Mapping
from typing import Any, TextIO, final

from jaxloop import checks
from jaxloop.text import printable


@final
@dataclasses.dataclass(frozen=True)
class Progress:
    """The progress of a run, and its speed in this process.

    Attributes:
      steps: completed updates of the run.
      total: updates of the whole run; None if unknown.
      steps_here: steps that this process has timed.
      seconds: seconds that these steps took.
      values: the newest metrics by name.
    """

    steps: int
    total: int | None
    steps_here: int
    seconds: float
    values: Mapping[str, float]

    @property
    def seconds_left(self) -> float | None:
        """Seconds to the end of the run; None if unknown."""
        if self.total is None or not self.steps_here:
            return None
        return self.seconds / self.steps_here * max(self.total - self.steps, 0)


@final
class PlainBar:
    """Shows progress as lines that stay."""

    is_live: bool = False
    """Whether drawings replace each other. If not, there should be few."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._drawn_at = -1

    def draw(self, progress: Progress, *, is_final: bool = False) -> None:
        """Shows the progress; the final drawing stays, and closes the bar."""
        if self._drawn_at != progress.steps or not is_final:
            self.write(plain_line(progress, is_final=is_final))
        self._drawn_at = progress.steps

    def write(self, line: str) -> None:
        """Writes a line that stays, above the bar."""
        print(line, file=self._stream, flush=True)


@final
class TqdmBar:
    """Shows progress as tqdm's bar: text, or a widget in a notebook that has ipywidgets."""

    def __init__(self, stream: TextIO, is_live: bool, progress: Progress):
        self.is_live: bool = is_live
        self._stream = stream
        has_widgets = is_notebook(stream) and checks.is_installed("ipywidgets")
        size: dict[str, Any] = {"dynamic_ncols": True}
        with contextlib.suppress(AttributeError, OSError, ValueError):  # It is not a terminal.
            if 0 in os.get_terminal_size(stream.fileno()):  # Of unknown size, as in a container: tqdm shows nothing.
                size = {"ncols": 100, "nrows": 24}
        self._tqdm: Any = importlib.import_module("tqdm.notebook" if has_widgets else "tqdm").tqdm(
            initial=progress.steps,
            total=progress.total,
            file=stream,
            unit=" steps",
            mininterval=0,  # Each call of draw draws.
            miniters=0,
            **size,
        )

    def draw(self, progress: Progress, *, is_final: bool = False) -> None:
        """Shows the progress; the final drawing stays, and closes the bar."""
        values = ", ".join(f"{printable(name)}={number(value)}" for name, value in progress.values.items())
        self._tqdm.total = progress.total
        self._tqdm.set_postfix_str(values, refresh=False)
        self._tqdm.update(progress.steps - self._tqdm.n)
        if is_final:
            self._tqdm.ncols = self._tqdm.dynamic_ncols = None  # Not cut to the width of the terminal.
            self._tqdm.close()

    def write(self, line: str) -> None:
        """Writes a line that stays, above the bar."""
        self._tqdm.write(line, file=self._stream)


def number(value: float) -> str:
    """Returns a metric with four decimals; as a power of ten if very small or large.

    >>> number(0.97789), number(2.5e-5), number(0.0), number(3e9)
    ('0.9779', '2.5000e-05', '0.0000', '3.0000e+09')
    """
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e6 else f"{value:.4e}"


def named_numbers(values: Mapping[str, float]) -> list[str]:
    """Returns each metric as `loss 0.0718`."""
    return [f"{printable(name)} {number(value)}" for name, value in values.items()]


def plain_line(progress: Progress, *, is_final: bool = False) -> str:
    """Returns progress as a line for a log: with the time left, or if final with the time that the run took.

    >>> plain_line(Progress(4650, 10_000, 4650, 6.9, {"accuracy": 0.9779}))
    'step 4,650 of 10,000 (46%)  673.9 steps/s  0:08 left  accuracy 0.9779'
    """
    parts = [f"step {progress.steps:,}"]
    if progress.total:
        parts[0] += f" of {progress.total:,} ({100 * progress.steps // progress.total}%)"
    if progress.steps_here and progress.seconds:
        speed = progress.steps_here / progress.seconds
        parts.append(f"{speed:,.1f} steps/s" if speed >= 1 else f"{1 / speed:.1f} s/step")
    if is_final:
        parts.append(f"took {_clock_time(progress.seconds)}")
    elif progress.seconds_left is not None:
        parts.append(f"{_clock_time(progress.seconds_left)} left")
    return "  ".join([*parts, *named_numbers(progress.values)])


def _clock_time(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def is_notebook(stream: TextIO) -> bool:
    """Returns whether a stream ends in a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return stream in (sys.stdout, sys.stderr) and getattr(shell, "kernel", None) is not None


def is_live(stream: TextIO) -> bool:
    """Returns whether a bar on a stream can be redrawn."""
    return bool(getattr(stream, "isatty", lambda: False)()) or is_notebook(stream)
