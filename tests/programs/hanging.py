"""A run that hangs at a given place in one of its processes."""

import functools
import os
import pathlib
import re
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging
from flax import linen as nn

import jaxloop
from jaxloop import data, distributed, every
from jaxloop.checkpoint import seal

AT = 7
# The watchdog's description of the hanging process, for each place, as a regular expression. In "run", all processes
# hang, because they run the same program.
PLACES = {
    "data": "waiting for data after step 7, in batch_of",
    "begin": "dispatching steps after step 7, in HangingStep.begin",
    "run": "(dispatching steps|waiting for the devices) after step 7(?!,)",
    "action": "in actions after step 7, in HangingAction.__call__",
    "save": "in checkpoints after step 10(?!,)",
    "eval": "in evaluations after step 6, in <lambda>",
}
# These runs don't hang. In the first one, several batches together take longer to read than a step may take, and the
# host doesn't run ahead. In the second one, compiling takes longer than a step may take. In the third one, so do
# tracing a program, its first run, an evaluation, a save, and the steps that the host waits for before a save. The
# numbers are the least numbers of slow compilations per process.
HEALTHY = {"reading": 0, "compiling": 2, "slow": 1}
LIMIT_SECS = 2


def problems_of(directory, place, *, processes, process):
    """Runs this program in several processes, one of which hangs; returns what is wrong with how they end."""
    devices = 2 if place in HEALTHY else 1  # With two devices, steps run asynchronously.
    from programs.launching import launch  # Not in the processes of the job.

    job, _ = launch(__file__, directory, place, process, processes=processes, devices=devices)
    printed = job.stdout
    if place in HEALTHY:
        is_ok = job.returncode == 0 and printed.count("ended\n") == processes and "Nothing happened" not in printed
        # Before the first step, or in the middle of the run, for batches with a different shape.
        compiled_in = map(float, re.findall(r"Compiled HangingStep.run in ([\d.]+) s", printed))
        is_ok = is_ok and sum(secs > LIMIT_SECS for secs in compiled_in) >= HEALTHY[place] * processes
        return [] if is_ok else [f"it ended with {job.returncode}: {printed[-3000:]}"]
    (hung,) = pathlib.Path(directory).glob("failures/hang-*")
    reports = {number: (hung / f"process-{number}.txt").read_text() for number in range(processes)}
    expected, problems = PLACES[place], []
    for number, text in reports.items():
        description, secs = text.splitlines()[:2]
        if bool(re.match(expected, description)) != (number == process or place == "run"):
            problems.append(
                f"process {number} of {processes} is reported as {description!r}, but {process} hangs in {place!r}"
            )
        if float(secs.split()[3]) > LIMIT_SECS + 5:
            problems.append(f"process {number}: {secs}")
    who = f"process {process} is " if processes > 1 and place != "run" else ""
    if not re.search(who + expected, printed) or any(each.returncode != 75 for each in job.processes):
        problems.append(f"it ended with {job.returncode} and printed: {printed[-3000:]}")
    return problems


def main(directory, place, process):
    distributed.initialize()
    is_hanging_process = jax.process_index() == process
    logging.set_verbosity(logging.INFO)

    def hang(where):
        if is_hanging_process and where == place:
            time.sleep(1000)

    def pause(secs=LIMIT_SECS + 0.5):
        if place == "slow":
            time.sleep(secs)

    has_run = set()

    def pause_on_first_run(rows):
        pause(0.4 * LIMIT_SECS if rows in has_run else LIMIT_SECS + 0.5)
        has_run.add(rows)

    class HangingStep(jaxloop.Step):
        def begin(self, state, batch):
            if self.train and batch["number"][0] == AT:
                hang("begin")
            return state, batch["x"]

        def run(self, state, batch):
            def loss_fn(params):
                return (state.apply_fn({"params": params}, batch) ** 2).mean()

            loss, grads = jax.value_and_grad(loss_fn)(state.params)
            if self.train and place == "slow":
                if len(batch) > 4:
                    pause(2 * LIMIT_SECS)  # During tracing, which begins while a step is still running.
                jax.debug.callback(functools.partial(pause_on_first_run, len(batch)))
            if self.train and place == "compiling":
                values = loss + jnp.arange(3.0)
                for number in range(500):  # Takes several seconds to compile.
                    values = jnp.sort(jnp.sin(values) + number)
                loss = values[0]
            if self.train and place == "run":
                stuck = state.step == AT  # Every process hangs, because all run the same program.
                loss = jax.lax.while_loop(lambda x: stuck & (x < jnp.inf), lambda x: x * 0.5 + 1.0, loss)
            return (state.apply_gradients(grads=grads) if self.train else state), {"loss": loss}

    class HangingAction(jaxloop.Action):
        uses_outputs = False  # The loop runs ahead of the devices.

        def __call__(self, state, outputs, *, step_num, **kwargs):
            if step_num == AT:
                hang("action")
            if place == "slow" and step_num == AT + 3:
                jax.block_until_ready(state.step)  # Two steps after the first run of the second program.

    def batch_of(number, name="data", rows=4):
        if number == AT:
            hang(name)
        if place == "reading" and name == "data":
            time.sleep(0.4 * LIMIT_SECS)
        if place in ("compiling", "slow") and name == "data" and number >= AT:
            rows *= 2
        if name == "eval" and number == AT:
            pause()
        return {"x": np.ones([rows, 3], np.float32), "number": np.full([rows], number)}

    write_seal = seal.write

    def write(*arguments):
        hang("save")
        pause(5 * LIMIT_SECS)
        return write_seal(*arguments)

    seal.write = write
    partitioner = jaxloop.SingleDevicePartitioner()
    if jax.device_count() > 1:
        partitioner = jaxloop.DataParallelPartitioner(jaxloop.partition.create_mesh(data=-1), "data")
    train_step = HangingStep(jax.random.key(0), nn.Dense(1), optax.sgd(0.1), partitioner, train=True)
    eval_step = HangingStep(jax.random.key(0), nn.Dense(1), partitioner=partitioner)
    save = jaxloop.CheckpointAction(os.path.join(directory, "checkpoints"), every(steps=5))
    ends, in_flight = [HangingAction(every(steps=1)), save], 1 if place == "reading" else None
    train_loop = jaxloop.TrainLoop(train_step, end_actions=ends, max_steps_in_flight=in_flight)
    eval_secs = 30 if place in ("compiling", "slow") else LIMIT_SECS
    limits = {"eval_secs": eval_secs, "checkpoint_secs": 30 if place == "slow" else LIMIT_SECS}
    watchdog = jaxloop.Watchdog(step_secs=LIMIT_SECS, startup_secs=100, **limits)
    outer_loop = jaxloop.OuterLoop(train_loop, [jaxloop.EvalLoop(eval_step)], workdir=directory, extensions=[watchdog])
    evaluation = jaxloop.EvalSpec(data.from_index(lambda number: batch_of(number, "eval"), 9), name="test")
    state = train_step.initialize_model([1, 3])
    outer_loop(state, data.from_index(batch_of), 12, 6, [evaluation])
    print("ended")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
