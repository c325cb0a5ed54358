"""Breaks runs in many ways, and checks that each resumed run ends like an uninterrupted one.

    python tests/chaos.py                            # All parts, in about half an hour; the same as `make chaos`.
    python tests/chaos.py --only sigkill --count 5   # One part.
    python tests/chaos.py --seed 7

Prints a table at the end, and exits with status 1 if anything failed. `test_faults.py` runs some of the parts with
smaller counts.

Most runs are separate processes, so that they can be killed. To start quickly, they are forked from a server that has
imported everything (but has not initialized a JAX backend), and they share a compilation cache.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import faulthandler
import functools
import importlib
import importlib.util
import itertools
import json
import os
import pathlib
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
import xml.etree.ElementTree
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from absl import logging
from programs import (
    copies,
    directories,
    ensembles,
    hanging,
    launching,
    pipelines,
    spikes,
    stubborn,
    summaries,
    tracking,
    whole_run,
)
from programs.acts import Do
from programs.stubborn import is_alive

import jaxloop
from jaxloop import checkpoint
from jaxloop.checkpoint import seal
from jaxloop.runs import commands, run_log

TIMEOUT_SECS = 120.0

# Processes ---------------------------------------------------------------------------------------------


class ForkServer:
    """A process that has imported everything, and forks a child for each run."""

    def __init__(self, directory: pathlib.Path):
        directory.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, __file__, "--serve", str(directory / "compiled")]
        options = {"env": {**os.environ, "NPROC": "32", "JAX_PLATFORMS": "cpu"}, "text": True}
        pipe = subprocess.PIPE
        with (directory / "server.log").open("w") as log:
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, **options)
        self._process, self._requests, self._answers = process, process.stdin, process.stdout

    def ask(self, request: Any, timeout_secs: float = TIMEOUT_SECS) -> int:
        print(json.dumps(request), file=self._requests, flush=True)
        ready, _, _ = select.select([self._answers], [], [], timeout_secs)
        if not ready:
            raise TimeoutError
        return self.answer()

    def answer(self) -> int:
        """Waits for the answer to the oldest unanswered request, and returns it."""
        return int(self._answers.readline())

    def start(self, directory: pathlib.Path, job: str = "run", **options: Any) -> "Child":
        return Child(self, directory, job, options)

    def close(self) -> None:
        self._requests.close()
        self._process.wait()
        self._answers.close()


class Child:
    """A process that runs a job.

    Attributes:
      first_step: The step from which the run resumed, or 0. Set when the process has ended.
      reports: Everything that the job has reported so far, as pairs of a place and a number.
      log: The log file of the process.
    """

    def __init__(self, server: ForkServer, directory: pathlib.Path, job: str, options: dict[str, Any]):
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "result.json").unlink(missing_ok=True)
        # The log is outside the directory, because it would be cut off if the disk of the directory is full.
        number = len(list(directory.parent.glob(f"{directory.name}.log.*")))
        self.directory, self.log = directory, directory.parent / f"{directory.name}.log.{number}"
        self._fifo = directory / f"progress.{number}"
        os.mkfifo(self._fifo)
        self._pipe = os.open(self._fifo, os.O_RDONLY | os.O_NONBLOCK)
        self._text, self.reports = "", []
        self.first_step = 0
        self._server = server
        request = {"job": job, "directory": str(directory), "number": number, "options": options}
        self.pid = server.ask(request)

    def read(self, timeout: float = 0.0) -> None:
        """Reads new reports from the pipe."""
        if timeout:
            select.select([self._pipe], [], [], timeout)
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._pipe, 65536):
                self._text += data.decode()
        *lines, self._text = self._text.split("\n")
        self.reports += [(line.split()[0], int(line.split()[1])) for line in lines]

    def wait_for(self, *places: str) -> bool:
        """Waits until the process has reached one of these places; returns False if it ends first."""
        end = time.monotonic() + TIMEOUT_SECS
        while time.monotonic() < end:
            if any(place in places for place, _ in self.reports):
                return True
            if not is_alive(self.pid):
                return False
            self.read(0.005)
            time.sleep(0.001)
        raise TimeoutError(f"{self.pid} never reached {places}:\n{self.log.read_text()}")

    def send(self, signum: int) -> None:
        os.kill(self.pid, signum)  # Also works after it has ended, because the server has not reaped it yet.

    def wait(self, timeout_secs: float = TIMEOUT_SECS) -> int:
        """Waits until the process ends; returns its exit code, which is negative if a signal killed it."""
        try:
            code = self._server.ask({"wait": self.pid}, timeout_secs)
        except TimeoutError:
            self.send(signal.SIGUSR1)  # Makes it log the stacks of its threads.
            time.sleep(2)
            self.send(signal.SIGKILL)
            self._server.answer()
            raise TimeoutError(f"{self.pid} has not ended:\n{self.log.read_text()}") from None
        self.read()
        os.close(self._pipe)
        self._fifo.unlink()
        resumed = re.search(r"Resumed at step (\d+)", self.log.read_text())
        self.first_step = int(resumed.group(1)) if resumed else 0
        return code

    def unless_it_failed(self, message: str) -> list[str]:
        """Waits until the process ends; returns a problem unless it failed with this message."""
        code = self.wait()
        return [] if code == 1 and message in self.log.read_text() else [f"it ended with {code}: {self.tail}"]

    def at(self, place: str) -> list[int]:
        return [number for where, number in self.reports if where == place]

    @property
    def tail(self) -> str:
        """The end of the log."""
        return self.log.read_text()[-3000:]

    @property
    def last_completed(self) -> int:
        """The last completed step."""
        return max(self.at("action"), default=self.first_step)

    def result(self) -> Any:
        return json.loads((self.directory / "result.json").read_text())


def serve(cache: str) -> Any:
    """Serves requests until stdin is closed. Returns the request in each forked child, and None in the server."""
    import grain.python  # noqa: F401
    from jax._src import xla_bridge

    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    assert not xla_bridge._backends, "can't fork after a JAX backend was initialized"
    for line in sys.stdin:
        request = json.loads(line)
        if "import" in request:
            for name in request["import"]:
                importlib.import_module(name)
            print(0, flush=True)
        elif "wait" in request:
            print(os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1]), flush=True)
        else:
            pid = os.fork()
            if pid == 0:
                return request
            print(pid, flush=True)
    return None


def run_job(request: Any) -> None:
    directory, number = pathlib.Path(request["directory"]), request["number"]
    log = os.open(directory.parent / f"{directory.name}.log.{number}", os.O_WRONLY | os.O_CREAT)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    logging.set_verbosity(logging.INFO)
    pipe = os.open(directory / f"progress.{number}", os.O_WRONLY)
    report = lambda place, number: os.write(pipe, f"{place} {number}\n".encode())
    result = JOBS[request["job"]](directory, report, **request["options"])
    (directory / "result.json").write_text(json.dumps(result))


def exit_after(function: Callable[[Any], None], argument: Any) -> None:
    """Calls a function and exits with its exit code, skipping Python's cleanup: a run must finish its own work."""
    code: Any = 0
    try:
        function(argument)
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


# Jobs -----------------------------------------------------------------------------------------------------


class ChaosError(RuntimeError):
    pass


def run_experiment(directory, report, *, at=None, pace=0.0, **options):
    """Runs or resumes the experiment.

    Args:
      at: A place, the number of a visit to it (from 1), and what happens then: the name of a signal, "raise" or
        "sleep". None if nothing happens.
      pace: The minimum number of seconds per step.
    """
    visits = collections.Counter()

    def watch(place, number):
        report(place, number)
        visits[place] += 1
        if at is not None and at[:2] == [place, visits[place]]:
            if at[2] == "raise":
                raise ChaosError(f"at {place} {number}")
            time.sleep(TIMEOUT_SECS) if at[2] == "sleep" else os.kill(os.getpid(), getattr(signal, at[2]))
        if place == "step":
            time.sleep(pace)

    write_seal = seal.write

    def write_and_report(path, *args):
        watch("save", 0)  # In Orbax's thread, in the middle of a save.
        write_seal(path, *args)

    seal.write = write_and_report
    result = whole_run.run(directory, watch=watch, **options)
    report("returned", 0)
    return result


def damage_many(directory, report, *, count, seed):
    """Damages the newer of two checkpoints, each time in a new copy of the run; returns the problems."""
    program = whole_run.make_program()
    reference = whole_run.run(directory / "reference", program=program, save=5)
    assert checkpoint.all_steps(directory / "reference" / "checkpoints") == [5, 10]
    rng, problems, state = random.Random(seed), [], program.state
    saved = {
        step: whole_run.digests(checkpoint.restore(directory / "reference/checkpoints", step, state))
        for step in (5, 10)
    }
    for number in range(count):
        copy = directory / "copy"
        shutil.copytree(directory / "reference", copy)
        (copy / "checkpoints" / "STOPPED").unlink()
        what, path = damage(copy / "checkpoints" / "10", rng)
        where = f"{number}: {what}"
        try:
            if number % 25 == 0:
                resumed = whole_run.run(copy, program=program, save=5)
                if (resumed["state"], resumed["history"]) != (reference["state"], reference["history"]):
                    problems.append(f"{where}: the resumed run ends differently")
                if checkpoint.all_steps(copy / "checkpoints") != [5, 10] or seal.problems(copy / "checkpoints/10"):
                    problems.append(f"{where}: the resumed run did not save the step again")
            else:
                restored, step = checkpoint.restore_newest(copy / "checkpoints", state)
                is_harmless = step == 10 and path.name in NOT_SEALED
                if whole_run.digests(restored) != saved[step] or not (step == 5 or is_harmless):
                    problems.append(f"{where}: step {step} was restored")
                if step == 5 and not (copy / "checkpoints" / "damaged" / "10").exists():
                    problems.append(f"{where}: the damaged checkpoint was not moved")
                if step == 5 and number % 10 == 1:
                    with contextlib.closing(checkpoint.CheckpointWriter(copy / "checkpoints")) as writer:
                        writer.save(10, state)
                    if checkpoint.restore_newest(copy / "checkpoints", state)[1] != 10:
                        problems.append(f"{where}: the step can't be saved again")
        except Exception:
            problems.append(f"{where}: {traceback.format_exc()}")
        shutil.rmtree(copy)
    return problems


def end_everywhere(directory, report):
    """Ends runs by an exception or SIGTERM at each visit to each place, and resumes them; returns the differences."""
    run = functools.partial(whole_run.run, source="index", program=whole_run.make_program(), save=4)
    visits, problems = collections.Counter(), {}
    reference = run(directory / "reference", watch=lambda *place: visits.update([place]), writer=whole_run.Writer())
    del visits["compile", 0]  # Only the first run compiles: all runs share a program.
    places = [(place, visit) for place in sorted(visits) for visit in range(1, visits[place] + 1)]
    for (place, visit), how in itertools.product(places, ["raise", "SIGTERM"]):
        seen = []

        def watch(*where, place=place, visit=visit, how=how, seen=seen):
            if where == place:
                seen.append(where)
                if len(seen) == visit:
                    if how == "raise":
                        raise ChaosError(f"at {where}")
                    signal.raise_signal(signal.SIGTERM)

        # The writer has no places: a signal raised in its thread could arrive after the run has ended.
        broken, writer = directory / "broken", whole_run.Writer()
        with contextlib.suppress(ChaosError, SystemExit):
            run(broken, watch=watch, writer=writer)
        saved = newest_step(broken)
        resumed = run(broken)
        expected = {**reference, "ids": reference["ids"][saved:]}
        resumed["written"] = writer.written + resumed["written"]
        differ = [name for name in reference if resumed[name] != expected[name]]
        problems[f"{how} at {place[0]} {place[1]}, visit {visit}"] = (
            differ if len(seen) >= visit else ["the place was never reached"]
        )
        shutil.rmtree(broken)
    return problems


def resume_everywhere(directory, report):
    """Resumes from each step, including 0 and the last, with each source and prefetch; returns the differences."""
    program, problems = whole_run.make_program(), {}
    for source, prefetch in itertools.product([name for name in whole_run.SOURCES if name != "many"], range(3)):
        run = functools.partial(whole_run.run, source=source, prefetch=prefetch, program=program)
        reference = run(directory / "reference")
        for step in range(11):
            target = whole_run.copy_until(step, directory / "reference", directory / "resumed")
            resumed = run(target, saves=False)
            expected = {**reference, "ids": reference["ids"][step:]}
            expected["written"] = [row for row in reference["written"] if row[0] > step]
            where = f"{source} with prefetch {prefetch} from step {step}"
            problems[where] = [name for name in reference if resumed[name] != expected[name]]
            shutil.rmtree(target)
        shutil.rmtree(directory / "reference")
    return problems


# Orbax writes some or all of the contents of these files at the commit, after the seal. Nothing reads those parts.
NOT_SEALED = ("_CHECKPOINT_METADATA", "commit_success.txt")


def damage(path: pathlib.Path, rng: random.Random) -> tuple[str, pathlib.Path]:
    """Damages one file of a checkpoint; returns a description, and the path of the file."""
    files = sorted(each for each in path.rglob("*") if each.is_file() and each.stat().st_size)
    file, what = rng.choice(files), rng.choice(["deleted", "emptied", "truncated", "bit-flipped"])
    content = bytearray(file.read_bytes())
    if what == "deleted":
        file.unlink()
    elif what == "bit-flipped":
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        file.write_bytes(content)
    else:
        file.write_bytes(b"" if what == "emptied" else content[: rng.randrange(len(content))])
    return f"{file.relative_to(path)} {what}", file


def run_many_steps(directory, report, *, steps):
    """Runs many steps; returns memory sizes and compilations over time, and the threads and files before and after."""
    compilations = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, secs, **kwargs: compilations.append(name) if "backend_compile" in name else None
    )
    sizes = []

    def measure(step_num, **_):
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
        sizes.append((step_num, pages * os.sysconf("SC_PAGE_SIZE") / 2**20, len(compilations)))
        report("action", step_num)

    discard = types.SimpleNamespace(write_scalars=lambda step, scalars: None, flush=lambda: None)
    program = whole_run.make_program()
    run = functools.partial(whole_run.run, program=program, source="many", keep=2, writer=discard)
    files = lambda: sorted(
        str(each.readlink()) for each in pathlib.Path("/proc/self/fd").iterdir() if each.is_symlink()
    )
    names = lambda: (each.read_text().strip() for each in pathlib.Path("/proc/self/task").glob("*/comm"))
    threads = lambda: sorted(name for name in names() if name != "ts_pool_worker")  # TensorStore's pool grows slowly.
    run(directory / "warm", total=100, loop_steps=50, save=10)
    before = threads(), files(), sorted(map(str, threading.enumerate()))
    measures = [Do(measure, jaxloop.every(steps // 10), uses_outputs=False)]
    run(directory / "long", total=steps, loop_steps=steps // 10, save=steps // 10, more_actions=measures)
    time.sleep(2)  # The thread that watches for signals ends on its own.
    after = threads(), files(), sorted(map(str, threading.enumerate()))
    return {"sizes": sizes, "before": before, "after": after}


JOBS: dict[str, Callable[..., Any]] = {
    "run": run_experiment,
    "damage": damage_many,
    "end_everywhere": end_everywhere,
    "resume_everywhere": resume_everywhere,
    "long": run_many_steps,
    "pipeline": pipelines.run,
    "copies": copies.resume_from_each,
    "ensemble": ensembles.run,
    "spikes": spikes.run,
    "without_spikes": spikes.without,
}

# Runs and their results ----------------------------------------------------------------------------------

OPTIONS = [
    {"source": "index", "total": 10, "save": 2, "pace": 0.02},
    {"source": "grain", "prefetch": 2, "total": 12, "save": 3, "pace": 0.03},
    {"source": "list", "total": 20, "epochs": 2, "loop_steps": None, "save": 2, "keep": 3, "pace": 0.02},
    {"source": "generator", "total": 12, "save": 1, "keep": 2, "pace": 0.01},
]


def newest_step(directory: pathlib.Path) -> int:
    return max(checkpoint.all_steps(directory / "checkpoints"), default=0)


def history_of(directory: pathlib.Path) -> list[Any]:
    """Returns the rows of the history file, without times."""
    rows = [json.loads(line) for line in (directory / "history.jsonl").read_text().splitlines()]
    return [without_time(row) for row in rows]


def result_in(directory: pathlib.Path, child: Child) -> Any:
    """Returns the result of a job and, if it wrote one, its history file."""
    has_file = (directory / "history.jsonl").exists()
    return child.result() | ({"history file": history_of(directory)} if has_file else {})


def without_time(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_time(each) for name, each in value.items() if name != "time"}
    return value


@dataclasses.dataclass
class Reference:
    """The results of an uninterrupted run."""

    result: Any
    written: list[int]  # The steps of the rows that the writer received.
    secs: float


class Arena:
    """Runs jobs in child processes, and compares their results with those of uninterrupted runs.

    Args:
      directory: Contains everything that the runs write.
    """

    def __init__(self, directory: pathlib.Path):
        self.directory = directory
        self.server = ForkServer(directory)
        self._references: dict[str, Reference] = {}
        self._count = 0

    def close(self) -> None:
        self.server.close()

    def new_directory(self, name: str) -> pathlib.Path:
        self._count += 1
        return self.directory / f"{name}_{self._count}"

    def reference(self, options: dict[str, Any], job: str = "run", begins: str = "action") -> Reference:
        """Runs a job without interruption, once per set of options. `secs` starts at the first report of `begins`."""
        key = json.dumps(options)
        if key not in self._references:
            directory = self.new_directory("reference")
            child = self.server.start(directory, job, **options)
            child.wait_for(begins)
            start = time.monotonic()
            assert child.wait() == 0, child.log.read_text()
            secs = time.monotonic() - start
            self._references[key] = Reference(result_in(directory, child), child.at("writer"), secs)
        return self._references[key]

    def finish(self, children: list[Child], directory: pathlib.Path, options: dict[str, Any], exact: bool) -> list[str]:
        """Resumes an interrupted run to its end; returns how it differs from an uninterrupted one.

        Args:
          children: The processes that have run it so far.
          exact: Whether all of them could shut down cleanly, so that no row may have been written twice.
        """
        child = self.server.start(directory, **options)
        if child.wait() != 0:
            return [f"the last run failed: {child.tail}"]
        children, reference = [*children, child], self.reference(options)
        problems = differences(result_in(directory, child), reference.result, "state", "history", "history file")
        ids = reference.result["ids"]
        for each in children:  # Those that were killed, too.
            if each.at("step") != ids[each.first_step :][: len(each.at("step"))]:
                problems.append(f"the batches from step {each.first_step}: {each.at('step')} instead of {ids}")
        if child.first_step + len(child.at("step")) != len(ids):
            problems.append(f"the last run trained on {child.at('step')} from step {child.first_step}")
        written = [step for each in children for step in each.at("writer")]
        if (sorted(written) if exact else sorted(set(written))) != sorted(
            reference.written if exact else set(reference.written)
        ):
            problems.append(f"rows were written for {written} instead of {reference.written}")
        problems += [f"left over: {path}" for path in leftovers(directory)]
        return problems


def differences(found: Any, expected: Any, *names: str) -> list[str]:
    """Returns the first difference between each of these parts of two results."""
    as_list = lambda value: sorted(value.items()) if isinstance(value, dict) else value
    problems = []
    for name in (name for name in names if found[name] != expected[name]):
        pairs = itertools.zip_longest(as_list(found[name]), as_list(expected[name]))
        problems.append(next(f"the {name}: {one} instead of {two}" for one, two in pairs if one != two))
    return problems


def leftovers(directory: pathlib.Path) -> list[pathlib.Path]:
    is_leftover = lambda name: "orbax-checkpoint-tmp" in name or name.startswith(".write_probe")
    return [path for path in directory.rglob("*") if is_leftover(path.name)]


# Faults --------------------------------------------------------------------------------------------------

# For each run, the number of injected faults, and the problems found.
Results = Iterator[tuple[int, list[str]]]


def sigkill(arena: Arena, count: int, seed: int, per_run: int = 4) -> Results:
    """Kills runs at random moments, mostly after the first step, and resumes them."""
    rng, killed, number = random.Random(seed), 0, 0
    while killed < count:
        options, directory = OPTIONS[number % len(OPTIONS)], arena.new_directory("sigkill")
        reference, children, problems, number = arena.reference(options), [], [], number + 1
        kills = 0
        while kills < min(per_run, count - killed):
            child = arena.server.start(directory, **options)
            if rng.random() < 0.75:
                child.wait_for("step")
            time.sleep(rng.uniform(0, 0.6 * reference.secs))
            child.send(signal.SIGKILL)
            code = child.wait()
            children.append(child)
            if code == 0:  # It ended before it could be killed.
                break
            if code != -signal.SIGKILL:
                problems.append(f"the run ended with {code}: {child.tail}")
                break
            kills += 1
            problems += lost_too_much(child, options["save"], saves_under_way=1)
        killed += kills
        if kills or problems:
            yield kills, problems + arena.finish(children, directory, options, exact=False)


def data_pipelines(arena: Arena, count: int, seed: int, per_run: int = 2) -> Results:
    """Kills runs with tf.data, Grain and PyTorch pipelines at random moments, and resumes them, in each API."""
    modules, missing = pipelines.libraries()
    for name in missing:
        print(f"  pipelines: {name} is not installed; skipping its pipelines", flush=True)
    arena.server.ask({"import": [*modules, "tensorboard.backend.event_processing.plugin_event_accumulator"]})
    rng, killed, kinds = random.Random(seed), 0, collections.Counter()
    cases = [
        (name, api) for name, each in pipelines.PIPELINES.items() if each.library not in missing for api in each.apis
    ]
    rng.shuffle(cases)
    for name, api in itertools.cycle(cases):
        if killed >= count:
            break
        options, directory = {"pipeline": name, "api": api, "pace": 0.01}, arena.new_directory("pipeline")
        start_run = functools.partial(arena.server.start, directory, "pipeline", **options)
        reference, children = arena.reference(options, "pipeline", "step"), []
        while len(children) < min(per_run, count - killed):
            child = start_run()
            if child.wait_for("step"):
                time.sleep(rng.uniform(0, 0.7 * reference.secs))
            child.send(signal.SIGKILL)
            if child.wait() != -signal.SIGKILL:  # It has finished, or failed; then the next process fails, too.
                break
            children.append(child)
        if not children:
            continue
        last_child = start_run()
        code = last_child.wait()
        children.append(last_child)
        has_warned = any(re.search(pipelines.WARNING, child.log.read_text()) for child in children)
        problems, has_resumed = [], any(child.first_step for child in children)
        if code != 0:
            problems.append(f"the last run failed: {last_child.tail}")
        elif not pipelines.PIPELINES[name].warns:
            problems += differences(last_child.result(), reference.result, "leaves", "history", "points")
            problems += ["it warned that resuming is not exact"] if has_warned else []
        elif not has_warned:
            problems.append("it did not warn that resuming is not exact")
        kills = len(children) - 1
        killed, outcome = killed + kills, "resumed" if has_resumed else "killed before the first save"
        kinds[pipelines.PIPELINES[name].library, api, outcome] += kills
        yield kills, [f"{name}, {api}: {problem}" for problem in problems]
    for kind, number in sorted(kinds.items()):
        print(f"  pipelines: {number:3} kills in {', '.join(kind)}", flush=True)


def lost_too_much(child: Child, save: int, saves_under_way: int) -> list[str]:
    """Checks that at most the saves under way, and the steps after them, were lost."""
    saved = newest_step(child.directory)
    # The save of the last completed step may not have begun.
    last_begun = max(child.last_completed - 1, 0) // save * save
    if saved < last_begun - saves_under_way * save:
        return [f"step {child.last_completed} was completed, but the newest checkpoint is {saved}, with {save=}"]
    return []


def signals(arena: Arena, count: int, seed: int, per_run: int = 4) -> Results:
    """Sends SIGTERM and SIGINT at random moments, and during a compilation, an evaluation, a save and a write."""
    rng, sent, number, kinds = random.Random(seed), 0, 0, set()
    options = OPTIONS[0]
    firsts = [("compile", 1), ("eval", 1), ("save", 1), ("writer", 1)]
    moments = [*itertools.chain(*((first, None) for first in firsts)), ("compile", 2), ("eval", 2)]
    reference = arena.reference(options)
    while sent < count:
        directory, children, problems, interruptions = arena.new_directory("signals"), [], [], []
        while len(interruptions) < min(per_run, count - sent):
            signum, moment = [signal.SIGTERM, signal.SIGINT][number // 2 % 2], moments[number % len(moments)]
            number += 1
            child = arena.server.start(directory, **options, at=moment and [*moment, signum.name])
            if moment is None:
                child.wait_for("data")
                time.sleep(rng.uniform(0, reference.secs / 2))
                child.send(signum)
            code = child.wait()
            children.append(child)
            if code != 143 and (directory / "checkpoints" / "STOPPED").exists():  # The run had finished.
                break
            interruptions.append((signum.name, moment, child.first_step, child.last_completed))
            problems += signal_problems(child, signum, code)
        problems += arena.finish(children, directory, options, exact=True)
        sent += len(interruptions)
        kinds.update(name for name, *_ in interruptions)
        if sent >= count and len(kinds) < 2:
            problems.append(f"only one kind of signal interrupted a run: {kinds}")
        yield len(interruptions), [*problems, str(interruptions)] if problems else []


def signal_problems(child: Child, signum: int, code: int) -> list[str]:
    problems = []
    if code != (143 if signum == signal.SIGTERM else 0):
        problems.append(f"after {signum!r} the exit code is {code}: {child.tail}")
    begun = child.first_step + len(child.at("step"))
    if newest_step(child.directory) != begun or child.last_completed != begun:
        problems.append(
            f"step {newest_step(child.directory)} was saved, {child.last_completed} completed and {begun} begun"
        )
    if signum == signal.SIGINT and code == 0 and child.result()["step"] != begun:
        problems.append(f"step {child.result()['step']} was returned, but {begun} completed")
    return problems + [f"left over: {path}" for path in leftovers(child.directory)]


def damaged(arena: Arena, count: int, seed: int) -> Results:
    """Damages the newest checkpoint: deletes, empties or truncates a file, or flips one of its bits."""
    problems = result_of(arena, "damage", TIMEOUT_SECS + count, count=count, seed=seed)
    yield count - len(problems), []
    for problem in problems:
        yield 1, [problem]


def disk_full(arena: Arena, count: int, seed: int) -> Results:
    """Lets the disk fill up during a run, after a random number of bytes; then frees the space and resumes the run."""
    rng, options = random.Random(seed), OPTIONS[0]
    arena.reference(options)
    for _ in range(count):
        directory = arena.new_directory("disk_full")
        with small_disk(directory) as fill:
            room = rng.randrange(0, 500_000)
            fill(room)
            child = arena.server.start(directory, **options)
            problems = [f"{room} free bytes: {each}" for each in child.unless_it_failed("No space left")]
            fill(None)
            yield 1, problems + arena.finish([child], directory, options, exact=False)


@contextlib.contextmanager
def small_disk(directory: pathlib.Path) -> Iterator[Callable[[int | None], None]]:
    """Mounts a small file system; yields a function that leaves this many bytes free, or all of them if None."""

    def fill(room: int | None) -> None:
        filler = directory / "filler"
        filler.unlink(missing_ok=True)
        if room is not None:
            stat = os.statvfs(directory)
            filler.write_bytes(b"\0" * max(stat.f_bavail * stat.f_frsize - room, 0))

    with directories.mounted(directory, "size=30m"):
        yield fill


def cycled(kinds: dict[str, Any], count: int) -> Iterator[tuple[str, Any]]:
    """Yields the items of a dict in turn, this many in all."""
    return itertools.islice(itertools.cycle(kinds.items()), count)


def lost_directories(arena: Arena, count: int, seed: int) -> Results:
    """Moves or replaces the checkpoint directory during a run, or uses up all inodes; then undoes it and resumes."""
    options = {**OPTIONS[0], "pace": 0.1}
    arena.reference(options)
    for name, lose in cycled(directories.LOSSES, count):
        directory = arena.new_directory(name)
        with directories.mounted(directory, "size=30m,nr_inodes=2000"):
            child = arena.server.start(directory, **options)
            child.wait_for("action")
            with lose(directory):
                failed = child.unless_it_failed("CheckpointError: Saving the checkpoint of step")
            problems = [f"{name}: {problem}" for problem in failed]
            yield 1, problems + arena.finish([child], directory, options, exact=False)


def impostors(arena: Arena, count: int, seed: int) -> Results:
    """Puts something else in place of the lock file. A run must refuse it, without hanging."""
    options = OPTIONS[0]
    arena.reference(options)
    for name, make in cycled(directories.IMPOSTORS, count):
        directory = arena.new_directory("impostor")
        place = directory / "checkpoints" / directories.LOCK
        place.parent.mkdir(parents=True)
        make(place)
        child = arena.server.start(directory, **options)
        problems = [f"{name}: {problem}" for problem in child.unless_it_failed("Expected a regular file")]
        if [path.name for path in place.parent.iterdir()] != [place.name]:
            problems.append(f"{name}: the directory contains {list(place.parent.iterdir())}")
        copies.remove(place)
        yield 1, problems + arena.finish([child], directory, options, exact=True)


def two_trainers(arena: Arena, count: int, seed: int) -> Results:
    """Starts a second trainer in the same directory; then kills the first one, and resumes its run."""
    for _ in range(count):
        options, directory = OPTIONS[0], arena.new_directory("two")
        arena.reference(options)
        first = arena.server.start(directory, **options, at=["step", 5, "sleep"])
        first.wait_for("step")
        second = arena.server.start(directory, **options)
        problems = second.unless_it_failed(f"is in use by process {first.pid} on")
        if second.reports:
            problems.append(f"the second trainer has begun: {second.reports}")
        if not is_alive(first.pid):
            problems.append(f"the first trainer ended: {first.tail}")
        first.send(signal.SIGKILL)
        first.wait()
        yield 1, problems + arena.finish([first], directory, options, exact=False)


def result_of(arena: Arena, job: str, secs: float, **options: Any) -> Any:
    """Runs a job in a process, without interruption; returns its result."""
    child = arena.server.start(arena.new_directory(job), job, **options)
    if child.wait(secs) != 0:
        raise ChaosError(child.tail)
    return child.result()


def compare_in_one_process(arena: Arena, count: int, seed: int, *, job: str) -> Results:
    """Runs a job that breaks many runs in one process, and returns the differences found in each of them.

    Only "copies" can have any number of cases.
    """
    options = {"num_cases": count, "seed": seed} if job == "copies" else {}
    for where, differ in result_of(arena, job, 5 * TIMEOUT_SECS, **options).items():
        yield 1, [f"{where}, different or wrong: {', '.join(differ)}"] if differ else []


def processes(arena: Arena, count: int, seed: int) -> Results:
    """Breaks one of two processes, in each way in turn, and resumes the run, sometimes in a different layout."""
    rng = random.Random(seed)
    reference = arena.new_directory("reference")
    reference.mkdir(parents=True)
    launching.output_of(launching.JOB, reference, processes=2, devices=2)
    expected = launching.final_of(reference)
    for fault, _ in cycled(launching.FAULTS, count):
        directory, at, place = arena.new_directory(fault), rng.randrange(2, 58), rng.randrange(2)
        then = rng.choice([(2, 2), (2, 2), (1, 4), (4, 1)])
        directory.mkdir()
        problems = launching.break_and_resume(directory, fault, at=at, place=place, then=then)
        if not problems:
            final = launching.final_of(directory)
            problems = [f"{name} differs" for name in expected if not np.array_equal(final[name], expected[name])]
        yield 1, [f"{fault} in process {place} at step {at}, then {then}: {problem}" for problem in problems]


def stuck(arena: Arena, count: int, seed: int) -> Results:
    """Sends two signals to a run that is stuck in a writer, its data or native code, or that has worker processes."""
    rng = random.Random(seed)
    for number in range(count):
        kind, directory = stubborn.KINDS[number % len(stubborn.KINDS)], arena.new_directory("stuck")
        directory.parent.mkdir(parents=True, exist_ok=True)
        signums, pause = rng.choices([signal.SIGINT, signal.SIGTERM], k=2), rng.uniform(0.15, 1.0)
        problems = stubborn.Stubborn(directory, kind).problems(signums, pause)
        yield 1, [f"{kind}, {signums}: {problem}" for problem in problems]


def event_files(arena: Arena, count: int, seed: int, per_run: int = 4) -> Results:
    """Kills runs at random steps. In the end, TensorBoard must show each point once."""
    rng, done, expected = random.Random(seed), 0, {}
    while done < count:
        api = rng.choice(["objects", "functions"])
        if api not in expected:
            expected[api] = summaries.kill_and_resume(arena.new_directory("reference"), api, [])
        kills = sorted(rng.choices(range(1, summaries.NUM_STEPS), k=min(per_run, count - done)))
        found = summaries.kill_and_resume(arena.new_directory("killed"), api, kills)
        names = [name for name in {**found, **expected[api]} if found.get(name) != expected[api].get(name)]
        done += len(kills)
        yield len(kills), [f"{api}, killed at {kills}: {name}: {found.get(name)}" for name in names]


def ensemble(arena: Arena, count: int, seed: int, per_run: int = 4) -> Results:
    """Kills an ensemble at random moments, mostly after the first step, and resumes it."""
    rng, killed, options = random.Random(seed), 0, {"total": ensembles.NUM_STEPS, "pace": 0.02}
    reference = arena.reference(options, "ensemble", begins="step")
    while killed < count:
        directory, kills, code = arena.new_directory("ensemble"), 0, -signal.SIGKILL
        while code == -signal.SIGKILL and kills < min(per_run, count - killed):
            child = arena.server.start(directory, "ensemble", **options)
            if rng.random() < 0.75:
                child.wait_for("step")
            time.sleep(rng.uniform(0, 0.6 * reference.secs))
            child.send(signal.SIGKILL)
            code = child.wait()
            kills += code == -signal.SIGKILL
        child = arena.server.start(directory, "ensemble", **options)
        if child.wait() != 0:
            problems = [f"the last run failed: {child.tail}"]
        else:
            problems = differences(result_in(directory, child), reference.result, *reference.result)
        killed += kills
        yield kills, problems


def trackers(arena: Arena, count: int, seed: int) -> Results:
    """Kills runs at random moments. In the end, each installed tracker must show the points of the history."""
    for number, tracker in enumerate(TRACKERS):
        kills = count // len(TRACKERS) + (number < count % len(TRACKERS))
        command = [sys.executable, tracking.__file__, str(arena.new_directory(tracker)), tracker, str(kills), str(seed)]
        run = subprocess.run(command, capture_output=True, text=True)
        result = json.loads(run.stdout.splitlines()[-1]) if run.returncode == 0 else {"problems": [run.stderr]}
        yield kills, result["problems"]


def transformer(arena: Arena, count: int, seed: int) -> Results:
    """Kills one of two processes of the transformer example, and resumes it."""
    for _ in range(count):
        yield 1, launching.kill_transformer_and_resume(arena.new_directory("transformer"))


def soak(arena: Arena, count: int, seed: int, per_run: int = 20) -> Results:
    """Mixes signals, exceptions, damaged checkpoints and second trainers."""
    rng, done = random.Random(seed), 0
    while done < count:
        options = {"source": "list", "total": 180, "epochs": 15, "loop_steps": None, "save": 3, "keep": 4, "pace": 0.01}
        directory, reference, children, problems = arena.new_directory("soak"), arena.reference(options), [], []
        faults, happened = 0, []
        while faults < min(per_run, count - done) and not (directory / "checkpoints" / "STOPPED").exists():
            what = rng.choice(["SIGKILL", "SIGTERM", "SIGINT", "raise", "damage", "two"])
            place = rng.choice(["step", "action", "eval", "writer", "save"])
            at = [place, rng.randint(1, 6), "raise"] if what == "raise" else None
            child = arena.server.start(directory, **options, at=at)
            child.wait_for("step")
            children.append(child)
            time.sleep(rng.uniform(0, reference.secs / 12))
            if what == "two":
                second = arena.server.start(directory, **options)
                if second.wait() != 1 and not second.reports:
                    problems.append(f"a second trainer was allowed to start: {second.tail}")
            if what != "raise":
                child.send(getattr(signal, what) if what.startswith("SIG") else signal.SIGKILL)
            code = child.wait()
            faults += 1
            happened.append((what, at, child.first_step, child.last_completed, code))
            if (directory / "checkpoints" / "STOPPED").exists():
                break
            expected = {"SIGTERM": 143, "SIGINT": 0, "raise": 1}.get(what, -signal.SIGKILL)
            if code != expected:
                problems.append(f"after {what} {at} it ended with {code}: {child.tail}")
            is_orderly = what in ("SIGTERM", "SIGINT")
            problems += lost_too_much(child, options["save"], saves_under_way=0 if is_orderly else 1)
            checkpoints = directory / "checkpoints"
            if what == "damage" and len(checkpoint.all_steps(checkpoints)) > 1:
                happened.append(damage(checkpoints / str(newest_step(directory)), rng)[0])
        done += faults
        found = problems + arena.finish(children, directory, options, exact=False)
        yield faults, [*found, str(happened)] if found else []


def goodput(arena: Arena, count: int, seed: int, max_stops: int = 4) -> Results:
    """Kills and stops runs at random moments, and compares their goodput with outside measurements."""
    options = {"source": "many", "total": 150, "loop_steps": 10, "save": 7, "keep": 2, "pace": 0.02}
    rng, reference = random.Random(seed), arena.reference({**options})
    for _ in range(count):
        directory, children, problems, furthest, repeated, began = arena.new_directory("goodput"), [], [], 0, 0, 0.0
        for number in itertools.count():
            child = arena.server.start(directory, **options)
            began = time.time() if number == 0 else began
            children.append(child)
            if number < max_stops:
                wait_for_start(directory, number + 1)  # Nothing records a process that ends earlier.
                if rng.random() < 0.75:
                    child.wait_for("step")
                time.sleep(rng.uniform(0, reference.secs / 3))
                child.send(rng.choice([signal.SIGKILL, signal.SIGTERM]))
            code = child.wait()
            steps = child.at("step")
            reached = child.first_step + len(steps)
            repeated += max(min(reached, furthest) - child.first_step, 0) if steps else 0
            furthest = max(furthest, reached)
            if code == 0:
                break
            # SIGTERM may arrive before the run has set its handler.
            if code not in (-signal.SIGKILL, -signal.SIGTERM, 143):
                problems.append(f"it ended with {code}: {child.tail}")
                break
            time.sleep(rng.uniform(0, 0.5))
        # The last process writes its result when the run ends. Its exit may take long after that on a busy machine.
        secs, found = os.stat(directory / "result.json").st_mtime - began, jaxloop.goodput(directory)
        expected = options["total"], repeated, len(children)
        # The steps of a killed process are known up to its last log line.
        if (found.steps, found.starts) != (expected[0], expected[2]) or found.repeated_steps > repeated:
            problems.append(f"it counts {found.steps, found.repeated_steps, found.starts} instead of {expected}")
        if abs(found.total - secs) > 0.01 * secs:
            problems.append(f"its parts add up to {found.total:.3f} s instead of {secs:.3f} s:\n{found}")
        yield 1, problems


def wait_for_start(directory: pathlib.Path, number: int) -> None:
    """Waits until the run log contains this many starts."""
    end, found = time.monotonic() + TIMEOUT_SECS, 0
    while found < number:
        if time.monotonic() > end:
            raise TimeoutError(f"{directory} has no start {number}")
        time.sleep(0.002)
        with contextlib.suppress(FileNotFoundError):  # The run has not begun to write yet.
            found = len([each for each in run_log.read(directory) if each.started])


COMMANDS = "save", "log_every=7", "log_every=3", "summary.interval=5", "checkpoint.interval=11", "profile=2"


def told(arena: Arena, count: int, seed: int, kills: int = 3) -> Results:
    """Sends commands to runs and kills them; compares each with a run that resumes after its last command."""
    rng = random.Random(seed)
    for number in range(count):
        options: dict[str, Any] = {"source": "many", "total": 150, "loop_steps": [10, None][number % 2], "save": 7}
        options |= {"keep": 1000, "pace": 0.02, "steps_per_dispatch": [1, 4][number // 2 % 2]}
        directory, given, answers = arena.new_directory("told"), [], []
        for attempt in range(kills + 1):
            child = arena.server.start(directory, **options)
            child.wait_for("action")
            for _ in range(rng.randint(1, 2)):
                with contextlib.suppress(ValueError):  # The run has ended.
                    given.append(jaxloop.tell(directory, rng.choice(COMMANDS), wait_secs=rng.choice([0, 3])))
            if attempt < kills:
                time.sleep(rng.uniform(0, 0.5))
                child.send(signal.SIGKILL)
            code = child.wait()
            answers += commands.answers(directory)  # Without a checkpoint, a run restarts without its commands.
            if code != -signal.SIGKILL:
                break
        problems = [f"it ended with {code}: {child.tail}"] if code else []
        found, first = child.result(), checkpoint.all_steps(directory / "checkpoints")[0]
        rows = [(elapsed["steps"], logs["command"]) for elapsed, logs in found["history"] if "command" in logs]
        newest = max([first, *(step for step, _ in rows)])  # Each command is followed by a checkpoint.
        again = whole_run.copy_until(newest, directory, arena.new_directory("told_again"))
        uninterrupted = arena.server.start(again, **options)
        if uninterrupted.wait() != 0:
            problems.append(f"the uninterrupted run failed: {uninterrupted.tail}")
        problems += differences(found, uninterrupted.result(), "state", "history")
        done = [(answer.step, answer.command) for answer in answers if answer.error is None]
        if strange := [row for row in rows if row not in done]:
            problems.append(f"the history has {strange}, but the answers are {done}")
        if lost := [each for each in given if each is not None and each not in answers]:
            problems.append(f"answers were lost: {lost}")
        yield 1, problems


def spiking(arena: Arena, count: int, seed: int, kills: int = 2) -> Results:
    """Kills runs whose loss spikes; compares each with a run on data without the batches that it left out."""
    rng = random.Random(seed)
    for number in range(count // spikes.SPIKES):
        options, directory = {"seed": seed * 1000 + number}, arena.new_directory("spikes")
        for attempt in range(kills + 1):
            child = arena.server.start(directory, "spikes", **options)
            child.wait_for("action")
            if attempt < kills:
                time.sleep(rng.uniform(0, 2))
                child.send(signal.SIGKILL)
            code = child.wait()
            if code != -signal.SIGKILL:
                break
        problems = [f"it ended with {code}: {child.tail}"] if code else []
        if not problems:
            found = child.result()
            if missing := set(spikes.spikes_of(options["seed"])) - set(found["left_out"]):
                problems.append(f"the spikes {missing} were not left out")
            options |= {"left_out": found["left_out"], "rewinds": directory.name}
            other = arena.server.start(arena.new_directory("without_spikes"), "without_spikes", **options)
            if other.wait() != 0:
                problems.append(f"the run without the batches failed: {other.tail}")
            else:
                problems += other.result()["problems"]
                problems += differences(found, other.result(), "state", "history")
        yield spikes.SPIKES, problems


def hangs(arena: Arena, count: int, seed: int) -> Results:
    """Makes a run hang at each place, in a single process and in one of four. Some of the runs don't hang."""
    rng, places = random.Random(seed), [*hanging.PLACES, *hanging.HEALTHY]
    for number in range(count):
        place, processes = places[number % len(places)], 1 if number // len(places) % 2 == 0 else 4
        process = 0 if place == "save" else rng.randrange(processes)  # Only process 0 seals a checkpoint.
        yield 1, hanging.problems_of(arena.new_directory("hang"), place, processes=processes, process=process)


def long_run(arena: Arena, count: int, seed: int) -> Results:
    """Runs many steps, and checks that memory, compilations, threads and open files don't grow."""
    result, problems = result_of(arena, "long", TIMEOUT_SECS + count, steps=count), []
    (_, size, compiled), *_, (_, size_at_end, compiled_at_end) = result["sizes"]
    before, after = result["before"], result["after"]
    print(
        f"  long_run: {size:.1f} MiB -> {size_at_end:.1f} MiB; threads {len(before[0])} -> {len(after[0])}", flush=True
    )
    if size_at_end - size > 5:
        problems.append(f"the process grew: {result['sizes']}")
    if compiled_at_end != compiled:
        problems.append(f"something was compiled during the run: {result['sizes']}")
    for what, were, there in zip(["threads", "files", "Python threads"], before, after, strict=True):
        left = collections.Counter(there) - collections.Counter(were)
        if len(there) > len(were):
            problems.append(f"{what} left over: {dict(left)}")
    yield count, problems


# The longest parts come first, because two parts run at a time.
PARTS: dict[str, tuple[Callable[[Arena, int, int], Results], int]] = {
    "soak": (soak, 100),
    "signals": (signals, 100),
    "sigkill": (sigkill, 100),
    "pipelines": (data_pipelines, 100),
    "resumes": (functools.partial(compare_in_one_process, job="resume_everywhere"), 198),
    "ends": (functools.partial(compare_in_one_process, job="end_everywhere"), 78),
    "damaged": (damaged, 500),
    "copied": (functools.partial(compare_in_one_process, job="copies"), 100),
    "disk_full": (disk_full, 10),
    "lost_directories": (lost_directories, 9),
    "impostors": (impostors, 10),
    "goodput": (goodput, 20),
    "told": (told, 20),
    "hangs": (hangs, 64),
    "spikes": (spiking, 100),
    "long_run": (long_run, 10_000),
    "two_trainers": (two_trainers, 4),
    "processes": (processes, 20),
    "stuck": (stuck, 8),
    "ensemble": (ensemble, 20),
    "event_files": (event_files, 12),
    "transformer": (transformer, 1),
}


# The table -----------------------------------------------------------------------------------------------


# The name of a part or test, the number of faults or cases, how many of them passed, and the seconds that it took.
Row = tuple[str, int, int, float]
FORMAT = "{:<60} {:>6} {:>6} {:>8.1f}"


TRACKERS = [name for name in tracking.WRITERS if importlib.util.find_spec(name) is not None]
if TRACKERS:
    PARTS["trackers"] = (trackers, 20)


def run_fault_tests(directory: pathlib.Path) -> list[Row]:
    """Runs test_faults.py and test_whole_run.py; returns a row per test function, which counts its cases."""
    report = directory / "tests.xml"
    tests = pathlib.Path(__file__).parent
    files = [str(tests / "test_faults.py"), str(tests / "test_whole_run.py")]
    command = [sys.executable, "-m", "pytest", *files, f"--junitxml={report}"]
    run = subprocess.run(command, cwd=tests.parent, capture_output=True, text=True)
    rows: dict[str, Row] = {}
    for case in xml.etree.ElementTree.parse(report).iter("testcase"):
        name = case.get("name", "").split("[")[0]
        _, count, passed, secs = rows.get(name, (name, 0, 0, 0.0))
        passed += not any(case.find(kind) is not None for kind in ("failure", "error", "skipped"))
        rows[name] = name, count + 1, passed, secs + float(case.get("time", 0))
    if run.returncode != 0:
        print(run.stdout[-3000:], flush=True)
    return list(rows.values())


def run_part(directory: pathlib.Path, name: str, seed: int, count: int | None) -> list[Row]:
    """Runs one part; returns its rows of the table."""
    if name == "tests":
        return run_fault_tests(directory)
    part, usual_count = PARTS[name]
    done, passed, start = 0, 0, time.monotonic()
    try:
        with contextlib.closing(Arena(directory / name)) as arena:
            for faults, problems in part(arena, count or usual_count, seed):
                done, passed = done + faults, passed + (0 if problems else faults)
                for problem in problems:
                    print(f"  {name}: {problem}", flush=True)
    except Exception:
        traceback.print_exc()
        done += 1
    row = (name, done, passed, time.monotonic() - start)
    print(FORMAT.format(*row), flush=True)
    return [row]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[*PARTS, "tests"], action="append", help="run only this part (repeatable)")
    parser.add_argument("--count", type=int, help="the number of faults per part")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="keep the files of the runs")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        request = serve(args.serve)
        if request is not None:
            exit_after(run_job, request)
        return 0
    # If a shell started this program in the background, this process and its children would ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    directory = pathlib.Path(tempfile.mkdtemp(prefix="chaos_"))
    print(f"seed {args.seed}, in {directory}", flush=True)
    start = time.monotonic()
    parts = [name for name in [*PARTS, "tests"] if not args.only or name in args.only]
    run_one = functools.partial(run_part, directory, seed=args.seed, count=args.count)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:  # They mostly wait, for disks and for each other.
        rows = list(itertools.chain.from_iterable(pool.map(run_one, parts)))
    is_wrong = any(passed < count or count == 0 for _, count, passed, _ in rows)
    print(f"\n{'fault':<60} {'count':>6} {'passed':>6} {'seconds':>8}")
    for row in rows:
        print(FORMAT.format(*row))
    print(f"{time.monotonic() - start:.0f} s in total, seed {args.seed}: {'FAILED' if is_wrong else 'all passed'}")
    if not args.keep and not is_wrong:
        shutil.rmtree(directory)
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
