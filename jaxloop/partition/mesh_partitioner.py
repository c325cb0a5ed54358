"""The base class for partitioners that use a mesh, and the partitioner that replicates the state."""

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import make_array_from_process_local_data
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from jaxloop import types
from jaxloop.base import checks
from jaxloop.base.structures import compile_donating
from jaxloop.partition.meshes import create_mesh, mesh_for_tracing
from jaxloop.partition.partitioner import Partitioner


class MeshPartitioner(Partitioner):
    """The base class for partitioners that use a mesh. Splits batches along their leading axis over `data_axis`.

    Hooks:
      sharding, shard_init_fn: See `Partitioner`. Subclasses must implement them.
      shard_batch, place_state, partition: See `Partitioner`.

    Args:
      mesh: A mesh from `jax.make_mesh` or `jax.sharding.Mesh`. Explicit axes are converted to automatic ones, so that
        `Step.run` can be written as if for a single device. For a model that uses `out_sharding=` or `jax.reshard`,
        which need explicit axes, use `ExplicitPartitioner`.
      data_axis: The name of the mesh axis over which batches are split. Batches are replicated over the other axes.
    """

    _axis_type = AxisType.Auto

    def __init__(self, mesh: Mesh, data_axis: str):
        if data_axis not in mesh.axis_names:
            raise ValueError(
                f"data_axis {data_axis!r} is not an axis of the mesh: {', '.join(map(repr, mesh.axis_names))}."
            )
        self._data_axis = data_axis
        self._set_mesh(mesh)

    def _set_mesh(self, mesh: Mesh) -> None:
        self._mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(self._axis_type,) * len(mesh.axis_names))
        self._replicated = NamedSharding(self._mesh, PartitionSpec())
        specs = PartitionSpec(self._data_axis), PartitionSpec(None, self._data_axis)  # For one batch, and for several.
        self._splits = [NamedSharding(self._mesh, spec) for spec in specs]
        along = np.moveaxis(mesh.devices, mesh.axis_names.index(self._data_axis), 0)
        is_here = lambda device: device.process_index == jax.process_index()
        self._local_shards = sum(any(map(is_here, each)) for each in along.reshape(len(along), -1))

    def moved_to(self, devices: Sequence[Any]) -> Self:
        """Returns a copy whose mesh consists of the given devices.

        The size of the data axis is adapted to the number of devices; the other axes keep their sizes. The copy treats
        all of the given devices as local to this process.
        """
        moved = copy.copy(self)
        sizes = {**self._mesh.shape, self._data_axis: -1}
        moved._set_mesh(create_mesh(devices=devices, **{str(name): size for name, size in sizes.items()}))
        moved._local_shards = moved.shards
        return moved

    @property
    def mesh(self) -> Mesh:
        return self._mesh

    @property
    def data_axis(self) -> str:
        return self._data_axis

    @property
    def local_shards(self) -> int:
        return self._local_shards

    @property
    def output_sharding(self) -> Sharding | None:
        return self._replicated if self._mesh.is_multi_process else None  # A process can't read other processes' parts.

    @property
    def places_batches(self) -> bool:
        return self._mesh.size > 1 or type(self).shard_batch is not MeshPartitioner.shard_batch

    def shard_batch(self, batch: types.Batch) -> types.Batch:
        """Splits a batch along its leading axis over `data_axis`. Scalars are replicated.

        Raises:
          ValueError: If the number of rows of a leaf isn't divisible by `local_shards`.
        """
        return self._shard(batch, axis=0)

    def shard_stacked_batches(self, batches: types.Batch) -> types.Batch:
        return self._shard(batches, axis=1)

    def _shard(self, batch: types.Batch, axis: int) -> types.Batch:
        if self._mesh.size == 1:
            return batch  # Passing host arrays to the jitted call is faster than device_put.
        _check_divides(batch, axis, self._local_shards, self._data_axis)
        place = lambda leaf: self._splits[axis] if np.ndim(leaf) > axis else self._replicated
        return self._put(batch, jax.tree.map(place, batch))

    def _put(self, batch: Any, shardings: Any) -> Any:
        """Places this process's part of a batch on the devices.

        Leaves that are `jax.ShapeDtypeStruct`s aren't placed. Their global shapes are returned instead.
        """
        is_shape = lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct)
        if any(map(is_shape, jax.tree.leaves(batch))):
            num_parts = self.shards // self._local_shards
            whole = lambda leaf, sharding: _global_shape(leaf, sharding, self._data_axis, num_parts)
            place = lambda leaf, sharding: (whole if is_shape(leaf) else self._put)(leaf, sharding)
            return jax.tree.map(place, batch, shardings)
        if not self._mesh.is_multi_process:
            return jax.device_put(batch, shardings)
        return jax.tree.map(lambda leaf, sharding: make_array_from_process_local_data(sharding, leaf), batch, shardings)

    def shard_short_batch(self, batch: types.Batch) -> types.Batch:
        shards = self._local_shards
        if self._mesh.is_multi_process:
            return self.shard_batch(batch)  # The processes have different rows, which can't be replicated.
        if any(np.ndim(leaf) and np.shape(leaf)[0] % shards for leaf in jax.tree.leaves(batch)):
            return self._put(batch, jax.tree.map(lambda _: self._replicated, batch))
        return self.shard_batch(batch)

    def place_state(self, state: Any) -> Any:
        if not self._mesh.is_multi_process:
            return jax.device_put(state, self.sharding)
        return jax.tree.map(_place_in_all_processes, state, self.shardings_of(state))

    def partition(self, fn: Callable[..., Any], **jit_kwargs: Any) -> Callable[..., Any]:
        @functools.wraps(fn)
        def with_mesh(*args, **kwargs):
            with mesh_for_tracing(self._mesh):
                return fn(*args, **kwargs)

        if "out_shardings" not in jit_kwargs:
            jit_kwargs["out_shardings"] = (self.sharding, self.output_sharding)
        return compile_donating(with_mesh, **jit_kwargs)


class DataParallelPartitioner(MeshPartitioner):
    """Replicates the state on every device and splits the batch over `data_axis`.

    Hooks:
      shard_batch, place_state, partition: See `Partitioner`.

    >>> mesh = jax.make_mesh((1,), ("data",))
    >>> DataParallelPartitioner(mesh, "data").sharding.spec
    P()
    """

    @property
    def sharding(self) -> NamedSharding:
        return self._replicated

    def shard_init_fn(self, init_fn: Callable[..., Any]) -> Callable[..., Any]:
        return jax.jit(init_fn, out_shardings=self._replicated)


def _check_divides(batch: types.Batch, axis: int, shards: int, data_axis: str) -> None:
    """Raises a `ValueError` if the given axis of any leaf of the batch can't be divided evenly into `shards` parts.

    Leaves without this axis are ignored.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        shape = np.shape(leaf)[axis:]
        if shape and shape[0] % shards:
            raise ValueError(
                f"{checks.batch_leaf_name(path)} has {shape[0]} rows, which can't be divided evenly among the "
                f"{shards} devices of mesh axis {data_axis!r}. Batch to a multiple of {shards}, or drop the remainder."
            )


def _global_shape(leaf: Any, sharding: NamedSharding, data_axis: str, num_parts: int) -> jax.ShapeDtypeStruct:
    """Returns the global shape of a leaf of a batch.

    `leaf` is the part of the global leaf that one process contributes. `num_parts` is the number of such parts along
    `data_axis`.
    """
    shape, names = list(leaf.shape), tuple(sharding.spec)
    if data_axis in names:
        shape[names.index(data_axis)] *= num_parts
    return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype, sharding=sharding)


def _place_in_all_processes(leaf: Any, sharding: NamedSharding) -> Any:
    """Moves a leaf of a state to the devices of all processes.

    Unless the leaf is already a global array, each process must hold an identical copy of it.
    """
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return jax.device_put(leaf, sharding)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = _place_in_all_processes(jax.random.key_data(leaf), NamedSharding(sharding.mesh, PartitionSpec()))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    host = np.asarray(leaf)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])
