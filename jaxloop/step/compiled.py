"""Compiles a step's `run` hook for training or evaluation, with one or more batches per dispatch."""

import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from jaxloop import types
from jaxloop.base import checks
from jaxloop.base.structures import MAX_STRUCTURES, put_together, take_apart
from jaxloop.base.timing import Stopwatch, duration
from jaxloop.distributed import agreement
from jaxloop.step import cost, forward, nonfinite


@final
class Compiled:
    """Compiles a step's `run` at the first call to `call`, and again for each new batch shape.

    Between calls, the state is kept in a form called a carry: `enter` converts a state to a carry, and `leave` converts
    a carry back to a state. In evaluation, the carry is the state itself. In training, the carry is normally the result
    of `take_apart`. However, if there are `jit_kwargs` or if the partitioner overrides `partition`, the carry is the
    state itself in training, too, because the `jit_kwargs` or the override may depend on the state's tree structure.

    If `run` is traced again, a warning lists the leaves that changed. There is no warning for a second batch shape,
    which may come from a short last batch, or for any new batch shape in evaluation. In training, an error is raised if
    there are more than `Step.max_batch_shapes` batch shapes.

    Args:
      programs: The `Programs` of the step.
      evaluates: Whether to compile for evaluation. If so, the state isn't donated, and only the outputs are returned.
      fuses: Whether to run several steps per call by scanning `run` over stacked batches. If so, the outputs are also
        stacked.
      policy: The policy for NaN and infinity. Unless it is "ignore", the outputs contain flags for non-finite values.
    """

    def __init__(self, programs: "Programs", *, evaluates: bool, fuses: bool, policy: nonfinite.NanPolicy):
        step, jit_kwargs = programs.step, programs.jit_kwargs
        partitioner, self._name = step.partitioner, type(step).__name__
        run: Callable[..., Any] = programs.evaluate if evaluates else programs.run
        if policy != "ignore":
            run = programs.detector(policy).run
        self._programs, self._evaluates = programs, evaluates
        # The state isn't flattened if there are `jit_kwargs`, which may refer to the state's tree.
        self._is_flat = not evaluates and not jit_kwargs and not checks.is_user_defined(partitioner, "partition")
        options = {"donate_argnums": 0} if self._is_flat else dict(jit_kwargs)  # `state.step` is another argument.
        if fuses:
            run = _fused(run, evaluates=evaluates)
        if evaluates:
            options.pop("donate_argnames", None)
            options |= {"donate_argnums": (), "out_shardings": partitioner.output_sharding}
        self._end_compiling: Callable[[Any], None] | None = None  # None unless it is compiling.
        self._signatures: list[dict[str, str]] = []
        # A dictionary compares the full hashes of structures before it checks equality.
        self._of = functools.lru_cache(MAX_STRUCTURES)(functools.partial(self._compile, run, options))
        self._newest: tuple[Any, Any, Any] = (None, None, None)  # The structure and form of a call, and its function.

    def enter(self, state: Any) -> Any:
        """Converts a state to a carry for `call`."""
        return take_apart(state) if self._is_flat else state

    def leave(self, carry: Any) -> Any:
        """Converts a carry from `enter` or `call` back to a state."""
        return put_together(*carry) if self._is_flat else carry

    def call(self, carry: Any, batch: types.Batch, form: Any = None) -> tuple[Any, Any]:
        """Dispatches a batch and returns the new carry and the outputs. In training, the old carry is donated.

        Args:
          carry: See `enter`.
          batch: The batch.
          form: The batch's `form` from `checks.BatchWatch`. Batches with the same structure, shapes and dtypes have the
            same form. If None, the batch is inspected, which takes about 5% of the time of a small step.
        """
        step = None
        try:
            if not self._is_flat:
                result = self._of(None, jax.tree.structure((carry, batch)))(carry, batch)
                return (carry, result) if self._evaluates else result
            leaves, step, structure = carry
            known_structure, known_form, function = self._newest
            if form is None or form is not known_form or structure is not known_structure:
                function = self._of(structure, jax.tree.structure(batch))
                self._newest = structure, form, function
            leaves, (step, outputs) = function(leaves, (step, batch))
            return (leaves, step, structure), outputs
        finally:
            if self._end_compiling is not None:
                self._end_compiling(step)

    def trace(self, state: Any, batch: types.Batch) -> jax.stages.Traced:
        """Traces the function that `call` would run for the given state and batch.

        If you lower and compile the result, `call` reuses the compiled program.
        """
        try:
            if not self._is_flat:
                return self._of(None, jax.tree.structure((state, batch))).trace(state, batch)
            leaves, step, structure = take_apart(state)
            return self._of(structure, jax.tree.structure(batch)).trace(leaves, (step, batch))
        finally:
            if self._end_compiling is not None:
                self._end_compiling(None)

    def _compile(self, run: Callable[..., Any], options: dict[str, Any], structure: Any, _: Any) -> Any:
        """Returns a jitted version of `run` for a state and a batch that have particular pytree structures.

        `structure` is the key that `take_apart` returns for the state, or None if the state isn't taken apart.
        """
        partitioner = self._programs.step.partitioner

        @functools.wraps(run)
        def traced(state: Any, batch: types.Batch) -> Any:
            signature = _signature(state, batch)
            if signature not in self._signatures:
                self._check_trace(signature)
                self._signatures.append(signature)
            self._begin_compiling()
            return run(state, batch)

        @functools.wraps(run)
        def of_flat(leaves: list[Any], step_and_batch: tuple[Any, types.Batch]) -> Any:
            step, batch = step_and_batch
            new_state, outputs = traced(put_together(leaves, step, structure), batch)
            leaves, step, _ = take_apart(new_state)
            return leaves, (step, outputs)

        if self._is_flat and partitioner.mesh is not None:
            place: Any = partitioner.sharding
            of_state, of_step = (place, place) if isinstance(place, jax.sharding.Sharding) else take_apart(place)[:2]
            options = {**options, "out_shardings": (of_state, (of_step, partitioner.output_sharding))}
        compiled = partitioner.partition(of_flat if self._is_flat else traced, **options)
        if not agreement.is_shared(partitioner.mesh):
            return compiled
        return _SameInAllProcesses(self._name, compiled, self._programs.batch_watch, structure)

    def _check_trace(self, new: dict[str, str]) -> None:
        """Warns about the leaves that differ from those in the most similar earlier trace.

        Changes that are allowed (see `Compiled`) cause no warning. Raises a `ValueError` if there are too many batch
        shapes.
        """
        of_state = lambda trace: [leaf for leaf in trace if leaf.startswith("state/")]
        traces = [trace for trace in self._signatures if of_state(trace) == of_state(new)]
        if not traces:
            return  # A state with other leaves, such as one without an optimizer's, is a different kind of state.
        changes = min((checks.changes(old, new) for old in traces), key=len)
        dtype_of = lambda text: text.partition("[")[0]
        is_shape = all(leaf.startswith("batch") and dtype_of(old) == dtype_of(now) for leaf, old, now in changes)
        if is_shape and (self._evaluates or len(traces) == 1):
            return
        lines, most = "\n".join(checks.change_lines(changes)), self._programs.step.max_batch_shapes
        if is_shape and len(traces) >= most:
            raise ValueError(
                f"{self._name}.run was compiled for {len(traces)} shapes of batches, and max_batch_shapes={most} is "
                f"the limit. These leaves changed again (before -> now):\n{lines}\nPad the batches to one shape, or "
                "drop a short last batch (drop_remainder=True). Or set max_batch_shapes of the step."
            )
        logging.warning(
            "%s.run is compiled again because these leaves changed (before -> now):\n%s\nGive all batches one shape, "
            "and all states and batches the same dtypes, without weak types: jnp.asarray(0.0) is weakly typed, "
            "jnp.float32(0.0) is not.",
            self._name,
            lines,
        )

    def _begin_compiling(self) -> None:
        """Logs the start of a compilation. In training, the time until the dispatch returns counts as compile time."""
        stopwatch = self._programs.stopwatch
        if stopwatch is None:
            return
        before, began = stopwatch.switch("compiling"), stopwatch.clock()
        if before != "dispatch":  # Compiling in an evaluation counts as evaluation.
            stopwatch.switch(before)
        logging.info("Compiling %s.run before the next step.", self._name)

        def end(step: Any) -> None:
            self._end_compiling = None
            stopwatch.first_step = step
            stopwatch.switch(before)
            logging.info("Compiled %s.run in %s.", self._name, duration(stopwatch.clock() - began))

        self._end_compiling = end


class _SameInAllProcesses:
    """A compiled function that checks, for each new batch form, that all processes run the same program.

    The form is the batch's structure, shapes and dtypes. If the programs differed, the processes would deadlock or
    compute different results. The check itself would deadlock if the form were new in only one process. Therefore, if
    the batches may differ between processes, the processes first compare the forms of their batches.
    """

    def __init__(self, name: str, compiled: Any, batch_watch: checks.BatchWatch, structure: Any):
        self._name, self._compiled, self._batch_watch, self._structure = name, compiled, batch_watch, structure
        self.trace = compiled.trace
        self._known: set[Any] = set()

    def __call__(self, state: Any, batch: types.Batch) -> Any:
        is_flat = self._structure is not None
        given = batch[1] if is_flat else batch
        if self._batch_watch.may_differ:
            agreement.check_same(
                f"The batch of {self._name}",
                [f"{path}: {checks.describe(leaf)}" for path, leaf in checks.batch_leaves(given).items()],
                "Give the batches of all processes the same leaves, dtypes and shapes, except for the number of rows.",
            )
        leaves, structure = jax.tree.flatten(batch)
        form = (structure, *((leaf.shape, leaf.dtype) for leaf in leaves))
        if form not in self._known:
            program = self.trace(state, batch).lower().as_text()
            signature = _signature(put_together(state, batch[0], self._structure) if is_flat else state, given)
            described = [f"{name}: {leaf}" for name, leaf in signature.items()]
            digest = hashlib.sha256(program.encode()).hexdigest()[:12]
            lines = [f"jax {jax.__version__}", *described, f"compiled program {digest}, {len(program)} characters"]
            agreement.check_same(f"{self._name}.run, with its model, loss and optimizer,", lines)
            self._known.add(form)
        return self._compiled(state, batch)


@final
class Programs:
    """Compiles a step's `run` for training or evaluation, with one or several batches per dispatch.

    Args:
      step: The step.
      batch_watch: The object that checks the step's training batches.

    Attributes:
      step, batch_watch: The arguments of the same names.
      jit_kwargs: Arguments for `jax.jit`, which take precedence over those from the partitioner.
      policy: The `nan_policy` of the loop that is running the step, or "ignore" if no loop is running.
      stopwatch: The stopwatch of the loop that is running the step, or None.
      cost: The `Cost` of the program that was last compiled ahead of time, or None if there is no such program.
    """

    def __init__(self, step: Any, batch_watch: checks.BatchWatch):
        self.step: Any = step
        self.batch_watch: checks.BatchWatch = batch_watch
        self._compiled: dict[Any, Compiled] = {}
        self.jit_kwargs: dict[str, Any] = {}
        self.stopwatch: Stopwatch | None = None
        self.policy: nonfinite.NanPolicy = "ignore"
        self._detectors: dict[str, nonfinite.Detector] = {}
        self.cost: Any = None

    def restart(self, **jit_kwargs: Any) -> None:
        """Discards everything compiled so far. Later compilations pass the given arguments to `jax.jit`."""
        jax.jit(lambda state, batch: None, **jit_kwargs)  # Raises a `TypeError` for an unknown option.
        self._compiled, self.jit_kwargs = {}, jit_kwargs

    def compiled(self, *, evaluates: bool = False, fuses: bool = False) -> Compiled:
        """Returns the `Compiled` object for the given options, creating it if necessary.

        Args:
          evaluates: Whether `run` is compiled for evaluation, which doesn't donate the state.
          fuses: Whether one dispatch processes several batches, stacked along a new leading axis.
        """
        policy = "ignore" if evaluates else self.policy
        key = (evaluates, fuses, policy)
        if key not in self._compiled:
            self._compiled[key] = Compiled(self, evaluates=evaluates, fuses=fuses, policy=policy)
        return self._compiled[key]

    def detector(self, policy: nonfinite.NanPolicy) -> nonfinite.Detector:
        """Returns the `Detector` for the given policy, creating it if necessary."""
        if policy not in self._detectors:
            is_on_mesh = self.step.partitioner.mesh is not None
            self._detectors[policy] = nonfinite.Detector(self.run, policy, is_on_mesh)
        return self._detectors[policy]

    def compile(self, state: Any, batch: types.Batch, *, evaluates: bool, fuses: bool) -> cost.Cost:
        """Compiles `run` ahead of time for a state and a batch, either of which may be abstract.

        The batch must already have passed through the hooks that precede `run`.
        """
        self.cost = cost.cost_of(self.compiled(evaluates=evaluates, fuses=fuses).trace(state, batch))
        return self.cost

    @contextlib.contextmanager
    def watched(self, policy: nonfinite.NanPolicy, stopwatch: Stopwatch | None = None) -> Iterator[None]:
        """Returns a context manager that makes the step use a loop's `nan_policy` and stopwatch.

        Args:
          policy: The loop's `nan_policy`.
          stopwatch: The loop's stopwatch, which also times compilations. If None, the current stopwatch is kept.
        """
        before = self.policy, self.stopwatch
        self.policy, self.stopwatch = policy, stopwatch or self.stopwatch
        try:
            yield
        finally:
            self.policy, self.stopwatch = before

    # Traced --------------------------------------------------------------------------------------

    def run(self, state: Any, batch: types.Batch) -> tuple[Any, types.Output]:
        """Calls the step's `run` and checks the state and the outputs that it returns."""
        hook = f"{type(self.step).__name__}.run"
        with forward.noting_changes() as changed:
            result = self.step.run(state, batch)
        new_state, outputs = checks.check_result(result, hook)
        checks.check_same_state(state, new_state, hook)
        forward.check_updates_kept(state, new_state, changed, repr(self.step))
        return new_state, self._reported(outputs, batch)

    def evaluate(self, state: Any, batch: types.Batch) -> types.Output:
        """Calls the step's `run` and returns only the outputs."""
        result = checks.check_result(self.step.run(state, batch), f"{type(self.step).__name__}.run")
        return self._reported(result[1], batch)

    def _reported(self, outputs: types.Output, batch: types.Batch) -> types.Output:
        """Replaces per-example losses in the outputs with their means, unless the step overrides `num_examples`."""
        if not outputs:
            return outputs
        is_padded = checks.is_user_defined(self.step, "num_examples")  # The arrays may contain rows that don't count.
        return types.mean_losses(outputs, None if is_padded else checks.num_examples(batch))


def _signature(state: Any, batch: types.Batch) -> dict[str, str]:
    """Returns a dict that maps each leaf's path to a description of the leaf.

    The description consists of the dtype, the shape and, for a weakly typed leaf, a note.
    """
    leaves = {f"state/{name}": leaf for name, leaf in checks.leaves_by_path(state).items()}
    leaves |= checks.batch_leaves(batch)
    is_weak = lambda leaf: getattr(getattr(leaf, "aval", None), "weak_type", False)
    return {name: checks.describe(leaf) + (" (weakly typed)" if is_weak(leaf) else "") for name, leaf in leaves.items()}


def _fused(run: Callable[[Any, Any], Any], *, evaluates: bool) -> Callable[[Any, Any], Any]:
    """Returns a function that scans `run` over batches that were combined by `stacked`."""

    def fused(state: Any, batches: Any) -> Any:
        body = lambda carry, batch: (carry, run(state, batch)) if evaluates else run(carry, batch)
        is_none = isinstance(batches, _StackedNone)
        carry = None if evaluates else state
        found = jax.lax.scan(body, carry, None if is_none else batches, length=len(batches) if is_none else None)
        return found[1] if evaluates else found

    return fused


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _StackedNone:
    """A stack of batches that are all None.

    Attributes:
      length: The number of batches, which `jax.lax.scan` can't infer from None.
    """

    length: int

    def __len__(self) -> int:
        return self.length


def stacked(batches: Sequence[types.Batch]) -> types.Batch | None:
    """Stacks batches along a new leading axis. Returns None if they differ in structure, shape or dtype.

    The batches may be abstract. Arrays that are on the host stay on the host.

    >>> stacked([{"x": np.zeros(3)}, {"x": np.ones(3)}])["x"].shape
    (2, 3)
    """
    if all(batch is None for batch in batches):
        return _StackedNone(len(batches))
    try:
        return jax.tree.map(_stacked_leaf, *batches)
    except ValueError:  # Raised by `_stacked_leaf`, and by jax.tree.map if the structures differ.
        return None


def _stacked_leaf(*leaves: Any) -> Any:
    first = leaves[0]
    if isinstance(first, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((len(leaves), *first.shape), first.dtype)
    if not isinstance(first, np.ndarray | jax.Array):
        return np.stack(leaves)
    shape, dtype = first.shape, first.dtype
    for leaf in leaves:
        if leaf.shape != shape or leaf.dtype != dtype:
            raise ValueError("The leaves differ.")
    if isinstance(first, jax.Array):
        return jnp.stack(leaves)
    # Several times faster than `np.stack`.
    return np.concatenate(leaves).reshape(len(leaves), *shape) if shape else np.stack(leaves)
