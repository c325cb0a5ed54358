import contextlib
import gc
import os
import pathlib
import resource
import signal
import subprocess
import sys

import pytest
from etils import epath
from programs import summaries

from jaxloop import actions, checkpoint, every, examples
from jaxloop.base import encoding
from jaxloop.outer_loop import OuterLoop
from jaxloop.train_loop import TrainLoop

PROGRAMS = pathlib.Path(__file__).parent / "programs"


@pytest.mark.parametrize(("api", "kinds"), [("objects", ["at_once", "flushed"]), ("functions", ["at_once"])])
def test_tensorboard_shows_each_point_once_after_sigkill(api, kinds, tmp_path):
    command = [sys.executable, PROGRAMS / "summaries.py"]
    killed = [subprocess.Popen([*command, tmp_path / kind, api, kind]) for kind in kinds]
    summaries.run(tmp_path / "whole", api=api)
    for process, kind in zip(killed, kinds, strict=True):
        assert process.wait() == -signal.SIGKILL
        summaries.run(tmp_path / kind, api=api)
    whole, *resumed = summaries.points_in(*(tmp_path / kind / "events" for kind in ["whole", *kinds]))
    assert [step for step, _ in whole["each/loss"]] == list(range(1, summaries.NUM_STEPS + 1))
    assert api == "functions" or whole.keys() >= {"loop/loss", "eval/loss", "more/image", "more/histogram"}
    assert resumed == [whole] * len(kinds)


def test_files_with_equal_or_wrong_timestamps_are_read_in_order(tmp_path):
    for step in (1, 2):
        with contextlib.closing(actions.default_writer(tmp_path)) as writer:
            writer.write_scalars(step, {"loss": 0.5})
    next(tmp_path.iterdir()).rename(tmp_path / "events.out.tfevents.4000000000.host")
    with contextlib.closing(actions.default_writer(tmp_path)) as writer:
        writer.resume(1, None)
        writer.write_scalars(2, {"loss": 0.25})
    assert len(list(tmp_path.iterdir())) == 3
    assert summaries.points_in(tmp_path)[0]["loss"][1:] == [[2, "0.25"]]


def test_concurrent_writers_create_separate_files(tmp_path, monkeypatch):
    monkeypatch.setattr(type(epath.Path(tmp_path)), "iterdir", lambda self: iter(()))  # Neither sees the other's file.
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            writer = stack.enter_context(contextlib.closing(actions.default_writer(tmp_path)))
            writer.write_scalars(1, {"loss": 0.5})
    assert len(os.listdir(tmp_path)) == 2


def test_unclosed_writer_closes_its_file_when_garbage_collected(tmp_path):
    for is_in_a_cycle in (False, True):
        writer = actions.default_writer(tmp_path)
        writer.write_scalars(1, {"loss": 0.5})
        writer.itself = writer if is_in_a_cycle else None
        del writer
        gc.collect()  # A file that is still open causes a warning here, which fails the test.


def test_failed_write_raises_with_the_path(tmp_path):
    with contextlib.closing(actions.default_writer(tmp_path)) as writer:
        writer.write_scalars(1, {"loss": 0.5})
        (path,) = tmp_path.iterdir()
        size = path.stat().st_size
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, limits[1]))
        try:
            with pytest.raises(OSError, match=f"File too large: '{path}'"):
                writer.write_scalars(2, {"loss": 0.5})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert path.stat().st_size == size
        writer.write_scalars(3, {"loss": 0.25})
    assert summaries.points_in(tmp_path)[0]["loss"] == [[1, "0.5"], [3, "0.25"]]


def test_flush_syncs_to_disk_and_a_closed_writer_can_write_again(tmp_path, monkeypatch):
    synced, writer = [], actions.default_writer(tmp_path)
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
    for step in (1, 2):
        writer.write_scalars(step, {"loss": 0.5})
        writer.flush()
        writer.close()
    assert synced == [path.stat().st_size for path in sorted(tmp_path.iterdir())]
    assert summaries.points_in(tmp_path)[0]["loss"] == [[1, "0.5"], [2, "0.5"]]


def test_points_from_before_the_last_step_stay_where_they_are(tmp_path):
    with contextlib.closing(actions.default_writer(tmp_path)) as writer:
        writer.write_scalars(1, {"loss": 1.0})
        position = writer.position()  # Saved at step 2, at which nothing was written.
        writer.write_scalars(2, {"loss": 2.0})
        writer.resume(2, position)
        writer.write_scalars(2, {"loss": 2.5})
    assert summaries.points_in(tmp_path)[0]["loss"] == [[1, "1.0"], [2, "2.5"]]


@pytest.mark.parametrize("lost", [{"file": "events.out.tfevents.1000000000.host"}, {"ends": 10_000}])
def test_missing_or_truncated_earlier_file_is_reported_and_its_step_is_kept(lost, tmp_path, logs):
    with contextlib.closing(actions.default_writer(tmp_path)) as writer:
        for step in (1, 2, 3):
            writer.write_scalars(step, {"loss": float(step)})
        writer.resume(2, writer.position() | lost)
    assert "TensorBoard may show points of step 2 twice" in logs.text
    assert summaries.points_in(tmp_path)[0]["loss"] == [[1, "1.0"], [2, "2.0"]]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Raised by TensorFlow.
def test_clu_writer_hides_the_points_after_the_checkpoint(tmp_path):
    pytest.importorskip("tensorflow")
    from clu import metric_writers

    for begins in (0, 2):
        writer = metric_writers.create_default_writer(tmp_path, asynchronous=False)
        action = actions.SummaryAction(writer)
        if begins:
            action.load_state_dict({})
        action.begin_run(begins, can_resume=True)
        for step in range(begins + 1, 5):
            action(None, {"loss": float(begins)}, step_num=step)
        action.close()
        writer.close()
    assert summaries.points_in(tmp_path)[0]["loss"] == [[1, "0.0"], [2, "0.0"], [3, "2.0"], [4, "2.0"]]


def test_custom_action_is_flushed_before_a_checkpoint(tmp_path):
    class Queueing(actions.Action):
        queued, written = 0, 0

        def __call__(self, state, outputs, **kwargs):
            self.queued += 1

        def flush(self):
            self.written = self.queued

        def state_dict(self):
            return {"written": self.written, "queued": self.queued}

    step, state, batches = examples.tiny_regression()
    saves = actions.CheckpointAction(tmp_path, every(steps=3), keep=None)
    train_loop = TrainLoop(step, end_actions=[saves, Queueing(every(steps=1))])
    OuterLoop(train_loop)(state, batches, 6)
    for number in (3, 6):
        items = checkpoint.Checkpoint.at(tmp_path, number).run()["parts"]["train"]["agenda"]["items"]
        kept = [encoding.decode(item["state"]) for item in items if item["name"].endswith("Queueing")]
        assert kept == [{"written": number, "queued": number}]
