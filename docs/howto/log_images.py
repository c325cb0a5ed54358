"""Logs images from a step to TensorBoard, and draws a picture with an action."""

import pathlib

import jax
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import jaxloop
from jaxloop import every

pixels = (load_digits(return_X_y=True)[0] / 16).astype(np.float32)


class Compress(jaxloop.Step):
    def run(self, state, batch):
        def loss_fn(params):
            output, updates = self.call_model(state, params, batch["x"])
            return ((output - batch["x"]) ** 2).mean(), (output, updates)

        (loss, (output, updates)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        if self.train:
            return state.apply_gradients(grads=grads).update_variables(updates), {"loss": loss}
        images = jaxloop.MetricWithMetadata(output[:4].reshape(-1, 8, 8, 1), jaxloop.MetricType.IMAGE)
        return state, {"loss": loss, "images": images}


class SavePicture(jaxloop.Action):
    def __call__(self, state, outputs, *, step_num, **kwargs):
        images = outputs["images"][-1].value[..., 0]
        plt.imsave(f"runs/images/step_{step_num}.png", np.concatenate(images, axis=1), cmap="gray")


rngs, key = nnx.Rngs(0), jax.random.key(0)
model = nnx.Sequential(nnx.Linear(64, 12, rngs=rngs), nnx.relu, nnx.Linear(12, 64, rngs=rngs))
writer = jaxloop.default_writer("runs/images")
actions = [jaxloop.SummaryAction(writer, prefix="test/"), SavePicture()]
train_step = Compress(key, model, optax.adam(1e-2), train=True)
outer_loop = jaxloop.OuterLoop(
    jaxloop.TrainLoop(train_step), [jaxloop.EvalLoop(Compress(key, model), end_actions=actions)]
)
outer_loop(
    train_step.initialize_model(),
    jaxloop.data.batched({"x": pixels[:1500]}, 64, seed=0),
    train_total_steps=200,
    eval_specs=[jaxloop.EvalSpec([{"x": pixels[1500:]}], interval=every(steps=100), name="test")],
)
print(sorted(path.name for path in pathlib.Path("runs/images").glob("*.png")))
