"""A decoder-only transformer the size of GPT-2 small: 124M parameters, computed in bfloat16."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from benchmarks.workloads import Workload


class Block(nn.Module):
    """Attention and an MLP, each with pre-normalization and a residual connection."""

    num_heads: int

    @nn.compact
    def __call__(self, x):
        rows, length, width = x.shape
        dense = lambda features: nn.Dense(features, dtype=jnp.bfloat16)
        h = nn.LayerNorm(dtype=jnp.bfloat16)(x)
        query, key, value = jnp.split(dense(3 * width)(h).reshape(rows, length, 3 * self.num_heads, -1), 3, axis=2)
        # cuDNN's kernel never stores the whole matrix of scores.
        kernel = "cudnn" if jax.default_backend() == "gpu" else "xla"
        h = jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation=kernel)
        x += dense(width)(h.reshape(x.shape))
        h = dense(4 * width)(nn.LayerNorm(dtype=jnp.bfloat16)(x))
        return x + dense(width)(nn.gelu(h))


class Transformer(nn.Module):
    """Maps tokens `[rows, length]` to logits `[rows, length, vocabulary]`, with tied embeddings."""

    vocabulary: int = 50304  # GPT-2's 50257, padded to a multiple of 64.
    length: int = 1024
    depth: int = 12
    width: int = 768
    num_heads: int = 12

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(self.vocabulary, self.width, dtype=jnp.bfloat16)
        positions = nn.Embed(self.length, self.width, dtype=jnp.bfloat16, name="positions")
        x = embed(tokens) + positions(jnp.arange(tokens.shape[1]))[None]
        for _ in range(self.depth):
            x = Block(self.num_heads)(x)
        return embed.attend(nn.LayerNorm(dtype=jnp.bfloat16)(x)).astype(jnp.float32)


def workload(model: Transformer | None = None, batch_size: int = 16, num_steps: int = 64) -> Workload:
    """Returns a workload that predicts random labels for random tokens, with AdamW."""
    model = Transformer() if model is None else model
    return Workload(
        name="G0",
        title=f"transformer of width {model.width} and depth {model.depth}, batch {batch_size} x {model.length}, AdamW",
        model=model,
        optimizer=optax.adamw(1e-5),
        batch_size=batch_size,
        num_steps=num_steps,
        input_shape=(model.length,),
        make_inputs=lambda rng, shape: rng.integers(model.vocabulary, size=shape, dtype=np.int32),
        label_shape=(model.length,),
        num_classes=model.vocabulary,
    )


def step_flops(model: Transformer, num_params: int, batch_size: int) -> float:
    """Returns the FLOPs that the model needs per training step, as in appendix B of the PaLM paper.

    These are six per parameter and token for the forward and backward passes, plus those of attention, which are not
    halved for causality; see https://arxiv.org/abs/2204.02311. The position embedding doesn't count, because it
    multiplies nothing.
    """
    multiplied = num_params - model.length * model.width
    attention = 12 * model.depth * model.width * model.length
    return float(batch_size * model.length * (6 * multiplied + attention))
