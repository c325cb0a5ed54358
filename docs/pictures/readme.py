"""Generates run.png, the picture of the README, in its own directory: `python docs/pictures/readme.py`.

This takes a minute or two. The script runs `python -m jaxloop.examples.digits` in a pseudo-terminal, kills it, and
starts it again. The curves come from history.jsonl, and the lines below them are copied from the terminal. A third,
uninterrupted run must produce exactly the same history.
"""

import fcntl
import json
import os
import pathlib
import pty
import re
import signal
import struct
import subprocess
import sys
import tempfile
import termios

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

COMMAND = ["-m", "jaxloop.examples.digits", "--workdir=runs/digits"]
PROMPT = f"$ python {' '.join(COMMAND)}"
KILLED_AFTER = 330
COLUMNS = 112
TRAIN, TEST, STOP, INK, GREY = "#2f6db5", "#b4601f", "#c0392b", "#24292f", "#6e7781"
PAPER, BAR, SHELL, SAYS = "#0d1117", "#79c0ff", "#8b949e", "#e6edf3"  # The colors of the terminal.


def run_on_terminal(directory, killed_after=None):
    """Runs the example in `directory`; returns its exit code and the lines that it leaves on the terminal."""
    here, there = pty.openpty()
    fcntl.ioctl(there, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm", "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(
        [sys.executable, *COMMAND], cwd=directory, env=environment, stdin=there, stdout=there, stderr=there
    )
    os.close(there)
    written = b""
    while True:
        try:
            chunk = os.read(here, 65536)
        except OSError:  # The process has closed its end.
            break
        if not chunk:
            break
        written += chunk
        steps = re.findall(rb"(\d+)/\d+ \[", written)
        if killed_after is not None and steps and int(steps[-1]) >= killed_after:
            process.send_signal(signal.SIGKILL)
            killed_after = None
    os.close(here)
    process.wait()
    lines = [line.rstrip("\r").rsplit("\r", 1)[-1] for line in written.decode(errors="ignore").split("\n")]
    return process.returncode, [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).rstrip() for line in lines]


def read_history(directory):
    """Returns the steps and values of the history, without the times, which differ from run to run."""
    rows = [json.loads(line) for line in (directory / "runs/digits/history.jsonl").read_text().splitlines()]
    return [(row["elapsed"]["steps"], row["logs"]) for row in rows]


def curve(history, name, metric):
    points = [(step, logs[name][metric]) for step, logs in history if name in logs]
    return [step for step, _ in points], [value for _, value in points]


def draw_curves(axes, metric, before, after, killed, resumed):
    lost = [row for row in before if row[0] >= resumed]
    for name, color in (("train", TRAIN), ("test", TEST)):
        axes.plot(*curve(lost, name, metric), color=color, alpha=0.28, linewidth=9, solid_capstyle="round")
        axes.plot(
            *curve(after, name, metric),
            color=color,
            linewidth=2.4,
            label=name,
            marker="o" * (name == "test"),
            clip_on=False,
        )
    axes.axvline(killed, color=STOP, linewidth=2, linestyle=(0, (4, 3)))
    axes.set_title(metric, loc="left", fontsize=19, color=INK)
    axes.tick_params(labelsize=15, color=GREY, labelcolor=INK)
    axes.grid(color="#d0d7de", linewidth=0.8)
    axes.set_xlim(0, after[-1][0])
    axes.set_xticks(range(0, after[-1][0] + 1, 100))
    axes.set_xlabel("step", fontsize=15, color=INK)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(GREY)


def note(axes, step, height, *lines, color):
    axes.text(
        step + 14,
        height,
        "\n".join(lines),
        fontsize=15,
        color=color,
        va="center",
        linespacing=1.35,
        bbox={"color": "white"},
    )


def draw_terminal(axes, lines):
    axes.set_axis_off()
    axes.set_xlim(0, 1)
    axes.set_ylim(len(lines) + 0.3, -0.45)
    axes.add_patch(plt.Rectangle((0, 0), 1, 1, transform=axes.transAxes, color=PAPER, linewidth=0))
    for row, (line, color) in enumerate(lines):
        axes.text(0.014, row + 0.6, line, color=color, fontsize=14, family="DejaVu Sans Mono")
    row = next(row for row, (_, color) in enumerate(lines) if color == BAR)
    axes.text(0.986, row + 0.6, "killed here", color="#ff7b72", fontsize=15, ha="right")


def main():
    with tempfile.TemporaryDirectory() as directory:
        killed_dir, whole_dir = pathlib.Path(directory, "killed"), pathlib.Path(directory, "whole")
        killed_dir.mkdir()
        whole_dir.mkdir()
        code, first = run_on_terminal(killed_dir, KILLED_AFTER)
        assert code == -signal.SIGKILL, first
        before = read_history(killed_dir)
        code, second = run_on_terminal(killed_dir)
        assert code == 0, second
        after = read_history(killed_dir)
        code, third = run_on_terminal(whole_dir)
        assert code == 0, third
        assert after == read_history(whole_dir), "The killed run and the uninterrupted one have different histories."

    bar_of_first, bar_of_second = (
        next(line for line in reversed(lines) if re.search(r"\d+/\d+ \[", line)) for lines in (first, second)
    )
    killed = int(re.search(r"(\d+)/\d+ \[", bar_of_first)[1])
    resumed = int(re.search(r"Resumed at step (\d+)", "\n".join(second))[1])
    tests = lambda lines: [line for line in lines if "test: " in line]
    lines = [
        (PROMPT, SHELL),
        ("...", SHELL),
        (tests(first)[-1], SAYS),
        (bar_of_first, BAR),
        ("", SHELL),
        (PROMPT, SHELL),
        (next(line for line in second if "Resumed" in line), SAYS),
        ("...", SHELL),
        (tests(second)[-1], SAYS),
        (bar_of_second, BAR),
    ]

    figure = plt.figure(figsize=(16, 7.2), dpi=100, facecolor="white")
    grid = figure.add_gridspec(2, 2, height_ratios=[1.2, 1.06], left=0.035, right=0.98, top=0.94, bottom=0.025)
    grid.update(wspace=0.09, hspace=0.29)
    loss, accuracy = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[0, 1])
    for axes, metric in ((loss, "loss"), (accuracy, "accuracy")):
        draw_curves(axes, metric, before, after, killed, resumed)
    loss.set_ylim(bottom=0)
    accuracy.set_ylim(0, 1.02)
    loss.legend(fontsize=16, frameon=False, loc="upper right", labelcolor=INK)
    note(
        loss,
        killed,
        1.3,
        f"SIGKILL at step {killed}",
        "Pale: recorded after",
        "the last checkpoint",
        color=STOP,
    )
    note(
        accuracy,
        killed,
        0.44,
        f"Restarted from step {resumed}, it",
        "records the same history as",
        "an uninterrupted run, digit",
        "for digit",
        color=INK,
    )
    draw_terminal(figure.add_subplot(grid[1, :]), lines)
    path = pathlib.Path(__file__).with_name("run.png")
    figure.savefig(path, pil_kwargs={"optimize": True})
    print(f"{path}: {path.stat().st_size / 1024:.0f} kB")


if __name__ == "__main__":
    main()
