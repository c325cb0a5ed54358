"""Fine-tune a pretrained network: a frozen body, and a head and a normalization with different learning rates."""

import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from sklearn import datasets

import jaxloop
from jaxloop import every, last


class Network(nn.Module):
    classes: int

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(32, name="body")(x))
        return nn.Dense(self.classes, name="head")(nn.LayerNorm(name="norm")(x))


def loss(logits, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses, {"accuracy": logits.argmax(-1) == batch["label"]}


images, labels = datasets.load_digits(return_X_y=True)
images = (images / 16).astype(np.float32)


def batches(labels):
    def batch_of(number):
        chosen = np.random.default_rng(number).choice(len(labels), 32)
        return {"image": images[chosen], "label": labels[chosen]}

    return jaxloop.from_index(batch_of)


# Pretrain on 900 images, to tell ten digits apart, and keep the last checkpoint.
directory = tempfile.mkdtemp()
step = jaxloop.LossStep(jax.random.key(0), Network(10), optax.adam(3e-3), train=True, loss=loss)
loop = jaxloop.TrainLoop(step, end_actions=[jaxloop.CheckpointAction(directory, last())])
state = step.initialize_model([1, 64])
jaxloop.OuterLoop(loop)(state, batches(labels[:900]), 500)

# Fine-tune on 50 images, to tell odd from even digits. A frozen parameter has no optimizer state.
optimizer = optax.partition(
    {"frozen": optax.set_to_zero(), "slow": optax.adam(1e-3), "fast": optax.adam(1e-2)},
    {"body": "frozen", "norm": "slow", "head": "fast"},
)
is_odd = labels % 2
test = jaxloop.EvalSpec([{"image": images[900:], "label": is_odd[900:]}], interval=every(steps=100), name="test")


def fine_tune(change_params):
    step = jaxloop.LossStep(jax.random.key(1), Network(2), optimizer, train=True, loss=loss)
    eval_step = jaxloop.LossStep(jax.random.key(1), Network(2), loss=loss)
    state = step.initialize_model([1, 64])
    before = change_params(state.params)
    outer_loop = jaxloop.OuterLoop(jaxloop.TrainLoop(step), [jaxloop.EvalLoop(eval_step)])
    new, _ = outer_loop(state.replace(params=jax.tree.map(jnp.copy, before)), batches(is_odd[:50]), 200, None, [test])
    change = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), before, new.params)
    return outer_loop.history.last("test.accuracy")[1], change


accuracy, _ = fine_tune(lambda params: params)
print(f"random body: {accuracy:.1%}")

pretrained = step.restore_model(step.initialize_model([1, 64]), directory).params
accuracy, change = fine_tune(lambda params: {**pretrained, "head": params["head"]})
print(f"pretrained body: {accuracy:.1%}")
print(f"the body changed by {change['body']['kernel']}, the norm by {change['norm']['scale']:.2f}")
