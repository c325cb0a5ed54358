"""The partitioner for a mesh with explicit axes."""

from collections.abc import Callable
from typing import Any, final

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxloop.partition.laid_out import _LaidOutPartitioner, unboxing
from jaxloop.partition.meshes import mesh_for_tracing


@final
class ExplicitPartitioner(_LaidOutPartitioner):
    """Keeps the axes of a mesh explicit: shardings are part of the types, and the model determines how arrays are
    split.

    Use it for models with `out_sharding=`, and with meshes from `jax.make_mesh`. The model is initialized and `run` is
    traced with the mesh set as by `jax.set_mesh`. The state keeps the layout of the initialization: leaves are
    replicated unless the model splits them. The batch is split on its leading axis over `data_axis`.

    JAX raises a `ShardingTypeError` if it can't determine how a result is split. A product that sums over the split
    axis, such as a hand-written gradient `x.T @ errors`, needs the sharding of its result:
    `jnp.einsum("bi,bo->io", x, errors, out_sharding=PartitionSpec())`. Gradients from `jax.grad` have the sharding of
    the parameter. An evaluation needs batches that divide over the axis. Linen's annotations are for `SPMDPartitioner`.

    >>> import jax
    >>> mesh = jax.make_mesh((1,), ("data",))
    >>> ExplicitPartitioner(mesh, "data").mesh.axis_types == (jax.sharding.AxisType.Explicit,)
    True

    Args:
      mesh: See `MeshPartitioner`. Automatic axes are made explicit.
      data_axis: See `MeshPartitioner`.
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
