"""The partitioner that replicates the state on all devices."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding

from jaxloop.base import checks
from jaxloop.partition.mesh_partitioner import MeshPartitioner


class DataParallelPartitioner(MeshPartitioner):
    """Replicates the state on every device, and splits the batch over `data_axis`.

    Hooks:
      shard_batch, place_state, partition: See `Partitioner`.

    >>> mesh = jax.make_mesh((1,), ("data",))
    >>> DataParallelPartitioner(mesh, "data").sharding.spec
    P()
    """

    @property
    def sharding(self) -> NamedSharding:
        return self._replicated

    @property
    def takes_any_tree(self) -> bool:
        has_own_sharding = type(self).sharding is not DataParallelPartitioner.sharding
        return not (has_own_sharding or checks.is_user_defined(self, "partition"))

    def shard_init_fn(self, init_fn: Callable[..., Any]) -> Callable[..., Any]:
        compiled = jax.jit(init_fn, out_shardings=self._replicated)

        def sharded_init(*args: Any, **kwargs: Any) -> Any:
            with self._naming_explicit_partitioner():
                return compiled(*args, **kwargs)

        return sharded_init

    def _reason_not_split(self, path, leaf):
        return "data parallel: the state is replicated" if self._mesh.size > 1 else ""
