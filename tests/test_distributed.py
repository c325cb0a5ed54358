"""Tests of runs with several processes."""

import importlib.util
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
import yaml
from programs.launching import JOB, break_and_resume, final_of, launch, output_of

from jaxloop import checkpoint, distributed, functional
from jaxloop.distributed import agreement

PROGRAM, TOGETHER, ALL_APIS = (
    pathlib.Path(__file__).parent / "programs" / name for name in ("processes.py", "together.py", "all_apis.py")
)

PATH = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
SCALING = pathlib.Path(__file__).parents[1] / "docs" / "scaling.md"
CLUSTER = SCALING.parent / "howto" / "run_on_a_cluster.md"


def test_two_processes_match_one(tmp_path):
    found = {}
    for processes, devices in ((2, 2), (1, 1)):
        file = tmp_path / f"{processes}x{devices}.npz"
        printed = output_of(PROGRAM, file, processes=processes, devices=devices)
        for place in range(processes):
            assert f"[{place}] FSDPPartitioner: step 50 on {processes * devices} devices" in printed
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


def test_process_that_exits_ends_the_job_with_its_exit_code(tmp_path):
    job, _ = launch(JOB, tmp_path, "--fault=sys_exit", "--at=13", processes=2)
    ended = time.time() - (tmp_path / "fired").stat().st_mtime
    assert (job.returncode, job.first) == (7, 1), job.stdout
    assert ended < 15  # JAX itself waits longer before it gives up on a silent process.


def test_functional_loop_rejects_several_processes(monkeypatch):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(NotImplementedError, match="jf.loop supports one process only"):
        functional.loop(0, [], {}, stop=1)


def test_processes_with_uneven_data_end_together_and_count_each_example_once():
    printed = output_of(TOGETHER, processes=2, devices=2)
    differs = r"ValueError: The batch of LossStep is not the same in all processes. .*process 0 -> process 1.:"
    for place in range(2):
        own = "".join(re.findall(rf"^\[{place}\] (.*\n)", printed, flags=re.MULTILINE))
        assert "train 7 7 56 8\n" in own  # Steps, losses, samples; examples in a step.
        assert "five more 12\n" in own
        assert "eval 43 True\n" in own
        assert "nothing: ValueError: The processes have batches of 8, 0 rows for one step, and" in own
        assert "uneven: ValueError: The processes have batches of 4, 2 rows for one step" in own
        for name, change in {
            "dtype": r"batch\['x'\]: float32\[16, 8\] -> batch\['x'\]: float16\[16, 8\]",
            "shape": r"batch\['y'\]: float32\[16, 1\] -> batch\['y'\]: float32\[16, 2\]",
            "leaf": r".* -> batch\['z'\]: float32\[16, 1\]",
        }.items():
            assert re.search(rf"after step 2, other {name}: {differs}\n  {change}\n", own)
        assert "after step 4, alike after a hook 4\n" in own
        assert "over one iterator [27, 27]\n" in own
        assert "exhausted 9\n" in own
        assert "seen 4 32\nseen 8 64\n" in own
        assert "unnamed" not in own
        assert "another run: ValueError: The run is not the same in all processes" in own
    assert "  total_steps=100 -> total_steps=50" in printed


def test_all_processes_make_the_same_detour_after_a_spike(tmp_path):
    printed = output_of(TOGETHER.parent / "detour.py", tmp_path, processes=2, devices=2)
    for place in range(2):
        assert f"[{place}] left out [38, 39, 40] True\n" in printed


def test_fit_evaluation_and_nan_detection_in_two_processes(tmp_path):
    printed = output_of(ALL_APIS, tmp_path / "run", processes=2, devices=2)
    for place in range(2):
        assert re.findall(rf"\[{place}\] fit (.*)", printed) == ["20 [10, 20]", "30 [10, 20, 30]"]
        assert f"[{place}] evaluated [30]\n" in printed
    one, other = re.findall(r"\[[01]\] bad number in step 71 seen after step (\d+)\n", printed)
    assert one == other and int(one) < 71 + 64
    assert len(list((tmp_path / "run").glob("events*"))) == 2  # One for each of two runs, written by the first process.


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The final state of an uninterrupted run."""
    directory = tmp_path_factory.mktemp("unbroken")
    output_of(JOB, directory, processes=2, devices=2)
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


def votes(*processes):
    """Returns votes of several processes, each given as `(status, number of rows in each batch)`."""
    found = np.zeros(len(processes), agreement.MESSAGE)
    for vote, (status, rows) in zip(found, processes, strict=True):
        vote["status"], vote["number"] = status, len(rows)
        vote["batches"]["rows"][: len(rows)] = vote["batches"]["examples"][: len(rows)] = rows
    return found


OK, FAILED, ENDED, EMPTY = agreement.OK, agreement.FAILED, agreement.ENDED, agreement.EMPTY


@pytest.mark.parametrize(
    ("processes", "in_training", "in_evaluation"),
    [
        ([(OK, [4, 4, 4]), (OK, [4, 4, 4])], [8, 8, 8], [8, 8, 8]),
        ([(OK, [4, 4, 4]), (ENDED, [4])], [8, StopIteration], [8, 4, 4]),
        ([(ENDED, [4, 4]), (ENDED, [4])], [8, StopIteration], [8, 4, StopIteration]),
        ([(EMPTY, []), (EMPTY, [])], [StopIteration], [StopIteration]),
        ([(OK, [4, 4, 4]), (EMPTY, [])], [StopIteration], [ValueError]),
        ([(OK, [4, 4, 4]), (FAILED, [4, 4])], [8, 8, distributed.ProcessError], [8, 8, distributed.ProcessError]),
        ([(FAILED, [4]), (FAILED, [4, 4])], [8, distributed.ProcessError], [8, distributed.ProcessError]),
        ([(ENDED, [4]), (FAILED, [4, 4])], [8, StopIteration], [8, 4, distributed.ProcessError]),
        ([(ENDED, [4]), (FAILED, [4])], [8, distributed.ProcessError], [8, distributed.ProcessError]),
        ([(OK, [4, 3]), (OK, [4, 4])], [8, ValueError], [8, 7]),
    ],
)
def test_votes_end_reading_after_the_same_batch(processes, in_training, in_evaluation):
    kinds = lambda agreed: [type(each) if isinstance(each, Exception) else each for each in agreed]
    sizes = []
    assert kinds(agreement.agree(votes(*processes), until_all_end=False, fill_to=None)) == in_training
    assert kinds(agreement.agree(votes(*processes), until_all_end=True, fill_to=sizes.append)) == in_evaluation
    assert set(sizes) <= {4}


@pytest.mark.parametrize(
    ("before", "step_secs", "least", "most"), [(1, 0.0005, 16, 16), (16, 0.003, 16, 16), (1, 0.2, 1, 2), (16, 30, 1, 2)]
)
def test_votes_cover_many_fast_steps_or_few_slow_ones(before, step_secs, least, most):
    pace, now, flying, sizes = agreement.Pace(before), 100.0, [], []
    for _ in range(50):
        while len(flying) < 2:  # One vote ahead.
            flying.append((pace.size, now))
        size, sent = flying.pop(0)
        pace, now = pace.at(sent), now + size * step_secs
        sizes.append(size)
    assert least <= min(sizes[10:]) and max(sizes[10:]) <= most and max(sizes) <= max(before, most)


def test_initialize_reads_the_environment_only_without_arguments(monkeypatch):
    given = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **options: given.append(args[:3]))
    monkeypatch.setenv(distributed.COORDINATOR, "host:1")
    monkeypatch.setenv(distributed.NUM_PROCESSES, "4")
    monkeypatch.setenv(distributed.PROCESS_ID, "3")
    for arguments in ((), (None, 2, 1), ("other:1", 2, 1)):
        distributed.initialize(*arguments)
    assert given == [("host:1", 4, 3), (None, 2, 1), ("other:1", 2, 1)]


def test_initialize_uses_the_slurm_variables():
    program = "from jaxloop import distributed; distributed.initialize(); import jax\n"
    program += "print('process', jax.process_index(), 'of', jax.process_count())"
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_NTASKS": "2", "NPROC": "32"}
    tasks = []
    for place in "01":
        env = {**os.environ, **job, "SLURM_PROCID": place, "SLURM_LOCALID": place}
        tasks.append(subprocess.Popen([sys.executable, "-c", program], env=env, stdout=subprocess.PIPE, text=True))
    for place, task in enumerate(tasks):
        assert f"process {place} of 2\n" in task.communicate(timeout=60)[0]


@pytest.fixture(scope="module")
def documented_program():
    """The program of docs/scaling.md."""
    (program,) = re.findall(r"```python program\n(.*?)```", SCALING.read_text(), flags=re.DOTALL)
    return program


@pytest.fixture(scope="module")
def documented_params(documented_program, tmp_path_factory):
    """The final parameters of the program of docs/scaling.md."""
    directory = tmp_path_factory.mktemp("documented")
    (directory / "train.py").write_text(documented_program)
    output_of(directory / "train.py", directory / "run", processes=2, devices=2)
    return params_of(directory / "run")


def params_of(directory):
    return {name: value.tobytes() for name, value in checkpoint.load_params(directory / "checkpoints").items()}


def with_a_kill(program, directory):
    """Returns a program whose second process is killed at its first start, after a checkpoint of step 100 is saved."""
    lines = [
        "def make_batch(number):",
        "    import os, pathlib, time",
        f"    fired = pathlib.Path({str(directory / 'fired')!r})",
        f"    saved = pathlib.Path({str(directory / 'runs/1/checkpoints/100/SEAL')!r})",
        "    if number == 180 and jax.process_index() == 1 and not fired.exists():",
        "        while not saved.exists():",
        "            time.sleep(0.01)",
        "        fired.touch()",
        "        os.kill(os.getpid(), 9)\n",
    ]
    assert program.count(lines[0]) == 1
    return program.replace(lines[0], "\n".join(lines))


@pytest.mark.skipif(
    not (shutil.which("mpirun", path=PATH) and importlib.util.find_spec("mpi4py")), reason="needs openmpi and mpi4py"
)
def test_a_run_that_is_killed_under_mpirun_resumes_bit_identically(documented_program, documented_params, tmp_path):
    (tmp_path / "train.py").write_text(with_a_kill(documented_program, tmp_path))
    (command,) = re.findall(r"^.* mpirun .* train.py runs/1$", SCALING.read_text(), flags=re.MULTILINE)
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    environment = {**os.environ, **as_root, "PATH": PATH}
    outputs = []
    for code in (137, 0):
        run = subprocess.run(
            command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
        )
        outputs.append(run.stdout + run.stderr)
        assert run.returncode == code, outputs[-1]
    assert "Resumed at step 100" in outputs[1]
    assert params_of(tmp_path / "runs" / "1") == documented_params


@pytest.mark.skipif(not importlib.util.find_spec("ray"), reason="needs ray[train]")
def test_a_run_whose_ray_worker_is_killed_resumes_bit_identically(documented_params, tmp_path):
    example = SCALING.parent / "examples" / "ray_train.py"
    (tmp_path / "ray_train.py").write_text(with_a_kill(example.read_text(), tmp_path))
    devices = {"NPROC": "32", "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    options = {"cwd": tmp_path, "env": {**os.environ, **devices}, "timeout": 180}
    run = subprocess.run([sys.executable, "ray_train.py", "runs/1"], capture_output=True, text=True, **options)
    assert run.returncode == 0 and (tmp_path / "fired").exists(), run.stdout + run.stderr
    assert "Resumed at step 100" in run.stdout + run.stderr
    assert params_of(tmp_path / "runs" / "1") == documented_params


def test_documented_jobset_passes_what_initialize_reads():
    (text,) = re.findall(r"```yaml\n(.*?)```", CLUSTER.read_text(), flags=re.DOTALL)
    jobset = yaml.safe_load(text)
    (workers,) = jobset["spec"]["replicatedJobs"]
    job, name = workers["template"]["spec"], jobset["metadata"]["name"]
    (container,) = job["template"]["spec"]["containers"]
    variables = {each["name"]: each.get("value") for each in container["env"]}
    assert set(variables) == {distributed.COORDINATOR, distributed.NUM_PROCESSES, distributed.PROCESS_ID}
    assert variables[distributed.COORDINATOR].startswith(f"{name}-{workers['name']}-0-0.{name}:")
    assert int(variables[distributed.NUM_PROCESSES]) == job["parallelism"] == job["completions"]
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["values"] == [128 + signal.SIGTERM]
