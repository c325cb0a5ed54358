"""The partitioner that splits the state according to the model's annotations."""

import contextlib
import functools
import re
from collections.abc import Callable
from typing import Any, final

import jax
from absl import logging
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxloop.partition.laid_out import _LaidOutPartitioner, boxes_of, unboxing
from jaxloop.partition.meshes import mesh_for_tracing, names_of
from jaxloop.partition.partitioner import Rules
from jaxloop.types import nnx


@final
class SPMDPartitioner(_LaidOutPartitioner):
    """Splits the state according to the model's Flax partitioning metadata, and the batch over `data_axis`.

    In Linen modules, the names in `nn.with_partitioning(init, (None, "model"))` must be axes of the mesh, whereas those
    in `nn.with_logical_partitioning` are logical names. In NNX modules, `nnx.with_partitioning(init, (None, "model"))`
    accepts both kinds of names. `logical_axis_rules` maps logical names to axes of the mesh. Leaves without metadata
    are replicated. The state is returned unboxed: its leaves are plain arrays.

    >>> from jaxloop.partition import create_mesh
    >>> rules = [("embed", None), ("hidden", "model")]
    >>> partitioner = SPMDPartitioner(create_mesh(data=-1, model=1), "data", logical_axis_rules=rules)

    Args:
      mesh: See `MeshPartitioner`.
      data_axis: See `MeshPartitioner`.
      logical_axis_rules: Pairs `(logical name, axes)`, where `axes` is a mesh axis, a tuple of mesh axes, or None. As
        in Flax, an axis of a Linen module isn't split if there is no rule for its logical name (such names are logged).
        `nn.with_logical_constraint` also uses these rules inside `run`.

    Raises:
      ValueError: If a rule names an axis that isn't in the mesh. Laying out a state raises the same error if the model
        uses a name that is neither an axis of the mesh nor a logical name with a rule.
    """

    def __init__(self, mesh: Mesh, data_axis: str, logical_axis_rules: Rules = ()):
        super().__init__(mesh, data_axis)
        self._rules = tuple((name, axes) for name, axes in logical_axis_rules)
        self._unsharded: set[str] = set()  # The model's logical names without a rule.
        for logical_name, axes in self._rules:
            self._check_axes(axes, f"The logical axis rule ({logical_name!r}, {axes!r}) has")

    def partition(self, fn: Callable[..., Any], **jit_kwargs: Any) -> Callable[..., Any]:
        @functools.wraps(fn)
        def with_rules(*args, **kwargs):
            with self._with_rules():
                return fn(*args, **kwargs)

        return super().partition(with_rules, **jit_kwargs)

    def shard_init_fn(self, init_fn: Callable[..., Any]) -> Callable[..., Any]:
        init_unboxed = unboxing(init_fn)

        def sharded_init(*args, **kwargs):
            # NNX creates annotated variables only if a mesh is set.
            with self._naming_explicit_partitioner(), mesh_for_tracing(self._mesh), self._with_rules():
                try:
                    annotated = jax.eval_shape(init_fn, *args, **kwargs)
                except ValueError as error:  # NNX checks the names when it creates a variable.
                    if unknown := re.search(r"Resource axis: (\S+) of .* is not found in mesh", str(error)):
                        raise self._unknown_axis(unknown[1]) from error
                    raise
                is_spec = lambda leaf: isinstance(leaf, PartitionSpec)
                # Linen and NNX each read their own annotations.
                of = nn if boxes_of(annotated) else nnx
                self._find_unsharded(annotated)
                specs = of.get_partition_spec(annotated)
                self._hold(jax.tree.map(self._sharding_of, specs, is_leaf=is_spec))
                return jax.jit(init_unboxed, out_shardings=self._sharding)(*args, **kwargs)

        return sharded_init

    def _sharding_of(self, spec: PartitionSpec | None) -> NamedSharding:
        entries, used = [], set[str]()
        for entry in spec or ():
            axes = [axis for name in names_of(entry) for axis in self._axes_of(name, used)]
            used.update(axes)
            entries.append(tuple(axes) if len(axes) > 1 else axes[0] if axes else None)
        return NamedSharding(self._mesh, PartitionSpec(*entries))

    def _find_unsharded(self, annotated: Any) -> None:
        """Finds and logs the model's logical names for which there is no rule, if any rules were passed."""
        boxes = [box for box in boxes_of(annotated) if isinstance(box, nn.LogicallyPartitioned)]
        names = {name for box in boxes for entry in box.names for name in names_of(entry)}
        known = {*self._mesh.axis_names, *(name for name, _ in self._rules)}
        self._unsharded = names - known if self._rules else set()
        if self._unsharded:
            shown = ", ".join(map(repr, sorted(self._unsharded)))
            logging.info("There is no logical axis rule for %s, so these axes are not split.", shown)

    def _axes_of(self, name: str, used: set[str]) -> tuple[str, ...]:
        """Returns the mesh axes for a name, using its first rule whose axes are still unused."""
        rules = [names_of(axes) for logical_name, axes in self._rules if logical_name == name]
        if name in self._unsharded:
            return ()
        if not rules and name not in self._mesh.axis_names:
            raise self._unknown_axis(name)
        return next((axes for axes in rules if not used.intersection(axes)), ()) if rules else (name,)

    def _with_rules(self) -> contextlib.AbstractContextManager[None]:
        return nn.logical_axis_rules(self._rules) if self._rules else contextlib.nullcontext()

    def _unknown_axis(self, name: str) -> ValueError:
        if name in dict(self._rules):
            return ValueError(
                f"The model uses the logical axis {name!r} in nn.with_partitioning, which takes axes of the mesh. "
                "Use nn.with_logical_partitioning."
            )
        return ValueError(
            f"The model uses the axis {name!r}, which is not an axis of the mesh "
            f"({', '.join(map(repr, self._mesh.axis_names))}), and there is no rule for it. Add ({name!r}, ...) to "
            "logical_axis_rules, with a mesh axis or None."
        )

    def _reason_not_split(self, path, leaf):
        return "the model does not annotate it" if self._mesh.size > 1 else ""
