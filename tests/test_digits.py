"""The demo does what it says: it learns, it resumes to the bit, and it reads 97.5% of the held-out digits."""

import contextlib
import functools
import io
import os
import re
import shutil
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
from sklearn import datasets, model_selection

from jaxloop.examples import digits
from jaxloop.metrics import LoopOutputs

run_short = functools.partial(digits.run, dataset="digits", train_steps=30, batch_size=32, learning_rate=2e-3, seed=0)


@pytest.fixture(scope="module", autouse=True)
def short_loops():
    # Optax raises floats to the power of an integer count, which strict promotion refuses.
    with pytest.MonkeyPatch.context() as patch, jax.numpy_dtype_promotion("standard"):
        patch.setattr(digits, "STEPS_PER_LOOP", 10)
        yield


@pytest.fixture(scope="module", autouse=True)
def compile_once(tmp_path_factory):
    """Compiling takes most of a short run's time: it is done fast, and once for the runs that share their programs."""
    options = {
        "jax_disable_most_optimizations": True,
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled")),
        "jax_persistent_cache_min_compile_time_secs": 0.1,
    }
    before = {name: jax.config.values[name] for name in options}
    for name, value in options.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """A short run from its start to its end: its directory, its state, what it printed."""
    workdir = tmp_path_factory.mktemp("unbroken")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        state, _ = run_short(str(workdir))
    return workdir, state, printed.getvalue()


def assert_same_bits(state, expected):
    assert jax.tree.structure(state) == jax.tree.structure(expected)
    for leaf, other in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(leaf, other)


def test_a_short_run_learns_and_leaves_checkpoints_and_events(unbroken):
    workdir, state, printed = unbroken
    losses = [float(loss) for loss in re.findall(r"train loss (\S+)", printed)]
    assert len(losses) == 3
    assert losses == sorted(losses, reverse=True)
    assert state.step == 30
    assert {path.name for path in (workdir / "checkpoints").iterdir()} == {"10", "20", "30"}
    assert list(workdir.glob("events.out.tfevents.*"))


def test_a_finished_run_says_so_and_shows_its_result_again(unbroken, capsys):
    workdir, state, printed = unbroken
    again, accuracy = run_short(str(workdir))
    assert_same_bits(again.params, state.params)
    shown = capsys.readouterr().out
    assert "Finished already, at step 30." in shown
    assert "steps/s" not in shown
    line = f"test accuracy  {accuracy:.2%}"
    assert line in shown
    assert line in printed


def fail():
    raise OSError("the disk has gone")


def press_ctrl_c():
    signal.raise_signal(signal.SIGINT)


def digits_broken_at(step, happening):
    """The digits, but something happens when the batch of a step is drawn."""

    def load(batch_size, seed):
        data = load_digits(batch_size, seed)

        def train_batches(first_step):
            for number, batch in enumerate(data.train_batches(first_step), first_step):
                if number == step:
                    happening()
                yield batch

        return data._replace(train_batches=train_batches)

    load_digits = digits.load_digits
    return load


@pytest.mark.parametrize("happening", [fail, press_ctrl_c])
def test_a_run_that_was_broken_off_ends_with_the_parameters_of_an_unbroken_one(
    happening, unbroken, tmp_path, monkeypatch, capsys
):
    with monkeypatch.context() as patch:
        patch.setattr(digits, "load_digits", digits_broken_at(17, happening))
        if happening is fail:
            with pytest.raises(OSError, match="the disk has gone"):
                run_short(str(tmp_path))
        else:
            run_short(str(tmp_path))
            assert "Stopped before step 30. Run the same command again to go on." in capsys.readouterr().out

    state, _ = run_short(str(tmp_path))

    assert_same_bits((state.step, state.params, state.opt_state), (30, unbroken[1].params, unbroken[1].opt_state))
    assert re.search(r"Resumed at step 1[78]\.", capsys.readouterr().out)  # Not from the start.


def test_more_steps_train_a_finished_run_further(unbroken, tmp_path, capsys):
    shutil.copytree(unbroken[0], tmp_path, dirs_exist_ok=True)
    state, _ = run_short(str(tmp_path), train_steps=40)
    assert state.step == 40
    assert "Resumed at step 30." in capsys.readouterr().out


def test_the_split_is_that_of_scikit_learns_own_example():
    images, labels = datasets.load_digits(return_X_y=True)
    _, images, _, labels = model_selection.train_test_split(images, labels, test_size=0.5, shuffle=False)
    (batch,) = digits.load_digits(batch_size=32, seed=0).test_batches
    np.testing.assert_array_equal(batch["image"].reshape(len(images), -1) * 16, images)
    np.testing.assert_array_equal(batch["label"], labels)


def test_the_training_batches_are_a_function_of_the_step():
    data = digits.load_digits(batch_size=32, seed=0)
    from_start, from_five = data.train_batches(0), data.train_batches(5)
    for _ in range(5):
        next(from_start)
    jax.tree.map(np.testing.assert_array_equal, next(from_start), next(from_five))


@pytest.mark.parametrize(
    "dataset, module, remedy",
    [
        ("digits", "sklearn", "pip install scikit-learn"),
        ("mnist", "tensorflow_datasets", "pip install tensorflow-cpu tensorflow-datasets"),
    ],
)
def test_a_missing_package_is_one_line_that_says_what_to_install(dataset, module, remedy, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SystemExit, match=remedy):
        run_short(str(tmp_path), dataset=dataset)


@pytest.mark.parametrize("isatty, ends", [(True, ["\r", "\r", "\n"]), (False, ["\n", "\n"])])
def test_progress_is_one_line_on_a_terminal_and_several_elsewhere(isatty, ends, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: isatty)
    progress = digits.Progress(total_steps=20)
    for step_num in (10, 20):
        progress(None, LoopOutputs({"loss": [1.0], digits.STAT_STEPS_PER_SEC: 50.0}, [32]), step_num=step_num)
        progress(None, LoopOutputs({"loss": [2.0], "accuracy": [0.5]}, [899]), step_num=step_num)
    progress.close()
    lines = [f"step {n:5}/20     50 steps/s   train loss 1.0000   test accuracy  50.00%" for n in (10, 20)]
    assert capsys.readouterr().out == "".join(a + b for a, b in zip([*lines, ""], [*ends, ""], strict=False))


def test_mnist_comes_through_tensorflow_datasets(tmp_path):
    import tensorflow_datasets as tfds

    with tfds.testing.mock_data(num_examples=40):
        state, accuracy = run_short(str(tmp_path), dataset="mnist", train_steps=2, batch_size=8)
    assert state.step == 2
    assert 0 <= accuracy <= 1


def test_the_command_reads_the_held_out_digits_as_well_as_it_says(tmp_path):
    command = [sys.executable, "-m", "jaxloop.examples.digits", "--workdir=runs/digits"]
    # Without the number of threads that the tests set for their eight devices.
    env = {name: value for name, value in os.environ.items() if name != "NPROC"}
    finished = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    table = dict(re.findall(r"^  (\w+(?: \w+)?)  +(\S.*)$", finished.stdout, re.MULTILINE))
    assert float(table["test accuracy"].rstrip("%")) >= 97.5
    assert float(table["test loss"]) < 0.1
    assert table["steps"] == "600"
    assert float(table["seconds"]) < 60
    assert (tmp_path / table["checkpoints"] / "600").is_dir()
    assert list((tmp_path / "runs/digits").glob("events.out.tfevents.*"))
