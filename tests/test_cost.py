import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import jaxloop
from jaxloop import check, partition
from jaxloop.base import checks
from jaxloop.step import cost

# FLOPs ------------------------------------------------------------------------------------------------------


def flops(fn, *args):
    return cost.flops_of(jax.make_jaxpr(fn)(*args))


SQUARE, IMAGES, KERNEL = jnp.ones([8, 8]), jnp.ones([4, 16, 16, 3]), jnp.ones([3, 3, 3, 8])


def convolve(images, kernel):
    strides, padding, numbers = (2, 2), "VALID", ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(images, kernel, strides, padding, dimension_numbers=numbers).sum()


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (lambda x, y: jnp.einsum("bij,bjk->bik", x, y), (jnp.ones([5, 2, 3]), jnp.ones([5, 3, 4]))),
        (convolve, (IMAGES, KERNEL)),
        (jax.value_and_grad(convolve, argnums=(0, 1)), (IMAGES, KERNEL)),
        (lambda x: (x * 2 + 1).sum(), (SQUARE,)),
    ],
    ids=["products", "convolution", "gradients of a convolution", "elementwise"],
)
def test_flops_without_loops_match_xla(fn, args):
    expected = jax.jit(fn).lower(*args).cost_analysis()["flops"]
    assert flops(fn, *args) == pytest.approx(expected, rel=0.05)


def test_flops_of_a_loop_body_are_counted_per_iteration(data_parallel):
    once, mesh = 2 * 8**3, data_parallel(8).mesh
    product = lambda x: x @ x
    repeated = lambda x: jax.lax.scan(lambda x, _: (product(x), None), x, length=6)[0]
    assert flops(repeated, SQUARE) == flops(jax.checkpoint(repeated), SQUARE) == 6 * once
    assert flops(lambda x: jax.lax.fori_loop(0, 6, lambda _, x: repeated(x), x), SQUARE) == 36 * once
    assert flops(lambda x: jax.lax.cond(True, product, repeated, x), SQUARE) == 6 * once
    spec = jax.sharding.PartitionSpec()
    on_each = jax.shard_map(product, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    assert flops(on_each, SQUARE) == 8 * once
    assert flops(lambda x: (x.astype(int) + 1, x + 1), SQUARE) == SQUARE.size
    assert flops(lambda x: x.astype(int) + 1, SQUARE) == SQUARE.size  # Not 0, which would mean "not counted".


def test_accumulation_keeps_the_flops():
    def flops(accumulate):
        step = make_step(jaxloop.SingleDevicePartitioner(), accumulate=accumulate)
        batch = {"x": np.zeros([16, 128], np.float32), "y": np.zeros([16, 64], np.float32)}
        return step.compute_num_flops(step.initialize_model([1, 128]), batch)

    assert flops(4) == pytest.approx(flops(1), rel=0.2)  # Adding the gradients takes a few more.


# Whole steps ------------------------------------------------------------------------------------------------


def make_step(partitioner, **options):
    loss = lambda outputs, batch: ((outputs - batch["y"]) ** 2).mean(-1)
    options = {"train": True, "loss": loss, **options}
    return jaxloop.LossStep(jax.random.key(0), nn.Dense(64), optax.sgd(1e-2, 0.9), partitioner, **options)


def test_cost_of_a_step_can_be_computed_from_abstract_values():
    mesh = partition.create_mesh(data=-1)
    batch = {"x": np.zeros([16, 128], np.float32), "y": np.zeros([16, 64], np.float32)}
    spec = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in batch.items()}
    costs = {}
    for partitioner in (jaxloop.DataParallelPartitioner(mesh, "data"), jaxloop.FSDPPartitioner(mesh, min_size=1)):
        step = make_step(partitioner)
        abstract = step.abstract_state([1, 128])
        costs[type(partitioner)] = check.cost_analysis(step, abstract, spec)
        state = step.initialize_model([1, 128])
        leaves, expected = checks.leaves_by_path(abstract), checks.leaves_by_path(state)
        assert {path: (leaf.shape, leaf.dtype, leaf.sharding) for path, leaf in leaves.items()} == {
            path: (leaf.shape, leaf.dtype, leaf.sharding) for path, leaf in expected.items()
        }
        assert check.cost_analysis(step, state, batch) == costs[type(partitioner)]
        assert partitioner.report(abstract).bytes_per_device == partitioner.report(state).bytes_per_device
    replicated, split = costs[jaxloop.DataParallelPartitioner], costs[jaxloop.FSDPPartitioner]
    assert replicated.argument_bytes > 4 * split.argument_bytes


ROWS = 2**31  # 34 GB in total. XLA fails on larger axes in JAX 0.9.


@pytest.mark.parametrize(
    ("devices", "as_batch"),
    [
        (8, lambda spec: {name: jax.ShapeDtypeStruct(*each) for name, each in spec.items()}),
        (None, lambda spec: spec),
        (8, lambda spec: {name: list(shape) for name, (shape, _) in spec.items()}),
    ],
    ids=["structs", "pairs", "shapes"],
)
def test_compiling_for_a_batch_spec_allocates_no_batch(as_batch, devices, data_parallel):
    class Regression(jaxloop.Step):
        def begin(self, state, batch):
            assert batch["x"].shape == (ROWS, 3) and batch["x"][5, 2] == 0
            return state, {"x": batch["x"], "y": batch["y"][:, None]}

        def run(self, state, batch):
            loss = lambda params: jnp.mean((state.apply_fn({"params": params}, batch["x"]) - batch["y"]) ** 2)
            value, grads = jax.value_and_grad(loss)(state.params)
            return state.apply_gradients(grads=grads), {"loss": value}

    partitioner = data_parallel(devices) if devices else jaxloop.SingleDevicePartitioner()
    step = Regression(jax.random.key(0), nn.Dense(1), optax.sgd(0.1), partitioner, train=True)
    batch = as_batch({"x": ((ROWS, 3), np.float32), "y": ((ROWS,), np.float32)})
    state = step.initialize_model([1, 3])
    jaxloop.TrainLoop(step, steps_per_dispatch=2).compile(state, batch)
    step.compile(state, batch, evaluates=True)
    assert step.compute_num_flops(step.abstract_state([1, 3]), batch) > ROWS
    needed = check.cost_analysis(step, step.abstract_state([1, 3]), batch).argument_bytes
    assert needed > 4 * 4 * ROWS // (devices or 1)
