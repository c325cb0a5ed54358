"""Runs that get stuck, and the signals that must end them: `stubborn.py DIRECTORY KIND`."""

import contextlib
import ctypes
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
import types

KINDS = ["writer", "iterator", "native", "workers"]
MAX_SECS = 30  # Slack for a busy machine.


def print_word(word):
    os.write(1, f"{word}\n".encode())


def write_or_block(step, scalars):
    """Accepts some rows, then blocks forever."""
    if step == 15:
        print_word("ready")
        threading.Event().wait()


def stubborn(batches, kind):
    """Yields batches; blocks at the 15th, in a way that depends on the kind."""
    for number in range(1000):
        if number == 14 and kind != "writer":
            print_word("ready")
            if kind == "native":  # No signal interrupts this, and no Python handler can run.
                mutex, libc = ctypes.create_string_buffer(256), ctypes.CDLL(None)
                libc.pthread_mutex_lock(mutex)
                libc.pthread_mutex_lock(mutex)
            while True:
                try:
                    time.sleep(1000)
                except KeyboardInterrupt:
                    if kind != "iterator":
                        raise
        yield batches[number % len(batches)]


def grain_workers():
    """Starts two Grain worker processes; returns the iterator that keeps them alive."""
    import grain
    from absl import flags

    flags.FLAGS(["grain"])
    dataset = grain.MapDataset.range(1000).repeat().to_iter_dataset()
    iterator = iter(dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=2)))
    next(iterator)
    return iterator


def main(directory, kind):
    import jaxloop
    from jaxloop import every, examples

    workers = grain_workers() if kind == "workers" else None
    step, state, batches = examples.tiny_regression()
    saves = jaxloop.CheckpointAction(directory, every(steps=5))
    writer = types.SimpleNamespace(write_scalars=write_or_block, flush=lambda: None)
    summaries = jaxloop.SummaryAction(writer, every(steps=1))
    actions = [saves, summaries] if kind == "writer" else [saves]
    outer_loop = jaxloop.OuterLoop(jaxloop.TrainLoop(step, end_actions=actions))
    outer_loop(state, jaxloop.skippable(lambda: stubborn(batches, kind)), 1000)
    del workers


class Stubborn:
    """A run in a separate process, which will get stuck."""

    def __init__(self, directory, kind):
        self.directory, self.kind = pathlib.Path(directory), kind
        command = [sys.executable, __file__, str(directory), kind]
        self._errors = open(f"{directory}.txt", "w+")  # noqa: SIM115
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._errors, text=True)

    def wait_until_stuck(self):
        return self._process.stdout.readline() == "ready\n"

    def problems(self, signums, pause=0.3):
        """Sends signals; returns what is wrong with how the run ends."""
        with self._errors, self._process.stdout:
            return self._problems(signums, pause)

    def _problems(self, signums, pause):
        from jaxloop import checkpoint
        from jaxloop.checkpoint import seal

        if not self.wait_until_stuck():
            self._errors.seek(0)
            return [f"it did not start: {self._errors.read()}"]
        children = [int(pid) for pid in self._children().split()]
        for signum in signums:
            time.sleep(pause)  # Far enough apart to count as two signals.
            self._process.send_signal(signum)
        problems, began = [], time.monotonic()
        try:
            code = self._process.wait(MAX_SECS)
        except subprocess.TimeoutExpired:
            problems.append(f"it is still alive {MAX_SECS} s after {len(signums)} signals")
            self._process.kill()
            self._process.wait()
            code = None
        if code not in (None, 128 + signums[-1], -signums[-1]):
            problems.append(f"it ended with {code} after {time.monotonic() - began:.1f} s")
        deadline = time.monotonic() + MAX_SECS
        while (left := [pid for pid in children if is_alive(pid)]) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid in left:
            problems.append(f"its worker {pid} is still alive")
            os.kill(pid, signal.SIGKILL)
        if not checkpoint.all_steps(self.directory):
            problems.append("it has no checkpoint")
        for step in checkpoint.all_steps(self.directory):
            problems += seal.problems(self.directory / str(step))
        return problems

    def _children(self):
        found = []
        for path in pathlib.Path(f"/proc/{self._process.pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # The thread may have ended in the meantime.
                found.append(path.read_text())
        return " ".join(found)


def is_alive(pid):
    """Returns True if a process exists and is not a zombie."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main(*sys.argv[1:])
