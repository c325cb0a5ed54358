"""The function `rewind`, which reproduces the state of a run just before a given step."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, final

import jax
from etils import epath

from jaxloop import checkpoint, types
from jaxloop.action_loop import ActionLoop
from jaxloop.base import checks, files
from jaxloop.engine.engine import LoopActions
from jaxloop.engine.feed import Source
from jaxloop.engine.run import Plan
from jaxloop.history import HISTORY_FILE, History, Row
from jaxloop.outer_loop import OuterLoop
from jaxloop.outer_loop.data import LeftOut, TrainingData, batches_of
from jaxloop.outer_loop.evaluations import Recorder
from jaxloop.outer_loop.specs import RunSpec
from jaxloop.outer_loop.training import steps_of_next_loop
from jaxloop.outer_loop.whole_run import WholeRun, step_num_of
from jaxloop.runs import run_log
from jaxloop.schedules import Elapsed


@final
class Rewound(NamedTuple):
    """The result of `rewind`: everything that is needed to repeat one step of a run.

    Attributes:
      state: The train state before the step.
      batch: The step's batch, as the dataset returns it.
      keys: The PRNG keys that `run` uses for the batch; see `Step.prng_key`.
      num_verified: The number of history rows that the repeated steps reproduced.
    """

    state: Any
    batch: types.Batch
    keys: Any
    num_verified: int


def rewind(
    workdir: epath.PathLike,
    outer_loop: OuterLoop,
    step_num: int,
    state: Any = None,
    train_dataset: Iterable[types.Batch] | None = None,
    train_total_steps: int | None = None,
    train_loop_steps: int | None = None,
    *,
    train_epochs: int | None = None,
    verify: bool = True,
) -> Rewound:
    """Reproduces, bit for bit, the state, the batch and the PRNG keys that a run used for a given step.

    This function restores the last checkpoint before the step and repeats the steps from there, without evaluations or
    actions. The work directory isn't changed. You can then run the step again, for example eagerly in a debugger or
    after changing the code of the step:

    >>> import tempfile, jax, jaxloop
    >>> from jaxloop import examples
    >>> step, state, batches = examples.tiny_regression()
    >>> workdir = tempfile.mkdtemp()
    >>> train_loop = jaxloop.TrainLoop(step, end_actions=[jaxloop.CheckpointAction(workdir, jaxloop.every(steps=20))])
    >>> outer_loop = jaxloop.OuterLoop(train_loop, checkpoint_spec=jaxloop.CheckpointSpec(workdir))
    >>> _ = outer_loop(state, batches, train_loop_steps=10)
    >>> before = jaxloop.rewind(workdir, outer_loop, 97, train_dataset=batches, train_loop_steps=10)
    >>> int(before.state.step), before.num_verified
    (96, 1)
    >>> with jax.disable_jit():
    ...     after, outputs = step(before.state, before.batch)
    >>> int(after.step)
    97

    Args:
      workdir: The work directory of the run. There must be at least one checkpoint before the step, unless `state` is
        the run's initial state.
      outer_loop: The experiment, constructed in the same way as for the run. It must not be running.
      step_num: The number of the step, counting updates from 1.
      state: A state with the structure of the run's state, or an abstract state. If None, the `Step` of the train loop
        creates a state with the arguments of the most recent `initialize_model` call. If there is no checkpoint before
        step `step_num`, the run is repeated from this state, which is then donated.
      train_dataset: The dataset that was passed to the run. An iterator must be able to return to an earlier position.
      train_total_steps: The value that was passed to the run; see `OuterLoop`.
      train_loop_steps: The value that was passed to the run; see `OuterLoop`.
      train_epochs: The value that was passed to the run; see `OuterLoop`.
      verify: Whether to compare the metrics of the repeated steps with the history.

    Returns:
      A `Rewound` with the state before the step, the step's batch, its PRNG keys, and the number of history rows that
      were compared.

    Raises:
      FileNotFoundError: If there is neither a checkpoint before the step nor a `state` from an earlier step.
      RuntimeError: If the repeated steps differ from the original ones, for example because the devices are different.
      ValueError: If the run has no step `step_num`, or if the dataset can't return to an earlier position.
    """
    checks.check_only_process("rewind")
    checks.check_positive("rewind.step_num", step_num)
    loop = outer_loop.train_loop
    if loop is None:
        raise ValueError("rewind needs an OuterLoop with a train loop.")
    state = loop.step._runner.states.initial() if state is None else state
    if train_total_steps is not None and step_num > train_total_steps:
        raise ValueError(f"The run has no step {step_num}: it ends at train_total_steps={train_total_steps}.")
    before = step_num - loop.step.updates_per_step
    spec = RunSpec(train_dataset, before, train_loop_steps, epochs=train_epochs)
    past, history = run_log.read_history(workdir), History(files.absolute(workdir) / HISTORY_FILE, writes=False)
    detours = batches_of(row.logs["detour"] for row in past.rows if "detour" in row.logs)
    engine, sources, passes = loop.engine, outer_loop.sources, outer_loop.sources.passes
    data = TrainingData(spec, sources, engine, [], LeftOut({*outer_loop.skip, *detours}))
    run = WholeRun({"train": engine, "data": data}, history, engine.job, keys=loop.step.base_prng)
    plan = Plan(
        total=before,
        loop_steps=train_loop_steps,
        items=[row := Recorder(history, "train", outer_loop.log_interval)],
        source=Source(lambda: data.next_epoch(saves=False), data.mark, data.note_consumed),
    )
    engine.set_plan(plan)
    try:
        state = _restored(workdir, outer_loop, state, before, run, data)
        restores = outer_loop.checkpoint_spec is None or outer_loop.checkpoint_spec.restore_data
        data.open(restores=restores, warns=False, must_return=True)
        with _muted(loop, row):
            kept = history.rows
            if loop.step_num != before:
                dataset = lambda: iter(()) if data.source is None else data.source
                state, _ = engine.loops(state, dataset, lambda: steps_of_next_loop(loop))
            batch = _next_batch(loop, data)
    finally:
        engine.set_plan(None)
        sources.passes = passes
    if batch is None and train_dataset is not None:
        raise ValueError(f"The run has no step {step_num}: its data end at step {step_num_of(state)}.")
    num_verified = _verified(history, past) - _verified(kept, past) if verify else 0
    return Rewound(state, batch, loop.step.prng_key(before), num_verified)


def _next_batch(loop: ActionLoop, data: TrainingData) -> types.Batch:
    """Returns the batch for the next step, or None at the end of the data. Begins a new epoch if necessary."""
    for _ in range(2):
        with contextlib.suppress(StopIteration):
            return None if data.source is None else loop.engine.data.next_batch(data.source)
        data.next_epoch(saves=False)
    return None


def _restored(
    workdir: epath.PathLike, outer_loop: OuterLoop, state: Any, before: int, run: WholeRun, data: TrainingData
) -> Any:
    """Restores the run from its newest checkpoint of step `before` or earlier. Returns the restored state.

    If there is no such checkpoint, returns the given state.
    """
    spec, train_loop, given = outer_loop.checkpoint_spec, outer_loop.train_loop, checks.adopt(state)
    assert train_loop is not None
    places = [files.absolute(workdir), files.absolute(workdir) / "checkpoints"]
    places += [] if spec is None else [spec.checkpoint_dir]
    paths = [path for path in checkpoint.all_paths(places) if int(path.name) <= before]
    template = checkpoint.template_of(given)
    found = checkpoint.open_newest(paths, lambda each: each.restore(template), quarantines=False)
    start = Elapsed(_initial_step(given, before, places)) if found is None else found[0].elapsed()
    data.begin(start.loops)
    train_loop.resume(start)
    run.rows.begin(start.steps)
    if found is not None:
        run.load(found[0], template)
    run.rows.drop_later(start.steps)
    return given if found is None else found[1]


def _initial_step(given: Any, before: int, places: Iterable[epath.Path]) -> int:
    """Returns the step number of the given state, from which the run is to be repeated.

    Raises:
      FileNotFoundError: If the state is abstract, or if its step is later than `before`. The message lists `places`,
        the directories that were searched for checkpoints.
    """
    is_abstract = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(given))
    step_num = before + 1 if is_abstract else step_num_of(given)
    if step_num > before:
        raise FileNotFoundError(
            f"There is no checkpoint of step {before} or earlier in {', '.join(map(str, places))}. Give the initial "
            "state of the run, to repeat it from there."
        )
    return step_num


@contextlib.contextmanager
def _muted(loop: Any, row: Recorder) -> Iterator[None]:
    """Returns a context manager that disables all actions of a loop and of the loop's step.

    The recorder `row`, which adds rows to the history, is still called.
    """
    engine, runner = loop.engine, loop.step._runner
    of_loop, of_step = engine.actions, runner.action_lists
    engine.run.agenda.items, engine.actions = [row], LoopActions()
    runner.action_lists = (), ()
    try:
        yield
    finally:
        engine.actions, runner.action_lists = of_loop, of_step


def _verified(rows: Iterable[Row], past: History) -> int:
    """Compares the train metrics of each row in `rows` with those of the row in `past` that covers the same steps.

    Returns the number of rows compared. Rows without such a row in `past` are skipped.

    Raises:
      RuntimeError: If a value differs.
    """
    known, count = dict(_by_steps(past.rows)), 0
    for steps, values in _by_steps(rows):
        if steps not in known:
            continue
        count += 1
        different = [name for name, value in values.items() if not _is_same(value, known[steps].get(name))]
        if different:
            name = different[0]
            raise RuntimeError(
                f"The repeated step {steps[1]} has {name}={values[name]!r}, and the history has "
                f"{known[steps].get(name)!r}. Repeat the run on the same devices, with the same program and the same "
                "data, or write rewind(..., verify=False)."
            )
    return count


def _by_steps(rows: Iterable[Row]) -> Iterator[tuple[tuple[int, int], Mapping[str, Any]]]:
    """Yields a pair `((begin, end), metrics)` for each row that has train metrics.

    The row covers the steps after `begin`, up to and including `end`. `begin` is the step of the previous row with
    train metrics, or 0 if there is no such row.
    """
    before = 0
    for row in rows:
        if "train" in row.logs:
            yield (before, row.elapsed.steps), row.logs["train"]
            before = row.elapsed.steps


def _is_same(one: Any, other: Any) -> bool:
    return one == other or (one != one and other != other)
