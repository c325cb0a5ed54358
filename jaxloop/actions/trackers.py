"""Writers for experiment trackers: MLflow, trackio and Weights & Biases."""

import abc
import contextlib
import html
import importlib
import os
import re
import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, final

import numpy as np
from etils import epath

from jaxloop.actions.writers import as_batch
from jaxloop.base import files


class _TrackerWriter(abc.ABC):
    """The base class of all tracker writers. Stores the tracked run's ID and skips points that already exist.

    A tracked run is the tracker's record of a run. A point is the value of a metric at a step. Before the first point
    is written, the ID is saved in a file in the work directory. Each checkpoint also contains the ID. After a resume or
    an error, the next write first reads back the points that the tracker already has. These points are not written
    again. Writers are thread-safe. A subclass has a method for each kind of value that its tracker can store.
    """

    def __init__(self, workdir: epath.PathLike, package: str):
        self._module: Any = importlib.import_module(package)
        self._file = files.absolute(workdir) / f"tracked_run_{package}"
        self._lock = threading.RLock()
        self._id: str | None = None
        self._status = ""  # As the tracker shows it, such as "running"; "" if it is unknown.
        self._hparams: dict[str, Any] = {}  # Not written yet, like the notes.
        self._notes: dict[str, Any] = {}
        # The names and steps of the points that the tracker has from earlier attempts; None if they must be read back.
        self._known: set[tuple[str, int]] | None = set()

    @abc.abstractmethod
    def _open(self) -> None:
        """Opens the tracked run with the ID `self._id`, or creates it if it doesn't exist."""

    @abc.abstractmethod
    def _describe(self, hparams: Mapping[str, Any], notes: Mapping[str, Any]) -> None:
        """Writes the pending hyperparameters and notes."""

    @abc.abstractmethod
    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes one point for each value, at the given step."""

    @abc.abstractmethod
    def _points(self, step: int) -> Iterable[tuple[str, int]]:
        """Yields the metric's name and the step of each stored point whose step is `step` or later."""

    @abc.abstractmethod
    def _close(self, status: str) -> None:
        """Closes the tracked run with a status: "finished", "failed" or "killed".

        Returns only after the tracker has stored all points.
        """

    def _name(self, name: str) -> str:
        """Converts a name to one that the tracker allows."""
        return name

    def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
        self._write(step, {name: float(value) for name, value in scalars.items()})

    def write_hparams(self, hparams: Mapping[str, Any]) -> None:
        """Adds hyperparameters, to be written before the next point or by the next `flush`."""
        with self._lock:
            self._hparams |= hparams

    def write_notes(self, notes: Mapping[str, Any]) -> None:
        """Adds notes about the run, to be written before the next point or by the next `flush`."""
        with self._lock:
            self._notes |= notes

    def flush(self) -> None:
        """Waits until the tracker has stored everything."""
        if self._status == "running" or self._hparams or self._notes:
            with self._using():
                pass

    def write_status(self, status: str) -> None:
        """Stores a status ("finished", "failed" or "killed") and closes the tracked run. A later write reopens it."""
        with self._lock:
            if (self._id is not None or self._hparams or self._notes) and self._status != status:
                with self._using():
                    self._end(status)

    def close(self) -> None:
        """Closes the tracked run, if it is open. A later write reopens it."""
        self.flush()
        self._end("finished")

    def position(self) -> dict[str, Any]:
        """Returns the ID of the tracked run, to be stored in a checkpoint."""
        return {"run": self._id}

    def resume(self, step: int, position: Mapping[str, Any] | None) -> None:
        """Chooses the tracked run that the next write will continue.

        The ID of that tracked run is read from the checkpoint or, if the checkpoint has none, from the work directory.
        If neither contains an ID, the next write creates a new tracked run.

        Args:
          step: The step at which the run starts or resumes.
          position: The value that the method `position` returned when the checkpoint was saved, or None if there is no
            checkpoint.

        Raises:
          ValueError: If the argument `position` or the file in the work directory contains an invalid ID.
        """
        with self._lock:
            self._end("finished")
            saved = (position or {}).get("run")
            if saved is None and self._file.exists():
                saved = files.read_bytes(self._file).decode(errors="replace").strip()
            if saved is not None and not re.fullmatch("[0-9a-z]{8,64}", str(saved)):
                text = f"{saved!r} is not a tracked run of {type(self).__name__}."
                raise ValueError(f"{text} Delete {self._file} to begin a new one.")
            self._id, self._known, self._status = saved, None if saved else set(), ""

    def _write(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes the given values, except those that the tracker already has at this step."""
        with self._using():
            if self._known is None:
                self._known = set(self._points(step))
            new = {self._name(name): value for name, value in values.items()}
            if len(new) < len(values):
                raise ValueError(f"Two of these names are the same in the tracker: {', '.join(values)}. Rename one.")
            if new := {name: value for name, value in new.items() if (name, step) not in self._known}:
                self._log(step, new)

    @contextlib.contextmanager
    def _using(self) -> Iterator[None]:
        """Returns a context manager that opens the tracked run and writes pending hyperparameters and notes.

        After an error in the context, the next write first reads back the points that the tracker already has.
        """
        with self._lock:
            try:
                if self._id is None:
                    files.prepare_directory(self._file.parent)
                    self._id = secrets.token_hex(16)
                    files.write_atomically(self._file, f"{self._id}\n".encode())
                if self._status != "running":
                    self._open()
                    self._status = "running"
                if self._hparams or self._notes:
                    self._describe(self._hparams, self._notes)
                    self._hparams, self._notes = {}, {}
                yield
            except Exception as error:
                self._known = None
                error.add_note(f"in {type(self).__name__}, whose tracked run is {self._id}")
                raise

    def _end(self, status: str) -> None:
        with self._lock:
            if self._status == "running":
                self._status = status
                self._close(status)


class _MediaWriter(_TrackerWriter):
    """The base class of writers for trackers whose Python packages have classes for text and images."""

    @abc.abstractmethod
    def _text(self, text: str) -> Any:
        """Converts text to the type that the tracker uses for text."""

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        self._write(step, {name: self._text(text) for name, text in texts.items()})

    def write_images(self, step: int, images: Mapping[str, Any]) -> None:
        values = {}
        for name, image in images.items():
            pictures = _pictures(image)
            for i, each in enumerate(pictures):
                values[name if len(pictures) == 1 else f"{name}/{i}"] = self._module.Image(each)
        self._write(step, values)


@final
class MlflowWriter(_TrackerWriter):
    """Writes scalars to MLflow as metrics, and images and text as artifacts.

    >>> import jaxloop
    >>> def summaries(workdir):
    ...     writer = jaxloop.actions.MlflowWriter(workdir, "sqlite:///mlflow.db", "digits")
    ...     return jaxloop.SummaryAction(writer, jaxloop.every(steps=100))

    Hyperparameters become MLflow params, and notes become tags. An existing param keeps its value. Characters that
    MLflow doesn't allow in names become underscores. The status of the MLflow run shows how the run ended: FINISHED,
    FAILED (an error) or KILLED (a signal).

    The writer uses `MlflowClient` with the ID of its own MLflow run, so it doesn't affect the active MLflow run of any
    thread. MLflow can't delete duplicate points, so the writer looks up the existing points and doesn't write them
    again.

    Args:
      workdir: The run's work directory, which stores the ID of the MLflow run.
      tracking_uri: The URI of the tracking server or database, or None to use MLflow's default.
      experiment: The name of the experiment, which is created if it doesn't exist.
      run_name: The name of a new MLflow run, or None to use the name of the work directory.

    Raises:
      ModuleNotFoundError: If MLflow is not installed.
    """

    def __init__(
        self,
        workdir: epath.PathLike,
        tracking_uri: str | None = None,
        experiment: str = "Default",
        *,
        run_name: str | None = None,
    ):
        super().__init__(workdir, "mlflow")
        self._uri, self._experiment, self._run_name = tracking_uri, experiment, run_name or self._file.parent.name
        self._client: Any = None
        self._run = ""

    def _open(self) -> None:
        self._client = self._module.MlflowClient(self._uri)
        experiment = self._client.get_experiment_by_name(self._experiment)
        number = experiment.experiment_id if experiment else self._client.create_experiment(self._experiment)
        # The tag is known beforehand, so a resumed run finds the MLflow run even after a kill at this point.
        found = self._client.search_runs([number], f"tags.`jaxloop.run` = '{self._id}'")
        tags = {"jaxloop.run": self._id}
        run = found[0] if found else self._client.create_run(number, tags=tags, run_name=self._run_name)
        self._run = run.info.run_id
        self._client.update_run(self._run, status="RUNNING")

    def _describe(self, hparams: Mapping[str, Any], notes: Mapping[str, Any]) -> None:
        known = self._client.get_run(self._run).data.params
        params = {self._name(name): str(value) for name, value in hparams.items()}
        new = [self._module.entities.Param(name, value) for name, value in params.items() if name not in known]
        tags = [self._module.entities.RunTag(self._name(name), str(value)) for name, value in notes.items()]
        self._client.log_batch(self._run, params=new, tags=tags, synchronous=True)

    def _name(self, name: str) -> str:
        return re.sub(r"[^\w.\-/ :]", "_", name, flags=re.ASCII)

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        now, new = int(time.time() * 1000), self._module.entities.Metric
        metrics = [new(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self._run, metrics=metrics, synchronous=True)

    def _points(self, step: int) -> Iterator[tuple[str, int]]:
        for name in self._client.get_run(self._run).data.metrics:
            for metric in self._client.get_metric_history(self._run, name):
                if metric.step >= step:
                    yield name, metric.step

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        with self._using():
            for name, text in texts.items():  # Artifacts with the same path are replaced.
                self._client.log_text(self._run, text, f"{self._name(name)}/{step:09d}.txt")

    def write_images(self, step: int, images: Mapping[str, Any]) -> None:
        with self._using():
            for name, image in images.items():
                for number, each in enumerate(_pictures(image)):
                    self._client.log_image(self._run, each, f"{self._name(name)}/{step:09d}_{number}.png")

    def _close(self, status: str) -> None:
        self._client.set_terminated(self._run, status.upper())


@final
class TrackioWriter(_MediaWriter):
    """Writes scalars, images and text to trackio's database on this machine.

    >>> import jaxloop
    >>> def summaries(workdir):
    ...     return jaxloop.SummaryAction(jaxloop.actions.TrackioWriter(workdir, "digits"), jaxloop.every(steps=100))

    Hyperparameters and notes become the config of the trackio run. The config entry `jaxloop/status` contains the run's
    status: "running", "finished", "failed" or "killed". Values that are written together are stored in one transaction.
    The writer doesn't use trackio's own thread, because that thread drops values that can't be written.
    `trackio.sync(project, space_id=...)` copies the project to a Hugging Face Space.

    Args:
      workdir: The run's work directory, which stores the ID of the trackio run.
      project: The name of the project.
      run_name: The name of the trackio run, or None to use the name of the work directory.

    Raises:
      ModuleNotFoundError: If trackio is not installed.
    """

    def __init__(self, workdir: epath.PathLike, project: str, *, run_name: str | None = None):
        super().__init__(workdir, "trackio")
        self._storage: Any = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
        self._reserved = frozenset(importlib.import_module("trackio.utils").RESERVED_KEYS)
        self._project, self._run_name = project, run_name or self._file.parent.name
        self._config: dict[str, Any] | None = None  # Not written yet. The next row includes it.
        self._newest_step: int | None = None

    def _open(self) -> None:
        self._storage.init_db(self._project)
        self._configure({_STATUS: "running"})

    def _describe(self, hparams: Mapping[str, Any], notes: Mapping[str, Any]) -> None:
        self._configure({**notes, **hparams})

    def _configure(self, values: Mapping[str, Any]) -> None:
        before = self._config
        if before is None:
            before = self._storage.get_run_config(self._project, self._run_name, run_id=self._id) or {}
        self._config = {**before, **values}

    def _name(self, name: str) -> str:
        return f"__{name}" if name in self._reserved else name  # As trackio does.

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        run = {"project": self._project, "run": self._run_name, "run_id": self._id}
        row = {name: self._stored(value, step) for name, value in values.items()}
        self._storage.bulk_log(**run, metrics_list=[row], steps=[step], config=self._config)
        self._config, self._newest_step = None, step

    def _points(self, step: int) -> Iterator[tuple[str, int]]:
        for row in self._storage.get_logs(self._project, self._run_name, run_id=self._id):
            if row["step"] >= step:
                yield from ((name, row["step"]) for name in row.keys() - {"step", "timestamp"})

    def _stored(self, value: Any, step: int) -> Any:
        if hasattr(value, "_save"):  # As in trackio's own `Run.log`; the public API always uses its thread.
            value._save(self._project, self._run_name, step)
        return value._to_dict() if hasattr(value, "_to_dict") else value

    def _text(self, text: str) -> Any:
        return self._module.Markdown(text)

    def _close(self, status: str) -> None:
        if self._newest_step is not None:
            self._configure({_STATUS: status})
            self._log(self._newest_step, {})


@final
class WandbWriter(_MediaWriter):
    """Writes scalars, images and text to Weights & Biases.

    >>> import jaxloop
    >>> def summaries(workdir):
    ...     return jaxloop.SummaryAction(jaxloop.actions.WandbWriter(workdir, "digits"), jaxloop.every(steps=100))

    Hyperparameters and notes become the config of the W&B run. The exit code of the W&B run shows how training ended: 0
    if it finished, 1 after an error, and 255 after a signal. The x axis is `jaxloop/step`, because W&B drops rows whose
    W&B step is lower than that of the previous row. Each flush, such as the one before a checkpoint is saved, finishes
    the W&B run, because only `wandb.finish` waits until W&B has stored everything. The next write resumes the W&B run.
    In online mode, finishing and resuming take a few seconds.

    In online mode, the writer reads back the existing points and doesn't write them again. In offline mode, it can't
    read them back, so a resumed run writes the points of repeated steps again. An offline run is stored in several
    directories, `wandb/offline-run-*`, in the work directory: each flush closes the current directory, and the next
    write creates a new one. To upload them all, run `wandb sync --include-offline wandb/offline-run-*`.

    Args:
      workdir: The run's work directory, which stores the ID of the W&B run.
      project: The name of the project, or None to use W&B's default.
      **options: Further arguments for `wandb.init`, except for `id`, `resume`, `dir` and `reinit`.

    Raises:
      ModuleNotFoundError: If wandb is not installed.
    """

    def __init__(self, workdir: epath.PathLike, project: str | None = None, **options: Any):
        super().__init__(workdir, "wandb")
        self._options = {"project": project, **options}
        self._run: Any = None

    def _open(self) -> None:
        own = {"id": self._id, "resume": "allow", "dir": os.fspath(self._file.parent), "reinit": "create_new"}
        self._run = self._module.init(**own, **self._options)
        self._run.define_metric(_STEP)
        self._run.define_metric("*", step_metric=_STEP)

    def _describe(self, hparams: Mapping[str, Any], notes: Mapping[str, Any]) -> None:
        self._run.config.update({**notes, **hparams}, allow_val_change=True)

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        self._run.log({**values, _STEP: step})

    def _points(self, step: int) -> Iterator[tuple[str, int]]:
        if self._run.offline:
            return
        run = self._module.Api().run(f"{self._run.entity}/{self._run.project}/{self._id}")
        for row in run.scan_history(use_cache=False):
            at = row.get(_STEP)
            if at is not None and at >= step:
                yield from ((name, at) for name, value in row.items() if value is not None)

    def _text(self, text: str) -> Any:
        return self._module.Html(f"<pre>{html.escape(text)}</pre>")

    def flush(self) -> None:
        super().flush()
        self._end("finished")

    def _close(self, status: str) -> None:
        self._run.finish(exit_code={"finished": 0, "failed": 1, "killed": 255}[status])


_STEP = "jaxloop/step"
_STATUS = "jaxloop/status"


def _pictures(image: Any) -> list[np.ndarray]:
    """Converts an image or a batch of images to a list of uint8 arrays of shape `[H, W, 3 or 4]`.

    Values whose dtype isn't uint8 are clipped to the range from 0 to 1 and multiplied by 255.
    """
    batch = as_batch(image, 4)
    if batch.dtype != np.uint8:
        batch = (np.clip(batch.astype(np.float32), 0, 1) * 255).astype(np.uint8)
    return list(np.repeat(batch, 3, axis=-1) if batch.shape[-1] == 1 else batch)
