import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs.tiny import STATE

from jaxloop import examples
from jaxloop.actions import EarlyStoppingAction
from jaxloop.history import History
from jaxloop.schedules import Elapsed, always
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


NOT_BY_MORE = "accuracy has not improved on 0.5 (step 100) by more than 0.01 for 2 evaluations."


@pytest.mark.parametrize(
    ("options", "values", "sentence"),
    [
        ({"patience": 2}, [0.981, 0.9, 0.95], "accuracy has not improved on 0.981 (step 100) for 2 evaluations."),
        ({"patience": 2, "min_delta": 0.01}, [0.5, 0.505, 0.505], NOT_BY_MORE),
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


@pytest.mark.parametrize("values", [[0.5, 0.8, 0.7, 0.6], [0.5, 0.8, math.nan]], ids=repr)
def test_restore_best_returns_the_best_state_however_the_run_ends(values):
    action, kernels = EarlyStoppingAction("accuracy", patience=2, restore_best=True), {}
    for (step, state), value in zip(states(), values, strict=False):
        kernels[step] = np.array(state.params["kernel"])
        action(state, {"accuracy": value}, step_num=step, elapsed=Elapsed(step))
    best = action.finish(state)
    assert int(best.step) == 200
    np.testing.assert_array_equal(best.params["kernel"], kernels[200])
    assert best.collections["rngs"] == jax.random.key(3) and best.collections["name"] == "static"


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


def test_metric_that_was_never_measured_warns(warnings_logged):
    action, history = EarlyStoppingAction("test/accuracy", patience=2, interval=always()), History()
    for step in (100, 200):
        action(None, {"loss": 1.0}, step_num=step, elapsed=Elapsed(step), history=history)
        history.commit(Elapsed(step + 50), {"test": {"accuracy": 0.5}})
    action.finish(None)
    assert "test/accuracy was not measured at any of its calls. Make its interval coincide" in warnings_logged()[0]
