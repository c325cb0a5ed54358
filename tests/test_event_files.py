import contextlib
import os
import pathlib
import signal
import subprocess
import sys

import pytest
from programs import summaries
from programs.acts import limit_file_size

from jaxloop import actions

PROGRAMS = pathlib.Path(__file__).parent / "programs"


def test_tensorboard_shows_each_point_once_after_sigkill(tmp_path):
    command, kinds = [sys.executable, PROGRAMS / "summaries.py"], ["at_once", "flushed"]
    killed = [subprocess.Popen([*command, tmp_path / kind, "objects", kind]) for kind in kinds]
    summaries.run(tmp_path / "whole")
    for process, kind in zip(killed, kinds, strict=True):
        assert process.wait() == -signal.SIGKILL
        summaries.run(tmp_path / kind)
    whole, *resumed = summaries.points_in(*(tmp_path / kind / "events" for kind in ["whole", *kinds]))
    assert [step for step, _ in whole["each/loss"]] == list(range(1, summaries.NUM_STEPS + 1))
    assert whole.keys() >= {"loop/loss", "eval/loss", "more/image", "more/histogram"}
    assert resumed == [whole] * len(kinds)


def test_files_of_one_second_are_read_in_order(tmp_path):
    for step in (1, 2):
        with contextlib.closing(actions.default_writer(tmp_path)) as writer:
            writer.write_scalars(step, {"loss": 0.5})
    with contextlib.closing(actions.default_writer(tmp_path)) as writer:
        writer.resume(1, None)
        writer.write_scalars(2, {"loss": 0.25})
    assert len(list(tmp_path.iterdir())) == 3
    assert summaries.points_in(tmp_path)[0]["loss"] == [[1, "0.5"], [2, "0.25"]]


def test_a_run_that_resumes_at_step_0_keeps_the_points_of_step_0_but_a_new_run_hides_them(tmp_path):
    def run(state_dict=None):
        with contextlib.closing(actions.default_writer(tmp_path)) as writer:
            action = actions.SummaryAction(writer)
            if state_dict is not None:
                action.load_state_dict(state_dict)
            action.begin_run(0, can_resume=True)
            for step in (0, 1) if state_dict is None else (1,):
                action(None, {"loss": 0.5}, step_num=step)
            return action.state_dict()

    for state_dict in (None, run()):
        run(state_dict)
        assert summaries.points_in(tmp_path)[0]["loss"] == [[0, "0.5"], [1, "0.5"]]


def test_no_point_is_lost_on_a_full_disk_and_a_checkpoint_contains_the_unwritten_ones(tmp_path):
    writer = actions.default_writer(tmp_path)
    action = actions.SummaryAction(writer)
    action(None, {"loss": 0.5}, step_num=1)
    action.flush()
    (path,) = tmp_path.iterdir()
    with limit_file_size(path.stat().st_size + 10):
        action(None, {"x" * 100_000: 0.5, "loss": 0.5}, step_num=2)
        assert [call["step"] for call in action.state_dict()["unwritten"]] == [2]
        with pytest.raises(OSError, match=f"File too large: '{path}'"):
            action.flush()
    action(None, {"loss": 0.25}, step_num=3)
    assert action.state_dict() == {}
    writer.close()
    assert summaries.points_in(tmp_path)[0]["loss"] == [[1, "0.5"], [2, "0.5"], [3, "0.25"]]


def test_flush_syncs_to_disk_and_a_closed_writer_can_write_again(tmp_path, monkeypatch):
    synced, writer = [], actions.default_writer(tmp_path)
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
    for step in (1, 2):
        writer.write_scalars(step, {"loss": 0.5})
        writer.flush()
        writer.close()
    sizes = [path.stat().st_size for path in sorted(tmp_path.iterdir())]
    assert len(sizes) == 2 and {*sizes} <= {*synced}
    assert summaries.points_in(tmp_path)[0]["loss"] == [[1, "0.5"], [2, "0.5"]]
