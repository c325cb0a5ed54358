"""The state and the batch on a mesh whose axes are explicit."""

from collections.abc import Callable
from typing import Any, final

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxloop.partition.laid_out import _LaidOutPartitioner, unboxing
from jaxloop.partition.meshes import mesh_for_tracing


@final
class ExplicitPartitioner(_LaidOutPartitioner):
    """Keeps the axes of a mesh explicit: shardings are part of the types, and the model says how its arrays are split.

    Takes models that use `out_sharding=`, and meshes as `jax.make_mesh` makes them. The model is initialised, and `run`
    is traced, with the mesh set as by `jax.set_mesh`. The state is laid out as the initialisation leaves it: each
    device has the whole of a leaf unless the model says otherwise. The batch is split on its leading axis over
    `data_axis`.

    JAX then raises a `ShardingTypeError` where it can't tell how a result is split: a product that sums over the split
    axis, such as a gradient by hand, `x.T @ errors`, needs the sharding of its result,
    `jnp.einsum("bi,bo->io", x, errors, out_sharding=PartitionSpec())`. Gradients by `jax.grad` get that of the
    parameter. An evaluation needs batches that divide over the axis. Linen's annotations are for `SPMDPartitioner`.

    >>> import jax
    >>> mesh = jax.make_mesh((1,), ("data",))
    >>> ExplicitPartitioner(mesh, "data").mesh.axis_types == (jax.sharding.AxisType.Explicit,)
    True

    Args:
      mesh: see `MeshPartitioner`. Axes that are automatic are made explicit.
      data_axis: likewise.
    """

    _axis_type = AxisType.Explicit

    def shard_init_fn(self, init_fn: Callable[..., Any]) -> Callable[..., Any]:
        init_unboxed = unboxing(init_fn)

        def sharded_init(*args: Any, **kwargs: Any) -> Any:
            with mesh_for_tracing(self._mesh):
                shapes = jax.eval_shape(init_unboxed, *args, **kwargs)
                self._hold(jax.tree.map(self._sharding_of, shapes))
                return jax.jit(init_unboxed, out_shardings=self._sharding)(*args, **kwargs)

        return sharded_init

    def _sharding_of(self, shape: jax.ShapeDtypeStruct) -> NamedSharding:
        spec = shape.sharding.spec if isinstance(shape.sharding, NamedSharding) else PartitionSpec()
        return NamedSharding(self._mesh, spec)
