"""Trains eight models with different seeds at once, stops each one early, and uses the best one at the end."""

import jax
import numpy as np
import optax
from flax import linen as nn
from sklearn.datasets import load_digits

import jaxloop
from jaxloop import every

images, labels = load_digits(return_X_y=True)
images = (images / 16).astype(np.float32)
train = jaxloop.data.batched({"image": images[:1280], "label": labels[:1280]}, 64, seed=0)
test = jaxloop.data.batched({"image": images[1280:], "label": labels[1280:]}, 128, num_epochs=1)
options = {
    "loss": lambda logits, batch: optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]),
    "metrics": {"accuracy": lambda logits, batch: logits.argmax(-1) == batch["label"]},
}
model = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(10)])
step = jaxloop.LossStep(jax.random.key(0), model, optax.adam(1e-2), train=True, **options)
eval_step = jaxloop.LossStep(jax.random.key(0), model, **options)

ensemble = jaxloop.Ensemble(step, seeds=range(8))
stopping = ensemble.early_stopping("test/accuracy", patience=3)
eval_loop = jaxloop.EvalLoop(ensemble.for_evaluation(eval_step), end_actions=stopping)
outer_loop = jaxloop.OuterLoop(jaxloop.TrainLoop(ensemble), [eval_loop])
test_spec = jaxloop.EvalSpec(test, interval=every(steps=50), name="test")
state, _ = outer_loop(ensemble.initialize_model([1, 64]), train, train_total_steps=2000, eval_specs=[test_spec])

history = outer_loop.history
_, mean = history.last("test.accuracy")
_, deviation = history.last("test.accuracy.members.std")
print(f"accuracy of {len(ensemble.members)} seeds: {mean:.1%}, with a deviation of {deviation:.1%}")
best = ensemble.member(state, ensemble.best(history, "test.accuracy"))
print(f"a digit: {eval_step.predict(best, [images[:1]]).argmax(-1)[0]}")
