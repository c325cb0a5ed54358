"""Trains a decoder-only transformer, byte by byte, on the source code of Python's standard library.

    python docs/examples/transformer.py --workdir=runs/transformer

This command trains the "tiny" model on a CPU, in a minute or two, and prints a sample of generated text at each
evaluation. Ctrl-C saves the state and exits with code 130. To resume an interrupted or killed run, run the same command
again. With Open MPI (see docs/scaling.md), the model trains in two processes, as if on two hosts:

    mpirun -n 2 --bind-to none python docs/examples/transformer.py --workdir=runs/transformer

--check prints the plan of the run and any problems, without training. --size=124m is for a GPU. --partitioner chooses
the layout over several devices:

- "data" keeps a copy of the state on each device.
- "fsdp" keeps a part of the state on each device.
- "tensor" splits each layer over --model_devices devices.

A dry run compiles a step for simulated devices and prints its cost: the memory and the FLOPs.

    python docs/examples/transformer.py --size=1b --dry_run --devices=64
"""

import dataclasses
import pathlib
import sys
import sysconfig
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxloop
from jaxloop import check, data, distributed, partition, stat_loop
from jaxloop.distributed import is_first_process
from jaxloop.partition.layout import readable

END_OF_FILE = 0  # The byte between two files.
NUM_BYTES = 256
WHEN_TO_LOG = jaxloop.first() | jaxloop.every(steps=20)


@dataclasses.dataclass(frozen=True)
class Size:
    """The size of a model and its training options."""

    width: int
    depth: int
    num_heads: int
    hidden: int
    length: int
    batch_size: int
    learning_rate: float
    train_steps: int


SIZES = {
    "tiny": Size(128, 2, 4, 512, 128, 8, 3e-3, 200),
    "124m": Size(768, 12, 12, 5120, 1024, 32, 6e-4, 5_000),
    "1b": Size(2048, 20, 16, 8192, 2048, 256, 3e-4, 50_000),
}


# The model ---------------------------------------------------------------------------------------------


class Block(nnx.Module):
    """Attention and an MLP, each preceded by a normalization and wrapped in a residual connection."""

    def __init__(self, size: Size, rngs: nnx.Rngs):
        linear = lambda inputs, outputs: nnx.Linear(inputs, outputs, use_bias=False, rngs=rngs)
        self.num_heads = size.num_heads
        self.norm_1, self.norm_2 = (nnx.RMSNorm(size.width, rngs=rngs) for _ in range(2))
        self.query, self.key, self.value, self.out = (linear(size.width, size.width) for _ in range(4))
        self.up, self.down = linear(size.width, size.hidden), linear(size.hidden, size.width)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        h = self.norm_1(x)
        by_head = lambda values: values.reshape(*x.shape[:2], self.num_heads, -1)
        query, key, value = (by_head(project(h)) for project in (self.query, self.key, self.value))
        x += self.out(jax.nn.dot_product_attention(query, key, value, mask=mask).reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.norm_2(x))))


class Transformer(nnx.Module):
    """Maps bytes `[rows, length]` to the logits of the next bytes, `[rows, length, 256]`."""

    def __init__(self, size: Size, *, rngs: nnx.Rngs):
        self.bytes = nnx.Embed(NUM_BYTES, size.width, rngs=rngs)
        self.positions = nnx.Embed(size.length, size.width, rngs=rngs)
        # One module holds all blocks, in parameters with a leading axis of length `depth`, so XLA compiles one block.
        self.blocks = nnx.split_rngs(splits=size.depth)(nnx.vmap(lambda rngs: Block(size, rngs)))(rngs)
        self.norm = nnx.RMSNorm(size.width, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.bytes(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        mask = visible(tokens)[:, None]
        return self.bytes.attend(self.norm(apply_blocks(self.blocks, x, mask)))


# The backward pass recomputes each block, because storing its activations would take more memory.
@nnx.scan(in_axes=(0, nnx.Carry, None), out_axes=nnx.Carry)
@nnx.remat
def apply_blocks(block: Block, x: jax.Array, mask: jax.Array) -> jax.Array:
    # Activations between blocks are sharded like the batch, regardless of the parameters' layout.
    return block(partition.constrain(x, "data"), mask)


def visible(tokens: jax.Array) -> jax.Array:
    """Returns the attention mask `[rows, length, length]`: a byte attends to itself and earlier bytes of its file."""
    file = jnp.cumsum(tokens == END_OF_FILE, axis=1) - (tokens == END_OF_FILE)
    places = jnp.arange(tokens.shape[1])
    return (file[:, :, None] == file[:, None, :]) & (places[:, None] >= places)


def next_byte_loss(logits: jax.Array, batch: jaxloop.Batch) -> jax.Array:
    """Returns each row's mean cross-entropy of the next byte in nats, `[rows]`.

    The first byte of each file is excluded, because there are no earlier bytes to predict it from.
    """
    inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets.astype(jnp.int32))
    counts = inputs != END_OF_FILE
    return (losses * counts).sum(-1) / jnp.maximum(counts.sum(-1), 1)


def make_partitioner(kind: str, model_devices: int) -> partition.MeshPartitioner:
    """Returns the partitioner that distributes the model over all devices of all processes."""
    match kind:
        case "data":
            return jaxloop.DataParallelPartitioner(partition.create_mesh(data=-1), "data")
        case "fsdp":
            return jaxloop.FSDPPartitioner(partition.create_mesh(data=-1))
    mesh = partition.create_mesh(data=-1, model=model_devices)
    rules = [
        ("(query|key|value|up)/kernel", P(None, None, "model")),  # [depth, inputs, outputs]
        ("(out|down)/kernel", P(None, "model", None)),
        ("", P()),
    ]
    return jaxloop.RulesPartitioner(mesh, "data", rules)


def make_step(size: Size, partitioner: jaxloop.Partitioner, train_steps: int, accumulate: int, seed: int, train: bool):
    """Returns the step for training or, with `train=False`, for evaluation."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, size.learning_rate, max(train_steps // 20, 1), train_steps, size.learning_rate / 10
    )
    is_decayed = lambda path, _: "norm" not in jax.tree_util.keystr(path)
    decays = lambda params: jax.tree.map_with_path(is_decayed, params)
    return jaxloop.LossStep(
        jax.random.key(seed),
        Transformer,
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.1, mask=decays)),
        partitioner,
        train=train,
        nnx_model_args=(size,),
        loss=next_byte_loss,
        inputs=lambda batch: batch["tokens"][:, :-1],
        accumulate=accumulate if train else 1,
        compute_dtype=jnp.bfloat16,
    )


# The data ----------------------------------------------------------------------------------------------


def read_standard_library() -> np.ndarray:
    """Returns the concatenated source code of the standard library, with an `END_OF_FILE` byte after each file."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    left_out = {"test", "tests", "idlelib", "site-packages", "dist-packages", "lib2to3", "__pycache__"}
    files = [path for path in sorted(root.rglob("*.py")) if left_out.isdisjoint(path.relative_to(root).parts)]
    return np.frombuffer(b"".join(path.read_bytes() + bytes([END_OF_FILE]) for path in files), np.uint8)


def make_data(text: np.ndarray, size: Size, batch_size: int, seed: int):
    """Returns infinite train batches and four batches of held-out text, all with only this process's rows."""
    num_train = int(0.95 * len(text))

    # A batch depends only on its number, so a resumed run continues with exactly the next batch.
    def batch_of(number: int) -> jaxloop.Batch:
        starts = np.random.default_rng((seed, number)).integers(num_train - size.length, size=batch_size)
        return {"tokens": text[starts[:, None] + np.arange(size.length + 1)]}

    starts = np.linspace(num_train, len(text) - size.length - 1, 4 * batch_size, dtype=np.int64)
    held_out = [{"tokens": text[some[:, None] + np.arange(size.length + 1)]} for some in starts.reshape(4, batch_size)]
    return data.shard_for_process(data.from_index(batch_of)), data.shard_for_process(held_out)


# Text generation ---------------------------------------------------------------------------------------


class WriteStep(jaxloop.Step):
    """Continues texts of shape `[rows, length]` byte by byte after their first `begin` bytes."""

    def __init__(self, *args, num_bytes: int, **kwargs):
        super().__init__(*args, **kwargs)
        self._num_bytes = num_bytes

    def run(self, state, batch):
        def write_one(place, tokens):
            model = state.apply_fn(state.params, state.batch_stats, state.collections, train=False)
            logits = model(tokens)[0][:, place - 1]
            key = jax.random.fold_in(self.prng_key(state.step), place)
            chosen = jax.random.categorical(key, logits / 0.7)
            return jax.lax.dynamic_update_slice_in_dim(tokens, chosen[:, None], place, 1)

        tokens, begin = batch["tokens"].astype(jnp.int32), batch["begin"][0]
        return state, {"tokens": jax.lax.fori_loop(begin, begin + self._num_bytes, write_one, tokens)}


class WriteAction(jaxloop.Action):
    """Generates text with the model and prints it."""

    uses_outputs = False

    def __init__(self, step: WriteStep, size: Size, rows: int, interval=1):
        super().__init__(interval)
        begin = np.frombuffer(b"\ndef ", np.uint8)
        tokens = np.zeros([rows, size.length], np.uint8)
        tokens[:, : len(begin)] = begin
        self._step, self._batch = step, {"tokens": tokens, "begin": np.full(rows, len(begin), np.int32)}

    def __call__(self, state, outputs, *, step_num, **kwargs):
        # All processes take part in the computation, and the first one prints the result.
        outputs = self._step.evaluate(state, self._batch) or {}
        written = np.asarray(outputs["tokens"])[0]
        if is_first_process():
            text = bytes(written[written != END_OF_FILE].astype(np.uint8)).decode("ascii", errors="replace").strip()
            print(f"--- generated after {step_num} steps:\n{text}\n---", flush=True)


# The run -----------------------------------------------------------------------------------------------


def run(options) -> float:
    """Trains, starting from the newest checkpoint if there is one, and returns the loss on held-out text.

    Ctrl-C ends the program with exit code 130.
    """
    size = SIZES[options.size]
    batch_size, train_steps = options.batch_size or size.batch_size, options.train_steps or size.train_steps
    workdir = pathlib.Path(options.workdir)
    partitioner = make_partitioner(options.partitioner, options.model_devices)
    make = lambda train: make_step(size, partitioner, train_steps, options.accumulate, options.seed, train)
    train_step, eval_step = make(True), make(False)
    train_data, held_out = make_data(read_standard_library(), size, batch_size, options.seed)
    state = train_step.abstract_state() if options.check else train_step.initialize_model()
    if is_first_process():
        print(f"{options.size}, on {jax.device_count()} devices:\n{train_step.summary(state)}", flush=True)

    write_step = WriteStep(
        train_step.base_prng, Transformer, partitioner=partitioner, nnx_model_args=(size,), num_bytes=options.write
    )
    write_action = WriteAction(write_step, size, rows=partitioner.local_shards)
    writer = jaxloop.default_writer(workdir)
    when_to_save = jaxloop.every(steps=min(50, max(train_steps // 4, 1))) | jaxloop.last()
    when_to_evaluate = jaxloop.every(steps=max(train_steps // 3, 1)) | jaxloop.last()
    outer_loop = jaxloop.OuterLoop(
        jaxloop.TrainLoop(
            train_step,
            stat_loop.ALL_STATS,
            end_actions=[
                jaxloop.ProgressAction(),
                jaxloop.SummaryAction(writer, WHEN_TO_LOG),
                jaxloop.CheckpointAction(workdir / "checkpoints", when_to_save),
            ],
        ),
        [
            jaxloop.EvalLoop(
                eval_step,
                end_actions=[
                    jaxloop.SummaryAction(writer, prefix="eval/"),
                    *([write_action] if options.write else []),
                ],
            )
        ],
        jaxloop.CheckpointSpec(workdir / "checkpoints"),
        log_interval=WHEN_TO_LOG,
    )
    arguments = (state, train_data, train_steps, None, [jaxloop.EvalSpec(held_out, interval=when_to_evaluate)])
    if options.check:
        report = outer_loop.check(*arguments, topology=options.topology)
        sys.exit(f"{report}" if report.errors else print(report))
    state, outputs = outer_loop(*arguments)
    if jaxloop.STOP_LOOP in (outputs or {}):  # Stopped by Ctrl-C or a command.
        if is_first_process():
            print(f"Stopped at step {int(state.step)} of {train_steps}. Run the same command again to resume.")
        sys.exit(130)
    steps, losses = outer_loop.history.collect("steps", "eval.loss")
    step_num, loss = steps[-1], losses[-1]
    if is_first_process():
        speed = outer_loop.spent.steps_per_sec * batch_size * size.length
        bits = loss / np.log(2)
        print(f"held-out loss at step {step_num}: {loss:.4f} nats per byte ({bits:.3f} bits); {speed:,.0f} bytes/s")
        print(outer_loop.spent)
    return loss


def print_step_cost(options) -> None:
    """Compiles a step for `--devices` simulated devices and prints its cost."""
    size = SIZES[options.size]
    batch_size = options.batch_size or size.batch_size
    partitioner = make_partitioner(options.partitioner, options.model_devices)
    step = make_step(size, partitioner, size.train_steps, options.accumulate, options.seed, train=True)
    state, batch = step.abstract_state(), {"tokens": jax.ShapeDtypeStruct([batch_size, size.length + 1], np.uint8)}
    layout, began = partitioner.report(state), time.perf_counter()
    cost = check.cost_analysis(step, state, batch)
    memory = f"{readable(cost.peak_bytes)}, including {readable(cost.temp_bytes)} of temporaries (on a CPU)"
    num_tokens = batch_size * size.length
    micro_batches = "1 micro-batch" if options.accumulate == 1 else f"{options.accumulate} micro-batches"
    table = {
        "model": f"{options.size}: {sum(leaf.size for leaf in jax.tree.leaves(state.params)):,} parameters",
        "layout": f"{options.partitioner}, mesh {dict(partitioner.mesh.shape)}",
        "batch": f"{batch_size} x {size.length} bytes, in {micro_batches}",
        "state per device": f"{readable(layout.bytes_per_device)} of {readable(layout.bytes)}",
        "memory per device": memory,
        "FLOPs per step": f"{cost.flops:.3g}, {cost.flops / num_tokens:.3g} per byte of text",
    }
    print("\n".join(f"{name:<26}{value}" for name, value in table.items()))
    print(f"Compiled in {time.perf_counter() - began:.0f} s, without running a step or allocating the state.")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"This program takes flags only, got {' '.join(argv[1:])!r}.")
    options = flags.FLAGS
    if options.dry_run:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", options.devices or 1)
        return print_step_cost(options)
    distributed.initialize()  # Joins the other processes, if there are any.
    try:
        run(options)
    except KeyboardInterrupt:  # Ctrl-C before the first step.
        if is_first_process():
            print("Interrupted. Run the same command again to resume from the newest checkpoint.")
        sys.exit(130)


if __name__ == "__main__":
    flags.DEFINE_string("workdir", "runs/transformer", "The directory for checkpoints and TensorBoard events.")
    flags.DEFINE_enum("size", "tiny", list(SIZES), "The size of the model.")
    flags.DEFINE_enum("partitioner", "fsdp", ["data", "fsdp", "tensor"], "The layout of the model over the devices.")
    flags.DEFINE_integer("model_devices", 2, "Devices per layer with --partitioner=tensor.", lower_bound=1)
    flags.DEFINE_integer("batch_size", None, "Rows per batch, over all processes; the default depends on --size.")
    flags.DEFINE_integer(
        "train_steps", None, "Total optimizer updates, resumed ones included; the default depends on --size."
    )
    flags.DEFINE_integer("accumulate", 1, "Micro-batches per batch.", lower_bound=1)
    flags.DEFINE_integer("write", 100, "Bytes of text to generate at each evaluation.", lower_bound=0)
    flags.DEFINE_integer("seed", 0, "The seed for the parameters and the batches.")
    flags.DEFINE_bool("check", False, "Print the plan of the run and its problems, without training.")
    flags.DEFINE_string("topology", None, 'TPUs to compile for with --check, such as "v5e:2x4".')
    flags.DEFINE_bool("dry_run", False, "Compile a step and print its cost, without training.")
    flags.DEFINE_integer("devices", None, "The number of devices for --dry_run.", lower_bound=1)
    # Log lines below warnings would break up the progress bar; --verbosity=0 shows them.
    app.run(main, argv=[sys.argv[0], "--verbosity=-1", *sys.argv[1:]])
