import collections
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from programs import models, tiny
from programs.acts import Record
from programs.fakes import Tensor
from programs.tiny import BATCHES, STATE, STEP, Regression

import jaxloop
from jaxloop import examples
from jaxloop.step import Step
from jaxloop.train_loop import TrainLoop

pytestmark = pytest.mark.usefixtures("compile_fast")

KEY = jax.random.key(0)


class Dropout(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool = True):
        return nn.Dropout(0.5, deterministic=not train)(x)


class NNXNet(nnx.Module):
    """An NNX model with batch statistics, dropout keys and a custom variable."""

    def __init__(self, width, *, rate=0.5, rngs):
        self.dense = nnx.Linear(3, width, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls[...] += 1
        return self.dropout(self.norm(self.dense(x)))


class Updating(Step):
    keeps, copies = True, False

    def forward(self, state, params, x):
        return self.call_model(state, params, x)

    def run(self, state, batch):
        def loss_fn(params):
            outputs, updates = self.forward(state, params, batch["x"])
            return jnp.mean(outputs**2), updates

        (loss, updates), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        if self.train:
            state = state.apply_gradients(grads=grads)
        if self.copies:
            variables = jax.tree.map(jnp.copy, (state.batch_stats, state.collections))
            state = state.replace(batch_stats=variables[0], collections=variables[1])
        return state.update_variables(updates) if self.keeps else state, {"loss": loss}


def make_step(run, **options):
    return type("MadeStep", (Step,), {"run": run})(KEY, nn.Dense(1), optax.sgd(0.1), **options)


def advance(self, state, batch):
    return state.replace(step=state.step + 1), {"mean": batch["x"].mean()}


BATCH = {"x": np.ones([8, 3], np.float32), "y": np.ones([8, 1], np.float32)}


def test_hooks_run_in_order():
    calls = []
    step = make_step(lambda self, state, batch: calls.append("trace") or advance(self, state, batch))
    for name in ("preprocess_batch", "begin", "end"):
        own = getattr(step, name)
        setattr(step, name, lambda *args, own=own, name=name: calls.append(name) or own(*args))
    state = step.initialize_model([1, 3])
    for _ in range(2):
        state, _ = step(state, BATCH)
    assert calls == ["preprocess_batch", "begin", "trace", "end", "preprocess_batch", "begin", "end"]


@pytest.mark.parametrize("key", [jax.random.key(1), jax.random.PRNGKey(1)], ids=["typed", "old-style"])
def test_prng_key_depends_only_on_the_step(key):
    step = Step(key, nn.Dense(1))
    same = lambda a, b: np.array_equal(jax.random.normal(a), jax.random.normal(b))
    assert same(step.prng_key(3), step.prng_key(jnp.int32(3)))
    assert not same(step.prng_key(3), step.prng_key(4))
    several = Step({"params": key, "dropout": jax.random.fold_in(key, 1)}, nn.Dense(1)).prng_key(3)
    assert set(several) == {"params", "dropout"} and not same(several["params"], several["dropout"])


Pair = collections.namedtuple("Pair", ["left", "right"])


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ([1, 3], "float32[1, 3]"),
        ((1, 3), "float32[1, 3]"),
        (([1, 3], jnp.int32), "int32[1, 3]"),
        (((1, 3), "bfloat16"), "bfloat16[1, 3]"),
        ([], "float32[]"),
        ({"a": [2], "b": ([3], np.int8)}, {"a": "float32[2]", "b": "int8[3]"}),
        ([[2], [3]], ["float32[2]", "float32[3]"]),
        (Pair([2], ([3], jnp.bool_)), Pair("float32[2]", "bool[3]")),
        (jax.ShapeDtypeStruct((2,), jnp.int32), "int32[2]"),
        ([[2], jax.ShapeDtypeStruct((2,), jnp.int32)], ["float32[2]", "int32[2]"]),
        ([[2], np.ones([2, 3], np.int8)], ["float32[2]", "int8[2, 3]"]),
        ({"x": [2], "key": KEY}, {"x": "float32[2]", "key": "key<fry>[]"}),
    ],
)
def test_a_spec_is_a_shape_a_pair_or_a_pytree(spec, expected):
    class Shows(nn.Module):
        @nn.compact
        def __call__(self, inputs):
            shown = jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", inputs)
            assert shown == expected
            self.param("w", nn.initializers.ones, [2])

    Step(KEY, Shows()).initialize_model(spec)


class Noisy(nn.Module):
    """A model with three inputs, one of them optional, and a flag."""

    @nn.compact
    def __call__(self, x, key, scale=None, *, train):
        noise = jax.random.normal(key, x.shape)
        return nn.Dense(2)(x + noise * (1.0 if scale is None else scale))


@pytest.mark.parametrize(
    ("spec", "init_kwargs"),
    [
        ([[1, 3], KEY], {}),
        (([1, 3], KEY, [1, 3]), {}),
        ({"key": KEY, "x": [1, 3]}, {}),
        ({"x": [1, 3], "key": KEY, "scale": np.ones([1, 3], np.float32)}, {}),
        ([1, 3], {"key": KEY}),
    ],
)
def test_inputs_can_be_given_by_position_or_by_name(spec, init_kwargs, assert_same):
    params = Step(KEY, Noisy()).initialize_model(spec, **init_kwargs).params
    assert_same(params, Noisy().init(KEY, jnp.ones([1, 3]), KEY, train=False)["params"])


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ([1, 3], r"The model takes x, key, scale, and its inputs are float32\[1, 3\]"),
        ([[1, 3]] * 4, r"takes x, key, scale, and its inputs are list of 4\. Give a list .* in this order, or a dict"),
        ({"x": [1, 3], "rng": KEY}, "takes x, key, scale, and its inputs are dict of 2"),
        ({"x": "image"}, r"A spec must be a shape.*got 'image' in it"),
    ],
)
def test_inputs_that_do_not_match_the_model_raise(spec, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Step(KEY, Noisy()).initialize_model(spec)


def test_an_nnx_instance_trains_like_its_class_and_is_not_modified(assert_same, data_parallel):
    model = NNXNet(4, rngs=nnx.Rngs(KEY), rate=0.1)
    before = jax.tree.map(np.copy, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    batch = {"x": np.arange(24, dtype=np.float32).reshape(8, 3)}
    states = []
    for options in ({"model": NNXNet, "nnx_model_args": (4,), "rate": 0.1}, {"model": model}):
        for partitioner in (jaxloop.SingleDevicePartitioner(), data_parallel(2)):
            step = Updating(KEY, optimizer=optax.sgd(0.1), train=True, partitioner=partitioner, **options)
            state = step.initialize_model(None)
            assert step.model is options["model"]
            assert jax.tree.map(jnp.shape, step.abstract_state(None).params) == jax.tree.map(jnp.shape, state.params)
            for _ in range(2):
                state, _ = step(state, batch)
            states.append(jax.tree.map(np.asarray, (state.params, state.batch_stats)))
    for one, other in zip(states[:2], states[2:], strict=True):
        assert_same(one, other)
    assert_same(nnx.to_pure_dict(nnx.state(model, nnx.Param)), before)
    assert_same(step.initialize_model(None).params, before)  # A second run starts from the same parameters.


@pytest.mark.parametrize("model", [Dropout(), nnx.Dropout(0.5, rngs=nnx.Rngs(0))], ids=["Linen", "NNX"])
def test_call_model_uses_the_mode_of_the_step(model):
    class Calling(Step):
        def run(self, state, batch):
            keys = self.prng_key(state.step)
            own, _ = self.call_model(state, state.params, batch, keys=keys)
            modes = [self.call_model(state, state.params, batch, train=train, keys=keys)[0] for train in (True, False)]
            return state, {"own": own, "train": modes[0], "eval": modes[1]}

    for train in (True, False):
        step = Calling(KEY, model, optax.sgd(0.1), train=train)
        state = step.initialize_model([2, 3])
        outputs = jax.tree.map(np.asarray, step.evaluate(state, np.ones([2, 3], np.float32)))
        np.testing.assert_array_equal(outputs["own"], outputs["train" if train else "eval"])
        assert not np.array_equal(outputs["train"], outputs["eval"])


class Rematerializing(Updating):
    def forward(self, state, params, x):
        return jax.checkpoint(lambda params, x: self.call_model(state, params, x))(params, x)


@pytest.mark.parametrize(
    ("step_class", "model", "names"),
    [
        (Updating, models.Noisy(rate=0), "batch_stats/BatchNorm_0/mean, batch_stats/BatchNorm_0/var"),
        (Rematerializing, models.Noisy(rate=0), "batch_stats/BatchNorm_0/mean, batch_stats/BatchNorm_0/var"),
        (Updating, NNXNet(4, rngs=nnx.Rngs(0)), "batch_stats/norm/mean.*, collections/dropout/rngs/count"),
    ],
)
def test_dropping_the_variables_that_a_forward_pass_changed_is_an_error(step_class, model, names):
    dropping = type("Dropping", (step_class,), {"keeps": False})(KEY, model, optax.sgd(0.1), train=True)
    state = dropping.initialize_model([1, 3])
    message = rf"(?s)Dropping.* returns variables unchanged.*{names}.*\.update_variables\(updates\)"
    report = jaxloop.OuterLoop(TrainLoop(dropping)).check(state, [BATCH])
    assert [bool(re.search(message, error.text)) for error in report.problems if error.is_error] == [True]
    with pytest.raises(ValueError, match=message):
        dropping(state, BATCH)
    for train in (True, False):  # An evaluation changes none.
        step = type("Keeping", (step_class,), {"keeps": train})(KEY, model, optax.sgd(0.1), train=train)
        step(step.initialize_model([1, 3]), BATCH)
    copying = type("Copying", (type(dropping),), {"copies": True})(KEY, model, optax.sgd(0.1), train=True)
    copying(copying.initialize_model([1, 3]), BATCH)


@pytest.mark.parametrize(
    ("model", "options", "error", "message"),
    [
        (NNXNet, {}, ValueError, "NNXNet is an NNX module class, so the Step needs nnx_model_args"),
        (nn.Dense(1), {"nnx_model_args": (3,)}, ValueError, "the model is a Dense"),
        (nn.Dense(1), {"optimiser": optax.sgd(0.1)}, TypeError, "'optimiser'. Did you mean 'optimizer'"),
        (nn.Dense, {}, TypeError, "got <class 'flax.linen.linear.Dense'>"),
        (NNXNet(4, rngs=nnx.Rngs(0)), {"nnx_model_args": (4,)}, ValueError, "is an instance of an NNX module"),
        (NNXNet(4, rngs=nnx.Rngs(0)), {"rate": 0.1}, TypeError, "unexpected keyword argument 'rate'"),
        (nn.Dense(1), {"partitioner": "mesh"}, TypeError, "partitioner must be a jaxloop Partitioner, got 'mesh'"),
    ],
)
def test_invalid_models_and_options_raise(model, options, error, message):
    with pytest.raises(error, match=message):
        Step(KEY, model, **options)


@pytest.mark.parametrize("key", [7, {"params": None}, "seed"])
def test_a_key_that_is_none_raises_with_advice(key):
    with pytest.raises(TypeError, match=r"base_prng must be a PRNG key.*Write jax.random.key\(seed\)"):
        Step(key, nn.Dense(1))


def test_training_without_an_optimizer_warns(warnings_logged):
    Step(KEY, nn.Dense(1))
    Step(KEY, nn.Dense(1), optax.sgd(0.1), train=True)
    assert warnings_logged() == []
    assert Step(KEY, nn.Dense(1), None, train=True).optimizer is Step(KEY, nn.Dense(1)).optimizer
    assert "Step has train=True and no optimizer" in warnings_logged()[0]


def test_applying_an_nnx_model_like_a_linen_module_raises():
    state = Updating(KEY, NNXNet, nnx_model_args=(4,)).initialize_model(None)
    with pytest.raises(TypeError, match="is for Linen models.*step.call_model"):
        _ = state.variables


def test_parameters_and_flops_are_counted(logs):
    step, state, batches = examples.tiny_regression()
    assert step.num_params == step.compute_num_params(state) == 4
    assert step.num_flops is None
    assert step.compute_num_flops(state, batches[0]) > 8 * 3
    state, _ = step(state, batches[0], log_num_flops=True)  # Counting did not donate the state.
    step.initialize_model([1, 3], log_num_params=True)
    assert "has 4 parameters" in logs.text


@pytest.mark.parametrize("devices", [1, 4])
def test_an_array_that_appears_twice_in_a_state_is_copied(devices, data_parallel):
    class WithTarget(Step):
        def run(self, state, batch):
            params = jax.tree.map(lambda leaf: leaf - 1, state.params)
            return state.replace(step=state.step + 1, params=params), {}

        def end(self, state, outputs):
            return (state.replace(collections=state.params) if int(state.step) == 2 else state), outputs

    step = WithTarget(KEY, nn.Dense(1), optax.sgd(0.1), data_parallel(devices), train=True)
    state = step.initialize_model([1, 3])
    # A target network starts as the network itself.
    state = state.replace(collections=state.params, batch_stats=jax.device_put(state.params, step.partitioner.sharding))
    bias, outer_loop = float(state.params["bias"][0]), jaxloop.OuterLoop(TrainLoop(step))
    assert outer_loop.check(state, [BATCH]).ok
    for steps, expected in [(1, bias), (2, bias - 2), (4, bias - 2)]:
        state, _ = outer_loop(state, [BATCH] * 4, steps)
        assert (float(state.params["bias"][0]), float(state.collections["bias"][0])) == (bias - steps, expected)


def test_state_step_can_be_any_integer_and_does_not_recompile():
    for count in (np.int64(7), np.uint8(7), np.array(7, np.int16), jnp.uint32(7)):
        assert int(STEP(STATE.replace(step=count), BATCHES[0])[0].step) == 8
    traces = []
    step = make_step(lambda self, state, batch: traces.append(1) or advance(self, state, batch))
    state = step.initialize_model([1, 3]).replace(step=55)
    state, _ = step(state, BATCH)
    state, _ = step(state, BATCH)
    assert (int(state.step), len(traces)) == (57, 1)


@pytest.mark.parametrize(
    ("count", "got"), [(True, "bool"), ("3", "str"), (np.float32(3), r"float32\[\]"), (jnp.array(True), r"bool\[\]")]
)
def test_a_non_integer_state_step_raises(count, got):
    state = STATE.replace(step=count)
    message = rf"state.step must be an integer scalar.*got {got}\. For none, write state.replace\(step=jnp.int32\(0\)\)"
    for use in (STEP, STEP.evaluate):
        with pytest.raises(TypeError, match=message):
            use(state, BATCHES[0])
    with pytest.raises(TypeError, match=message):
        TrainLoop(STEP)(state, BATCHES[:2])


def test_evaluate_does_not_donate_despite_donate_argnums(data_parallel):
    step, state, batches = examples.tiny_regression(partitioner=data_parallel(8))
    step.compile(donate_argnums=(0,))
    for _ in range(2):
        step.evaluate(state, batches[0])


@pytest.mark.parametrize("devices", [1, 8])
def test_a_donated_state_raises(devices, data_parallel):
    step, state, batches = examples.tiny_regression(partitioner=data_parallel(devices))
    first, _ = step(state, batches[0])
    message = r"(?s)already donated to _RegressionStep\(model=Dense, train=True\).*params/bias.*jax.tree.map\(jnp.copy"
    with pytest.raises(ValueError, match=message):
        step(state, batches[0])
    with pytest.raises(ValueError, match="was already donated"):
        step.evaluate(state.replace(params=state.params), batches[0])
    with pytest.raises(ValueError, match=r"its buffers \(params/bias, params/kernel\) were reused"):
        step(first.replace(params=state.params), batches[0])
    second, _ = step(first, batches[0])
    with pytest.raises(ValueError, match="was already donated"):
        step(first, batches[0])
    assert int(second.step) == 2


def test_should_shard_batch_false_leaves_batches_unchanged():
    step = make_step(advance, should_shard_batch=False)
    assert step.shard_batch(BATCH) is BATCH
    state, _ = step(step.initialize_model([1, 3]), jax.device_put(BATCH, jax.devices()[0]))
    assert int(state.step) == 1


def test_actions_of_a_step_count_the_steps_within_the_loop():
    what = lambda step_num, outputs, **_: (step_num, outputs is None)
    before, after = Record(1, what), Record(2, what)
    step = make_step(advance, begin_actions=[before], end_actions=[after])
    state = step.initialize_model([1, 3])
    for number in range(4):
        state, _ = step(state, BATCH, per_loop_step_number=number)
    assert before.seen == [(0, True), (1, True), (2, True), (3, True)]
    assert after.seen == [(2, False), (4, False)]


def changed(change):
    """Returns a function that makes a result of `run` with other parameters."""
    return lambda state: (state.replace(params=change(state.params)), {})


@pytest.mark.parametrize(
    ("hook", "result", "message"),
    [
        ("run", lambda state: state, r"MadeStep.run must return \(state, outputs\), a pair, got TrainState"),
        ("run", lambda state: [state, {}], "got list"),
        ("run", lambda state: (state, {}, {}), "a tuple of 3"),
        ("run", lambda state: (state, 1.0), "outputs as a dict with string keys or None, got float"),
        ("run", lambda state: (state, {1: 2.0}), "under the key 1; the keys of outputs must be strings"),
        ("run", changed(lambda p: {**p, "bias": p["bias"].astype("bfloat16")}), r"params/bias: float32.* -> bfloat16"),
        ("run", changed(lambda p: {**p, "bias": p["bias"][None]}), r"params/bias: float32\[1\] -> float32\[1, 1\]"),
        ("run", changed(lambda p: {**p, "scale": jnp.ones(2)}), r"params/scale: \(none\) -> float32\[2\]"),
        ("preprocess_batch", lambda batch: None, r"preprocess_batch returned None\. Return the batch"),
        ("begin", lambda state: None, r"begin must return \(state, batch\), a pair, got NoneType"),
        ("end", lambda state: None, r"end must return \(state, outputs\), a pair, got NoneType"),
    ],
)
def test_invalid_results_of_hooks_raise(hook, result, message):
    step = make_step(advance)
    setattr(type(step), hook, lambda self, given, *_: result(given))
    with pytest.raises(TypeError, match=message):
        step(step.initialize_model([1, 3]), BATCH)


@pytest.mark.parametrize(
    ("devices", "leaf", "message"),
    [
        (1, np.array(["a"] * 8), r"batch\['id'\] is <U1\[8\], which JAX can't turn .*Step.preprocess_batch"),
        (8, np.array([object()] * 8), r"batch\['id'\] is object\[8\]"),
        (1, np.ones(8, ">f4"), r"batch\['id'\] is >f4\[8\]"),
        (8, "text", r"batch\['id'\] is str"),
        (1, {1, 2}, r"batch\['id'\] is set"),
        (1, Tensor(np.ones([8, 3])), r"batch\['id'\] is a tensor of torch, torch.float32\[8, 3\].*Step.begin"),
    ],
)
def test_unsupported_batch_leaves_raise_and_are_named(devices, leaf, message, data_parallel):
    step, state, batches = examples.tiny_regression(partitioner=data_parallel(devices))
    for call in (step, step.evaluate):
        with pytest.raises(TypeError, match=message):
            call(state, {**batches[0], "id": leaf})
    step(state, batches[0])  # The state was not donated.


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: None, "batch['x'] None"),
        (lambda x: [[x, x[:, :2]]], "batch['x'][0][0] float32[8, 3], batch['x'][0][1] float32[8, 2]"),
    ],
)
def test_an_error_in_run_describes_the_batch(change, words):
    step, state, batches = examples.tiny_regression()
    with pytest.raises(Exception) as caught:
        step(state, {**batches[0], "x": change(batches[0]["x"])})
    assert f"with {words}, batch['y'] float32[8, 1]" in caught.value.__notes__
    step(state, batches[0])  # The state was not donated.


def test_a_step_without_run_raises():
    step = Step(KEY, nn.Dense(1))
    with pytest.raises(NotImplementedError, match="Step must define run"):
        step(step.initialize_model([1, 3]), BATCH)


# Batches that JAX would accept silently ----------------------------------------------------------------


def batch_of(rows, dtype=np.float32, **more):
    return {"x": np.ones((rows, 3), dtype), "y": np.ones((rows, 1), np.float32), **more}


def test_changing_batch_shapes_warn_and_raise_past_a_limit(warnings_logged):
    step, state, _ = examples.tiny_regression()
    step.max_batch_shapes = 3
    for rows in (8, 8, 5, 8, 5):  # The last batch of an epoch may be short.
        state, _ = step(state, batch_of(rows))
    assert warnings_logged() == []
    for rows in (4, 8, 4):
        state, _ = step(state, batch_of(rows))
    (warning,) = warnings_logged()
    assert "  batch['x']: float32[8, 3] -> float32[4, 3]\n  batch['y']: float32" in warning
    with pytest.raises(ValueError, match=r"compiled for 3 shapes of batches, and max_batch_shapes=3 is the limit"):
        step(state, batch_of(7))
    assert int(step(state, batch_of(5))[0].step) == 9  # The state was not donated.


@pytest.mark.parametrize(
    ("dtype", "fits", "too_large"),
    [(np.int64, 2**31 - 1, 2**31), (np.int64, -(2**31), -(2**31) - 1), (np.uint64, 2**32 - 1, 2**32)],
)
def test_integers_that_jax_would_truncate_raise(dtype, fits, too_large):
    step, state, _ = examples.tiny_regression()
    state, _ = step(state, batch_of(8, id=np.full(8, fits, dtype)))
    message = rf"batch\['id'\] is u?int64\[8\] with values from {too_large} to .*jax_enable_x64"
    with pytest.raises(ValueError, match=message):
        step(state, batch_of(8, id=np.full(8, too_large, dtype)))
    assert int(step(state, batch_of(8, id=np.zeros(8, dtype)))[0].step) == 2


@pytest.mark.parametrize("leaf", [3_000_000_000, np.int64(3_000_000_000), np.array([1, -(2**40)]), "text"])
def test_a_state_leaf_that_jax_cannot_hold_raises_and_is_named(leaf):
    state = STATE.replace(collections={"count": leaf})
    message = "state/collections/count is (str|int64.*, which JAX would silently truncate)"
    with pytest.raises((TypeError, ValueError), match=message):
        STEP(state, BATCHES[0])
    report = jaxloop.OuterLoop(TrainLoop(STEP)).check(state, BATCHES)
    assert any(re.search(message, problem.text) for problem in report.problems)


def counting_loop(count):
    """Returns a loop whose step counts this many examples in each batch."""
    return TrainLoop(tiny.make_step(type("Counted", (Regression,), {"num_examples": lambda self, batch: count})))


@pytest.mark.parametrize("count", [3, 3.0, np.float32(3), jnp.int32(3)])
def test_num_examples_can_return_any_whole_number(count):
    _, state, batches = examples.tiny_regression()
    loop = counting_loop(count)
    loop(state, batches, num_steps=2)
    assert loop.num_examples == [3, 3] and all(type(number) is int for number in loop.num_examples)


@pytest.mark.parametrize("count", [-1, 1.5, float("nan"), "3", None, True, np.asarray([3, 4])], ids=repr)
def test_an_invalid_num_examples_raises_at_the_first_batch(count):
    message = f"num_examples must return the number of examples in the batch, a whole number, got {count!r}"
    with pytest.raises(ValueError, match=re.escape(f"Counted.{message}")):
        counting_loop(count)(STATE, BATCHES, num_steps=2)


def test_leaves_without_a_common_axis_count_as_one_example_with_one_warning(warnings_logged):
    step = make_step(lambda self, state, batch: (state.replace(step=state.step + 1), {}), train=True)
    loop = TrainLoop(step)
    loop(step.initialize_model([1, 3]), [{"x": np.ones([8, 3], np.float32), "y": np.ones(3, np.float32)}] * 3)
    assert loop.num_examples == [1, 1, 1]
    (warning,) = warnings_logged()
    assert warning.startswith("MadeStep") and "counts each batch as one example" in warning


# Names ---------------------------------------------------------------------------------------------------

# Names of helper methods and attributes that a user might give to a step.
HELPERS = """
    accuracy action_lists add apply augment backward batch batch_watch before_run call check check_batches checkpoint
    clip_gradients close collate compiled config cost cost_analysis count count_examples criterion data dataset decode
    device dispatch dispatcher encode epoch eval_step explain filler fit forward gradients has_own has_schedules init
    inputs inputs_of key largest_batch launch load log log_num_flops loop losses loss_fn lr metrics moved_to name
    new_state next_batch normalize optimizer_step outputs params place place_stacked places_batches plot predictions
    prepare prepare_state preprocessed print profile programs remember report reset restore rng run_again runner sample
    save schedule seed shapes split state states step stop targets trace train_step update updates validate watch
    watched weights work_for_each_step
""".split()


class WithLoss(jaxloop.LossStep):
    loss = staticmethod(models.squares)


def forbidden(*args, **kwargs):
    raise AssertionError("The library used a helper of the step.")


@pytest.mark.parametrize(
    ("base", "as_helper"),
    [(Regression, lambda function: function), (WithLoss, property), (jaxloop.step.NumpyStep, property)],
    ids=["methods", "properties of a LossStep", "properties of a NumpyStep"],
)
def test_a_helper_of_a_step_may_have_any_name_that_is_not_documented(base, as_helper, tmp_path, writer):
    run = {} if base is not jaxloop.step.NumpyStep else {"run": Regression.run}
    kind = type("Helping", (base,), {**dict.fromkeys(HELPERS, as_helper(forbidden)), **run})
    short = {name: leaf[:5] for name, leaf in BATCH.items()}
    train_step, eval_step = (kind(KEY, nn.Dense(1), optax.sgd(0.1), train=train) for train in (True, False))
    state = train_step.initialize_model([1, 3])
    train_step.compile(state, BATCH)
    assert "FLOPs" in train_step.summary(state, BATCH) and train_step.compute_num_flops(state, BATCH) > 0
    state, _ = train_step(state, BATCH)
    for steps_per_dispatch in (1, 2):
        loop = TrainLoop(train_step, steps_per_dispatch=steps_per_dispatch, nan_policy="raise")
        loop.compile(state, BATCH)
        state, _ = loop(state, [BATCH] * 4)
        jaxloop.EvalLoop(eval_step, steps_per_dispatch=steps_per_dispatch)(state, [BATCH, BATCH, short])
    train_step = kind(KEY, nn.Dense(1), optax.sgd(0.1), train=True, end_actions=[jaxloop.SummaryAction(writer)])
    saving = jaxloop.CheckpointAction(tmp_path, 2)
    outer_loop = jaxloop.OuterLoop(TrainLoop(train_step, end_actions=[saving]), [jaxloop.EvalLoop(eval_step)])
    specs, state = [jaxloop.EvalSpec([BATCH, short])], train_step.initialize_model([1, 3])
    assert outer_loop.check(state, [BATCH] * 8, 8, 4, eval_specs=specs).ok
    state, _ = outer_loop(state, [BATCH] * 8, 8, 4, eval_specs=specs)
    assert int(state.step) == 8


def test_every_public_name_of_a_step_is_documented():
    page = (pathlib.Path(__file__).parents[1] / "docs/api/steps.md").read_text()
    documented = set(re.findall(r"^\.\. auto(?:method|attribute|property):: jaxloop\.Step\.(\w+)$", page, re.MULTILINE))
    assert documented - {"__call__"} == {name for name in dir(Step) if not name.startswith("_")}
    loss_step = re.search(r"jaxloop\.LossStep\n   :members: (.*)", page)[1].split(", ")
    more = {name for name in dir(jaxloop.LossStep) if not name.startswith("_")} - documented
    assert more <= set(loss_step)
