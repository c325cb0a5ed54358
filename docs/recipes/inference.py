"""Loads the best checkpoint of a run, and classifies any number of images."""

import tempfile

import jax
import numpy as np
import optax
from flax import linen as nn
from sklearn import datasets

import jaxloop
from jaxloop import checkpoint, every


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(10)(nn.relu(nn.Dense(64)(x)))


def loss(logits, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses, {"accuracy": logits.argmax(-1) == batch["label"]}


images, labels = datasets.load_digits(return_X_y=True)
images = (images / 16).astype(np.float32)


def batch_of(number):
    rows = np.random.default_rng(number).choice(900, 64)
    return {"image": images[rows], "label": labels[rows]}


def train(directory):
    step = jaxloop.LossStep(jax.random.key(0), MLP(), optax.adam(3e-3), train=True, loss=loss)
    eval_step = jaxloop.LossStep(jax.random.key(0), MLP(), loss=loss)
    when = every(steps=100)
    save = jaxloop.CheckpointAction(directory, when, best=("test/accuracy", "max"))
    outer_loop = jaxloop.OuterLoop(jaxloop.TrainLoop(step, end_actions=[save]), [jaxloop.EvalLoop(eval_step)])
    test = jaxloop.EvalSpec([{"image": images[900:], "label": labels[900:]}], interval=when, name="test")
    outer_loop(step.initialize_model([1, 64]), jaxloop.from_index(batch_of), 600, eval_specs=[test])


class Predictor:
    """Predicts with a checkpoint's parameters. All batches have the same size, so the model is compiled only once."""

    def __init__(self, directory, step="best", batch_size=256):
        self._batch_size, params = batch_size, checkpoint.load_params(directory, step)
        predict = jax.jit(lambda params, images: MLP().apply({"params": params}, images).argmax(-1))
        self._predict = lambda images: np.asarray(predict(params, images))

    def __call__(self, images):
        classes = []
        for start in range(0, len(images), self._batch_size):
            part = images[start : start + self._batch_size]
            padding = [(0, self._batch_size - len(part)), (0, 0)]
            classes.append(self._predict(np.pad(part, padding))[: len(part)])
        return np.concatenate(classes)


directory = tempfile.mkdtemp()
train(directory)
predictor, best = Predictor(directory), checkpoint.best_step(directory)
print(f"checkpoint of step {best}: {np.mean(predictor(images[900:]) == labels[900:]):.1%} correct")
print(f"the first ten: {predictor(images[900:910])}")
