"""The loops that train a workload, each written as its users would write it.

A contestant is a function that receives a workload, does the one-time setup, and returns `train(num_steps)`. Each call
to `train` makes a new state, trains it, waits for the devices, and returns the seconds per step and the final
parameters. The measured time begins after the state is made, and includes the loop's own startup and cleanup.
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
    """Raised by a contestant that can't run a workload, with the reason."""


class Trained(NamedTuple):
    """The result of `train`: elapsed time and CPU time (of all threads) per step, and the parameters."""

    secs_per_step: float
    cpu_secs_per_step: float
    params: Any


class Watch:
    """Measures the time since it was created."""

    def __init__(self):
        self._start, self._cpu_start = time.perf_counter(), time.process_time()

    def trained(self, num_steps: int, params: Any) -> Trained:
        """Returns the result for steps that have just ended with these parameters."""
        seconds, cpu_seconds = time.perf_counter() - self._start, time.process_time() - self._cpu_start
        return Trained(seconds / num_steps, cpu_seconds / num_steps, params)


Train = Callable[[int], Trained]
Contestant = Callable[[Workload], Train]


class Terminal(io.StringIO):
    """A simulated terminal for progress bars."""

    def isatty(self):
        return True


# By hand ---------------------------------------------------------------------------------------------


def flax_state(workload: Workload) -> train_state.TrainState:
    state = train_state.TrainState.create(
        apply_fn=workload.model.apply, params=workload.new_params(), tx=workload.optimizer
    )
    # With a Python number as the step, the train step would be compiled twice.
    return jax.block_until_ready(jax.device_put(state.replace(step=jnp.int32(0)), _replicated(workload)))


def hand_written_loop(workload: Workload) -> Train:
    """The minimal loop: it keeps no outputs, and reads nothing before the end."""
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


def hand_written_loop_keeping_losses(workload: Workload) -> Train:
    """The minimal loop, plus a loss curve: it keeps the loss of each step, and reads them all at the end."""
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


def hand_written_loop_with_logs(workload: Workload) -> Train:
    """The minimal loop, plus a progress line, a TensorBoard event and a history row every 100 steps."""
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
    """Stacks 32 batches on the host and scans over them in one dispatch."""
    if not workload.scans:
        raise Absent("On a CPU, XLA is ten times slower at convolutions inside a scan.")
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
    """Returns a function that puts batches on the devices. With one device, the jitted call is faster at that."""
    if workload.num_devices == 1:
        return lambda batch: batch
    sharding = NamedSharding(_mesh(workload), spec)
    return lambda batch: jax.device_put(batch, sharding)


def clu_style_loop(workload: Workload) -> Train:
    """Merges the metrics of each step into a collection and reads it every 100 steps, as in the examples of clu."""

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
    """Runs the same step function as the hand-written loops."""

    def __init__(self, workload: Workload, **options: Any):
        super().__init__(jax.random.key(0), workload.model, workload.optimizer, train=True, **options)
        self.workload = workload

    def run(self, state, batch):
        return self.workload.train_step(state, batch)


def new_state(workload: Workload, step: jaxloop.Step) -> jaxloop.TrainState:
    state = jaxloop.TrainState.create(
        apply_fn=workload.model.apply, params=workload.new_params(), tx=workload.optimizer
    )
    return jax.block_until_ready(step.partitioner.place_state(state))


def data_parallel(mesh: jax.sharding.Mesh) -> jaxloop.Partitioner:
    return jaxloop.DataParallelPartitioner(mesh, "data")


def fsdp(mesh: jax.sharding.Mesh) -> jaxloop.Partitioner:
    return jaxloop.FSDPPartitioner(mesh)


def make_step(workload: Workload, layout: Callable[[Any], jaxloop.Partitioner] | None) -> WorkloadStep:
    return WorkloadStep(workload) if layout is None else WorkloadStep(workload, partitioner=layout(_mesh(workload)))


def train_loop(layout: Callable[[Any], jaxloop.Partitioner] | None = None, **options: Any) -> Contestant:
    """Returns a contestant that calls a `TrainLoop` with options. The loop returns all losses, on the host."""

    def contestant(workload):
        if options.get("steps_per_dispatch") == SCAN_LENGTH and not workload.scans:
            raise Absent("On a CPU, XLA is ten times slower at convolutions inside a scan.")
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


def train_loop_with_logs(workload: Workload) -> Train:
    """An `OuterLoop` with a progress bar, and with TensorBoard summaries and history rows every 100 steps."""
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
    """The functional loop: a compiled function for each step, whose loss goes into the history."""

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


class TimedPasses:
    """Two passes over a workload's batches, with half of the steps each, timed from the start of the second one.

    Use it for contestants that compile at the start of each call: the first pass then includes the compilation.
    """

    num_passes = 2

    def __init__(self, workload: Workload, num_steps: int):
        self._batches = workload.batches()
        self._pass_length = num_steps // self.num_passes
        self._passes_started = 0
        self._watch = Watch()

    def __call__(self):
        self._passes_started += 1
        if self._passes_started == 2:
            self._watch = Watch()
        return itertools.islice(self._batches, self._pass_length)

    def trained(self, params: Any) -> Trained:
        """Returns the result for the steps of the second pass, which has just ended with these parameters."""
        return self._watch.trained(self._pass_length * (self.num_passes - 1), params)


def fit(workload: Workload) -> Train:
    """One call to `jaxloop.fit` without a progress bar: two epochs. The first one, which compiles, doesn't count."""

    def train(num_steps):
        passes = TimedPasses(workload, num_steps)
        state, _ = jaxloop.fit(
            workload.model,  # The same seed gives it the same initial parameters.
            passes,
            loss=cross_entropy,
            optimizer=workload.optimizer,
            train_epochs=passes.num_passes,
            progress=None,
        )
        jax.block_until_ready(state)
        return passes.trained(state.params)

    return train
