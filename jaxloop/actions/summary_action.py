"""The action that writes summaries."""

import functools
from collections.abc import Iterable, Mapping
from typing import Any, final

from absl import logging

from jaxloop import metrics, types
from jaxloop.actions.writer_queue import Call, WriterAction
from jaxloop.base import checks
from jaxloop.schedules import Schedule

_METHODS = {
    types.MetricType.IMAGE: "write_images",
    types.MetricType.VIDEO: "write_videos",
    types.MetricType.AUDIO: "write_audios",
    types.MetricType.TEXT: "write_texts",
    types.MetricType.HISTOGRAM: "write_histograms",
}


@final
class SummaryAction(WriterAction):
    """Writes a summary of all steps since the action was last called.

    Scalars are averaged over these steps, weighted by the number of examples. For `clu.metrics` objects, the computed
    values are written. Statistics, such as those of a `StatLoop`, are written unchanged. An array of shape
    `[N, H, W, C]` with 1, 3 or 4 channels is written as images, and any other array as a histogram. The type of a
    `MetricWithMetadata` determines whether it is written as images, videos, audio, text or histograms. A histogram
    contains the values of all steps since the last call. Images, videos, audio and text come from the last step only.

    All actions that share a writer also share a background thread, which writes in the order in which the actions are
    called. The loop waits for the thread only if 64 writes are pending. All pending writes finish before a checkpoint
    is saved and before the run ends. If the writer raises an error, the next call to the action raises it again, with a
    note that names the values that could not be written. If a checkpoint is saved before these values are written, the
    checkpoint contains them, and a run that resumes from it writes them first.

    Args:
      writer: `jaxloop.actions.default_writer(workdir)`, a tracker's writer (such as `jaxloop.actions.MlflowWriter`), or
        any object with the methods of `clu.metric_writers.MetricWriter`. Only `write_scalars` and `flush` are required.
        If the writer has no method for the type of an output, a warning is logged once. You own the writer: it is
        flushed when a run ends, but not closed. If you also write to it yourself during a run, either use a thread-safe
        writer, such as jaxloop's own writers, or call this action's `flush` before each write of your own.
      interval: See `Action`.
      prefix: A prefix to add to each name, such as "eval/" to distinguish the `loss` of an eval loop from that of the
        train loop.
      members: Whether to write the values of each member of a `jaxloop.Ensemble`, in addition to their mean, minimum,
        maximum and standard deviation.
      summary_writer: Another name for `writer`.
    """

    def __init__(
        self,
        writer: Any = None,
        interval: int | Schedule = 1,
        *,
        prefix: str = "",
        members: bool = False,
        summary_writer: Any = None,
    ):
        writer = checks.only_one("SummaryAction", writer=writer, summary_writer=summary_writer)
        super().__init__(writer, interval)
        self._prefix, self._members = prefix, members
        self._warned: set[str] = set()

    def __call__(self, state: Any, outputs: types.Output, *, step_num: int, **kwargs: Any) -> None:
        scalars, media = metrics.scalars_and_media(outputs)
        calls = []
        if scalars:
            numbered = {name for name in scalars if name[-1:].isdigit() and metrics.is_of_members(name)}
            shown = scalars.keys() - (() if self._members else numbered)
            values = {self._prefix + name: value for name, value in scalars.items() if name in shown}
            calls.append(Call(self, step_num, "write_scalars", values))
        calls += [self._call(step_num, name, metric) for name, metric in media.items() if metric.type in self._methods]
        self._queue.put(*calls)
        for text in _not_written(outputs, scalars, media, self._methods):
            if text not in self._warned:
                self._warned.add(text)
                logging.warning(text)

    def _call(self, step: int, name: str, metric: types.MetricWithMetadata) -> Call:
        options, metadata = {}, metric.metadata or {}
        if metric.type is types.MetricType.AUDIO:
            if "sample_rate" not in metadata:
                raise ValueError(
                    f"SummaryAction needs the sample rate of the audio output {name!r}: give "
                    "MetricWithMetadata(value, MetricType.AUDIO, metadata={'sample_rate': 16_000})."
                )
            options["sample_rate"] = metadata["sample_rate"]
        name = self._prefix + name
        if metric.type is types.MetricType.HISTOGRAM:
            options["num_buckets"] = {name: metadata["num_buckets"]} if "num_buckets" in metadata else None
        value = str(metric.value) if metric.type is types.MetricType.TEXT else metric.value
        return Call(self, step, _METHODS[metric.type], {name: value}, options)

    @functools.cached_property
    def _methods(self) -> dict[types.MetricType, str]:
        """The names of the methods that the writer has for non-scalar metrics, keyed by metric type."""
        return {kind: method for kind, method in _METHODS.items() if hasattr(self._summary_writer, method)}

    def check(self, state: Any, outputs: types.Output) -> Iterable[str]:
        scalars, media = metrics.scalars_and_media(outputs)
        for name, metric in media.items():
            try:
                if metric.type in self._methods:
                    self._call(0, name, metric)
            except ValueError as error:
                yield str(error)
        yield from _not_written(outputs, scalars, media, self._methods)

    @property
    def prefix(self) -> str:
        """The prefix that is added to the name of each value that is written."""
        return self._prefix


def _not_written(
    outputs: types.Output,
    scalars: Mapping[str, float],
    media: Mapping[str, types.MetricWithMetadata],
    methods: Mapping[types.MetricType, str],
) -> list[str]:
    """Returns one message for each output that isn't written. Each message gives the reason."""
    reasons = {
        name: f"its writer has no {_METHODS.get(metric.type, f'method for {metric.type}')}"
        for name, metric in media.items()
        if metric.type not in methods
    }
    for name in sorted((outputs or {}).keys() - {*scalars, *media, types.STOP_LOOP}):
        value = (outputs or {})[name]
        is_empty = all(map(metrics.is_empty, value if isinstance(value, list) else [value]))
        # A Collection named `eval` is written under names such as `eval/loss`.
        if not is_empty and not any(each.startswith(f"{name}/") for each in (*scalars, *media)):
            reasons[name] = "it is neither a scalar, an array, a clu metric nor a MetricWithMetadata"
    return [f"SummaryAction does not write the output {name!r}: {reason}." for name, reason in reasons.items()]
