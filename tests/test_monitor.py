import math

import numpy as np
import pytest

from jaxloop.actions import Monitor
from jaxloop.history import History
from jaxloop.metrics import LoopOutputs
from jaxloop.schedules import Elapsed


def history_of(*rows):
    history = History()
    for steps, logs in rows:
        history.commit(Elapsed(steps), logs)
    return history


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("loss", "min"),
        ("test/accuracy", "max"),
        ("test.accuracy", "max"),
        ("accuracy/loss", "min"),
        ("val_acc", "max"),
        ("top5", "max"),
        ("top1_error", "min"),
        ("brier_score", "min"),
        ("f1", "max"),
        ("eval/meanReward", "max"),
        ("episode_return", "max"),
        ("mIoU", "max"),
        ("account_balance", "min"),
        ("perplexity", "min"),
    ],
)
def test_the_mode_is_inferred_from_the_name(name, mode):
    assert Monitor(name).mode == mode
    assert Monitor(name, "min").mode == "min" and Monitor(name, "max").mode == "max"


@pytest.mark.parametrize(
    ("mode", "value", "best", "min_delta", "improves"),
    [
        ("min", 0.5, None, 0.0, True),
        ("min", 0.4, 0.5, 0.0, True),
        ("min", 0.5, 0.5, 0.0, False),
        ("min", 0.4, 0.5, 0.2, False),
        ("max", 0.6, 0.5, 0.0, True),
        ("max", 0.6, 0.5, 0.2, False),
        ("max", math.nan, None, 0.0, False),
        ("max", math.nan, 0.5, 0.0, False),
        ("min", math.inf, None, 0.0, True),
    ],
)
def test_improves(mode, value, best, min_delta, improves):
    assert Monitor("metric", mode).improves(value, best, min_delta) is improves


def test_has_failed():
    assert Monitor("loss").has_failed(math.nan) and Monitor("loss").has_failed(math.inf)
    assert not Monitor("loss").has_failed(-math.inf) and not Monitor("psnr").has_failed(math.inf)
    assert Monitor("psnr").has_failed(-math.inf)


OUTPUTS = LoopOutputs({"loss": [np.float32(1), np.float32(4)], "metrics/recall": [0.5, 0.5]}, [2, 1])


@pytest.mark.parametrize(
    ("name", "value"),
    [("loss", 2.0), ("train/loss", 2.0), ("train.loss", 2.0), ("metrics/recall", 0.5), ("recall", 0.5)],
)
def test_a_loop_output_is_measured_as_its_weighted_mean(name, value):
    assert Monitor(name).measured(OUTPUTS, None, Elapsed(2)) == value


def test_a_row_counts_only_at_its_own_step():
    history = history_of((100, {"train": {"loss": 1.0}}), (100, {"test": {"accuracy": 0.9}}))
    for name in ("test/accuracy", "test.accuracy", "accuracy"):
        assert Monitor(name).measured(OUTPUTS, history, Elapsed(100)) == 0.9
        assert Monitor(name).measured(OUTPUTS, history, Elapsed(200)) is None
    assert Monitor("loss").measured(OUTPUTS, history, Elapsed(100)) == 2.0  # The loop's own outputs take precedence.
    assert Monitor("loss").measured(None, history, Elapsed(100)) == 1.0


def test_a_metric_of_a_later_evaluation_is_not_an_error(warnings_logged):
    accuracy = Monitor("test/accuracy")
    assert accuracy.measured(OUTPUTS, History(), Elapsed(2)) is None
    history = history_of((2, {"train": {"loss": 1.0}}))
    assert accuracy.measured(OUTPUTS, history, Elapsed(2)) is None
    assert Monitor("accuracy").measured(OUTPUTS, history, Elapsed(2)) is None
    assert accuracy.measured(None, None, Elapsed(2)) is None  # As at the start of a loop.
    assert warnings_logged() == []
    history.commit(Elapsed(2), {"valid": {"accuracy": 0.9}})
    for _ in range(2):
        assert accuracy.measured(OUTPUTS, history, Elapsed(2)) is None
    assert len(warnings_logged()) == 1
    assert (
        "No metric named 'test/accuracy' is measured. Available: valid/accuracy, " in warnings_logged()[0]
        and "An evaluation named 'test' may still measure it" in warnings_logged()[0]
    )


@pytest.mark.parametrize(
    ("name", "rows", "nearest"),
    [
        ("acuracy", [(1, {"train": {"loss": 1.0}}), (1, {"test": {"accuracy": 0.9}})], "test/accuracy"),
        ("test/acuracy", [(1, {"test": {"accuracy": 0.9}})], "test/accuracy"),
        ("train/los", [(1, {"train": {"loss": 1.0}})], "train/loss"),
        ("los", None, "loss"),
        ("test/accuracy", None, "metrics/recall"),
    ],
)
def test_an_unknown_name_raises_and_lists_the_measured_names(name, rows, nearest):
    history = rows and history_of(*rows)
    with pytest.raises(
        ValueError, match=f"No metric named '{name}' is measured. Available: {nearest}, .*Give the name"
    ):
        Monitor(name).measured(OUTPUTS, history, Elapsed(1))


def test_an_ambiguous_name_raises():
    history = history_of((1, {"test": {"accuracy": 0.9}, "valid": {"accuracy": 0.8}}))
    with pytest.raises(ValueError, match="'accuracy' is ambiguous: it may be any of test.accuracy, valid.accuracy"):
        Monitor("accuracy").measured(OUTPUTS, history, Elapsed(1))
    with pytest.raises(ValueError, match="'recall' is ambiguous: it may be any of a/recall, b/recall. Use a full name"):
        Monitor("recall").measured({"a/recall": 0.5, "b/recall": 0.5}, None, Elapsed(1))


def test_a_monitored_metric_must_be_a_number():
    with pytest.raises(TypeError, match="The monitored metric 'note' must be a number, got 'hello'"):
        Monitor("note").measured(None, history_of((1, {"test": {"note": "hello"}})), Elapsed(1))


@pytest.mark.parametrize("name", ["", "/", None, 3])
def test_a_name_is_required(name):
    with pytest.raises(TypeError, match="must be a string such as 'test/accuracy', got"):
        Monitor(name)


def test_an_unknown_mode_is_rejected():
    with pytest.raises(ValueError, match="The mode of 'loss' must be 'auto', 'min' or 'max', got 'down'"):
        Monitor("loss", "down")
