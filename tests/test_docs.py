"""Tests that the code blocks of the documentation run."""

import os
import pathlib
import re
import signal
import socket
import subprocess
import sys

import jax
import pytest

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
            job = start_as_documented(tmp_path, processes, program, tmp_path / f"run_{number}_{processes}")
            printed, _ = job.communicate(timeout=120)
            assert job.returncode == 0 and "[0] " in printed and "200/200" in printed, printed


def start_as_documented(directory, *arguments):
    """Starts the script that docs/scaling.md shows."""
    (script,) = re.findall(
        r"```bash\n(#!/bin/bash\n# start.sh.*?)```", (ROOT / "docs/scaling.md").read_text(), re.DOTALL
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    (directory / "start.sh").write_text(script)
    command = ["bash", directory / "start.sh", *map(str, arguments)]
    environment = {**os.environ, "PATH": path, "PORT": port}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 143), (None, 7)])
def test_documented_start_script_forwards_signals_and_exit_codes(signum, code, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys, time\nprint('began', flush=True)\nif len(sys.argv) > 1: time.sleep(60)\n"
        "sys.exit(7 * int(os.environ['JAXLOOP_PROCESS_ID']))"
    )
    job = start_as_documented(tmp_path, 2, program, *(["sleeps"] if signum else []))
    assert sorted(job.stdout.readline() for _ in range(2)) == ["[0] began\n", "[1] began\n"]
    if signum:
        job.send_signal(signum)
    job.communicate(timeout=20)
    assert job.returncode == code


@each_page
def test_files_and_flags_that_a_page_names_are_there(page):
    for path in re.findall(r"`((?:jaxloop|tests|docs|colabs|benchmarks)/[\w./]+)`", page.read_text()):
        assert (ROOT / path).exists(), path
    for module in re.findall(r"python -m (jaxloop[\w.]*)", page.read_text()):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module


def test_quoted_code_is_in_the_package():
    excerpts = re.findall(r"```py\n# (\S+)\n(.*?)```", (ROOT / "docs/inside.md").read_text(), flags=re.DOTALL)
    assert len(excerpts) == 3
    for path, text in excerpts:
        lines = iter([line.strip() for line in (PACKAGE.parent / path).read_text().splitlines()])
        for line in map(str.strip, text.splitlines()):
            assert line == "..." or line in lines, f"{path} has no such line after those before it: {line}"
