"""The notebooks run as they are, offline, and were saved with their outputs."""

import functools
import importlib.util
import pathlib
import re

import nbclient.exceptions
import nbformat
import pytest

_COLABS = pathlib.Path(__file__).parents[1] / "colabs"
_PATH_OF_A_MACHINE = re.compile(r"(?<![\w.<])/(?:root|work|home|Users|tmp|usr|opt|var|mnt|srv|content)\b")


def _load_execute():
    spec = importlib.util.spec_from_file_location("execute", _COLABS / "execute.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


execute = _load_execute()
each_notebook = pytest.mark.parametrize("path", execute.notebooks(), ids=lambda path: path.stem)


@functools.cache
def executed(path):
    """The notebook, executed once for all tests of this file."""
    return execute.execute(path)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def shown(notebook):
    return "".join(text for cell in code_cells(notebook) for text in execute.texts(cell))


def test_there_are_notebooks():
    assert "custom_loop" in [path.stem for path in execute.notebooks()]


@each_notebook
def test_runs_without_errors_and_without_noise(path):
    outputs = [output for cell in code_cells(executed(path)) for output in cell.outputs]
    assert outputs
    assert not [output for output in outputs if output.output_type == "error"]
    assert not [output.text for output in outputs if output.get("name") == "stderr"]


@each_notebook
def test_was_saved_with_its_outputs(path):
    saved, fresh = nbformat.read(path, as_version=4), executed(path)
    nbformat.validate(saved)
    kinds = lambda notebook: {cell.id: [output.output_type for output in cell.outputs] for cell in code_cells(notebook)}
    assert kinds(saved) == kinds(fresh), "Run `python colabs/execute.py`, and commit the notebooks."


@each_notebook
def test_was_saved_without_what_differs_from_run_to_run(path):
    saved = nbformat.read(path, as_version=4)
    assert set(saved.metadata) == {"kernelspec", "language_info"}
    assert not [cell.id for cell in saved.cells if cell.metadata]
    assert [cell.execution_count for cell in code_cells(saved)] == list(range(1, len(code_cells(saved)) + 1))


@each_notebook
def test_names_no_path_of_a_machine(path):
    found = {}
    for notebook in (nbformat.read(path, as_version=4), executed(path)):
        for cell in notebook.cells:
            for text in (cell.source, *execute.texts(cell)):
                if _PATH_OF_A_MACHINE.search(text):
                    found[cell.id] = text
    assert not found


def test_custom_loop_learns_and_resumes():
    text = shown(executed(_COLABS / "custom_loop.ipynb"))
    lines = re.findall(r"^(train|test) +step +(\d+) .*accuracy (\d\.\d+)$", text, re.MULTILINE)
    assert [int(step) for name, step, _ in lines if name == "train"] == [50, 100, 150, 200, 250, 300, 350, 400]
    accuracies = {int(step): float(accuracy) for name, step, accuracy in lines if name == "test"}
    assert list(accuracies) == [100, 200, 300, 400]
    assert accuracies[400] > 0.8


def test_custom_loop_shows_the_error_of_a_state_used_twice():
    assert "has already taken" in shown(executed(_COLABS / "custom_loop.ipynb"))


def test_a_cell_that_raises_is_reported(tmp_path):
    path = tmp_path / "broken.ipynb"
    cells = [nbformat.v4.new_code_cell("1 / 0")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="ZeroDivisionError"):
        execute.execute(path)


def test_an_unknown_name_is_an_error(capsys):
    with pytest.raises(SystemExit):
        execute.main(["costum_loop"])
    assert "there is no notebook costum_loop; there are custom_loop" in capsys.readouterr().err
