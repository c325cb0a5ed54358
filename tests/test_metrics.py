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
    assert summarize({**outputs, types.STOP_LOOP: True}) == {"loss": 3.0}  # A plain dict has no weights.


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


def test_values_that_are_not_scalars_are_omitted():
    histogram = [MetricWithMetadata(np.zeros(2), MetricType.HISTOGRAM)]
    assert summarize({"array": [np.zeros(3)], "text": "text", "histogram": histogram}) == {}


def test_histograms_have_the_values_of_all_steps_and_other_media_those_of_the_last():
    scalars, found = metrics.scalars_and_media(
        {
            "images": [np.zeros([2, 8, 8, 3]), np.ones([2, 8, 8, 3])],
            "per_example": [np.zeros(3), np.ones(2)],
            "weights": [MetricWithMetadata(np.zeros([2, 2]), MetricType.HISTOGRAM, {"num_buckets": 5})] * 2,
            "note": "hello",
            "loss": [1.0],
        }
    )
    assert list(scalars) == ["loss"] and found["note"].type is MetricType.TEXT and found["images"].value.min() == 1
    assert found["per_example"].value.tolist() == [0, 0, 0, 1, 1] and found["weights"].value.shape == (8,)


def test_outputs_of_several_loops_are_joined_with_their_weights():
    seen = LoopOutputs()
    for loss, rate, number in ((1.0, 5.0, 10), (4.0, 7.0, 20)):
        arrays = {"images": [np.full([1, 2, 2, 1], rate)], "table": [np.full([8, 8], rate)]}
        seen.extend(LoopOutputs({"loss": [loss], **arrays, "rate": rate}, num_examples=[number]))
    assert summarize(seen) == {"loss": 3.0, "rate": 7.0}
    assert len(seen["images"]) == len(seen["table"]) == 1  # Only the newest are kept.


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
            "weighted": [types.Weighted(np.float32(0.1 * row), np.float32(row)) for row in rows],
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


def test_restored_metrics_of_a_class_that_clu_made_can_be_merged():
    make = lambda values: clu_metrics.Average.from_output("x").from_model_output(x=values)
    parts = [LoopOutputs({"m": [make(jnp.float32(0.3) * jnp.arange(n, dtype=jnp.float32))]}, [1]) for n in (5, 7)]
    whole, kept = (LoopOutputs.decode(json.loads(json.dumps(part.encode()[0]))) for part in parts)
    whole.extend(kept)
    parts[0].extend(parts[1])
    assert summarize(whole) == summarize(parts[0]) != {}


def test_a_metric_of_a_local_class_is_not_saved():
    @flax.struct.dataclass
    class PerMille(clu_metrics.Average):
        def compute(self):
            return 1000 * super().compute()

    values = {"loss": [1.0], "local": [PerMille.from_model_output(jnp.arange(3.0))], "odd": [object()]}
    encoded, left_out = LoopOutputs(values, [1]).encode()
    assert list(encoded["values"]) == ["loss"] and left_out == ["local", "odd"]
