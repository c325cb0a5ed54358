"""Trains with all three APIs, and resumes, with an installed jaxloop and without the optional packages.

    python plain_install.py DIRECTORY

DIRECTORY is the site-packages directory that must contain jaxloop. Optional packages can't be imported, even if they
are installed.
"""

import contextlib
import importlib
import importlib.metadata
import pathlib
import pkgutil
import sys
import tempfile

OPTIONAL = (
    "crc32c equinox grain keras matplotlib pandas sklearn tensorboard tensorflow tensorflow_datasets torch"
).split()
for name in OPTIONAL:
    sys.modules[name] = None  # pyright: ignore[reportArgumentType]

import jax
import numpy as np
import optax
from flax import linen as nn

import jaxloop
from jaxloop import examples
from jaxloop import functional as jf


def check_package(directory):
    package = pathlib.Path(jaxloop.__file__).parent
    assert package == pathlib.Path(directory).resolve() / "jaxloop", f"jaxloop was imported from {package}"
    assert importlib.metadata.version("jaxloop") == jaxloop.__version__
    assert (package / "py.typed").is_file()
    for name in dir(jaxloop):
        getattr(jaxloop, name)
    for module in pkgutil.walk_packages(jaxloop.__path__, "jaxloop."):
        importlib.import_module(module.name)


def train_with_objects(directory, total_steps):
    step, state, batches = examples.tiny_regression()
    actions = [jaxloop.SummaryAction(jaxloop.default_writer(directory)), jaxloop.ProgressAction()]
    actions.append(jaxloop.CheckpointAction(f"{directory}/checkpoints"))
    outer_loop = jaxloop.OuterLoop(jaxloop.TrainLoop(step, end_actions=actions), workdir=directory)
    state, outputs = outer_loop(state, batches, total_steps, 10)
    return int(state.step), jaxloop.summarize(outputs)["loss"]


def train_with_functions():
    step, state, batches = examples.tiny_regression()

    @jax.jit
    def train_step(state, batch):
        state, logs = step.run(state, batch)
        return logs, state

    state, history, _ = jf.loop(state, batches, {jf.every(1): train_step}, stop=jf.at(20))
    return history.collect("loss")[-1]


def train_with_one_call():
    _, _, batches = examples.tiny_regression()
    loss = lambda outputs, batch: optax.squared_error(outputs, batch["y"]).mean(-1)
    options = {"inputs": "x", "loss": loss, "optimizer": optax.sgd(0.1)}
    _, history = jaxloop.fit(nn.Dense(1), batches, train_total_steps=20, progress=None, **options)
    return history.collect("loss")[-1]


if __name__ == "__main__":
    check_package(sys.argv[1])
    with tempfile.TemporaryDirectory() as runs, contextlib.redirect_stdout(sys.stderr):
        steps = [train_with_objects(runs, total_steps) for total_steps in (20, 30)]
        losses = [loss for _, loss in steps] + [train_with_functions(), train_with_one_call()]
    assert [step for step, _ in steps] == [20, 30]
    assert np.all(np.asarray(losses) < 0.1), losses
    print(f"jaxloop {jaxloop.__version__} trains")
