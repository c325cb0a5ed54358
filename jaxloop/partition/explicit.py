"""The partitioner for meshes with explicit axes."""

from collections.abc import Callable
from typing import Any, final

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxloop.partition.laid_out import _LaidOutPartitioner, unboxing
from jaxloop.partition.meshes import mesh_for_tracing


@final
class ExplicitPartitioner(_LaidOutPartitioner):
    """Keeps the axes of a mesh explicit, so that shardings are part of array types.

    The model determines how its arrays are split. Use this partitioner for models that use `out_sharding=`, with a mesh
    from `jax.make_mesh`. The mesh is the current mesh, as if set by `jax.set_mesh`, while the model is initialized and
    while `run` is traced. The state keeps its initial layout: leaves are replicated unless the model splits them. The
    leading axis of the batch is split over `data_axis`.

    JAX raises a `ShardingTypeError` if it can't determine how a result is split. A contraction over the split axis,
    such as a hand-written gradient `x.T @ errors`, needs an explicit sharding for its result:
    `jnp.einsum("bi,bo->io", x, errors, out_sharding=PartitionSpec())`. Gradients from `jax.grad` have the same sharding
    as the parameters. In evaluations, each batch's number of rows must be divisible by the size of `data_axis`. For
    models with Linen annotations, use `SPMDPartitioner` instead.

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
