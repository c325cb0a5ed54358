"""Trains a transformer to write numbers in digits, as in "four hundred twelve = 412".

The texts differ in length, so the batches are padded. The loss and its means weight all characters equally and ignore
the padding. Each evaluation also completes texts that aren't in the training data.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import jaxloop
from jaxloop import every

ONES = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
seventeen eighteen nineteen""".split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
ALPHABET = "\n -=0123456789abcdefghijklmnopqrstuvwxyz"  # Code 0 marks the end of a text, and padding.
LENGTH = 36


def in_words(n):
    if n < 20:
        return ONES[n]
    if n < 100:
        return TENS[n // 10 - 2] + (f"-{ONES[n % 10]}" if n % 10 else "")
    return f"{ONES[n // 100]} hundred" + (f" {in_words(n % 100)}" if n % 100 else "")


def encode(texts):
    return np.array([[ALPHABET.index(char) for char in text.ljust(LENGTH, "\n")] for text in texts], np.int32)


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, tokens):  # Predicts each token from the tokens before it.
        tokens = jnp.pad(tokens, ((0, 0), (1, 0)))[:, :-1]
        x = nn.Embed(len(ALPHABET), 64)(tokens) + nn.Embed(LENGTH, 64)(jnp.arange(LENGTH))
        x += nn.SelfAttention(num_heads=4)(nn.LayerNorm()(x), mask=nn.make_causal_mask(tokens))
        x += nn.Dense(64)(nn.gelu(nn.Dense(256)(nn.LayerNorm()(x))))
        return nn.Dense(len(ALPHABET))(nn.LayerNorm()(x))


class LanguageStep(jaxloop.Step):
    def run(self, state, batch):
        tokens = batch["tokens"]
        counts = jnp.arange(LENGTH) <= (tokens != 0).sum(-1, keepdims=True)  # Also counts the end of each text.

        def loss_fn(params):
            logits = state.apply_fn({"params": params}, tokens)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens)
            loss = jaxloop.Weighted(losses, counts)  # The mean over the characters, and their count.
            return loss.value, loss

        (_, loss), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        if self.train:
            state = state.apply_gradients(grads=grads)
        return state, {"loss": loss}


class CompleteAction(jaxloop.Action):
    """Completes texts such as "four hundred twelve = ", and prints the percentage of correct answers."""

    def __call__(self, state, outputs, *, step_num, **kwargs):
        prompts = [f"{in_words(n)} = " for n in test_numbers]
        texts = ["".join(ALPHABET[code] for code in row) for row in np.asarray(complete(state, encode(prompts)))]
        answers = [text.partition("= ")[2].partition("\n")[0] for text in texts]
        share = np.mean([answer == str(n) for answer, n in zip(answers, test_numbers, strict=True)])
        print(f'step {step_num}: {share:.0%} are right; "{prompts[0]}{answers[0]}"')


@jax.jit
def complete(state, prompts):
    def add_char(place, tokens):
        chosen = state.apply_fn({"params": state.params}, tokens)[:, place].argmax(-1)
        return tokens.at[:, place].set(jnp.where(prompts[:, place] == 0, chosen, prompts[:, place]))

    return jax.lax.fori_loop(0, LENGTH, add_char, prompts)


train_numbers, test_numbers = np.split(np.random.default_rng(0).permutation(1000), [900])
train_texts, test_texts = (encode([f"{in_words(n)} = {n}" for n in each]) for each in (train_numbers, test_numbers))
train_data = jaxloop.from_index(lambda index: {"tokens": np.random.default_rng(index).choice(train_texts, 32)})
test_data = [{"tokens": rows} for rows in np.split(test_texts, 4)]
optimizer = optax.adam(optax.cosine_decay_schedule(5e-3, 400))
train_step = LanguageStep(jax.random.key(0), Transformer(), optimizer, train=True)
test_loop = jaxloop.EvalLoop(LanguageStep(jax.random.key(0), Transformer()), end_actions=[CompleteAction()])
outer_loop = jaxloop.OuterLoop(jaxloop.TrainLoop(train_step), [test_loop])
state = train_step.initialize_model(([1, LENGTH], jnp.int32))
evaluation = jaxloop.EvalSpec(test_data, interval=every(steps=200), name="test")
state, _ = outer_loop(state, train_data, train_total_steps=400, eval_specs=[evaluation])
print("test loss per character:", *(f"{loss:.3f}" for loss in outer_loop.history.collect("test.loss")))
