"""Overriding a hook of a loop or a step has the same effect alone, fused, and in an experiment that resumes."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from programs.acts import Fail, Record

import jaxloop
from jaxloop import at, every

pytestmark = pytest.mark.usefixtures("compile_fast")

STEPS, LOOP_STEPS = 12, 4
TRAIN_NUMBERS, EVAL_NUMBERS = range(1, STEPS + 1), range(1, 3)
LOOPS = [TRAIN_NUMBERS[begin : begin + LOOP_STEPS] for begin in range(0, STEPS, LOOP_STEPS)]


def batch_of(number):
    return {"x": np.full(2, number, np.float32)}


class Sum(jaxloop.Step):
    """Adds up the batches. All numbers are small integers, so all results are exact."""

    def make_state(self, spec=None, **init_kwargs):
        params = {"sum": jnp.zeros([], jnp.float32)}
        return jaxloop.TrainState.create(apply_fn=None, params=params, tx=optax.identity())

    def run(self, state, batch):
        params = state.params if self.train else self.params_to_evaluate(state)
        x = batch["x"].sum()
        return state.replace(step=state.step + 1, params={"sum": params["sum"] + x}), {"x": x, "sum": params["sum"] + x}


def add(state, number):
    return state.replace(params={"sum": state.params["sum"] + np.float32(number)})


def shifted(batch):
    return {"x": batch["x"] + np.float32(50)}


# A loop's hooks -----------------------------------------------------------------------------------------


class LoopBegin:
    def begin(self, state, dataset):
        state, iterator = super().begin(state, dataset)
        return add(state, 1000), map(shifted, iterator)


class LoopBeginState:
    def begin(self, state, dataset):
        state, iterator = super().begin(state, dataset)
        return add(state, 1000), iterator


class LoopRun:
    def run(self, state, dataset, num_steps):
        state, outputs = super().run(state, dataset, num_steps)
        return add(state, 1000), {**outputs, "own": [float(len(outputs["x"]))]}


class LoopEnd:
    def end(self, state, outputs):
        outputs["own"] = [float(len(outputs["x"]))]
        return super().end(add(state, 1000), outputs)


class LoopUpdateOutputs:
    def update_outputs(self, loop_outputs, step_outputs):
        return super().update_outputs(loop_outputs, {"x": 2 * step_outputs["x"], "sum": step_outputs["sum"]})


class LoopGetNextBatch:
    def _get_next_batch(self, dataset):
        return shifted(super()._get_next_batch(dataset))


class LoopRunOneStep:
    def _run_one_step(self, state, batch, per_loop_step_number):
        state, outputs = super()._run_one_step(state, batch, per_loop_step_number)
        return add(state, 1000) if self.step.train else state, {**outputs, "own": per_loop_step_number}


# A step's hooks -----------------------------------------------------------------------------------------


class StepPreprocessBatch(Sum):
    def preprocess_batch(self, batch):
        return shifted(super().preprocess_batch(batch))


class StepBegin(Sum):
    def begin(self, state, batch):
        assert isinstance(batch["x"], np.ndarray)  # Still on the host.
        return super().begin(state, shifted(batch))


class StepBeginState(Sum):
    def begin(self, state, batch):
        return super().begin(add(state, 1000) if self.train else state, batch)


class StepRun(Sum):
    def run(self, state, batch):
        state, outputs = super().run(state, batch)
        return add(state, 1000), {**outputs, "own": 2 * outputs["x"]}


class StepEnd(Sum):
    def end(self, state, outputs):
        return super().end(add(state, 1000), {**outputs, "own": 2 * outputs["x"]})


class StepNumExamples(Sum):
    def num_examples(self, batch):
        return int(batch["x"][0])


class StepShardBatch(Sum):
    def shard_batch(self, batch):
        return shifted(super().shard_batch(batch))


class StepMakeState(Sum):
    def make_state(self, spec=None, **init_kwargs):
        return add(super().make_state(spec, **init_kwargs), 1000)


class StepBeginEvaluation(Sum):
    evaluations = 0

    def begin_evaluation(self):
        super().begin_evaluation()
        StepBeginEvaluation.evaluations += 1

    def preprocess_batch(self, batch):
        return batch if self.train else {"x": batch["x"] + np.float32(50 * self.evaluations)}


class StepParamsToEvaluate(Sum):
    def params_to_evaluate(self, state):
        return {"sum": super().params_to_evaluate(state)["sum"] + np.float32(1000)}


@dataclasses.dataclass(frozen=True)
class Effect:
    """The expected effect of a hook.

    Attributes:
      x: The output "x" of the step on the batch with a number.
      added: The number that this step adds to the sum; `x` if None.
      start, per_loop, per_step: Further numbers that are added to the sum.
      weight: The number of examples in a batch.
      own: The mean of the output "own" over a loop with these batches; None if there is no such output.
      per_eval: A number that is added to "x" in the first evaluation, and once more in each later one.
      in_evals: A number that is added to the sum in evaluations.
      refusal: The error with several steps per dispatch; None if they are possible.
    """

    x: Callable[[int], int] = lambda number: 2 * number
    added: Callable[[int], int] | None = None
    start: int = 0
    per_loop: int = 0
    per_step: int = 0
    weight: Callable[[int], int] = lambda number: 2
    own: Callable[[Sequence[int]], float] | None = None
    per_eval: int = 0
    in_evals: int = 0
    refusal: str | None = None

    def mean(self, value, numbers):
        """Returns the weighted mean of a function of the batches' numbers."""
        return sum(value(number) * self.weight(number) for number in numbers) / sum(map(self.weight, numbers))

    def sum_after(self, steps, loops):
        """Returns the sum after training."""
        added = sum(map(self.added or self.x, range(1, steps + 1)))
        return self.start + loops * self.per_loop + steps * self.per_step + added

    def train_metrics(self, numbers):
        """Returns the train metrics of a loop."""
        return {"x": self.mean(self.x, numbers)} | ({} if self.own is None else {"own": self.own(numbers)})

    def eval_metrics(self, number, steps, loops):
        """Returns the metrics of an evaluation."""
        extra, before = number * self.per_eval, self.sum_after(steps, loops) + self.in_evals
        added = self.added or self.x
        return {
            "x": self.mean(lambda each: self.x(each) + extra, EVAL_NUMBERS),
            "sum": self.mean(lambda each: before + added(each) + extra, EVAL_NUMBERS),
        } | ({} if self.own is None else {"own": self.own(EVAL_NUMBERS)})


PLUS_50 = lambda number: 2 * number + 100
TWICE = lambda numbers: 2 * np.mean([2 * number for number in numbers])
HOOKS = {
    LoopBegin: Effect(x=PLUS_50, per_loop=1000, in_evals=1000),
    LoopBeginState: Effect(per_loop=1000, in_evals=1000),
    LoopRun: Effect(per_loop=1000, own=len),
    LoopEnd: Effect(per_loop=1000, own=len),
    LoopUpdateOutputs: Effect(x=lambda number: 4 * number, added=lambda number: 2 * number),
    LoopGetNextBatch: Effect(x=PLUS_50),
    LoopRunOneStep: Effect(
        per_step=1000, own=lambda numbers: (len(numbers) - 1) / 2, refusal="OwnTrainLoop overrides _run_one_step"
    ),
    StepPreprocessBatch: Effect(x=PLUS_50),
    StepBegin: Effect(x=PLUS_50),
    StepBeginState: Effect(per_step=1000, refusal="StepBeginState.begin returned another state"),
    StepRun: Effect(per_step=1000, own=TWICE),
    StepEnd: Effect(per_step=1000, own=TWICE, refusal="it has its own `end`, which is called after each step"),
    StepNumExamples: Effect(weight=lambda number: number),
    StepShardBatch: Effect(x=PLUS_50, refusal="it has its own `shard_batch`, which places one batch"),
    StepMakeState: Effect(start=1000),
    StepBeginEvaluation: Effect(per_eval=100),
    StepParamsToEvaluate: Effect(in_evals=1000),
}


def make_loops(hook, at_once, end_actions=()):
    """Returns a train loop and an eval loop with a hook."""
    step_class, loop_hooks = (hook, ()) if issubclass(hook, jaxloop.Step) else (Sum, (hook,))
    train_class = type("OwnTrainLoop", (*loop_hooks, jaxloop.TrainLoop), {})
    eval_class = type("OwnEvalLoop", (*loop_hooks, jaxloop.EvalLoop), {})
    train_step, eval_step = (step_class(jax.random.key(0), None, train=train) for train in (True, False))
    train_loop = train_class(train_step, stat_names=[], end_actions=end_actions, steps_per_dispatch=at_once)
    return train_loop, eval_class(eval_step, stat_names=[], steps_per_dispatch=at_once)


def run_loops(hook, at_once):
    """Checks the hook in a train loop and in an eval loop without an `OuterLoop`."""
    effect, StepBeginEvaluation.evaluations = HOOKS[hook], 0
    train_loop, eval_loop = make_loops(hook, at_once)
    state, outputs = train_loop(train_loop.step.initialize_model(), map(batch_of, TRAIN_NUMBERS))
    assert outputs["x"] == [effect.x(number) for number in TRAIN_NUMBERS]
    assert outputs.num_examples == [effect.weight(number) for number in TRAIN_NUMBERS]
    assert jaxloop.summarize(outputs)["x"] == pytest.approx(effect.mean(effect.x, TRAIN_NUMBERS))
    assert train_loop.elapsed.samples == sum(map(effect.weight, TRAIN_NUMBERS))
    assert float(state.params["sum"]) == effect.sum_after(STEPS, loops=1)
    assert effect.own is None or jaxloop.summarize(outputs)["own"] == effect.own(TRAIN_NUMBERS)
    _, outputs = eval_loop(state, map(batch_of, EVAL_NUMBERS))
    assert jaxloop.summarize(outputs) == pytest.approx(effect.eval_metrics(1, STEPS, loops=1))


def run_experiment(hook, at_once, directory, *, interval=1, crashes=False):
    """Checks the hook in an experiment with evaluations, which may crash in the middle of a loop and resume.

    Nothing is due at the end of a loop unless it is one of every `interval` loops.
    """
    effect, StepBeginEvaluation.evaluations = HOOKS[hook], 0
    for crash in [[Fail(at(7), OSError("the machine is gone"), uses_outputs=True)], []] if crashes else [[]]:
        saving = [jaxloop.CheckpointAction(directory, every(steps=3))] if crashes else []
        train_loop, eval_loop = make_loops(hook, at_once, [*crash, *saving])
        spec = jaxloop.CheckpointSpec(directory) if crashes else None
        outer_loop = jaxloop.OuterLoop(train_loop, [eval_loop], spec, log_interval=interval)
        batches, eval_batches = (list(map(batch_of, numbers)) for numbers in (TRAIN_NUMBERS, EVAL_NUMBERS))
        specs = [jaxloop.EvalSpec(eval_batches, interval=interval)]
        with pytest.raises(OSError, match="the machine is gone") if crash else contextlib.nullcontext():
            state, outputs = outer_loop(train_loop.step.initialize_model(), batches, STEPS, LOOP_STEPS, specs)
    rows = {(row.elapsed.steps, name): dict(row.logs[name]) for row in outer_loop.history for name in row.logs}
    ends = range(interval, len(LOOPS) + 1, interval)
    assert list(rows) == [(loops * LOOP_STEPS, name) for loops in ends for name in ("train", "eval")]
    for number, loops in enumerate(ends, start=1):
        steps = loops * LOOP_STEPS
        assert rows[steps, "eval"] == pytest.approx(effect.eval_metrics(number, steps, loops))
        if interval == 1:
            train_metrics = rows[steps, "train"]
            del train_metrics["sum"]
            assert train_metrics == pytest.approx(effect.train_metrics(LOOPS[number - 1]))
    assert outputs["x"] == [effect.x(number) for number in LOOPS[-1]]
    assert effect.own is None or jaxloop.summarize(outputs)["own"] == effect.own(LOOPS[-1])
    assert train_loop.elapsed.samples == sum(map(effect.weight, TRAIN_NUMBERS))
    assert float(state.params["sum"]) == effect.sum_after(STEPS, loops=len(LOOPS))


PLACES = {
    "alone": lambda hook, at_once, _: run_loops(hook, at_once),
    "quiet": lambda *arguments: run_experiment(*arguments, interval=len(LOOPS)),
    "resumed": lambda *arguments: run_experiment(*arguments, crashes=True),
}


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.__name__)
def test_a_hook_is_honoured(hook, where, tmp_path):
    PLACES[where](hook, 1, tmp_path)


@pytest.mark.parametrize("where", ["alone", "resumed"])
@pytest.mark.parametrize(
    "hook", [hook for hook in HOOKS if HOOKS[hook].refusal is None], ids=lambda hook: hook.__name__
)
def test_a_hook_is_honoured_with_several_steps_per_dispatch(hook, where, tmp_path):
    PLACES[where](hook, 2, tmp_path)


@pytest.mark.parametrize("hook", [hook for hook in HOOKS if HOOKS[hook].refusal], ids=lambda hook: hook.__name__)
def test_a_hook_that_is_called_between_steps_is_refused_with_several_per_dispatch(hook):
    with pytest.raises(ValueError, match=HOOKS[hook].refusal):
        run_loops(hook, 2)


# What hooks return, when it is read later ---------------------------------------------------------------


NUMBERS = jaxloop.from_index(lambda number: batch_of(number + 1))


def run_one(loop_class, total, loop_steps, *, step_class=Sum, end_actions=(), data=NUMBERS, **options):
    """Runs a train loop of this class in an experiment, and returns the loop, the state and the outputs."""
    loop = loop_class(step_class(jax.random.key(0), None, train=True), end_actions=end_actions)
    state = loop.step.initialize_model(batch_of(1))
    loop.outer_loop = jaxloop.OuterLoop(loop, **options)
    return loop, *loop.outer_loop(state, data, total, loop_steps)


class Numbered(jaxloop.TrainLoop):
    def end(self, state, outputs):
        state, outputs = super().end(state, outputs)
        return state, {**outputs, "ended_at": float(self.step_num)}


def test_a_resumed_row_has_the_plain_number_that_end_returned_before(tmp_path):
    def rows(total):
        loop, *_ = run_one(Numbered, total, total, log_interval=every(steps=6), workdir=tmp_path)
        return [(row.elapsed.steps, row.logs["train"].get("ended_at")) for row in loop.outer_loop.history]

    assert (rows(5), rows(12)) == ([], [(6, 5.0), (12, 12.0)])


def test_an_action_over_two_loops_gets_what_run_returned_for_both():
    record = Record(2, lambda step_num, outputs, **_: (step_num, outputs["own"]))
    run_one(type("Marked", (LoopRun, jaxloop.TrainLoop), {}), 16, 4, end_actions=[record])
    assert record.seen == [(8, [4.0, 4.0]), (16, [4.0, 4.0])]


class Begins(jaxloop.TrainLoop):
    seen = ()

    def begin(self, state, dataset):
        self.seen = [*self.seen, int(state.step)]
        return super().begin(state, dataset)


def test_begin_is_not_called_again_in_a_loop_that_a_resume_continues(tmp_path):
    with pytest.raises(OSError, match="the disk is gone"):
        run_one(Begins, 12, 4, end_actions=[Fail(at(steps=6))], workdir=tmp_path)
    loop, *_ = run_one(Begins, 12, 4, workdir=tmp_path)
    assert loop.seen == [8]


class Lengths(jaxloop.TrainLoop):
    seen = ()

    def end(self, state, outputs):
        self.seen = [*self.seen, (self.step_num, len(outputs["x"]))]
        return super().end(state, outputs)


def test_end_gets_all_outputs_of_a_loop_that_a_resume_continues(tmp_path):
    """Although the history has read some of them before the failure."""
    options = {"log_interval": every(steps=5), "workdir": tmp_path}
    with pytest.raises(OSError, match="the disk is gone"):
        run_one(Lengths, 20, 10, end_actions=[Fail(at(steps=7))], **options)
    loop, *_ = run_one(Lengths, 20, 10, **options)
    assert loop.seen == [(10, 10), (20, 10)]


class Stops(Sum):
    """Asks for a stop in step 3."""

    def run(self, state, batch):
        state, outputs = super().run(state, batch)
        return state, {**outputs, jaxloop.STOP_LOOP: state.step == 3}


@pytest.mark.parametrize("fails", [False, True])
def test_a_steps_request_to_stop_takes_effect_at_the_end_of_its_loop(fails, tmp_path):
    """Also if the run fails in between."""
    options = {"step_class": Stops, "log_interval": jaxloop.schedules.never(), "workdir": tmp_path}
    if fails:
        with pytest.raises(OSError, match="the disk is gone"):
            run_one(jaxloop.TrainLoop, 40, 10, end_actions=[Fail(at(steps=7))], **options)
    _, state, outputs = run_one(jaxloop.TrainLoop, 40, 10, **options)
    assert int(state.step) == 10 and outputs[jaxloop.STOP_LOOP] is True


def test_data_that_end_with_a_loop_return_that_loops_outputs_although_begin_wraps_them():
    wraps, data = type("Wraps", (LoopBegin, jaxloop.TrainLoop), {}), [batch_of(number) for number in TRAIN_NUMBERS]
    _, state, outputs = run_one(wraps, None, LOOP_STEPS, data=data)
    assert int(state.step) == STEPS and len(outputs["x"]) == LOOP_STEPS
