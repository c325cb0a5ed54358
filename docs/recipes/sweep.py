"""Sweeps the learning rate with three-fold cross-validation. To resume after an interruption, run it again."""

import pathlib
import sys

import jax
import numpy as np
import optax
from flax import linen as nn
from matplotlib import figure
from sklearn import datasets, model_selection

import jaxloop
from jaxloop import every

LEARNING_RATES, FOLDS = (1e-4, 1e-3, 1e-2), 3
workdir = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "sweep")
images, labels = datasets.load_digits(return_X_y=True)
images = (images / 16).astype(np.float32)


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(10)(nn.relu(nn.Dense(64)(x)))


def loss(logits, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses, {"accuracy": logits.argmax(-1) == batch["label"]}


def train(directory, learning_rate, fold, train_rows, test_rows):
    """Trains one model, or resumes from its newest checkpoint, and returns its test accuracy."""

    def batch_of(number):
        rows = np.random.default_rng((fold, number)).choice(train_rows, 64)
        return {"image": images[rows], "label": labels[rows]}

    step = jaxloop.LossStep(jax.random.key(fold), MLP(), optax.adam(learning_rate), train=True, loss=loss)
    eval_step = jaxloop.LossStep(jax.random.key(fold), MLP(), loss=loss)
    outer_loop = jaxloop.OuterLoop(
        jaxloop.TrainLoop(step, end_actions=[jaxloop.CheckpointAction(directory, every(steps=100), keep=1)]),
        [jaxloop.EvalLoop(eval_step)],
        jaxloop.CheckpointSpec(directory),
        notes={"learning_rate": learning_rate, "seed": fold},
    )
    test = jaxloop.EvalSpec(
        [{"image": images[test_rows], "label": labels[test_rows]}], interval=every(steps=100), name="test"
    )
    outer_loop(step.initialize_model([1, 64]), jaxloop.from_index(batch_of), 200, eval_specs=[test])
    return outer_loop.history.last("test.accuracy")[1]


splits = list(model_selection.KFold(FOLDS, shuffle=True, random_state=0).split(images))
axes = (picture := figure.Figure(figsize=(5, 3), layout="constrained")).add_subplot(
    xscale="log", xlabel="learning rate", ylabel="test accuracy"
)
print("learning rate   mean    deviation")
for learning_rate in LEARNING_RATES:
    scores = [
        train(workdir / f"{learning_rate}_{fold}", learning_rate, fold, *rows) for fold, rows in enumerate(splits)
    ]
    print(f"{learning_rate:<15g} {np.mean(scores):.1%}   {np.std(scores, ddof=1):.1%}", flush=True)
    axes.plot([learning_rate] * FOLDS, scores, "o", color="tab:blue", alpha=0.6)
axes.grid(alpha=0.3)
picture.savefig(workdir / "sweep.png", dpi=150)
