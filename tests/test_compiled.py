"""Compilation: once per program, ahead of time on request, and with an explanation of each recompilation."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import tiny
from programs.models import batch_of

import jaxloop
from jaxloop import check


@pytest.fixture
def compilations(monkeypatch):
    """The names of the programs that XLA compiles during the test."""
    names, compile_or_get_cached = [], jax._src.compiler.compile_or_get_cached

    def counting(backend, computation, *args, **kwargs):
        names.append(computation.operation.attributes["sym_name"].value)
        return compile_or_get_cached(backend, computation, *args, **kwargs)

    monkeypatch.setattr(jax._src.compiler, "compile_or_get_cached", counting)
    return names


def make(partitioner=None, cls=tiny.Traced):
    step = tiny.make_step(cls, partitioner=partitioner or jaxloop.SingleDevicePartitioner())
    return step, jax.block_until_ready(step.initialize_model([1, 3]))


def batches(number, rows=8):
    return [batch_of(index, rows) for index in range(number)]


# Ahead of time ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "options"),
    [(1, {}), (8, {"nan_policy": "raise"}), (8, {"nan_policy": "skip", "steps_per_dispatch": 4})],
)
def test_loop_runs_the_program_compiled_ahead_of_time(options, devices, data_parallel, compilations):
    step, state = make(None if devices == 1 else data_parallel(devices))
    loop = jaxloop.TrainLoop(step, **options)
    spec = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), batches(1)[0])
    loop.compile(state, spec)
    traces = step.traces
    assert traces == 1 + ("steps_per_dispatch" in options) and any(
        "run" in name or "fused" in name for name in compilations
    )
    compilations.clear()
    state, _ = loop(state, batches(10))
    assert int(state.step) == 10 and step.traces == traces
    assert not any("run" in name or "fused" in name for name in compilations)


def test_run_compiles_once_for_training_and_once_for_evaluation():
    train_step, state = make()
    eval_step, _ = make()
    run = jaxloop.OuterLoop(jaxloop.TrainLoop(train_step), [jaxloop.EvalLoop(eval_step)])
    run(state, batches(100), 100, 10, eval_specs=[jaxloop.EvalSpec(batches(3))])
    assert train_step.traces == eval_step.traces == 1


# Flat states ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "options"), [(8, {}), (None, {"nan_policy": "skip"}), (1, {"steps_per_dispatch": 4})]
)
def test_loop_and_step_train_alike(options, devices, data_parallel):
    partitioner = devices and data_parallel(devices)
    step, state = make(partitioner)
    for batch in batches(10):
        state, _ = step(state, batch)
    step, other = make(partitioner)
    other, _ = jaxloop.TrainLoop(step, **options)(other, batches(10))
    jax.tree.map(np.testing.assert_array_equal, (state.step, state.params), (other.step, other.params))
    assert type(other) is type(state) and step.traces == 1 + ("steps_per_dispatch" in options)


def test_jit_arguments_apply_to_the_unflattened_state():
    step, state = make()
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    step.compile(in_shardings=(jax.tree.map(lambda _: place, state), None))
    state, _ = jaxloop.TrainLoop(step)(state, batches(10))
    assert int(state.step) == 10 and step.traces == 1


def test_custom_partitioner_gets_the_unflattened_state():
    seen = []

    class Mine(jaxloop.SingleDevicePartitioner):
        def partition(self, fn, **jit_kwargs):
            noting = lambda state, batch: seen.append(type(state)) or fn(state, batch)
            return super().partition(noting, **jit_kwargs)

    step, state = make(Mine())
    jaxloop.TrainLoop(step)(state, batches(10))
    assert seen == [jaxloop.TrainState]
    partitioner = jaxloop.SingleDevicePartitioner()
    partitioner.partition = Mine().partition
    step, state = make(partitioner)
    jaxloop.TrainLoop(step)(state, batches(10))
    assert seen == [jaxloop.TrainState] * 2


# Cost -------------------------------------------------------------------------------------------------


def test_cost_of_a_step_is_that_of_its_matrix_products():
    step, state = make()
    found = check.cost_analysis(step, state, batches(1, rows=4096)[0])
    products = 2 * 2 * 4096 * 3  # Forward pass and kernel gradient. The gradient of the inputs isn't needed.
    assert products <= found.flops <= 2.5 * products
    assert step.num_flops == found.flops
    state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert found.argument_bytes >= state_bytes + 4096 * 4 * 4
    assert found.alias_bytes >= state_bytes - state.step.nbytes  # `state.step` isn't donated.
    assert found.peak_bytes >= found.argument_bytes and "KiB of a device's memory" in str(found)


# Recompilation ----------------------------------------------------------------------------------------


def test_recompilation_for_a_different_batch_dtype_is_explained(caplog):
    step, state = make()
    data = batches(4)
    data[2]["y"] = data[2]["y"].astype(np.int32)
    with jax.numpy_dtype_promotion("standard"):
        jaxloop.TrainLoop(step)(state, data)
    assert step.traces == 2
    assert "Traced.run is compiled again" in caplog.text
    assert "batch['y']: float32[8, 1] -> int32[8, 1]" in caplog.text and "state/" not in caplog.text


def test_recompilation_for_a_weakly_typed_leaf_is_explained(caplog):
    class Weak(tiny.Traced):
        def run(self, state, batch):
            self.traces += 1
            return {"w": state["w"] * batch["x"].mean(), "step": state["step"] + 1}, {}

    step, _ = make(cls=Weak)
    state = {"w": jnp.asarray(1.0), "step": jnp.int32(0)}
    jaxloop.loop.Loop(step)(state, batches(3))
    assert step.traces == 2 and "state/w: float32[] (weakly typed) -> float32[]" in caplog.text


def test_short_batch_and_second_loop_need_no_explanation(caplog):
    step, state = make()
    loop = jaxloop.TrainLoop(step)
    state, _ = loop(state, [*batches(3), *batches(1, rows=5)])
    loop(state, [*batches(3), *batches(1, rows=5)])
    assert step.traces == 2 and "compiled again" not in caplog.text


# Compilation cache ------------------------------------------------------------------------------------

PROGRAM = """
import json, sys, jax
import jaxloop
from jax import monitoring
jaxloop.enable_compilation_cache(sys.argv[1])
events = []
monitoring.register_event_listener(lambda name, **kwargs: events.append(name))
from jaxloop import examples
step, state, batches = examples.tiny_regression()
jaxloop.TrainLoop(step)(state, batches, 3)
print(json.dumps([sum(name.endswith(kind) for name in events) for kind in ("/cache_misses", "/cache_hits")]))
"""


def test_second_process_compiles_nothing(tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    counts = []
    for _ in range(2):
        program = [sys.executable, "-c", PROGRAM, str(tmp_path / "cache")]
        run = subprocess.run(program, capture_output=True, text=True, env=environment, check=True)
        counts.append(json.loads(run.stdout.splitlines()[-1]))
    (missed, _), (missed_again, hit) = counts
    assert missed > 0 and missed_again == 0 and hit == missed
