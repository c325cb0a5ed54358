"""Commands that a run executes while it trains."""

import contextlib
import functools
import io
import json
import os
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from programs.tiny import BATCHES, STATE, experiment

import jaxloop
from jaxloop import __main__ as command_line
from jaxloop import checkpoint, every
from jaxloop.runs import commands


class Commander:
    """Data that sends commands when batches are read. `given` maps batch numbers to commands."""

    def __init__(self, workdir, given):
        self.workdir, self.given = workdir, given

    def __call__(self, number):
        for command in self.given.pop(number, ()):
            if callable(command):
                command()
            else:
                jaxloop.tell(self.workdir, command, wait_secs=0)
        return BATCHES[number % 100]


def train(workdir, given=None, total=60, *, saves_every=20, more=(), **options):
    """Trains, and returns the state, the outer loop and the outputs. Log points, every 5 steps, read the commands."""
    save = jaxloop.CheckpointAction(workdir, interval=every(steps=saves_every), keep=None)
    loop_class = functools.partial(jaxloop.TrainLoop, **options)
    outer_loop = experiment(*more, save, directory=workdir, loop_class=loop_class, log_interval=every(steps=5))
    data = jaxloop.from_index(Commander(workdir, given or {}))
    state, outputs = outer_loop(STATE, data, train_total_steps=total)
    return state, outer_loop, outputs


def rows(outer_loop):
    return [(row.elapsed.steps, row.logs) for row in outer_loop.history]


def leaves(state):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves((state.params, state.opt_state))]


def test_save_command_saves_after_the_next_log_point(tmp_path):
    train(tmp_path, {11: ["save"]}, saves_every=1000)
    (answer,) = commands.answers(tmp_path)
    assert (answer.command, answer.error) == ("save", None)
    assert 12 <= answer.step <= 17
    assert checkpoint.all_steps(tmp_path) == [answer.step]


def test_stop_command_saves_and_ends_a_resumable_run(tmp_path):
    state, _, outputs = train(tmp_path, {11: ["stop"]})
    stopped_at = int(state.step)
    assert 12 <= stopped_at <= 17 and outputs[jaxloop.STOP_LOOP] and checkpoint.all_steps(tmp_path)[-1] == stopped_at
    assert "stopped by a command" in printed(tmp_path, "status")
    state, again, _ = train(tmp_path)
    assert int(state.step) == 60
    whole, _, _ = train(tmp_path / "whole")
    assert leaves(state) == leaves(whole)
    assert (stopped_at, {"command": "stop"}) in rows(again)


def printed(workdir, command):
    with contextlib.redirect_stdout(io.StringIO()) as stream:
        assert command_line.main([command, os.fspath(workdir)]) == 0
    return stream.getvalue()


def test_output_into_a_closed_pipe_ends_the_command_silently(tmp_path):
    train(tmp_path, total=5)
    command = f"{sys.executable} -m jaxloop status {tmp_path} | true"
    assert subprocess.run(command, shell=True, capture_output=True, text=True).stderr == ""


def test_log_every_adds_a_row_at_once_and_then_every_n_steps(tmp_path):
    _, outer_loop, _ = train(tmp_path, {12: ["log_every=20"]}, total=70)
    steps = [step for step, logs in rows(outer_loop) if "train" in logs]
    (answer,) = commands.answers(tmp_path)
    assert steps == sorted({5, 10, 15, answer.step, 20, 40, 60, 70})


@pytest.mark.parametrize("command", ["foo", "save=3", "profile=3", "log_every", "stop.interval=3", "early_stopping"])
def test_invalid_command_is_rejected_with_a_list_of_valid_ones(tmp_path, command):
    stopping = jaxloop.EarlyStoppingAction("loss", patience=1000, interval=every(steps=1))
    state, outer_loop, _ = train(tmp_path, {11: [command]}, more=[stopping], total=30)
    (answer,) = commands.answers(tmp_path)
    assert answer.error is not None and int(state.step) == 30
    assert not any("command" in logs for _, logs in rows(outer_loop))
    for known in ("save", "stop", "log_every=N", "early_stopping.interval=N", "checkpoint.interval=N"):
        assert known in answer.error


@pytest.mark.parametrize("options", [{}, {"steps_per_dispatch": 8}], ids=["single", "fused"])
def test_a_command_is_saved_at_once_and_a_killed_run_keeps_what_it_changed(tmp_path, options):
    given = {13: ["log_every=7"], 24: ["checkpoint.interval=9", "early_stopping.interval=1"]}
    make = lambda: [jaxloop.EarlyStoppingAction("loss", patience=30, min_delta=10.0, interval=every(steps=3))]
    state, whole, _ = train(tmp_path / "whole", given, more=make(), total=80, **options)
    first, second, third = commands.answers(tmp_path / "whole")
    saved = checkpoint.all_steps(tmp_path / "whole")
    assert {first.step, second.step, third.step} <= set(saved) and int(state.step) < 80
    for last_kept in (third.step, first.step):
        killed = tmp_path / str(last_kept)
        shutil.copytree(tmp_path / "whole", killed)
        for step in saved:
            if step > last_kept:
                shutil.rmtree(killed / str(step))
        again, resumed, _ = train(killed, more=make(), total=80, **options)
        if last_kept == third.step:
            assert leaves(again) == leaves(state) and rows(resumed) == rows(whole)
            assert checkpoint.all_steps(killed) == saved
        else:  # Commands after the checkpoint are not executed again.
            given = [logs["command"] for _, logs in rows(resumed) if "command" in logs]
            assert given == ["log_every=7"] and int(again.step) == 80
            assert [step for step, logs in rows(resumed) if "train" in logs and step > 60] == [63, 70, 77, 80]


def make_hostile_file(directory, number):
    """Creates a malformed or hostile command file."""
    path = directory / f"{2**62 + number}-{number:016x}.json"
    kinds = [
        lambda: path.write_bytes(b"\xff\xfe" * 50),
        lambda: path.write_text('{"command": "save"' + " " * 100_000 + "}"),
        lambda: path.symlink_to("/etc/passwd"),
        lambda: os.mkfifo(path),
        lambda: path.mkdir(),
        lambda: path.write_text(json.dumps({"command": ["stop"]})),
        lambda: path.write_text(json.dumps({"command": "stop; rm -rf /"})),
        lambda: path.write_text(json.dumps({"command": "__class__.x=1"})),
        lambda: path.write_text(json.dumps({"command": "log_every=" + "9" * 180})),
        lambda: (directory / f"../../{number}.json").with_name(f"x{number}.json").write_text('{"command": "stop"}'),
        lambda: (directory / f"{number}.json.new").write_text('{"command": "stop"}'),
    ]
    kinds[number % len(kinds)]()


def test_hostile_commands_change_nothing(tmp_path):
    whole, plain, _ = train(tmp_path / "whole", total=100)

    def attack():
        directory = tmp_path / "run" / "commands"
        directory.mkdir()
        for number in range(200):
            make_hostile_file(directory, number)

    state, outer_loop, _ = train(tmp_path / "run", {7: [attack]}, total=100)
    assert leaves(state) == leaves(whole) and rows(outer_loop) == rows(plain)
    found = commands.answers(tmp_path / "run")
    assert len(found) >= 150 and all(answer.error for answer in found)
    assert len({answer.id for answer in found}) == len(found)  # Some of the files can't be removed.


def test_symlink_in_place_of_the_command_directory_is_not_followed(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / f"{2**62}-{0:016x}.json").write_text('{"command": "stop"}')
    state, _, _ = train(tmp_path / "run", {7: [lambda: (tmp_path / "run" / "commands").symlink_to(elsewhere)]})
    assert int(state.step) == 60 and len(list(elsewhere.iterdir())) == 1


def test_finished_run_rejects_commands(tmp_path, capsys):
    train(tmp_path, total=20)
    assert command_line.main(["tell", os.fspath(tmp_path), "save"]) == 1
    assert "has ended: finished" in capsys.readouterr().err
    with pytest.raises(FileNotFoundError, match="has no run log"):
        jaxloop.tell(tmp_path / "nothing", "save")
    for command in ("save now", "log_every=0", "log_every=-1", "log_every=x", "checkpoint.keep=3", "x" * 201):
        with pytest.raises(ValueError, match="A command is a name"):
            jaxloop.tell(tmp_path, command)


def test_command_from_before_the_run_is_rejected(tmp_path):
    (tmp_path / "commands").mkdir()
    (tmp_path / "commands" / f"1-{0:016x}.json").write_text('{"command": "stop"}')
    state, _, _ = train(tmp_path)
    (answer,) = commands.answers(tmp_path)
    assert int(state.step) == 60 and answer.error == "It was not given during the run."


def test_new_run_in_the_directory_does_not_repeat_commands(tmp_path):
    for given in ({7: ["stop"]}, {}):
        outer_loop = experiment(workdir=tmp_path, checkpoint_spec=None, log_interval=every(steps=5))
        state, _ = outer_loop(STATE, jaxloop.from_index(Commander(tmp_path, given)), train_total_steps=40)
    assert int(state.step) == 40 and not [logs for _, logs in rows(outer_loop) if "command" in logs]
