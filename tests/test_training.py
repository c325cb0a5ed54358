"""Tests of joined loops: loops at whose ends nothing is due run without a pause, with the same results."""

import _thread
import contextlib
import itertools
import signal

import clu.metrics
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs.acts import Do, Fail, Record, then_fail
from programs.tiny import BATCHES, EVAL_STEP, STATE, STEP, Regression, experiment, make_step

import jaxloop
from jaxloop import at, checkpoint, every, last
from jaxloop.schedules import never
from jaxloop.stat_loop import STAT_LIFE_TIME_SECS


def loop_that_returns(change):
    """Returns a class of train loops whose `end` passes the outputs to a function, which may change them."""

    class Ending(jaxloop.TrainLoop):
        def end(self, state, outputs):
            state, outputs = super().end(state, outputs)
            return state, change(self, outputs)

    return Ending


OneByOne = loop_that_returns(lambda loop, outputs: outputs)  # Overrides `end`, so that the loops are not joined.


def step_that_reports(report):
    """Returns a step like `STEP` with further outputs, which a function computes from the others and the batch."""

    class Reporting(Regression):
        def run(self, state, batch):
            state, outputs = super().run(state, batch)
            return state, {**outputs, **report(outputs, batch)}

    return make_step(Reporting)


class Seen(jaxloop.Action):
    """Records its arguments, except for times."""

    def __init__(self, interval=1, fails_at=None):
        super().__init__(interval)
        self.calls, self.fails_at = [], fails_at

    def __call__(self, state, outputs, *, step_num, elapsed, **kwargs):
        if step_num == self.fails_at:
            raise RuntimeError("the action failed")
        losses = [float(loss) for loss in outputs.get("loss", ())]
        self.calls.append((step_num, elapsed.loops, elapsed.is_last, losses, list(outputs.num_examples)))


class Broken(Exception):
    pass


def batches(fault, at):
    """Returns data with a fault before batch `at`, the first time that it is read."""
    faults = [at]

    def batch(number):
        if number in faults:
            faults.clear()
            if fault == "the data raise":
                raise Broken
            if fault == "Ctrl-C":
                _thread.interrupt_main()
        return BATCHES[number % 100]

    return jaxloop.from_index(batch, num_batches=at if fault == "the data end" else None)


def observed(loop_class, directory, plan):
    """Returns everything that is observable about a run and the run that resumes it."""
    seen = []
    fault, at = plan["fault"], plan["at"]
    for fault in (fault, fault if fault == "the data end" else None):  # noqa: B020
        action, at_end, evaluated = Seen(plan["interval"]), Seen(last()), Seen()
        saves = [] if plan["saves"] is None else [jaxloop.CheckpointAction(directory, plan["saves"])]
        fails = [Seen(every(steps=plan["at"] or 1), fails_at=plan["at"])] if fault == "an action raises" else []
        train_loop = loop_class(STEP, end_actions=[action, at_end, *fails, *saves], stat_names=[STAT_LIFE_TIME_SECS])
        eval_loop = jaxloop.EvalLoop(EVAL_STEP, end_actions=[evaluated], stat_names=[])
        spec = jaxloop.CheckpointSpec(directory) if saves else None
        outer_loop = jaxloop.OuterLoop(train_loop, [eval_loop], spec, log_interval=plan["log_interval"])
        spec = jaxloop.EvalSpec(BATCHES[:2], **plan["evaluates"])
        state, outputs = None, None
        try:
            data = batches(fault, at)
            state, outputs = outer_loop(STATE, data, plan["total"], plan["loop_steps"], [spec], stop=plan["stop"])
        except (Broken, RuntimeError) as error:
            seen.append(repr(error))
        seen += [each.calls for each in (action, at_end, evaluated)]
        seen += [[(row.elapsed.steps, row.elapsed.loops, row.logs) for row in outer_loop.history]]
        seen += [train_loop.loop_count, train_loop.step_num, train_loop.elapsed.loops, train_loop.elapsed.samples]
        seen += [outputs and [float(loss) for loss in outputs.get("loss", ())], outputs and outputs.num_examples]
        final = state if state is not None else outer_loop.rescued_state
        seen += [final is None, np.asarray(final.params["kernel"]).tolist() if final is not None else None]
        seen += [checkpoint.all_steps(directory)]
        if not saves:
            break
    return seen


plans = st.fixed_dictionaries(
    {
        "total": st.integers(20, 90),
        "loop_steps": st.integers(1, 12),
        "log_interval": st.sampled_from([3, 7, 50, every(steps=25), every(loops=4), never()]),
        "interval": st.sampled_from([2, 5, 50, every(steps=17), every(loops=6) | last(), every(samples=200)]),
        "evaluates": st.sampled_from(
            [
                {"eval_loop_interval": 4},
                {"eval_loop_interval": 50},
                {"interval": every(steps=20)},
                {"interval": every(loops=5)},
                {"interval": last()},
                {"should_eval_fn": lambda context: context.step_num > 40, "eval_loop_interval": 3},
            ]
        ),
        "saves": st.sampled_from([None, 6, every(steps=30), every(loops=4), never()]),
        # Not Ctrl-C: a separate loop reads ahead at its end, so a signal in the data may come one step earlier.
        "fault": st.sampled_from([None, "the data raise", "the data end", "an action raises"]),
        "at": st.integers(1, 60),
        "stop": st.sampled_from([None, None, jaxloop.at(loops=9), jaxloop.at(steps=40), jaxloop.at(samples=180)]),
    }
)


@settings(deadline=None, max_examples=20)
@given(plan=plans)
def test_joined_loops_give_the_same_results_as_separate_ones(plan, tmp_path_factory):
    one, other = (tmp_path_factory.mktemp("run") for _ in range(2))
    assert observed(jaxloop.TrainLoop, one, plan) == observed(OneByOne, other, plan)


@pytest.mark.parametrize(("log_interval", "ends"), [(never(), 1), (1, 50), (10, 5)])  # The last loop ends the run.
def test_loops_are_joined_if_nothing_is_due_at_their_ends(log_interval, ends, monkeypatch):
    ended, end = [], jaxloop.loop.Loop.end
    monkeypatch.setattr(jaxloop.loop.Loop, "end", lambda *arguments: ended.append(1) or end(*arguments))
    state, outputs = experiment(log_interval=log_interval)(STATE, itertools.cycle(BATCHES), 500, 10)
    assert int(state.step) == 500 and len(outputs["loss"]) == 10
    assert len(ended) == ends


# Stops, outputs and counts in joined loops --------------------------------------------------------------------

DATA = jaxloop.from_index(lambda number: BATCHES[number % 100])
NEVER = never()


def fail_at(number, **attributes):
    """Raises an error at a step, before the outputs of the step are read."""
    return Fail(at(steps=number), Broken(), **attributes)


def run_until(fails, directory, *actions, data=DATA, length=(), loop_class=jaxloop.TrainLoop, log_interval=NEVER):
    """Runs until an action fails, if one is given, and resumes. Returns the last outer loop and outputs."""
    for more in ([fails], []) if fails else ([],):
        save = jaxloop.CheckpointAction(directory, never())
        train_loop = loop_class(STEP, end_actions=[*more, *actions, save], stat_names=[])
        outer_loop = jaxloop.OuterLoop(train_loop, None, jaxloop.CheckpointSpec(directory), log_interval=log_interval)
        with pytest.raises(Broken) if more else contextlib.nullcontext():
            _, outputs = outer_loop(STATE, data, *length)
    return outer_loop, outputs


def stop_at(number, interval, **attributes):
    """Asks for the end of the run at a step, if it is called there."""
    stop = lambda step_num, outputs, **_: outputs.update({jaxloop.STOP_LOOP: True}) if step_num == number else None
    return Do(stop, interval, **attributes)


def average(outputs, batch):
    return {"average": clu.metrics.Average.from_model_output(outputs["loss"])}


@pytest.mark.parametrize("options", [{}, {"steps_per_dispatch": 4}])
@pytest.mark.parametrize("num_batches", [None, 4])
def test_metrics_are_accumulated_per_loop(num_batches, options):
    found = []
    for loop_class in (jaxloop.TrainLoop, OneByOne):
        action = Record(2, lambda outputs, **_: outputs["average"][0].compute())
        train_loop = loop_class(step_that_reports(average), end_actions=[action], stat_names=[], **options)
        data = jaxloop.from_index(lambda number: BATCHES[number], num_batches=num_batches)
        _, outputs = jaxloop.OuterLoop(train_loop, log_interval=never())(STATE, data, 20, 2)
        found.append([*map(repr, action.seen), repr(outputs["average"][0].compute()), len(outputs["loss"])])
    assert found[0] == found[1]


def test_a_stop_reported_for_only_some_batches_ends_the_run():
    step = step_that_reports(lambda outputs, batch: {jaxloop.STOP_LOOP: True} if len(batch["x"]) == 5 else {})
    data = [jax.tree.map(lambda leaf: leaf[:5], batch) if index == 1 else batch for index, batch in enumerate(BATCHES)]
    state, _ = experiment(step=step, log_interval=never())(STATE, data, 40, 4)
    assert int(state.step) == 4


class Adding(jaxloop.TrainLoop):
    def update_outputs(self, loop_outputs, step_outputs):
        return super().update_outputs(loop_outputs, step_outputs)


@pytest.mark.parametrize(("loop_class", "log_interval"), [(jaxloop.TrainLoop, NEVER), (Adding, every(steps=2))])
def test_a_resumed_loop_returns_all_of_its_outputs_with_their_weights(loop_class, log_interval, tmp_path):
    sizes = [8, 8, 4, 8, 8, 8]
    data = jaxloop.from_index(lambda number: {k: leaf[: sizes[number]] for k, leaf in BATCHES[number].items()}, 6)
    options = {"data": data, "length": (None, 6), "loop_class": loop_class, "log_interval": log_interval}
    _, outputs = run_until(fail_at(4), tmp_path, **options)
    assert (len(outputs["loss"]), outputs.num_examples) == (6, sizes)


@pytest.mark.parametrize("end", [{"train_total_steps": 7}, {"stop": at(steps=7)}])
def test_a_signal_at_the_last_step_does_not_lose_the_last_row(end):
    def batch(number):
        if number == 6:
            signal.raise_signal(signal.SIGINT)
        return BATCHES[number]

    outer_loop = experiment()
    outer_loop(STATE, jaxloop.from_index(batch), **end)
    assert outer_loop.history.collect("steps", "train.loss")[0] == [7]


def test_begin_actions_receive_the_time_since_their_last_call():
    begin = Record(1, lambda spent, **_: spent.steps)
    jaxloop.OuterLoop(jaxloop.TrainLoop(STEP, begin_actions=[begin]))(STATE, BATCHES, 12, 4)
    assert begin.seen == [0, 4, 4]


class Doubling(jaxloop.TrainLoop):
    def update_outputs(self, loop_outputs, step_outputs):
        loop_outputs.setdefault("twice", []).append(2 * float(step_outputs["loss"]))
        return loop_outputs


Renaming = loop_that_returns(lambda loop, outputs: {"twice": [2 * value for value in outputs["loss"]]})


@pytest.mark.parametrize(("loop_class", "fails_at"), [(Doubling, 4), (Renaming, 6), (Renaming, None)])
def test_an_int_interval_gets_what_the_hooks_made_of_several_loops(loop_class, fails_at, tmp_path):
    action = Record(3, lambda outputs, **_: {name: len(values) for name, values in outputs.items()})
    fails = fail_at(fails_at, runs_last=True) if fails_at else None
    outer_loop, _ = run_until(fails, tmp_path, action, length=(9, 3), loop_class=loop_class, log_interval=3)
    assert action.seen == [{"twice": 9}] and outer_loop.history.paths() == ["train.twice"]


def test_begin_actions_of_a_second_call_do_not_see_the_end_of_the_first():
    begin = Record(1, lambda elapsed, **_: elapsed.is_last)
    loop = jaxloop.TrainLoop(STEP, begin_actions=[begin])
    state, _ = loop(STATE, BATCHES, 5)
    loop(state, BATCHES, 5)
    assert begin.seen == [False, False]


def test_metrics_of_the_call_after_a_failure_are_complete():
    loop = jaxloop.TrainLoop(step_that_reports(average))
    with pytest.raises(Broken):
        loop(STATE, then_fail(BATCHES[:2], Broken()))
    _, outputs = loop(loop.rescued_state, BATCHES, 3)
    assert float(outputs["average"][0].count) == 3


def test_outputs_that_appear_in_the_middle_of_joined_loops_are_returned():
    step = step_that_reports(lambda outputs, batch: {} if len(batch["x"]) == 8 else {"other": outputs["loss"]})
    sizes = [8] * 15 + [4] * 15
    data = [{name: leaf[:size] for name, leaf in batch.items()} for batch, size in zip(BATCHES, sizes, strict=False)]
    _, outputs = experiment(step=step, log_interval=last())(STATE, data, 30, 10)
    assert (len(outputs["loss"]), len(outputs["other"])) == (10, 10)


def test_statistics_of_a_loop_begin_where_the_last_one_ended(set_clock):
    set_clock(map(float, itertools.count()).__next__)
    names = [jaxloop.stat_loop.STAT_LOOP_TIME_SECS]
    outer_loop = jaxloop.OuterLoop(jaxloop.TrainLoop(STEP, stat_names=names), log_interval=10)
    _, outputs = outer_loop(STATE, itertools.cycle(BATCHES), 100, 10)
    _, alone = jaxloop.TrainLoop(STEP, stat_names=names)(STATE, itertools.cycle(BATCHES), 10)
    assert outputs[names[0]] < 3 * alone[names[0]]


def test_the_last_step_is_saved_despite_ctrl_c(tmp_path):
    interrupts = Do(lambda **_: signal.raise_signal(signal.SIGINT), last())
    actions = [stop_at(4, every(steps=4)), interrupts]
    outer_loop = experiment(*actions, directory=tmp_path, saves=last(), log_interval=never())
    outer_loop(STATE, itertools.cycle(BATCHES), 40, 2)
    assert checkpoint.all_steps(tmp_path) == [4]


def test_a_loop_interrupted_by_ctrl_c_is_not_counted():
    train_loop = jaxloop.TrainLoop(STEP)
    state, _ = jaxloop.OuterLoop(train_loop)(STATE, batches("Ctrl-C", 2), 20, 10)
    assert 0 < int(state.step) < 10 and train_loop.loop_count == train_loop.elapsed.loops == 0
    assert train_loop.was_interrupted


def test_loop_count_is_current_when_batches_are_read():
    seen = []

    class Curriculum(jaxloop.TrainLoop):
        def _get_next_batch(self, dataset):
            seen.append(self.loop_count)
            return super()._get_next_batch(dataset)

    experiment(loop_class=Curriculum, log_interval=never())(STATE, DATA, 8, 2)
    assert seen == [0, 0, 1, 1, 2, 2, 3, 3]


def test_should_eval_fn_is_not_called_again_after_a_resume(tmp_path):
    asked = []

    def run(fails):
        failing = [Fail(2, Broken(), runs_last=True)] if fails else []
        spec = jaxloop.EvalSpec(BATCHES[:2], should_eval_fn=lambda context: asked.append(context.step_num) or True)
        outer_loop = experiment(*failing, directory=tmp_path, saves=1, evals=[[]])
        outer_loop(STATE, DATA, 8, 2, eval_specs=[spec])

    with pytest.raises(Broken):
        run(fails=True)
    run(fails=False)
    assert asked == [2, 4, 6, 8]


def test_evaluations_check_no_schedules_between_steps(set_clock):
    action = Record(every(time=2.0), lambda outputs, **_: len(outputs["loss"]))
    set_clock(itertools.count(0.0, 1.0).__next__)
    jaxloop.EvalLoop(EVAL_STEP, end_actions=[action], stat_names=[])(STATE, BATCHES[:6])
    assert action.seen == [6]


# Rows, evaluations and positions are not lost --------------------------------------------------------


def rows(outer_loop):
    return [(row.elapsed.steps, row.logs) for row in outer_loop.history.rows]


AT_THE_END = [jaxloop.EvalSpec(BATCHES[:2], interval=last())]
StopsAtItsEnd = loop_that_returns(lambda loop, outputs: {**outputs, jaxloop.STOP_LOOP: loop.step_num == 20})


@pytest.mark.parametrize(
    ("by", "at", "save"),
    [
        ("an action", 15, every(steps=5)),
        ("an action", 15, every(steps=5) | last()),
        ("an action", 20, 1),
        ("the hook", 20, 1),
    ],
)
def test_restarting_a_stopped_run_keeps_all_rows(by, at, save, tmp_path):
    def run():
        loop_class = StopsAtItsEnd if by == "the hook" else jaxloop.TrainLoop
        stops = stop_at(at if by == "an action" else None, every(steps=5), runs_last=True)
        outer_loop = experiment(stops, directory=tmp_path, saves=save, loop_class=loop_class, evals=[[]])
        state, _ = outer_loop(STATE, DATA, 100, 10, AT_THE_END)
        return int(state.step), rows(outer_loop)

    first = run()
    assert first[0] == at and [step for step, logs in first[1] if "eval" in logs] == [at]
    assert run() == first


class Wrapping(jaxloop.TrainLoop):
    def begin(self, state, dataset):
        state, iterator = super().begin(state, dataset)
        return state, map(lambda batch: batch, iterator)


def test_a_stopped_run_keeps_its_position_in_wrapped_data(tmp_path):
    stops = stop_at(15, every(steps=5))
    outer_loop = experiment(stops, directory=tmp_path, saves=last(), loop_class=Wrapping, evals=[[]])
    outer_loop(STATE, DATA, 100, 10, AT_THE_END)
    assert checkpoint.Checkpoint.at(tmp_path, 15).run()["parts"]["data"]["positions"][0]["data"]["count"] == 15


def test_a_stop_output_of_false_does_not_end_the_run():
    step, action = step_that_reports(lambda outputs, batch: {jaxloop.STOP_LOOP: False}), Record(every(steps=5))
    state, _ = experiment(action, step=step)(STATE, BATCHES, 20, 10)
    assert int(state.step) == 20 and action.seen == [5, 10, 15, 20]


class WithoutSuper(jaxloop.TrainLoop):
    def end(self, state, outputs):
        return state, outputs


def test_an_end_without_super_loses_no_action():
    action = Record()
    jaxloop.OuterLoop(WithoutSuper(STEP, end_actions=[action]))(STATE, BATCHES, 20, 10)
    assert action.seen == [10, 20]


@pytest.mark.parametrize("at", [5, 10], ids=["inside a loop", "at its end"])
def test_a_stop_ends_the_run_whatever_end_returns(at):
    returns_another_dict = loop_that_returns(lambda loop, outputs: {"loss": outputs["loss"]})
    outer_loop = experiment(stop_at(at, every(steps=5)), loop_class=returns_another_dict)
    state, _ = outer_loop(STATE, BATCHES, 40, 10)
    assert int(state.step) == at


def test_a_failed_evaluation_leaves_no_outputs_to_the_next_one():
    def data():
        yield from BATCHES[:2]
        if fails:
            raise Broken
        yield from BATCHES[2:4]

    fails, spec = True, jaxloop.EvalSpec(data)
    outer_loop, other = (jaxloop.OuterLoop(None, [jaxloop.EvalLoop(EVAL_STEP, stat_names=[])]) for _ in range(2))
    with pytest.raises(Broken):
        outer_loop(STATE, eval_specs=[spec])
    fails = False
    outputs = [each(STATE, eval_specs=[spec])[1] for each in (outer_loop, other)]
    assert [len(each["loss"]) for each in outputs] == [4, 4]
    assert outer_loop.history.collect("eval.loss") == other.history.collect("eval.loss")


# Guarantees at the ends of loops and at resumes -----------------------------------------------------------------


def test_actions_prevented_by_an_exception_receive_what_end_returned_after_a_resume(tmp_path):
    counted = loop_that_returns(lambda loop, outputs: {**outputs, "ended": loop.step_num})
    note = lambda step_num, outputs, **_: (step_num, outputs["ended"], len(outputs["loss"]))
    each, second = Record(1, note), Record(2, note)
    fails = Fail(2, Broken(), uses_outputs=True)
    run_until(fails, tmp_path, each, second, length=(12, 4), loop_class=counted, log_interval=1)
    assert (each.seen, second.seen) == ([(4, 4, 4), (8, 8, 4), (12, 12, 4)], [(8, 8, 8)])


@pytest.mark.parametrize(("fails_at", "options"), [(None, {}), (5, {}), (14, {"steps_per_dispatch": 4})])
def test_ends_of_loops_at_which_nothing_is_due_count(fails_at, options, tmp_path):
    intervals, calls = [every(loops=3), at(loops=2), 4, every(loops=5) | last()], []
    for number in [fails_at, None] if fails_at else [None]:
        actions = [Seen(interval) for interval in intervals]
        save = jaxloop.CheckpointAction(tmp_path, never())
        train_loop = jaxloop.TrainLoop(STEP, end_actions=[*actions, save], stat_names=[], **options)
        outer_loop = jaxloop.OuterLoop(train_loop, None, jaxloop.CheckpointSpec(tmp_path), log_interval=never())
        with pytest.raises(Broken) if number else contextlib.nullcontext():
            outer_loop(STATE, batches("the data raise", number), 24, 2)
        if number:
            assert train_loop.loop_count == train_loop.elapsed.loops == number // 2
        calls.append([[(step, loops, len(losses)) for step, loops, _, losses, _ in each.calls] for each in actions])
    assert [list(itertools.chain(*each)) for each in zip(*calls, strict=True)] == [
        [(6, 3, 6), (12, 6, 6), (18, 9, 6), (24, 12, 6)],
        [(4, 2, 4)],
        [(8, 4, 8), (16, 8, 8), (24, 12, 8)],
        [(10, 5, 10), (20, 10, 10), (24, 12, 4)],
    ]
    assert train_loop.loop_count == train_loop.elapsed.loops == 12


@pytest.mark.parametrize("loop_class", [jaxloop.TrainLoop, OneByOne])
def test_the_progress_before_the_last_step_counts_the_loops_until_then(loop_class):
    what = lambda elapsed, **_: (elapsed.steps, elapsed.loops, elapsed.previous.steps, elapsed.previous.loops)
    progress = Record(every(steps=5), what)
    experiment(progress, loop_class=loop_class, log_interval=never())(STATE, DATA, 20, 2)
    assert progress.seen == [(5, 2, 4, 2), (10, 5, 9, 4), (15, 7, 14, 7), (20, 10, 19, 9)]


def test_what_is_due_at_one_step_is_called_in_order(tmp_path):
    seen = []

    def note(name):
        logs = [row.logs for row in outer_loop.history]
        seen.append((name, sum("train" in each for each in logs), sum("eval" in each for each in logs)))

    class Save(jaxloop.CheckpointAction):
        def __call__(self, *args, **kwargs):
            note("save")
            super().__call__(*args, **kwargs)

    each = every(steps=1)
    noted = lambda name: lambda **_: note(name)
    actions = [Save(tmp_path, each), Do(noted("after"), each, runs_last=True), Do(noted("action"), each)]
    outer_loop = experiment(*actions, evals=[[Do(noted("evaluation"))]], log_interval=each)
    outer_loop(STATE, BATCHES, 8, eval_specs=[jaxloop.EvalSpec(BATCHES[:1], interval=each)])
    order = [("action", 1, 0), ("evaluation", 1, 1), ("after", 1, 1), ("save", 1, 1)]
    assert seen == [(name, trained + n, evaluated + n) for n in range(8) for name, trained, evaluated in order]
