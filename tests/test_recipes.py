"""Tests that each recipe is a short program that prints the output shown on its page."""

import ast
import importlib.util
import pathlib
import re
import subprocess
import sys

import pytest

RECIPES = pathlib.Path(__file__).parents[1] / "docs" / "recipes"
PROGRAMS = sorted(RECIPES.glob("*.py"))
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?%?")

# The last digits differ between machines. Whole numbers are exact.
RELATIVE_TOLERANCE = 5e-2
PERCENTAGE_POINTS = 5.0

each_program = pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)


def missing_packages(program):
    """Returns the packages that a program imports but that are not installed."""
    imported = set()
    for node in ast.walk(ast.parse(program.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported.add(node.module)
    return sorted(name for name in {each.partition(".")[0] for each in imported} if not importlib.util.find_spec(name))


def shape_and_numbers(printed):
    """Returns the text with placeholders for numbers and without quoted strings, and the numbers as strings."""
    lines = [" ".join(line.split()) for line in re.sub(r'"[^"]*"', '""', printed).strip().splitlines()]
    text = "\n".join(lines)
    return NUMBER.sub("<number>", text), NUMBER.findall(text)


def are_close(one, two):
    if not re.search(r"[.e%]", one + two):
        return one == two
    one_value, two_value = (float(each.replace(",", "").removesuffix("%")) for each in (one, two))
    if one.endswith("%") or two.endswith("%"):
        return one[-1] == two[-1] and abs(one_value - two_value) <= PERCENTAGE_POINTS
    decimals = min(len(each.partition(".")[2].partition("e")[0]) for each in (one, two))
    last_digits = 0.0 if "e" in one + two else 2 * 10.0**-decimals
    return one_value == pytest.approx(two_value, rel=RELATIVE_TOLERANCE, abs=last_digits)


def outputs(page):
    """Returns the blocks of output that a page shows."""
    return re.findall(r"^```text\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def assert_prints(printed, shown):
    (text, numbers), (shown_text, shown_numbers) = map(shape_and_numbers, (printed, shown))
    assert text == shown_text
    different = [pair for pair in zip(numbers, shown_numbers, strict=True) if not are_close(*pair)]
    assert not different, printed


@each_program
def test_a_recipe_prints_the_output_shown_on_its_page(program, tmp_path):
    missing = missing_packages(program)
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    # It may write files to its working directory.
    result = subprocess.run([sys.executable, program], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "warning" not in result.stderr.lower(), result.stderr
    assert_prints(result.stdout, outputs(program.with_suffix(".md"))[0])


def test_each_page_has_a_program():
    assert {path.stem for path in RECIPES.glob("*.md")} == {path.stem for path in PROGRAMS} | {"index"}
