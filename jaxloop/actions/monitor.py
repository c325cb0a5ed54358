"""A monitored metric: its name, its value at a step, and the comparison of two values."""

import difflib
import math
import re
from collections.abc import Iterable
from typing import Any, final

from absl import logging

from jaxloop import checks, metrics, types
from jaxloop.history import History
from jaxloop.schedules import Elapsed
from jaxloop.text import printable

_MODES = ("auto", "min", "max")
_GOOD = frozenset(
    "acc accuracy auc auprc auroc bleu correct dice f1 iou map meteor miou precision psnr r2 recall return returns "
    "reward rewards rouge score scores sensitivity specificity ssim top1 top5".split()
)
_BAD = frozenset("brier cost distance entropy err error errors loss losses perplexity regret".split())


@final
class Monitor:
    """A metric to monitor: its name, and whether smaller or larger values are better.

    >>> accuracy = Monitor("test/accuracy")
    >>> accuracy.mode
    'max'
    >>> accuracy.improves(0.98, 0.97), accuracy.improves(0.98, 0.97, min_delta=0.05)
    (True, False)
    >>> Monitor("loss").measured({"loss": [1.0, 3.0]}, None, Elapsed(2))
    2.0

    Args:
      name: "loss" or "train/loss" for an output of the loop that calls the action; "test/accuracy" for the `accuracy`
        of the evaluation named `test`. "accuracy" alone refers to the loop's own output with that name or, if there is
        none, to the output of any evaluation.
      mode: "min", "max" or "auto". "auto" means "max" if the last part of the name contains a word such as accuracy,
        acc, auc, f1, precision, recall, score, reward, return, iou or bleu, but no word for a loss or an error;
        otherwise, it means "min".

    Attributes:
      name: The name that was passed to the constructor.
      mode: The direction of improvement: "min" or "max".
    """

    def __init__(self, name: str, mode: str = "auto"):
        if not isinstance(name, str) or not name.strip("/. "):
            raise TypeError(f"The name of a metric must be a string such as 'test/accuracy', got {name!r}.")
        if mode not in _MODES:
            raise ValueError(f"The mode of {name!r} must be 'auto', 'min' or 'max', got {mode!r}.")
        self.name: str = name
        self.mode: str = _mode_of(name) if mode == "auto" else mode
        self._has_warned = False

    def __repr__(self) -> str:
        return f"Monitor({self.name!r}, {self.mode!r})"

    def improves(self, value: float, best: float | None, min_delta: float = 0.0) -> bool:
        """Returns True if a value is not NaN and beats `best` by more than `min_delta`."""
        if best is None:
            return not math.isnan(value)
        return value > best + min_delta if self.mode == "max" else value < best - min_delta

    def has_failed(self, value: float) -> bool:
        """Returns True if a value is NaN, or infinite in the wrong direction."""
        return math.isnan(value) or value == (-math.inf if self.mode == "max" else math.inf)

    def measured(self, outputs: types.Output, history: History | None, elapsed: Elapsed) -> float | None:
        """Returns the value of the metric at this step, or None if it was not measured.

        The value is computed from `outputs` by `jaxloop.summarize`, or taken from the metric's latest row in `history`,
        provided that this row belongs to this step.

        Raises:
          ValueError: If there is no metric with this name. If a later evaluation may still measure it, a warning is
            logged once instead.
        """
        scalars = metrics.summarize(outputs)
        found = self._find(scalars)
        if found is not None:
            return scalars[found]
        last = None if history is None else history.last(self.name)
        if last is None:
            self._check_can_be_measured(scalars, history)
            return None
        measured_at, value = last
        return self._as_number(value) if measured_at.steps == elapsed.steps else None

    def is_measured(self, scalars: Iterable[str], history: History | None) -> bool:
        """Returns True if this metric is among a loop's scalars or in a run's history."""
        return self._find(scalars) is not None or (history is not None and history.last(self.name) is not None)

    def missing_message(self, scalars: Iterable[str], history: History | None) -> str:
        """Returns an error message for a metric that doesn't exist, with a list of the existing metrics."""
        paths = () if history is None else history.paths()
        there = sorted({*scalars, *(path.replace(".", "/") for path in paths)})
        return f"No metric named {self.name!r} is measured. Available: {checks.listed(self._by_similarity(there))}."

    def _as_number(self, value: Any) -> float:
        if isinstance(value, str):
            raise TypeError(f"The monitored metric {self.name!r} must be a number, got {value!r}.")
        return float(value)

    def _find(self, names: Iterable[str]) -> str | None:
        """Returns the name of the loop's output that this metric refers to; None if there is no such output."""
        wanted = _parts(self.name)
        wanted = wanted[1:] if len(wanted) > 1 and wanted[0] == "train" else wanted
        # Tries the full name first, then a field of a Collection, such as `loss` for `metrics/loss`.
        for matches in (lambda parts: parts == wanted, lambda parts: parts[-len(wanted) :] == wanted):
            found = [name for name in names if matches(_parts(name))]
            if len(found) > 1:
                raise ValueError(
                    f"{self.name!r} is ambiguous: it may be any of {', '.join(map(printable, sorted(found)))}. Use a "
                    "full name."
                )
            if found:
                return found[0]
        return None

    def _check_can_be_measured(self, scalars: Iterable[str], history: History | None) -> None:
        """Raises an error if no later output can have this name; logs a warning if another evaluation may have it."""
        groups = set() if history is None else {_parts(path)[0] for path in history.paths()}
        if not groups and not tuple(scalars):
            return
        first, *rest = _parts(self.name)
        has_evaluated = bool(groups - {"train"})
        if history is None or (rest and first in groups) or (has_evaluated and not rest):
            raise ValueError(f"{self.missing_message(scalars, history)} Give the name of one of them.")
        if has_evaluated and not self._has_warned:
            self._has_warned = True
            text = self.missing_message(scalars, history)
            logging.warning("%s An evaluation named %r may still measure it.", text, first)

    def _by_similarity(self, names: list[str]) -> list[str]:
        likeness = lambda name: difflib.SequenceMatcher(None, self.name, name).ratio()
        return sorted(names, key=likeness, reverse=True)[:12]


def _parts(name: str) -> list[str]:
    return name.replace(".", "/").split("/")


def _mode_of(name: str) -> str:
    """Returns the direction of improvement for a metric with this name."""
    last = _parts(name)[-1]
    words = {word.lower() for word in re.split(r"[^A-Za-z0-9]+|(?<=[a-z0-9])(?=[A-Z])", last)}
    return "max" if (words | {last.lower()}) & _GOOD and not words & _BAD else "min"
