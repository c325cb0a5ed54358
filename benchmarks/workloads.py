"""The workloads: models, optimizers, and batches that all contestants read in the same order."""

import dataclasses
import functools
import itertools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

NUM_BATCHES = 64  # Distinct batches, which are repeated.


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model, its optimizer and its data, with the step function that all contestants run.

    Attributes:
      name: A name such as "W0".
      title: A short description.
      model: A module that maps inputs to logits.
      optimizer: An Optax transformation.
      batch_size: Rows per batch.
      num_steps: Training steps per round.
      make_inputs: Makes the inputs of a batch, `[batch_size, *input_shape]`, from a NumPy generator and that shape.
      input_shape: The shape of one example.
      label_shape: The shape of one example's labels, which are class numbers.
      num_classes: The number of classes.
      num_devices: The number of devices that the batch is split over: virtual CPU devices if there are several.
      scans: Whether to run scans over steps. On a CPU, XLA is ten times slower at convolutions inside a scan.
    """

    name: str
    title: str
    model: nn.Module
    optimizer: optax.GradientTransformation
    batch_size: int
    num_steps: int
    input_shape: tuple[int, ...]
    make_inputs: Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
    label_shape: tuple[int, ...] = ()
    num_classes: int = 10
    num_devices: int = 1
    scans: bool = True

    @functools.cached_property
    def data(self) -> list[dict[str, np.ndarray]]:
        """The distinct batches, on the host."""
        rng = np.random.default_rng(0)
        inputs_shape, labels_shape = (self.batch_size, *self.input_shape), (self.batch_size, *self.label_shape)
        return [
            {
                "x": self.make_inputs(rng, inputs_shape),
                "label": rng.integers(self.num_classes, size=labels_shape, dtype=np.int32),
            }
            for _ in range(NUM_BATCHES)
        ]

    def batches(self) -> Iterator[dict[str, np.ndarray]]:
        """Returns an endless iterator that repeats the batches from the first one."""
        return itertools.cycle(self.data)

    @functools.cached_property
    def first_params(self) -> Any:
        """The initial parameters of all contestants, on the host, so that donating a state doesn't delete them."""
        variables = jax.jit(self.model.init)(jax.random.key(0), self.data[0]["x"])
        return jax.tree.map(np.asarray, variables["params"])

    def new_params(self) -> Any:
        """Returns a copy of `first_params` on the device."""
        return jax.block_until_ready(jax.tree.map(jnp.array, self.first_params))

    def loss(self, params: Any, batch: dict[str, Any]) -> jax.Array:
        """Returns the mean loss of a batch."""
        return cross_entropy(self.model.apply({"params": params}, batch["x"]), batch).mean()

    def train_step(self, state: Any, batch: dict[str, Any]) -> tuple[Any, dict[str, jax.Array]]:
        """Makes one optimizer update of a Flax `TrainState`. Pure; contestants compile it."""
        loss, grads = jax.value_and_grad(self.loss)(state.params, batch)
        return state.apply_gradients(grads=grads), {"loss": loss}

    def final_loss(self, params: Any) -> float:
        """Returns the loss on the first eight batches, to check that all contestants train equally."""
        params = jax.tree.map(np.asarray, params)
        return statistics.mean(float(self._compiled_loss(params, batch)) for batch in self.data[:8])

    @functools.cached_property
    def _compiled_loss(self) -> Any:
        return jax.jit(self.loss)


def cross_entropy(logits: jax.Array, batch: dict[str, Any]) -> jax.Array:
    """Returns the loss of each example, or of each token of a sequence."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])


# The layers' names, in alphabetical order, match the order of their calls, so that Keras can receive their weights.


class MLP(nn.Module):
    """A network with one hidden layer."""

    width: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(10, name="layer_1")(nn.relu(nn.Dense(self.width, name="layer_0")(x)))


class CNN(nn.Module):
    """The network of Flax's MNIST example."""

    @nn.compact
    def __call__(self, x):
        for index, features in enumerate([32, 64]):
            x = nn.relu(nn.Conv(features, (3, 3), name=f"layer_{index}")(x))
            x = nn.avg_pool(x, (2, 2), strides=(2, 2))
        x = nn.relu(nn.Dense(256, name="layer_2")(x.reshape(x.shape[0], -1)))
        return nn.Dense(10, name="layer_3")(x)


class Deep(nn.Module):
    """Many small layers, so that the parameters have many leaves: 2 * depth + 1, as only the head has no bias."""

    depth: int
    width: int

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.variance_scaling(1 / self.depth, "fan_in", "truncated_normal")
        for index in range(self.depth):
            x += nn.Dense(self.width, kernel_init=init, name=f"layer_{index:02}")(nn.relu(x))
        return nn.Dense(10, use_bias=False, name=f"layer_{self.depth}")(x)


def normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.normal(size=shape).astype(np.float32)


def workload(name: str, num_devices: int = 8) -> Workload:
    """Returns the workload with this name. `num_devices` applies only to W4."""
    match name:
        case "W0":
            model = MLP(width=16)
            return Workload("W0", "MLP 16-16-10, batch 8, SGD", model, optax.sgd(0.01), 8, 4096, (16,), normal)
        case "W1":
            model = MLP(width=32)
            return Workload("W1", "MLP 784-32-10, batch 32, SGD", model, optax.sgd(1e-3), 32, 2048, (784,), normal)
        case "W2":
            title, sgd = "MNIST CNN, batch 32, SGD with momentum", optax.sgd(1e-3, momentum=0.9)
            return Workload("W2", title, CNN(), sgd, 32, 64, (28, 28, 1), normal, scans=False)
        case "W3":
            title, model = "2M parameters in 193 leaves, batch 16, Adam", Deep(depth=96, width=144)
            return Workload("W3", title, model, optax.adam(1e-5), 16, 64, (144,), normal)
        case "W4":
            return dataclasses.replace(
                workload("W1"),
                name="W4",
                title=f"MLP 784-32-10, batch 64, SGD, data-parallel on {num_devices} virtual CPU devices",
                batch_size=64,
                num_steps=256,
                num_devices=num_devices,
            )
    raise ValueError(f"Unknown workload {name!r}. Choose one of {', '.join(NAMES)}.")


NAMES = ("W0", "W1", "W2", "W3", "W4")
