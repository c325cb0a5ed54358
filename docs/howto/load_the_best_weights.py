"""Keeps the best checkpoint, and loads it in different ways."""

import jax
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import jaxloop
from jaxloop import checkpoint, every, last

pixels, labels = load_digits(return_X_y=True)
pixels = (pixels / 16).astype(np.float32)
train = jaxloop.data.batched({"x": pixels[:1280], "label": labels[:1280]}, 64, seed=0)
test = jaxloop.data.batched({"x": pixels[1280:], "label": labels[1280:]}, 64, num_epochs=1)
rngs, key = nnx.Rngs(0), jax.random.key(0)
model = nnx.Sequential(nnx.Linear(64, 128, rngs=rngs), nnx.relu, nnx.Linear(128, 10, rngs=rngs))
options = {
    "loss": lambda logits, batch: optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]),
    "metrics": {"accuracy": lambda logits, batch: logits.argmax(-1) == batch["label"]},
}
train_step = jaxloop.LossStep(key, model, optax.adam(1e-2), train=True, **options)
test_step = jaxloop.LossStep(key, model, **options)

directory, when = "runs/best/checkpoints", every(steps=50) | last()  # Save where an evaluation has just ended.
save = jaxloop.CheckpointAction(directory, when, keep=1, best="test/accuracy")
outer_loop = jaxloop.OuterLoop(
    jaxloop.TrainLoop(train_step, end_actions=[save]), [jaxloop.EvalLoop(test_step)], workdir="runs/best"
)
test_spec = jaxloop.EvalSpec(test, interval=when, name="test")
outer_loop(train_step.initialize_model(), train, train_total_steps=400, eval_specs=[test_spec])
best = checkpoint.best_step(directory)
print(f"kept: {checkpoint.all_steps(directory)}, best: {best}")

# In another program: a state without an optimizer. This also restores batch statistics.
state = test_step.restore_model(test_step.initialize_model(), directory, best)
_, outputs = jaxloop.EvalLoop(test_step)(state, test)
print(f"accuracy of step {state.step}: {jaxloop.summarize(outputs)['accuracy']:.1%}")

# Only the parameters, as a tree of arrays.
params = checkpoint.load_params(directory, "best")
print(f"{sum(leaf.size for leaf in jax.tree.leaves(params)):,} parameters")
