import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from programs.acts import Record
from programs.tiny import BATCHES

from jaxloop import examples, loop, partition, train_loop, types
from jaxloop.outer_loop import OuterLoop
from jaxloop.schedules import every
from jaxloop.step import Step
from jaxloop.train_loop import TrainLoop

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


@pytest.mark.parametrize("make", [partition.SingleDevicePartitioner, lambda: partition.SPMDPartitioner(AUTO, "data")])
def test_the_input_state_is_donated(make):
    partitioner = make()
    state = partitioner.shard_init_fn(lambda: {"w": jnp.ones(16)})()
    fn = partitioner.partition(lambda state, batch: ({"w": state["w"] + batch["x"].sum()}, {}))
    new_state, _ = fn(state, partitioner.shard_batch({"x": np.ones(8, np.float32)}))
    assert state["w"].is_deleted()
    np.testing.assert_array_equal(new_state["w"], np.full(16, 9))


@pytest.mark.parametrize("fused", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
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


def test_jit_arguments_override_the_partitioners_own():
    partitioner = partition.SingleDevicePartitioner()
    state = {"w": jnp.ones(2)}
    partitioner.partition(lambda state, batch: (state, {}), donate_argnums=())(state, None)
    assert not state["w"].is_deleted()


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


class LinenStep(Step):
    def run(self, state, batch):
        def loss_fn(params):
            return jnp.mean((state.apply_fn({"params": params}, batch["x"]) - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}


class NNXStep(Step):
    def run(self, state, batch):
        def loss_fn(params):
            predicted, _ = state.apply_fn(params, state.batch_stats, state.collections)(batch["x"])
            return jnp.mean((predicted - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}


def linen_step(partitioner):
    return LinenStep(jax.random.key(0), LinenTwoLayers(), optax.sgd(0.1, momentum=0.9), partitioner, train=True)


def nnx_step(partitioner):
    return NNXStep(
        jax.random.key(0), NNXTwoLayers, optax.sgd(0.1, momentum=0.9), partitioner, train=True, nnx_model_args=()
    )


@pytest.mark.parametrize("make_step", [linen_step, nnx_step])
def test_spmd_places_the_state_by_the_annotations_of_the_model(make_step):
    partitioner = partition.SPMDPartitioner(TWO_AXES, "data")
    with pytest.raises(ValueError, match=r"initialize_model\(\.\.\.\) of a step with this partitioner first"):
        _ = partitioner.sharding
    step = make_step(partitioner)
    state = step.initialize_model([1, 3])
    assert jax.tree.structure(partitioner.sharding) == jax.tree.structure(state)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    equivalent = jax.tree.map(lambda leaf, s: leaf.sharding.is_equivalent_to(s, leaf.ndim), state, partitioner.sharding)
    assert all(jax.tree.leaves(equivalent))
    kernels = [s for s in jax.tree.leaves(shardings) if s.spec and "model" in s.spec]
    assert len(kernels) == 4  # Two kernels, and the momentum of each.

    _, outputs = loop.Loop(step)(state, BATCHES, num_steps=5)
    single_step = make_step(partition.SingleDevicePartitioner())
    if make_step is nnx_step:
        with jax.set_mesh(jax.make_mesh((1,), ("model",), axis_types=(AxisType.Auto,))):
            single_state = single_step.initialize_model([1, 3])
            _, expected = loop.Loop(single_step)(single_state, BATCHES, num_steps=5)
    else:
        single_state = types.TrainState.create(
            apply_fn=state.apply_fn,
            params=nn.meta.unbox(LinenTwoLayers().init(jax.random.key(0), jnp.ones([1, 3])))["params"],
            tx=optax.sgd(0.1, momentum=0.9),
        )
        _, expected = loop.Loop(single_step)(single_state, BATCHES, num_steps=5)
    np.testing.assert_allclose(outputs["loss"], expected["loss"], rtol=1e-4)


def test_an_spmd_partitioner_holds_one_layout():
    partitioner = partition.SPMDPartitioner(TWO_AXES, "data")
    linen_step(partitioner).initialize_model([1, 3])
    linen_step(partitioner)
    with pytest.raises(ValueError, match="already holds the layout of another state"):
        LinenStep(jax.random.key(0), LinenTwoLayers(), partitioner=partitioner).initialize_model([1, 3])


def test_a_sharding_constraint_needs_no_mesh_context():
    class Constrained(LinenStep):
        def run(self, state, batch):
            batch = {**batch, "x": jax.lax.with_sharding_constraint(batch["x"], P("data"))}
            return super().run(state, batch)

    step = Constrained(jax.random.key(0), nn.Dense(1), optax.sgd(0.1), partition.SPMDPartitioner(AUTO, "data"))
    state, _ = step(step.initialize_model([1, 3]), BATCHES[0])
    assert int(state.step) == 1


def test_a_state_created_elsewhere_is_moved_to_the_mesh():
    _, state, batches = examples.tiny_regression()
    step, _, _ = examples.tiny_regression(partitioner=partition.DataParallelPartitioner(AUTO, "data"))
    state, _ = step(state, batches[0])
    assert jax.tree.leaves(state.params)[0].sharding.mesh == AUTO


RESULTS = {
    "outputs": lambda state, batch: (state.replace(step=state.step + 1), {"x": batch["x"].mean()}),
    "an array": lambda state, batch: (state.replace(step=state.step + 1), batch["x"].mean()),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("result", RESULTS)
def test_a_function_that_returns_a_state_and_outputs_can_be_compiled(kind, result):
    partitioner = KINDS[kind]()
    optimizer = optax.identity()
    make = lambda: types.TrainState.create(apply_fn=None, params={"w": jnp.ones([16, 2])}, tx=optimizer)
    make_state, batch = partitioner.shard_init_fn(make), {"x": np.arange(8, dtype=np.float32)}
    expected = RESULTS[result](make(), jax.tree.map(jnp.asarray, batch))
    make_state()  # From here on, the layout of the state is known.
    compiled = partitioner.partition(RESULTS[result])
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


LOGICAL = {"annotate": nn.with_logical_partitioning, "names": ("embed", "heads")}


@pytest.mark.parametrize(
    ("make", "model"),
    [
        (lambda: partition.DataParallelPartitioner(TWO_AXES, "data"), Attention(nn.with_partitioning)),
        (lambda: partition.FSDPPartitioner(TWO_AXES, "data", min_size=1), Attention(nn.with_partitioning)),
        (lambda: partition.RulesPartitioner(TWO_AXES, "data", [("", P())]), Attention(nn.with_partitioning)),
        (lambda: partition.SPMDPartitioner(TWO_AXES, "data"), Attention(nn.with_partitioning)),
        (
            lambda: partition.SPMDPartitioner(TWO_AXES, "data", [("heads", "model"), ("embed", None)]),
            Attention(**LOGICAL),
        ),
    ],
    ids="data parallel,fsdp,rules,spmd,logical".split(","),
)
def test_layers_that_reshape_their_kernels_can_be_annotated(make, model):
    losses = []
    for partitioner in (partition.SingleDevicePartitioner(), make()):
        step = LinenStep(jax.random.key(0), model, optax.sgd(0.1), partitioner, train=True)
        state = step.initialize_model([1, 3])
        state, outputs = loop.Loop(step)(state, BATCHES, num_steps=3)
        losses.append(outputs["loss"])
    np.testing.assert_allclose(*losses, rtol=1e-4)
    if isinstance(partitioner, partition.SPMDPartitioner):
        assert state.params["DenseGeneral_0"]["kernel"].sharding.is_equivalent_to(
            NamedSharding(TWO_AXES, P(None, "model")), 3
        )


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


def explicit_step(partitioner, model=None):
    return LinenStep(
        jax.random.key(0), model or ExplicitLayers(), optax.sgd(0.01, momentum=0.9), partitioner, train=True
    )


@pytest.mark.parametrize("steps_per_dispatch", [1, 2])
def test_a_model_that_chooses_its_shardings_trains_on_explicit_axes(steps_per_dispatch):
    partitioner = partition.ExplicitPartitioner(EXPLICIT_AXES, "data")
    assert partitioner.mesh.axis_types == (AxisType.Explicit,) * 2
    step = explicit_step(partitioner)
    state = step.initialize_model([4, 3])
    up = NamedSharding(partitioner.mesh, P(None, "model"))
    assert state.params["up"].sharding == up and state.opt_state[0].trace["up"].sharding == up
    run = OuterLoop(TrainLoop(step, steps_per_dispatch=steps_per_dispatch))
    assert run.check(state, BATCHES, 6, 2).ok
    state, outputs = run(state, BATCHES, 6)
    assert state.params["up"].sharding == up and outputs["loss"][-1] < outputs["loss"][0]


@pytest.mark.parametrize("model", [nn.Dense(1), None])
def test_an_explicit_mesh_may_have_one_device(model):
    mesh = jax.make_mesh((1, 1), ("data", "model"), devices=jax.devices()[:1])
    losses = []
    for partitioner in (
        partition.ExplicitPartitioner(EXPLICIT_AXES, "data"),
        partition.ExplicitPartitioner(mesh, "data"),
    ):
        step = explicit_step(partitioner, model)
        losses.append(loop.Loop(step)(step.initialize_model([4, 3]), BATCHES, num_steps=3)[1]["loss"])
    np.testing.assert_allclose(*losses, rtol=1e-4)
