"""What would go wrong in a run, found before it, all at once. No step is run, and nothing is made of the state."""

import contextlib
import dataclasses
import inspect
import math
import os
import pathlib
import re
import shutil
import textwrap
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath

from jaxloop import checkpoint, checks, distributed, encoding, fingerprint, lock, metrics, partition, types, whole_run
from jaxloop.action_loop import ActionLoop
from jaxloop.actions.action import Action
from jaxloop.actions.monitor import Monitor
from jaxloop.actions.summary_action import SummaryAction
from jaxloop.data import is_endless, num_batches
from jaxloop.eval_loop import EvalLoop
from jaxloop.forecast import Calls, Course
from jaxloop.history import History
from jaxloop.layout import readable
from jaxloop.position import PositionedIterator
from jaxloop.schedules import Elapsed, Schedule, earliest, is_never
from jaxloop.specs import CheckpointSpec, EvalSpec
from jaxloop.step import Step

_PACKAGE = pathlib.Path(__file__).parent
_WIDTH = 110
# So long, and so many batches, an evaluation's data without a length are looked at for their end.
_LOOK_SECS, _LOOK_BATCHES = 0.5, 10_000
# More than so much of what steps return is too much to keep until the end of a loop.
_MOST_OUTPUT_BYTES = 2**30
_TRAIN = "the train loop"
# What a loop calls its actions with, by name.
_CONTEXT = ("step_num", "elapsed", "history", "total_steps", "spent", "snapshot")


@dataclasses.dataclass(frozen=True)
class Problem:
    """Something that would go wrong.

    Attributes:
      where: in which part of the run, such as "train step" or "eval 'test'".
      text: what was expected, what is there, and what to do.
      is_error: whether the run would fail; else it would do something that is hardly meant.
    """

    where: str
    text: str
    is_error: bool = True


class CheckError(ValueError):
    """A run would fail; the text is the report of what would."""


@dataclasses.dataclass(frozen=True)
class Report:
    """What `OuterLoop.check` has found. It prints as one screen.

    >>> report = Report([Problem("eval 'test'", "Its data have no end.")], {"train": "600 steps"}, secs=0.5)
    >>> print(report)
    1 error. Nothing was run; it took 0.5 s.
    <BLANKLINE>
      train  600 steps
    <BLANKLINE>
      error in eval 'test':
        Its data have no end.

    Attributes:
      problems: what would go wrong, errors first.
      plan: how the run will go: lines by what they are about.
      secs: how long it took, in seconds.
      calls: when each action of the loops will be called, as far as that is foreseen.
    """

    problems: Sequence[Problem]
    plan: Mapping[str, str]
    secs: float = 0.0
    calls: Mapping[Action, Calls] = dataclasses.field(default_factory=dict)

    @property
    def errors(self) -> Sequence[Problem]:
        """The problems with which the run would fail."""
        return [problem for problem in self.problems if problem.is_error]

    @property
    def warnings(self) -> Sequence[Problem]:
        """The other problems."""
        return [problem for problem in self.problems if not problem.is_error]

    @property
    def ok(self) -> bool:
        """Whether there is no problem at all."""
        return not self.problems

    def raise_errors(self) -> None:
        """Raises a `CheckError` if there are errors."""
        if self.errors:
            raise CheckError(str(self))

    def __str__(self) -> str:
        counts = [(len(self.errors), "error"), (len(self.warnings), "warning")]
        found = [f"{count} {name}{'s' if count > 1 else ''}" for count, name in counts if count]
        lines = [f"{', '.join(found) or 'No problem'}. Nothing was run; it took {self.secs:.1f} s.", ""]
        width = max((len(name) for name in self.plan), default=0)
        for name, text in self.plan.items():
            lines += _wrapped(text, f"  {name:<{width}}  ", " " * (width + 4))
        for problem in self.problems:
            lines += ["", f"  {'error' if problem.is_error else 'warning'} in {problem.where}:"]
            for line in problem.text.splitlines():
                lines += _wrapped(line, "    ", "      " if line.startswith(" ") else "    ")
        return "\n".join(lines)

    __repr__ = __str__  # The last line of a notebook's cell shows it.


def _wrapped(text: str, first: str, later: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=first, subsequent_indent=later, break_long_words=False, break_on_hyphens=False
    )


@dataclasses.dataclass(frozen=True)
class Experiment:
    """What is to be looked at: an `OuterLoop` and what it would be called with.

    Attributes:
      train_loop: None where something is only evaluated.
      evaluations: for each its name, loop and spec.
      open_train_data: opens the train data, as the run would.
      open_eval_data: opens the iterator that an evaluation goes on with, as the run would.
      passes: how many passes over the train data have ended, if the run goes on where the last call ended.
    """

    state: Any
    train_loop: ActionLoop | None
    evaluations: Sequence[tuple[str, ActionLoop, EvalSpec]]
    checkpoint_spec: CheckpointSpec | None
    workdir: epath.PathLike | None
    log_interval: int | Schedule
    train_dataset: Any
    open_train_data: Callable[[], PositionedIterator]
    open_eval_data: Callable[[Any], PositionedIterator]
    total_steps: int | None
    loop_steps: int | None
    epochs: int | None
    stop: Schedule | None
    on_exhausted: str
    passes: int


@dataclasses.dataclass(frozen=True)
class _Begin:
    """Where a run begins.

    Attributes:
      elapsed: how far it is.
      passes: how many passes over its data have ended.
      batches: how many batches of this pass are used.
      evaluations: how often each evaluation has run, by name.
      has_stopped: whether it was asked to stop there.
    """

    elapsed: Elapsed
    passes: int = 0
    batches: int = 0
    evaluations: Mapping[str, int] = dataclasses.field(default_factory=dict)
    has_stopped: bool = False


def look(experiment: Experiment, errors: Sequence[Exception]) -> Report:
    """Looks at all of an experiment; `errors` are those that its arguments have already."""
    began = time.perf_counter()
    looking = _Looking(experiment)
    for error in errors:
        looking.add("the arguments", str(error))
    looking.look()
    places: dict[tuple[str, bool], list[str]] = {}  # What is wrong with a step is so in training and in evaluation.
    for problem in looking.problems:
        places.setdefault((problem.text, problem.is_error), []).append(problem.where)
    joined = [Problem(" and ".join(dict.fromkeys(where)), *what) for what, where in places.items()]
    problems = sorted(joined, key=lambda problem: not problem.is_error)
    return Report(problems, looking.plan, time.perf_counter() - began, looking.calls)


class _Looking:
    """One look at an experiment."""

    def __init__(self, experiment: Experiment):
        self._of = experiment
        self._train_loop = experiment.train_loop
        self._loops = {_TRAIN: self._train_loop} if self._train_loop is not None else {}
        self._loops |= {f"eval {name!r}": loop for name, loop, _ in experiment.evaluations}
        # What the history calls them.
        self._names = {_TRAIN: "train"} | {f"eval {name!r}": name for name, _, _ in experiment.evaluations}
        self._given: Any = None  # The state, if it is one, and no shapes.
        self._open: set[str] = set()  # Loops of which only a run can tell what their steps get.
        self._outputs: dict[str, metrics.LoopOutputs | None] = {}  # By the same names; None where nobody knows them.
        self._evaluations: dict[str, Calls] = {}  # When they come.
        self.problems: list[Problem] = []
        self.plan: dict[str, str] = {}
        self.calls: dict[Action, Calls] = {}

    def add(self, where: str, text: str, *, is_error: bool = True) -> None:
        self.problems.append(Problem(where, text, is_error))

    @contextlib.contextmanager
    def _finding(self, where: str) -> Iterator[None]:
        """Takes down what is raised as an error of the run."""
        try:
            yield
        except Exception as error:
            self.add(where, _told(error))

    def look(self) -> None:
        of, train_loop, state = self._of, self._train_loop, self._look_at_state()
        source, batch = self._open_train_data() if train_loop is not None else (None, None)
        begin = self._look_at_checkpoints(state, source)
        course = self._course(begin, source if batch is not None else None, batch)
        self._longest_loop = course.steps_of_longest_loop
        if train_loop is not None:
            self._look_at_length(course, begin, source if batch is not None else None, state)
            self._outputs[_TRAIN] = None
            if state is not None and batch is not None:
                self._outputs[_TRAIN] = self._look_at_step(_TRAIN, train_loop, state, batch)
        for name, loop, spec in of.evaluations:
            self._look_at_evaluation(name, loop, spec, course, state)
        if train_loop is not None and state is not None and batch is not None:
            self._look_at_cost(train_loop, state, batch)
        self._look_at_actions(begin, course, state)
        if train_loop is not None:
            self._look_at_log_interval(course)
            self._look_at_saving(course, state, source)
            if source is not None and not hasattr(of.train_dataset, "__next__"):
                source.close()

    def _look_at_state(self) -> Any:
        """The state in shapes; None where it is none to begin with."""
        with self._finding("the state"):
            given = self._of.state
            if given is None:
                raise TypeError("The state is None. Give that of step.initialize_model(...), or its shapes.")
            checks.check_alive(given, "OuterLoop(...)")
            if not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(given)):
                given = self._given = checks.adopt(given)
            state = jax.tree.map(_shape_of, given)
            step = getattr(state, "step", None)
            if step is not None and (step.shape or step.dtype.kind not in "iu"):
                raise TypeError(f"state.step must be an integer scalar, got {checks.describe(step)}.")
            return state

    # The data ------------------------------------------------------------------------------------------

    def _open_train_data(self) -> tuple[PositionedIterator | None, types.Batch | None]:
        source = batch = None
        with self._finding("the train data"):
            source = self._of.open_train_data()
            try:
                batch = source.peek()
            except StopIteration:
                raise checks.empty_dataset(self._of.train_dataset) from None
            known = self._batches_of_pass(source)
            count = (
                f"{known:,} batches" if known is not None else "endless batches" if is_endless(source) else "batches"
            )
            self.plan["train data"] = f"{count} of {checks.batch_in_words(batch)}"
        return source, batch

    def _look_at_evaluation(self, name: str, loop: ActionLoop, spec: EvalSpec, course: Course, state: Any) -> None:
        where = f"eval {name!r}"
        calls = self._evaluations[name] = self._when_evaluated(spec, course)
        self._outputs[where] = None
        if isinstance(loop, EvalLoop) and loop.step.train:
            self.add(where, f"It evaluates by {loop.said_of_training}", is_error=False)
        if calls.is_never and not course.is_over:
            what = f"schedule={spec.schedule!r}" if spec.schedule else f"eval_loop_interval={spec.eval_loop_interval}"
            self.add(where, f"It would never run: {what}, and {_course_in_words(course)}.", is_error=False)
        batch, count = None, "?"
        with self._finding(where):
            batch, count = self._open_eval_data(where, spec, calls)
        self.plan[where] = f"{calls}; {count}"
        if batch is not None and state is not None:
            self._outputs[where] = self._look_at_step(where, loop, state, batch, evaluates=True)

    def _when_evaluated(self, spec: EvalSpec, course: Course) -> Calls:
        if self._train_loop is None:
            spec_of_checkpoints = self._of.checkpoint_spec
            if spec_of_checkpoints is None:
                return Calls((course.start.steps,))
            return Calls(tuple(checkpoint.all_steps(spec_of_checkpoints.checkpoint_dir)), is_all=False)
        calls = course.loops(spec.eval_loop_interval or 1) if spec.schedule is None else course.calls(spec.schedule)
        return calls if spec.should_eval_fn is None else dataclasses.replace(calls, at_most=True)

    def _open_eval_data(self, where: str, spec: EvalSpec, calls: Calls) -> tuple[types.Batch | None, str]:
        """The first batch of an evaluation, and how many there are, in words."""
        if spec.dataset_iterator is not None:
            source = self._of.open_eval_data(spec.dataset_iterator)
            self._look_at_amount(where, spec, num_batches(source), calls)
            try:
                return source.peek(), f"{spec.num_steps} batches each time"
            except StopIteration:
                raise spec.empty() from None
        if hasattr(spec.dataset, "__next__"):
            self._look_at_amount(where, spec, num_batches(spec.dataset), calls)
            if spec.num_steps is None and not calls.at_most and (len(calls.steps) > 1 or not calls.is_all):
                self.add(
                    where,
                    f"It will run more than once, and its dataset is {checks.describe(spec.dataset)}, an iterator, "
                    "which gives its batches only once. Give an iterable that starts anew each time (a list, a "
                    "tf.data.Dataset), or EvalSpec(None, dataset_iterator=..., num_steps=...) to go on with it.",
                )
            return None, "batches of an iterator"
        batches: Any = iter(spec.dataset)  # pyright: ignore[reportArgumentType, reportCallIssue]
        try:
            first = next(batches, None)
            if first is None:
                raise spec.empty()
            known = num_batches(spec.dataset)
            if spec.num_steps is not None:
                if known is not None and known < spec.num_steps:
                    text = (
                        f"num_steps={spec.num_steps}, and its dataset has {known} batches: those are all it will see."
                    )
                    self.add(where, f"{text} Lower num_steps, or leave it out.", is_error=False)
                return first, f"{spec.num_steps} batches"
            if is_endless(spec.dataset):
                text = "Its dataset has no end, so it would never end either."
                self.add(where, f"{text} Set num_steps in its EvalSpec, or give data that end.")
                return first, "endless batches"
            if known is None:
                return first, self._look_for_end(where, batches)
            return first, f"{known} batch{'es' if known > 1 else ''}"
        finally:
            if hasattr(batches, "close"):
                batches.close()

    def _look_at_amount(self, where: str, spec: EvalSpec, there: int | None, calls: Calls) -> None:
        """Says where an iterator has fewer batches than its evaluations draw."""
        needed = (spec.num_steps or 0) * len(calls.steps)
        if there is not None and there < needed and not calls.at_most:
            self.add(
                where,
                f"Its {len(calls.steps)} evaluations draw num_steps={spec.num_steps} batches each, and its iterator "
                f"has {there}. Give one that has enough of them, or a dataset that starts anew each time.",
            )

    def _look_for_end(self, where: str, batches: Iterator[Any]) -> str:
        """Draws batches for a moment; says how many there are."""
        count, began = 1, time.perf_counter()
        while time.perf_counter() - began < _LOOK_SECS and count < _LOOK_BATCHES:
            if next(batches, None) is None:
                return f"{count} batch{'es' if count > 1 else ''}"
            count += 1
        if count == _LOOK_BATCHES:
            self.add(
                where,
                f"Its dataset has not ended after {count:,} batches. If it repeats without end, set num_steps in its "
                "EvalSpec, or give data that end.",
                is_error=False,
            )
        return f"at least {count:,} batches"

    # The step ------------------------------------------------------------------------------------------

    def _look_at_step(
        self, where: str, loop: ActionLoop, state: Any, batch: types.Batch, *, evaluates: bool = False
    ) -> metrics.LoopOutputs | None:
        """Takes a batch through a step's hooks and traces `run`; returns outputs like those of the loop.

        None where nobody knows them: with an error, and where a method of the user may add to them.
        """
        step = loop.step
        with self._finding(where):
            if evaluates:
                step.begin_evaluation()
            ready = self._ready_for_run(step, loop, state, batch)
            if ready is None:
                self._open.add(where)
                return None
            if not self._look_at_batch(where, step, batch, ready, evaluates):
                return None
            traced = step.trace(state, ready, evaluates=evaluates)
            if not evaluates:
                self._look_at_new_state(where, step, state, traced)
            if not (_is_ours(step, "end") and _is_ours(loop, "end") and _is_ours(loop, "update_outputs")):
                return None
            self._look_at_size(where, loop, traced.outputs)
            # Not zeros, by which a metric may divide.
            ones = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), traced.outputs or {})
            return metrics.LoopOutputs({name: [metrics.fetch(value)] for name, value in ones.items()}, [1])

    def _ready_for_run(self, step: Step, loop: ActionLoop, state: Any, batch: types.Batch) -> types.Batch | None:
        """A batch as the hooks before `run` leave it; None where only a run can tell.

        So it is where the user has another way to `run`, and where `begin` wants values of a state that is given in
        shapes, or makes another one.
        """
        ways = {step: ("step", "evaluate", "shard_batch"), loop: ("begin", "run", "_get_next_batch", "_run_one_step")}
        if not all(_is_ours(thing, name) for thing, names in ways.items() for name in names):
            return None
        if _is_ours(step, "begin"):
            return step.before_run(state, batch)[1]
        given = state if self._given is None else self._given
        try:
            result = step.begin(given, step.preprocess_batch(batch))
        except Exception:
            if self._given is None:
                return None
            raise
        new_state, ready = checks.check_pair(result, f"{type(step).__name__}.begin", "(state, batch)")
        return ready if new_state is given else None

    def _look_at_batch(self, where: str, step: Any, batch: Any, ready: Any, evaluates: bool) -> bool:
        """Says what is wrong with a batch that is ready for `run`; returns whether it can be traced."""
        problems = list(checks.problems_of_batch(ready))
        for problem in problems:
            self.add(where, problem)
        if problems:
            return False
        with self._finding(where):
            if changed := checks.problem_of_dtypes(ready):
                self.add(where, changed, is_error=False)
        if checks.num_examples(batch) is None and _is_ours(step, "num_examples"):
            self.add(
                where,
                f"Each batch counts as one example, because its leaves don't share a leading axis: "
                f"{checks.batch_in_words(batch)}. Override Step.num_examples(batch) for weighted means.",
                is_error=False,
            )
        with self._finding(where):
            if not evaluates:
                step.shard_batch(ready)
        return True

    def _look_at_new_state(self, where: str, step: Any, state: Any, traced: Any) -> None:
        if hasattr(state, "step") and not traced.counts:
            self.add(
                where,
                f"{type(step).__name__}.run returns state.step as it was, and each training step must add one to it: "
                "return state.apply_gradients(grads=...), or state.replace(step=state.step + 1)."
                + ("" if step.train else " (The step has train=False: did you mean Step(..., train=True)?)"),
            )
        before, after = checks.leaves_by_path(state), checks.leaves_by_path(traced.state)
        for what, one, other in (
            (f"{type(step).__name__}.run returns", after, before),
            ("The state that is given has", before, after),
        ):
            weak = [path for path, leaf in one.items() if _is_weak(leaf) and not _is_weak(other[path])]
            if weak:
                self.add(
                    where,
                    f"{what} weakly typed leaves ({', '.join(weak[:4])}), so that run is compiled twice. A number such "
                    "as jnp.asarray(0.0) is weakly typed, jnp.float32(0.0) is not.",
                    is_error=False,
                )

    def _look_at_size(self, where: str, loop: ActionLoop, outputs: types.Output) -> None:
        """Says where what the steps return, which is kept until the loop ends, is very much."""
        sizes = {name: _bytes_of(value) for name, value in (outputs or {}).items() if not metrics.is_metric(value)}
        steps = self._longest_loop if loop is self._train_loop else None
        largest = max(sizes, key=lambda name: sizes[name], default=None)
        if steps is not None and largest is not None and sum(sizes.values()) * steps > _MOST_OUTPUT_BYTES:
            self.add(
                where,
                f"What a loop's {steps:,} steps return is kept on the host until the loop ends, which takes "
                f"{readable(sum(sizes.values()) * steps)}, the most of it for the output {largest!r}, "
                f"{readable(sizes[largest])} a step. Return less of it, or have shorter loops (train_loop_steps).",
                is_error=False,
            )

    def _look_at_cost(self, loop: ActionLoop, state: Any, batch: types.Batch) -> None:
        """Compiles the train step, and says what it takes of a device."""
        step, layout = loop.step, None
        with self._finding(_TRAIN):
            layout = step.partitioner.report(state)
            parts = {"parameters": "params", "optimizer": "opt_state"}
            sizes = {
                name: sum(leaf.bytes_per_device for leaf in layout.leaves if leaf.path.split("/")[0] == field)
                for name, field in parts.items()
            }
            shown = ", ".join(f"{name} {readable(size)}" for name, size in sizes.items() if size)
            self.plan["state"] = f"{readable(layout.bytes_per_device)} per device" + (f": {shown}" if shown else "")
        is_wrong = any(problem.where == _TRAIN and problem.is_error for problem in self.problems)
        if is_wrong or _TRAIN in self._open:
            return  # It could not be compiled, or for something else than comes.
        with self._finding(_TRAIN):
            # A `begin` of the user may want its values.
            loop.compile(state if self._given is None or _is_ours(step, "begin") else self._given, batch)
            cost = step.cost_analysis()
            memory = partition.memory_of(jax.local_devices()[0])
            of = "" if memory is None else f" of {readable(memory)}"
            flops = "" if cost.flops is None else f"{cost.flops:.3g} FLOPs; "
            self.plan["step"] = (
                f"{flops}{readable(cost.peak_bytes)}{of} per device, of which {readable(cost.temp_bytes)} for "
                "activations and gradients"
            )
            if memory is not None and cost.peak_bytes > memory:
                self.add(
                    _TRAIN,
                    f"A step takes {readable(cost.peak_bytes)} of a device, which has {readable(memory)}. Split the "
                    "state over more devices (FSDPPartitioner), make the batch smaller, accumulate gradients, or "
                    "compute activations again in the backward pass (jax.checkpoint).",
                )
            needed, there = cost.peak_bytes * len(jax.local_devices()), _bytes_of_host()
            if jax.default_backend() == "cpu" and there is not None and needed > there:
                text = f"A step takes {readable(needed)}, and this host has {readable(there)} of memory."
                self.add(_TRAIN, f"{text} Take a smaller batch, or another host.", is_error=False)

    # The length of the run -----------------------------------------------------------------------------

    def _course(self, begin: _Begin, source: PositionedIterator | None, batch: Any) -> Course:
        """How far the run goes; where its data end before `train_total_steps`, which is said, up to that."""
        of, start, known = self._of, begin.elapsed, self._batches_of_pass(source)
        pass_begins, end = start.steps - begin.batches, of.total_steps
        if known is not None and of.epochs is not None:
            end = earliest([end, pass_begins + known * max(of.epochs - begin.passes, 0)])
        elif known is not None and end is None:
            end = pass_begins + known
        course = Course(
            start,
            start.steps if begin.has_stopped else end,
            of.loop_steps,
            known if of.epochs is not None else None,
            pass_begins,
            checks.num_examples(batch) or 1,
            knows_loops=of.epochs in (None, 1) or known is not None,
            tells_end=end == of.total_steps,
        )
        return course.ended_by(of.stop) if isinstance(of.stop, Schedule) else course

    def _batches_of_pass(self, source: PositionedIterator | None) -> int | None:
        """How many batches a pass has; of an iterator, how many are left. None where nobody knows."""
        if source is None:
            return None
        return num_batches(source if hasattr(self._of.train_dataset, "__next__") else self._of.train_dataset)

    def _look_at_length(self, course: Course, begin: _Begin, source: PositionedIterator | None, state: Any) -> None:
        of, known = self._of, self._batches_of_pass(source)
        self.plan["train"] = f"{_course_in_words(course)}; loops end {course.loops()}"
        if begin.has_stopped:
            text = "was asked to stop there, by an evaluation or an action"
            self.add(_TRAIN, f"Nothing is left to train: the run of step {course.start.steps} {text}.", is_error=False)
        elif course.is_over:
            self.add(
                _TRAIN,
                f"Nothing is left to train: the run is at step {course.start.steps}, and ends at step {course.end}.",
                is_error=False,
            )
        step = getattr(state, "step", None)
        if step is not None and course.end is not None and course.end > np.iinfo(step.dtype).max:
            text = f"state.step, {checks.describe(step)}, counts to {np.iinfo(step.dtype).max}"
            self.add(_TRAIN, f"{text}, and the run goes to step {course.end}. Make it an int32.")
        if source is None:
            return
        data_end = None if known is None else course.start.steps - begin.batches + known
        if of.epochs is None and of.total_steps is not None and data_end is not None and data_end < (course.end or 0):
            self.add(
                "the train data",
                f"They end at step {data_end}, after {known} batches, and train_total_steps={of.total_steps}. Repeat "
                "the dataset (train_epochs says how often), or lower train_total_steps.",
                is_error=of.on_exhausted == "raise",
            )
        if of.stop is None and course.end is None and of.epochs is None and is_endless(source):
            self.add(
                _TRAIN,
                "Nothing ends the run: its data have no end, and there is neither train_total_steps nor stop. Give one "
                "of them, if no action is to stop it.",
                is_error=False,
            )

    # Checkpoints ---------------------------------------------------------------------------------------

    def _look_at_checkpoints(self, state: Any, source: PositionedIterator | None) -> "_Begin":
        """Looks at the directories, and at the checkpoint that the run would go on from; says where it begins."""
        of, begin = self._of, self._begin_without_checkpoint()
        for directory in self._directories():
            with self._finding(f"the directory {directory}"):
                checkpoint.prepare_directory(directory)
                if self._train_loop is not None and distributed.is_first_process():
                    with lock.DirectoryLock(directory):
                        pass
        if of.workdir is not None:
            with self._finding(f"the work directory {of.workdir}"):
                checkpoint.prepare_directory(of.workdir)
        if of.checkpoint_spec is not None:
            with self._finding("the checkpoint"):
                begin = self._look_at_newest_checkpoint(of.checkpoint_spec, state, source, begin)
        if self._train_loop is not None:
            with self._finding("the checkpoints"):
                whole_run.check_no_newer_checkpoints(self._train_loop, begin.elapsed.steps)
        return begin

    def _begin_without_checkpoint(self) -> "_Begin":
        """Where the run begins by its state: where the last call ended, if it goes on from there."""
        loop, given = self._train_loop, self._given
        step = 0 if given is None or not hasattr(given, "step") else int(metrics.fetch(given.step))
        if loop is None:
            return _Begin(Elapsed(step))
        goes_on = given is not None and (not hasattr(given, "step") or step == loop.step_num)
        start = dataclasses.replace(loop.elapsed, is_last=False, previous=None) if goes_on else Elapsed(step)
        if self._of.loop_steps is not None:
            start = dataclasses.replace(start, loops=start.steps // self._of.loop_steps)
        return _Begin(start, passes=self._of.passes if goes_on else 0)

    def _directories(self) -> list[Any]:
        spec, loop = self._of.checkpoint_spec, self._train_loop
        found = [] if loop is None else [action.directory for action in whole_run.checkpoint_actions(loop)]
        return list(dict.fromkeys([*found, *([] if spec is None else [checkpoint.absolute(spec.checkpoint_dir)])]))

    def _look_at_newest_checkpoint(
        self, spec: CheckpointSpec, state: Any, source: PositionedIterator | None, begin: "_Begin"
    ) -> "_Begin":
        saved = checkpoint.all_steps(spec.checkpoint_dir)
        if not saved:
            self.plan["checkpoint"] = f"none yet in {spec.checkpoint_dir}"
            return begin
        if saved[-1] < begin.elapsed.steps:
            self.plan["checkpoint"] = f"the newest, of step {saved[-1]}, is behind the state: going on from the state"
            return begin
        self.plan["checkpoint"] = f"goes on from step {saved[-1]:,} in {spec.checkpoint_dir}"
        if state is not None and spec.transforms is None:
            with self._finding("the checkpoint"):
                checkpoint.check_fits(spec.checkpoint_dir, saved[-1], state)
        noted = checkpoint.metadata(spec.checkpoint_dir, saved[-1]).get("elapsed", {"steps": saved[-1]})
        run, begin = checkpoint.run(spec.checkpoint_dir, saved[-1]), _Begin(Elapsed(**noted))
        if run and self._train_loop is not None:
            with self._finding("the checkpoint"):
                whole_run.check_keys(run, encoding.encode_keys(self._train_loop.step.base_prng), spec.checkpoint_dir)
            position = run["positions"][0]["data"]
            if position and source is not None and spec.restore_data:
                with self._finding("the train data"):
                    before = position["fingerprint"]
                    fingerprint.check_same(before.get("source"), fingerprint.describe_source(self._of.train_dataset))
                    fingerprint.check_same(before.get("batch"), fingerprint.describe_batch(source.peek()), sizes=False)
            begin = _Begin(
                Elapsed(**noted),
                run["passes"],
                position["count"] if position and spec.restore_data else 0,
                {name: part["loop_count"] for name, part in run["parts"].items()},
                run["parts"]["train"]["has_stopped"],
            )
        return begin

    def _look_at_saving(self, course: Course, state: Any, source: PositionedIterator | None) -> None:
        assert self._train_loop is not None
        spec, actions = self._of.checkpoint_spec, whole_run.checkpoint_actions(self._train_loop)
        directories = [action.directory for action in actions]
        if spec is not None and checkpoint.absolute(spec.checkpoint_dir) not in directories:
            got = f"saves to {', '.join(map(str, directories))}" if directories else "has no CheckpointAction"
            self.add(
                "the checkpoints",
                f"The run would go on from checkpoints in {spec.checkpoint_dir}, and the train loop {got}: a run that "
                "is killed would begin anew. Give CheckpointAction and CheckpointSpec the same directory.",
                is_error=False,
            )
        for directory in {each for each in directories if directories.count(each) > 1}:
            text = f"Two CheckpointActions save to {directory}: a step can be saved once. Join their schedules with |."
            self.add("the checkpoints", text, is_error=False)
        size = sum(_bytes_of(leaf) for leaf in jax.tree.leaves(state))
        goes_on_in_data = actions and spec is not None and spec.restore_data and self._of.epochs is None
        if goes_on_in_data and source is not None and source.kind == "unknown":
            text = f"{source.problem} A run that goes on from a checkpoint trains on what it gives then."
            self.add("the train data", text, is_error=False)
        for number, action in enumerate(actions, start=1):
            calls = _calls_in_training(action, course, at="end")
            kept = len(calls.steps) if action.keep is None else action.keep
            keeps = "all" if action.keep is None else f"the newest {action.keep}"
            keeps += " and the best" if action.monitors and action.keep is not None else ""
            name = "saves" if number == 1 else f"saves {number}"
            self.plan[name] = f"{calls}; {readable(size)} each, {keeps} kept in {action.directory}"
            needed, free = size * (max(kept + bool(action.monitors), 1) + 1), _free_bytes(action.directory)
            if free is not None and free < needed:
                self.add(
                    "the checkpoints",
                    f"{kept} checkpoints of {readable(size)} and one in the making take {readable(needed)}, and "
                    f"{action.directory} has {readable(free)} free. Keep fewer, or give another directory.",
                    is_error=False,
                )

    # Actions -------------------------------------------------------------------------------------------

    def _look_at_log_interval(self, course: Course) -> None:
        interval = self._of.log_interval
        calls = course.calls(interval) if isinstance(interval, Schedule) else course.loops(interval)
        if calls.is_never and not course.is_over and not is_never(interval):
            text = f"log_interval={interval!r} never comes, so the history would have no row of the training"
            self.add("OuterLoop", f"{text}: {_course_in_words(course)}.", is_error=False)

    def _look_at_actions(self, begin: "_Begin", course: Course, state: Any) -> None:
        written: dict[Any, tuple[str, set[str]]] = {}
        told: set[int] = set()
        for where, loop in self._loops.items():
            outputs = self._outputs.get(where)
            for each in loop.action_lists:
                if id(each) in told:
                    continue  # Of a step that two loops share.
                told.add(id(each))
                at = "step" if each.unit != "loops" else "begin" if each is loop.action_lists[0] else "end"
                for action in each.actions:
                    calls = self.calls[action] = self._when_called(action, where, begin, course, at)
                    self._look_at_action(action, where, calls, course, state, None if at == "begin" else outputs, at)
                    if isinstance(action, SummaryAction) and outputs is not None and at == "end":
                        self._look_for_same_names(action, where, outputs, written)

    def _when_called(self, action: Action, where: str, begin: "_Begin", course: Course, at: str) -> Calls:
        if where == _TRAIN:
            return _calls_in_training(action, course, at=at)
        interval, evaluations = action.interval, self._evaluations[self._names[where]]
        if at == "step" or (at == "begin" and isinstance(interval, Schedule)):
            return Calls(is_all=False)  # Nobody counts the steps of an evaluation here.
        if isinstance(interval, Schedule):
            return course.calls_among(evaluations, interval)
        before = begin.evaluations.get(self._names[where], self._loops[where].loop_count)
        return dataclasses.replace(evaluations, steps=evaluations.steps[interval - 1 - before % interval :: interval])

    def _look_at_action(
        self, action: Action, where: str, calls: Calls, course: Course, state: Any, outputs: Any, at: str
    ) -> None:
        of = f"{action!r} of {where}"
        if not type(action).__module__.startswith("jaxloop."):
            self.plan[type(action).__name__] = str(calls)
        if calls.is_never and not course.is_over and not is_never(action.interval):
            counts = f"interval={action.interval!r}"
            if not isinstance(action.interval, Schedule):
                counts += f" counts {'steps within the loop' if at == 'step' else 'loops'}"
            self.add(of, f"It would never be called: {counts}, and {_course_in_words(course)}.", is_error=False)
        with self._finding(of):
            found: Any = action.check(state, outputs if outputs is not None or at == "begin" else {})
            if isinstance(found, str) or not isinstance(found, Iterable):
                raise TypeError(f"{type(action).__name__}.check must yield sentences, or return a list, got {found!r}.")
            for text in found:
                self.add(of, text)
        with self._finding(of):
            self._look_at_contract(of, action)
        if at == "end":
            for monitored in action.monitors:
                with self._finding(of):
                    self._look_for_metric(of, Monitor(monitored), action, where, calls, outputs)

    def _look_at_contract(self, of: str, action: Action) -> None:
        """Says where an action can't be called as loops do, or can't go on from a checkpoint."""
        name = type(action).__name__
        try:
            inspect.signature(action).bind(None, None, **dict.fromkeys(_CONTEXT))
        except TypeError as error:
            self.add(
                of,
                f"{name}.__call__ can't be called with (state, outputs, {', '.join(f'{each}=' for each in _CONTEXT)}): "
                f"{error}. Write __call__(self, state, outputs, *, step_num, **kwargs).",
            )
        remembered = action.state_dict()
        encoding.encode(remembered)
        if remembered and type(action).load_state_dict is Action.load_state_dict:
            self.add(
                of,
                f"{name}.state_dict returns {sorted(remembered)}, and {name} has no load_state_dict, so that no run "
                "could go on from a checkpoint. Write load_state_dict(self, state_dict), which takes it over.",
            )

    def _look_for_metric(
        self, of: str, monitor: Monitor, action: Action, where: str, calls: Calls, outputs: Any
    ) -> None:
        """Says where what an action monitors is measured nowhere, or never when it is called."""
        if monitor.name.startswith("jaxloop/"):
            return  # A statistic.
        known = {self._names[where]: each and metrics.summarize(each) for where, each in self._outputs.items()}
        group, _, rest = monitor.name.replace(".", "/").partition("/")
        if (group in known and rest and known[group] is None) or (group not in known and None in known.values()):
            return  # It may be among those that nobody knows.
        own, groups = metrics.summarize(outputs), {name: each for name, each in known.items() if each}
        history = _history_of(groups)
        if monitor.is_measured(own, None):
            return
        if not monitor.is_measured((), history):
            self.add(of, f"{monitor.said_of_none(own, history)} Give the name of one of them.")
            return
        there = [name for name, each in groups.items() if monitor.is_measured((), _history_of({name: each}))]
        if where == _TRAIN and not action.comes_last:
            self.add(
                of,
                f"It monitors {monitor.name!r}, and is called before the evaluations of the same step. Set comes_last "
                "= True in its class, or give it to the end_actions of the eval loop.",
                is_error=False,
            )
            return
        meets = any(calls.may_meet(self._evaluations[name]) for name in there if name != "train")
        if not meets and not calls.is_never:
            self.add(
                of,
                f"It is called {calls}, and at none of these steps is {monitor.name!r} measured. Let its interval "
                "coincide with the evaluations, or give it to the end_actions of the eval loop.",
                is_error=False,
            )

    def _look_for_same_names(
        self, action: SummaryAction, where: str, outputs: metrics.LoopOutputs, written: dict[Any, tuple[str, set[str]]]
    ) -> None:
        scalars, media = metrics.scalars_and_media(outputs)
        names = {*scalars, *media}
        key = (id(action.summary_writer), action.prefix)
        other, before = written.setdefault(key, (where, set()))
        if names & before and other != where:
            self.add(
                f"{action!r} of {where}",
                f"It writes {', '.join(sorted(names & before))} to the same writer as that of {other}: one curve would "
                "be of both. Give the eval loop one of its own, SummaryAction(writer, prefix='eval/').",
                is_error=False,
            )
        written[key] = (other, before | names)


def _calls_in_training(action: Action, course: Course, *, at: str) -> Calls:
    """When an action of the train loop, or of its step, is called."""
    interval = action.interval
    if at == "begin":
        return course.beginnings(interval)
    if isinstance(interval, Schedule):
        return course.calls(interval, within_step=at == "step")
    if at == "end":
        return course.loops(interval)
    longest = course.steps_of_longest_loop
    return Calls(is_all=longest is not None and longest < interval)


def _told(error: Exception) -> str:
    """An error as a text: ours as it is, another with its class and the line of the user that it came from."""
    notes = "".join(
        f"\n{note}" for note in getattr(error, "__notes__", ()) if not note.startswith("----")
    )  # JAX's own.
    frames = [(frame, pathlib.Path(frame.filename)) for frame in traceback.extract_tb(error.__traceback__)]
    is_ours = lambda path: path.is_relative_to(_PACKAGE) and not path.is_relative_to(_PACKAGE / "examples")
    if frames and is_ours(frames[-1][1]) and isinstance(error, TypeError | ValueError | OSError):
        return f"{error}{notes}"
    users = [(frame, path) for frame, path in frames if not is_ours(path) and "site-packages" not in path.parts]
    place = ""
    if users:
        frame, path = users[-1]
        is_cell = any(part.startswith("ipykernel_") for part in path.parts)
        where = f"in a cell, line {frame.lineno}" if is_cell else f"at {path}:{frame.lineno}"
        place = f"\n{where}, in {frame.name}: {frame.line}"
    message = re.sub(r"\n?The error occurred while tracing the function _checked_.*|\n?See https.*", "", str(error))
    return f"{type(error).__name__}: {message}{notes}{place}"


def _is_ours(thing: Any, name: str) -> bool:
    """Whether a method is one of jaxloop's own, and none of a user's subclass or object."""
    return name not in vars(thing) and getattr(type(thing), name).__module__.startswith("jaxloop.")


def _shape_of(leaf: Any) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding, weak_type=_is_weak(leaf))


def _is_weak(leaf: Any) -> bool:
    return bool(getattr(leaf, "weak_type", False))


def _bytes_of(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _bytes_of_host() -> int | None:
    """The memory of this host; None where the system doesn't say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def _free_bytes(directory: Any) -> int | None:
    try:
        return shutil.disk_usage(directory).free
    except (OSError, ValueError):  # Such as of a bucket.
        return None


def _history_of(groups: Mapping[str, Mapping[str, float]]) -> History:
    """A history in which a step has measured all of this."""
    history = History()
    history.commit(Elapsed(1), {name: dict(scalars) for name, scalars in groups.items()})
    return history


def _course_in_words(course: Course) -> str:
    begin = f"from step {course.start.steps:,} " if course.start.steps else ""
    if course.end is None:
        return f"the run goes {begin}to the end of its data"
    return f"the run goes {begin}to step {course.end:,}"
