"""Generates the pictures of the documentation in its own directory: `python docs/pictures/make.py`.

modules.svg and step.svg are drawn here, in colors that are legible on light and dark pages. learning_curves.png is the
plot that the program in docs/start_here.md makes; this script runs that program.
"""

import contextlib
import html
import os
import pathlib
import re
import shutil
import tempfile

BLUE, VIOLET, GREEN, ORANGE, SLATE = "#2f6db5", "#7a54b8", "#2b8259", "#b4601f", "#5b6676"
GREY = "#7f8894"  # Arrows, and the text beside them.
FONT = "font-family='system-ui, -apple-system, Segoe UI, Roboto, DejaVu Sans, sans-serif'"
CODE = "font-family='ui-monospace, SFMono-Regular, Menlo, Consolas, DejaVu Sans Mono, monospace'"


class Picture:
    """An SVG page with boxes, arrows and text."""

    def __init__(self, width, height, title):
        self.parts = [
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' role='img' {FONT}>",
            f"<title>{html.escape(title)}</title>",
            "<defs><marker id='head' viewBox='0 0 10 10' refX='9' refY='5' markerWidth='7' markerHeight='7' "
            f"orient='auto-start-reverse'><path d='M0 0L10 5L0 10z' fill='{GREY}'/></marker></defs>",
        ]

    def box(self, x, y, width, height, title, lines=(), color=BLUE, title_size=16):
        self.parts.append(f"<rect x='{x}' y='{y}' width='{width}' height='{height}' rx='7' fill='{color}'/>")
        top = y + height / 2 - (len(lines) * 17) / 2 + 5
        self.text(x + width / 2, top, title, size=title_size, color="#fff", weight="600")
        for number, line in enumerate(lines, start=1):
            self.text(x + width / 2, top + 2 + number * 17, line, size=13, color="#fff")

    def text(self, x, y, text, size=13, color=GREY, anchor="middle", weight="400", code=False):
        font = CODE if code else ""
        self.parts.append(
            f"<text x='{x}' y='{y}' font-size='{size}' fill='{color}' text-anchor='{anchor}' font-weight='{weight}' "
            f"{font}>{html.escape(text)}</text>"
        )

    def arrow(self, *points, dashed=False):
        path = "M" + "L".join(f"{x} {y}" for x, y in points)
        dashes = "stroke-dasharray='5 4'" if dashed else ""
        self.parts.append(
            f"<path d='{path}' fill='none' stroke='{GREY}' stroke-width='1.8' {dashes} marker-end='url(#head)'/>"
        )

    def line(self, *points):
        path = "M" + "L".join(f"{x} {y}" for x, y in points)
        self.parts.append(f"<path d='{path}' fill='none' stroke='{GREY}' stroke-width='1' stroke-dasharray='2 5'/>")

    def write(self, path):
        path.write_text("\n".join([*self.parts, "</svg>"]) + "\n")


def modules():
    """Draws the modules in layers."""
    picture = Picture(1000, 596, "The packages of jaxloop in layers. Imports point downwards.")
    left, width, height, gap = 20, 700, 56, 12
    third, half = (width - 2 * gap) / 3, (width - gap) / 2
    rows = [
        [("APIs and tools", "models · functional · check · runs · testing · examples", width, VIOLET)],
        [("The experiment", "outer_loop · experiment", width, BLUE)],
        [("Loops", "loop · stat_loop · action_loop · train_loop · eval_loop", width, BLUE)],
        [("The engine", "engine", width, BLUE)],
        [("Steps", "step", half, BLUE), ("Actions", "history · actions", half, BLUE)],
        [
            ("Data", "data", third, GREEN),
            ("Metrics", "metrics", third, GREEN),
            ("On disk", "checkpoint", third, GREEN),
        ],
        [("Placement", "partition", half, ORANGE), ("Processes", "distributed · processes", half, ORANGE)],
        [("Basics", "types · schedules · base", width, SLATE)],
    ]
    notes = [
        ["fit, the loop language,", "operation of runs"],
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


def run_page(page):
    """Runs the Python blocks of a page, one after the other."""
    names = {"__name__": "__main__"}
    for block in re.findall(r"```python[^\n]*\n(.*?)```", page.read_text(), flags=re.DOTALL):
        exec(block, names)


if __name__ == "__main__":
    here = pathlib.Path(__file__).parent.resolve()
    modules().write(here / "modules.svg")
    step().write(here / "step.svg")
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory):
        os.environ["MPLBACKEND"] = "agg"
        run_page(here.parent / "start_here.md")
        shutil.copy("runs/digits/learning_curves.png", here)
