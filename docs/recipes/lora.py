"""Fine-tunes a pretrained network with LoRA, using Qwix. The checkpoints contain only the adapters.

The program pretrains a network to read digits. Then it freezes the weights, and trains low-rank adapters to read
mirrored digits.
"""

import jax
import numpy as np
import optax
import qwix
from flax import linen as nn
from sklearn.datasets import load_digits

import jaxloop
from jaxloop import at, checkpoint, every, last

PRETRAINED, ADAPTERS = "runs/lora/pretrained", "runs/lora/adapters"


class Network(nn.Module):
    @nn.compact
    def __call__(self, pixels):
        for width in (256, 64):
            pixels = nn.relu(nn.Dense(width)(pixels))
        return nn.Dense(10)(pixels)


def loss(logits, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])


def accuracy(logits, batch):
    return logits.argmax(-1) == batch["label"]


class LoRAStep(jaxloop.Step):
    """Trains the adapters. The frozen weights are passed to the compiled `run`, but aren't part of the state."""

    def __init__(self, *args, frozen, **kwargs):
        super().__init__(*args, **kwargs)
        self.frozen = frozen

    def make_state(self, spec=None, **init_kwargs):
        state = super().make_state(spec, **init_kwargs)
        adapters = adapters_in(state.params)
        return state.replace(params=adapters, opt_state=self.optimizer.init(adapters))

    def shard_batch(self, batch):
        return super().shard_batch(batch), self.frozen

    def run(self, state, batch):
        batch, frozen = batch

        def loss_fn(adapters):
            params = {layer: {**frozen[layer], **adapters[layer]} for layer in frozen}
            logits = state.apply_fn({"params": params}, batch["pixels"])
            return loss(logits, batch).mean(), {"accuracy": accuracy(logits, batch).mean()}

        if not self.train:
            return state, loss_fn(state.params)[1]
        grads, outputs = jax.grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads), outputs


def adapters_in(params):
    return {
        layer: {name: leaf for name, leaf in leaves.items() if "_lora_" in name} for layer, leaves in params.items()
    }


pixels, labels = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(labels))
pixels, labels = (pixels[order] / 16).astype(np.float32), labels[order]
digits = [{"pixels": pixels[i : i + 64], "label": labels[i : i + 64]} for i in range(0, 1792, 64)]
mirrored = [{**batch, "pixels": batch["pixels"].reshape(-1, 8, 8)[:, :, ::-1].reshape(-1, 64)} for batch in digits]

# Pretrain. If you run the program again, this part only restores the final checkpoint.
step = jaxloop.LossStep(jax.random.key(0), Network(), optax.adam(1e-3), train=True, loss=loss)
save = jaxloop.CheckpointAction(PRETRAINED, interval=last())
outer_loop = jaxloop.OuterLoop(jaxloop.TrainLoop(step, end_actions=[save]), (), jaxloop.CheckpointSpec(PRETRAINED))
outer_loop(step.initialize_model([1, 64]), digits[:20], train_epochs=20)

# Fine-tune.
frozen = checkpoint.load_params(PRETRAINED)
model = qwix.apply_lora_to_model(Network(), qwix.LoraProvider(module_path="Dense_.*", rank=8, alpha=16.0))
step = LoRAStep(jax.random.key(1), model, optax.adam(1e-2), train=True, frozen=frozen)
state = step.initialize_model([1, 64])
save = jaxloop.CheckpointAction(ADAPTERS, interval=every(loops=1))
outer_loop = jaxloop.OuterLoop(
    jaxloop.TrainLoop(step, end_actions=[save]),
    [jaxloop.EvalLoop(LoRAStep(jax.random.key(1), model, frozen=frozen))],
    jaxloop.CheckpointSpec(ADAPTERS),
)
evaluation = jaxloop.EvalSpec(mirrored[20:], interval=at(0) | every(loops=2), name="test")
state, _ = outer_loop(state, mirrored[:20], train_epochs=10, eval_specs=[evaluation])
for steps, test_accuracy in zip(*outer_loop.history.collect("steps", "test.accuracy"), strict=True):
    print(f"step {steps}: {test_accuracy:.1%} of the mirrored digits")
count = lambda tree: sum(leaf.size for leaf in jax.tree.leaves(tree))
print(f"{count(checkpoint.load_params(ADAPTERS)):,} parameters in the checkpoints, {count(frozen):,} frozen ones")
