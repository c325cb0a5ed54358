"""Costs that don't occur at every step: the end of a loop, a checkpoint, waiting for data, the start of a program."""

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

import jaxloop
from benchmarks import workloads
from benchmarks.contestants import Watch, WorkloadStep, new_state
from benchmarks.lineup import DEFAULTS, REFERENCE
from benchmarks.rounds import Comparison, take_turns
from jaxloop import checkpoint
from jaxloop.models.function_step import FunctionStep

# The names of the contestants that are compared here.
BARE_SAVE, SAVE = "CheckpointManager.save of Orbax", "CheckpointAction.save"
BARE_RESTORE, RESTORE = "CheckpointManager.restore of Orbax", "checkpoint.restore"
BARE_IMPORT, IMPORT = "import jax, flax, optax", "import jaxloop"
ONE_LOOP, SHORT_LOOPS = "one loop", "loops of 10 steps"
SLOWER, PREFETCH = "the slower of the two alone", f"{DEFAULTS}, jaxloop.prefetch"


def timed(fn: Callable[[], Any]) -> float:
    """Returns the seconds that a call takes, including its work on the devices."""
    start = time.perf_counter()
    jax.block_until_ready(fn())
    return time.perf_counter() - start


def compare_functions(
    name: str, title: str, contestants: Mapping[str, Callable[[], float]], num_rounds: int, unit: str
) -> Comparison:
    """Compares functions that return seconds, by calling them in turn. The first one is the reference."""
    rounds = take_turns(contestants, num_rounds)
    seconds = {each: [results[each] for results in rounds] for each in contestants}
    return Comparison(name, title, next(iter(contestants)), seconds, unit=unit)


# The end of a loop -----------------------------------------------------------------------------------


class StampedBatches:
    """An endless iterator over batches that records the time of every hundredth batch."""

    def __init__(self, batches: Iterator[Any]):
        self._batches, self._count = batches, 0
        self.times: list[float] = []

    def __iter__(self):
        return self

    def __next__(self):
        self._count += 1
        if self._count % 100 == 50:  # Far from the ends of loops, at multiples of 100.
            self.times.append(time.perf_counter())
        return next(self._batches)


def loop_boundary(num_rounds: int = 20, num_steps: int = 8000) -> Comparison:
    """Measures the cost of ending one loop and starting the next if nothing is due in between.

    It compares the minimum time of a hundred steps that include such a boundary with that of a hundred steps without
    one. (The noise of the medians is larger than the difference.)
    """
    workload = workloads.workload("W0")
    step = WorkloadStep(workload)
    loop, never = jaxloop.TrainLoop(step), jaxloop.every(steps=10**9)

    def secs_per_hundred(loop_steps):
        batches = StampedBatches(workload.batches())
        outer_loop = jaxloop.OuterLoop(loop, log_interval=never)
        outer_loop(new_state(workload, step), batches, num_steps, loop_steps, log_train_total_steps=False)
        return min(after - before for before, after in itertools.pairwise(batches.times))

    comparison = compare_functions(
        "loop boundary",
        "100 steps of W0 that include the end of a loop, relative to 100 steps that don't",
        {"one loop": lambda: secs_per_hundred(None), "loops of 100 steps": lambda: secs_per_hundred(100)},
        num_rounds,
        unit="us",
    )
    pairs = zip(comparison.seconds["loops of 100 steps"], comparison.seconds["one loop"], strict=True)
    comparison.figures["us a boundary"] = 1e6 * statistics.median(one - other for one, other in pairs)
    return comparison


def short_loops(num_rounds: int = 8, num_steps: int = 10_000) -> Comparison:
    """Compares loops of ten steps, with nothing due at their ends, with the same number of steps in one loop."""
    workload = workloads.workload("W0")
    step = WorkloadStep(workload)

    def run(loop_steps):
        outer_loop, state = jaxloop.OuterLoop(jaxloop.TrainLoop(step), log_interval=10**9), new_state(workload, step)
        watch = Watch()
        jax.block_until_ready(
            outer_loop(state, workload.batches(), num_steps, loop_steps, log_train_total_steps=False)[0]
        )
        return watch.trained(num_steps, None)

    rounds = take_turns({ONE_LOOP: lambda: run(None), SHORT_LOOPS: lambda: run(10)}, num_rounds)
    seconds = {name: [results[name].secs_per_step for results in rounds] for name in (ONE_LOOP, SHORT_LOOPS)}
    cpu_seconds = {name: [results[name].cpu_secs_per_step for results in rounds] for name in (ONE_LOOP, SHORT_LOOPS)}
    title = f"{num_steps:,} steps of W0 in loops of ten steps, relative to one loop"
    return Comparison("short loops", title, ONE_LOOP, seconds, cpu_seconds=cpu_seconds)


# Checkpoints -----------------------------------------------------------------------------------------


def state_of_size(megabytes: int) -> dict[str, Any]:
    """Returns a state with this many matrices of 1 MB each, and a step counter."""
    key = jax.random.key(0)
    matrices = {
        f"{index:03}": jax.random.normal(jax.random.fold_in(key, index), (512, 512)) for index in range(megabytes)
    }
    return {"params": matrices, "step": jnp.int32(0)}


def checkpoint_stall(megabytes: int, num_rounds: int = 8) -> Comparison:
    """Measures how long a save blocks the loop. Writing in the background doesn't count."""
    state, steps = state_of_size(megabytes), itertools.count(1)
    with tempfile.TemporaryDirectory() as directory:
        manager = ocp.CheckpointManager(
            f"{directory}/bare", options=ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=True)
        )
        action = jaxloop.CheckpointAction(f"{directory}/jaxloop", keep=1)

        def bare():
            seconds = timed(lambda: manager.save(next(steps), args=ocp.args.PyTreeSave(state)))
            manager.wait_until_finished()
            return seconds

        def ours():
            seconds = timed(lambda: action.save(next(steps), state, {}))
            action.flush()
            return seconds

        comparison = compare_functions(
            f"checkpoint of {megabytes} MB",
            f"how long an asynchronous save of {megabytes} MB blocks the loop",
            {BARE_SAVE: bare, SAVE: ours},
            num_rounds,
            unit="ms",
        )
        manager.close()
        action.close()
    comparison.figures["ms of stall"] = 1e3 * comparison.times(SAVE).median
    return comparison


def restore(megabytes: int = 200, num_rounds: int = 6) -> Comparison:
    """Measures a restore. jaxloop verifies the checksums first."""
    state = state_of_size(megabytes)
    with tempfile.TemporaryDirectory() as directory:
        manager = ocp.CheckpointManager(f"{directory}/bare")
        manager.save(1, args=ocp.args.PyTreeSave(state))
        manager.wait_until_finished()
        action = jaxloop.CheckpointAction(f"{directory}/jaxloop")
        action.save(1, state, {})
        action.close()
        restore_args = jax.tree.map(lambda leaf: ocp.ArrayRestoreArgs(sharding=leaf.sharding), state)
        args = ocp.args.PyTreeRestore(item=state, restore_args=restore_args)
        comparison = compare_functions(
            f"restoring {megabytes} MB",
            f"restoring a checkpoint of {megabytes} MB; jaxloop verifies its checksums",
            {
                BARE_RESTORE: lambda: timed(lambda: manager.restore(1, args=args)),
                RESTORE: lambda: timed(lambda: checkpoint.restore(action.directory, 1, state)),
            },
            num_rounds,
            unit="ms",
        )
        manager.close()
    return comparison


# Waiting for data ------------------------------------------------------------------------------------


def power(matrix: jax.Array, batch: dict[str, Any]) -> tuple[jax.Array, dict[str, jax.Array]]:
    """A step that squares a matrix `batch["times"]` times, so that its duration can be chosen."""
    matrix = jax.lax.fori_loop(0, batch["times"][0], lambda _, matrix: jnp.tanh(matrix @ matrix), matrix)
    return matrix, {"loss": matrix[0, 0]}


def new_matrix() -> jax.Array:
    return jax.random.normal(jax.random.key(0), (256, 256))


def slow_data(secs: float = 11e-3, num_steps: int = 50, num_rounds: int = 5) -> Comparison:
    """Measures training if a batch takes as long to make as a step on the device. Ideally, both overlap completely."""
    step, loop = jax.jit(power, donate_argnums=0), jaxloop.TrainLoop(FunctionStep(power, train=True))
    batch = {"times": np.array([_times_for(secs, step)])}

    def by_hand(batches):
        matrix = new_matrix()
        for batch in batches:
            matrix, _ = step(matrix, batch)
        return matrix

    def slow_batches():
        for _ in range(num_steps):
            time.sleep(secs)
            yield batch

    secs_per_step = lambda train: lambda: timed(train) / num_steps
    comparison = compare_functions(
        "slow data",
        f"data that take {1e3 * secs:.0f} ms per batch, and a step that takes about as long",
        {
            "data alone": secs_per_step(lambda: list(slow_batches())),
            "step alone, by hand": secs_per_step(lambda: by_hand([batch] * num_steps)),
            REFERENCE: secs_per_step(lambda: by_hand(slow_batches())),
            DEFAULTS: secs_per_step(lambda: loop(new_matrix(), slow_batches())),
            PREFETCH: secs_per_step(lambda: loop(new_matrix(), jaxloop.prefetch(slow_batches()))),
        },
        num_rounds,
        unit="ms a step",
    )
    alone = [comparison.seconds.pop(name) for name in ("data alone", "step alone, by hand")]
    slower = [max(pair) for pair in zip(*alone, strict=True)]
    comparison.reference, comparison.seconds = SLOWER, {SLOWER: slower, **comparison.seconds}
    return comparison


def _times_for(secs: float, step: Callable[..., Any]) -> int:
    """Returns the number of multiplications that take this long."""
    many = 200
    take = lambda: timed(lambda: step(new_matrix(), {"times": np.array([many])}))
    take()  # Compiles.
    return max(1, round(many * secs / statistics.median(take() for _ in range(5))))


# The start -------------------------------------------------------------------------------------------


def import_time(num_rounds: int = 7) -> Comparison:
    """Compares importing jaxloop with importing its dependencies, each in a new process, from bytecode."""

    def importing(line):
        program = f"import time; start = time.perf_counter(); {line}; print(time.perf_counter() - start)"
        return lambda: float(_run([sys.executable, "-c", program]))

    return compare_functions(
        "import",
        "importing jaxloop, relative to importing its dependencies",
        {
            BARE_IMPORT: importing(BARE_IMPORT),
            IMPORT: importing(IMPORT),
        },
        num_rounds,
        unit="s",
    )


def second_start(num_rounds: int = 5) -> Comparison:
    """Compares the second start of a program, which finds the compiled programs in a cache, with a hand-written one."""
    by_hand, own = "second start of a hand-written loop", "second start"
    starts: dict[str, list[dict[str, float]]] = {by_hand: [], "first start": [], own: []}
    with tempfile.TemporaryDirectory() as hand_directory:
        for _ in range(num_rounds + 1):  # The first round fills the cache of the hand-written loop.
            with tempfile.TemporaryDirectory() as directory:
                for name, options in zip(
                    starts, ([hand_directory, "--by-hand"], [directory], [directory]), strict=True
                ):
                    starts[name].append(json.loads(_run([sys.executable, "-m", "benchmarks.start", *options])))
    starts = {name: each[1:] for name, each in starts.items()}
    seconds = {name: [each["seconds"] for each in found] for name, found in starts.items()}
    title = "training the CNN of W2 for a few steps, timed from the first line of the program"
    comparison = Comparison("second start", title, by_hand, seconds, unit="s")
    for name, found in starts.items():
        comparison.figures[f"compilations at the {name}"] = max(each["compilations"] for each in found)
    return comparison


def _run(command: list[str]) -> str:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONDONTWRITEBYTECODE": ""}
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    if run.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{run.stderr}")
    return run.stdout


MOMENTS: dict[str, Callable[[], Comparison]] = {
    "loop boundary": loop_boundary,
    "short loops": short_loops,
    "checkpoint of 26 MB": lambda: checkpoint_stall(26),
    "checkpoint of 200 MB": lambda: checkpoint_stall(200),
    "restoring 200 MB": restore,
    "slow data": slow_data,
    "import": import_time,
    "second start": second_start,
}
