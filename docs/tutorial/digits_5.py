"""Trains the same network on all devices."""

import jax
import optax
from flax import nnx
from sklearn.datasets import load_digits

import jaxloop
from jaxloop import checkpoint, every, last
from jaxloop.partition import create_mesh

pixels, labels = load_digits(return_X_y=True)
pixels = (pixels / 16).astype("float32")
train = jaxloop.data.batched({"x": pixels[:1280], "label": labels[:1280]}, 64, seed=0)
test = jaxloop.data.batched({"x": pixels[1280:], "label": labels[1280:]}, 64, num_epochs=1)


class Network(nnx.Module):
    def __init__(self, *, rngs):
        self.hidden = nnx.Linear(64, 128, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.logits = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, x):
        return self.logits(self.dropout(nnx.relu(self.hidden(x))))


class DigitsStep(jaxloop.Step):
    def run(self, state, batch):
        def loss_fn(params):
            logits, updates = self.call_model(state, params, batch["x"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
            return losses.mean(), ((logits.argmax(-1) == batch["label"]).mean(), updates)

        (loss, (accuracy, updates)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        if self.train:
            state = state.apply_gradients(grads=grads).update_variables(updates)
        return state, {"loss": loss, "accuracy": accuracy}


model, key = Network(rngs=nnx.Rngs(0)), jax.random.key(0)
partitioner = jaxloop.DataParallelPartitioner(create_mesh(data=-1), "data")
train_step = DigitsStep(key, model, optax.adam(3e-3), partitioner, train=True)
test_step = DigitsStep(key, model, partitioner=partitioner)

workdir = "runs/digits"
when = every(steps=50) | last()
actions = [
    jaxloop.ProgressAction(),
    jaxloop.SummaryAction(jaxloop.default_writer(workdir), every(steps=10)),
    jaxloop.CheckpointAction(f"{workdir}/checkpoints", when, best="test/accuracy"),
]
patience = jaxloop.EarlyStoppingAction("test/accuracy", patience=10)
outer_loop = jaxloop.OuterLoop(
    jaxloop.TrainLoop(train_step, end_actions=actions),
    [jaxloop.EvalLoop(test_step, end_actions=[patience])],
    workdir=workdir,
    log_interval=every(steps=10),
)
state, _ = outer_loop(
    train_step.initialize_model(),
    train,
    train_total_steps=2000,
    eval_specs=[jaxloop.EvalSpec(test, interval=when, name="test")],
)

best = checkpoint.best_step(f"{workdir}/checkpoints")
best_state = test_step.restore_model(state, f"{workdir}/checkpoints", best)
_, outputs = jaxloop.EvalLoop(test_step)(best_state, test)
print(f"stopped at step {state.step}; the best is step {best}: {jaxloop.summarize(outputs)['accuracy']:.1%}")
