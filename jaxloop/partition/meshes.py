"""Functions for device meshes and sharding constraints."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec


def create_mesh(*, devices: Sequence[Any] | None = None, **axes: int) -> Mesh:
    """Returns a device mesh with named axes. For example, `create_mesh(data=-1, model=2)` uses all devices.

    >>> create_mesh(data=-1).axis_names
    ('data',)

    Args:
      devices: The devices of the mesh, or None to use all devices of all hosts.
      **axes: The size of each axis. One size may be -1, in which case it is chosen so that the mesh uses all devices.

    Raises:
      TypeError: If a size is not an int, or if no axes are given.
      ValueError: If the product of the sizes isn't equal to the number of devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    shown = ", ".join(f"{name}={size}" for name, size in axes.items())
    if not axes or any(isinstance(size, bool) or not isinstance(size, int | np.integer) for size in axes.values()):
        raise TypeError(f"create_mesh takes sizes by the names of axes, such as data=-1, model=2, got ({shown}).")
    known = math.prod(size for size in axes.values() if size != -1)
    sizes = tuple(len(devices) // max(known, 1) if size == -1 else size for size in axes.values())
    if min(sizes) < 1 or list(axes.values()).count(-1) > 1 or math.prod(sizes) != len(devices):
        raise ValueError(
            f"create_mesh({shown}) does not fit {len(devices)} devices: the sizes must be positive (one may be -1, for "
            "the rest) and multiply to the number of devices. To use some of them, give devices=jax.devices()[:number]."
        )
    types_of_axes = (AxisType.Auto,) * len(axes)
    return jax.make_mesh(sizes, tuple(axes), axis_types=types_of_axes, devices=devices)


@contextlib.contextmanager
def mesh_for_tracing(mesh: Mesh | None) -> Iterator[None]:
    """Returns a context manager in which to trace functions whose `PartitionSpec`s refer to the given mesh.

    Unless the mesh has explicit axes, it is hidden from `nn.DenseGeneral`. If `mesh` is None, the context manager does
    nothing.
    """
    with contextlib.ExitStack() as contexts:
        if mesh is not None:
            contexts.enter_context(jax.sharding.use_abstract_mesh(mesh.abstract_mesh))
            if AxisType.Explicit not in mesh.axis_types:
                contexts.enter_context(nn.intercept_methods(_hide_mesh_from_dense_general))
        yield


def _hide_mesh_from_dense_general(
    call: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext
) -> Any:
    """Calls a Linen method. If the method is `nn.DenseGeneral.__call__`, hides the mesh during the call.

    `nn.DenseGeneral` initializes a flat kernel to compare shapes, even in `apply`. If there is a mesh, Flax constrains
    the flat kernel with the axis names of the reshaped kernel, which raises an error. The constraint isn't needed,
    because the partitioner lays out the kernel anyway.
    """
    if not isinstance(context.module, nn.DenseGeneral) or context.method_name != "__call__":
        return call(*args, **kwargs)
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        return call(*args, **kwargs)


def is_cpu_mesh(mesh: Mesh | None) -> bool:
    """Returns True if a mesh consists of several CPU devices."""
    return mesh is not None and mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"


def max_steps_in_flight(mesh: Mesh | None, steps_per_dispatch: int = 1) -> int:
    """Returns the maximum number of steps by which the host may run ahead of the devices.

    For GPUs and TPUs, this number is large enough that the devices never wait for the host. For a mesh of several CPU
    devices, the number is small, because the collectives of many steps would compete for the same threads. For a single
    CPU device, the number is larger than for a GPU or TPU and grows with `steps_per_dispatch`, because a CPU can finish
    several small dispatches before the waiting host thread wakes up.
    """
    if is_cpu_mesh(mesh):
        return 8
    return max(128, 4 * steps_per_dispatch) if jax.default_backend() == "cpu" else 64


def constrain(value: jax.Array, *axes: Any) -> jax.Array:
    """Constrains a value's leading axes to be sharded over mesh axes. Call this function inside `run` or a model.

    The compiler chooses shardings itself, but its choice isn't always the best. For example, a transformer with sharded
    parameters is faster if its activations are sharded like the batch: `x = constrain(x, "data")`. On a single device,
    this function is a no-op.

    >>> import jax.numpy as jnp
    >>> constrain(jnp.zeros([8, 3]), "data").shape
    (8, 3)

    Args:
      value: The array to constrain.
      *axes: One argument for each leading axis of the array: the name of a mesh axis, a tuple of such names, or None
        if the axis isn't split. Names that aren't in the mesh are ignored.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return value
    known = [tuple(name for name in names_of(entry) if name in mesh.axis_names) or None for entry in axes]
    return jax.lax.with_sharding_constraint(value, PartitionSpec(*known))


def names_of(entry: Any) -> tuple[str, ...]:
    """Returns the names of the mesh axes in one entry of a `PartitionSpec`."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)
