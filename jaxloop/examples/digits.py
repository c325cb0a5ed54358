"""Trains a small CNN on scikit-learn's 1,797 scans of handwritten digits, in half a minute on two CPU cores.

    python -m jaxloop.examples.digits --workdir=runs/digits
    tensorboard --logdir=runs/digits

The first command writes checkpoints, TensorBoard events, the metrics (history.jsonl) and a plot of them
(learning_curves.png) to runs/digits. Ctrl-C saves the state and exits with code 130.

Run the same command again to resume. An interrupted run continues from its newest checkpoint and ends with the same
parameters as an uninterrupted one. If the run has already finished, the command prints the final result again;
add --train_steps=1200 to continue training. The flag --check prints the plan of the run and any problems, without
training.
"""

import pathlib
import sys
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags
from flax import linen as nn

import jaxloop
from jaxloop import checkpoint
from jaxloop.data import from_index

WHEN_TO_LOG = jaxloop.first() | jaxloop.every(steps=10)
WHEN_TO_TEST = jaxloop.every(steps=50) | jaxloop.last()  # Checkpoints are saved at the same steps.


class CNN(nn.Module):
    """A CNN with two convolutions and two dense layers, for images of any size."""

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        if train:
            # The key depends only on the step, so a resumed run uses the same random numbers as an uninterrupted one.
            images = shift_at_random(self.make_rng("dropout"), images)
        x = nn.relu(nn.Conv(32, (3, 3))(images))
        x = nn.relu(nn.Conv(64, (3, 3))(x))
        x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = x.reshape(x.shape[0], -1)
        x = nn.Dropout(0.4, deterministic=not train)(x)
        x = nn.relu(nn.Dense(128)(x))
        x = nn.Dropout(0.4, deterministic=not train)(x)
        return nn.Dense(10)(x)


def loss(logits: jax.Array, batch: jaxloop.Batch) -> jax.Array:
    """Returns one loss per image. When averaging over batches, jaxloop weights each batch by its size."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])


def accuracy(logits: jax.Array, batch: jaxloop.Batch) -> jax.Array:
    return logits.argmax(-1) == batch["label"]


def shift_at_random(key: jax.Array, images: jax.Array) -> jax.Array:
    """Randomly shifts each image by up to one pixel vertically and horizontally, to reduce overfitting."""
    padded = jnp.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)))
    corners = jax.random.randint(key, (len(images), 2), 0, 3)
    crop = lambda image, corner: jax.lax.dynamic_slice(image, (*corner, 0), images.shape[1:])
    return jax.vmap(crop)(padded, corners)


class Data(NamedTuple):
    train_batches: Iterable[jaxloop.Batch]  # Infinite.
    test_batches: Iterable[jaxloop.Batch]


def load_digits(batch_size: int, seed: int) -> Data:
    """Returns training and test batches of scikit-learn's 8x8-pixel scans of digits.

    The second half of the scans is used for testing. An example in scikit-learn's documentation uses the same split.
    The support vector machine in that example classifies 97% of the second half correctly.
    """
    from sklearn import datasets

    images, labels = datasets.load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8, 1).astype(np.float32) / 16
    num_train = len(images) // 2

    # A batch depends only on its number, so a resumed run continues with exactly the next batch.
    def batch_of(number: int) -> jaxloop.Batch:
        rows = np.random.default_rng((seed, number)).choice(num_train, batch_size, replace=False)
        return {"image": images[rows], "label": labels[rows]}

    test_batch = {"image": images[num_train:], "label": labels[num_train:]}
    return Data(from_index(batch_of), [test_batch])


def run(
    workdir: pathlib.Path, train_steps: int, batch_size: int, learning_rate: float, seed: int, check: bool = False
) -> tuple[jaxloop.TrainState, float]:
    """Trains until step `train_steps`, starting from the newest checkpoint if there is one.

    Returns the final state and its test accuracy. Ctrl-C ends the program with exit code 130. If `check` is True,
    prints the plan of the run and any problems, and then ends the program without training.
    """
    checkpoint_dir, curves_file = workdir / "checkpoints", workdir / "learning_curves.png"
    first_step = max(checkpoint.all_steps(checkpoint_dir), default=0)
    print(f"digits: {train_steps} steps of {batch_size} images, in {workdir}", flush=True)

    data = load_digits(batch_size, seed)
    schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, train_steps // 10, train_steps)
    functions = {"loss": loss, "metrics": {"accuracy": accuracy}}
    train_step = jaxloop.LossStep(jax.random.key(seed), CNN(), optax.adamw(schedule), train=True, **functions)
    eval_step = jaxloop.LossStep(jax.random.key(seed), CNN(), **functions)
    make_state = train_step.abstract_state if check else train_step.initialize_model
    state = make_state([1, 8, 8, 1], train=False)

    print(f"Resumed at step {first_step}." if first_step else train_step.summary(state), flush=True)
    writer = jaxloop.default_writer(workdir)
    train_actions = [
        jaxloop.ProgressAction(),
        jaxloop.SummaryAction(writer, WHEN_TO_LOG),
        # Keeps the newest three and the best.
        jaxloop.CheckpointAction(checkpoint_dir, WHEN_TO_TEST, best=("test/accuracy", "max")),
    ]
    outer_loop = jaxloop.OuterLoop(
        jaxloop.TrainLoop(train_step, end_actions=train_actions),
        [jaxloop.EvalLoop(eval_step, end_actions=[jaxloop.SummaryAction(writer, prefix="test/")])],
        jaxloop.CheckpointSpec(checkpoint_dir),  # Resumes from the newest checkpoint.
        workdir=workdir,
        log_interval=WHEN_TO_LOG,
    )
    test = jaxloop.EvalSpec(data.test_batches, interval=WHEN_TO_TEST, name="test")
    arguments = {"train_dataset": data.train_batches, "train_total_steps": train_steps, "eval_specs": [test]}
    if check:
        report = outer_loop.check(state, **arguments)
        sys.exit(f"{report}" if report.errors else print(report))
    state, outputs = outer_loop(state, **arguments)
    writer.close()
    if jaxloop.STOP_LOOP in (outputs or {}):  # Stopped by Ctrl-C or a command.
        print(f"Stopped at step {int(state.step)} of {train_steps}. Run the same command again to resume.")
        sys.exit(130)
    print(outer_loop.spent)

    outer_loop.history.plot("loss", "accuracy").savefig(curves_file)
    test_accuracy = outer_loop.history.collect("test.accuracy")[-1]
    print(f"  test accuracy    {test_accuracy:.2%}")
    print(f"  best at step     {checkpoint.best_step(checkpoint_dir)}")
    print(f"  learning curves  {curves_file}")
    return state, test_accuracy


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"This program takes flags only, got {' '.join(argv[1:])!r}.")
    options = flags.FLAGS
    workdir = pathlib.Path(options.workdir)
    names = ("train_steps", "batch_size", "learning_rate", "seed", "check")
    run(workdir, **{name: getattr(options, name) for name in names})


if __name__ == "__main__":
    # Defined only here, so that a test can import several drivers with the same flags.
    flags.DEFINE_string("workdir", "runs/digits", "The directory for checkpoints, curves and TensorBoard events.")
    flags.DEFINE_integer(
        "train_steps", 600, "Optimizer updates in total, including those before a resume.", lower_bound=1
    )
    flags.DEFINE_integer("batch_size", 32, "Images per batch.", lower_bound=1)
    flags.DEFINE_float("learning_rate", 2e-3, "The peak learning rate, between the warm-up and the cosine decay.")
    flags.DEFINE_integer("seed", 0, "The seed for the parameters, the batches and dropout.")
    flags.DEFINE_bool("check", False, "Print the plan of the run and its problems, without training.")
    # Log lines below warnings would break up the progress bar; --verbosity=0 shows them.
    app.run(main, argv=[sys.argv[0], "--verbosity=-1", *sys.argv[1:]])
