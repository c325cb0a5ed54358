"""An experiment with all that a run remembers, which can be killed at any moment and gone on with.

    python whole_run.py DIRECTORY [OPTIONS AS JSON]

runs it, or goes on with it, and writes to DIRECTORY/result.json what it came to.
"""

import hashlib
import json
import os
import pathlib
import signal
import sys
from typing import Any

import jax
import numpy as np
import optax
from clu import metrics as clu_metrics
from flax import linen as nn

import jaxloop
from jaxloop import actions, data, every, last

BATCHES = 12


def batch_of(index: int) -> jaxloop.Batch:
    rng = np.random.default_rng(index)
    x = rng.normal(size=(4, 3)).astype(np.float32)
    return {"id": np.full([4], index, np.int32), "x": x, "y": x.sum(-1, keepdims=True)}


def grain_dataset():
    import grain.python as grain

    return (
        grain.MapDataset.range(4 * BATCHES).map(lambda row: row).batch(4).map(lambda rows: batch_of(int(rows[0]) // 4))
    )


def tf_dataset():
    import tensorflow as tf

    rows = [batch_of(index) for index in range(BATCHES)]
    stacked = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    return tf.data.Dataset.from_tensor_slices(stacked).shuffle(6, seed=3).as_numpy_iterator()


def generator():
    yield from map(batch_of, range(BATCHES))


class Loader:
    """An iterable whose iterators say where they are in the way of torch's."""

    def __iter__(self):
        return LoaderIterator()


class LoaderIterator:
    def __init__(self):
        self.next = 0

    def __next__(self):
        if self.next == BATCHES:
            raise StopIteration
        self.next += 1
        return batch_of(self.next - 1)

    def __iter__(self):
        return self

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state_dict):
        self.next = state_dict["next"]


SOURCES = {
    "list": lambda: [batch_of(index) for index in range(BATCHES)],
    "index": lambda: data.from_index(batch_of, BATCHES),
    "generator": lambda: data.skippable(generator),
    "loader": Loader,
    "grain": grain_dataset,
    "tf.data": tf_dataset,
}


class NoisyStep(jaxloop.Step):
    """A regression with noise from the step's key. Notes the batches that it was given."""

    ids: list[int]

    def begin(self, state, batch):
        if self.train:
            self.ids.append(int(batch["id"][0]))
        return state, {"x": batch["x"], "y": batch["y"]}

    def run(self, state, batch):
        noise = 0.1 * jax.random.normal(self.prng_key(state.step), batch["y"].shape) if self.train else 0.0

        def loss_fn(params):
            return ((state.apply_fn({"params": params}, batch["x"]) - batch["y"] + noise) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        mean = clu_metrics.Average.from_model_output(batch["x"][:, 0])
        outputs = {"loss": loss, "mean": mean}
        return (state.apply_gradients(grads=grads) if self.train else state), outputs


class Writer:
    """Keeps what it is given."""

    def __init__(self):
        self.written: list[list[Any]] = []

    def write_scalars(self, step, scalars):
        values = {name: value for name, value in scalars.items() if "jaxloop/" not in name}
        self.written.append([step, values])

    def flush(self):
        pass


class At(actions.Action):
    """Does something when a step is done."""

    uses_outputs = False

    def __init__(self, step, do):
        super().__init__(every(1))
        self.step, self.do = step, do

    def __call__(self, state, outputs, *, step_num, **kwargs):
        if step_num == self.step:
            self.do()


def make_steps():
    key, optimizer = jax.random.key(3), optax.sgd(0.1, momentum=0.9)
    train_step, eval_step = NoisyStep(key, nn.Dense(1), optimizer, train=True), NoisyStep(key, nn.Dense(1), optimizer)
    return train_step, eval_step


def run(
    directory: Any,
    source: str = "list",
    *,
    prefetch: int = 0,
    total: int | None = 10,
    epochs: int | None = None,
    loop_steps: int | None = 4,
    save: Any = 1,
    keep: int | None = None,
    do_at: tuple[int, Any] | None = None,
    patience: int = 1000,
    steps: Any = None,
) -> dict[str, Any]:
    """Runs the experiment, or goes on with it; returns what it came to, of which all but `written` is of the whole."""
    directory = pathlib.Path(directory)
    train_step, eval_step = steps or make_steps()
    train_step.ids = []
    dataset = SOURCES[source]()
    dataset = data.prefetch(dataset, prefetch) if prefetch else dataset
    writer = Writer()
    train_actions = [
        actions.SummaryAction(writer, every(3), prefix="every_3/"),
        actions.SummaryAction(writer, 2, prefix="two_loops/"),
        actions.EarlyStoppingAction("test/loss", patience, restore_best=True),
        actions.CheckpointAction(directory / "checkpoints", every(steps=save), keep=keep),
    ]
    if do_at is not None:
        train_actions.append(At(*do_at))
    outer_loop = jaxloop.OuterLoop(
        jaxloop.TrainLoop(train_step, end_actions=train_actions),
        [jaxloop.EvalLoop(eval_step, end_actions=[actions.SummaryAction(writer, 2, prefix="test/")])] * 1,
        jaxloop.CheckpointSpec(directory / "checkpoints"),
        workdir=directory,
        log_interval=1 if loop_steps else every(5) | every(loops=1) | last(),
    )
    state = train_step.initialize_model([1, 3])
    eval_spec = jaxloop.EvalSpec([batch_of(100), batch_of(101)], eval_loop_interval=1, name="test")
    state, _ = outer_loop(state, dataset, total, loop_steps, [eval_spec], train_epochs=epochs)
    return result_of(state, outer_loop.history, train_step.ids, writer.written)


def result_of(state, history, ids, written) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(state)
    rows = [[{**row.elapsed.to_dict(), "time": 0}, row.logs] for row in history.rows]
    return {
        "step": int(state.step),
        "state": {jax.tree_util.keystr(path): digest(leaf) for path, leaf in leaves},
        "history": rows,
        "ids": ids,
        "written": written,
    }


def digest(leaf) -> str:
    leaf = jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    return hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest()


if __name__ == "__main__":
    options = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    if "kill_at" in options:
        options["do_at"] = (options.pop("kill_at"), lambda: os.kill(os.getpid(), signal.SIGKILL))
    result = run(sys.argv[1], **options)
    pathlib.Path(sys.argv[1], "result.json").write_text(json.dumps(result))
