"""Clips gradients, warms up the learning rate, and decays only matrices."""

import jax
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import jaxloop
from jaxloop import optimizers

TOTAL_STEPS = 300
pixels, labels = load_digits(return_X_y=True)
data = {"x": (pixels / 16).astype(np.float32), "label": labels}

schedule = optax.warmup_cosine_decay_schedule(init_value=0.0, peak_value=3e-3, warmup_steps=30, decay_steps=TOTAL_STEPS)


def is_matrix(params):  # Biases and scales are not decayed.
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


optimizer = optax.chain(
    optax.clip_by_global_norm(1.0),
    optimizers.by_path(
        {
            "layers/0/*": optax.adamw(lambda step: 0.1 * schedule(step), weight_decay=1e-2, mask=is_matrix),
            "**": optax.adamw(schedule, weight_decay=1e-2, mask=is_matrix),
        }
    ),
)

rngs = nnx.Rngs(0)
model = nnx.Sequential(nnx.Linear(64, 128, rngs=rngs), nnx.relu, nnx.Linear(128, 10, rngs=rngs))


def loss(logits, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])


step = jaxloop.LossStep(jax.random.key(0), model, optimizer, train=True, loss=loss)
state, outputs = jaxloop.TrainLoop(step)(
    step.initialize_model(), jaxloop.data.batched(data, 64, seed=0), num_steps=TOTAL_STEPS
)
print(f"loss {outputs['loss'][0]:.2f} -> {np.mean(outputs['loss'][-20:]):.2f}")
