"""Tests that the transformer example learns, resumes in other layouts, and compiles for missing devices."""

import importlib.util
import pathlib
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxloop
from jaxloop import checkpoint

PROGRAM = pathlib.Path(__file__).parents[1] / "docs" / "examples" / "transformer.py"
_spec = importlib.util.spec_from_file_location("transformer", PROGRAM)
assert _spec is not None and _spec.loader is not None
transformer = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(transformer)

SMALL = transformer.Size(16, 1, 2, 32, 32, 16, 1e-2, 6)


@pytest.fixture(autouse=True)
def small(monkeypatch, compile_fast):
    monkeypatch.setitem(transformer.SIZES, "small", SMALL)
    text = np.frombuffer(b"def a(b):\n    return b\n\0" * 500, np.uint8)
    monkeypatch.setattr(transformer, "read_standard_library", lambda: text)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def options(workdir, **others):
    defaults = {"size": "small", "partitioner": "fsdp", "model_devices": 2, "accumulate": 1, "write": 8, "seed": 0}
    defaults |= {"batch_size": None, "train_steps": None, "check": False, "topology": None}
    return types.SimpleNamespace(**{**defaults, "workdir": workdir, **others})


def test_check_finds_no_problem_and_does_not_train(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        transformer.run(options(tmp_path, partitioner="tensor", check=True))
    assert ended.value.code is None
    assert "No problem. Nothing was run" in capsys.readouterr().out
    assert not checkpoint.all_steps(tmp_path / "checkpoints")


def test_layouts_learn_alike_and_a_run_resumes_in_another_layout(tmp_path, capsys):
    losses = {
        kind: transformer.run(options(tmp_path / kind, partitioner=kind, accumulate=1 + (kind == "fsdp"), write=write))
        for kind, write in (("data", 8), ("fsdp", 0))
    }
    # Sums in bfloat16 are rounded differently in each layout.
    np.testing.assert_allclose(losses["fsdp"], losses["data"], rtol=2e-3)
    assert losses["data"] < np.log(256)
    further = transformer.run(options(tmp_path / "fsdp", partitioner="tensor", train_steps=9, write=0))
    assert further < losses["fsdp"] and checkpoint.all_steps(tmp_path / "fsdp" / "checkpoints")[-1] == 9
    printed = capsys.readouterr().out
    assert printed.count("small, on 8 devices:\n") == 3
    assert "6,704 parameters; state:" in printed and "bytes/s" in printed
    assert printed.count(" steps:\ndef") == 3 and "--- generated after 6 steps:\ndef" in printed


def test_bytes_attend_within_their_file_and_its_first_byte_has_no_loss():
    tokens = jnp.array([[5, 6, 0, 7, 8]])
    np.testing.assert_array_equal(
        transformer.visible(tokens)[0],
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]],
    )
    state = transformer.make_step(SMALL, jaxloop.SingleDevicePartitioner(), 4, 1, 0, False).initialize_model()
    predict = lambda tokens: state.apply_fn(state.params, state.batch_stats, state.collections, train=False)(tokens)[0]
    # Up to rounding, which may differ in a longer array.
    seen, not_seen = predict(tokens[:, :2]), predict(jnp.array([[5, 6, 9, 9, 9]]))[:, :2]
    np.testing.assert_allclose(seen, not_seen, atol=1e-5, err_msg="It looks ahead.")
    logits = jnp.zeros([1, 4, 256]).at[0, 2, :].set(jnp.linspace(0, 9, 256))  # At the byte without a loss.
    np.testing.assert_allclose(transformer.next_byte_loss(logits, {"tokens": tokens}), np.log(256), rtol=1e-6)


def test_a_dry_run_compiles_for_missing_devices():
    command = [sys.executable, PROGRAM, "--dry_run", "--devices=16", "--size=tiny"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "mesh {'data': 16}" in run.stdout and "443,008 parameters" in run.stdout
    assert "FLOPs per step" in run.stdout and "without running a step" in run.stdout
