"""What is compiled of a step: for training and for evaluating, one batch or several in one dispatch."""

import contextlib
import dataclasses
import functools
import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from jaxloop import agreement, bad_numbers, checks, partition, types
from jaxloop.flat_state import FlatState, whole
from jaxloop.structures import OfEachStructure


class NotCompiled(Exception):
    """Something would have to be compiled that nobody has looked at."""


@final
class Compiled:
    """The functions that a step's `run` is compiled to, each when it is asked for first.

    Where one is traced again, other than for a new shape of a batch, it says in the log which leaf has changed.

    Args:
      name: of the step's class.
      run: `(state, batch) -> (state, outputs)`, pure.
      evaluate: `(state, batch) -> outputs`, likewise.
      partitioner: compiles for its placement.
      **jit_kwargs: arguments of `jax.jit`, which replace the partitioner's own.
    """

    def __init__(
        self,
        name: str,
        run: Callable[..., Any],
        evaluate: Callable[..., Any],
        partitioner: partition.Partitioner,
        **jit_kwargs: Any,
    ):
        self._name, self._run, self._evaluate = name, run, evaluate
        self._partitioner, self._jit_kwargs = partitioner, jit_kwargs
        # With arguments of jit, and layouts leaf by leaf, a state goes in as the tree that these are for.
        self.takes_flat_states: bool = not jit_kwargs and partitioner.takes_any_tree
        self._made: dict[Any, Any] = {}
        self._only_known: int | None = None  # The thread that is in that context.

    def training(self, watch: bad_numbers.Watch | None = None, *, fused: bool = False) -> Callable[..., Any]:
        """`(state, batch) -> (state, outputs)`, which takes the state over.

        Args:
          watch: looks for bad numbers.
          fused: of stacked batches; the outputs are stacked likewise.
        """
        if watch is None:
            run = _scan(self._run) if fused else self._run
            return self._once(("train", fused), lambda: self._compile_training(run, fused))
        looking, compiled = self._once(("train", fused, watch.policy), lambda: self._looking(watch.policy, fused))
        return functools.partial(watch.run, looking, compiled, fused=fused)

    def plain_training(self, watch: bad_numbers.Watch | None = None) -> Callable[..., Any] | None:
        """`training` for arguments of the structure of the last ones, which it does not look at; None before the first.

        It takes and returns a `FlatState`, where `takes_flat_states`.
        """
        if watch is None:
            return self.training().newest  # pyright: ignore[reportFunctionMemberAccess]
        looking, compiled = self.training(watch).args  # pyright: ignore[reportFunctionMemberAccess]
        return compiled.newest and functools.partial(watch.run, looking, compiled.newest)

    def lower(
        self,
        state: Any,
        batch: types.Batch,
        watch: bad_numbers.Watch | None = None,
        *,
        fused: bool = False,
        evaluates: bool = False,
    ) -> jax.stages.Lowered:
        """What `training`, or `evaluation` with `evaluates`, would compile for this state and batch.

        To compile it is to compile it ahead: the function that it is of finds it there.
        """
        if evaluates:
            return self.evaluation(fused=fused).lower(state, batch)  # pyright: ignore[reportFunctionMemberAccess]
        compiled: Any = self.training(watch, fused=fused)
        if watch is None:
            return compiled.lower(state, batch)
        looking, compiled = compiled.args
        return compiled.lower(state, (batch, looking.no_flags(state)))

    def _looking(self, policy: bad_numbers.NanPolicy, fused: bool) -> tuple[bad_numbers.Looking, Callable[..., Any]]:
        looking = bad_numbers.Looking(self._run, policy, self._partitioner.mesh is not None)
        run = _scan_with_flags(looking.run) if fused else looking.run
        return looking, self._compile_training(run, fused)

    def _compile_training(self, run: Callable[[Any, Any], Any], fused: bool) -> Callable[..., Any]:
        if not self.takes_flat_states:
            return self._compile(run, self._jit_kwargs, refuses=not fused)

        @functools.wraps(run)
        def of_flat(state: FlatState, batch: Any) -> tuple[FlatState, Any]:
            new_state, outputs = run(state.whole(), batch)
            return FlatState.of(new_state), outputs

        return _OfWholeStates(self._compile(of_flat, {}, refuses=not fused))

    def evaluation(self, *, fused: bool = False) -> Callable[..., Any]:
        """`(state, batch) -> outputs`: the state is kept, and what `run` makes of it is never computed."""
        kept = {name: value for name, value in self._jit_kwargs.items() if name != "donate_argnames"}
        jit_kwargs = {**kept, "donate_argnums": (), "out_shardings": self._partitioner.output_sharding}
        run = _map(self._evaluate) if fused else self._evaluate
        return self._once(("evaluate", fused), lambda: self._compile(run, jit_kwargs))

    def _compile(self, run: Callable[[Any, Any], Any], jit_kwargs: Any, *, refuses: bool = False) -> OfEachStructure:
        traces: list[dict[str, str]] = []

        def compile() -> Callable[..., Any]:
            known: list[dict[str, str]] = []  # Of the traces, those of this structure.

            @functools.wraps(run)
            def traced(state: Any, batch: types.Batch) -> Any:
                signature = _signature(state, batch)
                if self._only_known == threading.get_ident() and refuses and signature not in known:
                    raise NotCompiled
                if traces and signature not in traces:
                    _explain_trace(self._name, traces, signature)
                traces.append(signature)
                known.append(signature)
                return run(state, batch)

            compiled = self._partitioner.partition(traced, **jit_kwargs)
            return _Compared(self._name, compiled) if agreement.is_shared(self._partitioner.mesh) else compiled

        return OfEachStructure(compile)

    @contextlib.contextmanager
    def only_known(self) -> Iterator[None]:
        """A context in which NotCompiled is raised where leaves are not like any that it was compiled for."""
        self._only_known = threading.get_ident()
        try:
            yield
        finally:
            self._only_known = None

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


class _OfWholeStates:
    """A compiled function of a `FlatState`, for states as they come."""

    def __init__(self, of_flat: OfEachStructure):
        self._of_flat = of_flat

    def __call__(self, state: Any, batch: Any) -> tuple[Any, Any]:
        new_state, outputs = self._of_flat(FlatState.of(state), batch)
        return new_state.whole(), outputs

    @property
    def newest(self) -> Any:
        """The compiled function for a `FlatState` and a batch like those of the last call."""
        return self._of_flat.newest

    def lower(self, state: Any, batch: Any) -> jax.stages.Lowered:
        return self._of_flat.lower(FlatState.of(state), batch)


class _Compared:
    """A compiled function of which all processes make sure, for each form of a batch, that it is the same in all.

    Else they would wait for each other for ever, or come to other results.
    """

    def __init__(self, name: str, compiled: Any):
        self._name, self._compiled = name, compiled
        self.lower = compiled.lower
        self._known: set[Any] = set()

    def __call__(self, state: Any, batch: types.Batch) -> Any:
        leaves, structure = jax.tree.flatten(batch)
        form = (structure, *((leaf.shape, leaf.dtype) for leaf in leaves))
        if form not in self._known:
            program = self.lower(state, batch).as_text()
            signature = [f"{name}: {described}" for name, described in _signature(state, batch).items()]
            digest = hashlib.sha256(program.encode()).hexdigest()[:12]
            lines = [f"jax {jax.__version__}", *signature, f"compiled program {digest}, of {len(program)} characters"]
            agreement.check_same(f"{self._name}.run, with its model, loss and optimizer,", lines)
            self._known.add(form)
        return self._compiled(state, batch)


def _signature(state: Any, batch: types.Batch) -> dict[str, str]:
    """What a trace depends on: the type of each leaf."""
    leaves = {f"state/{name}": leaf for name, leaf in checks.leaves_by_path(whole(state)).items()}
    leaves |= checks.batch_leaves(batch)
    is_weak = lambda leaf: getattr(getattr(leaf, "aval", None), "weak_type", False)
    return {name: checks.describe(leaf) + (" (weakly typed)" if is_weak(leaf) else "") for name, leaf in leaves.items()}


def _explain_trace(name: str, traces: Sequence[dict[str, str]], new: dict[str, str]) -> None:
    """Says what is new, against the trace that is most like it."""
    changes = min((checks.changes(old, new) for old in traces), key=len)
    without_shape = lambda text: text.partition("[")[0] + text.partition("]")[2]
    is_shape_of_batch = lambda leaf, old, now: leaf.startswith("batch") and without_shape(old) == without_shape(now)
    changes = [change for change in changes if not is_shape_of_batch(*change)]
    if not changes:
        return  # Of shapes of batches `checks.BatchWatch` tells.
    logging.warning(
        "%s.run is compiled once more, because these leaves are not what they were (then -> now):\n%s\nGive all states "
        "and batches the same dtypes, and no weak types: a number such as jnp.asarray(0.0) is weakly typed, "
        "jnp.float32(0.0) is not.",
        name,
        "\n".join(checks.change_lines(changes)),
    )


def _map(evaluate: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def fused(state: Any, batches: Any) -> Any:
        return _scan_batches(lambda _, batch: (None, evaluate(state, batch)), None, batches)[1]

    return fused


def _scan(run: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def fused(state: Any, batches: Any) -> Any:
        return _scan_batches(
            lambda state, batch: run(state, batch), state, batches
        )  # Of a new function, for each class.

    return fused


def _scan_with_flags(run: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """The same of a `run` that hands on the flags of `bad_numbers.Looking`."""

    def fused(state: Any, batches_and_flags: Any) -> Any:
        batches, flags = batches_and_flags

        def body(carry: Any, batch: Any) -> Any:
            state, flags = carry
            state, (outputs, flags) = run(state, (batch, flags))
            return (state, flags), outputs

        (state, flags), outputs = _scan_batches(body, (state, flags), batches)
        return state, (outputs, flags)

    return fused


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _StackedNone:
    """So many batches that are None, as one: a scan over None can't tell how many there are."""

    length: int


def _scan_batches(body: Callable[[Any, Any], Any], carry: Any, batches: Any) -> Any:
    """Scans over batches that were made one by `stacked`."""
    if isinstance(batches, _StackedNone):
        return jax.lax.scan(body, carry, None, length=batches.length)
    return jax.lax.scan(body, carry, batches)


def stacked(batches: Sequence[types.Batch]) -> types.Batch | None:
    """Batches, or their shapes, as one on a new leading axis; None where they are not of one shape.

    Host arrays stay on the host.

    >>> stacked([{"x": np.zeros(3)}, {"x": np.ones(3)}])["x"].shape
    (2, 3)
    """
    if all(batch is None for batch in batches):
        return _StackedNone(len(batches))
    try:
        return jax.tree.map(_stacked_leaf, *batches)
    except ValueError:  # As jax.tree.map raises for trees of another structure.
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
    # Joining them is several times faster than `np.stack`.
    return np.concatenate(leaves).reshape(len(leaves), *shape) if shape else np.stack(leaves)
