"""The state: the one that is given, in shapes, and the one that a step makes of it."""

import dataclasses
from typing import Any, final

import jax

from jaxloop import checks
from jaxloop.preflight.findings import Findings
from jaxloop.step import Step, Traced


@final
@dataclasses.dataclass(frozen=True)
class State:
    """The state that is given.

    Attributes:
      shapes: it in shapes; None where there is none to begin with.
      values: itself; None where it is given in shapes.
    """

    shapes: Any
    values: Any


def look_at_state(given: Any, found: Findings) -> State:
    """Looks whether a run can begin with a state."""
    values = None
    with found.finding("the state"):
        if given is None:
            raise TypeError("The state is None. Give that of step.initialize_model(...), or its shapes.")
        checks.check_alive(given, "OuterLoop(...)")
        if not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(given)):
            given = values = checks.adopt(given)
        shapes = jax.tree.map(_shape_of, given)
        step = getattr(shapes, "step", None)
        checks.check_counter(step, is_scalar=step is None or not step.shape)
        return State(shapes, values)
    return State(None, values)


def look_at_new_state(where: str, step: Step, state: Any, traced: Traced, found: Findings) -> None:
    """Says where a training step counts wrongly, or makes a state for which it is compiled anew."""
    if hasattr(state, "step") and traced.updates not in (None, step.updates_per_step):
        adds = f"adds {traced.updates} to state.step" if traced.updates else "returns state.step as it was"
        found.add(where, f"{type(step).__name__}.run {adds}. {checks.ways_to_count(step)}")
    before, after = checks.leaves_by_path(state), checks.leaves_by_path(traced.state)
    for what, one, other in (
        (f"{type(step).__name__}.run returns", after, before),
        ("The state that is given has", before, after),
    ):
        weak = [path for path, leaf in one.items() if _is_weak(leaf) and not _is_weak(other[path])]
        if weak:
            found.warn(
                where,
                f"{what} weakly typed leaves ({', '.join(weak[:4])}), so that run is compiled twice. A number such as "
                "jnp.asarray(0.0) is weakly typed, jnp.float32(0.0) is not.",
            )


def _shape_of(leaf: Any) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding, weak_type=_is_weak(leaf))


def _is_weak(leaf: Any) -> bool:
    return bool(getattr(leaf, "weak_type", False))
