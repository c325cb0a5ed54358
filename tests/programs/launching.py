"""Starts jobs of several processes, and breaks them."""

import os
import pathlib
import subprocess
import sys
import time

import numpy as np

JOB = pathlib.Path(__file__).parent / "job.py"
# By their names in job.py: how the launcher must end, as of what the fault is in the process where it comes.
FAULTS = {
    "kill": 137,
    "stop": 134,  # By JAX, in the other process: this one never ends.
    "exit": 134,
    "data": 1,
    "action": 1,
    "never_joins": 134,
    "term": 143,
    "interrupt": 0,
    "end": 0,
    "stop_loop": 0,
}
MOST_SECS = 15


def launch(*arguments, processes, devices=1):
    """Runs a job; returns it, and how many seconds it took."""
    command = [sys.executable, "-m", "jaxloop.launch", f"--processes={processes}", f"--devices={devices}"]
    start = time.monotonic()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAXLOOP_")}
    job = subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True, timeout=180, env=environment)
    return job, time.monotonic() - start


def final_of(directory):
    """The state that a run of job.py came to."""
    with np.load(directory / "final.npz") as file:
        return {name: file[name] for name in file.files}


def break_and_go_on(directory, fault, *, at=33, place=1, then=(2, 2)):
    """Breaks a run of two processes by two devices, and starts it again in some layout; returns what was wrong."""
    job, _ = launch(JOB, directory, f"--fault={fault}", f"--at={at}", f"--in={place}", processes=2, devices=2)
    fired, output = directory / "fired", job.stdout + job.stderr
    if not fired.exists():
        return [f"the fault did not come: {output}"]
    problems, secs = [], time.time() - fired.stat().st_mtime
    # Of those that never join, the others wait six seconds from their own start on.
    if secs > MOST_SECS + (6 if fault == "never_joins" else 0):
        problems.append(f"the job ended {secs:.1f} s after the fault")
    if job.returncode != FAULTS[fault]:
        problems.append(f"it ended with {job.returncode}: {output}")
    processes, devices = then
    job, _ = launch(JOB, directory, processes=processes, devices=devices)
    if job.returncode != 0:
        problems.append(f"the second start ended with {job.returncode}: {job.stdout + job.stderr}")
    return problems
