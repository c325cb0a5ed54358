"""An action that writes a table, keeps its lowest value, and survives a restart."""

import pathlib

import jax
import numpy as np
import optax
from flax import nnx

import jaxloop
from jaxloop import distributed, every


class Table(jaxloop.Action):
    def __init__(self, path, interval=1):
        super().__init__(interval)
        self.path, self.size, self.lowest = pathlib.Path(path), 0, float("inf")

    def __call__(self, state, outputs, *, step_num, **kwargs):
        loss = jaxloop.summarize(outputs)["loss"]  # The mean since the action's last call.
        self.lowest = min(self.lowest, loss)
        if distributed.is_first_process():
            with self.path.open("a") as file:
                file.truncate(self.size)  # After a restart, drops the rows of steps that are repeated.
                file.write(f"{step_num},{loss:.4f}\n")
            self.size = self.path.stat().st_size

    def state_dict(self):  # Saved in each checkpoint ...
        return {"size": self.size, "lowest": self.lowest}

    def load_state_dict(self, state_dict):  # ... and restored when the run resumes.
        self.size, self.lowest = state_dict["size"], state_dict["lowest"]


def train(total_steps):
    x = np.random.default_rng(0).normal(size=[800, 3]).astype(np.float32)
    data = jaxloop.data.batched({"x": x, "y": x.sum(axis=-1, keepdims=True)}, 32, seed=0)
    loss = lambda predictions, batch: ((predictions - batch["y"]) ** 2).mean(axis=-1)
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    step = jaxloop.LossStep(jax.random.key(0), model, optax.sgd(0.02), train=True, loss=loss)
    table = Table("table.csv", every(steps=10))
    save = jaxloop.CheckpointAction("runs/table/checkpoints", every(steps=40))
    outer_loop = jaxloop.OuterLoop(
        jaxloop.TrainLoop(step, end_actions=[table, save]), workdir="runs/table", log_interval=every(steps=20)
    )
    outer_loop(step.initialize_model(), data, train_total_steps=total_steps)
    return table


train(70)  # Saves at step 40, and writes rows up to step 70.
table = train(100)  # Resumes at step 40.
print("rows at steps", [int(line.split(",")[0]) for line in table.path.read_text().splitlines()])
print(f"lowest: {table.lowest:.4f}")
