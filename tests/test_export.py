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
inputs = dict(np.load(sys.argv[2]))
outputs = model.call(inputs if len(inputs) > 1 else inputs["x"])
assert "jaxloop" not in sys.modules and "flax" not in sys.modules
np.save(sys.argv[3], outputs)
print(*model.platforms)
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


def call_in_new_process(path, tmp_path, **inputs):
    np.savez(tmp_path / "inputs.npz", **inputs)
    command = [sys.executable, "-I", "-c", PROGRAM, path, tmp_path / "inputs.npz", tmp_path / "outputs.npy"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    return np.load(tmp_path / "outputs.npy"), process.stdout.split()


IMAGES = np.random.default_rng(0).normal(size=[5, 8, 8, 1]).astype(np.float32)


@pytest.mark.parametrize("kind", ["linen", "nnx", "bfloat16", "fsdp"])
def test_exported_model_gives_the_same_outputs_in_a_new_process(kind, tmp_path):
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
    outputs, platforms = call_in_new_process(path, tmp_path, x=IMAGES)
    assert platforms == ["cpu", "cuda", "tpu"]
    tolerance = 1e-2 if kind == "bfloat16" else 1e-5  # Versions of XLA round intermediate values differently.
    np.testing.assert_allclose(outputs, expected, rtol=tolerance, atol=tolerance / 10)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["inputs.npz", "model.jaxexport", "outputs.npy"]


def test_named_inputs_and_a_fixed_batch_size(tmp_path):
    step = jaxloop.LossStep(jax.random.key(0), TwoInputs(), loss=loss)
    spec = {"number": [1], "x": [1, 3]}
    state = step.initialize_model(spec)
    jaxloop.export(step, state, spec, tmp_path / "model", batch_size=2, platforms=["cpu"])
    inputs = {"number": np.float32([2, 3]), "x": np.ones([2, 3], np.float32)}
    outputs, platforms = call_in_new_process(tmp_path / "model", tmp_path, **inputs)
    assert platforms == ["cpu"]
    np.testing.assert_allclose(outputs, state.apply_fn(state.variables, **inputs), rtol=1e-6)


def test_error_suggests_batch_size_if_the_model_needs_it(tmp_path):
    model = (lambda key, x: jnp.ones(3), lambda params, x: x @ jnp.ones([3, x.shape[0] // 2 + 1]))
    step = jaxloop.LossStep(jax.random.key(0), model, loss=loss)
    state = step.initialize_model([1, 3])

    def fails_without_a_number(params, x):
        return x + params[: int(x.shape[0]), None]

    broken = state.replace(apply_fn=fails_without_a_number)
    with pytest.raises(Exception) as caught:
        jaxloop.export(step, broken, [1, 3], tmp_path / "model")
    assert "batch_size=" in "".join(caught.value.__notes__)
    assert not list(tmp_path.iterdir())


def test_failed_export_leaves_no_file(tmp_path, monkeypatch):
    def fail(self):
        raise ImportError("flatbuffers")

    step = jaxloop.LossStep(jax.random.key(0), Linen(), loss=loss)
    state = step.initialize_model([1, 8, 8, 1], train=False)
    monkeypatch.setattr(jax.export.Exported, "serialize", fail)
    with pytest.raises(ImportError, match="flatbuffers"):
        jaxloop.export(step, state, [1, 8, 8, 1], tmp_path / "model")
    assert not list(tmp_path.iterdir())
