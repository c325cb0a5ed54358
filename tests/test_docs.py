"""Tests that the code blocks of the documentation run."""

import pathlib
import re
import shutil
import subprocess
import sys

import jax
import pytest
from programs import traces
from programs.launching import launch

PAGES = sorted((pathlib.Path(__file__).parents[1] / "docs").glob("*.md"))
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def blocks(page):
    """Returns the kind and the text of each Python block of a page."""
    return re.findall(r"```python ?([a-z]*)\n(.*?)```", page.read_text(), flags=re.DOTALL)


@each_page
def test_code_blocks_of_a_page_run(page, tmp_path, monkeypatch, capsys, checked_first, compile_fast):
    monkeypatch.chdir(tmp_path)
    names = {}
    assert {kind for kind, _ in blocks(page)} <= {"", "continued", "program"}
    with jax.numpy_dtype_promotion("standard"):  # JAX's default.
        for kind, text in blocks(page):
            if kind != "program":
                names = names if kind else {"__name__": "__main__"}
                exec(text, names)
    assert capsys.readouterr().out


@each_page
def test_programs_of_a_page_run_in_one_and_two_processes(page, tmp_path):
    for number, text in enumerate(text for kind, text in blocks(page) if kind == "program"):
        program = tmp_path / f"program_{number}.py"
        program.write_text(text)
        for processes in (1, 2):
            job, _ = launch(program, tmp_path / f"run_{number}_{processes}", processes=processes, devices=2)
            assert job.returncode == 0, job.stdout + job.stderr
            assert "step 200 of 200 (100%)" in job.stdout


@each_page
def test_files_and_flags_that_a_page_names_are_there(page):
    root = page.parents[1]
    for path in re.findall(r"`((?:jaxloop|tests|docs|colabs|benchmarks)/[\w./]+)`", page.read_text()):
        assert (root / path).exists(), path
    for module in re.findall(r"python -m (jaxloop[\w.]*)", page.read_text()):
        path = root / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module


def test_documented_call_traces_are_up_to_date(tmp_path):
    page = shutil.copy(traces.PAGE, tmp_path)
    # In a new process, without anything cached by other runs.
    subprocess.run([sys.executable, traces.__file__, "--write", page], check=True)
    written = pathlib.Path(page).read_text()
    assert written == traces.PAGE.read_text(), "Run `python tests/programs/traces.py --write`."
