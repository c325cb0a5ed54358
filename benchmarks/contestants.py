"""Who trains a workload: loops, each written as its users write it.

A contestant is a function of a workload that does what a program does once, and returns a function `train(num_steps)`.
That makes a fresh state, trains, waits for the devices, and returns the seconds a step took and the parameters that
came out. The state is made before the clock starts; what a loop does at its begin and end counts.
"""

import io
import itertools
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import flax
import jax
import jax.numpy as jnp
import numpy as np
from clu import metrics as clu_metrics
from flax.training import train_state
from jax.sharding import NamedSharding, PartitionSpec

import jaxloop
from benchmarks.workloads import Workload, cross_entropy
from jaxloop import functional as jf

SCAN_LENGTH = 32
LOG_EVERY = 100


class Absent(Exception):
    """A contestant does not take part, and why."""


class Trained(NamedTuple):
    """What `train` returns: seconds a step, of CPU time too (of all threads of the process), and the parameters."""

    secs_per_step: float
    cpu_secs_per_step: float
    params: Any


class Watch:
    """Counts the time from when it is made."""

    def __init__(self):
        self._start, self._cpu_start = time.perf_counter(), time.process_time()

    def trained(self, num_steps: int, params: Any) -> Trained:
        """What so many steps took up to now, of which these parameters came."""
        seconds, cpu_seconds = time.perf_counter() - self._start, time.process_time() - self._cpu_start
        return Trained(seconds / num_steps, cpu_seconds / num_steps, params)


Train = Callable[[int], Trained]
Contestant = Callable[[Workload], Train]


class Terminal(io.StringIO):
    """Where a bar is drawn as on a terminal."""

    def isatty(self):
        return True


# By hand ---------------------------------------------------------------------------------------------


def flax_state(workload: Workload) -> train_state.TrainState:
    state = train_state.TrainState.create(
        apply_fn=workload.model.apply, params=workload.new_params(), tx=workload.optimizer
    )
    # With a Python number for the step, the first call would compile a second time.
    return jax.block_until_ready(jax.device_put(state.replace(step=jnp.int32(0)), _replicated(workload)))


def hand_written_loop(workload: Workload) -> Train:
    """The least that trains. It keeps no outputs, and looks at nothing before the end."""
    step = jax.jit(workload.train_step, donate_argnums=0)
    place = _placing(workload, PartitionSpec("data"))

    def train(num_steps):
        state, batches = flax_state(workload), workload.batches()
        watch = Watch()
        for batch in itertools.islice(batches, num_steps):
            state, outputs = step(state, place(batch))
        jax.block_until_ready((state, outputs))
        return watch.trained(num_steps, state.params)

    return train


def hand_written_loop_that_keeps_losses(workload: Workload) -> Train:
    """The same, for who wants to see a curve: it keeps the loss of each step, and reads them all at the end."""
    step = jax.jit(workload.train_step, donate_argnums=0)

    def train(num_steps):
        state, batches, losses = flax_state(workload), workload.batches(), []
        watch = Watch()
        for batch in itertools.islice(batches, num_steps):
            state, outputs = step(state, batch)
            losses.append(outputs["loss"])
        losses = jax.device_get(losses)
        jax.block_until_ready(state)
        return watch.trained(num_steps, state.params)

    return train


def hand_written_loop_with_all(workload: Workload) -> Train:
    """The same with what an experiment has: every 100 steps a line as of a bar, a TensorBoard event, and a row."""
    import tensorboardX

    step = jax.jit(workload.train_step, donate_argnums=0)

    def train(num_steps):
        state, batches, losses, history, bar = flax_state(workload), workload.batches(), [], [], Terminal()
        with tempfile.TemporaryDirectory() as workdir, tensorboardX.SummaryWriter(workdir) as writer:
            watch, start = Watch(), time.perf_counter()
            last = start
            for number, batch in enumerate(itertools.islice(batches, num_steps), start=1):
                state, outputs = step(state, batch)
                losses.append(outputs["loss"])
                if number % LOG_EVERY == 0:
                    loss, losses = float(np.mean(jax.device_get(losses))), []
                    now = time.perf_counter()
                    speed, last = LOG_EVERY / (now - last), now
                    bar.write(f"\r{number}/{num_steps} loss {loss:.3f}, {speed:.0f} steps/s")
                    writer.add_scalar("loss", loss, number)
                    writer.add_scalar("steps_per_sec", speed, number)
                    history.append((number, now - start, loss))
            jax.block_until_ready(state)
            trained = watch.trained(num_steps, state.params)
        return trained

    return train


def hand_written_scan(workload: Workload) -> Train:
    """Stacks 32 batches on the host, and scans over them in one dispatch."""
    if not workload.scans:
        raise Absent("XLA is ten times slower at convolutions inside a scan on a CPU.")
    steps = jax.jit(lambda state, batches: jax.lax.scan(workload.train_step, state, batches), donate_argnums=0)
    place = _placing(workload, PartitionSpec(None, "data"))

    def train(num_steps):
        state, batches = flax_state(workload), workload.batches()
        watch = Watch()
        for _ in range(num_steps // SCAN_LENGTH):
            group = list(itertools.islice(batches, SCAN_LENGTH))
            state, outputs = steps(state, place(jax.tree.map(lambda *leaves: np.stack(leaves), *group)))
        jax.block_until_ready((state, outputs))
        return watch.trained(num_steps, state.params)

    return train


def _mesh(workload: Workload) -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(jax.devices()[: workload.num_devices]), ("data",))


def _replicated(workload: Workload) -> Any:
    return None if workload.num_devices == 1 else NamedSharding(_mesh(workload), PartitionSpec())


def _placing(workload: Workload, spec: PartitionSpec) -> Callable[[Any], Any]:
    """Puts host batches on the devices. On a single one the jitted call does, which is faster."""
    if workload.num_devices == 1:
        return lambda batch: batch
    sharding = NamedSharding(_mesh(workload), spec)
    return lambda batch: jax.device_put(batch, sharding)


def clu_style_loop(workload: Workload) -> Train:
    """As the examples of clu: the metrics of each step are merged into a collection, read every 100 steps."""

    @flax.struct.dataclass
    class TrainMetrics(clu_metrics.Collection):
        loss: clu_metrics.Average.from_output("loss")

    def train_step(state, batch):
        state, outputs = workload.train_step(state, batch)
        return state, TrainMetrics.single_from_model_output(loss=outputs["loss"])

    step = jax.jit(train_step, donate_argnums=0)

    def train(num_steps):
        state, batches = flax_state(workload), workload.batches()
        watch = Watch()
        train_metrics = None
        for number, batch in enumerate(itertools.islice(batches, num_steps), start=1):
            state, update = step(state, batch)
            train_metrics = update if train_metrics is None else train_metrics.merge(update)
            if number % LOG_EVERY == 0 or number == num_steps:
                train_metrics.compute()
                train_metrics = None
        jax.block_until_ready(state)
        return watch.trained(num_steps, state.params)

    return train


# jaxloop ---------------------------------------------------------------------------------------------


class WorkloadStep(jaxloop.Step):
    """Repeats the function that the loops by hand repeat."""

    def __init__(self, workload: Workload, **options: Any):
        super().__init__(jax.random.key(0), workload.model, workload.optimizer, train=True, **options)
        self.workload = workload

    def run(self, state, batch):
        return self.workload.train_step(state, batch)


def new_state(workload: Workload, step: jaxloop.Step) -> jaxloop.TrainState:
    state = jaxloop.TrainState.create(
        apply_fn=workload.model.apply, params=workload.new_params(), tx=workload.optimizer
    )
    return jax.block_until_ready(step.prepare_state(state))


def data_parallel(mesh: jax.sharding.Mesh) -> jaxloop.Partitioner:
    return jaxloop.DataParallelPartitioner(mesh, "data")


def fsdp(mesh: jax.sharding.Mesh) -> jaxloop.Partitioner:
    return jaxloop.FSDPPartitioner(mesh)


def make_step(workload: Workload, layout: Callable[[Any], jaxloop.Partitioner] | None) -> WorkloadStep:
    return WorkloadStep(workload) if layout is None else WorkloadStep(workload, partitioner=layout(_mesh(workload)))


def train_loop(layout: Callable[[Any], jaxloop.Partitioner] | None = None, **options: Any) -> Contestant:
    """A `TrainLoop` with options. What it returns are the losses of all steps, on the host."""

    def contestant(workload):
        if options.get("steps_per_dispatch") == SCAN_LENGTH and not workload.scans:
            raise Absent("XLA is ten times slower at convolutions inside a scan on a CPU.")
        step = make_step(workload, layout)
        loop = jaxloop.TrainLoop(step, **options)

        def train(num_steps):
            state, batches = new_state(workload, step), workload.batches()
            watch = Watch()
            state, _ = loop(state, batches, num_steps)
            jax.block_until_ready(state)
            return watch.trained(num_steps, state.params)

        return train

    return contestant


def train_loop_with_all(workload: Workload) -> Train:
    """What an experiment has: a bar, summaries in TensorBoard files and a history; the last two every 100 steps."""
    step, when = WorkloadStep(workload), jaxloop.every(steps=LOG_EVERY)

    def train(num_steps):
        state, batches = new_state(workload, step), workload.batches()
        with tempfile.TemporaryDirectory() as workdir:
            writer = jaxloop.default_writer(workdir)
            actions = [jaxloop.ProgressAction(stream=Terminal()), jaxloop.SummaryAction(writer, when)]
            outer_loop = jaxloop.OuterLoop(jaxloop.TrainLoop(step, end_actions=actions), log_interval=when)
            watch = Watch()
            state, _ = outer_loop(state, batches, num_steps, log_train_total_steps=False)
            jax.block_until_ready(state)
            trained = watch.trained(num_steps, state.params)
            writer.close()
        return trained

    return train


def functional_loop(workload: Workload) -> Train:
    """The loop language: a compiled function at each step, whose loss goes to the history."""

    def with_logs(state, batch):
        state, outputs = workload.train_step(state, batch)
        return jf.logs().add_loss("loss", outputs["loss"]), state

    step = jax.jit(with_logs, donate_argnums=0)

    def train(num_steps):
        state, batches = flax_state(workload), workload.batches()
        watch = Watch()
        state, _, _ = jf.loop(state, batches, {jf.every(1): [step]}, stop=num_steps)
        jax.block_until_ready(state)
        return watch.trained(num_steps, state.params)

    return train


class PassesWithStart:
    """Two passes over a workload's batches, half of the steps each; notes when the second one began.

    For what compiles at the start of each call: that is in the first pass, and the clock starts with the second.
    """

    num_passes = 2

    def __init__(self, workload: Workload, num_steps: int):
        self._batches = workload.batches()
        self._pass_length = num_steps // self.num_passes
        self._begun = 0
        self._watch = Watch()

    def __call__(self):
        self._begun += 1
        if self._begun == 2:
            self._watch = Watch()
        return itertools.islice(self._batches, self._pass_length)

    def trained(self, params: Any) -> Trained:
        """What the steps took from the start of the second pass to now, of which these parameters came."""
        return self._watch.trained(self._pass_length * (self.num_passes - 1), params)


def fit(workload: Workload) -> Train:
    """One call, without a bar; two epochs, of which the first, where it compiles, does not count."""

    def train(num_steps):
        passes = PassesWithStart(workload, num_steps)
        state, _ = jaxloop.fit(
            workload.model,  # Whose first parameters are those of the others: the seed is the same.
            passes,
            loss=cross_entropy,
            optimizer=workload.optimizer,
            num_epochs=passes.num_passes,
            progress=None,
        )
        jax.block_until_ready(state)
        return passes.trained(state.params)

    return train
