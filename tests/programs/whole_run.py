"""An experiment with every kind of state that a run can have, which can be interrupted and resumed at any moment."""

import dataclasses
import hashlib
import pathlib
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from clu import metrics as clu_metrics
from flax import linen as nn
from jax.sharding import Mesh
from programs import models
from programs.acts import Do

import jaxloop
from jaxloop import actions, checkpoint, data, every, last, optimizers

BATCHES = 12
ROWS = 8  # In a batch.

# A function that receives each place that a run reaches, with a number: "data", "step" and "eval" with the number of
# the batch; "action" and "opened" with the number of completed steps; "writer" with the step of the row; "compile" with
# 0. It may raise an exception or send a signal.
Watch = Callable[[str, int], None]


def watch_nothing(place: str, number: int) -> None:
    pass


def once(place: str, number: int | None, do: Callable[[], object]) -> Callable[[str, int], None]:
    """Returns a watcher that calls a function once, at a place and number."""
    left = [(place, number)]

    def watch(place: str, number: int) -> None:
        if (place, number) in left:
            left.clear()
            do()

    return watch


def batch_of(index: int) -> jaxloop.Batch:
    return {"id": np.full([ROWS], index, np.int32), **models.batch_of(index, ROWS)}


def grain_dataset():
    import grain.python as grain

    return grain.MapDataset.range(ROWS * BATCHES).batch(ROWS).map(lambda rows: batch_of(int(rows[0]) // ROWS))


def tf_dataset():
    import tensorflow as tf

    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *map(batch_of, range(BATCHES)))
    return tf.data.Dataset.from_tensor_slices(stacked).shuffle(6, seed=3).as_numpy_iterator()


class Loader:
    """An iterable whose iterators have `state_dict` and `load_state_dict`, like PyTorch's."""

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


SOURCES: dict[str, Callable[[Callable[[int], jaxloop.Batch]], Any]] = {
    "list": lambda get: [get(index) for index in range(BATCHES)],
    "index": lambda get: data.from_index(get, BATCHES),
    "many": lambda get: data.from_index(lambda index: get(index % BATCHES), 1_000_000),
    "generator": lambda get: data.skippable(lambda: map(get, range(BATCHES))),
    "loader": lambda get: Loader(),
    "grain": lambda get: grain_dataset(),
    "tf.data": lambda get: tf_dataset(),
}


@flax.struct.dataclass
class Sums(clu_metrics.Metric):
    """Sums of many numbers, reduced to a hash of their bits, which shows if the order of addition has changed."""

    sums: jax.Array

    @classmethod
    def from_model_output(cls, x):
        return cls(x)

    @classmethod
    def empty(cls):
        return cls(jnp.zeros([ROWS, 3]))

    def merge(self, other):
        return Sums(self.sums + other.sums)

    def compute(self):
        return jax.lax.bitcast_convert_type(self.sums, jnp.int32).sum() % 2**20


class NoisyStep(jaxloop.Step):
    """A regression with noise from the step's key. Records the numbers of its batches."""

    ids: list[int]
    watch: Watch = staticmethod(watch_nothing)

    def begin(self, state, batch):
        number = int(batch["id"][0])
        self.watch("step" if self.train else "eval", number)
        if self.train:
            self.ids.append(number)
        return state, {"x": batch["x"], "y": batch["y"]}

    def run(self, state, batch):
        self.watch("compile", 0)
        noise = 0.1 * jax.random.normal(self.prng_key(state.step), batch["y"].shape) if self.train else 0.0

        params = state.params if self.train else optimizers.ema_params(state)

        def loss_fn(params):
            return ((state.apply_fn({"params": params}, batch["x"]) - batch["y"] + noise) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        mean = clu_metrics.Average.from_model_output(batch["x"][:, 0])
        outputs = {"loss": loss, "mean": mean, "sums": Sums.from_model_output(x=batch["x"])}
        return (state.apply_gradients(grads=grads) if self.train else state), outputs


class Writer:
    """Keeps the rows that it receives."""

    def __init__(self, watch: Watch = watch_nothing):
        self.written: list[list[Any]] = []
        self.flushes = 0
        self._watch = watch

    def write_scalars(self, step, scalars):
        self._watch("writer", step)
        values = {name: value for name, value in scalars.items() if "jaxloop/" not in name}
        self.written.append([step, values])

    def flush(self):
        self.flushes += 1


class ReportSteps(Do):
    """Reports each completed step."""

    def __init__(self, watch: Watch, place: str = "action", interval: int | None = None):
        super().__init__(lambda step_num, **_: watch(place, step_num), interval or every(1), uses_outputs=False)


class Stopping(actions.EarlyStoppingAction):
    """Never stops; restores the best state at the end, and records the state before that."""

    def finish(self, state):
        self.last = digests(state)
        return super().finish(state)


class SaveNothing(actions.Action):
    """Makes the run read its outputs when a `CheckpointAction` would, but writes no file."""

    uses_outputs = False
    runs_last = True
    time_category = "checkpoints"

    def __call__(self, state, outputs, **kwargs):
        pass


@dataclasses.dataclass(frozen=True)
class Program:
    """The steps, which are compiled only once, and the initial state."""

    train_step: NoisyStep
    eval_step: NoisyStep
    state: Any


def make_program(seed: int = 3, devices: int | None = None) -> Program:
    key = jax.random.key(seed)
    partly_frozen = optimizers.by_path({"kernel": optax.sgd(0.1, momentum=0.9), "bias": None})
    optimizer = optax.chain(partly_frozen, optimizers.ema(0.9))
    partitioner = jaxloop.SingleDevicePartitioner()
    if devices is not None:
        partitioner = jaxloop.DataParallelPartitioner(Mesh(np.array(jax.devices()[:devices]), ("data",)), "data")
    train_step = NoisyStep(key, nn.Dense(1), optimizer, partitioner, train=True)
    eval_step = NoisyStep(key, nn.Dense(1), optimizer, partitioner)
    return Program(train_step, eval_step, train_step.initialize_model([1, 3]))


def run(
    directory: Any,
    source: str = "list",
    *,
    program: Program | None = None,
    prefetch: int = 0,
    total: int | None = 10,
    epochs: int | None = None,
    loop_steps: int | None = 4,
    save: int = 1,
    keep: int | None = None,
    saves: bool = True,
    watch: Watch = watch_nothing,
    writer: Any = None,
    more_actions: Sequence[actions.Action] = (),
    steps_per_dispatch: int = 1,
) -> dict[str, Any]:
    """Runs or resumes the experiment.

    Args:
      directory: The work directory. The checkpoints are in its subdirectory `checkpoints`.
      program: A program that several runs in one process can share; None for a new one.
      save: The number of steps between checkpoints.
      saves: Whether to save checkpoints.

    Returns:
      A dict of results. `ids` and `written` contain only the batches and rows of this call.
    """
    directory = pathlib.Path(directory)
    program = program or make_program()
    train_step, eval_step = program.train_step, program.eval_step
    train_step.ids, train_step.watch, eval_step.watch = [], watch, watch

    def get(index):
        watch("data", index)
        return batch_of(index)

    dataset = SOURCES[source](get)
    dataset = data.prefetch(dataset, prefetch) if prefetch else dataset
    writer = Writer(watch) if writer is None else writer
    stopping = Stopping("test/loss", patience=1000, restore_best=True)
    train_actions = [
        actions.SummaryAction(writer, every(3), prefix="every_3/"),
        actions.SummaryAction(writer, 2, prefix="two_loops/"),
        stopping,
        actions.CheckpointAction(directory / "checkpoints", every(save), keep=keep)
        if saves
        else SaveNothing(every(save)),
        *more_actions,
    ]
    if watch is not watch_nothing:
        train_actions.append(ReportSteps(watch))
    loop_actions = {"begin_actions": [ReportSteps(watch, "opened", 1)], "end_actions": train_actions}
    outer_loop = jaxloop.OuterLoop(
        jaxloop.TrainLoop(train_step, **loop_actions, steps_per_dispatch=steps_per_dispatch),
        [jaxloop.EvalLoop(eval_step, end_actions=[actions.SummaryAction(writer, 2, prefix="test/")])],
        jaxloop.CheckpointSpec(directory / "checkpoints"),
        workdir=directory,
        log_interval=1 if loop_steps else every(5) | every(loops=1) | last(),
    )
    state = jax.tree.map(jnp.copy, program.state)
    eval_spec = jaxloop.EvalSpec([batch_of(100), batch_of(101)], eval_loop_interval=1, name="test")
    state, _ = outer_loop(state, dataset, total, loop_steps, [eval_spec], train_epochs=epochs)
    return {
        "step": int(state.step),
        "state": {"last": getattr(stopping, "last", None), "best": digests(state)},
        "history": [[{**row.elapsed.to_dict(), "time": 0}, row.logs] for row in outer_loop.history.rows],
        "ids": train_step.ids,
        "written": getattr(writer, "written", []),
    }


def copy_until(step: int, directory: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
    """Copies a run to `target`, as if it had been killed right after it saved this step; returns `target`."""
    target.mkdir()
    shutil.copy(directory / "history.jsonl", target)
    if step in checkpoint.all_steps(directory / "checkpoints"):
        shutil.copytree(directory / "checkpoints" / str(step), target / "checkpoints" / str(step))
    return target


def assert_resumed_exactly(resumed: dict[str, Any], whole: dict[str, Any], step: int) -> None:
    """Asserts that a run resumed at a step ended like the uninterrupted run."""
    assert resumed["state"] == whole["state"]
    assert resumed["history"] == whole["history"]
    assert resumed["ids"] == whole["ids"][step:]
    assert resumed["written"] == [each for each in whole["written"] if each[0] > step]


def digests(state) -> dict[str, str]:
    """Returns the SHA-256 of each leaf."""
    return {jax.tree_util.keystr(path): digest(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


def digest(leaf) -> str:
    leaf = jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    return hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest()
