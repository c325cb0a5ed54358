"""The partitioner that splits the state across the same devices as the batch, each leaf along its longest axis."""

from typing import Any, final

import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxloop.base import checks
from jaxloop.partition.laid_out import _LeafPartitioner
from jaxloop.partition.partitioner import SMALL


@final
class FSDPPartitioner(_LeafPartitioner):
    """Shards parameters and optimizer state over `data_axis`, just like the batch. This is known as FSDP or ZeRO-3.

    During a step, each device gathers the parameters that it needs from the other devices. On n devices, each device
    holds 1/n of the state, except for leaves that are small or can't be divided evenly; `report` lists these leaves.

    >>> from jaxloop.partition import create_mesh
    >>> FSDPPartitioner(create_mesh(data=-1)).data_axis
    'data'

    Args:
      mesh: See `MeshPartitioner`.
      data_axis: See `MeshPartitioner`. The state is replicated over the other axes.
      min_size: The minimum number of elements for a leaf to be split. Smaller leaves are replicated.
    """

    def __init__(self, mesh: Mesh, data_axis: str = "data", min_size: int = SMALL):
        super().__init__(mesh, data_axis)
        checks.check_positive("min_size", min_size)
        self._min_size = min_size

    def _spec_of(self, path, leaf):
        axis = self._axis_to_split(leaf)
        return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, self._data_axis)

    def _axis_to_split(self, leaf: Any) -> int | None:
        shape = np.shape(leaf)
        axes = [axis for axis, size in enumerate(shape) if size and size % self.shards == 0]
        if self.shards == 1 or np.size(leaf) < self._min_size or not axes:
            return None
        return max(axes, key=lambda axis: (shape[axis], -axis))

    def _reason_not_split(self, path, leaf):
        if self.shards == 1:
            return ""
        if np.size(leaf) < self._min_size:
            return f"smaller than min_size={self._min_size}"
        return f"none of its axes divides by the {self.shards} devices of {self._data_axis!r}"
