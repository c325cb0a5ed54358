"""Training gives the same results in every layout of the state."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec as P
from programs.acts import saving
from programs.models import Network, squares
from programs.tiny import BATCHES

import jaxloop
from jaxloop import partition
from jaxloop.models.loss_step import LossStep

KEY = jax.random.key(0)
pytestmark = pytest.mark.usefixtures("compile_fast")
RULES = [("Dense_0/kernel", P(None, "model")), ("Dense_0/bias", P("model")), ("Dense_1/kernel", P("model", "data"))]


@pytest.fixture(autouse=True, scope="module")
def standard_promotion():
    with jax.numpy_dtype_promotion("standard"):  # Adam needs it.
        yield


def loss(outputs, batch):
    return optax.softmax_cross_entropy(outputs, jax.nn.one_hot(batch["label"], 32))


def batches(count, rows=16):
    x = np.random.default_rng(0).normal(size=[count, rows, 24]).astype(np.float32)
    labels = np.random.default_rng(1).integers(32, size=[count, rows], dtype=np.int32)
    return [{"x": x[number], "label": labels[number]} for number in range(count)]


def new_step(partitioner):
    return LossStep(KEY, Network(outputs=32, rate=0.5), optax.adam(1e-2), partitioner, train=True, loss=loss)


def trained(partitioner, count=10):
    step = new_step(partitioner)
    state, outputs = jaxloop.TrainLoop(step)(step.initialize_model([1, 24]), batches(count))
    return state, outputs["loss"]


def mesh_of(shape):
    return partition.create_mesh(data=shape[0], model=shape[1])


MAKE = {
    "data parallel": lambda mesh: partition.DataParallelPartitioner(mesh, "data"),
    "FSDP": lambda mesh: partition.FSDPPartitioner(mesh, min_size=1),
    "FSDP over the other axis": lambda mesh: partition.FSDPPartitioner(mesh, "model", min_size=1),
    "rules": lambda mesh: partition.RulesPartitioner(mesh, "data", RULES),
}


@pytest.fixture(scope="module")
def on_one_device():
    return trained(partition.SingleDevicePartitioner())


@pytest.mark.parametrize("kind", MAKE)
def test_training_is_the_same_in_every_layout(kind, on_one_device, assert_close):
    """Includes the dropout masks, which affect every loss."""
    state, losses = trained(MAKE[kind](mesh_of((8, 1) if kind in ("data parallel", "FSDP") else (4, 2))))
    np.testing.assert_allclose(losses, on_one_device[1], rtol=1e-5)
    assert_close(state.params, on_one_device[0].params, atol=1e-4)


# FSDP ------------------------------------------------------------------------------------------------


def test_fsdp_shards_the_state_over_all_devices():
    partitioner = partition.FSDPPartitioner(partition.create_mesh(data=8), min_size=64)
    state, _ = trained(partitioner, count=2)
    assert state.params["Dense_0"]["kernel"].sharding.spec == P(None, "data")  # [24, 64]
    assert state.params["Dense_1"]["kernel"].sharding.spec == P("data")  # [64, 32]
    assert state.opt_state[0].mu["Dense_1"]["kernel"].sharding.spec == P("data")
    assert state.params["Dense_1"]["bias"].sharding.spec == P()  # It has only 32 numbers.
    # Split: parameters and both Adam moments. Replicated: the small bias, three times, and two counts.
    split, whole = 3 * 4 * (24 * 64 + 64 + 64 * 32), 3 * 4 * 32 + 2 * 4
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state))
    assert held == split // 8 + whole
    layout = partitioner.report(state)
    assert (layout.bytes_per_device, layout.bytes) == (held, split + whole)


def test_fsdp_splits_the_largest_divisible_axis():
    partitioner = partition.FSDPPartitioner(partition.create_mesh(data=8), min_size=8)
    shapes = {"last": (64, 128), "first of two": (128, 128), "none": (12, 100), "only": (4, 1000), "small": (4,)}
    specs = {"last": P(None, "data"), "first of two": P("data"), "none": P(), "only": P(None, "data"), "small": P()}
    state = partitioner.place_state({name: np.zeros(shape, np.float32) for name, shape in shapes.items()})
    assert {name: leaf.sharding.spec for name, leaf in state.items()} == specs
    assert {name: sharding.spec for name, sharding in partitioner.sharding.items()} == specs


def test_a_checkpoint_can_be_resumed_in_a_different_layout(tmp_path, assert_close):
    on_one = lambda mesh: partition.SingleDevicePartitioner()
    for total, make in ((5, MAKE["FSDP"]), (10, MAKE["rules"]), (15, on_one)):
        step = new_step(make(mesh_of((4, 2))))
        state = step.initialize_model([1, 24])
        state, _ = saving(tmp_path, jaxloop.every(steps=5), step)(state, batches(20), total)
        assert int(state.step) == total == jaxloop.checkpoint.all_steps(tmp_path)[-1]
    state_at_once, _ = trained(partition.SingleDevicePartitioner(), count=15)
    assert_close(state.params, state_at_once.params, atol=1e-5)


# Rules -----------------------------------------------------------------------------------------------


def test_the_first_matching_rule_also_applies_to_the_optimizer_state():
    partitioner = partition.RulesPartitioner(
        mesh_of((4, 2)), "data", [*RULES, (r"bias$", P()), ("Dense", P("data")), ("", None)]
    )
    state = new_step(partitioner).initialize_model([1, 24])
    for params in (state.params, state.opt_state[0].mu):
        assert params["Dense_0"]["kernel"].sharding.spec == P(None, "model")
        assert params["Dense_1"]["kernel"].sharding.spec == P("model", "data")
        assert params["Dense_1"]["bias"].sharding.spec == P()


def test_unused_rules_cause_warnings(warnings_logged):
    partitioner = partition.RulesPartitioner(mesh_of((4, 2)), "data", [("attention/.*/kernel", P(None, "model"))])
    state = {"params": {"embedding": np.zeros([128, 64], np.float32), "bias": np.zeros(3, np.float32)}}
    partitioner.place_state(state)
    assert warnings_logged() == ["The rule ('attention/.*/kernel', P(None, 'model')) matches no leaf of the state."]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (P("data"), r"params/w, float32\[6, 64\]: it has too few axes, or one that can't be divided evenly"),
        (P(("data", "model")), "among the devices of {'data': 4, 'model': 2}"),
        (P(None, None, "data"), "too few axes"),
        (P("tensor"), "axis: tensor of .* is not found in mesh"),
    ],
    ids=str,
)
def test_a_rule_that_cannot_be_applied_raises(spec, message):
    with pytest.raises(ValueError, match=message):
        partitioner = partition.RulesPartitioner(mesh_of((4, 2)), "data", [("w", spec)])
        partitioner.place_state({"params": {"w": np.zeros([6, 64], np.float32)}})


# Logical axes ----------------------------------------------------------------------------------------


class LinenLogical(nn.Module):
    """Names its logical axes, which rules map to mesh axes."""

    @nn.compact
    def __call__(self, x):
        init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "hidden"))
        x = nn.with_logical_constraint(nn.relu(nn.Dense(16, kernel_init=init)(x)), (None, "hidden"))
        return nn.Dense(1)(x)


class NNXLogical(nnx.Module):
    def __init__(self, *, rngs):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "hidden"))
        self.up, self.down = nnx.Linear(3, 16, kernel_init=init, rngs=rngs), nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def logical_step(kind, rules, shape=(4, 2)):
    partitioner = partition.SPMDPartitioner(mesh_of(shape), "data", logical_axis_rules=rules)
    model, options = (LinenLogical(), {}) if kind == "Linen" else (NNXLogical, {"nnx_model_args": ()})
    return LossStep(KEY, model, optax.adam(1e-2), partitioner, train=True, loss=squares, **options)


@pytest.mark.parametrize(
    ("kind", "rules", "spec"),
    [
        ("Linen", [("embed", None), ("hidden", "model")], P(None, "model")),
        ("NNX", [("embed", None), ("hidden", ("data", "model"))], P(None, ("data", "model"))),
    ],
)
def test_logical_axes_follow_the_rules(kind, rules, spec):
    step = logical_step(kind, rules)
    state = step.initialize_model([1, 3])
    kernels = [leaf for leaf in jax.tree.leaves(state) if leaf.shape == (3, 16)]
    expected = jax.sharding.NamedSharding(step.partitioner.mesh, spec)
    assert len(kernels) == 3  # The parameter and two Adam moments.
    assert all(leaf.sharding.is_equivalent_to(expected, 2) for leaf in kernels)
    losses = jaxloop.TrainLoop(step)(state, BATCHES, 10)[1]["loss"]
    np.testing.assert_allclose(losses, replicated_losses(kind), rtol=1e-5)


@functools.cache
def replicated_losses(kind):
    step = logical_step(kind, [("embed", None), ("hidden", None)], (8, 1))
    return jaxloop.TrainLoop(step)(step.initialize_model([1, 3]), BATCHES, 10)[1]["loss"]


@pytest.mark.parametrize("rules", [[], [("embed", None)]])
def test_a_logical_axis_without_a_rule_raises(rules):
    with pytest.raises(ValueError, match=r"uses the axis '(hidden|embed)'.*Add \('\1', \.\.\.\) to logical_axis_rules"):
        logical_step("Linen", rules).initialize_model([1, 3])
    with pytest.raises(ValueError, match="not found in mesh"):  # The error of NNX.
        logical_step("NNX", rules).initialize_model([1, 3])


NAMES = {
    "both": ((("a", "b"), "d"), P(("data", "model"))),
    "first that is free": (("a", "c"), P("data", "model")),
    "none left": (("c", "a"), P(("data", "model"))),
    "of the mesh": (("model", None), P("model")),
}


@pytest.mark.parametrize(("names", "spec"), NAMES.values(), ids=NAMES)
def test_logical_names_are_mapped_individually(names, spec):
    rules = [("a", "data"), ("b", "model"), ("c", ("data", "model")), ("c", "model"), ("d", None)]
    partitioner = partition.SPMDPartitioner(mesh_of((4, 2)), "data", logical_axis_rules=rules)
    state = partitioner.shard_init_fn(lambda: nn.LogicallyPartitioned(jnp.zeros([8, 8]), names))()
    assert state.sharding.is_equivalent_to(jax.sharding.NamedSharding(partitioner.mesh, spec), 2)


# Meshes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("axes", "shape"), [({"data": -1}, (8,)), ({"data": -1, "model": 2}, (4, 2)), ({"data": 2, "model": 4}, (2, 4))]
)
def test_create_mesh_uses_all_devices(axes, shape):
    mesh = partition.create_mesh(**axes)
    assert mesh.devices.shape == shape and mesh.axis_names == tuple(axes)
    assert partition.create_mesh(data=-1, devices=jax.devices()[:2]).devices.tolist() == jax.devices()[:2]


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"data": 3, "model": -1}, r"create_mesh\(data=3, model=-1\) does not fit 8 devices"),
        ({"data": 4}, r"To use some of them, give devices=jax.devices\(\)"),
        ({"data": -1, "model": -1}, "one may be -1"),
        ({"data": 0}, "the sizes must be positive"),
        ({"data": 16}, "does not fit 8 devices"),
        ({}, "sizes by the names of axes, such as data=-1, model=2"),
        ({"data": "all"}, "sizes by the names of axes"),
    ],
)
def test_create_mesh_rejects_invalid_sizes(axes, message):
    with pytest.raises((TypeError, ValueError), match=message):
        partition.create_mesh(**axes)


# Reports ---------------------------------------------------------------------------------------------


def test_report_is_a_table_of_leaf_layouts():
    partitioner = partition.FSDPPartitioner(partition.create_mesh(data=8))
    shapes = {"embedding": [1000, 64], "odd": [71, 61], "small": [7]}
    state = {"params": {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}}
    assert str(partitioner.report(state)).splitlines() == [
        "path              shape       dtype    spec       per device",
        "params/embedding  [1000, 64]  float32  P('data')    31.2 KiB",
        "params/odd        [71, 61]    float32  P()          16.9 KiB",
        "params/small      [7]         float32  P()              28 B",
        "                                                    48.2 KiB  of 266.9 KiB in total",
    ]


def test_place_state_rejects_a_different_state():
    partitioner = partition.FSDPPartitioner(partition.create_mesh(data=8), min_size=8)
    for make in (np.zeros, np.ones):
        partitioner.place_state({"w": make([64, 8])})
    for other in ({"v": np.zeros([64, 8])}, {"w": np.zeros([8, 64])}):
        with pytest.raises(ValueError, match="already holds the layout of another state"):
            partitioner.place_state(other)


def test_fit_can_use_all_devices():
    data = batches(8)
    options = {"loss": loss, "optimizer": optax.adam(1e-2), "train_epochs": 2, "progress": None}
    partitioner = partition.DataParallelPartitioner(partition.create_mesh(data=-1), "data")
    state, history = jaxloop.fit(Network(), data, partitioner=partitioner, **options)
    _, on_one = jaxloop.fit(Network(), data, **options)
    assert len(state.params["Dense_0"]["kernel"].sharding.device_set) == 8
    np.testing.assert_allclose(history.collect("loss"), on_one.collect("loss"), rtol=1e-5)
