"""Writers of summaries."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, final

import numpy as np
from absl import logging
from etils import epath

from jaxloop import distributed
from jaxloop.actions.event_file import EventFile
from jaxloop.base import files
from jaxloop.base.text import printable


def default_writer(workdir: epath.PathLike) -> "LogWriter":
    """Returns a writer that writes TensorBoard event files to `workdir` and logs scalars.

    In a multi-process job, only the first process writes files; the others only log.

    Raises:
      OSError: If the directory can't be written to.
    """
    if not distributed.is_first_process():
        return LogWriter()
    return TensorBoardWriter(files.prepare_directory(workdir))


class LogWriter:
    """A writer that logs scalars, text and the shapes of other values. It has the same methods as clu's `MetricWriter`.

    Hooks:
      write_scalars, write_texts, write_images, write_videos, write_audios, write_histograms: Called by the actions that
        use this writer, in their background thread.
      write_hparams: Never called by actions, but you may call it yourself.
      flush: Called by the actions before a checkpoint is saved and when a run ends.
      close: Called by the owner of the writer, which is `fit` if `fit` created it.
    """

    def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
        shown = (f"{printable(name)}={float(value):.6g}" for name, value in scalars.items())
        logging.info("[%d] %s", step, ", ".join(shown))

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        for name, text in texts.items():
            logging.info("[%d] %s: %s", step, printable(name), "\n".join(map(printable, text.splitlines())))

    def write_images(self, step: int, images: Mapping[str, Any]) -> None:
        self._log_shapes(step, "images", images)

    def write_videos(self, step: int, videos: Mapping[str, Any]) -> None:
        self._log_shapes(step, "videos", videos)

    def write_audios(self, step: int, audios: Mapping[str, Any], *, sample_rate: int) -> None:
        self._log_shapes(step, f"audio at {sample_rate} Hz", audios)

    def write_histograms(
        self, step: int, arrays: Mapping[str, Any], num_buckets: Mapping[str, int] | None = None
    ) -> None:
        self._log_shapes(step, "histograms", arrays)

    def write_hparams(self, hparams: Mapping[str, Any]) -> None:
        logging.info("Hyperparameters: %s", dict(hparams))

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _log_shapes(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        logging.info("[%d] %s: %s", step, kind, {name: np.shape(value) for name, value in values.items()})


@final
class TensorBoardWriter(LogWriter):
    """Writes TensorBoard event files through tensorboardX, without TensorFlow. Also logs scalars and text.

    tensorboardX needs pillow for images, moviepy for videos and soundfile for audio. If a package is missing, the
    values that need it are skipped, and a warning is logged once. The event file is created by the first write.
    """

    def __init__(self, workdir: epath.PathLike):
        from tensorboardX import summary
        from tensorboardX.proto import summary_pb2

        self._workdir, self._new_summary = str(files.absolute(workdir)), summary_pb2.Summary  # pyright: ignore
        self._tag_of = functools.cache(lambda name: summary.scalar(name, 0.0).value[0].tag)  # As in `add_scalar`.
        self._missing: set[str | None] = set()
        self._file = EventFile(self._workdir)

    @functools.cached_property
    def _events(self) -> Any:
        import tensorboardX

        events: Any = tensorboardX.SummaryWriter(self._workdir, write_to_disk=False)
        # `EventFile` replaces tensorboardX's queue, thread and buffers.
        events.file_writer, events.all_writers, events._write_to_disk = self._file, {self._workdir: self._file}, True
        return events

    def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
        super().write_scalars(step, scalars)
        # Writing one event for all scalars is five times faster than `add_scalar`, which writes one event per scalar.
        summary = self._new_summary()
        for name, value in scalars.items():
            summary.value.add(tag=self._tag_of(name), simple_value=float(value))
        self._file.add_summary(summary, step)

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        super().write_texts(step, texts)
        for name, text in texts.items():
            self._events.add_text(name, text, step)

    def write_images(self, step: int, images: Mapping[str, Any]) -> None:
        for name, image in images.items():
            self._add(self._events.add_images, name, as_batch(image, 4), step, dataformats="NHWC")

    def write_videos(self, step: int, videos: Mapping[str, Any]) -> None:
        for name, video in videos.items():
            self._add(self._events.add_video, name, as_batch(video, 5), step, dataformats="NTHWC")

    def write_audios(self, step: int, audios: Mapping[str, Any], *, sample_rate: int) -> None:
        for name, audio in audios.items():
            for index, clip in enumerate(np.asarray(audio)):
                self._add(self._events.add_audio, f"{name}/{index}", clip, step, sample_rate=sample_rate)

    def write_histograms(
        self, step: int, arrays: Mapping[str, Any], num_buckets: Mapping[str, int] | None = None
    ) -> None:
        for name, array in arrays.items():
            bins = (num_buckets or {}).get(name)
            self._events.add_histogram(name, np.asarray(array), step, bins=bins or "tensorflow")

    def write_hparams(self, hparams: Mapping[str, Any]) -> None:
        super().write_hparams(hparams)
        self._events.add_hparams(dict(hparams), {})

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def resume(self, step: int, position: Mapping[str, Any] | None) -> None:
        """Makes TensorBoard hide the points that a killed run wrote after the checkpoint that this run resumes from.

        Args:
          step: The step at which the run starts or resumes.
          position: None if there is no checkpoint. All earlier points are then hidden if the run starts at step 0.
        """
        self._file.resume(0 if step == 0 and position is None else step + 1)

    def _add(self, add: Callable[..., None], name: str, value: Any, step: int, **options: Any) -> None:
        try:
            add(name, value, step, **options)
        except ModuleNotFoundError as error:
            if error.name not in self._missing:
                self._missing.add(error.name)
                logging.warning("%r is not written to the event file. To write it: pip install %s", name, error.name)


def as_batch(value: Any, num_axes: int) -> np.ndarray:
    """Converts a value to an array with `num_axes` axes, adding a leading axis if it is missing."""
    array = np.asarray(value)
    return array if array.ndim == num_axes else array[None]
