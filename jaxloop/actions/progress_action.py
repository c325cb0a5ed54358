"""The action that shows progress, as a bar or as lines in a file."""

import contextlib
import dataclasses
import importlib
import logging as py_logging
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO, final

import jax
import numpy as np
from absl import logging

from jaxloop import distributed, metrics, types
from jaxloop.actions.action import Action
from jaxloop.base import checks, timing
from jaxloop.base.text import printable
from jaxloop.base.timing import Spent, duration
from jaxloop.history import History, Row
from jaxloop.schedules import Elapsed, Schedule, every, first, last

_BARS = ("auto", "tqdm", "plain")
_NOW_AND_THEN = every(time=0.1) | first() | last()
# For output that can't be redrawn, such as a file: the minimum time between lines, and the approximate maximum number
# of lines per run.
_LINE_SECONDS = 10.0
_MOST_LINES = 50


@final
@dataclasses.dataclass(frozen=True)
class Progress:
    """The progress of a run, and its speed in this process.

    >>> Progress(4650, 10_000, 4650, 6.9, {"accuracy": 0.9779}).line()
    'step 4,650 of 10,000 (46%)  673.9 steps/s  0:08 left  accuracy 0.9779'

    Attributes:
      steps: The number of completed updates in the run.
      total: The total number of updates in the run; None if unknown.
      steps_here: The number of steps timed by this process. The process's first step is excluded, because it includes
        compilation.
      seconds: The time that these steps took, in seconds.
      values: The latest metrics, by name.
      run_seconds: The time since the run began in this process, in seconds, including start-up and compilation.
    """

    steps: int
    total: int | None
    steps_here: int
    seconds: float
    values: Mapping[str, float]
    run_seconds: float = 0.0

    @property
    def seconds_left(self) -> float | None:
        """The estimated time until the end of the run, in seconds; None if unknown."""
        if self.total is None or not self.steps_here:
            return None
        return self.seconds / self.steps_here * max(self.total - self.steps, 0)

    @property
    def seconds_between_lines(self) -> float:
        """The minimum time between two lines, in seconds.

        It grows during a run, so that even a run of unknown length prints few lines.
        """
        if self.seconds_left is None:
            return max(_LINE_SECONDS, self.seconds / 10)
        return max(_LINE_SECONDS, (self.seconds + self.seconds_left) / _MOST_LINES)

    def line(self, *, is_final: bool = False) -> str:
        """Returns a line for a log file, with the time left or, at the end of the run, the time taken."""
        parts = [f"step {self.steps:,}"]
        if self.total:
            parts[0] += f" of {self.total:,} ({100 * self.steps // self.total}%)"
        if self.steps_here and self.seconds:
            speed = self.steps_here / self.seconds
            parts.append(f"{speed:,.1f} steps/s" if speed >= 1 else f"{1 / speed:.1f} s/step")
        if is_final:
            parts.append(f"took {duration(self.run_seconds)}")
        elif self.seconds_left is not None:
            parts.append(f"{_clock_time(self.seconds_left)} left")
        return "  ".join([*parts, *_named_numbers(self.values)])


@final
class ProgressAction(Action):
    """Shows the progress of a run: steps, time left, speed, the latest metrics, and evaluation results.

    The action never waits for the devices; it shows the latest metrics that have reached the host. Evaluation results
    and log lines appear above the bar. In a multi-process job, only the first process shows anything.

    >>> progress = ProgressAction(4, bar="plain", stream=sys.stdout)
    >>> progress(None, {"loss": 0.5}, step_num=1)
    step 1 of 4 (25%)  loss 0.5000

    Args:
      total_steps: The total number of updates in the run, or None to use the number provided by the loop.
      interval: See `Action`. By default, the display is updated up to ten times per second, and steps between updates
        have no overhead.
      bar: "tqdm" shows a bar, "plain" prints occasional lines, and "auto" shows a bar where it can be redrawn (on a
        terminal or in a notebook) and prints lines elsewhere. If the output goes to a file, at most one line is printed
        every 10 seconds, and even fewer in a long run.
      min_seconds: The minimum number of seconds between two updates of the display.
      names: The metrics to show, in this order. If None, all metrics except the loop's statistics (`jaxloop/...`) are
        shown. Evaluation metrics are always shown.
      stream: The stream to write to. If None, stderr is used, or stdout in a notebook.
    """

    needs_all_outputs = False

    def __init__(
        self,
        total_steps: int | None = None,
        interval: int | Schedule = _NOW_AND_THEN,
        *,
        bar: str = "auto",
        min_seconds: float = 0.1,
        names: Sequence[str] | None = None,
        stream: TextIO | None = None,
    ):
        super().__init__(interval)
        checks.check_positive("ProgressAction.total_steps", total_steps, optional=True)
        if bar not in _BARS:
            raise ValueError(
                f"ProgressAction.bar must be one of {', '.join(map(repr, _BARS))}, got {bar!r}. Write bar='tqdm' for a "
                "bar, or bar='plain' for lines."
            )
        if min_seconds < 0:
            raise ValueError(f"ProgressAction.min_seconds must not be negative, got {min_seconds}.")
        if isinstance(names, str):
            raise TypeError(f"ProgressAction.names takes a list of names, got {names!r}. Write [{names!r}].")
        self._total_steps, self._kind, self._min_seconds = total_steps, bar, min_seconds
        self._names = None if names is None else tuple(names)
        self._stream = stream
        self._forget()

    def _forget(self) -> None:
        """Resets the action, so that the next call is the first one of a run."""
        self._bar: _PlainBar | _TqdmBar | None = None
        self._next_update = self._next_line = -math.inf
        self._run_began_at: float | None = None
        self._began_at: tuple[int, float] | None = None  # The step and the time of the first call.
        self._newest: tuple[int, Elapsed | None, History | None, int | None] = (0, None, None, None)
        self._newest_at = 0.0
        self._outputs: dict[str, Any] = {}
        self._rows_seen = 0
        self._results_seen: dict[str, Elapsed] = {}

    def __repr__(self) -> str:
        return f"ProgressAction(bar={self._kind!r}, interval={self.interval})"

    def __call__(
        self,
        state: Any,
        outputs: types.Output,
        *,
        step_num: int,
        elapsed: Elapsed | None = None,
        history: History | None = None,
        total_steps: int | None = None,
        spent: Spent | None = None,
        **kwargs: Any,
    ) -> None:
        if not distributed.is_first_process():
            return
        if step_num < self._newest[0]:
            self._end(self._newest_at)  # The previous run was not closed.
        self._newest = (step_num, elapsed, history, self._total_steps or total_steps)
        self._newest_at = now = timing.clock()
        self._outputs.update(outputs or {})
        if self._run_began_at is None:
            self._run_began_at = now - (spent.total if spent is not None else 0.0)
        if now >= self._next_update or step_num == total_steps:
            self._update(now)

    def begin_run(self, step_num: int, *, can_resume: bool) -> None:
        if distributed.is_first_process():
            self._end(self._newest_at)
            self._run_began_at = timing.clock()
            self._bar = self._make_bar(Progress(step_num, self._total_steps, 0, 0.0, {}))
            self._bar.announce(f"step {step_num:,}: compiling the first step")

    def _update(self, now: float) -> None:
        """Shows the results of new evaluations, and redraws the bar or prints a line if it is due."""
        if self._began_at is None:
            self._began_at = (self._newest[0], now)
            self._skip_old_results()
        if self._bar is None:
            self._bar = self._make_bar(self._progress(now))
        for line in self._new_results():
            self._bar.write(line)
        if self._bar.is_live or now >= self._next_line:
            progress = self._progress(now)
            self._bar.draw(progress)
            self._next_line = now + progress.seconds_between_lines
        self._next_update = now + self._min_seconds

    def _progress(self, now: float) -> Progress:
        steps, _, _, total = self._newest
        (first_step, since), run_began_at = self._began_at or (steps, now), self._run_began_at
        values = metrics.summarize({name: value for name, value in self._outputs.items() if _is_on_host(value)})
        shown = sorted(name for name in values if not name.startswith("jaxloop/"))
        names = shown if self._names is None else [name for name in self._names if name in values]
        shown = {name: values[name] for name in names}
        run_seconds = now - (since if run_began_at is None else run_began_at)
        return Progress(steps, total, steps - first_step, now - since, shown, run_seconds)

    def _make_bar(self, progress: Progress) -> "_PlainBar | _TqdmBar":
        stream = self._stream or (sys.stdout if _is_notebook(sys.stdout) else sys.stderr)
        redraws = bool(getattr(stream, "isatty", lambda: False)()) or _is_notebook(stream)
        if self._kind == "plain" or (self._kind == "auto" and not redraws):
            return _PlainBar(stream)
        return _TqdmBar(stream, redraws, progress)

    # Results of evaluations --------------------------------------------------------------------------

    def _skip_old_results(self) -> None:
        """Marks results from before the run was resumed as already shown."""
        steps, elapsed, history, _ = self._newest
        before = elapsed.previous if elapsed is not None else None
        if history is not None and (before.steps if before is not None else steps - 1) > 0:
            self._rows_seen, self._results_seen = len(history), _newest_results(history)

    def _new_results(self) -> Iterator[str]:
        """Yields a line for each evaluation since the last update."""
        history = self._newest[2]
        if history is None or len(history) == self._rows_seen:
            return
        rows = range(self._rows_seen, len(history))
        seen, newest = self._results_seen, _newest_results(history)
        self._rows_seen, self._results_seen = len(history), newest
        if newest != seen:  # Reading other rows would wait for values still on the devices.
            for index in rows:
                yield from _result_lines(history[index])

    # The end -----------------------------------------------------------------------------------------

    def flush(self) -> None:
        steps, elapsed, _, total = self._newest
        if elapsed is not None and elapsed.is_last and (total is None or steps >= total):
            self.close()  # Nothing else closes the actions of a standalone loop.

    def close(self) -> None:
        self._end(timing.clock())

    def _end(self, now: float) -> None:
        """Closes the bar, if there is one. `now` is the time at which the run ended."""
        if self._bar is not None and self._began_at is None:  # The run ended before its first step.
            self._bar.clear()
        elif self._bar is not None:
            for line in self._new_results():
                self._bar.write(line)
            self._bar.draw(self._progress(now), is_final=True)
            missing = [name for name in self._names or () if name not in self._outputs]
            if missing:
                logging.warning(
                    f"ProgressAction showed no {checks.listed(missing)}, because no output has that name. There were: "
                    f"{checks.listed(sorted(self._outputs)) or 'none'}."
                )
        self._forget()


# Bars --------------------------------------------------------------------------------------------


class _PlainBar:
    """Shows progress as separate lines."""

    is_live = False
    """True if each `draw` replaces the previous output. If False, `draw` should be called rarely."""

    def __init__(self, stream: TextIO):
        self._stream, self._drawn_at = stream, -1

    def announce(self, text: str) -> None:
        """Shows a message until the first call to `draw`."""
        self.write(text)

    def draw(self, progress: Progress, *, is_final: bool = False) -> None:
        """Shows the progress. If `is_final` is True, also closes the bar and leaves it on the screen."""
        if self._drawn_at != progress.steps or not is_final:
            self.write(progress.line(is_final=is_final))
        self._drawn_at = progress.steps

    def write(self, line: str) -> None:
        """Writes a permanent line above the bar."""
        print(line, file=self._stream, flush=True)

    def clear(self) -> None:
        """Closes the bar and removes it from the screen."""


class _TqdmBar:
    """Shows progress as a tqdm bar (in notebooks with ipywidgets, as a widget). See `_PlainBar`.

    Log lines appear above the bar. Metrics that don't fit on the line are cut off until the end.
    """

    def __init__(self, stream: TextIO, is_live: bool, progress: Progress):
        self._stream, self.is_live = stream, is_live
        has_widgets = _is_notebook(stream) and checks.is_installed("ipywidgets")
        size: dict[str, Any] = {"dynamic_ncols": True}
        with contextlib.suppress(AttributeError, OSError, ValueError):  # It is not a terminal.
            if 0 in os.get_terminal_size(stream.fileno()):  # As in a container, where tqdm would show nothing.
                size = {"ncols": 100, "nrows": 24}
        make: Any = importlib.import_module("tqdm.notebook" if has_widgets else "tqdm").tqdm
        # Without a minimum interval, each call of `draw` draws.
        options = {"file": stream, "unit": " steps", "mininterval": 0, "miniters": 0, **size}
        self._tqdm = make(initial=progress.steps, total=progress.total, **options)
        self._tqdm.start_t -= progress.run_seconds
        if shape := self._tqdm.dynamic_ncols:  # Leaves room for the ^C that a terminal shows after the bar.
            self._tqdm.dynamic_ncols = lambda stream: (shape(stream)[0] and shape(stream)[0] - 2, shape(stream)[1])
        self._handlers = [each for each in (*logging.get_absl_logger().root.handlers, py_logging.lastResort) if each]
        for handler in self._handlers if is_live and not has_widgets else ():
            handler.addFilter(self._make_way)

    def _make_way(self, record: Any) -> bool:
        """Clears the bar before a log line is written; the next `draw` restores it."""
        self._tqdm.clear()
        self._stream.write("\r\x1b[K")  # Also clears what the terminal shows after the bar, such as ^C.
        return True

    def announce(self, text: str) -> None:
        self._tqdm.bar_format = "{desc}"
        self._tqdm.set_description_str(text)

    def draw(self, progress: Progress, *, is_final: bool = False) -> None:
        self._tqdm.bar_format = None
        self._tqdm.set_description_str("", refresh=False)
        self._tqdm.total = progress.total
        values = [f"{printable(name)}={_number(value)}" for name, value in progress.values.items()]
        self._tqdm.set_postfix_str(", ".join(values), refresh=False)
        self._tqdm.update(progress.steps - self._tqdm.n)
        if is_final:
            self._tqdm.ncols = self._tqdm.dynamic_ncols = None  # Not truncated to the width of the terminal.
            self._close()

    def write(self, line: str) -> None:
        self._tqdm.write(line, file=self._stream)

    def clear(self) -> None:
        self._tqdm.leave = False
        self._close()

    def _close(self) -> None:
        for handler in self._handlers:
            handler.removeFilter(self._make_way)
        self._tqdm.close()


def _is_notebook(stream: TextIO) -> bool:
    """Returns True if a stream is shown in a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return stream in (sys.stdout, sys.stderr) and getattr(shell, "kernel", None) is not None


# Values ------------------------------------------------------------------------------------------


def _number(value: float) -> str:
    """Formats a metric to four decimal places, or in scientific notation if it is very small or very large.

    >>> _number(0.97789), _number(2.5e-5), _number(0.0), _number(3e9)
    ('0.9779', '2.5000e-05', '0.0000', '3.0000e+09')
    """
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e6 else f"{value:.4e}"


def _named_numbers(values: Mapping[str, float]) -> list[str]:
    return [f"{printable(name)} {_number(value)}" for name, value in values.items()]


def _clock_time(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _is_on_host(value: Any) -> bool:
    """Returns True if a value is a number, or a list of numbers, that can be read without waiting."""
    items = value if isinstance(value, list) else [value]
    items = [item.value if isinstance(item, types.MetricWithMetadata) else item for item in items]
    return all(item is None or isinstance(item, bool | int | float | np.generic) for item in items)


def _is_result(path: str) -> bool:
    """Returns True if a history's path refers to an evaluation result, such as `test.accuracy`."""
    group, _, name = path.partition(".")
    return bool(name) and group not in ("train", "jaxloop") and not name.startswith("jaxloop.")


def _newest_results(history: History) -> dict[str, Elapsed]:
    found = {path: history.last(path) for path in history.paths() if _is_result(path)}
    return {path: last[0] for path, last in found.items() if last is not None}


def _result_lines(row: Row) -> Iterator[str]:
    """Yields a line such as `step 1,000  test: accuracy 0.9812  loss 0.0713` for each evaluation in a history row."""
    groups: dict[str, dict[str, float]] = {}
    for keys, value in jax.tree_util.tree_leaves_with_path(row.logs):
        path = checks.path_name(keys).replace("/", ".")
        if _is_result(path) and not isinstance(value, str):
            group, _, name = path.partition(".")
            groups.setdefault(group, {})[name.replace(".", "/")] = value
    for group, values in groups.items():
        yield f"step {row.elapsed.steps:,}  {printable(group)}: {'  '.join(_named_numbers(values))}"
