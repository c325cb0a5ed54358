"""Runs the benchmarks at a tiny size, to test their results and reports rather than the speed."""

import jax
import numpy as np
import pytest

import jaxloop
from benchmarks import contestants, lineup, moments, report, rounds, targets, transformer, workloads
from benchmarks.contestants import Absent
from benchmarks.lineup import DEFAULTS, FIT, FUNCTIONAL, FUSED, KERAS, REFERENCE, SCAN
from benchmarks.rounds import Comparison, compare


@pytest.fixture(autouse=True)
def no_collections(monkeypatch):
    """Skips garbage collections, which are slow after many other tests."""
    monkeypatch.setattr(rounds.gc, "collect", lambda: None)


@pytest.fixture
def w0():
    return workloads.workload("W0")


def test_contestants_train_alike_and_are_timed_in_each_round(w0):
    names = (REFERENCE, SCAN, DEFAULTS, FUSED, FUNCTIONAL)
    chosen = {name: lineup.contestants_for(w0)[name] for name in names}
    comparison = compare(w0, chosen, num_rounds=2, num_steps=64)
    assert comparison.reference == REFERENCE and {*comparison.seconds} == set(names) and not comparison.absent
    assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in comparison.seconds.values())


@pytest.mark.parametrize(
    "contestant",
    [
        contestants.fit,
        contestants.clu_style_loop,
        contestants.train_loop_with_logs,
        contestants.hand_written_loop_with_logs,
    ],
)
def test_slow_starting_contestants_train_alike(w0, contestant, writer, monkeypatch):
    writer.close = lambda: None
    monkeypatch.setattr(jaxloop, "default_writer", lambda workdir: writer)
    with jax.numpy_dtype_promotion("standard"):  # Needed by clu.
        trained = contestant(w0)(128)
    expected = contestants.hand_written_loop(w0)(128)
    assert trained.secs_per_step > 0 and trained.cpu_secs_per_step > 0
    assert w0.final_loss(trained.params) == pytest.approx(w0.final_loss(expected.params), rel=1e-4)


def test_contestant_with_different_training_raises(w0):
    def lazy(workload):
        train = contestants.hand_written_loop(workload)
        return lambda num_steps: train(num_steps - 32)

    with pytest.raises(AssertionError, match="lazy does not train W0 as diligent does"):
        compare(w0, {"diligent": contestants.hand_written_loop, "lazy": lazy}, num_rounds=1, num_steps=128)


def test_report_explains_an_absent_contestant(w0):
    def absent(workload):
        raise Absent("It is not installed.")

    comparison = compare(w0, {REFERENCE: contestants.hand_written_loop, "peer": absent}, num_rounds=1, num_steps=32)
    assert comparison.absent == {"peer": "It is not installed."}
    assert "peer was not run: It is not installed." in report.text_table(comparison)


MEASURED = Comparison(
    "W0",
    "a small model",
    REFERENCE,
    {REFERENCE: [1e-4, 2e-4], FUNCTIONAL: [1.2e-4, 2.2e-4], FIT: [1.4e-4, 2.8e-4]},
    {KERAS: "It is not there yet."},
    figures={"us a boundary": 7.0},
    cpu_seconds={REFERENCE: [2e-4, 2e-4], FUNCTIONAL: [3e-4, 3e-4], FIT: [5e-5, 5e-5]},
)


def test_report_has_a_row_for_each_contestant_and_target(tmp_path):
    report.plot([MEASURED], tmp_path / "plot.png")
    text = report.markdown(
        [MEASURED], "python -m benchmarks", tmp_path / "plot.png", tmp_path / "BENCHMARKS.md", ["W3"]
    )
    assert "| hand-written loop | 150.0 | 1 | 200.0 |" in text
    assert "| functional loop | 170.0 | 1.150 (1.100 to 1.200) | 300.0 |" in text
    assert "| W0 | fit, without a bar / hand-written loop | 1.30 | 1.400 | **missed** |" in text
    assert "| W0 | functional loop / hand-written loop | 1.30 | 1.150 | met |" in text
    assert "| W0 | TrainLoop, steps_per_dispatch=32 / hand-written scan of 32 | 1.15 |  | not measured |" in text
    assert "Reasons for the missed targets:\n\n- **W0, fit, without a bar.** The reference drops its losses," in text
    assert "**W0, functional loop.**" not in text
    assert "- us a boundary: 7" in text and "not run: It is not there yet." in text
    assert "](plot.png)" in text and (tmp_path / "plot.png").stat().st_size > 1000
    assert "Not run: JAX found no GPU." in text and "### Failed\n\nW3." in text
    assert f"jax {jax.__version__}," in text


def test_each_target_refers_to_a_measurement():
    known = {name: set(lineup.contestants_for(workloads.workload(name))) for name in workloads.NAMES}
    for target in targets.TARGETS:
        if target.comparison in known:
            assert {target.name, target.against} <= known[target.comparison]
        else:
            assert target.comparison in moments.MOMENTS
    assert set(targets.REASONS) <= {(target.comparison, target.name) for target in targets.TARGETS}


@pytest.mark.parametrize(
    "moment",
    [
        lambda: moments.loop_boundary(num_rounds=1, num_steps=400),
        lambda: moments.short_loops(num_rounds=1, num_steps=40),
        lambda: moments.checkpoint_stall(1, num_rounds=1),
        lambda: moments.restore(1, num_rounds=1),
        lambda: moments.slow_data(1e-3, num_steps=5, num_rounds=1),
    ],
)
def test_moments_are_measured(moment):
    comparison = moment()
    assert min(min(seconds) for seconds in comparison.seconds.values()) > 0
    assert comparison.reference == next(iter(comparison.seconds))


def test_small_transformer_trains():
    model = transformer.Transformer(vocabulary=64, length=16, depth=1, width=32, num_heads=2)
    workload = transformer.workload(model, batch_size=2)
    with jax.numpy_dtype_promotion("standard"):  # Needed by Flax's LayerNorm.
        trained = contestants.train_loop()(workload)(3)
    for before, after in zip(*map(jax.tree.leaves, (workload.first_params, trained.params)), strict=True):
        assert after.dtype == np.float32 and np.isfinite(after).all() and np.any(before != np.asarray(after))
