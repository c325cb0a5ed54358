"""The action that writes summaries."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

from absl import logging

from jaxloop import metrics, types
from jaxloop.actions.writer_queue import Call, WriterAction
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
class SummaryAction(WriterAction):
    """Writes a summary of all steps since the action was last called.

    Scalars are averaged over these steps, weighted by the number of examples. `clu.metrics` objects are written as
    their computed values, and statistics are written unchanged. Arrays of shape `[N, H, W, C]` are written as images,
    and all other arrays are written as histograms. The type of a `MetricWithMetadata` determines whether it is written
    as images, videos, audio, text or histograms.

    All actions that share a writer also share a background thread, which writes in the order in which the actions are
    called. The loop waits for the thread only if 64 writes are pending. All pending writes finish before a checkpoint
    is saved and before the run ends. If the writer raises an error, the next call to the action raises it again, with a
    note that lists the values that could not be written. A resumed run writes these values first.

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
    """

    def __init__(
        self,
        writer: Any = None,
        interval: int | Schedule = 1,
        *,
        prefix: str = "",
        summary_writer: Any = None,
    ):
        writer = checks.only_one("SummaryAction", writer=writer, summary_writer=summary_writer)
        super().__init__(writer, interval)
        self._prefix = prefix
        self._warned: set[str] = set()

    def __call__(self, state: Any, outputs: types.Output, *, step_num: int, **kwargs: Any) -> None:
        scalars, media = metrics.scalars_and_media(outputs)
        calls = []
        if scalars:
            values = {self._prefix + name: value for name, value in scalars.items()}
            calls.append(Call(self, step_num, "write_scalars", values))
        calls += [self._call(step_num, name, metric) for name, metric in media.items() if metric.type in self._methods]
        self._queue.put(*calls)
        self._warn_of_rewrites(step_num, [self._prefix + name for name in scalars])
        for name, reason in _not_written(outputs, scalars, media, self._methods).items():
            self._warn_once(f"output {name}", f"SummaryAction does not write the output {name!r}: {reason}.")

    def begin_run(self, step_num: int, *, can_resume: bool) -> None:
        super().begin_run(step_num, can_resume=can_resume)
        self._queue.last_steps.clear()

    def _call(self, step: int, name: str, metric: types.MetricWithMetadata) -> Call:
        """Returns the call that writes a non-scalar metric."""
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
        """The names of the methods that the writer has, keyed by the type of value that each method writes."""
        return {kind: method for kind, method in _METHODS.items() if hasattr(self._summary_writer, method)}

    def _warn_of_rewrites(self, step: int, names: Sequence[str]) -> None:
        last_steps = self._queue.last_steps
        if rewritten := [name for name in names if last_steps.get(name) == step]:
            twice = ", ".join(map(printable, sorted(rewritten)))
            self._warn_once(
                "rewrites",
                f"SummaryAction wrote {twice} twice for step {step}. If a train and an eval loop share it, or its "
                "writer, give the eval loop a separate one: SummaryAction(writer, prefix='eval/').",
            )
        last_steps.update(dict.fromkeys(names, step))

    def _warn_once(self, topic: str, text: str) -> None:
        if topic not in self._warned:
            self._warned.add(topic)
            logging.warning(text)

    def check(self, state: Any, outputs: types.Output) -> Iterable[str]:
        if outputs is None:
            yield f"{self!r} is one of the begin_actions, which receive no outputs. Add it to the end_actions."
        scalars, media = metrics.scalars_and_media(outputs)
        for name, metric in media.items():
            try:
                if metric.type in self._methods:
                    self._call(0, name, metric)
            except ValueError as error:
                yield str(error)
        for name, reason in _not_written(outputs, scalars, media, self._methods).items():
            yield f"SummaryAction does not write the output {name!r}: {reason}."

    @property
    def prefix(self) -> str:
        """The prefix that is added to each name."""
        return self._prefix


def _not_written(
    outputs: types.Output,
    scalars: Mapping[str, float],
    media: Mapping[str, types.MetricWithMetadata],
    methods: Mapping[types.MetricType, str],
) -> dict[str, str]:
    """Returns a dict that maps the name of each output that is not written to the reason."""
    reasons = {}
    for name, metric in media.items():
        if metric.type not in methods:
            method = _METHODS.get(metric.type)
            reasons[name] = f"its writer has no {method}" if method else f"its type is {metric.type}"
    for name in sorted((outputs or {}).keys() - {*scalars, *media, types.STOP_LOOP}):
        value = (outputs or {})[name]
        is_empty = all(map(metrics.is_empty, value if isinstance(value, list) else [value]))
        # A Collection named `eval` is written under names such as `eval/loss`.
        if not is_empty and not any(each.startswith(f"{name}/") for each in (*scalars, *media)):
            reasons[name] = "it is neither a scalar, an array, a clu metric nor a MetricWithMetadata"
    return reasons
