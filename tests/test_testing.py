"""Tests of `jaxloop.testing`."""

import jax
import optax
import pytest
from flax import linen as nn

import jaxloop
from jaxloop import examples, testing
from jaxloop.engine.program import Program


def make_run(workdir, make_data=lambda batches: batches, change=lambda step: None, **options):
    step, state, batches = examples.tiny_regression()
    step = type(step)(step.base_prng, nn.Dense(1), optax.sgd(0.1, 0.9), train=True)
    change(step)
    save = jaxloop.CheckpointAction(workdir, interval=jaxloop.every(steps=3))
    outer_loop = jaxloop.OuterLoop(
        jaxloop.TrainLoop(step, end_actions=[save], stat_names=[], **options),
        checkpoint_spec=jaxloop.CheckpointSpec(workdir),
    )
    state = step.initialize_model([1, 3])
    return outer_loop(state, make_data(batches), train_total_steps=8, train_loop_steps=4)[0], outer_loop.history


def make_run_with_restarting_data(workdir):
    return make_run(workdir, make_data=lambda batches: (batch for batch in batches))


def make_broken_fused_run(workdir):
    """Changes the result of the first fused dispatch in each process, so that a resumed run differs."""
    dispatch_fused, is_first = Program.dispatch_fused, [True]

    def broken(self, state, batches):
        state, block, numbers = dispatch_fused(self, state, batches)
        if is_first.pop() if is_first else False:
            state = state.replace(params=jax.tree.map(lambda leaf: leaf + 1e-3, state.params))
        return state, block, numbers

    Program.dispatch_fused = broken
    return make_run(workdir, steps_per_dispatch=2)


def test_assert_resumable_accepts_a_resumable_run():
    testing.assert_resumable(make_run, at_steps=[7])


def test_assert_resumable_detects_a_fault_in_fused_steps():
    with pytest.raises(AssertionError, match="(?s)Killed at step 7.*(history differs|final state differs)"):
        testing.assert_resumable(make_broken_fused_run, at_steps=[7])


def test_assert_resumable_detects_data_that_restart():
    with pytest.raises(AssertionError, match="(?s)Killed at step 7.*Row 1 of the history differs.*the right position"):
        testing.assert_resumable(make_run_with_restarting_data, at_steps=[7])


@pytest.mark.parametrize("steps", [[], [0, 3]])
def test_invalid_at_steps_raise(steps):
    with pytest.raises(ValueError, match="each at least 1"):
        testing.assert_resumable(make_run, at_steps=steps)


def record(begin=0):
    rows = [[{"steps": number, "time": 0}, {"loss": number}] for number in (2, 4)]
    return {"begin": [begin], "state": {"params/w": "w5"}, "history": rows}


def test_compare_names_the_first_difference():
    assert testing.compare(record(), record(3)) == ""
    assert testing.compare(record(), record()).startswith("It started over, because there was no checkpoint")
    other = {**record(3), "state": {"params/w": "other"}}
    assert testing.compare(record(), other).startswith("The final state differs in params/w")
    other["history"][1][1]["loss"] = 5
    assert testing.compare(record(), other).startswith("Row 1 of the history differs")
    other = {**record(3), "history": record()["history"][:1]}
    assert testing.compare(record(), other).startswith("Row 1 of the history differs")
