"""The class `Monitor`, which finds and compares the values of a metric."""

import difflib
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, final

from absl import logging

from jaxloop import metrics, types
from jaxloop.base import checks
from jaxloop.base.text import printable
from jaxloop.history import History, find_path, matching
from jaxloop.schedules import Elapsed

_MODES = ("auto", "min", "max")

# Words in a metric's name that determine its direction, and neutral words that don't affect it.
_WORDS = {
    "max": "accuracy acc auc auroc auprc ap map iou miou fmeasure dice precision recall bleu rouge ndcg mrr psnr ssim "
    "reward rewards return returns",
    "min": "loss error err perplexity ppl crossentropy nll bce mse rmse mae wer cer fid brier regret cost",
}
_OF_A_LOSS = re.compile("(?!.*(?:neg|minus|inverse|non_|not_)).+_loss")
_NEUTRAL = "val valid test train eval mean avg average macro micro weighted balanced top at k score rate log"


@final
class Monitor:
    """A metric to monitor, with its direction of improvement.

    >>> accuracy = Monitor("test/accuracy")
    >>> accuracy.mode
    'max'
    >>> accuracy.improves(0.98, 0.97), accuracy.improves(0.98, 0.97, min_delta=0.05)
    (True, False)
    >>> Monitor("loss").measured({"loss": [1.0, 3.0]}, None, Elapsed(2))
    2.0

    Args:
      name: The name of the metric. "test/loss" refers to the `loss` of the evaluation named `test`. "train/loss" refers
        to the output `loss` of the loop that calls the monitor's action. "loss" alone refers to that loop's output
        `loss` or, if there is none, to the `loss` of any evaluation.
      mode: "min", "max" or "auto". "auto" infers the direction from the last part of the name, if that part determines
        it: "min" for loss, error, perplexity, mse, nll and the like, and "max" for accuracy, auc, f1, iou, precision,
        recall, reward, bleu, psnr and the like. Case, digits (as in `mAP@50`) and neutral words such as `val`, `mean`
        and `score` are ignored.

    Raises:
      ValueError: If `mode` is "auto" and the name doesn't determine the direction ("score", for example).

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
        self._missing: tuple[Sequence[str], History | None] | None = None  # Set while no value has the metric's name.
        self._has_warned = False

    def __repr__(self) -> str:
        return f"Monitor({self.name!r}, {self.mode!r})"

    def __str__(self) -> str:
        return f"{printable(self.name)} ({'larger' if self.mode == 'max' else 'smaller'} is better)"

    def improves(self, value: float, best: float | None, min_delta: float = 0.0) -> bool:
        """Returns True if `value` beats `best` by more than `min_delta`.

        If `best` is None, any value except NaN is an improvement. NaN is never an improvement.
        """
        if best is None:
            return not math.isnan(value)
        return value > best + min_delta if self.mode == "max" else value < best - min_delta

    def has_failed(self, value: float) -> bool:
        """Returns True if a value is NaN, infinity (in "min" mode) or -infinity (in "max" mode)."""
        return math.isnan(value) or value == (-math.inf if self.mode == "max" else math.inf)

    def measured(self, outputs: types.Output, history: History | None, elapsed: Elapsed) -> float | None:
        """Returns the value of the metric at the step given by `elapsed`, or None if it was not measured at that step.

        The value is computed from `outputs` by `jaxloop.summarize`, or taken from the metric's latest row in `history`
        if that row is from the given step.

        If there has been an evaluation but no metric has the monitor's name, this method logs a warning once. It
        doesn't raise an error, because the metric may still appear at a later step. If the metric never appears,
        `check_was_measured` raises an error at the end of the run.
        """
        scalars = metrics.summarize(outputs)
        found = self._find(scalars)
        if found is not None or self._find(outputs or ()) is not None:  # If only the latter is true, all weights are 0.
            self._missing = None
            return None if found is None else scalars[found]
        last = None if history is None else history.last(self.name)
        if last is None:
            self._warn_of_missing(tuple(scalars), history)
            return None
        self._missing, (measured_at, value) = None, last
        return self._as_number(value) if measured_at.steps == elapsed.steps else None

    def begin_run(self) -> None:
        """Resets the monitor for a new run."""
        self._missing, self._has_warned = None, False

    def check_was_measured(self) -> None:
        """Raises a `ValueError` if the run measured other metrics but not this one. Called when the run ends."""
        if self._missing is not None:
            raise ValueError(f"{self.missing_message(*self._missing)} Give the name of one of them.")

    def is_measured(self, scalars: Iterable[str], history: History | None) -> bool:
        """Returns True if this metric is in the given history or among `scalars`, the names of a loop's scalars."""
        return self._find(scalars) is not None or (history is not None and history.last(self.name) is not None)

    def missing_message(self, scalars: Iterable[str], history: History | None) -> str:
        """Returns the error message to use if the metric doesn't exist. The message lists the available metrics."""
        paths = () if history is None else history.paths()
        there = sorted({*scalars, *(path.replace(".", "/") for path in paths)})
        nearest = difflib.get_close_matches(self.name, there, 12, cutoff=0.0)
        return f"No metric named {self.name!r} is measured. Available: {checks.listed(nearest)}."

    def _as_number(self, value: Any) -> float:
        if isinstance(value, str):
            raise TypeError(f"The monitored metric {self.name!r} must be a number, got {value!r}.")
        return float(value)

    def _find(self, names: Iterable[str]) -> str | None:
        """Returns the element of `names` to which the monitor's name refers, or None if there is none."""
        wanted, paths = (
            "/".join(_parts(self.name)).removeprefix("train/"),
            {name.replace("/", "."): name for name in names},
        )
        # The name may also be that of a field of a Collection, such as `loss` for `metrics/loss`.
        return paths[find_path(wanted, paths)] if matching(wanted, paths) else None

    def _warn_of_missing(self, scalars: Sequence[str], history: History | None) -> None:
        groups = set() if history is None else {_parts(path)[0] for path in history.paths()}
        if not groups and not scalars:
            return
        self._missing = (scalars, history)
        first, *rest = _parts(self.name)
        if not self._has_warned and (history is None or groups - {"train"} or (rest and first in groups)):
            self._has_warned = True
            logging.warning("%s A later step may still measure it.", self.missing_message(scalars, history))


def _parts(name: str) -> list[str]:
    return name.replace(".", "/").split("/")


def _mode_of(name: str) -> str:
    """Returns the direction of improvement ("min" or "max") of a metric with the given name.

    Raises:
      ValueError: If the name doesn't determine the direction.
    """
    last = _parts(re.split("[./]members[./]", name)[0])[-1].lower()  # Of an ensemble.
    joined = last.replace("cross_entropy", "crossentropy").replace("f1", "fmeasure")
    words = {*re.findall("[a-z]+", joined)} - {*_NEUTRAL.split()}
    if _OF_A_LOSS.fullmatch(last):
        return "min"
    for mode, known in _WORDS.items():
        if words and words <= {*known.split()} and last[0].isalpha():
            return mode
    raise ValueError(
        f"The name {name!r} doesn't say whether larger or smaller values are better. Pass mode='max' or mode='min' "
        f"(in the CLI: --mode max); for best= of CheckpointAction or monitor= of fit, pass the pair ({name!r}, 'max')."
    )
