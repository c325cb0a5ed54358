"""Tests of the writers for trackers: their calls, and how a resumed run continues its tracked run."""

import itertools
import json
import math
import pathlib
import re
import subprocess
import sys
import types

import numpy as np
import pytest

import jaxloop
from jaxloop import actions, every, examples

PROGRAM = pathlib.Path(__file__).parent / "programs" / "tracking.py"


@pytest.mark.parametrize("tracker", ["mlflow", "trackio", "wandb", "aim"])
def test_after_sigkill_a_tracker_has_the_points_of_the_history(tracker, tmp_path):
    pytest.importorskip(tracker)
    command = [sys.executable, PROGRAM, tmp_path, tracker, "2", "1"]  # Before the first checkpoint, and after one.
    run = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout.splitlines()[-1])
    assert result["kills"] == 2 and not result["problems"]


# Fakes --------------------------------------------------------------------------------------------------------------


class Recorder:
    """Records the calls to its methods, which return True. The given values become attributes."""

    def __init__(self, calls, name="", **values):
        self._calls, self._name = calls, name
        vars(self).update(values)

    def __getattr__(self, name):
        def call(*args, **kwargs):
            self._calls.append((f"{self._name}{name}", *args, kwargs) if kwargs else (f"{self._name}{name}", *args))
            return True

        return call


def made(kind):
    return lambda value, **options: (kind, np.shape(value) or value, options)


class Comet:
    """A fake server that stores metrics. The next `fails` calls store one metric and then lose the connection."""

    def __init__(self, monkeypatch):
        self.calls, self.metrics, self.fails, self.keys = [], [], 0, []
        module = types.ModuleType("comet_ml")
        module.start, module.API = self.start, lambda api_key: types.SimpleNamespace(get_experiment_by_key=self.get)
        monkeypatch.setitem(sys.modules, "comet_ml", module)

    def start(self, **options):
        self.calls.append(("start", options))
        self.keys.append(options["experiment_key"])
        return Recorder(self.calls, log_metrics=self.log_metrics)

    def log_metrics(self, metrics, step):
        for number, (name, value) in enumerate(metrics.items()):
            if self.fails and number == 1:
                self.fails -= 1
                raise ConnectionError("the connection was lost")
            self.metrics.append({"metricName": name, "metricValue": str(value), "step": step})

    def get(self, key):
        return types.SimpleNamespace(get_metrics=lambda: list(self.metrics)) if key in self.keys else None

    @property
    def points(self):
        return [(each["step"], each["metricName"], float(each["metricValue"])) for each in self.metrics]


@pytest.fixture
def comet(monkeypatch):
    return Comet(monkeypatch)


@pytest.fixture
def wandb(monkeypatch):
    """The recorded calls, and the rows on the server."""
    calls, rows = [], []
    module = types.ModuleType("wandb")

    def init(**options):
        calls.append(("init", options))
        config = Recorder(calls, "config.")
        return Recorder(calls, config=config, offline=False, entity="me", project="digits")

    def run(path):
        calls.append(("Api.run", path))
        return types.SimpleNamespace(scan_history=lambda use_cache: list(rows))

    module.init, module.Api = init, lambda: types.SimpleNamespace(run=run)
    for kind in ("Html", "Image", "Histogram"):
        setattr(module, kind, made(kind))
    monkeypatch.setitem(sys.modules, "wandb", module)
    return calls, rows


@pytest.fixture
def aim(monkeypatch):
    class Run(Recorder):
        def __init__(self, **options):
            calls.append(("Run", options))
            super().__init__(calls, hash="0123456789abcdef")

        def __setitem__(self, name, value):
            calls.append(("set", name, value))

    calls, module = [], types.ModuleType("aim")
    module.Run = Run
    for kind in ("Text", "Image", "Distribution"):
        setattr(module, kind, made(kind))
    monkeypatch.setitem(sys.modules, "aim", module)
    return calls


def write_all(writer):
    """Writes one value of each kind that the writer supports."""
    writer.write_hparams({"lr": 0.1})
    writer.write_notes({"seed": 3})
    writer.write_scalars(5, {"loss": np.float32(0.5)})
    writer.write_texts(5, {"text": "1 < 2"})
    writer.write_images(5, {"image": np.ones([2, 4, 4, 1], np.float32)})
    if hasattr(writer, "write_histograms"):
        writer.write_histograms(5, {"weights": np.arange(6.0)}, {"weights": 8})
    writer.close()


def test_wandb_writer_calls(wandb, tmp_path):
    calls, _ = wandb
    writer = actions.WandbWriter(tmp_path, "digits", tags=["a"])
    write_all(writer)
    run = writer.position()["run"]
    own = {"id": run, "resume": "allow", "dir": str(tmp_path), "reinit": "create_new"}
    assert calls == [
        ("init", {**own, "project": "digits", "tags": ["a"]}),
        ("define_metric", "jaxloop/step"),
        ("define_metric", "*", {"step_metric": "jaxloop/step"}),
        ("config.update", {"seed": 3, "lr": 0.1}, {"allow_val_change": True}),
        ("log", {"loss": 0.5, "jaxloop/step": 5}),
        ("log", {"text": ("Html", "<pre>1 &lt; 2</pre>", {}), "jaxloop/step": 5}),
        (
            "log",
            {"image/0": ("Image", (4, 4, 3), {}), "image/1": ("Image", (4, 4, 3), {}), "jaxloop/step": 5},
        ),
        ("log", {"weights": ("Histogram", (6,), {"num_bins": 8}), "jaxloop/step": 5}),
        ("finish",),
    ]


def test_a_resumed_wandb_run_omits_points_on_the_server(wandb, tmp_path):
    calls, rows = wandb
    writer = actions.WandbWriter(tmp_path)
    writer.write_scalars(5, {"loss": 0.5})
    writer.flush()
    position = writer.position()
    rows += [{"loss": 0.5, "jaxloop/step": 5}, {"loss": "NaN", "jaxloop/step": 6, "weights": {"bins": []}}]
    resumed = actions.WandbWriter(tmp_path)
    resumed.resume(5, position)
    calls.clear()
    resumed.write_scalars(6, {"loss": float("nan"), "accuracy": 0.25})
    resumed.write_histograms(6, {"weights": np.arange(6.0)})
    assert calls[0][1]["id"] == position["run"]
    assert ("Api.run", f"me/digits/{position['run']}") in calls
    assert [call for call in calls if call[0] == "log"] == [("log", {"accuracy": 0.25, "jaxloop/step": 6})]


def test_offline_wandb_parts_after_the_checkpoint_are_deleted(wandb, tmp_path):
    parts = lambda: sorted(path.name for path in (tmp_path / "wandb").iterdir())
    writer = actions.WandbWriter(tmp_path)
    writer.write_scalars(5, {"loss": 0.5})
    run = writer.position()["run"]
    before, after, other = names = [f"offline-run-1-{run}", f"offline-run-2-{run}-1", "offline-run-3-other"]
    (tmp_path / "wandb" / before).mkdir(parents=True)
    position = writer.position()
    for name in (after, other):
        (tmp_path / "wandb" / name).mkdir()
    assert parts() == names
    actions.WandbWriter(tmp_path).resume(5, position)
    assert parts() == [before, other]
    actions.WandbWriter(tmp_path).resume(0, None)
    assert parts() == [other]


def test_aim_writer_calls(aim, tmp_path):
    writer = actions.AimWriter(tmp_path, tmp_path / "repo", experiment="digits")
    write_all(writer)
    options = {"repo": str(tmp_path / "repo"), "experiment": "digits"}
    assert aim == [
        ("Run", options),
        ("close",),
        ("Run", {"run_hash": "0123456789abcdef", "force_resume": True, **options}),
        ("set", "hparams", {"lr": 0.1}),
        ("set", "notes", {"seed": 3}),
        ("track", 0.5, {"name": "loss", "step": 5}),
        ("track", ("Text", "1 < 2", {}), {"name": "text", "step": 5}),
        ("track", ("Image", (4, 4, 3), {}), {"name": "image/0", "step": 5}),
        ("track", ("Image", (4, 4, 3), {}), {"name": "image/1", "step": 5}),
        ("track", ("Distribution", (6,), {"bin_count": 8}), {"name": "weights", "step": 5}),
        ("close",),
    ]


def test_comet_writer_calls(comet, tmp_path):
    writer = actions.CometWriter(tmp_path, "digits", api_key="secret")
    write_all(writer)
    own = {"experiment_key": writer.position()["run"], "mode": "get_or_create", "online": True}
    start, *others = comet.calls
    assert start == ("start", {**own, "project_name": "digits", "api_key": "secret"})
    names = [(name, options.get("name")) if isinstance(options, dict) else (name,) for name, *_, options in others[:-2]]
    assert [call[0] for call in others] == [
        *["log_parameters", "log_others", "log_asset_data", "log_image", "log_image", "flush", "end"]
    ]
    assert names[2:] == [("log_asset_data", "text/5.txt"), ("log_image", "image/0/5"), ("log_image", "image/1/5")]
    assert all(call[-1]["overwrite"] and call[-1]["step"] == 5 for call in others[2:5])
    assert comet.points == [(5, "loss", 0.5)]


# Identity and resume ------------------------------------------------------------------------------------------------


def run(directory, total_steps, *, checkpoints=True, save=10, notes=None, **options):
    """Starts or resumes a run, and never closes its writer, as if the process were killed."""
    step, state, batches = examples.tiny_regression()
    writer = actions.CometWriter(directory)
    ends = [actions.SummaryAction(writer, every(steps=1), **options)]
    if checkpoints:
        ends.append(actions.CheckpointAction(directory / "checkpoints", every(steps=save)))
    spec = jaxloop.CheckpointSpec(directory / "checkpoints") if checkpoints else None
    outer_loop = jaxloop.OuterLoop(jaxloop.TrainLoop(step, end_actions=ends), checkpoint_spec=spec, notes=notes)
    outer_loop(state, jaxloop.from_index(lambda index: batches[index % 100]), total_steps)


def losses(comet):
    return [(step, value) for step, name, value in comet.points if name == "loss"]


@pytest.mark.parametrize("save", [10, 100])
def test_repeated_steps_are_written_once(comet, tmp_path, save):
    """The second run repeats steps from a checkpoint, or from the start if none was saved yet."""
    run(tmp_path, 15, save=save)
    before = losses(comet)
    run(tmp_path, 30, save=save)
    assert [step for step, _ in losses(comet)] == list(range(1, 31)) and losses(comet)[:15] == before
    assert len(set(comet.keys)) == 1


def test_a_checkpoint_identifies_its_tracked_run_without_the_file(comet, tmp_path):
    run(tmp_path, 15)
    (tmp_path / "tracked_run_comet.json").unlink()
    run(tmp_path, 20)
    assert len(set(comet.keys)) == 1 and len(losses(comet)) == 20


def test_each_run_without_checkpoints_is_a_new_tracked_run(comet, tmp_path):
    for _ in range(2):
        run(tmp_path, 5, checkpoints=False)
    assert len(set(comet.keys)) == 2 and len(losses(comet)) == 10


def test_notes_are_written(comet, tmp_path):
    run(tmp_path, 5, notes={"seed": 3})
    ((_, notes),) = [call for call in comet.calls if call[0] == "log_others"]
    assert notes["seed"] == 3


def test_a_changed_point_is_written_and_logged(comet, tmp_path, logs):
    writer = actions.CometWriter(tmp_path)
    writer.write_scalars(6, {"loss": 0.5, "jaxloop/steps_per_sec": 7.0})
    resumed = actions.CometWriter(tmp_path)
    resumed.resume(5, writer.position())
    resumed.write_scalars(6, {"loss": 0.25, "jaxloop/steps_per_sec": 8.0})
    assert losses(comet) == [(6, 0.5), (6, 0.25)] and len(comet.points) == 3
    assert "the tracked run has loss=0.5 for step 6, and now it is 0.25" in logs.text


@pytest.mark.parametrize(
    ("stored", "value"),
    [("NaN", math.nan), ("1.7976931348623157E308", math.inf), ("-Infinity", -math.inf), ("0.1", np.float32(0.1))],
)
def test_stored_values_are_recognized(stored, value, comet, tmp_path):
    writer = actions.CometWriter(tmp_path)
    writer.write_scalars(5, {"loss": 0.5})
    comet.metrics.append({"metricName": "loss", "metricValue": stored, "step": 6})
    writer.resume(5, writer.position())
    writer.write_scalars(6, {"loss": value})
    assert len(comet.metrics) == 2


def test_an_error_names_its_source_and_no_point_is_lost_or_duplicated(comet, tmp_path):
    comet.fails = 1
    with pytest.raises(ConnectionError) as caught:
        run(tmp_path, 1000, save=1000)
    notes = "\n".join(caught.value.__notes__)
    assert f"in CometWriter, whose tracked run is {comet.keys[0]}" in notes
    assert "in SummaryAction(interval=every(steps=1)), after step 1: write_scalars of" in notes
    run(tmp_path, 1000, save=1000)
    assert [step for step, _ in losses(comet)] == list(range(1, 1001))
    assert len(set(comet.keys)) == 1
    assert all(len(list(group)) == 1 for _, group in itertools.groupby(sorted(each[:2] for each in comet.points)))


def test_a_partially_written_row_is_completed(comet, tmp_path):
    writer, row = actions.CometWriter(tmp_path), {"loss": 0.5, "accuracy": 0.25}
    comet.fails = 1
    with pytest.raises(ConnectionError):
        writer.write_scalars(1, row)
    assert losses(comet) == [(1, 0.5)]
    writer.write_scalars(1, row)
    assert comet.points == [(1, "loss", 0.5), (1, "accuracy", 0.25)]


def test_an_incomplete_flush_raises(comet, tmp_path):
    writer = actions.CometWriter(tmp_path)
    writer.write_scalars(1, {"loss": 0.5})
    writer._run.flush = lambda: False
    with pytest.raises(RuntimeError, match="Comet has not received everything"):
        actions.SummaryAction(writer).flush()


@pytest.mark.filterwarnings("ignore")  # From the packages.
@pytest.mark.parametrize("tracker", ["mlflow", "trackio"])
def test_an_unwritable_database_raises(tracker, tmp_path, monkeypatch):
    package, path = pytest.importorskip(tracker), tmp_path / "file"
    path.touch()
    if tracker == "mlflow":
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        writer = actions.MlflowWriter(tmp_path, "http://127.0.0.1:9")  # No server listens there.
    else:
        monkeypatch.setattr(package.sqlite_storage, "TRACKIO_DIR", path)
        writer = actions.TrackioWriter(tmp_path, "digits")
    action = actions.SummaryAction(writer, background=False)
    with pytest.raises(Exception) as caught:
        action(None, {"loss": 0.5}, step_num=7)
    notes = "\n".join(caught.value.__notes__)
    assert f"in {type(writer).__name__}, whose tracked run is" in notes
    assert "in SummaryAction(interval=1), after step 7: write_scalars of loss" in notes


# Invalid input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "package"),
    [
        (actions.MlflowWriter, "mlflow"),
        (lambda workdir: actions.TrackioWriter(workdir, "digits"), "trackio"),
        (actions.WandbWriter, "wandb"),
        (actions.AimWriter, "aim"),
        (actions.CometWriter, "comet_ml"),
    ],
)
def test_a_missing_package_raises_with_the_install_command(kind, package, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    text = rf"Writer needs the package {package}: pip install {package}$"
    with pytest.raises(ModuleNotFoundError, match=text):
        kind(tmp_path)


def test_options_that_a_writer_sets_itself_raise(wandb, comet, aim, tmp_path):
    with pytest.raises(TypeError, match="WandbWriter sets id, resume itself"):
        actions.WandbWriter(tmp_path, id="mine", resume="must")
    with pytest.raises(TypeError, match="CometWriter sets online itself"):
        actions.CometWriter(tmp_path, online=False)
    with pytest.raises(TypeError, match="AimWriter sets run_hash itself"):
        actions.AimWriter(tmp_path, run_hash="mine")


@pytest.mark.parametrize("content", ["", "[]", "{}", "5"])
def test_a_damaged_identity_file_raises(content, comet, tmp_path):
    (tmp_path / "tracked_run_comet.json").write_text(content)
    with pytest.raises(ValueError, match=r"tracked_run_comet.json is damaged. Delete it"):
        actions.CometWriter(tmp_path).resume(0, None)


@pytest.mark.parametrize("run", ["../other", "*", "' OR '", 5, "A" * 100])
def test_an_invalid_identity_raises(run, comet, tmp_path):
    with pytest.raises(ValueError, match="is not a tracked run of CometWriter"):
        actions.CometWriter(tmp_path).resume(0, {"run": run})


@pytest.mark.parametrize("missing", ["write_scalars", "flush"])
def test_a_writer_without_required_methods_raises(missing):
    has = {"write_scalars", "flush"} - {missing}
    writer = types.SimpleNamespace(**dict.fromkeys(has, print))
    with pytest.raises(TypeError, match=f"SummaryAction takes a writer with the methods .* lacks {missing}"):
        actions.SummaryAction(writer)


def test_an_unsupported_kind_is_skipped_with_one_warning(comet, tmp_path, logs):
    writer = actions.CometWriter(tmp_path)
    action = actions.SummaryAction(writer)
    outputs = {"loss": 0.5, "weights": jaxloop.MetricWithMetadata(np.arange(6.0), jaxloop.MetricType.HISTOGRAM)}
    warning = "SummaryAction does not write the output 'weights': its writer has no write_histograms."
    assert list(action.check(None, outputs)) == [warning]
    for step in (1, 2):
        action(None, outputs, step_num=step)
    action.flush()
    assert logs.text.count(warning) == 1
    assert losses(comet) == [(1, 0.5), (2, 0.5)]


PAGE = pathlib.Path(__file__).parents[1] / "docs" / "trackers.md"


@pytest.mark.filterwarnings("ignore")  # From the packages.
@pytest.mark.parametrize("tracker", ["mlflow", "trackio", "wandb", "aim", "comet"])
def test_the_documented_program_runs_with_each_writer(tracker, request, tmp_path, monkeypatch):
    if tracker in ("wandb", "comet"):  # They need a server.
        request.getfixturevalue(tracker)
    else:
        pytest.importorskip(tracker)
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text()
    (program,) = re.findall(r"```py\n(.*?)```", text, flags=re.DOTALL)
    calls = re.findall(r"\| `(jaxloop\.actions\.(\w+)Writer\([^`]*\))`", text)
    (call,) = [call for call, name in calls if name.lower() == tracker]
    default = re.search(r"jaxloop\.actions\.MlflowWriter\(.*\)", program)
    exec(program.replace(default[0], call), {"__name__": "__main__"})
    assert (tmp_path / f"runs/1/tracked_run_{tracker}.json").exists()
