"""Resumes a run with another learning rate."""

import jax
import numpy as np
import optax
from flax import nnx

import jaxloop
from jaxloop import every

x = np.random.default_rng(0).normal(size=[800, 3]).astype(np.float32)


def loss(predictions, batch):
    return ((predictions - batch["y"]) ** 2).mean(axis=-1)


def train(workdir, optimizer, total_steps, **resume):
    data = jaxloop.data.batched({"x": x, "y": x.sum(axis=-1, keepdims=True)}, 32, seed=0)
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    step = jaxloop.LossStep(jax.random.key(0), model, optimizer, train=True, loss=loss)
    directory = f"{workdir}/checkpoints"
    save = jaxloop.CheckpointAction(directory, every(steps=50))
    spec = jaxloop.CheckpointSpec(directory, **resume)
    outer_loop = jaxloop.OuterLoop(
        jaxloop.TrainLoop(step, end_actions=[save]), checkpoint_spec=spec, log_interval=every(steps=50)
    )
    state, _ = outer_loop(step.initialize_model(), data, train_total_steps=total_steps)
    return state


# A number or a schedule isn't part of the state: change it in the program.
train("runs/plain", optax.sgd(0.1), 100)
state = train("runs/plain", optax.sgd(0.01), 200)
print("plain: resumed at step 100, now at step", state.step)

# With inject_hyperparams, the learning rate is part of the state, so the checkpoint's is used ...
injected = optax.inject_hyperparams(optax.sgd)
train("runs/injected", injected(learning_rate=0.1), 100)
state = train("runs/injected", injected(learning_rate=0.01), 150)
print(f"injected: {state.opt_state.hyperparams['learning_rate']:.2f}")

# ... unless the CheckpointSpec selects the program's.
state = train("runs/injected", injected(learning_rate=0.01), 200, restore_hyperparams=False)
print(f"injected, restore_hyperparams=False: {state.opt_state.hyperparams['learning_rate']:.2f}")
