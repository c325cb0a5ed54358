"""Executes the notebooks in this directory offline, and saves them with their outputs.

    python colabs/execute.py              # All notebooks.
    python colabs/execute.py custom_loop  # One notebook.

Executing an unchanged notebook writes the same file, so a diff shows only real changes. The saved outputs leave out the
times and speeds of progress bars, and the paths in the log. (On another machine, the last digits of numbers and a few
pixels may differ.) Nothing is downloaded: scikit-learn's handwritten digits replace MNIST.
"""

import argparse
import os
import pathlib
import re
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import nbclient
import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager

DIRECTORY = pathlib.Path(__file__).resolve().parent

# These cells run in the kernel before the notebook's own cells, and are never saved.
_NO_WIDGETS_CELL = """
def _hide_widgets():
    import sys

    sys.modules["ipywidgets"] = None  # Draw progress bars as text in saved notebooks.


_hide_widgets()
"""
_OFFLINE_CELL = """
def _serve_digits():
    import numpy as np
    import sklearn.datasets
    import tensorflow as tf
    import tensorflow_datasets as tfds

    digits = sklearn.datasets.load_digits()
    images = tf.image.resize(digits.images[..., None] * (255 / 16), [28, 28]).numpy().round().astype(np.uint8)
    train, test = np.split(np.random.default_rng(0).permutation(len(images)), [1437])
    splits = {"train": train, "test": test}

    def load(name, *, split):
        if name != "mnist":
            raise ValueError(f"Notebooks are executed offline, with digits instead of 'mnist'; got {name!r}.")
        part = splits[split]
        return tf.data.Dataset.from_tensor_slices({"image": images[part], "label": digits.target[part]})

    tfds.load = load


_serve_digits()
"""


def notebooks() -> list[pathlib.Path]:
    """Returns the paths of the notebooks in this directory."""
    return sorted(DIRECTORY.glob("*.ipynb"))


def execute(path: pathlib.Path, *, timeout: int = 300, first: str = "") -> nbformat.NotebookNode:
    """Executes a notebook in a kernel of this interpreter, on one CPU device, and returns it with its outputs.

    Doesn't change the file. Deletes everything that the notebook writes to its working directory or to temporary
    directories.

    Args:
      path: The notebook.
      timeout: The maximum number of seconds per cell.
      first: Code to run before the notebook's own.

    Raises:
      nbclient.exceptions.CellExecutionError: A cell raised an error. The message shows the cell and its traceback.
    """
    notebook = nbformat.read(path, as_version=4)
    needs_data = any("tensorflow_datasets" in cell.source for cell in notebook.cells)
    first_cell = nbformat.v4.new_code_cell(_NO_WIDGETS_CELL + (_OFFLINE_CELL if needs_data else "") + first)
    notebook.cells.insert(0, first_cell)
    with tempfile.TemporaryDirectory(prefix="notebook_") as directory:
        kernel = AsyncKernelManager(
            kernel_name="python3",
            # Without kernel directories, "python3" means this interpreter.
            kernel_spec_manager=KernelSpecManager(kernel_dirs=[]),
            transport="ipc",
            connection_file=f"{directory}/kernel.json",
        )
        client = nbclient.NotebookClient(
            notebook, km=kernel, timeout=timeout, record_timing=False, coalesce_streams=True
        )
        # By default, nbclient does not shut down a kernel manager that it did not create.
        client.execute(cwd=directory, env=_kernel_environment(directory), cleanup_kc=True)
    notebook.cells.remove(first_cell)
    return normalize(notebook)


def _kernel_environment(directory: str) -> dict[str, str]:
    """Returns this process's environment, without variables that affect JAX, TensorFlow, matplotlib or IPython."""
    others = ("JAX_", "XLA_", "TF_", "NPROC", "MPLBACKEND")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    return {
        **kept,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1",
        # Compile a network only once if several cells train it.
        "JAX_COMPILATION_CACHE_DIR": f"{directory}/compiled",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "IPYTHONDIR": directory,
        "TMPDIR": directory,
        # Silence a warning of the debugger about Python's frozen modules.
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }


# The times in a progress bar: `69/69 [00:02<00:00, 30.1 steps/s, loss=0.5]` becomes `69/69 [loss=0.5]`.
_TQDM_TIMES = re.compile(r"(?<= \[)[\d:?]+<[\d:?]+, *[^,\]]+(, )?")
# Runs log where they save, resume and stop. Only notebooks that set up logging show these lines, without the paths to
# temporary directories.
_LOGGED = re.compile(r"^INFO:absl:.*\n?", re.MULTILINE)
_DIRECTORY = re.compile(r"^(INFO: .* (?:in|from)) /\S*/([^/\s]+)$", re.MULTILINE)
# A line that overwrites a longer one is padded with spaces.
_SPACES_AT_ENDS = re.compile(r" +$", re.MULTILINE)


def normalize(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Removes everything that varies between machines and runs, in place, and returns the notebook."""
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    count = 0
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({})
        if cell.cell_type == "code":
            count += 1
            cell.execution_count = count
            for output in cell.outputs:
                if "execution_count" in output:
                    output.execution_count = count
                if output.output_type == "stream":
                    for pattern in (_TQDM_TIMES, _LOGGED, _SPACES_AT_ENDS):
                        output.text = pattern.sub("", output.text)
                    output.text = _DIRECTORY.sub(r"\1 \2", output.text)
            cell.outputs = [output for output in cell.outputs if output.get("text") != ""]
    return notebook


def texts(cell: Any) -> list[str]:
    """Returns the text outputs of a code cell: its streams, its value and its tracebacks, with their newlines."""
    shown = []
    for output in cell.get("outputs", ()):
        shown.append(output.get("text", ""))
        shown.append(output.get("data", {}).get("text/plain", ""))
        shown.extend(output.get("traceback", ()))
    return [text for text in shown if text]


def main(arguments: Sequence[str] | None = None) -> None:
    known = {path.stem: path for path in notebooks()}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="name", help=f"a notebook: {', '.join(known)} (default: all)")
    names = parser.parse_args(arguments).names or list(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"unknown notebook: {', '.join(unknown)}; choose from {', '.join(known)}")
    for name in names:
        notebook = execute(known[name])
        nbformat.write(notebook, known[name])
        sys.stdout.write(f"{name}: executed and saved\n")


if __name__ == "__main__":
    main()
