"""Breaks runs in all ways that we know of, and looks whether they end as if nothing had happened.

    python tests/chaos.py                            # All of it, in about half an hour: `make chaos`.
    python tests/chaos.py --only sigkill --count 5   # A part of it.
    python tests/chaos.py --seed 7

Prints a table at its end, and exits with 1 if anything failed. `test_faults.py` does the same with smaller numbers.

Each run is a process of its own, which may be killed. They are forked from one that has imported everything and has
started no backend of JAX, and share a cache of compiled programs: such a process is at its first step in no time.
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
import xml.etree.ElementTree
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from programs import (
    copies,
    directories,
    hanging,
    launching,
    leaving,
    pipelines,
    spikes,
    stubborn,
    summaries,
    topologies,
    tracking,
    whole_run,
)

import jaxloop
from jaxloop import checkpoint, commands, run_log, seal

PATIENCE_SECS = 120.0

# Processes ---------------------------------------------------------------------------------------------


class ForkServer:
    """A process that has imported everything, and forks one for each run."""

    def __init__(self, directory: pathlib.Path):
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / "server.log").open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, __file__, "--serve", str(directory / "compiled")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "NPROC": "32", "JAX_PLATFORMS": "cpu"},
                text=True,
            )

    def ask(self, request: Any, patience: float = PATIENCE_SECS) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], patience)
        if not ready:
            raise TimeoutError
        return int(self._process.stdout.readline())

    def answer(self) -> int:
        """The answer to a question that was not waited for."""
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())

    def start(self, directory: pathlib.Path, job: str = "run", **options: Any) -> "Child":
        return Child(self, directory, job, options)

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


class Child:
    """A process that runs a job.

    Attributes:
      first_step: when it has ended, the step of the checkpoint from which it went on.
      seen: what it has told, as pairs of a place and a number.
      log: the file with what it has logged.
    """

    def __init__(self, server: ForkServer, directory: pathlib.Path, job: str, options: dict[str, Any]):
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "result.json").unlink(missing_ok=True)
        # Beside it: in a directory whose disk is full, the log would lack its end.
        number = len(list(directory.parent.glob(f"{directory.name}.log.*")))
        self.directory, self.log = directory, directory.parent / f"{directory.name}.log.{number}"
        self._fifo = directory / f"progress.{number}"
        os.mkfifo(self._fifo)
        self._pipe = os.open(self._fifo, os.O_RDONLY | os.O_NONBLOCK)
        self._text, self.seen = "", []
        self.first_step = 0
        self._server = server
        request = {"job": job, "directory": str(directory), "number": number, "options": options}
        self.pid = server.ask(request)

    def read(self, timeout: float = 0.0) -> None:
        """Takes what it has told since the last time."""
        if timeout:
            select.select([self._pipe], [], [], timeout)
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._pipe, 65536):
                self._text += data.decode()
        *lines, self._text = self._text.split("\n")
        self.seen += [(line.split()[0], int(line.split()[1])) for line in lines]

    def wait_for(self, *places: str) -> bool:
        """Waits until it is at one of these places; False where it ended before."""
        end = time.monotonic() + PATIENCE_SECS
        while time.monotonic() < end:
            if any(place in places for place, _ in self.seen):
                return True
            if not is_alive(self.pid):
                return False
            self.read(0.005)
            time.sleep(0.001)
        raise TimeoutError(f"{self.pid} never came to {places}:\n{self.log.read_text()}")

    def send(self, signum: int) -> None:
        os.kill(self.pid, signum)  # Also where it has ended: the server has not waited for it yet.

    def wait(self, patience: float = PATIENCE_SECS) -> int:
        """Waits for its end; returns the exit code, or less than zero where a signal has ended it."""
        try:
            code = self._server.ask({"wait": self.pid}, patience)
        except TimeoutError:
            self.send(signal.SIGUSR1)  # Has it write where its threads are.
            time.sleep(2)
            self.send(signal.SIGKILL)
            self._server.answer()
            raise TimeoutError(f"{self.pid} does not end:\n{self.log.read_text()}") from None
        self.read()
        os.close(self._pipe)
        self._fifo.unlink()
        resumed = re.search(r"Resumed at step (\d+)", self.log.read_text())
        self.first_step = int(resumed.group(1)) if resumed else 0
        return code

    def at(self, place: str) -> list[int]:
        return [number for where, number in self.seen if where == place]

    @property
    def last_done(self) -> int:
        """The last step that was completed."""
        return max(self.at("action"), default=self.first_step)

    def result(self) -> Any:
        return json.loads((self.directory / "result.json").read_text())


def is_alive(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def serve(cache: str) -> Any:
    """Forks a process for each request; returns, in it, the request."""
    import grain.python  # noqa: F401
    from jax._src import xla_bridge

    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    assert not xla_bridge._backends, "with a backend, no process can be forked"
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


def do_job(request: Any) -> None:
    directory, number = pathlib.Path(request["directory"]), request["number"]
    log = os.open(directory.parent / f"{directory.name}.log.{number}", os.O_WRONLY | os.O_CREAT)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    logging.set_verbosity(logging.INFO)
    pipe = os.open(directory / f"progress.{number}", os.O_WRONLY)
    tell = lambda place, number: os.write(pipe, f"{place} {number}\n".encode())
    result = JOBS[request["job"]](directory, tell, **request["options"])
    (directory / "result.json").write_text(json.dumps(result))


def end_with(function: Callable[[Any], None], argument: Any) -> None:
    """Calls a function, and ends the process with its exit code, but at once: what a run began, it has to end."""
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


# What such a process does --------------------------------------------------------------------------------


class ChaosError(RuntimeError):
    pass


def run_whole(directory, tell, *, at=None, pace=0.0, **options):
    """Runs the experiment, or goes on with it.

    Args:
      at: a place, which visit to it, and what happens there: the name of a signal, "raise" or "sleep".
      pace: how many seconds each step takes at least.
    """
    visits = collections.Counter()

    def watch(place, number):
        tell(place, number)
        visits[place] += 1
        if at is not None and at[:2] == [place, visits[place]]:
            if at[2] == "raise":
                raise ChaosError(f"at {place} {number}")
            time.sleep(PATIENCE_SECS) if at[2] == "sleep" else os.kill(os.getpid(), getattr(signal, at[2]))
        if place == "step":
            time.sleep(pace)

    write_seal = seal.write

    def write_and_tell(path, *args):
        watch("save", 0)  # In Orbax's thread, in the midst of a save.
        write_seal(path, *args)

    seal.write = write_and_tell
    result = whole_run.run(directory, watch=watch, **options)
    tell("returned", 0)
    return result


def damage_many(directory, tell, *, count, seed):
    """Damages the newer of two checkpoints in many copies of them; returns what went wrong."""
    program = whole_run.make_program()
    whole = whole_run.run(directory / "whole", program=program, save=5)
    assert checkpoint.all_steps(directory / "whole" / "checkpoints") == [5, 10]
    rng, problems, state = random.Random(seed), [], program.state
    saved = {
        step: whole_run.digests(checkpoint.restore(directory / "whole/checkpoints", step, state)) for step in (5, 10)
    }
    for number in range(count):
        copy = directory / "copy"
        shutil.copytree(directory / "whole", copy)
        (copy / "checkpoints" / "STOPPED").unlink()
        what, path = damage(copy / "checkpoints" / "10", rng)
        where = f"{number}: {what}"
        try:
            if number % 25 == 0:
                resumed = whole_run.run(copy, program=program, save=5)
                if (resumed["state"], resumed["history"]) != (whole["state"], whole["history"]):
                    problems.append(f"{where}: resumed, it ends otherwise")
                if checkpoint.all_steps(copy / "checkpoints") != [5, 10] or seal.problems(copy / "checkpoints/10"):
                    problems.append(f"{where}: resumed, the step was not saved again")
            else:
                restored, step = checkpoint.restore_newest(copy / "checkpoints", state)
                is_harmless = step == 10 and path.name in NOT_SEALED
                if whole_run.digests(restored) != saved[step] or not (step == 5 or is_harmless):
                    problems.append(f"{where}: step {step} was restored")
                if step == 5 and not (copy / "checkpoints" / "damaged" / "10").exists():
                    problems.append(f"{where}: it was not moved")
                if step == 5 and number % 10 == 1:
                    with contextlib.closing(checkpoint.CheckpointWriter(copy / "checkpoints")) as writer:
                        writer.save(10, state)
                    if checkpoint.restore_newest(copy / "checkpoints", state)[1] != 10:
                        problems.append(f"{where}: the step can't be saved again")
        except Exception:
            problems.append(f"{where}: {traceback.format_exc()}")
        shutil.rmtree(copy)
    return problems


def end_everywhere(directory, tell):
    """Ends runs at each place by an exception, and by SIGTERM, and goes on with them; returns what then differs."""
    # Not by threads: a signal from one may come when the run is over.
    run = functools.partial(whole_run.run, source="index", program=whole_run.make_program(), save=4, background=False)
    visits, problems = collections.Counter(), {}
    whole = run(directory / "whole", watch=lambda *place: visits.update([place]))
    del visits["compile", 0]  # That was once.
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

        broken, writer = directory / "broken", whole_run.Writer(watch)
        with contextlib.suppress(ChaosError, SystemExit):
            run(broken, watch=watch, writer=writer)
        saved = newest_step(broken)
        resumed = run(broken)
        expected = {**whole, "ids": whole["ids"][saved:]}
        resumed["written"] = writer.written + resumed["written"]
        differ = [name for name in whole if resumed[name] != expected[name]]
        problems[f"{how} at {place[0]} {place[1]}, visit {visit}"] = differ if len(seen) >= visit else ["it never came"]
        shutil.rmtree(broken)
    return problems


def resume_everywhere(directory, tell):
    """Goes on from each step, and from the start and the end, with each source and prefetch; returns what differs."""
    program, problems = whole_run.make_program(), {}
    for source, prefetch in itertools.product([name for name in whole_run.SOURCES if name != "many"], range(3)):
        run = functools.partial(whole_run.run, source=source, prefetch=prefetch, program=program)
        whole = run(directory / "whole")
        for step in range(11):
            target = whole_run.as_of(step, directory / "whole", directory / "resumed")
            resumed = run(target, saves=False)
            expected = {**whole, "ids": whole["ids"][step:]}
            expected["written"] = [row for row in whole["written"] if row[0] > step]
            where = f"{source} with prefetch {prefetch} from step {step}"
            problems[where] = [name for name in whole if resumed[name] != expected[name]]
            shutil.rmtree(target)
        shutil.rmtree(directory / "whole")
    return problems


# Orbax writes these, or a part of them, at the commit, after the seal. Nothing is read of that part.
NOT_SEALED = ("_CHECKPOINT_METADATA", "commit_success.txt")


def damage(path: pathlib.Path, rng: random.Random) -> tuple[str, pathlib.Path]:
    """Damages one file of a checkpoint; returns what was done, and to which."""
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


def reuse_donated(directory, tell):
    """Reuses states that were donated; returns the errors, or what happened instead."""
    jax.config.update("jax_num_cpu_devices", 4)
    found, batch = {}, whole_run.batch_of(0)
    for devices in (1, 2, 4):
        program = whole_run.make_program(devices=devices)
        step = program.train_step
        step.ids = []
        eval_loop = jaxloop.EvalLoop(program.eval_step)
        train = lambda state, step=step: jaxloop.TrainLoop(step)(state, iter([batch]), 1)
        calls = {
            "TrainLoop": train,
            "Step": lambda state, step=step: step(state, batch),
            "EvalLoop": lambda state, loop=eval_loop: loop(state, iter([batch])),
            "OuterLoop": lambda state, step=step: jaxloop.OuterLoop(jaxloop.TrainLoop(step))(state, [batch], 1),
        }
        for name, call in calls.items():
            state = jax.tree.map(jnp.copy, program.state)
            train(state)
            try:
                found[f"{name} {devices}"] = f"returned {call(state)}"
            except Exception as error:
                found[f"{name} {devices}"] = f"{type(error).__name__}: {error}"
            tell("donated", devices)
    return found


def run_for_long(directory, tell, *, steps):
    """Runs many steps; returns what is left of them."""
    compilations = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, secs, **kwargs: compilations.append(name) if "backend_compile" in name else None
    )
    program = whole_run.make_program()
    sizes = []

    class Measure(jaxloop.Action):
        uses_outputs = False

        def __call__(self, state, outputs, *, step_num, **kwargs):
            pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
            sizes.append((step_num, pages * os.sysconf("SC_PAGE_SIZE") / 2**20, len(compilations)))
            tell("action", step_num)

    class Forgetful(whole_run.Writer):
        def write_scalars(self, step, scalars):
            pass

    run = functools.partial(whole_run.run, program=program, source="many", keep=2, writer=Forgetful())
    files = lambda: sorted(
        str(each.readlink()) for each in pathlib.Path("/proc/self/fd").iterdir() if each.is_symlink()
    )
    names = lambda: (each.read_text().strip() for each in pathlib.Path("/proc/self/task").glob("*/comm"))
    threads = lambda: sorted(
        name for name in names() if name != "ts_pool_worker"
    )  # TensorStore's pool fills by and by.
    run(directory / "warm", total=100, loop_steps=50, save=10)
    before = threads(), files(), sorted(map(str, threading.enumerate()))
    measure = [Measure(jaxloop.every(steps // 10))]
    run(directory / "long", total=steps, loop_steps=steps // 10, save=steps // 10, more_actions=measure)
    after = threads(), files(), sorted(map(str, threading.enumerate()))
    return {"sizes": sizes, "before": before, "after": after}


JOBS: dict[str, Callable[..., Any]] = {
    "run": run_whole,
    "damage": damage_many,
    "donated": reuse_donated,
    "end_everywhere": end_everywhere,
    "resume_everywhere": resume_everywhere,
    "long": run_for_long,
    "pipeline": pipelines.run,
    "copies": copies.resume_from_each,
    "spikes": spikes.run,
    "without_spikes": spikes.without,
}

# How runs end --------------------------------------------------------------------------------------------

OPTIONS = [
    {"source": "index", "total": 10, "save": 2, "pace": 0.02},
    {"source": "grain", "prefetch": 2, "total": 12, "save": 3, "pace": 0.03},
    {"source": "list", "total": 20, "epochs": 2, "loop_steps": None, "save": 2, "keep": 3, "pace": 0.02},
    {"source": "generator", "total": 12, "save": 1, "keep": 2, "pace": 0.01},
]


def newest_step(directory: pathlib.Path) -> int:
    return max(checkpoint.all_steps(directory / "checkpoints"), default=0)


def history_of(directory: pathlib.Path) -> list[Any]:
    """The file of the history, without the times."""
    rows = [json.loads(line) for line in (directory / "history.jsonl").read_text().splitlines()]
    return [without_time(row) for row in rows]


def without_time(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_time(each) for name, each in value.items() if name != "time"}
    return value


@dataclasses.dataclass
class Whole:
    """A run without a break."""

    result: Any
    history: list[Any]
    written: list[int]  # The steps of its rows.
    secs: float


class Arena:
    """Where runs are broken.

    Args:
      directory: for all that they write.
    """

    def __init__(self, directory: pathlib.Path):
        self.directory = directory
        self.server = ForkServer(directory)
        self._wholes: dict[str, Whole] = {}
        self._count = 0

    def close(self) -> None:
        self.server.close()

    def new_directory(self, name: str) -> pathlib.Path:
        self._count += 1
        return self.directory / f"{name}_{self._count}"

    def whole(self, options: dict[str, Any], job: str = "run", begins: str = "action") -> Whole:
        """Runs a job without a break, once; `begins` is the place from which its seconds count."""
        key = json.dumps(options)
        if key not in self._wholes:
            directory = self.new_directory("whole")
            child = self.server.start(directory, job, **options)
            child.wait_for(begins)
            start = time.monotonic()
            assert child.wait() == 0, child.log.read_text()
            secs = time.monotonic() - start
            rows = history_of(directory) if (directory / "history.jsonl").exists() else []
            self._wholes[key] = Whole(child.result(), rows, child.at("writer"), secs)
        return self._wholes[key]

    def finish(self, children: list[Child], directory: pathlib.Path, options: dict[str, Any], exact: bool) -> list[str]:
        """Goes on with a run that was broken, to its end; returns in what it differs from one that was not.

        Args:
          children: the processes that have run it so far.
          exact: whether they could end in order, so that no row was written twice.
        """
        child = self.server.start(directory, **options)
        if child.wait() != 0:
            return [f"the last run failed: {child.log.read_text()[-3000:]}"]
        children, whole, result, problems = [*children, child], self.whole(options), child.result(), []
        if result["state"] != whole.result["state"]:
            problems.append("the state differs")
        if result["history"] != whole.result["history"]:
            problems.append(f"the history: {first_difference(result['history'], whole.result['history'])}")
        if history_of(directory) != whole.history:
            problems.append(f"the file of the history: {first_difference(history_of(directory), whole.history)}")
        ids = whole.result["ids"]
        for each in children:  # Those that were killed, too.
            if each.at("step") != ids[each.first_step :][: len(each.at("step"))]:
                problems.append(f"the data from step {each.first_step}: {each.at('step')} instead of {ids}")
        if child.first_step + len(child.at("step")) != len(ids):
            problems.append(f"the last run trained on {child.at('step')} from step {child.first_step}")
        written = [step for each in children for step in each.at("writer")]
        if (sorted(written) if exact else sorted(set(written))) != sorted(
            whole.written if exact else set(whole.written)
        ):
            problems.append(f"rows were written for {written} instead of {whole.written}")
        problems += [f"left over: {path}" for path in leftovers(directory)]
        return problems


def first_difference(found: list[Any], expected: list[Any]) -> str:
    pairs = itertools.zip_longest(found, expected)
    return next(f"{one} instead of {two}" for one, two in pairs if one != two)


def leftovers(directory: pathlib.Path) -> list[pathlib.Path]:
    is_left = lambda name: "orbax-checkpoint-tmp" in name or name.endswith(".lock") or name.startswith(".write_probe")
    return [path for path in directory.rglob("*") if is_left(path.name)]


# Faults --------------------------------------------------------------------------------------------------

# How many faults there were in a run, and in what it then differed from one without.
Broken = Iterator[tuple[int, list[str]]]


def sigkill(arena: Arena, count: int, seed: int, per_run: int = 4) -> Broken:
    """Kills runs at random moments, mostly after the first step, and starts them again."""
    rng, killed, number = random.Random(seed), 0, 0
    while killed < count:
        options, directory = OPTIONS[number % len(OPTIONS)], arena.new_directory("sigkill")
        whole, children, problems, number = arena.whole(options), [], [], number + 1
        kills = 0
        while kills < min(per_run, count - killed):
            child = arena.server.start(directory, **options)
            if rng.random() < 0.75:
                child.wait_for("step")
            time.sleep(rng.uniform(0, 0.6 * whole.secs))
            child.send(signal.SIGKILL)
            code = child.wait()
            children.append(child)
            if code == 0:  # It was done before.
                break
            if code != -signal.SIGKILL:
                problems.append(f"the run ended with {code}: {child.log.read_text()[-3000:]}")
                break
            kills += 1
            problems += too_much_lost(child, options["save"], saves_under_way=1)
        killed += kills
        if kills or problems:
            yield kills, problems + arena.finish(children, directory, options, exact=False)


def data_pipelines(arena: Arena, count: int, seed: int, per_run: int = 2) -> Broken:
    """Kills runs over data pipelines of tf.data, Grain and PyTorch in each API at random moments, and resumes them."""
    modules, missing = pipelines.libraries()
    for name in missing:
        print(f"  pipelines: {name} is not installed, and its pipelines are skipped", flush=True)
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
        whole, children = arena.whole(options, "pipeline", "step"), []
        while len(children) < min(per_run, count - killed):
            child = start_run()
            if child.wait_for("step"):
                time.sleep(rng.uniform(0, 0.7 * whole.secs))
            child.send(signal.SIGKILL)
            if child.wait() != -signal.SIGKILL:  # It had ended, or failed, which the next one does too.
                break
            children.append(child)
        if not children:
            continue
        last_child = start_run()
        code = last_child.wait()
        children.append(last_child)
        said = any(re.search(pipelines.WARNING, child.log.read_text()) for child in children)
        problems, has_begun = [], any(child.first_step for child in children)
        if code != 0:
            problems.append(f"the last run failed: {last_child.log.read_text()[-3000:]}")
        elif not pipelines.PIPELINES[name].warns:
            result = last_child.result()
            problems += [
                f"{what}: {first_difference(*map(as_list, (result[what], whole.result[what])))}"
                for what in ("leaves", "history", "points")
                if result[what] != whole.result[what]
            ]
            problems += ["it warned that a resume is not exact"] if said else []
        elif not said:
            problems.append("it did not warn that a resume is not exact")
        killed += len(children) - 1
        kinds[pipelines.PIPELINES[name].library, api, "resumed" if has_begun else "not saved before"] += (
            len(children) - 1
        )
        yield len(children) - 1, [f"{name}, {api}: {problem}" for problem in problems]
    for kind, number in sorted(kinds.items()):
        print(f"  pipelines: {number:3} kills in {', '.join(kind)}", flush=True)


def as_list(value: Any) -> list[Any]:
    return sorted(value.items()) if isinstance(value, dict) else value


def too_much_lost(child: Child, save: int, saves_under_way: int) -> list[str]:
    """The save under way may be lost, and what came after it; the one before that was committed first."""
    saved = newest_step(child.directory)
    last_begun = max(child.last_done - 1, 0) // save * save  # That of the last step may not have begun.
    if saved < last_begun - saves_under_way * save:
        return [f"step {child.last_done} was done, and the newest checkpoint is of step {saved}, with {save=}"]
    return []


def signals(arena: Arena, count: int, seed: int, per_run: int = 4) -> Broken:
    """Sends SIGTERM and SIGINT at random moments, and in the midst of a compilation, an evaluation and a save."""
    rng, sent, number, kinds = random.Random(seed), 0, 0, set()
    options = OPTIONS[0]
    moments = [
        ["compile", 1],
        None,
        ["eval", 1],
        None,
        ["save", 1],
        None,
        ["writer", 1],
        None,
        ["compile", 2],
        ["eval", 2],
    ]
    whole = arena.whole(options)
    while sent < count:
        directory, children, problems, here = arena.new_directory("signals"), [], [], []
        while len(here) < min(per_run, count - sent):
            signum, moment = [signal.SIGTERM, signal.SIGINT][number // 2 % 2], moments[number % len(moments)]
            number += 1
            child = arena.server.start(directory, **options, at=moment and [*moment, signum.name])
            if moment is None:
                child.wait_for("data")
                time.sleep(rng.uniform(0, whole.secs / 2))
                child.send(signum)
            code = child.wait()
            children.append(child)
            if code != 143 and (directory / "checkpoints" / "STOPPED").exists():  # The run was over.
                break
            here.append((signum.name, moment, child.first_step, child.last_done))
            problems += problems_of_signal(child, signum, code)
        problems += arena.finish(children, directory, options, exact=True)
        sent += len(here)
        kinds.update(name for name, *_ in here)
        if sent >= count and len(kinds) < 2:
            problems.append(f"of the two signals only {kinds} came")
        yield len(here), [*problems, str(here)] if problems else []


def problems_of_signal(child: Child, signum: int, code: int) -> list[str]:
    problems = []
    if code != (143 if signum == signal.SIGTERM else 0):
        problems.append(f"after {signum!r} the exit code is {code}: {child.log.read_text()[-3000:]}")
    begun = child.first_step + len(child.at("step"))
    if newest_step(child.directory) != begun or child.last_done != begun:
        problems.append(f"step {newest_step(child.directory)} was saved, {child.last_done} done and {begun} begun")
    if signum == signal.SIGINT and code == 0 and child.result()["step"] != begun:
        problems.append(f"step {child.result()['step']} was returned, and {begun} done")
    return problems + [f"left over: {path}" for path in leftovers(child.directory)]


def damaged(arena: Arena, count: int, seed: int) -> Broken:
    """Damages the newest checkpoint: a file deleted, emptied, truncated, or a bit of it flipped."""
    child = arena.server.start(arena.new_directory("damage"), "damage", count=count, seed=seed)
    if child.wait(PATIENCE_SECS + count) != 0:
        yield count, [child.log.read_text()[-3000:]]
        return
    problems = child.result()
    yield count - len(problems), []
    for problem in problems:
        yield 1, [problem]


def disk_full(arena: Arena, count: int, seed: int) -> Broken:
    """Fills the disk, or lets the system refuse longer files, in the midst of a run; then there is room again."""
    rng, options = random.Random(seed), OPTIONS[0]
    arena.whole(options)
    for _ in range(count):
        directory = arena.new_directory("disk_full")
        with small_disk(directory) as fill:
            room = rng.randrange(0, 500_000)
            fill(room)
            child = arena.server.start(directory, **options)
            code, text = child.wait(), child.log.read_text()
            problems = [] if code == 1 else [f"with {room} bytes, the exit code is {code}: {text[-3000:]}"]
            if code == 1 and "No space left" not in text:
                problems.append(f"with {room} bytes, another error: {text[-3000:]}")
            fill(None)
            yield 1, problems + arena.finish([child], directory, options, exact=False)


@contextlib.contextmanager
def small_disk(directory: pathlib.Path) -> Iterator[Callable[[int | None], None]]:
    """A file system of its own; gives a function that leaves so many bytes of it, or all."""
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=30m", "tmpfs", str(directory)], check=True)

    def fill(room: int | None) -> None:
        filler = directory / "filler"
        filler.unlink(missing_ok=True)
        if room is not None:
            stat = os.statvfs(directory)
            filler.write_bytes(b"\0" * max(stat.f_bavail * stat.f_frsize - room, 0))

    try:
        yield fill
    finally:
        subprocess.run(["umount", str(directory)], check=True)


def lost_directories(arena: Arena, count: int, seed: int) -> Broken:
    """Moves or replaces the directory of the checkpoints during a run, or takes the inodes; then undoes it."""
    options = {**OPTIONS[0], "pace": 0.1}
    arena.whole(options)
    for number in range(count):
        name = list(directories.LOSSES)[number % len(directories.LOSSES)]
        directory = arena.new_directory(name)
        with directories.few_inodes(directory):
            child = arena.server.start(directory, **options)
            child.wait_for("action")
            with directories.LOSSES[name](directory):
                code, text = child.wait(), child.log.read_text()
            problems = [] if code == 1 else [f"{name}: the exit code is {code}: {text[-3000:]}"]
            if "CheckpointError: Saving the checkpoint of step" not in text:
                problems.append(f"{name}: another error: {text[-3000:]}")
            yield 1, problems + arena.finish([child], directory, options, exact=False)


def impostors(arena: Arena, count: int, seed: int) -> Broken:
    """Puts something else in the place of the lock file, which the run must refuse or take over, and not wait for."""
    options = OPTIONS[0]
    arena.whole(options)
    for number in range(count):
        name = list(directories.IMPOSTORS)[number % len(directories.IMPOSTORS)]
        make, words = directories.IMPOSTORS[name]
        directory = arena.new_directory("impostor")
        place = directory / "checkpoints" / directories.LOCK
        place.parent.mkdir(parents=True)
        make(place)
        if words is None:
            yield 1, arena.finish([], directory, options, exact=True)
            continue
        child = arena.server.start(directory, **options)
        code, text = child.wait(), child.log.read_text()
        problems = [] if code == 1 and words in text else [f"{name}: it ended with {code}: {text[-3000:]}"]
        if [path.name for path in place.parent.iterdir()] != [place.name]:
            problems.append(f"{name}: there is {list(place.parent.iterdir())}")
        directories.remove(place)
        yield 1, problems + arena.finish([child], directory, options, exact=True)


def two_trainers(arena: Arena, count: int, seed: int) -> Broken:
    """Starts a second trainer in a directory; then kills the first, and starts another."""
    for _ in range(count):
        options, directory = OPTIONS[0], arena.new_directory("two")
        arena.whole(options)
        first = arena.server.start(directory, **options, at=["step", 5, "sleep"])
        first.wait_for("step")
        second = arena.server.start(directory, **options)
        code, text = second.wait(), second.log.read_text()
        problems = []
        if code != 1 or f"is in use by process {first.pid} on" not in text or second.seen:
            problems.append(f"the second one ended with {code}: {text[-3000:]}")
        if not is_alive(first.pid):
            problems.append(f"the first one ended: {first.log.read_text()[-3000:]}")
        first.send(signal.SIGKILL)
        first.wait()
        if not (directory / "checkpoints" / ".trainer.lock").exists():
            problems.append("the lock is not left over, so this is no test that it is taken over")
        yield 1, problems + arena.finish([first], directory, options, exact=False)


DONATED = re.compile(
    r"ValueError: .* got a state that was already donated to .*(TrainLoop|NoisyStep).*: its buffers "
    r"\(.*(params|step).*\) were reused.*\n"
    r"Use the state that that call returned\. To keep a copy, make it before the call"
)


def donated(arena: Arena, count: int, seed: int) -> Broken:
    """Reuses donated states, on 1, 2 and 4 devices."""
    child = arena.server.start(arena.new_directory("donated"), "donated")
    code = child.wait()
    if code != 0:
        yield count, [f"the exit code is {code}: {child.log.read_text()[-3000:]}"]
        return
    for call, text in child.result().items():
        yield 1, [] if DONATED.match(text) else [f"{call}: {text}"]


def ends(arena: Arena, count: int, seed: int) -> Broken:
    """Ends a run at each of its places; the count is given by the run."""
    yield from compare_in_one_process(arena, "end_everywhere", count)


def resumes(arena: Arena, count: int, seed: int) -> Broken:
    """Goes on from every step of each source with each prefetch; the count is given by those."""
    yield from compare_in_one_process(arena, "resume_everywhere", count)


def copied(arena: Arena, count: int, seed: int) -> Broken:
    """Resumes from incomplete and foreign copies of checkpoints, and with a damaged file of the history."""
    yield from compare_in_one_process(arena, "copies", count, num_cases=count, seed=seed)


def compare_in_one_process(arena: Arena, job: str, count: int, **options: Any) -> Broken:
    """Does a job that returns, for each run that it broke, in what it then differed."""
    child = arena.server.start(arena.new_directory(job), job, **options)
    if child.wait(5 * PATIENCE_SECS) != 0:
        yield count, [child.log.read_text()[-3000:]]
        return
    for where, differ in child.result().items():
        yield 1, [f"{where}: {', '.join(differ)} differ"] if differ else []


def processes(arena: Arena, count: int, seed: int) -> Broken:
    """Breaks one of two processes, in all ways in turn, and goes on, now and then in another layout."""
    rng = random.Random(seed)
    whole = arena.new_directory("whole")
    whole.mkdir(parents=True)
    job, _ = launching.launch(launching.JOB, whole, processes=2, devices=2)
    assert job.returncode == 0, job.stdout + job.stderr
    expected = launching.final_of(whole)
    for number in range(count):
        fault = list(launching.FAULTS)[number % len(launching.FAULTS)]
        directory, at, place = arena.new_directory(fault), rng.randrange(2, 58), rng.randrange(2)
        then = rng.choice([(2, 2), (2, 2), (1, 4), (4, 1)])
        directory.mkdir()
        problems = launching.break_and_go_on(directory, fault, at=at, place=place, then=then)
        if not problems:
            final = launching.final_of(directory)
            problems = [f"{name} differs" for name in expected if not np.array_equal(final[name], expected[name])]
        yield 1, [f"{fault} in process {place} at step {at}, then {then}: {problem}" for problem in problems]


def stuck(arena: Arena, count: int, seed: int) -> Broken:
    """Sends two signals to a run that is stuck: in a writer, in its data, in native code, or that has workers."""
    rng = random.Random(seed)
    for number in range(count):
        kind, directory = stubborn.KINDS[number % len(stubborn.KINDS)], arena.new_directory("stuck")
        directory.parent.mkdir(parents=True, exist_ok=True)
        signums, pause = rng.choices([signal.SIGINT, signal.SIGTERM], k=2), rng.uniform(0.15, 1.0)
        problems = stubborn.Stubborn(directory, kind).problems(signums, pause)
        yield 1, [f"{kind}, {signums}: {problem}" for problem in problems]


def launchers(arena: Arena, count: int, seed: int) -> Broken:
    """Ends a launcher by a signal: its processes end too, and so does what they have started."""
    signums = [signal.SIGHUP, signal.SIGKILL, signal.SIGTERM]
    for number in range(count):
        directory = arena.new_directory("launcher")
        directory.parent.mkdir(parents=True, exist_ok=True)
        problems = leaving.problems_of_killing(directory, signums[number % len(signums)])
        yield 1, [f"{signums[number % len(signums)]}: {problem}" for problem in problems]


def event_files(arena: Arena, count: int, seed: int, per_run: int = 4) -> Broken:
    """Kills runs at random steps: in the end, TensorBoard shows each point once."""
    rng, done, expected = random.Random(seed), 0, {}
    while done < count:
        api = rng.choice(["objects", "functions"])
        if api not in expected:
            expected[api] = summaries.kill_and_resume(arena.new_directory("whole"), api, [])
        kills = sorted(rng.choices(range(1, summaries.NUM_STEPS), k=min(per_run, count - done)))
        found = summaries.kill_and_resume(arena.new_directory("killed"), api, kills)
        names = [name for name in {**found, **expected[api]} if found.get(name) != expected[api].get(name)]
        done += len(kills)
        yield len(kills), [f"{api}, killed at {kills}: {name}: {found.get(name)}" for name in names]


def trackers(arena: Arena, count: int, seed: int) -> Broken:
    """Kills runs at random moments: in the end, each tracker that is installed shows the points of the history."""
    for number, tracker in enumerate(TRACKERS):
        kills = count // len(TRACKERS) + (number < count % len(TRACKERS))
        command = [sys.executable, tracking.__file__, str(arena.new_directory(tracker)), tracker, str(kills), str(seed)]
        run = subprocess.run(command, capture_output=True, text=True)
        result = json.loads(run.stdout.splitlines()[-1]) if run.returncode == 0 else {"problems": [run.stderr]}
        yield kills, result["problems"]


def transformer(arena: Arena, count: int, seed: int) -> Broken:
    """Kills the transformer's example in one of two processes."""
    for _ in range(count):
        yield 1, launching.kill_transformer_and_go_on(arena.new_directory("transformer"))


def soak(arena: Arena, count: int, seed: int, per_run: int = 20) -> Broken:
    """Mixes all of them."""
    rng, done = random.Random(seed), 0
    while done < count:
        options = {"source": "list", "total": 180, "epochs": 15, "loop_steps": None, "save": 3, "keep": 4, "pace": 0.01}
        directory, whole, children, problems = arena.new_directory("soak"), arena.whole(options), [], []
        faults, happened = 0, []
        while faults < min(per_run, count - done) and not (directory / "checkpoints" / "STOPPED").exists():
            what = rng.choice(["SIGKILL", "SIGTERM", "SIGINT", "raise", "damage", "two"])
            place = rng.choice(["step", "action", "eval", "writer", "save"])
            at = [place, rng.randint(1, 6), "raise"] if what == "raise" else None
            child = arena.server.start(directory, **options, at=at)
            child.wait_for("step")
            children.append(child)
            time.sleep(rng.uniform(0, whole.secs / 12))
            if what == "two":
                second = arena.server.start(directory, **options)
                if second.wait() != 1 and not second.seen:
                    problems.append(f"a second one was let in: {second.log.read_text()[-3000:]}")
            if what != "raise":
                child.send(getattr(signal, what) if what.startswith("SIG") else signal.SIGKILL)
            code = child.wait()
            faults += 1
            happened.append((what, at, child.first_step, child.last_done, code))
            if (directory / "checkpoints" / "STOPPED").exists():
                break
            expected = {"SIGTERM": 143, "SIGINT": 0, "raise": 1}.get(what, -signal.SIGKILL)
            if code != expected:
                problems.append(f"after {what} {at} it ended with {code}: {child.log.read_text()[-3000:]}")
            is_orderly = what in ("SIGTERM", "SIGINT")
            problems += too_much_lost(child, options["save"], saves_under_way=0 if is_orderly else 1)
            checkpoints = directory / "checkpoints"
            if what == "damage" and len(checkpoint.all_steps(checkpoints)) > 1:
                happened.append(damage(checkpoints / str(newest_step(directory)), rng)[0])
        done += faults
        found = problems + arena.finish(children, directory, options, exact=False)
        yield faults, [*found, str(happened)] if found else []


def goodput(arena: Arena, count: int, seed: int, most_stops: int = 4) -> Broken:
    """Kills and stops runs at random moments, and compares their goodput with what was measured from outside."""
    options = {"source": "many", "total": 150, "loop_steps": 10, "save": 7, "keep": 2, "pace": 0.02}
    rng, whole = random.Random(seed), arena.whole({**options})
    for _ in range(count):
        directory, children, problems, most, repeated, began = arena.new_directory("goodput"), [], [], 0, 0, 0.0
        for number in itertools.count():
            child = arena.server.start(directory, **options)
            began = time.time() if number == 0 else began
            children.append(child)
            if number < most_stops:
                wait_for_start(directory, number + 1)  # Nothing can be known of a process that ended before.
                if rng.random() < 0.75:
                    child.wait_for("step")
                time.sleep(rng.uniform(0, whole.secs / 3))
                child.send(rng.choice([signal.SIGKILL, signal.SIGTERM]))
            code = child.wait()
            steps = child.at("step")
            reached = child.first_step + len(steps)
            repeated += max(min(reached, most) - child.first_step, 0) if steps else 0
            most = max(most, reached)
            if code == 0:
                break
            if code not in (-signal.SIGKILL, -signal.SIGTERM, 143):  # SIGTERM may come before the run has its handler.
                problems.append(f"it ended with {code}: {child.log.read_text()[-3000:]}")
                break
            time.sleep(rng.uniform(0, 0.5))
        # The last process writes its result when its run has ended. Its exit takes long on a busy machine.
        secs, found = os.stat(directory / "result.json").st_mtime - began, jaxloop.goodput(directory)
        expected = options["total"], repeated, len(children)
        # A process may be killed after it has counted a step, and before the step has told us that it began.
        untold = found.repeated_steps - repeated
        if (found.steps, found.starts) != (expected[0], expected[2]) or not 0 <= untold < len(children):
            problems.append(f"it counts {found.steps, found.repeated_steps, found.starts} instead of {expected}")
        if abs(found.total - secs) > 0.01 * secs:
            problems.append(f"its parts add up to {found.total:.3f} s instead of {secs:.3f} s:\n{found}")
        yield 1, problems


def wait_for_start(directory: pathlib.Path, number: int) -> None:
    """Waits until the run log has the line of the n-th start."""
    end = time.monotonic() + PATIENCE_SECS
    while len([each for each in run_log.read(directory) if each.started]) < number:
        if time.monotonic() > end:
            raise TimeoutError(f"{directory} has no start {number}")
        time.sleep(0.002)


COMMANDS = "save", "log_every=7", "log_every=3", "summary.interval=5", "checkpoint.interval=11", "profile=2"


def told(arena: Arena, count: int, seed: int, kills: int = 3) -> Broken:
    """Commands runs at random moments, and kills them; compares each with one that repeats the commands unbroken."""
    rng = random.Random(seed)
    for number in range(count):
        options: dict[str, Any] = {"source": "many", "total": 150, "loop_steps": [10, None][number % 2], "save": 7}
        options |= {"keep": 1000, "pace": 0.02, "steps_per_dispatch": [1, 4][number // 2 % 2]}
        directory, problems, given, answers = arena.new_directory("told"), [], [], []
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
            answers += commands.answers(directory)  # A run without a checkpoint starts again without its commands.
            if code not in (0, -signal.SIGKILL) or (attempt == kills and code):
                problems.append(f"it ended with {code}: {child.log.read_text()[-3000:]}")
            if code == 0:
                break
        found, first = child.result(), checkpoint.all_steps(directory / "checkpoints")[0]
        again = whole_run.as_of(first, directory, arena.new_directory("told_again"))
        shutil.copy(directory / "commands.jsonl", again)
        unbroken = arena.server.start(again, **options)
        if unbroken.wait() != 0:
            problems.append(f"the unbroken one failed: {unbroken.log.read_text()[-3000:]}")
        for what in ("state", "history"):
            if found[what] != unbroken.result()[what]:
                problems.append(f"the {what} differs: {commands.answers(directory)}")
        rows = [(elapsed["steps"], logs["command"]) for elapsed, logs in found["history"] if "command" in logs]
        done = [(answer.step, answer.command) for answer in commands.answers(directory) if answer.error is None]
        if sorted(rows) != sorted(done):
            problems.append(f"the history has {rows}, and the answers are {done}")
        if lost := [each for each in given if each is not None and each not in answers]:
            problems.append(f"answers were lost: {lost}")
        yield 1, problems


def spiking(arena: Arena, count: int, seed: int, kills: int = 2) -> Broken:
    """Kills runs whose loss spikes; compares each with a run whose data never had the batches that it left out."""
    rng = random.Random(seed)
    for number in range(count // spikes.SPIKES):
        options, directory = {"seed": seed * 1000 + number}, arena.new_directory("spikes")
        problems = []
        for attempt in range(kills + 1):
            child = arena.server.start(directory, "spikes", **options)
            child.wait_for("action")
            if attempt < kills:
                time.sleep(rng.uniform(0, 2))
                child.send(signal.SIGKILL)
            code = child.wait()
            if code not in (0, -signal.SIGKILL) or (attempt == kills and code):
                problems.append(f"it ended with {code}: {child.log.read_text()[-3000:]}")
            if code == 0:
                break
        if not problems:
            found = child.result()
            if missing := set(spikes.spikes_of(options["seed"])) - set(found["left_out"]):
                problems.append(f"the spikes {missing} were not left out")
            options |= {"left_out": found["left_out"], "rewinds": directory.name}
            other = arena.server.start(arena.new_directory("without_spikes"), "without_spikes", **options)
            if other.wait() != 0:
                problems.append(f"the run without the batches failed: {other.log.read_text()[-3000:]}")
            else:
                problems += other.result()["problems"]
                problems += [
                    f"the {what} differs" for what in ("state", "history") if found[what] != other.result()[what]
                ]
        yield spikes.SPIKES, problems


def topology_checks(arena: Arena, count: int, seed: int) -> Broken:
    """Compares the verdicts about steps on TPUs, around the largest batch that fits."""
    for number in range(count):
        yield 1, topologies.problems_of(seed + number)


def hangs(arena: Arena, count: int, seed: int) -> Broken:
    """Has each place of a run hang, alone and in one of four processes; a quarter of the runs doesn't hang."""
    rng, places = random.Random(seed), [*hanging.PLACES, *hanging.HEALTHY]
    for number in range(count):
        place, processes = places[number % len(places)], 1 if number // len(places) % 2 == 0 else 4
        process = 0 if place == "save" else rng.randrange(processes)  # The first one seals a checkpoint.
        yield 1, hanging.problems_of(arena.new_directory("hang"), place, processes=processes, process=process)


def long_run(arena: Arena, count: int, seed: int) -> Broken:
    """Takes many steps, and looks what is left of them."""
    child = arena.server.start(arena.new_directory("long"), "long", steps=count)
    if child.wait(PATIENCE_SECS + count) != 0:
        yield count, [child.log.read_text()[-3000:]]
        return
    result, problems = child.result(), []
    (_, size, compiled), *_, (_, size_at_end, compiled_at_end) = result["sizes"]
    before, after = result["before"], result["after"]
    print(
        f"  long_run: {size:.1f} MiB -> {size_at_end:.1f} MiB; threads {len(before[0])} -> {len(after[0])}", flush=True
    )
    if size_at_end - size > 5:
        problems.append(f"the process grew: {result['sizes']}")
    if compiled_at_end != compiled:
        problems.append(f"something was compiled on the way: {result['sizes']}")
    for what, were, there in zip(["threads", "files", "threads of Python"], before, after, strict=True):
        left = collections.Counter(there) - collections.Counter(were)
        if len(there) > len(were):
            problems.append(f"{what} are left: {dict(left)}")
    yield count, problems


# The longest first, for two at a time are done.
PARTS: dict[str, tuple[Callable[[Arena, int, int], Broken], int]] = {
    "soak": (soak, 100),
    "signals": (signals, 100),
    "sigkill": (sigkill, 100),
    "pipelines": (data_pipelines, 100),
    "resumes": (resumes, 198),
    "ends": (ends, 88),
    "damaged": (damaged, 500),
    "copied": (copied, 100),
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
    "launchers": (launchers, 6),
    "event_files": (event_files, 12),
    "transformer": (transformer, 1),
    "donated": (donated, 12),
}


# The table -----------------------------------------------------------------------------------------------


# What was broken, how often, how many of the runs were none the worse, and how many seconds it took.
Row = tuple[str, int, int, float]
FORMAT = "{:<60} {:>6} {:>6} {:>8.1f}"


TRACKERS = [name for name in tracking.WRITERS if importlib.util.find_spec(name) is not None]
if TRACKERS:
    PARTS["trackers"] = (trackers, 20)
if importlib.util.find_spec("libtpu") is not None:
    PARTS["topologies"] = (topology_checks, 3)


def tests_of_faults(directory: pathlib.Path) -> list[Row]:
    """Runs test_faults.py and test_whole_run.py; returns a row for each test, which counts its cases."""
    report = directory / "tests.xml"
    tests = pathlib.Path(__file__).parent
    files = [str(tests / "test_faults.py"), str(tests / "test_whole_run.py")]
    command = [sys.executable, "-m", "pytest", *files, f"--junitxml={report}"]
    run = subprocess.run(command, cwd=tests.parent, capture_output=True, text=True)
    rows = collections.defaultdict(list)
    for case in xml.etree.ElementTree.parse(report).iter("testcase"):
        passed = not any(case.find(kind) is not None for kind in ("failure", "error", "skipped"))
        rows[case.get("name", "").split("[")[0]].append((passed, float(case.get("time", 0))))
    if run.returncode != 0:
        print(run.stdout[-3000:], flush=True)
    each = {name: tuple(map(sum, zip(*cases, strict=True))) for name, cases in rows.items()}
    return [(name, len(rows[name]), passed, secs) for name, (passed, secs) in each.items()]


def do_part(directory: pathlib.Path, name: str, seed: int, count: int | None) -> list[Row]:
    """Does one part; returns its rows of the table."""
    if name == "tests":
        return tests_of_faults(directory)
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
    parser.add_argument("--only", choices=[*PARTS, "tests"], action="append", help="a part")
    parser.add_argument("--count", type=int, help="how many faults of each part")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="keeps what the runs wrote")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        request = serve(args.serve)
        if request is not None:
            end_with(do_job, request)
        return 0
    # Where the shell has started this in the background, Ctrl-C would be ignored, here and in all that is started here.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    directory = pathlib.Path(tempfile.mkdtemp(prefix="chaos_"))
    print(f"seed {args.seed}, in {directory}", flush=True)
    start = time.monotonic()
    parts = [name for name in [*PARTS, "tests"] if not args.only or name in args.only]
    do_one = functools.partial(do_part, directory, seed=args.seed, count=args.count)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:  # The processes mostly wait: for disks, and for each other.
        rows = list(itertools.chain.from_iterable(pool.map(do_one, parts)))
    is_wrong = any(passed < count or count == 0 for _, count, passed, _ in rows)
    print(f"\n{'fault':<60} {'count':>6} {'passed':>6} {'seconds':>8}")
    for row in rows:
        print(FORMAT.format(*row))
    print(f"{time.monotonic() - start:.0f} s in all, seed {args.seed}: {'FAILED' if is_wrong else 'all passed'}")
    if not args.keep and not is_wrong:
        shutil.rmtree(directory)
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
