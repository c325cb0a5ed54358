"""Functions that load parameters from checkpoints and exchange parameters with other libraries.

Parameters are exchanged as files in the safetensors format, which many libraries support.
"""

import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, final

import jax
import numpy as np
from etils import epath
from flax import traverse_util

from jaxloop.base import checks, files
from jaxloop.checkpoint import read, stored
from jaxloop.checkpoint.listing import all_paths, missing_error
from jaxloop.checkpoint.read import Checkpoint
from jaxloop.metrics import fetch


def load_params(
    directory: epath.PathLike,
    step: int | str = "newest",
    *,
    into: Any = None,
    paths: Mapping[str, str] | None = None,
    ema: bool = False,
    member: int | None = None,
) -> Any:
    """Loads only the parameters from a checkpoint or a safetensors file.

    >>> import contextlib, jax, optax, tempfile, jaxloop
    >>> import jax.numpy as jnp
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
      directory: A directory of checkpoints that were saved by a `CheckpointAction`, or by an Orbax manager with
        `PyTreeSave`. Alternatively, a file whose name ends in `.safetensors`; see `save_params`.
      step: The step of the checkpoint, "newest" for the newest undamaged checkpoint, or "best" for the best
        checkpoint; see `best_step`.
      into: A tree of arrays or `jax.ShapeDtypeStruct`s, such as `state.params`, that determines the structure, shapes,
        dtypes and shardings of the result. It is not donated. If None, nested dicts of arrays on JAX's default device
        are returned. Values that JAX would truncate to 32 bits are returned as NumPy arrays.
      paths: A dict that maps patterns for paths in the checkpoint to paths in `into`, as in `{"encoder/**":
        "backbone/**"}`; see `jaxloop.base.path_patterns`. A leaf of `into` for which no saved leaf is found must be an
        array, and is returned unchanged. If `paths` is None, each leaf of `into` is loaded from the same path in the
        checkpoint.
      ema: Whether to load the parameters' moving average (from `LossStep(ema=...)` or `jaxloop.optimizers.ema`) instead
        of the parameters themselves.
      member: The index of the member to load from a checkpoint of a `jaxloop.Ensemble`. This can't be combined with
        `into`.

    Returns:
      The parameters, with the structure of `into` (as nested dicts if `into` is None).

    Raises:
      FileNotFoundError: If there is no such checkpoint.
      CheckpointError: If files of the checkpoint are damaged. The message lists these files.
      ValueError: If the checkpoint lacks the parameters or (with `ema`) their average, if a leaf differs in path,
        shape or dtype, if a pattern matches no leaf, or if a safetensors file is damaged. The message lists the leaves
        that differ.
    """
    if member is not None:
        if into is not None:
            raise ValueError(
                "load_params takes either member or into. Without into, it returns nested dicts of arrays."
            )
        params = load_params(directory, step, paths=paths, ema=ema)
        number = min(np.shape(leaf)[0] if np.ndim(leaf) else 0 for leaf in jax.tree.leaves(params))
        if member not in range(number):
            raise ValueError(f"{directory} has {number} members, got member={member}.")
        return jax.tree.map(lambda leaf: leaf[member], params)
    if not is_safetensors(directory):
        return _load(directory, step, lambda opened: _load_part(opened, _saved_params(opened, ema), into, paths))
    if ema or step != "newest":
        raise ValueError(f"A safetensors file has neither steps nor an average, got {step=}, {ema=}. Leave them out.")
    file = SafetensorsFile(directory)
    return _load_part(file, {path: path for path in file.leaves}, into, paths)


def _load(directory: epath.PathLike, step: int | str, load: Callable[[Checkpoint], Any]) -> Any:
    """Opens a checkpoint, passes it to the function `load`, and returns the result.

    `step` is either the number of a step, or one of the strings "newest" and "best"; see `load_params`.
    """
    if step == "newest":
        found = read.open_newest(all_paths([directory]), load, quarantines=False)
        if found is None:
            raise missing_error(directory)
        return found[1]
    chosen: Any = read.best_step(directory) if step == "best" else step
    if chosen is None:
        raise FileNotFoundError(
            f"No checkpoint in {directory} is known to be the best. Save them with CheckpointAction(directory, "
            'best=...), or give a step, or "newest".'
        )
    return load(Checkpoint.at(directory, chosen, read.STATE))


def _saved_params(opened: Checkpoint, ema: bool) -> dict[str, str]:
    """Returns a dict that maps the path of each parameter in the model to its path in the saved train state.

    If `ema` is True, each parameter's path in the model is mapped to the path of its moving average instead.
    """
    start = f"{read.place_of_ema(opened.leaves)}/{read.AVERAGE}/" if ema else "params/"
    saved = {path.removeprefix(start): path for path in opened.leaves if path.startswith(start)}
    if not saved:
        what = "average of the parameters, as LossStep(ema=...) keeps it" if ema else "parameters"
        raise ValueError(
            f"The checkpoint {opened.path} has no {what}. It contains {checks.listed(list(opened.leaves))}."
        )
    return saved


def _load_part(source: Any, saved: Mapping[str, str], into: Any, paths: Mapping[str, str] | None) -> Any:
    """Reads parameters from a `Checkpoint` or a `SafetensorsFile`; see `load_params`.

    Args:
      source: The `Checkpoint` or `SafetensorsFile` to read from.
      saved: A dict that maps the path of each parameter in the model to its path in the source.
      into: See `load_params`.
      paths: See `load_params`.
    """
    if into is None:
        ours = {path: _on_default_device(source.leaves[at]) for path, at in saved.items()}
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
    is_wide = jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype  # JAX would truncate it.
    sharding = None if is_wide else jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Converts a dict with paths as keys to nested dicts.

    If all paths end in `/value`, as those of NNX variables do, this suffix is dropped.

    >>> _nested({"Dense_0/kernel": 1, "Dense_0/bias": 2})
    {'Dense_0': {'kernel': 1, 'bias': 2}}
    """
    is_nnx = all(path.endswith("/value") for path in values)
    return traverse_util.unflatten_dict(
        {path.removesuffix("/value") if is_nnx else path: value for path, value in values.items()}, sep="/"
    )


def save_params(params: Any, path: epath.PathLike) -> None:
    """Writes parameters to a file in the safetensors format, which other libraries can also read.

    `load_params` reads such files, including those written by other libraries. Writing and reading them requires the
    `safetensors` extra. In the file, dots replace the slashes of jaxloop's paths: `encoder/kernel` becomes
    `encoder.kernel`. The values are not changed. Note that a PyTorch `Linear` expects the transpose of a Flax kernel.

    >>> import jax.numpy as jnp, tempfile
    >>> path = tempfile.mkdtemp() + "/weights.safetensors"
    >>> save_params({"encoder": {"kernel": jnp.ones([3, 2])}}, path)
    >>> load_params(path)["encoder"]["kernel"].shape
    (3, 2)

    Args:
      params: A tree of arrays (on any devices), such as `state.params`. It is not donated.
      path: The path of the file to write. It must end in `.safetensors`. An existing file is replaced once the new file
        is complete.

    Raises:
      ValueError: If the file name or the name of a leaf is not supported.
      ImportError: If the `safetensors` package is not installed.
      OSError: If the file can't be written.
    """
    from safetensors import numpy

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
    target = files.absolute(path)
    files.prepare_directory(target.parent)
    unfinished = target.with_name(f"{target.name}.tmp")
    numpy.save_file(tensors, os.fspath(unfinished), metadata={"format": "jax"})
    unfinished.replace(target)


def is_safetensors(path: epath.PathLike) -> bool:
    """Returns True if a path ends in `.safetensors`.

    >>> is_safetensors("weights.safetensors"), is_safetensors("runs/7/checkpoints")
    (True, False)
    """
    return os.fspath(path).endswith(".safetensors")


@final
class SafetensorsFile:
    """A safetensors file that can be read like a `Checkpoint`. Dots in the tensors' names become slashes in the paths.

    Attributes:
      path: The path of the file.
      leaves: The tensors, in host memory, keyed by path.

    Raises:
      FileNotFoundError: If the file doesn't exist.
      ValueError: If the file is damaged or isn't a safetensors file, or if the paths of two tensors are the same or
        conflict, as `a` and `a/b` do.
    """

    def __init__(self, path: epath.PathLike):
        from safetensors import SafetensorError, safe_open

        self.path: epath.Path = files.absolute(path)
        files.open_file(self.path, "rb").close()  # Rejects directories and pipes.
        try:
            with safe_open(os.fspath(self.path), framework="np") as file:
                names = {name: name.replace(".", "/") for name in file.keys()}  # noqa: SIM118
                self.leaves: dict[str, np.ndarray] = {path: file.get_tensor(name) for name, path in names.items()}
        except (SafetensorError, AttributeError) as error:  # `AttributeError` for dtypes that NumPy lacks.
            raise ValueError(f"{self.path} is damaged, or not a safetensors file: {error}") from error
        inner = {str(parent) for path in self.leaves for parent in pathlib.PurePosixPath(path).parents}
        if len(self.leaves) < len(names) or not inner.isdisjoint(self.leaves):
            raise ValueError(f"{self.path} has tensors whose names differ only in dots and slashes, or extend another.")

    def read(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the leaves at the paths in `wanted`, with the shardings that `wanted` specifies.

        Leaves without a sharding in `wanted` are returned as NumPy arrays.
        """
        return {path: _placed(self.leaves[path], getattr(leaf, "sharding", None)) for path, leaf in wanted.items()}


def _placed(value: np.ndarray, sharding: jax.sharding.Sharding | None) -> Any:
    if sharding is None:
        return value
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])
