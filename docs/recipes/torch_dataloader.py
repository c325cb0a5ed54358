"""Trains on data from a PyTorch DataLoader with worker processes, in an order that a resumed run can repeat."""

import jax
import numpy as np
import optax
import torch
from flax import linen as nn
from sklearn import datasets

import jaxloop


class Digits(torch.utils.data.Dataset):
    def __init__(self):
        images, labels = datasets.load_digits(return_X_y=True)
        self.images, self.labels = (images / 16).astype(np.float32)[:900], labels[:900]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, row):  # Runs in a worker, which must not use JAX.
        noise = np.random.default_rng(row).normal(scale=0.05, size=64).astype(np.float32)
        return {"image": self.images[row] + noise, "label": self.labels[row]}


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(10)(nn.relu(nn.Dense(64)(x)))


def loss(logits, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses, {"accuracy": logits.argmax(-1) == batch["label"]}


def main():
    loader = torch.utils.data.DataLoader(
        Digits(),
        batch_size=50,
        shuffle=True,
        generator=torch.Generator().manual_seed(0),  # Makes the order of every epoch reproducible.
        num_workers=2,
        persistent_workers=True,
        # A forked worker may inherit a lock that one of JAX's threads holds. "fork" is the default on Linux before
        # Python 3.14.
        multiprocessing_context="forkserver",
    )
    step = jaxloop.LossStep(jax.random.key(0), MLP(), optax.adam(3e-3), train=True, loss=loss)
    outer_loop = jaxloop.OuterLoop(jaxloop.TrainLoop(step))
    outer_loop(step.initialize_model([1, 64]), loader, train_epochs=10)
    for steps, accuracy in zip(*outer_loop.history.collect("steps", "accuracy"), strict=True):
        if steps % 90 == 0:
            print(f"step {steps}: train accuracy {accuracy:.1%}")


if __name__ == "__main__":  # The workers import this file.
    main()
