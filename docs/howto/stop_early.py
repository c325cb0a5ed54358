"""Stops when the test accuracy no longer improves, or when an action ends the run, and returns the best state."""

import jax
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import jaxloop
from jaxloop import at, every

pixels, labels = load_digits(return_X_y=True)
pixels = (pixels / 16).astype(np.float32)
train = jaxloop.data.batched({"x": pixels[:1280], "label": labels[:1280]}, 64, seed=0)
test = jaxloop.data.batched({"x": pixels[1280:], "label": labels[1280:]}, 64, num_epochs=1)
options = {
    "loss": lambda logits, batch: optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]),
    "metrics": {"accuracy": lambda logits, batch: logits.argmax(-1) == batch["label"]},
}


class StopAbove(jaxloop.Action):
    def __init__(self, accuracy):
        super().__init__()
        self.accuracy = accuracy

    def __call__(self, state, outputs, **kwargs):
        if jaxloop.summarize(outputs)["accuracy"] > self.accuracy:
            outputs[jaxloop.STOP_LOOP] = True


def train_until(*actions, stop=None):
    rngs, key = nnx.Rngs(0), jax.random.key(0)
    model = nnx.Sequential(nnx.Linear(64, 128, rngs=rngs), nnx.relu, nnx.Linear(128, 10, rngs=rngs))
    step = jaxloop.LossStep(key, model, optax.adam(1e-2), train=True, **options)
    eval_loop = jaxloop.EvalLoop(jaxloop.LossStep(key, model, **options), end_actions=actions)
    test_spec = jaxloop.EvalSpec(test, interval=every(steps=20), name="test")
    state, _ = jaxloop.OuterLoop(jaxloop.TrainLoop(step), [eval_loop])(
        step.initialize_model(), train, train_total_steps=3000, stop=stop, eval_specs=[test_spec]
    )
    return int(state.step)


patience = jaxloop.EarlyStoppingAction("test/accuracy", patience=5, min_delta=1e-3, restore_best=True)
print("no improvement for 5 evaluations: the best state is of step", train_until(patience))
print("accuracy above 92%: stopped at step", train_until(StopAbove(0.92)))
print("10,000 examples, or an hour: stopped at step", train_until(stop=at(samples=10_000) | at(time=3600)))
