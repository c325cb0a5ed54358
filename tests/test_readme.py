import pathlib
import re
import subprocess
import sys
import time

import jax
import pytest

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(kind):
    return re.findall(rf"```{kind}\n(.*?)```", README, flags=re.DOTALL)


def run(program, directory, kill_at=None):
    """Runs a program; returns what it prints, in order. Kills it when the checkpoint of a step is complete."""
    directory.mkdir(exist_ok=True)
    (directory / "digits.py").write_text(program)
    command = [sys.executable, "-u", "digits.py"]
    process = subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if kill_at is not None:
        while process.poll() is None and not (directory / f"runs/digits/checkpoints/{kill_at}/SEAL").exists():
            time.sleep(0.01)
        process.kill()
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == (0 if kill_at is None else -9), printed
    return printed


def measured(printed):
    """Returns the steps of all evaluations, and their values."""
    found = re.findall(r"^step ([\d,]+)  \w+: (.*)$", printed, flags=re.MULTILINE)
    return {int(step.replace(",", "")): re.findall(r"\w+ (\d\.\d+)", values) for step, values in found}


def assert_is_documented(printed, documented):
    assert measured(printed).keys() == measured(documented).keys()
    for step, values in measured(printed).items():
        expected = [float(each) for each in measured(documented)[step]]
        assert [float(each) for each in values] == pytest.approx(expected, abs=0.02)


@pytest.mark.slow
def test_the_readme_program_is_killed_and_resumes_as_documented(tmp_path):
    (program,), documented = blocks("python"), blocks("text")[0]
    whole, first = run(program, tmp_path / "whole"), run(program, tmp_path / "killed", kill_at=500)
    second = run(program, tmp_path / "killed")
    assert_is_documented(whole, documented)
    assert re.search(r"Resumed at step \d+ from", second) and re.search(r"Resumed at step 500 from", documented)
    both = {**measured(first), **measured(second)}
    assert both == measured(whole)
    final = lambda printed: re.search(r"step 1000: test loss ([\d.]+)$", printed.strip())[1]
    assert final(second) == final(whole)
    assert float(final(documented)) == pytest.approx(float(final(whole)), abs=0.02)


def test_the_step_of_the_readme_prints_the_documented_output(capsys, monkeypatch, tmp_path, checked_first):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    with jax.numpy_dtype_promotion("standard"):  # JAX's default.
        exec(blocks("python")[0], names)
        capsys.readouterr()
        exec(blocks("python continued")[0], names)
    assert_is_documented(capsys.readouterr().err, blocks("text")[1])
    assert int(names["state"].step) == 1000


def test_what_the_readme_points_to_is_there():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert len(links) > 10
    for link in links:
        assert (ROOT / link).exists(), link


def test_the_readme_is_short():
    (program,) = blocks("python")
    assert len([line for line in program.splitlines() if line.strip()]) <= 15
    assert len(README.split()) < 600


def test_no_text_says_to_install_the_unrelated_package_of_the_same_name():
    places = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("colabs/*.ipynb"), *ROOT.glob("*/**/*.py")]
    texts = {path: path.read_text() for path in places if ".venv" not in path.parts and path != pathlib.Path(__file__)}
    assert len(texts) > 100
    assert not [path for path, text in texts.items() if re.search(r"pip install [^`\n]*\bjaxloop\[", text)]
