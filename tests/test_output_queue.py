"""Outputs arrive on the host in order and without loss, and the number of pending ones is bounded."""

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clu import metrics as clu_metrics
from programs.scores import Scores, scores

from jaxloop import metrics
from jaxloop.metrics import summarize
from jaxloop.output_queue import OutputQueue


def push_all(queue, steps):
    """Pushes the outputs of all steps; returns the outputs that arrive, step by step, and the merged metrics."""
    rows = []
    for outputs in steps:
        queue.newest.append(outputs)
        rows += queue.push(1, state=jnp.zeros(())).rows()
    rest, merged = queue.drain()
    return [*rows, *rest.rows()], merged


@pytest.mark.parametrize("is_on_host", [True, False])
@pytest.mark.parametrize("num_steps", [0, 1, 3, 4, 5, 8, 9, 21])
def test_a_queue_loses_nothing_and_keeps_the_order(num_steps, is_on_host):
    steps = [{"loss": jnp.float32(i)} for i in range(num_steps)]
    arrived, merged = push_all(OutputQueue(8, is_on_host=is_on_host), steps)
    assert [outputs["loss"] for outputs in arrived] == list(range(num_steps))
    assert all(isinstance(outputs["loss"], np.float32) for outputs in arrived)
    assert merged == {}


@pytest.mark.parametrize("is_on_host", [True, False])
@pytest.mark.parametrize(("options", "shape", "most"), [((8,), (), 8), ((8, 40), (), 40), ((8, 40), (2,), 8)])
def test_a_queue_holds_a_bounded_number_of_steps(options, shape, most, is_on_host):
    queue, waiting, held = OutputQueue(*options, is_on_host=is_on_host), 0, []
    most = 8 if is_on_host else most
    for _ in range(200):
        queue.newest.append({"x": jnp.zeros(shape)})
        waiting += 1 - len(queue.push(1, state=None).rows())
        held.append(waiting)
    assert most - 4 <= max(held) <= most


def test_a_queue_accepts_steps_without_outputs():
    arrived, _ = push_all(OutputQueue(4), [None, {"a": jnp.ones(())}, None, None, None])
    assert [outputs is None for outputs in arrived] == [True, False, True, True, True]


def test_outputs_computed_in_host_memory_are_taken_without_a_read(monkeypatch):
    taken, view = [], metrics.view
    monkeypatch.setattr(metrics, "view", lambda tree: taken.append(metrics.is_ready(tree)) or view(tree))
    monkeypatch.setattr(metrics, "fetch", lambda tree: pytest.fail("The devices were read."))
    queue, arrived = OutputQueue(8, 1000, is_on_host=True), []
    for number in range(100):
        queue.newest.append({"loss": jnp.float32(number)})
        arrived += queue.push(1, state=None).rows()
    assert len(taken) == 24 and all(taken)
    assert [outputs["loss"] for outputs in arrived] == list(range(96))


def test_a_typed_key_can_be_an_output():
    steps = [{"a_key": jax.random.key(number), "loss": jnp.float32(number)} for number in range(100)]
    arrived, _ = push_all(OutputQueue(8, 1000), steps)
    assert [outputs["loss"] for outputs in arrived] == list(range(100))
    assert all(jnp.array_equal(row["a_key"], step["a_key"]) for row, step in zip(arrived, steps, strict=True))


def test_outputs_that_are_not_computed_yet_are_not_taken(monkeypatch):
    monkeypatch.setattr(metrics, "is_ready", lambda value: False)
    queue = OutputQueue(8, 1000, is_on_host=True)
    for number in range(100):
        queue.newest.append({"loss": jnp.float32(number)})
        assert queue.push(1, state=None).rows() == []
    assert [outputs["loss"] for outputs in queue.drain()[0].rows()] == list(range(100))


@pytest.mark.parametrize("num_steps", [1, 3, 4, 9])
def test_clu_metrics_are_merged_on_the_device_and_computed_once(num_steps, monkeypatch):
    rng = np.random.default_rng(0)
    batches = [(rng.normal(size=(n, 3)).astype(np.float32), rng.integers(3, size=n)) for n in range(2, 2 + num_steps)]
    states = [{"scores": jax.jit(scores)(*batch), "other": jnp.ones(())} for batch in batches]

    reads, fetch = [], metrics.fetch
    monkeypatch.setattr(metrics, "fetch", lambda tree: reads.append(tree) or fetch(tree))
    arrived, merged = push_all(OutputQueue(8), states)
    read_before_the_end = jax.tree.leaves(reads[:-1], is_leaf=lambda node: isinstance(node, Scores))
    assert not any(isinstance(leaf, Scores) for leaf in read_before_the_end)
    assert all(set(outputs) == {"other"} for outputs in arrived)

    logits, labels = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    expected = np.mean(np.argmax(logits, -1) == labels)
    summary = summarize({"scores": [merged["scores"]]})
    assert summary["scores/accuracy"] == pytest.approx(expected)
    assert set(summary) == {"scores/accuracy", "scores/loss"}


def test_collecting_metrics_are_merged_on_the_host():
    collecting = clu_metrics.CollectingMetric.from_outputs(("labels",))
    steps = [{"all": collecting.from_model_output(labels=jnp.arange(3) + i)} for i in range(5)]
    _, merged = push_all(OutputQueue(4), steps)
    np.testing.assert_array_equal(
        merged["all"].compute()["labels"], np.concatenate([np.arange(3) + i for i in range(5)])
    )


@pytest.mark.parametrize("is_on_host", [True, False])
def test_outputs_reported_by_only_some_steps_of_a_chunk_arrive(is_on_host):
    steps = [{"loss": jnp.float32(i)} | ({"rare": jnp.ones(2)} if i % 20 == 19 else {}) for i in range(80)]
    steps[40] = {"first": jnp.int32(1), "loss": jnp.float32(40)}
    arrived, _ = push_all(OutputQueue(64, is_on_host=is_on_host), steps)
    assert [list(outputs) for outputs in arrived] == [list(outputs) for outputs in steps]
    assert [outputs["loss"] for outputs in arrived] == list(range(80))
    assert all(np.all(outputs.get("rare", 1) == 1) and outputs["loss"].dtype == np.float32 for outputs in arrived)


def test_the_scalars_of_a_chunk_are_transferred_as_one_array(monkeypatch):
    reads, fetch = [], metrics.fetch
    monkeypatch.setattr(metrics, "fetch", lambda tree: reads.extend(jax.tree.leaves(tree)) or fetch(tree))
    arrived, _ = push_all(
        OutputQueue(64, is_on_host=False), [{"loss": jnp.float32(i), "n": jnp.int32(i)} for i in range(64)]
    )
    assert len(reads) == 2 * 2 and [outputs["n"] for outputs in arrived] == list(range(64))


def test_metrics_with_equal_fields_are_merged_by_their_own_classes():
    def metric_class(number):
        @flax.struct.dataclass
        class Sum(clu_metrics.Metric):
            total: jax.Array

            def merge(self, other):
                return type(self)(self.total + jnp.float32(number))

        return Sum

    classes = [metric_class(number) for number in range(30)]
    steps = [{f"sum_{number}": cls(np.float32(0)) for number, cls in enumerate(classes)}] * 2
    _, merged = push_all(OutputQueue(4), steps)
    assert {name: (type(sum), sum.total) for name, sum in merged.items()} == {
        f"sum_{number}": (cls, number) for number, cls in enumerate(classes)
    }
