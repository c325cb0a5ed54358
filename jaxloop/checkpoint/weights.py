"""Loads only the parameters or the variables from a checkpoint, and exchanges parameters with other libraries.

Files in the safetensors format contain only parameters. Many other libraries support them.
"""

import contextlib
import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from jaxloop.base import checks, files
from jaxloop.checkpoint import read, stored
from jaxloop.checkpoint.listing import all_paths, all_steps, missing_error
from jaxloop.checkpoint.read import Checkpoint
from jaxloop.metrics import fetch

_DTYPES: dict[str, Any] = {
    "BOOL": np.bool_,
    "BF16": jnp.bfloat16,
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
}


def load_params(
    directory: epath.PathLike,
    step: int | str = "newest",
    *,
    into: Any = None,
    paths: Mapping[str, str] | None = None,
    ema: bool = False,
) -> Any:
    """Loads only the parameters from a checkpoint or a safetensors file.

    >>> import jax, optax, tempfile, jaxloop
    >>> from jaxloop.checkpoint import CheckpointWriter
    >>> from flax import linen as nn
    >>> step = jaxloop.LossStep(jax.random.key(0), nn.Dense(2), optax.adam(1e-3), train=True, loss=lambda x, batch: x)
    >>> state, directory = step.initialize_model([1, 3]), tempfile.mkdtemp()
    >>> with contextlib.closing(CheckpointWriter(directory)) as writer:
    ...     _ = writer.save(100, state)
    >>> params = load_params(directory)
    >>> nn.Dense(2).apply({"params": params}, jnp.ones([5, 3])).shape
    (5, 2)
    >>> encoder = {"encoder": {"kernel": jnp.zeros([3, 2])}, "head": {"bias": jnp.zeros(7)}}
    >>> loaded = load_params(directory, 100, into=encoder, paths={"kernel": "encoder/kernel"})
    >>> bool((loaded["encoder"]["kernel"] == params["kernel"]).all()), loaded["head"]["bias"].shape
    (True, (7,))

    Args:
      directory: The directory with one subdirectory per step, saved by a `CheckpointAction`, or by an Orbax manager
        that used `PyTreeSave`. Alternatively, a file whose name ends in `.safetensors`; see `save_params`.
      step: The step of the checkpoint; "newest" for the newest undamaged one, or "best" for the one at step
        `best_step(directory)`.
      into: A tree of arrays or `jax.ShapeDtypeStruct`s, such as `state.params`, that determines the structure, shapes,
        dtypes and shardings of the result. It is not donated. If None, nested dicts of arrays on JAX's default device
        are returned.
      paths: A dict that maps patterns of paths in the checkpoint to paths in `into`, as in `{"encoder/**":
        "backbone/**"}`; see `jaxloop.base.path_patterns`. Other leaves of `into`, which must be arrays, are returned
        unchanged. If None, every leaf of `into` is loaded from the same path.
      ema: Whether to load the parameters' moving average (from `LossStep(ema=...)` or `jaxloop.optimizers.ema`) instead
        of the parameters themselves.

    Returns:
      The parameters, in the structure of `into`.

    Raises:
      FileNotFoundError: If there is no such checkpoint.
      CheckpointError: If files of the checkpoint are damaged. The error lists them.
      ValueError: If the checkpoint has no parameters or no average, if a leaf differs in path, shape or dtype, or if a
        pattern matches nothing. The error lists the leaves. A damaged safetensors file also raises this error.
    """
    if not is_safetensors(directory):
        load = lambda opened: _load_below(opened, _path_of_ema(opened) if ema else "params", into, paths)
        return _load(directory, step, load)
    if ema or step != "newest":
        raise ValueError(f"A safetensors file has neither steps nor an average, got {step=}, {ema=}. Leave them out.")
    file = SafetensorsFile(directory)
    return _load_part(file, {path: path for path in file.leaves}, into, paths)


def load_variables(directory: epath.PathLike, step: int | str = "newest", *, into: Any = None) -> Any:
    """Loads all variables of a model from a checkpoint, but not the optimizer state.

    For a Linen model, the result is what `module.apply` accepts: `{"params": ..., "batch_stats": ..., **collections}`.
    For an NNX model, it is a dict with `params`, `batch_stats` and `collections`, the fields of a `TrainState`.

    Args:
      directory: See `load_params`.
      step: See `load_params`.
      into: A dict of the same form as the result. It determines the result's structure, shapes, dtypes and shardings.
        For a Linen model, pass `state.variables`; for an NNX model, pass a dict of the state's `params`, `batch_stats`
        and `collections`. If None, nested dicts of arrays on JAX's default device are returned.

    Raises:
      FileNotFoundError: If there is no such checkpoint.
      CheckpointError: If files of the checkpoint are damaged. The error lists them.
      ValueError: If the checkpoint has no parameters, or if a leaf differs in path, shape or dtype.
    """

    def load(opened: Checkpoint) -> dict[str, Any]:
        saved = {path.partition("/")[0] for path in opened.leaves}
        at = {name: name for name in ("params", "batch_stats", "collections") if name == "params" or name in saved}
        is_nnx = all(path.endswith("/value") for path in opened.leaves if path.startswith("params/"))
        if not is_nnx and at.pop("collections", None):
            collections = [path.split("/")[1] for path in opened.leaves if path.startswith("collections/")]
            at |= {name: f"collections/{name}" for name in collections}
        if into is not None:
            at = {name: at.get(name, name) for name in map(str, into)}
        return {name: _load_below(opened, place, into and into[name]) for name, place in at.items()}

    return _load(directory, step, load)


def _load(directory: epath.PathLike, step: int | str, load: Callable[[Checkpoint], Any]) -> Any:
    """Calls `load` with the checkpoint of `step`, which can also be "newest" or "best"."""
    if step == "newest":
        found = read.open_newest(all_paths([directory]), load, quarantines=False)
        if found is None:
            raise missing_error(directory)
        return found[1]
    found = read.best_step(directory) if step == "best" else step
    if found is None:
        if not all_steps(directory):
            raise missing_error(directory)
        raise FileNotFoundError(
            f"No checkpoint in {directory} is known to be the best. Save them with CheckpointAction(directory, "
            'best=...), or give a step, or "newest".'
        )
    if not isinstance(found, int) or isinstance(found, bool):
        raise ValueError(f'step must be an int, "newest" or "best", got {step!r}.')
    return load(Checkpoint.at(directory, found, read.STATE))


def _path_of_ema(opened: Checkpoint) -> str:
    """Returns the path of the parameters' moving average in the saved train state."""
    place = read.place_of_ema(opened.leaves)
    if place is None:
        raise ValueError(
            f"The checkpoint {opened.path} has no average of the parameters. LossStep(ema=...) and "
            "jaxloop.optimizers.ema keep one."
        )
    return f"{place}/{read.AVERAGE}"


def _load_below(opened: Checkpoint, name: str, into: Any, paths: Mapping[str, str] | None = None) -> Any:
    """Loads the part of the train state below the path `name`; see `load_params`."""
    saved = {path.removeprefix(f"{name}/"): path for path in opened.leaves if path.startswith(f"{name}/")}
    if not saved and (into is None or jax.tree.leaves(into)):
        raise ValueError(
            f"The checkpoint {opened.path} has no {name!r}. It contains {checks.listed(list(opened.leaves))}."
        )
    return _load_part(opened, saved, into, paths)


def _load_part(source: Any, saved: Mapping[str, str], into: Any, paths: Mapping[str, str] | None) -> Any:
    """Reads leaves of a `Checkpoint` or a `SafetensorsFile`; see `load_params`.

    Args:
      source: The `Checkpoint` or `SafetensorsFile` to read from.
      saved: A dict that maps the path of each leaf within the part to its path in the source.
      into: See `load_params`.
      paths: See `load_params`.
    """
    if into is None:
        ours = {path: _on_default_device(source.leaves[at]) for path, at in saved.items()}
        wide = [path for path, leaf in ours.items() if jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype]
        if wide:
            raise ValueError(
                f"{source.path} has 64-bit leaves, which JAX would truncate: {checks.listed(wide)}. Enable "
                "jax_enable_x64, or give NumPy arrays of these dtypes as `into`."
            )
    else:
        is_shape = lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is None
        ours = {
            path: _on_default_device(leaf) if is_shape(leaf) else leaf
            for path, leaf in checks.leaves_by_path(into).items()
        }
    found = stored.match(saved, ours, paths, only_renamed=paths is not None)
    if paths is not None:
        missing = [path for path, leaf in ours.items() if path not in found and isinstance(leaf, jax.ShapeDtypeStruct)]
        if missing:
            raise ValueError(
                f"No pattern in `paths` maps a saved leaf to {missing[0]}, for which `into` has only a shape. Give an "
                "array, or add a pattern."
            )
        ours = {path: leaf for path, leaf in ours.items() if path in found}
    stored.check_fits(source.path, {name: source.leaves[path] for name, path in found.items()}, ours, "tree")
    values = stored.load(source, found, ours)
    return _nested(values) if into is None else stored.with_values(into, values)


def _on_default_device(leaf: Any) -> jax.ShapeDtypeStruct:
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device)


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns nested dicts with the values at their paths. The final `value` in the paths of NNX variables is dropped.

    >>> _nested({"Dense_0/kernel": 1, "Dense_0/bias": 2})
    {'Dense_0': {'kernel': 1, 'bias': 2}}
    """
    result: dict[str, Any] = {}
    is_nnx = all(path.endswith("/value") for path in values)
    for path, value in values.items():
        *parents, name = (path.removesuffix("/value") if is_nnx else path).split("/")
        node = result
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise ValueError(
                    f"There is a leaf at {path}, and also one at the beginning of this path, so they can't be nested "
                    "in dicts. Give `into` and `paths`."
                )
        node[name] = value
    return result


def save_params(params: Any, path: epath.PathLike) -> None:
    """Writes parameters to a file in the safetensors format, which other libraries can also read.

    `load_params` reads such files, including those written by other libraries. Both functions need the `safetensors`
    extra. In the file, the slashes of jaxloop's paths are replaced by dots: `encoder/kernel` becomes `encoder.kernel`.
    The values are not changed. Note that a PyTorch `Linear` expects the transpose of a Flax kernel.

    >>> import tempfile
    >>> path = tempfile.mkdtemp() + "/weights.safetensors"
    >>> save_params({"encoder": {"kernel": jnp.ones([3, 2])}}, path)
    >>> load_params(path)["encoder"]["kernel"].shape
    (3, 2)

    Args:
      params: A tree of arrays (on any devices), such as `state.params`. It is not donated.
      path: The path of the file to write. It must end in `.safetensors`. An existing file is replaced once the new file
        is complete.

    Raises:
      ValueError: If the file name, the name of a leaf, or the dtype of a leaf is not supported.
      ImportError: If the `safetensors` package is not installed.
      OSError: If the file can't be written.
    """
    checks.check_only_process("save_params")
    if not is_safetensors(path):
        raise ValueError(f"save_params writes a file whose name ends in .safetensors, got {os.fspath(path)!r}.")
    tensors, leaves = {}, checks.leaves_by_path(params)
    is_nnx = all(name.endswith("/value") for name in leaves)
    for name, leaf in leaves.items():
        name = name.removesuffix("/value") if is_nnx else name
        if "." in name:
            raise ValueError(f"Names in a safetensors file have dots instead of slashes, so {name!r} can't have dots.")
        tensors[name.replace("/", ".")] = np.asarray(fetch(leaf), order="C")
        if tensors[name.replace("/", ".")].dtype not in map(np.dtype, _DTYPES.values()):
            raise ValueError(f"save_params can't write {name!r}, {checks.describe(leaf)}. Cast it or leave it out.")
    target = files.absolute(path)
    files.prepare_directory(target.parent)
    unfinished = target.with_name(f"{target.name}.tmp")
    _library().numpy.save_file(tensors, os.fspath(unfinished), metadata={"format": "jax"})
    unfinished.replace(target)


def is_safetensors(path: epath.PathLike) -> bool:
    """Returns whether a path ends in `.safetensors`.

    >>> is_safetensors("weights.safetensors"), is_safetensors("runs/7/checkpoints")
    (True, False)
    """
    return os.fspath(path).endswith(".safetensors")


def _library() -> Any:
    try:
        import safetensors.numpy
    except ImportError:
        raise ImportError("A .safetensors file needs the package safetensors: pip install safetensors") from None
    return safetensors


@final
class SafetensorsFile:
    """A safetensors file that can be read like a `Checkpoint`. Dots in tensor names become slashes.

    Attributes:
      path: The path of the file.

    Raises:
      FileNotFoundError: If the file doesn't exist.
      ValueError: If the file is damaged or contains a tensor with an unsupported dtype.
    """

    def __init__(self, path: epath.PathLike):
        self.path: epath.Path = files.absolute(path)

    @functools.cached_property
    def leaves(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes and dtypes of the tensors, keyed by path."""
        leaves = {}
        with self._open() as file:
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                if part.get_dtype() not in _DTYPES:
                    raise ValueError(f"{self.path} contains {name!r} with the unsupported dtype {part.get_dtype()}.")
                path = name.replace(".", "/")
                if path in leaves:
                    raise ValueError(f"{self.path} has tensors whose names differ only in dots and slashes.")
                leaves[path] = jax.ShapeDtypeStruct(part.get_shape(), _DTYPES[part.get_dtype()])
        return leaves

    def read(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the leaves at the given paths. Each device reads only its own shard.

        Args:
          wanted: A dict that maps each path to an array or a `jax.ShapeDtypeStruct`, which determines the leaf's shape
            and sharding. A leaf without a sharding is read as a NumPy array.
        """
        values = {}
        for group in stored.groups(wanted):
            with self._open() as file:  # Reopened, because everything read from an open file stays in memory.
                names = {name.replace(".", "/"): name for name in file.keys()}  # noqa: SIM118
                values |= {path: _read_leaf(file, names[path], leaf) for path, leaf in group.items()}
        return values

    @contextlib.contextmanager
    def _open(self) -> Iterator[Any]:
        library = _library()
        files.open_file(self.path, "rb").close()  # Rejects directories and pipes.
        try:
            with library.safe_open(os.fspath(self.path), framework="np") as file:
                yield file
        except library.SafetensorError as error:
            raise ValueError(f"{self.path} is damaged, or not a safetensors file: {error}") from error


def _read_leaf(file: Any, name: str, leaf: Any) -> Any:
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        return file.get_tensor(name)
    if not math.prod(leaf.shape[1:]) or not leaf.shape or not leaf.shape[0]:  # The library can't slice these.
        value = file.get_tensor(name)
        return jax.make_array_from_callback(leaf.shape, sharding, lambda index: value[index])
    return jax.make_array_from_callback(leaf.shape, sharding, lambda index: file.get_slice(name)[index])
