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


# Each of these usual names is better if it is larger, or if it is smaller, or the user has to say so.
LARGER = """
accuracy test/accuracy test.accuracy Accuracy acc acc1 acc@5 val_acc acc_top1 top1_acc balanced_accuracy accuracy@1
top5_accuracy iou IoU iou_50 mIoU miou mean_iou dice dice_score f1 F1 F1@10 f1_score macro_f1 micro-f1 f1_macro auc AUC
auroc ap AP50 mAP mAP50 mAP@50 map_50 average_precision precision precision@5 recall Recall@10 recall_at_k bleu BLEU-4
rouge1 psnr PSNR ssim ndcg ndcg@10 mrr MRR@10 eval/mean_reward reward returns
"""
SMALLER = """
loss Loss val_loss test/loss accuracy/loss log_loss cross_entropy CrossEntropy nll NLL bce perplexity ppl mse MSE rmse
RMSE mae error error_rate test_error err top1_err top1_error brier brier_score wer WER cer FID fid FID@50k regret cost
dice_loss kl_loss b_loss reconstruction_loss
"""
UNCERTAIN = """
f score vqa_score inception_score top1 top5 correct elbo log_likelihood cider chrf exact_match EM win_rate success_rate
pass@1 spearman neg_mean_squared_error loss_improvement error_detection_accuracy neg_loss valAcc
loss_iou kl entropy distance edit_distance ece eer bpd bits_per_dim kid xent negative_accuracy inaccuracy accuracy_gap
1-accuracy -loss negloss errors_fixed error_free_rate error_correction_rate val_accuracy_degradation
accuracy_std loss_scale account_balance feature_map_size
"""


@pytest.mark.parametrize(("names", "expected"), [(LARGER, "max"), (SMALLER, "min"), (UNCERTAIN, None)])
def test_the_direction_of_usual_names_is_right_or_must_be_given(names, expected):
    found = {}
    for name in names.split():
        assert Monitor(name, "min").mode == "min" and Monitor(name, "max").mode == "max"
        try:
            found[name] = Monitor(name).mode
        except ValueError as error:
            found[name] = None
            assert f"{name!r} doesn't say whether larger" in str(error) and "mode='max'" in str(error)
    assert {name: mode for name, mode in found.items() if mode != expected} == {}


@pytest.mark.parametrize(
    ("mode", "value", "best", "min_delta", "improves"),
    [
        ("min", 0.4, 0.5, 0.0, True),
        ("min", 0.5, 0.5, 0.0, False),
        ("min", 0.4, 0.5, 0.2, False),
        ("max", 0.6, 0.5, 0.0, True),
        ("max", 0.6, 0.5, 0.2, False),
        ("max", math.nan, None, 0.0, False),
        ("min", math.inf, None, 0.0, True),
    ],
)
def test_improves(mode, value, best, min_delta, improves):
    assert Monitor("metric", mode).improves(value, best, min_delta) is improves


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


def test_a_metric_that_is_reported_later_warns_once(warnings_logged):
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
    (warning,) = warnings_logged()
    assert "No metric named 'test/accuracy' is measured. Available: valid/accuracy, " in warning
    assert "A later step may still measure it" in warning
    history.commit(Elapsed(4), {"test": {"accuracy": 0.8}})
    assert accuracy.measured(OUTPUTS, history, Elapsed(4)) == 0.8
    accuracy.check_was_measured()


@pytest.mark.parametrize(
    ("name", "rows", "nearest"),
    [
        ("acuracy", [(1, {"train": {"loss": 1.0}}), (1, {"test": {"accuracy": 0.9}})], "test/accuracy"),
        ("train/los", [(1, {"train": {"loss": 1.0}})], "train/loss"),
        ("test/accuracy", None, "metrics/recall"),
    ],
)
def test_an_unknown_name_warns_and_raises_at_the_end_of_the_run(name, rows, nearest, warnings_logged):
    monitor, message = Monitor(name, "max"), f"No metric named '{name}' is measured. Available: {nearest}, "
    assert monitor.measured(OUTPUTS, rows and history_of(*rows), Elapsed(1)) is None
    assert len(warnings_logged()) == 1 and message in warnings_logged()[0]
    with pytest.raises(ValueError, match=f"{message}.*Give the name"):
        monitor.check_was_measured()


def test_an_ambiguous_name_raises():
    history = history_of((1, {"test": {"accuracy": 0.9}, "valid": {"accuracy": 0.8}}))
    with pytest.raises(ValueError, match="'accuracy' is ambiguous: it may be any of test.accuracy, valid.accuracy"):
        Monitor("accuracy").measured(OUTPUTS, history, Elapsed(1))
    with pytest.raises(ValueError, match="'recall' is ambiguous: it may be any of a.recall, b.recall. Use one"):
        Monitor("recall").measured({"a/recall": 0.5, "b/recall": 0.5}, None, Elapsed(1))


def test_invalid_names_modes_and_values_raise():
    with pytest.raises(TypeError, match="must be a string such as 'test/accuracy', got None"):
        Monitor(None)
    with pytest.raises(ValueError, match="The mode of 'loss' must be 'auto', 'min' or 'max', got 'down'"):
        Monitor("loss", "down")
    with pytest.raises(TypeError, match="The monitored metric 'note' must be a number, got 'hello'"):
        Monitor("note", "max").measured(None, history_of((1, {"test": {"note": "hello"}})), Elapsed(1))
