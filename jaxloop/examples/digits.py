"""Reads handwritten digits: a small CNN on scikit-learn's 1,797 scans, trained in half a minute on two CPU cores.

    python -m jaxloop.examples.digits --workdir=runs/digits
    tensorboard --logdir=runs/digits

In runs/digits are then checkpoints, TensorBoard events, all that was measured (history.jsonl) and its picture
(learning_curves.png). With --check it trains nothing, and says how the run would go and what would go wrong in it.
Run the first command again and it resumes: a run that was killed goes on from its newest
checkpoint to the very same parameters, a finished one shows its result, and --train_steps=1200 trains it further. With
--dataset=mnist --workdir=runs/mnist the same network reads the 70,000 digits of MNIST.
"""

import pathlib
import sys
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags
from flax import linen as nn

import jaxloop
from jaxloop import checkpoint
from jaxloop.data import batches, from_index

WHEN_TO_LOG = jaxloop.first() | jaxloop.every(steps=10)
WHEN_TO_TEST = jaxloop.every(steps=50) | jaxloop.last()  # And to save a checkpoint.


class CNN(nn.Module):
    """Two convolutions and two dense layers; takes images of any size."""

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        x = nn.relu(nn.Conv(32, (3, 3))(images))
        x = nn.relu(nn.Conv(64, (3, 3))(x))
        x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = x.reshape(x.shape[0], -1)
        x = nn.Dropout(0.4, deterministic=not train)(x)
        x = nn.relu(nn.Dense(128)(x))
        x = nn.Dropout(0.4, deterministic=not train)(x)
        return nn.Dense(10)(x)


class ClassifierStep(jaxloop.Step):
    """What happens to one batch of images and labels, in training and in testing."""

    def run(self, state, batch):
        if not self.train:
            logits = state.apply_fn(state.variables, batch["image"], train=False)
            return state, measure(logits, batch["label"])

        # Keys are a pure function of the step, so a resumed run draws what the unbroken one would have drawn.
        keys = self.prng_key(state.step)
        images = shift_at_random(keys["shift"], batch["image"])

        def loss_fn(params):
            logits = state.apply_fn({"params": params}, images, train=True, rngs=keys)
            outputs = measure(logits, batch["label"])
            return outputs["loss"], outputs

        grads, outputs = jax.grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads), outputs


def measure(logits: jax.Array, labels: jax.Array) -> dict[str, jax.Array]:
    """What a batch comes to; jaxloop weighs batches by their size when it takes the mean over many."""
    return {
        "loss": optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(),
        "accuracy": jnp.mean(logits.argmax(-1) == labels),
    }


def shift_at_random(key: jax.Array, images: jax.Array) -> jax.Array:
    """Moves each image by up to a pixel each way; otherwise so few scans would be learnt by heart."""
    padded = jnp.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)))
    corners = jax.random.randint(key, (len(images), 2), 0, 3)
    crop = lambda image, corner: jax.lax.dynamic_slice(image, (*corner, 0), images.shape[1:])
    return jax.vmap(crop)(padded, corners)


class Data(NamedTuple):
    image_shape: tuple[int, ...]
    train_batches: Iterable[jaxloop.Batch]  # Endless.
    test_batches: Iterable[jaxloop.Batch]


def load_digits(batch_size: int, seed: int) -> Data:
    """The scans of 8x8 pixels that come with scikit-learn, the later half held out, as in its own example.

    There a support vector machine reads 97% of that half.
    """
    try:
        from sklearn import datasets
    except ImportError:
        sys.exit("The digits come with scikit-learn, which is not installed: pip install scikit-learn")
    images, labels = datasets.load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8, 1).astype(np.float32) / 16
    num_train = len(images) // 2

    # A pure function of the batch's number, so a resumed run draws the very batch that comes next.
    def batch_of(number: int) -> jaxloop.Batch:
        rows = np.random.default_rng((seed, number)).choice(num_train, batch_size, replace=False)
        return {"image": images[rows], "label": labels[rows]}

    test_batch = {"image": images[num_train:], "label": labels[num_train:]}
    return Data((8, 8, 1), from_index(batch_of), [test_batch])


def load_mnist(batch_size: int, seed: int) -> Data:
    """MNIST through TensorFlow Datasets, which downloads it once."""
    try:
        import tensorflow_datasets as tfds
    except ImportError:
        sys.exit("MNIST needs TensorFlow Datasets: pip install tensorflow-cpu tensorflow-datasets")

    def load(split: str) -> Any:
        examples: Any = tfds.load("mnist", split=split, as_supervised=True)
        return examples.map(lambda image, label: {"image": image / 255, "label": label})

    train, test = load("train").shuffle(10_000, seed=seed).repeat().batch(batch_size), load("test").batch(1000)
    # With these, unlike with tfds.as_numpy, a checkpoint keeps where the pipeline is, its shuffle buffer included.
    return Data((28, 28, 1), batches(train.prefetch(2)), tfds.as_numpy(test))


def run(
    workdir: pathlib.Path,
    dataset: str,
    train_steps: int,
    batch_size: int,
    learning_rate: float,
    seed: int,
    check: bool = False,
) -> tuple[jaxloop.TrainState, float]:
    """Trains to `train_steps`, from the newest checkpoint if there is one; returns the state and its test accuracy."""
    start_time = time.perf_counter()
    checkpoint_dir, curves_file = workdir / "checkpoints", workdir / "learning_curves.png"
    first_step = max(checkpoint.all_steps(checkpoint_dir), default=0)
    print(f"{dataset}: {train_steps} steps of {batch_size} images, in {workdir}", flush=True)

    data = {"digits": load_digits, "mnist": load_mnist}[dataset](batch_size, seed)
    schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, train_steps // 10, train_steps)
    params_key, shift_key, dropout_key = jax.random.split(jax.random.key(seed), 3)
    keys = {"params": params_key, "shift": shift_key, "dropout": dropout_key}
    train_step = ClassifierStep(keys, CNN(), optax.adamw(schedule), train=True)
    eval_step = ClassifierStep(keys, CNN())
    make_state = train_step.abstract_state if check else train_step.initialize_model
    state = make_state([1, *data.image_shape], train=False)

    if first_step >= train_steps and not check:
        print(f"Finished already, at step {first_step}. A larger --train_steps goes on, another --workdir starts anew.")
        state = train_step.restore_model(state, checkpoint_dir)
    else:
        if first_step:
            print(f"Resumed at step {first_step}.", flush=True)
        writer = jaxloop.default_writer(workdir)
        train_actions = [
            jaxloop.ProgressAction(),
            jaxloop.SummaryAction(writer, WHEN_TO_LOG),
            # Keeps the newest three, and the best beside them.
            jaxloop.CheckpointAction(checkpoint_dir, WHEN_TO_TEST, best=("test/accuracy", "max")),
        ]
        outer_loop = jaxloop.OuterLoop(
            jaxloop.TrainLoop(train_step, end_actions=train_actions),
            [jaxloop.EvalLoop(eval_step, end_actions=[jaxloop.SummaryAction(writer, prefix="test/")])],
            jaxloop.CheckpointSpec(checkpoint_dir),  # Goes on from the newest of them.
            workdir=workdir,
            log_interval=WHEN_TO_LOG,
        )
        test = jaxloop.EvalSpec(data.test_batches, schedule=WHEN_TO_TEST, name="test")
        arguments = {"train_dataset": data.train_batches, "train_total_steps": train_steps, "eval_specs": [test]}
        if check:
            report = outer_loop.check(state, **arguments)
            sys.exit(f"{report}" if report.errors else print(report))
        state, _ = outer_loop(state, **arguments)
        writer.close()
        print(outer_loop.spent)

    # A loop without actions: it writes no second summary of a step that has one.
    _, outputs = jaxloop.EvalLoop(eval_step)(state, data.test_batches)
    test = jaxloop.summarize(outputs)
    # The rows of outer_loop.history, from their file: a finished run has no outer loop.
    jaxloop.History.load(workdir / "history.jsonl").plot("loss", "accuracy").savefig(curves_file)
    table = {
        "test accuracy": f"{test['accuracy']:.2%}",
        "test loss": f"{test['loss']:.4f}",
        "steps": f"{int(state.step):,}",
        "best at step": checkpoint.best_step(checkpoint_dir),
        "parameters": f"{train_step.num_params:,}",
        "seconds": f"{time.perf_counter() - start_time:.1f}",
        "learning curves": curves_file,
        "checkpoints": checkpoint_dir,
        "events": f"{workdir} (tensorboard --logdir={workdir})",
    }
    print("\n".join(f"  {name:<17}{value}" for name, value in table.items()))
    if state.step < train_steps:
        print(f"Stopped before step {train_steps}. Run the same command again to go on.")
    return state, test["accuracy"]


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"It takes flags only, got {' '.join(argv[1:])!r}.")
    options = flags.FLAGS
    workdir = pathlib.Path(options.workdir)
    names = ("dataset", "train_steps", "batch_size", "learning_rate", "seed", "check")
    run(workdir, **{name: getattr(options, name) for name in names})


if __name__ == "__main__":
    # Defined only here, so that a test may import several drivers whose flags have the same names.
    flags.DEFINE_string("workdir", "runs/digits", "Where checkpoints, curves and TensorBoard events go.")
    flags.DEFINE_enum("dataset", "digits", ["digits", "mnist"], "What to read.")
    flags.DEFINE_integer("train_steps", 600, "Optimizer updates in all, those before a resume included.", lower_bound=1)
    flags.DEFINE_integer("batch_size", 32, "Images in a batch.", lower_bound=1)
    flags.DEFINE_float("learning_rate", 2e-3, "Its peak, after a warm-up and before a cosine decay.")
    flags.DEFINE_integer("seed", 0, "Of the parameters, the batches and the dropout.")
    flags.DEFINE_bool("check", False, "Train nothing; say how the run would go, and what would go wrong in it.")
    # What is logged below a warning would break up the line of progress; --verbosity=0 shows it.
    app.run(main, argv=[sys.argv[0], "--verbosity=-1", *sys.argv[1:]])
