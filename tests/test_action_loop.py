import numpy as np
import pytest

from jaxloop import actions, examples, types
from jaxloop.action_loop import ActionLoop
from jaxloop.train_loop import TrainLoop


class Note(actions.Action):
    """Notes at which steps it was called, and with how many losses."""

    def __init__(self, interval=1, fails_at=None):
        super().__init__(interval)
        self.noted = []
        self.fails_at = fails_at

    def __call__(self, state, outputs, *, step_num, **kwargs):
        if step_num == self.fails_at:
            raise RuntimeError("no space left")
        self.noted.append((step_num, None if outputs is None else len(outputs["loss"])))


def test_an_interval_counts_loops_and_gets_all_outputs_since():
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


def test_loop_count_can_be_set_for_intervals_to_go_on():
    note = Note(3)
    step, state, batches = examples.tiny_regression()
    loop = TrainLoop(step, end_actions=[note])
    loop.loop_count = 2
    loop(state, batches, num_steps=5)
    assert note.noted == [(5, 5)]
    with pytest.raises(ValueError, match="loop_count must be a non-negative int, got -1"):
        loop.loop_count = -1


def test_a_loop_without_a_batch_is_no_loop():
    note = Note()
    step, state, _ = examples.tiny_regression()
    loop = ActionLoop(step, end_actions=[note])
    loop(state, [])
    assert (note.noted, loop.loop_count) == ([], 0)


def test_an_action_that_raises_is_named_and_the_state_kept():
    step, state, batches = examples.tiny_regression()
    loop = TrainLoop(step, end_actions=[Note(fails_at=5)])
    with pytest.raises(RuntimeError, match="no space left") as caught:
        loop(state, batches, num_steps=5)
    assert caught.value.__notes__ == ["in Note(interval=1), after step 5"]
    assert int(loop.rescued_state.step) == 5


def test_an_action_can_stop_the_experiment():
    class Stop(actions.Action):
        def __call__(self, state, outputs, **kwargs):
            outputs[types.STOP_LOOP] = True

    step, state, batches = examples.tiny_regression()
    _, outputs = ActionLoop(step, end_actions=[Stop()])(state, batches, num_steps=5)
    assert outputs[types.STOP_LOOP] is True


@pytest.mark.parametrize(
    ("interval", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError), ("2", TypeError)]
)
def test_an_interval_must_be_a_positive_int(interval, error):
    with pytest.raises(error, match="Note.interval must be a positive int, got"):
        Note(interval)


def test_what_is_no_action_is_refused():
    step, _, _ = examples.tiny_regression()
    with pytest.raises(TypeError, match="An action must be a jaxloop.actions.Action, got <function"):
        ActionLoop(step, end_actions=[lambda state, outputs: None])


def test_an_action_that_does_not_come_due_keeps_no_images():
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
