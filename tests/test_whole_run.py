"""Tests that a resumed run gives the same results as an uninterrupted one."""

import functools

import pytest
from programs import whole_run

PROGRAM = functools.cache(whole_run.make_program)  # Initialized and compiled once.


def run(directory, **options):
    return whole_run.run(directory, program=PROGRAM(), **options)


@pytest.mark.parametrize(
    "options",
    [
        {"source": "list"},
        {"source": "generator"},
        {"source": "loader"},
        {"source": "grain", "prefetch": 2},
        {"source": "tf.data"},
        {"source": "list", "total": 15, "epochs": 2, "loop_steps": None},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_a_run_can_be_resumed_from_every_step(options, tmp_path):
    whole = run(tmp_path / "whole", **options)  # Keeps a checkpoint of every step.
    total = options.get("total", 10)
    assert len(whole["ids"]) == total and len(whole["history"]) > 4 and len(whole["written"]) > 4
    for step in range(total + 1):
        resumed = run(whole_run.copy_until(step, tmp_path / "whole", tmp_path / str(step)), **options, saves=False)
        whole_run.assert_resumed_exactly(resumed, whole, step)
