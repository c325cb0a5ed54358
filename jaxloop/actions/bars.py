"""What progress looks like: tqdm's bar, one as Keras draws it, and plain lines."""

import abc
import dataclasses
import os
import sys
from collections.abc import Mapping
from typing import Any, TextIO, final

from jaxloop import checks
from jaxloop.text import printable

_KERAS_WIDTH = 30


@final
@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a run is, and how fast.

    >>> progress = Progress(steps=4650, total=10_000, steps_here=4650, seconds=6.9, values={"loss": 0.0718})
    >>> round(progress.seconds_left)
    8

    Attributes:
      steps: completed updates of the run.
      total: how many it shall have; None if nobody knows.
      steps_here: how many of them this process has timed.
      seconds: how long these took.
      values: the newest metrics by name.
    """

    steps: int
    total: int | None
    steps_here: int
    seconds: float
    values: Mapping[str, float]

    @property
    def seconds_per_step(self) -> float | None:
        """None before there is a step to tell from."""
        return self.seconds / self.steps_here if self.steps_here else None

    @property
    def seconds_left(self) -> float | None:
        """None if nobody knows."""
        if self.total is None or self.seconds_per_step is None:
            return None
        return self.seconds_per_step * max(self.total - self.steps, 0)


class Bar(abc.ABC):
    """One way to show progress on a stream.

    Args:
      stream: where it is shown.
      is_live: whether what was written last can be written over, as on a terminal and in a notebook.
    """

    def __init__(self, stream: TextIO, is_live: bool):
        self._stream = stream
        self._is_live = is_live

    @property
    def is_live(self) -> bool:
        """Whether it is drawn in place; else each drawing stays, and there should be few."""
        return self._is_live

    @abc.abstractmethod
    def draw(self, progress: Progress) -> None:
        """Shows how far the run is now."""

    @abc.abstractmethod
    def write(self, line: str) -> None:
        """Writes a line that stays, above the bar."""

    @abc.abstractmethod
    def close(self, progress: Progress) -> None:
        """Shows how far the run came; this stays too."""


@final
class PlainBar(Bar):
    """A line for each drawing: `step 4,650 of 10,000 (46%)  670 steps/s  0:08 left  accuracy 0.9779  loss 0.0718`."""

    def __init__(self, stream: TextIO):
        super().__init__(stream, is_live=False)
        self._drawn: Progress | None = None

    def draw(self, progress: Progress) -> None:
        self.write(plain_line(progress))
        self._drawn = progress

    def write(self, line: str) -> None:
        self._stream.write(f"{line}\n")
        self._stream.flush()

    def close(self, progress: Progress) -> None:
        if self._drawn is None or self._drawn.steps != progress.steps:
            self.write(plain_line(progress, is_final=True))


@final
class KerasBar(Bar):
    """Keras's: `4650/10000 [============>.................] - ETA: 8s - accuracy: 0.9779 - loss: 0.0718`."""

    def __init__(self, stream: TextIO, is_live: bool):
        super().__init__(stream, is_live)
        self._shown = ""  # The line that is to be written over.

    def draw(self, progress: Progress) -> None:
        # Cut, for what the terminal has broken can't be written over.
        self._show(keras_line(progress)[: _columns(self._stream)])

    def write(self, line: str) -> None:
        below = self._shown
        self._show(line, stays=True)
        if below:
            self._show(below)

    def close(self, progress: Progress) -> None:
        self._show(keras_line(progress, is_final=True), stays=True)

    def _show(self, line: str, *, stays: bool = False) -> None:
        """Writes a line in the place of the last one, unless that stays."""
        begin, padding = ("\r", " " * (len(self._shown) - len(line))) if self._shown else ("", "")
        stays = stays or not self._is_live
        self._stream.write(begin + line + padding + "\n" * stays)
        self._stream.flush()
        self._shown = "" if stays else line


@final
class TqdmBar(Bar):
    """tqdm's, a widget in a notebook that has ipywidgets."""

    def __init__(self, stream: TextIO, is_live: bool, progress: Progress):
        super().__init__(stream, is_live)
        if is_notebook(stream) and checks.is_installed("ipywidgets"):
            from tqdm.notebook import tqdm
        else:
            from tqdm import tqdm
        self._tqdm: Any = tqdm(
            initial=progress.steps,
            total=progress.total,
            file=stream,
            unit=" steps",
            mininterval=0,  # Whoever draws decides when.
            miniters=1,
            **_tqdm_size(stream),
        )

    def draw(self, progress: Progress) -> None:
        self._tqdm.total = progress.total
        self._tqdm.set_postfix_str(
            ", ".join(f"{printable(name)}={number(value)}" for name, value in progress.values.items()), refresh=False
        )
        if progress.steps == self._tqdm.n:
            self._tqdm.refresh()
        else:
            self._tqdm.update(progress.steps - self._tqdm.n)

    def write(self, line: str) -> None:
        self._tqdm.write(line, file=self._stream)

    def close(self, progress: Progress) -> None:
        self.draw(progress)
        self._tqdm.close()


# Lines -----------------------------------------------------------------------------------------------


def number(value: float) -> str:
    """A metric with four digits; as a power of ten where these would say nothing, or very much.

    >>> number(0.97789), number(2.5e-5), number(0.0), number(3e9)
    ('0.9779', '2.5000e-05', '0.0000', '3.0000e+09')
    """
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e6 else f"{value:.4e}"


def keras_line(progress: Progress, *, is_final: bool = False) -> str:
    """What Keras shows, with the metrics in alphabetical order; in the end the time it took instead of what is left.

    >>> keras_line(Progress(10_000, 10_000, 10_000, 14.2, {"loss": 0.0718, "accuracy": 0.9779}), is_final=True)
    '10000/10000 [==============================] - 14s 1ms/step - accuracy: 0.9779 - loss: 0.0718'
    """
    parts = [f"{progress.steps}/{progress.total or 'Unknown'}"]
    if progress.total:
        done = min(int(_KERAS_WIDTH * progress.steps / progress.total), _KERAS_WIDTH)
        tip = ">" if done < _KERAS_WIDTH else "="
        parts[0] += f" [{('=' * (done - 1) + tip if done else '').ljust(_KERAS_WIDTH, '.')}]"
    if not is_final and progress.seconds_left is not None:
        parts.append(f"ETA: {_keras_duration(progress.seconds_left)}")
    else:
        parts.append(f"{progress.seconds:.0f}s{_keras_pace(progress.seconds_per_step)}")
    parts += [f"{printable(name)}: {number(progress.values[name])}" for name in sorted(progress.values)]
    return " - ".join(parts)


def _keras_duration(seconds: float) -> str:
    return f"{seconds:.0f}s" if seconds < 60 else _clock_time(seconds)


def _keras_pace(seconds_per_step: float | None) -> str:
    if seconds_per_step is None:
        return ""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds_per_step >= size:
            return f" {seconds_per_step / size:.0f}{unit}/step"
    return f" {seconds_per_step * 1e6:.0f}us/step"


def plain_line(progress: Progress, *, is_final: bool = False) -> str:
    """What a log can keep; in the end the time it took instead of what is left.

    >>> plain_line(Progress(4650, 10_000, 4650, 6.9, {"accuracy": 0.9779}))
    'step 4,650 of 10,000 (46%)  673.9 steps/s  0:08 left  accuracy 0.9779'
    """
    parts = [f"step {progress.steps:,}"]
    if progress.total:
        parts[0] += f" of {progress.total:,} ({100 * progress.steps // progress.total}%)"
    pace = progress.seconds_per_step
    if pace:
        parts.append(f"{pace:.1f} s/step" if pace > 1 else f"{1 / pace:,.1f} steps/s")
    if is_final:
        parts.append(f"took {_clock_time(progress.seconds)}")
    elif progress.seconds_left is not None:
        parts.append(f"{_clock_time(progress.seconds_left)} left")
    return "  ".join([*parts, *named_numbers(progress.values)])


def named_numbers(values: Mapping[str, float]) -> list[str]:
    """Each metric as `loss 0.0718`."""
    return [f"{printable(name)} {number(value)}" for name, value in values.items()]


def _clock_time(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


# Where a bar is shown --------------------------------------------------------------------------------


def is_notebook(stream: TextIO | None = None) -> bool:
    """Whether the program runs in a notebook, and the stream, if one is given, ends there."""
    if stream is not None and stream not in (sys.stdout, sys.stderr):
        return False
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


def is_live(stream: TextIO) -> bool:
    """Whether what is written to a stream can be written over."""
    return bool(getattr(stream, "isatty", lambda: False)()) or is_notebook(stream)


def _terminal_size(stream: TextIO) -> tuple[int, int] | None:
    """Columns and rows, zero where a terminal doesn't know them; None where there is no terminal."""
    try:
        return os.get_terminal_size(stream.fileno()) if stream.isatty() else None
    except (AttributeError, OSError, ValueError):
        return None


def _columns(stream: TextIO) -> int | None:
    """How long a line may be for the terminal not to break it; None where that is not known."""
    size = _terminal_size(stream)
    return size[0] - 1 if size and size[0] else None


def _tqdm_size(stream: TextIO) -> dict[str, Any]:
    # On a terminal that doesn't know its size, as in a container, tqdm would show nothing.
    is_unknown = 0 in (_terminal_size(stream) or ())
    return {"ncols": 100, "nrows": 24} if is_unknown else {"dynamic_ncols": True}
