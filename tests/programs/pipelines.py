"""Runs on data pipelines of several libraries, in each API, which can be killed at any moment and resumed."""

import dataclasses
import importlib.util
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax
from absl import flags
from flax import linen as nn
from programs.acts import Do
from programs.models import batch_of, squares

import jaxloop
from jaxloop import actions, every, functional, last

ROWS, BATCH, PASSES = 48, 8, 3
STEPS = PASSES * ROWS // BATCH

# A run that can't be resumed exactly logs a warning that matches this, at its start or when it resumes.
WARNING = r"is not the one that came next|not continue at the right batch"


def collate(examples: Sequence[Any]) -> dict[str, np.ndarray]:
    return {name: np.stack([each[name] for each in examples]) for name in ("x", "y")}


class Rows:
    """A data source whose examples are the rows."""

    def __init__(self):
        self._rows = batch_of(0, ROWS)

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return {name: each[int(index)] for name, each in self._rows.items()}


# The pipelines -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """A data pipeline.

    Attributes:
      library: The library that it needs.
      make: A function that makes the dataset, the same each time.
      one_pass: Whether a run makes only one pass over the dataset. Otherwise it makes three.
      warns: Whether a run must warn at its start that it can't be resumed exactly.
    """

    library: str
    make: Callable[[], Any]
    one_pass: bool = False
    warns: bool = False

    @property
    def apis(self) -> list[str]:
        return ["outer steps", "loop"] if self.one_pass else ["fit epochs", "fit steps", "outer epochs"]


def tf_data(build: Callable[[Any], Any], one_pass: bool = False) -> Pipeline:
    def make():
        import tensorflow as tf

        return build(tf.data.Dataset.from_tensor_slices(batch_of(0, ROWS)))

    return Pipeline("tensorflow", make, one_pass)


def tf_generator() -> Any:
    import tensorflow as tf

    spec = {"x": tf.TensorSpec((3,), tf.float32), "y": tf.TensorSpec((1,), tf.float32)}
    return tf.data.Dataset.from_generator(lambda: iter(Rows()), output_signature=spec).shuffle(20, seed=1).batch(BATCH)


def torch_loader(stateful: bool = False, seeded: bool = False, epochs: int = 1, **options: Any) -> Pipeline:
    def make():
        import torch
        from torchdata.stateful_dataloader import StatefulDataLoader

        torch.manual_seed(0)
        # One pass over `epochs` copies of the rows.
        data = torch.utils.data.ConcatDataset([Rows()] * epochs)
        chosen = {"generator": torch.Generator().manual_seed(5)} if seeded else {}
        kind = StatefulDataLoader if stateful else torch.utils.data.DataLoader
        return kind(data, BATCH, collate_fn=collate, **chosen, **options)

    return Pipeline("torch", make, one_pass=epochs > 1)


def grain_map(build: Callable[[Any], Any], one_pass: bool = False) -> Pipeline:
    def make():
        import grain

        return build(grain.MapDataset.source(Rows()))

    return Pipeline("grain", make, one_pass)


def grain_loader(epochs: int, workers: int = 0) -> Pipeline:
    def make():
        import grain

        if not flags.FLAGS.is_parsed():
            flags.FLAGS.mark_as_parsed()  # Grain passes the flags to its worker processes.
        sharding, operations = grain.sharding.NoSharding(), [grain.transforms.Batch(BATCH)]
        sampler = grain.samplers.IndexSampler(ROWS, sharding, shuffle=True, seed=3, num_epochs=epochs)
        return grain.DataLoader(data_source=Rows(), sampler=sampler, operations=operations, worker_count=workers)

    return Pipeline("grain", make, one_pass=epochs > 1)


PIPELINES = {
    "tf": tf_data(lambda data: data.batch(BATCH)),
    "tf shuffle": tf_data(lambda data: data.shuffle(ROWS, seed=1).batch(BATCH)),
    "tf shuffle prefetch": tf_data(lambda data: data.shuffle(20, seed=1).batch(BATCH).prefetch(2)),
    "tf batch shuffle": tf_data(lambda data: data.batch(BATCH).shuffle(6, seed=1)),
    "tf same order": tf_data(lambda data: data.shuffle(20, 1, reshuffle_each_iteration=False).batch(BATCH)),
    "tf shuffle repeat": tf_data(lambda data: data.shuffle(20, 1).repeat(PASSES).batch(BATCH).prefetch(2), True),
    "tf repeat shuffle": tf_data(lambda data: data.repeat(PASSES).shuffle(20, seed=1).batch(BATCH), True),
    "tf batch repeat": tf_data(lambda data: data.batch(BATCH).repeat(PASSES), True),
    "tf generator": Pipeline("tensorflow", tf_generator, warns=True),
    "grain map": grain_map(lambda data: data.shuffle(seed=1).batch(BATCH)),
    "grain iter": grain_map(lambda data: data.shuffle(seed=1).to_iter_dataset().batch(BATCH)),
    "grain loader": grain_loader(1),
    "grain map repeat": grain_map(lambda data: data.shuffle(seed=1).repeat(PASSES).batch(BATCH), True),
    "grain iter repeat": grain_map(
        lambda data: data.repeat(PASSES).shuffle(seed=1).to_iter_dataset().batch(BATCH), True
    ),
    "grain loader epochs": grain_loader(PASSES),
    "grain loader worker": grain_loader(PASSES, workers=1),
    "torch": torch_loader(),
    "torch shuffle": torch_loader(shuffle=True),
    "torch shuffle generator": torch_loader(shuffle=True, seeded=True),
    "torch shuffle worker": torch_loader(shuffle=True, num_workers=1),
    "torch shuffle one pass": torch_loader(shuffle=True, epochs=PASSES),
    "torch stateful": torch_loader(True),
    "torch stateful shuffle": torch_loader(True, shuffle=True),
    "torch stateful generator": torch_loader(True, shuffle=True, seeded=True),
    "torch stateful worker": torch_loader(True, shuffle=True, num_workers=1),
    "torch stateful one pass": torch_loader(True, shuffle=True, epochs=PASSES),
}


def libraries() -> tuple[list[str], list[str]]:
    """Returns the modules of the installed libraries, and the names of those that are not installed."""
    needed = {"tensorflow": ["tensorflow"], "grain": ["grain"], "torch": ["torch", "torchdata.stateful_dataloader"]}
    installed = {name: all(importlib.util.find_spec(each.split(".")[0]) for each in needed[name]) for name in needed}
    return [each for name in needed if installed[name] for each in needed[name]], [
        name for name in needed if not installed[name]
    ]


# The runs ------------------------------------------------------------------------------------------------


def run(directory: Any, report: Callable[[str, int], Any], *, pipeline: str, api: str, pace: float) -> dict[str, Any]:
    """Runs or resumes; returns the leaves of the state, the history rows and the points in TensorBoard."""
    directory, dataset, optimizer = pathlib.Path(directory), PIPELINES[pipeline].make(), optax.sgd(0.1, momentum=0.9)

    def pause(step_num, **_):
        report("step", step_num)
        time.sleep(pace)

    paced, checkpoints = Do(pause, every(1), uses_outputs=False), directory / "checkpoints"
    if api.startswith("fit"):
        length = {"train_epochs": PASSES} if api == "fit epochs" else {"train_total_steps": STEPS}
        options = {"loss": squares, "optimizer": optimizer, "progress": None, "actions": [paced], "workdir": directory}
        state, history = jaxloop.fit(nn.Dense(1), dataset, **options, **length)
    else:
        step = jaxloop.LossStep(jax.random.key(0), nn.Dense(1), optimizer, train=True, loss=squares, inputs="x")
        state, writer = step.initialize_model([1, 3]), jaxloop.default_writer(directory)
        summaries, saves = actions.SummaryAction(writer, every(1)), every(steps=4) | last()
        if api == "loop":
            tasks = {every(1): [step, summaries, paced], saves: functional.checkpoint(checkpoints, resume=True)}
            state, history, _ = functional.loop(state, jaxloop.data.batches(dataset), tasks, stop=STEPS)
        else:
            train_loop = jaxloop.TrainLoop(
                step, end_actions=[summaries, paced, actions.CheckpointAction(checkpoints, saves, keep=2)]
            )
            spec = jaxloop.CheckpointSpec(checkpoints)
            outer_loop = jaxloop.OuterLoop(train_loop, checkpoint_spec=spec, workdir=directory, log_interval=1)
            length = {"train_epochs": PASSES} if api == "outer epochs" else {"train_total_steps": STEPS}
            if api == "outer steps":
                length["train_loop_steps"] = 5
            state, _ = outer_loop(state, dataset, **length)
            history = outer_loop.history
        writer.close()
    return {
        "leaves": [np.asarray(leaf).tobytes().hex() for leaf in jax.tree.leaves(state)],
        "history": [[row.elapsed.steps, row.elapsed.samples, str(row.logs)] for row in history.rows],
        "points": points(directory),
    }


def points(directory: pathlib.Path) -> dict[str, list[Any]]:
    """Returns the points that TensorBoard shows for a directory, except those that depend on time."""
    from tensorboard.backend.event_processing import plugin_event_accumulator
    from tensorboard.util import tensor_util

    events = plugin_event_accumulator.EventAccumulator(str(directory), size_guidance={"tensors": 0})
    events.Reload()
    read = lambda tag: [[each.step, str(tensor_util.make_ndarray(each.tensor_proto))] for each in events.Tensors(tag)]
    return {tag: read(tag) for tag in events.Tags()["tensors"] if "jaxloop/" not in tag}
