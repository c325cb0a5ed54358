"""Models, a loss and data that several tests and programs share. Importing them doesn't initialize a JAX backend."""

import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx


def batch_of(number, rows=8, features=3):
    """Returns the batch with a number, for a regression whose targets are the sums of the inputs."""
    x = np.random.default_rng(number).normal(size=(rows, features)).astype(np.float32)
    return {"x": x, "y": x.sum(-1, keepdims=True)}


def squares(outputs, batch):
    """Returns the squared error of each example."""
    return jnp.mean((outputs - batch["y"]) ** 2, axis=-1)


class Network(nn.Module):
    """A network with dropout before its last layer."""

    outputs: int = 1
    rate: float = 0.1

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Dropout(self.rate, deterministic=not train)(nn.relu(nn.Dense(64)(x)))
        return nn.Dense(self.outputs)(x)


class Noisy(nn.Module):
    """A linear layer with batch statistics and dropout."""

    rate: float = 0.5

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.BatchNorm(use_running_average=not train)(x)
        return nn.Dense(1)(nn.Dropout(self.rate, deterministic=not train)(x))


class NNXNoisy(nnx.Module):
    def __init__(self, rate=0.5, *, rngs):
        self.dense, self.norm = nnx.Linear(3, 1, rngs=rngs), nnx.BatchNorm(1, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.dense(self.dropout(x)))
