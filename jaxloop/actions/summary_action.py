"""The action that writes summaries."""

import functools
from collections.abc import Iterable, Mapping
from typing import Any, final

from absl import logging

from jaxloop import metrics, types
from jaxloop.actions.action import Action, check_state_dict
from jaxloop.actions.writer_queue import WriterQueue
from jaxloop.base import checks
from jaxloop.base.text import printable
from jaxloop.schedules import Schedule

_METHODS = {
    types.MetricType.IMAGE: "write_images",
    types.MetricType.VIDEO: "write_videos",
    types.MetricType.AUDIO: "write_audios",
    types.MetricType.TEXT: "write_texts",
    types.MetricType.HISTOGRAM: "write_histograms",
}


@final
class SummaryAction(Action):
    """Writes a summary of all steps since the action was last called.

    Scalars are averaged over these steps, weighted by the number of examples. `clu.metrics` objects are written as
    their computed values, and statistics are written unchanged. Arrays of shape `[N, H, W, C]` are written as images,
    and all other arrays are written as histograms. The type of a `MetricWithMetadata` determines whether it is written
    as images, videos, audio, text or histograms.

    All actions that share a writer also share a background thread, which writes in the order in which the actions are
    called. The loop waits for the thread only if 64 writes are pending. All pending writes finish before a checkpoint
    is saved and before the run ends. If the writer raises an error, the next call to the action raises it again.

    Args:
      writer: `jaxloop.actions.default_writer(workdir)`, a writer for a tracker such as
        `jaxloop.actions.MlflowWriter`, or any object with the methods of `clu.metric_writers.MetricWriter`. Only
        `write_scalars` and `flush` are required. If the writer has no method for an output, a warning is logged once.
        You own the writer: it is flushed when a run ends, but not closed. If you also write to it yourself during a
        run, either use a thread-safe writer, such as jaxloop's own writers, or call this action's `flush` first.
      interval: See `Action`.
      prefix: A prefix to add to each name, such as "eval/" to distinguish the `loss` of an eval loop from that of the
        train loop.
      summary_writer: Another name for `writer`.

    Attributes:
      summary_writer: The writer.
      prefix: The argument of the same name.
    """

    def __init__(
        self,
        writer: Any = None,
        interval: int | Schedule = 1,
        *,
        prefix: str = "",
        summary_writer: Any = None,
    ):
        super().__init__(interval)
        writer = checks.only_one("SummaryAction", writer=writer, summary_writer=summary_writer)
        if not (hasattr(writer, "write_scalars") and hasattr(writer, "flush")):
            raise TypeError(
                f"SummaryAction takes a writer with write_scalars and flush, got {writer!r}. "
                "jaxloop.default_writer(workdir) makes one."
            )
        self.summary_writer: Any = writer
        self.prefix: str = prefix
        self._queue = WriterQueue.of(writer)
        self._warned: set[str] = set()

    def __call__(self, state: Any, outputs: types.Output, *, step_num: int, **kwargs: Any) -> None:
        scalars, media = metrics.scalars_and_media(outputs)
        if scalars:
            self._write(step_num, "write_scalars", {self.prefix + name: value for name, value in scalars.items()})
        for name, metric in media.items():
            if metric.type in self._methods:
                self._write_metric(step_num, name, metric)
        for text in self._not_written(outputs, scalars, media):
            if text not in self._warned:
                self._warned.add(text)
                logging.warning(text)

    def _write(self, step: int, method: str, values: Mapping[str, Any], **options: Any) -> None:
        place = f"{self}, after step {step}, writing {', '.join(map(printable, values))}"
        self._queue.put(place, method, step, values, **options)

    def _write_metric(self, step: int, name: str, metric: types.MetricWithMetadata) -> None:
        metadata, full_name = metric.metadata or {}, self.prefix + name
        options: dict[str, Any] = dict(metadata) if metric.type is types.MetricType.AUDIO else {}
        if metric.type is types.MetricType.HISTOGRAM and "num_buckets" in metadata:
            options["num_buckets"] = {full_name: metadata["num_buckets"]}
        value = str(metric.value) if metric.type is types.MetricType.TEXT else metric.value
        self._write(step, _METHODS[metric.type], {full_name: value}, **options)

    @functools.cached_property
    def _methods(self) -> dict[types.MetricType, str]:
        """The names of the methods that the writer has, keyed by the type of value that each method writes."""
        return {kind: method for kind, method in _METHODS.items() if hasattr(self.summary_writer, method)}

    def _not_written(self, outputs: types.Output, scalars: Mapping[str, Any], media: Mapping[str, Any]) -> list[str]:
        """Returns a sentence for each output that is not written."""
        names = [name for name, metric in media.items() if metric.type not in self._methods]
        for name in sorted((outputs or {}).keys() - {*scalars, *media, types.STOP_LOOP}):
            value = (outputs or {})[name]
            is_empty = all(map(metrics.is_empty, value if isinstance(value, list) else [value]))
            # A Collection named `eval` is written under names such as `eval/loss`.
            if not is_empty and not any(each.startswith(f"{name}/") for each in (*scalars, *media)):
                names.append(name)
        return [f"SummaryAction does not write the output {name!r}: its writer has no method for it." for name in names]

    def check(self, state: Any, outputs: types.Output) -> Iterable[str]:
        if outputs is None:
            yield f"{self!r} is one of the begin_actions, which receive no outputs. Add it to the end_actions."
        yield from self._not_written(outputs, *metrics.scalars_and_media(outputs))

    def before_checkpoint(self) -> None:
        """Does nothing, because `state_dict` flushes the writer."""

    def begin_run(self, step_num: int, *, can_resume: bool) -> None:
        if can_resume:
            self._queue.begin_run(str(self), step_num)

    def write_notes(self, notes: Mapping[str, Any]) -> None:
        if notes and hasattr(self.summary_writer, "write_notes"):
            self._queue.put(str(self), "write_notes", notes)

    def end_run(self, status: str) -> None:
        if hasattr(type(self.summary_writer), "write_status"):  # Not one that a `__getattr__` makes for any name.
            self._queue.put(str(self), "write_status", status)

    def state_dict(self) -> Mapping[str, Any]:
        return self._queue.state_dict(str(self))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        check_state_dict(self, {"position"} & state_dict.keys(), state_dict)
        self._queue.load_state_dict(state_dict)

    def flush(self) -> None:
        self._queue.flush()
