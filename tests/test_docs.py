"""Tests that the code blocks of the documentation run."""

import pathlib
import re

import jax
import pytest
from programs.launching import launch

import jaxloop

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = pathlib.Path(jaxloop.__file__).parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
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
            assert job.returncode == 0 and "200/200" in job.stdout, job.stdout


@each_page
def test_files_and_flags_that_a_page_names_are_there(page):
    for path in re.findall(r"`((?:jaxloop|tests|docs|colabs|benchmarks)/[\w./]+)`", page.read_text()):
        assert (ROOT / path).exists(), path
    for module in re.findall(r"python -m (jaxloop[\w.]*)", page.read_text()):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module


def test_quoted_code_is_in_the_package():
    pages = [(ROOT / "docs" / name).read_text() for name in ("inside.md", "scaling.md")]
    excerpts = re.findall(r"```py\n# (\S+)\n(.*?)```", "\n".join(pages), flags=re.DOTALL)
    assert len(excerpts) == 4
    for path, text in excerpts:
        lines = iter([line.strip() for line in (PACKAGE.parent / path).read_text().splitlines()])
        for line in map(str.strip, text.splitlines()):
            assert line == "..." or line in lines, f"{path} has no such line after those before it: {line}"
