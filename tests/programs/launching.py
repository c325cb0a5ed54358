"""Starts jobs with several processes, and breaks them."""

import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time

import numpy as np

from jaxloop import checkpoint, distributed

TESTS = str(pathlib.Path(__file__).parents[1])  # Where a job finds the modules of `programs`.
JOB = pathlib.Path(__file__).parent / "job.py"
TRANSFORMER = pathlib.Path(__file__).parents[2] / "docs" / "examples" / "transformer.py"
# The exit code that the job must have after each fault of job.py.
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
    "term_data": 143,
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


class Job:
    """Several processes on this machine, which run the same program.

    Attributes:
      processes: The processes, which form a process group of their own.
      returncode: The exit code of the process that failed first; 0 if none failed.
      first: The number of that process.
      stdout: The output of all processes, one after the other. Each line begins with the number of its process.
    """

    def __init__(self, *arguments, processes, devices=1):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        environment = {distributed.COORDINATOR: address, distributed.NUM_PROCESSES: str(processes), "NPROC": "32"}
        environment |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
        environment["PYTHONPATH"] = os.pathsep.join([TESTS, *filter(None, [os.environ.get("PYTHONPATH")])])
        command, group = [sys.executable, "-u", *map(str, arguments)], 0
        self.processes, self._outputs = [], []
        for place in range(processes):
            output = tempfile.TemporaryFile("w+")  # noqa: SIM115
            env = {**os.environ, **environment, distributed.PROCESS_ID: str(place)}
            process = subprocess.Popen(command, env=env, stdout=output, stderr=output, process_group=group)
            group = group or process.pid
            self.processes.append(process)
            self._outputs.append(output)

    def wait(self, timeout=180, grace=3):
        """Waits for all processes. They are killed `grace` seconds after one of them has failed."""
        ended, killed, deadline = {}, set(), time.monotonic() + timeout
        while len(ended) < len(self.processes):
            time.sleep(0.02)
            now = time.monotonic()
            new = {place: now for place, each in enumerate(self.processes) if each.poll() is not None} | ended
            if any(self.processes[place].returncode for place in new.keys() - ended.keys()):
                deadline = min(deadline, now + grace)
            ended = new
            if now > deadline:
                killed = set(range(len(self.processes))) - ended.keys()
                os.killpg(self.processes[0].pid, signal.SIGKILL)
                deadline = float("inf")
        followers = (distributed.EXIT_CODE_OF_FOLLOWER, -signal.SIGABRT)
        order = lambda place: (place in killed, self.processes[place].returncode in followers, ended[place])
        self.first = min((place for place in ended if self.processes[place].returncode), key=order, default=0)
        code = self.processes[self.first].returncode
        self.returncode = code if code >= 0 else 128 - code
        lines = []
        for place, output in enumerate(self._outputs):
            output.seek(0)
            lines += [f"[{place}] {line}\n" for line in output.read().splitlines()]
            output.close()
        self.stdout = "".join(lines)
        return self


def launch(*arguments, processes, devices=1):
    """Runs a job; returns the finished job, and the seconds that it took."""
    start = time.monotonic()
    return Job(*arguments, processes=processes, devices=devices).wait(), time.monotonic() - start


def output_of(*arguments, processes, devices=1):
    """Runs a job that must succeed; returns its output."""
    job, _ = launch(*arguments, processes=processes, devices=devices)
    assert job.returncode == 0, job.stdout
    return job.stdout


def final_of(directory):
    """Returns the final state of a run of job.py."""
    with np.load(directory / "final.npz") as file:
        return {name: file[name] for name in file.files}


def break_and_resume(directory, fault, *, at=33, place=1, then=(2, 2)):
    """Breaks a run with two processes of two devices each, and resumes it in layout `then`; returns the problems."""
    job, _ = launch(JOB, directory, f"--fault={fault}", f"--at={at}", f"--in={place}", processes=2, devices=2)
    fired, output = directory / "fired", job.stdout
    if not fired.exists():
        return [f"the fault did not occur: {output}"]
    problems, secs = [], time.time() - fired.stat().st_mtime
    if secs > MAX_SECS + NOTICED_AFTER.get(fault, 0):
        problems.append(f"the job ended {secs:.1f} s after the fault")
    if job.returncode not in np.atleast_1d(FAULTS[fault]):
        problems.append(f"it ended with {job.returncode}: {output}")
    if fault in ("sys_exit", "data", "action") and job.first != place:
        problems.append(f"a different process failed first: {output}")
    if any(
        each.returncode == -signal.SIGTERM for each in job.processes
    ):  # The signal itself killed it, with the same exit code.
        problems.append(f"a process was killed before it had shut down: {output}")
    processes, devices = then
    job, _ = launch(JOB, directory, processes=processes, devices=devices)
    if job.returncode != 0:
        problems.append(f"the second start ended with {job.returncode}: {job.stdout}")
    return problems


def kill_transformer_and_resume(directory):
    """Kills one of two processes of the transformer example, and resumes it; returns the problems."""
    arguments = [TRANSFORMER, f"--workdir={directory}", "--train_steps=12", "--write=0"]
    job = Job(*arguments, processes=2, devices=2)
    deadline = time.monotonic() + 100
    while not checkpoint.all_steps(directory / "checkpoints") and time.monotonic() < deadline:
        time.sleep(0.05)
    job.processes[1].kill()
    job.wait(60)
    saved = checkpoint.all_steps(directory / "checkpoints")
    if job.returncode != 137 or not saved or saved[-1] >= 12:
        return [f"it ended with {job.returncode} and checkpoints {saved}: {job.stdout}"]
    job, _ = launch(*arguments, processes=2, devices=2)
    saved = checkpoint.all_steps(directory / "checkpoints")
    if job.returncode == 0 and saved[-1] == 12:
        return []
    return [f"the resumed job ended with {job.returncode} and checkpoints {saved}: {job.stdout}"]
