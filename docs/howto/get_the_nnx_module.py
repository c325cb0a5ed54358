"""Trains an NNX module, and uses the trained module without jaxloop."""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import jaxloop
from jaxloop import checkpoint

pixels, labels = load_digits(return_X_y=True)
pixels = (pixels / 16).astype(np.float32)


class Network(nnx.Module):
    def __init__(self, *, rngs):
        self.hidden = nnx.Linear(64, 64, rngs=rngs)
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        self.logits = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x):
        return self.logits(nnx.relu(self.norm(self.hidden(x))))


state, _ = jaxloop.fit(
    Network(rngs=nnx.Rngs(0)),
    jaxloop.data.batched({"x": pixels, "label": labels}, 64, seed=0),
    loss=lambda logits, batch: optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]),
    optimizer=optax.adam(3e-3),
    train_epochs=3,
    workdir="runs/nnx",
    progress=None,
)

# The module of a train state, with its batch statistics, in evaluation mode.
model = state.module()
print(f"accuracy of state.module(): {(model(pixels).argmax(-1) == labels).mean():.1%}")

# In another program: a new module, and the parameters of a checkpoint.
model = Network(rngs=nnx.Rngs(1))
nnx.update(model, checkpoint.load_params("runs/nnx/checkpoints", into=nnx.state(model, nnx.Param)))
print("the same kernel:", bool(jnp.array_equal(model.hidden.kernel[...], state.module().hidden.kernel[...])))
