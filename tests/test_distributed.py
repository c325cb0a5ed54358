"""Tests of runs with several processes."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from programs.launching import JOB, break_and_resume, final_of, launch

from jaxloop import checkpoint, distributed
from jaxloop.processes import agreement, interrupt

PROGRAM, TOGETHER, ALL_APIS = (
    pathlib.Path(__file__).parent / "programs" / name for name in ("processes.py", "together.py", "all_apis.py")
)


def output_of(place, output):
    """Returns the output of one of two processes."""
    return re.sub(rf"^\[{1 - place}\].*\n", "", output, flags=re.MULTILINE)


def test_two_processes_match_one(tmp_path):
    found = {}
    for processes, devices in ((2, 2), (1, 1)):
        file = tmp_path / f"{processes}x{devices}.npz"
        job, _ = launch(PROGRAM, file, processes=processes, devices=devices)
        assert job.returncode == 0, job.stdout
        for place in range(processes):
            assert f"[{place}] FSDPPartitioner: step 50 on {processes * devices} devices" in job.stdout
        found[processes, devices] = np.load(file)
    two, single = found[2, 2], found[1, 1]
    assert len(two.files) == 2 * 15
    for kind in ("DataParallelPartitioner", "FSDPPartitioner"):
        np.testing.assert_allclose(two[f"{kind} losses"], single[f"{kind} losses"], rtol=1e-6, atol=1e-7)


def test_failure_of_one_process_ends_all(tmp_path):
    job, secs = launch(PROGRAM, tmp_path / "none.npz", "exception", processes=2)
    assert job.returncode == 1 and secs < 40  # This includes the time to start.
    assert [each.returncode for each in job.processes] == [distributed.EXIT_CODE_OF_FOLLOWER, 1]
    assert "[1] Process 1 of 2 ends with an exception." in job.stdout
    assert re.search(r"\[1\] OSError: the disk is gone\n\[1\] in the dataset, after step 20", job.stdout)
    assert "[0] jaxloop.distributed.ProcessError: Process 1 of 2 has failed" in job.stdout


def test_functional_loop_rejects_several_processes(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "from jaxloop import distributed, functional as jf\ndistributed.initialize()\njf.loop(0, [], tasks={}, stop=1)"
    )
    job, _ = launch(program, processes=2)
    assert job.returncode == 1 and "NotImplementedError: jf.loop supports one process only" in job.stdout


def test_processes_with_uneven_data_end_together_and_count_each_example_once():
    job, _ = launch(TOGETHER, processes=2, devices=2)
    assert job.returncode == 0, job.stdout
    for place in range(2):
        assert f"[{place}] train 7 7 56 8\n" in job.stdout  # Steps, losses, samples; examples in a step.
        assert f"[{place}] slowest 1 True\n" in job.stdout
        assert f"[{place}] five more 12\n" in job.stdout
        assert f"[{place}] eval 43 True\n" in job.stdout
        assert f"[{place}] nothing: ValueError: The processes have batches of 8, 0 rows for one step, and" in job.stdout
        assert f"[{place}] uneven: ValueError: The processes have batches of 4, 2 rows for one step" in job.stdout
        differs = r"ValueError: The batch of LossStep is not the same in all processes. .*process 0 -> process 1.:"
        for name, change in {
            "dtype": r"batch\['x'\]: float32\[16, 8\] -> batch\['x'\]: float16\[16, 8\]",
            "shape": r"batch\['y'\]: float32\[16, 1\] -> batch\['y'\]: float32\[16, 2\]",
            "leaf": r".* -> batch\['z'\]: float32\[16, 1\]",
        }.items():
            assert re.search(
                rf"\[{place}\] after step 2, other {name}: {differs}\n\[{place}\]   {change}\n", job.stdout
            )
        assert f"[{place}] after step 4, alike after a hook 4\n" in job.stdout
        assert f"[{place}] over one iterator [27, 27]\n" in job.stdout
        assert f"[{place}] exhausted 9\n" in job.stdout
        assert f"[{place}] seen 4 32\n[{place}] seen 8 64\n" in output_of(place, job.stdout)
        assert f"[{place}] unnamed" not in job.stdout
        assert f"[{place}] another run: ValueError: The run is not the same in all processes" in job.stdout
    assert "  total_steps=100 -> total_steps=50" in job.stdout


def test_all_processes_make_the_same_detour_after_a_spike(tmp_path):
    job, _ = launch(TOGETHER.parent / "detour.py", tmp_path, processes=2, devices=2)
    assert job.returncode == 0, job.stdout
    for place in range(2):
        assert f"[{place}] left out [38, 39, 40] True\n" in job.stdout


def test_fit_evaluation_and_nan_detection_in_two_processes(tmp_path):
    job, _ = launch(ALL_APIS, tmp_path / "run", processes=2, devices=2)
    assert job.returncode == 0, job.stdout
    seen = set()
    for place in range(2):
        assert re.findall(rf"\[{place}\] fit .*", job.stdout) == [
            f"[{place}] fit 20 [10, 20]",
            f"[{place}] fit 30 [10, 20, 30]",
        ]
        assert f"[{place}] evaluated [30]\n" in job.stdout
        seen.update(re.findall(rf"\[{place}\] bad number in step 71 seen after step (\d+)\n", job.stdout))
    assert len(seen) == 1 and int(seen.pop()) < 71 + 64
    assert len(list((tmp_path / "run").glob("events*"))) == 2  # One for each of two runs, written by the first process.


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The final state of an uninterrupted run."""
    directory = tmp_path_factory.mktemp("unbroken")
    job, _ = launch(JOB, directory, processes=2, devices=2)
    assert job.returncode == 0, job.stdout
    assert len(list(directory.glob("events*"))) == 1  # Only the first process writes.
    assert (directory / "checkpoints" / "history.jsonl").read_text().count("\n") == 6
    return final_of(directory)


def test_run_with_a_killed_process_resumes_bit_identically_in_a_different_layout(uninterrupted, tmp_path):
    assert break_and_resume(tmp_path, "kill", then=(1, 4)) == []
    final = final_of(tmp_path)
    assert len(final) == 14 and all(np.array_equal(final[name], uninterrupted[name]) for name in uninterrupted)


def test_sigterm_in_one_process_makes_all_save_the_same_step(tmp_path):
    job, _ = launch(JOB, tmp_path, "--fault=term", "--in=0", processes=2, devices=2)
    steps = re.findall(r"Stopped by SIGTERM at step (\d+); saving its state", job.stdout)
    assert job.returncode == 143 and len(steps) == 2 and len(set(steps)) == 1
    assert checkpoint.all_steps(tmp_path / "checkpoints")[-1] == int(steps[0])


def test_different_versions_of_a_step_are_detected_before_it_runs(tmp_path):
    job, _ = launch(JOB, tmp_path, "--version=0.5", processes=2)
    assert job.returncode == 1
    assert "LossStep.run, with its model, loss and optimizer, is not the same in all processes." in job.stdout
    assert re.search(r"compiled program \w+, \d+ characters -> compiled program \w+", job.stdout)


def joint_reader(batches, **options):
    """Returns the reader for several processes, in a single process."""
    count = lambda batch: len(batch["x"])
    options = {"secs": time.perf_counter, "fill_to": None, "until_all_processes_end": False, **options}
    options["before_reading"] = options["on_difference"] = lambda: None
    return agreement.JointReader(
        "a test", iter(batches).__next__, count=count, requests=interrupt.Interruptible(), **options
    )


def test_joint_reader_reads_ahead_within_a_limit():
    iterator = iter([{"x": np.full([4], number)} for number in range(100)])
    reader = joint_reader(iterator)
    reader.begin(5, ahead=0)
    read = [reader() for _ in range(5)]
    assert [batch["x"][0] for batch in read] == [0, 1, 2, 3, 4] and reader.held == 0
    assert [examples for examples, _ in reader.counted(5)] == [4] * 5
    assert next(iterator)["x"][0] == 5
    reader.begin(None, ahead=0)
    assert [reader()["x"][0] for _ in range(3)] == [6, 7, 8]
    assert reader.held > 0 and next(iterator)["x"][0] == 9 + reader.held


def test_joint_reader_raises_only_after_the_last_batch():
    def failing():
        yield {"x": np.zeros([4])}
        yield {"x": np.zeros([4])}
        raise OSError("the disk is gone")

    reader = joint_reader(failing())
    reader.begin(None, ahead=0)
    reader(), reader()
    with pytest.raises(OSError, match="the disk is gone") as raised:
        reader()
    assert agreement.is_known_to_all_processes(raised.value) and not agreement.is_known_to_all_processes(OSError())
    reader = joint_reader([{"x": np.zeros([4])}])
    reader.begin(None, ahead=0)
    reader()
    for _ in range(2):
        with pytest.raises(StopIteration):
            reader()


def test_signal_takes_effect_once_all_processes_know_of_it():
    with interrupt.Interruptible(defers=True) as requests:
        reader = joint_reader([{"x": np.zeros([4])}] * 100)
        reader._requests = requests
        reader.begin(None, ahead=0)
        reader()
        signal.raise_signal(signal.SIGINT)
        assert not requests.requested
        while not requests.requested:
            reader()
        assert requests.signal_name == "Ctrl-C"


def test_agreement_of_a_single_process():
    assert agreement.gather_texts("one") == ["one"]
    agreement.check_same("A run", ["one", "two"])
    job = agreement.Job(True)
    assert not job.any_stops(False) and job.any_stops(True) and job.from_first_process(True)


def test_initialize_uses_the_slurm_variables(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "from jaxloop import distributed\ndistributed.initialize()\nimport jax\n"
        "print('process', jax.process_index(), 'of', jax.process_count())"
    )
    common = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_NTASKS": "2"}
    tasks = [
        subprocess.Popen(
            [sys.executable, program],
            env={**os.environ, **common, "SLURM_PROCID": str(place), "SLURM_LOCALID": str(place), "NPROC": "32"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for place in range(2)
    ]
    for place, task in enumerate(tasks):
        assert f"process {place} of 2\n" in task.communicate(timeout=60)[0]


def test_initialize_after_jax_has_started_raises():
    jax.devices()
    with pytest.raises(RuntimeError, match="must be called before JAX starts, but JAX has already started"):
        distributed.initialize()


def test_initialize_requires_all_arguments_or_none():
    with pytest.raises(ValueError, match="or none of them, but got no num_processes, process_id"):
        distributed.initialize("localhost:1234")


def test_process_that_exits_ends_the_job_with_its_exit_code(tmp_path):
    job, _ = launch(JOB, tmp_path, "--fault=sys_exit", "--at=13", processes=2)
    ended = time.time() - (tmp_path / "fired").stat().st_mtime
    assert (job.returncode, job.first) == (7, 1), job.stdout
    assert ended < 15  # JAX itself waits longer before it gives up on a silent process.
