"""Tests of `predict`, which returns the model's outputs once per example and in order."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jaxloop
from jaxloop import partition

pytestmark = pytest.mark.usefixtures("compile_fast")


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(3)(x))
        return {"logits": nn.Dropout(0.5, deterministic=not train)(x), "norm": jnp.square(x).sum(-1)}


class NNX(nnx.Module):
    def __init__(self, rngs):
        self.dense, self.dropout = nnx.Linear(4, 3, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return {"logits": self.dropout(self.dense(x))}


def loss(outputs, batch):
    return optax.softmax_cross_entropy_with_integer_labels(outputs["logits"], batch["label"])


X = np.random.default_rng(0).normal(size=[21, 4]).astype(np.float32)


def split(*sizes, array=X):
    ends = np.cumsum(sizes)
    return [{"x": array[end - size : end]} for size, end in zip(sizes, ends, strict=True)]


def make_step(model=None, **options):
    return jaxloop.LossStep(jax.random.key(0), Linen() if model is None else model, loss=loss, **options)


@pytest.mark.parametrize(
    ("kind", "sizes"), [("one device", (3, 8, 10)), ("data", (8, 8, 5)), ("fsdp", (3, 8, 10)), ("explicit", (21,))]
)
def test_predictions_match_the_model_for_any_batch_sizes_and_mesh(kind, sizes):
    mesh = partition.create_mesh(data=-1, devices=jax.devices()[:4])
    partitioner = {
        "one device": partition.SingleDevicePartitioner(),
        "data": partition.DataParallelPartitioner(mesh, "data"),
        "fsdp": partition.FSDPPartitioner(mesh, "data", min_size=1),
        "explicit": partition.ExplicitPartitioner(mesh, "data"),
    }[kind]
    step = make_step(partitioner=partitioner)
    state = step.initialize_model([1, 4], train=False)
    expected = make_step().model.apply(jax.device_get(state.variables), X, train=False)
    for _ in range(2):
        predicted = step.predict(state, split(*sizes))
        assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(predicted))
        jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5), predicted, dict(expected))


def test_a_train_step_predicts_in_evaluation_mode_and_keeps_its_state():
    step = make_step(NNX, nnx_model_args=(), train=True, optimizer=optax.sgd(0.1))
    state = step.initialize_model(None)
    one, other = (step.predict(state, split(8, 13)) for _ in range(2))  # Dropout would make them differ.
    np.testing.assert_array_equal(one["logits"], other["logits"])
    kernel, bias = state.params["dense"]["kernel"], state.params["dense"]["bias"]
    np.testing.assert_allclose(one["logits"], X @ np.asarray(kernel[...]) + np.asarray(bias[...]), rtol=1e-4, atol=1e-6)


def test_masked_examples_are_omitted():
    step = make_step()
    state = step.initialize_model([1, 4], train=False)
    mask = np.arange(21) % 3 > 0
    predicted = step.predict(state, [{"x": X, "mask": mask}])
    np.testing.assert_array_equal(predicted["norm"], step.predict(state, [{"x": X}])["norm"][mask])


def test_an_empty_dataset_raises():
    step = make_step()
    state = step.initialize_model([1, 4], train=False)
    batches = iter(split(21))
    step.predict(state, batches)
    with pytest.raises(ValueError, match="dataset without batches"):
        step.predict(state, batches)


def test_outputs_without_one_row_per_example_raise():
    model = (lambda key, x: jnp.ones([4, 2]), lambda params, x: {"mean": (x @ params).mean()})
    step = jaxloop.LossStep(jax.random.key(0), model, loss=loss)
    with pytest.raises(ValueError, match=r"For a batch of 21 examples, the model returned mean float32\[\]"):
        step.predict(step.initialize_model([1, 4]), split(21))
