"""Evaluates on two datasets, at different steps."""

import jax
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import jaxloop
from jaxloop import at, every, last

pixels, labels = load_digits(return_X_y=True)
pixels = (pixels / 16).astype(np.float32)
train = jaxloop.data.batched({"x": pixels[:1280], "label": labels[:1280]}, 64, seed=0)
test = jaxloop.data.batched({"x": pixels[1280:], "label": labels[1280:]}, 64, num_epochs=1)
dark = jaxloop.data.batched({"x": 0.5 * pixels[1280:], "label": labels[1280:]}, 64, num_epochs=1)

rngs, key = nnx.Rngs(0), jax.random.key(0)
model = nnx.Sequential(
    nnx.Linear(64, 128, rngs=rngs), nnx.BatchNorm(128, rngs=rngs), nnx.relu, nnx.Linear(128, 10, rngs=rngs)
)
options = {
    "loss": lambda logits, batch: optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]),
    "metrics": {"accuracy": lambda logits, batch: logits.argmax(-1) == batch["label"]},
}
train_step = jaxloop.LossStep(key, model, optax.adam(3e-3), train=True, **options)
test_step = jaxloop.LossStep(key, model, **options)
outer_loop = jaxloop.OuterLoop(
    jaxloop.TrainLoop(train_step), [jaxloop.EvalLoop(test_step), jaxloop.EvalLoop(test_step)]
)
outer_loop(
    train_step.initialize_model(),
    train,
    train_total_steps=200,
    eval_specs=[  # In the order of the eval loops.
        jaxloop.EvalSpec(test, interval=at(0) | every(steps=50), name="test"),
        jaxloop.EvalSpec(dark, interval=every(steps=100) | last(), name="dark"),
    ],
)
for name in ("test", "dark"):
    for step, accuracy in zip(*outer_loop.history.collect("steps", f"{name}.accuracy"), strict=True):
        print(f"{name} at step {step}: {accuracy:.1%}")
