"""A run that hangs ends with a report of which process hangs where; one that is slow goes on."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from programs import hanging

import jaxloop
from jaxloop import __main__ as command_line
from jaxloop import examples


def test_a_hang_in_one_process_is_named(tmp_path, capsys):
    problems = hanging.problems_of(tmp_path / "run", "begin", processes=1, process=0)
    assert problems == []
    command_line.main(["status", str(tmp_path / "run")])
    assert "hang: in HangingStep.begin, step 8" in capsys.readouterr().out


def test_a_hang_in_one_of_two_processes_is_named_and_both_exit(tmp_path):
    assert hanging.problems_of(tmp_path / "run", "data", processes=2, process=1) == []


def test_a_slow_run_within_its_limits_goes_on(tmp_path, data_parallel):
    """Compiling, the first run, evaluating and saving take longer than a step may, and a batch nearly as long."""
    has_run = set()

    def wait_at_first(batch):
        if batch.shape not in has_run:
            has_run.add(batch.shape)
            time.sleep(2)  # As if another process was still compiling.
        return batch

    class Slow(jaxloop.Action):
        time_category = "checkpoints"
        uses_outputs = False

        def __call__(self, state, outputs, **kwargs):
            time.sleep(0.7)

    class SlowToCompile(jaxloop.Step):
        def run(self, state, batch):
            time.sleep(0.7)  # While it is traced.
            batch = jax.pure_callback(wait_at_first, jax.typeof(batch), batch)
            loss, grads = jax.value_and_grad(lambda p: jnp.sum(state.apply_fn({"params": p}, batch)))(state.params)
            return (state.apply_gradients(grads=grads) if self.train else state), {"loss": loss}

    def batches(rows):
        for number in range(6):
            time.sleep(0.2)
            yield np.ones([rows[number], 3], np.float32)

    partitioner = data_parallel(2)  # Its steps run asynchronously.
    step = SlowToCompile(jax.random.key(0), nn.Dense(1), optax.sgd(0.1), partitioner, train=True)
    eval_step = SlowToCompile(jax.random.key(0), nn.Dense(1), partitioner=partitioner)
    outer_loop = jaxloop.OuterLoop(
        jaxloop.TrainLoop(step, end_actions=[Slow(jaxloop.every(steps=3))]),
        [jaxloop.EvalLoop(eval_step)],
        workdir=tmp_path,
        watchdog=jaxloop.Watchdog(step_secs=0.45, startup_secs=30, eval_secs=30, checkpoint_secs=30),
    )
    eval_spec = jaxloop.EvalSpec([np.ones([2, 3], np.float32)])
    state, _ = outer_loop(step.initialize_model([1, 3]), batches([2, 2, 2, 4, 4, 4]), 6, 3, [eval_spec])
    assert int(state.step) == 6
    assert not (tmp_path / "failures").exists()


@pytest.mark.parametrize("limits", [{"step_secs": 0}, {"eval_secs": "1 h"}, {"startup_secs": True}])
def test_limits_that_are_no_seconds_are_refused(limits):
    with pytest.raises(ValueError, match=rf"Watchdog.{next(iter(limits))} must be a positive number of seconds"):
        jaxloop.Watchdog(**limits)


def test_what_is_no_watchdog_is_refused():
    step, _, _ = examples.tiny_regression()
    with pytest.raises(TypeError, match=r"Watchdog\(step_secs=600\)"):
        jaxloop.OuterLoop(jaxloop.TrainLoop(step), watchdog=600)
