"""Runs loops in two processes whose data differ in length, and prints the results."""

import jax
import numpy as np
import optax
from flax import linen as nn
from programs.models import batch_of, squares

import jaxloop
from jaxloop import distributed, metrics, partition
from jaxloop.distributed import agreement

distributed.initialize()
first = jax.process_index() == 0
partitioner = jaxloop.DataParallelPartitioner(partition.create_mesh(data=-1), "data")
EXAMPLES = batch_of(0, rows=200, features=8)


def batches(sizes, begin):
    for size in sizes:
        yield {name: leaf[begin : begin + size] for name, leaf in EXAMPLES.items()}
        begin += size


def new_step(**options):
    return jaxloop.LossStep(jax.random.key(0), nn.Dense(1), optax.adam(1e-2), partitioner, loss=squares, **options)


step = new_step(train=True)
train_loop = jaxloop.TrainLoop(step)
iterator = batches([4] * (10 if first else 7), 0 if first else 100)
state, outputs = train_loop(step.initialize_model([1, 8]), iterator)
print("train", int(state.step), len(outputs["loss"]), train_loop.elapsed.samples, outputs.num_examples[0])
print("left over", len(list(iterator)))


state, _ = train_loop(state, batches([4] * 9, 0), num_steps=5)
print("five more", int(state.step))

eval_loop = jaxloop.EvalLoop(new_step())
_, outputs = eval_loop(state, batches([8, 8, 8, 3] if first else [8, 8], 0 if first else 27))
predicted = EXAMPLES["x"] @ np.asarray(state.params["kernel"]) + np.asarray(state.params["bias"])
exact = ((predicted - EXAMPLES["y"])[:43] ** 2).mean()
print("eval", sum(outputs.num_examples), abs(metrics.summarize(outputs)["loss"] - exact) < 1e-5)


def attempt(name, act):
    try:
        act()
    except Exception as error:
        print(f"{name}: {type(error).__name__}: {error}")


attempt("nothing", lambda: eval_loop(state, batches([8] if first else [], 0)))
attempt("uneven", lambda: train_loop(state, batches([4, 4] if first else [4, 2], 0)))
state = train_loop.rescued_state


class SelectingStep(jaxloop.LossStep):
    def preprocess_batch(self, batch):
        return {"x": batch["x"], "y": batch["y"][:, :1]}


def train_on_different(change, kind=jaxloop.LossStep, steps_per_dispatch=1):
    """Trains on batches that are different in the second process from the third one on. Returns the number of steps."""
    step = kind(jax.random.key(0), nn.Dense(1), optax.adam(1e-2), partitioner, loss=squares, train=True)
    loop = jaxloop.TrainLoop(step, steps_per_dispatch=steps_per_dispatch)
    changed = (batch if first or number < 2 else change(batch) for number, batch in enumerate(batches([8] * 4, 0)))
    try:
        return int(loop(step.initialize_model([1, 8]), changed)[0].step)
    finally:
        print(f"after step {loop.step_num}", end=", ")


wider = lambda batch: {**batch, "y": np.repeat(batch["y"], 2, axis=1)}
attempt("other dtype", lambda: train_on_different(lambda batch: {**batch, "x": batch["x"].astype(np.float16)}))
attempt("other shape", lambda: train_on_different(wider, steps_per_dispatch=2))
attempt("other leaf", lambda: train_on_different(lambda batch: {**batch, "z": batch["y"]}))
print("alike after a hook", train_on_different(wider, SelectingStep))
# Two evaluations read from one iterator, whose batches are short in one of the processes.
uneven, uneven_loop = batches([8, 8, 8, 8] if first else [8, 3, 3, 8], 0), jaxloop.EvalLoop(new_step())
print("over one iterator", [sum(uneven_loop(state, uneven, num_steps=2)[1].num_examples) for _ in range(2)])


class Seen(jaxloop.Action):
    def __call__(self, state, outputs, *, elapsed, **kwargs):
        print("seen", elapsed.steps, elapsed.samples)


acting = new_step(train=True, end_actions=[Seen(jaxloop.every(samples=32))])
attempt("unnamed", lambda: agreement.check_same("Something", [repr(object())]))
outer_loop = jaxloop.OuterLoop(jaxloop.TrainLoop(acting))
print("exhausted", int(outer_loop(acting.initialize_model([1, 8]), batches([4] * 9, 0), 20)[0].step))
outer_loop = jaxloop.OuterLoop(train_loop)
attempt("another run", lambda: outer_loop(state, batches([4] * 9, 0), 100 if first else 50))
