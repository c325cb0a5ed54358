"""Trains without a learning-rate schedule, and evaluates the parameters that the optimizer means to be evaluated.

`optax.contrib.schedule_free` computes gradients at other parameters than those that it recommends.
"""

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


class DigitsStep(jaxloop.Step):
    def run(self, state, batch):
        def loss_fn(params):
            logits, updates = self.call_model(state, params, batch["pixels"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
            return losses.mean(), ((logits.argmax(-1) == batch["label"]).mean(), updates)

        params = state.params if self.train else self.params_to_evaluate(state)
        (loss, (accuracy, updates)), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        if self.train:
            state = state.apply_gradients(grads=grads).update_variables(updates)
        return state, {"loss": loss, "accuracy": accuracy}


class TrainingParameters(DigitsStep):
    def params_to_evaluate(self, state):
        return state.params


rng = np.random.default_rng(0)
pixels, labels = load_digits(return_X_y=True)
order = rng.permutation(len(labels))
pixels, labels = (pixels[order] / 16).astype(np.float32), labels[order]
test_batch = {"pixels": pixels[1200:], "label": labels[1200:]}


def make_batch(number):
    rows = np.random.default_rng(number).choice(1200, 32)
    return {"pixels": pixels[rows], "label": labels[rows]}


optimizer = optax.contrib.schedule_free_adamw(learning_rate=0.03, b1=0.9)
key, model = jax.random.key(0), Network()
train_step = DigitsStep(key, model, optimizer, train=True)
outer_loop = jaxloop.OuterLoop(
    jaxloop.TrainLoop(train_step),
    [jaxloop.EvalLoop(TrainingParameters(key, model)), jaxloop.EvalLoop(DigitsStep(key, model))],
)
specs = [jaxloop.EvalSpec([test_batch], interval=every(steps=50), name=name) for name in ("training", "averaged")]
state, _ = outer_loop(
    train_step.initialize_model([1, 64]),
    train_dataset=jaxloop.from_index(make_batch),
    train_total_steps=250,
    eval_specs=specs,
)
steps, training = outer_loop.history.collect("steps", "training.accuracy")
averaged = outer_loop.history.collect("averaged.accuracy")
for step, of_training, of_averaged in zip(steps, training, averaged, strict=True):
    print(f"step {step}: in training {of_training:.1%}, to evaluate {of_averaged:.1%}")
