"""`Ensemble`, a step that trains many copies of a model at once, with different seeds or hyperparameters."""

import contextlib
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.sharding import Mesh, PartitionSpec

from jaxloop import partition, types
from jaxloop.actions.action import Action
from jaxloop.actions.early_stopping_action import EarlyStoppingAction
from jaxloop.actions.monitor import Monitor
from jaxloop.base import checks
from jaxloop.history import History, find_path
from jaxloop.metrics import fetch, is_metric, value_of
from jaxloop.step import Step, forward, nonfinite
from jaxloop.step.runner import Runner


class _Given(NamedTuple):
    """The `batch` argument of `Ensemble.run`.

    Attributes:
      batch: The batch that all members share or, with `data="own"`, the stacked batches of the members.
      num_examples: A float32 array of shape `[members]` with the number of examples in each member's batch.
      stopped: A bool array of shape `[members]` that is True for the members that an early stopping action has stopped.
    """

    batch: Any
    num_examples: np.ndarray
    stopped: np.ndarray


class _EnsembleRunner(Runner):
    """Passes the batches of an `Ensemble` through the hooks of the original step."""

    def filler(self) -> Any:
        return self.step._step._runner.filler()

    def ready_batch(self, batch: types.Batch) -> tuple[_Given, int] | None:
        given = self.prepared(batch)
        return given and (given, int(given.num_examples[0]))

    def prepared(self, batch: types.Batch, state: Any = None) -> _Given | None:
        """Passes the batch of each member, or the batch that all members share, through the hooks of the original step.

        Returns the `batch` argument for `Ensemble.run`, or None if the hooks need a state and `state` is None.
        """
        runner, ready, parts = self.step._step._runner, [], self.parts(batch)
        for part in parts:
            found = runner.ready_batch(part) if runner.has_own("begin") else [runner.preprocessed(part)]
            if found is None and state is None:
                return None
            if found is None:
                member = self._first(state) if isinstance(state.step, jax.Array) else self._first.eval_shape(state)
                new, *found = runner.before_run(member, part)
                if new is not member:
                    raise ValueError(f"An Ensemble can't run {runner.step!r}, because its `begin` changes the state.")
            ready.append(found[0])
        numbers = tuple(map(runner.count_examples, parts)) * (len(self.step.members) // len(parts))
        # The actions of a run that is over don't stop members of the next run.
        stopped = [one.is_out_of_patience and not one._is_over for one in self.step._stopping] or [False] * len(numbers)
        whole = jax.tree.map(lambda *leaves: np.stack(leaves), *ready) if self.step._should_shard_batch else ready[0]
        return _Given(whole, _array(numbers, np.float32), _array(tuple(stopped), bool))

    def parts(self, batch: types.Batch) -> list[types.Batch]:
        """Returns a list of the members' batches or, if all members share the batch, a list with only this batch."""
        number = len(self.step.members)
        if not self.step._should_shard_batch:
            return [batch]
        for name, leaf in checks.batch_leaves(batch).items():
            if np.shape(leaf)[:1] != (number,):
                raise ValueError(f"{name} needs a leading axis of {number} members, got {checks.describe(leaf)}.")
        return [jax.tree.map(lambda leaf, index=index: leaf[index], batch) for index in range(number)]

    @functools.cached_property
    def _first(self) -> Any:
        return jax.jit(lambda state: self.step.member(state, 0))


@final
class Ensemble(Step):
    """A `Step` that trains many copies of a model, called members, in one dispatch.

    Up to rounding, each member gets the results that the given step alone would get with that member's seed and
    hyperparameters. The ensemble's state has the fields of the step's state and two more, `frozen` and `diverged`. Each
    leaf except `state.step`, which counts the updates, has a leading member axis. `state.frozen` is True for
    members that are no longer updated. `state.diverged` is True for the frozen members that yielded NaN or infinity.

    >>> import optax, jaxloop
    >>> from flax import linen as nn
    >>> def loss(outputs, batch):
    ...     return ((outputs - batch["y"]) ** 2).mean(axis=-1)
    >>> optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    >>> step = jaxloop.LossStep(jax.random.key(0), nn.Dense(1), optimizer, train=True, loss=loss)
    >>> ensemble = Ensemble(step, seeds=range(2), hyperparams={"learning_rate": [0.1, 0.01, 1e-3]})
    >>> ensemble.members[1]
    {'learning_rate': 0.1, 'seed': 1}
    >>> state = ensemble.initialize_model([1, 3])
    >>> batches = [{"x": np.ones([8, 3], np.float32), "y": np.ones([8, 1], np.float32)}] * 5
    >>> history = jaxloop.History()
    >>> state, outputs = jaxloop.TrainLoop(ensemble)(state, iter(batches))
    >>> history.commit(jaxloop.Elapsed(5), {"train": jaxloop.summarize(outputs)})
    >>> state.params["kernel"].shape, ensemble.collect(history, "loss").shape
    ((6, 3, 1), (1, 6))
    >>> best = ensemble.member(state, ensemble.best(history, "loss"))
    >>> int(best.step), best.params["kernel"].shape
    (5, (3, 1))

    **Metrics.** If the step reports a mean as `loss`, the ensemble reports the mean over all members as `loss`, and the
    mean of each member as `loss/members/0` and so on. `loss/members/min`, `loss/members/max` and `loss/members/std`
    (the sample standard deviation) describe the spread. Images and other arrays that the members report are
    concatenated along their leading axis.

    **Frozen members.** The state of a frozen member stays bit-identical, and the other members aren't affected. With
    `TrainLoop(nan_policy="skip")`, a member that yields NaN or infinity is frozen. Such a member has diverged, and
    all later metrics exclude it. `early_stopping` returns actions that freeze members. Members frozen in this way still
    count in evaluations. If members can be frozen, the output `frozen` is the number of frozen members, averaged over
    the steps. When all members are frozen, the run ends.

    Args:
      step: The step of a single run. Its state must be a `TrainState`. Its hooks `begin` and `preprocess_batch` are
        called once per batch or, with `data="own"`, once for each member's batch. The step can't have actions or
        override `end`, because its actions and `end` would have to run for each member separately.
      seeds: The seeds to distribute over the members, or an int `n` for the seeds 0 to `n - 1`; see `combine`. A
        member's seed replaces the seed of the step's `base_prng`: the member uses the keys of a step with
        `base_prng=jax.random.key(seed)`. If `base_prng` is a dict, the seed is folded into each key instead. If `seeds`
        is None, all members use the step's keys.
      hyperparams: A dict that maps names of hyperparameters to lists of values to distribute over the members; see
        `combine`. The optimizer must be wrapped in `optax.inject_hyperparams`.
      combine: "product" makes a member for each combination of hyperparameters and seeds, with the seed varying
        fastest. "zip" combines the first value of each hyperparameter with the first seed, the second values with the
        second seed, and so on.
      data: "shared" passes each batch to all members. With "own", each leaf of a batch must have a leading
        member axis.
      mesh: A mesh with one axis. If given, the members are distributed over the mesh's devices.

    Attributes:
      members: A list with one dict per member, which contains the member's hyperparameters and its seed (if any).

    Raises:
      TypeError: If the step isn't supported.
      ValueError: If seeds or hyperparameters are invalid, or if `combine="zip"` is given lists of different lengths.
    """

    _runner_class = _EnsembleRunner

    def __init__(
        self,
        step: Step,
        *,
        seeds: int | Sequence[int] | None = None,
        hyperparams: Mapping[str, Iterable[float]] | None = None,
        combine: Literal["product", "zip"] = "product",
        data: Literal["shared", "own"] = "shared",
        mesh: Mesh | None = None,
    ):
        _check_step(step, seeds)
        if data not in ("shared", "own"):
            raise ValueError(f"data must be 'shared' or 'own', got {data!r}.")
        self.members: list[dict[str, Any]] = _members(seeds, hyperparams or {}, combine)
        partitioner = step.partitioner
        if mesh is not None:
            axis = mesh.axis_names[0]
            partitioner = partition.RulesPartitioner(mesh, axis, rules=[("^(?!step$)", PartitionSpec(axis))])
        # The batches of the members are sharded like the members, and a shared batch is replicated.
        super().__init__(step.base_prng, None, step.optimizer, partitioner, step.train, data == "own")
        self._model, self._step = step.model, step
        self.updates_per_step: int = step.updates_per_step
        self.max_batch_shapes: int = step.max_batch_shapes
        self._arguments = {"seeds": seeds, "hyperparams": hyperparams, "combine": combine, "mesh": mesh}
        keys = [step.base_prng if seeds is None else _seeded(step.base_prng, each["seed"]) for each in self.members]
        self._keys = jax.tree.map(lambda *each: jnp.stack(each), *keys)
        self._stopping: list[MemberStopping] = []  # One action for each member, or none.

    def for_evaluation(self, step: Step, *, data: Literal["shared", "own"] = "shared") -> "Ensemble":
        """Returns an ensemble that evaluates the states of this ensemble's members with the given step.

        Args:
          step: The eval step of a single run.
          data: See `Ensemble`.
        """
        return Ensemble(step, data=data, **self._arguments)

    # Hooks ---------------------------------------------------------------------------------------

    def make_state(self, spec: types.BatchSpec = None, **init_kwargs: Any) -> Any:
        def make(key: Any) -> Any:
            with self._keyed(key):
                return self._step.make_state(spec, **init_kwargs)

        state = jax.vmap(make)(self._keys)
        if not issubclass(type(state), struct.PyTreeNode) or not hasattr(state, "opt_state"):
            raise TypeError(f"Ensemble needs a step whose state is a TrainState, got {checks.describe(state)}.")
        opt_state = state.opt_state
        for name in self.members[0].keys() - {"seed"}:
            opt_state = _with_hyperparam(opt_state, name, [member[name] for member in self.members])
        fields = {**vars(state), "step": state.step[0], "opt_state": opt_state}
        none = jnp.zeros(len(self.members), bool)
        return _state_class(type(state))(**fields, frozen=none, diverged=none)

    def begin(self, state: Any, batch: types.Batch) -> tuple[Any, types.Batch]:
        return state, self._runner.prepared(batch, state)  # pyright: ignore[reportAttributeAccessIssue]

    def num_examples(self, batch: types.Batch) -> int:
        if isinstance(batch, _Given):
            return int(batch.num_examples[0])
        return self._step._runner.count_examples(self._runner.parts(batch)[0])  # pyright: ignore

    def begin_evaluation(self) -> None:
        self._step.begin_evaluation()

    def run(self, state: Any, batch: types.Batch) -> tuple[Any, types.Output]:
        skips, batch_axis = self._runner.programs.policy == "skip", 0 if self._should_shard_batch else None
        run_members = jax.vmap(functools.partial(self._run_member, state.step, skips), (0, 0, batch_axis, 0))
        was_frozen = state.diverged | batch.stopped
        members, outputs, frozen = run_members(self._stacked(state), self._keys, batch.batch, was_frozen)
        weights, reported = jnp.where(frozen if self.train else state.diverged, 0, batch.num_examples), {}
        for name, value in outputs.items():
            reported |= _of_members(name, value, weights)
        if not self.train:
            return state, reported
        if skips or self._stopping:
            reported |= {"frozen": frozen.sum(dtype=jnp.float32), types.STOP_LOOP: frozen.all()}
        changed = {"frozen": frozen, "diverged": state.diverged | (frozen & ~was_frozen), "step": members.step[0]}
        return state.replace(**vars(members) | changed), reported

    def _run_member(self, step_num: Any, skips: bool, member: Any, key: Any, batch: Any, is_frozen: Any) -> Any:
        """Runs the original step for a member. Returns the new state, the outputs, and whether the member is frozen."""
        member, programs = member.replace(step=step_num), self._step._runner.programs
        run = nonfinite.Detector(programs.run, "skip", on_mesh=False).run if skips else programs.run
        with self._keyed(key):
            if not self.train:
                return member, programs.evaluate(member, batch) or {}, is_frozen
            new, outputs = run(member, batch)
        outputs = dict(outputs or {})
        is_frozen |= outputs.pop(nonfinite.FLAGS).any() if skips else False
        kept = jax.tree.map(lambda old, new: jnp.where(is_frozen, old, new), member, new)
        return kept.replace(step=new.step), outputs, is_frozen

    # Members -------------------------------------------------------------------------------------

    def member(self, state: Any, index: int) -> Any:
        """Returns a copy of one member's state, which the original step, `predict` and `jaxloop.export` accept."""
        if index not in range(len(self.members)):
            raise IndexError(f"The members are 0 to {len(self.members) - 1}, got {index}.")
        return jax.tree.map(lambda leaf: leaf[index], self._stacked(state))

    def collect(self, history: History, name: str) -> np.ndarray:
        """Returns the values of a metric for all members, as an array of shape `[rows, members]`.

        The rows are the history rows that contain the metric; `history.collect("steps", name)` returns their steps. If
        a row doesn't contain a member's value, that element of the array is NaN.
        """
        path = find_path(name, history.paths())
        names = [f"{path}.members.{index}" for index in range(len(self.members))]
        return np.array([[row.get(each, np.nan) for each in names] for row in history.to_records() if path in row])

    def best(self, history: History, name: str, mode: str = "auto") -> int:
        """Returns the index of the member with the best value of a metric in the last row that contains the metric.

        Args:
          history: The history of the run.
          name: The path of the metric, such as "test.accuracy", or an unambiguous suffix.
          mode: "min", "max" or "auto"; see `jaxloop.actions.Monitor`.

        Raises:
          ValueError: If the value of every member is NaN.
        """
        values = self.collect(history, name)[-1]
        return int(np.nanargmax(values) if Monitor(name, mode).mode == "max" else np.nanargmin(values))

    def early_stopping(self, monitor: str, patience: int, mode: str = "auto", min_delta: float = 0.0) -> list[Action]:
        """Returns a list of actions, one per member. Each freezes its member when that member's metric stops improving.

        Add the actions to the eval loop that computes the metric. When all members are frozen, the run ends. A frozen
        member keeps the parameters that it had when it stopped, `patience` evaluations after its best evaluation.
        `state.frozen` doesn't mark the members that stop in the last evaluation of a run. For the arguments, see
        `jaxloop.EarlyStoppingAction`.
        """
        mode, self._stopping = Monitor(monitor, mode).mode, []
        for index in range(len(self.members)):
            arguments = f"{monitor}/members/{index}", patience, mode, min_delta
            self._stopping.append(MemberStopping(self._stopping, index, *arguments))
        return list(self._stopping)

    def _stacked(self, state: Any) -> Any:
        """Converts an ensemble's state to the state class of the original step. Adds a member axis to `state.step`."""
        if not hasattr(state, "frozen"):
            raise TypeError(f"{self!r} needs a state from its initialize_model, got the state of a single run.")
        fields = {name: value for name, value in vars(state).items() if name not in ("frozen", "diverged")}
        return type(state).__bases__[0](**fields | {"step": jnp.broadcast_to(state.step, state.frozen.shape)})

    @contextlib.contextmanager
    def _keyed(self, key: Any) -> Iterator[None]:
        """Returns a context manager that makes the original step use a member's key while the step is traced."""
        step = self._step
        before = step._base_prng, step._init_fn
        step._base_prng, step._init_fn = key, functools.partial(forward.init_fn, *step._init_fn.args[:2], key)
        try:
            yield
        finally:
            step._base_prng, step._init_fn = before


@struct.dataclass
class _MemberMeans:
    """The weighted means of a value, one per member, as a metric with `merge` and `compute`.

    The means are as accurate as if they were computed in float64 on the host.

    Attributes:
      sums: An array of shape `[3, members]`. Its rows are the weighted sums, their rounding errors, and the sums of the
        weights.
    """

    sums: Any

    @classmethod
    def empty(cls) -> "_MemberMeans":
        return cls(np.zeros([3, 1], np.float32))

    def merge(self, other: "_MemberMeans") -> "_MemberMeans":
        """Merges two metrics by adding their sums. Also accumulates the rounding errors (Knuth's 2Sum)."""
        sums, one, two = self.sums + other.sums, self.sums[0], other.sums[0]
        added = sums[0] - one
        return _MemberMeans(jnp.asarray(sums).at[1].add((one - (sums[0] - added)) + (two - added)))

    def compute(self) -> dict[str, np.float64]:
        """Returns a dict with the mean of each member whose sum of weights isn't 0.

        The keys are the indices of the members, as strings. If there are at least two such members, the dict also
        contains the minimum ("min"), the maximum ("max") and the sample standard deviation ("std") of their means.
        """
        total, rest, weight = np.asarray(fetch(self.sums), np.float64)
        measured = np.flatnonzero(weight)
        means = (total + rest)[measured] / weight[measured]
        spread = {"min": means.min(), "max": means.max(), "std": means.std(ddof=1)} if len(means) > 1 else {}
        return dict(zip(map(str, measured), means, strict=True)) | spread


@final
class MemberStopping(EarlyStoppingAction):
    """Stops one member of an ensemble. Ends the run once each member is either stopped or already frozen."""

    def __init__(self, actions: Sequence[EarlyStoppingAction], index: int, *args: Any):
        super().__init__(*args)
        self._actions, self._index = actions, index

    def __call__(self, state: Any, outputs: types.Output, **kwargs: Any) -> None:
        is_frozen = fetch(state.frozen)
        if outputs is None or not (self.is_out_of_patience or is_frozen[self._index]):
            super().__call__(state, None if outputs is None else outputs.copy(), **kwargs)
        if outputs is not None and all(is_frozen | [each.is_out_of_patience for each in self._actions]):
            outputs[types.STOP_LOOP] = True


_array = functools.lru_cache(np.array)  # The steps of a run share the arrays.


@functools.cache
def _state_class(kind: type) -> type:
    """Returns a subclass of a state class that adds the fields `frozen` and `diverged`."""
    fields = {"__annotations__": {"frozen": Any, "diverged": Any}, "frozen": None, "diverged": None}
    return type(f"Ensemble{kind.__name__}", (kind,), fields)


def _of_members(name: str, value: Any, num_examples: jax.Array) -> dict[str, Any]:
    """Returns the ensemble's outputs for a value that has a leading member axis.

    A mean becomes two outputs: the mean over all members, and the means of the individual members. An image or another
    array stays one output, in which the first two axes are merged into one.
    """
    if is_metric(value) or name == types.STOP_LOOP:
        raise TypeError(f"An Ensemble can't report {name!r} for each member. Return a scalar or a jaxloop.Weighted.")
    mean = value_of(value)
    if isinstance(mean, types.MetricWithMetadata) or mean.ndim > 1:
        return {name: jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), value)}
    mean = mean.astype(jnp.promote_types(mean.dtype, jnp.float32))
    weight = jnp.where(num_examples == 0, 0, getattr(value, "weight", num_examples)).astype(mean.dtype)
    means = _MemberMeans(jnp.stack([jnp.where(weight == 0, 0, mean * weight), jnp.zeros_like(mean), weight]))
    return {name: types.Weighted(mean, weight), f"{name}/members": means}


# Arguments -------------------------------------------------------------------------------------------


def _check_step(step: Any, seeds: Any) -> None:
    if not isinstance(step, Step) or isinstance(step, Ensemble):
        raise TypeError(f"Ensemble takes the step of a single run, got {step!r}.")
    if reason := step._runner.work_for_each_step(evaluates=not step.train):
        raise TypeError(f"An Ensemble can't run {step!r} for each member: {reason}.")
    if step.partitioner.mesh is not None:
        raise ValueError(f"{step!r} has a partitioner with a mesh. Give the mesh to the Ensemble: mesh=...")
    if seeds is not None and step.train and jax.tree.leaves(getattr(step._init_fn.args[0], "arrays", None)):
        raise ValueError(f"All members would start with the parameters of {step!r}. Give an NNX class or Linen module.")
    held = {**vars(step), "_base_prng": None}
    is_key = lambda leaf: hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    shared = [name for name, value in held.items() if any(map(is_key, jax.tree.leaves(value)))]
    if seeds is not None and shared:
        raise ValueError(f"All members would share the key {shared[0]!r} of {step!r}. Use its prng_key instead.")


def _members(seeds: Any, hyperparams: Mapping[str, Any], combine: str) -> list[dict[str, Any]]:
    """Returns a list with one dict per member, which contains the member's hyperparameters and its seed (if any)."""
    if combine not in ("product", "zip"):
        raise ValueError(f"combine must be 'product' or 'zip', got {combine!r}.")
    axes = {name: [float(value) for value in values] for name, values in hyperparams.items()}
    axes |= {} if seeds is None else {"seed": [*map(int, range(seeds) if isinstance(seeds, int) else seeds)]}
    lengths = ", ".join(f"{len(values)} of {name!r}" for name, values in axes.items()) or "neither"
    if not axes or not all(axes.values()):
        raise ValueError(f"An Ensemble needs seeds, hyperparams or both, at least one of each, got {lengths}.")
    if combine == "zip" and len({*map(len, axes.values())}) > 1:
        raise ValueError(f"combine='zip' needs as many seeds as values of each hyperparameter, got {lengths}.")
    rows = list(zip(*axes.values(), strict=True) if combine == "zip" else itertools.product(*axes.values()))
    if len({*rows}) < len(rows):
        raise ValueError(f"Two members would be the same run. Give each seed and each value once, got {axes}.")
    return [dict(zip(axes, row, strict=True)) for row in rows]


def _seeded(base_prng: types.PRNGType, seed: int) -> types.PRNGType:
    """Returns the `base_prng` of a member, given the `base_prng` of the original step and the member's seed."""
    if isinstance(base_prng, Mapping):
        return {name: jax.random.fold_in(key, seed) for name, key in base_prng.items()}
    is_typed = jnp.issubdtype(base_prng.dtype, jax.dtypes.prng_key)
    return jax.random.key(seed, impl=jax.random.key_impl(base_prng)) if is_typed else jax.random.PRNGKey(seed)


def _with_hyperparam(opt_state: Any, name: str, values: Sequence[float]) -> Any:
    """Returns a copy of an optimizer state in which the hyperparameter `name` has the given values, one per member."""
    find = functools.partial(optax.tree_utils.tree_get_all_with_path, opt_state)
    known = [each for _, node in find("hyperparams") for each in node]
    scheduled = [each for _, node in find("hyperparams_states") for each in node]
    if known.count(name) != 1 or name in scheduled:
        got = checks.listed(known) or "none"
        raise ValueError(f"optax.inject_hyperparams must set {name!r} once, not as a schedule; it sets {got}.")
    is_injected = lambda path, value: [getattr(key, "name", None) for key in path[-2:-1]] == ["hyperparams"]
    ((_, old),) = find(name, is_injected)
    return optax.tree_utils.tree_set(opt_state, is_injected, **{name: jnp.asarray(values, old.dtype)})
