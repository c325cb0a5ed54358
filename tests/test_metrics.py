import dataclasses
import json

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clu import metrics as clu_metrics
from programs.scores import scores

from jaxloop import metrics, types
from jaxloop.metrics import LoopOutputs, summarize
from jaxloop.types import MetricType, MetricWithMetadata


def test_a_mean_is_weighted_by_examples():
    outputs = LoopOutputs({"loss": [np.float32(1), np.float32(2), np.float32(6)]}, num_examples=[32, 32, 8])
    assert summarize(outputs) == {"loss": (32 + 64 + 48) / 72}
    assert summarize(dict(outputs)) == {"loss": 3.0}  # A plain dict has no weights.


def test_steps_without_the_value_or_without_examples_have_no_weight():
    outputs = LoopOutputs({"loss": [np.float32(1), None, np.float32(np.nan), np.float32(4)]}, [20, 30, 0, 10])
    assert summarize(outputs) == {"loss": 2.0}
    assert summarize(LoopOutputs({"loss": [1.0]}, [0])) == {}


@pytest.mark.parametrize(
    "outputs",
    [
        {"loss": [types.Weighted.of(1.0, -1.0), types.Weighted.of(2.0, 3.0)]},
        LoopOutputs({"loss": [np.float32(1), np.float32(2)]}, [-1, 3]),
    ],
)
def test_a_negative_weight_raises(outputs):
    with pytest.raises(ValueError, match="The weights of 'loss' must not be negative, got -1"):
        summarize(outputs)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3, 3.0),
        (np.float32(0.5), 0.5),
        (jnp.float32(0.5), 0.5),
        ([True, False], 0.5),
        (jnp.array(2, jnp.int32), 2.0),
        ([jnp.bfloat16(1.5), jnp.bfloat16(2.5)], 2.0),
        ([MetricWithMetadata(np.float32(2)), MetricWithMetadata(np.float32(4))], 3.0),
        (clu_metrics.Average(total=jnp.float32(6), count=jnp.float32(4)), 1.5),
        ([float("nan"), 1.0], float("nan")),
    ],
)
def test_scalars_of_every_kind_are_summarized(value, expected):
    assert summarize({"x": value})["x"] == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize("value", [[np.zeros(3)], "text", [MetricWithMetadata(np.zeros(2), MetricType.HISTOGRAM)]])
def test_values_that_are_not_scalars_are_omitted(value):
    assert summarize({"x": value}) == {}


def test_each_of_several_metrics_is_summarized():
    mean = lambda total: [clu_metrics.Average(total=jnp.float32(total), count=jnp.float32(4))]
    assert metrics.summarize({"a": mean(6), "b": mean(8), "c": [1.0], "d": mean(10)}) == dict(a=1.5, b=2, c=1, d=2.5)


def test_the_stop_flag_is_not_a_metric():
    assert summarize({types.STOP_LOOP: True, "loss": [1.0]}) == {"loss": 1.0}


def test_media_have_the_right_type():
    _, found = metrics.scalars_and_media(
        {
            "images": [np.zeros([2, 8, 8, 3]), np.ones([2, 8, 8, 3])],
            "per_example": [np.zeros(3), np.ones(2)],
            "weights": [MetricWithMetadata(np.zeros([2, 2]), MetricType.HISTOGRAM, {"num_buckets": 5})] * 2,
            "sound": [MetricWithMetadata(np.zeros([1, 9, 1]), MetricType.AUDIO, {"sample_rate": 8000})],
            "note": "hello",
            "loss": [1.0],
        }
    )
    assert {name: metric.type for name, metric in found.items()} == {
        "images": MetricType.IMAGE,
        "per_example": MetricType.HISTOGRAM,
        "weights": MetricType.HISTOGRAM,
        "sound": MetricType.AUDIO,
        "note": MetricType.TEXT,
    }
    assert found["images"].value.max() == 1  # From the last step.
    np.testing.assert_array_equal(found["per_example"].value, [0, 0, 0, 1, 1])
    assert found["weights"].value.shape == (8,)


def test_outputs_of_several_loops_are_joined_with_their_weights():
    seen = LoopOutputs()
    for loss, rate, number in ((1.0, 5.0, 10), (4.0, 7.0, 20)):
        arrays = {"images": [np.full([1, 2, 2, 1], rate)], "table": [np.full([8, 8], rate)]}
        seen.extend(LoopOutputs({"loss": [loss], **arrays, "rate": rate}, num_examples=[number]))
    assert summarize(seen) == {"loss": 3.0, "rate": 7.0}
    assert len(seen["images"]) == len(seen["table"]) == 1  # Only the newest are kept.


@pytest.mark.parametrize("kind", [MetricType.IMAGE, MetricType.HISTOGRAM, MetricType.AUDIO])
def test_only_the_newest_media_of_several_loops_are_kept(kind):
    seen = LoopOutputs()
    for _ in range(4):
        seen.extend(LoopOutputs({"x": [MetricWithMetadata(np.zeros([1, 2, 2, 1]), kind)] * 3}, num_examples=[1] * 3))
    assert len(seen["x"]) == 3


def two_parts_of_a_loop():
    """Returns outputs of every kind, once of three steps and once of one step."""
    logits, labels = np.float32([[1, 0, 2], [0, 1, 0]]), jnp.array([2, 1], jnp.int32)
    parts = []
    for number in (3, 1):
        rows = range(number)
        image = MetricWithMetadata(np.full((1, 2, 2, 1), number), MetricType.IMAGE)
        values = {
            "loss": [np.float32(0.1 * number + row) for row in rows],
            "half": [np.asarray(jnp.bfloat16(0.3 * row))[()] for row in rows],
            "scores": [metrics.fetch(scores(logits * number, labels))],
            "seen": [
                metrics.fetch(clu_metrics.CollectingMetric.from_outputs(("y",))(values={"y": (np.ones(number),)}))
            ],
            "typed": [MetricWithMetadata(np.float32(row), metadata={"unit": "m"}) for row in rows],
            "image": [image] * number,
            "none": [None] * number,
            "total": 3.5,
        }
        parts.append(LoopOutputs(values, num_examples=[4 + row for row in rows]))
    return parts


def metrics_as_dicts(outputs):
    """Replaces metrics with dicts of their fields, because `from_outputs` creates a new class each time."""
    plain = lambda value: dataclasses.asdict(value) if metrics.is_metric(value) else value
    return jax.tree.map(plain, dict(outputs), is_leaf=metrics.is_metric)


def test_outputs_restored_from_a_checkpoint_extend_like_the_originals():
    (one, two), (kept, later) = two_parts_of_a_loop(), two_parts_of_a_loop()
    encoded, left_out = kept.encode()
    kept = LoopOutputs.decode(json.loads(json.dumps(encoded)))
    assert left_out == [] and metrics.newest_scalars(kept)["loss"] == np.float32(2.3)
    one.extend(two)
    kept.extend(later)
    assert kept.num_examples == one.num_examples == [4, 5, 6, 4]
    plain, as_ever = metrics_as_dicts(kept), metrics_as_dicts(one)
    assert jax.tree.structure(plain) == jax.tree.structure(as_ever)
    assert [str(leaf) for leaf in jax.tree.leaves(plain)] == [str(leaf) for leaf in jax.tree.leaves(as_ever)]
    assert summarize(kept) == summarize(one) and "scores/accuracy" in summarize(one)


def test_encode_names_outputs_that_cannot_be_saved():
    encoded, left_out = LoopOutputs({"loss": [1.0], "odd": [object()]}, [4]).encode()
    assert list(encoded["values"]) == ["loss"] and left_out == ["odd"]


@flax.struct.dataclass
class Percentage(clu_metrics.Average):
    def compute(self):
        return 100 * super().compute()


@flax.struct.dataclass
class Both(clu_metrics.Collection):
    loss: clu_metrics.Average.from_output("loss")  # pyright: ignore
    last: clu_metrics.LastValue.from_output("loss")  # pyright: ignore


def through_json(outputs):
    return LoopOutputs.decode(json.loads(json.dumps(outputs.encode()[0])))


METRICS = {
    "of clu": clu_metrics.Average.from_model_output,
    "made of another": lambda values: clu_metrics.Average.from_output("x").from_model_output(x=values),
    "of a module": Percentage.from_model_output,
    "a collection": lambda values: Both.single_from_model_output(loss=values),
    "collecting": lambda values: clu_metrics.CollectingMetric.from_outputs(("x",)).from_model_output(x=values),
}


@pytest.mark.parametrize("make", METRICS.values(), ids=METRICS)
def test_restored_metrics_can_be_merged(make):
    parts = [LoopOutputs({"m": [make(jnp.float32(0.3) * jnp.arange(n, dtype=jnp.float32))]}, [1]) for n in (5, 7)]
    whole, kept = through_json(parts[0]), through_json(parts[1])
    whole.extend(kept)
    parts[0].extend(parts[1])
    assert summarize(whole) == summarize(parts[0]) and (summarize(whole) or make is METRICS["collecting"])


def test_a_metric_of_a_local_class_is_not_saved():
    @flax.struct.dataclass
    class PerMille(clu_metrics.Average):
        def compute(self):
            return 1000 * super().compute()

    encoded, left_out = LoopOutputs({"odd": [PerMille.from_model_output(jnp.arange(3.0))]}, [1]).encode()
    assert encoded["values"] == {} and left_out == ["odd"]
