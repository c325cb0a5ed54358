import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state
from programs.models import NNXNoisy, Noisy

import jaxloop
from jaxloop import functional as jf
from jaxloop.models.function_step import FunctionStep

pytestmark = pytest.mark.usefixtures("compile_fast")

RNG = np.random.default_rng(0)
BATCH = {"x": RNG.normal(size=(8, 3)).astype(np.float32), "y": RNG.normal(size=(8, 1)).astype(np.float32)}


MODEL = Noisy(rate=0)


@functools.cache
def first_variables():
    return MODEL.init(jax.random.key(0), BATCH["x"])


def new_state(cls=jaxloop.TrainState):
    return cls.create(apply_fn=MODEL.apply, tx=optax.sgd(0.1), **jax.tree.map(jnp.copy, first_variables()))


def regression(state, batch):
    """Learns."""
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    predicted, updates = state.apply_fn(variables, batch["x"], train=True, mutable=["batch_stats"])
    logs = jf.logs().add_loss("loss", jnp.mean((predicted - batch["y"]) ** 2)).merge({"updates": updates})
    return logs.add_metric("mean", jnp.mean(predicted))


def values_of(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


# FunctionStep ----------------------------------------------------------------------------------------


def test_function_step_runs_in_any_loop_with_any_state():
    def add(state, batch):
        return {"sum": state["sum"] + batch["x"].sum(), "n": state["n"] + 1}, {"n": state["n"]}

    step = FunctionStep(add, train=True)
    start = {"sum": jnp.float32(0), "n": 0}
    state, outputs = jaxloop.TrainLoop(step)(start, [BATCH] * 5)
    assert (int(state["n"]), [int(n) for n in outputs["n"]]) == (5, [0, 1, 2, 3, 4])
    assert repr(step) == "FunctionStep(add, train=True)" and step.compute_num_params(state) == 2
    same, outputs = jaxloop.EvalLoop(step)(state, [BATCH] * 2)
    assert same is state and [int(n) for n in outputs["n"]] == [5, 5]


def test_function_step_has_no_model():
    step = FunctionStep(lambda state, batch: (state, None), train=True)
    with pytest.raises(TypeError, match="has no model to initialize. Make the state yourself"):
        step.initialize_model([1, 3])
    with pytest.raises(TypeError, match="takes a function"):
        FunctionStep(BATCH)  # type: ignore
    assert step.compute_num_params(new_state()) == values_of(new_state().params).size


def sum_of_inputs(state, batch):
    return {"sum": jnp.sum(batch["x"])}


# Compiled pure functions -----------------------------------------------------------------------------


def test_results_do_not_depend_on_the_number_of_devices(data_parallel):
    def evaluation(state, batch):
        variables = {"params": state.params, "batch_stats": state.batch_stats}
        return {"error": jnp.mean(jnp.abs(state.apply_fn(variables, batch["x"]) - batch["y"]))}

    def run(partitioner):
        train, test = jf.train_step(regression, partitioner), jf.step(evaluation, partitioner)
        inner = jf.inner_loop("test", lambda state: jf.loop(state, [BATCH] * 2, {jf.every(1): test}))
        tasks = {jf.every(1): train, jf.every(5): inner}
        state, history, _ = jf.loop(new_state(), [BATCH] * 10, tasks)
        return values_of((state.params, state.batch_stats)), history.collect("losses.loss"), history.collect("error")

    expected = run(None)
    assert expected[1][-1] < expected[1][0]
    for devices in (1, 8):
        for value, other in zip(run(data_parallel(devices)), expected, strict=True):
            np.testing.assert_allclose(value, other, atol=1e-6)


def test_step_keeps_its_name_and_can_be_called_directly():
    step = jf.train_step(regression)
    assert (step.__name__, step.__doc__, repr(step)) == ("regression", "Learns.", "train_step(regression)")
    assert repr(jf.step(regression)) == "step(regression)"
    logs, state = step(new_state(), BATCH)
    assert int(state.step) == 1 and set(logs) == {"losses", "metrics"} and logs.loss.shape == ()


@pytest.mark.parametrize("make", [jf.step, jf.train_step])
def test_step_and_train_step_are_decorators_with_options(make, data_parallel):
    @make(partitioner=data_parallel(2))
    def logging(state, batch):
        return regression(state, batch)

    _, state = logging(new_state(), BATCH)
    devices = jax.devices()[: 2 if make is jf.train_step else 1]
    assert state.params["Dense_0"]["kernel"].sharding.device_set == set(devices)


def test_step_returns_what_its_function_returns():
    state = {"w": jnp.ones(3)}
    step = jf.step(lambda state, batch: ({"x": batch["x"]}, {"sum": batch["x"].sum()}, {"w": state["w"] + 1}))
    outputs, logs, new = step(state, BATCH)
    assert outputs["x"].shape == (8, 3) and float(new["w"][0]) == 2 and list(logs) == ["sum"]
    assert float(state["w"][0]) == 1  # Not donated.
    assert jf.step(lambda state, batch: None)(state, BATCH)[1] is state


def test_train_step_sums_its_losses():
    def loss(params, scale):
        return scale * jnp.sum(params["w"] ** 2)

    def fn(state, batch):
        return jf.logs().add_loss("one", loss(state.params, 1.0)).add_loss("two", loss(state.params, 2.0))

    params = {"w": jnp.array([1.0, 2.0])}
    state = jaxloop.TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1))
    logs, state = jf.train_step(fn)(state, BATCH)
    np.testing.assert_allclose(state.params["w"], [1 - 0.6, 2 - 1.2], rtol=1e-6)
    assert (float(logs.one), float(logs.two)) == (5.0, 10.0)


class FlaxState(train_state.TrainState):
    batch_stats: dict


def test_updates_are_written_to_the_state():
    given, by_flax = (jf.train_step(regression)(new_state(cls), BATCH)[1] for cls in (jaxloop.TrainState, FlaxState))
    assert np.any(values_of(given.batch_stats) != values_of(new_state().batch_stats))
    np.testing.assert_array_equal(values_of(by_flax.batch_stats), values_of(given.batch_stats))


@pytest.mark.parametrize("how", ["updates", "state"])
def test_nnx_model_trains(how):
    def fn(state, batch):
        model = state.apply_fn(state.params, state.batch_stats, state.collections, train=True)
        predicted, (_, updates) = model(batch["x"])
        logs = jf.logs().add_loss("loss", jnp.mean((predicted - batch["y"]) ** 2))
        return logs.add("updates", "model", updates) if how == "updates" else (logs, state.update_variables(updates))

    model = NNXNoisy(rate=0, rngs=nnx.Rngs(0))
    state = jaxloop.Step(jax.random.key(0), model, optax.sgd(0.1)).initialize_model(None)
    before = values_of(state.batch_stats)
    state, history, _ = jf.loop(state, [BATCH] * 10, {jf.every(1): jf.train_step(fn)})
    losses = history.collect("loss")
    assert history.paths() == ["losses.loss"]  # Without the updates.
    assert int(state.step) == 10 and losses[-1] < losses[0] and np.any(values_of(state.batch_stats) != before)


# Donated states --------------------------------------------------------------------------------------


def test_donated_state_raises(data_parallel):
    train, test = jf.train_step(regression, data_parallel(8)), jf.step(sum_of_inputs, data_parallel(8))
    before = new_state()
    _, state = train(before, BATCH)
    test(state, BATCH)
    for step in (train, test):
        with pytest.raises(ValueError, match=r"got a state that was already donated to train_step\(regression\)"):
            step(before.replace(tx=before.tx), BATCH)
    train(state, BATCH)


def test_step_donates_the_state_on_request():
    add = lambda state, batch: (None, {"w": state["w"] + 1})
    kept, given = {"w": jnp.ones(3)}, {"w": jnp.ones(3)}
    jf.step(add)(kept, BATCH)
    _, state = jf.step(add, donate=True)(given, BATCH)
    assert not kept["w"].is_deleted() and given["w"].is_deleted() and float(state["w"][0]) == 2
    with pytest.raises(ValueError, match="was already donated to .*: its buffers .w. were reused"):
        jf.step(add)(given, BATCH)


# Mistakes --------------------------------------------------------------------------------------------


def with_extra_leaf(state, batch):
    return None, {**state, "more": 1}


NOT_A_SCALAR = r"the loss 'mse', float32\[8, 3\], which is not a scalar. Take its mean"


@pytest.mark.parametrize(
    ("make", "make_state", "error", "message"),
    [
        (lambda: jf.train_step(lambda s, b: jf.logs().add_metric("m", 1.0)), new_state, ValueError, "logged no loss"),
        (lambda: jf.train_step(lambda s, b: jf.logs().add_loss("mse", b["x"])), new_state, ValueError, NOT_A_SCALAR),
        (lambda: jf.train_step(regression), dict, TypeError, "needs a TrainState, .* got dict"),
        (lambda: jf.step(with_extra_leaf), dict, TypeError, r"more: \(none\) -> int"),
        (lambda: jf.step(lambda state: None), dict, TypeError, r"must take \(state, batch\), got \(state\)"),
        (lambda: jf.step(lambda s, b, w: None), dict, TypeError, r"got \(s, b, w\). Bind constants with functools"),
        (lambda: jf.step(regression, "cpu"), dict, TypeError, "must be a jaxloop Partitioner, got 'cpu'"),
    ],
)
def test_errors_say_what_to_do(make, make_state, error, message):
    with pytest.raises(error, match=message):
        make()(make_state(), BATCH)


def test_indivisible_batch_raises_in_training_but_not_in_evaluation(data_parallel):
    short = {name: value[:6] for name, value in BATCH.items()}
    with pytest.raises(ValueError, match=r"batch\['x'\] has 6 rows, which can't be divided evenly among the 4 devices"):
        jf.loop(new_state(), [short], {jf.every(1): jf.train_step(regression, data_parallel(4))})
    logs, _ = jf.step(sum_of_inputs, data_parallel(4))({}, short)
    assert float(logs["sum"]) == pytest.approx(float(short["x"].sum()), rel=1e-5)


# Dataclasses that have equal tree structures in JAX ------------------------------------------------------


def point_class(cls_number):
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Point:
        x: jax.Array

        number = cls_number

    return Point


@pytest.mark.parametrize("donate", [False, True])
def test_step_distinguishes_classes_with_equal_tree_structures(donate):
    first, *others = classes = [point_class(number) for number in range(4)]

    @jf.step(donate=donate)
    def step(state, batch):
        numbers = {"state": jnp.int32(state.number), "batch": jnp.int32(batch.number)}
        return {"metrics": numbers}, dataclasses.replace(state, x=state.x + batch.x)

    for state_class, batch_class in [*((first, each) for each in classes), *((each, first) for each in others)]:
        logs, state = step(state_class(np.float32(0)), batch_class(np.float32(1)))
        assert type(state) is state_class
        assert logs["metrics"] == {"state": state_class.number, "batch": batch_class.number}


def test_step_that_returns_a_state_of_a_different_class_raises():
    one, other = point_class(1), point_class(2)
    step = jf.step(lambda state, batch: (None, other(state.x)), donate=True)
    with pytest.raises(TypeError, match="Point was given, Point was returned"):
        step(one(np.float32(0)), {"x": np.ones(1, np.float32)})
