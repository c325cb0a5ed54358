"""Tests of compiling for TPUs that the machine doesn't have. Some are skipped if libtpu is not installed."""

import importlib.util

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import NamedSharding, PartitionSpec
from programs import tiny
from programs.models import squares

import jaxloop
from jaxloop import check, partition
from jaxloop.check import costs, topology
from jaxloop.check.costs import moved_to
from jaxloop.partition import create_mesh
from jaxloop.step import cost

pytestmark = pytest.mark.usefixtures("compile_fast")

needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
BATCH = {"x": jax.ShapeDtypeStruct((16, 256), np.float32), "y": jax.ShapeDtypeStruct((16, 1), np.float32)}
OPTIMIZER = optax.sgd(1e-3, momentum=0.9)


class Network(nn.Module):
    width: int = 512
    annotated: bool = False

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.lecun_normal()
        init = nn.with_partitioning(init, (None, "data")) if self.annotated else init
        hidden = nn.relu(nn.Dense(self.width, kernel_init=init, name="hidden")(x))
        return nn.Dense(1, name="last")(hidden)


def new_step(partitioner=None, **options):
    partitioner = partitioner or jaxloop.SingleDevicePartitioner()
    return tiny.make_step(jaxloop.LossStep, Network(**options), OPTIMIZER, partitioner=partitioner, loss=squares)


PARTITIONERS = {
    "single": lambda: jaxloop.SingleDevicePartitioner(),
    "data": lambda: jaxloop.DataParallelPartitioner(create_mesh(data=-1), "data"),
    "fsdp": lambda: jaxloop.FSDPPartitioner(create_mesh(data=-1)),
    "rules": lambda: jaxloop.RulesPartitioner(
        create_mesh(data=-1, model=2), "data", [("hidden/kernel", PartitionSpec(None, "model"))]
    ),
    "spmd": lambda: jaxloop.partition.SPMDPartitioner(create_mesh(data=-1), "data"),
    "explicit": lambda: jaxloop.ExplicitPartitioner(jax.make_mesh((len(jax.devices()),), ("data",)), "data"),
}


@pytest.mark.parametrize("name", PARTITIONERS)
def test_a_moved_partitioner_keeps_its_layout(name):
    partitioner = PARTITIONERS[name]()
    step = new_step(partitioner, annotated=name == "spmd")
    shapes = step.abstract_state([1, 256])
    devices = jax.devices()[:4]
    moved = moved_to(step, devices)
    layout = moved.partitioner.layout_of(shapes)
    kernel = layout.params["hidden"]["kernel"]
    assert kernel.sharding.device_set <= set(devices)
    split = {"fsdp": 4, "spmd": 4, "rules": 2}.get(name, 1)
    assert np.prod(kernel.sharding.shard_shape(kernel.shape)) == 256 * 512 // split
    assert moved.partitioner.shards == {"single": 1, "rules": 2}.get(name, 4)
    found = check.cost_analysis(moved, layout, BATCH)
    assert found.argument_bytes > 0
    assert step.partitioner is partitioner
    if name == "rules":
        with pytest.raises(ValueError, match="does not fit 3 devices"):
            partitioner.moved_to(jax.devices()[:3])


def test_a_custom_partitioner_without_moved_to_raises():
    class Mine(jaxloop.SingleDevicePartitioner):
        moved_to = partition.Partitioner.moved_to

    with pytest.raises(NotImplementedError, match=r"Mine needs moved_to\(devices\)"):
        Mine().moved_to(jax.devices())


def test_without_libtpu_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    step, train = new_step(), [{"x": np.zeros([16, 256], np.float32), "y": np.zeros([16, 1], np.float32)}]
    report = jaxloop.OuterLoop(jaxloop.TrainLoop(step)).check(step.abstract_state([1, 256]), train, topology="v5e:2x4")
    (problem,) = report.problems
    assert problem.is_error and "on this machine, run: pip install libtpu" in problem.text


@pytest.mark.parametrize("name", ["v5e", 8])
def test_an_invalid_topology_name_raises(name):
    with pytest.raises(ValueError, match='such as "v5e:16x16"'):
        topology.devices_of(name)


def test_out_of_memory_errors_of_the_compiler_are_parsed():
    class Lowered:
        def compile(self):
            raise jax.errors.JaxRuntimeError(self.text)

    lowered = Lowered()
    lowered.text = (
        "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
        "temporaries (32.50G) exceeds available HBM (15.75G). HLO module: jit_f."
    )
    with pytest.raises(cost.DeviceMemoryError, match=r"needs 32\.5 GiB .* 15\.8 GiB are available") as caught:
        cost.compiled(lowered)
    assert (caught.value.needed_bytes, caught.value.available_bytes) == (int(32.5 * 2**30), int(15.75 * 2**30))
    lowered.text = "INTERNAL: something else"
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        cost.compiled(lowered)


def test_largest_batch_raises_if_the_memory_is_unknown():
    step = new_step()
    with pytest.raises(ValueError, match="The memory of cpu is unknown"):
        check.largest_batch(step, step.abstract_state([1, 256]), BATCH)
    with pytest.raises(ValueError, match="The memory of cpu is unknown"):
        check.largest_ensemble(lambda number: (step, step.abstract_state([1, 256])), BATCH)


def test_the_largest_batch_and_ensemble_fit_in_memory(monkeypatch, warnings_logged):
    memory = 2**21
    monkeypatch.setattr(costs, "memory_of", lambda device: memory)
    step = new_step(width=8)
    shapes = step.abstract_state([1, 256])
    rows_of = lambda rows: {"x": ((rows, 256), np.float32), "y": ((rows, 1), np.float32)}
    rows = check.largest_batch(step, shapes, rows_of(1))
    fits = lambda *args: check.cost_analysis(*args).peak_bytes <= memory
    assert rows > 2**9 and fits(step, shapes, rows_of(rows)) and not fits(step, shapes, rows_of(rows + 1))

    def make(number):
        ensemble = jaxloop.Ensemble(step, seeds=range(number))
        return ensemble, ensemble.abstract_state([1, 256])

    members = check.largest_ensemble(make, rows_of(8))
    assert members > 4 and fits(*make(members), rows_of(8)) and not fits(*make(members + 1), rows_of(8))
    assert not warnings_logged()


# With libtpu ----------------------------------------------------------------------------------------------


@needs_libtpu
def test_costs_match_xlas_memory_analysis():
    step = tiny.make_step(model=Network(), optimizer=OPTIMIZER, partitioner=PARTITIONERS["data"]())
    shapes = step.abstract_state([1, 256])
    found = check.cost_analysis(step, shapes, BATCH, topology="v5e:2x4")

    mesh = create_mesh(devices=topology.devices_of("v5e:2x4"), data=8)
    place = lambda tree, spec: jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)), tree
    )

    arguments = place(shapes, PartitionSpec()), place(BATCH, PartitionSpec("data"))
    analysis = jax.jit(step.run, donate_argnums=0).lower(*arguments).compile().memory_analysis()
    assert found.argument_bytes == analysis.argument_size_in_bytes
    assert found.temp_bytes == analysis.temp_size_in_bytes
    assert found.output_bytes == analysis.output_size_in_bytes
    assert abs(found.alias_bytes - analysis.alias_size_in_bytes) <= 1024  # One scalar is a tile of 512 bytes.
    assert found.flops > 4 * 16 * 256 * 512


@needs_libtpu
@pytest.mark.parametrize("name", PARTITIONERS)
def test_each_partitioner_compiles_for_tpus(name):
    step = new_step(PARTITIONERS[name](), annotated=name == "spmd")
    found = check.cost_analysis(step, step.abstract_state([1, 256]), BATCH, topology="v5e:2x4")
    assert found.peak_bytes > 0


@needs_libtpu
def test_largest_ensemble_is_the_largest_that_fits():
    batch = {"x": ((8, 256), np.float32), "y": ((8, 1), np.float32)}

    def make(number):
        ensemble = jaxloop.Ensemble(new_step(width=2**20), seeds=range(number))  # A member takes at least 2 GiB.
        return ensemble, ensemble.abstract_state([1, 256])

    most = check.largest_ensemble(make, batch, topology="v5e:1x1")
    assert 2 <= most <= 7
    memory = topology.memory_of(topology.devices_of("v5e:1x1")[0])
    assert check.cost_analysis(*make(most), batch, topology="v5e:1x1").peak_bytes <= memory
    with pytest.raises(cost.DeviceMemoryError):
        check.cost_analysis(*make(most + 1), batch, topology="v5e:1x1")


@needs_libtpu
def test_largest_batch_is_the_largest_that_fits():
    step = new_step(width=2**22)  # A row takes 16 MiB for each activation.
    shapes = step.abstract_state([1, 2])
    batch = lambda rows: {"x": ((rows, 2), np.float32), "y": ((rows, 1), np.float32)}
    most = check.largest_batch(step, shapes, batch(1), topology="v5e:1x1")

    def fits(rows):
        try:
            found = check.cost_analysis(step, shapes, batch(rows), topology="v5e:1x1")
            return found.peak_bytes <= topology.memory_of(topology.devices_of("v5e:1x1")[0])
        except cost.DeviceMemoryError:
            return False

    assert most > 8 and all(map(fits, (1, most // 2, most - 1))) and not any(map(fits, (most + 2, 2 * most)))

    def run_check(rows):
        data = jaxloop.from_index(lambda _: {name: np.zeros(*leaf) for name, leaf in batch(rows).items()})
        return jaxloop.OuterLoop(jaxloop.TrainLoop(step)).check(shapes, data, 10, topology="v5e:1x1")

    assert run_check(most).ok
    (problem,) = run_check(most + 1).problems
    assert problem.is_error and "of 15.8 GiB per device" in problem.text
    assert "jaxloop.check.largest_batch(step, state, batch, 'v5e:1x1')" in problem.text
