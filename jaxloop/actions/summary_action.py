"""Writing summaries."""

from collections.abc import Mapping
from typing import Any

from absl import logging

from jaxloop import metrics, types
from jaxloop.actions.action import Action
from jaxloop.schedules import Schedule


class SummaryAction(Action):
    """Writes what the steps since its last call came to.

    A scalar is written as its example-weighted mean over those steps, `clu.metrics` as what they compute, statistics
    as they are. Arrays `[N, H, W, C]` are written as images, other arrays as histograms, `MetricWithMetadata` as what
    it says: images, videos, audio, text or histograms.

    Args:
      summary_writer: `jaxloop.actions.default_writer(workdir)`, or any object with the methods of
        `clu.metric_writers.MetricWriter`. The writer stays yours: it is flushed when a run ends, not closed.
      interval: see `Action`.
      flush_each_call: flushes after each call, so that TensorBoard follows at once.
      prefix: put before each name, as in `prefix="eval/"`, to tell a train loop's `loss` from an eval loop's.
    """

    def __init__(
        self, summary_writer: Any, interval: int | Schedule = 1, flush_each_call: bool = False, *, prefix: str = ""
    ):
        super().__init__(interval)
        if not hasattr(summary_writer, "write_scalars"):
            raise TypeError(
                f"SummaryAction takes a writer with the methods of clu's MetricWriter, got {summary_writer!r}. "
                "jaxloop.default_writer(workdir) makes one."
            )
        self._writer = summary_writer
        self._flush_each_call = flush_each_call
        self._prefix = prefix
        self._left_out: set[str] = set()
        self._last_written: tuple[int, set[str]] = (-1, set())
        self._has_said_twice = False

    def __call__(self, state: Any, outputs: types.Output, *, step_num: int, **kwargs: Any) -> None:
        scalars, media = metrics.scalars_and_media(outputs)
        self._warn_of_rewrites(step_num, set(scalars))
        if scalars:
            self._writer.write_scalars(step_num, {f"{self._prefix}{name}": value for name, value in scalars.items()})
        for name, metric in media.items():
            self._write_media(step_num, f"{self._prefix}{name}", metric.value, metric.type, metric.metadata or {})
        self._warn_of_the_rest(outputs, {*scalars, *media, types.STOP_LOOP})
        if self._flush_each_call:
            self._writer.flush()

    def _warn_of_rewrites(self, step: int, names: set[str]) -> None:
        last_step, last_names = self._last_written
        if step == last_step and names & last_names and not self._has_said_twice:
            self._has_said_twice = True
            logging.warning(
                "SummaryAction wrote %s twice for step %d. Where a train and an eval loop share it, give the eval loop "
                "one of its own, SummaryAction(writer, prefix='eval/').",
                ", ".join(sorted(names & last_names)),
                step,
            )
        self._last_written = (step, names)

    def _warn_of_the_rest(self, outputs: types.Output, written: set[str]) -> None:
        for name, value in (outputs or {}).items():
            is_empty = value is None or (isinstance(value, list) and all(item is None for item in value))
            # A Collection named `eval` is written as `eval/loss`, ...
            if not is_empty and not any(each == name or each.startswith(f"{name}/") for each in written):
                self._say_left_out(name, "it is neither a scalar, an array, a clu metric nor a MetricWithMetadata")

    def _write_media(self, step: int, name: str, value: Any, kind: types.MetricType, metadata: Mapping) -> None:
        match kind:
            case types.MetricType.IMAGE:
                self._writer.write_images(step, {name: value})
            case types.MetricType.VIDEO:
                self._writer.write_videos(step, {name: value})
            case types.MetricType.AUDIO:
                if "sample_rate" not in metadata:
                    raise ValueError(
                        f"SummaryAction needs the sample rate of the audio output {name!r}: give "
                        "MetricWithMetadata(value, MetricType.AUDIO, metadata={'sample_rate': 16_000})."
                    )
                self._writer.write_audios(step, {name: value}, sample_rate=metadata["sample_rate"])
            case types.MetricType.TEXT:
                self._writer.write_texts(step, {name: str(value)})
            case types.MetricType.HISTOGRAM:
                buckets = {name: metadata["num_buckets"]} if "num_buckets" in metadata else None
                self._writer.write_histograms(step, {name: value}, num_buckets=buckets)
            case _:
                self._say_left_out(name, f"its type is {kind}")

    def _say_left_out(self, name: str, reason: str) -> None:
        if name not in self._left_out:
            self._left_out.add(name)
            logging.warning("SummaryAction does not write the output %r: %s.", name, reason)

    def flush(self) -> None:
        self._writer.flush()
