import pytest
from programs.clock import Clock
from programs.tiny import BATCHES, STATE, STEP

from jaxloop import OuterLoop, TrainLoop, examples, metrics, stat_loop
from jaxloop.stat_loop import StatLoop


def test_statistics_are_plain_numbers(set_clock):
    clock = set_clock(Clock(100.0))
    loop = StatLoop(STEP, [*stat_loop.ALL_STATS, stat_loop.STAT_MFU])
    loop.peak_flops_per_sec = 1e9
    clock.now += 1
    _, outputs = loop(STATE, clock.during(BATCHES, 0.5), num_steps=10)
    assert (outputs[stat_loop.STAT_NUM_PARAMS], outputs[stat_loop.STAT_LIFE_TIME_SECS]) == (4, 6)
    assert (outputs[stat_loop.STAT_STEPS_PER_SEC], outputs[stat_loop.STAT_EXAMPLES_PER_SEC]) == (2, 16)
    assert outputs[stat_loop.STAT_LOOP_TIME_SECS] == 5
    assert outputs[stat_loop.STAT_BEGIN_TIME] >= outputs[stat_loop.STAT_INIT_TIME] > 1.7e9
    assert outputs[stat_loop.STAT_MFU] == outputs[stat_loop.STAT_NUM_FLOPS] * 2 / 1e9
    assert set(outputs) == {"loss", *stat_loop.ALL_STATS, stat_loop.STAT_MFU}
    assert all(isinstance(outputs[name], int | float) for name in outputs if name.startswith("jaxloop/"))


def test_statistics_cover_only_the_current_call(set_clock):
    clock = set_clock(Clock(100.0))
    loop = StatLoop(STEP, global_batch_size=64)
    state, _ = loop(STATE, clock.during(BATCHES, 5), num_steps=4)
    clock.now += 1000  # Time between two calls isn't counted.
    _, outputs = loop(state, clock.during(BATCHES, 1), num_steps=2)
    assert set(outputs) == {"loss", stat_loop.STAT_STEPS_PER_SEC, stat_loop.STAT_EXAMPLES_PER_SEC}
    assert (outputs[stat_loop.STAT_STEPS_PER_SEC], outputs[stat_loop.STAT_EXAMPLES_PER_SEC]) == (1, 64)
    assert loop.spent.data == loop.spent.total == 22


def test_times_are_taken_after_the_device_has_finished(monkeypatch):
    """Without outputs to read, the loop waits for the state itself."""
    waited = []
    wait = metrics.wait
    monkeypatch.setattr(metrics, "wait", lambda tree: waited.append(tree) or wait(tree))
    step, state, batches = examples.tiny_regression()
    step.end = lambda state, outputs: (state, None)
    state, _ = StatLoop(step)(state, batches, num_steps=3)
    assert waited[-1] is state


def test_an_unknown_statistic_raises_and_lists_the_known_ones():
    with pytest.raises(ValueError, match="'steps_per_sec', which is not one of .*jaxloop/steps_per_sec"):
        StatLoop(STEP, ["steps_per_sec"])


def test_the_flops_utilization_requires_the_peak_of_a_device():
    loop = StatLoop(STEP, [stat_loop.STAT_MFU])
    with pytest.raises(ValueError, match="Before the call, set the loop's peak_flops_per_sec"):
        loop(STATE, BATCHES, num_steps=1)
    (problem,) = OuterLoop(TrainLoop(STEP, [stat_loop.STAT_MFU])).check(STATE, BATCHES).errors
    assert problem.where == "the train loop" and "peak_flops_per_sec" in problem.text
