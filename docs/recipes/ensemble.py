"""Trains 32 learning rates with 4 seeds each at once, and plots the accuracy against the rate, with error bars."""

import jax
import numpy as np
import optax
from flax import linen as nn
from matplotlib import figure
from sklearn.datasets import load_digits

import jaxloop
from jaxloop import every

RATES, SEEDS = np.geomspace(1e-4, 10, 32), range(4)
images, labels = load_digits(return_X_y=True)
images = (images / 16).astype(np.float32)
train = jaxloop.data.batched({"image": images[:1280], "label": labels[:1280]}, 64, seed=0)
test = jaxloop.data.batched({"image": images[1280:], "label": labels[1280:]}, 128, num_epochs=1)


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Dropout(0.2, deterministic=not train)(nn.relu(nn.Dense(32)(x)))
        return nn.Dense(10)(x)


def loss(logits, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses, {"accuracy": logits.argmax(-1) == batch["label"]}


optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1, momentum=0.9)
step = jaxloop.LossStep(jax.random.key(0), MLP(), optimizer, train=True, loss=loss)
eval_step = jaxloop.LossStep(jax.random.key(0), MLP(), loss=loss)
ensemble = jaxloop.Ensemble(step, seeds=SEEDS, hyperparams={"learning_rate": RATES})
outer_loop = jaxloop.OuterLoop(
    jaxloop.TrainLoop(ensemble, nan_policy="skip"), [jaxloop.EvalLoop(ensemble.for_evaluation(eval_step))]
)
state = ensemble.initialize_model([1, 64])
test_spec = jaxloop.EvalSpec(test, interval=every(steps=100), name="test")
state, _ = outer_loop(state, train, train_total_steps=200, eval_specs=[test_spec])

accuracies = ensemble.collect(outer_loop.history, "test.accuracy")[-1].reshape(len(RATES), len(SEEDS))
means, deviations = accuracies.mean(axis=1), accuracies.std(axis=1, ddof=1)
for index in range(0, 32, 6):
    print(f"learning rate {RATES[index]:.1e}: {means[index]:.1%}")
best = ensemble.member(state, ensemble.best(outer_loop.history, "test.accuracy"))
predicted = eval_step.predict(best, [images[1280:]]).argmax(-1)
print(f"best of {len(ensemble.members)} models: {np.mean(predicted == labels[1280:]):.1%}")

picture = figure.Figure(figsize=(5, 3), layout="constrained")
axes = picture.add_subplot(xscale="log", xlabel="learning rate", ylabel="test accuracy")
axes.errorbar(RATES, means, deviations, marker=".", capsize=2)
axes.grid(alpha=0.3)
picture.savefig("ensemble.png", dpi=150)
