"""A tiny regression that many tests share, so that its steps are compiled once per process."""

import jax
import numpy as np

from jaxloop import CheckpointAction, CheckpointSpec, EvalLoop, OuterLoop, TrainLoop, examples

STEP, _state, BATCHES = examples.tiny_regression()
EVAL_STEP, _, _ = examples.tiny_regression(train=False)
STATE = jax.tree.map(np.array, _state)  # In the memory of the host, so that no step donates it.


Regression = type(STEP)


def make_step(kind=Regression, model=STEP.model, optimizer=STEP.optimizer, **options):
    """Returns a step like `STEP`, possibly of another class or with other arguments."""
    return kind(STEP.base_prng, model, optimizer, **{"train": True, **options})


def experiment(
    *actions, directory=None, saves=None, step=STEP, loop_class=TrainLoop, evals=(), eval_step=EVAL_STEP, **options
):
    """Returns an `OuterLoop` with end actions, and with the end actions of each of its evaluations.

    It resumes from the checkpoints in a directory, if one is given, and saves them if `saves` is an interval.
    """
    saving = [] if saves is None else [CheckpointAction(directory, saves)]
    train_loop = loop_class(step, end_actions=[*actions, *saving])
    eval_loops = [EvalLoop(eval_step, end_actions=each) for each in evals]
    resuming = {} if directory is None else {"checkpoint_spec": CheckpointSpec(directory)}
    return OuterLoop(train_loop, eval_loops, **{**resuming, **options})


class Traced(Regression):
    """Counts how often `run` is traced."""

    traces = 0

    def run(self, state, batch):
        self.traces += 1
        return super().run(state, batch)


def odd_batches(x, y):
    """Returns variants of a batch, of which only the first is like the others of a dataset."""
    return {
        "nothing": {"x": x, "y": y},
        "short": {"x": x[:5], "y": y[:5]},
        "one leaf": {"x": x, "y": y[:1]},
        "dtype": {"x": x, "y": y.astype(np.int32)},
        "another leaf": {"x": x, "y": y, "z": x},
        "order": {"y": y, "x": x},
        "no array": {"x": jax.numpy.asarray(x), "y": y},
        "no dict": [x, y],
        "wrong": {"x": np.ones([8, 4], np.float32), "y": y},
        "strings": {"x": x, "y": np.array([["a"]] * 8)},
        "too large": {"x": x, "y": np.full([8, 1], 2**40)},
    }
