"""Tables for a terminal and for Markdown, targets beside what was measured, and a picture."""

import datetime
import importlib.metadata
import os
import pathlib
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence

from benchmarks.lineup import (
    AUTO,
    BY_HAND_WITH_ALL,
    CLU,
    FIT,
    FUSED,
    KEEPING,
    KERAS,
    KERAS_32,
    NAN_POLICY,
    REFERENCE,
    SCAN,
    WITH_ALL,
)
from benchmarks.rounds import UNITS, Comparison, Spread
from benchmarks.targets import REASONS, TARGETS, Target

PACKAGES = ("jaxloop", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "clu", "keras")

NOTES = {
    REFERENCE: "`jax.jit(step, donate_argnums=0)` in a `for` loop, which keeps no outputs and reads nothing before the "
    "end. NumPy batches go straight into the jitted call; over several devices, through one `jax.device_put`.",
    KEEPING: "the same, with the loss of each step in a list, which `jax.device_get` reads at the end.",
    BY_HAND_WITH_ALL: "the same, but every 100 steps it reads the losses, writes their mean with tensorboardX and in a "
    "line on a terminal, and keeps it in a list.",
    SCAN: "32 batches are stacked on the host, and one dispatch scans over them.",
    FUSED: "the same in jaxloop, and the losses of all steps are on the host at the end.",
    AUTO: "jaxloop chooses how many.",
    NAN_POLICY: "looks for numbers that are not finite in each step.",
    WITH_ALL: "an `OuterLoop` with a bar that is drawn as on a terminal, and TensorBoard files and a history every 100 "
    "steps.",
    FIT: "compiles anew in each call. It trains for two epochs; the clock starts with the second and stops when `fit` "
    "has returned.",
    CLU: "the loss of each step is merged into a `clu.metrics.Collection`, which is computed every 100 steps.",
    KERAS: "`model.fit` with a generator of NumPy batches; two epochs, timed as `fit` is.",
    KERAS_32: "the same; Keras dispatches these steps one by one, with its callbacks after 32 of them.",
}


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.3g}"


def _ratio(spread: Spread) -> str:
    return f"{spread.median:.3f} ({spread.least:.3f} to {spread.greatest:.3f})"


def rows(comparison: Comparison) -> list[tuple[str, str, str, str]]:
    """A heading, and for each contestant its name, its median time, its ratio to the reference, and its CPU time."""
    table = [("", comparison.unit, "ratio (least to greatest)", "CPU" if comparison.cpu_seconds else "")]
    for name, seconds in comparison.seconds.items():
        shown = lambda values: _number(statistics.median(values) * UNITS[comparison.unit])
        ratio = "1" if name == comparison.reference else _ratio(Spread.of(comparison.ratios(name)))
        cpu = shown(comparison.cpu_seconds[name]) if comparison.cpu_seconds else ""
        table.append((name, shown(seconds), ratio, cpu))
    return table + [(name, "absent", "", "") for name in comparison.absent]


def remarks(comparison: Comparison) -> list[str]:
    """What else there is to say: figures, and why somebody is absent."""
    figures = [f"{name}: {_number(value)}" for name, value in comparison.figures.items()]
    return figures + [f"{name} is absent: {reason}" for name, reason in comparison.absent.items()]


def text_table(comparison: Comparison) -> str:
    """For a terminal."""
    table = rows(comparison)
    widths = [max(len(row[column]) for row in table) for column in range(4)]
    lines = [
        f"{name:<{widths[0]}}  {time:>{widths[1]}}  {ratio:<{widths[2]}}  {cpu:>{widths[3]}}".rstrip()
        for name, time, ratio, cpu in table
    ]
    return "\n  ".join([f"{comparison.name}: {comparison.title}", *lines, *remarks(comparison)]) + "\n"


def markdown_table(comparison: Comparison) -> str:
    columns = 4 if comparison.cpu_seconds else 3
    lines = ["| " + " | ".join(row[:columns]) + " |" for row in rows(comparison)]
    lines.insert(1, "|---|---:|---|" + "---:|" * (columns - 3))
    return "\n".join([f"### {comparison.name}: {comparison.title}", "", *lines, "", *_bullets(remarks(comparison))])


def _bullets(lines: Sequence[str]) -> list[str]:
    return [*(f"- {line}" for line in lines), ""] if lines else []


# Targets ---------------------------------------------------------------------------------------------


def targets_table(comparisons: Mapping[str, Comparison], targets: Sequence[Target] = TARGETS) -> str:
    """What was to be reached beside what was; of what was not asked for, nothing."""
    lines = ["| | | target, at most | measured | |", "|---|---|---:|---:|---|"]
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
    """Why what was missed was missed, a line each, as far as it is known."""
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
All contestants of a workload train the same model from the same parameters on the same 64 host batches, in turns; in \
each round it is checked that they came to the same loss. Ratios are between times of the same round; shown are their \
median, the least and the greatest. Times are medians over the rounds; what a loop does at its begin and its end is \
part of them. The last column is the CPU time of the process, of all its threads, the arithmetic of the step included: \
it is steadier where others use the machine too. A round that compiles comes first, and does not count. Each workload \
has a process of its own."""


def markdown(
    comparisons: Sequence[Comparison],
    command: str,
    plot_file: pathlib.Path,
    output: pathlib.Path,
    failed: Sequence[str] = (),
    gpu_was_asked: bool = True,
) -> str:
    """The whole report.

    Args:
      comparisons: what was measured.
      command: the line that measured it.
      plot_file: the picture.
      output: where the report will be, for the link to the picture.
      failed: the parts that failed.
      gpu_was_asked: whether it is to be said that there is no GPU, where there is none.
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
        *(["Why what was missed was missed:", "\n".join(_bullets(missed)).strip()] if missed else []),
        "## Contestants",
        "\n".join(_bullets([f"{name}: {note}" for name, note in NOTES.items() if name in names])).strip(),
        "## Measured",
        *[markdown_table(comparison).strip() for comparison in comparisons],
    ]
    if gpu_was_asked and not any("GPU" in name or name == "G0" for name in by_name):
        sections += ["### GPU", "Not run: JAX has no GPU here."]
    if failed:
        sections += ["### Failed", f"{', '.join(failed)}."]
    return "\n\n".join(sections) + "\n"


def machine() -> list[str]:
    """The machine, and the versions of what runs on it."""
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


# The picture -----------------------------------------------------------------------------------------


def plot(comparisons: Sequence[Comparison], file: pathlib.Path) -> None:
    """Draws the median ratios of each workload as bars, with whiskers from the least to the greatest."""
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
        # Bars begin at the reference: to the left is faster, to the right slower.
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
    axes.set_xlim(min(ratios) / 1.25, max(ratios) * 1.25)  # Room for the numbers beside the bars.
    axes.xaxis.set_major_locator(FixedLocator([0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    figure.supxlabel("time over that of the reference in the same round (to the left: faster; blue: jaxloop)", size=9)
    figure.savefig(file, dpi=100)
    plt.close(figure)


def _is_peer(name: str) -> bool:
    return name.startswith(("hand-written", "clu", "Keras"))
