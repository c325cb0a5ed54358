"""Writing summaries."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, final

from absl import logging

from jaxloop import metrics, types
from jaxloop.actions.action import Action
from jaxloop.actions.background import Call, writer_of
from jaxloop.schedules import Schedule
from jaxloop.text import printable


@final
class SummaryAction(Action):
    """Writes what the steps since its last call came to.

    A scalar is written as its example-weighted mean over those steps, `clu.metrics` as what they compute, statistics
    as they are. Arrays `[N, H, W, C]` are written as images, other arrays as histograms, `MetricWithMetadata` as what
    it says: images, videos, audio, text or histograms.

    A thread writes, one for all actions with this writer, in the order of their calls, so that no loop waits for files;
    only where 64 writes are pending it does. It is through when a checkpoint is saved and when a run ends. An error in
    the writer comes up where the run next comes to it, with a note of what could not be written; a run that goes on
    from a checkpoint writes that first.

    Args:
      summary_writer: `jaxloop.actions.default_writer(workdir)`, or any object with the methods of
        `clu.metric_writers.MetricWriter`. The writer stays yours: it is flushed when a run ends, not closed. If you
        write to it yourself amid a run, it must bear calls from two threads, as those of `default_writer` do; or call
        `flush` of this action before.
      interval: see `Action`.
      flush_each_call: flushes after each call, so that TensorBoard follows at once, and waits for that.
      prefix: put before each name, as in `prefix="eval/"`, to tell a train loop's `loss` from an eval loop's.
      background: whether a thread writes. False for a writer that is bound to the thread that made it; say the same in
        all actions that share it.
    """

    def __init__(
        self,
        summary_writer: Any,
        interval: int | Schedule = 1,
        flush_each_call: bool = False,
        *,
        prefix: str = "",
        background: bool = True,
    ):
        super().__init__(interval)
        if not hasattr(summary_writer, "write_scalars"):
            raise TypeError(
                f"SummaryAction takes a writer with the methods of clu's MetricWriter, got {summary_writer!r}. "
                "jaxloop.default_writer(workdir) makes one."
            )
        self._summary_writer, self._writer = summary_writer, writer_of(summary_writer, background)
        self._flush_each_call = flush_each_call
        self._prefix = prefix
        self._left_out: set[str] = set()
        self._last_written: tuple[int, set[str]] = (-1, set())
        self._has_said_twice = False

    def __call__(self, state: Any, outputs: types.Output, *, step_num: int, **kwargs: Any) -> None:
        scalars, media = metrics.scalars_and_media(outputs)
        calls = []
        if scalars:
            values = {f"{self._prefix}{name}": value for name, value in scalars.items()}
            calls.append(Call("write_scalars", values, {}))
        for name, metric in media.items():
            of_name = self._media_calls(f"{self._prefix}{name}", metric.value, metric.type, metric.metadata or {})
            if not of_name:
                self._say_left_out(f"{self._prefix}{name}", f"its type is {metric.type}")
            calls += of_name
        if self._flush_each_call:
            calls.append(Call("flush", {}, {}))
        self._writer.put(self, step_num, calls, waits=self._flush_each_call)
        self._warn_of_rewrites(step_num, set(scalars))
        self._warn_of_the_rest(outputs, {*scalars, *media, types.STOP_LOOP})

    def _warn_of_rewrites(self, step: int, names: set[str]) -> None:
        last_step, last_names = self._last_written
        if step == last_step and names & last_names and not self._has_said_twice:
            self._has_said_twice = True
            logging.warning(
                "SummaryAction wrote %s twice for step %d. Where a train and an eval loop share it, give the eval loop "
                "one of its own, SummaryAction(writer, prefix='eval/').",
                ", ".join(map(printable, sorted(names & last_names))),
                step,
            )
        self._last_written = (step, names)

    def _warn_of_the_rest(self, outputs: types.Output, written: set[str]) -> None:
        for name in _not_among(outputs, written):
            self._say_left_out(name, _NOTHING_TO_WRITE)

    def check(self, state: Any, outputs: types.Output) -> Iterable[str]:
        scalars, media = metrics.scalars_and_media(outputs)
        for name, metric in media.items():
            try:
                if not self._media_calls(name, metric.value, metric.type, metric.metadata or {}):
                    yield f"SummaryAction does not write the output {name!r}: its type is {metric.type}."
            except ValueError as error:
                yield str(error)
        for name in _not_among(outputs, {*scalars, *media, types.STOP_LOOP}):
            yield f"SummaryAction does not write the output {name!r}: {_NOTHING_TO_WRITE}."

    @property
    def summary_writer(self) -> Any:
        """The writer that it was given."""
        return self._summary_writer

    @property
    def prefix(self) -> str:
        """What is put before each name."""
        return self._prefix

    def _media_calls(self, name: str, value: Any, kind: types.MetricType, metadata: Mapping[str, Any]) -> list[Call]:
        options, values = {}, {name: value}
        match kind:
            case types.MetricType.IMAGE:
                method = "write_images"
            case types.MetricType.VIDEO:
                method = "write_videos"
            case types.MetricType.AUDIO:
                if "sample_rate" not in metadata:
                    raise ValueError(
                        f"SummaryAction needs the sample rate of the audio output {name!r}: give "
                        "MetricWithMetadata(value, MetricType.AUDIO, metadata={'sample_rate': 16_000})."
                    )
                method, options = "write_audios", {"sample_rate": metadata["sample_rate"]}
            case types.MetricType.TEXT:
                method, values = "write_texts", {name: str(value)}
            case types.MetricType.HISTOGRAM:
                buckets = {name: metadata["num_buckets"]} if "num_buckets" in metadata else None
                method, options = "write_histograms", {"num_buckets": buckets}
            case _:
                return []
        return [Call(method, values, options)]

    def _say_left_out(self, name: str, reason: str) -> None:
        if name not in self._left_out:
            self._left_out.add(name)
            logging.warning("SummaryAction does not write the output %r: %s.", name, reason)

    def before_checkpoint(self) -> None:
        """Does nothing: `state_dict` flushes the writer, and keeps what it could not write."""

    def begin_run(self, step_num: int) -> None:
        self._writer.begin_run(self, step_num)

    def state_dict(self) -> Mapping[str, Any]:
        return self._writer.state_dict(self)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._writer.load_state_dict(self, state_dict)

    def flush(self) -> None:
        self._writer.flush()


_NOTHING_TO_WRITE = "it is neither a scalar, an array, a clu metric nor a MetricWithMetadata"


def _not_among(outputs: types.Output, written: set[str]) -> Iterator[str]:
    """The names of outputs that have a value, and are not among those that were written."""
    for name, value in (outputs or {}).items():
        is_empty = value is None or (isinstance(value, list) and all(item is None for item in value))
        # A Collection named `eval` is written as `eval/loss`, ...
        if not is_empty and not any(each == name or each.startswith(f"{name}/") for each in written):
            yield name
