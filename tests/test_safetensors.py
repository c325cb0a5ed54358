"""Tests of loading and saving weights in the safetensors format."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jaxloop import checkpoint
from jaxloop.partition import create_mesh

safetensors = pytest.importorskip("safetensors.numpy")

PARAMS = {
    "encoder": {"kernel": np.arange(32, dtype=np.float32).reshape(8, 4), "bias": jnp.arange(4, dtype=jnp.bfloat16)},
    "layers": [{"scale": np.float16([1, 2])}, {"scale": np.float16([3, 4])}],
    "count": np.int32(7),
}


@pytest.fixture
def path(tmp_path):
    """The path of the saved parameters."""
    path = tmp_path / "weights.safetensors"
    checkpoint.save_params(PARAMS, path)
    return path


def test_saved_params_load_bit_for_bit(path, tmp_path, assert_same):
    checkpoint.save_params(PARAMS, path)  # Replaces the file.
    assert os.listdir(tmp_path) == ["weights.safetensors"]
    loaded = checkpoint.load_params(path, into=PARAMS)
    assert_same(loaded, PARAMS)
    assert jax.tree.map(lambda leaf: leaf.dtype, loaded) == jax.tree.map(lambda leaf: leaf.dtype, PARAMS)
    nested = checkpoint.load_params(str(path))
    assert set(nested) == {"encoder", "layers", "count"} and nested["layers"]["1"]["scale"].shape == (2,)
    assert {*safetensors.load_file(path)} >= {"encoder.kernel", "layers.0.scale"}


def test_each_device_loads_its_shard(path, assert_same):
    sharding = NamedSharding(create_mesh(data=8), PartitionSpec("data"))
    into = {"kernel": jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=sharding)}
    loaded = checkpoint.load_params(path, into=into, paths={"encoder/kernel": "kernel"})
    assert loaded["kernel"].sharding == sharding
    assert_same(loaded["kernel"], PARAMS["encoder"]["kernel"])
    checkpoint.save_params(loaded, path)  # From several devices.
    assert_same(checkpoint.load_params(path, into=into), loaded)


def test_weights_from_another_library_load_into_an_nnx_model(tmp_path, assert_same):
    path = tmp_path / "model.safetensors"
    kernel = np.random.default_rng(0).normal(size=[3, 2]).astype(np.float32)
    safetensors.save_file({"model.0.dense.kernel": kernel, "model.0.dense.bias": np.ones(2, np.float32)}, path)
    params = nnx.state(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), nnx.Param)
    loaded = checkpoint.load_params(path, into=params, paths={"model/0/dense/**": "**"})
    assert_same(loaded["kernel"][...], kernel)
    checkpoint.save_params(loaded, path)
    assert sorted(safetensors.load_file(path)) == ["bias", "kernel"]
    assert_same(checkpoint.load_params(path, into=params), loaded)


@pytest.mark.parametrize(
    ("params", "name", "message"),
    [
        ({"w": np.ones(2)}, "weights.bin", "name ends in .safetensors, got"),
        ({"a.b": np.ones(2, np.float32)}, "w.safetensors", "'a.b' can't have dots"),
    ],
)
def test_unsupported_names_raise(tmp_path, params, name, message):
    with pytest.raises(ValueError, match=message):
        checkpoint.save_params(params, tmp_path / name)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("damage", ["truncated", "text", "empty", "lengths"])
def test_a_damaged_file_raises_and_is_named(path, damage):
    content = path.read_bytes()
    path.write_bytes({"truncated": content[:-9], "text": b"no weights", "empty": b"", "lengths": b"\xff" * 64}[damage])
    with pytest.raises(ValueError, match="weights.safetensors is damaged, or not a safetensors file"):
        checkpoint.load_params(path)


def test_wrong_paths_and_steps_raise(path, tmp_path):
    with pytest.raises(ValueError, match="has neither steps nor an average"):
        checkpoint.load_params(path, 100)
    with pytest.raises(FileNotFoundError):
        checkpoint.load_params(tmp_path / "none.safetensors")
    (tmp_path / "pipe.safetensors").mkdir()
    with pytest.raises(OSError, match="directory"):
        checkpoint.load_params(tmp_path / "pipe.safetensors")


@pytest.mark.parametrize(
    "params",
    [
        {"count": np.int64([2**40])},
        {"critic": {"value": np.float32([1])}, "actor": np.float32([2])},
        {"a": np.ones([0, 3], np.float32), "b": np.ones([2, 0])},
    ],
    ids=["64 bits", "a leaf named like a value of NNX", "empty arrays"],
)
def test_odd_params_are_saved_in_a_new_directory_and_loaded(params, tmp_path, assert_same):
    path = tmp_path / "new" / "weights.safetensors"
    checkpoint.save_params(params, path)
    assert_same(checkpoint.load_params(path), params)
    assert_same(checkpoint.load_params(path, into=params), params)


@pytest.mark.parametrize("names", [("a.b", "a/b"), ("a", "a.b")])
def test_tensors_whose_paths_collide_raise(names, tmp_path):
    safetensors.save_file({name: np.ones(2, np.float32) for name in names}, tmp_path / "odd.safetensors")
    with pytest.raises(ValueError, match="differ only in dots and slashes, or extend another"):
        checkpoint.load_params(tmp_path / "odd.safetensors")
