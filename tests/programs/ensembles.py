"""An experiment with an ensemble, some of whose members diverge or stop early, which can be killed and resumed."""

import json
import pathlib
import time

import flax.linen as nn
import jax
import numpy as np
import optax
from programs.whole_run import digests

import jaxloop
from jaxloop import actions, every

NUM_STEPS = 60


def batches(number, rows=8, seed=0):
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(number, rows, 3)).astype(np.float32)
    return [{"x": x, "y": np.sin(x.sum(axis=-1, keepdims=True))} for x in inputs]


class Model(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.relu(nn.Dense(8)(x))
        return nn.Dense(1)(nn.Dropout(0.1, deterministic=not train)(x))


def squared_error(outputs, batch):
    return ((outputs - batch["y"]) ** 2).mean(axis=-1)


def sgd(rate=0.1):
    return optax.inject_hyperparams(optax.sgd)(learning_rate=rate, momentum=0.9)


class Report(actions.Action):
    uses_outputs = False

    def __init__(self, report, pace):
        super().__init__(every(1))
        self._report, self._pace = report, pace

    def __call__(self, state, outputs, *, step_num, **kwargs):
        self._report("step", step_num)
        time.sleep(self._pace)


def run(directory, report=lambda place, number: None, *, total=NUM_STEPS, save=4, pace=0.0):
    """Runs or resumes the experiment. Two members diverge, and others stop early.

    Args:
      save: The number of steps between checkpoints.
      pace: The minimum number of seconds per step.
    """
    directory, key = pathlib.Path(directory), jax.random.key(0)
    step = jaxloop.LossStep(key, Model(), sgd(), train=True, loss=squared_error)
    eval_step = jaxloop.LossStep(key, Model(), loss=squared_error)
    rates = {"learning_rate": [0.02, 0.01, 1e20]}
    ensemble = jaxloop.Ensemble(step, seeds=range(2), hyperparams=rates)
    stopping = ensemble.early_stopping("loss", patience=2, min_delta=0.01)
    save = actions.CheckpointAction(directory / "checkpoints", every(save), keep=2)
    outer_loop = jaxloop.OuterLoop(
        jaxloop.TrainLoop(ensemble, end_actions=[save, Report(report, pace)], nan_policy="skip"),
        [jaxloop.EvalLoop(ensemble.for_evaluation(eval_step), end_actions=stopping)],
        jaxloop.CheckpointSpec(directory / "checkpoints"),
        workdir=directory,
        log_interval=every(10),
    )
    eval_spec = jaxloop.EvalSpec([*batches(2, seed=1), *batches(1, rows=3, seed=2)], interval=every(6), name="test")
    state = ensemble.initialize_model([1, 3])
    state, _ = outer_loop(state, batches(20) * 3, total, eval_specs=[eval_spec])
    rows = [[{**row.elapsed.to_dict(), "time": 0}, row.logs] for row in outer_loop.history.rows]
    return {"state": digests(state), "history": json.dumps(rows), "frozen": np.asarray(state.frozen).tolist()}
