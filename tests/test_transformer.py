"""The transformer learns, goes on in other layouts, and says what it would cost on devices that are not there."""

import re
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxloop
from jaxloop import checkpoint
from jaxloop.examples import transformer

SMALL = transformer.Size(16, 1, 2, 32, 32, 16, 1e-2, 6)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setitem(transformer.SIZES, "small", SMALL)
    text = np.frombuffer(b"def a(b):\n    return b\n\0" * 500, np.uint8)
    monkeypatch.setattr(transformer, "read_standard_library", lambda: text)
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)  # To compile takes most of the time.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
    jax.config.update("jax_disable_most_optimizations", before)


def options(workdir, **others):
    defaults = {"size": "small", "partitioner": "fsdp", "model_devices": 2, "accumulate": 1, "write": 8, "seed": 0}
    return types.SimpleNamespace(
        **{
            "workdir": workdir,
            "batch_size": None,
            "train_steps": None,
            "check": False,
            "topology": None,
            **defaults,
            **others,
        }
    )


def test_a_check_of_it_finds_nothing_and_trains_nothing(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        transformer.run(options(tmp_path, partitioner="tensor", check=True))
    assert ended.value.code is None
    assert "No problem. Nothing was run" in capsys.readouterr().out
    assert not checkpoint.all_steps(tmp_path / "checkpoints")


def test_it_learns_in_each_layout_alike_and_goes_on_in_another(tmp_path, capsys):
    losses = {
        kind: transformer.run(options(tmp_path / kind, partitioner=kind, accumulate=1 + (kind == "fsdp"), write=write))
        for kind, write in (("data", 8), ("fsdp", 0))
    }
    # In bfloat16, whose sums are rounded in each layout otherwise.
    np.testing.assert_allclose(losses["fsdp"], losses["data"], rtol=2e-3)
    assert losses["data"] < np.log(256)
    further = transformer.run(options(tmp_path / "fsdp", partitioner="tensor", train_steps=9, write=0))
    assert further < losses["fsdp"] and checkpoint.all_steps(tmp_path / "fsdp" / "checkpoints")[-1] == 9
    printed = capsys.readouterr().out
    assert (
        printed.count("small, on 8 devices:\n") == 3 and re.search(r"total +6,704 ", printed) and "bytes/s" in printed
    )
    assert printed.count(" steps:\ndef") == 3 and "--- generated after 6 steps:\ndef" in printed


def test_a_byte_sees_those_before_it_in_its_file_and_the_first_of_a_file_is_nobodys_to_tell():
    tokens = jnp.array([[5, 6, 0, 7, 8]])
    assert transformer.visible(tokens)[0].astype(int).tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 1, 1],
    ]
    step = transformer.make_step(SMALL, jaxloop.SingleDevicePartitioner(), 4, 1, 0, False)
    state = step.initialize_model()
    predict = lambda tokens: state.apply_fn(state.params, state.batch_stats, state.collections, train=False)(tokens)[0]
    # Up to rounding, which may be otherwise in a longer array.
    np.testing.assert_allclose(
        predict(tokens[:, :2]), predict(jnp.array([[5, 6, 9, 9, 9]]))[:, :2], atol=1e-5, err_msg="It looks ahead."
    )
    logits = jnp.zeros([1, 4, 256]).at[0, 2, :].set(jnp.linspace(0, 9, 256))  # Of the one that doesn't count.
    np.testing.assert_allclose(transformer.next_byte_loss(logits, {"tokens": tokens}), np.log(256), rtol=1e-6)


def test_a_dry_run_compiles_for_devices_that_are_not_there():
    command = [sys.executable, "-m", "jaxloop.examples.transformer", "--dry_run", "--devices=16", "--size=tiny"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "mesh {'data': 16}" in run.stdout and "443,008 parameters" in run.stdout
    assert re.search(r"all-gather +\d\.\d MiB in \d+\n", run.stdout) and "without running a step" in run.stdout
