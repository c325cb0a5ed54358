"""Tests of `OuterLoop.check`: the problems that it reports, its forecasts, and its lack of side effects."""

import dataclasses
import functools
import inspect
import itertools
import logging
import random
import re
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from programs.acts import Record, Stop, raising

import jaxloop
from jaxloop import after, at, checkpoint, every, examples, first, last
from jaxloop.check import preflight
from jaxloop.distributed.lock import DirectoryInUseError
from jaxloop.partition import create_mesh


class Network(nn.Module):
    width: int = 4

    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.relu(nn.Dense(self.width)(x)))


class GoodStep(jaxloop.Step):
    def run(self, state, batch):
        def loss_fn(params):
            return jnp.mean((state.apply_fn({"params": params}, batch["x"]) - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        if self.train:
            state = state.apply_gradients(grads=grads)
        return state, self.outputs(loss, batch)

    def outputs(self, loss, batch):
        return {"loss": loss, "error": jnp.sqrt(loss)}


def batch_of(rows=8, **leaves):
    return {"x": np.ones([rows, 3], np.float32), "y": np.zeros([rows, 1], np.float32), **leaves}


ZEROS = np.zeros([8, 1], np.float32)


class Generated:
    """An iterable without a length."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return (batch for batch in self.batches())


@dataclasses.dataclass
class Plan:
    """An experiment without problems, which the tests modify."""

    directory: object
    patches: dict = dataclasses.field(default_factory=dict)  # What the test replaces by other objects.
    step: type = GoodStep
    partitioner: jaxloop.Partitioner = dataclasses.field(default_factory=jaxloop.SingleDevicePartitioner)
    optimizer: optax.GradientTransformation = dataclasses.field(default_factory=lambda: optax.sgd(0.1, momentum=0.9))
    model: nn.Module = dataclasses.field(default_factory=Network)
    seed: int = 0
    eval_model: nn.Module | None = None
    step_actions: tuple = ()
    begin_actions: tuple = ()
    train_actions: tuple = ()
    eval_actions: tuple = ()
    save: object = every(100)
    best: str | None = "test/loss"
    resumes: bool = True
    log_interval: object = every(50)
    state: object = None
    data: object = dataclasses.field(default_factory=lambda: jaxloop.from_index(lambda number: batch_of()))
    eval_data: object = dataclasses.field(default_factory=lambda: [batch_of(), batch_of(5)])
    eval_options: dict = dataclasses.field(default_factory=lambda: {"interval": every(100), "name": "test"})
    options: dict = dataclasses.field(default_factory=dict)

    def make(self):
        """Returns the outer loop, and the arguments and options to call it with."""
        key, directory = jax.random.key(self.seed), self.directory / "checkpoints"
        options = {"partitioner": self.partitioner}
        train_step = self.step(key, self.model, self.optimizer, train=True, end_actions=self.step_actions, **options)
        eval_step = self.step(key, self.eval_model or self.model, self.optimizer, **options)
        train_actions = [*self.train_actions]
        if self.save is not None:
            train_actions.append(jaxloop.CheckpointAction(directory, self.save, best=self.best))
        outer_loop = jaxloop.OuterLoop(
            jaxloop.TrainLoop(train_step, begin_actions=self.begin_actions, end_actions=train_actions),
            [jaxloop.EvalLoop(eval_step, end_actions=self.eval_actions)],
            jaxloop.CheckpointSpec(directory) if self.resumes else None,
            log_interval=self.log_interval,
        )
        state = train_step.abstract_state([1, 3])
        if callable(self.state):
            state = self.state(train_step.initialize_model([1, 3]))
        specs = [jaxloop.EvalSpec(self.eval_data, **self.eval_options)]
        options = {"train_total_steps": 300, "train_loop_steps": 100, "eval_specs": specs, **self.options}
        return outer_loop, (state, self.data), options

    def check(self):
        outer_loop, arguments, options = self.make()
        return outer_loop.check(*arguments, **options)


def initial_state(outer_loop):
    return outer_loop.train_loop.step.initialize_model([1, 3])


@pytest.fixture
def plan(tmp_path):
    return lambda **changes: Plan(tmp_path, **changes)


def test_a_correct_experiment_has_no_problems(plan):
    began = time.perf_counter()
    report = plan().check()
    assert report.ok and not report.errors and not report.warnings, str(report)
    assert 0 < report.secs <= time.perf_counter() - began
    assert report.plan["train"] == "the run goes to step 300; loops end 3 times, at steps 100, 200, 300"
    assert report.plan["eval 'test'"] == "3 times, at steps 100, 200, 300; 2 batches"
    assert report.plan["saves"].startswith("3 times, at steps 100, 200, 300; 172 B each, the newest 3 and the best")
    assert report.plan["saves"].endswith("; the best by test/loss (smaller is better)")
    assert "FLOPs" in report.plan["step"] and "parameters 84 B, optimizer 84 B" in report.plan["state"]
    report.raise_errors()


# MISTAKES maps each mistake to the place and the text of the reported problem, whether it is an error, and the changes
# to the plan.


def error(where, text, **changes):
    return where, text, True, changes


def warning(where, text, **changes):
    return where, text, False, changes


loop_error, loop_warning = (functools.partial(kind, "the train loop") for kind in (error, warning))


def step_with(**methods):
    return type("Planted", (GoodStep,), methods)


def step_returning(change):
    """Returns a step class that applies `change` to the results of `run`."""
    return step_with(run=lambda self, state, batch: change(*GoodStep.run(self, state, batch)))


def to_bfloat16(state):
    return state.replace(params=jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), state.params))


def with_step(number):
    return lambda state: state.replace(step=number)


def on_four_devices(**options):
    mesh = create_mesh(data=4, devices=jax.devices()[:4])
    return {"partitioner": jaxloop.DataParallelPartitioner(mesh, "data"), **options}


class Forgetful(Record):
    def state_dict(self):
        return {"count": 1}


class Odd(Record):
    def state_dict(self):
        return {"seen": {1, 2}}

    def load_state_dict(self, state_dict):
        pass


class Early(Record):
    monitors = ("test/loss",)


class Wordy(Record):
    def check(self, state, outputs):
        return "all is lost"


WRITER = types.SimpleNamespace(write_scalars=print, flush=print)
STOPPING = functools.partial(jaxloop.EarlyStoppingAction, patience=1)


def mistaken(action, text, is_error=False):
    """Describes a mistake of an action of the train loop."""
    return f"{action!r} of the train loop", text, is_error, {"train_actions": (action,)}


data_of = lambda **options: jaxloop.from_index(lambda number: batch_of(**options))
TEST = {"name": "test"}
NO_CHECKPOINTS = {"save": None, "best": None, "resumes": False}
ENDLESS = {"options": {"train_total_steps": None}, **NO_CHECKPOINTS}

MISTAKES = {
    # The data.
    "a batch of 30 on 4 devices": loop_error("30 rows.*4 devices", **on_four_devices(data=data_of(rows=30))),
    "a batch with text": loop_error(r"batch\['name'\] is <U1\[8\]", data=data_of(name=np.array(["a"] * 8))),
    "a batch in float64": loop_warning(r"batch\['w'\] is float64", data=data_of(w=np.ones(8))),
    "an id that doesn't fit into 32 bits": loop_error(r"batch\['id'\] is int64", data=data_of(id=np.full(8, 2**40))),
    "leaves with different lengths": loop_warning("counts as one example", data=data_of(w=np.ones(3, np.float32))),
    "train data without a batch": error("the train data", r"\(list\) yielded no batches", data=[]),
    "one batch for a dataset": error("the train data", "A dataset must be an iterator", data=batch_of()),
    "train data that end early": warning("the train data", "end at step 20, after 20 batches", data=[batch_of()] * 20),
    "an endless run": loop_warning("Nothing ends the run", options={"train_total_steps": None}),
    "endlessly repeated batches": loop_warning("its dataset is endless", data=itertools.repeat(batch_of()), **ENDLESS),
    "a possibly endless generator": loop_warning(
        "a generator doesn't say whether it ends", data=(batch_of() for _ in itertools.count()), **ENDLESS
    ),
    "preprocess_batch without a return value": loop_error(
        "Planted.preprocess_batch returned None", step=step_with(preprocess_batch=lambda self, batch: None)
    ),
    "a generator without a position": warning(
        "the train data", "can't report its position", data=Generated(lambda: itertools.repeat(batch_of(), 400))
    ),
    "data that don't return to a position": warning(
        "the train data",
        r"(?s)right batch. The next batch of a generator, .* batch\['x'\]: float32.*, checksum .* -> float32",
        data=jaxloop.skippable(
            lambda: ({"x": np.full([8, 3], random.random(), np.float32), "y": ZEROS} for _ in range(400))
        ),
    ),
    "data that raise": error(
        "the train data",
        "KeyError: 'image'\nat .*test_preflight.py",
        data=jaxloop.from_index(lambda number: {}["image"]),
    ),
    # The state.
    "no state": error("the state", "The state is None", state=lambda state: None),
    "a step count that isn't an integer": error(
        "the state", "state.step must be an integer scalar, .* got float32", state=with_step(jnp.float32(0))
    ),
    "a step count that isn't a scalar": error(
        "the state", r"state.step must be an integer scalar, .* got int32\[2\]", state=with_step(jnp.zeros(2, int))
    ),
    "an evaluation that never runs, and an action that monitors it": warning(
        "eval 'test'",
        r"It would never run: interval=every\(steps=1000\)",
        eval_options={"interval": every(1000), "name": "test"},
        eval_actions=(STOPPING("test/loss"),),
    ),
    "a step count that would overflow": loop_error("state.step, int8.*, counts to 127", state=with_step(jnp.int8(0))),
    # The step.
    "a state that changes dtype": loop_error(
        "params/Dense_0/bias: float32.1. -> bfloat16.1.",
        step=step_returning(lambda state, outputs: (to_bfloat16(state), outputs)),
    ),
    "a state instead of a pair": loop_error(
        "run must return .state, outputs., a pair, got TrainState", step=step_returning(lambda state, outputs: state)
    ),
    "outputs that aren't a dict": loop_error(
        "outputs as a dict", step=step_returning(lambda state, outputs: (state, outputs["loss"]))
    ),
    "a step that leaves state.step unchanged": loop_error(
        "returns state.step unchanged. Each run must add 1 to it",
        step=step_returning(lambda state, outputs: (state.replace(step=state.step - 1), outputs)),
    ),
    "a loss that isn't a scalar": loop_warning(
        r"The history stores scalars only, and would not contain 'loss', float32\[8, 1\]\. Return the mean",
        step=step_with(outputs=lambda self, loss, batch: {"loss": batch["y"] + loss, "error": loss}),
        best=None,
    ),
    "only per-example outputs": loop_warning(
        r"would not contain 'error', float32\[8\]",
        step=step_with(outputs=lambda self, loss, batch: {"error": batch["y"][:, 0] + loss}),
        best=None,
    ),
    "an evaluation of a different model": warning(
        "eval 'test'", "width = 8.*the train step has .*width = 4.*same model", eval_model=Network(width=8)
    ),
    "a traced value converted to a float": loop_error(
        "ConcretizationTypeError", step=step_returning(lambda state, outputs: (state, {"loss": float(outputs["loss"])}))
    ),
    "a misspelled key of the batch": loop_error(
        "KeyError: 'labels'\nat .*test_preflight.py",
        step=step_with(outputs=lambda self, loss, batch: {"loss": batch["labels"]}),
    ),
    "outputs too large to keep": loop_warning(
        r"100 steps .* 1.3 GiB. The largest output is 'maps', 13.7 MiB per step",
        step=step_with(outputs=lambda self, loss, batch: {"loss": loss, "maps": jnp.zeros([300, 300, 40])}),
    ),
    # Evaluations.
    "an endless evaluation": error("eval 'test'", "no end", eval_data=data_of()),
    "an evaluation from an iterator": error("eval 'test'", "run more than once", eval_data=iter([batch_of()])),
    "an evaluation without a batch": error("eval 'test'", "yielded no batches", eval_data=[]),
    "an evaluation that is too short": warning(
        "eval 'test'", "num_steps=10, .* 2 batches", eval_options={"num_steps": 10, "interval": every(100), **TEST}
    ),
    "an evaluation that never runs": warning(
        "eval 'test'", "never run: eval_loop_interval=5", eval_options={"eval_loop_interval": 5, **TEST}, best=None
    ),
    "eval data with different shapes": error(
        "eval 'test'", r"ScopeParamShapeError|\(2, 4\)", eval_data=[batch_of(x=np.ones([8, 2], np.float32))]
    ),
    # Schedules.
    "a schedule that never fires": mistaken(Record(every(1000)), "interval=every.steps=1000., and the run goes"),
    "two schedules that never coincide": mistaken(Record(every(7) & at(100)), "never be called"),
    "an interval of more loops than the run has": mistaken(Record(4), "interval=4 counts loops"),
    "an interval of more steps than a loop has": warning(
        "Record(interval=101) of the train loop", "counts steps within the loop", step_actions=(Record(101),)
    ),
    "last() for an action of a step": warning(
        "Record(interval=last()) of the train loop", "never be called", step_actions=(Record(last()),)
    ),
    "an interval of more evaluations than the run has": warning(
        "Record(interval=4) of eval 'test'", "never be called", eval_actions=(Record(4),)
    ),
    "a log interval that never fires": warning("OuterLoop", "no row of the training", log_interval=every(500)),
    "a profile after the last step": warning(
        "first_step=5000", "never be called", save=None, resumes=False, train_actions=("profile",)
    ),
    # Actions.
    "an unknown metric": mistaken(STOPPING("test/accuracy"), "No metric named 'test/accuracy'.*test/loss", True),
    "an unknown evaluation": error("best=('valid/loss', 'min')", "No metric named 'valid/loss'", best="valid/loss"),
    "a metric that is never measured when its action runs": mistaken(
        STOPPING("test/loss", interval=at(101) | at(201)), "'test/loss' is not measured at any of these steps"
    ),
    "a best metric that is never measured at a save": warning(
        "CheckpointAction", "called once, at step 50, but 'test/loss' is not measured", save=at(50)
    ),
    "a patience longer than the run": mistaken(
        jaxloop.EarlyStoppingAction("test/loss", patience=3, interval=every(100)),
        "can't end the run: it is called 3 times, .*patience=3 needs at least 4 measurements",
    ),
    "early stopping as a begin action": error(
        "EarlyStoppingAction", "is one of the begin_actions, .* no outputs", begin_actions=(STOPPING("loss"),)
    ),
    "an action that can't be resumed": mistaken(
        Forgetful(), r"state_dict returns \['count'\], but Forgetful has no load_state_dict", True
    ),
    "an action whose state can't be saved": mistaken(Odd(), "value.*set", True),
    "an action that runs before the evaluation it monitors": mistaken(
        Early(every(100)), "called before the evaluations of the same step. Set runs_last"
    ),
    "a check that returns a string": mistaken(
        Wordy(), "Wordy.check must yield sentences, or return a list, got 'all is lost'", True
    ),
    "two curves with the same name": warning(
        "SummaryAction(interval=1) of eval 'test'",
        "writes error, loss to the same writer as that of the train loop",
        train_actions=(jaxloop.SummaryAction(WRITER),),
        eval_actions=(jaxloop.SummaryAction(WRITER),),
    ),
    # Checkpoints.
    "checkpoints that are never saved": warning("the checkpoints", "has no CheckpointAction", save=None),
    "a directory in use": error(
        "/checkpoints",
        "process 7",
        patches={"jaxloop.distributed.lock.locked": raising(DirectoryInUseError("process 7"))},
    ),
    # Memory and disk space.
    "too little memory": loop_error(
        r"A step needs 800 B of 100 B per device: parameters 84 B.*check.largest_batch\(step, state, batch\)",
        patches={"jaxloop.check.costs.memory_of": lambda device: 100},
    ),
    "too little disk space": warning(
        "the checkpoints",
        "3 checkpoints of 172 B and one that is being written need 860 B, but .* has 500 B free",
        patches={"shutil.disk_usage": lambda directory: types.SimpleNamespace(free=500)},
    ),
    # The arguments.
    "both train_epochs and train_loop_steps": error(
        "the arguments", "train_epochs=2 and train_loop_steps=100", options={"train_epochs": 2}
    ),
    "no eval spec": error("the arguments", "1 eval_loops.*0 eval_specs", options={"eval_specs": []}, best=None),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_check_finds_each_mistake(mistake, plan, tmp_path, monkeypatch):
    where, text, is_error, changes = MISTAKES[mistake]
    for name, value in changes.get("patches", {}).items():
        monkeypatch.setattr(name, value)
    if changes.get("train_actions") == ("profile",):
        changes = {**changes, "train_actions": (jaxloop.ProfileAction(tmp_path / "profile", first_step=5000),)}
    report = plan(**changes).check()
    found = [problem for problem in report.problems if where in problem.where]
    assert len(report.problems) == 1 and found, str(report)
    assert found[0].is_error == is_error
    assert re.search(text, found[0].text, flags=re.DOTALL), found[0].text
    assert str(report).startswith("1 error. " if is_error else "1 warning. ")


def test_at_least_forty_mistakes_are_covered():
    assert len(MISTAKES) >= 40


def test_check_reports_several_mistakes_at_once(plan, tmp_path):
    report = plan(
        **on_four_devices(data=data_of(rows=30, w=np.ones(30))),
        eval_data=data_of(),
        train_actions=(Record(every(1000)), STOPPING("test/acuracy", mode="max")),
        log_interval=every(700),
    ).check()
    where = lambda problems: [problem.where.split("(")[0] for problem in problems]
    assert where(report.errors) == ["the train loop", "eval 'test'", "EarlyStoppingAction"]
    assert where(report.warnings) == ["the train loop", "Record", "OuterLoop"]
    assert str(report).startswith("3 errors, 3 warnings. Nothing was run")
    assert max(len(line) for line in str(report).splitlines() if str(tmp_path) not in line) <= 110
    with pytest.raises(preflight.CheckError, match="3 errors, 3 warnings"):
        report.raise_errors()


def test_check_reports_only_invalid_arguments_if_there_are_any(plan):
    report = plan(eval_data=data_of(), options={"stop": 20, "train_loop_steps": 0}).check()
    assert {problem.where for problem in report.problems} == {"the arguments"} and not report.plan, str(report)


def test_check_reports_two_actions_that_save_to_one_directory(plan, tmp_path):
    other = jaxloop.CheckpointAction(tmp_path / "checkpoints", every(50))
    report = plan(train_actions=(other,)).check()
    assert [problem.where for problem in report.problems] == ["the checkpoints"], str(report)
    assert "Two CheckpointActions save to" in report.problems[0].text
    assert report.plan["saves"].startswith("6 times") and report.plan["saves 2"].startswith("3 times")


# Resuming from a checkpoint ----------------------------------------------------------------------------


@pytest.fixture
def saved(plan):
    """Trains to step 100 and saves checkpoints."""
    outer_loop, (_, data), options = plan(options={"train_total_steps": 100}).make()
    outer_loop(initial_state(outer_loop), data, **options)


def test_the_plan_starts_at_the_newest_checkpoint(saved, plan):
    report = plan().check()
    assert report.ok, str(report)
    assert report.plan["train"] == "the run goes from step 100 to step 300; loops end 2 times, at steps 200, 300"
    assert report.plan["checkpoint"].startswith("resumes from step 100 in ")


@pytest.mark.parametrize(
    ("changes", "where", "text"),
    [
        ({"model": Network(5)}, "the checkpoint", r"params/Dense_1/kernel: float32\[3, 4\] -> float32\[3, 5\]"),
        ({"optimizer": optax.sgd(0.1)}, "the checkpoint", "opt_state/0/trace/.*: float32.* -> .none."),
        ({"seed": 1}, "the checkpoint", "different PRNG keys"),
        ({"data": [batch_of()] * 400}, "the train data", "of the kind 'index', and the positions in a list"),
        ({"resumes": False}, "the checkpoints", "has checkpoints up to step 100"),
        ({"options": {"train_total_steps": 100}}, "the train loop", "Nothing is left to train"),
    ],
)
def test_check_reports_mismatches_with_the_newest_checkpoint(changes, where, text, saved, plan):
    report = plan(**changes).check()
    assert [problem.where for problem in report.problems] == [where], str(report)
    assert re.search(text, report.problems[0].text), report.problems[0].text


def test_a_checkpoint_behind_the_state_is_ignored(saved, plan):
    report = plan(state=with_step(jnp.int32(150))).check()
    assert report.ok, str(report)
    assert (
        report.plan["checkpoint"] == "the newest, of step 100, is behind the state, so the run continues from the state"
    )
    assert report.plan["train"].startswith("the run goes from step 150 to step 300")


def test_check_reports_a_run_that_was_stopped(plan):
    planned = lambda end: plan(train_actions=(Stop(),), options={"stop": at(end)})
    outer_loop, (_, data), options = planned(200).make()
    outer_loop(initial_state(outer_loop), data, **options)
    report = planned(300).check()
    assert [problem.where for problem in report.problems] == ["the train loop"], str(report)
    assert "an evaluation or an action stopped the run at step 100" in report.problems[0].text


def test_check_reports_a_donated_state(plan):
    step = GoodStep(jax.random.key(0), Network(), optax.sgd(0.1, momentum=0.9), train=True)
    state = step.initialize_model([1, 3])
    step(state, batch_of())
    assert "was already donated to" in plan(state=lambda _: state).check().errors[0].text


# Side effects ------------------------------------------------------------------------------------------


def test_check_consumes_no_batch_and_runs_no_step(plan, tmp_path):
    seen = []
    step = step_with(
        run=lambda self, state, batch: (
            jax.debug.callback(lambda x: seen.append(int(x[0, 0])), batch["x"]),
            GoodStep.run(self, state, batch),
        )[1]
    )
    batches = (batch_of(x=np.full([8, 3], number, np.float32)) for number in range(20))
    tested = iter([batch_of()] * 4)
    specs = [jaxloop.EvalSpec(None, dataset_iterator=tested, num_steps=2, name="test", interval=first() | last())]
    options = {"train_total_steps": 20, "train_loop_steps": None, "eval_specs": specs}
    changes = {"data": batches, "step": step, "options": options, "log_interval": last(), **NO_CHECKPOINTS}
    outer_loop, (state, data), options = plan(**changes).make()
    for _ in range(2):
        report = outer_loop.check(state, data, **options)
        assert report.ok, str(report)
    assert not seen
    outer_loop(initial_state(outer_loop), data, **options)
    jax.effects_barrier()
    assert sorted(seen) == sorted([*range(20), 1, 1, 1, 1])  # The batches of ones are those of the evaluations.
    assert next(tested, None) is None


def test_check_allocates_no_state_and_the_run_reuses_its_compilation(plan, caplog):
    traces, before = [], len(jax.live_arrays())

    def run(self, state, batch):
        traces.append(self.train)
        return GoodStep.run(self, state, batch)

    outer_loop, (state, data), options = plan(step=step_with(run=run)).make()
    assert outer_loop.check(state, data, **options).ok
    assert len(jax.live_arrays()) - before < 5  # PRNG keys.
    assert traces == [True, False, True]  # Once per loop, and once to compile the train step.
    with caplog.at_level(logging.WARNING), jax.log_compiles():
        outer_loop(initial_state(outer_loop), data, **options)
    compiled = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Compiling jit(")]
    assert any("jit(evaluate)" in each for each in compiled)  # The evaluation step,
    assert not any("jit(run)" in each for each in compiled)  # but not the train step.
    assert traces == [True, False, True, False, False]  # The evaluation's batches have 8 or 5 rows.


def test_check_takes_the_same_arguments_as_a_run():
    call, check = (inspect.signature(function) for function in (jaxloop.OuterLoop.__call__, jaxloop.OuterLoop.check))
    *shared, topology = check.parameters.values()
    assert list(call.parameters.values()) == shared and topology.name == "topology"


def test_check_leaves_open_what_it_cannot_predict(plan):
    def end(self, state, outputs):
        return state, {**outputs, "psnr": 1.0}

    stopping = STOPPING("test/psnr", interval=every(time=60))
    report = plan(step=step_with(end=end), train_actions=(stopping,), best=None).check()
    assert report.ok, str(report)  # `end` may add the metric, and the time per step is unknown.
    spec = {"should_eval_fn": lambda context: context.loop_count == 1, **TEST}
    report = plan(eval_options=spec).check()
    assert report.ok and report.plan["eval 'test'"].startswith("at most 3 times")


# fit, and evaluation only ------------------------------------------------------------------------------


def test_fit_supports_a_dry_run(tmp_path):
    batches = [batch_of() for _ in range(8)]
    options = {
        "loss": lambda outputs, batch: ((outputs - batch["y"]) ** 2).mean(axis=-1),
        "optimizer": optax.sgd(0.1, momentum=0.9),
        "train_epochs": 5,
        "progress": None,
        "workdir": tmp_path,
        "hparams": {"width": 4},
    }
    report = jaxloop.fit(Network(), batches, batches[:2], dry_run=True, **options)
    assert report.ok, str(report)
    assert report.plan["train"] == "the run goes to step 40; loops end 5 times, at steps 8, 16, ..., 40"
    assert not list(tmp_path.rglob("events*")) and not checkpoint.all_steps(tmp_path / "checkpoints")
    report = jaxloop.fit(Network(), batches, batches[:2], dry_run=True, monitor="eval/acc", **options)
    assert "No metric named 'eval/acc'" in report.errors[0].text
    with pytest.raises(ValueError, match="A dry run would consume the first batch"):
        jaxloop.fit(Network(), iter(batches), dry_run=True, **{**options, "train_epochs": 1})


def test_check_supports_evaluation_only(plan, saved, tmp_path):
    step = GoodStep(jax.random.key(0), Network(), optax.sgd(0.1, momentum=0.9))
    outer_loop = jaxloop.OuterLoop(None, [jaxloop.EvalLoop(step)], jaxloop.CheckpointSpec(tmp_path / "checkpoints"))
    specs = [jaxloop.EvalSpec([batch_of()])]
    report = outer_loop.check(step.abstract_state([1, 3]), eval_specs=specs)
    assert report.ok and report.plan["eval 'eval'"] == "at each checkpoint; 1 batch"
    other = GoodStep(jax.random.key(0), Network(7), optax.sgd(0.1, momentum=0.9))
    report = outer_loop.check(other.abstract_state([1, 3]), eval_specs=specs)
    assert "Dense_0/kernel" in report.errors[0].text


class Dropping(nnx.Module):
    def __init__(self, *, rngs):
        self.dense, self.dropout = nnx.Linear(3, 1, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.dense(x))


# No false alarms in correct experiments -----------------------------------------------------------------


def read_step(self, state, batch):
    assert int(state.step) >= 0
    return state, batch


LIST = [batch_of() for _ in range(300)]
SOUND = {
    "prefetched data": {"data": jaxloop.prefetch(iter(LIST), size=2)},
    "an evaluation from an endless iterator": {
        "eval_data": itertools.cycle([batch_of()]),
        "eval_options": {"num_steps": 3, "interval": every(100), **TEST},
    },
    "a monitored statistic": {"train_actions": (STOPPING("jaxloop/steps_per_sec", mode="max"),)},
    "a begin that reads the state": {"step": step_with(begin=read_step)},
    "a custom Step.__call__": {
        "data": data_of(name=np.array(["a"] * 8)),
        "step": step_with(
            __call__=lambda self, state, batch, *args, **kwargs: GoodStep.__call__(
                self, state, {"x": batch["x"], "y": batch["y"]}, *args, **kwargs
            )
        ),
    },
    "an action with interval=never()": {
        "train_actions": (Record(jaxloop.schedules.never()),),
        "log_interval": jaxloop.schedules.never(),
    },
    "an action at the end of a single loop of unknown length": {
        "data": Generated(lambda: itertools.repeat(batch_of(), 400)),
        "train_actions": (Record(every(loops=1)),),
        "log_interval": last(),
        "options": {"train_total_steps": None, "train_loop_steps": None},
        **NO_CHECKPOINTS,
    },
    "an action of an evaluation with a schedule of time": {
        "eval_options": {"interval": every(time=60), **TEST},
        "eval_actions": (Record(every(100)),),
    },
}


@pytest.mark.parametrize("experiment", SOUND)
def test_correct_experiments_cause_no_false_alarm(experiment, plan):
    outer_loop, arguments, options = plan(**SOUND[experiment]).make()
    for _ in range(2):
        report = outer_loop.check(*arguments, **options)
        assert report.ok, str(report)


def test_nnx_models_with_dropout_cause_no_false_alarm():
    loss = lambda outputs, batch: ((outputs - batch["y"]) ** 2).mean(axis=-1)
    step = jaxloop.LossStep(jax.random.key(0), Dropping, optax.sgd(0.1), train=True, nnx_model_args=(), loss=loss)
    outer_loop = jaxloop.OuterLoop(jaxloop.TrainLoop(step))
    for state in (step.initialize_model(None), step.abstract_state(None)):
        report = outer_loop.check(state, LIST, 20, 10)
        assert report.ok, str(report)


# Forecasts compared with runs ---------------------------------------------------------------------------


# Each case has the intervals of actions and evaluations, further options, and the number of batches.
BOTH = every(7) | last()
PLANS = {
    "one loop": (every(7), 1, {"train_total_steps": 40}, 50),
    "loops": (2, every(loops=3), {"train_total_steps": 70, "train_loop_steps": 10}, 90),
    "a total that shortens the last loop": (2, 3, {"train_total_steps": 37, "train_loop_steps": 5}, 50),
    "the last step": (last(), last(), {"train_total_steps": 33, "train_loop_steps": 10}, 50),
    "the first steps": (at(0) | first(), at(0) | every(20), {"train_total_steps": 30, "train_loop_steps": 10}, 50),
    "samples": (every(samples=100), every(samples=72), {"train_total_steps": 40, "train_loop_steps": 6}, 50),
    "combined schedules": (every(4) & every(6), every(3) & ~every(5), {"train_total_steps": 40}, 50),
    "after a number of loops": (at(loops=2), after(loops=3) & every(4), {"train_loop_steps": 6}, 40),
    "epochs": (3, BOTH, {"train_epochs": 3}, 8),
    "epochs up to a total": (every(loops=2) | last(), 1, {"train_epochs": 4, "train_total_steps": 25}, 8),
    "the end of the data within a loop": (BOTH, 2, {"train_loop_steps": 7}, 24),
    "the end of the data at the end of a loop": (BOTH, last() | at(3), {"train_loop_steps": 6}, 24),
    "a stop": (BOTH, 1, {"train_total_steps": 40, "train_loop_steps": 10, "stop": at(23)}, 50),
    "a stop that counts loops": (every(4), 1, {"train_loop_steps": 4, "stop": every(loops=3)}, 50),
    "a stop at step 0": (at(0) | first(), at(0), {"train_total_steps": 40, "stop": at(0)}, 50),
    "two updates per batch": (every(5), at(7), {"train_total_steps": 40, "train_loop_steps": 8}, 50),
}


class TwoUpdates(type(examples.tiny_regression(1)[0])):
    updates_per_step = 2

    def run(self, state, batch):
        return super().run(super().run(state, batch)[0], batch)


def run_and_compare_with_check(case, state=None, directory=None, **options):
    """Runs a case, compares the calls with those that `check` predicts, and returns the state."""
    interval, evaluated, given, num_batches = PLANS[case]
    options = {**given, **options}
    ends, evaluations = Record(interval), Record()
    in_step = Record(interval if isinstance(interval, jaxloop.Schedule) else jaxloop.schedules.never())
    example, first_state, batches = examples.tiny_regression(num_batches)
    kind = TwoUpdates if "updates" in case else type(example)
    step = kind(jax.random.key(0), example.model, example.optimizer, train=True, end_actions=[in_step])
    eval_step, _, eval_batches = examples.tiny_regression(2, train=False)
    savers = [] if directory is None else [jaxloop.CheckpointAction(directory, last())]
    outer_loop = jaxloop.OuterLoop(
        jaxloop.TrainLoop(step, end_actions=[ends, *savers]),
        [jaxloop.EvalLoop(eval_step, end_actions=[evaluations])],
        None if directory is None else jaxloop.CheckpointSpec(directory),
    )
    when = {"eval_loop_interval": evaluated} if isinstance(evaluated, int) else {"interval": evaluated}
    options["eval_specs"] = [jaxloop.EvalSpec(eval_batches, **when)]
    state = first_state if state is None else state
    report = outer_loop.check(state, batches, **options)
    state, _ = outer_loop(state, batches, **options)
    assert int(state.step) == int(re.search("to step ([0-9]+)", report.plan["train"])[1])
    recorders = {"end": ends, "step": in_step, "eval": evaluations}
    if report.plan["train"].startswith("the run goes from"):  # Earlier evaluations count, too.
        assert str(report.calls[recorders.pop("eval")]) == "at further steps"
    predicted_steps = {name: list(report.calls[recorder].steps) for name, recorder in recorders.items()}
    assert predicted_steps == {name: recorder.seen for name, recorder in recorders.items()}
    assert not any(report.calls[recorder].rest for recorder in recorders.values())
    return state


@pytest.mark.parametrize("case", PLANS)
def test_actions_and_evaluations_run_when_check_predicts(case):
    run_and_compare_with_check(case)


RESUMED = ("after a number of loops", "epochs", "the end of the data within a loop", "two updates per batch")


@pytest.mark.parametrize("case", RESUMED)
def test_resumed_runs_match_the_forecast(case, tmp_path):
    run_and_compare_with_check(case, directory=tmp_path, train_total_steps=12)
    run_and_compare_with_check(case, directory=tmp_path)
