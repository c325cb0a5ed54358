import pathlib
import re

import jax
import pytest

README = (pathlib.Path(__file__).parent.parent / "README.md").read_text()


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
    root = pathlib.Path(__file__).parent.parent
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert len(links) > 12
    for link in links:
        assert (root / link).exists(), link


def test_figures_match_the_benchmarks():
    measured = (pathlib.Path(__file__).parent.parent / "BENCHMARKS.md").read_text()
    for figure in re.findall(r"\| 1 \| ([\d.]+) \| ([\d.]+)[^|]*\| ([\d.]+) \| ([\d.]+) \|", README):
        for each in figure:
            found = [float(ratio) for ratio in re.findall(r"\d\.\d\d\d", measured)]
            assert any(abs(ratio - float(each)) <= 0.0051 for ratio in found), each


def test_the_example_is_short():
    (program,) = blocks("python")
    assert len([line for line in program.splitlines() if line.strip()]) <= 40
