"""The action that shows progress, as a bar or as lines of text."""

import importlib
import logging
import sys
import warnings
from collections.abc import Mapping
from typing import Any, TextIO, final

from jaxloop import distributed, metrics, types
from jaxloop.actions.action import Action
from jaxloop.base import checks
from jaxloop.base.text import printable
from jaxloop.history import History
from jaxloop.schedules import Schedule, every, first, last

_NOT_EVALUATED = {"train", "jaxloop"}  # The groups of a history that don't come from evaluations.
_BARS = ("auto", "tqdm", "plain")
_NOW_AND_THEN = every(time=0.1) | first() | last()
_LINE = "{n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"


@final
class ProgressAction(Action):
    """Shows the progress of a run: steps, time left, speed, the latest metrics, and evaluation results.

    As a loop's action, it never waits for the devices; it shows the latest metrics that have reached the host. As a
    step's action, it waits for the outputs of the step. Evaluation results and log lines appear above the bar. In a
    multi-process job, only the first process shows anything.

    >>> progress = ProgressAction(4, bar="plain", stream=sys.stdout, min_seconds=0)
    >>> progress(None, {"loss": 0.5}, step_num=2)  # doctest: +ELLIPSIS
    1/4 [...
    2/4 [..., loss=0.5000]

    Args:
      total_steps: The total number of updates in the run, or None to use the number provided by the loop.
      interval: See `Action`. By default, the action is called at the first and last steps and, in between, at most ten
        times per second. It adds no overhead to the steps between its calls. The display may be updated less often; see
        `min_seconds`.
      bar: The kind of display. "tqdm" shows a tqdm bar, "plain" prints occasional lines, and "auto" shows a bar on a
        terminal or in a notebook and prints lines elsewhere. In a long run, lines become less frequent.
      min_seconds: The minimum number of seconds between two updates of the display. None means 0.1 on a terminal or in
        a notebook, and 10 elsewhere.
      stream: The stream to write to. If None, progress is shown in the notebook or, outside notebooks, on stderr.
    """

    needs_all_outputs = False

    def __init__(
        self,
        total_steps: int | None = None,
        interval: int | Schedule = _NOW_AND_THEN,
        *,
        bar: str = "auto",
        min_seconds: float | None = None,
        stream: TextIO | None = None,
    ):
        super().__init__(interval)
        checks.check_positive("ProgressAction.total_steps", total_steps, optional=True)
        if bar not in _BARS:
            raise ValueError(
                f"ProgressAction.bar must be one of {', '.join(map(repr, _BARS))}, got {bar!r}. Write bar='tqdm' for a "
                "bar, or bar='plain' for lines."
            )
        self._total_steps, self._kind, self._min_seconds = total_steps, bar, min_seconds
        self._stream = stream
        self._bar: _Bar | None = None
        self._values: dict[str, float] = {}  # The latest metrics of the run.
        self._results = _Results(0)

    def __repr__(self) -> str:
        return f"ProgressAction(bar={self._kind!r}, interval={self.interval})"

    def begin_run(self, step_num: int, *, can_resume: bool) -> None:
        if distributed.is_first_process():
            self.flush()
            self._begin(step_num, self._total_steps, "compiling the first step")

    def _begin(self, step_num: int, total_steps: int | None, text: str | None = None) -> "_Bar":
        in_notebook = self._stream is None and "ipykernel" in sys.modules
        stream = self._stream or (sys.stdout if in_notebook else sys.stderr)
        redraws = stream.isatty() or in_notebook
        min_seconds = (0.1 if redraws else 10.0) if self._min_seconds is None else self._min_seconds
        is_plain = self._kind == "plain" or (self._kind == "auto" and not redraws)
        make = _Lines if is_plain else _Bar
        options = {"initial": step_num, "total": total_steps, "desc": text, "mininterval": min_seconds}
        self._bar, self._values, self._results = make(stream, **options), {}, _Results(step_num)
        return self._bar

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
        values = {name: value for name, value in sorted(self._values.items()) if not name.startswith("jaxloop/")}
        bar.draw(step_num, total_steps, values)

    def _write_results(self, bar: "_Bar") -> None:
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


class _Bar:
    """Shows progress as a tqdm bar (a widget in notebooks with ipywidgets), with log lines above it."""

    module = "tqdm.auto"

    def __init__(self, stream: Any, **options: Any):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # In a notebook without ipywidgets, tqdm warns and then writes text.
            make: Any = importlib.import_module(self.module).tqdm
        self._tqdm = make(file=stream, unit=" steps", miniters=0, **{"dynamic_ncols": True, **options})
        for handler in _log_handlers():
            handler.addFilter(self._make_way)

    def _make_way(self, record: Any) -> bool:
        """Clears the bar before a line is logged. The next `draw` restores the bar.

        This method is added to the log handlers as a filter that accepts all records.
        """
        self._tqdm.clear()
        return True

    def draw(self, step: int, total: int | None, values: Mapping[str, float]) -> None:
        """Shows the run's progress and the given metrics, unless the display was updated too recently."""
        self._tqdm.set_description_str("", refresh=False)
        self._tqdm.total = total
        shown = [f"{printable(name)}={_number(value)}" for name, value in values.items()]
        self._tqdm.set_postfix_str(", ".join(shown), refresh=False)
        self._tqdm.update(step - self._tqdm.n)

    def write(self, line: str) -> None:
        """Writes a permanent line above the bar."""
        self._tqdm.write(line, file=self._tqdm.fp)

    def close(self) -> None:
        for handler in _log_handlers():
            handler.removeFilter(self._make_way)
        self._tqdm.close()


class _Lines(_Bar):
    """Shows progress as separate lines, which become less frequent over the course of the run."""

    module = "tqdm"

    def __init__(self, stream: TextIO, **options: Any):
        first = "{desc}" if options["desc"] else _LINE
        super().__init__(_LineStream(stream), **options, bar_format=first, dynamic_ncols=False, position=0)

    def draw(self, step: int, total: int | None, values: Mapping[str, float]) -> None:
        self._tqdm.bar_format = _LINE
        self._tqdm.mininterval = max(self._tqdm.mininterval, self._tqdm.format_dict["elapsed"] / 50)
        super().draw(step, total, values)

    def write(self, line: str) -> None:
        self._tqdm.fp.write(line)


class _LineStream:
    """A stream that writes each non-blank string on its own line."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> None:
        if text.strip():
            print(text.strip(), file=self._stream, flush=True)


def _log_handlers() -> list[logging.Handler]:
    return [handler for handler in (*logging.getLogger().handlers, logging.lastResort) if handler]


# Results of evaluations --------------------------------------------------------------------------


class _Results:
    """The evaluation results in a run's history that have not been shown yet."""

    def __init__(self, step: int):
        self._step, self._shown_until = step, step or -1  # Results of step 0 belong to a run that begins there.
        self._history = History()

    def follow(self, history: History | None, step: int) -> None:
        """Sets the history (unless it is None) and the current step.

        After a rollback, `step` is lower than in the previous call. The results of the repeated steps are then shown
        again.
        """
        self._history = self._history if history is None else history
        self._step, self._shown_until = step, min(self._shown_until, step - 1)

    def new_lines(self) -> list[str]:
        """Returns one line per new evaluation, such as `step 1,000  test: accuracy 0.9812  loss 0.0713`."""
        results: dict[tuple[int, str], list[str]] = {}
        for record in self._history.records_after(self._shown_until, without=_NOT_EVALUATED):
            for path, value in sorted(record.items()):
                group, _, name = path.partition(".")
                hidden = not name or group in _NOT_EVALUATED or name.startswith("jaxloop")
                hidden |= metrics.is_of_members(path)
                if not hidden and not isinstance(value, str):
                    shown = f"{printable(name.replace('.', '/'))} {_number(value)}"
                    results.setdefault((record["steps"], group), []).append(shown)
        self._shown_until = max([self._shown_until, self._step - 1, *(step for step, _ in results)])
        return [
            f"step {step:,}  {printable(group)}: {'  '.join(numbers)}"
            for (step, group), numbers in sorted(results.items())
        ]


# Values ------------------------------------------------------------------------------------------


def _number(value: float) -> str:
    """Formats a metric to four decimal places, or in scientific notation if it is very small or very large.

    >>> _number(0.97789), _number(2.5e-5), _number(0.0), _number(3e9)
    ('0.9779', '2.5000e-05', '0.0000', '3.0000e+09')
    """
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e6 else f"{value:.4e}"
