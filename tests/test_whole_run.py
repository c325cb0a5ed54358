"""A run that goes on from a checkpoint ends as if nothing had happened."""

import shutil

import pytest
from programs import whole_run

from jaxloop import checkpoint

STEPS = whole_run.make_steps()  # Compiled once.


def unbroken(directory, **options):
    """Runs without a break, and keeps a checkpoint of every step."""
    return whole_run.run(directory, steps=STEPS, **options)


def as_of(step, directory, target):
    """The directory of a run that was killed when it had saved a step."""
    shutil.copytree(directory, target)
    for saved in checkpoint.all_steps(target / "checkpoints"):
        if saved > step:
            shutil.rmtree(target / "checkpoints" / str(saved))
    (target / "checkpoints" / "STOPPED").unlink()
    return target


def assert_goes_on_as_if_nothing_had_happened(resumed, whole, step):
    assert resumed["state"] == whole["state"]
    assert resumed["history"] == whole["history"]
    assert resumed["ids"] == whole["ids"][step:]
    assert resumed["written"] == [each for each in whole["written"] if each[0] > step]


@pytest.mark.parametrize(
    "options",
    [
        {"source": "list"},
        {"source": "index"},
        {"source": "generator"},
        {"source": "loader"},
        {"source": "grain", "prefetch": 2},
        {"source": "tf.data"},
        {"source": "list", "prefetch": 1},
        {"source": "list", "total": 15, "epochs": 2, "loop_steps": None},
        {"source": "grain", "total": 15, "epochs": 2, "loop_steps": None},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_it_goes_on_from_every_step(options, tmp_path):
    whole = unbroken(tmp_path / "whole", **options)
    total = options.get("total", 10)
    assert len(whole["ids"]) == total and len(whole["history"]) > 4 and len(whole["written"]) > 4
    for step in range(total + 1):
        resumed = whole_run.run(as_of(step, tmp_path / "whole", tmp_path / str(step)), **options, steps=STEPS)
        assert_goes_on_as_if_nothing_had_happened(resumed, whole, step)
