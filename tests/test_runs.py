"""Tests of whole runs: scheduled evaluations, the history, resuming, timing and epochs."""

import _thread
import itertools
import shutil
import time

import jax
import numpy as np
import pytest
from programs.clock import Clock

from jaxloop import Elapsed, EvalLoop, EvalSpec, OuterLoop, TrainLoop, actions, at, every, examples, last, types
from jaxloop.experiment.specs import CheckpointSpec


class Seen(actions.Action):
    """Records the steps at which it is called, and its arguments."""

    def __init__(self, interval=1, **options):
        super().__init__(interval)
        self.steps, self.calls = [], []
        self.__dict__.update(options)

    def __call__(self, state, outputs, *, step_num, **kwargs):
        self.steps.append(step_num)
        self.calls.append((int(state.step), dict(outputs or {}), kwargs))


def run(state, step, total, *, eval_specs=(), train_actions=(), eval_actions=(), loop_steps=None, **options):
    """Trains, by default on endless data, and returns the outer loop, the state and the outputs."""
    call = {name: options.pop(name) for name in ("stop", "train_epochs") if name in options}
    dataset = options.pop("train_dataset", None)
    eval_step = type(step)(step.base_prng, step.model, step.optimizer)
    outer_loop = OuterLoop(
        TrainLoop(step, end_actions=train_actions, stat_names=[]),
        [EvalLoop(eval_step, end_actions=eval_actions, stat_names=[]) for _ in eval_specs],
        **options,
    )
    dataset = itertools.cycle(examples.tiny_regression()[2]) if dataset is None else dataset
    state, outputs = outer_loop(state, dataset, total, loop_steps, eval_specs, **call)
    return outer_loop, state, outputs


# Evaluations -----------------------------------------------------------------------------------------


def test_a_scheduled_evaluation_gets_the_state_of_its_step():
    step, state, batches = examples.tiny_regression()
    seen = Seen()
    specs = [EvalSpec(batches[:2], interval=every(steps=30) | last())]
    _, _, outputs = run(state, step, 100, loop_steps=50, eval_specs=specs, eval_actions=[seen])
    assert seen.steps == [30, 60, 90, 100]
    assert [step_num for step_num, _, _ in seen.calls] == [30, 60, 90, 100]
    assert len(outputs["loss"]) == 50


def test_an_evaluation_within_a_loop_can_stop_the_run():
    class Stop(Seen):
        def __call__(self, state, outputs, **kwargs):
            outputs[types.STOP_LOOP] = True

    step, state, batches = examples.tiny_regression()
    specs = [EvalSpec(batches[:2], interval=every(30))]
    _, state, outputs = run(state, step, 100, eval_specs=specs, eval_actions=[Stop()])
    assert int(state.step) == 30
    assert outputs[types.STOP_LOOP]


@pytest.mark.parametrize(
    ("stop", "steps"),
    [
        (at(37), 37),
        (at(samples=80), 10),
        (every(25), 25),
        (at(37) | at(samples=80), 10),
        (at(steps=50) & at(samples=800), 100),
        (at(samples=80) & at(steps=30), 30),
        (at(10) & every(7), 14),
    ],
    ids=repr,
)
def test_a_run_ends_when_its_stop_fires(stop, steps):
    step, state, _ = examples.tiny_regression()
    seen = Seen(last())
    _, state, _ = run(state, step, None, stop=stop, loop_steps=20, train_actions=[seen])
    assert int(state.step) == steps
    assert seen.steps == [steps]


INTERVALS = [
    {},
    {"log_interval": every(7)},
    {"train_actions": [every(1)]},
    {"train_actions": [every(5), every(samples=60), last()]},
    {"evaluate": every(11)},
    {"evaluate": every(loops=1)},
    {"checkpoint": every(13)},
    {"progress": every(1)},
    {"loop_steps": 17, "log_interval": 2, "evaluate": every(3), "checkpoint": every(50), "progress": every(2)},
]


def test_intervals_do_not_affect_the_parameters(tmp_path, assert_same):
    finals = []
    for index, settings in enumerate(INTERVALS):
        step, state, batches = examples.tiny_regression()
        train_actions = [Seen(interval) for interval in settings.get("train_actions", ())]
        if "checkpoint" in settings:
            train_actions.append(actions.CheckpointAction(tmp_path / str(index), settings["checkpoint"]))
        if "progress" in settings:
            train_actions.append(actions.ProgressAction(interval=settings["progress"], bar="plain"))
        specs = [EvalSpec(batches[:3], interval=settings["evaluate"])] if "evaluate" in settings else []
        options = {"log_interval": settings.get("log_interval", 1), "loop_steps": settings.get("loop_steps")}
        _, state, _ = run(state, step, 60, train_actions=train_actions, eval_specs=specs, **options)
        finals.append(jax.tree.map(np.array, state))
    for final in finals[1:]:
        assert_same(final, finals[0])


# The history -----------------------------------------------------------------------------------------


def test_the_history_has_a_row_for_each_log_point_and_evaluation():
    step, state, batches = examples.tiny_regression()
    specs = [EvalSpec(batches[:2], name="test"), EvalSpec(batches[2:4], interval=every(20)), EvalSpec(batches[4:5])]
    outer_loop, _, outputs = run(state, step, 40, loop_steps=10, log_interval=2, eval_specs=specs)
    history = outer_loop.history
    assert history.paths() == ["test.loss", "eval_3.loss", "train.loss", "eval.loss"]
    assert history.collect("steps", "train.loss")[0] == [20, 40]
    assert history.collect("steps", "samples", "loops", "test.loss")[:3] == (
        [10, 20, 30, 40],
        [80, 160, 240, 320],
        [1, 2, 3, 4],
    )
    assert history.collect("steps", "eval.loss")[0] == [20, 40]
    assert len(outputs["loss"]) == 10


def test_resume_restores_elapsed(tmp_path):
    step, state, _ = examples.tiny_regression()
    options = {"checkpoint_spec": CheckpointSpec(tmp_path), "loop_steps": 20}
    save = actions.CheckpointAction(tmp_path, every(10))
    first, *_ = run(state, step, 30, train_actions=[save], **options)
    step, state, _ = examples.tiny_regression()
    seen = Seen(every(samples=8 * 50))
    run(state, step, 60, train_actions=[seen], **options)
    assert seen.steps == [50]
    before = first.history[-1].elapsed
    elapsed = seen.calls[0][2]["elapsed"]
    assert elapsed.samples == 8 * 50
    assert elapsed.time > before.time > 0


def test_a_run_that_starts_over_clears_the_history():
    step, state, batches = examples.tiny_regression()
    outer_loop = OuterLoop(TrainLoop(step))
    for _ in range(2):
        outer_loop(step.initialize_model([1, 3]), batches, 40, 10)
        assert outer_loop.history.collect("steps", "loss")[0] == [10, 20, 30, 40]
    outer_loop(state.replace(step=np.int32(40)), batches, 60, 10)
    assert outer_loop.history.collect("steps", "loss")[0] == [10, 20, 30, 40, 50, 60]


# Epochs ----------------------------------------------------------------------------------------------


def test_an_epoch_is_one_pass_and_one_loop():
    step, state, batches = examples.tiny_regression()
    seen, evaluation = Seen(), Seen()
    specs = [EvalSpec(batches[:1], interval=every(loops=2) | last())]
    outer_loop, state, outputs = run(
        state,
        step,
        None,
        train_dataset=batches[:7],
        train_epochs=5,
        train_actions=[seen],
        eval_specs=specs,
        eval_actions=[evaluation],
    )
    assert seen.steps == [7, 14, 21, 28, 35]
    assert evaluation.steps == [14, 28, 35]
    assert len(outputs["loss"]) == 7
    assert outer_loop.history.collect("loops", "train.loss")[0] == [1, 2, 3, 4, 5]


# Time ------------------------------------------------------------------------------------------------


class Takes(Seen):
    """Advances the clock by `seconds`."""

    def __call__(self, state, outputs, **kwargs):
        super().__call__(state, outputs, **kwargs)
        self.clock.now += self.seconds


def test_each_second_is_attributed_to_one_category(logs, set_clock):
    clock = set_clock(Clock())
    step, state, batches = examples.tiny_regression()
    train_actions = [
        Takes(every(5), clock=clock, seconds=3),
        Takes(2, clock=clock, seconds=7, time_category="checkpoints"),
    ]
    train_loop = TrainLoop(step, end_actions=train_actions)
    eval_loop = EvalLoop(type(step)(step.base_prng, step.model))

    class EvalData:
        def __iter__(self):
            return clock.during(batches[:2], 10)

    outer_loop = OuterLoop(train_loop, [eval_loop])
    specs = [EvalSpec(EvalData(), interval=every(10))]
    outer_loop(state, clock.during(itertools.cycle(batches), 0.5), 20, 5, specs)
    spent = outer_loop.spent
    assert (spent.data, spent.actions, spent.evals, spent.checkpoints) == (10, 4 * 3, 2 * 20, 2 * 7)
    assert spent.total == clock.now
    assert spent.steps_per_sec == 20 / 22
    # The time of the last action passes after the last update of `elapsed`.
    assert outer_loop.history[-1].elapsed.time == 10 + 3 * 3
    assert "20 steps in 1 min 16 s" in logs.text
    assert "53% in evaluations, 18% in checkpoints, 16% in actions, 13% waiting for data" in logs.text


def test_the_report_separates_compiling_from_dispatching(logs, set_clock):
    clock, (plain, state, batches) = set_clock(Clock()), examples.tiny_regression()

    class Compiles(type(plain)):
        def run(self, state, batch):  # Called once, to trace it.
            clock.now += 8
            return super().run(state, batch)

    make = lambda train: Compiles(plain.base_prng, plain.model, plain.optimizer, train=train)
    train_step, eval_step = make(True), make(False)
    outer_loop = OuterLoop(TrainLoop(train_step), [EvalLoop(eval_step)])
    state, _ = outer_loop(state, clock.during(batches[:20], 0.5), 20, 5, [EvalSpec(batches[:2])])
    spent = outer_loop.spent
    assert (spent.compiling, spent.dispatch, spent.data, spent.evals) == (8, 0, 10, 8)
    assert logs.text.index("Compiling Compiles.run before the next step.") < logs.text.index(
        "Compiled Compiles.run in 8.0 s."
    )
    assert "30% compiling" in logs.text or "31% compiling" in logs.text
    outer_loop(state, clock.during(batches[:20], 0.5), 40, 5, [EvalSpec(batches[:2])])
    assert outer_loop.spent.compiling == 0


# The end ---------------------------------------------------------------------------------------------


def test_finish_can_replace_the_returned_state():
    class Back(Seen):
        def __call__(self, state, outputs, **kwargs):
            self.kept = jax.tree.map(np.array, state)

        def finish(self, state):
            return self.kept

    step, state, _ = examples.tiny_regression()
    _, state, _ = run(state, step, 30, train_actions=[Back(at(12))])
    assert int(state.step) == 12


def test_elapsed_of_a_loop_can_be_read_and_set():
    step, state, batches = examples.tiny_regression()
    loop = TrainLoop(step)
    loop(state, batches, num_steps=4)
    assert (loop.elapsed.steps, loop.elapsed.samples, loop.elapsed.loops) == (4, 32, 1)
    loop.resume(Elapsed(100, 800, 60.0, 10))
    assert loop.elapsed == Elapsed(100, 800, pytest.approx(60.0), 10)


# Interruptions -----------------------------------------------------------------------------------------


class BreaksOnce:
    """A dataset whose iteration `number` is interrupted by an exception or Ctrl-C after one batch.

    If `how` is a directory, it is copied instead, after pending saves, to simulate what SIGKILL would leave.
    """

    def __init__(self, batches, number, how):
        self.batches, self.number, self.how = batches, number, how

    def __iter__(self):
        self.number -= 1
        for index, batch in enumerate(self.batches):
            if self.number == 0 and index == 1:
                if self.how == "exception":
                    raise OSError("the disk is gone")
                if self.how == "ctrl-c":
                    _thread.interrupt_main()
                else:
                    while any("-tmp" in each.name for each in self.how.iterdir()):
                        time.sleep(0.01)
                    shutil.copytree(self.how, self.how.with_name("killed"))
            yield batch


@pytest.mark.parametrize("how", ["exception", "ctrl-c"])
@pytest.mark.parametrize("schedule", [every(4), every(loops=1), None], ids=repr)
@pytest.mark.parametrize("number", [1, 2, 5])
def test_an_interrupted_evaluation_is_repeated(number, schedule, how, tmp_path, assert_same):
    def experiment(workdir, eval_dataset):
        step, state, batches = examples.tiny_regression()
        options = {"checkpoint_spec": CheckpointSpec(workdir), "train_dataset": batches[:5], "train_epochs": 5}
        save = actions.CheckpointAction(workdir, every(10))
        specs = [EvalSpec(eval_dataset, interval=schedule, name="test")]
        return run(state, step, None, train_actions=[save], eval_specs=specs, **options)

    batches = examples.tiny_regression()[2][:3]
    whole, state, _ = experiment(tmp_path / "whole", batches)
    try:
        experiment(tmp_path / "broken", BreaksOnce(batches, number, how))
    except OSError as error:
        assert "the disk is gone" in str(error)
    resumed, same, _ = experiment(tmp_path / "broken", batches)
    assert int(same.step) == 25
    assert_same(state, same)
    assert resumed.history.collect("steps", "test.loss") == whole.history.collect("steps", "test.loss")


@pytest.mark.parametrize(("how", "interval"), [("exception", every(7)), ("ctrl-c", 1), ("kill", every(7)), ("kill", 1)])
@pytest.mark.parametrize(
    "options",
    [
        {"total": 20},
        {"total": 20, "loop_steps": 5},
        {"stop": at(samples=160)},
        {"stop": at(20), "loop_steps": 7},
        {"train_epochs": 4},
        {"train_epochs": 9, "total": 18},
        {},
    ],
    ids=repr,
)
def test_an_interrupted_last_evaluation_is_repeated_however_the_run_ends(options, interval, how, tmp_path):
    def experiment(workdir, eval_dataset):
        step, state, batches = examples.tiny_regression()
        dataset = batches[: 5 if "train_epochs" in options else 100 if "stop" in options else 20]
        save = actions.CheckpointAction(workdir, interval)
        specs = [EvalSpec(eval_dataset, interval=every(6) | last(), name="test")]
        all_options = {"total": None, "checkpoint_spec": CheckpointSpec(workdir), "train_dataset": dataset} | options
        return run(state, step, train_actions=[save], eval_specs=specs, **all_options)[0].history

    batches = examples.tiny_regression()[2][:3]
    whole = experiment(tmp_path / "whole", batches)
    number = len(whole.collect("test.loss"))
    broken = tmp_path / "broken"
    try:
        experiment(broken, BreaksOnce(batches, number, broken if how == "kill" else how))
    except OSError as error:
        assert "the disk is gone" in str(error)
    resumed = experiment(tmp_path / "killed" if how == "kill" else broken, batches)
    assert resumed.collect("steps", "loops", "test.loss") == whole.collect("steps", "loops", "test.loss")


def test_restarting_a_finished_run_repeats_no_evaluation(tmp_path):
    def experiment():
        step, state, batches = examples.tiny_regression()
        save = actions.CheckpointAction(tmp_path, every(4))
        specs = [EvalSpec(batches[:3], interval=every(4) | last(), name="test")]
        options = {"checkpoint_spec": CheckpointSpec(tmp_path), "train_dataset": batches[:20]}
        return run(state, step, 23, train_actions=[save], eval_specs=specs, **options)[0].history

    rows = experiment().collect("steps", "test.loss")
    assert rows[0] == [4, 8, 12, 16, 20]
    assert experiment().collect("steps", "test.loss") == rows


def test_a_step_whose_end_raises_is_counted(tmp_path, assert_same):
    def experiment(fails_at):
        tiny, state, batches = examples.tiny_regression()

        class Fails(type(tiny)):
            calls = 0

            def end(self, state, outputs):
                self.calls += 1
                if self.calls == fails_at:
                    raise RuntimeError("at its end")
                return state, outputs

        step = Fails(tiny.base_prng, tiny.model, tiny.optimizer, train=True)
        options = {"checkpoint_spec": CheckpointSpec(tmp_path), "train_dataset": batches[:5], "train_epochs": 4}
        save = actions.CheckpointAction(tmp_path, 1)
        return run(state, step, None, train_actions=[save], **options)

    with pytest.raises(RuntimeError, match="at its end"):
        experiment(8)
    outer_loop, state, _ = experiment(None)
    assert int(state.step) == 20
    assert outer_loop.history[-1].elapsed.samples == 160


def test_an_error_in_finish_names_the_action_and_closes_it():
    class Fails(Seen):
        closed = False

        def finish(self, state):
            raise RuntimeError("no way back")

        def close(self):
            self.closed = True

    step, state, batches = examples.tiny_regression()
    action = Fails()
    outer_loop = OuterLoop(TrainLoop(step, end_actions=[action]))
    with pytest.raises(RuntimeError, match="no way back") as caught:
        outer_loop(state, batches, 10)
    assert any("in Fails.finish of Fails(interval=1)" in note for note in caught.value.__notes__)
    assert action.closed


def test_two_loops_can_share_a_spec():
    step, state, batches = examples.tiny_regression()
    spec = EvalSpec(batches[:2], interval=every(5))
    outer_loop, _, _ = run(state, step, 10, eval_specs=[spec, spec])
    assert outer_loop.history.collect("steps", "eval.loss")[0] == [5, 10]
    assert outer_loop.history.collect("eval.loss") == outer_loop.history.collect("eval_2.loss")


def test_outputs_are_available_right_after_an_action_that_waited():
    shown = Seen(every(1), needs_all_outputs=False)
    step, state, batches = examples.tiny_regression()
    TrainLoop(step, end_actions=[Seen(every(1)), shown])(state, batches, num_steps=10)
    assert all("loss" in outputs for _, outputs, _ in shown.calls)
