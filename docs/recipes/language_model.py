"""Train a small language model on sums, with a loss per token, and sample from it at evaluations."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import jaxloop
from jaxloop import every

ALPHABET = "\0\n+=0123456789"  # The first character is padding.
LENGTH = 9
LINES = [f"{a}+{b}={a + b}\n" for a in range(40) for b in range(40)]
np.random.default_rng(0).shuffle(LINES)


def encode(lines):
    return np.array([[ALPHABET.index(char) for char in line.ljust(LENGTH, "\0")] for line in lines], np.int32)


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        positions = self.param("positions", nn.initializers.normal(0.02), [LENGTH, 64])
        x = nn.Embed(len(ALPHABET), 64)(tokens) + positions[: tokens.shape[1]]
        mask = nn.make_causal_mask(tokens)
        for _ in range(2):
            x += nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(x), mask=mask)
            x += nn.Dense(64)(nn.gelu(nn.Dense(256)(nn.LayerNorm()(x))))
        return nn.Dense(len(ALPHABET))(nn.LayerNorm()(x))


class LanguageModelStep(jaxloop.Step):
    def num_examples(self, batch):
        """Counts tokens, so that means over several batches are means over tokens."""
        return int(np.sum(batch[:, 1:] != 0))

    def run(self, state, batch):
        inputs, targets = batch[:, :-1], batch[:, 1:]
        weights = (targets != 0).astype(jnp.float32)

        def loss_fn(params):
            logits = state.apply_fn({"params": params}, inputs)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
            return jnp.sum(losses * weights) / jnp.sum(weights)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return (state.apply_gradients(grads=grads) if self.train else state), {"nats_per_token": loss}


@jax.jit
def complete(state, tokens, start):
    """Writes the most likely characters after `start`, one at a time."""

    def write(place, tokens):
        logits = state.apply_fn({"params": state.params}, tokens)[jnp.arange(len(tokens)), place - 1]
        return tokens.at[:, place].set(jnp.where(place < start, tokens[:, place], logits.argmax(-1)))

    return jax.lax.fori_loop(1, LENGTH, write, tokens)


class Sample(jaxloop.Action):
    """Completes the test lines after "=", prints three of them and how many are correct."""

    def __call__(self, state, outputs, *, step_num, **kwargs):
        prompts = [line.partition("=")[0] + "=" for line in LINES[:200]]
        tokens = np.asarray(complete(state, encode(prompts), np.array([len(each) for each in prompts])))
        written = ["".join(ALPHABET[token] for token in row).partition("\n")[0] + "\n" for row in tokens]
        correct = np.mean([found == line for found, line in zip(written, LINES, strict=False)])
        print(
            f"step {step_num}: {'  '.join(line.strip() for line in written[:3])}  ({correct:.0%} correct)", flush=True
        )


def batch_of(number):
    return encode(np.random.default_rng(number).choice(LINES[200:], 128))


schedule = optax.cosine_decay_schedule(3e-3, 600)
train_step = LanguageModelStep(jax.random.key(0), Transformer(), optax.adamw(schedule), train=True)
eval_loop = jaxloop.EvalLoop(LanguageModelStep(jax.random.key(0), Transformer()), end_actions=[Sample()])
outer_loop = jaxloop.OuterLoop(jaxloop.TrainLoop(train_step), [eval_loop])
test = jaxloop.EvalSpec([encode(LINES[:128]), encode(LINES[128:200])], interval=every(steps=200), name="test")
state = train_step.initialize_model(([1, LENGTH], jnp.int32))
outer_loop(state, jaxloop.from_index(batch_of), 600, eval_specs=[test])
print(f"test loss: {outer_loop.history.last('test.nats_per_token')[1]:.2f} nats per token")
