"""The action that shows progress, as a bar or as lines in a file."""

import importlib
import itertools
import logging
import math
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO, final

import jax

from jaxloop import distributed, metrics, types
from jaxloop.actions.action import Action
from jaxloop.base import checks, timing
from jaxloop.base.text import printable
from jaxloop.base.timing import duration
from jaxloop.history import History, Row
from jaxloop.schedules import Schedule, every, first, last

_BARS = ("auto", "tqdm", "plain")
_NOW_AND_THEN = every(time=0.1) | first() | last()


@final
class ProgressAction(Action):
    """Shows the progress of a run: steps, time left, speed, the latest metrics, and evaluation results.

    As a loop's action, it never waits for the devices; it shows the latest metrics that have reached the host.
    Evaluation results and log lines appear above the bar. In a multi-process job, only the first process shows
    anything.

    >>> progress = ProgressAction(4, bar="plain", stream=sys.stdout)
    >>> progress(None, {"loss": 0.5}, step_num=1)
    step 1 of 4 (25%)  loss 0.5000

    Args:
      total_steps: The total number of updates in the run, or None to use the number provided by the loop.
      interval: See `Action`. By default, the display is updated up to ten times per second, and steps between updates
        have no overhead.
      bar: "tqdm" shows a tqdm bar, "plain" prints occasional lines, and "auto" shows a bar where it can be redrawn (on
        a terminal or in a notebook) and prints lines elsewhere. Lines become less frequent in a long run.
      min_seconds: The minimum number of seconds between two updates of the display. If None, 0.1 where the output can
        be redrawn, and 10 elsewhere.
      names: The metrics to show, in this order. If None, all metrics except the loop's statistics (`jaxloop/...`) are
        shown. Evaluation metrics are always shown.
      stream: The stream to write to. If None, stderr is used, or the notebook.
    """

    needs_all_outputs = False

    def __init__(
        self,
        total_steps: int | None = None,
        interval: int | Schedule = _NOW_AND_THEN,
        *,
        bar: str = "auto",
        min_seconds: float | None = None,
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
        if isinstance(names, str):
            raise TypeError(f"ProgressAction.names takes a list of names, got {names!r}. Write [{names!r}].")
        self._total_steps, self._kind, self._min_seconds = total_steps, bar, min_seconds
        self._names, self._stream = names, stream
        self._bar: _Lines | _TqdmBar | None = None
        self._values: dict[str, float] = {}  # The latest metrics of the run.
        self._results = _Results(0)

    def __repr__(self) -> str:
        return f"ProgressAction(bar={self._kind!r}, interval={self.interval})"

    def begin_run(self, step_num: int, *, can_resume: bool) -> None:
        if distributed.is_first_process():
            self.flush()
            self._begin(step_num, self._total_steps).announce(f"step {step_num:,}: compiling the first step")

    def _begin(self, step_num: int, total_steps: int | None) -> "_Lines | _TqdmBar":
        in_notebook = self._stream is None and "ipykernel" in sys.modules
        stream = self._stream or (sys.stdout if in_notebook else sys.stderr)
        redraws = stream.isatty() or in_notebook
        min_seconds = (0.1 if redraws else 10.0) if self._min_seconds is None else self._min_seconds
        if self._kind == "plain" or (self._kind == "auto" and not redraws):
            bar = _Lines(stream, min_seconds)
        else:
            bar = _TqdmBar(stream, min_seconds, step_num, total_steps)
        self._bar, self._values, self._results = bar, {}, _Results(step_num)
        return bar

    def __call__(
        self,
        state: Any,
        outputs: types.Output,
        *,
        step_num: int,
        history: History | None = None,
        total_steps: int | None = None,
        **kwargs: Any,
    ) -> None:
        if not distributed.is_first_process():
            return
        total_steps = self._total_steps or total_steps
        bar = self._bar or self._begin(step_num - 1, total_steps)
        self._values |= metrics.summarize(outputs)
        self._results.follow(history, step_num)
        self._write_results(bar)
        shown = sorted(name for name in self._values if not name.startswith("jaxloop/"))
        names = shown if self._names is None else self._names
        values = {name: self._values[name] for name in names if name in self._values}
        bar.draw(step_num, total_steps, values)

    def _write_results(self, bar: "_Lines | _TqdmBar") -> None:
        for line in self._results.new_lines():
            bar.write(line)

    def before_checkpoint(self) -> None:
        """Does nothing, because a checkpoint doesn't include the display."""

    def flush(self) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            self._write_results(bar)
            bar.close()


# Bars --------------------------------------------------------------------------------------------


class _Lines:
    """Shows progress as separate lines, the fewer the longer the run takes."""

    def __init__(self, stream: TextIO, min_seconds: float):
        self._stream, self._min_seconds = stream, min_seconds
        self._began_at, self._next_line = timing.clock(), -math.inf
        self._first: tuple[int, float] | None = None  # The step and the time of the first update.
        self._newest: tuple[int, int | None, Mapping[str, float]] | None = None

    def announce(self, text: str) -> None:
        """Shows a message until the first call to `draw`."""
        self.write(text)

    def draw(self, step: int, total: int | None, values: Mapping[str, float]) -> None:
        """Shows the progress, if an update is due."""
        now = timing.clock()
        self._first, self._newest = self._first or (step, now), (step, total, values)
        if now >= self._next_line:
            self._next_line = now + max(self._min_seconds, (now - self._began_at) / 50)
            self._write_progress(now)

    def write(self, line: str) -> None:
        """Writes a permanent line above the bar."""
        print(line, file=self._stream, flush=True)

    def close(self) -> None:
        """Shows the progress at the end of the run."""
        now = timing.clock()
        if self._newest is not None:
            self._write_progress(now, f"took {duration(now - self._began_at)}")

    def _write_progress(self, now: float, took: str = "") -> None:
        assert self._first is not None and self._newest is not None
        (first_step, first_at), (step, total, values) = self._first, self._newest
        parts = [f"step {step:,}" + (f" of {total:,} ({100 * step // total}%)" if total else "")]
        left = ""
        if step > first_step and now > first_at:
            speed = (step - first_step) / (now - first_at)
            parts.append(f"{speed:,.1f} steps/s" if speed >= 1 else f"{1 / speed:.1f} s/step")
            left = f"{duration(max(total - step, 0) / speed)} left" if total else ""
        self.write("  ".join([*parts, *filter(None, [took or left]), *_named_numbers(values)]))


class _TqdmBar:
    """Shows progress as a tqdm bar (in notebooks with ipywidgets, as a widget), with log lines above it.

    Has the same methods as `_Lines`.
    """

    def __init__(self, stream: TextIO, min_seconds: float, step: int, total: int | None):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # In a notebook without ipywidgets, tqdm warns and then writes text.
            make: Any = importlib.import_module("tqdm.auto").tqdm
        options = {"file": stream, "unit": " steps", "mininterval": min_seconds, "miniters": 0, "dynamic_ncols": True}
        self._tqdm = make(initial=step, total=total, **options)
        for handler in _log_handlers():
            handler.addFilter(self._make_way)

    def _make_way(self, record: Any) -> bool:
        """Clears the bar before a log line is written; the next `draw` restores it."""
        self._tqdm.clear()
        return True

    def announce(self, text: str) -> None:
        self._tqdm.set_description_str(text)

    def draw(self, step: int, total: int | None, values: Mapping[str, float]) -> None:
        self._tqdm.set_description_str("", refresh=False)
        self._tqdm.total = total
        shown = [f"{printable(name)}={_number(value)}" for name, value in values.items()]
        self._tqdm.set_postfix_str(", ".join(shown), refresh=False)
        self._tqdm.update(step - self._tqdm.n)

    def write(self, line: str) -> None:
        self._tqdm.write(line, file=self._tqdm.fp)

    def close(self) -> None:
        for handler in _log_handlers():
            handler.removeFilter(self._make_way)
        self._tqdm.close()


def _log_handlers() -> list[logging.Handler]:
    return [handler for handler in (*logging.getLogger().handlers, logging.lastResort) if handler]


# Results of evaluations --------------------------------------------------------------------------


class _Results:
    """The results of the evaluations of a run, as far as they have not been shown."""

    def __init__(self, step: int):
        self._shown_until = step or -1  # Results of step 0 belong to a run that begins there.
        self._history: History | None = None

    def follow(self, history: History | None, step: int) -> None:
        """Takes the newest history. The step is lower than before if the run was rewound."""
        self._history, self._shown_until = history, min(self._shown_until, step - 1)

    def new_lines(self) -> list[str]:
        """Returns a line such as `step 1,000  test: accuracy 0.9812  loss 0.0713` for each evaluation to be shown."""
        history, since = self._history, self._shown_until
        if history is None:
            return []
        found = [history.last(path) for path in history.paths() if _is_result(path)]
        self._shown_until = max([since, *(last[0].steps for last in found if last)])
        if self._shown_until == since:  # Reading other rows would wait for values still on the devices.
            return []
        newest_first = (history[index] for index in reversed(range(len(history))))
        rows = list(itertools.takewhile(lambda row: row.elapsed.steps > since, newest_first))
        return [line for row in reversed(rows) for line in _result_lines(row)]


# Values ------------------------------------------------------------------------------------------


def _number(value: float) -> str:
    """Formats a metric to four decimal places, or in scientific notation if it is very small or very large.

    >>> _number(0.97789), _number(2.5e-5), _number(0.0), _number(3e9)
    ('0.9779', '2.5000e-05', '0.0000', '3.0000e+09')
    """
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e6 else f"{value:.4e}"


def _named_numbers(values: Mapping[str, float]) -> list[str]:
    return [f"{printable(name)} {_number(value)}" for name, value in values.items()]


def _is_result(path: str) -> bool:
    """Returns True if a history's path refers to an evaluation result, such as `test.accuracy`."""
    group, _, name = path.partition(".")
    return bool(name) and group not in ("train", "jaxloop") and not name.startswith("jaxloop.")


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
