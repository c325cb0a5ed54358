"""Summary writers."""

import functools
from collections.abc import Mapping
from typing import Any, final

import numpy as np
from absl import logging
from etils import epath

from jaxloop import distributed
from jaxloop.actions.event_file import EventFile
from jaxloop.base import files
from jaxloop.base.text import printable


def default_writer(workdir: epath.PathLike) -> "TensorBoardWriter":
    """Returns a writer that writes TensorBoard event files to `workdir`.

    The writer also logs scalars, text and hyperparameters. In a multi-process job, only the first process writes files.

    Raises:
      OSError: If the directory can't be written to.
    """
    if distributed.is_first_process():
        files.prepare_directory(workdir)
    return TensorBoardWriter(workdir)


@final
class TensorBoardWriter:
    """Writes TensorBoard event files with tensorboardX, which doesn't need TensorFlow.

    Also writes scalars, text and hyperparameters to the program's log. The event file is created by the first write.

    tensorboardX needs pillow for images. Without pillow, images are skipped, and a warning is logged once.
    """

    def __init__(self, workdir: epath.PathLike):
        from tensorboardX import summary
        from tensorboardX.proto import summary_pb2

        self._workdir, self._new_summary = str(files.absolute(workdir)), summary_pb2.Summary  # pyright: ignore
        self._tag_of = functools.cache(lambda name: summary.scalar(name, 0.0).value[0].tag)  # As in `add_scalar`.
        self._file = EventFile(self._workdir)

    @functools.cached_property
    def _events(self) -> Any:
        import tensorboardX

        events: Any = tensorboardX.SummaryWriter(self._workdir, write_to_disk=False)
        # `EventFile` replaces tensorboardX's queue, thread and buffers.
        events.file_writer, events.all_writers, events._write_to_disk = self._file, {self._workdir: self._file}, True
        return events

    def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Writes and logs scalars."""
        shown = (f"{printable(name)}={float(value):.6g}" for name, value in scalars.items())
        logging.info("[%d] %s", step, ", ".join(shown))
        # Writing one event for all scalars is five times faster than `add_scalar`, which writes one event per scalar.
        summary = self._new_summary()
        for name, value in scalars.items():
            summary.value.add(tag=self._tag_of(name), simple_value=float(value))
        self._file.add_summary(summary, step)

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Writes and logs text."""
        for name, text in texts.items():
            logging.info("[%d] %s: %s", step, printable(name), "\n".join(map(printable, text.splitlines())))
            self._events.add_text(name, text, step)

    def write_images(self, step: int, images: Mapping[str, Any]) -> None:
        """Writes images of shape `[N, H, W, C]` or `[H, W, C]`."""
        try:
            for name, image in images.items():
                self._events.add_images(name, as_batch(image, 4), step, dataformats="NHWC")
        except ModuleNotFoundError as error:
            text = "Images are not written to the event file. To write them: pip install %s"
            logging.log_first_n(logging.WARNING, text, 1, error.name)

    def write_histograms(
        self, step: int, arrays: Mapping[str, Any], num_buckets: Mapping[str, int] | None = None
    ) -> None:
        """Writes histograms of arrays. `num_buckets` maps names of arrays to numbers of buckets."""
        for name, array in arrays.items():
            bins = (num_buckets or {}).get(name)
            self._events.add_histogram(name, np.asarray(array), step, bins=bins or "tensorflow")

    def write_hparams(self, hparams: Mapping[str, Any]) -> None:
        """Writes and logs hyperparameters."""
        logging.info("Hyperparameters: %s", dict(hparams))
        self._events.add_hparams(dict(hparams), {})

    def flush(self) -> None:
        """Waits until everything is on disk."""
        self._file.flush()

    def close(self) -> None:
        """Closes the event file. The next write creates a new event file."""
        self._file.close()

    def resume(self, step: int, position: Mapping[str, Any] | None) -> None:
        """Makes TensorBoard hide all points after the given step. A killed run may have written such points.

        Args:
          step: The step at which the run starts or resumes.
          position: The writer's position from the checkpoint, or None if there is no checkpoint. If `position` is None
            and `step` is 0, all existing points are hidden, including those of step 0.
        """
        self._file.resume(0 if step == 0 and position is None else step + 1)


def as_batch(value: Any, num_axes: int) -> np.ndarray:
    """Converts a value to an array with `num_axes` axes, adding a leading axis if necessary."""
    array = np.asarray(value)
    return array if array.ndim == num_axes else array[None]
