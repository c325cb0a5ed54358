"""The goodput, status, comparison and report of runs, computed from the files in their work directories."""

import contextlib
import json
import os

import pytest
from programs.acts import Fail
from programs.tiny import STEP

import jaxloop
from jaxloop import __main__ as command_line
from jaxloop import examples


def write(workdir, *lines):
    workdir.mkdir(parents=True, exist_ok=True)
    text = "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
    (workdir / "goodput.jsonl").write_text(text)


def start(time, since=None, **others):
    since = time if since is None else since
    return {"event": "start", "time": time, "since": since, "pid": 2**22, "host": os.uname().nodename} | others


def line(event, time, step, **others):
    return {"event": event, "time": time, "step": step, "spent": {}} | others


def printed(capsys, *arguments):
    code = command_line.main([str(each) for each in arguments])
    shown = capsys.readouterr()
    assert (code == 0) == (shown.err == "")
    return shown.out + shown.err


def train(workdir, total=20, **loop_options):
    step, state, batches = examples.tiny_regression()  # A new step, which each run compiles.
    train_loop, notes = jaxloop.TrainLoop(step, **loop_options), {"lr": 0.1, "seed": 3}
    outer_loop = jaxloop.OuterLoop(train_loop, workdir=workdir, checkpoint_spec=None, notes=notes)
    return outer_loop(state, batches, total, 10)


# Goodput --------------------------------------------------------------------------------------------------


def test_each_second_of_a_run_is_counted_once(tmp_path):
    spent = {"restores": 1.0, "dispatch": 8.0, "evals": 2.0}
    write(
        tmp_path,
        start(110.0, since=100.0),
        line("log", 112.0, 0, spent={"restores": 1.5}),
        line("log", 122.0, 40, spent={"restores": 1.5, "compiling": 2.0, "dispatch": 5.0, "device": 1.0, "data": 2.0}),
        start(131.0, since=130.0),
        line("log", 132.0, 30, spent={"restores": 1.0}),  # Killed after the save of step 30.
        line("log", 142.0, 70, spent=spent),
        line("end", 143.0, 70, spent=spent | {"checkpoints": 0.75}, reason="finished"),
    )
    found = jaxloop.goodput(tmp_path)
    parts = {
        "productive": 6.0 + 6.0,
        "repeated": 2.0,  # Steps 31 to 40 had already been logged.
        "compiling": 2.0,
        "data": 2.0,
        "actions": 0.0,
        "evals": 2.0,
        "checkpoints": 0.75,
        "restores": 2.5,
        "startup": 11.0,
        "downtime": 8.0,
        "unknown": 0.5 + 0.25,
    }
    assert found == jaxloop.runs.accounts.Goodput(parts, steps=70, repeated_steps=10, starts=2)
    assert found.total == 43.0
    assert "start-up            25.6%  11.0 s" in str(found)


def test_goodput_counts_steps_repeated_steps_and_time(tmp_path):
    train(tmp_path)
    train(tmp_path, 40)  # Starts over, because there is no checkpoint.
    found = jaxloop.goodput(tmp_path)
    assert (found.steps, found.repeated_steps, found.starts) == (40, 20, 2)
    assert found.parts["productive"] > 0 and found.parts["compiling"] > 0
    with pytest.raises(FileNotFoundError, match="has no run log"):
        jaxloop.goodput(tmp_path / "elsewhere")


JUNK = [
    "\0\xff\n",
    "[]\n",
    "[" * 10_000 + "\n",
    "x" * 200_000 + "\n",
    '{"event": "st',
    line("log", "soon", 3),
    line("log", 1e308 * 10, 3),
    line("log", 101.0, 10**30),
    {**start(101.0), "notes": []},
]


@pytest.mark.parametrize("junk", JUNK)
def test_malformed_lines_are_ignored_and_a_run_continues_the_log(tmp_path, junk):
    write(tmp_path, start(100.0), line("log", 100.5, 0), line("end", 101.0, 5, reason="finished"), junk)
    assert jaxloop.goodput(tmp_path).steps == 5
    train(tmp_path)
    assert jaxloop.goodput(tmp_path).steps == 20 and jaxloop.goodput(tmp_path).starts == 2


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/etc/passwd", path)])
def test_a_run_continues_if_its_log_cannot_be_written(tmp_path, make, warnings_logged):
    make(tmp_path / "goodput.jsonl")
    state, _ = train(tmp_path)
    assert int(state.step) == 20
    assert len([text for text in warnings_logged() if "continues without its log" in text]) == 1


# Status ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "actions, state",
    [
        ([], "finished"),
        ([Fail(1, RuntimeError("no\nroom"), uses_outputs=True)], r"error: RuntimeError: no\nroom"),
        ([jaxloop.EarlyStoppingAction("loss", patience=1, min_delta=100.0)], "stopped by EarlyStoppingAction"),
    ],
)
def test_status_reports_how_a_run_ended(tmp_path, capsys, actions, state):
    with contextlib.suppress(RuntimeError):
        train(tmp_path, end_actions=actions)
    shown = printed(capsys, "status", tmp_path)
    assert shown.startswith(f"{tmp_path}: {state}\n"), shown
    assert "train.loss" in shown and "checkpoint  none" in shown


def test_status_distinguishes_running_killed_and_silent_runs(tmp_path, capsys):
    alive, dead, elsewhere = (tmp_path / name for name in ("alive", "dead", "elsewhere"))
    now = 1e12  # No process started later.
    write(alive, start(now, pid=os.getpid(), total_steps=100), line("log", now, 0), line("log", now + 10, 50))
    write(dead, start(now), line("log", now, 0))
    write(elsewhere, start(now, host="another"), line("log", now, 0))
    history(dead, 0.1, 0.5, 0.7)  # A row of step 20, written after the last line of the run log.
    found = json.loads(printed(capsys, "status", alive, dead, elsewhere, "--json"))
    assert [each["state"] for each in found] == ["running", "killed", "silent"]
    assert [each["step"] for each in found] == [50, 20, 0]
    assert (found[0]["steps_per_sec"], found[0]["secs_left"]) == (5.0, 10.0)


# Comparing ------------------------------------------------------------------------------------------------


def history(workdir, *values, name="accuracy"):
    rows = [
        {"elapsed": {"steps": 10 * n}, "logs": {"train": {name: 99.0}, "test": {name: v}}} for n, v in enumerate(values)
    ]
    (workdir / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"torn": ')


def test_compare_ranks_runs_by_best_value(tmp_path, capsys):
    values = {"a": (0.1, 0.7, 0.3), "b": (0.9, "NaN", 0.2), "c": (0.5,), "d": ("NaN",)}
    notes = {"a": {"lr": 1, "seed": 0}, "b": {"lr": 1, "seed": 1}, "c": {"lr": 2, "seed": 0}, "d": {"lr": 2, "seed": 1}}
    for name in values:
        begin = start(0.0, notes=notes[name] | {"commit": "abc"})
        write(tmp_path / name, begin, line("log", 1.0, 0), line("log", 9.0, 9))
        history(tmp_path / name, *values[name])
    directories = [tmp_path / name for name in values]
    (found,) = json.loads(printed(capsys, "compare", *directories, "--by", "test/accuracy", "--json"))
    ranked = [(run["workdir"][-1], run["best"], run["step"]) for run in found["runs"]]
    assert ranked == [("b", 0.9, 0), ("a", 0.7, 10), ("c", 0.5, 0), ("d", None, None)]
    shown = printed(capsys, "compare", *directories, "--by", "test.accuracy", "--mode", "min")
    assert shown.splitlines()[0].split() == "run best test.accuracy step time productive lr seed".split()
    assert shown.splitlines()[1].split()[0].endswith("/a")  # 0.1.
    shown = printed(capsys, "compare", *directories, "--by", "test.acuracy", "--mode", "max")
    assert "No history has a finite value of 'test.acuracy'" in shown
    asked = printed(capsys, "compare", *directories, "--by", "test.score")
    assert "'test.score' doesn't say whether larger" in asked and "--mode max" in asked


@pytest.mark.parametrize("command", ["status", "goodput", "compare"])
def test_a_command_skips_a_directory_without_a_run_log(tmp_path, capsys, command):
    train(tmp_path / "one")
    train(tmp_path / "two")
    options = ["--by", "train.loss"] if command == "compare" else []
    code = command_line.main([command, str(tmp_path), str(tmp_path / "one"), str(tmp_path / "two"), *options])
    shown = capsys.readouterr()
    assert code == 1 and f"{tmp_path} has no run log" in shown.err
    assert str(tmp_path / "one") in shown.out and str(tmp_path / "two") in shown.out


def test_notes_are_stored_in_the_run_log(tmp_path, capsys):
    train(tmp_path)
    (found,) = json.loads(printed(capsys, "compare", tmp_path, "--by", "train.loss", "--json"))
    assert found["mode"] == "min" and found["runs"][0]["step"] == 20
    assert {"lr": 0.1, "seed": 3}.items() <= found["runs"][0]["notes"].items()


@pytest.mark.parametrize("notes", [{"lr": print}, {(): 1}, {"lr": float("nan")}, {"lr": float("inf")}])
def test_notes_that_cannot_be_stored_are_rejected(notes):
    with pytest.raises(TypeError, match=r"OuterLoop\.notes"):
        jaxloop.OuterLoop(jaxloop.TrainLoop(STEP), notes=notes)
