"""Tests that an exported model gives the same outputs without jaxloop and the model's code."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import jaxloop
from jaxloop import partition

pytestmark = pytest.mark.usefixtures("compile_fast")

PROGRAM = """
import sys
import numpy as np
from jax import export
with open(sys.argv[1], "rb") as file:
    model = export.deserialize(bytearray(file.read()))
np.save(sys.argv[3], model.call(dict(np.load(sys.argv[2]))))
assert "jaxloop" not in sys.modules and "flax" not in sys.modules
"""


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(use_running_average=not train)(nn.Conv(4, (3, 3))(x))
        return nn.Dense(2)(nn.Dropout(0.5, deterministic=not train)(x.reshape(x.shape[0], -1)))


class NNX(nnx.Module):
    def __init__(self, rngs):
        self.conv, self.dropout = nnx.Conv(1, 4, (3, 3), rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.conv(x)).sum(axis=(1, 2))


class TwoInputs(nn.Module):
    @nn.compact
    def __call__(self, number, x):
        return nn.Dense(2)(x) * number[:, None]


def loss(outputs, batch):
    return outputs.mean(-1)


def load(path):
    return jax.export.deserialize(bytearray(path.read_bytes()))


IMAGES = np.random.default_rng(0).normal(size=[5, 8, 8, 1]).astype(np.float32)


@pytest.mark.parametrize("kind", ["nnx", "bfloat16", "fsdp"])
def test_exported_model_gives_the_same_outputs(kind, tmp_path):
    options = {"nnx_model_args": ()} if kind == "nnx" else {}
    options |= {"compute_dtype": jnp.bfloat16} if kind == "bfloat16" else {}
    if kind == "fsdp":
        options["partitioner"] = partition.FSDPPartitioner(partition.create_mesh(data=8), "data", min_size=1)
    step = jaxloop.LossStep(jax.random.key(0), NNX if kind == "nnx" else Linen(), loss=loss, **options)
    state = step.initialize_model([1, 8, 8, 1], **({} if kind == "nnx" else {"train": False}))
    path = tmp_path / "model.jaxexport"
    path.write_text("an older file")
    with jax.numpy_dtype_promotion("standard"):  # Needed by Flax's BatchNorm in bfloat16.
        jaxloop.export(step, state, [1, 8, 8, 1], path)
        expected = step.predict(state, [{"x": IMAGES}])
    model = load(path)
    assert model.platforms == ("cpu", "cuda", "tpu")
    tolerance = 1e-2 if kind == "bfloat16" else 1e-5  # Versions of XLA round intermediate values differently.
    np.testing.assert_allclose(model.call(IMAGES), expected, rtol=tolerance, atol=tolerance / 10)
    assert list(tmp_path.iterdir()) == [path]


def test_named_inputs_and_a_fixed_batch_size_in_a_process_without_the_code_of_the_model(tmp_path):
    step = jaxloop.LossStep(jax.random.key(0), TwoInputs(), loss=loss)
    spec = {"number": [1], "x": [1, 3]}
    state = step.initialize_model(spec)
    jaxloop.export(step, state, spec, tmp_path / "model", batch_size=2, platforms=["cpu"])
    inputs = {"number": np.float32([2, 3]), "x": np.ones([2, 3], np.float32)}
    np.savez(tmp_path / "inputs.npz", **inputs)
    command = [sys.executable, "-I", "-c", PROGRAM, *(tmp_path / name for name in ("model", "inputs.npz", "out.npy"))]
    subprocess.run(command, check=True)
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), state.apply_fn(state.variables, **inputs), rtol=1e-6)


def test_error_suggests_batch_size_if_the_model_needs_it(tmp_path):
    model = (lambda key, x: jnp.ones(3), lambda params, x: x + params[: int(x.shape[0]), None])
    step = jaxloop.LossStep(jax.random.key(0), model, loss=loss)
    with pytest.raises(Exception) as caught:
        jaxloop.export(step, step.initialize_model([1, 3]), [1, 3], tmp_path / "model")
    assert "batch_size=" in "".join(caught.value.__notes__)
    assert not list(tmp_path.iterdir())
