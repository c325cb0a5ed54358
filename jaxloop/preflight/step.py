"""The step: a batch's way through its hooks, and a trace of `run`."""

import dataclasses
import inspect
from typing import Any, final

import jax
import numpy as np
from flax import linen as nn

from jaxloop import checks, metrics, types
from jaxloop.action_loop import ActionLoop
from jaxloop.layout import bytes_of, readable
from jaxloop.preflight.findings import Findings
from jaxloop.preflight.state import State, look_at_new_state
from jaxloop.step import NO_OPTIMIZER, Step

# More than so much of what steps return is too much to keep until the end of a loop.
_MOST_OUTPUT_BYTES = 2**30


@final
@dataclasses.dataclass(frozen=True)
class Foreseen:
    """What is known of a loop's steps.

    Attributes:
      outputs: like those of the loop; None where nobody knows them: with an error, and where a method of the user may
        add to them.
      is_open: whether only a run can tell what `run` gets.
    """

    outputs: metrics.LoopOutputs | None = None
    is_open: bool = False


def look_at_step(
    where: str,
    loop: ActionLoop,
    state: State,
    batch: types.Batch,
    found: Findings,
    *,
    evaluates: bool = False,
    longest_loop: int | None = None,
) -> Foreseen:
    """Takes a batch through a step's hooks and traces `run`.

    Args:
      evaluates: whether it is done as in an evaluation.
      longest_loop: so many batches in the longest loop, for which outputs are kept; None if nobody knows.
    """
    step = loop.step
    with found.finding(where):
        if evaluates:
            step.begin_evaluation()
        known = _ready_for_run(loop, state, batch)
        if known is None:
            return Foreseen(is_open=True)
        (ready,) = known
        if not _can_be_traced(where, step, batch, ready, found):
            return Foreseen()
        if not evaluates:
            with found.finding(where):
                step.shard_batch(ready)
        traced = step.trace(state.shapes, ready, evaluates=evaluates)
        if not evaluates:
            look_at_new_state(where, step, state.shapes, traced, found)
        hooks = ((step, "end"), (loop, "end"), (loop, "update_outputs"))
        if any(checks.is_of_user(thing, name) for thing, name in hooks):
            return Foreseen()
        _look_at_size(where, traced.outputs, longest_loop, found)
        _look_for_losses_per_example(where, traced.outputs, found)
        return Foreseen(_like_those_of_a_loop(traced.outputs))
    return Foreseen()


def state_for_begin(state: State, step: Step) -> Any:
    """The state for a step's `begin`: a `begin` of the user may want its values."""
    return state.shapes if state.values is None or not checks.is_of_user(step, "begin") else state.values


def _ready_for_run(loop: ActionLoop, state: State, batch: types.Batch) -> tuple[types.Batch] | None:
    """Returns a tuple with a batch as the hooks before `run` leave it; None where only a run can tell.

    So it is where the user has another way to `run`, and where `begin` wants values of a state that is given in
    shapes, or makes another one.
    """
    step = loop.step
    ways = {step: ("__call__", "evaluate", "shard_batch"), loop: ("begin", "run", "_get_next_batch", "_run_one_step")}
    if any(checks.is_of_user(thing, name) for thing, names in ways.items() for name in names):
        return None
    given = state_for_begin(state, step)
    if not checks.is_of_user(step, "begin"):
        return step.before_run(given, batch)[1:]
    preprocessed = step.preprocessed(batch)
    try:
        result = step.begin(given, preprocessed)
    except Exception:
        if state.values is None:
            return None
        raise
    new_state, ready = checks.check_pair(result, f"{type(step).__name__}.begin", "(state, batch)")
    return (ready,) if new_state is given else None


def _can_be_traced(where: str, step: Step, batch: types.Batch, ready: types.Batch, found: Findings) -> bool:
    """Says what is wrong with a batch that is ready for `run`; returns whether it can be traced."""
    problems = list(checks.problems_of_batch(ready))
    for problem in problems:
        found.add(where, problem)
    if problems:
        return False
    with found.finding(where):
        if changed := checks.problem_of_dtypes(ready):
            found.warn(where, changed)
    if checks.num_examples(batch) is None and not checks.is_of_user(step, "num_examples"):
        found.warn(
            where,
            "Each batch counts as one example, because its leaves don't share a leading axis: "
            f"{checks.batch_in_words(batch)}. Override Step.num_examples(batch) for weighted means.",
        )
    return True


def _look_for_losses_per_example(where: str, outputs: types.Output, found: Findings) -> None:
    """Warns of outputs that are missing in the history because they are arrays: losses, or all of them."""
    is_array = lambda value: not metrics.is_metric(value) and hasattr(value, "shape") and value.ndim > 0
    arrays = {name: value for name, value in (outputs or {}).items() if is_array(value)}
    losses = [name for name in arrays if "loss" in name.lower()]
    missing = list(arrays) if len(arrays) == len(outputs or {}) else losses
    if missing:
        shown = ", ".join(f"{name!r}, {checks.describe(arrays[name])}" for name in missing)
        found.warn(
            where,
            f"The history holds scalars, so it would have nothing of {shown}. Return the mean over the examples, or a "
            "clu metric.",
        )


def look_at_optimizer(where: str, step: Step, state: Any, found: Findings) -> None:
    """Warns of a training step that adds the gradients to the parameters."""
    if step.train and getattr(state, "tx", None) is NO_OPTIMIZER:
        found.warn(
            where,
            f"{type(step).__name__} has train=True and no optimizer, so state.apply_gradients adds the gradients to "
            "the parameters, and the loss grows. Give it an Optax transformation: Step(base_prng, model, "
            "optax.adam(1e-3), ...).",
        )


def look_at_model(where: str, step: Step, train_step: Step, found: Findings) -> None:
    """Warns of an evaluation by a step whose model is not that of the state."""
    trained, evaluated = train_step.model, step.model
    if not _is_same_model(trained, evaluated):
        found.warn(
            where,
            f"Its step has the model {_shown_model(evaluated)}, and the train step has {_shown_model(trained)}. The "
            "state is that of the train step, so state.apply_fn calls the latter. Give both steps one model.",
        )


def _is_same_model(one: Any, other: Any) -> bool:
    is_comparable = lambda model: isinstance(model, nn.Module) or inspect.isclass(model)
    if one is other or one is None or other is None:
        return True
    return one == other if is_comparable(one) and is_comparable(other) else type(one) is type(other)


def _shown_model(model: Any) -> str:
    return model.__name__ if inspect.isclass(model) else " ".join(repr(model).replace("# attributes", "").split())


def _look_at_size(where: str, outputs: types.Output, longest_loop: int | None, found: Findings) -> None:
    """Says where what the steps return, which is kept until the loop ends, is very much."""
    sizes = {name: bytes_of(value) for name, value in (outputs or {}).items() if not metrics.is_metric(value)}
    largest = max(sizes, key=lambda name: sizes[name], default=None)
    if longest_loop is None or largest is None or sum(sizes.values()) * longest_loop <= _MOST_OUTPUT_BYTES:
        return
    found.warn(
        where,
        f"What a loop's {longest_loop:,} steps return is kept on the host until the loop ends, which takes "
        f"{readable(sum(sizes.values()) * longest_loop)}, the most of it for the output {largest!r}, "
        f"{readable(sizes[largest])} a step. Return less of it, or have shorter loops (train_loop_steps).",
    )


def _like_those_of_a_loop(outputs: types.Output) -> metrics.LoopOutputs:
    # Not zeros, by which a metric may divide.
    ones = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), outputs or {})
    return metrics.LoopOutputs({name: [metrics.fetch(value)] for name, value in ones.items()}, [1])
