"""Kills launchers whose processes have started child processes."""

import pathlib
import signal
import subprocess
import sys
import time

from programs.stubborn import is_alive

# Each process starts a child. Process 1 and its child ignore SIGTERM.
PROGRAM = """
import os, pathlib, signal, subprocess, sys, time
directory, place = sys.argv[1], os.environ["JAXLOOP_PROCESS_ID"]
if place == "1":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(1000)"])
file = pathlib.Path(directory, place)
file.with_suffix(".new").write_text(f"{os.getpid()} {child.pid}")
file.with_suffix(".new").rename(file)
time.sleep(1000)
"""
MAX_SECS = 30


def problems_of_killing(directory, signum, signal_secs=1):
    """Ends a launcher with a signal; returns the problems, such as processes that are still alive."""
    directory = pathlib.Path(directory)
    directory.mkdir()
    (directory / "program.py").write_text(PROGRAM)
    options = ["--processes=2", f"--signal-secs={signal_secs}", directory / "program.py", directory]
    command = [sys.executable, "-m", "jaxloop.launch", *options]
    # Under `nohup`, the launcher would inherit that SIGHUP is ignored.
    restore_sighup = (
        "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    )
    job = subprocess.Popen([sys.executable, "-c", restore_sighup, *command], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    files = [directory / "0", directory / "1"]
    while not all(file.exists() for file in files):
        if time.monotonic() > deadline:
            job.kill()
            return ["the processes did not start"]
        time.sleep(0.01)
    pids = [int(pid) for file in files for pid in file.read_text().split()]
    job.send_signal(signum)
    problems, deadline = [], time.monotonic() + MAX_SECS
    code = job.wait(MAX_SECS)
    if code != (-signum if signum == signal.SIGKILL else 143):
        problems.append(f"the launcher ended with {code}")
    while (left := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in left:
        problems.append(f"process {pids.index(pid)} is still alive after {MAX_SECS} s")
        subprocess.run(["kill", "-KILL", str(pid)], check=False)
    return problems
