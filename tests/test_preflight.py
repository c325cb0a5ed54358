"""A check before the run: what it finds, and what it leaves alone."""

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

import jaxloop
from jaxloop import after, at, checkpoint, every, examples, first, forecast, last, preflight
from jaxloop.lock import DirectoryInUseError, DirectoryLock
from jaxloop.partition import create_mesh
from jaxloop.specs import RunSpec
from jaxloop.step import NO_OPTIMIZER


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


class Generated:
    """An iterable without a length."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return (batch for batch in self.batches())


@dataclasses.dataclass
class Plan:
    """An experiment in which nothing is wrong, for each test to change."""

    directory: object
    step: type = GoodStep
    partitioner: jaxloop.Partitioner = dataclasses.field(default_factory=jaxloop.SingleDevicePartitioner)
    optimizer: optax.GradientTransformation = dataclasses.field(default_factory=lambda: optax.sgd(0.1, momentum=0.9))
    model: nn.Module = dataclasses.field(default_factory=Network)
    seed: int = 0
    eval_train: bool = False
    eval_model: nn.Module | None = None
    step_actions: tuple = ()
    begin_actions: tuple = ()
    train_actions: tuple = ()
    eval_actions: tuple = ()
    writer: object = None
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
        """The loops and the arguments of a call."""
        key, directory = jax.random.key(self.seed), self.directory / "checkpoints"
        options = {"partitioner": self.partitioner}
        train_step = self.step(key, self.model, self.optimizer, train=True, end_actions=self.step_actions, **options)
        eval_step = self.step(key, self.eval_model or self.model, self.optimizer, train=self.eval_train, **options)
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

    def initial_state(self):
        key = jax.random.key(self.seed)
        return self.step(key, self.model, self.optimizer, self.partitioner, train=True).initialize_model([1, 3])

    def check(self):
        outer_loop, arguments, options = self.make()
        return outer_loop.check(*arguments, **options)


@pytest.fixture
def plan(tmp_path):
    return lambda **changes: Plan(tmp_path, **changes)


def test_nothing_is_found_where_nothing_is_wrong(plan, tmp_path):
    began = time.perf_counter()
    report = plan(writer=jaxloop.default_writer(tmp_path)).check()
    assert report.ok and not report.errors and not report.warnings, str(report)
    assert 0 < report.secs <= time.perf_counter() - began
    assert report.plan["train"] == "the run goes to step 300; loops end 3 times, at steps 100, 200, 300"
    assert report.plan["eval 'test'"] == "3 times, at steps 100, 200, 300; 2 batches"
    assert report.plan["saves"].startswith(
        "3 times, at steps 100, 200, 300; 172 B each, the newest 3 and the best kept"
    )
    assert "FLOPs" in report.plan["step"] and "parameters 84 B, optimizer 84 B" in report.plan["state"]
    assert not list(tmp_path.glob("events*"))
    report.raise_errors()


# What is wrong, in the table: the changes to the plan; where it is found; what is said; whether the run would fail.


def step_with(**methods):
    return type("Planted", (GoodStep,), methods)


def run_that(change):
    """A step whose `run` makes something else of what it should return."""
    return step_with(run=lambda self, state, batch: change(*GoodStep.run(self, state, batch)))


def cast(state):
    return state.replace(params=jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), state.params))


def weak(state):
    bias = lambda path, leaf: jnp.full(leaf.shape, 1.0) if "bias" in str(path) else leaf
    return state.replace(params=jax.tree_util.tree_map_with_path(bias, state.params))


def on_four(**options):
    return {
        "partitioner": jaxloop.DataParallelPartitioner(create_mesh(data=4, devices=jax.devices()[:4]), "data")
    } | options


class Report(jaxloop.Action):
    def __call__(self, state, outputs, **kwargs):
        pass


class Narrow(jaxloop.Action):
    def __call__(self, state, outputs, *, step_num):
        pass


class Forgetful(Report):
    def state_dict(self):
        return {"count": 1}


class Odd(Report):
    def state_dict(self):
        return {"seen": {1, 2}}

    def load_state_dict(self, state_dict):
        pass


class Early(Report):
    monitors = ("test/loss",)


class Wordy(Report):
    def check(self, state, outputs):
        return "all is lost"


class Silent:
    """A writer."""

    def write_scalars(self, step, scalars):
        pass

    def flush(self):
        pass


WRITER = Silent()
STOPPING = functools.partial(jaxloop.EarlyStoppingAction, patience=3)
data_of = lambda **options: jaxloop.from_index(lambda number: batch_of(**options))
TEST = {"name": "test"}
NO_CHECKPOINTS = {"save": None, "best": None, "resumes": False}

MISTAKES = {
    # The data.
    "a batch of 30 on 4 devices": (on_four(data=data_of(rows=30)), "the train loop", "30 rows.*4 devices", True),
    "a batch with text": (
        {"data": data_of(name=np.array(["a"] * 8))},
        "the train loop",
        r"batch\['name'\] is <U1\[8\], which holds strings",
        True,
    ),
    "a batch in float64": ({"data": data_of(w=np.ones(8))}, "the train loop", r"batch\['w'\] is float64", False),
    "an id that 32 bits can't hold": (
        {"data": data_of(id=np.full(8, 2**40))},
        "the train loop",
        r"batch\['id'\] is int64\[8\] with values from 1099511627776",
        True,
    ),
    "leaves of other lengths": (
        {"data": data_of(w=np.ones(3, np.float32))},
        "the train loop",
        "Each batch counts as one example",
        False,
    ),
    "train data without a batch": ({"data": []}, "the train data", "list, gave no batch", True),
    "one batch for a dataset": ({"data": batch_of()}, "the train data", "A dataset must be an iterator", True),
    "train data that end early": (
        {"data": [batch_of()] * 20},
        "the train data",
        "end at step 20, after 20 batches, and train_total_steps=300",
        False,
    ),
    "train data that end early, where that is an error": (
        {"data": [batch_of()] * 20, "options": {"on_exhausted": "raise"}},
        "the train data",
        "end at step 20",
        True,
    ),
    "a run without an end": (
        {"options": {"train_total_steps": None}},
        "the train loop",
        "Nothing ends the run",
        False,
    ),
    "batches that repeat without an end": (
        {"data": itertools.repeat(batch_of()), "options": {"train_total_steps": None}, **NO_CHECKPOINTS},
        "the train loop",
        "Nothing ends the run: its data have no end",
        False,
    ),
    "a generator that may have no end": (
        {"data": (batch_of() for _ in itertools.count()), "options": {"train_total_steps": None}, **NO_CHECKPOINTS},
        "the train loop",
        "Nothing ends the run: a generator does not say whether its data end",
        False,
    ),
    "batches that get lost": (
        {"step": step_with(preprocess_batch=lambda self, batch: None)},
        "the train loop",
        "Planted.preprocess_batch returned None. Return the batch",
        True,
    ),
    "a generator that can't be gone on with": (
        {"data": Generated(lambda: itertools.repeat(batch_of(), 400))},
        "the train data",
        "a Generated can't report its position",
        False,
    ),
    "data that raise": (
        {"data": jaxloop.from_index(lambda number: {}["image"])},
        "the train data",
        "KeyError: 'image'\nat .*test_preflight.py",
        True,
    ),
    # The state.
    "no state": ({"state": lambda state: None}, "the state", "The state is None", True),
    "a step that is no integer": (
        {"state": lambda state: state.replace(step=jnp.float32(0))},
        "the state",
        r"state.step must be an integer scalar, the number of completed updates, got float32",
        True,
    ),
    "a step for each of two": (
        {"state": lambda state: state.replace(step=jnp.zeros(2, int))},
        "the state",
        r"state.step must be an integer scalar, the number of completed updates, got int32\[2\]",
        True,
    ),
    "an evaluation that never comes, and what waits for it": (
        {"eval_options": {"interval": every(1000), "name": "test"}, "eval_actions": (STOPPING("test/loss"),)},
        "eval 'test'",
        r"It would never run: interval=every\(steps=1000\)",
        False,
    ),
    "a step that can't count so far": (
        {"state": lambda state: state.replace(step=jnp.int8(0))},
        "the train loop",
        "state.step, int8.*, counts to 127, and the run goes to step 300",
        True,
    ),
    # The step.
    "a state that changes dtype": (
        {"step": run_that(lambda state, outputs: (cast(state), outputs))},
        "the train loop",
        "params/Dense_0/bias: float32.1. -> bfloat16.1.",
        True,
    ),
    "a weakly typed state": (
        {"step": run_that(lambda state, outputs: (weak(state), outputs))},
        "the train loop",
        "weakly typed leaves .params/Dense_0/bias",
        False,
    ),
    "a weakly typed state that is given": (
        {"state": lambda state: weak(state)},
        "the train loop",
        "The state that is given has weakly typed leaves .params/Dense_0/bias",
        False,
    ),
    "a state in the place of a pair": (
        {"step": run_that(lambda state, outputs: state)},
        "the train loop",
        "run must return .state, outputs., a pair, got TrainState",
        True,
    ),
    "outputs that are no dict": (
        {"step": run_that(lambda state, outputs: (state, outputs["loss"]))},
        "the train loop",
        "outputs as a dict",
        True,
    ),
    "a step that does not count": (
        {"step": run_that(lambda state, outputs: (state.replace(step=state.step - 1), outputs))},
        "the train loop",
        "returns state.step unchanged. Each run must add one to it",
        True,
    ),
    "no optimizer": (
        {"optimizer": NO_OPTIMIZER},
        "the train loop",
        "GoodStep has train=True but no optimizer, so state.apply_gradients adds the gradients to the parameters",
        False,
    ),
    "a loss for each number": (
        {
            "step": step_with(outputs=lambda self, loss, batch: {"loss": batch["y"] + loss, "error": loss}),
            "best": None,
        },
        "the train loop",
        r"The history stores scalars only, and would not contain 'loss', float32\[8, 1\]\. Return the mean",
        False,
    ),
    "outputs that are all for each example": (
        {
            "step": step_with(outputs=lambda self, loss, batch: {"error": batch["y"][:, 0] + loss}),
            "best": None,
        },
        "the train loop",
        r"would not contain 'error', float32\[8\]",
        False,
    ),
    "an evaluation of another model": (
        {"eval_model": Network(width=8)},
        "eval 'test'",
        r"Its step has the model Network\(.*width = 8.*the train step has Network\(.*width = 4.*same model",
        False,
    ),
    "a value that is read in run": (
        {"step": run_that(lambda state, outputs: (state, {"loss": float(outputs["loss"])}))},
        "the train loop",
        "ConcretizationTypeError",
        True,
    ),
    "a misspelt name in a batch": (
        {"step": step_with(outputs=lambda self, loss, batch: {"loss": batch["labels"]})},
        "the train loop",
        "KeyError: 'labels'\nat .*test_preflight.py",
        True,
    ),
    "outputs too large to keep": (
        {"step": step_with(outputs=lambda self, loss, batch: {"loss": loss, "maps": jnp.zeros([300, 300, 40])})},
        "the train loop",
        r"100 steps .* 1.3 GiB. The largest output is 'maps', 13.7 MiB per step",
        False,
    ),
    # Evaluations.
    "an endless evaluation": ({"eval_data": data_of()}, "eval 'test'", "no end", True),
    "an endless evaluation by a generator": (
        {"eval_data": Generated(lambda: itertools.repeat(batch_of()))},
        "eval 'test'",
        "has not ended after 10,000 batches",
        False,
    ),
    "an evaluation by an iterator": (
        {"eval_data": iter([batch_of()])},
        "eval 'test'",
        "run more than once.*an iterator",
        True,
    ),
    "an evaluation by an iterator that has too few": (
        {"eval_data": iter([batch_of()] * 5), "eval_options": {"num_steps": 2, "interval": every(100), **TEST}},
        "eval 'test'",
        "3 evaluations draw num_steps=2 batches each, and its iterator has 5",
        True,
    ),
    "an evaluation without a batch": ({"eval_data": []}, "eval 'test'", "gave no batch", True),
    "an evaluation that is too short": (
        {"eval_options": {"num_steps": 10, "interval": every(100), "name": "test"}},
        "eval 'test'",
        "num_steps=10, and its dataset has 2 batches",
        False,
    ),
    "an evaluation that never comes": (
        {"eval_options": {"eval_loop_interval": 5, **TEST}, "best": None},
        "eval 'test'",
        "never run: eval_loop_interval=5, and the run goes to step 300",
        False,
    ),
    "an evaluation in training mode": ({"eval_train": True}, "eval 'test'", "train=True.*dropout", False),
    "eval data of other shapes": (
        {"eval_data": [batch_of(x=np.ones([8, 2], np.float32))]},
        "eval 'test'",
        r"ScopeParamShapeError|\(2, 4\)",
        True,
    ),
    # Schedules.
    "a schedule that never fires": (
        {"train_actions": (Report(every(1000)),)},
        "Report(interval=every(steps=1000)) of the train loop",
        "never be called: interval=every.steps=1000., and the run goes to step 300",
        False,
    ),
    "two schedules that never meet": (
        {"train_actions": (Report(every(7) & at(100)),)},
        "Report(interval=every(steps=7) & at(steps=100)) of the train loop",
        "never be called",
        False,
    ),
    "an interval of more loops than there are": (
        {"train_actions": (Report(4),)},
        "Report(interval=4) of the train loop",
        "interval=4 counts loops",
        False,
    ),
    "an interval of more steps than a loop has": (
        {"step_actions": (Report(101),)},
        "Report(interval=101) of the train loop",
        "interval=101 counts steps within the loop",
        False,
    ),
    "the last step, of which a step's action is not told": (
        {"step_actions": (Report(last()),)},
        "Report(interval=last()) of the train loop",
        "never be called",
        False,
    ),
    "an interval of more evaluations than there are": (
        {"eval_actions": (Report(4),)},
        "Report(interval=4) of eval 'test'",
        "never be called",
        False,
    ),
    "a log interval that never comes": ({"log_interval": every(500)}, "OuterLoop", "no row of the training", False),
    "a profile after the end": (
        {"save": None, "resumes": False, "train_actions": ("profile",)},
        "first_step=5000",
        "never be called",
        False,
    ),
    # Actions.
    "a metric of another name": (
        {"train_actions": (STOPPING("test/accuracy"),)},
        "EarlyStoppingAction('test/accuracy', patience=3, interval=1) of the train loop",
        "Nothing named 'test/accuracy'.*test/loss",
        True,
    ),
    "an evaluation of another name": ({"best": "valid/loss"}, "CheckpointAction", "Nothing named 'valid/loss'", True),
    "a metric that is never there when it is looked for": (
        {"train_actions": (STOPPING("test/loss", interval=after(1).then(every(100))),)},
        "EarlyStoppingAction",
        "'test/loss' is not measured at any of these steps",
        False,
    ),
    "a metric of which the best is never saved": (
        {"save": at(50)},
        "CheckpointAction",
        "called once, at step 50, but 'test/loss' is not measured at any of these steps",
        False,
    ),
    "stopping when a loop begins": (
        {"begin_actions": (STOPPING("loss"),)},
        "EarlyStoppingAction",
        "can't stop a loop as one of its begin_actions",
        True,
    ),
    "an action without **kwargs": (
        {"train_actions": (Narrow(),)},
        "Narrow(interval=1) of the train loop",
        r"can't be called with .state, outputs, step_num=, .*got an unexpected keyword argument 'elapsed'.*\*\*kwargs",
        True,
    ),
    "an action that can't go on": (
        {"train_actions": (Forgetful(),)},
        "Forgetful(interval=1) of the train loop",
        r"state_dict returns \['count'\], but Forgetful has no load_state_dict",
        True,
    ),
    "an action that remembers what no checkpoint can hold": (
        {"train_actions": (Odd(),)},
        "Odd(interval=1) of the train loop",
        "value.*set",
        True,
    ),
    "an action that looks for an evaluation before it": (
        {"train_actions": (Early(every(100)),)},
        "Early(interval=every(steps=100)) of the train loop",
        "called before the evaluations of the same step. Set runs_last",
        False,
    ),
    "a check that returns no list": (
        {"train_actions": (Wordy(),)},
        "Wordy(interval=1) of the train loop",
        "Wordy.check must yield sentences, or return a list, got 'all is lost'",
        True,
    ),
    "no learning rate to write": (
        {"train_actions": (jaxloop.LearningRateAction(WRITER),)},
        "LearningRateAction",
        "inject_hyperparams",
        True,
    ),
    "two curves of one name": (
        {"train_actions": (jaxloop.SummaryAction(WRITER),), "eval_actions": (jaxloop.SummaryAction(WRITER),)},
        "SummaryAction(interval=1) of eval 'test'",
        "writes error, loss to the same writer as that of the train loop",
        False,
    ),
    # Checkpoints.
    "checkpoints that nobody writes": ({"save": None}, "the checkpoints", "has no CheckpointAction", False),
    # The arguments.
    "epochs of a length": (
        {"options": {"train_epochs": 2, "train_total_steps": None}},
        "the arguments",
        "train_epochs=2 and train_loop_steps=100",
        True,
    ),
    "no eval spec": (
        {"options": {"eval_specs": []}, "best": None},
        "the arguments",
        "1 eval_loops.*0 eval_specs",
        True,
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_found_before_a_step_runs(mistake, plan, tmp_path):
    changes, where, text, is_error = MISTAKES[mistake]
    if changes.get("train_actions") == ("profile",):
        changes = {**changes, "train_actions": (jaxloop.ProfileAction(tmp_path / "profile", first_step=5000),)}
    report = plan(**changes).check()
    found = [problem for problem in report.problems if where in problem.where]
    assert len(report.problems) == 1 and found, str(report)
    assert found[0].is_error == is_error
    assert re.search(text, found[0].text, flags=re.DOTALL), found[0].text
    assert str(report).startswith("1 error. " if is_error else "1 warning. ")


def test_there_are_enough_of_them():
    assert len(MISTAKES) >= 40


def test_several_mistakes_are_found_at_once(plan, tmp_path):
    report = plan(
        **on_four(data=data_of(rows=30, w=np.ones(30))),
        step=run_that(lambda state, outputs: (cast(state), outputs)),
        eval_data=data_of(),
        train_actions=(Report(every(1000)), STOPPING("test/acuracy"), jaxloop.LearningRateAction(WRITER)),
        log_interval=every(700),
        options={"on_exhausted": "loudly"},
    ).check()
    where = lambda problems: [problem.where.split("(")[0] for problem in problems]
    assert where(report.errors) == [
        "the arguments",
        "the train loop",  # The rows.
        "the train loop",  # The dtypes of the state.
        "eval 'test'",
        "EarlyStoppingAction",
        "LearningRateAction",
    ]
    assert where(report.warnings) == ["the train loop", "Report", "OuterLoop"]
    text = str(report)
    assert (
        text.startswith("6 errors, 3 warnings. Nothing was run")
        and max(len(line) for line in text.splitlines() if str(tmp_path) not in line) <= 110
    )
    with pytest.raises(preflight.CheckError, match="6 errors, 3 warnings"):
        report.raise_errors()


@pytest.mark.parametrize(
    ("patched", "value", "where", "text", "is_error"),
    [
        ("jaxloop.partition.memory_of", lambda device: 100, "the train loop", "of a device, which has 100 B", True),
        ("os.sysconf", lambda name: 8, "the train loop", "but this host has 64 B of memory", False),
        (
            "shutil.disk_usage",
            lambda directory: types.SimpleNamespace(free=500),
            "the checkpoints",
            "3 checkpoints of 172 B and one that is being written need 860 B, but .* has 500 B free",
            False,
        ),
    ],
)
def test_what_there_is_no_room_for_is_found(patched, value, where, text, is_error, plan, monkeypatch):
    monkeypatch.setattr(patched, value)
    report = plan().check()
    assert [(problem.where, problem.is_error) for problem in report.problems] == [(where, is_error)], str(report)
    assert re.search(text, report.problems[0].text), report.problems[0].text


def test_two_actions_that_save_to_one_directory_are_found(plan, tmp_path):
    other = jaxloop.CheckpointAction(tmp_path / "checkpoints", every(50))
    report = plan(train_actions=(other,)).check()
    assert [problem.where for problem in report.problems] == ["the checkpoints"], str(report)
    assert "Two CheckpointActions save to" in report.problems[0].text
    assert report.plan["saves"].startswith("6 times") and report.plan["saves 2"].startswith("3 times")


# The checkpoint that a run would go on from ------------------------------------------------------------


@pytest.fixture
def saved(plan):
    """A run that was stopped at step 100."""
    a_plan = plan(options={"train_total_steps": 100})
    outer_loop, (_, data), options = a_plan.make()
    outer_loop(a_plan.initial_state(), data, **options)


def test_a_run_goes_on_where_the_newest_checkpoint_is(saved, plan):
    report = plan().check()
    assert report.ok, str(report)
    assert report.plan["train"] == "the run goes from step 100 to step 300; loops end 2 times, at steps 200, 300"
    assert report.plan["checkpoint"].startswith("goes on from step 100 in ")


@pytest.mark.parametrize(
    ("changes", "where", "text"),
    [
        ({"model": Network(5)}, "the checkpoint", r"params/Dense_1/kernel: float32\[3, 4\] -> float32\[3, 5\]"),
        ({"optimizer": optax.sgd(0.1)}, "the checkpoint", "opt_state/0/trace/.*: float32.* -> .none."),
        ({"seed": 1}, "the checkpoint", "other PRNG keys"),
        ({"data": data_of(rows=4, w=np.zeros(4, np.int32))}, "the train data", r"batch\['w'\]: int32"),
        ({"resumes": False}, "the checkpoints", "has checkpoints up to step 100"),
        ({"options": {"train_total_steps": 100}}, "the train loop", "Nothing is left to train"),
    ],
)
def test_what_does_not_fit_the_newest_checkpoint_is_found(changes, where, text, saved, plan):
    report = plan(**changes).check()
    assert [problem.where for problem in report.problems] == [where], str(report)
    assert re.search(text, report.problems[0].text), report.problems[0].text


def test_a_checkpoint_behind_the_state_is_left_where_it_is(saved, plan):
    report = plan(state=lambda state: state.replace(step=jnp.int32(150))).check()
    assert report.ok, str(report)
    assert report.plan["checkpoint"] == "the newest, of step 100, is behind the state: going on from the state"
    assert report.plan["train"].startswith("the run goes from step 150 to step 300")


def test_a_run_that_was_asked_to_stop_is_found(plan):
    class Stopping(Report):
        def __call__(self, state, outputs, **kwargs):
            outputs[jaxloop.STOP_LOOP] = True

    a_plan = plan(train_actions=(Stopping(),))
    outer_loop, (_, data), options = a_plan.make()
    outer_loop(a_plan.initial_state(), data, **options)
    report = plan(train_actions=(Stopping(),)).check()
    assert [problem.where for problem in report.problems] == ["the train loop"], str(report)
    assert "the run of step 100 was asked to stop there" in report.problems[0].text


def test_a_directory_in_which_another_process_trains_is_found(plan, tmp_path, monkeypatch):
    def is_held(lock):
        raise DirectoryInUseError("It is held by process 7.")

    monkeypatch.setattr(DirectoryLock, "acquire", is_held)
    report = plan().check()
    assert "process 7" in report.errors[0].text and str(tmp_path) in report.errors[0].where


def test_a_state_that_was_donated_is_found(plan):
    step = GoodStep(jax.random.key(0), Network(), optax.sgd(0.1, momentum=0.9), train=True)
    state = step.initialize_model([1, 3])
    step(state, batch_of())
    assert "was already donated to" in plan(state=lambda _: state).check().errors[0].text


# What it leaves alone ----------------------------------------------------------------------------------


def test_no_batch_is_lost_and_no_step_is_run(plan, tmp_path):
    seen = []
    step = step_with(
        run=lambda self, state, batch: (
            jax.debug.callback(lambda x: seen.append(int(x[0, 0])), batch["x"]),
            GoodStep.run(self, state, batch),
        )[1]
    )
    batches = (batch_of(x=np.full([8, 3], number, np.float32)) for number in range(20))
    tested = iter([batch_of()] * 4)
    changes = {"data": batches, "step": step, "options": {"train_total_steps": 20, "train_loop_steps": None}}
    specs = [jaxloop.EvalSpec(None, dataset_iterator=tested, num_steps=2, name="test", interval=first() | last())]
    a_plan = plan(**changes, save=None, resumes=False, log_interval=1)
    a_plan.options["eval_specs"] = specs
    outer_loop, (state, data), options = a_plan.make()
    for _ in range(2):
        report = outer_loop.check(state, data, **options)
        assert report.ok, str(report)
    assert not seen
    outer_loop(a_plan.initial_state(), data, **options)
    jax.effects_barrier()
    assert sorted(seen) == sorted([*range(20), 1, 1, 1, 1])  # The batches of ones are those of the evaluations.
    assert next(tested, None) is None


def test_the_state_takes_no_memory_and_what_was_compiled_is_used(plan, caplog):
    traces, before = [], len(jax.live_arrays())

    def run(self, state, batch):
        traces.append(self.train)
        return GoodStep.run(self, state, batch)

    a_plan = plan(step=step_with(run=run))
    outer_loop, (state, data), options = a_plan.make()
    assert outer_loop.check(state, data, **options).ok
    assert len(jax.live_arrays()) - before < 5  # PRNG keys.
    assert traces == [True, False, True]  # Traced for each loop; and to be compiled.
    with caplog.at_level(logging.WARNING), jax.log_compiles():
        outer_loop(a_plan.initial_state(), data, **options)
    compiled = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Compiling jit(")]
    assert any("_checked_outputs" in each for each in compiled)  # Those of the evaluations,
    assert not any("_checked_run" in each for each in compiled)  # and not the train step.
    assert traces == [True, False, True, False, False]  # Evaluations, for batches of 8 rows and of 5.


def test_a_check_takes_the_arguments_of_a_call():
    call, check = (inspect.signature(function) for function in (jaxloop.OuterLoop.__call__, jaxloop.OuterLoop.check))
    *shared, topology = check.parameters.values()
    assert list(call.parameters.values()) == shared and topology.name == "topology"


def test_what_only_the_run_can_tell_is_left_open(plan):
    def end(self, state, outputs):
        return state, {**outputs, "psnr": 1.0}

    stopping = STOPPING("test/psnr", interval=every(time=60))
    report = plan(step=step_with(end=end), train_actions=(stopping,), best=None).check()
    assert report.ok, str(report)  # `end` may add what it monitors, and nobody knows how long a step takes.
    spec = {"should_eval_fn": lambda context: context.loop_count == 1, **TEST}
    report = plan(eval_options=spec).check()
    assert report.ok and report.plan["eval 'test'"].startswith("at most 3 times")


# The other doors ---------------------------------------------------------------------------------------


def test_fit_has_a_dry_run(tmp_path):
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
    assert "Nothing named 'eval/acc'" in report.errors[0].text
    with pytest.raises(ValueError, match="A dry run would consume the first batch"):
        jaxloop.fit(Network(), iter(batches), dry_run=True, **{**options, "train_epochs": 1})


def test_only_an_evaluation_can_be_checked_too(plan, saved, tmp_path):
    step = GoodStep(jax.random.key(0), Network(), optax.sgd(0.1, momentum=0.9))
    outer_loop = jaxloop.OuterLoop(None, [jaxloop.EvalLoop(step)], jaxloop.CheckpointSpec(tmp_path / "checkpoints"))
    specs = [jaxloop.EvalSpec([batch_of()])]
    assert outer_loop.check(step.abstract_state([1, 3]), eval_specs=specs).ok
    other = GoodStep(jax.random.key(0), Network(7), optax.sgd(0.1, momentum=0.9))
    report = outer_loop.check(other.abstract_state([1, 3]), eval_specs=specs)
    assert "Dense_0/kernel" in report.errors[0].text


# Sound experiments, in which nothing is to be found -----------------------------------------------------


class Dropping(nnx.Module):
    def __init__(self, *, rngs):
        self.dense, self.dropout = nnx.Linear(3, 1, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.dense(x))


def begin_of(function):
    """A step with a `begin` of its own."""
    return step_with(begin=lambda self, state, batch: function(state, batch))


def read(state, batch):
    assert int(state.step) >= 0
    return state, batch


LIST = [batch_of() for _ in range(300)]
SOUND = {
    "an iterator of as many batches as steps": {"data": iter(LIST)},
    "data that a thread draws ahead": {"data": jaxloop.prefetch(iter(LIST), size=2)},
    "a list for a state that is not at its first step": {
        "data": LIST[:50],
        "state": lambda state: state.replace(step=jnp.int32(250)),
    },
    "an evaluation by an iterator without an end": {
        "eval_data": itertools.cycle([batch_of()]),
        "eval_options": {"num_steps": 3, "interval": every(100), **TEST},
    },
    "an evaluation by an iterator that has enough": {
        "eval_data": iter(LIST),
        "eval_options": {"num_steps": 6, "interval": every(100), **TEST},
    },
    "a name with a quote": {"eval_options": {"interval": every(100), "name": "test's"}, "best": "test's/loss"},
    "a statistic that is monitored": {"train_actions": (STOPPING("jaxloop/steps_per_sec"),)},
    "a begin that makes another state": {
        "step": begin_of(lambda state, batch: (state.replace(step=state.step), batch))
    },
    "a begin that reads the state": {"step": begin_of(read)},
    "a begin that reads a state that is given": {"step": begin_of(read), "state": lambda state: state},
    "a way of its own through the step": {
        "data": data_of(name=np.array(["a"] * 8)),
        "step": step_with(
            __call__=lambda self, state, batch, *args, **kwargs: GoodStep.__call__(
                self, state, {"x": batch["x"], "y": batch["y"]}, *args, **kwargs
            )
        ),
    },
    "an action that is never to be called": {
        "train_actions": (Report(jaxloop.never()),),
        "log_interval": jaxloop.never(),
    },
    "an action of an evaluation for the end": {"eval_actions": (Report(last()),)},
    "a schedule of samples and one of loops": {"train_actions": (Report(every(samples=1000)), Report(every(loops=3)))},
    "a stop by the clock": {"options": {"train_total_steps": None, "stop": at(time=60)}},
    "an action at the end of the one loop, which nobody knows": {
        "data": Generated(lambda: itertools.repeat(batch_of(), 400)),
        "train_actions": (Report(every(loops=1)),),
        "log_interval": 1,
        "options": {"train_total_steps": None, "train_loop_steps": None},
        **NO_CHECKPOINTS,
    },
    "an action by the clock where a loop begins": {"begin_actions": (Report(every(time=60)),)},
    "an action of an evaluation by the clock": {
        "eval_options": {"interval": every(time=60), **TEST},
        "eval_actions": (Report(every(100)),),
    },
}


@pytest.mark.parametrize("experiment", SOUND)
def test_there_is_no_false_alarm(experiment, plan):
    outer_loop, arguments, options = plan(**SOUND[experiment]).make()
    for _ in range(2):
        report = outer_loop.check(*arguments, **options)
        assert report.ok, str(report)


def test_there_is_none_for_an_nnx_model_with_dropout_and_keys_in_its_state():
    class Regression(jaxloop.Step):
        def run(self, state, batch):
            def loss_fn(params):
                model = state.apply_fn(params, state.batch_stats, state.collections, train=self.train)
                predicted, (_, updates) = model(batch["x"])
                return jnp.mean((predicted - batch["y"]) ** 2), updates

            (loss, updates), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
            return state.apply_gradients(grads=grads).update_variables(updates), {"loss": loss}

    step = Regression(jax.random.key(0), Dropping, optax.sgd(0.1), train=True, nnx_model_args=())
    outer_loop = jaxloop.OuterLoop(jaxloop.TrainLoop(step))
    for state in (step.initialize_model(None), step.abstract_state(None)):
        report = outer_loop.check(state, LIST, 20)
        assert report.ok, str(report)


def test_a_second_call_goes_on_where_the_first_ended(plan):
    a_plan = plan(data=LIST[:40], save=None, resumes=False, log_interval=1)
    a_plan.options |= {"train_total_steps": 24, "train_loop_steps": None}
    a_plan.eval_options = {"interval": last(), **TEST}
    outer_loop, (_, data), options = a_plan.make()
    state, _ = outer_loop(a_plan.initial_state(), data, **options)
    options["train_total_steps"] = 64
    report = outer_loop.check(state, data, **options)
    assert report.ok, str(report)
    assert report.plan["train"].startswith("the run goes from step 24 to step 64")


# The forecast against what happens ----------------------------------------------------------------------


class Recorder(jaxloop.Action):
    def __init__(self, interval):
        super().__init__(interval)
        self.steps = []

    def __call__(self, state, outputs, *, step_num, **kwargs):
        self.steps.append(step_num)


def random_interval(rng, *, most=4):
    """An interval of an action, of which the forecast can know all."""
    pick = lambda: [
        every(rng.randrange(1, 12)),
        at(rng.randrange(1, 30)),
        every(samples=rng.randrange(5, 60)),
        every(loops=rng.randrange(1, most)),
        after(rng.randrange(1, 20)).then(every(rng.randrange(1, 8))),
        first(),
        last(),
    ][rng.randrange(7)]
    kind = rng.randrange(5)
    return [rng.randrange(1, most), pick(), pick(), pick() | pick(), pick() & ~pick()][kind]


@pytest.mark.parametrize("seed", range(10))
def test_what_is_foreseen_is_what_happens(seed):
    rng = random.Random(seed)
    step, state, batches = examples.tiny_regression(40)
    train_actions = [Recorder(random_interval(rng)) for _ in range(4)]
    eval_actions = [Recorder(rng.randrange(1, 3)), Recorder(every(rng.randrange(1, 9)))]
    begin_action, evaluated = Recorder(rng.randrange(1, 3)), Recorder(1)
    outer_loop = jaxloop.OuterLoop(
        jaxloop.TrainLoop(step, begin_actions=[begin_action], end_actions=train_actions),
        [jaxloop.EvalLoop(step, end_actions=[evaluated, *eval_actions])],
    )
    schedule = random_interval(rng)
    when = {"eval_loop_interval": schedule} if isinstance(schedule, int) else {"interval": schedule}
    options = {"eval_specs": [jaxloop.EvalSpec(batches[:2], **when)]}
    if rng.random() < 0.3:
        options |= {"train_epochs": rng.randrange(1, 3)}
        batches = batches[: rng.randrange(5, 15)]
    else:
        options |= {"train_total_steps": rng.randrange(5, 40)}
        options |= {"train_loop_steps": rng.randrange(3, 12)} if rng.random() < 0.7 else {}
    foreseen = outer_loop.check(state, batches, **options).calls
    outer_loop(state, batches, **options)
    for action in (begin_action, *train_actions, evaluated, *eval_actions):
        assert list(foreseen[action].steps) == action.steps, (action, options, str(foreseen[action]))


# When actions are called, and the evaluations; what else the run is told; and how many batches its data have.
BOTH = every(7) | last()
PLANS = {
    "one loop": (every(7), 1, {"train_total_steps": 40}, 50),
    "loops": (2, every(loops=3), {"train_total_steps": 70, "train_loop_steps": 10}, 90),
    "a total that ends a shorter loop": (2, 3, {"train_total_steps": 37, "train_loop_steps": 5}, 50),
    "the last step": (last(), last(), {"train_total_steps": 33, "train_loop_steps": 10}, 50),
    "the end after the last evaluation": (last(), every(15), {"train_total_steps": 33, "train_loop_steps": 10}, 50),
    "the first steps": (at(0) | first(), at(0) | every(20), {"train_total_steps": 30, "train_loop_steps": 10}, 50),
    "samples": (every(samples=100), every(samples=72), {"train_total_steps": 40, "train_loop_steps": 6}, 50),
    "schedules that are joined": (every(4) & every(6), every(3) & ~every(5), {"train_total_steps": 40}, 50),
    "from a point on": (after(20).then(every(6)), after(38), {"train_total_steps": 40, "train_loop_steps": 7}, 50),
    "loops from a point on": (at(loops=2), after(loops=3) & every(4), {"train_loop_steps": 6}, 40),
    "epochs": (3, BOTH, {"train_epochs": 3}, 8),
    "epochs up to a total": (every(loops=2) | last(), 1, {"train_epochs": 4, "train_total_steps": 25}, 8),
    "the end of the data": (BOTH, 1, {}, 24),
    "the end of the data amid a loop": (BOTH, 2, {"train_loop_steps": 7}, 24),
    "the end of the data with a loop": (BOTH, last() | at(3), {"train_loop_steps": 6}, 24),
    "a stop": (BOTH, 1, {"train_total_steps": 40, "train_loop_steps": 10, "stop": at(23)}, 50),
    "a stop by samples": (last(), BOTH, {"train_loop_steps": 8, "stop": at(samples=90)}, 50),
    "a stop that counts loops": (every(4), 1, {"train_loop_steps": 4, "stop": every(loops=3)}, 50),
    "a stop of two": (BOTH, 1, {"train_total_steps": 40, "stop": at(15) & every(10)}, 50),
    "a stop that has come": (at(0) | first(), at(0), {"train_total_steps": 40, "stop": at(0)}, 50),
    "a stop that has come, and stays so": (BOTH, BOTH, {"train_total_steps": 40, "stop": at(5)}, 50),
    "two updates for each batch": (every(5), at(7), {"train_total_steps": 40, "train_loop_steps": 8}, 50),
}


class TwoUpdates(type(examples.tiny_regression(1)[0])):
    updates_per_step = 2

    def run(self, state, batch):
        return super().run(super().run(state, batch)[0], batch)


def train_as_foretold(case, state=None, directory=None, **options):
    """Trains as a case says, where the plan says; returns the state."""
    interval, evaluated, given, num_batches = PLANS[case]
    options = {**given, **options}
    begins, ends, evaluations, after_evaluations = map(Recorder, (interval, interval, 1, interval))
    in_step = Recorder(interval if isinstance(interval, jaxloop.Schedule) else jaxloop.never())
    example, first_state, batches = examples.tiny_regression(num_batches)
    kind = TwoUpdates if "updates" in case else type(example)
    step = kind(jax.random.key(0), example.model, example.optimizer, train=True, end_actions=[in_step])
    eval_step, _, eval_batches = examples.tiny_regression(2, train=False)
    savers = [] if directory is None else [jaxloop.CheckpointAction(directory, last())]
    outer_loop = jaxloop.OuterLoop(
        jaxloop.TrainLoop(step, begin_actions=[begins], end_actions=[ends, *savers]),
        [jaxloop.EvalLoop(eval_step, end_actions=[evaluations, after_evaluations])],
        None if directory is None else jaxloop.CheckpointSpec(directory),
    )
    when = {"eval_loop_interval": evaluated} if isinstance(evaluated, int) else {"interval": evaluated}
    options["eval_specs"] = [jaxloop.EvalSpec(eval_batches, **when)]
    state = first_state if state is None else state
    report = outer_loop.check(state, batches, **options)
    state, _ = outer_loop(state, batches, **options)
    assert int(state.step) == int(re.search("to step ([0-9]+)", report.plan["train"])[1])
    recorders = {"begin": begins, "end": ends, "step": in_step, "eval": evaluations, "eval's": after_evaluations}
    foretold = {name: list(report.calls[recorder].steps) for name, recorder in recorders.items()}
    assert foretold == {name: recorder.steps for name, recorder in recorders.items()}
    assert all(report.calls[recorder].is_all for recorder in recorders.values())
    return state


@pytest.mark.parametrize("case", PLANS)
def test_each_action_and_each_evaluation_comes_where_check_says(case):
    train_as_foretold(case)


RESUMED = (
    "one loop",
    "loops",
    "the first steps",
    "loops from a point on",
    "epochs",
    "the end of the data amid a loop",
    "the end of the data with a loop",
    "a stop that counts loops",
    "two updates for each batch",
)


@pytest.mark.parametrize("case", RESUMED)
def test_so_it_is_in_a_run_that_resumes(case, tmp_path):
    train_as_foretold(case, directory=tmp_path, train_total_steps=12)
    train_as_foretold(case, directory=tmp_path)


@pytest.mark.parametrize(
    ("options", "interval", "text"),
    [
        ({}, 1, "at the end"),
        ({}, 2, "never"),
        ({}, every(loops=1), "at the end"),
        ({}, every(loops=2), "never"),
        ({}, every(10) | last(), "at steps 10, 20 and further steps and the end"),
        ({}, every(time=60) | at(5), "once, at step 5, and by the clock"),
        ({"loop_steps": 10}, 3, "at steps 30, 60 and further steps and the end"),
        ({"loop_steps": 10}, every(loops=3), "at steps 30, 60 and further steps and the end"),
        ({"loop_steps": 10}, at(loops=3), "at step 30 and further steps"),
        ({"epochs": 3}, at(5), "at step 5 and further steps"),
    ],
)
def test_what_nobody_can_know_stays_open(options, interval, text):
    assert str(forecast.Course(RunSpec(**options)).calls(interval)) == text


def test_neither_a_step_nor_the_beginning_of_a_loop_is_the_end_of_a_run():
    course = forecast.Course(RunSpec())
    assert course.calls(last(), "step").is_never and course.calls(last(), "begin").is_never


def test_an_action_of_an_evaluation_may_come_with_one_that_nobody_can_foresee():
    course = forecast.Course(RunSpec())
    calls = lambda interval, evaluated: str(course.calls_in_evaluation(interval, course.calls(evaluated), "eval"))
    assert calls(1, last()) == "at the end" and calls(at(5), last()) == "at further steps"
    assert calls(last(), last()) == "at further steps and the end"
    assert calls(1, every(time=60)) == calls(every(100), every(time=60)) == "by the clock"


@pytest.mark.parametrize("first_step", [40, 0])
def test_an_action_of_evaluations_comes_where_check_says_from_whatever_step_the_state_is_of(first_step):
    step, state, batches = examples.tiny_regression()
    eval_step, _, _ = examples.tiny_regression(train=False)
    action = Recorder(3)
    outer_loop = jaxloop.OuterLoop(jaxloop.TrainLoop(step), [jaxloop.EvalLoop(eval_step, end_actions=[action])])
    outer_loop(state, batches, 20, 10, [jaxloop.EvalSpec(batches[:3])])  # Of another run.
    _, state, _ = examples.tiny_regression()
    state = state.replace(step=jnp.asarray(first_step, state.step.dtype))
    arguments = (batches, 100, 10, [jaxloop.EvalSpec(batches[:3])])
    foretold = outer_loop.check(state, *arguments).calls[action].steps
    action.steps.clear()
    outer_loop(state, *arguments)
    assert list(foretold) == action.steps == [step for step in (30, 60, 90) if step > first_step]
