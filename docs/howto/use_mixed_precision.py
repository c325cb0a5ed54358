"""Computes in bfloat16, and keeps the parameters in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import jaxloop

pixels, labels = load_digits(return_X_y=True)
data = {"x": (pixels / 16).astype(np.float32), "label": labels}
DTYPES = set()


class Network(nnx.Module):
    def __init__(self, *, rngs):
        self.hidden = nnx.Linear(64, 128, rngs=rngs)
        self.logits = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, x):
        hidden = nnx.relu(self.hidden(x))
        DTYPES.add(hidden.dtype.name)  # When the step is traced.
        return self.logits(hidden)


def loss(logits, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])


for compute_dtype in (None, jnp.bfloat16):
    DTYPES.clear()
    model = Network(rngs=nnx.Rngs(0))
    step = jaxloop.LossStep(
        jax.random.key(0), model, optax.adam(3e-3), train=True, loss=loss, compute_dtype=compute_dtype
    )
    state, outputs = jaxloop.TrainLoop(step)(
        step.initialize_model(), jaxloop.data.batched(data, 64, seed=0), num_steps=200
    )
    kernel = jax.tree.leaves(state.params)[0]
    print(f"activations in {DTYPES}, parameters in {kernel.dtype}: loss {np.mean(outputs['loss'][-20:]):.2f}")
