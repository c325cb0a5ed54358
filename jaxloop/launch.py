"""Starts the processes of a job on one machine: `python -m jaxloop.launch --processes 2 --devices 2 driver.py ...`.

Each has so many devices of the CPU; without `--devices` those that JAX finds. What they print comes line by line, with
the number of the process before it. Where one fails, it is said which was the first, the others are killed after three
seconds, and the exit code is that of the first. Ctrl-C and SIGTERM go to all.
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

from jaxloop import distributed

# So long the others may take to end by themselves, once one has failed.
_GRACE_SECS = 3.0
_POLL_SECS = 0.05


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a job to its end; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m jaxloop.launch", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--processes", type=int, required=True, help="how many processes")
    parser.add_argument("--devices", type=int, help="devices of the CPU for each process")
    parser.add_argument("-m", dest="module", action="store_true", help="the program is a module, as for python -m")
    parser.add_argument("program", help="a file, or a module with -m")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="those of the program")
    options = parser.parse_args(arguments)
    if options.processes < 1 or (options.devices is not None and options.devices < 1):
        parser.error("--processes and --devices are positive numbers")
    command = [sys.executable, "-u", *(["-m"] if options.module else []), options.program, *options.arguments]
    address = f"127.0.0.1:{_free_port()}"
    processes = [
        _Process(command, _environment(address, options.processes, place, options.devices), place)
        for place in range(options.processes)
    ]
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda signum, frame: [each.send(signum) for each in processes])
    return _wait_for(processes)


class _Process:
    """A process of the job, whose output is passed on."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], place: int):
        self.place = place
        # In a session of its own, for Ctrl-C to come from the launcher alone.
        self._process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
        self.code: int | None = None  # Negative for a signal; None as long as it ran when it was looked at.
        self.ended_at: float | None = None
        self._printer = threading.Thread(target=self._print_lines, daemon=True)
        self._printer.start()

    def look(self, now: float) -> None:
        """Finds out whether it has ended."""
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

    def kill(self) -> None:
        """Kills it and all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _print_lines(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(OSError):  # Nobody reads it any more; it is read here, for the process to go on.
                sys.stdout.write(f"[{self.place}] {line.decode(errors='replace')}")
                sys.stdout.flush()

    def finish(self) -> None:
        """Waits until all that it has printed was passed on; not for what it has started, and left behind."""
        self._printer.join(timeout=_POLL_SECS * 20)


def _wait_for(processes: Sequence[_Process]) -> int:
    deadline, killed = float("inf"), []
    while any(each.is_running for each in processes):
        time.sleep(_POLL_SECS)
        now = time.monotonic()
        for each in processes:
            each.look(now)
        if deadline == float("inf") and any(each.has_failed for each in processes):
            deadline = now + _GRACE_SECS
        if now > deadline and not killed:
            killed = [each for each in processes if each.is_running]
            for each in killed:
                each.kill()
    for each in processes:
        each.finish()
    failed = sorted((each for each in processes if each.code), key=lambda each: (each in killed, *_rank(each)))
    for number, each in enumerate(failed):
        if each in killed:
            _say(f"Process {each.place} was still there {_GRACE_SECS:.0f} s later, hanging perhaps, and was killed.")
        else:
            has_failed = "has ended too" if number else "has failed"
            _say(f"Process {each.place} {has_failed}: {_in_words(each.code)}.")
    for each in processes if failed else ():
        if not each.code:
            _say(f"Process {each.place} had ended well.")
    code = (failed[0].code or 0) if failed else 0
    return code if code >= 0 else 128 - code


def _rank(process: _Process) -> tuple[object, ...]:
    """The lower, the more its end says about why the job has failed."""
    code = process.code or 0
    is_follower = code in (distributed.EXIT_CODE_OF_FOLLOWER, -signal.SIGABRT)
    # Of two seen to have ended at once, one by a signal and one by itself, the latter may have lost the former.
    return is_follower, process.ended_at, code > 0


def _environment(address: str, num_processes: int, place: int, devices: int | None) -> dict[str, str]:
    environment = {
        **os.environ,
        distributed.COORDINATOR: address,
        distributed.NUM_PROCESSES: str(num_processes),
        distributed.PROCESS_ID: str(place),
    }
    if devices is not None:
        # With few threads, several devices on few cores wait for each other for ever.
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
