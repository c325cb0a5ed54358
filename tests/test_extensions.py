"""Extensions: when their hooks are called, and what checkpoints store of them."""

import contextlib

import numpy as np
import pytest
from programs.acts import Do, raising, then_fail
from programs.tiny import BATCHES, EVAL_STEP, STATE, STEP, Regression, experiment, make_step

import jaxloop
from jaxloop import at, checkpoint, every
from jaxloop.engine.agenda import Item, Rank


class Watching(jaxloop.Extension):
    """Records its calls, and counts batches."""

    def __init__(self, name="watching", items=()):
        self.name, self.items, self.calls, self.count = name, items, [], 0

    def begin(self, experiment):
        self.calls.append(("begin", experiment.workdir))
        self.count = 0
        return self.items

    def batch(self, batch, step_num):
        self.count += 1

    def moment(self, now):
        self.calls.append(("moment", now.steps, self.count))

    def end(self, now, reason, error):
        self.calls.append(("end", now.steps, reason, error))

    def state_dict(self):
        return {"count": self.count, "array": np.arange(self.count)}

    def load_state_dict(self, saved):
        self.count = saved["count"]
        assert saved["array"].tolist() == list(range(self.count))


def make(workdir=None, *extensions, **options):
    loop = jaxloop.TrainLoop(STEP, **options)
    return jaxloop.OuterLoop(loop, workdir=workdir, log_interval=every(steps=10), extensions=extensions)


@pytest.mark.parametrize("options", [{}, {"steps_per_dispatch": 4}], ids=["single", "fused"])
def test_each_moment_has_seen_all_batches_up_to_its_step(tmp_path, options):
    watching = Watching()
    outer_loop = make(tmp_path, watching, **options)
    outer_loop(STATE, BATCHES, 25)
    assert watching.calls[0] == ("begin", tmp_path) and watching.calls[-1] == ("end", 25, "finished", None)
    moments = watching.calls[1:-1]
    assert sorted({step for _, step, _ in moments}) == [0, 10, 20, 25]
    assert all(step == count for _, step, count in moments)


def test_the_end_is_told_with_the_error_after_the_checkpoint(tmp_path):
    seen = []

    class Ending(jaxloop.Extension):
        def end(self, now, reason, error):
            seen.append((now.steps, reason, error, checkpoint.all_steps(tmp_path / "checkpoints")))

    outer_loop = make(tmp_path, Ending())
    with pytest.raises(OSError, match="gone") as raised:
        outer_loop(STATE, then_fail(BATCHES[:7], OSError("gone")))
    assert seen == [(7, "error: OSError: gone", raised.value, [7])]


def test_a_resumed_run_restores_the_states(tmp_path):
    outer_loop = make(tmp_path, Watching(), Watching("another"))
    outer_loop(STATE, BATCHES, 20)
    first, second = Watching(), Watching("new")
    outer_loop = make(tmp_path, first, second)
    outer_loop(STATE, BATCHES, 30)
    assert first.calls[1] == ("moment", 20, 20) and first.count == 30
    assert second.calls[1] == ("moment", 20, 0) and second.count == 10


def test_a_run_that_turns_back_begins_again(tmp_path):
    def once(step_num, history, **_):
        if "detour.step" not in history.paths():
            raise jaxloop.TurnBack(step_num - 1, step_num, "I say so.")

    watching = Watching()
    save = jaxloop.CheckpointAction(tmp_path / "checkpoints", at(0) | every(steps=10))
    outer_loop = make(tmp_path, watching, end_actions=[Do(once, at(15)), save])
    outer_loop(STATE, BATCHES, 20)
    told = [each for each in watching.calls if each[0] != "moment"]
    begin = ("begin", tmp_path)
    assert told == [begin, ("end", 15, "a detour", None), begin, ("end", 20, "finished", None)]
    assert watching.count == 20  # 10 from the checkpoint, and 10 after it.


def test_an_action_outside_an_outer_loop_cannot_turn_back():
    with pytest.raises(jaxloop.TurnBack, match="It looks bad. Only the train loop of an OuterLoop"):
        jaxloop.TrainLoop(STEP, end_actions=[Turns(at(5))])(STATE, BATCHES)


def test_items_of_an_extension_are_called_when_they_are_due():
    class Every3(Item):
        name = "every 3"
        interval = every(steps=3)

        def call(self, moment):
            steps.append(moment.now.steps)
            return True

    steps = []
    outer_loop = make(None, Watching(items=[Every3(Rank.ACTION)]))
    outer_loop(STATE, BATCHES, 10)
    assert steps == [3, 6, 9]


def test_an_error_at_the_end_is_logged_and_the_others_are_told(caplog):
    watching, broken = Watching(), type("Broken", (jaxloop.Extension,), {"end": raising(OSError("no network"))})
    outer_loop = make(None, watching, broken())
    state, _ = outer_loop(STATE, BATCHES, 10)
    assert int(state.step) == 10 and watching.calls[-1][0] == "end" and "no network" in caplog.text


def test_a_run_without_training_is_watched_too():
    watching = Watching()
    outer_loop = jaxloop.OuterLoop(None, [jaxloop.EvalLoop(EVAL_STEP)], extensions=[watching])
    outer_loop(STATE, eval_specs=[jaxloop.EvalSpec(BATCHES[:3])])
    assert watching.calls == [("begin", None), ("end", 0, "finished", None)]


def test_what_is_no_extension_and_two_of_a_name_are_refused():
    with pytest.raises(TypeError, match=r"OuterLoop.extensions must contain Extensions"):
        make(None, "log")
    with pytest.raises(ValueError, match="Two extensions have the same name"):
        make(None, Watching(), Watching())


class Numbers(jaxloop.Extension):
    """Records the number of each step's batch, and drops those that a resumed run repeats."""

    def __init__(self, seen):
        self.seen, self.has_begun = seen, False

    def moment(self, now):
        if not self.has_begun:
            self.seen[:] = [pair for pair in self.seen if pair[0] <= now.steps]
        self.has_begun = True

    def batch(self, batch, step_num):
        self.seen.append((step_num, int(batch["number"][0])))


@pytest.mark.parametrize("at_once", [1, 4])
def test_a_batch_comes_with_the_number_of_its_step_also_after_a_failed_step(at_once, tmp_path):
    fails, seen = True, []

    def preprocess(self, batch):
        if fails and int(batch["number"][0]) == 24:
            raise OSError("a bad batch")
        return batch

    def batch_of(number):
        return {**BATCHES[number % 100], "number": np.full([8], number)}

    for fails in (True, False):
        step = make_step(type("Fails", (Regression,), {"preprocess_batch": preprocess}))
        loop = jaxloop.TrainLoop(step, steps_per_dispatch=at_once)
        outer_loop = jaxloop.OuterLoop(loop, workdir=tmp_path, extensions=[Numbers(seen)])
        with pytest.raises(OSError, match="a bad batch") if fails else contextlib.nullcontext():
            outer_loop(STATE, jaxloop.from_index(batch_of), 40)
        assert seen == [(number + 1, number) for number in range(25 if fails else 40)]


@pytest.mark.parametrize("hook", ["begin", "moment", "batch", "state_dict"])
def test_an_error_names_the_extension(hook, tmp_path):
    fail = raising(OSError("a full disk"))
    fail.__qualname__ = f"Mine.{hook}"
    outer_loop = make(tmp_path, type("Mine", (jaxloop.Extension,), {hook: fail})())
    with pytest.raises(OSError, match="a full disk") as caught:
        outer_loop(STATE, BATCHES, 20)
    assert any(f"in Mine.{hook}, an extension" in note for note in caught.value.__notes__)


class Turns(jaxloop.Action):
    ended = ()

    def __call__(self, state, outputs, *, step_num, **context):
        raise jaxloop.TurnBack(step_num, step_num, "It looks bad.")

    def end_run(self, status):
        self.ended = [*self.ended, status]


def test_a_run_that_cannot_turn_back_ends_as_failed():
    action = Turns(every(steps=10))
    with pytest.raises(RuntimeError, match="must return to a checkpoint"):
        experiment(action)(STATE, BATCHES, 40)
    assert action.ended == ["failed"]


def test_all_extensions_end_although_one_is_interrupted():
    ended = []

    class Ends(jaxloop.Extension):
        def __init__(self, name):
            self.name = name

        def end(self, now, reason, error):
            ended.append(self.name)
            if self.name == "second":
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        experiment(extensions=[Ends("first"), Ends("second"), Ends("third")])(STATE, BATCHES)
    assert ended == ["third", "second", "first"]
