"""A watchdog that ends a hung run and reports which process is stuck and where."""

import collections
import contextlib
import dataclasses
import faulthandler
import functools
import itertools
import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import Any, final

from absl import logging
from etils import epath

from jaxloop import distributed, metrics
from jaxloop.base import files, timing
from jaxloop.base.text import printable
from jaxloop.distributed import agreement
from jaxloop.engine.agenda import Item
from jaxloop.engine.engine import Engine
from jaxloop.outer_loop.extension import Experiment, Extension
from jaxloop.runs.failures import FOLDER
from jaxloop.schedules import Elapsed

EXIT_CODE = 75
"""The exit code of a process that the watchdog ends: `EX_TEMPFAIL`, so that a scheduler restarts the process."""

_COLLECT_SECS = 3.0  # The maximum time that the first process waits for the reports of the others.
_LAST_SECS = 1.5  # The processes may notice the hang one second apart.
_MAX_REPORT_BYTES = 1 << 20
_WAITING_FOR_PROCESSES = {
    each.__code__ for each in (agreement._send_message, agreement._Messages.read, agreement.wait_for_all)
}


@final
@dataclasses.dataclass(eq=False)
class Watchdog(Extension):
    """Detects when a run makes no progress for too long, reports where the run hangs, and ends the run.

    If a run hangs, each of its processes writes `<workdir>/failures/hang-<step>/process-<n>.txt`, which describes what
    the process is doing and contains the stacks of all threads. The first process logs a one-line summary, such as
    "process 1 is waiting for data after step 5,112, in Images.__getitem__; process 0 is waiting for the other
    processes". All processes exit with code 75, so that a scheduler can restart them. The run then resumes from its
    newest checkpoint. A separate thread checks for progress about once per second, so the steps aren't slowed down.

    >>> import jaxloop
    >>> from jaxloop import examples
    >>> step, state, batches = examples.tiny_regression()
    >>> outer_loop = jaxloop.OuterLoop(jaxloop.TrainLoop(step), extensions=[Watchdog(step_secs=60)])
    >>> state, _ = outer_loop(state, batches)

    Args:
      step_secs: The maximum time, in seconds, that may pass until the next train step is dispatched or completed.
      startup_secs: The limit, in seconds, that applies instead of `step_secs` until the first step of an `OuterLoop`
        call has been completed, and again whenever `run` is recompiled, until the next step has been completed. Waiting
        for processes that are still compiling counts toward this limit.
      eval_secs: The maximum time, in seconds, between two batches of an evaluation. Compilation counts toward this
        limit.
      checkpoint_secs: The maximum time, in seconds, for which saving or restoring a checkpoint may block the run.
    """

    step_secs: float = 600.0
    startup_secs: float = 3600.0
    eval_secs: float = 3600.0
    checkpoint_secs: float = 3600.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ValueError(f"Watchdog.{field.name} must be a positive number of seconds, got {value!r}.")
        self._threads: list[_Watching] = []

    def begin(self, experiment: Experiment) -> Sequence[Item]:
        self._threads.append(_Watching(self, experiment))
        self._threads[-1].start()
        return ()

    def end(self, now: Elapsed, reason: str, error: BaseException | None) -> None:
        thread = self._threads.pop()  # Of the innermost run.
        thread.over.set()
        if thread.is_ending:  # It ends the process; any error in this thread is a consequence of that.
            thread.join()


@final
class _Watching(threading.Thread):
    """The background thread of a `Watchdog`. It watches the thread in which this object was created."""

    def __init__(self, limits: Watchdog, experiment: Experiment):
        super().__init__(name="jaxloop-watchdog", daemon=True)
        self._limits, self._experiment = limits, experiment
        self._engines = [loop.engine for loop in experiment.loops]  # The first one trains, if any does.
        self._watched = threading.get_ident()
        self._steps_before = self._steps()
        self.over = threading.Event()
        self.is_ending: bool = False

    def run(self) -> None:
        seen, since = None, time.monotonic()
        pause = min(1.0, *(limit / 10 for limit in dataclasses.astuple(self._limits)))
        while not self.over.wait(pause):
            now, activity = time.monotonic(), self._activity()
            if activity != seen:
                seen, since = activity, now
            elif now - since > activity[0] and not self.over.is_set():
                self._end(now - since)

    def _activity(self) -> tuple[Any, ...]:
        """Returns a tuple that changes whenever the run makes progress.

        The first element is the maximum time, in seconds, that the current kind of work may take without progress.

        The host may be many steps ahead of the devices, so a step counts as progress both when it is dispatched and
        when it is completed.
        """
        kind = self._engines[0].run.stopwatch.kind
        return self._limit(kind), kind, *map(_counts, self._engines)

    def _steps(self) -> int:
        """Returns the number of train steps that this process has completed."""
        train = self._engines[0]
        return train.run.stopwatch.steps + train.step_num - train.run.now.steps

    def _limit(self, kind: str | None) -> float:
        match kind:
            case "evals":
                return self._limits.eval_secs
            case "checkpoints" | "restores":
                return self._limits.checkpoint_secs
            case "compiling":
                return self._limits.startup_secs
        has_run = self._steps() > self._steps_before and metrics.is_ready(self._engines[0].run.stopwatch.first_step)
        return self._limits.step_secs if has_run else self._limits.startup_secs

    def _end(self, secs: float) -> None:
        """Reports that the run has made no progress for `secs` seconds, and ends the process."""
        self.is_ending = True
        step = self._engines[0].step_num
        place = self._place(step)
        number, is_first = distributed.place()[0], distributed.is_first_process()
        path, said, is_shared = None, place, self._engines[0].job.is_shared
        with contextlib.suppress(Exception):
            path = self._write(number, step, place, secs)
        if is_first:
            if is_shared and path is not None:
                said = self._collect(path.parent, number, place)
            stacks = "" if path is None else f" The stacks are in {path.parent}."
            logging.error("Nothing happened for %.0f s: %s.%s Exiting with code %d.", secs, said, stacks, EXIT_CODE)
            self._tell_extensions(step, f"hang: {said}")
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
        if is_shared:  # Some launchers end the job when one process exits. If the first one exits, the others abort.
            time.sleep(_COLLECT_SECS + (_LAST_SECS if is_first else 0.0))
        os._exit(EXIT_CODE)

    def _place(self, step: int) -> str:
        """Describes the watched thread's work, as in "waiting for data after step 5,112, in Images.__getitem__"."""
        threads = sys._current_frames()
        frames = [frame for frame, _ in traceback.walk_stack(threads.pop(self._watched, None))]
        if any(frame.f_code in _WAITING_FOR_PROCESSES for frame in frames):
            return "waiting for the other processes"
        kind = self._engines[0].run.stopwatch.kind
        place = f"{timing.NAMES[kind] if kind else 'between two loops'} after step {step:,}"
        others = [frame.f_code.co_filename for top in threads.values() for frame, _ in traceback.walk_stack(top)]
        if kind == "checkpoints" and any("multihost" in name for name in others):  # At an Orbax barrier.
            return f"{place}, waiting for the other processes"
        called = list(itertools.takewhile(lambda frame: not _is_in("jaxloop", frame), frames))
        if not called or _is_in("jax", called[-1]) or _is_in("orbax", called[-1]):
            return place
        return f"{place}, in {called[-1].f_code.co_qualname.rpartition('<locals>.')[2]}"

    def _tell_extensions(self, step: int, reason: str) -> None:
        """Notifies the other extensions that the run has ended. Uses a thread, because an extension may also hang."""
        now = dataclasses.replace(self._engines[0].run.now, steps=step)
        end = functools.partial(self._experiment.extensions.end, now, reason, None, but=self._limits)
        thread = threading.Thread(target=end, daemon=True)
        thread.start()
        thread.join(_COLLECT_SECS)

    def _write(self, number: int, step: int, place: str, secs: float) -> epath.Path | None:
        if self._experiment.reports_dir is None:
            return None
        folder = self._experiment.reports_dir / FOLDER / f"hang-{step}"
        files.make_directory(folder.parent)
        files.make_directory(folder)
        path = folder / f"process-{number}.txt"
        with files.open_file(path, "w") as file:
            file.write(f"{place}\nNothing happened for {secs:.0f} s, after step {step}.\n\n")
            file.flush()
            faulthandler.dump_traceback(file)
        return path

    def _collect(self, folder: epath.Path, number: int, place: str) -> str:
        """Waits up to a few seconds for other processes' reports. Returns a sentence on what each process is doing."""
        count, places, deadline = distributed.place()[1], {number: place}, time.monotonic() + _COLLECT_SECS
        while len(places) < count and time.monotonic() < deadline:
            time.sleep(0.05)
            for other in set(range(count)) - set(places):
                with contextlib.suppress(OSError, ValueError):
                    text = files.read_bytes(folder / f"process-{other}.txt", _MAX_REPORT_BYTES).decode()
                    if "\n" in text:
                        places[other] = printable(text.partition("\n")[0])[:200]
        return sentence(places, count)


def _is_in(package: str, frame: FrameType) -> bool:
    return frame.f_globals.get("__name__", "").partition(".")[0] == package


def _counts(engine: Engine) -> tuple[int, int, int]:
    run, ran = engine.run, engine.call.ran
    in_flight = run.outputs.pending.in_flight
    return run.loops, run.batches + (0 if ran is None else len(ran.examples)), in_flight.num_computed


def sentence(places: dict[int, str], count: int) -> str:
    """Describes what the processes of a job are doing, starting with the rarest activity.

    `places` is a dict with the activity of each process that has reported, keyed by process index. `count` is the total
    number of processes.

    >>> sentence({0: "waiting for the others", 1: "compiling", 2: "waiting for the others"}, 4)
    'process 1 is compiling; processes 0, 2 are waiting for the others; process 3 did not report'
    """
    groups = collections.defaultdict(list)
    for number, place in sorted(places.items()):
        groups[place].append(number)
    parts = [
        f"{_numbered(numbers)} {'is' if len(numbers) == 1 else 'are'} {place}"
        for place, numbers in sorted(groups.items(), key=lambda each: (len(each[1]), each[0].startswith("waiting")))
    ]
    if missing := sorted(set(range(count)) - set(places)):
        parts.append(f"{_numbered(missing)} did not report")
    return "; ".join(parts)


def _numbered(numbers: Sequence[int]) -> str:
    listed = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
    return f"process{'es' if len(numbers) > 1 else ''} {listed}"
