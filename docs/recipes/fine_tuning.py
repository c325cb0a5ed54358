"""Fine-tunes a pretrained network on a new task. The body is either frozen or trained with a lower learning rate.

The program pretrains a network to read digits, and saves a checkpoint. Then it loads the network's body from this
checkpoint, and learns from 20 examples whether a digit is at least 5.
"""

import jax
import numpy as np
import optax
from flax import linen as nn
from sklearn.datasets import load_digits

import jaxloop
from jaxloop import checkpoint, last, optimizers

DIRECTORY = "runs/pretrained"


class Network(nn.Module):
    num_classes: int

    def setup(self):  # The names of these attributes are the keys of `params`.
        self.body = nn.Sequential([nn.Dense(256), nn.relu, nn.Dense(64), nn.relu])
        self.head = nn.Dense(self.num_classes)

    def __call__(self, pixels):
        return self.head(self.body(pixels))


def loss(logits, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])


def accuracy(logits, batch):
    return logits.argmax(-1) == batch["label"]


def make_step(num_classes, **options):
    model = Network(num_classes)
    return jaxloop.LossStep(jax.random.key(0), model, **options, loss=loss, metrics={"accuracy": accuracy})


pixels, labels = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(labels))
pixels, labels = (pixels[order] / 16).astype(np.float32), labels[order]
digits = [{"pixels": pixels[i : i + 64], "label": labels[i : i + 64]} for i in range(0, 1280, 64)]
few_high, test_high = ({"pixels": pixels[part], "label": labels[part] // 5} for part in (slice(20), slice(1280, None)))

# Pretrain. If you run the program again, this part only restores the final checkpoint.
digits_step = make_step(10, optimizer=optax.adam(1e-3), train=True)
save = jaxloop.CheckpointAction(DIRECTORY, interval=last())
outer_loop = jaxloop.OuterLoop(
    jaxloop.TrainLoop(digits_step, end_actions=[save]), checkpoint_spec=jaxloop.CheckpointSpec(DIRECTORY)
)
outer_loop(digits_step.initialize_model([1, 64]), digits, train_epochs=20)

# Fine-tune.
variants = {
    "from scratch": optax.adam(1e-3),
    "frozen body": optimizers.by_path({"head/**": optax.adam(1e-2), "body/**": None}),
    "slow body": optimizers.by_path({"head/**": optax.adam(1e-2), "body/**": optax.adam(1e-4)}),
}
for name, optimizer in variants.items():
    step = make_step(2, optimizer=optimizer, train=True)
    state = step.initialize_model([1, 64])
    if name != "from scratch":  # The head has a different shape, so it keeps its initial values.
        params = checkpoint.load_params(DIRECTORY, into=state.params, paths={"body/**": "body/**"})
        state = state.replace(params=params)
    outer_loop = jaxloop.OuterLoop(jaxloop.TrainLoop(step), [jaxloop.EvalLoop(make_step(2))])
    evaluation = jaxloop.EvalSpec([test_high], interval=last(), name="test")
    few_batches = jaxloop.from_index(lambda number: few_high)
    state, _ = outer_loop(state, few_batches, train_total_steps=100, eval_specs=[evaluation])
    (test_accuracy,) = outer_loop.history.collect("test.accuracy")
    print(f"{name}: {test_accuracy:.1%} of the test digits")
