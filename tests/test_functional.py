import concurrent.futures
import functools
import io
import json
import os
import re
import shutil
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clu import metrics as clu_metrics
from programs import tiny
from programs.acts import Record
from programs.clock import Clock

import jaxloop
from jaxloop import actions, examples
from jaxloop import checkpoint as checkpoints
from jaxloop import functional as jf
from jaxloop.distributed import lock

BATCHES = [{"x": np.full(4, number, np.float32)} for number in range(100)]


def count(state):
    return state + 1


def log_state(state):
    return {"state": state}


def squared_error(state, batch):
    predicted = state.apply_fn({"params": state.params}, batch["x"])
    return jf.logs().add_loss("loss", jnp.mean((predicted - batch["y"]) ** 2))


regression = jf.train_step(squared_error)


@jf.step
def evaluation(state, batch):
    return {"error": jnp.mean(jnp.abs(state.apply_fn({"params": state.params}, batch["x"]) - batch["y"]))}


def steps_of(tasks, num_steps=10, **options):
    """Returns the name and the step of each call of a callback, in order."""
    called = []
    note = lambda name: lambda state, batch, elapsed: called.append((name, elapsed.steps))
    jf.loop(0, BATCHES, [(when, note(name)) for name, when in tasks.items()], stop=num_steps, **options)
    return called


# The loop --------------------------------------------------------------------------------------------


def odd_batches(kind):
    """Yields 80 batches, some of which differ from the rest."""
    batches = tiny.BATCHES[:80]
    odd = {**tiny.odd_batches(**batches[50]), "an error": None}[kind]
    yield from [*batches[:20], odd, *batches[21:50], odd]
    if odd is None:
        raise OSError("the disk is gone")
    yield from batches[51:]


def run_on(step, kind):
    """Returns the calls, the history, and the final state or error of a run."""
    told = lambda elapsed: (elapsed.steps, elapsed.samples, elapsed.is_last)
    history, seen = jf.history(), []
    first_of = lambda batch: float(np.ravel(jax.tree.leaves(batch)[0])[0])
    note = lambda _, batch, elapsed, loop: seen.append((told(elapsed), first_of(batch), len(loop.history)))
    tasks = {jf.every(1): [step], jf.every(7): [note], jf.at(21) | jf.last(): [note]}
    try:
        batches = (batch for batch in odd_batches(kind) if batch is not None)
        state, _, elapsed = jf.loop(tiny.STATE, batches, tasks, history=history)
        end = told(elapsed), np.asarray(jax.tree.leaves(state.params)[0]).tolist()
    except Exception as error:
        end = type(error), str(error), [re.sub("callback .*,", "callback,", note) for note in error.__notes__]
    return seen, [(*told(row.elapsed), row.logs) for row in history], end


KINDS = "nothing,short,dtype,another leaf,wrong,no dict,an error".split(",")


@pytest.mark.parametrize("kind", KINDS)
def test_fast_path_of_a_train_step_matches_the_general_one(kind):
    compiled = jf.train_step(squared_error)
    one, other = (run_on(each, kind) for each in (compiled, lambda state, batch: compiled(state, batch)))
    assert one == other and len(one[1]) > 18
    if kind == "an error":
        assert one[2] == (OSError, "the disk is gone", ["in the dataset, after step 49, in jf.loop"])


def test_compiled_function_may_return_a_different_structure_for_other_batches():
    @jax.jit
    def step(state, batch):
        if "x" in batch:
            return {"a": {"n": state}, "b": {"n": state}}, state + 1
        return {
            "none": (None, state + 1),
            "logs": {"a": {"n": state}, "b": {"n": state}},
            "still": ({"c": state}, None),
        }[next(iter(batch))]

    value = np.ones(1, np.float32)
    dataset = [{"x": value}] * 40 + [{"none": value}, {"logs": value}, {"still": value}] + [{"x": value}] * 5
    state, history, _ = jf.loop(jnp.int32(0), dataset, {jf.every(1): [step]})
    assert int(state) == 46 and len(history) == 47
    assert history.collect("a.n") == [*range(40), 41, *range(41, 46)]


def test_equal_schedules_in_a_dict_all_fire_in_order():
    order = []
    tasks = {jf.every(1): lambda: order.append("a"), jf.every(1): lambda: order.append("b")}
    jf.loop(0, BATCHES, tasks, stop=2)
    assert order == ["a", "b", "a", "b"]


@pytest.mark.parametrize(
    "as_tasks",
    [
        lambda when, callback: {when: [callback]},
        lambda when, callback: {when: callback},
        lambda when, callback: [(when, callback)],
        lambda when, callback: ((key, (callback,)) for key in [when]),
    ],
)
def test_tasks_are_a_dict_or_pairs_of_schedules_and_callbacks(as_tasks):
    state, _, elapsed = jf.loop(0, BATCHES, as_tasks(jf.every(2), count), stop=10)
    assert (state, elapsed.steps) == (5, 10)


@pytest.mark.parametrize(
    ("callback", "expected"),
    [
        (lambda: seen.append(()), ()),
        (lambda state, batch: seen.append((state, batch)), (0, BATCHES[0])),
        (lambda *arguments: seen.append(arguments[:2]), (0, BATCHES[0])),
        (lambda state, batch, elapsed, loop: seen.append((loop.batch, loop.elapsed.samples)), (BATCHES[0], 4)),
        (lambda state, mine="mine": seen.append((state, mine)), (0, "mine")),
        (functools.partial(lambda mine, state: seen.append((mine, state)), "mine"), ("mine", 0)),
    ],
)
def test_callbacks_get_the_arguments_they_declare(callback, expected):
    seen.clear()
    jf.loop(0, BATCHES, {jf.every(1): callback}, stop=1)
    assert seen == [expected]


seen = []


@pytest.mark.parametrize(
    ("given", "returned", "state", "logs", "outputs"),
    [
        (7, None, 7, None, []),
        (7, {"loss": 1.0}, 7, 1.0, []),
        (7, ({"loss": 1.0}, 8), 8, 1.0, []),
        (7, (None, {"loss": 1.0}, 8), 8, 1.0, []),
        (7, ({"images": "an image"}, None, None), 7, None, [{"images": "an image"}]),
        (7, ([1, 2], {"loss": 1.0}, 8), 8, 1.0, [{"callback": [1, 2]}]),
        (7, 8, 8, None, []),
        ([1.0, 0], [1.0, 1], [1.0, 1], None, []),
        ((1.0, (0,)), (None, (1.0, (1,))), (1.0, (1,)), None, []),
        ({"w": 0}, ({"loss": 1.0}, {"w": 1}), {"w": 1}, 1.0, []),
    ],
)
def test_callbacks_return_what_they_change(given, returned, state, logs, outputs):
    def callback():
        return returned

    new_state, history, _ = jf.loop(given, BATCHES, {jf.every(1): callback}, stop=1)
    assert new_state == state
    assert [row.logs for row in history] == ([] if logs is None else [{"loss": logs}])
    assert [each for _, each in history.outputs] == outputs


@pytest.mark.parametrize(
    ("state", "returned", "message"),
    [
        (0, (1, 2, 3, 4), "callback must return None, logs, .* got a tuple of 4"),
        (({"w": 1.0}, 0), ({"w": 2.0}, 1), r"got a tuple of 2. .*\(None, state\) for a state that is a tuple"),
        ({"gen": 1.0}, {"gen": 2.0}, r"got a dictionary with the keys of the state. .*\(None, state\)"),
        (jnp.zeros(3), jnp.zeros(()), r"got only float32\[\], while the state is float32\[3\]. Write {'name': value}"),
        ({"w": 1.0}, jf.Elapsed(1), "got only Elapsed"),
        (0, {"x": np.ones(3)}, r"The logs of a history hold scalars, got float64\[3\] under x"),
    ],
)
def test_error_for_an_invalid_result_names_the_callback(state, returned, message):
    def callback():
        return returned

    with pytest.raises(TypeError, match=message) as caught:
        jf.loop(state, BATCHES, {jf.every(1): callback})
    assert "in the callback callback, at step 1" in caught.value.__notes__


def by_name_only(state, *, needed):
    pass


def calls(callback):
    return {"tasks": {jf.every(1): [note_call, callback]}}


def note_call():
    seen.append(())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (calls(lambda a, b, c, d, e: None), r"The callback <lambda> takes \(a, b, c, d, e\), .* receive up to four"),
        (calls(lambda elapsed: None), r"takes \(elapsed\), .* Write \(state, batch, elapsed\)"),
        (calls(by_name_only), "by_name_only has keyword-only arguments .needed."),
        (calls(jaxloop.Elapsed), "A callback is a function .* got <class"),
        (calls("train"), "A callback is a function .* got 'train'"),
        (calls(actions.CheckpointAction), "A callback is a function"),
        ({"tasks": count}, r"Tasks must be {schedule: callbacks}, .* got count. Write {every\(1\): count}"),
        ({"tasks": {100: count}}, "Tasks must be .*, got .100, "),
        ({"tasks": [count]}, "Tasks must be .*, got <function count"),
        ({"tasks": "every"}, "Tasks must be"),
        ({"stop": "ten"}, "stop must be a number of steps, or a Schedule"),
        ({"stop": True}, "stop must be a number of steps, or a Schedule"),
        ({"num_examples": lambda batch: 1.5}, "num_examples must return a whole number.*got 1.5"),
        ({"num_examples": lambda batch: None}, "num_examples must return a whole number.*got None"),
    ],
)
def test_invalid_arguments_raise_before_the_first_step(options, message):
    seen.clear()
    with pytest.raises((TypeError, ValueError), match=message):
        jf.loop(0, BATCHES, **{**calls(count), **options})
    assert not seen


# The end of a loop -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (jf.at(10), 10),
        (10, 10),
        (np.int64(10), 10),
        (jf.at(samples=21), 6),
        (jf.at(10) | jf.at(samples=12), 3),
        (jf.every(7), 7),
        (jf.never(), 100),
        (None, 100),
    ],
)
def test_loop_ends_at_stop_or_with_the_data(stop, expected):
    state, _, elapsed = jf.loop(0, BATCHES, {jf.every(1): count}, stop=stop)
    assert (state, elapsed.steps, elapsed.samples) == (expected, expected, 4 * expected)


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        (BATCHES[:5], {"stop": 10}, r"The dataset ended at step 5, before stop=at\(steps=10\)"),
        (iter([]), {}, "The dataset yielded no batches"),
        (BATCHES, {"stop": 10, "elapsed": jf.Elapsed(10)}, "Nothing is left to train: step 10 has reached stop"),
    ],
)
def test_early_end_warns(dataset, options, message, warnings_logged):
    jf.loop(0, dataset, {jf.every(1): count}, **options)
    assert len(warnings_logged()) == 1 and re.search(message, warnings_logged()[0])


def stop_at(step):
    """Returns a callback that ends the loop at a step."""

    def stop(state, batch, elapsed, loop_state):
        loop_state.stop_iteration = elapsed.steps == step

    return stop


@pytest.mark.parametrize(
    ("dataset", "stop", "more"),
    [(BATCHES[:5], None, []), (BATCHES, 5, []), (BATCHES, 10, [stop_at(5)])],
    ids=["data", "stop", "callback"],
)
def test_logs_of_last_belong_to_the_row_of_the_last_step(dataset, stop, more):
    test = lambda state, batch, elapsed: {"test": {"last": elapsed.is_last}}
    tasks = {jf.every(1): [count, log_state, *more], jf.every(2) | jf.last(): test}
    state, history, elapsed = jf.loop(0, dataset, tasks, stop=stop)
    assert history.collect("steps", "state", "test.last") == ([2, 4, 5], [2, 4, 5], [False, False, True])
    assert len(history) == state == elapsed.steps == 5


def test_stop_of_a_callback_of_every_step_reads_no_further_batch():
    read, called = [], []
    dataset = (read.append(number) or batch for number, batch in enumerate(BATCHES))
    note = lambda state, batch, elapsed: called.append((elapsed.steps, elapsed.is_last))
    tasks = {jf.every(1): [count, stop_at(37)], jf.every(20) | jf.last(): note}
    state, _, elapsed = jf.loop(0, dataset, tasks)
    assert state == elapsed.steps == len(read) == 37 and elapsed.is_last
    assert called == [(20, False), (37, True)]


@pytest.mark.parametrize("callbacks", [[jax.jit(count)], [count], []])
def test_batch_is_read_ahead_only_when_something_may_be_due(callbacks):
    read, ahead = [], []
    note = lambda state, batch, elapsed: ahead.append((elapsed.steps, len(read)))
    dataset = (read.append(number) or batch for number, batch in enumerate(BATCHES))
    jf.loop(jnp.int32(0), dataset, {jf.every(1): [*callbacks, note], jf.every(8): note}, stop=20)
    assert ahead == sorted([*((step, step) for step in range(1, 21)), (8, 9), (16, 17)])


def test_ctrl_c_saves_and_returns_the_current_state(interrupted, tmp_path):
    ends = []
    save = jf.checkpoint(tmp_path, keep=None)
    tasks = {jf.every(1): [count, log_state], jf.every(5): save, jf.last(): lambda: ends.append("last")}
    state, history, elapsed = jf.loop(jnp.int32(0), interrupted(BATCHES, 7), tasks, stop=50)
    assert (int(state), elapsed.steps, len(history), ends) == (8, 8, 8, [])
    assert checkpoints.all_steps(tmp_path) == [5, 8]


def test_evaluation_interrupted_by_ctrl_c_reports_nothing_and_is_repeated_by_a_resumed_loop(interrupted, tmp_path):
    def run(test_data):
        test = jf.inner_loop("test", lambda state: jf.loop(state, test_data, {jf.every(1): log_state}))
        tasks = {jf.every(1): [count, log_state], jf.every(3): test, jf.every(4): jf.checkpoint(tmp_path, resume=True)}
        return jf.loop(0, BATCHES, tasks, stop=5)[1:]

    history, elapsed = run(interrupted(BATCHES, 2))
    assert elapsed.steps == 3 and history.paths() == ["state"]
    history, elapsed = run(BATCHES[:2])
    assert elapsed.steps == 5 and history.collect("steps", "test.state") == ([3], [3.0])


def test_error_names_the_callback_and_step_and_commits_saves(tmp_path):
    def fails(state, batch, elapsed):
        if elapsed.steps == 3:
            raise RuntimeError("out of luck")

    history = jf.history()
    with pytest.raises(RuntimeError, match="out of luck") as caught:
        tasks = {jf.every(1): [jf.checkpoint(tmp_path, keep=None), log_state, fails]}
        jf.loop(jnp.zeros(3).sum(), BATCHES, tasks, history=history)
    assert caught.value.__notes__[0] == "in the callback fails, at step 3"
    assert checkpoints.all_steps(tmp_path) == [1, 2]  # Checkpoints come after all other callbacks.
    assert history.collect("steps") == [1, 2, 3]


def test_error_in_close_does_not_hide_an_earlier_one():
    def fails():
        raise RuntimeError("the first error")

    def close():
        raise OSError("can't close")

    unclosable = Record(jf.every(1))
    unclosable.close = close
    with pytest.raises(RuntimeError, match="the first error"):
        jf.loop(0, BATCHES, {jf.every(1): [unclosable, fails]})
    with pytest.raises(OSError, match="can't close"):
        jf.loop(0, BATCHES, {jf.every(1): unclosable})


# LoopState -------------------------------------------------------------------------------------------


def test_loop_state_has_the_documented_attributes():
    def report(state, batch, elapsed, loop_state):
        return {"drawn": "picture"}, {"loss": float(elapsed.steps)}, None

    def look(state, batch, elapsed, loop_state):
        assert loop_state.state is state and loop_state.batch is batch and loop_state.elapsed is elapsed
        assert loop_state.logs.loss == elapsed.steps and loop_state.outputs == {"drawn": "picture"}
        assert len(loop_state.history) == elapsed.steps - 1
        assert loop_state.total_steps == 5 and loop_state.stop_iteration is False
        loop_state.metadata["calls"] = loop_state.metadata.get("calls", 0) + 1
        loop_state.state = state + loop_state.metadata["calls"]

    state, history, _ = jf.loop(0, BATCHES, {jf.every(1): [report, look]}, stop=5)
    assert state == 1 + 2 + 3 + 4 + 5
    assert [(elapsed.steps, outputs) for elapsed, outputs in history.outputs][-1] == (5, {"drawn": "picture"})


# Logs and histories ----------------------------------------------------------------------------------


def test_logs_are_a_nested_dict():
    logs = jf.logs()
    logs.add_metric("accuracy", 0.9)
    logs.add_loss("loss", 0.3)
    logs.add("images", "count", 7)
    assert logs == {"metrics": {"accuracy": 0.9}, "losses": {"loss": 0.3}, "images": {"count": 7}}
    assert logs.entry_value("loss") == logs.loss == logs.losses.loss == logs["losses"]["loss"] == 0.3
    assert logs.updates == {} and logs.add("updates", "batch_stats", 1).updates.batch_stats == 1
    logs.updates["cache"] = 2
    assert logs.updates == {"batch_stats": 1, "cache": 2}
    assert jf.logs({"metrics": {"a": 1}}).metrics.a == 1
    with pytest.raises(AttributeError, match="no attribute 'loss'"):
        logs.loss = 3
    other = jf.logs().add_metric("accuracy", 0.8).add_loss("other", 4)
    merged = logs.merge(other)
    assert merged.metrics == {"accuracy": 0.8} and merged.losses == {"loss": 0.3, "other": 4}
    other.add_metric("accuracy", 0.7)
    assert merged.accuracy == 0.8


def test_logs_pass_through_jit_and_reading_does_not_change_them():
    logs = jax.jit(lambda: jf.logs().add_loss("loss", 0.3).add("updates", "batch_stats", {"bn": {"mean": 1.0}}))()
    before = jax.tree.structure(logs)
    assert logs.losses.loss == logs.loss == logs["losses"].loss == np.float32(0.3)
    assert logs.updates.batch_stats.bn.mean == 1.0 and weakref.ref(logs)() is logs
    assert jax.tree.structure(logs) == before and type(logs["updates"]["batch_stats"]) is dict
    merged = jax.jit(lambda logs, x: logs.merge(jf.logs().add_metric("x", x)))(logs, 2.0)
    assert isinstance(merged, type(logs)) and (merged.loss, merged.metrics.x) == (np.float32(0.3), 2.0)


def test_missing_or_ambiguous_entry_raises():
    logs = jf.logs().add_metric("loss", 1).add_loss("loss", 2)
    assert logs.entry_value("metrics.loss") == 1 and logs.entry_value("losses/loss") == 2
    with pytest.raises(ValueError, match="'loss' is ambiguous: it may be any of metrics.loss, losses.loss"):
        logs.entry_value("loss")
    with pytest.raises(AttributeError, match="No metric named 'los' was measured. There are: metrics.loss"):
        _ = logs.los


def test_logs_may_be_read_and_changed_between_the_reports_of_a_step():
    first, second, seen = lambda: {"metrics": {"a": 1}}, lambda: {"metrics": {"b": 2}}, []

    def look(state, batch, elapsed, loop_state):
        seen.append(dict(loop_state.logs.metrics))
        assert loop_state.logs is loop_state.logs
        loop_state.logs.add_metric("own", elapsed.steps)

    _, history, _ = jf.loop(0, BATCHES, {jf.every(1): [first, look, second, look, first]}, stop=2)
    assert [row.logs for row in history] == [{"metrics": {"a": 1, "own": step, "b": 2}} for step in (1, 2)]
    assert seen == [{"a": 1}, {"a": 1, "own": 1, "b": 2}, {"a": 1}, {"a": 1, "own": 2, "b": 2}]


def test_error_for_invalid_logs_of_a_compiled_function_names_the_step():
    history = jf.history()
    batches = [*[{"x": np.ones(())}] * 4, {"x": np.ones(3)}, {"x": np.ones(())}]
    with pytest.raises(TypeError, match=r"float32\[3\] under metrics.x") as caught:
        jf.loop(0, batches, {jf.every(1): jax.jit(lambda state, batch: ({"metrics": batch}, state))}, history=history)
    assert "in the logs of step 5" in caught.value.__notes__
    assert history.collect("steps") == [1, 2, 3, 4, 6]  # The loop was one step ahead.


def test_reported_state_is_copied_before_the_next_step_donates_it():
    report = lambda state: ({"params": state.params}, {"step": state.step}, None)
    _, history, _ = jf.loop(tiny.STATE, tiny.BATCHES, {jf.every(1): [regression, report]}, stop=40)
    assert history.collect("step") == list(range(1, 41))
    kernels = [outputs["params"]["kernel"] for _, outputs in history.outputs]
    assert not any(kernel.is_deleted() for kernel in kernels) and not np.array_equal(kernels[0], kernels[-1])


def test_loop_continues_from_elapsed_and_history():
    state, history, elapsed = jf.loop(0, BATCHES, {jf.every(1): [count, log_state]}, stop=10)
    state, same, elapsed = jf.loop(
        state, BATCHES[10:], {jf.every(1): [count, log_state]}, stop=25, history=history, elapsed=elapsed
    )
    assert same is history and state == 25 and (elapsed.steps, elapsed.samples) == (25, 100)
    assert history.collect("steps", "state") == (list(range(1, 26)), list(range(1, 26)))
    assert steps_of({"a": jf.every(10)}, num_steps=30, elapsed=jf.Elapsed(15)) == [("a", 20), ("a", 30)]


def test_history_file_is_complete_at_each_checkpoint_and_at_the_end(tmp_path):
    def lines():
        return path.read_text().count("\n") if path.exists() else 0

    path, seen = tmp_path / "history.jsonl", []
    logged = jax.jit(lambda state: ({"state": state}, state + 1))
    tasks = {jf.every(1): logged, jf.every(5): [jf.checkpoint(tmp_path / "model"), lambda: {"later": 1}]}
    tasks[jf.every(6)] = lambda: seen.append(lines())
    _, history, _ = jf.loop(jnp.float32(0), BATCHES, tasks, stop=12, history=jf.history(path))
    assert seen == [5, 10]  # Only a checkpoint forces rows to be written.
    assert lines() == len(history) == 12


# Synchronization and memory --------------------------------------------------------------------------


def test_loop_synchronizes_only_if_a_callback_reads_a_value(reads):
    look = lambda state, batch, elapsed, loop_state: loop_state.logs
    tasks = {jf.every(1): [regression, evaluation, look]}
    _, history, _ = jf.loop(tiny.STATE, tiny.BATCHES, tasks, stop=30)
    assert not reads
    history.collect("loss")
    num_reads = len(reads)
    assert num_reads
    read = lambda state, batch, elapsed, loop_state: {"rows": len(loop_state.history.rows)}
    jf.loop(tiny.STATE, tiny.BATCHES, {**tasks, jf.every(10): read}, stop=30)
    assert len(reads) > num_reads


# Other callbacks -------------------------------------------------------------------------------------


def test_step_as_a_callback_matches_a_train_loop(assert_same):
    expected, outputs = jaxloop.TrainLoop(tiny.STEP)(tiny.STATE, tiny.BATCHES, 50)
    by_step, history, _ = jf.loop(tiny.STATE, tiny.BATCHES, {jf.every(1): tiny.STEP}, stop=50)
    by_function, same, _ = jf.loop(tiny.STATE, tiny.BATCHES, {jf.every(1): regression}, stop=50)
    assert_same(by_step, expected)
    assert_same(by_function, expected)
    assert history.collect("loss") == same.collect("loss") == [float(loss) for loss in outputs["loss"]]


def test_arrays_returned_by_a_step_are_outputs():
    class Reporting(jaxloop.Step):
        def run(self, state, batch):
            value = jaxloop.MetricWithMetadata(jnp.float32(2))
            return state, {"scalar": value, "number": jnp.float32(1), "array": batch["x"], **others}

    image = jaxloop.MetricWithMetadata(jnp.ones([1, 2, 2, 3]), jaxloop.MetricType.IMAGE)
    others = {"nested": {"a": jnp.float32(1)}, "image": image, "average": clu_metrics.Average.empty()}
    reporting = Reporting(jax.random.key(0), tiny.STEP.model)
    _, history, _ = jf.loop(tiny.STATE, tiny.BATCHES, {jf.every(1): reporting}, stop=2)
    assert history.collect("metrics.scalar", "metrics.number") == ([2.0, 2.0], [1.0, 1.0])
    assert [outputs["array"].shape for _, outputs in history.outputs] == [(8, 3), (8, 3)]
    assert [outputs.keys() for _, outputs in history.outputs] == [{"array", *others}] * 2


def note(interval=1):
    """Records the step, the outputs and the weights of each call."""
    return Record(interval, lambda step_num, outputs, **_: (step_num, dict(outputs), outputs.num_examples))


def test_action_gets_each_value_since_its_last_call_once():
    noting = note()
    tasks = {jf.every(1): log_state, jf.every(3): [noting, lambda: {"test": {"loss": 0.5}}, noting], jf.last(): noting}
    jf.loop(7, BATCHES, tasks, stop=7)
    assert noting.seen == [
        (3, {"state": [7, 7, 7], "test/loss": [0.5]}, [4, 4, 4]),
        (6, {"state": [7, 7, 7], "test/loss": [0.5]}, [4, 4, 4]),
        (7, {"state": [7]}, [4]),
    ]
    assert noting.closed == 1


def test_action_is_called_when_both_schedules_fire():
    record = Record(jf.every(2) | jf.last())
    jf.loop(7, BATCHES[:9], {jf.after(4): record})
    assert record.seen == [4, 6, 8, 9]
    with pytest.raises(ValueError, match="counts train loops, but there are none here"):
        jf.loop(7, BATCHES, {jf.every(1): Record(interval=2)})


# Tools -----------------------------------------------------------------------------------------------


def test_saving_to_a_directory_used_by_another_thread_raises(tmp_path):
    tasks = {jf.every(1): jf.checkpoint(tmp_path)}
    run = lambda: jf.loop({"n": jnp.zeros([])}, BATCHES, tasks, stop=2)
    with lock.locked(tmp_path), concurrent.futures.ThreadPoolExecutor(1) as pool:
        with pytest.raises(lock.DirectoryInUseError, match="is in use by process"):
            pool.submit(run).result()
        assert checkpoints.all_steps(tmp_path) == []
    run()
    assert checkpoints.all_steps(tmp_path)[-1] == 2


def test_checkpoint_keeps_the_newest_and_the_best(tmp_path):
    values = iter([5.0, 1.0, 3.0, 4.0])
    save = jf.checkpoint(tmp_path, keep=1, monitor="test/loss")
    test = lambda: {"test": {"loss": next(values)}}
    jf.loop({"w": jnp.zeros(3)}, BATCHES, {jf.every(1): [test, save]}, stop=4)
    assert checkpoints.all_steps(tmp_path) == [2, 4] and save.action.best_step == 2


def test_a_loop_continued_by_hand_is_bit_identical(tmp_path, assert_same):
    expected, whole, _ = jf.loop(tiny.STATE, tiny.BATCHES, {jf.every(1): regression}, stop=60)
    save = jf.checkpoint(tmp_path / "model")
    tasks = {jf.every(1): regression, jf.every(10): save}
    assert save.restore(tiny.STATE) == (tiny.STATE, jf.Elapsed())
    jf.loop(tiny.STATE, tiny.BATCHES, tasks, stop=35, history=jf.history(tmp_path / "history.jsonl"))
    state, elapsed = save.restore(tiny.STATE)
    assert (elapsed.steps, elapsed.samples) == (30, 240)
    history = jf.history(tmp_path / "history.jsonl")
    history.resume(elapsed.steps)
    state, *_ = jf.loop(state, tiny.BATCHES[30:], tasks, stop=60, history=history, elapsed=elapsed)
    assert_same((state, save.restore(tiny.STATE)[0]), (expected, expected))
    assert history.collect("steps", "loss") == whole.collect("steps", "loss")


@pytest.mark.parametrize("restore_best", [False, True])
def test_a_resumed_loop_has_the_numpy_and_python_numbers_of_an_uninterrupted_one(tmp_path, restore_best):
    def count(state, batch, elapsed):
        state = {**state, "tokens": state["tokens"] + 8, "mean": state["mean"] * 0.9 + 0.1, "seen": state["seen"] | 2}
        state |= {"device": jnp.int32(state["device"]) + 1, "host": float(state["host"]) + 0.1}
        state["key"] = jax.random.split(state["key"])[0]
        return jf.logs().add_metric("worse", elapsed.steps), state

    def run(directory, stop):
        state = {"tokens": np.int64(3_000_000_000), "mean": 0.3, "seen": np.array([1, 2**40]), "ok": True}
        state |= {"device": 0, "host": jnp.float32(0), "key": jax.random.key(3)}
        best = jf.early_stopping("worse", 9, mode="min", restore_best=restore_best)
        tasks = {jf.every(1): [count, best], jf.every(2): jf.checkpoint(directory, resume=True)}
        return jf.loop(state, None, tasks, stop=stop)[0]

    whole = run(tmp_path / "whole", 4)
    run(tmp_path / "broken", 2)
    resumed = run(tmp_path / "broken", 4)
    as_text = lambda state: {name: (type(leaf), str(leaf)) for name, leaf in state.items()}
    assert as_text(resumed) == as_text(whole)
    assert resumed["tokens"] == 3_000_000_000 + 8 * (1 if restore_best else 4) and type(resumed["mean"]) is float
    restored, _ = jf.checkpoint(tmp_path / "broken").restore(whole)
    assert (int(restored["tokens"]), int(restored["device"])) == (3_000_000_032, 4)
    assert restore_best or restored["key"] == whole["key"]
    assert {name: type(leaf) for name, leaf in restored.items()} == {name: type(leaf) for name, leaf in whole.items()}


@pytest.mark.parametrize(
    ("make", "is_first"),
    [
        (lambda: jf.early_stopping("los", 3, "min"), False),
        (lambda: jf.checkpoint("model", monitor="los", mode="min"), True),
    ],
)
def test_unknown_monitor_warns_and_raises_at_the_end(make, is_first, tmp_path, monkeypatch, warnings_logged):
    monkeypatch.chdir(tmp_path)
    train = lambda state: jf.logs().add_metric("loss", 1.0).add("test", "accuracy", 0.5)
    callbacks = [make(), train] if is_first else [train, make()]
    message = "No metric named 'los' is measured. Available: loss, metrics/loss, test/accuracy"
    with pytest.raises(ValueError, match=f"{message}. Give the name of one of them"):
        jf.loop({"w": jnp.zeros(3)}, BATCHES, {jf.every(1): callbacks}, stop=9)
    assert len([text for text in warnings_logged() if message in text]) == 1


def test_inner_loop_evaluates_during_training(assert_same):
    expected, _, _ = jf.loop(tiny.STATE, tiny.BATCHES, {jf.every(1): regression}, stop=40)
    short = {name: value[:3] for name, value in tiny.BATCHES[1].items()}
    errors = [float(evaluation(expected, batch)[0]["error"]) for batch in (tiny.BATCHES[0], short)]
    test = jf.inner_loop("test", lambda state: jf.loop(state, [tiny.BATCHES[0], short], {jf.every(1): evaluation}))
    state, history, _ = jf.loop(tiny.STATE, tiny.BATCHES, {jf.every(1): regression, jf.every(20): test}, stop=40)
    assert_same(state, expected)
    steps, _, error = history.collect("steps", "loss", "test.error")
    assert steps == [20, 40] and error[-1] == pytest.approx((8 * errors[0] + 3 * errors[1]) / 11)


def test_inner_loop_with_a_wrong_result_raises():
    with pytest.raises(TypeError, match=r"inner_loop\('test'\) must return \(state, history, elapsed\), .* got 7"):
        jf.loop(0, BATCHES, {jf.every(1): jf.inner_loop("test", lambda: 7)})


def test_evaluations_do_not_count_as_training_time(set_clock):
    clock = set_clock(Clock())

    def evaluate(state):
        clock.now += 100
        return jf.loop(state, BATCHES[:1], {jf.every(1): log_state})

    def train(state):
        clock.now += 1
        return state + 1

    tasks = {jf.every(1): [train, jf.inner_loop("test", evaluate)]}
    _, _, elapsed = jf.loop(0, BATCHES, tasks, stop=10)
    assert elapsed.time == 10


@pytest.mark.parametrize(("stop", "line"), [(jf.at(50), r"100%\|.* 50/50 \["), (None, r"100 steps \[")])
def test_bar_infers_the_total_and_the_last_step(stop, line):
    stream = io.StringIO()
    jf.loop(0, BATCHES, {jf.every(1): lambda: {"loss": 0.5}, jf.always(): jf.keras_bar(stream=stream)}, stop=stop)
    assert re.match(line + ".*loss=0.5000", re.split("[\r\n]", stream.getvalue().strip())[-1])


# Handwritten loops -----------------------------------------------------------------------------------


def test_handwritten_loop_with_the_same_tools(tmp_path, assert_same):
    expected, same, _ = jf.loop(tiny.STATE, tiny.BATCHES, {jf.every(1): regression}, stop=40)
    state = tiny.STATE
    history, stream = jf.history(), io.StringIO()
    save_period, eval_period = jf.every(15), jf.every(10)
    save = jf.checkpoint(tmp_path, keep=1, monitor="loss")
    bar, stop = jf.keras_bar(total=40, stream=stream), jf.early_stopping("error", patience=2, min_delta=100)
    evaluations = []
    for elapsed, batch in jf.elapse(tiny.BATCHES, stop=jf.at(40)):
        logs, state = regression(state, batch)
        history.commit(elapsed, logs)
        bar(elapsed, logs)
        if save_period(elapsed):
            save(elapsed, state, logs)
            assert checkpoints.all_steps(tmp_path)[-1] == elapsed.steps  # Already on disk.
        if eval_period(elapsed):
            logs, _ = evaluation(state, batch)
            evaluations.append((elapsed.steps, stop(elapsed, state, logs)))
    bar.close()
    save.close()
    assert_same(state, expected)
    assert history.collect("steps", "loss") == same.collect("steps", "loss")
    assert evaluations == [(10, False), (20, False), (30, True), (40, True)]
    assert elapsed.is_last and stop.finish(state) is state
    assert re.search(r" 40/40 \[.*loss=", stream.getvalue())
    stop = jf.early_stopping("error", patience=2)
    assert not stop(elapsed, state, {"losss": 1.0})
    with pytest.raises(ValueError, match="No metric named 'error' is measured. Available: losss"):
        stop.finish(state)


def test_logs_merge_each_assignment_to_updates_without_its_own_updates():
    logs = jf.logs().add_metric("accuracy", 0.9)
    logs.updates = {"losses": {"loss": 0.3}, "updates": {"gradients": 7}}
    logs.updates = None
    logs.updates = {"metrics": {"error": 0.1}, "rate": 0.5}
    assert logs == {"metrics": {"accuracy": 0.9, "error": 0.1}, "losses": {"loss": 0.3}, "rate": 0.5}


def test_jitted_callback_gets_elapsed_without_compiling_at_each_step():
    traces = []

    @jax.jit
    def record(state, batch, elapsed):
        traces.append(elapsed)
        counts = {"step": elapsed.steps, "before": elapsed.previous.steps, "last": elapsed.is_last}
        return {**counts, "examples": elapsed.samples, "secs": elapsed.time}

    _, history, _ = jf.loop(jnp.int32(0), BATCHES, {jf.every(1): record}, stop=5, elapsed=jf.Elapsed(0, 2**31 - 13))
    assert history.collect("step", "before") == ([1, 2, 3, 4, 5], [0, 1, 2, 3, 4])
    assert history.collect("last") == [False] * 4 + [True]
    np.testing.assert_allclose(history.collect("examples"), [2**31 - 13 + 4 * step for step in range(1, 6)], rtol=1e-6)
    assert len(traces) <= 3  # Counts beyond 32 bits are floats.


def test_elapse_counts_steps_and_marks_the_last():
    elapsed = [elapsed for elapsed, _ in jf.elapse(BATCHES, stop=3, start=jf.Elapsed(1, samples=4))]
    assert [(each.steps, each.samples, each.is_last) for each in elapsed] == [(2, 8, False), (3, 12, True)]
    assert [each.previous.steps for each in elapsed] == [1, 2]
    with pytest.raises(TypeError, match="A dataset must be an iterator"):
        next(jf.elapse({"x": 1}))


def test_num_examples_counts_the_real_rows_of_padded_batches():
    """A mask in each batch marks the real rows."""
    mask = lambda real: np.arange(8) < real
    batches = [{"x": np.full(8, real, np.float32), "mask": mask(real)} for real in (8, 2, 5, 8, 1)]
    mean = jax.jit(lambda state, batch: ({"mean": batch["x"].mean()}, state + 1))
    real_rows = lambda batch: batch["mask"].sum()
    weigh = jf.inner_loop("test", lambda state: jf.loop(state, batches, {jf.every(1): mean}, num_examples=real_rows))
    tasks = {jf.every(1): mean, jf.last(): weigh}
    _, history, elapsed = jf.loop(jnp.int32(0), batches, tasks, num_examples=real_rows)
    assert history.collect("samples") == [8, 10, 15, 23, 24] and elapsed.samples == 24
    assert history.collect("test.mean") == [(64 + 4 + 25 + 64 + 1) / 24]
    by_hand = [elapsed.samples for elapsed, _ in jf.elapse(batches, num_examples=real_rows)]
    assert by_hand == [8, 10, 15, 23, 24]


# Donated states --------------------------------------------------------------------------------------


def test_donated_state_raises_before_the_loop_begins(data_parallel):
    _, state, batches = examples.tiny_regression()
    train = jf.train_step(squared_error, data_parallel(8))
    jf.loop(state, batches, {jf.every(1): train}, stop=2)
    with pytest.raises(ValueError, match=r"jf.loop got a state that was already donated to train_step\("):
        jf.loop(state, batches, {jf.at(0): lambda: os.abort(), jf.every(1): train}, stop=2)


# Resuming --------------------------------------------------------------------------------------------


class Killed(BaseException):
    """An exception that nothing handles, like SIGKILL."""


class Counter:
    """A callback with a saved state."""

    def __init__(self):
        self.count = 0

    def __loop_callback__(self, loop_state):
        self.count += 1
        loop_state.metadata["twice"] = loop_state.metadata.get("twice", 0) + 2
        return jf.logs().add_metric("count", self.count).add_metric("twice", loop_state.metadata["twice"]), None

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state_dict):
        self.count = state_dict["count"]


def noisy(state, batch):
    key, sub = jax.random.split(state["key"])
    slope = jnp.mean((state["w"] * batch["x"] - batch["y"]) * batch["x"]) + 0.1 * jax.random.normal(sub)
    return jf.logs().add_metric("slope", slope), {"key": key, "w": state["w"] - 0.1 * slope}


def resumable(directory, kill_at=None):
    """Runs a loop with all kinds of saved state. Returns the state, rows, steps, batch numbers and written scalars."""
    numbers, written, writer = [], [], types.SimpleNamespace(flush=lambda: None)
    writer.write_scalars = lambda step, scalars: written.append((step, dict(scalars)))

    def note(state, batch, elapsed):
        numbers.append(int(batch["number"]))
        if elapsed.steps == kill_at:
            raise Killed

    batches = [{"number": np.int32(n), "x": np.float32(n % 3), "y": np.float32(n)} for n in range(20)]
    tasks = {
        jf.every(1): [jax.jit(noisy), note],
        jf.every(2): Counter(),
        jf.every(5): actions.SummaryAction(writer),
        jf.always(): jf.early_stopping("slope", patience=100, mode="min", restore_best=True),
        jf.every(3): jf.checkpoint(directory, keep=2, resume=True),
    }
    state = {"key": jax.random.key(1), "w": jnp.float32(0)}
    state, history, elapsed = jf.loop(state, batches, tasks, stop=17)
    rows = [(row.elapsed.steps, row.logs) for row in history]
    return jax.tree.map(str, jax.tree.map(np.asarray, {"w": state["w"]})), rows, elapsed.steps, numbers, written


@pytest.mark.parametrize("kills", [[1], [7], [5, 8, 17]])
def test_killed_loop_resumes_exactly_from_its_checkpoint(kills, tmp_path):
    whole = resumable(tmp_path / "whole")
    for kill_at in kills:
        with pytest.raises(Killed):
            resumable(tmp_path / "broken", kill_at)
    saved = max(checkpoints.all_steps(tmp_path / "broken"), default=0)
    assert saved == 3 * ((kills[-1] - 1) // 3)
    state, rows, steps, numbers, written = resumable(tmp_path / "broken")
    assert (state, rows, steps) == whole[:3]
    assert numbers == list(range(saved, 17)) and len(whole[3]) == 17
    assert written == [each for each in whole[4] if each[0] > saved]


@pytest.mark.parametrize("end", ["stop", "callback"])
def test_what_is_due_at_the_end_is_called_in_a_resumed_loop_that_has_nothing_left(end, tmp_path):
    def run():
        often, at_end = (jf.checkpoint(tmp_path / name, resume=True) for name in ("often", "end"))
        tasks = {jf.every(1): [count, stop_at(5)], jf.every(5): often, jf.last(): at_end}
        return jf.loop(jnp.int32(0), BATCHES, tasks, stop=5 if end == "stop" else None)[2].is_last

    assert run()
    shutil.rmtree(tmp_path / "end" / "5")  # As if a kill had prevented this commit.
    assert run()
    assert checkpoints.all_steps(tmp_path / "end") == [5]


def test_restart_before_the_first_checkpoint_does_not_repeat_the_row_of_step_0(tmp_path):
    def tasks(fails):
        def measure(state):
            if fails and state > 2:
                raise RuntimeError("the power is gone")
            return jf.logs().add_metric("test", state)

        saves = jf.checkpoint(tmp_path, resume=True)
        return [(jf.at(0) | jf.every(3), measure), (jf.every(1), count), (jf.every(8), saves)]

    for _ in range(2):
        with pytest.raises(RuntimeError, match="the power is gone"):
            jf.loop(jnp.int32(0), BATCHES, tasks(fails=True), stop=8)
    _, history, _ = jf.loop(jnp.int32(0), BATCHES, tasks(fails=False), stop=8)
    lines = (tmp_path / "history.jsonl").read_text().splitlines()
    assert [json.loads(line)["elapsed"]["steps"] for line in lines] == history.collect("steps", "test")[0] == [0, 3, 6]


def test_a_run_resumes_with_the_rows_that_are_left_of_a_damaged_history(tmp_path):
    def run(stop):
        each = [jf.early_stopping("state", 100, "min"), jf.checkpoint(tmp_path, resume=True)]
        return jf.loop(jnp.int32(0), BATCHES, {jf.every(1): [log_state, count], jf.every(4): each}, stop=stop)

    run(12)
    path = tmp_path / "history.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    _, history, elapsed = run(16)
    assert elapsed.steps == 16 and history.collect("steps") == [1, 2, 13, 14, 15, 16]


def test_a_refused_loop_leaves_the_history_as_it_was(tmp_path):
    def run(stop=6, **others):
        tasks = {jf.every(1): log_state, jf.every(4): jf.checkpoint(tmp_path, resume=True)}
        jf.loop(jnp.int32(0), BATCHES, tasks, stop=stop, **others)

    run()
    shutil.rmtree(tmp_path / "4")  # So that the next loop starts from scratch.
    before = (tmp_path / "history.jsonl").read_text()
    for options, message in (({"num_examples": 5}, "num_examples must be"), ({"stop": "6"}, "stop must be")):
        with pytest.raises((TypeError, ValueError), match=message):
            run(**options)
        assert before.count("\n") == 6 and (tmp_path / "history.jsonl").read_text() == before


def test_resuming_from_a_renamed_checkpoint_raises(tmp_path):
    tasks = lambda: {jf.every(1): count, jf.every(5): jf.checkpoint(tmp_path, resume=True)}
    jf.loop(jnp.int32(0), BATCHES, tasks(), stop=10)
    (tmp_path / "10").rename(tmp_path / "110")
    with pytest.raises(ValueError, match="checkpoint 110 in .* was saved after step 10.*Rename it to 10, or remove"):
        jf.loop(jnp.int32(0), BATCHES, tasks(), stop=15)


@pytest.mark.parametrize(("options", "end"), [({}, 3), ({"patience": 5}, 6), ({"stop": 30}, 3)])
def test_early_stopped_loop_continues_only_with_more_patience(options, end, tmp_path):
    def run(patience=2, stop=20):
        early = jf.early_stopping("loss", patience=patience)
        tasks = {jf.every(1): [lambda: {"loss": 1.0}, early, jf.checkpoint(tmp_path, resume=True)]}
        _, history, elapsed = jf.loop(0, BATCHES, tasks, stop=stop)
        return elapsed.steps, history.collect("steps")

    assert [run(), run(**options)] == [(steps, list(range(1, steps + 1))) for steps in (3, end)]


@pytest.mark.parametrize("when", [jf.at(0) | jf.every(10), jf.last()])
def test_a_loop_without_a_step_is_saved_if_due(when, tmp_path):
    assert jf.loop(0.0, BATCHES, {when: jf.checkpoint(tmp_path)}, stop=0)[2].steps == 0
    assert checkpoints.all_steps(tmp_path) == [0]


def test_a_loop_warns_at_its_start_of_schedules_that_never_fire(tmp_path, warnings_logged):
    tasks = {jf.every(1): count, jf.every(steps=100): jf.checkpoint(tmp_path), jf.every(samples=10**5): count}
    jf.loop(np.zeros([]), [np.ones(4)] * 50, {**tasks, jf.every(5) | jf.last(): count}, stop=7)
    (warning,) = warnings_logged()
    assert warning.startswith("every(steps=100) would never fire, so CheckpointAction(") and "to step 7" in warning


def test_loops_within_a_loop_warn_only_once_of_a_schedule_that_never_fires(warnings_logged):
    evaluate = lambda state: jf.loop(state, BATCHES[:5], {jf.every(steps=123): count})[0]
    jf.loop(0, BATCHES, {jf.every(5): evaluate}, stop=20)
    (warning,) = warnings_logged()
    assert warning.startswith("every(steps=123) would never fire")


def test_a_changed_list_of_tasks_calls_nothing_twice_at_the_step_of_a_checkpoint(tmp_path):
    def double(state):
        return {"doubled": state}, state * 2

    def looked(state):
        pass

    def greet(state):
        greeted.append(state)

    def resume(tasks, stop):
        tasks = [*tasks, (jf.every(5), jf.checkpoint(tmp_path, resume=True))]
        return jf.loop(1, BATCHES, tasks, stop=stop)[0]

    greeted, count = [], (jf.every(1), lambda state: ({}, state + 1))
    resume([count, (jf.every(7), looked), (jf.every(5), double)], 5)
    # `looked` is gone, `double` has another schedule, and `greet` is new.
    assert resume([(jf.every(6), greet), count, (jf.every(5), double)], 6) == (1 + 5) * 2 + 1
    assert resume([count, (jf.at(5), double)], 7) == (1 + 5) * 2 + 2 and greeted == [12]
