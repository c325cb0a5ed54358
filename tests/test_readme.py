import pathlib
import re

import jax
import pytest

README = (pathlib.Path(__file__).parent.parent / "README.md").read_text()


def blocks(kind):
    return re.findall(rf"```{kind}\n(.*?)```", README, flags=re.DOTALL)


def test_the_example_in_the_readme_prints_what_the_readme_says(capsys):
    ((program,), (continued,)) = blocks("python"), blocks("python continued")
    names = {"__name__": "__main__"}
    with jax.numpy_dtype_promotion("standard"):  # As a user has it.
        exec(program, names)
        exec(continued, names)
    assert int(names["state"].step) == 300
    printed = capsys.readouterr().out.strip()
    assert re.fullmatch(r"step 600: test accuracy \d\d\.\d%", printed)
    claimed = re.search(r"prints `step 600: test accuracy ([\d.]+)%`", README)
    assert claimed and float(printed.split()[-1][:-1]) == pytest.approx(float(claimed[1]), abs=1.0)


def test_the_example_is_short():
    (program,) = blocks("python")
    assert len([line for line in program.splitlines() if line.strip()]) <= 40
