import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from programs import tiny
from programs.models import squares

import jaxloop
from jaxloop import check, partition
from jaxloop.step import cost

# FLOPs ------------------------------------------------------------------------------------------------------


def flops(fn, *args):
    return cost.flops_of(jax.make_jaxpr(fn)(*args))


BATCH = {"x": np.zeros([16, 128], np.float32), "y": np.zeros([16, 64], np.float32)}
SQUARE, IMAGES, KERNEL = jnp.ones([8, 8]), jnp.ones([4, 16, 16, 3]), jnp.ones([3, 3, 3, 8])


def convolve(images, kernel):
    strides, padding, numbers = (2, 2), "VALID", ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(images, kernel, strides, padding, dimension_numbers=numbers).sum()


FUNCTIONS = {
    "products": (lambda x, y: jnp.einsum("bij,bjk->bik", x, y), (jnp.ones([5, 2, 3]), jnp.ones([5, 3, 4]))),
    "convolution": (convolve, (IMAGES, KERNEL)),
    "gradients of a convolution": (jax.value_and_grad(convolve, argnums=(0, 1)), (IMAGES, KERNEL)),
    "elementwise": (lambda x: (x * 2 + 1).sum(), (SQUARE,)),
}


@pytest.mark.parametrize(("fn", "args"), FUNCTIONS.values(), ids=FUNCTIONS)
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
        return step.compute_num_flops(step.initialize_model([1, 128]), BATCH)

    assert flops(4) == pytest.approx(flops(1), rel=0.2)  # Adding the gradients takes a few more.


# Whole steps ------------------------------------------------------------------------------------------------


def make_step(partitioner, **options):
    options |= {"partitioner": partitioner, "loss": squares}
    return tiny.make_step(jaxloop.LossStep, nn.Dense(64), optax.sgd(1e-2, 0.9), **options)


def test_cost_of_a_step_can_be_computed_from_abstract_values():
    mesh = partition.create_mesh(data=-1)
    spec = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in BATCH.items()}
    costs = {}
    for partitioner in (jaxloop.DataParallelPartitioner(mesh, "data"), jaxloop.FSDPPartitioner(mesh, min_size=1)):
        step = make_step(partitioner)
        abstract = step.abstract_state([1, 128])
        costs[type(partitioner)] = check.cost_analysis(step, abstract, spec)
        state = step.initialize_model([1, 128])
        layout = lambda tree: [(leaf.shape, leaf.dtype, leaf.sharding) for leaf in jax.tree.leaves(tree)]
        assert layout(abstract) == layout(state) and jax.tree.structure(abstract) == jax.tree.structure(state)
        assert check.cost_analysis(step, state, BATCH) == costs[type(partitioner)]
        assert partitioner.report(abstract).bytes_per_device == partitioner.report(state).bytes_per_device
    replicated, split = costs[jaxloop.DataParallelPartitioner], costs[jaxloop.FSDPPartitioner]
    assert replicated.argument_bytes > 4 * split.argument_bytes


ROWS = 2**31  # 34 GB in total. XLA fails on larger axes in JAX 0.9.


SPECS = {
    "structs": (8, lambda spec: {name: jax.ShapeDtypeStruct(*each) for name, each in spec.items()}),
    "pairs": (None, lambda spec: spec),
    "shapes": (8, lambda spec: {name: list(shape) for name, (shape, _) in spec.items()}),
}


@pytest.mark.parametrize(("devices", "as_batch"), SPECS.values(), ids=SPECS)
def test_compiling_for_a_batch_spec_allocates_no_batch(as_batch, devices, data_parallel):
    class Regression(tiny.Regression):
        def begin(self, state, batch):
            assert batch["x"].shape == (ROWS, 3) and batch["x"][5, 2] == 0
            return state, {"x": batch["x"], "y": batch["y"][:, None]}

    partitioner = data_parallel(devices) if devices else jaxloop.SingleDevicePartitioner()
    step = tiny.make_step(Regression, partitioner=partitioner)
    batch = as_batch({"x": ((ROWS, 3), np.float32), "y": ((ROWS,), np.float32)})
    state = step.initialize_model([1, 3])
    jaxloop.TrainLoop(step, steps_per_dispatch=2).compile(state, batch)
    step.compile(state, batch, evaluates=True)
    assert step.compute_num_flops(step.abstract_state([1, 3]), batch) > ROWS
    needed = check.cost_analysis(step, step.abstract_state([1, 3]), batch).argument_bytes
    assert needed > 4 * 4 * ROWS // (devices or 1)
