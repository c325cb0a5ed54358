"""Keras 3 on JAX, trained by its own `fit`."""

import importlib.util
import os
from typing import Any

import jax
import numpy as np

from benchmarks.contestants import Absent, Contestant, TimedPasses
from benchmarks.workloads import CNN, MLP, Deep, Workload


def keras_fit(steps_per_execution: int) -> Contestant:
    """Returns a contestant that trains the model of a workload in Keras, from the same parameters.

    Keras compiles once, in the first round. As with jaxloop's `fit`, the clock starts with the second of two epochs.
    """

    def contestant(workload):
        keras = _import_keras()
        model = _model(keras, workload)
        model.compile(
            _optimizer(keras, workload),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            steps_per_execution=steps_per_execution,
        )
        first_weights = _weights(workload.first_params)

        def train(num_steps):
            model.set_weights(first_weights)
            for variable in model.optimizer.variables if model.optimizer.built else ():
                if variable is not model.optimizer.learning_rate:
                    variable.assign(np.zeros(variable.shape, variable.dtype))
            passes = TimedPasses(workload, num_steps)
            pairs = ((batch["x"], batch["label"]) for _ in range(passes.num_passes) for batch in passes())
            model.fit(
                pairs,
                epochs=passes.num_passes,
                steps_per_epoch=num_steps // passes.num_passes,
                verbose=0,
                shuffle=False,
            )
            weights = [variable.value for variable in model.trainable_variables]
            jax.block_until_ready(weights)
            return passes.trained(_params(workload.first_params, weights))

        return train

    return contestant


def _import_keras() -> Any:
    if importlib.util.find_spec("keras") is None:
        raise Absent("Keras is not installed. Run `pip install keras`.")
    os.environ.setdefault("KERAS_BACKEND", "jax")  # Keras reads it on import.
    import keras

    if keras.backend.backend() != "jax":
        raise Absent(f"Keras uses the {keras.backend.backend()} backend. Set KERAS_BACKEND=jax.")
    return keras


def _model(keras: Any, workload: Workload) -> Any:
    layers, inputs = keras.layers, keras.Input(workload.input_shape)
    match workload.model:
        case MLP(width=width):
            outputs = layers.Dense(10)(layers.Dense(width, "relu")(inputs))
        case CNN():
            x = inputs
            for features in (32, 64):
                x = layers.AveragePooling2D(2)(layers.Conv2D(features, 3, padding="same", activation="relu")(x))
            outputs = layers.Dense(10)(layers.Dense(256, "relu")(layers.Flatten()(x)))
        case Deep(depth=depth, width=width):
            x = inputs
            for _ in range(depth):
                x = layers.Add()([x, layers.Dense(width)(layers.ReLU()(x))])
            outputs = layers.Dense(10, use_bias=False)(x)
        case _:
            raise Absent(f"The model of {workload.name} has no Keras version.")
    return keras.Model(inputs, outputs)


def _optimizer(keras: Any, workload: Workload) -> Any:
    match workload.name:
        case "W0":
            return keras.optimizers.SGD(0.01)
        case "W1":
            return keras.optimizers.SGD(1e-3)
        case "W2":
            return keras.optimizers.SGD(1e-3, momentum=0.9)
        case "W3":
            return keras.optimizers.Adam(1e-5, epsilon=1e-8)
    raise Absent(f"The optimizer of {workload.name} has no Keras version.")


def _weights(params: dict[str, dict[str, Any]]) -> list[Any]:
    """Returns the parameters of a Linen model in the order of Keras: layer by layer, the kernel first."""
    return [params[layer][kind] for layer in sorted(params) for kind in ("kernel", "bias") if kind in params[layer]]


def _params(like: dict[str, dict[str, Any]], weights: list[Any]) -> dict[str, dict[str, Any]]:
    """Returns Keras weights as the parameters of the Linen model; the inverse of `_weights`."""
    names = [(layer, kind) for layer in sorted(like) for kind in ("kernel", "bias") if kind in like[layer]]
    params: dict[str, dict[str, Any]] = {layer: {} for layer in like}
    for (layer, kind), weight in zip(names, weights, strict=True):
        params[layer][kind] = weight
    return params
