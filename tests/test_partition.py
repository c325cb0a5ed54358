import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from programs import tiny
from programs.acts import Record
from programs.models import squares
from programs.tiny import BATCHES

from jaxloop import LossStep, examples, loop, partition, train_loop, types
from jaxloop.outer_loop import OuterLoop
from jaxloop.schedules import every
from jaxloop.train_loop import TrainLoop

pytestmark = pytest.mark.usefixtures("compile_fast")

AUTO = Mesh(np.array(jax.devices()), ("data",))
EXPLICIT = jax.make_mesh((8,), ("data",))
TWO_AXES = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))

KINDS = {
    "one device": partition.SingleDevicePartitioner,
    "data parallel": lambda: partition.DataParallelPartitioner(AUTO, "data"),
    "fully sharded": lambda: partition.FSDPPartitioner(AUTO, "data", min_size=8),
    "annotated": lambda: partition.SPMDPartitioner(AUTO, "data"),
}


def test_data_parallel_replicates_the_state_and_splits_the_batch():
    partitioner = partition.DataParallelPartitioner(AUTO, "data")
    assert partitioner.sharding == NamedSharding(AUTO, P())
    assert (partitioner.mesh, partitioner.data_axis) == (AUTO, "data")
    _, state, batches = examples.tiny_regression(partitioner=partitioner)
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(state))
    batch = partitioner.shard_batch({**batches[0], "temperature": np.float32(2)})
    assert batch["x"].sharding == NamedSharding(AUTO, P("data"))
    assert batch["temperature"].sharding.is_fully_replicated


def test_an_explicit_mesh_is_made_automatic():
    assert EXPLICIT.axis_types == (AxisType.Explicit,)
    assert partition.DataParallelPartitioner(EXPLICIT, "data").mesh.axis_types == (AxisType.Auto,)


def test_an_unknown_axis_raises_and_lists_the_mesh_axes():
    with pytest.raises(ValueError, match="'batch' is not an axis of the mesh: 'data', 'model'"):
        partition.DataParallelPartitioner(TWO_AXES, "batch")


@pytest.mark.parametrize(
    ("kind", "fused"), [("one device", 4), ("data parallel", 1), ("fully sharded", 4), ("annotated", 1)]
)
def test_an_action_may_keep_the_step_count(kind, fused):
    step, state, batches = examples.tiny_regression(partitioner=KINDS[kind]())
    first, keep = state, Record(every(steps=4), lambda state, **_: state.step)
    loops = train_loop.TrainLoop(step, end_actions=[keep], steps_per_dispatch=fused)
    state, _ = loops(state, batches, num_steps=12)
    counts = (first.step, *keep.seen, step(state, batches[0])[0].step)
    assert list(map(int, counts)) == [0, 4, 8, 12, 13]
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(first) if leaf is not first.step)


@pytest.mark.parametrize("kind", KINDS)
def test_the_step_count_stays_readable_whoever_compiles(kind):
    step, state, batches = examples.tiny_regression(partitioner=KINDS[kind]())
    count = step.partitioner.partition(lambda state, batch: (state.replace(step=state.step + 1), {}))
    counted, _ = count(state, step.shard_batch(batches[0]))
    assert (int(state.step), int(counted.step)) == (0, 1) and state.params["kernel"].is_deleted()
    step.compile(keep_unused=True)
    trained, _ = step(counted, batches[0])
    assert (int(counted.step), int(trained.step)) == (1, 2) and counted.params["kernel"].is_deleted()


class LinenTwoLayers(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.initializers.lecun_normal()
        x = nn.relu(nn.Dense(16, kernel_init=nn.with_partitioning(init, (None, "model")))(x))
        return nn.Dense(1, kernel_init=nn.with_partitioning(init, ("model", None)))(x)


class NNXTwoLayers(nnx.Module):
    def __init__(self, *, rngs):
        init = nnx.initializers.lecun_normal()
        self.up = nnx.Linear(3, 16, kernel_init=nnx.with_partitioning(init, (None, "model")), rngs=rngs)
        self.down = nnx.Linear(16, 1, kernel_init=nnx.with_partitioning(init, ("model", None)), rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def make_step(partitioner, model, loss=squares, rate=0.1):
    options = {"nnx_model_args": ()} if model is NNXTwoLayers else {}
    options |= {"partitioner": partitioner, "loss": loss}
    return tiny.make_step(LossStep, model, optax.sgd(rate, momentum=0.9), **options)


@pytest.mark.parametrize("model", [LinenTwoLayers(), NNXTwoLayers], ids=["linen", "nnx"])
def test_spmd_places_the_state_by_the_annotations_of_the_model(model):
    partitioner = partition.SPMDPartitioner(TWO_AXES, "data")
    with pytest.raises(ValueError, match=r"initialize_model\(\.\.\.\) of a step with this partitioner first"):
        _ = partitioner.sharding
    step = make_step(partitioner, model)
    state = step.initialize_model([1, 3])
    equivalent = jax.tree.map(lambda leaf, s: leaf.sharding.is_equivalent_to(s, leaf.ndim), state, partitioner.sharding)
    assert all(jax.tree.leaves(equivalent))
    kernels = [leaf for leaf in jax.tree.leaves(state) if leaf.sharding.spec and "model" in leaf.sharding.spec]
    assert len(kernels) == 4  # Two kernels, and the momentum of each.

    _, outputs = loop.Loop(step)(state, BATCHES, num_steps=5)
    single_step = make_step(partition.SingleDevicePartitioner(), model)
    with jax.set_mesh(jax.make_mesh((1,), ("model",), axis_types=(AxisType.Auto,))):
        _, expected = loop.Loop(single_step)(single_step.initialize_model([1, 3]), BATCHES, num_steps=5)
    np.testing.assert_allclose(outputs["loss"], expected["loss"], rtol=1e-4)
    with pytest.raises(ValueError, match="already holds the layout of another state"):
        make_step(partitioner, nn.Dense(1)).initialize_model([1, 3])


def test_a_sharding_constraint_needs_no_mesh_context():
    constrained = lambda outputs, batch: squares(jax.lax.with_sharding_constraint(outputs, P("data")), batch)
    step = make_step(partition.SPMDPartitioner(AUTO, "data"), nn.Dense(1), loss=constrained)
    state, _ = step(step.initialize_model([1, 3]), BATCHES[0])
    assert int(state.step) == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("as_outputs", [lambda mean: {"x": mean}, lambda mean: mean], ids=["outputs", "an array"])
def test_a_function_that_returns_a_state_and_outputs_can_be_compiled(kind, as_outputs):
    partitioner = KINDS[kind]()
    optimizer = optax.identity()
    fn = lambda state, batch: (state.replace(step=state.step + 1), as_outputs(batch["x"].mean()))
    make = lambda: types.TrainState.create(apply_fn=None, params={"w": jnp.ones([16, 2])}, tx=optimizer)
    make_state, batch = partitioner.shard_init_fn(make), {"x": np.arange(8, dtype=np.float32)}
    expected = fn(make(), jax.tree.map(jnp.asarray, batch))
    make_state()  # From here on, the layout of the state is known.
    compiled = partitioner.partition(fn)
    for _ in range(2):
        state = make_state()
        layout = jax.tree.map(lambda leaf: leaf.sharding, state)
        got = compiled(state, partitioner.shard_batch(batch))
        jax.tree.map(np.testing.assert_allclose, got, expected)
        assert jax.tree.map(lambda leaf: leaf.sharding, got[0]) == layout and state.params["w"].is_deleted()
    norm = partitioner.partition(lambda state, batch: state.params["w"].sum(), out_shardings=None, donate_argnums=())
    assert norm(make_state(), partitioner.shard_batch(batch)) == 32


# Layers that reshape their kernels ------------------------------------------------------------------------


class Attention(nn.Module):
    """Its layers initialize flat kernels, but their annotations name the axes of the reshaped kernels."""

    annotate: object
    names: tuple = (None, "model")

    @nn.compact
    def __call__(self, x):
        init, (embed, heads) = nn.initializers.lecun_normal(), self.names
        into = nn.DenseGeneral((2, 4), kernel_init=self.annotate(init, (embed, heads, None)))
        out_of = nn.DenseGeneral(1, axis=(-2, -1), kernel_init=self.annotate(init, (heads, None, embed)))
        return out_of(into(x))


LOGICAL = Attention(nn.with_logical_partitioning, ("embed", "heads"))
ATTENTION = {
    "mesh axes": ((), Attention(nn.with_partitioning)),
    "logical axes": ([("heads", "model"), ("embed", None)], LOGICAL),
}


@pytest.mark.parametrize(("rules", "model"), ATTENTION.values(), ids=ATTENTION)
def test_layers_that_reshape_their_kernels_can_be_annotated(rules, model):
    losses = []
    for partitioner in (partition.SingleDevicePartitioner(), partition.SPMDPartitioner(TWO_AXES, "data", rules)):
        step = make_step(partitioner, model)
        state, outputs = loop.Loop(step)(step.initialize_model([1, 3]), BATCHES, num_steps=3)
        losses.append(outputs["loss"])
    np.testing.assert_allclose(*losses, rtol=1e-4)
    sharding = NamedSharding(TWO_AXES, P(None, "model"))
    assert state.params["DenseGeneral_0"]["kernel"].sharding.is_equivalent_to(sharding, 3)


# Explicit axes --------------------------------------------------------------------------------------------

EXPLICIT_AXES = jax.make_mesh((4, 2), ("data", "model"))


class ExplicitLayers(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.initializers.lecun_normal()
        sharded = lambda spec: lambda key, shape: jax.reshard(init(key, shape), spec)
        up = self.param("up", sharded(P(None, "model")), (3, 16))
        down = self.param("down", sharded(P("model", None)), (16, 1))
        hidden = nn.relu(jnp.einsum("bi,ih->bh", x, up, out_sharding=P("data", "model")))
        return jnp.einsum("bh,ho->bo", hidden, down, out_sharding=P("data", None))


def test_a_model_that_chooses_its_shardings_trains_on_explicit_axes():
    partitioner = partition.ExplicitPartitioner(EXPLICIT_AXES, "data")
    assert partitioner.mesh.axis_types == (AxisType.Explicit,) * 2
    step = make_step(partitioner, ExplicitLayers(), rate=0.01)
    state = step.initialize_model([4, 3])
    up = NamedSharding(partitioner.mesh, P(None, "model"))
    assert state.params["up"].sharding == up and state.opt_state[0].trace["up"].sharding == up
    run = OuterLoop(TrainLoop(step, steps_per_dispatch=2))
    assert run.check(state, BATCHES, 6, 2).ok
    state, outputs = run(state, BATCHES, 6)
    assert state.params["up"].sharding == up and outputs["loss"][-1] < outputs["loss"][0]


def test_an_explicit_mesh_may_have_one_device():
    mesh = jax.make_mesh((1, 1), ("data", "model"), devices=jax.devices()[:1])
    losses = []
    for each in (EXPLICIT_AXES, mesh):
        step = make_step(partition.ExplicitPartitioner(each, "data"), ExplicitLayers(), rate=0.01)
        losses.append(loop.Loop(step)(step.initialize_model([4, 3]), BATCHES, num_steps=3)[1]["loss"])
    np.testing.assert_allclose(*losses, rtol=1e-4)
