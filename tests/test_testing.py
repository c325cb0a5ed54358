"""Tests of `jaxloop.testing`."""

import pytest
from programs.acts import saving

import jaxloop
from jaxloop import examples, testing


def make_run(workdir, make_data=lambda batches: batches):
    step, state, batches = examples.tiny_regression()
    outer_loop = saving(workdir, jaxloop.every(steps=3), step, stat_names=[])
    return outer_loop(state, make_data(batches), train_total_steps=8, train_loop_steps=4)[0], outer_loop.history


def make_run_with_restarting_data(workdir):
    return make_run(workdir, make_data=lambda batches: (batch for batch in batches))


def test_assert_resumable_accepts_a_resumable_run():
    testing.assert_resumable(make_run, at_steps=[7])


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
