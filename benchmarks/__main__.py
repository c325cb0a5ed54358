"""Runs the benchmarks, prints tables and writes the report; see `python -m benchmarks --help`."""

import argparse
import pathlib
import shlex
import subprocess
import sys

from benchmarks import part, report
from benchmarks.contestants import SCAN_LENGTH, TimedPasses

MULTIPLE = SCAN_LENGTH * TimedPasses.num_passes


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Runs the benchmarks of jaxloop.")
    parser.add_argument(
        "--workloads", default=",".join(part.NAMES), help="comma-separated parts to run (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, help="timed rounds per workload")
    parser.add_argument("--steps", type=int, help=f"steps per round, a multiple of {MULTIPLE}")
    parser.add_argument("--devices", default="8", help="virtual devices of W4, such as 8 or 2,4,8")
    parser.add_argument("--output", type=pathlib.Path, help="the Markdown file to write, such as BENCHMARKS.md")
    options = parser.parse_args()
    names = options.workloads.split(",")
    if unknown := set(names) - set(part.NAMES):
        parser.error(f"unknown parts {', '.join(sorted(unknown))}; choose from {', '.join(part.NAMES)}")
    if options.steps is not None and (options.steps <= 0 or options.steps % MULTIPLE):
        parser.error(f"--steps must be a multiple of {MULTIPLE}, got {options.steps}")

    comparisons, failed = [], []
    for name in names:
        for devices in map(int, options.devices.split(",") if name == "W4" else ["8"]):
            print(f"{name} ...", file=sys.stderr, flush=True)
            try:
                measured = part.measure(name, options.rounds, options.steps, devices)
            except subprocess.CalledProcessError:
                failed.append(name)  # It printed the reason.
                continue
            if devices != 8:
                measured[0].name = f"{name} on {devices} devices"
            if name == part.GPU and not measured:
                print("The GPU part was not run: JAX found no GPU.\n")
            for comparison in measured:
                print(report.text_table(comparison), flush=True)
            comparisons += measured
    if options.output is not None:
        plot = pathlib.Path(__file__).parent / "benchmarks.png"
        command = shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]])
        gpu_requested = part.GPU in names
        text = report.markdown(comparisons, command, plot, options.output, failed, gpu_requested)
        report.plot(comparisons, plot)  # After `markdown`, so that the new image doesn't mark the commit as dirty.
        options.output.write_text(text)
    if failed:
        print(f"Failed: {', '.join(failed)}.", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
