"""Tests of schedules: their algebra, and whole runs compared with a reference that checks every step."""

import dataclasses
import itertools
from unittest import mock

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn
from hypothesis import example, given, settings
from hypothesis import strategies as st
from programs.acts import Record, saving
from programs.clock import Clock

import jaxloop
from jaxloop import Elapsed, after, at, every, examples, first, last
from jaxloop import functional as jf
from jaxloop.base import timing
from jaxloop.schedules import always, never

# The algebra ---------------------------------------------------------------------------------------


def firings(schedule, steps=20):
    return [step for step in range(1, steps + 1) if schedule(Elapsed(step))]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (every(5), [5, 10, 15, 20]),
        (every(steps=7), [7, 14]),
        (at(3), [3]),
        (after(18), [18, 19, 20]),
        (first(), [1]),
        (last(), []),
        (always(), list(range(1, 21))),
        (never(), []),
        (every(5) | at(7), [5, 7, 10, 15, 20]),
        (every(5) & every(2), [10, 20]),
        (every(5) & ~at(10), [5, 15, 20]),
        (~after(3), [1, 2]),
    ],
    ids=repr,
)
def test_schedules_fire_at_the_expected_steps(schedule, expected):
    assert firings(schedule) == expected


def test_schedules_are_immutable_and_hashed_by_identity():
    one, two = every(1), every(1)
    assert len({one: "a", two: "b"}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.value = 2


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        (every(100) | first() & ~at(time=60), "every(steps=100) | at(steps=1) & ~at(time=60.0)"),
        ((every(loops=2) | last()) & after(samples=5), "(every(loops=2) | last()) & after(samples=5)"),
        (~(always() | never()), "~(every(steps=1) | never())"),
    ],
)
def test_repr_is_the_expression(schedule, text):
    assert repr(schedule) == text


@pytest.mark.parametrize("join", [lambda a, b: a or b, lambda a, b: not a], ids=["or", "not"])
def test_using_a_schedule_as_a_bool_raises(join):
    with pytest.raises(TypeError, match=r"is neither true nor false\. Join schedules with \|, & and ~"):
        join(every(100), last())


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: every(), ValueError, r"every\(...\) takes one of steps, samples, time and loops, got none of them"),
        (lambda: every(5, time=60), ValueError, r"got steps=5, time=60. Join two schedules with"),
        (lambda: every(0), ValueError, r"every\(steps=...\) takes a number of steps, positive, got 0"),
        (lambda: at(-1), ValueError, r"at\(steps=...\) takes a number of steps, not negative, got -1"),
        (lambda: every(time=-1.0), ValueError, r"every\(time=...\) takes seconds, positive, got -1.0"),
        (lambda: every(1.5), TypeError, r"takes a number of steps, got 1.5"),
        (lambda: every(True), TypeError, r"takes a number of steps, got True"),
        (lambda: every(5) | 10, TypeError, "only with another schedule, .*got 10"),
    ],
)
def test_invalid_schedules_raise(make, error, message):
    with pytest.raises(error, match=message):
        make()


# In whole runs -------------------------------------------------------------------------------------


@dataclasses.dataclass
class Plan:
    """A schedule and its reference implementation, which returns True if it fires between `before` and `now`."""

    schedule: jaxloop.Schedule
    fires: object

    def __repr__(self):
        return repr(self.schedule)


def counted(unit, value):
    count = lambda row: getattr(row, unit)
    return [
        Plan(every(**{unit: value}), lambda before, now: count(now) // value > count(before) // value),
        Plan(at(**{unit: value}), lambda before, now: count(before) < value <= count(now)),
        Plan(after(**{unit: value}), lambda before, now: count(now) >= value and now.steps > before.steps),
    ]


PLAIN = [
    Plan(first(), lambda before, now: before.steps == 0 < now.steps),
    Plan(last(), lambda before, now: now.is_last),
    Plan(always(), lambda before, now: now.steps > before.steps),
    Plan(never(), lambda before, now: False),
]
UNITS = {"steps": st.integers(1, 25), "samples": st.integers(1, 150), "loops": st.integers(1, 6)}
leaves = st.one_of(
    st.sampled_from(PLAIN),
    *(values.flatmap(lambda value, unit=unit: st.sampled_from(counted(unit, value))) for unit, values in UNITS.items()),
    st.integers(1, 20).flatmap(lambda half_seconds: st.sampled_from(counted("time", half_seconds / 2))),
)


def either(one, two):
    return Plan(one.schedule | two.schedule, lambda *step: one.fires(*step) or two.fires(*step))


def both(one, two):
    return Plan(one.schedule & two.schedule, lambda *step: one.fires(*step) and two.fires(*step))


def inverted(plan):
    return Plan(~plan.schedule, lambda before, now: now.steps > before.steps and not plan.fires(before, now))


def joined(plans):
    return st.one_of(st.builds(either, plans, plans), st.builds(both, plans, plans), st.builds(inverted, plans))


few = lambda least, most: st.lists(st.integers(least, most), min_size=1, max_size=3)
half_second_within_step_2 = Plan(
    every(steps=2) & every(time=0.5),
    lambda before, now: now.steps % 2 == 0 and now.time // 0.5 > before.time // 0.5,
)
half_second_then_second = Plan(
    at(time=0.5) & every(time=1.0),
    lambda before, now: before.time < 0.5 <= now.time and now.time // 1 > before.time // 1,
)
plans = st.recursive(leaves, joined, max_leaves=4)


class CountingStep(jaxloop.Step):
    """Counts updates as a real train step does."""

    def run(self, state, batch):
        return state.apply_gradients(grads=state.params), {"mean": batch["x"].mean()}

    def num_examples(self, batch):
        return int(batch["samples"])


TRAIN_STEP = CountingStep(jax.random.key(0), nn.Dense(1), optax.sgd(0.1), train=True)
EVAL_STEP = CountingStep(jax.random.key(0), nn.Dense(1))
STATE = jax.tree.map(np.asarray, TRAIN_STEP.initialize_model([1, 1]))


def batches_of(run, clock, first_step):
    """Yields one batch per step, which contains the step number, and advances the clock."""
    for before, now in itertools.pairwise(run[first_step:]):
        clock.now += now.time - before.time
        yield {"x": np.full([2, 1], now.steps, np.float32), "samples": np.int32(now.samples - before.samples)}


def whole_run(total, loop_steps, samples, half_seconds):
    """Returns the `Elapsed` before the first step and after each step."""
    rows = [Elapsed()]
    for step in range(1, total + 1):
        before, is_last = rows[-1], step == total
        seconds = before.time + half_seconds[step % len(half_seconds)] / 2
        loops = before.loops + (step % loop_steps == 0 or is_last)
        rows.append(Elapsed(step, before.samples + samples[step % len(samples)], seconds, loops, is_last=is_last))
    return rows


@settings(deadline=None, max_examples=80)
@given(
    plan=plans,
    total=st.integers(1, 40),
    loop_steps=st.integers(1, 45),
    resumed_at=st.integers(0, 39),
    samples=few(1, 9),
    half_seconds=few(0, 3),
    log_interval=st.sampled_from([1, 5, never()]),  # Unless it is 1, loops are joined.
)
@example(half_second_within_step_2, 4, 4, 0, [1], [0, 1], never())  # The time passes in steps 1 and 3.
@example(half_second_then_second, 2, 2, 0, [1], [1], never())  # Each of the two fires in another step.
def test_actions_and_evaluations_match_the_reference(
    plan, total, loop_steps, resumed_at, samples, half_seconds, log_interval
):
    resumed_at = min(resumed_at, total - 1)
    run = whole_run(total, loop_steps, samples, half_seconds)
    expected = [step for step in range(resumed_at + 1, total + 1) if plan.fires(run[step - 1], run[step])]

    what = lambda step_num, outputs, **_: (step_num, list(outputs.get("mean", ())))
    clock, action, evaluation = Clock(), Record(plan.schedule, what), Record()
    with mock.patch.object(timing, "clock", clock):
        train_loop = jaxloop.TrainLoop(TRAIN_STEP, end_actions=[action], stat_names=[])
        eval_loop = jaxloop.EvalLoop(EVAL_STEP, end_actions=[evaluation], stat_names=[])
    train_loop.resume(dataclasses.replace(run[resumed_at], loops=resumed_at // loop_steps))
    outer_loop = jaxloop.OuterLoop(train_loop, [eval_loop], log_interval=log_interval)
    batches = batches_of(run, clock, resumed_at)
    spec = jaxloop.EvalSpec([{"x": np.ones([2, 1], np.float32), "samples": 1}], interval=plan.schedule)
    state, _ = outer_loop(STATE.replace(step=np.int32(resumed_at)), batches, total, loop_steps, [spec])
    assert int(state.step) == total
    assert [step for step, _ in action.seen] == evaluation.seen == expected
    # Each output is seen exactly once, and not before its step.
    seen = [value for _, values in action.seen for value in values]
    assert seen == list(range(resumed_at + 1, max(expected, default=resumed_at) + 1))
    assert train_loop.elapsed == run[-1]


@pytest.mark.parametrize(
    ("call", "meant"),
    [
        (lambda: every(epochs=1), "every has no argument 'epochs'. Did you mean loops"),
        (lambda: jaxloop.fit(None, [], epochs=2), "fit has no argument 'epochs'. Did you mean train_epochs"),
        (lambda: jaxloop.fit(None, [], num_steps=9), "Did you mean train_total_steps"),
        (lambda: jaxloop.OuterLoop.check(None, None, num_steps=9), "Did you mean train_total_steps"),
        (lambda: jf.loop(0, [], {}, num_steps=9), "Did you mean stop"),
        (lambda: every(step=3), "every has no argument 'step'. Did you mean 'steps'"),
        (lambda: jaxloop.data.batched([1], 1, shuffle=True), "batched has no argument 'shuffle'. Did you mean seed"),
    ],
)
def test_usual_wrong_names_of_lengths_are_answered_with_the_right_one(call, meant):
    with pytest.raises(TypeError, match=meant):
        call()


# Custom schedules --------------------------------------------------------------------------------------


class Squares(jaxloop.Schedule):
    def fires(self, before, now):
        return int(now.steps**0.5) > int(before.steps**0.5)


@pytest.mark.parametrize("options", [{}, {"steps_per_dispatch": 4}], ids=str)
@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (lambda: Squares(), [1, 4, 9, 16]),
        (lambda: Squares() | at(7), [1, 4, 7, 9, 16]),
        (lambda: every(2) & Squares(), [4, 16]),
        (lambda: ~(Squares() | every(2)), [3, 5, 7, 11, 13, 15, 17, 19]),
    ],
    ids=["alone", "or", "and", "not"],
)
def test_a_custom_schedule_is_exact_alone_and_joined(schedule, expected, options):
    step, state, batches = examples.tiny_regression(num_batches=20)
    action = Record(schedule())
    train_loop = jaxloop.TrainLoop(step, end_actions=[action], **options)
    outer_loop = jaxloop.OuterLoop(train_loop, log_interval=every(steps=5))
    assert list(outer_loop.check(state, batches).calls[action].steps) == expected
    outer_loop(state, batches)
    assert action.seen == expected


# Before the first update -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "steps"), [(at(0), [0]), (at(samples=0) | every(4), [0, 4, 8, 12]), (~at(5) & every(5), [10])], ids=str
)
def test_schedules_can_fire_before_the_first_update(schedule, steps):
    step, state, batches = examples.tiny_regression()
    what = lambda state, outputs, step_num, **_: (step_num, int(state.step), dict(outputs) == {})
    note, evaluated = Record(schedule, what), Record()
    train_loop, eval_loop = jaxloop.TrainLoop(step, end_actions=[note]), jaxloop.EvalLoop(step, end_actions=[evaluated])
    outer_loop = jaxloop.OuterLoop(train_loop, [eval_loop])
    spec = jaxloop.EvalSpec(batches[:2], interval=schedule)
    report = outer_loop.check(state, batches, 12, 12, [spec])
    assert list(report.calls[note].steps) == steps
    outer_loop(state, batches, 12, 12, [spec])
    assert evaluated.seen == outer_loop.history.collect("steps", "eval.loss")[0] == steps
    assert note.seen == [(step, step, step == 0) for step in steps]


@pytest.mark.parametrize("resumed_at", [0, 8])
def test_step_0_does_not_fire_again_after_a_resume(resumed_at, tmp_path):
    schedule = at(0) | every(8)

    def run(total):
        step, state, batches = examples.tiny_regression()
        note = Record(schedule)
        outer_loop = saving(tmp_path, at(0) | at(resumed_at), step, note, eval_loops=[jaxloop.EvalLoop(step)])
        outer_loop(state, batches, total, total, [jaxloop.EvalSpec(batches[:2], interval=schedule)])
        return note.seen, outer_loop.history.collect("steps", "eval.loss")[0]

    assert run(8) == ([0, 8], [0, 8])
    assert run(16) == ([step for step in (8, 16) if step > resumed_at], [0, 8, 16])


def test_a_run_that_starts_later_has_no_step_0():
    step, state, batches = examples.tiny_regression()
    note = Record(at(0) | every(4))
    jaxloop.OuterLoop(jaxloop.TrainLoop(step, end_actions=[note]))(state.replace(step=state.step + 2), batches, 8, 8)
    assert note.seen == [4, 8]
