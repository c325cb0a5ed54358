"""Logs the learning rate, and the norm of the gradients, at each step."""

import jax
import numpy as np
import optax
from flax import nnx

import jaxloop
from jaxloop import every

schedule = optax.warmup_cosine_decay_schedule(0.0, 0.1, warmup_steps=20, decay_steps=100)
x = np.random.default_rng(0).normal(size=[800, 3]).astype(np.float32)
data = jaxloop.data.batched({"x": x, "y": x.sum(axis=-1, keepdims=True)}, 32, seed=0)


class Regression(jaxloop.Step):
    def run(self, state, batch):
        def loss_fn(params):
            predicted, updates = self.call_model(state, params, batch["x"])
            return ((predicted - batch["y"]) ** 2).mean(), updates

        (loss, updates), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        outputs = {"loss": loss, "learning_rate": schedule(state.step), "grad_norm": optax.tree.norm(grads)}
        return state.apply_gradients(grads=grads).update_variables(updates), outputs


model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
step = Regression(jax.random.key(0), model, optax.sgd(schedule), train=True)
outer_loop = jaxloop.OuterLoop(jaxloop.TrainLoop(step), log_interval=every(steps=20))
outer_loop(step.initialize_model(), data, train_total_steps=100)
for row in outer_loop.history:
    train = row.logs["train"]
    print(f"step {row.elapsed.steps}: mean learning rate {train['learning_rate']:.3f}, loss {train['loss']:.4f}")
