"""Measures one part in its own process, so that no part inherits compiled programs, memory or threads of another.

`python -m benchmarks.part W0 results.json` writes the results. `measure` starts such a process and reads them.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile

from benchmarks import ensembles, gpu, lineup, moments, workloads
from benchmarks.rounds import Comparison, compare

MOMENTS, ENSEMBLES, GPU = "moments", "ensembles", "gpu"
NAMES = (*workloads.NAMES, MOMENTS, ENSEMBLES, GPU)

NUM_ROUNDS = {"W0": 12, "W1": 12, "W2": 8, "W3": 8, "W4": 8}


def measure(name: str, num_rounds: int | None, num_steps: int | None, num_devices: int = 8) -> list[Comparison]:
    """Measures a part in a new process.

    Args:
      name: One of `NAMES`.
      num_rounds: Timed rounds of a workload; None for enough to give stable medians.
      num_steps: Steps per round; None for the workload's default.
      num_devices: The number of virtual devices of W4.

    Raises:
      subprocess.CalledProcessError: The process failed. It printed the reason.
    """
    environment = dict(os.environ)
    if name != GPU:
        environment["JAX_PLATFORMS"] = "cpu"
    if name == "W4":
        # JAX reads both variables at startup. With fewer threads, several devices deadlock on few cores.
        environment["NPROC"] = "32"
        environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={num_devices}"
    with tempfile.TemporaryDirectory() as directory:
        results = pathlib.Path(directory) / "results.json"
        options = {"rounds": num_rounds, "steps": num_steps, "devices": num_devices}
        given = [f"--{option}={value}" for option, value in options.items() if value is not None]
        command = [sys.executable, "-m", "benchmarks.part", name, str(results), *given]
        subprocess.run(command, env=environment, check=True)
        return [Comparison(**fields) for fields in json.loads(results.read_text())]


def measure_here(name: str, num_rounds: int | None, num_steps: int | None, num_devices: int) -> list[Comparison]:
    """Measures a part in this process."""
    if name == GPU:
        return gpu.compare_all()
    if name == MOMENTS:
        return [moment() for moment in moments.MOMENTS.values()]
    if name == ENSEMBLES:
        return [ensembles.compare_members(each) for each in ensembles.NUM_STEPS]
    workload = workloads.workload(name, num_devices)
    return [compare(workload, lineup.contestants_for(workload), num_rounds or NUM_ROUNDS[name], num_steps)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("results", type=pathlib.Path)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--devices", type=int, default=8)
    options = parser.parse_args()
    comparisons = measure_here(options.name, options.rounds, options.steps, options.devices)
    options.results.write_text(json.dumps([dataclasses.asdict(each) for each in comparisons]))


if __name__ == "__main__":
    main()
