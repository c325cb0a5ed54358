"""Leaves out batches that make the loss spike."""

import jax
import numpy as np
import optax
from flax import nnx

import jaxloop
from jaxloop import at, every


def make_batch(number):
    x = np.random.default_rng(number).normal(size=[32, 3]).astype(np.float32)
    y = x.sum(axis=-1, keepdims=True)
    return {"x": x, "y": 1e4 * y if number == 132 else y}  # Batch 133 is bad. Batches are numbered from 1.


def loss(predictions, batch):
    return ((predictions - batch["y"]) ** 2).mean(axis=-1)


def train(workdir, actions=(), **options):
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    step = jaxloop.LossStep(jax.random.key(0), model, optax.adam(1e-2), train=True, loss=loss)
    directory = f"{workdir}/checkpoints"
    save = jaxloop.CheckpointAction(directory, at(0) | every(steps=20))
    outer_loop = jaxloop.OuterLoop(
        jaxloop.TrainLoop(step, end_actions=[*actions, save]),
        checkpoint_spec=jaxloop.CheckpointSpec(directory),
        log_interval=every(steps=50),
        **options,
    )
    state, _ = outer_loop(step.initialize_model(), jaxloop.from_index(make_batch), train_total_steps=200)
    return state.params, outer_loop.history


# You know the batch.
known, _ = train("runs/skip", skip=[133])

# You don't: the guard finds it, goes back to the last checkpoint before it, and leaves it out.
guard = jaxloop.SpikeGuard("loss", sigmas=6, window=64, at_most=3, interval=every(steps=1))
guarded, history = train("runs/guard", [guard])
for row in history:
    if "detour" in row.logs:
        print(f"at step {row.elapsed.steps}: {row.logs['detour']['reason']}")
print("the same parameters:", jax.tree.all(jax.tree.map(np.array_equal, known, guarded)))
