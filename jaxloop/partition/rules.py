"""The partitioner that shards the state according to rules for the paths of its leaves."""

import math
import re
from typing import final

import numpy as np
from absl import logging
from jax.sharding import Mesh, PartitionSpec

from jaxloop.base import checks
from jaxloop.partition.laid_out import _LeafPartitioner
from jaxloop.partition.meshes import names_of
from jaxloop.partition.partitioner import SMALL, Rules


@final
class RulesPartitioner(_LeafPartitioner):
    r"""Shards a state by rules that match the paths of its leaves, for models without partitioning metadata.

    A rule consists of a regular expression, which is searched for in each leaf's path, and a `PartitionSpec`, which
    names axes of the mesh. The first matching rule applies. Paths start at the root of the state, so the rule
    `Dense_0/kernel` matches `params/Dense_0/kernel`, and also the optimizer's moment estimates for that parameter.

    >>> from jaxloop.partition import create_mesh
    >>> mesh = create_mesh(data=-1, model=1)
    >>> partitioner = RulesPartitioner(mesh, "data", rules=[(r"Dense_\d+/kernel", PartitionSpec(None, "model"))])

    Leaves without a matching rule are replicated. Warnings list large leaves without a matching rule, and rules that
    don't match any leaf.

    Args:
      mesh: See `MeshPartitioner`.
      data_axis: See `MeshPartitioner`.
      rules: Pairs of a regular expression and a `PartitionSpec`.

    Raises:
      ValueError: If a rule names an axis that isn't in the mesh. Laying out a state raises the same error if a rule
        splits an axis that a parameter doesn't have, or an axis that can't be divided evenly among the devices.
    """

    def __init__(self, mesh: Mesh, data_axis: str, rules: Rules):
        super().__init__(mesh, data_axis)
        self._rules = [(re.compile(pattern), PartitionSpec(*(spec or ()))) for pattern, spec in rules]
        for pattern, spec in self._rules:
            for entry in spec:
                self._check_axes(entry, f"The rule {pattern.pattern!r} splits over")

    def _lay_out(self, state):
        leaves, is_known = checks.leaves_by_path(state), self._sharding is not None
        super()._lay_out(state)
        if is_known:  # The warnings have already been logged.
            return
        for pattern, spec in self._rules:
            if not any(pattern.search(path) for path in leaves):
                logging.warning("The rule (%r, %s) matches no leaf of the state.", pattern.pattern, spec)
        large = [path for path, leaf in leaves.items() if np.size(leaf) >= SMALL and self._rule_for(path) is None]
        if large:
            logging.warning(
                "No rule matches %s, so it is replicated. If you want that, add the rule ('', P()) at the end.",
                checks.listed(large, show=6),
            )

    def _rule_for(self, path: str) -> tuple[re.Pattern[str], PartitionSpec] | None:
        return next(((pattern, spec) for pattern, spec in self._rules if pattern.search(path)), None)

    def _spec_of(self, path, leaf):
        rule = self._rule_for(path)
        if rule is None:
            return PartitionSpec()
        pattern, spec = rule
        shape = np.shape(leaf)
        problem = self._problem_of(spec, shape)
        # In the optimizer state, a parameter's leaf may have fewer axes.
        if problem and path.startswith("opt_state"):
            return PartitionSpec()
        if problem:
            raise ValueError(
                f"The rule ({pattern.pattern!r}, {spec}) can't be applied to {path}, {checks.describe(leaf)}: "
                f"{problem}. Change the rule, add one for this leaf before it, or change the sizes of the model or the "
                "mesh."
            )
        return spec

    def _problem_of(self, spec: PartitionSpec, shape: tuple[int, ...]) -> str:
        if len(spec) > len(shape):
            return f"it has {len(shape)} axes, but the rule has {len(spec)}"
        for axis, (size, names) in enumerate(zip(shape, spec, strict=False)):
            shards = math.prod(self._mesh.shape[name] for name in names_of(names))
            if size % shards:
                return f"its axis {axis} of size {size} can't be divided evenly among the {shards} devices of {names!r}"
        return ""

    def _reason_not_split(self, path, leaf):
        rule = self._rule_for(path)
        if rule is None:
            return "no rule matches it"
        problem = self._problem_of(rule[1], np.shape(leaf))
        return f"the rule {rule[0].pattern!r}" + (f": {problem}" if problem else " replicates it")
