"""Starts jobs with several processes, and breaks them."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np

from jaxloop import checkpoint

JOB = pathlib.Path(__file__).parent / "job.py"
# The exit code that the launcher must have after each fault of job.py.
FAULTS = {
    "kill": 137,
    "stop": 134,  # From JAX in the other process, because this one never ends.
    "exit": (1, 134),  # The other process loses its peer, and its own error or JAX ends it.
    "data": 1,
    "action": 1,
    "never_joins": 134,
    "last_action": 1,
    "term": 143,
    "term_twice": 143,
    "last_term": 143,
    "interrupt": 0,
    "end": 0,
    "stop_loop": 0,
    "sys_exit": 7,
    "hang": 143,
    "hang_alone": 143,
}
# The additional seconds until a fault is noticed, if not at once.
NOTICED_AFTER = {"never_joins": 6, "hang": 15, "hang_alone": 15}
MAX_SECS = 15


def launch(*arguments, processes, devices=1):
    """Runs a job; returns the finished process, and the seconds that it took."""
    command = [sys.executable, "-m", "jaxloop.launch", f"--processes={processes}", f"--devices={devices}"]
    start = time.monotonic()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAXLOOP_")}
    job = subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True, timeout=180, env=environment)
    return job, time.monotonic() - start


def final_of(directory):
    """Returns the final state of a run of job.py."""
    with np.load(directory / "final.npz") as file:
        return {name: file[name] for name in file.files}


def break_and_resume(directory, fault, *, at=33, place=1, then=(2, 2)):
    """Breaks a run with two processes of two devices each, and resumes it in layout `then`; returns the problems."""
    job, _ = launch(JOB, directory, f"--fault={fault}", f"--at={at}", f"--in={place}", processes=2, devices=2)
    fired, output = directory / "fired", job.stdout + job.stderr
    if not fired.exists():
        return [f"the fault did not occur: {output}"]
    problems, secs = [], time.time() - fired.stat().st_mtime
    if secs > MAX_SECS + NOTICED_AFTER.get(fault, 0):
        problems.append(f"the job ended {secs:.1f} s after the fault")
    if job.returncode not in np.atleast_1d(FAULTS[fault]):
        problems.append(f"it ended with {job.returncode}: {output}")
    if fault in ("sys_exit", "data", "action") and f"Process {place} has failed" not in output:
        problems.append(f"the message names a different process: {output}")
    if "ended by SIGTERM" in output:  # The signal itself killed it, with the same exit code.
        problems.append(f"a process was killed before it had shut down: {output}")
    processes, devices = then
    job, _ = launch(JOB, directory, processes=processes, devices=devices)
    if job.returncode != 0:
        problems.append(f"the second start ended with {job.returncode}: {job.stdout + job.stderr}")
    return problems


def kill_transformer_and_resume(directory):
    """Kills one of two processes of the transformer example, and resumes it; returns the problems."""
    arguments = ["-m", "jaxloop.examples.transformer", f"--workdir={directory}", "--train_steps=12", "--write=0"]
    command = [sys.executable, "-m", "jaxloop.launch", "--processes=2", "--devices=2", *arguments]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + 100
    while not checkpoint.all_steps(directory / "checkpoints") and time.monotonic() < deadline and job.poll() is None:
        time.sleep(0.05)
    children = pathlib.Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    os.kill(int(children[1]), signal.SIGKILL)
    output, _ = job.communicate(timeout=60)
    saved = checkpoint.all_steps(directory / "checkpoints")
    if job.returncode != 137 or not saved or saved[-1] >= 12:
        return [f"it ended with {job.returncode} and checkpoints {saved}: {output}"]
    job, _ = launch(*arguments, processes=2, devices=2)
    saved = checkpoint.all_steps(directory / "checkpoints")
    if job.returncode == 0 and saved[-1] == 12:
        return []
    return [f"the resumed job ended with {job.returncode} and checkpoints {saved}: {job.stdout}"]
