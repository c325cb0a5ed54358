"""Average the parameters over the steps, and let the average teach: a mean teacher on 100 labels."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from sklearn import datasets

import jaxloop
from jaxloop import every

DECAY = 0.98
NUM_LABELED = 100


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(10)(nn.relu(nn.Dense(128)(x)))


class State(jaxloop.TrainState):
    teacher: Any = None  # The average of the parameters. Like them, it is saved, sharded and resumed.


class MeanTeacherStep(jaxloop.Step):
    def make_state(self, spec=None, **init_kwargs):
        state = super().make_state(spec, **init_kwargs)
        return State(**vars(state), teacher=state.params)

    def num_examples(self, batch):  # By default the length of all leaves, which differ here.
        return len(batch["label"])

    def run(self, state, batch):
        predict = lambda params, images: state.apply_fn({"params": params}, images)
        if not self.train:
            accuracy = lambda params: jnp.mean(predict(params, batch["image"]).argmax(-1) == batch["label"])
            return state, {"student": accuracy(state.params), "teacher": accuracy(state.teacher)}

        noise = 0.5 * jax.random.normal(self.prng_key(state.step), batch["unlabeled"].shape)
        targets = nn.softmax(predict(state.teacher, batch["unlabeled"]))

        def loss_fn(params):
            logits = predict(params, batch["image"])
            supervised = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
            guesses = nn.softmax(predict(params, batch["unlabeled"] + noise))
            return supervised + jnp.sum((guesses - targets) ** 2, axis=-1).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        state = state.apply_gradients(grads=grads)
        teacher = optax.incremental_update(state.params, state.teacher, 1 - DECAY)
        return state.replace(teacher=teacher), {"loss": loss}


images, labels = datasets.load_digits(return_X_y=True)
images = (images / 16).astype(np.float32)
train_images, test_batch = images[:900], {"image": images[900:], "label": labels[900:]}


def batch_of(number):
    rng = np.random.default_rng(number)
    labeled, unlabeled = rng.choice(NUM_LABELED, 32), rng.choice(len(train_images), 128)
    return {"image": images[labeled], "label": labels[labeled], "unlabeled": train_images[unlabeled]}


train_step = MeanTeacherStep(jax.random.key(0), MLP(), optax.adam(2e-2), train=True)
outer_loop = jaxloop.OuterLoop(
    jaxloop.TrainLoop(train_step), [jaxloop.EvalLoop(MeanTeacherStep(jax.random.key(0), MLP()))]
)
test = jaxloop.EvalSpec([test_batch], interval=every(steps=200), name="test")
outer_loop(train_step.initialize_model([1, 64]), jaxloop.from_index(batch_of), 800, eval_specs=[test])

for step, student, teacher in zip(*outer_loop.history.collect("steps", "student", "teacher"), strict=True):
    print(f"step {step}: student {student:.1%}, teacher {teacher:.1%}")
