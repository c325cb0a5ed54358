"""Tests of the writers for trackers: their calls, and how a resumed run continues its tracked run."""

import collections
import contextlib
import functools
import json
import pathlib
import re
import signal
import subprocess
import sys
import types

import numpy as np
import pytest
from programs.tiny import BATCHES, STATE, STEP

import jaxloop
from jaxloop import actions, every
from jaxloop import functional as jf

PROGRAM = pathlib.Path(__file__).parent / "programs" / "tracking.py"


@pytest.mark.parametrize("tracker", ["mlflow", "trackio", "wandb"])
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


class Mlflow:
    """A fake server that stores metrics. The next `fails` calls store one metric and then lose the connection."""

    def __init__(self, monkeypatch):
        self.metrics, self.tags, self.runs, self.fails = [], {}, {}, 0
        module = types.ModuleType("mlflow")
        module.MlflowClient, module.entities = lambda uri: self, types.SimpleNamespace()
        for kind, fields in {"Metric": "key value timestamp step", "Param": "key value", "RunTag": "key value"}.items():
            setattr(module.entities, kind, collections.namedtuple(kind, fields))
        monkeypatch.setitem(sys.modules, "mlflow", module)

    def get_experiment_by_name(self, name):
        return types.SimpleNamespace(experiment_id="0")

    def search_runs(self, numbers, query):
        return [self.get_run(run) for run in self.runs if f"'{run}'" in query]

    def create_run(self, number, tags, run_name):
        self.runs[tags["jaxloop.run"]] = "RUNNING"
        return self.get_run(tags["jaxloop.run"])

    def get_run(self, run):
        info = types.SimpleNamespace(run_id=run)
        return types.SimpleNamespace(
            info=info, data=types.SimpleNamespace(params={}, metrics={each.key for each in self.metrics})
        )

    def update_run(self, run, status):
        self.runs[run] = status

    def log_batch(self, run, metrics=(), params=(), tags=(), synchronous=True):
        self.tags |= {each.key: each.value for each in tags}
        for number, metric in enumerate(metrics):
            if self.fails and number == 1:
                self.fails -= 1
                raise ConnectionError("the connection was lost")
            self.metrics.append(metric)

    def get_metric_history(self, run, name):
        return [each for each in self.metrics if each.key == name]

    def set_terminated(self, run, status=None):
        self.runs[run] = status or "FINISHED"

    @property
    def statuses(self):
        return list(self.runs.values())

    @property
    def losses(self):
        return [(each.step, each.value) for each in self.metrics if each.key == "loss"]


@pytest.fixture
def mlflow(monkeypatch):
    return Mlflow(monkeypatch)


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
    for kind in ("Html", "Image"):
        setattr(module, kind, made(kind))
    monkeypatch.setitem(sys.modules, "wandb", module)
    return calls, rows


def test_wandb_writer_calls(wandb, tmp_path):
    calls, _ = wandb
    writer = actions.WandbWriter(tmp_path, "digits", tags=["a"])
    writer.write_hparams({"lr": 0.1})
    writer.write_notes({"seed": 3})
    writer.write_scalars(5, {"loss": np.float32(0.5)})
    writer.write_texts(5, {"text": "1 < 2"})
    writer.write_images(5, {"image": np.ones([2, 4, 4, 1], np.float32)})
    writer.close()
    writer.write_status("failed")  # Reopens the run.
    writer.close()
    run = writer.position()["run"]
    own = {"id": run, "resume": "allow", "dir": str(tmp_path), "reinit": "create_new"}
    opened = [
        ("init", {**own, "project": "digits", "tags": ["a"]}),
        ("define_metric", "jaxloop/step"),
        ("define_metric", "*", {"step_metric": "jaxloop/step"}),
    ]
    images = {f"image/{number}": ("Image", (4, 4, 3), {}) for number in range(2)}
    assert calls == [
        *opened,
        ("config.update", {"seed": 3, "lr": 0.1}, {"allow_val_change": True}),
        ("log", {"loss": 0.5, "jaxloop/step": 5}),
        ("log", {"text": ("Html", "<pre>1 &lt; 2</pre>", {}), "jaxloop/step": 5}),
        ("log", {**images, "jaxloop/step": 5}),
        ("finish", {"exit_code": 0}),
        *opened,
        ("finish", {"exit_code": 1}),
    ]


def test_a_resumed_wandb_run_omits_points_on_the_server(wandb, tmp_path):
    calls, rows = wandb
    writer = actions.WandbWriter(tmp_path)
    writer.write_scalars(5, {"loss": 0.5})
    writer.flush()
    position = writer.position()
    rows += [{"loss": 0.5, "jaxloop/step": 5}, {"loss": "NaN", "jaxloop/step": 6, "text": {"path": "x"}}]
    resumed = actions.WandbWriter(tmp_path)
    resumed.resume(5, position)
    calls.clear()
    resumed.write_scalars(6, {"loss": float("nan"), "accuracy": 0.25})
    resumed.write_texts(6, {"text": "1 < 2"})
    assert calls[0][1]["id"] == position["run"]
    assert ("Api.run", f"me/digits/{position['run']}") in calls
    assert [call for call in calls if call[0] == "log"] == [("log", {"accuracy": 0.25, "jaxloop/step": 6})]


# Identity and resume ------------------------------------------------------------------------------------------------


DATA = jaxloop.from_index(lambda index: BATCHES[index % 100])


def run(directory, total_steps, *, writer=None, data=DATA, checkpoints=True, save=10, notes=None):
    """Starts or resumes a run, and never closes its writer, as if the process were killed."""
    ends = [actions.SummaryAction(writer or actions.MlflowWriter(directory), every(steps=1))]
    if checkpoints:
        ends.append(actions.CheckpointAction(directory / "checkpoints", every(steps=save)))
    spec = jaxloop.CheckpointSpec(directory / "checkpoints") if checkpoints else None
    outer_loop = jaxloop.OuterLoop(jaxloop.TrainLoop(STEP, end_actions=ends), checkpoint_spec=spec, notes=notes)
    outer_loop(STATE, data, total_steps)


@pytest.mark.parametrize("save", [10, 100])
def test_repeated_steps_are_written_once(mlflow, tmp_path, save):
    """The second run repeats steps from a checkpoint, or from the start if none was saved yet."""
    run(tmp_path, 15, save=save)
    before = mlflow.losses
    if save == 10:
        (tmp_path / "tracked_run_mlflow").unlink()  # The checkpoint also identifies the tracked run.
    run(tmp_path, 30, save=save)
    assert [step for step, _ in mlflow.losses] == list(range(1, 31)) and mlflow.losses[:15] == before
    assert len(mlflow.runs) == 1


def test_each_run_without_checkpoints_is_a_new_tracked_run(mlflow, tmp_path):
    for _ in range(2):
        run(tmp_path, 5, checkpoints=False, notes={"seed": 3})
    assert len(mlflow.runs) == 2 and len(mlflow.losses) == 10 and mlflow.tags["seed"] == "3"


def test_two_names_that_are_the_same_in_the_tracker_raise(mlflow, tmp_path):
    with pytest.raises(ValueError, match="Two of these names are the same in the tracker: a@b, a#b. Rename one"):
        actions.MlflowWriter(tmp_path).write_scalars(1, {"a@b": 0.5, "a#b": 0.25})


def test_an_error_names_its_source_and_no_point_is_lost_or_duplicated(mlflow, tmp_path):
    mlflow.fails = 1
    with pytest.raises(ConnectionError) as caught:
        run(tmp_path, 1000, save=1000)
    notes = "\n".join(caught.value.__notes__)
    assert f"in MlflowWriter, whose tracked run is {next(iter(mlflow.runs))}" in notes
    assert "in SummaryAction(interval=every(steps=1)), after step 1: write_scalars of" in notes
    run(tmp_path, 1000, save=1000)
    assert [step for step, _ in mlflow.losses] == list(range(1, 1001))
    assert len(mlflow.runs) == 1
    assert len({(each.key, each.step) for each in mlflow.metrics}) == len(mlflow.metrics)


# How a run ended ----------------------------------------------------------------------------------------------------


def end_by(how):
    if how == "error":
        raise OSError("the disk is gone")
    if how != "end":
        signal.raise_signal(signal.Signals[how])


@pytest.mark.parametrize(
    ("api", "how", "error", "status"),
    [
        ("objects", "end", None, "FINISHED"),
        ("objects", "error", OSError, "FAILED"),
        ("functions", "error", OSError, "FAILED"),
        ("objects", "SIGTERM", SystemExit, "KILLED"),
        ("functions", "SIGINT", None, "KILLED"),
    ],
)
def test_a_tracked_run_shows_how_the_run_ended(api, how, error, status, mlflow, tmp_path):
    """The program doesn't close its writer before it has seen the status. The next start continues the tracked run."""
    make_batch = lambda index, how: (end_by(how) if index == 7 else None, BATCHES[index])[1]

    def start(how):
        writer, data = actions.MlflowWriter(tmp_path), jaxloop.from_index(functools.partial(make_batch, how=how))
        try:
            if api == "objects":
                run(tmp_path, 10, writer=writer, data=data, save=5)
            else:
                callbacks = [
                    lambda state, batch: STEP(state, batch)[::-1],
                    actions.SummaryAction(writer, every(steps=1)),
                ]
                save = jf.checkpoint(tmp_path / "checkpoints", resume=True)
                jf.loop(STATE, data, {every(steps=1): callbacks, every(steps=5): save}, stop=10)
        finally:
            ended = mlflow.statuses
            writer.close()
            assert ended == mlflow.statuses

    with contextlib.nullcontext() if error is None else pytest.raises(error):
        start(how)
    assert mlflow.statuses == [status]
    start("end")
    assert mlflow.statuses == ["FINISHED"] and [step for step, _ in mlflow.losses] == list(range(1, 11))


# Invalid input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["", "{}"])
def test_a_damaged_identity_file_raises(content, mlflow, tmp_path):
    (tmp_path / "tracked_run_mlflow").write_text(content)
    with pytest.raises(ValueError, match=r"Delete .*tracked_run_mlflow to begin a new one"):
        actions.MlflowWriter(tmp_path).resume(0, None)


@pytest.mark.parametrize("run", ["../other", "' OR '", 5])
def test_an_invalid_identity_raises(run, mlflow, tmp_path):
    with pytest.raises(ValueError, match="is not a tracked run of MlflowWriter"):
        actions.MlflowWriter(tmp_path).resume(0, {"run": run})


PAGE = pathlib.Path(__file__).parents[1] / "docs" / "trackers.md"


@pytest.mark.filterwarnings("ignore")  # From the packages.
@pytest.mark.parametrize("tracker", ["mlflow", "trackio", "wandb"])
def test_the_documented_program_runs_with_each_writer(tracker, request, tmp_path, monkeypatch):
    if tracker == "wandb":  # It needs a server.
        request.getfixturevalue(tracker)
    else:
        pytest.importorskip(tracker)
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text()
    program, _ = re.findall(r"```py\n(.*?)```", text, flags=re.DOTALL)
    calls = re.findall(r"\| `(jaxloop\.actions\.(\w+)Writer\([^`]*\))`", text)
    (call,) = [call for call, name in calls if name.lower() == tracker]
    default = re.search(r"jaxloop\.actions\.MlflowWriter\(.*\)", program)
    exec(program.replace(default[0], call), {"__name__": "__main__"})
    assert (tmp_path / f"runs/1/tracked_run_{tracker}").exists()


def test_the_documented_aim_writer_resumes_its_run(tmp_path, monkeypatch):
    class Run(Recorder):
        def __init__(self, run=None, **options):
            super().__init__(calls, hash="0123")
            calls.append(("Run", run, options))

    calls, module, names = [], types.ModuleType("aim"), {}
    module.Run = Run
    monkeypatch.setitem(sys.modules, "aim", module)
    _, recipe = re.findall(r"```py\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    exec(recipe, names)
    for total in (10, 20):
        run(tmp_path, total, writer=names["AimWriter"](tmp_path))
    losses = [call[2]["step"] for call in calls if call[0] == "track" and call[2]["name"] == "loss"]
    assert losses == list(range(1, 21))
    runs = [call[1] for call in calls if call[0] == "Run"]
    assert runs.count(None) == 1 and runs[0] is None  # The second start doesn't create another Aim run.
