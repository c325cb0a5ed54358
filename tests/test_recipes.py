"""Each recipe runs, and prints what its page says."""

import ast
import importlib.util
import math
import os
import pathlib
import re
import subprocess
import sys

import pytest

RECIPES = pathlib.Path(__file__).parents[1] / "docs" / "recipes"
PROGRAMS = sorted(RECIPES.glob("*.py"))
each_program = pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
NUMBER = re.compile(r"-?\d+\.?\d*")


def imported(program):
    tree = ast.parse(program.read_text())
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}


def on_page(program):
    """What the page of a program says that it prints."""
    return re.search(r"```text\n(.*?)```", program.with_suffix(".md").read_text(), flags=re.DOTALL)[1]


# How far numbers may be from those on the page. Rounding differs from machine to machine, and grows from step to step.
TOLERANCES = {"ppo": 0.5}


def differences(found, expected, tolerance=0.15):
    """The lines that differ in a word, or in a number by more than the tolerance."""
    differ = []
    for one, other in zip(found.splitlines(), expected.splitlines(), strict=False):
        numbers = [[float(each) for each in NUMBER.findall(line)] for line in (one, other)]
        same_words = NUMBER.sub("#", one).split() == NUMBER.sub("#", other).split()
        if not same_words or not all(
            math.isclose(*pair, rel_tol=tolerance, abs_tol=0.3) for pair in zip(*numbers, strict=True)
        ):
            differ.append((one, other))
    return differ + ([] if len(found.splitlines()) == len(expected.splitlines()) else [(found, expected)])


@each_program
def test_it_prints_what_its_page_says(program, tmp_path):
    if missing := [name for name in imported(program) if importlib.util.find_spec(name) is None]:
        pytest.skip(f"{', '.join(missing)} is not installed")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("XLA_")}
    environment |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "MPLBACKEND": "agg"}
    run = subprocess.run([sys.executable, program], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "Warning" not in run.stderr and "WARNING" not in run.stderr, run.stderr
    assert not differences(run.stdout, on_page(program), TOLERANCES.get(program.stem, 0.15))


@each_program
def test_it_is_short_and_its_page_is_in_the_index(program):
    assert len(program.read_text().splitlines()) < 100
    assert f"({program.stem}.md)" in (RECIPES / "index.md").read_text()
    assert f"{program.name}\n" in program.with_suffix(".md").read_text()


def test_a_number_or_a_word_that_is_wrong_is_noticed():
    assert not differences("step 8: 91.2%\n", "step 8: 90.9%\n")
    assert differences("step 8: 71.2%\n", "step 8: 90.9%\n")
    assert differences("stop 8: 90.9%\n", "step 8: 90.9%\n")
    assert differences("step 8: 90.9%\n", "step 8: 90.9%\nstep 9: 90.9%\n")
