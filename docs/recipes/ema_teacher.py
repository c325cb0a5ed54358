"""Evaluates the exponential moving average (EMA) of the parameters, which is a field of the train state.

Every fifth label in the training data is wrong. The parameters follow the noise of each small batch, while their
average, the teacher, doesn't.
"""

from typing import Any

import jax
import numpy as np
import optax
from flax import linen as nn
from sklearn.datasets import load_digits

import jaxloop
from jaxloop import every


class Network(nn.Module):
    @nn.compact
    def __call__(self, pixels):
        return nn.Dense(10)(nn.relu(nn.Dense(128)(pixels)))


class TeacherState(jaxloop.TrainState):
    teacher: Any = None  # Parameters, like `params`.


class TeacherStep(jaxloop.Step):
    def __init__(self, *args, decay=0.99, **kwargs):
        super().__init__(*args, **kwargs)
        self.decay = decay

    def make_state(self, spec=None, **init_kwargs):
        state = super().make_state(spec, **init_kwargs)
        return TeacherState(**vars(state), teacher=state.params)

    def run(self, state, batch):
        def loss_fn(params):
            logits = state.apply_fn({"params": params}, batch["pixels"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
            return losses.mean(), (logits.argmax(-1) == batch["label"]).mean()

        if not self.train:
            return state, {"student": loss_fn(state.params)[1], "teacher": loss_fn(state.teacher)[1]}

        (loss, accuracy), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        state = state.apply_gradients(grads=grads)
        teacher = optax.incremental_update(state.params, state.teacher, 1 - self.decay)
        return state.replace(teacher=teacher), {"loss": loss, "accuracy": accuracy}


rng = np.random.default_rng(0)
pixels, labels = load_digits(return_X_y=True)
order = rng.permutation(len(labels))
pixels, labels = (pixels[order] / 16).astype(np.float32), labels[order]
test_batch = {"pixels": pixels[1200:], "label": labels[1200:]}
train_labels = np.where(rng.random(1200) < 0.2, rng.integers(10, size=1200), labels[:1200])


def make_batch(number):
    rows = np.random.default_rng(number).choice(1200, 32)
    return {"pixels": pixels[rows], "label": train_labels[rows]}


train_step = TeacherStep(jax.random.key(0), Network(), optax.adam(1e-2), train=True)
test_step = TeacherStep(jax.random.key(0), Network())
outer_loop = jaxloop.OuterLoop(jaxloop.TrainLoop(train_step), [jaxloop.EvalLoop(test_step)])
state, _ = outer_loop(
    train_step.initialize_model([1, 64]),
    train_dataset=jaxloop.from_index(make_batch),
    train_total_steps=500,
    eval_specs=[jaxloop.EvalSpec([test_batch], interval=every(steps=100), name="test")],
)
for step, student, teacher in zip(*outer_loop.history.collect("steps", "test.student", "test.teacher"), strict=True):
    print(f"step {step}: student {student:.1%}, teacher {teacher:.1%}")
