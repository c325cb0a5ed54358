import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs.tiny import BATCHES, EVAL_STEP, STATE, STEP

import jaxloop
from jaxloop import examples
from jaxloop.actions import EarlyStoppingAction
from jaxloop.history import History
from jaxloop.schedules import Elapsed, always, every
from jaxloop.types import STOP_LOOP


def stops_at(action, values, *, every_steps=100, state=None, samples_per_step=10):
    """Calls the action with each accuracy in turn, and returns the step at which it stops, or None."""
    for index, value in enumerate(values):
        step = (index + 1) * every_steps
        outputs = {} if value is None else {"accuracy": value}
        elapsed = Elapsed(step, step * samples_per_step, step * 0.5, index + 1)
        history = History()
        history.commit(elapsed, {"train": {"loss": 1.0}})
        action(state, outputs, step_num=step, elapsed=elapsed, history=history)
        if outputs.get(STOP_LOOP):
            return step
    return None


@pytest.mark.parametrize(
    ("options", "values", "stop"),
    [
        ({"patience": 1}, [0.5, 0.5], 200),
        ({"patience": 2}, [0.5, 0.4, 0.6, 0.6, 0.6], 500),
        ({"patience": 2}, [0.5, 0.4, 0.6, 0.6, 0.7], None),
        ({"patience": 2}, [0.5, None, None, None, 0.4, 0.4], 600),
        ({"patience": 2, "min_delta": 0.1}, [0.5, 0.55, 0.58], 300),
        ({"patience": 2, "mode": "min"}, [0.5, 0.6, 0.7], 300),
    ],
    ids=repr,
)
def test_stops_when_patience_runs_out(options, values, stop):
    action = EarlyStoppingAction("accuracy", **options)
    assert stops_at(action, values) == stop
    assert action.stopped is (stop is not None)


def test_best_value_is_available():
    action = EarlyStoppingAction("accuracy", patience=5)
    assert action.best is None and action.best_elapsed is None
    stops_at(action, [0.5, 0.8, 0.7, 0.8])
    assert action.best == 0.8 and action.best_elapsed == Elapsed(200, 2000, 100.0, 2)


@pytest.mark.parametrize(
    ("options", "values", "sentence"),
    [
        ({"patience": 2}, [0.981, 0.9, 0.95], "accuracy has not improved on 0.981 (step 100) for 2 evaluations."),
        ({"patience": 1}, [0.981, 0.9], "accuracy has not improved on 0.981 (step 100) for 1 evaluation."),
        (
            {"patience": 2, "min_delta": 0.01},
            [0.5, 0.505, 0.505],
            "accuracy has not improved on 0.5 (step 100) by more than 0.01 for 2 evaluations.",
        ),
        ({"patience": 9}, [0.5, math.nan], "accuracy is nan."),
        ({"patience": 9}, [0.5, -math.inf], "accuracy is -inf."),
    ],
)
def test_reason_for_stopping_is_logged(options, values, sentence, logs):
    action = EarlyStoppingAction("accuracy", **options)
    stop = stops_at(action, values)
    assert stop == 100 * len(values) and action.is_out_of_patience
    assert logs.messages == [f"Stopped at step {stop}: {sentence}"]


def states():
    """Yields the states of steps 100, 200, ..., and deletes the previous one, as a train step does."""
    state = STATE.replace(collections={"rngs": jax.random.key(3), "name": "static"})
    for step in range(100, 1000, 100):
        taken, state = state, jax.tree.map(lambda leaf: jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf, state)
        state = state.replace(step=jnp.int32(step), params=jax.tree.map(lambda p: p + 1, state.params))
        jax.tree.map(lambda leaf: leaf.delete() if isinstance(leaf, jax.Array) else None, taken)
        yield step, state


def run_over_states(action, values):
    kernels = {}
    for (step, state), value in zip(states(), values, strict=False):
        kernels[step] = np.array(state.params["kernel"])
        outputs = {"accuracy": value}
        action(state, outputs, step_num=step, elapsed=Elapsed(step))
        if outputs.get(STOP_LOOP):
            break
    return kernels, state


@pytest.mark.parametrize("values", [[0.5, 0.8, 0.7, 0.6], [0.5, 0.8, 0.7], [0.5, 0.8, math.nan]], ids=repr)
def test_restore_best_returns_the_best_state_however_the_run_ends(values):
    action = EarlyStoppingAction("accuracy", patience=2, restore_best=True)
    kernels, state = run_over_states(action, values)
    best = action.finish(state)
    assert int(best.step) == 200
    np.testing.assert_array_equal(best.params["kernel"], kernels[200])
    assert best.collections["rngs"] == jax.random.key(3) and best.collections["name"] == "static"


def test_without_restore_best_the_newest_state_is_returned():
    action = EarlyStoppingAction("accuracy", patience=2)
    _, state = run_over_states(action, [0.5, 0.8, 0.7])
    assert action.finish(state) is state


def test_copy_of_the_best_state_keeps_its_sharding(data_parallel):
    _, state, _ = examples.tiny_regression(partitioner=data_parallel(8))
    action = EarlyStoppingAction("accuracy", patience=2, restore_best=True)
    action(state, {"accuracy": 0.5}, step_num=1)
    best = action.finish(state)
    assert best.params["kernel"] is not state.params["kernel"]
    assert best.params["kernel"].sharding == state.params["kernel"].sharding


def test_resume_restores_the_patience():
    values = [0.5, 0.8, 0.7, 0.6, 0.5]
    whole = EarlyStoppingAction("accuracy", patience=3)
    assert stops_at(whole, values) == 500
    for killed_after in range(5):
        killed, resumed = (EarlyStoppingAction("accuracy", patience=3) for _ in range(2))
        stops_at(killed, values[:killed_after])
        resumed.load_state_dict(json.loads(json.dumps(killed.state_dict())))
        for index, value in enumerate(values[killed_after:], killed_after):
            outputs, step = {"accuracy": value}, (index + 1) * 100
            resumed(None, outputs, step_num=step, elapsed=Elapsed(step, step * 10, step * 0.5, index + 1))
            assert outputs.get(STOP_LOOP, False) is (step == 500)
        assert resumed.state_dict() == whole.state_dict()


def test_state_dict_of_a_different_action_raises():
    message = r"expects \['best', .* in its state_dict, got \['traces'\]\. Was it saved by a different action\?"
    with pytest.raises(ValueError, match=message):
        EarlyStoppingAction("loss", patience=3).load_state_dict({"traces": 1})


def test_next_run_starts_over():
    action = EarlyStoppingAction("accuracy", patience=2)
    assert stops_at(action, [0.9, 0.8, 0.8]) == 300
    action.finish(None)
    assert action.stopped and action.best == 0.9  # Still available after the run.
    action.begin_run(300, can_resume=False)
    assert stops_at(action, [0.5, 0.4, 0.4]) == 300 and action.best == 0.5
    action.begin_run(300, can_resume=False)
    assert action.best == 0.5  # The previous run was interrupted.
    action.begin_run(200, can_resume=False)
    assert stops_at(action, [0.3, 0.2]) is None and action.best == 0.3


def test_metric_that_was_never_measured_warns(warnings_logged):
    action, history = EarlyStoppingAction("test/accuracy", patience=2, interval=always()), History()
    for step in (100, 200):
        action(None, {"loss": 1.0}, step_num=step, elapsed=Elapsed(step), history=history)
        history.commit(Elapsed(step + 50), {"test": {"accuracy": 0.5}})
    action.finish(None)
    assert "test/accuracy was not measured at any of its calls. Make its interval coincide" in warnings_logged()[0]


def test_begin_action_cannot_stop():
    with pytest.raises(TypeError, match="can't stop a loop as one of its begin_actions. Add it to the end_actions"):
        EarlyStoppingAction("accuracy", patience=1)(None, None, step_num=2)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"patience": 0}, ValueError, "patience must be a positive int, got 0"),
        ({"patience": 1.5}, TypeError, "patience must be a positive int, got 1.5"),
        ({"patience": 1, "mode": "best"}, ValueError, "must be 'auto', 'min' or 'max', got 'best'"),
        ({"patience": 1, "min_delta": -1}, ValueError, "min_delta must be finite and not negative, got -1"),
        ({"patience": 1, "min_delta": "0"}, ValueError, "min_delta must be finite and not negative, got '0'"),
        ({"patience": 1, "interval": 0}, ValueError, "interval must be a positive int, or a schedule"),
    ],
)
def test_invalid_options_raise(options, error, message):
    with pytest.raises(error, match=message):
        EarlyStoppingAction("loss", **options)


def test_repr_shows_metric_and_patience():
    assert (
        repr(EarlyStoppingAction("loss", patience=3))
        == "EarlyStoppingAction('loss', patience=3, mode='min', interval=1)"
    )
    action = EarlyStoppingAction("loss", 10, interval=every(5))
    assert repr(action) == "EarlyStoppingAction('loss', patience=10, mode='min', interval=every(steps=5))"


def test_check_reports_an_interval_with_too_few_measurements_to_stop():
    def run(**options):
        evaluated = jaxloop.EvalLoop(EVAL_STEP)
        stopping = jaxloop.EarlyStoppingAction("test/loss", patience=3, min_delta=1e9, **options)
        outer_loop = jaxloop.OuterLoop(jaxloop.TrainLoop(STEP, end_actions=[stopping]), [evaluated])
        spec = jaxloop.EvalSpec(BATCHES[:2], interval=every(steps=4), name="test")
        options = {"eval_specs": [spec], "train_total_steps": 40, "train_loop_steps": 20}
        report = outer_loop.check(STEP.abstract_state([1, 3]), BATCHES, **options)
        state, _ = outer_loop(STATE, BATCHES, **options)
        return str(report), int(state.step)

    report, steps = run()
    assert "called 2 times, at steps 20, 40, and patience=3 needs at least 4 measurements" in " ".join(report.split())
    assert "EarlyStoppingAction  2 times, at steps 20, 40; monitors test/loss (smaller is better)" in report
    assert steps == 40
    report, steps = run(interval=every(steps=4))
    assert report.startswith("No problem") and steps == 16
