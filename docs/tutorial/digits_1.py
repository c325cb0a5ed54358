"""Trains a network on handwritten digits with one call."""

import optax
from flax import nnx
from sklearn.datasets import load_digits

import jaxloop

pixels, labels = load_digits(return_X_y=True)
pixels = (pixels / 16).astype("float32")
train = jaxloop.data.batched({"x": pixels[:1280], "label": labels[:1280]}, 64, seed=0)
test = jaxloop.data.batched({"x": pixels[1280:], "label": labels[1280:]}, 64, num_epochs=1)


class Network(nnx.Module):
    def __init__(self, *, rngs):
        self.hidden = nnx.Linear(64, 128, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.logits = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, x):
        return self.logits(self.dropout(nnx.relu(self.hidden(x))))


def loss(logits, batch):  # One value per example.
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])


def accuracy(logits, batch):
    return logits.argmax(-1) == batch["label"]


state, history = jaxloop.fit(
    Network(rngs=nnx.Rngs(0)),
    train,
    test,
    loss=loss,
    metrics={"accuracy": accuracy},
    optimizer=optax.adam(3e-3),
    train_epochs=10,
)
print(f"step {state.step}: {history.last('eval.accuracy')[1]:.1%} of the test digits")
