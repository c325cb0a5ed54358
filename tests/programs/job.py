"""Runs an OuterLoop in one or several processes: `job.py DIRECTORY --fault=kill --at=33 --in=1`.

The first process writes the final state to `DIRECTORY/final.npz`. A fault creates `DIRECTORY/fired`, so that it
doesn't occur again at the next start.
"""

import argparse
import os
import pathlib
import signal
import sys
import time

import jax
import numpy as np
import optax
from absl import logging
from jax.experimental import multihost_utils
from programs.acts import saving
from programs.models import Network, batch_of, squares

import jaxloop
from jaxloop import data, distributed, partition
from jaxloop.data.sources import IndexIterator

parser = argparse.ArgumentParser()
parser.add_argument("directory", type=pathlib.Path)
parser.add_argument("--fault", default="")
parser.add_argument("--at", type=int, default=33)
parser.add_argument("--in", dest="place", type=int, default=1)
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--version", type=float, default=0.0)
options = parser.parse_args()
logging.set_verbosity(logging.INFO)
fired = options.directory / "fired"
is_fault_pending = options.fault and not fired.exists()
is_faulty_process = is_fault_pending and int(os.environ["JAXLOOP_PROCESS_ID"]) == options.place
if is_faulty_process and options.fault == "never_joins":
    fired.touch()
    time.sleep(1000)
distributed.initialize(**({"start_secs": 6} if options.fault == "never_joins" else {}))


SIGNALS = dict.fromkeys(["term", "term_twice", "last_term"], signal.SIGTERM)
SIGNALS |= {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "interrupt": signal.SIGINT}


def fire(fault):
    """Triggers this fault if it was requested for this process and hasn't occurred yet."""
    if not is_faulty_process or options.fault != fault or fired.exists():
        return
    fired.touch()
    if fault in SIGNALS:
        os.kill(os.getpid(), SIGNALS[fault])
        return
    match fault:
        case "exit":
            os._exit(0)
        case "sys_exit":
            sys.exit(7)
        case "hang" | "hang_alone":  # The signal goes to all processes, or only to this one.
            os.kill(0 if fault == "hang" else os.getpid(), signal.SIGTERM)
            time.sleep(1000)
        case "term_data":  # A signal to the process group, which has also ended this process's data loader.
            os.kill(0, signal.SIGTERM)
            raise OSError("a worker was killed")
        case _:
            raise OSError("the disk is gone")


class Faulty(jaxloop.Action):
    """Fails in one process, or stops the run, after a step."""

    def __call__(self, state, outputs, *, step_num, **kwargs):
        if step_num >= options.at:
            fire("action")
            if is_faulty_process and options.fault == "stop_loop" and not fired.exists():
                fired.touch()
                outputs[jaxloop.STOP_LOOP] = True


class Last(jaxloop.Action):
    """Fails in one process just before a checkpoint is saved, or gets a signal after the last batch."""

    runs_last = True

    def __call__(self, state, outputs, *, step_num, **kwargs):
        if step_num >= options.at:
            fire("last_action")
        if step_num == options.steps:
            fire("last_term")

    def close(self):  # The other process's signal is ending the run when this process receives its own.
        if is_fault_pending and options.fault == "term_twice" and not is_faulty_process:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.3)


def loss(outputs, batch):
    return squares(outputs + options.version * jax.process_index(), batch)


def make_batch(index):
    if index == options.at and options.fault not in ("action", "last_action", "last_term", "end", "stop_loop"):
        fire(options.fault)
    return batch_of(index, rows=16, features=8)


def next_or_end(iterator, next_batch=IndexIterator.__next__):
    """Ends the data of one process early. The position in the data is still the number of batches."""
    if iterator.next_index == options.at and not fired.exists():
        fired.touch()
        raise StopIteration
    return next_batch(iterator)


if is_faulty_process and options.fault == "end":
    IndexIterator.__next__ = next_or_end
mesh = partition.create_mesh(data=-1)
partitioner = jaxloop.FSDPPartitioner(mesh, min_size=1)
step = jaxloop.LossStep(jax.random.key(0), Network(), optax.adam(1e-2), partitioner, train=True, loss=loss)
eval_step = jaxloop.LossStep(jax.random.key(0), Network(), optax.adam(1e-2), partitioner, loss=loss)
writer = jaxloop.default_writer(options.directory)
every_10 = jaxloop.every(steps=10)
actions = [Faulty(jaxloop.every(steps=1)), Last(every_10), jaxloop.SummaryAction(writer, every_10)]
eval_loop = jaxloop.EvalLoop(eval_step, end_actions=[jaxloop.SummaryAction(writer, prefix="eval/")])
# Even-numbered processes have one more batch than odd-numbered ones, and that batch is short.
full = [make_batch(1000 + number) for number in range(3)]
short = {name: leaf[: 4 + jax.process_index()] for name, leaf in make_batch(1003).items()}
eval_batches = data.shard_for_process(full) + ([short] if jax.process_index() % 2 == 0 else [])
outer_loop = saving(options.directory / "checkpoints", every_10, step, *actions, eval_loops=[eval_loop])
began = time.monotonic()
try:
    batches, specs = data.shard_for_process(data.from_index(make_batch)), [jaxloop.EvalSpec(eval_batches)]
    state, outputs = outer_loop(step.initialize_model([1, 8]), batches, options.steps, 20, specs)
finally:
    print(f"ended after {time.monotonic() - began:.1f} s at step {outer_loop.train_loop.step_num}", flush=True)
print("samples", outer_loop.train_loop.elapsed.samples, "eval", outer_loop.history.collect("eval.loss"))
found = {
    path: multihost_utils.process_allgather(leaf, tiled=True)
    for path, leaf in jaxloop.base.checks.leaves_by_path(state).items()
}
if jax.process_index() == 0:
    np.savez(options.directory / "final.npz", **found)
sys.stdout.flush()
