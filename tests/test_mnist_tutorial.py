import json
import os
import pathlib
import subprocess
import sys

import numpy as np

PROGRAM = pathlib.Path(__file__).parent / "programs" / "mnist_tutorial.py"


def test_the_tutorial_gives_the_same_losses_on_several_meshes(tmp_path):
    environment = {**os.environ, "NPROC": "32", "JAX_NUM_CPU_DEVICES": "8", "TF_CPP_MIN_LOG_LEVEL": "3"}
    # Otherwise, half of the time is spent optimizing convolutions that run only briefly.
    environment["XLA_FLAGS"] = "--xla_backend_optimization_level=1"
    run = subprocess.run([sys.executable, PROGRAM, tmp_path], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-5000:]
    losses = json.loads(run.stdout.splitlines()[-1])
    assert list(losses) == ["Mesh of 1", "make_mesh of 8"]
    expected = losses["Mesh of 1"]
    assert len(expected) == 10
    for name, values in losses.items():
        np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-5, err_msg=name)
    # Ten loops don't reach an interval of 100 loops, so each run warns about its train and its eval loop at its start.
    warnings = [line for line in run.stderr.splitlines() if "would never be called: interval=100 counts loops" in line]
    assert len(warnings) == 2
    assert all("CheckpointAction(" in line and "SummaryAction(" in line for line in warnings)
