import statistics
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from programs import tiny
from programs.acts import Do, Record, lengths
from programs.clock import Clock
from programs.tiny import BATCHES, STATE, STEP

import jaxloop
from jaxloop import Elapsed, actions, at, every, examples, last, metrics, stat_loop
from jaxloop.action_loop import ActionLoop
from jaxloop.train_loop import TrainLoop


def test_int_interval_counts_loops_and_accumulates_outputs():
    begin, each, second, third = lengths(2), lengths(), lengths(2), lengths(3)
    step, state, batches = examples.tiny_regression()
    loop = ActionLoop(step, begin_actions=[begin], end_actions=[each, second, third])
    for _ in range(4):
        state, _ = loop(state, batches, num_steps=5)
    assert begin.seen == [(5, None), (15, None)]
    assert each.seen == [(5, 5), (10, 5), (15, 5), (20, 5)]
    assert second.seen == [(10, 10), (20, 10)]
    assert third.seen == [(15, 15)]
    assert loop.loop_count == 4


def test_setting_loop_count_resumes_intervals():
    note = lengths(3)
    loop = TrainLoop(STEP, end_actions=[note])
    loop.loop_count = 2
    loop(STATE, BATCHES, num_steps=5)
    assert note.seen == [(5, 5)]
    with pytest.raises(ValueError, match="loop_count must be a non-negative int, got -1"):
        loop.loop_count = -1


# Inside the loop -----------------------------------------------------------------------------------


def calls(interval=1, **attributes):
    """Records the step, the step of the state, the outputs and the context of each call."""
    what = lambda state, outputs, **context: (context["step_num"], int(state.step), dict(outputs), context)
    return Record(interval, what, **attributes)


def means(interval):
    """Records the mean loss that each call receives."""
    return Record(interval, lambda outputs, **_: jaxloop.summarize(outputs)["loss"])


def test_scheduled_action_gets_its_steps_state_and_the_outputs_since_its_last_call():
    seen = calls(every(steps=7))
    loop = TrainLoop(STEP, end_actions=[seen])
    state, first = loop(STATE, BATCHES, num_steps=10)
    state, second = loop(state, BATCHES, num_steps=10)
    assert [(count, step_num) for count, step_num, _, _ in seen.seen] == [(7, 7), (14, 14)]
    losses = [*first["loss"], *second["loss"]]
    assert seen.seen[0][2]["loss"] == losses[:7]
    assert seen.seen[1][2]["loss"] == losses[7:14]
    assert len(second["loss"]) == 10


def test_mid_loop_action_gets_the_weighted_mean_over_its_interval():
    probe = means(every(steps=2))
    rows = lambda n, y: {"x": np.zeros([n, 3], np.float32), "y": np.full([n, 1], y, np.float32)}
    frozen = jax.tree.map(np.zeros_like, STATE.params)
    batches = [rows(6, 1.0), rows(2, 3.0), rows(1, 0.0), rows(3, 0.0)]
    ActionLoop(STEP, end_actions=[probe])(STATE.replace(params=frozen, tx=optax.set_to_zero()), batches)
    assert probe.seen == [pytest.approx((6 * 1.0 + 2 * 9.0) / 8), 0.0]


def test_action_without_outputs_does_not_synchronize(monkeypatch):
    waits = []
    state, _ = STEP(STATE, BATCHES[0])
    seen = calls(every(steps=2), uses_outputs=False)
    reads = lambda tree: any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(tree))
    for name in ("fetch", "wait"):
        real = getattr(metrics, name)
        monkeypatch.setattr(
            metrics, name, lambda tree, real=real: (reads(tree) and waits.append(len(seen.seen))) or real(tree)
        )
    TrainLoop(STEP, end_actions=[seen], stat_names=[])(state, BATCHES, num_steps=20)
    # It waits only for `state.step` (at the start, and when its first value is ready) and at the end.
    assert set(waits) == {0, 10}
    assert seen.seen[0][2] == {}


@pytest.mark.parametrize("nan_policy", ["ignore", "raise"])
def test_action_that_does_not_need_all_outputs_gets_the_newest_ready_values(nan_policy):
    seen = calls(every(steps=5), needs_all_outputs=False)
    _, outputs = TrainLoop(STEP, end_actions=[seen], nan_policy=nan_policy)(STATE, BATCHES, num_steps=200)
    assert any(given for _, _, given, _ in seen.seen)
    for _, _, given, _ in seen.seen:
        assert given.keys() <= {"loss"} and all(value in outputs["loss"] for value in given.values())


def test_action_is_called_at_most_once_per_step():
    seen = calls(every(steps=5) | every(loops=1) | last())
    TrainLoop(STEP, end_actions=[seen])(STATE, BATCHES[:10])  # The end of the data is known only after step 10.
    assert [step_num for step_num, *_ in seen.seen] == [5, 10]


def test_statistics_cover_the_time_since_the_last_call(set_clock):
    clock = set_clock(Clock())
    seen = calls(every(steps=4))
    loop = TrainLoop(STEP, end_actions=[seen], stat_names=stat_loop.ALL_STATS)
    loop(STATE, clock.during(BATCHES, [1, 1, 1, 1, 3, 3, 3, 3, 9]), num_steps=9)
    speeds = [outputs[stat_loop.STAT_STEPS_PER_SEC] for _, _, outputs, _ in seen.seen]
    assert speeds == [1, pytest.approx(1 / 3)]
    assert [kwargs["spent"].data for _, _, _, kwargs in seen.seen] == [4, 12]
    assert [kwargs["spent"].samples for _, _, _, kwargs in seen.seen] == [32, 32]
    assert loop.elapsed == Elapsed(9, 72, 25.0, 1)


@pytest.mark.parametrize("options", [{}, {"steps_per_dispatch": 4}, {"nan_policy": "raise"}])
def test_time_schedule_fires_after_the_step_or_dispatch(options, set_clock):
    clock, seen = set_clock(Clock()), calls(every(time=10))
    loop = TrainLoop(STEP, end_actions=[seen], **options)
    loop(STATE, clock.during((BATCHES * 100)[:100], [1] * 100), num_steps=100)
    called_at = [step_num for step_num, *_ in seen.seen]
    if not options.get("steps_per_dispatch"):
        assert called_at == [*range(10, 101, 10)]
    else:  # After the dispatch during which it becomes due.
        assert called_at == [12, 20, 32, 40, 52, 60, 72, 80, 92, 100]


def test_begin_action_schedule_is_checked_when_a_loop_begins():
    note = lengths(every(steps=10) | every(loops=3))
    step, state, batches = examples.tiny_regression()
    loop = TrainLoop(step, begin_actions=[note])
    for _ in range(5):
        state, _ = loop(state, batches, num_steps=4)
    assert [step_num for step_num, _ in note.seen] == [8, 12]


def test_step_action_schedule_counts_training_steps():
    begin = lengths(every(steps=4))
    loop, state = TrainLoop(tiny.make_step(begin_actions=[begin])), STATE
    for _ in range(3):
        state, _ = loop(state, BATCHES, num_steps=3)
    assert [step_num for step_num, _ in begin.seen] == [3, 7]  # Before updates 4 and 8.

    count = Record(every(samples=24), lambda elapsed, **_: (elapsed.steps, elapsed.samples))
    TrainLoop(tiny.make_step(end_actions=[count]))(STATE, BATCHES, num_steps=7)
    assert count.seen == [(3, 24), (6, 48)]


def test_memory_per_call_does_not_grow_with_a_loop_that_a_resume_continues(tmp_path):
    step, state, batches = examples.tiny_regression()
    allocated, current = [], 0

    def measure(**_):
        nonlocal current
        allocated.append(tracemalloc.get_traced_memory()[1] - current)
        current = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()

    def run(failing_batch, *more_actions):
        def get(index):
            if index == failing_batch:
                raise OSError("gone")
            return batches[index % len(batches)]

        train_loop = TrainLoop(step, end_actions=[actions.CheckpointAction(tmp_path, at(5)), *more_actions])
        spec = jaxloop.CheckpointSpec(tmp_path)
        outer_loop = jaxloop.OuterLoop(train_loop, checkpoint_spec=spec, log_interval=every(steps=50))
        outer_loop(jax.tree.map(jnp.copy, state), jaxloop.from_index(get), 4_000)

    with pytest.raises(OSError, match="gone"):
        run(7)
    tracemalloc.start()
    try:
        run(None, Do(measure, every(steps=50), uses_outputs=False))
    finally:
        tracemalloc.stop()
    early, late = statistics.median(allocated[5:25]), statistics.median(allocated[-20:])
    assert late - early < 10_000  # Bytes. A list with one number per step takes 32,000.
