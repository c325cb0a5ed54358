"""Runs the benchmarks at a tiny size, to test their results and reports rather than the speed."""

import dataclasses
import json
import pathlib

import jax
import numpy as np
import pytest

import jaxloop
from benchmarks import contestants, lineup, moments, part, report, rounds, targets, transformer, workloads
from benchmarks.contestants import Absent, Trained
from benchmarks.lineup import DEFAULTS, FIT, FUNCTIONAL, FUSED, KERAS, REFERENCE, SCAN
from benchmarks.rounds import Comparison, Spread, compare, take_turns
from benchmarks.targets import Target


@pytest.fixture(autouse=True)
def collections(monkeypatch):
    """Records garbage collections instead of running them, which is slow after many other tests."""
    noted = []
    monkeypatch.setattr(rounds.gc, "collect", lambda: noted.append("collected"))
    return noted


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


@pytest.mark.parametrize("contestant", [contestants.hand_written_loop, contestants.hand_written_scan, None])
def test_training_on_several_devices_matches_one_device(contestant):
    workload = workloads.workload("W4", num_devices=2)
    contestant = contestant or contestants.train_loop(contestants.data_parallel)
    trained = contestant(workload)(32)
    expected = contestants.hand_written_loop(dataclasses.replace(workload, num_devices=1))(32)
    assert len(jax.tree.leaves(trained.params)[0].sharding.device_set) == 2
    assert workload.final_loss(trained.params) == pytest.approx(workload.final_loss(expected.params), rel=1e-4)


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


def test_contestants_take_turns_in_rotating_order(collections):
    calls = []
    contestants = {name: lambda name=name: calls.append(name) or len(calls) for name in "ABC"}
    results = take_turns(contestants, num_rounds=3, num_warmup=1)
    assert calls == [*"ABC", *"BCA", *"CAB", *"ABC"]
    assert [each["A"] for each in results] == [6, 8, 10]  # Without the warmup round.
    assert len(collections) == 12  # One before each call.


def test_ratios_compare_times_within_a_round(w0):
    # The machine is ten times slower in the second round, for both contestants.
    slow_then_fast = {"one": [1.0, 10.0, 2.0], "other": [1.1, 11.0, 2.2]}
    turns = {name: iter([0.0, *seconds]) for name, seconds in slow_then_fast.items()}

    def scripted(name):
        return lambda workload: lambda num_steps: Trained(next(turns[name]), 0.5, workload.first_params)

    comparison = compare(w0, {name: scripted(name) for name in turns}, num_rounds=3, num_steps=32)
    assert comparison.seconds == slow_then_fast
    assert comparison.cpu_seconds == {"one": [0.5] * 3, "other": [0.5] * 3}
    assert comparison.ratios("other") == pytest.approx([1.1, 1.1, 1.1])
    assert comparison.times("one") == Spread(median=2.0, least=1.0, greatest=10.0)


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


def test_target_is_a_ratio_or_a_figure():
    measured = {"W0": MEASURED}
    assert Target("W0", FUNCTIONAL, 1.1).measured(measured) == pytest.approx(1.15)
    assert Target("W0", FIT, 1.1, against=FUNCTIONAL).measured(measured) == pytest.approx((14 / 12 + 28 / 22) / 2)
    assert Target("W0", "us a boundary", 10, against=None).measured(measured) == 7.0
    assert (
        Target("W0", KERAS, 1.1).measured(measured) is None and Target("W1", DEFAULTS, 1.1).measured(measured) is None
    )


def test_each_target_refers_to_a_measurement():
    known = {name: set(lineup.contestants_for(workloads.workload(name))) for name in workloads.NAMES}
    for target in targets.TARGETS:
        if target.comparison in known:
            assert {target.name, target.against} <= known[target.comparison]
        else:
            assert target.comparison in moments.MOMENTS
    assert set(targets.REASONS) <= {(target.comparison, target.name) for target in targets.TARGETS}


def test_part_runs_in_a_new_process_with_the_requested_devices(monkeypatch):
    started = []

    def run(command, env, check):
        started.append((command, env))
        pathlib.Path(command[4]).write_text(json.dumps([dataclasses.asdict(MEASURED)]))

    monkeypatch.setattr(part.subprocess, "run", run)
    assert part.measure("W4", num_rounds=3, num_steps=None, num_devices=2) == [MEASURED]
    ((command, environment),) = started
    assert command[1:4] == ["-m", "benchmarks.part", "W4"] and command[5:] == ["--rounds=3", "--devices=2"]
    assert environment["XLA_FLAGS"] == "--xla_force_host_platform_device_count=2"
    assert environment["NPROC"] == "32" and environment["JAX_PLATFORMS"] == "cpu"


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


def test_large_transformer_has_the_size_of_gpt_2():
    workload = transformer.workload()
    with jax.numpy_dtype_promotion("standard"):
        variables = jax.eval_shape(workload.model.init, jax.random.key(0), np.zeros([1, 1024], np.int32))
    num_params = sum(leaf.size for leaf in jax.tree.leaves(variables))
    assert round(num_params / 1e6) == 124
    # 6 N FLOPs per token, and about a seventh more for attention.
    assert transformer.step_flops(workload.model, num_params, 1) == pytest.approx(6 * num_params * 1024, rel=0.15)
