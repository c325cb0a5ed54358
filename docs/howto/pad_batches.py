"""Pads sequences of different lengths, and excludes the padding from the loss and the metrics."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxloop
from jaxloop import every

rng = np.random.default_rng(0)
sentences = [(np.arange(length) * 3 + rng.integers(20)) % 20 for length in rng.choice([5, 9, 14], size=500)]


def collate(rows):  # Pads to 8 or 16 tokens, so the step is compiled for two shapes only.
    width = 8 if max(map(len, rows)) <= 8 else 16
    tokens = np.zeros([len(rows), width], np.int32)
    for number, row in enumerate(rows):
        tokens[number, : len(row)] = row
    return {"tokens": tokens, "length": np.array([len(row) for row in rows], np.int32)}


class Model(nnx.Module):
    def __init__(self, *, rngs):
        self.embed = nnx.Embed(20, 32, rngs=rngs)
        self.logits = nnx.Linear(32, 20, rngs=rngs)

    def __call__(self, tokens):
        return self.logits(nnx.relu(self.embed(tokens)))


class NextToken(jaxloop.LossStep):
    def loss(self, logits, batch):
        targets = batch["tokens"][:, 1:]
        counts = jnp.arange(targets.shape[1]) < batch["length"][:, None] - 1  # True for tokens that aren't padding.
        losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], targets)
        is_right = logits[:, :-1].argmax(-1) == targets
        return jaxloop.Weighted(losses, counts), {"accuracy": jaxloop.Weighted(is_right, counts)}


schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, warmup_steps=20, decay_steps=200)
model, key = Model(rngs=nnx.Rngs(0)), jax.random.key(0)
train_step = NextToken(key, model, optax.adam(schedule), train=True, inputs="tokens")
outer_loop = jaxloop.OuterLoop(
    jaxloop.TrainLoop(train_step),
    [jaxloop.EvalLoop(NextToken(key, model, inputs="tokens"))],
    log_interval=every(steps=50),
)
state, _ = outer_loop(
    train_step.initialize_model(),
    jaxloop.data.batched(sentences[:400], 32, seed=0, collate=collate),
    train_total_steps=200,
    eval_specs=[
        jaxloop.EvalSpec(jaxloop.data.batched(sentences[400:], 32, num_epochs=1, collate=collate), name="test")
    ],
)
for name in ("test.loss", "test.accuracy"):
    print(f"{name} per token: {outer_loop.history.last(name)[1]:.3f}")
