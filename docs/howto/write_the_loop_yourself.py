"""Trains with the functional API: a dict of schedules and functions. The history becomes a pandas table."""

import jax
import numpy as np
import optax
import pandas as pd
from flax import nnx
from sklearn.datasets import load_digits

import jaxloop
from jaxloop import functional as jf

pixels, labels = load_digits(return_X_y=True)
pixels = (pixels / 16).astype(np.float32)
train = jaxloop.data.batched({"x": pixels[:1280], "label": labels[:1280]}, 64, seed=0)
test = jaxloop.data.batched({"x": pixels[1280:], "label": labels[1280:]}, 64, num_epochs=1)
rngs = nnx.Rngs(0)
model = nnx.Sequential(nnx.Linear(64, 128, rngs=rngs), nnx.relu, nnx.Linear(128, 10, rngs=rngs))
graph, params = nnx.split(model)
optimizer = optax.adam(3e-3)


def loss_and_accuracy(params, batch):
    logits = nnx.merge(graph, params)(batch["x"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses.mean(), (logits.argmax(-1) == batch["label"]).mean()


@jax.jit
def train_step(state, batch):  # The state is any pytree.
    (loss, _), grads = jax.value_and_grad(loss_and_accuracy, has_aux=True)(state["params"], batch)
    updates, opt_state = optimizer.update(grads, state["opt_state"])
    state = {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}
    return jf.logs().add_metric("loss", loss), state


@jax.jit
def test_step(state, batch):
    return jf.logs().add_metric("accuracy", loss_and_accuracy(state["params"], batch)[1])


def evaluate(state):
    return jf.loop(state, test, {jf.every(1): test_step})


state, history, elapsed = jf.loop(
    {"params": params, "opt_state": optimizer.init(params)},
    train,
    {
        jf.every(1): train_step,
        jf.every(50): [jf.inner_loop("test", evaluate), jf.checkpoint("runs/loop", keep=2, resume=True)],
    },
    stop=200,
)
table = pd.DataFrame(history.to_records()).set_index("steps")
print(table["test.accuracy"].dropna().round(3).to_string())
