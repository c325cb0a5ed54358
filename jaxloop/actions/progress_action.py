"""How far the run is."""

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO, final

import numpy as np
from absl import logging

from jaxloop import checks, distributed, metrics, types
from jaxloop.actions.action import Action
from jaxloop.actions.bars import (
    Bar,
    KerasBar,
    PlainBar,
    Progress,
    TqdmBar,
    is_live,
    is_notebook,
    named_numbers,
)
from jaxloop.history import History, Row
from jaxloop.schedules import Elapsed, Schedule, every, first, last
from jaxloop.text import printable

_BARS = ("auto", "tqdm", "keras", "plain")
_NOW_AND_THEN = every(time=0.1) | first() | last()
# Where each drawing stays, as in a file: the least seconds between two, and how many of them in all where one knows.
_LINE_SECONDS = 10.0
_MOST_LINES = 50


@final
class ProgressAction(Action):
    """Shows how far the run is: steps done and to do, time left, speed, the newest metrics, results of evaluations.

    It never waits for the devices: it shows the newest metrics that are there. Results of evaluations stay as lines
    above the bar. Only the first process shows anything.

    >>> import itertools
    >>> ticks = itertools.count(0.0, 2.0)
    >>> progress = ProgressAction(4, bar="plain", stream=sys.stdout, clock=lambda: next(ticks))
    >>> for step in range(1, 5):
    ...     progress(None, {"loss": 1 / step}, step_num=step)
    step 1 of 4 (25%)  loss 1.0000
    >>> progress.close()
    step 4 of 4 (100%)  2.7 s/step  took 0:08  loss 0.2500

    Args:
      total_steps: updates of the whole run; None for what the loop says.
      interval: see `Action`. By default ten times a second, so that it costs nothing in between.
      bar: "tqdm", "keras" for a bar as Keras draws it, or "plain" for a line now and then. "auto" is "tqdm" on a
        terminal and in a notebook, where a bar can be redrawn, and "plain" in a file. Any bar writes only now and then
        to a file: every 10 seconds at most, and ever more rarely in a long run.
      min_seconds: between two drawings.
      names: the metrics to show, in this order; None for all but the loop's statistics (`jaxloop/...`). Results of
        evaluations are shown with all of theirs.
      stream: where to write; None for stderr, or stdout in a notebook.
      clock: tells the time in seconds.
    """

    waits_for_outputs = False

    def __init__(
        self,
        total_steps: int | None = None,
        interval: int | Schedule = _NOW_AND_THEN,
        *,
        bar: str = "auto",
        min_seconds: float = 0.1,
        names: Sequence[str] | None = None,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        super().__init__(interval)
        checks.check_positive("ProgressAction.total_steps", total_steps, optional=True)
        if bar not in _BARS:
            raise ValueError(f"ProgressAction.bar must be one of {', '.join(map(repr, _BARS))}, got {bar!r}.")
        if min_seconds < 0:
            raise ValueError(f"ProgressAction.min_seconds must not be negative, got {min_seconds}.")
        if isinstance(names, str):
            raise TypeError(f"ProgressAction.names takes a list of names, got {names!r}. Write [{names!r}].")
        self._total_steps, self._kind, self._min_seconds = total_steps, bar, min_seconds
        self._names = None if names is None else tuple(names)
        self._stream, self._clock = stream, clock
        self._forget()

    def _forget(self) -> None:
        """The next call is the first of a run."""
        self._bar: Bar | None = None
        self._drawn: Progress | None = None
        self._next_look = -math.inf  # When it is worth to do anything.
        self._next_line = -math.inf  # Where drawings stay, when to draw.
        self._began_at: tuple[int, float] = (0, 0.0)
        self._newest: tuple[int, Elapsed | None, History | None, int | None] = (0, None, None, None)
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
        **kwargs: Any,
    ) -> None:
        self._newest = (step_num, elapsed, history, total_steps)
        if outputs:
            self._outputs.update(outputs)
        now = self._clock()
        if now >= self._next_look or step_num == total_steps:
            self._look(now)

    def _look(self, now: float) -> None:
        """Shows what there is to show."""
        if self._next_look == math.inf:
            return
        if self._drawn is not None and self._newest[0] < self._drawn.steps:
            self._end_bar(self._drawn)  # Of a run that nobody closed.
        bar = self._bar or self._begin_bar(now)
        if bar is None:
            self._next_look = math.inf
            return
        self._write_results(bar)
        if bar.is_live or now >= self._next_line:
            self._drawn = progress = self._progress(now)
            bar.draw(progress)
            self._next_line = now + _seconds_to_next_line(progress)
        self._next_look = now + self._min_seconds

    def _begin_bar(self, now: float) -> Bar | None:
        """Makes the bar of a run; none on the other processes."""
        if not distributed.is_first_process():
            return None
        self._began_at = (self._newest[0], now)
        self._pass_over_old_rows()
        self._bar = self._make_bar(self._progress(now))
        return self._bar

    def _end_bar(self, progress: Progress) -> None:
        if self._bar is not None:
            self._bar.close(progress)
        self._bar = self._drawn = None
        self._next_line = -math.inf

    def _progress(self, now: float) -> Progress:
        steps, _, _, total = self._newest
        first, since = self._began_at
        return Progress(steps, self._total_steps or total, steps - first, now - since, self._values())

    def _values(self) -> dict[str, float]:
        """The newest metrics to show."""
        on_host = {name: value for name, value in self._outputs.items() if _is_on_host(value)}
        values = metrics.summarize(on_host)
        if self._names is not None:
            return {name: values[name] for name in self._names if name in values}
        return {name: values[name] for name in sorted(values) if not name.startswith("jaxloop/")}

    def _make_bar(self, progress: Progress) -> Bar:
        stream = self._stream or (sys.stdout if is_notebook() else sys.stderr)
        redraws = is_live(stream)
        kind = self._kind if self._kind != "auto" else "tqdm" if redraws else "plain"
        if kind == "tqdm" and not checks.is_installed("tqdm"):
            logging.log_first_n(
                logging.WARNING,
                "ProgressAction shows plain lines instead of a bar, because tqdm is not installed: pip install tqdm.",
                1,
            )
            kind = "plain"
        match kind:
            case "tqdm":
                return TqdmBar(stream, redraws, progress)
            case "keras":
                return KerasBar(stream, redraws)
            case _:
                return PlainBar(stream)

    # Results of evaluations --------------------------------------------------------------------------

    def _pass_over_old_rows(self) -> None:
        """Those before a resume were shown then."""
        steps, elapsed, history, _ = self._newest
        before = elapsed.previous if elapsed is not None else None
        is_first_step = before.steps == 0 if before is not None else steps == 1
        if history is not None and not is_first_step:
            self._rows_seen = len(history)
            self._results_seen = self._newest_results(history)

    def _write_results(self, bar: Bar) -> None:
        """Writes a line for each evaluation that came since the last look."""
        history = self._newest[2]
        if history is None or len(history) == self._rows_seen:
            return
        newest = self._newest_results(history)
        if newest != self._results_seen:  # Reading the other rows would wait for values still on the devices.
            for index in range(self._rows_seen, len(history)):
                for line in _result_lines(history[index]):
                    bar.write(line)
        self._rows_seen, self._results_seen = len(history), newest

    def _newest_results(self, history: History) -> dict[str, Elapsed]:
        found = {path: history.last(path) for path in history.paths() if _is_result(path)}
        return {path: last[0] for path, last in found.items() if last is not None}

    # The end -----------------------------------------------------------------------------------------

    def flush(self) -> None:
        steps, elapsed, _, total = self._newest
        total = self._total_steps or total
        if elapsed is not None and elapsed.is_last and (total is None or steps >= total):
            self.close()  # A loop on its own closes nothing.

    def close(self) -> None:
        if self._bar is not None:
            self._write_results(self._bar)
            self._end_bar(self._progress(self._clock()))
            self._warn_of_missing_names()
        self._forget()

    def _warn_of_missing_names(self) -> None:
        missing = [name for name in self._names or () if name not in self._outputs]
        if missing:
            logging.warning(
                "ProgressAction showed no %s, because no output is named so. There were: %s.",
                ", ".join(map(printable, missing)),
                ", ".join(map(printable, sorted(self._outputs))) or "none",
            )


def _seconds_to_next_line(progress: Progress) -> float:
    """So long that a run has few lines, of known length or not."""
    if progress.seconds_left is not None:
        return max(_LINE_SECONDS, (progress.seconds + progress.seconds_left) / _MOST_LINES)
    return max(_LINE_SECONDS, progress.seconds / 10)


def _is_on_host(value: Any) -> bool:
    """Whether a value is a number, or a list of them, that can be read without waiting."""
    items = [
        item.value if isinstance(item, types.MetricWithMetadata) else item
        for item in (value if isinstance(value, list) else [value])
    ]
    return all(item is None or isinstance(item, bool | int | float | np.generic) for item in items)


def _is_result(path: str) -> bool:
    """Whether a path of a history belongs to an evaluation: `test.accuracy`."""
    group, *rest = path.split(".")
    return bool(rest) and group not in ("train", "jaxloop")


def _result_lines(row: Row) -> Iterator[str]:
    """`step 1,000  test: accuracy 0.9812  loss 0.0713` for each evaluation of a row."""
    groups: dict[str, dict[str, float]] = {}
    for path, value in _leaves(row.logs):
        group, _, name = path.partition(".")
        if _is_result(path) and not name.startswith("jaxloop.") and not isinstance(value, str):
            groups.setdefault(group, {})[name.replace(".", "/")] = value
    for group, values in groups.items():
        first, *rest = named_numbers({name: values[name] for name in sorted(values)})
        yield "  ".join([f"step {row.elapsed.steps:,}", f"{printable(group)}: {first}", *rest])


def _leaves(logs: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in logs.items():
        path = prefix + key.replace("/", ".")
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{path}.")
        else:
            yield path, value
