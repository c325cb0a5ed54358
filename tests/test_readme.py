import os
import pathlib
import re
import shutil
import subprocess

import jax
import pytest

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(kind):
    return re.findall(rf"```{kind}\n(.*?)```", README, flags=re.DOTALL)


def test_readme_programs_run_and_print_the_documented_output(capsys, monkeypatch, tmp_path, checked_first):
    monkeypatch.chdir(tmp_path)
    ((program,), (check,)), names = (blocks("python"), blocks("python continued")), {"__name__": "__main__"}
    with jax.numpy_dtype_promotion("standard"):  # JAX's default.
        exec(program, names)
        printed = capsys.readouterr().out.strip()
        exec(check, names)
    assert re.fullmatch(r"step 600: test accuracy \d\d\.\d%", printed)
    claimed = re.search(r"prints `step 600: test accuracy ([\d.]+)%`", README)
    assert claimed and float(printed.split()[-1][:-1]) == pytest.approx(float(claimed[1]), abs=1.0)
    printed = capsys.readouterr().out
    assert printed.startswith("No problem. Nothing was run")
    assert "the run goes to step 600; loops end 30 times, at steps 20, 40, ..., 600" in printed
    assert "eval 'test'  3 times, at steps 250, 500, 600; 9 batches" in printed


def test_what_the_readme_points_to_is_there():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert len(links) > 12
    for link in links:
        assert (ROOT / link).exists(), link


def test_figures_match_the_benchmarks():
    measured = (ROOT / "BENCHMARKS.md").read_text()
    for figure in re.findall(r"\| 1 \| ([\d.]+) \| ([\d.]+)[^|]*\| ([\d.]+) \| ([\d.]+) \|", README):
        for each in figure:
            found = [float(ratio) for ratio in re.findall(r"\d\.\d\d\d", measured)]
            assert any(abs(ratio - float(each)) <= 0.0051 for ratio in found), each


def test_the_example_is_short():
    (program,) = blocks("python")
    assert len([line for line in program.splitlines() if line.strip()]) <= 40


def test_ci_first_runs_the_documented_test_command_in_a_bare_environment(tmp_path):
    """Runs `.ci/run` with substitutes for `make` and `pyenv` that record their arguments and environment."""
    script = ROOT / ".ci" / "run"
    if not script.exists():
        pytest.skip("The tests of the wheel run without .ci.")
    (tmp_path / "clone" / ".ci").mkdir(parents=True)
    shutil.copy(script, tmp_path / "clone" / ".ci" / "run")
    programs = {
        "make": f'echo "$*|$PYENV_VERSION|$VIRTUAL_ENV|$PYTHON|$VENV" >> {tmp_path}/calls',
        "pyenv": "echo 3.1.4",
    }
    for name, text in programs.items():
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}", "CI": "true"}
    for name in ("VENV", "PYTHON", "TESTS"):
        environment.pop(name, None)
    environment.update(PYENV_VERSION="3.13", VIRTUAL_ENV="/an/environment")
    subprocess.run(["bash", ".ci/run"], cwd=tmp_path / "clone", env=environment, check=True)
    first, *others = (tmp_path / "calls").read_text().splitlines()
    documented = re.findall(r"^\| `make (test)` \|", README, flags=re.MULTILINE)
    assert [first] == [f"{command}||||" for command in documented]
    targets = [call.partition("|")[0] for call in others]
    assert {"lint", "test", "test-slow"} <= set(targets) and any("test-oldest" in target for target in targets)


def test_no_text_says_to_install_the_unrelated_package_of_the_same_name():
    places = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("colabs/*.ipynb"), *ROOT.glob("*/**/*.py")]
    texts = {path: path.read_text() for path in places if ".venv" not in path.parts and path != pathlib.Path(__file__)}
    assert len(texts) > 100
    assert not [path for path, text in texts.items() if re.search(r"pip install [^`\n]*\bjaxloop\[", text)]
