"""Starts the processes of a job on one machine: `python -m jaxloop.launch --processes 2 --devices 2 driver.py ...`.

`--devices` sets the number of CPU devices of each process; without it, each process uses the devices that JAX finds.
The launcher prints the output of the processes line by line, prefixed with the process number. If a process fails, the
launcher reports the failure, kills the other processes three seconds later, and exits with the code of the first
process that failed. It forwards Ctrl-C and SIGTERM to all processes. SIGHUP, which is sent when a terminal closes, is
forwarded as SIGTERM. Processes that are still running 15 seconds after the first signal (`--signal-secs`) are killed. A
process is killed together with everything it started. If the launcher itself is killed, all processes are killed too.
"""

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from jaxloop import distributed

# After a process has failed, the others have this many seconds to end on their own.
_GRACE_SECS = 3.0
_POLL_SECS = 0.05
# Ends the processes if the launcher is killed. It reads the IDs of their process groups, one per line.
_GUARD = """
import os, signal, sys, time
for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(signum, signal.SIG_IGN)
lines = sys.stdin.read().split()
groups = [] if "done" in lines else [int(line) for line in lines]
deadline = time.monotonic() + float(sys.argv[1])
for signum in (signal.SIGTERM, signal.SIGKILL):
    for group in list(groups):
        try:
            os.killpg(group, signum)
        except OSError:
            groups.remove(group)
    while groups and time.monotonic() < deadline:
        time.sleep(0.05)
        for group in list(groups):
            try:
                os.killpg(group, 0)
            except OSError:
                groups.remove(group)
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a job to completion, and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m jaxloop.launch", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--processes", type=int, required=True, help="the number of processes")
    parser.add_argument("--devices", type=int, help="the number of CPU devices of each process")
    parser.add_argument(
        "--signal-secs", type=float, default=15.0, help="seconds after a signal until processes are killed (15)"
    )
    parser.add_argument("-m", dest="module", action="store_true", help="the program is a module, as for python -m")
    parser.add_argument("program", help="a file, or a module with -m")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="those of the program")
    options = parser.parse_args(arguments)
    if options.processes < 1 or (options.devices is not None and options.devices < 1):
        parser.error("--processes and --devices are positive numbers")
    command = [sys.executable, "-u", *(["-m"] if options.module else []), options.program, *options.arguments]
    address = f"127.0.0.1:{_free_port()}"
    job = _Job(options.signal_secs)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signum != signal.SIGHUP or signal.getsignal(signum) is signal.SIG_DFL:  # `nohup` ignores SIGHUP.
            signal.signal(signum, job.on_signal)
    for place in range(options.processes):
        job.start(command, _environment(address, options.processes, place, options.devices), place)
    return job.wait()


class _Job:
    """The processes of a job."""

    def __init__(self, signal_secs: float):
        self._signal_secs = signal_secs
        self._processes: list[_Process] = []
        self._signum: int | None = None  # The first signal.
        self._deadline = float("inf")
        # In its own session, so that killing the launcher's group doesn't kill the guard.
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _GUARD, str(signal_secs)], stdin=subprocess.PIPE, start_new_session=True
        )

    def on_signal(self, signum: int, frame: Any) -> None:
        passed_on = signal.SIGTERM if signum == signal.SIGHUP else signum
        if self._signum is None:
            self._signum, self._deadline = passed_on, time.monotonic() + self._signal_secs
        for each in self._processes:
            each.send(passed_on)

    def start(self, command: Sequence[str], environment: dict[str, str], place: int) -> None:
        process = _Process(command, environment, place)
        self._processes.append(process)
        self._tell_guard(str(process.group))
        if self._signum is not None:  # The signal came while this process was starting.
            process.send(self._signum)

    def _tell_guard(self, line: str) -> None:
        assert self._guard.stdin is not None
        with contextlib.suppress(OSError):  # The guard was killed.
            self._guard.stdin.write(f"{line}\n".encode())
            self._guard.stdin.flush()

    def wait(self) -> int:
        """Waits for all processes, and returns the exit code of the job."""
        processes, killed = self._processes, []
        while any(each.is_running for each in processes):
            time.sleep(_POLL_SECS)
            now = time.monotonic()
            for each in processes:
                each.look(now)
            if any(each.has_failed for each in processes):
                self._deadline = min(self._deadline, now + _GRACE_SECS)
            if now > self._deadline and not killed:
                killed = [each for each in processes if each.is_running]
                for each in killed:
                    each.kill()
        code = _report(processes, killed, self._signum, self._signal_secs)
        if code or self._signum is not None:
            for each in processes:
                each.kill()  # Kills everything that it started and left behind.
        for each in processes:
            each.finish()
        self._tell_guard("done")
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._guard.wait()
        return code


class _Process:
    """A process of the job, whose output is printed with a prefix."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], place: int):
        self.place = place
        # In its own session, so that only the launcher forwards Ctrl-C.
        self._process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
        self.code: int | None = None  # Negative if a signal ended it; None while it runs.
        self.ended_at: float | None = None
        self._printer = threading.Thread(target=self._print_lines, daemon=True)
        self._printer.start()

    def look(self, now: float) -> None:
        """Checks whether the process has ended."""
        if self.is_running and (code := self._process.poll()) is not None:
            self.code, self.ended_at = code, now

    @property
    def is_running(self) -> bool:
        return self.code is None

    @property
    def has_failed(self) -> bool:
        return bool(self.code)

    def send(self, signum: int) -> None:
        if self.is_running:
            self._process.send_signal(signum)

    @property
    def group(self) -> int:
        """The ID of the process group, which contains everything that the process starts."""
        return self._process.pid

    def kill(self) -> None:
        """Kills the process and everything it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.group, signal.SIGKILL)

    def _print_lines(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(OSError):  # Nobody is reading the output, but the process must not block.
                sys.stdout.write(f"[{self.place}] {line.decode(errors='replace')}")
                sys.stdout.flush()

    def finish(self) -> None:
        """Waits until all output of the process has been printed, but not for processes that it left behind."""
        self._printer.join(timeout=_POLL_SECS * 20)


def _report(
    processes: "Sequence[_Process]", killed: "Sequence[_Process]", signum: int | None, signal_secs: float
) -> int:
    """Prints how the processes failed, and returns the exit code of the first one that failed."""
    failed = sorted((each for each in processes if each.code), key=lambda each: (each in killed, *_rank(each)))
    hangs = bool(failed) and failed[0] in killed  # No process failed on its own.
    since = f"{_GRACE_SECS:.0f} s later" if not hangs else f"{signal_secs:g} s after {signal.Signals(signum or 0).name}"
    for number, each in enumerate(failed):
        if each in killed:
            _say(f"Process {each.place} was still running {since} and was killed; it may have been hanging.")
        else:
            is_asked = signum is not None and each.code == 128 + signum
            has_failed = "stopped" if is_asked else "has ended too" if number else "has failed"
            _say(f"Process {each.place} {has_failed}: {_in_words(each.code)}.")
    for each in processes if failed else ():
        if not each.code:
            _say(f"Process {each.place} ended without an error.")
    if hangs:
        return 128 + (signum or 0)
    code = (failed[0].code or 0) if failed else 0
    return code if code >= 0 else 128 - code


def _rank(process: _Process) -> tuple[object, ...]:
    """Returns a sort key. A process with a lower key is more likely to have caused the job's failure."""
    code = process.code or 0
    is_follower = code in (distributed.EXIT_CODE_OF_FOLLOWER, -signal.SIGABRT)
    # If one process was ended by a signal and another failed with an error between two polls, the error may only report
    # the loss of the first one.
    is_signal = code < 0 or code == 128 + signal.SIGTERM
    return is_follower, process.ended_at, not is_signal


def _environment(address: str, num_processes: int, place: int, devices: int | None) -> dict[str, str]:
    environment = {
        **os.environ,
        distributed.COORDINATOR: address,
        distributed.NUM_PROCESSES: str(num_processes),
        distributed.PROCESS_ID: str(place),
    }
    if devices is not None:
        # With too few threads, several devices on few cores deadlock.
        environment |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
        environment.setdefault("NPROC", "32")
    return environment


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _in_words(code: int | None) -> str:
    if code is not None and code < 0:
        return f"ended by {signal.Signals(-code).name}"
    return f"exit code {code}"


def _say(text: str) -> None:
    print(f"jaxloop.launch: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
