import statistics
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from clu import metrics as clu_metrics
from programs.clock import Clock

from jaxloop import (
    CheckpointSpec,
    Elapsed,
    OuterLoop,
    actions,
    at,
    checkpoint,
    every,
    examples,
    from_index,
    last,
    metrics,
    stat_loop,
    summarize,
    types,
)
from jaxloop.action_loop import ActionLoop
from jaxloop.train_loop import TrainLoop


class Note(actions.Action):
    """Records the step and the number of losses of each call."""

    def __init__(self, interval=1, fails_at=None):
        super().__init__(interval)
        self.noted = []
        self.fails_at = fails_at

    def __call__(self, state, outputs, *, step_num, **kwargs):
        if step_num == self.fails_at:
            raise RuntimeError("no space left")
        self.noted.append((step_num, None if outputs is None else len(outputs["loss"])))


def test_int_interval_counts_loops_and_accumulates_outputs():
    begin, each, second, third = Note(2), Note(), Note(2), Note(3)
    step, state, batches = examples.tiny_regression()
    loop = ActionLoop(step, begin_actions=[begin], end_actions=[each, second, third])
    for _ in range(4):
        state, _ = loop(state, batches, num_steps=5)
    assert begin.noted == [(5, None), (15, None)]
    assert each.noted == [(5, 5), (10, 5), (15, 5), (20, 5)]
    assert second.noted == [(10, 10), (20, 10)]
    assert third.noted == [(15, 15)]
    assert loop.loop_count == 4


def test_setting_loop_count_resumes_intervals():
    note = Note(3)
    step, state, batches = examples.tiny_regression()
    loop = TrainLoop(step, end_actions=[note])
    loop.loop_count = 2
    loop(state, batches, num_steps=5)
    assert note.noted == [(5, 5)]
    with pytest.raises(ValueError, match="loop_count must be a non-negative int, got -1"):
        loop.loop_count = -1


def test_empty_loop_is_not_counted():
    note = Note()
    step, state, _ = examples.tiny_regression()
    loop = ActionLoop(step, end_actions=[note])
    loop(state, [])
    assert (note.noted, loop.loop_count) == ([], 0)


def test_error_in_an_action_names_it_and_keeps_the_state():
    step, state, batches = examples.tiny_regression()
    loop = TrainLoop(step, end_actions=[Note(fails_at=5)])
    with pytest.raises(RuntimeError, match="no space left") as caught:
        loop(state, batches, num_steps=5)
    assert caught.value.__notes__ == ["in Note(interval=1), after step 5"]
    assert int(loop.rescued_state.step) == 5


def test_action_can_stop_the_run():
    class Stop(actions.Action):
        def __call__(self, state, outputs, **kwargs):
            outputs[types.STOP_LOOP] = True

    step, state, batches = examples.tiny_regression()
    _, outputs = ActionLoop(step, end_actions=[Stop()])(state, batches, num_steps=5)
    assert outputs[types.STOP_LOOP] is True


@pytest.mark.parametrize(
    ("interval", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError), ("2", TypeError)]
)
def test_interval_must_be_a_positive_int(interval, error):
    with pytest.raises(error, match="Note.interval must be a positive int, or a schedule"):
        Note(interval)


def test_non_action_raises():
    step, _, _ = examples.tiny_regression()
    with pytest.raises(TypeError, match="An action must be a jaxloop.Action, got <function"):
        ActionLoop(step, end_actions=[lambda state, outputs: None])


def test_images_of_loops_without_a_call_are_dropped():
    class Images(type(examples.tiny_regression()[0])):
        def end(self, state, outputs):
            return state, {**outputs, "image": np.zeros([8, 8])}

    class Size(Note):
        def __call__(self, state, outputs, **kwargs):
            self.noted.append((len(outputs["loss"]), len(outputs["image"])))

    tiny, state, batches = examples.tiny_regression()
    size = Size(interval=4)
    step = Images(tiny.base_prng, tiny.model, tiny.optimizer)
    loop = ActionLoop(step, end_actions=[size])
    for _ in range(4):
        state, _ = loop(state, batches, num_steps=2)
    assert size.noted == [(8, 2)]


# Inside the loop -----------------------------------------------------------------------------------


class Seen(actions.Action):
    """Records the arguments of each call."""

    def __init__(self, interval=1, **options):
        super().__init__(interval)
        self.calls = []
        self.__dict__.update(options)

    def __call__(self, state, outputs, *, elapsed, **kwargs):
        self.calls.append((elapsed.steps, int(state.step), dict(outputs), kwargs))

    @property
    def steps(self):
        return [call[0] for call in self.calls]


def test_scheduled_action_gets_its_steps_state_and_the_outputs_since_its_last_call():
    seen = Seen(every(steps=7))
    step, state, batches = examples.tiny_regression()
    loop = TrainLoop(step, end_actions=[seen])
    state, first = loop(state, batches, num_steps=10)
    state, second = loop(state, batches, num_steps=10)
    assert [(count, step_num) for count, step_num, _, _ in seen.calls] == [(7, 7), (14, 14)]
    losses = [*first["loss"], *second["loss"]]
    assert seen.calls[0][2]["loss"] == losses[:7]
    assert seen.calls[1][2]["loss"] == losses[7:14]
    assert len(second["loss"]) == 10


def test_mid_loop_action_gets_the_weighted_mean_over_its_interval():
    probe = Weigh(every(steps=2))
    step, state, _ = examples.tiny_regression()
    rows = lambda n, y: {"x": np.zeros([n, 3], np.float32), "y": np.full([n, 1], y, np.float32)}
    frozen = jax.tree.map(np.zeros_like, state.params)
    batches = [rows(6, 1.0), rows(2, 3.0), rows(1, 0.0), rows(3, 0.0)]
    ActionLoop(step, end_actions=[probe])(state.replace(params=frozen, tx=optax.set_to_zero()), batches)
    assert probe.means == [pytest.approx((6 * 1.0 + 2 * 9.0) / 8), 0.0]


class Weigh(actions.Action):
    def __init__(self, interval):
        super().__init__(interval)
        self.means = []

    def __call__(self, state, outputs, **kwargs):
        self.means.append(summarize(outputs)["loss"])


def test_clu_metrics_are_merged_per_interval_and_per_loop():
    class Counting(type(examples.tiny_regression()[0])):
        def run(self, state, batch):
            state, _ = super().run(state, batch)
            return state, {"loss": clu_metrics.Average.from_model_output(values=batch["x"][:, 0])}

    tiny, state, batches = examples.tiny_regression()
    step = Counting(tiny.base_prng, tiny.model, tiny.optimizer, train=True)
    probe = Weigh(every(steps=3))
    _, outputs = TrainLoop(step, end_actions=[probe])(state, batches, num_steps=8)
    values = [float(batch["x"][:, 0].mean()) for batch in batches[:8]]
    np.testing.assert_allclose(probe.means, [np.mean(values[:3]), np.mean(values[3:6])], rtol=1e-5)
    np.testing.assert_allclose(summarize(outputs)["loss"], np.mean(values), rtol=1e-5)


def test_action_without_outputs_does_not_synchronize(monkeypatch):
    waits = []
    step, state, batches = examples.tiny_regression()
    state, _ = step(state, batches[0])
    seen = Seen(every(steps=2), uses_outputs=False)
    reads = lambda tree: any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(tree))
    for name in ("fetch", "wait"):
        real = getattr(metrics, name)
        monkeypatch.setattr(
            metrics, name, lambda tree, real=real: (reads(tree) and waits.append(seen.steps)) or real(tree)
        )
    TrainLoop(step, end_actions=[seen], stat_names=[])(state, batches, num_steps=20)
    # It waits only for `state.step` (at the start, and when its first value is ready) and at the end.
    assert {len(steps) for steps in waits} == {0, 10}
    assert seen.calls[0][2] == {}


@pytest.mark.parametrize("nan_policy", ["ignore", "raise"])
def test_action_that_does_not_need_all_outputs_gets_the_newest_ready_values(nan_policy):
    step, state, batches = examples.tiny_regression()
    seen = Seen(every(steps=5), needs_all_outputs=False)
    _, outputs = TrainLoop(step, end_actions=[seen], nan_policy=nan_policy)(state, batches, num_steps=200)
    assert any(given for _, _, given, _ in seen.calls)
    for _, _, given, _ in seen.calls:
        assert given.keys() <= {"loss"} and all(value in outputs["loss"] for value in given.values())


def test_action_is_called_at_most_once_per_step():
    seen = Seen(every(steps=5) | every(loops=1))
    step, state, batches = examples.tiny_regression()
    TrainLoop(step, end_actions=[seen])(state, batches[:10])  # The end of the data is known only after step 10.
    assert seen.steps == [5, 10]


def test_last_fires_at_the_end_of_a_standalone_loop():
    seen = Seen(every(steps=4) | last())
    step, state, batches = examples.tiny_regression()
    TrainLoop(step, end_actions=[seen])(state, batches, num_steps=10)
    assert seen.steps == [4, 8, 10]


def test_mid_loop_action_can_stop_the_loop():
    class Stop(actions.Action):
        def __call__(self, state, outputs, **kwargs):
            outputs[types.STOP_LOOP] = True

    step, state, batches = examples.tiny_regression()
    state, outputs = TrainLoop(step, end_actions=[Stop(at(6))])(state, batches, num_steps=50)
    assert int(state.step) == len(outputs["loss"]) == 6
    assert outputs[types.STOP_LOOP] is True


def test_error_in_a_mid_loop_action_names_it_and_keeps_the_state():
    step, state, batches = examples.tiny_regression()
    loop = TrainLoop(step, end_actions=[Note(every(steps=3), fails_at=6)])
    with pytest.raises(RuntimeError, match="no space left") as caught:
        loop(state, batches, num_steps=20)
    assert "in Note(interval=every(steps=3)), after step 6" in caught.value.__notes__
    assert int(loop.rescued_state.step) == 6


def test_statistics_cover_the_time_since_the_last_call(set_clock):
    clock = set_clock(Clock())
    seen = Seen(every(steps=4))
    step, state, batches = examples.tiny_regression()
    loop = TrainLoop(step, end_actions=[seen], stat_names=stat_loop.ALL_STATS)
    loop(state, clock.during(batches, [1, 1, 1, 1, 3, 3, 3, 3, 9]), num_steps=9)
    speeds = [outputs[stat_loop.STAT_STEPS_PER_SEC] for _, _, outputs, _ in seen.calls]
    assert speeds == [1, pytest.approx(1 / 3)]
    assert [kwargs["spent"].data for _, _, _, kwargs in seen.calls] == [4, 12]
    assert [kwargs["spent"].samples for _, _, _, kwargs in seen.calls] == [32, 32]
    assert loop.elapsed == Elapsed(9, 72, 25.0, 1)


@pytest.mark.parametrize("options", [{}, {"steps_per_dispatch": 4}, {"nan_policy": "raise"}])
def test_time_schedule_fires_after_the_step_or_dispatch(options, set_clock):
    clock, seen = set_clock(Clock()), Seen(every(time=10))
    step, state, batches = examples.tiny_regression()
    loop = TrainLoop(step, end_actions=[seen], **options)
    loop(state, clock.during((batches * 100)[:100], [1] * 100), num_steps=100)
    called_at = [step_num for step_num, *_ in seen.calls]
    if not options.get("steps_per_dispatch"):
        assert called_at == [*range(10, 101, 10)]
    else:  # After the dispatch during which it becomes due.
        assert called_at == [12, 20, 32, 40, 52, 60, 72, 80, 92, 100]


def test_begin_action_schedule_is_checked_when_a_loop_begins():
    note = Note(every(steps=10) | every(loops=3))
    step, state, batches = examples.tiny_regression()
    loop = TrainLoop(step, begin_actions=[note])
    for _ in range(5):
        state, _ = loop(state, batches, num_steps=4)
    assert [step_num for step_num, _ in note.noted] == [8, 12]


def test_step_action_schedule_counts_training_steps():
    begin = Note(every(steps=4))
    tiny, state, batches = examples.tiny_regression()
    loop = TrainLoop(type(tiny)(tiny.base_prng, tiny.model, tiny.optimizer, train=True, begin_actions=[begin]))
    for _ in range(3):
        state, _ = loop(state, batches, num_steps=3)
    assert [step_num for step_num, _ in begin.noted] == [3, 7]  # Before updates 4 and 8.

    class Count(actions.Action):
        steps = ()

        def __call__(self, state, outputs, *, elapsed, **kwargs):
            self.steps = (*self.steps, (elapsed.steps, elapsed.samples))

    count = Count(every(samples=24))
    step = type(tiny)(tiny.base_prng, tiny.model, tiny.optimizer, train=True, end_actions=[count])
    TrainLoop(step)(tiny.initialize_model([1, 3]), batches, num_steps=7)
    assert count.steps == ((3, 24), (6, 48))


def test_standalone_loop_saves_on_a_schedule(tmp_path):
    step, state, batches = examples.tiny_regression()
    save = actions.CheckpointAction(tmp_path, every(steps=3))
    TrainLoop(step, end_actions=[save])(state, batches, 10)
    assert checkpoint.all_steps(tmp_path) == [3, 6, 9]


@pytest.mark.parametrize("is_resumed", [False, True])
def test_memory_per_call_does_not_grow_with_the_loop(is_resumed, tmp_path):
    step, state, batches = examples.tiny_regression()
    allocated, current = [], 0

    class Measure(actions.Action):
        uses_outputs = False

        def __call__(self, state, outputs, **kwargs):
            nonlocal current
            allocated.append(tracemalloc.get_traced_memory()[1] - current)
            current = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()

    def run(failing_batch, *more_actions):
        def get(index):
            if index == failing_batch:
                raise OSError("gone")
            return batches[index % len(batches)]

        save = actions.CheckpointAction(tmp_path, at(5))
        outer_loop = OuterLoop(
            TrainLoop(step, end_actions=[save, *more_actions]),
            checkpoint_spec=CheckpointSpec(tmp_path),
            log_interval=every(steps=50),
        )
        outer_loop(jax.tree.map(jnp.copy, state), from_index(get), 8_000)

    if is_resumed:  # In the middle of a loop.
        with pytest.raises(OSError, match="gone"):
            run(7)
    tracemalloc.start()
    try:
        run(None, Measure(every(steps=50)))
    finally:
        tracemalloc.stop()
    early, late = statistics.median(allocated[5:25]), statistics.median(allocated[-20:])
    assert late - early < 20_000  # Bytes. A list with one number per step takes 64,000.


def test_returned_outputs_do_not_change_while_an_action_accumulates_loops():
    step, state, batches = examples.tiny_regression()
    loop = ActionLoop(step, end_actions=[Seen(interval=4)])
    returned = []
    for _ in range(4):
        state, outputs = loop(state, batches, num_steps=3)
        returned.append(outputs)
    assert [(len(each["loss"]), each.num_examples) for each in returned] == [(3, [8, 8, 8])] * 4
