"""Tests that the notebooks run offline and unchanged, and were saved with their outputs."""

import base64
import functools
import importlib.util
import pathlib
import re

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


def pictures(notebook):
    """Returns the PNG images that a notebook shows, by cell."""
    found = {}
    for cell in code_cells(notebook):
        for output in cell.outputs:
            if "image/png" in output.get("data", {}):
                found[cell.id] = base64.b64decode(output.data["image/png"])
    return found


@each_notebook
def test_notebook_runs_without_errors_or_stderr(path):
    outputs = [output for cell in code_cells(executed(path)) for output in cell.outputs]
    assert outputs
    assert not [output for output in outputs if output.output_type == "error"]
    assert not [output.text for output in outputs if output.get("name") == "stderr"]


@each_notebook
def test_notebook_was_saved_in_normalized_form_with_all_outputs(path):
    saved, fresh = nbformat.read(path, as_version=4), executed(path)
    nbformat.validate(saved)
    kinds = lambda notebook: {cell.id: [output.output_type for output in cell.outputs] for cell in code_cells(notebook)}
    assert kinds(saved) == kinds(fresh), "Run `python colabs/execute.py`, and commit the notebooks."
    assert set(saved.metadata) == {"kernelspec", "language_info"}
    assert not [cell.id for cell in saved.cells if cell.metadata]
    assert [cell.execution_count for cell in code_cells(saved)] == list(range(1, len(code_cells(saved)) + 1))
    assert not re.search(r"\[[^]\n]*(steps/s\b|\d(s|ms|us)/step)", shown(saved)), "A bar shows a speed."
    for notebook in (saved, fresh):
        assert not [cell_id for cell_id, each in pictures(notebook).items() if len(each) >= _LARGEST_PICTURE]
        texts = {cell.id: [cell.source, *execute.texts(cell)] for cell in notebook.cells}
        assert not [cell_id for cell_id, each in texts.items() if _LOCAL_PATH.search("\n".join(each))]


# What executed notebooks must show: the notebook, the cell, and regular expressions that are found in its text.
CLAIMS = [
    ("custom_loop", "outer", [r"train  step  50 ", r"(?s)test   step 100 .*test   step 200 .*test   step 300 "]),
    ("custom_loop", "resume", [r"^train  step 350 ", r"test   step 400  loss \S+  accuracy 0\.[89]"]),
    ("quick_start", "fit", [r"^step 23  eval: ", r"step 207  eval: ", r"step 230  eval: accuracy 0\.9"]),
    ("quick_start", "nnx-update", [r"^[0-4]?\d\.\d% before, 9\d\.\d% after"]),
    ("quick_start", "stop", ["stopped at step 115"]),
    ("quick_start", "go-on", ["^step 138  eval", r"\[23, 46, 69, 92, 115, 138, 161, 184, 207, 230\]", "at once: True"]),
    ("quick_start", "workdir", ["'230', 'STOPPED'"]),
    ("loop_language", "when", [r"every\(steps=100\) & ~at\(steps=200\) +\[100, 300, 400, 500\]"]),
    ("loop_language", "loop", [r"^step 100: ", r"step 250: ", r"step 500: training accuracy (0\.9|1)"]),
    ("loop_language", "go-on", [r"^step 600: .*\nstep 700: training accuracy (0\.9|1)"]),
    ("loop_language", "inner", [r"^\d+ of 5000 steps; the state that came back is of step \d+\n"]),
    ("loop_language", "elapsed-after", [r"\['.trainer.lock', '400', '500'\]"]),
    ("resume_anywhere", "kill", ["^exit code -9\n"]),
    ("resume_anywhere", "resume", ["^exit codes 0 0\n", r"Resumed at step (75|100) from killed"]),
    ("resume_anywhere", "states", [r"params/Dense_0/bias +(\w{12}) +\1 +True\n", r"(?s)^((?!False).)*$"]),
    ("resume_anywhere", "rows", ["44 rows, and all are equal: True\n$"]),
    ("resume_anywhere", "damage", [r"its CRC-32 is \w+, but the seal says \w+", "Step 175 was restored instead."]),
    ("resume_anywhere", "damage", ["Resumed at step 175", "those of the whole run: True\n$"]),
    ("resume_anywhere", "sigterm", [r"(?s)^exit code 143\n.*Stopped by SIGTERM at step (\d+).*, \1\]\n"]),
    ("scaling", "train", [r"^(.* differs from one device by < 1e-5\n){5}$"]),
    ("scaling", "report", [r"params/Dense_0/kernel +\[64, 512\]  float32  P\(None, 'data'\) +16.0 KiB"]),
    ("scaling", "cost", [r"data parallel, 8 +\d+ KiB", r"FSDP, 8 +\d+ KiB"]),
    ("scaling", "errors", ["has 60 rows, which can't be divided", "'batch' is not an axis", "can't be applied to"]),
    ("scaling", "kill", ["process 1 ended with -9\n", r"checkpoints: \[25"]),
    ("scaling", "again", [r"step 100 on 4 devices, last loss 0\.0\d+\n"]),
    ("debugging", "check", ["^2 errors, 3 warnings. Nothing", r"-> bfloat16\[10\]", "'test/acuracy' is measured"]),
    ("debugging", "run", ["^No problem. "]),
    ("debugging", "recompile", [r"float32\[10\] \(weakly typed\) -> float32\[10\]\n", "max_batch_shapes=3 is"]),
    ("debugging", "recompile-mended", [r"^step 22, last loss \S+, without warnings\n$"]),
    ("debugging", "nan", ["NonFiniteError: Step 14 is the first", "runs/1/failures/14/failure.json"]),
    ("debugging", "replay", [r"\nin same_contrast: return .* / contrast\n", r"contrast: \[5\]\n$"]),
    ("debugging", "skip", [r"with the fix: loss \d\.\d+\n"]),
]


@pytest.mark.parametrize(("name", "cell_id", "patterns"), CLAIMS)
def test_a_cell_shows_what_its_notebook_says(name, cell_id, patterns):
    (cell,) = [cell for cell in executed(_COLABS / f"{name}.ipynb").cells if cell.id == cell_id]
    shown_by_cell = "".join(execute.texts(cell))
    assert not [each for each in patterns if not re.search(each, shown_by_cell)], shown_by_cell


@pytest.mark.parametrize(
    ("text", "saved"),
    [
        ("100%|██| 69/69 [00:02<00:00, 30.12 steps/s, loss=0.5] \n", "100%|██| 69/69 [loss=0.5]\n"),
        ("step 69  eval: loss 0.5  [1, 2]\n", "step 69  eval: loss 0.5  [1, 2]\n"),
    ],
)
def test_bars_are_saved_without_times(text, saved):
    cell = nbformat.v4.new_code_cell(outputs=[nbformat.v4.new_output("stream", text=text)])
    notebook = execute.normalize(nbformat.v4.new_notebook(cells=[cell]))
    assert notebook.cells[0].outputs[0].text == saved
