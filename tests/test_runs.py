"""Tests of whole runs: scheduled evaluations, the history, resuming, timing and epochs."""

import _thread
import itertools

import jax
import numpy as np
import pytest
from programs.acts import Do, Record, Stop
from programs.clock import Clock
from programs.tiny import BATCHES, STATE, STEP, Regression, experiment, make_step

from jaxloop import Elapsed, EvalSpec, OuterLoop, TrainLoop, actions, at, every, last, types


def run(total, *, eval_specs=(), train_actions=(), eval_actions=(), loop_steps=None, **options):
    """Trains, by default on endless data, and returns the outer loop, the state and the outputs."""
    call = {name: options.pop(name) for name in ("stop", "train_epochs") if name in options}
    dataset = options.pop("train_dataset", None)
    outer_loop = experiment(*train_actions, evals=[eval_actions for _ in eval_specs], **options)
    dataset = itertools.cycle(BATCHES) if dataset is None else dataset
    state, outputs = outer_loop(STATE, dataset, total, loop_steps, eval_specs, **call)
    return outer_loop, state, outputs


# Evaluations -----------------------------------------------------------------------------------------


def test_a_scheduled_evaluation_gets_the_state_of_its_step():
    seen = Record(1, lambda step_num, state, **_: (step_num, int(state.step)))
    specs = [EvalSpec(BATCHES[:2], interval=every(steps=30) | last())]
    _, _, outputs = run(100, loop_steps=50, eval_specs=specs, eval_actions=[seen])
    assert seen.seen == [(30, 30), (60, 60), (90, 90), (100, 100)]
    assert len(outputs["loss"]) == 50


def test_an_evaluation_within_a_loop_can_stop_the_run():
    specs = [EvalSpec(BATCHES[:2], interval=every(30))]
    _, state, outputs = run(100, eval_specs=specs, eval_actions=[Stop()])
    assert int(state.step) == 30
    assert outputs[types.STOP_LOOP]


@pytest.mark.parametrize(
    ("stop", "steps"),
    [
        (at(37), 37),
        (at(37) | at(samples=80), 10),
        (at(steps=50) & at(samples=800), 100),
        (at(10) & every(7), 14),
    ],
    ids=repr,
)
def test_a_run_ends_when_its_stop_fires(stop, steps):
    seen = Record(last())
    _, state, _ = run(None, stop=stop, loop_steps=20, train_actions=[seen])
    assert int(state.step) == steps
    assert seen.seen == [steps]


INTERVALS = [
    {},
    {"train_actions": [every(5), every(samples=60), last()]},
    {"evaluate": every(loops=1)},
    {"checkpoint": every(13)},
    {"progress": every(1)},
    {"loop_steps": 17, "log_interval": 2, "evaluate": every(3), "checkpoint": every(50), "progress": every(2)},
]


def test_intervals_do_not_affect_the_parameters(tmp_path, assert_same):
    finals = []
    for index, settings in enumerate(INTERVALS):
        train_actions = [Record(interval) for interval in settings.get("train_actions", ())]
        if "checkpoint" in settings:
            train_actions.append(actions.CheckpointAction(tmp_path / str(index), settings["checkpoint"]))
        if "progress" in settings:
            train_actions.append(actions.ProgressAction(interval=settings["progress"], bar="plain"))
        specs = [EvalSpec(BATCHES[:3], interval=settings["evaluate"])] if "evaluate" in settings else []
        options = {"log_interval": settings.get("log_interval", 1), "loop_steps": settings.get("loop_steps")}
        finals.append(run(60, train_actions=train_actions, eval_specs=specs, **options)[1])
    for final in finals[1:]:
        assert_same(final, finals[0])


# The history -----------------------------------------------------------------------------------------


def test_the_history_has_a_row_for_each_log_point_and_evaluation():
    specs = [EvalSpec(BATCHES[:2], name="test"), EvalSpec(BATCHES[2:4], interval=every(20)), EvalSpec(BATCHES[4:5])]
    outer_loop, _, outputs = run(40, loop_steps=10, log_interval=2, eval_specs=specs)
    history = outer_loop.history
    assert history.paths() == ["test.loss", "eval_3.loss", "train.loss", "eval.loss"]
    assert history.collect("steps", "train.loss")[0] == [20, 40]
    counts = history.collect("steps", "samples", "loops", "test.loss")[:3]
    assert counts == ([10, 20, 30, 40], [80, 160, 240, 320], [1, 2, 3, 4])
    assert history.collect("steps", "eval.loss")[0] == [20, 40]
    assert len(outputs["loss"]) == 10


def test_resume_restores_elapsed(tmp_path):
    options = {"directory": tmp_path, "saves": every(10), "loop_steps": 20}
    first, *_ = run(30, **options)
    seen = Record(every(samples=8 * 50), lambda elapsed, **_: elapsed)
    run(60, train_actions=[seen], **options)
    (elapsed,) = seen.seen
    assert (elapsed.steps, elapsed.samples) == (50, 8 * 50)
    assert elapsed.time > first.history[-1].elapsed.time > 0


def test_a_run_that_starts_over_clears_the_history():
    outer_loop = OuterLoop(TrainLoop(STEP))
    for _ in range(2):
        outer_loop(STATE, BATCHES, 40, 10)
        assert outer_loop.history.collect("steps", "loss")[0] == [10, 20, 30, 40]
    outer_loop(STATE.replace(step=np.int32(40)), BATCHES, 60, 10)
    assert outer_loop.history.collect("steps", "loss")[0] == [10, 20, 30, 40, 50, 60]


# Epochs ----------------------------------------------------------------------------------------------


def test_an_epoch_is_one_pass_and_one_loop():
    seen, evaluation = Record(), Record()
    specs = [EvalSpec(BATCHES[:1], interval=every(loops=2) | last())]
    options = {"train_dataset": BATCHES[:7], "train_epochs": 5, "train_actions": [seen], "eval_actions": [evaluation]}
    outer_loop, _, outputs = run(None, eval_specs=specs, **options)
    assert seen.seen == [7, 14, 21, 28, 35]
    assert evaluation.seen == [14, 28, 35]
    assert len(outputs["loss"]) == 7
    assert outer_loop.history.collect("loops", "train.loss")[0] == [1, 2, 3, 4, 5]


# Time ------------------------------------------------------------------------------------------------


def test_each_second_is_attributed_to_one_category(logs, set_clock):
    clock = set_clock(Clock())
    takes = lambda seconds: lambda **_: vars(clock).update(now=clock.now + seconds)
    train_actions = [Do(takes(3), every(5)), Do(takes(7), 2, time_category="checkpoints")]

    class EvalData:
        def __iter__(self):
            return clock.during(BATCHES[:2], 10)

    outer_loop = experiment(*train_actions, evals=[[]])
    specs = [EvalSpec(EvalData(), interval=every(10))]
    outer_loop(STATE, clock.during(itertools.cycle(BATCHES), 0.5), 20, 5, specs)
    spent = outer_loop.spent
    assert (spent.data, spent.actions, spent.evals, spent.checkpoints) == (10, 4 * 3, 2 * 20, 2 * 7)
    assert spent.total == clock.now
    assert spent.steps_per_sec == 20 / 22
    # The time of the last action passes after the last update of `elapsed`.
    assert outer_loop.history[-1].elapsed.time == 10 + 3 * 3
    assert "20 steps in 1 min 16 s" in logs.text
    assert "53% in evaluations, 18% in checkpoints, 16% in actions, 13% waiting for data" in logs.text


def test_the_report_separates_compiling_from_dispatching(logs, set_clock):
    clock = set_clock(Clock())

    class Compiles(Regression):
        def run(self, state, batch):  # Called once, to trace it.
            clock.now += 8
            return super().run(state, batch)

    outer_loop = experiment(step=make_step(Compiles), evals=[[]], eval_step=make_step(Compiles, train=False))
    state, _ = outer_loop(STATE, clock.during(BATCHES[:20], 0.5), 20, 5, [EvalSpec(BATCHES[:2])])
    spent = outer_loop.spent
    assert (spent.compiling, spent.dispatch, spent.data, spent.evals) == (8, 0, 10, 8)
    texts = "Compiling Compiles.run before the next step.", "Compiled Compiles.run in 8.0 s."
    assert logs.text.index(texts[0]) < logs.text.index(texts[1])
    assert "30% compiling" in logs.text or "31% compiling" in logs.text
    outer_loop(state, clock.during(BATCHES[:20], 0.5), 40, 5, [EvalSpec(BATCHES[:2])])
    assert outer_loop.spent.compiling == 0


# The end ---------------------------------------------------------------------------------------------


def test_finish_can_replace_the_returned_state():
    back = Record(at(12), lambda state, **_: jax.tree.map(np.array, state), finish=lambda state: back.seen[0])
    _, state, _ = run(30, train_actions=[back])
    assert int(state.step) == 12


def test_elapsed_of_a_loop_can_be_read_and_set():
    loop = TrainLoop(STEP)
    loop(STATE, BATCHES, num_steps=4)
    assert (loop.elapsed.steps, loop.elapsed.samples, loop.elapsed.loops) == (4, 32, 1)
    loop.resume(Elapsed(100, 800, 60.0, 10))
    assert loop.elapsed == Elapsed(100, 800, pytest.approx(60.0), 10)


# Interruptions -----------------------------------------------------------------------------------------


class BreaksOnce:
    """A dataset whose iteration `number` is interrupted by an exception or Ctrl-C after one batch."""

    def __init__(self, batches, number, how):
        self.batches, self.number, self.how = batches, number, how

    def __iter__(self):
        self.number -= 1
        for index, batch in enumerate(self.batches):
            if self.number == 0 and index == 1:
                if self.how == "exception":
                    raise OSError("the disk is gone")
                _thread.interrupt_main()
            yield batch


# How an evaluation is interrupted, the interval of the checkpoints, the schedule of the evaluations, which one is
# interrupted (None: the last), and the end of the run.
INTERRUPTED = [
    ("exception", every(10), every(loops=1), 2, {"train_epochs": 5}),
    ("ctrl-c", every(10), every(4), 1, {"train_epochs": 5}),
    ("exception", every(7), every(6) | last(), None, {"total": 20}),
    ("ctrl-c", 1, every(6) | last(), None, {"stop": at(20), "loop_steps": 7}),
    ("exception", every(7), every(6) | last(), None, {}),
]


@pytest.mark.parametrize(("how", "interval", "schedule", "number", "options"), INTERRUPTED)
def test_an_interrupted_evaluation_is_repeated_however_the_run_ends(
    how, interval, schedule, number, options, tmp_path, assert_same
):
    def experiment(workdir, eval_dataset):
        dataset = BATCHES[: 5 if "train_epochs" in options else 100 if "stop" in options else 20]
        specs = [EvalSpec(eval_dataset, interval=schedule, name="test")]
        all_options = {"total": None, "directory": workdir, "saves": interval, "train_dataset": dataset} | options
        outer_loop, state, _ = run(eval_specs=specs, **all_options)
        return state, outer_loop.history

    state, whole = experiment(tmp_path / "whole", BATCHES[:3])
    broken, number = tmp_path / "broken", number or len(whole.collect("test.loss"))
    try:
        experiment(broken, BreaksOnce(BATCHES[:3], number, how))
    except OSError as error:
        assert "the disk is gone" in str(error)
    same, resumed = experiment(broken, BATCHES[:3])
    assert_same(state, same)
    assert resumed.collect("steps", "loops", "test.loss") == whole.collect("steps", "loops", "test.loss")


def test_restarting_a_finished_run_repeats_no_evaluation(tmp_path):
    def experiment():
        specs = [EvalSpec(BATCHES[:3], interval=every(4) | last(), name="test")]
        options = {"directory": tmp_path, "saves": every(4), "train_dataset": BATCHES[:20]}
        return run(23, eval_specs=specs, **options)[0].history

    rows = experiment().collect("steps", "test.loss")
    assert rows[0] == [4, 8, 12, 16, 20]
    assert experiment().collect("steps", "test.loss") == rows


def test_an_error_in_finish_names_the_action_and_closes_it():
    class Fails(Record):
        def finish(self, state):
            raise RuntimeError("no way back")

    action = Fails()
    with pytest.raises(RuntimeError, match="no way back") as caught:
        experiment(action)(STATE, BATCHES, 10)
    assert any("in Fails.finish of Fails(interval=1)" in note for note in caught.value.__notes__)
    assert action.closed


def test_two_loops_can_share_a_spec():
    spec = EvalSpec(BATCHES[:2], interval=every(5))
    outer_loop, _, _ = run(10, eval_specs=[spec, spec])
    assert outer_loop.history.collect("steps", "eval.loss")[0] == [5, 10]
    assert outer_loop.history.collect("eval.loss") == outer_loop.history.collect("eval_2.loss")


def test_outputs_are_available_right_after_an_action_that_waited():
    shown = Record(every(1), lambda outputs, **_: "loss" in outputs, needs_all_outputs=False)
    TrainLoop(STEP, end_actions=[Record(every(1)), shown])(STATE, BATCHES, num_steps=10)
    assert shown.seen == [True] * 10
