"""Trains the same network with a custom step."""

import jax
import optax
from flax import nnx
from sklearn.datasets import load_digits

import jaxloop

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
train_step = DigitsStep(key, model, optax.adam(3e-3), train=True)
test_step = DigitsStep(key, model)

state = train_step.initialize_model()
state, outputs = jaxloop.TrainLoop(train_step)(state, train, num_steps=200)
print(f"step {state.step}: loss {outputs['loss'][0]:.2f} -> {outputs['loss'][-1]:.2f}")
_, outputs = jaxloop.EvalLoop(test_step)(state, test)
print(f"{jaxloop.summarize(outputs)['accuracy']:.1%} of the test digits")
