"""Several processes, each started by the launcher."""

import os
import pathlib
import re
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from jaxloop import distributed

PROGRAM = pathlib.Path(__file__).parent / "programs" / "processes.py"


def launch(*arguments, processes, devices=1):
    """Runs a job; returns it, and how many seconds it took."""
    command = [sys.executable, "-m", "jaxloop.launch", f"--processes={processes}", f"--devices={devices}"]
    start = time.monotonic()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAXLOOP_")}
    job = subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True, timeout=180, env=environment)
    return job, time.monotonic() - start


def test_the_same_comes_of_it_however_the_devices_are_divided_into_processes(tmp_path):
    found = {}
    for processes, devices in ((2, 2), (1, 4), (1, 1)):
        file = tmp_path / f"{processes}x{devices}.npz"
        job, _ = launch(PROGRAM, file, processes=processes, devices=devices)
        assert job.returncode == 0, job.stdout + job.stderr
        for place in range(processes):
            assert f"[{place}] FSDPPartitioner: step 50 on {processes * devices} devices" in job.stdout
        found[processes, devices] = np.load(file)
    two, one, single = found[2, 2], found[1, 4], found[1, 1]
    assert len(two.files) == 2 * 15 and all(np.array_equal(two[name], one[name]) for name in two.files)
    for kind in ("DataParallelPartitioner", "FSDPPartitioner"):
        np.testing.assert_allclose(two[f"{kind} losses"], single[f"{kind} losses"], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("fault", "said"),
    [("exception", "Process 1 has failed: exit code 1"), ("kill", "Process 1 has failed: ended by SIGKILL")],
)
def test_where_one_process_fails_all_end_soon(fault, said, tmp_path):
    job, secs = launch(PROGRAM, tmp_path / "none.npz", fault, processes=2)
    assert job.returncode != 0 and secs < 40  # Of which it takes some to start.
    assert said in job.stderr and not (tmp_path / "none.npz").exists()
    if fault == "exception":
        assert "[1] Process 1 of 2 ends by an exception." in job.stdout
        assert re.search(r"\[1\] OSError: the disk is gone\n\[1\] in the dataset, after step 20", job.stdout)


def test_what_runs_in_one_process_alone_says_so(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "from jaxloop import distributed\ndistributed.initialize()\nimport jaxloop\nfrom jaxloop import examples\n"
        "step, state, batches = examples.tiny_regression()\n"
        "jaxloop.OuterLoop(jaxloop.TrainLoop(step))(state, batches, 10)"
    )
    job, _ = launch(program, processes=2)
    assert job.returncode == 1 and "NotImplementedError: OuterLoop runs in one process so far" in job.stdout


def test_a_launcher_passes_on_output_and_the_exit_code(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import os, sys; print(*sys.argv[1:], os.environ['JAX_NUM_CPU_DEVICES']); sys.exit(3)")
    job, _ = launch(program, "--flag=1", "word", processes=2, devices=5)
    assert job.returncode == 3
    assert sorted(job.stdout.splitlines()) == ["[0] --flag=1 word 5", "[1] --flag=1 word 5"]
    job, _ = launch("-m", "this", processes=1)
    assert job.returncode == 0 and "[0] Beautiful is better than ugly." in job.stdout


def test_once_jax_has_started_it_is_too_late():
    jax.devices()
    with pytest.raises(RuntimeError, match="must be called before JAX does anything, and JAX has started already"):
        distributed.initialize()


def test_all_about_the_others_or_nothing():
    with pytest.raises(ValueError, match="or none of them, got no num_processes, process_id"):
        distributed.initialize("localhost:1234")
