"""Trains on a Hugging Face dataset."""

import jax
import numpy as np
import optax
from datasets import Dataset
from flax import linen as nn
from sklearn.datasets import load_digits

import jaxloop


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(10)(nn.relu(nn.Dense(64)(x)))


def loss(logits, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses, {"accuracy": logits.argmax(-1) == batch["label"]}


# If you use `datasets.load_dataset(...)` instead, the rest stays the same.
images, labels = load_digits(return_X_y=True)
rows = Dataset.from_dict({"image": list((images / 16).astype(np.float32)), "label": labels})
train_rows, test_rows = rows.select(range(900)), rows.select(range(900, 1797))

step = jaxloop.LossStep(jax.random.key(0), MLP(), optax.adam(3e-3), train=True, loss=loss)
eval_step = jaxloop.LossStep(jax.random.key(0), MLP(), loss=loss)
outer_loop = jaxloop.OuterLoop(jaxloop.TrainLoop(step), [jaxloop.EvalLoop(eval_step)])
train = jaxloop.data.batched(train_rows, 64, seed=0)  # Reshuffled in each epoch. Any row format works.
test = jaxloop.EvalSpec(jaxloop.data.batched(test_rows, 300, num_epochs=1), name="test")
outer_loop(step.initialize_model([1, 64]), train, 600, 200, [test])

for steps, accuracy in zip(*outer_loop.history.collect("steps", "test.accuracy"), strict=True):
    print(f"step {steps}: test accuracy {accuracy:.1%}")
