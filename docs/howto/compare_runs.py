"""Trains four runs, and compares them in a table and in a plot."""

import jax
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import jaxloop
from jaxloop import every
from jaxloop.runs import comparison

pixels, labels = load_digits(return_X_y=True)
pixels = (pixels / 16).astype(np.float32)
test = jaxloop.data.batched({"x": pixels[1280:], "label": labels[1280:]}, 64, num_epochs=1)
options = {
    "loss": lambda logits, batch: optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]),
    "metrics": {"accuracy": lambda logits, batch: logits.argmax(-1) == batch["label"]},
}
histories = {}
for learning_rate in (3e-4, 3e-3):
    for seed in (0, 1):
        rngs, key = nnx.Rngs(seed), jax.random.key(seed)
        model = nnx.Sequential(nnx.Linear(64, 128, rngs=rngs), nnx.relu, nnx.Linear(128, 10, rngs=rngs))
        step = jaxloop.LossStep(key, model, optax.adam(learning_rate), train=True, **options)
        workdir = f"runs/{learning_rate}_{seed}"
        outer_loop = jaxloop.OuterLoop(
            jaxloop.TrainLoop(step),
            [jaxloop.EvalLoop(jaxloop.LossStep(key, model, **options))],
            workdir=workdir,
            log_interval=every(steps=20),
            notes={"lr": learning_rate, "seed": seed},
        )
        train = jaxloop.data.batched({"x": pixels[:1280], "label": labels[:1280]}, 64, seed=seed)
        test_spec = jaxloop.EvalSpec(test, interval=every(steps=50), name="test")
        outer_loop(step.initialize_model(), train, train_total_steps=200, eval_specs=[test_spec])
        histories[workdir] = outer_loop.history

table = comparison.compare(list(histories), by="test.accuracy")  # Like `python -m jaxloop compare runs/*`.
for run in table.runs:  # Best first.
    print(f"{run['best']:.1%} at step {run['step']}: lr {run['notes']['lr']}, seed {run['notes']['seed']}")

figure, axes = plt.subplots()
for workdir, history in histories.items():
    axes.plot(*history.collect("steps", "test.accuracy"), label=workdir)
axes.legend()
figure.savefig("accuracy.svg")
