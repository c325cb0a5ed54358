"""Tests that the notebooks run offline and unchanged, and were saved with their outputs."""

import base64
import functools
import importlib.util
import pathlib
import re

import nbclient.exceptions
import nbformat
import pytest

CHECK_FIRST = (pathlib.Path(__file__).parent / "programs" / "check_first.py").read_text()
COMPILE_FAST = "import jax\njax.config.update('jax_disable_most_optimizations', True)"
_COLABS = pathlib.Path(__file__).parents[1] / "colabs"
_LARGEST_PICTURE = 60_000  # Bytes.
_LOCAL_PATH = re.compile(r"(?<![\w.<])/(?:dev|root|work|home|Users|tmp|usr|opt|var|mnt|srv|content)\b")


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
    """Executes a notebook once for all tests in this file. Each run is checked first, and must have no problems."""
    return execute.execute(path, first=f"{CHECK_FIRST}\ncheck_first()\n{COMPILE_FAST}")


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def shown(notebook):
    return "".join(text for cell in code_cells(notebook) for text in execute.texts(cell))


def in_cell(name, cell_id):
    """Returns the text output of one cell of an executed notebook."""
    (cell,) = [cell for cell in executed(_COLABS / f"{name}.ipynb").cells if cell.id == cell_id]
    return "".join(execute.texts(cell))


def pictures(notebook):
    """Returns the PNG images that a notebook shows, by cell."""
    found = {}
    for cell in code_cells(notebook):
        for output in cell.outputs:
            if "image/png" in output.get("data", {}):
                found[cell.id] = base64.b64decode(output.data["image/png"])
    return found


def test_all_notebooks_are_found():
    assert {"custom_loop", "debugging", "loop_language", "quick_start", "resume_anywhere", "scaling"} <= {
        path.stem for path in execute.notebooks()
    }


@each_notebook
def test_notebook_runs_without_errors_or_stderr(path):
    outputs = [output for cell in code_cells(executed(path)) for output in cell.outputs]
    assert outputs
    assert not [output for output in outputs if output.output_type == "error"]
    assert not [output.text for output in outputs if output.get("name") == "stderr"]


@each_notebook
def test_notebook_was_saved_with_outputs(path):
    saved, fresh = nbformat.read(path, as_version=4), executed(path)
    nbformat.validate(saved)
    kinds = lambda notebook: {cell.id: [output.output_type for output in cell.outputs] for cell in code_cells(notebook)}
    assert kinds(saved) == kinds(fresh), "Run `python colabs/execute.py`, and commit the notebooks."


@each_notebook
def test_notebook_was_saved_in_normalized_form(path):
    saved = nbformat.read(path, as_version=4)
    assert set(saved.metadata) == {"kernelspec", "language_info"}
    assert not [cell.id for cell in saved.cells if cell.metadata]
    assert [cell.execution_count for cell in code_cells(saved)] == list(range(1, len(code_cells(saved)) + 1))
    assert not re.search(r"\[[^]\n]*(steps/s\b|\d(s|ms|us)/step)", shown(saved)), "A bar shows a speed."


@each_notebook
def test_pictures_are_small(path):
    for notebook in (nbformat.read(path, as_version=4), executed(path)):
        for cell_id, picture in pictures(notebook).items():
            assert picture.startswith(b"\x89PNG"), cell_id
            assert len(picture) < _LARGEST_PICTURE, cell_id


@each_notebook
def test_notebook_contains_no_local_paths(path):
    found = {}
    for notebook in (nbformat.read(path, as_version=4), executed(path)):
        for cell in notebook.cells:
            for text in (cell.source, *execute.texts(cell)):
                if _LOCAL_PATH.search(text):
                    found[cell.id] = text
    assert not found


def test_custom_loop_learns_and_resumes():
    text = shown(executed(_COLABS / "custom_loop.ipynb"))
    lines = re.findall(r"^(train|test) +step +(\d+) .*accuracy (\d\.\d+)$", text, re.MULTILINE)
    assert [int(step) for name, step, _ in lines if name == "train"] == [50, 100, 150, 200, 250, 300, 350, 400]
    accuracies = {int(step): float(accuracy) for name, step, accuracy in lines if name == "test"}
    assert list(accuracies) == [100, 200, 300, 400]
    assert accuracies[400] > 0.8


def test_quick_start_learns():
    evaluations = re.findall(r"^step (\d+)  eval: accuracy (\d\.\d+)", in_cell("quick_start", "fit"), re.MULTILINE)
    assert [int(step) for step, _ in evaluations] == [23 * epoch for epoch in range(1, 11)]
    assert float(evaluations[-1][1]) > 0.9
    before, after = re.findall(r"(\d+\.\d)%", in_cell("quick_start", "nnx-update"))
    assert float(before) < 50 and float(after) > 90


def test_quick_start_resumes_where_it_stopped():
    assert "stopped at step 115" in in_cell("quick_start", "stop")
    text = in_cell("quick_start", "go-on")
    assert re.findall(r"^step (\d+)  eval", text, re.MULTILINE) == ["138", "161", "184", "207", "230"]
    assert "steps with an evaluation: [23, 46, 69, 92, 115, 138, 161, 184, 207, 230]" in text
    assert "the same parameters as those of ten epochs at once: True" in text
    assert "'230', 'STOPPED'" in in_cell("quick_start", "workdir")


def test_loop_language_shows_when_schedules_fire():
    text = in_cell("loop_language", "when")
    assert re.split(r" {2,}|\n", text.strip()) == [
        *("every(steps=100)", "[100, 200, 300, 400, 500]"),
        *("every(steps=100) | at(steps=250)", "[100, 200, 250, 300, 400, 500]"),
        *("every(steps=100) & ~at(steps=200)", "[100, 300, 400, 500]"),
        *("at(steps=1) | every(steps=100) & after(steps=300)", "[1, 300, 400, 500]"),
    ]


def test_loop_language_runs_callbacks_on_schedule():
    said = r"^step (\d+): t\w+ accuracy (\d\.\d+)$"
    for cell_id, steps in {
        "loop": [100, 200, 250, 300, 400, 500],
        "by-hand": [100, 200, 250, 300],
        "go-on": [600, 700],
    }.items():
        lines = re.findall(said, in_cell("loop_language", cell_id), re.MULTILINE)
        assert [int(step) for step, _ in lines] == steps, cell_id
        assert float(lines[-1][1]) > 0.9, cell_id
    assert "['.trainer.lock', '400', '500']" in in_cell("loop_language", "elapsed-after")


def test_loop_language_stops_early_with_the_best_state():
    found = re.fullmatch(
        r"(\d+) of 5000 steps; the state that came back is of step (\d+)\n", in_cell("loop_language", "inner")
    )
    assert found is not None
    stopped, best = map(int, found.groups())
    assert stopped < 5000 and stopped - best == 5 * 25
    accuracy, step = re.findall(r"the best is (\S+)%, at step (\d+)", in_cell("loop_language", "collect"))[0]
    assert float(accuracy) > 90 and int(step) == best


@pytest.fixture(params=["saved", "executed"])
def resume_anywhere(request):
    """Returns the text output of a cell, in the saved and in the newly executed notebook."""
    path = _COLABS / "resume_anywhere.ipynb"
    notebook = nbformat.read(path, as_version=4) if request.param == "saved" else executed(path)
    cells = {cell.id: cell for cell in notebook.cells}
    return lambda cell_id: "".join(execute.texts(cells[cell_id]))


def test_killed_run_matches_the_uninterrupted_one(resume_anywhere):
    assert "exit code -9\n" in resume_anywhere("kill")
    resumed_at = int(re.findall(r"Resumed at step (\d+)", resume_anywhere("resume"))[0])
    assert resumed_at in (75, 100) and "exit codes 0 0\n" in resume_anywhere("resume")
    leaves = re.findall(r"^(\S+) +(\w{12}) +(\w{12}) +(\w+)$", resume_anywhere("states"), re.MULTILINE)
    assert len(leaves) == 9 and {equal for *_, equal in leaves} == {"True"}
    assert all(whole == killed for _, whole, killed, _ in leaves)
    assert resume_anywhere("rows").endswith("44 rows, and all are equal: True\n")
    assert "False" not in resume_anywhere("rows")


def test_damaged_checkpoint_is_skipped_and_sigterm_saves(resume_anywhere):
    assert re.search(r"has changed: its CRC-32 is \w+, but the seal says \w+", resume_anywhere("damage"))
    assert "Step 175 was restored instead." in resume_anywhere("damage") and "Resumed at step 175" in resume_anywhere(
        "damage"
    )
    assert resume_anywhere("damage").endswith("those of the whole run: True\n")
    assert "exit code 143\n" in resume_anywhere("sigterm")
    (last_step,) = re.findall(r"Stopped by SIGTERM at step (\d+)", resume_anywhere("sigterm"))
    assert f", {last_step}]\n" in resume_anywhere("sigterm")


def test_scaling_trains_alike_in_each_layout():
    lines = in_cell("scaling", "train").splitlines()
    assert len(lines) == 5 and all(line.endswith("< 1e-5") for line in lines)
    assert "params/Dense_0/kernel          [64, 512]  float32  P(None, 'data')    16.0 KiB" in in_cell(
        "scaling", "report"
    )
    assert "data parallel, 8        all-reduce 132 KiB" in in_cell("scaling", "cost")
    assert set(pictures(executed(_COLABS / "scaling.ipynb"))) == {"plot"}
    errors = in_cell("scaling", "errors")
    for said in (
        "has 60 rows, which can't be divided evenly among the 8 devices",
        "'batch' is not an axis",
        "can't be applied to",
    ):
        assert said in errors


def test_scaling_resumes_after_a_process_is_killed():
    killed = in_cell("scaling", "kill")
    assert "process 1 ended with -9\n" in killed and "checkpoints: [25" in killed
    assert re.search(r"step 100 on 4 devices, last loss 0\.0\d+\n", in_cell("scaling", "again"))


def test_debugging_finds_mistakes_before_a_step_runs():
    text = in_cell("debugging", "check")
    assert text.startswith("2 errors, 3 warnings. Nothing was run")
    for said in ("-> bfloat16[10]", "'test/acuracy' is measured", "They end at step 22", "every(steps=1000)"):
        assert said in text
    assert in_cell("debugging", "run").startswith("No problem. ")


def test_debugging_explains_recompilations():
    text = in_cell("debugging", "recompile")
    assert "  state/params/Dense_0/bias: float32[10] (weakly typed) -> float32[10]\n" in text
    assert "max_batch_shapes=3 is the limit" in text
    assert re.fullmatch(r"step 22, last loss \S+, without warnings\n", in_cell("debugging", "recompile-mended"))


def test_debugging_finds_the_step_and_operation_that_produced_nan():
    assert "NonFiniteError: Step 14 is the first" in in_cell("debugging", "nan")
    assert "runs/1/failures/14/failure.json" in in_cell("debugging", "nan")
    text = in_cell("debugging", "replay")
    assert re.search(r"\nin same_contrast: return .* / contrast\n", text) and text.endswith("contrast: [5]\n")
    assert re.search(r"with the fix: loss \d\.\d+\n", in_cell("debugging", "skip"))


@pytest.mark.parametrize(
    ("text", "saved"),
    [
        ("100%|██| 69/69 [00:02<00:00, 30.12 steps/s, loss=0.5] \n", "100%|██| 69/69 [loss=0.5]\n"),
        ("  1%|  | 2/200 [1:00:02<?, 1801.00s/ steps]", "  1%|  | 2/200 []"),
        ("step 69  eval: loss 0.5  [1, 2]\n", "step 69  eval: loss 0.5  [1, 2]\n"),
    ],
)
def test_bars_are_saved_without_times(text, saved):
    cell = nbformat.v4.new_code_cell(outputs=[nbformat.v4.new_output("stream", text=text)])
    notebook = execute.normalize(nbformat.v4.new_notebook(cells=[cell]))
    assert notebook.cells[0].outputs[0].text == saved


def test_error_in_a_cell_is_raised(tmp_path):
    path = tmp_path / "broken.ipynb"
    cells = [nbformat.v4.new_code_cell("1 / 0")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="ZeroDivisionError"):
        execute.execute(path)


def test_unknown_notebook_name_is_rejected(capsys):
    with pytest.raises(SystemExit):
        execute.main(["costum_loop"])
    assert "unknown notebook: costum_loop; choose from custom_loop" in capsys.readouterr().err
