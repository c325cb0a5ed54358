"""Generates the pictures of the documentation in its own directory: `python docs/pictures/make.py`.

Diagrams are drawn here. Terminals and learning curves come from runs of the tutorial's programs, which takes a minute.
Pictures are SVG files whose lines and texts have the color of the page: the site inserts them into its pages, and
elsewhere their style sheet follows the color scheme of the browser. To make only some, give their names.
"""

import contextlib
import fcntl
import html
import itertools
import math
import os
import pathlib
import pty
import random
import re
import runpy
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios

HERE = pathlib.Path(__file__).parent.resolve()
TUTORIAL = HERE.parent / "tutorial"
BLUE, VIOLET, GREEN, ORANGE, SLATE, RED = "#3b82d6", "#8b62cf", "#2f9c6a", "#d07a2d", "#76859a", "#d5483f"
INK = "currentColor"
FONT = "font-family='system-ui, -apple-system, Segoe UI, Roboto, DejaVu Sans, sans-serif'"
CODE = "font-family='ui-monospace, SFMono-Regular, Menlo, Consolas, DejaVu Sans Mono, monospace'"
# conf.py removes this style sheet from pictures that it inserts into a page.
THEME = "<style>svg{color:#1f2328}@media (prefers-color-scheme:dark){svg{color:#e6edf3}}</style>"


class Picture:
    """An SVG picture with boxes, arrows and text."""

    def __init__(self, width, height, title):
        self.parts = [
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' role='img' {FONT}>",
            THEME,
            f"<title>{html.escape(title)}</title>",
            "<defs><marker id='head' viewBox='0 0 10 10' refX='9' refY='5' markerWidth='7' markerHeight='7' "
            f"orient='auto-start-reverse'><path d='M0 0L10 5L0 10z' fill='{INK}'/></marker></defs>",
        ]

    def box(self, x, y, width, height, title, lines=(), color=BLUE, title_size=16, code=False):
        self.rectangle(x, y, width, height, color)
        top = y + height / 2 - (len(lines) * 17) / 2 + 5
        self.text(x + width / 2, top, title, size=title_size, weight="600", code=code)
        for number, line in enumerate(lines, start=1):
            self.text(x + width / 2, top + 2 + number * 17, line, size=13)

    def rectangle(self, x, y, width, height, color, opacity=0.16):
        self.parts.append(
            f"<rect x='{x}' y='{y}' width='{width}' height='{height}' rx='7' fill='{color}' "
            f"fill-opacity='{opacity}' stroke='{color}' stroke-width='1.5'/>"
        )

    def text(self, x, y, text, size=13, color=INK, anchor="middle", weight="400", code=False, opacity=1):
        font = CODE if code else ""
        self.parts.append(
            f"<text x='{x:g}' y='{y:g}' font-size='{size}' fill='{color}' text-anchor='{anchor}' "
            f"font-weight='{weight}' opacity='{opacity}' {font}>{html.escape(text)}</text>"
        )

    def arrow(self, *points, dashed=False):
        path = "M" + "L".join(f"{x:g} {y:g}" for x, y in points)
        dashes = "stroke-dasharray='5 4'" if dashed else ""
        self.parts.append(
            f"<path d='{path}' fill='none' stroke='{INK}' stroke-opacity='0.65' stroke-width='1.6' {dashes} "
            "marker-end='url(#head)'/>"
        )

    def line(self, *points, dashes="2 5", color=INK, width=1):
        path = "M" + "L".join(f"{x:g} {y:g}" for x, y in points)
        self.parts.append(
            f"<path d='{path}' fill='none' stroke='{color}' stroke-opacity='0.65' stroke-width='{width}' "
            f"stroke-dasharray='{dashes}'/>"
        )

    def dot(self, x, y, color, radius=6):
        self.parts.append(f"<circle cx='{x:g}' cy='{y:g}' r='{radius}' fill='{color}'/>")

    def write(self, path):
        path.write_text("\n".join([*self.parts, "</svg>"]) + "\n")


def nouns():
    """Draws the five nouns and which calls which."""
    picture = Picture(820, 410, "What calls what: the OuterLoop calls loops, loops call the step and actions.")
    picture.box(250, 16, 320, 64, "OuterLoop", ["the experiment: trains, evaluates, resumes"], VIOLET)
    picture.box(70, 150, 280, 64, "TrainLoop", ["one batch after the other"], BLUE)
    picture.box(470, 150, 280, 64, "EvalLoop", ["leaves the state unchanged"], BLUE)
    picture.box(70, 284, 280, 84, "Step", ["what happens to one batch;", "compiled by JAX"], ORANGE)
    picture.box(470, 284, 130, 84, "Action", ["a side effect", "at some steps"], GREEN)
    picture.box(620, 284, 130, 84, "Partitioner", ["where arrays", "live"], SLATE)
    picture.arrow((340, 80), (230, 150))
    picture.arrow((480, 80), (590, 150))
    picture.text(226, 116, "train loops", anchor="end")
    picture.text(600, 116, "evaluations, when due", anchor="start")
    picture.arrow((170, 214), (170, 284))
    picture.text(162, 254, "each batch", anchor="end")
    picture.arrow((340, 214), (480, 284))
    picture.text(352, 272, "actions, when due", anchor="end")
    picture.arrow((540, 214), (345, 300))
    picture.arrow((570, 214), (545, 284))
    picture.arrow((350, 352), (410, 352), (410, 386), (685, 386), (685, 368), dashed=True)
    picture.text(548, 403, "places the state and the batches", size=12)
    return picture


def hooks():
    """Draws the order in which hooks, actions and evaluations are called."""
    picture = Picture(820, 430, "The order of hooks: per loop, per batch, and after a step at which something is due.")
    picture.rectangle(14, 14, 792, 402, BLUE, 0.05)
    picture.text(30, 38, "TrainLoop", anchor="start", weight="600", size=15)
    picture.box(30, 54, 240, 40, "begin_actions", color=GREEN, code=True, title_size=14)
    picture.box(294, 54, 200, 40, "loop.begin", color=BLUE, code=True, title_size=14)
    picture.arrow((270, 74), (294, 74))
    picture.rectangle(30, 118, 760, 122, ORANGE, 0.05)
    picture.text(46, 140, "for each batch: Step", anchor="start", weight="600", size=15)
    names = [("preprocess_batch", 156, "host"), ("begin", 92, "host"), ("run", 110, "compiled"), ("end", 92, "host")]
    x = 46
    for number, (name, width, place) in enumerate(names):
        picture.box(x, 160, width, 58, name, [place], ORANGE, title_size=14, code=True)
        if number:
            picture.arrow((x - 32, 189), (x, 189))
        x += width + 32
    picture.text(x - 4, 180, "A step's own actions", anchor="start", size=12)
    picture.text(x - 4, 197, "run before run and after end.", anchor="start", size=12)
    picture.arrow((394, 94), (394, 118))
    picture.rectangle(30, 264, 760, 96, GREEN, 0.05)
    picture.text(
        46, 286, "after a step at which something is due, in this order", anchor="start", weight="600", size=15
    )
    due = [
        ("history row", 118),
        ("end_actions", 136),
        ("evaluations", 136),
        ("early stopping", 150),
        ("checkpoint", 124),
    ]
    x = 46
    for number, (name, width) in enumerate(due):
        picture.box(x, 302, width, 40, name, color=GREEN, title_size=14)
        if number:
            picture.arrow((x - 18, 322), (x, 322))
        x += width + 18
    picture.arrow((410, 240), (410, 264))
    picture.text(
        30,
        392,
        "At the end of a loop, loop.end is called, and then everything that is due, in the same order.",
        anchor="start",
    )
    return picture


def timeline():
    """Draws when schedules fire in a run of 600 steps."""
    picture = Picture(820, 330, "When five schedules fire in a run of 550 steps whose loops end every 200 steps.")
    left, scale, end = 250, 0.96, 550
    at = lambda step: left + step * scale
    rows = [
        ("every(steps=100)", range(100, end + 1, 100), BLUE),
        ("every(steps=200) | last()", [200, 400, end], VIOLET),
        ("at(0) | at(350)", [0, 350], GREEN),
        ("every(steps=100) & after(300)", [300, 400, 500], ORANGE),
        ("every(loops=1)", [200, 400, end], RED),
    ]
    for step in range(0, end + 1, 50):
        picture.line((at(step), 34), (at(step), 262), dashes="1 0" if step % 200 == 0 or step == end else "1 6")
        if step % 100 == 0 or step == end:
            picture.text(at(step), 24, f"{step}", size=12)
    for number, (name, steps, color) in enumerate(rows):
        y = 60 + number * 44
        picture.text(left - 20, y + 5, name, anchor="end", size=13, code=True)
        picture.line((at(0), y), (at(end), y), dashes="1 0")
        for step in steps:
            picture.dot(at(step), y, color)
    for start, stop in ((0, 200), (200, 400), (400, end)):
        picture.rectangle(at(start) + 2, 272, (stop - start) * scale - 4, 26, SLATE)
        picture.text((at(start) + at(stop)) / 2, 290, "loop", size=12)
    picture.text(left - 20, 290, "train_loop_steps=200", anchor="end", size=13, code=True)
    picture.text(at(0), 320, "step 0: before the first update", anchor="start", size=12)
    picture.text(at(end), 320, "step 550: the last", anchor="end", size=12)
    return picture


def run_method():
    """Draws what `Step.run` receives and returns."""
    picture = Picture(820, 240, "Step.run receives a state and a batch, and returns the next state and outputs.")
    picture.box(20, 30, 190, 70, "state", ["parameters, optimizer,", "step number"], BLUE)
    picture.box(20, 140, 190, 70, "batch", ["arrays with one row", "per example"], SLATE)
    picture.box(
        310, 60, 210, 120, "run(state, batch)", ["pure: compiled once,", "for one device or many"], ORANGE, code=True
    )
    picture.box(610, 30, 190, 70, "new state", ["step number + 1"], BLUE)
    picture.box(610, 140, 190, 70, "outputs", ["loss, accuracy, ..."], GREEN)
    for start, stop in (
        ((210, 65), (310, 100)),
        ((210, 175), (310, 140)),
        ((520, 100), (610, 65)),
        ((520, 140), (610, 175)),
    ):
        picture.arrow(start, stop)
    picture.arrow((705, 30), (705, 12), (115, 12), (115, 30), dashed=True)
    picture.text(410, 30, "the next step's state: its memory is reused", size=12)
    return picture


def devices():
    """Draws where data-parallel and fully sharded partitioners place the state and a batch."""
    picture = Picture(820, 300, "Two partitioners on four devices.")
    for left, name, split in ((10, "DataParallelPartitioner", False), (420, "FSDPPartitioner", True)):
        picture.text(left + 195, 24, name, size=15, weight="600", code=True)
        for device in range(4):
            x = left + device * 98
            picture.rectangle(x, 40, 90, 200, SLATE, 0.07)
            picture.text(x + 45, 60, f"device {device}", size=12)
            if split:
                picture.rectangle(x + 9, 72 + device * 22, 72, 22, BLUE, 0.45)
                picture.line((x + 9, 72), (x + 81, 72), (x + 81, 160), (x + 9, 160), (x + 9, 72), color=BLUE)
            else:
                picture.rectangle(x + 9, 72, 72, 88, BLUE, 0.45)
            picture.rectangle(x + 9, 180, 72, 36, ORANGE, 0.4)
            picture.text(x + 45, 203, "16 rows", size=12)
        picture.text(
            left + 195, 262, "a quarter of the state on each device" if split else "the whole state on each device"
        )
        picture.text(left + 195, 282, "a quarter of each batch of 64 rows", opacity=0.8)
    return picture


def bars():
    """Draws the times per step of two workloads in three loops, relative to a hand-written loop."""
    picture = Picture(820, 250, "Time per step, relative to a hand-written loop.")
    groups = [
        (
            "a step of 132 us (small MLP)",
            [("hand-written", 1, SLATE), ("jaxloop", 1.10, BLUE), ("Keras 3", 2.63, ORANGE)],
        ),
        ("a step of 13.3 ms (CNN)", [("hand-written", 1, SLATE), ("jaxloop", 1.04, BLUE), ("Keras 3", 1.01, ORANGE)]),
    ]
    for group, (title, rows) in enumerate(groups):
        top = 16 + group * 120
        picture.text(20, top + 8, title, anchor="start", weight="600")
        for number, (name, ratio, color) in enumerate(rows):
            y = top + 20 + number * 28
            picture.text(130, y + 15, name, anchor="end")
            picture.rectangle(142, y, 220 * ratio, 21, color, 0.5)
            picture.text(152 + 220 * ratio, y + 15, f"{ratio:.2f}", anchor="start", weight="600")
    return picture


def thumbnails():
    """Draws a small picture for each recipe. Returns the pictures by the names of the recipes."""
    source = random.Random(0)
    drawn = {}

    def new(name):
        drawn[name] = Picture(240, 96, name.replace("_", " "))
        return drawn[name]

    def curve(picture, points, color, dashes="1 0", width=2.5):
        picture.line(*points, dashes=dashes, color=color, width=width)

    def network(picture, x, sizes, color):
        layers = [[(x + 34 * i, 48 + 15 * (j - (n - 1) / 2)) for j in range(n)] for i, n in enumerate(sizes)]
        for one, two in itertools.pairwise(layers):
            for a, b in itertools.product(one, two):
                picture.line(a, b, dashes="1 0", width=0.6)
        for point in itertools.chain(*layers):
            picture.dot(*point, color, 4)

    noise = [(20 + 5 * i, 74 - 1.3 * i + source.uniform(-12, 12)) for i in range(41)]
    picture = new("ema_teacher")
    curve(picture, noise, SLATE, width=1)
    curve(picture, [(x, 74 - 1.3 * i) for i, (x, _) in enumerate(noise)], BLUE)
    picture = new("schedule_free")
    curve(picture, [(20, 20), (220, 20)], GREEN)
    curve(picture, [(20 + 4 * i, 20 + 56 * (1 - math.cos(math.pi * i / 50)) / 2) for i in range(51)], SLATE, "3 4")
    picture = new("gan")
    for k in range(8):
        x, y = 120 + 38 * math.cos(k * math.pi / 4), 48 + 34 * math.sin(k * math.pi / 4)
        for _ in range(9):
            picture.dot(x + source.gauss(0, 3), y + source.gauss(0, 3), source.choice([BLUE, ORANGE]), 1.6)
    picture = new("vae")
    network(picture, 40, [5, 3, 1], BLUE)
    network(picture, 132, [1, 3, 5], ORANGE)
    picture = new("language_model")
    for row, widths in enumerate(([40, 62, 28], [58, 24, 50], [30, 46, 0])):
        x = 40
        for width in filter(None, widths):
            picture.rectangle(x, 16 + 24 * row, width, 14, BLUE if row < 2 else ORANGE, 0.4)
            x += width + 8
    picture = new("ppo")
    curve(picture, [(40, 70), (200, 70)], SLATE)
    picture.rectangle(100, 58, 40, 18, BLUE, 0.4)
    curve(picture, [(120, 58), (136, 14)], ORANGE, width=4)
    picture = new("fine_tuning")
    for x, color in ((40, SLATE), (84, SLATE), (128, SLATE), (172, ORANGE)):
        picture.rectangle(x, 26, 34, 44, color, 0.4)
    picture = new("lora")
    picture.rectangle(40, 18, 60, 60, SLATE, 0.3)
    picture.text(116, 54, "+", size=22)
    picture.rectangle(134, 18, 14, 60, ORANGE, 0.4)
    picture.rectangle(154, 18, 56, 14, ORANGE, 0.4)
    picture = new("distillation")
    network(picture, 30, [5, 5, 5], SLATE)
    picture.arrow((112, 48), (148, 48))
    network(picture, 166, [2, 2], GREEN)
    picture = new("sweep")
    for k, color in enumerate((BLUE, GREEN, ORANGE)):
        curve(picture, [(20 + 5 * i, 80 - (56 - 14 * k) * (1 - math.exp(-i / (6 + 5 * k)))) for i in range(41)], color)
    picture = new("ensemble")
    for i in range(12):
        x, y, deviation = 32 + 16 * i, 22 + 0.1 * (6.5 - i) ** 4 / 2, 4 + abs(6 - i)
        curve(picture, [(x, min(y, 78) - deviation), (x, min(y, 78) + deviation)], SLATE, width=1)
        picture.dot(x, min(y, 78), BLUE, 3)
    picture = new("torch_dataloader")
    for k in range(3):
        picture.rectangle(30, 14 + 26 * k, 52, 18, SLATE, 0.3)
        picture.arrow((82, 23 + 26 * k), (140, 48))
    picture.box(142, 30, 70, 36, "Step", color=BLUE, title_size=14)
    picture = new("hugging_face")
    for row, column in itertools.product(range(4), range(5)):
        picture.rectangle(
            56 + 27 * column, 14 + 18 * row, 24, 14, BLUE if row == 2 else SLATE, 0.4 if row == 2 else 0.15
        )
    picture = new("inference")
    picture.rectangle(30, 26, 50, 44, SLATE, 0.3)
    picture.arrow((84, 48), (108, 48))
    network(picture, 118, [4, 3], BLUE)
    picture.arrow((160, 48), (184, 48))
    picture.text(204, 56, "7", size=24, weight="600")
    picture = new("several_inputs")
    for y, color in ((20, BLUE), (56, ORANGE)):
        picture.rectangle(30, y, 56, 22, color, 0.4)
        picture.arrow((86, y + 11), (136, 48))
    network(picture, 150, [3, 3, 1], GREEN)
    return drawn


# Terminals and curves --------------------------------------------------------------------------------

COLUMNS = 100
PAPER, WORDS, PROMPT, BAR, STOP = "#0d1117", "#e6edf3", "#8b949e", "#79c0ff", "#ff7b72"


def run_on_terminal(directory, arguments, kill_after=None, environment=()):
    """Runs Python in a pseudo-terminal; returns the lines that it leaves there. Kills it when its bar shows a step."""
    here, there = pty.openpty()
    fcntl.ioctl(there, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm", "JAX_PLATFORMS": "cpu", **dict(environment)}
    process = subprocess.Popen(
        [sys.executable, *arguments], cwd=directory, env=environment, stdin=there, stdout=there, stderr=there
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
        if kill_after is not None and steps and int(steps[-1]) >= kill_after:
            process.send_signal(signal.SIGKILL)
            kill_after = None
    os.close(here)
    process.wait()
    lines = [line.rstrip("\r").rsplit("\r", 1)[-1] for line in written.decode(errors="ignore").split("\n")]
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).rstrip() for line in lines]
    return [line.replace(str(directory), "/home/me") for line in lines if line and line != "compiling the first step"]


def shorten(lines, keep=3):
    """Keeps the first and last lines of evaluations."""
    tests = [line for line in lines if re.match(r"step [\d,]+  \w+: ", line)]
    if len(tests) > 2 * keep:
        dropped = set(tests[keep:-keep])
        place = lines.index(tests[keep])
        lines = [*lines[:place], "...", *lines[place:]]
        lines = [line for line in lines if line not in dropped]
    return lines


def terminal(title, lines):
    """Draws a terminal window. Lines that begin with `$` are commands."""
    width, row = 860, 20
    height = 46 + len(lines) * row
    picture = Picture(width, height, title)
    picture.parts.append(f"<rect width='{width}' height='{height}' rx='9' fill='{PAPER}'/>")
    for number, color in enumerate(("#ff5f57", "#febc2e", "#28c840")):
        picture.dot(20 + number * 20, 17, color)
    for number, line in enumerate(lines):
        color = WORDS
        if line.startswith(("$", "...")):
            color = PROMPT
        elif re.search(r"\d+/\d+ \[", line):
            color = BAR
        elif line == "Killed":
            color = STOP
        line = line if len(line) <= 99 else line[:96] + "..."
        picture.parts.append(
            f"<text x='16' y='{50 + number * row}' font-size='13.6' fill='{color}' xml:space='preserve' {CODE}>"
            f"{html.escape(line)}</text>"
        )
    return picture


def terminals_and_curves():
    """Runs the tutorial's programs, and draws what they print and measure."""
    with tempfile.TemporaryDirectory() as directory:
        directory = pathlib.Path(directory).resolve()
        for page in (1, 2, 3, 5):
            (directory / f"digits_{page}.py").write_text((TUTORIAL / f"digits_{page}.py").read_text())
        lines = run_on_terminal(directory, ["digits_1.py"])
        terminal("fit in a terminal", ["$ python digits_1.py", *shorten(lines)]).write(HERE / "tutorial_fit.svg")

        while True:  # If the run is killed while it deletes an old checkpoint, it also logs a warning about that.
            first = run_on_terminal(directory, ["digits_3.py"], kill_after=620)
            second = run_on_terminal(directory, ["digits_3.py"])
            if not any("WARNING" in line for line in second):
                break
            shutil.rmtree(directory / "runs")
        status = run_on_terminal(directory, ["-m", "jaxloop", "status", "runs/digits"])
        command = "$ python digits_3.py"
        lines = [command, *shorten(first, 2), "Killed", command, *shorten(second, 2)]
        lines += ["$ python -m jaxloop status runs/digits", *status]
        terminal("A run is killed and resumes", lines).write(HERE / "tutorial_resume.svg")
        curves(directory / "runs/digits/history.jsonl", HERE / "tutorial_curves.svg")


PLOT_INK = "#123456"  # Replaced by the color of the page.


def plot_settings():
    """Returns Matplotlib's settings for plots in the colors of the page."""
    names = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "axes.titlecolor")
    ink = dict.fromkeys((*names, "legend.labelcolor"), PLOT_INK)
    return {**ink, "svg.fonttype": "none", "svg.hashsalt": "jaxloop", "grid.color": "#8b949e", "grid.alpha": 0.4}


def write_plot(figure, path):
    """Writes a Matplotlib figure without a background, with texts in the color of the page."""
    figure.savefig(path, transparent=True, metadata={"Date": None})
    text = path.read_text().replace(PLOT_INK, "currentColor")
    text = re.sub(r"<\?xml.*?<svg", "<svg", text, flags=re.DOTALL)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' (height|width)="[\d.]+pt"', "", text, count=2)
    path.write_text(text.replace('version="1.1">', f'version="1.1">{THEME}', 1))


def curves(history, path):
    """Draws the learning curves of a history."""
    import matplotlib.pyplot as plt

    import jaxloop

    with plt.rc_context(plot_settings()):
        write_plot(jaxloop.History.load(history).plot("loss", "accuracy"), path)


def recipe_plots():
    """Runs the recipes that draw a plot, and writes their last plots."""
    import matplotlib.figure
    import matplotlib.pyplot as plt

    savefig = matplotlib.figure.Figure.savefig
    figures = []
    keep = lambda figure, *args, **kwargs: figures.append(figure)
    for name in ("sweep", "ensemble", "vae"):
        with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory), plt.rc_context(plot_settings()):
            matplotlib.figure.Figure.savefig = keep
            try:
                runpy.run_path(str(HERE.parent / "recipes" / f"{name}.py"), run_name="__main__")
            finally:
                matplotlib.figure.Figure.savefig = savefig
            write_plot(figures[-1], HERE / f"{name}.svg")


def modules():
    """Draws the modules in layers."""
    picture = Picture(1000, 596, "The packages of jaxloop in layers. Imports point downwards.")
    left, width, height, gap = 20, 700, 56, 12
    third, half = (width - 2 * gap) / 3, (width - gap) / 2
    rows = [
        [("APIs and tools", "models · functional · check · runs · testing · examples", width, VIOLET)],
        [("The experiment", "outer_loop", width, BLUE)],
        [("Loops", "loop · stat_loop · action_loop · train_loop · eval_loop", width, BLUE)],
        [("The engine", "engine", width, BLUE)],
        [("Steps", "step", half, BLUE), ("Actions", "history · actions", half, BLUE)],
        [
            ("Data", "data", third, GREEN),
            ("Metrics", "metrics", third, GREEN),
            ("On disk", "checkpoint", third, GREEN),
        ],
        [("Placement", "partition", half, ORANGE), ("Processes", "distributed", half, ORANGE)],
        [("Basics", "types · schedules · base", width, SLATE)],
    ]
    notes = [
        ["fit, the functional API,", "operation of runs"],
        ["resume, evaluations, stop"],
        ["constructors and hooks"],
        ["runs steps, calls what is due"],
        ["what happens to one batch;", "side effects, called by loops"],
        ["only metrics reads the devices,", "only checkpoint imports Orbax"],
        ["where arrays live;", "how processes agree"],
        ["used by every other layer"],
    ]
    for number, (row, lines) in enumerate(zip(rows, notes, strict=True)):
        y, x = 16 + number * (height + gap), left
        for title, modules, box_width, color in row:
            picture.box(x, y, box_width, height, title, [modules], color)
            x += box_width + gap
        for place, line in enumerate(lines):
            picture.text(
                left + width + 48, y + height / 2 + 4 + (place - (len(lines) - 1) / 2) * 16, line, anchor="start"
            )
    picture.arrow((left + width + 24, 20), (left + width + 24, 8 * (height + gap)))
    picture.text(left + width + 24, 8 * (height + gap) + 18, "imports", size=12)
    return picture


def step():
    """Draws how a batch passes through a step, and how a checkpoint is saved and restored."""
    picture = Picture(1000, 690, "How a batch passes through a step, and how a checkpoint is saved and restored.")
    for y, name in ((20, "host"), (176, "devices"), (322, "host"), (496, "disk")):
        picture.text(14, y + 4, name.upper(), size=11, anchor="start", weight="600")
    for y in (156, 302, 476):
        picture.line((14, y), (986, y))

    # The batch on the host.
    picture.box(20, 44, 150, 84, "Your data", ["any iterator", "or iterable"], SLATE)
    picture.box(232, 44, 190, 84, "PositionedIterator", ["counts batches and", "tracks the position"], GREEN)
    picture.box(484, 44, 170, 84, "Feed", ["reads one or several;", "takes back unused ones"])
    picture.box(716, 44, 250, 84, "Step, on the host", ["preprocess_batch, begin,", "shard_batch"])
    for start, end in ((170, 232), (422, 484), (654, 716)):
        picture.arrow((start, 86), (end, 86))

    # The devices.
    picture.box(
        716, 196, 250, 84, "Step.run, compiled", ["(state, batch) to (state, outputs);", "the state is donated"], ORANGE
    )
    picture.arrow((841, 128), (841, 196))
    picture.text(832, 174, "batch", anchor="end")
    picture.arrow((966, 256), (988, 256), (988, 220), (966, 220))
    picture.box(
        232,
        196,
        422,
        84,
        "Outputs",
        ["keeps outputs on the devices, merges clu.metrics,", "blocks the host if it is too far ahead"],
        ORANGE,
    )
    picture.arrow((716, 238), (654, 238))
    picture.text(685, 228, "outputs")

    # The outputs on the host.
    picture.box(
        20, 346, 190, 96, "metrics.fetch", ["the only read: when", "something is due or", "too many are queued"]
    )
    picture.arrow((232, 238), (115, 238), (115, 346))
    picture.box(256, 346, 170, 96, "LoopOutputs", ["values of each step,", "on the host"])
    picture.box(472, 346, 170, 96, "End actions", ["history row, summaries,", "progress, custom ones"])
    picture.box(688, 346, 120, 96, "Evaluations", ["those that are", "due at this step"])
    picture.box(854, 346, 126, 96, "Checkpoint", ["saved last, after", "early stopping"])
    for start, end in ((210, 256), (426, 472), (642, 688), (808, 854)):
        picture.arrow((start, 394), (end, 394))
    picture.arrow((917, 280), (917, 346))
    picture.text(909, 326, "state", anchor="end")

    # The disk.
    picture.box(472, 520, 76, 84, "Events", ["written in", "a thread"], GREEN, title_size=14)
    picture.box(560, 520, 82, 84, "History", ["one line", "per row"], GREEN, title_size=14)
    picture.arrow((510, 442), (510, 520))
    picture.arrow((601, 442), (601, 520))
    picture.box(
        688,
        520,
        292,
        84,
        "Checkpoint of step N",
        ["state, position, loops, actions, sums;", "sealed, then one atomic rename"],
        GREEN,
    )
    picture.arrow((917, 442), (917, 520))
    picture.text(909, 466, "WholeRun.snapshot", anchor="end")

    # Resuming.
    picture.arrow((834, 604), (834, 650), (326, 650), (326, 604), dashed=True)
    picture.text(580, 642, "a later process verifies the seal, or uses an older checkpoint")
    picture.box(232, 520, 190, 84, "WholeRun.load", ["state, loops and actions,", "history up to step N"])
    picture.arrow((232, 562), (8, 562), (8, 146), (327, 146), (327, 128), dashed=True)
    picture.text(120, 552, "seek the position")
    return picture


PICTURES = {
    "modules": modules,
    "step": step,
    "nouns": nouns,
    "hooks": hooks,
    "timeline": timeline,
    "run_method": run_method,
    "devices": devices,
    "bars": bars,
}

if __name__ == "__main__":
    os.environ["MPLBACKEND"] = "agg"
    for name in sys.argv[1:] or [*PICTURES, "thumbnails", "terminals", "recipes"]:
        if name == "terminals":
            terminals_and_curves()
        elif name == "recipes":
            recipe_plots()
        elif name == "thumbnails":
            for recipe, picture in thumbnails().items():
                picture.write(HERE / "thumbnails" / f"{recipe}.svg")
        else:
            PICTURES[name]().write(HERE / f"{name}.svg")
