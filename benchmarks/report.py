"""The report: tables for the terminal and for Markdown, targets with their results, and a plot."""

import datetime
import importlib.metadata
import os
import pathlib
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence

from benchmarks.lineup import (
    CLU,
    FIT,
    FUSED,
    HAND_WRITTEN_WITH_LOGS,
    KEEPS_LOSSES,
    KERAS,
    KERAS_32,
    NAN_POLICY,
    REFERENCE,
    SCAN,
    WITH_LOGS,
)
from benchmarks.rounds import UNITS, Comparison, Spread
from benchmarks.targets import REASONS, TARGETS, Target

PACKAGES = ("jaxloop", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "clu", "keras")

NOTES = {
    REFERENCE: "`jax.jit(step, donate_argnums=0)` in a `for` loop that keeps no outputs and reads nothing before the "
    "end. NumPy batches go straight into the jitted call; with several devices, through one `jax.device_put`.",
    KEEPS_LOSSES: "also keeps the loss of each step in a list, which `jax.device_get` reads at the end.",
    HAND_WRITTEN_WITH_LOGS: "also reads the losses every 100 steps, writes their mean with tensorboardX and on a "
    "simulated terminal, and keeps it in a list.",
    SCAN: "stacks 32 batches on the host and scans over them in one dispatch.",
    FUSED: "does the same in jaxloop, but has the losses of all steps on the host at the end.",
    NAN_POLICY: "checks in each step that the numbers are finite.",
    WITH_LOGS: "an `OuterLoop` with a progress bar on a simulated terminal. It writes TensorBoard files and history "
    "rows every 100 steps.",
    FIT: "trains for two epochs. The clock runs from the start of the second epoch until `fit` returns, because each "
    "call compiles the step again.",
    CLU: "merges the loss of each step into a `clu.metrics.Collection`, and computes it every 100 steps.",
    KERAS: "calls `model.fit` with a generator of NumPy batches for two epochs. It is timed like jaxloop's `fit`.",
    KERAS_32: "also calls `model.fit`. Keras dispatches the steps one by one, and calls its callbacks every 32 steps.",
}


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.3g}"


def _ratio(spread: Spread) -> str:
    return f"{spread.median:.3f} ({spread.least:.3f} to {spread.greatest:.3f})"


def rows(comparison: Comparison) -> list[tuple[str, str, str, str]]:
    """Returns a heading, then a row per contestant: name, median time, ratio to the reference, CPU time."""
    table = [("", comparison.unit, "ratio (min to max)", "CPU time" if comparison.cpu_seconds else "")]
    for name, seconds in comparison.seconds.items():
        shown = lambda values: _number(statistics.median(values) * UNITS[comparison.unit])
        ratio = "1" if name == comparison.reference else _ratio(Spread.of(comparison.ratios(name)))
        cpu = shown(comparison.cpu_seconds[name]) if comparison.cpu_seconds else ""
        table.append((name, shown(seconds), ratio, cpu))
    return table + [(name, "not run", "", "") for name in comparison.absent]


def remarks(comparison: Comparison) -> list[str]:
    """Returns a line for each figure, and for each contestant that was not run, with the reason."""
    figures = [f"{name}: {_number(value)}" for name, value in comparison.figures.items()]
    return figures + [f"{name} was not run: {reason}" for name, reason in comparison.absent.items()]


def text_table(comparison: Comparison) -> str:
    """Formats a comparison for the terminal."""
    table = rows(comparison)
    widths = [max(len(row[column]) for row in table) for column in range(4)]
    lines = [
        f"{name:<{widths[0]}}  {time:>{widths[1]}}  {ratio:<{widths[2]}}  {cpu:>{widths[3]}}".rstrip()
        for name, time, ratio, cpu in table
    ]
    return "\n  ".join([f"{comparison.name}: {comparison.title}", *lines, *remarks(comparison)]) + "\n"


def markdown_table(comparison: Comparison) -> str:
    """Formats a comparison in Markdown, with its heading."""
    columns = 4 if comparison.cpu_seconds else 3
    lines = ["| " + " | ".join(row[:columns]) + " |" for row in rows(comparison)]
    lines.insert(1, "|---|---:|---|" + "---:|" * (columns - 3))
    return "\n".join([f"### {comparison.name}: {comparison.title}", "", *lines, "", *_bullets(remarks(comparison))])


def _bullets(lines: Sequence[str]) -> list[str]:
    return [*(f"- {line}" for line in lines), ""] if lines else []


# Targets ---------------------------------------------------------------------------------------------


def targets_table(comparisons: Mapping[str, Comparison], targets: Sequence[Target] = TARGETS) -> str:
    """Returns a table of the targets with their results, leaving out comparisons that were not requested."""
    lines = ["| benchmark | ratio or figure | target (at most) | measured | result |", "|---|---|---:|---:|---|"]
    for target in targets:
        if target.comparison in comparisons:
            measured = target.measured(comparisons)
            what = target.name if target.against is None else f"{target.name} / {target.against}"
            mark = "not measured" if measured is None else "met" if measured <= target.limit else "**missed**"
            shown = "" if measured is None else f"{measured:.1f}" if target.against is None else f"{measured:.3f}"
            limit = f"{target.limit:.0f}" if target.against is None else f"{target.limit:.2f}"
            lines.append(f"| {target.comparison} | {what} | {limit} | {shown} | {mark} |")
    return "\n".join(lines)


def reasons(comparisons: Mapping[str, Comparison], targets: Sequence[Target] = TARGETS) -> list[str]:
    """Returns a line for each missed target whose reason is known."""
    lines = []
    for target in targets:
        measured = target.measured(comparisons)
        reason = REASONS.get((target.comparison, target.name))
        if measured is not None and measured > target.limit and reason is not None:
            line = f"**{target.comparison}, {target.name}.** {reason}"
            lines += [] if line in lines else [line]
    return lines


# The report ------------------------------------------------------------------------------------------

HOW = """\
All contestants of a workload train the same model from the same parameters on the same 64 host batches. They take \
turns, and must reach the same loss in each round. Each workload runs in its own process, and its first round, which \
compiles, doesn't count.

| column | meaning |
|---|---|
| time | the median over the rounds, including what a loop does at its start and end |
| ratio | the time relative to the reference in the same round: the median over the rounds, and the minimum and \
maximum |
| CPU time | the CPU time of the process over all threads, including the arithmetic of the step. It is less noisy than \
the elapsed time if other programs use the machine. |"""


def markdown(
    comparisons: Sequence[Comparison],
    command: str,
    plot_file: pathlib.Path,
    output: pathlib.Path,
    failed: Sequence[str] = (),
    gpu_requested: bool = True,
) -> str:
    """Returns the whole report.

    Args:
      comparisons: The results.
      command: The command line that produced them.
      plot_file: The image file of the plot.
      output: The file that the report will be written to. The link to the plot is relative to it.
      failed: The parts that failed.
      gpu_requested: Whether the GPU part was requested. If so, the report mentions a missing GPU.
    """
    by_name = {comparison.name: comparison for comparison in comparisons}
    names = {name for comparison in comparisons for name in (*comparison.seconds, *comparison.absent)}
    missed = reasons(by_name)
    sections = [
        "# Benchmarks",
        f"`{command}`, {datetime.date.today():%d %B %Y}, commit {_commit()}.",
        "\n".join(_bullets(machine())).strip(),
        HOW,
        f"![Ratios to the reference]({os.path.relpath(plot_file, output.parent)})",
        "## Targets",
        targets_table(by_name),
        *(["Reasons for the missed targets:", "\n".join(_bullets(missed)).strip()] if missed else []),
        "## Contestants",
        "\n".join(_bullets([f"{name}: {note}" for name, note in NOTES.items() if name in names])).strip(),
        "## Results",
        *[markdown_table(comparison).strip() for comparison in comparisons],
    ]
    if gpu_requested and not any("GPU" in name or name == "G0" for name in by_name):
        sections += ["### GPU", "Not run: JAX found no GPU."]
    if failed:
        sections += ["### Failed", f"{', '.join(failed)}."]
    return "\n\n".join(sections) + "\n"


def machine() -> list[str]:
    """Returns lines of text that describe the machine and the versions of the packages."""
    gigabytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    versions = ", ".join(f"{package} {_version(package)}" for package in PACKAGES)
    return [
        f"{_cpu_model()}, {os.cpu_count()} cores, {gigabytes:.0f} GiB of memory, {platform.system()}",
        f"Python {platform.python_version()}, {versions}",
    ]


def _cpu_model() -> str:
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


# The plot --------------------------------------------------------------------------------------------


def plot(comparisons: Sequence[Comparison], file: pathlib.Path) -> None:
    """Draws the median ratios of each workload as bars, with whiskers from the minimum to the maximum."""
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

    comparisons = [each for each in comparisons if len(each.seconds) > 1 and each.unit.endswith("a step")]
    if not comparisons:
        return
    heights = [len(each.seconds) for each in comparisons]
    figure, all_axes = plt.subplots(
        len(comparisons),
        figsize=(10, 0.21 * sum(heights) + 0.6 * len(heights)),
        height_ratios=[height + 0.5 for height in heights],
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    for axes, comparison in zip(all_axes[:, 0], comparisons, strict=True):
        names = [name for name in comparison.seconds if name != comparison.reference]
        spreads = [Spread.of(comparison.ratios(name)) for name in names]
        medians = [spread.median for spread in spreads]
        whiskers = [[each.median - each.least for each in spreads], [each.greatest - each.median for each in spreads]]
        colors = ["tab:gray" if _is_peer(name) else "tab:blue" for name in names]
        # Bars start at the reference. Left is faster, right is slower.
        axes.barh(names, [median - 1 for median in medians], left=1, color=colors, height=0.7)
        axes.errorbar(medians, names, xerr=whiskers, fmt="none", ecolor="black", capsize=2, linewidth=0.8)
        for name, spread in zip(names, spreads, strict=True):
            is_faster = spread.median < 1
            axes.annotate(
                f"{spread.median:.2f}",
                (spread.least if is_faster else spread.greatest, name),
                (-4 if is_faster else 4, 0),
                textcoords="offset points",
                ha="right" if is_faster else "left",
                va="center",
                size=8,
            )
        axes.axvline(1, color="black", linewidth=1)
        axes.set_title(f"{comparison.name}: {comparison.title}", loc="left", size=9)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.tick_params(axis="y", labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    axes = all_axes[-1, 0]
    axes.set_xscale("log")
    ratios = [ratio for each in comparisons for name in each.seconds for ratio in each.ratios(name)]
    axes.set_xlim(min(ratios) / 1.25, max(ratios) * 1.25)  # Leaves room for the numbers next to the bars.
    axes.xaxis.set_major_locator(FixedLocator([0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    figure.supxlabel("time relative to the reference in the same round (left: faster; blue: jaxloop)", size=9)
    figure.savefig(file, dpi=100)
    plt.close(figure)


def _is_peer(name: str) -> bool:
    return name.startswith(("hand-written", "clu", "Keras"))
