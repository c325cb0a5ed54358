"""Meshes: grids of devices whose axes have names, and what a model says of them."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec


def create_mesh(*, devices: Sequence[Any] | None = None, **axes: int) -> Mesh:
    """A mesh with named axes, of all devices: `create_mesh(data=-1, model=2)`.

    >>> create_mesh(data=-1).axis_names
    ('data',)

    Args:
      devices: those of the mesh; None for all that there are, on all hosts.
      **axes: by name, how many devices are along an axis. One of them may be -1: it takes what is left.

    Raises:
      ValueError: the axes don't take all devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    shown = ", ".join(f"{name}={size}" for name, size in axes.items())
    if not axes or any(isinstance(size, bool) or not isinstance(size, int | np.integer) for size in axes.values()):
        raise TypeError(f"create_mesh takes sizes by the names of axes, such as data=-1, model=2, got ({shown}).")
    if list(axes.values()).count(-1) > 1 or any(size < 1 and size != -1 for size in axes.values()):
        raise ValueError(
            f"The sizes of a mesh's axes are positive, and one of them may be -1, got create_mesh({shown})."
        )
    known = math.prod(size for size in axes.values() if size != -1)
    if len(devices) % known or (-1 not in axes.values() and known != len(devices)):
        some = f", or give some of them: devices=jax.devices()[:{known}]" if known < len(devices) else ""
        raise ValueError(
            f"create_mesh({shown}) can't be made of {len(devices)} devices: the sizes multiply to {known}. Change them"
            f"{some}."
        )
    sizes = tuple(len(devices) // known if size == -1 else size for size in axes.values())
    types_of_axes = (AxisType.Auto,) * len(axes)
    return jax.make_mesh(sizes, tuple(axes), axis_types=types_of_axes, devices=devices)


@contextlib.contextmanager
def mesh_for_tracing(mesh: Mesh | None) -> Iterator[None]:
    """Returns a context in which a `PartitionSpec` names the axes of a mesh; it costs nothing after tracing."""
    with contextlib.ExitStack() as contexts:
        if mesh is not None:
            contexts.enter_context(jax.sharding.use_abstract_mesh(mesh.abstract_mesh))
            if AxisType.Explicit not in mesh.axis_types:
                contexts.enter_context(nn.intercept_methods(_hide_mesh_from_dense_general))
        yield


def _hide_mesh_from_dense_general(
    call: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext
) -> Any:
    """Calls a Linen method; `nn.DenseGeneral` sees no mesh.

    It initializes a flat kernel, in `apply` too, to compare shapes. Where Flax sees a mesh, it then constrains that
    kernel by the names of the axes which it gets afterwards, and raises. The partitioner lays out the kernel anyway.
    """
    if not isinstance(context.module, nn.DenseGeneral) or context.method_name != "__call__":
        return call(*args, **kwargs)
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        return call(*args, **kwargs)


def is_cpu_mesh(mesh: Mesh | None) -> bool:
    """Whether several devices are one CPU."""
    return mesh is not None and mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"


def max_steps_in_flight(mesh: Mesh | None, steps_per_dispatch: int = 1) -> int:
    """How many steps the devices may have before them: enough for them never to wait for the host.

    Where several devices are one CPU, the collectives of many steps would compete for the same threads. One CPU is done
    with a dispatch in less time than it takes to wake who waits for it.
    """
    if is_cpu_mesh(mesh):
        return 8
    return max(64, 4 * steps_per_dispatch if jax.default_backend() == "cpu" else 0)


def constrain(value: jax.Array, *axes: Any) -> jax.Array:
    """Says inside `run`, or a model, how a value is split: its leading axes over these axes of the mesh.

    The compiler finds that out by itself, and not always well: a transformer whose parameters are split does best to be
    told that its activations are split as the batch is, `x = constrain(x, "data")`. On one device it does nothing.

    >>> import jax.numpy as jnp
    >>> constrain(jnp.zeros([8, 3]), "data").shape
    (8, 3)

    Args:
      value: an array.
      *axes: for its axes, from the first, the name of a mesh axis, a tuple of several, or None for none; names that the
        mesh does not have are none.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return value
    known = [tuple(name for name in names_of(entry) if name in mesh.axis_names) or None for entry in axes]
    return jax.lax.with_sharding_constraint(value, PartitionSpec(*known))


def names_of(entry: Any) -> tuple[str, ...]:
    """The mesh axes of one entry of a `PartitionSpec`."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)
