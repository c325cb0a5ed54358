"""Tests that a resumed run gives the same results as an uninterrupted one."""

import functools
import signal

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


@pytest.mark.parametrize("place", ["eval", "writer"])
def test_a_resumed_run_that_is_stopped_again_writes_each_row_once(place, tmp_path):
    whole, parts = run(tmp_path / "whole"), []
    # An evaluation is due after step 8. The first signal keeps it from starting, and the second comes while the resumed
    # run makes up for it.
    for event, number in (("action", 8), (place, 101 if place == "eval" else 8), (None, None)):
        seen = []

        def watch(found, value, event=event, number=number, seen=seen):
            if (found, value) == (event, number) and not seen:
                seen.append(value)
                signal.raise_signal(signal.SIGINT)

        parts.append(run(tmp_path / "stopped", watch=watch))
        assert len(seen) == (event is not None)
    first, second, last = (part["step"] for part in parts)
    # An interrupted evaluation begins again. After a complete one, the run makes a step, whose checkpoint contains it.
    assert first == 8 and last == 10 and (second == 8 if place == "eval" else second > 8)
    assert sorted(str(row) for part in parts for row in part["written"]) == sorted(map(str, whole["written"]))
    assert parts[-1]["state"] == whole["state"] and parts[-1]["history"] == whole["history"]
