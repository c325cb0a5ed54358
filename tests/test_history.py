import collections
import functools
import hashlib
import json
import math
import os
import signal
import sys
import types
import weakref

import flax
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from IPython.core.formatters import DisplayFormatter
from programs.acts import limit_file_size
from programs.tiny import BATCHES, STATE, experiment

from jaxloop import every, metrics
from jaxloop.base import files
from jaxloop.history import History, Row
from jaxloop.schedules import Elapsed
from jaxloop.types import Weighted


def history_of(*rows, path=None):
    """Returns a history with the given `(steps, logs)` rows."""
    history = History(path)
    for steps, logs in rows:
        history.commit(Elapsed(steps), logs)
    return history


def two_curves():
    history = History()
    for steps in (1, 2, 3, 4):
        elapsed = Elapsed(steps, samples=32 * steps, time=steps / 2, loops=steps // 2)
        history.commit(elapsed, {"train": {"loss": 1 / steps}})
        if steps % 2 == 0:
            history.commit(Elapsed(steps), {"test/loss": 2 / steps, "test/metrics": {"accuracy": steps / 10}})
    return history


@pytest.fixture
def reads(monkeypatch):
    """The device values read or waited for so far."""
    values = []

    def reading(function, tree):
        values.extend(leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array))
        return function(tree)

    for name in ("fetch", "fetch_scalar", "wait"):
        monkeypatch.setattr(metrics, name, functools.partial(reading, getattr(metrics, name)))
    return values


# Reading -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["steps"], [1, 2, 2, 3, 4, 4]),
        (["steps", "train.loss"], ([1, 2, 3, 4], [1, 1 / 2, 1 / 3, 1 / 4])),
        (["train/loss", "time"], ([1, 1 / 2, 1 / 3, 1 / 4], [0.5, 1.0, 1.5, 2.0])),
        (["accuracy"], [0.2, 0.4]),
        (["metrics.accuracy", "test.loss", "steps"], ([0.2, 0.4], [1.0, 0.5], [2, 4])),
        (["test/metrics/accuracy", "test/metrics.accuracy"], ([0.2, 0.4], [0.2, 0.4])),
        (["train.loss", "test.loss"], ([], [])),  # Never in the same row.
        (["samples", "loops", "train.loss"], ([32, 64, 96, 128], [0, 1, 1, 2], [1, 1 / 2, 1 / 3, 1 / 4])),
    ],
)
def test_collect_returns_a_list_per_name_over_rows_with_all_names(names, expected):
    assert two_curves().collect(*names) == expected


def test_a_full_path_takes_precedence_over_a_suffix_of_whole_components():
    history = history_of((1, {"loss": 1.0, "eval": {"loss": 2.0, "x": {"loss": 3.0}, "total_acc": 4.0, "acc": 5.0}}))
    assert history.collect("loss", "eval/loss", "x.loss", "acc") == ([1.0], [2.0], [3.0], [5.0])


@pytest.mark.parametrize("ask", [History.collect, History.last])
def test_an_ambiguous_name_raises_and_lists_the_candidates(ask):
    with pytest.raises(ValueError, match="'loss' is ambiguous: it may be any of train.loss, test.loss"):
        ask(two_curves(), "loss")


@pytest.mark.parametrize("ask", [History.collect, History.plot])
def test_an_unknown_name_raises_and_lists_all_names(ask):
    with pytest.raises(ValueError, match="'acuracy' was measured. There are: train.loss, test.loss, test.metrics.acc"):
        ask(two_curves(), "acuracy")


def test_an_empty_history_returns_empty_lists():
    assert History().collect("loss") == []
    assert History().collect("steps", "loss") == ([], [])
    assert History().rows == [] and History().to_records() == [] and len(History()) == 0


def test_collect_requires_names_that_are_strings():
    with pytest.raises(TypeError, match="names and keys of a history must be strings"):
        History().collect(["steps", "loss"])


def test_rows_support_iteration_indexing_and_len():
    history = two_curves()
    assert len(history) == 6
    assert history.rows == [*history] == [history[i] for i in range(6)]
    assert history[-1] == Row(Elapsed(4), {"test/loss": 0.5, "test/metrics": {"accuracy": 0.4}})
    assert history.paths() == ["train.loss", "test.loss", "test.metrics.accuracy"]


def test_repr_shows_the_row_count_last_step_and_names():
    assert repr(History()) == "History(no rows)"
    assert repr(history_of((7, {"loss": 1.0}))) == "History(1 row up to step 7: loss)"
    assert repr(two_curves()) == "History(6 rows up to step 4: train.loss, test.loss, test.metrics.accuracy)"
    assert repr(history_of((7, {f"m{i}": i for i in range(20)}))).endswith("m10, m11 and 8 more)")


def test_last_returns_the_newest_value_and_its_elapsed():
    history = two_curves()
    assert history.last("accuracy") == (Elapsed(4), 0.4)
    history.commit(Elapsed(9), {"other": 1})
    assert history.last("test/loss") == (Elapsed(4), 0.5)
    assert history.last("nowhere") is None


# Committing --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3, 3),
        (True, True),
        ("sgd", "sgd"),
        (np.float32(0.1), float(np.float32(0.1))),
        (np.int64(7), 7),
        (np.bool_(False), False),
        (ml_dtypes.bfloat16(1.5), 1.5),
        (jnp.array(True), True),
        (jnp.bfloat16(1.5), 1.5),
        (jnp.float32(jnp.inf), math.inf),
    ],
)
def test_values_are_returned_as_plain_python(value, expected):
    history = history_of((1, {"a": {"b": value}}))
    for found in (history.rows[0].logs["a"]["b"], history.collect("b")[0], history.to_records()[0]["a.b"]):
        assert found == expected and type(found) is type(expected)


@pytest.mark.parametrize(
    ("logs", "error", "message"),
    [
        (3.0, TypeError, "logs of a history must be a .nested. dict, got float"),
        ({"a": {1: 2}}, TypeError, "keys of a history must be strings such as 'train.loss', got 1"),
        ({"a": {"b": np.zeros(3)}}, TypeError, "hold scalars, got float64.3. under a.b. Reduce it to one"),
        ({"a": jax.random.key(0)}, TypeError, "hold scalars"),
        ({"a": None}, TypeError, "hold scalars, got NoneType"),
        ({"a/b": 1, "a": {"b": 2}}, ValueError, "a value under a.b, which is also the path of another value"),
        ({"steps": 1}, ValueError, "under steps, .* or of the run's progress. Use another key, such as 'my_steps'"),
    ],
)
def test_logs_other_than_dicts_of_scalars_raise_and_add_no_row(logs, error, message):
    history = History()
    with pytest.raises(error, match=message):
        history.commit(Elapsed(1), logs)
    assert len(history) == 0 and history.paths() == []


@pytest.mark.parametrize("kind", [types.MappingProxyType, flax.core.FrozenDict, collections.OrderedDict])
def test_logs_may_be_any_nested_mapping(kind):
    history = history_of((1, kind({"train": kind({"loss": 1.0, "a": kind({})}), "lr": 0.1})))
    assert history.rows[0].logs == {"train": {"loss": 1.0}, "lr": 0.1}


def test_a_tracer_is_rejected():
    history = History()
    with pytest.raises(TypeError, match="got a tracer .* under loss"):
        jax.jit(lambda x: history.commit(Elapsed(1), {"loss": x}))(1.0)


def test_commit_copies_its_arguments():
    logs = {"train": {"loss": 1.0}}
    history = History()
    history.commit(Elapsed(1).advance(samples=8, time=1.0), logs)
    logs["train"]["loss"] = 2.0
    assert history.rows[0] == Row(Elapsed(2, 8, 1.0), {"train": {"loss": 1.0}})
    assert history.rows[0].elapsed.previous is None


def test_outputs_are_stored_unchanged(reads, tmp_path):
    history, images = History(tmp_path / "history.jsonl"), jnp.zeros([2, 3])
    history.add_outputs(Elapsed(1).advance(samples=8, time=1.0), {"images": images})
    history.flush()
    ((elapsed, outputs),) = history.outputs
    assert elapsed == Elapsed(2, 8, 1.0) and elapsed.previous is None
    assert outputs["images"] is images
    assert not reads and not os.listdir(tmp_path) and len(history) == 0


# Device values -----------------------------------------------------------------------------------


def test_commit_does_not_block_and_reading_fetches_everything(reads):
    history = history_of(*((i, {"loss": jnp.float32(i), "host": i}) for i in range(20)))
    assert len(history) == 20 and repr(history) == "History(20 rows up to step 19: loss, host)"
    assert not reads
    assert history.collect("steps", "loss", "host") == (list(range(20)),) * 3
    assert history[7].logs == {"loss": 7.0, "host": 7}
    assert len(reads) == 20
    history.flush()
    assert len(reads) == 20  # Nothing is read twice.


@pytest.mark.parametrize(
    ("error", "failing", "written"),
    [(OSError, 1, 0), (OSError, 2, 7), (KeyboardInterrupt, 3, 0), (OSError, 4, 0), (KeyboardInterrupt, 5, 7)],
)
def test_no_row_is_lost_if_a_write_fails(error, failing, written, tmp_path, monkeypatch):
    history, open_file, calls = History(tmp_path / "history.jsonl"), files.open_file, []

    def fail_once(path, mode):
        calls.append(path)
        if len(calls) == failing:
            with open_file(path, mode) as file:
                file.write(b"x" * written)
            raise error("the disk is full")
        return open_file(path, mode)

    monkeypatch.setattr(files, "open_file", fail_once)
    failed = 0
    for step in range(200):
        try:
            history.commit(Elapsed(step), {"even" if step % 2 else "odd": jnp.float32(step)})
        except error:
            failed += 1
    history.flush()
    assert failed == 1 and calls
    assert [(row.elapsed.steps, *row.logs.values()) for row in history] == [(step, step) for step in range(200)]
    assert History.load(tmp_path / "history.jsonl").rows == history.rows


def test_the_number_of_pending_rows_is_bounded():
    history, values = History(), []
    for i in range(300):
        value = jnp.float32(i)
        values.append(weakref.ref(value))
        history.commit(Elapsed(i), {"loss": value})
        del value
        assert sum(value() is not None for value in values) <= 64
    assert history.collect("loss") == list(range(300))


def test_last_reads_the_device_only_for_pending_values(reads):
    history = history_of((1, {"train.loss": jnp.float32(1)}), (1, {"test.loss": 2.0}))
    assert history.last("test.loss") == (Elapsed(1), 2.0)
    assert not reads
    assert history.last("train.loss") == (Elapsed(1), 1.0)
    assert len(reads) == 1


def test_device_rows_of_one_function_match_rows_of_plain_numbers(tmp_path):
    """A history checks a row less closely if its structure matches that of the previous row."""
    step = jax.jit(lambda x: {"train": {"loss": x * 0.5, "count": x.astype(int)}, "rate": x})
    other = jax.jit(lambda x: {"train": {"loss": x * 2, "count": x}, "rate": x})  # Its count has a different dtype.
    history, same = History(tmp_path / "history.jsonl"), History()
    for number in range(1, 150):
        rows = [step(jnp.float32(number))]
        if number % 7 == 0:
            rows += [{"test": {"loss": number / 4}}, other(jnp.float32(number))]
        if number % 13 == 0:
            rows.append({"rate": rows[0]["rate"], "train": {"loss": number / 2, "count": rows[0]["train"]["count"]}})
        for logs in rows:
            history.commit(Elapsed(number, previous=Elapsed(number - 1)), logs)
            same.commit(Elapsed(number), jax.tree.map(lambda leaf: np.asarray(leaf).item(), logs))
        assert len(history) == len(same)
    assert history.rows == same.rows == History.load(history.path).rows
    assert [list(row.logs) for row in history] == [list(row.logs) for row in same]
    assert [type(value) for value in history.collect("count")] == [type(value) for value in same.collect("count")]
    assert all(row.elapsed.previous is None for row in history)


def test_counts_of_other_libraries_are_stored_as_python_numbers(tmp_path):
    history = History(tmp_path / "history.jsonl")
    history.commit(Elapsed(np.int64(3), np.int32(24), np.float32(1.5)), {"loss": 0.5})
    history.flush()
    assert json.loads(history.path.read_text())["elapsed"] == {"steps": 3, "samples": 24, "time": 1.5, "loops": 0}
    history.commit(Elapsed(jnp.int32(4)), {"loss": 0.25})
    assert history.collect("steps", "loss") == ([3, 4], [0.5, 0.25])
    assert {type(count) for count in history.collect("steps")} == {int}


@pytest.mark.parametrize("name", ["alike", "other order", "other keys"])
def test_rows_committed_together_are_those_committed_one_by_one(name, tmp_path):
    logs = {
        "alike": {"train": {"loss": jnp.float32(2), "mean": Weighted(jnp.float32(3), 4)}, "rate": 0.5},
        "other order": {"rate": 0.5, "train": {"mean": Weighted(1.0, 2), "loss": 2}},
        "other keys": {"train": {"loss": 1.0}},
    }
    rows = [(Elapsed(step), logs["alike" if step % 3 else name]) for step in range(1, 100)]
    together, one_by_one = History(tmp_path / "together.jsonl"), History(tmp_path / "one_by_one.jsonl")
    together.commit_all(rows)
    for elapsed, row in rows:
        one_by_one.commit(elapsed, row)
    assert together.rows == one_by_one.rows and len(together) == 99
    assert together.path.read_bytes() == one_by_one.path.read_bytes()
    assert together.last("rate") == one_by_one.last("rate")


def test_an_invalid_row_keeps_those_before_it():
    history = History()
    with pytest.raises(TypeError, match="scalars, got float64") as caught:
        history.commit_all([(Elapsed(step), {"x": 1.0 if step != 3 else np.ones(2)}) for step in (1, 2, 3, 4)])
    assert caught.value.__notes__ == ["in the logs of step 3"]
    assert history.collect("steps") == [1, 2]


def test_an_interrupted_read_loses_nothing(monkeypatch):
    history = history_of(*((i, {"loss": jnp.float32(i)}) for i in range(50)))
    with monkeypatch.context() as patch:
        patch.setattr(metrics, "fetch_scalar", lambda array: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            history.collect("loss")
    history.commit(Elapsed(50), {"loss": jnp.float32(50)})
    assert history.collect("loss") == list(range(51))


def test_a_donated_value_raises_once_and_becomes_nan():
    count, loss = jnp.float32(1), jnp.float32(2)
    history = history_of((1, {"state": {"count": count}, "loss": loss}))
    jax.jit(lambda x: x + 1, donate_argnums=0)(count)
    with pytest.raises(ValueError, match="donated to a step before it arrived: state.count at step 1. .* jnp.copy"):
        history.collect("loss")
    assert history.collect("loss") == [2.0] and math.isnan(history.collect("count")[0])


def test_a_row_whose_commit_finds_a_donated_value_is_not_lost():
    history, values = History(), [jnp.float32(number) for number in range(63)]
    for number, value in enumerate(values, 1):
        history.commit(Elapsed(number), {"loss": value})
    values[5].delete()
    with pytest.raises(ValueError, match="loss at step 6"):
        history.commit(Elapsed(64), {"eval": 1.0})  # Too many rows are pending, so the oldest are read.
    history.commit(Elapsed(65), {"loss": jnp.float32(7)})
    assert len(history.rows) == 65 and history.collect("eval") == [1.0] and history.collect("loss")[-1] == 7.0


# The file ----------------------------------------------------------------------------------------


def test_host_rows_are_written_immediately_and_device_rows_on_arrival(tmp_path):
    path = tmp_path / "runs" / "1" / "history.jsonl"
    history = history_of((1, {"test/loss": 2.0}), (2, {"loss": jnp.float32(1)}), (2, {"test/loss": 3.0}), path=path)
    assert History.load(path).rows == [Row(Elapsed(1), {"test/loss": 2.0})]  # The third waits for the second.
    for steps in range(3, 65):
        assert len(History.load(path)) == 1
        history.commit(Elapsed(steps), {"test/loss": 4.0})
    assert History.load(path).rows == history.rows
    history.commit(Elapsed(65), {"loss": jnp.float32(1)})
    assert len(History.load(path)) == 65
    history.flush()
    assert History.load(path).rows == history.rows and len(history) == 66


def test_each_line_of_the_file_is_a_row(tmp_path):
    history_of((1, {"train": {"loss": 0.5}}), path=tmp_path / "a").save(tmp_path / "b")
    line = '{"elapsed": {"steps": 1, "samples": 0, "time": 0.0, "loops": 0}, "logs": {"train": {"loss": 0.5}}}\n'
    assert (tmp_path / "a").read_text() == (tmp_path / "b").read_text() == line


keys = st.text(max_size=4).filter(
    lambda key: not {".", "/"} & set(key) and key not in ("steps", "samples", "time", "loops")
)
values = st.floats() | st.integers() | st.booleans() | st.text() | st.sampled_from(["NaN", "-Infinity"])
dicts = lambda leaves: st.dictionaries(keys, leaves, max_size=3)
nested_logs = st.recursive(dicts(values), lambda inner: dicts(values | inner), max_leaves=4)
elapsed = st.builds(Elapsed, st.integers(0, 9), st.integers(0), st.floats(0), st.integers(0))
some_rows = st.lists(st.tuples(elapsed, nested_logs), max_size=5)
few_times = settings(max_examples=40, deadline=None, database=None)


@few_times
@given(some_rows)
@example([(Elapsed(1), {"a": math.nan, "b": math.inf, "c": -math.inf, "d": "NaN", "f": -0.0})])
@example([(Elapsed(1), {"a": "\n\ud800\u2028", "": {"": {"": 1}}, "b": {}})])
def test_save_and_load_round_trip(tmp_path_factory, rows):
    path = tmp_path_factory.getbasetemp() / "saved.jsonl"
    history = History()
    for elapsed, logs in rows:
        history.commit(elapsed, logs)
    history.save(path)
    loaded = History.load(path)
    # Compared as text, because NaN != NaN, 0.0 == -0.0 and True == 1 == 1.0.
    assert repr(loaded.rows) == repr(history.rows)
    assert loaded.paths() == history.paths()
    assert [set(json.loads(line)) for line in path.read_text().splitlines()] == [{"elapsed", "logs"}] * len(rows)


@few_times
@given(st.lists(st.integers(0, 9), max_size=8).map(sorted), st.integers(0, 10), st.floats(0, 1))
def test_a_truncated_file_can_be_resumed_from_any_step(tmp_path_factory, all_steps, resumed_at, share):
    path = tmp_path_factory.getbasetemp() / "cut.jsonl"
    path.unlink(missing_ok=True)
    written = history_of(*((steps, {"row": i, "x": math.nan}) for i, steps in enumerate(all_steps)), path=path)
    content = path.read_bytes() if all_steps else b""
    cut = round(share * len(content))
    path.write_bytes(content[:cut])
    complete = content[:cut].count(b"\n")

    history = History(path)
    history.resume(resumed_at)
    kept = [row for row in written.rows[:complete] if row.elapsed.steps <= resumed_at]
    assert repr(history.rows) == repr(kept)
    history.commit(Elapsed(resumed_at + 1), {"row": "new"})
    assert repr(History.load(path).rows) == repr(history.rows)
    assert history.collect("row") == [*(row.logs["row"] for row in kept), "new"]


def test_two_runs_cannot_share_a_file(tmp_path):
    path = tmp_path / "history.jsonl"
    history_of((1, {"loss": 1.0}), path=path)
    before = path.read_bytes()
    second = History(path)
    for value in (2.0, jnp.float32(2)):
        with pytest.raises(ValueError, match="rows of an earlier run, .* history.resume.steps. .* or delete it"):
            second.commit(Elapsed(1), {"loss": value})
    assert path.read_bytes() == before and len(second) == 0
    path.unlink()
    second.commit(Elapsed(1), {"loss": 3.0})
    assert History.load(path).collect("loss") == [3.0]


def test_an_empty_file_is_not_an_earlier_run(tmp_path):
    (tmp_path / "history.jsonl").touch()
    assert len(history_of((1, {"loss": 1.0}), path=tmp_path / "history.jsonl")) == 1


@pytest.mark.parametrize(("steps", "kept"), [(1, [0, 1, 1]), (np.int64(2), [0, 1, 1, 2]), (9, [0, 1, 1, 2, 3])])
@pytest.mark.parametrize("in_file", [True, False])
def test_resume_keeps_the_rows_up_to_a_step(steps, kept, in_file, tmp_path):
    path = tmp_path / "history.jsonl" if in_file else None
    history = history_of(*((i, {"loss": i, f"only_at_{i}": 1}) for i in [0, 1, 1, 2, 3]), path=path)
    for i in range(4):
        history.add_outputs(Elapsed(i), i)
    resumed = History(path) if in_file else history
    resumed.resume(steps)
    assert resumed.collect("loss") == kept
    assert resumed.paths() == ["loss", *(f"only_at_{i}" for i in sorted(set(kept)))]
    assert (resumed.last("only_at_3") is None) == (3 not in kept)
    if in_file:
        assert History.load(path).rows == resumed.rows
    else:
        assert [outputs for _, outputs in resumed.outputs] == sorted(set(kept))


def test_resume_drops_later_rows_of_the_same_step(tmp_path):
    path = tmp_path / "history.jsonl"
    history_of(*((1, {"loss": float(i)}) for i in range(4)), path=path)
    resumed = History(path)
    resumed.resume(1, num_rows=2)
    assert resumed.collect("loss") == [0.0, 1.0] == History.load(path).collect("loss")


def test_a_foreign_file_is_kept(tmp_path):
    path = tmp_path / "history.jsonl"
    path.write_text("notes")  # Like a torn line.
    History(path).resume(0)
    assert (tmp_path / "history.jsonl.before").read_text() == "notes"


@pytest.mark.parametrize("steps", ["5", 2.0])
def test_resume_requires_a_number_of_steps(steps):
    with pytest.raises(TypeError, match="integer"):
        History().resume(steps)


def test_an_incomplete_last_line_is_dropped_with_a_warning(tmp_path, warnings_logged):
    path = tmp_path / "history.jsonl"
    history_of((1, {"loss": 1.0}), (2, {"loss": 2.0}), path=path)
    path.write_bytes(path.read_bytes()[:-5])
    assert History.load(path).collect("loss") == [1.0]
    assert "is incomplete, and was dropped" in warnings_logged()[0]


MALFORMED = ["", "{", "[1]", "{}", '{"elapsed": {"steps": "1"}, "logs": {}}', "\udcff"]


@pytest.mark.parametrize("line", [*MALFORMED, '{"elapsed": {"steps": 1}, "logs": {"a": [1]}}'])
@pytest.mark.parametrize("read", [History.load, lambda path: History(path).resume(5)], ids=["load", "resume"])
def test_a_malformed_line_elsewhere_raises_with_its_number(line, read, tmp_path):
    path = tmp_path / "history.jsonl"
    history_of((1, {"loss": 1.0}), path=path)
    content = path.read_bytes() + line.encode(errors="surrogateescape") + b"\n" + path.read_bytes()
    path.write_bytes(content)
    with pytest.raises(ValueError, match="history.jsonl, line 2: expected a row, .* Correct the line or delete it"):
        read(path)
    assert path.read_bytes() == content


def test_a_failed_save_leaves_the_file_unchanged(tmp_path):
    path = tmp_path / "history.jsonl"
    history = history_of((1, {"loss": 1.0}), (2, {"loss": 2.0}))
    history.save(path)
    assert os.listdir(tmp_path) == ["history.jsonl"]
    before = path.read_bytes()
    with limit_file_size(len(before) // 2), pytest.raises(OSError, match="File too large"):
        history.save(path)
    assert path.read_bytes() == before


# Plotting ----------------------------------------------------------------------------------------


def describe_figure(figure):
    """Returns the labels, the lines `(label, number of points)` and the legend of each axes."""
    return [
        (
            axes.get_xlabel(),
            axes.get_ylabel(),
            [(line.get_label(), len(line.get_xdata())) for line in axes.lines],
            [text.get_text() for text in axes.get_legend().get_texts()] if axes.get_legend() else None,
        )
        for axes in figure.axes
    ]


def test_plot_draws_train_and_test_together_and_other_names_side_by_side():
    history = two_curves()
    for steps in range(5, 51):
        history.commit(Elapsed(steps), {"train": {"loss": 0.1}})
    both = ("steps", "loss", [("train", 50), ("test", 2)], ["train", "test"])
    accuracy = ("steps", "accuracy", [("test.metrics", 2)], ["test.metrics"])
    assert describe_figure(history.plot("loss")) == [both]
    assert describe_figure(history.plot("loss", "accuracy")) == [both, accuracy]
    one, two = (axes.get_position() for axes in history.plot("loss", "accuracy").axes)
    assert one.x1 <= two.x0 and one.y0 == two.y0


@pytest.mark.parametrize(("smoothing", "expected"), [(0.0, [1.0, 4.0, 1.0]), (0.5, [1.0, 3.0, (0.25 + 2 + 1) / 1.75])])
def test_plot_smooths_with_a_moving_average_over_any_count(smoothing, expected):
    history = History()
    for samples, value in enumerate([1.0, 4.0, 1.0]):
        history.commit(Elapsed(0, samples), {"loss": value})
    (axes,) = history.plot("loss", x="samples", smoothing=smoothing).axes
    np.testing.assert_allclose(axes.lines[0].get_ydata(), expected)
    assert axes.get_xlabel() == "samples" and list(axes.lines[0].get_xdata()) == [0, 1, 2]


def test_plot_rejects_what_cannot_be_drawn():
    with pytest.raises(ValueError, match="No metric named 'epochs'"):
        two_curves().plot("train.loss", x="epochs")
    with pytest.raises(ValueError, match="No metric named 'note' was measured. There are: none"):
        history_of((1, {"note": "hello"})).plot("note")
    with pytest.raises(ValueError, match="There is nothing to plot"):
        History().plot()


def test_a_figure_displays_in_notebooks_without_importing_pyplot():
    had_pyplot = "matplotlib.pyplot" in sys.modules
    data, _ = DisplayFormatter().format(two_curves().plot("loss"))
    assert data["image/png"].startswith(b"\x89PNG")
    assert ("matplotlib.pyplot" in sys.modules) == had_pyplot


def train(directory, total):
    """Trains, or resumes from the newest checkpoint."""
    outer_loop = experiment(directory=directory, saves=every(steps=10), log_interval=every(steps=2))
    outer_loop(STATE, BATCHES, total)


def rows_of(directory):
    return [(row.elapsed.steps, row.logs) for row in History.load(directory / "history.jsonl")]


def edit_lines(change):
    def damage(path):
        path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))

    return damage


DAMAGES = {
    "truncated": (lambda path: os.truncate(path, path.stat().st_size // 3), "keeps 3 of 10 rows"),
    "deleted": (os.unlink, "keeps 0 of 10 rows. It was deleted."),
    "zero-filled": (lambda path: path.write_bytes(path.read_bytes()[:-200] + b"\0" * 200), "keeps 8 of 10 rows"),
    "edited": (lambda path: path.write_text(path.read_text().replace('"loss": ', '"loss": 1')), "keeps 10 of 10 rows"),
    "a line deleted": (edit_lines(lambda lines: lines[:3] + lines[4:]), "keeps 9 of 10 rows"),
    "one long line": (lambda path: path.write_bytes(b"[" * 40_000_000), "keeps 0 of 10 rows"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_resumed_run_warns_about_lost_rows(damage, tmp_path, warnings_logged):
    train(tmp_path, 20)
    path, (change, text) = tmp_path / "history.jsonl", DAMAGES[damage]
    before = rows_of(tmp_path)
    change(path)
    train(tmp_path, 26)
    said = [each for each in warnings_logged() if "has changed since the checkpoint of step 20 was saved" in each]
    assert len(said) == 1 and text in said[0]
    kept = [row for row in rows_of(tmp_path) if row[0] <= 20]
    assert [steps for steps, _ in kept] == sorted(steps for steps, _ in kept)
    assert damage == "edited" or all(row in before for row in kept)
    assert len(kept) == len(before) if damage == "edited" else len(kept) < len(before)
    assert path.with_name("history.jsonl.damaged").exists() == (damage != "deleted")


def test_rows_after_the_checkpoint_are_dropped_without_a_warning(tmp_path, warnings_logged):
    train(tmp_path / "whole", 26)
    expected = [steps for steps, _ in rows_of(tmp_path / "whole")]
    train(tmp_path / "broken", 20)
    path = tmp_path / "broken" / "history.jsonl"
    content = path.read_bytes()
    path.write_bytes(content + content.splitlines(keepends=True)[-1].replace(b'"steps": 20', b'"steps": 22') + b'{"ela')
    train(tmp_path / "broken", 26)
    assert [steps for steps, _ in rows_of(tmp_path / "broken")] == expected
    assert path.read_bytes().startswith(content)
    assert not [text for text in warnings_logged() if "history" in text]


def checksum(path):
    return {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def test_the_checksum_always_matches_the_file(tmp_path):
    path = tmp_path / "history.jsonl"
    history = History(path)
    for step in range(5):
        history.commit(Elapsed(step), {"loss": jnp.float32(step)})
        history.commit(Elapsed(step), {"on_host": step})
        assert history.checksum() == checksum(path)
    history.resume(3)
    assert history.checksum() == checksum(path)
    history.commit(Elapsed(4), {"loss": 1.0})
    history.save(path)
    assert history.checksum() == checksum(path)
    assert History().checksum() is None and History(path, writes=False).checksum() is None


@pytest.mark.parametrize(
    "change",
    [os.unlink, lambda path: os.truncate(path, 10), lambda path: path.write_bytes(path.read_bytes() + b"{}\n")],
    ids=["deleted", "truncated", "extended"],
)
def test_a_file_changed_externally_is_rewritten_with_all_rows(change, tmp_path, warnings_logged):
    path = tmp_path / "history.jsonl"
    history = History(path)
    for step in range(4):
        history.commit(Elapsed(step), {"loss": float(step)})
    change(path)
    for step in range(4, 6):
        history.commit(Elapsed(step), {"loss": float(step)})
    assert [json.loads(line)["elapsed"]["steps"] for line in path.read_text().splitlines()] == [0, 1, 2, 3, 4, 5]
    assert history.checksum() == checksum(path)
    assert [text for text in warnings_logged() if "written again, with all 5 rows" in text]
