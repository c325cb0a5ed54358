"""The tutorial's program, as a user with TensorFlow and TFDS would write it: `mnist_tutorial.py DIRECTORY`.

Trains on several meshes, each with a work directory in DIRECTORY, and prints the training losses of the last loop.
"""

import json
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tensorflow as tf
import tensorflow_datasets as tfds
from clu import metric_writers
from etils import epath
from flax import linen as nn
from jax.experimental import mesh_utils
from jax.sharding import Mesh
from orbax import checkpoint

from jaxloop import actions, partition
from jaxloop.eval_loop import EvalLoop
from jaxloop.outer_loop import EvalSpec, OuterLoop
from jaxloop.step import Step
from jaxloop.train_loop import TrainLoop


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(features=8, kernel_size=(3, 3), strides=(2, 2))(x))
        x = nn.relu(nn.Conv(features=8, kernel_size=(3, 3), strides=(2, 2))(x))
        x = x.reshape((x.shape[0], -1))
        return nn.Dense(features=10)(x)


class MnistStep(Step):
    def begin(self, state, batch):
        if isinstance(batch["image"], tf.Tensor):
            batch = jax.tree.map(lambda tensor: tensor.numpy(), batch)
        return state, batch

    def run(self, state, batch):
        def loss_fn(params):
            logits = state.apply_fn({"params": params}, batch["image"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
            return losses.mean(), logits

        if self.train:
            (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
            state = state.apply_gradients(grads=grads)
        else:
            loss, logits = loss_fn(state.params)
        accuracy = jnp.mean(jnp.argmax(logits, -1) == batch["label"])
        return state, {"loss": loss, "accuracy": accuracy}


def mnist_datasets():
    def prepare(example):
        return {"image": tf.cast(example["image"], tf.float32) / 255.0, "label": tf.cast(example["label"], tf.int32)}

    for split in ("train", "test"):
        dataset = tfds.load("mnist", split=split).map(prepare)
        yield dataset.batch(32, drop_remainder=True).prefetch(tf.data.AUTOTUNE).repeat()


def main(mesh, work_dir):
    train_ds, eval_ds = mnist_datasets()
    partitioner = partition.DataParallelPartitioner(mesh=mesh, data_axis="data")
    train_step = MnistStep(jax.random.PRNGKey(0), CNN(), optax.sgd(0.1, 0.9), partitioner=partitioner, train=True)
    eval_step = MnistStep(jax.random.PRNGKey(0), CNN(), partitioner=partitioner, train=False)

    ckpt_manager = checkpoint.CheckpointManager(
        work_dir / "checkpoints",
        checkpoint.Checkpointer(checkpoint.PyTreeCheckpointHandler()),
        checkpoint.CheckpointManagerOptions(max_to_keep=3),
    )
    metrics_writer = metric_writers.create_default_writer(work_dir, asynchronous=False)
    ckpt_action = actions.CheckpointAction(ckpt_manager, interval=100)
    summary_action = actions.SummaryAction(metrics_writer, interval=100)
    train_loop = TrainLoop(train_step, end_actions=[summary_action, ckpt_action])
    eval_loop = EvalLoop(eval_step, end_actions=[summary_action])
    outer_loop = OuterLoop(train_loop=train_loop, eval_loops=[eval_loop])
    return outer_loop(
        train_step.initialize_model([1, 28, 28, 1]),
        train_dataset=train_ds.as_numpy_iterator(),
        train_total_steps=100,
        train_loop_steps=10,
        eval_specs=[EvalSpec(dataset=tfds.as_numpy(eval_ds), num_steps=100)],
    )


def offline_mnist(*args, **kwargs):
    """Replaces the download: returns 320 images, which are brighter for higher digits."""
    rng = np.random.default_rng(0)
    labels = rng.integers(10, size=320)
    images = rng.integers(25, size=[320, 28, 28, 1]) + 25 * labels[:, None, None, None]
    return tf.data.Dataset.from_tensor_slices({"image": images.astype(np.uint8), "label": labels})


if __name__ == "__main__":
    losses = {}
    with tfds.testing.mock_data(as_dataset_fn=offline_mnist):
        one = Mesh(mesh_utils.create_device_mesh((1,), jax.devices()[:1]), ("data",))
        meshes = {"Mesh of 1": one, "make_mesh of 8": jax.make_mesh((8,), ("data",))}
        for name, mesh in meshes.items():
            state, outputs = main(mesh, epath.Path(tempfile.mkdtemp(dir=sys.argv[1])))
            assert int(state.step) == 100
            losses[name] = [float(loss) for loss in outputs["loss"]]
    print(json.dumps(losses))
