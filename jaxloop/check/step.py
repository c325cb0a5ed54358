"""Checks of a loop's step: its state, hooks, `run` method and memory use."""

import contextlib
import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.extend import core as jax_core
from jax.interpreters import partial_eval

from jaxloop import metrics, partition, types
from jaxloop.base import checks
from jaxloop.check.costs import on_devices
from jaxloop.check.experiment import Part, State
from jaxloop.check.report import Findings
from jaxloop.partition.layout import Layout, bytes_of, readable
from jaxloop.step import Step
from jaxloop.step.cost import DeviceMemoryError

# The largest size of outputs that may be kept until the end of a loop without a warning.
_MOST_OUTPUT_BYTES = 2**30

# The state --------------------------------------------------------------------------------------------------


def check_state(given: Any, here: Findings) -> State:
    """Checks the state that was passed to `OuterLoop.check`. Returns the state's shapes and values."""
    values = None
    with here:
        if given is None:
            raise TypeError("The state is None. Give the result of step.initialize_model(...), or its shapes.")
        checks.check_alive(given, "OuterLoop(...)")
        if not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(given)):
            given = values = checks.adopt(given)
        shapes = jax.tree.map(checks.shape_of, given)
        step = getattr(shapes, "step", None)
        checks.check_counter(step, is_scalar=step is None or not step.shape)
        return State(shapes, values)
    return State(None, values)


def _state_for_begin(state: State, step: Step) -> Any:
    """Returns the values of the state if they are known and `step.begin` is user-defined, and its shapes otherwise."""
    return state.shapes if state.values is None or not checks.is_user_defined(step, "begin") else state.values


# A step -----------------------------------------------------------------------------------------------------


def check_step(part: Part, state: State, first: Sequence[types.Batch], *, longest_loop: int | None = None) -> Part:
    """Passes the first batch of a loop through the step's hooks and traces `run`.

    Returns `part`, with sample outputs if they can be determined.

    Args:
      part: The loop to check.
      state: The state that the run would start from.
      first: A list with the first batch, or an empty list if there is none.
      longest_loop: The number of batches in the longest loop, from which the size of the outputs is computed. None if
        the number is unknown.
    """
    here, step = part.here, part.loop.step
    with here:
        part.loop.engine.run.agenda.statistics.observers()  # Raises an error if a statistic can't be computed.
    if state.shapes is None or not first:
        return part
    (batch,) = first
    with here:
        if not part.trains:
            step.begin_evaluation()
        known = _ready_for_run(part, state, batch)
        if known is None:
            return part._replace(is_open=True)
        (ready,) = known
        if not _can_be_traced(here, step, batch, ready):
            return part
        if part.trains:
            with here:
                step.shard_batch(ready)
        outputs, updates = _trace(step, state.shapes, ready, evaluates=not part.trains)
        if part.trains:
            _check_updates(here, step, state.shapes, updates)
        hooks = ((step, "end"), (part.loop, "end"), (part.loop, "update_outputs"))
        if any(checks.is_user_defined(thing, name) for thing, name in hooks):
            return part
        outputs = outputs or {}
        _check_size(here, outputs, longest_loop)
        _check_for_losses_per_example(here, outputs)
        # Not zeros, because a metric may divide by them.
        ones = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), outputs)
        like_outputs = metrics.LoopOutputs({name: [metrics.fetch(value)] for name, value in ones.items()}, [1])
        return part._replace(outputs=like_outputs)
    return part


def _ready_for_run(part: Part, state: State, batch: types.Batch) -> tuple[types.Batch] | None:
    """Returns a 1-tuple with the batch that the hooks would pass to `run`, or None if that batch is unknown.

    The hooks are the step's `preprocess_batch` and `begin`. The batch is unknown if the user overrides another method
    that may change it, such as `shard_batch`. It is also unknown if `begin` returns a different state, or if `begin`
    needs the state's values, but only the state's shapes are known.
    """
    loop, step = part.loop, part.loop.step
    ways = {step: ("__call__", "evaluate", "shard_batch"), loop: ("begin", "run", "_get_next_batch", "_run_one_step")}
    if any(checks.is_user_defined(thing, name) for thing, names in ways.items() for name in names):
        return None
    given = _state_for_begin(state, step)
    ready = step._runner.preprocessed(batch)
    try:
        result = step.begin(given, ready)
    except Exception:
        if state.values is None and checks.is_user_defined(step, "begin"):
            return None
        raise
    new_state, ready = checks.check_pair(result, f"{type(step).__name__}.begin", "(state, batch)")
    return (ready,) if new_state is given else None


def _can_be_traced(here: Findings, step: Step, batch: types.Batch, ready: types.Batch) -> bool:
    """Checks a batch before it is passed to `run`. Returns True if `run` can be traced with it.

    Args:
      here: The findings for the loop.
      step: The step.
      batch: The batch from the dataset.
      ready: The same batch, as returned by the hooks.
    """
    problems = list(checks.problems_of_batch(ready))
    for problem in problems:
        here.error(problem)
    if problems:
        return False
    with here:
        if changed := checks.problem_of_dtypes(ready):
            here.warn(changed)
    if checks.num_examples(batch) is None and not checks.is_user_defined(step, "num_examples"):
        here.warn(
            "Each batch counts as one example, because its leaves don't share a leading axis: "
            f"{checks.batch_in_words(batch)}. Override Step.num_examples(batch) for weighted means."
        )
    return True


def _trace(step: Step, state: Any, batch: types.Batch, *, evaluates: bool) -> tuple[types.Output, int | None]:
    """Traces `run` with a state (or its shapes) and a batch that the hooks have prepared.

    Returns the shapes of the outputs and the number that `run` adds to `state.step`. The number is None if it depends
    on the data or if the state has no `step`. It is 0 for an evaluation.
    """
    programs, mesh = step._runner.programs, step.partitioner.mesh
    checked = programs.evaluate if evaluates else programs.run
    run = functools.wraps(step.run)(lambda state, batch: checked(state, batch))
    with partition.mesh_for_tracing(mesh):
        jaxpr, result = jax.make_jaxpr(run, return_shape=True)(state, batch)
    if evaluates:
        return result, 0
    new_state, outputs = result
    count = getattr(new_state, "step", None)
    place = next((i for i, leaf in enumerate(jax.tree.leaves(new_state)) if leaf is count), None)
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):  # `_added_to_leaf` runs the program.
        return outputs, None if place is None else _added_to_leaf(jaxpr, place)


def _added_to_leaf(jaxpr: Any, place: int) -> int | None:
    """Returns the number that a traced program adds to one of its inputs, or None if the number depends on the data.

    Args:
      jaxpr: The traced program.
      place: The index of the input among all inputs. The corresponding output has the same index among all outputs.
        This input must be an integer array.
    """
    is_used = [number == place for number in range(len(jaxpr.jaxpr.outvars))]
    needed, needs = partial_eval.dce_jaxpr(jaxpr.jaxpr, is_used)
    if any(needs_it and number != place for number, needs_it in enumerate(needs)):
        return None
    before = jnp.asarray(41, jaxpr.in_avals[place].dtype)  # An arbitrary number that fits in an int8.
    closed = jax_core.ClosedJaxpr(needed, jaxpr.consts)  # pyright: ignore[reportPrivateImportUsage]
    (after,) = jax_core.jaxpr_as_fun(closed)(*[before] * any(needs))
    return int(metrics.fetch(after)) - 41


def _check_updates(here: Findings, step: Step, state: Any, updates: int | None) -> None:
    """Checks that a training step increases `state.step` by the step's `updates_per_step`."""
    if hasattr(state, "step") and updates not in (None, step.updates_per_step):
        adds = f"adds {updates} to state.step" if updates else "returns state.step unchanged"
        here.error(f"{type(step).__name__}.run {adds}. {checks.counting_hint(step)}")


def _check_size(here: Findings, outputs: Mapping[str, Any], longest_loop: int | None) -> None:
    """Warns if the outputs, which are kept until the loop ends, would take too much memory."""
    sizes = {name: bytes_of(value) for name, value in outputs.items() if not metrics.is_metric(value)}
    needed = sum(sizes.values()) * (longest_loop or 0)
    if needed > _MOST_OUTPUT_BYTES:
        largest = max(sizes, key=lambda name: sizes[name])
        here.warn(
            f"The outputs of a loop's {longest_loop:,} steps are kept on the host until the loop ends, which takes "
            f"{readable(needed)}. The largest output is {largest!r}, {readable(sizes[largest])} per step. Return less "
            "of it, or make the loops shorter (train_loop_steps)."
        )


def _check_for_losses_per_example(here: Findings, outputs: Mapping[str, Any]) -> None:
    """Warns if a loss is an array, or if all outputs are arrays. The history stores only scalars."""
    is_array = lambda value: not metrics.is_metric(value) and getattr(value, "ndim", 0) > 0
    arrays = {name: value for name, value in outputs.items() if is_array(value)}
    losses = [name for name in arrays if "loss" in name.lower()]
    missing = list(arrays) if len(arrays) == len(outputs) else losses
    if missing:
        shown = ", ".join(f"{name!r}, {checks.describe(arrays[name])}" for name in missing)
        here.warn(
            f"The history stores scalars only, and would not contain {shown}. Return the mean over the examples, or a "
            "clu metric."
        )


# The model ----------------------------------------------------------------------------------------------------


def check_model(part: Part, train_step: Step) -> None:
    """Warns if the model of an evaluation's step differs from the model of the train step."""
    trained, evaluated = train_step.model, part.loop.step.model
    if not _is_same_model(trained, evaluated):
        part.here.warn(
            f"Its step has the model {_shown_model(evaluated)}, but the train step has {_shown_model(trained)}. The "
            "state belongs to the train step, so state.apply_fn calls that model. Give both steps the same model."
        )


def _is_same_model(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return True
    is_comparable = isinstance(one, nn.Module) or inspect.isclass(one)
    return one == other if is_comparable else type(one) is type(other)


def _shown_model(model: Any) -> str:
    return model.__name__ if inspect.isclass(model) else " ".join(repr(model).replace("# attributes", "").split())


# Memory -----------------------------------------------------------------------------------------------------


def check_memory(part: Part, state: State, first: Sequence[types.Batch], topology: str | None = None) -> None:
    """Compiles the train step and checks that the step and the state fit into device memory.

    Args:
      part: The train loop.
      state: The state that the run would start from.
      first: A list with the first batch, or an empty list if there is none.
      topology: The TPUs to compile for; see `cost_analysis`. If None, the devices of the step's partitioner are used.
    """
    if state.shapes is None or not first:
        return
    (batch,), here = first, part.here
    with here:
        step, shapes, memory = on_devices(part.loop.step, state.shapes, topology)
        layout = step.partitioner.report(shapes)
        sizes = _parts_of(layout)
        here.plan["state"] = f"{readable(layout.bytes_per_device)} per device: {_listed(sizes)}"
        if part.is_open or here.has_errors:  # It can't be compiled, or its batch is unknown.
            return
        try:
            if topology is None:
                part.loop.compile(_state_for_begin(state, step), batch)  # The run reuses this program.
            else:
                step.compile(shapes, batch)
            cost = step._runner.programs.cost
            needed = cost.peak_bytes
            here.plan["step"] = (
                f"{cost.flops:.3g} FLOPs; {readable(needed)}{_of(memory)} per device, of which "
                f"{readable(cost.temp_bytes)} for activations and gradients"
            )
        except DeviceMemoryError as error:
            memory = error.available_bytes
            needed = max(error.needed_bytes, memory + 1)  # XLA rounds both.
        if memory is not None and needed > memory:
            sizes["batch"] = bytes_of(batch) // step.partitioner.shards
            sizes["activations and temporaries"] = max(needed - sum(sizes.values()), 0)
            arguments = "step, state, batch" + (f", {topology!r}" if topology else "")
            here.error(
                f"A step needs {readable(needed)}{_of(memory)} per device: {_listed(sizes)}. Split the state over the "
                "devices (FSDPPartitioner), accumulate gradients, recompute activations in the backward pass "
                f"(jax.checkpoint), or make the batch smaller: jaxloop.check.largest_batch({arguments}) returns the "
                "largest that fits."
            )


def _parts_of(layout: Layout) -> dict[str, int]:
    """Returns the sizes of a state's parameters, optimizer state and other leaves, in bytes per device."""
    sizes = {"parameters": 0, "optimizer": 0, "other state": 0}
    for leaf in layout.leaves:
        field = leaf.path.split("/")[0]
        sizes[{"params": "parameters", "opt_state": "optimizer"}.get(field, "other state")] += leaf.bytes_per_device
    return {name: size for name, size in sizes.items() if size >= (2**10 if name == "other state" else 1)}


def _listed(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {readable(size)}" for name, size in sizes.items())


def _of(memory: int | None) -> str:
    return "" if memory is None else f" of {readable(memory)}"
